"""How fast an engine answers requests: prompts of random tokens, and answers of as many tokens as were asked for.

Times to the first token (TTFT) and per further token (TPOT) are those of `vllm bench serve`: the first from when a
request is sent, the second of the rest of an answer, divided by its tokens but the first.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any, Protocol

Record = dict[str, Any]
BATCHES = (1, 8, 64)
CONCURRENCY = (1, 8, 32, 128)
_ROUNDS = 3  # of what is done several times; the fastest counts


@dataclass(frozen=True)
class Request:
    """A prompt, and how many tokens to answer."""

    prompt: list[int]
    tokens: int


class Engine(Protocol):
    """What answers requests, many at a time."""

    def answer(self, request: Request, stream: bool) -> AsyncIterator[int]:
        """Yields how many tokens have come: whenever some have, or with stream=False all at the end."""
        ...


@dataclass(frozen=True)
class Answer:
    """Seconds until the first token and until the last one, and the number of tokens."""

    first: float
    whole: float
    tokens: int

    @property
    def each(self) -> float:
        """Seconds per token after the first."""
        return (self.whole - self.first) / (self.tokens - 1)


@dataclass(frozen=True)
class Load:
    """How much is asked of an engine.

    vocabulary  tokens are below this number
    prompt      tokens of a prompt where they are all as long; output those of its answer
    steps       by which the two runs differ that give the time of a step
    prefill     prompts that are read at once, and how many tokens each has
    mixed       requests of different lengths; `lengths` the least and the most tokens of their prompts and answers
    """

    vocabulary: int
    prompt: int = 512
    output: int = 128
    steps: int = 128
    prefill: tuple[int, int] = (8, 2048)
    mixed: int = 256
    lengths: tuple[tuple[int, int], tuple[int, int]] = ((128, 1024), (64, 256))
    batches: Sequence[int] = BATCHES
    concurrency: Sequence[int] = CONCURRENCY

    def requests(self, count: int, length: int, tokens: int, seed: int) -> list[Request]:
        """Returns so many requests with prompts of one length."""
        chance = random.Random(seed)
        return [Request(chance.choices(range(self.vocabulary), k=length), tokens) for _ in range(count)]

    def different(self, seed: int) -> list[Request]:
        """Returns requests of different lengths."""
        chance, (prompts, answers) = random.Random(seed), self.lengths
        return [
            Request(chance.choices(range(self.vocabulary), k=chance.randint(*prompts)), chance.randint(*answers))
            for _ in range(self.mixed)
        ]


async def measure(engine: Engine, load: Load, found: Callable[[Record], None]) -> None:
    """Measure everything; `found` is given a part of the record whenever it is done."""
    await run(engine, load.requests(32, load.prompt, 8, 0), 32, stream=True)  # what is made at the first calls
    found({"step_ms": {str(batch): await step_ms(engine, load, batch) for batch in load.batches}})
    found({"prefill_tokens_per_s": await prefill(engine, load)})
    found({"throughput": await throughput(engine, load)})
    for users in load.concurrency:
        found({"online": {str(users): await online(engine, load, users)}})


async def step_ms(engine: Engine, load: Load, batch: int) -> float:
    """Returns milliseconds of a decoding step of so many requests: a long run less a short one, by the steps between;
    the median of several such pairs, after one that does not count."""
    few = 8

    async def seconds(tokens: int, seed: int) -> float:
        return (await run(engine, load.requests(batch, 64, tokens, seed), batch)).seconds

    pairs = [(await seconds(few, seed), await seconds(few + load.steps, seed)) for seed in range(_ROUNDS + 1)]
    return 1e3 * median(long - short for short, long in pairs[1:]) / load.steps


async def prefill(engine: Engine, load: Load) -> float:
    """Returns tokens a second of prompts that are read, each with one token answered."""
    count, length = load.prefill

    async def seconds(seed: int) -> float:
        return (await run(engine, load.requests(count, length, 1, 10 + seed), count)).seconds

    return count * length / await _fastest(seconds)


async def throughput(engine: Engine, load: Load) -> Record:
    """Returns what all requests of different lengths take that are there from the start."""
    requests = load.different(20)
    done = await run(engine, requests, len(requests))
    output = sum(answer.tokens for answer in done.answers)
    tokens = output + sum(len(request.prompt) for request in requests)
    amounts = {"requests": len(requests), "output_tokens": output, "tokens": tokens}
    return {f"{name}_per_s": amount / done.seconds for name, amount in amounts.items()}


async def online(engine: Engine, load: Load, users: int) -> Record:
    """Returns what so many users find, each of whom sends a request as soon as the last one is answered."""
    count = max(8, (4 if users < 64 else 3) * users)
    done = await run(engine, load.requests(count, load.prompt, load.output, 30), users, stream=True)
    times = {"ttft": [answer.first for answer in done.answers], "tpot": [answer.each for answer in done.answers]}
    record = {f"{name}_ms": 1e3 * median(values) for name, values in times.items()}
    record |= {f"{name}_p99_ms": 1e3 * quantiles(values, n=100)[-1] for name, values in times.items()}
    return record | {"output_tokens_per_s": sum(a.tokens for a in done.answers) / done.seconds, "requests": count}


@dataclass(frozen=True)
class Run:
    """Seconds that requests took, and their answers."""

    seconds: float
    answers: list[Answer]


async def run(engine: Engine, requests: Sequence[Request], at_once: int, stream: bool = False) -> Run:
    """Have requests answered, so many at a time."""
    left = iter(requests)
    begun = time.perf_counter()
    answers = await asyncio.gather(*(_one_after_the_other(engine, left, stream) for _ in range(at_once)))
    return Run(time.perf_counter() - begun, [answer for some in answers for answer in some])


async def _one_after_the_other(engine: Engine, left: Iterator[Request], stream: bool) -> list[Answer]:
    return [await _answer(engine, request, stream) for request in left]


async def _answer(engine: Engine, request: Request, stream: bool) -> Answer:
    begun = time.perf_counter()
    times: list[float] = []
    tokens = 0
    async for some in engine.answer(request, stream):
        times.append(time.perf_counter() - begun)
        tokens += some
    if tokens != request.tokens:
        raise RuntimeError(f"the engine answered {tokens} tokens where {request.tokens} were asked for")
    return Answer(times[0], times[-1], tokens)


async def _fastest(seconds: Callable[[int], Awaitable[float]]) -> float:
    """Returns the least of several runs with different prompts, after one that does not count."""
    return min([await seconds(seed) for seed in range(_ROUNDS + 1)][1:])
