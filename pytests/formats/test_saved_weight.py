"""Saved weights: they say what they are, older ones are read, and damaged ones are refused without harm."""

from __future__ import annotations

import io
import json
import random
import resource
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import lowbit
from lowbit.dialect.errors import PackError
from lowbit.dialect.spec import MatmulSpec, interned
from lowbit.pylib import reference
from lowbit.pylib.weights.packed import PackedWeight, pack
from lowbit.pylib.weights.saved import WEIGHT_FIELDS

SPECS: list[MatmulSpec] = [
    MatmulSpec(40, 96, "u4", 32, zeros="int", bias=True, out="f32"),
    MatmulSpec(17, 100, "f8e4m3", 50, scale="e8m0", act="bf16"),
    MatmulSpec(16, 96, "lut3", None, zeros="float", scale="e4m3", table=(0.1, 2, 3, 4, 5, 6, 7, 1 / 3)),
    MatmulSpec(33, 64, "i5", 64, zeros="int", act="bf16", scale="bf16"),
]
SPEC = SPECS[0]


def weight(spec: MatmulSpec = SPEC) -> PackedWeight:
    return pack(spec, **reference.random_inputs(spec, 1)[1])


def text(value: object) -> Tensor:
    return torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)


def format_2(w: PackedWeight) -> dict[str, Tensor]:
    """What earlier versions saved: a spec without act and out, and scales in types of 8 bits."""
    about = {name: getattr(w.spec, name) for name in WEIGHT_FIELDS}
    scales = w.scales.view(w.unpack_scales().dtype)
    return {**w, "scales": scales, "spec": text({"format": 2, **about})}


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_file_says_what_it_is(spec: MatmulSpec) -> None:
    file = io.BytesIO()
    torch.save(weight(spec).state_dict(), file)
    file.seek(0)
    loaded = PackedWeight.from_state_dict(torch.load(file, weights_only=True))
    assert loaded.spec == spec and loaded.spec is interned(replace(spec))
    assert all(torch.equal(t, loaded[name]) for name, t in weight(spec).items())


def test_the_order_of_arguments_of_earlier_versions() -> None:
    loaded = PackedWeight.from_state_dict(SPEC, weight().state_dict())  # type: ignore[arg-type]
    assert loaded.spec == SPEC and torch.equal(loaded.codes, weight().codes)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_files_of_earlier_versions(spec: MatmulSpec) -> None:
    old = format_2(weight(spec))
    with pytest.raises(PackError, match=r"not note act and out; load it with from_state_dict\(tensors, spec=...\)"):
        PackedWeight.from_state_dict(old)
    loaded = PackedWeight.from_state_dict(old, spec)
    assert loaded.spec == spec and all(torch.equal(t, loaded[name]) for name, t in weight(spec).items())


def test_another_format() -> None:
    state = {**weight().state_dict(), "spec": text({"format": 1})}
    with pytest.raises(PackError, match="saved in format 1, this is 4; pack it again"):
        PackedWeight.from_state_dict(state)


def test_another_act() -> None:
    """A weight can be loaded for another act or out where its tensors are the same."""
    state = weight().state_dict()
    assert PackedWeight.from_state_dict(state, replace(SPEC, act="bf16", out="f32")).spec.act == "bf16"
    with pytest.raises(PackError, match=r"packed bias must be torch.bfloat16 \(40,\), not torch.float32 .*another act"):
        PackedWeight.from_state_dict(state, replace(SPEC, out="bf16"))


def test_integer_zeros_that_another_act_does_not_reach() -> None:
    spec = MatmulSpec(16, 64, "u4", zeros="int")
    codes, scales = torch.zeros(16, 64, dtype=torch.uint8), torch.ones(16)
    for zero in (128, 129):
        state = pack(spec, codes, scales, torch.full((16,), zero)).state_dict()
        assert PackedWeight.from_state_dict(state).spec.act == "f16"
        if zero == 128:
            PackedWeight.from_state_dict(state, replace(spec, act="bf16"))
            continue
        with pytest.raises(PackError, match=r"saved zeros hold 129 at 0: for act='bf16' .* must be at most 128"):
            PackedWeight.from_state_dict(state, replace(spec, act="bf16"))


