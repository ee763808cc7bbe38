// RUN: %lowbit-opt %s --split-input-file --lower-tiles=target=sm_90a --canonicalize --cse | %filecheck %s

// What Hopper has: clusters of blocks, and instructions of whole warpgroups that read shared memory by themselves.

!sums = !lowbit.shared<[128], f32, [1], 0>
!tile = !lowbit.reg<[128], f32, "spatial(128)">
!y = !lowbit.global<[128], f32, [1], [1]>

// CHECK-LABEL: gpu.func @cluster
// CHECK-SAME:    nvvm.cluster_dim = array<i32: 1, 3, 1>
// CHECK:         %[[MINE:.*]] = llvm.mlir.addressof @shared_memory : !llvm.ptr<3>
// CHECK:         %[[THREAD:.*]] = arith.index_cast
// CHECK-DAG:     %[[PAIR:.*]] = arith.divui %[[THREAD]], %c64_i32
// CHECK-DAG:     %[[OFFSET:.*]] = arith.muli %[[THREAD]], %c4_i32
// CHECK:         llvm.store %{{.*}}, %{{.*}} : f32, !llvm.ptr<3>

// Two warps of four meet at a barrier of their own, 1 or 2: number 0 is the block's. All four are the block.
// CHECK-NEXT:    %[[NUMBER:.*]] = arith.addi %[[PAIR]], %c1_i32
// CHECK-NEXT:    nvvm.barrier id = %[[NUMBER]] number_of_threads = %c64_i32
// CHECK-NEXT:    gpu.barrier
// CHECK-NEXT:    nvvm.cluster.arrive {aligned}
// CHECK-NEXT:    nvvm.cluster.wait {aligned}

// The same offset from where the next block of the cluster has what this one has at its base.
// CHECK:         %[[RANK:.*]] = arith.remui %{{.*}}, %c3_i32
// CHECK-NEXT:    %[[THEIRS:.*]] = nvvm.mapa %[[MINE]], %[[RANK]] : !llvm.ptr<3> -> !llvm.ptr<7>
// CHECK-NEXT:    %[[ADDRESS:.*]] = llvm.getelementptr %[[THEIRS]][%[[OFFSET]]]
// CHECK-NEXT:    %[[LOADED:.*]] = llvm.load %[[ADDRESS]] {alignment = 4 : i64} : !llvm.ptr<7> -> f32
// The load is done before this block tells the others that they may go.
// CHECK-NEXT:    nvvm.cluster.arrive {aligned}
// CHECK-NEXT:    nvvm.cluster.wait {aligned}
// CHECK:         llvm.store %[[LOADED]], %{{.*}} !llvm.ptr<1>
lowbit.program @cluster(%py: !llvm.ptr<1>) attributes {threads = 128, grid = [4, 3, 1], params = ["y"], workspace = 0,
    cluster = [1, 3, 1]} {
  %c0 = arith.constant 0 : i32
  %c1 = arith.constant 1 : i32
  %c3 = arith.constant 3 : i32
  %y = lowbit.global_view %py : !llvm.ptr<1> -> !y
  %mine = lowbit.alloc_shared : !sums
  %one = lowbit.constant {value = 1.0 : f32} : !tile
  lowbit.store %one, %mine[%c0] : !tile, !sums
  lowbit.barrier {scope = "warps", warps = 2}
  lowbit.barrier {scope = "warps", warps = 4}
  lowbit.barrier {scope = "cluster"}
  %rank = lowbit.block_id {axis = 1}
  %next = arith.addi %rank, %c1 : i32
  %peer = arith.remui %next, %c3 : i32
  %theirs = lowbit.peer %mine, %peer : !sums
  %loaded = lowbit.load %theirs[%c0] : !sums -> !tile
  lowbit.barrier {scope = "cluster"}
  lowbit.store %loaded, %y[%c0] : !tile, !y
  lowbit.return
}

// -----

