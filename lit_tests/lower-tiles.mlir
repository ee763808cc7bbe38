// RUN: %lowbit-opt %s --split-input-file --lower-tiles --canonicalize --cse | %filecheck %s

// A program becomes a gpu.func of one thread.

!x = !lowbit.global<[-1, 32], f16, [32, 1], [1, 1]>
!tile = !lowbit.reg<[16, 32], f16, "local(2, 1).spatial(8, 4).local(1, 8)">

// No two pointers alias, and what is only read is marked: that makes non-coherent loads of it.
// CHECK-LABEL: gpu.func @copy
// CHECK-SAME:    (%[[X:.*]]: !llvm.ptr<1> {llvm.align = 16 : i64, llvm.noalias, llvm.readonly},
// CHECK-SAME:     %[[Y:.*]]: !llvm.ptr<1> {llvm.align = 16 : i64, llvm.noalias}, %[[M:.*]]: i32) kernel
// CHECK-SAME:    lowbit.shared_bytes = 0 : i64
// CHECK-SAME:    nvvm.reqntid = array<i32: 32, 1, 1>

// The row of a thread: 16 * block + thread / 4; its eight columns start at 8 * (thread % 4).
// CHECK:         %[[INDEX:.*]] = gpu.thread_id x
// CHECK:         %[[THREAD:.*]] = arith.index_cast %[[INDEX]]
// CHECK-DAG:     %[[LANE_ROW:.*]] = arith.divui %[[THREAD]], %c4_i32
// CHECK-DAG:     %[[LANE_COLUMN:.*]] = arith.remui %[[THREAD]], %c4_i32
// CHECK:         %[[BLOCK_ROW:.*]] = arith.muli %{{.*}}, %c16_i32
// CHECK:         %[[ROW:.*]] = arith.addi %[[BLOCK_ROW]], %[[LANE_ROW]]

// "zero" asks whether the row is inside; eight f16 in a row are one load of 16 bytes.
// CHECK:         %[[INSIDE:.*]] = arith.cmpi slt, %[[ROW]], %[[M]]
// CHECK:         %[[ROW_BYTES:.*]] = arith.muli %{{.*}}, %c64_i64
// CHECK:         llvm.getelementptr %[[X]][%[[ROW_BYTES]]]
// CHECK:         %[[ADDRESS:.*]] = llvm.getelementptr
// CHECK-NEXT:    scf.if %[[INSIDE]] -> (vector<8xf16>) {
// CHECK-NEXT:      llvm.load %[[ADDRESS]] {alignment = 16 : i64} : !llvm.ptr<1> -> vector<8xf16>

// The second half of the tile is 8 rows below, a constant 512 bytes away.
// CHECK:         %[[ROW_8:.*]] = arith.addi %[[ROW]], %c8_i32
// CHECK:         %[[INSIDE_8:.*]] = arith.cmpi slt, %[[ROW_8]], %[[M]]
// CHECK:         llvm.getelementptr %[[ADDRESS]][512]

// "skip" leaves out the store.
// CHECK:         scf.if %[[INSIDE]] {
// CHECK-NEXT:      llvm.store %{{.*}} {alignment = 16 : i64} : vector<8xf16>
// CHECK:         scf.if %[[INSIDE_8]] {
// CHECK-NEXT:      llvm.store
lowbit.program @copy(%px: !llvm.ptr<1>, %py: !llvm.ptr<1>, %m: i32) attributes {threads = 32, grid = [4, 1, 1], params = ["x",
    "y", "m"], workspace = 0} {
  %c0 = arith.constant 0 : i32
  %c16 = arith.constant 16 : i32
  %block = lowbit.block_id {axis = 0}
  %row = arith.muli %block, %c16 : i32
  %x = lowbit.global_view %px, %m : !llvm.ptr<1> -> !x
  %y = lowbit.global_view %py, %m : !llvm.ptr<1> -> !x
  %tile = lowbit.load %x[%row zero, %c0] : !x -> !tile
  lowbit.store %tile, %y[%row skip, %c0] : !tile, !x
  lowbit.return
}