@pytest.mark.parametrize(
    ("spec", "name", "value", "message"),
    [
        (SPECS[0], "scales", float("nan"), "saved scales hold nan at 5: must be finite"),
        (SPECS[0], "bias", float("inf"), "saved bias hold inf at 5: must be finite"),
        (SPECS[1], "scales", 255, "saved scales hold nan at 5: must be finite"),
        (SPECS[2], "scales", 0x7F, "saved scales hold nan at 5: must be finite"),
        (SPECS[2], "scales", 0xFF, "saved scales hold nan at 5: must be finite"),
        (SPECS[2], "zeros", float("-inf"), "saved zeros hold -inf at 5: must be finite"),
        (SPECS[3], "zeros", 129, "saved zeros hold 129 at 5: for act='bf16' integer zeros must be at most 128"),
    ],
)
def test_values_that_pack_refuses(spec: MatmulSpec, name: str, value: float, message: str) -> None:
    state = weight(spec).state_dict()
    state[name] = state[name].clone()
    state[name].view(-1)[5] = value
    with pytest.raises(PackError, match=message):
        PackedWeight.from_state_dict(state)


def test_nan_in_padding() -> None:
    """It would be multiplied by 0, which is no 0."""
    state = weight(SPECS[1]).state_dict()
    codes = state["codes"].clone()
    packing = SPECS[1].packing
    assert packing.padded_k > packing.k
    codes.view(torch.uint8).masked_fill_(codes.view(torch.uint8) == 0, 0x7F)
    with pytest.raises(PackError, match="saved codes hold bits where there is padding"):
        PackedWeight.from_state_dict({**state, "codes": codes})


@pytest.mark.parametrize("convert", ["half", "bfloat16", "float"])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_module_that_is_converted(spec: MatmulSpec, convert: str) -> None:
    """Bytes stay as they are; other types are refused by name."""
    module = torch.nn.Module()
    for name, t in weight(spec).items():
        module.register_buffer(name, t)
    getattr(module, convert)()
    assert all(module.get_buffer(name).dtype == t.dtype for name, t in weight(spec).items() if t.element_size() == 1)
    changed = [name for name, t in weight(spec).items() if module.get_buffer(name).dtype != t.dtype]
    if not changed:
        PackedWeight(spec, dict(module.named_buffers()))
        return
    with pytest.raises(PackError, match=rf"packed {changed[0]} must be .* Module.half\(\), .bfloat16\(\) or"):
        PackedWeight(spec, dict(module.named_buffers()))


def fake(t: Tensor) -> Tensor:
    with FakeTensorMode() as mode:
        return mode.from_tensor(t)


HARM: dict[str, Any] = {
    "sparse": lambda t: t.to_sparse(),
    "meta": lambda t: t.to("meta"),
    "fake": fake,
    "expanded": lambda t: t.flatten()[:1].clone().expand(t.numel()).view(t.shape),
    "far too long": lambda t: t.flatten()[:1].clone().expand(10**9),
    "no memory": lambda t: torch._efficientzerotensor(t.shape, dtype=t.dtype),
    "nothing": lambda t: t.flatten()[:0],
    "transposed": lambda t: t.transpose(0, -1),
    "complex": lambda t: t.to(torch.complex64),
    "bool": lambda t: t.bool(),
    "float64": lambda t: t.double(),
    "scalar": lambda t: t.flatten()[0],
    "freed": lambda t: _freed(t),
}


def _freed(t: Tensor) -> Tensor:
    result = t.clone()
    result.untyped_storage().resize_(0)
    return result


@pytest.mark.parametrize("name", ["codes", "scales", "zeros", "spec"])
@pytest.mark.parametrize("harm", HARM)
def test_tensors_that_are_none(name: str, harm: str) -> None:
    state = weight().state_dict()
    state[name] = HARM[harm](state[name])
    used = _peak()
    try:
        loaded = PackedWeight.from_state_dict(state)
    except PackError:
        pass
    else:
        assert all(torch.equal(t, loaded[key]) for key, t in weight().items())
    assert _peak() - used < 64 << 20


