"""What comes with torch: cuBLAS in f16, bf16 and fp8, and aten's int4 matmul."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.cases import Case
from benchmarks.peers.peer import DEVIATION, Call, Layer, Peer, random_dense
from lowbit.pylib.torch_types import TORCH

Multiply = Callable[[Tensor, Tensor], Tensor]  # x [m, k], w [n, k] -> x W^T [m, n]
DEVIATION_FP8 = 1e-2  # fp8 tensor cores of Hopper keep fewer bits of a sum than f32 has


class Torch(Peer):
    """cuBLAS on an unquantized weight, f16 or bf16: what all speed-ups refer to, those of products in 8 bits, too."""

    name = "torch"
    computes = (None, "f8e4m3", "f8e4m3+fold", "i8", "i8+fold")

    def multiply(self) -> Multiply:
        """Returns what multiplies."""
        return torch.nn.functional.linear

    def layer(self, case: Case) -> Layer:
        w, multiply = random_dense(case), self.multiply()

        def bind(w: Tensor) -> Call:
            return lambda x: multiply(x, w)

        return Layer(
            label=case.act,
            call=bind(w),
            clone=lambda: bind(w.clone()),
            weight=w.float,
            bytes=w.nbytes,
            deviation=DEVIATION[case.act],
        )


class TorchFp8(Peer):
    """cuBLAS on fp8 (e4m3), activations and all, a scale per tensor. Quantizing the activations is not timed."""

    name = "torch-fp8"
    computes = (None, "f8e4m3", "f8e4m3+fold")

    def lacks(self, case: Case, m: int) -> str | None:
        if case.bits != 8 and not case.compute:
            return "8 bits only"
        return "n and k must be multiples of 16" if case.n % 16 or case.k % 16 else None

    def layer(self, case: Case) -> Layer:
        dense = random_dense(case).float()
        scale = dense.abs().max() / torch.finfo(torch.float8_e4m3fn).max
        w = (dense / scale).to(torch.float8_e4m3fn)
        del dense
        one = torch.ones((), device="cuda")

        def bind(w: Tensor) -> Call:
            # Fast accumulation is what inference runs: sums stay in the tensor cores' registers.
            multiply = partial(torch._scaled_mm, out_dtype=TORCH[case.act], use_fast_accum=True)
            return lambda x: multiply(x, w.t(), one, scale)

        return Layer(
            label="fp8 x fp8, scale per tensor",
            call=bind(w),
            clone=lambda: bind(w.clone()),
            weight=lambda: w.float() * scale,
            bytes=w.nbytes,
            deviation=max(DEVIATION_FP8, DEVIATION[case.act]),
            encode=lambda x: x.to(torch.float8_e4m3fn),
        )


class TinyGemm(Peer):
    """aten's int4 matmul, which torchao uses: 4 bits with float zeros, bf16 activations only."""

    name = "tinygemm"

    def lacks(self, case: Case, m: int) -> str | None:
        t = case.spec.dtype
        if t.kind not in ("uint", "int") or t.bits != 4:
            return "4-bit integers only"
        if case.group_size not in (32, 64, 128, 256):
            return "groups of 32, 64, 128 or 256"
        return "n must be a multiple of 8, k of 128" if case.n % 8 or case.k % 128 else None

    def layer(self, case: Case) -> Layer:
        size = case.group_size or case.k
        groups = case.k // size
        codes = torch.randint(0, 16, (case.n, case.k), dtype=torch.uint8, device="cuda")
        packed = torch._convert_weight_to_int4pack(codes[:, ::2] << 4 | codes[:, 1::2], 8)
        factors = torch.rand(groups, case.n, 2, device="cuda") * 0.01 + 0.005
        factors[..., 1] -= 0.01
        factors = factors.bfloat16()  # [groups, n, (scale, zero)]: (code - 8) * scale + zero

        def weight() -> Tensor:
            scale, zero = factors.float().transpose(0, 1)[..., None, :].unbind(-1)
            return ((codes.view(case.n, groups, size).float() - 8) * scale + zero).view(case.n, case.k)

        def bind(packed: Tensor, factors: Tensor) -> Call:
            return lambda x: torch._weight_int4pack_mm(x, packed, size, factors)

        return Layer(
            label="uint4, float zeros, bf16",
            call=bind(packed, factors),
            clone=lambda: bind(packed.clone(), factors.clone()),
            weight=weight,
            bytes=packed.nbytes + factors.nbytes,
            deviation=DEVIATION["bf16"],
            encode=Tensor.bfloat16,
        )
