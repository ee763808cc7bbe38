"""`lowbit.quantize_` replaces what it can, says what it can't, and leaves a model alone that it fails on."""

from __future__ import annotations

import io
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

import lowbit
from lowbit import LowbitLinear, QuantConfig, QuantizeError
from lowbit.pylib.nn import observe, progress, quantize_planned
from lowbit.pylib.nn.quantize_layer import quantized_layer

U4 = QuantConfig("u4", group_size=64)
GPTQ = QuantConfig("u3", group_size=64, method="gptq")


class Model(nn.Module):
    """Layers of every kind that is decided upon; `shared` stands in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.tied = nn.Embedding(64, 128), nn.Linear(128, 64, bias=False)
        self.tied.weight = self.embed.weight
        self.body = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 100), nn.Linear(100, 128))
        self.shared = self.again = nn.Linear(128, 128, bias=False)
        self.attention = nn.MultiheadAttention(128, 2)
        self.hooked, self.lm_head = nn.Linear(128, 64), nn.Linear(128, 64)
        self.hooked.register_forward_hook(lambda *_: None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.again(self.shared(self.body(x))))


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model().half()


def quantized(model: nn.Module) -> list[str]:
    return [name for name, m in model.named_modules(remove_duplicate=False) if isinstance(m, LowbitLinear)]


def test_replaced_forward_is_not_lost(model: Model) -> None:
    """accelerate puts a forward of its own into modules, which moves inputs from device to device."""
    forward = model.body[0].forward
    model.body[0].forward = lambda x: forward(x)
    report = lowbit.quantize_(model, U4)
    assert "its forward was replaced" in report["body.0"].reason and "body.1" in quantized(model)


@torch.no_grad()
def test_every_matrix_is_in_the_report(model: Model, capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.randn(4, 128).half()
    expected, weight = model(x), model.body[0].weight.float()
    report = lowbit.quantize_(model, U4)
    reasons = {row.name: row.reason for row in report.dense}
    assert quantized(model) == [name for row in report.quantized for name in row.name.split(" = ")]
    assert {row.name for row in report.quantized} == {"body.0", "body.1", "shared = again"}
    assert model.shared is model.again
    assert reasons["embed"] == "an embedding" and report["embed"].option == "embeddings"
    assert reasons["tied"] == "its weight is tied to that of embed" and report["tied"].option == "embeddings"
    assert "dense: an embedding; embeddings=True quantizes it" in str(report)
    assert reasons["body.2"].startswith("group_size=64 must divide k=100; try 50 or 100")
    assert reasons["attention"] == "MultiheadAttention is no nn.Linear"
    assert "subclass of nn.Linear" in reasons["attention.out_proj"]
    assert "hooks" in reasons["hooked"] and report["lm_head"].option == "lm_head" and len(report) == 10
    row = report["body.0"]
    error = (model.body[0].dequantize().float() - weight).norm() / weight.norm()
    assert row.error == pytest.approx(float(error), rel=1e-2)
    assert row.bytes_before == 2 * 128 * 129 and row.bytes_after == model.body[0].packed.nbytes
    assert float((model(x) - expected).norm() / expected.norm()) < 0.2
    assert all(row.name in str(report) and row.reason in str(report) for row in report)
    assert "3 of 10 layers quantized" in str(report) and capsys.readouterr().err == ""


def test_options_quantize_more(model: Model) -> None:
    report = lowbit.quantize_(model, U4, lm_head=True, per_row_if_indivisible=True)
    assert {"lm_head", "body.2"} <= {row.name for row in report.quantized}
    assert report["body.2"].format == "u4 per row, rtn"
    again = lowbit.quantize_(model, {"hooked": None})
    assert again["body.2"].reason == "quantized before" and not again.quantized


def test_groups_of_k_quants_that_do_not_divide() -> None:
    """Fewer groups share a second level, then none; there is one scale per row where no group of this size fits."""
    model = nn.Sequential(*[nn.Linear(k, 16, dtype=torch.bfloat16) for k in (256, 128, 96, 80)])
    lowbit.quantize_(model, QuantConfig.preset("q4_k"), per_row_if_indivisible=True)
    specs = [layer.spec for layer in model]
    assert [spec.group_size for spec in specs] == [32, 32, 32, None]
    assert [spec.bilevel and spec.bilevel.groups for spec in specs] == [8, 4, None, None]
    assert [spec.scale for spec in specs] == ["u6", "u6", "f16", "f16"]


def test_first_pattern_counts(model: Model) -> None:
    chosen = {"body.0": None, "body.*": U4, "lm_head": QuantConfig("i8", None)}
    report = lowbit.quantize_(model, chosen, lambda name, layer: layer.out_features != 100)
    assert quantized(model) == ["lm_head"] and report["lm_head"].format == "i8 per row, rtn"
    assert report["body.0"].reason == "config['body.0'] is None"
    assert report["body.1"].reason == "filter_fn returned False"
    assert report["shared = again"].reason == "no pattern of the configuration matches"


@pytest.mark.parametrize("most_bytes", [1, 1 << 30])
def test_calibration_sees_the_inputs_of_each_layer(most_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same codes as by hand, whether layers are observed together or one after the other; modes are kept."""
    monkeypatch.setattr(observe, "MOST_BYTES", most_bytes)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 128), nn.Dropout(0.5), nn.Linear(128, 64)).half().train()
    inputs = [torch.randn(90, 128).half() for _ in range(2)]
    expected = []
    for layer, hidden in ((model[0], inputs), (model[2], [model[0](x) for x in inputs])):
        calibration = lowbit.Calibration(128)
        for x in hidden:
            calibration.add(x)
        expected.append(lowbit.quantize(layer.weight, GPTQ, calibration).codes)
    assert not lowbit.quantize_(model, GPTQ, calibration=[(inputs[0],), {"input": inputs[1]}]).dense
    assert model.training and model[1].training and model[2].training
    assert [torch.equal(model[i].packed.unpack(), codes) for i, codes in zip((0, 2), expected)] == [True, True]


