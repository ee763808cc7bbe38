// RUN: %lowbit-opt %s --split-input-file --verify-diagnostics

// What verifiers refuse: sums that stay in place, boxes, and signals for them.

func.func @element() {
  // expected-error @below {{element of the result: expected f32 or i32, got f16}}
  %0 = "lowbit.accumulator"() : () -> !lowbit.reg<[64, 8], f16, "spatial(4, 1).local(2, 1).spatial(8, 4).local(1, 2)">
  return
}

// -----

!sums = !lowbit.reg<[64, 8], f32, "spatial(4, 1).local(2, 1).spatial(8, 4).local(1, 2)">
func.func @not_an_accumulator() {
  %0 = "lowbit.constant"() {value = 0.0 : f32} : () -> !sums
  // expected-error @below {{sums: expected the result of lowbit.accumulator, got lowbit.constant}}
  "lowbit.clear_accumulator"(%0) : (!sums) -> ()
  return
}

// -----

!a = !lowbit.reg<[64, 32], f16, "spatial(4, 1).local(1, 2).column_local(2, 2).spatial(8, 4).local(1, 2)">
!b = !lowbit.shared<[1, 8, 64], f16, [512, 64, 1], 128>
!sums = !lowbit.reg<[64, 8], f32, "spatial(4, 1).local(2, 1).spatial(8, 4).local(1, 2)">
func.func @columns(%a: !a, %b: !b) {
  %0 = "lowbit.accumulator"() : () -> !sums
  // expected-error @below {{start: expected 0..32, got 48}}
  "lowbit.accumulate"(%a, %b, %0) {start = 48 : i64} : (!a, !b, !sums) -> ()
  return
}

// -----

!a = !lowbit.reg<[64, 32], f16, "spatial(4, 1).local(1, 2).column_local(2, 2).spatial(8, 4).local(1, 2)">
!b = !lowbit.shared<[1, 16, 64], f16, [1024, 64, 1], 128>
!sums = !lowbit.reg<[64, 8], f32, "spatial(4, 1).local(2, 1).spatial(8, 4).local(1, 2)">
func.func @row(%a: !a, %b: !b) {
  %0 = "lowbit.accumulator"() : () -> !sums
  // expected-error @below {{row: expected a multiple of 8 inside of 16, got 12}}
  "lowbit.accumulate"(%a, %b, %0) {row = 12 : i64, start = 0 : i64} : (!a, !b, !sums) -> ()
  return
}

// -----

!a = !lowbit.reg<[64, 32], f16, "spatial(4, 1).local(1, 2).column_local(2, 2).spatial(8, 4).local(1, 2)">
!b = !lowbit.shared<[1, 8, 64], f16, [512, 64, 1], 128>
!sums = !lowbit.reg<[64, 8], f32, "spatial(4, 1).local(2, 1).spatial(8, 4).local(1, 2)">
func.func @block(%a: !a, %b: !b) {
  %0 = "lowbit.accumulator"() : () -> !sums
  // expected-error @below {{block: expected 0..0, got 1}}
  "lowbit.accumulate"(%a, %b, %0) {block = 1 : i64, start = 0 : i64} : (!a, !b, !sums) -> ()
  return
}

// -----

!a = !lowbit.reg<[64, 32], f16, "spatial(4, 1).local(1, 2).column_local(2, 2).spatial(8, 4).local(1, 2)">
!b = !lowbit.shared<[1, 8, 64], f16, [512, 64, 1], 128>
!sums = !lowbit.reg<[64, 8], f32, "spatial(4, 1).local(2, 1).spatial(8, 4).local(1, 2)">
func.func @pending(%a: !a, %b: !b) {
  %0 = "lowbit.accumulator"() : () -> !sums
  // expected-error @below {{pending: expected 0..7, got 8}}
  "lowbit.accumulate"(%a, %b, %0) {pending = 8 : i64, start = 0 : i64} : (!a, !b, !sums) -> ()
  return
}

// -----

!sums = !lowbit.reg<[64, 8], f32, "spatial(4, 1).local(2, 1).spatial(8, 4).local(1, 2)">
func.func @product_of_itself() {
  %0 = "lowbit.accumulator"() : () -> !sums
  // expected-error @below {{sums: expected another accumulator than the product, got the same}}
  "lowbit.add_scaled"(%0, %0) {operandSegmentSizes = array<i32: 1, 0, 1, 0, 0>, pending = 0 : i64} : (!sums, !sums) -> ()
  return
}

// -----

