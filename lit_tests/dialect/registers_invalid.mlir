// RUN: %lowbit-opt %s --split-input-file --verify-diagnostics

// What verifiers refuse: pairs of codes in registers. Wrong types are in types_invalid.mlir.

// Registers: a word for every piece.
func.func @pair_words(%w: i32) {
  // expected-error @below {{'lowbit.decode_pair' op words: expected one per piece (2), got 1}}
  %0 = "lowbit.decode_pair"(%w) {format = #lowbit.format<"u6", []>, register = 7, exponent = 0, operandSegmentSizes = array<i32: 1>} : (i32) -> vector<2xf16>
  return
}

// -----

func.func @pair_register(%w: i32) {
  // expected-error @below {{register: expected 0..3, got 4}}
  %0 = "lowbit.decode_pair"(%w) {format = #lowbit.format<"u4", []>, register = 4, exponent = 0, operandSegmentSizes = array<i32: 1>} : (i32) -> vector<2xf16>
  return
}

// -----

func.func @pair_exponent(%w: i32) {
  // expected-error @below {{exponent: expected -1022..1023, got -2000}}
  %0 = "lowbit.decode_pair"(%w) {format = #lowbit.format<"u4", []>, register = 0, exponent = -2000, operandSegmentSizes = array<i32: 1>} : (i32) -> vector<2xf16>
  return
}

// -----

func.func @pair_result(%w: i32) {
  // expected-error @below {{result: expected vector<2xf16> or vector<2xbf16> or vector<2xf32>, got vector<4xf16>}}
  %0 = "lowbit.decode_pair"(%w) {format = #lowbit.format<"u4", []>, register = 0, exponent = 0, operandSegmentSizes = array<i32: 1>} : (i32) -> vector<4xf16>
  return
}

// -----

func.func @shifted_pair_kind(%w: i32, %s: vector<2xbf16>) {
  // expected-error @below {{'lowbit.decode_shifted_pair' op shift: expected vector<2xf16>, got vector<2xbf16>}}
  %0 = "lowbit.decode_shifted_pair"(%s, %w) {format = #lowbit.format<"u4", []>, register = 0, exponent = 0, operandSegmentSizes = array<i32: 1, 1>} : (vector<2xbf16>, i32) -> vector<2xf16>
  return
}

// -----

func.func @shifted_pair_float(%w: i32, %s: vector<2xf16>) {
  // expected-error @below {{format with shifts: expected an integer one, got f8e4m3}}
  %0 = "lowbit.decode_shifted_pair"(%s, %w) {format = #lowbit.format<"f8e4m3", []>, register = 0, exponent = 0, operandSegmentSizes = array<i32: 1, 1>} : (vector<2xf16>, i32) -> vector<2xf16>
  return
}

// -----

func.func @lookup_pointer(%table: !llvm.ptr<1>, %column: i32, %word: i32) {
  // expected-error @below {{table: expected !llvm.ptr<3>, got !llvm.ptr<1>}}
  %0 = "lowbit.lookup_pair"(%table, %column, %word) {format = #lowbit.format<"nf4", []>, register = 2, operandSegmentSizes = array<i32: 1, 1, 1>}
    : (!llvm.ptr<1>, i32, i32) -> vector<2xf16>
  return
}

// -----

func.func @lookup_format(%table: !llvm.ptr<3>, %column: i32, %word: i32) {
  // expected-error @below {{'lowbit.lookup_pair' op format: expected one with a table of values, got u4}}
  %0 = "lowbit.lookup_pair"(%table, %column, %word) {format = #lowbit.format<"u4", []>, register = 2, operandSegmentSizes = array<i32: 1, 1, 1>}
    : (!llvm.ptr<3>, i32, i32) -> vector<2xf16>
  return
}

// -----

func.func @lookup_register(%table: !llvm.ptr<3>, %column: i32, %word: i32) {
  // expected-error @below {{register: expected 0..3, got 4}}
  %0 = "lowbit.lookup_pair"(%table, %column, %word) {format = #lowbit.format<"nf4", []>, register = 4, operandSegmentSizes = array<i32: 1, 1, 1>}
    : (!llvm.ptr<3>, i32, i32) -> vector<2xf16>
  return
}
