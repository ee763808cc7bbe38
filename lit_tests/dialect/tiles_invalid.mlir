// RUN: %lowbit-opt %s --split-input-file --verify-diagnostics

// What verifiers refuse: tiles that are loaded, stored and viewed. Wrong types are in types_invalid.mlir.

func.func @splat(%value: f16) {
  // expected-error @below {{'lowbit.splat' op value: expected f32, got f16}}
  %0 = "lowbit.splat"(%value) : (f16) -> !lowbit.reg<[8, 4], f16, "spatial(8, 4)">
  return
}

// -----

func.func @splat_of_integers(%value: f32) {
  // expected-error @below {{'lowbit.splat' op element of the result: expected f16 or bf16 or f32 or i32, got i8}}
  %0 = "lowbit.splat"(%value) : (f32) -> !lowbit.reg<[8, 4], i8, "spatial(8, 4)">
  return
}

// -----

func.func @splat_of_a_real(%value: f32) {
  // expected-error @below {{'lowbit.splat' op value: expected i32, got f32}}
  %0 = "lowbit.splat"(%value) : (f32) -> !lowbit.reg<[8, 4], i32, "spatial(8, 4)">
  return
}

// -----

func.func @iota_of_reals() {
  // expected-error @below {{'lowbit.iota' op element of the result: expected i32, got f32}}
  %0 = "lowbit.iota"() {dim = 0} : () -> !lowbit.reg<[8, 4], f32, "spatial(8, 4)">
  return
}

// -----

func.func @iota_along_no_dim() {
  // expected-error @below {{'lowbit.iota' op dim: expected 0..1, got 2}}
  %0 = "lowbit.iota"() {dim = 2} : () -> !lowbit.reg<[8, 4], i32, "spatial(8, 4)">
  return
}

// -----

func.func @constant_between_integers() {
  // expected-error @below {{'lowbit.constant' op value of i32: expected an integer of 32 bits, got 0.5}}
  %0 = "lowbit.constant"() {value = 0.5 : f32} : () -> !lowbit.reg<[8, 4], i32, "spatial(8, 4)">
  return
}

// -----

func.func @constant() {
  // expected-error @below {{'lowbit.constant' op element of the result: expected f16 or bf16 or f32 or i32, got i8}}
  %0 = "lowbit.constant"() {value = 1.0 : f32} : () -> !lowbit.reg<[8, 4], i8, "spatial(8, 4)">
  return
}

// -----

// Loads and stores.
func.func @load_from_a_number(%x: f32) {
  // expected-error @below {{'lowbit.load' op memory: expected !lowbit.global or !lowbit.shared, got f32}}
  %0 = "lowbit.load"(%x) {boundary = [], operandSegmentSizes = array<i32: 1, 0>} : (f32) -> !lowbit.reg<[8, 4], f16, "spatial(8, 4)">
  return
}

// -----

!x = !lowbit.global<[-1, 64], f16, [64, 1], [1, 1]>
func.func @load_element(%x: !x, %i: i32) {
  // expected-error @below {{element of the tile: expected f16, got f32}}
  %0 = "lowbit.load"(%x, %i, %i) {boundary = ["none", "none"], operandSegmentSizes = array<i32: 1, 2>}
    : (!x, i32, i32) -> !lowbit.reg<[8, 4], f32, "spatial(8, 4)">
  return
}

// -----

!x = !lowbit.global<[-1, 64], f16, [64, 1], [1, 1]>
func.func @load_rank(%x: !x, %i: i32) {
  // expected-error @below {{rank of the tile: expected 2 as the memory, got 1}}
  %0 = "lowbit.load"(%x, %i) {boundary = ["none"], operandSegmentSizes = array<i32: 1, 1>}
    : (!x, i32) -> !lowbit.reg<[32], f16, "spatial(32)">
  return
}

// -----

!x = !lowbit.global<[-1, 64], f16, [64, 1], [1, 1]>
func.func @load_offsets(%x: !x, %i: i32) {
  // expected-error @below {{offsets: expected one per dim (2), got 1}}
  %0 = "lowbit.load"(%x, %i) {boundary = ["none", "none"], operandSegmentSizes = array<i32: 1, 1>}
    : (!x, i32) -> !lowbit.reg<[8, 4], f16, "spatial(8, 4)">
  return
}

// -----