def _peak() -> int:
    """The most memory that this process has had, in bytes."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@pytest.mark.parametrize(
    "spec",
    [
        b"[" * 60000,
        b'{"format": 3, "spec": ' * 2000,
        b"{}",
        b'{"format": 3}',
        b'{"format": 3, "spec": 7}',
        b'{"format": 3, "spec": {"version": 2, "n": 16, "k": 64, "weight": "u4"}}',
        b'{"format": 3, "spec": {"version": 1, "n": 16, "k": 64}}',
        b'{"format": 3, "spec": {"version": 1, "n": 16, "k": 64, "weight": "u4", "more": 1}}',
        b'{"format": 3, "spec": {"version": 1, "n": 1073741824, "k": 1073741824, "weight": "u4", "group_size": 17}}',
        b'{"format": 3, "spec": {"version": 1, "n": 1073741824, "k": 1073741824, "weight": "f8e4m3"}}',
        b'{"format": 3, "spec": {"version": 1, "n": 16, "k": 64, "weight": "lut1", "table": [1, 1%b]}}' % (b"0" * 400),
        b'{"format": 3, "spec": {"version": 1, "n": 1e400, "k": 64, "weight": ["u4"]}}',
        b'{"format": 2, "n": 16}',
        b"\xff\xfe\x00\x00" * 100,
    ],
)
def test_specs_that_are_none(spec: bytes) -> None:
    state = {**weight().state_dict(), "spec": torch.tensor(list(spec), dtype=torch.uint8)}
    for wanted in (None, SPEC):
        with pytest.raises(PackError):
            PackedWeight.from_state_dict(state, wanted)


def test_mutated_files() -> None:
    """A damaged file is a PackError, or a weight that multiplies as its own numbers say."""
    chance = random.Random(0)
    matmuls = {spec: lowbit.compile(spec, "cpu") for spec in SPECS}
    originals = {spec: weight(spec).state_dict() for spec in SPECS}
    refused = right = 0
    used = _peak()
    for _ in range(2000):
        spec = chance.choice(SPECS)
        state = _mutated(originals[spec], chance)
        try:
            loaded = PackedWeight.from_state_dict(state)
            mm = matmuls.get(loaded.spec)
        except PackError:
            refused += 1
            continue
        if mm is not None:
            _assert_right(mm, loaded)
            right += 1
    assert refused > 200 and right > 200
    assert _peak() - used < 64 << 20


def _mutated(state: dict[str, Tensor], chance: random.Random) -> dict[str, Tensor]:
    """The dictionary with one to three things wrong: bytes, tensors, or names."""
    result = {name: t.clone() for name, t in state.items()}
    for _ in range(chance.randint(1, 3)):
        name = chance.choice(list(result))
        t = result[name]
        match chance.randrange(5):
            case 0 | 1 if t.numel() and t.is_contiguous() and t.layout is torch.strided and not t.is_meta:
                data = t.view(-1).view(torch.uint8)
                for _ in range(chance.randint(1, 4)):
                    if len(data):
                        data[chance.randrange(len(data))] = chance.randrange(256)
            case 2:
                result[name] = result[chance.choice(list(result))]
            case 3:
                del result[name]
                result[chance.choice(("codes", "zeros", "more", name))] = t
            case _ if t.layout is torch.strided and t.ndim:
                result[name] = t[: chance.randint(0, len(t))]
    return result


def _assert_right(mm: lowbit.Matmul, w: PackedWeight) -> None:
    spec = w.spec
    x = reference.random_inputs(spec, 2)[0]
    tensors = w.unpack(), w.unpack_scales(), w.unpack_zeros(), w.bias
    bound = reference.tolerance(spec, x, *tensors)
    expected = reference.matmul(spec, x, *tensors)
    overflows = np.abs(expected) > 1e30  # scales may be as large as 2^127
    assert (reference.agrees(mm(x, w), expected, bound) | overflows).all() and not overflows.all()
