// RUN: %lowbit-opt %s --split-input-file --verify-diagnostics

// What verifiers refuse: shared memory, copies, and what orders them. Wrong types are in types_invalid.mlir.

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

!x = !lowbit.global<[-1, 64], f16, [64, 1], [1, 1]>
!buffer = !lowbit.shared<[8, 64], f16, [72, 1], 0>
func.func @kind_of_attribute(%x: !x, %to: !buffer, %i: i32) {
  // expected-error @below {{'lowbit.copy_async' op layout: expected a string, got unit}}
  "lowbit.copy_async"(%x, %to, %i, %i) {layout, boundary = ["zero", "none"], limit = [],
    operandSegmentSizes = array<i32: 1, 1, 2>} : (!x, !buffer, i32, i32) -> ()
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
  %0 = "lowbit.last_arrival"(%c, %i, %i) : (!lowbit.global<[4], f32, [1], [1]>, i32, i32) -> i1
  return
}

// -----

func.func @counters_rank(%c: !lowbit.global<[4, 4], i32, [4, 1], [1, 1]>, %i: i32) {
  // expected-error @below {{counters: expected rank 1, got [4, 4]}}
  %0 = "lowbit.others_arrived"(%c, %i, %i) : (!lowbit.global<[4, 4], i32, [4, 1], [1, 1]>, i32, i32) -> i1
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

// Buffers end once, where they begin, and after all that uses them, a part of them, or is around what does.
!buffer = !lowbit.shared<[8, 32], f16, [32, 1], 0>
func.func @freed_twice() {
  %buffer = "lowbit.alloc_shared"() : () -> !buffer
  // expected-error @below {{'lowbit.free_shared' op buffer: expected nothing that uses it afterwards, got lowbit.free_shared}}
  "lowbit.free_shared"(%buffer) : (!buffer) -> ()
  "lowbit.free_shared"(%buffer) : (!buffer) -> ()
  return
}

// -----

!buffer = !lowbit.shared<[8, 32], f16, [32, 1], 0>
func.func @part_used_after_the_end(%if: i1) {
  %buffer = "lowbit.alloc_shared"() : () -> !buffer
  %c0 = arith.constant 0 : i32
  %part = "lowbit.stage"(%buffer, %c0) : (!buffer, i32) -> !lowbit.shared<[32], f16, [1], 0>
  // expected-error @below {{buffer: expected nothing that uses it afterwards, got scf.if}}
  "lowbit.free_shared"(%buffer) : (!buffer) -> ()
  scf.if %if {
    %0 = "lowbit.load"(%part, %c0) {boundary = ["none"]} : (!lowbit.shared<[32], f16, [1], 0>, i32) -> !lowbit.reg<[32], f16, "spatial(32)">
  }
  return
}

// -----

!buffer = !lowbit.shared<[8, 32], f16, [32, 1], 0>
func.func @freed_inside(%if: i1) {
  %buffer = "lowbit.alloc_shared"() : () -> !buffer
  scf.if %if {
    // expected-error @below {{place: expected the block that the buffer is in, got another}}
    "lowbit.free_shared"(%buffer) : (!buffer) -> ()
  }
  return
}

// -----

// A known place is inside.
!buffer = !lowbit.shared<[8, 32], f16, [32, 1], 0>
func.func @beyond_the_end(%buffer: !buffer) {
  %c0 = arith.constant 0 : i32
  %c1 = arith.constant 1 : i32
  // expected-error @below {{'lowbit.load' op end of dim 1 with boundary none: expected at most 32, got 1 + 32}}
  %0 = "lowbit.load"(%buffer, %c0, %c1) {boundary = ["none", "none"], operandSegmentSizes = array<i32: 1, 2>} : (!buffer, i32, i32) -> !lowbit.reg<[1, 32], f16, "spatial(1, 32)">
  return
}

// -----

!x = !lowbit.global<[-1, 32], f16, [32, 1], [1, 1]>
func.func @in_front_of_the_beginning(%x: !x) {
  %c0 = arith.constant 0 : i32
  %before = arith.constant -1 : i32
  // expected-error @below {{'lowbit.load' op offset of dim 0: expected at least 0, got -1}}
  %0 = "lowbit.load"(%x, %before, %c0) {boundary = ["zero", "none"], operandSegmentSizes = array<i32: 1, 2>} : (!x, i32, i32) -> !lowbit.reg<[1, 32], f16, "spatial(1, 32)">
  return
}

// -----

// Operands and results that are missing are missed before they are looked at.
// expected-error @below {{op expects exactly 1 operands, but got 0}}
"lowbit.free_shared"() : () -> ()

// -----

func.func @no_result(%b: !lowbit.shared<[2, 8, 64], f16, [512, 64, 1], 0>, %i: i32) {
  // expected-error @below {{op expects exactly 1 results, but got 0}}
  "lowbit.stage"(%b, %i) : (!lowbit.shared<[2, 8, 64], f16, [512, 64, 1], 0>, i32) -> ()
  return
}

// -----

// A use in another block is not in its sight; an index of another type is not a number.
!buffer = !lowbit.shared<[8, 32], f16, [32, 1], 0>
"func.func"() ({
  %buffer = "lowbit.alloc_shared"() : () -> !buffer
  "lowbit.free_shared"(%buffer) : (!buffer) -> ()
  "cf.br"()[^bb1] : () -> ()
^bb1:
  // expected-error @below {{place: expected the block that the buffer is in, got another}}
  "lowbit.free_shared"(%buffer) : (!buffer) -> ()
  "func.return"() : () -> ()
}) {function_type = () -> (), sym_name = "f"} : () -> ()

// -----

func.func @index_of_floats(%b: !lowbit.shared<[32], f16, [1], 0>) {
  %0 = arith.constant 0.0 : f32
  // expected-error @below {{expected 'i32' but got 'f32'}}
  %1 = "lowbit.load"(%b, %0) {boundary = ["none"], operandSegmentSizes = array<i32: 1, 1>} : (!lowbit.shared<[32], f16, [1], 0>, f32) -> !lowbit.reg<[32], f16, "spatial(32)">
  return
}
