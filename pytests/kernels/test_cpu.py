"""The CPU target against the definition: every code exactly, everything else within derived bounds."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import lowbit
from lowbit.dialect.bindings import ir, new_context
from lowbit.dialect.errors import PackError, SpecError, TargetError
from lowbit.dialect.formats.dtypes import all_names
from lowbit.dialect.formats.packing import Packing, run_of
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.codegen.host import host_features
from lowbit.passes.cpu import compile as cpu_compile
from lowbit.passes.cpu.compile import compile_program, isa_of
from lowbit.passes.cpu.decode import ChunkMap, Isa
from lowbit.passes.cpu.lower_cpu import build_cpu_program
from lowbit.pylib import matmul, reference
from lowbit.pylib.build import knobs
from lowbit.pylib.build.host_programs import processor
from lowbit.pylib.reference.bounds import ROUNDING
from lowbit.pylib.runtime import cpu, cpu_threads
from lowbit.pylib.runtime.cpu import CpuMatmul
from lowbit.pylib.torch_types import TORCH
from lowbit.pylib.weights import memory_order
from lowbit.pylib.weights.packed import PackedWeight, pack

TABLES = {f"lut{b}": tuple(float(v) for v in np.linspace(-3, 4, 1 << b) ** 3) for b in range(1, 9)}
FORMATS = (*all_names(), *TABLES)


def spec_of(weight: str, n: int, k: int, **fields: object) -> MatmulSpec:
    return MatmulSpec(n=n, k=k, weight=weight, table=TABLES.get(weight), **fields)  # type: ignore[arg-type]


def run(program: CpuMatmul, x: Tensor, w: PackedWeight) -> Tensor:
    return program.matmul(x, w.tensors)


def check(spec: MatmulSpec, tokens: tuple[int, ...], finite: bool = True, cpu: str = "") -> None:
    """matmul and dequantize of a random problem, for several numbers of tokens."""
    x, *weight = reference.random_problem(spec, max(tokens), finite=finite)
    w = pack(spec, *weight)
    program = CpuMatmul(spec, cpu)
    for m in tokens:
        y = run(program, x[:m], w)
        assert y.shape == (m, spec.n) and y.dtype == TORCH[spec.out_dtype]
        expected = reference.matmul(spec, x[:m], *weight)
        assert reference.agrees(y, expected, tolerance(program, x[:m], weight)).all()
    check_dequantized(program, w, reference.dequantize(spec, *weight[:3]))


def tolerance(program: CpuMatmul, x: Tensor, weight: Sequence[Tensor | None]) -> np.ndarray:
    """What a correct program may be off."""
    return reference.tolerance(program.spec, x, *weight, dequantized=program.rounds_weights(len(x)))  # type: ignore[arg-type]


def check_dequantized(program: CpuMatmul, w: PackedWeight, expected: np.ndarray) -> None:
    """f32 rounds the table's value, the difference and the product; then comes one rounding to act."""
    unit, least = ROUNDING[program.spec.act]
    with np.errstate(invalid="ignore"):
        bound = np.abs(expected) * (unit + 2.0**-22) + least
    assert reference.agrees(program.dequantize(w.tensors), expected, bound).all()


# How x is read and y rounded does not depend on the format: with bf16 a sample runs, the rest in sweeps.
EVERY_CODE = [
    *((weight, "f16") for weight in FORMATS),
    *(pytest.param(w, "bf16", marks=[pytest.mark.slow] * (i % 6 > 0)) for i, w in enumerate(FORMATS)),
]


