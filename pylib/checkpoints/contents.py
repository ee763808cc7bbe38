"""Lists the contents of a checkpoint: a row for each quantized layer and each dense matrix. `lowbit inspect` prints
it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor

from lowbit.dialect.errors import CheckpointError, SpecError
from lowbit.dialect.spec import MatmulSpec
from lowbit.pylib.checkpoints.checkpoint import Checkpoint, check_dense, open_checkpoint
from lowbit.pylib.checkpoints.expert_places import PARTS
from lowbit.pylib.checkpoints.gguf.file import TYPES, GgufFile, load_gguf
from lowbit.pylib.checkpoints.tensor_files import TensorFiles, read_json
from lowbit.pylib.nn.fuse import parts_named
from lowbit.pylib.nn.outlier_rows import OutlierRows
from lowbit.pylib.nn.report import LayerReport, QuantizationReport
from lowbit.pylib.weights.packed import PackedWeight

ERRORS = "lowbit-errors.json"
"""The file of a checkpoint in which `lowbit quantize` notes the relative error of each layer."""
TYPE_NAMES = {kind.name for kind in TYPES.values()}
DENSE = "not quantized in the file"


def contents(path: str | PathLike[str], against: str | PathLike[str] | None = None) -> QuantizationReport:
    """Returns what is in a checkpoint, lowbit's own or another library's, or in a GGUF file, layer by layer.

    against   a checkpoint with the same layers as dense weights, from which errors are computed; None: errors are those
              that `lowbit quantize` has noted, if it wrote the checkpoint

    Raises CheckpointError for what is no checkpoint, for a layer that can't be read, and where `against` has no dense
    weight of any layer; SpecError for a GGUF file with `against`.
    """
    if Path(path).suffix == ".gguf":
        if against is not None:
            raise SpecError(f"against: {path} has names of llama.cpp's, which the layers of {against} do not have")
        return QuantizationReport(tuple(_gguf_rows(load_gguf(path))))
    checkpoint = open_checkpoint(path)
    check_dense(checkpoint, checkpoint.dense)
    originals = None if against is None else TensorFiles(Path(against))
    noted = checkpoint.tensors.folder / ERRORS
    errors = read_json(noted) if originals is None and noted.exists() else {}
    rows = [_low_bit_row(checkpoint, name, originals, errors) for name in checkpoint.modules]
    single = [row for row in rows if len(row.shape) == 2]
    if originals is not None and single and all(row.error is None for row in single):
        missing = f"{against} has no weight in 16 or 32 bits of any layer of {path}, {single[0].name} for one"
        raise CheckpointError(f"{missing}; name the dense model that it was made of")
    return QuantizationReport((*rows, *_dense_rows(checkpoint)))


def _gguf_rows(file: GgufFile) -> Iterator[LayerReport]:
    """Yields a row for each matrix of a GGUF file, in llama.cpp's names."""
    for name in file:
        shape, kind, size = file.shape(name), file.type_of(name), file.nbytes(name)
        if len(shape) > 1:
            before, reason = (2 * math.prod(shape), "") if kind in TYPE_NAMES else (size, DENSE)
            yield LayerReport(name.removesuffix(".weight"), shape, kind, before, size, reason=reason)


def note_errors(path: str | PathLike[str], report: QuantizationReport) -> None:
    """Write the errors of a report into a checkpoint's folder, where `contents` looks for them."""
    errors = {row.name: row.error for row in report.quantized if row.error is not None}
    (Path(path) / ERRORS).write_text(json.dumps(errors, indent=1) + "\n")


def describe(spec: MatmulSpec) -> str:
    """Returns the format of a weight: elements, columns per scale, and what else it has."""
    columns = "row" if spec.group_size is None else str(spec.group_size)
    zeros = "" if spec.zeros == "none" else f", {spec.zeros} zeros"
    return f"{spec.weight} per {columns}, {spec.scale} scales{zeros}"


def _low_bit_row(
    checkpoint: Checkpoint, name: str, originals: TensorFiles | None, errors: Mapping[str, object]
) -> LayerReport:
    weights = _weights(checkpoint, name)
    spec = weights[0].spec
    shape = (spec.n, spec.k) if len(weights) == 1 else (len(weights), spec.n, spec.k)
    size = sum(checkpoint.tensors[tensor].nbytes for tensor in checkpoint.names_of(name).values())
    noted = errors.get(name)
    error = noted if isinstance(noted, float) else None
    if originals is not None and len(weights) == 1 and not checkpoint.rotations_of(name, *shape[-2:]):
        error = _relative_error(_original(originals, name), weights[0])
    outliers = OutlierRows.of(weights[0]) if len(weights) == 1 else None
    return LayerReport(name, shape, describe(spec), 2 * math.prod(shape), size, error, outliers=outliers)


def _weights(checkpoint: Checkpoint, name: str) -> list[PackedWeight]:
    """Returns the weight of a layer, or those of all of its experts."""
    shapes = (checkpoint.tensors.shape(tensor) for tensor in checkpoint.names_of(name).values())
    if checkpoint.format is not None and max(map(len, shapes)) > 2:
        return checkpoint.load_experts(name, "bf16")
    return [checkpoint.load_between(name, "bf16")[0]]


def _original(originals: TensorFiles, name: str) -> Tensor | None:
    """Returns the dense weight of a layer, or of those that it was fused of; None if there is none."""
    if f"{name}.weight" in originals:
        return originals[f"{name}.weight"]
    parent, dot, leaf = name.rpartition(".")
    if leaf.isdecimal():
        experts, _, matrix = parent.rpartition(".")
        return _original_expert(originals, experts, matrix, leaf)
    inside = (other.removeprefix(parent + dot) for other in originals if other.startswith(parent + dot))
    layers = {other.removesuffix(".weight") for other in inside if other.endswith(".weight") and other.count(".") == 1}
    parts = [originals[f"{parent}{dot}{part}.weight"] for part in parts_named(leaf, layers)]
    fits = parts and all(part.ndim == 2 and part.shape[1] == parts[0].shape[1] for part in parts)
    return torch.cat(parts) if fits else None


def _original_expert(originals: TensorFiles, experts: str, matrix: str, number: str) -> Tensor | None:
    """Returns a dense matrix of an expert, whose parts have names of their own, or which is one of a stack."""
    for parts in PARTS.get(f"{matrix}_proj", ()):
        names = [f"{experts}.{number}.{part}.weight" for part in parts]
        if all(name in originals for name in names):
            return torch.cat([originals[name] for name in names])
    stack = f"{experts}.{matrix}_proj"
    return originals[stack][int(number)] if stack in originals and int(number) < originals.shape(stack)[0] else None


def _relative_error(original: Tensor | None, weight: PackedWeight) -> float | None:
    """Returns the error of a weight; None if the original is not its own. Some models, such as GPT-2, have theirs as
    [k, n]: of the original and its transpose the one of this shape is meant, or the nearer one."""
    if original is None or original.ndim != 2 or original.itemsize < 2:  # codes
        return None
    norm, values = float(original.float().norm()), weight.dequantize()
    found = [w.float() for w in (original, original.T) if w.shape == values.shape]
    return min((float((values - w).norm()) / norm if norm else 0.0 for w in found), default=None)


def _dense_rows(checkpoint: Checkpoint) -> Iterator[LayerReport]:
    """Yields a row for each matrix that is not quantized."""
    for name in checkpoint.dense:
        if len(checkpoint.tensors.shape(name)) > 1:
            yield LayerReport.of_dense(name.removesuffix(".weight"), checkpoint.tensors[name], DENSE)
