// RUN: %lowbit-opt %s --lower-tiles=target=sm_90a --canonicalize --cse | %filecheck %s

// The outliers of a panel of 64 columns, to the places in shared memory where lanes read fragments.
!table = !lowbit.global<[3], i32, [1], [1]>
!buffer = !lowbit.shared<[2, 4, 32, 8], f16, [1024, 256, 8, 1], 0>
!cursor = !lowbit.reg<[2, 32, 4], i32, "spatial(2, 1, 1).spatial(1, 32, 1).local(1, 1, 4)">
// CHECK-LABEL: gpu.func @outliers

// Where the lines of a row block begin and end, and a lane's words of the first two.
// CHECK-COUNT-4: llvm.load

// A line: its head goes to all lanes; a store is under the condition that the word is an outlier of the panel.
// CHECK:         scf.while
// CHECK:           %[[HEAD:.*]] = nvvm.shfl.sync idx %{{.*}}, %{{.*}}, %c0_i32
// CHECK:           %[[BEYOND:.*]] = arith.andi %{{.*}}, %c4095_i32
// CHECK:           arith.addi %[[HEAD]], %[[BEYOND]]
// CHECK:           arith.cmpi ult, %{{.*}}, %c64_i32
// CHECK:           scf.if
// CHECK:             llvm.store %{{.*}}, %{{.*}} {alignment = 2 : i64} : f16
// While nothing of the line is behind the panel, and it was not the last one, it goes on.
// CHECK:           arith.cmpi sge
// CHECK:           nvvm.vote.sync any
// CHECK:           scf.condition
// The next line is there; the one behind it is asked for.
// CHECK:         } do {
// CHECK-COUNT-1:   llvm.load
// CHECK:           scf.yield

// Zeros in their places.
// CHECK:         scf.while
// CHECK:             llvm.store %cst, %{{.*}} {alignment = 2 : i64} : f16
"lowbit.program"() ({
^bb0(%p: !llvm.ptr<1>, %block: i32, %column: i32):
  %table = "lowbit.global_view"(%p) {operandSegmentSizes = array<i32: 1, 0>} : (!llvm.ptr<1>) -> !table
  %buffer = "lowbit.alloc_shared"() : () -> !buffer
  %first = "lowbit.first_outliers"(%table, %block) : (!table, i32) -> !cursor
  %next = "lowbit.scatter_outliers"(%table, %buffer, %column, %first) : (!table, !buffer, i32, !cursor) -> !cursor
  %same = "lowbit.scatter_outliers"(%table, %buffer, %column, %next) {erase} : (!table, !buffer, i32, !cursor) -> !cursor
  "lowbit.return"() : () -> ()
}) {sym_name = "outliers", threads = 64, grid = [1, 1, 1], params = ["outliers", "block", "column"], workspace = 0} : () -> ()
