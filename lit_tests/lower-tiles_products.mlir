// RUN: %lowbit-opt %s --split-input-file --lower-tiles --canonicalize --cse | %filecheck %s

// Codes become fragments, and fragments products on tensor cores.

// From packed words to the tensor core: two 16-byte loads, a decode_pair per register of A, ldmatrix for B.
!codes = !lowbit.global<[2, 32], vector<4xi32>, [32, 1], [1, 1]>
!x_buffer = !lowbit.shared<[8, 128], f16, [136, 1], 0>
!units = !lowbit.reg<[2, 32], vector<4xi32>, "local(2, 1).spatial(1, 32)">
!a_codes = !lowbit.reg<[16, 128], #lowbit.format<"u4", []>, "local(1, 8).column_local(2, 2).spatial(8, 4).local(1, 2)">
!a = !lowbit.reg<[16, 128], f16, "local(1, 8).column_local(2, 2).spatial(8, 4).local(1, 2)">
!b = !lowbit.reg<[8, 128], f16, "local(1, 16).spatial(8, 4).local(1, 2)">
!d = !lowbit.reg<[16, 8], f32, "local(2, 1).spatial(8, 4).local(1, 2)">
// CHECK-LABEL: gpu.func @tensor_core

// The first mma needs the first four registers of A, which are made right before it. Registers r and r + 1 of a block
// are 4 bits apart in one word.
// CHECK-DAG:     %[[MATRIX_ROW:.*]] = arith.remui %[[LANE:.*]], %c8_i32
// CHECK:         %[[UNIT:.*]] = llvm.load %{{.*}} {alignment = 16 : i64} : !llvm.ptr<1> -> vector<4xi32>
// CHECK:         %[[WORD:.*]] = llvm.extractelement %[[UNIT]][%c0_i32 : i32]
// CHECK:         %[[A0:.*]] = lowbit.decode_pair %[[WORD]] {{.*}}register = 0{{.*}} : vector<2xf16>
// CHECK:         %[[A1:.*]] = lowbit.decode_pair %[[WORD]] {{.*}}register = 1
// CHECK:         %[[A2:.*]] = lowbit.decode_pair %[[WORD]] {{.*}}register = 2
// CHECK:         %[[A3:.*]] = lowbit.decode_pair %[[WORD]] {{.*}}register = 3

// ldmatrix: lane l points at row l % 8, or the last one of %m, of matrix l / 8.
// CHECK:         %[[ROW:.*]] = arith.minsi %[[MATRIX_ROW]], %{{.*}} : i32
// CHECK:         arith.muli %[[ROW]], %c272_i32
// CHECK:         nvvm.ldmatrix %{{.*}} {eltType = #nvvm.ld_st_matrix_elt_type<b16>, layout = #nvvm.mma_layout<row>, num = 4
// CHECK:         nvvm.mma.sync A[%[[A0]], %[[A1]], %[[A2]], %[[A3]]] B[%{{.*}}, %{{.*}}] C[
// CHECK:           shape = #nvvm.shape<m = 16, n = 8, k = 16>

// Eight mma in all, over 128 columns.
// CHECK-COUNT-7: nvvm.mma.sync
// CHECK-NOT:     nvvm.mma.sync
lowbit.program @tensor_core(%pw: !llvm.ptr<1>, %py: !llvm.ptr<1>, %m: i32) attributes {threads = 32, grid = [1, 1, 1],
    params = ["w", "y", "m"], workspace = 0} {
  %c0 = arith.constant 0 : i32
  %codes = lowbit.global_view %pw : !llvm.ptr<1> -> !codes
  %y = lowbit.global_view %py : !llvm.ptr<1> -> !lowbit.global<[16, 8], f32, [8, 1], [1, 1]>
  %x_buffer = lowbit.alloc_shared : !x_buffer
  %units = lowbit.load %codes[%c0, %c0] : !codes -> !units
  %a_codes = lowbit.view %units : !units -> !a_codes
  %a = lowbit.decode %a_codes {exponent = 0} : !a_codes -> !a
  %b = lowbit.load_matrix %x_buffer, %m : !x_buffer -> !b
  %zero = lowbit.constant {value = 0.0 : f32} : !d
  %d = lowbit.mma %a, %b, %zero : !a, !b, !d -> !d
  lowbit.store %d, %y[%c0, %c0] : !d, !lowbit.global<[16, 8], f32, [8, 1], [1, 1]>
  lowbit.return
}

