"""What the engines, the ways of a warp to multiply its step, demand and cost. No MLIR is needed.

| engine | multiplies | program |
|---|---|---|
| `MmaPlan` | codes decoded to x's type, by mma.sync | `passes.kernels.streaming.mma` |
| `SpreadPlan` | the same for one token, whose eight columns are blocks of k | `passes.kernels.streaming.spread` |
| `WgmmaPlan` | codes decoded to x's type, by wgmma, and bytes alike | `passes.kernels.streaming.wgmma` |
| `InPlacePlan` | the same with scaled weights, whose sums stay in place | `passes.kernels.streaming.wgmma` |
| `ByteMmaPlan` | codes as bytes, by mma.sync | `passes.kernels.streaming.eight_bit` |
| `LimbPlan` | codes as bytes, and one token in limbs of 8 bits | `passes.kernels.streaming.limbs` |

Registers are about those that the assembler takes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

from lowbit.dialect.errors import SpecError
from lowbit.dialect.formats.integer_limbs import LIMBS, PIECE, ROW, takes
from lowbit.dialect.formats.recipes import OFFSET_BITS
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.costs import DecodeCosts, EngineCosts
from lowbit.passes.kernels.decode.schedule import Schedule
from lowbit.passes.kernels.requirements import can_use_wgmma
from lowbit.passes.kernels.streaming.arithmetic import Arithmetic
from lowbit.passes.kernels.streaming.scaling import MOST_SCALED
from lowbit.passes.kernels.streaming.stage_plans import CodesPlan, ScalesPlan
from lowbit.passes.target import Target

COLUMNS = 8  # of a product of mma
SPREAD = COLUMNS * 16  # columns of k that `Schedule.spread_k` has in one accumulator
_WITH_SUMS_OF_BYTES = 3
"""How many times as long scaling takes if sums of x in 8 bits make up for zeros: a thread reads those of 32 columns,
four for a token and a group of 128, and adds them up. Instructions counted for 16 tokens."""


@dataclass(frozen=True)
class EngineClocks:
    """The clocks that a multiprocessor takes for 256 weights.

    products   of the tensor core
    reading    of shared memory, which brings 128 bytes a clock: codes, and x as fragments
    decoding   of the integer units: decoding, scaling, and bringing x into the form that is multiplied
    warps      on a multiprocessor that hide their latency
    alone      the factor of time where a multiprocessor has room for one block, and there are more
    start      microseconds until the first round, beyond those of every block
    """

    products: float
    reading: float
    decoding: float
    warps: float
    alone: float = 1.0
    start: float = 0.0

    @property
    def total(self) -> float:
        """All of them, as the units overlap."""
        return overlapped(self.products, self.reading, self.decoding)


def overlapped(*clocks: float) -> float:
    """Returns the clocks of units that overlap in part."""
    return (max(clocks) + sum(clocks)) / 2


@dataclass(frozen=True)
class EnginePlan(ABC):
    """The base of the engines' plans."""

    arithmetic: Arithmetic
    codes: CodesPlan
    scales: ScalesPlan

    @property
    def spec(self) -> MatmulSpec:
        return self.arithmetic.spec

    @property
    def schedule(self) -> Schedule:
        return self.arithmetic.schedule

    @abstractmethod
    def check(self, target: Target) -> None:
        """Raises SpecError where the engine does not fit a spec or a target."""

    @property
    @abstractmethod
    def registers(self) -> int:
        """Registers of a thread."""

    @property
    def of_chains(self) -> int:
        """Those of `registers` for sums of all chains but one."""
        s = self.schedule
        return s.mma_columns // 2 * s.row_blocks * (s.chains - 1)

    @property
    def spare_registers(self) -> int:
        """Those of `registers` with codes that are loaded early only where there is room for them."""
        return 0

    @property
    def takes_registers_left(self) -> bool:
        """Whether the compiler is told how many blocks a multiprocessor is to have, and takes what registers that
        leaves."""
        return False

    @property
    def shared_bytes(self) -> int:
        """Shared memory that the engine itself takes, beside the stages."""
        return 0

    @abstractmethod
    def clocks(self, costs: EngineCosts, common: DecodeCosts) -> EngineClocks:
        """Returns what the engine costs. costs: those of its instruction; common: those of all."""

    def _clocks(self, costs: EngineCosts, ones: float, scaled: float, split: float = 0.0) -> EngineClocks:
        """ones: products that add up x, as a part of those with weights; scaled: columns of sums that are scaled for a
        column of weights, or 1 where weights are; split: clocks to bring x into another form."""
        spec, s = self.spec, self.schedule
        products = s.mma_columns / 4 * (1 + ones)  # two clocks per mma
        products *= costs.tensor / (2 if spec.compute else 1)  # 8-bit types are multiplied at twice the pace
        fragments = 0.0 if s.wgmma else products / (4 * s.row_blocks)  # wgmma reads x by itself
        decoding = self.arithmetic.decode_clocks(costs) + split
        decoding += costs.scale * 2 * scaled if spec.group_size else 0.0
        return EngineClocks(products, spec.packing.bits / 2 + fragments, decoding, costs.warps)

    @property
    def _columns_of_sums(self) -> float:
        """Columns of sums for a column of weights, of a group, or of a step of it; 1 where weights are scaled."""
        s = self.schedule
        if self.arithmetic.scaling.rounds_scales:
            return 1.0
        of_chain = s.step_k // s.chains
        return s.mma_columns / min(self.spec.group_size or of_chain, of_chain)

    @property
    def _sums_beside(self) -> float:
        """Products that add up x for zeros, as a part of those with weights: one more for all row blocks of a warp, and
        none where weights are scaled."""
        if self.arithmetic.scaling.rounds_scales:
            return 0.0
        zeros, bits = self.spec.zeros, self.spec.packing.bits
        sums_x = zeros in ("float", "offset") or (zeros == "int" and bits <= OFFSET_BITS)
        return 1 / self.schedule.row_blocks if sums_x else 0.0


