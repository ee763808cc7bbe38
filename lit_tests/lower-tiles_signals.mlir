// RUN: %lowbit-opt %s --split-input-file --lower-tiles=target=sm_90a --canonicalize --cse | %filecheck %s

// What runs beside a product, and signals in place of barriers.

// What is concurrent does not end a product: its first instructions are under way meanwhile, the rest follows, and one wait is for all.
!x_buffer = !lowbit.shared<[1, 2, 8, 64], f16, [1024, 512, 64, 1], 128>
!a = !lowbit.reg<[1, 64, 128], f16, "spatial(1, 4, 1).local(1, 1, 8).column_local(1, 2, 2).spatial(1, 8, 4).local(1, 1, 2)">
!d = !lowbit.reg<[1, 64, 8], f32, "spatial(1, 4, 1).local(1, 2, 1).spatial(1, 8, 4).local(1, 1, 2)">
// CHECK-LABEL: gpu.func @concurrent
// CHECK:         llvm.inline_asm has_side_effects {{.*}}mov.f32 wgmma_sum0, $0;
// CHECK:         llvm.inline_asm has_side_effects {{.*}}wgmma.fence.sync.aligned;
// CHECK-SAME:      setp.eq.b32 add, $16, $16;
// CHECK-NOT:     wait_group
// CHECK:         scf.if
// CHECK-NEXT:      nvvm.cp.async.commit.group
// CHECK-NEXT:    }
// CHECK:         llvm.inline_asm has_side_effects {{.*}}wgmma.fence.sync.aligned;
// CHECK-SAME:      add.s64 at, at, 64;
// CHECK-NOT:     wgmma.fence
// CHECK:         llvm.inline_asm has_side_effects {{.*}}wgmma.wait_group.sync.aligned 0;
lowbit.program @concurrent(%py: !llvm.ptr<1>, %more: i32) attributes {threads = 128, grid = [1, 1, 1], params = ["y", "more"],
    workspace = 0} {
  %c0 = arith.constant 0 : i32
  %y = lowbit.global_view %py : !llvm.ptr<1> -> !lowbit.global<[1, 64, 8], f32, [512, 1, 64], [1, 1, 1]>
  %x = lowbit.alloc_shared : !x_buffer
  %a = lowbit.constant {value = 1.0 : f32} : !a
  %one = lowbit.constant {value = 1.0 : f32} : !d
  %d = lowbit.warpgroup_mma %a, %x, %one {start = 0} : !a, !x_buffer, !d -> !d
  %again = arith.cmpi slt, %c0, %more : i32
  lowbit.concurrent %again {
    lowbit.commit
  }
  lowbit.store %d, %y[%c0, %c0, %c0] : !d, !lowbit.global<[1, 64, 8], f32, [512, 1, 64], [1, 1, 1]>
  lowbit.return
}

// -----

// Signals: one thread makes them, for the 64 threads of each of two groups; a thread comes to and waits for those of its group.
!signals = !lowbit.shared<[2, 4, 2], i32, [8, 2, 1], 0>
// CHECK-LABEL: gpu.func @signals
// CHECK:         scf.if
// CHECK-COUNT-8:   nvvm.mbarrier.init %{{.*}}, %c64_i32
// CHECK:         gpu.barrier
// CHECK:         arith.muli %{{.*}}, %c4_i32
// CHECK:         nvvm.cp.async.mbarrier.arrive %{{.*}} {noinc = true}
// CHECK:         nvvm.mbarrier.arrive
// CHECK:         llvm.inline_asm has_side_effects {{.*}}mbarrier.try_wait.parity.shared::cta.b64 over, [$0], $1;
// CHECK-SAME:      @!over bra again;
// CHECK-NEXT:    nvvm.fence.proxy
// CHECK:         llvm.inline_asm has_side_effects {{.*}}mbarrier.try_wait
// CHECK-NEXT:    gpu.return
lowbit.program @signals(%i: i32, %parity: i32) attributes {threads = 128, grid = [1, 1, 1], workspace = 0} {
  %signals = lowbit.alloc_signals : !signals
  lowbit.arrive %signals, %i {copies} : !signals
  lowbit.arrive %signals, %i : !signals
  lowbit.await %signals, %i, %parity {async_proxy} : !signals
  lowbit.await %signals, %i, %parity : !signals
  lowbit.return
}
