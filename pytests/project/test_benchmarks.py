"""The benchmark harness without a GPU: what runs are made of, and how they end."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from made_up_results import ENVIRONMENT, made_up, record_of
from typer.testing import CliRunner

from benchmarks import measure, show
from benchmarks.__main__ import app
from benchmarks.cases import PLANS, Case, Plan
from benchmarks.energy import count_to_tick
from benchmarks.measure import Run, bits_of, relative_error
from benchmarks.peers import PEERS, Job, invariant
from benchmarks.peers import peer as peer_module
from benchmarks.peers.lowbit import decode
from benchmarks.prepare import prepare
from benchmarks.results import Results
from benchmarks.shapes import Shape, shapes
from lowbit.dialect.errors import SpecError
from lowbit.pylib import MatmulSpec
from lowbit.pylib.reference import dequantize, random_problem
from lowbit.pylib.runtime.activation import quantize_rows
from lowbit.pylib.weights.packed import pack

SMALL = Case(Shape("small", 256, 256), "u4")


def test_shapes_by_name() -> None:
    assert [(s.n, s.k) for s in shapes(["issue"])] == [
        (4096, 4096),
        (8192, 8192),
        (8192, 28672),
        (57344, 8192),
    ]
    assert shapes(["Llama-3.1-8B"]) == [
        Shape("Llama-3.1-8B qkv", 6144, 4096),
        Shape("Llama-3.1-8B o", 4096, 4096),
        Shape("Llama-3.1-8B gate_up", 28672, 4096),
        Shape("Llama-3.1-8B down", 4096, 14336),
    ]
    assert shapes(["Llama-2-7B/down"]) == [Shape("Llama-2-7B down", 4096, 11008)]
    assert shapes(["Gemma-2-9B/qkv", "Gemma-2-9B/o"])[0].n == (16 + 2 * 8) * 256
    assert shapes(["96x512", "llama-2-7b/o", "4096x4096"]) == [
        Shape("96 x 512", 96, 512),
        Shape("Llama-2-7B o", 4096, 4096),  # a size comes once
    ]
    for wrong in ("Llama-9", "Llama-2-7B/head", "4096x", "x"):
        with pytest.raises(SpecError):
            shapes([wrong])


def test_plan() -> None:
    plan = Plan.of({"shapes": ["4096x4096"], "formats": ["u4", "nf4"], "m": [1, 8], "group_size": 0})
    assert [str(case) for case in plan.cases()] == [
        "u4 per row, f16, 4096 x 4096",
        "nf4 per row, f16, 4096 x 4096",
    ]
    with pytest.raises(SpecError, match="format"):
        Plan.of({"format": ["u4"]})
    with pytest.raises(SpecError):
        Plan.of({"formats": ["u44"]}).cases()


def test_a_plan_with_products_of_8_bits() -> None:
    plan = Plan.of({"shapes": ["4096x4096"], "m": [512], "act": "bf16", "compute": ["none", "f8e4m3"]})
    plain, eight_bit = plan.cases()
    assert (str(plain), str(eight_bit)) == ("u4 g128, bf16, 4096 x 4096", "u4 g128, bf16 in f8e4m3, 4096 x 4096")
    takers = {name for name, peer in PEERS.items() if peer.declines(eight_bit, 512) is None}
    ours = {"lowbit", "lowbit+quantize"}
    assert takers == {"torch", *ours, "lowbit-invariant", "torch-fp8", "humming", "fbgemm"}
    (folded,) = Plan.of({"shapes": ["4096x4096"], "act": "bf16", "compute": ["f8e4m3+fold"]}).cases()
    assert folded.spec.folds and not eight_bit.spec.folds
    takers = {name for name, peer in PEERS.items() if peer.declines(folded, 512) is None}
    assert takers == {"torch", *ours, "torch-fp8"}
    assert PEERS["tinygemm"].declines(eight_bit, 512) == "no products in f8e4m3"
    assert PEERS["lowbit+quantize"].declines(plain, 512) == "products of 8 bits only"
    assert PEERS["fbgemm"].declines(plain, 512) is None and PEERS["torch-fp8"].declines(plain, 512) == "8 bits only"


@pytest.mark.parametrize("compute", ["f8e4m3", "i8"])
def test_peers_quantize_x_as_it_is_defined(compute: str) -> None:
    x = torch.randn(5, 64)
    values, scales = peer_module.quantize_rows(x, compute)
    exact, exact_scales = quantize_rows(x, compute)
    torch.testing.assert_close(scales, exact_scales)
    torch.testing.assert_close(peer_module.numbers_of((values, scales)), exact.float() * exact_scales[:, None])


def test_plans_in_files(tmp_path: Path) -> None:
    for path in PLANS.values():
        assert all(plan.cases() and set(plan.peers) <= PEERS.keys() for plan in Plan.read(path, {}))
    file = tmp_path / "plan.toml"
    file.write_text("group_size = 64\n[[part]]\nformats = ['u2']\n[[part]]\ngroup_size = 32\nm = [4]\n")
    first, second = Plan.read(file, {"m": [16]})
    assert (first.formats, first.group_size, first.m) == (("u2",), 64, (16,))  # what is given beats the file
    assert (second.formats, second.group_size, second.m) == (("u4",), 32, (16,))
    with pytest.raises(SpecError, match="decode"):
        Plan.read(tmp_path / "none.toml", {})


def test_missing_and_unfit_peers_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_module, "find_spec", lambda name: None)
    results = Results(None, ENVIRONMENT)
    case = Case(Shape("small", 256, 256), "nf4")
    for name in ("humming", "gemlite", "bitsandbytes", "tinygemm", "torch-fp8"):
        measure._measure_peer(PEERS[name], case, [1, 8], False, Run(results))
    reasons = {r["peer"]: r["skipped"] for r in results.measurements}
    assert len(results.measurements) == 10
    assert reasons["humming"] == "not installed: pip install humming-kernels"
    assert reasons["tinygemm"] == "4-bit integers only"
    assert reasons["torch-fp8"] == "8 bits only"


def test_matmuls_of_vllm_are_found_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 0.33 has the module elsewhere than 0.26; what it lacks itself is an error that says so."""
    found = ModuleType("batch_invariant")
    found.linear_batch_invariant = torch.nn.functional.linear  # type: ignore[attr-defined]
    asked: list[str] = []

    def load(name: str) -> ModuleType:
        asked.append(name)
        if "determinism" in name:
            raise ModuleNotFoundError("no module", name="vllm.model_executor.determinism")
        return found

    monkeypatch.setattr(invariant, "import_module", load)
    assert PEERS["vllm-invariant"].multiply() is found.linear_batch_invariant  # type: ignore[attr-defined]
    assert asked == list(invariant.VLLM)

    def lack(name: str) -> ModuleType:
        raise ModuleNotFoundError(f"{name} lacks triton", name="triton")

    monkeypatch.setattr(invariant, "import_module", lack)
    with pytest.raises(ModuleNotFoundError, match="triton"):
        PEERS["vllm-invariant"].multiply()  # type: ignore[attr-defined]


