"""Outliers: a sparse matrix in f16 that is added to a low-bit weight, on every target."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from compiled import compile_dequantize, compile_matmul
from emulated import Inputs, run_dequantize, run_matmul
from every_kernel import KERNELS, TOKENS
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sweeps import swept
from torch import Tensor

import lowbit
from lowbit.dialect.bilevel import Bilevel
from lowbit.dialect.errors import PackError, SpecError
from lowbit.dialect.formats.outliers import ENTRIES, SPAN, table_lines
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.builder import Program
from lowbit.passes.kernels.decode.schedule import Schedule
from lowbit.passes.kernels.streaming.legality import shared_bytes
from lowbit.passes.kernels.streaming.plan import KernelPlan
from lowbit.passes.targets import parse_target
from lowbit.pylib import reference
from lowbit.pylib.runtime.cpu import CpuMatmul
from lowbit.pylib.weights import outliers
from lowbit.pylib.weights.packed import PackedWeight, pack

SPECS = [
    MatmulSpec(40, 208, "u3", 16, zeros="float", outliers=True),
    MatmulSpec(40, 208, "u3", 16, zeros="float", outliers=True, act="bf16"),
    MatmulSpec(70, 512, "u4", 128, zeros="int", bias=True, outliers=True, out="f32"),
    MatmulSpec(33, 300, "i4", 100, outliers=True, act="bf16", out="f32"),  # padded groups, k of no multiple of 8
    MatmulSpec(16, 256, "nf4", None, outliers=True),
    MatmulSpec(40, 256, "i4", 32, scale="e4m3", row_scales=True, outliers=True, out="f32"),
    MatmulSpec(32, 256, "u4", 32, zeros="offset", outliers=True, out="f32"),
    MatmulSpec(32, 256, "u3", 16, outliers=True, permuted=True),
    MatmulSpec(32, 256, "u3", 16, zeros="float", scale="u3", bilevel=Bilevel(16, 1, "f16", True), outliers=True),
]
SPEC = SPECS[0]


def matrix(rows: Any, columns: Any, values: Any, n: int, k: int) -> Tensor:
    rows, columns = (torch.tensor(part, dtype=torch.int64) for part in (rows, columns))
    order = (rows * k + columns).argsort()
    parts = outliers.Outliers(rows[order], columns[order], torch.tensor(values).half()[order])
    return outliers.sparse_csr(parts, n, k)


def agrees(y: Tensor, spec: MatmulSpec, x: Tensor, tensors: dict[str, Tensor], rounds: bool = False) -> bool:
    rounding: dict[str, Any] = {"dequantized": rounds}
    expected, bound = reference.matmul(spec, x, **tensors), reference.tolerance(spec, x, **tensors, **rounding)
    return bool(reference.agrees(y, expected, bound).all())


def rounded(spec: MatmulSpec, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The exact weight, and how far rounding it from f32 to the act type may be off: once, but for values of tables,
    which are decoded to the act type and then scaled."""
    given = {name: t for name, t in tensors.items() if name != "bias"}
    w = torch.from_numpy(reference.dequantize(spec, **given))
    dense = torch.from_numpy(reference.dequantize(spec, **{name: t for name, t in given.items() if name != "outliers"}))
    unit = 2.0**-8 if spec.act == "bf16" else 2.0**-11
    return w, unit * (1.02 * w.abs() + dense.abs() * (spec.dtype.kind == "table")) + 2.0**-20


@st.composite
def matrices(draw: st.DrawFn) -> Tensor:
    """Sparse matrices: empty ones, ones with a single full row, and ones of any density."""
    n, k = draw(st.integers(1, 70)), draw(st.sampled_from([16, 100, 4096, 9000]))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    kind = draw(st.sampled_from(["empty", "one full row", "sparse", "dense rows"]))
    there = np.zeros((n, k), bool)
    if kind == "one full row":
        there[rng.integers(n)] = True
    elif kind != "empty":
        share = np.full((n, 1), 0.02)
        share[rng.random(n) < 0.1] = 0.2 if kind == "dense rows" else 0.0
        there = rng.random((n, k)) < share
    rows, columns = there.nonzero()
    return matrix(rows, columns, rng.standard_normal(len(rows)) + 3, n, k)


