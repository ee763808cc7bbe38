"""Every format against a definition of its own: exact fractions of its bits, and torch's OCP types."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowbit.dialect.errors import SpecError
from lowbit.dialect.formats.dtypes import FP4_BNB, NF4, DType, all_names, dtype

FLOATS = [name for name in all_names() if name.startswith("f") and "e" in name]
OCP = {"f8e4m3": torch.float8_e4m3fn, "f8e5m2": torch.float8_e5m2}


def value_of_bits(t: DType, code: int) -> Fraction:
    """A code's value from its bits, sign first, in exact arithmetic; finite codes only."""
    bits = [(code >> i) & 1 for i in reversed(range(t.bits))]
    if t.kind == "uint":
        return Fraction(sum(bit << i for i, bit in enumerate(reversed(bits))))
    if t.kind == "int":  # the top bit counts negatively
        return Fraction(sum(bit << i for i, bit in enumerate(reversed(bits[1:]))) - (bits[0] << (t.bits - 1)))
    exponent = int("".join(map(str, bits[1 : 1 + t.exponent])), 2)
    fraction = sum((Fraction(bit, 2 ** (i + 1)) for i, bit in enumerate(bits[1 + t.exponent :])), Fraction(0))
    bias = 2 ** (t.exponent - 1) - 1
    significand, power = (fraction, 1 - bias) if exponent == 0 else (1 + fraction, exponent - bias)
    return (-1) ** bits[0] * significand * Fraction(2) ** power


@pytest.mark.parametrize("name", all_names())
def test_values_by_definition(name: str) -> None:
    t = dtype(name)
    values = t.values()
    assert values.shape == (2**t.bits,) and values.dtype == np.float64
    if t.kind == "table":
        assert tuple(values) == {"nf4": NF4, "fp4_bnb": FP4_BNB}[name]
        return
    for code in np.flatnonzero(np.isfinite(values)):
        assert Fraction(float(values[code])) == value_of_bits(t, int(code)), code


@pytest.mark.parametrize("name", OCP)
def test_ocp_types_are_torchs(name: str) -> None:
    expected = torch.arange(256, dtype=torch.uint8).view(OCP[name]).double().numpy()
    values = dtype(name).values()
    np.testing.assert_array_equal(values, expected)
    numbers = ~np.isnan(values)  # the sign of a NaN means nothing
    np.testing.assert_array_equal(np.signbit(values[numbers]), np.signbit(expected[numbers]))


def test_only_ocp_types_have_special_codes() -> None:
    for name in all_names():
        special = int((~np.isfinite(dtype(name).values())).sum())
        assert special == {"f8e4m3": 2, "f8e5m2": 8}.get(name, 0), name
        assert dtype(name).has_nan == (name in OCP)


@pytest.mark.parametrize(
    "name, largest",
    [("u8", 255), ("i4", 8), ("i1", 1), ("f4e2m1", 6), ("f6e3m2", 28), ("f6e2m3", 7.5), ("f8e4m3", 448),
     ("f8e5m2", 57344), ("f8e7m0", 2.0**64), ("nf4", 1)],
)  # fmt: skip
def test_largest_magnitude(name: str, largest: float) -> None:
    assert dtype(name).max == largest


def test_published_tables() -> None:
    assert len(NF4) == len(FP4_BNB) == 16
    assert list(NF4) == sorted(NF4) and NF4[7] == 0 and (NF4[0], NF4[15]) == (-1, 1)
    # e2m1 scaled by 1/12, with 1/192 for its subnormal: bitsandbytes' fp4.
    np.testing.assert_allclose(FP4_BNB[:8], np.array([0, 1 / 16, 8, 12, 4, 6, 2, 3]) / 12, rtol=1e-7)


@pytest.mark.parametrize("name", all_names())
def test_encode_inverts_values(name: str) -> None:
    t = dtype(name)
    finite = t.values()[np.isfinite(t.values())]
    codes = t.encode(finite)
    assert codes.dtype == np.uint8
    np.testing.assert_array_equal(t.decode(codes), finite)


