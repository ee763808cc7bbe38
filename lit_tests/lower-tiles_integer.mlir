// RUN: %lowbit-opt %s --lower-tiles --canonicalize --cse | %filecheck %s

// One token in integers, with codes of 2 bits: a piece of 128 columns of 16 rows (`dialect.formats.integer_limbs`).

!x = !lowbit.shared<[1, 1, 128], f16, [136, 136, 1], 0>
!limbs = !lowbit.shared<[1, 1, 4, 4, 8], i32, [192, 192, 48, 12, 1], 0>
!unit = !lowbit.reg<[1, 1, 1], f32, "replicated(32, rank=3)">
!codes = !lowbit.reg<[1, 16, 128], #lowbit.format<"u2", []>, "column_local(1, 2, 16).spatial(1, 8, 4).local(1, 1, 2)">
!pairs = !lowbit.reg<[1, 16, 2], f32, "local(1, 2, 1).spatial(1, 8, 1).replicated(2).spatial(1, 1, 2)">
!joined = !lowbit.reg<[1, 16, 1], f32, "local(1, 2, 1).spatial(1, 8, 1).replicated(4)">
!units = !lowbit.shared<[1, 1, 32], vector<4xi32>, [32, 32, 1], 0>
!words = !lowbit.reg<[1, 1, 32], vector<4xi32>, "spatial(1, 1, 32)">
!y = !lowbit.shared<[1, 16, 1], f32, [16, 1, 1], 0>

// A lane takes two pairs of columns, 16 apart, whose codes one mask takes.
// CHECK-LABEL: gpu.func @limbs
// CHECK:         %[[FIRST:.*]] = llvm.load %[[X:.*]] {alignment = 4 : i64} : !llvm.ptr<3> -> vector<2xf16>
// CHECK:         %[[SECOND:.*]] = llvm.load %{{.*}} {alignment = 4 : i64} : !llvm.ptr<3> -> vector<2xf16>

// The exponent of the largest of the 128, from all lanes; at 255 is no number, and the unit is NaN.
// CHECK:         %[[TOP:.*]] = nvvm.redux.sync umax
// CHECK:         %[[EXPONENT:.*]] = arith.shrui %[[TOP]], %c23_i32
// CHECK:         arith.cmpi eq, %[[EXPONENT]], %c255_i32
// CHECK:         %[[UNIT_BITS:.*]] = arith.select %{{.*}}, %c2143289344_i32
// CHECK:         %[[UNIT:.*]] = llvm.bitcast %[[UNIT_BITS]] : i32 to f32

// Rounded to integers, which become signed limbs, 0x00808080 being carries: eight prmt sort the bytes of four numbers.
// CHECK-COUNT-4: llvm.inline_asm {{.*}} "cvt.rni.s32.f32 $0, $1;"
// CHECK-COUNT-4: arith.xori %{{.*}}, %c8421504_i32
// CHECK-COUNT-8: llvm.inline_asm {{.*}} "prmt.b32 $0, $1, $2, $3;"
// CHECK-COUNT-4: llvm.store %{{.*}} {alignment = 4 : i64} : i32
// CHECK:         nvvm.bar.warp.sync

// A word of 2-bit codes is a fragment of bytes under four masks, without a shift.
// CHECK:         %[[WORDS:.*]] = llvm.load %{{.*}} -> vector<4xi32>
// CHECK:         %[[WORD:.*]] = llvm.extractelement %[[WORDS]][%c0_i32 : i32]
// CHECK:         %[[A0:.*]] = arith.andi %[[WORD]], %c50529027_i32
// CHECK:         %[[A1:.*]] = arith.andi %[[WORD]], %c202116108_i32
// CHECK:         %[[A2:.*]] = arith.andi %[[WORD]], %c808464432_i32
// CHECK:         %[[A3:.*]] = arith.andi %[[WORD]], %c-1061109568_i32

// Four mma for 16 rows of 128 columns, from the bits of 1.5 * 2^23.
// CHECK:         %[[LIMBS:.*]] = llvm.load %{{.*}} {alignment = 16 : i64} : !llvm.ptr<3> -> vector<4xi32>
// CHECK:         %[[B0:.*]] = llvm.extractelement %[[LIMBS]][%c0_i32 : i32]
// CHECK:         %[[B1:.*]] = llvm.extractelement %[[LIMBS]][%c1_i32 : i32]
// CHECK:         nvvm.mma.sync A[%[[A0]], %[[A1]], %[[A2]], %[[A3]]] B[%[[B0]], %[[B1]]] C[%c1262485504_i32,
// CHECK-COUNT-2: nvvm.mma.sync
// CHECK:         %[[LAST:.*]] = nvvm.mma.sync
// CHECK:         %[[D0:.*]] = llvm.extractvalue %[[LAST]][0]
// CHECK:         %[[D1:.*]] = llvm.extractvalue %[[LAST]][1]
// CHECK:         %[[LOW:.*]] = llvm.bitcast %[[D0]] : i32 to f32
// CHECK:         %[[HIGH:.*]] = llvm.bitcast %[[D1]] : i32 to f32

// Two limbs' sums as one number: (256 high - origin) unit, and low unit, which brings the origin back, on top.
// CHECK:         %[[UPPER:.*]] = arith.mulf %[[UNIT]], %
// CHECK:         %[[BOTH:.*]] = arith.mulf %[[UNIT]], %
// CHECK:         %[[HIGHER:.*]] = llvm.intr.fma(%[[HIGH]], %[[UPPER]], %[[BOTH]])
// CHECK:         %[[SUM:.*]] = llvm.intr.fma(%[[LOW]], %[[UNIT]], %[[HIGHER]])

// The neighbour has the other two.
// CHECK:         nvvm.shfl.sync bfly %{{.*}}, %[[SUM]], %c1_i32
lowbit.program @limbs attributes {threads = 32, grid = [1, 1, 1], workspace = 0} {
  %x = lowbit.alloc_shared : !x
  %limbs = lowbit.alloc_shared : !limbs
  %units = lowbit.alloc_shared : !units
  %y = lowbit.alloc_shared : !y
  %c0 = arith.constant 0 : i32
  %unit = lowbit.split_limbs %x, %limbs {format = #lowbit.format<"u2", []>} : !x, !limbs -> !unit
  lowbit.barrier {scope = "warps"}
  %words = lowbit.load %units[%c0, %c0, %c0] : !units -> !words
  %codes = lowbit.view %words : !words -> !codes
  %pairs = lowbit.limb_mma %codes, %limbs, %unit {start = 0, columns = 128} : !codes, !limbs, !unit -> !pairs
  %joined = lowbit.join_limbs %pairs : !pairs -> !joined
  lowbit.store %joined, %y[%c0, %c0, %c0] : !joined, !y
  lowbit.return
}
