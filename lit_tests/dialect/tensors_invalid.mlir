// RUN: %lowbit-opt %s --split-input-file --verify-diagnostics

// What verifiers refuse: operations on tensors. Wrong types are in types_invalid.mlir.

!weight = !lowbit.packed<[64, 256], #lowbit.format<"u4", []>, 128, "int", "f16">
func.func @matmul_x(%x: tensor<?x128xf16>, %w: !weight) -> tensor<?x64xf16> {
  // expected-error @below {{'lowbit.matmul' op x: expected tensor<?x256xf16> or tensor<?x256xbf16>, got tensor<?x128xf16>}}
  %y = "lowbit.matmul"(%x, %w) {operandSegmentSizes = array<i32: 1, 1, 0, 0>} : (tensor<?x128xf16>, !weight) -> tensor<?x64xf16>
  return %y : tensor<?x64xf16>
}

// -----

!weight = !lowbit.packed<[64, 256], #lowbit.format<"u4", []>, 128, "int", "f16">
func.func @matmul_y(%x: tensor<?x256xf16>, %w: !weight) -> tensor<?x64xi8> {
  // expected-error @below {{y: expected tensor<?x64xf16> or tensor<?x64xbf16> or tensor<?x64xf32>, got tensor<?x64xi8>}}
  %y = "lowbit.matmul"(%x, %w) {operandSegmentSizes = array<i32: 1, 1, 0, 0>} : (tensor<?x256xf16>, !weight) -> tensor<?x64xi8>
  return %y : tensor<?x64xi8>
}

// -----

// The bias has the type of y.
!weight = !lowbit.packed<[64, 256], #lowbit.format<"u4", []>, 128, "int", "f16">
func.func @matmul_bias(%x: tensor<?x256xf16>, %w: !weight, %bias: tensor<64xf16>) -> tensor<?x64xf32> {
  // expected-error @below {{bias: expected tensor<64xf32>, got tensor<64xf16>}}
  %y = "lowbit.matmul"(%x, %w, %bias) {operandSegmentSizes = array<i32: 1, 1, 1, 0>}
    : (tensor<?x256xf16>, !weight, tensor<64xf16>) -> tensor<?x64xf32>
  return %y : tensor<?x64xf32>
}

// -----

!weight = !lowbit.packed<[64, 256], #lowbit.format<"u4", []>, 128, "int", "f16">
func.func @matmul_two_biases(%x: tensor<?x256xf16>, %w: !weight, %bias: tensor<64xf16>) -> tensor<?x64xf16> {
  // expected-error @below {{bias: expected one at most, got 2}}
  %y = "lowbit.matmul"(%x, %w, %bias, %bias) {operandSegmentSizes = array<i32: 1, 1, 2, 0>}
    : (tensor<?x256xf16>, !weight, tensor<64xf16>, tensor<64xf16>) -> tensor<?x64xf16>
  return %y : tensor<?x64xf16>
}

// -----

!weight = !lowbit.packed<[64, 256], #lowbit.format<"u4", []>, 128, "int", "f16">
func.func @matmul_segments(%x: tensor<?x256xf16>, %w: !weight) -> tensor<?x64xf16> {
  // expected-error @below {{operandSegmentSizes: expected array<i32: 1, 1, any, any>, 2 in all, got nothing}}
  %y = "lowbit.matmul"(%x, %w) : (tensor<?x256xf16>, !weight) -> tensor<?x64xf16>
  return %y : tensor<?x64xf16>
}

// -----

!weight = !lowbit.packed<[64, 256], #lowbit.format<"u4", []>, 128, "int", "f16">
func.func @matmul_without_residual(%x: tensor<?x256xf16>, %w: !weight) -> tensor<?x64xf16> {
  // expected-error @below {{residual with epilogue=residual: expected 1, got 0}}
  %y = lowbit.matmul %x, %w {epilogue = "residual"} : tensor<?x256xf16>, !weight -> tensor<?x64xf16>
  return %y : tensor<?x64xf16>
}

// -----

