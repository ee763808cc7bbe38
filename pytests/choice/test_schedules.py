"""Which schedule a matmul gets: measured, its neighbour's, or the rule's; and what that does to the disk cache."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from fake_pipeline import FakePipeline, pipeline
from known_schedules import HOPPER, NEAR, ODD, SPEC, chosen, entry, table

import lowbit
from lowbit.dialect.errors import SpecError
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.decode.schedule import Schedule
from lowbit.passes.kernels.eight_bit.schedule import EightBitSchedule
from lowbit.passes.kernels.registry import FAMILIES, family_of
from lowbit.passes.kernels.streaming.legality import check_schedule
from lowbit.passes.scheduling import choice as schedule_choice
from lowbit.passes.scheduling.choice import (
    Chooser,
    choose,
    default_schedule,
    least_time,
    schedule_for,
)
from lowbit.passes.scheduling.tables import Entry, Key, parse_table, shipped_tables
from lowbit.passes.target import Target
from lowbit.passes.targets import parse_target
from lowbit.pylib.build import knobs
from lowbit.pylib.build import user_tables as schedules
from lowbit.pylib.matmul import Matmul

__all__ = ["pipeline"]


def test_what_was_measured_is_taken() -> None:
    (shipped,) = shipped_tables()
    assert (shipped.gpu, shipped.capability) == ("NVIDIA H200", 90) and len(shipped.entries) >= 20
    odd = [k for k, e in shipped.entries.items() if e.schedule != default_schedule(k.spec, k.tokens, HOPPER)]
    assert len(odd) >= 5  # so that it matters
    for i, (key, found) in enumerate(shipped.entries.items()):
        spec = key.spec
        same = [e for k, e in shipped.entries.items() if replace(k, tokens=key.tokens) == key]
        wider = [e for e in same if e.key.tokens > key.tokens]
        found = min([found, *wider], key=lambda e: e.microseconds)  # a wider tile's, where that takes less time
        for name in ("sm_90a", "emulator:sm_90a"):
            assert schedule_for(spec, key.tokens, parse_target(name)) == found.schedule
        other = replace(spec, bias=True, out="f32")  # whose results take more shared memory
        if family_of(found.schedule).suits(other, found.schedule, HOPPER, spec):
            assert schedule_for(other, key.tokens, HOPPER) == found.schedule
        if key.tokens > 64 or i % 4 or spec.invariant:
            continue  # for wgmma only; some are enough; the order of sums was measured for sm_90a alone
        plain = schedule_for(spec, key.tokens, parse_target("sm_90"))
        assert not getattr(plain, "wgmma", False) and (plain == found.schedule or found.schedule.wgmma)
        assert schedule_for(spec, key.tokens, parse_target("sm_80")) == default_schedule(
            spec, key.tokens, parse_target("sm_80")
        )


FAR = {
    "decoding": replace(SPEC, weight="nf4"),
    "bits": replace(SPEC, weight="u5"),
    "zeros": replace(SPEC, zeros="float"),
    "n": replace(SPEC, n=16384),
    "k": replace(SPEC, k=512),
    "half filled": replace(SPEC, n=8704),  # 136 blocks for 132 multiprocessors, as it was 96
    "shared memory": replace(SPEC, group_size=16, scale="f32", zeros="float"),
}


@pytest.mark.parametrize("near", NEAR)
def test_a_neighbour_lends_its_schedule(near: str) -> None:
    assert chosen(NEAR[near], table(entry(SPEC, ODD))) == ODD != default_schedule(NEAR[near], 16, HOPPER)


@pytest.mark.parametrize("far", FAR)
def test_the_rule_where_there_is_no_neighbour(far: str) -> None:
    schedule = ODD
    if far == "shared memory":
        schedule = replace(ODD, warps_n=1, row_blocks=4, warps_k=8, num_stages=6)
        check_schedule(SPEC, schedule, HOPPER)
    assert chosen(FAR[far], table(entry(SPEC, schedule))) != schedule
    assert chosen(SPEC, table(entry(SPEC, schedule))) == schedule


def test_preloaded_weights_are_for_as_many_blocks() -> None:
    """Half of the multiprocessors each for two kernels at a time: not with a block more for every fourth."""
    measured = MatmulSpec(n=4096, k=4096, weight="u4", group_size=128)
    schedule = Schedule(8, 1, 4, 2, 256, 1, wgmma=True, preload_weights=True, min_blocks=132)
    for n, lent in ((4096, True), (4224, True), (3840, True), (5120, False), (3072, False)):
        spec = replace(measured, n=n)
        assert (choose(spec, 8, HOPPER, [table(entry(measured, schedule))]) == schedule) == lent, n


def test_another_token_tile_is_no_neighbour() -> None:
    slow = table(entry(SPEC, ODD, 500.0))
    assert chosen(SPEC, slow) == ODD and chosen(SPEC, slow, token_tile=8) not in (ODD, replace(ODD, tokens=8))


def test_a_neighbour_that_is_expected_to_be_slower_is_not_taken() -> None:
    """It took longer where it was measured than the rule's schedule is predicted to take here; far away, that it was
    fast there says little."""
    for microseconds, taken in ((0.5, True), (500.0, False)):
        assert (chosen(NEAR["n"], table(entry(SPEC, ODD, microseconds))) == ODD) == taken
    assert chosen(replace(SPEC, n=2 * SPEC.n), table(entry(SPEC, ODD))) != ODD


def test_a_wider_tile_is_taken_where_it_is_faster() -> None:
    """What was measured gives way to what was measured, what is predicted to either."""
    eight, sixteen = replace(ODD, tokens=8), ODD
    for times, schedule in (((3.0, 2.0), sixteen), ((2.0, 3.0), eight)):
        known = table(*(entry(SPEC, s, us) for s, us in zip((eight, sixteen), times)))
        assert chosen(SPEC, known, token_tile=8) == schedule and chosen(SPEC, known) == sixteen
    assert chosen(SPEC, table(entry(SPEC, sixteen, 0.5)), token_tile=1) == sixteen
    assert chosen(SPEC, table(entry(SPEC, eight, 500.0)), token_tile=8) == eight  # measured, however slow


MODELS = [(5120, 17408), (24576, 4096), (34816, 5120), (7168, 2048), (1000, 4160)]


@pytest.mark.parametrize(("n", "k"), MODELS)
@pytest.mark.parametrize(("weight", "group"), [("u4", 128), ("u4", 32), ("f6e3m2", None)])
@pytest.mark.parametrize("target", ["sm_90a", "sm_80"])
def test_more_tokens_are_not_expected_to_take_less_time(
    n: int, k: int, weight: str, group: int | None, target: str
) -> None:
    group = group if group is None or k % group == 0 else 32
    spec, t = MatmulSpec(n, k, weight, group_size=group), parse_target(target)
    tables = [each for each in shipped_tables() if each.capability == t.capability]
    chooser = Chooser(spec, t)
    some = [tile for tile in chooser.token_tiles if tile <= 128 or tile in (160, 320, 1024)]
    choices = [chooser.expected(tile, tables) for tile in some]
    times = [choice.microseconds for choice in choices]
    assert times == sorted(times) and times[0] > 0.9 * least_time(spec, 1, t)
    for tile, choice in zip(some, choices):
        family = family_of(choice.schedule)
        assert family.allows(spec, choice.schedule, t)
        assert family.takes_any_tokens or choice.schedule.tokens >= tile


KINDS: list[tuple[int, int, dict[str, Any]]] = [
    (8192, 8192, {}),
    (34816, 5120, {"compute": "f8e4m3"}),
    (6144, 4096, {"compute": "f8e4m3", "fold_scales": True}),
    (7168, 2048, {"compute": "i8"}),
]


@pytest.mark.parametrize(("n", "k", "choices"), KINDS, ids=str)
def test_no_number_of_tokens_is_expected_to_take_less_time_than_fewer(n: int, k: int, choices: dict[str, Any]) -> None:
    """From 1 to 8192 tokens and between token tiles, where a kernel for any number has the tokens that it gets. What
    was measured may be 1 % apart from what is predicted."""
    spec, tables = MatmulSpec(n, k, "u4", 128, **choices), [t for t in shipped_tables() if t.capability == 90]
    longest, before, chooser = 0.0, 0, Chooser(spec, HOPPER)
    for tile in chooser.token_tiles:
        choice = chooser.expected(tile, tables)
        family, kind = family_of(choice.schedule), spec.for_tokens(tile)
        for m in sorted({before + 1, (before + 1 + tile) // 2, tile}):
            time = family.predict(kind, m, choice.schedule, HOPPER) if family.takes_any_tokens else choice.microseconds
            assert time > 0.99 * longest, (m, choice)
            longest = max(longest, time)
        before = tile


def test_nothing_is_predicted_to_take_less_than_the_least_time() -> None:
    """So a wider tile of which that is longer need not be looked at."""
    for (n, k), weight in product(MODELS, ("u1", "u4", "u8")):
        spec = MatmulSpec(n, k, weight, group_size=32)
        chooser = Chooser(spec, HOPPER)
        for tile in {1, 16, 128, 512, 8192}.intersection(chooser.token_tiles):
            assert chooser.predicted(tile).microseconds > least_time(spec, tile, HOPPER), (spec, tile)


def test_the_nearest_neighbour_that_fits() -> None:
    other, unfit = replace(ODD, num_stages=4), replace(ODD, step_k=192)
    near, nearer = replace(SPEC, n=5632), replace(SPEC, n=5888)
    assert chosen(SPEC, table(entry(near, ODD), entry(nearer, other))) == other
    assert chosen(SPEC, table(entry(near, ODD), entry(nearer, unfit))) == ODD


def test_whose_table_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    known, other = replace(ODD, num_stages=3), replace(ODD, num_stages=4)
    shipped, mine = table(entry(SPEC, known)), table(entry(SPEC, ODD))
    monkeypatch.setattr(schedule_choice, "shipped_tables", lambda: (shipped,))
    assert chosen(SPEC) == known and chosen(SPEC, mine) == ODD
    theirs = table(entry(SPEC, other), gpu="NVIDIA GH200 480GB")
    assert chosen(SPEC, mine, theirs) == chosen(SPEC, mine, theirs, gpu="NVIDIA H200") == ODD
    assert chosen(SPEC, mine, theirs, gpu="NVIDIA GH200 480GB") == other
    close = table(entry(replace(SPEC, act="bf16"), ODD))
    assert chosen(SPEC, close) == known  # the very matmul, before one like it


def test_what_a_target_lacks_is_not_taken() -> None:
    """A schedule that was measured with wgmma, where there is none."""
    mine = table(entry(SPEC, warpgroups := replace(ODD, warps_n=4, warps_k=2, wgmma=True)))
    assert chosen(SPEC, mine) == warpgroups
    older = parse_target("sm_90")
    assert schedule_for(SPEC, 16, older, None, [mine]) == schedule_for(SPEC, 16, older) != warpgroups


def test_distance_is_in_octaves() -> None:
    key = Key.of(SPEC, 1)
    assert key.distance(key) == 0
    assert key.distance(Key.of(replace(SPEC, n=2 * SPEC.n, k=SPEC.k // 4), 1)) == 3
    assert Key.of(replace(SPEC, act="bf16", scale="bf16"), 1).distance(key) == 0.5


def test_activations_of_8_bits_have_entries_of_their_own() -> None:
    """Neither the f16 matmul's schedule is taken for them, nor that of the other type; but a neighbour's is."""
    spec = replace(SPEC, compute="i8")
    measured = EightBitSchedule(tokens=16, row_blocks=2, warps_n=1, warps_k=8, step_k=64, num_stages=5)
    both = table(entry(SPEC, ODD), entry(spec, measured))
    assert len(both.entries) == 2 and parse_table(both.to_text(), "both") == both
    assert '"compute"' not in table(entry(SPEC, ODD)).to_text()  # as files were before
    assert chosen(SPEC, both) == ODD and chosen(spec, both) == measured
    assert chosen(replace(spec, n=5888), both) == measured
    assert chosen(replace(SPEC, compute="f8e4m3"), both) not in (ODD, measured)


def test_a_choice_looks_at_few_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made before the disk cache is asked, at every start; `python -m benchmarks show` has the time."""
    looked: Counter[str] = Counter()
    for family in FAMILIES.values():
        for name in ("predict", "suits"):
            count_calls(monkeypatch, type(family), name, looked)
    many = [entry(replace(SPEC, n=16 * n, k=128 * k), ODD) for n, k in product(range(200, 400), range(20, 40))]
    big = table(*many)
    asked = replace(SPEC, n=4097, k=1536 + 16, group_size=None)
    for tile in (1, 8, 16):  # in 4000 entries of the last one; a wider tile might be faster
        looked.clear()
        assert schedule_for(asked, tile, HOPPER, None, [big])
        assert looked["suits"] <= 20 and 0 < looked["predict"] <= 1000
    looked.clear()
    assert schedule_for(many[0].key.spec, 16, HOPPER, None, [big]) == ODD
    assert looked["predict"] == 0 and looked["suits"] == 1


