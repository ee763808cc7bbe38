// RUN: %lowbit-opt %s --split-input-file --verify-diagnostics

// What verifiers refuse of numbers of 8 bits.

func.func @columns(%x: tensor<?x40xf16>) {
  // expected-error @below {{'lowbit.quantize' op columns of x: expected a multiple of 32, got 40}}
  %0, %1, %2 = "lowbit.quantize"(%x) : (tensor<?x40xf16>) -> (tensor<?x40xi8>, tensor<?xf32>, tensor<?x1xf32>)
  return
}

// -----

func.func @sums(%x: tensor<?x64xf16>) {
  // expected-error @below {{sums: expected tensor<?x2xf32>, got tensor<?x4xf32>}}
  %0, %1, %2 = "lowbit.quantize"(%x) : (tensor<?x64xf16>) -> (tensor<?x64xi8>, tensor<?xf32>, tensor<?x4xf32>)
  return
}

// -----

!weight = !lowbit.packed<[64, 64], #lowbit.format<"u4", []>, 64, "none", "f16">
func.func @values(%x: tensor<?x64xf16>, %s: tensor<?xf32>, %sums: tensor<?x2xf32>, %w: !weight) {
  // expected-error @below {{values: expected tensor<?x64xf8E4M3FN> or tensor<?x64xi8>, got tensor<?x64xf16>}}
  %y = "lowbit.quantized_matmul"(%x, %s, %sums, %w) {operandSegmentSizes = array<i32: 1, 1, 1, 1, 0, 0>}
    : (tensor<?x64xf16>, tensor<?xf32>, tensor<?x2xf32>, !weight) -> tensor<?x64xf16>
  return
}

// -----

!codes = !lowbit.reg<[16, 64], #lowbit.format<"u5", []>, "local(1, 4).column_local(2, 2).spatial(8, 4).local(1, 2)">
func.func @format(%codes: !codes) {
  // expected-error @below {{source: expected codes that are numbers of f8E4M3FN, got u5}}
  %a = "lowbit.decode_bytes"(%codes) {operandSegmentSizes = array<i32: 1, 0>} : (!codes)
    -> !lowbit.reg<[16, 64], f8E4M3FN, "local(1, 2).column_local(2, 2).spatial(8, 4).local(1, 4)">
  return
}

// -----

!codes = !lowbit.reg<[16, 64], #lowbit.format<"u4", []>, "local(1, 4).column_local(2, 2).spatial(8, 4).local(1, 2)">
func.func @element(%codes: !codes) {
  // expected-error @below {{element of the result with nothing to subtract: expected f8E4M3FN or ui8, got i8}}
  %a = "lowbit.decode_bytes"(%codes) {operandSegmentSizes = array<i32: 1, 0>} : (!codes)
    -> !lowbit.reg<[16, 64], i8, "local(1, 2).column_local(2, 2).spatial(8, 4).local(1, 4)">
  return
}

// -----

!codes = !lowbit.reg<[16, 64], #lowbit.format<"i4", []>, "local(1, 4).column_local(2, 2).spatial(8, 4).local(1, 2)">
func.func @sign(%codes: !codes) {
  // expected-error @below {{element of the result with a sign: expected f8E4M3FN or i8, got ui8}}
  %a = "lowbit.decode_bytes"(%codes) {offset = 8 : i64, operandSegmentSizes = array<i32: 1, 0>} : (!codes)
    -> !lowbit.reg<[16, 64], ui8, "local(1, 2).column_local(2, 2).spatial(8, 4).local(1, 4)">
  return
}

// -----

!codes = !lowbit.reg<[16, 64], #lowbit.format<"i4", []>, "local(1, 4).column_local(2, 2).spatial(8, 4).local(1, 2)">
func.func @offset(%codes: !codes) {
  // expected-error @below {{element of the result with an offset: expected f8E4M3FN, got i8}}
  %a = "lowbit.decode_bytes"(%codes) {offset = 8 : i64, operandSegmentSizes = array<i32: 1, 0>} : (!codes)
    -> !lowbit.reg<[16, 64], i8, "local(1, 2).column_local(2, 2).spatial(8, 4).local(1, 4)">
  return
}

// -----

