// RUN: %lowbit-opt %s --split-input-file --verify-diagnostics

// What verifiers refuse: slices, conversions and arithmetic on tiles. Wrong types are in types_invalid.mlir.

// Slices and shapes.
!t = !lowbit.reg<[8, 8], f16, "spatial(8, 4).local(1, 2)">
func.func @slice_dim(%t: !t) {
  // expected-error @below {{'lowbit.slice' op dim: expected 0..1, got 2}}
  %0 = "lowbit.slice"(%t) {dim = 2, start = 0} : (!t) -> !t
  return
}

// -----

!t = !lowbit.reg<[8, 16], f16, "local(1, 2).spatial(8, 4).local(1, 2)">
func.func @slice_start(%t: !t) {
  // expected-error @below {{start: expected 0..8, got 16}}
  %0 = "lowbit.slice"(%t) {dim = 1, start = 16} : (!t) -> !lowbit.reg<[8, 8], f16, "spatial(8, 4).local(1, 2)">
  return
}

// -----

!t = !lowbit.reg<[8, 8], f16, "spatial(8, 4).local(1, 2)">
func.func @slice_rank(%t: !t) {
  // expected-error @below {{rank: expected 2, got 1}}
  %0 = "lowbit.slice"(%t) {dim = 0, start = 0} : (!t) -> !lowbit.reg<[8], f16, "spatial(8).replicated(4)">
  return
}

// -----

// Half of the threads cannot give away what they hold.
!t = !lowbit.reg<[8, 8], f16, "spatial(8, 4).local(1, 2)">
func.func @slice_threads(%t: !t) {
  // expected-error @below {{local digits alone do not cut [0, 4) of dim 0}}
  %0 = "lowbit.slice"(%t) {dim = 0, start = 0} : (!t) -> !lowbit.reg<[4, 8], f16, "replicated(2, rank=2).spatial(4, 4).local(1, 2)">
  return
}

// -----

!t = !lowbit.reg<[8, 16], f16, "local(1, 2).spatial(8, 4).local(1, 2)">
func.func @slice_layout(%t: !t) {
  // expected-error @below {{layout: expected spatial(8, 4).local(1, 2), got local(1, 2).spatial(8, 4)}}
  %0 = "lowbit.slice"(%t) {dim = 1, start = 8} : (!t) -> !lowbit.reg<[8, 8], f16, "local(1, 2).spatial(8, 4)">
  return
}

// -----

!codes = !lowbit.reg<[16, 64], #lowbit.format<"u4", []>, "local(1, 4).column_local(2, 2).spatial(8, 4).local(1, 2)">
func.func @slice_codes(%t: !codes) {
  // expected-error @below {{element of the source: expected f16 or bf16 or f32}}
  %0 = "lowbit.slice"(%t) {dim = 1, start = 0} : (!codes)
    -> !lowbit.reg<[16, 16], #lowbit.format<"u4", []>, "column_local(2, 2).spatial(8, 4).local(1, 2)">
  return
}

// -----

!t = !lowbit.reg<[8, 8], f16, "spatial(8, 4).local(1, 2)">
func.func @reshape_size(%t: !t) {
  // expected-error @below {{'lowbit.reshape' op cannot reshape (spatial(8, 4).local(1, 2)) of shape (8, 8) to (8, 4)}}
  %0 = "lowbit.reshape"(%t) : (!t) -> !lowbit.reg<[8, 4], f16, "spatial(8, 4)">
  return
}

// -----

!t = !lowbit.reg<[8, 8], f16, "spatial(8, 4).local(1, 2)">
func.func @reshape_layout(%t: !t) {
  // expected-error @below {{layout: expected spatial(32).local(2), got local(2).spatial(32)}}
  %0 = "lowbit.reshape"(%t) : (!t) -> !lowbit.reg<[64], f16, "local(2).spatial(32)">
  return
}

// -----

// Casts and arithmetic.
func.func @cast_kind(%t: !lowbit.reg<[8, 4], i8, "spatial(8, 4)">) {
  // expected-error @below {{'lowbit.cast' op kind: expected one of float, signed, unsigned, e4m3, e8m0, table, got rounded}}
  %0 = "lowbit.cast"(%t) {kind = "rounded"} : (!lowbit.reg<[8, 4], i8, "spatial(8, 4)">) -> !lowbit.reg<[8, 4], f32, "spatial(8, 4)">
  return
}

// -----

func.func @raise_bits_beyond_a_byte(%t: !lowbit.reg<[8, 4], i8, "spatial(8, 4)">) {
  // expected-error @below {{'lowbit.raise_bits' op bits: expected 1..5, got 6}}
  %0 = "lowbit.raise_bits"(%t) {first = 3, bits = 6} : (!lowbit.reg<[8, 4], i8, "spatial(8, 4)">) -> !lowbit.reg<[8, 4], f32, "spatial(8, 4)">
  return
}

// -----

