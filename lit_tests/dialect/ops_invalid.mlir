// RUN: %lowbit-opt %s --split-input-file --verify-diagnostics

// What the verifiers refuse, operation by operation. Wrong types are in types_invalid.mlir.

!weight = !lowbit.packed<[64, 256], #lowbit.format<"u4", []>, 128, "int", "f16">
func.func @matmul_x(%x: tensor<?x128xf16>, %w: !weight) -> tensor<?x64xf16> {
  // expected-error @below {{'lowbit.matmul' op x: expected tensor<?x256xf16> or tensor<?x256xbf16>, got tensor<?x128xf16>}}
  %y = "lowbit.matmul"(%x, %w) {operandSegmentSizes = array<i32: 1, 1, 0>} : (tensor<?x128xf16>, !weight) -> tensor<?x64xf16>
  return %y : tensor<?x64xf16>
}

// -----

!weight = !lowbit.packed<[64, 256], #lowbit.format<"u4", []>, 128, "int", "f16">
func.func @matmul_y(%x: tensor<?x256xf16>, %w: !weight) -> tensor<?x64xi8> {
  // expected-error @below {{y: expected tensor<?x64xf16> or tensor<?x64xbf16> or tensor<?x64xf32>, got tensor<?x64xi8>}}
  %y = "lowbit.matmul"(%x, %w) {operandSegmentSizes = array<i32: 1, 1, 0>} : (tensor<?x256xf16>, !weight) -> tensor<?x64xi8>
  return %y : tensor<?x64xi8>
}

// -----

// The bias has the type of y.
!weight = !lowbit.packed<[64, 256], #lowbit.format<"u4", []>, 128, "int", "f16">
func.func @matmul_bias(%x: tensor<?x256xf16>, %w: !weight, %bias: tensor<64xf16>) -> tensor<?x64xf32> {
  // expected-error @below {{bias: expected tensor<64xf32>, got tensor<64xf16>}}
  %y = "lowbit.matmul"(%x, %w, %bias) {operandSegmentSizes = array<i32: 1, 1, 1>}
    : (tensor<?x256xf16>, !weight, tensor<64xf16>) -> tensor<?x64xf32>
  return %y : tensor<?x64xf32>
}

// -----

!weight = !lowbit.packed<[64, 256], #lowbit.format<"u4", []>, 128, "int", "f16">
func.func @matmul_two_biases(%x: tensor<?x256xf16>, %w: !weight, %bias: tensor<64xf16>) -> tensor<?x64xf16> {
  // expected-error @below {{bias: expected one at most, got 2}}
  %y = "lowbit.matmul"(%x, %w, %bias, %bias) {operandSegmentSizes = array<i32: 1, 1, 2>}
    : (tensor<?x256xf16>, !weight, tensor<64xf16>, tensor<64xf16>) -> tensor<?x64xf16>
  return %y : tensor<?x64xf16>
}

// -----

!weight = !lowbit.packed<[64, 256], #lowbit.format<"u4", []>, 128, "int", "f16">
func.func @matmul_segments(%x: tensor<?x256xf16>, %w: !weight) -> tensor<?x64xf16> {
  // expected-error @below {{operandSegmentSizes: expected array<i32: 1, 1, 0>, got nothing}}
  %y = "lowbit.matmul"(%x, %w) : (tensor<?x256xf16>, !weight) -> tensor<?x64xf16>
  return %y : tensor<?x64xf16>
}

// -----

!weight = !lowbit.packed<[64, 256], #lowbit.format<"u4", []>, 128, "int", "f16">
func.func @dequantize_y(%w: !weight) -> tensor<256x64xf16> {
  // expected-error @below {{y: expected tensor<64x256xf16> or tensor<64x256xbf16>, got tensor<256x64xf16>}}
  %y = "lowbit.dequantize"(%w) : (!weight) -> tensor<256x64xf16>
  return %y : tensor<256x64xf16>
}

// -----

// expected-error @below {{'lowbit.program' op threads: expected 32..1024, got 2048}}
"lowbit.program"() ({
  "lowbit.return"() : () -> ()
}) {sym_name = "p", threads = 2048, grid = [1, 1, 1], params = [], workspace = 0} : () -> ()

// -----

// expected-error @below {{threads: expected a multiple of 32, got 48}}
"lowbit.program"() ({
  "lowbit.return"() : () -> ()
}) {sym_name = "p", threads = 48, grid = [1, 1, 1], params = [], workspace = 0} : () -> ()

// -----

// expected-error @below {{grid: expected numbers of at least 1, 'ceil(PARAMETER / NUMBER)' or 'sm_count * NUMBER', got 0}}
"lowbit.program"() ({
  "lowbit.return"() : () -> ()
}) {sym_name = "p", threads = 32, grid = [8, 0, 1], params = [], workspace = 0} : () -> ()

// -----

// expected-error @below {{workspace: expected at least 0, got -4}}
"lowbit.program"() ({
  "lowbit.return"() : () -> ()
}) {sym_name = "p", threads = 32, grid = [1, 1, 1], params = [], workspace = -4} : () -> ()

// -----

// expected-error @below {{body: expected one block, got 0}}
"lowbit.program"() ({
}) {sym_name = "p", threads = 32, grid = [1, 1, 1], params = [], workspace = 0} : () -> ()

// -----

// expected-error @below {{params: expected names of 1 arguments, got 2}}
"lowbit.program"() ({
^bb0(%m: i32):
  "lowbit.return"() : () -> ()
}) {sym_name = "p", threads = 32, grid = [1, 1, 1], params = ["m", "n"], workspace = 0} : () -> ()

// -----

// expected-error @below {{expected a list of strings, got [1]}}
"lowbit.program"() ({
^bb0(%m: i32):
  "lowbit.return"() : () -> ()
}) {sym_name = "p", threads = 32, grid = [1, 1, 1], params = [1], workspace = 0} : () -> ()

// -----

// expected-error @below {{'lowbit.program' op x: expected !llvm.ptr<1>, i32, f32, !llvm.ptr (a tensor map), got tensor<8xf16>}}
"lowbit.program"() ({
^bb0(%x: tensor<8xf16>):
  "lowbit.return"() : () -> ()
}) {sym_name = "p", threads = 32, grid = [1, 1, 1], params = ["x"], workspace = 0} : () -> ()

// -----

// An extent that depends on the arguments names an i32.
// expected-error @below {{'lowbit.program' op grid: expected the name of an i32 parameter, got ceil(x / 16)}}
"lowbit.program"() ({
^bb0(%x: !llvm.ptr<1>):
  "lowbit.return"() : () -> ()
}) {sym_name = "p", threads = 32, grid = ["ceil(x / 16)", 1, 1], params = ["x"], workspace = 0} : () -> ()

// -----

// expected-error @below {{grid: expected numbers of at least 1, 'ceil(PARAMETER / NUMBER)' or 'sm_count * NUMBER', got 'x * 2'}}
"lowbit.program"() ({
  "lowbit.return"() : () -> ()
}) {sym_name = "p", threads = 32, grid = [1, "x * 2", 1], params = [], workspace = 0} : () -> ()

// -----

// expected-error @below {{grid: expected three extents, got [8, 1]}}
"lowbit.program"() ({
  "lowbit.return"() : () -> ()
}) {sym_name = "p", threads = 32, grid = [8, 1], params = [], workspace = 0} : () -> ()

// -----

// expected-error @below {{'lowbit.program' op params: expected different names, got m, m}}
"lowbit.program"() ({
^bb0(%m: i32, %n: i32):
  "lowbit.return"() : () -> ()
}) {sym_name = "p", threads = 32, grid = [1, 1, 1], params = ["m", "m"], workspace = 0} : () -> ()

// -----

// The runtime has to know where the workspace goes.
// expected-error @below {{'lowbit.program' op workspace: expected a pointer parameter called 'workspace', got counters}}
"lowbit.program"() ({
^bb0(%counters: !llvm.ptr<1>):
  "lowbit.return"() : () -> ()
}) {sym_name = "p", threads = 32, grid = [1, 1, 1], params = ["counters"], workspace = 4} : () -> ()

// -----

// Whole clusters, whatever m is.
// expected-error @below {{cluster: expected three divisors of the grid's ['ceil(m / 8)', 1, 1], got [2, 1, 1]}}
"lowbit.program"() ({
^bb0(%m: i32):
  "lowbit.return"() : () -> ()
}) {sym_name = "p", threads = 32, grid = ["ceil(m / 8)", 1, 1], params = ["m"], workspace = 0, cluster = [2, 1, 1]} : () -> ()

// -----

// A program sees its parameters and nothing else.
func.func @isolated(%m: i32) {
  // expected-note @below {{required by region isolation constraints}}
  "lowbit.program"() ({
    // expected-error @below {{using value defined outside the region}}
    %0 = arith.addi %m, %m : i32
    "lowbit.return"() : () -> ()
  }) {sym_name = "p", threads = 32, grid = [1, 1, 1], params = [], workspace = 0} : () -> ()
  return
}

// -----

// All tiles are spread over the threads of the block.
"lowbit.program"() ({
  // expected-error @below {{'lowbit.program' op layout spatial(8, 4) in lowbit.constant: expected 64 threads, got 32}}
  %0 = "lowbit.constant"() {value = 0.0 : f32} : () -> !lowbit.reg<[8, 4], f32, "spatial(8, 4)">
  "lowbit.return"() : () -> ()
}) {sym_name = "p", threads = 64, grid = [1, 1, 1], params = [], workspace = 0} : () -> ()

// -----

// Barriers of some warps split the block evenly.
"lowbit.program"() ({
  // expected-error @below {{'lowbit.program' op warps of lowbit.barrier: expected a divisor of 8, got 3}}
  "lowbit.barrier"() {scope = "warps", warps = 3} : () -> ()
  "lowbit.return"() : () -> ()
}) {sym_name = "p", threads = 256, grid = [1, 1, 1], params = [], workspace = 0} : () -> ()

// -----

// Clusters divide the grid.
// expected-error @below {{'lowbit.program' op cluster: expected three divisors of the grid's [8, 4, 1], got [1, 3, 1]}}
"lowbit.program"() ({
  "lowbit.return"() : () -> ()
}) {sym_name = "p", threads = 32, grid = [8, 4, 1], params = [], workspace = 0, cluster = [1, 3, 1]} : () -> ()

// -----

// expected-error @below {{cluster: expected three divisors of the grid's [8, 4, 1], got [2, 2]}}
"lowbit.program"() ({
  "lowbit.return"() : () -> ()
}) {sym_name = "p", threads = 32, grid = [8, 4, 1], params = [], workspace = 0, cluster = [2, 2]} : () -> ()

// -----

