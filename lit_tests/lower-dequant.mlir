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
  %0 = "lowbit.decode_pair"(%w) {format = #lowbit.format<"u4", []>, shifts = [4], exponent = 0,
    operandSegmentSizes = array<i32: 1>} : (i32) -> vector<2xf16>
  return %0 : vector<2xf16>
}

// -----

// Left biased, the subtraction is somebody else's, for all weights at once.
// CHECK-LABEL: func.func @u2_biased
// CHECK:         llvm.inline_asm
// CHECK-NEXT:    %[[RESULT:.*]] = llvm.bitcast
// CHECK-NEXT:    return %[[RESULT]]
func.func @u2_biased(%w: i32) -> vector<2xf16> {
  %0 = "lowbit.decode_pair"(%w) {format = #lowbit.format<"u2", []>, shifts = [4], exponent = 0, biased,
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
  %0 = "lowbit.decode_pair"(%w) {format = #lowbit.format<"u4", []>, shifts = [0], exponent = 0,
    operandSegmentSizes = array<i32: 1>} : (i32) -> vector<2xbf16>
  return %0 : vector<2xbf16>
}

// -----

// i8 in bf16, whose mantissa has 7 bits only: two nibbles, each under its own exponent, are added. The code is stored
// in offset binary, so that the sign costs nothing: -512 = -256 - 128 (the two bases) - 128 (the offset).
// CHECK-LABEL: func.func @i8_bf16
// CHECK-DAG:     %[[ONE:.*]] = arith.constant dense<1.000000e+00> : vector<2xbf16>
// CHECK-DAG:     %[[MINUS:.*]] = arith.constant dense<-5.120000e+02> : vector<2xbf16>
// CHECK:         llvm.inline_asm
// CHECK-NEXT:    %[[HIGH:.*]] = llvm.bitcast
// CHECK-NEXT:    %[[UPPER:.*]] = llvm.intr.fma(%[[HIGH]], %[[ONE]], %[[MINUS]])
// CHECK-NEXT:    llvm.inline_asm
// CHECK-NEXT:    %[[LOW:.*]] = llvm.bitcast
// CHECK-NEXT:    llvm.intr.fma(%[[UPPER]], %[[ONE]], %[[LOW]])
func.func @i8_bf16(%w: i32) -> vector<2xbf16> {
  %0 = "lowbit.decode_pair"(%w) {format = #lowbit.format<"i8", []>, shifts = [0], exponent = 0,
    operandSegmentSizes = array<i32: 1>} : (i32) -> vector<2xbf16>
  return %0 : vector<2xbf16>
}

// -----

// f6e3m2 in f16, from a plane of 4 bits and one of 2. Exponent and mantissa go where f16 has them, the sign to the
// top. The difference of the biases, 2^12, is the exponent that the kernel has in its scales: no arithmetic is left.
// CHECK-LABEL: func.func @f6e3m2_f16
// CHECK-SAME:    (%[[LOW:.*]]: i32, %[[HIGH:.*]]: i32)
// CHECK:         %[[S0:.*]] = arith.shli %[[LOW]]
// CHECK-NEXT:    %[[P0:.*]] = arith.andi %[[S0]]
// CHECK-NEXT:    %[[S1:.*]] = arith.shli %[[HIGH]]
// CHECK-NEXT:    %[[P1:.*]] = llvm.inline_asm {{.*}} %[[S1]], %{{.*}}, %[[P0]]
// CHECK-NEXT:    %[[S2:.*]] = arith.shli %[[HIGH]]
// CHECK-NEXT:    %[[P2:.*]] = llvm.inline_asm {{.*}} %[[S2]], %{{.*}}, %[[P1]]
// CHECK-NEXT:    %[[RESULT:.*]] = llvm.bitcast %[[P2]]
// CHECK-NEXT:    return %[[RESULT]]
func.func @f6e3m2_f16(%low: i32, %high: i32) -> vector<2xf16> {
  %0 = "lowbit.decode_pair"(%low, %high) {format = #lowbit.format<"f6e3m2", []>, shifts = [4, 2], exponent = 12,
    operandSegmentSizes = array<i32: 2>} : (i32, i32) -> vector<2xf16>
  return %0 : vector<2xf16>
}

// -----

// Asked for the plain number (exponent 0), the decoder multiplies.
// CHECK-LABEL: func.func @f6e3m2_unscaled
// CHECK:         %[[FACTOR:.*]] = arith.constant dense<4.096000e+03> : vector<2xf16>
// CHECK:         %[[SMALL:.*]] = llvm.bitcast
// CHECK-NEXT:    arith.mulf %[[SMALL]], %[[FACTOR]]
func.func @f6e3m2_unscaled(%low: i32, %high: i32) -> vector<2xf16> {
  %0 = "lowbit.decode_pair"(%low, %high) {format = #lowbit.format<"f6e3m2", []>, shifts = [4, 2], exponent = 0,
    operandSegmentSizes = array<i32: 2>} : (i32, i32) -> vector<2xf16>
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
  %0 = "lowbit.decode_pair"(%w) {format = #lowbit.format<"f8e4m3", []>, shifts = [8], exponent = 8,
    operandSegmentSizes = array<i32: 1>} : (i32) -> vector<2xf16>
  return %0 : vector<2xf16>
}

// -----

// f8e5m2 is the upper byte of f16, with its inf and NaN: moved, it is right.
// CHECK-LABEL: func.func @f8e5m2_f16
// CHECK-NOT:     {{addi|mulf|addf|fma}}
// CHECK:         return
func.func @f8e5m2_f16(%w: i32) -> vector<2xf16> {
  %0 = "lowbit.decode_pair"(%w) {format = #lowbit.format<"f8e5m2", []>, shifts = [0], exponent = 0,
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
  %0 = "lowbit.decode_pair"(%w) {format = #lowbit.format<"f8e5m2", []>, shifts = [0], exponent = 0,
    operandSegmentSizes = array<i32: 1>} : (i32) -> vector<2xbf16>
  return %0 : vector<2xbf16>
}

// -----

// nf4, from the table of pairs in shared memory. The word, and itself rotated by 12 bits, each give every other field:
// the codes of pairs 1 and 3 (shifts 4 and 12) come to lie side by side, at bits 4..11 and 12..19. A shift and a lop3
// bring them to bits 7..14 of an address, beside the lane's column.
// CHECK-LABEL: func.func @nf4_lookup
// CHECK-SAME:    (%[[TABLE:.*]]: !llvm.ptr<3>, %[[COLUMN:.*]]: i32, %[[WORD:.*]]: i32)
// CHECK-DAG:     %[[INDEX:.*]] = arith.constant 32640 : i32
// CHECK-DAG:     %[[ODD:.*]] = arith.constant -252645136 : i32
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
  %0 = "lowbit.lookup_pair"(%table, %column, %w) {format = #lowbit.format<"nf4", []>, shifts = [4],
    operandSegmentSizes = array<i32: 1, 1, 1>} : (!llvm.ptr<3>, i32, i32) -> vector<2xf16>
  %1 = "lowbit.lookup_pair"(%table, %column, %w) {format = #lowbit.format<"nf4", []>, shifts = [12],
    operandSegmentSizes = array<i32: 1, 1, 1>} : (!llvm.ptr<3>, i32, i32) -> vector<2xf16>
  return %0, %1 : vector<2xf16>, vector<2xf16>
}

// -----

// Above four bits the pairs would be too many: two lookups, here of planes of 4 and 1 bits, in bf16. An entry has its number
// in both halves, so that one lop3 joins them.
// CHECK-LABEL: func.func @lut5_lookup
// CHECK-SAME:    (%[[TABLE:.*]]: !llvm.ptr<3>,
// CHECK:         %[[LOW:.*]] = arith.andi
// CHECK-NEXT:    %[[CODES:.*]] = llvm.inline_asm {{.*}}, %[[LOW]]
// CHECK:         %[[FIRST:.*]] = llvm.load {{.*}} : !llvm.ptr<3> -> i32
// CHECK:         arith.shrui %[[CODES]]
// CHECK:         %[[SECOND:.*]] = llvm.load {{.*}} : !llvm.ptr<3> -> i32
// CHECK-NEXT:    %[[BOTH:.*]] = llvm.inline_asm {{.*}} 226;", "=r,r,n,r" %[[FIRST]], %c65535_i32, %[[SECOND]]
// CHECK-NEXT:    llvm.bitcast %[[BOTH]] : i32 to vector<2xbf16>
func.func @lut5_lookup(%table: !llvm.ptr<3>, %column: i32, %low: i32, %high: i32) -> vector<2xbf16> {
  %0 = "lowbit.lookup_pair"(%table, %column, %low, %high) {format = #lowbit.format<"lut5", [
      -8.0, -7.5, -7.0, -6.5, -6.0, -5.5, -5.0, -4.5, -4.0, -3.5, -3.0, -2.5, -2.0, -1.5, -1.0, -0.5,
      0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 5.5, 6.0, 6.5, 7.0, 7.5]>,
    shifts = [0, 4], operandSegmentSizes = array<i32: 1, 1, 2>} : (!llvm.ptr<3>, i32, i32, i32) -> vector<2xbf16>
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
  %0 = "lowbit.decode_pair"(%w) {format = #lowbit.format<"nf4", []>, shifts = [4], exponent = 0,
    operandSegmentSizes = array<i32: 1>} : (i32) -> vector<2xf16>
  return %0 : vector<2xf16>
}

