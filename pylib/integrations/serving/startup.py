"""What happens once when a model is loaded: kernels are compiled for all numbers of tokens, and the log says which run.

Layers report what they multiply by as soon as they have it. Kernels for it are compiled in other processes while the
server reads the rest of the model, and while torch.compile works on it. The first call that needs one of them waits for
all: servers make it before they take requests.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from torch import nn

import lowbit
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.base import KernelRequest
from lowbit.passes.targets import parse_target
from lowbit.pylib.build.ahead import MOST_JOBS, Ahead
from lowbit.pylib.build.cache import source_fingerprint
from lowbit.pylib.build.kernels import kernel_choices, kernels_up_to
from lowbit.pylib.integrations.serving.experts import Experts
from lowbit.pylib.matmul import compile
from lowbit.pylib.nn.packed_module import PackedModule
from lowbit.pylib.nn.rotated import HadamardRotation
from lowbit.pylib.nn.stacked_experts import target_of
from lowbit.pylib.runtime.batch_invariant import called

log = logging.getLogger("vllm.lowbit")  # vLLM's own handlers print it

TESTED = (26, 33)
"""The first and the last version of vLLM that was tested: 0.26 and 0.33."""


@dataclass(frozen=True)
class Limits:
    """What a process of the server runs.

    tokens     the most of one step
    processes  those that share this machine's cores, and compile the same kernels
    rank       which of them this one is
    """

    tokens: int = 1
    processes: int = 1
    rank: int = 0

    def in_turn(self, kernels: Sequence[KernelRequest]) -> list[KernelRequest]:
        """Returns kernels in the order in which to compile them: those of this process's share first, by the time that
        they take; the other processes compile the rest meanwhile."""
        most_first = kernels[::-1]  # of many tokens, which are the largest programs
        mine = most_first[self.rank :: self.processes]
        return list(dict.fromkeys([*mine, *most_first]))


class Kind(Protocol):
    """Weights that the same kernels multiply."""

    def kernels(self, tokens: int) -> tuple[KernelRequest, ...]:
        """Returns what is launched for 1 to so many tokens."""
        ...

    def prepare(self, tokens: int) -> None:
        """Have these kernels ready in this process."""
        ...


@dataclass(frozen=True)
class MatmulKernels:
    """The kernels of weights that are not experts', on one target."""

    spec: MatmulSpec
    target: str
    wide_range: bool

    def kernels(self, tokens: int) -> tuple[KernelRequest, ...]:
        target = parse_target(self.target)
        return kernels_up_to(self.spec, target, tokens, self.wide_range) if target.is_gpu else ()

    def prepare(self, tokens: int) -> None:
        compile(self.spec, self.target).prepare(tokens, self.wide_range)

    def __str__(self) -> str:
        target = parse_target(self.target)
        if not target.is_gpu:
            return f"{self.spec}, on {target}"
        families = kernel_choices(self.spec, target).families(1 << 30)
        found = ", ".join(f"{family} from {first}" for first, family in families)
        return f"{self.spec}, on {target}; kernels by tokens: {found}"


class Startup:
    """The layers of one model, from when it is made until it is called.

    log   where it says which kernels run, and what took how long
    """

    def __init__(self, log: logging.Logger = log) -> None:
        self.log = log
        self.limits = Limits()
        self.seconds = 0.0  # in which weights were made
        self._waiting: set[int] = set()
        self._names: dict[Kind, Counter[str]] = {}
        self._identity = 0
        self._unready: list[Kind] = []
        self._ahead: Ahead | None = None

    @property
    def identity(self) -> str:
        """A text that is another where layers that are loaded do something else with what they are given, and for
        another lowbit: what a compiled graph of them holds as constants."""
        return f"{self._identity:x}"

    def expect(self, method: object) -> None:
        """Wait for the layer of a method. All are made before the first is loaded."""
        self._waiting.add(id(method))

    @contextmanager
    def making(self) -> Iterator[None]:
        """Counts the time in which a layer's weights are made of its tensors."""
        begun = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - begun

    def loaded(self, method: object, name: str, held: nn.Module) -> None:
        """Take note of what a layer multiplies by; if it is the last one, say which kernels run.

        Raises SpecError where none can.
        """
        if id(method) not in self._waiting:  # loaded again
            return
        found = list(kinds(held))
        self._identity += _number_of(name, found, held)
        for kind in found:
            if kind not in self._names:
                self._compilers().start(self.limits.in_turn(kind.kernels(self.limits.tokens)))
                self._unready.append(kind)
            self._names.setdefault(kind, Counter())[name.rpartition(".")[2]] += 1
        self._waiting.discard(id(method))
        if not self._waiting:
            self._end()

    def _compilers(self) -> Ahead:
        if self._ahead is None:
            cores = min(MOST_JOBS, len(os.sched_getaffinity(0)))
            self._ahead = Ahead(max(1, cores // self.limits.processes), self._get_ready)
        return self._ahead

    def _end(self) -> None:
        """Says what was loaded. Nothing is waited for, unless nobody will."""
        for kind, layers in self._names.items():
            self.log.info("lowbit: %d x %s: %s", layers.total(), ", ".join(sorted(layers)), kind)
        self.log.info("lowbit: weights were made in %.1f s, reading not counted", self.seconds)
        self._names, self.seconds = {}, 0.0
        compilers = self._compilers()
        if compilers.is_asked:
            compilers.close()
        else:
            self._get_ready()

    def _get_ready(self) -> None:
        """Have all kernels so far ready in this process. Raises TargetError where one can't be compiled."""
        begun = time.perf_counter()
        compilers, kinds = self._compilers(), self._unready
        self._ahead, self._unready = None, []
        compilers.finish()
        waited = time.perf_counter() - begun
        for kind in kinds:
            kind.prepare(self.limits.tokens)
        text = f"waited {waited:.1f} s for them, and read them in {time.perf_counter() - begun - waited:.1f} s"
        self.log.info("lowbit: %d kernels were compiled, the rest was found on disk; %s", compilers.compiled, text)


def _number_of(name: str, found: Sequence[Kind], held: nn.Module) -> int:
    """Returns a number for what a layer does, whatever its tensors hold. Those of all layers are added up, in any
    order."""
    modules = [
        (type(module).__name__, module.matrix.text if isinstance(module, HadamardRotation) else module.extra_repr())
        for module in held.modules()
    ]
    everything = repr((lowbit.__version__, source_fingerprint(), name, found, modules))
    return int.from_bytes(hashlib.sha256(everything.encode()).digest(), "big")


def kinds(held: nn.Module) -> Iterator[Kind]:
    """Yields what a layer multiplies by. On meta, nothing does."""
    if isinstance(held, Experts):
        if (of_experts := held.kernels) is not None:
            yield of_experts
        return
    for part in held.modules():
        if isinstance(part, PackedModule) and (target := target_of(part.codes.device)):
            yield MatmulKernels(called(part.spec), target, part.packed.wide_range)


@lru_cache(maxsize=1)
def check_version(version: str) -> None:
    """Warn once of a version of vLLM that is not among those tested."""
    found = re.match(r"0\.(\d+)\.", version)
    first, last = TESTED
    if found is None or not first <= int(found[1]) <= last:
        log.warning(
            "lowbit's plugin was tested with vLLM 0.%d to 0.%d, not with %s; if a model fails to load, install one of "
            "these, or a newer lowbit",
            first,
            last,
            version,
        )
