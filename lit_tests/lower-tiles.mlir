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
"lowbit.program"() ({
^bb0(%px: !llvm.ptr<1>, %py: !llvm.ptr<1>, %m: i32):
  %c0 = arith.constant 0 : i32
  %c16 = arith.constant 16 : i32
  %block = "lowbit.block_id"() {axis = 0} : () -> i32
  %row = arith.muli %block, %c16 : i32
  %x = "lowbit.global_view"(%px, %m) {operandSegmentSizes = array<i32: 1, 1>} : (!llvm.ptr<1>, i32) -> !x
  %y = "lowbit.global_view"(%py, %m) {operandSegmentSizes = array<i32: 1, 1>} : (!llvm.ptr<1>, i32) -> !x
  %tile = "lowbit.load"(%x, %row, %c0) {boundary = ["zero", "none"], operandSegmentSizes = array<i32: 1, 2>}
    : (!x, i32, i32) -> !tile
  "lowbit.store"(%tile, %y, %row, %c0) {boundary = ["skip", "none"], operandSegmentSizes = array<i32: 1, 1, 2>}
    : (!tile, !x, i32, i32) -> ()
  "lowbit.return"() : () -> ()
}) {sym_name = "copy", threads = 32, grid = [4, 1, 1], params = ["x", "y", "m"], workspace = 0} : () -> ()

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
"lowbit.program"() ({
^bb0(%px: !llvm.ptr<1>, %py: !llvm.ptr<1>, %m: i32):
  %c0 = arith.constant 0 : i32
  %x = "lowbit.global_view"(%px, %m) {operandSegmentSizes = array<i32: 1, 1>} : (!llvm.ptr<1>, i32) -> !x
  %y = "lowbit.global_view"(%py) {operandSegmentSizes = array<i32: 1, 0>} : (!llvm.ptr<1>) -> !y
  %tile = "lowbit.load"(%x, %c0, %c0) {boundary = ["clamp", "none"], operandSegmentSizes = array<i32: 1, 2>}
    : (!x, i32, i32) -> !tile
  "lowbit.store"(%tile, %y, %c0, %c0) {boundary = ["none", "none"], operandSegmentSizes = array<i32: 1, 1, 2>}
    : (!tile, !y, i32, i32) -> ()
  "lowbit.return"() : () -> ()
}) {sym_name = "clamp", threads = 32, grid = [1, 1, 1], params = ["x", "y", "m"], workspace = 0} : () -> ()

// -----

// Of the threads that hold an element, the first stores it: here thread 0 of every eight.
!y = !lowbit.global<[1, 4], f32, [4, 1], [1, 1]>
// CHECK-LABEL: gpu.func @replicas
// CHECK:         %[[COPY:.*]] = arith.remui %{{.*}}, %c8_i32
// CHECK:         %[[FIRST:.*]] = arith.cmpi eq, %[[COPY]], %c0_i32
// CHECK:         scf.if %[[FIRST]] {
// CHECK-NEXT:      llvm.store
"lowbit.program"() ({
^bb0(%py: !llvm.ptr<1>):
  %c0 = arith.constant 0 : i32
  %y = "lowbit.global_view"(%py) {operandSegmentSizes = array<i32: 1, 0>} : (!llvm.ptr<1>) -> !y
  %tile = "lowbit.constant"() {value = 1.0 : f32} : () -> !lowbit.reg<[1, 4], f32, "spatial(1, 4).replicated(8)">
  "lowbit.store"(%tile, %y, %c0, %c0) {boundary = ["none", "none"], operandSegmentSizes = array<i32: 1, 1, 2>}
    : (!lowbit.reg<[1, 4], f32, "spatial(1, 4).replicated(8)">, !y, i32, i32) -> ()
  "lowbit.return"() : () -> ()
}) {sym_name = "replicas", threads = 32, grid = [1, 1, 1], params = ["y"], workspace = 0} : () -> ()

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
"lowbit.program"() ({
^bb0(%px: !llvm.ptr<1>, %ps: !llvm.ptr<1>, %m: i32):
  %c0 = arith.constant 0 : i32
  %x = "lowbit.global_view"(%px, %m) {operandSegmentSizes = array<i32: 1, 1>} : (!llvm.ptr<1>, i32) -> !x
  %scale = "lowbit.global_view"(%ps, %m) {operandSegmentSizes = array<i32: 1, 1>} : (!llvm.ptr<1>, i32) -> !scale
  %x_buffer = "lowbit.alloc_shared"() : () -> !x_buffer
  %scale_buffer = "lowbit.alloc_shared"() : () -> !scale_buffer
  "lowbit.copy_async"(%x, %x_buffer, %c0, %c0) {layout = "spatial(4, 8).local(1, 8)", boundary = ["zero", "none"],
    limit = [], operandSegmentSizes = array<i32: 1, 1, 2>} : (!x, !x_buffer, i32, i32) -> ()
  "lowbit.copy_async"(%scale, %scale_buffer, %c0) {layout = "spatial(32)", boundary = ["skip"], limit = [],
    operandSegmentSizes = array<i32: 1, 1, 1>} : (!scale, !scale_buffer, i32) -> ()
  "lowbit.commit"() : () -> ()
  "lowbit.wait"() {pending = 0} : () -> ()
  "lowbit.barrier"() {scope = "warps", warps = 1 : i64} : () -> ()
  "lowbit.barrier"() {scope = "block", warps = 1 : i64} : () -> ()
  "lowbit.return"() : () -> ()
}) {sym_name = "copies", threads = 32, grid = [1, 1, 1], params = ["x", "scale", "m"], workspace = 0} : () -> ()

