"""Models in vLLM: what its layers are made of, and that it answers as transformers does on the same folder.

The second half needs vLLM, which CI does not have; docs/howto/vllm.md says how to install it. The first half does not.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import chain, product
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import lowbit
from lowbit import CheckpointError, LowbitConfig, LowbitLinear, PackError, QuantConfig, SpecError
from lowbit.passes.targets import parse_target
from lowbit.pylib.build import driver
from lowbit.pylib.checkpoints.contents import contents
from lowbit.pylib.checkpoints.registry import import_experts
from lowbit.pylib.experts import by_kernel
from lowbit.pylib.integrations.serving import experts as vllm_experts
from lowbit.pylib.integrations.serving import startup as vllm_startup
from lowbit.pylib.integrations.serving.expert_sources import ExpertShare, source_of_experts
from lowbit.pylib.integrations.serving.experts import GATES, Experts, each_of, gated, quantize_experts
from lowbit.pylib.integrations.serving.names import Names, Place
from lowbit.pylib.integrations.serving.rows import Layer, Rows, Share, Source, opened, quantize_rows, shares_of
from lowbit.pylib.matmul import Matmul
from lowbit.pylib.nn.gated_linear import GatedLinear
from lowbit.pylib.runtime import batch_invariant

transformers = pytest.importorskip("transformers")

from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts  # noqa: E402

from pytests.models import fake_vllm, vllm_interface  # noqa: E402
from pytests.models import test_moe_checkpoints as moe_checkpoints  # noqa: E402
from pytests.models.vllm_answers import PROMPTS  # noqa: E402

needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: docs/howto/vllm.md")

PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
U4 = QuantConfig("u4", 32, clip="max")


class Block(nn.Module):
    """Layers as transformers calls those of a model."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(64, n, bias) for n in (64, 32, 32))
        self.down_proj = nn.Linear(128, 64, bias)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)


def saved(folder: Path, configs: Any = U4, bias: bool = False, fuse: bool = False, seed: int = 0) -> nn.Module:
    """Saves a model with one block and an embedding; returns it."""
    torch.manual_seed(seed)
    model = nn.ModuleDict({"embed": nn.Embedding(48, 64), "layers": nn.ModuleList([Block(bias)])}).bfloat16()
    lowbit.quantize_(model, configs, embeddings=True, fuse=fuse, progress=False)
    lowbit.save_checkpoint(model, folder)
    return model


def layer_of(model: nn.Module, name: str) -> LowbitLinear:
    found = model.get_submodule(f"layers.0.{name}")
    assert isinstance(found, LowbitLinear)
    return found


def load_rows(folder: Path, modules: Sequence[str], share: Share) -> Rows:
    """Returns the layer that modules of a checkpoint make, with their biases."""
    checkpoint, parts, biases = opened(folder), list[Layer](), list[Tensor]()
    for shared in shares_of([Source.of(checkpoint, module) for module in modules], share, "bf16"):
        names = checkpoint.names_of(shared.source.module)
        tensors = {short: checkpoint.tensors[full] for short, full in names.items()}
        bias = tensors.pop("bias", None)
        parts.append(shared.layer({short: shared.sliced(short, tensor) for short, tensor in tensors.items()}))
        biases += [] if bias is None else [shared.bias_of(bias)]
    rows = Rows(parts)
    return rows.with_bias(torch.cat(biases)) if biases else rows


# -- without vLLM


