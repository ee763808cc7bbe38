"""Models in vLLM: what its layers are made of, and that it answers as transformers does on the same folder.

The second half needs vLLM, which CI does not have; docs/howto/vllm.md says how to install it. The first half does not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowbit
from lowbit import CheckpointError, LowbitConfig, LowbitLinear, PackError, QuantConfig, SpecError
from lowbit.pylib.integrations.vllm.names import Names
from lowbit.pylib.integrations.vllm.rows import Rows, Share, load_rows, load_weight, opened, quantize_rows

transformers = pytest.importorskip("transformers")

from pytests.models.vllm_answers import PROMPTS  # noqa: E402

needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: docs/howto/vllm.md")

PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
U4 = QuantConfig("u4", 32, clip="max")
CPU = torch.device("cpu")


class Block(nn.Module):
    """Layers as transformers calls those of a model."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(64, n, bias) for n in (64, 32, 32))
        self.down_proj = nn.Linear(128, 64, bias)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)


def saved(folder: Path, configs: Any = U4, bias: bool = False, fuse: bool = False) -> nn.Module:
    """Saves a model with one block and an embedding; returns it."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"embed": nn.Embedding(48, 64), "layers": nn.ModuleList([Block(bias)])}).bfloat16()
    lowbit.quantize_(model, configs, embeddings=True, fuse=fuse, progress=False)
    lowbit.save_checkpoint(model, folder)
    return model


def layer_of(model: nn.Module, name: str) -> LowbitLinear:
    found = model.get_submodule(f"layers.0.{name}")
    assert isinstance(found, LowbitLinear)
    return found


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
    assert names.taken == set(qkv)
    names.rename(lambda name: f"model.{name}")
    assert names.take("model.layers.0.qkv_proj", PACKED) == qkv
    assert names.parts("model.layers.0.qkv_proj", PACKED) == qkv
    assert {*names.below("model.layers")} == {*qkv, "layers.0.down_proj"} and names.below("model.layer") == []
    pattern = names.of_taken()
    assert pattern.search("layers.0.q_proj.codes") and pattern.search("model.layers.0.q_proj._extra_state")
    assert not pattern.search("layers.0.down_proj.codes") and not pattern.search("layers.0.q_proj_norm.weight")


def test_embeddings_without_a_name(tmp_path: Path) -> None:
    """vLLM does not say what some models call their embedding: it is known by its size."""
    saved(tmp_path)
    names = Names(opened(tmp_path))
    assert names.take_table("", (48, 64)) == names.take_table("embed", (1, 1)) == ("embed",)
    assert names.take_table("", (64, 64)) == ()


def test_fused_modules_have_a_name_of_their_own(tmp_path: Path) -> None:
    model = saved(tmp_path, fuse=True)
    modules = Names(opened(tmp_path)).take("layers.0.qkv_proj", PACKED)
    assert modules == ("layers.0.q_k_v_proj",)
    x = torch.randn(3, 64).bfloat16()
    rows = load_rows(tmp_path, modules, Share((64, 32, 32), 64), "bf16", CPU, bias=False)
    assert torch.equal(rows(x), layer_of(model, "q_k_v_proj")(x))
    with pytest.raises(PackError, match="q_k_v_proj: fused layers can't be split over processes"):
        load_rows(tmp_path, modules, Share((32, 16, 16), 64, 0, 2), "bf16", CPU, bias=False)


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
    rows = load_rows(tmp_path, modules, Share((64, 32, 32), 64), "bf16", CPU, bias=True)
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
    model = saved(tmp_path, bias=True)
    modules, x = ("layers.0.q_proj", "layers.0.k_proj"), torch.randn(3, 64).bfloat16()
    q, k = (layer_of(model, name)(x) for name in ("q_proj", "k_proj"))
    down: list[Tensor] = []
    for rank in range(processes):
        share = Share((64 // processes, 16), 64, rank, processes)
        y = load_rows(tmp_path, modules, share, "bf16", CPU, bias=True)(x)
        n, replicas = share.rows[0], processes // 2
        expected = [q[:, rank * n : (rank + 1) * n], k[:, rank // replicas * 16 :][:, :16]]
        assert torch.equal(y, torch.cat(expected, -1))
        if processes == 2:
            part = load_rows(tmp_path, ["layers.0.down_proj"], Share((64,), 64, rank, 2), "bf16", CPU, bias=True)
            down.append(part(torch.cat([x, x], -1)[:, rank * 64 :][:, :64]).float())
    if down:
        whole = layer_of(model, "down_proj")(torch.cat([x, x], -1)).float()
        torch.testing.assert_close(sum(down), whole, atol=0.02, rtol=0.02)


@pytest.mark.parametrize(("rows", "columns", "processes"), [(48, 128, 2), (128, 128, 1), (16, 128, 2), (64, 48, 2)])
def test_shares_that_there_are_none_of(rows: int, columns: int, processes: int, tmp_path: Path) -> None:
    saved(tmp_path)
    share = Share((rows,), columns, 0, processes)
    with pytest.raises(PackError, match=f"down_proj: its weight is 64 x 128, and vLLM wants {rows} x {columns} of"):
        load_rows(tmp_path, ["layers.0.down_proj"], share, "bf16", CPU, bias=False)


def test_a_bias_has_to_be_in_the_model(tmp_path: Path) -> None:
    saved(tmp_path)
    with pytest.raises(CheckpointError, match="q_proj: it has a bias in the model, and none in the checkpoint"):
        load_weight(tmp_path, "layers.0.q_proj", "bf16", CPU, bias=True)


def test_dense_rows_are_quantized_as_linear_layers_are() -> None:
    dense = nn.Linear(64, 96).bfloat16()
    with torch.no_grad():
        rows = quantize_rows(dense.weight, dense.bias, [64, 32], [U4, U4])
        apart = quantize_rows(dense.weight, dense.bias, [64, 32], [U4, QuantConfig("u4", 64, clip="max")])
    x = torch.randn(3, 64).bfloat16()
    expected = LowbitLinear.from_linear(dense, U4)(x)
    assert torch.equal(rows(x), expected) and len(rows) == 1 and len(apart) == 2
    assert torch.equal(apart(x)[:, :64], expected[:, :64]) and not torch.equal(apart(x), expected)


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
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(**SIZES, num_experts=4, moe_intermediate_size=64),
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


def dense_model(folder: Path, name: str) -> Path:
    """Saves a model with random weights, larger than usual, so that its answers are far apart."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(MODELS[name](), dtype=torch.bfloat16)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.copy_(parameter * 3 if parameter.ndim == 2 else torch.rand_like(parameter) + 0.5)
            parameter.mul_(10 if key == "lm_head.weight" else 1)
    model.save_pretrained(folder)
    return folder


