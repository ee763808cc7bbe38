"""Files of results have one record a line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import record_lines

RESULTS = Path(__file__).resolve().parents[2] / "docs/results"


def test_a_record_a_line() -> None:
    value = {"environment": {"gpu": None}, "models": {"a": [{"m": 1, "us": [1, 2]}, {"m": 8, "of": [{}]}]}, "none": []}
    assert record_lines.text_of(value).splitlines() == [
        "{",
        '"environment": {"gpu": null},',
        '"models": {',
        '"a": [',
        '{"m": 1, "us": [1, 2]},',
        '{"m": 8, "of": [{}]}',
        "]",
        "},",
        '"none": []',
        "}",
    ]


@pytest.mark.parametrize("value", [[], {}, [1, {}], [{}], {"a": [{}], "b": {"c": [[{}]]}}, "text", None])
def test_the_text_is_the_value(value: object, tmp_path: Path) -> None:
    record_lines.write(tmp_path / "file.json", value)
    assert json.loads((tmp_path / "file.json").read_text()) == value
    assert [file.name for file in tmp_path.iterdir()] == ["file.json"]


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*.json")), ids=lambda file: file.stem)
def test_results_have_one_record_a_line(file: Path) -> None:
    text = file.read_text()
    lines = {line.strip(" ,") for line in text.splitlines()}
    records = [line for line in record_lines.text_of(json.loads(text)).splitlines() if line.startswith('{"')]
    assert records and [record for record in records if record.strip(",") not in lines] == []
