"""AWQ in a model: scales go into norms, the model computes the same, and where that can't be the report says why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import lowbit
from lowbit import LowbitLinear, QuantConfig, QuantizeError
from lowbit.pylib.nn.fold import Fold

transformers = pytest.importorskip("transformers")

AWQ = QuantConfig("u4", group_size=32, method="awq")
RTN = QuantConfig("u4", group_size=32)
SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
}
INPUTS = [torch.arange(96).reshape(4, 24) * prime % 64 for prime in (5, 7, 11)]


def with_large_columns(model: nn.Module) -> nn.Module:
    """Returns a model whose norms multiply a few columns by much."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, norm in model.named_modules():
            if "norm" in name and isinstance(getattr(norm, "weight", None), nn.Parameter):
                norm.weight.add_(0.2 * torch.rand(norm.weight.shape, generator=generator))
                norm.weight[::13] += 12
    return model.eval()


def llama(**sizes: Any) -> Any:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, **sizes}))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    return with_large_columns(model).bfloat16()


def gemma() -> Any:
    torch.manual_seed(0)
    config = transformers.Gemma2Config(**SIZES, query_pre_attn_scalar=16)
    return with_large_columns(transformers.Gemma2ForCausalLM(config)).bfloat16()


class Encoder(nn.Module):
    """A block of a transformer; `post`: norms stand after the sums, so that a residual has their outputs, too."""

    def __init__(self, post: bool) -> None:
        super().__init__()
        self.post, self.norm_1, self.norm_2 = post, nn.LayerNorm(64), nn.LayerNorm(64)
        self.up, self.down, self.out = nn.Linear(64, 128), nn.Linear(128, 64), nn.Linear(64, 64, bias=False)
        nn.init.normal_(self.norm_1.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm_1(x)
        y = self.down(torch.relu(self.up(x)))
        return self.out(self.norm_2(x + y if self.post else y))


def encoder(post: bool) -> Any:
    torch.manual_seed(0)
    return with_large_columns(Encoder(post)).half()


X = [torch.randn(64, 64, generator=torch.Generator().manual_seed(2)).half() for _ in range(2)]


@torch.no_grad()
def output_error(make: Callable[[], Any], config: QuantConfig, inputs: list[torch.Tensor], **options: Any) -> float:
    """Returns how far a quantized model's outputs are from the float model's."""
    model, total = make(), 0.0
    expected = [as_tensor(model(x)).float() for x in inputs]
    lowbit.quantize_(model, config, calibration=inputs, **options)
    for x, output in zip(inputs, expected):
        total += float((as_tensor(model(x)).float() - output).square().sum())
    return total


def as_tensor(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output.logits


CASES: dict[str, tuple[Callable[[], Any], list[torch.Tensor], str]] = {
    "llama": (llama, INPUTS, "model.layers.0.input_layernorm"),
    "gemma": (gemma, INPUTS, "model.layers.0.pre_feedforward_layernorm"),
    "encoder": (lambda: encoder(False), X, "norm_1"),
}


@pytest.mark.parametrize("case", CASES)
def test_no_worse_than_rounding(case: str) -> None:
    make, inputs, _ = CASES[case]
    assert output_error(make, AWQ, inputs) < 0.9 * output_error(make, RTN, inputs)


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_norm_and_layers_compute_the_same(case: str) -> None:
    """With 8 bits, the quantized model is the float model, although its norm has changed."""
    make, inputs, name = CASES[case]
    model = make()
    before = model.get_submodule(name).weight.clone()
    lowbit.quantize_(model, QuantConfig("u8", 16, method="awq"), calibration=inputs)
    assert not torch.equal(model.get_submodule(name).weight, before)
    expected = as_tensor(make()(inputs[0])).float()
    assert float((as_tensor(model(inputs[0])).float() - expected).norm() / expected.norm()) < 0.03


@torch.no_grad()
def test_siblings_share_their_scales() -> None:
    model, dense = llama(), llama()
    report = lowbit.quantize_(model, AWQ, calibration=INPUTS)
    norm = "model.layers.0.input_layernorm"
    scales = dense.get_submodule(norm).weight.float() / model.get_submodule(norm).weight.float()
    for part in ("q_proj", "k_proj", "v_proj"):
        name = f"model.layers.0.self_attn.{part}"
        assert report[name].note == f"column scales are in {norm}" and report[name].format == "u4 per 32, awq"
        layer, weight = model.get_submodule(name), dense.get_submodule(name).weight.float() * scales
        assert float((layer.dequantize().float() - weight).norm() / weight.norm()) < 0.12
    note = report["model.layers.0.self_attn.o_proj"].note
    assert note.startswith("AWQ scales nothing here: its input comes from no norm") and note in str(report)


@torch.no_grad()
@pytest.mark.parametrize("method", ["awq", "rtn"])
def test_scales_go_into_linear_layers(method: str) -> None:
    """The value's rows are divided for the output's columns, and those of up for down, however they are rounded."""
    model, dense = (llama(num_key_value_heads=4, num_hidden_layers=2, mlp_bias=True) for _ in range(2))
    sources = dict.fromkeys(("*.v_proj", "*.up_proj"), QuantConfig("u8", 32, method=method, clip="mse"))
    report = lowbit.quantize_(
        model, {**sources, "*": QuantConfig("u8", 32, method="awq", clip="mse")}, calibration=INPUTS
    )
    for layer in ("0", "1"):
        for source, target in (("self_attn.v_proj", "self_attn.o_proj"), ("mlp.up_proj", "mlp.down_proj")):
            source, target = (f"model.layers.{layer}.{name}" for name in (source, target))
            assert report[target].note == f"column scales are in {source}" and report[source].error < 0.02
            scales = model.get_submodule(target).dequantize().float() / dense.get_submodule(target).weight.float()
            columns = scales.nanmedian(0).values
            assert float(columns.max() / columns.min()) > 1.05
            if (bias := model.get_submodule(source).bias) is not None:
                plain = dense.get_submodule(source).bias.float()
                torch.testing.assert_close(bias * columns, plain, rtol=0.05, atol=1e-3)
    expected, given = (as_tensor(each(INPUTS[0])).float() for each in (dense, model))
    assert float((given - expected).norm() / expected.norm()) < 0.03


def test_layers_that_take_no_factor_stay() -> None:
    """Rows of a dense layer, and those with scales that are powers of two."""
    power_of_two = QuantConfig("f8e4m3", 32, scale="e8m0", clip="max")
    for other in (None, power_of_two):
        report = lowbit.quantize_(llama(), {"*.up_proj": other, "*.gate_proj": other, "*": AWQ}, calibration=INPUTS)
        assert "from no quantized layer column by column" in report["model.layers.0.mlp.down_proj"].note


def test_scales_pass_a_relu() -> None:
    report = lowbit.quantize_(encoder(post=False), replace(AWQ, clip="mse"), calibration=X)
    assert report["down"].note == "column scales are in up"


def test_a_norm_that_a_residual_reads_stays() -> None:
    model = encoder(post=True)
    before = model.norm_1.weight.clone()
    report = lowbit.quantize_(model, AWQ, calibration=X)
    assert torch.equal(model.norm_1.weight, before)
    assert report["up"].note == "AWQ scales nothing here: more than linear layers reads the output of norm_1"
    assert report["out"].note == "column scales are in norm_2"
    assert isinstance(model.up, LowbitLinear) and report["up"].error


def test_a_norm_that_a_dense_layer_reads_stays() -> None:
    model = llama()
    report = lowbit.quantize_(model, {"*.q_proj": None, "*.v_proj": RTN, "*": AWQ}, calibration=INPUTS)
    note = report["model.layers.0.self_attn.k_proj"].note
    assert "q_proj reads the output of model.layers" in note and "not quantized by AWQ" in note
    assert report["model.layers.0.mlp.up_proj"].note.startswith("column scales are in")


class Squared(nn.Module):
    """No norm: it multiplies by the square of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(64) + 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight**2


def test_other_norms_stay() -> None:
    model = nn.Sequential(Squared(), nn.Linear(64, 64)).half()
    report = lowbit.quantize_(model, AWQ, calibration=X)
    assert report["1"].note == "AWQ scales nothing here: 0 multiplies by something else than its weight"
    norm, other = nn.LayerNorm(64), nn.LayerNorm(64)
    other.weight = norm.weight
    report = lowbit.quantize_(nn.Sequential(norm, other, nn.Linear(64, 64)).half(), AWQ, calibration=X)
    assert report["2"].note == "AWQ scales nothing here: the weight of 1 is also 0.weight"


@torch.no_grad()
def test_scales_of_a_fold_are_those_after_rounding() -> None:
    """A column whose new factor would be rounded to zero keeps its own; all others are divided by what is returned."""
    norm = nn.LayerNorm(3).bfloat16()
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([0.5, 2.0, 0.0]))
    given = torch.tensor([3e4, 3.0, 5.0])
    for offset in (0.0, 1.0):
        parameters, scales = Fold("", norm, (), offset).parameters(given)
        factors = norm.weight.detach().float() + offset
        assert torch.allclose((parameters["weight"].float() + offset) * scales, factors, rtol=1e-6)
    assert scales[0] == 1 and scales[1] == pytest.approx(3, rel=0.05)


@pytest.mark.parametrize(
    ("calibration", "message"),
    [
        ([], "up: method='awq' needs calibration="),
        ([X[0] * torch.nan], "input 0 of calibration= has NaN"),
        ([X[0], X[0] * torch.nan], "up: x has NaN or inf in token 0"),
    ],
)
def test_failure_leaves_the_model_as_it_was(calibration: list[torch.Tensor], message: str) -> None:
    model = encoder(post=False)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(QuantizeError, match=message):
        lowbit.quantize_(model, AWQ, calibration=calibration)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    with torch.no_grad():
        model.out.weight[3, 5] = torch.inf
        state["out.weight"][3, 5] = torch.inf
    with pytest.raises(QuantizeError):
        lowbit.quantize_(model, AWQ, calibration=X)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
