"""Tables of measured schedules: their files, their keys, and how two become one."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
from known_schedules import NEAR, ODD, SPEC, entry, table

from lowbit.dialect.errors import SpecError
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.decode.schedule import IntegerSchedule, Schedule
from lowbit.passes.kernels.registry import schedule_from_dict
from lowbit.passes.scheduling.tables import Entry, Key, merge, parse_table, read_table


def test_a_table_survives_its_file(tmp_path: Path) -> None:
    some = [entry(replace(SPEC, group_size=g), ODD, 1.25) for g in (None, 16, 128)]
    some.append(replace(entry(replace(SPEC, n=64), replace(ODD, max_blocks_per_sm=2)), kernel="1e8d3aad6b2c"))
    file = tmp_path / "a.json"
    file.write_text(table(*some).to_text())
    assert read_table(file) == table(*some)
    assert table(*reversed(some)).to_text() == table(*some).to_text()
    assert len(file.read_text().splitlines()) == len(some) + 7  # an entry to a line
    file.write_text(table().to_text())
    assert not read_table(file).entries  # read anew, as the file is another


@pytest.mark.parametrize(
    "damage",
    [
        "", "[]", "{", "[" * 100000, '"u4"->"u9"', '"u4"->"lut44"',
        '"act": "f16"->"act": "float16"', '"k": 1536->"k": 0', '"k": 1536->"k": 1536.0',
        '"u4"->4', '"num_stages": 5->"num_stages": 0', '"microseconds": 0.5->"microseconds": -0.5',
        '"microseconds": 0.5->"microseconds": NaN', '"2026-11-21"->20261121', '"gpu": "NVIDIA H200"->"gpu": 1',
        '"capability": 90->"capability": "90"', '"tokens": 16->"tokens": true',
    ],
    ids=lambda damage: damage[:30],
)  # fmt: skip
def test_a_damaged_table_is_named(tmp_path: Path, damage: str) -> None:
    old, arrow, new = damage.partition("->")
    text = table(entry(SPEC, ODD)).to_text()
    with pytest.raises(SpecError, match=r"mine.json is no table of schedules .*`lowbit tune`"):
        parse_table(text.replace(old, new) if arrow else damage, "mine.json")
    file = tmp_path / "mine.json"
    file.write_bytes(b"\xff" + text.encode())
    with pytest.raises(SpecError, match=r"mine\.json is no table of schedules"):
        read_table(file)


@pytest.mark.parametrize("family", ["permute", "quantize", "dequantize", "prepack", "eight_bit"])
def test_a_schedule_that_computes_another_operation_is_refused(family: str) -> None:
    written = json.loads(table(entry(SPEC, ODD)).to_text())
    written["entries"][0]["schedule"] = {"family": family}
    message = f"family='{family}' does not compute this matmul; allowed: 'decode', .*'prefill'"
    with pytest.raises(SpecError, match=message):
        parse_table(json.dumps(written), "mine.json")
    written["entries"][0]["compute"] = "i8"
    if family == "eight_bit":
        assert parse_table(json.dumps(written), "mine.json").entries
    written["entries"][0]["schedule"] = {"family": "decode"}
    with pytest.raises(SpecError, match="family='decode' does not compute this matmul; allowed: 'eight_bit'"):
        parse_table(json.dumps(written), "mine.json")


def test_merge_keeps_the_faster_of_one_version_and_the_newer_of_two() -> None:
    other = replace(ODD, num_stages=4)
    a = table(entry(SPEC, ODD, 5.0), entry(replace(SPEC, n=64), ODD))
    b = table(entry(SPEC, other, 4.0), entry(replace(SPEC, n=32), ODD))
    for both in (merge([a, b]), merge([b, a])):
        assert len(both.entries) == 3 and both.entries[Key.of(SPEC, 16)].schedule == other
    slower = replace(entry(SPEC, ODD, 6.0), version="0.1.0+2", kernel="1e8d3aad6b2c")
    assert merge([a, b, table(slower)]).entries[Key.of(SPEC, 16)] == slower  # of the same day: the last
    assert merge([table(slower), b]).entries[Key.of(SPEC, 16)].schedule == other
    newer = replace(slower, date="2026-11-22")
    for both in (merge([a, table(newer)]), merge([table(newer), a])):
        assert both.entries[Key.of(SPEC, 16)] == newer
    with pytest.raises(SpecError, match="one GPU, but these are for NVIDIA H200 and NVIDIA A100"):
        merge([a, table(gpu="NVIDIA A100")])


def test_a_key_names_its_matmul() -> None:
    eight_bits = (replace(SPEC, compute="i8"), replace(SPEC, compute="f8e4m3"))
    for spec in (SPEC, *NEAR.values(), replace(SPEC, weight="lut3", table=tuple(range(8))), *eight_bits):
        assert Key.of(Key.of(spec, 16).spec, 16) == Key.of(spec, 16)


def test_a_key_has_every_field_of_a_spec_that_a_schedule_may_depend_on() -> None:
    """A field that is added to a spec is one of keys: it stands in files where it has not its default, and counts
    between neighbours."""
    left_out = {"bias", "out", "row_scales", "permuted", "compute_from", "epilogue", "table"}
    assert Key.of(SPEC, 16).to_dict().keys() - {"tokens"} == {f.name for f in fields(MatmulSpec)} - left_out
    spec = MatmulSpec(64, 256, "lut1", 64, out="f32", bias=True, table=(1.0, 2.5), permuted=True, epilogue="residual")
    assert Key.of(spec, 16) == Key.of(MatmulSpec(64, 256, "lut1", 64, table=(0.0, 1.0)), 16)


SIZE = '"n": 64, "k": 256, "group_size": '
WRITTEN = [
    f'{{"weight": "u4", {SIZE}null, "zeros": "none", "scale": "f16", "act": "f16", "tokens": 16}}',
    f'{{"weight": "lut1", {SIZE}64, "zeros": "none", "scale": "f16", "act": "bf16", "tokens": 16}}',
    (
        f'{{"weight": "u3", {SIZE}16, "zeros": "float", "scale": "u3", "act": "f16", "tokens": 16, '
        '"bilevel": {"rows": 16, "groups": 1, "scale": "f16", "zeros": true}, "outliers": true}'
    ),
    (
        f'{{"weight": "u4", {SIZE}64, "zeros": "offset", "scale": "u6", "act": "f16", "tokens": 16, '
        '"compute": "f8e4m3", "bilevel": {"rows": 1, "groups": 2, "scale": "f16", "zeros": false}, "fold_scales": true}'
    ),
]
"""Keys as version 0.1 wrote them in tables."""


@pytest.mark.parametrize("written", WRITTEN)
def test_keys_of_files_stay_as_they_are(written: str) -> None:
    key = Key.from_dict(json.loads(written))
    family = "eight_bit" if "compute" in written else "decode"
    found = Entry(key, schedule_from_dict({"family": family, "tokens": 16}), 1.0, "2026-11-21", "0.1.0")
    assert json.dumps(found.to_json()).startswith(written[:-1] + ', "schedule"')
    assert Key.from_dict(key.to_dict()) == key == Key.of(key.spec, 16)  # as logs have it


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"act": "float16"}, "act='float16' must be 'f16'"),
        ({"tokens": 0}, "tokens=0 must be at least 1"),
        ({"weight": "u9"}, "unknown weight format 'u9'"),
        ({"outliers": 1}, "outliers=1 must be True or False"),
    ],
)
def test_a_key_that_is_none(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Key.from_dict(json.loads(WRITTEN[0]) | change)


def test_a_schedule_of_the_first_version_is_still_read() -> None:
    """Tables and tuning logs of version 0.1 have other names, and numbers for all choices."""
    old = {"tokens": 64, "stages": 2, "splits": 2, "cluster": 2, "wgmma": 1, "warps_n": 4, "max_blocks": 1, "late": 2}
    new = Schedule(64, warps_n=4, num_stages=2, split_k=2, cluster=2, wgmma=True, max_blocks_per_sm=1)
    new = replace(new, refill="per_warp")
    assert Schedule.from_dict(old) == new == Schedule.from_dict(asdict(new))
    old = {"tokens": 1, "stages": 1, "resident": 1, "least_blocks": 132, "throttle": 0, "bare": 1, "late": 0}
    assert Schedule.from_dict(old) == Schedule(1, num_stages=1, preload_weights=True, min_blocks=132, raw_codes=True)
    for flag in ({"digits": 1}, {"integer_mma": True}):
        assert schedule_from_dict({"tokens": 1} | flag) == IntegerSchedule()


@pytest.mark.parametrize("wrong", [{"depth": 3}, {"late": 3}, {"digits": 2}, {"stages": "2"}], ids=str)
def test_a_schedule_of_no_version_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match="schedule: "):
        Schedule.from_dict(wrong)
