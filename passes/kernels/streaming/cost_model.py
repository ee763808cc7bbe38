"""About how long a schedule takes: to choose one where none was measured, and to put candidates for tuning in order.

A roofline with three bounds: the weight from memory, slower where too few bytes are in flight; the weight and x,
which every block reads for itself, through the L2 cache; and decoding, fragments and mma, slower where there are few
warps. On top come the rounds of the pipeline, the start and end of a block, multiprocessors that the last blocks leave
idle or half full, those that blocks of the next kernel crowding, and sums over splits.

Constants are those of a target (`DecodeCosts`). Times are only as right as comparing needs.
"""

from __future__ import annotations

import math

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.costs import DecodeCosts, EngineCosts
from lowbit.passes.kernels.decode.schedule import Schedule
from lowbit.passes.kernels.streaming.legality import shared_room
from lowbit.passes.kernels.streaming.plan import KernelPlan, known_plan
from lowbit.passes.kernels.streaming.stage_plans import padded
from lowbit.passes.target import Target

_LEAST_WITH_OUTLIERS = 8  # tokens: products with outliers of one take as long


def predict(spec: MatmulSpec, token_tile: int, s: Schedule, target: Target) -> float:
    """About how many microseconds a call takes, inf where there is no room for a block: good for comparing schedules,
    not for more."""
    plan = known_plan(spec, s)
    fitting = blocks_per_sm(plan, target)
    if not fitting:
        return math.inf
    launch = _Launch(plan, token_tile, target, fitting)
    factor = correction(spec, token_tile, s.wgmma, s.cluster, target.costs.decode)
    factor *= target.costs.decode.preloaded if s.preload_weights and token_tile > 1 else 1.0
    return (launch.work() + launch.ends()) * factor + launch.outliers()


def bounds(spec: MatmulSpec, token_tile: int, s: Schedule, target: Target) -> dict[str, float]:
    """Microseconds that each part takes whose longest one the prediction begins with."""
    plan = known_plan(spec, s)
    launch = _Launch(plan, token_tile, target, max(1, blocks_per_sm(plan, target)))
    return {
        "device memory": launch.memory(),
        "L2 cache": launch.cache(),
        "decoding and products": launch.arithmetic(),
    }


def correction(spec: MatmulSpec, token_tile: int, wgmma: bool, cluster: int, costs: DecodeCosts) -> float:
    """A factor for more than 64 tokens, with which times are comparable to those of the prefill kernels."""
    if token_tile <= 64 or not wgmma:
        return 1.0
    return costs.wide_bytes if spec.compute else costs.wide if cluster <= 2 else 1.0


def costs_of(target: Target, wgmma: bool, integer_mma: bool) -> EngineCosts:
    """Returns the constants of kernels with an engine."""
    costs = target.costs.decode
    return costs.wgmma if wgmma else costs.integer if integer_mma else costs.mma


