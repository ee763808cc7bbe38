// RUN: %lowbit-opt %s --plan-packing --select-schedule=target=sm_80,tokens=512 --expand-matmul | %filecheck %s

// Many tokens without wgmma: persistent blocks, x by cp.async, weights straight to registers, sums that loops carry.

// CHECK-LABEL: lowbit.program @prefill
// CHECK-SAME:    (%[[X:.*]]: !llvm.ptr<1>, %[[CODES:.*]]: !llvm.ptr<1>
// CHECK:         {grid = ["sm_count / 1", 1, 1], {{.*}}threads = 256
// The stages of x, whose rows are padded by 16 bytes.
// CHECK:         lowbit.alloc_shared : !shared_4x1x1x{{[0-9]+}}x64xf16
// CHECK:         lowbit.block_count
// The weight does not wait for the kernel before; x does. All stages but one are filled before the first tile.
// CHECK:         lowbit.load %
// CHECK:         lowbit.grid_wait
// CHECK-COUNT-3: lowbit.copy_async %

// Tile after tile, round after round. The barrier of a panel frees the stage of the one before.
// CHECK:         scf.for
// CHECK:           scf.for
// CHECK:             lowbit.wait {pending = 2}
// CHECK-NEXT:        lowbit.barrier
// CHECK:             lowbit.load_matrix %
// CHECK:             lowbit.mma %
// CHECK:             lowbit.copy_async %
// CHECK:             lowbit.commit
// CHECK:             lowbit.load %
// CHECK:           lowbit.store {{.*}}skip
// CHECK:         lowbit.wait {pending = 0}
!weight = !lowbit.packed<[128, 1024], #lowbit.format<"u4", []>, 128, "none", "f16">
func.func @matmul(%x: tensor<?x1024xf16>, %w: !weight) -> tensor<?x128xf16> {
  %y = lowbit.matmul %x, %w : tensor<?x1024xf16>, !weight -> tensor<?x128xf16>
  return %y : tensor<?x128xf16>
}
