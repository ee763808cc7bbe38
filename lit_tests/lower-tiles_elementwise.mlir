// RUN: %lowbit-opt %s --split-input-file --lower-tiles | %filecheck %s

// GPUs have these for two f16 at a time: one operation for every two neighbouring elements of a thread.
// CHECK-LABEL: gpu.func @pairs
// CHECK-COUNT-2: arith.subf {{.*}} : vector<2xf16>
// CHECK-NOT:     arith.subf
// CHECK-COUNT-2: arith.maximumf {{.*}} : vector<2xf16>
// CHECK-COUNT-2: arith.minimumf {{.*}} : vector<2xf16>
// CHECK-COUNT-2: arith.negf {{.*}} : vector<2xf16>
// CHECK-COUNT-2: llvm.call_intrinsic "llvm.fabs"({{.*}}) : (vector<2xf16>) -> vector<2xf16>
!tile = !lowbit.reg<[16, 8], f16, "spatial(8, 4).local(2, 2)">
!view = !lowbit.global<[16, 8], f16, [8, 1], [1, 1]>
lowbit.program @pairs(%px: !llvm.ptr<1>, %py: !llvm.ptr<1>) attributes {threads = 32, grid = [1, 1, 1], params = ["x", "y"],
    workspace = 0} {
  %c0 = arith.constant 0 : i32
  %x = lowbit.global_view %px : !llvm.ptr<1> -> !view
  %y = lowbit.global_view %py : !llvm.ptr<1> -> !view
  %a = lowbit.load %x[%c0, %c0] : !view -> !tile
  %one = lowbit.constant {value = 1.0 : f32} : !tile
  %difference = lowbit.sub %a, %one : !tile
  lowbit.store %difference, %y[%c0, %c0] : !tile, !view
  %larger = lowbit.max %a, %one : !tile
  lowbit.store %larger, %y[%c0, %c0] : !tile, !view
  %smaller = lowbit.min %a, %one : !tile
  lowbit.store %smaller, %y[%c0, %c0] : !tile, !view
  %minus = lowbit.neg %a : !tile
  lowbit.store %minus, %y[%c0, %c0] : !tile, !view
  %magnitude = lowbit.abs %a : !tile
  lowbit.store %magnitude, %y[%c0, %c0] : !tile, !view
  lowbit.return
}

// -----

// A table of scales is an array in device memory, from which bytes are looked up.
// CHECK:         llvm.mlir.global internal constant @[[TABLE:lowbit_table_lut8_f32]](
// CHECK-LABEL: gpu.func @from_a_table
// CHECK:         %[[PLACE:.*]] = arith.extui {{.*}} : i8 to i32
// CHECK:         %[[OFFSET:.*]] = arith.shli %[[PLACE]], %c2_i32
// CHECK:         llvm.mlir.addressof @[[TABLE]]
// CHECK:         %[[BITS:.*]] = llvm.load {{.*}} invariant {alignment = 4 : i64} : !llvm.ptr<1> -> i32
// CHECK:         llvm.bitcast %[[BITS]] : i32 to f32
!bytes = !lowbit.reg<[8, 4], i8, "spatial(8, 4)">
!tile = !lowbit.reg<[8, 4], f32, "spatial(8, 4)">
!view = !lowbit.global<[8, 4], i8, [4, 1], [1, 1]>
!out = !lowbit.global<[8, 4], f32, [4, 1], [1, 1]>
lowbit.program @from_a_table(%px: !llvm.ptr<1>, %py: !llvm.ptr<1>) attributes {threads = 32, grid = [1, 1, 1], params = ["x",
    "y"], workspace = 0} {
  %c0 = arith.constant 0 : i32
  %x = lowbit.global_view %px : !llvm.ptr<1> -> !view
  %y = lowbit.global_view %py : !llvm.ptr<1> -> !out
  %a = lowbit.load %x[%c0, %c0] : !view -> !bytes
  %numbers = lowbit.cast %a {kind = "table", format = #lowbit.format<"lut8", [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0,
      0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0,
      0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0,
      0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0,
      0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0,
      0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0,
      0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0,
      0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0,
      0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0,
      0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0,
      0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]>} : !bytes -> !tile
  lowbit.store %numbers, %y[%c0, %c0] : !tile, !out
  lowbit.return
}

// -----

