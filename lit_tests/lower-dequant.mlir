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
  %0 = "lowbit.decode_pair"(%w) {format = #lowbit.format<"u4", []>, register = 1, exponent = 0,
    operandSegmentSizes = array<i32: 1>} : (i32) -> vector<2xf16>
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
  %0 = "lowbit.decode_shifted_pair"(%shift, %w) {format = #lowbit.format<"i4", []>, register = 1, exponent = 0,
    operandSegmentSizes = array<i32: 1, 1>} : (vector<2xf16>, i32) -> vector<2xf16>
  return %0 : vector<2xf16>
}

// -----

// Left deferred_offset, the subtraction is somebody else's, for all weights at once.
// CHECK-LABEL: func.func @u2_biased
// CHECK:         llvm.inline_asm
// CHECK-NEXT:    %[[RESULT:.*]] = llvm.bitcast
// CHECK-NEXT:    return %[[RESULT]]
func.func @u2_biased(%w: i32) -> vector<2xf16> {
  %0 = "lowbit.decode_pair"(%w) {format = #lowbit.format<"u2", []>, register = 2, exponent = 0, offset = "deferred",
    operandSegmentSizes = array<i32: 1>} : (i32) -> vector<2xf16>
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
  %0 = "lowbit.decode_pair"(%w) {format = #lowbit.format<"u4", []>, register = 2, exponent = 0, offset = "raw",
    operandSegmentSizes = array<i32: 1>} : (i32) -> vector<2xf16>
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
  %0 = "lowbit.decode_pair"(%w) {format = #lowbit.format<"u4", []>, register = 0, exponent = 0,
    operandSegmentSizes = array<i32: 1>} : (i32) -> vector<2xbf16>
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
  %0 = "lowbit.decode_pair"(%w) {format = #lowbit.format<"i8", []>, register = 0, exponent = 0,
    operandSegmentSizes = array<i32: 1>} : (i32) -> vector<2xbf16>
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
  %0 = "lowbit.decode_shifted_pair"(%shift, %w) {format = #lowbit.format<"u8", []>, register = 0, exponent = 0,
    operandSegmentSizes = array<i32: 1, 1>} : (vector<2xbf16>, i32) -> vector<2xbf16>
  return %0 : vector<2xbf16>
}

// -----

// f6e3m2 in f16. Exponent and mantissa go where f16 has them, the sign to the top. The difference of the biases, 2^12,
// is the exponent that the kernel has in its scales: no arithmetic is left.
// CHECK-LABEL: func.func @f6e3m2_f16
// CHECK-SAME:    (%[[WORD:.*]]: i32)
// CHECK:         %[[S0:.*]] = arith.shli %[[WORD]]
// CHECK-NEXT:    %[[P0:.*]] = arith.andi %[[S0]]
// CHECK-NEXT:    %[[S1:.*]] = arith.shli %[[WORD]]
// CHECK-NEXT:    %[[P1:.*]] = llvm.inline_asm {{.*}} %[[S1]], %{{.*}}, %[[P0]]
// CHECK-NEXT:    %[[RESULT:.*]] = llvm.bitcast %[[P1]]
// CHECK-NEXT:    return %[[RESULT]]
func.func @f6e3m2_f16(%w: i32) -> vector<2xf16> {
  %0 = "lowbit.decode_pair"(%w) {format = #lowbit.format<"f6e3m2", []>, register = 0, exponent = 12,
    operandSegmentSizes = array<i32: 1>} : (i32) -> vector<2xf16>
  return %0 : vector<2xf16>
}

// -----

// Asked for the plain number (exponent 0), the decoder multiplies.
// CHECK-LABEL: func.func @f6e3m2_unscaled
// CHECK:         %[[FACTOR:.*]] = arith.constant dense<4.096000e+03> : vector<2xf16>
// CHECK:         %[[SMALL:.*]] = llvm.bitcast
// CHECK-NEXT:    arith.mulf %[[SMALL]], %[[FACTOR]]
func.func @f6e3m2_unscaled(%w: i32) -> vector<2xf16> {
  %0 = "lowbit.decode_pair"(%w) {format = #lowbit.format<"f6e3m2", []>, register = 0, exponent = 0,
    operandSegmentSizes = array<i32: 1>} : (i32) -> vector<2xf16>
  return %0 : vector<2xf16>
}

