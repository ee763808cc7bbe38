"""Whole models in files: what is saved is loaded, and whatever is wrong is an error that leaves the model alone."""

from __future__ import annotations

import json
import pickle
import random
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import lowbit
from lowbit import CheckpointError
from lowbit.pylib.checkpoints.checkpoint import open_checkpoint
from lowbit.pylib.checkpoints.description import FILES
from lowbit.pylib.checkpoints.tensor_files import INDEX, SINGLE
from lowbit.pylib.integrations.serving.names import Names

FIXTURES = Path(__file__).parents[1] / "fixtures/checkpoints"


class Block(nn.Module):
    """A tied embedding, two layers that are one, a bias, a norm and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 64)
        self.norm = nn.LayerNorm(64)
        self.up = nn.Linear(64, 128)
        self.down = nn.Linear(128, 64, bias=False)
        self.again = self.down
        self.lm_head = nn.Linear(64, 40, bias=False)
        self.lm_head.weight = self.embed.weight
        self.register_buffer("step", torch.tensor(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.down(self.up(self.norm(self.embed(tokens))))
        return self.lm_head(x)


@pytest.fixture
def model() -> Block:
    torch.manual_seed(0)
    block = Block().bfloat16().eval()
    lowbit.quantize_(block, lowbit.QuantConfig("u4", group_size=32))
    return block


def on_meta() -> Block:
    with torch.device("meta"):
        return Block().bfloat16()


TOKENS = torch.arange(12).view(2, 6)


@pytest.mark.parametrize("most", [1 << 30, 3000])
def test_save_and_load(model: Block, tmp_path: Path, most: int) -> None:
    lowbit.save_checkpoint(model, tmp_path, most)
    loaded = on_meta()
    checkpoint = lowbit.load_checkpoint(loaded, tmp_path)
    assert set(checkpoint.modules) == {"up", "down"} and checkpoint.format is None
    assert torch.equal(loaded(TOKENS), model(TOKENS))
    assert loaded.lm_head.weight is loaded.embed.weight and loaded.again is loaded.down
    assert int(loaded.step) == 3 and isinstance(loaded.up, lowbit.LowbitLinear)
    files = sorted(file.name for file in tmp_path.iterdir())
    if most > 1 << 20:
        assert files == [SINGLE]
    else:
        assert len(files) > 3 and files[-1] == INDEX
        assert all(sum(t.nbytes for t in load_file(file).values()) <= 5120 for file in tmp_path.glob("*.safetensors"))
    assert len(load_file(tmp_path / files[0])) <= len(checkpoint.tensors)


def test_files_are_those_that_transformers_reads(model: Block, tmp_path: Path) -> None:
    """One file of the names of the state dictionary, less those that are tied; or shards with an index."""
    lowbit.save_checkpoint(model, tmp_path / "one")
    state = model.state_dict()
    saved = load_file(tmp_path / "one" / SINGLE)
    assert state.keys() - saved.keys() == {"lm_head.weight", *(name for name in state if name.startswith("again."))}
    assert all(torch.equal(t, state[name]) for name, t in saved.items())
    lowbit.save_checkpoint(model, tmp_path / "many", 3000)
    index = json.loads((tmp_path / "many" / INDEX).read_text())
    assert index["weight_map"].keys() == saved.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in saved.values())


def test_memory_is_taken_for_what_is_read(tmp_path: Path) -> None:
    """A file of 4 GB, all of it a hole but for one number."""
    header = {"big": {"dtype": "U8", "shape": [1 << 32], "data_offsets": [0, 1 << 32]}}
    header["small"] = {"dtype": "U8", "shape": [1], "data_offsets": [1 << 32, (1 << 32) + 1]}
    text = json.dumps(header).encode()
    with (tmp_path / SINGLE).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + (1 << 32))
        file.seek(0, 2)
        file.write(b"\x07")
    used = _peak()
    checkpoint = lowbit.open_checkpoint(tmp_path)
    assert checkpoint.tensors.shape("big") == (1 << 32,) and int(checkpoint.tensors["small"]) == 7
    assert _peak() - used < 64 << 20


def _peak() -> int:
    """Returns the most bytes of memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Views(nn.Module):
    """Tensors that share memory without being the same, and a module that names its tensors as it likes."""

    def __init__(self) -> None:
        super().__init__()
        whole = torch.arange(16.0).view(4, 4)
        for name, t in {"whole": whole, "rows": whole[1:3], "turned": whole.t(), "same": whole}.items():
            self.register_buffer(name, t)

    def _save_to_state_dict(self, destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "a.b"] = torch.ones(2)


def test_tensors_that_share_memory(tmp_path: Path) -> None:
    model = Views()
    lowbit.save_checkpoint(model, tmp_path)
    saved = load_file(tmp_path / SINGLE)
    assert saved.keys() == {"whole", "rows", "turned", "a.b"}
    assert all(torch.equal(t, model.state_dict()[name]) for name, t in saved.items())