!x = !lowbit.global<[-1, 64], f16, [64, 1], [1, 1]>
func.func @load_boundary(%x: !x, %i: i32) {
  // expected-error @below {{boundary: expected one word per dim (2), got 1}}
  %0 = "lowbit.load"(%x, %i, %i) {boundary = ["none"], operandSegmentSizes = array<i32: 1, 2>}
    : (!x, i32, i32) -> !lowbit.reg<[8, 4], f16, "spatial(8, 4)">
  return
}

// -----

// A load has to yield something for every element: it cannot skip one.
!x = !lowbit.global<[-1, 64], f16, [64, 1], [1, 1]>
func.func @load_skip(%x: !x, %i: i32) {
  // expected-error @below {{boundary: expected one of none, clamp, zero, got skip}}
  %0 = "lowbit.load"(%x, %i, %i) {boundary = ["skip", "none"], operandSegmentSizes = array<i32: 1, 2>}
    : (!x, i32, i32) -> !lowbit.reg<[8, 4], f16, "spatial(8, 4)">
  return
}

// -----

!x = !lowbit.shared<[4, 4], f16, [4, 1], 0>
func.func @load_too_much(%x: !x, %i: i32) {
  // expected-error @below {{size of dim 0 with boundary none: expected at most 4, got 8}}
  %0 = "lowbit.load"(%x, %i, %i) {boundary = ["none", "none"], operandSegmentSizes = array<i32: 1, 2>}
    : (!x, i32, i32) -> !lowbit.reg<[8, 4], f16, "spatial(8, 4)">
  return
}

// -----

!x = !lowbit.shared<[8, 4], f16, [4, 1], 0>
func.func @store_clamp(%x: !x, %t: !lowbit.reg<[8, 4], f16, "spatial(8, 4)">, %i: i32) {
  // expected-error @below {{'lowbit.store' op boundary: expected one of none, skip, got clamp}}
  "lowbit.store"(%t, %x, %i, %i) {boundary = ["clamp", "none"], operandSegmentSizes = array<i32: 1, 1, 2>}
    : (!lowbit.reg<[8, 4], f16, "spatial(8, 4)">, !x, i32, i32) -> ()
  return
}

// -----

!x = !lowbit.shared<[8, 4], bf16, [4, 1], 0>
func.func @store_element(%x: !x, %t: !lowbit.reg<[8, 4], f16, "spatial(8, 4)">, %i: i32) {
  // expected-error @below {{element of the tile: expected bf16, got f16}}
  "lowbit.store"(%t, %x, %i, %i) {boundary = ["none", "none"], operandSegmentSizes = array<i32: 1, 1, 2>}
    : (!lowbit.reg<[8, 4], f16, "spatial(8, 4)">, !x, i32, i32) -> ()
  return
}

// -----

// In swizzled rows, the last element is not where strides say.
!x = !lowbit.shared<[8, 64], f16, [64, 1], 128>
func.func @load_clamped_swizzle(%x: !x, %i: i32) {
  // expected-error @below {{boundary: expected one of none, zero, got clamp}}
  %0 = "lowbit.load"(%x, %i, %i) {boundary = ["clamp", "none"], operandSegmentSizes = array<i32: 1, 2>}
    : (!x, i32, i32) -> !lowbit.reg<[8, 4], f16, "spatial(8, 4)">
  return
}

// -----

// ldmatrix reads rows of 16 bytes at addresses that are multiples of 16.
func.func @load_matrix_element(%x: !lowbit.shared<[8, 16], f32, [24, 1], 0>, %m: i32) {
  // expected-error @below {{'lowbit.load_matrix' op element: expected of 16 or 8 bits, got f32}}
  %0 = "lowbit.load_matrix"(%x, %m) : (!lowbit.shared<[8, 16], f32, [24, 1], 0>, i32) -> !lowbit.reg<[8, 16], f32, "local(1, 2).spatial(8, 4).local(1, 2)">
  return
}

// -----

func.func @load_matrix_shape(%x: !lowbit.shared<[8, 32], f16, [40, 1], 0>, %m: i32) {
  // expected-error @below {{shape of the tile: expected (8, 32), got (8, 16)}}
  %0 = "lowbit.load_matrix"(%x, %m) : (!lowbit.shared<[8, 32], f16, [40, 1], 0>, i32) -> !lowbit.reg<[8, 16], f16, "local(1, 2).spatial(8, 4).local(1, 2)">
  return
}

// -----