// -----

// From packed words to the tensor core: two 16-byte loads, a decode_pair per register of A, ldmatrix for B.
!codes = !lowbit.global<[2, 32], vector<4xi32>, [32, 1], [1, 1]>
!x_buffer = !lowbit.shared<[8, 128], f16, [136, 1], 0>
!units = !lowbit.reg<[2, 32], vector<4xi32>, "local(2, 1).spatial(1, 32)">
!a_codes = !lowbit.reg<[16, 128], #lowbit.format<"u4", []>, "local(1, 8).column_local(2, 2).spatial(8, 4).local(1, 2)">
!a = !lowbit.reg<[16, 128], f16, "local(1, 8).column_local(2, 2).spatial(8, 4).local(1, 2)">
!b = !lowbit.reg<[8, 128], f16, "local(1, 16).spatial(8, 4).local(1, 2)">
!d = !lowbit.reg<[16, 8], f32, "local(2, 1).spatial(8, 4).local(1, 2)">
// CHECK-LABEL: gpu.func @tensor_core

// The first mma needs the first four registers of A, which are made right before it. Registers r and r + 1 of a block
// are 4 bits apart in one word.
// CHECK-DAG:     %[[MATRIX_ROW:.*]] = arith.remui %[[LANE:.*]], %c8_i32
// CHECK:         %[[UNIT:.*]] = llvm.load %{{.*}} {alignment = 16 : i64} : !llvm.ptr<1> -> vector<4xi32>
// CHECK:         %[[WORD:.*]] = llvm.extractelement %[[UNIT]][%c0_i32 : i32]
// CHECK:         %[[A0:.*]] = "lowbit.decode_pair"(%[[WORD]]) {{.*}}register = 0 : i64{{.*}} -> vector<2xf16>
// CHECK:         %[[A1:.*]] = "lowbit.decode_pair"(%[[WORD]]) {{.*}}register = 1 : i64
// CHECK:         %[[A2:.*]] = "lowbit.decode_pair"(%[[WORD]]) {{.*}}register = 2 : i64
// CHECK:         %[[A3:.*]] = "lowbit.decode_pair"(%[[WORD]]) {{.*}}register = 3 : i64

// ldmatrix: lane l points at row l % 8, or the last one of %m, of matrix l / 8.
// CHECK:         %[[ROW:.*]] = arith.minsi %[[MATRIX_ROW]], %{{.*}} : i32
// CHECK:         arith.muli %[[ROW]], %c272_i32
// CHECK:         nvvm.ldmatrix %{{.*}} {eltType = #nvvm.ld_st_matrix_elt_type<b16>, layout = #nvvm.mma_layout<row>, num = 4
// CHECK:         nvvm.mma.sync A[%[[A0]], %[[A1]], %[[A2]], %[[A3]]] B[%{{.*}}, %{{.*}}] C[
// CHECK-SAME:      shape = #nvvm.shape<m = 16, n = 8, k = 16>

