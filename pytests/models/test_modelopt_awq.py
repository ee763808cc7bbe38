"""ModelOpt's checkpoints of AWQ and SmoothQuant, whose layers multiply their inputs by a number for each column.

A packer and a decoder of our own write and read them after modelopt/torch/export/quant_utils.py.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import lowbit
from lowbit import CheckpointError, LowbitConfig, LowbitLinear, SpecError
from lowbit.pylib.checkpoints.checkpoint import open_checkpoint
from lowbit.pylib.checkpoints.registry import import_experts, import_rows
from lowbit.pylib.nn.rotated import ColumnScaling, RotatedLinear

transformers = pytest.importorskip("transformers")

GROUP = {"W4A16_AWQ": 32, "W4A8_AWQ": 32, "NVFP4_AWQ": 16}
SMOOTH = "W8A8_SQ_PER_CHANNEL"
ALGORITHMS = (*GROUP, SMOOTH)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
HIDDEN, INNER = 64, 96
LAYER = "model.layers.0"
UP, DOWN, O = f"{LAYER}.mlp.up_proj", f"{LAYER}.mlp.down_proj", f"{LAYER}.self_attn.o_proj"
SIZES = {UP: (INNER, HIDDEN), DOWN: (HIDDEN, INNER), O: (HIDDEN, HIDDEN)}
SCALED = {DOWN, O}
"""Layers with a pre_quant_scale: that of UP is merged into the norm in front, as `fuse_prequant_layernorm` does it."""


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def layer(algorithm: str, n: int, k: int, is_scaled: bool = True, seed: int = 0) -> tuple[dict[str, Tensor], Tensor]:
    """Returns the tensors of a layer, and the weight [n, k] in f32 between its scales."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (n, k), generator=generator)
    given: dict[str, Tensor] = {"input_scale": torch.tensor(0.1)} if algorithm != "W4A16_AWQ" else {}
    if is_scaled:
        given["pre_quant_scale"] = (torch.rand(k, generator=generator) * 3 + 0.1).bfloat16()
    if algorithm == SMOOTH:
        numbers = torch.randint(-127, 128, (n, k), generator=generator)
        of_rows = torch.rand(n, generator=generator) / 1024
        return given | {"weight": numbers.to(torch.int8), "weight_scale": of_rows}, numbers * of_rows[:, None]
    scales = (torch.rand(n, k // GROUP[algorithm], generator=generator) + 0.5) / 64
    each = scales.repeat_interleave(GROUP[algorithm], 1)
    if algorithm == "NVFP4_AWQ":
        factor, small = torch.tensor(2.0**-9), (scales * 2**9).to(torch.float8_e4m3fn)
        rows = [[row[j] | row[j + 1] << 4 for j in range(0, k, 2)] for row in codes.tolist()]
        values = torch.tensor([*E2M1, *(-value for value in E2M1)])[codes]
        expected = values * (small.float() * factor).repeat_interleave(16, 1)
        given |= {"weight_scale": small, "weight_scale_2": factor}
    else:
        table = codes.tolist()
        rows = [[low | high << 4 for low, high in zip(table[i], table[i + 1])] for i in range(0, n, 2)]
        expected = torch.where(codes > 7, codes - 16, codes) * each
        given |= {"weight_scale": scales} | ({"weight_scale_2": torch.tensor(0.01)} if algorithm == "W4A8_AWQ" else {})
    return given | {"weight": torch.tensor(rows, dtype=torch.uint8)}, expected


def entries(algorithm: str) -> dict[str, Any]:
    about: dict[str, Any] = {"quant_algo": algorithm, "pre_quant_scale": True}
    about |= {"group_size": GROUP[algorithm]} if algorithm in GROUP else {}
    return {"quant_method": "modelopt", **about}


def llama(algorithm: str, folder: Path, config: dict[str, Any] | None = None) -> tuple[Path, dict[str, Tensor]]:
    """Writes a small Llama, three layers of which are ModelOpt's; returns their weights for inputs as they are."""
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INNER, "vocab_size": 64, "num_hidden_layers": 1}
    about = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4, dtype="bfloat16")
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(about).save_pretrained(folder)
    state = {key: t for key, t in load_file(folder / "model.safetensors").items() if not key.startswith(tuple(SIZES))}
    dense: dict[str, Tensor] = {}
    for seed, (name, (n, k)) in enumerate(SIZES.items()):
        tensors, weight = layer(algorithm, n, k, name in SCALED, seed)
        state |= {f"{name}.{short}": t for short, t in tensors.items()}
        dense[name] = weight * tensors.get("pre_quant_scale", torch.ones(k))
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    written = json.loads((folder / "config.json").read_text())
    written["quantization_config"] = config or entries(algorithm)
    (folder / "config.json").write_text(json.dumps(written))
    return folder, dense