@pytest.mark.parametrize(("weight", "act"), EVERY_CODE)
def test_every_code(weight: str, act: str) -> None:
    """Rows that run through all codes, one-hot x, scales that are powers of two: exact, in every place."""
    spec = spec_of(weight, n=24, k=288, group_size=96, act=act, out="f32")
    t = spec.dtype
    codes = (np.arange(spec.k) + 61 * np.arange(spec.n)[:, None]) % t.codes
    assert len(np.unique(codes)) == t.codes
    values = t.values()[codes]
    finite = np.isfinite(values)
    given = np.where(codes >= t.codes // 2, codes - t.codes, codes) if t.kind == "int" else codes
    scales = np.exp2((np.arange(spec.n)[:, None] + np.arange(spec.groups)) % 5 - 2)
    exact = (values * np.repeat(scales, 96, axis=1)).astype(np.float32)  # rounds the values of tables only
    program = CpuMatmul(spec)

    w = pack(spec, given, scales)
    dequantized = program.dequantize(w.tensors)
    assert np.array_equal(
        dequantized.float().numpy(), torch.from_numpy(exact).to(TORCH[act]).float().numpy(), equal_nan=True
    )

    w = pack(spec, np.where(finite, given, 0), scales)  # 0 * NaN is NaN
    one_hot = torch.eye(spec.k, dtype=TORCH[act])
    expected = np.where(finite, exact, t.values()[0] * 0).T
    y = torch.cat([run(program, rows, w) for rows in one_hot.split(program.few_tokens)])
    assert np.array_equal(y.numpy(), expected)
    if program.rounds_weights(spec.k):
        expected = torch.from_numpy(expected).to(TORCH[act]).float().numpy()
    assert np.array_equal(run(program, one_hot, w).numpy(), expected)

    x, *weight_of = reference.random_problem(spec, 20)
    for m in (3, 20):
        y = run(program, x[:m], pack(spec, *weight_of))
        bound = tolerance(program, x[:m], weight_of)
        assert reference.agrees(y, reference.matmul(spec, x[:m], *weight_of), bound).all()


@pytest.mark.parametrize("weight", ["f8e4m3", "f8e5m2"])
def test_nan_and_inf(weight: str) -> None:
    check(spec_of(weight, n=64, k=256, group_size=32), (1, 4), finite=False)


GROUPS = {
    "u4": (16, 17, 32, 48, 64, 100, 128, 272, None),
    "i3": (16, 32, 48, 64, 128, 256, 272, 512, None),
    "f6e2m3": (16, 64, 100, 256),
    "u1": (16, 32, 100, 128),
}


@pytest.mark.parametrize(("weight", "group"), [(w, g) for w, groups in GROUPS.items() for g in groups])
def test_groups(weight: str, group: int | None) -> None:
    zeros = "int" if weight == "u4" else "float"
    check(spec_of(weight, n=33, k=5 * (group or 211), group_size=group, zeros=zeros), (1, 4, 14))


@pytest.mark.parametrize("zeros", ["none", "int", "float"])
@pytest.mark.parametrize("scale", ["f16", "bf16", "f32", "e8m0", "e4m3"])
def test_scales_and_zeros(scale: str, zeros: str) -> None:
    weight, act = ("i5", "f16") if zeros == "int" else ("i2", "bf16")
    check(spec_of(weight, n=20, k=320, group_size=32, scale=scale, zeros=zeros, act=act), (1, 3, 14))


@pytest.mark.parametrize("out", ["f16", "bf16", "f32"])
@pytest.mark.parametrize("act", ["f16", "bf16"])
def test_outputs_and_bias(act: str, out: str) -> None:
    check(spec_of("f4e2m1", n=37, k=160, group_size=32, act=act, out=out, bias=True), (1, 6, 19))


@pytest.mark.parametrize("shape", [(1, 16), (5, 33), (16, 64), (17, 1000), (129, 257), (80, 5000)])
def test_shapes(shape: tuple[int, int]) -> None:
    n, k = shape
    check(spec_of("u8" if n == 5 else "i4", n=n, k=k, bias=True), (0, 1, 2, 3, 8, 13, 65))


@settings(max_examples=8)
@given(st.data())
def test_any_spec(data: st.DataObject) -> None:
    group = data.draw(st.none() | st.integers(16, 300))
    k = data.draw(st.integers(1, 4)) * group if group else data.draw(st.integers(16, 700))
    weight = data.draw(st.sampled_from(FORMATS))
    integer = weight[0] in "ui"
    zeros = data.draw(st.sampled_from(("none", "int", "float") if integer else ("none", "float")))
    act = data.draw(st.sampled_from(("f16", "bf16")))
    spec = spec_of(weight, data.draw(st.integers(1, 70)), k, group_size=group, zeros=zeros, act=act)
    check(spec, tuple(data.draw(st.lists(st.integers(0, 20), min_size=1, max_size=3))))


@pytest.mark.parametrize(("weight", "group"), [("u4", 32), ("i5", 32), ("i6", 16), ("i8", 32), ("u3", None)])
def test_few_tokens_of_integers_are_in_fixed_point(weight: str, group: int | None) -> None:
    """Whole numbers are exact; beside a large number, others are off by 2^-15 of it at most, in its own group alone."""
    spec = spec_of(weight, n=24, k=320, group_size=group, act="bf16", out="f32")
    _, codes, scales, *_ = reference.random_problem(spec, 1)
    w, program = pack(spec, codes, torch.ones_like(scales)), CpuMatmul(spec)
    values = reference.dequantize(spec, codes, torch.ones_like(scales))
    for m in (1, 3):
        x = torch.randint(-128, 128, (m, spec.k)).bfloat16()
        assert np.array_equal(run(program, x, w).numpy(), x.double().numpy() @ values.T)
        for large, at in ((3e4, 5), (1e-38, 200), (0.0, 0)):
            x = torch.randn(m, spec.k).mul(1e-38 if large < 1 else 1).bfloat16()
            x[:, at] = large
            exact = x.double().numpy()
            size = group or 320
            largest = np.abs(exact).reshape(m, -1, size).max(2)
            weights = np.abs(values).reshape(spec.n, -1, size).sum(2)
            half_unit = np.maximum(largest * 2.0**-15, 2.0**-126)
            bound = half_unit @ weights.T + tolerance(program, x, [codes, torch.ones_like(scales)])
            assert reference.agrees(run(program, x, w), exact @ values.T, bound).all()


def test_integers_are_multiplied_in_words_of_each_processor() -> None:
    spec = spec_of("i8", n=16, k=64, group_size=32)
    levels: dict[str, tuple[Isa, str]] = {
        "x86-64-v3": ("avx2", "x86.avx2.pmadd.wd"),
        "x86-64-v4": ("avx512", "x86.avx512.pmaddw.d.512"),
    }
    for level, (isa, instruction) in levels.items():
        with new_context(), ir.Location.unknown():
            assert instruction in str(build_cpu_program(spec, "few", isa))
        code, _ = compile_program(spec, "few", level, elsewhere=True)
        assert code


def test_processor_levels() -> None:
    """Tables of 8 entries, of 16 and larger ones go three ways through AVX2; the numbers are the same."""
    for weight, act in (("nf4", "bf16"), ("lut3", "f16"), ("lut5", "bf16"), ("i4", "f16"), ("f6e3m2", "bf16")):
        spec = spec_of(weight, n=20, k=192, group_size=64, act=act)
        check(spec, (1, 4, 17), cpu="x86-64-v3")
        if host_features() >= {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}:
            check(spec, (1, 4, 17), cpu="x86-64-v4")


@pytest.mark.parametrize(
    ("features", "isa"),
    [
        ({"sse4.2"}, "generic"),
        ({"avx2", "f16c", "fma"}, "avx2"),
        ({"avx2", "f16c", "fma", "avx512f"}, "avx2"),  # Xeon Phi: no words of 16 bits
        ({"avx2", "f16c", "fma", "avx512f", "avx512bw", "avx512vl"}, "avx512"),
        ({"avx2", "f16c", "fma", "avx512f", "avx512bw", "avx512vl", "avx512bf16"}, "avx512bf16"),
    ],
)
def test_what_a_processor_offers(monkeypatch: pytest.MonkeyPatch, features: set[str], isa: str) -> None:
    monkeypatch.setattr(cpu_compile, "host_features", lambda: frozenset(features))
    if isa == "generic":
        with pytest.raises(TargetError, match=r"lacks AVX2 or F16C"):
            isa_of("")
    else:
        assert isa_of("") == isa


def test_other_processors_are_refused() -> None:
    with pytest.raises(TargetError, match=r"x86-64-v2.*F16C.*x86-64-v3"):
        CpuMatmul(spec_of("u4", n=16, k=64), "x86-64-v2")


def test_rounds_to_nearest_even() -> None:
    """Sums half-way between two outputs: 2048 + 1 and 2048 + 3 in f16, 256 + 1 and 256 + 3 in bf16."""
    for act, base in (("f16", 2048.0), ("bf16", 256.0)):
        spec = spec_of("u4", n=2, k=16, act=act)
        w = pack(spec, np.ones((2, 16), np.uint8), np.ones((2, 1)))
        x = torch.zeros(2, 16, dtype=TORCH[act])
        x[:, 0] = base
        x[0, 1], x[1, 1] = 1, 3
        assert run(CpuMatmul(spec), x, w).tolist() == [[base, base], [base + 4, base + 4]]


def test_threads_give_the_same_bits() -> None:
    """However the rows are divided, and when several callers share the threads."""
    spec = spec_of("u4", n=1000, k=1024, group_size=128, zeros="int")
    x, *weight = reference.random_problem(spec, 9)
    w = pack(spec, *weight)
    one, many = CpuMatmul(spec, threads=1), CpuMatmul(spec, threads=5)
    expected = run(one, x, w)
    assert reference.agrees(
        expected, reference.matmul(spec, x, *weight), reference.tolerance(spec, x, *weight)
    ).all()
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: run(many, x, w), range(12)))
    assert all(torch.equal(y, expected) for y in results)
    assert torch.equal(many.dequantize(w.tensors), one.dequantize(w.tensors))


