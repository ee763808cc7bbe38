"""`MatmulSpec.epilogue`: what becomes of sums, in every family of kernels, and all around them."""

from __future__ import annotations

import pickle
from collections.abc import Hashable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from sweeps import swept
from torch import Tensor
from torch.nn import functional as F

import lowbit
from lowbit.dialect.bilevel import Bilevel
from lowbit.dialect.epilogue import stored_rows
from lowbit.dialect.errors import LowbitError, PackError, SpecError
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.base import KernelSchedule
from lowbit.passes.kernels.decode.schedule import Schedule
from lowbit.passes.kernels.persistent.schedule import PrefillSchedule
from lowbit.pylib.reference import agrees, matmul, random_inputs, random_residual, tolerance
from lowbit.pylib.tune.trial import rounding
from lowbit.pylib.weights.packed import PackedWeight, pack

EPILOGUES = ("silu_mul", "gelu_mul", "swiglu_oai", "residual")
GATED = EPILOGUES[:3]


def spec_of(epilogue: str | None, n: int = 64, k: int = 256, weight: str = "u4", **fields: Any) -> MatmulSpec:
    return MatmulSpec(n, k, weight, **{"group_size": 64, "bias": True, "epilogue": epilogue, **fields})


def gated(epilogue: str, gate: Tensor, up: Tensor) -> Tensor:
    """What torch makes of both halves."""
    if epilogue == "swiglu_oai":
        gate = gate.clamp(max=7)
        return gate * torch.sigmoid(1.702 * gate) * (up.clamp(-7, 7) + 1)
    return (F.silu(gate) if epilogue == "silu_mul" else F.gelu(gate, approximate="tanh")) * up


def check(spec: MatmulSpec, target: str, m: int, schedule: KernelSchedule | None = None) -> str:
    """Multiplies random data and compares; returns the families that computed it."""
    mm = lowbit.compile(spec, target, schedule)
    x, tensors = random_inputs(spec, m)
    residual = random_residual(spec, m)
    y = mm(x, mm.pack(**tensors), **residual)
    given: dict[str, Any] = {**tensors, **residual}
    allowed = tolerance(spec, x, **given, **rounding(mm, m))
    assert y.shape == (m, spec.outputs) and agrees(y, matmul(spec, x, **given), allowed).all()
    return " + ".join(r.family for r in mm.choices.launches(m)) if mm.target.is_gpu else "cpu"


@pytest.mark.parametrize("epilogue", GATED)
def test_definition_is_that_of_torch(epilogue: str) -> None:
    spec = spec_of(epilogue, out="f32")
    x, tensors = random_inputs(spec, 5)
    gate, up = torch.from_numpy(matmul(replace(spec, epilogue=None), x, **tensors)).chunk(2, dim=1)
    np.testing.assert_allclose(matmul(spec, x, **tensors), gated(epilogue, gate, up), rtol=1e-12)


FAMILIES: list[tuple[str, int, dict[str, Any], str]] = [
    ("cpu", 3, {"zeros": "float"}, "cpu"),
    ("cpu", 70, {"act": "bf16"}, "cpu"),
    ("cpu", 20, {"compute": "i8"}, "cpu"),
    ("emulator:sm_80", 3, {"zeros": "int"}, "decode"),
    ("emulator:sm_90a", 40, {"n": 80, "row_scales": True}, "decode"),
    ("emulator:sm_90a", 1, {"outliers": True, "permuted": True}, "decode"),
    ("emulator:sm_90a", 330, {"n": 208, "zeros": "float"}, "prefill"),
    ("emulator:sm_80", 140, {"n": 176}, "prefill_mma"),
    ("emulator:sm_90a", 9, {"compute": "i8", "out": "f32"}, "eight_bit"),
    ("emulator:sm_90a", 140, {"compute": "f8e4m3", "n": 80}, "eight_bit_prefill"),
    ("emulator:sm_90a", 140, {"compute": "f8e4m3", "fold_scales": True, "row_scales": True}, "eight_bit_prefill"),
    ("emulator:sm_89", 140, {"compute": "f8e4m3"}, "eight_bit_prefill_mma"),
]


def meets(row: tuple[Any, ...]) -> Iterator[Hashable]:
    """Yields what is to meet: every epilogue and every family on its target, and every case is there."""
    epilogue, target, _, fields, family = row
    yield epilogue, target, family
    yield target, family, str(fields)


@pytest.mark.parametrize(
    ("epilogue", "target", "m", "fields", "family"), swept([(e, *case) for e in EPILOGUES for case in FAMILIES], meets)
)
def test_families(epilogue: str, target: str, m: int, fields: dict[str, Any], family: str) -> None:
    assert check(spec_of(epilogue, **fields), target, m) == family


