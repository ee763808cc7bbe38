// RUN: %lowbit-opt %s | %filecheck %s
// RUN: %lowbit-opt %s | %lowbit-opt - | %filecheck %s

// The types of the dialect, there and back.

// A weight in memory: shape, format, group, kind of zeros, type of the scales. Group 0 is one scale per row.
// CHECK: !lowbit.packed<[64, 256], #lowbit.format<"u4", []>, 128 : i64, "int", "f16">
func.func private @grouped(!lowbit.packed<[64, 256], #lowbit.format<"u4", []>, 128, "int", "f16">)
// CHECK: !lowbit.packed<[64, 256], #lowbit.format<"f6e3m2", []>, 0 : i64, "none", "bf16">
func.func private @per_row(!lowbit.packed<[64, 256], #lowbit.format<"f6e3m2", []>, 0, "none", "bf16">)

// An offset per group is added after scaling; rows may have a scale besides those of their groups.
// CHECK: !lowbit.packed<[64, 256], #lowbit.format<"u4", []>, 32 : i64, "offset", "f32">
func.func private @offset(!lowbit.packed<[64, 256], #lowbit.format<"u4", []>, 32, "offset", "f32">)
// CHECK: !lowbit.packed<[64, 256], #lowbit.format<"f4e2m1", []>, 16 : i64, "none", #lowbit.scales<"e4m3", "f32">>
func.func private @row_scales(!lowbit.packed<[64, 256], #lowbit.format<"f4e2m1", []>, 16, "none", #lowbit.scales<"e4m3", "f32">>)

// Scales (and offsets) may be codes: their format, the type of the second level, the rows and groups that share a number
// of it, and whether it has zeros; the scale of a row goes around that.
// CHECK: !lowbit.packed<[64, 256], #lowbit.format<"u4", []>, 32 : i64, "offset", #lowbit.bilevel<"u6", "f16", [1, 8], "none">>
func.func private @bilevel(!lowbit.packed<[64, 256], #lowbit.format<"u4", []>, 32, "offset", #lowbit.bilevel<"u6", "f16", [1, 8], "none">>)
// CHECK: #lowbit.scales<#lowbit.bilevel<"u3", "f16", [16, 1], "float">, "f32">>
func.func private @spqr(!lowbit.packed<[64, 256], #lowbit.format<"u3", []>, 16, "float", #lowbit.scales<#lowbit.bilevel<"u3", "f16", [16, 1], "float">, "f32">>)

// Codes of scales may be places in a table, and have an offset added.
// CHECK: #lowbit.bilevel<#lowbit.format<"lut8", [0.000000e+00, {{.*}}, 1.000000e+00]>, "f32", [1, 4], "offset">>
func.func private @nested(!lowbit.packed<[64, 256], #lowbit.format<"nf4", []>, 64, "none", #lowbit.bilevel<#lowbit.format<"lut8", [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]>, "f32", [1, 4], "offset">>)

// A named table is implied by its name; the table of a lut format is part of the type.
// CHECK: #lowbit.format<"nf4", []>
func.func private @named_table(!lowbit.packed<[64, 256], #lowbit.format<"nf4", []>, 64, "none", "f16">)
// CHECK: #lowbit.format<"lut1", [-1.000000e+00, 5.000000e-01]>
func.func private @own_table(!lowbit.packed<[64, 256], #lowbit.format<"lut1", [-1.0, 0.5]>, 64, "none", "f16">)

// A view of device memory: shape (-1: known at run time), element, strides, divisors of the indices.
// CHECK: !lowbit.global<[-1, 256], f16, [256, 1], [1, 1]>
func.func private @activations(!lowbit.global<[-1, 256], f16, [256, 1], [1, 1]>)
// CHECK: !lowbit.global<[8, 16], bf16, [16, 1], [2, 1]>
func.func private @every_row_twice(!lowbit.global<[8, 16], bf16, [16, 1], [2, 1]>)

// A buffer in shared memory; a stride beyond the dense one spreads rows over banks.
// CHECK: !lowbit.shared<[8, 64], f16, [72, 1], 0 : i64>
func.func private @padded_rows(!lowbit.shared<[8, 64], f16, [72, 1], 0>)

// Or rows of 128 bytes have their 16-byte pieces permuted, as wgmma reads them.
// CHECK: !lowbit.shared<[2, 8, 64], bf16, [512, 64, 1], 128 : i64>
func.func private @swizzled_rows(!lowbit.shared<[2, 8, 64], bf16, [512, 64, 1], 128>)

// A tile in registers. The layout says which thread holds what: here the accumulator of mma.m16n8k16.
// CHECK: !lowbit.reg<[16, 8], f32, "local(2, 1).spatial(8, 4).local(1, 2)">
func.func private @accumulator(!lowbit.reg<[16, 8], f32, "local(2, 1).spatial(8, 4).local(1, 2)">)
// Codes of a low-bit format exist in registers only.
// CHECK: !lowbit.reg<[16, 64], #lowbit.format<"u4", []>, "local(1, 4).column_local(2, 2).spatial(8, 4).local(1, 2)">
func.func private @codes(!lowbit.reg<[16, 64], #lowbit.format<"u4", []>, "local(1, 4).column_local(2, 2).spatial(8, 4).local(1, 2)">)
