// RUN: %lowbit-opt %s --split-input-file --lower-tiles | %filecheck %s

// A thread stores each of its elements by itself, where its index is inside of the last dim; of those that hold the
// same elements, the first one does.
// CHECK-LABEL: gpu.func @to_device_memory
// CHECK-SAME:    %[[Y:[a-z0-9]+]]: !llvm.ptr<1> {llvm.align = 16 : i64, llvm.noalias}
// CHECK:         %[[LANE:.*]] = arith.remui %{{.*}}, %c2_i32
// CHECK:         %[[PLACE:.*]] = arith.divui
// CHECK:         %[[FIRST:.*]] = arith.cmpi eq, %[[LANE]], %c0_i32
// CHECK:         %[[INSIDE:.*]] = arith.cmpi ult, %{{.*}}, %c12_i32
// CHECK:         %[[KEEP:.*]] = arith.andi %[[FIRST]], %[[INSIDE]]
// CHECK:         scf.if %[[KEEP]] {
// CHECK:           arith.muli %{{.*}}, %c4_i64
// CHECK:           llvm.store %{{.*}}, %{{.*}} {alignment = 4 : i64} : f32, !llvm.ptr<1>
!index = !lowbit.reg<[16], i32, "spatial(16).replicated(2)">
!tile = !lowbit.reg<[16], f32, "spatial(16).replicated(2)">
!view = !lowbit.global<[4, 12], f32, [12, 1], [1, 1]>
lowbit.program @to_device_memory(%py: !llvm.ptr<1>) attributes {threads = 32, grid = [4, 1, 1], params = ["y"],
    workspace = 0} {
  %row = lowbit.block_id {axis = 0}
  %y = lowbit.global_view %py : !llvm.ptr<1> -> !view
  %one = lowbit.constant {value = 1.0 : f32} : !tile
  %two = lowbit.constant {value = 2.0 : f32} : !index
  %places = lowbit.iota {dim = 0} : !index
  %index = lowbit.quotient %places, %two : !index
  lowbit.scatter %one, %y[%row], %index : !tile, !view, !index
  lowbit.return
}

// -----

// Counts are added to in one instruction, which other threads can't divide.
// CHECK-LABEL: gpu.func @counts
// CHECK:         %[[INSIDE:.*]] = arith.cmpi ult, %{{.*}}, %c8_i32
// CHECK:         scf.if %[[INSIDE]] {
// CHECK:           llvm.inline_asm has_side_effects asm_dialect = att "red.shared.add.u32 [$0], $1;", "r,r,~{memory}"
!index = !lowbit.reg<[32], i32, "spatial(32)">
lowbit.program @counts() attributes {threads = 32, grid = [1, 1, 1], workspace = 0} {
  %counts = lowbit.alloc_shared : !lowbit.shared<[8], i32, [1], 0>
  %one = lowbit.constant {value = 1.0 : f32} : !index
  %places = lowbit.iota {dim = 0} : !index
  lowbit.scatter %one, %counts[], %places {combine = "add"} : !index, !lowbit.shared<[8], i32, [1], 0>, !index
  lowbit.return
}
