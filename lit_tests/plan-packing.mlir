// RUN: %lowbit-opt %s --plan-packing | %filecheck %s

// How a weight sits in memory follows from its type; the pass writes it down.

// u4 fills units of 512 bytes every 64 columns (a chunk): [row blocks, chunks, units, lanes, words].
// CHECK-LABEL: func.func @u4
// CHECK:         lowbit.matmul %
// CHECK-SAME:    packing = {chunk = 64, codes = [4, 16, 1, 32, 4], padded_group = 128, padded_k = 1024, scales = [4, 8, 16],
// CHECK:         units = 1}
!u4 = !lowbit.packed<[64, 1024], #lowbit.format<"u4", []>, 128, "int", "f16">
func.func @u4(%x: tensor<?x1024xf16>, %w: !u4) -> tensor<?x64xf16> {
  %y = lowbit.matmul %x, %w : tensor<?x1024xf16>, !u4 -> tensor<?x64xf16>
  return %y : tensor<?x64xf16>
}

// f6 has chunks of 128 columns in 3 units. 40 rows are 3 row blocks; groups of 48 columns are padded to 64.
// CHECK-LABEL: func.func @f6
// CHECK:         lowbit.dequantize %
// CHECK-SAME:    chunk = 128
// CHECK-SAME:    padded_group = 64, padded_k = 512, scales = [3, 8, 16],
// CHECK:         units = 3
!f6 = !lowbit.packed<[40, 384], #lowbit.format<"f6e3m2", []>, 48, "none", "f16">
func.func @f6(%w: !f6) -> tensor<40x384xf16> {
  %y = lowbit.dequantize %w : !f6 -> tensor<40x384xf16>
  return %y : tensor<40x384xf16>
}

// Experts follow one another, each with row blocks of its own: 4 of 48 rows are 12 row blocks.
// CHECK-LABEL: func.func @experts
// CHECK:         lowbit.quantized_expert_matmul %
// CHECK-SAME:    packing = {chunk = 64,
// CHECK-NEXT:    codes = [12, 4, 1, 32, 4]
!experts = !lowbit.packed<[192, 256], #lowbit.format<"u4", []>, 128, "none", "f16">
func.func @experts(%x: tensor<?x256xi8>, %s: tensor<?xf32>, %q: tensor<?x8xf32>, %w: !experts, %rows: tensor<?xi32>, %tiles: tensor<?x3xi32>) -> tensor<?x48xf16> {
  %y = lowbit.quantized_expert_matmul %x, %s, %q, %w, %rows, %tiles {experts = 4}
      : tensor<?x256xi8>, tensor<?xf32>, tensor<?x8xf32>, !experts, tensor<?xi32>, tensor<?x3xi32> -> tensor<?x48xf16>
  return %y : tensor<?x48xf16>
}
