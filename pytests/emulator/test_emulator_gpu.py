"""The emulator against an NVIDIA GPU: the same PTX, the same inputs, bit for bit."""

from __future__ import annotations

import ctypes
import re
import zlib
from typing import Any

import numpy as np
import pytest
from emulator_kernel import Array, apply, apply_ptx

pytestmark = pytest.mark.gpu

RNG = np.random.default_rng(8)  # for every test its own, so that a failure comes again
NAMES = {16: "u2", 32: "u4", 64: "u8"}


def words(bits: int, count: int) -> Array:
    """Edge cases of integers and of floats of this width, then random patterns."""
    mantissas = {16: (10, 7), 32: (23,), 64: (52,)}[bits]
    top = 1 << bits - 1
    edges = {0, 1, 2, 31, 32, 33, top - 1, top, top + 1, 2 * top - 1}
    for mantissa in mantissas:
        infinity = top - (1 << mantissa)
        one = infinity // 2 // (1 << mantissa) * (1 << mantissa)
        for code in (1 << mantissa, one, one + 1, infinity - 1, infinity, infinity + 1, infinity + (1 << mantissa - 1)):
            edges |= {code, code | top}
    drawn = RNG.integers(0, 2**bits, count - len(edges), dtype=NAMES[bits])
    return RNG.permutation(np.concatenate([np.array(sorted(edges), NAMES[bits]), drawn]))


def on_gpu(asm: str, inputs: list[Array], outputs: tuple[Any, ...]) -> list[Array]:
    """What `apply` does, by the driver: it compiles the PTX and runs it."""
    import torch

    def check(code: int) -> None:
        assert code == 0, f"CUDA error {code}"

    cuda = ctypes.CDLL("libcuda.so.1")
    results = [np.zeros(len(inputs[0]), dtype) for dtype in outputs]
    tensors = [torch.from_numpy(np.ascontiguousarray(x).view(np.uint8)).cuda() for x in (*inputs, *results)]
    torch.cuda.synchronize()
    source, grid = apply_ptx(asm, inputs, outputs)
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    check(cuda.cuModuleLoadData(ctypes.byref(module), source.encode() + b"\0"))
    check(cuda.cuModuleGetFunction(ctypes.byref(function), module, b"k"))
    addresses = [ctypes.c_uint64(tensor.data_ptr()) for tensor in tensors]
    params = (ctypes.c_void_p * len(addresses))(*(ctypes.addressof(address) for address in addresses))
    check(cuda.cuLaunchKernel(function, grid, 1, 1, 256, 1, 1, 0, None, params, None))
    torch.cuda.synchronize()
    found = tensors[len(inputs) :]
    values = [tensor.cpu().numpy().view(x.dtype) for tensor, x in zip(found, results)]
    check(cuda.cuModuleUnload(module))
    return values


def compare(asm: str, inputs: list[Array], *outputs: Any, any_nan: bool = False) -> None:
    """Bit for bit; with any_nan, one NaN of f32 is as good as another."""
    emulated = apply(asm, *inputs, out=outputs)
    for got, expected in zip(emulated, on_gpu(asm, inputs, outputs)):
        unequal = got != expected
        if any_nan:
            unequal &= ~(np.isnan(got.view(np.float32)) & np.isnan(expected.view(np.float32)))
        differs = np.flatnonzero(unequal)[:5].tolist()
        report = [([hex(x[i]) for x in inputs], hex(got[i]), hex(expected[i])) for i in differs]
        assert not report, f"{asm}: (inputs, emulator, GPU) {report}"


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    global RNG
    RNG = np.random.default_rng(zlib.crc32(request.node.name.encode()))


@pytest.fixture(autouse=True)
def hopper() -> None:
    import torch

    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the tests' PTX is for sm_90a")
    torch.zeros(1, device="cuda")  # makes the context


INTEGERS = ("u16", "s16", "u32", "s32", "u64", "s64")
HALVES = ("f16", "bf16", "f16x2", "bf16x2")
ROUNDINGS = ("rn", "rz", "rm", "rp")

