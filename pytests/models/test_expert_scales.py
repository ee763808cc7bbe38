"""Experts whose inputs are multiplied by numbers at each call, as ModelOpt's AWQ and SmoothQuant leave them: in
transformers, in lowbit's own files, and in servers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import lowbit
from lowbit import CheckpointError, LowbitConfig, LowbitExperts, SpecError
from lowbit.pylib.checkpoints.checkpoint import open_checkpoint
from lowbit.pylib.integrations.serving.expert_sources import ExpertShare, source_of_experts
from lowbit.pylib.integrations.serving.experts import GATES
from lowbit.pylib.nn.dense_experts import is_linear_in_up
from lowbit.pylib.nn.rotated import ColumnScaling

transformers = pytest.importorskip("transformers")

from pytests.models import fake_sglang, fake_vllm  # noqa: E402
from pytests.models.test_modelopt_awq import entries, layer  # noqa: E402
from pytests.models.test_vllm import by_experts, load_experts  # noqa: E402

HIDDEN, INNER, COUNT = 64, 96, 3
EXPERTS = "model.layers.0.block_sparse_moe.experts"
SIZES = {"hidden_size": HIDDEN, "intermediate_size": INNER, "vocab_size": 64, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_local_experts": COUNT, "num_experts_per_tok": 2}
ALGORITHMS = ("W4A16_AWQ", "NVFP4_AWQ")
SCALED = "pre_quant_scale"


def written(folder: Path, algorithm: str, change: Mapping[str, Tensor | None] | None = None) -> list[list[Tensor]]:
    """Writes a small Mixtral whose experts are ModelOpt's; returns w1, w3 and w2 of each for inputs as they are.

    change   tensors of experts that are others, or gone
    """
    about = transformers.MixtralConfig(**SIZES, **HEADS, dtype="bfloat16")
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(about).save_pretrained(folder)
    state = {key: t for key, t in load_file(folder / "model.safetensors").items() if ".experts." not in key}
    tokens = torch.rand(HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16() + 0.5
    dense: list[list[Tensor]] = []
    for number in range(COUNT):
        dense.append([])
        for seed, part in enumerate(("w1", "w3", "w2")):
            n, k = (HIDDEN, INNER) if part == "w2" else (INNER, HIDDEN)
            tensors, weight = layer(algorithm, n, k, is_scaled=True, seed=3 * number + seed)
            tensors |= {} if part == "w2" else {SCALED: tokens}
            state |= {f"{EXPERTS}.{number}.{part}.{short}": t for short, t in tensors.items()}
            dense[-1].append(weight * tensors[SCALED].float())
    for name, t in (change or {}).items():
        state.pop(f"{EXPERTS}.{name}", None)
        state |= {} if t is None else {f"{EXPERTS}.{name}": t}
    save_file({key: t.clone() for key, t in state.items()}, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": entries(algorithm)}
    (folder / "config.json").write_text(json.dumps(config))
    return dense


def empty() -> Any:
    config = transformers.MixtralConfig(**SIZES, **HEADS)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def imported(folder: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)


OURS = LowbitConfig(from_checkpoint=True)


def experts_of(model: Any) -> Any:
    (found,) = [module for module in model.modules() if isinstance(module, LowbitExperts)]
    return found


def chosen() -> tuple[Tensor, Tensor, Tensor]:
    """Returns x, and the weights and numbers of two experts of each token."""
    torch.manual_seed(5)
    return torch.randn(6, HIDDEN).bfloat16(), torch.rand(6, 2), torch.randint(0, COUNT, (6, 2), dtype=torch.int32)


def close(y: Tensor, expected: Tensor) -> bool:
    return float((y.float() - expected.float()).norm() / expected.float().norm()) < 0.02


# -- transformers


@torch.no_grad()
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_loaded_and_saved(algorithm: str, tmp_path: Path) -> None:
    dense = written(tmp_path / "theirs", algorithm)
    x, weights, ids = chosen()
    expected = by_experts(dense, x, weights, ids)
    lowbit.load_checkpoint(model := empty(), tmp_path / "theirs")
    y = experts_of(model)(x, ids, weights)
    assert close(y, expected)
    other = imported(tmp_path / "theirs", quantization_config=OURS)
    assert torch.equal(experts_of(other)(x, ids, weights), y)
    other.save_pretrained(tmp_path / "ours")
    lowbit.save_checkpoint(model, tmp_path / "checkpoint")
    lowbit.load_checkpoint(again := empty(), tmp_path / "checkpoint")
    for found in (imported(tmp_path / "ours"), again):
        assert torch.equal(experts_of(found)(x, ids, weights), y)
    scale = load_file(tmp_path / "ours/model.safetensors")
    names = [name for name in scale if name.endswith("experts.input_rotations.0.scale")]
    assert len(names) == 1 and scale[names[0]].dtype is torch.bfloat16


def test_a_weight_alone_is_refused(tmp_path: Path) -> None:
    written(tmp_path / "theirs", "W4A16_AWQ")
    lowbit.load_checkpoint(model := empty(), tmp_path / "theirs")
    lowbit.save_checkpoint(model, tmp_path / "ours")
    for folder, end in (("theirs", "experts.0.w1"), ("theirs", "experts.0.w2"), ("ours", "experts.gate_up.0")):
        checkpoint = open_checkpoint(tmp_path / folder)
        (name,) = [module for module in checkpoint.modules if module.endswith(end)]
        with pytest.raises(CheckpointError, match="its inputs or outputs are rotated or scaled at each call"):
            checkpoint.load(name, "bf16")
    checkpoint.load(name.replace("gate_up", "down"))


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("1.w1", torch.full((HIDDEN,), 2.0).bfloat16(), r"inputs of .*0\.w1 and of .*1\.w1 are scaled in differen"),
        ("1.w3", None, r"inputs of .*0\.w1 and of .*1\.w3 are scaled in different ways"),
        ("1.w2", torch.ones(HIDDEN), r"w2.pre_quant_scale is float32 \[64\]; it must be floats \[96\]"),
        ("1.w2", torch.zeros(INNER), "has numbers from 0.0 to 0.0; those of 96 columns must be positive"),
    ],
)
def test_scales_that_do_not_fit(name: str, tensor: Tensor | None, message: str, tmp_path: Path) -> None:
    written(tmp_path, "W4A16_AWQ", {f"{name}.{SCALED}": tensor})
    with pytest.raises(CheckpointError, match=message):
        lowbit.load_checkpoint(empty(), tmp_path)
    with pytest.raises(CheckpointError, match=message):
        imported(tmp_path, quantization_config=OURS)


class Clamps(nn.Module):
    """Experts with a gate that is not linear in the up projection."""

    def _apply_gate(self, h: Tensor) -> Tensor:
        gate, up = h.chunk(2, -1)
        return nn.functional.silu(gate) * up.clamp(-7, 7)


def test_gates_that_are_linear() -> None:
    (dense,) = [module for name, module in empty().named_modules() if name.endswith("experts")]
    assert is_linear_in_up(dense) and not is_linear_in_up(Clamps())


# -- servers


@pytest.fixture
def methods() -> Iterator[Any]:
    with fake_vllm.installed() as found:
        yield found


def served(methods: Any, folder: Path, **about: Any) -> Any:
    """Returns experts of vLLM's that have been loaded."""
    checkpoint = open_checkpoint(folder)
    modules = [module for module in checkpoint.modules if ".experts." in module]
    made = fake_vllm.RoutedExperts(COUNT, HIDDEN, INNER, **about)
    made.take(methods.expert_methods.SavedExperts("experts", made, source_of_experts(checkpoint, modules)))
    load_experts(made, tensors_of(folder))
    return made