// Swizzled rows: bits 4 to 6 of the byte offset, the number of a 16-byte piece in its row of 128 bytes, are xored with
// bits 7 to 9, the row's number modulo eight. Buffers start at whole periods of it: 1024 bytes.
!x = !lowbit.global<[16, 64], f16, [64, 1], [1, 1]>
!x_buffer = !lowbit.shared<[16, 64], f16, [64, 1], 128>
// CHECK-LABEL: gpu.func @swizzle
// CHECK-SAME:    lowbit.shared_bytes = 3072 : i64
// CHECK:         %[[SHARED:.*]] = llvm.mlir.addressof
// CHECK-DAG:     %[[ROW:.*]] = arith.divui %[[THREAD:.*]], %c8_i32
// CHECK-DAG:     %[[PIECE:.*]] = arith.remui %[[THREAD]], %c8_i32
// CHECK:         %[[BASE:.*]] = llvm.getelementptr %[[SHARED]][1024]
// CHECK-DAG:     %[[ROW_BYTES:.*]] = arith.muli %[[ROW]], %c128_i32
// CHECK-DAG:     %[[PIECE_BYTES:.*]] = arith.muli %[[PIECE]], %c16_i32
// CHECK:         %[[BYTES:.*]] = arith.addi %[[ROW_BYTES]], %[[PIECE_BYTES]]
// CHECK-NEXT:    %[[SHIFTED:.*]] = arith.shrui %[[BYTES]], %c3_i32
// CHECK-NEXT:    %[[MASKED:.*]] = arith.andi %[[SHIFTED]], %c112_i32
// CHECK-NEXT:    %[[SWIZZLED:.*]] = arith.xori %[[BYTES]], %[[MASKED]]
// CHECK-NEXT:    %[[TO:.*]] = llvm.getelementptr %[[BASE]][%[[SWIZZLED]]]
// CHECK:         nvvm.cp.async.shared.global %[[TO]], %{{.*}}, 16
// Eight rows on, the permutation is the same: a constant 1024 bytes.
// CHECK-NOT:     arith.xori
// CHECK:         %[[TO_8:.*]] = llvm.getelementptr %[[TO]][1024]
// CHECK:         nvvm.cp.async.shared.global %[[TO_8]], %{{.*}}, 16
lowbit.program @swizzle(%px: !llvm.ptr<1>) attributes {threads = 64, grid = [1, 1, 1], params = ["x"], workspace = 0} {
  %c0 = arith.constant 0 : i32
  %x = lowbit.global_view %px : !llvm.ptr<1> -> !x
  %small = lowbit.alloc_shared : !lowbit.shared<[32], f32, [1], 0>
  %x_buffer = lowbit.alloc_shared : !x_buffer
  lowbit.copy_async %x[%c0, %c0], %x_buffer {layout = "local(2, 1).spatial(8, 8).local(1, 8)"} : !x, !x_buffer
  lowbit.return
}

// -----

// wgmma. Its accumulators are registers that LLVM never sees, declared at the head of the kernel.
!x_buffer = !lowbit.shared<[2, 1, 8, 64], f16, [512, 512, 64, 1], 128>
!codes = !lowbit.global<[8, 32], vector<4xi32>, [32, 1], [1, 1]>
!units = !lowbit.reg<[8, 32], vector<4xi32>, "spatial(8, 32)">
!units3 = !lowbit.reg<[2, 4, 32], vector<4xi32>, "spatial(2, 4, 32)">
!a_codes = !lowbit.reg<[2, 64, 64], #lowbit.format<"u4", []>, "spatial(2, 4, 1).column_local(1, 2, 8).spatial(1, 8, 4).local(1, 1, 2)">
!a = !lowbit.reg<[2, 64, 64], f16, "spatial(2, 4, 1).column_local(1, 2, 8).spatial(1, 8, 4).local(1, 1, 2)">
!d = !lowbit.reg<[2, 64, 8], f32, "spatial(2, 4, 1).local(1, 2, 1).spatial(1, 8, 4).local(1, 1, 2)">
!sums = !lowbit.reg<[2, 1, 8], f32, "spatial(2, 1, 1).replicated(32).spatial(1, 1, 4).local(1, 1, 2)">
// CHECK-LABEL: gpu.func @warpgroups
// CHECK:         %[[SHARED:.*]] = llvm.mlir.addressof
// CHECK:         llvm.inline_asm has_side_effects {{.*}}".reg .f32 wgmma_sum<4096>;"

// What was written to shared memory is shown to the asynchronous proxy, by those who wrote it, before the barrier. Each
// of the two warpgroups has its own.
// CHECK:         nvvm.fence.proxy {kind = #nvvm.proxy_kind<async.shared>, space = #nvvm.shared_space<cta>}
// CHECK:         nvvm.barrier id = %{{.*}} number_of_threads = %c128_i32

// A descriptor starts with the address / 16 of a warpgroup's own x; the upper word is that of swizzled rows.
// CHECK:         %[[X:.*]] = llvm.ptrtoint %[[SHARED]]
// CHECK:         %[[ADDRESS:.*]] = arith.addi %[[X]], %{{.*}}
// CHECK:         %[[UNITS:.*]] = arith.shrui %[[ADDRESS]], %c4_i32
// CHECK-NEXT:    %[[LOWER:.*]] = arith.andi %[[UNITS]], %c16383_i32

