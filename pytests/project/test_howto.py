"""The how-to pages are true: the diff of a page applies to this tree, and what the page then runs works."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

PAGES = sorted((Path(__file__).resolve().parents[2] / "docs/howto").glob("*.md"))
PARTS = ("dialect", "passes", "pylib", "lowbit", "pytests", "lit_tests", "docs/design.md")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page(page: Path, repo: Path, tmp_path: Path) -> None:
    """Fix for a diff that does not apply: make its change in a checkout, and put `git diff -U1` into the page."""
    for part in PARTS:
        _copy(repo / part, tmp_path / part)
    diffs = _blocks(page, "diff")
    assert len(diffs) == page.stem.startswith("add-")
    for diff in diffs:
        subprocess.run(["git", "apply", "--recount", "-"], cwd=tmp_path, input=diff, text=True, check=True)
    commands = [shlex.split(line) for line in "".join(_blocks(page, "sh")).splitlines()]
    assert all(program == "lowbit" for program, *_ in commands)
    for _, *arguments in commands:
        _run(["-m", "lowbit", *arguments], tmp_path)
    code = "".join(_blocks(page, "python"))
    assert commands or code
    if code:
        program = tmp_path / "page.py"  # a file: `fuse_` reads the source of classes
        program.write_text(code)
        _run([program.name], tmp_path)


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        # With what Python has compiled, but not what it is writing in another process.
        shutil.copytree(source, target, symlinks=True, ignore=shutil.ignore_patterns("*.pyc.*"))
    else:
        shutil.copy(source, target)


def _blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def _run(arguments: Sequence[str], root: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(root), "LOWBIT_NO_CACHE": "1"}
    done = subprocess.run([sys.executable, *arguments], cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
