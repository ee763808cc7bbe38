"""`python -m benchmarks`: measure, and read what was measured."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)

Commit = Annotated[str | None, typer.Option(help="Of the sources, where they are no git checkout.")]


def _log(step: str) -> None:
    print(step, file=sys.stderr, flush=True)


@app.callback()
def main() -> None:
    """Measure, and read what was measured."""


@app.command()
def show(commit: Commit = None) -> None:
    """Correctness, speed against torch f16, compile time and host cost in one markdown table: two minutes."""
    from benchmarks.show import show as table

    print(table(commit, _log))


if __name__ == "__main__":
    app()
