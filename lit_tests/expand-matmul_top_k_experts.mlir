// RUN: %lowbit-opt %s --split-input-file --plan-packing --expand-matmul | %filecheck %s

// Experts by ids: every block reads whose rows it has, after the kernel in front has ended, and does nothing for an
// expert elsewhere.

// CHECK-LABEL: lowbit.program @matmul
// CHECK-SAME:    %ids: !llvm.ptr<1>
// CHECK:         grid = [8, 1, "ceil(m / 1)"]
// CHECK:         lowbit.grid_wait
// CHECK:         %[[IDS:.*]] = lowbit.global_view %ids
// CHECK-COUNT-2: lowbit.read_index %[[IDS]]
// CHECK:         scf.if %
// CHECK:           lowbit.grid_launch_dependents
// CHECK:           lowbit.mma %
// CHECK:           lowbit.exp %
// CHECK:           lowbit.store {{.*}}skip
!weight = !lowbit.packed<[512, 1024], #lowbit.format<"u4", []>, 128, "none", "f16">
func.func @gate_up(%x: tensor<?x1024xf16>, %w: !weight, %ids: tensor<?x2xi64>) -> tensor<?x64xf16> {
  %y = lowbit.top_k_expert_matmul %x, %w, %ids {epilogue = "silu_mul", experts = 4, schedule = {family = "top_k_experts", row_blocks = 1, warps_k = 4}}
      : tensor<?x1024xf16>, !weight, tensor<?x2xi64> -> tensor<?x64xf16>
  return %y : tensor<?x64xf16>
}

// -----

// With weights, the blocks of a token's experts are a cluster: each adds up its part of the rows of all.
// CHECK-LABEL: lowbit.program @matmul
// CHECK:         %router_weights: !llvm.ptr<1>
// CHECK:         cluster = [1, 2, 1]
// CHECK-SAME:    grid = [8, 2, "ceil(m / 1)"]
// CHECK-NOT:     lowbit.grid_wait
// CHECK:         lowbit.read_index %
// CHECK:         lowbit.pipeline
// CHECK:           lowbit.copy_async %
// CHECK:           lowbit.grid_wait
// CHECK:         lowbit.mma %
// CHECK:         lowbit.barrier {scope = "cluster"}
// CHECK-COUNT-2: lowbit.peer %
// CHECK:         lowbit.store {{.*}}skip
// CHECK:         lowbit.barrier {scope = "cluster_arrive"}
!weight = !lowbit.packed<[512, 1024], #lowbit.format<"u4", []>, 128, "none", "f16">
func.func @down(%x: tensor<?x1024xf16>, %w: !weight, %ids: tensor<?x2xi32>, %weights: tensor<?x2xf32>) -> tensor<?x128xf16> {
  %y = "lowbit.top_k_expert_matmul"(%x, %w, %ids, %weights) {experts = 4, schedule = {family = "top_k_experts", row_blocks = 1, warps_k = 4}, operandSegmentSizes = array<i32: 1, 1, 1, 0, 1>}
      : (tensor<?x1024xf16>, !weight, tensor<?x2xi32>, tensor<?x2xf32>) -> tensor<?x128xf16>
  return %y : tensor<?x128xf16>
}
