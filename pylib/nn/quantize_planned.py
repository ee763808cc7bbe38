"""Low-bit modules for what was planned: linear layers, embeddings, experts; and what the report says of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from operator import attrgetter
from typing import cast

import torch
from torch import Tensor, nn

from lowbit.pylib.nn.column_scales import ColumnScales
from lowbit.pylib.nn.dense_experts import is_experts
from lowbit.pylib.nn.embedding import LowbitEmbedding
from lowbit.pylib.nn.experts import LowbitExperts
from lowbit.pylib.nn.linear import LowbitLinear
from lowbit.pylib.nn.linear_like import as_linear
from lowbit.pylib.nn.observe import Observed
from lowbit.pylib.nn.packed_module import PackedModule
from lowbit.pylib.nn.plan import Planned, matrix_of, naming
from lowbit.pylib.nn.quantizable import matrices_of
from lowbit.pylib.nn.quantize_layer import Change, quantized_layer
from lowbit.pylib.nn.report import LayerReport
from lowbit.pylib.quantization.config import QuantConfig
from lowbit.pylib.torch_types import type_name


def quantized_module(
    entry: Planned,
    data: Iterable[Observed],
    device: torch.device | str | None,
    columns: ColumnScales | None = None,
) -> tuple[nn.Module, list[LayerReport]]:
    """Returns the module that takes another's place, and what the report says of it.

    data   for methods that look at inputs: the calibration of each matrix, in the order of `matrices_of`
    """
    config = cast(QuantConfig, entry.config)
    if is_experts(entry.module):
        return _quantized_experts(entry, config, iter(data), device)
    if isinstance(entry.module, nn.Embedding):
        return _quantized_embedding(entry, entry.module, config, device)
    linear = as_linear(entry.module)
    scaled_before = config.method == "awq"
    rounding = without_column_scales(config) if scaled_before else config
    columns = columns or ColumnScales()
    scales, rows = (each.get(entry.names[0]) for each in (columns.of, columns.rows))
    seen = next(iter(data), None)  # whose errors have names of their own
    data_of_scaled = seen and (seen.data if scales is None else seen.data.divided(scales))
    with naming(entry.names[0]):
        parts = linear.weight, linear.bias, entry.specs[0], rounding, data_of_scaled, device, scales, rows
        layer, change = quantized_layer(*parts)
    note = columns.notes.get(entry.names[0], "")
    row = low_bit_row(_name(entry), config, [layer], change, _bytes(linear))
    return layer.train(linear.training), [replace(row, note=note, asked=entry.asked)]


def without_column_scales(config: QuantConfig) -> QuantConfig:
    """Returns how AWQ rounds a weight whose columns are scaled already, or have no scales."""
    return replace(config, method="rtn", calibration="hessian" if config.clip == "output" else None)


def _quantized_embedding(
    entry: Planned, dense: nn.Embedding, config: QuantConfig, device: torch.device | str | None
) -> tuple[LowbitEmbedding, list[LayerReport]]:
    """Returns a low-bit embedding, and its row of the report."""
    with naming(entry.names[0]):
        layer, change = quantized_layer(dense.weight, None, entry.specs[0], config, None, device)
    embedding = LowbitEmbedding.from_packed(layer.packed).in_place_of(dense)
    name = " = ".join((*entry.names, *entry.tied))
    row = low_bit_row(name, config, [embedding], change, _bytes(dense))
    return embedding, [replace(row, asked=entry.asked)]


def _quantized_experts(
    entry: Planned, config: QuantConfig, data: Iterator[Observed], device: torch.device | str | None
) -> tuple[nn.Module, list[LayerReport]]:
    """Returns low-bit experts, and a row of the report for each of their two matrices."""
    layers, rows = list[list[LowbitLinear]](), list[LayerReport]()
    by_parameter = groupby(matrices_of(entry.names[0], entry.module), attrgetter("parameter"))
    for spec, (parameter, matrices) in zip(entry.specs, by_parameter, strict=True):
        of_experts, observed = list[LowbitLinear](), list[Observed]()
        total, before = Change(), 0
        for matrix in matrices:
            weight, bias, seen = matrix.weight, matrix.bias, next(data, None)
            observed += [seen] if seen else []
            with naming(matrix.name):
                layer, change = quantized_layer(weight, bias, spec, config, seen and seen.data, device)
            of_experts.append(layer)
            total += change
            before += weight.nbytes + (0 if bias is None else bias.nbytes)
        row = low_bit_row(f"{_name(entry)}.{parameter}", config, of_experts, total, before)
        rows.append(replace(row, note=_tokens_seen(observed), asked=entry.asked))
        layers.append(of_experts)
    return LowbitExperts(entry.module, *layers), rows


def _tokens_seen(observed: Sequence[Observed]) -> str:
    """Returns a note on how many tokens of the calibration experts got; "" for methods without calibration."""
    if not observed:
        return ""
    tokens, counts = [seen.tokens for seen in observed], Counter(seen.instead for seen in observed if seen.instead)
    few = "".join(f"; {count} of {len(observed)} {instead}" for instead, count in counts.items())
    return f"experts got {min(tokens)} to {max(tokens)} tokens{few}"


def low_bit_row(
    name: str, config: QuantConfig, layers: Sequence[PackedModule], change: Change, before: int
) -> LayerReport:
    """Returns what the report says of a low-bit layer, or of the same layer of all experts, of `before` bytes."""
    spec = layers[0].spec
    columns = "row" if spec.group_size is None else str(spec.group_size)
    form = f"{spec.weight} per {columns}, {config.method}"
    shape = (spec.n, spec.k) if len(layers) == 1 else (len(layers), spec.n, spec.k)
    return LayerReport(name, shape, form, before, sum(map(_bytes, layers)), change.relative)


def dense_row(entry: Planned) -> LayerReport:
    """Returns what the report says of a module that stays dense."""
    if isinstance(entry.module, PackedModule):
        spec = entry.module.spec
        shape, form = (spec.n, spec.k), spec.weight
    else:
        matrix = matrix_of(entry.module)
        shape, form = tuple(matrix.shape), type_name(matrix.dtype)
    size, why = _bytes(entry.module), entry.reason
    return LayerReport(_name(entry), shape, form, size, size, reason=why.text, option=why.option)


def _name(entry: Planned) -> str:
    """Returns the name of a module in the report, with all others by which the model holds it."""
    return " = ".join(entry.names)


def _bytes(module: nn.Module) -> int:
    tensors: list[Tensor] = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return sum(tensor.nbytes for tensor in tensors)