// -----

// A shift per row: rows g and g + 8 of a fragment, for lane group g, are its registers 0 and 2, and 1 and 3. A row's
// shift comes twice in a vector, made once for all columns.
!codes = !lowbit.global<[2, 32], vector<4xi32>, [32, 1], [1, 1]>
!units = !lowbit.reg<[2, 32], vector<4xi32>, "local(2, 1).spatial(1, 32)">
!a_codes = !lowbit.reg<[16, 128], #lowbit.format<"u4", []>, "local(1, 8).column_local(2, 2).spatial(8, 4).local(1, 2)">
!a = !lowbit.reg<[16, 128], f16, "local(1, 8).column_local(2, 2).spatial(8, 4).local(1, 2)">
!shift = !lowbit.reg<[16, 1], f16, "local(2, 1).spatial(8, 1).replicated(4, rank=2)">
!out = !lowbit.global<[16, 128], f16, [128, 1], [1, 1]>
// CHECK-LABEL: gpu.func @shift
// CHECK:         %[[UPPER:.*]] = llvm.load %{{.*}} {alignment = 2 : i64} : !llvm.ptr<1> -> f16
// CHECK:         %[[LOWER:.*]] = llvm.load %{{.*}} {alignment = 2 : i64} : !llvm.ptr<1> -> f16
// CHECK:         %[[U0:.*]] = llvm.insertelement %[[UPPER]], %{{.*}}[%c0_i32 : i32]
// CHECK-NEXT:    %[[U:.*]] = llvm.insertelement %[[UPPER]], %[[U0]][%c1_i32 : i32]
// CHECK:         lowbit.decode_shifted_pair %[[U]], %[[WORD:.*]] {{.*}}register = 0
// CHECK:         %[[L0:.*]] = llvm.insertelement %[[LOWER]], %{{.*}}[%c0_i32 : i32]
// CHECK-NEXT:    %[[L:.*]] = llvm.insertelement %[[LOWER]], %[[L0]][%c1_i32 : i32]
// CHECK:         lowbit.decode_shifted_pair %[[L]], %[[WORD]] {{.*}}register = 1
// CHECK:         lowbit.decode_shifted_pair %[[U]], %[[WORD]] {{.*}}register = 2
// CHECK:         lowbit.decode_shifted_pair %[[L]], %[[WORD]] {{.*}}register = 3
// The last of the eight blocks of columns has the same.
// CHECK-COUNT-26: lowbit.decode_shifted_pair
// CHECK:         lowbit.decode_shifted_pair %[[U]], %{{.*}} {{.*}}register = 2
// CHECK:         lowbit.decode_shifted_pair %[[L]], %{{.*}} {{.*}}register = 3
lowbit.program @shift(%pw: !llvm.ptr<1>, %pz: !llvm.ptr<1>, %py: !llvm.ptr<1>) attributes {threads = 32, grid = [1, 1, 1],
    params = ["w", "z", "y"], workspace = 0} {
  %c0 = arith.constant 0 : i32
  %codes = lowbit.global_view %pw : !llvm.ptr<1> -> !codes
  %z = lowbit.global_view %pz : !llvm.ptr<1> -> !lowbit.global<[16, 1], f16, [1, 1], [1, 1]>
  %y = lowbit.global_view %py : !llvm.ptr<1> -> !out
  %units = lowbit.load %codes[%c0, %c0] : !codes -> !units
  %a_codes = lowbit.view %units : !units -> !a_codes
  %first = lowbit.load %z[%c0, %c0] : !lowbit.global<[16, 1], f16, [1, 1], [1, 1]> -> !shift
  %a = lowbit.decode %a_codes, %first {exponent = 0} : !a_codes, !shift -> !a
  lowbit.store %a, %y[%c0, %c0] : !a, !out
  lowbit.return
}

