// RUN: %lowbit-opt %s --lower-tiles=target=sm_90a --canonicalize --cse | %filecheck %s

// The outliers of a panel of 64 columns, to the places in shared memory where lanes read fragments.
!table = !lowbit.global<[3], i32, [1], [1]>
!buffer = !lowbit.shared<[2, 4, 32, 8], f16, [1024, 256, 8, 1], 0>
!cursor = !lowbit.reg<[2, 32, 8], i32, "spatial(2, 1, 1).spatial(1, 32, 1).local(1, 1, 8)">
// CHECK-LABEL: gpu.func @outliers

// Where the lines of a row block begin and end, and a lane's word of the first. The cursor is in front of it.
// CHECK-COUNT-3: llvm.load

// A line: a store is under the condition that the word is an outlier of the panel.
// CHECK:         %[[NEXT:.*]]:{{[0-9]}} = scf.while
// CHECK:           arith.cmpi ult, %{{.*}}, %c64_i32
// CHECK:           scf.if
// CHECK:             llvm.store %{{.*}}, %{{.*}} {alignment = 2 : i64} : f16
// While nothing of the line is behind the panel, and it was not the last one, it goes on.
// CHECK:           arith.cmpi sge
// CHECK:           nvvm.vote.sync any
// CHECK:           scf.condition
// The next line is there, and all lanes get its head; the one behind it is asked for.
// CHECK:         } do {
// CHECK:           nvvm.shfl.sync idx %{{.*}}, %{{.*}}, %c0_i32
// CHECK:           llvm.load
// CHECK:           arith.andi %{{.*}}, %c4095_i32
// CHECK:           scf.yield

// Zeros in the places of two lines at most, or else everywhere: 16 bytes of a lane for each of four fragments.
// CHECK:         %[[FEW:.*]] = arith.cmpi slt, %[[NEXT]]#{{[0-9]}}, %c3_i32
// CHECK:         scf.if %[[FEW]]
// CHECK-COUNT-2:   llvm.store %{{.*}} {alignment = 2 : i64} : f16
// CHECK:         } else {
// CHECK-COUNT-4:   llvm.store %{{.*}} {alignment = 16 : i64} : vector<4xi32>
"lowbit.program"() ({
^bb0(%p: !llvm.ptr<1>, %block: i32, %column: i32):
  %table = "lowbit.global_view"(%p) {operandSegmentSizes = array<i32: 1, 0>} : (!llvm.ptr<1>) -> !table
  %buffer = "lowbit.alloc_shared"() : () -> !buffer
  %first = "lowbit.first_outliers"(%table, %block) : (!table, i32) -> !cursor
  %next = "lowbit.scatter_outliers"(%table, %buffer, %column, %first) : (!table, !buffer, i32, !cursor) -> !cursor
  "lowbit.erase_outliers"(%buffer, %next) : (!buffer, !cursor) -> ()
  %last = "lowbit.scatter_outliers"(%table, %buffer, %block, %next) : (!table, !buffer, i32, !cursor) -> !cursor
  "lowbit.return"() : () -> ()
}) {sym_name = "outliers", threads = 64, grid = [1, 1, 1], params = ["outliers", "block", "column"], workspace = 0} : () -> ()
