"""The definition of a matmul's result, written down a second time: from the fields of a spec and the tensors as `pack`
takes them, in NumPy and float64. It imports nothing of the compiler, so that a mistake there cannot be repeated here.

    y[t, n] = sum_k x[t, k] W[n, k] + bias[n]      and what the epilogue makes of it
    W[n, k] = (s[n, k // g] (value(code[n, k]) - z[n, k // g]) + o[n, k // g]) r[n] + outlier[n, k]

Sources: FP6-LLM (Xia et al., 2024) for small floats, OCP OFP8 and MX for f8e4m3, f8e5m2 and e8m0, QLoRA (Dettmers et
al., 2023), appendix E, for nf4, Hendrycks and Gimpel (2016) for GELU, and docs/eight-bit.md for activations of 8 bits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
Fields = Mapping[str, Any]
"""All fields of a spec by name, as `dataclasses.asdict` gives them."""
Tensors = Mapping[str, Any]
"""Torch tensors by name, as `pack` takes them."""


def matmul(fields: Fields, x: Any, tensors: Tensors) -> F64:
    """Returns y [m, n] for x [m, k]; [m, n / 2] for a gated MLP. With the tensors is the residual, if there is one."""
    with np.errstate(invalid="ignore", over="ignore"):
        y = multiplied(fields, _numbers(x)) @ weight(fields, tensors).T
        y = y + _numbers(tensors["bias"]) if fields["bias"] else y
        return ended(y, fields["epilogue"], tensors)


def matmul_of_experts(fields: Fields, x: Any, tensors: Tensors) -> F64:
    """Returns y [experts, m, n / experts] for x [m, k] of a weight of several experts, which have rows, and all columns
    of a permutation, one after the other; half as many columns for gated MLPs."""
    experts = fields["experts"]
    one = {**fields, "n": fields["n"] // experts, "experts": 1}

    def cut(name: str, expert: int) -> Any:
        whole = tensors[name].to_dense() if name == "outliers" else tensors[name]
        part = whole[len(whole) // experts * expert :][: len(whole) // experts]
        return part.to_sparse_csr() if name == "outliers" else part

    each = ({name: cut(name, expert) for name in tensors} for expert in range(experts))
    return np.stack([matmul(one, x, of_one) for of_one in each])


def ended(y: F64, epilogue: str | None, tensors: Tensors) -> F64:
    """Returns what an epilogue makes of sums [m, n]: gate, then up, in their columns."""
    if epilogue == "residual":
        return y + _numbers(tensors["residual"])
    if epilogue is None:
        return y
    gate, up = np.split(y, 2, axis=1)
    if epilogue == "silu_mul":
        return gate / (1 + np.exp(-gate)) * up
    if epilogue == "swiglu_oai":
        gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
        return gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
    return gate / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up


def weight(fields: Fields, tensors: Tensors) -> F64:
    """Returns W [n, k], its columns in the order of x."""
    columns, group = fields["k"], fields["group_size"] or fields["k"]

    def by_column(name: str) -> F64:
        return np.repeat(_of_groups(fields, name, tensors).reshape(fields["n"], -1), group, axis=1)[:, :columns]

    codes = _numbers(tensors["codes"]).astype(int)
    table = values(fields["weight"], fields["table"])
    with np.errstate(invalid="ignore"):
        w = table[codes % len(table)]
        if "zeros" in tensors:
            w = w - by_column("zeros")
        w = w * by_column("scales")
        if "offsets" in tensors:
            w = w + by_column("offsets")
        if "row_scales" in tensors:
            w = w * _numbers(tensors["row_scales"]).reshape(-1, 1)
        if "outliers" in tensors:
            w = w + _numbers(tensors["outliers"].to_dense())
    if "permutation" in tensors:
        stored, w = w, np.empty_like(w)
        w[:, _numbers(tensors["permutation"]).astype(int)] = stored
    return w


def values(name: str, table: Any = None) -> F64:
    """Returns the number that each code of an element format stands for: [2^bits]."""
    if name.startswith("lut"):
        return np.array(table, dtype=np.float64)
    if name == "nf4":
        return _normal_floats()
    if name == "fp4_bnb":
        positive = np.array([0, 1 / 16, 8, 12, 4, 6, 2, 3]) / 12
        return np.concatenate([positive, -positive])
    if match := re.fullmatch(r"([ui])(\d)", name):
        kind, bits = match[1], int(match[2])
        unsigned = np.arange(2.0**bits)
        return unsigned if kind == "u" else np.where(unsigned < 2 ** (bits - 1), unsigned, unsigned - 2**bits)
    match = re.fullmatch(r"f\de(\d)m(\d)", name)
    if match is None:
        raise ValueError(f"no definition of {name!r}")
    return _small_floats(int(match[1]), int(match[2]), special={"f8e4m3": "nan", "f8e5m2": "inf"}.get(name))


def _small_floats(exponent_bits: int, mantissa_bits: int, special: str | None) -> F64:
    """Returns the numbers of a float format: positive ones in the order of their bits, then negative ones."""
    bias, steps = 2 ** (exponent_bits - 1) - 1, 2**mantissa_bits
    positive = [
        (mantissa if exponent == 0 else steps + mantissa) / steps * 2.0 ** (max(exponent, 1) - bias)
        for exponent in range(2**exponent_bits)
        for mantissa in range(steps)
    ]
    if special == "nan":
        positive[-1] = np.nan
    elif special == "inf":
        positive[-steps:] = [np.inf] + [np.nan] * (steps - 1)
    return np.array([*positive, *(-v for v in positive)])


def _normal_floats() -> F64:
    """Returns the quantiles of N(0, 1) that nf4 has: seven below an exact 0, eight above, scaled to [-1, 1]."""

    def quantiles(count: int) -> F64:
        return np.array([NormalDist().inv_cdf(p) for p in np.linspace(0.9677083, 0.5, count + 1)[:-1]])

    below, above = quantiles(7), quantiles(8)
    return np.concatenate([-below, [0.0], above[::-1]]) / above.max()


def multiplied(fields: Fields, x: F64) -> F64:
    """Returns x [m, k] as it is multiplied: with `compute`, rounded to 8 bits, from so many rows on."""
    compute = fields["compute"]
    if not compute or len(x) < fields["compute_from"]:
        return x
    single = x.astype(np.float32)
    largest = np.float32({"f8e4m3": 448, "i8": 127}[compute])
    peak = np.maximum(np.abs(single).max(axis=1, keepdims=True, initial=0), np.float32(2.0**-100))
    scale = peak * (np.float32(1) / largest)
    scaled = (single * (np.float32(1) / scale)).astype(np.float64)
    rounded = np.rint(scaled) if compute == "i8" else _to_e4m3(scaled)
    return np.asarray(np.clip(rounded, -largest, largest) * scale, np.float64)


def _to_e4m3(x: F64) -> F64:
    """Returns numbers rounded to three bits of mantissa, ties to even, and to multiples of 2^-9 below 2^-6."""
    _, exponent = np.frexp(x)  # x in [2^(exponent - 1), 2^exponent)
    power = np.maximum(exponent - 1, -6) - 3
    return np.asarray(np.ldexp(np.rint(np.ldexp(x, -power)), power), np.float64)


def _of_groups(fields: Fields, name: str, tensors: Tensors) -> F64:
    """Returns the scales, zeros or offsets of groups as numbers, [n, groups]; with a second level, what it makes of
    codes."""
    given, level = _numbers(tensors[name]), fields["bilevel"]
    if not level or (name == "zeros" and fields["zeros"] == "int"):
        return given
    if table := level.get("table"):
        given = np.array(table)[given.astype(int)]

    def spread(part: str) -> F64:
        block = _numbers(tensors[f"{name[:-1]}_{part}"])
        return block.repeat(level["rows"], axis=0).repeat(level["groups"], axis=1)[: len(given)]

    if level.get("zeros"):
        given = given - spread("zeros")
    given = given * spread("scales")
    return given + spread("offsets") if level.get("offsets") else given


def _numbers(tensor: Any) -> F64:
    """Returns a torch tensor of any type in float64."""
    return tensor.detach().cpu().double().numpy()
