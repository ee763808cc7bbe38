// RUN: %lowbit-opt %s --split-input-file --verify-diagnostics

!table = !lowbit.global<[3, 1], i32, [1, 1], [1, 1]>
!cursor = !lowbit.reg<[2, 32, 8], i32, "spatial(2, 1, 1).spatial(1, 32, 1).local(1, 1, 8)">
"lowbit.program"() ({
^bb0(%p: !llvm.ptr<1>, %block: i32):
  %table = "lowbit.global_view"(%p) {operandSegmentSizes = array<i32: 1, 0>} : (!llvm.ptr<1>) -> !table
  // expected-error @below {{outliers}}
  %first = "lowbit.first_outliers"(%table, %block) : (!table, i32) -> !cursor
  "lowbit.return"() : () -> ()
}) {sym_name = "p", threads = 64, grid = [1, 1, 1], params = ["outliers", "block"], workspace = 0} : () -> ()

// -----

// The numbers of a cursor are a thread's own.
!table = !lowbit.global<[3], i32, [1], [1]>
!cursor = !lowbit.reg<[2, 32, 8], i32, "spatial(2, 1, 1).spatial(1, 8, 4).local(1, 4, 2)">
"lowbit.program"() ({
^bb0(%p: !llvm.ptr<1>, %block: i32):
  %table = "lowbit.global_view"(%p) {operandSegmentSizes = array<i32: 1, 0>} : (!llvm.ptr<1>) -> !table
  // expected-error @below {{cursor}}
  %first = "lowbit.first_outliers"(%table, %block) : (!table, i32) -> !cursor
  "lowbit.return"() : () -> ()
}) {sym_name = "p", threads = 64, grid = [1, 1, 1], params = ["outliers", "block"], workspace = 0} : () -> ()

// -----

// The buffer is in the order of fragments.
!table = !lowbit.global<[3], i32, [1], [1]>
!buffer = !lowbit.shared<[32, 64], f16, [64, 1], 0>
!cursor = !lowbit.reg<[2, 32, 8], i32, "spatial(2, 1, 1).spatial(1, 32, 1).local(1, 1, 8)">
"lowbit.program"() ({
^bb0(%p: !llvm.ptr<1>, %block: i32):
  %table = "lowbit.global_view"(%p) {operandSegmentSizes = array<i32: 1, 0>} : (!llvm.ptr<1>) -> !table
  %buffer = "lowbit.alloc_shared"() : () -> !buffer
  %first = "lowbit.first_outliers"(%table, %block) : (!table, i32) -> !cursor
  // expected-error @below {{buffer}}
  %next = "lowbit.scatter_outliers"(%table, %buffer, %block, %first) : (!table, !buffer, i32, !cursor) -> !cursor
  "lowbit.return"() : () -> ()
}) {sym_name = "p", threads = 64, grid = [1, 1, 1], params = ["outliers", "block"], workspace = 0} : () -> ()

// -----

// What was written lies in a buffer of fragments, too.
!buffer = !lowbit.shared<[1, 4, 32, 8], f16, [1024, 256, 8, 1], 0>
!table = !lowbit.global<[3], i32, [1], [1]>
!cursor = !lowbit.reg<[2, 32, 8], i32, "spatial(2, 1, 1).spatial(1, 32, 1).local(1, 1, 8)">
"lowbit.program"() ({
^bb0(%p: !llvm.ptr<1>, %block: i32):
  %table = "lowbit.global_view"(%p) {operandSegmentSizes = array<i32: 1, 0>} : (!llvm.ptr<1>) -> !table
  %buffer = "lowbit.alloc_shared"() : () -> !buffer
  %first = "lowbit.first_outliers"(%table, %block) : (!table, i32) -> !cursor
  // expected-error @below {{buffer: expected [2, blocks, 32, 8], dense}}
  "lowbit.erase_outliers"(%buffer, %first) : (!buffer, !cursor) -> ()
  "lowbit.return"() : () -> ()
}) {sym_name = "p", threads = 64, grid = [1, 1, 1], params = ["outliers", "block"], workspace = 0} : () -> ()
