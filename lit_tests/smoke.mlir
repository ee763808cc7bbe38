// RUN: %lowbit-opt %s --split-input-file --canonicalize | %filecheck %s
// RUN: %lowbit-opt %s --split-input-file --verify-diagnostics

// The tool itself: passes of MLIR run, chunks are separate, and nothing is reported for valid input.

// CHECK-LABEL: func.func @fold
// CHECK-SAME:    (%[[X:.*]]: i32)
// CHECK-NOT:     arith.addi
// CHECK:         return %[[X]]
func.func @fold(%x: i32) -> i32 {
  %zero = arith.constant 0 : i32
  %sum = arith.addi %x, %zero : i32
  return %sum : i32
}

// -----

// CHECK: // -----
// CHECK-LABEL: func.func @fold
// CHECK:         arith.constant 7
func.func @fold() -> i32 {
  %a = arith.constant 3 : i32
  %b = arith.constant 4 : i32
  %sum = arith.addi %a, %b : i32
  return %sum : i32
}