// -----

// Two shifts, of two groups of 64 columns: the first for four blocks, 16 pairs, the second for the other four.
!codes = !lowbit.global<[2, 32], vector<4xi32>, [32, 1], [1, 1]>
!units = !lowbit.reg<[2, 32], vector<4xi32>, "local(2, 1).spatial(1, 32)">
!a_codes = !lowbit.reg<[16, 128], #lowbit.format<"u4", []>, "local(1, 8).column_local(2, 2).spatial(8, 4).local(1, 2)">
!a = !lowbit.reg<[16, 128], f16, "local(1, 8).column_local(2, 2).spatial(8, 4).local(1, 2)">
!shift = !lowbit.reg<[16, 1], f16, "local(2, 1).spatial(8, 1).replicated(4, rank=2)">
!out = !lowbit.global<[16, 128], f16, [128, 1], [1, 1]>
// CHECK-LABEL: gpu.func @shifts
// CHECK:         %[[FIRST_UPPER:.*]] = llvm.load %{{.*}} {alignment = 2 : i64} : !llvm.ptr<1> -> f16
// CHECK:         %[[FIRST_LOWER:.*]] = llvm.load %{{.*}} {alignment = 2 : i64} : !llvm.ptr<1> -> f16
// CHECK:         %[[SECOND_UPPER:.*]] = llvm.load %{{.*}} {alignment = 2 : i64} : !llvm.ptr<1> -> f16
// CHECK:         %[[SECOND_LOWER:.*]] = llvm.load %{{.*}} {alignment = 2 : i64} : !llvm.ptr<1> -> f16
// CHECK:         %[[FU:.*]] = llvm.insertelement %[[FIRST_UPPER]], %{{.*}}[%c1_i32 : i32]
// CHECK:         lowbit.decode_shifted_pair %[[FU]], %{{.*}} {{.*}}register = 0
// CHECK:         %[[FL:.*]] = llvm.insertelement %[[FIRST_LOWER]], %{{.*}}[%c1_i32 : i32]
// CHECK:         lowbit.decode_shifted_pair %[[FL]], %{{.*}} {{.*}}register = 1
// CHECK-COUNT-12: lowbit.decode_shifted_pair
// CHECK:         lowbit.decode_shifted_pair %[[FU]], %{{.*}} {{.*}}register = 2
// CHECK:         lowbit.decode_shifted_pair %[[FL]], %{{.*}} {{.*}}register = 3
// CHECK:         %[[SU:.*]] = llvm.insertelement %[[SECOND_UPPER]], %{{.*}}[%c1_i32 : i32]
// CHECK:         lowbit.decode_shifted_pair %[[SU]], %{{.*}} {{.*}}register = 0
// CHECK:         %[[SL:.*]] = llvm.insertelement %[[SECOND_LOWER]], %{{.*}}[%c1_i32 : i32]
// CHECK:         lowbit.decode_shifted_pair %[[SL]], %{{.*}} {{.*}}register = 1
// CHECK-COUNT-12: lowbit.decode_shifted_pair
// CHECK:         lowbit.decode_shifted_pair %[[SU]], %{{.*}} {{.*}}register = 2
// CHECK:         lowbit.decode_shifted_pair %[[SL]], %{{.*}} {{.*}}register = 3
// CHECK-NOT:     lowbit.decode_shifted_pair
lowbit.program @shifts(%pw: !llvm.ptr<1>, %pz: !llvm.ptr<1>, %py: !llvm.ptr<1>) attributes {threads = 32, grid = [1, 1, 1],
    params = ["w", "z", "y"], workspace = 0} {
  %c0 = arith.constant 0 : i32
  %c1 = arith.constant 1 : i32
  %codes = lowbit.global_view %pw : !llvm.ptr<1> -> !codes
  %z = lowbit.global_view %pz : !llvm.ptr<1> -> !lowbit.global<[16, 2], f16, [2, 1], [1, 1]>
  %y = lowbit.global_view %py : !llvm.ptr<1> -> !out
  %units = lowbit.load %codes[%c0, %c0] : !codes -> !units
  %a_codes = lowbit.view %units : !units -> !a_codes
  %first = lowbit.load %z[%c0, %c0] : !lowbit.global<[16, 2], f16, [2, 1], [1, 1]> -> !shift
  %second = lowbit.load %z[%c0, %c1] : !lowbit.global<[16, 2], f16, [2, 1], [1, 1]> -> !shift
  %a = lowbit.decode %a_codes, %first, %second {exponent = 0} : !a_codes, !shift, !shift -> !a
  lowbit.store %a, %y[%c0, %c0] : !a, !out
  lowbit.return
}

