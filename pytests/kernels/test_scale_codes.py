"""Codes of scales by the size of the second level: every pair, in all kinds of kernels."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from every_kernel import KERNELS, TOKENS

from lowbit.dialect.bilevel import SCALE_CODES, TABLE_CODE, Bilevel
from lowbit.dialect.presets import dynamic_table
from lowbit.dialect.spec import MatmulSpec
from lowbit.pylib.reference import random_inputs

CODES = (*SCALE_CODES, "e4m3", TABLE_CODE)
SUPERS: tuple[dict[str, Any], ...] = (  # as SpQR, GGUF with 8 and 16 groups, and nested bitsandbytes have it
    {"rows": 16, "groups": 1},
    {"groups": 8},
    {"groups": 16},
    {"groups": 4, "scale": "f32"},
)
ROLES = ("none", "float", "offset")  # scales alone; zeros, and a zero point of codes; offsets, and an offset of codes
WEIGHTS = ("u3", "i6", "u4", "nf4", "u2")
PAIRS = list(enumerate(product(CODES, SUPERS)))


def is_right(kernel: str, i: int, code: str, second: dict[str, Any], role: str, outliers: bool = False) -> bool:
    """Tells whether the i-th weight of 16 groups to a row is multiplied right."""
    level = {"float": {"zeros": True}, "offset": {"offsets": True}}.get(role, {})
    bilevel = Bilevel(**second, **level, table=dynamic_table() if code == TABLE_CODE else None)
    fields: dict[str, Any] = {"zeros": role, "scale": code, "act": ("f16", "bf16")[i // 2 % 2], "outliers": outliers}
    spec = MatmulSpec(24, 512, WEIGHTS[i % 5], 32, bilevel=bilevel, out="f32", **fields)
    return KERNELS[kernel](spec, random_inputs(spec, TOKENS))


@pytest.mark.parametrize(("part", "kernel"), list(enumerate(KERNELS)))
def test_every_pair(part: int, kernel: str) -> None:
    """Each in one kind of kernel, the pairs of a code in four kinds."""
    for i, (code, second) in PAIRS[part :: len(KERNELS)]:
        assert is_right(kernel, i, code, second, ROLES[i % 3]), (code, second)


@pytest.mark.slow
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_pair_in_every_kernel(kernel: str, code: str) -> None:
    """With all roles, and with outliers in half of all cases."""
    for i, (second, role) in enumerate(product(SUPERS, ROLES)):
        assert is_right(kernel, i, code, second, role, outliers=(i + i // 3) % 2 == 0), (second, role)
