// RUN: %lowbit-opt %s --split-input-file --lower-dequant --canonicalize | %filecheck %s

// A pair of low-bit floats becomes a pair of numbers: sign and magnitude move to their places, and what the exponents
// differ by is left to the scale.

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
  %0 = lowbit.decode_pair %w {format = #lowbit.format<"f6e3m2", []>, register = 0, exponent = 12} : vector<2xf16>
  return %0 : vector<2xf16>
}

// -----

// f4e2m1 in f16: four codes become bytes at once, signs and the rest with a mask each. Bytes 1 and 3 are the upper ones
// of the register's two numbers, and the lower ones are zeros (byte 4): 0x3414.
// CHECK-LABEL: func.func @f4e2m1_f16
// CHECK-SAME:    (%[[WORD:.*]]: i32)
// CHECK-DAG:     %[[SELECTOR:.*]] = arith.constant 13332 : i32
// CHECK:         %[[SHIFTED:.*]] = arith.shrui %[[WORD]]
// CHECK-NEXT:    %[[REST:.*]] = arith.andi %[[SHIFTED]]
// CHECK-NEXT:    %[[BYTES:.*]] = llvm.inline_asm {{.*}} %[[WORD]], %{{.*}}, %[[REST]]
// CHECK-NEXT:    %[[BITS:.*]] = llvm.inline_asm {{.*}} "prmt.b32 $0, $1, $2, $3;", {{.*}} %[[BYTES]], %{{.*}}, %[[SELECTOR]]
// CHECK-NEXT:    llvm.bitcast %[[BITS]] : i32 to vector<2xf16>
func.func @f4e2m1_f16(%w: i32) -> vector<2xf16> {
  %0 = lowbit.decode_pair %w {format = #lowbit.format<"f4e2m1", []>, register = 3, exponent = 14} : vector<2xf16>
  return %0 : vector<2xf16>
}

// -----

// Asked for the plain number (exponent 0), the decoder multiplies.
// CHECK-LABEL: func.func @f6e3m2_unscaled
// CHECK:         %[[FACTOR:.*]] = arith.constant dense<4.096000e+03> : vector<2xf16>
// CHECK:         %[[SMALL:.*]] = llvm.bitcast
// CHECK-NEXT:    arith.mulf %[[SMALL]], %[[FACTOR]]
func.func @f6e3m2_unscaled(%w: i32) -> vector<2xf16> {
  %0 = lowbit.decode_pair %w {format = #lowbit.format<"f6e3m2", []>, register = 0, exponent = 0} : vector<2xf16>
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
  %0 = lowbit.decode_pair %w {format = #lowbit.format<"f8e4m3", []>, register = 1, exponent = 8} : vector<2xf16>
  return %0 : vector<2xf16>
}

// -----

// f8e5m2 is the upper byte of f16, with its inf and NaN: moved, it is right.
// CHECK-LABEL: func.func @f8e5m2_f16
// CHECK-NOT:     {{addi|mulf|addf|fma}}
// CHECK:         return
func.func @f8e5m2_f16(%w: i32) -> vector<2xf16> {
  %0 = lowbit.decode_pair %w {format = #lowbit.format<"f8e5m2", []>, register = 0, exponent = 0} : vector<2xf16>
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
  %0 = lowbit.decode_pair %w {format = #lowbit.format<"f8e5m2", []>, register = 0, exponent = 0} : vector<2xbf16>
  return %0 : vector<2xbf16>
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
  %0 = lowbit.decode_pair %w {format = #lowbit.format<"f8e7m0", []>, register = 0, exponent = 0} : vector<2xf32>
  return %0 : vector<2xf32>
}
