"""The layouts of operands and sums over the warps of a block, which an engine multiplies."""

from __future__ import annotations

from lowbit.dialect.formats.packing import BLOCK_K
from lowbit.dialect.layouts.fragments import MMA_M16N8_D, MMA_M16N8K16_A, MMA_M16N8K16_B_NK
from lowbit.dialect.layouts.layout import Layout, spatial
from lowbit.passes.kernels.decode.schedule import Schedule


def weight_fragments(s: Schedule, columns: int = BLOCK_K, fragment: Layout = MMA_M16N8K16_A) -> Layout:
    """Returns the layout of a step's codes or weights [warps_k, rows, k]. columns: of a fragment."""
    warps = spatial(s.warps_k, s.warps_n, 1)
    return warps.local(1, s.row_blocks, s.step_k // columns) * fragment.unsqueeze(0)


def x_fragments(s: Schedule, columns: int = BLOCK_K, fragment: Layout = MMA_M16N8K16_B_NK) -> Layout:
    """Returns the layout of a step's activations [warps_k, tokens, k], which the warps along n share."""
    warps = spatial(s.warps_k, 1, 1).replicated(s.warps_n)
    return warps.local(1, s.mma_columns // 8, s.step_k // columns) * fragment.unsqueeze(0)


def sum_fragments(s: Schedule) -> Layout:
    """Returns the layout of sums [warps_k, rows, tokens]."""
    warps = spatial(s.warps_k, s.warps_n, 1)
    return warps.local(1, s.row_blocks, s.mma_columns // 8) * MMA_M16N8_D.unsqueeze(0)