// -----

// f8e4m3 in f16 has a NaN, S.1111.111. Of all codes it alone carries into the next bit (0x4000) when one unit of the
// last place (0x0080) is added; or-ed into the number, that bit is above its exponent's reach and makes it NaN.
// CHECK-LABEL: func.func @f8e4m3_f16
// CHECK-DAG:     %[[UNIT:.*]] = arith.constant 8388736 : i32
// CHECK:         %[[MAGNITUDE:.*]] = arith.andi
// CHECK-NEXT:    %[[NUMBER:.*]] = llvm.inline_asm {{.*}} %[[MAGNITUDE]]
// CHECK-NEXT:    %[[SUM:.*]] = arith.addi %[[MAGNITUDE]], %[[UNIT]]
// CHECK-NEXT:    %[[RESULT:.*]] = llvm.inline_asm {{.*}} %[[SUM]], %{{.*}}, %[[NUMBER]]
// CHECK-NEXT:    llvm.bitcast %[[RESULT]] : i32 to vector<2xf16>
func.func @f8e4m3_f16(%w: i32) -> vector<2xf16> {
  %0 = "lowbit.decode_pair"(%w) {format = #lowbit.format<"f8e4m3", []>, register = 1, exponent = 8,
    operandSegmentSizes = array<i32: 1>} : (i32) -> vector<2xf16>
  return %0 : vector<2xf16>
}

// -----

// f8e5m2 is the upper byte of f16, with its inf and NaN: moved, it is right.
// CHECK-LABEL: func.func @f8e5m2_f16
// CHECK-NOT:     {{addi|mulf|addf|fma}}
// CHECK:         return
func.func @f8e5m2_f16(%w: i32) -> vector<2xf16> {
  %0 = "lowbit.decode_pair"(%w) {format = #lowbit.format<"f8e5m2", []>, register = 0, exponent = 0,
    operandSegmentSizes = array<i32: 1>} : (i32) -> vector<2xf16>
  return %0 : vector<2xf16>
}

// -----

// In bf16 the bias difference, 2^112, is multiplied with (an fma with -0, which keeps the sign of zero), and the bit
// that inf and NaN carry into is spread over the whole exponent by a subtraction.
// CHECK-LABEL: func.func @f8e5m2_bf16
// CHECK-DAG:     %[[MINUS_ZERO:.*]] = arith.constant dense<-0.000000e+00> : vector<2xbf16>
// CHECK-DAG:     %[[FACTOR:.*]] = arith.constant dense<5.192300e+33> : vector<2xbf16>
// CHECK:         %[[MAGNITUDE:.*]] = arith.andi
// CHECK:         %[[NUMBER:.*]] = llvm.intr.fma(%{{.*}}, %[[FACTOR]], %[[MINUS_ZERO]])
// CHECK:         %[[SUM:.*]] = arith.addi %[[MAGNITUDE]]
// CHECK-NEXT:    %[[CARRY:.*]] = arith.andi %[[SUM]]
// CHECK-NEXT:    %[[ABOVE:.*]] = arith.shli %[[CARRY]]
// CHECK-NEXT:    %[[BELOW:.*]] = arith.shrui %[[CARRY]]
// CHECK:         %[[EXPONENT:.*]] = arith.subi %[[ABOVE]], %[[BELOW]]
// CHECK-NEXT:    arith.ori %{{.*}}, %[[EXPONENT]]
func.func @f8e5m2_bf16(%w: i32) -> vector<2xbf16> {
  %0 = "lowbit.decode_pair"(%w) {format = #lowbit.format<"f8e5m2", []>, register = 0, exponent = 0,
    operandSegmentSizes = array<i32: 1>} : (i32) -> vector<2xbf16>
  return %0 : vector<2xbf16>
}

// -----

