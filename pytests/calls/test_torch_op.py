"""`torch.ops.lowbit.matmul`: under torch.compile and export, in modules, and with fake tensors."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

import lowbit
from lowbit.pylib.operator import schema
from lowbit.pylib.reference import random_problem
from lowbit.pylib.weights.tensor_checks import SeenTensors

TARGETS = ["cpu", "emulator:sm_90a"]

SPEC = lowbit.MatmulSpec(n=48, k=256, weight="u4", group_size=64, zeros="int", bias=True)
PLAIN = lowbit.MatmulSpec(n=16, k=128, weight="f4e2m1", act="bf16", out="f32")


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest) -> str:
    torch._dynamo.reset()
    return request.param


class Layer(torch.nn.Module):
    """As a model would have it."""

    def __init__(self, mm: lowbit.Matmul, w: lowbit.PackedWeight) -> None:
        super().__init__()
        self.mm, self.w = mm, w

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.mm(x + 1, self.w)) * 2


def _make(spec: lowbit.MatmulSpec, target: str, m: int = 3) -> tuple[Tensor, lowbit.Matmul, lowbit.PackedWeight]:
    x, *weight = random_problem(spec, m)
    mm = lowbit.compile(spec, target)
    return x, mm, mm.pack(*weight)


def _arguments(x: Tensor, mm: lowbit.Matmul, w: lowbit.PackedWeight) -> tuple[object, ...]:
    return x, list(w.tensors), mm.description


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("spec", [SPEC, PLAIN], ids=str)
def test_compiled_module(spec: lowbit.MatmulSpec, target: str, backend: str) -> None:
    x, mm, w = _make(spec, target)
    layer = Layer(mm, w)
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    assert torch.equal(compiled(x), layer(x))
    assert compiled(x).dtype == layer(x).dtype


def test_compiled_function_has_one_graph_for_all_shapes(target: str) -> None:
    x, mm, w = _make(SPEC, target, m=12)
    compiled = torch.compile(lambda x: mm(x, w) + 1, fullgraph=True, dynamic=True, backend="aot_eager")
    torch._dynamo.utils.counters.clear()
    for rows in (2, 3, 5, 12):
        assert torch.equal(compiled(x[:rows]), mm(x[:rows], w) + 1)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_weight_as_an_argument(target: str) -> None:
    """Another weight of the same spec runs the same graph, and gives its own result."""
    x, mm, w = _make(SPEC, target)
    _, *other = random_problem(SPEC, 3, seed=1)
    other = mm.pack(*other)
    compiled = torch.compile(lambda x, w: mm(x, w), fullgraph=True, backend="eager")
    assert torch.equal(compiled(x, w), mm(x, w))
    assert torch.equal(compiled(x, other), mm(x, other))
    assert not torch.equal(mm(x, w), mm(x, other))


def test_mistakes_show_under_compile(target: str) -> None:
    x, mm, w = _make(SPEC, target)
    compiled = torch.compile(lambda x: mm(x, w), backend="eager")
    for wrong in (x.float(), x[:, :-1]):
        with pytest.raises(Exception, match=r"x is torch.float32|x must be \[\.\.\., k=256\]"):
            compiled(wrong)


@pytest.mark.parametrize("spec", [SPEC, PLAIN], ids=str)
def test_opcheck(spec: lowbit.MatmulSpec, target: str) -> None:
    """PyTorch's own check: schema, fake implementation, dynamic shapes."""
    x, mm, w = _make(spec, target)
    for given in (x, x[:1], x[0], x[None, :0], x.T.contiguous().T):
        torch.library.opcheck(torch.ops.lowbit.matmul.packed, _arguments(given, mm, w))


def test_fake_tensors(target: str) -> None:
    """Shape and type without data, through the call and through the operator."""
    x, mm, w = _make(PLAIN, target)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        y = mm(mode.from_tensor(x), w)
    assert (y.shape, y.dtype, y.device) == ((3, 16), torch.float32, x.device)
    y = torch.ops.lowbit.matmul.packed(x.to("meta"), [t.to("meta") for t in w.tensors], mm.description)
    assert (y.shape, y.dtype, y.device.type) == ((3, 16), torch.float32, "meta")


def test_exported_program_survives_saving(target: str) -> None:
    """The operator says what it computes, so a saved program needs nothing of this process but the weight."""
    x, mm, w = _make(SPEC, target)
    layer = Layer(mm, w)
    file = io.BytesIO()
    torch.export.save(torch.export.export(layer, (x,)), file)
    file.seek(0)
    assert torch.equal(torch.export.load(file).module()(x), layer(x))