// expected-error @below {{cluster: expected at most 8 blocks, got 16}}
"lowbit.program"() ({
  "lowbit.return"() : () -> ()
}) {sym_name = "p", threads = 32, grid = [8, 4, 1], params = [], workspace = 0, cluster = [4, 4, 1]} : () -> ()

// -----

func.func @block_id() {
  // expected-error @below {{'lowbit.block_id' op axis: expected 0..2, got 3}}
  %0 = "lowbit.block_id"() {axis = 3} : () -> i32
  return
}

// -----

func.func @view_of_no_pointer(%p: !llvm.ptr<3>) {
  // expected-error @below {{'lowbit.global_view' op pointer: expected !llvm.ptr<1>, got !llvm.ptr<3>}}
  %0 = "lowbit.global_view"(%p) {operandSegmentSizes = array<i32: 1, 0>} : (!llvm.ptr<3>) -> !lowbit.global<[8], f16, [1], [1]>
  return
}

// -----

func.func @view_without_size(%p: !llvm.ptr<1>) {
  // expected-error @below {{sizes: expected one per dynamic dim (1), got 0}}
  %0 = "lowbit.global_view"(%p) {operandSegmentSizes = array<i32: 1, 0>} : (!llvm.ptr<1>) -> !lowbit.global<[-1], f16, [1], [1]>
  return
}

// -----

func.func @stage(%b: !lowbit.shared<[2, 8, 64], f16, [512, 64, 1], 0>, %i: i32) {
  // expected-error @below {{'lowbit.stage' op result: expected Shared(element='f16', shape=(8, 64), strides=(64, 1), swizzle=0), got Shared(element='f16', shape=(8, 64), strides=(72, 1), swizzle=0)}}
  %0 = "lowbit.stage"(%b, %i) : (!lowbit.shared<[2, 8, 64], f16, [512, 64, 1], 0>, i32) -> !lowbit.shared<[8, 64], f16, [72, 1], 0>
  return
}

// -----

func.func @stage_of_a_vector(%b: !lowbit.shared<[2], f16, [1], 0>, %i: i32) {
  // expected-error @below {{buffer: expected rank 2 or more, got [2]}}
  %0 = "lowbit.stage"(%b, %i) : (!lowbit.shared<[2], f16, [1], 0>, i32) -> !lowbit.shared<[2], f16, [1], 0>
  return
}

// -----

// Copies. The layout covers the target.
!x = !lowbit.global<[-1, 64], f16, [64, 1], [1, 1]>
!buffer = !lowbit.shared<[8, 64], f16, [72, 1], 0>
func.func @copy_layout(%x: !x, %to: !buffer, %i: i32) {
  // expected-error @below {{'lowbit.copy_async' op shape of the layout: expected the target's, (8, 64), got (4, 64)}}
  "lowbit.copy_async"(%x, %to, %i, %i) {layout = "spatial(4, 8).local(1, 8)", boundary = ["zero", "none"], limit = [],
    operandSegmentSizes = array<i32: 1, 1, 2>} : (!x, !buffer, i32, i32) -> ()
  return
}

// -----

!x = !lowbit.global<[-1, 64], f16, [64, 1], [1, 1]>
!buffer = !lowbit.shared<[8, 64], bf16, [72, 1], 0>
func.func @copy_element(%x: !x, %to: !buffer, %i: i32) {
  // expected-error @below {{element of the target: expected f16, got bf16}}
  "lowbit.copy_async"(%x, %to, %i, %i) {layout = "local(2, 1).spatial(4, 8).local(1, 8)", boundary = ["zero", "none"],
    limit = [], operandSegmentSizes = array<i32: 1, 1, 2>} : (!x, !buffer, i32, i32) -> ()
  return
}

// -----

!x = !lowbit.global<[-1, 64], f16, [64, 1], [1, 1]>
!buffer = !lowbit.shared<[8, 64], f16, [72, 1], 0>
func.func @copy_limit(%x: !x, %to: !buffer, %i: i32) {
  // expected-error @below {{limit: expected a factor per dim and the end, got [64, 1]}}
  "lowbit.copy_async"(%x, %to, %i, %i) {layout = "local(2, 1).spatial(4, 8).local(1, 8)", boundary = ["zero", "none"],
    limit = [64, 1], operandSegmentSizes = array<i32: 1, 1, 2>} : (!x, !buffer, i32, i32) -> ()
  return
}

// -----

!x = !lowbit.global<[-1, 64], f32, [64, 1], [1, 1]>
!buffer = !lowbit.shared<[1, 8, 64], f32, [512, 64, 1], 0>
func.func @padded_element(%x: !x, %to: !buffer, %i: i32) {
  // expected-error @below {{'lowbit.copy_padded' op element: expected f16 or bf16, got f32}}
  "lowbit.copy_padded"(%x, %to, %i, %i) {layout = "local(1, 8, 2).spatial(1, 1, 32)", group = 17, padded = 32,
    operandSegmentSizes = array<i32: 1, 1, 2>} : (!x, !buffer, i32, i32) -> ()
  return
}

// -----

!x = !lowbit.global<[64], f16, [1], [1]>
!buffer = !lowbit.shared<[1, 8, 64], f16, [512, 64, 1], 0>
func.func @padded_source(%x: !x, %to: !buffer, %i: i32) {
  // expected-error @below {{source: expected rank 2 [rows, columns], got 1}}
  "lowbit.copy_padded"(%x, %to, %i, %i) {layout = "local(1, 8, 2).spatial(1, 1, 32)", group = 17, padded = 32,
    operandSegmentSizes = array<i32: 1, 1, 2>} : (!x, !buffer, i32, i32) -> ()
  return
}

// -----

!x = !lowbit.global<[-1, 64], f16, [64, 1], [1, 1]>
!buffer = !lowbit.shared<[8, 64], f16, [64, 1], 0>
func.func @padded_target(%x: !x, %to: !buffer, %i: i32) {
  // expected-error @below {{target: expected rank 3 [steps, rows, columns], got 2}}
  "lowbit.copy_padded"(%x, %to, %i, %i) {layout = "local(8, 2).spatial(1, 32)", group = 17, padded = 32,
    operandSegmentSizes = array<i32: 1, 1, 2>} : (!x, !buffer, i32, i32) -> ()
  return
}

// -----

!x = !lowbit.global<[-1, 64], f16, [64, 1], [1, 1]>
!buffer = !lowbit.shared<[1, 8, 64], f16, [512, 64, 1], 0>
func.func @padded_offsets(%x: !x, %to: !buffer, %i: i32) {
  // expected-error @below {{offsets: expected two: row, step, got 3}}
  "lowbit.copy_padded"(%x, %to, %i, %i, %i) {layout = "local(1, 8, 2).spatial(1, 1, 32)", group = 17, padded = 32,
    operandSegmentSizes = array<i32: 1, 1, 3>} : (!x, !buffer, i32, i32, i32) -> ()
  return
}

// -----

!x = !lowbit.global<[-1, 64], f16, [64, 1], [1, 1]>
!buffer = !lowbit.shared<[1, 8, 64], f16, [512, 64, 1], 0>
func.func @padded_group(%x: !x, %to: !buffer, %i: i32) {
  // expected-error @below {{group: expected 1..16, got 17}}
  "lowbit.copy_padded"(%x, %to, %i, %i) {layout = "local(1, 8, 2).spatial(1, 1, 32)", group = 17, padded = 16,
    operandSegmentSizes = array<i32: 1, 1, 2>} : (!x, !buffer, i32, i32) -> ()
  return
}

// -----

func.func @wait() {
  // expected-error @below {{'lowbit.wait' op pending: expected at least 0, got -1}}
  "lowbit.wait"() {pending = -1} : () -> ()
  return
}

// -----

func.func @barrier() {
  // expected-error @below {{'lowbit.barrier' op scope: expected one of warps, block, cluster, cluster_arrive, cluster_wait, got 'grid'}}
  "lowbit.barrier"() {scope = "grid", warps = 1} : () -> ()
  return
}

// -----

func.func @barrier_warps() {
  // expected-error @below {{'lowbit.barrier' op warps: expected 1..32, got 0}}
  "lowbit.barrier"() {scope = "warps", warps = 0} : () -> ()
  return
}

// -----

// What IRDL itself looks after.
func.func @barrier_of_how_many() {
  // expected-error @below {{'lowbit.barrier' op attribute "warps" is expected but not provided}}
  "lowbit.barrier"() {scope = "block"} : () -> ()
  return
}

// -----

// Another block's memory is read and no more.
!buffer = !lowbit.shared<[8, 64], f16, [64, 1], 0>
func.func @peer_type(%b: !buffer, %rank: i32) {
  // expected-error @below {{'lowbit.peer' op result: expected !lowbit.shared<[8, 64], f16, [64, 1], 0 : i64>, got !lowbit.shared<[8, 64], f16, [72, 1], 0 : i64>}}
  %0 = "lowbit.peer"(%b, %rank) : (!buffer, i32) -> !lowbit.shared<[8, 64], f16, [72, 1], 0>
  return
}

// -----

!buffer = !lowbit.shared<[8, 4], f16, [4, 1], 0>
func.func @peer_store(%b: !buffer, %t: !lowbit.reg<[8, 4], f16, "spatial(8, 4)">, %i: i32) {
  // expected-error @below {{'lowbit.peer' op use of the result: expected lowbit.load, got lowbit.store}}
  %0 = "lowbit.peer"(%b, %i) : (!buffer, i32) -> !buffer
  "lowbit.store"(%t, %0, %i, %i) {boundary = ["none", "none"], operandSegmentSizes = array<i32: 1, 1, 2>}
    : (!lowbit.reg<[8, 4], f16, "spatial(8, 4)">, !buffer, i32, i32) -> ()
  return
}

// -----

func.func @counters(%c: !lowbit.global<[4], f32, [1], [1]>, %i: i32) {
  // expected-error @below {{'lowbit.last_arrival' op element of the counters: expected i32, got f32}}
  %0 = "lowbit.last_arrival"(%c, %i) {count = 2} : (!lowbit.global<[4], f32, [1], [1]>, i32) -> i1
  return
}

// -----

func.func @counters_rank(%c: !lowbit.global<[4, 4], i32, [4, 1], [1, 1]>, %i: i32) {
  // expected-error @below {{counters: expected rank 1, got [4, 4]}}
  %0 = "lowbit.last_arrival"(%c, %i) {count = 2} : (!lowbit.global<[4, 4], i32, [4, 1], [1, 1]>, i32) -> i1
  return
}

// -----

func.func @count(%c: !lowbit.global<[4], i32, [1], [1]>, %i: i32) {
  // expected-error @below {{count: expected at least 1, got 0}}
  %0 = "lowbit.last_arrival"(%c, %i) {count = 0} : (!lowbit.global<[4], i32, [1], [1]>, i32) -> i1
  return
}