func.func @load_matrix_rows(%x: !lowbit.shared<[16, 16], f16, [24, 1], 0>, %m: i32) {
  // expected-error @below {{rows of the tile: expected at least the 16 of the buffer, got 8}}
  %0 = "lowbit.load_matrix"(%x, %m) : (!lowbit.shared<[16, 16], f16, [24, 1], 0>, i32) -> !lowbit.reg<[8, 16], f16, "local(1, 2).spatial(8, 4).local(1, 2)">
  return
}

// -----

func.func @load_matrix_rank(%x: !lowbit.shared<[16], f16, [1], 0>, %m: i32) {
  // expected-error @below {{rank of the buffer: expected at least 2, got 1}}
  %0 = "lowbit.load_matrix"(%x, %m) : (!lowbit.shared<[16], f16, [1], 0>, i32) -> !lowbit.reg<[8, 16], f16, "local(1, 2).spatial(8, 4).local(1, 2)">
  return
}

// -----

func.func @load_matrix_strides(%x: !lowbit.shared<[8, 16], f16, [20, 1], 0>, %m: i32) {
  // expected-error @below {{strides: expected multiples of 8 (16 bytes) and 1 for the last dim, got [20, 1]}}
  %0 = "lowbit.load_matrix"(%x, %m) : (!lowbit.shared<[8, 16], f16, [20, 1], 0>, i32) -> !lowbit.reg<[8, 16], f16, "local(1, 2).spatial(8, 4).local(1, 2)">
  return
}

// -----

func.func @load_matrix_swizzle(%x: !lowbit.shared<[8, 64], f16, [64, 1], 128>, %m: i32) {
  // expected-error @below {{swizzle: expected none, got 128}}
  %0 = "lowbit.load_matrix"(%x, %m) : (!lowbit.shared<[8, 64], f16, [64, 1], 128>, i32) -> !lowbit.reg<[8, 64], f16, "local(1, 8).spatial(8, 4).local(1, 2)">
  return
}

// -----

func.func @load_matrix_layout(%x: !lowbit.shared<[8, 16], f16, [24, 1], 0>, %m: i32) {
  // expected-error @below {{layout of result: expected a multiple of local(1, 2).spatial(8, 4).local(1, 2), got spatial(8, 4).local(1, 4)}}
  %0 = "lowbit.load_matrix"(%x, %m) : (!lowbit.shared<[8, 16], f16, [24, 1], 0>, i32) -> !lowbit.reg<[8, 16], f16, "spatial(8, 4).local(1, 4)">
  return
}

// -----

// Views.
func.func @view_threads(%t: !lowbit.reg<[8, 4], f16, "spatial(8, 4)">) {
  // expected-error @below {{'lowbit.view' op threads: expected 32, got 16}}
  %0 = "lowbit.view"(%t) : (!lowbit.reg<[8, 4], f16, "spatial(8, 4)">) -> !lowbit.reg<[4, 4], f16, "spatial(4, 4)">
  return
}

// -----

func.func @view_bits(%t: !lowbit.reg<[1, 32], vector<4xi32>, "spatial(1, 32)">) {
  // expected-error @below {{bits per thread: expected 128, got 192}}
  %0 = "lowbit.view"(%t) : (!lowbit.reg<[1, 32], vector<4xi32>, "spatial(1, 32)">)
    -> !lowbit.reg<[16, 64], #lowbit.format<"u6", []>, "local(1, 4).column_local(2, 2).spatial(8, 4).local(1, 2)">
  return
}

// -----

func.func @view_element(%t: !lowbit.reg<[8, 4], f16, "spatial(8, 4)">) {
  // expected-error @below {{element: expected f16, got bf16}}
  %0 = "lowbit.view"(%t) : (!lowbit.reg<[8, 4], f16, "spatial(8, 4)">) -> !lowbit.reg<[8, 4], bf16, "spatial(8, 4)">
  return
}

// -----

func.func @view_of_numbers(%t: !lowbit.reg<[8, 32], f16, "spatial(8, 4).local(1, 8)">) {
  // expected-error @below {{element of the source: expected vector<4xi32>, got f16}}
  %0 = "lowbit.view"(%t) : (!lowbit.reg<[8, 32], f16, "spatial(8, 4).local(1, 8)">)
    -> !lowbit.reg<[16, 64], #lowbit.format<"u4", []>, "local(1, 4).column_local(2, 2).spatial(8, 4).local(1, 2)">
  return
}

// -----