// nf4, from the table of pairs in shared memory. The word, and itself rotated by 12 bits, each give every other field:
// the codes of registers 1 and 3 (at bits 4 and 12) come to lie side by side, at bits 4..11 and 12..19. A shift and a lop3
// bring them to bits 7..14 of an address, beside the lane's column.
// CHECK-LABEL: func.func @nf4_lookup
// CHECK-SAME:    (%[[TABLE:.*]]: !llvm.ptr<3>, %[[COLUMN:.*]]: i32, %[[WORD:.*]]: i32)
// CHECK-DAG:     %[[INDEX:.*]] = arith.constant 32640 : i32
// CHECK-DAG:     %[[ODD:.*]] = arith.constant 61680 : i32
// CHECK:         %[[ROTATED:.*]] = llvm.intr.fshr(%[[WORD]], %[[WORD]], %c12_i32)
// CHECK-NEXT:    %[[MIXED:.*]] = llvm.inline_asm asm_dialect = att "lop3.b32 $0, $1, $2, $3, 226;", "=r,r,n,r" %[[WORD]], %[[ODD]], %[[ROTATED]]
// CHECK-NEXT:    %[[FIRST:.*]] = arith.shli %[[MIXED]], %c3_i32
// CHECK-NEXT:    %[[OFFSET:.*]] = llvm.inline_asm {{.*}}, 234;", "=r,r,n,r" %[[FIRST]], %[[INDEX]], %[[COLUMN]]
// CHECK-NEXT:    %[[ADDRESS:.*]] = llvm.getelementptr %[[TABLE]][%[[OFFSET]]]
// CHECK-NEXT:    %[[PAIR:.*]] = llvm.load %[[ADDRESS]] {alignment = 4 : i64} : !llvm.ptr<3> -> i32
// CHECK-NEXT:    llvm.bitcast %[[PAIR]] : i32 to vector<2xf16>
// The next pair of the same parity has the very same mixed word, which LLVM sees.
// CHECK:         %[[AGAIN:.*]] = llvm.inline_asm {{.*}} 226;", "=r,r,n,r" %[[WORD]], %[[ODD]],
// CHECK-NEXT:    arith.shrui %[[AGAIN]], %c5_i32
func.func @nf4_lookup(%table: !llvm.ptr<3>, %column: i32, %w: i32) -> (vector<2xf16>, vector<2xf16>) {
  %0 = "lowbit.lookup_pair"(%table, %column, %w) {format = #lowbit.format<"nf4", []>, register = 1,
    operandSegmentSizes = array<i32: 1, 1, 1>} : (!llvm.ptr<3>, i32, i32) -> vector<2xf16>
  %1 = "lowbit.lookup_pair"(%table, %column, %w) {format = #lowbit.format<"nf4", []>, register = 3,
    operandSegmentSizes = array<i32: 1, 1, 1>} : (!llvm.ptr<3>, i32, i32) -> vector<2xf16>
  return %0, %1 : vector<2xf16>, vector<2xf16>
}

// -----

// lut3, register 15 of a run: three spare bits at the top of three words. In a word mixed for the pairs at bits 3 and 9,
// the spare bits are three apart, too, as in the address, where each takes a shift and a lop3.
// CHECK-LABEL: func.func @lut3_pieces
// CHECK-SAME:    (%[[TABLE:.*]]: !llvm.ptr<3>, %[[COLUMN:.*]]: i32, %[[W0:.*]]: i32, %[[W1:.*]]: i32, %[[W2:.*]]: i32)
// CHECK:         %[[R0:.*]] = llvm.intr.fshr(%[[W0]], %[[W0]], %c13_i32)
// CHECK-NEXT:    %[[M0:.*]] = llvm.inline_asm {{.*}} 226;", "=r,r,n,r" %[[W0]], %[[ODD:.*]], %[[R0]]
// CHECK-NEXT:    %[[S0:.*]] = arith.shrui %[[M0]], %c8_i32
// CHECK-NEXT:    %[[A0:.*]] = llvm.inline_asm {{.*}} 234;", "=r,r,n,r" %[[S0]], %{{.*}}, %[[COLUMN]]
// CHECK:         %[[M1:.*]] = llvm.inline_asm {{.*}} 226;", "=r,r,n,r" %[[W1]], %[[ODD]],
// CHECK-NEXT:    %[[S1:.*]] = arith.shrui %[[M1]], %c7_i32
// CHECK-NEXT:    %[[A1:.*]] = llvm.inline_asm {{.*}} 234;", "=r,r,n,r" %[[S1]], %{{.*}}, %[[A0]]
// CHECK:         %[[M2:.*]] = llvm.inline_asm {{.*}} 226;", "=r,r,n,r" %[[W2]], %[[ODD]],
// CHECK-NEXT:    %[[S2:.*]] = arith.shrui %[[M2]], %c6_i32
// CHECK-NEXT:    %[[A2:.*]] = llvm.inline_asm {{.*}} 234;", "=r,r,n,r" %[[S2]], %{{.*}}, %[[A1]]
// CHECK-NEXT:    llvm.getelementptr %[[TABLE]][%[[A2]]]
func.func @lut3_pieces(%table: !llvm.ptr<3>, %column: i32, %w0: i32, %w1: i32, %w2: i32) -> vector<2xf16> {
  %0 = "lowbit.lookup_pair"(%table, %column, %w0, %w1, %w2) {
    format = #lowbit.format<"lut3", [-8.0, -4.0, -2.0, -1.0, 1.0, 2.0, 4.0, 8.0]>, register = 15,
    operandSegmentSizes = array<i32: 1, 1, 3>} : (!llvm.ptr<3>, i32, i32, i32, i32) -> vector<2xf16>
  return %0 : vector<2xf16>
}

