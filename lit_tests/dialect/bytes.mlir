// RUN: %lowbit-opt %s --split-input-file | %filecheck %s
// RUN: %lowbit-opt %s --split-input-file --mlir-print-op-generic | %lowbit-opt - --split-input-file | %filecheck %s

// Operations on numbers of 8 bits, there and back. First those on tensors.

!weight = !lowbit.packed<[64, 256], #lowbit.format<"u4", []>, 128, "int", "f16">
// CHECK-LABEL: func.func @tensors
func.func @tensors(%x: tensor<?x256xf16>, %w: !weight) -> tensor<?x64xf32> {
  // CHECK: lowbit.quantize %{{.*}} : tensor<?x256xf16> -> tensor<?x256xf8E4M3FN>, tensor<?xf32>, tensor<?x8xf32>
  %values, %scales, %sums = lowbit.quantize %x : tensor<?x256xf16> -> tensor<?x256xf8E4M3FN>, tensor<?xf32>, tensor<?x8xf32>
  // CHECK: lowbit.quantized_matmul %
  %y = lowbit.quantized_matmul %values, %scales, %sums, %w
      : tensor<?x256xf8E4M3FN>, tensor<?xf32>, tensor<?x8xf32>, !weight -> tensor<?x64xf32>
  return %y : tensor<?x64xf32>
}

// -----

!weight = !lowbit.packed<[64, 256], #lowbit.format<"u4", []>, 128, "int", #lowbit.scales<"f16", "f32">>
// CHECK-LABEL: func.func @folded
func.func @folded(%x: tensor<?x256xf8E4M3FN>, %s: tensor<?xf32>, %sums: tensor<?x8xf32>, %w: !weight)
    -> tensor<?x64xf32> {
  // CHECK: lowbit.quantized_matmul {{.*}}fold_scales
  %y = lowbit.quantized_matmul %x, %s, %sums, %w {fold_scales}
      : tensor<?x256xf8E4M3FN>, tensor<?xf32>, tensor<?x8xf32>, !weight -> tensor<?x64xf32>
  return %y : tensor<?x64xf32>
}

// -----

!weight = !lowbit.packed<[64, 256], #lowbit.format<"u4", []>, 128, "int", "f16">
// CHECK-LABEL: func.func @experts
func.func @experts(%x: tensor<?x256xi8>, %s: tensor<?xf32>, %q: tensor<?x8xf32>, %w: !weight, %rows: tensor<?xi32>,
    %tiles: tensor<?x3xi32>, %bias: tensor<64xf32>) -> tensor<?x8xf32> {
  // CHECK: lowbit.quantized_expert_matmul %{{.*}} {epilogue = "silu_mul", experts = 4}
  %y = lowbit.quantized_expert_matmul %x, %s, %q, %w, %rows, %tiles, %bias {epilogue = "silu_mul", experts = 4}
      : tensor<?x256xi8>, tensor<?xf32>, tensor<?x8xf32>, !weight, tensor<?xi32>, tensor<?x3xi32>, tensor<64xf32> -> tensor<?x8xf32>
  return %y : tensor<?x8xf32>
}

// -----

!numbers = !lowbit.reg<[16, 64], f16, "local(1, 4).column_local(2, 2).spatial(8, 4).local(1, 2)">
!a = !lowbit.reg<[16, 64], f8E4M3FN, "local(1, 2).column_local(2, 2).spatial(8, 4).local(1, 4)">
// CHECK-LABEL: func.func @fragments
func.func @fragments(%numbers: !numbers) -> !a {
  // CHECK: lowbit.encode_fragments %{{.*}} : !reg_16x64xf16
  %a = lowbit.encode_fragments %numbers : !numbers -> !a
  return %a : !a
}

// -----

!weight = !lowbit.packed<[64, 256], #lowbit.format<"u4", []>, 128, "int", #lowbit.scales<"f16", "f32">>
// CHECK-LABEL: func.func @folded_integers
func.func @folded_integers(%x: tensor<?x256xi8>, %s: tensor<?xf32>, %sums: tensor<?x8xf32>, %w: !weight)
    -> tensor<?x64xf32> {
  // CHECK: lowbit.quantized_matmul {{.*}}fold_scales
  %y = lowbit.quantized_matmul %x, %s, %sums, %w {fold_scales}
      : tensor<?x256xi8>, tensor<?xf32>, tensor<?x8xf32>, !weight -> tensor<?x64xf32>
  return %y : tensor<?x64xf32>
}

// -----

!numbers = !lowbit.reg<[16, 64], f16, "local(1, 4).column_local(2, 2).spatial(8, 4).local(1, 2)">
!a = !lowbit.reg<[16, 64], i8, "local(1, 2).column_local(2, 2).spatial(8, 4).local(1, 4)">
// CHECK-LABEL: func.func @fragments_of_integers
func.func @fragments_of_integers(%numbers: !numbers) -> !a {
  // CHECK: lowbit.encode_fragments %{{.*}} : !reg_16x64xf16
  %a = lowbit.encode_fragments %numbers : !numbers -> !a
  return %a : !a
}

// -----

!numbers = !lowbit.reg<[16, 32], f16, "local(1, 2).column_local(2, 2).spatial(8, 4).local(1, 2)">
!a = !lowbit.reg<[16, 64], f8E4M3FN, "local(1, 2).column_local(2, 2).spatial(8, 4).local(1, 4)">
// CHECK-LABEL: func.func @fragments_side_by_side
func.func @fragments_side_by_side(%0: !numbers, %1: !numbers) -> !a {
  // CHECK: lowbit.encode_fragments %{{.*}}, %{{.*}}
  %a = lowbit.encode_fragments %0, %1 : !numbers, !numbers -> !a
  return %a : !a
}

// -----

!codes = !lowbit.reg<[16, 64], #lowbit.format<"u4", []>, "local(1, 4).column_local(2, 2).spatial(8, 4).local(1, 2)">
!a = !lowbit.reg<[16, 64], ui8, "local(1, 2).column_local(2, 2).spatial(8, 4).local(1, 4)">
!b = !lowbit.reg<[8, 64], i8, "local(1, 2).column_local(1, 2).spatial(8, 4).local(1, 4)">
!c = !lowbit.reg<[16, 8], i32, "local(2, 1).spatial(8, 4).local(1, 2)">
// CHECK-LABEL: func.func @products
func.func @products(%codes: !codes, %b: !b, %c: !c) -> !c {
  // CHECK: lowbit.decode_bytes %
  %a = lowbit.decode_bytes %codes : !codes -> !a
  // CHECK: lowbit.mma %
  %d = lowbit.mma %a, %b, %c : !a, !b, !c -> !c
  return %d : !c
}

// -----

!row = !lowbit.reg<[1, 512], f32, "spatial(1, 32).local(1, 16)">
!units = !lowbit.reg<[1, 32], vector<4xi32>, "spatial(1, 32)">
// CHECK-LABEL: func.func @numbers
func.func @numbers(%x: !row) -> !units {
  // CHECK: lowbit.reduce %{{.*}} {combine = "max", dim = 0}
  %0 = lowbit.reduce %x {dim = 0, combine = "max"} : !row
  // CHECK: lowbit.reciprocal %
  %1 = lowbit.reciprocal %0 : !row
  // CHECK: lowbit.round_to %{{.*}} {kind = "i8"}
  %2 = lowbit.round_to %1 {kind = "i8"} : !row
  // CHECK: lowbit.encode_bytes %{{.*}} {kind = "f8e4m3"}
  %3 = lowbit.encode_bytes %2 {kind = "f8e4m3"} : !row -> !units
  return %3 : !units
}