def test_more_tokens_than_a_slab(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scratch memory is for so many tokens at most; the rest come after them."""
    spec = spec_of("u4", n=40, k=96, bias=True)
    x, *weight = reference.random_problem(spec, 67)
    w, program = pack(spec, *weight), CpuMatmul(spec)
    whole = run(program, x, w)
    monkeypatch.setattr(cpu, "_SLAB", 32)
    assert torch.equal(run(program, x, w), whole)


def test_the_number_of_threads_may_change_between_calls() -> None:
    program, x, w, expected = large_problem()
    before = torch.get_num_threads()
    try:
        for threads in (1, 3, 1, 2):
            torch.set_num_threads(threads)
            assert torch.equal(run(program, x, w), expected)
    finally:
        torch.set_num_threads(before)


def large_problem() -> tuple[CpuMatmul, Tensor, PackedWeight, Tensor]:
    """A matmul that is worth several threads, with its result."""
    spec = spec_of("u4", n=1000, k=1024, group_size=128, zeros="int")
    x, *weight = reference.random_problem(spec, 9)
    program, w = CpuMatmul(spec, threads=3), pack(spec, *weight)
    y = run(program, x, w)
    bound = tolerance(program, x, weight)
    assert reference.agrees(y, reference.matmul(spec, x, *weight), bound).all()
    return program, x, w, y


def test_a_forked_process_has_threads_of_its_own() -> None:
    """OpenMP's do not come along: to call it would be to wait for ever."""
    program, x, w, expected = large_problem()
    child = os.fork()
    if child == 0:
        right = cpu_threads._parallel is None and all(torch.equal(run(program, x, w), expected) for _ in range(3))
        os._exit(0 if right else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_without_openmp(monkeypatch: pytest.MonkeyPatch) -> None:
    program, x, w, expected = large_problem()
    monkeypatch.setattr(cpu_threads, "_parallel", None)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: run(program, x, w), range(12)))
    assert all(torch.equal(y, expected) for y in results)
    assert cpu_threads._openmp("no_such_function") is None