// -----

// Above four bits the pairs would be too many: two lookups, in bf16, here of the register in the spare bits of five
// words. These meet where the last needs no shift, both codes at once. An entry has its number in both halves, so that
// one lop3 joins them.
// CHECK-LABEL: func.func @lut5_lookup
// CHECK-SAME:    (%[[TABLE:.*]]: !llvm.ptr<3>, %[[COLUMN:.*]]: i32, {{.*}}, %[[W4:.*]]: i32)
// CHECK-COUNT-4: arith.shrui
// CHECK:         %[[CODES:.*]] = llvm.inline_asm {{.*}} %[[W4]], %{{.*}}, %{{.*}}
// CHECK:         %[[FIRST:.*]] = llvm.load {{.*}} : !llvm.ptr<3> -> i32
// CHECK:         arith.shrui %[[CODES]]
// CHECK:         %[[SECOND:.*]] = llvm.load {{.*}} : !llvm.ptr<3> -> i32
// CHECK-NEXT:    %[[BOTH:.*]] = llvm.inline_asm {{.*}} 226;", "=r,r,n,r" %[[FIRST]], %c65535_i32, %[[SECOND]]
// CHECK-NEXT:    llvm.bitcast %[[BOTH]] : i32 to vector<2xbf16>
func.func @lut5_lookup(%table: !llvm.ptr<3>, %column: i32,
    %w0: i32, %w1: i32, %w2: i32, %w3: i32, %w4: i32) -> vector<2xbf16> {
  %0 = "lowbit.lookup_pair"(%table, %column, %w0, %w1, %w2, %w3, %w4) {format = #lowbit.format<"lut5", [
      -8.0, -7.5, -7.0, -6.5, -6.0, -5.5, -5.0, -4.5, -4.0, -3.5, -3.0, -2.5, -2.0, -1.5, -1.0, -0.5,
      0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 5.5, 6.0, 6.5, 7.0, 7.5]>,
    register = 15, operandSegmentSizes = array<i32: 1, 1, 5>}
    : (!llvm.ptr<3>, i32, i32, i32, i32, i32, i32) -> vector<2xbf16>
  return %0 : vector<2xbf16>
}

// -----

// Without a table in shared memory: the same index into a constant array of pairs in device memory.
// CHECK:         llvm.mlir.global internal constant @lowbit_table_nf4_f16_pairs(dense<{{.*}}> : tensor<256xi32>) {addr_space = 1 : i32, alignment = 16 : i64}
// CHECK-LABEL: func.func @nf4_f16
// CHECK:         %[[OFFSET:.*]] = llvm.inline_asm {{.*}}, %c1020_i32
// CHECK:         arith.extui %[[OFFSET]]
// CHECK-NEXT:    %[[ADDRESS:.*]] = llvm.getelementptr
// CHECK-NEXT:    %[[PAIR:.*]] = llvm.load %[[ADDRESS]] invariant {alignment = 4 : i64} : !llvm.ptr<1> -> i32
// CHECK-NEXT:    llvm.bitcast %[[PAIR]] : i32 to vector<2xf16>
func.func @nf4_f16(%w: i32) -> vector<2xf16> {
  %0 = "lowbit.decode_pair"(%w) {format = #lowbit.format<"nf4", []>, register = 1, exponent = 0,
    operandSegmentSizes = array<i32: 1>} : (i32) -> vector<2xf16>
  return %0 : vector<2xf16>
}

