"""The tiles of a launch of persistent blocks, in numbers: `Tiles`. No MLIR is needed here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from lowbit.dialect.layouts.layout import Layout, spatial
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.persistent.chains import Chains
from lowbit.passes.kernels.persistent.round import Round
from lowbit.passes.kernels.persistent.schedule import ROWS_OF_TILE, WARPS, PrefillSchedule
from lowbit.passes.kernels.sum_order import SumOrder
from lowbit.passes.launch import COUNTERS

MOST_BLOCKS = 144  # that run at a time: all multiprocessors of a GH100


@dataclass(frozen=True)
class TileShape:
    """How much a block computes at a time: of a whole tile, of a slice of one that is cut, or of a short one of
    experts.

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

    @property
    def exchanged_bytes(self) -> int:
        """Bytes of sums that a block gets from others that split k with it, and sends to them."""
        return 4 * ROWS_OF_TILE * self.share * (self.split_k - 1)


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
class Tiles:
    """The tiles that a weight and so many tokens are cut into."""

    spec: MatmulSpec
    schedule: PrefillSchedule
    round: Round

    @cached_property
    def chains(self) -> Chains:
        """The order in which columns are visited."""
        return Chains(self.spec, self.schedule.order or SumOrder(1, 1, self.round.step), self.round)

    @cached_property
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

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens of a tile, and of a slice if tiles are cut and these have fewer."""
        return tuple(dict.fromkeys(shape.tokens for shape in self.shapes))

    def _rounds(self, split_k: int) -> int:
        """Blocks that split k have as many rounds each, some perhaps beyond the last column, where x is zero."""
        if self.schedule.order:
            return self.chains.count * self.chains.rounds
        return max(self.round.least_rounds, -(-self.spec.packing.padded_k // (self.round.step * split_k)))

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
    def columns(self) -> int:
        """Columns of all rounds, those beyond the last of the weight included."""
        return self.all_rounds * self.round.step

    @property
    def covers_columns(self) -> bool:
        """Tells whether all columns of all rounds are columns of the packed weight."""
        return self.columns == self.spec.packing.padded_k

    @property
    def row_blocks(self) -> int:
        """Row blocks that are cut into tiles: of an expert, where a weight has several."""
        return self.spec.packing.row_blocks // self.spec.experts

    @property
    def unit(self) -> int:
        """Row blocks from which on a tile may begin, in numbers of which its place is given."""
        return WARPS if self.spec.experts == 1 else math.gcd(WARPS, self.row_blocks)

    @property
    def covers_rows(self) -> bool:
        """Tells whether all rows of all tiles are rows of the packed weight."""
        return self.row_blocks % (WARPS * self.schedule.cluster) == 0

    @property
    def rows(self) -> Layout:
        """The layout of a tile's row blocks over warps: [row blocks, 1]. Warps that differ in tokens alone have the
        same."""
        along_rows, along_tokens = self.schedule.warps
        return spatial(along_rows, 1).replicated(along_tokens).local(WARPS // along_rows, 1)

    @property
    def row_tiles(self) -> int:
        """Tiles of rows, or pairs of them for clusters of two; of an expert, where a weight has several."""
        return -(-self.row_blocks // (WARPS * self.schedule.cluster))

    def count(self, tokens: int) -> int:
        """Returns the tiles of so many tokens, or pairs of them for clusters of two."""
        return self.row_tiles * -(-tokens // self.schedule.tokens)

    def waves(self, tokens: int, blocks: int) -> Waves:
        """Returns the waves of a launch for so many tokens; blocks: clusters, where there are some. `TileOrder` has the
        same arithmetic."""
        full, left = divmod(self.count(tokens), blocks)
        if self.slice and full and left * self.slices <= blocks:
            return Waves(full, self.slice, left * self.slices / blocks)
        return Waves(full, self.whole, left / blocks)

    def shares(self, tokens: int, blocks: int) -> Shares:
        """Returns the shares of a launch for so many tokens; blocks: clusters, where there are some. `StreamOrder` has
        the same arithmetic."""
        return shares_of(self.count(tokens), self.rounds, blocks, self.schedule.stream_k)

    @property
    def slices(self) -> int:
        """Slices that a tile is cut into, or a pair for clusters of two: of a pair's rows if blocks of the cluster have
        the same rows of the weight each, of the rows of one of them if they split k."""
        s = self.schedule
        return s.tokens * s.last_split_k // s.last_tokens

    @property
    def workspace_bytes(self) -> int:
        """Bytes of counters, one for a block, and of the sums of parts of tiles, two of each block (`Workspace`)."""
        return 4 * (COUNTERS + MOST_BLOCKS * 2 * ROWS_OF_TILE * self.schedule.tokens) if self.schedule.streams else 0


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