func.func @raise_bits_of_words(%t: !lowbit.reg<[8, 4], i32, "spatial(8, 4)">) {
  // expected-error @below {{element of the source: expected i8, got i32}}
  %0 = "lowbit.raise_bits"(%t) {first = 3, bits = 3} : (!lowbit.reg<[8, 4], i32, "spatial(8, 4)">) -> !lowbit.reg<[8, 4], f32, "spatial(8, 4)">
  return
}

// -----

func.func @cast_to_the_same(%t: !lowbit.reg<[8, 4], f16, "spatial(8, 4)">) {
  // expected-error @below {{cast: expected two types, got f16 to f16}}
  %0 = "lowbit.cast"(%t) {kind = "float"} : (!lowbit.reg<[8, 4], f16, "spatial(8, 4)">) -> !lowbit.reg<[8, 4], f16, "spatial(8, 4)">
  return
}

// -----

func.func @cast_numbers_as_integers(%t: !lowbit.reg<[8, 4], f16, "spatial(8, 4)">) {
  // expected-error @below {{signed: expected i8 or i16 or i32 to f32, got f16 to f32}}
  %0 = "lowbit.cast"(%t) {kind = "signed"} : (!lowbit.reg<[8, 4], f16, "spatial(8, 4)">) -> !lowbit.reg<[8, 4], f32, "spatial(8, 4)">
  return
}

// -----

func.func @cast_bytes(%t: !lowbit.reg<[8, 4], i8, "spatial(8, 4)">) {
  // expected-error @below {{e8m0: expected i8 to f32, got i8 to f16}}
  %0 = "lowbit.cast"(%t) {kind = "e8m0"} : (!lowbit.reg<[8, 4], i8, "spatial(8, 4)">) -> !lowbit.reg<[8, 4], f16, "spatial(8, 4)">
  return
}

// -----

func.func @cast_without_a_table(%t: !lowbit.reg<[8, 4], i8, "spatial(8, 4)">) {
  // expected-error @below {{format of a cast of kind table: expected a #lowbit.format, got none}}
  %0 = "lowbit.cast"(%t) {kind = "table"} : (!lowbit.reg<[8, 4], i8, "spatial(8, 4)">) -> !lowbit.reg<[8, 4], f32, "spatial(8, 4)">
  return
}

// -----

