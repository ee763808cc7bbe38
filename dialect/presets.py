"""Weights that have a name elsewhere, in the terms of a spec: what `MatmulSpec.preset` reads.

Sources: OCP Microscaling Formats 1.0 (mx*), NVIDIA's NVFP4, ggml-common.h of llama.cpp (q*, iq4*, tq*), QLoRA (nf4),
and the papers of GPTQ, AWQ, HQQ, FP6-LLM and SpQR with the group sizes that their checkpoints have most often.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lowbit.dialect.bilevel import Bilevel
from lowbit.dialect.errors import SpecError

IQ4_TABLE = (-127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0)


def dynamic_table() -> tuple[float, ...]:
    """Returns bitsandbytes' dynamic 8-bit map: 0, 1, and for each power of ten from 10^-6 to 1 twice as many numbers as
    for the one before, evenly from a tenth of it on, with both signs (Dettmers 2016).

    bitsandbytes computes it in f32, in an order that depends on the processor, so numbers of a checkpoint may differ in
    their last bit; an import keeps those of the checkpoint.
    """
    powers = [(10.0 ** (i - 6), 1 << i) for i in range(7)]
    positive = [power * (0.1 + 0.9 * (j + 0.5) / count) for power, count in powers for j in range(count)]
    return (*(-value for value in reversed(positive)), 0.0, *positive, 1.0)


def nested_blocks(groups: int, blocks: int = 256) -> int:
    """Returns how many groups of a row share a second level that `blocks` groups of the flattened weight share, where a
    row has `groups`: the largest power of two that neither cuts, but at most 16, so that rows can be cut into parts."""
    return math.gcd(blocks, groups, 16)


def _preset(weight: str, group_size: int | None = None, zeros: str = "none", **others: Any) -> dict[str, Any]:
    return {"weight": weight, "group_size": group_size, "zeros": zeros, **others}


def _two_levels(code: str, groups: int, **others: Any) -> dict[str, Any]:
    return {"scale": code, "bilevel": Bilevel(groups=groups), **others}


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "mxfp4": _preset("f4e2m1", 32, scale="e8m0"),
    "mxfp6_e3m2": _preset("f6e3m2", 32, scale="e8m0"),
    "mxfp6_e2m3": _preset("f6e2m3", 32, scale="e8m0"),
    "mxfp8": _preset("f8e4m3", 32, scale="e8m0"),
    "mxfp8_e4m3": _preset("f8e4m3", 32, scale="e8m0"),
    "mxfp8_e5m2": _preset("f8e5m2", 32, scale="e8m0"),
    "nvfp4": _preset("f4e2m1", 16, scale="e4m3", row_scales=True),
    "gptq2": _preset("u2", 128, "int"),
    "gptq3": _preset("u3", 128, "int"),
    "gptq4": _preset("u4", 128, "int"),
    "gptq8": _preset("u8", 128, "int"),
    "awq": _preset("u4", 128, "int"),
    "hqq4": _preset("u4", 64, "float"),
    "nf4": _preset("nf4", 64, scale="f32"),
    "nf4_nested": _preset(
        "nf4", 64, scale="lut8", bilevel=Bilevel(groups=256, scale="f32", offsets=True, table=dynamic_table())
    ),
    "fp6_llm": _preset("f6e3m2"),
    "spqr": _preset(
        "u3", 16, "float", scale="u3", bilevel=Bilevel(rows=16, groups=1, zeros=True), outliers=True, permuted=True
    ),
    "q4_0": _preset("i4", 32),
    "q4_1": _preset("u4", 32, "offset"),
    "q5_0": _preset("i5", 32),
    "q5_1": _preset("u5", 32, "offset"),
    "q8_0": _preset("i8", 32),
    "q2_k": _preset("u2", 16, "offset", **_two_levels("u4", 16)),
    "q3_k": _preset("i3", 16, **_two_levels("i6", 16)),
    "q4_k": _preset("u4", 32, "offset", **_two_levels("u6", 8)),
    "q5_k": _preset("u5", 32, "offset", **_two_levels("u6", 8)),
    "q6_k": _preset("i6", 16, **_two_levels("i8", 16)),
    "iq4_nl": _preset("lut4", 32, table=IQ4_TABLE),
    "iq4_xs": _preset("lut4", 32, table=IQ4_TABLE, **_two_levels("i6", 8)),
    "tq1_0": _preset("i2", 256),
    "tq2_0": _preset("i2", 256),
}
"""The fields of a spec by the name of the weight."""


def preset_fields(name: object, k: int) -> Mapping[str, Any]:
    """Returns the fields of a spec with k columns whose weight is called `name`. Raises SpecError for names outside
    `PRESETS`."""
    key = name.lower().replace("-", "_") if isinstance(name, str) else ""
    if key == "nf4_nested":
        fields = PRESETS[key]
        return {**fields, "bilevel": replace(fields["bilevel"], groups=nested_blocks(k // fields["group_size"]))}
    if key in PRESETS:
        return PRESETS[key]
    near = [each for each in PRESETS if key and each.startswith(key)] or difflib.get_close_matches(key, PRESETS, n=1)
    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
    raise SpecError(f"preset={name!r} must be one of {', '.join(map(repr, PRESETS))}{hint}")
