"""What is measured on a CPU, and the page that shows it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

import lowbit
from benchmarks import cpu, gguf
from benchmarks.publish import between_marks

ROOT = Path(__file__).resolve().parents[2]


def test_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A row for every number of tokens, between marks of a page."""
    monkeypatch.setattr(cpu, "COPIES", 1)
    monkeypatch.setattr(cpu, "TOKENS", (1, 20))
    table = cpu.cpu_table(64, 256, seconds=0.0)
    rows = [line.split("|")[1:-1] for line in table.splitlines() if re.match(r"\| \d", line)]
    assert [int(row[0]) for row in rows] == [1, 20]
    assert all(len(row) == 7 and all(float(cell) > 0 for cell in row) for row in rows)
    page = tmp_path / "cpu.md"
    page.write_text(f"above\n{cpu.BEGIN}\nold\n{cpu.END}\nbelow\n")
    assert between_marks(page, "new", cpu.BEGIN, cpu.END) == f"above\n{cpu.BEGIN}\nnew\n{cpu.END}\nbelow\n"


def test_page_of_models_on_a_cpu() -> None:
    """It has the results: a prompt is faster than by llama.cpp, and a token takes at most 1.3 times as long."""
    found = json.loads((ROOT / "docs/results/gguf.json").read_text())
    page = ROOT / "docs/cpu.md"
    assert between_marks(page, gguf.text_of(found), gguf.BEGIN, gguf.END) == page.read_text()
    by = {(record["file"], record["by"].split()[0]): record for record in found["records"]}
    assert len(by) == 4
    for file in {record["file"] for record in found["records"]}:
        ours, theirs = by[file, "lowbit"], by[file, "llama-cpp-python"]
        assert ours["prompt"] > theirs["prompt"] and 1.3 * ours["decode"] > theirs["decode"]


def test_tokens_come_from_generate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is fused, and the prompt's time is not that of a token."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=1024, num_hidden_layers=1)).bfloat16().eval()
    lowbit.quantize_(model, lowbit.QuantConfig("u4", group_size=32), progress=False)
    monkeypatch.setattr(lowbit, "from_gguf", lambda _: model)
    monkeypatch.setattr(gguf, "STEPS", 3)
    ticks = iter(range(1000))
    monkeypatch.setattr(gguf.time, "process_time", lambda: next(ticks))
    prompt, step = gguf.ours(Path("tiny.gguf"), threads=1)()
    assert (prompt, step) == (1, 1) and not lowbit.fuse_(model)  # it was fused already


def test_results_of_a_file_are_replaced(tmp_path: Path) -> None:
    record = {"file": "a.gguf", "threads": 1, "by": "lowbit", "prompt": 100.0, "decode": 10.0}
    gguf.write([record, record | {"threads": 2}], tmp_path / "gguf.json")
    found = gguf.write([record | {"decode": 11.4}], tmp_path / "gguf.json")
    assert [(r["threads"], r["decode"]) for r in found["records"]] == [(2, 10.0), (1, 11.4)]
    assert "| a.gguf | 1 | lowbit | 100 | 11 |" in gguf.text_of(found)