def test_a_process_ends_with_threads_waiting() -> None:
    """The interpreter's end waits for none of them."""
    script = """if True:
        import numpy as np, torch, lowbit
        mm = lowbit.compile(lowbit.MatmulSpec(n=1024, k=1024, weight="u4"), "cpu")
        print(mm(torch.ones(1, 1024).half(), mm.pack(np.ones((1024, 1024), np.uint8), np.ones(1024)))[0, 5].item())"""
    environment = os.environ | {"LOWBIT_NUM_THREADS": "3"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=600)
    assert (done.returncode, done.stdout) == (0, "1024.0\n"), done.stderr


@pytest.mark.parametrize("n", [1, 1 << 30])
def test_programs_for_the_longest_rows(n: int) -> None:
    """Offsets beyond 2 GiB are no constants of an address."""
    program = cpu_compile.program_stages(spec_of("u1", n=n, k=1 << 30), "few")
    assert "lowbit_run" in program["asm"]


def test_a_team_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenMP would end the process where it can't have all threads."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 100_000)
    assert CpuMatmul(spec_of("u4", n=16, k=64))._team(1 << 40) == knobs.MOST_THREADS


def test_small_stacks() -> None:
    """Nothing on the stack grows with the problem: long rows run in a thread of 128 KiB."""
    results: list[Tensor] = []

    def work() -> None:
        for k in (32768, 2_200_000):
            spec = spec_of("u1", n=1, k=k, out="f32")
            w = pack(spec, np.ones((1, k), np.uint8), np.ones(1))
            results.append(run(CpuMatmul(spec), torch.ones(1, k, dtype=torch.float16), w))

    before = threading.stack_size(1 << 17)
    try:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    finally:
        threading.stack_size(before)
    assert [y.item() for y in results] == [32768, 2_200_000]