def low_bit_model(folder: Path, name: str, **options: Any) -> Path:
    """Saves a low-bit model as transformers does."""
    config = LowbitConfig(**RECIPE, **options)
    dense = dense_model(folder / "dense", name)
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
def check(folder: Path, found: Any, adapter: Path | None = None) -> None:
    """vLLM and transformers differ by the rounding of bf16: in how likely tokens are, and where two are as likely."""
    model, expected = transformers.AutoModelForCausalLM.from_pretrained(folder), list[Tensor]()
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
    dense = {"UnquantizedLinearMethod"} if case == "of several formats" else set()
    table = {"SavedEmbedding"} if "embeddings" in options else {"UnquantizedEmbeddingMethod"}
    assert set(found["kinds"]) == {"SavedLinear", *dense, *table, *(["SavedHead"] if "lm_head" in options else [])}


@needs_vllm
def test_compiled(tmp_path: Path) -> None:
    folder = low_bit_model(tmp_path, "qwen2", embeddings=True)
    check(folder, answers(folder, enforce_eager=False))


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
def test_low_bit_experts_are_refused(tmp_path: Path) -> None:
    text = answers(dense_model(tmp_path, "qwen3-moe"), fails=True, quantization="lowbit")
    assert "experts: low-bit experts do not run in vLLM; leave experts dense with LowbitConfig(modules={'*" in text


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
def test_checkpoints_of_other_libraries() -> None:
    """They are lowbit's if the caller says so, and vLLM's own otherwise."""
    serving = import_module("lowbit.pylib.integrations.vllm.config").LowbitServing
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 64}
    assert serving.override_quantization_method(gptq, "lowbit") == "lowbit"
    assert serving.override_quantization_method(gptq, None) is None
    assert serving.override_quantization_method({"quant_method": "fbgemm"}, "lowbit") is None
    assert serving.from_config(gptq).config.source == gptq
