"""The kernel families by name. A new family is a folder beside this file and a line in `FAMILIES`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from lowbit.dialect.errors import SpecError
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.base import KernelFamily, KernelRequest, KernelSchedule, Operation
from lowbit.passes.kernels.decode.family import Decode, DecodeInteger
from lowbit.passes.kernels.dequantize.family import Dequantize
from lowbit.passes.kernels.eight_bit.family import EightBit
from lowbit.passes.kernels.eight_bit_experts.family import EightBitExperts
from lowbit.passes.kernels.eight_bit_experts_decode.family import EightBitExpertsDecode
from lowbit.passes.kernels.eight_bit_experts_mma.family import EightBitExpertsMma
from lowbit.passes.kernels.eight_bit_in_order.family import EightBitInOrder
from lowbit.passes.kernels.eight_bit_mma_in_order.family import EightBitMmaInOrder
from lowbit.passes.kernels.eight_bit_prefill.family import EightBitPrefill
from lowbit.passes.kernels.eight_bit_prefill_mma.family import EightBitPrefillMma
from lowbit.passes.kernels.experts.family import Experts
from lowbit.passes.kernels.experts_decode.family import ExpertsDecode
from lowbit.passes.kernels.experts_mma.family import ExpertsMma
from lowbit.passes.kernels.permute.family import Permute
from lowbit.passes.kernels.prefill.family import Prefill
from lowbit.passes.kernels.prefill_in_order.family import PrefillInOrder
from lowbit.passes.kernels.prefill_mma.family import PrefillMma
from lowbit.passes.kernels.prefill_mma_in_order.family import PrefillMmaInOrder
from lowbit.passes.kernels.prepack.family import Prepack
from lowbit.passes.kernels.quantize.family import Quantize
from lowbit.passes.kernels.top_k_experts.family import TopKExperts
from lowbit.passes.target import Target

_FAMILIES: tuple[KernelFamily[Any], ...] = (
    Decode(),
    DecodeInteger(),
    Prefill(),
    PrefillInOrder(),
    PrefillMma(),
    PrefillMmaInOrder(),
    Dequantize(),
    Prepack(),
    EightBit(),
    EightBitPrefill(),
    EightBitInOrder(),
    EightBitPrefillMma(),
    EightBitMmaInOrder(),
    Experts(),
    ExpertsMma(),
    EightBitExperts(),
    EightBitExpertsMma(),
    ExpertsDecode(),
    EightBitExpertsDecode(),
    TopKExperts(),
    Permute(),
    Quantize(),
)
FAMILIES: dict[str, KernelFamily[Any]] = {family.name: family for family in _FAMILIES}


def family_named(name: str) -> KernelFamily[Any]:
    """The family of a name. Raises SpecError for an unknown one."""
    if name not in FAMILIES:
        raise SpecError(f"schedule: family={name!r} must be one of {', '.join(map(repr, FAMILIES))}")
    return FAMILIES[name]


def family_of(schedule: KernelSchedule) -> KernelFamily[Any]:
    """The family whose schedule this is."""
    return next(family for family in FAMILIES.values() if family.schedule_type is type(schedule))


def schedule_names(*operations: Operation) -> str:
    """The names of the schedule types of the families that compute one of these operations, for messages."""
    return ", ".join(f.schedule_type.__name__ for f in FAMILIES.values() if f.operation in operations)


def request(spec: MatmulSpec, target: Target, schedule: KernelSchedule) -> KernelRequest:
    """The request for the kernel with this schedule. Raises SpecError where the schedule does not fit."""
    family = family_of(schedule)
    family.check(spec, schedule, target)
    return KernelRequest(spec, target, family.name, schedule)


def schedule_to_dict(schedule: KernelSchedule) -> dict[str, Any]:
    """A schedule as JSON has it: the name of its family, and its fields."""
    return {"family": family_of(schedule).name} | asdict(schedule)


def schedule_from_dict(values: Mapping[str, Any]) -> KernelSchedule:
    """The inverse of `schedule_to_dict`; without a family, it is "decode". Raises SpecError for what does not fit."""
    given = dict(values)
    return family_named(given.pop("family", Decode.name)).schedule_type.from_dict(given)
