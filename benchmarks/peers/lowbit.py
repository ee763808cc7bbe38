"""This compiler."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache, partial
from multiprocessing import get_context

import torch
from torch import Tensor

import lowbit
from benchmarks.cases import Case
from benchmarks.peers.peer import DEVIATION, ROUNDING, Call, Job, Layer, Peer, cores, finish
from lowbit.passes.targets import parse_target
from lowbit.pylib import MatmulSpec
from lowbit.pylib.matmul import Matmul
from lowbit.pylib.runtime.activation import QuantizedActivation
from lowbit.pylib.runtime.devices import this_machine
from lowbit.pylib.tune import timing
from lowbit.pylib.weights.packed import PackedWeight


class Lowbit(Peer):
    """Any spec. With products of 8 bits, quantizing x is not timed."""

    name = "lowbit"
    computes = (None, "f8e4m3", "f8e4m3+fold", "i8", "i8+fold")

    def spec(self, case: Case) -> MatmulSpec:
        """Returns what it computes."""
        return case.spec

    def prepare(self, jobs: Sequence[Job]) -> None:
        compile_kernels(((self.spec(case), m) for case, m in jobs), this_machine())

    def layer(self, case: Case) -> Layer:
        spec = self.spec(case)
        mm = lowbit.compile(spec)
        w = timing.random_weight(spec)

        def bind(w: PackedWeight) -> Call:
            return lambda x: mm(x, w)

        whole = Layer(
            label=case.weight if case.zeros == "none" else f"{case.weight}, {case.zeros} zeros",
            call=bind(w),
            clone=lambda: bind(timing.copies(w, 0)[1]),
            weight=w.folded if spec.folds else lambda: decode(w),
            bytes=w.nbytes,
            deviation=(ROUNDING if spec.folds else DEVIATION)[case.act],  # kernels for few tokens fold no scales
        )
        return self.encoded(whole, case) if case.compute else whole

    def encoded(self, whole: Layer, case: Case) -> Layer:
        """The same layer, which takes what `lowbit.quantize_activation` makes of x."""
        encode = partial(lowbit.quantize_activation, compute=case.spec.byte_type)
        return replace(whole, encode=encode, numbers=QuantizedActivation.dequantize)


class LowbitWithQuantization(Lowbit):
    """The same call on x in f16 or bf16: two kernels, of which the first quantizes x."""

    name = "lowbit+quantize"
    computes = ("f8e4m3", "f8e4m3+fold", "i8", "i8+fold")

    def encoded(self, whole: Layer, case: Case) -> Layer:
        def numbers(x: Tensor) -> Tensor:
            return lowbit.quantize_activation(x, compute=case.spec.byte_type).dequantize()

        return replace(whole, numbers=numbers)


class LowbitInvariant(Lowbit):
    """Any spec, with one order of sums for every number of tokens."""

    name = "lowbit-invariant"
    computes = (None, "i8", "f8e4m3")

    def spec(self, case: Case) -> MatmulSpec:
        return replace(case.spec, invariant=True)


def compile_kernels(wanted: Iterable[tuple[MatmulSpec, int]], target: str) -> None:
    """Fill the disk cache with the kernels for these numbers of tokens, in parallel. Raises the first error at the
    end."""
    finish([_workers().submit(_compile_kernel, spec, m, target) for spec, m in wanted])


@cache
def _workers() -> ProcessPoolExecutor:
    """Kept for the parts of a plan to come: processes take seconds to start."""
    return ProcessPoolExecutor(cores(), mp_context=get_context("spawn"))


def _compile_kernel(spec: MatmulSpec, m: int, target: str) -> None:
    Matmul(spec, parse_target(target), None).kernel(m)


def decode(w: PackedWeight) -> Tensor:
    """W [n, k] in f32 by the definition, without the compiler: scale * (value of the code - zero)."""
    spec = w.spec
    values = torch.tensor(spec.dtype.values(), dtype=torch.float32).to(w.device)
    codes = w.unpack().view(torch.uint8) & (spec.dtype.codes - 1)
    numbers = values[codes.int()]

    grouped = numbers.view(spec.n, spec.groups, -1)
    zeros = w.unpack_zeros()
    if zeros is not None:
        grouped -= zeros.float()[..., None]
    grouped *= w.unpack_scales().float()[..., None]
    return numbers
