"""When the blocks of kernels begin, go on after their wait, and end, by the GPU's clock.

Kernels that start before their predecessor ends confuse a profiler, which counts their waiting as their time. Here each
kernel writes down its own times: its PTX gets some instructions by which thread 0 of every block stores `%globaltimer`
(PTX ISA 10) where it begins, behind `griddepcontrol.wait`, and before it returns, in memory behind a parameter more.

    recorder = Recorder(launches=64)
    with recorder.instead():  # kernels that are loaded in it are instrumented
        ...
    recorder.launches()

    python -m benchmarks timeline llama-3.1-8b -m 1 --context 512
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.layer import LAYERS, FusedLayer, Inputs, Layer, in_order
from lowbit.dialect.fields import choice
from lowbit.dialect.signature import Param
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.codegen.cubin import emit_cubin
from lowbit.passes.target import Target
from lowbit.pylib.build.driver import Program
from lowbit.pylib.model_speed.table import aligned
from lowbit.pylib.runtime import gpu, kernel, top_k_experts
from lowbit.pylib.runtime.driver import Function
from lowbit.pylib.tune.timing import captured, copies_needed

TIMES = "times"
MARKS = ("begin", "go", "end")  # of a block; the fourth number is its multiprocessor
MOST_BLOCKS = 4096  # of a launch
_LOADERS = (gpu, kernel, top_k_experts)  # modules that load kernels
_ENTRY = re.compile(r"(\.visible \.entry (\w+)\(.*?)(\n\))(.*?\n\{\n)", re.DOTALL)
_FIRST = """
	.reg .b64 %w_at, %w_time;
	.reg .b32 %w_x, %w_y, %w_n;
	.reg .pred %w_is;
	ld.param.u64 %w_at, [{name}_times];
	mov.u32 %w_x, %tid.x;
	setp.eq.u32 %w_is, %w_x, 0;
	mov.u32 %w_x, %ctaid.z;
	mov.u32 %w_n, %nctaid.y;
	mov.u32 %w_y, %ctaid.y;
	mad.lo.u32 %w_y, %w_x, %w_n, %w_y;
	mov.u32 %w_n, %nctaid.x;
	mov.u32 %w_x, %ctaid.x;
	mad.lo.u32 %w_x, %w_y, %w_n, %w_x;
	mul.wide.u32 %w_time, %w_x, 32;
	add.u64 %w_at, %w_at, %w_time;
	mov.u32 %w_n, %smid;
	cvt.u64.u32 %w_time, %w_n;
	@%w_is st.global.u64 [%w_at+24], %w_time;
"""
_MARK = """
	mov.u64 %w_time, %globaltimer;
	@%w_is st.global.u64 [%w_at+{offset}], %w_time;
