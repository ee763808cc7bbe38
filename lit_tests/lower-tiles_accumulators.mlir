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
lowbit.program @products(%map: !llvm.ptr, %py: !llvm.ptr<1>) attributes {grid = ["sm_count / 2", 1, 1], params = ["map", "y"],
    threads = 128, workspace = 0} {
  %c0 = arith.constant 0 : i32
  %true = arith.constant true
  %y = lowbit.global_view %py : !llvm.ptr<1> -> !y
  %x = lowbit.alloc_shared : !x
  %there = lowbit.alloc_signals {arrivals = 1} : !signals
  %sums = lowbit.accumulator : !sums
  lowbit.one_thread %true {
    lowbit.arrive %there, %c0 {expected = 1024} : !signals
    lowbit.copy_box %map[%c0, %c0], %x, %c0, %there, %c0 : !llvm.ptr, !x, !signals
  }
  lowbit.clear_accumulator %sums : !sums
  %a = lowbit.constant {value = 1.0 : f32} : !a
  lowbit.materialize %a : !a
  lowbit.await %there, %c0, %c0 : !signals
  lowbit.accumulate %a, %x, %sums {start = 0} : !a, !x, !sums
  lowbit.await_products {pending = 1}
  lowbit.arrive %there, %c0 {each_warp} : !signals
  %total = lowbit.read_accumulator %sums : !sums
  lowbit.store %total, %y[%c0, %c0] : !sums, !y
  lowbit.return
}

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
lowbit.program @blocks(%py: !llvm.ptr<1>) attributes {grid = [1, 1, 1], params = ["y"], threads = 128, workspace = 0} {
  %x = lowbit.alloc_shared : !x2
  %sums = lowbit.accumulator : !sums2
  %a = lowbit.constant {value = 1.0 : f32} : !a2
  lowbit.accumulate %a, %x, %sums {start = 0, block = 1, pending = 1} : !a2, !x2, !sums2
  lowbit.return
}
