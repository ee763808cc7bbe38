"""Weights whose scales are folded into numbers of 8 bits (`MatmulSpec.fold_scales`): the scales of rows that `pack`
chooses for them, and the numbers that are multiplied."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from lowbit.dialect.errors import PackError
from lowbit.dialect.formats.byte_codes import LARGEST
from lowbit.dialect.formats.recipes import exponent
from lowbit.dialect.spec import MatmulSpec
from lowbit.pylib.torch_types import TORCH
from lowbit.pylib.weights.at_once import at_once
from lowbit.pylib.weights.dequantized import dequantize, numbers, of_codes
from lowbit.pylib.weights.value_range import finite_values

_EXPONENTS = -126, 127  # of scales of rows: the normal numbers of f32
_SCALED = ("scales", "offsets", "scale_scales", "scale_offsets", "offset_scales", "offset_offsets")
"""Tensors whose numbers are those of weights; codes among them are not."""
_LEAST_LOST = 8  # the part of a row's largest weight that is an error to lose: rounding to e4m3 loses a sixteenth
Ends = tuple[Tensor, Tensor]
"""The least and the largest value: of a format, or of each group [n, groups]."""


def with_row_scales(spec: MatmulSpec, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns tensors as `pack` takes them, where a power of two has gone from the scales and offsets of every row to
    the scale of the row: the least with which no weight of the row is beyond the largest number of `spec.compute`. Rows
    that share a second level share the power.

    Scales stay exact, but for those that become subnormal numbers of their type. Raises PackError where their type does
    not hold those of a row's largest weights.
    """
    ends = _ends(spec, values["codes"])
    largest = _largest(spec, values, ends)
    exponent = _exponents(largest / LARGEST[spec.byte_type])
    height = spec.bilevel.rows if spec.bilevel else 1
    blocks = pad(exponent, (0, 0, 0, -spec.n % height), value=_EXPONENTS[0]).view(-1, height)
    exponent = blocks.amax(1, keepdim=True).repeat_interleave(height, 0)[: spec.n]
    scaled = {name: values[name] for name in _SCALED if name in values and not spec.slot(name).code}
    result = {**values}
    for name, given in scaled.items():
        of_given = exponent[::height] if spec.slot(name).index == "block" else exponent
        result[name] = torch.ldexp(given.double(), -of_given)
    _check_scales(spec, result | {name: _rounded(spec, name, result[name]) for name in scaled}, ends, largest, exponent)
    of_rows = values.get("row_scales", torch.ones_like(exponent)).double().view(-1, 1)
    return result | {"row_scales": torch.ldexp(of_rows, exponent)[:, 0]}


def _check_scales(
    spec: MatmulSpec, rounded: Mapping[str, Tensor], ends: Ends, largest: Tensor, exponent: Tensor
) -> None:
    """Raises PackError where rounded scales, from which 2^exponent has gone, give rows another largest weight."""
    found = torch.ldexp(_largest(spec, rounded, ends), exponent)
    lost = (found - largest).abs() > largest / _LEAST_LOST
    if bool(lost.any()):
        row = int(lost.nonzero()[0, 0])
        kind = spec.scale if spec.bilevel is None else spec.bilevel.scale
        taken = f"fold_scales takes 2^{int(exponent[row])} from the scales of row {row}"
        raise PackError(f"{taken}, which leaves less than {kind} holds; use a wider scale, such as 'bf16' or 'f32'")


def _rounded(spec: MatmulSpec, name: str, values: Tensor) -> Tensor:
    """Returns numbers rounded to the type of a tensor; powers of two, of which `pack` checks all, as they are."""
    storage = spec.slot(name).storage
    return values if storage == "e8m0" else values.to(TORCH[storage]).double()