// The same from shared memory, which 64 threads fill with four entries each: 256 places, each once.
// CHECK-LABEL: gpu.func @from_a_table_in_shared_memory
// CHECK:         %[[FOUR:.*]] = llvm.load {{.*}} {alignment = 16 : i64} : !llvm.ptr<1> -> i128
// CHECK-NEXT:    llvm.store %[[FOUR]], {{.*}} {alignment = 16 : i64} : i128, !llvm.ptr<3>
// CHECK:         gpu.barrier
// CHECK:         %[[PLACE:.*]] = arith.extui {{.*}} : i8 to i32
// CHECK:         arith.muli %[[PLACE]], {{.*}}
// CHECK:         llvm.load {{.*}} {alignment = 4 : i64} : !llvm.ptr<3> -> f32
!bytes = !lowbit.reg<[8, 4], i8, "spatial(8, 4).replicated(2)">
!tile = !lowbit.reg<[8, 4], f32, "spatial(8, 4).replicated(2)">
!view = !lowbit.global<[8, 4], i8, [4, 1], [1, 1]>
!out = !lowbit.global<[8, 4], f32, [4, 1], [1, 1]>
!table = !lowbit.shared<[256, 1], i32, [1, 1], 0>
lowbit.program @from_a_table_in_shared_memory(%px: !llvm.ptr<1>, %py: !llvm.ptr<1>) attributes {threads = 64, grid = [1, 1, 1],
    params = ["x", "y"], workspace = 0} {
  %c0 = arith.constant 0 : i32
  %x = lowbit.global_view %px : !llvm.ptr<1> -> !view
  %y = lowbit.global_view %py : !llvm.ptr<1> -> !out
  %table = lowbit.alloc_shared : !table
  lowbit.fill_table %table {format = #lowbit.format<"lut8", [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0,
      0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0,
      0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0,
      0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0,
      0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0,
      0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0,
      0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0,
      0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0,
      0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0,
      0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0,
      0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]>, element = "f32", exponent = 0}
      : !table
  %a = lowbit.load %x[%c0, %c0] : !view -> !bytes
  %numbers = lowbit.lookup_bytes %a, %table : !bytes, !table -> !tile
  lowbit.store %numbers, %y[%c0, %c0] : !tile, !out
  lowbit.return
}

// -----

// These they have for f32 alone; f16 goes there and back.
// CHECK-LABEL: gpu.func @by_way_of_f32
// CHECK:         %[[X:.*]] = arith.extf {{.*}} : f16 to f32
// CHECK:         %[[LOG2_E:.*]] = arith.constant 1.44269502 : f32
// CHECK:         %[[POWER:.*]] = arith.mulf %[[X]], %[[LOG2_E]] : f32
// CHECK:         %[[EXP:.*]] = llvm.call_intrinsic "llvm.exp2"(%[[POWER]]) : (f32) -> f32
// CHECK:         arith.truncf %[[EXP]] : f32 to f16
// CHECK:         llvm.inline_asm asm_dialect = att "tanh.approx.f32 $0, $1;", "=f,f"
// CHECK:         llvm.call_intrinsic "llvm.sqrt"({{.*}}) : (f32) -> f32
// CHECK:         llvm.inline_asm asm_dialect = att "div.full.f32 $0, $1, $2;", "=f,f,f"
// CHECK:         %[[ROUNDED:.*]] = arith.truncf {{.*}} : f32 to f16

// f16 is bf16 by way of f32, exactly.
// CHECK:         %[[WIDE:.*]] = arith.extf %[[ROUNDED]] : f16 to f32
// CHECK-NEXT:    arith.truncf %[[WIDE]] : f32 to bf16
!tile = !lowbit.reg<[8, 4], f16, "spatial(8, 4)">
!bf16 = !lowbit.reg<[8, 4], bf16, "spatial(8, 4)">
!view = !lowbit.global<[8, 4], f16, [4, 1], [1, 1]>
!out = !lowbit.global<[8, 4], bf16, [4, 1], [1, 1]>
lowbit.program @by_way_of_f32(%px: !llvm.ptr<1>, %py: !llvm.ptr<1>) attributes {threads = 32, grid = [1, 1, 1], params = ["x",
    "y"], workspace = 0} {
  %c0 = arith.constant 0 : i32
  %x = lowbit.global_view %px : !llvm.ptr<1> -> !view
  %y = lowbit.global_view %py : !llvm.ptr<1> -> !out
  %a = lowbit.load %x[%c0, %c0] : !view -> !tile
  %exp = lowbit.exp %a : !tile
  %tanh = lowbit.tanh %exp : !tile
  %root = lowbit.sqrt %tanh : !tile
  %quotient = lowbit.div %root, %a : !tile
  %cast = lowbit.cast %quotient {kind = "float"} : !tile -> !bf16
  lowbit.store %cast, %y[%c0, %c0] : !bf16, !out
  lowbit.return
}

// -----

// A comparison is a bit for every element, "ne" the one that holds for NaN. One scale is compared with both elements.
// CHECK-LABEL: gpu.func @choose
// CHECK-DAG:     %[[A:.*]] = llvm.extractelement {{.*}} : vector<2xf32>
// CHECK:         %[[NE:.*]] = arith.cmpf une, {{.*}} : f32
// CHECK:         arith.select %[[NE]], {{.*}} : f32
// CHECK:         arith.cmpf une, {{.*}} : f32
// CHECK:         arith.select {{.*}} : f32

