// RUN: %lowbit-opt %s --split-input-file --plan-packing --expand-matmul | %filecheck %s

// Experts: which tile is whose is read from device memory, after the kernel in front has ended; rows of x are copied as
// a list names them.

// CHECK-LABEL: lowbit.program @prefill
// CHECK-SAME:    (%[[X:.*]]: !llvm.ptr<1>, %[[CODES:.*]]: !llvm.ptr<1>, %[[SCALES:.*]]: !llvm.ptr<1>, %[[ROWS:.*]]: !llvm.ptr<1>, %[[TILES:.*]]: !llvm.ptr<1>
// CHECK:         {grid = ["sm_count / 1", 1, 1], {{.*}}threads = 256
// CHECK:         lowbit.grid_wait
// How many tiles of slots there are, and of the first its expert, its first slot, and its end.
// CHECK:         lowbit.read_index %[[TABLE:.*]][%{{.*}}, %{{.*}}]
// CHECK-COUNT-3: lowbit.read_index %[[TABLE]][
// CHECK:         lowbit.load %
// CHECK:         lowbit.copy_rows %
// CHECK:         scf.for
// CHECK-COUNT-6:   lowbit.read_index %[[TABLE]][
// CHECK:           scf.for
// CHECK:             lowbit.mma %
// CHECK:             lowbit.copy_rows %
// CHECK:           lowbit.store {{.*}}skip
!weight = !lowbit.packed<[512, 1024], #lowbit.format<"u4", []>, 128, "none", "f16">
func.func @experts(%x: tensor<?x1024xf16>, %w: !weight, %rows: tensor<?xi32>, %tiles: tensor<?x3xi32>) -> tensor<?x128xf16> {
  %y = lowbit.expert_matmul %x, %w, %rows, %tiles {experts = 4, schedule = {family = "experts_mma", tokens = 32}}
      : tensor<?x1024xf16>, !weight, tensor<?xi32>, tensor<?x3xi32> -> tensor<?x128xf16>
  return %y : tensor<?x128xf16>
}

// -----

// Few slots: blocks take turns at tiles, each with a pipeline of its own, and a barrier before the next one's copies.
// CHECK-LABEL: lowbit.program @matmul
// CHECK:         fits_blocks, grid = ["sm_count * 3", 1, 1], max_blocks = 3
// CHECK:         lowbit.grid_wait
// CHECK:         lowbit.read_index %[[FEW:.*]][%{{.*}}, %{{.*}}]
// CHECK:         scf.for
// CHECK-COUNT-3:   lowbit.read_index %[[FEW]][
// CHECK:           %[[LIST:.*]] = lowbit.global_view %rows,
// CHECK:           scf.for
// CHECK:             lowbit.pipeline
// CHECK:               lowbit.copy_async %
// CHECK:               lowbit.copy_rows %{{.*}}%[[LIST]]
// CHECK:             lowbit.mma %
// CHECK:           lowbit.store {{.*}}skip
// CHECK-NEXT:      lowbit.barrier
!weight = !lowbit.packed<[512, 1024], #lowbit.format<"u4", []>, 128, "none", "f16">
func.func @experts(%x: tensor<?x1024xf16>, %w: !weight, %rows: tensor<?xi32>, %tiles: tensor<?x3xi32>) -> tensor<?x128xf16> {
  %y = lowbit.expert_matmul %x, %w, %rows, %tiles {experts = 4, schedule = {family = "experts_decode", tokens = 8, warps_k = 4, max_blocks_per_sm = 3}}
      : tensor<?x1024xf16>, !weight, tensor<?xi32>, tensor<?x3xi32> -> tensor<?x128xf16>
  return %y : tensor<?x128xf16>
}

// -----