!sums = !lowbit.reg<[64, 8], f32, "spatial(4, 1).local(2, 1).spatial(8, 4).local(1, 2)">
!scale = !lowbit.reg<[64, 1], f16, "spatial(4, 1).local(2, 1).spatial(8, 1).replicated(4)">
func.func @scale(%scale: !scale) {
  %0 = "lowbit.accumulator"() : () -> !sums
  %1 = "lowbit.accumulator"() : () -> !sums
  // expected-error @below {{scale: expected f32 in}}
  "lowbit.add_scaled"(%0, %scale, %1) {operandSegmentSizes = array<i32: 1, 1, 1, 0, 0>, pending = 0 : i64} : (!sums, !scale, !sums) -> ()
  return
}

// -----

!sums = !lowbit.reg<[64, 8], f32, "spatial(4, 1).local(2, 1).spatial(8, 4).local(1, 2)">
!column = !lowbit.reg<[64, 1], f32, "spatial(4, 1).local(2, 1).spatial(8, 1).replicated(4)">
func.func @row(%column: !column) {
  %0 = "lowbit.accumulator"() : () -> !sums
  %1 = "lowbit.accumulator"() : () -> !sums
  // expected-error @below {{row: expected f32 in replicated(32, rank=2).spatial(1, 4).local(1, 2)}}
  "lowbit.add_scaled"(%0, %1, %column, %column) {operandSegmentSizes = array<i32: 1, 0, 1, 1, 1>, pending = 0 : i64}
    : (!sums, !sums, !column, !column) -> ()
  return
}

// -----

!sums = !lowbit.reg<[64, 8], f32, "spatial(4, 1).local(2, 1).spatial(8, 4).local(1, 2)">
!column = !lowbit.reg<[64, 1], f32, "spatial(4, 1).local(2, 1).spatial(8, 1).replicated(4)">
func.func @row_beside(%column: !column) {
  %0 = "lowbit.accumulator"() : () -> !sums
  // expected-error @below {{row: expected f32 in replicated(32, rank=2).spatial(1, 4).local(1, 2)}}
  "lowbit.add_outer"(%column, %column, %0) : (!column, !column, !sums) -> ()
  return
}

// -----

!sums = !lowbit.reg<[64, 8], f32, "spatial(4, 1).local(2, 1).spatial(8, 4).local(1, 2)">
!column = !lowbit.reg<[64, 1], f32, "spatial(4, 1).local(2, 1).spatial(8, 1).replicated(4)">
func.func @column_without_row(%column: !column) {
  %0 = "lowbit.accumulator"() : () -> !sums
  %1 = "lowbit.accumulator"() : () -> !sums
  // expected-error @below {{number of rows: expected 1, got 0}}
  "lowbit.add_scaled"(%0, %1, %column) {operandSegmentSizes = array<i32: 1, 0, 1, 1, 0>, pending = 0 : i64}
    : (!sums, !sums, !column) -> ()
  return
}

// -----

!half = !lowbit.reg<[16, 8], f16, "local(2, 1).spatial(8, 4).local(1, 2)">
func.func @half(%half: !half) {
  // expected-error @below {{element of the source: expected f32, got f16}}
  "lowbit.materialize"(%half) {by_all} : (!half) -> ()
  return
}

// -----

func.func @pending() {
  // expected-error @below {{pending: expected 0..7, got 8}}
  "lowbit.await_products"() {pending = 8 : i64} : () -> ()
  return
}

// -----

!x = !lowbit.shared<[1, 8, 64], f16, [512, 64, 1], 128>
!signals = !lowbit.shared<[1, 2, 2], i32, [4, 2, 1], 0>
func.func @box_outside(%map: !llvm.ptr, %x: !x, %signals: !signals, %i: i32) {
  // expected-error @below {{parent: expected lowbit.one_thread, got func.func}}
  "lowbit.copy_box"(%map, %x, %i, %signals, %i, %i, %i) {operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 2>} : (!llvm.ptr, !x, i32, !signals, i32, i32, i32) -> ()
  return
}

// -----

func.func @region(%on: i1) {
  // expected-error @below {{body: expected scalars, lowbit.await, lowbit.arrive, lowbit.copy_box, lowbit.stage, got lowbit.commit}}
  "lowbit.one_thread"(%on) ({
    "lowbit.commit"() : () -> ()
  }) : (i1) -> ()
  return
}

// -----

!signals = !lowbit.shared<[1, 2, 2], i32, [4, 2, 1], 0>
func.func @kinds(%signals: !signals, %i: i32) {
  // expected-error @below {{arrive: expected one of copies, expected, and blocks, where copies is not of each_warp, got several}}
  "lowbit.arrive"(%signals, %i) {copies, each_warp} : (!signals, i32) -> ()
  return
}
