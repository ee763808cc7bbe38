"""What a spec needs of a target, whichever family computes it. No MLIR is needed here."""

from __future__ import annotations

from lowbit.dialect.bilevel import TABLE_CODE
from lowbit.dialect.errors import SpecError
from lowbit.dialect.formats.decode_table import DecodeTable
from lowbit.dialect.formats.dtypes import dtype
from lowbit.dialect.formats.recipes import compute_element
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.target import Target


def fits_async_x(spec: MatmulSpec) -> bool:
    """Whether 16-byte copies fit the rows of x, whatever the schedule."""
    return spec.k % spec.x.per_vector == 0 and not spec.packing.pads_groups


def has_scales_of_x(spec: MatmulSpec) -> bool:
    """Tells whether scales are numbers of x's type, unless they are codes of a second level."""
    return spec.scale in (spec.act, "e4m3") or (spec.scale, spec.act) == ("e8m0", "bf16")


def can_use_wgmma(spec: MatmulSpec, target: Target) -> bool:
    """Whether a matmul can use wgmma: it needs x in 16-byte pieces, and codes decoded to the type of x."""
    same_type = spec.compute is not None or compute_element(spec.dtype, spec.act) == spec.act
    return target.has_wgmma and same_type and fits_async_x(spec)


def scale_table(spec: MatmulSpec) -> DecodeTable | None:
    """The table in which scales are places, as kernels have it in shared memory; None where they are no places. A load
    from device memory would come back behind those that its warp has begun before it."""
    if spec.bilevel is None or spec.bilevel.table is None:
        return None
    return DecodeTable(dtype(TABLE_CODE, spec.bilevel.table), "f32", copies=1)


PER_EXPERT = "use a matmul per expert"


def check_experts(family: str, spec: MatmulSpec) -> None:
    """Raises SpecError where kernels for several experts do not fit a spec."""
    if spec.experts == 1:
        raise SpecError(f"schedule: {family} is for weights of several experts, ({spec}) has one")
    if not fits_async_x(spec):
        raise SpecError(
            f"schedule: {family} copies x in whole 16-byte pieces; {spec.weight} with k={spec.k} and groups of "
            f"{spec.group_size} does not fit; {PER_EXPERT}"
        )


def check_in_act(family: str, spec: MatmulSpec, others: str) -> None:
    """Raises SpecError for a spec whose x has 8 bits. others: schedules of kernels that multiply it."""
    if spec.compute is not None:
        raise SpecError(f"schedule: {family} takes no activations of 8 bits, ({spec}) has them; take an {others}")


def check_compute(spec: MatmulSpec, target: Target) -> None:
    """Raises SpecError where a target does not multiply the type."""
    if spec.byte_type == "f8e4m3" and not target.has_fp8:
        raise SpecError(f"compute='f8e4m3' needs sm_89 or later, the target is {target}; use compute='i8' or None")
