"""Offsets that are added after scaling (zeros="offset"), and scales of rows: their values, on every target."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from emulated import exhaustive_inputs
from hypothesis import given, settings
from hypothesis import strategies as st
from sweeps import swept
from tables import table

import lowbit
from lowbit.dialect.errors import PackError, SpecError
from lowbit.dialect.formats.dtypes import all_names
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.decode.schedule import Schedule
from lowbit.passes.kernels.streaming.plan import KernelPlan
from lowbit.pylib import reference
from lowbit.pylib.weights.packed import PackedWeight, pack

Q4_1 = MatmulSpec(n=24, k=96, weight="u4", group_size=32, zeros="offset", scale="f32")
NVFP4 = MatmulSpec(n=24, k=96, weight="f4e2m1", group_size=16, scale="e4m3", row_scales=True)


def by_hand(spec: MatmulSpec, tensors: dict[str, torch.Tensor]) -> np.ndarray:
    """W in f32, every operation rounded: scales of rows first, the product, then the sum."""
    given = {name: t.float().numpy() for name, t in tensors.items() if name != "codes"}
    rows = given.get("row_scales", np.ones(spec.n, np.float32))[:, None]
    values = spec.dtype.values().astype(np.float32)[tensors["codes"].numpy().astype(int) % spec.dtype.codes]
    groups = np.float32(rows * given["scales"])[:, :, None]
    result = values.reshape(spec.n, spec.groups, -1) * groups
    if "offsets" in given:
        result = np.float32(result) + np.float32(rows * given["offsets"])[:, :, None]
    return np.float32(result).reshape(spec.n, spec.k)


@pytest.mark.parametrize("row_scales", [False, True])
@pytest.mark.parametrize("weight", [*all_names(), "lut3", "lut8"])
def test_every_code_is_exact_in_f32(weight: str, row_scales: bool) -> None:
    values = table(int(weight[3:])) if weight.startswith("lut") else None
    spec = MatmulSpec(25, 96, weight, 32, zeros="offset", scale="f32", row_scales=row_scales, table=values)
    _, tensors = exhaustive_inputs(spec, 1)
    w = pack(spec, **tensors)
    assert np.array_equal(w.dequantize().numpy(), by_hand(spec, dict(tensors)), equal_nan=True)


@pytest.mark.parametrize(
    ("weight", "act", "target"),
    swept(product(["u1", "u4", "i5", "f6e3m2", "f8e4m3", "f5e1m3"], ["f16", "bf16"], ["cpu", "emulator:sm_80"])),
)
def test_targets_round_the_definition_once(weight: str, act: str, target: str) -> None:
    """A fused multiply-add would differ in the last bit of f32, and by that in a few numbers of the act type."""
    spec = MatmulSpec(40, 1536, weight, 32, zeros="offset", scale="f32", act=act, row_scales=act == "f16")  # type: ignore[arg-type]
    _, tensors = reference.random_inputs(spec, 1)
    w = pack(spec, **tensors)
    mm = lowbit.compile(spec, target)
    given = mm.dequantize(w)
    assert torch.equal(given, w.dequantize(given.dtype))


def test_q4_1_of_a_file() -> None:
    """Blocks as GGUF has them: d and m in f16, w = d q + m computed in f32."""
    rng = np.random.default_rng(0)
    d, m = (rng.normal(0, 0.02, (24, 3)).astype(np.float16) for _ in range(2))
    q = rng.integers(0, 16, (24, 3, 32), dtype=np.uint8)
    expected = d.astype(np.float32)[:, :, None] * q.astype(np.float32) + m.astype(np.float32)[:, :, None]
    for scale in ("f16", "f32"):
        w = pack(replace(Q4_1, scale=scale), q.reshape(24, 96), d, offsets=m)
        assert np.array_equal(w.dequantize().numpy(), expected.reshape(24, 96))


def test_one_scale_for_the_whole_tensor() -> None:
    """A number is taken for every row; fused parts have one each."""
    _, tensors = reference.random_inputs(NVFP4, 1)
    whole = pack(NVFP4, **{**tensors, "row_scales": torch.tensor([0.25])})
    parts = pack(NVFP4, **{**tensors, "row_scales": torch.full((24,), 0.25)})
    assert torch.equal(whole.dequantize(), parts.dequantize())
    plain = pack(replace(NVFP4, row_scales=False), tensors["codes"], tensors["scales"])
    assert torch.equal(whole.dequantize(), 0.25 * plain.dequantize())
    assert whole.unpack_row_scales().tolist() == [0.25] * 24 and whole.row_scales.shape == (32,)


def test_tensors_there_and_back() -> None:
    spec = replace(Q4_1, row_scales=True)
    _, tensors = reference.random_inputs(spec, 1)
    w = pack(spec, **tensors)
    assert torch.equal(w.unpack_offsets(), tensors["offsets"])
    assert torch.equal(w.unpack_row_scales(), tensors["row_scales"]) and w.zeros is None and w.unpack_zeros() is None
    loaded = PackedWeight.from_state_dict(w.state_dict())
    assert loaded.spec is w.spec and torch.equal(loaded.dequantize(), w.dequantize())
    assert MatmulSpec.from_dict(spec.to_dict()) == spec


def test_shards() -> None:
    spec = MatmulSpec(32, 256, "u4", 32, zeros="offset", row_scales=True)
    w = pack(spec, **reference.random_inputs(spec, 1)[1])
    for dim in (0, 1):
        parts = [w.shard(dim, i, 2).dequantize() for i in range(2)]
        assert torch.equal(torch.cat(parts, dim), w.dequantize())


@settings(max_examples=25)
@given(
    st.sampled_from(["u2", "u4", "i4", "i7", "f4e2m1", "nf4"]),
    st.sampled_from([(None, 40), (16, 3), (48, 2), (128, 2)]),
    st.integers(1, 40),
    st.sampled_from(["f16", "bf16", "f32", "e4m3"]),
    st.sampled_from(["f16", "bf16"]),
    st.booleans(),
    st.integers(0, 99),
)
def test_cpu(
    weight: str, groups: tuple[int | None, int], n: int, scale: Any, act: Any, row_scales: bool, seed: int
) -> None:
    group, count = groups
    spec = MatmulSpec(
        n, (group or 1) * count, weight, group, zeros="offset", scale=scale, act=act, out="f32", row_scales=row_scales
    )
    x, tensors = reference.random_inputs(spec, 20, seed)
    mm, w = lowbit.compile(spec, "cpu"), pack(spec, **tensors)
    for m in (1, 5, 20):
        expected = reference.matmul(spec, x[:m], **tensors)
        bound = reference.tolerance(spec, x[:m], **tensors, dequantized=m > 4 and act == "bf16")
        assert reference.agrees(mm(x[:m], w), expected, bound).all()


def test_gradient() -> None:
    spec = replace(Q4_1, out="f32", row_scales=True)
    x, tensors = reference.random_inputs(spec, 3)
    w = pack(spec, **tensors)
    mm = lowbit.compile(spec, "cpu")
    x.requires_grad_()
    mm(x, w).sum().backward()
    assert torch.allclose(x.grad.float(), w.dequantize().sum(0).expand(3, -1), rtol=2**-9, atol=2**-9)


@pytest.mark.parametrize(("scale", "rounds"), [("f16", True), ("f32", False)])
def test_wgmma_rounds_offsets_only_beside_scales_of_its_type(scale: Any, rounds: bool) -> None:
    """s q + o needs s in the act type; otherwise o goes by sums of x, with no rounding."""
    spec = MatmulSpec(512, 512, "u4", 128, zeros="offset", scale=scale)
    scaling = KernelPlan(spec, Schedule(64, 1, 4, 1, 128, wgmma=True)).scaling
    assert scaling.rounds_scales == scaling.rounds_zeros == rounds


def test_wide_range() -> None:
    """An offset may overflow the act type, or bring a sum that does back into it; and so may the scale of a row."""
    spec = MatmulSpec(16, 32, "u4", 32, zeros="offset", scale="f32", row_scales=True)

    def is_wide(scale: float, offset: float, row: float, code: int = 15) -> bool:
        numbers = (torch.full((16, 1), number) for number in (scale, offset))
        codes = torch.full((16, 32), code, dtype=torch.uint8)
        scales, offsets = numbers
        return pack(spec, codes, scales, offsets=offsets, row_scales=torch.tensor([row])).wide_range

    assert not is_wide(1.0, 1.0, 1.0)
    assert is_wide(1.0, 1e5, 1.0) and is_wide(1.0, 1.0, 1e5) and is_wide(1e5, 1.0, 1e-5)
    assert not is_wide(8000.0, -8000.0 * 15 + 100, 1.0)
    assert is_wide(8000.0, -8000.0 * 15 + 100, 1.0, code=0)


@pytest.mark.parametrize(
    ("spec", "change", "message"),
    [
        (Q4_1, {"offsets": None}, r"needs offsets; pass offsets="),
        (Q4_1, {"zeros": torch.zeros(24, 3)}, r"has no zeros; drop zeros or set zeros= in the spec"),
        (Q4_1, {"offsets": torch.zeros(24, 2)}, r"offsets must be \[n, groups\] = \[24, 3\], not \[24, 2\]"),
        (Q4_1, {"offsets": torch.full((24, 3), torch.inf)}, r"offsets\[0, 0\] = inf must be finite"),
        (NVFP4, {"row_scales": torch.zeros(3)}, r"row_scales must be \[n\] or \[1\] = \[24\], not \[3\]"),
        (NVFP4, {"row_scales": torch.tensor([torch.nan])}, r"row_scales\[0\] = nan must be finite"),
        (replace(Q4_1, zeros="none"), {}, r"has no offsets; drop offsets or set zeros='offset' in the spec"),
    ],
)
def test_wrong_tensors(spec: MatmulSpec, change: dict[str, Any], message: str) -> None:
    of = Q4_1 if spec.zeros == "none" and not spec.row_scales else spec
    tensors = {**reference.random_inputs(of, 1)[1], **change}
    with pytest.raises(PackError, match=message):
        pack(spec, **tensors)


def test_wrong_specs() -> None:
    with pytest.raises(SpecError, match=r"zeros='offsets' must be one of .*'offset'; did you mean 'offset'\?"):
        replace(Q4_1, zeros="offsets")  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="row_scales=1 must be True or False"):
        replace(Q4_1, row_scales=1)  # type: ignore[arg-type]
    assert "u4[24, 96] f32 scale per 32, offsets, row scales" in str(replace(Q4_1, row_scales=True))