TWO = [f"{name}.{kind}" for kind in INTEGERS for name in ("add", "sub", "mul.lo", "mul.hi", "min", "max")]
TWO += [f"{name}.{fmt}" for fmt in HALVES for name in ("add.rn", "sub.rn", "mul.rn", "min", "max", "min.NaN")]
TWO += [f"{name}.{mode}.f32" for name in ("add", "sub", "mul") for mode in (*ROUNDINGS, "rn.ftz")]
TWO += ["add.sat.f32", "mul.ftz.f16", "min.f32", "max.ftz.f32", "max.NaN.f32", "div.rn.f32", "add.sat.s32"]
TWO += ["min.relu.s32", "max.relu.s32"]
TWO += ["add.u16x2", "set.eq.u32.f16x2", *(f"prmt.b32.{mode}" for mode in ("rc8", "ecl", "ecr", "rc16"))]


@pytest.mark.parametrize("name", TWO)
def test_two_operands(name: str) -> None:
    kind = name.split(".")[-1]
    bits = 32 if kind.endswith("x2") or "prmt" in name else int(kind.lstrip("usbf"))
    a, b = words(bits, 20000), words(bits, 20000)
    last = ", %b, %b" if "prmt" in name else ", %b"
    compare(f"{name} %x, %a{last};", [a, b], NAMES[bits])


THREE = ["prmt.b32", "prmt.b32.f4e", "prmt.b32.b4e", "bfe.u32", "bfe.s32", "mad.lo.u32", "mad.hi.s32"]
THREE += [f"shf.{direction}.{mode}.b32" for direction in "lr" for mode in ("wrap", "clamp")]
THREE += [f"fma.rn.{fmt}" for fmt in HALVES] + [f"fma.{mode}.f32" for mode in ROUNDINGS]
THREE += ["fma.rn.relu.f16x2", "fma.rn.ftz.f32", "fma.rn.sat.f32", "dp4a.s32.u32", "dp4a.u32.u32"]
THREE += ["vabsdiff4.u32.u32.u32"]


@pytest.mark.parametrize("name", THREE)
def test_three_operands(name: str) -> None:
    bits = 16 if name.endswith("f16") else 32
    inputs = [words(bits, 50000) for _ in range(3)]
    if name.startswith(("shf", "bfe")):
        inputs[2] = inputs[2] % 70
    if name.startswith("bfe"):
        inputs[1] = inputs[1] % 70
    compare(f"{name} %x, %a, %b, %c;", inputs, NAMES[bits])


ONE = [("b32", "b32", name) for name in ("popc.b32", "clz.b32", "brev.b32", "neg.s32", "abs.s32", "not.b32")]
for sign in "us":
    for mode in ("rni", "rzi", "rmi", "rpi"):
        ONE += [("b16", "b32", f"cvt.{mode}.{sign}32.f16"), ("b32", "b32", f"cvt.{mode}.{sign}32.f32")]
    ONE += [("b32", "b64", f"cvt.rzi.{sign}64.f32"), ("b64", "b32", f"cvt.rzi.{sign}32.f64")]
    ONE += [("b32", "b32", f"cvt.{mode}.f32.{sign}32") for mode in ROUNDINGS]
ONE += [("b64", "b32", f"cvt.{mode}.f32.{kind}64") for mode in ROUNDINGS for kind in "usf"]
ONE += [("b32", "b16", f"cvt.{mode}.{fmt}.f32") for mode in ("rn", "rz") for fmt in ("f16", "bf16")]
ONE += [("b16", "b32", name) for name in ("cvt.f32.f16", "cvt.f32.bf16")]
for fmt in ("e4m3x2", "e5m2x2"):
    ONE += [("b16", "b32", f"cvt.rn.f16x2.{fmt}"), ("b32", "b16", f"cvt.rn.satfinite.{fmt}.f16x2")]
ONE += [("b32", "b32", name) for name in ("cvt.rna.tf32.f32", "cvt.rni.f32.f32", "cvt.sat.f32.f32")]
ONE += [("b32", "b32", name) for name in ("sqrt.rn.f32", "rcp.rn.f32")]