def test_dense_layers_are_let_go_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a layer is quantized, those before it are in memory in low bits only."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).half()
    weights = [weakref.ref(layer.weight) for layer in model]
    alive: list[int] = []

    def counting(*arguments: Any) -> Any:
        alive.append(sum(weight() is not None for weight in weights))
        return quantized_layer(*arguments)

    monkeypatch.setattr(quantize_planned, "quantized_layer", counting)
    lowbit.quantize_(model, U4)
    assert alive == [4, 3, 2, 1]


def test_a_scale_beyond_its_type_leaves_the_model_as_it_was(model: Model) -> None:
    model.bfloat16()
    with torch.no_grad():
        model.shared.weight[0, 0] = 1e30
    modules = dict(model.named_modules())
    with pytest.raises(QuantizeError, match=r"shared: group 0 of row 0 needs a scale beyond f16"):
        lowbit.quantize_(model, QuantConfig("u4", 32, scale="f16"))
    assert dict(model.named_modules()) == modules
    assert lowbit.quantize_(model, QuantConfig("u4", 32)).quantized


@pytest.mark.parametrize(
    ("act", "zeros", "scale"),
    [("bf16", "int", "bf16"), ("bf16", "none", "bf16"), ("bf16", "float", "f16"), ("f16", "int", "f16")],
)
def test_scales_have_the_type_in_which_layers_multiply(model: Model, act: Any, zeros: Any, scale: str) -> None:
    """The model is in f32, so that the type of its weights can't be what decides. Float zeros keep their digits."""
    lowbit.quantize_(model, QuantConfig("u4", 32, zeros, method="rtn"), act=act)
    specs = {module.spec for module in model.modules() if isinstance(module, LowbitLinear)}
    assert {(spec.act, spec.scale) for spec in specs} == {(act, scale)}
    weight = torch.randn(32, 64, dtype=torch.bfloat16 if act == "bf16" else torch.float16)
    assert lowbit.quantize(weight, QuantConfig("u4", 32, zeros, method="rtn")).spec().scale == scale
    layer = LowbitLinear.from_linear(model.lm_head.float(), QuantConfig("u4", 32, zeros, method="rtn"), act=act)
    assert layer.spec.scale == scale