@pytest.mark.parametrize("device", ["meta", "cuda"])
def test_default_device(device: str) -> None:
    """Memory is on the CPU, whatever torch is told to make by default."""
    spec = spec_of("u4", n=40, k=96, bias=True, zeros="float")
    x, *weight = reference.random_problem(spec, 20)
    program, w = CpuMatmul(spec), pack(spec, *weight)
    expected = [run(program, rows, w) for rows in (x[:1], x, x.t().contiguous().t())]
    dense = program.dequantize(w.tensors)
    with torch.device(device):
        w = pack(spec, *weight)
        assert all(map(torch.equal, [run(program, rows, w) for rows in (x[:1], x, x.t().contiguous().t())], expected))
        assert torch.equal(program.dequantize(w.tensors), dense)


@pytest.mark.parametrize("m", [1, 20])
@pytest.mark.parametrize("weight", ["f3e1m1", "f4e2m1", "u4", "i8"])
def test_large_and_small_activations(weight: str, m: int) -> None:
    """bf16 has the range of f32: no power of two on the way leaves it."""
    spec = spec_of(weight, n=16, k=64, act="bf16", out="f32")
    w = pack(spec, np.eye(16, 64, dtype=np.int64), np.ones(16))
    value = spec.dtype.values()[1]
    for exponent in (113, -100):
        x = torch.full((m, 64), 2.0**exponent, dtype=torch.bfloat16)
        assert run(CpuMatmul(spec), x, w).unique().tolist() == [value * 2.0**exponent]


def test_tensors_without_memory_are_refused() -> None:
    spec = spec_of("u4", n=16, k=64, zeros="float", bias=True)
    x, *weight = reference.random_problem(spec, 1)
    program, w = CpuMatmul(spec), pack(spec, *weight)
    nothing = torch._efficientzerotensor((1, 64), dtype=torch.float16)
    with pytest.raises(SpecError, match=r"x has no memory that a kernel could read; clone it"):
        lowbit.compile(spec, "cpu")(nothing, w)
    tensors = list(w.tensors)
    for i, tensor in enumerate(tensors):
        given = [*tensors[:i], torch._efficientzerotensor(tensor.shape, dtype=tensor.dtype), *tensors[i + 1 :]]
        with pytest.raises(PackError, match="a tensor of the weight has no memory"):
            program.matmul(x, given)


def test_matmuls_are_given_back() -> None:
    """Those that nobody holds and nobody asked for lately; what is held stays the same object."""
    first = lowbit.compile(spec_of("u4", n=16, k=16), "cpu")
    gone = weakref.ref(lowbit.compile(spec_of("u4", n=16, k=17), "cpu"))
    matmul._compile.cache_clear()
    gc.collect()
    assert gone() is None
    assert lowbit.compile(spec_of("u4", n=16, k=16), "cpu") is first
    assert matmul._compile.cache_info().maxsize == matmul._KEPT


