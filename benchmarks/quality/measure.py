"""Quality of the small model, quantized by every method at 8 to 2 bits: `python -m benchmarks.quality.measure`.

Layers are quantized in the order in which they run. Calibrated methods see the inputs that a layer has in the quantized
model (and GPTQ those of the float model, too), on text that the model was trained on. Perplexity is that of held-out
text; so is the Kullback-Leibler divergence of the quantized model's predictions from the float model's, which still
tells methods apart where their perplexities are equal. Embeddings and norms stay as they are.

How much higher a perplexity is than the float model's is found window by window, and comes with a 95 % interval: the
windows of the text are drawn anew, with replacement, `RESAMPLES` times (the bootstrap).
"""

from __future__ import annotations

import copy
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import lowbit
from benchmarks import record_lines
from benchmarks.quality.model import HERE, Transformer, load
from benchmarks.quality.section import Section
from benchmarks.quality.tokenizer import Tokenizer

SECTION = Section("quality", "quality")  # which `benchmarks.quality.report` writes
GROUP = 64
CALIBRATION_WINDOWS, TEST_WINDOWS = 24, 96  # of `Shape.context` tokens each
PROBES = 8  # windows on which the model is run for each layer, to see what that layer adds to the divergence
STAGES = (("attention.q", "attention.k", "attention.v"), ("attention.o",), ("ffn.gate", "ffn.up"), ("ffn.down",))
RESAMPLES = 4000
SPQR: Any = {"weight": "u3", "group_size": 16, "method": "spqr"}
PAPER: Any = {**SPQR, "clip": "max"}
K_QUANTS = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k")
FLOATS = {8: "f8e4m3", 6: "f6e3m2", 5: "f5e2m2", 4: "f4e2m1", 3: "f3e1m1"}


def configs() -> Iterator[tuple[str, lowbit.QuantConfig]]:
    """Yields what is measured: the name of a line in the plot, and a configuration."""
    for bits in range(8, 1, -1):
        weight: Any = f"u{bits}"
        yield "RTN, min/max", lowbit.QuantConfig(weight, GROUP, clip="max")
        yield "RTN", lowbit.QuantConfig(weight, GROUP)
        yield "RTN, float zeros", lowbit.QuantConfig(weight, GROUP, zeros="float", method="rtn")
        yield "HQQ", lowbit.QuantConfig(weight, GROUP, method="hqq")
        yield "AWQ", lowbit.QuantConfig(weight, GROUP, method="awq")
        yield "GPTQ", lowbit.QuantConfig(weight, GROUP, method="gptq")
        yield "GPTQ, float zeros", lowbit.QuantConfig(weight, GROUP, zeros="float", method="gptq")
        yield "GPTQ, 8 beams", lowbit.QuantConfig(weight, GROUP, method="gptq", beams=8)
        if bits <= 4:
            yield "SignRound", lowbit.QuantConfig(weight, GROUP, method="signround")
    for weight in FLOATS.values():
        yield "floats, RTN", lowbit.QuantConfig(weight, GROUP)
        yield "floats, GPTQ", lowbit.QuantConfig(weight, GROUP, method="gptq")
    yield from _spqr()
    for beams, label in ((1, ""), (8, ", 8 beams")):
        for weight in ("u4", "u3"):
            yield f"GPTQ {weight}, groups of 128{label}", lowbit.QuantConfig(weight, 128, method="gptq", beams=beams)
        yield f"GPTQ u4, per row{label}", lowbit.QuantConfig("u4", None, method="gptq", beams=beams)
        yield f"GPTQ u3, groups of 32{label}", lowbit.QuantConfig("u3", 32, method="gptq", beams=beams)
    yield "nf4, GPTQ", lowbit.QuantConfig("nf4", GROUP, method="gptq")
    for name in ("fp6_llm", "nf4", "mxfp4", *K_QUANTS, "iq4_xs"):
        yield f"preset {name}", lowbit.QuantConfig.preset(name)
    for name in K_QUANTS:
        yield f"preset {name}, GPTQ", replace(lowbit.QuantConfig.preset(name), method="gptq")


