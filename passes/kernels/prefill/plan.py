"""`PrefillPlan`: what follows from a spec and a schedule of the prefill kernel, in numbers. No MLIR is needed here."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from lowbit.dialect.formats.packing import ROWS
from lowbit.dialect.formats.raw_codes import can_be_raw
from lowbit.dialect.formats.recipes import compute_element, exponent
from lowbit.dialect.layouts.layout import Layout, spatial
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.prefill.schedule import ROWS_OF_TILE, WARPS, PrefillSchedule
from lowbit.passes.launch import COUNTERS

MOST_BLOCKS = 144  # that run at a time: all multiprocessors of a GH100
GROUPS_AT_ONCE = 4  # whose numbers a lane reads at once where a warp computes those of a panel
OUT_TOKENS = (64, 48, 32, 16)  # tokens that are turned around at a time: the first of these that divides a tile's;
MOST_UNEVEN = 40  # where none does: all of a tile at once if it has no more than these, else 32 at a time


@dataclass(frozen=True)
class TileShape:
    """How much a block computes at a time: of a whole tile, or of a slice of one that is cut.

    tokens   of all blocks that have it
    split_k  blocks of a cluster that have the same one and a part of k each
    rounds   those of a block
    """

    tokens: int
    split_k: int
    rounds: int

    @property
    def share(self) -> int:
        """Tokens that a block stores."""
        return self.tokens // self.split_k


@dataclass(frozen=True)
class Waves:
    """The waves of a launch.

    full  those in which every block has a tile
    last  the tiles, or slices, of one in which some have none
    busy  the part of the blocks that have one then; 0 if there is no such wave
    """

    full: int
    last: TileShape
    busy: float

    @property
    def count(self) -> int:
        """How many waves there are."""
        return self.full + (self.busy > 0)


@dataclass(frozen=True)
class Shares:
    """The shares of a launch whose blocks have parts of tiles (`StreamOrder`).

    rounds  those of a block, at most
    tiles   tiles and parts of tiles of a block, at most
    parts   blocks that have a part of a tile, at most
    even    whether all tiles have as many parts, of as many rounds or one more
    """

    rounds: int
    tiles: int
    parts: int
    even: bool


@dataclass(frozen=True)
class PrefillPlan:
    """Numbers that follow from a spec and a schedule.

    A *round* has `step` columns: `pieces` of `piece` columns, of which a thread loads the codes at once, or `panels` of
    `panel_k` columns, of which a stage holds x.

    steps         columns of a round, from and to
    least_pieces  pieces of a round, at least
    least_rounds  rounds of a tile, at least, of which x and the weight may have less: of one round, the assembler
                  orders products and the sums' first values wrongly, and says so (C7514)
    asynchronous  whether a panel is multiplied while the next one is decoded
    """

    steps: ClassVar[tuple[int, int]] = (256, 2048)
    least_pieces: ClassVar[int] = 2
    least_rounds: ClassVar[int] = 2
    asynchronous: ClassVar[bool] = True

    spec: MatmulSpec
    schedule: PrefillSchedule

    @property
    def piece(self) -> int:
        return max(self.spec.packing.chunk, self.schedule.panel_k)

    @cached_property
    def step(self) -> int:
        """Columns of a round: a multiple of the group, or a part of it, unless rounds would get too long. A panel of a
        round has the same stage in all rounds."""
        unit = math.lcm(self.piece, self.schedule.panel_k * self.schedule.num_stages)
        least, most = self.steps
        steps = [step for step in range(unit, most + 1, unit) if step >= max(least, self.least_pieces * self.piece)]
        return next(filter(self._divides_groups, steps), steps[0])

    @property
    def divides_groups(self) -> bool:
        """Whether rounds are multiples of groups, or groups of rounds."""
        return self._divides_groups(self.step)

    def _divides_groups(self, step: int) -> bool:
        group = self.spec.packing.padded_group
        return group is None or step % group == 0 or group % step == 0

    @property
    def pieces(self) -> int:
        return self.step // self.piece

    @property
    def panels(self) -> int:
        return self.step // self.schedule.panel_k

    @property
    def whole(self) -> TileShape:
        """A block's share of a whole tile."""
        s = self.schedule
        return TileShape(s.tokens, s.split_k, self._rounds(s.split_k))

    @property
    def slice(self) -> TileShape | None:
        """A block's share of a slice, if tiles are cut."""
        s = self.schedule
        return TileShape(s.last_tokens, s.last_split_k, self._rounds(s.last_split_k)) if s.last_tokens else None

    @property
    def shapes(self) -> tuple[TileShape, ...]:
        """The shapes of whole tiles and, if tiles are cut, of slices."""
        return (self.whole, self.slice) if self.slice else (self.whole,)

    @property
    def split(self) -> TileShape | None:
        """The one of these that blocks of a cluster split k of, if they do."""
        return next((shape for shape in self.shapes if shape.split_k > 1), None)

    def _rounds(self, split_k: int) -> int:
        """Blocks that split k have as many rounds each, some perhaps beyond the last column, where x is zero."""
        return max(self.least_rounds, -(-self.spec.packing.padded_k // (self.step * split_k)))

    @property
    def rounds(self) -> int:
        """Rounds of a whole tile that a block has, if k is split where it may be."""
        return self.whole.rounds

    @property
    def all_rounds(self) -> int:
        """Rounds that the columns of the weight are counted in, of all blocks that split k."""
        s = self.schedule
        return max(self.rounds * s.split_k, self.slice.rounds * s.last_split_k if self.slice else 0)

    @property
    def workspace_bytes(self) -> int:
        """Bytes of counters, one for a block, and of the sums of parts of tiles, two of each block (`Workspace`)."""
        return 4 * (COUNTERS + MOST_BLOCKS * 2 * ROWS_OF_TILE * self.schedule.tokens) if self.schedule.streams else 0

    @property
    def covers_columns(self) -> bool:
        """Whether all columns of all rounds are columns of the packed weight."""
        return self.all_rounds * self.step == self.spec.packing.padded_k

    @property
    def scales_weights(self) -> bool:
        """Whether weights are scaled before they are multiplied, and so rounded to x's type: unless rows have one scale
        each, for which the end of a tile is time enough."""
        spec = self.spec
        late = spec.group_size is None and spec.zeros in ("none", "int") and not spec.outliers
        return not late or compute_element(spec.dtype, spec.act) != spec.act

    @property
    def scales_in_rounds(self) -> bool:
        """Whether scales of groups are needed in every round, and not at the end of a tile."""
        return self.scales_weights

    @property
    def scales_in_f32(self) -> bool:
        """Whether weights are scaled in f32 and rounded then, as `dequantize` does it: where scales are no numbers of
        x's type, or codes are not."""
        return self.scales_weights and not self._has_exact_scales and not self.scales_in_two

    @property
    def scales_in_two(self) -> bool:
        """Whether a scale that is no number of x's type is the sum of two that are: 16 of its bits in bf16, which has
        the range of f32, or 22 in f16 where a warp computes them. So s_high q + s_low q is as good as rounded once, and
        what is added is rounded before."""
        spec = self.spec
        rounds_added = not spec.outliers and (spec.zeros != "offset" or spec.bilevel is not None)
        decoded = spec.act == "bf16" and compute_element(spec.dtype, spec.act) == spec.act
        in_bf16 = self.scales_weights and not self._has_exact_scales and decoded and rounds_added
        return in_bf16 or self._shares_factors

    @property
    def panel_factors(self) -> tuple[str, ...]:
        """Numbers that a warp computes once for a panel (`PanelFactors`): a scale as two of x's type, and what is
        added; none where every lane computes its own."""
        if not self._shares_factors:
            return ()
        return ("high", "low") if self.spec.zeros == "none" else ("high", "low", "added")

    @property
    def panel_groups(self) -> int:
        """Groups of a panel, where they are whole; 0 where they are not."""
        group = self.spec.packing.padded_group
        return self.schedule.panel_k // group if group and self.schedule.panel_k % group == 0 else 0

    @property
    def _shares_factors(self) -> bool:
        """Whether all 16 rows of a row block share the second level of their scales and zeros, f16 numbers of small
        groups. What a scale lacks as a sum of two f16 numbers is less than half the least subnormal."""
        spec, bilevel, groups = self.spec, self.spec.bilevel, self.panel_groups
        if bilevel is None or not self.asynchronous or spec.compute or spec.zeros == "int" or self.scales_rows_early:
            return False
        shared = bilevel.rows == ROWS and bilevel.lanes(spec.packing) == bilevel.groups == 1
        in_f16 = spec.act == bilevel.scale == compute_element(spec.dtype, spec.act) == "f16"
        return shared and in_f16 and groups > 0 and groups % GROUPS_AT_ONCE == 0

    @property
    def _has_exact_scales(self) -> bool:
        """Whether scales and codes are numbers of x's type."""
        spec = self.spec
        exact = spec.scale in (spec.act, "e4m3") or (spec.scale, spec.act) == ("e8m0", "bf16")
        exact = exact and not spec.bilevel and not self.scales_rows_early
        decoded = compute_element(spec.dtype, spec.act) == spec.act
        return exact and decoded and (spec.dtype.kind != "table" or self.exponent == 0)

    @property
    def scales_rows_early(self) -> bool:
        """Whether scales of rows multiply weights, and not sums: outliers are not scaled."""
        return self.spec.row_scales and self.spec.outliers

    @property
    def groups(self) -> int:
        """Parts of a round that have one scale; 0 where weights are not scaled."""
        group = self.spec.packing.padded_group
        if not self.scales_weights:
            return 0
        return 1 if group is None else self.step // math.gcd(self.step, group)

    @property
    def rows(self) -> Layout:
        """The layout of a tile's row blocks over warps: [row blocks, 1]."""
        return spatial(WARPS, 1)

    @property
    def row_tiles(self) -> int:
        """Tiles of rows, or pairs of them for clusters of two."""
        return -(-self.spec.packing.row_blocks // (WARPS * self.schedule.cluster))

    def tiles(self, tokens: int) -> int:
        """Tiles of so many tokens, or pairs of them for clusters of two."""
        return self.row_tiles * -(-tokens // self.schedule.tokens)

    def waves(self, tokens: int, blocks: int) -> Waves:
        """The waves of a launch for so many tokens; blocks: clusters, where there are some. `TileOrder` has the same
        arithmetic."""
        full, left = divmod(self.tiles(tokens), blocks)
        if self.slice and full and left * self.slices <= blocks:
            return Waves(full, self.slice, left * self.slices / blocks)
        return Waves(full, self.whole, left / blocks)

    def shares(self, tokens: int, blocks: int) -> Shares:
        """The shares of a launch for so many tokens; blocks: clusters, where there are some. `StreamOrder` has the same
        arithmetic."""
        return shares_of(self.tiles(tokens), self.rounds, blocks, self.schedule.stream_k)

    @property
    def slices(self) -> int:
        """Slices that a tile is cut into, or a pair for clusters of two: of a pair's rows if blocks of the cluster have
        the same rows of the weight each, of the rows of one of them if they split k."""
        s = self.schedule
        return s.tokens * s.last_split_k // s.last_tokens

    @property
    def covers_rows(self) -> bool:
        """Whether all rows of all tiles are rows of the packed weight."""
        return self.spec.packing.row_blocks % (WARPS * self.schedule.cluster) == 0

    @property
    def tile_tokens(self) -> tuple[int, ...]:
        """Tokens of a tile, and of a slice if tiles are cut and these have fewer."""
        return tuple(dict.fromkeys(shape.tokens for shape in self.shapes))

    @property
    def x_of(self) -> dict[int, str]:
        """The parameter that x is copied by, for tiles or slices of so many tokens."""
        return dict(zip(self.tile_tokens, ("x", "last_x")))

    @property
    def boxes(self) -> dict[str, tuple[int, int]]:
        """Tokens and columns of x that one instruction copies, by parameter."""
        blocks, width = self.schedule.cluster_blocks, self.spec.x.per_panel
        return {name: (tokens // blocks, width) for tokens, name in self.x_of.items()}

    @property
    def raw_codes(self) -> bool:
        """Whether codes are multiplied as they are stored, with no subtraction."""
        spec = self.spec
        unsigned = spec.dtype.kind == "uint" and spec.zeros == "none" and not self.groups
        return unsigned and can_be_raw(spec.dtype, compute_element(spec.dtype, spec.act))

    @property
    def exponent(self) -> int:
        """The power of two that decoding leaves out."""
        return exponent(self.spec.dtype, compute_element(self.spec.dtype, self.spec.act))

    @property
    def rounding(self) -> dict[str, bool]:
        """What the kernel rounds besides its sums, as arguments of `pylib.reference.tolerance`."""
        rounds_zeros = self.scales_weights and not self.scales_in_f32 and self.spec.zeros == "float"
        rounding = {"dequantized": self.scales_weights, "rounded_zeros": rounds_zeros}
        return rounding | ({"rounded_outliers": True} if self.spec.outliers else {})

    @property
    def ahead(self) -> int:
        """Panels of x under way while one is multiplied: a stage is filled a panel after the last warp has left it."""
        return self.schedule.num_stages - 2

    @property
    def part_tokens(self) -> int:
        """Tokens of a product."""
        return self.schedule.tokens

    @property
    def out_tokens(self) -> int:
        """Tokens that are turned around in shared memory at a time, at most."""
        tokens = min(self.part_tokens, self.whole.share)
        return next((n for n in OUT_TOKENS if tokens % n == 0), tokens if tokens <= MOST_UNEVEN else 32)

    def out_pieces(self, tokens: int) -> Iterator[tuple[int, int]]:
        """Yields what is turned around at a time of so many tokens' sums: the first token, and how many."""
        most = self.out_tokens
        size = next((n for n in OUT_TOKENS if n <= most and tokens % n == 0), min(most, tokens))
        for first in range(0, tokens, size):
            yield first, min(size, tokens - first)

    @property
    def out_pitch(self) -> int:
        """Numbers from a token to the next there: the rows of a warp, and 16 bytes against bank conflicts."""
        return self.out_rows + self.spec.y.per_vector

    @property
    def out_rows(self) -> int:
        """Rows of y of a warp."""
        return ROWS // 2 if self.spec.is_gated else ROWS


def shares_of(tiles: int, rounds: int, blocks: int, stream_k: str) -> Shares:
    """The shares of so many blocks (or clusters) of tiles of so many rounds each."""
    full, left = divmod(tiles, blocks)
    full = max(full - 1, 0) if left else full
    shared = tiles - full * blocks
    blocks = min(blocks, max(shared * rounds, 1))
    if stream_k == "even" and 0 < shared < blocks:
        blocks -= blocks % shared
    share = -(-shared * rounds // blocks)
    even = shared > 0 and blocks % shared == 0
    parts = blocks // shared if even else 1 - (1 - rounds) // max(share, 1)
    return Shares(full * rounds + share, full + (shared > 0) * (1 if even else 2), parts, even)
