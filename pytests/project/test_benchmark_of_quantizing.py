"""`python -m benchmarks quantize` times recipes on a model; here on a tiny one, on the CPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import quantize
from benchmarks.__main__ import app
from benchmarks.publish import between_marks
from lowbit import LowbitLinear, SpecError
from lowbit.pylib.model_speed.config import model_config
from lowbit.pylib.model_speed.random_model import random_model

pytest.importorskip("transformers")


@pytest.mark.parametrize("recipe", quantize.RECIPES)
def test_recipes_make_low_bit_models(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize, "LENGTH", 16)
    model = random_model(model_config("tiny", layers=1), None, "cpu")
    seconds, gigabytes = quantize._quantize(model, quantize.RECIPES[recipe])
    weights = {module.spec.weight for module in model.modules() if isinstance(module, LowbitLinear)}
    assert weights == {quantize.RECIPES[recipe].weight} and seconds > 0 and gigabytes is None


def test_a_part_of_the_layers_stands_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize, "_quantize", lambda model, config: (model.config.num_hidden_layers * 1.5, 0.25))
    found = [quantize.costs("tiny", ["u4 per 128"], layers, "cpu", print)[0] for layers in (None, 1)]
    assert found == [quantize.Cost("u4 per 128", 3.0, 0.25)] * 2
    with pytest.raises(SpecError, match="recipe='u9' must be one of 'u4 per 128"):
        quantize.costs("tiny", ["u9"], None, "cpu", print)


def test_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is printed, and written between the marks of a page."""
    monkeypatch.setattr(quantize, "_quantize", lambda model, config: (2.0, None if config.clip == "max" else 0.5))
    page = tmp_path / "docs/quantizers.md"
    page.parent.mkdir()
    page.write_text(f"above\n{quantize.BEGIN}\nold\n{quantize.END}\nbelow\n")
    monkeypatch.chdir(tmp_path)
    recipes = "u4 per 128, whole range; u4 per 128"
    done = CliRunner().invoke(
        app, ["quantize", "tiny", "--layers", "1", "--device", "cpu", "--recipes", recipes, "--write"]
    )
    assert done.exit_code == 0, done.output
    rows = re.findall(r"^\| (u4.*) \|$", page.read_text(), re.MULTILINE)
    assert rows == ["u4 per 128, whole range | 4.0 | ", "u4 per 128 | 4.0 | 0.50"]
    assert "tiny, 1 layers, scaled to all. no GPU" in page.read_text() and "old" not in page.read_text()


def test_page_has_a_place_for_the_table() -> None:
    page = Path(__file__).resolve().parents[2] / "docs/quantizers.md"
    assert "| u4 per 128 |" in page.read_text().partition(quantize.BEGIN)[2].partition(quantize.END)[0]
    assert between_marks(page, "new", quantize.BEGIN, quantize.END) != page.read_text()
