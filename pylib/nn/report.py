"""The report of `lowbit.quantize_`: a row for each layer, and all of them as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from lowbit.pylib.nn.fuse import FusedLayers
from lowbit.pylib.nn.outlier_rows import OutlierRows
from lowbit.pylib.nn.why_dense import Reason, as_argument
from lowbit.pylib.torch_types import type_name

HEADER = ("name", "shape", "format", "KB before", "KB after", "error")


@dataclass(frozen=True)
class LayerReport:
    """The outcome of quantizing one layer.

    name          of the module
    shape         of its weight
    format        element format and columns per scale, or the type of a weight that stayed dense
    bytes_before  of all of its parameters
    bytes_after   of all of its parameters and buffers
    error         norm of the weight's change relative to the norm of the weight; None if it stayed dense, or in a
                  file whose original is not known
    reason        why it stayed dense; "" if it was quantized
    option        the argument of `lowbit.quantize_` that would have it quantized; "" if there is none
    note          of AWQ: the norm that the column scales were folded into, or why there are none; of experts: how many
                  tokens of the calibration they got; "" for others
    asked         the format that was asked for, where it does not divide the weight's columns, and another was taken;
                  "" for others
    outliers      how many outliers each row has, as `lowbit inspect` finds them; None for weights without
    """

    name: str
    shape: tuple[int, ...]
    format: str
    bytes_before: int
    bytes_after: int
    error: float | None = None
    reason: str = ""
    option: str = ""
    note: str = ""
    asked: str = ""
    outliers: OutlierRows | None = None

    @classmethod
    def of_dense(cls, name: str, weight: Tensor, reason: str) -> LayerReport:
        """Returns what is said of a weight that stays as it is."""
        return cls(name, tuple(weight.shape), type_name(weight.dtype), weight.nbytes, weight.nbytes, reason=reason)

    def cells(self, spelling: Callable[[str], str]) -> tuple[str, ...]:
        """Returns the cells of this row of the table, the option as `spelling` writes it."""
        shape = " x ".join(map(str, self.shape))
        sizes = (f"{self.bytes_before / 1e3:.1f}", f"{self.bytes_after / 1e3:.1f}")
        error = "" if self.error is None else f"{self.error:.4f}"
        changed = f"not {self.asked}, as asked" if self.asked else ""
        result = "  ".join(filter(None, (error, self.note, changed)))
        if self.reason:
            result = f"dense: {Reason(self.reason, self.option).spelled(spelling)}"
        return self.name, shape, self.format, *sizes, result


@dataclass(frozen=True)
class QuantizationReport:
    """The outcome of quantizing a model. Iterate for a `LayerReport` of each module that has a matrix; print it for a
    table.

    rows    a row for each of these modules
    fused   what became of layers that share their input, if `fuse=True` was asked for; rows have the parts' names
    """

    rows: tuple[LayerReport, ...]
    fused: tuple[FusedLayers, ...] = ()

    def __iter__(self) -> Iterator[LayerReport]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, name: str) -> LayerReport:
        """Returns the row of a module."""
        return {row.name: row for row in self.rows}[name]

    @property
    def quantized(self) -> tuple[LayerReport, ...]:
        """The rows of quantized layers."""
        return tuple(row for row in self.rows if not row.reason)

    @property
    def outliers(self) -> dict[str, OutlierRows]:
        """The outliers of layers that have any, by name."""
        return {row.name: row.outliers for row in self.rows if row.outliers is not None}

    @property
    def dense(self) -> tuple[LayerReport, ...]:
        """The rows of modules that stayed dense; their `reason` says why."""
        return tuple(row for row in self.rows if row.reason)

    def __str__(self) -> str:
        return self.table(as_argument)

    def table(self, spelling: Callable[[str], str]) -> str:
        """Returns all rows and the sums of their bytes as text, options as `spelling` writes them."""
        cells = [HEADER, *(row.cells(spelling) for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*cells)]
        table = ["  ".join(f"{cell:{width}}" for cell, width in zip(line, widths)).rstrip() for line in cells]
        before, after = (sum(getattr(row, name) for row in self.rows) for name in ("bytes_before", "bytes_after"))
        counts = f"{len(self.quantized)} of {len(self.rows)} layers quantized"
        lines = [*table, f"{counts}: {before / 1e6:.2f} MB before, {after / 1e6:.2f} MB after", *map(str, self.fused)]
        return "\n".join([*lines, *self._changes()])

    def _changes(self) -> list[str]:
        """Returns a line for each format that was asked for, and that not all layers have got."""
        counts = Counter(row.asked for row in self.rows if row.asked)
        why = "as asked: that does not divide their columns"
        return [f"{count} of {len(self.quantized)} layers not {asked}, {why}" for asked, count in counts.items()]
