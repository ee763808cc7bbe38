// RUN: %lowbit-opt %s --split-input-file --plan-packing --select-schedule=row-blocks=1,warps-k=2,step-k=64,num_stages=2 --expand-matmul | %filecheck %s

// A function around a matmul becomes a kernel: the program of one block, written on tiles.

// The blocks along n, one to 16 rows; 2 warps; parameters by name.
// CHECK-LABEL: lowbit.program @matmul(%x: !llvm.ptr<1>, %codes: !llvm.ptr<1>, %scales: !llvm.ptr<1>, %zeros: !llvm.ptr<1>, %y: !llvm.ptr<1>, %m: i32)
// CHECK:      {grid = [4, 1, 1], threads = 64
// CHECK:        %[[TILE:.*]] = lowbit.block_id {axis = 0}
// CHECK:        %[[CODES:.*]] = lowbit.global_view %codes : {{.*}} -> !global_8x4x32xv4xi32
// CHECK:        %[[X:.*]] = lowbit.global_view %x, %m : {{.*}} -> !global_8xnx64xf16
// CHECK:        %[[ZERO:.*]] = lowbit.constant {value = 0.000000e+00 : f32}

// One round: copy a step of every warp (the weight before the activations, which the kernel before this one may
// still be writing), then decode, multiply, and scale the product of a group.
// CHECK:        scf.for {{.*}} iter_args(%[[SUM:.*]] = %[[ZERO]])
// CHECK-NEXT:     lowbit.pipeline attributes {num_stages = 2
// CHECK:          lowbit.copy_async %[[CODES]]
// CHECK:          lowbit.grid_wait
// CHECK:          lowbit.copy_async %[[X]]
// CHECK:          %[[WORDS:.*]] = lowbit.load %
// CHECK:          %[[W_CODES:.*]] = lowbit.view %[[WORDS]]
// An integer zero point is a shift of the codes, by minus itself.
// CHECK:          %[[ZEROS:.*]] = lowbit.reshape {{.*}} -> !reg_2x16x1xf32
// CHECK:          %[[MINUS:.*]] = lowbit.mul %[[ZEROS]], %{{.*}}
// CHECK:          %[[SHIFT:.*]] = lowbit.cast %[[MINUS]] {{.*}}xf16
// CHECK:          %[[W:.*]] = lowbit.decode %[[W_CODES]], %[[SHIFT]]
// CHECK:          %[[X_TILE:.*]] = lowbit.load_matrix %
// CHECK:          %[[PRODUCT:.*]] = lowbit.mma %
// CHECK-NOT:      lowbit.row_sums %
// CHECK:          %[[NEXT:.*]] = lowbit.fma %[[PRODUCT]], %{{.*}}, %[[SUM]]
// CHECK:          scf.yield %[[NEXT]]

// At the end the sums of the two warps meet in shared memory; rows of y beyond m are skipped.
// CHECK:        lowbit.reduce %
// CHECK:        lowbit.store {{.*}}skip
// CHECK-NOT:  func.func
!weight = !lowbit.packed<[64, 512], #lowbit.format<"u4", []>, 128, "int", "f16">
func.func @matmul(%x: tensor<?x512xf16>, %w: !weight) -> tensor<?x64xf16> {
  %y = lowbit.matmul %x, %w : tensor<?x512xf16>, !weight -> tensor<?x64xf16>
  return %y : tensor<?x64xf16>
}

// -----

// A zero point in floating point never touches a weight: s * (q - z) x = s * q x - s * z * sum(x).
// CHECK-LABEL: lowbit.program
// CHECK:      lowbit.decode %{{[a-z_0-9]+}} {
// CHECK:      %[[PRODUCT:.*]] = lowbit.mma %
// CHECK:      %[[X_SUM:.*]] = lowbit.row_sums %
// CHECK:      %[[SCALED:.*]] = lowbit.fma %[[PRODUCT]]
// CHECK:      lowbit.fma %{{.*}}, %[[X_SUM]], %[[SCALED]]
!weight = !lowbit.packed<[64, 512], #lowbit.format<"u4", []>, 128, "float", "f16">
func.func @float_zeros(%x: tensor<?x512xf16>, %w: !weight) -> tensor<?x64xf16> {
  %y = lowbit.matmul %x, %w : tensor<?x512xf16>, !weight -> tensor<?x64xf16>
  return %y : tensor<?x64xf16>
}

// -----

// f8e7m0 is beyond f16's range: decoded to f32, multiplied as tf32. One scale per row is applied after the loop.
// CHECK-LABEL: lowbit.program
// CHECK:      lowbit.decode {{.*}} -> !reg_2x16x64xf32
// CHECK-NOT:  lowbit.mul %
// CHECK:      lowbit.mma %
// CHECK:      scf.yield
// CHECK:      lowbit.mul %
!weight = !lowbit.packed<[64, 512], #lowbit.format<"f8e7m0", []>, 0, "none", "f32">
func.func @wide_range(%x: tensor<?x512xf16>, %w: !weight) -> tensor<?x64xf16> {
  %y = lowbit.matmul %x, %w : tensor<?x512xf16>, !weight -> tensor<?x64xf16>
  return %y : tensor<?x64xf16>
}

// -----

// The schedule of dequantizing has no choices: decode, scale, round, store.
// CHECK-LABEL: lowbit.program @dequantize(%codes: !llvm.ptr<1>, %scales: !llvm.ptr<1>, %y: !llvm.ptr<1>)
// CHECK:      lowbit.decode %
// CHECK:      lowbit.mul %
// CHECK:      lowbit.cast {{.*}}bf16
// CHECK:      lowbit.store %
!weight = !lowbit.packed<[64, 512], #lowbit.format<"nf4", []>, 64, "none", "bf16">
func.func @dequantize(%w: !weight) -> tensor<64x512xbf16> {
  %y = lowbit.dequantize %w : !weight -> tensor<64x512xbf16>
  return %y : tensor<64x512xbf16>
}

