"""About how long a prefill schedule takes: a tile's time is that of its panels and its end, and tiles come in waves.

The constants are fitted to an H200 (2026-11, u4 in groups of 128, 4096 x 4096 and 8192 x 8192), rested: they are right
within 5 % there. What a panel takes is products, and a part that no other work hides.
"""

from __future__ import annotations

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.prefill.legality import exchanged_bytes
from lowbit.passes.kernels.prefill.plan import PrefillPlan
from lowbit.passes.kernels.prefill.schedule import PrefillSchedule
from lowbit.passes.target import Target

_LAUNCH = 2.5  # microseconds of a launch, until the first panel is there
_PER_TOKEN = 0.0023  # of a token of a tile and 64 columns,
_PER_COLUMNS = 0.062  # of 64 columns whatever the tokens,
_PER_PANEL = 0.032  # and of a panel
_DECODING = {"uint": 0.18, "int": 0.18, "float": 0.26, "table": 0.26}  # of 64 columns at least, however few tokens
_END, _END_PER_TOKEN = 0.5, 0.004  # of the end of a tile
_MULTICAST = 0.975  # times as long, where blocks of a cluster share x and are in the middle of their work
_EXCHANGE, _SENT = 0.5, 25e3  # estimated, where blocks split k: until sums are there, and bytes per microsecond
_REACH = 0.9  # of the multiprocessors take part in clusters of four, as in the decode kernels
_UNTRIED = 1.05  # times as long, where k is split
_MEMORY = 4.5e6  # bytes per microsecond


def predict(spec: MatmulSpec, tokens: int, s: PrefillSchedule, target: Target) -> float:
    """About how many microseconds a launch for so many tokens takes: for comparing schedules."""
    plan = PrefillPlan(spec, s)
    waves = -(-plan.tiles(tokens) // max(1, clusters(s, target)))
    columns = max(_PER_COLUMNS + _PER_TOKEN * s.tokens, _DECODING[spec.dtype.kind])
    panel = s.panel_k / 64 * columns + _PER_PANEL
    products = plan.rounds * plan.panels * panel
    if s.cluster > 1 and waves > 1:
        products *= _MULTICAST
    tile = products + _END + _END_PER_TOKEN * plan.share + exchange(plan)
    return max(_LAUNCH * starts(s, target) + waves * tile, spec.bytes / _MEMORY) * untried(s)


def untried(s: PrefillSchedule) -> float:
    """A factor with which what has not been timed is chosen only if it is predicted to gain five percent."""
    return _UNTRIED if s.split_k > 1 else 1.0


def exchange(plan: PrefillPlan) -> float:
    """Microseconds of a tile until the sums of blocks that split k are added up."""
    return _EXCHANGE + exchanged_bytes(plan) / _SENT if plan.schedule.split_k > 1 else 0.0


def clusters(s: PrefillSchedule, target: Target) -> int:
    """How many clusters, or single blocks, run at a time."""
    reached = target.multiprocessors * (_REACH if s.cluster_blocks > 2 else 1.0)
    return int(reached / s.cluster_blocks)


def starts(s: PrefillSchedule, target: Target) -> int:
    """How often blocks start: twice where some clusters find room when others have ended, if only to see that there is
    nothing left to do."""
    return 1 if clusters(s, target) == target.multiprocessors // s.cluster_blocks else 2


def at_once(plan: PrefillPlan, tokens: int, target: Target) -> bool:
    """Whether all tiles are computed at the same time: what splitting k is for."""
    return plan.tiles(tokens) <= clusters(plan.schedule, target)
