"""What is made of the results of benchmarks: files, tables, pages and plots."""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path

import pytest
from made_up_results import BITS, ENVIRONMENT, TOKENS, made_up, record_of
from typer.testing import CliRunner

from benchmarks import first_calls_page, invariant_page, prefill_page
from benchmarks.__main__ import app
from benchmarks.publish import BEGIN, END, publish
from benchmarks.results import Results
from benchmarks.tables import summary, tables
from lowbit.dialect.errors import SpecError


def test_results_survive_and_go_on(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    first = Results.open(path, dict(ENVIRONMENT))
    first.add(record_of("lowbit", "u4", 64, 64, 1, 2.0))
    first.add(record_of("humming", "u4", 64, 64, 1) | {"skipped": "not installed"})
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
    root = Path(__file__).resolve().parents[2]
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
        results.add(record_of("torch", None, n, 4096, m, us) | {"bytes": 2 * n * 4096} | energy)
        about = {"bytes": n * 2048, "compute": "f8e4m3"}
        results.add(record_of("lowbit", "u4", n, 4096, m, us / 1.5) | about | (energy if m > 128 else {}))
    results.add(record_of("humming", "u4", 4096, 4096, 128) | {"compute": "f8e4m3", "skipped": "not installed"})
    results.add(record_of("lowbit", "nf4", 8192, 4096, 512, 100.0) | {"bytes": 8192 * 2048})
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


def invariant_results() -> Results:
    """Two sizes: others take two or three times as long, and at one size have other bits for 512 tokens."""
    results = Results(None, ENVIRONMENT)
    for n, m in product((4096, 8192), (16, 512)):
        for peer, us in (("lowbit", 10.0), ("lowbit-invariant", 12.0), ("vllm-invariant", 36.0), ("torch", 24.0)):
            bits = ["1"] if peer == "lowbit-invariant" or n > 4096 else [str(m)]
            about = {"bytes": n * 2048, "row_bits": bits}
            results.add(record_of(peer, None if peer == "torch" else "u4", n, 4096, m, us) | about)
    for peer, us in (("lowbit", 10.0), ("lowbit-invariant", 15.0)):
        record = record_of(peer, "f8e4m3", 4096, 4096, 512, us) | {"compute": "f8e4m3", "group_size": None}
        results.add(record | {"bytes": 4096 * 4096, "row_bits": ["1", "2"]})
    results.add(record_of("humming-invariant", "u4", 4096, 4096, 16) | {"skipped": "not installed"})
    return results


def test_publish_invariant(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    page, results = tmp_path / "docs/invariant.md", invariant_results()
    page.write_text(f"before\n{invariant_page.BEGIN}\nold\n{invariant_page.END}\nafter\n")
    results.path = tmp_path / "invariant.json"
    results.add(results.measurements[0])
    done = CliRunner().invoke(app, ["publish-invariant", str(results.path), "--root", str(tmp_path)])
    assert done.exit_code == 0, done.output
    text = page.read_text()
    assert "old" not in text and invariant_page.page(results) in text
    assert "| 8192 x 4096 | 12.0 (1.20) | 12.0 (1.20) |" in text
    assert "ratios: 1.20 from 16 to 16 tokens, 1.20 at 512. Rows had equal bits at 2 of 2 sizes." in text
    assert "| vLLM's batch-invariant matmul, unquantized weight | 1 of 2 | 3.00 | 3.00 |" in text
    assert "| cuBLAS, unquantized weight | 1 of 2 | 2.00 | 2.00 |" in text
    assert "humming-invariant, u4: not installed" in text
    assert "| f8e4m3, one scale per row, f16 in f8e4m3, 4096 x 4096 | 0 of 1 | 15.0 (1.50) |" in text
    assert CliRunner().invoke(app, ["table", str(results.path)]).output.strip() == invariant_page.page(results)
    with pytest.raises(SpecError, match="run invariant"):
        invariant_page.page(made_up(("u4",)))


def test_page_of_invariant_matmuls_is_that_of_the_latest_results() -> None:
    root = Path(__file__).resolve().parents[2]
    text = (root / "docs/invariant.md").read_text()
    for path in sorted((root / "docs/results").glob("invariant-h200-*.json"))[-1:]:
        assert invariant_page.page(Results.read(path)) in text


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


def test_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pip install '.[bench]'")
    results = made_up(("u8", "f6e3m2", "u4"), (1, 16, 64))
    results.path = tmp_path / "results.json"
    results.add(record_of("bitsandbytes", "u4", 4096, 4096, 1) | {"failed": "RuntimeError"})
    results.add(record_of("floor", "u4", 4096, 4096, 0) | {"failed": "RuntimeError"})
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
