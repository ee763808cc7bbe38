"""The benchmark harness without a GPU: what runs are made of, and what is made of their results."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import count, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from benchmarks import chain, first_calls_page, measure, prefill_page, show
from benchmarks.__main__ import app
from benchmarks.cases import PLANS, Case, Plan
from benchmarks.energy import count_to_tick
from benchmarks.floor import Reader, compile_reader, launch_for
from benchmarks.measure import Run, relative_error
from benchmarks.peers import PEERS, Job
from benchmarks.peers import peer as peer_module
from benchmarks.peers.lowbit import decode
from benchmarks.prepare import prepare
from benchmarks.publish import BEGIN, END, publish
from benchmarks.results import Record, Results
from benchmarks.shapes import Shape, shapes
from benchmarks.tables import summary, tables
from lowbit.dialect.errors import SpecError
from lowbit.pylib import MatmulSpec
from lowbit.pylib.activation import quantize_rows
from lowbit.pylib.emulator import Emulator
from lowbit.pylib.reference import dequantize, random_problem
from lowbit.pylib.weights.packed import pack

ENVIRONMENT: dict[str, Any] = {
    "gpu": "NVIDIA H200",
    "driver": "580.159.04",
    "versions": {"torch": "2.11.0"},
    "commit": "0123456789ab",
    "sources": "abc",
    "date": "2026-11-21T00:00:00+00:00",
}
ROOT = Path(__file__).resolve().parent.parent
SMALL = Case(Shape("small", 256, 256), "u4")
SPEEDS = {"lowbit": 1.1, "humming": 1.35, "gemlite": 2.2}  # times as long as the floor
BITS = {"u8": 8, "f6e3m2": 6, "u5": 5, "u4": 4, "i3": 3, "u2": 2, "i1": 1}
TOKENS = (1, 2, 4, 8, 16, 32, 64)


def made_up(formats: Sequence[str] = tuple(BITS), tokens: Sequence[int] = TOKENS) -> Results:
    """Plausible numbers: memory at 4.3 TB/s, cuBLAS at twice the floor of 16 bits."""
    results = Results(None, ENVIRONMENT)
    results.add(_record("peak", "u4", 8192, 8192, 8192, 1428.0) | {"tflops": 770.0})
    for n, k in ((4096, 4096), (8192, 8192), (8192, 28672), (57344, 8192)):
        for weight in formats:
            size = n * k * (BITS[weight] + 0.125) / 8
            floor = size / 4.3e6 + 0.5
            results.add(_record("floor", weight, n, k, 0, floor) | {"bytes": size})
            for m in tokens:
                if weight == formats[0]:
                    results.add(_record("torch", None, n, k, m, n * k / 2.1e6 + 3) | {"bytes": 2 * n * k})
                for peer, factor in SPEEDS.items():
                    if peer == "gemlite" and weight not in ("u8", "u4", "u2", "i1"):
                        results.add(_record(peer, weight, n, k, m) | {"skipped": "integers of 1, 2, 4 and 8 bits only"})
                        continue
                    slower = {"lowbit": 0.02, "humming": 0.03, "gemlite": 0.25}[peer]
                    time = (floor + 0.5) * factor * (1 + slower * m**0.75)
                    results.add(_record(peer, weight, n, k, m, time) | {"bytes": size})
    return results


def _record(peer: str, weight: str | None, n: int, k: int, m: int, us: float | None = None) -> Record:
    about = {"group_size": 128, "zeros": "none"} if weight else {"group_size": None, "zeros": None}
    key = {"peer": peer, "weight": weight, "act": "f16", "n": n, "k": k, "m": m} | about
    times = {} if us is None else {"us": us, "best_us": us, "worst_us": us, "right": True, "error": 1e-4}
    return key | {"shape": f"{n} x {k}"} | times


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
    assert takers == {"torch", "lowbit", "lowbit+quantize", "torch-fp8", "humming", "fbgemm"}
    (folded,) = Plan.of({"shapes": ["4096x4096"], "act": "bf16", "compute": ["f8e4m3+fold"]}).cases()
    assert folded.spec.folds and not eight_bit.spec.folds
    takers = {name for name, peer in PEERS.items() if peer.declines(folded, 512) is None}
    assert takers == {"torch", "lowbit", "lowbit+quantize", "torch-fp8"}
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
    np.testing.assert_allclose(
        decode(pack(spec, *parts)).numpy(), dequantize(spec, *parts[:3]), rtol=1e-5, atol=1e-7
    )


def test_relative_error() -> None:
    x, weight = torch.randn(3, 64), torch.randn(5000, 64)
    y = x @ weight.T
    assert relative_error(y, x, weight) < 1e-6
    assert relative_error(y * 1.01, x, weight) == pytest.approx(0.01, rel=1e-3)
    assert relative_error(torch.zeros_like(y), x, weight) == pytest.approx(1)
    assert not relative_error(y * float("nan"), x, weight) < 1


@pytest.mark.parametrize("units", [64, 1024, 1537])
def test_the_floor_reads_everything(units: int) -> None:
    reader = Reader(threads=64, unroll=4, most_blocks=3)
    kernel = compile_reader(reader, "emulator:sm_90a", never=0)  # stores its sums
    launch = launch_for(reader, kernel.launch, units)
    data = np.random.default_rng(0).integers(1, 8, (units, 4)).astype(np.float32)
    blocks = launch.grid[0].number
    sums = np.zeros((blocks * reader.chunk, 4), np.float32)
    Emulator(kernel.ptx).run(launch, {"memory": data, "sums": sums, "units": units})
    beyond = blocks * reader.rounds(units) * reader.chunk - units  # read the last unit once more
    np.testing.assert_array_equal(sums.sum(0), data.sum(0) + beyond * data[-1])
    assert beyond < reader.rounds(units) * reader.chunk


def test_the_floor_loads_16_bytes_and_never_stores() -> None:
    ptx = compile_reader(Reader(threads=64, unroll=4), "sm_90a").ptx
    assert ptx.count("ld.global.v4") == 4
    assert ptx.index("ld.global.v4") < ptx.index("griddepcontrol.wait") < ptx.index("st.global")


@pytest.mark.parametrize("left_out", [(), ("x",), ("weight",), ("weight", "x")])
def test_a_link_of_a_chain_reads_and_stores_everything(left_out: tuple[str, ...]) -> None:
    spec, threads = MatmulSpec(128, 256, "u4", group_size=128), 64
    each = chain.link(spec, 8, 5, threads).without(*left_out)
    assert 5 * chain.link(spec, 8, 5, threads).units * threads * 16 >= spec.bytes and each.rows * 5 * 4 >= 128 * 8
    kernel = chain.compile_link(each, "emulator:sm_90a")
    rng = np.random.default_rng(0)
    counts = (5 * each.units, each.x_units)
    weight, x = (rng.integers(1, 8, (count * threads, 4)).astype(np.float32) for count in counts)
    y = np.zeros((5, each.rows, 4), np.float16)
    Emulator(kernel.ptx).run(kernel.launch, {"weight": weight, "x": x, "y": y})
    expected = weight.reshape(5, -1, threads, 4).sum(1) + x.reshape(-1, threads, 4).sum(0)
    np.testing.assert_array_equal(y, expected[:, : each.rows])


def test_a_chain_loads_the_weight_before_it_waits_and_x_after() -> None:
    each = chain.link(MatmulSpec(4096, 4096, "u4", group_size=128), 8, 132)
    before, after = chain.compile_link(each, "sm_90a").ptx.split("griddepcontrol.wait;")
    assert (before.count("ld.global.v4"), after.count("cp.async.cg")) == (each.units, each.x_units) == (16, 16)
    assert "ld.global" not in after and "cp.async.cg" not in before
    for n, m in ((8192, 1), (4096, 32)):
        with pytest.raises(SpecError, match=f"{n} x {n}, m = {m}: a block of a chain has at most 65536 bytes"):
            chain.link(MatmulSpec(n, n, "u4", group_size=128), m, 132)


def test_results_survive_and_go_on(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    first = Results.open(path, dict(ENVIRONMENT))
    first.add(_record("lowbit", "u4", 64, 64, 1, 2.0))
    first.add(_record("humming", "u4", 64, 64, 1) | {"skipped": "not installed"})
    assert len(json.loads(path.read_text())["measurements"]) == 2
    second = Results.open(path, ENVIRONMENT | {"date": "2026-11-22"})
    assert second.has({"peer": "lowbit", "weight": "u4", "n": 64, "m": 1}) and second.has({"peer": "humming"})
    assert not second.has({"peer": "lowbit", "m": 8})
    assert not Results.open(path, ENVIRONMENT, retry=True).has({"peer": "humming"})
    with pytest.raises(SpecError, match="--out"):
        Results.open(path, ENVIRONMENT | {"sources": "other"})
    path.write_text("{")
    with pytest.raises(SpecError):
        Results.read(path)


def test_tables() -> None:
    results = made_up()
    find = {"n": 8192, "k": 8192}
    ours = results.find(peer="lowbit", weight="u4", m=1, **find)
    torch_ = results.find(peer="torch", m=1, **find)
    assert ours and torch_
    text = tables(results)
    cell = f"{ours['us']:.2f} ({torch_['us'] / ours['us']:.2f}x)"
    assert text.count(cell) == 2  # by tokens, and among all formats
    assert text.count("### ") == len(BITS) + 4 * len(TOKENS) + 1  # formats, places, eager calls none, layers
    assert "NVIDIA H200" in text and "- gemlite, f6e3m2, u5, i3: integers" in text
    for table in text.split("\n\n"):
        columns = {line.count("|") for line in table.splitlines() if line.startswith("|")}
        assert len(columns) <= 1


def test_what_zeros_and_groups_cost() -> None:
    results, where = made_up(("u4", "u8")), {"weight": "u4", "n": 8192, "k": 8192}
    plain = {name: results.all(peer=name, **where) for name in ("lowbit", "floor")}
    costs = (("zeros", "int", 1.02, 1.05), ("group_size", 32, 1.5, 1.0), ("act", "bf16", 1.0, 1.1))
    for name, value, read, slower in costs:
        for record in plain["lowbit"]:
            results.add(record | {name: value, "us": record["us"] * read * slower})
        for record in plain["floor"]:
            results.add(record | {name: value, "us": record["us"] * read})
    text = tables(results)
    _, _, after = text.partition("### Next to u4, groups of 128, f16\n\n")
    head, _, *rows = after.split("\n\n")[0].splitlines()
    assert head == "| n x k | m | u4 | int zeros | g32 | bf16 |"
    assert len(rows) == len(TOKENS) and all(row.count("(") == 3 for row in rows)
    assert "(1.05)" in rows[0] and "(1.00)" in rows[0] and "(1.10)" in rows[0]
    assert text.count("### u4") == 1 and "without a rest" not in text  # one format, which was not timed so


def test_summary_names_the_best_peer() -> None:
    results = made_up(("u4",))
    peers = ("lowbit", "humming", "torch")
    ours, best, torch_ = (results.all(peer=name, n=4096, k=4096, m=16)[0]["us"] for name in peers)
    head, _, row = summary(results).splitlines()[:3]
    cell = row.split("|")[head.split("|").index(" m = 16 ")]
    assert cell.strip() == f"**{ours:.1f}** ({torch_ / ours:.1f}, {best / ours:.1f})"


def test_tables_of_the_readme_are_those_of_the_results() -> None:
    root = Path(__file__).resolve().parent.parent
    text = (root / "README.md").read_text()
    assert summary(_latest(root, "h200")) in text
    runs = [Results.read(path) for path in sorted((root / "docs/results").glob("prefill-h200-*.json"), reverse=True)]
    for results in prefill_page.each_weight_once(runs):
        assert prefill_page.readme(results) in text


def _latest(root: Path, name: str) -> Results:
    return Results.read(max((root / "docs/results").glob(f"{name}-20*.json")))


def test_publish(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pip install '.[bench]'")
    (tmp_path / "docs").mkdir()
    for page in ("README.md", "docs/benchmarks.md"):
        (tmp_path / page).write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    results = made_up(("u4",), (1, 8, 16))
    files = publish(results, tmp_path)
    assert {path.name for path in files} == {"README.md", "benchmarks.md", "sweep_u4.svg", "roofline_u4.svg"}
    written = (tmp_path / "README.md").read_text()
    assert written == f"before\n{BEGIN}\n{summary(results)}\n{END}\nafter\n"
    assert "![" in (tmp_path / "docs/benchmarks.md").read_text()
    publish(results, tmp_path)
    assert (tmp_path / "README.md").read_text() == written
    (tmp_path / "README.md").write_text("no marks")
    with pytest.raises(SpecError, match="begin"):
        publish(results, tmp_path)


def prefill_results() -> Results:
    """Two sizes with two methods and energy, one size of another weight, and a method that lacks a format."""
    results = Results(None, ENVIRONMENT)
    energy = {"millijoules": 50.0}
    for n, m in product((4096, 8192), (128, 512, 2048)):
        us = n * 4096 * m / 3.5e8
        results.add(_record("torch", None, n, 4096, m, us) | {"bytes": 2 * n * 4096} | energy)
        about = {"bytes": n * 2048, "compute": "f8e4m3"}
        results.add(_record("lowbit", "u4", n, 4096, m, us / 1.5) | about | (energy if m > 128 else {}))
    results.add(_record("humming", "u4", 4096, 4096, 128) | {"compute": "f8e4m3", "skipped": "not installed"})
    results.add(_record("lowbit", "nf4", 8192, 4096, 512, 100.0) | {"bytes": 8192 * 2048})
    return results


def test_prefill_tables() -> None:
    text = prefill_page.page(prefill_results())
    ours = next(r for r in prefill_results().measurements if r["peer"] == "lowbit")
    assert f"| lowbit | {ours['us']:.2f} (1.50x) |" in text
    headings = re.findall(r"^### (.*)$", text, re.MULTILINE)
    weight = "u4, groups of 128, f16 in f8e4m3"
    assert headings == [f"Many tokens: {weight}", "Many tokens: other weights", f"Energy: {weight}"]
    torch_us = 8192 * 4096 * 512 / 3.5e8
    assert f"| nf4, groups of 128, f16 | 8192 x 4096 | 100.0 ({torch_us / 100:.2f}) |" in text
    for method in ("torch", "lowbit"):  # for the numbers of tokens with energy of ours
        assert f"| {method} | 50.0 (10240) | 50.0 (40960) |" in text
    assert "- humming, u4: not installed" in text
    for table in text.split("\n\n"):
        assert len({line.count("|") for line in table.splitlines() if line.startswith("|")}) <= 1


def test_weights_of_an_earlier_run_are_left_out() -> None:
    first, second = prefill_page.each_weight_once([prefill_results(), prefill_results()])
    assert len(first.measurements) == len(prefill_results().measurements)
    assert {r["weight"] for r in second.measurements} == {None, "nf4"}  # one size is no table


def test_publish_prefill(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pip install '.[bench]'")
    (tmp_path / "docs").mkdir()
    for page in ("README.md", "docs/benchmarks.md"):
        (tmp_path / page).write_text(f"before\n{prefill_page.BEGIN}\nold\n{prefill_page.END}\nafter\n")
    results = prefill_results()
    results.path = tmp_path / "prefill.json"
    results.add(results.measurements[0])
    done = CliRunner().invoke(app, ["publish-prefill", str(results.path), "--root", str(tmp_path)])
    assert done.exit_code == 0, done.output
    files = {path.name for path in (tmp_path / "docs/img").iterdir()}
    assert files == {"prefill_rate_u4_f16_f8e4m3.svg", "prefill_energy_u4_f16_f8e4m3.svg"}
    assert "tokens per joule" in (tmp_path / "docs/img/prefill_energy_u4_f16_f8e4m3.svg").read_text()
    assert "(img/prefill_rate_u4_f16_f8e4m3.svg)" in (tmp_path / "docs/benchmarks.md").read_text()
    readme = (tmp_path / "README.md").read_text()
    assert "m = 512" in readme and "old" not in readme and "nf4" not in readme


def test_publish_first_calls(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    page, file = tmp_path / "docs/tuning.md", tmp_path / "first_calls.json"
    page.write_text(f"before\n{first_calls_page.BEGIN}\nold\n{first_calls_page.END}\nafter\n")
    about = {"weight": "u4", "n": 24576, "k": 4096, "group_size": 128, "best_microseconds": 10.0}
    calls = [about | {"tokens": m, "microseconds": us} for m, us in ((1, 10.5), (16, 12.0))]
    calls.append(about | {"n": 7168, "group_size": None, "tokens": 1, "microseconds": 10.0})
    file.write_text(json.dumps({"gpu": "NVIDIA H200", "date": "2026-11-23", "calls": calls}))
    done = CliRunner().invoke(app, ["publish-first-calls", str(file), "--root", str(tmp_path)])
    assert done.exit_code == 0, done.output
    text = page.read_text()
    assert "2 of 3 within 10% of the best that was found, 1.083 on average, 1.20 at worst." in text
    assert "| 24576 x 4096 | 10.50 (1.05) | 12.00 (1.20) |  |" in text and "u4 per row, m = 1 |" in text
    file.write_text("{}")
    with pytest.raises(SpecError, match="tune --check"):
        first_calls_page.text_of(file)


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


def test_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pip install '.[bench]'")
    results = made_up(("u8", "f6e3m2", "u4"), (1, 16, 64))
    results.path = tmp_path / "results.json"
    results.add(_record("bitsandbytes", "u4", 4096, 4096, 1) | {"failed": "RuntimeError"})
    results.add(_record("floor", "u4", 4096, 4096, 0) | {"failed": "RuntimeError"})
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        done = CliRunner().invoke(app, ["plot", str(results.path), "--out", str(folder)])
        assert done.exit_code == 0, done.output
    first, second = ({path.name: path.read_text() for path in folder.iterdir()} for folder in folders)
    assert first == second  # the same file for the same numbers
    swept = {f"{what}_{w}.svg" for what in ("sweep", "roofline") for w in ("u8", "f6e3m2", "u4")}
    assert first.keys() == swept | {f"formats_m{m}.svg" for m in (1, 16, 64)}
    for word in ("lowbit", "Humming", "f6e3m2", "57344 × 8192", "NVIDIA H200, driver 580.159.04,"):
        assert word in first["formats_m1.svg"]


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
    results.add(_record("lowbit", "u4", 64, 64, 1, 1.5))
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