def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    """It takes the code from the disk, loads no MLIR, and LLVM to link; another processor's code is not taken."""
    script = """if True:
        import sys, torch, lowbit
        mm = lowbit.compile(lowbit.MatmulSpec(n=32, k=64, weight="u4"), "cpu")
        w = mm.pack(torch.ones(32, 64, dtype=torch.uint8), torch.ones(32))
        assert mm(torch.ones(40, 64).half(), w).unique().tolist() == [64.0]
        print(sorted({"torch_mlir", "mlir", "llvmlite"} & set(sys.modules)))"""

    def loaded(cpu: str = "") -> str:
        environment = os.environ | {"LOWBIT_CACHE_DIR": str(tmp_path), "LOWBIT_CPU": cpu, "LOWBIT_NO_CACHE": "0"}
        return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment).stdout

    assert loaded() != "['llvmlite']\n"
    assert loaded() == "['llvmlite']\n"
    assert loaded("x86-64-v3") != "['llvmlite']\n"


def test_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The key of the cache tells processors apart, and says nothing of what changes from run to run."""
    text = processor()
    assert re.search(r"^(flags|Features)\s*: ", text, re.MULTILINE) and "MHz" not in text


def test_packing_takes_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of small operations, each with a team of threads, take thirty times as long on a busy machine."""
    seen: list[int] = []

    def run_of_recorded(bits: int) -> object:
        seen.append(torch.get_num_threads())
        return run_of(bits)

    monkeypatch.setattr(memory_order, "run_of", run_of_recorded)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        packing = Packing(3, 32, 256)
        codes = torch.randint(0, 8, (32, 256), dtype=torch.uint8)
        assert torch.equal(memory_order.unpack_codes(packing, memory_order.pack_codes(packing, codes)), codes)
        assert len(seen) >= 2 and set(seen) == {1} and torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_leading_dimensions_and_strides() -> None:
    spec = spec_of("u3", n=24, k=96)
    x, *weight = reference.random_problem(spec, 12)
    w = pack(spec, *weight)
    program = CpuMatmul(spec)
    y = run(program, x, w)
    assert torch.equal(run(program, x.view(2, 3, 2, 96), w), y.view(2, 3, 2, 24))
    assert torch.equal(run(program, x.t().contiguous().t(), w), y)
    assert torch.equal(run(program, x[0], w), run(program, x[:1], w)[0])


@pytest.mark.parametrize("bits", range(1, 9))
def test_chunk_map_covers_every_column_once(bits: int) -> None:
    for weight in [f"u{bits}", *(name for name in all_names() if name.startswith(f"f{bits}"))][:2]:
        spec = spec_of(weight, n=16, k=512)
        columns = ChunkMap(spec.packing, spec.dtype).columns
        assert sorted(columns.ravel()) == list(range(spec.packing.chunk))


def test_chunk_map_groups() -> None:
    """u4 in groups of 16: word w of a lane is mma block w, which is a group."""
    spec = spec_of("u4", n=16, k=64, group_size=16)
    groups = ChunkMap(Packing(4, 16, 64, 16), spec.dtype).groups
    assert groups(0, 0) == groups(1, 1) == (0, 1, 2, 3) * 4


def test_stages_can_be_read() -> None:
    stages = CpuMatmul(spec_of("u4", n=64, k=128, group_size=64)).stages()
    assert list(stages) == ["vector", "llvm", "ll", "asm"]
    assert "vector.fma" in stages["vector"] and "func.func @lowbit_run" in stages["vector"]
    assert "llvm.func @lowbit_run" in stages["llvm"] and "scf." not in stages["llvm"]
    assert "define void @lowbit_run" in stages["ll"]
    assert "lowbit_run:" in stages["asm"]
    assert stages == CpuMatmul(spec_of("u4", n=64, k=128, group_size=64)).stages()