"""


def instrumented(ptx: str) -> str:
    """Returns the PTX of a kernel that stores times of its blocks, u64 [blocks, 4], behind a last parameter."""
    begin, go, end = (_MARK.format(offset=8 * n) for n in range(3))
    found, count = _ENTRY.subn(
        lambda m: f"{m[1]},\n\t.param .u64 {m[2]}_times{m[3]}{m[4]}{_FIRST.format(name=m[2])}{begin}", ptx
    )
    assert count == 1, "one kernel"
    found = re.sub(r"griddepcontrol\.wait;", lambda m: m[0] + go, found)
    return re.sub(r"^\s*ret;", lambda m: end + m[0], found, flags=re.MULTILINE)


@dataclass(frozen=True)
class Launch:
    """Times of one launch in microseconds since the first began.

    begin, go, end   of its blocks, in the order of blocks; `go` is empty where nothing is waited for
    processors       how many multiprocessors its blocks ran on
    """

    name: str
    begin: Sequence[float]
    go: Sequence[float]
    end: Sequence[float]
    processors: int


class Recorder:
    """Memory for the times of launches, in the order in which they are made. A graph keeps its part: what is read is of
    its last replay."""

    def __init__(self, launches: int, device: str = "cuda") -> None:
        self.times = torch.zeros(launches, MOST_BLOCKS, len(MARKS) + 1, dtype=torch.int64, device=device)
        self.names: list[str] = []

    @contextmanager
    def instead(self) -> Iterator[None]:
        """Within it, kernels that are loaded write down their times."""
        with ExitStack() as stack:
            for module in _LOADERS:
                stack.enter_context(mock.patch.object(module, "load_function", self._load))
            yield

    def _load(
        self, program: Program, target: Target, device: int, order: Sequence[str] | None = None
    ) -> Callable[..., None]:
        launch = replace(program.launch, params=(*program.launch.params, Param(TIMES, "pointer")))
        names = order or [param.name for param in program.launch.arguments]
        function = Function(emit_cubin(instrumented(program.ptx), target), launch, device, [*names, TIMES])
        return partial(self._start, function, program.launch.name)

    def _start(self, function: Function, name: str, stream: int, overlap: bool, *values: Any) -> None:
        place = self.times[len(self.names)]
        self.names.append(name)
        function(stream, overlap, *values, place.data_ptr())

    def launches(self, first: int = 0) -> list[Launch]:
        """Returns the launches from number `first` on."""
        times = self.times[first : len(self.names)].cpu()
        least = int(times[..., 0][times[..., 0] > 0].min())
        return [_launch(name, each, least) for name, each in zip(self.names[first:], times)]


def _launch(name: str, times: Tensor, least: int) -> Launch:
    blocks = times[times[:, 0] > 0]
    begin, go, end = (((blocks[:, n][blocks[:, n] > 0] - least) / 1000).tolist() for n in range(3))
    return Launch(name, begin, go, end, len(blocks[:, 3].unique()))


def gaps(launches: Sequence[Launch], count: int) -> list[dict[str, float]]:
    """Returns, for each of the `count` launches of a layer, medians over layers but the first, in microseconds after
    the last block of the launch before has ended: when the first and the last block begin, when the first and the last
    go on, and when the last ends."""
    rows: list[list[tuple[float, ...]]] = [[] for _ in range(count)]
    for number in range(count, len(launches)):
        before, here = max(launches[number - 1].end), launches[number]
        go = here.go or here.begin
        ends = (min(here.begin), max(here.begin), min(go), max(go), max(here.end))
        rows[number % count].append(tuple(each - before for each in ends))
    names = ("first begins", "last begins", "first goes on", "last goes on", "ends")
    return [dict(zip(names, map(statistics.median, zip(*row)))) for row in rows]


@torch.no_grad()
def timeline(name: str, spec: MatmulSpec, batch: int, context: int) -> str:
    """Returns the times of each launch of a fused layer, as a table. Raises SpecError for an unknown name."""
    sizes = LAYERS[choice("layer", name, tuple(LAYERS))]
    torch.manual_seed(0)
    given, first = Inputs.of(sizes, batch, context, "cuda"), Layer(sizes, spec, batch, context, "cuda")
    others = [Layer(sizes, spec, batch, context, "cuda") for _ in range(copies_needed(first.nbytes) - 1)]
    recorder = Recorder(launches=1024)
    with recorder.instead():
        fused = [FusedLayer(layer) for layer in (first, *others)]
        graph = captured([partial(in_order, fused, given)])
    count = len(recorder.names) // 2  # they ran once before they were captured
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    launches = recorder.launches(count)
    of_layer = count // len(fused)
    rows = [
        [here.name, str(len(here.begin)), str(here.processors), *(f"{time:.2f}" for time in times.values())]
        for here, times in zip(launches[of_layer:], gaps(launches, of_layer))
    ]
    head = ["launch", "blocks", "multiprocessors", *gaps(launches, of_layer)[0]]
    whole = (max(launches[-1].end) - max(launches[of_layer - 1].end)) / (len(fused) - 1)
    return f"{aligned([head, *rows])}\n\n{whole:.2f} us a layer"
