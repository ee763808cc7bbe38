"""The fragments of mma.sync: which lane of a warp holds which elements of an operand.

Elements are in the order of a lane's registers, low half first. The sections are those of PTX ISA 9.7.14.5.
A is [m, k] and D [m, n]. B is [k, n] as in PTX; the _NK constants are its transposed view [n, k].
"""

from __future__ import annotations

from lowbit.dialect.layouts.layout import column_local, local

# 9.7.14.5.8, .f16 and .bf16
MMA_M16N8K16_A = column_local(2, 2).spatial(8, 4).local(1, 2)
MMA_M16N8K16_B = local(2, 1).column_spatial(4, 8).local(2, 1)
MMA_M16N8K16_B_NK = MMA_M16N8K16_B.permute((1, 0))
# 9.7.14.5.10 and 9.7.14.5.11, numbers of 8 bits
MMA_M16N8K32_A = column_local(2, 2).spatial(8, 4).local(1, 4)
MMA_M16N8K32_B_NK = local(2, 1).column_spatial(4, 8).local(4, 1).permute((1, 0))
# The fragments of one step of a product by the bits of an element. Those of tf32 are two steps, paired otherwise.
MMA_A = {8: MMA_M16N8K32_A, 16: MMA_M16N8K16_A, 32: MMA_M16N8K16_A}
MMA_B_NK = {8: MMA_M16N8K32_B_NK, 16: MMA_M16N8K16_B_NK, 32: MMA_M16N8K16_B_NK}
# The accumulators C and D are the same for every k.
MMA_M16N8_D = local(2, 1).spatial(8, 4).local(1, 2)
# Columns 0 to 3 of it, neighbours added up, where columns 4 to 7 are the same again (`dialect.formats.integer_limbs`)
MMA_M16N8_PAIRS = local(2, 1).spatial(8, 1).replicated(2).spatial(1, 2)
