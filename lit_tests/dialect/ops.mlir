// RUN: %lowbit-opt %s --split-input-file | %filecheck %s
// RUN: %lowbit-opt %s --split-input-file --mlir-print-op-generic | %lowbit-opt - --split-input-file | %filecheck %s

// Every operation of the dialect, there and back. First those on tensors.

!weight = !lowbit.packed<[64, 256], #lowbit.format<"u4", []>, 128, "int", "f16">
// CHECK-LABEL: func.func @tensors
func.func @tensors(%x: tensor<?x256xf16>, %w: !weight, %bias: tensor<64xf32>, %order: tensor<256xi32>)
    -> tensor<?x64xf32> {
  // CHECK: lowbit.matmul %{{.*}}, %{{.*}}, %{{.*}}
  %y = lowbit.matmul %x, %w, %bias : tensor<?x256xf16>, !weight, tensor<64xf32> -> tensor<?x64xf32>
  // CHECK: lowbit.matmul %{{.*}}, %{{.*}}
  %no_bias = lowbit.matmul %x, %w : tensor<?x256xf16>, !weight -> tensor<?x64xf16>
  // CHECK: lowbit.matmul %{{.*}}, %{{.*}} {epilogue = "silu_mul"} : {{.*}} -> tensor<?x32xf16>
  %gated = lowbit.matmul %x, %w {epilogue = "silu_mul"} : tensor<?x256xf16>, !weight -> tensor<?x32xf16>
  // CHECK: "lowbit.matmul"(%{{.*}}, %{{.*}}, %{{.*}}) {epilogue = "residual", operandSegmentSizes = array<i32: 1, 1, 0, 1>}
  %added = "lowbit.matmul"(%x, %w, %no_bias) {epilogue = "residual", operandSegmentSizes = array<i32: 1, 1, 0, 1>}
      : (tensor<?x256xf16>, !weight, tensor<?x64xf16>) -> tensor<?x64xf16>
  // CHECK: lowbit.dequantize %
  %0 = lowbit.dequantize %w : !weight -> tensor<64x256xbf16>
  // CHECK: lowbit.permute %{{.*}}, %{{.*}} : tensor<?x256xf16>, tensor<256xi32> -> tensor<?x256xf16>
  %1 = lowbit.permute %x, %order : tensor<?x256xf16>, tensor<256xi32> -> tensor<?x256xf16>
  return %y : tensor<?x64xf32>
}

// -----

// A program is what one block does: parameters, then memory, copies, tiles.

!x = !lowbit.global<[-1, 64], f16, [64, 1], [1, 1]>
!x_buffer = !lowbit.shared<[8, 64], f16, [72, 1], 0>
!x_stages = !lowbit.shared<[2, 8, 64], f16, [576, 72, 1], 0>
!codes = !lowbit.global<[1, 32], vector<4xi32>, [32, 1], [1, 1]>
!units = !lowbit.reg<[1, 32], vector<4xi32>, "spatial(1, 32)">
!a_codes = !lowbit.reg<[16, 64], #lowbit.format<"u4", []>, "local(1, 4).column_local(2, 2).spatial(8, 4).local(1, 2)">
!a = !lowbit.reg<[16, 64], f16, "local(1, 4).column_local(2, 2).spatial(8, 4).local(1, 2)">
!a_half = !lowbit.reg<[16, 32], f16, "local(1, 2).column_local(2, 2).spatial(8, 4).local(1, 2)">
!b = !lowbit.reg<[8, 64], f16, "local(1, 8).spatial(8, 4).local(1, 2)">
!b_half = !lowbit.reg<[8, 32], f16, "local(1, 4).spatial(8, 4).local(1, 2)">
!d = !lowbit.reg<[16, 8], f32, "local(2, 1).spatial(8, 4).local(1, 2)">
!conditions = !lowbit.reg<[16, 8], i1, "local(2, 1).spatial(8, 4).local(1, 2)">
!d_flat = !lowbit.reg<[1, 16, 8], f32, "local(1, 2, 1).spatial(1, 8, 4).local(1, 1, 2)">
!sums = !lowbit.reg<[1, 8], f32, "replicated(8, rank=2).spatial(1, 4).local(1, 2)">
!scales = !lowbit.reg<[16, 1], i8, "local(2, 1).spatial(8, 1).replicated(4)">
!scales_f32 = !lowbit.reg<[16, 1], f32, "local(2, 1).spatial(8, 1).replicated(4)">