@pytest.mark.parametrize("target", ["cpu", "emulator:sm_80", "emulator:sm_90a"])
@pytest.mark.parametrize("m", [3, 130, 4000])
def test_limits(target: str, m: int) -> None:
    """Sums beyond the limits of swiglu_oai are cut off; NaN is not."""
    spec = spec_of("swiglu_oai", 32, 68, group_size=None, out="f32")
    mm, (x, tensors) = lowbit.compile(spec, target), random_inputs(spec, m)
    x *= 100
    x[2, 0] = torch.nan
    y, given, h = mm(x, mm.pack(**tensors)), dict[str, Any](tensors), matmul(spec.without_epilogue, x, **tensors)
    assert (np.abs(h[0]) > 7).any() and np.isnan(h[2]).all()
    assert agrees(y, matmul(spec, x, **given), tolerance(spec, x, **given, **rounding(mm, m))).all()


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize(
    ("schedule", "m"),
    [
        (Schedule(8, 1, 4, 4, 64, 2, split_k=2, cluster=2, wgmma=True), 7),
        (Schedule(16, 2, 1, 2, 128, 2, split_k=2), 11),
        (Schedule(1, 2, 1, 4, 64, 2), 1),
        (Schedule(8, 3, 1, 2, 64, 2), 5),
        (PrefillSchedule(tokens=32, split_k=2), 50),
        (PrefillSchedule(tokens=64, cluster=2), 100),
        (PrefillSchedule(tokens=48, stream_k="all"), 90),
    ],
)
def test_ways_to_add_up(epilogue: str, schedule: KernelSchedule, m: int) -> None:
    """Sums meet in shared memory, in a cluster, in device memory, or nowhere, before the epilogue."""
    check(spec_of(epilogue, 304, 512), "emulator:sm_90a", m, schedule)


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize(("target", "compute"), [("emulator:sm_80", None), ("emulator:sm_90a", "i8"), ("cpu", None)])
def test_several_launches(epilogue: str, target: str, compute: Any) -> None:
    """Rows of a residual go with those of x to launches that share a call."""
    schedule = {None: Schedule(8, 1, 1, 2, 64, 2), "i8": None}[compute] if target != "cpu" else None
    check(spec_of(epilogue, 32, 64, compute=compute), target, 2100 if target == "cpu" else 21, schedule)


@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_way_of_the_vendor(epilogue: str) -> None:
    """Where no kernel serves so many rows, the weight is written out, and the epilogue follows in torch."""
    spec = spec_of(epilogue, 32, 68, group_size=None)
    assert lowbit.compile(spec, "emulator:sm_80").choices.launches(4000)[0].family == "dequantize"
    check(spec, "emulator:sm_80", 4000)


@pytest.mark.parametrize("fields", [{}, {"zeros": "int", "row_scales": True}, {"outliers": True, "permuted": True}])
@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_weights_come_back(epilogue: str, fields: dict[str, Any]) -> None:
    spec = spec_of(epilogue, **fields)
    _, tensors = random_inputs(spec, 1)
    w, plain = pack(spec, **tensors), pack(spec_of(None, **fields), **tensors)
    assert torch.equal(w.dequantize(), plain.dequantize())
    for slot in spec.given_tensors:
        ours, theirs = (each.unpack_tensor(slot.name) for each in (w, plain))
        assert torch.equal(
            ours.to_dense() if slot.index == "sparse" else ours, theirs.to_dense() if slot.index == "sparse" else theirs
        )
    for target in ("cpu", "emulator:sm_90a"):
        mm = lowbit.compile(spec, target)
        assert torch.equal(mm.dequantize(w), lowbit.compile(plain.spec, target).dequantize(plain))


def test_rows_of_blocks() -> None:
    assert [*stored_rows(32)] == [*range(8), *range(16, 24), *range(8, 16), *range(24, 32)]


def test_parts_of_rows_are_columns_of_y() -> None:
    spec = spec_of("silu_mul")
    mm, (x, tensors) = lowbit.compile(spec, "cpu"), random_inputs(spec, 4)
    w = mm.pack(**tensors)
    parts = [w.shard(0, i, 2) for i in range(2)]
    y = torch.cat([lowbit.compile(part.spec, "cpu")(x, part) for part in parts], dim=1)
    assert torch.equal(y, mm(x, w))


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("act", ["f16", "bf16"])
def test_gradients(epilogue: str, act: Any) -> None:
    spec = spec_of(epilogue, act=act, out="f32")
    mm, (x, tensors) = lowbit.compile(spec, "cpu"), random_inputs(spec, 6)
    w, residual = mm.pack(**tensors), random_residual(spec, 6)
    dense, bias = w.dequantize(torch.float64), tensors["bias"].double()

    def exact(x: Tensor, r: Tensor) -> Tensor:
        sums = x.double() @ dense.T + bias
        if epilogue == "residual":
            return sums + r
        gate, up = sums.chunk(2, dim=1)
        return gated(epilogue, gate, up)

    x.requires_grad_()
    given = {name: r.requires_grad_() for name, r in residual.items()}
    dy = torch.randn(6, spec.outputs)
    y = mm(x, w, **given)
    inputs = [x, *given.values()]
    found = torch.autograd.grad(y, inputs, dy)
    wanted = torch.autograd.grad(exact(x, given.get("residual", x)), inputs, dy.double())
    for ours, theirs in zip(found, wanted):
        assert (ours.double() - theirs.double()).norm() < 0.01 * theirs.double().norm()


