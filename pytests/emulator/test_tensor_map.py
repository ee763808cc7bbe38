"""Tensor maps, and cp.async.bulk.tensor of the emulator with them."""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from emulator_kernel import HEADER
from emulator_pipeline import wait

from lowbit.dialect.errors import EmulatorError, SpecError, TargetError
from lowbit.pylib.emulator import Emulator
from lowbit.pylib.runtime import driver
from lowbit.pylib.runtime.tensor_map import TensorMap

RNG = np.random.default_rng(3)
COPY = "cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"


def kernel(
    corner: tuple[int, ...],
    count: int,
    copy: str = COPY,
    *,
    offset: int = 0,
    cluster: int = 1,
    rest: str = "",
    expect: int = 0,
) -> str:
    """Thread 0 copies a box of `count` bytes, and all threads bring it to p1. `corner` in PTX's order."""
    place = "{" + ", ".join(map(str, corner)) + "}"
    size = f".explicitcluster\n.reqnctapercluster {cluster}, 1, 1" if cluster > 1 else ""
    n = max(count // 512, 1)
    moves = "".join(f"ld.shared.b32 %r10, [%r4+{i}]; st.global.b32 [%rd0+{i}], %r10;" for i in range(0, n * 512, 512))
    return f"""{HEADER}.visible .entry k(.param .align 64 .b8 map[128], .param .u64 p1) {size}
{{
    .reg .pred %p<10>; .reg .b16 %rs<4>; .reg .b32 %r<64>; .reg .b64 %rd<16>;
    .shared .align 1024 .b8 smem[{count + 1024}]; .shared .align 8 .b8 bars[8];
    mov.u32 %r0, %tid.x; mov.u32 %r1, %cluster_ctarank; mov.u32 %r2, bars; mov.u32 %r5, smem;
    add.u32 %r6, %r5, {offset};
    mad.lo.u32 %r4, %r0, 4, %r6; ld.param.u64 %rd0, [p1]; mad.wide.u32 %rd0, %r0, 4, %rd0;
    mad.wide.u32 %rd0, %r1, {count}, %rd0; setp.eq.u32 %p1, %r0, 0;
    mov.b64 %rd3, map; cvta.param.u64 %rd4, %rd3; prefetch.param.tensormap [map]; prefetch.tensormap [%rd4];
    @%p1 mbarrier.init.shared.b64 [%r2], 1; fence.mbarrier_init.release.cluster;
    barrier.cluster.arrive.relaxed; barrier.cluster.wait; mov.u16 %rs1, 3;
    createpolicy.fractional.L2::evict_last.b64 %rd9, 1.0;
    @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r2], {expect or count}; setp.eq.and.u32 %p2, %r1, 0, %p1;
    @%p2 {copy.format(rank=len(corner))} [%r6], [%rd4, {place} ], [%r2]{rest};
    {wait("%r2", 0)} {moves}
    ret;
}}
"""


def copied(tensor: TensorMap, corner: tuple[int, ...], block: int = 128, **options: Any) -> np.ndarray:
    """The words that arrive, as bytes; `corner` in NumPy's order."""
    cluster = options.get("cluster", 1)
    out = np.zeros(cluster * max(tensor.box_bytes, 512), np.uint8)
    source = kernel(corner[::-1], tensor.box_bytes, **options)
    Emulator(source).launch("k", grid=cluster, block=block, args=[tensor, out], racecheck=True)
    return out


def box(x: np.ndarray, corner: tuple[int, ...], shape: tuple[int, ...]) -> np.ndarray:
    """Element by element, with zeros outside."""
    out = np.zeros(shape, x.dtype)
    for place in itertools.product(*map(range, shape)):
        at = tuple(c + i for c, i in zip(corner, place))
        if all(0 <= i < n for i, n in zip(at, x.shape)):
            out[place] = x[at]
    return out


@pytest.mark.parametrize("corner", [(0, 0), (3, 8), (-2, -5), (40, 90), (1000, 0)])
def test_box(corner: tuple[int, int]) -> None:
    """At the edges zeros, which count at the mbarrier too."""
    x = RNG.integers(0, 2**16, (45, 96)).astype(np.uint16)
    tensor = TensorMap(x, "bf16", x.shape, (16, 32))
    np.testing.assert_array_equal(copied(tensor, corner).view(np.uint16).reshape(16, 32), box(x, corner, (16, 32)))


def test_strides() -> None:
    """Rows that are apart in memory; every second row; and a row twice as long as the tensor says."""
    x = RNG.integers(0, 2**32, (20, 48), dtype=np.uint32)
    tensor = TensorMap(x, "u32", (10, 40), (8, 16), strides_bytes=(384,))
    expected = box(x[::2, :40], (4, 30), (8, 16))
    np.testing.assert_array_equal(copied(tensor, (4, 30)).view(np.uint32).reshape(8, 16), expected)


@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
def test_ranks(rank: int) -> None:
    shape, boxed, corner = (3, 4, 5, 6, 64)[-rank:], (2, 1, 2, 2, 32)[-rank:], (1, 3, 2, 5, 16)[-rank:]
    x = RNG.standard_normal(shape).astype(np.float32)
    out = copied(TensorMap(x, "f32", shape, boxed), corner, block=min(128, int(np.prod(boxed))))
    size = int(np.prod(boxed))
    np.testing.assert_array_equal(out.view(np.float32)[:size].reshape(boxed), box(x, corner, boxed))


@pytest.mark.parametrize("offset", [0, 128, 640])
@pytest.mark.parametrize(("swizzle", "rows"), [(128, 16), (64, 16), (32, 32)])
def test_swizzle(swizzle: int, rows: int, offset: int) -> None:
    """Byte b of the box is at b with the chunk's number exclusive-or bits of the address in the 1024-byte atom."""
    x = RNG.integers(0, 2**16, (64, 128)).astype(np.uint16)
    shape = (rows, swizzle // 2)
    got = copied(TensorMap(x, "f16", x.shape, shape, swizzle=swizzle), (5, 16), offset=offset)
    plain = box(x, (5, 16), shape).view(np.uint8).reshape(-1)
    expected = np.zeros_like(plain)
    for byte, value in enumerate(plain):
        address = 1024 + offset + byte
        bits = address >> 7 & {128: 7, 64: 3, 32: 1}[swizzle]
        expected[(address ^ bits << 4) - 1024 - offset] = value
    np.testing.assert_array_equal(got[: len(plain)], expected)


def test_multicast() -> None:
    x = RNG.integers(0, 2**16, (16, 64)).astype(np.uint16)
    copy = COPY.replace("bytes", "bytes.multicast::cluster.L2::cache_hint")
    tensor = TensorMap(x, "f16", x.shape, (8, 64), swizzle=128)
    out = copied(tensor, (2, 0), copy=copy, cluster=2, rest=", %rs1, %rd9").reshape(2, -1)
    one = copied(tensor, (2, 0))
    np.testing.assert_array_equal(out, np.stack([one, one]))


def test_wgmma_reads_a_swizzled_box() -> None:
    """What a tensor copy of 64 columns writes is the matrix of a descriptor with 128-byte swizzle."""
    x = RNG.integers(-8, 8, (32, 64)).astype(np.float16)
    tensor = TensorMap(x, "f16", x.shape, (16, 64), swizzle=128)
    accumulators = ", ".join(f"%r{20 + i}" for i in range(8))
    program = kernel((0, 8), tensor.box_bytes)
    before = program[: program.index("ld.shared.b32 %r10")]
    stores = "".join(f"st.global.b32 [%rd0+{4 * i}], %r{20 + i};" for i in range(8))
    product = f"""mov.u32 %r30, 0x3C003C00; shr.u32 %r8, %r6, 4; cvt.u64.u32 %rd8, %r8;
    or.b64 %rd8, %rd8, {1 << 62 | 64 << 32 | 1 << 16}; wgmma.fence.sync.aligned;
    {{ .reg .pred %q; setp.ne.u32 %q, 0, 0;
    wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {{{accumulators}}}, {{%r30, %r30, %r30, %r30}}, %rd8, %q,
    1, 1, 0; }}
    wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
    mad.wide.u32 %rd0, %r0, 28, %rd0; {stores} ret; }}"""
    out = np.zeros((128, 8), np.float32)
    Emulator(before + product).launch("k", block=128, args=[tensor, out], racecheck=True)
    sums = x[8:24, :16].astype(np.float32).sum(axis=1)
    for thread in range(128):
        columns = [i // 4 * 8 + thread % 4 * 2 + i % 2 for i in range(8)]
        np.testing.assert_array_equal(out[thread], sums[columns])
    # All its threads have to wait for the copy.
    some = before.replace("WAIT", "setp.ge.u32 %p3, %r0, 32; @%p3 bra MEET; WAIT", 1) + "MEET:" + product
    with pytest.raises(EmulatorError, match="bulk copy before a wait for the mbarrier's phase"):
        Emulator(some).launch("k", block=128, args=[tensor, out])


def test_copies_that_are_wrong() -> None:
    x = np.zeros((64, 64), np.float16)
    tensor = TensorMap(x, "f16", x.shape, (8, 64), swizzle=128)
    cases: list[tuple[str, TensorMap, tuple[int, ...], dict[str, Any]]] = [
        (r"to \d+, which is not a multiple of 128", tensor, (0, 0), {"offset": 64}),
        ("a copy of 3 dims of a tensor map with 2", tensor, (0, 0, 0), {}),
        ("deadlock: nobody ends the phase of `bars`.* 1024 bytes expected", tensor, (0, 0), {"expect": 2048}),
        ("deadlock: .* 512 bytes more copied than expected", tensor, (0, 0), {"expect": 512}),
        ("coordinates of a tensor with 1 dims", tensor, (0, 0), {"copy": COPY.replace("{rank}", "1")}),
        ("`cp.async.bulk.tensor.2d.* needs one of .global", tensor, (0, 0), {"copy": COPY.replace(".global", "")}),
    ]
    for message, of, corner, options in cases:
        with pytest.raises(EmulatorError, match=message):
            copied(of, corner, **options)
    program = kernel((0, 0), 1024)
    out = np.zeros(1024, np.uint8)
    for message, source, args in [
        ("no tensor map at 0x", program, [bytes(128), out]),
        ("no tensor map at 0x", program.replace("[%rd4, {", "[%rd0, {"), [tensor, out]),
        ("needs the array in place of its address", program, [TensorMap(4096, "f16", (64, 64), (8, 64)), out]),
        (r"a tensor map is passed as `.param .align 64 .b8 name\[128\]`", program, [tensor, tensor]),
        (
            "emulated for tensor maps only",
            program.replace("prefetch.tensormap [%rd4];", "ld.b32 %r9, [%rd4];"),
            [tensor, out],
        ),
    ]:
        with pytest.raises(EmulatorError, match=message):
            Emulator(source).launch("k", block=128, args=args)


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("element='f8' is not one of u8, u16", {"element": "f8"}),
        ("must have the same 1 to 5 dims", {"box": (8,)}),
        ("must have the same 1 to 5 dims", {"shape": (1,) * 6, "box": (1,) * 6}),
        ("every dim must be 1 to 256; copy several boxes", {"box": (257, 64)}),
        ("every dim must be 1 to 256; copy several boxes", {"box": (0, 64)}),
        ("every dim must be 1 to 2\\^32", {"shape": (64, 0)}),
        ("shape=a number of thousands of digits: every dim", {"shape": (10**5000, 64)}),
        ("shape=64 must be a tuple of integers", {"shape": 64}),
        ("box=\\(8, 64.0\\) must be a tuple of integers", {"box": (8, 64.0)}),
        ("box=None must be a tuple of integers", {"box": None}),
        ("strides_bytes=128 must be a tuple of integers", {"strides_bytes": 128}),
        ("strides_bytes=\\('128',\\) must be a tuple of integers", {"strides_bytes": ("128",)}),
        ("element=\\[\\] is not one of u8", {"element": []}),
        ("swizzle=\\[128\\] is not one of 0, 32, 64, 128", {"swizzle": [128]}),
        ("swizzle=a number of thousands of digits is not one of", {"swizzle": 10**5000}),
        ("swizzle=16 is not one of 0, 32, 64, 128", {"swizzle": 16}),
        ("l2_promotion=32 is not one of 0, 64, 128, 256", {"l2_promotion": 32}),
        ("has rows of 24 bytes: they must be a multiple of 16; make the last dim longer", {"box": (8, 12)}),
        ("rows of 128 bytes, with swizzle=64: make the last dim 32, or take the swizzle", {"swizzle": 64}),
        ("a stride of 130 bytes must be a multiple of 16 below 2\\^40; pad the rows", {"shape": (64, 65)}),
        ("a stride of 0 bytes", {"strides_bytes": (0,)}),
        ("one stride for each dim but the last", {"strides_bytes": (128, 2)}),
        ("needs 8320 bytes, and the array has 8192", {"shape": (65, 64)}),
        ("a stride of a number of thousands of digits bytes must be", {"strides_bytes": (10**5000,)}),
        ("address='x' must be a tensor, an array, or the address of a tensor", {"address": "x"}),
        ("address=a number of thousands of digits must be a multiple of 16", {"address": 10**5000}),
        ("address=1180591620717411303424 must be a multiple of 16 above 0 and below", {"address": 2**70}),
        ("address=0x1008 must be a multiple of 16 above 0 and below 2\\^64; copy the tensor", {"address": 0x1008}),
    ],
)
def test_tensor_maps_that_are_refused(message: str, change: dict[str, Any]) -> None:
    right = {"address": np.zeros((64, 64), np.float16), "element": "f16", "shape": (64, 64), "box": (8, 64)}
    TensorMap(**right)
    with pytest.raises(SpecError, match=message):
        TensorMap(**{**right, **change})


def test_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the driver is given: dims from the innermost on, and no stride for that one."""
    calls = list[tuple[Any, ...]]()

    def encode_tiled(start: int, *given: Any) -> int:
        assert start % 64 == 0
        calls.append(tuple(list(each) if isinstance(each, ctypes.Array) else each for each in given))
        ctypes.memmove(start, bytes(range(128)), 128)
        return 0

    monkeypatch.setattr(driver, "tensor_map_function", lambda: encode_tiled)
    tensor = TensorMap(0x7F0000001000, "bf16", (3, 100, 4096), (1, 16, 64), swizzle=128)
    assert tensor.encode() == bytes(range(128))
    assert TensorMap(4096, "u8", (1000,), (128,), l2_promotion=256).encode() == bytes(range(128))
    x = torch.zeros(64, 64, dtype=torch.float16)
    TensorMap(x, "f16", (64, 64), (8, 64)).encode()
    assert calls == [
        (9, 3, 0x7F0000001000, [4096, 100, 3], [8192, 819200], [64, 16, 1], [1, 1, 1], 0, 3, 2, 0),
        (0, 1, 4096, [1000], [], [128], [1], 0, 0, 3, 0),
        (6, 2, x.data_ptr(), [64, 64], [128], [64, 8], [1, 1], 0, 0, 2, 0),
    ]
    with pytest.raises(SpecError, match=r"takes a tensor or its address, tensor.data_ptr\(\), not an array"):
        TensorMap(np.zeros((64, 64), np.float16), "f16", (64, 64), (8, 64)).encode()


def test_a_driver_that_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "tensor_map_function", lambda: lambda *_: 1)
    monkeypatch.setattr(driver, "describe", lambda code: f"error {code}")
    with pytest.raises(TargetError, match="cuTensorMapEncodeTiled: error 1"):
        TensorMap(4096, "u8", (1000,), (128,)).encode()


@pytest.mark.gpu
def test_encoding_by_the_driver() -> None:
    """Many, since the memory that the driver writes to is not aligned on purpose; equal tensors have equal maps."""
    x = torch.zeros(64, 64, dtype=torch.float16, device="cuda")
    maps = [TensorMap(x, "f16", (64, 64), (8, 64), swizzle=swizzle) for swizzle in (0, 128)]
    found = {each.encode() for each in maps for _ in range(50)}
    assert len(found) == 2 and all(len(each) == 128 for each in found)