func.func @cast_with_a_short_table(%t: !lowbit.reg<[8, 4], i8, "spatial(8, 4)">) {
  // expected-error @below {{format of a cast: expected a table of 256 numbers, got nf4}}
  %0 = "lowbit.cast"(%t) {kind = "table", format = #lowbit.format<"nf4", []>} : (!lowbit.reg<[8, 4], i8, "spatial(8, 4)">) -> !lowbit.reg<[8, 4], f32, "spatial(8, 4)">
  return
}

// -----

func.func @cast_with_a_table_too_many(%t: !lowbit.reg<[8, 4], i8, "spatial(8, 4)">) {
  // expected-error @below {{format of a cast of kind e4m3: expected none, got #lowbit.format<"nf4", []>}}
  %0 = "lowbit.cast"(%t) {kind = "e4m3", format = #lowbit.format<"nf4", []>} : (!lowbit.reg<[8, 4], i8, "spatial(8, 4)">) -> !lowbit.reg<[8, 4], f32, "spatial(8, 4)">
  return
}

// -----

func.func @cast_layout(%t: !lowbit.reg<[8, 4], f16, "spatial(8, 4)">) {
  // expected-error @below {{layout: expected spatial(8, 4), got column_spatial(8, 4)}}
  %0 = "lowbit.cast"(%t) {kind = "float"} : (!lowbit.reg<[8, 4], f16, "spatial(8, 4)">) -> !lowbit.reg<[8, 4], f32, "column_spatial(8, 4)">
  return
}

// -----

!t = !lowbit.reg<[8, 4], f32, "spatial(8, 4)">
func.func @add_element(%a: !t, %b: !lowbit.reg<[8, 4], f16, "spatial(8, 4)">) {
  // expected-error @below {{'lowbit.add' op element: expected f32, got f16}}
  %0 = "lowbit.add"(%a, %b) : (!t, !lowbit.reg<[8, 4], f16, "spatial(8, 4)">) -> !t
  return
}

// -----

// A row vector is broadcast only if every thread has its part of it already.
!t = !lowbit.reg<[8, 4], f32, "spatial(8, 4)">
!row = !lowbit.reg<[1, 4], f32, "spatial(1, 4).replicated(8)">
func.func @mul_moves(%a: !t, %b: !row) {
  // expected-error @below {{'lowbit.mul' op (spatial(1, 4).replicated(8)) to (spatial(8, 4)) moves elements between threads}}
  %0 = "lowbit.mul"(%a, %b) : (!t, !row) -> !t
  return
}

// -----

!t = !lowbit.reg<[8, 4], f32, "spatial(8, 4)">
func.func @fma_shape(%a: !t, %b: !lowbit.reg<[4, 8], f32, "spatial(4, 8)">) {
  // expected-error @below {{'lowbit.fma' op cannot broadcast (4, 8) to (8, 4): only dims of size 1 grow}}
  %0 = "lowbit.fma"(%a, %b, %a) : (!t, !lowbit.reg<[4, 8], f32, "spatial(4, 8)">, !t) -> !t
  return
}

// -----

!t = !lowbit.reg<[8, 4], i8, "spatial(8, 4)">
func.func @exp_of_bytes(%t: !t) {
  // expected-error @below {{'lowbit.exp' op element of the result: expected f16 or bf16 or f32, got i8}}
  %0 = "lowbit.exp"(%t) : (!t) -> !t
  return
}

// -----

!t = !lowbit.reg<[8, 4], f32, "spatial(8, 4)">
!condition = !lowbit.reg<[8, 4], i1, "spatial(8, 4)">
func.func @compare_predicate(%t: !t) {
  // expected-error @below {{'lowbit.compare' op predicate: expected one of lt, le, eq, ne, gt, ge, got less}}
  %0 = "lowbit.compare"(%t, %t) {predicate = "less"} : (!t, !t) -> !condition
  return
}

// -----

!t = !lowbit.reg<[8, 4], f32, "spatial(8, 4)">
func.func @quotient_of_reals(%t: !t) {
  // expected-error @below {{'lowbit.quotient' op element of the result: expected i32, got f32}}
  %0 = "lowbit.quotient"(%t, %t) : (!t, !t) -> !t
  return
}

// -----

!t = !lowbit.reg<[8, 4], i8, "spatial(8, 4)">
func.func @add_bytes(%t: !t) {
  // expected-error @below {{'lowbit.add' op element of the result: expected f16 or bf16 or f32 or i32, got i8}}
  %0 = "lowbit.add"(%t, %t) : (!t, !t) -> !t
  return
}

// -----

!t = !lowbit.reg<[8, 4], f32, "spatial(8, 4)">
func.func @compare_result(%t: !t) {
  // expected-error @below {{'lowbit.compare' op element of the result: expected i1, got f32}}
  %0 = "lowbit.compare"(%t, %t) {predicate = "lt"} : (!t, !t) -> !t
  return
}

// -----

!condition = !lowbit.reg<[8, 4], i1, "spatial(8, 4)">
func.func @compare_conditions(%t: !condition) {
  // expected-error @below {{'lowbit.compare' op element of the operands: expected f16 or bf16 or f32 or i32, got i1}}
  %0 = "lowbit.compare"(%t, %t) {predicate = "eq"} : (!condition, !condition) -> !condition
  return
}

// -----

!t = !lowbit.reg<[8, 4], f32, "spatial(8, 4)">
func.func @select_by_numbers(%t: !t) {
  // expected-error @below {{'lowbit.select' op element: expected i1, got f32}}
  %0 = "lowbit.select"(%t, %t, %t) : (!t, !t, !t) -> !t
  return
}

// -----

!t = !lowbit.reg<[8, 4], f32, "spatial(8, 4)">
!half = !lowbit.reg<[8, 4], f16, "spatial(8, 4)">
func.func @select_element(%condition: !lowbit.reg<[8, 4], i1, "spatial(8, 4)">, %t: !t, %half: !half) {
  // expected-error @below {{'lowbit.select' op element: expected f32, got f16}}
  %0 = "lowbit.select"(%condition, %t, %half) : (!lowbit.reg<[8, 4], i1, "spatial(8, 4)">, !t, !half) -> !t
  return
}

// -----

!t = !lowbit.reg<[8, 4], f16, "spatial(8, 4)">
func.func @reduce_threads(%t: !t) {
  // expected-error @below {{'lowbit.reduce' op dim 0: expected within each thread, or in f32 and i32 within each warp, got f16 spread over threads by spatial(8, 4); cast to f32 first}}
  %0 = "lowbit.reduce"(%t) {dim = 0} : (!t) -> !lowbit.reg<[1, 4], f16, "replicated(8, rank=2).spatial(1, 4)">
  return
}

// -----

!t = !lowbit.reg<[2, 32], f32, "spatial(2, 32)">
func.func @reduce_warps(%t: !t) {
  // expected-error @below {{'lowbit.reduce' op dim 0: expected within each thread, or in f32 and i32 within each warp, got f32 spread over threads by spatial(2, 32)}}
  %0 = "lowbit.reduce"(%t) {dim = 0} : (!t) -> !lowbit.reg<[1, 32], f32, "replicated(2, rank=2).spatial(1, 32)">
  return
}

// -----

!t = !lowbit.reg<[8, 8], f32, "spatial(8, 4).local(1, 2)">
func.func @reduce_dim(%t: !t) {
  // expected-error @below {{dim: expected 0..1, got 2}}
  %0 = "lowbit.reduce"(%t) {dim = 2} : (!t) -> !t
  return
}

// -----

!t = !lowbit.reg<[2, 32], f32, "local(2, 1).spatial(1, 32)">
func.func @reduce_layout(%t: !t) {
  // expected-error @below {{layout: expected spatial(1, 32), got spatial(1, 8).replicated(4).local(1, 4)}}
  %0 = "lowbit.reduce"(%t) {dim = 0} : (!t) -> !lowbit.reg<[1, 32], f32, "spatial(1, 8).local(1, 4).replicated(4)">
  return
}