@given(matrices())
@settings(max_examples=40, deadline=None)
def test_lines_hold_every_outlier_once(csr: Tensor) -> None:
    n, k = csr.shape
    lines = outliers.to_lines(outliers.read_csr(csr, n, k))
    assert lines.dtype == torch.int32 and torch.equal(outliers.to_csr(lines, n, k).to_dense(), csr.to_dense())
    outliers.check_lines(lines, n, k)
    per_block = np.add.reduceat(csr.crow_indices().diff().numpy(), range(0, n, 16))
    spans = -(-k // SPAN)
    used = lines.view(-1)[: len(per_block) + 1].diff().numpy()
    assert (used <= per_block // ENTRIES + spans).all() and (used * ENTRIES >= per_block).all()
    assert outliers.largest(lines, n) == float(csr.values().abs().max() if csr.values().numel() else 0)


@given(matrices(), st.integers(0, 9), st.sampled_from(["f16", "bf16"]))
@settings(max_examples=12, deadline=None)
def test_any_matrix_is_multiplied_on_the_cpu(csr: Tensor, choice: int, act: Any) -> None:
    assert KERNELS["cpu"](*with_outliers(csr, choice, act))


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
@given(csr=matrices(), choice=st.integers(0, 9), act=st.sampled_from(["f16", "bf16"]))
@settings(max_examples=5, deadline=None)
def test_any_matrix_is_multiplied(kernel: str, csr: Tensor, choice: int, act: Any) -> None:
    spec, inputs = with_outliers(csr, choice, act)
    whole = spec.k % 8 == 0 and spec.packing.padded_group in (None, spec.group_size)
    assume(whole or "prefill" not in kernel)  # which copies x in pieces of 16 bytes
    assert KERNELS[kernel](spec, inputs)


def with_outliers(csr: Tensor, choice: int, act: Any) -> tuple[MatmulSpec, Inputs]:
    """A weight in small or large groups or rows, by choice, with these outliers."""
    n, k = csr.shape
    sizes = [None, *(size for size in ((20, 25) if k == 100 else (16, 40, 64, 1000)) if k % size == 0 and size < k)]
    spec = MatmulSpec(n, k, ("u3", "i4")[choice % 2], sizes[choice % len(sizes)], outliers=True, act=act, out="f32")
    x, tensors = reference.random_inputs(spec, TOKENS)
    return spec, (x, tensors | {"outliers": csr})


@pytest.mark.parametrize("density", [0.0, 0.002, 0.01, 0.05])
@pytest.mark.parametrize("kernel", KERNELS)
def test_densities(kernel: str, density: float) -> None:
    """SpQR's weight, of which up to a twentieth are outliers."""
    spec = MatmulSpec.preset("spqr", 40, 512, permuted=False, out="f32")
    x, tensors = reference.random_inputs(spec, TOKENS)
    tensors["outliers"] = outliers.draw(spec.n, spec.k, density, torch.Generator().manual_seed(1))
    assert tensors["outliers"].values().numel() == pytest.approx(density * spec.n * spec.k, rel=0.05)
    assert KERNELS[kernel](spec, (x, tensors))


def test_a_word_is_value_column_and_row() -> None:
    """The picture in docs/sparse.md."""
    lines = outliers.to_lines(matrix([2, 18, 17], [5, 4100, 7], [1.5, -2.0, 1.0], 33, 8192))
    head = table_lines(33)
    assert head == 1 and lines[0, :4].tolist() == [1, 2, 4, 4]
    assert lines[1, :3].tolist() == [5, (0x3E00 << 16) | 2, 0]
    assert lines[2, :2].tolist() == [7, (0x3C00 << 16) | 1]
    assert lines[3, :2].tolist() == [4100, (0xC000 << 16 | 2) - (1 << 32)]


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("target", ["cpu", "emulator:sm_80"])
def test_products_and_weights(spec: MatmulSpec, target: str) -> None:
    x, tensors = reference.random_inputs(spec, 70)
    w, mm = pack(spec, **tensors), lowbit.compile(spec, target)
    for m in (1, 6, 70) if target == "cpu" else (1, 6):
        rounds = target == "cpu" and spec.act == "bf16" and m > CpuMatmul(spec).few_tokens
        assert agrees(mm(x[:m], w), spec, x[:m], tensors, rounds)
    exact, bound = rounded(spec, tensors)
    assert bool(((mm.dequantize(w).double() - exact).abs() <= bound).all())


@pytest.mark.parametrize(
    ("arch", "schedule"),
    [
        ("sm_80", Schedule(16, row_blocks=2, warps_n=2, warps_k=2, step_k=64, num_stages=2, split_k=2)),
        ("sm_90a", Schedule(16, row_blocks=1, warps_n=2, warps_k=2, step_k=64, num_stages=2, split_k=2, cluster=2)),
        ("sm_90a", Schedule(64, row_blocks=1, warps_n=4, warps_k=1, step_k=64, num_stages=2, wgmma=True)),
        ("sm_90a", Schedule(32, row_blocks=1, warps_n=4, warps_k=2, step_k=64, num_stages=2, wgmma=True)),
        ("sm_90a", Schedule(32, 1, 4, 2, 64, 2, wgmma=True, outliers_by_step=True)),
    ],
)
def test_every_way_to_split_the_work_counts_each_outlier_once(arch: str, schedule: Schedule) -> None:
    spec = MatmulSpec(100, 512, "u4", 128, zeros="int", outliers=True, out="f32")
    x, tensors = reference.random_inputs(spec, schedule.tokens - 3)
    kernel = compile_matmul(spec, parse_target(arch), schedule)
    y = run_matmul(kernel, spec, (x, tensors), racecheck=True)
    assert agrees(y, spec, x, tensors)


BEYOND = {
    "one token": Schedule(1, 2, 1, 1, 256, 2, spread_k=True),
    "four warps": Schedule(1, 1, 2, 2, 256, 3, spread_k=True),
    "columns": Schedule(1, 1, 1, 1, 256, 2),
    "8 tokens": Schedule(8, 2, 1, 1, 256, 2),
    "preloaded": Schedule(16, 1, 4, 1, 256, 1, wgmma=True, preload_weights=True, split_k=4, cluster=4),
}


@pytest.mark.parametrize(("name", "act", "density"), swept(product(BEYOND, ("f16", "bf16"), (0.01, 0.12))))
def test_lines_beyond_those_fetched_early(name: str, act: Any, density: float) -> None:
    schedule = BEYOND[name]
    spec = MatmulSpec(40, 1024, "u3", 16, zeros="float", outliers=True, act=act, out="f32")
    x, tensors = reference.random_inputs(spec, min(schedule.tokens, 5))
    tensors["outliers"] = outliers.draw(spec.n, spec.k, density, torch.Generator().manual_seed(1))
    kernel, plan = compile_matmul(spec, parse_target("sm_90a"), schedule), KernelPlan(spec, schedule)
    most = int(pack(spec, **tensors)["outliers"].view(-1)[:4].diff().max())
    first = plan.outliers.loaded_lines if plan.outliers.are_spread else plan.outliers.staged_lines
    assert (most > first * schedule.warps_k * schedule.split_k) == (density > 0.1)
    y = run_matmul(kernel, spec, (x, tensors), racecheck=True)
    bound = reference.tolerance(spec, x, **tensors, **plan.rounding)
    assert bool(reference.agrees(y, reference.matmul(spec, x, **tensors), bound).all())
    assert kernel.launch.shared_bytes <= shared_bytes(spec, schedule)


@pytest.mark.parametrize("spec", [SPECS[0], SPECS[3]], ids=str)
def test_dequantize_has_no_races(spec: MatmulSpec) -> None:
    x, tensors = reference.random_inputs(spec, 1)
    kernel = compile_dequantize(spec, parse_target("sm_80"))
    w = run_dequantize(kernel, spec, (x, tensors), racecheck=True)
    exact, bound = rounded(spec, tensors)
    assert bool(((w.double() - exact).abs() <= bound).all())


DROPPED: list[tuple[str, str, Any]] = [
    ("one token", "sparse_vector", lambda self, share, words, scratch, x, total: total),
    ("8 tokens", "sparse_mma", lambda self, share, lines, scratch, x, total: total),
    ("64 tokens, wgmma", "sparse_mma", lambda self, share, lines, scratch, x, total: total),
    ("prefill", "scatter_outliers", lambda self, table, buffer, column, cursor: cursor),
    ("prefill_mma", "scatter_outliers", lambda self, table, buffer, column, cursor: cursor),
    ("dequantize", "add_outliers", lambda self, *arguments: None),
]


@pytest.mark.parametrize(("kernel", "operation", "without"), DROPPED, ids=[kernel for kernel, *_ in DROPPED])
def test_outliers_dropped(kernel: str, operation: str, without: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = MatmulSpec(40, 256, "u3", 16, zeros="float", outliers=True, out="f32")
    problem = reference.random_inputs(spec, TOKENS)
    monkeypatch.setattr(Program, operation, without)
    assert not KERNELS[kernel](spec, problem)


def test_mutations_are_found() -> None:
    """A result without the outliers, with one column shifted, one value changed, and one row swapped is wrong."""
    spec = MatmulSpec(48, 256, "u4", 64, outliers=True, out="f32")
    x, tensors = reference.random_inputs(spec, 2)
    csr, mm = tensors["outliers"], lowbit.compile(spec, "cpu")
    rows = torch.arange(48).repeat_interleave(csr.crow_indices().diff())
    columns, values = csr.col_indices(), csr.values()
    assert agrees(mm(x, pack(spec, **tensors)), spec, x, tensors)
    wrong = [
        (rows[:0], columns[:0], values[:0]),
        (rows[:-1], columns[:-1], values[:-1]),
        (rows, (columns + 1) % 256, values),
        (rows ^ 1, columns, values),
        (rows, columns, values * torch.where(torch.arange(len(values)) == 9, 2, 1)),
    ]
    for parts in wrong:
        changed = outliers.sparse_csr(outliers.Outliers(*sorted_parts(*parts)), 48, 256)
        assert not agrees(mm(x, pack(spec, **{**tensors, "outliers": changed})), spec, x, tensors)


def sorted_parts(rows: Tensor, columns: Tensor, values: Tensor) -> list[Tensor]:
    order = (rows * 256 + columns).argsort()
    return [part[order] for part in (rows, columns, values)]


def test_one_full_row_and_no_outliers() -> None:
    spec = MatmulSpec(32, 128, "i4", 64, outliers=True)
    x, tensors = reference.random_inputs(spec, 3)
    for csr in (matrix([], [], [], 32, 128), matrix([31] * 128, range(128), [0.5] * 128, 32, 128)):
        given = {**tensors, "outliers": csr}
        for target in ("cpu", "emulator:sm_80"):
            mm = lowbit.compile(spec, target)
            assert agrees(mm(x, pack(spec, **given)), spec, x, given)


def test_packed_weight_saves_moves_and_cuts() -> None:
    spec = MatmulSpec(64, 512, "u4", 64, zeros="int", outliers=True, out="f32")
    x, tensors = reference.random_inputs(spec, 3)
    w = pack(spec, **tensors)
    assert list(w) == ["codes", "scales", "zeros", "outliers"] and w.nbytes > spec.bytes
    unpacked = w.unpack_outliers()
    assert unpacked is not None and torch.equal(unpacked.to_dense(), tensors["outliers"].to_dense())
    loaded = PackedWeight.from_state_dict(w.state_dict())
    assert loaded.spec == spec and torch.equal(loaded["outliers"], w["outliers"])
    assert copy.deepcopy(w).outliers is not None and pack(MatmulSpec(16, 64, "u4"), **plain()).outliers is None
    whole = lowbit.compile(spec, "cpu")(x, w)
    rows = [lowbit.compile(p.spec, "cpu")(x, p) for p in (w.shard(0, i, 2) for i in range(2))]
    columns = [
        lowbit.compile(p.spec, "cpu")(x.chunk(2, 1)[i].contiguous(), p)
        for i, p in enumerate(w.shard(1, i, 2) for i in range(2))
    ]
    assert torch.allclose(torch.cat(rows, 1), whole, atol=1e-4)
    assert torch.allclose(columns[0] + columns[1], whole, atol=1e-3)


def plain() -> dict[str, Tensor]:
    return reference.random_inputs(MatmulSpec(16, 64, "u4"), 1)[1]


def test_operator_gradient_and_layer() -> None:
    spec = MatmulSpec(32, 128, "u4", 32, outliers=True)
    x, tensors = reference.random_inputs(spec, 3)
    w, mm = pack(spec, **tensors), lowbit.compile(spec, "cpu")
    compiled = torch.compile(lambda x: mm(x, w), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), mm(x, w))
    x.requires_grad_()
    mm(x, w).sum().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad, mm.dequantize(w).sum(0).expand(3, -1), atol=1e-2)
    layer, empty = lowbit.LowbitLinear.from_packed(w), lowbit.LowbitLinear.empty(spec)
    assert empty.packed.outliers is not None and not empty(x.detach()).any()
    empty.load_state_dict(layer.state_dict())
    assert torch.equal(empty(x.detach()), layer(x.detach()))


def csr_parts(change: str) -> tuple[Tensor, Tensor, Tensor]:
    offsets, columns, values = torch.tensor([0, 2, 2, 3]), torch.tensor([3, 20, 7]), torch.tensor([1.0, 2.0, 3.0])
    match change:
        case "column":
            columns[1] = 64
        case "negative":
            columns[2] = -1
        case "repeated":
            columns[1] = 3
        case "falling":
            offsets[1] = 3
        case "short":
            offsets = offsets[:-1]
        case "end":
            offsets[-1] = 5
        case "values":
            values = values[:2]
        case "nan":
            values[2] = torch.nan
        case "large":
            values[0] = 1e5
        case "floats":
            columns = columns.float()  # type: ignore[assignment]
        case _:
            values = values.long()  # type: ignore[assignment]
    return offsets, columns, values


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("column", "an outlier of row 0 is in column 64; it must be in 0..63"),
        ("negative", "an outlier of row 2 is in column -1; it must be in 0..63"),
        ("repeated", r"outliers\[0, 3\] is there twice; add them up"),
        ("falling", "row offsets of outliers must not fall: row 1 goes from 3 to 2"),
        ("short", r"row offsets of outliers must be n \+ 1 = 4 numbers, not 3"),
        ("end", "row offsets of outliers must go from 0 to 3, not from 0 to 5"),
        ("values", "outliers have 3 columns, but 2 values"),
        ("nan", r"outliers\[2, 7\] = nan must be finite"),
        ("large", r"outliers\[0, 3\] = 100000 overflows f16"),
        ("floats", "columns of outliers must be integers, not torch.float32"),
        ("integers", "values of outliers must be floats, not torch.int64; use .float()"),
    ],
)
def test_wrong_outliers(change: str, message: str) -> None:
    spec = MatmulSpec(3, 64, "u4", outliers=True)
    _, tensors = reference.random_inputs(spec, 1)
    with pytest.raises(PackError, match=message):
        pack(spec, tensors["codes"], tensors["scales"], outliers=csr_parts(change))


