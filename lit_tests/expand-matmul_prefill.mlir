// RUN: %lowbit-opt %s --plan-packing --select-schedule=target=sm_90a,tokens=512 --expand-matmul | %filecheck %s

// Many tokens on Hopper: persistent blocks, x in boxes by the copy engine, weights straight to registers.

// CHECK-LABEL: lowbit.program @prefill
// CHECK-SAME:    (%[[MAP:.*]]: !llvm.ptr, %[[CODES:.*]]: !llvm.ptr<1>
// CHECK:         {grid = ["sm_count / 1", 1, 1], {{.*}}threads = 256
// The stages of x, and for each a signal that it is there and one that all warps have left it.
// CHECK:         lowbit.alloc_shared : !shared_4x{{[1-4]}}x{{[0-9]+}}x64xf16
// CHECK:         lowbit.alloc_signals {arrivals = 1}
// CHECK:         lowbit.alloc_signals {arrivals = 8}
// CHECK:         %[[SUMS:.*]] = lowbit.accumulator
// CHECK:         lowbit.block_count
// The weight does not wait for the kernel before; x does.
// CHECK:         lowbit.load %
// CHECK:         lowbit.grid_wait
// CHECK:         lowbit.one_thread %
// CHECK:           lowbit.arrive {{.*}}expected
// CHECK:           lowbit.copy_box %[[MAP]]

// Tile after tile, round after round. A product is begun, and the one before it is waited for.
// CHECK:         scf.for
// CHECK:           lowbit.clear_accumulator %[[SUMS]]
// CHECK:           scf.for
// CHECK:             lowbit.materialize %
// CHECK:             lowbit.await %
// CHECK:             lowbit.accumulate {{.*}}, %[[SUMS]]
// CHECK:             lowbit.one_thread %
// CHECK:             lowbit.await_products {pending = 1}
// CHECK:             lowbit.arrive {{.*}}each_warp
// CHECK:           %[[TOTAL:.*]] = lowbit.read_accumulator %[[SUMS]]
// CHECK:           lowbit.store {{.*}}skip
!weight = !lowbit.packed<[128, 1024], #lowbit.format<"u4", []>, 128, "none", "f16">
func.func @matmul(%x: tensor<?x1024xf16>, %w: !weight) -> tensor<?x128xf16> {
  %y = lowbit.matmul %x, %w : tensor<?x1024xf16>, !weight -> tensor<?x128xf16>
  return %y : tensor<?x128xf16>
}
