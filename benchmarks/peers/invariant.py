"""Dense matmuls that give a row the same bits in every batch, and what it takes to dequantize a weight for them."""

from __future__ import annotations

from importlib import import_module

import torch
from torch import Tensor

import lowbit
from benchmarks.cases import Case
from benchmarks.peers.lowbit import decode
from benchmarks.peers.peer import DEVIATION, Call, Layer, Peer
from benchmarks.peers.vendor import Multiply, Torch
from lowbit.pylib.tune import timing
from lowbit.pylib.weights.packed import PackedWeight

VLLM = ("vllm.model_executor.determinism.batch_invariant", "vllm.model_executor.layers.batch_invariant")  # new, old


class VllmInvariant(Torch):
    """vLLM's persistent matmul in Triton on an unquantized weight: its linear layers with VLLM_BATCH_INVARIANT."""

    name = "vllm-invariant"
    package = "vllm"
    install = "vllm"
    computes = (None,)

    def multiply(self) -> Multiply:
        return _batch_invariant().linear_batch_invariant


class TorchWithoutSplitK(Torch):
    """cuBLASLt, told not to split k: what vLLM's batch-invariant mode makes of torch's matmuls on Hopper."""

    name = "torch-no-split-k"
    computes = (None,)

    def multiply(self) -> Multiply:
        return _without_split_k


class Dequantizing(Peer):
    """Another's dense matmul, behind lowbit's kernel that writes the weight in x's type, at every call."""

    computes = (None,)

    def __init__(self, dense: Torch) -> None:
        self.name = f"{dense.name}+dequantize"
        self.package, self.install, self._dense = dense.package, dense.install, dense

    def layer(self, case: Case) -> Layer:
        mm, multiply = lowbit.compile(case.spec), self._dense.multiply()
        w = timing.random_weight(case.spec)

        def bind(w: PackedWeight) -> Call:
            return lambda x: multiply(x, mm.dequantize(w))

        return Layer(
            label=f"{case.weight}, dequantized to {case.act}",
            call=bind(w),
            clone=lambda: bind(timing.copies(w, 0)[1]),
            weight=lambda: decode(w),
            bytes=w.nbytes,
            deviation=DEVIATION[case.act],
        )


def _batch_invariant() -> object:
    """Returns vLLM's module of batch-invariant matmuls, which has moved."""
    for name in VLLM:
        try:
            return import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                raise
    raise ModuleNotFoundError(f"vLLM has no {' or '.join(VLLM)}")


def _without_split_k(x: Tensor, w: Tensor) -> Tensor:
    """Returns x W^T by cuBLASLt without split k, with torch's settings for other matmuls as they were."""
    cuda, kind = torch.backends.cuda, "bf16" if x.dtype == torch.bfloat16 else "fp16"
    flag = f"allow_{kind}_reduced_precision_reduction"
    library = cuda.preferred_blas_library()
    before = getattr(cuda.matmul, flag), getattr(cuda.matmul, f"{flag}_split_k")
    try:
        cuda.preferred_blas_library("cublaslt")
        setattr(cuda.matmul, flag, (False, False))
        return torch.nn.functional.linear(x, w)
    finally:
        setattr(cuda.matmul, flag, before)
        cuda.preferred_blas_library(library)