// -----

func.func @splat(%value: f16) {
  // expected-error @below {{'lowbit.splat' op value: expected f32, got f16}}
  %0 = "lowbit.splat"(%value) : (f16) -> !lowbit.reg<[8, 4], f16, "spatial(8, 4)">
  return
}

// -----

func.func @splat_of_integers(%value: f32) {
  // expected-error @below {{'lowbit.splat' op element of the result: expected f16 or bf16 or f32, got i8}}
  %0 = "lowbit.splat"(%value) : (f32) -> !lowbit.reg<[8, 4], i8, "spatial(8, 4)">
  return
}

// -----

func.func @constant() {
  // expected-error @below {{'lowbit.constant' op element of the result: expected f16 or bf16 or f32, got i8}}
  %0 = "lowbit.constant"() {value = 1.0 : f32} : () -> !lowbit.reg<[8, 4], i8, "spatial(8, 4)">
  return
}

// -----

// Loads and stores.
func.func @load_from_a_number(%x: f32) {
  // expected-error @below {{'lowbit.load' op memory: expected !lowbit.global or !lowbit.shared, got f32}}
  %0 = "lowbit.load"(%x) {boundary = [], operandSegmentSizes = array<i32: 1, 0>} : (f32) -> !lowbit.reg<[8, 4], f16, "spatial(8, 4)">
  return
}

// -----

!x = !lowbit.global<[-1, 64], f16, [64, 1], [1, 1]>
func.func @load_element(%x: !x, %i: i32) {
  // expected-error @below {{element of the tile: expected f16, got f32}}
  %0 = "lowbit.load"(%x, %i, %i) {boundary = ["none", "none"], operandSegmentSizes = array<i32: 1, 2>}
    : (!x, i32, i32) -> !lowbit.reg<[8, 4], f32, "spatial(8, 4)">
  return
}

// -----

!x = !lowbit.global<[-1, 64], f16, [64, 1], [1, 1]>
func.func @load_rank(%x: !x, %i: i32) {
  // expected-error @below {{rank of the tile: expected 2 as the memory, got 1}}
  %0 = "lowbit.load"(%x, %i) {boundary = ["none"], operandSegmentSizes = array<i32: 1, 1>}
    : (!x, i32) -> !lowbit.reg<[32], f16, "spatial(32)">
  return
}

// -----

!x = !lowbit.global<[-1, 64], f16, [64, 1], [1, 1]>
func.func @load_offsets(%x: !x, %i: i32) {
  // expected-error @below {{offsets: expected one per dim (2), got 1}}
  %0 = "lowbit.load"(%x, %i) {boundary = ["none", "none"], operandSegmentSizes = array<i32: 1, 1>}
    : (!x, i32) -> !lowbit.reg<[8, 4], f16, "spatial(8, 4)">
  return
}

// -----

!x = !lowbit.global<[-1, 64], f16, [64, 1], [1, 1]>
func.func @load_boundary(%x: !x, %i: i32) {
  // expected-error @below {{boundary: expected one word per dim (2), got 1}}
  %0 = "lowbit.load"(%x, %i, %i) {boundary = ["none"], operandSegmentSizes = array<i32: 1, 2>}
    : (!x, i32, i32) -> !lowbit.reg<[8, 4], f16, "spatial(8, 4)">
  return
}

// -----

// A load has to yield something for every element: it cannot skip one.
!x = !lowbit.global<[-1, 64], f16, [64, 1], [1, 1]>
func.func @load_skip(%x: !x, %i: i32) {
  // expected-error @below {{boundary: expected one of none, clamp, zero, got skip}}
  %0 = "lowbit.load"(%x, %i, %i) {boundary = ["skip", "none"], operandSegmentSizes = array<i32: 1, 2>}
    : (!x, i32, i32) -> !lowbit.reg<[8, 4], f16, "spatial(8, 4)">
  return
}

// -----

!x = !lowbit.shared<[4, 4], f16, [4, 1], 0>
func.func @load_too_much(%x: !x, %i: i32) {
  // expected-error @below {{size of dim 0 with boundary none: expected at most 4, got 8}}
  %0 = "lowbit.load"(%x, %i, %i) {boundary = ["none", "none"], operandSegmentSizes = array<i32: 1, 2>}
    : (!x, i32, i32) -> !lowbit.reg<[8, 4], f16, "spatial(8, 4)">
  return
}

// -----

!x = !lowbit.shared<[8, 4], f16, [4, 1], 0>
func.func @store_clamp(%x: !x, %t: !lowbit.reg<[8, 4], f16, "spatial(8, 4)">, %i: i32) {
  // expected-error @below {{'lowbit.store' op boundary: expected one of none, skip, got clamp}}
  "lowbit.store"(%t, %x, %i, %i) {boundary = ["clamp", "none"], operandSegmentSizes = array<i32: 1, 1, 2>}
    : (!lowbit.reg<[8, 4], f16, "spatial(8, 4)">, !x, i32, i32) -> ()
  return
}

// -----

!x = !lowbit.shared<[8, 4], bf16, [4, 1], 0>
func.func @store_element(%x: !x, %t: !lowbit.reg<[8, 4], f16, "spatial(8, 4)">, %i: i32) {
  // expected-error @below {{element of the tile: expected bf16, got f16}}
  "lowbit.store"(%t, %x, %i, %i) {boundary = ["none", "none"], operandSegmentSizes = array<i32: 1, 1, 2>}
    : (!lowbit.reg<[8, 4], f16, "spatial(8, 4)">, !x, i32, i32) -> ()
  return
}

// -----

// In swizzled rows, the last element is not where strides say.
!x = !lowbit.shared<[8, 64], f16, [64, 1], 128>
func.func @load_clamped_swizzle(%x: !x, %i: i32) {
  // expected-error @below {{boundary: expected one of none, zero, got clamp}}
  %0 = "lowbit.load"(%x, %i, %i) {boundary = ["clamp", "none"], operandSegmentSizes = array<i32: 1, 2>}
    : (!x, i32, i32) -> !lowbit.reg<[8, 4], f16, "spatial(8, 4)">
  return
}

// -----

// ldmatrix reads rows of 16 bytes at addresses that are multiples of 16.
func.func @load_matrix_element(%x: !lowbit.shared<[8, 16], f32, [24, 1], 0>, %m: i32) {
  // expected-error @below {{'lowbit.load_matrix' op element: expected of 16 bits, got f32}}
  %0 = "lowbit.load_matrix"(%x, %m) : (!lowbit.shared<[8, 16], f32, [24, 1], 0>, i32) -> !lowbit.reg<[8, 16], f32, "local(1, 2).spatial(8, 4).local(1, 2)">
  return
}

// -----

func.func @load_matrix_shape(%x: !lowbit.shared<[8, 32], f16, [40, 1], 0>, %m: i32) {
  // expected-error @below {{shape of the tile: expected (8, 32), got (8, 16)}}
  %0 = "lowbit.load_matrix"(%x, %m) : (!lowbit.shared<[8, 32], f16, [40, 1], 0>, i32) -> !lowbit.reg<[8, 16], f16, "local(1, 2).spatial(8, 4).local(1, 2)">
  return
}

// -----

func.func @load_matrix_rows(%x: !lowbit.shared<[16, 16], f16, [24, 1], 0>, %m: i32) {
  // expected-error @below {{rows of the tile: expected at least the 16 of the buffer, got 8}}
  %0 = "lowbit.load_matrix"(%x, %m) : (!lowbit.shared<[16, 16], f16, [24, 1], 0>, i32) -> !lowbit.reg<[8, 16], f16, "local(1, 2).spatial(8, 4).local(1, 2)">
  return
}

// -----

func.func @load_matrix_rank(%x: !lowbit.shared<[16], f16, [1], 0>, %m: i32) {
  // expected-error @below {{rank of the buffer: expected at least 2, got 1}}
  %0 = "lowbit.load_matrix"(%x, %m) : (!lowbit.shared<[16], f16, [1], 0>, i32) -> !lowbit.reg<[8, 16], f16, "local(1, 2).spatial(8, 4).local(1, 2)">
  return
}

// -----

func.func @load_matrix_strides(%x: !lowbit.shared<[8, 16], f16, [20, 1], 0>, %m: i32) {
  // expected-error @below {{strides: expected multiples of 8 (16 bytes) and 1 for the last dim, got [20, 1]}}
  %0 = "lowbit.load_matrix"(%x, %m) : (!lowbit.shared<[8, 16], f16, [20, 1], 0>, i32) -> !lowbit.reg<[8, 16], f16, "local(1, 2).spatial(8, 4).local(1, 2)">
  return
}

// -----

func.func @load_matrix_swizzle(%x: !lowbit.shared<[8, 64], f16, [64, 1], 128>, %m: i32) {
  // expected-error @below {{swizzle: expected none, got 128}}
  %0 = "lowbit.load_matrix"(%x, %m) : (!lowbit.shared<[8, 64], f16, [64, 1], 128>, i32) -> !lowbit.reg<[8, 64], f16, "local(1, 8).spatial(8, 4).local(1, 2)">
  return
}

// -----

func.func @load_matrix_layout(%x: !lowbit.shared<[8, 16], f16, [24, 1], 0>, %m: i32) {
  // expected-error @below {{layout of result: expected a multiple of local(1, 2).spatial(8, 4).local(1, 2), got spatial(8, 4).local(1, 4)}}
  %0 = "lowbit.load_matrix"(%x, %m) : (!lowbit.shared<[8, 16], f16, [24, 1], 0>, i32) -> !lowbit.reg<[8, 16], f16, "spatial(8, 4).local(1, 4)">
  return
}

// -----

func.func @load_matrix_warps(%x: !lowbit.shared<[16, 16], f16, [24, 1], 0>, %m: i32) {
  // expected-error @below {{rows of the result: expected within each warp, got spread over warps: spatial(2, 1)}}
  %0 = "lowbit.load_matrix"(%x, %m) : (!lowbit.shared<[16, 16], f16, [24, 1], 0>, i32) -> !lowbit.reg<[16, 16], f16, "spatial(2, 1).local(1, 2).spatial(8, 4).local(1, 2)">
  return
}

// -----

// Views.
func.func @view_threads(%t: !lowbit.reg<[8, 4], f16, "spatial(8, 4)">) {
  // expected-error @below {{'lowbit.view' op threads: expected 32, got 16}}
  %0 = "lowbit.view"(%t) : (!lowbit.reg<[8, 4], f16, "spatial(8, 4)">) -> !lowbit.reg<[4, 4], f16, "spatial(4, 4)">
  return
}

// -----

