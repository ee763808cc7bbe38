// RUN: %lowbit-opt %s --split-input-file --lower-tiles | %filecheck %s

// A thread loads each of its elements by itself: an index is a place in the last dim, in the row of the offset.
// CHECK-LABEL: gpu.func @from_shared_memory
// CHECK:         %[[INDICES:.*]] = llvm.load {{.*}} {alignment = 8 : i64} : !llvm.ptr<1> -> vector<2xi32>
// CHECK:         %[[INDEX:.*]] = llvm.extractelement %[[INDICES]]
// CHECK:         gpu.barrier
// CHECK:         %[[ROW:.*]] = arith.muli %{{.*}}, %c128_i32
// CHECK-NEXT:    %[[START:.*]] = llvm.getelementptr %{{.*}}[%[[ROW]]] : (!llvm.ptr<3>, i32) -> !llvm.ptr<3>, i8
// CHECK:         %[[BYTES:.*]] = arith.muli %[[INDEX]], %c2_i32
// CHECK-NEXT:    %[[ADDRESS:.*]] = llvm.getelementptr %[[START]][%[[BYTES]]] : (!llvm.ptr<3>, i32) -> !llvm.ptr<3>, i8
// CHECK-NEXT:    llvm.load %[[ADDRESS]] {alignment = 2 : i64} : !llvm.ptr<3> -> f16
// CHECK:         llvm.load {{.*}} {alignment = 2 : i64} : !llvm.ptr<3> -> f16
// CHECK:         llvm.store {{.*}} {alignment = 4 : i64} : vector<2xf16>, !llvm.ptr<1>
!tile = !lowbit.reg<[1, 64], f16, "spatial(1, 32).local(1, 2)">
!index = !lowbit.reg<[1, 64], i32, "spatial(1, 32).local(1, 2)">
!view = !lowbit.global<[4, 64], f16, [64, 1], [1, 1]>
lowbit.program @from_shared_memory(%px: !llvm.ptr<1>, %pi: !llvm.ptr<1>) attributes {threads = 32, grid = [4, 1, 1],
    params = ["x", "permutation"], workspace = 0} {
  %c0 = arith.constant 0 : i32
  %row = lowbit.block_id {axis = 0}
  %x = lowbit.global_view %px : !llvm.ptr<1> -> !view
  %i = lowbit.global_view %pi : !llvm.ptr<1> -> !lowbit.global<[1, 64], i32, [64, 1], [1, 1]>
  %buffer = lowbit.alloc_shared : !lowbit.shared<[4, 64], f16, [64, 1], 0>
  %index = lowbit.load %i[%c0, %c0] : !lowbit.global<[1, 64], i32, [64, 1], [1, 1]> -> !index
  lowbit.barrier {scope = "block"}
  %tile = lowbit.gather %buffer[%row], %index : !lowbit.shared<[4, 64], f16, [64, 1], 0>, !index -> !tile
  lowbit.store %tile, %x[%row, %c0] : !tile, !view
  lowbit.return
}

// -----

// In device memory addresses have 64 bits. What reads memory is done before memory may change, at a barrier.
// CHECK-LABEL: gpu.func @from_device_memory
// CHECK:         %[[WIDE:.*]] = arith.extui %{{.*}} : i32 to i64
// CHECK:         arith.muli %[[WIDE]], %c4_i64
// CHECK:         llvm.load {{.*}} {alignment = 4 : i64} : !llvm.ptr<1> -> f32
// CHECK:         gpu.barrier
// CHECK:         llvm.store {{.*}} : f32, !llvm.ptr<1>
!view = !lowbit.global<[32], f32, [1], [1]>
lowbit.program @from_device_memory(%px: !llvm.ptr<1>, %pi: !llvm.ptr<1>) attributes {threads = 32, grid = [1, 1, 1],
    params = ["x", "permutation"], workspace = 0} {
  %c0 = arith.constant 0 : i32
  %x = lowbit.global_view %px : !llvm.ptr<1> -> !view
  %i = lowbit.global_view %pi : !llvm.ptr<1> -> !lowbit.global<[32], i32, [1], [1]>
  %index = lowbit.load %i[%c0] : !lowbit.global<[32], i32, [1], [1]> -> !lowbit.reg<[32], i32, "spatial(32)">
  %tile = lowbit.gather %x[], %index : !view, !lowbit.reg<[32], i32, "spatial(32)"> -> !lowbit.reg<[32], f32, "spatial(32)">
  lowbit.barrier {scope = "block"}
  lowbit.store %tile, %x[%c0] : !lowbit.reg<[32], f32, "spatial(32)">, !view
  lowbit.return
}