// Eight mma in all, over 128 columns.
// CHECK-COUNT-7: nvvm.mma.sync
// CHECK-NOT:     nvvm.mma.sync
"lowbit.program"() ({
^bb0(%pw: !llvm.ptr<1>, %py: !llvm.ptr<1>, %m: i32):
  %c0 = arith.constant 0 : i32
  %codes = "lowbit.global_view"(%pw) {operandSegmentSizes = array<i32: 1, 0>} : (!llvm.ptr<1>) -> !codes
  %y = "lowbit.global_view"(%py) {operandSegmentSizes = array<i32: 1, 0>} : (!llvm.ptr<1>) -> !lowbit.global<[16, 8], f32, [8, 1], [1, 1]>
  %x_buffer = "lowbit.alloc_shared"() : () -> !x_buffer
  %units = "lowbit.load"(%codes, %c0, %c0) {boundary = ["none", "none"], operandSegmentSizes = array<i32: 1, 2>}
    : (!codes, i32, i32) -> !units
  %a_codes = "lowbit.view"(%units) : (!units) -> !a_codes
  %a = "lowbit.decode"(%a_codes) {exponent = 0, operandSegmentSizes = array<i32: 1, 0>} : (!a_codes) -> !a
  %b = "lowbit.load_matrix"(%x_buffer, %m) : (!x_buffer, i32) -> !b
  %zero = "lowbit.constant"() {value = 0.0 : f32} : () -> !d
  %d = "lowbit.mma"(%a, %b, %zero) : (!a, !b, !d) -> !d
  "lowbit.store"(%d, %y, %c0, %c0) {boundary = ["none", "none"], operandSegmentSizes = array<i32: 1, 1, 2>}
    : (!d, !lowbit.global<[16, 8], f32, [8, 1], [1, 1]>, i32, i32) -> ()
  "lowbit.return"() : () -> ()
}) {sym_name = "tensor_core", threads = 32, grid = [1, 1, 1], params = ["w", "y", "m"], workspace = 0} : () -> ()

// -----

