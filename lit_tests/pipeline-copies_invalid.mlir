// RUN: %lowbit-opt %s --split-input-file --pipeline-copies --verify-diagnostics

// What cannot be pipelined: loops of another form ...

func.func @no_copies(%n: i32) {
  %c0 = arith.constant 0 : i32
  %c1 = arith.constant 1 : i32
  // expected-error @below {{a loop with lowbit.num_stages is { copies, commit, wait, barrier, compute, barrier }; got []}}
  scf.for %i = %c0 to %n step %c1 : i32 {
  } {lowbit.num_stages = 2}
  return
}

// -----

func.func @one_barrier(%n: i32) {
  %c0 = arith.constant 0 : i32
  %c1 = arith.constant 1 : i32
  // expected-error @below {{got ['lowbit.commit', 'lowbit.wait']}}
  scf.for %i = %c0 to %n step %c1 : i32 {
    "lowbit.commit"() : () -> ()
    "lowbit.wait"() {pending = 0} : () -> ()
  } {lowbit.num_stages = 2}
  return
}

// -----

// ... or with other steps, ...
func.func @step(%n: i32) {
  %c0 = arith.constant 0 : i32
  %c2 = arith.constant 2 : i32
  // expected-error @below {{a loop with lowbit.num_stages must count in steps of the constant 1}}
  scf.for %i = %c0 to %n step %c2 : i32 {
    "lowbit.commit"() : () -> ()
    "lowbit.wait"() {pending = 0} : () -> ()
    "lowbit.barrier"() {scope = "block", warps = 1 : i64} : () -> ()
    "lowbit.barrier"() {scope = "block", warps = 1 : i64} : () -> ()
  } {lowbit.num_stages = 2}
  return
}

// -----

// ... buffers that cannot be made several, ...
!x = !lowbit.global<[16, 64], f16, [64, 1], [1, 1]>
!buffer = !lowbit.shared<[1, 64], f16, [64, 1], 0>
func.func @buffer(%x: !x, %buffer: !buffer, %n: i32) {
  %c0 = arith.constant 0 : i32
  %c1 = arith.constant 1 : i32
  // expected-error @below {{lowbit.copy_async must fill a buffer of lowbit.alloc_shared}}
  scf.for %i = %c0 to %n step %c1 : i32 {
    "lowbit.copy_async"(%x, %buffer, %i, %c0) {layout = "spatial(1, 32).local(1, 2)", boundary = ["none", "none"],
      limit = [], operandSegmentSizes = array<i32: 1, 1, 2>} : (!x, !buffer, i32, i32) -> ()
    "lowbit.commit"() : () -> ()
    "lowbit.wait"() {pending = 0} : () -> ()
    "lowbit.barrier"() {scope = "block", warps = 1 : i64} : () -> ()
    "lowbit.barrier"() {scope = "block", warps = 1 : i64} : () -> ()
  } {lowbit.num_stages = 2}
  return
}

// -----

// ... and numbers of stages that are none.
func.func @stages(%n: i32) {
  %c0 = arith.constant 0 : i32
  %c1 = arith.constant 1 : i32
  // expected-error @below {{lowbit.num_stages: expected at least 1, got 0}}
  scf.for %i = %c0 to %n step %c1 : i32 {
  } {lowbit.num_stages = 0}
  return
}

// -----

func.func @no_number(%n: i32) {
  %c0 = arith.constant 0 : i32
  %c1 = arith.constant 1 : i32
  // expected-error @below {{lowbit.num_stages: expected an integer, got "two"}}
  scf.for %i = %c0 to %n step %c1 : i32 {
  } {lowbit.num_stages = "two"}
  return
}
