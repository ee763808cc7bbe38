// RUN: %lowbit-opt %s --split-input-file --verify-diagnostics

// What verifiers refuse: tiles of codes. Wrong types are in types_invalid.mlir.

// Decoding.
!codes = !lowbit.reg<[16, 64], #lowbit.format<"u4", []>, "local(1, 4).column_local(2, 2).spatial(8, 4).local(1, 2)">
func.func @decode_numbers(%t: !lowbit.reg<[8, 4], f16, "spatial(8, 4)">) {
  // expected-error @below {{'lowbit.decode' op source: expected codes of a low-bit format, got f16}}
  %0 = "lowbit.decode"(%t) {exponent = 0, operandSegmentSizes = array<i32: 1, 0>} : (!lowbit.reg<[8, 4], f16, "spatial(8, 4)">) -> !lowbit.reg<[8, 4], f16, "spatial(8, 4)">
  return
}

// -----

!codes = !lowbit.reg<[16, 64], #lowbit.format<"u4", []>, "local(1, 4).column_local(2, 2).spatial(8, 4).local(1, 2)">
func.func @decode_exponent(%t: !codes) {
  // expected-error @below {{exponent: expected -1022..1023, got 5000}}
  %0 = "lowbit.decode"(%t) {exponent = 5000, operandSegmentSizes = array<i32: 1, 0>} : (!codes)
    -> !lowbit.reg<[16, 64], f16, "local(1, 4).column_local(2, 2).spatial(8, 4).local(1, 2)">
  return
}

// -----

!codes = !lowbit.reg<[16, 64], #lowbit.format<"u4", []>, "local(1, 4).column_local(2, 2).spatial(8, 4).local(1, 2)">
func.func @decode_to_bytes(%t: !codes) {
  // expected-error @below {{element of the result: expected f16 or bf16 or f32, got i8}}
  %0 = "lowbit.decode"(%t) {exponent = 0, operandSegmentSizes = array<i32: 1, 0>} : (!codes)
    -> !lowbit.reg<[16, 64], i8, "local(1, 4).column_local(2, 2).spatial(8, 4).local(1, 2)">
  return
}

// -----

!codes = !lowbit.reg<[16, 64], #lowbit.format<"u4", []>, "local(1, 4).column_local(2, 2).spatial(8, 4).local(1, 2)">
func.func @decode_layout(%t: !codes) {
  // expected-error @below {{layout: expected column_local(2, 8).spatial(8, 4).local(1, 2), got spatial(8, 4).local(2, 16)}}
  %0 = "lowbit.decode"(%t) {exponent = 0, operandSegmentSizes = array<i32: 1, 0>} : (!codes) -> !lowbit.reg<[16, 64], f16, "spatial(8, 4).local(2, 16)">
  return
}

// -----

// Shifts of what is decoded.
!codes = !lowbit.reg<[16, 64], #lowbit.format<"u2", []>, "local(1, 4).column_local(2, 2).spatial(8, 4).local(1, 2)">
!shift = !lowbit.reg<[16, 1], f16, "local(2, 1).spatial(8, 1).replicated(4)">
func.func @decode_shift_biased(%t: !codes, %a: !shift) {
  // expected-error @below {{offset with shifts: expected subtracted, got deferred}}
  %0 = "lowbit.decode"(%t, %a) {exponent = 0, offset = "deferred", operandSegmentSizes = array<i32: 1, 1>} : (!codes, !shift)
    -> !lowbit.reg<[16, 64], f16, "local(1, 4).column_local(2, 2).spatial(8, 4).local(1, 2)">
  return
}

// -----

!codes = !lowbit.reg<[16, 64], #lowbit.format<"f4e2m1", []>, "local(1, 4).column_local(2, 2).spatial(8, 4).local(1, 2)">
!shift = !lowbit.reg<[16, 1], f16, "local(2, 1).spatial(8, 1).replicated(4)">
func.func @decode_shift_float(%t: !codes, %a: !shift) {
  // expected-error @below {{format with shifts: expected an integer one, got f4e2m1}}
  %0 = "lowbit.decode"(%t, %a) {exponent = 0, operandSegmentSizes = array<i32: 1, 1>} : (!codes, !shift)
    -> !lowbit.reg<[16, 64], f16, "local(1, 4).column_local(2, 2).spatial(8, 4).local(1, 2)">
  return
}

// -----

!codes = !lowbit.reg<[16, 64], #lowbit.format<"u4", []>, "local(1, 4).column_local(2, 2).spatial(8, 4).local(1, 2)">
!shift = !lowbit.reg<[16, 1], f16, "local(2, 1).spatial(8, 1).replicated(4)">
func.func @decode_shift_element(%t: !codes, %a: !lowbit.reg<[16, 1], f32, "local(2, 1).spatial(8, 1).replicated(4)">) {
  // expected-error @below {{element of the shifts: expected f16, got f32}}
  %0 = "lowbit.decode"(%t, %a) {exponent = 0, operandSegmentSizes = array<i32: 1, 1>} : (!codes, !lowbit.reg<[16, 1], f32, "local(2, 1).spatial(8, 1).replicated(4)">)
    -> !lowbit.reg<[16, 64], f16, "local(1, 4).column_local(2, 2).spatial(8, 4).local(1, 2)">
  return
}

// -----