def _spqr() -> Iterator[tuple[str, lowbit.QuantConfig]]:
    """Yields SpQR as the paper has it, then with codes that are tried out, and with columns in another order."""
    for threshold in (0.2, 0.35, None):
        yield f"SpQR of the paper, {outliers(threshold)}", lowbit.QuantConfig(**PAPER, outlier_threshold=threshold)
    yield "SpQR, threshold 0.3", lowbit.QuantConfig(**SPQR, outlier_threshold=0.3)
    for threshold in (0.15, 0.25, 0.35, None):
        config = lowbit.QuantConfig(**SPQR, outlier_threshold=threshold, act_order=True)
        yield f"SpQR, act-order, {outliers(threshold)}", config


def outliers(threshold: float | None) -> str:
    """Returns the words for a threshold of outliers."""
    return "no outliers" if threshold is None else f"threshold {threshold}"


def windows(name: str, count: int, context: int) -> Tensor:
    """Returns the first tokens of a text beside this file: [count, context + 1]."""
    return windows_of((HERE / name).read_text(), count, context)


def windows_of(text: str, count: int, context: int) -> Tensor:
    """Returns the first tokens of a text: [count, context + 1]."""
    merges = json.loads((HERE / "merges.json").read_text())
    tokenizer = Tokenizer(tuple((a, b) for a, b in merges))
    tokens = torch.tensor(tokenizer.encode(text))
    return tokens[: count * context + 1].unfold(0, context + 1, context)


def texts(model: Transformer) -> tuple[Tensor, Tensor]:
    """Returns the windows on which a model is calibrated, and those by which it is judged."""
    parts = ("calibration.txt", CALIBRATION_WINDOWS), ("held_out.txt", TEST_WINDOWS)
    training, test = (windows(name, count, model.shape.context) for name, count in parts)
    return training, test


def probes(training: Tensor) -> list[Tensor]:
    """Returns the inputs of the model with which `lowbit.sensitivity` looks at each layer: few of the windows."""
    return [window[None, :-1] for window in training[:PROBES]]


@torch.no_grad()
def predictions(model: Transformer, text: Tensor) -> Tensor:
    """Returns the log-probabilities of the next token, for each token of each window but the last."""
    return torch.cat([model(part[:, :-1]).log_softmax(-1).flatten(0, 1) for part in text.split(16)])


def quality(expected: Tensor, found: Tensor, text: Tensor) -> dict[str, Any]:
    """Returns the perplexity of predictions, by how many percent it is above that of the expected ones with half the
    width of the interval, and the mean divergence from them in nats."""
    before, after = (losses(predicted, text) for predicted in (expected, found))
    divergence = functional.kl_div(found, expected, reduction="batchmean", log_target=True)
    return {
        "perplexity": round(math.exp(after.mean()), 3),
        "above": [round(100 * number, 4) for number in interval(after - before)],
        "divergence": float(f"{float(divergence):.4g}"),
    }


def losses(found: Tensor, text: Tensor) -> Tensor:
    """Returns the mean loss of each window of a text, in f64."""
    return functional.nll_loss(found, text[:, 1:].flatten(), reduction="none").double().view(len(text), -1).mean(1)


def interval(differences: Tensor) -> tuple[float, float]:
    """Returns by which part a perplexity changes where losses change so, and half the width of its 95 % interval."""
    drawn = torch.randint(len(differences), (RESAMPLES, len(differences)), generator=torch.Generator().manual_seed(0))
    low, high = differences[drawn].mean(1).quantile(torch.tensor([0.025, 0.975]).double()).tolist()
    return math.expm1(float(differences.mean())), (high - low) / 2


@torch.no_grad()
def quantized(
    model: Transformer,
    config: lowbit.QuantConfig | Mapping[str, lowbit.QuantConfig],
    text: Tensor,
    inputs: Mapping[str, Tensor],
) -> tuple[Transformer, float]:
    """Returns the model with every linear layer replaced by its quantized and dequantized weight, and bits per weight.

    config   for all layers, or for each by its name
    inputs   those of each linear layer of the float model, for the same text
    """
    result = copy.deepcopy(model)
    configs = {name: config if isinstance(config, lowbit.QuantConfig) else config[name] for name in layer_names(model)}
    calibrated = any(each.needs_data for each in configs.values())
    bits = weights = 0.0
    x, rotation = result.embed(text[:, :-1]), result.rotation[: text.shape[1] - 1]
    for i, block in enumerate(result.blocks):
        for stage in STAGES:
            data = None
            if calibrated:
                (given,) = layer_inputs(block, stage[:1], x, rotation).values()
                data = lowbit.Calibration(given.shape[-1])
                data.add(given, inputs[f"{i}.{stage[0]}"])
            for name in stage:
                layer = block.get_submodule(name)
                found = lowbit.quantize(layer.weight, configs[f"blocks.{i}.{name}"], data)
                bits += bits_per_weight(found) * layer.weight.numel()
                weights += layer.weight.numel()
                layer.weight.copy_(found.dequantize())
        if calibrated:
            x = block(x, rotation)
    return result, bits / weights


