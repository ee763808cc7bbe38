// RUN: %lowbit-opt %s --split-input-file --pipeline-copies | %filecheck %s

// Outliers of one token stand in front of a loop. They are asked for behind the copies of weights that are started
// there, and multiplied behind all copies, with sums in the stage of the weights to which none has been started.

!table = !lowbit.global<[5], i32, [1], [1]>
!words = !lowbit.reg<[1, 1, 4, 32], i32, "local(1, 1, 4, 1).spatial(1, 1, 1, 32)">
!x = !lowbit.global<[16, 1024], f16, [1024, 1], [1, 1]>
!d = !lowbit.reg<[1, 16, 8], f32, "local(1, 2, 1).spatial(1, 8, 4).local(1, 1, 2)">
!buffer = !lowbit.shared<[1, 1024], f16, [1024, 1], 0>

// CHECK-LABEL: lowbit.program
// CHECK:         lowbit.copy_async %
// CHECK:         %[[WORDS:.*]] = lowbit.load_outliers %
// CHECK-NEXT:    lowbit.grid_wait
// CHECK:         lowbit.copy_async %
// CHECK:         lowbit.commit
// CHECK:         %[[FREE:.*]] = lowbit.stage %{{.*}}, %c1_i32{{.*}}
// CHECK-NEXT:    %[[FIRST:.*]] = lowbit.sparse_vector %{{.*}}, %[[WORDS]], %[[FREE]],
// CHECK:         scf.for {{.*}} iter_args(%{{.*}} = %[[FIRST]])
lowbit.program @staged(%o: !llvm.ptr<1>, %p: !llvm.ptr<1>, %n: i32) attributes {threads = 32, grid = [1, 1, 1],
    params = ["outliers", "x", "n"], workspace = 0} {
  %c0 = arith.constant 0 : i32
  %c1 = arith.constant 1 : i32
  %table = lowbit.global_view %o : !llvm.ptr<1> -> !table
  %x = lowbit.global_view %p : !llvm.ptr<1> -> !x
  %weights = lowbit.alloc_shared : !buffer
  %buffer = lowbit.alloc_shared : !buffer
  %zero = lowbit.constant {value = 0.0 : f64} : !d
  %words = lowbit.load_outliers %table, %c0, %c0 {splits = 1} : !table -> !words
  %first = lowbit.sparse_vector %table, %words, %weights, %x, %c0, %c0, %zero {splits = 1} : !table, !words, !buffer, !x, !d -> !d
  %total = scf.for %i = %c0 to %n step %c1 iter_args(%c = %first) -> (!d) : i32 {
    lowbit.pipeline attributes {num_stages = 2, scope = "block", warps = 1} {
      lowbit.copy_async %x[%i, %c0], %weights {layout = "spatial(1, 32).local(1, 32)"} : !x, !buffer
      lowbit.grid_wait
      lowbit.copy_async %x[%i, %c0], %buffer {layout = "spatial(1, 32).local(1, 32)"} : !x, !buffer
    }
    scf.yield %c : !d
  }
  lowbit.return
}

// -----

!table = !lowbit.global<[5], i32, [1], [1]>
!words = !lowbit.reg<[1, 1, 4, 32], i32, "local(1, 1, 4, 1).spatial(1, 1, 1, 32)">
!sums = !lowbit.shared<[1, 16, 32], f32, [512, 32, 1], 0>
!x = !lowbit.global<[16, 64], f16, [64, 1], [1, 1]>
!d = !lowbit.reg<[1, 16, 8], f32, "local(1, 2, 1).spatial(1, 8, 4).local(1, 1, 2)">
!buffer = !lowbit.shared<[1, 64], f16, [64, 1], 0>

