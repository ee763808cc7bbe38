// RUN: %lowbit-opt %s --split-input-file --verify-diagnostics

// What verifiers refuse: products by wgmma. Wrong types are in types_invalid.mlir.

// Warpgroups. a [64, 32] in registers, b [1, 8, 64] in shared memory: 64 columns of k, of which some are taken; c [64, 8].
!a = !lowbit.reg<[64, 32], f16, "spatial(4, 1).column_local(2, 4).spatial(8, 4).local(1, 2)">
!b = !lowbit.shared<[1, 8, 64], f16, [512, 64, 1], 128>
!c = !lowbit.reg<[64, 8], f32, "spatial(4, 1).local(2, 1).spatial(8, 4).local(1, 2)">
!d = !lowbit.reg<[64, 8], f16, "spatial(4, 1).local(2, 1).spatial(8, 4).local(1, 2)">
func.func @warpgroup_result(%a: !a, %b: !b, %c: !c) {
  // expected-error @below {{'lowbit.warpgroup_mma' op result: expected Reg(element='f32'}}
  %0 = "lowbit.warpgroup_mma"(%a, %b, %c) {start = 0} : (!a, !b, !c) -> !d
  return
}

// -----

!a = !lowbit.reg<[64, 32], f16, "spatial(4, 1).column_local(2, 4).spatial(8, 4).local(1, 2)">
!b = !lowbit.shared<[1, 8, 64], f16, [512, 64, 1], 128>
!c = !lowbit.reg<[64, 8], f16, "spatial(4, 1).local(2, 1).spatial(8, 4).local(1, 2)">
func.func @warpgroup_accumulator(%a: !a, %b: !b, %c: !c) {
  // expected-error @below {{element of c: expected f32, got f16}}
  %0 = "lowbit.warpgroup_mma"(%a, %b, %c) {start = 0} : (!a, !b, !c) -> !c
  return
}

// -----

!a = !lowbit.reg<[64, 32], bf16, "spatial(4, 1).column_local(2, 4).spatial(8, 4).local(1, 2)">
!b = !lowbit.shared<[1, 8, 64], f16, [512, 64, 1], 128>
!c = !lowbit.reg<[64, 8], f32, "spatial(4, 1).local(2, 1).spatial(8, 4).local(1, 2)">
func.func @warpgroup_a(%a: !a, %b: !b, %c: !c) {
  // expected-error @below {{element of a: expected f16, got bf16}}
  %0 = "lowbit.warpgroup_mma"(%a, %b, %c) {start = 0} : (!a, !b, !c) -> !c
  return
}

// -----

!a = !lowbit.reg<[64, 32], f32, "spatial(4, 1).column_local(2, 4).spatial(8, 4).local(1, 2)">
!b = !lowbit.shared<[1, 8, 32], f32, [256, 32, 1], 128>
!c = !lowbit.reg<[64, 8], f32, "spatial(4, 1).local(2, 1).spatial(8, 4).local(1, 2)">
func.func @warpgroup_b(%a: !a, %b: !b, %c: !c) {
  // expected-error @below {{element of b: expected f16 or bf16 or f8E4M3FN or i8, got f32}}
  %0 = "lowbit.warpgroup_mma"(%a, %b, %c) {start = 0} : (!a, !b, !c) -> !c
  return
}

// -----

!a = !lowbit.reg<[64, 32], f16, "spatial(4, 1).column_local(2, 4).spatial(8, 4).local(1, 2)">
!b = !lowbit.shared<[1, 8, 64], f16, [512, 64, 1], 0>
!c = !lowbit.reg<[64, 8], f32, "spatial(4, 1).local(2, 1).spatial(8, 4).local(1, 2)">
func.func @warpgroup_swizzle(%a: !a, %b: !b, %c: !c) {
  // expected-error @below {{swizzle of b: expected 128, got 0}}
  %0 = "lowbit.warpgroup_mma"(%a, %b, %c) {start = 0} : (!a, !b, !c) -> !c
  return
}

// -----

!a = !lowbit.reg<[64, 32], f16, "spatial(4, 1).column_local(2, 4).spatial(8, 4).local(1, 2)">
!b = !lowbit.shared<[8, 64], f16, [64, 1], 128>
!c = !lowbit.reg<[64, 8], f32, "spatial(4, 1).local(2, 1).spatial(8, 4).local(1, 2)">
func.func @warpgroup_rank(%a: !a, %b: !b, %c: !c) {
  // expected-error @below {{rank of b: expected 3, got 2}}
  %0 = "lowbit.warpgroup_mma"(%a, %b, %c) {start = 0} : (!a, !b, !c) -> !c
  return
}

// -----

