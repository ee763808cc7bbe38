"""The methods that are compared: one class each, which makes a layer of a weight of its own.

A peer quantizes or draws a weight as its users do, and gives the numbers it stands for, W [n, k] in f32, so that its
output can be checked. Packages are imported when a layer is made: one that is missing is reported and skipped.
A peer that lacks the format asked for runs the nearest that it has, and its label says which.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor

import pylib
from benchmarks.cases import Case
from pylib import timing
from pylib.packed import TORCH, PackedWeight

Call = Callable[[Tensor], Tensor]
DEVIATION = {
    "f16": 3e-3,
    "bf16": 2e-2,
}  # relative, in the Frobenius norm; all round weights or outputs to act
DEVIATION_FP8 = 1e-2  # fp8 tensor cores of Hopper keep fewer bits of a sum than f32 has


@dataclass(frozen=True)
class Layer:
    """A weight, ready to multiply.

    label      what the peer runs, such as "int4, symmetric"
    call       x [m, k] -> x W^T [m, n]
    clone      the same call on a copy of the weight, elsewhere in memory
    weight     makes W [n, k] in f32, the numbers that the packed weight stands for
    bytes      of the packed weight
    deviation  largest relative error of a correct output
    encode     x in the type that `call` takes; not timed
    """

    label: str
    call: Call
    clone: Callable[[], Call]
    weight: Callable[[], Tensor]
    bytes: int
    deviation: float
    encode: Call = lambda x: x


class Peer:
    """A method. name: in plans and tables; package: what it imports, None if it is always there."""

    name: str
    package: str | None = None
    install: str = ""

    def missing(self) -> str | None:
        """What to install; None if it is there."""
        if self.package is None or find_spec(self.package) is not None:
            return None
        return f"not installed: pip install {self.install}"

    def declines(self, case: Case, m: int) -> str | None:
        """Why the peer has nothing to show for this; None if it has."""
        raise NotImplementedError

    def layer(self, case: Case) -> Layer:
        raise NotImplementedError


def random_dense(case: Case) -> Tensor:
    """W [n, k] to quantize, in the activations' type."""
    return torch.randn(case.n, case.k, dtype=TORCH[case.act], device="cuda") * case.k**-0.5


class Torch(Peer):
    """cuBLAS on an unquantized weight, f16 or bf16: what all speed-ups refer to."""

    name = "torch"

    def declines(self, case: Case, m: int) -> str | None:
        return None

    def layer(self, case: Case) -> Layer:
        w = random_dense(case)
        linear = torch.nn.functional.linear
        return Layer(
            label=case.act,
            call=lambda x: linear(x, w),
            clone=lambda: partial(linear, weight=w.clone()),
            weight=w.float,
            bytes=w.nbytes,
            deviation=DEVIATION[case.act],
        )


class TorchFp8(Peer):
    """cuBLAS on fp8 (e4m3), activations and all, a scale per tensor. Quantizing the activations is not timed."""

    name = "torch-fp8"

    def declines(self, case: Case, m: int) -> str | None:
        if case.bits != 8:
            return "8 bits only"
        return "n and k must be multiples of 16" if case.n % 16 or case.k % 16 else None

    def layer(self, case: Case) -> Layer:
        dense = random_dense(case).float()
        scale = dense.abs().max() / torch.finfo(torch.float8_e4m3fn).max
        w = (dense / scale).to(torch.float8_e4m3fn)
        del dense
        one = torch.ones((), device="cuda")

        def bind(w: Tensor) -> Call:
            return lambda x: torch._scaled_mm(x, w.t(), one, scale, out_dtype=TORCH[case.act])

        return Layer(
            label="fp8 x fp8, scale per tensor",
            call=bind(w),
            clone=lambda: bind(w.clone()),
            weight=lambda: w.float() * scale,
            bytes=w.nbytes,
            deviation=max(DEVIATION_FP8, DEVIATION[case.act]),
            encode=lambda x: x.to(torch.float8_e4m3fn),
        )


class Lowbit(Peer):
    """This compiler, any spec."""

    name = "lowbit"

    def declines(self, case: Case, m: int) -> str | None:
        return None

    def layer(self, case: Case) -> Layer:
        spec = case.spec
        mm = pylib.compile(spec)
        w = timing.random_weight(spec)

        def bind(w: PackedWeight) -> Call:
            return lambda x: mm(x, w)

        return Layer(
            label=case.weight if case.zeros == "none" else f"{case.weight}, {case.zeros} zeros",
            call=bind(w),
            clone=lambda: bind(timing.copies(w, 0)[1]),
            weight=lambda: decode(w),
            bytes=w.nbytes,
            deviation=DEVIATION[case.act],
        )


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