@pytest.mark.parametrize(("compute", "name"), [(None, "prefill"), ("f8e4m3", "eight_bit_prefill")])
def test_a_schedule_is_checked_once_for_all_tokens(compute: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most candidates of a number of tokens are those of another number, too."""
    family, checked = FAMILIES[name], Counter[Any]()
    check = family.check

    def counted(spec: MatmulSpec, schedule: Any, target: Target) -> None:
        checked[schedule] += 1
        check(spec, schedule, target)

    monkeypatch.setattr(family, "check", counted)
    chooser = Chooser(MatmulSpec(4096 + 48, 4096, "u4", 128, compute=compute), HOPPER)
    for tile in chooser.any_tiles:
        chooser.predicted(tile)
    assert len(checked) > 15 and set(checked.values()) == {1}


def count_calls(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, calls: Counter[str]) -> None:
    """Count the calls of a method."""
    method = getattr(owner, name)

    def counted(*arguments: Any) -> Any:
        calls[name] += 1
        return method(*arguments)

    monkeypatch.setattr(owner, name, counted)


def test_the_choice_needs_neither_compiler_nor_torch(repo: Path) -> None:
    code = (
        "import sys; from dialect.spec import MatmulSpec; from passes.targets import parse_target\n"
        "from lowbit.passes.scheduling.choice import schedule_for\n"
        f"print(schedule_for({SPEC!r}, 1, parse_target('sm_90a')))\n"
        "print([m for m in ('torch_mlir', 'mlir', 'llvmlite', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=repo, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [str(schedule_for(SPEC, 1, HOPPER)), "[]"]


def test_user_tables(pipeline: FakePipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are taken at once; a new entry makes a new kernel where it is the one in question, and only there."""
    monkeypatch.setattr("lowbit.pylib.matmul._compile", Matmul)
    file = schedules.user_file("NVIDIA H200")
    assert file == knobs.cache_dir() / "schedules" / "nvidia_h200.json"
    file.parent.mkdir()

    def compiled(*entries: Entry) -> Schedule | None:
        file.with_suffix(".tmp").write_text(table(*entries).to_text())
        file.with_suffix(".tmp").replace(file)
        pipeline.compiled.clear()
        return lowbit.compile(SPEC, "sm_90a").kernel(16).schedule

    other, far = replace(ODD, num_stages=4), replace(SPEC, n=64)
    assert compiled(entry(far, ODD)) == schedule_for(SPEC, 16, HOPPER) != ODD
    assert compiled(entry(far, other)) == schedule_for(SPEC, 16, HOPPER) and not pipeline.compiled
    assert compiled(entry(SPEC, ODD)) == ODD and pipeline.tokens == [16]
    assert compiled(entry(SPEC, ODD), entry(far, ODD)) == ODD and not pipeline.compiled
    assert compiled(entry(SPEC, other)) == other and pipeline.tokens == [16]
    file.write_text("no table")
    with pytest.raises(SpecError, match=f"{file} is no table"):
        lowbit.compile(SPEC, "sm_90a")


def test_the_gpu_is_asked_for_only_where_it_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedules, "_this_gpu", lambda: "NVIDIA H20")
    assert schedules.gpu_name(HOPPER) is None
    assert schedules.gpu_name(HOPPER, (table(gpu="NVIDIA H20"),)) == "NVIDIA H20"
    assert schedules.gpu_name(parse_target("emulator:sm_90a"), (table(gpu="NVIDIA H20"),)) is None
