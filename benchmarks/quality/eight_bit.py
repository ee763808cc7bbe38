"""What activations of 8 bits, and scales folded into weights, cost the small model:
`python -m benchmarks.quality.eight_bit`.

Layers are quantized in groups of 128. What is multiplied is the definition of docs/eight-bit.md, with sums in f32:
kernels for many tokens give the same, but for what tensor cores drop of sums.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import lowbit
from benchmarks.quality.measure import float_inputs, layer_names, predictions, quality, texts
from benchmarks.quality.model import Transformer, load
from benchmarks.quality.section import Record, Section
from benchmarks.tables import markdown
from lowbit.pylib.runtime.activation import quantize_rows

SECTION = Section("eight_bit_quality", "quality", page="eight-bit.md")
GROUP = 128
WEIGHTS = ("u4", "i4", "u3")
PRODUCTS: dict[str, dict[str, Any]] = {
    "f16": {},
    "i8": {"compute": "i8"},
    "f8e4m3": {"compute": "f8e4m3"},
    "f8e4m3, folded": {"compute": "f8e4m3", "fold_scales": True},
    "i8, folded": {"compute": "i8", "fold_scales": True},
}


class Layer(nn.Module):
    """A linear layer whose inputs are quantized to 8 bits as `lowbit.quantize_activation` does it."""

    def __init__(self, weight: lowbit.PackedWeight) -> None:
        super().__init__()
        self.compute, self.weight = weight.spec.compute, weight.folded()

    def forward(self, x: Tensor) -> Tensor:
        if self.compute is None:
            return x @ self.weight.T
        values, scales = quantize_rows(x.half(), self.compute)
        return (values.float() @ self.weight.T) * scales[..., None]


@torch.no_grad()
def quantized(model: Transformer, config: lowbit.QuantConfig) -> tuple[Transformer, dict[str, Layer]]:
    """Returns the model with layers of 8-bit products, and these by name."""
    result, layers = copy.deepcopy(model), dict[str, Layer]()
    for name in layer_names(model):
        parent, _, own = name.rpartition(".")
        found = lowbit.quantize(model.get_submodule(name).get_parameter("weight"), config)
        layers[name] = Layer(found.pack())
        setattr(result.get_submodule(parent), own, layers[name])
    return result, layers


def layer_error(found: dict[str, Layer], usual: dict[str, Layer], inputs: dict[str, Tensor]) -> float:
    """Returns how far outputs of layers are from those with inputs as they are, in the mean of the relative errors."""
    errors = []
    for name, layer in found.items():
        x = inputs.get(name.removeprefix("blocks."))
        if x is not None:
            y = usual[name](x)
            errors.append(float((layer(x) - y).norm() / y.norm()))
    return sum(errors) / len(errors)


def measure() -> Iterator[Record]:
    """Yields a record for each format and type of products."""
    model = load()
    training, test = texts(model)
    expected, inputs = predictions(model, test), float_inputs(model, training)
    for weight in WEIGHTS:
        usual: dict[str, Layer] = {}
        for products, choices in PRODUCTS.items():
            worse, layers = quantized(model, lowbit.QuantConfig(weight, GROUP, method="rtn", **choices))
            usual = usual or layers
            found = quality(expected, predictions(worse, test), test)
            yield {"weight": weight, "products": products, "error": layer_error(layers, usual, inputs), **found}


def table(records: list[Record]) -> str:
    """Returns the page's table."""
    rows = [
        [
            record["weight"],
            record["products"],
            f"{100 * record['error']:.1f} %",
            f"{record['perplexity']:.3f}",
            "{:+.2f} ± {:.2f} %".format(*record["above"]),
            f"{record['divergence']:.5f}",
        ]
        for record in records
    ]
    return markdown(["weight", "products", "error of a layer", "perplexity", "above f16", "divergence"], rows)


if __name__ == "__main__":
    SECTION.publish(measure, table)
