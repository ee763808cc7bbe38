// RUN: %lowbit-opt %s --split-input-file --verify-diagnostics

!table = !lowbit.global<[3, 1], i32, [1, 1], [1, 1]>
!cursor = !lowbit.reg<[2, 32, 9], i32, "spatial(2, 1, 1).spatial(1, 32, 1).local(1, 1, 9)">
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
!cursor = !lowbit.reg<[2, 32, 9], i32, "spatial(2, 1, 1).spatial(1, 32, 1).local(1, 1, 9)">
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
!cursor = !lowbit.reg<[2, 32, 9], i32, "spatial(2, 1, 1).spatial(1, 32, 1).local(1, 1, 9)">
"lowbit.program"() ({
^bb0(%p: !llvm.ptr<1>, %block: i32):
  %table = "lowbit.global_view"(%p) {operandSegmentSizes = array<i32: 1, 0>} : (!llvm.ptr<1>) -> !table
  %buffer = "lowbit.alloc_shared"() : () -> !buffer
  %first = "lowbit.first_outliers"(%table, %block) : (!table, i32) -> !cursor
  // expected-error @below {{buffer: expected [2, blocks, 32, 8], dense}}
  "lowbit.erase_outliers"(%buffer, %first) : (!buffer, !cursor) -> ()
  "lowbit.return"() : () -> ()
}) {sym_name = "p", threads = 64, grid = [1, 1, 1], params = ["outliers", "block"], workspace = 0} : () -> ()

// -----

!table = !lowbit.global<[5], i32, [1], [1]>
!lines = !lowbit.shared<[1, 2, 3, 32], i32, [192, 96, 32, 1], 0>
func.func @copy_outliers_lines(%outliers: !table, %lines: !lines, %i: i32) {
  // expected-error @below {{'lowbit.copy_outliers' op lines of the buffer: expected a multiple of 4, got 3}}
  "lowbit.copy_outliers"(%outliers, %lines, %i, %i) {layout = "local(1, 2, 3, 1).spatial(1, 1, 1, 32)", splits = 1 : i64}
    : (!table, !lines, i32, i32) -> ()
  return
}

// -----

!table = !lowbit.global<[5], i32, [1], [1]>
!lines = !lowbit.shared<[1, 2, 4, 32], i32, [264, 132, 33, 1], 0>
func.func @copy_outliers_strides(%outliers: !table, %lines: !lines, %i: i32) {
  // expected-error @below {{'lowbit.copy_outliers' op buffer: expected [warps, row blocks, lines, 32] of i32, dense}}
  "lowbit.copy_outliers"(%outliers, %lines, %i, %i)
    {layout = "local(1, 2, 1, 1).spatial(1, 1, 4, 8).local(1, 1, 1, 4)", splits = 1 : i64}
    : (!table, !lines, i32, i32) -> ()
  return
}

// -----

!table = !lowbit.global<[5], i32, [1], [1]>
!words = !lowbit.reg<[1, 1, 4, 32], i32, "local(1, 1, 4, 1).spatial(1, 1, 1, 32)">
!scratch = !lowbit.shared<[1, 16, 32], f32, [512, 32, 1], 0>
!x = !lowbit.global<[4, 64], f16, [64, 1], [1, 1]>
!d = !lowbit.reg<[1, 16, 16], f32, "local(1, 1, 2).local(1, 2, 1).spatial(1, 8, 4).local(1, 1, 2)">
func.func @sparse_vector_columns(%outliers: !table, %words: !words, %scratch: !scratch, %x: !x, %i: i32, %d: !d) {
  // expected-error @below {{'lowbit.sparse_vector' op columns of c: expected 8, got 16}}
  %0 = "lowbit.sparse_vector"(%outliers, %words, %scratch, %x, %i, %i, %d) {splits = 1 : i64}
    : (!table, !words, !scratch, !x, i32, i32, !d) -> !d
  return
}

// -----

!table = !lowbit.global<[5], i32, [1], [1]>
!words = !lowbit.reg<[1, 2, 4, 32], i32, "local(1, 2, 4, 1).spatial(1, 1, 1, 32)">
!scratch = !lowbit.shared<[1, 16, 32], f32, [512, 32, 1], 0>
!x = !lowbit.global<[4, 64], f16, [64, 1], [1, 1]>
!d = !lowbit.reg<[1, 16, 8], f32, "local(1, 2, 1).spatial(1, 8, 4).local(1, 1, 2)">
func.func @sparse_vector_lines(%outliers: !table, %words: !words, %scratch: !scratch, %x: !x, %i: i32, %d: !d) {
  // expected-error @below {{'lowbit.sparse_vector' op warps and row blocks of the lines: expected [1, 1], got [1, 2]}}
  %0 = "lowbit.sparse_vector"(%outliers, %words, %scratch, %x, %i, %i, %d) {splits = 1 : i64}
    : (!table, !words, !scratch, !x, i32, i32, !d) -> !d
  return
}

