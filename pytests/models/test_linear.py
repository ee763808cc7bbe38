"""`LowbitLinear` behaves as a module of torch does, and computes what its packed weight says."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import lowbit
from lowbit import LowbitLinear, MatmulSpec, PackedWeight, PackError, QuantConfig
from lowbit.pylib.nn.dense_weight import DenseWeight

X = torch.randn(3, 256, generator=torch.Generator().manual_seed(0)).half()


@pytest.fixture
def layer() -> LowbitLinear:
    torch.manual_seed(1)
    return LowbitLinear.from_linear(nn.Linear(256, 65).half(), QuantConfig("u4", group_size=128))


@torch.no_grad()
@pytest.mark.parametrize("act", ["f16", "bf16"])
def test_is_the_quantized_linear_layer(act: str) -> None:
    linear = nn.Linear(100, 33, dtype=torch.float16 if act == "f16" else torch.bfloat16)
    config = QuantConfig("f6e3m2", group_size=None)
    layer, x = LowbitLinear.from_linear(linear, config), torch.randn(2, 5, 100).to(linear.weight.dtype)
    expected = x.float() @ lowbit.quantize(linear.weight, config).dequantize().T + linear.bias.float()
    torch.testing.assert_close(layer(x).float(), expected, atol=0.02, rtol=0.02)
    assert isinstance(layer, nn.Linear) and list(layer.parameters()) == []
    assert (layer.in_features, layer.out_features) == (100, 33) and str(layer.spec) in repr(layer)


def test_bias_may_come_later(layer: LowbitLinear) -> None:
    bare = LowbitLinear.from_linear(nn.Linear(256, 65, bias=False).half(), QuantConfig())
    assert bare.bias is None
    bias = torch.randn(65)
    torch.testing.assert_close(LowbitLinear.from_packed(bare.packed, bias)(X), bare(X) + bias.half(), atol=5e-3, rtol=0)
    for packed, wrong, message in (
        (layer.packed, bias, "drop bias="),
        (bare.packed, bias[1:], r"bias must be \[n\] = \[65\], not \[64\]"),
        (bare.packed, bias * torch.nan, r"bias\[0\] = nan must be finite"),
        (bare.packed, bias.tolist(), "bias must be a torch tensor or a NumPy array, not list"),
    ):
        with pytest.raises(lowbit.PackError, match=message):
            LowbitLinear.from_packed(packed, wrong)


def test_its_weight_can_be_read(layer: LowbitLinear) -> None:
    """As model code does: for type, place and shape without dequantizing, and for the values."""
    weight, dense = layer.weight, layer.dequantize()
    assert (weight.shape, weight.dtype, weight.device) == (dense.shape, dense.dtype, dense.device)
    assert isinstance(weight.data, DenseWeight) and "weight" not in layer.state_dict()
    x = X.clone().requires_grad_()
    nn.functional.linear(x, weight, layer.bias).sum().backward()
    torch.testing.assert_close(x.grad, dense.sum(0).expand(3, -1), rtol=1e-2, atol=1e-2)
    for copied in (copy.deepcopy(weight), pickle.loads(pickle.dumps(weight)), weight.float().half()):
        assert torch.equal(copied, dense)


class ReadsWeight(nn.Module):
    def __init__(self, layer: LowbitLinear) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x.to(self.layer.weight.dtype), self.layer.weight)


def test_its_weight_can_be_read_in_a_graph(layer: LowbitLinear) -> None:
    model = ReadsWeight(layer)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert torch.equal(compiled(X.float()), model(X.float()))


@pytest.mark.parametrize(
    "write",
    [
        lambda weight: weight.normal_(),
        lambda weight: weight.data.normal_(),
        lambda weight: setattr(weight, "data", torch.ones(65, 256)),
        lambda weight: weight.__setitem__(0, 1.0),
        lambda weight: weight.__iadd__(1.0),
    ],
)
def test_its_weight_cannot_be_written_to(layer: LowbitLinear, write: Callable[[torch.Tensor], object]) -> None:
    with pytest.raises(lowbit.QuantizeError, match="can't be written to"):
        write(layer.weight)


def test_survives_copies_and_conversions(layer: LowbitLinear) -> None:
    expected = layer(X)
    copies = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))]
    copies.append(nn.Sequential(copy.deepcopy(layer)).bfloat16().double().type(torch.float32).to("cpu")[0])
    for other in copies:
        assert torch.equal(other(X), expected)
        assert [b.dtype for b in other.buffers()] == [b.dtype for b in layer.buffers()]
    assert copy.deepcopy(layer).to("meta").codes.is_meta


def test_what_others_add_is_converted(layer: LowbitLinear) -> None:
    layer.adapter = nn.Linear(256, 8)
    assert layer.bfloat16().adapter.weight.dtype is torch.bfloat16
    assert layer.scales.dtype is torch.float16 and layer(X).shape == (3, 65)


@pytest.mark.parametrize(("device", "assign"), [("meta", True), ("cpu", False), ("cpu", True)])
def test_state_goes_into_an_empty_layer(layer: LowbitLinear, device: str, assign: bool) -> None:
    empty = nn.Sequential(LowbitLinear.empty(layer.spec, device))
    empty.load_state_dict(nn.Sequential(layer).state_dict(), assign=assign)
    assert torch.equal(empty(X), layer(X))


def test_state_that_does_not_fit_is_refused(layer: LowbitLinear) -> None:
    state = layer.state_dict()
    narrower = LowbitLinear.empty(MatmulSpec(65, 256, "u3", 128, "int", bias=True))
    without_zeros = LowbitLinear.empty(MatmulSpec(65, 256, "i4", 64, bias=True))
    for wrong, message in [
        ({**state, "codes": state["codes"].float()}, "packed codes must be torch.int32"),
        ({**state, "scales": state["scales"] * torch.nan}, "scales"),
        ({name: t for name, t in state.items() if name != "zeros"}, 'Missing key.*"zeros"'),
        (without_description(state), "has codes, scales, zeros, and not _extra_state, which says what they are"),
        (narrower.state_dict(), r"packed with weight='u3' \(not 'u4'\)"),
        (without_zeros.state_dict(), r"the layer: .* weight='i4' \(not 'u4'\), group_size=64 \(not 128\), zeros="),
    ]:
        with pytest.raises(RuntimeError, match=message):
            layer.load_state_dict(wrong)


def without_description(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: t for name, t in state.items() if name != "_extra_state"}


def test_state_without_a_description(layer: LowbitLinear) -> None:
    """strict=False takes no codes of another format, which have the same shape, nor scales without codes."""
    other, before = LowbitLinear.from_linear(nn.Linear(256, 65).half(), QuantConfig("f4e2m1", 128)), layer(X)
    for state in (without_description(other.state_dict()), {"scales": layer.scales * torch.nan}):
        with pytest.raises(RuntimeError, match="and not _extra_state, which says what they are; load all that"):
            layer.load_state_dict(state, strict=False)
    assert torch.equal(layer(X), before)
    layer.load_state_dict({}, strict=False)
    layer.load_state_dict({"bias": torch.zeros(65).half()}, strict=False)
    assert not layer.bias.any()


def test_a_dense_weight_that_is_set(layer: LowbitLinear) -> None:
    """It would not be multiplied by."""
    embedding = lowbit.LowbitEmbedding.from_embedding(nn.Embedding(32, 256).half(), QuantConfig("u8", 64))
    for module in (layer, embedding, embedding.linear()):
        for weight in (nn.Parameter(torch.ones(2, 2)), torch.ones(2, 2)):
            with pytest.raises(lowbit.QuantizeError, match=r"a weight that is set would have no effect\. Put a dense"):
                module.weight = weight
        with pytest.raises(lowbit.QuantizeError, match="a weight that is set would have no effect"):
            module.register_parameter("weight", nn.Parameter(torch.ones(2, 2)))
        module.weight = None
        assert list(module.parameters()) == []


@pytest.mark.parametrize("arguments", [{}, {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}])
def test_averages_of_codes(layer: LowbitLinear, arguments: dict[str, Any]) -> None:
    """Averages of buffers write to codes, also where all models have the same; no bits are wrong as codes."""
    embedding = lowbit.LowbitEmbedding.from_embedding(nn.Embedding(32, 256).half(), QuantConfig("u8", 64))
    model, tokens = nn.Sequential(embedding, layer), torch.arange(3)
    averaged = AveragedModel(model, use_buffers=True, **arguments)
    averaged.update_parameters(model)
    assert torch.equal(averaged(tokens), model(tokens))
    averaged.update_parameters(model)
    for broken in (averaged.module, averaged.module.bfloat16(), averaged.module.cpu()):
        for module, x in zip(broken, (tokens, X)):
            with pytest.raises(lowbit.PackError, match=r"written to .*AveragedModel.use_buffers=False.*call check"):
                module(x)
            with pytest.raises(lowbit.PackError, match="written to after they were packed"):
                copy.deepcopy(module)
        with pytest.raises(lowbit.PackError, match="written to after they were packed"):
            broken.state_dict()
    averaged.module.load_state_dict(model.state_dict())
    assert torch.equal(averaged(tokens), model(tokens))


def _compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="aot_eager")


def _exported(model: nn.Module) -> Any:
    return torch.export.export(model, (X,), strict=True).module()


@pytest.mark.parametrize("graph", [_compiled, _exported])
def test_averages_of_codes_in_a_graph(layer: LowbitLinear, graph: Callable[[nn.Module], Any]) -> None:
    """A graph holds tensors alone: its operator knows those of layers."""
    averaged = AveragedModel(nn.Sequential(layer), use_buffers=True)
    averaged.update_parameters(averaged.module)
    averaged.module[0].codes.mul_(3)
    with pytest.raises(lowbit.PackError, match="written to after they were packed"):
        graph(averaged.module)(X)
    averaged.module[0].check()
    assert torch.equal(graph(averaged.module)(X), averaged(X))


def test_codes_that_are_written_after_compiling(layer: LowbitLinear) -> None:
    torch._dynamo.reset()
    run = _compiled(layer)
    expected = run(X)
    layer.codes.copy_(layer.codes.clone())
    assert torch.equal(run(X), expected)
    layer.codes.mul_(3)
    for call in (run, layer):
        with pytest.raises(lowbit.PackError, match="written to after they were packed"):
            call(X)


def test_codes_that_are_written_on_purpose(layer: LowbitLinear) -> None:
    """Processes that send each other their buffers write the same values; others say so."""
    layer.check_unwritten()
    layer.codes.copy_(layer.codes.clone())
    expected = layer(X)
    other = copy.deepcopy(layer)
    other.codes.zero_()
    with pytest.raises(lowbit.PackError, match="written to"):
        other(X)
    other.check()
    assert not torch.equal(other(X), expected)
    other.codes = layer.codes.clone()
    assert torch.equal(other(X), expected)


def test_can_be_compiled_and_exported(layer: LowbitLinear) -> None:
    expected = layer(X)
    assert torch.equal(torch.compile(layer, fullgraph=True)(X), expected)
    for strict in (False, True):
        assert torch.equal(torch.export.export(layer, (X,), strict=strict).module()(X), expected)


def test_input_of_another_type_is_refused(layer: LowbitLinear) -> None:
    with pytest.raises(lowbit.SpecError, match=r"x is torch.float32, but act='f16'; use x.to\(torch.float16\)"):
        layer(X.float())
    with pytest.raises(lowbit.SpecError, match=r"convert the model \(model.bfloat16\(\)\), or say act='bf16'"):
        LowbitLinear.from_linear(nn.Linear(256, 8), QuantConfig())
    assert LowbitLinear.from_linear(nn.Linear(256, 8), QuantConfig(), act="bf16")(X.bfloat16()).shape == (3, 8)


def test_gradient_flows_to_the_input(layer: LowbitLinear) -> None:
    """As through the dequantized weight, in eager mode and compiled."""
    dy = torch.randn(3, 65, generator=torch.Generator().manual_seed(2)).half()
    expected = dy.float() @ layer.dequantize().float()
    for function in (layer, torch.compile(layer, fullgraph=True)):
        x = X.clone().requires_grad_()
        function(x).backward(dy)
        assert x.grad is not None
        torch.testing.assert_close(x.grad.float(), expected, atol=0.01, rtol=0.01)


def test_autocast_casts_the_input_alone(layer: LowbitLinear) -> None:
    """As it does for nn.Linear, compiled layers too; x of 8 bits is no number to cast."""
    x = X.float().requires_grad_()
    expected = layer(X)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(x), expected)
        assert torch.equal(torch.compile(layer, fullgraph=True, backend="eager")(x), expected)
        with pytest.raises(lowbit.SpecError, match=r"x is torch.int8"):
            layer(X.to(torch.int8))
    layer(x.half()).float().sum().backward()
    wanted = x.grad
    x.grad = None
    with torch.autocast("cpu", torch.bfloat16):
        total = layer(x).float().sum()
    total.backward()
    assert x.grad is not None and torch.equal(x.grad, wanted)


# -- other values in the same memory


def test_a_layer_takes_another_weight_in_its_memory() -> None:
    """It multiplies by the new weight, from the same addresses; so does what holds its tensors."""
    config = QuantConfig("u4", 32, clip="max")
    first, second = (nn.Linear(64, 32).bfloat16() for _ in range(2))
    layer, x = LowbitLinear.from_linear(first, config), torch.randn(3, 64).bfloat16()
    before, held, addresses = layer(x), layer.packed, [buffer.data_ptr() for buffer in layer.buffers()]
    assert layer.update_(second.weight, config) is layer
    with torch.no_grad():
        second.bias.copy_(first.bias)  # which stays
    expected = LowbitLinear.from_linear(second, config)(x)
    assert torch.equal(layer(x), expected) and not torch.equal(before, expected)
    assert torch.equal(layer.matmul(x, held), expected)
    assert [buffer.data_ptr() for buffer in layer.buffers()] == addresses


def test_a_layer_takes_a_packed_weight_in_its_memory() -> None:
    config = QuantConfig("u4", 32)
    first, second = (LowbitLinear.from_linear(nn.Linear(64, 32).bfloat16(), config) for _ in range(2))
    x = torch.randn(3, 64).bfloat16()
    first(x)
    assert torch.equal(first.update_(second.packed)(x), second(x))
    first.state_dict()  # its codes are those that were packed


def test_weights_that_do_not_fit_in_the_memory_of_another() -> None:
    layer = LowbitLinear.from_linear(nn.Linear(64, 32).half(), QuantConfig("u4", 32))
    x = torch.randn(3, 64).half()
    before = layer(x)
    other = LowbitLinear.from_linear(nn.Linear(64, 48).half(), QuantConfig("u4", 32)).packed
    with pytest.raises(PackError, match=r"the other weight is \(.*\), and this one \(.*\); pack it with this spec"):
        layer.update_(other)
    with pytest.raises(PackError, match=r"packed with weight='u3' \(not 'u4'\)"):
        layer.update_(torch.randn(32, 64).half(), QuantConfig("u3", 32))
    with pytest.raises(PackError, match="must be a PackedWeight, not str"):
        layer.packed.update_("weight")  # type: ignore[arg-type]
    wide = {**layer.packed, "scales": torch.full_like(layer.get_buffer("scales"), 60000.0)}
    with pytest.raises(PackError, match="are beyond f16, to which kernels round this one"):
        layer.packed.update_(PackedWeight(layer.spec, wide))
    assert torch.equal(layer(x), before)
