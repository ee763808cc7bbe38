// RUN: %lowbit-opt %s --split-input-file --share-constants | %filecheck %s

// Of equal constants one is left, at the start of the program, also where they are in different regions.
// CHECK-LABEL: lowbit.program @equal
// CHECK:         %c1_i32 = arith.constant 1 : i32
// CHECK-NEXT:    %[[ZERO:.*]] = lowbit.constant {value = 0.000000e+00 : f32}
// CHECK-NEXT:    %{{.*}} = lowbit.block_id
// CHECK-NOT:     constant {
// CHECK-NOT:     arith.constant
// CHECK:         scf.if
// CHECK-NEXT:      lowbit.await_products
// CHECK-NEXT:      lowbit.materialize %[[ZERO]]
// CHECK-NEXT:      lowbit.materialize %[[ZERO]]
!tile = !lowbit.reg<[32, 1], f32, "spatial(32, 1)">
lowbit.program @equal attributes {grid = [1, 1, 1], threads = 32, workspace = 0} {
  %block = lowbit.block_id {axis = 0}
  %c1 = arith.constant 1 : i32
  %next = arith.addi %block, %c1 : i32
  %one = arith.constant 1 : i32
  %first = arith.cmpi slt, %next, %one : i32
  scf.if %first {
    lowbit.await_products {pending = 0}
    %zero = lowbit.constant {value = 0.0 : f32} : !tile
    lowbit.materialize %zero : !tile
    %again = lowbit.constant {value = 0.0 : f32} : !tile
    lowbit.materialize %again : !tile
  }
  lowbit.return
}

// -----

// Constants of other values, types or attributes are others.
// CHECK-LABEL: lowbit.program @different
// CHECK-DAG:     arith.constant 1 : i32
// CHECK-DAG:     arith.constant 1 : i64
// CHECK-DAG:     lowbit.constant {value = 1.000000e+00 : f32} : !reg_32x1xf32
// CHECK-DAG:     lowbit.constant {value = 1.000000e+00 : f32} : !reg_32x1xf16
// CHECK-DAG:     lowbit.constant {lower = 2.000000e+00 : f32, value = 1.000000e+00 : f32}
// CHECK:         lowbit.return
!f32 = !lowbit.reg<[32, 1], f32, "spatial(32, 1)">
!f16 = !lowbit.reg<[32, 1], f16, "spatial(32, 1)">
lowbit.program @different attributes {grid = [1, 1, 1], threads = 32, workspace = 0} {
  %a = arith.constant 1 : i32
  %b = arith.constant 1 : i64
  %c = lowbit.constant {value = 1.0 : f32} : !f32
  %d = lowbit.constant {value = 1.0 : f32} : !f16
  %e = lowbit.constant {lower = 2.0 : f32, value = 1.0 : f32} : !f32
  lowbit.return
}
