"""The weight side of the prefill kernel for activations of 8 bits: fragments of bytes, and scales of products."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product

from lowbit.dialect.formats.byte_codes import SUM_COLUMNS, byte_exponent
from lowbit.dialect.formats.packing import ROWS
from lowbit.dialect.layouts.layout import MMA_M16N8_D, MMA_M16N8K32_A, Layout
from lowbit.passes.builder import Memory, Program, Scalar, Tile
from lowbit.passes.kernels.eight_bit_prefill.plan import Columns, EightBitPrefillPlan
from lowbit.passes.kernels.prefill.schedule import WARPS
from lowbit.passes.kernels.prefill.weight import Weight
from lowbit.passes.kernels.scales_zeros import ScalesZeros

Round = tuple[Scalar, Scalar | int]
"""The number of a tile of rows, and of a round in it."""


@dataclass(frozen=True)
class _Access:
    """A part of the weight in device memory."""

    p: Program
    view: Memory
    offsets: tuple[Scalar | int, ...]
    layout: Layout
    boundary: tuple[str, ...]

    def load(self) -> Tile:
        return self.p.load(self.view, self.offsets, self.layout, self.boundary)

    def prefetch(self) -> None:
        self.p.prefetch(self.view, self.offsets, self.layout, self.boundary)


@dataclass
class Held:
    """What a thread has of the weight: codes by piece, and scales and zeros by name and group. A round has more pieces
    and groups than there are places, and they take turns: number i has place i modulo the places."""

    codes: list[Tile]
    factors: dict[str, list[Tile]]
    coming: dict[str, Tile] = field(default_factory=dict[str, Tile])  # of the next round, where this has one group

    def flat(self) -> list[Tile]:
        """All tiles, as a loop carries them."""
        return [*self.codes, *(tile for tiles in self.factors.values() for tile in tiles)]

    def like(self, tiles: list[Tile]) -> Held:
        """The inverse of `flat`."""
        codes, rest = tiles[: len(self.codes)], tiles[len(self.codes) :]
        factors: dict[str, list[Tile]] = {}
        for name, some in self.factors.items():
            factors[name], rest = rest[: len(some)], rest[len(some) :]
        return Held(codes, factors)


class EightBitWeight(Weight):
    """Loads and decodes the weight in program `p`.

    What is loaded comes from the L2 cache: device memory would be too late, so a round ahead of its load it is asked to
    be brought there.
    """

    plan: EightBitPrefillPlan

    def __init__(self, p: Program, plan: EightBitPrefillPlan) -> None:
        super().__init__(p, plan)
        self.convert = ScalesZeros(p, plan.spec, power=byte_exponent(plan.spec.dtype, plan.spec.byte_type))
        self._bytes_layout = plan.rows.local(1, plan.piece // SUM_COLUMNS) * MMA_M16N8K32_A
        self._rows = (plan.rows * MMA_M16N8_D).reduce((1,))
        self._names = ["scales"] * (plan.groups > 0) + ["zeros"] * (plan.spec.zeros == "int")

    # -- to registers

    def first(self, row_tile: Scalar) -> Held:
        """The beginning of a tile's first round; the rest is brought into the L2 cache."""
        plan, round_ = self.plan, (row_tile, 0)
        codes = [self._codes_at(round_, piece).load() for piece in range(plan.held_pieces)]
        groups = range(plan.held_groups)
        factors = {name: [self._factor_at(name, round_, group).load() for group in groups] for name in self._names}
        for piece in range(plan.held_pieces, plan.pieces):
            self._codes_at(round_, piece).prefetch()
        for name, group in product(self._names, range(plan.held_groups, plan.groups)):
            self._factor_at(name, round_, group).prefetch()
        return Held(codes, factors)

    def reload(self, held: Held, panel: int, here: Round, coming: Round) -> None:
        """Starts to load what takes the place of what this panel of the round `here` was the last to need."""
        plan, panel_k = self.plan, self.plan.schedule.panel_k
        piece, within = divmod((panel + 1) * panel_k, plan.piece)
        if not within:
            place, number, round_ = _turn(piece - 1, plan.held_pieces, plan.pieces, here, coming)
            held.codes[place] = self._codes_at(round_, number).load()
            self._codes_at(coming, piece - 1).prefetch()
        if plan.groups > 1:
            group = plan.step // plan.groups
            for ended in range(panel * panel_k // group, (panel + 1) * panel_k // group):
                self._reload_factors(held, ended, here, coming)
        elif panel == 0:
            held.coming = {name: self._factor_at(name, coming, 0).load() for name in self._names}
        elif panel == plan.panels - 1:
            held.factors = {name: [tile] for name, tile in held.coming.items()}

    def _reload_factors(self, held: Held, ended: int, here: Round, coming: Round) -> None:
        place, number, round_ = _turn(ended, self.plan.held_groups, self.plan.groups, here, coming)
        for name in self._names:
            held.factors[name][place] = self._factor_at(name, round_, number).load()
            self._factor_at(name, coming, ended).prefetch()

    def _codes_at(self, round_: Round, piece: int) -> _Access:
        """The codes of a piece of a round."""
        plan, (row_tile, index), chunks = self.plan, round_, self.plan.piece // self.packing.chunk
        offsets = (index * (plan.pieces * chunks) + piece * chunks, row_tile * WARPS, 0)
        boundary = (self._k_boundary, self._row_boundary, "none")
        return _Access(self.p, self._codes, offsets, self._unit_layout, boundary)

    def _factor_at(self, name: str, round_: Round, group: int) -> _Access:
        """The scale or zero of every row in a group of a round."""
        plan, (row_tile, index) = self.plan, round_
        number = index // plan.rounds_per_group if plan.groups == 1 else index * plan.groups + group
        return self._rows_at(name, row_tile, number if plan.groups else 0)

    def _rows_at(self, name: str, row_tile: Scalar, group: Scalar | int) -> _Access:
        p, plan, groups = self.p, self.plan, self.packing.groups
        shape, strides = (groups, self.packing.row_blocks, ROWS), (ROWS, groups * ROWS, 1)
        view = p.global_view(p[name], ScalesZeros.element(self._kind(name)), shape, strides)
        boundary = (self._k_boundary if plan.groups else "none", self._row_boundary, "none")
        return _Access(p, view, (group, row_tile * WARPS, 0), self._rows.reshape((1, WARPS, ROWS)), boundary)

    def _kind(self, name: str) -> str:
        return self.spec.scale if name == "scales" else "u8"

    # -- to fragments

    def bytes_of(self, columns: Columns, panel: int, held: Held) -> Tile:
        """The weights of a product, as bytes."""
        p, plan, spec = self.p, self.plan, self.spec
        piece, first = divmod(panel * plan.schedule.panel_k, plan.piece)
        codes = p.view(held.codes[piece % plan.held_pieces], spec.dtype, self.a_layout)
        element, zeros = spec.x.operand, None
        if spec.compute == "i8" and not plan.has_signs:
            element = "ui8"
        if spec.zeros == "int":
            zeros = p.reshape(held.factors["zeros"][columns.group % plan.held_groups], self._rows.shape)
        decoded = p.decode_bytes(codes, element, self._bytes_layout, zeros, plan.offset)
        return p.slice(decoded, 1, first + columns.start, columns.width)

    def scale_of(self, columns: Columns, held: Held) -> Tile | None:
        """What a product is multiplied by, for every row; None where rows have one scale for all columns."""
        if not self.plan.groups:
            return None
        return self._scale(held.factors["scales"][columns.group % self.plan.held_groups])

    def row_scale(self, row_tile: Scalar) -> Tile:
        """What the sums of all of k are multiplied by, where there is one scale per row."""
        return self._scale(self._rows_at("scales", row_tile, 0).load())

    def _scale(self, loaded: Tile) -> Tile:
        """Scales [rows, 1] in f32, times the power of two that bytes leave out."""
        scale = self.convert.as_f32(loaded, self._kind("scales"))
        return self.convert.with_exponent(self.p.reshape(scale, self._rows.shape))


def _turn(number: int, held: int, count: int, here: Round, coming: Round) -> tuple[int, int, Round]:
    """What comes after number `number` of the `count` of a round: its place, its number, and the round it is of."""
    later = number + held
    return (number % held, later, here) if later < count else (number % held, later - count, coming)
