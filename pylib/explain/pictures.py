"""The pictures and example pages of docs/, made by the compiler: `python -m lowbit.pylib.explain.pictures docs`.

The picture of a page is taken by a browser, and stays as it is where there is none.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.pipeline import compile_kernel
from lowbit.passes.targets import parse_target
from lowbit.pylib.build.kernels import kernel_choices
from lowbit.pylib.explain.executed import run_one_cluster
from lowbit.pylib.explain.figures import Bars
from lowbit.pylib.explain.kernels import explain_matmul
from lowbit.pylib.explain.packing import lanes_of_block, unit_of, words_of, words_of_lane, words_of_line
from lowbit.pylib.explain.page import Page, svg
from lowbit.pylib.explain.shared import buffers, pipeline

_BROWSERS = ("chromium", "google-chrome", "chromium-browser", "chrome")
_BROWSERS += ("chromium-headless-shell", "chrome-headless-shell")
_WIDTH, _HEIGHT = 1960, 700


def pictures() -> dict[str, str]:
    """The text of each file by its name, of those that packing alone decides."""
    spqr = unit_of(MatmulSpec.preset("spqr", 16, 256))
    (group_codes,) = (slot for slot in spqr.tensors if slot.role == "group_codes")
    drawn = {
        "words_3_bits.svg": words_of_lane(spqr),
        "group_codes.svg": words_of(spqr, group_codes, 2),
        "outliers.svg": words_of_line(),
        "lanes.svg": lanes_of_block(),
    }
    return {name: svg(grid) for name, grid in drawn.items()}


def pipeline_picture() -> Bars:
    """How x comes to a prefill kernel for 300 rows and 4096 columns: eight rounds through four stages."""
    spec = MatmulSpec(n=64, k=4096, weight="u4", group_size=128)
    wanted = kernel_choices(spec, parse_target("sm_90a")).launches(300)[0]
    compiled = compile_kernel(wanted, keep=True)
    seen = run_one_cluster(wanted, compiled.launch, compiled.ptx, 300)
    found = pipeline(seen, buffers(compiled.stages["tile"]))
    if found is None:
        raise ValueError("the kernel has no copies in rounds: draw another one")
    return found


def pages() -> dict[str, Page]:
    """The example pages by the names of their files: a decode kernel for Hopper, and a program for a CPU."""
    decode = MatmulSpec(256, 1024, "u4", group_size=128)
    return {
        "decode.html": explain_matmul(decode, parse_target("sm_90a"), None, 16),
        "cpu.html": explain_matmul(MatmulSpec(64, 512, "u3", group_size=128), parse_target("cpu"), None, 1),
    }


def browser() -> str | None:
    """The command of a browser that takes pictures of pages, if there is one."""
    return next(filter(None, map(shutil.which, _BROWSERS)), None)


def screenshot(page: Path, shown: str, picture: Path, command: str) -> None:
    """Takes a picture of a page. Raises CalledProcessError if that fails.

    shown    the stages in it and the line that is picked, as a link has them behind #
    command  a browser
    """
    with TemporaryDirectory() as profile:
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}"]
        options += [f"--window-size={_WIDTH},{_HEIGHT}", f"--screenshot={picture.resolve()}"]
        address = f"{page.resolve().as_uri()}#{shown}"
        subprocess.run([command, *options, address], check=True, capture_output=True, timeout=300)


def line_with(page: Page, pane: str, text: str) -> str:
    """The id of the first line of a pane with this text."""
    (lines,) = (each.lines for each in page.panes if each.name == pane)
    return f"{pane}-{next(number for number, line in enumerate(lines) if text in line.html)}"


def write(docs: Path) -> None:
    """Writes all of it to a folder of documentation."""
    for name, text in (pictures() | {"pipeline.svg": svg(pipeline_picture())}).items():
        (docs / "img" / name).write_text(text)
    made = pages()
    for name, page in made.items():
        page.save(docs / "explain" / name)
    if command := browser():
        shown = f"panes=python,tile,ptx,sass&line={line_with(made['decode.html'], 'tile', 'copy_async')}"
        screenshot(docs / "explain/decode.html", shown, docs / "img/explain.png", command)
    else:
        print("img/explain.png is as it was: a picture of a page takes one of", ", ".join(_BROWSERS))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