// -----

// An offset is added by way of the sums of x, unscaled; the scale of a row multiplies what all groups come to.
// CHECK-LABEL: lowbit.program @matmul(%x: !llvm.ptr<1>, %codes: !llvm.ptr<1>, %scales: !llvm.ptr<1>, %offsets: !llvm.ptr<1>, %row_scales: !llvm.ptr<1>,
// CHECK:      %[[PRODUCT:.*]] = lowbit.mma %
// CHECK:      %[[X_SUM:.*]] = lowbit.row_sums %
// CHECK:      %[[SCALE:.*]] = lowbit.mul %
// CHECK:      %[[OFFSET:.*]] = lowbit.reshape {{.*}} -> !reg_2x16x1xf32
// CHECK:      %[[SCALED:.*]] = lowbit.fma %[[PRODUCT]], %[[SCALE]]
// CHECK-NEXT: lowbit.fma %[[OFFSET]], %[[X_SUM]], %[[SCALED]]
// CHECK:      %[[TOTAL:.*]] = lowbit.reduce %
// CHECK:      %[[SUM:.*]] = lowbit.reshape %[[TOTAL]]
// CHECK:      %[[ROW:.*]] = lowbit.load %{{.*}}!global_64x1xf32
// CHECK:      lowbit.mul %[[SUM]], %[[ROW]]
!weight = !lowbit.packed<[64, 512], #lowbit.format<"u4", []>, 128, "offset", #lowbit.scales<"f32", "f32">>
func.func @matmul(%x: tensor<?x512xf16>, %w: !weight) -> tensor<?x64xf16> {
  %y = lowbit.matmul %x, %w : tensor<?x512xf16>, !weight -> tensor<?x64xf16>
  return %y : tensor<?x64xf16>
}

// -----

// Scales that are codes: the second level is copied beside them. At the head of a step the lanes of a warp make numbers
// of its codes, each of its own, which go to shared memory; products are multiplied by those.
// CHECK:      !global_8x4x16xf16 = !lowbit.global<[8, 4, 16], f16, [16, 32, 1], [4, 1, 1]>
// CHECK-LABEL: lowbit.program @matmul(%x: !llvm.ptr<1>, %codes: !llvm.ptr<1>, %scales: !llvm.ptr<1>, %scale_scales: !llvm.ptr<1>
// CHECK:      %[[CODES:.*]] = lowbit.global_view %{{.*}} {{.*}} -> !global_8x4x2x16xi8
// CHECK:      %[[SUPERS:.*]] = lowbit.global_view %{{.*}} {{.*}} -> !global_8x4x16xf16
// CHECK:      lowbit.copy_async %[[CODES]]
// CHECK:      lowbit.copy_async %[[SUPERS]]
// CHECK:      %[[CODE:.*]] = lowbit.cast %{{.*}} {kind = "unsigned"}
// CHECK:      %[[SIGNED:.*]] = lowbit.add %[[CODE]]
// CHECK:      %[[LOADED:.*]] = lowbit.cast %{{.*}} {kind = "float"}
// CHECK:      %[[SUPER:.*]] = lowbit.reshape %[[LOADED]]
// CHECK:      lowbit.mul %[[SIGNED]], %[[SUPER]]
// CHECK:      lowbit.store %{{.*}}, %[[FACTORS:[a-z_0-9]+]][
// CHECK:      %[[PRODUCT:.*]] = lowbit.mma %
// CHECK:      lowbit.load %[[FACTORS]][
// CHECK:      lowbit.fma %[[PRODUCT]],
!weight = !lowbit.packed<[64, 512], #lowbit.format<"u4", []>, 32, "none", #lowbit.bilevel<"i6", "f16", [1, 8], "none">>
func.func @matmul(%x: tensor<?x512xf16>, %w: !weight) -> tensor<?x64xf16> {
  %y = lowbit.matmul %x, %w : tensor<?x512xf16>, !weight -> tensor<?x64xf16>
  return %y : tensor<?x64xf16>
}

// -----

// Codes of scales and offsets that fit into a byte together are copied together, and each raised by a power of two of its
// own: 2^23 for bit 0, 2^19 for bit 4. One fma multiplies and takes it away.
// CHECK-LABEL: lowbit.program @matmul(%x: !llvm.ptr<1>, %codes: !llvm.ptr<1>, %group_codes: !llvm.ptr<1>, %scale_scales: !llvm.ptr<1>,
// CHECK:      %[[CODES:.*]] = lowbit.global_view %{{.*}} {{.*}} -> !global_8x4x4x16xi8
// CHECK-NOT:  lowbit.global_view {{.*}}xi8
// CHECK:      lowbit.copy_async %[[CODES]]
// CHECK:      %[[SCALE:.*]] = lowbit.raise_bits %{{.*}} {bits = 4, first = 0}
// CHECK:      lowbit.fma %[[SCALE]],
// CHECK:      %[[OFFSET:.*]] = lowbit.raise_bits %{{.*}} {bits = 4, first = 4}
// CHECK:      lowbit.fma %[[OFFSET]],
!weight = !lowbit.packed<[64, 512], #lowbit.format<"u4", []>, 16, "offset", #lowbit.bilevel<"u4", "f16", [1, 16], "none">>
func.func @matmul(%x: tensor<?x512xf16>, %w: !weight) -> tensor<?x64xf16> {
  %y = lowbit.matmul %x, %w : tensor<?x512xf16>, !weight -> tensor<?x64xf16>
  return %y : tensor<?x64xf16>
}