def loaded(path: Path, **arguments: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path, **arguments)


def imported(path: Path) -> Any:
    return loaded(path, quantization_config=LowbitConfig(from_checkpoint=True))


def empty(path: Path) -> Any:
    """Returns a dense model of the same sizes."""
    about = json.loads((path / "config.json").read_text())
    config = transformers.LlamaConfig(**{key: v for key, v in about.items() if key != "quantization_config"})
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(torch.randint(3, 64, (2, 6), generator=torch.Generator().manual_seed(0))).logits


# -- values


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_values_are_those_of_a_decoder_of_our_own(algorithm: str) -> None:
    given, expected = layer(algorithm, 48, 64, is_scaled=False)
    found = lowbit.import_weight(entries(algorithm), given, act="bf16")
    spec = {"NVFP4_AWQ": "f4e2m1[48, 64]", SMOOTH: "i8[48, 64] f32 scale per row"}
    assert str(found.spec).startswith(spec.get(algorithm, "i4[48, 64] f32 scale per 32"))
    assert torch.equal(found.dequantize().bfloat16(), expected.bfloat16())
    assert algorithm == "NVFP4_AWQ" or torch.equal(found.dequantize(), expected)


def test_the_second_scale_of_int4_multiplies_nothing() -> None:
    """It is the one by which a kernel rounds weights to FP8, which divides by it and multiplies by it again."""
    given, expected = layer("W4A8_AWQ", 48, 64, is_scaled=False)
    other = given | {"weight_scale_2": torch.tensor(0.5)}
    assert torch.equal(lowbit.import_weight(entries("W4A8_AWQ"), other).dequantize(), expected)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_layers_scale_their_inputs(algorithm: str, tmp_path: Path) -> None:
    """y is that of the weight for inputs that are multiplied in bf16, to the bit."""
    path, dense = llama(algorithm, tmp_path)
    model = empty(path)
    checkpoint = lowbit.load_checkpoint(model, path)
    for name, (_, k) in SIZES.items():
        module, x = model.get_submodule(name), torch.randn(5, k).bfloat16()
        assert type(module) is (RotatedLinear if name in SCALED else LowbitLinear)
        tensors = {short: checkpoint.tensors[full] for short, full in checkpoint.names_of(name).items()}
        alone = LowbitLinear.from_packed(lowbit.import_weight(checkpoint.quantization_config, tensors, "bf16"))
        scaled = x * checkpoint.tensors[f"{name}.pre_quant_scale"] if name in SCALED else x
        assert torch.equal(module(x), alone(scaled))
        torch.testing.assert_close(module.weight.float(), dense[name], rtol=2**-7, atol=0)
        exact = x.double() @ dense[name].double().T
        assert float((module(x).double() - exact).norm() / exact.norm()) < 1e-2
        assert torch.equal(module.to_linear().weight, module.weight)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_whole_models(algorithm: str, tmp_path: Path) -> None:
    path, dense = llama(algorithm, tmp_path / "theirs")
    model = imported(path)
    assert {name for name, module in model.named_modules() if isinstance(module, RotatedLinear)} == SCALED
    given = logits(model)
    reference = copy.deepcopy(model)
    for name, weight in dense.items():
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=torch.bfloat16)
        linear.weight.data = weight.bfloat16()
        reference.set_submodule(name, linear)
    expected = logits(reference).float()
    assert float((given.float() - expected).norm() / expected.norm()) < 3e-2
    for form in ("theirs", "ours", "checkpoint"):
        again = empty(path)
        lowbit.load_checkpoint(again, tmp_path / form) if form != "ours" else model.save_pretrained(tmp_path / form)
        again = again if form != "ours" else loaded(tmp_path / form)
        assert torch.equal(logits(again), given)
        if form == "ours":
            lowbit.save_checkpoint(model, tmp_path / "checkpoint")
    for saved in (tmp_path / "ours", tmp_path / "checkpoint"):
        state = load_file(saved / "model.safetensors")
        scale = load_file(path / "model.safetensors")[f"{DOWN}.pre_quant_scale"]
        assert torch.equal(state[f"{DOWN}.input_rotations.0.scale"], scale)


