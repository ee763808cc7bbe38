"""About how long a schedule takes: to choose one where none was measured, and to put candidates for tuning in order.

A roofline with three bounds: the weight from memory, slower where too few bytes are in flight; the weight and x,
which every block reads for itself, through the L2 cache; and decoding, fragments and mma, slower where there are few
warps. On top come the rounds of the pipeline, the start and end of a block, multiprocessors that the last blocks leave
idle or half full, those that blocks of the next kernel crowding, and sums over splits.

Constants are those of a target (`DecodeCosts`). Times are only as right as comparing needs.
"""

from __future__ import annotations

import math

from lowbit.dialect.formats.recipes import OFFSET_BITS
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.costs import DecodeCosts, EngineCosts
from lowbit.passes.kernels.decode.schedule import Schedule
from lowbit.passes.kernels.streaming.legality import shared_room
from lowbit.passes.kernels.streaming.plan import COLUMNS, KernelPlan
from lowbit.passes.target import Target


def predict(spec: MatmulSpec, token_tile: int, s: Schedule, target: Target) -> float:
    """About how many microseconds a call takes, inf where there is no room for a block: good for comparing schedules,
    not for more."""
    fitting = blocks_per_sm(spec, s, target)
    if not fitting:
        return math.inf
    launch = _Launch(spec, token_tile, s, target, fitting)
    return (launch.work() + launch.ends()) * correction(spec, token_tile, s.wgmma, s.cluster, target.costs.decode)


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

    def __init__(self, spec: MatmulSpec, token_tile: int, s: Schedule, target: Target, fitting: int) -> None:
        """fitting: blocks that a multiprocessor has room for."""
        self.spec, self.token_tile, self.schedule, self.fitting = spec, token_tile, s, fitting
        self.costs, self.common = costs_of(target, s.wgmma, s.integer_mma), target.costs.decode
        self.plan, self.processors = KernelPlan(spec, s), target.multiprocessors
        self.waves = self.plan.tiles * s.split_k / (self.processors * (self.common.reach if s.cluster > 2 else 1.0))
        self.side_by_side = min(fitting, self.waves)
        self.in_place = self.plan.sums_in_place and bool(self.plan.step_factors)
        self.x = self.plan.tiles * token_tile * spec.k * spec.x.bytes / self.costs.l2

    def work(self) -> float:
        """The time from the first round of the first block to the last round of the last one."""
        s, plan, costs, waves, fitting = self.schedule, self.plan, self.costs, self.waves, self.fitting
        whole_waves = math.ceil(waves)
        work = max(self.memory(), self.cache(), self.arithmetic())
        work *= plan.rounds * s.warps_k * s.split_k / plan.steps  # steps beyond the last
        if waves > 1:
            turns = math.ceil(waves / fitting) * fitting / max(waves, fitting)
            work *= (1 + costs.idle * (whole_waves / waves - 1)) * (1 + costs.tail * (turns - 1))
        work += costs.round * plan.rounds * waves / self.side_by_side
        # Blocks of the next kernel that start early crowd some multiprocessors, where more fit than are needed.
        return work * (1 + costs.crowding * (min(2.0, fitting / whole_waves) - 1 if fitting > waves else 0.0))

    def memory(self) -> float:
        """The weight from device memory, the slower the fewer bytes are on their way."""
        s, costs, rounds = self.schedule, self.costs, self.plan.rounds
        ahead = rounds if s.preload_weights else min(rounds, max(s.num_stages - 1, 0.5))
        in_flight = self.side_by_side * s.rows * s.warps_k * s.step_k * self.spec.packing.bits / 8 * ahead
        memory = self.spec.bytes / costs.memory * math.hypot(1.0, costs.in_flight / in_flight)
        return memory + (costs.x * self.x if self.token_tile <= 32 else 0.0)

    def cache(self) -> float:
        """The weight, and x once for every block, from the L2 cache."""
        return self.spec.bytes / self.costs.l2 + self.x

    def arithmetic(self) -> float:
        """Decoding and products, the slower the fewer warps hide each other's waiting."""
        s, spec, costs = self.schedule, self.spec, self.costs
        warps = self.common.scaled_warps if self.in_place else costs.warps
        arithmetic = spec.n * spec.k / 256 / self.processors * self.clocks() / self.common.clock / min(1.0, self.waves)
        arithmetic *= math.hypot(1.0, warps / (max(1.0, self.side_by_side) * s.threads / 32))
        if s.spread_k and self.fitting == 1 and self.waves > 1:
            arithmetic *= self.common.lone
        if s.warps_n > 1 and self.token_tile > 1:
            arithmetic *= costs.barrier * (costs.per_warp if s.refill == "per_warp" else 1.0)
        return arithmetic

    def clocks(self) -> float:
        """Per mma's worth of weights: tensor core (two clocks per mma), shared memory (128 bytes a clock) and integer
        units, which overlap in part."""
        s, mma = self.schedule, self.product_clocks()
        fragments = 0.0 if s.wgmma else mma / (4 * s.row_blocks)  # wgmma reads x by itself
        pipes = mma, self.spec.packing.bits / 2 + fragments, self.decode_clocks()
        return (max(pipes) + sum(pipes)) / 2

    def product_clocks(self) -> float:
        """Clocks of the tensor core."""
        s, spec = self.schedule, self.spec
        mma = s.mma_columns / 4
        if s.spread_k:
            mma *= 1 + self.plan.sums_x / (COLUMNS * s.row_blocks)  # one more for eight blocks of k, and all row blocks
        elif not s.wgmma and (
            spec.zeros in ("float", "offset") or (spec.zeros == "int" and spec.packing.bits <= OFFSET_BITS)
        ):
            mma *= 1 + 1 / s.row_blocks  # sums of x: one more for all row blocks
        return mma * (self.costs.tensor / (2 if spec.compute else 1))  # 8-bit types are multiplied at twice the pace

    def decode_clocks(self) -> float:
        """Clocks of the integer units: decoding, splitting x into limbs, and scaling."""
        s, spec, costs = self.schedule, self.spec, self.costs
        if self.in_place:
            return self.common.scaled
        decode = decode_clocks(self.plan, costs) + (self.common.split_limbs / s.row_blocks if s.integer_mma else 0.0)
        if spec.group_size:  # sums or, where that is less, weights are scaled
            scaled = 1.0 if self.plan.rounds_scales else s.mma_columns / min(spec.group_size, s.step_k)
            scaled /= COLUMNS if s.spread_k else 1
            decode += costs.scale * 2 * scaled
        return decode

    def ends(self) -> float:
        """The time of blocks before their first round and after the last; splits add up their sums."""
        s, costs = self.schedule, self.costs
        start = self.common.spread_start if s.spread_k else 0.0
        ends = costs.block * max(1.0, self.waves / self.side_by_side) + start
        if s.split_k == 1:
            return ends
        sums = 2 * self.plan.tiles * s.split_k * s.rows * s.columns * 4 / costs.l2
        return ends + sums + (costs.split if s.cluster == 1 else costs.cluster * math.log2(s.cluster))


