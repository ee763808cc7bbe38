"""`lowbit.compile` and the kernels behind it: what is compiled, when, and what the disk cache saves."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fake_pipeline import FakePipeline, pipeline

import lowbit
from lowbit.dialect.signature import Param, parse_grid
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.decode.schedule import IntegerSchedule, Schedule
from lowbit.passes.kernels.dequantize.family import DequantizeSchedule
from lowbit.passes.kernels.registry import schedule_from_dict
from lowbit.passes.launch import Launch
from lowbit.passes.scheduling.choice import TOKEN_TILES, Choice, schedule_for
from lowbit.passes.targets import parse_target
from lowbit.pylib.build.choices import find_rows, rows_of_tiles
from lowbit.pylib.build.driver import Artifact
from lowbit.pylib.build.kernels import Artifacts
from lowbit.pylib.matmul import Matmul
from lowbit.pylib.runtime.devices import this_machine

__all__ = ["pipeline"]

SPEC = lowbit.MatmulSpec(n=32, k=128, weight="u4", group_size=64)
ONE = TOKEN_TILES[0]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees what another has compiled."""
    monkeypatch.setattr("lowbit.pylib.matmul._compile", Matmul)


NO_PIECES = replace(SPEC, k=132, group_size=66)  # x is not in 16-byte pieces: no persistent kernel, and no wgmma


@pytest.mark.parametrize("target", ["sm_90a", "sm_90", "sm_80"])
@pytest.mark.parametrize("n", [32, 1 << 18])
def test_token_tiles(target: str, n: int) -> None:
    """The least tile that holds m, by its definition, and the widest up to three times."""
    artifacts = Artifacts(replace(NO_PIECES, n=n), parse_target(target), None)
    narrow = [tile for tile in TOKEN_TILES if tile <= 64]
    assert [artifacts.token_tiles(m) for m in narrow] == [[tile] for tile in narrow]
    assert [artifacts.token_tiles(m + 1) for m in narrow[:-1]] == [[tile] for tile in narrow[1:]]
    assert artifacts.token_tiles(0) == [1] and artifacts.token_tile(0) == 1
    assert artifacts.token_tiles(192) == [64, 64, 64] and artifacts.token_tiles(193) is None
    assert artifacts.token_tiles(133) == [64, 64, 8] and artifacts.token_tile(4096) is None


@pytest.mark.parametrize("weight", ["u4", "f6e3m2", "u3"])
def test_one_launch_serves_any_number_of_rows(weight: str) -> None:
    """Where the prefill family has kernels: from 129 rows on it is always one of these."""
    artifacts = Artifacts(replace(SPEC, weight=weight, n=8192, k=4096), parse_target("sm_90a"), None)
    found = {m: artifacts.token_tiles(m) for m in (64, 65, 97, 128, 129, 192, 193, 257, 1000, 4096, 4097, 100000)}
    tiles = (64, 80, 104, 128, 160, 192, 256, 320, 1024, 4096, 6144, 8192)
    assert found == {m: [tile] for m, tile in zip(found, tiles)}
    wide = [artifacts.request(tile).family for tile in (192, 384, 1024, 4096)]
    assert wide == ["prefill"] * 4
    rows = artifacts.choices().rows
    assert rows[0].first == 1 and [a.last for a in rows[:-1]] == [b.first - 1 for b in rows[1:]]
    assert (rows[-1].first, rows[-1].last, rows[-1].token_tiles) == (8193, None, (8192,))


@pytest.mark.parametrize(
    ("spec", "most"),
    [
        (replace(SPEC, n=8192, k=4096, outliers=True), 3072),
        (MatmulSpec.preset("q4_k", n=8192, k=4096), 6144),
        (MatmulSpec.preset("spqr", n=8192, k=4096), 1536),
    ],
    ids=str,
)
def test_weights_that_take_long_to_scale_are_written_out_for_many_rows(spec: MatmulSpec, most: int) -> None:
    artifacts = Artifacts(spec, parse_target("sm_90a"), None)
    assert artifacts.token_tiles(most) == [most] and artifacts.token_tiles(most + 1) is None
    assert max(token_tile or 0 for token_tile in artifacts.choices().kernels) == most


def launches(tiles: tuple[int, ...], m: int) -> list[int]:
    """The launches for m rows, one by one; none where the weight is written out."""
    if m > 192:
        return []
    if m <= tiles[-1]:
        return [next(tile for tile in tiles if m <= tile)]
    return [tiles[-1], *launches(tiles, m - tiles[-1])]