!weight = !lowbit.packed<[64, 256], #lowbit.format<"u4", []>, 128, "int", "f16">
func.func @gated_matmul_of_all_rows(%x: tensor<?x256xf16>, %w: !weight) -> tensor<?x64xf16> {
  // expected-error @below {{y: expected tensor<?x32xf16>}}
  %y = lowbit.matmul %x, %w {epilogue = "silu_mul"} : tensor<?x256xf16>, !weight -> tensor<?x64xf16>
  return %y : tensor<?x64xf16>
}

// -----

!weight = !lowbit.packed<[56, 256], #lowbit.format<"u4", []>, 128, "int", "f16">
func.func @gated_matmul_of_half_a_block(%x: tensor<?x256xf16>, %w: !weight) -> tensor<?x28xf16> {
  // expected-error @below {{rows with gelu_mul: expected a multiple of 16, got 56}}
  %y = lowbit.matmul %x, %w {epilogue = "gelu_mul"} : tensor<?x256xf16>, !weight -> tensor<?x28xf16>
  return %y : tensor<?x28xf16>
}

// -----

!weight = !lowbit.packed<[64, 256], #lowbit.format<"u4", []>, 128, "int", "f16">
func.func @matmul_epilogue(%x: tensor<?x256xf16>, %w: !weight) -> tensor<?x64xf16> {
  // expected-error @below {{epilogue: expected one of "none", "silu_mul", "gelu_mul", "swiglu_oai", "residual", got "relu"}}
  %y = lowbit.matmul %x, %w {epilogue = "relu"} : tensor<?x256xf16>, !weight -> tensor<?x64xf16>
  return %y : tensor<?x64xf16>
}

// -----

!weight = !lowbit.packed<[64, 256], #lowbit.format<"u4", []>, 128, "int", "f16">
func.func @dequantize_y(%w: !weight) -> tensor<256x64xf16> {
  // expected-error @below {{y: expected tensor<64x256xf16> or tensor<64x256xbf16>, got tensor<256x64xf16>}}
  %y = "lowbit.dequantize"(%w) : (!weight) -> tensor<256x64xf16>
  return %y : tensor<256x64xf16>
}

// -----

func.func @permutation(%x: tensor<?x256xf16>, %permutation: tensor<128xi32>) -> tensor<?x256xf16> {
  // expected-error @below {{'lowbit.permute' op permutation: expected tensor<256xi32>, got tensor<128xi32>}}
  %y = "lowbit.permute"(%x, %permutation) : (tensor<?x256xf16>, tensor<128xi32>) -> tensor<?x256xf16>
  return %y : tensor<?x256xf16>
}

// -----

func.func @permuted(%x: tensor<?x256xf16>, %permutation: tensor<256xi32>) -> tensor<?x256xbf16> {
  // expected-error @below {{y: expected tensor<?x256xf16>, got tensor<?x256xbf16>}}
  %y = "lowbit.permute"(%x, %permutation) : (tensor<?x256xf16>, tensor<256xi32>) -> tensor<?x256xbf16>
  return %y : tensor<?x256xbf16>
}

// -----

!weight = !lowbit.packed<[96, 256], #lowbit.format<"u4", []>, 128, "int", "f16">
func.func @experts_of_half_a_block(%x: tensor<?x256xf16>, %w: !weight, %rows: tensor<?xi32>, %tiles: tensor<?x3xi32>) -> tensor<?x24xf16> {
  // expected-error @below {{rows of all experts: expected a multiple of 64, got 96}}
  %y = lowbit.expert_matmul %x, %w, %rows, %tiles {experts = 4} : tensor<?x256xf16>, !weight, tensor<?xi32>, tensor<?x3xi32> -> tensor<?x24xf16>
  return %y : tensor<?x24xf16>
}

// -----

!weight = !lowbit.packed<[64, 256], #lowbit.format<"u4", []>, 128, "int", "f16">
func.func @experts_and_a_residual(%x: tensor<?x256xf16>, %w: !weight, %rows: tensor<?xi32>, %tiles: tensor<?x3xi32>) -> tensor<?x16xf16> {
  // expected-error @below {{epilogue: expected one of "none", "silu_mul", "gelu_mul", "swiglu_oai", got "residual"}}
  %y = lowbit.expert_matmul %x, %w, %rows, %tiles {epilogue = "residual", experts = 4} : tensor<?x256xf16>, !weight, tensor<?xi32>, tensor<?x3xi32> -> tensor<?x16xf16>
  return %y : tensor<?x16xf16>
}