// -----

// "clamp" takes the last element instead, and a divisor lets several indices share one: index arithmetic.
!x = !lowbit.global<[-1, 4], f32, [4, 1], [2, 1]>
!y = !lowbit.global<[8, 4], f32, [4, 1], [1, 1]>
!tile = !lowbit.reg<[8, 4], f32, "spatial(8, 4)">
// CHECK-LABEL: gpu.func @clamp
// CHECK-SAME:    %[[M:[^:]*]]: i32) kernel
// CHECK:         %[[ROW:.*]] = arith.divui %{{.*}}, %c4_i32
// CHECK:         %[[LAST:.*]] = arith.subi %[[M]], %c1_i32
// CHECK-NEXT:    %[[CLAMPED:.*]] = arith.minsi %[[ROW]], %[[LAST]]
// CHECK-NEXT:    %[[SHARED:.*]] = arith.divui %[[CLAMPED]], %c2_i32
// CHECK-NEXT:    arith.extui %[[SHARED]] : i32 to i64
// CHECK-NOT:     scf.if
lowbit.program @clamp(%px: !llvm.ptr<1>, %py: !llvm.ptr<1>, %m: i32) attributes {threads = 32, grid = [1, 1, 1], params = ["x",
    "y", "m"], workspace = 0} {
  %c0 = arith.constant 0 : i32
  %x = lowbit.global_view %px, %m : !llvm.ptr<1> -> !x
  %y = lowbit.global_view %py : !llvm.ptr<1> -> !y
  %tile = lowbit.load %x[%c0 clamp, %c0] : !x -> !tile
  lowbit.store %tile, %y[%c0, %c0] : !tile, !y
  lowbit.return
}

// -----

// Of the threads that hold an element, the first stores it: here thread 0 of every eight.
!y = !lowbit.global<[1, 4], f32, [4, 1], [1, 1]>
// CHECK-LABEL: gpu.func @replicas
// CHECK:         %[[COPY:.*]] = arith.remui %{{.*}}, %c8_i32
// CHECK:         %[[FIRST:.*]] = arith.cmpi eq, %[[COPY]], %c0_i32
// CHECK:         scf.if %[[FIRST]] {
// CHECK-NEXT:      llvm.store
lowbit.program @replicas(%py: !llvm.ptr<1>) attributes {threads = 32, grid = [1, 1, 1], params = ["y"], workspace = 0} {
  %c0 = arith.constant 0 : i32
  %y = lowbit.global_view %py : !llvm.ptr<1> -> !y
  %tile = lowbit.constant {value = 1.0 : f32} : !lowbit.reg<[1, 4], f32, "spatial(1, 4).replicated(8)">
  lowbit.store %tile, %y[%c0, %c0] : !lowbit.reg<[1, 4], f32, "spatial(1, 4).replicated(8)">, !y
  lowbit.return
}

// -----

// Asynchronous copies. 16 bytes bypass L1 (cg); an element that is to read as zero copies 0 of 16 bytes, one that is
// to be skipped is not copied.
!x = !lowbit.global<[-1, 64], f16, [64, 1], [1, 1]>
!scale = !lowbit.global<[-1], f32, [1], [1]>
!x_buffer = !lowbit.shared<[4, 64], f16, [72, 1], 0>
!scale_buffer = !lowbit.shared<[32], f32, [1], 0>
// CHECK-LABEL: gpu.func @copies
// CHECK-SAME:    %[[M:[^:]*]]: i32) kernel
// CHECK-SAME:    lowbit.shared_bytes = 768 : i64
// The second buffer starts at the next multiple of 128 bytes.
// CHECK:         llvm.getelementptr %{{.*}}[640] : (!llvm.ptr<3>)
// CHECK:         %[[INSIDE:.*]] = arith.cmpi slt, %{{.*}}, %[[M]]
// CHECK-NEXT:    %[[SIZE:.*]] = arith.select %[[INSIDE]], %c16_i32, %c0_i32
// CHECK:         nvvm.cp.async.shared.global %{{.*}}, %{{.*}}, 16, cache = cg, %[[SIZE]] : !llvm.ptr<3>, !llvm.ptr<1>, i32

