"""The commands that take a matmul: `lowbit compile | explain | run`. Slow imports wait until they run."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from lowbit.dialect.errors import SpecError, TargetError
from lowbit.dialect.fields import MOST
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.stages import Stage, stages
from lowbit.pylib.build.named_files import writing
from lowbit.pylib.cli.output import Json, errors, show, show_json
from lowbit.pylib.cli.spec_options import (
    ScheduleText,
    TargetName,
    Tokens,
    TopK,
    default_spec,
    parse_schedule,
    takes_spec,
)

if TYPE_CHECKING:
    from lowbit.passes.target import Target
    from lowbit.pylib.explain.page import Page
    from lowbit.pylib.tune.trial import Trial

STAGES = f"Stage: {', '.join(stages(gpu=True))}; for a CPU {', '.join(stages(gpu=False))}."


@takes_spec
def compile_(
    spec: MatmulSpec,
    program: Annotated[
        str | None, typer.Argument(metavar="[FILE.py:NAME]", help="A tile program of your own in place of a matmul.")
    ] = None,
    target: TargetName = None,
    tokens: Tokens = 1,
    schedule: ScheduleText = None,
    stop_after: Annotated[str | None, typer.Option(help=STAGES)] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File to write to.")] = None,
    dump: Annotated[Path | None, typer.Option(help="Folder that gets a file for every stage.")] = None,
) -> None:
    """Compile a matmul, or a program of your own, and print it after any stage: PTX, or assembly for a CPU, unless told
    otherwise.

    No GPU is needed to compile for one.

    [bold]Examples[/]

      lowbit compile -n 8192 -k 8192 -w u4 -g 128 -t sm_90a > kernel.ptx

      lowbit compile -w f6e3m2 -t sm_80 --stop-after tile

      lowbit compile -w nf4 -g 64 -t sm_90a --stop-after cubin -o kernel.cubin

      lowbit compile -w i3 -t sm_90a --dump stages/

      lowbit compile my_kernel.py:scale -t sm_90a --stop-after gpu
    """
    if program is not None:
        _check_alone(program, spec, tokens, schedule)
        compiled = _compile_program(program, target)
    else:
        compiled = _compile_matmul(spec, target, tokens, schedule)
    _write(compiled, stop_after, output, dump)


def _check_alone(program: str, spec: MatmulSpec, tokens: int, schedule: str | None) -> None:
    """Raises SpecError for options of a matmul beside a program."""
    if (spec, tokens, schedule) != (default_spec(), 1, None):
        raise SpecError(f"{program} is compiled as it is: drop the options of a matmul, its tokens and schedule")


def _page(spec: MatmulSpec, target: Target, tokens: int, top_k: int | None, schedule: str | None) -> Page:
    """Returns the page of a matmul's kernel, or of that of a layer of experts."""
    from lowbit.pylib.explain.kernels import explain_experts, explain_matmul

    if top_k is None:
        return explain_matmul(spec, target, parse_schedule(schedule), tokens)
    _check_top_k(spec, top_k, schedule)
    return explain_experts(spec, top_k, tokens, target.name)


def _check_top_k(spec: MatmulSpec, top_k: int | None, schedule: str | None) -> None:
    """Raises SpecError for experts of each row without experts, and for a schedule beside experts."""
    if spec.experts == 1:
        if top_k is not None:
            raise SpecError(f"--top-k={top_k} says how many experts a token has: give their number, --experts")
    elif schedule is not None:
        fix = "drop --schedule; lowbit explain shows which kernels there are"
        raise SpecError(f"--schedule={schedule}: the tokens of experts choose among the kernels of --experts; {fix}")


def _page_of_program(program: str, target: str | None) -> Page:
    from lowbit.pylib.cli.program_files import program_named
    from lowbit.pylib.explain.kernels import explain_program

    return explain_program(program_named(program), target)


@dataclass(frozen=True)
class _Compiled:
    """A compiled program to write: `read` returns a stage by its name; files of a dump begin with `stem`."""

    target: Target
    stem: str
    read: Callable[[str], bytes]


def _compile_matmul(spec: MatmulSpec, target: str | None, tokens: int, schedule: str | None) -> _Compiled:
    import lowbit

    mm = lowbit.compile(spec, target, parse_schedule(schedule))

    def read(name: str) -> bytes:
        if name != "cubin":
            return mm.ir(name, tokens).encode()
        return mm.kernel(tokens).cubin or mm.cubin  # which says why there is none

    return _Compiled(mm.target, "matmul", read)


