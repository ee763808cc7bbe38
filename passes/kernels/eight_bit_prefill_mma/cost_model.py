"""About how long a schedule takes: `passes.kernels.prefill_mma.cost_model` with instructions of 8 bits.

Nothing of it was measured. Rates of tensor cores are taken to be twice those of f16, as in NVIDIA's data sheets; how
many instructions a tile takes was counted in machine code. The predictions serve to compare schedules. On sm_90 they
are too low for f8e4m3: the assembler makes two products of f16 of one.
"""

from __future__ import annotations

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.eight_bit_prefill.plan import BytesPlan, bytes_plan
from lowbit.passes.kernels.eight_bit_prefill_mma.schedule import EightBitPrefillMmaSchedule
from lowbit.passes.kernels.persistent.engine import BYTES_MMA
from lowbit.passes.kernels.prefill_mma.cost_model import predict_tiles
from lowbit.passes.target import Target

_DECODE = {"int": 14.0, "uint": 8.0, "float": 14.0}  # instructions for a fragment of 16 x 32 weights in f8e4m3;
_DECODE_INTEGERS = 8.0  # in i8
_ZEROS = 16.0  # more, to subtract zero points
_FOLD = 51.0  # in all, to scale and to round them
_ADD = {"f8e4m3": 4.0, "i8": 8.0}  # to add a product of 16 x 8 to sums in f32


def predict(spec: MatmulSpec, tokens: int, s: EightBitPrefillMmaSchedule, target: Target) -> float:
    """About how many microseconds a launch for so many tokens takes."""
    plan = bytes_plan(spec, s, BYTES_MMA)
    return predict_tiles(plan.base, tokens, decoding(spec) + adding(plan), target)


def decoding(spec: MatmulSpec) -> float:
    """Instructions of a warp for a fragment of weights, besides its products and their sums."""
    if spec.folds:
        return _FOLD
    decode = _DECODE_INTEGERS if spec.compute == "i8" else _DECODE[spec.dtype.kind]
    return decode + _ZEROS * (spec.zeros == "int")


def adding(plan: BytesPlan[EightBitPrefillMmaSchedule]) -> float:
    """Returns the instructions of a warp to add the products of a fragment of weights to the sums."""
    if plan.products.keeps_sums:
        return 0.0
    fragments = plan.base.round.step / plan.spec.x.mma_k / plan.products.of_round  # that one product takes
    return _ADD[plan.spec.byte_type] * plan.schedule.warp_tokens / 8 / fragments
