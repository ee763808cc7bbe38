// RUN: %lowbit-opt %s --lower-tiles=target=sm_90a --canonicalize --cse | %filecheck %s

// The outliers of a panel of 64 columns, to the places in shared memory where lanes read fragments.
!table = !lowbit.global<[3], i32, [1], [1]>
!buffer = !lowbit.shared<[2, 4, 32, 8], f16, [1024, 256, 8, 1], 0>
!cursor = !lowbit.reg<[2, 32, 9], i32, "spatial(2, 1, 1).spatial(1, 32, 1).local(1, 1, 9)">
// CHECK-LABEL: gpu.func @outliers

// Where the lines of a row block begin and end, and a lane's word of the first. The cursor is in front of it.
// CHECK-COUNT-3: llvm.load

// If nothing of the line is behind the panel, and it was not the last one, the cursor goes on with the next, which is
// there: all lanes get its head.
// CHECK:         nvvm.vote.sync any
// CHECK:         %[[NEXT:.*]]:{{[0-9]}} = scf.if
// CHECK:           nvvm.shfl.sync idx %{{.*}}, %{{.*}}, %c0_i32
// CHECK:           arith.andi %{{.*}}, %c4095_i32
// A store is under the condition that the word is an outlier of the panel.
// CHECK:           arith.cmpi ult, %{{.*}}, %c64_i32
// CHECK:           scf.if
// CHECK:             llvm.store %{{.*}}, %{{.*}} {alignment = 2 : i64} : f16
// CHECK:           arith.cmpi sge
// CHECK:           nvvm.vote.sync any
// Of others, which few panels have, each is waited for.
// CHECK:           scf.while
// CHECK:             scf.condition
// CHECK:           } do {
// CHECK:             llvm.load
// CHECK:             nvvm.shfl.sync idx
// The one behind is asked for in any case.
// CHECK:         arith.minsi
// CHECK:         llvm.load

// Zeros in the places of two lines at most, or else everywhere: 16 bytes of a lane for each of four fragments.
// CHECK:         %[[FEW:.*]] = arith.cmpi slt, %[[NEXT]]#{{[0-9]}}, %c3_i32
// CHECK:         scf.if %[[FEW]]
// CHECK-COUNT-2:   llvm.store %{{.*}} {alignment = 2 : i64} : f16
// CHECK:         } else {
// CHECK-COUNT-4:   llvm.store %{{.*}} {alignment = 16 : i64} : vector<4xi32>
lowbit.program @outliers(%p: !llvm.ptr<1>, %block: i32, %column: i32) attributes {threads = 64, grid = [1, 1, 1],
    params = ["outliers", "block", "column"], workspace = 0} {
  %table = lowbit.global_view %p : !llvm.ptr<1> -> !table
  %buffer = lowbit.alloc_shared : !buffer
  %first = lowbit.first_outliers %table, %block : !table -> !cursor
  %next = lowbit.scatter_outliers %table, %buffer, %column, %first : !table, !buffer, !cursor -> !cursor
  lowbit.erase_outliers %buffer, %next : !buffer, !cursor
  %last = lowbit.scatter_outliers %table, %buffer, %block, %next : !table, !buffer, !cursor -> !cursor
  lowbit.return
}
