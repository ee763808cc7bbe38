"""vLLM's engine in a process of its own, with caches of its own: an engine that starts with empty ones is cold."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from itertools import count
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.serving.requests import Load, Record, Request, measure

SETTINGS: Record = {
    "dtype": "bfloat16",
    "max_model_len": 4096,
    "max_num_seqs": 128,
    "max_num_batched_tokens": 8192,
    "enable_prefix_caching": False,
    "kv_cache_memory_bytes": 12 << 30,
    "gpu_memory_utilization": 0.2,  # vLLM asks for this much to be free; several engines may be on the GPU
    "skip_tokenizer_init": True,
    "disable_log_stats": True,
    "seed": 0,
}
"""Of all engines. The rest is vLLM's default: torch.compile, CUDA graphs, kernels as vLLM chooses them."""

ROUTING = "VLLM_MOE_ROUTING_SIMULATION_STRATEGY"
"""Random weights would send all tokens to the same experts; "uniform_random" draws them."""

_CACHES = {
    "VLLM_CACHE_ROOT": "vllm",
    "LOWBIT_CACHE_DIR": "lowbit",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "CUDA_CACHE_PATH": "cuda",
}
_KERNELS = re.compile(r"Using (\w+LinearKernel|'\w+' \w+ MoE backend|\w+ \w*MoE backend)")
_PARTS = {
    "loading": r"Model loading took .* ([\d.]+) seconds",
    "lowbit makes weights": r"lowbit: weights were made in ([\d.]+) s",
    "Dynamo": r"Dynamo bytecode transform time: ([\d.]+) s",
    "torch.compile": r"torch\.compile took ([\d.]+) s",
    "first run": r"Initial profiling/warmup run took ([\d.]+) s",
    "lowbit waits for kernels": r"waited ([\d.]+) s for them",
    "lowbit reads kernels": r"read them in ([\d.]+) s",
    "graphs": r"Graph capturing finished in ([\d.]+) secs",
    "from loading to the end": r"init engine .* took ([\d.]+) s",
}
"""What a start's seconds are spent on, as the log says it: some parts are parts of others."""
UP, MEASURED = "up", "measured"


@dataclass(frozen=True)
class Start:
    """An engine to start.

    name      of the format
    folder    the model
    caches    a folder for what is compiled
    log       a file for what vLLM prints
    settings  besides SETTINGS
    mixture   of experts
    """

    name: str
    folder: Path
    caches: Path
    log: Path
    settings: Record = field(default_factory=dict)
    mixture: bool = False

    def empty_caches(self) -> None:
        """Have the engine start cold."""
        shutil.rmtree(self.caches, ignore_errors=True)

    def environment(self) -> dict[str, str]:
        """Returns the environment variables that the engine's processes are given."""
        found = {variable: str(self.caches / name) for variable, name in _CACHES.items()}
        return found | ({ROUTING: "uniform_random"} if self.mixture else {})

    def kernels(self) -> list[str]:
        """Returns the names of vLLM's kernels for low-bit layers that the log tells of."""
        return list(dict.fromkeys(_KERNELS.findall(self.log_text())))

    def log_text(self, begin: int = 0) -> str:
        """Returns what vLLM has printed so far, from a character on."""
        return self.log.read_text(errors="replace")[begin:] if self.log.exists() else ""


class Failed(RuntimeError):
    """An engine that did not start, or ended."""


class Process:
    """A process that starts an engine, and measures it when it is told to."""

    def __init__(self, start: Start, limit: float) -> None:
        self.start, self.limit = start, limit
        start.caches.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._printed_before = len(start.log_text())
        context = get_context("spawn")
        self.connection, there = context.Pipe()
        self.began = time.perf_counter()
        self.process = context.Process(target=_work, args=(start, there))
        self.process.start()
        there.close()

    def up(self) -> float:
        """Waits for the engine to take requests; returns the seconds since its process was started. Raises Failed."""
        return self._next(UP) - self.began  # the clock is one of all processes

    def parts(self) -> Record:
        """Returns what the seconds of the start were spent on, by the engine's log."""
        text = self.start.log_text(self._printed_before)
        found = {name: re.search(pattern, text) for name, pattern in _PARTS.items()}
        return {name: float(part[1]) for name, part in found.items() if part}

    def measured(self, load: Load) -> Iterator[Record]:
        """Measures the engine; yields parts of the record. Raises Failed."""
        self.connection.send(load)
        while (part := self._next(MEASURED)) is not None:
            yield part

    def _next(self, kind: str) -> Any:
        try:
            if not self.connection.poll(self.limit):
                raise Failed(f"{self.start.name}: nothing came for {self.limit:.0f} s; see {self.start.log}")
            found, value = self.connection.recv()
        except (EOFError, OSError):
            found, value = "", "its process has ended"
        if found != kind:
            raise Failed(f"{self.start.name}: {value}; see {self.start.log}")
        return value

    def close(self) -> None:
        """Ends the engine, so that its memory is free."""
        self.connection.close()
        self.process.join(20)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _work(start: Start, connection: Connection) -> None:
    """Start an engine, say so, and send what is measured of it with the load that comes."""
    log = os.open(start.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(log, stream.fileno())
    os.environ.update(start.environment())
    try:
        asyncio.run(_serve(start, connection))
    except (EOFError, OSError):  # the connection was closed: no load comes
        pass
    except Exception as error:  # of vLLM it may be any
        connection.send(("failed", f"{type(error).__name__}: {error}"))


async def _serve(start: Start, connection: Connection) -> None:
    engine = Vllm(start)
    try:
        connection.send((UP, time.perf_counter()))
        load = connection.recv()
        await measure(engine, load, lambda part: connection.send((MEASURED, part)))
        connection.send((MEASURED, None))
        connection.recv()  # until it is closed
    finally:
        engine.close()


class Vllm:
    """vLLM's engine, which answers requests."""

    def __init__(self, start: Start) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.sampling_params import RequestOutputKind, SamplingParams
        from vllm.v1.engine.async_llm import AsyncLLM

        self._engine: Any = AsyncLLM.from_engine_args(AsyncEngineArgs(str(start.folder), **SETTINGS | start.settings))
        self._params: Any = SamplingParams
        self._kinds: Any = {True: RequestOutputKind.DELTA, False: RequestOutputKind.FINAL_ONLY}
        self._numbers = count()

    async def answer(self, request: Request, stream: bool) -> AsyncIterator[int]:
        """Yields how many tokens have come, of a greedy answer that ends after as many as were asked for."""
        params = self._params(
            max_tokens=request.tokens,
            min_tokens=request.tokens,
            temperature=0,
            ignore_eos=True,
            detokenize=False,
            output_kind=self._kinds[stream],
        )
        prompt = {"prompt_token_ids": request.prompt}
        async for output in self._engine.generate(prompt, params, str(next(self._numbers))):
            if tokens := len(output.outputs[0].token_ids):
                yield tokens

    def close(self) -> None:
        """Ends vLLM's processes."""
        self._engine.shutdown()