@pytest.mark.parametrize("widest", [16, 64])
def test_the_table_of_rows_is_complete(widest: int) -> None:
    """Ranges follow one another without a gap, and each row's launches are those that it would get by itself."""
    tiles = tuple(tile for tile in TOKEN_TILES if tile <= widest)
    rows = rows_of_tiles(tiles, 192)
    assert rows[0].first == 1 and rows[-1].last is None and rows[-1].token_tiles == ()
    assert [a.last for a in rows[:-1]] == [b.first - 1 for b in rows[1:]]
    for m in range(300):
        assert list(find_rows(rows, m).token_tiles) == launches(tiles, m), m


def test_choices_say_what_is_launched(pipeline: FakePipeline) -> None:
    spec = replace(SPEC, weight="u1", n=57344, k=8192, group_size=128)
    wanted = Schedule(tokens=16, warps_k=2, step_k=256)
    mm = lowbit.compile(spec, "sm_90a", wanted)
    choices = mm.choices
    for m in (1, 7, 16, 200, 257, 1000, 9000):
        first = choices.launches(m)[0]
        assert first.schedule == mm.kernel(m).schedule and (first.spec, first.target) == (spec, mm.target)
    assert [kernel.family for kernel in choices.launches(1)] == ["decode_integer"]
    assert [kernel.schedule for kernel in choices.launches(10)] == [wanted]
    assert [kernel.family for kernel in choices.launches(257)] == ["prefill"]
    text = repr(choices)
    assert re.search(r"^257 to 320 +m320$", text, re.MULTILINE)
    assert re.search(r"^8193 on +m8192$", text, re.MULTILINE)
    assert re.search(r"^m384 +prefill +tokens=\d+, panel_k=\d+", text, re.MULTILINE)
    assert re.search(r"^m1 +decode_integer +tokens=1, row_blocks=\d", text, re.MULTILINE)
    read = json.loads(json.dumps(choices.to_dict()))
    assert lowbit.MatmulSpec.from_dict(read["spec"]) == spec and read["target"] == "sm_90a"
    assert {"first": 2, "last": 8, "launches": ["m8"]} in read["rows"]
    assert {"first": 8193, "last": None, "launches": ["m8192"]} in read["rows"]
    odd = lowbit.compile(replace(NO_PIECES, weight="u1"), "sm_90a").choices
    assert [kernel.family for kernel in odd.launches(129)] == ["decode"] * 3
    assert [kernel.family for kernel in odd.launches(1025)] == ["dequantize"]
    assert re.search(r"^129 +m64, m64, m1$", repr(odd), re.MULTILINE)
    assert re.search(r"^193 on +dequantize, then a matmul of torch$", repr(odd), re.MULTILINE)
    assert schedule_from_dict(read["kernels"]["m1"]["schedule"]) == mm.schedule
    with pytest.raises(lowbit.TargetError, match="target cpu has one program"):
        _ = lowbit.compile(SPEC, "cpu").choices


def test_compile_makes_only_the_kernel_for_one_token(pipeline: FakePipeline) -> None:
    spec = replace(SPEC, k=4096)  # long enough for every tile to have a schedule of its own
    mm = lowbit.compile(spec, "sm_90a")
    assert pipeline.tokens == [8]  # for one token, a tile of eight was predicted to be the fastest
    assert (mm.spec, str(mm.target), mm.schedule) == (spec, "sm_90a", schedule_for(spec, 1, mm.target))
    for m in (1, 8, 9, 16, 17, 64, 64, 65):
        mm.kernel(m)
    assert pipeline.tokens == [8, *TOKEN_TILES[1:-1]]
    mm.kernel(1000)
    assert mm.choices.launches(1000)[0].family == "prefill" and len(pipeline.tokens) == len(TOKEN_TILES)


def test_schedule_is_for_the_tile_it_names(pipeline: FakePipeline) -> None:
    wanted = Schedule(tokens=16, warps_k=2)
    mm = lowbit.compile(SPEC, "sm_90a", wanted)
    assert pipeline.tokens == [ONE, 16]  # errors of a schedule show at compile
    assert mm.kernel(16).schedule == wanted
    assert mm.kernel(1).schedule == mm.schedule == schedule_for(SPEC, 1, mm.target)


def test_same_arguments_give_the_same_matmul(monkeypatch: pytest.MonkeyPatch, pipeline: FakePipeline) -> None:
    monkeypatch.undo()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOWBIT_NO_CACHE", "1")
        assert lowbit.compile(SPEC, "cpu") is lowbit.compile(replace(SPEC), "cpu")
        assert lowbit.compile(SPEC, "cpu") is not lowbit.compile(replace(SPEC, act="bf16"), "cpu")