def _compile_program(program: str, target: str | None) -> _Compiled:
    from lowbit.pylib.cli.program_files import compile_file

    kernel = compile_file(program, target)

    def read(name: str) -> bytes:
        if name != "cubin":
            return kernel.stages[name].encode()
        if kernel.target.kind != "cuda":
            raise TargetError(f"target {kernel.target} has no cubin; compile for a GPU such as 'sm_90a'")
        return kernel.cubin()

    return _Compiled(kernel.target, kernel.launch.name, read)


def _write(compiled: _Compiled, stop_after: str | None, output: Path | None, dump: Path | None) -> None:
    """Writes one stage to a file or prints it, and all stages to a folder."""
    target, read = compiled.target, compiled.read
    known = stages(target.is_gpu)
    stage = stop_after or ("ptx" if target.is_gpu else "asm")
    if stage not in known:
        hint = "; for a GPU's, give its target, such as -t sm_90a" if stage in stages(gpu=True) else ""
        raise SpecError(f"--stop-after={stage} must be one of {', '.join(known)} for target {target}{hint}")
    if dump is not None:
        _dump(dump, compiled, (each for each in known.values() if each.name != "cubin" or target.kind == "cuda"))
        if stop_after is None and output is None:
            return
    if output is not None:
        made = read(stage)
        with writing(output):
            output.write_bytes(made)
    elif stage == "cubin":
        raise SpecError("--stop-after=cubin is machine code; name a file with -o")
    else:
        sys.stdout.write(read(stage).decode())


def _dump(folder: Path, compiled: _Compiled, known: Iterable[Stage]) -> None:
    """Write a file for every stage."""
    made = {f"{compiled.stem}.{each.suffix}": compiled.read(each.name) for each in known}
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in made.items():
            (folder / name).write_bytes(content)
    errors.print(f"wrote {folder}/{compiled.stem}.*", markup=False)


