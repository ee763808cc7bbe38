// RUN: %lowbit-opt %s --split-input-file --verify-diagnostics

// What the verifiers of one token in integers refuse.

// Codes that share a byte with no other row: of 1, 2 or 4 bits, and integers.
!x = !lowbit.shared<[1, 1, 128], f16, [136, 136, 1], 0>
!digits = !lowbit.shared<[1, 1, 4, 4, 8], i32, [192, 192, 48, 12, 1], 0>
!unit = !lowbit.reg<[1, 1, 1], f32, "replicated(32, rank=3)">
func.func @format(%x: !x, %digits: !digits) {
  // expected-error @below {{'lowbit.split_digits' op codes: expected integers of 1, 2, 4 bits, got}}
  %0 = "lowbit.split_digits"(%x, %digits) {format = #lowbit.format<"u3", []>} : (!x, !digits) -> !unit
  return
}

// -----

!digits = !lowbit.shared<[1, 1, 4, 4, 8], i32, [192, 192, 48, 12, 1], 0>
!unit = !lowbit.reg<[1, 1, 1], f32, "replicated(32, rank=3)">
!other = !lowbit.shared<[1, 1, 128], f32, [136, 136, 1], 0>
func.func @element(%x: !other, %digits: !digits) {
  // expected-error @below {{element of x: expected f16 or bf16, got f32}}
  %0 = "lowbit.split_digits"(%x, %digits) {format = #lowbit.format<"u2", []>} : (!other, !digits) -> !unit
  return
}

// -----

// One row, of as many columns as there are digits.
!digits = !lowbit.shared<[1, 1, 4, 4, 8], i32, [192, 192, 48, 12, 1], 0>
!unit = !lowbit.reg<[1, 1, 1], f32, "replicated(32, rank=3)">
!other = !lowbit.shared<[1, 1, 256], f16, [256, 256, 1], 0>
func.func @rows(%x: !other, %digits: !digits) {
  // expected-error @below {{x: expected (1, 1, 128), got (1, 1, 256)}}
  %0 = "lowbit.split_digits"(%x, %digits) {format = #lowbit.format<"u2", []>} : (!other, !digits) -> !unit
  return
}

// -----

!digits = !lowbit.shared<[1, 1, 4, 4, 8], i32, [192, 192, 48, 12, 1], 0>
!unit = !lowbit.reg<[1, 1, 1], f32, "replicated(32, rank=3)">
!other = !lowbit.shared<[1, 1, 128], f16, [128, 128, 2], 0>
func.func @odd(%x: !other, %digits: !digits) {
  // expected-error @below {{x: expected rows in one piece that start at even columns, got [128, 128, 2]}}
  %0 = "lowbit.split_digits"(%x, %digits) {format = #lowbit.format<"u2", []>} : (!other, !digits) -> !unit
  return
}

// -----

!x = !lowbit.shared<[1, 1, 128], f16, [136, 136, 1], 0>
!unit = !lowbit.reg<[1, 1, 1], f32, "replicated(32, rank=3)">
!other = !lowbit.shared<[1, 1, 4, 4, 8], f32, [192, 192, 48, 12, 1], 0>
func.func @digits_element(%x: !x, %digits: !other) {
  // expected-error @below {{element of the digits: expected i32, got f32}}
  %0 = "lowbit.split_digits"(%x, %digits) {format = #lowbit.format<"u2", []>} : (!x, !other) -> !unit
  return
}

// -----

!x = !lowbit.shared<[1, 1, 128], f16, [136, 136, 1], 0>
!unit = !lowbit.reg<[1, 1, 1], f32, "replicated(32, rank=3)">
!other = !lowbit.shared<[1, 1, 3, 4, 8], i32, [192, 192, 48, 12, 1], 0>
func.func @digits_shape(%x: !x, %digits: !other) {
  // expected-error @below {{digits: expected [warps, pieces, 4, 4, 8], got (1, 1, 3, 4, 8)}}
  %0 = "lowbit.split_digits"(%x, %digits) {format = #lowbit.format<"u2", []>} : (!x, !other) -> !unit
  return
}

// -----

// Lanes load 16 bytes at a time.
!x = !lowbit.shared<[1, 1, 128], f16, [136, 136, 1], 0>
!unit = !lowbit.reg<[1, 1, 1], f32, "replicated(32, rank=3)">
!other = !lowbit.shared<[1, 1, 4, 4, 8], i32, [160, 160, 40, 10, 1], 0>
func.func @digits_strides(%x: !x, %digits: !other) {
  // expected-error @below {{strides of the digits: expected multiples of 4 (16 bytes) and 1 for the last dim, got [160, 160, 40, 10, 1]}}
  %0 = "lowbit.split_digits"(%x, %digits) {format = #lowbit.format<"u2", []>} : (!x, !other) -> !unit
  return
}

// -----

!x = !lowbit.shared<[1, 1, 128], f16, [136, 136, 1], 0>
!digits = !lowbit.shared<[1, 1, 4, 4, 8], i32, [192, 192, 48, 12, 1], 0>
!other = !lowbit.reg<[1, 1, 1], f16, "replicated(32, rank=3)">
func.func @unit(%x: !x, %digits: !digits) {
  // expected-error @below {{unit: expected f32 laid out as replicated(32, rank=3), got f16 as replicated(32, rank=3)}}
  %0 = "lowbit.split_digits"(%x, %digits) {format = #lowbit.format<"u2", []>} : (!x, !digits) -> !other
  return
}

// -----

!digits = !lowbit.shared<[1, 1, 4, 4, 8], i32, [192, 192, 48, 12, 1], 0>
!unit = !lowbit.reg<[1, 1, 1], f32, "replicated(32, rank=3)">
!pairs = !lowbit.reg<[1, 16, 2], f32, "local(1, 2, 1).spatial(1, 8, 1).replicated(2).spatial(1, 1, 2)">
!other = !lowbit.reg<[1, 16, 128], f16, "column_local(1, 2, 16).spatial(1, 8, 4).local(1, 1, 2)">
func.func @mma_codes(%codes: !other, %digits: !digits, %unit: !unit) {
  // expected-error @below {{'lowbit.digit_mma' op codes: expected integers of 1, 2, 4 bits, got f16}}
  %0 = "lowbit.digit_mma"(%codes, %digits, %unit) {start = 0, columns = 128} : (!other, !digits, !unit) -> !pairs
  return
}

// -----

!digits = !lowbit.shared<[1, 1, 4, 4, 8], i32, [192, 192, 48, 12, 1], 0>
!unit = !lowbit.reg<[1, 1, 1], f32, "replicated(32, rank=3)">
!pairs = !lowbit.reg<[1, 16, 2], f32, "local(1, 2, 1).spatial(1, 8, 1).replicated(2).spatial(1, 1, 2)">
!other = !lowbit.reg<[1, 16, 256], #lowbit.format<"u2", []>, "column_local(1, 2, 32).spatial(1, 8, 4).local(1, 1, 2)">
func.func @mma_columns(%codes: !other, %digits: !digits, %unit: !unit) {
  // expected-error @below {{a: expected [1, m, 128], got [1, 16, 256]}}
  %0 = "lowbit.digit_mma"(%codes, %digits, %unit) {start = 0, columns = 128} : (!other, !digits, !unit) -> !pairs
  return
}

// -----

!digits = !lowbit.shared<[1, 1, 4, 4, 8], i32, [192, 192, 48, 12, 1], 0>
!unit = !lowbit.reg<[1, 1, 1], f32, "replicated(32, rank=3)">
!pairs = !lowbit.reg<[1, 16, 2], f32, "local(1, 2, 1).spatial(1, 8, 1).replicated(2).spatial(1, 1, 2)">
!other = !lowbit.reg<[1, 16, 128], #lowbit.format<"u2", []>, "local(1, 1, 64).spatial(1, 16, 2)">
func.func @mma_fragments(%codes: !other, %digits: !digits, %unit: !unit) {
  // expected-error @below {{layout of a: expected a multiple of column_local(2, 2).spatial(8, 4).local(1, 2)}}
  %0 = "lowbit.digit_mma"(%codes, %digits, %unit) {start = 0, columns = 128} : (!other, !digits, !unit) -> !pairs
  return
}

// -----

// All of a row is in one warp, whose lanes have the digits.
!digits = !lowbit.shared<[1, 1, 4, 4, 8], i32, [192, 192, 48, 12, 1], 0>
!unit = !lowbit.reg<[1, 1, 1], f32, "replicated(32, rank=3)">
!pairs = !lowbit.reg<[1, 16, 2], f32, "local(1, 2, 1).spatial(1, 8, 1).replicated(2).spatial(1, 1, 2)">
!other = !lowbit.reg<[1, 16, 128], #lowbit.format<"u2", []>, "spatial(1, 1, 2).column_local(1, 2, 8).spatial(1, 8, 4).local(1, 1, 2)">
func.func @mma_warps(%codes: !other, %digits: !digits, %unit: !unit) {
  // expected-error @below {{a: expected all rows and columns in one warp}}
  %0 = "lowbit.digit_mma"(%codes, %digits, %unit) {start = 0, columns = 128} : (!other, !digits, !unit) -> !pairs
  return
}

// -----

!digits = !lowbit.shared<[1, 1, 4, 4, 8], i32, [192, 192, 48, 12, 1], 0>
!unit = !lowbit.reg<[1, 1, 1], f32, "replicated(32, rank=3)">
!codes = !lowbit.reg<[1, 16, 128], #lowbit.format<"u2", []>, "column_local(1, 2, 16).spatial(1, 8, 4).local(1, 1, 2)">
!other = !lowbit.reg<[1, 16, 8], f32, "local(1, 2, 1).spatial(1, 8, 4).local(1, 1, 2)">
func.func @mma_result(%codes: !codes, %digits: !digits, %unit: !unit) {
  // expected-error @below {{result: expected f32 laid out as local(1, 2, 1).spatial(1, 8, 1).replicated(2).spatial(1, 1, 2), got f32 as local(1, 2, 1).spatial(1, 8, 4).local(1, 1, 2)}}
  %0 = "lowbit.digit_mma"(%codes, %digits, %unit) {start = 0, columns = 128} : (!codes, !digits, !unit) -> !other
  return
}

// -----

// Whole pieces of 128 columns.
!digits = !lowbit.shared<[1, 1, 4, 4, 8], i32, [192, 192, 48, 12, 1], 0>
!unit = !lowbit.reg<[1, 1, 1], f32, "replicated(32, rank=3)">
!codes = !lowbit.reg<[1, 16, 128], #lowbit.format<"u2", []>, "column_local(1, 2, 16).spatial(1, 8, 4).local(1, 1, 2)">
!pairs = !lowbit.reg<[1, 16, 2], f32, "local(1, 2, 1).spatial(1, 8, 1).replicated(2).spatial(1, 1, 2)">
func.func @mma_start(%codes: !codes, %digits: !digits, %unit: !unit) {
  // expected-error @below {{start: expected 0..0, got 128}}
  %0 = "lowbit.digit_mma"(%codes, %digits, %unit) {start = 128, columns = 128} : (!codes, !digits, !unit) -> !pairs
  return
}

// -----

!digits = !lowbit.shared<[1, 1, 4, 4, 8], i32, [192, 192, 48, 12, 1], 0>
!unit = !lowbit.reg<[1, 1, 1], f32, "replicated(32, rank=3)">
!codes = !lowbit.reg<[1, 16, 128], #lowbit.format<"u2", []>, "column_local(1, 2, 16).spatial(1, 8, 4).local(1, 1, 2)">
!pairs = !lowbit.reg<[1, 16, 2], f32, "local(1, 2, 1).spatial(1, 8, 1).replicated(2).spatial(1, 1, 2)">
func.func @mma_pieces(%codes: !codes, %digits: !digits, %unit: !unit) {
  // expected-error @below {{columns: expected 128..128, got 192}}
  %0 = "lowbit.digit_mma"(%codes, %digits, %unit) {start = 0, columns = 192} : (!codes, !digits, !unit) -> !pairs
  return
}

// -----

!digits = !lowbit.shared<[1, 1, 4, 4, 8], i32, [192, 192, 48, 12, 1], 0>
!unit = !lowbit.reg<[1, 1, 1], f32, "replicated(32, rank=3)">
!sums = !lowbit.reg<[1, 1, 2], f32, "replicated(16, rank=3).spatial(1, 1, 2)">
func.func @sums_format(%digits: !digits, %unit: !unit) {
  // expected-error @below {{'lowbit.digit_sums' op codes: expected integers of 1, 2, 4 bits, got}}
  %0 = "lowbit.digit_sums"(%digits, %unit) {format = #lowbit.format<"nf4", []>, start = 0, columns = 128} : (!digits, !unit) -> !sums
  return
}

// -----

!digits = !lowbit.shared<[1, 1, 4, 4, 8], i32, [192, 192, 48, 12, 1], 0>
!unit = !lowbit.reg<[1, 1, 1], f32, "replicated(32, rank=3)">
!sums = !lowbit.reg<[1, 1, 2], f32, "replicated(16, rank=3).spatial(1, 1, 2)">
func.func @sums_columns(%digits: !digits, %unit: !unit) {
  // expected-error @below {{columns: expected 128..128, got 64}}
  %0 = "lowbit.digit_sums"(%digits, %unit) {format = #lowbit.format<"u2", []>, start = 0, columns = 64} : (!digits, !unit) -> !sums
  return
}

// -----

!digits = !lowbit.shared<[1, 1, 4, 4, 8], i32, [192, 192, 48, 12, 1], 0>
!unit = !lowbit.reg<[1, 1, 1], f32, "replicated(32, rank=3)">
!pairs = !lowbit.reg<[1, 16, 2], f32, "local(1, 2, 1).spatial(1, 8, 1).replicated(2).spatial(1, 1, 2)">
func.func @sums_result(%digits: !digits, %unit: !unit) {
  // expected-error @below {{result: expected f32 laid out as replicated(16, rank=3).spatial(1, 1, 2), got f32 as local(1, 2, 1)}}
  %0 = "lowbit.digit_sums"(%digits, %unit) {format = #lowbit.format<"u2", []>, start = 0, columns = 128} : (!digits, !unit) -> !pairs
  return
}

// -----

!joined = !lowbit.reg<[1, 16, 1], f32, "local(1, 2, 1).spatial(1, 8, 1).replicated(4)">
!other = !lowbit.reg<[1, 16, 2], f16, "local(1, 2, 1).spatial(1, 8, 1).replicated(2).spatial(1, 1, 2)">
func.func @join_element(%a: !other) {
  // expected-error @below {{'lowbit.join_digits' op element of the source: expected f32, got f16}}
  %0 = "lowbit.join_digits"(%a) : (!other) -> !joined
  return
}

// -----

!joined = !lowbit.reg<[1, 16, 1], f32, "local(1, 2, 1).spatial(1, 8, 1).replicated(4)">
func.func @join_source(%a: !joined) {
  // expected-error @below {{layout of source: expected a multiple of local(2, 1).spatial(8, 1).replicated(2).spatial(1, 2)}}
  %0 = "lowbit.join_digits"(%a) : (!joined) -> !joined
  return
}

// -----

!joined = !lowbit.reg<[1, 16, 1], f32, "local(1, 2, 1).spatial(1, 8, 1).replicated(4)">
!other = !lowbit.reg<[1, 16, 4], f32, "local(1, 1, 2).local(1, 2, 1).spatial(1, 8, 1).replicated(2).spatial(1, 1, 2)">
func.func @join_columns(%a: !other) {
  // expected-error @below {{columns of the source: expected 2, got 4}}
  %0 = "lowbit.join_digits"(%a) : (!other) -> !joined
  return
}

// -----

!pairs = !lowbit.reg<[1, 16, 2], f32, "local(1, 2, 1).spatial(1, 8, 1).replicated(2).spatial(1, 1, 2)">
func.func @join_result(%a: !pairs) {
  // expected-error @below {{result: expected f32 laid out as local(1, 2, 1).spatial(1, 8, 1).replicated(4), got f32 as local(1, 2, 1).spatial(1, 8, 1).replicated(2).spatial(1, 1, 2)}}
  %0 = "lowbit.join_digits"(%a) : (!pairs) -> !pairs
  return
}