// 4 bytes go through L1 (ca).
// CHECK:         scf.if
// CHECK-NEXT:      nvvm.cp.async.shared.global %{{.*}}, %{{.*}}, 4, cache = ca : !llvm.ptr<3>, !llvm.ptr<1>
// CHECK:         nvvm.cp.async.commit.group
// CHECK-NEXT:    nvvm.cp.async.wait.group 0
// CHECK-NEXT:    nvvm.bar.warp.sync
// CHECK-NEXT:    gpu.barrier
lowbit.program @copies(%px: !llvm.ptr<1>, %ps: !llvm.ptr<1>, %m: i32) attributes {threads = 32, grid = [1, 1, 1], params = ["x",
    "scale", "m"], workspace = 0} {
  %c0 = arith.constant 0 : i32
  %x = lowbit.global_view %px, %m : !llvm.ptr<1> -> !x
  %scale = lowbit.global_view %ps, %m : !llvm.ptr<1> -> !scale
  %x_buffer = lowbit.alloc_shared : !x_buffer
  %scale_buffer = lowbit.alloc_shared : !scale_buffer
  lowbit.copy_async %x[%c0 zero, %c0], %x_buffer {layout = "spatial(4, 8).local(1, 8)"} : !x, !x_buffer
  lowbit.copy_async %scale[%c0 skip], %scale_buffer {layout = "spatial(32)"} : !scale, !scale_buffer
  lowbit.commit
  lowbit.wait {pending = 0}
  lowbit.barrier {scope = "warps"}
  lowbit.barrier {scope = "block"}
  lowbit.return
}

// -----

// A loop carries the registers of its tiles, and is not unrolled. A freed buffer's place is taken by the next one.
!d = !lowbit.reg<[16, 8], f32, "local(2, 1).spatial(8, 4).local(1, 2)">
!buffer = !lowbit.shared<[16, 8], f32, [8, 1], 0>
// CHECK:       #loop_unroll = #llvm.loop_unroll<disable = true>
// CHECK-LABEL: gpu.func @loop
// CHECK-SAME:    lowbit.shared_bytes = 512 : i64
// CHECK:         scf.for {{.*}} iter_args(%{{.*}} = %{{.*}}, %{{.*}} = %{{.*}}, %{{.*}} = %{{.*}}, %{{.*}} = %{{.*}}) -> (f32, f32, f32, f32)
// CHECK-COUNT-4:   arith.addf
// CHECK:           scf.yield
// CHECK-NEXT:    } {loop_annotation = #loop_annotation}
lowbit.program @loop(%n: i32) attributes {threads = 32, grid = [1, 1, 1], workspace = 0} {
  %c0 = arith.constant 0 : i32
  %c1 = arith.constant 1 : i32
  %zero = lowbit.constant {value = 0.0 : f32} : !d
  %one = lowbit.constant {value = 1.0 : f32} : !d
  %sum = scf.for %i = %c0 to %n step %c1 iter_args(%old = %zero) -> !d : i32 {
    %new = lowbit.add %old, %one : !d
    scf.yield %new : !d
  }
  %first = lowbit.alloc_shared : !buffer
  lowbit.store %sum, %first[%c0, %c0] : !d, !buffer
  lowbit.barrier {scope = "block"}
  lowbit.free_shared %first : !buffer
  %second = lowbit.alloc_shared : !buffer
  lowbit.store %one, %second[%c0, %c0] : !d, !buffer
  lowbit.return
}

// -----

