"""The CPU target against the definition: every code exactly, everything else within derived bounds."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lowbit.dialect.errors import TargetError
from lowbit.dialect.formats.dtypes import all_names
from lowbit.dialect.formats.packing import Packing
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.cpu.decode import ChunkMap
from lowbit.passes.cpu.lower_cpu import prepared_tokens
from lowbit.pylib import reference
from lowbit.pylib.packed import PackedWeight, pack
from lowbit.pylib.runtime.cpu import CpuMatmul, _isa
from lowbit.pylib.torch_types import TORCH

TABLES = {f"lut{b}": tuple(float(v) for v in np.linspace(-3, 4, 1 << b) ** 3) for b in range(1, 9)}
FORMATS = (*all_names(), *TABLES)


def spec_of(weight: str, n: int, k: int, **fields: object) -> MatmulSpec:
    return MatmulSpec(n=n, k=k, weight=weight, table=TABLES.get(weight), **fields)  # type: ignore[arg-type]


def run(program: CpuMatmul, x: Tensor, w: PackedWeight) -> Tensor:
    return program.matmul(x, w.tensors)


def check(spec: MatmulSpec, tokens: tuple[int, ...], finite: bool = True, cpu: str = "") -> None:
    """matmul and dequantize of a random problem, for several numbers of tokens."""
    x, *weight = reference.random_problem(spec, max(tokens), finite=finite)
    w = pack(spec, *weight)
    program = CpuMatmul(spec, cpu)
    for m in tokens:
        y = run(program, x[:m], w)
        assert y.shape == (m, spec.n) and y.dtype == TORCH[spec.out_dtype]
        expected = reference.matmul(spec, x[:m], *weight)
        assert reference.agrees(y, expected, reference.tolerance(spec, x[:m], *weight)).all()
    check_dequantized(program, w, reference.dequantize(spec, *weight[:3]))


def check_dequantized(program: CpuMatmul, w: PackedWeight, expected: np.ndarray) -> None:
    """f32 rounds the table's value, the difference and the product; then comes one rounding to act."""
    unit, least = reference.ROUNDING[program.spec.act]
    with np.errstate(invalid="ignore"):
        bound = np.abs(expected) * (unit + 2.0**-22) + least
    assert reference.agrees(program.dequantize(w.tensors), expected, bound).all()


# How x is read and y rounded does not depend on the format: with bf16 a sample runs, the rest in sweeps.
EVERY_CODE = [
    *((weight, "f16") for weight in FORMATS),
    *(pytest.param(w, "bf16", marks=[pytest.mark.slow] * (i % 6 > 0)) for i, w in enumerate(FORMATS)),
]