// Of experts whose sums are gated, y has half as many columns.
// CHECK-LABEL: lowbit.program @prefill
// CHECK:         lowbit.mma %
// CHECK:         lowbit.exp %
// CHECK:         %[[SILU:.*]] = lowbit.div %
// CHECK-NEXT:    %[[GATED:.*]] = lowbit.mul %[[SILU]]
// CHECK:         %[[Y:.*]] = lowbit.cast %[[GATED]]
// CHECK:         lowbit.store %[[Y]], {{.*}}skip
!weight = !lowbit.packed<[512, 1024], #lowbit.format<"u4", []>, 128, "none", "f16">
func.func @experts(%x: tensor<?x1024xf16>, %w: !weight, %rows: tensor<?xi32>, %tiles: tensor<?x3xi32>) -> tensor<?x64xf16> {
  %y = lowbit.expert_matmul %x, %w, %rows, %tiles {epilogue = "silu_mul", experts = 4, schedule = {family = "experts_mma", tokens = 32}}
      : tensor<?x1024xf16>, !weight, tensor<?xi32>, tensor<?x3xi32> -> tensor<?x64xf16>
  return %y : tensor<?x64xf16>
}

// -----

// Activations of 8 bits: codes become bytes, and sums are multiplied by the scale of the row of x that a slot has.
// CHECK-LABEL: lowbit.program @prefill
// CHECK-SAME:    (%[[X:.*]]: !llvm.ptr<1>, %[[CODES:.*]]: !llvm.ptr<1>, %[[SCALES:.*]]: !llvm.ptr<1>, %[[OF_X:.*]]: !llvm.ptr<1>, %rows: !llvm.ptr<1>,
// CHECK:         lowbit.copy_rows %
// CHECK:         lowbit.decode_bytes %
// CHECK:         lowbit.mma %
// CHECK:         %[[SLOTS:.*]] = lowbit.load %rows
// CHECK:         %[[FOUND:.*]] = lowbit.gather %x_scales
// CHECK-SAME:    %[[SLOTS]]
// CHECK-NEXT:    lowbit.mul %{{.*}}, %[[FOUND]]
// CHECK:         lowbit.store {{.*}}skip
!weight = !lowbit.packed<[512, 1024], #lowbit.format<"u4", []>, 128, "none", "f16">
func.func @experts(%x: tensor<?x1024xi8>, %s: tensor<?xf32>, %q: tensor<?x32xf32>, %w: !weight, %rows: tensor<?xi32>, %tiles: tensor<?x3xi32>) -> tensor<?x128xf16> {
  %y = lowbit.quantized_expert_matmul %x, %s, %q, %w, %rows, %tiles {experts = 4, schedule = {family = "eight_bit_experts_mma", tokens = 32}}
      : tensor<?x1024xi8>, tensor<?xf32>, tensor<?x32xf32>, !weight, tensor<?xi32>, tensor<?x3xi32> -> tensor<?x128xf16>
  return %y : tensor<?x128xf16>
}

// -----

// Few slots in 8 bits: weights stream as in kernels for dense ones. Sums of x, which make up for zeros, come by the list
// of rows, as x does, and so does the scale of a slot.
// CHECK-LABEL: lowbit.program @matmul
// CHECK-SAME:    %x_scales: !llvm.ptr<1>, %x_sums: !llvm.ptr<1>,
// CHECK:         lowbit.copy_rows %x_
// CHECK:         lowbit.copy_rows %x_sums{{.*}}zero
// CHECK:         lowbit.decode_bytes %
// CHECK:         lowbit.mma %
// CHECK:         %[[SLOTS:.*]] = lowbit.load %rows
// CHECK:         lowbit.gather %x_scales{{.*}}%[[SLOTS]]
// CHECK:         lowbit.store {{.*}}skip
!weight = !lowbit.packed<[512, 1024], #lowbit.format<"u4", []>, 128, "int", "f16">
func.func @few(%x: tensor<?x1024xi8>, %s: tensor<?xf32>, %q: tensor<?x32xf32>, %w: !weight, %rows: tensor<?xi32>, %tiles: tensor<?x3xi32>) -> tensor<?x128xf16> {
  %y = lowbit.quantized_expert_matmul %x, %s, %q, %w, %rows, %tiles {experts = 4, schedule = {family = "eight_bit_experts_decode", tokens = 8, row_blocks = 1, warps_n = 4, warps_k = 1, step_k = 128, num_stages = 2}}
      : tensor<?x1024xi8>, tensor<?xf32>, tensor<?x32xf32>, !weight, tensor<?xi32>, tensor<?x3xi32> -> tensor<?x128xf16>
  return %y : tensor<?x128xf16>
}
