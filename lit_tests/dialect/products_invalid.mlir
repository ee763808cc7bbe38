// RUN: %lowbit-opt %s --split-input-file --verify-diagnostics

// What verifiers refuse: products by mma, and sums by it. Wrong types are in types_invalid.mlir.

// The tensor core. Fragments: a [16, 16], b [8, 16] as [n, k], c [16, 8].
!a = !lowbit.reg<[16, 16], f16, "column_local(2, 2).spatial(8, 4).local(1, 2)">
!b = !lowbit.reg<[8, 16], f16, "local(1, 2).spatial(8, 4).local(1, 2)">
!c = !lowbit.reg<[16, 8], f32, "local(2, 1).spatial(8, 4).local(1, 2)">
func.func @mma_result(%a: !a, %b: !b, %c: !c) {
  // expected-error @below {{'lowbit.mma' op result: expected Reg(element='f32'}}
  %0 = "lowbit.mma"(%a, %b, %c) : (!a, !b, !c) -> !lowbit.reg<[16, 8], f16, "local(2, 1).spatial(8, 4).local(1, 2)">
  return
}

// -----

!a = !lowbit.reg<[16, 16], f16, "column_local(2, 2).spatial(8, 4).local(1, 2)">
!b = !lowbit.reg<[8, 16], f16, "local(1, 2).spatial(8, 4).local(1, 2)">
!c = !lowbit.reg<[16, 8], f16, "local(2, 1).spatial(8, 4).local(1, 2)">
func.func @mma_accumulator(%a: !a, %b: !b, %c: !c) {
  // expected-error @below {{element of c: expected f32, got f16}}
  %0 = "lowbit.mma"(%a, %b, %c) : (!a, !b, !c) -> !c
  return
}

// -----

!a = !lowbit.reg<[16, 16], f32, "column_local(2, 2).spatial(8, 4).local(1, 2)">
!b = !lowbit.reg<[8, 16], f32, "local(1, 2).spatial(8, 4).local(1, 2)">
!c = !lowbit.reg<[16, 8], f32, "local(2, 1).spatial(8, 4).local(1, 2)">
func.func @mma_b(%a: !a, %b: !b, %c: !c) {
  // expected-error @below {{element of b: expected f16 or bf16 or f8E4M3FN or i8, got f32}}
  %0 = "lowbit.mma"(%a, %b, %c) : (!a, !b, !c) -> !c
  return
}

// -----

!a = !lowbit.reg<[16, 16], bf16, "column_local(2, 2).spatial(8, 4).local(1, 2)">
!b = !lowbit.reg<[8, 16], f16, "local(1, 2).spatial(8, 4).local(1, 2)">
!c = !lowbit.reg<[16, 8], f32, "local(2, 1).spatial(8, 4).local(1, 2)">
func.func @mma_a(%a: !a, %b: !b, %c: !c) {
  // expected-error @below {{element of a: expected f16 or f32, got bf16}}
  %0 = "lowbit.mma"(%a, %b, %c) : (!a, !b, !c) -> !c
  return
}

// -----

!a = !lowbit.reg<[1, 16, 16], f16, "column_local(1, 2, 2).spatial(1, 8, 4).local(1, 1, 2)">
!b = !lowbit.reg<[8, 16], f16, "local(1, 2).spatial(8, 4).local(1, 2)">
!c = !lowbit.reg<[16, 8], f32, "local(2, 1).spatial(8, 4).local(1, 2)">
func.func @mma_ranks(%a: !a, %b: !b, %c: !c) {
  // expected-error @below {{ranks: expected equal and at least 2, got (3, 2)}}
  %0 = "lowbit.mma"(%a, %b, %c) : (!a, !b, !c) -> !c
  return
}

// -----

!a = !lowbit.reg<[16, 32], f16, "local(1, 2).column_local(2, 2).spatial(8, 4).local(1, 2)">
!b = !lowbit.reg<[8, 16], f16, "local(1, 2).spatial(8, 4).local(1, 2)">
!c = !lowbit.reg<[16, 8], f32, "local(2, 1).spatial(8, 4).local(1, 2)">
func.func @mma_k(%a: !a, %b: !b, %c: !c) {
  // expected-error @below {{b: expected [8, 32], got [8, 16]}}
  %0 = "lowbit.mma"(%a, %b, %c) : (!a, !b, !c) -> !c
  return
}

// -----

!a = !lowbit.reg<[16, 16], f16, "column_local(2, 2).spatial(8, 4).local(1, 2)">
!b = !lowbit.reg<[8, 16], f16, "local(1, 2).spatial(8, 4).local(1, 2)">
!c = !lowbit.reg<[16, 16], f32, "local(1, 2).local(2, 1).spatial(8, 4).local(1, 2)">
func.func @mma_n(%a: !a, %b: !b, %c: !c) {
  // expected-error @below {{c: expected [16, 8], got [16, 16]}}
  %0 = "lowbit.mma"(%a, %b, %c) : (!a, !b, !c) -> !c
  return
}

