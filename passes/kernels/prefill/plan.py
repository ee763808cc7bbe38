"""`PrefillPlan`: what follows from a spec and a schedule of the prefill kernel, in numbers. No MLIR is needed here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from lowbit.dialect.formats.decode_table import DecodeTable
from lowbit.dialect.formats.packing import ROWS
from lowbit.dialect.formats.raw_codes import can_be_raw
from lowbit.dialect.layouts.layout import Layout, spatial
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.prefill.schedule import WARPS, PrefillSchedule
from lowbit.passes.lowering.recipes import compute_element, exponent

OUT_TOKENS = 64  # tokens that are turned around in shared memory at a time, at most


@dataclass(frozen=True)
class PrefillPlan:
    """Numbers that follow from a spec and a schedule.

    A *round* has `step` columns: `pieces` of `piece` columns, of which a thread loads the codes at once, or `panels` of
    `panel_k` columns, of which a stage holds x.

    steps: columns of a round, from and to
    """

    steps: ClassVar[tuple[int, int]] = (256, 2048)

    spec: MatmulSpec
    schedule: PrefillSchedule

    @property
    def piece(self) -> int:
        return max(self.spec.packing.chunk, self.schedule.panel_k)

    @property
    def step(self) -> int:
        """Columns of a round, 0 where none fits the groups. Every panel of a round has the same stage in all rounds."""
        s = self.schedule
        group, unit = self.spec.packing.padded_group, math.lcm(self.piece, s.panel_k * s.num_stages)
        least, most = self.steps
        steps = (step for step in range(unit, most + 1, unit) if step >= max(least, 2 * self.piece))
        return next((step for step in steps if group is None or step % group == 0 or group % step == 0), 0)

    @property
    def pieces(self) -> int:
        return self.step // self.piece

    @property
    def panels(self) -> int:
        return self.step // self.schedule.panel_k

    @property
    def rounds(self) -> int:
        """Rounds of a tile."""
        return -(-self.spec.packing.padded_k // self.step)

    @property
    def groups(self) -> int:
        """Groups in a round, 1 if a group is longer; 0 for one scale per row."""
        group = self.spec.packing.padded_group
        return 0 if group is None else max(1, self.step // group)

    @property
    def rounds_per_group(self) -> int:
        return max(1, (self.spec.packing.padded_group or 0) // self.step)

    @property
    def rows(self) -> Layout:
        """Which warps have which row blocks of a tile: [row blocks, 1]."""
        return spatial(WARPS, 1)

    @property
    def row_tiles(self) -> int:
        """Tiles of rows, or pairs of them for clusters of two."""
        return -(-self.spec.packing.row_blocks // (WARPS * self.schedule.cluster))

    @property
    def covers_rows(self) -> bool:
        """Whether all rows of all tiles are rows of the packed weight."""
        return self.spec.packing.row_blocks % (WARPS * self.schedule.cluster) == 0

    @property
    def box(self) -> tuple[int, int]:
        """Tokens and columns of x that one instruction copies."""
        return self.schedule.tokens // self.schedule.cluster, self.spec.x.per_panel

    @property
    def raw_codes(self) -> bool:
        """Whether codes are multiplied as they are stored, with no subtraction."""
        spec = self.spec
        unsigned = spec.dtype.kind == "uint" and spec.zeros == "none" and not self.groups
        return unsigned and can_be_raw(spec.dtype, compute_element(spec.dtype, spec.act))

    @property
    def scales_weights(self) -> bool:
        """Whether weights of groups can be scaled before they are multiplied, and so rounded to x's type: scales must
        be numbers of that type, and so must the power of two that decoding leaves to them."""
        spec = self.spec
        exact = spec.scale in (spec.act, "e4m3") or (spec.scale, spec.act) == ("e8m0", "bf16")
        return self.groups > 0 and exact and (spec.dtype.kind != "table" or self.exponent == 0)

    @property
    def exponent(self) -> int:
        """The power of two that decoding leaves out."""
        return exponent(self.spec.dtype, compute_element(self.spec.dtype, self.spec.act))

    @property
    def rounding(self) -> dict[str, bool]:
        """What is rounded besides sums, as `pylib.reference.tolerance` has it."""
        return {"dequantized": self.scales_weights, "rounded_zeros": self.scales_weights and self.spec.zeros == "float"}

    @property
    def ahead(self) -> int:
        """Panels of x under way while one is multiplied: a stage is filled a panel after the last warp has left it."""
        return self.schedule.num_stages - 2

    @property
    def out_tokens(self) -> int:
        """Tokens of a tile that are turned around in shared memory at a time."""
        return next(n for n in (OUT_TOKENS, 48, 32, 16) if self.schedule.tokens % n == 0)

    @property
    def out_pitch(self) -> int:
        """Numbers from a token to the next there: the rows of a warp, and 16 bytes against bank conflicts."""
        return ROWS + self.spec.y.per_vector

    @property
    def table_bytes(self) -> int:
        """Shared memory for the table of a format that has one."""
        dtype, compute = self.spec.dtype, compute_element(self.spec.dtype, self.spec.act)
        return DecodeTable(dtype, compute).bytes if dtype.kind == "table" else 0

    @property
    def shared_bytes(self) -> int:
        """Shared memory, as `lower-tiles` will lay it out."""
        s, spec = self.schedule, self.spec
        stages = s.num_stages * s.tokens * s.panel_k * spec.x.bytes
        signals = 2 * (-(-8 * s.num_stages // 128) * 128)
        out = WARPS * self.out_tokens * self.out_pitch * spec.y.bytes
        return stages + signals + self.table_bytes + out
