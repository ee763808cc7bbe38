"""Which kernel multiplies the slots of experts, and how many slots its tiles have. No MLIR is needed here.

A table of token tiles is made once for both matmuls of a layer, so their number is chosen first, from the mean of an
expert's slots: more than that, so that few experts have a tile that is hardly filled behind a full one. Thresholds are
from an H200 (docs/lab-notebook/experts.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from lowbit.dialect.errors import SpecError
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.base import KernelSchedule
from lowbit.passes.kernels.eight_bit_experts.family import EightBitExperts
from lowbit.passes.kernels.eight_bit_experts_decode.family import EightBitExpertsDecode
from lowbit.passes.kernels.eight_bit_experts_mma.family import EightBitExpertsMma
from lowbit.passes.kernels.experts.family import MOST_BY_MMA, Experts
from lowbit.passes.kernels.experts_decode.family import ExpertsDecode
from lowbit.passes.kernels.experts_mma.family import ExpertsMma
from lowbit.passes.kernels.experts_mma.schedule import ExpertsMmaSchedule
from lowbit.passes.kernels.persistent.expert_family import ExpertFamily
from lowbit.passes.kernels.registry import family_of
from lowbit.passes.scheduling.order_choice import order_of
from lowbit.passes.target import Target

_Family = ExpertFamily[Any]
_IN_ACT: tuple[_Family, _Family] = (Experts(), ExpertsMma())
_IN_BYTES: tuple[_Family, _Family] = (EightBitExperts(), EightBitExpertsMma())
_OF_FEW, _OF_FEW_BYTES = ExpertsDecode(), EightBitExpertsDecode()
"""These have candidates for tiles that they are as fast for as a persistent kernel."""
_TILES = (8, 16, 32, 64, 128, 192)
_TILES_OF_WGMMA = (8, 16, 24, 32, 48, 64, 80, 96, 128, 144, 160, 192, 256)
_BY_MEAN = (
    *((5, 8), (11, 16), (17, 24), (26, 32), (39, 48), (56, 64), (70, 80), (80, 96)),
    *((105, 128), (125, 144), (145, 160), (180, 192), (225, 256), (270, 144), (math.inf, 256)),
)
"""Mean numbers of slots of an expert, up to which tiles of so many are taken where they all have kernels."""
_WITHOUT_48 = ((5, 8), (11, 16), (42, 32), (56, 64), (75, 96), (105, 128), (180, 192), (math.inf, 256))
"""The same for formats whose tiles of 48 would spill."""
_WITHOUT_SHORT = ((5, 8), (11, 16), (26, 32), (100, 64), (150, 192), (400, 128), (math.inf, 192))
"""The same for mma.sync, which has no tiles of 144, and no narrower products for short ones."""


def schedule_for(spec: MatmulSpec, tile: int, target: Target) -> KernelSchedule | None:
    """Returns the schedule of the kernel whose tiles have so many slots; None where there is none."""
    return _schedule(spec, tile, spec.experts, target)


def schedule_for_few(spec: MatmulSpec, tile: int, slots: int, target: Target) -> KernelSchedule | None:
    """Returns `schedule_for`, or the schedule for so few experts that are hit, where each tile has a multiprocessor."""
    few = slots <= most_alone(spec, target)
    return _schedule(spec, tile, min(max(slots, 1), spec.experts) if few else spec.experts, target)


@lru_cache(maxsize=256)
def _schedule(spec: MatmulSpec, tile: int, hit: int, target: Target) -> KernelSchedule | None:
    """Returns the schedule for tiles of so many slots where so many experts are hit."""
    spec = spec.for_tokens(tile)
    few = _OF_FEW_BYTES if spec.compute else _OF_FEW
    if spec.invariant:
        return few.fastest(spec, tile, hit, target, order_of(spec, target))
    if found := few.fastest(spec, tile, hit, target):
        return found
    by_wgmma, by_mma = _IN_BYTES if spec.compute else _IN_ACT
    families = (by_wgmma, by_mma) if target.has_wgmma and tile > MOST_BY_MMA else (by_mma,)
    serving = (family for family in families if tile in family.tiles)
    found = next((s for family in serving for s in family.candidates(spec, tile, target)), None)
    if isinstance(found, ExpertsMmaSchedule) and hit < spec.experts:
        alone = replace(found, blocks_per_sm=1)
        return alone if family_of(alone).allows(spec, alone, target) else found
    return found


def most_alone(spec: MatmulSpec, target: Target) -> int:
    """Returns how many slots at most have a multiprocessor for each tile, if each slot is a tile of its own."""
    return target.multiprocessors // -(-spec.n // spec.experts // 128)


def tiles_of(spec: MatmulSpec, target: Target) -> tuple[int, ...]:
    """Returns the numbers of slots that tiles may have, the least first; with `MatmulSpec.compute_from` of few slots
    and of many.

    Raises SpecError for a spec or a target without any; it says why.
    """
    tiles = _TILES_OF_WGMMA if target.has_wgmma else _TILES
    found = tuple(tile for tile in tiles if all(schedule_for(kind, tile, target) for kind in spec.kinds))
    if not found:
        for kind in spec.kinds:
            _, by_mma = _IN_BYTES if kind.compute else _IN_ACT
            by_mma.check(kind, by_mma.schedule_type(by_mma.tiles[0]), target)
        raise SpecError(f"no kernel multiplies by ({spec}) on {target}; take a matmul per expert")
    return found


def tiles_by_slots(tiles: Sequence[int], experts: int) -> dict[int | None, int]:
    """Returns which of these tiles serves how many slots, by the last number of these; the last of all is None."""
    ends = [int(most * experts) for most, _ in _by_mean(tiles)[:-1]]
    each = [tile_for(tiles, end, experts) for end in (*ends, ends[-1] + 1)]
    followed = zip((*ends, None), each, (*each[1:], 0))
    return {last: tile for last, tile, following in followed if tile != following}


def tile_for(tiles: Sequence[int], slots: int, experts: int) -> int:
    """Returns which of these tiles, the least first, to cut so many slots into. torch.compile traces it."""
    wanted = next(tile for most, tile in _by_mean(tiles) if slots <= most * experts)
    fitting = [tile for tile in tiles if tile <= wanted]
    return fitting[-1] if fitting else tiles[0]


def _by_mean(tiles: Sequence[int]) -> Sequence[tuple[float, int]]:
    if 144 not in tiles:
        return _WITHOUT_SHORT
    return _BY_MEAN if 48 in tiles else _WITHOUT_48
