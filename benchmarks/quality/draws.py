"""How much a perplexity is chance: the small model, its columns in random orders: `python -m benchmarks.quality.draws`.

A model whose columns are put into another order is the same model, if the rows before and the columns after follow. But
other columns share a scale then, so that every weight is rounded anew. Its perplexity changes with the order: by the
part of the errors that happens to point along the gradient of the text's loss. The page has mean and standard deviation
over orders, for rounding to nearest and for GPTQ, and the difference of the means with a 95 % interval.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import lowbit
from benchmarks.quality.measure import GROUP, float_inputs, losses, predictions, quantized, texts
from benchmarks.quality.model import Block, Transformer, load
from benchmarks.quality.section import Record, Section
from benchmarks.quality.spread import Spread
from benchmarks.tables import markdown

SECTION = Section("draws", "draws")
DRAWS = 24
WIDTHS = (7, 6, 5)
METHODS = ("rtn", "gptq")


@torch.no_grad()
def shuffled(model: Transformer, seed: int) -> Transformer:
    """Returns the same model with its hidden columns, and those between two layers of a block, in a random order."""
    generator, result = torch.Generator().manual_seed(seed), copy.deepcopy(model)

    def order(size: int) -> Tensor:
        return torch.randperm(size, generator=generator)

    hidden = order(model.shape.hidden)
    for table in (result.embedding, result.norm):
        table.weight.copy_(table.weight[..., hidden])
    for block in result.blocks:
        assert isinstance(block, Block)
        heads = torch.arange(model.shape.hidden).view(model.shape.heads, -1)
        _shuffle(block, hidden, torch.cat([head[order(len(head))] for head in heads]), order(model.shape.ffn))
    return result


def _shuffle(block: Block, hidden: Tensor, values: Tensor, inner: Tensor) -> None:
    """Put the columns that a block reads, the values of its heads, and the inner columns of its feed-forward layer into
    these orders."""
    attention, ffn = block.attention, block.ffn
    for reader in (attention.q, attention.k, attention.v, ffn.gate, ffn.up, block.norm1, block.norm2):
        reader.weight.copy_(reader.weight[..., hidden])
    for writer, reader, between in ((attention.v, attention.o, values), (ffn.gate, ffn.down, inner)):
        writer.weight.copy_(writer.weight[between])
        reader.weight.copy_(reader.weight[hidden][:, between])
    ffn.up.weight.copy_(ffn.up.weight[inner])


def measure() -> Iterator[Record]:
    """Yields a record for each width, method and order."""
    model = load()
    training, test = texts(model)
    exact = float(losses(predictions(model, test), test).mean())
    for seed in range(DRAWS):
        same = shuffled(model, seed)
        inputs = float_inputs(same, training)
        for bits in WIDTHS:
            for method in METHODS:
                weight: Any = f"u{bits}"
                worse, _ = quantized(same, lowbit.QuantConfig(weight, GROUP, method=method), training, inputs)  # type: ignore[arg-type]
                change = float(losses(predictions(worse, test), test).mean()) - exact
                yield {"bits": bits, "method": method, "seed": seed, "above": round(100 * change, 5)}


def table(records: list[Record]) -> str:
    """Returns the page's table: by how many percent the perplexity is above the float model's."""
    rows = []
    for method, name in (("rtn", "RTN"), ("gptq", "GPTQ")):
        found = [_of_orders(records, bits, method) for bits in WIDTHS]
        rows.append([name, *(f"{Spread.of(each):+.3f}" for each in found)])
    rows.append(["GPTQ less RTN", *(f"{interval(each):+.3f}" for each in differences(records))])
    return markdown(["", *(f"{bits} bits" for bits in WIDTHS)], rows)


def differences(records: list[Record]) -> list[list[float]]:
    """Returns, for each width, by how much GPTQ's perplexity is above that of rounding to nearest, by order."""
    both = [[_of_orders(records, bits, method) for method in METHODS] for bits in WIDTHS]
    return [[gptq - rounded for rounded, gptq in zip(*each)] for each in both]


def _of_orders(records: list[Record], bits: int, method: str) -> list[float]:
    """Returns the numbers of a width and a method, by order."""
    return [r["above"] for r in records if (r["bits"], r["method"]) == (bits, method)]


def interval(numbers: list[float]) -> Spread:
    """Returns the mean of two dozen numbers and more, with half the width of its 95 % interval."""
    return Spread(statistics.fmean(numbers), 2.07 * statistics.stdev(numbers) / math.sqrt(len(numbers)))


if __name__ == "__main__":
    SECTION.publish(measure, table)
