"""`LowbitConfig` in transformers: a model is quantized while it is loaded, saved, and loaded again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lowbit
from lowbit import (
    CheckpointError,
    LowbitConfig,
    LowbitExperts,
    LowbitLinear,
    PackError,
    QuantConfig,
    QuantizeError,
    SpecError,
    TiedLinear,
)
from lowbit.dialect.spec import MatmulSpec
from lowbit.pylib.checkpoints.tensor_files import TensorFiles
from lowbit.pylib.nn.gated_linear import GatedLinear, change_order

accelerate = pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

SMALL = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "dtype": "bfloat16",
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
MODELS = {
    "llama": lambda: transformers.LlamaConfig(**SMALL),
    "qwen2-tied": lambda: transformers.Qwen2Config(**SMALL, tie_word_embeddings=True),
    "gemma2": lambda: transformers.Gemma2Config(**SMALL),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(**SMALL, **EXPERTS),
    "gpt-oss": lambda: transformers.GptOssConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2),
}
TOKENS = torch.randint(3, 128, (2, 12), generator=torch.Generator().manual_seed(0))
AutoModel = transformers.AutoModelForCausalLM
U4 = QuantConfig("u4", 32, clip="max")  # without a search, which takes longest


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns a function that gives the folder with the dense checkpoint of a model."""
    folder = tmp_path_factory.mktemp("dense")

    def of(name: str) -> Path:
        path = folder / name
        if not path.exists():
            torch.manual_seed(0)
            AutoModel.from_config(MODELS[name]()).save_pretrained(path)
        return path

    return of


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(TOKENS.to(model.device)).logits.float().cpu()


def loaded(path: Path, config: LowbitConfig | None = None, **arguments: Any) -> Any:
    given = {} if config is None else {"quantization_config": config}  # None would replace that of config.json
    return AutoModel.from_pretrained(path, **given, **arguments)


@pytest.mark.parametrize("name", MODELS)
def test_quantizes_on_load_as_quantize_does(name: str, checkpoints: Any, tmp_path: Path) -> None:
    """The logits are those of `quantize_`, near those of the dense model, and the same after saving and loading."""
    path = checkpoints(name)
    dense = loaded(path)
    expected = logits(dense)
    model = loaded(path, LowbitConfig(U4))
    lowbit.quantize_(dense, U4, progress=False)
    given = logits(model)
    assert torch.equal(given, logits(dense))
    assert float((given - expected).norm() / expected.norm()) < 0.3
    model.save_pretrained(tmp_path)
    again = loaded(tmp_path)
    base = transformers.AutoModel.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(base(TOKENS).last_hidden_state, again.base_model(TOKENS).last_hidden_state)
    assert torch.equal(logits(again), given) and again.config.quantization_config.to_dict()["config"]["weight"] == "u4"