// Codes are packed as fragments of the tensor core and exist in this order only.
func.func @view_layout(%t: !lowbit.reg<[1, 32], vector<4xi32>, "spatial(1, 32)">) {
  // expected-error @below {{layout of result: expected a multiple of column_local(2, 2).spatial(8, 4).local(1, 2), got spatial(8, 4).local(2, 16)}}
  %0 = "lowbit.view"(%t) : (!lowbit.reg<[1, 32], vector<4xi32>, "spatial(1, 32)">)
    -> !lowbit.reg<[16, 64], #lowbit.format<"u4", []>, "spatial(8, 4).local(2, 16)">
  return
}

// -----

// 32 columns of u4 are half a chunk: the other half of the unit belongs to columns of the same rows.
func.func @view_half_a_chunk(%t: !lowbit.reg<[1, 32], vector<4xi32>, "spatial(1, 32)">) {
  // expected-error @below {{columns of a warp: expected a multiple of 64 for u4, got 32}}
  %0 = "lowbit.view"(%t) : (!lowbit.reg<[1, 32], vector<4xi32>, "spatial(1, 32)">)
    -> !lowbit.reg<[32, 32], #lowbit.format<"u4", []>, "local(2, 2).column_local(2, 2).spatial(8, 4).local(1, 2)">
  return
}

// -----

func.func @view_scattered(%t: !lowbit.reg<[2, 32], vector<4xi32>, "spatial(2, 32)">) {
  // expected-error @below {{columns of a warp: expected side by side, got 64 among 112}}
  %0 = "lowbit.view"(%t) : (!lowbit.reg<[2, 32], vector<4xi32>, "spatial(2, 32)">)
    -> !lowbit.reg<[16, 128], #lowbit.format<"u4", []>, "local(1, 4).spatial(1, 2).column_local(2, 2).spatial(8, 4).local(1, 2)">
  return
}

// -----

!rows = !lowbit.reg<[16, 16], f16, "local(2, 2).spatial(8, 4).local(1, 2)">
func.func @diagonal_rows(%rows: !rows) {
  // expected-error @below {{'lowbit.diagonal' op rows of the source: expected 8, got 16}}
  %0 = "lowbit.diagonal"(%rows) : (!rows) -> !lowbit.reg<[16, 128], f16, "local(2, 16).spatial(8, 4).local(1, 2)">
  return
}

// -----

!rows = !lowbit.reg<[8, 16], f16, "local(1, 2).spatial(8, 4).local(1, 2)">
func.func @diagonal_columns(%rows: !rows) {
  // expected-error @below {{'lowbit.diagonal' op result: expected [8, 128], got [8, 64]}}
  %0 = "lowbit.diagonal"(%rows) : (!rows) -> !lowbit.reg<[8, 64], f16, "local(1, 8).spatial(8, 4).local(1, 2)">
  return
}

// -----

!source = !lowbit.global<[4, 64], vector<4xi32>, [64, 1], [1, 1]>
func.func @gather_codes(%source: !source, %index: !lowbit.reg<[32], i32, "spatial(32)">, %row: i32) {
  // expected-error @below {{'lowbit.gather' op element of the source: expected f16 or bf16 or f32 or i32, got vector<4xi32>}}
  %0 = "lowbit.gather"(%source, %index, %row) {operandSegmentSizes = array<i32: 1, 1, 1>}
    : (!source, !lowbit.reg<[32], i32, "spatial(32)">, i32) -> !lowbit.reg<[32], vector<4xi32>, "spatial(32)">
  return
}

// -----

!source = !lowbit.global<[4, 64], f16, [64, 1], [1, 1]>
func.func @gather_index(%source: !source, %index: !lowbit.reg<[32], i16, "spatial(32)">, %row: i32) {
  // expected-error @below {{element of the index: expected i32, got i16}}
  %0 = "lowbit.gather"(%source, %index, %row) {operandSegmentSizes = array<i32: 1, 1, 1>}
    : (!source, !lowbit.reg<[32], i16, "spatial(32)">, i32) -> !lowbit.reg<[32], f16, "spatial(32)">
  return
}

// -----

!source = !lowbit.global<[4, 64], f16, [64, 1], [1, 1]>
func.func @gather_offsets(%source: !source, %index: !lowbit.reg<[32], i32, "spatial(32)">, %row: i32) {
  // expected-error @below {{offsets: expected one for each dim but the last (1), got 2}}
  %0 = "lowbit.gather"(%source, %index, %row, %row) {operandSegmentSizes = array<i32: 1, 1, 2>}
    : (!source, !lowbit.reg<[32], i32, "spatial(32)">, i32, i32) -> !lowbit.reg<[32], f16, "spatial(32)">
  return
}