func.func @view_bits(%t: !lowbit.reg<[1, 32], vector<4xi32>, "spatial(1, 32)">) {
  // expected-error @below {{bits per thread: expected 128, got 192}}
  %0 = "lowbit.view"(%t) : (!lowbit.reg<[1, 32], vector<4xi32>, "spatial(1, 32)">)
    -> !lowbit.reg<[16, 64], #lowbit.format<"u6", []>, "local(1, 4).column_local(2, 2).spatial(8, 4).local(1, 2)">
  return
}

// -----

func.func @view_element(%t: !lowbit.reg<[8, 4], f16, "spatial(8, 4)">) {
  // expected-error @below {{element: expected f16, got bf16}}
  %0 = "lowbit.view"(%t) : (!lowbit.reg<[8, 4], f16, "spatial(8, 4)">) -> !lowbit.reg<[8, 4], bf16, "spatial(8, 4)">
  return
}

// -----

func.func @view_of_numbers(%t: !lowbit.reg<[8, 32], f16, "spatial(8, 4).local(1, 8)">) {
  // expected-error @below {{element of the source: expected vector<4xi32>, got f16}}
  %0 = "lowbit.view"(%t) : (!lowbit.reg<[8, 32], f16, "spatial(8, 4).local(1, 8)">)
    -> !lowbit.reg<[16, 64], #lowbit.format<"u4", []>, "local(1, 4).column_local(2, 2).spatial(8, 4).local(1, 2)">
  return
}

// -----

// Codes are packed as fragments of the tensor core and exist in this order only.
func.func @view_layout(%t: !lowbit.reg<[1, 32], vector<4xi32>, "spatial(1, 32)">) {
  // expected-error @below {{layout of result: expected a multiple of column_local(2, 2).spatial(8, 4).local(1, 2), got spatial(8, 4).local(2, 16)}}
  %0 = "lowbit.view"(%t) : (!lowbit.reg<[1, 32], vector<4xi32>, "spatial(1, 32)">)
    -> !lowbit.reg<[16, 64], #lowbit.format<"u4", []>, "spatial(8, 4).local(2, 16)">
  return
}

// -----

// 32 columns of u4 are half a chunk: the other half of the unit belongs to columns of the same rows.
func.func @view_half_a_chunk(%t: !lowbit.reg<[1, 32], vector<4xi32>, "spatial(1, 32)">) {
  // expected-error @below {{columns of a warp: expected a multiple of 64 for u4, got 32}}
  %0 = "lowbit.view"(%t) : (!lowbit.reg<[1, 32], vector<4xi32>, "spatial(1, 32)">)
    -> !lowbit.reg<[32, 32], #lowbit.format<"u4", []>, "local(2, 2).column_local(2, 2).spatial(8, 4).local(1, 2)">
  return
}

// -----

func.func @view_scattered(%t: !lowbit.reg<[2, 32], vector<4xi32>, "spatial(2, 32)">) {
  // expected-error @below {{columns of a warp: expected side by side, got 64 among 112}}
  %0 = "lowbit.view"(%t) : (!lowbit.reg<[2, 32], vector<4xi32>, "spatial(2, 32)">)
    -> !lowbit.reg<[16, 128], #lowbit.format<"u4", []>, "local(1, 4).spatial(1, 2).column_local(2, 2).spatial(8, 4).local(1, 2)">
  return
}

// -----

// Decoding.
!codes = !lowbit.reg<[16, 64], #lowbit.format<"u4", []>, "local(1, 4).column_local(2, 2).spatial(8, 4).local(1, 2)">
func.func @decode_numbers(%t: !lowbit.reg<[8, 4], f16, "spatial(8, 4)">) {
  // expected-error @below {{'lowbit.decode' op source: expected codes of a low-bit format, got f16}}
  %0 = "lowbit.decode"(%t) {exponent = 0, operandSegmentSizes = array<i32: 1, 0>} : (!lowbit.reg<[8, 4], f16, "spatial(8, 4)">) -> !lowbit.reg<[8, 4], f16, "spatial(8, 4)">
  return
}

// -----

!codes = !lowbit.reg<[16, 64], #lowbit.format<"u4", []>, "local(1, 4).column_local(2, 2).spatial(8, 4).local(1, 2)">
func.func @decode_exponent(%t: !codes) {
  // expected-error @below {{exponent: expected -1022..1023, got 5000}}
  %0 = "lowbit.decode"(%t) {exponent = 5000, operandSegmentSizes = array<i32: 1, 0>} : (!codes)
    -> !lowbit.reg<[16, 64], f16, "local(1, 4).column_local(2, 2).spatial(8, 4).local(1, 2)">
  return
}

// -----

!codes = !lowbit.reg<[16, 64], #lowbit.format<"u4", []>, "local(1, 4).column_local(2, 2).spatial(8, 4).local(1, 2)">
func.func @decode_to_bytes(%t: !codes) {
  // expected-error @below {{element of the result: expected f16 or bf16 or f32, got i8}}
  %0 = "lowbit.decode"(%t) {exponent = 0, operandSegmentSizes = array<i32: 1, 0>} : (!codes)
    -> !lowbit.reg<[16, 64], i8, "local(1, 4).column_local(2, 2).spatial(8, 4).local(1, 2)">
  return
}

// -----

!codes = !lowbit.reg<[16, 64], #lowbit.format<"u4", []>, "local(1, 4).column_local(2, 2).spatial(8, 4).local(1, 2)">
func.func @decode_layout(%t: !codes) {
  // expected-error @below {{layout: expected column_local(2, 8).spatial(8, 4).local(1, 2), got spatial(8, 4).local(2, 16)}}
  %0 = "lowbit.decode"(%t) {exponent = 0, operandSegmentSizes = array<i32: 1, 0>} : (!codes) -> !lowbit.reg<[16, 64], f16, "spatial(8, 4).local(2, 16)">
  return
}

// -----

// Shifts of what is decoded.
!codes = !lowbit.reg<[16, 64], #lowbit.format<"u2", []>, "local(1, 4).column_local(2, 2).spatial(8, 4).local(1, 2)">
!shift = !lowbit.reg<[16, 1], f16, "local(2, 1).spatial(8, 1).replicated(4)">
func.func @decode_shift_biased(%t: !codes, %a: !shift) {
  // expected-error @below {{offset with shifts: expected subtracted, got deferred}}
  %0 = "lowbit.decode"(%t, %a) {exponent = 0, offset = "deferred", operandSegmentSizes = array<i32: 1, 1>} : (!codes, !shift)
    -> !lowbit.reg<[16, 64], f16, "local(1, 4).column_local(2, 2).spatial(8, 4).local(1, 2)">
  return
}

// -----

!codes = !lowbit.reg<[16, 64], #lowbit.format<"f4e2m1", []>, "local(1, 4).column_local(2, 2).spatial(8, 4).local(1, 2)">
!shift = !lowbit.reg<[16, 1], f16, "local(2, 1).spatial(8, 1).replicated(4)">
func.func @decode_shift_float(%t: !codes, %a: !shift) {
  // expected-error @below {{format with shifts: expected an integer one, got f4e2m1}}
  %0 = "lowbit.decode"(%t, %a) {exponent = 0, operandSegmentSizes = array<i32: 1, 1>} : (!codes, !shift)
    -> !lowbit.reg<[16, 64], f16, "local(1, 4).column_local(2, 2).spatial(8, 4).local(1, 2)">
  return
}

// -----

!codes = !lowbit.reg<[16, 64], #lowbit.format<"u4", []>, "local(1, 4).column_local(2, 2).spatial(8, 4).local(1, 2)">
!shift = !lowbit.reg<[16, 1], f16, "local(2, 1).spatial(8, 1).replicated(4)">
func.func @decode_shift_element(%t: !codes, %a: !lowbit.reg<[16, 1], f32, "local(2, 1).spatial(8, 1).replicated(4)">) {
  // expected-error @below {{element of the shifts: expected f16, got f32}}
  %0 = "lowbit.decode"(%t, %a) {exponent = 0, operandSegmentSizes = array<i32: 1, 1>} : (!codes, !lowbit.reg<[16, 1], f32, "local(2, 1).spatial(8, 1).replicated(4)">)
    -> !lowbit.reg<[16, 64], f16, "local(1, 4).column_local(2, 2).spatial(8, 4).local(1, 2)">
  return
}

// -----

// A shift for a row is in the lanes that hold the row.
!codes = !lowbit.reg<[16, 64], #lowbit.format<"u4", []>, "local(1, 4).column_local(2, 2).spatial(8, 4).local(1, 2)">
!shift = !lowbit.reg<[16, 1], f16, "local(2, 1).spatial(8, 1).replicated(4)">
func.func @decode_shift_layout(%t: !codes, %a: !lowbit.reg<[16, 1], f16, "spatial(8, 1).replicated(4).local(2, 1)">) {
  // expected-error @below {{layout of the shifts: expected}}
  %0 = "lowbit.decode"(%t, %a) {exponent = 0, operandSegmentSizes = array<i32: 1, 1>} : (!codes, !lowbit.reg<[16, 1], f16, "spatial(8, 1).replicated(4).local(2, 1)">)
    -> !lowbit.reg<[16, 64], f16, "local(1, 4).column_local(2, 2).spatial(8, 4).local(1, 2)">
  return
}

// -----

!codes = !lowbit.reg<[16, 64], #lowbit.format<"u4", []>, "local(1, 4).column_local(2, 2).spatial(8, 4).local(1, 2)">
!shift = !lowbit.reg<[16, 1], f16, "local(2, 1).spatial(8, 1).replicated(4)">
func.func @decode_shift_columns(%t: !codes, %a: !lowbit.reg<[16, 4], f16, "local(2, 1).spatial(8, 4)">) {
  // expected-error @below {{layout of the shifts: expected}}
  %0 = "lowbit.decode"(%t, %a) {exponent = 0, operandSegmentSizes = array<i32: 1, 1>} : (!codes, !lowbit.reg<[16, 4], f16, "local(2, 1).spatial(8, 4)">)
    -> !lowbit.reg<[16, 64], f16, "local(1, 4).column_local(2, 2).spatial(8, 4).local(1, 2)">
  return
}

// -----

!codes = !lowbit.reg<[16, 64], #lowbit.format<"u4", []>, "local(1, 4).column_local(2, 2).spatial(8, 4).local(1, 2)">
!shift = !lowbit.reg<[16, 1], f16, "local(2, 1).spatial(8, 1).replicated(4)">
func.func @decode_shift_parts(%t: !codes, %a: !shift, %b: !shift, %c: !shift) {
  // expected-error @below {{shifts: expected a number that divides the 4 blocks of 16 columns, got 3}}
  %0 = "lowbit.decode"(%t, %a, %b, %c) {exponent = 0, operandSegmentSizes = array<i32: 1, 3>} : (!codes, !shift, !shift, !shift)
    -> !lowbit.reg<[16, 64], f16, "local(1, 4).column_local(2, 2).spatial(8, 4).local(1, 2)">
  return
}

