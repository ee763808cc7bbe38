// RUN: %lowbit-opt %s | %filecheck %s
// RUN: %lowbit-opt %s --mlir-print-op-generic | %filecheck %s --check-prefix=GENERIC
// RUN: %lowbit-opt %s --mlir-print-op-generic | %lowbit-opt - | %filecheck %s

// How operations are written: our form says the same as MLIR's generic one, and both may stand in one text.

// Types get names, which say their kind, shape and element. Types that have these in common are numbered.
// CHECK:      !shared_8x64xf16 = !lowbit.shared<[8, 64], f16, [72, 1], 0>
// CHECK-NEXT: !global_nx64xf16 = !lowbit.global<[-1, 64], f16, [64, 1], [1, 1]>
// CHECK-NEXT: !reg_8x64xf16 = !lowbit.reg<[8, 64], f16, "local(2, 1).spatial(4, 8).local(1, 8)">
// CHECK-NEXT: !reg_8x64xf16_1 = !lowbit.reg<[8, 64], f16, "spatial(4, 8).local(2, 8)">

// A program's name comes first, then its parameters. They are the `params` unless that says otherwise.
// CHECK:      lowbit.program @names(%x: !llvm.ptr<1>, %rows: i32) attributes {grid = [1, 1, 1], threads = 32, workspace = 0} {
lowbit.program @names(%x: !llvm.ptr<1>, %rows: i32) attributes {threads = 32, grid = [1, 1, 1], workspace = 0} {
  %c0 = arith.constant 0 : i32
  // Memory and what is loaded from it is called after the parameter that it belongs to.
  // CHECK:    %x_shared = lowbit.alloc_shared : !shared_8x64xf16
  // CHECK:    %x_global = lowbit.global_view %x, %rows : !llvm.ptr<1> -> !global_nx64xf16
  %buffer = lowbit.alloc_shared : !lowbit.shared<[8, 64], f16, [72, 1], 0>
  %view = lowbit.global_view %x, %rows : !llvm.ptr<1> -> !lowbit.global<[-1, 64], f16, [64, 1], [1, 1]>

  // Offsets are in brackets behind the memory that they are in, each with its word of `boundary` unless that is "none".
  // Attributes that have their default (`limit`) are left out.
  // CHECK:    lowbit.copy_async %x_global[%rows zero, %c0_i32], %x_shared {layout = "local(2, 1).spatial(4, 8).local(1, 8)"}
  // GENERIC:    "lowbit.copy_async"({{.*}}boundary = ["zero", "none"], {{.*}}, limit = [], operandSegmentSizes = array<i32: 1, 1, 2>
  lowbit.copy_async %view[%rows zero, %c0], %buffer {layout = "local(2, 1).spatial(4, 8).local(1, 8)"}
    : !lowbit.global<[-1, 64], f16, [64, 1], [1, 1]>, !lowbit.shared<[8, 64], f16, [72, 1], 0>

  // Results are called after their operation. Of several equal types there is one.
  // CHECK:    %x_tile = lowbit.load %x_shared[%c0_i32, %c0_i32] : !shared_8x64xf16 -> !reg_8x64xf16
  // CHECK:    %add = lowbit.add %x_tile, %x_tile : !reg_8x64xf16
  // CHECK:    %view = lowbit.view %add : !reg_8x64xf16 -> !reg_8x64xf16_1
  %tile = lowbit.load %buffer[%c0, %c0]
    : !lowbit.shared<[8, 64], f16, [72, 1], 0> -> !lowbit.reg<[8, 64], f16, "local(2, 1).spatial(4, 8).local(1, 8)">
  %sum = lowbit.add %tile, %tile : !lowbit.reg<[8, 64], f16, "local(2, 1).spatial(4, 8).local(1, 8)">
  %other = lowbit.view %sum : !lowbit.reg<[8, 64], f16, "local(2, 1).spatial(4, 8).local(1, 8)">
    -> !lowbit.reg<[8, 64], f16, "spatial(4, 8).local(2, 8)">

  // The generic form is read as well.
  // CHECK:    lowbit.wait {pending = 0}
  "lowbit.wait"() {pending = 0} : () -> ()
  lowbit.return
  // GENERIC:  params = ["x", "rows"], sym_name = "names"
}
