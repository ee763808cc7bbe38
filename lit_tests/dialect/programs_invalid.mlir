// RUN: %lowbit-opt %s --split-input-file --verify-diagnostics

// What verifiers refuse: programs, and what is in their grid. Wrong types are in types_invalid.mlir.

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

// expected-error @below {{grid: expected numbers of at least 1, 'ceil(PARAMETER / NUMBER)', 'sm_count * NUMBER' or 'sm_count / NUMBER', got 0}}
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

// expected-error @below {{grid: expected numbers of at least 1, 'ceil(PARAMETER / NUMBER)', 'sm_count * NUMBER' or 'sm_count / NUMBER', got 'x * 2'}}
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

// expected-error @below {{'lowbit.program' op fits_blocks: expected max_blocks as well, got none}}
"lowbit.program"() ({
  "lowbit.return"() : () -> ()
}) {sym_name = "p", threads = 32, grid = [8, 4, 1], params = [], workspace = 0, fits_blocks} : () -> ()

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
