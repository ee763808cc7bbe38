// RUN: %lowbit-opt %s --split-input-file --expand-matmul --verify-diagnostics

// The passes before this one have left their marks, ...

!weight = !lowbit.packed<[64, 512], #lowbit.format<"u4", []>, 128, "none", "f16">
func.func @no_plan(%w: !weight) -> tensor<64x512xf16> {
  // expected-error @below {{a lowbit.dequantize has no packing; run plan-packing first}}
  %y = "lowbit.dequantize"(%w) : (!weight) -> tensor<64x512xf16>
  return %y : tensor<64x512xf16>
}

// -----

!weight = !lowbit.packed<[64, 512], #lowbit.format<"u4", []>, 128, "none", "f16">
func.func @another_plan(%w: !weight) -> tensor<64x512xf16> {
  // expected-error @below {{packing: expected the weight's order, {chunk = 64 : i64}}
  %y = "lowbit.dequantize"(%w) {packing = {chunk = 32}} : (!weight) -> tensor<64x512xf16>
  return %y : tensor<64x512xf16>
}

// -----

!weight = !lowbit.packed<[64, 512], #lowbit.format<"u4", []>, 128, "none", "f16">
func.func @no_schedule(%x: tensor<?x512xf16>, %w: !weight) -> tensor<?x64xf16> {
  // expected-error @below {{expand-matmul: a lowbit.matmul has no schedule; run select-schedule first}}
  %y = "lowbit.matmul"(%x, %w) {
    packing = {chunk = 64, codes = [4, 8, 1, 32, 4], scales = [4, 4, 16], padded_group = 128, padded_k = 512, units = 1},
    operandSegmentSizes = array<i32: 1, 1, 0, 0>} : (tensor<?x512xf16>, !weight) -> tensor<?x64xf16>
  return %y : tensor<?x64xf16>
}

// -----

!weight = !lowbit.packed<[64, 512], #lowbit.format<"u4", []>, 128, "none", "f16">
func.func @strange_schedule(%x: tensor<?x512xf16>, %w: !weight) -> tensor<?x64xf16> {
  // expected-error @below {{schedule: unknown field 'depth'; allowed: tokens, row_blocks}}
  %y = "lowbit.matmul"(%x, %w) {schedule = {depth = 3},
    packing = {chunk = 64, codes = [4, 8, 1, 32, 4], scales = [4, 4, 16], padded_group = 128, padded_k = 512, units = 1},
    operandSegmentSizes = array<i32: 1, 1, 0, 0>} : (tensor<?x512xf16>, !weight) -> tensor<?x64xf16>
  return %y : tensor<?x64xf16>
}

// -----

!weight = !lowbit.packed<[64, 512], #lowbit.format<"u4", []>, 128, "none", "f16">
func.func @schedule_of_another_operation(%x: tensor<?x512xf16>, %w: !weight) -> tensor<?x64xf16> {
  // expected-error @below {{expand-matmul: a schedule of dequantize is for lowbit.dequantize, not for lowbit.matmul}}
  %y = "lowbit.matmul"(%x, %w) {schedule = {family = "dequantize"},
    packing = {chunk = 64, codes = [4, 8, 1, 32, 4], scales = [4, 4, 16], padded_group = 128, padded_k = 512, units = 1},
    operandSegmentSizes = array<i32: 1, 1, 0, 0>} : (tensor<?x512xf16>, !weight) -> tensor<?x64xf16>
  return %y : tensor<?x64xf16>
}

// -----

// ... and a function is one kernel: there is nobody to run what else is in it.
!weight = !lowbit.packed<[64, 512], #lowbit.format<"u4", []>, 128, "none", "f16">
func.func @two(%w: !weight) -> (tensor<64x512xf16>, tensor<64x512xf16>) {
  // expected-error @below {{expand-matmul: a function must be lowbit.dequantize and func.return alone, not lowbit.dequantize, lowbit.dequantize, func.return}}
  %y = "lowbit.dequantize"(%w) {
    packing = {chunk = 64, codes = [4, 8, 1, 32, 4], scales = [4, 4, 16], padded_group = 128, padded_k = 512, units = 1}
  } : (!weight) -> tensor<64x512xf16>
  %z = "lowbit.dequantize"(%w) : (!weight) -> tensor<64x512xf16>
  return %y, %z : tensor<64x512xf16>, tensor<64x512xf16>
}