!codes = !lowbit.reg<[16, 64], #lowbit.format<"f4e2m1", []>, "local(1, 4).column_local(2, 2).spatial(8, 4).local(1, 2)">
func.func @no_integers(%codes: !codes) {
  // expected-error @below {{format with shifts: expected an integer one, got f4e2m1}}
  %a = "lowbit.decode_bytes"(%codes) {offset = 8 : i64, operandSegmentSizes = array<i32: 1, 0>} : (!codes)
    -> !lowbit.reg<[16, 64], f8E4M3FN, "local(1, 2).column_local(2, 2).spatial(8, 4).local(1, 4)">
  return
}

// -----

!codes = !lowbit.reg<[16, 64], #lowbit.format<"u4", []>, "local(1, 4).column_local(2, 2).spatial(8, 4).local(1, 2)">
!zeros = !lowbit.reg<[16, 1], i8, "spatial(8, 1).local(2, 1).replicated(4)">
func.func @zeros(%codes: !codes, %zeros: !zeros) {
  // expected-error @below {{layout of the zeros: expected}}
  %a = "lowbit.decode_bytes"(%codes, %zeros) {operandSegmentSizes = array<i32: 1, 1>} : (!codes, !zeros)
    -> !lowbit.reg<[16, 64], i8, "local(1, 2).column_local(2, 2).spatial(8, 4).local(1, 4)">
  return
}

// -----

!codes = !lowbit.reg<[16, 64], #lowbit.format<"u4", []>, "local(1, 4).column_local(2, 2).spatial(8, 4).local(1, 2)">
!zeros = !lowbit.reg<[16, 1], i8, "local(2, 1).spatial(8, 1).replicated(4)">
func.func @parts(%codes: !codes, %zeros: !zeros) {
  // expected-error @below {{zeros: expected a number that divides the 2 blocks of 32 columns, got 3}}
  %a = "lowbit.decode_bytes"(%codes, %zeros, %zeros, %zeros) {operandSegmentSizes = array<i32: 1, 3>} : (!codes, !zeros, !zeros, !zeros)
    -> !lowbit.reg<[16, 64], i8, "local(1, 2).column_local(2, 2).spatial(8, 4).local(1, 4)">
  return
}

// -----

!codes = !lowbit.reg<[16, 64], #lowbit.format<"u4", []>, "local(1, 4).column_local(2, 2).spatial(8, 4).local(1, 2)">
func.func @fragments(%codes: !codes) {
  // expected-error @below {{layout of the source (in fragments): expected local(1, 2), got local(1, 4)}}
  %a = "lowbit.decode_bytes"(%codes) {operandSegmentSizes = array<i32: 1, 0>} : (!codes)
    -> !lowbit.reg<[16, 32], ui8, "column_local(2, 2).spatial(8, 4).local(1, 4)">
  return
}

// -----

!a = !lowbit.reg<[16, 32], ui8, "column_local(2, 2).spatial(8, 4).local(1, 4)">
!b = !lowbit.reg<[8, 32], f8E4M3FN, "column_local(1, 2).spatial(8, 4).local(1, 4)">
!c = !lowbit.reg<[16, 8], f32, "local(2, 1).spatial(8, 4).local(1, 2)">
func.func @factors(%a: !a, %b: !b, %c: !c) {
  // expected-error @below {{element of a: expected f8E4M3FN, got ui8}}
  %d = "lowbit.mma"(%a, %b, %c) : (!a, !b, !c) -> !c
  return
}

// -----

!a = !lowbit.reg<[16, 32], ui8, "column_local(2, 2).spatial(8, 4).local(1, 4)">
!b = !lowbit.reg<[8, 32], i8, "column_local(1, 2).spatial(8, 4).local(1, 4)">
!c = !lowbit.reg<[16, 8], f32, "local(2, 1).spatial(8, 4).local(1, 2)">
func.func @sums_of_integers(%a: !a, %b: !b, %c: !c) {
  // expected-error @below {{element of c: expected i32, got f32}}
  %d = "lowbit.mma"(%a, %b, %c) : (!a, !b, !c) -> !c
  return
}

// -----