!a = !lowbit.reg<[64, 32], f16, "spatial(4, 1).column_local(2, 4).spatial(8, 4).local(1, 2)">
!b = !lowbit.shared<[1, 8, 32], f16, [512, 64, 1], 128>
!c = !lowbit.reg<[64, 8], f32, "spatial(4, 1).local(2, 1).spatial(8, 4).local(1, 2)">
func.func @warpgroup_width(%a: !a, %b: !b, %c: !c) {
  // expected-error @below {{b: expected rows of 64 columns: [.., k / 64, n, 64], got [1, 8, 32]}}
  %0 = "lowbit.warpgroup_mma"(%a, %b, %c) {start = 0} : (!a, !b, !c) -> !c
  return
}

// -----

!a = !lowbit.reg<[64, 32], f16, "spatial(4, 1).column_local(2, 4).spatial(8, 4).local(1, 2)">
!b = !lowbit.shared<[1, 4, 64], f16, [512, 64, 1], 128>
!c = !lowbit.reg<[64, 8], f32, "spatial(4, 1).local(2, 1).spatial(8, 4).local(1, 2)">
func.func @warpgroup_n(%a: !a, %b: !b, %c: !c) {
  // expected-error @below {{n: expected a multiple of 8 up to 256, got 4}}
  %0 = "lowbit.warpgroup_mma"(%a, %b, %c) {start = 0} : (!a, !b, !c) -> !c
  return
}

// -----

!a = !lowbit.reg<[64, 32], f16, "spatial(4, 1).column_local(2, 4).spatial(8, 4).local(1, 2)">
!b = !lowbit.shared<[1, 16, 64], f16, [1024, 64, 1], 128>
!c = !lowbit.reg<[64, 8], f32, "spatial(4, 1).local(2, 1).spatial(8, 4).local(1, 2)">
func.func @warpgroup_columns(%a: !a, %b: !b, %c: !c) {
  // expected-error @below {{result: expected ['m', 16], got [64, 8]}}
  %0 = "lowbit.warpgroup_mma"(%a, %b, %c) {start = 0} : (!a, !b, !c) -> !c
  return
}

// -----

!a = !lowbit.reg<[64, 32], f16, "spatial(4, 1).column_local(2, 4).spatial(8, 4).local(1, 2)">
!b = !lowbit.shared<[1, 8, 64], f16, [512, 64, 1], 128>
!c = !lowbit.reg<[64, 8], f32, "spatial(4, 1).local(2, 1).spatial(8, 4).local(1, 2)">
func.func @warpgroup_start(%a: !a, %b: !b, %c: !c) {
  // expected-error @below {{start: expected 0..32, got 48}}
  %0 = "lowbit.warpgroup_mma"(%a, %b, %c) {start = 48} : (!a, !b, !c) -> !c
  return
}

// -----

!a = !lowbit.reg<[64, 32], f16, "spatial(4, 1).column_local(2, 4).spatial(8, 4).local(1, 2)">
!b = !lowbit.shared<[1, 8, 64], f16, [512, 64, 1], 128>
!c = !lowbit.reg<[64, 8], f32, "spatial(4, 1).local(2, 1).spatial(8, 4).local(1, 2)">
func.func @warpgroup_between_fragments(%a: !a, %b: !b, %c: !c) {
  // expected-error @below {{start and columns: expected multiples of 16, got (8, 32)}}
  %0 = "lowbit.warpgroup_mma"(%a, %b, %c) {start = 8} : (!a, !b, !c) -> !c
  return
}

// -----

!a = !lowbit.reg<[128, 32], f16, "local(2, 1).spatial(4, 1).column_local(2, 4).spatial(8, 4).local(1, 2)">
!b = !lowbit.shared<[1, 8, 64], f16, [512, 64, 1], 128>
!c = !lowbit.reg<[64, 8], f32, "spatial(4, 1).local(2, 1).spatial(8, 4).local(1, 2)">
func.func @warpgroup_rows(%a: !a, %b: !b, %c: !c) {
  // expected-error @below {{a: expected [64, 'k'], got [128, 32]}}
  %0 = "lowbit.warpgroup_mma"(%a, %b, %c) {start = 0} : (!a, !b, !c) -> !c
  return
}

// -----

!a = !lowbit.reg<[64, 32], f16, "spatial(4, 1).local(2, 4).spatial(8, 4).local(1, 2)">
!b = !lowbit.shared<[1, 8, 64], f16, [512, 64, 1], 128>
!c = !lowbit.reg<[64, 8], f32, "spatial(4, 1).local(2, 1).spatial(8, 4).local(1, 2)">
func.func @warpgroup_layout(%a: !a, %b: !b, %c: !c) {
  // expected-error @below {{layout of a: expected a multiple of column_local(2, 2).spatial(8, 4).local(1, 2)}}
  %0 = "lowbit.warpgroup_mma"(%a, %b, %c) {start = 0} : (!a, !b, !c) -> !c
  return
}

// -----

!a = !lowbit.reg<[32, 32], f16, "spatial(2, 1).replicated(2).column_local(2, 4).spatial(8, 4).local(1, 2)">
!b = !lowbit.shared<[1, 16, 64], f16, [1024, 64, 1], 128>
!c = !lowbit.reg<[32, 16], f32, "spatial(2, 2).local(2, 1).spatial(8, 4).local(1, 2)">
func.func @warpgroup_split_columns(%a: !a, %b: !b, %c: !c) {
  // expected-error @below {{columns of c: expected within each warp, got spread over warps}}
  %0 = "lowbit.warpgroup_mma"(%a, %b, %c) {start = 0} : (!a, !b, !c) -> !c
  return
}