def test_without_a_configuration_data_decide() -> None:
    """With calibration layers are quantized by GPTQ, else rounded to nearest; so is a weight."""
    x = torch.randn(300, 256).half()
    for calibration, method in (([x], "gptq"), (None, "rtn"), ([], "rtn")):
        model = torch.nn.Sequential(torch.nn.Linear(256, 64)).half().requires_grad_(False)
        weight = model[0].weight.clone()
        report = lowbit.quantize_(model, calibration=calibration, progress=False)
        assert report["0"].format == f"u4 per 128, {method}"
        given = x if calibration else None
        expected = lowbit.quantize(weight, QuantConfig("u4", 128, method=method), given)  # type: ignore[arg-type]
        found = lowbit.quantize(weight, calibration=given)
        assert torch.equal(found.codes, expected.codes) and found.config == expected.config


def spoil(model: Model) -> None:
    with torch.no_grad():
        model.lm_head.weight[3, 5] = torch.nan


X = torch.randn(4, 128).half()
FAILURES: dict[str, tuple[dict[str, Any], str]] = {
    "NaN in the last layer": ({"config": U4, "lm_head": True}, r"lm_head: weight\[3, 5\] = nan must be finite"),
    "unknown name": ({"config": {"body.O": U4}}, r"config\['body.O'\] matches no linear layer; did you mean 'body"),
    "no name": ({"config": {"xyz": U4}}, r"matches no linear layer; the layers are 'embed', .*'body.2', ...$"),
    "no configuration": ({"config": {"body.0": "u4"}}, r"config\['body.0'\]='u4' must be a QuantConfig, or None"),
    "neither": ({"config": "u4"}, r"config=.u4. must be a QuantConfig, .* QuantConfigs; say QuantConfig\(.u4., 128\)"),
    "no calibration": ({"config": GPTQ}, r"body.0: method='gptq' needs calibration="),
    "a bare tensor": ({"config": GPTQ, "calibration": X}, r"calibration= must be a list of model inputs.*\[x\]"),
    "wrong shape": ({"config": GPTQ, "calibration": [X[:, :7]]}, r"^body.0: x must be \[..., k=128\], not \[4, 7\]"),
    "wrong name": ({"config": GPTQ, "calibration": [{"y": X}]}, "Model: the model can't be run on input 0 of calib"),
    "wrong shape elsewhere": (
        {"config": {"lm_head": GPTQ}, "calibration": [X[:, :7]]},
        "^body.0: the model can't be run on input 0 of calibration=: mat1 and mat2",
    ),
    "NaN in an input": ({"config": GPTQ, "calibration": [X, X * torch.nan]}, "body.0: x has NaN or inf in token 0"),
    "no list": ({"config": GPTQ, "calibration": 5}, r"calibration= must be a list of model inputs, not int"),
    "no inputs": ({"config": GPTQ, "calibration": [5]}, "^body: the model can't be run on input 0 of calib"),
    "texts": ({"config": GPTQ, "calibration": ["text"]}, "calibration= has texts, and no tokenizer is found for 'Mod"),
    "no function": ({"config": U4, "filter_fn": "body.*"}, r"filter_fn='body.\*' must be a function of a name and"),
    "no device": ({"config": U4, "device": "gpu"}, "device=gpu is no device; use cpu or cuda"),
    "meta": ({"config": U4, "device": "meta"}, "device=meta: .* made and multiplied on cpu and cuda"),
    "device": ({"config": U4, "device": "cuda:99"}, "device=cuda:99: torch finds .* here; use cpu"),
    "act": ({"config": U4, "act": "f32"}, "act='f32' must be one of"),
    "AWQ": ({"config": QuantConfig("u4", 64, method="awq")}, r"body.0: method='awq' needs calibration="),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_failure_leaves_the_model_as_it_was(failure: str, model: Model) -> None:
    spoil(model)
    modules, hooks = dict(model.named_modules()), [len(m._forward_pre_hooks) for m in model.modules()]
    arguments, message = FAILURES[failure]
    with pytest.raises(lowbit.LowbitError, match=message):
        lowbit.quantize_(model, **arguments)
    assert dict(model.named_modules()) == modules and model.training
    assert [len(m._forward_pre_hooks) for m in model.modules()] == hooks


def test_models_that_cannot_be_quantized() -> None:
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: lowbit.quantize_(nn.Linear(64, 64).half()), "use LowbitLinear.from_linear"),
        (lambda: lowbit.quantize_(torch.ones(64, 64)), "must be an nn.Module, not Tensor"),  # type: ignore[arg-type]
        (lambda: lowbit.fuse_("llama"), "must be an nn.Module, not str"),  # type: ignore[arg-type]
        (lambda: lowbit.save_checkpoint("llama", "low"), "must be an nn.Module, not str"),  # type: ignore[arg-type]
        (lambda: lowbit.load_checkpoint("llama", "low"), "must be an nn.Module, not str"),  # type: ignore[arg-type]
        (lambda: lowbit.LowbitLinear(64, 64), "spec=64 must be .*use LowbitLinear.from_linear"),  # type: ignore[arg-type]
        (
            lambda: lowbit.quantize_(nn.Sequential(nn.Linear(128, 64))),
            r"0: weight is torch.float32.*model.bfloat16\(\)",
        ),
        (lambda: lowbit.quantize_(nn.Sequential(nn.Linear(128, 64, device="meta")), act="f16"), "0: weight is on meta"),
        (lambda: lowbit.quantize_(nn.Sequential(nn.LazyLinear(64))), "0: LazyLinear has no weight yet; run"),
        (lambda: LowbitLinear.from_linear(nn.Linear(64, 64), "u4"), "config='u4' must be"),  # type: ignore[arg-type]
    ]
    for call, message in calls:
        with pytest.raises(lowbit.LowbitError, match=message):
            call()


