// RUN: %lowbit-opt %s --lower-tiles=target=sm_90a --canonicalize | %filecheck %s

// A product of bytes from zero, for the second eight of sixteen tokens, and sums to which it is added when it has ended.

// CHECK-LABEL: gpu.func @products
// CHECK:         prefetch.global.L2 [$0];
// Signed codes: |d|, and the signs of d.
// CHECK:         vabsdiff4.u32.u32.u32 $0, $1, $2, $1;
// CHECK:         setp.ne.b32 add, $4, $4;
// CHECK-SAME:    m64n8k32.f32.e4m3.e4m3 {wgmma_sum3076, wgmma_sum3077, wgmma_sum3078, wgmma_sum3079}
// CHECK-SAME:    wgmma.commit_group.sync.aligned;
// CHECK:         wgmma.wait_group.sync.aligned 0;
// CHECK-SAME:    fma.rn.f32 wgmma_sum3072, wgmma_sum3076, $0, wgmma_sum3072;
// CHECK-SAME:    fma.rn.f32 wgmma_sum3074, wgmma_sum3078, $1, wgmma_sum3074;
// Sums of x stay where all lanes make them. Those of a token times the number of a row go into the product first.
// CHECK:         llvm.inline_asm has_side_effects asm_dialect = att "", "=f,0"
// CHECK:         wgmma.wait_group.sync.aligned 0;
// CHECK-SAME:    fma.rn.f32 number, $0, $[[TOKEN:[0-9]+]], wgmma_sum3076;
// CHECK-SAME:    fma.rn.f32 wgmma_sum3072, number, $0, wgmma_sum3072;
// CHECK-SAME:    fma.rn.f32 number, $1, $[[TOKEN]], wgmma_sum3078;
// CHECK-SAME:    fma.rn.f32 wgmma_sum3074, number, $1, wgmma_sum3074;
// Or beside the scaled product, to the sums.
// CHECK:         fma.rn.f32 wgmma_sum3072, $0, $[[TOKEN:[0-9]+]], wgmma_sum3072;
// CHECK-SAME:    fma.rn.f32 wgmma_sum3074, $1, $[[TOKEN]], wgmma_sum3074;
// CHECK:         wgmma.wait_group.sync.aligned 0;
// CHECK-SAME:    mov.f32 $0, wgmma_sum3072;
!units = !lowbit.reg<[4, 32], vector<4xi32>, "spatial(4, 32)">
!codes = !lowbit.reg<[64, 64], #lowbit.format<"i4", []>, "spatial(4, 1).local(1, 4).column_local(2, 2).spatial(8, 4).local(1, 2)">
!bytes = !lowbit.reg<[64, 64], f8E4M3FN, "spatial(4, 1).local(1, 2).column_local(2, 2).spatial(8, 4).local(1, 4)">
!a = !lowbit.reg<[64, 32], f8E4M3FN, "spatial(4, 1).column_local(2, 2).spatial(8, 4).local(1, 4)">
!x = !lowbit.shared<[1, 16, 128], f8E4M3FN, [2048, 128, 1], 128>
!sums = !lowbit.reg<[64, 8], f32, "spatial(4, 1).local(2, 1).spatial(8, 4).local(1, 2)">
!scale = !lowbit.reg<[64, 1], f32, "spatial(4, 1).local(2, 1).spatial(8, 1).replicated(4)">
!of_x = !lowbit.reg<[1, 8], f32, "replicated(32, rank=2).spatial(1, 4).local(1, 2)">
!w = !lowbit.global<[4, 32], vector<4xi32>, [32, 1], [1, 1]>
!s = !lowbit.global<[64, 1], f32, [1, 1], [1, 1]>
!y = !lowbit.global<[64, 8], f32, [8, 1], [1, 1]>
lowbit.program @products(%pw: !llvm.ptr<1>, %ps: !llvm.ptr<1>, %py: !llvm.ptr<1>) attributes {grid = [1, 1, 1], params = ["w",
    "s", "y"], threads = 128, workspace = 0} {
  %c0 = arith.constant 0 : i32
  %w = lowbit.global_view %pw : !llvm.ptr<1> -> !w
  %s = lowbit.global_view %ps : !llvm.ptr<1> -> !s
  %y = lowbit.global_view %py : !llvm.ptr<1> -> !y
  %x = lowbit.alloc_shared : !x
  lowbit.prefetch %w[%c0, %c0] {layout = "spatial(4, 32)"} : !w
  %units = lowbit.load %w[%c0, %c0] : !w -> !units
  %scale = lowbit.load %s[%c0, %c0] : !s -> !scale
  %of_x = lowbit.constant {value = 1.0 : f32} : !of_x
  %codes = lowbit.view %units : !units -> !codes
  %bytes = lowbit.decode_bytes %codes {offset = 8} : !codes -> !bytes
  %a = lowbit.slice %bytes {dim = 1, start = 32} : !bytes -> !a
  %sums = lowbit.accumulator : !sums
  %product = lowbit.accumulator : !sums
  lowbit.clear_accumulator %sums : !sums
  lowbit.accumulate %a, %x, %product {fresh, row = 8, start = 32} : !a, !x, !sums
  lowbit.add_scaled %product, %scale, %sums {operandSegmentSizes = array<i32: 1, 1, 1, 0, 0>, pending = 0} : !sums, !scale, !sums
  lowbit.materialize %of_x {by_all} : !of_x
  lowbit.add_scaled %product, %scale, %sums, %scale, %of_x {operandSegmentSizes = array<i32: 1, 1, 1, 1, 1>, pending = 0} : !sums, !scale, !sums, !scale, !of_x
  lowbit.add_outer %scale, %of_x, %sums : !scale, !of_x, !sums
  %total = lowbit.read_accumulator %sums : !sums
  lowbit.store %total, %y[%c0, %c0] : !sums, !y
  lowbit.return
}
