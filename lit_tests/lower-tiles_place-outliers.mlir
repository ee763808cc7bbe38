// RUN: %lowbit-opt %s --lower-tiles=target=sm_90a --canonicalize --cse | %filecheck %s

// The outliers of 64 columns, found by an index of lines, to the places where lanes read fragments; then zeros there.
!table = !lowbit.global<[3], i32, [1], [1]>
!index = !lowbit.reg<[1, 2, 3, 32], i32, "spatial(1, 2, 1, 1).local(1, 1, 3, 1).spatial(1, 1, 1, 32)">
!words = !lowbit.reg<[1, 2, 2, 32], i32, "spatial(1, 2, 1, 1).local(1, 1, 2, 1).spatial(1, 1, 1, 32)">
!buffer = !lowbit.shared<[1, 2, 4, 32, 8], bf16, [2048, 1024, 256, 8, 1], 0>
// CHECK-LABEL: gpu.func @outliers

// Lanes whose line begins in front of the columns are counted: the last such line is the first that is loaded.
// CHECK:         nvvm.vote.sync ballot
// CHECK:         llvm.call_intrinsic "llvm.ctpop"
// CHECK-COUNT-2: ld.global.b32

// All lanes get the head of a line; a store is under the condition that the word is an outlier of these columns.
// CHECK:         nvvm.shfl.sync idx
// CHECK:         arith.cmpi ult, %{{.*}}, %c64_i32
// CHECK:         scf.if
// CHECK:           llvm.store %{{.*}}, %{{.*}} {alignment = 2 : i64} : bf16
// CHECK:         nvvm.shfl.sync idx
// CHECK:         scf.if
// CHECK:           llvm.store %{{.*}}, %{{.*}} {alignment = 2 : i64} : bf16
// If the last of these lines begins in front of the columns' end, there may be more of them.
// CHECK:         scf.if
// CHECK:           scf.while
// CHECK:             ld.global.b32
// CHECK:             scf.condition
// CHECK:           } do {
// CHECK:             llvm.store %{{.*}}, %{{.*}} {alignment = 2 : i64} : bf16

// CHECK:         llvm.store %[[ZERO:.*]], %{{.*}} {alignment = 2 : i64} : bf16
// CHECK:         llvm.store %[[ZERO]], %{{.*}} {alignment = 2 : i64} : bf16
lowbit.program @outliers(%p: !llvm.ptr<1>, %block: i32, %column: i32) attributes {threads = 64, grid = [1, 1, 1],
    params = ["outliers", "block", "column"], workspace = 0} {
  %table = lowbit.global_view %p : !llvm.ptr<1> -> !table
  %buffer = lowbit.alloc_shared : !buffer
  %index = lowbit.index_outliers %table, %block : !table -> !index
  %words = lowbit.load_lines %table, %index, %column {columns = 64} : !table, !index -> !words
  lowbit.place_outliers %table, %index, %words, %buffer, %column : !table, !index, !words, !buffer
  lowbit.place_outliers %table, %index, %words, %buffer, %column {erases} : !table, !index, !words, !buffer
  lowbit.return
}
