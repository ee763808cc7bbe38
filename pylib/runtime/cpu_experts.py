"""The matmul of experts on this machine's CPU: `CpuExperts`.

There is no program for all experts. That of a dense weight runs for each expert that has slots, one after the other,
on its slices of the tensors of all. torch gathers the rows of x for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lowbit.dialect.errors import SpecError, TargetError
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.target import Target
from lowbit.pylib.build.driver import Artifact
from lowbit.pylib.runtime.eight_bit import make_eight_bit_runtime
from lowbit.pylib.runtime.interface import check_x_on_cpu
from lowbit.pylib.runtime.runtimes import make_runtime
from lowbit.pylib.torch_types import TORCH

Product = Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor]
ALL_SLOTS = 1 << 30
"""The size of token tiles: one has all slots of an expert."""


class CpuExperts:
    """Multiplies slots by the weights of their experts, of a spec whose `compute_from` is 1.

    Raises SpecError for weights with outliers.
    """

    def __init__(self, spec: MatmulSpec, target: Target) -> None:
        self.spec, self._out = spec, TORCH[spec.out_dtype]
        if spec.outliers:  # whose lines are those of all experts
            raise SpecError(f"({spec}) has outliers, which are not cut by expert; take a matmul per expert")
        one = replace(spec, n=spec.n // spec.experts, experts=1)
        self._product = _quantized_product(one, target) if spec.compute else _product(one, target)

    def run(
        self, x: Sequence[Tensor], rows: Tensor, tiles: Tensor, weight: Sequence[Tensor], tile: int
    ) -> Tensor:
        """Returns y [slots, n / experts], as `Launches.run` does."""
        check_x_on_cpu("cpu", *x, rows, tiles)
        y = torch.empty(len(rows), self.spec.outputs, dtype=self._out, device="cpu")
        for expert, first, end in tiles[1 : 1 + int(tiles[0, 0])].tolist():
            of_x = [_taken(t, rows[first:end]) for t in x]
            y[first:end] = self._product(of_x, [_slice(t, expert, self.spec.experts) for t in weight])
        return y

    def wants_order(self, tile: int, slots: int) -> bool:
        """Returns False: rows are taken expert by expert."""
        return False

    def kernel(self, tile: int, slots: int) -> Artifact:
        """Raises TargetError: there is none."""
        raise TargetError("target cpu has no kernel for all experts: each runs the program of a dense weight")


def _product(one: MatmulSpec, target: Target) -> Product:
    """Returns what multiplies x by the weight of one expert."""
    runtime = make_runtime(one, target, None)
    return lambda x, weight: runtime.matmul(x[0], weight)


def _quantized_product(one: MatmulSpec, target: Target) -> Product:
    """The same of values, scales and sums of x."""
    runtime = make_eight_bit_runtime(one, target, None)
    return lambda x, weight: runtime.multiply((x[0], x[1], x[2]), weight)


def _slice(tensor: Tensor, expert: int, experts: int) -> Tensor:
    """Returns the part of an expert, of a tensor of all."""
    size = tensor.shape[0] // experts
    return tensor[expert * size : (expert + 1) * size]


def _taken(tensor: Tensor, rows: Tensor) -> Tensor:
    """Returns these rows, also of types that torch can't index (float8)."""
    plain = tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor
    return plain.index_select(0, rows).view(tensor.dtype)
