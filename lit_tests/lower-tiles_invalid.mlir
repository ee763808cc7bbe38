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
  %c0 = "arith.constant"() {value = 0 : i32} : () -> i32
  %part = "lowbit.stage"(%buffer, %c0) : (!buffer, i32) -> !lowbit.shared<[32], f16, [1], 0>
  // expected-error @below {{lower-tiles: free_shared of what is no buffer of alloc_shared, or free already}}
  "lowbit.free_shared"(%part) : (!lowbit.shared<[32], f16, [1], 0>) -> ()
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

// -----

// What the target has not got; the default one is sm_80.
// expected-error @below {{lower-tiles: p in clusters needs sm_90, the target is sm_80}}
"lowbit.program"() ({
  "lowbit.return"() : () -> ()
}) {sym_name = "p", threads = 32, grid = [2, 1, 1], params = [], workspace = 0, cluster = [2, 1, 1]} : () -> ()

// -----

!buffer = !lowbit.shared<[8, 32], f16, [32, 1], 0>
"lowbit.program"() ({
^bb0(%rank: i32):
  %buffer = "lowbit.alloc_shared"() : () -> !buffer
  // expected-error @below {{lower-tiles: lowbit.peer needs sm_90, the target is sm_80}}
  %peer = "lowbit.peer"(%buffer, %rank) : (!buffer, i32) -> !buffer
  "lowbit.return"() : () -> ()
}) {sym_name = "p", threads = 32, grid = [2, 1, 1], params = ["rank"], workspace = 0} : () -> ()

// -----

"lowbit.program"() ({
  // expected-error @below {{lower-tiles: a barrier of a cluster needs sm_90, the target is sm_80}}
  "lowbit.barrier"() {scope = "cluster", warps = 1} : () -> ()
  "lowbit.return"() : () -> ()
}) {sym_name = "p", threads = 32, grid = [2, 1, 1], params = [], workspace = 0} : () -> ()

// -----

"lowbit.program"() ({
  // expected-error @below {{lower-tiles: a barrier for the async proxy needs sm_90, the target is sm_80}}
  "lowbit.barrier"() {scope = "block", warps = 1, async_proxy} : () -> ()
  "lowbit.return"() : () -> ()
}) {sym_name = "p", threads = 32, grid = [2, 1, 1], params = [], workspace = 0} : () -> ()

// -----

!b = !lowbit.shared<[1, 8, 64], f16, [512, 64, 1], 128>
!a = !lowbit.reg<[64, 64], f16, "spatial(4, 1).column_local(2, 8).spatial(8, 4).local(1, 2)">
!d = !lowbit.reg<[64, 8], f32, "spatial(4, 1).local(2, 1).spatial(8, 4).local(1, 2)">
"lowbit.program"() ({
  %b = "lowbit.alloc_shared"() : () -> !b
  %a = "lowbit.constant"() {value = 1.0 : f32} : () -> !a
  %zero = "lowbit.constant"() {value = 0.0 : f32} : () -> !d
  // expected-error @below {{lower-tiles: lowbit.warpgroup_mma needs sm_90a, the target is sm_80}}
  %d = "lowbit.warpgroup_mma"(%a, %b, %zero) {start = 0} : (!a, !b, !d) -> !d
  "lowbit.return"() : () -> ()
}) {sym_name = "p", threads = 128, grid = [1, 1, 1], params = [], workspace = 0} : () -> ()

// -----

!b = !lowbit.shared<[1, 8, 64], f16, [512, 64, 1], 128>
!sums = !lowbit.reg<[1, 8], f32, "replicated(32, rank=2).spatial(1, 4).local(1, 2)">
"lowbit.program"() ({
  %b = "lowbit.alloc_shared"() : () -> !b
  // expected-error @below {{lower-tiles: lowbit.warpgroup_row_sums needs sm_90a, the target is sm_80}}
  %sums = "lowbit.warpgroup_row_sums"(%b) {start = 0, columns = 64} : (!b) -> !sums
  "lowbit.return"() : () -> ()
}) {sym_name = "p", threads = 128, grid = [1, 1, 1], params = [], workspace = 0} : () -> ()

// -----

// A block has sixteen barriers, one of which is that of all its threads. A single warp needs none of them.
"lowbit.program"() ({
  "lowbit.barrier"() {scope = "warps", warps = 1} : () -> ()
  // expected-error @below {{lower-tiles: 16 barriers of 64 threads, a block has 15}}
  "lowbit.barrier"() {scope = "warps", warps = 2} : () -> ()
  "lowbit.return"() : () -> ()
}) {sym_name = "p", threads = 1024, grid = [1, 1, 1], params = [], workspace = 0} : () -> ()

// -----

// Threads of the lower rows would need another constant in the same register.
"lowbit.program"() ({
^bb0(%p: !llvm.ptr<1>):
  // expected-error @below {{lower-tiles: a constant with another value below needs eight rows to a register}}
  %a = "lowbit.constant"() {value = 1.0 : f32, lower = 2.0 : f32} : () -> !lowbit.reg<[16, 2], f32, "spatial(16, 2)">
  "lowbit.return"() : () -> ()
}) {sym_name = "halves", threads = 32, grid = [1, 1, 1], params = ["y"], workspace = 0} : () -> ()