// A shift per row: rows g and g + 8 of a fragment, for lane group g, are its registers 0 and 2, and 1 and 3. A row's
// shift comes twice in a vector, made once for all columns.
!codes = !lowbit.global<[2, 32], vector<4xi32>, [32, 1], [1, 1]>
!units = !lowbit.reg<[2, 32], vector<4xi32>, "local(2, 1).spatial(1, 32)">
!a_codes = !lowbit.reg<[16, 128], #lowbit.format<"u4", []>, "local(1, 8).column_local(2, 2).spatial(8, 4).local(1, 2)">
!a = !lowbit.reg<[16, 128], f16, "local(1, 8).column_local(2, 2).spatial(8, 4).local(1, 2)">
!shift = !lowbit.reg<[16, 1], f16, "local(2, 1).spatial(8, 1).replicated(4, rank=2)">
!out = !lowbit.global<[16, 128], f16, [128, 1], [1, 1]>
// CHECK-LABEL: gpu.func @shift
// CHECK:         %[[UPPER:.*]] = llvm.load %{{.*}} {alignment = 2 : i64} : !llvm.ptr<1> -> f16
// CHECK:         %[[LOWER:.*]] = llvm.load %{{.*}} {alignment = 2 : i64} : !llvm.ptr<1> -> f16
// CHECK:         %[[U0:.*]] = llvm.insertelement %[[UPPER]], %{{.*}}[%c0_i32 : i32]
// CHECK-NEXT:    %[[U:.*]] = llvm.insertelement %[[UPPER]], %[[U0]][%c1_i32 : i32]
// CHECK:         "lowbit.decode_shifted_pair"(%[[U]], %[[WORD:.*]]) {{.*}}register = 0 : i64
// CHECK:         %[[L0:.*]] = llvm.insertelement %[[LOWER]], %{{.*}}[%c0_i32 : i32]
// CHECK-NEXT:    %[[L:.*]] = llvm.insertelement %[[LOWER]], %[[L0]][%c1_i32 : i32]
// CHECK:         "lowbit.decode_shifted_pair"(%[[L]], %[[WORD]]) {{.*}}register = 1 : i64
// CHECK:         "lowbit.decode_shifted_pair"(%[[U]], %[[WORD]]) {{.*}}register = 2 : i64
// CHECK:         "lowbit.decode_shifted_pair"(%[[L]], %[[WORD]]) {{.*}}register = 3 : i64
// The last of the eight blocks of columns has the same.
// CHECK-COUNT-26: "lowbit.decode_shifted_pair"(
// CHECK:         "lowbit.decode_shifted_pair"(%[[U]], %{{.*}}) {{.*}}register = 2 : i64
// CHECK:         "lowbit.decode_shifted_pair"(%[[L]], %{{.*}}) {{.*}}register = 3 : i64
"lowbit.program"() ({
^bb0(%pw: !llvm.ptr<1>, %pz: !llvm.ptr<1>, %py: !llvm.ptr<1>):
  %c0 = arith.constant 0 : i32
  %codes = "lowbit.global_view"(%pw) {operandSegmentSizes = array<i32: 1, 0>} : (!llvm.ptr<1>) -> !codes
  %z = "lowbit.global_view"(%pz) {operandSegmentSizes = array<i32: 1, 0>} : (!llvm.ptr<1>) -> !lowbit.global<[16, 1], f16, [1, 1], [1, 1]>
  %y = "lowbit.global_view"(%py) {operandSegmentSizes = array<i32: 1, 0>} : (!llvm.ptr<1>) -> !out
  %units = "lowbit.load"(%codes, %c0, %c0) {boundary = ["none", "none"], operandSegmentSizes = array<i32: 1, 2>}
    : (!codes, i32, i32) -> !units
  %a_codes = "lowbit.view"(%units) : (!units) -> !a_codes
  %first = "lowbit.load"(%z, %c0, %c0) {boundary = ["none", "none"], operandSegmentSizes = array<i32: 1, 2>}
    : (!lowbit.global<[16, 1], f16, [1, 1], [1, 1]>, i32, i32) -> !shift
  %a = "lowbit.decode"(%a_codes, %first) {exponent = 0, operandSegmentSizes = array<i32: 1, 1>} : (!a_codes, !shift) -> !a
  "lowbit.store"(%a, %y, %c0, %c0) {boundary = ["none", "none"], operandSegmentSizes = array<i32: 1, 1, 2>}
    : (!a, !out, i32, i32) -> ()
  "lowbit.return"() : () -> ()
}) {sym_name = "shift", threads = 32, grid = [1, 1, 1], params = ["w", "z", "y"], workspace = 0} : () -> ()

// -----

