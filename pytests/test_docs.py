"""What the documentation says exists, and its example runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from lowbit.passes.pipeline import PASSES
from lowbit.passes.stages import stages

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
PACKAGES = ("dialect", "passes", "pylib", "pytests", "lit_tests", "examples", "benchmarks", "docs")


def test_example_of_the_readme() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    names: dict[str, torch.Tensor] = {}
    exec(code, names)
    assert names["y"].shape == (3, 4096) and names["y"].dtype == torch.float16 and names["y"].isfinite().all()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_are_named_exist(page: Path) -> None:
    text = page.read_text()
    links = [page.parent / link for link in re.findall(r"\]\((?!http)([^)#]+)", text)]
    code = [ROOT / path for path in re.findall(r"`([\w/.-]+/[\w.-]+\.(?:py|md|mlir|json))`", text) if "<" not in path]
    named = links + [path for path in code if path.relative_to(ROOT).parts[0] in PACKAGES]
    assert [str(path) for path in named if not path.exists()] == []


def test_operations() -> None:
    """The page lists what the dialect has, and nothing else."""
    page = (ROOT / "docs/design.md").read_text()
    listed = page[page.index("Operations (`dialect/ops/`)") : page.index("Every access says")]
    operation = re.compile(r'^class \w+\(Lowbit\.Operation, name="(\w+)"', re.MULTILINE)
    files = sorted((ROOT / "dialect/ops").glob("*.py"))
    names = [name for file in files for name in operation.findall(file.read_text())]
    assert len(names) > 30 and sorted(re.findall(r"`(\w+)`", listed)) == sorted(names)


@pytest.mark.parametrize("page", ["README.md", "docs/design.md"])
def test_stages_and_passes(page: str) -> None:
    text = (ROOT / page).read_text()
    names = set(stages(gpu=True)) | set(stages(gpu=False))
    if page == "docs/design.md":
        names |= set(PASSES)
        given = re.findall(r"^\| `([\w-]+)` \| .*\.py", text, re.MULTILINE)
        assert given == list(PASSES)  # in this order
    assert [name for name in names if not re.search(rf"\b{name}\b", text)] == []