// CHECK: lowbit.program
// CHECK-SAME: (%[[X:.*]]: !llvm.ptr<1>, %[[W:.*]]: !llvm.ptr<1>, %[[COUNTERS:.*]]: !llvm.ptr<1>, %[[M:.*]]: i32)
lowbit.program @everything(%x_pointer: !llvm.ptr<1>, %w_pointer: !llvm.ptr<1>, %counters_pointer: !llvm.ptr<1>,
    %m: i32) attributes {threads = 32, grid = [1, 1, 1], params = ["x", "w", "counters", "m"], workspace = 0} {
  %c0 = arith.constant 0 : i32
  // CHECK: lowbit.block_id {axis = 0}
  %block = lowbit.block_id {axis = 0}

  // Views of device memory; the size written as -1 is an operand.
  // CHECK: lowbit.global_view %[[X]], %[[M]]
  %x = lowbit.global_view %x_pointer, %m : !llvm.ptr<1> -> !x
  // CHECK: lowbit.global_view %[[W]]
  %w = lowbit.global_view %w_pointer : !llvm.ptr<1> -> !codes
  %counters = lowbit.global_view %counters_pointer : !llvm.ptr<1> -> !lowbit.global<[4], i32, [1], [1]>
  %bytes = lowbit.global_view %w_pointer : !llvm.ptr<1> -> !lowbit.global<[16, 1], i8, [1, 1], [1, 1]>

  // Copies to shared memory: in groups that are waited for.
  // CHECK: lowbit.alloc_shared
  // CHECK: lowbit.stage %
  %stages = lowbit.alloc_shared : !x_stages
  %buffer = lowbit.stage %stages, %c0 : !x_stages -> !x_buffer
  // CHECK: lowbit.grid_wait
  lowbit.grid_wait
  // CHECK: lowbit.copy_async %
  lowbit.copy_async %x[%block zero, %c0], %buffer {layout = "local(2, 1).spatial(4, 8).local(1, 8)", limit = [64, 1, 1000]}
      : !x, !x_buffer
  // CHECK: lowbit.commit
  // CHECK: lowbit.wait {pending = 0}
  // CHECK: lowbit.barrier {scope = "warps"}
  lowbit.commit
  lowbit.wait {pending = 0}
  lowbit.barrier {scope = "warps"}

  // Tiles: packed codes become an operand of the tensor core.
  // CHECK: lowbit.load %
  // CHECK: lowbit.view %
  // CHECK: lowbit.decode %
  // CHECK: lowbit.load_matrix %
  // CHECK: lowbit.constant
  // CHECK: lowbit.mma %
  %words = lowbit.load %w[%c0, %c0 clamp] : !codes -> !units
  %codes = lowbit.view %words : !units -> !a_codes
  %a = lowbit.decode %codes {exponent = 0} : !a_codes -> !a
  %b = lowbit.load_matrix %buffer, %m : !x_buffer -> !b
  %zero = lowbit.constant {value = 0.0 : f32} : !d
  %all = lowbit.mma %a, %b, %zero : !a, !b, !d -> !d

  // A part of k: slices stay in their threads.
  // CHECK-COUNT-2: lowbit.slice %
  %a_half = lowbit.slice %a {dim = 1, start = 32} : !a -> !a_half
  %b_half = lowbit.slice %b {dim = 1, start = 32} : !b -> !b_half
  %half = lowbit.mma %a_half, %b_half, %zero : !a_half, !b_half, !d -> !d

  // Arithmetic broadcasts dims of size 1.
  // CHECK: lowbit.cast %{{.*}} {kind = "e4m3"}
  // CHECK: lowbit.raise_bits %{{.*}} {bits = 3, first = 3}
  // CHECK: lowbit.mul %
  // CHECK: lowbit.add %
  // CHECK: lowbit.fma %
  // CHECK: lowbit.compare %{{.*}} {predicate = "lt"}
  // CHECK: lowbit.select %
  // CHECK: lowbit.div %
  // CHECK: lowbit.row_sums %
  %bytes_tile = lowbit.load %bytes[%c0, %c0] : !lowbit.global<[16, 1], i8, [1, 1], [1, 1]> -> !scales
  %scale = lowbit.cast %bytes_tile {kind = "e4m3"} : !scales -> !scales_f32
  %raised = lowbit.raise_bits %bytes_tile {first = 3, bits = 3} : !scales -> !scales_f32
  %scaled = lowbit.mul %all, %scale : !d, !scales_f32 -> !d
  %sum = lowbit.add %scaled, %half : !d
  %fused = lowbit.fma %sum, %scale, %zero : !d, !scales_f32, !d -> !d
  %less = lowbit.compare %all, %scale {predicate = "lt"} : !d, !scales_f32 -> !conditions
  %chosen = lowbit.select %less, %scale, %zero : !conditions, !scales_f32, !d -> !d
  %quotient = lowbit.div %chosen, %scale : !d, !scales_f32 -> !d
  %sums = lowbit.row_sums %b : !b -> !sums

  // CHECK: lowbit.iota {dim = 0} : !reg
  // CHECK: lowbit.splat %
  // CHECK: lowbit.quotient %
  // CHECK: lowbit.scatter %{{.*}}, %{{.*}}[], %{{.*}} {combine = "add"}
  // CHECK: lowbit.scatter %{{.*}}, %{{.*}}[%{{.*}}], %{{.*}} :
  %counts = lowbit.alloc_shared : !lowbit.shared<[64], i32, [1], 0>
  %place = lowbit.iota {dim = 0} : !lowbit.reg<[32], i32, "spatial(32)">
  %many = lowbit.splat %m : i32 -> !lowbit.reg<[32], i32, "spatial(32)">
  %index = lowbit.quotient %place, %many : !lowbit.reg<[32], i32, "spatial(32)">
  lowbit.scatter %place, %counts[], %index {combine = "add"}
      : !lowbit.reg<[32], i32, "spatial(32)">, !lowbit.shared<[64], i32, [1], 0>, !lowbit.reg<[32], i32, "spatial(32)">
  %column = lowbit.constant {value = 1.0 : f32} : !lowbit.reg<[32], f16, "spatial(32)">
  lowbit.scatter %column, %x[%block], %index : !lowbit.reg<[32], f16, "spatial(32)">, !x, !lowbit.reg<[32], i32, "spatial(32)">

  // CHECK: lowbit.reshape %
  // CHECK: lowbit.reduce %
  %flat = lowbit.reshape %fused : !d -> !d_flat
  %reduced = lowbit.reduce %flat {dim = 0} : !d_flat

  // CHECK: lowbit.free_shared %
  // CHECK: lowbit.alloc_shared
  // CHECK: lowbit.copy_padded %
  // CHECK: lowbit.store %
  // CHECK: lowbit.last_arrival %
  // CHECK: lowbit.others_arrived %
  // CHECK: lowbit.grid_launch_dependents
  // CHECK: lowbit.return
  lowbit.barrier {scope = "block"}
  lowbit.free_shared %stages : !x_stages
  %padded = lowbit.alloc_shared : !lowbit.shared<[1, 8, 64], f16, [512, 64, 1], 0>
  lowbit.copy_padded %x[%c0, %c0], %padded {layout = "local(1, 8, 2).spatial(1, 1, 32)", group = 17, padded = 32}
      : !x, !lowbit.shared<[1, 8, 64], f16, [512, 64, 1], 0>
  %out = lowbit.alloc_shared : !lowbit.shared<[1, 16, 8], f32, [128, 8, 1], 0>
  lowbit.store %reduced, %out[%c0, %c0 skip, %c0] : !d_flat, !lowbit.shared<[1, 16, 8], f32, [128, 8, 1], 0>
  %count = arith.constant 3 : i32
  %last = lowbit.last_arrival %counters, %c0, %count : !lowbit.global<[4], i32, [1], [1]>
  %others = lowbit.others_arrived %counters, %c0, %count : !lowbit.global<[4], i32, [1], [1]>
  lowbit.grid_launch_dependents
  lowbit.return
}

