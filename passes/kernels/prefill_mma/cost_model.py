"""About how long a schedule takes, and the two kernels that write the weight out for the vendor's matmul instead.

No GPU of these architectures was at hand: times follow from how many instructions a tile takes, counted in machine
code, and from the rates in NVIDIA's architecture whitepapers and data sheets. What they leave open, `_SUSTAINED` and
`_PER_PANEL`, is fitted to kernels for sm_90 on an H200 (docs/lab-notebook/persistent-blocks.md, "Without wgmma"). The
predictions serve to compare schedules, and to say from how many tokens on the vendor's matmul is likely to be the
faster way.
"""

from __future__ import annotations

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.costs import Rates
from lowbit.passes.kernels.base import SURE
from lowbit.passes.kernels.persistent.engine import MMA
from lowbit.passes.kernels.persistent.plan import PersistentPlan
from lowbit.passes.kernels.persistent.schedule import ROWS_OF_TILE, WARPS
from lowbit.passes.kernels.prefill_mma.schedule import PrefillMmaSchedule
from lowbit.passes.target import Target

_SCHEDULERS = 4  # of a multiprocessor: each has a quarter of the tensor cores, and issues an instruction a clock
_PRODUCT = 16 * 8 * 16  # multiply-adds of an mma.sync of f16
_DECODE = {"int": 13.0, "uint": 13.0, "float": 20.0, "table": 20.0}  # instructions for a fragment of 16 x 16 weights
_OTHERS = 8.0  # instructions of a warp for the columns of an mma.sync: addresses, copies and loads
_SHARED = 128.0  # bytes of shared memory per clock,
_CACHE = 32.0  # and of the L2 cache for each multiprocessor
_BESIDE = 0.15  # of the time of what is not the bound, which the bound does not hide
_SUSTAINED = 0.9  # of the rate of tensor cores that good kernels reach, ours and the vendor's
_PER_PANEL = 200.0  # clocks in which the warps of a panel wait for one another, or for memory
_END, _END_PER_TOKEN = 800.0, 8.0  # clocks of the end of a tile
_CACHED = 3.0  # times the memory's rate, where the L2 cache holds what was written
_NO_TEMPORARY = 1.1  # times as long a launch may take that needs no memory for the weight as numbers
_LAUNCH = 4.0  # microseconds from a launch until its first product, without programmatic dependent launch


def predict(spec: MatmulSpec, tokens: int, s: PrefillMmaSchedule, target: Target) -> float:
    """About how many microseconds a launch for so many tokens takes."""
    return predict_tiles(PersistentPlan(spec, s, MMA), tokens, decoding(spec), target)


def decoding(spec: MatmulSpec) -> float:
    """Instructions of a warp for a fragment of weights, besides its products."""
    return _DECODE[spec.dtype.kind]


def predict_tiles(plan: PersistentPlan, tokens: int, beside: float, target: Target) -> float:
    """The same for a plan. beside: instructions of a warp for a fragment of weights, besides its products."""
    return time_of_tiles(plan, tokens, clocks_of_tile(plan, beside, target), target)


def clocks_of_tile(plan: PersistentPlan, beside: float, target: Target) -> float:
    """Clocks of a tile, whatever the tokens of a launch."""
    s, of_products = plan.schedule, _clocks_of_products(plan, beside, target.rates)
    panel = s.panel_k // plan.spec.x.mma_k * of_products + _PER_PANEL
    return plan.tiles.rounds * plan.round.panels * panel + _END + _END_PER_TOKEN * s.tokens


def least_time_of_tiles(plan: PersistentPlan, tokens: int, beside: float, most_k: int, target: Target) -> float:
    """Microseconds that a launch is predicted to take at least, with panels of up to `most_k` columns."""
    return time_of_tiles(plan, tokens, least_clocks_of_tile(plan, beside, most_k, target), target)


def least_clocks_of_tile(plan: PersistentPlan, beside: float, most_k: int, target: Target) -> float:
    """Clocks of a tile at least, with panels of up to `most_k` columns."""
    of_column = _clocks_of_products(plan, beside, target.rates) / plan.spec.x.mma_k + _PER_PANEL / most_k
    return (plan.spec.packing.padded_k * of_column + _END + _END_PER_TOKEN * plan.schedule.tokens) * SURE


def time_of_tiles(plan: PersistentPlan, tokens: int, tile: float, target: Target) -> float:
    """Microseconds of a launch whose tiles take so many clocks each."""
    rates, tiles = target.rates, plan.tiles.count(tokens)
    waves = -(-tiles // target.multiprocessors)
    return _LAUNCH + max(waves * tile / rates.clock, plan.spec.bytes / rates.memory)


def _clocks_of_products(plan: PersistentPlan, beside: float, rates: Rates) -> float:
    """Clocks of a multiprocessor for a tile and the columns of one mma.sync, 32 bytes of x: the most of what four units
    take, and a part of the rest. Numbers of half as many bits are multiplied at twice the rate."""
    s, x, per_scheduler = plan.schedule, plan.spec.x, WARPS // _SCHEDULERS
    row_blocks = WARPS // s.warps[0]
    products = row_blocks * s.warp_tokens / 8  # of a warp
    tensor = per_scheduler * products * _PRODUCT / (rates.mma * _SUSTAINED / _SCHEDULERS)
    issue = per_scheduler * (products + row_blocks * beside + s.warp_tokens / 16 + _OTHERS)
    shared = WARPS * s.warp_tokens * x.mma_k * x.bytes / _SHARED
    cache = x.mma_k * (s.tokens * x.bytes + ROWS_OF_TILE * plan.spec.packing.bits / 8) / _CACHE
    units = tensor, issue, shared, cache
    return max(units) + _BESIDE * (sum(units) - max(units))


def longest_worthwhile(spec: MatmulSpec, tokens: int, target: Target) -> float:
    """Microseconds below which a launch is worth its time: it may take a tenth longer than to write the weight out for
    the vendor's matmul, as it needs no memory for that."""
    return _NO_TEMPORARY * predict_vendor(spec, tokens, target)


def predict_vendor(spec: MatmulSpec, tokens: int, target: Target) -> float:
    """About how many microseconds it takes to write the weight out and to multiply it by the vendor's library, whose
    tiles come in waves as well."""
    rates, dense = target.rates, spec.n * spec.k * spec.x.bytes
    reach = rates.memory * (_CACHED if dense < rates.cache / 2 else 1.0)
    out = spec.bytes / rates.memory + dense / reach
    row_tiles, of_tile = -(-spec.n // ROWS_OF_TILE), ROWS_OF_TILE * spec.k / (rates.vendor * _SUSTAINED * rates.clock)
    waves = {tile: -(-row_tiles * -(-tokens // tile) // target.multiprocessors) for tile in (64, 96, 128, 192, 256)}
    products = min(of_tile * tile * count for tile, count in waves.items())
    return 2 * _LAUNCH + out + max(products, dense / reach)