def tensors_of(folder: Path) -> dict[str, Tensor]:
    checkpoint = open_checkpoint(folder)
    inside = {name.partition(".experts.")[2]: name for name in checkpoint.tensors if ".experts." in name}
    return {short: checkpoint.tensors[full] for short, full in inside.items()}


@torch.no_grad()
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("processes", [1, 2])
def test_experts_in_vllm(algorithm: str, processes: int, methods: Any, tmp_path: Path) -> None:
    dense = written(tmp_path / "theirs", algorithm)
    lowbit.load_checkpoint(model := empty(), tmp_path / "theirs")
    lowbit.save_checkpoint(model, tmp_path / "ours")
    x, weights, ids = chosen()
    expected = by_experts(dense, x, weights, ids)
    for folder in (tmp_path / "theirs", tmp_path / "ours"):
        parts = [
            served(methods, folder, rank=rank, count=processes)(x, weights, ids).float() for rank in range(processes)
        ]
        assert close(sum(parts), expected)  # type: ignore[arg-type]


def test_other_scales_are_refused(methods: Any, tmp_path: Path) -> None:
    written(tmp_path, "W4A16_AWQ")
    made = served(methods, tmp_path)
    source = made.quant_method.source
    assert isinstance(source.inputs[0], ColumnScaling)
    assert source.taken(f"0.w1.{SCALED}", source.inputs[0].scale) is None
    with pytest.raises(CheckpointError, match="inputs of experts are scaled in another way than when the model was"):
        source.taken(f"0.w1.{SCALED}", source.inputs[0].scale * 2)
    given = tensors_of(tmp_path)
    tensors = {kind: torch.stack([given[f"{i}.{kind}"] for i in range(COUNT)]) for kind in source.tensors}
    with pytest.raises(SpecError, match="inputs of down are scaled, and swiglu_oai is not linear in up"):
        source.weights(tensors, ExpertShare(GATES["swigluoai_uninterleave"], "bf16", 0, 1))


@torch.no_grad()
@pytest.mark.parametrize("ours", [False, True])
def test_experts_in_sglang(ours: bool, tmp_path: Path) -> None:
    dense = written(tmp_path / "theirs", "W4A16_AWQ")
    folder = tmp_path / "theirs"
    if ours:
        lowbit.load_checkpoint(model := empty(), folder)
        lowbit.save_checkpoint(model, folder := tmp_path / "ours")
    x, weights, ids = chosen()
    checkpoint = open_checkpoint(folder)
    modules = [module for module in checkpoint.modules if ".experts." in module]
    with fake_sglang.installed() as config:
        made: Any = fake_sglang.FusedMoE(COUNT, HIDDEN, INNER)
        made.take(config.SavedExperts("experts", source_of_experts(checkpoint, modules), config.Startup()))
        parameters = dict(made.named_parameters())
        for name, tensor in tensors_of(folder).items():
            number, _, rest = name.partition(".")
            shard, _, short = rest.partition(".")
            if shard in ("w1", "w2", "w3"):
                target = parameters[f"{'w2' if shard == 'w2' else 'w13'}_{short}"]
                target.weight_loader(target, tensor, short, shard_id=shard, expert_id=int(number))
            else:
                parameters[name].weight_loader(parameters[name], tensor)
        made.quant_method.process_weights_after_loading(made)
        assert close(made(x, weights, ids), by_experts(dense, x, weights, ids))
