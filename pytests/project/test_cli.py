"""The command line: help, errors in one line, stages, and a small matmul from start to end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.main
from torch import Tensor
from typer.testing import CliRunner

from lowbit import __version__ as version
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.scheduling.expert_rule import schedule_for_few, tile_for, tiles_of
from lowbit.passes.stages import stages
from lowbit.passes.targets import parse_target
from lowbit.pylib.build.kernels import kernel_choices
from lowbit.pylib.cli.machine import TARGETS
from lowbit.pylib.cli.main import app
from lowbit.pylib.matmul import Matmul
from lowbit.pylib.runtime.devices import memory_of_container
from lowbit.pylib.runtime.expert_matmul import ExpertMatmul

EXPERTS = ("--n", 6 * 48, "--k", 256, "--weight", "u4", "--group-size", 64, "--experts", 6)
SMALL = ("--n", "32", "--k", "256", "--weight", "u4", "--group-size", "64", "--zeros", "int")


def lowbit(*arguments: str):
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "200", "TERM": "dumb"})


@pytest.mark.parametrize("command", ["compile", "explain", "run", "info", "irdl"])
def test_help_has_examples(command):
    result = lowbit(command, "--help")
    assert result.exit_code == 0 and f"lowbit {command}" in result.output.split("Example")[1]


def test_version():
    result = lowbit("--version")
    assert result.exit_code == 0 and result.output == f"lowbit {version}\n"


@pytest.mark.parametrize("name", ["meta-llama/Llama-3.1-8B", "gpt2"])
def test_a_name_on_the_hub_that_is_no_folder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for result in (lowbit("quantize", name, "--out", "out"), lowbit("inspect", name)):
        assert result.exit_code == 1
        said = " ".join(result.output.split())
        assert f"{name}: there is no such folder or file. For the model of this name on the hub, run" in said
        assert f"`hf download {name} --local-dir {Path(name).name}`" in said and "lowbit.LowbitConfig()" in said
    for path in (tmp_path / "gone", "gone/model.safetensors", "a/b/c", "../gone"):
        assert "hf download" not in lowbit("inspect", path).output


def test_explain():
    arguments = ("explain", *SMALL, "--target", "sm_80", "--schedule", "tokens=16,warps_k=2")
    table = lowbit(*arguments).output
    assert "9 to 16      m16" in table and "tokens=16, row_blocks=2, warps_n=1, warps_k=2" in table
    read = json.loads(lowbit(*arguments, "--json").output)
    assert read["kernels"]["m16"]["schedule"]["warps_k"] == 2 and read["rows"][0]["launches"] == ["m1"]
    assert "name a GPU such as sm_90a" in lowbit("explain", "--target", "cpu").output
    per_row = lowbit("explain", *SMALL, "--target", "sm_90a", "-g", "0", "--compute", "i8").output
    assert "f16 scale per row" in per_row and "eight_bit_prefill  tokens=" in per_row


def test_explain_as_a_page(tmp_path: Path):
    page = tmp_path / "page.html"
    made = lowbit("explain", *SMALL, "--target", "sm_80", "-m", 8, "-o", page)
    assert made.exit_code == 0 and not made.output
    assert "u4[32, 256] f16 scale per 64, int zeros: f16 -&gt; f16, m = 8, on sm_80" in page.read_text()
    (tmp_path / "own.py").write_text(PROGRAM)
    assert lowbit("explain", f"{tmp_path}/own.py:ones", "-t", "sm_80", "-o", page).exit_code == 0
    assert "<h1>ones, on sm_80</h1>" in page.read_text()


def test_a_file_in_place_of_the_type_of_y():
    said = "--out='page.html' must be one of 'f16', 'bf16', 'f32', as the type of y; a file is named by -o"
    assert said in lowbit("explain", *SMALL, "--target", "sm_80", "--out", "page.html").output
    assert "by -o" not in lowbit("explain", *SMALL, "--target", "sm_80", "--out", "f8").output


@pytest.mark.parametrize("command", ["compile", "explain"])
def test_a_name_in_colons_is_no_emoji(command: str):
    assert "nowhere.py:x: there is no file" in lowbit(command, "nowhere.py:x", "-t", "sm_80", "-o", "page").output


def test_explain_a_layer_of_experts(tmp_path: Path):
    sizes = ("-n", 512, "-k", 256, "-g", 128, "--experts", 4)
    for target, few, tokens, shown in (
        ("sm_90a", ("--top-k", 2), 1, "Kernel family top_k_experts"),
        ("sm_90a", (), 2, "Kernel family experts_"),
        ("cpu", (), 4, "The program for few rows, which runs for each expert, here of 1"),
    ):
        made = lowbit("explain", *sizes, *few, "-t", target, "-m", tokens, "-o", tmp_path / "page.html")
        assert made.exit_code == 0 and shown in (tmp_path / "page.html").read_text(), made.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*SMALL, "-t", "sm_80", "-o", "gone/page.html"), "gone/page.html can't be written (No such file"),
        ((*SMALL, "-t", "sm_70", "-o", "page.html"), "sm_70"),
        (("-n", "32", "-k", "250", "-w", "u4", "-g", "64", "-t", "sm_80", "-o", "page.html"), "group_size=64"),
        ((*SMALL, "-t", "cpu", "--schedule", "tokens=8", "-o", "page.html"), "schedule= is for GPU targets"),
        ((*SMALL, "-t", "sm_80", "--schedule", "family=prefill", "-o", "page.html"), "prefill needs sm_90a"),
        ((*SMALL, "--top-k", "2", "-o", "page.html"), "give their number, --experts"),
        ((*SMALL, "--experts", "2", "--top-k", "3", "-t", "cpu", "-o", "page.html"), "top_k=3 must be in 1..2"),
        ((*SMALL, "--experts", "2", "--top-k", "2", "-t", "sm_80"), "is for the page of one kernel"),
        (("own.py:scale", "-t", "sm_80"), "name a file for the page that explains it, -o page.html"),
        (("gone.py:scale", "-t", "sm_80", "-o", "page.html"), "there is no file gone.py"),
        (("own.py:scale", "-m", "4", "-o", "page.html"), "own.py:scale is compiled as it is: drop the options"),
    ],
    ids=lambda value: None if isinstance(value, tuple) else value[:24],
)
def test_pages_of_what_can_not_be_explained(
    arguments: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    result = lowbit("explain", *arguments)
    assert result.exit_code == 1 and message in " ".join(result.output.split()), result.output
    assert not (tmp_path / "page.html").exists()


def test_integer_schedule_by_name():
    schedule = "family=decode_integer,tokens=1,warps_k=4,step_k=256"
    arguments = ("explain", "--weight", "u2", "--target", "sm_90a", "--schedule", schedule)
    assert json.loads(lowbit(*arguments, "--json").output)["kernels"]["m1"]["schedule"]["family"] == "decode_integer"


@pytest.mark.parametrize("command", ["compile", "run"])
def test_every_field_of_a_spec_is_an_option(command):
    """But for experts by ids, which calls of layers choose: `--top-k` is how many experts a row goes to."""
    text, names = lowbit(command, "--help").output, {field.name for field in fields(MatmulSpec)} - {"top_k"}
    assert all(f"--{name.replace('_', '-')} " in text for name in names)


def test_run_of_a_weight_with_everything():
    """Whose rows repeat themselves, with blocks of 16 rows, columns in another order and outliers."""
    levels = ("-g", "16", "--zeros", "float", "--scale", "u3", "--bilevel", "rows=16,groups=1,zeros=true")
    others = ("--outliers", "--permuted", "--row-scales", "--bias")
    shape = ("-n", "1300", "-k", "64", "-w", "u3", "-m", "4", "--target", "cpu")
    assert "right" in lowbit("run", *shape, *levels, *others).output


@pytest.mark.parametrize("name", ["q4_k", "nvfp4", "spqr"])
def test_a_weight_by_its_name(name: str):
    """Options replace what the name stands for, where they are given."""
    shape = ("-n", "48", "-k", "512", "-w", name, "--target", "cpu")
    for options, others in (((), {}), (("--bias", "--act", "bf16"), {"bias": True, "act": "bf16"})):
        read = json.loads(lowbit("run", *shape, *options, "--json").output)
        assert MatmulSpec.from_dict(read["spec"]) == MatmulSpec.preset(name, 48, 512, **others) and read["right"]


def test_targets_in_help_exist():
    names = [name for name in TARGETS.replace(" or ", " ").split(", ") if "<" not in name]
    assert len(names) == 10 and all(parse_target(name).name == name for name in names)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--weight", "u9"), "did you mean 'u8'?"),
        (("--k", "4096", "--group-size", "96"), "group_size=96 must divide k=4096"),
        (("--weight", "lut2", "--table", "1,x"), "--table=1,x must be numbers separated by commas"),
        (("--schedule", "tokens=3"), "tokens=3 must be one of 1, 8, 16, 32, 64, 128"),
        (("--schedule", "family=permute"), "--schedule: family='permute' must be one of 'decode', 'decode_integer', "),
        (("--schedule", "stage=3"), "--schedule: unknown option 'stage'; allowed: tokens, row_blocks"),
        (("--schedule", "tokens=8,tokens=16"), "--schedule: 'tokens' is given twice; give it once"),
        (("--target", "sm_75"), "unknown target 'sm_75'"),
        ((*SMALL, "--target", "sm_80", "--stop-after", "vector"), "must be one of lowbit, tile, gpu, llvm"),
        ((*SMALL, "--target", "sm_80", "--stop-after", "cubin"), "name a file with -o"),
        ((*SMALL, "--target", "sm_80", "-o", "/nowhere/x.ptx"), "error: /nowhere/x.ptx can't be written (No such file"),
        (("-w", "mxfp4", "-k", "500"), "group_size=32 must divide k=500"),
        (("-w", "u4", "-k", "100", "-g", "64"), "try 50 or 100, or 0 for one scale per row"),
    ],
)
def test_errors_are_one_line(arguments, message):
    result = lowbit("compile", *arguments)
    assert result.exit_code == 1 and message in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("compile", "-n", str(10**21)), "n=1000000000000000000000 must be at most 1073741824"),
        (("compile", "-k", str(10**21)), "k=1000000000000000000000 must be at most 1073741824"),
        (("compile", "-g", str(10**21)), "group_size=1000000000000000000000 must be at most 1073741824"),
        (("compile", "--compute-from", str(10**21)), "compute_from=1000000000000000000000 must be at most 1073741824"),
        (("compile", "--schedule", f"split_k={10**21}"), "split_k=1000000000000000000000 must be in 1..1024"),
        (("compile", "-m", str(10**21)), "1073741824"),
        (("run", "-m", str(10**21)), "1073741824"),
        (("quantize", "model", "--out", "x", "-g", str(10**21)), "1073741824"),
        (("bench-model", "tiny", "--context", str(10**21)), "1048576"),
        (("bench-model", "tiny", "--repeats", str(10**21)), "1073741824"),
        (("tune", "--jobs", str(10**21)), "1024"),
    ],
)
def test_numbers_have_a_range(arguments, message):
    result = lowbit(*arguments)
    assert result.exit_code in (1, 2) and message in result.stderr and "Traceback" not in result.stderr


def test_compile_to_a_stage():
    assert "!lowbit." in lowbit("compile", *SMALL, "--target", "sm_90a", "--stop-after", "tile").stdout
    ptx = lowbit("compile", *SMALL, "--target", "sm_90a").stdout
    assert ".target sm_90a" in ptx and "mma.sync" in ptx


@pytest.mark.parametrize("option", ["--output", "--dump"])
def test_an_error_of_a_compilation_is_none_of_the_file(option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A tool that is gone, say: no other path helps."""

    def broken(self: object, stage: str, m: int = 1) -> str:
        raise FileNotFoundError(2, "No such file or directory", "llc")

    monkeypatch.setattr(Matmul, "ir", broken)
    result = lowbit("compile", *SMALL, "--target", "sm_80", option, tmp_path / "made")
    assert result.exit_code == 1 and result.output == "error: llc: No such file or directory\n"
    assert "can't be written" not in result.output and not (tmp_path / "made").exists()


