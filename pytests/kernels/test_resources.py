"""What default schedules cost, found out without a GPU: registers, spills, shared memory, and instructions per weight.

`BOUNDS` is a record: a change that makes a kernel leaner lowers its number, one that makes it fatter must say why.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator
from dataclasses import replace
from itertools import product

import pytest
from compiled import compile_dequantize, compile_matmul
from sweeps import swept

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.codegen.cubin import resource_usage
from lowbit.passes.kernels.decode.schedule import IntegerSchedule, Refill, Schedule
from lowbit.passes.pipeline import CompiledKernel
from lowbit.passes.target import Target
from lowbit.passes.targets import GPUS, parse_target

# What decoding is made of: operations on bits and on pairs of 16-bit reals, and lookups in tables. A few percent are
# the arithmetic of addresses.
DECODING = re.compile(
    r"(lop3|and|or|xor|shl|shr|shf|prmt|bfe|bfi|ld\.shared(?=\.b32))\.\S*b?\d+|(add|sub|mul|fma)\.\S*(f16x2|bf16x2)"
)


SPEC = {"n": 8192, "k": 8192, "group_size": 128}
DIGITS = {"u1": 0.34, "u2": 0.34, "i2": 0.34}  # one token in integers, 64 rows to a warp
SMALL_GROUPS = {"u3": 1.7, "u4": 1.75, "u8": 1.85, "nf4": 2.5}  # groups of 32, 64 tokens
REGISTER_FILE = 65536  # 32-bit registers of a multiprocessor, all architectures here
# Decoding instructions per weight: f16 with mma.sync, bf16 with wgmma (which leaves no subtraction out).
BOUNDS = {
    "u1": (0.6, 1.15),
    "u2": (0.65, 1.2),
    "u3": (0.86, 1.3),
    "u4": (0.65, 1.45),
    "u5": (0.98, 1.6),
    "u6": (1.08, 1.65),
    "u7": (1.18, 1.7),
    "u8": (0.78, 2.9),
    "i4": (1.15, 1.5),
    "f4e2m1": (1.9, 2.45),
    "f6e3m2": (2.1, 2.75),
    "f8e4m3": (2.3, 4.35),
    "f7e6m0": (4.4, 2.6),  # f16 has too few exponent bits: decoded to f32
    "nf4": (1.9, 1.95),
    "lut2": (1.75, 1.8),
    "lut3": (1.95, 1.95),
    "lut5": (3.8, 3.8),
    "lut8": (3.6, 3.6),
}
# What integer zeros add to signed codes (unsigned ones without zeros take no subtraction in f16), with one schedule:
# per row and group an addition for every magic exponent among the registers (few for 4 and 8 bits, several for 3
# and 5), and one per pair for 8 bits in bf16. For 1 and 2 bits in f16 they are taken from the products.
WITH_ZEROS = {
    "u1": (0.01, 0.23),
    "u2": (0.01, 0.11),
    "u3": (0.18, 0.12),
    "u4": (0.01, 0.01),
    "i4": (0.01, 0.01),
    "u5": (0.13, 0.08),
    "u6": (0.09, 0.08),
    "u7": (0.11, 0.01),
    "u8": (0.01, 0.53),
    "i8": (0.01, 0.53),
}


def main_loop(ptx: str) -> list[str]:
    """The instructions of the loop with the mma or wgmma in it, from its label to the branch back."""
    lines = [line.strip() for line in ptx.splitlines()]
    labels = {line[:-1]: at for at, line in enumerate(lines) if re.fullmatch(r"\$?[\w$]+:", line)}
    for at, line in enumerate(lines):
        branch = re.search(r"\bbra(?:\.uni)?\s+([\w$]+);", line)
        start = labels.get(branch[1], at) if branch else at
        body = [re.sub(r"^@!?%\w+\s+", "", line) for line in lines[start:at]]
        if any(line.startswith(("mma.sync", "wgmma.mma_async")) for line in body):
            return [line for line in body if re.match(r"[a-z]", line)]
    raise AssertionError("no loop with an mma")


def per_weight(kernel: CompiledKernel) -> float:
    """Decoding instructions per weight of one thread in the main loop."""
    s = kernel.schedule
    assert s is not None
    weights = s.row_blocks * s.step_k * 16 / 32
    return sum(bool(DECODING.match(line)) for line in main_loop(kernel.ptx)) / weights


def cases() -> Iterator[tuple[str, str, int, str]]:
    """Every format for few tokens and f16, and for a number in turn and bf16."""
    for i, weight in enumerate(BOUNDS):
        yield weight, "f16", 8, "sm_80"
        yield weight, "bf16", (16, 32, 64)[i % 3], "sm_90a"


def compiled(weight: str, act: str, tokens: int, target: str) -> CompiledKernel:
    table = tuple(range(1 << int(weight[3:]))) if weight.startswith("lut") else None
    scale = act if tokens > 128 else "f16"
    spec = MatmulSpec(weight=weight, act=act, scale=scale, table=table, **SPEC)  # type: ignore[arg-type]
    return compile_matmul(spec, parse_target(target), tokens=tokens)


@pytest.mark.parametrize(("weight", "act", "tokens", "target"), list(cases()))
def test_resources(weight: str, act: str, tokens: int, target: str) -> None:
    kernel = compiled(weight, act, tokens, target)
    used, limit = resource_usage(kernel.ptx, kernel.target), kernel.target.max_shared_per_block
    assert used.registers * kernel.launch.threads <= REGISTER_FILE
    assert kernel.launch.shared_bytes + used.shared <= limit
    assert per_weight(kernel) <= BOUNDS[weight][act == "bf16"]
    assert (used.spill_stores, used.spill_loads) == (0, 0), kernel.schedule


@pytest.mark.parametrize(("act", "tokens", "target"), [("f16", 8, "sm_80"), ("bf16", 16, "sm_90a")])
@pytest.mark.parametrize("weight", WITH_ZEROS)
def test_resources_of_integer_zeros(weight: str, act: str, tokens: int, target: str) -> None:
    plain = compiled(weight.replace("u", "i"), act, tokens, target)
    spec = MatmulSpec(weight=weight, act=act, zeros="int", **SPEC)  # type: ignore[arg-type]
    kernel = compile_matmul(spec, plain.target, plain.schedule)
    used = resource_usage(kernel.ptx, kernel.target)
    assert used.registers * kernel.launch.threads <= REGISTER_FILE
    assert (used.spill_stores, used.spill_loads) == (0, 0)
    assert per_weight(kernel) - per_weight(plain) <= WITH_ZEROS[weight][act == "bf16"]


@pytest.mark.parametrize("group", [64, 128])
def test_resources_of_float_zeros_in_an_order_of_sums(group: int) -> None:
    """In an order of sums, whose chains are read one by one at the end, float zeros leave registers enough: a thread of
    512 spills a few at most."""
    spec = MatmulSpec(8192, 8192, "u4", group, zeros="float", invariant=True)
    kernel = compile_matmul(spec, parse_target("sm_90a"), tokens=64)
    assert isinstance(kernel.schedule, Schedule) and kernel.schedule.wgmma
    used = resource_usage(kernel.ptx, kernel.target)
    assert max(used.spill_stores, used.spill_loads) <= 48 and not used.serialized, kernel.schedule


@pytest.mark.parametrize("weight", DIGITS)
def test_resources_of_digits(weight: str) -> None:
    schedule = IntegerSchedule(1, 4, 1, 8, 256, 2)
    kernel = compile_matmul(MatmulSpec(weight=weight, **SPEC), parse_target("sm_90a"), schedule)  # type: ignore[arg-type]
    used = resource_usage(kernel.ptx, kernel.target)
    assert per_weight(kernel) <= DIGITS[weight]
    products = 4 + weight.startswith("i")  # of row blocks, and with ones
    assert sum(line.startswith("mma.sync") for line in main_loop(kernel.ptx)) == products * 256 // 32
    assert used.registers <= 128 and (used.spill_stores, used.spill_loads) == (0, 0)


@pytest.mark.parametrize("weight", SMALL_GROUPS)
def test_resources_of_small_groups(weight: str) -> None:
    """With fewer columns to a group than tokens: weights are scaled, and all sums of a step are one chain."""
    spec = MatmulSpec(8192, 8192, weight, group_size=32)
    step = max(128, spec.packing.chunk)
    kernel = compile_matmul(spec, parse_target("sm_90a"), Schedule(64, 1, 4, 2, step, 2, wgmma=True))
    assert_one_chain(kernel, SMALL_GROUPS[weight])


def assert_one_chain(kernel: CompiledKernel, bound: float) -> None:
    """Products of scaled weights: no sum is scaled, and a round waits for its products once."""
    used, loop = resource_usage(kernel.ptx, kernel.target), main_loop(kernel.ptx)
    assert per_weight(kernel) <= bound
    assert not any(line.startswith("fma.rn.f32") for line in loop)
    assert sum("wgmma.wait_group" in line for line in loop) == 1
    assert used.registers <= 128 and (used.spill_stores, used.spill_loads) == (0, 0)


@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize(("weight", "bound"), [("u2", 1.7), ("u4", 1.75), ("nf4", 2.5)])
def test_resources_of_float_zeros(weight: str, bound: float, group: int) -> None:
    """One instruction for two weights takes zeros away and scales; sums are one chain, and not scaled."""
    spec, s = MatmulSpec(8192, 8192, weight, group_size=group, zeros="float"), Schedule(16, 1, 4, 4, 256, 2, wgmma=True)
    assert_one_chain(compile_matmul(spec, parse_target("sm_90a"), s), bound)


@pytest.mark.parametrize(
    ("weight", "zeros", "bound"),
    [("i4", "none", 0.67), ("u4", "int", 0.68), ("u4", "float", 0.67), ("i2", "none", 0.71)],
)
def test_resources_of_bare_codes(weight: str, zeros: str, bound: float) -> None:
    """No subtraction: for 4 bits half a lop3 and an eighth of a shift per weight."""
    spec = MatmulSpec(8192, 8192, weight, group_size=128, zeros=zeros)  # type: ignore[arg-type]
    schedule = Schedule(16, 4, 4, 2, spec.packing.chunk, 2, wgmma=True, raw_codes=True)
    kernel = compile_matmul(spec, parse_target("sm_90a"), schedule)
    used = resource_usage(kernel.ptx, kernel.target)
    assert per_weight(kernel) <= bound
    assert (used.spill_stores, used.spill_loads) == (0, 0)


WIDE = ("u1", "u3", "u4", "u8", "f6e3m2", "f8e4m3", "nf4")


def met_by_many_tokens(row: tuple[str, int, str]) -> Iterator[Hashable]:
    """Yields the weight with the type of x, and with tokens, and these two."""
    weight, tokens, act = row
    yield from ((weight, tokens), (tokens, act), *([] if weight[0] == "u" else [(weight, act)]))


@pytest.mark.parametrize(
    ("weight", "tokens", "act"),
    swept(product(WIDE, (128, 256), ("f16", "bf16")), met_by_many_tokens),
)
def test_resources_of_many_tokens(weight: str, tokens: int, act: str) -> None:
    kernel = compiled(weight, act, tokens, "sm_90a")
    used = resource_usage(kernel.ptx, kernel.target)
    assert used.registers * kernel.launch.threads <= REGISTER_FILE
    assert (used.spill_stores, used.spill_loads) == (0, 0), kernel.schedule


@pytest.mark.parametrize(
    ("zeros", "group", "act"),
    [("int", 128, "f16"), ("float", 128, "f16"), ("float", None, "f16"), ("float", None, "bf16")],
)
def test_no_fragment_is_one_register_several_times(zeros: str, group: int | None, act: str) -> None:
    """Of a fragment {%r1, %r1, %r1, %r1} nvJitLink 13 filled three registers after the instructions that read them."""
    spec = MatmulSpec(8192, 8192, "u4", group_size=group, zeros=zeros, act=act, scale=act)  # type: ignore[arg-type]
    schedule = Schedule(16, 2, 4, 2, 256, 2, wgmma=True, raw_codes=group is not None)
    ptx = compile_matmul(spec, parse_target("sm_90a"), schedule).ptx
    fragments = re.findall(r"wgmma\.mma_async[^{]*\{[^}]*\}, *\{([^}]*)\}", ptx)
    assert len(fragments) >= 16
    assert all(len(set(fragment.split(", "))) == 4 for fragment in fragments)


@pytest.mark.parametrize(("refill", "products"), [("before_mma", 0), ("after_first_mma", 4)])
def test_a_product_in_front_of_copies(refill: Refill, products: int) -> None:
    """It is under way when the warp comes to them, with all of its sums in registers."""
    schedule = Schedule(256, 1, 8, 1, 128, 2, wgmma=True, refill=refill)
    kernel = compile_matmul(MatmulSpec(8192, 8192, "u4", group_size=128), parse_target("sm_90a"), schedule)
    between = kernel.ptx.split("bar.sync")[1].split("cp.async.cg")[0]
    assert between.count("wgmma.mma_async") == products
    used = resource_usage(kernel.ptx, kernel.target)
    assert used.registers <= 208 and (used.spill_stores, used.spill_loads) == (0, 0)


@pytest.mark.parametrize(("tokens", "splits", "registers"), [(8, 1, 112), (8, 2, 80), (16, 1, 120), (16, 2, 88)])
def test_resources_of_preloaded_weights(tokens: int, splits: int, registers: int) -> None:
    """All of the weight is on its way before the kernel waits, and stays in registers."""
    schedule = Schedule(tokens, 1, 4, 4, 256, 1, splits, splits, True, preload_weights=True)
    spec = MatmulSpec(4096, 4096, "u4", group_size=128)
    kernel = compile_matmul(spec, parse_target("sm_90a"), schedule)
    used = resource_usage(kernel.ptx, kernel.target)
    before, after = kernel.ptx.split("griddepcontrol.wait;")
    assert before.count("ld.global.v4") == 16 // splits and "ld.global.v4" not in after
    assert used.registers <= registers and (used.spill_stores, used.spill_loads) == (0, 0)


@pytest.mark.parametrize(
    ("spec", "tokens"),
    [
        (MatmulSpec(256, 1020, "u4"), 8),  # x not in 16-byte pieces
        (MatmulSpec(256, 960, "u4", group_size=24), 1),  # padded groups
        (MatmulSpec(256, 1024, "u2", zeros="float", bias=True), 1),  # scales and zeros of rows
        (MatmulSpec(256, 1024, "u4", group_size=128, bias=True), 16),
    ],
    ids=str,
)
def test_what_the_kernel_before_may_write_is_read_coherently(spec: MatmulSpec, tokens: int) -> None:
    """`ld.global.nc` is for what nobody writes while the kernel runs; the assembler moves it across the wait."""
    kernel = compile_matmul(spec, parse_target("sm_90a"), tokens=tokens)
    assert "griddepcontrol.wait" in kernel.ptx and "ld.global." in kernel.ptx and ".nc" not in kernel.ptx
    assert "ld.global.nc" in compile_matmul(spec, parse_target("sm_80"), tokens=tokens).ptx


def test_main_loop_is_found() -> None:
    """The counts above are of the loop: all mma of a round, and the copies that run ahead."""
    kernel = compiled("u4", "f16", 8, "sm_80")
    s, loop = kernel.schedule, main_loop(kernel.ptx)
    assert s is not None
    assert sum(line.startswith("mma.sync") for line in loop) == s.row_blocks * s.step_k // 16
    assert any(line.startswith("cp.async") for line in loop)


@pytest.mark.parametrize("target", GPUS, ids=str)
def test_kernels_assemble_for_every_target(target: Target) -> None:
    """What the rule chooses, for one token and for many, and the kernel that dequantizes."""
    spec = MatmulSpec(1024, 4096, "u4", group_size=128, zeros="int")
    kernels = [compile_matmul(spec, target, tokens=tokens) for tokens in (1, 64)] + [compile_dequantize(spec, target)]
    for kernel in (*kernels, compile_matmul(replace(spec, weight="u2"), target, IntegerSchedule(1, 2, 1, 4, 256, 2))):
        used = resource_usage(kernel.ptx, target)
        assert used.registers * kernel.launch.threads <= REGISTER_FILE and used.spill_stores == 0
        assert kernel.launch.shared_bytes <= target.max_shared_per_block
        assert ("wgmma" in kernel.ptx) <= target.has_wgmma and ("cluster" in kernel.ptx) <= target.has_clusters


@pytest.mark.parametrize("target", [target for target in GPUS if target.has_clusters], ids=str)
def test_clusters_assemble_where_there_are(target: Target) -> None:
    spec = MatmulSpec(1024, 4096, "u4", group_size=128)
    kernel = compile_matmul(spec, target, Schedule(8, 2, 1, 4, 128, 2, split_k=4, cluster=4))
    assert "barrier.cluster" in kernel.ptx and kernel.cubin()