// Two shifts, of two groups of 64 columns: the first for four blocks, 16 pairs, the second for the other four.
!codes = !lowbit.global<[2, 32], vector<4xi32>, [32, 1], [1, 1]>
!units = !lowbit.reg<[2, 32], vector<4xi32>, "local(2, 1).spatial(1, 32)">
!a_codes = !lowbit.reg<[16, 128], #lowbit.format<"u4", []>, "local(1, 8).column_local(2, 2).spatial(8, 4).local(1, 2)">
!a = !lowbit.reg<[16, 128], f16, "local(1, 8).column_local(2, 2).spatial(8, 4).local(1, 2)">
!shift = !lowbit.reg<[16, 1], f16, "local(2, 1).spatial(8, 1).replicated(4, rank=2)">
!out = !lowbit.global<[16, 128], f16, [128, 1], [1, 1]>
// CHECK-LABEL: gpu.func @shifts
// CHECK:         %[[FIRST_UPPER:.*]] = llvm.load %{{.*}} {alignment = 2 : i64} : !llvm.ptr<1> -> f16
// CHECK:         %[[FIRST_LOWER:.*]] = llvm.load %{{.*}} {alignment = 2 : i64} : !llvm.ptr<1> -> f16
// CHECK:         %[[SECOND_UPPER:.*]] = llvm.load %{{.*}} {alignment = 2 : i64} : !llvm.ptr<1> -> f16
// CHECK:         %[[SECOND_LOWER:.*]] = llvm.load %{{.*}} {alignment = 2 : i64} : !llvm.ptr<1> -> f16
// CHECK:         %[[FU:.*]] = llvm.insertelement %[[FIRST_UPPER]], %{{.*}}[%c1_i32 : i32]
// CHECK:         "lowbit.decode_shifted_pair"(%[[FU]], %{{.*}}) {{.*}}register = 0 : i64
// CHECK:         %[[FL:.*]] = llvm.insertelement %[[FIRST_LOWER]], %{{.*}}[%c1_i32 : i32]
// CHECK:         "lowbit.decode_shifted_pair"(%[[FL]], %{{.*}}) {{.*}}register = 1 : i64
// CHECK-COUNT-12: "lowbit.decode_shifted_pair"(
// CHECK:         "lowbit.decode_shifted_pair"(%[[FU]], %{{.*}}) {{.*}}register = 2 : i64
// CHECK:         "lowbit.decode_shifted_pair"(%[[FL]], %{{.*}}) {{.*}}register = 3 : i64
// CHECK:         %[[SU:.*]] = llvm.insertelement %[[SECOND_UPPER]], %{{.*}}[%c1_i32 : i32]
// CHECK:         "lowbit.decode_shifted_pair"(%[[SU]], %{{.*}}) {{.*}}register = 0 : i64
// CHECK:         %[[SL:.*]] = llvm.insertelement %[[SECOND_LOWER]], %{{.*}}[%c1_i32 : i32]
// CHECK:         "lowbit.decode_shifted_pair"(%[[SL]], %{{.*}}) {{.*}}register = 1 : i64
// CHECK-COUNT-12: "lowbit.decode_shifted_pair"(
// CHECK:         "lowbit.decode_shifted_pair"(%[[SU]], %{{.*}}) {{.*}}register = 2 : i64
// CHECK:         "lowbit.decode_shifted_pair"(%[[SL]], %{{.*}}) {{.*}}register = 3 : i64
// CHECK-NOT:     lowbit.decode_shifted_pair
"lowbit.program"() ({
^bb0(%pw: !llvm.ptr<1>, %pz: !llvm.ptr<1>, %py: !llvm.ptr<1>):
  %c0 = arith.constant 0 : i32
  %c1 = arith.constant 1 : i32
  %codes = "lowbit.global_view"(%pw) {operandSegmentSizes = array<i32: 1, 0>} : (!llvm.ptr<1>) -> !codes
  %z = "lowbit.global_view"(%pz) {operandSegmentSizes = array<i32: 1, 0>} : (!llvm.ptr<1>) -> !lowbit.global<[16, 2], f16, [2, 1], [1, 1]>
  %y = "lowbit.global_view"(%py) {operandSegmentSizes = array<i32: 1, 0>} : (!llvm.ptr<1>) -> !out
  %units = "lowbit.load"(%codes, %c0, %c0) {boundary = ["none", "none"], operandSegmentSizes = array<i32: 1, 2>}
    : (!codes, i32, i32) -> !units
  %a_codes = "lowbit.view"(%units) : (!units) -> !a_codes
  %first = "lowbit.load"(%z, %c0, %c0) {boundary = ["none", "none"], operandSegmentSizes = array<i32: 1, 2>}
    : (!lowbit.global<[16, 2], f16, [2, 1], [1, 1]>, i32, i32) -> !shift
  %second = "lowbit.load"(%z, %c0, %c1) {boundary = ["none", "none"], operandSegmentSizes = array<i32: 1, 2>}
    : (!lowbit.global<[16, 2], f16, [2, 1], [1, 1]>, i32, i32) -> !shift
  %a = "lowbit.decode"(%a_codes, %first, %second) {exponent = 0, operandSegmentSizes = array<i32: 1, 2>} : (!a_codes, !shift, !shift) -> !a
  "lowbit.store"(%a, %y, %c0, %c0) {boundary = ["none", "none"], operandSegmentSizes = array<i32: 1, 1, 2>}
    : (!a, !out, i32, i32) -> ()
  "lowbit.return"() : () -> ()
}) {sym_name = "shifts", threads = 32, grid = [1, 1, 1], params = ["w", "z", "y"], workspace = 0} : () -> ()

