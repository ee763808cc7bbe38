"""The matmul of experts on this machine's CPU: `CpuExperts`.

There is no program for all experts. That of a dense weight runs for each expert that has slots, one after the other,
on its slices of the tensors of all. Outliers are not cut: a program reads its own by the number of its first row block.
torch gathers the rows of x for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lowbit.dialect.errors import TargetError
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.target import Target
from lowbit.pylib.build.driver import Artifact
from lowbit.pylib.runtime.eight_bit import make_eight_bit_runtime
from lowbit.pylib.runtime.interface import check_cpu, check_x_on_cpu
from lowbit.pylib.runtime.permuters import permuter
from lowbit.pylib.torch_types import TORCH

Product = Callable[[Sequence[Tensor], Sequence[Tensor], int], Tensor]
"""Returns y of x (or its values, scales and sums), the weight of one expert, and the number of its first row block."""
ALL_SLOTS = 1 << 30
"""The size of token tiles: one has all slots of an expert."""


class CpuExperts:
    """Multiplies slots by the weights of their experts, of a spec whose `compute_from` is 1."""

    def __init__(self, spec: MatmulSpec, target: Target) -> None:
        self.spec, self._out = spec, TORCH[spec.out_dtype]
        one = replace(spec, n=spec.n // spec.experts, experts=1)
        self._row_blocks = one.packing.row_blocks
        self._product = _quantized_product(one, target) if spec.compute else _product(one, target)

    def run(
        self, x: Sequence[Tensor], rows: Tensor, tiles: Tensor, weight: Sequence[Tensor], tile: int
    ) -> Tensor:
        """Returns y [slots, n / experts], as `Launches.run` does."""
        check_x_on_cpu("cpu", *x, rows, tiles)
        check_cpu("cpu", weight[0])
        y = torch.empty(len(rows), self.spec.outputs, dtype=self._out, device="cpu")
        for expert, first, end in tiles[1 : 1 + int(tiles[0, 0])].tolist():
            of_x = [_taken(t, rows[first:end]) for t in x]
            y[first:end] = self._product(of_x, self._weight_of(expert, weight), expert * self._row_blocks)
        return y

    def _weight_of(self, expert: int, weight: Sequence[Tensor]) -> list[Tensor]:
        """Returns the part of an expert, of the tensors of all; of outliers all there are."""
        named, experts = zip(self.spec.tensors, weight), self.spec.experts
        return [t if slot.index == "sparse" else _slice(t, expert, experts) for slot, t in named]

    def wants_order(self, tile: int, slots: int) -> bool:
        """Returns False: rows are taken expert by expert."""
        return False

    def kernel(self, tile: int, slots: int) -> Artifact:
        """Raises TargetError: there is none."""
        raise TargetError("target cpu has no kernel for all experts: each runs the program of a dense weight")


def _product(one: MatmulSpec, target: Target) -> Product:
    """Returns what multiplies x by the weight of one expert."""
    from lowbit.pylib.runtime.cpu import cpu_matmul

    program, permute = cpu_matmul(one, 1), permuter(one.k, one.act, target)

    def product(x: Sequence[Tensor], weight: Sequence[Tensor], first_block: int) -> Tensor:
        if not one.permuted:
            return program.matmul(x[0], weight, first_block)
        *in_order, permutation = weight
        return program.matmul(permute(x[0], permutation), in_order, first_block)

    return product


def _quantized_product(one: MatmulSpec, target: Target) -> Product:
    """The same of values, scales and sums of x, whose weights have no outliers."""
    runtime = make_eight_bit_runtime(one, target, None)
    return lambda x, weight, first_block: runtime.multiply((x[0], x[1], x[2]), weight)


def _slice(tensor: Tensor, expert: int, experts: int) -> Tensor:
    """Returns the part of an expert, of a tensor of all."""
    size = tensor.shape[0] // experts
    return tensor[expert * size : (expert + 1) * size]


def _taken(tensor: Tensor, rows: Tensor) -> Tensor:
    """Returns these rows, also of types that torch can't index (float8)."""
    plain = tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor
    return plain.index_select(0, rows).view(tensor.dtype)
