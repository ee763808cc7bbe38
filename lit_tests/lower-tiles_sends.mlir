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
lowbit.program @exchange(%py: !llvm.ptr<1>) attributes {threads = 64, grid = [2, 1, 1], params = ["y"], workspace = 0,
    cluster = [2, 1, 1]} {
  %c0 = arith.constant 0 : i32
  %c1 = arith.constant 1 : i32
  %y = lowbit.global_view %py : !llvm.ptr<1> -> !y
  %buffer = lowbit.alloc_shared : !buffer
  %signals = lowbit.alloc_signals {arrivals = 1} : !signals
  lowbit.barrier {scope = "cluster_arrive", relaxed}
  %rank = lowbit.block_id {axis = 0}
  %other = arith.subi %c1, %rank : i32
  %mine = lowbit.constant {value = 1.0 : f32} : !tile
  lowbit.barrier {scope = "cluster_wait"}
  lowbit.send %mine, %buffer[%c0, %c0, %c0], %other, %signals, %c0 : !tile, !buffer, !signals
  lowbit.arrive %signals, %c0 {expected = 1024, each_warp} : !signals
  lowbit.await %signals, %c0, %c0 : !signals
  %theirs = lowbit.load %buffer[%c0, %c0, %c0] : !buffer -> !tile
  lowbit.store %theirs, %y[%c0, %c0, %c0] : !tile, !y
  lowbit.return
}