// -----

// Above four bits an array of numbers (planes of 4 and 1 bits), once for all who ask for the same; another table of
// the same format, or the same times another power of two, is another array.
// CHECK-COUNT-1: llvm.mlir.global internal constant @lowbit_table_lut5_f16_(dense<{{.*}}> : tensor<32xi32>)
// CHECK-COUNT-1: llvm.mlir.global internal constant @lowbit_table_lut5_f16(dense<{{.*}}> : tensor<32xi32>)
// CHECK-LABEL: func.func @lut5_f16
// CHECK-COUNT-6: llvm.load %{{.*}} invariant {alignment = 4 : i64} : !llvm.ptr<1> -> i32
// CHECK-NOT:     llvm.load
!pair = vector<2xf16>
#lut5 = #lowbit.format<"lut5", [
  -8.0, -7.5, -7.0, -6.5, -6.0, -5.5, -5.0, -4.5, -4.0, -3.5, -3.0, -2.5, -2.0, -1.5, -1.0, -0.5,
  0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 5.5, 6.0, 6.5, 7.0, 7.5]>
func.func @lut5_f16(%low: i32, %high: i32) -> (!pair, !pair, !pair) {
  %0 = "lowbit.decode_pair"(%low, %high) {format = #lut5, shifts = [0, 1], exponent = 0,
    operandSegmentSizes = array<i32: 2>} : (i32, i32) -> !pair
  %1 = "lowbit.decode_pair"(%low, %high) {format = #lut5, shifts = [4, 2], exponent = 0,
    operandSegmentSizes = array<i32: 2>} : (i32, i32) -> !pair
  %2 = "lowbit.decode_pair"(%low, %high) {format = #lut5, shifts = [4, 2], exponent = 1,
    operandSegmentSizes = array<i32: 2>} : (i32, i32) -> !pair
  return %0, %1, %2 : !pair, !pair, !pair
}

