"""Tables of schedules for weights of several experts: what is taken from them, by whom, and how they are tuned."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from made_up_gpu import Bench
from typer.testing import CliRunner

from lowbit.dialect.errors import SpecError
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.base import KernelSchedule
from lowbit.passes.kernels.decode.schedule import Schedule
from lowbit.passes.kernels.experts.schedule import ExpertsSchedule
from lowbit.passes.kernels.experts_decode.schedule import ExpertsDecodeSchedule
from lowbit.passes.kernels.experts_mma.schedule import ExpertsMmaSchedule
from lowbit.passes.kernels.registry import family_of
from lowbit.passes.scheduling.expert_choice import choose_for_slots
from lowbit.passes.scheduling.expert_rule import schedule_for_few, tile_for, tiles_of
from lowbit.passes.scheduling.tables import Entry, Key, Table, parse_table, read_table
from lowbit.passes.targets import parse_target
from lowbit.pylib.build import user_tables
from lowbit.pylib.build.kernels import kernel_choices
from lowbit.pylib.cli.main import app
from lowbit.pylib.experts.routing import route
from lowbit.pylib.reference import random_inputs
from lowbit.pylib.runtime.expert_matmul import ExpertMatmul
from lowbit.pylib.tune import processes as tune_processes
from lowbit.pylib.tune import session as tuner
from lowbit.pylib.tune.model_shapes import Size, matmul_sizes
from lowbit.pylib.tune.problem import Problem
from lowbit.pylib.tune.routings import cold_routings
from lowbit.pylib.tune.search_space import candidates, neighbours
from lowbit.pylib.tune.work import problems, with_kernels
from lowbit.pylib.weights.packed import pack

HOPPER, EMULATED = parse_target("sm_90a"), parse_target("emulator:sm_80")
SPEC = MatmulSpec(8 * 128, 512, "u4", 64, experts=8)
EIGHT_BIT = replace(SPEC, compute="i8")
ODD = ExpertsDecodeSchedule(8, 1, 1, 2, 64, 2)  # that no rule has


def entry(slots: int, schedule: KernelSchedule = ODD, spec: MatmulSpec = SPEC) -> Entry:
    return Entry(Key.of(spec, slots), schedule, 1.0, "2026-11-28", "0.1.0")


def table(*entries: Entry, capability: int = 90, gpu: str = "NVIDIA H200") -> Table:
    return Table(gpu, capability, "by hand", {each.key: each for each in entries})


def chosen(slots: int, *entries: Entry, spec: MatmulSpec = SPEC, tile: int = 8) -> tuple[KernelSchedule, str]:
    return tuple(choose_for_slots(spec, tile, slots, HOPPER, [table(*entries)]))


# -- what is taken


def test_an_entry_serves_about_so_many_slots() -> None:
    """From half to twice as many, unless another is nearer."""
    other = replace(ODD, warps_k=4)
    known = entry(16), entry(40, other)
    rule = "rule"
    expected = {7: rule, 8: ODD, 16: ODD, 25: ODD, 26: other, 80: other, 81: rule}
    found = {slots: chosen(slots, *known) for slots in expected}
    assert {slots: rule if origin == rule else s for slots, (s, origin) in found.items()} == expected
    assert [found[slots][1] for slots in (8, 16)] == ["like one measured", "measured"]
    assert found[7][0] == schedule_for_few(SPEC, 8, 7, HOPPER)
    assert chosen(0, entry(1))[0] == ODD


@pytest.mark.parametrize(
    "spec",
    [
        replace(SPEC, n=2 * SPEC.n),
        replace(SPEC, experts=4),
        replace(SPEC, k=1024),
        replace(SPEC, weight="i4"),
        replace(SPEC, act="bf16"),
        EIGHT_BIT,
    ],
    ids=str,
)
def test_an_entry_is_for_one_weight(spec: MatmulSpec) -> None:
    tile = tiles_of(spec, HOPPER)[0]
    assert chosen(16, entry(16), spec=spec, tile=tile)[1] == "rule"


def test_what_plays_no_part_in_an_entry() -> None:
    for spec in (replace(SPEC, bias=True), replace(SPEC, epilogue="silu_mul"), replace(SPEC, permuted=True)):
        assert chosen(16, entry(16), spec=spec) == (ODD, "measured")


def test_an_entry_for_other_token_tiles_or_that_does_not_fit_is_left() -> None:
    assert chosen(16, entry(16), tile=16)[1] == "rule"
    assert chosen(16, entry(16, replace(ODD, step_k=48)))[1] == "rule"
    assert chosen(20, entry(16, replace(ODD, step_k=48)), entry(32)) == (ODD, "like one measured")


def test_experts_are_no_neighbours_of_a_dense_matmul() -> None:
    assert Key.of(SPEC, 16).kind != Key.of(replace(SPEC, experts=1), 16).kind


def test_a_table_is_read_as_it_was_written() -> None:
    written = table(entry(16), entry(500, spec=replace(SPEC, act="bf16"))).to_text()
    assert '"experts": 8' in written and parse_table(written, "t").to_text() == written
    wrong = table(Entry(Key.of(SPEC, 8), Schedule(tokens=8), 1.0, "", "")).to_text()
    with pytest.raises(SpecError, match=r"family='decode' does not compute this matmul; allowed: .*'experts_decode'"):
        parse_table(wrong, "t")
    dense = table(Entry(Key.of(replace(SPEC, experts=1), 8), ODD, 1.0, "", "")).to_text()
    with pytest.raises(SpecError, match="family='experts_decode' does not compute this matmul"):
        parse_table(dense, "t")


# -- by whom


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A user's tables, with an entry for 16 slots on either target."""
    monkeypatch.setenv("LOWBIT_CACHE_DIR", str(tmp_path))
    for name, capability in (("NVIDIA H200", 90), ("NVIDIA A100", 80)):
        path = user_tables.user_file(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(table(entry(16), capability=capability, gpu=name).to_text())
    yield tmp_path


def test_choices_say_where_a_schedule_comes_from(known: Path) -> None:
    choices = kernel_choices(SPEC, HOPPER)
    assert [choices.launches(slots)[0].schedule == ODD for slots in (7, 8, 16, 32, 33)] == [False, *[True] * 3, False]
    text = str(choices)
    assert "(measured)" not in text.split("8 to ")[0] and "(rule)" in text and "(like one measured)" in text
    written = json.dumps(choices.to_dict())
    assert '"origin": "like one measured"' in written and '"origin": "rule"' in written
    for slots in range(1, 60):
        tile = tile_for(tiles_of(SPEC, HOPPER), slots, 8)
        tables = user_tables.trusted(HOPPER)
        assert choices.launches(slots)[0].schedule == choose_for_slots(SPEC, tile, slots, HOPPER, tables).schedule


def test_a_call_takes_what_was_measured(known: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mm = ExpertMatmul(SPEC, EMULATED)
    assert [mm.kernel(8, slots).schedule == ODD for slots in (7, 8, 32, 33)] == [False, True, True, False]
    x, weight = random_inputs(SPEC, 8)
    routing = route(torch.arange(16).reshape(8, 2) % 8, 8, 8)
    given = (x, routing.rows, routing.tiles, pack(SPEC, **weight).tensors, 8)
    found = mm(*given)
    monkeypatch.setattr(user_tables, "trusted", lambda target: [])
    other = ExpertMatmul(SPEC, EMULATED)
    assert other.kernel(8, 16).schedule != ODD
    torch.testing.assert_close(found, other(*given), rtol=1e-2, atol=1e-2)


def test_the_command_line_shows_the_kernel_of_so_many_slots(known: Path) -> None:
    sizes = ("-n", SPEC.n, "-k", SPEC.k, "-g", 64, "--experts", 8, "-t", "sm_90a", "--stop-after", "lowbit")
    texts = {slots: lowbit("compile", *sizes, "-m", slots).output for slots in (7, 16)}
    assert ["row_blocks = 1, " in text and "step_k = 64" in text for text in texts.values()] == [False, True]


def lowbit(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "200", "TERM": "dumb"})


# -- tuning


@pytest.mark.parametrize("slots", [1, 16, 300, 4096])
@pytest.mark.parametrize("spec", [SPEC, EIGHT_BIT], ids=["act", "bytes"])
def test_candidates_are_of_one_size_of_token_tiles(spec: MatmulSpec, slots: int) -> None:
    """The rule's comes first, and then its family."""
    tile = tile_for(tiles_of(spec, HOPPER), slots, 8)
    found: list[Any] = candidates(spec, slots, HOPPER, 40)
    assert found[0] == schedule_for_few(spec, tile, slots, HOPPER) and len(found) == len(set(found)) <= 40
    assert {s.tokens for s in found} == {tile} and len(found) > 1
    assert all(family_of(s).allows(spec, s, HOPPER) for s in found)
    near: list[Any] = neighbours(spec, slots, HOPPER, found[0])
    assert near and {s.tokens for s in near} == {tile}


def test_a_session_of_experts(tmp_path: Path) -> None:
    work = [Problem(SPEC, 16, 2), Problem(SPEC, 1024, 2), Problem(EIGHT_BIT, 1024, 2)]
    assert with_kernels(work, HOPPER) == work
    bench = Bench(tmp_path / "log.jsonl")
    found = bench.run(work)
    assert [e.key for e in found] == [Key.of(p.spec, p.token_tile) for p in work]
    times = [[Bench.truth(p, s) for q, s, _ in bench.timed if q == p] for p in work]
    assert [e.microseconds for e in found] == list(map(min, times)) and any(each[0] > min(each) for each in times)
    assert bench.run(work) == found and not bench.timed  # from the log
    assert str(work[0]).endswith("8 experts, m = 8, 2 of each token")


def test_experts_without_kernels_are_left_out() -> None:
    odd = replace(SPEC, k=500, group_size=None)
    assert with_kernels([Problem(odd, 16), Problem(SPEC, 16)], HOPPER) == [Problem(SPEC, 16)]
    with pytest.raises(SpecError, match=r"no kernel multiplies by|copies x in whole 16-byte pieces"):
        with_kernels([Problem(odd, 16)], HOPPER)


def test_sizes_of_mixtures() -> None:
    gate_up, down = Size(128 * 1536, 2048, 128, 8), Size(128 * 2048, 768, 128, 8)
    assert matmul_sizes(["qwen3-30B-A3B"]) == [gate_up, down] and matmul_sizes(["Qwen3-30B-A3B/down"]) == [down]
    assert matmul_sizes(["64x256", "Llama-2-7B/o"], 4, 2) == [Size(64, 256, 4, 2), Size(4096, 4096, 4, 2)]
    found = problems([gate_up, (64, 256)], ["u4"], [128], [1, 8])
    assert [(p.spec.experts, p.token_tile, p.top_k, p.tokens) for p in found] == [
        *((128, 8, 8, 1), (128, 64, 8, 8)),
        *((1, 1, 1, 1), (1, 8, 1, 8)),
    ]
    assert [p.token_tile for p in problems([gate_up], ["u4"], [128], [7])] == [56]
    with pytest.raises(SpecError, match="tokens=7 must be one of"):
        problems([gate_up, (64, 256)], ["u4"], [128], [7])
    with pytest.raises(SpecError, match="the matrices of the experts of Qwen3-30B-A3B are gate_up, down"):
        matmul_sizes(["Qwen3-30B-A3B/qkv"])


class Stand:
    """A GPU process of `Bench`'s."""

    def __init__(self, bench: Bench) -> None:
        self.time, self.check = bench.time, bench.check

    def __enter__(self) -> Stand:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def test_the_command_from_start_to_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What was tuned is what a layer then gets."""
    clock = Bench(tmp_path / "none")
    monkeypatch.setenv("LOWBIT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tuner, "this_gpu", lambda: ("NVIDIA H200", HOPPER))
    monkeypatch.setattr(tune_processes, "GpuProcess", lambda target: Stand(clock))
    options = ("1024x512", "--experts", 8, "--top-k", 2, "-g", 64, "-m", 7, "--candidates", 4, "--jobs", 1)
    result = lowbit("tune", *options)
    assert result.exit_code == 0 and "8 experts, m = 7, 2 of each token: " in result.stderr, result.output
    best = min((s for _, s, _ in clock.timed), key=lambda s: Bench.truth(Problem(SPEC, 14, 2), s))
    ((key, found),) = read_table(user_tables.user_file("NVIDIA H200")).entries.items()
    assert key == Key.of(SPEC, 14) and found.schedule == best
    assert ExpertMatmul(SPEC, HOPPER)._few._schedule(best.tokens, 14) == best  # type: ignore[union-attr]
    assert lowbit("tune", *options[:-2], "--top-k", 9).exit_code == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--experts", 4, "--top-k", 5), "--top-k=5 must be in 1..4, the experts that there are (--experts)"),
        (("--top-k", 2), "--top-k=2 says how many experts a token has: give their number, --experts"),
        (("--experts", 5), "experts=5 needs n=1024, the rows of all, to be a multiple of 80"),
    ],
)
def test_wrong_numbers_of_experts(options: tuple[object, ...], message: str) -> None:
    result = lowbit("tune", "1024x512", *options)
    assert result.exit_code == 1 and message in " ".join(result.stderr.split())


def test_every_call_reads_other_experts() -> None:
    """Of a weight that is larger than what a call reads."""
    weight = pack(SPEC, **random_inputs(SPEC, 1)[1])
    found = cold_routings(weight, 1, 2, 16)
    assert len({tuple(each.ids.flatten().tolist()) for each in found}) > 10
    for each in found[:3]:
        assert torch.equal(each.routing.tiles, route(each.ids, 8, 16).tiles)
        first = each.routing.tiles[1 : 1 + int(each.routing.tiles[0, 0]), 0]
        assert torch.equal(each.experts.unique().int(), first)


def test_all_families_of_a_size_of_token_tiles_are_searched() -> None:
    """The rule's first."""
    kinds = [type(s) for s in candidates(SPEC, 400, HOPPER, 1000)]
    every = {ExpertsDecodeSchedule, ExpertsSchedule, ExpertsMmaSchedule}
    assert kinds[0] is ExpertsDecodeSchedule and set(kinds) == every
    first = kinds.index(next(kind for kind in kinds if kind is not ExpertsDecodeSchedule))
    assert ExpertsDecodeSchedule not in kinds[first:]
