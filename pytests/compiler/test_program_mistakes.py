"""The pages on programs of one's own are true: docs/kernel.md's first program runs, and its ten mistakes say what they
are said to."""

from __future__ import annotations

import linecache
import re
import textwrap
from pathlib import Path

import pytest
import torch

import lowbit

PAGE = Path(__file__).parents[2] / "docs/kernel.md"
FILE, TARGET = "my_kernel.py", "emulator:sm_80"
BEFORE = """from lowbit.dialect.layouts.layout import local, spatial
from lowbit.passes.builder import Program

p = Program("mine", 32, (1, 1, 1), {"x": "pointer", "y": "pointer"})
with p:
    x, y = (p.global_view(p[name], "f16", (64, 64)) for name in "xy")
    tile = p.load(x, (0, 0), spatial(8, 4))
"""


def between(begin: str, end: str) -> str:
    return PAGE.read_text().split(f"<!-- {begin} -->")[1].split(f"<!-- {end} -->")[0]


def mistakes() -> list[tuple[str, str]]:
    """The code and the message of each mistake."""
    fences = r"   ```python\n(.*?)   ```\n   ```\n(.*?)   ```\n"
    found = re.findall(fences, between("mistakes: begin", "mistakes: end"), re.S)
    return [(textwrap.dedent(code), " ".join(textwrap.dedent(message).split())) for code, message in found]


def said_of(code: str) -> str:
    """The message of a mistake, with the user's file as the page calls it."""
    indent = "" if "# outdented" in code else "    "
    source = BEFORE + textwrap.indent(code, indent)
    values: dict[str, object] = {}
    linecache.cache[FILE] = (len(source), None, source.splitlines(True), FILE)
    with pytest.raises(lowbit.LowbitError) as caught:
        exec(compile(source, FILE, "exec"), values)
        kernel = lowbit.compile_program(values["p"], TARGET)  # type: ignore[arg-type]
        x, y = torch.zeros(64, 64).half(), torch.zeros(64, 64).half()
        kernel(x=x.float() if "x.float()" in code else x, y=y)
    return str(caught.value)


def test_the_first_program() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", between("program: begin", "program: end"), re.S)
    exec(compile(code, FILE, "exec"), {})


def test_there_are_ten_mistakes() -> None:
    assert len(mistakes()) == 10


@pytest.mark.parametrize(("code", "message"), mistakes())
def test_a_mistake_says_what_the_page_says(code: str, message: str) -> None:
    assert " ".join(said_of(code).split()) == message
    assert f"{FILE}:" in message or "kernel(" in code  # the call has the line in its traceback
