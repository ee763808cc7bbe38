"""A sample of kernels that compute-sanitizer runs, one in a process: `python -m benchmarks.checked_kernels NAME`.

Sizes are small, but have several tiles for a block, tiles that are not full, and blocks that share work. Kernels get
random numbers, and their results are compared with the definition.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.base import KernelRequest, KernelSchedule
from lowbit.passes.kernels.decode.schedule import Schedule
from lowbit.passes.kernels.eight_bit_prefill.schedule import EightBitPrefillSchedule
from lowbit.passes.kernels.persistent.schedule import PrefillSchedule
from lowbit.passes.kernels.registry import family_of, request
from lowbit.passes.target import Target
from lowbit.pylib.build.driver import load
from lowbit.pylib.build.kernels import Artifacts
from lowbit.pylib.operator.expert_schema import sum_of_experts
from lowbit.pylib.operator.schema import describe
from lowbit.pylib.reference import agrees, matmul, of_slots, random_inputs, tolerance
from lowbit.pylib.runtime.activation import quantize_in_torch
from lowbit.pylib.runtime.devices import target_named
from lowbit.pylib.runtime.driver import current_stream
from lowbit.pylib.runtime.expert_matmul import expert_matmul, spec_of_experts
from lowbit.pylib.runtime.gpu import load_matmul
from lowbit.pylib.runtime.interface import argument_order
from lowbit.pylib.runtime.permuters import permuter
from lowbit.pylib.runtime.quantizers import gpu_quantizer
from lowbit.pylib.torch_types import TORCH
from lowbit.pylib.weights.packed import pack

WRONG = 3  # exit status of a process whose kernel gives wrong numbers
SIZES: dict[str, Any] = {"n": 1000, "k": 1024}
F8: dict[str, Any] = {"compute": "f8e4m3"}
I8: dict[str, Any] = {"compute": "i8"}


@dataclass(frozen=True)
class Case:
    """A kernel, and how many tokens it is given. schedule: None for what is chosen."""

    spec: MatmulSpec
    tokens: int
    schedule: KernelSchedule | None = None

    def request(self, target: Target) -> KernelRequest:
        """Returns the request for its kernel."""
        if self.schedule is not None:
            return request(self.spec, target, self.schedule)
        artifacts = Artifacts(self.spec, target, None)
        return artifacts.request(artifacts.token_tile(self.tokens))

    def is_right(self, target: Target) -> bool:
        """Multiplies on the GPU, and tells whether the result agrees with the definition."""
        made = self.request(target)
        spec, m = made.spec, self.tokens
        x, weight = random_inputs(spec, m)
        function = load_matmul(load(made, f"sanitized_{made.family}"), spec, target, 0)
        arguments = _tensors(spec, x, weight)
        for overlap in (False, True, True):  # as calls in a row
            addresses = [m if name == "m" else arguments[name].data_ptr() for name in argument_order(spec)]
            function(current_stream(0), overlap, *addresses)
        torch.cuda.synchronize()
        rounding: dict[str, Any] = family_of(made.schedule).rounding(spec, made.schedule)
        bound = tolerance(spec, x, **weight, **rounding)
        return bool(agrees(arguments["y"].cpu(), matmul(spec, x, **weight), bound).all())


def _u4(tokens: int, schedule: KernelSchedule | None = None, **others: Any) -> Case:
    return Case(MatmulSpec(**{"weight": "u4", "group_size": 128, **SIZES, **others}), tokens, schedule)


def _preset(name: str, tokens: int, schedule: KernelSchedule | None = None) -> Case:
    spec = MatmulSpec.preset(name, **SIZES, permuted=False)  # x is in the order of the codes
    return Case(spec, tokens, schedule)


CASES: Mapping[str, Case] = MappingProxyType(
    {
        "u4, 1 token": _u4(1, zeros="int", bias=True),
        "u4, 8 tokens, k in 2 parts": _u4(8, Schedule(tokens=8, warps_k=2, split_k=2)),
        "u4, 16 tokens, cluster of 2": _u4(16, Schedule(tokens=16, warps_k=2, split_k=2, cluster=2)),
        "u4, 50 tokens": _u4(50),
        "q4_k, 8 tokens": _preset("q4_k", 8),
        "SpQR, 1 token": _preset("spqr", 1),
        "SpQR, 16 tokens": _preset("spqr", 16),
        "SpQR, outliers by step": _preset("spqr", 16, Schedule(16, 1, 4, 2, 256, 2, wgmma=True, outliers_by_step=True)),
        "prefill": _u4(600, PrefillSchedule(32), zeros="int", act="bf16"),
        "prefill, last tiles cut": _u4(600, PrefillSchedule(32, last_tokens=16)),
        "prefill, cluster of 2": _u4(600, PrefillSchedule(32, cluster=2)),
        "prefill, k in 4 parts": _u4(300, PrefillSchedule(64, split_k=4), n=500, k=2048),
        "prefill, shared rounds": _u4(100, PrefillSchedule(104, stream_k="all"), n=20000, k=2048),
        "prefill, nf4": Case(MatmulSpec(**SIZES, weight="nf4", group_size=64), 300),
        "prefill, q4_k": _preset("q4_k", 300),
        "prefill, SpQR": _preset("spqr", 300),
        "i8, 16 tokens": _u4(16, zeros="int", **I8),
        "f8e4m3, folded": _u4(300, **F8, fold_scales=True),
        "f8e4m3, cluster of 2": _u4(600, EightBitPrefillSchedule(64, parts=2, cluster=2, last_tokens=32), **F8),
        "i8, wide panels": _u4(300, EightBitPrefillSchedule(64, 256, parts=2), **I8),
        "i8, codes in registers": _u4(300, EightBitPrefillSchedule(64, parts=2), weight="i3", **I8),
        "i8, shared rounds": _u4(60, EightBitPrefillSchedule(64, stream_k="even"), n=500, k=2048, **I8),
        "i8, k in 2 parts": _u4(300, EightBitPrefillSchedule(64, split_k=2, parts=2), n=500, k=2048, **I8),
    }
)


def quantizes(target: Target) -> bool:
    """Quantizes on the GPU, and tells whether that gives what the definition says, to the last bit."""
    x = torch.randn(300, SIZES["k"]).half()
    pairs = zip(gpu_quantizer(x.shape[1], "f16", "f8e4m3", target)(x.cuda()), quantize_in_torch(x, "f8e4m3"))
    return all(torch.equal(found.cpu().view(torch.uint8), exact.view(torch.uint8)) for found, exact in pairs)


def permutes(m: int, target: Target) -> bool:
    """Permutes columns on the GPU, and tells whether that gives what torch gives."""
    x, permutation = torch.randn(m, SIZES["k"]).half(), torch.randperm(SIZES["k"]).int()
    permute, there = permuter(x.shape[1], "f16", target), permutation.cuda()
    found = [permute(x.cuda(), there) for _ in range(2)]  # the second may overlap
    return all(torch.equal(each.cpu(), x.index_select(1, permutation)) for each in found)


def adds_up_experts(tokens: int, target: Target, count: int = 2, **others: Any) -> bool:
    """Adds up what 16 experts make of tokens on the GPU, each of which goes to `count`, some elsewhere, and tells
    whether the result agrees with the definition. others: fields of both matrices"""
    usual = {"weight": "u4", "group_size": 64, "zeros": "int", "act": "bf16", "out": "bf16", **others}
    gate_up = spec_of_experts(MatmulSpec(n=384, k=256, epilogue="silu_mul", **usual), 16)
    down = spec_of_experts(MatmulSpec(n=256, k=192, **usual), 16)
    (x, first), (_, second) = random_inputs(gate_up, tokens), random_inputs(down, 1)
    ids, weights = torch.randint(-1, 17, (tokens, count)), torch.rand(tokens, count)
    w13, w2 = ([t.cuda() for t in pack(spec, **given).tensors] for spec, given in ((gate_up, first), (down, second)))
    kernels = describe(gate_up, target, None), describe(down, target, None)
    tiles = [tile for tile in expert_matmul(gate_up, target).tiles if tile in expert_matmul(down, target).tiles]
    for _ in range(2):  # the second may overlap
        y = sum_of_experts(x.cuda(), ids.cuda(), weights.cuda(), w13, w2, *kernels, tiles)
    own, rows = ids.clamp(0, 15).flatten().numpy(), torch.arange(tokens).repeat_interleave(count)
    a = torch.from_numpy(of_slots(matmul(gate_up, x, **first)[rows], gate_up, own)).bfloat16()
    o = torch.from_numpy(of_slots(matmul(down, a, **second), down, own)).view(tokens, count, -1)
    expected = (o * torch.where((ids >= 0) & (ids < 16), weights, 0).unsqueeze(-1)).sum(1)
    rounded = 0.1 if others.get("compute") else 0.01
    return bool((y.cpu() - expected).norm() <= rounded * expected.norm())


CHECKS: Mapping[str, Callable[[Target], bool]] = MappingProxyType(
    {
        "quantize, 300 tokens": quantizes,
        "permute, 3 tokens": partial(permutes, 3),
        "permute, 301 tokens": partial(permutes, 301),
        "experts, 1 token": partial(adds_up_experts, 1),
        "experts, 9 tokens": partial(adds_up_experts, 9),
        "experts, 200 tokens": partial(adds_up_experts, 200),
        "experts, 900 tokens": partial(adds_up_experts, 900, count=4),
        "experts, i8, 300 tokens": partial(adds_up_experts, 300, **I8),
        "experts, permuted, 60 tokens": partial(adds_up_experts, 60, permuted=True),
    }
    | {name: case.is_right for name, case in CASES.items()}
)


def _tensors(spec: MatmulSpec, x: Tensor, weight: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns a kernel's tensors on the GPU by name. They are copied there: torch starts no kernel."""
    packed = zip((slot.name for slot in spec.tensors), pack(spec, **weight).tensors)
    quantized = quantize_in_torch(x, spec.byte_type) if spec.compute else (x,)
    found = dict(zip(("x", "x_scales", "x_sums"), quantized)) | dict(packed)
    found["y"] = torch.zeros(len(x), spec.n, dtype=TORCH[spec.out_dtype])
    return {name: tensor.cuda() for name, tensor in found.items()}


def main(name: str) -> None:
    """Multiply by one kernel: the work of a process."""
    sys.exit(0 if CHECKS[name](target_named(None)) else WRONG)


if __name__ == "__main__":
    main(sys.argv[1])
