"""How commands print what they found: a line each, never folded, so that pipes can read it; or JSON."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

errors = Console(stderr=True, soft_wrap=True, highlight=False, emoji=False)
"""Where commands say what goes on or wrong, apart from what they print."""
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


_OPTIONS = (
    ("None for one scale per row", "0 for one scale per row"),
    (r"^config\['(.*?)'\] matches", r"--skip \1 matches"),
    (r"^out=('.*[./].*' must be one of .*)", r"--out=\1, as the type of y; a file is named by -o"),
)


def in_options(message: str) -> str:
    """Returns an error of Python's interface, or a table with some, in terms of the options that say the same."""
    for of_python, of_command in _OPTIONS:
        message = re.sub(of_python, of_command, message)
    return message


def show(title: str, facts: Mapping[str, str]) -> None:
    """Print a title and a line for each fact, with names in bold on a terminal. Values may have rich's markup."""
    console = Console(highlight=False, soft_wrap=True, emoji=False)
    width = max(map(len, facts))
    console.print(escape(title), style="italic")
    for name, value in facts.items():
        console.print(f"[bold]{escape(name):<{width}}[/]  {value}")


def show_json(value: Any) -> None:
    """Print a value as JSON, keys in their order. NaN and infinities, which JSON lacks, must not be in it."""
    sys.stdout.write(json.dumps(value, indent=2, allow_nan=False) + "\n")
