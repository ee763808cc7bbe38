"""Models in SGLang, by small fakes of its classes, and layers of SGLang itself where it is installed: CI has it not."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowbit
from lowbit import CheckpointError, LowbitConfig, LowbitLinear, QuantConfig, SpecError
from lowbit.pylib.integrations.serving.rows import opened

transformers = pytest.importorskip("transformers")

from pytests.models import fake_sglang  # noqa: E402
from pytests.models import test_moe_checkpoints as moe_checkpoints  # noqa: E402
from pytests.models.sglang_interface import SGLANG  # noqa: E402
from pytests.models.test_vllm import by_experts, chosen, close, dense_experts, lowbit_experts  # noqa: E402
from pytests.models.vllm_interface import missing  # noqa: E402

U4 = QuantConfig("u4", 32, clip="max")


@pytest.fixture
def config() -> Iterator[Any]:
    with fake_sglang.installed() as found:
        torch.set_default_dtype(torch.bfloat16)  # as while a model is made
        yield found
    torch.set_default_dtype(torch.float32)


class Block(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(64, n, bias) for n in (64, 32, 32))
        self.o_proj = nn.Linear(64, 32, False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)


def saved(folder: Path, configs: Any = U4, seed: int = 0, **options: Any) -> nn.Module:
    """Saves a model with one block; returns it."""
    torch.manual_seed(seed)
    model = nn.ModuleDict({"layers": nn.ModuleList([Block(False)]), "embed": nn.Embedding(64, 64)}).bfloat16()
    lowbit.quantize_(model, configs, progress=False, **options)
    lowbit.save_checkpoint(model, folder)
    return model


def serving_of(config: Any, folder: Path, **written: Any) -> Any:
    """Returns what SGLang's get_quant_config makes of a folder."""
    about = {"hf_config": SimpleNamespace(_name_or_path=str(folder)), "packed_modules_mapping": {}}
    return config.LowbitServing.from_config({**(written or LowbitConfig().to_dict()), **about})


def layers_of(serving: Any, rank: int = 0, count: int = 1) -> nn.Module:
    """Returns the layers of the saved model as SGLang makes them."""
    qkv, o = fake_sglang.LinearBase(128, 64), fake_sglang.LinearBase(32, 64)
    qkv.take(serving.get_quant_method(qkv, "layers.0.qkv_proj"), [n // count for n in (64, 32, 32)], None, rank, count)
    o.take(serving.get_quant_method(o, "layers.0.o_proj"), [32], 64 // count, rank, count)
    return nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"qkv_proj": qkv, "o_proj": o})])})


def tensors_of(folder: Path) -> dict[str, Tensor]:
    checkpoint = opened(folder)
    return {name: checkpoint.tensors[name] for name in checkpoint.tensors}