// -----

// A warpgroup multiplies with what is in shared memory, in swizzled rows that its instructions read by themselves; the
// blocks of a cluster read each other's sums.

!x_buffer = !lowbit.shared<[1, 8, 64], f16, [512, 64, 1], 128>
!a = !lowbit.reg<[64, 64], f16, "spatial(4, 1).column_local(2, 8).spatial(8, 4).local(1, 2)">
!d = !lowbit.reg<[64, 8], f32, "spatial(4, 1).local(2, 1).spatial(8, 4).local(1, 2)">
!sums = !lowbit.reg<[1, 8], f32, "replicated(32, rank=2).spatial(1, 4).local(1, 2)">
!partial = !lowbit.shared<[64, 8], f32, [1, 68], 0>

// CHECK: lowbit.program @warpgroup attributes {cluster = [1, 2, 1], fits_blocks, grid = [6, 2, 1], max_blocks = 1,
lowbit.program @warpgroup attributes {threads = 128, grid = [6, 2, 1], workspace = 0, cluster = [1, 2, 1], max_blocks = 1,
    fits_blocks} {
  %c0 = arith.constant 0 : i32
  %x = lowbit.alloc_shared : !x_buffer
  // CHECK: lowbit.barrier {async_proxy, scope = "warps", warps = 4}
  lowbit.barrier {scope = "warps", warps = 4, async_proxy}
  %a = lowbit.constant {value = 1.0 : f32} : !a
  %zero = lowbit.constant {value = 0.0 : f32} : !d
  // CHECK: lowbit.warpgroup_mma %{{.*}}, %{{.*}}, %{{.*}} {start = 0}
  %d = lowbit.warpgroup_mma %a, %x, %zero {start = 0} : !a, !x_buffer, !d -> !d
  // CHECK: lowbit.warpgroup_row_sums %{{.*}} {columns = 32, start = 16}
  %sums = lowbit.warpgroup_row_sums %x {start = 16, columns = 32} : !x_buffer -> !sums
  %partial = lowbit.alloc_shared : !partial
  lowbit.store %d, %partial[%c0, %c0] : !d, !partial
  // CHECK: lowbit.barrier {scope = "cluster"}
  lowbit.barrier {scope = "cluster"}
  // CHECK: %[[PEER:.*]] = lowbit.peer %
  // CHECK-NEXT: lowbit.load %[[PEER]][
  %rank = lowbit.block_id {axis = 1}
  %peer = lowbit.peer %partial, %rank : !partial
  %theirs = lowbit.load %peer[%c0, %c0] : !partial -> !d
  lowbit.barrier {scope = "cluster"}
  lowbit.return
}