// -----

!source = !lowbit.shared<[8, 64], f16, [64, 1], 128>
func.func @gather_swizzled(%source: !source, %index: !lowbit.reg<[32], i32, "spatial(32)">, %row: i32) {
  // expected-error @below {{swizzle: expected none, got 128}}
  %0 = "lowbit.gather"(%source, %index, %row) {operandSegmentSizes = array<i32: 1, 1, 1>}
    : (!source, !lowbit.reg<[32], i32, "spatial(32)">, i32) -> !lowbit.reg<[32], f16, "spatial(32)">
  return
}

// -----

!source = !lowbit.global<[4, 64], f16, [64, 1], [2, 1]>
func.func @gather_divided(%source: !source, %index: !lowbit.reg<[32], i32, "spatial(32)">, %row: i32) {
  // expected-error @below {{divisors: expected all 1, got [2, 1]}}
  %0 = "lowbit.gather"(%source, %index, %row) {operandSegmentSizes = array<i32: 1, 1, 1>}
    : (!source, !lowbit.reg<[32], i32, "spatial(32)">, i32) -> !lowbit.reg<[32], f16, "spatial(32)">
  return
}

// -----

!source = !lowbit.global<[4, 64], f16, [64, 1], [1, 1]>
func.func @gather_layout(%source: !source, %index: !lowbit.reg<[64], i32, "spatial(32).local(2)">, %row: i32) {
  // expected-error @below {{layout: expected spatial(32).local(2), got local(2).spatial(32)}}
  %0 = "lowbit.gather"(%source, %index, %row) {operandSegmentSizes = array<i32: 1, 1, 1>}
    : (!source, !lowbit.reg<[64], i32, "spatial(32).local(2)">, i32) -> !lowbit.reg<[64], f16, "local(2).spatial(32)">
  return
}

// -----

!target = !lowbit.global<[4, 64], f16, [64, 1], [1, 1]>
!tile = !lowbit.reg<[32], f32, "spatial(32)">
func.func @scatter_value(%target: !target, %value: !tile, %index: !lowbit.reg<[32], i32, "spatial(32)">, %row: i32) {
  // expected-error @below {{'lowbit.scatter' op element of the value: expected f16, got f32}}
  "lowbit.scatter"(%value, %target, %index, %row) {operandSegmentSizes = array<i32: 1, 1, 1, 1>}
    : (!tile, !target, !lowbit.reg<[32], i32, "spatial(32)">, i32) -> ()
  return
}

// -----

!target = !lowbit.shared<[64], f16, [1], 0>
!tile = !lowbit.reg<[32], f16, "spatial(32)">
func.func @scatter_layout(%target: !target, %value: !tile, %index: !lowbit.reg<[32], i32, "spatial(4).local(8)">) {
  // expected-error @below {{layout: expected spatial(4).local(8), got spatial(32)}}
  "lowbit.scatter"(%value, %target, %index) {operandSegmentSizes = array<i32: 1, 1, 1, 0>}
    : (!tile, !target, !lowbit.reg<[32], i32, "spatial(4).local(8)">) -> ()
  return
}

// -----

!target = !lowbit.global<[64], i32, [1], [1]>
!tile = !lowbit.reg<[32], i32, "spatial(32)">
func.func @scatter_sums_in_device_memory(%target: !target, %value: !tile, %index: !tile) {
  // expected-error @below {{target with combine "add": expected i32 in shared memory, got !lowbit.global<[64], i32, [1], [1]>}}
  "lowbit.scatter"(%value, %target, %index) {combine = "add", operandSegmentSizes = array<i32: 1, 1, 1, 0>}
    : (!tile, !target, !tile) -> ()
  return
}

// -----

!target = !lowbit.shared<[64], i32, [1], 0>
!tile = !lowbit.reg<[32], i32, "spatial(32)">
func.func @scatter_combined_otherwise(%target: !target, %value: !tile, %index: !tile) {
  // expected-error @below {{combine: expected one of "replace", "add", got "max"}}
  "lowbit.scatter"(%value, %target, %index) {combine = "max", operandSegmentSizes = array<i32: 1, 1, 1, 0>}
    : (!tile, !target, !tile) -> ()
  return
}
