// RUN: %lowbit-opt %s --split-input-file --verify-diagnostics

// What the verifier of sums that go to another block refuses, and that of the barrier before them.

!buffer = !lowbit.shared<[64], f16, [1], 0>
!signals = !lowbit.shared<[1, 1, 2], i32, [2, 2, 1], 0>
func.func @halves(%t: !lowbit.reg<[64], f16, "spatial(64)">, %b: !buffer, %s: !signals, %i: i32) {
  // expected-error @below {{'lowbit.send' op element of the target: expected f32 or i32, got f16}}
  "lowbit.send"(%t, %b, %i, %s, %i, %i) {operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1>}
    : (!lowbit.reg<[64], f16, "spatial(64)">, !buffer, i32, !signals, i32, i32) -> ()
  return
}

// -----

!buffer = !lowbit.shared<[64], f32, [1], 0>
!signals = !lowbit.shared<[1, 1, 2], i32, [2, 2, 1], 0>
func.func @integers(%t: !lowbit.reg<[64], i32, "spatial(64)">, %b: !buffer, %s: !signals, %i: i32) {
  // expected-error @below {{'lowbit.send' op element of the tile: expected f32, got i32}}
  "lowbit.send"(%t, %b, %i, %s, %i, %i) {operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1>}
    : (!lowbit.reg<[64], i32, "spatial(64)">, !buffer, i32, !signals, i32, i32) -> ()
  return
}

// -----

!buffer = !lowbit.shared<[4, 64], f32, [64, 1], 0>
!signals = !lowbit.shared<[1, 1, 2], i32, [2, 2, 1], 0>
func.func @rank(%t: !lowbit.reg<[64], f32, "spatial(64)">, %b: !buffer, %s: !signals, %i: i32) {
  // expected-error @below {{'lowbit.send' op rank of the tile: expected 2 as the memory, got 1}}
  "lowbit.send"(%t, %b, %i, %s, %i, %i, %i) {operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 2>}
    : (!lowbit.reg<[64], f32, "spatial(64)">, !buffer, i32, !signals, i32, i32, i32) -> ()
  return
}

// -----

!buffer = !lowbit.shared<[64], f32, [1], 0>
!signals = !lowbit.shared<[1, 1, 2], i32, [2, 2, 1], 0>
func.func @offsets(%t: !lowbit.reg<[64], f32, "spatial(64)">, %b: !buffer, %s: !signals, %i: i32) {
  // expected-error @below {{'lowbit.send' op offsets: expected one per dim (1), got 2}}
  "lowbit.send"(%t, %b, %i, %s, %i, %i, %i) {operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 2>}
    : (!lowbit.reg<[64], f32, "spatial(64)">, !buffer, i32, !signals, i32, i32, i32) -> ()
  return
}

// -----

func.func @relaxed() {
  // expected-error @below {{'lowbit.barrier' op scope of a relaxed barrier: expected cluster_arrive, got cluster}}
  "lowbit.barrier"() {scope = "cluster", warps = 1, relaxed} : () -> ()
  return
}