def test_where_a_checkpoint_is_already(model: Block, tmp_path: Path) -> None:
    lowbit.save_checkpoint(model, tmp_path)
    with pytest.raises(CheckpointError, match=r"has a model.safetensors already; remove it"):
        lowbit.save_checkpoint(model, tmp_path)
    with pytest.raises(CheckpointError, match=r"is a file; name a folder"):
        lowbit.save_checkpoint(model, tmp_path / SINGLE)


def test_one_weight_at_a_time(model: Block, tmp_path: Path) -> None:
    lowbit.save_checkpoint(model, tmp_path)
    checkpoint = lowbit.open_checkpoint(tmp_path / SINGLE)
    assert set(checkpoint.dense) == {"embed.weight", "norm.weight", "norm.bias", "step"}
    packed = checkpoint.load("up")
    assert packed.spec == model.up.spec and torch.equal(packed.codes, model.up.codes)
    assert checkpoint.load("down", act="f16").spec.act == "f16"
    with pytest.raises(CheckpointError, match=r"no quantized layer 'upp'; did you mean 'up'\?"):
        checkpoint.load("upp")


def linear_model(n: int, k: int, bias: bool = True) -> nn.Module:
    """A model with one linear layer, called as in the fixtures."""
    inner: nn.Module = nn.Linear(k, n, bias=bias, dtype=torch.float16)
    for name in ("up_proj", "mlp", "0", "layers", "model"):
        outer = nn.Module()
        outer.add_module(name, inner)
        inner = outer
    return inner


