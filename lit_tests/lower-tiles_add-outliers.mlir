// RUN: %lowbit-opt %s --split-input-file --lower-tiles=target=sm_80 --canonicalize --cse | %filecheck %s

// Outliers added to weights in shared memory. The two warps take a line each, and a lane one of its words.
!table = !lowbit.global<[3], i32, [1], [1]>
!buffer = !lowbit.shared<[16, 128], f32, [132, 1], 0>
// CHECK-LABEL: gpu.func @added
// CHECK-COUNT-2: llvm.load
// CHECK:         scf.for {{.*}} step %c2_i32
// The value is the upper half of a word; below it are 12 bits of the column and 4 of the row.
// CHECK:           arith.extf %{{.*}} : f16 to f32
// CHECK:           arith.andi %{{.*}}, %c4095_i32
// CHECK:           arith.andi %{{.*}}, %c15_i32
// A group of 50 columns takes 64 in memory.
// CHECK:           arith.divui %{{.*}}, %c50_i32
// CHECK:           arith.muli %{{.*}}, %c64_i32
// Lane 0 has the line's first column, words of 0 are no outliers, and other columns are not in the buffer.
// CHECK:           arith.cmpi ult, %{{.*}}, %c128_i32
// CHECK:           scf.if
// CHECK:             arith.muli %{{.*}}, %c528_i32
// CHECK:             %[[SUM:.*]] = arith.addf
// CHECK:             llvm.store %[[SUM]], %{{.*}} : f32, !llvm.ptr<3>
lowbit.program @added(%p: !llvm.ptr<1>, %block: i32, %column: i32) attributes {threads = 64, grid = [1, 1, 1],
    params = ["outliers", "block", "column"], workspace = 0} {
  %table = lowbit.global_view %p : !llvm.ptr<1> -> !table
  %buffer = lowbit.alloc_shared : !buffer
  lowbit.add_outliers %table, %buffer, %block, %column {group = 50, padded = 64} : !table, !buffer
  lowbit.return
}

// -----

// Products of one half of the outliers with four tokens. The first four lines were copied to shared memory.
!table = !lowbit.global<[3], i32, [1], [1]>
!lines = !lowbit.shared<[1, 1, 4, 32], i32, [128, 128, 32, 1], 0>
!scratch = !lowbit.shared<[1, 1, 448], i32, [448, 448, 1], 0>
!x = !lowbit.global<[4, 64], f16, [64, 1], [1, 1]>
!d = !lowbit.reg<[1, 16, 8], f32, "local(1, 2, 1).spatial(1, 8, 4).local(1, 1, 2)">
// CHECK-LABEL: gpu.func @products
// CHECK:         nvvm.cp.async.shared.global
// CHECK:         %[[FIRST:.*]]:4 = scf.for {{.*}} to %c4_i32
// A line is a sparse A, 16 x 32, and the x of its columns is B: two products.
// CHECK-COUNT-2:     nvvm.mma.sync
// CHECK:             llvm.store %c0_i16
// Where the last of the four lines has an outlier, there may be more lines, every second of which is this half's.
// CHECK:         scf.if
// CHECK:           scf.for {{.*}} step %c2_i32 iter_args(%{{.*}} = %[[FIRST]]#0
// CHECK-COUNT-2:     nvvm.mma.sync
lowbit.program @products(%p: !llvm.ptr<1>, %px: !llvm.ptr<1>, %py: !llvm.ptr<1>, %block: i32, %part: i32) attributes
    {threads = 32, grid = [1, 1, 1], params = ["outliers", "x", "y", "block", "part"], workspace = 0} {
  %table = lowbit.global_view %p : !llvm.ptr<1> -> !table
  %x = lowbit.global_view %px : !llvm.ptr<1> -> !x
  %lines = lowbit.alloc_shared : !lines
  %scratch = lowbit.alloc_shared : !scratch
  lowbit.copy_outliers %table, %lines, %block, %part {layout = "local(1, 1, 4, 1).spatial(1, 1, 1, 32)", splits = 2}
      : !table, !lines
  %zero = lowbit.constant {value = 0.0 : f64} : !d
  %sum = lowbit.sparse_mma %table, %lines, %scratch, %x, %block, %part, %zero {splits = 2}
      : !table, !lines, !scratch, !x, !d -> !d
  lowbit.return
}
