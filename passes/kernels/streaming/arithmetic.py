"""What becomes of codes, zeros and sums between decoding and the epilogue. No MLIR is needed.

Codes are decoded to their values, or multiplied as they are stored; what they are too large by then, and zeros or
offsets that no weight has, are made up for by sums of x.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lowbit.dialect.formats.byte_codes import has_signs, sums_correct
from lowbit.dialect.formats.raw_codes import can_be_raw, can_defer_offset, zero_code
from lowbit.dialect.formats.recipes import OFFSET_BITS, compute_element
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.costs import EngineCosts
from lowbit.passes.kernels.decode.schedule import Schedule
from lowbit.passes.kernels.streaming.scaling import Scaling
from lowbit.passes.kernels.streaming.steps import Steps

_MOST_WITH_SUMS_OF_BYTES = 8
"""Tokens up to which sums of x make up for zeros. With more, zeros are subtracted from codes."""
_MINUS = {"i8": 2, "f8e4m3": 3}
"""Instructions that subtract zeros from four codes."""


@dataclass(frozen=True)
class Arithmetic:
    """Which codes are multiplied, what sums of x correct, and where sums and scales of a step are kept."""

    spec: MatmulSpec
    schedule: Schedule
    steps: Steps
    scaling: Scaling

    @property
    def defers_offset(self) -> bool:
        """Whether decoded codes keep the offset of their magic number: one mma per fragment of x corrects it, for all
        rows, in place of a subtraction per pair of weights."""
        t, s = self.spec.dtype, self.schedule
        if self.spec.compute or self.spec.invariant:  # wgmma has no such mma, nor has a single row block
            return False
        able = can_defer_offset(t, compute_element(t, self.spec.act))
        if s.spread_k:  # two or three mma for eight fragments of x
            return able and not can_use_raw_codes(self.spec)
        return able and t.bits <= OFFSET_BITS and s.row_blocks > 1 and not s.wgmma and not s.raw_codes

    @property
    def subtracts_in_bytes(self) -> bool:
        """Whether zeros, and the offset of signed codes, are subtracted from codes that become bytes. Sums of x, which
        make up for them otherwise, take instructions for every token. Differences of codes of 8 bits are no bytes. With
        one result for every number of tokens all do the same in f8e4m3; in i8 both are exact."""
        spec = self.spec
        if spec.compute is None or not sums_correct(spec.dtype, spec.compute, spec.zeros):
            return False
        alike = spec.invariant and spec.compute == "f8e4m3"
        return self.schedule.tokens > _MOST_WITH_SUMS_OF_BYTES and spec.dtype.bits < 8 and not alike

    @property
    def raw_codes(self) -> bool:
        """Whether codes are multiplied as they are stored, with no subtraction: if there is nothing to subtract, if
        sums of x are needed anyway (float zeros, offsets), or if the schedule says so."""
        s, spec = self.schedule, self.spec
        if spec.compute:
            return not self.subtracts_in_bytes
        if s.spread_k:  # one mma adds up x of eight blocks
            return can_use_raw_codes(spec)
        if s.raw_codes or s.integer_mma or not can_use_raw_codes(spec) or self.defers_offset:
            return s.raw_codes
        if self.scaling.rounds_scales:
            return False
        if spec.zeros in ("float", "offset"):
            return not self.scaling.rounds_zeros
        return spec.zeros == "none" and spec.dtype.kind == "uint"

    @property
    def subnormal_codes(self) -> bool:
        """Whether the multiplied codes are subnormals of f16, whose power of two differs between halves of a row
        block."""
        return self.raw_codes and not self.spec.compute

    @property
    def stored_offset(self) -> float:
        """By how much the multiplied codes are too large: signed codes are in offset binary."""
        spec = self.spec
        if spec.compute and has_signs(spec.dtype, spec.compute, spec.zeros):
            return 0.0
        return zero_code(self.spec.dtype) if self.raw_codes or self.schedule.integer_mma else 0.0

    @property
    def zeros_in_decode(self) -> bool:
        """Whether zeros are subtracted as codes are decoded."""
        as_stored = self.raw_codes or self.schedule.integer_mma
        return self.spec.zeros == "int" and not self.defers_offset and not as_stored

    @property
    def zeros_in_sums(self) -> bool:
        """Whether zeros and offsets, that of codes included, are made up for by sums of x."""
        elsewhere = self.zeros_in_decode or self.scaling.rounds_zeros
        return (self.spec.zeros != "none" or self.stored_offset > 0) and not elsewhere

    @property
    def sums_x(self) -> bool:
        """Whether x is added up, for zeros and offsets, or for those of codes."""
        return self.zeros_in_sums or self.defers_offset

    @property
    def step_scales(self) -> tuple[str, ...]:
        """What a warp computes for all groups of a step before it multiplies: scales that take some computing, and with
        them the offsets that go with sums of x, or that are added to scaled weights."""
        s, spec = self.schedule, self.spec
        if not self.scaling.computes_scales or self.steps.groups < 2 or s.spread_k or s.integer_mma or spec.compute:
            return ()
        return ("scales", "offsets") if self.zeros_in_sums or self.scaling.rounds_zeros else ("scales",)

    @property
    def sums_in_place(self) -> bool:
        """Whether sums stay in the accumulators of wgmma from the first step to the last: those of small groups, whose
        products are waited for a few at a time. That takes fewer registers, and fewer moves with several row blocks."""
        if not self.scaling.rounds_scales or not self.scaling.has_small_groups or self.schedule.chains > 1:
            return False
        return self.schedule.row_blocks > 1 or bool(self.step_scales)

    @property
    def sums_once(self) -> bool:
        """Whether, with wgmma, sums need registers only once: no group's are scaled, none of x stand beside them."""
        if self.spec.compute == "f8e4m3":  # products are added to the sums after some columns
            return False
        sums_of_x = self.spec.zeros in ("float", "offset") or self.schedule.raw_codes
        return self.scaling.rounds_scales or not (self.steps.groups or sums_of_x)

    def decode_clocks(self, costs: EngineCosts) -> float:
        """Returns the clocks of a multiprocessor to decode 256 codes."""
        kind = self.spec.dtype.kind
        if kind == "table":
            return costs.decode_table
        raw = self.raw_codes or self.subtracts_in_bytes
        factor = costs.decode_float if kind == "float" else costs.decode_raw if raw else 1.0
        return costs.decode[self.spec.packing.bits - 1] * factor + self._clocks_of_bytes(costs)

    def _clocks_of_bytes(self, costs: EngineCosts) -> float:
        """Returns what is added where 256 codes become bytes: a multiprocessor begins 128 instructions a clock."""
        if self.spec.compute is None:
            return 0.0
        more = _MINUS[self.spec.compute] * 256 / 4 / 128 if self.subtracts_in_bytes else 0.0
        return more + (costs.e4m3 if self.spec.compute == "f8e4m3" else 0.0)


def can_use_raw_codes(spec: MatmulSpec) -> bool:
    """Whether codes can be multiplied as they are stored."""
    return can_be_raw(spec.dtype, compute_element(spec.dtype, spec.act))


def arithmetic_of(spec: MatmulSpec, schedule: Schedule) -> Arithmetic:
    """Returns the arithmetic of a kernel."""
    steps = Steps(spec, schedule)
    return Arithmetic(spec, schedule, steps, Scaling(spec, schedule, steps))


def always_uses_raw_codes(spec: MatmulSpec, schedule: Schedule) -> bool:
    """Whether they are, even without `Schedule.raw_codes`."""
    return arithmetic_of(spec, replace(schedule, raw_codes=False)).raw_codes
