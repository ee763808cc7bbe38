"""What is exported for GPUs, executed by the emulator from the folder alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from c_runtime import as_bytes
from exported import Exported
from torch import Tensor

import lowbit
from lowbit.dialect.spec import MatmulSpec
from lowbit.dialect.top_k import RouterWeights, TopK
from lowbit.passes.targets import parse_target
from lowbit.pylib.experts.routing import route
from lowbit.pylib.reference.inputs import random_inputs, random_residual
from lowbit.pylib.runtime.expert_matmul import expert_matmul
from lowbit.pylib.runtime.top_k_experts import EmulatorLaunches
from lowbit.pylib.torch_types import TORCH
from lowbit.pylib.weights.packed import PackedWeight, pack

S = MatmulSpec
SPECS = {
    "usual": S(48, 256, "u4", group_size=64, zeros="int", bias=True),
    "residual": S(32, 128, "i3", group_size=32, epilogue="residual", act="bf16"),
    "permuted": S(32, 128, "u4", group_size=32, permuted=True),
    "eight_bits": S(32, 128, "u4", group_size=32, compute="i8", compute_from=17),
    "folded": S(32, 128, "u4", group_size=32, compute="f8e4m3", fold_scales=True),
    "experts": S(64, 128, "u4", group_size=32, experts=2, epilogue="silu_mul"),
    "permuted_experts": S(64, 128, "u4", group_size=32, experts=2, permuted=True, epilogue="silu_mul"),
    "experts_in_8_bits": S(64, 128, "u4", group_size=32, experts=2, compute="i8"),
}


def run(
    folder: Path, spec: MatmulSpec, target: str, x: Tensor, w: PackedWeight, **others: Tensor
) -> tuple[Tensor, list[str]]:
    """Returns y and the kernels that were started, without their numbers."""
    exported = Exported(folder, "it", target)
    m = len(others["rows"]) if "rows" in others else len(x)
    y = torch.full((m, spec.outputs), torch.nan, dtype=TORCH[spec.out_dtype])
    arrays = {"x": as_bytes(x), "y": as_bytes(y)}
    exported.run(arrays | {name: as_bytes(t) for name, t in {**w, **others}.items()}, m, len(x))
    return y, [name.partition("_")[2] for name in exported.started]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """Folders that were exported, by spec and target."""
    return {}


def exported_to(folders: dict[tuple[str, str], Path], name: str, target: str, tmp_path: Path) -> Path:
    if (name, target) not in folders:
        lowbit.export({"it": SPECS[name]}, target, tmp_path)
        folders[name, target] = tmp_path
    return folders[name, target]


@pytest.mark.parametrize(
    ("name", "target", "m", "kernels"),
    [
        ("usual", "sm_90a", 1, ["m1"]),
        ("usual", "sm_90a", 130, ["m160"]),
        ("usual", "sm_80", 70, ["m64", "m8"]),
        ("residual", "sm_80", 70, ["m64", "m8"]),
        ("permuted", "sm_80", 3, ["permute", "m8"]),
        ("eight_bits", "sm_80", 3, ["m8"]),
        ("eight_bits", "sm_80", 20, ["quantize", "m32"]),
    ],
)
def test_rows(
    name: str, target: str, m: int, kernels: list[str], folders: dict[tuple[str, str], Path], tmp_path: Path
) -> None:
    spec = SPECS[name]
    x, tensors = random_inputs(spec, m)
    w, others = pack(spec, **tensors), random_residual(spec, m)
    y, started = run(exported_to(folders, name, target, tmp_path), spec, target, x, w, **others)
    assert started == kernels
    assert torch.equal(y, lowbit.compile(spec, f"emulator:{target}")(x, w, **others))


@pytest.mark.parametrize("name", ["experts", "permuted_experts", "experts_in_8_bits"])
def test_experts(name: str, folders: dict[tuple[str, str], Path], tmp_path: Path) -> None:
    """5 tokens of 2 experts each: 10 slots."""
    spec, target = SPECS[name], parse_target("emulator:sm_80")
    folder = exported_to(folders, name, "sm_80", tmp_path)
    x, tensors = random_inputs(spec, 5)
    w = pack(spec, **tensors)
    tile = Exported(folder, "it", "sm_80").range_of(10)["tile"]
    routing = route(torch.tensor([[0, 1], [1, 0], [0, 1], [1, 1], [0, 1]]), spec.experts, tile)
    y, started = run(folder, spec, "sm_80", x, w, rows=routing.rows, tiles=routing.tiles)
    assert len(started) == 1 + (spec.permuted or spec.compute is not None)
    assert torch.equal(y, expert_matmul(w.spec, target)(x, routing.rows, routing.tiles, w.tensors, tile))


IDS = torch.tensor([[1, 0], [1, 1], [-1, 0]])


@pytest.mark.parametrize("weights", [None, "f32"])
def test_experts_by_ids(weights: RouterWeights | None, tmp_path: Path) -> None:
    """3 tokens, of which one has an expert elsewhere."""
    spec = S(64, 128, "u4", group_size=32, experts=2, top_k=TopK(2, weights=weights))
    x, tensors = random_inputs(replace(spec, top_k=None), 6 if weights else 3)
    w, rows = pack(replace(spec, top_k=None), **tensors), 3 if weights else 6
    others = {"ids": IDS} | ({"router_weights": torch.rand(IDS.shape)} if weights else {})
    lowbit.export({"it": spec}, "sm_90a", tmp_path)
    exported = Exported(tmp_path, "it", "sm_90a")
    y = torch.full((rows, spec.outputs), torch.nan, dtype=torch.float16)
    arrays = {"x": x, "y": y, **w, **others}
    exported.run({name: as_bytes(t) for name, t in arrays.items()}, rows, len(x))
    expected = EmulatorLaunches(spec, parse_target("emulator:sm_90a")).run(x, rows, w.tensors, tuple(others.values()))
    there = torch.ones(rows, dtype=torch.bool) if weights else (IDS >= 0).flatten()
    assert torch.equal(y[there], expected[there]) and y[there].isfinite().all()


@pytest.mark.parametrize("name", ["usual", "residual", "permuted", "eight_bits", "experts", "permuted_experts"])
def test_dequantize(name: str, folders: dict[tuple[str, str], Path], tmp_path: Path) -> None:
    spec = SPECS[name]
    w = pack(spec, **random_inputs(spec, 1)[1])
    exported = Exported(exported_to(folders, name, "sm_80", tmp_path), "it", "sm_80")
    y = torch.full((spec.n, spec.k), torch.nan, dtype=TORCH[spec.act])
    exported.dequantize({"y": as_bytes(y)} | {name: as_bytes(t) for name, t in w.items()})
    assert torch.equal(y, w.dequantize(TORCH[spec.act]))


@pytest.mark.parametrize(
    ("name", "target"),
    [("usual", "sm_80"), ("residual", "sm_80"), ("permuted_experts", "sm_80"), ("folded", "sm_90a")],
)
def test_packing(name: str, target: str, folders: dict[tuple[str, str], Path], tmp_path: Path) -> None:
    """Byte for byte what `pack` gives; i3 has signed codes, and the experts are gated."""
    spec = SPECS[name]
    tensors = random_inputs(spec, 1)[1]
    exported = Exported(exported_to(folders, name, target, tmp_path), "it", target)
    codes = pack(spec, **tensors)["codes"]
    packed = torch.full_like(codes, -1)
    exported.pack_codes(as_bytes(tensors["codes"].to(torch.int8)), as_bytes(packed))
    assert torch.equal(packed, codes)


def test_every_number_of_rows_has_a_kernel_of_ours(folders: dict[tuple[str, str], Path], tmp_path: Path) -> None:
    """Python lets the vendor's matmul serve many rows; a folder has none."""
    exported = Exported(exported_to(folders, "usual", "sm_80", tmp_path), "it", "sm_80")
    (target,) = exported.about["targets"]
    ends = [(each["first"], each["last"]) for each in target["ranges"]]
    assert ends[0][0] == 1 and ends[-1][1] is None
    assert all(first == last + 1 for (_, last), (first, _) in pairwise(ends))
    assert all(each["launches"] for each in target["ranges"]) and target["rounds_weights"]


def test_weights_of_a_wide_range(tmp_path: Path) -> None:
    """Values beyond f16: with wide_range=True no kernel rounds a weight, so y is finite."""
    spec = S(32, 128, "u4", group_size=32, scale="f32")
    x, tensors = random_inputs(spec, 130)
    tensors["scales"] = tensors["scales"] * 1e7
    w = pack(spec, **tensors)
    assert w.wide_range
    manifest = lowbit.export({"it": spec}, "sm_80", tmp_path, wide_range=True)
    assert not manifest["matmuls"][0]["targets"][0]["rounds_weights"]
    x = x * 1e-4
    y, _ = run(tmp_path, spec, "sm_80", x, w)
    assert torch.allclose(y.double(), x.double() @ w.dequantize().double().T, rtol=1e-2, atol=2.0)
