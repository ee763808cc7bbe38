// RUN: %lowbit-opt %s --select-schedule=target=sm_90a,tokens=1 --expand-matmul | %filecheck %s
// RUN: %lowbit-opt %s --select-schedule=target=sm_90a,tokens=2048 --expand-matmul | %filecheck %s --check-prefix=MANY

// The permutation is part of the weight: it is read before the kernel in front has ended, x is not. The row is read by
// all of the blocks that share it, each of which has a quarter of the result.
// CHECK:      lowbit.program @permute
// CHECK-SAME: (%[[PX:.*]]: !llvm.ptr<1>, %[[PI:.*]]: !llvm.ptr<1>, %{{.*}}: !llvm.ptr<1>, %{{.*}}: i32)
// CHECK:      grid = ["ceil(m / 1)", 4, 1]
// CHECK:      lowbit.grid_launch_dependents
// CHECK:      %[[PERMUTATION:.*]] = lowbit.global_view %[[PI]]
// CHECK:      %[[COLUMNS:.*]] = lowbit.load %[[PERMUTATION]][
// CHECK-NEXT: lowbit.grid_wait
// CHECK:      %[[X:.*]] = lowbit.global_view %[[PX]],
// CHECK:      lowbit.load %[[X]][
// CHECK:      %[[ROW:.*]] = lowbit.alloc_shared : !shared_1x8192xf16
// CHECK:      lowbit.store %{{.*}}, %[[ROW]][
// CHECK-NEXT: lowbit.barrier
// CHECK:      %[[Y:.*]] = lowbit.gather %[[ROW]][%{{.*}}], %[[COLUMNS]]
// CHECK:      lowbit.store %[[Y]],

// With many tokens a block has four rows, and reads the permutation once for all of them.
// MANY:         grid = ["ceil(m / 4)", 1, 1]
// MANY:         lowbit.alloc_shared : !shared_4x8192xf16
// MANY-COUNT-4: lowbit.gather %
// MANY-NOT:     lowbit.gather %
func.func @permute(%x: tensor<?x8192xf16>, %permutation: tensor<8192xi32>) -> tensor<?x8192xf16> {
  %y = lowbit.permute %x, %permutation : tensor<?x8192xf16>, tensor<8192xi32> -> tensor<?x8192xf16>
  return %y : tensor<?x8192xf16>
}