// -----

// What is left of a format where tiles are gone: two codes of 6 bits, in a piece of 4 bits and one of 2.
// CHECK-LABEL: func.func @registers
func.func @registers(%low: i32, %high: i32) -> vector<2xf16> {
  // CHECK: lowbit.decode_pair %{{.*}}, %{{.*}} {exponent = 0, format = #lowbit.format<"u6", []>, {{.*}}register = 6
  %0 = lowbit.decode_pair %low, %high {format = #lowbit.format<"u6", []>, register = 6, exponent = 0} : vector<2xf16>
  return %0 : vector<2xf16>
}

// A shift of an integer, twice, before the words.
// CHECK-LABEL: func.func @register_shift
func.func @register_shift(%shift: vector<2xf16>, %word: i32) -> vector<2xf16> {
  // CHECK: lowbit.decode_shifted_pair %{{.*}}, %{{.*}} {exponent = 0, format = #lowbit.format<"i4", []>, {{.*}}register = 2
  %0 = lowbit.decode_shifted_pair %shift, %word {format = #lowbit.format<"i4", []>, register = 2, exponent = 0} : vector<2xf16>
  return %0 : vector<2xf16>
}

// CHECK-LABEL: func.func @register_lookup
func.func @register_lookup(%table: !llvm.ptr<3>, %column: i32, %word: i32) -> vector<2xbf16> {
  // CHECK: lowbit.lookup_pair %{{.*}}, %{{.*}}, %{{.*}} {format = #lowbit.format<"nf4", []>, {{.*}}register = 2
  %0 = lowbit.lookup_pair %table, %column, %word {format = #lowbit.format<"nf4", []>, register = 2}
      : !llvm.ptr<3> -> vector<2xbf16>
  return %0 : vector<2xbf16>
}

// -----

// A table of values in shared memory: an entry per pair of codes of up to 4 bits, a column per lane.
!codes = !lowbit.reg<[16, 64], #lowbit.format<"nf4", []>, "local(1, 4).column_local(2, 2).spatial(8, 4).local(1, 2)">
!numbers = !lowbit.reg<[16, 64], f16, "local(1, 4).column_local(2, 2).spatial(8, 4).local(1, 2)">
!table = !lowbit.shared<[256, 32], i32, [32, 1], 0>
// CHECK-LABEL: func.func @tables
func.func @tables(%codes: !codes, %table: !table) -> !numbers {
  // CHECK: lowbit.fill_table %{{.*}} {element = "f16", exponent = 0, format = #lowbit.format<"nf4", []>}
  lowbit.fill_table %table {format = #lowbit.format<"nf4", []>, element = "f16", exponent = 0} : !table
  // CHECK: lowbit.lookup %
  %numbers = lowbit.lookup %codes, %table : !codes, !table -> !numbers
  return %numbers : !numbers
}
