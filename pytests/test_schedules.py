"""Which schedule a matmul gets: measured, its neighbour's, or the rule's; and what that does to the disk cache."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from fake_pipeline import FakePipeline, pipeline

import lowbit
from lowbit.dialect.errors import SpecError
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.decode.cost_model import predict, registers, spills
from lowbit.passes.kernels.decode.legality import check_schedule, shared_bytes
from lowbit.passes.kernels.decode.plan import KernelPlan
from lowbit.passes.kernels.decode.schedule import IntegerSchedule, Schedule
from lowbit.passes.kernels.decode.search_space import all_schedules
from lowbit.passes.kernels.eight_bit.schedule import EightBitSchedule
from lowbit.passes.kernels.registry import FAMILIES, family_of, schedule_from_dict
from lowbit.passes.scheduling import choice as schedule_choice
from lowbit.passes.scheduling.choice import (
    TOKEN_TILES,
    choose,
    default_schedule,
    expected,
    least_time,
    predicted,
    schedule_for,
    token_tiles,
)
from lowbit.passes.scheduling.tables import Entry, Key, Table, merge, parse_table, read_table, shipped_tables
from lowbit.passes.target import parse_target
from lowbit.pylib import knobs
from lowbit.pylib.build import user_tables as schedules
from lowbit.pylib.matmul import Matmul

__all__ = ["pipeline"]

HOPPER = parse_target("sm_90a")
SPEC = MatmulSpec(n=6144, k=1536, weight="u4", group_size=128)
ODD = Schedule(tokens=16, row_blocks=2, warps_n=2, warps_k=4, step_k=64, num_stages=5)  # as no rule would have it


def entry(spec: MatmulSpec, schedule: Schedule, microseconds: float = 0.5) -> Entry:
    """As fast as no prediction is, so that it is taken."""
    return Entry(Key.of(spec, schedule.tokens), schedule, microseconds, "2026-11-21", "0.1.0")


def table(*entries: Entry, gpu: str = "NVIDIA H200") -> Table:
    return Table(gpu, 90, "by hand", {}).with_entries(entries)


def chosen(spec: MatmulSpec, *tables: Table, tile: int = 16, gpu: str | None = None) -> Schedule:
    return schedule_for(spec, tile, HOPPER, gpu, tables)


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
        assert schedule_for(replace(spec, bias=True, out="f32"), key.tokens, HOPPER) == found.schedule
        if key.tokens > 64 or i % 4:
            continue  # for wgmma only; and some are enough
        plain = schedule_for(spec, key.tokens, parse_target("sm_90"))
        assert not getattr(plain, "wgmma", False) and (plain == found.schedule or found.schedule.wgmma)
        assert schedule_for(spec, key.tokens, parse_target("sm_80")) == default_schedule(
            spec, key.tokens, parse_target("sm_80")
        )


NEAR = {
    "act": replace(SPEC, act="bf16"),
    "group": replace(SPEC, group_size=64),
    "rows": replace(SPEC, group_size=None),
    "format": replace(SPEC, weight="i4"),
    "n": replace(SPEC, n=5888),
    "k": replace(SPEC, k=1792),
}
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
    assert chosen(SPEC, slow) == ODD and chosen(SPEC, slow, tile=8) not in (ODD, replace(ODD, tokens=8))


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
        assert chosen(SPEC, known, tile=8) == schedule and chosen(SPEC, known) == sixteen
    assert chosen(SPEC, table(entry(SPEC, sixteen, 0.5)), tile=1) == sixteen
    assert chosen(SPEC, table(entry(SPEC, eight, 500.0)), tile=8) == eight  # measured, however slow


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
    some = [tile for tile in token_tiles(spec, t) if tile <= 128 or tile in (160, 320, 1024)]
    choices = [expected(spec, tile, t, tables) for tile in some]
    times = [choice.microseconds for choice in choices]
    assert times == sorted(times) and times[0] > 0.9 * least_time(spec, 1)
    for tile, choice in zip(some, choices):
        assert choice.schedule == choose(spec, tile, t, tables)
        family = family_of(choice.schedule)
        assert family.allows(spec, choice.schedule, t)
        assert family.takes_any_tokens or choice.schedule.tokens >= tile


def test_nothing_is_predicted_to_take_less_than_the_least_time() -> None:
    """So a wider tile of which that is longer need not be looked at."""
    for (n, k), weight in product(MODELS, ("u1", "u4", "u8")):
        spec = MatmulSpec(n, k, weight, group_size=32)
        for tile in (1, 16, 128, 512, 8192):
            if tile in token_tiles(spec, HOPPER):
                assert predicted(spec, tile, HOPPER).microseconds > least_time(spec, tile), (spec, tile)


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
    assert key.distance(replace(key, n=2 * key.n, k=key.k // 4)) == 3
    assert replace(key, act="bf16", scale="bf16").distance(key) == 0.5


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
    "damage", ["", "[]", "{", '"u4"->"u9"', '"k": 1536->"k": 0', '"num_stages": 5->"num_stages": 0']
)
def test_a_damaged_table_is_named(tmp_path: Path, damage: str) -> None:
    old, arrow, new = damage.partition("->")
    text = table(entry(SPEC, ODD)).to_text()
    with pytest.raises(SpecError, match=r"mine.json is no table of schedules .*`lowbit tune`"):
        parse_table(text.replace(old, new) if arrow else damage, "mine.json")
    file = tmp_path / "mine.json"
    file.write_bytes(b"\xff" + text.encode())
    with pytest.raises(SpecError, match=r"mine\.json is no table of schedules"):
        read_table(file)


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


def count_calls(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, calls: Counter[str]) -> None:
    """Count the calls of a method."""
    method = getattr(owner, name)

    def counted(*arguments: Any) -> Any:
        calls[name] += 1
        return method(*arguments)

    monkeypatch.setattr(owner, name, counted)


def test_the_choice_needs_neither_compiler_nor_torch(repo: Path) -> None:
    code = (
        "import sys; from dialect.spec import MatmulSpec; from passes.target import parse_target\n"
        "from lowbit.passes.scheduling.choice import schedule_for\n"
        f"print(schedule_for({SPEC!r}, 1, parse_target('sm_90a')))\n"
        "print([m for m in ('torch_mlir', 'mlir', 'llvmlite', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=repo, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [str(schedule_for(SPEC, 1, HOPPER)), "[]"]


@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_87", "sm_89", "sm_90a"])
def test_the_rule_always_fits(target: str) -> None:
    """Formats of all chunk sizes, groups that are padded, one row block to very many, k of one step to very many."""
    t = parse_target(target)
    weights, groups = ("u1", "u2", "u3", "u4", "i6", "f8e4m3", "u8"), (None, 16, 32, 128, 1000)
    for weight, group, (n, k), tile in product(
        weights, groups, ((1, 16), (16, 2000), (4096, 512), (1000, 28000), (131072, 8192)), TOKEN_TILES
    ):
        if group and k % group:
            continue
        spec = MatmulSpec(n, k, weight, group_size=group, zeros="float", scale="f32")
        if tile not in token_tiles(spec, t):
            continue
        s = default_schedule(spec, tile, t)
        family_of(s).check(spec, s, t)
        if not isinstance(s, Schedule):  # a prefill kernel, for any number of tokens
            continue
        plan = KernelPlan(spec, s)
        assert s.tokens in (tile, max(8, tile)) and (s.warps_k == 1 or plan.steps >= s.warps_k)
        assert s.split_k == 1 or plan.rounds >= 2


def test_the_rule_fills_the_multiprocessors() -> None:
    for n, tile in product((2048, 4096, 6144, 8192, 14336, 57344), TOKEN_TILES):
        spec = replace(SPEC, n=n, k=8192)
        for target in (HOPPER, parse_target("sm_90")):
            if tile not in token_tiles(spec, target):
                continue
            s = default_schedule(spec, tile, target)
            if not isinstance(s, Schedule):  # the prefill kernel has a block for each
                continue
            # Half of them were enough to win at 2048 x 5632.
            assert KernelPlan(spec, s).tiles * s.split_k >= min(0.45 * 132, n / 16), (n, tile)


def test_clusters_of_four_leave_multiprocessors_out() -> None:
    """128 blocks for 132 multiprocessors: in one go in clusters of two, not in clusters of four."""
    spec, two = replace(SPEC, n=4096, k=8192), Schedule(16, 1, 4, 4, 128, 2, 2, 2, True, 1)
    four = replace(two, warps_n=8, warps_k=2, split_k=4, cluster=4)
    assert KernelPlan(spec, two).tiles * 2 == KernelPlan(spec, four).tiles * 4 == 128
    fewer = replace(spec, n=3072)  # 96 blocks

    def ratio(spec: MatmulSpec) -> float:
        return predict(spec, 16, four, HOPPER) / predict(spec, 16, two, HOPPER)

    assert ratio(spec) > 1.3 * ratio(fewer)


@pytest.mark.parametrize(
    "s",
    [
        Schedule(8, 1, 4, 4, 128, 2, wgmma=True),
        Schedule(64, 2, 4, 1, 256, 2, wgmma=True),
        Schedule(128, 1, 4, 4, 64, 2, wgmma=True),
        Schedule(8, 1, 4, 4, 512, 1, wgmma=True, preload_weights=True),
        Schedule(8, 1, 2, 8, 512, 1, preload_weights=True),
        Schedule(8, 2, 1, 8, 128, 3),
        IntegerSchedule(1, 4, 1, 8, 256, 2),
    ],
)
def test_registers_are_about_what_the_assembler_takes(s: Schedule) -> None:
    from lowbit.passes.codegen.cubin import resource_usage
    from lowbit.passes.pipeline import compile_matmul

    spec = replace(SPEC, k=4096 if s.preload_weights else 8192)
    used = resource_usage(compile_matmul(spec, HOPPER, s).ptx, HOPPER)
    assert used.spill_stores == 0 and abs(registers(spec, s) - used.registers) <= 16


@pytest.mark.parametrize(
    ("weight", "zeros", "choice", "raw"),
    [
        ("u4", "none", {}, True),  # nothing is to be taken away
        ("i4", "none", {}, False),
        ("u4", "int", {}, False),
        ("i4", "float", {}, True),  # sums of x are there anyway
        ("u4", "float", {"warps_n": 4, "wgmma": True}, False),  # but not where they would cost as much as 64 rows
        ("u2", "float", {"row_blocks": 2}, False),  # decoded too large by a bias instead
        ("nf4", "float", {}, False),
    ],
)
def test_what_is_multiplied_as_it_is_stored(weight: str, zeros: str, choice: dict[str, Any], raw: bool) -> None:
    spec = replace(SPEC, weight=weight, zeros=zeros)  # type: ignore[arg-type]
    s = replace(Schedule(8, 1, 1, 8, 128, 2), **choice)
    assert KernelPlan(spec, s).raw_codes == raw
    assert not KernelPlan(spec, IntegerSchedule()).raw_codes
    if raw:
        with pytest.raises(SpecError, match="multiplied as it is stored anyway; take raw_codes=False"):
            check_schedule(spec, replace(s, raw_codes=True), HOPPER)


@pytest.mark.parametrize(
    ("n", "k", "tile", "shape"),
    [
        (4096, 4096, 16, (4, 1)),  # warps along k, splits
        (2048, 8192, 8, (4, 2)),
        (1024, 2048, 16, (1, 4)),  # too few rows for blocks of 16 warps
        (2560, 2560, 64, (1, 2)),
        (4096, 4096, 64, None),  # too large for so many tokens
        (8192, 4096, 8, None),
        (4096, 4096, 1, None),
        (4000, 4000, 8, None),  # comes out even with no split
    ],
)
def test_small_matrices_are_preloaded_by_rule(n: int, k: int, tile: int, shape: tuple[int, int] | None) -> None:
    spec = replace(SPEC, n=n, k=k, weight="u4", group_size=None)
    s = default_schedule(spec, tile, HOPPER)
    assert s.preload_weights == (shape is not None) and shape in (None, (s.warps_k, s.split_k))
    assert not default_schedule(spec, min(tile, 64), parse_target("sm_80")).preload_weights


@pytest.mark.parametrize("n", [1024, 2048, 6144, 14336])
@pytest.mark.parametrize("weight", ["u4", "u3", "nf4"])
@pytest.mark.parametrize("tile", [8, 64, 128])
def test_the_rule_with_wgmma_is_the_best_predicted(n: int, weight: str, tile: int) -> None:
    """About: of all schedules, not only of the few that there is time for."""
    spec = replace(SPEC, n=n, k=8192, weight=weight)
    s = min(FAMILIES["decode"].candidates(spec, tile, HOPPER), key=lambda s: predict(spec, tile, s, HOPPER))
    found = [e for e in all_schedules(spec, tile, HOPPER, FAMILIES["decode"]) if e.wgmma and e.warps_n <= 8]
    every = [e for e in found if not e.preload_weights and not spills(spec, e, HOPPER)]
    assert s.wgmma
    most = 1.15 if s.preload_weights else 1.07  # preloaded weights take less time than is predicted
    assert predict(spec, tile, s, HOPPER) <= most * min(predict(spec, tile, each, HOPPER) for each in every)


def test_a_tile_that_is_none() -> None:
    for choice in (default_schedule, schedule_for):
        with pytest.raises(SpecError, match="tokens=5 must be one of 1, 8, 16, 32, 64, 128, 160, 192, 256"):
            choice(SPEC, 5, HOPPER)
        with pytest.raises(SpecError, match=r"tokens=256 must be .*, 64 for u4, k=1020 .* whose x is not in whole"):
            choice(replace(SPEC, k=1020, group_size=None), 256, HOPPER)
        with pytest.raises(SpecError, match=r"64, 160, .* for u4, k=.* on sm_80, which has no wgmma"):
            choice(SPEC, 128, parse_target("sm_80"))


LOOKUPS = (replace(SPEC, weight="nf4"), replace(SPEC, weight="lut6", table=tuple(range(64)), act="bf16", scale="bf16"))


@pytest.mark.parametrize("spec", [SPEC, replace(SPEC, weight="u3", group_size=32, zeros="int"), NEAR["rows"], *LOOKUPS])
@pytest.mark.parametrize("tile", [1, 16])
def test_shared_memory_is_what_the_kernel_takes(spec: MatmulSpec, tile: int) -> None:
    from lowbit.passes.pipeline import compile_matmul

    kernel = compile_matmul(spec, HOPPER, tokens=tile)
    chosen = schedule_for(spec, tile, HOPPER)
    assert kernel.schedule == chosen
    free = replace(chosen, max_blocks_per_sm=0)  # a limit claims more than it needs
    assert compile_matmul(spec, HOPPER, free).launch.shared_bytes == shared_bytes(spec, free)


HOPPERS = {
    "wgmma": Schedule(tokens=16, row_blocks=1, warps_n=4, warps_k=2, step_k=128, num_stages=3, wgmma=True),
    "wgmma alone along k": Schedule(tokens=64, row_blocks=1, warps_n=8, warps_k=1, step_k=64, num_stages=2, wgmma=True),
    "cluster": Schedule(tokens=8, row_blocks=2, warps_k=4, step_k=64, num_stages=2, split_k=4, cluster=4),
    "cluster of single warps": Schedule(
        tokens=8, row_blocks=1, warps_k=1, step_k=64, num_stages=2, split_k=2, cluster=2
    ),
    "cluster with wgmma": Schedule(
        tokens=32, row_blocks=2, warps_n=4, warps_k=1, step_k=64, num_stages=2, split_k=8, cluster=8, wgmma=True
    ),
    "splits": Schedule(tokens=8, row_blocks=2, warps_k=4, step_k=64, num_stages=1, split_k=4),
    "sums are the most": Schedule(tokens=64, row_blocks=4, warps_k=8, step_k=64, num_stages=1, split_k=2),
}


@pytest.mark.parametrize("schedule", HOPPERS)
@pytest.mark.parametrize("spec", [SPEC, NEAR["rows"], replace(SPEC, zeros="int", scale="e4m3"), LOOKUPS[0]])
def test_shared_memory_of_clusters_and_wgmma(spec: MatmulSpec, schedule: str) -> None:
    from lowbit.passes.pipeline import compile_matmul

    s = HOPPERS[schedule]
    check_schedule(spec, s, HOPPER)
    assert compile_matmul(spec, HOPPER, s).launch.shared_bytes == shared_bytes(spec, s)


PER_WARP = {"refill": "per_warp", "wgmma": True, "warps_n": 4}
UNFIT: list[tuple[str, dict[str, Any]]] = [
    (r"cluster=3 must be 1, or split_k=4 where that is at most 8", {"split_k": 4, "cluster": 3}),
    (r"cluster=2 must be 1, or split_k=1 where", {"cluster": 2}),
    (r"cluster=16 must be 1, or split_k=16 where that is at most 8", {"split_k": 16, "cluster": 16}),
    (r"cluster=3 must be .* and divides the 32 rows of a block", {"split_k": 3, "cluster": 3, "row_blocks": 2}),
    (r"cluster=0 must be at least 1", {"cluster": 0}),
    (r"wgmma=1 must be True or False", {"wgmma": 1, "warps_n": 4}),
    (r"wgmma=True needs warps_n=2 to be a multiple of 4", {"wgmma": True, "warps_n": 2}),
    (r"wgmma=True needs .* tokens=1 to be at least 8", {"wgmma": True, "warps_n": 4, "tokens": 1}),
    (r"tokens=128 needs wgmma=True", {"tokens": 128}),
    (r"tokens=48 must be one of 1, 8, 16, 32, 64, 128", {"tokens": 48}),
    (r"preload_weights=True needs num_stages=3 to be 1", {"preload_weights": True}),
    (r"preload_weights=True needs .* prefetch_limit=1 to be 0", {"preload_weights": True, "prefetch_limit": 1}),
    (r"overlap_groups=True needs wgmma=True and row_blocks=1; got wgmma=False", {"overlap_groups": True}),
    (r"overlap_groups=True .* row_blocks=2", {"overlap_groups": True, "wgmma": True, "warps_n": 4}),
    (r"min_blocks=-1 must be at least 0", {"min_blocks": -1}),
    (r"max_blocks_per_sm=-1 must be at least 0", {"max_blocks_per_sm": -1}),
    (r"raw_codes=2 must be True or False", {"raw_codes": 2}),
    (r"refill='after_first_mma' needs wgmma=True .* got wgmma=False", {"refill": "after_first_mma"}),
    (r"refill='late' must be one of 'before_mma', 'after_first_mma'", PER_WARP | {"refill": "late"}),
    (r"refill='per_warp' needs .* prefetch_limit=1 to be 0", PER_WARP | {"prefetch_limit": 1}),
    (r"refill='per_warp' needs num_stages=1 to be at least 2", PER_WARP | {"num_stages": 1}),
    (r"prefetch_limit=-1 must be at least 0", {"prefetch_limit": -1}),
]


@pytest.mark.parametrize(("message", "change"), UNFIT)
def test_fields_that_do_not_fit_each_other(message: str, change: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=f"schedule: {message}"):
        Schedule(**change)


WIDE = Schedule(tokens=16, row_blocks=1, warps_n=4, warps_k=2, step_k=64, wgmma=True)
UNFIT_HERE: list[tuple[str, MatmulSpec, Schedule, str]] = [
    ("wgmma needs sm_90a, the target is sm_90; take wgmma=False", SPEC, WIDE, "sm_90"),
    ("wgmma needs sm_90a, the target is emulator:sm_80; take wgmma=False", SPEC, WIDE, "emulator:sm_80"),
    (
        "step_k=32 must be a multiple of 64 for wgmma",
        replace(SPEC, weight="u8", group_size=32),
        replace(WIDE, step_k=32),
        "sm_90a",
    ),
    (
        "wgmma multiplies f16 by f16 in whole 16-byte pieces of x; u4 with k=1540 and groups of None needs wgmma=False",
        replace(SPEC, k=1540, group_size=None),
        WIDE,
        "sm_90a",
    ),
    (
        "tokens=256 leaves registers for one set of sums, and .* needs two; take tokens of at most 128",
        replace(SPEC, scale="f32"),
        replace(WIDE, tokens=256, warps_k=1, num_stages=2),
        "sm_90a",
    ),
    ("u4 with k=1536 and groups of 48 needs wgmma=False", replace(SPEC, group_size=48), WIDE, "sm_90a"),
    ("wgmma multiplies f16 by f16 .* f7e6m0 with", replace(SPEC, weight="f7e6m0"), replace(WIDE, step_k=256), "sm_90a"),
    ("cluster=2 needs clusters, which sm_89 does", SPEC, Schedule(warps_k=4, split_k=2, cluster=2), "sm_89"),
]


@pytest.mark.parametrize(("message", "spec", "schedule", "target"), UNFIT_HERE, ids=lambda v: str(v)[:40])
def test_clusters_and_wgmma_where_they_do_not_fit(
    message: str, spec: MatmulSpec, schedule: Schedule, target: str
) -> None:
    with pytest.raises(SpecError, match=f"schedule: .*{message}"):
        check_schedule(spec, schedule, parse_target(target))
    changes = {"cluster": {"cluster": 1}, "tokens=": {"tokens": 128}}
    fitting = replace(schedule, **next((c for name, c in changes.items() if name in message), {"wgmma": False}))
    check_schedule(spec, fitting, parse_target(target))


PRELOADED = Schedule(8, 1, 4, 2, 128, 1, wgmma=True, preload_weights=True)


@pytest.mark.parametrize(
    ("message", "spec", "change"),
    [
        ("preload_weights=True needs steps of .* come out even for k=1280", replace(SPEC, k=1280), {"warps_k": 4}),
        (
            "preload_weights=True needs .* x in 16-byte pieces",
            replace(SPEC, k=1020, group_size=None),
            {"wgmma": False},
        ),
        (
            "preload_weights=True has at most 128 registers of weight .* needs 512",
            replace(SPEC, k=16384),
            {"warps_k": 2},
        ),
        ("overlap_groups=True is for .* group by group", replace(SPEC, group_size=None), {"overlap_groups": True}),
        (
            "overlap_groups=True is for .* needs overlap_groups=False",
            replace(SPEC, group_size=32),
            {"overlap_groups": True, "tokens": 64},
        ),
    ],
)
def test_preloading_and_overlap_where_they_do_not_fit(message: str, spec: MatmulSpec, change: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=f"schedule: {message}"):
        check_schedule(spec, replace(PRELOADED, **change), HOPPER)
    check_schedule(SPEC, PRELOADED, HOPPER)


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
