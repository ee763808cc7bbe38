"""A part of the weight in device memory, which a warp loads to registers or asks for ahead of that."""

from __future__ import annotations

from dataclasses import dataclass

from lowbit.dialect.layouts.layout import Layout
from lowbit.passes.builder import Index, Memory, Program, Tile


@dataclass(frozen=True)
class WeightRead:
    """A read of program `p`: a part of a view, and how it lies in registers."""

    p: Program
    view: Memory
    offsets: tuple[Index, ...]
    layout: Layout
    boundary: tuple[str, ...]

    def load(self) -> Tile:
        return self.p.load(self.view, self.offsets, self.layout, self.boundary)

    def prefetch(self) -> None:
        """Asks for it to be brought into the L2 cache."""
        self.p.prefetch(self.view, self.offsets, self.layout, self.boundary)
