"""The declaration of a weight's tensors, and that all else follows from it."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch

import lowbit
from lowbit.dialect.elements import ELEMENTS
from lowbit.dialect.errors import PackError
from lowbit.dialect.formats.packing import Packing
from lowbit.dialect.spec import MatmulSpec
from lowbit.dialect.weight import Storage, TensorSlot, weight_tensors
from lowbit.passes.builder import Tile
from lowbit.passes.kernels.streaming.epilogue import Ending
from lowbit.pylib import reference
from lowbit.pylib.torch_types import stored_type
from lowbit.pylib.tune.timing import copies, random_weight
from lowbit.pylib.weights.packed import PackedWeight, pack


def test_slots() -> None:
    spec = MatmulSpec(40, 96, "u4", 32, zeros="int", scale="e4m3", bias=True, out="f32")
    assert [(s.name, s.role, s.index, s.storage, s.shape, s.given) for s in spec.tensors] == [
        ("codes", "codes", "element", "i32", (3, 2, 1, 32, 4), (40, 96)),
        ("scales", "scale", "group", "e4m3", (3, 4, 16), (40, 3)),
        ("zeros", "zero", "group", "u8", (3, 4, 16), (40, 3)),
        ("bias", "bias", "row", "f32", (40,), (40,)),
    ]
    assert [s.nbytes for s in spec.tensors] == [3072, 192, 192, 160] and spec.bytes == 3616
    assert [s.name for s in MatmulSpec(40, 96, "u4").tensors] == ["codes", "scales"]
    spec = MatmulSpec(40, 96, "u4", 32, zeros="offset", scale="f32", row_scales=True)
    assert [(s.name, s.role, s.index, s.storage, s.shape, s.given) for s in spec.tensors[2:]] == [
        ("offsets", "offset", "group", "f32", (3, 4, 16), (40, 3)),
        ("row_scales", "scale", "padded_row", "f32", (48,), (40,)),
    ]


def test_storage_types_have_the_bits_of_torchs() -> None:
    assert all(stored_type(name).itemsize == ELEMENTS[name].bytes for name in get_args(Storage))


def test_a_weight_is_a_mapping() -> None:
    spec = MatmulSpec(16, 64, "u4", bias=True)
    w = pack(spec, **reference.random_inputs(spec, 1)[1])
    assert list(w) == ["codes", "scales", "bias"] and len(w) == 3 and "zeros" not in w
    assert w["codes"] is w.codes is w.tensors[0] and w.zeros is None and w["bias"] is w.bias
    assert w == w and w != PackedWeight(spec, w) and len({w, PackedWeight(spec, dict(w))}) == 2


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"codes": None}, "is made of the tensors codes, scales, not of codes"),
        (torch.zeros(3), "is made of the tensors codes, scales, not of Tensor"),
        ({}, "is made of the tensors codes, scales, not of "),
    ],
)
def test_tensors_that_are_no_weight(tensors: Any, message: str) -> None:
    with pytest.raises(PackError, match=message):
        PackedWeight(MatmulSpec(16, 64, "u4"), tensors)


class Gains(Ending):
    """The end of the decode kernel where rows have a gain."""

    def _store(self, total: Tile, first_row: Any) -> None:
        p = self.p
        memory = p.global_view(p["gains"], "f32", (self.spec.n, 1))
        scale = p.load(memory, (first_row, 0), total.layout.reduce((1,)), ("clamp", "none"))
        super()._store(p.mul(total, scale), first_row)


def test_another_tensor_is_a_declaration_and_a_kernel_that_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gain for every row: what is there packs, saves, moves, draws, passes and checks it."""

    def with_gains(packing: Packing, scale: Storage, **others: Storage | None) -> tuple[TensorSlot, ...]:
        gains = TensorSlot.of(packing, "gains", "scale", "row", "f32")
        return (*weight_tensors(packing, scale, **others), gains)

    monkeypatch.setenv("LOWBIT_NO_CACHE", "1")  # no spec that others use, and no cache: the kernels stay here
    monkeypatch.setattr("lowbit.dialect.weight_format.weight_tensors", with_gains)
    monkeypatch.setattr("lowbit.passes.kernels.streaming.parts.Ending", Gains)
    spec = MatmulSpec(40, 208, "u4", 16, zeros="int", bias=True)

    x, tensors = reference.random_inputs(spec, 3)
    assert tensors["gains"].shape == (40,) and tensors["gains"].dtype == torch.float32
    w = pack(spec, **tensors)
    assert w.nbytes == spec.bytes and torch.equal(w["gains"], tensors["gains"])
    with pytest.raises(PackError, match="needs gains; pass gains="):
        pack(spec, **{name: t for name, t in tensors.items() if name != "gains"})

    loaded = PackedWeight.from_state_dict(w.state_dict())
    assert torch.equal(loaded["gains"], w["gains"]) and w.to("meta")["gains"].is_meta
    damaged = {**w.state_dict(), "gains": torch.full((40,), torch.nan)}
    with pytest.raises(PackError, match="saved gains hold nan"):
        PackedWeight.from_state_dict(damaged)
    assert all(c["gains"] is not w["gains"] for c in copies(w, 1)[1:])
    assert random_weight(spec, "cpu")["gains"].shape == (40,)

    mm = lowbit.compile(spec, "emulator:sm_80")
    names = [param.name for param in mm.kernel(1).launch.params]
    assert names[1:6] == ["codes", "scales", "zeros", "bias", "gains"]
    expected, bound = reference.matmul(spec, x, **tensors), reference.tolerance(spec, x, **tensors)
    without = {name: t for name, t in tensors.items() if name != "gains"}
    assert reference.agrees(mm(x, loaded), expected, bound).all()
    assert not reference.agrees(mm(x, loaded), reference.matmul(spec, x, **without), bound).all()
    compiled = torch.compile(lambda x, w: mm(x, w), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, loaded), mm(x, loaded))
