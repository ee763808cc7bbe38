"""Files that users keep and may damage: tables of schedules and plans. Each damaged one is read and does what
it is read for, or is refused by an error of ours."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from known_schedules import HOPPER, NEAR, ODD, SPEC, entry, table

import lowbit
from lowbit.dialect.errors import LowbitError
from lowbit.passes.kernels.registry import family_of
from lowbit.passes.scheduling.choice import schedule_for, token_tiles
from lowbit.passes.scheduling.tables import parse_table, read_table, shipped_tables
from lowbit.pylib.nn.quant_plan import QuantPlan

COUNT = 200
ODD_VALUES: list[Any] = [None, True, -1, 0, 0.5, 1, 2**63, 10**400, float("nan"), float("inf"), "", "u9", "lut44"]
ODD_VALUES += ["lut4", "permute", "quantize", "dequantize", "eight_bit", "f8e4m3", [], [[]], {}, {"family": "permute"}]
PATHS = tuple[Any, ...]


def paths(value: Any, at: PATHS = ()) -> Iterator[PATHS]:
    """Yields where all parts of a value of JSON are."""
    if at:
        yield at
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from paths(value[key], (*at, key))


def with_other_values(text: str, rng: random.Random) -> bytes:
    """Returns JSON of which a part is gone, has another name, or an odd value."""
    root = json.loads(text)
    *way, last = rng.choice(list(paths(root)))
    part = root
    for key in way:
        part = part[key]
    change = rng.random()
    if change < 0.2:
        del part[last]
    elif change < 0.4 and isinstance(part, dict):
        part[rng.choice(["family", *map(str, part)])] = part.pop(last)
    else:
        part[last] = rng.choice(ODD_VALUES)
    return json.dumps(root).encode()


def with_other_bytes(text: str, rng: random.Random) -> bytes:
    """Returns a text with bytes gone, changed or twice there, cut off, or nested too deeply."""
    data = bytearray(text.encode())
    first, length = rng.randrange(len(data)), rng.randrange(1, 30)
    changes: list[Callable[[], bytes]] = [
        lambda: data[:first] + data[first + length :],
        lambda: data[:first] + rng.randbytes(1) + data[first + 1 :],
        lambda: data[:first] + data[first : first + length] + data[first:],
        lambda: data[:first],
        lambda: data[:first] + b"[" * 100000 + data[first:],
    ]
    return bytes(rng.choice(changes)())


def text_of_table() -> str:
    """Returns a table with entries of several families."""
    shipped = {family_of(e.schedule).name: e for t in shipped_tables() for e in t.entries.values()}
    near = [entry(spec, ODD) for spec in NEAR.values()]
    return table(entry(SPEC, ODD), *near, *shipped.values()).to_text()


def text_of_plan() -> str:
    configs = {"a.b": lowbit.QuantConfig("u4"), "c": lowbit.QuantConfig.preset("fp6_llm")}
    return json.dumps(QuantPlan(configs, 4.1, 1000, 0.01).to_dict(), indent=1)


def use_table(file: Path) -> None:
    """Choose by a table, join it with itself, and write it."""
    read = read_table(file)
    for tile in token_tiles(SPEC, HOPPER):
        schedule_for(SPEC, tile, HOPPER, None, [read])
    again = parse_table(read.with_entries(read.entries.values()).to_text(), "again")
    assert again.entries.keys() == read.entries.keys()


def use_plan(file: Path) -> None:
    plan = QuantPlan.load(file)
    assert str(plan) and QuantPlan.from_dict(plan.to_dict()).to_dict() == plan.to_dict()


FILES = {"table": (text_of_table, use_table), "plan": (text_of_plan, use_plan)}


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("damage", [with_other_values, with_other_bytes])
def test_damaged_files(kind: str, damage: Callable[[str, random.Random], bytes], tmp_path: Path) -> None:
    make, use = FILES[kind]
    text, rng, refused = make(), random.Random(1), 0
    (tmp_path / "whole.json").write_text(text)
    use(tmp_path / "whole.json")
    for number in range(COUNT // 2):
        file = tmp_path / f"{number}.json"
        file.write_bytes(damage(text, rng))
        try:
            use(file)
        except LowbitError:
            refused += 1
    assert COUNT // 4 < refused < COUNT // 2  # some are as good as whole