def test_the_entry_point_is_light() -> None:
    """It is there, and loading it loads neither vLLM nor torch."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    module, _, function = project["entry-points"]["vllm.general_plugins"]["lowbit"].partition(":")
    assert callable(getattr(import_module(module), function))
    code = f"import sys, {module}; print({{'vllm', 'torch', 'transformers'}} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"


def test_names_of_modules(tmp_path: Path) -> None:
    saved(tmp_path)
    names = Names(opened(tmp_path))
    qkv = tuple(f"layers.0.{part}" for part in PACKED["qkv_proj"])
    assert names.take("layers.0.qkv_proj", PACKED) == qkv and names.take("layers.0.o_proj", PACKED) == ()
    assert set(names.taken) == set(qkv)
    names.rename(lambda name: f"model.{name}")
    assert names.take("model.layers.0.qkv_proj", PACKED) == qkv
    assert names.parts("model.layers.0.qkv_proj", PACKED) == qkv
    assert {*names.below("model.layers")} == {*qkv, "layers.0.down_proj"} and names.below("model.layer") == []
    renamed = names.renamed()
    assert renamed["layers.0.k_proj.codes"] == "layers.0.qkv_proj.part1_codes"  # vLLM puts the rest in front
    assert renamed["model.layers.0.k_proj.codes"] == "model.layers.0.qkv_proj.part1_codes"
    assert renamed["layers.0.v_proj._extra_state"] == "layers.0.qkv_proj.part2__extra_state"
    assert not [name for name in renamed if "down_proj" in name]


def test_names_that_vllm_changes_on_the_way(tmp_path: Path) -> None:
    """A module's new place is named so that vLLM's own renaming leads there; if nothing does, that is an error."""
    saved(tmp_path)
    names = Names(opened(tmp_path))
    names.rename(lambda name: name.replace("layers", "blocks"))
    assert names.take("blocks.0.qkv_proj", PACKED)
    assert names.renamed()["layers.0.q_proj.codes"] == "layers.0.qkv_proj.part0_codes"
    names.rename(lambda name: name.replace("layers.0.q_proj.weight", "a.b.weight").replace("layers", "blocks"))
    names.taken = {"layers.0.q_proj": Place("a.b")}
    assert names.renamed()["layers.0.q_proj.codes"] == "a.b.part0_codes"
    names.taken = {"layers.0.q_proj": Place("layers.1.qkv_proj")}
    with pytest.raises(CheckpointError, match=r"q_proj: it belongs to layers\.1\.qkv_proj in vLLM"):
        names.renamed()


def test_embeddings_without_a_name(tmp_path: Path) -> None:
    """vLLM does not say what some models call their embedding: it is known by its size."""
    saved(tmp_path)
    names = Names(opened(tmp_path))
    assert names.take_table("", (48, 64)) == names.take_table("embed", (1, 1)) == ("embed",)
    assert names.take_table("", (64, 64)) == ()


def test_embeddings_of_other_libraries_without_a_name(tmp_path: Path) -> None:
    """Only their tensors say how large they are. Without the scale, codes are nobody's, and no dense embedding."""
    scheme = {"num_bits": 8, "type": "int", "strategy": "channel"}
    config = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": scheme}}}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    tensors = {"weight": torch.randint(-128, 128, (48, 64)).to(torch.int8), "weight_scale": torch.ones(48, 1)}
    save_file({f"model.embed.{name}": tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    names = Names(opened(tmp_path))
    assert names.take_table("", (48, 64)) == ("model.embed",) and names.take_table("", (64, 64)) == ()
    save_file({"model.embed.weight": tensors["weight"]}, tmp_path / "model.safetensors")
    opened.cache_clear()
    for read in (opened, contents):
        with pytest.raises(CheckpointError, match=r"embed.weight is I8, of a quantized layer that lacks a tensor"):
            read(tmp_path)


def test_fused_modules_have_a_name_of_their_own(tmp_path: Path) -> None:
    model = saved(tmp_path, fuse=True)
    modules = Names(opened(tmp_path)).take("layers.0.qkv_proj", PACKED)
    assert modules == ("layers.0.q_k_v_proj",)
    x = torch.randn(3, 64).bfloat16()
    rows = load_rows(tmp_path, modules, Share((64, 32, 32), 64))
    assert torch.equal(rows(x), layer_of(model, "q_k_v_proj")(x))


def test_a_layer_of_dense_and_low_bit_modules_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, {"*.k_proj": None, "*": U4})
    names = Names(opened(tmp_path))
    with pytest.raises(CheckpointError, match="one layer of q_proj, k_proj, v_proj, and k_proj is dense in the checkp"):
        names.take("layers.0.qkv_proj", PACKED)


@pytest.mark.parametrize("configs", [U4, {"*.k_proj": QuantConfig("u8", 64), "*": U4}])
def test_rows_of_several_modules(configs: Any, tmp_path: Path) -> None:
    """They are joined where their formats are the same, and multiply as the modules do in either case."""
    model = saved(tmp_path, configs, bias=True)
    modules = Names(opened(tmp_path)).take("layers.0.qkv_proj", PACKED)
    rows = load_rows(tmp_path, modules, Share((64, 32, 32), 64))
    x = torch.randn(3, 64).bfloat16()
    assert torch.equal(rows(x), model.get_submodule("layers.0")(x))
    assert len(rows) == (1 if configs is U4 else 3)


def test_neighbours_of_one_format_are_joined() -> None:
    layers = [LowbitLinear.from_linear(nn.Linear(64, 32, False).bfloat16(), c) for c in (U4, U4, QuantConfig("i4", 32))]
    rows = Rows(layers)
    x = torch.randn(2, 64).bfloat16()
    assert [layer.out_features for layer in rows.children()] == [64, 32]  # type: ignore[misc]
    assert torch.equal(rows(x), torch.cat([layer(x) for layer in layers], -1))


@pytest.mark.parametrize("processes", [2, 4])
def test_shares_of_processes(processes: int, tmp_path: Path) -> None:
    """Rows lie side by side, columns add up. With four processes, two have the same rows of key and value each."""
    model = saved(tmp_path)
    modules, x = ("layers.0.q_proj", "layers.0.k_proj"), torch.randn(3, 64).bfloat16()
    q, k = (layer_of(model, name)(x) for name in ("q_proj", "k_proj"))
    down: list[Tensor] = []
    for rank in range(processes):
        share = Share((64 // processes, 16), 64, rank, processes)
        y = load_rows(tmp_path, modules, share)(x)
        n, replicas = share.rows[0], processes // 2
        expected = [q[:, rank * n : (rank + 1) * n], k[:, rank // replicas * 16 :][:, :16]]
        assert torch.equal(y, torch.cat(expected, -1))
        if processes == 2:
            part = load_rows(tmp_path, ["layers.0.down_proj"], Share((64,), 64, rank, 2))
            down.append(part(torch.cat([x, x], -1)[:, rank * 64 :][:, :64]).float())
    if down:
        whole = layer_of(model, "down_proj")(torch.cat([x, x], -1)).float()
        torch.testing.assert_close(sum(down), whole, atol=0.02, rtol=0.02)


class Heads(nn.Module):
    """Eight heads of queries, two of keys and values, and a layer behind them, whose groups a cut may divide."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(64, n) for n in (128, 32, 32))
        self.o_proj = nn.Linear(inner, 32)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)


def saved_heads(folder: Path, inner: int, config: QuantConfig, fuse: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = nn.ModuleDict({"layers": nn.ModuleList([Heads(inner)])}).bfloat16()
    lowbit.quantize_(model, {"*.o_proj": config, "*": U4}, fuse=fuse, progress=False)
    lowbit.save_checkpoint(model, folder)
    return model.get_submodule("layers.0")


def saved_mlp(folder: Path, bias: bool) -> Any:
    """Saves a fused block of Llama whose kernels gate; returns its gate_up."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 128, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=1, vocab_size=32, mlp_bias=bias)
    model = transformers.LlamaForCausalLM(config).bfloat16()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    lowbit.quantize_(model, QuantConfig("u4", 64, clip="max"), fuse=True, progress=False)
    lowbit.save_checkpoint(model, folder)
    return next(module for module in model.modules() if isinstance(module, GatedLinear))


@torch.no_grad()
@pytest.mark.parametrize("processes", [1, 2, 4])
def test_rows_stored_for_a_gate_are_served_as_they_were(processes: int, tmp_path: Path) -> None:
    """Servers apply the gate themselves, to rows of which those of the gate are above the others."""
    h, x = saved_mlp(tmp_path, bias=False), torch.randn(3, 128).bfloat16()
    module = next(name for name in opened(tmp_path).modules if "gate" in name)
    whole, n = h(x), 64 // processes
    for rank in range(processes):
        part = load_rows(tmp_path, (module,), Share((n, n), 128, rank, processes))(x)
        gate, up = (whole[:, half * 64 + rank * n :][:, :n] for half in (0, 1))
        assert torch.equal(part, torch.cat([gate, up], -1))


@torch.no_grad()
def test_a_bias_stored_for_a_gate_is_of_its_rows(methods: Any, tmp_path: Path) -> None:
    h, x = saved_mlp(tmp_path, bias=True), torch.randn(3, 128).bfloat16()
    modules = [next(name for name in opened(tmp_path).modules if "gate" in name)]
    assert torch.equal(load_rows(tmp_path, modules, Share((64, 64), 128))(x), h(x))
    tensors, bias = tensors_for(tmp_path, modules)
    layer = fake_vllm.Linear(methods.SavedLinear(sources(tmp_path, modules)), 128, (64, 64), bias=True)
    fake_vllm.load(layer, tensors, bias)
    assert torch.equal(layer(x), h(x))
    half = shares_of(sources(tmp_path, modules), Share((32, 32), 128, 1, 2), "bf16")[0]
    with pytest.raises(CheckpointError, match="its bias is stored for a gate"):
        half.bias_of(bias[:64])


@torch.no_grad()
@pytest.mark.parametrize("processes", [2, 4, 8])
@pytest.mark.parametrize("fuse", [False, True])
def test_heads_of_processes(fuse: bool, processes: int, methods: Any, tmp_path: Path) -> None:
    """Whether a module is one matrix or three: each process gets its heads of all, of keys those that it needs, and
    waits for no more than its slices."""
    whole, x = saved_heads(tmp_path, 64, U4, fuse), torch.randn(3, 64).bfloat16()
    modules = ["layers.0.q_k_v_proj"] if fuse else [f"layers.0.{part}_proj" for part in "qkv"]
    q, k, v = whole(x).split([128, 32, 32], -1)
    tensors, bias = tensors_for(tmp_path, modules)
    assert bias is not None
    n = 128 // processes
    for rank in range(processes):
        head = rank * 2 // processes * 16
        own = torch.cat([bias[rank * n :][:n], bias[128 + head :][:16], bias[160 + head :][:16]])
        about = {"tp_rank": rank, "tp_size": processes}
        layer = fake_vllm.Linear(methods.SavedLinear(sources(tmp_path, modules)), 64, (n, 16, 16), bias=True, **about)
        layer.tp_rank = 0  # for the fake, which leaves the bias of a sum to the first process
        waiting = sum(p.numel() for name, p in layer.named_parameters() if name.endswith("codes"))
        fake_vllm.load(layer, tensors, own)
        expected = [q[:, rank * n :][:, :n], k[:, head:][:, :16], v[:, head:][:, :16]]
        assert torch.equal(layer(x), torch.cat(expected, -1))
        assert waiting == sum(part.codes.numel() for part in layer.lowbit.linears)


@torch.no_grad()
@pytest.mark.parametrize(
    ("inner", "processes", "groups"),
    [(512, 4, (128, 128)), (640, 2, (128, 64)), (640, 8, (128, 16)), (29568, 8, (128, 16))],
)
def test_groups_that_a_cut_divides(
    inner: int, processes: int, groups: tuple[int, int], methods: Any, tmp_path: Path
) -> None:
    """They become smaller groups, with the same scales: results add up to those of the whole layer."""
    whole = saved_heads(tmp_path, inner, QuantConfig("u4", groups[0], clip="max")).get_submodule("o_proj")
    x, columns, parts, modules = (
        torch.randn(3, inner).bfloat16(),
        inner // processes,
        list[Tensor](),
        ["layers.0.o_proj"],
    )
    tensors, bias = tensors_for(tmp_path, modules)
    for rank in range(processes):
        about = {"tp_rank": rank, "tp_size": processes, "columns_here": columns}
        layer = fake_vllm.Linear(methods.SavedLinear(sources(tmp_path, modules)), inner, (32,), bias=True, **about)
        fake_vllm.load(layer, tensors, bias)
        assert layer.lowbit.linears[0].spec.group_size == groups[1]
        parts.append(layer(x[:, rank * columns :][:, :columns]).float())
    assert close(sum(parts), whole(x))  # type: ignore[arg-type]
    weights = whole.dequantize()  # type: ignore[operator]
    assert torch.equal(layer.quant_method.dequantize_weight(layer), weights[:, -columns:])


def test_groups_that_no_cut_allows(methods: Any, tmp_path: Path) -> None:
    """One sentence with both numbers: 1856 columns in eight processes have groups of 8, and a group has at least 16."""
    saved_heads(tmp_path, 1856, QuantConfig("u4", 64))
    about = {"tp_rank": 1, "tp_size": 8, "columns_here": 232}
    message = r"o_proj: 232 of 1856 columns, from column 232 on, cut groups of 64 into 8, which no kernel takes"
    with pytest.raises(PackError, match=message):
        fake_vllm.Linear(methods.SavedLinear(sources(tmp_path, ["layers.0.o_proj"])), 1856, (32,), **about)


@pytest.mark.parametrize(("rows", "columns", "processes"), [(48, 128, 2), (128, 128, 1), (16, 128, 2), (64, 48, 2)])
def test_shares_that_there_are_none_of(rows: int, columns: int, processes: int, tmp_path: Path) -> None:
    saved(tmp_path)
    share = Share((rows,), columns, 0, processes)
    with pytest.raises(PackError, match=f"its weight is 64 x 128, and the server wants {rows} x {columns} of"):
        load_rows(tmp_path, ["layers.0.down_proj"], share)


def test_a_bias_has_to_be_in_the_model(tmp_path: Path) -> None:
    saved(tmp_path)
    source = Source.of(opened(tmp_path), "layers.0.q_proj")
    source.check_bias(False)
    with pytest.raises(CheckpointError, match="q_proj: it has a bias in the model, and none in the checkpoint"):
        source.check_bias(True)


def test_dense_rows_are_quantized_as_linear_layers_are() -> None:
    dense = nn.Linear(64, 96).bfloat16()
    rows = quantize_rows(dense.weight.data, [64, 32], [U4, U4]).with_bias(dense.bias.data)
    apart = quantize_rows(dense.weight.data, [64, 32], [U4, QuantConfig("u4", 64, clip="max")])
    x = torch.randn(3, 64).bfloat16()
    expected = LowbitLinear.from_linear(dense, U4)(x)
    assert torch.equal(rows(x), expected) and len(rows) == 1 and len(apart) == 2
    apart = apart.with_bias(dense.bias.data)
    assert torch.equal(apart(x)[:, :64], expected[:, :64]) and not torch.equal(apart(x), expected)
    with torch.no_grad():
        dense.bias.zero_()  # whose memory they share
    assert torch.equal(rows(x), LowbitLinear.from_linear(dense, U4)(x))


# -- what the plugin needs of vLLM


def test_what_another_vllm_lacks(tmp_path: Path) -> None:
    """Names that are imported, parameters, attributes, and what is called: of a vLLM that has changed all of them."""
    with pytest.raises(FileNotFoundError, match="no folder vllm; name a wheel"):
        vllm_interface.missing(tmp_path)
    linear = tmp_path / "vllm/model_executor/layers/linear.py"
    linear.parent.mkdir(parents=True)
    (tmp_path / "vllm/__init__.py").touch()
    linear.write_text(
        "class LinearBase:\n    def __init__(self):\n        self.tp_rank = 0\n"
        "class LinearMethodBase:\n    def apply(self, layer, x, bias=None, more=0): ...\n"
        "    def create_weights(self, layer, sizes): ...\n"
    )
    found = "\n".join(vllm_interface.missing(tmp_path))
    assert "vllm.model_executor.layers.linear has no ReplicatedLinear" in found and "has no LinearBase\n" not in found
    assert "LinearMethodBase.create_weights takes ['layer', 'sizes'], not layer, input_size_per_partition" in found
    assert "LinearMethodBase.apply" not in found
    assert "LinearBase has no skip_bias_add" in found and "LinearBase has no tp_rank" not in found
    assert "no get_cache_scale_mapper: AutoWeightsLoader renames tensors by it" in found


@needs_vllm
def test_vllm_has_what_the_plugin_needs() -> None:
    origin = find_spec("vllm")
    assert origin and origin.origin and vllm_interface.missing(Path(origin.origin).parents[1]) == []


# -- methods, with what they need of vLLM


@pytest.fixture
def methods() -> Iterator[Any]:
    with fake_vllm.installed() as found:
        yield found


def tensors_for(folder: Path, modules: Sequence[str]) -> tuple[dict[str, Tensor], Tensor | None]:
    """Returns the tensors of a saved layer as vLLM's loader passes them, and its bias."""
    checkpoint, names = opened(folder), Names(opened(folder))
    names.taken = {module: Place("layer", part) for part, module in enumerate(modules)}
    found = {full: checkpoint.tensors[full] for module in modules for full in checkpoint.names_of(module).values()}
    renamed = {new.rpartition(".")[2]: old for old, new in names.renamed().items() if old in found}
    biases = [found[f"{module}.bias"] for module in modules if f"{module}.bias" in found]
    return {name: found[old] for name, old in renamed.items()}, torch.cat(biases) if biases else None


def sources(folder: Path, modules: Sequence[str]) -> list[Source]:
    return [Source.of(opened(folder), module) for module in modules]


QKV = [f"layers.0.{part}_proj" for part in "qkv"]


@pytest.mark.parametrize("configs", [U4, {"*.k_proj": QuantConfig("u8", 64), "*": U4}])
def test_a_saved_layer_takes_other_weights_in_place(configs: Any, methods: Any, tmp_path: Path) -> None:
    """It has the new weights and bias in the memory of the old, whoever holds that."""
    models = [saved(tmp_path / str(seed), configs, bias=True, seed=seed) for seed in (0, 1)]
    (first, one), (second, two) = (tensors_for(tmp_path / str(seed), QKV) for seed in (0, 1))
    layer = fake_vllm.Linear(methods.SavedLinear(sources(tmp_path / "0", QKV)), 64, (64, 32, 32), bias=True)
    made, x = fake_vllm.recorded(layer), torch.randn(3, 64).bfloat16()
    fake_vllm.load(layer, first, one)
    assert torch.equal(layer(x), models[0].get_submodule("layers.0")(x))
    held = {name: parameter.data_ptr() for name, parameter in layer.named_parameters()}
    fake_vllm.reload(layer, made, second, two)
    assert torch.equal(layer(x), models[1].get_submodule("layers.0")(x))
    assert {name: parameter.data_ptr() for name, parameter in layer.named_parameters()} == held
    assert not [name for name in held if name.startswith("part")] and layer.qweight.data_ptr() == held["qweight"]
    weight = layer.quant_method.dequantize_weight(layer)
    assert torch.equal(weight, torch.cat([layer_of(models[1], f"{part}_proj").dequantize() for part in "qkv"]))


@torch.no_grad()
@pytest.mark.parametrize("configs", [U4, {"*.k_proj": QuantConfig("u8", 64), "*": U4}])
@pytest.mark.parametrize("bias", [False, True])
def test_what_torch_traces_of_a_layer(configs: Any, bias: bool, methods: Any, tmp_path: Path) -> None:
    """One operator on the layer's parameters, if it is one matmul; new weights are in the graph's memory."""
    first, second = (saved(tmp_path / str(seed), configs, bias=bias, seed=seed) for seed in (0, 1))
    layer = fake_vllm.Linear(methods.SavedLinear(sources(tmp_path / "0", QKV)), 64, (64, 32, 32), bias=bias)
    made, x = fake_vllm.recorded(layer), torch.randn(3, 64).bfloat16()
    fake_vllm.load(layer, *tensors_for(tmp_path / "0", QKV))
    graphs: list[Any] = []
    torch.compiler.reset()  # other cases have compiled the same function
    traced = torch.compile(layer, backend=lambda graph, _: graphs.append(graph) or graph, fullgraph=True)
    assert torch.equal(traced(x), first.get_submodule("layers.0")(x))
    (graph,) = graphs
    inputs = [node.target for node in graph.graph.nodes if node.op == "placeholder"]
    alone = isinstance(configs, QuantConfig)
    assert str(next(n.target for n in graph.graph.nodes if n.op == "call_function")) == "lowbit.matmul.packed"
    assert any("qweight" in name for name in inputs) == alone and any("bias" in name for name in inputs) == bias
    fake_vllm.reload(layer, made, *tensors_for(tmp_path / "1", QKV))
    assert torch.equal(traced(x), second.get_submodule("layers.0")(x)) and len(graphs) == 1
    with lowbit.batch_invariant():
        assert torch.equal(traced(x), layer(x)) and len(graphs) == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("f8e4m3", r"k_proj\.codes: it is .* when the model was made; start the server again"),
        ("f4e1m2", r"k_proj: the weight was packed with weight='f4e1m2' \(not 'f4e2m1'\)"),
    ],
)
def test_a_saved_layer_keeps_its_format(name: str, message: str, methods: Any, tmp_path: Path) -> None:
    """It takes neither tensors of other sizes, nor codes of the same size that mean others, and stays as it was."""
    old = QuantConfig("f4e2m1", 32)
    model = saved(tmp_path / "old", old)
    saved(tmp_path / "new", {"*.k_proj": QuantConfig(name, 32), "*": old}, seed=1)
    layer = fake_vllm.Linear(methods.SavedLinear(sources(tmp_path / "old", QKV)), 64, (64, 32, 32))
    made, x = fake_vllm.recorded(layer), torch.randn(3, 64).bfloat16()
    fake_vllm.load(layer, tensors_for(tmp_path / "old", QKV)[0])
    held = layer.lowbit
    with pytest.raises((CheckpointError, PackError), match=message):
        fake_vllm.reload(layer, made, tensors_for(tmp_path / "new", QKV)[0])
    assert torch.equal(held(x), model.get_submodule("layers.0")(x))


def test_a_saved_layer_misses_tensors(methods: Any, tmp_path: Path) -> None:
    saved(tmp_path)
    tensors = tensors_for(tmp_path, QKV)[0]
    for given in ({}, {name: tensor for name, tensor in tensors.items() if name != "part1_codes"}):
        layer = fake_vllm.Linear(methods.SavedLinear(sources(tmp_path, QKV)), 64, (64, 32, 32))
        with pytest.raises(CheckpointError, match=r"_proj: the server's loader has passed no .*codes"):
            fake_vllm.load(layer, given)


def test_a_layer_is_quantized_when_it_has_come(methods: Any) -> None:
    """The dense weight has no memory before, and none after; other weights go to the same place."""
    layers = [nn.Linear(64, 96).bfloat16() for _ in range(2)]
    layer = fake_vllm.Linear(methods.OnLoadLinear("layer", [U4, U4]), 64, (64, 32), bias=True)
    assert layer.weight.is_meta
    made, x = fake_vllm.recorded(layer), torch.randn(3, 64).bfloat16()
    fake_vllm.load(layer, {"weight": layers[0].weight.data}, layers[0].bias.data)
    assert torch.equal(layer(x), LowbitLinear.from_linear(layers[0], U4)(x)) and not hasattr(layer, "weight")
    held = layer.qweight.data_ptr()
    fake_vllm.reload(layer, made, {"weight": layers[1].weight.data}, layers[1].bias.data)
    assert torch.equal(layer(x), LowbitLinear.from_linear(layers[1], U4)(x)) and layer.qweight.data_ptr() == held


@pytest.mark.parametrize("rank", [0, 1])
def test_one_process_adds_the_bias_of_a_sum(rank: int, methods: Any) -> None:
    dense = nn.Linear(64, 32).bfloat16()
    about = {"tp_rank": rank, "tp_size": 2, "columns_here": 32}
    layer = fake_vllm.Linear(methods.OnLoadLinear("layer", [U4]), 64, (32,), bias=True, **about)
    fake_vllm.load(layer, {"weight": dense.weight.data[:, 32 * rank :][:, :32]}, dense.bias.data)
    expected, zero = dense.bias if rank == 0 else torch.zeros(32), torch.zeros(1, 32).bfloat16()
    assert torch.equal(layer(zero)[0], expected.detach().bfloat16())


def serving_of(methods: Any, folder: Path, **config: Any) -> Any:
    serving = methods.config.LowbitServing(LowbitConfig(**config))
    serving.maybe_update_config(str(folder))
    serving = pickle.loads(pickle.dumps(serving))  # vLLM sends it to the processes that it starts
    serving.apply_vllm_mapper(fake_vllm.WeightsMapper())
    serving.packed_modules_mapping = PACKED
    return serving


@pytest.mark.parametrize("given", ["1", "0"])
def test_vllms_wish_for_equal_bits_is_heard(given: str, methods: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", given)
    monkeypatch.setattr(batch_invariant.MODE, "on", False)
    methods.config.LowbitServing()
    assert batch_invariant.MODE.on == (given == "1")
    layer = LowbitLinear.from_linear(nn.Linear(64, 32).bfloat16(), U4)
    (kernels,) = vllm_startup.kinds(layer)
    assert kernels.spec.invariant == (given == "1")


def test_what_vllm_hears_of_layers(methods: Any, tmp_path: Path) -> None:
    """Saved layers wait for tensors, of which vLLM learns the names; the rest of such a model is dense."""
    saved(tmp_path)
    serving = serving_of(methods, tmp_path)
    kinds = {
        name: type(serving.get_quant_method(fake_vllm.LinearBase(), name)).__name__
        for name in ("layers.0.qkv_proj", "layers.0.down_proj", "x")
    }
    assert [*kinds.values()] == ["SavedLinear", "SavedLinear", "UnquantizedLinearMethod"]
    mapper = serving.get_cache_scale_mapper()
    assert mapper._map_name("layers.0.v_proj.codes") == "layers.0.qkv_proj.part2_codes"
    assert (
        mapper._map_name("layers.0.kv_scale") == "layers.0.attn.k_scale"
        and mapper._map_name("norm.weight") == "norm.weight"
    )


def test_parts_of_processes_are_no_model(methods: Any, tmp_path: Path) -> None:
    """vLLM can save each process's parameters; nothing says what they are, or for how many processes."""
    for rank in (0, 1):
        save_file({"layers.0.o_proj.qweight": torch.zeros(2, 2)}, tmp_path / f"model-rank-{rank}-part-0.safetensors")
    with pytest.raises(CheckpointError, match=r"has the parts of 2 processes .* serve the folder that they"):
        serving_of(methods, tmp_path)


def test_routers_stay_dense(methods: Any, tmp_path: Path) -> None:
    """Whatever vLLM calls the class of one: it asks for a method as for any linear layer."""
    save_file(
        {"layers.0.mlp.gate.weight": torch.zeros(32, 64), "layers.0.o_proj.weight": torch.zeros(32, 64)},
        tmp_path / "a.safetensors",
    )
    serving = serving_of(methods, tmp_path, weight="u4", group_size=32)
    for name, kind in (
        ("mlp.gate", "UnquantizedLinearMethod"),
        ("mlp.router", "UnquantizedLinearMethod"),
        ("o_proj", "OnLoadLinear"),
    ):
        assert type(serving.get_quant_method(fake_vllm.ReplicatedLinear(), f"layers.0.{name}")).__name__ == kind


def test_checkpoints_of_other_libraries(methods: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are lowbit's if the caller says so, by an option or a variable, and vLLM's own otherwise."""
    serving = methods.config.LowbitServing
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 64}
    monkeypatch.delenv("LOWBIT_VLLM", raising=False)
    assert serving.override_quantization_method(gptq, "lowbit") == "lowbit"
    assert serving.override_quantization_method(gptq, None) is None
    assert serving.override_quantization_method({"quant_method": "fbgemm"}, "lowbit") is None
    assert serving.from_config(gptq).config.from_checkpoint
    monkeypatch.setenv("LOWBIT_VLLM", "1")
    assert serving.override_quantization_method(gptq, None) == "lowbit"
    assert serving.override_quantization_method(gptq, "gptq") is None
    assert serving.override_quantization_method({"quant_method": "fbgemm"}, None) is None


# -- what happens once when a model is loaded


def started(methods: Any, folder: Path) -> Any:
    """Loads the two layers of a saved model as vLLM does; returns one of them."""
    serving = serving_of(methods, folder)
    names = {"layers.0.qkv_proj": (64, (64, 32, 32), QKV), "layers.0.down_proj": (128, (64,), ["layers.0.down_proj"])}
    made = {
        name: fake_vllm.Linear(serving.get_quant_method(fake_vllm.LinearBase(), name), columns, rows)
        for name, (columns, rows, _) in names.items()
    }
    for name, layer in made.items():
        fake_vllm.load(layer, tensors_for(folder, names[name][2])[0])
    return made["layers.0.qkv_proj"]


def refuse(request: Any, name: str) -> Any:
    raise AssertionError(f"{name} is compiled: {request}")


def test_kernels_are_compiled_behind_the_last_layer(
    methods: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Those for all numbers of tokens, once: the first call waits for them, and compiles none; another start finds them
    on disk. The log says what runs."""
    monkeypatch.setenv("LOWBIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(vllm_startup, "target_of", lambda device: "emulator:sm_80")
    saved(tmp_path / "model")
    monkeypatch.setattr(driver, "_build", refuse)  # in this process
    starts: list[list[str]] = []
    with caplog.at_level("INFO", logger="vllm.lowbit"):
        for _ in range(2):
            layer = started(methods, tmp_path / "model")
            assert len(caplog.messages) == 3  # nothing has waited
            mm = Matmul(layer.lowbit.linears[0].spec, parse_target("emulator:sm_80"), None)
            starts.append([re.sub(r"\d+\.\d s", "_ s", line) for line in caplog.messages])
            caplog.clear()
    first, again = starts
    kinds = first[:2]
    assert kinds[0].startswith("lowbit: 1 x qkv_proj: u4[128, 64]") and "1 x down_proj: u4[64, 128]" in kinds[1]
    assert all("on emulator:sm_80; kernels by tokens: decode from 1, prefill_mma from" in line for line in kinds)
    waited = "kernels were compiled, the rest was found on disk; waited _ s for them, and read them in _ s"
    assert first[2:] == ["lowbit: weights were made in _ s, reading not counted", f"lowbit: 4 {waited}"]
    assert again == [*kinds, first[2], f"lowbit: 0 {waited}"]
    assert mm.kernel(fake_vllm.TOKENS)
    with pytest.raises(AssertionError, match="is compiled"):
        mm.kernel(fake_vllm.TOKENS + 1)


def test_what_vllm_has_compiled_is_of_these_formats(
    methods: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM finds it by a variable, and a folder may have another model's files next time."""
    found: dict[str, str] = {}
    u8 = QuantConfig("u8", 64)
    formats = {"a": U4, "b": U4, "c": {"*.q_proj": u8, "*": U4}, "d": {"*.q_proj": U4, "*_proj": u8}}
    for name, configs in formats.items():
        saved(tmp_path / name, configs, seed=len(found))
        layer = started(methods, tmp_path / name)
        found[name] = methods.config.environment_variables["VLLM_LOWBIT_LAYERS"]()
        del layer
        gc.collect()  # a model of which vLLM makes nothing more
    assert found.pop("a") == found["b"] and len(set(found.values())) == len(found) and all(found.values())
    monkeypatch.setattr(lowbit, "__version__", "another")
    started(methods, tmp_path / "b")
    assert methods.config.environment_variables["VLLM_LOWBIT_LAYERS"]() != found["b"]


@pytest.mark.parametrize(("variable", "value"), [("LOWBIT_NO_CACHE", "1"), ("LOWBIT_DUMP", "dump")])
def test_kernels_are_compiled_while_loading_without_a_cache(
    variable: str, value: str, methods: Any, tmp_path: Path, monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody compiles them behind it then, and no request may wait."""
    monkeypatch.setenv(variable, value.replace("dump", str(tmp_path / "dump")))
    monkeypatch.setattr(vllm_startup, "target_of", lambda device: "emulator:sm_80")
    saved(tmp_path / "model")
    with caplog.at_level("INFO", logger="vllm.lowbit"):
        layer = started(methods, tmp_path / "model")
    assert caplog.messages[-1].startswith("lowbit: 0 kernels were compiled")
    mm = lowbit.compile(layer.lowbit.linears[0].spec, "emulator:sm_80")
    monkeypatch.setattr(driver, "_build", refuse)
    assert mm.kernel(1) and mm.kernel(fake_vllm.TOKENS)


def test_processes_share_what_is_to_compile() -> None:
    """Each begins with other kernels, those of many tokens first, and would compile all."""
    kernels: Any = [*range(7)]
    orders = [vllm_startup.Limits(8, 3, rank).in_turn(kernels) for rank in range(3)]
    assert orders == [[6, 3, 0, 5, 4, 2, 1], [5, 2, 6, 4, 3, 1, 0], [4, 1, 6, 5, 3, 2, 0]]
    assert vllm_startup.Limits(8).in_turn(kernels) == kernels[::-1]


def test_kernels_of_experts_are_compiled_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No call with so many tokens compiles one, whatever they are multiplied by."""
    monkeypatch.setenv("LOWBIT_CACHE_DIR", str(tmp_path))
    for module in (vllm_startup, vllm_experts):
        monkeypatch.setattr(module, "target_of", lambda device: "emulator:sm_80")
    w13, w2 = torch.randn(4, 64, 64).bfloat16() * 0.2, torch.randn(4, 64, 32).bfloat16() * 0.2
    packed = quantize_experts(w13, None, U4, GATES["silu"]), quantize_experts(w2, None, U4)
    experts = Experts(*packed, top_k=2)
    (kind,) = vllm_startup.kinds(experts)
    startup = vllm_startup.Startup()
    startup.limits = vllm_startup.Limits(tokens=20)
    startup.expect(startup)
    startup.loaded(startup, "layers.0.mlp.experts", experts)
    assert {kernel.family for kernel in kind.kernels(20)} == {"experts_decode"} and "[256, 64]" in str(kind)
    monkeypatch.setattr(driver, "_build", refuse)
    for tokens in (1, 3, 20):
        ids = torch.arange(2 * tokens, dtype=torch.int32).view(tokens, 2) % 4
        experts(torch.randn(tokens, 64).bfloat16(), ids, torch.rand(tokens, 2))
    with pytest.raises(AssertionError, match="is compiled"):
        experts(torch.randn(200, 64).bfloat16(), torch.zeros(200, 2, dtype=torch.int32), torch.rand(200, 2))


def test_a_version_of_vllm_that_was_not_tested(caplog: pytest.LogCaptureFixture) -> None:
    """One warning, which names those that were."""
    for version, warned in (("0.26.0", 0), ("0.33.1+cpu", 0), ("0.34.0", 1), ("0.25.1", 1), ("1.0.0", 1), ("dev", 1)):
        vllm_startup.check_version.cache_clear()
        caplog.clear()
        for _ in range(2):
            vllm_startup.check_version(version)
        assert len(caplog.messages) == warned
    assert "tested with vLLM 0.26 to 0.33, not with dev" in caplog.text


# -- experts


def dense_experts(seed: int = 0) -> Any:
    """Returns transformers' experts with random weights."""
    config = transformers.Qwen3MoeConfig(hidden_size=64, moe_intermediate_size=128, num_experts=4)
    config._experts_implementation = "eager"
    torch.manual_seed(seed)
    experts = Qwen3MoeExperts(config).bfloat16()
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.1)
    return experts


def chosen() -> tuple[Tensor, Tensor, Tensor]:
    """Returns x, and experts of its tokens with their weights, as vLLM's router does."""
    torch.manual_seed(5)
    return torch.randn(6, 64).bfloat16(), torch.rand(6, 2), torch.randint(0, 4, (6, 2), dtype=torch.int32)


@torch.no_grad()
def lowbit_experts(experts: Any) -> Any:
    model = nn.ModuleDict({"mlp": nn.ModuleDict({"experts": experts})})
    lowbit.quantize_(model, U4, progress=False)
    return model


def saved_experts(folder: Path, seed: int = 0) -> tuple[Any, dict[str, Tensor]]:
    """Saves low-bit experts; returns them, and their tensors by the names that vLLM's loader passes."""
    model = lowbit_experts(dense_experts(seed))
    lowbit.save_checkpoint(model, folder)
    checkpoint = opened(folder)
    return model["mlp"]["experts"], {name.removeprefix("mlp.experts."): t for name, t in checkpoint.tensors.items()}


def close(y: Tensor, expected: Tensor) -> bool:
    return float((y.float() - expected.float()).norm() / expected.float().norm()) < 0.01


@torch.no_grad()
def test_experts_are_quantized_when_they_have_come(methods: Any) -> None:
    """As lowbit quantizes transformers' experts; other weights go to the same place."""
    layer, (x, weights, ids) = fake_vllm.RoutedExperts(4, 64, 128), chosen()
    layer.take(methods.expert_methods.OnLoadExperts("experts", layer, [U4, U4]))
    assert layer.w13_weight.is_meta
    made, held = fake_vllm.recorded(layer), 0
    for seed, give in ((0, fake_vllm.load), (1, partial(fake_vllm.reload, made=made))):
        dense = dense_experts(seed)
        give(layer, tensors={"w13_weight": dense.gate_up_proj.data, "w2_weight": dense.down_proj.data})
        expected = lowbit_experts(dense)["mlp"]["experts"](x, ids.long(), weights)
        assert close(layer(x, weights, ids), expected)
        assert not seed or layer.qweight.data_ptr() == held
        held = layer.qweight.data_ptr()


def load_experts(layer: Any, tensors: dict[str, Tensor]) -> None:
    """As MoERunner.load_weights, which hands them on; the parameters have memory then."""
    for name, parameter in list(layer._parameters.items()):
        layer.register_parameter(name, fake_vllm._like(parameter, "cpu"))
    list(layer.load_weights(tensors.items()))
    layer.quant_method.process_weights_after_loading(layer)


def saved_layer(methods: Any, folder: Path, **about: Any) -> Any:
    layer, checkpoint = fake_vllm.RoutedExperts(4, 64, 128, **about), opened(folder)
    source = source_of_experts(checkpoint, checkpoint.modules)
    layer.take(methods.expert_methods.SavedExperts("mlp.experts", layer, source))
    return layer


@torch.no_grad()
def test_saved_experts_take_other_weights_in_place(methods: Any, tmp_path: Path) -> None:
    (first, old), (second, new) = (saved_experts(tmp_path / str(seed), seed) for seed in (0, 1))
    layer, (x, weights, ids) = saved_layer(methods, tmp_path / "0"), chosen()
    made = fake_vllm.recorded(layer)
    load_experts(layer, old)
    assert close(layer(x, weights, ids), first(x, ids.long(), weights))
    held = {name: parameter.data_ptr() for name, parameter in layer.named_parameters()}
    fake_vllm._replace(layer, made)
    delattr(layer, fake_vllm.PROCESSED)
    load_experts(layer, new)
    assert close(layer(x, weights, ids), second(x, ids.long(), weights))
    assert {name: parameter.data_ptr() for name, parameter in layer.named_parameters()} == held


@torch.no_grad()
@pytest.mark.parametrize("on_load", [False, True])
def test_experts_with_adapters_take_no_new_weights(on_load: bool, methods: Any, tmp_path: Path) -> None:
    """vLLM has its method in the place of ours, and would look for our parameters in vain. They stay as they are."""
    x, weights, ids = chosen()
    if on_load:
        layer = fake_vllm.RoutedExperts(4, 64, 128)
        layer.take(methods.expert_methods.OnLoadExperts("mlp.experts", layer, [U4, U4]))
        dense = dense_experts()
        tensors = {"w13_weight": dense.gate_up_proj, "w2_weight": dense.down_proj}
        made, load = fake_vllm.recorded(layer), fake_vllm.load
    else:
        _, tensors = saved_experts(tmp_path)
        layer = saved_layer(methods, tmp_path)
        made, load = fake_vllm.recorded(layer), load_experts
    load(layer, tensors)
    before = layer(x, weights, ids)
    ours, layer.quant_method = layer.quant_method, SimpleNamespace(process_weights_after_loading=lambda _: None)
    kept = dict(layer._parameters)
    fake_vllm._replace(layer, made)
    with pytest.raises(SpecError, match=r"mlp\.experts: vLLM makes no low-bit weights for experts .*--enable-lora"):
        load(layer, tensors)
    fake_vllm._replace(layer, kept)
    layer.quant_method = ours
    assert torch.equal(layer(x, weights, ids), before)


def test_a_class_that_makes_a_dense_layer_of_a_low_bit_module(methods: Any, tmp_path: Path) -> None:
    """Its weight would never come, and some loaders skip what they do not know. Other blocks may be another's."""
    saved(tmp_path)
    serving = serving_of(methods, tmp_path)
    serving.get_cache_scale_mapper()  # no layer has been made here, as in the first part of a pipeline
    assert serving.get_quant_method(fake_vllm.LinearBase(), "layers.0.qkv_proj")
    with pytest.raises(CheckpointError, match=r"layers\.0\.down_proj is low-bit .* dense weights alone \(1 in all\)"):
        serving.get_cache_scale_mapper()
    assert serving.get_quant_method(fake_vllm.LinearBase(), "layers.0.down_proj")
    assert serving.get_cache_scale_mapper()


@torch.no_grad()
@pytest.mark.parametrize("processes", [2, 4, 8])
def test_parts_of_experts(processes: int, methods: Any, tmp_path: Path) -> None:
    """Each process has a part of every expert, and waits for no more; groups that the parts cut become smaller."""
    model, tensors = saved_experts(tmp_path)
    (x, weights, ids), parts = chosen(), list[Tensor]()
    for rank in range(processes):
        layer = saved_layer(methods, tmp_path, rank=rank, count=processes)
        assert layer.experts_gate_up_codes[0].numel() * processes == tensors["gate_up.0.codes"].numel()
        load_experts(layer, tensors)
        parts.append(layer(x, weights, ids).float())
        assert layer.lowbit.down.spec.group_size == min(32, 128 // processes)
    assert close(sum(parts), model(x, ids.long(), weights))  # type: ignore[arg-type]
    assert not close(parts[0], model(x, ids.long(), weights))


@torch.no_grad()
def test_shares_of_experts(methods: Any, tmp_path: Path) -> None:
    """Of two processes that have half of the experts each."""
    model, tensors = saved_experts(tmp_path)
    x, weights, ids = chosen()
    expected, others = model(x, ids.long(), weights), list[Tensor]()
    for rank in (0, 1):
        layer = saved_layer(methods, tmp_path)
        layer.expert_map = torch.tensor([0, 1, -1, -1] if rank == 0 else [-1, -1, 0, 1], dtype=torch.int32)
        layer.sizes["num_experts"] = 2
        layer._parameters.clear()
        layer.take(methods.expert_methods.SavedExperts("mlp.experts", layer, layer.quant_method.source))
        load_experts(layer, tensors)
        others.append(layer(x, weights, ids).float())
    assert close(sum(others), expected) and not close(others[0], expected)  # type: ignore[arg-type]


def test_experts_that_vllm_can_not_serve(methods: Any, tmp_path: Path) -> None:
    _, tensors = saved_experts(tmp_path)
    with pytest.raises(SpecError, match="the activation of these experts, relu2; leave experts dense"):
        saved_layer(methods, tmp_path, activation="relu2")
    layer = fake_vllm.RoutedExperts(4, 64, 128)
    layer.swiglu_limit = 10.0
    with pytest.raises(SpecError, match="experts, silu, swiglu_limit=10; leave experts dense"):
        methods.expert_methods.OnLoadExperts("experts", layer, [U4, U4])
    layer = saved_layer(methods, tmp_path)
    with pytest.raises(CheckpointError, match=r"mlp\.experts: the .* has passed no down\.codes of expert 3"):
        load_experts(layer, {name: tensor for name, tensor in tensors.items() if name != "down.3.codes"})


# -- experts of other libraries


def imported_layer(methods: Any, folder: Path, **about: Any) -> Any:
    """Returns the experts of the second layer of another library's checkpoint, loaded."""
    checkpoint = opened(folder)
    modules = [module for module in checkpoint.modules if ".layers.1." in module and ".experts." in module]
    layer = fake_vllm.RoutedExperts(3, 64, 32 if "mlp" in modules[0] else 96, **about)
    layer.take(methods.expert_methods.SavedExperts("experts", layer, source_of_experts(checkpoint, modules)))
    full = [name for module in modules for name in checkpoint.names_of(module).values()]
    load_experts(layer, {name.partition(".experts.")[2]: checkpoint.tensors[name] for name in full})
    return layer


def by_experts(dense: Sequence[Sequence[Tensor]], x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """Returns the sum of each token's experts, one by one; of each expert gate, up and down."""
    y = torch.zeros(len(x), 64)
    for token, number in product(range(len(x)), range(ids.shape[1])):
        gate, up, down = (w.float() for w in dense[int(ids[token, number])])
        h = nn.functional.silu(gate @ x[token].float()) * (up @ x[token].float())
        y[token] += weights[token, number] * (down @ h)
    return y


@torch.no_grad()
@pytest.mark.parametrize("format", moe_checkpoints.FORMATS)
@pytest.mark.parametrize(("name", "leaves"), [("mixtral", "w1 w3 w2"), ("qwen3-moe", "gate_proj up_proj down_proj")])
def test_experts_of_other_libraries(name: str, leaves: str, format: str, methods: Any, tmp_path: Path) -> None:
    """Of one process, and of two that have half of each expert; columns in an order of their own can't be cut."""
    written = moe_checkpoints.write(name, format, tmp_path)
    path = next(key for key in written if ".layers.1." in key and ".experts." in key).partition(".experts.")[0]
    dense = [[written[f"{path}.experts.{number}.{leaf}"] for leaf in leaves.split()] for number in range(3)]
    x, weights, ids = chosen()
    ids = ids % 3
    expected = by_experts(dense, x, weights, ids)
    assert close(imported_layer(methods, tmp_path)(x, weights, ids), expected)
    if "order" in format and name == "mixtral":  # the other has one group in down
        with pytest.raises(PackError, match="experts: columns of a permuted weight can't be cut"):
            imported_layer(methods, tmp_path, rank=0, count=2)
        return
    halves = [imported_layer(methods, tmp_path, rank=rank, count=2)(x, weights, ids).float() for rank in (0, 1)]
    assert close(sum(halves), expected) and not close(halves[0], expected)  # type: ignore[arg-type]


@torch.no_grad()
def test_kernels_of_experts_with_orders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The start compiles the kernels of the weights in order, and those that permute; no call compiles another."""
    monkeypatch.setenv("LOWBIT_CACHE_DIR", str(tmp_path / "cache"))
    moe_checkpoints.write("mixtral", "gptq-act-order", tmp_path / "model")
    checkpoint = opened(tmp_path / "model")
    modules = [module for module in checkpoint.modules if ".layers.1." in module and ".experts." in module]
    source, path = source_of_experts(checkpoint, modules), modules[0].partition(".experts.")[0]
    tensors = {
        kind: torch.stack([checkpoint.tensors[f"{path}.experts.{number}.{kind}"] for number in range(3)])
        for kind in source.tensors
    }
    gate_up, down = source.weights(tensors, ExpertShare(GATES["silu"], "bf16", 0, 1))
    experts, (x, weights, ids) = Experts(gated(gate_up, GATES["silu"]), down, top_k=2), chosen()
    expected = experts(x, ids % 3, weights)
    for module in (vllm_startup, vllm_experts):
        monkeypatch.setattr(module, "target_of", lambda device: "emulator:sm_80")
    startup = vllm_startup.Startup()
    startup.limits = vllm_startup.Limits(tokens=6)
    startup.expect(startup)
    startup.loaded(startup, "experts", experts)
    monkeypatch.setattr(driver, "_build", refuse)
    experts(x[:1], ids[:1] % 3, weights[:1])
    compiled = by_kernel._permute_kernel.cache_info().misses
    assert compiled and close(experts(x, ids % 3, weights), expected)
    assert by_kernel._permute_kernel.cache_info().misses == compiled


def test_experts_of_which_some_have_zeros(tmp_path: Path) -> None:
    """All of them get zeros, and keep their values."""
    moe_checkpoints.write("qwen3-moe", "gptq", tmp_path)
    checkpoint = opened(tmp_path)
    modules = [module for module in checkpoint.modules if ".layers.1." in module and ".experts." in module]
    source = source_of_experts(checkpoint, modules)
    path = modules[0].partition(".experts.")[0]
    tensors = {
        kind: torch.stack([checkpoint.tensors[f"{path}.experts.{number}.{kind}"] for number in range(3)])
        for kind in source.tensors
    }
    tensors["down_proj.qzeros"][1] = 0x77777777  # the middle of all codes: no zeros
    share = ExpertShare(GATES["silu"], "bf16", 0, 1)
    _, down = source.weights(tensors, share)
    one = {kind.partition(".")[2]: t[1] for kind, t in tensors.items() if kind.startswith("down_proj.")}
    alone = lowbit.import_weight(checkpoint.quantization_config, one, "bf16")
    assert alone.spec.zeros == "none" and down.spec.zeros == "int" and down.spec.experts == 3
    assert torch.equal(each_of(down)[1].dequantize(), alone.dequantize())


def test_experts_of_other_libraries_that_are_refused(methods: Any, tmp_path: Path) -> None:
    moe_checkpoints.write("qwen3-moe", "gptq", tmp_path)
    checkpoint = opened(tmp_path)
    with pytest.raises(SpecError, match=r"q_proj: of other libraries lowbit knows experts by names such as experts\.0"):
        source_of_experts(checkpoint, ["model.layers.1.self_attn.q_proj"])
    modules = ["model.layers.1.mlp.experts.0.down_proj", "model.layers.1.mlp.experts.1.down_proj"]
    moe_checkpoints.edit(
        tmp_path, lambda state: {k: t[:, :8] if k == f"{modules[1]}.scales" else t for k, t in state.items()}
    )
    opened.cache_clear()
    with pytest.raises(SpecError, match=r"down_proj\.scales is .*, and .*1\.down_proj\.scales .*; leave experts dense"):
        source_of_experts(opened(tmp_path), modules)


@torch.no_grad()
@pytest.mark.parametrize("processes", [1, 2, 4])
def test_experts_of_gpt_oss(processes: int, methods: Any) -> None:
    """Codes and scales that the class of the model cuts into groups of 32, of which the last process has fewer."""
    torch.manual_seed(1)
    config, inner = {"quant_method": "mxfp4"}, 192
    sizes = {"w13": (2 * inner, 64), "w2": (64, inner)}
    whole = {
        name: {
            "blocks": torch.randint(256, (4, rows, columns // 32, 16), dtype=torch.uint8),
            "scales": torch.randint(118, 122, (4, rows, columns // 32), dtype=torch.uint8),
            "bias": torch.randn(4, rows).bfloat16(),
        }
        for name, (rows, columns) in sizes.items()
    }
    x, weights, ids = chosen()
    dense = {name: [w.dequantize() for w in import_experts(config, t, "bf16")] for name, t in whole.items()}
    expected = torch.zeros(6, 64)
    for token, number in product(range(6), range(2)):
        expert = int(ids[token, number])
        h = dense["w13"][expert] @ x[token].float() + whole["w13"]["bias"][expert].float()
        a = ACTIVATION["swiglu_oai"](h[0::2], h[1::2])
        expected[token] += weights[token, number] * (dense["w2"][expert] @ a + whole["w2"]["bias"][expert].float())
    some = -(-inner // 32 // processes) * 32
    parts: list[Tensor] = []
    for rank in range(processes):
        layer = fake_vllm.RoutedExperts(4, 64, inner, "swigluoai", rank, processes)
        layer.moe_config.has_bias = True
        layer.take(methods.expert_methods.GptOssExperts("experts", layer, config))
        rows, columns = slice(2 * rank * some, 2 * (rank + 1) * some), slice(rank * some, (rank + 1) * some)
        groups = slice(columns.start // 32, columns.stop // 32)
        tensors = {
            "w13_weight": whole["w13"]["blocks"].flatten(2)[:, rows],
            "w13_weight_scale": whole["w13"]["scales"][:, rows],
            "w13_bias": whole["w13"]["bias"][:, rows],
            "w2_weight": whole["w2"]["blocks"][:, :, groups].flatten(2),
            "w2_weight_scale": whole["w2"]["scales"][..., groups],
            "w2_bias": whole["w2"]["bias"] * (rank == 0),
        }
        fake_vllm.load(layer, tensors)
        parts.append(layer(x, weights, ids).float())
    assert close(sum(parts), expected)  # type: ignore[arg-type]


@torch.no_grad()
@pytest.mark.parametrize("on_load", [False, True])
def test_vllm_reads_the_weight_of_a_layer(on_load: bool, methods: Any, tmp_path: Path) -> None:
    """As MLA does with kv_b_proj: by a matmul with the identity, for layers that are none of its own dense ones."""
    model = saved(tmp_path)
    if on_load:
        layer = fake_vllm.Linear(methods.OnLoadLinear("layer", [U4]), 64, (32,))
        fake_vllm.load(layer, {"weight": torch.randn(32, 64).bfloat16()})
    else:
        layer = fake_vllm.Linear(methods.SavedLinear(sources(tmp_path, QKV[1:2])), 64, (32,))
        fake_vllm.load(layer, tensors_for(tmp_path, QKV[1:2])[0])
        assert torch.equal(layer.lowbit(torch.eye(64).bfloat16()).T, layer_of(model, "k_proj").dequantize())
    assert not isinstance(layer.quant_method, fake_vllm.UnquantizedLinearMethod)
    weight = layer.quant_method.apply(layer, torch.eye(64).bfloat16(), bias=None).T
    assert torch.equal(weight, layer.quant_method.dequantize_weight(layer))


@torch.no_grad()
@pytest.mark.parametrize("activation", GATES)
def test_gates_and_biases_of_experts(activation: str) -> None:
    """Each expert computes what docs/experts.md says, one by one here."""
    torch.manual_seed(1)
    gate, (x, weights, ids) = GATES[activation], chosen()
    w13, w2, b13, b2 = (torch.randn(shape).bfloat16() * 0.2 for shape in ((4, 64, 64), (4, 64, 32), (4, 64), (4, 64)))
    experts = Experts(quantize_experts(w13, b13, U4, gate), quantize_experts(w2, b2, U4))
    plain = [[each.dequantize() for each in each_of(quantize_experts(w, None, U4))] for w in (w13, w2)]
    expected = torch.zeros(6, 64)
    for token in range(6):
        for weight, expert in zip(weights[token], ids[token].tolist()):
            h = plain[0][expert] @ x[token].float() + b13[expert].float()
            g, u = (h[0::2], h[1::2]) if gate.pairs else h.chunk(2)
            expected[token] += weight * (plain[1][expert] @ ACTIVATION[gate.epilogue](g, u) + b2[expert].float())
    assert close(experts(x, ids, weights), expected)


@torch.no_grad()
def test_experts_by_the_kernels_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, in the emulator: also for ids that are no expert's, and for weights that are put in place."""
    torch.manual_seed(1)
    x, weights, ids = chosen()
    w13, w2 = torch.randn(4, 64, 64).bfloat16() * 0.2, torch.randn(4, 64, 32).bfloat16() * 0.2
    packed = [(quantize_experts(w13 * f, None, U4, GATES["silu"]), quantize_experts(w2, None, U4)) for f in (1, 2)]
    ids[0, 0], ids[1, 1] = -1, 1000
    expected = [Experts(*both)(x, ids, weights) for both in packed]
    monkeypatch.setattr(vllm_experts, "target_of", lambda device: "emulator:sm_80")
    experts = Experts(*packed[0])
    assert close(experts(x, ids, weights), expected[0])
    experts.gate_up.packed.update_(packed[1][0])
    assert close(experts(x, ids, weights), expected[1]) and not close(expected[0], expected[1])


ACTIVATION: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu_mul": lambda g, u: nn.functional.silu(g) * u,
    "gelu_mul": lambda g, u: nn.functional.gelu(g, approximate="tanh") * u,
    "swiglu_oai": lambda g, u: (g := g.clamp(max=7)) * torch.sigmoid(1.702 * g) * (u.clamp(-7, 7) + 1),
}


# -- with vLLM

SIZES = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 64,
}
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(
        **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64
    ),
}
MIXED = {"*.v_proj": QuantConfig("u8", 64), "*.down_proj": None, "*": QuantConfig("u4", 64, clip="max")}
SAVED: dict[str, tuple[str, dict[str, Any]]] = {
    "low-bit": ("llama", {}),
    "fused, and its output layer": ("llama", {"fuse": True, "lm_head": True}),
    "of several formats": ("llama", {"modules": MIXED}),
    "tied": ("qwen2", {}),
    "with a low-bit table": ("qwen2", {"embeddings": True}),
}
RECIPE = {"weight": "u4", "group_size": 64, "clip": "max"}


def dense_model(folder: Path, name: str, seed: int = 0) -> Path:
    """Saves a model with random weights, larger than usual, so that its answers are far apart."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(MODELS[name](), dtype=torch.bfloat16)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.copy_(parameter * 3 if parameter.ndim == 2 else torch.rand_like(parameter) + 0.5)
            parameter.mul_(10 if key == "lm_head.weight" else 1)
    model.save_pretrained(folder)
    return folder


def low_bit_model(folder: Path, name: str, seed: int = 0, **options: Any) -> Path:
    """Saves a low-bit model as transformers does."""
    config = LowbitConfig(**RECIPE, **options)
    dense = dense_model(folder / "dense", name, seed)
    model = transformers.AutoModelForCausalLM.from_pretrained(dense, quantization_config=config)
    model.save_pretrained(folder / "saved")
    return folder / "saved"


def answers(folder: Path, fails: bool = False, **arguments: Any) -> Any:
    """Returns what vLLM says of the prompts; or its errors, if it must fail."""
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    processes = int(arguments.get("tensor_parallel_size", 1))
    settings["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # for a function that is called on the model
    settings["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(processes)))
    settings["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(processes > 1))
    given = json.dumps({"model": str(folder), "enforce_eager": True, **arguments})
    command = [sys.executable, "-m", "pytests.models.vllm_answers", given]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=os.environ | settings, capture_output=True, text=True, timeout=600)
    assert fails == (done.returncode != 0), done.stdout[-2000:] + done.stderr[-8000:]
    if fails:
        return done.stdout + done.stderr
    return json.loads(next(line for line in reversed(done.stdout.splitlines()) if line.startswith('{"tokens"')))


@torch.no_grad()
def check(
    folder: Path, found: Any, adapter: Path | None = None, options: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """vLLM and transformers differ by the rounding of bf16: in how likely tokens are, and where two are as likely."""
    model, expected = transformers.AutoModelForCausalLM.from_pretrained(folder, **options), list[Tensor]()
    if adapter is not None:
        model.load_adapter(adapter)
    for prompt, tokens in zip(PROMPTS, found["tokens"]):
        sequence = torch.tensor([prompt + tokens])
        logits = model(sequence).logits[0].float()
        expected.append(logits.log_softmax(-1)[:-1].gather(1, sequence[0, 1:, None])[: len(prompt) - 1, 0])
        behind = logits.amax(1)[len(prompt) - 1 : -1] - logits[range(len(prompt) - 1, len(sequence[0]) - 1), tokens]
        assert behind.max() < 0.1 * logits.std()
    given, wanted = torch.tensor([*chain.from_iterable(found["logprobs"])]), torch.cat(expected)
    assert float((given - wanted).norm() / wanted.norm()) < 0.02


@needs_vllm
@pytest.mark.parametrize("case", SAVED)
def test_saved_models(case: str, tmp_path: Path) -> None:
    name, options = SAVED[case]
    folder = low_bit_model(tmp_path, name, **options)
    found = answers(folder)
    check(folder, found)
    assert found["gates"] == (SIZES["num_hidden_layers"] if name == "qwen2" else 0)  # Llama's layers have a bias here
    dense = {"UnquantizedLinearMethod"} if case == "of several formats" else set()
    table = {"SavedEmbedding"} if "embeddings" in options else {"UnquantizedEmbeddingMethod"}
    assert set(found["kinds"]) == {"SavedLinear", *dense, *table, *(["SavedHead"] if "lm_head" in options else [])}


@needs_vllm
def test_compiled(tmp_path: Path) -> None:
    folder = low_bit_model(tmp_path, "qwen2", embeddings=True)
    check(folder, answers(folder, enforce_eager=False))


@needs_vllm
def test_compiled_graphs_are_of_a_models_formats(tmp_path: Path) -> None:
    """vLLM keeps compiled graphs, and matmuls are constants of theirs: files of other formats in the same folder."""
    for name in ("u4", "u3"):
        made = low_bit_model(tmp_path / name, "qwen2", modules={"*": QuantConfig(name, 64)})
        folder = tmp_path / "served"
        shutil.rmtree(folder, ignore_errors=True)
        check(made.rename(folder), answers(folder, enforce_eager=False))


@needs_vllm
def test_two_processes(tmp_path: Path) -> None:
    folder = low_bit_model(tmp_path, "llama", lm_head=True)
    check(folder, answers(folder, tensor_parallel_size=2))


@needs_vllm
def test_adapters(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    folder = low_bit_model(tmp_path, "llama")
    config = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    model = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(folder), config)
    model.save_pretrained(tmp_path / "adapter")
    found = answers(folder, enable_lora=True, max_lora_rank=8, adapter=str(tmp_path / "adapter"))
    check(folder, found, tmp_path / "adapter")


@needs_vllm
def test_quantized_on_loading(tmp_path: Path) -> None:
    """As transformers does it, with the same configuration."""
    options = {"modules": MIXED, "lm_head": True}
    folder = low_bit_model(tmp_path, "llama", **options)
    config = LowbitConfig(**RECIPE, **options).to_dict()
    found = answers(tmp_path / "dense", hf_overrides={"quantization_config": config})
    check(folder, found)
    assert {"OnLoadLinear", "OnLoadHead"} < set(found["kinds"])


@needs_vllm
def test_quantized_as_lowbit_does_by_default(tmp_path: Path) -> None:
    found = answers(dense_model(tmp_path, "llama"), quantization="lowbit")
    assert set(found["kinds"]) == {"OnLoadLinear", "UnquantizedEmbeddingMethod"}


@needs_vllm
@pytest.mark.parametrize("case", ["fused, and its output layer", "of several formats", "with a low-bit table"])
def test_saved_models_take_other_weights(case: str, tmp_path: Path) -> None:
    """A reload gives exactly the new model."""
    name, options = SAVED[case]
    first, second = (low_bit_model(tmp_path / str(seed), name, seed, **options) for seed in (0, 1))
    found = answers(first, reload=str(second), enforce_eager=False)
    check(second, found)


@needs_vllm
def test_models_quantized_on_loading_take_other_weights(tmp_path: Path) -> None:
    first, second = (low_bit_model(tmp_path / str(seed), "llama", seed, lm_head=True) for seed in (0, 1))
    config = LowbitConfig(**RECIPE, lm_head=True).to_dict()
    overrides = {"quantization_config": config}
    dense = [folder.parent / "dense" for folder in (first, second)]
    check(second, answers(dense[0], reload=str(dense[1]), hf_overrides=overrides, enforce_eager=False))


@needs_vllm
def test_a_saved_model_takes_no_weights_of_other_formats(tmp_path: Path) -> None:
    both = ({"*": QuantConfig(name, 64)} for name in ("u4", "u3"))
    first, second = (low_bit_model(tmp_path / str(index), "llama", modules=each) for index, each in enumerate(both))
    text = answers(first, fails=True, reload=str(second))
    assert "when the model was made; start the server again to serve a model of other formats" in text


@needs_vllm
def test_saved_models_without_weights(tmp_path: Path) -> None:
    found = answers(low_bit_model(tmp_path, "llama", lm_head=True), load_format="dummy")
    assert {"SavedLinear", "SavedHead"} < set(found["kinds"])


@needs_vllm
def test_saved_experts(tmp_path: Path) -> None:
    """A reload gives exactly the new model; rounding may send a token to another expert than in transformers."""
    first, second = (low_bit_model(tmp_path / str(seed), "qwen3-moe", seed) for seed in (0, 1))
    found = answers(first)
    check(first, found)
    assert set(found["kinds"]) >= {"SavedExperts", "SavedLinear"}
    assert answers(first, reload=str(second)) == answers(second)


@needs_vllm
def test_experts_quantized_on_loading(tmp_path: Path) -> None:
    folder = low_bit_model(tmp_path, "qwen3-moe")
    overrides = {"quantization_config": LowbitConfig(**RECIPE).to_dict()}
    found = answers(tmp_path / "dense", hf_overrides=overrides)
    check(folder, found)
    assert set(found["kinds"]) >= {"OnLoadExperts", "OnLoadLinear"}


@needs_vllm
@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LowbitConfig(embeddings=True), "embeddings=True: in vLLM embeddings are not quantized while they are loaded"),
        (LowbitConfig(from_checkpoint=True), "from_checkpoint=True: the checkpoint is dense"),
        (LowbitConfig("u4", 64, method="gptq"), "has no calibration data"),
        (LowbitConfig(modules_to_not_convert=["o_prj"]), "'o_prj' matches no module"),
        (LowbitConfig(modules={"*.o_prj": None}), "matches no linear layer"),
    ],
)
def test_what_can_not_be_quantized_on_loading(config: LowbitConfig, message: str, tmp_path: Path) -> None:
    serving = import_module("lowbit.pylib.integrations.vllm.config").LowbitServing(config)
    with pytest.raises(SpecError, match=message):
        serving.maybe_update_config(str(dense_model(tmp_path, "llama")))


@needs_vllm
@pytest.mark.parametrize("processes", [1, 2])
def test_another_librarys_experts(processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWBIT_VLLM", "1")
    folder = dense_model(tmp_path, "qwen3-moe")
    moe_checkpoints.rewrite(folder, "gptq")
    found = answers(folder, tensor_parallel_size=processes)
    check(folder, found, options={"quantization_config": LowbitConfig(from_checkpoint=True)})
    assert set(found["kinds"]) >= {"SavedExperts", "SavedLinear"}


@needs_vllm
def test_two_processes_with_fused_layers(tmp_path: Path) -> None:
    folder = low_bit_model(tmp_path, "llama", fuse=True)
    check(folder, answers(folder, tensor_parallel_size=2))