def layer_names(model: Transformer) -> list[str]:
    """Returns the names of the linear layers."""
    return [f"blocks.{i}.{name}" for i in range(len(model.blocks)) for stage in STAGES for name in stage]


@torch.no_grad()
def float_inputs(model: Transformer, text: Tensor) -> dict[str, Tensor]:
    """Returns the input of the first layer of each stage of each block."""
    x, rotation = model.embed(text[:, :-1]), model.rotation[: text.shape[1] - 1]
    inputs: dict[str, Tensor] = {}
    for i, block in enumerate(model.blocks):
        found = layer_inputs(block, [stage[0] for stage in STAGES], x, rotation)
        inputs |= {f"{i}.{name}": given for name, given in found.items()}
        x = block(x, rotation)
    return inputs


def layer_inputs(block: nn.Module, names: Sequence[str], x: Tensor, rotation: Tensor) -> dict[str, Tensor]:
    """Returns the inputs of some layers of a block."""
    inputs: dict[str, Tensor] = {}

    def note(name: str) -> Callable[[nn.Module, tuple[Tensor]], None]:
        return lambda _, arguments: inputs.update({name: arguments[0]})

    hooks = [block.get_submodule(name).register_forward_pre_hook(note(name)) for name in names]
    block(x, rotation)
    for hook in hooks:
        hook.remove()
    return inputs


def bits_per_weight(quantized: lowbit.QuantizedWeight) -> float:
    """Returns the bits of a weight with its share of scales, zeros and outliers, for a weight that needs no padding.

    SpQR's scales and zeros count as the codes that they are, with their second level, and an outlier 32 bits.
    """
    config, outliers = quantized.config, quantized.outliers
    if config.method == "spqr":
        share = 0.0 if outliers is None else outliers.values().numel() / quantized.codes.numel()
        columns = config.group_size or quantized.shape[1]
        return config.dtype.bits + (2 * config.scale_bits + 4 * 16 / config.scale_rows) / columns + 32 * share
    n, k = 256, 512
    return 8 * config.spec(n, k).bytes / (n * k)


def measure(model: Transformer, known: Sequence[dict[str, Any]] = ()) -> Iterator[dict[str, Any]]:
    """Yields a record for each configuration, the float model first; those that are known are not measured again."""
    before = {(record["line"], _config_of(record)): record for record in known if "config" in record}
    training, test = texts(model)
    expected, inputs = predictions(model, test), float_inputs(model, training)
    yield {"line": "f16", "bits": 16, "bits_per_weight": 16.0, **quality(expected, expected, test)}
    for line, config in configs():
        if (line, config) in before:
            yield before[line, config]
            continue
        start = time.perf_counter()
        worse, bits = quantized(model, config, training, inputs)
        found = quality(expected, predictions(worse, test), test)
        took = time.perf_counter() - start
        print(f"{line} {config.weight}: {found} ({took:.0f} s)", file=sys.stderr, flush=True)
        yield {
            "line": line,
            "bits": config.dtype.bits,
            "bits_per_weight": round(bits, 3),
            **found,
            "config": config.to_dict(),
        }


def _config_of(record: Mapping[str, Any]) -> lowbit.QuantConfig:
    return lowbit.QuantConfig.from_dict(record["config"])


def main(file: Path = SECTION.file) -> None:
    """Measure what the file does not have yet, and write it after each record; without a file, everything."""
    model, records = load(), list[dict[str, Any]]()
    known = json.loads(file.read_text())["records"] if file.exists() else []
    wanted = list(configs())
    known = [record for record in known if "config" in record and (record["line"], _config_of(record)) in wanted]
    about = {"group_size": GROUP, "torch": torch.__version__, "test_tokens": TEST_WINDOWS * model.shape.context}
    for record in measure(model, known):
        records.append(record)
        record_lines.write(file, {"about": about, "records": [*records, *_later(records, known)]})


def _later(records: Sequence[dict[str, Any]], known: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the known records that are not among those yet, so that no interruption loses them."""
    return [record for record in known if record.get("config") not in [each.get("config") for each in records]]


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
