// RUN: %lowbit-opt %s --split-input-file --verify-diagnostics

// What the verifiers of one token in integers refuse.

// Codes that share a byte with no other row: of 1, 2 or 4 bits, and integers.
!x = !lowbit.shared<[1, 1, 128], f16, [136, 136, 1], 0>
!limbs = !lowbit.shared<[1, 1, 4, 4, 8], i32, [192, 192, 48, 12, 1], 0>
!unit = !lowbit.reg<[1, 1, 1], f32, "replicated(32, rank=3)">
func.func @format(%x: !x, %limbs: !limbs) {
  // expected-error @below {{'lowbit.split_limbs' op codes: expected integers of 1, 2, 4 bits, got}}
  %0 = "lowbit.split_limbs"(%x, %limbs) {format = #lowbit.format<"u3", []>} : (!x, !limbs) -> !unit
  return
}

// -----

!limbs = !lowbit.shared<[1, 1, 4, 4, 8], i32, [192, 192, 48, 12, 1], 0>
!unit = !lowbit.reg<[1, 1, 1], f32, "replicated(32, rank=3)">
!other = !lowbit.shared<[1, 1, 128], f32, [136, 136, 1], 0>
func.func @element(%x: !other, %limbs: !limbs) {
  // expected-error @below {{element of x: expected f16 or bf16, got f32}}
  %0 = "lowbit.split_limbs"(%x, %limbs) {format = #lowbit.format<"u2", []>} : (!other, !limbs) -> !unit
  return
}

// -----

// One row, of as many columns as there are limbs.
!limbs = !lowbit.shared<[1, 1, 4, 4, 8], i32, [192, 192, 48, 12, 1], 0>
!unit = !lowbit.reg<[1, 1, 1], f32, "replicated(32, rank=3)">
!other = !lowbit.shared<[1, 1, 256], f16, [256, 256, 1], 0>
func.func @rows(%x: !other, %limbs: !limbs) {
  // expected-error @below {{x: expected (1, 1, 128), got (1, 1, 256)}}
  %0 = "lowbit.split_limbs"(%x, %limbs) {format = #lowbit.format<"u2", []>} : (!other, !limbs) -> !unit
  return
}

// -----

!limbs = !lowbit.shared<[1, 1, 4, 4, 8], i32, [192, 192, 48, 12, 1], 0>
!unit = !lowbit.reg<[1, 1, 1], f32, "replicated(32, rank=3)">
!other = !lowbit.shared<[1, 1, 128], f16, [128, 128, 2], 0>
func.func @odd(%x: !other, %limbs: !limbs) {
  // expected-error @below {{x: expected rows in one piece that start at even columns, got [128, 128, 2]}}
  %0 = "lowbit.split_limbs"(%x, %limbs) {format = #lowbit.format<"u2", []>} : (!other, !limbs) -> !unit
  return
}

// -----

!x = !lowbit.shared<[1, 1, 128], f16, [136, 136, 1], 0>
!unit = !lowbit.reg<[1, 1, 1], f32, "replicated(32, rank=3)">
!other = !lowbit.shared<[1, 1, 4, 4, 8], f32, [192, 192, 48, 12, 1], 0>
func.func @digits_element(%x: !x, %limbs: !other) {
  // expected-error @below {{element of the limbs: expected i32, got f32}}
  %0 = "lowbit.split_limbs"(%x, %limbs) {format = #lowbit.format<"u2", []>} : (!x, !other) -> !unit
  return
}

// -----

!x = !lowbit.shared<[1, 1, 128], f16, [136, 136, 1], 0>
!unit = !lowbit.reg<[1, 1, 1], f32, "replicated(32, rank=3)">
!other = !lowbit.shared<[1, 1, 3, 4, 8], i32, [192, 192, 48, 12, 1], 0>
func.func @digits_shape(%x: !x, %limbs: !other) {
  // expected-error @below {{limbs: expected [warps, pieces, 4, 4, 8], got (1, 1, 3, 4, 8)}}
  %0 = "lowbit.split_limbs"(%x, %limbs) {format = #lowbit.format<"u2", []>} : (!x, !other) -> !unit
  return
}

// -----

// Lanes load 16 bytes at a time.
!x = !lowbit.shared<[1, 1, 128], f16, [136, 136, 1], 0>
!unit = !lowbit.reg<[1, 1, 1], f32, "replicated(32, rank=3)">
!other = !lowbit.shared<[1, 1, 4, 4, 8], i32, [160, 160, 40, 10, 1], 0>
func.func @digits_strides(%x: !x, %limbs: !other) {
  // expected-error @below {{strides of the limbs: expected multiples of 4 (16 bytes) and 1 for the last dim, got [160, 160, 40, 10, 1]}}
  %0 = "lowbit.split_limbs"(%x, %limbs) {format = #lowbit.format<"u2", []>} : (!x, !other) -> !unit
  return
}

// -----

!x = !lowbit.shared<[1, 1, 128], f16, [136, 136, 1], 0>
!limbs = !lowbit.shared<[1, 1, 4, 4, 8], i32, [192, 192, 48, 12, 1], 0>
!other = !lowbit.reg<[1, 1, 1], f16, "replicated(32, rank=3)">
func.func @unit(%x: !x, %limbs: !limbs) {
  // expected-error @below {{unit: expected f32 laid out as replicated(32, rank=3), got f16 as replicated(32, rank=3)}}
  %0 = "lowbit.split_limbs"(%x, %limbs) {format = #lowbit.format<"u2", []>} : (!x, !limbs) -> !other
  return
}

// -----

!limbs = !lowbit.shared<[1, 1, 4, 4, 8], i32, [192, 192, 48, 12, 1], 0>
!unit = !lowbit.reg<[1, 1, 1], f32, "replicated(32, rank=3)">
!pairs = !lowbit.reg<[1, 16, 2], f32, "local(1, 2, 1).spatial(1, 8, 1).replicated(2).spatial(1, 1, 2)">
!other = !lowbit.reg<[1, 16, 128], f16, "column_local(1, 2, 16).spatial(1, 8, 4).local(1, 1, 2)">
func.func @mma_codes(%codes: !other, %limbs: !limbs, %unit: !unit) {
  // expected-error @below {{'lowbit.limb_mma' op codes: expected integers of 1, 2, 4 bits, got f16}}
  %0 = "lowbit.limb_mma"(%codes, %limbs, %unit) {start = 0, columns = 128} : (!other, !limbs, !unit) -> !pairs
  return
}

// -----

!limbs = !lowbit.shared<[1, 1, 4, 4, 8], i32, [192, 192, 48, 12, 1], 0>
!unit = !lowbit.reg<[1, 1, 1], f32, "replicated(32, rank=3)">
!pairs = !lowbit.reg<[1, 16, 2], f32, "local(1, 2, 1).spatial(1, 8, 1).replicated(2).spatial(1, 1, 2)">
!other = !lowbit.reg<[1, 16, 256], #lowbit.format<"u2", []>, "column_local(1, 2, 32).spatial(1, 8, 4).local(1, 1, 2)">
func.func @mma_columns(%codes: !other, %limbs: !limbs, %unit: !unit) {
  // expected-error @below {{a: expected [1, m, 128], got [1, 16, 256]}}
  %0 = "lowbit.limb_mma"(%codes, %limbs, %unit) {start = 0, columns = 128} : (!other, !limbs, !unit) -> !pairs
  return
}

// -----

!limbs = !lowbit.shared<[1, 1, 4, 4, 8], i32, [192, 192, 48, 12, 1], 0>
!unit = !lowbit.reg<[1, 1, 1], f32, "replicated(32, rank=3)">
!pairs = !lowbit.reg<[1, 16, 2], f32, "local(1, 2, 1).spatial(1, 8, 1).replicated(2).spatial(1, 1, 2)">
!other = !lowbit.reg<[1, 16, 128], #lowbit.format<"u2", []>, "local(1, 1, 64).spatial(1, 16, 2)">
func.func @mma_fragments(%codes: !other, %limbs: !limbs, %unit: !unit) {
  // expected-error @below {{layout of a: expected a multiple of column_local(2, 2).spatial(8, 4).local(1, 2)}}
  %0 = "lowbit.limb_mma"(%codes, %limbs, %unit) {start = 0, columns = 128} : (!other, !limbs, !unit) -> !pairs
  return
}

// -----

// All of a row is in one warp, whose lanes have the limbs.
!limbs = !lowbit.shared<[1, 1, 4, 4, 8], i32, [192, 192, 48, 12, 1], 0>
!unit = !lowbit.reg<[1, 1, 1], f32, "replicated(32, rank=3)">
!pairs = !lowbit.reg<[1, 16, 2], f32, "local(1, 2, 1).spatial(1, 8, 1).replicated(2).spatial(1, 1, 2)">
!other = !lowbit.reg<[1, 16, 128], #lowbit.format<"u2", []>, "spatial(1, 1, 2).column_local(1, 2, 8).spatial(1, 8, 4).local(1, 1, 2)">
func.func @mma_warps(%codes: !other, %limbs: !limbs, %unit: !unit) {
  // expected-error @below {{a: expected all rows and columns in one warp}}
  %0 = "lowbit.limb_mma"(%codes, %limbs, %unit) {start = 0, columns = 128} : (!other, !limbs, !unit) -> !pairs
  return
}

// -----

!limbs = !lowbit.shared<[1, 1, 4, 4, 8], i32, [192, 192, 48, 12, 1], 0>
!unit = !lowbit.reg<[1, 1, 1], f32, "replicated(32, rank=3)">
!codes = !lowbit.reg<[1, 16, 128], #lowbit.format<"u2", []>, "column_local(1, 2, 16).spatial(1, 8, 4).local(1, 1, 2)">
!other = !lowbit.reg<[1, 16, 8], f32, "local(1, 2, 1).spatial(1, 8, 4).local(1, 1, 2)">
func.func @mma_result(%codes: !codes, %limbs: !limbs, %unit: !unit) {
  // expected-error @below {{result: expected f32 laid out as local(1, 2, 1).spatial(1, 8, 1).replicated(2).spatial(1, 1, 2), got f32 as local(1, 2, 1).spatial(1, 8, 4).local(1, 1, 2)}}
  %0 = "lowbit.limb_mma"(%codes, %limbs, %unit) {start = 0, columns = 128} : (!codes, !limbs, !unit) -> !other
  return
}

// -----

// Whole pieces of 128 columns.
!limbs = !lowbit.shared<[1, 1, 4, 4, 8], i32, [192, 192, 48, 12, 1], 0>
!unit = !lowbit.reg<[1, 1, 1], f32, "replicated(32, rank=3)">
!codes = !lowbit.reg<[1, 16, 128], #lowbit.format<"u2", []>, "column_local(1, 2, 16).spatial(1, 8, 4).local(1, 1, 2)">
!pairs = !lowbit.reg<[1, 16, 2], f32, "local(1, 2, 1).spatial(1, 8, 1).replicated(2).spatial(1, 1, 2)">
func.func @mma_start(%codes: !codes, %limbs: !limbs, %unit: !unit) {
  // expected-error @below {{start: expected 0..0, got 128}}
  %0 = "lowbit.limb_mma"(%codes, %limbs, %unit) {start = 128, columns = 128} : (!codes, !limbs, !unit) -> !pairs
  return
}

// -----

!limbs = !lowbit.shared<[1, 1, 4, 4, 8], i32, [192, 192, 48, 12, 1], 0>
!unit = !lowbit.reg<[1, 1, 1], f32, "replicated(32, rank=3)">
!codes = !lowbit.reg<[1, 16, 128], #lowbit.format<"u2", []>, "column_local(1, 2, 16).spatial(1, 8, 4).local(1, 1, 2)">
!pairs = !lowbit.reg<[1, 16, 2], f32, "local(1, 2, 1).spatial(1, 8, 1).replicated(2).spatial(1, 1, 2)">
func.func @mma_pieces(%codes: !codes, %limbs: !limbs, %unit: !unit) {
  // expected-error @below {{columns: expected 128..128, got 192}}
  %0 = "lowbit.limb_mma"(%codes, %limbs, %unit) {start = 0, columns = 192} : (!codes, !limbs, !unit) -> !pairs
  return
}

// -----

!limbs = !lowbit.shared<[1, 1, 4, 4, 8], i32, [192, 192, 48, 12, 1], 0>
!unit = !lowbit.reg<[1, 1, 1], f32, "replicated(32, rank=3)">
!sums = !lowbit.reg<[1, 1, 2], f32, "replicated(16, rank=3).spatial(1, 1, 2)">
func.func @sums_format(%limbs: !limbs, %unit: !unit) {
  // expected-error @below {{'lowbit.limb_sums' op codes: expected integers of 1, 2, 4 bits, got}}
  %0 = "lowbit.limb_sums"(%limbs, %unit) {format = #lowbit.format<"nf4", []>, start = 0, columns = 128} : (!limbs, !unit) -> !sums
  return
}

// -----

!limbs = !lowbit.shared<[1, 1, 4, 4, 8], i32, [192, 192, 48, 12, 1], 0>
!unit = !lowbit.reg<[1, 1, 1], f32, "replicated(32, rank=3)">
!sums = !lowbit.reg<[1, 1, 2], f32, "replicated(16, rank=3).spatial(1, 1, 2)">
func.func @sums_columns(%limbs: !limbs, %unit: !unit) {
  // expected-error @below {{columns: expected 128..128, got 64}}
  %0 = "lowbit.limb_sums"(%limbs, %unit) {format = #lowbit.format<"u2", []>, start = 0, columns = 64} : (!limbs, !unit) -> !sums
  return
}

// -----

!limbs = !lowbit.shared<[1, 1, 4, 4, 8], i32, [192, 192, 48, 12, 1], 0>
!unit = !lowbit.reg<[1, 1, 1], f32, "replicated(32, rank=3)">
!pairs = !lowbit.reg<[1, 16, 2], f32, "local(1, 2, 1).spatial(1, 8, 1).replicated(2).spatial(1, 1, 2)">
func.func @sums_result(%limbs: !limbs, %unit: !unit) {
  // expected-error @below {{result: expected f32 laid out as replicated(16, rank=3).spatial(1, 1, 2), got f32 as local(1, 2, 1)}}
  %0 = "lowbit.limb_sums"(%limbs, %unit) {format = #lowbit.format<"u2", []>, start = 0, columns = 128} : (!limbs, !unit) -> !pairs
  return
}

// -----

!joined = !lowbit.reg<[1, 16, 1], f32, "local(1, 2, 1).spatial(1, 8, 1).replicated(4)">
!other = !lowbit.reg<[1, 16, 2], f16, "local(1, 2, 1).spatial(1, 8, 1).replicated(2).spatial(1, 1, 2)">
func.func @join_element(%a: !other) {
  // expected-error @below {{'lowbit.join_limbs' op element of the source: expected f32, got f16}}
  %0 = "lowbit.join_limbs"(%a) : (!other) -> !joined
  return
}

// -----

!joined = !lowbit.reg<[1, 16, 1], f32, "local(1, 2, 1).spatial(1, 8, 1).replicated(4)">
func.func @join_source(%a: !joined) {
  // expected-error @below {{layout of source: expected a multiple of local(2, 1).spatial(8, 1).replicated(2).spatial(1, 2)}}
  %0 = "lowbit.join_limbs"(%a) : (!joined) -> !joined
  return
}

// -----

!joined = !lowbit.reg<[1, 16, 1], f32, "local(1, 2, 1).spatial(1, 8, 1).replicated(4)">
!other = !lowbit.reg<[1, 16, 4], f32, "local(1, 1, 2).local(1, 2, 1).spatial(1, 8, 1).replicated(2).spatial(1, 1, 2)">
func.func @join_columns(%a: !other) {
  // expected-error @below {{columns of the source: expected 2, got 4}}
  %0 = "lowbit.join_limbs"(%a) : (!other) -> !joined
  return
}

// -----

!pairs = !lowbit.reg<[1, 16, 2], f32, "local(1, 2, 1).spatial(1, 8, 1).replicated(2).spatial(1, 1, 2)">
func.func @join_result(%a: !pairs) {
  // expected-error @below {{result: expected f32 laid out as local(1, 2, 1).spatial(1, 8, 1).replicated(4), got f32 as local(1, 2, 1).spatial(1, 8, 1).replicated(2).spatial(1, 1, 2)}}
  %0 = "lowbit.join_limbs"(%a) : (!pairs) -> !pairs
  return
}
