// RUN: %lowbit-opt %s --lower-tiles | %filecheck %s

// A place in the list beyond its end is that of the last row, of which nothing is copied: zeros take its place. All
// threads read an index from the same address.
// CHECK-LABEL: gpu.func @rows
// CHECK:         %[[END:.*]] = llvm.load {{.*}} {alignment = 4 : i64} : !llvm.ptr<1> -> i32
// CHECK:         %[[INSIDE:.*]] = arith.cmpi slt, %{{.*}}, %[[END]]
// CHECK:         %[[SIZE:.*]] = arith.select %[[INSIDE]], %c16_i32, %c0_i32
// CHECK:         %[[LAST:.*]] = arith.subi %[[END]], %c1_i32
// CHECK:         %[[MIN:.*]] = arith.minsi %{{.*}}, %[[LAST]]
// CHECK:         %[[PLACE:.*]] = arith.maxsi %[[MIN]], %c0_i32
// CHECK:         %[[ROW:.*]] = llvm.load {{.*}} {alignment = 4 : i64} : !llvm.ptr<1> -> i32
// CHECK:         arith.extui %[[ROW]] : i32 to i64
// CHECK:         nvvm.cp.async.shared.global {{.*}}, 16, {{.*}}, %[[SIZE]]
!view = !lowbit.global<[-1, 64], f16, [64, 1], [1, 1]>
!list = !lowbit.global<[-1], i32, [1], [1]>
!ends = !lowbit.global<[4], i32, [1], [1]>
lowbit.program @rows(%px: !llvm.ptr<1>, %pr: !llvm.ptr<1>, %pe: !llvm.ptr<1>, %m: i32) attributes {threads = 32,
    grid = [4, 1, 1], params = ["x", "rows", "ends", "m"], workspace = 0} {
  %c0 = arith.constant 0 : i32
  %block = lowbit.block_id {axis = 0}
  %ends = lowbit.global_view %pe : !llvm.ptr<1> -> !ends
  %end = lowbit.read_index %ends[%block] : !ends
  %x = lowbit.global_view %px, %m : !llvm.ptr<1> -> !view
  %rows = lowbit.global_view %pr, %end : !llvm.ptr<1> -> !list
  %buffer = lowbit.alloc_shared : !lowbit.shared<[4, 64], f16, [64, 1], 0>
  lowbit.copy_rows %x, %rows, %buffer[%c0 zero, %c0] {dim = 0 : i64, layout = "spatial(4, 8).local(1, 8)"} : !view, !list, !lowbit.shared<[4, 64], f16, [64, 1], 0>
  lowbit.commit
  lowbit.wait {pending = 0}
  lowbit.return
}
