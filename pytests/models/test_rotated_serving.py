"""Layers with rotated and scaled inputs in vLLM and SGLang, by small fakes of their classes: as `load_checkpoint` makes
them, in one process and in several."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import lowbit
from lowbit import CheckpointError, LowbitConfig, LowbitLinear, PackError, QuantConfig, SpecError
from lowbit.pylib.checkpoints.checkpoint import open_checkpoint
from lowbit.pylib.checkpoints.layers import layer_of
from lowbit.pylib.checkpoints.transforms import Rotations
from lowbit.pylib.integrations.serving.names import Names, Place
from lowbit.pylib.integrations.serving.rows import Rows, Source
from lowbit.pylib.integrations.serving.startup import Startup
from lowbit.pylib.layer.hadamard import HadamardMatrix
from lowbit.pylib.nn.rotated import Beside, ColumnScaling, HadamardRotation, MatrixRotation, RotatedLinear, Rotation

pytest.importorskip("transformers")

from pytests.models import fake_sglang, fake_vllm
from pytests.models.test_modelopt_awq import entries, layer
from pytests.models.test_rotated import DOWN, FIXTURES, NAMES, UP, Q, loaded

U4 = QuantConfig("u4", 32, clip="max")
PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
SIGNS = torch.where(torch.arange(64) % 3 == 0, -1, 1).to(torch.bfloat16)


@pytest.fixture
def methods() -> Iterator[Any]:
    with fake_vllm.installed() as found:
        yield found


def turns(kind: str, size: int = 64) -> tuple[Rotation, ...]:
    """Returns rotations of blocks of so many columns."""
    torch.manual_seed(1)
    made: dict[str, tuple[Rotation, ...]] = {
        "none": (),
        "hadamard": (HadamardRotation(HadamardMatrix(power=size)),),
        "signs": (HadamardRotation(HadamardMatrix(power=size, signs="before"), SIGNS[:size].clone()),),
        "matrix": (MatrixRotation(torch.linalg.qr(torch.randn(size, size))[0].contiguous()),),
        "scale": (ColumnScaling(torch.rand(size).bfloat16() + 0.5),),
    }
    return made[kind]


def rotated(
    n: int, k: int, inputs: Sequence[Rotation] = (), outputs: Sequence[Rotation] = (), bias: bool = False
) -> RotatedLinear:
    """Returns a layer with a random weight."""
    linear = nn.Linear(k, n, bias).bfloat16()
    return RotatedLinear.from_packed(LowbitLinear.from_linear(linear, U4).packed, inputs, outputs)


def saved(folder: Path, layers: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Saves layers by their names in a block."""
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict(layers)])})
    lowbit.save_checkpoint(model, folder)
    return layers


def tensors_for(folder: Path, modules: Sequence[str]) -> tuple[dict[str, Tensor], Tensor | None]:
    """Returns the tensors of a layer as vLLM's loader passes them, and its bias."""
    checkpoint = open_checkpoint(folder)
    names = Names(checkpoint)
    names.taken = {module: Place("layer", part) for part, module in enumerate(modules)}
    inside = tuple(f"{module}." for module in modules)
    found = {name: checkpoint.tensors[name] for name in checkpoint.tensors if name.startswith(inside)}
    given = {new.rpartition(".")[2]: old for old, new in names.renamed().items() if old in found}
    biases = [found[f"{module}.bias"] for module in modules if f"{module}.bias" in found]
    return {name: found[old] for name, old in given.items()}, torch.cat(biases) if biases else None


def served(
    methods: Any, folder: Path, modules: Sequence[str], columns: int, sizes: Sequence[int], **about: Any
) -> Any:
    """Returns a layer of vLLM's that has been loaded."""
    method = methods.SavedLinear([Source.of(open_checkpoint(folder), module) for module in modules])
    tensors, bias = tensors_for(folder, modules)
    made = fake_vllm.Linear(method, columns, sizes, bias=bias is not None, **about)
    fake_vllm.load(made, tensors, None if bias is None else bias[: sum(sizes)])
    return made


def close(y: Tensor, expected: Tensor, most: float = 0.01) -> bool:
    return float((y.float() - expected.float()).norm() / expected.float().norm()) < most


# -- files of compressed-tensors, and lowbit's own of the same layers