// -----

// u3: a plane of 2 bits and one of 1 meet under one exponent, with one lop3 each.
// CHECK-LABEL: func.func @u3_f16
// CHECK-SAME:    (%[[TWO:.*]]: i32, %[[ONE:.*]]: i32)
// CHECK:         %[[P0:.*]] = llvm.inline_asm {{.*}} %[[TWO]], %{{.*}}, %{{.*}} :
// CHECK:         %[[P1:.*]] = llvm.inline_asm {{.*}}, %[[P0]] :
// CHECK-NEXT:    %[[OFFSET:.*]] = llvm.bitcast %[[P1]]
// CHECK-NEXT:    arith.addf %[[OFFSET]]
func.func @u3_f16(%two: i32, %one: i32) -> vector<2xf16> {
  %0 = "lowbit.decode_pair"(%two, %one) {format = #lowbit.format<"u3", []>, shifts = [2, 3], exponent = 0,
    operandSegmentSizes = array<i32: 2>} : (i32, i32) -> vector<2xf16>
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
  %0 = "lowbit.decode_pair"(%w) {format = #lowbit.format<"f8e7m0", []>, shifts = [0], exponent = 0,
    operandSegmentSizes = array<i32: 1>} : (i32) -> vector<2xf32>
  return %0 : vector<2xf32>
}
