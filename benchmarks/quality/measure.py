"""Quality of the small model, quantized by every method at 8 to 2 bits: `python -m benchmarks.quality.measure`.

Layers are quantized in the order in which they run. Calibrated methods see the inputs that a layer has in the quantized
model (and GPTQ those of the float model, too), on text that the model was trained on. Perplexity is that of held-out
text; so is the Kullback-Leibler divergence of the quantized model's predictions from the float model's, which still
tells methods apart where their perplexities are equal. Embeddings and norms stay as they are.
"""

from __future__ import annotations

import copy
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import lowbit
from benchmarks.quality.model import HERE, Transformer, load
from benchmarks.quality.tokenizer import Tokenizer

RESULTS = HERE.parent.parent / "docs" / "results" / "quality.json"
GROUP = 64
CALIBRATION_WINDOWS, TEST_WINDOWS = 24, 96  # of `Shape.context` tokens each
STAGES = (("attention.q", "attention.k", "attention.v"), ("attention.o",), ("ffn.gate", "ffn.up"), ("ffn.down",))
CALIBRATED = ("gptq", "awq", "signround")
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
        if bits <= 4:
            yield "SignRound", lowbit.QuantConfig(weight, GROUP, method="signround")
    for weight in FLOATS.values():
        yield "floats, RTN", lowbit.QuantConfig(weight, GROUP)
        yield "floats, GPTQ", lowbit.QuantConfig(weight, GROUP, method="gptq")
    yield "nf4, GPTQ", lowbit.QuantConfig("nf4", GROUP, method="gptq")
    for name in ("fp6_llm", "nf4", "mxfp4"):
        yield f"preset {name}", lowbit.QuantConfig.preset(name)


def windows(name: str, count: int, context: int) -> Tensor:
    """Returns the first tokens of a text beside this file: [count, context + 1]."""
    merges = json.loads((HERE / "merges.json").read_text())
    tokenizer = Tokenizer(tuple((a, b) for a, b in merges))
    tokens = torch.tensor(tokenizer.encode((HERE / name).read_text()))
    return tokens[: count * context + 1].unfold(0, context + 1, context)


@torch.no_grad()
def predictions(model: Transformer, text: Tensor) -> Tensor:
    """Returns the log-probabilities of the next token, for each token of each window but the last."""
    return torch.cat([model(part[:, :-1]).log_softmax(-1).flatten(0, 1) for part in text.split(16)])


def quality(expected: Tensor, found: Tensor, text: Tensor) -> dict[str, float]:
    """Returns the perplexity of predictions, and their mean divergence from the expected ones in nats."""
    loss = functional.nll_loss(found, text[:, 1:].flatten())
    divergence = functional.kl_div(found, expected, reduction="batchmean", log_target=True)
    return {"perplexity": round(math.exp(loss), 3), "divergence": float(f"{float(divergence):.4g}")}


@torch.no_grad()
def quantized(
    model: Transformer, config: lowbit.QuantConfig, text: Tensor, inputs: Mapping[str, Tensor]
) -> Transformer:
    """Returns the model with every linear layer replaced by its quantized and dequantized weight.

    inputs   those of each linear layer of the float model, for the same text
    """
    result = copy.deepcopy(model)
    x, rotation = result.embed(text[:, :-1]), result.rotation[: text.shape[1] - 1]
    for i, block in enumerate(result.blocks):
        for stage in STAGES:
            data = None
            if config.method in CALIBRATED:
                (given,) = layer_inputs(block, stage[:1], x, rotation).values()
                data = lowbit.Calibration(given.shape[-1])
                data.add(given, inputs[f"{i}.{stage[0]}"])
            for name in stage:
                layer = block.get_submodule(name)
                layer.weight.copy_(lowbit.quantize(layer.weight, config, data).dequantize())
        if config.method in CALIBRATED:
            x = block(x, rotation)
    return result


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


def bits_per_weight(config: lowbit.QuantConfig) -> float:
    """Returns the bits of a weight with its share of scales and zeros, for a weight that needs no padding."""
    n, k = 256, 512
    return 8 * config.spec(n, k).bytes / (n * k)


def measure(model: Transformer) -> Iterator[dict[str, Any]]:
    """Yields a record for each configuration, the float model first."""
    context = model.shape.context
    training = windows("calibration.txt", CALIBRATION_WINDOWS, context)
    test = windows("held_out.txt", TEST_WINDOWS, context)
    expected, inputs = predictions(model, test), float_inputs(model, training)
    yield {"line": "f16", "bits": 16, "bits_per_weight": 16.0, **quality(expected, expected, test)}
    for line, config in configs():
        start = time.perf_counter()
        worse = quantized(model, config, training, inputs)
        found = quality(expected, predictions(worse, test), test)
        took = time.perf_counter() - start
        print(f"{line} {config.weight}: {found} ({took:.0f} s)", file=sys.stderr, flush=True)
        yield {
            "line": line,
            "bits": config.dtype.bits,
            "bits_per_weight": round(bits_per_weight(config), 3),
            **found,
            "config": config.to_dict(),
        }


def main(file: Path = RESULTS) -> None:
    """Measure everything, and write it."""
    model = load()
    records = list(measure(model))
    about = {"group_size": GROUP, "torch": torch.__version__, "test_tokens": TEST_WINDOWS * model.shape.context}
    lines = ",\n".join(f"  {json.dumps(record)}" for record in records)
    file.write_text(f'{{"about": {json.dumps(about)},\n "records": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