def test_sglang_learns_of_lowbit(config: Any) -> None:
    """By an entry point, as a method of quantization and on the command line, once."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    module, _, function = project["entry-points"]["sglang.srt.plugins"]["lowbit"].partition(":")
    for _ in range(2):
        getattr(import_module(module), function)()
    assert list(config.QUANTIZATION_METHODS.items()) == [("lowbit", config.LowbitServing)]
    assert config.QUANTIZATION_CHOICES == ["fp8", "lowbit"]
    override = config.LowbitServing.override_quantization_method
    assert override({"quant_method": "gptq"}, "lowbit") == "lowbit" and override({"quant_method": "gptq"}, None) is None
    assert "sglang.srt.layers.linear" in sys.modules


def test_what_another_sglang_lacks(tmp_path: Path) -> None:
    """The check of a wheel names what is missing, and where."""
    with pytest.raises(FileNotFoundError, match="no folder sglang; name a wheel"):
        missing(tmp_path, SGLANG)
    layers = tmp_path / "sglang/srt/layers"
    layers.mkdir(parents=True)
    (tmp_path / "sglang/__init__.py").touch()
    (layers / "linear.py").write_text("class LinearBase:\n    tp_group = None\n")
    found = missing(tmp_path, SGLANG)
    assert "sglang.srt.layers.linear: LinearBase has no input_size" in found
    assert "sglang.srt.layers.linear: LinearBase has no tp_group" not in found
    assert "sglang.srt.runtime_context has no get_schedule" in found


@torch.no_grad()
@pytest.mark.parametrize("configs", [U4, {"*.k_proj": QuantConfig("u8", 64), "*": U4}])
def test_saved_layers_and_other_weights_in_their_place(configs: Any, config: Any, tmp_path: Path) -> None:
    models = [saved(tmp_path / str(seed), configs, seed).get_submodule("layers.0") for seed in (0, 1)]
    served, x = layers_of(serving_of(config, tmp_path / "0")), torch.randn(3, 64).bfloat16()
    layers: Any = served.get_submodule("layers.0")
    held: list[int] = []
    for seed, model in enumerate(models):
        fake_sglang.load(served, tensors_of(tmp_path / str(seed)))
        expected = torch.cat([getattr(model, f"{part}_proj")(x) for part in "qkv"], -1)
        assert torch.equal(layers["qkv_proj"](x), expected) and torch.equal(layers["o_proj"](x), model.o_proj(x))
        held.append(layers["qkv_proj"].lowbit.linears[0].codes.data_ptr())
    assert held[0] == held[1]


@torch.no_grad()
@pytest.mark.parametrize("processes", [2, 4])
def test_processes(processes: int, config: Any, tmp_path: Path) -> None:
    """Each has rows of query, key and value, and columns of what comes behind, in smaller groups where cut."""
    model: Any = saved(tmp_path, QuantConfig("u4", 64, clip="max")).get_submodule("layers.0")
    x, sums, tensors = torch.randn(3, 64).bfloat16(), torch.zeros(3, 32), tensors_of(tmp_path)
    for rank in range(processes):
        served = layers_of(serving_of(config, tmp_path), rank, processes)
        fake_sglang.load(served, tensors)
        layers: Any = served.get_submodule("layers.0")
        parts = [getattr(model, f"{part}_proj")(x).chunk(processes, -1)[rank] for part in "qkv"]
        assert torch.equal(layers["qkv_proj"](x), torch.cat(parts, -1))
        sums += layers["o_proj"](x.chunk(processes, -1)[rank].contiguous()).float()
    assert close(sums, model.o_proj(x))


def test_layers_that_sglang_can_not_serve(config: Any, tmp_path: Path) -> None:
    saved(tmp_path / "a", embeddings=True)
    serving = serving_of(config, tmp_path / "a")
    with pytest.raises(SpecError, match="embed: in SGLang embeddings and output layers are dense"):
        serving.get_quant_method(fake_sglang.VocabParallelEmbedding(), "embed")
    saved(tmp_path / "b", fuse=True)
    served = layers_of(serving_of(config, tmp_path / "b"))
    with pytest.raises(CheckpointError, match="q_k_v_proj: the server's loader has passed no _extra_state, codes"):
        fake_sglang.load(served, tensors_of(tmp_path / "b"))
    with pytest.raises(SpecError, match="SGLang has not said which folder the model is in"):
        config.LowbitServing.from_config(LowbitConfig().to_dict())
    layer = fake_sglang.FusedMoE(4, 64, 128)
    layer.config.activation = "gelu"
    with pytest.raises(SpecError, match="experts: in SGLang low-bit experts have the gate SiLU alone; leave experts"):
        layer.take(config.LowbitServing(LowbitConfig("u4", 32)).get_quant_method(layer, "experts"))


@torch.no_grad()
def test_a_dense_model_is_quantized(config: Any) -> None:
    """As lowbit does it; the dense weight is dropped, and comes back for other weights. Routers stay dense."""
    serving = config.LowbitServing(LowbitConfig("u4", 32, clip="max"))
    assert type(serving.get_quant_method(fake_sglang.LinearBase(), "mlp.gate")).__name__ == "UnquantizedLinearMethod"
    layer, x = fake_sglang.LinearBase(96, 64), torch.randn(3, 64).bfloat16()
    layer.take(serving.get_quant_method(layer, "mlp.gate_up_proj"), [64, 32])
    model = nn.ModuleDict({"up": layer})
    for seed in (0, 1):
        torch.manual_seed(seed)
        dense = nn.Linear(64, 96, False).bfloat16()
        if seed:
            layer.quant_method.restore_weights_before_loading(layer)
        fake_sglang.load(model, {"up.weight": dense.weight.data})
        assert torch.equal(layer(x), LowbitLinear.from_linear(dense, U4)(x)) and layer.weight.numel() == 0
    layer.quant_method.process_weights_after_loading(layer)  # nothing has come
    assert torch.equal(layer(x), LowbitLinear.from_linear(dense, U4)(x))


def experts_model(config: Any, serving: Any, name: str, *sizes: int, **about: int) -> tuple[nn.Module, Any]:
    """Returns a model with the experts of a layer of this name, and these."""
    layer = fake_sglang.FusedMoE(*sizes, **about)
    layer.take(serving.get_quant_method(layer, name))
    model: nn.Module = layer
    for part in reversed(name.split(".")):
        model = nn.ModuleDict({part: model})
    return model, layer


@torch.no_grad()
def test_experts_are_quantized(config: Any) -> None:
    serving, dense = config.LowbitServing(LowbitConfig("u4", 32, clip="max")), dense_experts()
    model, layer = experts_model(config, serving, "mlp.experts", 4, 64, 128)
    tensors = {"mlp.experts.w13_weight": dense.gate_up_proj.data, "mlp.experts.w2_weight": dense.down_proj.data}
    fake_sglang.load(model, tensors)
    x, weights, ids = chosen()
    expected = lowbit_experts(dense)["mlp"]["experts"](x, ids.long(), weights)
    assert close(layer(x, weights, ids), expected)
    layer.config.routed_scaling_factor = 2.5
    assert close(layer(x, weights, ids), 2.5 * expected)


@torch.no_grad()
@pytest.mark.parametrize("processes", [1, 2])
def test_saved_experts(processes: int, config: Any, tmp_path: Path) -> None:
    """Other weights that come later go to the same place."""
    x, weights, ids = chosen()
    models = [lowbit_experts(dense_experts(seed)) for seed in (0, 1)]
    for seed, saved_model in enumerate(models):
        lowbit.save_checkpoint(saved_model, tmp_path / str(seed))
    served = [
        experts_model(config, serving_of(config, tmp_path / "0"), "mlp.experts", 4, 64, 128, rank=rank, count=processes)
        for rank in range(processes)
    ]
    for seed, saved_model in enumerate(models):
        parts: list[Tensor] = []
        for model, layer in served:
            fake_sglang.load(model, tensors_of(tmp_path / str(seed)))
            parts.append(layer(x, weights, ids).float())
        assert close(sum(parts), saved_model["mlp"]["experts"](x, ids.long(), weights))  # type: ignore[arg-type]


@torch.no_grad()
def test_experts_of_another_library(config: Any, tmp_path: Path) -> None:
    written = moe_checkpoints.write("qwen3-moe", "gptq", tmp_path)
    name = "model.layers.1.mlp.experts"
    serving = serving_of(config, tmp_path, **moe_checkpoints.GPTQ)
    model, layer = experts_model(config, serving, name, 3, 64, 32)
    tensors = tensors_of(tmp_path)
    fake_sglang.load(model, tensors)
    leaves = ("gate_proj", "up_proj", "down_proj")
    dense = [[written[f"{name}.{number}.{leaf}"] for leaf in leaves] for number in range(3)]
    x, weights, ids = chosen()
    assert close(layer(x, weights, ids % 3), by_experts(dense, x, weights, ids % 3))
    model, layer = experts_model(config, serving, name, 3, 64, 32)
    with pytest.raises(
        CheckpointError, match=r"experts: the server's loader has passed no down_proj\.scales of expert 2"
    ):
        fake_sglang.load(model, {key: t for key, t in tensors.items() if key != f"{name}.2.down_proj.scales"})


# -- with SGLang

needs_sglang = pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed: docs/howto/sglang.md")


@pytest.fixture
def sglang() -> Iterator[Any]:
    """Yields SGLang's classes, in a process that serves a model alone, and lowbit's configuration."""
    context = import_module("sglang.srt.runtime_context")
    import_module("lowbit.pylib.integrations.sglang").register()
    linear, moe = (import_module(f"sglang.srt.layers.{path}") for path in ("linear", "moe.fused_moe_triton.layer"))
    dispatch, topk = (import_module(f"sglang.srt.layers.moe.{path}") for path in ("token_dispatcher", "topk"))
    groups = "tp", "attn_tp", "moe_ep", "moe_tp"
    one = {f"{group}_size": 1 for group in groups} | {f"{group}_rank": 0 for group in groups}
    with context.get_context().override_server_args(), context.get_parallel().override(**one, tp_group=None):
        torch.set_default_dtype(torch.bfloat16)
        config = import_module("lowbit.pylib.integrations.sglang.config")
        yield SimpleNamespace(config=config, linear=linear, moe=moe, dispatch=dispatch, topk=topk)
        torch.set_default_dtype(torch.float32)


@needs_sglang
@torch.no_grad()
def test_layers_of_sglang(sglang: Any, tmp_path: Path) -> None:
    """Saved layers, by SGLang's own constructors, loaders and calls."""
    torch.set_default_dtype(torch.float32)
    model: Any = saved(tmp_path).get_submodule("layers.0")
    torch.set_default_dtype(torch.bfloat16)
    about = {"bias": False, "params_dtype": torch.bfloat16, "quant_config": serving_of(sglang.config, tmp_path)}
    layers = nn.ModuleDict(
        {
            "qkv_proj": sglang.linear.QKVParallelLinear(64, 32, 2, 1, **about, prefix="layers.0.qkv_proj"),
            "o_proj": sglang.linear.RowParallelLinear(64, 32, **about, prefix="layers.0.o_proj"),
        }
    )
    served, x = nn.ModuleDict({"layers": nn.ModuleList([layers])}), torch.randn(3, 64).bfloat16()
    fake_sglang.load(served, tensors_of(tmp_path))
    assert torch.equal(layers["qkv_proj"](x)[0], model(x)) and torch.equal(layers["o_proj"](x)[0], model.o_proj(x))


