"""The command line: `lowbit compile | explain | opt | run | tune | quantize | inspect | bench-model | info | irdl`.

A command that takes a matmul is a function with a `spec` parameter: `takes_spec` turns it into one option for
each field of `MatmulSpec`. What is slow to import is imported inside the commands.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup

from lowbit.dialect.bilevel import Bilevel
from lowbit.dialect.errors import LowbitError, SpecError, TargetError, reason
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.decode.schedule import Schedule
from lowbit.passes.kernels.registry import schedule_from_dict
from lowbit.passes.stages import Stage, stages
from lowbit.pylib.cli.bench_model import bench_model
from lowbit.pylib.cli.machine import TARGETS
from lowbit.pylib.cli.model_files import inspect as inspect_
from lowbit.pylib.cli.model_files import quantize
from lowbit.pylib.cli.output import Json, show, show_json
from lowbit.pylib.cli.tune import tune

if TYPE_CHECKING:
    from lowbit.pylib.tune.trial import Trial

errors = Console(stderr=True, soft_wrap=True, highlight=False)


class Commands(TyperGroup):
    """Reports what is wrong with the input as one line, without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # | head
            raise
        except (LowbitError, OSError) as error:
            errors.print("[bold red]error:[/] ", end="")
            errors.print(reason(error), markup=False)
            raise typer.Exit(1) from None


class Raw(TyperCommand):
    """A command that gets its arguments as they are, --help included, in `ctx.args`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.args = args
        return []


app = typer.Typer(
    cls=Commands,
    name="lowbit",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="A compiler for low-bit matrix multiplication: y = x Wᵀ with weights of 1 to 8 bits.",
)

_SHORT = {"n": "-n", "k": "-k", "weight": "-w", "group_size": "-g"}
_SPEC_OPTIONS: dict[str, tuple[Any, Any, str]] = {
    "n": (int, 4096, "Rows of the weight: outputs."),
    "k": (int, 4096, "Columns of the weight: inputs."),
    "weight": (str, "u4", "Format: u1..u8, i1..i8, f<bits>e<x>m<y>, nf4, fp4_bnb, lut1..lut8."),
    "group_size": (int | None, None, "Columns that share a scale; 0, or without it: one scale per row."),
    "zeros": (str, "none", "Zero points: none, int, float or offset."),
    "scale": (str, "f16", "Type of the scales: f16, bf16, f32, e8m0, e4m3, or codes with --bilevel."),
    "act": (str, "f16", "Type of x: f16 or bf16."),
    "out": (str | None, None, "Type of y: f16, bf16 or f32; without it, as x."),
    "bias": (bool, False, "Add a bias."),
    "table": (str | None, None, "The values of a lut<b> format, separated by commas."),
    "row_scales": (bool, False, "Scale every row, too."),
    "bilevel": (str | None, None, "The second level of scales that are codes, such as rows=1,groups=8,scale=f16."),
    "permuted": (bool, False, "Columns are in another order than x's."),
    "outliers": (bool, False, "Add outliers, a sparse matrix in f16."),
    "compute": (str | None, None, "Multiply in 8 bits: f8e4m3 or i8; without it, in the type of x."),
    "fold_scales": (bool, False, "With f8e4m3: round scaled weights, so that sums stay in the tensor core."),
}  # fmt: skip


def takes_spec(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command with a first parameter `spec` the options that make one."""

    @wraps(command)
    def with_options(**given: Any) -> None:
        fields = {name: given.pop(name) for name in _SPEC_OPTIONS}
        fields["group_size"] = fields["group_size"] or None
        if fields["table"] is not None:
            fields["table"] = _numbers(fields["table"])
        if fields["bilevel"] is not None:
            from lowbit.passes.opt.options import from_text

            fields["bilevel"] = from_text(Bilevel, fields["bilevel"], "--bilevel")
        command(spec=MatmulSpec(**fields), **given)

    def parameter(name: str, kind: Any, default: Any, text: str) -> inspect.Parameter:
        flags = [f"--{name.replace('_', '-')}", *filter(None, [_SHORT.get(name)])]
        annotation = Annotated[kind, typer.Option(*flags, help=text, rich_help_panel="Matmul")]
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)

    # Typer reads the signature and the annotations; those of the command itself are strings until resolved.
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    parameters = [parameter(name, *option) for name, option in _SPEC_OPTIONS.items()]
    parameters += [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own]
    with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_options.__annotations__ = {p.name: p.annotation for p in parameters}
    return with_options


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(v) for v in text.split(","))
    except ValueError:
        raise SpecError(f"--table={text} must be numbers separated by commas, such as -1,0,0.5,1") from None


