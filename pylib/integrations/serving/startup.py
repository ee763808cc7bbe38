"""What happens once when a model is loaded: kernels are compiled for all numbers of tokens, and the log says which run.

Layers report what they multiply by as soon as they have it. Kernels for it are compiled in other processes while the
server reads the rest of the model; when the last layer is there, all of them are.
"""

from __future__ import annotations

import logging
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from torch import nn

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.base import KernelRequest
from lowbit.passes.targets import parse_target
from lowbit.pylib.build.ahead import MOST_JOBS, Ahead
from lowbit.pylib.build.kernels import kernel_choices, kernels_up_to
from lowbit.pylib.integrations.serving.experts import Experts
from lowbit.pylib.matmul import compile
from lowbit.pylib.nn.packed_module import PackedModule
from lowbit.pylib.nn.stacked_experts import target_of
from lowbit.pylib.runtime.batch_invariant import called

log = logging.getLogger("vllm.lowbit")  # vLLM's own handlers print it

TESTED = (26, 33)
"""The first and the last version of vLLM that was tested: 0.26 and 0.33."""


@dataclass(frozen=True)
class Limits:
    """What a process of the server runs.

    tokens     the most of one step
    processes  those that share this machine's cores
    """

    tokens: int = 1
    processes: int = 1


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
    """The layers of one model, from when it is made until the last of them is loaded.

    log   where it says which kernels run
    """

    def __init__(self, log: logging.Logger = log) -> None:
        self.log = log
        self.limits = Limits()
        self._waiting: set[int] = set()
        self._names: dict[Kind, Counter[str]] = {}
        self._ahead: Ahead | None = None

    def expect(self, method: object) -> None:
        """Wait for the layer of a method. All are made before the first is loaded."""
        self._waiting.add(id(method))

    def loaded(self, method: object, name: str, held: nn.Module) -> None:
        """Take note of what a layer multiplies by; if it is the last one, have all kernels ready, and say which.

        Raises TargetError and SpecError where one can't be compiled.
        """
        if id(method) not in self._waiting:  # loaded again
            return
        for kind in kinds(held):
            if kind not in self._names:
                self._compilers().start(kind.kernels(self.limits.tokens))
            self._names.setdefault(kind, Counter())[name.rpartition(".")[2]] += 1
        self._waiting.discard(id(method))
        if not self._waiting:
            self._finish()

    def _compilers(self) -> Ahead:
        if self._ahead is None:
            cores = min(MOST_JOBS, len(os.sched_getaffinity(0)))
            self._ahead = Ahead(max(1, cores // self.limits.processes))
        return self._ahead

    def _finish(self) -> None:
        compilers, names = self._compilers(), self._names
        compilers.finish()
        self._ahead, self._names = None, {}
        for kind, layers in names.items():
            kind.prepare(self.limits.tokens)
            self.log.info("lowbit: %d x %s: %s", layers.total(), ", ".join(sorted(layers)), kind)
        self.log.info("lowbit: %d kernels were compiled, the rest was found on disk", compilers.compiled)


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