// -----

!table = !lowbit.global<[5], i32, [1], [1]>
!words = !lowbit.reg<[1, 1, 4, 32], i32, "local(1, 1, 1, 4).spatial(1, 1, 4, 8)">
func.func @load_outliers_lanes(%outliers: !table, %i: i32) {
  // expected-error @below {{'lowbit.load_outliers' op words: expected [warps, row blocks, lines, 32] of i32 by lane}}
  %0 = "lowbit.load_outliers"(%outliers, %i, %i) {splits = 1 : i64} : (!table, i32, i32) -> !words
  return
}

// -----

!table = !lowbit.global<[5], i32, [1], [1]>
!lines = !lowbit.shared<[1, 1, 4, 32], i32, [128, 128, 32, 1], 0>
!scratch = !lowbit.shared<[1, 1, 100], i32, [100, 100, 1], 0>
!x = !lowbit.global<[4, 64], f16, [64, 1], [1, 1]>
!d = !lowbit.reg<[1, 16, 8], f32, "local(1, 2, 1).spatial(1, 8, 4).local(1, 1, 2)">
func.func @sparse_mma_scratch(%outliers: !table, %lines: !lines, %scratch: !scratch, %x: !x, %i: i32, %d: !d) {
  // expected-error @below {{'lowbit.sparse_mma' op scratch: expected [1, 1, 448] of i32, dense}}
  %0 = "lowbit.sparse_mma"(%outliers, %lines, %scratch, %x, %i, %i, %d) {splits = 1 : i64}
    : (!table, !lines, !scratch, !x, i32, i32, !d) -> !d
  return
}

// -----

!table = !lowbit.global<[5], i32, [1], [1]>
!halves = !lowbit.shared<[16, 64], f16, [64, 1], 0>
func.func @add_outliers_to_halves(%outliers: !table, %buffer: !halves, %i: i32) {
  // expected-error @below {{'lowbit.add_outliers' op element of the buffer: expected f32, got f16}}
  "lowbit.add_outliers"(%outliers, %buffer, %i, %i) {group = 64 : i64, padded = 64 : i64} : (!table, !halves, i32, i32) -> ()
  return
}

// -----

!table = !lowbit.global<[5], i32, [1], [1]>
!rows = !lowbit.shared<[8, 64], f32, [64, 1], 0>
func.func @add_outliers_to_few_rows(%outliers: !table, %buffer: !rows, %i: i32) {
  // expected-error @below {{'lowbit.add_outliers' op buffer: expected [16, 'columns'], got [8, 64]}}
  "lowbit.add_outliers"(%outliers, %buffer, %i, %i) {group = 64 : i64, padded = 64 : i64} : (!table, !rows, i32, i32) -> ()
  return
}

// -----

!table = !lowbit.global<[5], i32, [1], [1]>
!buffer = !lowbit.shared<[16, 64], f32, [64, 1], 0>
func.func @add_outliers_of_groups_beyond_memory(%outliers: !table, %buffer: !buffer, %i: i32) {
  // expected-error @below {{'lowbit.add_outliers' op group: expected 1..48, got 64}}
  "lowbit.add_outliers"(%outliers, %buffer, %i, %i) {group = 64 : i64, padded = 48 : i64} : (!table, !buffer, i32, i32) -> ()
  return
}

// -----

// An index has the ends of a row block's lines, and the first columns of some.
!table = !lowbit.global<[5], i32, [1], [1]>
!index = !lowbit.reg<[1, 1, 2, 32], i32, "local(1, 1, 2, 1).spatial(1, 1, 1, 32)">
func.func @index_of_ends(%outliers: !table, %i: i32) {
  // expected-error @below {{'lowbit.index_outliers' op numbers of the index: expected at least 3}}
  %0 = "lowbit.index_outliers"(%outliers, %i) : (!table, i32) -> !index
  return
}

// -----

