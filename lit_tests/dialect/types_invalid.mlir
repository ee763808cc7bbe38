// RUN: %lowbit-opt %s --split-input-file --verify-diagnostics

// IRDL refuses parameters of the wrong kind when a type is read. Parameters that make no sense together are
// refused by the verifier of the first operation that has the type.

// expected-error @below {{expected base attribute 'builtin.string' but got 'builtin.integer'}}
func.func private @f(!lowbit.reg<[16, 8], f32, 1 : i64>)

// -----

// expected-error @below {{expected base attribute 'lowbit.format' but got 'builtin.string'}}
func.func private @f(!lowbit.packed<[64, 256], "u4", 128, "int", "f16">)

// -----

// expected-error @below {{expected 4 type arguments, but had 2}}
func.func private @f(!lowbit.shared<[8, 64], f16>)

// -----

// A layout that is no layout.
func.func @f() {
  // expected-error @below {{'lowbit.constant' op a layout is written as calls joined with dots, not 'nonsense'}}
  %0 = "lowbit.constant"() {value = 0.0 : f32} : () -> !lowbit.reg<[16, 8], f32, "nonsense">
  return
}

// -----

func.func @f() {
  // expected-error @below {{no layout 'diagonal'; there are layout, local, spatial, column_local}}
  %0 = "lowbit.constant"() {value = 0.0 : f32} : () -> !lowbit.reg<[16, 8], f32, "diagonal(16, 8)">
  return
}

// -----

func.func @f() {
  // expected-error @below {{shape: expected that of the layout, (16, 8), got (8, 16)}}
  %0 = "lowbit.constant"() {value = 0.0 : f32} : () -> !lowbit.reg<[8, 16], f32, "spatial(16, 8)">
  return
}

// -----

func.func @f() {
  // expected-error @below {{expected a list of integers, got ["16", "8"]}}
  %0 = "lowbit.constant"() {value = 0.0 : f32} : () -> !lowbit.reg<["16", "8"], f32, "spatial(16, 8)">
  return
}

// -----

func.func @f() {
  // expected-error @below {{element: expected a #lowbit.format or one of f16, bf16, f32, i32, i8, ui8, f8E4M3FN, i16, i1, vector<4xi32>, got f64}}
  %0 = "lowbit.constant"() {value = 0.0 : f32} : () -> !lowbit.reg<[16, 8], f64, "spatial(16, 8)">
  return
}

// -----

// Buffers and views.
func.func @f() {
  // expected-error @below {{shape: expected sizes of at least 1, got [-1, 64]}}
  %0 = "lowbit.alloc_shared"() : () -> !lowbit.shared<[-1, 64], f16, [64, 1], 0>
  return
}

// -----

func.func @f() {
  // expected-error @below {{strides: expected one per dim (2), got 1}}
  %0 = "lowbit.alloc_shared"() : () -> !lowbit.shared<[8, 64], f16, [1], 0>
  return
}

// -----

func.func @f() {
  // expected-error @below {{strides: expected none below 0, got [-64, 1]}}
  %0 = "lowbit.alloc_shared"() : () -> !lowbit.shared<[8, 64], f16, [-64, 1], 0>
  return
}

// -----

func.func @f() {
  // expected-error @below {{element of memory: expected whole bytes (codes and conditions are in registers)}}
  %0 = "lowbit.alloc_shared"() : () -> !lowbit.shared<[8, 64], #lowbit.format<"u4", []>, [64, 1], 0>
  return
}

// -----

// Swizzled rows are 128 bytes, eight of them the smallest piece that can be moved.
func.func @f() {
  // expected-error @below {{swizzle: expected 0 or 128, got 64}}
  %0 = "lowbit.alloc_shared"() : () -> !lowbit.shared<[8, 64], f16, [64, 1], 64>
  return
}

// -----

func.func @f() {
  // expected-error @below {{strides: expected [multiples of 512, 64, 1] with swizzle 128, got [72, 1]}}
  %0 = "lowbit.alloc_shared"() : () -> !lowbit.shared<[8, 64], f16, [72, 1], 128>
  return
}

// -----