class MmaPlan(EnginePlan):
    """mma.sync of weights in x's type."""

    def check(self, target: Target) -> None:
        """Every target has mma.sync, and it takes every spec."""

    @property
    def registers(self) -> int:
        s = self.schedule
        if s.preload_weights:
            return 42 + self.codes.registers + self.of_chains + s.columns // 2 * s.row_blocks
        return 32 + (5 + 9 * s.columns // 8) * s.row_blocks + self.of_chains + self._scale_registers()

    def _scale_registers(self) -> int:
        """Returns the registers of the scales of a step's groups."""
        group, step = self.spec.group_size, self.schedule.step_k
        if not group:
            return 0
        ahead = 14 if step >= 256 else 0
        return int((3 + 4 * step / group + ahead) * (3 + self.schedule.row_blocks) / 4)

    def clocks(self, costs: EngineCosts, common: DecodeCosts) -> EngineClocks:
        return self._clocks(costs, self._sums_beside, self._columns_of_sums)


class ByteMmaPlan(MmaPlan):
    """mma.sync of bytes, whose products stand beside the sums."""

    @property
    def registers(self) -> int:
        return super().registers + self.schedule.columns // 2 * self.schedule.row_blocks


class SpreadPlan(EnginePlan):
    """mma.sync of one token that is spread over eight blocks of k: a lane has an eighth of the sums to scale."""

    def check(self, target: Target) -> None:
        if not can_spread(self.spec):
            given = f"{weight_in_words(self.spec)} needs spread_k=False"
            raise SpecError(f"schedule: spread_k=True is for groups of 16, 32 and 64; {given}")

    @property
    def registers(self) -> int:
        return 66 + 16 * self.schedule.row_blocks + (18 if self.scales.shares_second_level else 0)

    @property
    def takes_registers_left(self) -> bool:
        return True

    def clocks(self, costs: EngineCosts, common: DecodeCosts) -> EngineClocks:
        ones = self.arithmetic.sums_x / (COLUMNS * self.schedule.row_blocks)  # one for eight blocks, and all rows
        clocks = self._clocks(costs, ones, self._columns_of_sums / COLUMNS)
        return replace(clocks, alone=common.lone, start=common.spread_start)


class LimbPlan(EnginePlan):
    """mma.sync of integers, with one token in limbs."""

    def check(self, target: Target) -> None:
        spec, s = self.spec, self.schedule
        if s.step_k % PIECE:
            raise SpecError(f"schedule: step_k={s.step_k} must be a multiple of {PIECE} for decode_integer")
        if not has_integer_mma(spec):
            raise SpecError(
                f"schedule: decode_integer multiplies integers of 1, 2 or 4 bits in groups of multiples of {PIECE} "
                f"columns, without outliers; {spec.weight} in groups of {spec.group_size} needs a Schedule of the "
                "decode family"
            )

    @property
    def registers(self) -> int:
        return 24 + self.schedule.step_k // 5 + 12 * self.schedule.row_blocks

    @property
    def shared_bytes(self) -> int:
        return self.schedule.warps_k * (self.schedule.step_k // PIECE) * LIMBS * 4 * ROW * 4

    def clocks(self, costs: EngineCosts, common: DecodeCosts) -> EngineClocks:
        split = common.split_limbs / self.schedule.row_blocks
        return self._clocks(costs, self._sums_beside, self._columns_of_sums, split)


class WgmmaPlan(EnginePlan):
    """wgmma, which reads x by itself."""

    def check(self, target: Target) -> None:
        spec, s = self.spec, self.schedule
        if not target.has_wgmma:
            raise SpecError(f"schedule: wgmma needs sm_90a, the target is {target}; take wgmma=False")
        if s.step_k % spec.x.per_panel:
            raise SpecError(f"schedule: step_k={s.step_k} must be a multiple of {spec.x.per_panel} for wgmma")
        if s.tokens > MOST_SCALED and not self.arithmetic.sums_once:
            raise SpecError(
                f"schedule: tokens={s.tokens} leaves registers for one set of sums, and {weight_in_words(spec)} needs "
                f"two; take tokens of at most {MOST_SCALED}"
            )
        if not can_use_wgmma(spec, target):
            raise SpecError(
                f"schedule: wgmma multiplies {spec.act} by {spec.act} in whole 16-byte pieces of x; {spec.weight} with "
                f"k={spec.k} and groups of {spec.group_size} needs wgmma=False"
            )
        if s.overlap_groups and (not self.arithmetic.steps.groups or self.arithmetic.scaling.rounds_scales):
            given = f"{weight_in_words(spec)} needs overlap_groups=False"
            raise SpecError(f"schedule: overlap_groups=True is for sums that are scaled group by group; {given}")

    @property
    def registers(self) -> int:
        s, bits = self.schedule, self.spec.packing.bits
        sums = 1 if self.arithmetic.sums_once else 2  # of all of k and, apart from them, of a group
        codes = self.codes.registers + 4 if s.preload_weights else self._columns_of_codes // 4
        decoding = 38 if self.spec.dtype.kind == "float" else 30
        if self.arithmetic.raw_codes:
            decoding = 24 if bits in (1, 2, 4) else 28
        return decoding + codes + s.tokens // 2 * sums * s.row_blocks + self.of_chains

    @property
    def spare_registers(self) -> int:
        return max(0, self.schedule.step_k - 128) // 4 if self._holds_steps else 0

    @property
    def _columns_of_codes(self) -> int:
        """Columns of a step that a thread holds codes of at a time: all of them where weights are scaled, those of a
        group or two where the sums of each are."""
        group, step = self.spec.group_size, self.schedule.step_k
        if not group or self._holds_steps:
            return step
        return min(step, max(128 if self.arithmetic.sums_in_place else 64, group))

    @property
    def _holds_steps(self) -> bool:
        """Whether no product is waited for before the step's last one, as its weights are scaled."""
        scaled = self.arithmetic.scaling.rounds_scales and not self.arithmetic.sums_in_place
        return scaled and not self.schedule.preload_weights

    def clocks(self, costs: EngineCosts, common: DecodeCosts) -> EngineClocks:
        scaled = self._columns_of_sums
        if not self.arithmetic.zeros_in_sums:
            return self._clocks(costs, 0.0, scaled)
        if self.spec.compute:
            return self._clocks(costs, 0.0, _WITH_SUMS_OF_BYTES * scaled)
        return self._clocks(costs, self._sums_beside, 2 * scaled)  # products of ones, and their sums by offsets


class InPlacePlan(EnginePlan):
    """wgmma of weights that scales of a step have scaled, with sums that stay in place."""

    def check(self, target: Target) -> None:
        WgmmaPlan(self.arithmetic, self.codes, self.scales).check(target)

    @property
    def registers(self) -> int:
        s = self.schedule
        sums = s.tokens // 2 * s.row_blocks  # and those of outliers by steps, with what finds them
        return 84 + sums + (27 + sums if s.outliers_by_step else 0)

    def clocks(self, costs: EngineCosts, common: DecodeCosts) -> EngineClocks:
        return replace(self._clocks(costs, 0.0, 1.0), decoding=common.scaled, warps=common.scaled_warps)


def engine_type(schedule: Schedule, arithmetic: Arithmetic) -> type[EnginePlan]:
    """Returns the engine that a schedule asks for."""
    if schedule.wgmma:
        return InPlacePlan if arithmetic.sums_in_place and arithmetic.step_scales else WgmmaPlan
    if schedule.integer_mma:
        return LimbPlan
    if schedule.spread_k:
        return SpreadPlan
    return ByteMmaPlan if arithmetic.spec.compute else MmaPlan


def has_integer_mma(spec: MatmulSpec) -> bool:
    """Whether one token can be multiplied in integers: codes must be some, and groups whole pieces of 128 columns."""
    group = spec.packing.padded_group
    return takes(spec.dtype) and (group is None or group % PIECE == 0) and not spec.outliers


def can_spread(spec: MatmulSpec) -> bool:
    """Whether one token can be spread over the columns of a product, so that a lane has groups of its own."""
    group = spec.packing.padded_group
    return group is not None and SPREAD // 2 % group == 0 and spec.compute is None


def weight_in_words(spec: MatmulSpec) -> str:
    """Names a weight in messages. Their spec may be one that was derived from the user's."""
    groups = "a scale per row" if spec.group_size is None else f"groups of {spec.group_size}"
    return f"{spec.weight} with {groups}"