// -----

// Above four bits an array of numbers, once for all who ask for the same; another table of the same format, or the same
// times another power of two, is another array.
// CHECK-COUNT-1: llvm.mlir.global internal constant @lowbit_table_lut5_f16_(dense<{{.*}}> : tensor<32xi32>)
// CHECK-COUNT-1: llvm.mlir.global internal constant @lowbit_table_lut5_f16(dense<{{.*}}> : tensor<32xi32>)
// CHECK-LABEL: func.func @lut5_f16
// CHECK-COUNT-6: llvm.load %{{.*}} invariant {alignment = 4 : i64} : !llvm.ptr<1> -> i32
// CHECK-NOT:     llvm.load
!pair = vector<2xf16>
#lut5 = #lowbit.format<"lut5", [
  -8.0, -7.5, -7.0, -6.5, -6.0, -5.5, -5.0, -4.5, -4.0, -3.5, -3.0, -2.5, -2.0, -1.5, -1.0, -0.5,
  0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 5.5, 6.0, 6.5, 7.0, 7.5]>
func.func @lut5_f16(%w: i32) -> (!pair, !pair, !pair) {
  %0 = "lowbit.decode_pair"(%w) {format = #lut5, register = 0, exponent = 0,
    operandSegmentSizes = array<i32: 1>} : (i32) -> !pair
  %1 = "lowbit.decode_pair"(%w) {format = #lut5, register = 1, exponent = 0,
    operandSegmentSizes = array<i32: 1>} : (i32) -> !pair
  %2 = "lowbit.decode_pair"(%w) {format = #lut5, register = 1, exponent = 1,
    operandSegmentSizes = array<i32: 1>} : (i32) -> !pair
  return %0, %1, %2 : !pair, !pair, !pair
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
  %0 = "lowbit.decode_pair"(%w) {format = #lowbit.format<"u3", []>, register = 1, exponent = 0,
    operandSegmentSizes = array<i32: 1>} : (i32) -> vector<2xf16>
  %1 = "lowbit.decode_pair"(%w) {format = #lowbit.format<"u3", []>, register = 3, exponent = 0,
    operandSegmentSizes = array<i32: 1>} : (i32) -> vector<2xf16>
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
  %0 = "lowbit.decode_pair"(%w0, %w1, %w2) {format = #lowbit.format<"u3", []>, register = 15, exponent = 0,
    operandSegmentSizes = array<i32: 3>} : (i32, i32, i32) -> vector<2xf16>
  return %0 : vector<2xf16>
}

// -----

// f8e7m0 has a range that only f32 (or bf16) holds. One number to a register: each code by itself, times 2^64.
// CHECK-LABEL: func.func @f8e7m0_f32
// CHECK:         %[[FACTOR:.*]] = arith.constant 1.84467441E+19 : f32
// CHECK:         %[[FIRST:.*]] = arith.mulf %{{.*}}, %[[FACTOR]] : f32
// CHECK:         %[[SECOND:.*]] = arith.mulf %{{.*}}, %[[FACTOR]] : f32
// CHECK-NEXT:    %[[HALF:.*]] = llvm.insertelement %[[FIRST]]
// CHECK-NEXT:    llvm.insertelement %[[SECOND]], %[[HALF]]
func.func @f8e7m0_f32(%w: i32) -> vector<2xf32> {
  %0 = "lowbit.decode_pair"(%w) {format = #lowbit.format<"f8e7m0", []>, register = 0, exponent = 0,
    operandSegmentSizes = array<i32: 1>} : (i32) -> vector<2xf32>
  return %0 : vector<2xf32>
}
