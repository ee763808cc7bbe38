// RUN: %lowbit-opt %s --split-input-file --lower-dequant --canonicalize | %filecheck %s

// A pair of codes, 16 bits apart in a word, becomes a pair of numbers. Masks have the same bits in both halves of a
// register; lop3 is (a & b) | c.

// u4 in f16, the field at bits 4..7: no shift, for it may sit at bits 4..7 of the mantissa, too. Under the exponent
// of 64 that is 64 + code: one lop3 (mask 0x00f000f0, base 0x54005400), one subtraction.
// CHECK-LABEL: func.func @u4_f16
// CHECK-SAME:    (%[[WORD:.*]]: i32)
// CHECK-DAG:     %[[MINUS_64:.*]] = arith.constant dense<-6.400000e+01> : vector<2xf16>
// CHECK-DAG:     %[[BASE:.*]] = arith.constant 1409307648 : i32
// CHECK-DAG:     %[[MASK:.*]] = arith.constant 15728880 : i32
// CHECK-NEXT:    %[[BITS:.*]] = llvm.inline_asm asm_dialect = att "lop3.b32 $0, $1, $2, $3, 234;", "=r,r,n,r" %[[WORD]], %[[MASK]], %[[BASE]]
// CHECK-NEXT:    %[[OFFSET:.*]] = llvm.bitcast %[[BITS]] : i32 to vector<2xf16>
// CHECK-NEXT:    %[[RESULT:.*]] = arith.addf %[[OFFSET]], %[[MINUS_64]] : vector<2xf16>
// CHECK-NEXT:    return %[[RESULT]]
func.func @u4_f16(%w: i32) -> vector<2xf16> {
  %0 = lowbit.decode_pair %w {format = #lowbit.format<"u4", []>, register = 1, exponent = 0} : vector<2xf16>
  return %0 : vector<2xf16>
}

// -----

// A shift, minus a zero point, joins the constant: the same two operations per pair. The new constant, with -8 of i4's
// offset binary in it, is the same for all pairs of a row and group, where CSE finds it.
// CHECK-LABEL: func.func @i4_f16_shifted
// CHECK-SAME:    (%[[SHIFT:.*]]: vector<2xf16>, %[[WORD:.*]]: i32)
// CHECK-DAG:     %[[MINUS:.*]] = arith.constant dense<-7.200000e+01> : vector<2xf16>
// CHECK:         %[[BITS:.*]] = llvm.inline_asm {{.*}} %[[WORD]]
// CHECK-NEXT:    %[[OFFSET:.*]] = llvm.bitcast %[[BITS]] : i32 to vector<2xf16>
// CHECK-NEXT:    %[[BOTH:.*]] = arith.addf %[[SHIFT]], %[[MINUS]] : vector<2xf16>
// CHECK-NEXT:    %[[RESULT:.*]] = arith.addf %[[OFFSET]], %[[BOTH]] : vector<2xf16>
// CHECK-NEXT:    return %[[RESULT]]
func.func @i4_f16_shifted(%shift: vector<2xf16>, %w: i32) -> vector<2xf16> {
  %0 = lowbit.decode_shifted_pair %shift, %w {format = #lowbit.format<"i4", []>, register = 1, exponent = 0} : vector<2xf16>
  return %0 : vector<2xf16>
}

// -----

// Left deferred_offset, the subtraction is somebody else's, for all weights at once.
// CHECK-LABEL: func.func @u2_biased
// CHECK:         llvm.inline_asm
// CHECK-NEXT:    %[[RESULT:.*]] = llvm.bitcast
// CHECK-NEXT:    return %[[RESULT]]
func.func @u2_biased(%w: i32) -> vector<2xf16> {
  %0 = lowbit.decode_pair %w {format = #lowbit.format<"u2", []>, register = 2, exponent = 0, offset = "deferred"} : vector<2xf16>
  return %0 : vector<2xf16>
}

// -----

// Left raw, nothing is done but to bring the bits to their place: here those of codes 2 and 6 to the lowest.
// CHECK-LABEL: func.func @u4_bare
// CHECK-DAG:     %[[EIGHT:.*]] = arith.constant 8 : i32
// CHECK-DAG:     %[[MASK:.*]] = arith.constant 983055 : i32
// CHECK:         %[[SHIFTED:.*]] = arith.shrui %{{.*}}, %[[EIGHT]]
// CHECK-NEXT:    %[[BITS:.*]] = arith.andi %[[SHIFTED]], %[[MASK]]
// CHECK-NEXT:    %[[RESULT:.*]] = llvm.bitcast %[[BITS]] : i32 to vector<2xf16>
// CHECK-NEXT:    return %[[RESULT]]
func.func @u4_bare(%w: i32) -> vector<2xf16> {
  %0 = lowbit.decode_pair %w {format = #lowbit.format<"u4", []>, register = 2, exponent = 0, offset = "raw"} : vector<2xf16>
  return %0 : vector<2xf16>
}

// -----

// u4 in bf16: the same, but with an fma by 1, since there is no bf16 addition before sm_90.
// CHECK-LABEL: func.func @u4_bf16
// CHECK-DAG:     %[[ONE:.*]] = arith.constant dense<1.000000e+00> : vector<2xbf16>
// CHECK-DAG:     %[[MINUS:.*]] = arith.constant dense<-1.280000e+02> : vector<2xbf16>
// CHECK:         %[[OFFSET:.*]] = llvm.bitcast
// CHECK-NEXT:    llvm.intr.fma(%[[OFFSET]], %[[ONE]], %[[MINUS]])
// CHECK-NOT:     arith.addf
func.func @u4_bf16(%w: i32) -> vector<2xbf16> {
  %0 = lowbit.decode_pair %w {format = #lowbit.format<"u4", []>, register = 0, exponent = 0} : vector<2xbf16>
  return %0 : vector<2xbf16>
}

// -----

// i8 in bf16, whose mantissa has 7 bits only: two nibbles, each under its own exponent, are added. The code is stored
// in offset binary, so that the sign costs nothing: -2304 = -2048 - 128 (the two bases) - 128 (the offset).
// CHECK-LABEL: func.func @i8_bf16
// CHECK-DAG:     %[[ONE:.*]] = arith.constant dense<1.000000e+00> : vector<2xbf16>
// CHECK-DAG:     %[[MINUS:.*]] = arith.constant dense<-2.304000e+03> : vector<2xbf16>
// CHECK:         llvm.inline_asm
// CHECK-NEXT:    %[[HIGH:.*]] = llvm.bitcast
// CHECK-NEXT:    %[[UPPER:.*]] = llvm.intr.fma(%[[HIGH]], %[[ONE]], %[[MINUS]])
// CHECK-NEXT:    llvm.inline_asm
// CHECK-NEXT:    %[[LOW:.*]] = llvm.bitcast
// CHECK-NEXT:    llvm.intr.fma(%[[UPPER]], %[[ONE]], %[[LOW]])
func.func @i8_bf16(%w: i32) -> vector<2xbf16> {
  %0 = lowbit.decode_pair %w {format = #lowbit.format<"i8", []>, register = 0, exponent = 0} : vector<2xbf16>
  return %0 : vector<2xbf16>
}

// -----

// Of a shift nothing is known but that it is whole, and under the exponent of 2048 bf16 has steps of 16: the shift is
// added to the result, one operation more.
// CHECK-LABEL: func.func @u8_bf16_shifted
// CHECK-SAME:    (%[[SHIFT:.*]]: vector<2xbf16>, %{{.*}}: i32)
// CHECK-DAG:     %[[ONE:.*]] = arith.constant dense<1.000000e+00> : vector<2xbf16>
// CHECK-DAG:     %[[MINUS:.*]] = arith.constant dense<-2.176000e+03> : vector<2xbf16>
// CHECK:         %[[UPPER:.*]] = llvm.intr.fma(%{{.*}}, %[[ONE]], %[[MINUS]])
// CHECK:         %[[CODE:.*]] = llvm.intr.fma(%[[UPPER]], %[[ONE]], %{{.*}})
// CHECK-NEXT:    %[[RESULT:.*]] = llvm.intr.fma(%[[CODE]], %[[ONE]], %[[SHIFT]])
// CHECK-NEXT:    return %[[RESULT]]
func.func @u8_bf16_shifted(%shift: vector<2xbf16>, %w: i32) -> vector<2xbf16> {
  %0 = lowbit.decode_shifted_pair %shift, %w {format = #lowbit.format<"u8", []>, register = 0, exponent = 0} : vector<2xbf16>
  return %0 : vector<2xbf16>
}

// -----

// u3, five codes to the half of a word: the second is at bits 3..5, as good a place in the mantissa as any. The fourth,
// at bits 9..11, goes to bits 1..3 with a shift by 8 that serves the fifth and the spare bit at the top as well.
// CHECK-LABEL: func.func @u3_f16
// CHECK-SAME:    (%[[WORD:.*]]: i32)
// CHECK:         llvm.inline_asm {{.*}} %[[WORD]], %{{.*}}, %{{.*}} :
// CHECK:         %[[SHIFTED:.*]] = arith.shrui %[[WORD]], %c8_i32
// CHECK-NEXT:    llvm.inline_asm {{.*}} %[[SHIFTED]], %{{.*}}, %{{.*}} :
func.func @u3_f16(%w: i32) -> (vector<2xf16>, vector<2xf16>) {
  %0 = lowbit.decode_pair %w {format = #lowbit.format<"u3", []>, register = 1, exponent = 0} : vector<2xf16>
  %1 = lowbit.decode_pair %w {format = #lowbit.format<"u3", []>, register = 3, exponent = 0} : vector<2xf16>
  return %0, %1 : vector<2xf16>, vector<2xf16>
}

// -----

// The sixteenth register of a run is the spare bits of its three words. These have been shifted by 8, 7 and 6, so that
// the bits are side by side, at bits 7..9, and meet under one exponent with one lop3 each.
// CHECK-LABEL: func.func @u3_pieces
// CHECK-SAME:    (%[[W0:.*]]: i32, %[[W1:.*]]: i32, %[[W2:.*]]: i32)
// CHECK:         %[[S0:.*]] = arith.shrui %[[W0]], %c8_i32
// CHECK-NEXT:    %[[P0:.*]] = llvm.inline_asm {{.*}} %[[S0]], %{{.*}}, %{{.*}} :
// CHECK-NEXT:    %[[S1:.*]] = arith.shrui %[[W1]], %c7_i32
// CHECK-NEXT:    %[[P1:.*]] = llvm.inline_asm {{.*}} %[[S1]], %{{.*}}, %[[P0]] :
// CHECK-NEXT:    %[[S2:.*]] = arith.shrui %[[W2]], %c6_i32
// CHECK-NEXT:    %[[P2:.*]] = llvm.inline_asm {{.*}} %[[S2]], %{{.*}}, %[[P1]] :
// CHECK-NEXT:    %[[OFFSET:.*]] = llvm.bitcast %[[P2]]
// CHECK-NEXT:    arith.addf %[[OFFSET]]
func.func @u3_pieces(%w0: i32, %w1: i32, %w2: i32) -> vector<2xf16> {
  %0 = lowbit.decode_pair %w0, %w1, %w2 {format = #lowbit.format<"u3", []>, register = 15, exponent = 0} : vector<2xf16>
  return %0 : vector<2xf16>
}