// Four fragments of a, then four instructions. A sum from zero starts with one that does not add, $16 != $16; 16 columns
// are 32 bytes, 2 units of the descriptor.
// CHECK-COUNT-16: lowbit.decode_pair
// CHECK:         llvm.inline_asm has_side_effects {{.*}}wgmma.fence.sync.aligned;
// CHECK-SAME:      mov.b64 at, {$16, 1073741888};
// CHECK-SAME:      add.s64 at, at, 0;
// CHECK-SAME:      setp.ne.b32 add, $16, $16;
// CHECK-SAME:      wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {wgmma_sum0, wgmma_sum1, wgmma_sum2, wgmma_sum3}, {$0, $1, $2, $3}, at, add, 1, 1, 0;
// CHECK-SAME:      add.s64 at, at, 2;
// CHECK-SAME:      setp.eq.b32 add, $16, $16;
// CHECK-SAME:      {$4, $5, $6, $7}, at, add, 1, 1, 0;
// CHECK-SAME:      add.s64 at, at, 6;
// CHECK-SAME:      {$12, $13, $14, $15}, at, add, 1, 1, 0;
// CHECK-SAME:      "r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,~{memory}" {{.*}}, %[[LOWER]] :

// Another product on top of it: the accumulators stay where they are, all instructions add, and one wait is for both.
// CHECK-NOT:     wgmma_sum
// CHECK:         llvm.inline_asm has_side_effects {{.*}}wgmma.fence.sync.aligned;
// CHECK-SAME:      add.s64 at, at, 0;
// CHECK-SAME:      setp.eq.b32 add, $16, $16;
// CHECK-SAME:      {$12, $13, $14, $15}, at, add, 1, 1, 0;
// CHECK-SAME:      %[[LOWER]] :
// CHECK-NEXT:    %[[SUMS:.*]] = llvm.inline_asm has_side_effects {{.*}}"wgmma.commit_group.sync.aligned;
// CHECK-SAME:      wgmma.wait_group.sync.aligned 0;
// CHECK-SAME:      mov.f32 $3, wgmma_sum3;
// CHECK-NEXT:    llvm.extractvalue %[[SUMS]][0]

// Sums of x over columns 16 to 47: two instructions with a fragment of ones, in accumulators of their own.
// CHECK:         %[[ONES:.*]] = llvm.inline_asm has_side_effects {{.*}}"mov.b32 $0, 1006648320;
// CHECK-SAME:      mov.b32 $3, 1006648320;
// CHECK:         %[[ONE:.*]] = llvm.extractvalue %[[ONES]][3]
// CHECK:         llvm.inline_asm has_side_effects {{.*}}add.s64 at, at, 2;
// CHECK-SAME:      setp.ne.b32 add, $8, $8;
// CHECK-SAME:      {wgmma_sum2048, wgmma_sum2049, wgmma_sum2050, wgmma_sum2051}, {$0, $1, $2, $3}
// CHECK-SAME:      add.s64 at, at, 4;
// CHECK-SAME:      wgmma.commit_group.sync.aligned;
// CHECK-SAME:      %[[ONE]],
// CHECK:         llvm.inline_asm has_side_effects {{.*}}"wgmma.wait_group.sync.aligned 0;
// CHECK-SAME:      mov.f32 $0, wgmma_sum2048;
lowbit.program @warpgroups(%pw: !llvm.ptr<1>, %py: !llvm.ptr<1>) attributes {threads = 256, grid = [1, 1, 1], params = ["w", "y"],
    workspace = 0} {
  %c0 = arith.constant 0 : i32
  %codes = lowbit.global_view %pw : !llvm.ptr<1> -> !codes
  %y = lowbit.global_view %py : !llvm.ptr<1> -> !lowbit.global<[2, 64, 8], f32, [512, 1, 64], [1, 1, 1]>
  %x = lowbit.alloc_shared : !x_buffer
  lowbit.barrier {scope = "warps", warps = 4, async_proxy}
  %words = lowbit.load %codes[%c0, %c0] : !codes -> !units
  %units = lowbit.reshape %words : !units -> !units3
  %a_codes = lowbit.view %units : !units3 -> !a_codes
  %a = lowbit.decode %a_codes {exponent = 0} : !a_codes -> !a
  %zero = lowbit.constant {value = 0.0 : f32} : !d
  %d = lowbit.warpgroup_mma %a, %x, %zero {start = 0} : !a, !x_buffer, !d -> !d
  %twice = lowbit.warpgroup_mma %a, %x, %d {start = 0} : !a, !x_buffer, !d -> !d
  %sums = lowbit.warpgroup_row_sums %x {start = 16, columns = 32} : !x_buffer -> !sums
  %total = lowbit.add %twice, %sums : !d, !sums -> !d
  lowbit.store %total, %y[%c0, %c0, %c0] : !d, !lowbit.global<[2, 64, 8], f32, [512, 1, 64], [1, 1, 1]>
  lowbit.return
}

