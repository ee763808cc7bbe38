"""What a method that is compared has to offer: a class that makes a layer of a weight of its own.

A peer quantizes or draws a weight as its users do, and gives the numbers it stands for, W [n, k] in f32, so that its
output can be checked. Packages are imported when a layer is made: one that is missing is reported and skipped.
A peer that lacks the format asked for runs the nearest that it has, and its label says which.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import Case
from lowbit.pylib.torch_types import TORCH

Call = Callable[[Any], Tensor]
Job = tuple[Case, int]  # a weight and a number of tokens
EIGHT_BITS = {"f8e4m3": torch.float8_e4m3fn, "i8": torch.int8}
DEVIATION = {"f16": 3e-3, "bf16": 2e-2}  # relative, in the Frobenius norm: outputs are rounded to act
ROUNDING = {"f16": 1e-2, "bf16": 4e-2}  # where weights or parts of a sum are rounded to act, too


@dataclass(frozen=True)
class Layer:
    """A weight, ready to multiply.

    label      what the peer runs, such as "int4, symmetric"
    call       x [m, k], as `encode` gives it -> x W^T [m, n]
    clone      the same call on a copy of the weight, elsewhere in memory
    weight     makes W [n, k] in f32, the numbers that the packed weight stands for
    bytes      of the packed weight
    deviation  largest relative error of a correct output
    encode     x in the form that `call` takes; not timed
    numbers    what an encoded x stands for, in f32
    """

    label: str
    call: Call
    clone: Callable[[], Call]
    weight: Callable[[], Tensor]
    bytes: int
    deviation: float
    encode: Callable[[Tensor], Any] = lambda x: x
    numbers: Callable[[Any], Tensor] = Tensor.float


class Peer:
    """A method.

    name           in plans and tables
    package        what it imports, None if it is always there
    install        what pip calls that
    computes       the types in which it can multiply x; None: as it is
    model_format   the format and columns per scale of the layers that `linear` makes; None if it makes none
    """

    name: str
    package: str | None = None
    install: str = ""
    computes: tuple[str | None, ...] = (None,)
    model_format: tuple[str, int] | None = None

    def missing(self) -> str | None:
        """Returns what to install; None if it is there."""
        if self.package is None or find_spec(self.package) is not None:
            return None
        return f"not installed: pip install {self.install}"

    def declines(self, case: Case, m: int) -> str | None:
        """Why the peer has nothing to show for this; None if it has."""
        if case.compute not in self.computes:
            return f"no products in {case.compute}" if case.compute else "products of 8 bits only"
        return self.lacks(case, m)

    def lacks(self, case: Case, m: int) -> str | None:
        """The same for a type of products that it has."""
        return None

    def prepare(self, jobs: Sequence[Job]) -> None:
        """Compile what the jobs will need, on all cores at once. Raises the first error when all else is done; what
        fails here fails again, and is reported, when it is measured."""

    def layer(self, case: Case) -> Layer:
        raise NotImplementedError

    def linear(self, layer: torch.nn.Linear) -> torch.nn.Module:
        """A layer of a model, in bf16 and with random weights, in the place of one without memory."""
        raise NotImplementedError

    def hidden_bytes(self, module: torch.nn.Module) -> int:
        """Bytes of a module's weight that are in none of its tensors."""
        return 0


def finish(futures: Iterable[Future[Any]]) -> None:
    """Wait for all of them, then raise the first error."""
    errors = [error for future in list(futures) if (error := future.exception())]
    if errors:
        raise errors[0]


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0))


def quantize_rows(x: Tensor, compute: str) -> tuple[Tensor, Tensor]:
    """x as values of 8 bits and a scale for each row, as users of a method that takes these do it."""
    kind = EIGHT_BITS[compute]
    largest = 127.0 if kind is torch.int8 else torch.finfo(kind).max
    scales = x.abs().amax(1).float() / largest
    values = (x.float() / scales[:, None]).clamp(-largest, largest)
    return (values.round() if kind is torch.int8 else values).to(kind), scales


def numbers_of(x: tuple[Tensor, Tensor]) -> Tensor:
    """Returns the numbers that values and scales of rows stand for."""
    values, scales = x
    return values.float() * scales.float().view(-1, 1)


def random_dense(case: Case) -> Tensor:
    """W [n, k] to quantize, in the activations' type."""
    return torch.randn(case.n, case.k, dtype=TORCH[case.act], device="cuda") * case.k**-0.5


def random_linear(layer: torch.nn.Linear) -> torch.nn.Linear:
    """A linear layer as one without memory is, on the GPU and with random weights."""
    dense = layer.to_empty(device="cuda").requires_grad_(False)
    dense.weight.normal_(0, dense.in_features**-0.5)
    if dense.bias is not None:
        dense.bias.zero_()
    return dense


def parameter_bytes(module: torch.nn.Module) -> int:
    return sum(p.nbytes for p in module.parameters())