@takes_spec
def explain(
    spec: MatmulSpec,
    program: Annotated[
        str | None, typer.Argument(metavar="[FILE.py:NAME]", help="A tile program of your own, for -o.")
    ] = None,
    target: TargetName = None,
    tokens: Tokens = 1,
    top_k: Annotated[
        int | None, typer.Option(min=1, max=MOST, help="Experts of each row of x, for -o; without it, -m are slots.")
    ] = None,
    schedule: ScheduleText = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="File of HTML to write: the kernel for so many tokens, stage by stage."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show which kernels serve which number of rows, and what each is made of; or, with -o, one kernel from the spec
    to the last instruction: every stage side by side and linked, and pictures of layouts, memory and time.

    Without -o nothing is compiled. Of experts it is the number of slots: rows of x times the experts of each. With -o
    and --top-k it is the kernel that a layer runs: few rows go by the ids of their experts, more by a table of slots.

    [bold]Examples[/]

      lowbit explain -n 4096 -k 4096 -w u4 -g 128 -t sm_90a

      lowbit explain -w nf4 -g 64 -t sm_80 --json

      lowbit explain -n 196608 -k 2048 -w u4 -g 128 --experts 128 -t sm_90a

      lowbit explain -n 4096 -k 4096 -w u4 -g 128 -t sm_90a -m 16 -o page.html

      lowbit explain -n 196608 -k 2048 -w u4 -g 128 --experts 128 --top-k 8 -t sm_90a -o page.html

      lowbit explain my_kernel.py:scale -t sm_90a -o page.html
    """
    from lowbit.pylib.build.kernels import kernel_choices
    from lowbit.pylib.runtime.devices import target_named

    if program is not None:
        if output is None:
            raise SpecError(f"{program} has one kernel: name a file for the page that explains it, -o page.html")
        _check_alone(program, spec, tokens, schedule)
        _page_of_program(program, target).save(output)
        return
    parsed = target_named(target)
    if output is not None:
        _page(spec, parsed, tokens, top_k, schedule).save(output)
        return
    if top_k is not None:
        raise SpecError(f"--top-k={top_k} is for the page of one kernel: name a file for it, -o page.html")
    if not parsed.is_gpu:
        raise TargetError(f"target {parsed} has one program for every number of rows; name a GPU such as sm_90a")
    choices = kernel_choices(spec, parsed, parse_schedule(schedule))
    if as_json:
        show_json(choices.to_dict())
    else:
        print(choices)


@takes_spec
def run(
    spec: MatmulSpec,
    target: TargetName = None,
    tokens: Tokens = 1,
    top_k: TopK = None,
    schedule: ScheduleText = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="File of JSON: what warps did in the emulator, for ui.perfetto.dev and chrome://tracing."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Multiply random data: check the result against float64 and time it.

    The exit code is 1 if the result is wrong. The emulator is not timed. With --experts each row of x goes to --top-k
    random experts, and one launch multiplies all of them.

    [bold]Examples[/]

      lowbit run -n 8192 -k 8192 -w u4 -g 128 --zeros int -m 16

      lowbit run -w f6e3m2 --act bf16 -t cpu --json

      lowbit run -n 64 -k 512 -w i3 -t emulator:sm_90a

      lowbit run -n 64 -k 512 -w u4 -g 128 -m 16 -t emulator:sm_90a --trace trace.json

      lowbit run -n 196608 -k 2048 -w u4 -g 128 --experts 128 --top-k 8 -m 64
    """
    with errors.status("starting") as status, _traced(trace, target):
        trial = _trial(spec, tokens, top_k, target, schedule, status.update)
    if as_json:
        show_json(measured(trial))
    else:
        show(f"{spec}, m = {trial.m}, on {trial.target}", report(trial))
    if not trial.right:
        errors.print("[bold red]error:[/] the result is wrong")
        raise typer.Exit(1)


@contextmanager
def _traced(path: Path | None, target: str | None) -> Generator[None]:
    """Within it, launches in the emulator are noted, and races are looked for. Then the trace is written, after an
    error of the emulator as well."""
    if path is None:
        yield
        return
    from lowbit.pylib.emulator.observer import Observer, observing
    from lowbit.pylib.explain.trace import MOST, save_trace
    from lowbit.pylib.runtime.devices import target_named

    parsed = target_named(target)
    if parsed.kind != "emulator":
        raise TargetError(f"--trace={path} shows what the emulator does, not {parsed}; use -t emulator:sm_90a, say")
    with observing(Observer(events=MOST, racecheck=True)) as seen:
        try:
            yield
        finally:
            save_trace(seen.launches, path)
    if not all(launch.whole for launch in seen.launches):
        errors.print(f"{path} has the first {MOST:,} steps alone: take a smaller n, k or m to see all", markup=False)


def _trial(
    spec: MatmulSpec,
    tokens: int,
    top_k: int | None,
    target: str | None,
    schedule: str | None,
    on_step: Callable[[str], None],
) -> Trial:
    """Returns a trial of a matmul, or of one of several experts."""
    from lowbit.pylib.tune.expert_trial import run_expert_trial
    from lowbit.pylib.tune.trial import run_trial

    _check_top_k(spec, top_k, schedule)
    if spec.experts == 1:
        return run_trial(spec, tokens, target, parse_schedule(schedule), on_step=on_step)
    return run_expert_trial(spec, tokens, min(2, spec.experts) if top_k is None else top_k, target, on_step)


def report(trial: Trial) -> dict[str, str]:
    """Returns what a trial found as text, by name, with rich's markup."""
    verdict = "[green]right[/]" if trial.right else "[bold red]wrong[/]"
    worst = f"worst element at {trial.worst:.0%} of what rounding explains"
    facts = {
        "result": f"{verdict}: relative error {trial.error:.1e}, {worst}",
        "ready in": f"{trial.compile_time * 1e3:.0f} ms, compiled or from the cache",
    }
    if trial.spec.experts > 1:
        facts["slots"] = f"{trial.slots}, of {trial.experts_hit} of {trial.spec.experts} experts"
    if trial.time is not None:
        facts["time"] = f"{trial.time * 1e6:.2f} µs"
        facts["bandwidth"] = f"{trial.bytes / trial.time / 1e9:.3g} GB/s for {trial.bytes / 1e6:.2f} MB"
        facts["arithmetic"] = f"{trial.flops / trial.time / 1e12:.3g} TFLOP/s"
    if trial.schedule:
        facts["schedule"] = escape(str(trial.schedule))
    return facts


def measured(trial: Trial) -> dict[str, Any]:
    """Returns what a trial found as numbers, by name with the unit; None where there is none, as in the emulator."""
    return {
        "spec": trial.spec.to_dict(),
        "target": trial.target.name,
        "tokens": trial.m,
        "slots": trial.slots,
        "experts_hit": trial.experts_hit,
        "right": trial.right,
        "relative_error": _finite(trial.error),
        "worst_error_of_allowed": _finite(trial.worst),
        "ready_seconds": trial.compile_time,
        "call_seconds": trial.time,
        "call_bytes": trial.bytes,
        "call_flops": trial.flops,
        "schedule": trial.schedule and asdict(trial.schedule),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