def test_dump_has_every_stage(tmp_path: Path):
    for target in ("sm_80", "cpu"):
        folder = tmp_path / target
        assert lowbit("compile", *SMALL, "--target", target, "--dump", folder).exit_code == 0
        wanted = stages(gpu=target != "cpu").values()
        assert {f.name for f in folder.iterdir()} == {f"matmul.{stage.suffix}" for stage in wanted}
        assert all(f.stat().st_size for f in folder.iterdir())


@pytest.mark.parametrize("target", ["cpu", "emulator:sm_80"])
def test_run(target):
    result = lowbit("run", *SMALL, "-m", "3", "--target", target)
    assert result.exit_code == 0, result.output
    assert "right" in result.stdout and ("time" in result.stdout) == (target == "cpu")


def piped(*arguments: str) -> list[str]:
    """Returns the lines of a command whose output is a pipe of no width, as `| grep` has it."""
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "FORCE_COLOR")}
    command = [sys.executable, "-m", "lowbit", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_output_that_is_piped_is_not_folded():
    lines = piped("run", *SMALL, "-t", "emulator:sm_80")
    assert [line.split()[0] for line in lines[1:]] == ["result", "ready", "schedule"]
    assert max(map(len, lines)) > 120 and lines[-1].endswith(")") and "\x1b" not in "".join(lines)
    assert {line.split()[0] for line in piped("info")} >= {"lowbit", "CPU", "toolchain", "cache", "targets"}


@pytest.mark.parametrize("target", ["cpu", "emulator:sm_80"])
def test_run_as_json(target):
    found = json.loads(lowbit("run", *SMALL, "-m", "3", "-t", target, "--json").stdout)
    assert found["right"] is True and found["tokens"] == 3 and found["target"] == target
    assert MatmulSpec.from_dict(found["spec"]) == MatmulSpec(32, 256, "u4", 64, zeros="int")
    assert 0 < found["relative_error"] < 1e-2 and found["call_flops"] == 2 * 3 * 32 * 256
    assert (found["call_seconds"] is None) == (target != "cpu") and (found["schedule"] is None) == (target == "cpu")


def test_info_as_json():
    found = json.loads(lowbit("info", "--json").stdout)
    assert next(iter(found)) == "lowbit" and "torch-mlir" in found["toolchain"]


def test_short_options():
    """The same letters for the same things in every command that has them."""
    matmul = ("-n", "32", "-k", "256", "-w", "u4", "-g", "64", "--zeros", "int")
    short = lowbit("compile", *matmul, "-t", "sm_80", "-m", "3")
    assert short.stdout == lowbit("compile", *SMALL, "--target", "sm_80", "--tokens", "3").stdout != ""
    flags = {}
    for command in typer.main.get_command(app).commands.values():
        for option in command.params:
            for flag in (flag for flag in option.opts if len(flag) == 2):
                flags.setdefault(flag, set()).add(max(option.opts, key=len).rstrip("s"))
    assert {flag: names for flag, names in flags.items() if len(names) > 1} == {}
    assert set(flags) >= {"-n", "-k", "-w", "-g", "-m", "-t", "-o"}


def test_stages_of_a_gpu_name_the_target():
    """What the README shows, typed without a target on a machine without a GPU."""
    result = lowbit("compile", *SMALL, "-t", "cpu", "--stop-after", "tile")
    assert result.exit_code == 1 and "for target cpu; for a GPU's, give its target, such as -t sm_90a" in result.stderr


def test_run_of_experts_in_the_emulator():
    """40 tokens with 3 experts each, of which none takes all of a tile."""
    read = json.loads(lowbit("run", *EXPERTS, "-m", 40, "--top-k", 3, "-t", "emulator:sm_80", "--json").output)
    assert read["right"] and (read["slots"], read["experts_hit"], read["call_flops"]) == (120, 6, 2 * 120 * 48 * 256)
    facts = lowbit("run", *EXPERTS, "--epilogue", "silu_mul", "-t", "emulator:sm_80").output
    assert "right" in facts and "slots     2, of 2 of 6 experts" in facts


@pytest.mark.parametrize("products", [("i8",), ("i8", "--compute-from", 21), ("f8e4m3", "--fold-scales")])
def test_run_of_experts_in_eight_bits(products):
    """120 slots of 6 experts are 20 for each; less than 21 are multiplied in f16, which shows in the result."""
    result = lowbit("run", *EXPERTS, "-m", 40, "--top-k", 3, "-t", "emulator:sm_89", "--compute", *products, "--json")
    assert json.loads(result.output)["right"]


@pytest.mark.parametrize("choices", [(), ("--compute", "i8", "--act", "bf16"), ("--epilogue", "silu_mul", "--bias")])
def test_run_of_experts_on_a_cpu(choices):
    read = json.loads(lowbit("run", *EXPERTS, "-m", 40, "--top-k", 3, "-t", "cpu", *choices, "--json").output)
    assert read["right"] and read["slots"] == 120 and read["call_seconds"] > 0 and read["schedule"] is None


def test_a_wrong_slot_is_found(monkeypatch: pytest.MonkeyPatch):
    """One of 120 slots is what another expert makes of its token."""
    multiply = ExpertMatmul.__call__

    def changed(self: ExpertMatmul, x: Tensor, rows: Tensor, tiles: Tensor, *others: Any, **named: Any) -> Tensor:
        tiles[1, 2] -= 1  # the last slot of the first tile is the first of the next
        tiles[2, 1] -= 1
        return multiply(self, x, rows, tiles, *others, **named)

    monkeypatch.setattr(ExpertMatmul, "__call__", changed)
    result = lowbit("run", *EXPERTS, "-m", 40, "--top-k", 3, "-t", "emulator:sm_80")
    assert result.exit_code == 1 and "wrong: relative error" in result.output


def test_explain_experts():
    """Token tiles follow from the slots of an expert; few slots have a multiprocessor each, and other schedules."""
    sizes = ("-n", 196608, "-k", 2048, "-g", 128, "--experts", 128, "-t", "sm_90a")
    *few, table = lowbit("explain", *sizes).output.split("slots        launches\n")[1:]
    assert few[0].startswith("1 to ") and table.startswith("12 to ") and "dequantize" not in table
    assert "34561 on     m256\n" in table and "m256         experts         tokens=256, num_stages=4" in table
    read = json.loads(lowbit("explain", *sizes, "--json").output)
    assert read["few"]["rows"][-1]["last"] == 11
    assert "tokens = 48" in lowbit("compile", *EXPERTS, "-m", 200, "--stop-after", "lowbit", "-t", "sm_90a").output


def test_explain_experts_that_are_quantized_where_they_have_many_slots():
    """From 30 for each of 128 on. Of fewer there are tables with and without a multiprocessor for each tile."""
    sizes = ("-n", 196608, "-k", 2048, "-g", 128, "--experts", 128, "-t", "sm_90a", "--compute", "i8")
    *alone, few, many = lowbit("explain", *sizes, "--compute-from", 30).output.split("slots        launches\n")[1:]
    assert alone[0].startswith("1 to ") and few.startswith("12 to ") and " to 3839 m48\n\n" in few
    assert many.startswith("3840 to ")
    assert (many.count("eight_bit_experts_decode "), many.count("eight_bit_experts ")) == (2, 7)


@pytest.mark.parametrize("target", ["sm_90a", "sm_80"])
def test_explain_shows_what_runs_for_any_number_of_slots(target):
    spec, gpu = MatmulSpec(128 * 768, 256, "u4", 128, experts=128), parse_target(target)
    choices, tiles = kernel_choices(spec, gpu), tiles_of(spec, gpu)
    for slots in (*range(1, 40), 500, 640, 641, 1408, 1409, 3328, 3329, 9000, 20000, 60000):
        schedule = schedule_for_few(spec, tile_for(tiles, slots, 128), slots, gpu)
        assert choices.launches(slots)[0].schedule == schedule, slots


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--top-k", 7), "top_k=7 must be in 1..6, the experts that there are (experts=)"),
        (("--schedule", "tokens=8"), "drop --schedule; lowbit explain shows which kernels there are"),
        (("--experts", 1, "--top-k", 2), "--top-k=2 says how many experts a token has: give their number, --experts"),
    ],
)
def test_errors_of_experts(arguments, message):
    result = lowbit("run", *EXPERTS, "-t", "emulator:sm_80", *arguments)
    assert result.exit_code == 1 and message in " ".join(result.output.split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("weight", [("u4", "-g", "64", "--zeros", "int", "--out", "f32"), ("q4_k",), ("spqr",)])
def test_run_of_many_tokens_in_bf16(weight):
    """A CPU with AVX512-BF16 rounds the weights to bf16."""
    for m in (12, 13, 130):
        result = lowbit("run", "-n", 64, "-k", 256, "-w", *weight, "--act", "bf16", "-m", m, "-t", "cpu")
        assert result.exit_code == 0 and "right" in result.output


@pytest.mark.parametrize("size", [("-n", 1 << 30, "-k", 1 << 14), ("-n", 16, "-k", 1 << 30), ("-m", 1 << 30)])
def test_run_of_more_than_fits_the_memory(size):
    """At this size the system would end the process."""
    result = lowbit("run", "-n", 16, "-k", 32, "-t", "cpu", *size)
    assert result.exit_code == 1 and "GB of memory are free; try less" in result.stderr


def test_memory_of_a_container(tmp_path: Path):
    assert memory_of_container(tmp_path) is None
    for name, text in (("current", "3000"), ("stat", "anon 2000\ninactive_file 500"), ("max", "max")):
        (tmp_path / f"memory.{name}").write_text(f"{text}\n")
    assert memory_of_container(tmp_path) is None
    (tmp_path / "memory.max").write_text("10000\n")
    assert memory_of_container(tmp_path) == 7500


def test_run_of_a_weight_of_zeros():
    found = json.loads(lowbit("run", "-n", 16, "-k", 32, "-w", "lut1", "--table", "0,0", "-t", "cpu", "--json").output)
    assert found["right"] and found["relative_error"] == 0


def test_run_without_a_gpu():
    result = lowbit("run", *SMALL, "--target", "sm_80")
    assert result.exit_code == 1 and "torch finds no CUDA device here; use target='cpu'" in result.stderr


def test_run_reports_a_wrong_result(monkeypatch: pytest.MonkeyPatch):
    from lowbit.pylib import reference

    definition = reference.matmul
    monkeypatch.setattr(reference, "matmul", lambda *given, **named: definition(*given, **named) + 1.0)
    result = lowbit("run", *SMALL, "--target", "cpu")
    assert result.exit_code == 1 and "wrong" in result.output


def test_info():
    text = lowbit("info").stdout
    assert "llvmlite" in text and "sm_90a" in text and "cache" in text


def test_opt_as_a_process(repo: Path):
    body = "%x = arith.constant 1 : i32\n%y = arith.addi %x, %x : i32\nreturn %y : i32"
    command = [sys.executable, "-m", "lowbit.pylib.cli.main", "opt", "-canonicalize", "-"]
    ir = f"func.func @f() -> i32 {{{body}}}"
    done = subprocess.run(command, input=ir, capture_output=True, text=True, cwd=repo, check=True)
    assert "arith.constant 2" in done.stdout and "addi" not in done.stdout


def test_a_terminal_of_plain_ascii(repo: Path):
    command = [sys.executable, "-m", "lowbit.pylib.cli.main", "run", *SMALL, "--target", "cpu"]
    done = subprocess.run(command, capture_output=True, cwd=repo, env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0 and b" ?s" in done.stdout and not done.stderr


PROGRAM = """
from lowbit.dialect.layouts.layout import spatial
from lowbit.passes.builder import Program

def ones(count=32):
    p = Program("ones", 32, (1, 1, 1), {"y": "pointer"})
    with p:
        p.store(p.constant(1.0, "f32", spatial(count)), p.global_view(p["y"], "f32", (count,)), (0,))
    return p

program = ones()

def sized(count):
    return ones(count)

def wrong():
    return ones(64)
"""


def test_a_program_of_ones_own(tmp_path):
    file = tmp_path / "my_ones.py"
    file.write_text(PROGRAM)
    for name in ("ones", "program"):
        ptx = lowbit("compile", f"{file}:{name}", "-t", "sm_90a").output
        assert ".entry ones(" in ptx
    assert "lowbit.program" in lowbit("compile", f"{file}:ones", "-t", "sm_80", "--stop-after", "tile").output
    lowbit("compile", f"{file}:ones", "-t", "emulator:sm_80", "--dump", tmp_path / "dump")
    assert {each.name for each in (tmp_path / "dump").iterdir()} == {
        f"ones.{stage.suffix}" for stage in stages(gpu=True).values() if stage.name != "cubin"
    }


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (":sized", ["-t", "sm_80"], "sized takes count; name a function that is called without arguments"),
        (":none", ["-t", "sm_80"], "defines no 'none'; it must be a Program or a function that returns one"),
        ("", ["-t", "sm_80"], "must be FILE.py:NAME, the program of a file of yours, such as my_kernel.py:scale"),
        (".py:x", ["-t", "sm_80"], "there is no file"),
        (":wrong", ["-t", "sm_80"], "expected 32 threads, got 64"),
        (":ones", ["-t", "sm_80", "-w", "u3"], "is compiled as it is: drop the options of a matmul"),
        (":ones", ["-t", "sm_80", "-m", "2"], "is compiled as it is: drop the options of a matmul"),
        (":ones", ["-t", "cpu"], "tile programs are for GPUs"),
        (":ones", ["-t", "sm_80", "--stop-after", "asm"], "--stop-after=asm must be one of lowbit, tile"),
        (":ones", ["-t", "emulator:sm_80", "--stop-after", "cubin", "-o", "x"], "has no cubin; compile for a GPU"),
    ],
)
def test_a_wrong_program_is_one_line(tmp_path, name, options, message):
    file = tmp_path / "my_ones.py"
    file.write_text(PROGRAM)
    result = lowbit("compile", f"{file}{name}", *options)
    assert result.exit_code == 1 and message in result.output and "Traceback" not in result.output
