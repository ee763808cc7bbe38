"""Matmuls on a CPU in C: bit for bit what Python computes there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from shutil import copytree

import pytest
import torch
from c_runtime import CMatmul, Failed
from experts_apart import experts_apart
from exported import read_manifest, seal
from torch import Tensor

import lowbit
from lowbit.dialect.errors import TargetError
from lowbit.dialect.spec import MatmulSpec
from lowbit.dialect.top_k import TopK
from lowbit.passes.targets import parse_target
from lowbit.pylib.aot.cpu import LEVELS
from lowbit.pylib.experts.routing import route
from lowbit.pylib.reference.inputs import random_inputs, random_residual
from lowbit.pylib.runtime.cpu import CpuMatmul
from lowbit.pylib.runtime.cpu_experts import ALL_SLOTS
from lowbit.pylib.runtime.expert_matmul import expert_matmul
from lowbit.pylib.torch_types import TORCH
from lowbit.pylib.weights.packed import pack

S = MatmulSpec
SPECS = {
    "u4": S(200, 384, "u4", group_size=128, zeros="int"),
    "i3": S(37, 256, "i3", group_size=64, out="f32", bias=True),
    "nf4": S(48, 192, "nf4", group_size=64, epilogue="residual"),
    "f6": S(33, 272, "f6e3m2"),
    "mx": S(64, 96, "f4e2m1", group_size=32, scale="e8m0", act="bf16", epilogue="silu_mul"),
    "u2": S(16, 160, "u2", group_size=32, zeros="float", act="bf16", outliers=True, permuted=True),
}
ROWS = (1, 7, 64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exported")
    lowbit.export(SPECS, "cpu", path)
    return path


@pytest.mark.parametrize("name", SPECS)
def test_results_are_those_of_python(folder: Path, name: str) -> None:
    spec, mm = SPECS[name], lowbit.compile(SPECS[name], "cpu")
    x, tensors = random_inputs(spec, max(ROWS), seed=1)
    w = pack(spec, **tensors)
    with CMatmul(folder, name) as c:
        for m in ROWS:
            others = random_residual(spec, m)
            y = torch.full((m, spec.outputs), torch.nan, dtype=TORCH[spec.out_dtype])
            c.multiply(x[:m], w.tensors, y, list(others.values()))
            assert torch.equal(y, mm(x[:m], w, **others))
        assert torch.equal(c.dequantize(w.tensors, torch.zeros(spec.n, spec.k, dtype=x.dtype)), mm.dequantize(w))


EIGHT_BITS = {
    "i8": S(200, 384, "u4", group_size=128, zeros="int", compute="i8"),
    "f8": S(40, 256, "f6e3m2", compute="f8e4m3", act="bf16", bias=True),
    "from_8_rows": S(32, 160, "i3", group_size=32, compute="i8", compute_from=8, epilogue="residual", out="f32"),
    "gated": S(64, 96, "f4e2m1", group_size=32, scale="e8m0", compute="f8e4m3", epilogue="silu_mul"),
    "folded": S(48, 256, "u4", group_size=64, zeros="int", compute="f8e4m3", fold_scales=True),
    "folded_in_i8": S(48, 256, "u4", group_size=64, zeros="int", compute="i8", fold_scales=True),
    "folded_table": S(48, 256, "nf4", group_size=64, compute="f8e4m3", fold_scales=True, act="bf16"),
}


def eight_bit_rows(spec: MatmulSpec, m: int) -> Tensor:
    """Returns x [m, k] with what quantizing has to get right: zeros, the least peak, ties, an infinity and a NaN."""
    x = random_inputs(spec, m, seed=2)[0]
    for row, value in enumerate((0.0, 2.0**-120, 127.0, torch.inf, torch.nan)[: max(0, m - 1)]):
        x[row, 1:] = torch.arange(spec.k - 1) / 2 if value == 127 else x[row, 1:] * (value == value and value > 1)
        x[row, 0] = value
    return x


@pytest.fixture(scope="module")
def in_eight_bits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("eight_bits")
    lowbit.export(EIGHT_BITS, "cpu", path)
    return path


@pytest.mark.parametrize("name", EIGHT_BITS)
def test_eight_bits(in_eight_bits: Path, name: str) -> None:
    """Values and scales of x, too: NaN where Python has it."""
    spec, mm = EIGHT_BITS[name], lowbit.compile(EIGHT_BITS[name], "cpu")
    w = pack(spec, **random_inputs(spec, 1, seed=1)[1])
    with CMatmul(in_eight_bits, name) as c:
        for m in (*ROWS, 200, 1100):
            x, others = eight_bit_rows(spec, m), random_residual(spec, m)
            y = torch.full((m, spec.outputs), 7.0, dtype=TORCH[spec.out_dtype])
            c.multiply(x, w.tensors, y, list(others.values()))
            expected = mm(x, w, **others)
            assert torch.equal(y.isnan(), expected.isnan())
            assert torch.equal(y.nan_to_num(), expected.nan_to_num())
        assert torch.equal(c.dequantize(w.tensors, torch.zeros(spec.n, spec.k, dtype=x.dtype)), mm.dequantize(w))


EXPERTS = {
    "experts": S(4 * 48, 96, "u4", group_size=32, zeros="int", bias=True, experts=4),
    "gated_experts": S(2 * 64, 96, "nf4", group_size=32, experts=2, epilogue="silu_mul", act="bf16"),
    "eight_bit_experts": S(3 * 32, 96, "u4", group_size=32, experts=3, compute="i8", compute_from=5, act="bf16"),
    "permuted_experts": S(3 * 32, 160, "i3", group_size=32, experts=3, epilogue="gelu_mul", permuted=True),
    "outliers": S(4 * 48, 160, "u3", group_size=16, zeros="float", experts=4, outliers=True, bias=True),
    "gated_outliers": S(3 * 32, 96, "f6e3m2", experts=3, outliers=True, act="bf16", epilogue="silu_mul"),
    "permuted_outliers": S(3 * 80, 160, "nf4", group_size=32, experts=3, outliers=True, permuted=True, out="f32"),
}


@pytest.fixture(scope="module")
def of_experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("experts")
    lowbit.export(EXPERTS, "cpu", path)
    return path


@pytest.mark.parametrize("name", EXPERTS)
def test_experts(of_experts: Path, name: str) -> None:
    """40 tokens with two experts each, of which one has none: few slots of some experts, many of others."""
    spec = EXPERTS[name]
    x, tensors = random_inputs(spec, 40)
    w, ids = pack(spec, **tensors), torch.randint(0, spec.experts, (40, 2)) * (torch.arange(80).view(40, 2) > 70)
    ids[3, 1] = -1
    with CMatmul(of_experts, name) as c:
        routing = route(ids, spec.experts, c.expert_tile(80))
        y = torch.full((80, spec.outputs), torch.nan, dtype=TORCH[spec.out_dtype])
        c.multiply(x, w.tensors, y, [routing.rows, routing.tiles])
        expected = expert_matmul(w.spec, parse_target("cpu"))(x, routing.rows, routing.tiles, w.tensors, ALL_SLOTS)
        assert torch.equal(y[:79], expected[:79]) and y[79].isnan().all()
        assert torch.equal(c.dequantize(w.tensors, torch.zeros(spec.n, spec.k, dtype=x.dtype)), w.dequantize(x.dtype))


BY_IDS = {
    "each": S(4 * 48, 96, "u4", group_size=32, zeros="int", bias=True, experts=4, top_k=TopK(2, ids="i32")),
    "gated": S(4 * 32, 96, "nf4", group_size=32, experts=4, epilogue="silu_mul", act="bf16", top_k=TopK(3)),
    "permuted": S(4 * 32, 160, "i3", group_size=32, experts=4, permuted=True, epilogue="gelu_mul", top_k=TopK(2)),
    "swiglu": S(4 * 32, 96, "u4", group_size=32, experts=4, bias=True, epilogue="swiglu_oai", top_k=TopK(4)),
    "added": S(4 * 32, 160, "i3", group_size=32, experts=4, top_k=TopK(3, weights="f32")),
    "permuted_added": S(
        4 * 32, 160, "u4", group_size=32, experts=4, permuted=True, bias=True, top_k=TopK(2, weights="f32")
    ),
    "added_in_bf16": S(4 * 32, 96, "u4", group_size=32, experts=4, act="bf16", top_k=TopK(2, weights="bf16")),
    "added_in_f32": S(4 * 32, 96, "u4", group_size=32, experts=4, out="f32", top_k=TopK(2, "i32", "f16")),
    "outliers": S(4 * 48, 96, "u4", group_size=32, experts=4, outliers=True, epilogue="silu_mul", top_k=TopK(2)),
    "outliers_added": S(
        4 * 32, 160, "i3", group_size=32, experts=4, outliers=True, permuted=True, top_k=TopK(3, weights="f32")
    ),
}


@pytest.fixture(scope="module")
def by_ids(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("by_ids")
    lowbit.export(BY_IDS, "cpu", path)
    return path


def random_ids(spec: MatmulSpec, tokens: int) -> tuple[Tensor, list[Tensor]]:
    """Returns ids [tokens, count], of which some are of no expert here, and the inputs of a call."""
    assert spec.top_k
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(-1, spec.experts + 1, (tokens, spec.top_k.count), generator=generator)
    ids[0] = -1
    inputs = [ids.to(torch.int32 if spec.top_k.ids == "i32" else torch.int64)]
    if kind := spec.top_k.weights:
        inputs.append(torch.rand(ids.shape, generator=generator).to(TORCH[kind]))
    return ids, inputs


def of_each_id(spec: MatmulSpec, ids: Tensor, x: Tensor, tensors: dict[str, Tensor]) -> Tensor:
    """Returns what the expert of each id makes of its row of x, alone as Python runs it; NaN where it is elsewhere."""
    one, weights = experts_apart(spec, tensors, "cpu")
    found = torch.full((ids.numel(), spec.outputs), torch.nan, dtype=TORCH[spec.out_dtype])
    for slot, expert in enumerate(ids.flatten().tolist()):
        if 0 <= expert < spec.experts:
            found[slot] = one(x[slot : slot + 1], weights[expert])
    return found


@pytest.mark.parametrize("name", BY_IDS)
def test_experts_by_ids(by_ids: Path, name: str) -> None:
    """7 tokens, of which the first has no expert here."""
    spec = BY_IDS[name]
    ids, inputs = random_ids(spec, 7)
    x, tensors = random_inputs(replace(spec, top_k=None), ids.numel() if len(inputs) == 2 else 7)
    w = pack(replace(spec, top_k=None), **tensors)
    each = of_each_id(spec, ids, x if len(inputs) == 2 else x.repeat_interleave(ids.shape[1], 0), tensors)
    y = torch.full((7 if len(inputs) == 2 else ids.numel(), spec.outputs), torch.nan, dtype=each.dtype)
    with CMatmul(by_ids, name) as c:
        assert c.expert_tile(7) == 0
        c.multiply(x, w.tensors, y, inputs)
        with pytest.raises(Failed, match=r"x_rows=\d+ and m=\d+ must be"):
            c.multiply(x[:3], w.tensors, y, inputs)
    if len(inputs) == 1:
        assert torch.equal(y.nan_to_num(7.0), each.nan_to_num(7.0)) and y[0].isnan().all()
        return
    sums = torch.zeros(7, spec.outputs)
    for place, row in enumerate(each.view(7, -1, spec.outputs).unbind(1)):
        sums += row.float().nan_to_num(0.0) * inputs[1][:, place : place + 1].float()
    assert torch.equal(y, sums.to(y.dtype)) and not y[0].any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows, tiles: rows.__setitem__(0, 5), "rows.0. = 5 is no row of x, which has 5"),
        (lambda rows, tiles: tiles.__setitem__((1, 0), 4), "tiles.1. has slots 0 to . of 5, of expert 4 of 4"),
        (lambda rows, tiles: tiles.__setitem__((1, 2), 6), "tiles.1. has slots 0 to 6 of 5"),
        (lambda rows, tiles: tiles.__setitem__((0, 0), 6), "tiles.0. says 6 token tiles, of 5 slots"),
    ],
)
def test_tables_of_experts_that_point_elsewhere(
    of_experts: Path, change: Callable[[Tensor, Tensor], None], message: str
) -> None:
    spec = EXPERTS["experts"]
    x, tensors = random_inputs(spec, 5)
    routing = route(torch.tensor([[0], [1], [0], [2], [3]]), spec.experts, ALL_SLOTS)
    change(routing.rows, routing.tiles)
    with CMatmul(of_experts, "experts") as c, pytest.raises(Failed, match=message):
        c.multiply(x, pack(spec, **tensors).tensors, torch.zeros(5, 48).half(), [routing.rows, routing.tiles])


@pytest.mark.parametrize("level", LEVELS)
def test_levels_of_processors(folder: Path, level: str, tmp_path: Path) -> None:
    """The code for lesser processors, in a folder that has no other."""
    other = copytree(folder, tmp_path / "folder")
    manifest = read_manifest(other)
    for matmul in manifest["matmuls"]:
        matmul["targets"] = [target for target in matmul["targets"] if target["target"] == level]
    seal(other, manifest)
    for name in ("u4", "mx"):
        try:
            mm = CpuMatmul(SPECS[name], level)
        except TargetError as error:
            pytest.skip(str(error))
        x, tensors = random_inputs(SPECS[name], 20)
        w = pack(SPECS[name], **tensors)
        with CMatmul(other, name) as c:
            assert c.target == level
            for m in (2, 20):
                y = torch.full((m, SPECS[name].outputs), torch.nan, dtype=TORCH[SPECS[name].out_dtype])
                assert torch.equal(c.multiply(x[:m], w.tensors, y), mm.matmul(x[:m], w.tensors))


def test_many_rows_go_in_slabs(folder: Path) -> None:
    """1100 rows take two calls of the program."""
    spec = SPECS["nf4"]
    x, tensors = random_inputs(spec, 1100)
    w, others = pack(spec, **tensors), random_residual(spec, 1100)
    expected = lowbit.compile(spec, "cpu")(x, w, **others)
    with CMatmul(folder, "nf4") as c:
        y = c.multiply(x, w.tensors, torch.zeros_like(expected), list(others.values()))
    assert torch.equal(y, expected)