@dataclass(frozen=True)
class _GivenSchedule:
    """What --schedule says: fields of a schedule, and the family whose schedule it is."""

    family: str = "decode"
    schedule: Schedule | None = None


def _schedule(text: str | None) -> Schedule | None:
    from lowbit.passes.opt.options import from_text

    if text is None:
        return None
    given = from_text(_GivenSchedule, text, "--schedule")
    return cast(Schedule, schedule_from_dict({"family": given.family} | asdict(given.schedule or Schedule())))


TargetName = Annotated[str | None, typer.Option("--target", "-t", help=f"{TARGETS}; without it, this machine's.")]
Tokens = Annotated[int, typer.Option("--tokens", "-m", min=1, help="Rows of x.")]
_STAGES = f"Stage: {', '.join(stages(gpu=True))}; for a CPU {', '.join(stages(gpu=False))}."
ScheduleText = Annotated[
    str | None, typer.Option("--schedule", help="Choices of the kernel, such as tokens=8,warps_k=8,num_stages=3.")
]


@app.command("compile")
@takes_spec
def compile_(
    spec: MatmulSpec,
    target: TargetName = None,
    tokens: Tokens = 1,
    schedule: ScheduleText = None,
    stop_after: Annotated[str | None, typer.Option(help=_STAGES)] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File to write to.")] = None,
    dump: Annotated[Path | None, typer.Option(help="Folder that gets a file for every stage.")] = None,
) -> None:
    """Compile a matmul and print it after any stage: PTX, or assembly for a CPU, unless told otherwise.

    No GPU is needed to compile for one.

    [bold]Examples[/]

      lowbit compile -n 8192 -k 8192 -w u4 -g 128 -t sm_90a > kernel.ptx

      lowbit compile -w f6e3m2 -t sm_80 --stop-after tile

      lowbit compile -w nf4 -g 64 -t sm_90a --stop-after cubin -o kernel.cubin

      lowbit compile -w i3 -t sm_90a --dump stages/
    """
    import lowbit

    mm = lowbit.compile(spec, target, _schedule(schedule))
    known = stages(mm.target.is_gpu)
    stage = stop_after or ("ptx" if mm.target.is_gpu else "asm")
    if stage not in known:
        hint = "; for a GPU's, give its target, such as -t sm_90a" if stage in stages(gpu=True) else ""
        raise SpecError(f"--stop-after={stage} must be one of {', '.join(known)} for target {mm.target}{hint}")

    def read(name: str) -> bytes:
        if name != "cubin":
            return mm.ir(name, tokens).encode()
        return mm.kernel(tokens).cubin or mm.cubin  # which says why there is none

    if dump is not None:
        _dump(dump, (each for each in known.values() if each.name != "cubin" or mm.target.kind == "cuda"), read)
        if stop_after is None and output is None:
            return
    if output is not None:
        output.write_bytes(read(stage))
    elif stage == "cubin":
        raise SpecError("--stop-after=cubin is machine code; name a file with -o")
    else:
        sys.stdout.write(read(stage).decode())


def _dump(folder: Path, known: Iterable[Stage], read: Callable[[str], bytes]) -> None:
    """Write a file for every stage."""
    folder.mkdir(parents=True, exist_ok=True)
    for each in known:
        (folder / f"matmul.{each.suffix}").write_bytes(read(each.name))
    errors.print(f"wrote {folder}/matmul.*", markup=False)