@pytest.mark.parametrize("name", all_names())
def test_encode_is_nearest_and_ties_are_even(name: str) -> None:
    t = dtype(name)
    finite = np.flatnonzero(np.isfinite(t.values()))
    levels = np.unique(t.values()[finite])
    midpoints = (levels[1:] + levels[:-1]) / 2
    x = np.concatenate([midpoints, np.nextafter(midpoints, np.inf), np.nextafter(midpoints, -np.inf)])
    codes = t.encode(x)
    distance = np.abs(levels[None, :] - x[:, None]).min(axis=1)
    np.testing.assert_array_equal(np.abs(t.decode(codes) - x), distance)
    if t.kind != "table":  # neighbours of a table need not differ in parity
        exact = np.array(
            [Fraction(a) + Fraction(b) == 2 * Fraction(m) for a, b, m in zip(levels, levels[1:], midpoints)]
        )
        assert exact.all()
        assert not (codes[: len(midpoints)] & 1).any()


@pytest.mark.parametrize("name", all_names())
def test_encode_saturates(name: str) -> None:
    t = dtype(name)
    finite = t.values()[np.isfinite(t.values())]
    x = np.array([1e300, np.inf, -1e300, -np.inf])
    top, bottom = finite.max(), finite.min()
    np.testing.assert_array_equal(t.decode(t.encode(x)), [top, top, bottom, bottom])


@pytest.mark.parametrize("name", OCP)
def test_encode_rounds_as_torch(name: str) -> None:
    t = dtype(name)
    x = np.random.default_rng(0).uniform(-t.max, t.max, 4096) * np.exp2(np.arange(4096) % 24 - 20.0)
    x = np.clip(x, -t.max, t.max).astype(np.float32)
    expected = torch.from_numpy(x).to(OCP[name]).double().numpy()
    np.testing.assert_array_equal(t.decode(t.encode(x)), expected)


@given(name=st.sampled_from(all_names()), x=st.floats(-1e5, 1e5))
def test_encode_anything_is_nearest(name: str, x: float) -> None:
    t = dtype(name)
    finite = t.values()[np.isfinite(t.values())]
    assert abs(t.decode(t.encode(x)) - x) == np.abs(finite - x).min()


def test_encode_nan() -> None:
    for name in OCP:
        assert np.isnan(dtype(name).decode(dtype(name).encode([np.nan]))).all()
    with pytest.raises(SpecError, match="u4 has no NaN"):
        dtype("u4").encode([1.0, np.nan])


def test_encode_keeps_shape() -> None:
    assert dtype("i3").encode(np.zeros((2, 3, 4))).shape == (2, 3, 4)
    assert dtype("lut1", (1.0, 1.0)).encode([5.0, -5.0]).shape == (2,)


def test_lut() -> None:
    table = (3.0, -1.0, 0.5, 3.0)
    t = dtype("lut2", table)
    assert t.bits == 2 and tuple(t.values()) == table
    assert t.encode([2.9, -9.0, 0.4]).tolist() == [0, 1, 2]


def test_values_are_read_only() -> None:
    with pytest.raises(ValueError, match="read-only"):
        dtype("u4").values()[0] = 1


@pytest.mark.parametrize(
    "name, table, message",
    [
        ("u9", None, r"unknown weight format 'u9'; allowed: u1..u8"),
        ("u0", None, "unknown"),
        ("f6e3m3", None, r"must make 6 bits \(1\+3\+3 = 7\); try f6e1m4, f6e2m3, f6e3m2"),
        ("f4e0m3", None, "f4e0m3"),
        ("lut2", None, "lut2 needs table= with 4 values; got none"),
        ("lut2", (1.0,), "got 1 values"),
        ("lut1", (1.0, float("nan")), "must be finite"),
        ("u2", (1.0, 2.0, 3.0, 4.0), "drop it or use 'lut2'"),
    ],
)
def test_errors(name: str, table: tuple[float, ...] | None, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        dtype(name, table)


def test_catalogue() -> None:
    names = all_names()
    assert len(set(names)) == len(names) == 45
    assert all(dtype(name).name == name and dtype(name).codes == 2 ** dtype(name).bits for name in names)
    assert len(FLOATS) == 27
