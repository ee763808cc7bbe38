// RUN: %lowbit-opt %s --lower-tiles=target=sm_90a --canonicalize | %filecheck %s

// Sums that go to another block of a cluster: written by st.async, counted by a signal there, and no barrier that waits
// for other memory.

!buffer = !lowbit.shared<[2, 64, 4], f32, [256, 4, 1], 0>
!signals = !lowbit.shared<[2, 1, 2], i32, [2, 2, 1], 0>
!tile = !lowbit.reg<[2, 64, 4], f32, "local(2, 1, 1).spatial(1, 64, 1).local(1, 1, 4)">
!y = !lowbit.global<[2, 64, 4], f32, [256, 4, 1], [1, 1, 1]>
// CHECK-LABEL: gpu.func @exchange
// Each of two warps has a signal, which other blocks may count at.
// CHECK-COUNT-2: nvvm.mbarrier.init %{{.*}}, %c1_i32
// CHECK:         nvvm.fence.mbarrier.init
// CHECK:         nvvm.cluster.arrive.relaxed {aligned}
// CHECK:         nvvm.cluster.wait {aligned}
// Both the buffer and the signal are those of the other block.
// CHECK:         %[[BUFFER:.*]] = nvvm.mapa %{{.*}}, %[[RANK:.*]] : !llvm.ptr<3> -> !llvm.ptr<7>
// CHECK:         %[[SIGNAL:.*]] = nvvm.mapa %{{.*}}, %[[RANK]] : !llvm.ptr<3> -> !llvm.ptr<7>
// CHECK-COUNT-2: st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [$0], {$2, $3, $4, $5}, [$1];
// One lane of a warp says what it waits for.
// CHECK:         scf.if
// CHECK-NEXT:      mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], 1024;
// CHECK:         mbarrier.try_wait.parity.shared::cta.b64
"lowbit.program"() ({
^bb0(%py: !llvm.ptr<1>):
  %c0 = arith.constant 0 : i32
  %c1 = arith.constant 1 : i32
  %y = "lowbit.global_view"(%py) {operandSegmentSizes = array<i32: 1, 0>} : (!llvm.ptr<1>) -> !y
  %buffer = "lowbit.alloc_shared"() : () -> !buffer
  %signals = "lowbit.alloc_signals"() {arrivals = 1 : i64} : () -> !signals
  "lowbit.barrier"() {scope = "cluster_arrive", warps = 1, relaxed} : () -> ()
  %rank = "lowbit.block_id"() {axis = 0} : () -> i32
  %other = arith.subi %c1, %rank : i32
  %mine = "lowbit.constant"() {value = 1.0 : f32} : () -> !tile
  "lowbit.barrier"() {scope = "cluster_wait", warps = 1} : () -> ()
  "lowbit.send"(%mine, %buffer, %other, %signals, %c0, %c0, %c0, %c0) {operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 3>}
    : (!tile, !buffer, i32, !signals, i32, i32, i32, i32) -> ()
  "lowbit.arrive"(%signals, %c0) {expected = 1024 : i64, each_warp} : (!signals, i32) -> ()
  "lowbit.await"(%signals, %c0, %c0) : (!signals, i32, i32) -> ()
  %theirs = "lowbit.load"(%buffer, %c0, %c0, %c0) {boundary = ["none", "none", "none"], operandSegmentSizes = array<i32: 1, 3>}
    : (!buffer, i32, i32, i32) -> !tile
  "lowbit.store"(%theirs, %y, %c0, %c0, %c0) {boundary = ["none", "none", "none"], operandSegmentSizes = array<i32: 1, 1, 3>}
    : (!tile, !y, i32, i32, i32) -> ()
  "lowbit.return"() : () -> ()
}) {sym_name = "exchange", threads = 64, grid = [2, 1, 1], params = ["y"], workspace = 0, cluster = [2, 1, 1]} : () -> ()