def test_progress_is_shown_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many layers are done, the time that is left, the memory in use, and which layer is next."""
    shown = io.StringIO()
    monkeypatch.setattr(progress, "Console", lambda **_: Console(file=shown, force_terminal=True, width=120))
    with progress.LayerBar(True, 3, None) as bar:
        for name in ("body.0", "body.1"):
            bar.begin(name)
            bar._bar.refresh()
            bar.end()
    assert re.search(r"1/3.* left: .*\d:\d\d:\d\d.* \d+\.\d GB in memory.* body\.1", shown.getvalue())
    hidden = io.StringIO()
    monkeypatch.setattr(progress, "Console", lambda **_: Console(file=hidden))
    lowbit.quantize_(nn.Sequential(nn.Linear(64, 64)).half(), U4)
    assert hidden.getvalue() == ""


def test_codes_are_no_weights(model: Model) -> None:
    """Layers of libraries that keep codes in nn.Linear, and their scales elsewhere."""
    for name, kind in (("0", torch.float8_e4m3fn), ("1", torch.int8)):
        model.body.get_submodule(name).weight = nn.Parameter(torch.ones(128, 128).to(kind), requires_grad=False)
    report = lowbit.quantize_(model, U4, act="f16")
    for name, kind in (("0", "float8_e4m3fn"), ("1", "int8")):
        assert report[f"body.{name}"].reason.startswith(f"its weight is torch.{kind}: codes of a model")
    with pytest.raises(lowbit.SpecError, match=r"weight is torch.int8: codes of a model"):
        LowbitLinear.from_linear(model.body[1], U4)


def test_layer_that_no_input_reaches(model: Model) -> None:
    del model.hooked, model.attention
    model.unused = nn.Linear(128, 64).half()
    with pytest.raises(lowbit.QuantizeError, match="unused: no calibration input got here"):
        lowbit.quantize_(model, {"unused": GPTQ}, calibration=[X])
