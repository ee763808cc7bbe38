// RUN: %lowbit-opt %s --lower-tiles=target=sm_90a --canonicalize | %filecheck %s

// Sums of wgmma that stay in place, and the copy engine: registers that LLVM never sees until they are read.

// CHECK-LABEL: gpu.func @products
// Signals for the copy engine are shown to it.
// CHECK:         nvvm.mbarrier.init
// CHECK:         nvvm.fence.mbarrier.init
// One thread says how many bytes come, and asks for them.
// CHECK:         scf.if
// CHECK:           mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], 1024;
// CHECK:           cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1, {$2, $3}], [$4];
// CHECK:         mov.f32 wgmma_sum3072, 0f00000000;
// CHECK:         mbarrier.try_wait.parity.shared::cta.b64
// Two instructions onto the sums, and one group.
// CHECK:         wgmma.fence.sync.aligned;
// CHECK-SAME:    m64n8k16.f32.f16.f16 {wgmma_sum3072, wgmma_sum3073, wgmma_sum3074, wgmma_sum3075}
// CHECK-SAME:    wgmma.commit_group.sync.aligned;
// CHECK:         wgmma.wait_group.sync.aligned 1;
// One lane of a warp arrives.
// CHECK:         mbarrier.arrive.shared::cta.b64 _, [$0];
// CHECK:         wgmma.wait_group.sync.aligned 0;
// CHECK-SAME:    mov.f32 $0, wgmma_sum3072;
!a = !lowbit.reg<[64, 32], f16, "spatial(4, 1).local(1, 2).column_local(2, 2).spatial(8, 4).local(1, 2)">
!x = !lowbit.shared<[1, 8, 64], f16, [512, 64, 1], 128>
!signals = !lowbit.shared<[1, 1, 2], i32, [2, 2, 1], 0>
!sums = !lowbit.reg<[64, 8], f32, "spatial(4, 1).local(2, 1).spatial(8, 4).local(1, 2)">
!y = !lowbit.global<[64, 8], f32, [8, 1], [1, 1]>
"lowbit.program"() ({
^bb0(%map: !llvm.ptr, %py: !llvm.ptr<1>):
  %c0 = arith.constant 0 : i32
  %true = arith.constant true
  %y = "lowbit.global_view"(%py) {operandSegmentSizes = array<i32: 1, 0>} : (!llvm.ptr<1>) -> !y
  %x = "lowbit.alloc_shared"() : () -> !x
  %there = "lowbit.alloc_signals"() {arrivals = 1 : i64} : () -> !signals
  %sums = "lowbit.accumulator"() : () -> !sums
  "lowbit.one_thread"(%true) ({
    "lowbit.arrive"(%there, %c0) {expected = 1024 : i64} : (!signals, i32) -> ()
    "lowbit.copy_box"(%map, %x, %c0, %there, %c0, %c0, %c0) {operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 2>} : (!llvm.ptr, !x, i32, !signals, i32, i32, i32) -> ()
  }) : (i1) -> ()
  "lowbit.clear_accumulator"(%sums) : (!sums) -> ()
  %a = "lowbit.constant"() {value = 1.0 : f32} : () -> !a
  "lowbit.materialize"(%a) : (!a) -> ()
  "lowbit.await"(%there, %c0, %c0) : (!signals, i32, i32) -> ()
  "lowbit.accumulate"(%a, %x, %sums) {start = 0 : i64} : (!a, !x, !sums) -> ()
  "lowbit.await_products"() {pending = 1 : i64} : () -> ()
  "lowbit.arrive"(%there, %c0) {each_warp} : (!signals, i32) -> ()
  %total = "lowbit.read_accumulator"(%sums) : (!sums) -> !sums
  "lowbit.store"(%total, %y, %c0, %c0) {boundary = ["none", "none"], operandSegmentSizes = array<i32: 1, 1, 2>} : (!sums, !y, i32, i32) -> ()
  "lowbit.return"() : () -> ()
}) {grid = ["sm_count / 2", 1, 1], params = ["map", "y"], sym_name = "products", threads = 128 : i64, workspace = 0 : i64} : () -> ()

// One of two blocks of rows, and a wait for all but the last product that finishes no reads.
// CHECK-LABEL: gpu.func @blocks
// CHECK-NOT:     wgmma_sum3072,
// CHECK:         m64n8k16.f32.f16.f16 {wgmma_sum3076, wgmma_sum3077, wgmma_sum3078, wgmma_sum3079}
// CHECK-SAME:    wgmma.commit_group.sync.aligned;
// CHECK:         wgmma.wait_group.sync.aligned 1;
// CHECK-NEXT:    gpu.return
!a2 = !lowbit.reg<[128, 32], f16, "spatial(4, 1).local(2, 2).column_local(2, 2).spatial(8, 4).local(1, 2)">
!x2 = !lowbit.shared<[1, 8, 64], f16, [512, 64, 1], 128>
!sums2 = !lowbit.reg<[128, 8], f32, "spatial(4, 1).local(2, 1).local(2, 1).spatial(8, 4).local(1, 2)">
"lowbit.program"() ({
^bb0(%py: !llvm.ptr<1>):
  %x = "lowbit.alloc_shared"() : () -> !x2
  %sums = "lowbit.accumulator"() : () -> !sums2
  %a = "lowbit.constant"() {value = 1.0 : f32} : () -> !a2
  "lowbit.accumulate"(%a, %x, %sums) {start = 0 : i64, block = 1 : i64, pending = 1 : i64} : (!a2, !x2, !sums2) -> ()
  "lowbit.return"() : () -> ()
}) {grid = [1, 1, 1], params = ["y"], sym_name = "blocks", threads = 128 : i64, workspace = 0 : i64} : () -> ()
