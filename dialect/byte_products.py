"""Which weights can be multiplied by activations of 8 bits: rules that hold between what is stored, the order in which
it is packed, and what a call computes. The bytes themselves are in `dialect.formats.byte_codes`."""

from __future__ import annotations

from lowbit.dialect.call import Call
from lowbit.dialect.errors import SpecError
from lowbit.dialect.formats import byte_codes
from lowbit.dialect.formats.byte_codes import Compute
from lowbit.dialect.formats.packing import Packing
from lowbit.dialect.formats.recipes import compute_element, exponent
from lowbit.dialect.shape import MIN_K
from lowbit.dialect.weight_format import WeightFormat


def folds(weight: WeightFormat, call: Call) -> bool:
    """Tells whether kernels for many tokens round weights: scales of rows multiply sums, without rounding."""
    return call.fold_scales and weight.group_size is not None


def folds_in_f16(weight: WeightFormat) -> bool:
    """Tells whether kernels that fold scales multiply codes by them in f16: where nothing but integer zeros is added,
    and codes are numbers of f16 as they stand."""
    if weight.bilevel or weight.zeros not in ("none", "int"):
        return False
    t = weight.dtype
    return compute_element(t, "f16") == "f16" and (t.kind != "table" or not exponent(t, "f16"))


def multiplies_codes(weight: WeightFormat, packing: Packing, call: Call) -> bool:
    """Tells whether codes less zeros can be multiplied as bytes whose products are scaled, with `compute`."""
    return call.compute is not None and not _misfit_of_codes(weight, packing, call.compute)


def check_byte_products(weight: WeightFormat, packing: Packing, call: Call) -> None:
    """Raises SpecError unless a call with `compute` can multiply this weight by activations of 8 bits."""
    if call.compute is None:
        return
    given, folded = f"compute={call.compute!r}", folds(weight, call)
    if not folded and (why := _misfit_of_codes(weight, packing, call.compute)):
        raise SpecError(f"{given} {why}, or compute=None")
    for name in ("permuted", "outliers"):
        if getattr(weight, name):
            raise SpecError(f"{given} has no {name}=True; use {name}=False, or compute=None")
    _check_columns(given, packing, MIN_K if folded else byte_codes.SUM_COLUMNS)
    if packing.group and not (byte_codes.fits_rounds(packing.group) or multiplies_codes(weight, packing, call)):
        rule = "a divisor of 1536 or 2048, or a multiple of 512"
        raise SpecError(f"{given} needs group_size={packing.group} to be {rule}; use one, or compute=None")
    if folded and not _can_be_rounded(weight, call.compute):
        what = f"fold_scales=True and {given} multiply numbers, and {weight.weight!r} has codes that are none"
        raise SpecError(f"{what}; use compute='f8e4m3'")
    added = weight.zero_kind(call.act), weight.offset_kind(call.act)
    if folded and weight.scale in ("e8m0", "e4m3") and "bf16" in added:
        what = f"fold_scales=True with scale={weight.scale!r} and zeros={weight.zeros!r}"
        raise SpecError(f"{what} needs act='f16', in which kernels read such zeros; or scale='bf16' or 'f32'")


def _check_columns(given: str, packing: Packing, least: int) -> None:
    """Raises SpecError unless rows, and groups of a multiple of `least` columns, are whole sums of bytes."""
    columns, most = byte_codes.SUM_COLUMNS, byte_codes.MOST_COLUMNS
    if packing.k % columns or packing.k > most:
        raise SpecError(f"{given} needs k={packing.k} to be a multiple of {columns} up to {most}; use compute=None")
    if packing.group and (packing.group % least or packing.pads_groups):
        raise SpecError(f"{given} needs {_rule_of_groups(packing, least)}; use compute=None")


def _misfit_of_codes(weight: WeightFormat, packing: Packing, compute: Compute) -> str:
    """Returns why codes less zeros cannot be multiplied as bytes whose products are scaled, and what to use; "" if
    they can."""
    fold = ", or fold_scales=True and groups" if _can_be_rounded(weight, compute) else ""
    if not byte_codes.fits(weight.dtype, compute):
        fitting = ", ".join(byte_codes.fitting_names(compute))
        return f"multiplies {fitting}, not {weight.weight!r}; use one of them{fold}"
    if weight.zeros not in ("none", "int"):
        return f"has no zeros={weight.zeros!r}; use 'int' or 'none'{fold}"
    if weight.bilevel:
        return f"has no bilevel=; use scales that are numbers{fold}"
    if packing.group and packing.group % byte_codes.SUM_COLUMNS:
        return f"needs {_rule_of_groups(packing, byte_codes.SUM_COLUMNS)}; use one{fold}"
    return ""


def _can_be_rounded(weight: WeightFormat, compute: Compute) -> bool:
    """Tells whether this type has all values of scaled weights, rounded: integers have no NaN."""
    return compute != "i8" or not weight.dtype.has_nan


def _rule_of_groups(packing: Packing, least: int) -> str:
    """Says which groups have products of bytes: multiples of `least` columns that need no padding."""
    chunk = packing.chunk
    return f"group_size={packing.group} to be a multiple of {least} that divides {chunk} or is a multiple of it"
