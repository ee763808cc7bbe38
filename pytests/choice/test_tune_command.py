"""`lowbit tune`: its problems, its presets and its command line, with a made-up GPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from made_up_gpu import HOPPER, SPEC, Bench
from typer.testing import CliRunner

from lowbit.dialect.errors import SpecError
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.decode.schedule import Schedule
from lowbit.passes.scheduling.choice import default_schedule, schedule_for
from lowbit.passes.scheduling.tables import Entry, Key, Table, parse_table, read_table, shipped_tables
from lowbit.pylib.build import user_tables as schedules
from lowbit.pylib.build.kernels import Artifacts
from lowbit.pylib.cli.main import app
from lowbit.pylib.tune import check as tune_check
from lowbit.pylib.tune import processes as tune_processes
from lowbit.pylib.tune import session as tuner
from lowbit.pylib.tune.model_shapes import linear_sizes
from lowbit.pylib.tune.presets import preset
from lowbit.pylib.tune.problem import Problem
from lowbit.pylib.tune.processes import kernel_id
from lowbit.pylib.tune.session import LONG
from lowbit.pylib.tune.work import preset_problems, problems, with_kernels


def test_problems() -> None:
    found = problems([(64, 192), (64, 256)], ["u4", "f4e2m1"], [128, None], [1, 8], ["bf16"], ["none", "int"])
    specs = list(dict.fromkeys(p.spec for p in found))
    assert {(s.k, s.weight, s.group_size, s.zeros) for s in specs} == {
        (192, "u4", None, "none"), (192, "u4", None, "int"), (192, "f4e2m1", None, "none"),
        (256, "u4", None, "none"), (256, "u4", None, "int"), (256, "f4e2m1", None, "none"),
        (256, "u4", 128, "none"), (256, "u4", 128, "int"), (256, "f4e2m1", 128, "none"),
    }  # fmt: skip
    assert [p.token_tile for p in found] == [1, 8] * len(specs) and {s.scale for s in specs} == {"bf16"}
    assert found[0].spec is found[1].spec  # the weights stay on the GPU
    both = problems([(64, 256)], ["u4", "u8"], [128], [8], computes=["none", "f8e4m3"])
    assert [(p.spec.weight, p.spec.compute) for p in both] == [("u4", None), ("u4", "f8e4m3"), ("u8", None)]
    (folded,) = problems([(64, 256)], ["u4"], [128], [512], computes=["f8e4m3+fold"])
    assert folded.spec.compute == "f8e4m3" and folded.spec.folds
    with pytest.raises(SpecError, match=r"'f8e4m3\+half' must be one of none, f8e4m3, i8, f8e4m3\+fold, i8\+fold"):
        problems([(64, 256)], ["u4"], [128], [512], computes=["f8e4m3+half"])
    with pytest.raises(SpecError, match="group_size=96 must divide k=256"):
        problems([(64, 256)], ["u4"], [96], [1])
    with pytest.raises(SpecError, match="tokens=2 must be one of 1, 8"):
        problems([(64, 256)], ["u4"], [128], [2])


def test_presets() -> None:
    work = preset_problems("decode")
    assert {p.key for p in work} <= set(shipped_tables()[0].entries)
    assert work[0].key == Key.of(MatmulSpec(57344, 8192, "u4", 128), 1)
    for name in ("Llama-2-7B", "Llama-3.1-8B", "Llama-3.1-70B", "Qwen2.5-32B", "Gemma-2-9B"):
        for n, k in linear_sizes([name]):
            assert {p.token_tile for p in work if p.spec == MatmulSpec(n, k, "u4", 128)} >= {1, 8, 16, 32, 64}
    prefill, eight_bit = preset_problems("prefill"), preset_problems("eight_bit")
    assert max(p.token_tile for p in prefill) == 8192 and {p.spec.act for p in prefill} == {"f16", "bf16"}
    assert with_kernels(prefill, HOPPER) == prefill
    assert {p.spec.compute for p in eight_bit} == {"f8e4m3", "i8"} and with_kernels(eight_bit, HOPPER)
    with pytest.raises(SpecError, match="--preset 'encode' must be one of decode, models, prefill, unknown, eight_bit"):
        preset("encode")


def lowbit(*arguments: object):
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "200", "TERM": "dumb"})


def test_without_a_gpu_the_command_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = lowbit("tune", "64x256")
    assert result.exit_code == 1 and "needs an NVIDIA GPU" in result.stderr and "--merge" in result.stderr


class Stand:
    """A GPU process of `Bench`'s."""

    def __init__(self, bench: Bench) -> None:
        self.time, self.check = bench.time, bench.check

    def __enter__(self) -> Stand:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Bench:
    clock = Bench(tmp_path / "none")
    monkeypatch.setenv("LOWBIT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tuner, "this_gpu", lambda: ("NVIDIA H200", HOPPER))
    monkeypatch.setattr(tune_processes, "GpuProcess", lambda target: Stand(clock))
    return clock


def test_the_command_from_start_to_end(clock: Bench, tmp_path: Path) -> None:
    """With real compilations in a process of their own; the matmul that was tuned then gets the schedule."""
    options = ("64x1024", "-w", "u4", "-m", "1", "--group-sizes", "row", "--candidates", 4, "--jobs", 1)
    result = lowbit("tune", *options)
    assert result.exit_code == 0, result.output
    assert "u4[64, 1024] f16 scale per row: f16 -> f16, m = 1: " in result.stderr
    assert "1 of 1 matmuls" in result.stderr and "1 schedules" in result.stderr
    assert len(list(tmp_path.glob("??/*.kernel"))) == 4

    found = read_table(schedules.user_file("NVIDIA H200"))
    spec = MatmulSpec(64, 1024, "u4")
    best = min((s for _, s, _ in clock.timed), key=lambda s: Bench.truth(Problem(spec, 1), s))
    ((key, entry),) = found.entries.items()
    artifact = Artifacts(spec, HOPPER, None).kernel(1)
    assert (key, entry.schedule) == (Key.of(spec, 1), best) and artifact.schedule == best
    assert entry.kernel == kernel_id(artifact.ptx) and entry.version.startswith("0.1.0+")
    assert len(list(tmp_path.glob("??/*.kernel"))) == 4  # it was there already

    before = len(clock.timed)
    assert lowbit("tune", *options).exit_code == 0 and len(clock.timed) == before

    assert "0 of 1 entries are out of date" in lowbit("tune", "--stale", "--jobs", 1).stderr
    old = tmp_path / "old.json"
    old.write_text(found.replaced(replace(entry, kernel="")).to_text())
    assert "1 of 1 entries are out of date" in lowbit("tune", "--stale", old, "--jobs", 1).stderr


def test_first_calls_on_the_command_line(clock: Bench, tmp_path: Path) -> None:
    """An entry is measured against what its matmul would get without it: of its neighbour, or by the rule."""
    specs = [MatmulSpec(64, 1024, "u4"), MatmulSpec(64, 1280, "u4"), MatmulSpec(64, 1024, "nf4")]
    odd = [replace(default_schedule(s, 1, HOPPER), num_stages=2, warps_k=w) for s, w in zip(specs, (1, 2, 2))]
    entries = [Entry(Key.of(s, 1), o, 0.01, "2026-11-21", "0.1.0") for s, o in zip(specs, odd)]
    table = Table("NVIDIA H200", 90, "by hand", {}).with_entries(entries)
    file = tmp_path / "table.json"
    file.write_text(table.to_text())
    result = lowbit("tune", "--check", file, "--jobs", 1)
    assert result.exit_code == 0, result.output
    got = {(p.spec, s) for p, s, replays in clock.timed if replays == LONG}
    assert got >= {(specs[0], odd[1]), (specs[1], odd[0]), (specs[2], default_schedule(specs[2], 1, HOPPER))}
    assert got >= set(zip(specs, odd))
    worst = max(
        Bench.truth(Problem(s, 1), first) / min(Bench.truth(Problem(s, 1), first), Bench.truth(Problem(s, 1), own))
        for s, first, own in zip(specs, (odd[1], odd[0], default_schedule(specs[2], 1, HOPPER)), odd)
    )
    assert f"worst {worst:.3f}" in result.stderr and "of 3 within 10%" in result.stderr
    assert tune_check.GOOD == 1.1


def test_first_calls_of_sizes_that_no_table_has(clock: Bench, tmp_path: Path) -> None:
    """What is chosen is timed beside the winner of a search, and nothing is written into the user's table."""
    file = tmp_path / "first_calls.json"
    options = ("-g", "row", "-m", "1", "--candidates", 4, "--jobs", 1, "-o", file)
    result = lowbit("tune", "--check", "64x1024", "64x1152", *options)
    assert result.exit_code == 0, result.output
    found = json.loads(file.read_text())
    assert found["gpu"] == "NVIDIA H200" and [call["k"] for call in found["calls"]] == [1024, 1152]
    ratios = []
    for call in found["calls"]:
        spec = MatmulSpec(call["n"], call["k"], "u4")
        chosen = schedule_for(spec, 1, HOPPER)
        assert call["microseconds"] == Bench.truth(Problem(spec, 1), chosen) >= call["best_microseconds"]
        ratios.append(call["microseconds"] / call["best_microseconds"])
    assert "of 2 within 10%" in result.stderr and f"worst {max(ratios):.3f}" in result.stderr
    assert not schedules.user_file("NVIDIA H200").exists()


def test_the_unknown_sizes_are_in_no_table() -> None:
    known = {(key.spec.n, key.spec.k) for table in shipped_tables() for key in table.entries}
    work = preset_problems("unknown")
    assert not {(p.spec.n, p.spec.k) for p in work} & known and len({(p.spec.n, p.spec.k) for p in work}) == 10
    kinds = {(p.spec.weight, p.spec.group_size) for p in work}
    assert kinds == {("u4", 128), ("u4", 32), ("f6e3m2", None)} and with_kernels(work, HOPPER) == work


def test_wrong_use_of_the_command(clock: Bench, tmp_path: Path) -> None:
    assert "needs shapes" in lowbit("tune").stderr
    assert "--preset 'x' must be one of decode, models, prefill" in lowbit("tune", "--preset", "x").stderr
    assert "needs tables" in lowbit("tune", "--merge").stderr
    assert "give one of them" in lowbit("tune", "--merge", "--stale", "a").stderr
    assert "one table at a time" in lowbit("tune", "--stale", "a", "b").stderr


def test_merge_on_the_command_line(tmp_path: Path) -> None:
    def known(n: int, microseconds: float) -> Table:
        entry = Entry(Key.of(replace(SPEC, n=n), 1), Schedule(tokens=1), microseconds, "2026-11-21", "0.1.0")
        return Table("NVIDIA L40S", 89, "by hand", {}).with_entries([entry])

    a, b, c = (tmp_path / f"{name}.json" for name in "abc")
    a.write_text(known(64, 2.0).to_text())
    b.write_text(known(32, 3.0).to_text())
    result = lowbit("tune", "--merge", a, b, "-o", c)
    assert result.exit_code == 0 and "2 schedules for NVIDIA L40S" in result.stderr
    assert (
        parse_table(c.read_text(), "c").entries.keys() == known(64, 2.0).entries.keys() | known(32, 3.0).entries.keys()
    )
    b.write_text("nothing")
    assert "b.json is no table of schedules" in lowbit("tune", "--merge", a, b, "-o", c).stderr