// -----

// Slices and shapes.
!t = !lowbit.reg<[8, 8], f16, "spatial(8, 4).local(1, 2)">
func.func @slice_dim(%t: !t) {
  // expected-error @below {{'lowbit.slice' op dim: expected 0..1, got 2}}
  %0 = "lowbit.slice"(%t) {dim = 2, start = 0} : (!t) -> !t
  return
}

// -----

!t = !lowbit.reg<[8, 16], f16, "local(1, 2).spatial(8, 4).local(1, 2)">
func.func @slice_start(%t: !t) {
  // expected-error @below {{start: expected 0..8, got 16}}
  %0 = "lowbit.slice"(%t) {dim = 1, start = 16} : (!t) -> !lowbit.reg<[8, 8], f16, "spatial(8, 4).local(1, 2)">
  return
}

// -----

!t = !lowbit.reg<[8, 8], f16, "spatial(8, 4).local(1, 2)">
func.func @slice_rank(%t: !t) {
  // expected-error @below {{rank: expected 2, got 1}}
  %0 = "lowbit.slice"(%t) {dim = 0, start = 0} : (!t) -> !lowbit.reg<[8], f16, "spatial(8).replicated(4)">
  return
}

// -----

// Half of the threads cannot give away what they hold.
!t = !lowbit.reg<[8, 8], f16, "spatial(8, 4).local(1, 2)">
func.func @slice_threads(%t: !t) {
  // expected-error @below {{local digits alone do not cut [0, 4) of dim 0}}
  %0 = "lowbit.slice"(%t) {dim = 0, start = 0} : (!t) -> !lowbit.reg<[4, 8], f16, "replicated(2, rank=2).spatial(4, 4).local(1, 2)">
  return
}

// -----

!t = !lowbit.reg<[8, 16], f16, "local(1, 2).spatial(8, 4).local(1, 2)">
func.func @slice_layout(%t: !t) {
  // expected-error @below {{layout: expected spatial(8, 4).local(1, 2), got local(1, 2).spatial(8, 4)}}
  %0 = "lowbit.slice"(%t) {dim = 1, start = 8} : (!t) -> !lowbit.reg<[8, 8], f16, "local(1, 2).spatial(8, 4)">
  return
}

// -----

!codes = !lowbit.reg<[16, 64], #lowbit.format<"u4", []>, "local(1, 4).column_local(2, 2).spatial(8, 4).local(1, 2)">
func.func @slice_codes(%t: !codes) {
  // expected-error @below {{element of the source: expected f16 or bf16 or f32}}
  %0 = "lowbit.slice"(%t) {dim = 1, start = 0} : (!codes)
    -> !lowbit.reg<[16, 16], #lowbit.format<"u4", []>, "column_local(2, 2).spatial(8, 4).local(1, 2)">
  return
}

// -----

!t = !lowbit.reg<[8, 8], f16, "spatial(8, 4).local(1, 2)">
func.func @reshape_size(%t: !t) {
  // expected-error @below {{'lowbit.reshape' op cannot reshape (spatial(8, 4).local(1, 2)) of shape (8, 8) to (8, 4)}}
  %0 = "lowbit.reshape"(%t) : (!t) -> !lowbit.reg<[8, 4], f16, "spatial(8, 4)">
  return
}

// -----

!t = !lowbit.reg<[8, 8], f16, "spatial(8, 4).local(1, 2)">
func.func @reshape_layout(%t: !t) {
  // expected-error @below {{layout: expected spatial(32).local(2), got local(2).spatial(32)}}
  %0 = "lowbit.reshape"(%t) : (!t) -> !lowbit.reg<[64], f16, "local(2).spatial(32)">
  return
}

// -----

// Casts and arithmetic.
func.func @cast_kind(%t: !lowbit.reg<[8, 4], i8, "spatial(8, 4)">) {
  // expected-error @below {{'lowbit.cast' op kind: expected one of float, signed, unsigned, e4m3, e8m0, got rounded}}
  %0 = "lowbit.cast"(%t) {kind = "rounded"} : (!lowbit.reg<[8, 4], i8, "spatial(8, 4)">) -> !lowbit.reg<[8, 4], f32, "spatial(8, 4)">
  return
}

// -----

func.func @cast_to_the_same(%t: !lowbit.reg<[8, 4], f16, "spatial(8, 4)">) {
  // expected-error @below {{cast: expected two types, got f16 to f16}}
  %0 = "lowbit.cast"(%t) {kind = "float"} : (!lowbit.reg<[8, 4], f16, "spatial(8, 4)">) -> !lowbit.reg<[8, 4], f16, "spatial(8, 4)">
  return
}

// -----

func.func @cast_numbers_as_integers(%t: !lowbit.reg<[8, 4], f16, "spatial(8, 4)">) {
  // expected-error @below {{signed: expected i8 or i16 or i32 to f32, got f16 to f32}}
  %0 = "lowbit.cast"(%t) {kind = "signed"} : (!lowbit.reg<[8, 4], f16, "spatial(8, 4)">) -> !lowbit.reg<[8, 4], f32, "spatial(8, 4)">
  return
}

// -----

func.func @cast_bytes(%t: !lowbit.reg<[8, 4], i8, "spatial(8, 4)">) {
  // expected-error @below {{e8m0: expected i8 to f32, got i8 to f16}}
  %0 = "lowbit.cast"(%t) {kind = "e8m0"} : (!lowbit.reg<[8, 4], i8, "spatial(8, 4)">) -> !lowbit.reg<[8, 4], f16, "spatial(8, 4)">
  return
}

// -----

func.func @cast_layout(%t: !lowbit.reg<[8, 4], f16, "spatial(8, 4)">) {
  // expected-error @below {{layout: expected spatial(8, 4), got column_spatial(8, 4)}}
  %0 = "lowbit.cast"(%t) {kind = "float"} : (!lowbit.reg<[8, 4], f16, "spatial(8, 4)">) -> !lowbit.reg<[8, 4], f32, "column_spatial(8, 4)">
  return
}

// -----

!t = !lowbit.reg<[8, 4], f32, "spatial(8, 4)">
func.func @add_element(%a: !t, %b: !lowbit.reg<[8, 4], f16, "spatial(8, 4)">) {
  // expected-error @below {{'lowbit.add' op element: expected f32, got f16}}
  %0 = "lowbit.add"(%a, %b) : (!t, !lowbit.reg<[8, 4], f16, "spatial(8, 4)">) -> !t
  return
}

// -----

// A row vector is broadcast only if every thread has its part of it already.
!t = !lowbit.reg<[8, 4], f32, "spatial(8, 4)">
!row = !lowbit.reg<[1, 4], f32, "spatial(1, 4).replicated(8)">
func.func @mul_moves(%a: !t, %b: !row) {
  // expected-error @below {{'lowbit.mul' op (spatial(1, 4).replicated(8)) to (spatial(8, 4)) moves elements between threads}}
  %0 = "lowbit.mul"(%a, %b) : (!t, !row) -> !t
  return
}

// -----

!t = !lowbit.reg<[8, 4], f32, "spatial(8, 4)">
func.func @fma_shape(%a: !t, %b: !lowbit.reg<[4, 8], f32, "spatial(4, 8)">) {
  // expected-error @below {{'lowbit.fma' op cannot broadcast (4, 8) to (8, 4): only dims of size 1 grow}}
  %0 = "lowbit.fma"(%a, %b, %a) : (!t, !lowbit.reg<[4, 8], f32, "spatial(4, 8)">, !t) -> !t
  return
}

// -----

!t = !lowbit.reg<[8, 4], i8, "spatial(8, 4)">
func.func @exp_of_bytes(%t: !t) {
  // expected-error @below {{'lowbit.exp' op element of the result: expected f16 or bf16 or f32, got i8}}
  %0 = "lowbit.exp"(%t) : (!t) -> !t
  return
}

// -----

!t = !lowbit.reg<[8, 4], f32, "spatial(8, 4)">
!condition = !lowbit.reg<[8, 4], i1, "spatial(8, 4)">
func.func @compare_predicate(%t: !t) {
  // expected-error @below {{'lowbit.compare' op predicate: expected one of lt, le, eq, ne, gt, ge, got less}}
  %0 = "lowbit.compare"(%t, %t) {predicate = "less"} : (!t, !t) -> !condition
  return
}

// -----

!t = !lowbit.reg<[8, 4], f32, "spatial(8, 4)">
func.func @compare_result(%t: !t) {
  // expected-error @below {{'lowbit.compare' op element of the result: expected i1, got f32}}
  %0 = "lowbit.compare"(%t, %t) {predicate = "lt"} : (!t, !t) -> !t
  return
}

// -----

!condition = !lowbit.reg<[8, 4], i1, "spatial(8, 4)">
func.func @compare_conditions(%t: !condition) {
  // expected-error @below {{'lowbit.compare' op element of the operands: expected f16 or bf16 or f32, got i1}}
  %0 = "lowbit.compare"(%t, %t) {predicate = "eq"} : (!condition, !condition) -> !condition
  return
}

// -----

!t = !lowbit.reg<[8, 4], f32, "spatial(8, 4)">
func.func @select_by_numbers(%t: !t) {
  // expected-error @below {{'lowbit.select' op element: expected i1, got f32}}
  %0 = "lowbit.select"(%t, %t, %t) : (!t, !t, !t) -> !t
  return
}

// -----

!t = !lowbit.reg<[8, 4], f32, "spatial(8, 4)">
!half = !lowbit.reg<[8, 4], f16, "spatial(8, 4)">
func.func @select_element(%condition: !lowbit.reg<[8, 4], i1, "spatial(8, 4)">, %t: !t, %half: !half) {
  // expected-error @below {{'lowbit.select' op element: expected f32, got f16}}
  %0 = "lowbit.select"(%condition, %t, %half) : (!lowbit.reg<[8, 4], i1, "spatial(8, 4)">, !t, !half) -> !t
  return
}

// -----

!t = !lowbit.reg<[8, 4], f32, "spatial(8, 4)">
func.func @reduce_threads(%t: !t) {
  // expected-error @below {{'lowbit.reduce' op dim 0: expected within each thread, got spread over threads by spatial(8, 4)}}
  %0 = "lowbit.reduce"(%t) {dim = 0} : (!t) -> !lowbit.reg<[1, 4], f32, "replicated(8, rank=2).spatial(1, 4)">
  return
}

// -----

!t = !lowbit.reg<[8, 8], f32, "spatial(8, 4).local(1, 2)">
func.func @reduce_dim(%t: !t) {
  // expected-error @below {{dim: expected 0..1, got 2}}
  %0 = "lowbit.reduce"(%t) {dim = 2} : (!t) -> !t
  return
}