!row = !lowbit.reg<[1, 512], f32, "spatial(1, 32).local(1, 16)">
func.func @kind(%x: !row) {
  // expected-error @below {{kind: expected f8e4m3 or i8, got "i4"}}
  %0 = "lowbit.round_to"(%x) {kind = "i4"} : (!row) -> !row
  return
}

// -----

!row = !lowbit.reg<[1, 512], f32, "local(1, 16).spatial(1, 32)">
func.func @units(%x: !row) {
  // expected-error @below {{layout of the source: expected spatial(1, 32).local(1, 16), got local(1, 16).spatial(1, 32)}}
  %0 = "lowbit.encode_bytes"(%x) {kind = "i8"} : (!row) -> !lowbit.reg<[1, 32], vector<4xi32>, "spatial(1, 32)">
  return
}

// -----

!row = !lowbit.reg<[1, 32], f16, "spatial(1, 32)">
func.func @reciprocal(%x: !row) {
  // expected-error @below {{element of the result: expected f32, got f16}}
  %0 = "lowbit.reciprocal"(%x) : (!row) -> !row
  return
}

// -----

!weight = !lowbit.packed<[64, 64], #lowbit.format<"u4", []>, 64, "none", "f16">
func.func @folded_groups(%x: tensor<?x64xf8E4M3FN>, %s: tensor<?xf32>, %sums: tensor<?x2xf32>, %w: !weight) {
  // expected-error @below {{scales with fold_scales: expected scales of rows, too, got none of rows}}
  %y = "lowbit.quantized_matmul"(%x, %s, %sums, %w) {fold_scales, operandSegmentSizes = array<i32: 1, 1, 1, 1, 0, 0>}
    : (tensor<?x64xf8E4M3FN>, tensor<?xf32>, tensor<?x2xf32>, !weight) -> tensor<?x64xf16>
  return
}

// -----

!numbers = !lowbit.reg<[16, 64], bf16, "local(1, 4).column_local(2, 2).spatial(8, 4).local(1, 2)">
!a = !lowbit.reg<[16, 64], f8E4M3FN, "local(1, 2).column_local(2, 2).spatial(8, 4).local(1, 4)">
func.func @type_of_fragments(%numbers: !numbers) {
  // expected-error @below {{element of a source: expected f16, got bf16}}
  %a = "lowbit.encode_fragments"(%numbers) {operandSegmentSizes = array<i32: 1>} : (!numbers) -> !a
  return
}

// -----

!numbers = !lowbit.reg<[16, 64], f16, "local(1, 4).column_local(2, 2).spatial(8, 4).local(1, 2)">
!a = !lowbit.reg<[16, 64], ui8, "local(1, 2).column_local(2, 2).spatial(8, 4).local(1, 4)">
func.func @result_of_fragments(%numbers: !numbers) {
  // expected-error @below {{element of the result: expected f8E4M3FN or i8, got ui8}}
  %a = "lowbit.encode_fragments"(%numbers) {operandSegmentSizes = array<i32: 1>} : (!numbers) -> !a
  return
}

// -----

!numbers = !lowbit.reg<[16, 32], f16, "local(1, 2).column_local(2, 2).spatial(8, 4).local(1, 2)">
!a = !lowbit.reg<[16, 64], f8E4M3FN, "local(1, 2).column_local(2, 2).spatial(8, 4).local(1, 4)">
func.func @width_of_fragments(%numbers: !numbers) {
  // expected-error @below {{columns of the sources: expected 64, got 32}}
  %a = "lowbit.encode_fragments"(%numbers) {operandSegmentSizes = array<i32: 1>} : (!numbers) -> !a
  return
}

// -----

!numbers = !lowbit.reg<[32, 32], f16, "local(2, 2).column_local(2, 2).spatial(8, 4).local(1, 2)">
!a = !lowbit.reg<[16, 32], f8E4M3FN, "column_local(2, 2).spatial(8, 4).local(1, 4)">
func.func @rows_of_fragments(%numbers: !numbers) {
  // expected-error @below {{rows of a source (in fragments): expected local(1, 1), got local(2, 1)}}
  %a = "lowbit.encode_fragments"(%numbers) {operandSegmentSizes = array<i32: 1>} : (!numbers) -> !a
  return
}