def test_exported_program_runs_in_another_process(repo: Path, tmp_path: Path) -> None:
    """Which imports no more than the operator."""
    x, mm, w = _make(SPEC, "cpu")
    layer = Layer(mm, w)
    torch.export.save(torch.export.export(layer, (x,)), tmp_path / "layer.pt2")
    torch.save(x, tmp_path / "x.pt")
    program = f"""
import torch, lowbit.pylib.torch_op
y = torch.export.load({str(tmp_path / "layer.pt2")!r}).module()(torch.load({str(tmp_path / "x.pt")!r}))
torch.save(y, {str(tmp_path / "y.pt")!r})
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=repo)
    assert torch.equal(torch.load(tmp_path / "y.pt"), layer(x))


def test_layers_load_no_compiler_of_torch_and_are_known_to_it(repo: Path) -> None:
    """What torch.compile takes for constants is marked when it is there, whichever comes first."""
    program = """
import sys, lowbit, torch
from lowbit.pylib.operator.constants import constant
lowbit.LowbitLinear, lowbit.LowbitExperts
calls = []

@constant
def early():
    calls.append("early")
    return 2

assert "torch._dynamo" not in sys.modules
import torch._dynamo

@constant
def late():
    calls.append("late")
    return 3

multiply = torch.compile(lambda x: early() * late() * x, backend="eager", fullgraph=True)
print(multiply(torch.ones(2)).tolist(), multiply(torch.ones(2)).tolist(), calls)
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, cwd=repo, capture_output=True, text=True)
    assert done.stdout == "[6.0, 6.0] [6.0, 6.0] ['early', 'late']\n"


def test_operator_checks_its_arguments(target: str) -> None:
    x, mm, w = _make(SPEC, target)
    good = _arguments(x, mm, w)
    assert torch.equal(torch.ops.lowbit.matmul.packed(*good), mm(x, w))
    for position, wrong, message in [
        (0, x.float(), "x is torch.float32"),
        (0, x[:, 1:], r"x must be \[..., k=256\]"),
        (1, list({**w, "codes": w.codes[:-1]}.values()), "packed codes must be"),
        (1, list({**w, "scales": w.scales.float()}.values()), "packed scales must be"),
        (1, list(w.tensors[:-1]), "takes 4 tensors, codes, scales, zeros, bias, not 3"),
    ]:
        given = [*good[:position], wrong, *good[position + 1 :]]
        with pytest.raises(lowbit.LowbitError, match=message):
            torch.ops.lowbit.matmul.packed(*given)


class Buffers(torch.nn.Module):
    """A layer whose weight is made of its buffers in every call, as a module that is moved and saved has them."""

    def __init__(self, mm: lowbit.Matmul, w: lowbit.PackedWeight) -> None:
        super().__init__()
        self.mm = mm
        for name, tensor in w.items():
            self.register_buffer(name, tensor)

    def forward(self, x: Tensor) -> Tensor:
        return self.mm(x, lowbit.PackedWeight(self.mm.spec, dict(self.named_buffers())))


def test_weight_made_of_buffers(target: str) -> None:
    x, mm, w = _make(SPEC, target)
    layer, expected = Buffers(mm, w), mm(x, w)
    assert torch.equal(layer(x), expected)
    assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), expected)
    for strict in (False, True):
        assert torch.equal(torch.export.export(layer, (x,), strict=strict).module()(x), expected)


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_weight_made_under_make_fx(target: str, mode: str) -> None:
    x, mm, w = _make(SPEC, target)

    def call(x: Tensor, tensors: list[Tensor]) -> Tensor:
        return mm(x, lowbit.PackedWeight(SPEC, dict(zip(w, tensors))))

    graph = make_fx(call, tracing_mode=mode)(x, list(w.tensors))
    assert torch.equal(graph(x, list(w.tensors)), mm(x, w))


@pytest.mark.filterwarnings("ignore:.torch.jit.*deprecated:DeprecationWarning")
def test_tracing_records_the_operator(target: str) -> None:
    """A trace computes y of the x that it is given, not of the x that it was made with."""
    x, mm, w = _make(SPEC, target)

    def call(x: Tensor) -> Tensor:
        return mm(x, w) + x @ mm.dequantize(w).T

    before_dispatch = make_fx(call, pre_dispatch=True)(x)
    for traced in (torch.jit.trace(call, x), make_fx(call, tracing_mode="real")(x), before_dispatch):
        assert torch.equal(traced(2 * x), call(2 * x))
    file = io.BytesIO()
    torch.jit.save(torch.jit.trace(call, x), file)
    file.seek(0)
    assert torch.equal(torch.jit.load(file)(2 * x), call(2 * x))


