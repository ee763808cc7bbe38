// RUN: %lowbit-opt %s | %lowbit-opt - | %filecheck %s

// One token in integers: x of a warp is split into limbs, which are multiplied by codes as they lie in memory. Two columns,
// of the lower and the upper limbs, are one number in the end.

!x = !lowbit.shared<[1, 1, 128], f16, [136, 136, 1], 0>
!limbs = !lowbit.shared<[1, 1, 4, 4, 8], i32, [192, 192, 48, 12, 1], 0>
!unit = !lowbit.reg<[1, 1, 1], f32, "replicated(32, rank=3)">
!codes = !lowbit.reg<[1, 16, 128], #lowbit.format<"u2", []>, "column_local(1, 2, 16).spatial(1, 8, 4).local(1, 1, 2)">
!sums = !lowbit.reg<[1, 1, 2], f32, "replicated(16, rank=3).spatial(1, 1, 2)">
!pairs = !lowbit.reg<[1, 16, 2], f32, "local(1, 2, 1).spatial(1, 8, 1).replicated(2).spatial(1, 1, 2)">
!joined = !lowbit.reg<[1, 16, 1], f32, "local(1, 2, 1).spatial(1, 8, 1).replicated(4)">

// CHECK-LABEL: func.func @limbs
func.func @limbs(%x: !x, %limbs: !limbs, %codes: !codes) -> (!joined, !sums) {
  // CHECK: %[[UNIT:.*]] = lowbit.split_limbs %{{.*}}, %[[LIMBS:.*]] {format = #lowbit.format<"u2", []>}
  %unit = lowbit.split_limbs %x, %limbs {format = #lowbit.format<"u2", []>} : !x, !limbs -> !unit
  // CHECK: lowbit.limb_mma %{{.*}}, %[[LIMBS]], %[[UNIT]] {columns = 128, start = 0}
  %pairs = lowbit.limb_mma %codes, %limbs, %unit {start = 0, columns = 128} : !codes, !limbs, !unit -> !pairs
  // CHECK: lowbit.limb_sums %[[LIMBS]], %[[UNIT]] {columns = 128, format = #lowbit.format<"u2", []>, start = 0}
  %sums = lowbit.limb_sums %limbs, %unit {format = #lowbit.format<"u2", []>, start = 0, columns = 128} : !limbs, !unit -> !sums
  // CHECK: lowbit.join_limbs %
  %joined = lowbit.join_limbs %pairs : !pairs -> !joined
  return %joined, %sums : !joined, !sums
}