// -----

// An A of f32 (a format that f16 is too narrow for) makes two tf32 mma of half the depth from the same fragments.
!a = !lowbit.reg<[16, 16], f32, "column_local(2, 2).spatial(8, 4).local(1, 2)">
!b = !lowbit.reg<[8, 16], f16, "local(1, 2).spatial(8, 4).local(1, 2)">
!d = !lowbit.reg<[16, 8], f32, "local(2, 1).spatial(8, 4).local(1, 2)">
// CHECK-LABEL: gpu.func @tf32
// CHECK-COUNT-2: nvvm.mma.sync {{.*}}multiplicandAPtxType = #nvvm.mma_type<tf32>{{.*}}k = 8
// CHECK-NOT:     nvvm.mma.sync
"lowbit.program"() ({
^bb0(%py: !llvm.ptr<1>):
  %c0 = arith.constant 0 : i32
  %y = "lowbit.global_view"(%py) {operandSegmentSizes = array<i32: 1, 0>} : (!llvm.ptr<1>) -> !lowbit.global<[16, 8], f32, [8, 1], [1, 1]>
  %a = "lowbit.constant"() {value = 3.0 : f32} : () -> !a
  %b = "lowbit.constant"() {value = 2.0 : f32} : () -> !b
  %zero = "lowbit.constant"() {value = 0.0 : f32} : () -> !d
  %d = "lowbit.mma"(%a, %b, %zero) : (!a, !b, !d) -> !d
  "lowbit.store"(%d, %y, %c0, %c0) {boundary = ["none", "none"], operandSegmentSizes = array<i32: 1, 1, 2>}
    : (!d, !lowbit.global<[16, 8], f32, [8, 1], [1, 1]>, i32, i32) -> ()
  "lowbit.return"() : () -> ()
}) {sym_name = "tf32", threads = 32, grid = [1, 1, 1], params = ["y"], workspace = 0} : () -> ()

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
"lowbit.program"() ({
^bb0(%n: i32):
  %c0 = arith.constant 0 : i32
  %c1 = arith.constant 1 : i32
  %zero = "lowbit.constant"() {value = 0.0 : f32} : () -> !d
  %one = "lowbit.constant"() {value = 1.0 : f32} : () -> !d
  %sum = scf.for %i = %c0 to %n step %c1 iter_args(%old = %zero) -> !d : i32 {
    %new = "lowbit.add"(%old, %one) : (!d, !d) -> !d
    scf.yield %new : !d
  }
  %first = "lowbit.alloc_shared"() : () -> !buffer
  "lowbit.store"(%sum, %first, %c0, %c0) {boundary = ["none", "none"], operandSegmentSizes = array<i32: 1, 1, 2>}
    : (!d, !buffer, i32, i32) -> ()
  "lowbit.barrier"() {scope = "block", warps = 1 : i64} : () -> ()
  "lowbit.free_shared"(%first) : (!buffer) -> ()
  %second = "lowbit.alloc_shared"() : () -> !buffer
  "lowbit.store"(%one, %second, %c0, %c0) {boundary = ["none", "none"], operandSegmentSizes = array<i32: 1, 1, 2>}
    : (!d, !buffer, i32, i32) -> ()
  "lowbit.return"() : () -> ()
}) {sym_name = "loop", threads = 32, grid = [1, 1, 1], params = ["n"], workspace = 0} : () -> ()

// -----

