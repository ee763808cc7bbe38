// RUN: %lowbit-opt %s --split-input-file --select-schedule=target=sm_86,tokens=64,step-k=128,warps-k=8,num_stages=4 --verify-diagnostics
// RUN: not %lowbit-opt %s --select-schedule=num_stages=0 2>&1 | %filecheck %s --check-prefix=STAGES
// RUN: not %lowbit-opt %s --select-schedule=depth=3 2>&1 | %filecheck %s --check-prefix=OPTION
// RUN: not %lowbit-opt %s --select-schedule=target=sm_70 2>&1 | %filecheck %s --check-prefix=TARGET

// STAGES: error: schedule: num_stages=0 must be in 1..64
// OPTION: error: --select-schedule: unknown option 'depth'; allowed: target, tokens, family, row_blocks
// TARGET: error: --select-schedule: target=sm_70 unknown target 'sm_70'

// A step is made of whole chunks of the format: 256 columns for u3.
!weight = !lowbit.packed<[64, 1024], #lowbit.format<"u3", []>, 0, "none", "f16">
func.func @chunk(%x: tensor<?x1024xf16>, %w: !weight) -> tensor<?x64xf16> {
  // expected-error @below {{schedule: step_k=128 must be a multiple of 256 for u3; try 256}}
  %y = "lowbit.matmul"(%x, %w) {operandSegmentSizes = array<i32: 1, 1, 0, 0>} : (tensor<?x1024xf16>, !weight) -> tensor<?x64xf16>
  return %y : tensor<?x64xf16>
}

// -----

// Steps are whole groups, or groups whole steps.
!weight = !lowbit.packed<[64, 960], #lowbit.format<"u8", []>, 96, "none", "f16">
func.func @group(%x: tensor<?x960xf16>, %w: !weight) -> tensor<?x64xf16> {
  // expected-error @below {{schedule: step_k=128 and groups of 96 must divide one another; try 32}}
  %y = "lowbit.matmul"(%x, %w) {operandSegmentSizes = array<i32: 1, 1, 0, 0>} : (tensor<?x960xf16>, !weight) -> tensor<?x64xf16>
  return %y : tensor<?x64xf16>
}

// -----

// All stages have to fit into shared memory, of which sm_86 has 99 KB to a block.
!weight = !lowbit.packed<[64, 1024], #lowbit.format<"u4", []>, 0, "none", "f16">
func.func @shared(%x: tensor<?x1024xf16>, %w: !weight) -> tensor<?x64xf16> {
  // expected-error @below {{sm_86 allows 101376; take fewer num_stages or warps_k, or a smaller step_k}}
  %y = "lowbit.matmul"(%x, %w) {operandSegmentSizes = array<i32: 1, 1, 0, 0>} : (tensor<?x1024xf16>, !weight) -> tensor<?x64xf16>
  return %y : tensor<?x64xf16>
}
