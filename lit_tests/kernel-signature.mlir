// RUN: %lowbit-opt %s --lower-tiles=target=sm_90a --canonicalize --cse | %filecheck %s
// RUN: %lowbit-opt %s --lower-tiles=target=sm_90a --lower-to-llvm | %filecheck %s --check-prefix=LLVM

// Parameters of every kind, and a grid that depends on one of them and on the GPU: y = alpha x, rounded to f16.

!x = !lowbit.global<[-1, 8], f16, [8, 1], [1, 1]>
!tile = !lowbit.reg<[8, 8], f16, "spatial(8, 4).local(1, 2)">

// A tensor map is passed by value, and nothing is said about it that is said of memory.
// CHECK-LABEL: gpu.func @scale
// CHECK-SAME:    (%{{.*}}: !llvm.ptr<1> {llvm.align = 16 : i64, llvm.noalias, llvm.readonly},
// CHECK-SAME:     %{{.*}}: i32, %[[ALPHA:.*]]: f32,
// CHECK-SAME:     %{{.*}}: !llvm.ptr {llvm.align = 64 : i64, llvm.byval = !llvm.array<128 x i8>},
// CHECK-SAME:     %{{.*}}: !llvm.ptr<1> {llvm.align = 16 : i64, llvm.noalias}) kernel
// CHECK-SAME:    lowbit.grid = ["ceil(m / 8)", "sm_count * 2", 1]
// CHECK-SAME:    lowbit.params = ["x", "m", "alpha", "map", "y"]

// A splat is one register, rounded once.
// CHECK:         %[[ROUNDED:.*]] = arith.truncf %[[ALPHA]] : f32 to f16
// CHECK-NOT:     arith.truncf
// CHECK:         arith.mulf

// LLVM-LABEL: llvm.func @scale
// LLVM-SAME:    %{{.*}}: f32, %{{.*}}: !llvm.ptr {llvm.align = 64 : i64, llvm.byval = !llvm.array<128 x i8>, nvvm.grid_constant},
lowbit.program @scale(%px: !llvm.ptr<1>, %m: i32, %alpha: f32, %map: !llvm.ptr, %py: !llvm.ptr<1>) attributes {threads = 32,
    grid = ["ceil(m / 8)", "sm_count * 2", 1], params = ["x", "m", "alpha", "map", "y"], workspace = 0} {
  %c0 = arith.constant 0 : i32
  %c8 = arith.constant 8 : i32
  %block = lowbit.block_id {axis = 0}
  %row = arith.muli %block, %c8 : i32
  %x = lowbit.global_view %px, %m : !llvm.ptr<1> -> !x
  %y = lowbit.global_view %py, %m : !llvm.ptr<1> -> !x
  %tile = lowbit.load %x[%row zero, %c0] : !x -> !tile
  %factor = lowbit.splat %alpha : f32 -> !tile
  %scaled = lowbit.mul %tile, %factor : !tile
  lowbit.store %scaled, %y[%row skip, %c0] : !tile, !x
  lowbit.return
}
