"""How a kernel cuts n and k: tiles of rows, rounds of steps, and the groups of a step. No MLIR is needed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from lowbit.dialect.formats.packing import ROWS
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.decode.schedule import Schedule


class Product(NamedTuple):
    """Columns of a step whose products are added up from zero where groups have scales: `start` .. of the step.

    chain  to whose sums they are added
    """

    chain: int
    group: int
    start: int
    columns: int


@dataclass(frozen=True)
class Steps:
    """The numbers of tiles, rounds, steps and groups that follow from a spec and a schedule."""

    spec: MatmulSpec
    schedule: Schedule

    @property
    def count(self) -> int:
        """Steps of step_k columns in the packed weight."""
        return -(-self.spec.packing.padded_k // self.schedule.step_k)

    @cached_property
    def rounds(self) -> int:
        """Rounds of one block."""
        return -(-self.count // (self.schedule.warps_k * self.schedule.split_k))

    @property
    def cover_exactly(self) -> bool:
        """Whether no warp ever meets a step beyond the last."""
        return self.rounds * self.schedule.warps_k * self.schedule.split_k == self.count

    @property
    def take_turns(self) -> bool:
        """Whether blocks that split k have every so manieth round; else each has rounds side by side. Blocks of a
        cluster do so where there is one order of sums for all kernels: a chain of it may be any warp's then."""
        return self.spec.invariant and self.schedule.cluster > 1

    @property
    def stages(self) -> int:
        """Rounds for which shared memory has room: all of them with preloaded weights."""
        return self.rounds if self.schedule.preload_weights else min(self.schedule.num_stages, self.rounds)

    @property
    def row_blocks(self) -> int:
        """Row blocks of 16 rows per thread block."""
        return self.schedule.row_blocks * self.schedule.warps_n

    @property
    def tiles(self) -> int:
        """Blocks side by side along n, or along the rows of an expert."""
        return -(-self.row_blocks_of_expert // self.row_blocks)

    @property
    def row_blocks_of_expert(self) -> int:
        """Row blocks of the weight that one of its experts has: all of them, unless there are several."""
        return self.spec.packing.row_blocks // self.spec.experts

    @property
    def is_ragged(self) -> bool:
        """Whether the last of these tiles has rows beyond the last."""
        return self.row_blocks_of_expert % self.row_blocks != 0

    @property
    def launched_tiles(self) -> int:
        """Tiles that are launched, with the empty ones that fill up the grid."""
        return max(self.tiles, -(-self.schedule.min_blocks // self.schedule.split_k))

    @property
    def units(self) -> int:
        """Units of 16 bytes that the codes of a row block take in a step."""
        packing = self.spec.packing
        return self.schedule.step_k // packing.chunk * packing.units * 32

    @property
    def groups(self) -> int:
        """Groups in a step, 1 if a group is longer; 0 for one scale per row."""
        group = self.spec.packing.padded_group
        return 0 if group is None else max(1, self.schedule.step_k // group)

    @cached_property
    def products(self) -> tuple[Product, ...]:
        """The products of a step, in order: of a group, or of a chain's columns where groups are longer."""
        s, groups = self.schedule, max(1, self.groups)
        columns = s.step_k // max(groups, s.chains)
        starts = range(0, s.step_k, columns)
        return tuple(Product(i * s.chains // s.step_k, i * groups // s.step_k, i, columns) for i in starts)

    @property
    def rows_of_groups(self) -> int:
        """Scales that a block has of a step, one for every row and group."""
        return self.row_blocks * max(1, self.groups) * ROWS

    @property
    def blocks(self) -> int:
        """Blocks of groups (`Bilevel`) in a step, 1 if a block is longer."""
        bilevel = self.spec.bilevel
        return max(1, self.schedule.step_k // bilevel.columns(self.spec.packing)) if bilevel else 0

    @property
    def per_block(self) -> int:
        """Steps that share a block of groups, at least 1."""
        bilevel = self.spec.bilevel
        return max(1, bilevel.columns(self.spec.packing) // self.schedule.step_k) if bilevel else 1