// -----

// Sums of x are under way while the fragments of the product behind them are decoded, and its wait is for them, too.
!x_buffer = !lowbit.shared<[1, 1, 8, 64], f16, [512, 512, 64, 1], 128>
!codes = !lowbit.global<[4, 32], vector<4xi32>, [32, 1], [1, 1]>
!units = !lowbit.reg<[4, 32], vector<4xi32>, "spatial(4, 1).spatial(1, 32)">
!units3 = !lowbit.reg<[1, 4, 32], vector<4xi32>, "spatial(1, 4, 32)">
!a_codes = !lowbit.reg<[1, 64, 64], #lowbit.format<"u4", []>, "spatial(1, 4, 1).column_local(1, 2, 8).spatial(1, 8, 4).local(1, 1, 2)">
!a = !lowbit.reg<[1, 64, 64], f16, "spatial(1, 4, 1).column_local(1, 2, 8).spatial(1, 8, 4).local(1, 1, 2)">
!d = !lowbit.reg<[1, 64, 8], f32, "spatial(1, 4, 1).local(1, 2, 1).spatial(1, 8, 4).local(1, 1, 2)">
!sums = !lowbit.reg<[1, 1, 8], f32, "replicated(32, rank=3).spatial(1, 1, 4).local(1, 1, 2)">
// CHECK-LABEL: gpu.func @sums_first
// CHECK:         wgmma_sum2048
// CHECK-COUNT-16: lowbit.decode_pair
// CHECK:         wgmma.mma_async{{.*}}wgmma_sum0
// CHECK:         wgmma.wait_group.sync.aligned 0;
// CHECK-NOT:     wait_group
// CHECK:         "mov.f32 $0, wgmma_sum2048;
// CHECK-NOT:     wait_group
lowbit.program @sums_first(%pw: !llvm.ptr<1>, %py: !llvm.ptr<1>) attributes {threads = 128, grid = [1, 1, 1], params = ["w", "y"],
    workspace = 0} {
  %c0 = arith.constant 0 : i32
  %codes = lowbit.global_view %pw : !llvm.ptr<1> -> !codes
  %y = lowbit.global_view %py : !llvm.ptr<1> -> !lowbit.global<[1, 64, 8], f32, [512, 1, 64], [1, 1, 1]>
  %x = lowbit.alloc_shared : !x_buffer
  %words = lowbit.load %codes[%c0, %c0] : !codes -> !units
  %units = lowbit.reshape %words : !units -> !units3
  %a_codes = lowbit.view %units : !units3 -> !a_codes
  %a = lowbit.decode %a_codes {exponent = 0} : !a_codes -> !a
  %zero = lowbit.constant {value = 0.0 : f32} : !d
  %sums = lowbit.warpgroup_row_sums %x {start = 0, columns = 64} : !x_buffer -> !sums
  %d = lowbit.warpgroup_mma %a, %x, %zero {start = 0} : !a, !x_buffer, !d -> !d
  %total = lowbit.add %d, %sums : !d, !sums -> !d
  lowbit.store %total, %y[%c0, %c0, %c0] : !d, !lowbit.global<[1, 64, 8], f32, [512, 1, 64], [1, 1, 1]>
  lowbit.return
}

// -----