def spills(spec: MatmulSpec, s: Schedule, target: Target) -> bool:
    """Whether a block has fewer registers than its threads need."""
    needed = registers(spec, s) - _late_codes(KernelPlan(spec, s))
    return needed > target.max_registers_per_thread or needed * s.threads > target.registers_per_sm


def registers(spec: MatmulSpec, s: Schedule) -> int:
    """Returns about how many registers a thread takes."""
    plan = KernelPlan(spec, s)
    if s.wgmma:
        if plan.sums_in_place and plan.step_factors:
            sums = s.tokens // 2 * s.row_blocks  # and those of outliers by steps, with what finds them
            return 84 + sums + (27 + sums if s.outliers_by_step else 0)
        sums = 1 if plan.sums_once else 2  # of all of k and, apart from them, of a group
        codes = plan.preloaded_words + 4 if s.preload_weights else _columns_of_codes(plan) // 4
        decoding = 38 if spec.dtype.kind == "float" else 30
        if plan.raw_codes:
            decoding = 24 if spec.packing.bits in (1, 2, 4) else 28
        return decoding + codes + s.tokens // 2 * sums * s.row_blocks
    if s.integer_mma:
        return 24 + s.step_k // 5 + 12 * s.row_blocks
    if s.spread_k:
        return 66 + 16 * s.row_blocks + (18 if plan.shares_blocks else 0)
    if s.preload_weights:
        return 42 + plan.preloaded_words + s.columns // 2 * s.row_blocks
    products = s.columns // 2 * s.row_blocks if spec.compute else 0  # beside the sums
    return 32 + (5 + 9 * s.columns // 8) * s.row_blocks + _scale_registers(spec, s) + products


def _columns_of_codes(plan: KernelPlan) -> int:
    """Returns how many columns of a step a thread holds codes of at a time, with wgmma: all of them where weights are
    scaled, those of a group or two where the sums of each are."""
    group, step = plan.spec.group_size, plan.schedule.step_k
    if not group or _holds_steps(plan):
        return step
    return min(step, max(128 if plan.sums_in_place else 64, group))


def _late_codes(plan: KernelPlan) -> int:
    """Returns the registers of codes that are loaded early only where there is room for them."""
    return max(0, plan.schedule.step_k - 128) // 4 if _holds_steps(plan) else 0


def _holds_steps(plan: KernelPlan) -> bool:
    """Whether no product is waited for before the step's last one, as its weights are scaled."""
    s = plan.schedule
    return s.wgmma and not s.preload_weights and plan.rounds_scales and not plan.sums_in_place


def _scale_registers(spec: MatmulSpec, s: Schedule) -> int:
    """Returns about how many registers a thread takes for the scales of a step's groups."""
    if not spec.group_size:
        return 0
    ahead = 14 if s.step_k >= 256 else 0
    return int((3 + 4 * s.step_k / spec.group_size + ahead) * (3 + s.row_blocks) / 4)


def blocks_per_sm(spec: MatmulSpec, s: Schedule, target: Target) -> int:
    """Blocks that a multiprocessor holds at a time, about; 0 if none has room."""
    threads = s.threads
    given = 8 * (target.registers_per_sm // (8 * threads))  # in eights, as registers are handed out
    used = min(target.max_registers_per_thread, -(-registers(spec, s) // 8) * 8, given)
    most = s.max_blocks_per_sm
    by_registers = most if most and s.spread_k else target.registers_per_sm // (threads * used)
    fitting = min(shared_room(spec, s, target), target.max_threads_per_sm // threads, by_registers)
    return min(fitting, most or fitting)


def decode_clocks(plan: KernelPlan, costs: EngineCosts) -> float:
    """Clocks of a multiprocessor to decode 256 codes."""
    spec = plan.spec
    if spec.dtype.kind == "table":
        return costs.decode_table
    factor = costs.decode_float if spec.dtype.kind == "float" else costs.decode_raw if plan.raw_codes else 1.0
    return costs.decode[spec.packing.bits - 1] * factor