// -----

// An A of f32 (a format that f16 is too narrow for) makes two tf32 mma of half the depth from the same fragments.
!a = !lowbit.reg<[16, 16], f32, "column_local(2, 2).spatial(8, 4).local(1, 2)">
!b = !lowbit.reg<[8, 16], f16, "local(1, 2).spatial(8, 4).local(1, 2)">
!d = !lowbit.reg<[16, 8], f32, "local(2, 1).spatial(8, 4).local(1, 2)">
// CHECK-LABEL: gpu.func @tf32
// CHECK-COUNT-2: nvvm.mma.sync {{.*}}multiplicandAPtxType = #nvvm.mma_type<tf32>{{.*}}k = 8
// CHECK-NOT:     nvvm.mma.sync
lowbit.program @tf32(%py: !llvm.ptr<1>) attributes {threads = 32, grid = [1, 1, 1], params = ["y"], workspace = 0} {
  %c0 = arith.constant 0 : i32
  %y = lowbit.global_view %py : !llvm.ptr<1> -> !lowbit.global<[16, 8], f32, [8, 1], [1, 1]>
  %a = lowbit.constant {value = 3.0 : f32} : !a
  %b = lowbit.constant {value = 2.0 : f32} : !b
  %zero = lowbit.constant {value = 0.0 : f32} : !d
  %d = lowbit.mma %a, %b, %zero : !a, !b, !d -> !d
  lowbit.store %d, %y[%c0, %c0] : !d, !lowbit.global<[16, 8], f32, [8, 1], [1, 1]>
  lowbit.return
}

// -----

// The last of three blocks: an acquire-release increment by one thread, told to the others through shared memory. It
// puts the counter back to zero, for the next launch.
// CHECK-LABEL: gpu.func @last
// CHECK:         gpu.barrier
// CHECK:         scf.if
// CHECK:           %[[OLD:.*]] = llvm.inline_asm has_side_effects {{.*}}"atom.acq_rel.gpu.global.add.u32 $0, [$1], $2;"
// CHECK:           %[[LAST:.*]] = arith.cmpi eq, %[[OLD]], %c2_i32
// CHECK:           scf.if %[[LAST]] {
// CHECK-NEXT:        llvm.store %c0_i32{{.*}} !llvm.ptr<1>
// CHECK:           llvm.store {{.*}} !llvm.ptr<3>
// CHECK:         gpu.barrier
// CHECK:         gpu.return
lowbit.program @last(%pc: !llvm.ptr<1>) attributes {threads = 64, grid = [3, 1, 1], params = ["workspace"], workspace = 4} {
  %c0 = arith.constant 0 : i32
  %c3 = arith.constant 3 : i32
  %counters = lowbit.global_view %pc : !llvm.ptr<1> -> !lowbit.global<[1], i32, [1], [1]>
  %last = lowbit.last_arrival %counters, %c0, %c3 : !lowbit.global<[1], i32, [1], [1]>
  scf.if %last {
    lowbit.barrier {scope = "block"}
  }
  lowbit.return
}

// -----