@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_compiled_by_torch(epilogue: str) -> None:
    spec = spec_of(epilogue)
    mm, (x, tensors) = lowbit.compile(spec, "cpu"), random_inputs(spec, 5)
    w, residual = mm.pack(**tensors), random_residual(spec, 5)

    def f(x: Tensor, **others: Tensor) -> Tensor:
        return mm(x, w, **others) * 2

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, **residual), f(x, **residual))


@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_saved_weights(epilogue: str) -> None:
    spec = spec_of(epilogue)
    _, tensors = random_inputs(spec, 1)
    w = pack(spec, **tensors)
    for again in (PackedWeight.from_state_dict(w.state_dict()), pickle.loads(pickle.dumps(w))):
        assert again.spec == spec and torch.equal(again.codes, w.codes)
    assert MatmulSpec.from_dict(spec.to_dict()) == spec
    others = {None, *EPILOGUES} - {epilogue}
    for other in others:
        if (other in GATED) == (epilogue in GATED):
            PackedWeight.from_state_dict(w.state_dict(), replace(spec, epilogue=other))
        else:
            with pytest.raises(PackError, match="epilogue"):
                PackedWeight.from_state_dict(w.state_dict(), replace(spec, epilogue=other))


def test_odd_residuals() -> None:
    """Residuals of any strides and places, and batches of rows."""
    spec = spec_of("residual", 32, 64)
    for target in ("cpu", "emulator:sm_90a"):
        mm, (x, tensors) = lowbit.compile(spec, target), random_inputs(spec, 6)
        w, r = mm.pack(**tensors), torch.randn(6, 33).half()
        assert torch.equal(mm(x, w, residual=r[:, 1:]), mm(x, w, residual=r[:, 1:].clone()))
        assert torch.equal(
            mm(x.view(2, 3, 64), w, residual=r[:, :32].reshape(2, 3, 32)).view(6, 32), mm(x, w, residual=r[:, :32])
        )
        assert mm(x[:0], w, residual=r[:0, :32]).shape == (0, 32)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"epilogue": "relu"}, "epilogue='relu' must be"),
        ({"n": 40}, "n=40 to be a multiple of 16; pad both halves to n=48"),
        ({"scale": "u4", "zeros": "float", "bilevel": Bilevel(rows=16, groups=1, zeros=True)}, "rows=1"),
    ],
)
def test_specs_that_are_none(change: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        spec_of("silu_mul", **change) if "epilogue" not in change else MatmulSpec(64, 256, "u4", **change)


def test_wrong_calls() -> None:
    spec = spec_of("residual", 32, 64)
    mm, (x, tensors) = lowbit.compile(spec, "cpu"), random_inputs(spec, 2)
    plain = lowbit.compile(replace(spec, epilogue=None), "cpu")
    r = torch.zeros(2, 32).half()
    wrong: list[tuple[Any, Any, str]] = [
        (mm, None, "call mm\\(x, w, residual=r\\)"),
        (mm, 1.0, "not float"),
        (mm, r[:1], "residual must be \\[2, 32\\]"),
        (mm, r.float(), "use residual.to\\(torch.float16\\)"),
        (mm, r.to_sparse(), "to_dense"),
        (mm, r.to("meta"), "residual is on meta"),
        (plain, r, "adds no residual"),
    ]
    for function, residual, words in wrong:
        for given in (x, x.clone().requires_grad_()):
            with pytest.raises(LowbitError, match=words):
                function(given, function.pack(**tensors), residual=residual)
    eight = lowbit.compile(replace(spec, compute="i8"), "cpu")
    with pytest.raises(SpecError, match=r"residual\.detach"):
        eight(lowbit.quantize_activation(x, "i8"), eight.pack(**tensors), residual=r.requires_grad_())


def test_blocks_of_a_cluster_have_both_halves() -> None:
    with pytest.raises(SpecError, match="whole row blocks for silu_mul"):
        lowbit.compile(spec_of("silu_mul"), "sm_90a", Schedule(8, 1, 1, 2, 64, 2, split_k=2, cluster=2))


@pytest.mark.gpu
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("fields", [{}, {"act": "bf16", "outliers": True, "permuted": True}, {"compute": "i8"}])
@pytest.mark.parametrize("m", [1, 17, 64, 150, 700, 5000])
def test_on_a_gpu(epilogue: str, fields: dict[str, Any], m: int) -> None:
    """Eagerly, and in a graph that is replayed with another x and residual."""
    spec = spec_of(epilogue, 528, 512, **fields)
    mm = lowbit.compile(spec)
    x, tensors = random_inputs(spec, m)
    others = random_residual(spec, m)
    w = mm.pack(**{name: t.cuda() for name, t in tensors.items()})
    given = {name: r.cuda() for name, r in others.items()}
    there = x.cuda()
    allowed = tolerance(spec, x, **tensors, **others, **rounding(mm, m))  # type: ignore[arg-type]
    assert agrees(mm(there, w, **given), matmul(spec, x, **tensors, **others), allowed).all()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        y = mm(there, w, **given)
    for tensor in (there, *given.values()):
        tensor.copy_(tensor.flip(0))
    graph.replay()
    assert torch.equal(y, mm(there, w, **given))