class Humming(Peer):
    """humming-kernels: any integer or float up to 8 bits. Compiles with nvcc: CUDA_HOME must be set."""

    name = "humming"
    package = "humming"
    install = "humming-kernels"

    def declines(self, case: Case, m: int) -> str | None:
        t = case.spec.dtype
        if t.kind == "table":
            return "no tables"
        if t.kind == "float" and t.exponent > 5 and case.act == "f16":
            return "floats of up to 5 exponent bits with f16"
        if case.zeros == "float":
            return "float zeros are not tried here"
        group = case.group_size
        return f"groups from 16 up, not {group}" if group is not None and group < 16 else None

    def layer(self, case: Case) -> Layer:
        from humming.layer import HummingLayer  # type: ignore[import-not-found]

        t = case.spec.dtype
        name = f"float{t.bits}e{t.exponent}m{t.mantissa}" if t.kind == "float" else f"int{t.bits}"
        config = {"dtype": name, "group_size": case.group_size or 0, "has_zero_point": case.zeros == "int"}
        layer = HummingLayer(
            shape_n=case.n, shape_k=case.k, weight_config=config, torch_dtype=TORCH[case.act]
        ).cuda()
        layer.load_from_unquantized(random_dense(case))
        schema = layer.weight_schema
        stored = {name: t.clone() for name, t in layer.state_dict().items()}
        layer.transform()
        zeros = "symmetric" if case.zeros == "none" else "integer zeros"
        return Layer(
            label=name if t.kind == "float" else f"{name}, {zeros}",
            call=layer,
            clone=lambda: copy.deepcopy(layer),
            weight=lambda: schema.dequant_tensors(stored).float(),
            bytes=_bytes(layer),
            deviation=DEVIATION[case.act],
        )


def _bytes(module: torch.nn.Module) -> int:
    return sum(p.nbytes for p in module.parameters())


class GemLite(Peer):
    """gemlite: unsigned integers of 1, 2, 4 and 8 bits. Tunes for seconds at the first call with a new m."""

    name = "gemlite"
    package = "gemlite"
    install = "gemlite"

    def declines(self, case: Case, m: int) -> str | None:
        t = case.spec.dtype
        if t.kind not in ("uint", "int") or t.bits not in (1, 2, 4, 8):
            return "integers of 1, 2, 4 and 8 bits only"
        if case.k % 32 or case.group_size is None or case.group_size % 32:
            return "k and the group size must be multiples of 32"
        return None

    def layer(self, case: Case) -> Layer:
        from gemlite import DType, GemLiteLinear  # type: ignore[import-not-found]

        t, groups = case.spec.dtype, case.spec.groups
        act = TORCH[case.act]
        codes = torch.randint(0, t.codes, (case.n, case.k), dtype=torch.uint8, device="cuda")
        scales = (torch.rand(case.n, groups, device="cuda") * 0.01 + 0.005).to(act)
        # Without zeros: one for the whole weight, in the middle. 1 bit has no middle.
        zeros: Tensor | int = (torch.rand(case.n, groups, device="cuda") * (t.codes - 1)).to(act)
        if case.zeros == "none" and t.bits > 1:
            zeros = t.codes // 2
        kind = DType.FP16 if case.act == "f16" else DType.BF16
        layer = GemLiteLinear(
            t.bits,
            group_size=case.group_size,
            in_features=case.k,
            out_features=case.n,
            input_dtype=kind,
            output_dtype=kind,
        )
        layer.pack(codes, scales, zeros, None)

        def weight() -> Tensor:
            shift = zeros.float()[..., None] if isinstance(zeros, Tensor) else zeros
            grouped = codes.view(case.n, groups, -1).float() - shift
            return (grouped * scales.float()[..., None]).view(case.n, case.k)

        return Layer(
            label=f"uint{t.bits}, {'symmetric' if isinstance(zeros, int) else 'float zeros'}",
            call=layer,
            clone=lambda: copy.deepcopy(layer),
            weight=weight,
            bytes=_bytes(layer),
            deviation=DEVIATION[case.act],
        )


class TinyGemm(Peer):
    """aten's int4 matmul, which torchao uses: 4 bits with float zeros, bf16 activations only."""

    name = "tinygemm"

    def declines(self, case: Case, m: int) -> str | None:
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


class BitsAndBytes(Peer):
    """bitsandbytes: NF4 and FP4 with f32 scales."""

    name = "bitsandbytes"
    package = "bitsandbytes"
    install = "bitsandbytes"
    formats = {"nf4": "nf4", "fp4_bnb": "fp4"}  # noqa: RUF012

    def declines(self, case: Case, m: int) -> str | None:
        if case.weight not in self.formats:
            return "nf4 and fp4_bnb only"
        if case.zeros != "none":
            return "no zeros"
        sizes = (32, 64, 128, 256, 512, 1024, 2048, 4096)
        return None if case.group_size in sizes else f"groups of {', '.join(map(str, sizes))}"

    def layer(self, case: Case) -> Layer:
        import bitsandbytes as bnb  # type: ignore[import-not-found]
        from bitsandbytes import functional  # type: ignore[import-not-found]

        kind = self.formats[case.weight]
        packed, state = functional.quantize_4bit(
            random_dense(case), blocksize=case.group_size, quant_type=kind
        )

        def bind(packed: Tensor, state: object) -> Call:
            return lambda x: bnb.matmul_4bit(x, packed, quant_state=state)

        return Layer(
            label=f"{kind}, f32 scales",
            call=bind(packed, state),
            clone=lambda: bind(packed.clone(), copy.deepcopy(state)),
            weight=lambda: functional.dequantize_4bit(packed, state).float().view(case.n, case.k),
            bytes=packed.nbytes + state.absmax.nbytes,
            deviation=DEVIATION[case.act],
        )


PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (Torch(), Lowbit(), TorchFp8(), Humming(), GemLite(), TinyGemm(), BitsAndBytes())
}