def test_loading_reads_only_what_layers_say_of_themselves(
    checkpoints: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codes and scales are transformers' to read: the search for missing ones goes by names. Specs, of which many
    layers have the same, are parsed and written once for each that differs."""
    loaded(checkpoints("qwen3-moe"), LowbitConfig(U4)).save_pretrained(tmp_path)
    read, parsed, written = list[str](), list[Any](), list[MatmulSpec]()
    get, parse, write = TensorFiles.__getitem__, MatmulSpec.from_dict, MatmulSpec.to_dict
    monkeypatch.setattr(TensorFiles, "__getitem__", lambda self, name: read.append(name) or get(self, name))
    monkeypatch.setattr(MatmulSpec, "from_dict", lambda given: parsed.append(given) or parse(given))
    monkeypatch.setattr(MatmulSpec, "to_dict", lambda self: written.append(self) or write(self))
    model = loaded(tmp_path)
    layers = [module for module in model.modules() if isinstance(module, LowbitLinear)]
    specs = {layer.spec for layer in layers}
    assert len(layers) > 2 * len(specs)
    assert len(read) == len(layers) and all(name.endswith("._extra_state") for name in read)
    assert len(parsed) <= len(specs) and len(written) <= 2 * len(specs)


def test_quantized_in_place_and_saved(checkpoints: Any, tmp_path: Path) -> None:
    """What `quantize_` has made is saved and loaded as well, by methods too that need data; but not fused."""
    model = loaded(checkpoints("qwen3-moe"))
    configs = {"*.mlp.*": QuantConfig("i8", None, clip="max"), "*": QuantConfig("u4", 32, method="gptq")}
    lowbit.quantize_(model, configs, calibration=[TOKENS], lm_head=True, progress=False)
    model.save_pretrained(tmp_path / "saved")
    again = loaded(tmp_path / "saved")
    assert torch.equal(logits(again), logits(model)) and again.lm_head.spec.weight == "u4"
    again.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(loaded(tmp_path / "again")), logits(model))
    lowbit.fuse_(model)
    model.save_pretrained(tmp_path / "fused")
    assert torch.equal(logits(loaded(tmp_path / "fused")), logits(model))


@pytest.mark.parametrize("name", ["llama", "qwen2-tied", "gemma2", "qwen3-moe", "gpt-oss"])
def test_fused_on_load(name: str, checkpoints: Any, tmp_path: Path) -> None:
    """As `fuse_` does it; the fused model is saved, loaded, and saved again."""
    model, apart = (loaded(checkpoints(name), LowbitConfig(U4, fuse=fuse)) for fuse in (True, False))
    fused = lowbit.fuse_(apart)
    assert model.hf_quantizer.fused == fused and any(row.name == "q_k_v_proj" for row in fused)
    given = logits(model)
    assert torch.equal(given, logits(apart))
    for number, each in enumerate((model, apart)):  # config.json of the second says nothing of it
        each.save_pretrained(tmp_path / str(number))
        again, info = loaded(tmp_path / str(number), output_loading_info=True)
        assert torch.equal(logits(again), given) and not any(info.values())
        assert "model.layers.0.self_attn.q_k_v_proj.codes" in again.state_dict()
    again.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(loaded(tmp_path / "again")), given)
    if name == "llama":
        assert type(model.dequantize().model.layers[0].self_attn.q_k_v_proj) is torch.nn.Linear


def test_fused_checkpoint_that_does_not_fit(checkpoints: Any, tmp_path: Path) -> None:
    loaded(checkpoints("llama"), LowbitConfig(U4, fuse=True)).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["intermediate_size"] = 96
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(PackError, match=r"layers.0.mlp: gate_up_proj: .* n=256 \(not 192\)"):
        loaded(tmp_path)


def test_only_low_bit_tensors_are_saved(checkpoints: Any, tmp_path: Path) -> None:
    loaded(checkpoints("qwen3-moe"), LowbitConfig(U4)).save_pretrained(tmp_path)
    tensors = safetensors.load_file(tmp_path / "model.safetensors")
    dense = {name for name in tensors if name.endswith("weight") or "proj" in name.rpartition(".")[2]}
    assert {name.split(".")[-2] for name in dense} == {
        *("embed_tokens", "norm", "input_layernorm", "post_attention_layernorm", "q_norm", "k_norm", "gate", "lm_head")
    }
    assert "model.layers.1.mlp.experts.down.3.codes" in tensors


@pytest.mark.parametrize("name", ["llama", "qwen2-tied", "gemma2"])
def test_embeddings(name: str, checkpoints: Any, tmp_path: Path) -> None:
    """Quantized on load and in place; a tied output layer multiplies by the one weight that is saved."""
    tied = name != "llama"
    model = loaded(checkpoints(name), LowbitConfig(U4, embeddings=True, lm_head=True))
    given, outputs = logits(model), model.get_output_embeddings()
    assert type(outputs) is (TiedLinear if tied else LowbitLinear)
    in_place = loaded(checkpoints(name))
    assert "model.embed_tokens" in str(lowbit.quantize_(in_place, U4, lm_head=True, embeddings=True, progress=False))
    assert torch.equal(logits(in_place), given)
    for number, each in enumerate((model, in_place)):
        each.save_pretrained(tmp_path / str(number))
        names = set(safetensors.load_file(tmp_path / str(number) / "model.safetensors"))
        assert "model.embed_tokens.codes" in names and ("lm_head.codes" in names) is not tied
        again, info = loaded(tmp_path / str(number), output_loading_info=True)
        assert torch.equal(logits(again), given) and not any(info.values())
    if name == "gemma2":
        with pytest.raises(SpecError, match="rows are multiplied by 8"):
            model.dequantize()
        return
    dense = model.dequantize()
    assert type(dense.lm_head) is torch.nn.Linear
    assert (dense.lm_head.weight is dense.model.embed_tokens.weight) is tied
    assert float((logits(dense) - given).norm() / given.norm()) < 0.02


def test_tied_weights_stay_tied(checkpoints: Any) -> None:
    model = loaded(checkpoints("qwen2-tied"), LowbitConfig(U4))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.model.layers[0].self_attn.q_proj.bias.dtype is torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_types(dtype: torch.dtype, checkpoints: Any, tmp_path: Path) -> None:
    """A model in f32 becomes one in bf16; a model saved in one type can be loaded in the other."""
    model = loaded(checkpoints("qwen2-tied"), LowbitConfig(U4), dtype=dtype)
    assert model.dtype == (torch.float16 if dtype is torch.float16 else torch.bfloat16)
    model.save_pretrained(tmp_path)
    other = torch.float16 if model.dtype is torch.bfloat16 else torch.bfloat16
    again = loaded(tmp_path, dtype=other)
    assert again.dtype == other
    assert float((logits(again) - logits(model)).norm() / logits(model).norm()) < 0.05


def test_which_modules(checkpoints: Any, tmp_path: Path) -> None:
    config = LowbitConfig(
        U4,
        modules={"*.mlp.*": QuantConfig("i8", None, clip="max"), "*.1.self_attn.q_proj": None},
        modules_to_not_convert=["o_proj", "model.layers.0.mlp.up_proj"],
        lm_head=True,
    )
    model = loaded(checkpoints("llama"), config, device_map={"": "cpu"})
    kinds = {name: m.spec.weight for name, m in model.named_modules() if isinstance(m, LowbitLinear)}
    attention = {f"model.layers.{i}.self_attn.{p}_proj": "u4" for i in (0, 1) for p in "qkv"}
    mlp = {f"model.layers.{i}.mlp.{p}_proj": "i8" for i in (0, 1) for p in ("gate", "up", "down")}
    del attention["model.layers.1.self_attn.q_proj"], mlp["model.layers.0.mlp.up_proj"]
    assert kinds == attention | mlp | {"lm_head": "u4"}
    reasons = model.hf_quantizer.stays_dense
    assert reasons["model.embed_tokens"].startswith("an embedding;") and "o_proj" not in kinds and len(reasons) == 5
    assert reasons["model.layers.0.mlp.up_proj"].startswith("modules_to_not_convert")
    assert reasons["model.layers.1.self_attn.q_proj"] == "config['*.1.self_attn.q_proj'] is None"
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(loaded(tmp_path, device_map="cpu")), logits(model))


def test_patterns_stay_in_order_in_a_file_with_sorted_keys() -> None:
    modules = {"*.mlp.*": QuantConfig("u3", 64), "*.0.*": None}
    written = LowbitConfig(U4, modules=modules).to_dict()
    read = LowbitConfig.from_dict(json.loads(json.dumps(written, sort_keys=True)))
    assert list(read.modules.items()) == list(modules.items())
    by_earlier_versions = written | {"modules": dict(written["modules"])}
    assert LowbitConfig.from_dict(by_earlier_versions).modules == modules
    with pytest.raises(SpecError, match="must be a list of patterns"):
        LowbitConfig.from_dict(written | {"modules": ["*.mlp.*"]})


def test_dequantize(checkpoints: Any) -> None:
    model = loaded(checkpoints("llama"), LowbitConfig(U4))
    expected = logits(model)
    model.dequantize()
    assert not any(isinstance(module, LowbitLinear) for module in model.modules())
    assert float((logits(model) - expected).norm() / expected.norm()) < 0.02


@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
def test_generate_compiled_with_a_static_cache(name: str, checkpoints: Any) -> None:
    model = loaded(checkpoints(name), LowbitConfig(U4))
    arguments = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    expected = model.generate(TOKENS, **arguments)
    model.forward = torch.compile(model.forward, fullgraph=True, backend="eager")
    assert torch.equal(model.generate(TOKENS, cache_implementation="static", **arguments), expected)


# -- experts


@pytest.mark.parametrize("tokens", [1, 7])
@torch.no_grad()
def test_experts_with_static_shapes(tokens: int, checkpoints: Any) -> None:
    """What torch.compile traces is what the experts that have tokens give."""
    experts = loaded(checkpoints("qwen3-moe"), LowbitConfig(U4)).model.layers[0].mlp.experts
    assert isinstance(experts, LowbitExperts) and "4 experts of u4[192, 64]" in repr(experts)
    x = torch.randn(tokens, 64).bfloat16()
    index = torch.stack([torch.randperm(5)[:2] for _ in range(tokens)])  # 4 stands for no expert
    weights = torch.rand(tokens, 2).bfloat16()
    expected = torch.zeros(tokens, 64)
    for t in range(tokens):
        for expert, weight in zip(index[t].tolist(), weights[t]):
            if expert < 4:
                expected[t] += (experts.expert(expert, x[t]) * weight).float()
    torch._dynamo.reset()  # other tests have compiled other experts
    compiled = torch.compile(experts, fullgraph=True, backend="eager")
    for given in (experts(x, index, weights), compiled(x, index, weights)):
        torch.testing.assert_close(given.float(), expected, rtol=0.02, atol=0.02 * float(expected.abs().max()))


@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss"])
def test_experts_that_have_been_called_are_saved(name: str, checkpoints: Any, tmp_path: Path) -> None:
    """The rows of gate and up are stored side by side then; products of 8 bits are kept as well."""
    model = loaded(checkpoints(name), LowbitConfig(U4))
    assert not lowbit.set_compute_(model.model.layers[0].mlp.experts, "i8")
    given = logits(model)
    for layer in model.model.layers:
        gate = layer.mlp.experts._gate()
        for linear in layer.mlp.experts.gate_up:
            if not isinstance(linear, GatedLinear):
                change_order(linear, gate)
    model.save_pretrained(tmp_path)
    again = loaded(tmp_path)
    assert all(type(linear) is GatedLinear for layer in again.model.layers for linear in layer.mlp.experts.gate_up)
    assert again.model.layers[0].mlp.experts.gate_up[1].spec.compute == "i8"
    torch.testing.assert_close(logits(again), given, rtol=0.02, atol=0.02 * float(given.abs().max()))


def test_experts_that_are_not_quantized_are_in_the_report(checkpoints: Any) -> None:
    model = loaded(checkpoints("qwen3-moe"))
    experts = model.model.layers[1].mlp.experts
    report = lowbit.quantize_(model, {"*.layers.0.*": U4, "*": None}, progress=False)
    assert report["model.layers.0.mlp.experts.gate_up_proj"].shape == (4, 192, 64)
    assert report["model.layers.1.mlp.experts"].reason == "config['*'] is None"
    assert model.model.layers[1].mlp.experts is experts


@pytest.mark.parametrize("offload_buffers", [False, True])
def test_weights_that_come_for_a_call(offload_buffers: bool, checkpoints: Any) -> None:
    """accelerate keeps weights elsewhere, brings a layer's before each call, and may reuse their memory."""
    model = loaded(checkpoints("llama"), LowbitConfig(U4))
    expected = logits(model)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"), offload_buffers=offload_buffers)
    assert model.model.layers[1].mlp.down_proj.codes.is_meta is offload_buffers
    for _ in range(2):
        assert torch.equal(model(TOKENS).logits.float(), expected)


@pytest.mark.parametrize("main", [torch.device("cpu"), pytest.param(torch.device("cuda", 0), marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
def test_device_map_of_several_devices(main: torch.device, name: str, checkpoints: Any, tmp_path: Path) -> None:
    """Layers that are on "cpu" come to the main device for each call, which here may be the CPU by another name."""
    parts = dict.fromkeys(["model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head", "model.layers.1"], main)
    places = {**parts, "model.layers.0": "cpu"}
    whole = loaded(checkpoints(name), LowbitConfig(U4), device_map={"": main})
    whole.save_pretrained(tmp_path)
    quantized = loaded(checkpoints(name), LowbitConfig(U4), device_map=places)
    for model in (quantized, loaded(tmp_path, device_map=places)):
        for _ in range(2):
            found = model(TOKENS.to(main)).logits.float()
            torch.testing.assert_close(found, whole(TOKENS.to(main)).logits.float(), rtol=0.02, atol=0.02)


@pytest.mark.gpu
@torch.no_grad()
def test_experts_in_a_cuda_graph(checkpoints: Any) -> None:
    """A graph that was recorded for one choice of experts is right for others."""
    experts = loaded(checkpoints("qwen3-moe"), LowbitConfig(U4), device_map="cuda").model.layers[0].mlp.experts
    x, weights = torch.randn(3, 64, device="cuda").bfloat16(), torch.rand(3, 2, device="cuda").bfloat16()
    index = torch.tensor([[0, 1], [2, 3], [1, 3]], device="cuda")
    experts(x, index, weights)
    for expert in range(4):
        experts.expert(expert, x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = experts(x, index, weights)
    for _ in range(3):
        index.copy_(torch.stack([torch.randperm(5)[:2] for _ in range(3)]))
        graph.replay()
        expected = experts(x, index, weights)
        torch.testing.assert_close(y, expected, rtol=0.02, atol=0.02 * float(expected.abs().max()))


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "most"), [("llama", 0.05), ("gemma2", 0.05), ("qwen3-moe", 0.5)])
def test_on_a_gpu(name: str, most: float, checkpoints: Any, tmp_path: Path) -> None:
    """Quantized on the GPU while loading, saved, loaded, and compiled by generate() with a static cache.

    most: how far logits may be from those on the CPU; rounding may choose another expert
    """
    from torch._inductor.cudagraph_trees import reset_cudagraph_trees

    torch._dynamo.reset()
    reset_cudagraph_trees()  # those of other models, whose tensors torch would take for this one's
    model = loaded(checkpoints(name), LowbitConfig(U4), device_map="cuda")
    on_cpu = logits(loaded(checkpoints(name), LowbitConfig(U4)))
    given = logits(model)
    assert float((given - on_cpu).norm() / on_cpu.norm()) < most
    model.save_pretrained(tmp_path)
    again = loaded(tmp_path, device_map="cuda")
    assert torch.equal(logits(again), given)
    arguments = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    answer = again.generate(TOKENS.cuda(), cache_implementation="static", **arguments)
    assert answer.shape == (2, 16) and bool((answer[:, :12].cpu() == TOKENS).all())


# -- wrong input


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"group_size": 24}, r"model.layers.0.self_attn.q_proj: group_size=24 must divide k=64"),
        ({"modules_to_not_convert": ["k_prj"]}, r"'k_prj' matches no module"),
        ({"modules": {"*.attn.*": None}}, r"config\['\*.attn.\*'\] matches no linear layer"),
        ({"method": "gptq"}, "from_pretrained has no calibration data"),
        ({"modules": {"*": None}}, "leaves nothing of LlamaForCausalLM"),
    ],
)
def test_configuration_that_does_not_fit(config: dict[str, Any], message: str, checkpoints: Any) -> None:
    with pytest.raises(SpecError, match=message):
        loaded(checkpoints("llama"), LowbitConfig(**({"group_size": 32} | config)))