@app.command()
@takes_spec
def explain(
    spec: MatmulSpec,
    target: TargetName = None,
    schedule: ScheduleText = None,
    as_json: Json = False,
) -> None:
    """Show which kernels serve which number of rows, and what each is made of. Compiles nothing.

    [bold]Examples[/]

      lowbit explain -n 4096 -k 4096 -w u4 -g 128 -t sm_90a

      lowbit explain -w nf4 -g 64 -t sm_80 --json
    """
    from lowbit.passes.target import parse_target
    from lowbit.pylib.build.kernels import Artifacts
    from lowbit.pylib.matmul import this_machine

    parsed = parse_target(target or this_machine())
    if not parsed.is_gpu:
        raise TargetError(f"target {parsed} has one program for every number of rows; name a GPU such as sm_90a")
    choices = Artifacts(spec, parsed, _schedule(schedule)).choices()
    if as_json:
        show_json(choices.to_dict())
    else:
        print(choices)


@app.command(cls=Raw, add_help_option=False)
def opt(ctx: typer.Context) -> None:
    """Read IR, run passes in the order given, print IR: the project's mlir-opt.

    [bold]Examples[/]

      lowbit opt --list-passes

      lowbit opt kernel.mlir --canonicalize --cse --dump-after-each

      lowbit opt invalid.mlir --split-input-file --verify-diagnostics
    """
    from lowbit.passes.opt.main import main

    raise typer.Exit(main(ctx.args))


@app.command()
@takes_spec
def run(
    spec: MatmulSpec,
    target: TargetName = None,
    tokens: Tokens = 1,
    schedule: ScheduleText = None,
    as_json: Json = False,
) -> None:
    """Multiply random data: check the result against float64 and time it.

    [bold]Examples[/]

      lowbit run -n 8192 -k 8192 -w u4 -g 128 --zeros int -m 16

      lowbit run -w f6e3m2 --act bf16 -t cpu --json

      lowbit run -n 64 -k 512 -w i3 -t emulator:sm_90a
    """
    from lowbit.pylib.tune.trial import run_trial

    with errors.status("starting") as status:
        trial = run_trial(spec, tokens, target, _schedule(schedule), on_step=status.update)
    if as_json:
        show_json(measured(trial))
    else:
        show(f"{spec}, m = {trial.m}, on {trial.matmul.target}", report(trial))
    if not trial.right:
        errors.print("[bold red]error:[/] the result is wrong")
        raise typer.Exit(1)


def report(trial: Trial) -> dict[str, str]:
    """Returns what a trial found as text, by name, with rich's markup."""
    verdict = "[green]right[/]" if trial.right else "[bold red]wrong[/]"
    worst = f"worst element at {trial.worst:.0%} of what rounding explains"
    facts = {
        "result": f"{verdict}: relative error {trial.error:.1e}, {worst}",
        "ready in": f"{trial.compile_time * 1e3:.0f} ms, compiled or from the cache",
    }
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
        "spec": trial.matmul.spec.to_dict(),
        "target": trial.matmul.target.name,
        "tokens": trial.m,
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


app.command()(tune)
app.command()(quantize)
app.command("inspect")(inspect_)
app.command()(bench_model)


@app.command()
def info(as_json: Json = False) -> None:
    """Show the GPU, the toolchain, the cache and the targets.

    [bold]Examples[/]

      lowbit info

      lowbit info --json | jq -r .toolchain
    """
    from lowbit.pylib.cli.machine import facts

    found = facts()
    if as_json:
        show_json(found)
    else:
        show("lowbit", {name: escape(value) for name, value in found.items()})


@app.command()
def irdl() -> None:
    """Print the definition of the lowbit dialect in IRDL, MLIR's language for dialects.

    [bold]Example[/]

      lowbit irdl > lowbit.irdl.mlir
    """
    from lowbit.dialect.irdl_export import irdl_text

    sys.stdout.write(irdl_text())


@app.command(hidden=True)
def reference(folder: Path) -> None:
    """Write the generated pages of the documentation into a folder."""
    from lowbit.pylib.cli.reference import write

    for path in write(folder, app):
        errors.print(f"wrote {path}", markup=False)


def main() -> None:
    """The entry point of the `lowbit` script."""
    app()


if __name__ == "__main__":
    main()
