// RUN: %lowbit-opt %s --split-input-file --verify-diagnostics

// What verifiers refuse: pipelines, and what runs beside a product.

func.func @stages(%n: i32) {
  %c1 = arith.constant 1 : i32
  scf.for %i = %n to %n step %c1 : i32 {
    // expected-error @below {{'lowbit.pipeline' op num_stages: expected 1..4096, got 0}}
    "lowbit.pipeline"() ({
      "lowbit.grid_wait"() : () -> ()
    }) {num_stages = 0, scope = "block", warps = 1} : () -> ()
  }
  return
}

// -----

func.func @more_stages(%n: i32) {
  %c1 = arith.constant 1 : i32
  scf.for %i = %n to %n step %c1 : i32 {
    // expected-error @below {{num_stages: expected 1..4096, got 4294967296}}
    "lowbit.pipeline"() ({
      "lowbit.grid_wait"() : () -> ()
    }) {num_stages = 4294967296, scope = "block", warps = 1} : () -> ()
  }
  return
}

// -----

func.func @no_number(%n: i32) {
  %c1 = arith.constant 1 : i32
  scf.for %i = %n to %n step %c1 : i32 {
    // expected-error @below {{num_stages: expected an integer, got "two"}}
    "lowbit.pipeline"() ({
      "lowbit.grid_wait"() : () -> ()
    }) {num_stages = "two", scope = "block", warps = 1} : () -> ()
  }
  return
}

// -----

func.func @limit(%n: i32) {
  %c1 = arith.constant 1 : i32
  scf.for %i = %n to %n step %c1 : i32 {
    // expected-error @below {{prefetch_limit: expected at least 1, got 0}}
    "lowbit.pipeline"() ({
      "lowbit.grid_wait"() : () -> ()
    }) {num_stages = 2, scope = "block", warps = 1, prefetch_limit = 0} : () -> ()
  }
  return
}

// -----

func.func @scope(%n: i32) {
  %c1 = arith.constant 1 : i32
  scf.for %i = %n to %n step %c1 : i32 {
    // expected-error @below {{scope: expected one of warps, block, got 'cluster'}}
    "lowbit.pipeline"() ({
      "lowbit.grid_wait"() : () -> ()
    }) {num_stages = 2, scope = "cluster", warps = 1} : () -> ()
  }
  return
}

// -----

func.func @strange_refill(%n: i32) {
  %c1 = arith.constant 1 : i32
  scf.for %i = %n to %n step %c1 : i32 {
    // expected-error @below {{refill: expected one of "before_mma", "after_first_mma", "per_warp", got "later"}}
    "lowbit.pipeline"() ({
      "lowbit.grid_wait"() : () -> ()
    }) {num_stages = 2, scope = "block", warps = 1, refill = "later"} : () -> ()
  }
  return
}

// -----

// There is nothing to start the copies beside.
func.func @refill(%n: i32) {
  %c1 = arith.constant 1 : i32
  scf.for %i = %n to %n step %c1 : i32 {
    // expected-error @below {{refill "per_warp": expected a lowbit.warpgroup_mma or lowbit.accumulate in the loop, got none}}
    "lowbit.pipeline"() ({
      "lowbit.grid_wait"() : () -> ()
    }) {num_stages = 2, scope = "block", warps = 1, refill = "per_warp"} : () -> ()
  }
  return
}

// -----

// Copies are not computed with, ...
func.func @barrier_among_copies(%n: i32) {
  %c1 = arith.constant 1 : i32
  scf.for %i = %n to %n step %c1 : i32 {
    // expected-error @below {{copies: expected scalars, lowbit.copy_async, lowbit.copy_rows, lowbit.copy_padded, lowbit.copy_lines, lowbit.copy_outliers, lowbit.fill_table, lowbit.grid_wait, got lowbit.barrier}}
    "lowbit.pipeline"() ({
      "lowbit.barrier"() {scope = "block", warps = 1} : () -> ()
    }) {num_stages = 2, scope = "block", warps = 1} : () -> ()
  }
  return
}

// -----

func.func @two_waits(%n: i32) {
  %c1 = arith.constant 1 : i32
  scf.for %i = %n to %n step %c1 : i32 {
    // expected-error @below {{lowbit.grid_wait among copies: expected one at most, got 2}}
    "lowbit.pipeline"() ({
      "lowbit.grid_wait"() : () -> ()
      "lowbit.grid_wait"() : () -> ()
    }) {num_stages = 2, scope = "block", warps = 1} : () -> ()
  }
  return
}

// -----

func.func @arguments(%n: i32) {
  %c1 = arith.constant 1 : i32
  scf.for %i = %n to %n step %c1 : i32 {
    // expected-error @below {{arguments of copies: expected none, got 1}}
    "lowbit.pipeline"() ({
    ^bb0(%j: i32):
    }) {num_stages = 2, scope = "block", warps = 1} : () -> ()
  }
  return
}

