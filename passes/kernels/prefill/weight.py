"""The weight side of the prefill kernel: codes, scales and zeros straight from device memory to registers, and the
fragments that they become."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product

from lowbit.dialect.formats.decode_table import DecodeTable
from lowbit.dialect.formats.packing import BLOCK_K, ROWS
from lowbit.dialect.layouts.layout import MMA_M16N8_D, MMA_M16N8K16_A
from lowbit.dialect.types import UNIT
from lowbit.passes.builder import Memory, Program, Scalar, Tile
from lowbit.passes.kernels.prefill.parts import Part, parts_of_panel
from lowbit.passes.kernels.prefill.plan import PrefillPlan
from lowbit.passes.kernels.prefill.schedule import WARPS
from lowbit.passes.kernels.scales_zeros import ScalesZeros
from lowbit.passes.lowering.recipes import compute_element, exponent


@dataclass
class RoundRegisters:
    """What a thread has of a round: codes by piece, and scales and zeros by name and group."""

    codes: list[Tile]
    factors: dict[str, list[Tile]]
    coming: dict[str, Tile] = field(default_factory=dict[str, Tile])  # of the next round, where this has one group

    def reload(self, weight: Weight, panel: int, row_tile: Scalar, following: Scalar) -> None:
        """Starts to load what the next round has in place of what this panel was the last to need."""
        plan = weight.plan
        piece, rest = divmod((panel + 1) * plan.schedule.panel_k, plan.piece)
        if not rest:
            self.codes[piece - 1] = weight.load_codes(row_tile, following, piece - 1)
        if plan.groups > 1:
            ended = [part.group for part in parts_of_panel(plan, panel) if part.ends]
            for name, group in product(self.factors, ended):
                self.factors[name][group] = weight.load_factor(name, row_tile, following, group)
        elif panel == 0:
            self.coming = {name: weight.load_factor(name, row_tile, following, 0) for name in self.factors}
        elif panel == plan.panels - 1:
            self.factors = {name: [tile] for name, tile in self.coming.items()}

    def flat(self) -> list[Tile]:
        """All tiles, as a loop carries them."""
        return [*self.codes, *(tile for tiles in self.factors.values() for tile in tiles)]

    def like(self, tiles: list[Tile]) -> RoundRegisters:
        """The inverse of `flat`."""
        codes, rest = tiles[: len(self.codes)], tiles[len(self.codes) :]
        factors: dict[str, list[Tile]] = {}
        for name, some in self.factors.items():
            factors[name], rest = rest[: len(some)], rest[len(some) :]
        return RoundRegisters(codes, factors)


class Weight:
    """Loads and decodes the weight in program `p`."""

    def __init__(self, p: Program, plan: PrefillPlan) -> None:
        self.p, self.plan, self.spec, self.packing = p, plan, plan.spec, plan.spec.packing
        self.compute = compute_element(plan.spec.dtype, plan.spec.act)
        self.convert = ScalesZeros(p, plan.spec, 0.0, plan.raw_codes)
        self.a_layout = plan.rows.local(1, plan.piece // BLOCK_K) * MMA_M16N8K16_A
        self.row_layout = (plan.rows * MMA_M16N8_D).reduce((1,))
        packing, units = self.packing, self.packing.units
        shape = (packing.chunks, packing.row_blocks, units * 32)
        strides = (units * 32, packing.chunks * units * 32, 1)
        self._codes = p.global_view(p["codes"], UNIT, shape, strides)
        chunks = plan.piece // packing.chunk
        self._unit_layout = plan.rows.unsqueeze(0).local(chunks, 1, 1).local(1, 1, units).spatial(1, 1, 32)
        self._row_boundary = "none" if plan.covers_rows else "clamp"
        self._k_boundary = "clamp" if packing.padded_k % plan.step else "none"
        self.table: Memory | None = None

    def fill_table(self) -> None:
        """The table of a format that has one, in shared memory."""
        t = self.spec.dtype
        if t.kind == "table":
            self.table = self.p.alloc_shared("i32", DecodeTable(t, self.compute).shape)
            self.p.fill_table(self.table, t, self.compute, exponent(t, self.compute))

    # -- to registers

    def load_round(self, row_tile: Scalar, index: Scalar | int) -> RoundRegisters:
        """A whole round."""
        plan = self.plan
        names = ["scales"] * (plan.groups > 0) + ["zeros"] * (plan.groups > 0 or self._zeros_in_decode)
        names = [name for name in names if name == "scales" or self.spec.zero_kind]
        codes = [self.load_codes(row_tile, index, piece) for piece in range(plan.pieces)]
        groups = range(max(1, plan.groups))
        return RoundRegisters(codes, {n: [self.load_factor(n, row_tile, index, g) for g in groups] for n in names})

    def load_codes(self, row_tile: Scalar, index: Scalar | int, piece: int) -> Tile:
        """The codes of a piece of a round."""
        plan, chunks = self.plan, self.plan.piece // self.packing.chunk
        first = index * (plan.pieces * chunks) + piece * chunks
        offsets = (first, row_tile * WARPS, 0)
        return self.p.load(self._codes, offsets, self._unit_layout, (self._k_boundary, self._row_boundary, "none"))

    def load_factor(self, name: str, row_tile: Scalar, index: Scalar | int, group: int) -> Tile:
        """Scale or zero of every row in a group of a round, as it is in memory."""
        plan = self.plan
        number = index // plan.rounds_per_group + group if plan.groups == 1 else index * plan.groups + group
        return self._load_rows(name, row_tile, number if plan.groups else 0)

    def _load_rows(self, name: str, row_tile: Scalar, group: Scalar | int) -> Tile:
        packing = self.packing
        shape, strides = (packing.groups, packing.row_blocks, ROWS), (ROWS, packing.groups * ROWS, 1)
        view = self.p.global_view(self.p[name], ScalesZeros.element(self._kind(name)), shape, strides)
        boundary = (self._k_boundary if self.plan.groups else "none", self._row_boundary, "none")
        layout = self.row_layout.reshape((1, WARPS, ROWS))
        return self.p.load(view, (group, row_tile * WARPS, 0), layout, boundary)

    def _kind(self, name: str) -> str:
        return self.spec.scale if name == "scales" else self.spec.zero_kind or ""

    def _as_f32(self, name: str, loaded: Tile) -> Tile:
        """[rows, 1]"""
        return self.p.reshape(self.convert.as_f32(loaded, self._kind(name)), self.row_layout.shape)

    # -- to fragments

    @property
    def _zeros_in_decode(self) -> bool:
        """Whether decoding subtracts the zeros, which costs nothing: q - z is exact."""
        return self.spec.zeros == "int"

    def fragments(self, part: Part, panel: int, registers: RoundRegisters) -> Tile:
        """The weights of a part of a panel as they are multiplied."""
        p, plan = self.p, self.plan
        piece, first = divmod(panel * plan.schedule.panel_k, plan.piece)
        codes = p.view(registers.codes[piece], self.spec.dtype, self.a_layout)
        numbers = self._decoded(codes, part, registers)
        return self._scaled(p.slice(numbers, 1, first + part.start, part.width), part, registers)

    def _decoded(self, codes: Tile, part: Part, registers: RoundRegisters) -> Tile:
        """All of a piece as if it were of the part's group: registers that nobody takes are not made."""
        p = self.p
        if self.table:
            return p.lookup(codes, self.table, self.compute)
        shifts: list[Tile] = []
        if self._zeros_in_decode:
            zero = self._as_f32("zeros", registers.factors["zeros"][part.group])
            shifts = [p.cast(self.convert.minus_zero(zero), self.compute)]
        offset = "raw" if self.plan.raw_codes else "subtracted"
        return p.decode(codes, self.compute, self.convert.exponent, offset, shifts)

    def _scaled(self, numbers: Tile, part: Part, registers: RoundRegisters) -> Tile:
        """s * q, or s * q + (- s * z), which is one instruction for both."""
        p = self.p
        if not self.plan.groups:
            return numbers
        if self.plan.exponent:  # by itself: a scale times it may not be a number of x's type
            numbers = numbers * 2.0**self.plan.exponent
        scale = p.cast(self._as_f32("scales", registers.factors["scales"][part.group]), self.compute)
        if self.spec.zeros != "float":
            return p.mul(numbers, scale)
        zero = self._as_f32("zeros", registers.factors["zeros"][part.group])
        return p.fma(numbers, scale, p.mul(scale, p.cast(self.convert.minus_zero(zero), self.compute)))

    def row_scale(self, row_tile: Scalar) -> Tile:
        """What the sums of all of k are multiplied by, where there is one scale per row."""
        return self.convert.with_exponent(self._as_f32("scales", self._load_rows("scales", row_tile, 0)))
