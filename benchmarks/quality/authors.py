"""Quantizers beside the code of other libraries: `python -m benchmarks quality --references`.

Each adapter takes the weight of a layer [n, k] in f32 and returns it quantized and dequantized by a library of PyPI.
Those whose library is not installed are left out, with a sentence. Layers are those of `layers.py`, an error is the
squared error of a layer's output on held-out text and on text of another kind, and the table has the ratio of our error
to theirs at equal bits. GGUF's types are beside llama.cpp in `references.py`.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import lowbit
from benchmarks.quality.layers import TEXTS, Layer
from benchmarks.quality.ranges import by_kurtosis, loss, loss_of, mean
from benchmarks.quality.references import FAIR
from benchmarks.quality.section import Record, Section
from benchmarks.tables import markdown

SECTION = Section("authors", "authors")


@dataclass(frozen=True)
class Reference:
    """A quantizer of another library, and ours of the same size.

    name      what the table calls it
    library   what is imported
    quantize  returns a weight [n, k] in f32, quantized and dequantized
    ours      of the same bits per weight
    """

    name: str
    library: str
    quantize: Callable[[Tensor], Tensor]
    ours: lowbit.QuantConfig

    @property
    def is_there(self) -> bool:
        """Whether the library is installed."""
        return importlib.util.find_spec(self.library) is not None


def _bitsandbytes(weight: Tensor) -> Tensor:
    from bitsandbytes import functional  # type: ignore[import-not-found]

    codes, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    return functional.dequantize_4bit(codes, state).float()


def _mx(mode: str) -> Callable[[Tensor], Tensor]:
    def quantize(weight: Tensor) -> Tensor:
        from torchao.prototype.mx_formats.config import ScaleCalculationMode  # type: ignore[import-not-found]
        from torchao.prototype.mx_formats.mx_tensor import MXTensor  # type: ignore[import-not-found]

        kind = ScaleCalculationMode[mode]
        return MXTensor.to_mx(weight, torch.float4_e2m1fn_x2, 32, kind).dequantize().float()

    return quantize


def _nvfp4(weight: Tensor) -> Tensor:
    from torchao.prototype.mx_formats import nvfp4_tensor  # type: ignore[import-not-found]

    scale = nvfp4_tensor.per_tensor_amax_to_scale(weight.abs().max())
    return nvfp4_tensor.NVFP4Tensor.to_nvfp4(weight, per_tensor_scale=scale).dequantize().float()


def _torchao_hqq(bits: int) -> Callable[[Tensor], Tensor]:
    def quantize(weight: Tensor) -> Tensor:
        from torchao.quantization import quant_primitives  # type: ignore[import-not-found]

        search: Any = quant_primitives._choose_qparams_and_quantize_affine_hqq
        given = {"axis": 1, "raw_output": True, "device": "cpu", "compute_dtype": torch.float32}
        codes, scales, zeros, _ = search(weight, nbits=bits, group_size=64, **given)
        levels = codes.float().unflatten(1, (-1, 64)) - zeros[..., None].half().float()
        return (levels * scales[..., None].half().float()).flatten(1)

    return quantize


def _hqq(bits: int) -> Callable[[Tensor], Tensor]:
    def quantize(weight: Tensor) -> Tensor:
        from hqq.core.quantize import Quantizer  # type: ignore[import-not-found]

        given = {"axis": 1, "device": "cpu", "compute_dtype": torch.float32}
        return Quantizer.dequantize(*Quantizer.quantize(weight, nbits=bits, group_size=64, **given)).float()

    return quantize


OURS_HQQ = {kind: lowbit.QuantConfig(kind, 64, method="hqq") for kind in ("u4", "u3", "u2")}
REFERENCES = (
    Reference("bitsandbytes NF4, blocks of 64", "bitsandbytes", _bitsandbytes, lowbit.QuantConfig.preset("nf4")),
    *(
        Reference(f"torchao MXFP4, {mode}", "torchao", _mx(mode), lowbit.QuantConfig.preset("mxfp4"))
        for mode in ("FLOOR", "RCEIL", "EVEN")
    ),
    Reference("torchao NVFP4", "torchao", _nvfp4, lowbit.QuantConfig.preset("nvfp4")),
    *(
        Reference(f"{library} HQQ {kind}, groups of 64", library, adapter(bits), OURS_HQQ[kind])
        for library, adapter in (("torchao", _torchao_hqq), ("hqq", _hqq))
        for bits, kind in ((4, "u4"), (3, "u3"), (2, "u2"))
    ),
)
"""What ours are compared with."""


@torch.no_grad()
def measure(given: Iterable[Layer]) -> Iterator[Record]:
    """Yields a record for each layer: its kurtosis, and by reference the ratio of errors on each text but the first.
    None where no library is installed."""
    found = [each for each in REFERENCES if each.is_there]
    for each in sorted({each.library for each in REFERENCES} - {each.library for each in found}):
        print(f"{each} is left out: it is not installed (pip install {each})", file=sys.stderr)
    for layer in given if found else ():
        ratios = {each.name: _ratios(layer, each) for each in found}
        yield {"layer": layer.label, "kurtosis": round(layer.kurtosis, 2), "ratios": ratios}


def _ratios(layer: Layer, reference: Reference) -> list[float]:
    theirs = reference.quantize(layer.weight.clone())
    return [round(loss(layer, reference.ours, text) / loss_of(layer, theirs, text), 4) for text in TEXTS[1:]]


def table(records: list[Record]) -> str:
    """Returns the page's table."""
    parts = by_kurtosis(records)
    head = ["reference", *parts, "worst layer", "all, other text", "verdict"]
    return markdown(head, [_row(name, records, parts.values()) for name in records[0]["ratios"]])


def _row(name: str, records: list[Record], parts: Iterable[list[Record]]) -> list[str]:
    held, other = ([record["ratios"][name][text] for record in records] for text in (0, 1))
    means = [mean([record["ratios"][name][0] for record in part]) for part in parts]
    numbers = [*means, max(held), mean(other)]
    exception = f", but one layer is {max(held) - 1:.0%} worse" if max(held) > FAIR else ""
    return [name, *(f"{number:.2f}" for number in numbers), verdict([*means, mean(other)]) + exception]


def verdict(means: list[float]) -> str:
    """Returns the word for ratios of errors: by the largest, as no kind of layer or text may lose."""
    return "better" if max(means) < 1 / FAIR else "equal or better" if max(means) <= FAIR else "worse"