def test_a_recipe_is_no_configuration_of_transformers(checkpoints: Any) -> None:
    with pytest.raises(SpecError, match=r"takes a LowbitConfig: quantization_config=lowbit.LowbitConfig\(config\)"):
        loaded(checkpoints("llama"), U4)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weight": "u9"}, "u9"),
        ({"groups": 32}, "'groups'; the fields of a recipe are weight, group_size, zeros, scale, method, "),
        ({"modules_to_not_convert": "lm_head"}, "must be a list of names"),
        ({"lm_head": 1}, "lm_head=1 must be True or False"),
        ({"modules": {"*": "u4"}}, "must be a QuantConfig"),
        ({"weight": U4, "group_size": 64}, "drop the other fields"),
    ],
)
def test_wrong_configuration(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        LowbitConfig(**arguments)


@pytest.mark.parametrize("per_row", [False, True])
def test_indivisible_rows(per_row: bool, checkpoints: Any) -> None:
    config = LowbitConfig("u4", 48, per_row_if_indivisible=per_row)
    if not per_row:
        with pytest.raises(SpecError, match=r"per_row_if_indivisible=True"):
            loaded(checkpoints("qwen3-moe"), config)
        return
    experts = loaded(checkpoints("qwen3-moe"), config).model.layers[0].mlp.experts
    assert {layer.spec.group_size for layer in experts.modules() if isinstance(layer, LowbitLinear)} == {None}


def test_wrong_values_name_their_module(checkpoints: Any, tmp_path: Path) -> None:
    model = loaded(checkpoints("qwen3-moe"))
    model.model.layers[1].mlp.experts.down_proj.data[2, 3, 5] = torch.nan
    model.save_pretrained(tmp_path)
    with pytest.raises(QuantizeError, match=r"model.layers.1.mlp.experts.down_proj: \[2\]: weight\[3, 5\] = nan"):
        loaded(tmp_path, LowbitConfig(U4))


def _lie(path: Path, **changes: Any) -> None:
    written = json.loads((path / "config.json").read_text())
    written["quantization_config"]["config"] |= changes
    (path / "config.json").write_text(json.dumps(written))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"weight": "i4", "zeros": "none"}, PackError, r"q_proj: the weight was packed with weight='u4' \(not 'i4'\)"),
        ({"group_size": 64}, PackError, r"q_proj: the weight was packed with group_size=32 \(not 64\)"),
        ({"weight": "x4"}, SpecError, "x4"),
        ({"version": 9}, SpecError, "version 9"),
        ({"colour": 1}, SpecError, "colour"),
    ],
)
def test_config_that_lies(changes: dict[str, Any], error: type, message: str, checkpoints: Any, tmp_path: Path) -> None:
    loaded(checkpoints("llama"), LowbitConfig(U4)).save_pretrained(tmp_path)
    _lie(tmp_path, **changes)
    with pytest.raises(error, match=message):
        loaded(tmp_path)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("embeddings", None, "model.embed_tokens: .* config.json says that it has none here"),
        (None, "embeddings", "model.embed_tokens: config.json says that it is low-bit, and the checkpoint has no"),
        ("lm_head", None, "lm_head: the checkpoint has a low-bit weight"),
    ],
)
def test_options_that_lie(
    before: str | None, after: str | None, message: str, checkpoints: Any, tmp_path: Path
) -> None:
    """What is low-bit in the files and dense in the model would be left at random."""
    loaded(checkpoints("llama"), LowbitConfig(U4, **({before: True} if before else {}))).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    written["quantization_config"] |= {before: False} if before else {after: True}
    (tmp_path / "config.json").write_text(json.dumps(written))
    with pytest.raises(PackError, match=message):
        loaded(tmp_path)