// -----

!a = !lowbit.reg<[16, 16], f16, "local(2, 2).spatial(8, 4).local(1, 2)">
!b = !lowbit.reg<[8, 16], f16, "local(1, 2).spatial(8, 4).local(1, 2)">
!c = !lowbit.reg<[16, 8], f32, "local(2, 1).spatial(8, 4).local(1, 2)">
func.func @mma_layout(%a: !a, %b: !b, %c: !c) {
  // expected-error @below {{layout of a: expected a multiple of column_local(2, 2).spatial(8, 4).local(1, 2), got local(2, 2).spatial(8, 4).local(1, 2)}}
  %0 = "lowbit.mma"(%a, %b, %c) : (!a, !b, !c) -> !c
  return
}

// -----

// Two warps that share k would each have half of the sum; put a dim of size 2 in front instead, and add up.
!a = !lowbit.reg<[16, 32], f16, "spatial(1, 2).column_local(2, 2).spatial(8, 4).local(1, 2)">
!b = !lowbit.reg<[8, 32], f16, "spatial(1, 2).local(1, 2).spatial(8, 4).local(1, 2)">
!c = !lowbit.reg<[16, 8], f32, "replicated(2, rank=2).local(2, 1).spatial(8, 4).local(1, 2)">
func.func @mma_split_k(%a: !a, %b: !b, %c: !c) {
  // expected-error @below {{k of a: expected within each warp, got spread over warps: spatial(1, 2)}}
  %0 = "lowbit.mma"(%a, %b, %c) : (!a, !b, !c) -> !c
  return
}

// -----

// Two warps with 16 rows each: all operands have to be where the results are.
!a = !lowbit.reg<[32, 16], f16, "local(2, 1).replicated(2).column_local(2, 2).spatial(8, 4).local(1, 2)">
!b = !lowbit.reg<[8, 16], f16, "replicated(2, rank=2).local(1, 2).spatial(8, 4).local(1, 2)">
!c = !lowbit.reg<[32, 8], f32, "spatial(2, 1).local(2, 1).spatial(8, 4).local(1, 2)">
func.func @mma_warps(%a: !a, %b: !b, %c: !c) {
  // expected-error @below {{warps of a: expected the result's, spatial(2, 1), got replicated(2, rank=2).local(2, 1)}}
  %0 = "lowbit.mma"(%a, %b, %c) : (!a, !b, !c) -> !c
  return
}

// -----

!b = !lowbit.reg<[8, 16], f32, "local(1, 2).spatial(8, 4).local(1, 2)">
func.func @sums_source(%b: !b) {
  // expected-error @below {{'lowbit.row_sums' op element of the source: expected f16 or bf16, got f32}}
  %0 = "lowbit.row_sums"(%b) : (!b) -> !lowbit.reg<[1, 8], f32, "replicated(8, rank=2).spatial(1, 4).local(1, 2)">
  return
}

// -----

!b = !lowbit.reg<[8, 16], f16, "local(1, 2).spatial(8, 4).local(1, 2)">
func.func @sums_element(%b: !b) {
  // expected-error @below {{element of the result: expected f32, got f16}}
  %0 = "lowbit.row_sums"(%b) : (!b) -> !lowbit.reg<[1, 8], f16, "replicated(8, rank=2).spatial(1, 4).local(1, 2)">
  return
}

// -----

!b = !lowbit.reg<[8, 16], f16, "local(1, 2).spatial(8, 4).local(1, 2)">
func.func @sums_shape(%b: !b) {
  // expected-error @below {{result: expected [1, 8], got [8, 1]}}
  %0 = "lowbit.row_sums"(%b) : (!b) -> !lowbit.reg<[8, 1], f32, "spatial(8, 1).replicated(4)">
  return
}

// -----

!b = !lowbit.reg<[8, 16], f16, "local(1, 2).spatial(8, 4).local(1, 2)">
func.func @sums_layout(%b: !b) {
  // expected-error @below {{layout of the result: expected replicated(8, rank=2).spatial(1, 4).local(1, 2), got spatial(1, 8).replicated(4)}}
  %0 = "lowbit.row_sums"(%b) : (!b) -> !lowbit.reg<[1, 8], f32, "spatial(1, 8).replicated(4)">
  return
}

// -----

!b = !lowbit.reg<[16, 16], f16, "local(2, 2).spatial(8, 4).local(1, 2)">
func.func @offsets_by_block(%b: !b) {
  // expected-error @below {{'lowbit.offset_sums' op rows of the source: expected 8, got 16}}
  %0 = "lowbit.offset_sums"(%b) {format = #lowbit.format<"u2", []>, start = 0, by_block}
    : (!b) -> !lowbit.reg<[16, 16], f32, "local(1, 2).local(2, 1).spatial(8, 4).local(1, 2)">
  return
}