def test_outliers_that_are_none() -> None:
    spec = MatmulSpec(16, 64, "u4", outliers=True)
    codes, scales = plain().values()
    with pytest.raises(PackError, match="needs outliers; pass outliers="):
        pack(spec, codes, scales)
    with pytest.raises(PackError, match=r"outliers must be a torch.sparse_csr tensor or .*, not torch.strided"):
        pack(spec, codes, scales, outliers=torch.zeros(16, 64))
    with pytest.raises(PackError, match=r"outliers must be \[n, k\] = \[16, 64\], not \[16, 32\]"):
        pack(spec, codes, scales, outliers=matrix([1], [1], [1.0], 16, 32))
    with pytest.raises(PackError, match="has no outliers; drop outliers or set outliers= in the spec"):
        pack(MatmulSpec(16, 64, "u4"), codes, scales, outliers=matrix([1], [1], [1.0], 16, 64))
    with pytest.raises(SpecError, match="outliers=1 must be True or False"):
        MatmulSpec(16, 64, "u4", outliers=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("place", "word", "message"),
    [
        ((0, 0), 0, "the table of lines is damaged"),
        ((0, 1), 5, "the table of lines is damaged"),
        ((1, 0), 200, r"lie outside \[n, k\]"),
        ((1, 0), -9, r"lie outside \[n, k\]"),
        ((1, 1), (0x3C00 << 16) | (100 << 4), r"lie outside \[n, k\]"),
        ((1, 2), (0x7E00 << 16) | 1, "must be finite"),
        ((1, 2), 0, "repeated or out of order"),
        ((1, 1), (0x3C00 << 16) | 7, "repeated or out of order"),
    ],
)
def test_damaged_files(place: tuple[int, int], word: int, message: str) -> None:
    spec = MatmulSpec(16, 64, "u4", outliers=True)
    w = pack(spec, *plain().values(), outliers=matrix([1, 3, 3, 3], [2, 2, 9, 60], [1.0] * 4, 16, 64))
    damaged = {**w.state_dict(), "outliers": w["outliers"].clone()}
    damaged["outliers"][place] = word
    with pytest.raises(PackError, match=message):
        PackedWeight.from_state_dict(damaged)