// With one stage no copy is started in front of the loop, so the kernel before has to be waited for there.
// CHECK-LABEL: lowbit.program
// CHECK:         lowbit.load_outliers %
// CHECK-NEXT:    lowbit.grid_wait
// CHECK-NEXT:    lowbit.sparse_vector %
// CHECK:         scf.for
lowbit.program @one(%o: !llvm.ptr<1>, %p: !llvm.ptr<1>, %n: i32) attributes {threads = 32, grid = [1, 1, 1], params = ["outliers",
    "x", "n"], workspace = 0} {
  %c0 = arith.constant 0 : i32
  %c1 = arith.constant 1 : i32
  %table = lowbit.global_view %o : !llvm.ptr<1> -> !table
  %x = lowbit.global_view %p : !llvm.ptr<1> -> !x
  %buffer = lowbit.alloc_shared : !buffer
  %sums = lowbit.alloc_shared : !sums
  %zero = lowbit.constant {value = 0.0 : f64} : !d
  %words = lowbit.load_outliers %table, %c0, %c0 {splits = 1} : !table -> !words
  %first = lowbit.sparse_vector %table, %words, %sums, %x, %c0, %c0, %zero {splits = 1} : !table, !words, !sums, !x, !d -> !d
  %total = scf.for %i = %c0 to %n step %c1 iter_args(%c = %first) -> (!d) : i32 {
    lowbit.pipeline attributes {num_stages = 1, scope = "block", warps = 1} {
      lowbit.grid_wait
      lowbit.copy_async %x[%i, %c0], %buffer {layout = "spatial(1, 32).local(1, 2)"} : !x, !buffer
    }
    scf.yield %c : !d
  }
  lowbit.return
}

// -----

!table = !lowbit.global<[5], i32, [1], [1]>
!index = !lowbit.reg<[1, 1, 3, 32], i32, "local(1, 1, 3, 1).spatial(1, 1, 1, 32)">
!lines = !lowbit.shared<[1, 1, 4, 32], i32, [128, 128, 32, 1], 0>
!x = !lowbit.global<[16, 1024], f16, [1024, 1], [1, 1]>
!buffer = !lowbit.shared<[1, 1024], f16, [1024, 1], 0>
!turned = !lowbit.shared<[1, 1, 72, 8], f16, [576, 576, 8, 1], 0>
!d = !lowbit.reg<[1, 16, 8], f32, "local(1, 2, 1).spatial(1, 8, 4).local(1, 1, 2)">

// Lines of a round are copied behind all else of it, in a group of their own, for which only their product waits: of
// four groups that have been started by then, two are of the next round. The index is made once, in front of the loop.
// CHECK-LABEL: lowbit.program
// CHECK:         lowbit.copy_async %
// CHECK:         %[[INDEX:.*]] = lowbit.index_outliers %
// CHECK-NEXT:    lowbit.grid_wait
// CHECK:         lowbit.copy_async %
// CHECK:         lowbit.commit
// CHECK:         lowbit.copy_lines %{{.*}}, %[[INDEX]],
// CHECK:         lowbit.commit
// CHECK:         scf.for
// CHECK:           lowbit.wait {{.*}}pending = 1
// CHECK:           lowbit.copy_async %
// CHECK:           lowbit.commit
// CHECK:           lowbit.copy_lines %{{.*}}, %[[INDEX]],
// CHECK:           lowbit.commit
// CHECK:           lowbit.wait {{.*}}pending = 2
// CHECK-NEXT:      lowbit.sparse_step %{{.*}}, %[[INDEX]],
lowbit.program @steps(%o: !llvm.ptr<1>, %p: !llvm.ptr<1>, %n: i32) attributes {threads = 32, grid = [1, 1, 1],
    params = ["outliers", "x", "n"], workspace = 0} {
  %c0 = arith.constant 0 : i32
  %c1 = arith.constant 1 : i32
  %table = lowbit.global_view %o : !llvm.ptr<1> -> !table
  %x = lowbit.global_view %p : !llvm.ptr<1> -> !x
  %weights = lowbit.alloc_shared : !buffer
  %buffer = lowbit.alloc_shared : !buffer
  %lines = lowbit.alloc_shared : !lines
  %turned = lowbit.alloc_shared : !turned
  %zero = lowbit.constant {value = 0.0 : f64} : !d
  %index = lowbit.index_outliers %table, %c0 : !table -> !index
  %total = scf.for %i = %c0 to %n step %c1 iter_args(%c = %zero) -> (!d) : i32 {
    lowbit.pipeline attributes {num_stages = 2, scope = "block", warps = 1} {
      lowbit.copy_async %x[%i, %c0], %weights {layout = "spatial(1, 32).local(1, 32)"} : !x, !buffer
      lowbit.grid_wait
      lowbit.copy_async %x[%i, %c0], %buffer {layout = "spatial(1, 32).local(1, 32)"} : !x, !buffer
      lowbit.copy_lines %table, %index, %lines, %i {columns = 64} : !table, !index, !lines
    }
    %d = lowbit.sparse_step %table, %index, %lines, %turned, %i, %c : !table, !index, !lines, !turned, !d -> !d
    scf.yield %d : !d
  }
  lowbit.return
}