// Whether so many blocks have been there already: one thread looks, unless it waits for none.
// CHECK-LABEL: gpu.func @others
// CHECK:         gpu.barrier
// CHECK:         scf.if
// CHECK:           %[[SEEN:.*]] = llvm.inline_asm has_side_effects {{.*}}setp.gt.s32 some, $2, 0;{{.*}}@some atom.acquire.gpu.global.add.u32 $0, [$1], 0;
// CHECK:           %[[ALL:.*]] = arith.cmpi eq, %[[SEEN]], %[[COUNT:.*]] : i32
// CHECK:           %[[SOME:.*]] = arith.cmpi ne, %[[COUNT]], %c0_i32
// CHECK:           %[[BOTH:.*]] = arith.andi %[[ALL]], %[[SOME]]
// CHECK:           scf.if %[[BOTH]] {
// CHECK-NEXT:        llvm.store %c0_i32{{.*}} !llvm.ptr<1>
// CHECK:           llvm.store {{.*}} !llvm.ptr<3>
// CHECK:         gpu.barrier
lowbit.program @others(%pc: !llvm.ptr<1>, %count: i32) attributes {threads = 64, grid = [3, 1, 1], params = ["workspace", "m"],
    workspace = 4} {
  %c0 = arith.constant 0 : i32
  %counters = lowbit.global_view %pc : !llvm.ptr<1> -> !lowbit.global<[1], i32, [1], [1]>
  %all = lowbit.others_arrived %counters, %c0, %count : !lowbit.global<[1], i32, [1], [1]>
  scf.if %all {
    lowbit.barrier {scope = "block"}
  }
  lowbit.return
}

// -----

// Signed codes as bytes: each goes to the top of its byte, and the lop3 that masks it turns its sign.
// CHECK-LABEL: gpu.func @signed_bytes
// CHECK:         %[[LEFT:.*]] = arith.shli %[[WORD:.*]], %c4_i32
// CHECK:         llvm.inline_asm asm_dialect = att "lop3.b32 $0, $1, $2, $3, 106;", "=r,r,n,r" %[[LEFT]], %c-252645136_i32, %c-2139062144_i32
// CHECK:         llvm.inline_asm asm_dialect = att "lop3.b32 $0, $1, $2, $3, 106;", "=r,r,n,r" %[[WORD]], %c-252645136_i32, %c-2139062144_i32
// CHECK:         nvvm.mma.sync {{.*}} multiplicandAPtxType = #nvvm.mma_type<s8>
!codes = !lowbit.global<[1, 32], vector<4xi32>, [32, 1], [1, 1]>
!x_buffer = !lowbit.shared<[8, 64], i8, [80, 1], 0>
!units = !lowbit.reg<[1, 32], vector<4xi32>, "spatial(1, 32)">
!a_codes = !lowbit.reg<[16, 64], #lowbit.format<"i4", []>, "local(1, 4).column_local(2, 2).spatial(8, 4).local(1, 2)">
!a = !lowbit.reg<[16, 64], i8, "local(1, 2).column_local(2, 2).spatial(8, 4).local(1, 4)">
!b = !lowbit.reg<[8, 64], i8, "local(1, 2).column_local(1, 2).spatial(8, 4).local(1, 4)">
!d = !lowbit.reg<[16, 8], i32, "local(2, 1).spatial(8, 4).local(1, 2)">
!y = !lowbit.global<[16, 8], i32, [8, 1], [1, 1]>
lowbit.program @signed_bytes(%pw: !llvm.ptr<1>, %py: !llvm.ptr<1>) attributes {threads = 32, grid = [1, 1, 1], params = ["w",
    "y"], workspace = 0} {
  %c0 = arith.constant 0 : i32
  %w = lowbit.global_view %pw : !llvm.ptr<1> -> !codes
  %y = lowbit.global_view %py : !llvm.ptr<1> -> !y
  %x = lowbit.alloc_shared : !x_buffer
  %units = lowbit.load %w[%c0, %c0] : !codes -> !units
  %codes = lowbit.view %units : !units -> !a_codes
  %a = lowbit.decode_bytes %codes : !a_codes -> !a
  %c8 = arith.constant 8 : i32
  %b = lowbit.load_matrix %x, %c8 : !x_buffer -> !b
  %zero = lowbit.constant {value = 0.0 : f32} : !d
  %sums = lowbit.mma %a, %b, %zero : !a, !b, !d -> !d
  lowbit.store %sums, %y[%c0, %c0] : !d, !y
  lowbit.return
}