// -----

!weight = !lowbit.packed<[64, 256], #lowbit.format<"u4", []>, 128, "int", "f16">
func.func @gated_experts(%x: tensor<?x256xf16>, %w: !weight, %rows: tensor<?xi32>, %tiles: tensor<?x3xi32>) -> tensor<?x16xf16> {
  // expected-error @below {{y: expected tensor<?x8xf16> or}}
  %y = lowbit.expert_matmul %x, %w, %rows, %tiles {epilogue = "swiglu_oai", experts = 4} : tensor<?x256xf16>, !weight, tensor<?xi32>, tensor<?x3xi32> -> tensor<?x16xf16>
  return %y : tensor<?x16xf16>
}

// -----

!weight = !lowbit.packed<[64, 256], #lowbit.format<"u4", []>, 128, "int", "f16">
func.func @y_of_all_experts(%x: tensor<?x256xf16>, %w: !weight, %rows: tensor<?xi32>, %tiles: tensor<?x3xi32>) -> tensor<?x64xf16> {
  // expected-error @below {{y: expected tensor<?x16xf16>}}
  %y = lowbit.expert_matmul %x, %w, %rows, %tiles {experts = 4} : tensor<?x256xf16>, !weight, tensor<?xi32>, tensor<?x3xi32> -> tensor<?x64xf16>
  return %y : tensor<?x64xf16>
}

// -----

!weight = !lowbit.packed<[64, 256], #lowbit.format<"u4", []>, 128, "int", "f16">
func.func @tiles_of_two_columns(%x: tensor<?x256xf16>, %w: !weight, %rows: tensor<?xi32>, %tiles: tensor<?x2xi32>) -> tensor<?x16xf16> {
  // expected-error @below {{tiles: expected tensor<?x3xi32>, got tensor<?x2xi32>}}
  %y = lowbit.expert_matmul %x, %w, %rows, %tiles {experts = 4} : tensor<?x256xf16>, !weight, tensor<?xi32>, tensor<?x2xi32> -> tensor<?x16xf16>
  return %y : tensor<?x16xf16>
}

// -----

!weight = !lowbit.packed<[64, 256], #lowbit.format<"u4", []>, 128, "int", "f16">
func.func @ids_in_a_list(%x: tensor<?x256xf16>, %w: !weight, %ids: tensor<?xi32>) -> tensor<?x16xf16> {
  // expected-error @below {{ids: expected tensor<?xk> of the k experts of a token, got tensor<?xi32>}}
  %y = lowbit.top_k_expert_matmul %x, %w, %ids {experts = 4} : tensor<?x256xf16>, !weight, tensor<?xi32> -> tensor<?x16xf16>
  return %y : tensor<?x16xf16>
}

// -----

!weight = !lowbit.packed<[64, 256], #lowbit.format<"u4", []>, 128, "int", "f16">
func.func @ids_of_16_bits(%x: tensor<?x256xf16>, %w: !weight, %ids: tensor<?x2xi16>) -> tensor<?x16xf16> {
  // expected-error @below {{ids: expected tensor<?x2xi32> or tensor<?x2xi64>, got tensor<?x2xi16>}}
  %y = lowbit.top_k_expert_matmul %x, %w, %ids {experts = 4} : tensor<?x256xf16>, !weight, tensor<?x2xi16> -> tensor<?x16xf16>
  return %y : tensor<?x16xf16>
}

// -----

!weight = !lowbit.packed<[64, 256], #lowbit.format<"u4", []>, 128, "int", "f16">
func.func @weights_of_fewer_experts(%x: tensor<?x256xf16>, %w: !weight, %ids: tensor<?x2xi32>, %s: tensor<?x1xf32>) -> tensor<?x16xf16> {
  // expected-error @below {{weights: expected tensor<?x2x}}
  %y = "lowbit.top_k_expert_matmul"(%x, %w, %ids, %s) {experts = 4, operandSegmentSizes = array<i32: 1, 1, 1, 0, 1>}
      : (tensor<?x256xf16>, !weight, tensor<?x2xi32>, tensor<?x1xf32>) -> tensor<?x16xf16>
  return %y : tensor<?x16xf16>
}

// -----