// Products that overlap: each group of instructions is committed, and a product is waited for when the first instructions of
// the next are under way, whose accumulators are others.
!x_buffer = !lowbit.shared<[1, 2, 8, 64], f16, [1024, 512, 64, 1], 128>
!codes = !lowbit.global<[4, 64], vector<4xi32>, [64, 1], [1, 1]>
!units = !lowbit.reg<[4, 64], vector<4xi32>, "spatial(4, 1).local(1, 2).spatial(1, 32)">
!units3 = !lowbit.reg<[1, 4, 64], vector<4xi32>, "spatial(1, 4, 1).local(1, 1, 2).spatial(1, 1, 32)">
!a_codes = !lowbit.reg<[1, 64, 128], #lowbit.format<"u4", []>, "spatial(1, 4, 1).local(1, 1, 8).column_local(1, 2, 2).spatial(1, 8, 4).local(1, 1, 2)">
!a = !lowbit.reg<[1, 64, 128], f16, "spatial(1, 4, 1).local(1, 1, 8).column_local(1, 2, 2).spatial(1, 8, 4).local(1, 1, 2)">
!half = !lowbit.reg<[1, 64, 64], f16, "spatial(1, 4, 1).local(1, 1, 4).column_local(1, 2, 2).spatial(1, 8, 4).local(1, 1, 2)">
!d = !lowbit.reg<[1, 64, 8], f32, "spatial(1, 4, 1).local(1, 2, 1).spatial(1, 8, 4).local(1, 1, 2)">
// CHECK-LABEL: gpu.func @overlap
// CHECK:         llvm.inline_asm has_side_effects {{.*}}wgmma.mma_async{{.*}}{wgmma_sum4, wgmma_sum5, wgmma_sum6, wgmma_sum7}
// CHECK-SAME:      wgmma.commit_group.sync.aligned;
// CHECK-NOT:     wait_group
// CHECK-COUNT-16: lowbit.decode_pair
// CHECK:         llvm.inline_asm has_side_effects {{.*}}wgmma.mma_async{{.*}}{wgmma_sum0, wgmma_sum1, wgmma_sum2, wgmma_sum3}
// CHECK-SAME:      wgmma.commit_group.sync.aligned;
// CHECK-NEXT:    llvm.inline_asm has_side_effects {{.*}}"wgmma.wait_group.sync.aligned 1;"
// CHECK-NEXT:    llvm.inline_asm has_side_effects {{.*}}"mov.f32 $0, wgmma_sum4;
// CHECK:         arith.addf
// CHECK:         llvm.inline_asm has_side_effects {{.*}}"wgmma.wait_group.sync.aligned 0;
// CHECK-SAME:      mov.f32 $0, wgmma_sum0;
lowbit.program @overlap(%pw: !llvm.ptr<1>, %py: !llvm.ptr<1>) attributes {threads = 128, grid = [1, 1, 1], params = ["w", "y"],
    workspace = 0} {
  %c0 = arith.constant 0 : i32
  %codes = lowbit.global_view %pw : !llvm.ptr<1> -> !codes
  %y = lowbit.global_view %py : !llvm.ptr<1> -> !lowbit.global<[1, 64, 8], f32, [512, 1, 64], [1, 1, 1]>
  %x = lowbit.alloc_shared : !x_buffer
  %words = lowbit.load %codes[%c0, %c0] : !codes -> !units
  %units = lowbit.reshape %words : !units -> !units3
  %a_codes = lowbit.view %units : !units3 -> !a_codes
  %a = lowbit.decode %a_codes {exponent = 0} : !a_codes -> !a
  %zero = lowbit.constant {value = 0.0 : f32} : !d
  %one = lowbit.constant {value = 1.0 : f32} : !d
  %a0 = lowbit.slice %a {dim = 2, start = 0} : !a -> !half
  %d0 = lowbit.warpgroup_mma %a0, %x, %zero {start = 0, overlap} : !half, !x_buffer, !d -> !d
  %s0 = lowbit.add %d0, %one : !d
  %a1 = lowbit.slice %a {dim = 2, start = 64} : !a -> !half
  %d1 = lowbit.warpgroup_mma %a1, %x, %zero {start = 64, overlap} : !half, !x_buffer, !d -> !d
  %s1 = lowbit.add %s0, %d1 : !d
  lowbit.store %s1, %y[%c0, %c0, %c0] : !d, !lowbit.global<[1, 64, 8], f32, [512, 1, 64], [1, 1, 1]>
  lowbit.return
}

// -----

// Where the kernel before may still run, what is only read is not marked: loads stay coherent, on their side of the wait.
!x = !lowbit.global<[16, 32], f16, [32, 1], [1, 1]>
!tile = !lowbit.reg<[16, 32], f16, "local(2, 1).spatial(8, 4).local(1, 8)">
// CHECK-LABEL: gpu.func @after
// CHECK-SAME:    (%{{.*}}: !llvm.ptr<1> {llvm.align = 16 : i64},
// CHECK-SAME:     %{{.*}}: !llvm.ptr<1> {llvm.align = 16 : i64, llvm.noalias}) kernel
lowbit.program @after(%px: !llvm.ptr<1>, %py: !llvm.ptr<1>) attributes {threads = 32, grid = [1, 1, 1], params = ["x", "y"],
    workspace = 0} {
  %c0 = arith.constant 0 : i32
  %x = lowbit.global_view %px : !llvm.ptr<1> -> !x
  %y = lowbit.global_view %py : !llvm.ptr<1> -> !x
  lowbit.grid_wait
  %tile = lowbit.load %x[%c0, %c0] : !x -> !tile
  lowbit.store %tile, %y[%c0, %c0] : !tile, !x
  lowbit.return
}