// A shift for a row is in the lanes that hold the row.
!codes = !lowbit.reg<[16, 64], #lowbit.format<"u4", []>, "local(1, 4).column_local(2, 2).spatial(8, 4).local(1, 2)">
!shift = !lowbit.reg<[16, 1], f16, "local(2, 1).spatial(8, 1).replicated(4)">
func.func @decode_shift_layout(%t: !codes, %a: !lowbit.reg<[16, 1], f16, "spatial(8, 1).replicated(4).local(2, 1)">) {
  // expected-error @below {{layout of the shifts: expected}}
  %0 = "lowbit.decode"(%t, %a) {exponent = 0, operandSegmentSizes = array<i32: 1, 1>} : (!codes, !lowbit.reg<[16, 1], f16, "spatial(8, 1).replicated(4).local(2, 1)">)
    -> !lowbit.reg<[16, 64], f16, "local(1, 4).column_local(2, 2).spatial(8, 4).local(1, 2)">
  return
}

// -----

!codes = !lowbit.reg<[16, 64], #lowbit.format<"u4", []>, "local(1, 4).column_local(2, 2).spatial(8, 4).local(1, 2)">
!shift = !lowbit.reg<[16, 1], f16, "local(2, 1).spatial(8, 1).replicated(4)">
func.func @decode_shift_columns(%t: !codes, %a: !lowbit.reg<[16, 4], f16, "local(2, 1).spatial(8, 4)">) {
  // expected-error @below {{layout of the shifts: expected}}
  %0 = "lowbit.decode"(%t, %a) {exponent = 0, operandSegmentSizes = array<i32: 1, 1>} : (!codes, !lowbit.reg<[16, 4], f16, "local(2, 1).spatial(8, 4)">)
    -> !lowbit.reg<[16, 64], f16, "local(1, 4).column_local(2, 2).spatial(8, 4).local(1, 2)">
  return
}

// -----

!codes = !lowbit.reg<[16, 64], #lowbit.format<"u4", []>, "local(1, 4).column_local(2, 2).spatial(8, 4).local(1, 2)">
!shift = !lowbit.reg<[16, 1], f16, "local(2, 1).spatial(8, 1).replicated(4)">
func.func @decode_shift_parts(%t: !codes, %a: !shift, %b: !shift, %c: !shift) {
  // expected-error @below {{shifts: expected a number that divides the 4 blocks of 16 columns, got 3}}
  %0 = "lowbit.decode"(%t, %a, %b, %c) {exponent = 0, operandSegmentSizes = array<i32: 1, 3>} : (!codes, !shift, !shift, !shift)
    -> !lowbit.reg<[16, 64], f16, "local(1, 4).column_local(2, 2).spatial(8, 4).local(1, 2)">
  return
}

// -----

!codes = !lowbit.reg<[16, 64], #lowbit.format<"nf4", []>, "local(1, 4).column_local(2, 2).spatial(8, 4).local(1, 2)">
!numbers = !lowbit.reg<[16, 64], f16, "local(1, 4).column_local(2, 2).spatial(8, 4).local(1, 2)">
!table = !lowbit.shared<[16, 32], i32, [32, 1], 0>
func.func @lookup_table(%codes: !codes, %table: !table) {
  // expected-error @below {{table from nf4 to f16: expected !lowbit.shared<[256, 32], i32, [32, 1]}}
  %0 = "lowbit.lookup"(%codes, %table) : (!codes, !table) -> !numbers
  return
}

// -----

!table = !lowbit.shared<[256, 32], i32, [32, 1], 0>
func.func @lookup_bytes(%t: !lowbit.reg<[8, 4], i8, "spatial(8, 4)">, %table: !table) {
  // expected-error @below {{'lowbit.lookup_bytes' op table: expected !lowbit.shared<[256, 1], i32, [1, 1]}}
  %0 = "lowbit.lookup_bytes"(%t, %table) : (!lowbit.reg<[8, 4], i8, "spatial(8, 4)">, !table) -> !lowbit.reg<[8, 4], f32, "spatial(8, 4)">
  return
}

// -----

!table = !lowbit.shared<[256, 32], i32, [32, 1], 0>
func.func @lookup_numbers(%t: !lowbit.reg<[8, 4], f16, "spatial(8, 4)">, %table: !table) {
  // expected-error @below {{'lowbit.lookup' op source: expected codes of a low-bit format, got f16}}
  %0 = "lowbit.lookup"(%t, %table) : (!lowbit.reg<[8, 4], f16, "spatial(8, 4)">, !table) -> !lowbit.reg<[8, 4], f16, "spatial(8, 4)">
  return
}

// -----

!codes = !lowbit.reg<[16, 16], #lowbit.format<"i4", []>, "column_local(2, 2).spatial(8, 4).local(1, 2)">
!numbers = !lowbit.reg<[16, 16], i8, "column_local(2, 2).spatial(8, 4).local(1, 2)">
!where = !lowbit.reg<[16, 16], i32, "column_local(2, 2).spatial(8, 4).local(1, 2)">
func.func @encode_conditions(%t: !numbers, %where: !where) {
  // expected-error @below {{element of the conditions: expected i1, got i32}}
  %0 = "lowbit.encode"(%t, %where) {operandSegmentSizes = array<i32: 1, 1>} : (!numbers, !where) -> !codes
  return
}

// -----

!codes = !lowbit.reg<[16, 16], #lowbit.format<"i4", []>, "column_local(2, 2).spatial(8, 4).local(1, 2)">
!numbers = !lowbit.reg<[16, 16], i8, "column_local(2, 2).spatial(8, 4).local(1, 2)">
!where = !lowbit.reg<[16, 1], i1, "local(2, 1).spatial(8, 1).replicated(4)">
func.func @encode_conditions_of_rows(%t: !numbers, %where: !where) {
  // expected-error @below {{layout of the conditions: expected}}
  %0 = "lowbit.encode"(%t, %where) {operandSegmentSizes = array<i32: 1, 1>} : (!numbers, !where) -> !codes
  return
}