def test_wide_range_counts_outliers() -> None:
    spec = MatmulSpec(16, 64, "u4", outliers=True)
    codes, scales = plain().values()
    large = matrix([3], [3], [65000.0], 16, 64)
    assert pack(spec, codes, scales * 0 + 100, outliers=large).wide_range
    assert not pack(spec, codes, scales * 0 + 1, outliers=large).wide_range


def test_the_definition_adds_outliers() -> None:
    spec = MatmulSpec(40, 256, "i4", 32, scale="e4m3", row_scales=True, outliers=True)
    _, tensors = reference.random_inputs(spec, 1)
    exact = torch.from_numpy(reference.dequantize(spec, **tensors))
    assert torch.allclose(pack(spec, **tensors).dequantize().double(), exact, rtol=1e-6, atol=1e-7)


def test_fused_layers_keep_their_outliers() -> None:
    spec = MatmulSpec(32, 128, "u4", 32, outliers=True)
    parts = [pack(replace(spec, n=n), **reference.random_inputs(replace(spec, n=n), 1)[1]) for n in (16, 32, 21)]
    lines = outliers.stack([part["outliers"] for part in parts], [16, 32, 21])
    outliers.check_lines(lines, 69, 128)
    expected = torch.cat([outliers.to_csr(part["outliers"], part.spec.n, 128).to_dense() for part in parts])
    assert torch.equal(outliers.to_csr(lines, 69, 128).to_dense(), expected)