// -----

!t = !lowbit.reg<[2, 32], f32, "local(2, 1).spatial(1, 32)">
func.func @reduce_layout(%t: !t) {
  // expected-error @below {{layout: expected spatial(1, 32), got spatial(1, 8).replicated(4).local(1, 4)}}
  %0 = "lowbit.reduce"(%t) {dim = 0} : (!t) -> !lowbit.reg<[1, 32], f32, "spatial(1, 8).local(1, 4).replicated(4)">
  return
}

// -----

// The tensor core. Fragments: a [16, 16], b [8, 16] as [n, k], c [16, 8].
!a = !lowbit.reg<[16, 16], f16, "column_local(2, 2).spatial(8, 4).local(1, 2)">
!b = !lowbit.reg<[8, 16], f16, "local(1, 2).spatial(8, 4).local(1, 2)">
!c = !lowbit.reg<[16, 8], f32, "local(2, 1).spatial(8, 4).local(1, 2)">
func.func @mma_result(%a: !a, %b: !b, %c: !c) {
  // expected-error @below {{'lowbit.mma' op result: expected Reg(element='f32'}}
  %0 = "lowbit.mma"(%a, %b, %c) : (!a, !b, !c) -> !lowbit.reg<[16, 8], f16, "local(2, 1).spatial(8, 4).local(1, 2)">
  return
}

// -----

!a = !lowbit.reg<[16, 16], f16, "column_local(2, 2).spatial(8, 4).local(1, 2)">
!b = !lowbit.reg<[8, 16], f16, "local(1, 2).spatial(8, 4).local(1, 2)">
!c = !lowbit.reg<[16, 8], f16, "local(2, 1).spatial(8, 4).local(1, 2)">
func.func @mma_accumulator(%a: !a, %b: !b, %c: !c) {
  // expected-error @below {{element of c: expected f32, got f16}}
  %0 = "lowbit.mma"(%a, %b, %c) : (!a, !b, !c) -> !c
  return
}

// -----

!a = !lowbit.reg<[16, 16], f32, "column_local(2, 2).spatial(8, 4).local(1, 2)">
!b = !lowbit.reg<[8, 16], f32, "local(1, 2).spatial(8, 4).local(1, 2)">
!c = !lowbit.reg<[16, 8], f32, "local(2, 1).spatial(8, 4).local(1, 2)">
func.func @mma_b(%a: !a, %b: !b, %c: !c) {
  // expected-error @below {{element of b: expected f16 or bf16, got f32}}
  %0 = "lowbit.mma"(%a, %b, %c) : (!a, !b, !c) -> !c
  return
}

// -----

!a = !lowbit.reg<[16, 16], bf16, "column_local(2, 2).spatial(8, 4).local(1, 2)">
!b = !lowbit.reg<[8, 16], f16, "local(1, 2).spatial(8, 4).local(1, 2)">
!c = !lowbit.reg<[16, 8], f32, "local(2, 1).spatial(8, 4).local(1, 2)">
func.func @mma_a(%a: !a, %b: !b, %c: !c) {
  // expected-error @below {{element of a: expected f16 or f32, got bf16}}
  %0 = "lowbit.mma"(%a, %b, %c) : (!a, !b, !c) -> !c
  return
}

// -----

!a = !lowbit.reg<[1, 16, 16], f16, "column_local(1, 2, 2).spatial(1, 8, 4).local(1, 1, 2)">
!b = !lowbit.reg<[8, 16], f16, "local(1, 2).spatial(8, 4).local(1, 2)">
!c = !lowbit.reg<[16, 8], f32, "local(2, 1).spatial(8, 4).local(1, 2)">
func.func @mma_ranks(%a: !a, %b: !b, %c: !c) {
  // expected-error @below {{ranks: expected equal and at least 2, got (3, 2)}}
  %0 = "lowbit.mma"(%a, %b, %c) : (!a, !b, !c) -> !c
  return
}

// -----

!a = !lowbit.reg<[16, 32], f16, "local(1, 2).column_local(2, 2).spatial(8, 4).local(1, 2)">
!b = !lowbit.reg<[8, 16], f16, "local(1, 2).spatial(8, 4).local(1, 2)">
!c = !lowbit.reg<[16, 8], f32, "local(2, 1).spatial(8, 4).local(1, 2)">
func.func @mma_k(%a: !a, %b: !b, %c: !c) {
  // expected-error @below {{b: expected [8, 32], got [8, 16]}}
  %0 = "lowbit.mma"(%a, %b, %c) : (!a, !b, !c) -> !c
  return
}

// -----

!a = !lowbit.reg<[16, 16], f16, "column_local(2, 2).spatial(8, 4).local(1, 2)">
!b = !lowbit.reg<[8, 16], f16, "local(1, 2).spatial(8, 4).local(1, 2)">
!c = !lowbit.reg<[16, 16], f32, "local(1, 2).local(2, 1).spatial(8, 4).local(1, 2)">
func.func @mma_n(%a: !a, %b: !b, %c: !c) {
  // expected-error @below {{c: expected [16, 8], got [16, 16]}}
  %0 = "lowbit.mma"(%a, %b, %c) : (!a, !b, !c) -> !c
  return
}

// -----

!a = !lowbit.reg<[16, 16], f16, "local(2, 2).spatial(8, 4).local(1, 2)">
!b = !lowbit.reg<[8, 16], f16, "local(1, 2).spatial(8, 4).local(1, 2)">
!c = !lowbit.reg<[16, 8], f32, "local(2, 1).spatial(8, 4).local(1, 2)">
func.func @mma_layout(%a: !a, %b: !b, %c: !c) {
  // expected-error @below {{layout of a: expected a multiple of column_local(2, 2).spatial(8, 4).local(1, 2), got local(2, 2).spatial(8, 4).local(1, 2)}}
  %0 = "lowbit.mma"(%a, %b, %c) : (!a, !b, !c) -> !c
  return
}

// -----

// Two warps that share k would each have half of the sum; put a dim of size 2 in front instead, and add up.
!a = !lowbit.reg<[16, 32], f16, "spatial(1, 2).column_local(2, 2).spatial(8, 4).local(1, 2)">
!b = !lowbit.reg<[8, 32], f16, "spatial(1, 2).local(1, 2).spatial(8, 4).local(1, 2)">
!c = !lowbit.reg<[16, 8], f32, "replicated(2, rank=2).local(2, 1).spatial(8, 4).local(1, 2)">
func.func @mma_split_k(%a: !a, %b: !b, %c: !c) {
  // expected-error @below {{k of a: expected within each warp, got spread over warps: spatial(1, 2)}}
  %0 = "lowbit.mma"(%a, %b, %c) : (!a, !b, !c) -> !c
  return
}

// -----

// Two warps with 16 rows each: all operands have to be where the results are.
!a = !lowbit.reg<[32, 16], f16, "local(2, 1).replicated(2).column_local(2, 2).spatial(8, 4).local(1, 2)">
!b = !lowbit.reg<[8, 16], f16, "replicated(2, rank=2).local(1, 2).spatial(8, 4).local(1, 2)">
!c = !lowbit.reg<[32, 8], f32, "spatial(2, 1).local(2, 1).spatial(8, 4).local(1, 2)">
func.func @mma_warps(%a: !a, %b: !b, %c: !c) {
  // expected-error @below {{warps of a: expected the result's, spatial(2, 1), got replicated(2, rank=2).local(2, 1)}}
  %0 = "lowbit.mma"(%a, %b, %c) : (!a, !b, !c) -> !c
  return
}

// -----

!b = !lowbit.reg<[8, 16], f32, "local(1, 2).spatial(8, 4).local(1, 2)">
func.func @sums_source(%b: !b) {
  // expected-error @below {{'lowbit.row_sums' op element of the source: expected f16 or bf16, got f32}}
  %0 = "lowbit.row_sums"(%b) : (!b) -> !lowbit.reg<[1, 8], f32, "replicated(8, rank=2).spatial(1, 4).local(1, 2)">
  return
}

// -----

!b = !lowbit.reg<[8, 16], f16, "local(1, 2).spatial(8, 4).local(1, 2)">
func.func @sums_element(%b: !b) {
  // expected-error @below {{element of the result: expected f32, got f16}}
  %0 = "lowbit.row_sums"(%b) : (!b) -> !lowbit.reg<[1, 8], f16, "replicated(8, rank=2).spatial(1, 4).local(1, 2)">
  return
}

// -----

!b = !lowbit.reg<[8, 16], f16, "local(1, 2).spatial(8, 4).local(1, 2)">
func.func @sums_shape(%b: !b) {
  // expected-error @below {{result: expected [1, 8], got [8, 1]}}
  %0 = "lowbit.row_sums"(%b) : (!b) -> !lowbit.reg<[8, 1], f32, "spatial(8, 1).replicated(4)">
  return
}

// -----

!b = !lowbit.reg<[8, 16], f16, "local(1, 2).spatial(8, 4).local(1, 2)">
func.func @sums_layout(%b: !b) {
  // expected-error @below {{layout of the result: expected replicated(8, rank=2).spatial(1, 4).local(1, 2), got spatial(1, 8).replicated(4)}}
  %0 = "lowbit.row_sums"(%b) : (!b) -> !lowbit.reg<[1, 8], f32, "spatial(1, 8).replicated(4)">
  return
}

// -----

// Warpgroups. a [64, 32] in registers, b [1, 8, 64] in shared memory: 64 columns of k, of which some are taken; c [64, 8].
!a = !lowbit.reg<[64, 32], f16, "spatial(4, 1).column_local(2, 4).spatial(8, 4).local(1, 2)">
!b = !lowbit.shared<[1, 8, 64], f16, [512, 64, 1], 128>
!c = !lowbit.reg<[64, 8], f32, "spatial(4, 1).local(2, 1).spatial(8, 4).local(1, 2)">
!d = !lowbit.reg<[64, 8], f16, "spatial(4, 1).local(2, 1).spatial(8, 4).local(1, 2)">
func.func @warpgroup_result(%a: !a, %b: !b, %c: !c) {
  // expected-error @below {{'lowbit.warpgroup_mma' op result: expected Reg(element='f32'}}
  %0 = "lowbit.warpgroup_mma"(%a, %b, %c) {start = 0} : (!a, !b, !c) -> !d
  return
}

// -----

