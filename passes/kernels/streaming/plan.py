"""`KernelPlan`: what follows from a spec and a schedule, in numbers. The decode kernel is built from it, and schedules
are chosen by it; so it needs no MLIR.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from lowbit.dialect.formats.outliers import ENTRIES, LANE_SUMS, lines_at_once, scratch_words
from lowbit.dialect.formats.packing import ROWS
from lowbit.dialect.formats.raw_codes import can_be_raw, can_defer_offset, zero_code
from lowbit.dialect.formats.recipes import OFFSET_BITS, compute_element, exponent
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.decode.schedule import Schedule
from lowbit.passes.kernels.requirements import fits_async_x
from lowbit.passes.launch import COUNTERS

COLUMNS = 8  # of a product of mma
SPREAD = COLUMNS * 16  # columns of k that `Schedule.spread_k` has in one accumulator
IN_PLACE, MOST_IN_PLACE = 32, 64  # columns of a group and tokens up to which sums of scaled weights stay in place
MOST_SCALED = 128  # tokens for which a thread has registers for a group's sums beside all of k's


@dataclass(frozen=True)
class KernelPlan:
    """Numbers that follow from a spec and a schedule."""

    spec: MatmulSpec
    schedule: Schedule

    @property
    def steps(self) -> int:
        """Steps of step_k columns in the packed weight."""
        return -(-self.spec.packing.padded_k // self.schedule.step_k)

    @property
    def rounds(self) -> int:
        """Rounds of one block."""
        return -(-self.steps // (self.schedule.warps_k * self.schedule.split_k))

    @property
    def covers_exactly(self) -> bool:
        """Whether no warp ever meets a step beyond the last."""
        return self.rounds * self.schedule.warps_k * self.schedule.split_k == self.steps

    @property
    def preloaded_words(self) -> int:
        """Registers of codes in a thread that holds all of its weight at once."""
        s, packing = self.schedule, self.spec.packing
        return self.rounds * s.row_blocks * (s.step_k // packing.chunk) * packing.units * 4

    @property
    def row_blocks(self) -> int:
        """Row blocks of 16 rows per thread block."""
        return self.schedule.row_blocks * self.schedule.warps_n

    @property
    def tiles(self) -> int:
        """Blocks side by side along n."""
        return -(-self.spec.packing.row_blocks // self.row_blocks)

    @property
    def launched_tiles(self) -> int:
        """Tiles that are launched, with the empty ones that fill up the grid."""
        return max(self.tiles, -(-self.schedule.min_blocks // self.schedule.split_k))

    @property
    def staged_lines(self) -> int:
        """Lines of outliers in a warp's share of a row block for which shared memory has room, at most 16."""
        return min(16, 4 * math.ceil(self._usual_lines / 4))

    @property
    def loaded_lines(self) -> int:
        """The same for one token, whose lines are loaded to registers: at most 32 of all row blocks of a warp."""
        return min(math.ceil(self._usual_lines), max(1, 32 // self.schedule.row_blocks))

    @property
    def _usual_lines(self) -> float:
        """Lines of a warp's share of a row block: a quarter more than one outlier in a hundred weights takes."""
        return ROWS * self.spec.k / 80 / ENTRIES / (self.schedule.warps_k * self.schedule.split_k)

    @property
    def spreads_outliers(self) -> bool:
        """Whether products with outliers are spread over the eight columns that one token has."""
        return self.schedule.tokens == 1

    @property
    def indexed_lines(self) -> int:
        """Lines of a row block of which a lane has the first column, a lane each: at most four times 32."""
        lines = self._usual_lines * self.schedule.warps_k * self.schedule.split_k
        return min(4, math.ceil(lines / 32))

    @property
    def step_lines(self) -> int:
        """Lines of a row block and step that are copied before they are needed: one more than outliers fill, at least,
        and as many as a warp copies at a time."""
        return 4 * math.ceil((math.ceil(ROWS * self.schedule.step_k / 80 / ENTRIES) + 1) / 4)

    @property
    def sums_in_stage(self) -> bool:
        """Whether the buffer of codes has room for the sums of lanes for outliers of one token: a warp has them where
        it copies its own codes later."""
        s, packing = self.schedule, self.spec.packing
        codes = s.row_blocks * (s.step_k // packing.chunk) * packing.units * 512
        return not s.preload_weights and self.rounds >= s.num_stages and codes >= LANE_SUMS

    @property
    def outlier_scratch(self) -> tuple[str, tuple[int, ...]]:
        """Element and shape of the shared memory that the warps need for products with outliers."""
        s = self.schedule
        warps = s.threads // 32
        if self.spreads_outliers:
            return "f32", (warps, ROWS, 32)
        return "i32", (warps, lines_at_once(s.tokens), scratch_words(self.spec.act, s.tokens))

    @property
    def inputs(self) -> tuple[str, ...]:
        """The parameters of the kernel that an activation has."""
        return ("x", "x_scales", "x_sums") if self.spec.compute else ("x",)

    @property
    def reads_sums(self) -> bool:
        """Whether the kernel reads sums of x: those of an activation of 8 bits, for zeros and signed codes."""
        return self.spec.compute is not None and (self.spec.zeros != "none" or self.spec.dtype.kind == "int")

    @property
    def groups(self) -> int:
        """Groups in a step, 1 if a group is longer; 0 for one scale per row."""
        group = self.spec.packing.padded_group
        return 0 if group is None else max(1, self.schedule.step_k // group)

    @property
    def blocks(self) -> int:
        """Blocks of groups (`Bilevel`) in a step, 1 if a block is longer."""
        bilevel = self.spec.bilevel
        return max(1, self.schedule.step_k // bilevel.columns(self.spec.packing)) if bilevel else 0

    @property
    def steps_per_block(self) -> int:
        """Steps that share a block of groups, at least 1."""
        bilevel = self.spec.bilevel
        return max(1, bilevel.columns(self.spec.packing) // self.schedule.step_k) if bilevel else 1

    @property
    def defers_offset(self) -> bool:
        """Whether decoded codes keep the offset of their magic number: one mma per fragment of x corrects it, for all
        rows, in place of a subtraction per pair of weights."""
        t, s = self.spec.dtype, self.schedule
        if self.spec.compute:
            return False
        able = can_defer_offset(t, compute_element(t, self.spec.act))
        if s.spread_k:  # two or three mma for eight fragments of x
            return able and not can_use_raw_codes(self.spec)
        return able and t.bits <= OFFSET_BITS and s.row_blocks > 1 and not s.wgmma and not s.raw_codes

    @property
    def raw_codes(self) -> bool:
        """Whether codes are multiplied as they are stored, with no subtraction: if there is nothing to subtract, if
        sums of x are needed anyway (float zeros, offsets), or if the schedule says so."""
        s, spec = self.schedule, self.spec
        if spec.compute:
            return True
        if s.spread_k:  # one mma adds up x of eight blocks
            return can_use_raw_codes(spec)
        if s.raw_codes or s.integer_mma or not can_use_raw_codes(spec) or self.defers_offset or self.rounds_scales:
            return s.raw_codes
        if spec.zeros in ("float", "offset"):
            return not self.rounds_zeros
        return spec.zeros == "none" and spec.dtype.kind == "uint"

    @property
    def stored_offset(self) -> float:
        """By how much the multiplied codes are too large: signed codes are in offset binary."""
        return zero_code(self.spec.dtype) if self.raw_codes or self.schedule.integer_mma else 0.0

    @property
    def zeros_in_decode(self) -> bool:
        """Whether zeros are subtracted as codes are decoded."""
        as_stored = self.raw_codes or self.schedule.integer_mma
        return self.spec.zeros == "int" and not self.defers_offset and not as_stored

    @property
    def zeros_in_sums(self) -> bool:
        """Whether zeros and offsets, that of codes included, are made up for by sums of x."""
        elsewhere = self.zeros_in_decode or self.rounds_zeros
        return (self.spec.zeros != "none" or self.stored_offset > 0) and not elsewhere

    @property
    def sums_x(self) -> bool:
        """Whether x is added up, for zeros and offsets, or for those of codes."""
        return self.zeros_in_sums or self.defers_offset

    @property
    def computes_scales(self) -> bool:
        """Whether scales take some computing: codes, and bytes of e4m3."""
        return self.spec.bilevel is not None or self.spec.scale == "e4m3"

    @property
    def step_factors(self) -> tuple[str, ...]:
        """The numbers that a warp computes for all groups of a step before it multiplies: scales that take some
        computing, and with them the factors of sums of x, or what is added to scaled weights."""
        s, spec = self.schedule, self.spec
        if not self.computes_scales or self.groups < 2 or s.spread_k or s.integer_mma or spec.compute:
            return ()
        return ("scales", "shifts") if self.zeros_in_sums or self.rounds_zeros else ("scales",)

    @property
    def shares_blocks(self) -> bool:
        """Whether what all rows of a block of groups share is computed once per step, for all lanes of a warp."""
        bilevel = self.spec.bilevel
        if not self.schedule.spread_k or bilevel is None or not bilevel.zeros or bilevel.scale != "f16":
            return False
        return bilevel.rows == ROWS and self.spec.zeros == "float" and bool(self.spec.slot("scales").shared)

    @property
    def rounds_zeros(self) -> bool:
        """Whether zeros (or scaled ones), and codes less zeros, are rounded to x's type: where zeros are no integers,
        and the sums of x that would make up for them would cost as much as 64 rows of products. Offsets are added to
        codes that have been scaled, so scales must be numbers of x's type for that."""
        zeros = self.spec.zeros
        wanted = zeros == "float" or (zeros == "offset" and self._scales_like_x)
        return self.schedule.wgmma and wanted and self.groups > 0 and self._decodes_values

    @property
    def rounds_scales(self) -> bool:
        """Whether weights are scaled before they are multiplied, and so rounded to x's type, as by `dequantize`. Scales
        must be numbers of x's type. It is done

        - in groups with no more columns than there are tokens: weights, two to an instruction, take fewer
          multiplications than sums;
        - in groups of up to twice as many columns, where scales are computed and sums stay in place: no product has to
          be waited for;
        - with float zeros: the instruction that subtracts them scales as well;
        - with so many tokens that there are registers for one set of sums only.
        """
        s, group = self.schedule, self.spec.packing.padded_group
        most = s.tokens * (2 if self.computes_scales and self._has_small_groups else 1)
        less = group is not None and (group <= most or self.rounds_zeros or s.tokens > MOST_SCALED)
        return s.wgmma and less and self._scales_like_x and self._decodes_values and not self.spec.compute

    @property
    def sums_in_place(self) -> bool:
        """Whether sums stay in the accumulators of wgmma from the first step to the last: those of small groups, whose
        products are waited for a few at a time. That takes fewer registers, and fewer moves with several row blocks."""
        pays = self.schedule.row_blocks > 1 or bool(self.step_factors)
        return self.rounds_scales and self._has_small_groups and pays

    @property
    def _has_small_groups(self) -> bool:
        group = self.spec.packing.padded_group
        return group is not None and group <= IN_PLACE and self.schedule.tokens <= MOST_IN_PLACE

    @property
    def _scales_like_x(self) -> bool:
        """Whether scales are numbers of x's type, or codes, whose numbers are rounded to it."""
        scale, act = self.spec.scale, self.spec.act
        return scale in (act, "e4m3") or (scale, act) == ("e8m0", "bf16") or self.spec.bilevel is not None

    @property
    def sums_once(self) -> bool:
        """Whether, with wgmma, sums need registers only once: no group's are scaled, none of x stand beside them."""
        if self.spec.compute == "f8e4m3":  # products are added to the sums after some columns
            return False
        sums_of_x = self.spec.zeros in ("float", "offset") or self.schedule.raw_codes
        return self.rounds_scales or not (self.groups or sums_of_x)

    @property
    def exponent(self) -> int:
        """The power of two that decoding leaves out."""
        t = self.spec.dtype
        return exponent(t, compute_element(t, self.spec.act))

    @property
    def code_power(self) -> int:
        """The part of this power by which decoded codes are multiplied: all of it where zeros or offsets are added to
        scaled weights. Divided by it, these would have too few digits in f16."""
        return self.exponent if self.rounds_zeros else 0

    @property
    def scale_power(self) -> int:
        """The part of this power by which scales are multiplied: all of it where sums are scaled; where weights are, as
        little as makes every product with a scale of e4m3 a multiple of f16's least number."""
        if not self.rounds_scales or self.exponent <= 0:
            return self.exponent
        return 0 if self.code_power else max(0, self.spec.dtype.mantissa - 1)

    @property
    def sum_power(self) -> int:
        """The part of this power by which sums are multiplied at the end."""
        return self.exponent - self.code_power - self.scale_power

    @property
    def _decodes_values(self) -> bool:
        """Whether codes can be decoded to their values: with no power of two left out but that of a float format whose
        products with scales of e4m3 have fewer digits than f16."""
        t, scale = self.spec.dtype, self.spec.scale
        short = t.kind == "float" and t.mantissa <= 6 and scale == "e4m3" and not self.spec.bilevel
        return not self.schedule.raw_codes and (self.exponent == 0 or (short and self.exponent > 0))

    @property
    def rounding(self) -> dict[str, bool]:
        """What the kernel rounds besides its sums, as arguments of `pylib.reference.tolerance`."""
        return {"dequantized": self.rounds_scales, "rounded_zeros": self.rounds_zeros}

    @property
    def async_x(self) -> bool:
        """Whether 16-byte copies fit the rows of x."""
        return fits_async_x(self.spec)

    @property
    def workspace_bytes(self) -> int:
        """Counters, one for a tile, and partial sums of all splits, where splits add up through device memory."""
        s = self.schedule
        return 0 if s.split_k == s.cluster else 4 * (COUNTERS + self.tiles * s.split_k * s.rows * s.columns)


def can_use_raw_codes(spec: MatmulSpec) -> bool:
    """Whether codes can be multiplied as they are stored."""
    return can_be_raw(spec.dtype, compute_element(spec.dtype, spec.act))


def always_uses_raw_codes(spec: MatmulSpec, schedule: Schedule) -> bool:
    """Whether they are, even without `Schedule.raw_codes`."""
    return KernelPlan(spec, replace(schedule, raw_codes=False)).raw_codes