@needs_sglang
@torch.no_grad()
def test_experts_of_sglang(sglang: Any) -> None:
    """Experts that are quantized when they have been loaded, by SGLang's own constructor, loader and method."""
    dense, (x, weights, ids) = dense_experts().bfloat16(), chosen()
    serving = sglang.config.LowbitServing(LowbitConfig("u4", 32, clip="max"))
    about = {"params_dtype": torch.bfloat16, "quant_config": serving, "prefix": "layers.0.mlp.experts"}
    layer = sglang.moe.FusedMoE(4, 64, 128, 0, top_k=2, **about)
    for expert in range(4):
        gate, up = dense.gate_up_proj[expert].chunk(2)
        for name, tensor, shard in (("w13", gate, "w1"), ("w13", up, "w3"), ("w2", dense.down_proj[expert], "w2")):
            parameter = getattr(layer, f"{name}_weight")
            parameter.weight_loader(parameter, tensor, f"{name}_weight", shard_id=shard, expert_id=expert)
    layer.quant_method.process_weights_after_loading(layer)
    topk = sglang.topk.StandardTopKOutput(weights, ids, torch.empty(6, 4))
    given = sglang.dispatch.StandardDispatchOutput(x, None, topk)
    expected = lowbit_experts(dense)["mlp"]["experts"](x, ids.long(), weights)
    assert close(layer.quant_method.apply(layer, given).hidden_states, expected)
