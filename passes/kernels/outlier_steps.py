"""Outliers of invariant matmuls: `OutlierSteps`. No MLIR is needed here.

They are multiplied as a weight of their own: 16 rows by 16 columns are a fragment in which all other weights are zero.
A step of the order of sums (`SumOrder`) is cut into units of about 64 columns, of whole groups. The products of a
unit's outliers are added up from zero, and then to the sums of the chain, behind those of its codes. So kernels for few
tokens and for many add them in one order, whatever their instructions, and whichever lines the outliers stand in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lowbit.dialect.formats.outliers import ENTRIES, INDEX_ENDS
from lowbit.dialect.formats.packing import ROWS
from lowbit.dialect.formats.recipes import compute_element
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.requirements import fits_async_x

AS_WEIGHTS = "outliers as weights"
"""Of `SumOrder.products`."""

_UNIT = 64  # columns
_USUAL = 1 / 80  # outliers in a weight: a quarter more than one in a hundred
_MOST_HEADS = 8  # times 32 lines of a row block whose first columns lanes have


def are_weights(spec: MatmulSpec) -> bool:
    """Tells whether outliers are multiplied so: those of invariant matmuls whose scales are for groups, and not for
    sums of all columns."""
    scaled_by_group = spec.group_size is not None and not spec.row_scales
    in_type_of_x = compute_element(spec.dtype, spec.act) == spec.act
    return spec.invariant and spec.outliers and scaled_by_group and in_type_of_x and fits_async_x(spec)


def unit_of(product: int, step: int) -> int:
    """Returns the columns whose outliers are multiplied at a time, behind the products of so many columns each that
    they have in a step: 64, or as few more as make whole products and divide the step."""
    return next(n for n in range(product, step + 1, product) if n >= min(_UNIT, step) and step % n == 0)


@dataclass(frozen=True)
class OutlierSteps:
    """How much of the lines of some columns a warp holds in registers.

    columns  of a step, or of a panel of x
    """

    spec: MatmulSpec
    columns: int

    @property
    def numbers(self) -> int:
        """Numbers of the index of a row block's lines (`lowbit.index_outliers`)."""
        lines = ROWS * self.spec.k * _USUAL / ENTRIES
        return INDEX_ENDS + min(_MOST_HEADS, math.ceil(lines / 32))

    @property
    def lines(self) -> int:
        """Lines that are loaded ahead: one more than these outliers fill, as they begin in the midst of one."""
        return math.ceil(ROWS * self.columns * _USUAL / ENTRIES) + 1

    @property
    def registers(self) -> int:
        """Registers of a thread for a row block: its index, and its words of these columns and of the next."""
        return self.numbers + 2 * self.lines

    @property
    def bytes_of_row_block(self) -> int:
        """Shared memory for the fragments of a row block."""
        return ROWS * self.columns * self.spec.x.bytes