@pytest.mark.parametrize(("source", "target", "name"), ONE)
def test_one_operand(source: str, target: str, name: str) -> None:
    bits = int(source[1:])
    a = np.arange(2**16, dtype=np.uint16) if bits == 16 else words(bits, 50000)
    # A conversion to f32 gives the canonical NaN (PTX ISA 9.7.9.21), says the text; an H200 keeps the payload.
    any_nan = re.fullmatch(r"cvt\S*\.t?f32\.\w+", name) is not None
    compare(f"{name} %x, %a;", [a], NAMES[int(target[1:])], any_nan=any_nan)


@pytest.mark.parametrize("target", ["f16x2", "bf16x2", "satfinite.e4m3x2", "satfinite.e5m2x2"])
def test_packing(target: str) -> None:
    compare(f"cvt.rn.{target}.f32 %x, %a, %b;", [words(32, 50000), words(32, 50000)], "u2" if "m" in target else "u4")


def test_bfi() -> None:
    position, length = words(32, 50000) % 70, words(32, 50000) % 70
    compare("bfi.b32 %x, %a, %b, %c, %d;", [words(32, 50000), words(32, 50000), position, length], "u4")


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
@pytest.mark.parametrize("clamp", [0x1F, 0x181F, 0x1800, 0x0])
def test_shfl(mode: str, clamp: int) -> None:
    compare(f"shfl.sync.{mode}.b32 %x|%y, %a, 5, {clamp}, -1;", [words(32, 256)], "u4", bool)


MMA = [
    "m16n8k16.row.col.f32.f16.f16.f32",
    "m16n8k16.row.col.f32.bf16.bf16.f32",
    "m16n8k8.row.col.f32.f16.f16.f32",
    "m16n8k16.row.col.f16.f16.f16.f16",
    "m16n8k32.row.col.f32.e4m3.e4m3.f32",
    "m16n8k32.row.col.f32.e5m2.e4m3.f32",
    "m16n8k32.row.col.s32.s8.u8.s32",
    "m16n8k32.row.col.satfinite.s32.u8.s8.s32",
    "m16n8k16.row.col.s32.s8.s8.s32",
    "m16n8k64.row.col.s32.s4.u4.s32",
    "m16n8k8.row.col.f32.tf32.tf32.f32",
    "m16n8k4.row.col.f32.tf32.tf32.f32",
]


@pytest.mark.parametrize("name", MMA)
def test_mma(name: str) -> None:
    """Small whole numbers, whose sums are exact in every format; each register is made from the lane's own word."""
    shape, *_, result, first, second, _ = name.split(".")
    codes = {
        "f16": np.arange(-8, 9).astype(np.float16).view(np.uint16),
        "bf16": (np.arange(-8, 9).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16),
        "tf32": np.arange(-8, 9).astype(np.float32).view(np.uint32),
        "e4m3": np.array([0, 0x38, 0xB8, 0x40, 0x44, 0xC0], np.uint8),
        "e5m2": np.array([0, 0x3C, 0xBC, 0x40, 0x42, 0xC0], np.uint8),
    }

    def drawn(kind: str, count: int) -> list[Array]:
        if kind not in codes:
            return [RNG.integers(0, 2**32, 256, dtype=np.uint32) for _ in range(count)]
        return [RNG.choice(codes[kind], 1024 // codes[kind].itemsize).view(np.uint32) for _ in range(count)]

    bits = {"f16": 16, "bf16": 16, "tf32": 32, "s4": 4, "u4": 4}.get(first, 8)
    halves = int(shape.split("k")[1]) * bits // 128
    sums = 2 if result == "f16" else 4
    inputs = drawn(first, 2 * halves) + drawn(second, halves)
    names = [f"%{letter}" for letter in "abcdef"[: len(inputs)]]
    a, b = "{" + ", ".join(names[: 2 * halves]) + "}", "{" + ", ".join(names[2 * halves :]) + "}"
    c = "{" + ", ".join(["%r50"] * sums) + "}"
    d = "{" + ", ".join(f"%{letter}" for letter in "xyzw"[:sums]) + "}"
    start = "mov.b32 %r50, 0x7ffffff0;" if "satfinite" in name else "mov.b32 %r50, 0;"
    compare(f"{start} mma.sync.aligned.{name} {d}, {a}, {b}, {c};", inputs, *["u4"] * sums)
