// RUN: %lowbit-opt %s --split-input-file --lower-tiles --verify-diagnostics

// What has no meaning for one thread, or none on a GPU.

"lowbit.program"() ({
^bb0(%n: i32):
  // expected-error @below {{lower-tiles: no rule for 'memref.alloc' in a program}}
  %0 = memref.alloc() : memref<8xf32>
  "lowbit.return"() : () -> ()
}) {sym_name = "p", threads = 32, grid = [1, 1, 1], params = ["n"], workspace = 0} : () -> ()

// -----

// 200 KB of shared memory; the default target, sm_80, has 163 KB to a block.
// expected-error @below {{lower-tiles: p needs 204800 bytes of shared memory, sm_80 allows 166912}}
"lowbit.program"() ({
  %0 = "lowbit.alloc_shared"() : () -> !lowbit.shared<[200, 512], f16, [512, 1], 0>
  "lowbit.return"() : () -> ()
}) {sym_name = "p", threads = 32, grid = [1, 1, 1], params = [], workspace = 0} : () -> ()

// -----

// cp.async moves 4, 8 or 16 bytes: here neighbours in memory are in different threads, two bytes each.
!x = !lowbit.global<[8, 32], f16, [32, 1], [1, 1]>
!buffer = !lowbit.shared<[8, 32], f16, [32, 1], 0>
"lowbit.program"() ({
^bb0(%p: !llvm.ptr<1>):
  %c0 = arith.constant 0 : i32
  %x = "lowbit.global_view"(%p) {operandSegmentSizes = array<i32: 1, 0>} : (!llvm.ptr<1>) -> !x
  %buffer = "lowbit.alloc_shared"() : () -> !buffer
  // expected-error @below {{lower-tiles: copy_async moves 4, 8 or 16 bytes per thread, not 2; layout spatial(1, 32).local(8, 1)}}
  "lowbit.copy_async"(%x, %buffer, %c0, %c0) {layout = "spatial(1, 32).local(8, 1)", boundary = ["none", "none"],
    limit = [], operandSegmentSizes = array<i32: 1, 1, 2>} : (!x, !buffer, i32, i32) -> ()
  "lowbit.return"() : () -> ()
}) {sym_name = "p", threads = 32, grid = [1, 1, 1], params = ["x"], workspace = 0} : () -> ()

// -----

!buffer = !lowbit.shared<[8, 32], f16, [32, 1], 0>
"lowbit.program"() ({
  %buffer = "lowbit.alloc_shared"() : () -> !buffer
  "lowbit.free_shared"(%buffer) : (!buffer) -> ()
  // expected-error @below {{lower-tiles: free_shared of what is no buffer of alloc_shared, or free already}}
  "lowbit.free_shared"(%buffer) : (!buffer) -> ()
  "lowbit.return"() : () -> ()
}) {sym_name = "p", threads = 32, grid = [1, 1, 1], params = [], workspace = 0} : () -> ()

// -----

// A branch is taken by all threads or by none, for its effects.
"lowbit.program"() ({
^bb0(%m: i32):
  %c1 = arith.constant 1 : i32
  %one = arith.cmpi eq, %m, %c1 : i32
  // expected-error @below {{lower-tiles: an scf.if in a program has no results and no else}}
  %0 = scf.if %one -> i32 {
    scf.yield %m : i32
  } else {
    scf.yield %c1 : i32
  }
  "lowbit.return"() : () -> ()
}) {sym_name = "p", threads = 32, grid = [1, 1, 1], params = ["m"], workspace = 0} : () -> ()

// -----

!buffer = !lowbit.shared<[8, 32], f16, [32, 1], 0>
"lowbit.program"() ({
^bb0(%n: i32):
  %c0 = arith.constant 0 : i32
  %c1 = arith.constant 1 : i32
  %a = "lowbit.alloc_shared"() : () -> !buffer
  // expected-error @below {{lower-tiles: a loop cannot carry views or buffers, only tiles and scalars}}
  %b = scf.for %i = %c0 to %n step %c1 iter_args(%old = %a) -> !buffer : i32 {
    scf.yield %old : !buffer
  }
  "lowbit.return"() : () -> ()
}) {sym_name = "p", threads = 32, grid = [1, 1, 1], params = ["n"], workspace = 0} : () -> ()