// The last of three blocks: an acquire-release increment by one thread, told to the others through shared memory. It
// puts the counter back to zero, for the next launch.
// CHECK-LABEL: gpu.func @last
// CHECK:         gpu.barrier
// CHECK:         scf.if
// CHECK:           %[[OLD:.*]] = llvm.inline_asm has_side_effects {{.*}}"atom.acq_rel.gpu.global.add.u32 $0, [$1], $2;"
// CHECK:           %[[LAST:.*]] = arith.cmpi eq, %[[OLD]], %c2_i32
// CHECK:           llvm.store {{.*}} !llvm.ptr<3>
// CHECK:           scf.if %[[LAST]] {
// CHECK-NEXT:        llvm.store %c0_i32{{.*}} !llvm.ptr<1>
// CHECK:         gpu.barrier
// CHECK:         llvm.inline_asm has_side_effects {{.*}}"fence.acq_rel.gpu;"
"lowbit.program"() ({
^bb0(%pc: !llvm.ptr<1>):
  %c0 = arith.constant 0 : i32
  %counters = "lowbit.global_view"(%pc) {operandSegmentSizes = array<i32: 1, 0>} : (!llvm.ptr<1>) -> !lowbit.global<[1], i32, [1], [1]>
  %last = "lowbit.last_arrival"(%counters, %c0) {count = 3} : (!lowbit.global<[1], i32, [1], [1]>, i32) -> i1
  scf.if %last {
    "lowbit.barrier"() {scope = "block", warps = 1 : i64} : () -> ()
  }
  "lowbit.return"() : () -> ()
}) {sym_name = "last", threads = 64, grid = [3, 1, 1], params = ["workspace"], workspace = 4} : () -> ()

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
// CHECK:         "lowbit.lookup_pair"(%{{.*}}, %[[COLUMN]], %{{.*}}) {{.*}}register = 0 : i64{{.*}} -> vector<2xbf16>
"lowbit.program"() ({
^bb0(%pw: !llvm.ptr<1>, %py: !llvm.ptr<1>):
  %c0 = arith.constant 0 : i32
  %w = "lowbit.global_view"(%pw) {operandSegmentSizes = array<i32: 1, 0>} : (!llvm.ptr<1>) -> !weight
  %y = "lowbit.global_view"(%py) {operandSegmentSizes = array<i32: 1, 0>} : (!llvm.ptr<1>) -> !out
  %table = "lowbit.alloc_shared"() : () -> !table
  "lowbit.fill_table"(%table) {format = #lowbit.format<"nf4", []>, element = "bf16", exponent = 0} : (!table) -> ()
  %words = "lowbit.load"(%w, %c0, %c0, %c0) {boundary = ["none", "none", "none"], operandSegmentSizes = array<i32: 1, 3>}
    : (!weight, i32, i32, i32) -> !units
  %codes = "lowbit.view"(%words) : (!units) -> !codes
  %numbers = "lowbit.lookup"(%codes, %table) : (!codes, !table) -> !numbers
  "lowbit.store"(%numbers, %y, %c0, %c0) {boundary = ["none", "none"], operandSegmentSizes = array<i32: 1, 1, 2>}
    : (!numbers, !out, i32, i32) -> ()
  "lowbit.return"() : () -> ()
}) {sym_name = "numbers", threads = 128, grid = [1, 1, 1], params = ["w", "y"], workspace = 0} : () -> ()

// -----

// A constant with another value in rows 8 to 15 of a block: that of the second register of a thread.
// CHECK-LABEL: gpu.func @halves
// CHECK-DAG:     %[[UPPER:.*]] = arith.constant 1.000000e+00 : f32
// CHECK-DAG:     %[[LOWER:.*]] = arith.constant 2.000000e+00 : f32
// CHECK:         llvm.store %[[UPPER]]
// CHECK:         llvm.store %[[LOWER]]
!y = !lowbit.global<[16, 4], f32, [4, 1], [1, 1]>
"lowbit.program"() ({
^bb0(%p: !llvm.ptr<1>):
  %c0 = arith.constant 0 : i32
  %y = "lowbit.global_view"(%p) {operandSegmentSizes = array<i32: 1, 0>} : (!llvm.ptr<1>) -> !y
  %a = "lowbit.constant"() {value = 1.0 : f32, lower = 2.0 : f32} : () -> !lowbit.reg<[16, 4], f32, "local(2, 1).spatial(8, 4)">
  "lowbit.store"(%a, %y, %c0, %c0) {boundary = ["none", "none"], operandSegmentSizes = array<i32: 1, 1, 2>}
    : (!lowbit.reg<[16, 4], f32, "local(2, 1).spatial(8, 4)">, !y, i32, i32) -> ()
  "lowbit.return"() : () -> ()
}) {sym_name = "halves", threads = 32, grid = [1, 1, 1], params = ["y"], workspace = 0} : () -> ()