def test_many_threads_compile_once(pipeline: FakePipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight that have all seen that a kernel is not there, before one of them makes it."""
    everyone, waited = threading.Barrier(8, timeout=600), set[int]()

    class Together(dict[int | None, Artifact]):
        def get(self, key: int | None) -> Artifact | None:  # type: ignore[override]
            found = super().get(key)
            if threading.get_ident() not in waited:
                waited.add(threading.get_ident())
                everyone.wait()
            return found

    monkeypatch.setenv("LOWBIT_NO_CACHE", "1")  # which would hide that one is made twice
    artifacts = Artifacts(SPEC, parse_target("sm_90a"), None)
    artifacts._kernels = Together()
    threads = [threading.Thread(target=artifacts.kernel, args=(32,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert pipeline.tokens == [32]


def test_disk_cache_keeps_all_of_a_kernel(pipeline: FakePipeline) -> None:
    first = lowbit.compile(SPEC, "sm_90a").kernel(20)
    again = lowbit.compile(SPEC, "sm_90a").kernel(20)
    assert again == first and again is not first
    assert first.cubin == b"cubin of sm_90a 32"
    assert pipeline.tokens == [ONE, 32]


@pytest.mark.parametrize("target", ["sm_80", "emulator:sm_90a"])
@pytest.mark.parametrize("spec", [replace(SPEC, act="bf16"), replace(SPEC, n=48), replace(SPEC, weight="i4")])
def test_cache_tells_kernels_apart(pipeline: FakePipeline, target: str, spec: lowbit.MatmulSpec) -> None:
    lowbit.compile(SPEC, "sm_90a")
    lowbit.compile(spec, "sm_90a")
    lowbit.compile(SPEC, target)
    lowbit.compile(SPEC, "sm_90a", Schedule(tokens=16, warps_k=2)).kernel(16)
    lowbit.compile(SPEC, "sm_90a").kernel(16)
    assert len(pipeline.compiled) == 5


def test_damaged_cache_is_rebuilt(pipeline: FakePipeline) -> None:
    kernel = lowbit.compile(SPEC, "sm_90a").kernel(1)
    (entry,) = Path(os.environ["LOWBIT_CACHE_DIR"]).glob("**/*.kernel")
    content = entry.read_bytes()
    for damaged in (b"", content[:-1], content[: len(content) // 2], b"x" * len(content), content + b"x"):
        entry.write_bytes(damaged)
        pipeline.compiled.clear()
        assert lowbit.compile(SPEC, "sm_90a").kernel(1) == kernel
        assert len(pipeline.compiled) == 1
        assert entry.read_bytes() == content


def test_artifact_files_are_complete() -> None:
    params = (Param("x", "pointer"), Param("alpha", "f32"), Param("workspace", "pointer"), Param("m", "i32"))
    launch = Launch("k", parse_grid((3, "ceil(m / 8)", "sm_count * 2")), 256, 49152, params, 64)
    for schedule in (DequantizeSchedule(), IntegerSchedule(), Schedule(tokens=16, num_stages=4)):
        for cubin in (None, b"\0\1"):
            artifact = Artifact(launch, ".version 8.0", cubin, schedule)
            assert Artifact.from_files(artifact.to_files()) == artifact


def test_emulator_has_no_cubin(pipeline: FakePipeline) -> None:
    mm = lowbit.compile(SPEC, "emulator:sm_80")
    assert ".version" in mm.ptx
    with pytest.raises(lowbit.TargetError, match="emulator:sm_80 has no cubin"):
        _ = mm.cubin


def test_ir_of_each_kernel(pipeline: FakePipeline) -> None:
    mm = lowbit.compile(NO_PIECES, "sm_90a")
    assert mm.ir("tile") == f"sm_90a {ONE}"
    assert mm.ir("tile", m=33) == "sm_90a 64"
    assert mm.ir("tile", m=192) == "sm_90a 64"  # launched for every 64 rows
    assert mm.ir("tile", m=193) == "sm_90a None"
    with pytest.raises(lowbit.SpecError, match="stage='asm' must be one of 'tile', 'ptx'"):
        mm.ir("asm")


def test_emulator_gets_its_arguments(pipeline: FakePipeline) -> None:
    """The kernel of the fake writes the number of rows to the first element of y."""
    mm = lowbit.compile(SPEC, "emulator:sm_80")
    w = mm.pack(torch.zeros(32, 128, dtype=torch.uint8), torch.ones(32, 2))
    assert [float(mm(torch.ones(m, 128).half(), w)[0, 0]) for m in (1, 3, 64)] == [1, 3, 64]
    assert float(mm.dequantize(w)[0, 0]) == 0


def test_dump(pipeline: FakePipeline, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LOWBIT_DUMP", str(tmp_path / "new"))
    lowbit.compile(SPEC, "emulator:sm_80").kernel(10000)
    written = {path.name: path.read_text() for path in (tmp_path / "new").iterdir()}
    stem = "u4_32x128_sm_80"
    assert written.keys() == {f"{stem}_{k}.{s}" for k in ("m1", "dequantize") for s in ("tile.mlir", "ptx")}
    assert written[f"{stem}_m1.tile.mlir"] == f"emulator:sm_80 {ONE}"


@pytest.mark.parametrize(
    ("capability", "target"),
    [((8, 0), "sm_80"), ((8, 6), "sm_86"), ((8, 9), "sm_89"), ((9, 0), "sm_90a"), ((10, 0), "sm_100")]
    + [((10, 3), "sm_103"), ((12, 0), "sm_120")],
)
def test_target_of_this_machine(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], target: str
) -> None:
    _pretend_gpu(monkeypatch, capability)
    assert this_machine() == target


def test_a_gpu_without_a_target_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from lowbit.pylib.cli import machine

    _pretend_gpu(monkeypatch, (12, 1))
    with pytest.warns(UserWarning, match="A GPU is sm_121, which has no target of its own: .* for sm_120"):
        assert this_machine() == "sm_120"
    with warnings.catch_warnings(action="error"):
        assert this_machine() == "sm_120"
    assert machine.facts()["GPU 0"].endswith("target sm_120, as sm_121 has no target of its own")
    _pretend_gpu(monkeypatch, (9, 0))
    assert machine.facts()["GPU 0"].endswith("target sm_90a")


def test_target_of_a_machine_without_a_good_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert this_machine() == "cpu"
    _pretend_gpu(monkeypatch, (7, 5))
    with pytest.raises(lowbit.TargetError, match=r"is sm_75, but .* need sm_80 or later; use target='cpu'"):
        lowbit.compile(SPEC)


def _pretend_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    memory = {"multi_processor_count": 100, "total_memory": 1 << 36, "shared_memory_per_block_optin": 1 << 18}
    gpu = SimpleNamespace(name="A GPU", major=capability[0], minor=capability[1], **memory)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: gpu)


def test_warm_compile_needs_no_compiler(pipeline: FakePipeline, repo: Path) -> None:
    """In a new process without MLIR, LLVM and the pipeline."""
    lowbit.compile(SPEC, "sm_90a")
    program = f"""
import sys
import lowbit
heavy = {{"torch_mlir", "mlir", "llvmlite"}}
assert not {{"torch", "cuda", *heavy}} & sys.modules.keys(), "import pylib is not light"
for name in (*heavy, "lowbit.passes.pipeline"):
    sys.modules[name] = None
assert lowbit.compile({SPEC!r}, "sm_90a").cubin == b"cubin of sm_90a {ONE}"
"""
    program = program.replace("MatmulSpec(", "lowbit.MatmulSpec(")
    subprocess.run([sys.executable, "-c", program], check=True, cwd=repo)


def test_a_table_written_between_key_and_build_changes_nothing(
    pipeline: FakePipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is compiled is what the entry's key says, however often the choice would change: `lowbit tune` may write a
    table at any time, and what is stored under a wrong key is served from then on."""
    first, second = (replace(schedule_for(SPEC, 1, parse_target("sm_90a")), warps_k=k) for k in (2, 4))
    chosen = iter((Choice(first, 1.0), Choice(second, 1.0)))
    monkeypatch.setattr("lowbit.passes.scheduling.choice.Chooser.choice", lambda *_: next(chosen, Choice(second, 1.0)))
    artifacts = Artifacts(SPEC, parse_target("sm_90a"), None)
    assert artifacts.kernel(1).schedule == artifacts.request(1).schedule == first
    assert artifacts.stages_for(1) and artifacts.choices().kernels[1].schedule == first  # nor what is shown of it
    assert [request.schedule for request in pipeline.compiled[:2]] == [first, first]
    for wanted in (first, second):  # another process, with either table
        monkeypatch.setattr("lowbit.passes.scheduling.choice.Chooser.choice", lambda *_, s=wanted: Choice(s, 1.0))
        assert Artifacts(SPEC, parse_target("sm_90a"), None).kernel(1).schedule == wanted
