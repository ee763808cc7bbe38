// RUN: %lowbit-opt %s --select-schedule=target=sm_90a,tokens=8 | %filecheck %s --check-prefixes=CHECK,FEW
// RUN: %lowbit-opt %s --select-schedule=target=sm_90a,tokens=64 | %filecheck %s --check-prefixes=CHECK,MANY

// Where results are to be the same for any number of rows, kernels for 8 slots and for 64 cut k alike, into four chains of
// steps of 128 columns: four warps have one each, or each warp has four.
// CHECK-LABEL: func.func @invariant
// CHECK:         lowbit.expert_matmul %
// CHECK-SAME:    experts = 8, invariant
// FEW-SAME:      chains = 1,
// FEW:           split_k = 1,
// FEW:           step_k = 128,
// FEW-SAME:      warps_k = 4,
// MANY-SAME:     chains = 4,
// MANY:          split_k = 1,
// MANY:          step_k = 512,
// MANY-SAME:     warps_k = 1,
!experts = !lowbit.packed<[8192, 1024], #lowbit.format<"u4", []>, 128, "none", "f16">
func.func @invariant(%x: tensor<?x1024xf16>, %w: !experts, %rows: tensor<?xi32>, %tiles: tensor<?x3xi32>) -> tensor<?x1024xf16> {
  %y = lowbit.expert_matmul %x, %w, %rows, %tiles {experts = 8, invariant}
      : tensor<?x1024xf16>, !experts, tensor<?xi32>, tensor<?x3xi32> -> tensor<?x1024xf16>
  return %y : tensor<?x1024xf16>
}