def test_other_places_of_the_configuration(tmp_path: Path) -> None:
    """hf_quant_config.json says it as well, and MIXED_PRECISION by layer."""
    whole = {key: v for key, v in entries("W4A16_AWQ").items() if key != "quant_method"}
    per_layer = {name: dict(whole) for name in SIZES}
    mixed = {"quant_algo": "MIXED_PRECISION", "quantized_layers": per_layer, "exclude_modules": ["lm_head"]}
    path, _ = llama("W4A16_AWQ", tmp_path, {"quant_method": "modelopt", **mixed})
    given = logits(imported(path))
    about = json.loads((path / "config.json").read_text())
    del about["quantization_config"]
    (path / "config.json").write_text(json.dumps(about))
    for quantization in (mixed, mixed | {"quantized_layers": None}, whole | {"has_zero_point": False}):
        (path / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
        assert torch.equal(logits(imported(path)), given)
    per_layer[DOWN]["group_size"] = 48
    (path / "hf_quant_config.json").write_text(json.dumps({"quantization": mixed}))
    with pytest.raises(CheckpointError, match=rf"{DOWN}.* does not fit a weight of 64 x 96 with group_size=48"):
        imported(path)


# -- the scaling


def test_scaling_rounds_once_and_stays_as_it_is() -> None:
    scale = torch.tensor([0.3, 1.7, 2.5]).bfloat16()
    module, x = ColumnScaling(scale), torch.randn(4, 6)
    for kind in (torch.float16, torch.bfloat16):
        given = x.to(kind)
        exact = (given.double() * scale.double().repeat(2)).to(kind)
        assert torch.equal(module(given), exact) and module(given).dtype is kind
        assert torch.equal(module(given[:0]), given[:0])
    assert copy.deepcopy(module).half().scale.dtype is torch.bfloat16
    assert module.is_by_row("sm_90a") and module.is_by_row("x86-64-v4")
    with pytest.raises(SpecError, match=r"x is \[4, 5\]; its last dim must be a multiple of the rotation's 3 columns"):
        module(x[:, :5])


def test_rows_are_independent_of_others(tmp_path: Path) -> None:
    path, _ = llama("W4A16_AWQ", tmp_path)
    model = empty(path)
    lowbit.load_checkpoint(model, path)
    x = torch.randn(7, INNER).bfloat16()
    with lowbit.batch_invariant():
        module = model.get_submodule(DOWN)
        assert torch.equal(module(x)[3:4], module(x[3:4]))


# -- what is refused


@pytest.mark.parametrize(
    ("algorithm", "name", "tensor", "message"),
    [
        ("W4A16_AWQ", "pre_quant_scale", torch.ones(95), r"scale is float32 \[95\]; it must be floats \[96\]"),
        ("NVFP4_AWQ", "pre_quant_scale", torch.ones(1, 96), r"scale is float32 \[1, 96\]; it must be floats \[96\]"),
        ("W4A16_AWQ", "pre_quant_scale", torch.ones(96).int(), r"scale is int32 \[96\]; it must be floats \[96\]"),
        ("W4A16_AWQ", "pre_quant_scale", torch.zeros(96), "numbers from 0.0 to 0.0; those of 96 columns must be"),
        ("W4A16_AWQ", "pre_quant_scale", torch.full((96,), torch.inf), "numbers from inf to inf; those of 96 columns"),
        ("W4A16_AWQ", "weight", torch.zeros(64, 48).byte(), r"scale \[64, 3\] does not fit a weight of 128 x 48"),
        ("W4A16_AWQ", "weight", torch.zeros(32, 97).byte(), r"scale \[64, 3\] does not fit a weight of 64 x 97"),
        ("W4A16_AWQ", "weight", torch.zeros(0, 96).byte(), "weight is empty"),
        ("W4A8_AWQ", "weight", torch.zeros(32, 96).int(), "weight must be float8_e4m3fn or uint8 or int8 with 2 dim"),
        ("W4A8_AWQ", "weight", torch.zeros(32, 96).char(), r"scales \[64, 3\] don't fit a weight of 32 x 96"),
        ("W4A8_AWQ", "weight_scale", torch.ones(64, 6), r"weight_scale \[64, 6\] does not fit .* with group_size=32"),
        ("W4A8_AWQ", "weight_scale", torch.ones(64), "weight_scale must be .* with 2 dimensions, not torch.float32"),
        ("W4A16_AWQ", "weight_scale", torch.ones(64, 3).int(), "weight_scale must be float16 or bfloat16 or float32"),
        ("NVFP4_AWQ", "weight_scale", torch.ones(64, 6), "weight_scale must be float8_e4m3fn with 2 dimensions"),
        ("NVFP4_AWQ", "weight_scale_2", torch.zeros(()), "weight_scale_2=.0.0. must be one positive number"),
        ("NVFP4_AWQ", "svdquant_lora_a", torch.ones(4, 96), "svdquant_lora_a is no tensor of such a layer"),
    ],
)
def test_tensors_that_do_not_fit(algorithm: str, name: str, tensor: Tensor, message: str, tmp_path: Path) -> None:
    path, _ = llama(algorithm, tmp_path)
    state = load_file(path / "model.safetensors") | {f"{DOWN}.{name}": tensor}
    save_file(state, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"model.safetensors: {DOWN}: .*{message}"):
        lowbit.load_checkpoint(empty(path), path)
    with pytest.raises(CheckpointError, match=message):
        imported(path)


def test_a_weight_alone_is_refused(tmp_path: Path) -> None:
    given, _ = layer("W4A16_AWQ", 48, 64)
    for read in (
        lambda: lowbit.import_weight(entries("W4A16_AWQ"), given),
        lambda: import_rows(entries("W4A16_AWQ"), [given, given]),
        lambda: import_experts(entries("W4A16_AWQ"), {name: t[None] for name, t in given.items()}),
    ):
        with pytest.raises(CheckpointError, match="pre_quant_scale is there: inputs are scaled at each call, which"):
            read()
    checkpoint = open_checkpoint(llama("W4A16_AWQ", tmp_path)[0])
    checkpoint.load(UP)
    with pytest.raises(CheckpointError, match=f"{DOWN}: its inputs or outputs are rotated or scaled at each call"):
        checkpoint.load(DOWN)
    for read in (lambda: checkpoint.load_rows([UP, DOWN]), lambda: checkpoint.load_experts(DOWN)):
        with pytest.raises(CheckpointError, match=f"{DOWN}.pre_quant_scale multiplies what goes into a layer at each"):
            read()


def test_a_dense_layer_whose_inputs_are_scaled_is_refused(tmp_path: Path) -> None:
    path, _ = llama("W4A16_AWQ", tmp_path)
    state = load_file(path / "model.safetensors") | {"lm_head.pre_quant_scale": torch.ones(HIDDEN)}
    save_file(state, path / "model.safetensors", {"format": "pt"})
    message = "lm_head.pre_quant_scale multiplies inputs of a layer that is not quantized"
    with pytest.raises(CheckpointError, match=message):
        lowbit.load_checkpoint(empty(path), path)
    with pytest.raises(CheckpointError, match=message):
        imported(path)
