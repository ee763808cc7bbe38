"""What the stages of the pipeline hold, and what it takes of shared memory: codes, activations, scales and zeros.
No MLIR is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lowbit.dialect.elements import ELEMENTS
from lowbit.dialect.formats.byte_codes import SUM_COLUMNS
from lowbit.dialect.formats.decode_table import DecodeTable
from lowbit.dialect.formats.packing import ROWS
from lowbit.dialect.formats.recipes import compute_element
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.decode.schedule import Schedule
from lowbit.passes.kernels.requirements import fits_async_x, scale_table
from lowbit.passes.kernels.streaming.arithmetic import Arithmetic
from lowbit.passes.kernels.streaming.steps import Steps

SWIZZLED = 1024  # bytes at a multiple of which a swizzled buffer begins


def padded(size: int, to: int = 128) -> int:
    """Returns the bytes of a buffer in shared memory, which are a multiple of 128."""
    return -(-size // to) * to


@dataclass(frozen=True)
class CodesPlan:
    """The codes of the weight, and the table of a format that has one."""

    spec: MatmulSpec
    schedule: Schedule
    steps: Steps

    @property
    def registers(self) -> int:
        """Registers of codes in a thread that holds all of its weight at once."""
        s, packing = self.schedule, self.spec.packing
        return self.steps.rounds * s.row_blocks * (s.step_k // packing.chunk) * packing.units * 4

    @property
    def bytes_of_warp(self) -> int:
        """Bytes of the codes of a step in a warp."""
        return 16 * self.schedule.row_blocks * self.steps.units

    @property
    def stage_bytes(self) -> int:
        """Bytes of all stages; preloaded weights have none."""
        if self.schedule.preload_weights:
            return 0
        s = self.schedule
        return padded(self.steps.stages * s.warps_k * s.warps_n * self.bytes_of_warp)

    @property
    def table_bytes(self) -> int:
        """Bytes of the table of a format, 0 for one that has none."""
        t = self.spec.dtype
        return DecodeTable(t, compute_element(t, self.spec.act)).bytes if t.kind == "table" else 0


@dataclass(frozen=True)
class XPlan:
    """The activations of a step, and sums of them where they have 8 bits."""

    spec: MatmulSpec
    schedule: Schedule
    steps: Steps
    arithmetic: Arithmetic

    @property
    def inputs(self) -> tuple[str, ...]:
        """The parameters of the kernel that an activation has."""
        return ("x", "x_scales", "x_sums") if self.spec.compute else ("x",)

    @property
    def reads_sums(self) -> bool:
        """Whether the kernel reads sums of x: those of an activation of 8 bits, for zeros and signed codes."""
        return self.spec.compute is not None and self.arithmetic.zeros_in_sums

    @property
    def in_pieces(self) -> bool:
        """Whether 16-byte copies fit the rows of x."""
        return fits_async_x(self.spec)

    @property
    def row(self) -> int:
        """Elements from one token to the next in a stage. Sixteen bytes more than a step spread ldmatrix over all
        banks; wgmma has swizzled rows."""
        return self.schedule.step_k + (0 if self.schedule.wgmma else self.spec.x.per_vector)

    def stage_bytes(self) -> int:
        """Returns the bytes of all stages."""
        s, stages = self.schedule, self.steps.stages
        total = padded(stages * s.warps_k * s.tokens * self.row * self.spec.x.bytes)
        if self.reads_sums:
            total += padded(stages * s.warps_k * s.columns * (s.step_k // SUM_COLUMNS) * ELEMENTS["f32"].bytes)
        return total

    def placed(self, first: int) -> int:
        """Returns where x can begin in shared memory, from a byte on."""
        return padded(first, SWIZZLED) if self.schedule.wgmma else first


@dataclass(frozen=True)
class ScalesPlan:
    """Scales, zeros and offsets of the groups of a step, and what is computed of them."""

    spec: MatmulSpec
    schedule: Schedule
    steps: Steps
    arithmetic: Arithmetic

    @property
    def shares_second_level(self) -> bool:
        """Whether what all rows of a block of groups share is computed once per step, for all lanes of a warp."""
        bilevel = self.spec.bilevel
        if not self.schedule.spread_k or bilevel is None or not bilevel.zeros or bilevel.scale != "f16":
            return False
        return bilevel.rows == ROWS and self.spec.zeros == "float" and bool(self.spec.slot("scales").shared)

    def stage_bytes(self) -> int:
        """Returns the bytes of all stages, and of what is computed once per step."""
        if not self.steps.groups:
            return 0
        stages = self.steps.stages
        total = sum([padded(stages * size) for size in self._sizes()])
        return total + self._step_bytes() + self._second_level_bytes()

    def _sizes(self) -> Iterator[int]:
        """Yields the bytes of each tensor in a round."""
        warps, rows_of_groups = self.schedule.warps_k, self.steps.rows_of_groups
        for slot in self.spec.tensors:
            if slot.index == "group":
                yield warps * rows_of_groups * ELEMENTS[slot.storage].bytes
            elif slot.index == "block":
                numbers = self.steps.row_blocks * self.steps.blocks * slot.shape[2]
                yield warps * numbers * ELEMENTS[slot.storage].bytes

    def _step_bytes(self) -> int:
        """Returns the bytes of the scales that a warp computes for all groups of a step."""
        kinds = len(self.arithmetic.step_scales)
        if not kinds:
            return 0
        element = self.spec.x if self.arithmetic.scaling.rounds_scales else ELEMENTS["f32"]
        return padded(kinds * self.schedule.warps_k * self.steps.rows_of_groups * element.bytes)

    def _second_level_bytes(self) -> int:
        if not self.shares_second_level:
            return 0
        numbers = self.schedule.warps_k * self.steps.row_blocks * self.steps.blocks
        return padded(4 * numbers) * sum(slot.index == "block" for slot in self.spec.tensors)

    @property
    def table_bytes(self) -> int:
        """Bytes of the table in which scales are places, if they are."""
        return table.bytes if (table := scale_table(self.spec)) else 0
