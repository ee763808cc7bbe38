"""The command line: `lowbit compile | explain | opt | run | check | tune | quantize | inspect | ...`.

A command is a function. If it takes a matmul, it has a `spec` parameter, which `takes_spec` turns into one option for
each field of `MatmulSpec`. Slow imports are inside the commands.
"""

from __future__ import annotations

import sys
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup

import lowbit
from lowbit.dialect.errors import LowbitError, reason
from lowbit.pylib.cli.bench_model import bench_model
from lowbit.pylib.cli.check import check
from lowbit.pylib.cli.export import export
from lowbit.pylib.cli.matmul import compile_, explain, run
from lowbit.pylib.cli.model_files import inspect, quantize
from lowbit.pylib.cli.output import Json, errors, in_options, show, show_json
from lowbit.pylib.cli.tune import tune


class Commands(TyperGroup):
    """Reports what is wrong with the input as one line, without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # | head
            raise
        except (LowbitError, OSError) as error:
            errors.print("[bold red]error:[/] ", end="")
            errors.print(in_options(reason(error)), markup=False)
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



def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"lowbit {lowbit.__version__}")
        raise typer.Exit


def _show_cmake_dir(wanted: bool) -> None:
    if wanted:
        from lowbit.pylib.aot.sources import CMAKE_FOLDER

        print(CMAKE_FOLDER.resolve())
        raise typer.Exit


@app.callback()
def all_commands(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version, and exit.")
    ] = False,
    cmake_dir: Annotated[
        bool,
        typer.Option("--cmake-dir", callback=_show_cmake_dir, is_eager=True, help="Show CMake's lowbit_DIR, and exit."),
    ] = False,
) -> None:
    """The options of all commands."""


app.command("compile")(compile_)
app.command()(explain)


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


app.command()(run)
app.command()(check)
app.command()(tune)
app.command()(quantize)
app.command()(inspect)
app.command()(export)
app.command()(bench_model)


@app.command()
def info(as_json: Json = False) -> None:
    """Show the GPU, the toolchain, the cache and the targets.

    A report of a problem should have this text in it.

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

    With it, mlir-opt --irdl-file reads the operations on tensors, as lowbit opt --mlir-print-op-generic prints them.

    [bold]Example[/]

      lowbit irdl > lowbit.irdl.mlir
    """
    from lowbit.dialect.irdl_export import irdl_text

    sys.stdout.write(irdl_text())


@app.command(hidden=True)
def reference(folder: Annotated[Path, typer.Argument(help="Folder to write to: docs/reference.")]) -> None:
    """Write the generated pages of the documentation into a folder."""
    from lowbit.pylib.cli.reference import write

    for path in write(folder, app):
        errors.print(f"wrote {path}", markup=False)


def main() -> None:
    """The entry point of the `lowbit` script. A terminal without µ or … gets a question mark in their place."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    app()


if __name__ == "__main__":
    main()
