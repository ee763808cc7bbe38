// RUN: %lowbit-opt %s --split-input-file --lower-dequant --verify-diagnostics

// f16 has five bits of exponent: formats with more are decoded to f32 (and multiplied as tf32).
func.func @range(%w: i32) -> vector<2xf16> {
  // expected-error @below {{lower-dequant: f8e7m0 does not fit f16; decode it to f32}}
  %0 = "lowbit.decode_pair"(%w) {format = #lowbit.format<"f8e7m0", []>, register = 0, exponent = 0,
    operandSegmentSizes = array<i32: 1>} : (i32) -> vector<2xf16>
  return %0 : vector<2xf16>
}

// -----

// Nobody takes off again what a float or a wide integer would be too large by.
func.func @deferred_offset(%w: i32) -> vector<2xf16> {
  // expected-error @below {{offset "deferred": expected narrow integers in f16 or bf16, got f8e4m3 in f16}}
  %0 = "lowbit.decode_pair"(%w) {format = #lowbit.format<"f8e4m3", []>, register = 0, exponent = 8, offset = "deferred",
    operandSegmentSizes = array<i32: 1>} : (i32) -> vector<2xf16>
  return %0 : vector<2xf16>
}

// -----

// bf16's subnormals are too small for a scale in f32 to bring them back.
func.func @raw(%w: i32) -> vector<2xbf16> {
  // expected-error @below {{offset "raw": expected integers in f16, got u4 in bf16}}
  %0 = "lowbit.decode_pair"(%w) {format = #lowbit.format<"u4", []>, register = 0, exponent = 0, offset = "raw",
    operandSegmentSizes = array<i32: 1>} : (i32) -> vector<2xbf16>
  return %0 : vector<2xbf16>
}
