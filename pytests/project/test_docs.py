"""What the documentation says exists, and its examples run."""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import lowbit
from lowbit.dialect.types import Lowbit
from lowbit.passes.kernels.decode.schedule import Schedule
from lowbit.passes.pipeline import PASSES
from lowbit.passes.stages import stages
from lowbit.pylib.build import knobs
from lowbit.pylib.cli.main import app
from lowbit.pylib.cli.reference import text_of, write

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
WRITTEN = [page for page in PAGES if page.parent.name != "reference"]
"""Pages that are not generated."""
PACKAGES = ("dialect", "passes", "pylib", "pytests", "lit_tests", "examples", "benchmarks", "docs")


def test_example_of_the_readme(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    names: dict[str, torch.Tensor] = {}
    exec(code, names)
    assert names["y"].shape == (3, 4096) and names["y"].dtype == torch.float16 and names["y"].isfinite().all()
    error = float(capsys.readouterr().out.removeprefix("largest error, relative to the largest value: "))
    assert 0 < error < 1e-3


def test_examples_of_formats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _run(ROOT / "docs/formats.md")
    assert (tmp_path / "weight.pt").exists()


def test_examples_and_excerpts_of_the_tutorial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever an excerpt of a stage shows between values and marks of omission is in that stage."""
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs/tutorial.md"
    texts = cache(_run(page)["gpu"].ir)
    excerpts = re.findall(r"```(?:mlir|asm) (\w+)\n(.*?)```", page.read_text(), re.DOTALL)
    assert {"lowbit", "tile", "gpu", "ptx"} == {stage for stage, _ in excerpts}
    shown = [(stage, part.strip()) for stage, text in excerpts for part in re.split(r"…|%\w+|\n", text)]
    assert [(stage, part) for stage, part in shown if part not in texts(stage)] == []


@pytest.mark.parametrize("page", ["quantizers.md", "sparse.md", "bilevel.md", "eight-bit.md"])
def test_examples_that_check_themselves(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    _run(ROOT / "docs" / page)


def _run(page: Path) -> dict[str, Any]:
    """Runs the Python blocks of a page, which are one program that checks itself; returns its names."""
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert blocks
    names: dict[str, Any] = {}
    exec("".join(blocks), names)
    return names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_headings_that_are_linked_exist(page: Path) -> None:
    links = re.findall(r"\]\((?!http)([^)#]*)#([^)]+)\)", page.read_text())
    pages = [(page.parent / path if path else page, anchor) for path, anchor in links]
    assert [f"{path}#{anchor}" for path, anchor in pages if anchor not in _anchors(path)] == []


def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in _headings(page)}


def _headings(page: Path) -> list[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"^#+ (.*)$", text, re.MULTILINE)


def test_headings_that_comments_name_exist() -> None:
    """A comment refers to an experiment as (docs/lab-notebook/page.md, "Its heading")."""
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    texts = [" ".join(file.read_text().replace("#", " ").split()) for file in files if file != Path(__file__)]
    named = [name for text in texts for name in re.findall(r'(docs/lab-notebook/[\w-]+\.md), "([^"]+)"', text)]
    assert named and [name for name in named if name[1] not in _headings(ROOT / name[0])] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_schedule_fields_that_are_named_exist(page: Path) -> None:
    named = re.findall(r"`Schedule\.(\w+)", page.read_text())
    assert set(named) <= {field.name for field in fields(Schedule)}


def test_messages_of_troubleshooting_exist() -> None:
    """Whatever a message shows between marks of omission is in the sources."""
    page = (ROOT / "docs/troubleshooting.md").read_text()
    messages = re.findall(r"^\| `([^`]* [^`]*)`", page, re.MULTILINE)
    files = [file for package in ("dialect", "passes", "pylib") for file in (ROOT / package).rglob("*.py")]
    sources = "".join(re.sub(r'"\n\s*f?"', "", file.read_text()) for file in files)
    parts = [part for message in messages for part in message.split("…") if part]
    assert len(messages) > 8 and [part for part in parts if part not in sources] == []


def test_generated_reference(tmp_path: Path) -> None:
    generated = write(tmp_path, app)
    committed = ROOT / "docs/reference"
    stale = [page.name for page in generated if page.read_text() != (committed / page.name).read_text()]
    assert stale == [], "run: lowbit reference docs/reference"
    assert {page.name for page in generated} == {page.name for page in committed.iterdir()}


def test_reference_is_complete() -> None:
    """Every operation, pass, field and public name has its place."""
    text = {page.name: page.read_text() for page in (ROOT / "docs/reference").iterdir()}
    assert [op for op in Lowbit.operations if f"### {op.OPERATION_NAME}\n" not in text["operations.md"]] == []
    assert [name for name in PASSES if f"## {name}\n" not in text["passes.md"]] == []
    assert [f.name for f in fields(Schedule) if f"| `{f.name}` |" not in text["schedules.md"]] == []
    names = [name for name in lowbit.__all__ if not name.startswith("__")]
    assert [name for name in names if f"## {name}\n" not in text["python.md"]] == []


@pytest.mark.parametrize(
    ("docstring", "expected"),
    [
        ("Sums of a\nlut<b>.\n\nNext `a<b>`.", "Sums of a lut\\<b>.\n\nNext `a<b>`."),
        ("One.\n\n    code\n\nn, k   rows\n", "One.\n\n```text\ncode\n\nn, k   rows\n```"),
        (None, ""),
    ],
)
def test_docstrings_as_markdown(docstring: str | None, expected: str) -> None:
    assert text_of(docstring) == expected


def test_glossary_is_alphabetical() -> None:
    terms = re.findall(r"^\| ([^|]+) \|", (ROOT / "docs/glossary.md").read_text(), re.MULTILINE)
    terms = [term.lower() for term in terms if term != "term"]
    assert len(terms) > 50 and terms == sorted(terms)


def test_environment_variables() -> None:
    """The page lists what `pylib.build.knobs` reads, and nothing else."""
    listed = re.findall(r"^\| `(LOWBIT_\w+)` \|", (ROOT / "docs/environment.md").read_text(), re.MULTILINE)
    read = re.findall(r'"(LOWBIT_\w+)"', Path(knobs.__file__).read_text())
    assert len(set(read)) > 3 and sorted(listed) == sorted(set(read))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_are_named_exist(page: Path) -> None:
    text = page.read_text()
    links = [page.parent / link for link in re.findall(r"\]\((?!http)([^)#]+)", text)]
    code = [ROOT / path for path in re.findall(r"`([\w/.-]+/[\w.-]+\.(?:py|md|mlir|json))`", text) if "<" not in path]
    named = links + [path for path in code if path.relative_to(ROOT).parts[0] in PACKAGES]
    assert [str(path) for path in named if not path.exists()] == []


def test_files_of_the_picture_of_the_design_exist() -> None:
    picture = (ROOT / "docs/design.md").read_text().split("```text\n")[1].split("```")[0]
    named = re.findall(r"(?:dialect|passes|pylib)/[\w/.]*\w/?", picture)
    assert len(named) > 8 and [name for name in named if not (ROOT / name).exists()] == []


def _unrun_calls(page: Path) -> list[ast.Call]:
    """Returns the calls of `lowbit.name(...)` in blocks of Python that no test runs."""
    blocks = re.findall(r"^```text\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    code = [block for block in blocks if re.search(r"\blowbit\.\w+\(", block)]
    calls = [node for block in code for node in ast.walk(ast.parse(block)) if isinstance(node, ast.Call)]
    return [call for call in calls if ast.unparse(call.func).startswith("lowbit.")]


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: str(page.relative_to(ROOT)))
def test_calls_of_blocks_that_do_not_run_fit_their_signatures(page: Path) -> None:
    for call in _unrun_calls(page):
        function = eval(ast.unparse(call.func), {"lowbit": lowbit})
        inspect.signature(function).bind(*call.args, **{str(each.arg): each.value for each in call.keywords})


def test_there_are_calls_in_blocks_that_do_not_run() -> None:
    called = {ast.unparse(call.func) for page in WRITTEN for call in _unrun_calls(page)}
    assert {"lowbit.from_gguf", "lowbit.quantize_", "lowbit.QuantConfig"} <= called


def test_stages_that_the_readme_reads() -> None:
    """On any machine, with or without a GPU."""
    text = (ROOT / "README.md").read_text()
    (expression,) = re.findall(r"`(lowbit\.compile\(spec.*?\.ir\(.*?\))`", text)
    (command,) = re.findall(r"`lowbit (compile .*--stop-after \w+)`", text)
    names = {"lowbit": lowbit, "spec": lowbit.MatmulSpec(64, 256, "u4")}
    assert "lowbit.program" in eval(expression, names)
    assert "lowbit.program" in CliRunner().invoke(app, [*command.split(), "-n", "64", "-k", "256"]).stdout


@pytest.mark.parametrize("page", ["README.md", "docs/design.md"])
def test_stages_and_passes(page: str) -> None:
    text = (ROOT / page).read_text()
    names = set(stages(gpu=True)) | set(stages(gpu=False))
    if page == "docs/design.md":
        names |= set(PASSES)
        given = re.findall(r"^\| `([\w-]+)` \| .*\.py", text, re.MULTILINE)
        assert given == list(PASSES)  # in this order
    assert [name for name in names if not re.search(rf"\b{name}\b", text)] == []