def test_other_processes_open_a_checkpoint_again(model: Block, tmp_path: Path) -> None:
    lowbit.save_checkpoint(model, tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    names, other = Names(checkpoint), pickle.loads(pickle.dumps(Names(checkpoint)))
    assert names.low_bit and other.low_bit == names.low_bit and other.tables == names.tables


@pytest.mark.parametrize("name", ["gptq-4", "awq", "ct-pack-4", "hqq-4", "bnb-nf4"])
def test_load_another_library(name: str) -> None:
    expected = load_file(FIXTURES / name / "expected.safetensors")
    ((layer, weight),) = expected.items()
    model = linear_model(*weight.shape)
    lowbit.load_checkpoint(model, FIXTURES / name)
    loaded = model.get_submodule(layer.removesuffix(".weight"))
    assert isinstance(loaded, lowbit.LowbitLinear)
    assert torch.equal(loaded.dequantize(), weight.half())


class Experts(nn.Module):
    """Two experts as transformers 5 keeps them."""

    def __init__(self, n: int = 24, k: int = 64) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(2, n, k))
        self.gate_up_proj_bias = nn.Parameter(torch.randn(2, n))
        self.down_proj = nn.Parameter(torch.randn(2, k, n // 2))
        self.down_proj_bias = nn.Parameter(torch.randn(2, k))

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return gate * up


class Mixture(nn.Module):
    def __init__(self, n: int = 64) -> None:
        super().__init__()
        self.experts = Experts(n)

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x, torch.tensor([[0, 1], [1, 0]]), torch.tensor([[0.5, 0.25], [0.75, 1.0]]))


def test_experts(tmp_path: Path) -> None:
    model = Mixture().bfloat16()
    lowbit.quantize_(model, lowbit.QuantConfig("u4", group_size=32))
    lowbit.save_checkpoint(model, tmp_path)
    with torch.device("meta"):
        loaded = Mixture()
    checkpoint = lowbit.load_checkpoint(loaded, tmp_path)
    assert "experts.gate_up.1" in checkpoint.modules and isinstance(loaded.experts, lowbit.LowbitExperts)
    x = torch.randn(2, 64).bfloat16()
    assert torch.equal(loaded(x), model(x))
    with pytest.raises(lowbit.QuantizeError, match="LowbitExperts multiplies by packed codes; a gate_up_proj that is"):
        loaded.experts.gate_up_proj = nn.Parameter(torch.ones(2, 64, 64))
    unchanged(Mixture(128), tmp_path, "experts.gate_up_proj is 64 x 64 with a bias, but 128 x 64 with a bias")


def test_stacked_experts_of_another_library(tmp_path: Path) -> None:
    """gpt-oss has a tensor of all experts."""
    tensors, layer = load_file(FIXTURES / "mxfp4" / SINGLE), "model.layers.0.mlp.up_proj"
    tensors = {name.replace(layer, "experts.gate_up_proj"): t for name, t in tensors.items()}
    down = {"experts.down_proj_blocks": torch.randint(256, (2, 64, 1, 16), dtype=torch.uint8)}
    down |= {"experts.down_proj_scales": torch.full((2, 64, 1), 120, dtype=torch.uint8)}
    down |= {"experts.down_proj_bias": torch.randn(2, 64).bfloat16()}
    with pytest.raises(CheckpointError, match=r"those of several experts; load_experts\(name\) reads them"):
        lowbit.open_checkpoint(FIXTURES / "mxfp4").load(layer, "bf16")
    save_file(tensors | down, tmp_path / SINGLE)
    shutil.copy(FIXTURES / "mxfp4" / "config.json", tmp_path)
    model = Mixture(24)
    unchanged(model, tmp_path, "experts.down_proj is 64 x 32 with a bias, but 64 x 12 with a bias in the model")
    model.experts.down_proj = nn.Parameter(torch.randn(2, 64, 32))
    lowbit.load_checkpoint(model, tmp_path, act="bf16")
    expected = load_file(FIXTURES / "mxfp4" / "expected.safetensors")[layer]
    loaded = model.experts.gate_up[1]
    assert torch.equal(loaded.packed.dequantize(), expected[1])
    edit(tmp_path, "experts.down_proj_scales", torch.full((3, 64, 1), 120, dtype=torch.uint8))
    unchanged(Mixture(24), tmp_path, r"experts.down_proj: tensors must have one first dimension, the expert's")


# -- what is wrong


def unchanged(model: nn.Module, folder: Path, message: str) -> None:
    """Asserts that loading is an error with this message, and leaves the model as it was."""
    before, modules = dict(model.state_dict(keep_vars=True)), dict(model.named_modules())
    with pytest.raises(CheckpointError, match=message):
        lowbit.load_checkpoint(model, folder)
    after = model.state_dict(keep_vars=True)
    assert after.keys() == before.keys() and all(after[name] is t for name, t in before.items() if "extra" not in name)
    assert dict(model.named_modules()) == modules


def edit(folder: Path, name: str, tensor: Tensor | None) -> None:
    """Puts a tensor into a checkpoint, or takes it out."""
    tensors = load_file(folder / SINGLE)
    tensors = {**tensors, name: tensor} if tensor is not None else {k: t for k, t in tensors.items() if k != name}
    save_file({key: t.clone() for key, t in tensors.items()}, folder / SINGLE)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"ignore": "*.k_scale"}, CheckpointError, r"ignore='\*.k_scale' must be a list of patterns; use"),
        ({"device": "gpu"}, lowbit.SpecError, "device=gpu is no device; use cpu or cuda"),
        ({"device": "cuda:99"}, lowbit.TargetError, "device=cuda:99: torch finds .* here; use cpu"),
        ({"act": "f8"}, CheckpointError, "act='f8' must be one of"),
    ],
)
def test_wrong_arguments(model: Block, tmp_path: Path, arguments: dict[str, Any], error: type, message: str) -> None:
    lowbit.save_checkpoint(model, tmp_path / "saved")
    with pytest.raises(error, match=message):
        lowbit.load_checkpoint(Block(), tmp_path / "saved", **arguments)
    if "device" in arguments:
        with pytest.raises(CheckpointError, match=f"up: {message}"):
            lowbit.open_checkpoint(tmp_path / "saved").load("up", **arguments)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("norm.bias", None, "has no norm.bias, which the model needs"),
        ("norm.more", torch.ones(2), "has norm.more, which the model has not; ignore= leaves tensors out"),
        ("norm.bias", torch.ones(3), r"safetensors: norm.bias is float32 \[3\], but bfloat16 \[64\] in the model"),
        ("norm.bias", torch.ones(64, dtype=torch.int8), r"norm.bias is int8 \[64\], but bfloat16 \[64\] in the model"),
        ("up.scales", None, "model.safetensors: up: tensors must be codes, scales, .*; got"),
        ("up.codes", torch.zeros(3, dtype=torch.int32), r"model.safetensors: up: packed codes must be torch.int32 \("),
        ("up._extra_state", torch.zeros(3, dtype=torch.uint8), "model.safetensors: up: 'spec' is not what state_dict"),
        ("up.codes", None, "model.safetensors: up: tensors must be codes, scales, .*; got"),
    ],
)
def test_wrong_tensors(model: Block, tmp_path: Path, name: str, tensor: Tensor | None, message: str) -> None:
    lowbit.save_checkpoint(model, tmp_path)
    edit(tmp_path, name, tensor)
    unchanged(Block().bfloat16(), tmp_path, message)


def test_tensors_that_the_model_does_not_need(model: Block, tmp_path: Path) -> None:
    lowbit.save_checkpoint(model, tmp_path)
    edit(tmp_path, "norm.k_scale", torch.ones(2))
    loaded = on_meta()
    lowbit.load_checkpoint(loaded, tmp_path, ignore=["*.k_scale"])
    assert torch.equal(loaded(TOKENS), model(TOKENS))


