// RUN: %lowbit-opt %s --split-input-file --lower-dequant --canonicalize | %filecheck %s

// A pair of codes of a table becomes a pair of numbers by lookup.

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
  %0 = lowbit.lookup_pair %table, %column, %w {format = #lowbit.format<"nf4", []>, register = 1} : !llvm.ptr<3> -> vector<2xf16>
  %1 = lowbit.lookup_pair %table, %column, %w {format = #lowbit.format<"nf4", []>, register = 3} : !llvm.ptr<3> -> vector<2xf16>
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
  %0 = lowbit.lookup_pair %table, %column, %w0, %w1, %w2 {format = #lowbit.format<"lut3", [-8.0, -4.0, -2.0, -1.0, 1.0, 2.0, 4.0,
      8.0]>, register = 15} : !llvm.ptr<3> -> vector<2xf16>
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
  %0 = lowbit.lookup_pair %table, %column, %w0, %w1, %w2, %w3, %w4 {format = #lowbit.format<"lut5", [
      -8.0, -7.5, -7.0, -6.5, -6.0, -5.5, -5.0, -4.5, -4.0, -3.5, -3.0, -2.5, -2.0, -1.5, -1.0, -0.5,
      0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 5.5, 6.0, 6.5, 7.0, 7.5]>, register = 15}
          : !llvm.ptr<3> -> vector<2xbf16>
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
  %0 = lowbit.decode_pair %w {format = #lowbit.format<"nf4", []>, register = 1, exponent = 0} : vector<2xf16>
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
  %0 = lowbit.decode_pair %w {format = #lut5, register = 0, exponent = 0} : !pair
  %1 = lowbit.decode_pair %w {format = #lut5, register = 1, exponent = 0} : !pair
  %2 = lowbit.decode_pair %w {format = #lut5, register = 1, exponent = 1} : !pair
  return %0, %1, %2 : !pair, !pair, !pair
}