class Seen(TorchDispatchMode):
    """Notes every operator that is called."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[object] = []

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        self.operators.append(func)
        return func(*args, **kwargs or {})


def test_dispatch_modes_see_a_call(target: str) -> None:
    x, mm, w = _make(SPEC, target)
    with Seen() as seen:
        y = mm(x, w)
        mm.dequantize(w)
    operators = torch.ops.lowbit.matmul.packed, torch.ops.lowbit.dequantize.default
    assert [op for op in seen.operators if op in operators] == list(operators)
    assert torch.equal(y, mm(x, w))


def test_subclasses_of_tensor_see_a_call(target: str) -> None:
    x, mm, w = _make(SPEC, target)
    twice = TwoTensor(x, 2 * x)
    y = mm(twice, w)
    assert isinstance(y, TwoTensor) and torch.equal(y.a, mm(x, w)) and torch.equal(y.b, mm(2 * x, w))


def test_views_that_negate(target: str) -> None:
    """x.conj().imag of a complex tensor is one: its memory has the other sign."""
    x, mm, w = _make(PLAIN, target)
    negative = torch._neg_view(x)
    assert negative.is_neg() and torch.equal(mm(negative, w), -mm(x, w))
    assert torch.equal(torch.ops.lowbit.matmul.packed(negative, list(w.tensors), mm.description), -mm(x, w))


def test_a_call_without_gradient_runs_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's dispatcher is not entered a second time, which would take longer than all else in the operator."""
    x, mm, w = _make(SPEC, "cpu")

    def refuse(*_: object) -> None:
        raise AssertionError("the operator was dispatched again")

    monkeypatch.setattr(schema, "_below_autograd", refuse)
    assert torch.equal(torch.ops.lowbit.matmul.packed(*_arguments(x, mm, w)), mm(x, w))
    for other in (x.clone().requires_grad_(), torch._neg_view(x)):
        with pytest.raises(AssertionError, match="dispatched again"):
            torch.ops.lowbit.matmul.packed(*_arguments(other, mm, w))


def test_weights_are_looked_at_when_they_change(target: str) -> None:
    """The operator knows a weight that it has seen; not one whose tensors are others or have other memory."""
    x, mm, w = _make(SPEC, target)
    tensors = [t.clone() for t in w.tensors]

    def call() -> Tensor:
        return torch.ops.lowbit.matmul.packed(x, tensors, mm.description)

    expected = call()
    assert torch.equal(call(), expected)
    scales = tensors[1]
    tensors[1] = scales.float()
    with pytest.raises(lowbit.PackError, match=r"packed scales must be torch.float16"):
        call()
    tensors[1] = scales
    scales.data = torch.zeros(3)
    with pytest.raises(lowbit.PackError, match=r"packed scales must be torch.float16"):
        call()
    tensors[1] = w.scales
    assert torch.equal(call(), expected)


def test_seen_tensors_are_given_back() -> None:
    seen, tensors = SeenTensors(), [torch.ones(1), torch.zeros(1)]
    assert not seen.has([]) and not seen.has(tensors)
    seen.add(tensors)
    assert seen.has(tensors) and not seen.has(tensors[::-1]) and not seen.has(tensors[:1])
    seen.add(tensors[::-1])
    assert seen.has(tensors) and seen.has(tensors[::-1])
    tensors[1].fill_(2)
    assert not seen.has(tensors)
    del tensors
    assert not seen._lists
    with torch.inference_mode():
        tensors = [torch.ones(1)]
    seen.add(tensors)
    assert not seen.has(tensors)


def test_dequantize_checks_its_arguments(target: str) -> None:
    _, mm, w = _make(SPEC, target)
    torch.library.opcheck(torch.ops.lowbit.dequantize.default, (list(w.tensors), mm.description))
    for wrong, message in [
        (list({**w, "scales": w.scales.float()}.values()), "packed scales must be"),
        (list(w.tensors[:-1]), "takes 4 tensors, codes, scales, zeros, bias, not 3"),
    ]:
        with pytest.raises(lowbit.PackError, match=message):
            torch.ops.lowbit.dequantize(wrong, mm.description)


def test_tensors_without_memory(target: str) -> None:
    """They must not reach a kernel, which would read where nothing is."""
    x, mm, w = _make(SPEC, target)
    with FakeTensorMode() as mode:
        fake = lowbit.PackedWeight(SPEC, {name: mode.from_tensor(t) for name, t in w.items()})
        assert mm(mode.from_tensor(x), fake).shape == (3, SPEC.n)
    for use in (lambda: mm(x, fake), lambda: mm.dequantize(fake)):
        with pytest.raises(lowbit.PackError, match="tensors are of type FakeTensor: they have no values"):
            use()
    freed = w.codes.clone()
    freed.untyped_storage().resize_(0)
    for nothing in (torch._efficientzerotensor(w.codes.shape, dtype=torch.int32), freed):
        with pytest.raises(lowbit.PackError, match="packed codes has no memory that a kernel could read; clone it"):
            lowbit.PackedWeight(SPEC, {**w, "codes": nothing})


def test_graphs_of_earlier_versions() -> None:
    x, mm, w = _make(SPEC, "cpu")
    with pytest.raises(lowbit.SpecError, match=r"this graph is of an earlier version, .*; export it again"):
        torch.ops.lowbit.matmul.default(x, w.codes, w.scales, w.zeros, w.bias, mm.description)
