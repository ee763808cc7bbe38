// RUN: %lowbit-opt %s --select-schedule=target=sm_90a,tokens=8 | %filecheck %s
// RUN: %lowbit-opt %s --select-schedule=target=sm_90a,tokens=64 | %filecheck %s

// Where results are to be the same for any number of rows, kernels for 8 slots and for 64 cut k alike: four warps share it,
// in steps of 128 columns.
// CHECK-LABEL: func.func @invariant
// CHECK:         lowbit.expert_matmul %
// CHECK-SAME:    experts = 8, invariant
// CHECK:         split_k = 1,
// CHECK-SAME:    step_k = 128,
// CHECK:         warps_k = 4,
!experts = !lowbit.packed<[8192, 1024], #lowbit.format<"u4", []>, 128, "none", "f16">
func.func @invariant(%x: tensor<?x1024xf16>, %w: !experts, %rows: tensor<?xi32>, %tiles: tensor<?x3xi32>) -> tensor<?x1024xf16> {
  %y = lowbit.expert_matmul %x, %w, %rows, %tiles {experts = 8, invariant}
      : tensor<?x1024xf16>, !experts, tensor<?xi32>, tensor<?x3xi32> -> tensor<?x1024xf16>
  return %y : tensor<?x1024xf16>
}