!weight = !lowbit.packed<[64, 256], #lowbit.format<"u4", []>, 128, "int", "f16">
func.func @experts_of_floats(%x: tensor<?x256xf16>, %s: tensor<?xf32>, %q: tensor<?x8xf32>, %w: !weight, %rows: tensor<?xi32>, %tiles: tensor<?x3xi32>) -> tensor<?x16xf16> {
  // expected-error @below {{values: expected tensor<?x256xf8E4M3FN> or tensor<?x256xi8>, got tensor<?x256xf16>}}
  %y = lowbit.quantized_expert_matmul %x, %s, %q, %w, %rows, %tiles {experts = 4} : tensor<?x256xf16>, tensor<?xf32>, tensor<?x8xf32>, !weight, tensor<?xi32>, tensor<?x3xi32> -> tensor<?x16xf16>
  return %y : tensor<?x16xf16>
}

// -----

!weight = !lowbit.packed<[64, 256], #lowbit.format<"u4", []>, 128, "int", "f16">
func.func @scales_of_experts(%x: tensor<?x256xi8>, %s: tensor<?x1xf32>, %q: tensor<?x8xf32>, %w: !weight, %rows: tensor<?xi32>, %tiles: tensor<?x3xi32>) -> tensor<?x16xf16> {
  // expected-error @below {{scales: expected tensor<?xf32>, got tensor<?x1xf32>}}
  %y = lowbit.quantized_expert_matmul %x, %s, %q, %w, %rows, %tiles {experts = 4} : tensor<?x256xi8>, tensor<?x1xf32>, tensor<?x8xf32>, !weight, tensor<?xi32>, tensor<?x3xi32> -> tensor<?x16xf16>
  return %y : tensor<?x16xf16>
}

// -----

!weight = !lowbit.packed<[64, 256], #lowbit.format<"u4", []>, 128, "int", "f16">
func.func @rows_of_experts(%x: tensor<?x256xi8>, %s: tensor<?xf32>, %q: tensor<?x8xf32>, %w: !weight, %rows: tensor<?xi64>, %tiles: tensor<?x3xi32>) -> tensor<?x16xf16> {
  // expected-error @below {{rows: expected tensor<?xi32>, got tensor<?xi64>}}
  %y = lowbit.quantized_expert_matmul %x, %s, %q, %w, %rows, %tiles {experts = 4} : tensor<?x256xi8>, tensor<?xf32>, tensor<?x8xf32>, !weight, tensor<?xi64>, tensor<?x3xi32> -> tensor<?x16xf16>
  return %y : tensor<?x16xf16>
}

// -----

!weight = !lowbit.packed<[64, 256], #lowbit.format<"u4", []>, 128, "int", "f16">
func.func @gated_bytes_of_experts(%x: tensor<?x256xi8>, %s: tensor<?xf32>, %q: tensor<?x8xf32>, %w: !weight, %rows: tensor<?xi32>, %tiles: tensor<?x3xi32>) -> tensor<?x16xf16> {
  // expected-error @below {{y: expected tensor<?x8xf16> or}}
  %y = lowbit.quantized_expert_matmul %x, %s, %q, %w, %rows, %tiles {epilogue = "silu_mul", experts = 4} : tensor<?x256xi8>, tensor<?xf32>, tensor<?x8xf32>, !weight, tensor<?xi32>, tensor<?x3xi32> -> tensor<?x16xf16>
  return %y : tensor<?x16xf16>
}

// -----

!weight = !lowbit.packed<[64, 256], #lowbit.format<"u4", []>, 128, "int", "f16">
func.func @folded_scales_of_groups_alone(%x: tensor<?x256xf8E4M3FN>, %s: tensor<?xf32>, %q: tensor<?x8xf32>, %w: !weight, %rows: tensor<?xi32>, %tiles: tensor<?x3xi32>) -> tensor<?x16xf16> {
  // expected-error @below {{scales with fold_scales: expected scales of rows, too, got none of rows}}
  %y = lowbit.quantized_expert_matmul %x, %s, %q, %w, %rows, %tiles {experts = 4, fold_scales} : tensor<?x256xf8E4M3FN>, tensor<?xf32>, tensor<?x8xf32>, !weight, tensor<?xi32>, tensor<?x3xi32> -> tensor<?x16xf16>
  return %y : tensor<?x16xf16>
}