def test_models_of_other_shapes() -> None:
    folder, layer = FIXTURES / "gptq-4", "model.layers.0.mlp.up_proj"
    unchanged(linear_model(32, 64), folder, f"{layer} is 32 x 128 with a bias, but 32 x 64 with a bias in the model")
    unchanged(linear_model(32, 128, bias=False), folder, "with a bias, but 32 x 128 with no bias in the model")
    unchanged(nn.Linear(2, 2), folder, f"{layer} is quantized, but the model has no such layer")
    model = linear_model(32, 128)
    model.set_submodule(layer, nn.Conv1d(2, 2, 1))
    unchanged(model, folder, "is quantized, but it is a Conv1d in the model")


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "../model.safetensors"}, "says that a is in '../model.safetensors', which is no"),
        ({"a": "/etc/passwd"}, "is no safetensors file beside"),
        ({"a": "model.bin"}, "is no safetensors file beside"),
        ({"a": 3}, "is no safetensors file beside"),
        ({"a": "gone.safetensors"}, "gone.safetensors is not there, though model.safetensors.index.json"),
        ({"a": SINGLE}, "model.safetensors has no a, which model.safetensors.index.json says it has"),
        ({}, "has no weight_map from names to files"),
        ([], "has no weight_map from names to files"),
    ],
)
def test_wrong_index(tmp_path: Path, weight_map: object, message: str) -> None:
    save_file({"b": torch.ones(2)}, tmp_path / SINGLE)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=message):
        lowbit.open_checkpoint(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "nope", "[" * 100_000])
def test_json_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match=r"index.json (can't be read as JSON|must hold a JSON dictionary)"):
        lowbit.open_checkpoint(tmp_path)


def test_folders_without_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere: there is no such folder or file"):
        lowbit.open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"has no safetensors file$"):
        lowbit.open_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin is a pickle, which could run anything: convert it"):
        lowbit.open_checkpoint(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(CheckpointError, match=r"; model.gguf is a GGUF file: name it instead of the folder"):
        lowbit.open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"/model.gguf is no .* it is a GGUF file, which lowbit.from_gguf loads"):
        lowbit.open_checkpoint(tmp_path / "model.gguf")


@pytest.mark.parametrize("damaged", [INDEX, "model-00002-*"])
def test_damaged_files(model: Block, tmp_path: Path, damaged: str) -> None:
    """A file with other bytes is a CheckpointError that leaves the model alone, or gives a model."""
    lowbit.save_checkpoint(model, tmp_path, 3000)
    (file,) = tmp_path.glob(damaged)
    chance, whole, refused = random.Random(0), file.read_bytes(), 0
    for number in range(80):
        data = bytearray(whole)
        for _ in range(chance.randint(1, 3)):
            data[chance.randrange(len(data))] = chance.choice((0, 34, 44, 46, 47, 255, chance.randrange(256)))
        if number % 4 == 0:
            del data[chance.randrange(len(data)) :]
        file.write_bytes(data)
        loaded = on_meta()
        try:
            lowbit.load_checkpoint(loaded, tmp_path)
        except CheckpointError:
            assert all(t.is_meta for t in loaded.state_dict().values())
            refused += 1
        else:
            assert loaded(TOKENS).shape == (2, 6, 40)
    assert refused > 20


def test_a_later_version(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / SINGLE, {"lowbit": "2"})
    with pytest.raises(CheckpointError, match="has version '2', this reads 1; update lowbit"):
        lowbit.open_checkpoint(tmp_path)


def test_unknown_methods(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "gptq-4", tmp_path, dirs_exist_ok=True)
    for method in ("quip", None, 3, ["gptq"]):
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": method}}))
        with pytest.raises(CheckpointError, match=r"config.json: quant_method=.* can't be imported.*; what can is "):
            lowbit.open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", [*FILES, "config.json"])
def test_descriptions_that_are_damaged(name: str, tmp_path: Path) -> None:
    """Whatever stands in a description is an error that names a file, or describes nothing."""
    shutil.copy(FIXTURES / "gptq-4" / SINGLE, tmp_path)
    chance, parts = random.Random(0), ({}, [], 3, None, "x", {"quant_method": []}, {"quantization_config": {"a": 1}})
    keys = ("quantization", "quantization_config", "text_config", "quant_method", "w_bit", "bits", "compression_config")
    for _ in range(200):
        written = {chance.choice(keys): chance.choice(parts) for _ in range(3)}
        (tmp_path / name).write_text(json.dumps(written))
        try:
            lowbit.open_checkpoint(tmp_path)
        except CheckpointError as error:
            assert str(error).startswith(str(tmp_path))
    deep = "{}"
    for _ in range(900):
        deep = f'{{"a": {deep}}}'
    (tmp_path / name).write_text(deep)
    if name == "config.json":
        assert lowbit.open_checkpoint(tmp_path).modules == ()