// Integers of a sign.
// CHECK:         arith.extsi {{.*}} : i8 to i32
// CHECK-NEXT:    arith.sitofp {{.*}} : i32 to f32
// Bits 3 to 5 in the mantissa of 2^20, by one lop3.
// CHECK:         %[[POWER:.*]] = arith.constant 0x49800000 : f32
// CHECK-NEXT:    %[[WORD:.*]] = llvm.bitcast %[[POWER]] : f32 to i32
// CHECK-NEXT:    %[[BYTE:.*]] = arith.extui {{.*}} : i8 to i32
// CHECK-NEXT:    %[[MASK:.*]] = arith.constant 56 : i32
// CHECK-NEXT:    %[[RAISED:.*]] = llvm.inline_asm {{.*}}"lop3.b32 $0, $1, $2, $3, 234;", {{.*}} %[[BYTE]], %[[MASK]], %[[WORD]]
// CHECK-NEXT:    llvm.bitcast %[[RAISED]] : i32 to f32
!tile = !lowbit.reg<[8, 8], f32, "spatial(8, 4).local(1, 2)">
!column = !lowbit.reg<[8, 1], f32, "spatial(8, 1).replicated(4)">
!conditions = !lowbit.reg<[8, 8], i1, "spatial(8, 4).local(1, 2)">
!bytes = !lowbit.reg<[8, 4], i8, "spatial(8, 4)">
!numbers = !lowbit.reg<[8, 4], f32, "spatial(8, 4)">
!view = !lowbit.global<[8, 8], f32, [8, 1], [1, 1]>
!byte_view = !lowbit.global<[8, 4], i8, [4, 1], [1, 1]>
lowbit.program @choose(%px: !llvm.ptr<1>, %pb: !llvm.ptr<1>) attributes {threads = 32, grid = [1, 1, 1], params = ["x", "b"],
    workspace = 0} {
  %c0 = arith.constant 0 : i32
  %x = lowbit.global_view %px : !llvm.ptr<1> -> !view
  %b = lowbit.global_view %pb : !llvm.ptr<1> -> !byte_view
  %a = lowbit.load %x[%c0, %c0] : !view -> !tile
  %scale = lowbit.load %x[%c0, %c0] : !view -> !column
  %differs = lowbit.compare %a, %scale {predicate = "ne"} : !tile, !column -> !conditions
  %chosen = lowbit.select %differs, %a, %scale : !conditions, !tile, !column -> !tile
  lowbit.store %chosen, %x[%c0, %c0] : !tile, !view
  %bytes = lowbit.load %b[%c0, %c0] : !byte_view -> !bytes
  %signed = lowbit.cast %bytes {kind = "signed"} : !bytes -> !numbers
  lowbit.store %signed, %x[%c0, %c0] : !numbers, !view
  %raised = lowbit.raise_bits %bytes {first = 3, bits = 3} : !bytes -> !numbers
  lowbit.store %raised, %x[%c0, %c0] : !numbers, !view
  lowbit.return
}

// -----

// Whole numbers in f32 become integers, of which products are added up in 32 bits.
// CHECK-LABEL: gpu.func @integers
// CHECK:         %[[WHOLE:.*]] = arith.fptosi %{{.*}} : f32 to i32
// CHECK:         %[[PRODUCT:.*]] = arith.muli %[[WHOLE]], %[[WHOLE]]
// CHECK:         arith.addi %[[PRODUCT]], %[[WHOLE]]
// CHECK-NOT:     llvm.intr.fma
!numbers = !lowbit.reg<[8, 4], f32, "spatial(8, 4)">
!whole = !lowbit.reg<[8, 4], i32, "spatial(8, 4)">
!view = !lowbit.global<[8, 4], f32, [4, 1], [1, 1]>
!out = !lowbit.global<[8, 4], i32, [4, 1], [1, 1]>
lowbit.program @integers(%px: !llvm.ptr<1>, %py: !llvm.ptr<1>) attributes {threads = 32, grid = [1, 1, 1], params = ["x",
    "y"], workspace = 0} {
  %c0 = arith.constant 0 : i32
  %x = lowbit.global_view %px : !llvm.ptr<1> -> !view
  %y = lowbit.global_view %py : !llvm.ptr<1> -> !out
  %numbers = lowbit.load %x[%c0, %c0] : !view -> !numbers
  %whole = lowbit.cast %numbers {kind = "float"} : !numbers -> !whole
  %sum = lowbit.fma %whole, %whole, %whole : !whole
  lowbit.store %sum, %y[%c0, %c0] : !whole, !out
  lowbit.return
}