class _Launch:
    """The predicted time of a launch, part by part, in microseconds. Blocks that run at the same time are a wave."""

    def __init__(self, plan: KernelPlan, token_tile: int, target: Target, fitting: int) -> None:
        """fitting: blocks that a multiprocessor has room for."""
        self.token_tile, self.fitting = token_tile, fitting
        self.spec, self.schedule, self.steps = spec, s, steps = plan.spec, plan.schedule, plan.steps
        self.costs, self.common = costs_of(target, s.wgmma, s.integer_mma), target.costs.decode
        self.engine, self.processors = plan.engine.clocks(self.costs, self.common), target.multiprocessors
        self.waves = steps.tiles * s.split_k / (self.processors * (self.common.reach if s.cluster > 2 else 1.0))
        self.side_by_side = min(fitting, self.waves)
        self.x = steps.tiles * token_tile * spec.k * spec.x.bytes / self.costs.l2

    def work(self) -> float:
        """The time from the first round of the first block to the last round of the last one."""
        s, steps, costs, waves, fitting = self.schedule, self.steps, self.costs, self.waves, self.fitting
        whole_waves = math.ceil(waves)
        work = max(self.memory(), self.cache(), self.arithmetic())
        work *= steps.rounds * s.warps_k * s.split_k / steps.count  # steps beyond the last
        if waves > 1:
            turns = math.ceil(waves / fitting) * fitting / max(waves, fitting)
            work *= (1 + costs.idle * (whole_waves / waves - 1)) * (1 + costs.tail * (turns - 1))
        work += costs.round * steps.rounds * waves / self.side_by_side
        # Blocks of the next kernel that start early crowd some multiprocessors, where more fit than are needed.
        return work * (1 + costs.crowding * (min(2.0, fitting / whole_waves) - 1 if fitting > waves else 0.0))

    def memory(self) -> float:
        """The weight from device memory, the slower the fewer bytes are on their way."""
        s, costs, rounds = self.schedule, self.costs, self.steps.rounds
        ahead = rounds if s.preload_weights else min(rounds, max(s.num_stages - 1, 0.5))
        in_flight = self.side_by_side * s.rows * s.warps_k * s.step_k * self.spec.packing.bits / 8 * ahead
        memory = self.spec.bytes / costs.memory * math.hypot(1.0, costs.in_flight / in_flight)
        return memory + (costs.x * self.x if self.token_tile <= 32 else 0.0)

    def cache(self) -> float:
        """The weight, and x once for every block, from the L2 cache."""
        return self.spec.bytes / self.costs.l2 + self.x

    def arithmetic(self) -> float:
        """Decoding and products, the slower the fewer warps hide each other's waiting."""
        s, spec, engine = self.schedule, self.spec, self.engine
        arithmetic = spec.n * spec.k / 256 / self.processors * engine.total / self.common.clock / min(1.0, self.waves)
        arithmetic *= math.hypot(1.0, engine.warps / (max(1.0, self.side_by_side) * s.threads / 32))
        if self.fitting == 1 and self.waves > 1:
            arithmetic *= engine.alone
        if s.warps_n > 1 and self.token_tile > 1:
            arithmetic *= self.costs.barrier * (self.costs.per_warp if s.refill == "per_warp" else 1.0)
        return arithmetic

    def outliers(self) -> float:
        """The time of products with one outlier in a hundred weights, which are many times those of codes."""
        spec, common = self.spec, self.common
        clocks = common.outlier * max(_LEAST_WITH_OUTLIERS, self.schedule.tokens) * spec.outliers
        return spec.n * spec.k / 100 / self.processors * clocks / common.clock

    def ends(self) -> float:
        """The time of blocks before their first round and after the last; splits add up their sums."""
        s, costs = self.schedule, self.costs
        ends = costs.block * max(1.0, self.waves / self.side_by_side) + self.engine.start
        if s.split_k == 1:
            return ends
        sums = 2 * self.steps.tiles * s.split_k * s.rows * s.columns * 4 / costs.l2
        return ends + sums + (costs.split if s.cluster == 1 else costs.cluster * math.log2(s.cluster))


def spills(plan: KernelPlan, target: Target) -> bool:
    """Whether a block has fewer registers than its threads need."""
    needed = plan.engine.registers - plan.engine.spare_registers
    return needed > target.max_registers_per_thread or needed * plan.schedule.threads > target.registers_per_sm


def blocks_per_sm(plan: KernelPlan, target: Target) -> int:
    """Blocks that a multiprocessor holds at a time, about; 0 if none has room."""
    s = plan.schedule
    given = 8 * (target.registers_per_sm // (8 * s.threads))  # in eights, as registers are handed out
    used = min(target.max_registers_per_thread, padded(plan.engine.registers, 8), given)
    most = s.max_blocks_per_sm
    by_registers = target.registers_per_sm // (s.threads * used)
    if most and plan.engine.takes_registers_left:
        by_registers = most
    by_threads = min(target.max_threads_per_sm // s.threads, target.max_blocks_per_sm)
    fitting = min(shared_room(plan, target), by_threads, by_registers)
    return min(fitting, most or fitting)
