"""FBGEMM GenAI: CUTLASS kernels for Hopper that multiply 4-bit weights by bf16 or fp8 activations, for many tokens."""

from __future__ import annotations

from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import Case
from benchmarks.peers.peer import DEVIATION, ROUNDING, Call, Layer, Peer, numbers_of, quantize_rows

LIBRARY = "experimental/gen_ai/fbgemm_gpu_experimental_gen_ai.so"
GROUP = 128


class Fbgemm(Peer):
    """Signed 4-bit integers in groups of 128, in an order of its own. With fp8, scales of groups are e4m3, and a scale
    times a code is rounded to e4m3; scales of rows are f32."""

    name = "fbgemm"
    package = "fbgemm_gpu"
    install = "fbgemm-gpu-genai"
    computes = (None, "f8e4m3")

    def lacks(self, case: Case, m: int) -> str | None:
        t = case.spec.dtype
        if t.kind not in ("uint", "int") or t.bits != 4 or case.group_size != GROUP or case.zeros != "none":
            return "4-bit integers in groups of 128, without zeros"
        return None if case.act == "bf16" else "bf16 only"

    def layer(self, case: Case) -> Layer:
        load_library()
        return _of_fp8(case) if case.compute else _of_bf16(case)


@cache
def load_library() -> None:
    """The operators alone: the package would look for others."""
    spec = find_spec("fbgemm_gpu")
    (folder,) = spec.submodule_search_locations or () if spec else ()
    torch.ops.load_library(str(Path(folder) / LIBRARY))


def _of_bf16(case: Case) -> Layer:
    codes, ops = _random_codes(case), torch.ops.fbgemm
    scales = (torch.rand(case.k // GROUP, case.n, device="cuda") * 0.01 + 0.005).bfloat16()
    packed, shuffled = ops.preshuffle_i4(_packed(codes), scales)
    tensors = packed, shuffled, torch.zeros_like(scales)

    def bind(tensors: tuple[Tensor, ...]) -> Call:
        return lambda x: ops.bf16i4bf16_shuffled(x, *tensors)

    return Layer(
        label="int4 x bf16",
        call=bind(tensors),
        clone=lambda: bind(tuple(t.clone() for t in tensors)),
        weight=lambda: _scaled(codes, scales.float()),
        bytes=sum(t.nbytes for t in tensors),
        deviation=ROUNDING["bf16"],
    )


def _of_fp8(case: Case) -> Layer:
    codes, ops = _random_codes(case), torch.ops.fbgemm
    scales = (torch.rand(case.k // GROUP, case.n, device="cuda") * 16 + 8).to(torch.float8_e4m3fn)
    rows = torch.rand(case.n, device="cuda") * 5e-4 + 5e-4
    packed, shuffled = ops.preshuffle_i4(_packed(codes), scales)

    def bind(packed: Tensor, rows: Tensor, shuffled: Tensor) -> Call:
        return lambda x: ops.f8i4bf16_shuffled(x[0], packed, x[1], rows, shuffled)

    def weight() -> Tensor:
        rounded = _scaled(codes, scales.float()).to(torch.float8_e4m3fn)
        return rounded.float() * rows[:, None]

    return Layer(
        label="int4 x fp8, scales of groups in e4m3",
        call=bind(packed, rows, shuffled),
        clone=lambda: bind(packed.clone(), rows.clone(), shuffled.clone()),
        weight=weight,
        bytes=packed.nbytes + rows.nbytes + shuffled.nbytes,
        deviation=DEVIATION["bf16"],
        encode=partial(quantize_rows, compute="f8e4m3"),
        numbers=numbers_of,
    )


def _random_codes(case: Case) -> Tensor:
    return torch.randint(-8, 8, (case.n, case.k), dtype=torch.int8, device="cuda")


def _packed(codes: Tensor) -> Tensor:
    """Two codes to a byte, the first in its low half."""
    return (codes[:, 1::2] << 4 | codes[:, ::2] & 15).contiguous()


def _scaled(codes: Tensor, scales: Tensor) -> Tensor:
    """Codes [n, k] times scales [k / 128, n], in f32."""
    grouped: Any = codes.float().view(len(codes), -1, GROUP) * scales.T[:, :, None]
    return grouped.reshape(codes.shape)