// -----

// ... and fill buffers that can be made several.
!x = !lowbit.global<[16, 64], f16, [64, 1], [1, 1]>
!buffer = !lowbit.shared<[1, 64], f16, [64, 1], 0>
func.func @buffer(%x: !x, %buffer: !buffer, %n: i32) {
  %c1 = arith.constant 1 : i32
  scf.for %i = %n to %n step %c1 : i32 {
    // expected-error @below {{target of lowbit.copy_async: expected lowbit.alloc_shared, got a block's argument}}
    "lowbit.pipeline"() ({
      "lowbit.copy_async"(%x, %buffer, %i, %n) {layout = "spatial(1, 32).local(1, 2)", boundary = ["none", "none"],
        limit = [], operandSegmentSizes = array<i32: 1, 1, 2>} : (!x, !buffer, i32, i32) -> ()
    }) {num_stages = 2, scope = "block", warps = 1} : () -> ()
  }
  return
}

// -----

// They are at the head of a loop that counts in ones.
func.func @no_loop() {
  // expected-error @below {{parent: expected scf.for, got func.func}}
  "lowbit.pipeline"() ({
    "lowbit.grid_wait"() : () -> ()
  }) {num_stages = 2, scope = "block", warps = 1} : () -> ()
  return
}

// -----

func.func @step(%n: i32) {
  %c1 = arith.constant 1 : i32
  scf.for %i = %n to %n step %n : i32 {
    // expected-error @below {{step of the loop: expected the constant 1, got no constant}}
    "lowbit.pipeline"() ({
      "lowbit.grid_wait"() : () -> ()
    }) {num_stages = 2, scope = "block", warps = 1} : () -> ()
  }
  return
}

// -----

func.func @behind(%n: i32) {
  %c1 = arith.constant 1 : i32
  scf.for %i = %n to %n step %c1 : i32 {
    "lowbit.commit"() : () -> ()
    // expected-error @below {{place: expected the head of the loop, got behind lowbit.commit}}
    "lowbit.pipeline"() ({
      "lowbit.grid_wait"() : () -> ()
    }) {num_stages = 2, scope = "block", warps = 1} : () -> ()
  }
  return
}

// -----

func.func @two(%n: i32) {
  %c1 = arith.constant 1 : i32
  scf.for %i = %n to %n step %c1 : i32 {
    // expected-error @below {{pipelines in a loop: expected one, got 2}}
    "lowbit.pipeline"() ({
      "lowbit.grid_wait"() : () -> ()
    }) {num_stages = 2, scope = "block", warps = 1} : () -> ()
    "lowbit.pipeline"() ({
      "lowbit.grid_wait"() : () -> ()
    }) {num_stages = 2, scope = "block", warps = 1} : () -> ()
  }
  return
}

// -----

// Barriers divide the warps of the block.
"lowbit.program"() ({
^bb0(%n: i32):
  %c1 = arith.constant 1 : i32
  scf.for %i = %n to %n step %c1 : i32 {
    // expected-error @below {{warps of lowbit.pipeline: expected a divisor of 2, got 4}}
    "lowbit.pipeline"() ({
      "lowbit.grid_wait"() : () -> ()
    }) {num_stages = 2, scope = "warps", warps = 4} : () -> ()
  }
  "lowbit.return"() : () -> ()
}) {sym_name = "p", threads = 64, grid = [1, 1, 1], params = ["n"], workspace = 0} : () -> ()

// -----

// Tiles cannot be read beside a product, ...
!x = !lowbit.global<[16, 64], f16, [64, 1], [1, 1]>
func.func @read_beside(%condition: i1, %x: !x, %n: i32) {
  // expected-error @below {{'lowbit.concurrent' op body: expected scalars, lowbit.copy_async}}
  "lowbit.concurrent"(%condition) ({
    %0 = "lowbit.load"(%x, %n, %n) {boundary = ["none", "none"], operandSegmentSizes = array<i32: 1, 2>}
      : (!x, i32, i32) -> !lowbit.reg<[1, 64], f16, "spatial(1, 32).local(1, 2)">
  }) : (i1) -> ()
  return
}

// -----

// ... nor can anybody be told that they were.
!signals = !lowbit.shared<[1, 4, 2], i32, [8, 2, 1], 0>
func.func @arrive_beside(%condition: i1, %signals: !signals, %n: i32) {
  // expected-error @below {{lowbit.arrive: expected copies, which need no reads to be finished, got none}}
  "lowbit.concurrent"(%condition) ({
    "lowbit.arrive"(%signals, %n) : (!signals, i32) -> ()
  }) : (i1) -> ()
  return
}