@pytest.mark.parametrize("embeddings", [False, True])
def test_output_layer_that_is_in_no_file(embeddings: bool, checkpoints: Any, tmp_path: Path) -> None:
    """The embedding's table is saved once; without the word that they are tied the output layer would be random."""
    loaded(checkpoints("qwen2-tied"), LowbitConfig(U4, embeddings=embeddings)).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    written["tie_word_embeddings"] = False
    for config in (written["quantization_config"], LowbitConfig(from_checkpoint=True).to_dict()):
        written["quantization_config"] = config
        (tmp_path / "config.json").write_text(json.dumps(written))
        with pytest.raises(CheckpointError, match=r"lm_head: the checkpoint has no such .*tie_word_embeddings=True"):
            loaded(tmp_path)


def test_damaged_checkpoint(checkpoints: Any, tmp_path: Path) -> None:
    """Tensors that are missing, or hold what kernels can't multiply by, are errors that name the layer."""
    loaded(checkpoints("llama"), LowbitConfig(U4)).save_pretrained(tmp_path)
    file, name = tmp_path / "model.safetensors", "model.layers.1.mlp.up_proj"
    tensors = safetensors.load_file(file)
    tensors[f"{name}.scales"][0, 0, 0] = torch.inf
    safetensors.save_file(tensors, file, {"format": "pt"})
    with pytest.raises(PackError, match=rf"{name}: "):
        loaded(tmp_path)
    codes = tensors.pop(f"{name}.codes")
    safetensors.save_file(tensors, file, {"format": "pt"})
    with pytest.raises(PackError, match=rf"{name}: the checkpoint has no codes of this"):
        loaded(tmp_path)
    tensors[f"{name}.codes"] = codes
    del tensors[f"{name}._extra_state"]
    safetensors.save_file(tensors, file, {"format": "pt"})
    with pytest.raises(PackError, match=rf"{name}: config.json says that it is low-bit"):
        loaded(tmp_path)


# -- registration


@pytest.mark.parametrize("order", ["transformers.quantizers, lowbit", "lowbit, lowbit.pylib.integrations.choose"])
def test_registered_in_either_order(order: str, repo: Path) -> None:
    """`import lowbit` loads no transformers and no torch; both together know each other. Other orders load a model, in
    `test_notice`."""
    code = (
        "import sys\nimport lowbit\nassert not {'transformers', 'torch', 'numpy'} & sys.modules.keys()\n"
        if order.startswith("lowbit")
        else ""
    )
    code += (
        f"import {order}\nfrom transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING as known\n"
        "assert known['lowbit'] is lowbit.LowbitConfig\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=repo, check=True)
