"""Codes of scales and of zeros or offsets that share their bytes: where they lie, every pair of them on every target
and in every kernel family, and files in which they had a tensor each."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled import compile_dequantize
from emulated import Inputs, dequantize_is_right, matmul_is_right, run_dequantize, run_matmul
from safetensors.torch import save_file
from torch import Tensor, nn

import lowbit
from lowbit.dialect.bilevel import Bilevel
from lowbit.dialect.errors import PackError
from lowbit.dialect.formats.dtypes import dtype
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.base import KernelSchedule
from lowbit.passes.kernels.decode.schedule import IntegerSchedule, Schedule
from lowbit.passes.kernels.persistent.schedule import PrefillSchedule
from lowbit.passes.kernels.prefill_mma.schedule import PrefillMmaSchedule
from lowbit.passes.kernels.registry import family_of, request
from lowbit.passes.kernels.scales.conversion import ScaleConversion
from lowbit.passes.pipeline import compile_kernel
from lowbit.passes.targets import parse_target
from lowbit.pylib import reference
from lowbit.pylib.integrations.saved import saved_specs
from lowbit.pylib.nn.embedding import LowbitEmbedding
from lowbit.pylib.nn.linear import LowbitLinear
from lowbit.pylib.weights.packed import PackedWeight, pack

Q2_K = MatmulSpec.preset("q2_k", 32, 512, out="f32")
SPQR = MatmulSpec.preset("spqr", 32, 512, out="f32", outliers=False, permuted=False)
SPECS = {
    "q2_k": Q2_K,
    "spqr": SPQR,
    "f32": replace(Q2_K, bilevel=Bilevel(groups=16, scale="f32")),
    "offset zeros": replace(Q2_K, scale="u3", bilevel=Bilevel(groups=16, zeros=True)),
}


def every_pair(spec: MatmulSpec, m: int) -> Inputs:
    """Random inputs in which each pair of codes occurs."""
    x, tensors = reference.random_inputs(spec, m)
    scale, other = (slot for slot in spec.given_tensors if slot.shared)
    codes = dtype(spec.scale).codes
    pairs = torch.arange(spec.n * spec.groups, dtype=torch.int32).view(spec.n, spec.groups) * 7 % (codes * codes)
    assert len(pairs.unique()) == codes * codes
    return x, {**tensors, scale.name: pairs % codes, other.name: pairs // codes}


def older(w: PackedWeight) -> dict[str, Tensor]:
    """What earlier versions saved: a tensor for the codes of each."""
    tensors = {name: t for name, t in w.items() if name != "group_codes"}
    for slot in w.spec.given_tensors:
        if slot.shared and w.group_codes is not None:
            tensors[slot.name] = w.group_codes >> slot.bit & (dtype(slot.code).codes - 1)
    about = json.dumps({"format": 3, "spec": w.spec.to_dict()}).encode()
    return {**tensors, "spec": torch.tensor(list(about), dtype=torch.uint8)}


# -- the declaration


@pytest.mark.parametrize("zeros", ["none", "int", "float", "offset"])
@pytest.mark.parametrize("scale", ["u3", "u4", "u6", "u8", "i6", "i8", "e4m3"])
def test_which_codes_share_bytes(scale: Any, zeros: Any) -> None:
    """Two that fit into eight bits; the other tensors are those that `pack` takes."""
    spec = MatmulSpec(32, 512, "u4", 16, zeros=zeros, scale=scale, bilevel=Bilevel(groups=16))
    names, given = ([slot.name for slot in slots] for slots in (spec.tensors, spec.given_tensors))
    if scale not in ("u3", "u4") or zeros not in ("float", "offset"):
        assert spec.tensors == spec.given_tensors
        return
    pair = [slot for slot in spec.given_tensors if slot.shared]
    assert [slot.name for slot in pair] == ["scales", "zeros" if zeros == "float" else "offsets"]
    assert [slot.bit for slot in pair] == [0, int(scale[1])] and {slot.tensor for slot in pair} == {"group_codes"}
    assert names == ["group_codes" if name == "scales" else name for name in given if name != pair[1].name]


def test_where_the_bits_are() -> None:
    spec = MatmulSpec(17, 32, "u4", 16, zeros="offset", scale="u3", bilevel=Bilevel(groups=2))
    scales, offsets = torch.zeros(2, 17, 2, dtype=torch.int32)
    scales[5, 1], offsets[5, 1], offsets[16, 0] = 6, 5, 7
    others = {"scale_scales": torch.ones(17, 1), "offset_scales": torch.ones(17, 1)}
    w = pack(spec, torch.zeros(17, 32, dtype=torch.uint8), scales, offsets=offsets, **others)
    assert w.group_codes is not None and w.scales is w.zeros is w.offsets is None
    assert w.group_codes.dtype is torch.uint8 and w.group_codes.shape == spec.packing.scales_shape
    assert {tuple(at): int(w.group_codes[tuple(at)]) for at in w.group_codes.nonzero().tolist()} == {
        (0, 1, 5): 6 | 5 << 3,
        (1, 0, 0): 7 << 3,
    }
    assert torch.equal(w.unpack_scales(), scales) and torch.equal(w.unpack_tensor("offsets"), offsets)
    assert w.unpack_zeros() is None and (w.unpack_offsets() == offsets).all()


def test_names_of_tensors_that_were_given() -> None:
    _, tensors = reference.random_inputs(Q2_K, 1)
    with pytest.raises(KeyError, match="'group_codes' must be one of codes, scales, scale_scales, "):
        pack(Q2_K, **tensors).unpack_tensor("group_codes")


# -- the values


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_every_pair_of_codes(spec: MatmulSpec) -> None:
    """In torch, on the CPU, and as rows of an embedding."""
    x, tensors = every_pair(spec, 3)
    w = pack(spec, **tensors)
    expected = reference.dequantize(spec, **tensors)
    values = w.dequantize()
    assert (abs(values.double().numpy() - expected) <= 2.0**-20 * (1 + abs(expected))).all()
    assert matmul_is_right(lowbit.compile(spec, "cpu")(x, w), spec, (x, tensors))
    table = LowbitEmbedding.from_packed(pack(replace(spec, out=None), **tensors))
    assert torch.equal(table(torch.arange(spec.n)), values.half())


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_every_pair_dequantized(spec: MatmulSpec) -> None:
    problem = every_pair(spec, 1)
    given = run_dequantize(compile_dequantize(spec, parse_target("sm_80")), spec, problem)
    assert dequantize_is_right(given, spec, problem)
    if spec.zeros == "offset" and not (spec.bilevel and spec.bilevel.zeros):
        assert torch.equal(given, pack(spec, **problem[1]).dequantize(torch.float16))


FAMILIES: dict[str, tuple[KernelSchedule, str]] = {
    "spread": (Schedule(1, 1, 1, 2, 256, 2, spread_k=True), "sm_90a"),
    "decode": (Schedule(8, 2, 1, 1, 256, 2), "sm_80"),
    "wgmma": (Schedule(16, 1, 4, 1, 256, 2, wgmma=True), "sm_90a"),
    "preloaded": (Schedule(16, 1, 4, 1, 256, 1, wgmma=True, preload_weights=True), "sm_90a"),
    "prefill": (PrefillSchedule(16), "sm_90a"),
    "prefill_mma": (PrefillMmaSchedule(32), "sm_80"),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("spec", [Q2_K, SPQR], ids=["q2_k", "spqr"])
def test_every_pair_in_every_family(spec: MatmulSpec, family: str) -> None:
    schedule, target = FAMILIES[family]
    problem = every_pair(spec, min(schedule.tokens, 5))
    kernel = compile_kernel(request(spec, parse_target(target), schedule))
    y = run_matmul(kernel, spec, problem, racecheck=isinstance(schedule, Schedule))
    assert matmul_is_right(y, spec, problem, **family_of(schedule).rounding(spec, schedule))


def test_every_pair_in_integers() -> None:
    spec = replace(Q2_K, k=4096, group_size=128, bilevel=Bilevel(groups=4))
    schedule, problem = IntegerSchedule(1, 1, 1, 2, 256, 2), every_pair(spec, 1)
    y = run_matmul(compile_kernel(request(spec, parse_target("sm_80"), schedule)), spec, problem)
    assert matmul_is_right(y, spec, problem)


def _exchanged(right: Any) -> Any:
    """Reads the other code of the byte."""
    return lambda self, slot, *rest: right(self, replace(slot, bit=slot.bits - slot.bit), *rest)


def _wide(right: Any) -> Any:
    """Reads a bit too many."""
    return lambda self, slot, *rest: right(self, replace(slot, code="u5") if not slot.bit else slot, *rest)


@pytest.mark.parametrize("spec", [Q2_K, SPQR], ids=["q2_k", "spqr"])
@pytest.mark.parametrize("wrong", [_exchanged, _wide])
def test_bits_read_wrongly(spec: MatmulSpec, wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScaleConversion, "two_level", wrong(ScaleConversion.two_level))
    problem = every_pair(spec, 2)
    y = run_matmul(compile_kernel(request(spec, parse_target("sm_80"), Schedule(8, 1, 1, 1, 256, 1))), spec, problem)
    assert not matmul_is_right(y, spec, problem)


def test_shards() -> None:
    w = pack(SPQR, **every_pair(SPQR, 1)[1])
    for dim in (0, 1):
        parts = [w.shard(dim, i, 2).dequantize() for i in range(2)]
        assert torch.equal(torch.cat(parts, dim), w.dequantize())


# -- files


@pytest.mark.parametrize("spec", [Q2_K, SPQR], ids=["q2_k", "spqr"])
def test_files_of_earlier_versions(spec: MatmulSpec) -> None:
    w = pack(spec, **every_pair(spec, 1)[1])
    loaded = PackedWeight.from_state_dict(older(w))
    assert loaded.spec is w.spec and list(loaded) == list(w) and all(torch.equal(loaded[name], w[name]) for name in w)
    with pytest.raises(PackError, match=r"tensors must be codes, group_codes, .* and spec; got .*offset|zero"):
        PackedWeight.from_state_dict({**older(w), "spec": w.state_dict()["spec"]})


def test_models_of_earlier_versions() -> None:
    w = pack(replace(SPQR, out=None), **every_pair(SPQR, 1)[1])
    state = {f"0.{'_extra_state' if name == 'spec' else name}": t for name, t in older(w).items()}
    model = nn.Sequential(LowbitLinear.empty(w.spec))
    model.load_state_dict(state)
    assert torch.equal(model[0].packed.dequantize(), w.dequantize())
    del state["0.zeros"]
    with pytest.raises(RuntimeError, match=r"Missing key.*0\.group_codes"):
        model.load_state_dict(state)


def test_checkpoints_of_earlier_versions(tmp_path: Path) -> None:
    """lowbit puts the codes together, transformers can't."""
    w, file = pack(SPQR, **every_pair(SPQR, 1)[1]), tmp_path / "model.safetensors"
    save_file({f"up.{'_extra_state' if name == 'spec' else name}": t for name, t in older(w).items()}, file)
    assert torch.equal(lowbit.open_checkpoint(tmp_path).load("up").dequantize(), w.dequantize())
    model = nn.Module()
    model.base_model_prefix = "model"  # type: ignore[assignment]
    with pytest.raises(PackError, match=r"up: an earlier version saved scales and zeros apart; load .* save the model"):
        saved_specs(model, lowbit.open_checkpoint(tmp_path))


def test_damaged_files() -> None:
    w = pack(SPQR, **every_pair(SPQR, 1)[1])
    damaged = {**w.state_dict(), "group_codes": torch.full_like(w["group_codes"], 64)}
    with pytest.raises(PackError, match="saved group_codes hold 64 at 0: codes of u6 must be at most 63"):
        PackedWeight.from_state_dict(damaged)
    with pytest.raises(PackError, match="saved zeros hold 8 at 0: codes of u3 must be at most 7"):
        PackedWeight.from_state_dict({**older(w), "zeros": torch.full_like(w["group_codes"], 8)})
