"""The eight_bit_prefill family: matmuls of many tokens of 8 bits, in one launch of persistent blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice, product
from typing import TYPE_CHECKING, ClassVar

from lowbit.dialect.formats.byte_codes import MOST_UNFOLDED, sums_correct
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.base import Candidates, Operation
from lowbit.passes.kernels.decode.schedule import TOKEN_TILES as FEW_TILES
from lowbit.passes.kernels.eight_bit_prefill import cost_model, legality
from lowbit.passes.kernels.eight_bit_prefill.bounds import eight_bit_prefill_bounds
from lowbit.passes.kernels.eight_bit_prefill.plan import bytes_plan
from lowbit.passes.kernels.eight_bit_prefill.schedule import EightBitPrefillSchedule
from lowbit.passes.kernels.persistent.candidates import kinds, shared_kinds
from lowbit.passes.kernels.persistent.engine import WGMMA
from lowbit.passes.kernels.persistent.family import PersistentFamily
from lowbit.passes.kernels.persistent.schedule import ROWS_OF_TILE
from lowbit.passes.kernels.persistent.slices import with_slices
from lowbit.passes.kernels.prefill.family import TOKEN_TILES as PREFILL_TILES
from lowbit.passes.target import Target

if TYPE_CHECKING:
    from lowbit.dialect.bindings import ir

_FEW = tuple(tile for tile in FEW_TILES if 1 < tile <= MOST_UNFOLDED)
TOKEN_TILES = (*_FEW, *(tile for tile in PREFILL_TILES if tile > MOST_UNFOLDED))
"""Numbers of tokens that a schedule is chosen for."""
_WITH_SUMS = 32
_TOKENS = (32, 64, 96, 128, 160, 192, 224, 256)  # of a tile
PRODUCTS = ((1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (4, 2))
"""Parts and banks, the fastest first: products of few tokens are slow, and a second bank gains less than it takes."""
_NARROW, _WIDE = (128, 4), (256, 4)  # columns and stages of panels
_PANELS = (_NARROW, _WIDE, (128, 8), (256, 8))


class EightBitPrefill(PersistentFamily[EightBitPrefillSchedule]):
    """Codes become bytes and are multiplied by wgmma of 8-bit types, tile after tile."""

    name: ClassVar[str] = "eight_bit_prefill"
    operation: ClassVar[Operation] = "quantized_matmul"
    schedule_type = EightBitPrefillSchedule
    chosen_for: ClassVar[tuple[int, ...]] = TOKEN_TILES

    def token_tiles(self, spec: MatmulSpec, target: Target) -> tuple[int, ...]:
        if not spec.compute or not target.has_wgmma:
            return ()
        tokens = TOKEN_TILES[0]
        every = kinds(EightBitPrefillSchedule, _TOKENS, spec, tokens, target)
        some = any(self._of_kind(spec, tokens, target, kind) for kind in every)
        return served_tiles(spec, _least_tile(spec)) if some or (spec.folds and self._small(spec, target, [])) else ()

    def groups(
        self, spec: MatmulSpec, token_tile: int, target: Target
    ) -> Iterator[Candidates[EightBitPrefillSchedule]]:
        """Yields a group for every kind. Scaled weights have a small tile in any case: no other kernel has them."""
        every = kinds(EightBitPrefillSchedule, _TOKENS, spec, token_tile, target)
        found = list(self._groups(spec, token_tile, target, every))
        yield from found
        if spec.folds:
            yield Candidates(self.least_time(spec, token_tile, target), partial(self._small, spec, target, found))

    def new_groups(
        self, spec: MatmulSpec, token_tile: int, target: Target
    ) -> Iterator[Candidates[EightBitPrefillSchedule]]:
        every = shared_kinds(EightBitPrefillSchedule, spec, token_tile, target)
        return self._groups(spec, token_tile, target, every)

    def _groups(
        self, spec: MatmulSpec, token_tile: int, target: Target, every: Iterable[EightBitPrefillSchedule]
    ) -> Iterator[Candidates[EightBitPrefillSchedule]]:
        bounds = eight_bit_prefill_bounds(spec, target)
        for kind in every:
            least = bounds.of_kind(spec, kind, token_tile, target)
            yield Candidates(least, partial(self._of_kind, spec, token_tile, target, kind))

    def least_time(self, spec: MatmulSpec, token_tile: int, target: Target) -> float:
        shares = token_tile <= target.thresholds.sharing
        return eight_bit_prefill_bounds(spec, target).of_all(spec, token_tile, target, shares=shares)

    def _of_kind(
        self, spec: MatmulSpec, token_tile: int, target: Target, kind: EightBitPrefillSchedule
    ) -> list[EightBitPrefillSchedule]:
        """The first of `PRODUCTS` with registers enough, in wide panels for few tokens, and its cuts. Scaled weights
        get narrow panels where these would spill."""
        few_tokens = [_WIDE, _NARROW] if spec.folds else [_WIDE]
        panels = [_NARROW] if kind.tokens > 64 else few_tokens
        fitting = (s for s in _schedules(kind, panels) if self.fits(spec, s, target))
        found = [s for s in islice(fitting, 1) if spec.n > ROWS_OF_TILE * (s.cluster - 1)]
        return [s for s in with_slices(spec, token_tile, found, target) if self.fits(spec, s, target)]

    def _small(
        self, spec: MatmulSpec, target: Target, others: Sequence[Candidates[EightBitPrefillSchedule]]
    ) -> list[EightBitPrefillSchedule]:
        """Small tiles, whether they spill or not, where there are no others."""
        if any(group.schedules for group in sorted(others, key=lambda group: group.least)):
            return []
        small = _schedules(EightBitPrefillSchedule(_TOKENS[0]), [_NARROW])
        return [s for s in small if self.allows(spec, s, target)]

    def search_space(self, spec: MatmulSpec, token_tile: int, target: Target) -> Sequence[EightBitPrefillSchedule]:
        every_kind = kinds(EightBitPrefillSchedule, _TOKENS, spec, token_tile, target)
        every = (s for kind in every_kind for s in _schedules(kind, _PANELS))
        return [s for s in with_slices(spec, token_tile, every, target) if self.fits(spec, s, target)]

    def predict(self, spec: MatmulSpec, token_tile: int, schedule: EightBitPrefillSchedule, target: Target) -> float:
        return cost_model.predict(spec, token_tile, schedule, target)

    def shape(self, schedule: EightBitPrefillSchedule) -> tuple[object, ...]:
        s = schedule
        return s.tokens, s.parts, s.cluster, s.split_k, s.stream_k, s.last_tokens > 0

    def check(self, spec: MatmulSpec, schedule: EightBitPrefillSchedule, target: Target) -> None:
        legality.check_schedule(spec, schedule, target)

    def x_boxes(self, spec: MatmulSpec, schedule: EightBitPrefillSchedule) -> Mapping[str, tuple[int, int]]:
        return bytes_plan(spec, schedule, WGMMA).base.x.boxes

    def rounding(self, spec: MatmulSpec, schedule: EightBitPrefillSchedule) -> dict[str, bool]:
        return {"folded": spec.fold_scales}

    def build(self, spec: MatmulSpec, schedule: EightBitPrefillSchedule) -> ir.Module:
        from lowbit.passes.kernels.eight_bit_prefill.kernel import eight_bit_prefill_matmul

        return eight_bit_prefill_matmul(spec, schedule)

    def spills(self, spec: MatmulSpec, schedule: EightBitPrefillSchedule) -> bool:
        return legality.spills(spec, schedule)


def _least_tile(spec: MatmulSpec) -> int:
    """From how many tokens on these kernels are compared with the eight_bit ones, which take longer where zeros or the
    offset of codes are made up for."""
    return _WITH_SUMS if sums_correct(spec.dtype, spec.byte_type, spec.zeros) else _FEW[-1]


def served_tiles(spec: MatmulSpec, least: int) -> tuple[int, ...]:
    """Returns the numbers of tokens that are not left to the eight_bit kernels: from `least` on, and all where these
    kernels have none."""
    return tuple(tile for tile in TOKEN_TILES if tile >= least) if spec.multiplies_codes else TOKEN_TILES


def _schedules(kind: EightBitPrefillSchedule, panels: Sequence[tuple[int, int]]) -> Iterator[EightBitPrefillSchedule]:
    """Yields the schedules of this kind with these panels and stages."""
    for (panel_k, num_stages), (parts, banks) in product(panels, PRODUCTS):
        if kind.tokens % (16 * parts) == 0:
            yield replace(kind, panel_k=panel_k, num_stages=num_stages, parts=parts, banks=banks)