!a = !lowbit.reg<[64, 32], f16, "spatial(4, 1).column_local(2, 4).spatial(8, 4).local(1, 2)">
!b = !lowbit.shared<[1, 8, 64], f16, [512, 64, 1], 128>
!c = !lowbit.reg<[64, 8], f16, "spatial(4, 1).local(2, 1).spatial(8, 4).local(1, 2)">
func.func @warpgroup_accumulator(%a: !a, %b: !b, %c: !c) {
  // expected-error @below {{element of c: expected f32, got f16}}
  %0 = "lowbit.warpgroup_mma"(%a, %b, %c) {start = 0} : (!a, !b, !c) -> !c
  return
}

// -----

!a = !lowbit.reg<[64, 32], bf16, "spatial(4, 1).column_local(2, 4).spatial(8, 4).local(1, 2)">
!b = !lowbit.shared<[1, 8, 64], f16, [512, 64, 1], 128>
!c = !lowbit.reg<[64, 8], f32, "spatial(4, 1).local(2, 1).spatial(8, 4).local(1, 2)">
func.func @warpgroup_a(%a: !a, %b: !b, %c: !c) {
  // expected-error @below {{element of a: expected f16, got bf16}}
  %0 = "lowbit.warpgroup_mma"(%a, %b, %c) {start = 0} : (!a, !b, !c) -> !c
  return
}

// -----

!a = !lowbit.reg<[64, 32], f32, "spatial(4, 1).column_local(2, 4).spatial(8, 4).local(1, 2)">
!b = !lowbit.shared<[1, 8, 32], f32, [256, 32, 1], 128>
!c = !lowbit.reg<[64, 8], f32, "spatial(4, 1).local(2, 1).spatial(8, 4).local(1, 2)">
func.func @warpgroup_b(%a: !a, %b: !b, %c: !c) {
  // expected-error @below {{element of b: expected f16 or bf16, got f32}}
  %0 = "lowbit.warpgroup_mma"(%a, %b, %c) {start = 0} : (!a, !b, !c) -> !c
  return
}

// -----

!a = !lowbit.reg<[64, 32], f16, "spatial(4, 1).column_local(2, 4).spatial(8, 4).local(1, 2)">
!b = !lowbit.shared<[1, 8, 64], f16, [512, 64, 1], 0>
!c = !lowbit.reg<[64, 8], f32, "spatial(4, 1).local(2, 1).spatial(8, 4).local(1, 2)">
func.func @warpgroup_swizzle(%a: !a, %b: !b, %c: !c) {
  // expected-error @below {{swizzle of b: expected 128, got 0}}
  %0 = "lowbit.warpgroup_mma"(%a, %b, %c) {start = 0} : (!a, !b, !c) -> !c
  return
}

// -----

!a = !lowbit.reg<[64, 32], f16, "spatial(4, 1).column_local(2, 4).spatial(8, 4).local(1, 2)">
!b = !lowbit.shared<[8, 64], f16, [64, 1], 128>
!c = !lowbit.reg<[64, 8], f32, "spatial(4, 1).local(2, 1).spatial(8, 4).local(1, 2)">
func.func @warpgroup_rank(%a: !a, %b: !b, %c: !c) {
  // expected-error @below {{rank of b: expected 3, got 2}}
  %0 = "lowbit.warpgroup_mma"(%a, %b, %c) {start = 0} : (!a, !b, !c) -> !c
  return
}

// -----

!a = !lowbit.reg<[64, 32], f16, "spatial(4, 1).column_local(2, 4).spatial(8, 4).local(1, 2)">
!b = !lowbit.shared<[1, 8, 32], f16, [512, 64, 1], 128>
!c = !lowbit.reg<[64, 8], f32, "spatial(4, 1).local(2, 1).spatial(8, 4).local(1, 2)">
func.func @warpgroup_width(%a: !a, %b: !b, %c: !c) {
  // expected-error @below {{b: expected rows of 64 columns: [.., k / 64, n, 64], got [1, 8, 32]}}
  %0 = "lowbit.warpgroup_mma"(%a, %b, %c) {start = 0} : (!a, !b, !c) -> !c
  return
}

// -----

!a = !lowbit.reg<[64, 32], f16, "spatial(4, 1).column_local(2, 4).spatial(8, 4).local(1, 2)">
!b = !lowbit.shared<[1, 4, 64], f16, [512, 64, 1], 128>
!c = !lowbit.reg<[64, 8], f32, "spatial(4, 1).local(2, 1).spatial(8, 4).local(1, 2)">
func.func @warpgroup_n(%a: !a, %b: !b, %c: !c) {
  // expected-error @below {{n: expected a multiple of 8 up to 256, got 4}}
  %0 = "lowbit.warpgroup_mma"(%a, %b, %c) {start = 0} : (!a, !b, !c) -> !c
  return
}

// -----

!a = !lowbit.reg<[64, 32], f16, "spatial(4, 1).column_local(2, 4).spatial(8, 4).local(1, 2)">
!b = !lowbit.shared<[1, 16, 64], f16, [1024, 64, 1], 128>
!c = !lowbit.reg<[64, 8], f32, "spatial(4, 1).local(2, 1).spatial(8, 4).local(1, 2)">
func.func @warpgroup_columns(%a: !a, %b: !b, %c: !c) {
  // expected-error @below {{result: expected ['m', 16], got [64, 8]}}
  %0 = "lowbit.warpgroup_mma"(%a, %b, %c) {start = 0} : (!a, !b, !c) -> !c
  return
}

// -----

!a = !lowbit.reg<[64, 32], f16, "spatial(4, 1).column_local(2, 4).spatial(8, 4).local(1, 2)">
!b = !lowbit.shared<[1, 8, 64], f16, [512, 64, 1], 128>
!c = !lowbit.reg<[64, 8], f32, "spatial(4, 1).local(2, 1).spatial(8, 4).local(1, 2)">
func.func @warpgroup_start(%a: !a, %b: !b, %c: !c) {
  // expected-error @below {{start: expected 0..32, got 48}}
  %0 = "lowbit.warpgroup_mma"(%a, %b, %c) {start = 48} : (!a, !b, !c) -> !c
  return
}

// -----

!a = !lowbit.reg<[64, 32], f16, "spatial(4, 1).column_local(2, 4).spatial(8, 4).local(1, 2)">
!b = !lowbit.shared<[1, 8, 64], f16, [512, 64, 1], 128>
!c = !lowbit.reg<[64, 8], f32, "spatial(4, 1).local(2, 1).spatial(8, 4).local(1, 2)">
func.func @warpgroup_between_fragments(%a: !a, %b: !b, %c: !c) {
  // expected-error @below {{start and columns: expected multiples of 16, got (8, 32)}}
  %0 = "lowbit.warpgroup_mma"(%a, %b, %c) {start = 8} : (!a, !b, !c) -> !c
  return
}

// -----

!a = !lowbit.reg<[128, 32], f16, "local(2, 1).spatial(4, 1).column_local(2, 4).spatial(8, 4).local(1, 2)">
!b = !lowbit.shared<[1, 8, 64], f16, [512, 64, 1], 128>
!c = !lowbit.reg<[64, 8], f32, "spatial(4, 1).local(2, 1).spatial(8, 4).local(1, 2)">
func.func @warpgroup_rows(%a: !a, %b: !b, %c: !c) {
  // expected-error @below {{a: expected [64, 'k'], got [128, 32]}}
  %0 = "lowbit.warpgroup_mma"(%a, %b, %c) {start = 0} : (!a, !b, !c) -> !c
  return
}

// -----

!a = !lowbit.reg<[64, 32], f16, "spatial(4, 1).local(2, 4).spatial(8, 4).local(1, 2)">
!b = !lowbit.shared<[1, 8, 64], f16, [512, 64, 1], 128>
!c = !lowbit.reg<[64, 8], f32, "spatial(4, 1).local(2, 1).spatial(8, 4).local(1, 2)">
func.func @warpgroup_layout(%a: !a, %b: !b, %c: !c) {
  // expected-error @below {{layout of a: expected a multiple of column_local(2, 2).spatial(8, 4).local(1, 2)}}
  %0 = "lowbit.warpgroup_mma"(%a, %b, %c) {start = 0} : (!a, !b, !c) -> !c
  return
}

// -----

!a = !lowbit.reg<[32, 32], f16, "spatial(2, 1).replicated(2).column_local(2, 4).spatial(8, 4).local(1, 2)">
!b = !lowbit.shared<[1, 16, 64], f16, [1024, 64, 1], 128>
!c = !lowbit.reg<[32, 16], f32, "spatial(2, 2).local(2, 1).spatial(8, 4).local(1, 2)">
func.func @warpgroup_split_columns(%a: !a, %b: !b, %c: !c) {
  // expected-error @below {{columns of c: expected within each warp, got spread over warps}}
  %0 = "lowbit.warpgroup_mma"(%a, %b, %c) {start = 0} : (!a, !b, !c) -> !c
  return
}

// -----

!a = !lowbit.reg<[32, 32], f16, "spatial(2, 2).column_local(2, 2).spatial(8, 4).local(1, 2)">
!b = !lowbit.shared<[1, 8, 64], f16, [512, 64, 1], 128>
!c = !lowbit.reg<[32, 8], f32, "spatial(2, 1).replicated(2).local(2, 1).spatial(8, 4).local(1, 2)">
func.func @warpgroup_split_k(%a: !a, %b: !b, %c: !c) {
  // expected-error @below {{k of a: expected within each warp, got spread over warps}}
  %0 = "lowbit.warpgroup_mma"(%a, %b, %c) {start = 0} : (!a, !b, !c) -> !c
  return
}

// -----

!a = !lowbit.reg<[64, 32], f16, "column_spatial(2, 1).replicated(2).local(2, 1).column_local(2, 4).spatial(8, 4).local(1, 2)">
!b = !lowbit.shared<[1, 8, 64], f16, [512, 64, 1], 128>
!c = !lowbit.reg<[64, 8], f32, "spatial(4, 1).local(2, 1).spatial(8, 4).local(1, 2)">
func.func @warpgroup_warps(%a: !a, %b: !b, %c: !c) {
  // expected-error @below {{warps of a: expected the result's}}
  %0 = "lowbit.warpgroup_mma"(%a, %b, %c) {start = 0} : (!a, !b, !c) -> !c
  return
}

// -----

// Four warps take part in an instruction and read the same b: two steps are work for two warpgroups.
!a = !lowbit.reg<[2, 32, 32], f16, "spatial(2, 2, 1).column_local(1, 2, 4).spatial(1, 8, 4).local(1, 1, 2)">
!b = !lowbit.shared<[2, 1, 8, 64], f16, [512, 512, 64, 1], 128>
!c = !lowbit.reg<[2, 32, 8], f32, "spatial(2, 2, 1).local(1, 2, 1).spatial(1, 8, 4).local(1, 1, 2)">
func.func @warpgroup_halves(%a: !a, %b: !b, %c: !c) {
  // expected-error @below {{dim 0 of the result: expected the same in all of a warpgroup, got spatial(2, 2, 1)}}
  %0 = "lowbit.warpgroup_mma"(%a, %b, %c) {start = 0} : (!a, !b, !c) -> !c
  return
}