@pytest.mark.parametrize(("weight", "act"), EVERY_CODE)
def test_every_code(weight: str, act: str) -> None:
    """Rows that run through all codes, one-hot x, scales that are powers of two: exact, in every place."""
    spec = spec_of(weight, n=24, k=288, group_size=96, act=act, out="f32")
    t = spec.dtype
    codes = (np.arange(spec.k) + 61 * np.arange(spec.n)[:, None]) % t.codes
    assert len(np.unique(codes)) == t.codes
    values = t.values()[codes]
    finite = np.isfinite(values)
    given = np.where(codes >= t.codes // 2, codes - t.codes, codes) if t.kind == "int" else codes
    scales = np.exp2((np.arange(spec.n)[:, None] + np.arange(spec.groups)) % 5 - 2)
    exact = (values * np.repeat(scales, 96, axis=1)).astype(np.float32)  # rounds the values of tables only
    program = CpuMatmul(spec)

    w = pack(spec, given, scales)
    dequantized = program.dequantize(w.tensors)
    assert np.array_equal(
        dequantized.float().numpy(), torch.from_numpy(exact).to(TORCH[act]).float().numpy(), equal_nan=True
    )

    w = pack(spec, np.where(finite, given, 0), scales)  # 0 * NaN is NaN
    y = run(program, torch.eye(spec.k, dtype=TORCH[act]), w)
    assert np.array_equal(y.numpy(), np.where(finite, exact, t.values()[0] * 0).T)

    x, *weight_of = reference.random_problem(spec, 5)
    y = run(program, x, pack(spec, *weight_of))
    bound = reference.tolerance(spec, x, *weight_of)
    assert reference.agrees(y, reference.matmul(spec, x, *weight_of), bound).all()


@pytest.mark.parametrize("weight", ["f8e4m3", "f8e5m2"])
def test_nan_and_inf(weight: str) -> None:
    check(spec_of(weight, n=64, k=256, group_size=32), (1, 4), finite=False)


GROUPS = {
    "u4": (16, 17, 32, 48, 64, 100, 128, 272, None),
    "i3": (16, 32, 48, 64, 128, 256, 272, 512, None),
    "f6e2m3": (16, 64, 100, 256),
    "u1": (16, 32, 100, 128),
}


@pytest.mark.parametrize(("weight", "group"), [(w, g) for w, groups in GROUPS.items() for g in groups])
def test_groups(weight: str, group: int | None) -> None:
    zeros = "int" if weight == "u4" else "float"
    check(spec_of(weight, n=33, k=5 * (group or 211), group_size=group, zeros=zeros), (1, 4))


@pytest.mark.parametrize("zeros", ["none", "int", "float"])
@pytest.mark.parametrize("scale", ["f16", "bf16", "f32", "e8m0", "e4m3"])
def test_scales_and_zeros(scale: str, zeros: str) -> None:
    weight, act = ("i5", "f16") if zeros == "int" else ("i2", "bf16")
    check(spec_of(weight, n=20, k=320, group_size=32, scale=scale, zeros=zeros, act=act), (1, 3))


@pytest.mark.parametrize("out", ["f16", "bf16", "f32"])
@pytest.mark.parametrize("act", ["f16", "bf16"])
def test_outputs_and_bias(act: str, out: str) -> None:
    check(spec_of("f4e2m1", n=37, k=160, group_size=32, act=act, out=out, bias=True), (1, 6))


@pytest.mark.parametrize("shape", [(1, 16), (5, 33), (16, 64), (17, 1000), (129, 257)])
def test_shapes(shape: tuple[int, int]) -> None:
    n, k = shape
    check(spec_of("u8" if n == 5 else "i4", n=n, k=k, bias=True), (0, 1, 2, 3, 8, 65))


@settings(max_examples=8)
@given(st.data())
def test_any_spec(data: st.DataObject) -> None:
    group = data.draw(st.none() | st.integers(16, 300))
    k = data.draw(st.integers(1, 4)) * group if group else data.draw(st.integers(16, 700))
    weight = data.draw(st.sampled_from(FORMATS))
    integer = weight[0] in "ui"
    zeros = data.draw(st.sampled_from(("none", "int", "float") if integer else ("none", "float")))
    spec = spec_of(weight, data.draw(st.integers(1, 70)), k, group_size=group, zeros=zeros)
    check(spec, tuple(data.draw(st.lists(st.integers(0, 11), min_size=1, max_size=3))))


@pytest.mark.skipif(_isa("") == "generic", reason="an x86 without AVX2, or another processor")
def test_processor_levels() -> None:
    """Tables of 8 entries, of 16 and larger ones go three ways through AVX2; the numbers are the same."""
    for weight in ("nf4", "lut3", "lut5", "i4"):
        check(spec_of(weight, n=16, k=128, group_size=64, act="bf16"), (1, 4), cpu="x86-64-v3")
    with pytest.raises(TargetError, match=r"x86-64-v2.*F16C.*x86-64-v3"):
        CpuMatmul(spec_of("u4", n=16, k=64), "x86-64-v2")


def test_rounds_to_nearest_even() -> None:
    """Sums half-way between two outputs: 2048 + 1 and 2048 + 3 in f16, 256 + 1 and 256 + 3 in bf16."""
    for act, base in (("f16", 2048.0), ("bf16", 256.0)):
        spec = spec_of("u4", n=2, k=16, act=act)
        w = pack(spec, np.ones((2, 16), np.uint8), np.ones((2, 1)))
        x = torch.zeros(2, 16, dtype=TORCH[act])
        x[:, 0] = base
        x[0, 1], x[1, 1] = 1, 3
        assert run(CpuMatmul(spec), x, w).tolist() == [[base, base], [base + 4, base + 4]]


def test_threads_give_the_same_bits() -> None:
    """However the rows are divided, and when several callers share the threads."""
    spec = spec_of("u4", n=1000, k=1024, group_size=128, zeros="int")
    x, *weight = reference.random_problem(spec, 9)
    w = pack(spec, *weight)
    one, many = CpuMatmul(spec, threads=1), CpuMatmul(spec, threads=5)
    expected = run(one, x, w)
    assert reference.agrees(
        expected, reference.matmul(spec, x, *weight), reference.tolerance(spec, x, *weight)
    ).all()
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: run(many, x, w), range(12)))
    assert all(torch.equal(y, expected) for y in results)
    assert torch.equal(many.dequantize(w.tensors), one.dequantize(w.tensors))


def test_leading_dimensions_and_strides() -> None:
    spec = spec_of("u3", n=24, k=96)
    x, *weight = reference.random_problem(spec, 12)
    w = pack(spec, *weight)
    program = CpuMatmul(spec)
    y = run(program, x, w)
    assert torch.equal(run(program, x.view(2, 3, 2, 96), w), y.view(2, 3, 2, 24))
    assert torch.equal(run(program, x.t().contiguous().t(), w), y)
    assert torch.equal(run(program, x[0], w), run(program, x[:1], w)[0])


@pytest.mark.parametrize("bits", range(1, 9))
def test_chunk_map_covers_every_column_once(bits: int) -> None:
    for weight in [f"u{bits}", *(name for name in all_names() if name.startswith(f"f{bits}"))][:2]:
        spec = spec_of(weight, n=16, k=512)
        columns = ChunkMap(spec.packing, spec.dtype).columns
        assert sorted(columns.ravel()) == list(range(spec.packing.chunk))


def test_chunk_map_groups() -> None:
    """u4 in groups of 16: word w of a lane is mma block w, which is a group."""
    spec = spec_of("u4", n=16, k=64, group_size=16)
    groups = ChunkMap(Packing(4, 16, 64, 16), spec.dtype).groups
    assert groups(0, 0) == groups(1, 1) == (0, 1, 2, 3) * 4


def test_prepared_tokens() -> None:
    assert [prepared_tokens(m) for m in range(10)] == [0, 1, 4, 4, 4, 5, 8, 8, 8, 9]


def test_stages_can_be_read() -> None:
    stages = CpuMatmul(spec_of("u4", n=64, k=128, group_size=64)).stages()
    assert list(stages) == ["vector", "llvm", "ll", "asm"]
    assert "vector.fma" in stages["vector"] and "func.func @lowbit_matmul" in stages["vector"]
    assert "llvm.func @lowbit_matmul" in stages["llvm"] and "scf." not in stages["llvm"]
    assert "define void @lowbit_matmul" in stages["ll"]
    assert "lowbit_matmul:" in stages["asm"]
    assert stages == CpuMatmul(spec_of("u4", n=64, k=128, group_size=64)).stages()