// A table in shared memory: 32 lanes of 256 pairs are 2048 vectors of 16 bytes. The 128 threads write 16 each, four
// copies of an entry (eight threads share one), once all the entries are on their way from device memory.
!codes = !lowbit.reg<[64, 64], #lowbit.format<"nf4", []>, "spatial(4, 1).local(1, 4).column_local(2, 2).spatial(8, 4).local(1, 2)">
!numbers = !lowbit.reg<[64, 64], bf16, "spatial(4, 1).local(1, 4).column_local(2, 2).spatial(8, 4).local(1, 2)">
!units = !lowbit.reg<[1, 4, 32], vector<4xi32>, "spatial(1, 4, 32)">
!weight = !lowbit.global<[1, 4, 32], vector<4xi32>, [128, 32, 1], [1, 1, 1]>
!out = !lowbit.global<[64, 64], bf16, [64, 1], [1, 1]>
!table = !lowbit.shared<[256, 32], i32, [32, 1], 0>

// CHECK-LABEL: gpu.module @numbers_module
// CHECK:         llvm.mlir.global internal constant @[[ENTRIES:lowbit_table_nf4_bf16_pairs]](
// CHECK:         lowbit.shared_bytes = 32768 : i64
// CHECK:         %[[THREAD:.*]] = arith.index_cast
// CHECK-DAG:     %[[LANE:.*]] = arith.remui %[[THREAD]], %c32_i32
// CHECK-DAG:     %[[ENTRY:.*]] = arith.divui %[[THREAD]], %c8_i32
// CHECK-COUNT-16: llvm.load %{{.*}} invariant {alignment = 4 : i64} : !llvm.ptr<1> -> i32
// CHECK-NOT:     llvm.load
// CHECK-COUNT-16: llvm.store %{{.*}} {alignment = 16 : i64} : vector<4xi32>, !llvm.ptr<3>
// CHECK-NEXT:    gpu.barrier
// CHECK:         %[[COLUMN:.*]] = arith.muli %[[LANE]], %c4_i32
// CHECK:         lowbit.lookup_pair %{{.*}}, %[[COLUMN]], %{{.*}} {{.*}}register = 0} : {{.*}} -> vector<2xbf16>
lowbit.program @numbers(%pw: !llvm.ptr<1>, %py: !llvm.ptr<1>) attributes {threads = 128, grid = [1, 1, 1], params = ["w", "y"],
    workspace = 0} {
  %c0 = arith.constant 0 : i32
  %w = lowbit.global_view %pw : !llvm.ptr<1> -> !weight
  %y = lowbit.global_view %py : !llvm.ptr<1> -> !out
  %table = lowbit.alloc_shared : !table
  lowbit.fill_table %table {format = #lowbit.format<"nf4", []>, element = "bf16", exponent = 0} : !table
  %words = lowbit.load %w[%c0, %c0, %c0] : !weight -> !units
  %codes = lowbit.view %words : !units -> !codes
  %numbers = lowbit.lookup %codes, %table : !codes, !table -> !numbers
  lowbit.store %numbers, %y[%c0, %c0] : !numbers, !out
  lowbit.return
}

// -----

// A constant with another value in rows 8 to 15 of a block: that of the second register of a thread.
// CHECK-LABEL: gpu.func @halves
// CHECK-DAG:     %[[UPPER:.*]] = arith.constant 1.000000e+00 : f32
// CHECK-DAG:     %[[LOWER:.*]] = arith.constant 2.000000e+00 : f32
// CHECK:         llvm.store %[[UPPER]]
// CHECK:         llvm.store %[[LOWER]]
!y = !lowbit.global<[16, 4], f32, [4, 1], [1, 1]>
lowbit.program @halves(%p: !llvm.ptr<1>) attributes {threads = 32, grid = [1, 1, 1], params = ["y"], workspace = 0} {
  %c0 = arith.constant 0 : i32
  %y = lowbit.global_view %p : !llvm.ptr<1> -> !y
  %a = lowbit.constant {value = 1.0 : f32, lower = 2.0 : f32} : !lowbit.reg<[16, 4], f32, "local(2, 1).spatial(8, 4)">
  lowbit.store %a, %y[%c0, %c0] : !lowbit.reg<[16, 4], f32, "local(2, 1).spatial(8, 4)">, !y
  lowbit.return
}