!table = !lowbit.global<[5], i32, [1], [1]>
!index = !lowbit.reg<[1, 1, 3, 32], i32, "local(1, 1, 3, 1).spatial(1, 1, 1, 32)">
!lines = !lowbit.shared<[1, 1, 3, 32], i32, [96, 96, 32, 1], 0>
func.func @copy_three_lines(%outliers: !table, %index: !index, %lines: !lines, %i: i32) {
  // expected-error @below {{'lowbit.copy_lines' op lines of the target: expected a multiple of 4, got 3}}
  "lowbit.copy_lines"(%outliers, %index, %lines, %i) {columns = 64 : i64} : (!table, !index, !lines, i32) -> ()
  return
}

// -----

!table = !lowbit.global<[5], i32, [1], [1]>
!index = !lowbit.reg<[1, 1, 3, 32], i32, "local(1, 1, 3, 1).spatial(1, 1, 1, 32)">
!lines = !lowbit.shared<[1, 2, 4, 32], i32, [256, 128, 32, 1], 0>
func.func @copy_lines_of_others(%outliers: !table, %index: !index, %lines: !lines, %i: i32) {
  // expected-error @below {{'lowbit.copy_lines' op warps and row blocks of the target: expected [1, 1], got [1, 2]}}
  "lowbit.copy_lines"(%outliers, %index, %lines, %i) {columns = 64 : i64} : (!table, !index, !lines, i32) -> ()
  return
}

// -----

!source = !lowbit.shared<[1, 1, 8, 64], f16, [512, 512, 64, 1], 128>
!target = !lowbit.shared<[1, 1, 64, 8], f16, [512, 512, 8, 1], 0>
func.func @transpose_without_zeros(%source: !source, %target: !target, %m: i32) {
  // expected-error @below {{'lowbit.transpose' op target: expected [1, 1, 72, 8] of f16, dense}}
  "lowbit.transpose"(%source, %target, %m) : (!source, !target, i32) -> ()
  return
}

// -----

!source = !lowbit.shared<[1, 1, 8, 64], f16, [512, 512, 64, 1], 0>
!target = !lowbit.shared<[1, 1, 72, 8], f16, [576, 576, 8, 1], 0>
func.func @transpose_rows(%source: !source, %target: !target, %m: i32) {
  // expected-error @below {{'lowbit.transpose' op source: expected [warps, panels, tokens, 64], swizzled}}
  "lowbit.transpose"(%source, %target, %m) : (!source, !target, i32) -> ()
  return
}

// -----

!table = !lowbit.global<[5], i32, [1], [1]>
!index = !lowbit.reg<[1, 1, 3, 32], i32, "local(1, 1, 3, 1).spatial(1, 1, 1, 32)">
!lines = !lowbit.shared<[1, 1, 4, 32], i32, [128, 128, 32, 1], 0>
!x = !lowbit.shared<[1, 1, 72, 8], f16, [576, 576, 8, 1], 0>
!d = !lowbit.reg<[1, 16, 16], f32, "local(1, 1, 2).local(1, 2, 1).spatial(1, 8, 4).local(1, 1, 2)">
func.func @sparse_step_tokens(%outliers: !table, %index: !index, %lines: !lines, %x: !x, %i: i32, %d: !d) {
  // expected-error @below {{'lowbit.sparse_step' op x: expected [warps, tokens / 8, columns + 8, 8], dense}}
  %0 = "lowbit.sparse_step"(%outliers, %index, %lines, %x, %i, %d) : (!table, !index, !lines, !x, i32, !d) -> !d
  return
}

// -----

!table = !lowbit.global<[5], i32, [1], [1]>
!index = !lowbit.reg<[1, 1, 3, 32], i32, "local(1, 1, 3, 1).spatial(1, 1, 1, 32)">
!lines = !lowbit.shared<[1, 2, 4, 32], i32, [256, 128, 32, 1], 0>
!x = !lowbit.shared<[1, 1, 72, 8], f16, [576, 576, 8, 1], 0>
!d = !lowbit.reg<[1, 16, 8], f32, "local(1, 2, 1).spatial(1, 8, 4).local(1, 1, 2)">
func.func @sparse_step_lines(%outliers: !table, %index: !index, %lines: !lines, %x: !x, %i: i32, %d: !d) {
  // expected-error @below {{'lowbit.sparse_step' op warps and row blocks of the lines: expected [1, 1], got [1, 2]}}
  %0 = "lowbit.sparse_step"(%outliers, %index, %lines, %x, %i, %d) : (!table, !index, !lines, !x, i32, !d) -> !d
  return
}