func.func @f() {
  // expected-error @below {{strides: expected [multiples of 512, 64, 1] with swizzle 128, got [256, 64, 1]}}
  %0 = "lowbit.alloc_shared"() : () -> !lowbit.shared<[2, 4, 64], bf16, [256, 64, 1], 128>
  return
}

// -----

func.func @f(%p: !llvm.ptr<1>, %m: i32) {
  // expected-error @below {{shape: expected sizes of at least 1 or -1, got [-2, 64]}}
  %0 = "lowbit.global_view"(%p) {operandSegmentSizes = array<i32: 1, 0>} : (!llvm.ptr<1>) -> !lowbit.global<[-2, 64], f16, [64, 1], [1, 1]>
  return
}

// -----

func.func @f(%p: !llvm.ptr<1>) {
  // expected-error @below {{divisors: expected one per dim (2), got 1}}
  %0 = "lowbit.global_view"(%p) {operandSegmentSizes = array<i32: 1, 0>} : (!llvm.ptr<1>) -> !lowbit.global<[8, 64], f16, [64, 1], [1]>
  return
}

// -----

func.func @f(%p: !llvm.ptr<1>) {
  // expected-error @below {{divisors: expected none below 1, got [0, 1]}}
  %0 = "lowbit.global_view"(%p) {operandSegmentSizes = array<i32: 1, 0>} : (!llvm.ptr<1>) -> !lowbit.global<[8, 64], f16, [64, 1], [0, 1]>
  return
}

// -----

