"""Names that formats and types have elsewhere: in torch, in the OCP's MX formats, in llama.cpp, GPTQ and AWQ.

A type of x, y or the scales is accepted under any of its names. A weight is not: what others call one format is here a
format, a group size and a type of scales, so that the answer names all three.
"""

from __future__ import annotations

import re

_TYPES = {
    "f16": ("float16", "fp16", "half"),
    "bf16": ("bfloat16",),
    "f32": ("float32", "fp32"),
    "e8m0": ("float8_e8m0fnu", "f8e8m0", "ue8m0"),
    "e4m3": ("float8_e4m3fn", "f8e4m3", "fp8_e4m3"),
}
_SHORT = {name: short for short, names in _TYPES.items() for name in (short, *names)}

_MX = "group_size=32, scale='e8m0'"
_TWO_LEVELS = "bilevel=Bilevel(groups=16)"
_WEIGHTS = {
    r"mx_?fp4": f"weight='f4e2m1', {_MX}",
    r"mx_?fp6(_?e3m2)?": f"weight='f6e3m2' or 'f6e2m3', {_MX}",
    r"mx_?fp6_?e2m3": f"weight='f6e2m3', {_MX}",
    r"mx_?fp8(_?e4m3)?": f"weight='f8e4m3' or 'f8e5m2', {_MX}",
    r"mx_?fp8_?e5m2": f"weight='f8e5m2', {_MX}",
    r"mx_?int8": f"weight='i8', {_MX}, which has to hold the format's factor of 1/64",
    r"nv_?fp4": "weight='f4e2m1', group_size=16, scale='e4m3', row_scales=True for the scale of the whole tensor",
    r"(fp4|float4)(_?e2m1)?(fn)?(_x2)?": "weight='f4e2m1', or 'fp4_bnb' for the table of bitsandbytes",
    r"(fp6|float6)(_?e3m2)?(fn)?": "weight='f6e3m2' or 'f6e2m3'",
    r"(fp6|float6)_?e2m3(fn)?": "weight='f6e2m3'",
    r"fp8|float8": "weight='f8e4m3' or 'f8e5m2'",
    r"(fp8|float8)_?e4m3(fn)?": "weight='f8e4m3'",
    r"(fp8|float8)_?e5m2": "weight='f8e5m2'",
    r"int4|gptq|awq": "weight='u4', zeros='int' for GPTQ and AWQ, or 'i4' for two's complement",
    r"q4_0": "weight='i4', group_size=32 (codes less 8)",
    r"q5_0": "weight='i5', group_size=32 (codes less 16)",
    r"q8_0": "weight='i8', group_size=32",
    r"q([45])_1": r"weight='u\1', group_size=32, zeros='offset' (the minimum)",
    r"q([45])_k(_[sml])?": r"weight='u\1', group_size=32, zeros='offset', scale='u6', bilevel=Bilevel(groups=8)",
    r"q6_k": f"weight='i6', group_size=16 (codes less 32), scale='i8', {_TWO_LEVELS}",
    r"q3_k(_[sml])?": f"weight='i3', group_size=16 (codes less 4), scale='i6', {_TWO_LEVELS}",
    r"q2_k(_s)?": f"weight='u2', group_size=16, zeros='offset', scale='u4', {_TWO_LEVELS}",
    r"ternary|b1\.58|bitnet": "weight='i2' with the codes -1, 0 and 1",
}


def plain_name(given: object) -> object:
    """Returns the name of a type that torch or NumPy has given, without the package's; anything else as it is."""
    if isinstance(given, type) and given.__module__ == "numpy":
        return given.__name__
    if type(given).__name__.startswith(("dtype", "Float")):  # torch.dtype, numpy.dtype
        return str(given).removeprefix("torch.")
    return given


def short_name(given: object) -> object:
    """Returns our name of a type that is called `given` elsewhere, such as f16 for torch.float16; else `given`."""
    name = plain_name(given)
    return _SHORT.get(name, given) if isinstance(name, str) else given


def weight_advice(given: str) -> str | None:
    """Returns the fields of a spec that make the weight that is called `given` elsewhere, or None if it is unknown."""
    name = given.lower().replace("-", "_")
    for pattern, fields in _WEIGHTS.items():
        if found := re.fullmatch(pattern, name):
            return found.expand(fields)
    return None