// -----

!a = !lowbit.reg<[32, 32], f16, "spatial(2, 2).column_local(2, 2).spatial(8, 4).local(1, 2)">
!b = !lowbit.shared<[1, 8, 64], f16, [512, 64, 1], 128>
!c = !lowbit.reg<[32, 8], f32, "spatial(2, 1).replicated(2).local(2, 1).spatial(8, 4).local(1, 2)">
func.func @warpgroup_split_k(%a: !a, %b: !b, %c: !c) {
  // expected-error @below {{k of a: expected within each warp, got spread over warps}}
  %0 = "lowbit.warpgroup_mma"(%a, %b, %c) {start = 0} : (!a, !b, !c) -> !c
  return
}

// -----

!a = !lowbit.reg<[64, 32], f16, "column_spatial(2, 1).replicated(2).local(2, 1).column_local(2, 4).spatial(8, 4).local(1, 2)">
!b = !lowbit.shared<[1, 8, 64], f16, [512, 64, 1], 128>
!c = !lowbit.reg<[64, 8], f32, "spatial(4, 1).local(2, 1).spatial(8, 4).local(1, 2)">
func.func @warpgroup_warps(%a: !a, %b: !b, %c: !c) {
  // expected-error @below {{warps of a: expected the result's}}
  %0 = "lowbit.warpgroup_mma"(%a, %b, %c) {start = 0} : (!a, !b, !c) -> !c
  return
}

// -----

// Four warps take part in an instruction and read the same b: two steps are work for two warpgroups.
!a = !lowbit.reg<[2, 32, 32], f16, "spatial(2, 2, 1).column_local(1, 2, 4).spatial(1, 8, 4).local(1, 1, 2)">
!b = !lowbit.shared<[2, 1, 8, 64], f16, [512, 512, 64, 1], 128>
!c = !lowbit.reg<[2, 32, 8], f32, "spatial(2, 2, 1).local(1, 2, 1).spatial(1, 8, 4).local(1, 1, 2)">
func.func @warpgroup_halves(%a: !a, %b: !b, %c: !c) {
  // expected-error @below {{dim 0 of the result: expected the same in all of a warpgroup, got spatial(2, 2, 1)}}
  %0 = "lowbit.warpgroup_mma"(%a, %b, %c) {start = 0} : (!a, !b, !c) -> !c
  return
}

// -----

!a = !lowbit.reg<[2, 64, 32], f16, "local(2, 1, 1).spatial(1, 4, 1).column_local(1, 2, 4).spatial(1, 8, 4).local(1, 1, 2)">
!b = !lowbit.shared<[2, 1, 8, 64], f16, [512, 512, 64, 1], 128>
!c = !lowbit.reg<[2, 64, 8], f32, "local(2, 1, 1).spatial(1, 4, 1).local(1, 2, 1).spatial(1, 8, 4).local(1, 1, 2)">
func.func @warpgroup_two_steps(%a: !a, %b: !b, %c: !c) {
  // expected-error @below {{dim 0 of the result: expected the same in all of a warpgroup, got spatial(1, 4, 1).local(2, 2, 1)}}
  %0 = "lowbit.warpgroup_mma"(%a, %b, %c) {start = 0} : (!a, !b, !c) -> !c
  return
}

// -----

!b = !lowbit.shared<[1, 8, 64], f16, [512, 64, 1], 128>
func.func @warpgroup_sums_element(%b: !b) {
  // expected-error @below {{'lowbit.warpgroup_row_sums' op element of the result: expected f32, got f16}}
  %0 = "lowbit.warpgroup_row_sums"(%b) {start = 0, columns = 32} : (!b) -> !lowbit.reg<[1, 8], f16, "replicated(32, rank=2).spatial(1, 4).local(1, 2)">
  return
}

// -----

!b = !lowbit.shared<[1, 8, 64], f16, [512, 64, 1], 128>
func.func @warpgroup_sums_columns(%b: !b) {
  // expected-error @below {{columns: expected at least 16, got 0}}
  %0 = "lowbit.warpgroup_row_sums"(%b) {start = 0, columns = 0} : (!b) -> !lowbit.reg<[1, 8], f32, "replicated(32, rank=2).spatial(1, 4).local(1, 2)">
  return
}

// -----

!b = !lowbit.shared<[1, 8, 64], f16, [512, 64, 1], 128>
func.func @warpgroup_sums_end(%b: !b) {
  // expected-error @below {{start: expected 0..32, got 48}}
  %0 = "lowbit.warpgroup_row_sums"(%b) {start = 48, columns = 32} : (!b) -> !lowbit.reg<[1, 8], f32, "replicated(32, rank=2).spatial(1, 4).local(1, 2)">
  return
}