// -----

!a = !lowbit.reg<[2, 64, 32], f16, "local(2, 1, 1).spatial(1, 4, 1).column_local(1, 2, 4).spatial(1, 8, 4).local(1, 1, 2)">
!b = !lowbit.shared<[2, 1, 8, 64], f16, [512, 512, 64, 1], 128>
!c = !lowbit.reg<[2, 64, 8], f32, "local(2, 1, 1).spatial(1, 4, 1).local(1, 2, 1).spatial(1, 8, 4).local(1, 1, 2)">
func.func @warpgroup_two_steps(%a: !a, %b: !b, %c: !c) {
  // expected-error @below {{dim 0 of the result: expected the same in all of a warpgroup, got spatial(1, 4, 1).local(2, 2, 1)}}
  %0 = "lowbit.warpgroup_mma"(%a, %b, %c) {start = 0} : (!a, !b, !c) -> !c
  return
}

// -----

!b = !lowbit.shared<[1, 8, 64], f16, [512, 64, 1], 128>
func.func @warpgroup_sums_element(%b: !b) {
  // expected-error @below {{'lowbit.warpgroup_row_sums' op element of the result: expected f32, got f16}}
  %0 = "lowbit.warpgroup_row_sums"(%b) {start = 0, columns = 32} : (!b) -> !lowbit.reg<[1, 8], f16, "replicated(32, rank=2).spatial(1, 4).local(1, 2)">
  return
}

// -----

!b = !lowbit.shared<[1, 8, 64], f16, [512, 64, 1], 128>
func.func @warpgroup_sums_columns(%b: !b) {
  // expected-error @below {{columns: expected at least 16, got 0}}
  %0 = "lowbit.warpgroup_row_sums"(%b) {start = 0, columns = 0} : (!b) -> !lowbit.reg<[1, 8], f32, "replicated(32, rank=2).spatial(1, 4).local(1, 2)">
  return
}

// -----

!b = !lowbit.shared<[1, 8, 64], f16, [512, 64, 1], 128>
func.func @warpgroup_sums_end(%b: !b) {
  // expected-error @below {{start: expected 0..32, got 48}}
  %0 = "lowbit.warpgroup_row_sums"(%b) {start = 48, columns = 32} : (!b) -> !lowbit.reg<[1, 8], f32, "replicated(32, rank=2).spatial(1, 4).local(1, 2)">
  return
}

// -----

// Registers: a word for every piece.
func.func @pair_words(%w: i32) {
  // expected-error @below {{'lowbit.decode_pair' op words: expected one per piece (2), got 1}}
  %0 = "lowbit.decode_pair"(%w) {format = #lowbit.format<"u6", []>, register = 7, exponent = 0, operandSegmentSizes = array<i32: 1>} : (i32) -> vector<2xf16>
  return
}

// -----

func.func @pair_register(%w: i32) {
  // expected-error @below {{register: expected 0..3, got 4}}
  %0 = "lowbit.decode_pair"(%w) {format = #lowbit.format<"u4", []>, register = 4, exponent = 0, operandSegmentSizes = array<i32: 1>} : (i32) -> vector<2xf16>
  return
}

// -----

func.func @pair_exponent(%w: i32) {
  // expected-error @below {{exponent: expected -1022..1023, got -2000}}
  %0 = "lowbit.decode_pair"(%w) {format = #lowbit.format<"u4", []>, register = 0, exponent = -2000, operandSegmentSizes = array<i32: 1>} : (i32) -> vector<2xf16>
  return
}

// -----

func.func @pair_result(%w: i32) {
  // expected-error @below {{result: expected vector<2xf16> or vector<2xbf16> or vector<2xf32>, got vector<4xf16>}}
  %0 = "lowbit.decode_pair"(%w) {format = #lowbit.format<"u4", []>, register = 0, exponent = 0, operandSegmentSizes = array<i32: 1>} : (i32) -> vector<4xf16>
  return
}

// -----

func.func @shifted_pair_kind(%w: i32, %s: vector<2xbf16>) {
  // expected-error @below {{'lowbit.decode_shifted_pair' op shift: expected vector<2xf16>, got vector<2xbf16>}}
  %0 = "lowbit.decode_shifted_pair"(%s, %w) {format = #lowbit.format<"u4", []>, register = 0, exponent = 0, operandSegmentSizes = array<i32: 1, 1>} : (vector<2xbf16>, i32) -> vector<2xf16>
  return
}

// -----

func.func @shifted_pair_float(%w: i32, %s: vector<2xf16>) {
  // expected-error @below {{format with shifts: expected an integer one, got f8e4m3}}
  %0 = "lowbit.decode_shifted_pair"(%s, %w) {format = #lowbit.format<"f8e4m3", []>, register = 0, exponent = 0, operandSegmentSizes = array<i32: 1, 1>} : (vector<2xf16>, i32) -> vector<2xf16>
  return
}

// -----

// Tables.
!table = !lowbit.shared<[256, 32], i32, [32, 1], 0>
func.func @table_of_integers(%table: !table) {
  // expected-error @below {{'lowbit.fill_table' op format: expected one with a table of values, got u4}}
  "lowbit.fill_table"(%table) {format = #lowbit.format<"u4", []>, element = "f16", exponent = 0} : (!table) -> ()
  return
}

// -----

!table = !lowbit.shared<[256, 32], i32, [32, 1], 0>
func.func @table_element(%table: !table) {
  // expected-error @below {{element of the table: expected f16 or bf16 or f32, got i8}}
  "lowbit.fill_table"(%table) {format = #lowbit.format<"nf4", []>, element = "i8", exponent = 0} : (!table) -> ()
  return
}

// -----

!table = !lowbit.shared<[256, 32], i32, [32, 1], 0>
func.func @table_exponent(%table: !table) {
  // expected-error @below {{exponent: expected -1022..1023, got 1024}}
  "lowbit.fill_table"(%table) {format = #lowbit.format<"nf4", []>, element = "f16", exponent = 1024} : (!table) -> ()
  return
}

// -----

// In f32 an entry is one number.
!table = !lowbit.shared<[256, 32], i32, [32, 1], 0>
func.func @table_shape(%table: !table) {
  // expected-error @below {{table from nf4 to f32: expected !lowbit.shared<[16, 32], i32, [32, 1]}}
  "lowbit.fill_table"(%table) {format = #lowbit.format<"nf4", []>, element = "f32", exponent = 0} : (!table) -> ()
  return
}

// -----

!codes = !lowbit.reg<[16, 64], #lowbit.format<"nf4", []>, "local(1, 4).column_local(2, 2).spatial(8, 4).local(1, 2)">
!numbers = !lowbit.reg<[16, 64], f16, "local(1, 4).column_local(2, 2).spatial(8, 4).local(1, 2)">
!table = !lowbit.shared<[16, 32], i32, [32, 1], 0>
func.func @lookup_table(%codes: !codes, %table: !table) {
  // expected-error @below {{table from nf4 to f16: expected !lowbit.shared<[256, 32], i32, [32, 1]}}
  %0 = "lowbit.lookup"(%codes, %table) : (!codes, !table) -> !numbers
  return
}

// -----

!table = !lowbit.shared<[256, 32], i32, [32, 1], 0>
func.func @lookup_numbers(%t: !lowbit.reg<[8, 4], f16, "spatial(8, 4)">, %table: !table) {
  // expected-error @below {{'lowbit.lookup' op source: expected codes of a low-bit format, got f16}}
  %0 = "lowbit.lookup"(%t, %table) : (!lowbit.reg<[8, 4], f16, "spatial(8, 4)">, !table) -> !lowbit.reg<[8, 4], f16, "spatial(8, 4)">
  return
}

// -----

func.func @lookup_pointer(%table: !llvm.ptr<1>, %column: i32, %word: i32) {
  // expected-error @below {{table: expected !llvm.ptr<3>, got !llvm.ptr<1>}}
  %0 = "lowbit.lookup_pair"(%table, %column, %word) {format = #lowbit.format<"nf4", []>, register = 2, operandSegmentSizes = array<i32: 1, 1, 1>}
    : (!llvm.ptr<1>, i32, i32) -> vector<2xf16>
  return
}

// -----

func.func @lookup_format(%table: !llvm.ptr<3>, %column: i32, %word: i32) {
  // expected-error @below {{'lowbit.lookup_pair' op format: expected one with a table of values, got u4}}
  %0 = "lowbit.lookup_pair"(%table, %column, %word) {format = #lowbit.format<"u4", []>, register = 2, operandSegmentSizes = array<i32: 1, 1, 1>}
    : (!llvm.ptr<3>, i32, i32) -> vector<2xf16>
  return
}

// -----

func.func @lookup_register(%table: !llvm.ptr<3>, %column: i32, %word: i32) {
  // expected-error @below {{register: expected 0..3, got 4}}
  %0 = "lowbit.lookup_pair"(%table, %column, %word) {format = #lowbit.format<"nf4", []>, register = 4, operandSegmentSizes = array<i32: 1, 1, 1>}
    : (!llvm.ptr<3>, i32, i32) -> vector<2xf16>
  return
}

// -----

// Attributes that no operation declares, ...
func.func @unknown_attribute() {
  // expected-error @below {{'lowbit.barrier' op attributes: expected none but async_proxy, scope, warps, got wraps}}
  "lowbit.barrier"() {scope = "block", warps = 1, wraps = 2} : () -> ()
  return
}

// -----

func.func @unknown_attribute_of_none() {
  // expected-error @below {{'lowbit.commit' op attributes: expected none, got lowbit.group}}
  "lowbit.commit"() {lowbit.group = 2} : () -> ()
  return
}

// -----

// ... are of another kind than declared, ...
func.func @flag() {
  // expected-error @below {{async_proxy: expected a unit attribute, got true}}
  "lowbit.barrier"() {scope = "block", warps = 1, async_proxy = true} : () -> ()
  return
}

// -----

func.func @choice(%w: i32) {
  // expected-error @below {{offset: expected one of "subtracted", "deferred", "raw", got "late"}}
  %0 = "lowbit.decode_pair"(%w) {format = #lowbit.format<"u4", []>, register = 0, exponent = 0, offset = "late",
    operandSegmentSizes = array<i32: 1>} : (i32) -> vector<2xf16>
  return
}

// -----

// ... or are missing. Another dialect's may be there.
func.func @missing_attribute() {
  "lowbit.commit"() {nvvm.note = 2} : () -> ()
  // expected-error @below {{attribute "warps" is expected but not provided}}
  "lowbit.barrier"() {scope = "block"} : () -> ()
  return
}