def _ends(spec: MatmulSpec, codes: Tensor) -> Ends:
    """Returns the least and the largest value of a format; of one that reaches further than `spec.compute`, where few
    weights come near that, those of the codes of each group."""
    values = finite_values(spec)
    if spec.dtype.max <= LARGEST[spec.byte_type]:
        low, high = codes.new_tensor([values.min(), values.max()], dtype=torch.float64)
        return low, high
    table, mask = torch.from_numpy(values).to(codes.device), spec.dtype.codes - 1
    parts = codes.split(max(1, at_once(codes.device) // spec.k))
    found = [table[part.long() & mask].view(len(part), spec.groups, -1).aminmax(dim=2) for part in parts]
    return torch.cat([each.min for each in found]), torch.cat([each.max for each in found])


def _largest(spec: MatmulSpec, values: Mapping[str, Tensor], ends: Ends) -> Tensor:
    """Returns a bound of the weights of each row [n, 1]: that of a group is its scale times the largest value less
    zero, and its offset."""
    scales = _values_of(spec, "scale", values)
    zeros = _values_of(spec, "zero", values) if "zeros" in values else torch.zeros_like(scales)
    largest = scales.abs() * torch.maximum(*((end - zeros).abs() for end in ends))
    if "offsets" in values:
        largest += _values_of(spec, "offset", values).abs()
    return largest.amax(1, keepdim=True)


def _values_of(spec: MatmulSpec, role: str, values: Mapping[str, Tensor]) -> Tensor:
    """Returns scales, zeros or offsets [n, groups] in f64; of codes, what their second level makes of them."""
    slot = spec.slot(f"{role}s")
    return of_codes(spec, slot, values[slot.name].double(), lambda block: values[block.name].double())


def _exponents(largest: Tensor) -> Tensor:
    """Returns the least e with largest <= 2^e, and 0 for rows of zeros; numbers that are not finite are left to the
    checks of `pack`."""
    mantissa, exponent = torch.frexp(largest)  # mantissa in [0.5, 1)
    least = exponent - (mantissa == 0.5).int()
    return torch.where((largest > 0) & largest.isfinite(), least, 0).clamp(*_EXPONENTS)


def with_table_in_f16(spec: MatmulSpec) -> MatmulSpec:
    """Returns the spec with the values of its table, where its format has one, as kernels hold them: in f16, without a
    power of two that scales have."""
    t = spec.dtype
    if t.kind != "table":
        return spec
    power = 2.0 ** exponent(t, "f16")
    rounded = (t.values() / power).astype(np.float16).astype(np.float64) * power
    return replace(spec, weight=f"lut{t.bits}", table=tuple(rounded.tolist()))


def spec_of_values(spec: MatmulSpec, m: int) -> MatmulSpec:
    """Returns the spec by which a CPU multiplies m rows of values of 8 bits, as numbers of f16: with folded scales
    where weights are rounded."""
    of_weight = with_table_in_f16(spec) if spec.rounds_weights(m) else spec.in_act
    return replace(of_weight, act="f16", out=spec.out_dtype)


def with_scales_in_f16(spec: MatmulSpec, tensors: Mapping[str, Tensor]) -> tuple[MatmulSpec, Mapping[str, Tensor]]:
    """Returns the spec and the tensors with scales as kernels multiply codes by them: in f16, where they do so."""
    if not spec.folds_in_f16:
        return spec, tensors
    scales = tensors["scales"].view(TORCH[spec.slot("scales").storage])
    return replace(spec, scale="f16"), {**tensors, "scales": scales.float().half()}


def folded(spec: MatmulSpec, tensors: Mapping[str, Tensor]) -> Tensor:
    """Returns the weight [n, k] in f32 as kernels for many tokens multiply it: without the scale of its row, rounded to
    8 bits (`rounded`); times the scale of the row."""
    plain, tensors = with_scales_in_f16(spec, tensors)
    plain = replace(with_table_in_f16(plain).in_act, row_scales=False)
    return rounded(spec, dequantize(plain, tensors, torch.float32)) * numbers(spec, "row_scales", tensors)


def rounded(spec: MatmulSpec, weights: Tensor) -> Tensor:
    """Returns weights in f32 with the values that they have in `spec.compute`: rounded to f16, and then to nearest
    even; in f8e4m3 to 448 at most. In i8 they are rounded once, where a code is multiplied by its scale in f16."""
    largest = LARGEST[spec.byte_type]
    if spec.compute == "i8":
        return (weights if spec.folds_in_f16 else weights.half()).float().round()
    return weights.half().float().clamp(-largest, largest).to(TORCH["e4m3"]).float()