// Packed weights obey the rules of a MatmulSpec.
func.func @f(%w: !lowbit.packed<[64], #lowbit.format<"u4", []>, 0, "none", "f16">) -> tensor<64x256xf16> {
  // expected-error @below {{shape of a packed weight: expected [n, k], got [64]}}
  %0 = "lowbit.dequantize"(%w) : (!lowbit.packed<[64], #lowbit.format<"u4", []>, 0, "none", "f16">) -> tensor<64x256xf16>
  return %0 : tensor<64x256xf16>
}

// -----

func.func @f(%w: !lowbit.packed<[64, 256], #lowbit.format<"u9", []>, 0, "none", "f16">) -> tensor<64x256xf16> {
  // expected-error @below {{unknown weight format 'u9'; allowed: u1..u8, i1..i8}}
  %0 = "lowbit.dequantize"(%w) : (!lowbit.packed<[64, 256], #lowbit.format<"u9", []>, 0, "none", "f16">) -> tensor<64x256xf16>
  return %0 : tensor<64x256xf16>
}

// -----

func.func @f(%w: !lowbit.packed<[64, 256], #lowbit.format<"lut1", ["a", "b"]>, 0, "none", "f16">) -> tensor<64x256xf16> {
  // expected-error @below {{table of a format: expected a list of floats, got ["a", "b"]}}
  %0 = "lowbit.dequantize"(%w) : (!lowbit.packed<[64, 256], #lowbit.format<"lut1", ["a", "b"]>, 0, "none", "f16">) -> tensor<64x256xf16>
  return %0 : tensor<64x256xf16>
}

// -----

func.func @f(%w: !lowbit.packed<[64, 256], #lowbit.format<"u4", []>, 96, "none", "f16">) -> tensor<64x256xf16> {
  // expected-error @below {{group_size=96 must divide k=256; try 64 or 128}}
  %0 = "lowbit.dequantize"(%w) : (!lowbit.packed<[64, 256], #lowbit.format<"u4", []>, 96, "none", "f16">) -> tensor<64x256xf16>
  return %0 : tensor<64x256xf16>
}

// -----

func.func @f(%w: !lowbit.packed<[64, 256], #lowbit.format<"nf4", []>, 64, "int", "f16">) -> tensor<64x256xf16> {
  // expected-error @below {{zeros='int' needs an integer weight}}
  %0 = "lowbit.dequantize"(%w) : (!lowbit.packed<[64, 256], #lowbit.format<"nf4", []>, 64, "int", "f16">) -> tensor<64x256xf16>
  return %0 : tensor<64x256xf16>
}

// -----

func.func @f(%w: !lowbit.packed<[64, 256], #lowbit.format<"u4", []>, 64, "none", "f8">) -> tensor<64x256xf16> {
  // expected-error @below {{scale='f8' must be one of 'f16', 'bf16', 'f32', 'e8m0', 'e4m3'}}
  %0 = "lowbit.dequantize"(%w) : (!lowbit.packed<[64, 256], #lowbit.format<"u4", []>, 64, "none", "f8">) -> tensor<64x256xf16>
  return %0 : tensor<64x256xf16>
}

// -----

func.func @f(%w: !lowbit.packed<[64, 256], #lowbit.format<"u4", []>, 64, "offsets", "f16">) -> tensor<64x256xf16> {
  // expected-error @below {{zeros='offsets' must be one of 'none', 'int', 'float', 'offset'}}
  %0 = "lowbit.dequantize"(%w) : (!lowbit.packed<[64, 256], #lowbit.format<"u4", []>, 64, "offsets", "f16">) -> tensor<64x256xf16>
  return %0 : tensor<64x256xf16>
}

// -----

func.func @f(%w: !lowbit.packed<[64, 256], #lowbit.format<"u4", []>, 64, "none", #lowbit.scales<"e4m3", "f16">>) -> tensor<64x256xf16> {
  // expected-error @below {{type of row scales: expected f32, got f16}}
  %0 = "lowbit.dequantize"(%w) : (!lowbit.packed<[64, 256], #lowbit.format<"u4", []>, 64, "none", #lowbit.scales<"e4m3", "f16">>) -> tensor<64x256xf16>
  return %0 : tensor<64x256xf16>
}

// -----

func.func @f(%w: !lowbit.packed<[64, 256], #lowbit.format<"u4", []>, 64, "none", #lowbit.scales<"u5", "f32">>) -> tensor<64x256xf16> {
  // expected-error @below {{scale='u5' must be one of}}
  %0 = "lowbit.dequantize"(%w) : (!lowbit.packed<[64, 256], #lowbit.format<"u4", []>, 64, "none", #lowbit.scales<"u5", "f32">>) -> tensor<64x256xf16>
  return %0 : tensor<64x256xf16>
}

// -----

func.func @f(%w: !lowbit.packed<[64, 256], #lowbit.format<"u4", []>, 64, "none", 16>) -> tensor<64x256xf16> {
  // expected-error @below {{scale: expected a string, a #lowbit.bilevel or a #lowbit.scales, got 16 : i64}}
  %0 = "lowbit.dequantize"(%w) : (!lowbit.packed<[64, 256], #lowbit.format<"u4", []>, 64, "none", 16>) -> tensor<64x256xf16>
  return %0 : tensor<64x256xf16>
}

// -----

func.func @f(%w: !lowbit.packed<[64, 256], #lowbit.format<"u4", []>, 64, "none", #lowbit.bilevel<"u6", "f16", [8], "none">>) -> tensor<64x256xf16> {
  // expected-error @below {{block of a #lowbit.bilevel: expected [rows, groups], got [8]}}
  %0 = "lowbit.dequantize"(%w) : (!lowbit.packed<[64, 256], #lowbit.format<"u4", []>, 64, "none", #lowbit.bilevel<"u6", "f16", [8], "none">>) -> tensor<64x256xf16>
  return %0 : tensor<64x256xf16>
}

// -----

func.func @f(%w: !lowbit.packed<[64, 256], #lowbit.format<"u4", []>, 64, "none", #lowbit.bilevel<"u6", "f16", [2, 4], "none">>) -> tensor<64x256xf16> {
  // expected-error @below {{bilevel: rows=2 must be 1 or 16}}
  %0 = "lowbit.dequantize"(%w) : (!lowbit.packed<[64, 256], #lowbit.format<"u4", []>, 64, "none", #lowbit.bilevel<"u6", "f16", [2, 4], "none">>) -> tensor<64x256xf16>
  return %0 : tensor<64x256xf16>
}

// -----

func.func @f(%w: !lowbit.packed<[64, 256], #lowbit.format<"u4", []>, 64, "none", #lowbit.bilevel<"u6", "f16", [1, 8], "none">>) -> tensor<64x256xf16> {
  // expected-error @below {{bilevel: groups=8 must divide the 4 groups of a row; try 4}}
  %0 = "lowbit.dequantize"(%w) : (!lowbit.packed<[64, 256], #lowbit.format<"u4", []>, 64, "none", #lowbit.bilevel<"u6", "f16", [1, 8], "none">>) -> tensor<64x256xf16>
  return %0 : tensor<64x256xf16>
}

// -----

func.func @f(%w: !lowbit.packed<[64, 256], #lowbit.format<"u4", []>, 64, "none", #lowbit.bilevel<"u6", "e4m3", [1, 4], "none">>) -> tensor<64x256xf16> {
  // expected-error @below {{bilevel: scale='e4m3' must be one of 'f16', 'bf16', 'f32'}}
  %0 = "lowbit.dequantize"(%w) : (!lowbit.packed<[64, 256], #lowbit.format<"u4", []>, 64, "none", #lowbit.bilevel<"u6", "e4m3", [1, 4], "none">>) -> tensor<64x256xf16>
  return %0 : tensor<64x256xf16>
}

// -----

func.func @f(%w: !lowbit.packed<[64, 256], #lowbit.format<"u4", []>, 64, "none", #lowbit.bilevel<"u6", "f16", [1, 4], "int">>) -> tensor<64x256xf16> {
  // expected-error @below {{zeros of a #lowbit.bilevel: expected none, float or offset, got int}}
  %0 = "lowbit.dequantize"(%w) : (!lowbit.packed<[64, 256], #lowbit.format<"u4", []>, 64, "none", #lowbit.bilevel<"u6", "f16", [1, 4], "int">>) -> tensor<64x256xf16>
  return %0 : tensor<64x256xf16>
}

// -----

func.func @f(%w: !lowbit.packed<[64, 256], #lowbit.format<"u4", []>, 64, "none", #lowbit.bilevel<16, "f16", [1, 4], "none">>) -> tensor<64x256xf16> {
  // expected-error @below {{code of a #lowbit.bilevel: expected a string or a #lowbit.format, got 16 : i64}}
  %0 = "lowbit.dequantize"(%w) : (!lowbit.packed<[64, 256], #lowbit.format<"u4", []>, 64, "none", #lowbit.bilevel<16, "f16", [1, 4], "none">>) -> tensor<64x256xf16>
  return %0 : tensor<64x256xf16>
}

// -----

func.func @f(%w: !lowbit.packed<[64, 256], #lowbit.format<"u4", []>, 64, "none", #lowbit.bilevel<#lowbit.format<"nf4", []>, "f16", [1, 4], "none">>) -> tensor<64x256xf16> {
  // expected-error @below {{bilevel: table= must be 256 numbers, the values of codes of lut8}}
  %0 = "lowbit.dequantize"(%w) : (!lowbit.packed<[64, 256], #lowbit.format<"u4", []>, 64, "none", #lowbit.bilevel<#lowbit.format<"nf4", []>, "f16", [1, 4], "none">>) -> tensor<64x256xf16>
  return %0 : tensor<64x256xf16>
}

// -----

func.func @f(%w: !lowbit.packed<[64, 256], #lowbit.format<"u4", []>, 64, "none", #lowbit.bilevel<"f16", "f16", [1, 4], "none">>) -> tensor<64x256xf16> {
  // expected-error @below {{scale='f16' must be one of 'u3', 'u4', 'u6', 'u8', 'i6', 'i8', 'lut8', 'e4m3' with bilevel=}}
  %0 = "lowbit.dequantize"(%w) : (!lowbit.packed<[64, 256], #lowbit.format<"u4", []>, 64, "none", #lowbit.bilevel<"f16", "f16", [1, 4], "none">>) -> tensor<64x256xf16>
  return %0 : tensor<64x256xf16>
}

// -----

func.func @f(%w: !lowbit.packed<[64, 256], #lowbit.format<"u4", []>, 64, "none", "u6">) -> tensor<64x256xf16> {
  // expected-error @below {{scale='u6' is a code: it needs a second level}}
  %0 = "lowbit.dequantize"(%w) : (!lowbit.packed<[64, 256], #lowbit.format<"u4", []>, 64, "none", "u6">) -> tensor<64x256xf16>
  return %0 : tensor<64x256xf16>
}
