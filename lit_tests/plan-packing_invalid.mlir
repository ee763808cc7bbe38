// RUN: %lowbit-opt %s --split-input-file --plan-packing --verify-diagnostics

// A weight that no MatmulSpec describes has no plan. The verifier says so before the pass runs.

!weight = !lowbit.packed<[64, 1024], #lowbit.format<"u4", []>, 100, "int", "f16">
func.func @group(%w: !weight) -> tensor<64x1024xf16> {
  // expected-error @below {{group_size=100 must divide k=1024; try 64 or 128}}
  %y = "lowbit.dequantize"(%w) : (!weight) -> tensor<64x1024xf16>
  return %y : tensor<64x1024xf16>
}

// -----

!weight = !lowbit.packed<[0, 1024], #lowbit.format<"u4", []>, 0, "none", "f16">
func.func @rows(%w: !weight) -> tensor<0x1024xf16> {
  // expected-error @below {{n=0 must be at least 1}}
  %y = "lowbit.dequantize"(%w) : (!weight) -> tensor<0x1024xf16>
  return %y : tensor<0x1024xf16>
}
