// RUN: %lowbit-opt %s --split-input-file --pipeline-copies | %filecheck %s

// What a round is: with one stage, and with copies that are started beside a product.

// With one stage, a table is filled in front of the loop, too.
!table = !lowbit.shared<[256, 32], i32, [32, 1], 0>
// CHECK-LABEL: lowbit.program
// CHECK:         lowbit.fill_table %
// CHECK:         scf.for
// CHECK-NEXT:      lowbit.commit
// CHECK-NOT:     lowbit.fill_table
// CHECK:         lowbit.return
lowbit.program @filled_once(%n: i32) attributes {threads = 32, grid = [1, 1, 1], workspace = 0} {
  %c0 = arith.constant 0 : i32
  %c1 = arith.constant 1 : i32
  %table = lowbit.alloc_shared : !table
  scf.for %i = %c0 to %n step %c1 : i32 {
    lowbit.pipeline attributes {num_stages = 1, scope = "block", warps = 1} {
      lowbit.fill_table %table {format = #lowbit.format<"nf4", []>, element = "f16", exponent = 0} : !table
    }
  }
  lowbit.return
}

// -----

// One stage is the loop as it stands: copy, wait for it, two barriers a round.
// CHECK-LABEL: lowbit.program
// CHECK:         lowbit.alloc_shared : !shared_1x64xf16
// CHECK:         scf.for
// CHECK-NEXT:      lowbit.copy_async %
// CHECK-NEXT:      lowbit.commit
// CHECK-NEXT:      lowbit.wait {pending = 0}
// CHECK-NEXT:      lowbit.barrier
// CHECK-NEXT:      lowbit.barrier
!x = !lowbit.global<[16, 64], f16, [64, 1], [1, 1]>
!buffer = !lowbit.shared<[1, 64], f16, [64, 1], 0>
lowbit.program @one(%p: !llvm.ptr<1>, %n: i32) attributes {threads = 32, grid = [1, 1, 1], params = ["x", "n"], workspace = 0} {
  %c0 = arith.constant 0 : i32
  %c1 = arith.constant 1 : i32
  %x = lowbit.global_view %p : !llvm.ptr<1> -> !x
  %buffer = lowbit.alloc_shared : !buffer
  scf.for %i = %c0 to %n step %c1 : i32 {
    lowbit.pipeline attributes {num_stages = 1, scope = "block", warps = 1} {
      lowbit.copy_async %x[%i, %c0], %buffer {layout = "spatial(1, 32).local(1, 2)"} : !x, !buffer
    }
  }
  lowbit.return
}

// -----

// The next round is asked for when the first product of this one is under way, and committed there.
!x = !lowbit.global<[64, 16, 64], f16, [1024, 64, 1], [1, 1, 1]>
!buffer = !lowbit.shared<[1, 16, 64], f16, [1024, 64, 1], 128>
!a = !lowbit.reg<[64, 64], f16, "spatial(4, 1).local(1, 4).column_local(2, 2).spatial(8, 4).local(1, 2)">
!d = !lowbit.reg<[64, 16], f32, "spatial(4, 1).local(1, 2).local(2, 1).spatial(8, 4).local(1, 2)">
// CHECK-LABEL: lowbit.program
// CHECK:         scf.for
// CHECK-NEXT:      lowbit.wait {pending = 0}
// CHECK-NEXT:      lowbit.barrier
// CHECK-NOT:       lowbit.copy_async
// CHECK:           lowbit.warpgroup_mma %
// CHECK:           lowbit.concurrent %
// CHECK:             lowbit.copy_async %
// CHECK:           {{^ +[}]$}}
// CHECK-NEXT:      lowbit.commit
// CHECK-NEXT:      lowbit.warpgroup_mma %
// CHECK:           scf.yield
// CHECK:         lowbit.return
lowbit.program @late(%px: !llvm.ptr<1>) attributes {threads = 128, grid = [1, 1, 1], params = ["x"], workspace = 0} {
  %c0 = arith.constant 0 : i32
  %c1 = arith.constant 1 : i32
  %c5 = arith.constant 5 : i32
  %x = lowbit.global_view %px : !llvm.ptr<1> -> !x
  %buffer = lowbit.alloc_shared : !buffer
  %a = lowbit.constant {value = 1.0 : f32} : !a
  %zero = lowbit.constant {value = 0.0 : f32} : !d
  %d = scf.for %i = %c0 to %c5 step %c1 iter_args(%sum = %zero) -> (!d) : i32 {
    lowbit.pipeline attributes {num_stages = 2, refill = "after_first_mma", scope = "warps", warps = 4, async_proxy} {
      lowbit.copy_async %x[%i, %c0, %c0], %buffer {layout = "local(1, 8, 1).spatial(1, 2, 64).local(1, 1, 1)"} : !x, !buffer
    }
    %one = lowbit.warpgroup_mma %a, %buffer, %sum {start = 0} : !a, !buffer, !d -> !d
    %two = lowbit.warpgroup_mma %a, %buffer, %one {start = 0} : !a, !buffer, !d -> !d
    scf.yield %two : !d
  }
  lowbit.return
}

// -----

// With no barrier in a round: its stage is waited for, and told to have been read, and waited for again before it is filled.
!x = !lowbit.global<[64, 16, 64], f16, [1024, 64, 1], [1, 1, 1]>
!buffer = !lowbit.shared<[1, 16, 64], f16, [1024, 64, 1], 128>
!a = !lowbit.reg<[64, 64], f16, "spatial(4, 1).local(1, 4).column_local(2, 2).spatial(8, 4).local(1, 2)">
!d = !lowbit.reg<[64, 16], f32, "spatial(4, 1).local(1, 2).local(2, 1).spatial(8, 4).local(1, 2)">
// CHECK-LABEL: lowbit.program
// CHECK:         %[[SIGNALS:.*]] = lowbit.alloc_signals : !shared_1x4x2xi32
// CHECK:         lowbit.copy_async %
// CHECK:         lowbit.arrive %[[SIGNALS]], %c0_i32{{.*}} {copies}
// CHECK:         scf.for %[[I:.*]] = %c0_i32
// CHECK:           %[[USE:.*]] = arith.divui
// CHECK:           %[[STAGE:.*]] = arith.remui
// CHECK:           %[[PARITY:.*]] = arith.remui %[[USE]]
// CHECK-NEXT:      lowbit.await %[[SIGNALS]], %[[STAGE]], %[[PARITY]] {async_proxy}
// CHECK-NOT:       lowbit.barrier
// CHECK:           lowbit.warpgroup_mma %
// CHECK:           lowbit.concurrent %
// CHECK:             lowbit.await %[[SIGNALS]], %{{.*}}, %{{.*}} :
// CHECK:             lowbit.copy_async %
// CHECK:             lowbit.arrive %[[SIGNALS]], %{{.*}} {copies}
// CHECK-NEXT:      }
// CHECK:           lowbit.warpgroup_mma %
// CHECK:           lowbit.arrive %[[SIGNALS]], %{{.*}} :
// CHECK:           scf.yield
lowbit.program @per_warp(%px: !llvm.ptr<1>) attributes {threads = 128, grid = [1, 1, 1], params = ["x"], workspace = 0} {
  %c0 = arith.constant 0 : i32
  %c1 = arith.constant 1 : i32
  %c5 = arith.constant 5 : i32
  %x = lowbit.global_view %px : !llvm.ptr<1> -> !x
  %buffer = lowbit.alloc_shared : !buffer
  %a = lowbit.constant {value = 1.0 : f32} : !a
  %zero = lowbit.constant {value = 0.0 : f32} : !d
  %d = scf.for %i = %c0 to %c5 step %c1 iter_args(%sum = %zero) -> (!d) : i32 {
    lowbit.pipeline attributes {num_stages = 2, refill = "per_warp", scope = "warps", warps = 4, async_proxy} {
      lowbit.copy_async %x[%i, %c0, %c0], %buffer {layout = "local(1, 8, 1).spatial(1, 2, 64).local(1, 1, 1)"} : !x, !buffer
    }
    %one = lowbit.warpgroup_mma %a, %buffer, %sum {start = 0} : !a, !buffer, !d -> !d
    %two = lowbit.warpgroup_mma %a, %buffer, %one {start = 0} : !a, !buffer, !d -> !d
    scf.yield %two : !d
  }
  lowbit.return
}