def test_bits_of_a_row() -> None:
    y = torch.randn(3, 64).half()
    y[2] = y[0]
    zero, minus = torch.zeros(4), -torch.zeros(4)
    assert bits_of(y[0]) == bits_of(y[2]) != bits_of(y[1]) and bits_of(zero) != bits_of(minus)


def test_a_failure_is_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(case: Case) -> None:
        raise RuntimeError("no such kernel\nand more")

    monkeypatch.setattr(PEERS["lowbit"], "layer", fail)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    results = Results(None, ENVIRONMENT)
    measure._measure_peer(PEERS["lowbit"], SMALL, [1, 8], False, Run(results))
    assert [r["m"] for r in results.measurements] == [1, 8]
    assert results.measurements[1]["failed"].startswith("RuntimeError: no such kernel (test_benchmarks.py:")


def test_what_ends_the_run_stands_as_failed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def end(case: Case) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(PEERS["lowbit"], "layer", end)
    results = Results.open(tmp_path / "results.json", dict(ENVIRONMENT))
    with pytest.raises(KeyboardInterrupt):
        measure._measure_peer(PEERS["lowbit"], SMALL, [1, 8], False, Run(results))
    again = Results.open(tmp_path / "results.json", ENVIRONMENT)
    assert [(r["m"], r["failed"]) for r in again.measurements] == [(1, measure.DIED)]
    assert not Results.open(tmp_path / "results.json", ENVIRONMENT, retry=True).measurements


