"""`python -m benchmarks quantize` times recipes on a model; here on a tiny one, on the CPU."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from typer.testing import CliRunner

import lowbit
from benchmarks import quantize
from benchmarks.__main__ import app
from benchmarks.publish import between_marks
from lowbit import LowbitLinear, SpecError
from lowbit.pylib.model_speed.config import model_config
from lowbit.pylib.model_speed.random_model import random_model
from lowbit.pylib.nn.plan import Filter

pytest.importorskip("transformers")


@pytest.mark.parametrize("recipe", quantize.RECIPES)
def test_recipes_make_low_bit_models(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize, "LENGTH", 16)
    model = random_model(model_config("tiny", layers=1), None, "cpu")
    seconds, gigabytes = quantize._quantize(model, quantize.RECIPES[recipe])
    weights = {module.spec.weight for module in model.modules() if isinstance(module, LowbitLinear)}
    assert weights == {quantize.RECIPES[recipe].weight} and seconds > 0 and gigabytes is None


def test_a_part_of_the_layers_stands_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def quantized(model: Any, config: lowbit.QuantConfig, filter_fn: Filter | None = None) -> tuple[float, float]:
        return 0.0 if filter_fn else model.config.num_hidden_layers * 1.5, 0.25

    monkeypatch.setattr(quantize, "_quantize", quantized)
    for layers in (2, 1):
        found = list(quantize.costs("tiny", ["u4 per 128"], layers, "cpu", print))
        assert found == [quantize.Cost("tiny", "u4 per 128", layers, 3.0, 0.25)]
    with pytest.raises(SpecError, match="recipe='u9' must be one of 'u4 per 128"):
        next(quantize.costs("tiny", ["u9"], None, "cpu", print))


def test_the_first_call_is_of_one_layer_and_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    changed: list[list[str]] = []

    def quantized(model: nn.Module, *given: Any, **options: Any) -> None:
        real(model, *given, **options)
        changed.append([name for name, module in model.named_modules() if isinstance(module, LowbitLinear)])

    real = lowbit.quantize_
    monkeypatch.setattr(lowbit, "quantize_", quantized)
    list(quantize.costs("tiny", ["nf4"], 1, "cpu", print))
    assert changed[0] == ["model.layers.0.self_attn.k_proj"] and len(changed[1]) == 7


def test_nothing_is_begun_when_the_budget_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(quantize, "_quantize", lambda *_: (1.0, None))
    assert not list(quantize.costs("tiny", ["nf4"], 1, "cpu", said.append, budget=-1.0))
    assert said == ["nf4 is left out: -1 s are over"]


def test_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are kept in a file, where new ones replace those of the same recipe, printed, and written into a page."""

    def quantized(_: nn.Module, config: lowbit.QuantConfig, filter_fn: Filter | None = None) -> tuple[Any, Any]:
        return (4.0, 0.5) if config.method == "gptq" else (1.0, None)

    monkeypatch.setattr(quantize, "_quantize", quantized)
    page = tmp_path / "docs/quantizers.md"
    page.parent.mkdir()
    page.write_text(f"above\n{quantize.BEGIN}\nold\n{quantize.END}\nbelow\n")
    monkeypatch.chdir(tmp_path)
    options = ["--device", "cpu", "--layers", "1", "--write"]
    for recipes in ("u4 per 128, GPTQ; nf4", "nf4"):
        done = CliRunner().invoke(app, ["quantize", "tiny", "--recipes", recipes, *options])
        assert done.exit_code == 0, done.output
    text = page.read_text()
    rows = re.findall(r"^\| (.*) \|$", text, re.MULTILINE)[2:]
    assert rows == ["nf4 | 2.0 | 0.25 |  | 1", "u4 per 128, GPTQ | 8.0 | 1.00 | 0.50 | 1"]
    assert "tiny. no GPU" in text and "some of the 2 layers were quantized" in text and "old" not in text
    records = json.loads((tmp_path / "quantizing.json").read_text())["records"]
    assert [(each["recipe"], each["seconds"]) for each in records] == [("u4 per 128, GPTQ", 8.0), ("nf4", 2.0)]


def test_page_has_a_place_for_the_table() -> None:
    page = Path(__file__).resolve().parents[2] / "docs/quantizers.md"
    assert "| u4 per 128 |" in page.read_text().partition(quantize.BEGIN)[2].partition(quantize.END)[0]
    assert between_marks(page, "new", quantize.BEGIN, quantize.END) != page.read_text()
