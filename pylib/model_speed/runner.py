"""One step of a model on tokens of a fixed shape, with a static cache: compiled, and on a GPU as a CUDA graph."""

from __future__ import annotations

import inspect
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.pylib.model_speed.attention import attention_for

WARM_UP = 3
FEWEST, ENOUGH = 5, 4.0  # times that a step is run at least, and seconds after which no further one begins
HEAD_START = 2_000_000  # cycles that the GPU sleeps while the host starts what is timed: about a millisecond


@dataclass(frozen=True)
class Step:
    """A forward of so many tokens for each of `batch` sequences that have `context` tokens already."""

    batch: int
    tokens: int
    context: int = 0

    @property
    def is_prefill(self) -> bool:
        return self.tokens > 1

    @property
    def capacity(self) -> int:
        """Tokens that the cache has room for, a multiple of 128; attention reads all of it."""
        return -(-(self.context + self.tokens) // 128) * 128

    def __str__(self) -> str:
        return f"prefill of {self.tokens}" if self.is_prefill else f"decode, batch {self.batch}"


class Runner:
    """Runs a step again and again: `time` says how long it takes.

        runner = Runner(model, Step(batch=1, tokens=1, context=512), compiled=True)
        seconds = runner.time(repeats=20)

    The last token's logits are computed, and their maximum is found, as greedy decoding does.
    """

    def __init__(self, model: nn.Module, step: Step, *, compiled: bool) -> None:
        from transformers import StaticCache

        self.step = step
        config: Any = model.config
        has_sinks = any(hasattr(module, "sinks") for module in model.modules())
        config._attn_implementation = attention_for(config, step.tokens, step.context, has_sinks)
        self.device = next(model.parameters()).device
        self._cache: Any = StaticCache(config=config, max_cache_len=step.capacity)
        size = (step.batch, step.tokens)
        self._ids = torch.randint(0, int(config.vocab_size), size, device=self.device)
        positions = torch.arange(step.context, step.context + step.tokens, device=self.device)
        self._positions = positions.expand(size).contiguous()
        self._forward = self._plain_forward(model)
        with torch.no_grad():
            self._forward()  # makes the cache
            self._rewind()
            if compiled:
                torch._dynamo.reset()
                self._forward = torch.compile(self._forward, fullgraph=True, dynamic=False)
            self.output = self._forward()
            self._rewind()
            self._call = self._graph() if self.device.type == "cuda" else self._without_graph

    def _plain_forward(self, model: nn.Module) -> Callable[[], Tensor]:
        cache, ids, positions = {cache_argument(model): self._cache}, self._ids, self._positions

        def forward() -> Tensor:
            output = model(input_ids=ids, position_ids=positions, **cache, use_cache=True, logits_to_keep=1)
            return output.logits[:, -1].argmax(-1)

        return forward

    def _graph(self) -> Callable[[], None]:
        """Returns what replays a CUDA graph of the step."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._rewind()
            self._forward()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self._rewind()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            self.output = self._forward()
        return graph.replay

    def _without_graph(self) -> None:
        self.output = self._forward()

    def _rewind(self) -> None:
        """Let the cache forget what steps have added: those of transformers count the tokens they hold."""
        for layer in self._cache.layers:
            length = getattr(layer, "cumulative_length", None)
            if isinstance(length, Tensor):
                length.fill_(self.step.context)
            if hasattr(layer, "cumulative_length_int"):  # of a window
                layer.cumulative_length_int = self.step.context

    @torch.no_grad()
    def run(self) -> None:
        """Run the step once from its own place in the cache."""
        self._rewind()
        self._call()

    @torch.no_grad()
    def time(self, repeats: int = 20) -> float:
        """Returns the median of the seconds that a step takes on the device, of fewer repeats if it is a slow one."""
        for _ in range(WARM_UP):
            self.run()
        times: list[float] = []
        while len(times) < repeats and (len(times) < FEWEST or sum(times) < ENOUGH):
            self._rewind()
            with _timed(self.device, times):
                self._call()
        return statistics.median(times)


@contextmanager
def _timed(device: torch.device, times: list[float]) -> Iterator[None]:
    """Appends the seconds that the device works within a block; on a GPU, not those of the host that starts it."""
    if device.type != "cuda":
        start = time.perf_counter()
        yield
        times.append(time.perf_counter() - start)
        return
    torch.cuda._sleep(HEAD_START)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    yield
    end.record()
    end.synchronize()
    times.append(begin.elapsed_time(end) * 1e-3)


def cache_argument(model: nn.Module) -> str:
    """Returns the name of the argument of `model.forward` that takes a cache of keys and values.

    It is `cache` from transformers 5.24 on, and `past_key_values` before, or in code that a model brings along.
    """
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