def test_a_run_stops_in_time() -> None:
    results, lines = Results(None, ENVIRONMENT), []
    plan = Plan.of({"shapes": ["256x256"]})
    assert not measure.run([plan], results, lines.append, seconds=-1)
    assert not results.measurements and lines == ["stopped after -1 s; the same command goes on from here"]


def test_preparing_goes_wrong_in_peace(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(jobs: Sequence[Job]) -> None:
        raise RuntimeError("no compiler")

    ours, lines = PEERS["lowbit"], []
    monkeypatch.setattr(type(ours), "prepare", lambda self, jobs: fail(jobs))
    prepare({ours: [(SMALL, 1)], PEERS["torch"]: [(SMALL, 1)], PEERS["gemlite"]: []}, lines.append)
    assert len(lines) == 1 and lines[0].endswith("RuntimeError: no compiler")


@pytest.mark.parametrize("weight", ["u4", "i3", "f6e3m2", "nf4"])
@pytest.mark.parametrize("zeros", ["none", "float"])
def test_decoded_weight_is_the_definition(weight: str, zeros: str) -> None:
    spec = MatmulSpec(n=24, k=256, weight=weight, group_size=64, zeros=zeros)  # type: ignore[arg-type]
    _, *parts = random_problem(spec, 1)
    np.testing.assert_allclose(decode(pack(spec, *parts)).numpy(), dequantize(spec, *parts[:3]), rtol=1e-5, atol=1e-7)


def test_relative_error() -> None:
    x, weight = torch.randn(3, 64), torch.randn(5000, 64)
    y = x @ weight.T
    assert relative_error(y, x, weight) < 1e-6
    assert relative_error(y * 1.01, x, weight) == pytest.approx(0.01, rel=1e-3)
    assert relative_error(torch.zeros_like(y), x, weight) == pytest.approx(1)
    assert not relative_error(y * float("nan"), x, weight) < 1


def test_energy_is_counted_from_tick_to_tick() -> None:
    """A counter that moves by 30 every third read: steps are counted from the tick that ends one count to the next."""
    reads = iter(30 * (i // 3) for i in range(1000))
    clock = count()

    def step() -> None:
        next(clock)

    now = lambda: float(next(clock))  # noqa: E731
    _, first = count_to_tick(step, lambda: next(reads), 4.0, now)
    steps, last = count_to_tick(step, lambda: next(reads), 9.0, now)
    assert (last - first) / (steps + 1) == 10  # a read before the first step
    with pytest.raises(RuntimeError, match="stood still"):
        count_to_tick(step, lambda: 7, 1.0, now)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "smoke"], "this is measured on an NVIDIA GPU, and none is here; `python -m benchmarks cpu` needs"),
        (["show"], "this is measured on an NVIDIA GPU, and none is here"),
        (["models", "tiny"], "--device cuda: torch finds no CUDA device here; use cpu"),
    ],
)
def test_a_machine_without_a_gpu(arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert message in str(CliRunner().invoke(app, arguments).exception)


def test_command_line(tmp_path: Path) -> None:
    results = made_up()
    results.path = tmp_path / "results.json"
    results.add(record_of("lowbit", "u4", 64, 64, 1, 1.5))
    done = CliRunner().invoke(app, ["table", str(results.path)])
    rows = ["".join(line.split()) for line in done.output.splitlines()]
    assert done.exit_code == 0 and any(row.startswith("|64x64|lowbit|1.50|") for row in rows)
    wrong = CliRunner().invoke(app, ["run", "--shapes", "Llama-9"])
    assert wrong.exit_code and isinstance(wrong.exception, SpecError)


def test_show_finds_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = MatmulSpec(n=16, k=64, weight="u4")
    assert show.find_fault(spec, "cpu", rows=(1, 3)) is None
    row = show.correct_row("f16", [spec], "cpu")
    assert row[1] == "1 of 1"
    monkeypatch.setattr(show.lowbit.Matmul, "__call__", lambda self, x, w: torch.zeros(len(x), spec.n))
    assert show.find_fault(spec, "cpu", rows=(1, 3)) == "m = 1, 3"