@torch.no_grad()
@pytest.mark.parametrize("ours", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_layers_are_those_of_load_checkpoint(name: str, ours: bool, methods: Any, tmp_path: Path) -> None:
    folder = FIXTURES / name
    model = loaded(folder)
    if ours:
        lowbit.save_checkpoint(model, folder := tmp_path)
    expected = load_file(FIXTURES / name / "expected.safetensors")
    for module in (Q, UP, DOWN):
        wanted: Any = model.get_submodule(module)
        layer = served(methods, folder, [module], wanted.in_features, [wanted.out_features])
        x = expected[f"{module}.x"].bfloat16()
        like = wanted.to_linear(torch.float32)(x.float())
        assert close(layer(x), like, 3e-2)
        assert type(layer.lowbit.linears[0]) is type(wanted)
        assert close(layer.quant_method.dequantize_weight(layer), wanted.weight, 3e-2)


# -- layers that are made of several


@torch.no_grad()
@pytest.mark.parametrize(
    ("kinds", "outputs", "count"),
    [
        (("hadamard", "hadamard", "hadamard"), (), 1),
        (("signs", "signs", "signs"), ("hadamard", "none", "hadamard"), 1),
        (("scale", "hadamard", "none"), (), 3),
        (("none", "none", "scale"), (), 2),
    ],
)
@pytest.mark.parametrize("bias", [False, True])
def test_parts_with_one_rotation_are_one_matmul(
    kinds: Sequence[str], outputs: Sequence[str], count: int, bias: bool, methods: Any, tmp_path: Path
) -> None:
    """Parts that are rotated in other ways are multiplied apart; all of them give what the layers give."""
    behind = [turns(kind, 32) for kind in outputs] or [()] * 3
    layers: dict[str, nn.Module] = {
        name: rotated(n, 64, turns(kind), out, bias)
        for name, n, kind, out in zip(PACKED["qkv_proj"], (64, 32, 32), kinds, behind)
    }
    saved(tmp_path, layers)
    modules = [f"layers.0.{name}" for name in layers]
    made, x = served(methods, tmp_path, modules, 64, (64, 32, 32)), torch.randn(3, 64).bfloat16()
    assert len(made.lowbit.linears) == count
    expected = torch.cat([module(x) for module in layers.values()], -1)
    assert torch.equal(made(x), expected)
    weights = torch.cat([module.dequantize() for module in layers.values()])  # type: ignore[operator]
    assert torch.equal(made.quant_method.dequantize_weight(made), weights)


@torch.no_grad()
def test_a_bias_that_the_server_adds_is_rotated() -> None:
    torch.manual_seed(0)
    one, two = rotated(64, 64, (), turns("hadamard", 32)), rotated(32, 64, (), turns("signs", 32))
    rows, bias, x = Rows([one, two]), torch.randn(96).bfloat16(), torch.randn(2, 64).bfloat16()
    assert close(rows.plus(rows(x), bias), rows.with_bias(bias)(x))
    assert not close(rows(x) + bias, rows.with_bias(bias)(x), 0.1)
    with pytest.raises(SpecError, match="what comes out of this layer is rotated with its bias, which the model adds"):
        rows.check_adds(skips=True)
    rows.check_adds(skips=False)
    Rows([rotated(32, 64, turns("hadamard"))]).check_adds(skips=True)


# -- several processes


@torch.no_grad()
@pytest.mark.parametrize(("kind", "size"), [("hadamard", 32), ("signs", 64), ("matrix", 64), ("scale", 64)])
@pytest.mark.parametrize("processes", [2, 4])
def test_columns_of_processes(kind: str, size: int, processes: int, methods: Any, tmp_path: Path) -> None:
    """A process rotates its own columns, where these are whole blocks of the rotation; scales are cut anywhere."""
    blocks = {"layers.0.o_proj": rotated(32, 256, turns(kind, size), bias=True)}
    whole = blocks["layers.0.o_proj"]
    saved(tmp_path, {"o_proj": whole})
    x, columns, parts = torch.randn(3, 256).bfloat16(), 256 // processes, list[Tensor]()
    for rank in range(processes):
        about = {"tp_rank": rank, "tp_size": processes, "columns_here": columns}
        part = served(methods, tmp_path, list(blocks), 256, [32], **about)
        parts.append(part(x[:, rank * columns :][:, :columns].contiguous()).float())
    assert close(sum(parts), whole(x))  # type: ignore[arg-type]


@torch.no_grad()
def test_scales_are_cut_with_columns(methods: Any, tmp_path: Path) -> None:
    whole = rotated(32, 128, (ColumnScaling(torch.rand(128) + 0.5),))
    saved(tmp_path, {"o_proj": whole})
    x, sums = torch.randn(3, 128).bfloat16(), torch.zeros(3, 32)
    for rank in range(2):
        about = {"tp_rank": rank, "tp_size": 2, "columns_here": 64}
        part = served(methods, tmp_path, ["layers.0.o_proj"], 128, [32], **about)
        (scaling,) = part.lowbit.linears[0].input_rotations
        assert torch.equal(scaling.scale, whole.input_rotations[0].scale[64 * rank :][:64])  # type: ignore[index]
        sums += part(x[:, 64 * rank :][:, :64].contiguous()).float()
    assert close(sums, whole(x))


@pytest.mark.parametrize("ours", [False, True])
def test_a_rotation_of_all_columns_can_not_be_cut(ours: bool, methods: Any, tmp_path: Path) -> None:
    folder = FIXTURES / "rotated-hadamard"
    if ours:
        lowbit.save_checkpoint(loaded(folder), folder := tmp_path)
    about = {"tp_rank": 1, "tp_size": 2, "columns_here": 64}
    message = f"{DOWN}: a rotation mixes blocks of 128 columns, and columns 64 to 127, which one of several processes"
    with pytest.raises(PackError, match=message):
        served(methods, folder, [DOWN], 128, [192], **about)


@torch.no_grad()
@pytest.mark.parametrize("processes", [2, 4])
def test_rows_of_processes(processes: int, methods: Any, tmp_path: Path) -> None:
    """Each rotates the whole input, and its own rows of the output, where these are whole blocks."""
    whole = rotated(128, 64, turns("signs"), turns("hadamard", 32))
    saved(tmp_path, {"up_proj": whole})
    x, n = torch.randn(3, 64).bfloat16(), 128 // processes
    for rank in range(processes):
        about = {"tp_rank": rank, "tp_size": processes}
        part = served(methods, tmp_path, ["layers.0.up_proj"], 64, [n], **about)
        assert torch.equal(part(x), whole(x)[:, rank * n :][:, :n])
    with pytest.raises(PackError, match="up_proj: a rotation mixes blocks of 32 columns, and columns 16 to 31"):
        served(methods, tmp_path, ["layers.0.up_proj"], 64, [16], tp_rank=1, tp_size=8)


# -- weights that come later


@torch.no_grad()
def test_other_weights_bring_their_own_scales(methods: Any, tmp_path: Path) -> None:
    folders, layers = (tmp_path / "0", tmp_path / "1"), list[nn.Module]()
    for seed, folder in enumerate(folders):
        torch.manual_seed(seed)
        layers.append(rotated(32, 64, (*turns("hadamard"), ColumnScaling(torch.rand(64) + 0.5))))
        saved(folder, {"o_proj": layers[-1]})
    made = fake_vllm.Linear(methods.SavedLinear([Source.of(open_checkpoint(folders[0]), "layers.0.o_proj")]), 64, [32])
    record, x = fake_vllm.recorded(made), torch.randn(3, 64).bfloat16()
    fake_vllm.load(made, tensors_for(folders[0], ["layers.0.o_proj"])[0])
    assert torch.equal(made(x), layers[0](x))
    scale = made.lowbit.linears[0].input_rotations[1].scale.data_ptr()
    fake_vllm.reload(made, record, tensors_for(folders[1], ["layers.0.o_proj"])[0])
    assert torch.equal(made(x), layers[1](x)) and made.lowbit.linears[0].input_rotations[1].scale.data_ptr() == scale


@torch.no_grad()
def test_other_weights_keep_the_rotation(methods: Any, tmp_path: Path) -> None:
    first = rotated(32, 64, turns("signs"))
    saved(tmp_path / "0", {"o_proj": first})
    other = HadamardRotation(HadamardMatrix(power=64, signs="before"), -SIGNS)
    saved(tmp_path / "1", {"o_proj": rotated(32, 64, (other,))})
    made = fake_vllm.Linear(
        methods.SavedLinear([Source.of(open_checkpoint(tmp_path / "0"), "layers.0.o_proj")]), 64, [32]
    )
    record, x = fake_vllm.recorded(made), torch.randn(3, 64).bfloat16()
    fake_vllm.load(made, tensors_for(tmp_path / "0", ["layers.0.o_proj"])[0])
    held = made.lowbit
    with pytest.raises(CheckpointError, match="rotated in another way than when the model was made; start the server"):
        fake_vllm.reload(made, record, tensors_for(tmp_path / "1", ["layers.0.o_proj"])[0])
    assert torch.equal(held(x), first(x))


# -- what vLLM hears


def serving_of(methods: Any, folder: Path) -> Any:
    about = json.loads((folder / "config.json").read_text())["quantization_config"]
    serving = methods.config.LowbitServing.from_config(about)
    serving.maybe_update_config(str(folder))
    serving.apply_vllm_mapper(fake_vllm.WeightsMapper())
    serving.packed_modules_mapping = PACKED
    return serving


def with_transform(folder: Path, group: dict[str, Any], **more: Tensor) -> Path:
    """Writes a checkpoint of compressed-tensors with another group of rotations, and more tensors."""
    shutil.copytree(FIXTURES / "rotated-hadamard", folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["transform_config"]["config_groups"]["R9"] = group
    (folder / "config.json").write_text(json.dumps(config))
    save_file(load_file(folder / "model.safetensors") | more, folder / "model.safetensors")
    return folder


def test_rotations_that_cancel_out_are_not_loaded(
    methods: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = [{"targets": ["re:.*self_attn$"], "location": place} for place in ("q_attn", "k_cache")]
    name = "model.layers.0.self_attn.R9_q_attn.weight"
    group = {"type": "hadamard", "head_dim": 64, "apply": both}
    serving = serving_of(methods, with_transform(tmp_path / "a", group, **{name: torch.ones(64, 64)}))
    kind = serving.get_quant_method(fake_vllm.LinearBase(), DOWN)
    monkeypatch.setattr(serving.names, "check_taken", lambda: None)
    mapper = serving.get_cache_scale_mapper()
    assert isinstance(kind, methods.SavedLinear) and mapper._map_name(name) is None
    assert mapper._map_name(f"{DOWN}.R4_input.weight") == f"{DOWN}.part0_R4_input_weight"
    assert mapper._map_name(f"{UP}.weight_packed") == f"{UP}.weight_packed"  # of a layer that nobody asked for


def test_layers_that_no_server_rotates(methods: Any, tmp_path: Path) -> None:
    """Dense layers, embeddings and experts that a configuration means are refused by their names."""
    group = {"type": "hadamard", "apply": [{"targets": ["Linear", "embed_tokens"], "location": "input"}]}
    dense = {"lm_head.weight": torch.zeros(64, 192).half(), "mlp.experts.0.w1.weight": torch.zeros(64, 192).half()}
    serving = serving_of(methods, with_transform(tmp_path / "a", group, **dense))
    for kind, name in ((fake_vllm.LinearBase, "lm_head"), (fake_vllm.VocabParallelEmbedding, "embed_tokens")):
        layer: Any = kind()
        layer.org_vocab_size, layer.embedding_dim = 64, 192
        with pytest.raises(CheckpointError, match=f"R9 of its transform_config rotates the input of {name} at each"):
            serving.get_quant_method(layer, name)
    with pytest.raises(CheckpointError, match=r"rotates the input of mlp.experts.0.w1 at each call"):
        serving.get_quant_method(fake_vllm.RoutedExperts(1, 192, 64), "mlp.experts")


# -- ModelOpt's scales


@torch.no_grad()
@pytest.mark.parametrize("algorithm", ["W4A16_AWQ", "NVFP4_AWQ"])
@pytest.mark.parametrize("processes", [1, 2])
def test_scales_of_modelopt(algorithm: str, processes: int, methods: Any, tmp_path: Path) -> None:
    tensors, weight = layer(algorithm, 64, 128, is_scaled=True)
    save_file({f"o_proj.{name}": t for name, t in tensors.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": entries(algorithm)}))
    x, columns, sums = torch.randn(3, 128).bfloat16(), 128 // processes, torch.zeros(3, 64)
    for rank in range(processes):
        about = {"tp_rank": rank, "tp_size": processes, "columns_here": columns}
        part = served(methods, tmp_path, ["o_proj"], 128, [64], **about)
        sums += part(x[:, rank * columns :][:, :columns].contiguous()).float()
    assert close(sums, x.float() @ (weight * tensors["pre_quant_scale"].float()).T, 2e-2)


# -- SGLang


@pytest.fixture
def sglang() -> Iterator[Any]:
    with fake_sglang.installed() as found:
        torch.set_default_dtype(torch.bfloat16)  # as while a model is made
        yield found
    torch.set_default_dtype(torch.float32)


def sglang_layer(config: Any, folder: Path, name: str, n: int, k: int, processes: int = 1, rank: int = 0) -> Any:
    """Returns a row-parallel layer of SGLang's that has been loaded."""
    about = json.loads((folder / "config.json").read_text())["quantization_config"]
    place = {"hf_config": SimpleNamespace(_name_or_path=str(folder)), "packed_modules_mapping": {}}
    serving = config.LowbitServing.from_config({**about, **place})
    checkpoint, made = open_checkpoint(folder), fake_sglang.LinearBase(n, k)
    made.take(serving.get_quant_method(made, name), [n], k // processes, rank, processes)
    if (bias := checkpoint.names_of(name).get("bias")) is not None:
        made.bias = nn.Parameter(checkpoint.tensors[bias].bfloat16())
    model: nn.Module = made
    for part in reversed(name.split(".")):
        model = nn.ModuleDict({part: model})
    fake_sglang.load(model, {full: checkpoint.tensors[full] for full in checkpoint.tensors if full != bias})
    return made


@torch.no_grad()
@pytest.mark.parametrize("ours", [False, True])
def test_rotated_layers_in_sglang(ours: bool, sglang: Any, tmp_path: Path) -> None:
    """The names of their tensors have dots."""
    torch.set_default_dtype(torch.float32)
    folder, model = FIXTURES / "rotated-twice", loaded(FIXTURES / "rotated-twice")
    if ours:
        lowbit.save_checkpoint(model, folder := tmp_path)
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": LowbitConfig().to_dict()}))
    x, dense = torch.randn(3, 128).bfloat16(), model.get_submodule(DOWN).to_linear(torch.float32)  # type: ignore[operator]
    assert close(sglang_layer(sglang, folder, DOWN, 192, 128)(x), dense(x.float()), 3e-2)
    with pytest.raises(PackError, match=f"{DOWN}: a rotation mixes blocks of 128 columns, and columns 64 to 127"):
        sglang_layer(sglang, folder, DOWN, 192, 128, processes=2, rank=1)


@torch.no_grad()
def test_tensors_with_dots_in_sglang(sglang: Any) -> None:
    """As those of bitsandbytes, one of which is called weight, and others weight.absmax and so on."""
    torch.set_default_dtype(torch.float32)
    source = FIXTURES.parent / "checkpoints/bnb-nf4"
    (name,) = open_checkpoint(source).modules
    weight = open_checkpoint(source).load(name, act="bf16")
    x = torch.randn(3, weight.spec.k).bfloat16()
    made = sglang_layer(sglang, source, name, weight.spec.n, weight.spec.k)
    assert close(made(x), LowbitLinear.from_packed(weight)(x))


def identity_of(*held: nn.Module) -> str:
    startup = Startup()
    for number in range(len(held)):
        startup.expect(number)
    startup.expect("a layer that is never loaded")
    for number, each in enumerate(held):
        startup.loaded(number, f"layer{number}", each)
    return startup.identity


def test_layers_that_do_something_else_have_another_identity() -> None:
    """In another order of parts, with another rotation, and in other ranges of columns; not with other numbers."""
    parts = {
        name: [LowbitLinear.from_linear(nn.Linear(64, 32).bfloat16(), QuantConfig(name, 64)) for _ in range(2)]
        for name in ("u4", "u8")
    }
    (u4, other), (u8, _) = parts.values()
    kinds = [Rows([u4, u8]), Rows([u8, u4]), Rows([u4]), Rows([u8])]
    signs = ((1, 1), (1, -1)), ((1, -1), (1, 1))
    turns = [HadamardRotation(HadamardMatrix(factor, 32)) for factor in signs]
    kinds += [Rows([layer_of(u4.packed, Rotations((turn,)))]) for turn in turns]
    beside = [Beside([(a, (HadamardRotation(HadamardMatrix(power=a)),)), (b, ())]) for a, b in ((8, 24), (16, 16))]
    kinds += [Rows([layer_of(u4.packed, Rotations((), (each,)))]) for each in beside]
    assert len({identity_of(kind) for kind in kinds}) == len(kinds)
    assert identity_of(Rows([u4])) == identity_of(Rows([other]))
    assert identity_of(Rows([u4]), Rows([u8])) != identity_of(Rows([u8]), Rows([u4]))
