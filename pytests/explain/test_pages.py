"""Pages that explain a kernel: their numbers are those of the compiler, and their lines are linked."""

from __future__ import annotations

import json
import linecache
import math
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from compiler.test_assembly import KERNELS

import lowbit
from lowbit.dialect.bilevel import least_code
from lowbit.dialect.layouts.fragments import MMA_M16N8K16_A
from lowbit.dialect.layouts.layout import Layout, local, replicated, spatial
from lowbit.dialect.layouts.parse import parse_layout
from lowbit.dialect.spec import MatmulSpec
from lowbit.dialect.top_k import TopK
from lowbit.dialect.weight import TensorSlot
from lowbit.passes.builder import Program
from lowbit.passes.codegen import sass
from lowbit.passes.codegen.cubin import Resources, resource_usage
from lowbit.passes.cpu.compile import program_stages
from lowbit.passes.kernels.registry import family_named, request
from lowbit.passes.origins import Origins
from lowbit.passes.pipeline import compile_kernel
from lowbit.passes.targets import GPUS, parse_target
from lowbit.pylib.build import host_programs
from lowbit.pylib.build.kernels import kernel_choices
from lowbit.pylib.emulator import Emulator
from lowbit.pylib.explain import activity, executed, measured
from lowbit.pylib.explain.activity import bank_turns, banks, shared_map
from lowbit.pylib.explain.figures import Bars, Grid, Table
from lowbit.pylib.explain.kernels import explain_kernel
from lowbit.pylib.explain.layouts import layout_grid, layout_grids
from lowbit.pylib.explain.machine import Occupancy, Roofline, waves
from lowbit.pylib.explain.measured import Measured, measure
from lowbit.pylib.explain.packing import first_chunk_of, packing_figures, unit_of, words_of_lane
from lowbit.pylib.explain.page import Page, svg
from lowbit.pylib.explain.pictures import browser, line_with, pictures, pipeline_picture, screenshot
from lowbit.pylib.explain.shared import buffers, fills
from lowbit.pylib.explain.text import coloured_python, python_pane, stage_pane
from lowbit.pylib.reference import random_inputs
from lowbit.pylib.runtime.cpu import CpuMatmul, Loaded
from lowbit.pylib.torch_types import TORCH
from lowbit.pylib.weights.outliers import draw, to_lines
from lowbit.pylib.weights.packed import pack
from lowbit.pylib.weights.values import least

SPEC = MatmulSpec(n=64, k=512, weight="u4", group_size=128)
EXPERTS = MatmulSpec(n=512, k=256, weight="u4", group_size=128, experts=4)
CHROMIUM = browser()


@pytest.fixture(scope="module")
def page() -> Page:
    return lowbit.compile(SPEC, "sm_90a").explain(m=16)


def figure(page: Page, title: str) -> Grid | Bars | Table:
    return next(each for each in page.figures if each.title == title)


def values(page: Page, title: str) -> dict[str, str]:
    """The rows of a table of two columns."""
    table = figure(page, title)
    assert isinstance(table, Table)
    return {str(row[0]): str(row[1]) for row in table.rows}


# -- stages


def test_stages_are_those_of_the_matmul(page: Page) -> None:
    mm = lowbit.compile(SPEC, "sm_90a")
    assert [pane.name for pane in page.panes] == ["python", "lowbit", "tile", "gpu", "llvm", "ll", "ptx", "sass"]
    for pane in page.panes[1:7]:
        wanted = mm.ir(pane.name, 16).partition("\n!llvm.module")[0].rstrip()
        shown = "\n".join(text_of(line.html) for line in pane.lines)
        assert _unnumbered(shown) == _unnumbered(wanted), pane.name


def _unnumbered(llvm_ir: str) -> str:
    """LLVM IR without the numbers of its metadata, which depend on what else there is."""
    return re.sub(r"!\d+", "!", llvm_ir)


def text_of(html: str) -> str:
    """What a browser shows of a line."""
    found: list[str] = []
    parser = HTMLParser()
    parser.handle_data = found.append
    parser.feed(html)
    return "".join(found)


def test_a_line_is_linked_with_every_stage(page: Page) -> None:
    """The product: lines of every stage share its operation."""
    (tile,) = (pane for pane in page.panes if pane.name == "tile")
    origins = next(line.origins for line in tile.lines if "lowbit.warpgroup_mma" in text_of(line.html))
    for pane in page.panes:
        assert any(set(origins) & set(line.origins) for line in pane.lines), pane.name


@pytest.mark.parametrize("text", ['%0 = "a<b>"(%x) : i32 // c & d', "\tmov.b32 \t%r1, 0f3F800000;\n\n$L__BB0_5:", ""])
def test_a_stage_keeps_the_text(text: str) -> None:
    lines = stage_pane("ll", "LLVM IR", text, [None] * len(text.split("\n"))).lines
    assert [text_of(line.html) for line in lines] == text.split("\n")


def test_colours_of_python() -> None:
    text = 'def f(x: int) -> str:\n    """Says <x>."""\n    return f"{x} & more"'
    assert [text_of(line) for line in coloured_python(text)][:3] == text.split("\n")


def test_colours_of_a_part_that_begins_within_a_string(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text('def f():\n    """Says\n    what\n    it\n    is."""\n    return 1\n')
    origins = Origins(python=((str(file), 6),))
    (_, *lines) = python_pane(origins).lines
    assert [line.number for line in lines] == [4, 5, 6] and lines[-1].origins == (1,)
    assert "<i class=s>" in lines[1].html and "<i class=k>return</i>" in lines[2].html


@pytest.mark.parametrize(
    "raw",
    [
        "import os\n\x0c\nx = 'é'\n",
        "# a line\u2028of one\n\nx = 'é'\n",
        "# -*- coding: latin-1 -*-\n\nx = 'é'",
        "#\r\n\r\nx = 'é'\r\n",
    ],
    ids=["form feed", "separator", "latin-1", "returns"],
)
def test_lines_are_those_that_python_counts(raw: str, tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    for text in (raw, raw.replace("x = 'é'", "y = 'éé'")):  # the second after an edit of the file
        file.write_bytes(text.encode("latin-1" if "latin-1" in raw else "utf-8"))
        last = python_pane(Origins(python=((str(file), 3),))).lines[-1]
        assert (text_of(last.html), last.number, last.origins) == (text.split("\n")[2].strip(), 3, (1,))


def test_a_cell_of_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in linecache alone."""
    monkeypatch.setitem(linecache.cache, "<cell 1>", (6, None, ["x = 1\n"], "<cell 1>"))
    assert text_of(python_pane(Origins(python=(("<cell 1>", 1),))).lines[-1].html) == "x = 1"


@pytest.mark.parametrize("raw", [None, b"", b"# \xff\nx = 1\n"], ids=["gone", "empty", "no text"])
def test_lines_of_a_file_that_can_not_be_read(raw: bytes | None, tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    if raw is not None:
        file.write_bytes(raw)
    last = python_pane(Origins(python=((str(file), 2),))).lines[-1]
    assert last.html == "line 2, of a file that is not here"


def test_without_nvdisasm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sass, "find_nvdisasm", lambda: None)
    pane = lowbit.compile(SPEC, "sm_90a").explain(m=16).panes[-1]
    assert not pane.lines and pane.absent == "SASS needs nvdisasm, which is not here; pip install nvidia-cuda-nvdisasm"


# -- pictures


def read(words: np.ndarray, grid: Grid) -> dict[str, int]:
    """The numbers that are in words of memory, by what the picture says of its cells: of all titles but their bits."""
    found: dict[str, int] = {}
    for word, (_, cells) in zip(words.tolist(), grid.rows):
        for i, cell in enumerate(cells):
            if cell.text:
                bit, _, what = cell.title.removeprefix("bit ").partition(" of ")
                found[what] = found.get(what, 0) | (word >> 31 - i & 1) << int(bit)
    return found


@pytest.mark.parametrize("weight", ["u1", "u2", "u3", "u4", "u5", "u6", "u7", "i8"])
def test_bits_of_the_packed_weight(weight: str) -> None:
    """A weight that `pack` has packed, read by what the picture says of its cells."""
    spec = MatmulSpec(n=16, k=512, weight=weight, group_size=256)
    packing = spec.packing
    codes = torch.randint(0, 2**packing.bits, (16, 512), generator=torch.Generator().manual_seed(0))
    signed = codes - 128 if weight == "i8" else codes
    packed = lowbit.compile(spec, "cpu").pack(signed, torch.ones(16, 2))["codes"].numpy().view(np.uint32)
    for lane in (0, 13):
        found = read(packed[0, 0, :, lane].ravel(), words_of_lane(unit_of(spec), lane))
        assert len(found) * 32 == 16 * packing.chunk
        for what, number in found.items():
            row, column = map(int, re.findall(r"\d+", what))
            assert number == codes[row, column]


OTHER_TENSORS = {
    "f32, int zeros, bias": MatmulSpec(32, 512, "i4", group_size=64, scale="f32", zeros="int", bias=True),
    "bf16, offsets": MatmulSpec(32, 512, "u4", group_size=32, act="bf16", scale="bf16", zeros="offset"),
    "gated": MatmulSpec(16, 256, "u4", group_size=64, epilogue="silu_mul"),
    "padded groups": MatmulSpec(32, 480, "u4", group_size=48),
    "per row": MatmulSpec(32, 260, "u5"),
    "folded": MatmulSpec(32, 512, "u4", group_size=64, compute="f8e4m3", fold_scales=True),
} | {name: MatmulSpec.preset(name, 32, 1024) for name in ("mxfp4", "nvfp4", "spqr", "q4_k", "q6_k", "nf4_nested")}


@pytest.mark.parametrize("spec", OTHER_TENSORS.values(), ids=OTHER_TENSORS)
def test_bits_of_the_other_tensors(spec: MatmulSpec) -> None:
    """Second levels, zeros, scales of rows, bias: each number in the words that are drawn is what was packed."""
    _, given = random_inputs(spec, 1)
    packed, small = pack(spec, **given), unit_of(spec)
    drawn = {grid.title: grid for grid in packing_figures(spec)}
    for slot in small.tensors:
        if slot.role in ("codes", "permutation", "outliers"):
            continue
        words = packed[slot.name].contiguous().view(torch.uint8).numpy().ravel().view(np.uint32)
        grid = drawn[f"Bits of {slot.name}"]
        assert isinstance(grid, Grid)
        found = read(words, grid)
        assert found
        for what, number in found.items():
            name, (first, *others) = what.split()[0], [int(digits) for digits in re.findall(r" (\d+)[,)]", what)]
            (of,) = (each for each in spec.given_tensors if each.name == name)
            value = packed.unpack_tensor(name)[(first, *others) if len(of.given) > 1 else first]
            assert number == stored_bits(spec, of, value), what


def stored_bits(spec: MatmulSpec, slot: TensorSlot, value: torch.Tensor) -> int:
    """The bits of a number as memory has it."""
    if slot.storage == "u8":
        return int(value) - (least_code(slot.code) if slot.code else least(spec))
    number = value.reshape(1).to(TORCH[slot.storage])
    return int.from_bytes(number.view(torch.uint8).numpy().tobytes(), "little")


@pytest.mark.parametrize("spec", [*OTHER_TENSORS.values(), MatmulSpec(32, 1024, "nf4", 512), MatmulSpec(16, 96, "u3")])
def test_the_first_chunk_is_that_of_the_unit(spec: MatmulSpec) -> None:
    assert words_of_lane(first_chunk_of(spec), 9) == words_of_lane(unit_of(spec), 9)


def test_pictures_of_long_groups_are_as_small_as_those_of_short_ones() -> None:
    spec = MatmulSpec(16, 2**17, "u4", group_size=2**17, zeros="int")
    assert first_chunk_of(spec).k == spec.packing.chunk
    assert packing_figures(spec)[0] == packing_figures(replace(spec, k=64, group_size=64))[0]


def test_bits_of_outliers() -> None:
    spec = MatmulSpec.preset("spqr", 16, 512)
    outliers = draw(16, 512, 0.01, torch.Generator().manual_seed(0))
    lines = to_lines(outliers).numpy().view(np.uint32)
    (grid,) = (each for each in packing_figures(spec) if each.title == "Bits of outliers")
    assert isinstance(grid, Grid)
    first, each = ((name, cells) for name, cells in grid.rows)
    found = set[tuple[int, int, float]]()
    for line in lines[1:]:
        (column,) = read(line[:1], replace(grid, rows=(first,))).values()
        for word in line[1:][line[1:] != 0]:
            parts = read(np.array([word]), replace(grid, rows=(each,)))
            value = np.array([parts["the value in f16"]], np.uint16).view(np.float16)[0]
            found.add((parts["the row of 16"], column + parts["the column, less the first"], float(value)))
    dense = outliers.to_dense()
    assert found == {(r, c, float(dense[r, c])) for r, c in dense.nonzero().tolist()} and len(found) > 31


@pytest.mark.parametrize("spec", [MatmulSpec(16, 64, "nf4"), MatmulSpec(16, 64, "f8e4m3"), MatmulSpec(16, 64, "i1")])
def test_values_of_codes(spec: MatmulSpec) -> None:
    (grid,) = (each for each in packing_figures(spec) if each.title == "Values of codes")
    assert isinstance(grid, Grid)
    shown = [float(cell.title.partition(": ")[2]) for cell in grid.cells]
    np.testing.assert_array_equal(shown, spec.dtype.values())


@pytest.mark.parametrize(
    "layout", [MMA_M16N8K16_A, local(2, 1) * spatial(8, 4) * local(1, 2), spatial(4, 8) * replicated(2, 2)], ids=str
)
def test_layouts(layout: Layout) -> None:
    for row, (_, cells) in enumerate(layout_grid(layout, "t").rows):
        for column, cell in enumerate(cells):
            (thread, slot), *others = layout.owner((row, column))
            who = f"warp {thread // 32}, lane {thread % 32}, slot {slot}"
            assert cell.title.startswith(f"element ({row}, {column}): {who}")
            assert cell.text == f"{thread % 32}:{slot}"
            assert (f"and {len(others)} more" in cell.title) == bool(others)


def test_every_layout_of_a_program_is_drawn() -> None:
    wanted = kernel_choices(SPEC, parse_target("sm_90a")).launches(16)[0]
    tile = compile_kernel(wanted, keep=True).stages["tile"]
    texts = set(re.findall(r'^!reg_\w+ = .*, "([^"]+)">$', tile, re.MULTILINE))
    drawn = layout_grids(tile)
    assert len(texts) > 1 and {parse_layout(text) for text in texts} == {
        parse_layout(grid.about.partition(": ")[0]) for grid in drawn
    }


def test_registers_and_shared_memory(page: Page) -> None:
    kernel = lowbit.compile(SPEC, "sm_90a").kernel(16)
    shown = values(page, "Registers, shared memory, occupancy")
    used = resource_usage(kernel.ptx, parse_target("sm_90a"))
    assert shown["registers per thread"] == str(used.registers)
    assert shown["shared memory per block"] == f"{kernel.launch.shared_bytes + used.shared:,} bytes"
    assert shown["threads per block"] == str(kernel.launch.threads)
    assert shown["grid"] == " x ".join(map(str, kernel.launch.blocks({"m": 16}, 132)))


def test_occupancy() -> None:
    """Of 128 threads with 128 registers and 100 KB: shared memory has room for two blocks, registers for four."""
    kernel = lowbit.compile(SPEC, "sm_90a").kernel(16)
    launch = replace(kernel.launch, threads=128, shared_bytes=100 * 1024)
    found = Occupancy.of(launch, Resources(128, 0, 0, 0, 0), parse_target("sm_90a"))
    assert found.limits == {"registers": 4, "shared memory": 2, "threads": 16, "blocks": 32}
    assert (found.blocks, found.limit) == (2, "shared memory")


@pytest.mark.parametrize(
    ("threads", "registers", "shared", "blocks"),
    [
        (64, 104, 0, 8),  # 3328 for a warp: four in each of four parts of 16384, in place of 19 in 65536
        (96, 168, 0, 4),  # 5376: three in each part
        (512, 112, 0, 1),
        (32, 32, 0, 32),
        (32, 32, 8 * 1024, 25),  # 9216 bytes with those of the system, of 233472
        (32, 32, 20200, 10),  # 21248 in units of 128 bytes
    ],
)
def test_blocks_of_a_multiprocessor(threads: int, registers: int, shared: int, blocks: int) -> None:
    """As NVIDIA's occupancy calculator has them for a Hopper GPU."""
    launch = replace(lowbit.compile(SPEC, "sm_90a").kernel(16).launch, threads=threads, shared_bytes=shared)
    assert Occupancy.of(launch, Resources(registers, 0, 0, 0, 0), parse_target("sm_90a")).blocks == blocks


@pytest.mark.parametrize(("blocks", "per_processor"), [(1, 1), (132, 1), (300, 2), (1000, 3)])
def test_waves(blocks: int, per_processor: int) -> None:
    """Every block is on one multiprocessor, once."""
    grid = waves(blocks, per_processor, parse_target("sm_90a"))
    held = [int(n) for cell in grid.cells for n in re.findall(r"\d+", cell.title.partition(": ")[2])]
    assert sorted(held) == list(range(blocks)) and len(grid.rows) == math.ceil(blocks / (132 * per_processor))


@pytest.mark.parametrize(("m", "target"), [(1, "sm_90a"), (16, "sm_80"), (300, "sm_90a")])
def test_roofline(m: int, target: str) -> None:
    wanted = kernel_choices(SPEC, parse_target(target)).launches(m)[0]
    found, family = Roofline.of(wanted, m), family_named(wanted.family)
    tokens = wanted.schedule.tokens  # type: ignore[attr-defined]
    assert found.predicted == family.predict(wanted.spec, tokens, wanted.schedule, wanted.target)
    assert found.bounds == family.bounds(wanted.spec, m, wanted.schedule, wanted.target)
    assert found.bounds[found.bound] == max(found.bounds.values()) > 0
    assert f"Bound by {found.bound}" in found.figure(Measured(None, "")).about


BY_IDS = replace(SPEC, n=256, experts=4, top_k=TopK(2, "i32", "f16"))


@pytest.mark.parametrize(
    "spec",
    [
        SPEC,
        replace(SPEC, epilogue="residual"),
        replace(SPEC, compute="i8"),
        replace(SPEC, permuted=True),
        replace(SPEC, n=256, experts=4),
        replace(SPEC, n=256, experts=4, compute="i8"),
        BY_IDS,
        replace(BY_IDS, top_k=TopK(2)),
    ],
    ids=str,
)
def test_measured_time(spec: MatmulSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """On another machine none, and why; on that of the target what the clock of `lowbit run` says of calls."""
    target, results = parse_target("sm_90a"), list[torch.Tensor]()

    def clock(calls: Sequence[Callable[[], torch.Tensor]]) -> float:
        results.append(calls[0]())
        return 7.25e-6

    monkeypatch.setattr(measured, "this_machine", lambda: "sm_80")
    assert measure(spec, target, None, 16) == Measured(None, "No time was measured: this machine runs sm_80.")
    monkeypatch.setattr(measured, "this_machine", lambda: "emulator:sm_90a")
    monkeypatch.setattr(measured, "DEVICE", "cpu")
    monkeypatch.setattr(measured, "copies", lambda weight: [weight])
    monkeypatch.setattr(measured, "cold_time", clock)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    found = measure(spec, parse_target("emulator:sm_90a"), None, 16)
    assert found == Measured(7.25, "On a GPU a call takes 7.25 µs, all of its launches.")
    assert results[0].shape == (16, 64) and results[0].isfinite().all()
    wanted = kernel_choices(replace(spec, top_k=None), target).launches(16)[0]
    roofline = Roofline.of(wanted, 16).figure(found)
    assert ("measured 7.25", 7.25) in [(name, bars[0].end) for name, bars in roofline.rows]


def test_executed_counts_are_those_of_the_emulator() -> None:
    """One block, watched, and the same block by the emulator's own statistics."""
    wanted = kernel_choices(SPEC, parse_target("sm_90a")).launches(16)[0]
    kernel = lowbit.compile(SPEC, "sm_90a").kernel(16)
    seen = executed.run_one_cluster(wanted, kernel.launch, kernel.ptx, 16)
    assert seen.whole and not seen.fault
    emulator, arguments = Emulator(kernel.ptx), executed.arguments(wanted, kernel.launch, 16)
    emulator.run(kernel.launch, arguments, blocks=[(x, 0, 0) for x in range(seen.cluster)])
    by_name: dict[str, int] = {}
    for number, count in seen.counts.items():
        name = seen.kernel.instructions[number].name
        by_name[name] = by_name.get(name, 0) + count
    assert by_name == dict(emulator.stats)


def test_memory_of_many_rows_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The grid and the roofline are those of all rows; the first cluster does the same with as many as it reads."""
    wanted = kernel_choices(SPEC, parse_target("sm_90a")).launches(5000)[0]
    kernel = compile_kernel(wanted)
    counts = executed.run_one_cluster(wanted, kernel.launch, kernel.ptx, 5000).counts
    monkeypatch.setattr(executed, "_MOST_BYTES", 1 << 20)
    assert executed.rows_emulated(wanted, 5000) == 910 and executed.rows_emulated(wanted, 300) == 300
    assert executed.run_one_cluster(wanted, kernel.launch, kernel.ptx, 5000).counts == counts
    page = lowbit.compile(SPEC, "sm_90a").explain(2**30)
    assert page.about.endswith("; emulated with 910 rows") and page.title.endswith("m = 1073741824, on sm_90a")
    assert values(page, "Registers, shared memory, occupancy")["grid"] == " x ".join(
        map(str, kernel.launch.blocks({"m": 2**30}, 132))
    )


def test_counts_beside_lines(page: Page) -> None:
    (ptx,) = (pane for pane in page.panes if pane.name == "ptx")
    products = [line for line in ptx.lines if re.search(r"^\s*(wg)?mma\.\w+\.", text_of(line.html))]
    assert products and all(int(line.note.replace(",", "")) > 0 for line in products)
    mix = {row[0]: row for row in figure(page, "Instructions by kind").rows}
    total = sum(int(line.note.replace(",", "")) for line in ptx.lines if line.note)
    assert int(mix["all"][1].replace(",", "")) == total


def turns_by_hand(offsets: list[int], size: int) -> int:
    """Turns of a request: threads in order, as many as have 128 bytes together; a bank gives one word in each."""
    together, turns = max(1, 128 // max(size, 4)), 0
    for first in range(0, len(offsets), together):
        words = {at // 4 + i for at in offsets[first : first + together] for i in range(max(1, size // 4))}
        turns += max(sum(word % 32 == bank for word in words) for bank in range(32))
    return turns


@pytest.mark.parametrize(("m", "target"), [(16, "sm_90a"), (300, "sm_80")])
def test_banks_of_every_access(m: int, target: str) -> None:
    """Each first request is drawn, with every word that a thread asks for in the turn and the bank that give it."""
    wanted = kernel_choices(SPEC, parse_target(target)).launches(m)[0]
    compiled = compile_kernel(wanted)
    seen = executed.run_one_cluster(wanted, compiled.launch, compiled.ptx, m)
    for access in seen.accesses.values():
        offsets, size = access.first
        turns = bank_turns(access)
        assert len(turns) == turns_by_hand(offsets, size)
        served = {(bank, word) for turn in turns for bank, (word, _) in turn.items()}
        assert served == {(word % 32, word) for at in offsets for word in range(at // 4, (at + max(size, 4)) // 4)}
    drawn = banks(seen)
    assert sum(int(grid.about.split()[4]) for grid in drawn) == len(seen.accesses)
    names = {seen.kernel.instructions[number].name for number in seen.accesses}
    assert {grid.title for grid in drawn} == {f"Banks of {name}" for name in names}


def test_conflicts_name_operations(page: Page) -> None:
    """Every access is in the table, with the number by which lines of stages are picked."""
    table = figure(page, "Bank conflicts")
    assert isinstance(table, Table)
    (ptx,) = (pane for pane in page.panes if pane.name == "ptx")
    rows = [(str(row[0]), row[1]) for row in table.rows if row[1] != ""]
    assert rows
    for name, of in rows:
        opcode = name.partition(".")[0]
        assert any(opcode in text_of(line.html) and of in line.origins for line in ptx.lines)
        assert f'data-o="{of}">operation {of}</button>' in page.html


@pytest.mark.parametrize("name", ["decode.html", "cpu.html"])
def test_pages_of_the_docs(name: str) -> None:
    """`make pages` writes them. What they say depends on versions of LLVM and nvdisasm; how they look does not."""
    root = Path(__file__).parents[2]
    kept = (root / "docs/explain" / name).read_text()
    for template in ("page.css", "page.js"):
        assert (root / "pylib/explain/templates" / template).read_text().strip() in kept


@pytest.mark.parametrize("name", sorted(pictures()))
def test_pictures_of_the_docs(name: str) -> None:
    """`make pages` writes them."""
    root = Path(__file__).parents[2]
    assert (root / "docs/img" / name).read_text() == pictures()[name]


def test_a_picture_is_xml_with_a_title_for_every_cell() -> None:
    root = ElementTree.fromstring(pictures()["words_3_bits.svg"])
    titles = [each.text for each in root.iter("{http://www.w3.org/2000/svg}title")]
    assert titles[1:] == [cell.title for cell in words_of_lane(MatmulSpec(16, 256, "u3")).cells]


def test_the_picture_of_a_pipeline() -> None:
    """`make pages` writes it. Steps depend on the version of LLVM; stages and rounds do not."""
    drawn, found = (Path(__file__).parents[2] / "docs/img/pipeline.svg").read_text(), pipeline_picture()
    wanted = re.findall("<title>(.*?), from", svg(found))
    assert len(wanted) == 8 and re.findall("<title>(.*?), from", drawn) == wanted


# -- shared memory


@pytest.mark.parametrize(("m", "target"), [(1, "sm_80"), (3, "sm_80"), (300, "sm_90a")])
def test_the_map_of_shared_memory(m: int, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies are drawn where they write: of rows that are padded not between them. What copies bring is read, by
    products that take x from shared memory too."""
    wanted = kernel_choices(SPEC, parse_target(target)).launches(m)[0]
    compiled = compile_kernel(wanted, keep=True)
    seen = executed.run_one_cluster(wanted, compiled.launch, compiled.ptx, m)
    monkeypatch.setattr(activity, "_MOST_BARS", 10_000)
    drawn: dict[str, set[int]] = {}
    for name, bars in shared_map(seen).rows:
        drawn[name] = {byte for bar in bars for byte in range(int(bar.begin), int(bar.end))}
    of_copies = {byte for copy in seen.copies for begin, end in copy.parts for byte in range(begin, end)}
    assert of_copies == set().union(*(drawn[name] for name in drawn if name.startswith("cp.async")))
    assert of_copies <= set().union(*(drawn[name] for name in drawn if name.startswith(("ld", "wgmma"))))
    (x,) = (each for each in buffers(compiled.stages["tile"]) if each.name == "x_shared")
    of_x = [copy for copy in seen.copies if x.start <= copy.start < x.start + x.bytes]
    if target == "sm_90a":
        (products,) = (drawn[name] for name in drawn if name.startswith("wgmma"))
        assert products == of_copies == set(range(x.start, x.start + x.bytes))
    else:
        assert {end - begin for copy in of_x for begin, end in copy.parts} == {256}  # a row of a step of k
        assert any(f"and {len(copy.parts) - 1} more places" in copy.written for copy in of_x)


@pytest.mark.parametrize(
    ("spec", "target", "m"),
    [
        (SPEC, "sm_90a", 300),
        (replace(SPEC, n=128, epilogue="silu_mul"), "sm_80", 16),
        (replace(SPEC, n=256, experts=4), "sm_80", 4),
    ],
    ids=["signals", "freed", "padded"],
)
def test_buffers(spec: MatmulSpec, target: str, m: int) -> None:
    """Whatever the emulator saw touched or copied lies in one, and the copies of a round in one stage."""
    wanted = kernel_choices(spec, parse_target(target)).launches(m)[0]
    compiled = compile_kernel(wanted, keep=True)
    seen = executed.run_one_cluster(wanted, compiled.launch, compiled.ptx, m)
    held = buffers(compiled.stages["tile"])
    assert seen and seen.whole
    inside = {byte for each in held for byte in range(each.start, each.start + each.bytes)}
    assert {4 * word for words in seen.touched.values() for word in words} <= inside
    assert max(each.start + each.bytes for each in held) <= compiled.launch.shared_bytes
    (x,) = (each for each in held if each.name == "x_shared")
    assert 1 < x.stages <= wanted.schedule.num_stages  # type: ignore[attr-defined]
    for fill in fills(seen, held):
        first = fill.buffer.start + fill.stage * fill.buffer.pitch
        assert all(first <= copy.start < first + fill.buffer.pitch for copy in fill.copies)


def test_rounds_of_a_pipeline() -> None:
    """Eight panels of x of 256 columns go through four stages, in order, and each has all of its bytes."""
    wanted = kernel_choices(replace(SPEC, k=4096), parse_target("sm_90a")).launches(300)[0]
    compiled = compile_kernel(wanted, keep=True)
    seen = executed.run_one_cluster(wanted, compiled.launch, compiled.ptx, 300)
    assert seen
    (x, *_), found = buffers(compiled.stages["tile"]), list(fills(seen, buffers(compiled.stages["tile"])))
    assert [(fill.stage, fill.round) for fill in sorted(found, key=lambda f: f.begin)] == [(i % 4, i) for i in range(8)]
    assert {sum(copy.bytes for copy in fill.copies) for fill in found} == {x.bytes // 4}


def test_figures_of_shared_memory(page: Page) -> None:
    rows = dict(figure(page, "Buffers in shared memory").rows)
    assert "codes_shared: 32,768 bytes, 2 stages" in rows and len(rows["codes_shared: 32,768 bytes, 2 stages"]) == 2
    rounds = figure(page, "Copy pipeline by rounds")
    assert isinstance(rounds, Bars) and rounds.rows[0][0] == "codes_shared, stage 0"


# -- other kernels


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_family(kernel: str) -> None:
    """Each kernel is compiled, and a cluster of it runs without a fault; its counts stand beside its lines."""
    family, spec, tokens, gpu = KERNELS[kernel]
    target = parse_target(gpu)
    schedule = family_named(family).candidates(spec, tokens, target)[0]
    page = explain_kernel(request(spec, target, schedule), 3)
    assert page.about.startswith(f"Kernel family {family}:")
    assert all(pane.lines for pane in page.panes if pane.name != "sass")
    assert figure(page, "Instructions by kind").about.endswith("executed in the emulator.")
    assert any(line.note for line in page.panes[2].lines)
    titles = {each.title for each in page.figures}
    operation = family_named(family).operation
    assert ("Roofline" in titles) == operation.endswith("matmul")
    per_weight = "of a thread per weight" in figure(page, "Instructions by kind").columns
    assert per_weight == (operation.endswith("matmul") or operation == "dequantize")
    assert ("Bits of the packed weight" in titles) == (family not in ("permute", "quantize"))
    assert len(page.html.encode()) < 5e6


@pytest.mark.parametrize("gpu", [target.name for target in GPUS])
def test_every_gpu(gpu: str) -> None:
    page = lowbit.compile(SPEC, gpu).explain(m=3)
    assert page.title.endswith(f"m = 3, on {gpu}") and page.panes[-1].name == "sass"
    assert any(line.note for line in page.panes[-2].lines)
    assert values(page, "Registers, shared memory, occupancy")["threads per block"]


@pytest.mark.parametrize(
    ("spec", "tokens", "target", "about"),
    [
        (EXPERTS, 1, "sm_90a", "Kernel family top_k_experts:"),
        (replace(EXPERTS, epilogue="silu_mul"), 1, "sm_90a", "Kernel family top_k_experts:"),
        (EXPERTS, 64, "sm_90a", "Kernel family experts_decode:"),
        (EXPERTS, 1, "sm_80", "Kernel family experts_decode:"),
        (EXPERTS, 64, "cpu", "The program for many rows, which runs for each expert, here of 32"),
    ],
    ids=["added up by ids", "gated by ids", "by table", "without clusters", "cpu"],
)
def test_a_layer_of_experts(spec: MatmulSpec, tokens: int, target: str, about: str) -> None:
    page = lowbit.explain_experts(spec, 2, tokens, target)
    assert page.about.startswith(about)
    rows = tokens if "added up" in page.title else 2 * tokens
    assert f"m = {rows}, on {target}" in page.title
    if target != "cpu":
        assert figure(page, "Instructions by kind").about.endswith("executed in the emulator.")


@pytest.mark.parametrize("target", ["sm_90a", "cpu"])
@pytest.mark.parametrize(
    ("top_k", "tokens", "message"),
    [
        (2, 0, r"tokens=0 must be at least 1"),
        (2, -1, r"tokens=-1 must be at least 1"),
        (2, 1.5, r"tokens=1.5 must be an integer"),
        (2, 2**30, r"tokens \* top_k=2147483648 must be at most 1073741824"),
        (0, 1, r"top_k=0 must be at least 1"),
        ("2", 1, r"top_k='2' must be an integer"),
        (5, 1, r"top_k=5 must be in 1..4, of several experts"),
    ],
)
def test_tokens_of_experts_that_are_none(top_k: Any, tokens: Any, message: str, target: str) -> None:
    with pytest.raises(lowbit.SpecError, match=message):
        lowbit.explain_experts(EXPERTS, top_k, tokens, target)


def test_rows_that_take_several_launches() -> None:
    page = lowbit.compile(SPEC, "sm_80").explain(m=100)
    assert page.about.endswith("the first of 2 launches for 100 rows") and "m = 100" in page.title


@pytest.mark.parametrize(
    ("fields", "m", "about"),
    [
        ({"compute": "i8"}, 4, "; x is quantized by a launch before"),
        ({"compute": "i8", "compute_from": 16}, 4, ""),
        ({"permuted": True}, 4, "; x is put in order by a launch before"),
    ],
    ids=str,
)
def test_launches_that_prepare_x(fields: dict[str, Any], m: int, about: str) -> None:
    page = lowbit.compile(replace(SPEC, **fields), "sm_90a").explain(m)
    assert page.about.partition("; ")[1:] == ("; " * bool(about), about.removeprefix("; "))


@pytest.mark.parametrize(
    ("n", "k", "m", "target"),
    [(4096, 1024, 16, "sm_90a"), (1024, 512, 1, "sm_90a"), (256, 1024, 16, "sm_80"), (40, 512, 1, "sm_80")],
)
def test_weights_of_a_cluster(n: int, k: int, m: int, target: str) -> None:
    """All columns of each row whose sum it writes, and of those that pad a block of 16; of a grid that empty blocks
    fill up, too."""
    spec = MatmulSpec(n, k, "u4", group_size=128)
    wanted = kernel_choices(spec, parse_target(target)).launches(m)[0]
    assert wanted.schedule.split_k == 1  # type: ignore[attr-defined]
    compiled = compile_kernel(wanted)
    seen = executed.run_one_cluster(wanted, compiled.launch, compiled.ptx, m)
    arguments = executed.arguments(wanted, compiled.launch, m)
    arguments["codes"].view(np.uint8).fill(0x11)
    arguments["scales"].view(np.float16).fill(1)
    Emulator(compiled.ptx).run(compiled.launch, arguments, blocks=[(0, 0, 0)])
    written = np.frombuffer(arguments["y"], np.float16).reshape(m, n)[0] != 0
    assert executed.weights_of_cluster(wanted, seen) == -(-written.sum() // 16) * 16 * k


@pytest.mark.parametrize("m", [1, 64])
def test_cpu(m: int) -> None:
    page = lowbit.compile(SPEC, "cpu").explain(m)
    assert [pane.name for pane in page.panes] == ["python", "lowbit", "vector", "llvm", "ll", "asm"]
    assert all(any(line.origins for line in pane.lines) for pane in page.panes)
    assert len(page.html) < 5e6


@pytest.mark.parametrize(
    ("fields", "m"),
    [
        ({"compute": "i8"}, 1),
        ({"compute": "i8"}, 200),
        ({"compute": "i8", "compute_from": 16}, 15),
        ({"compute": "i8", "compute_from": 16}, 16),
        ({"compute": "f8e4m3", "fold_scales": True}, 1),
        ({"compute": "f8e4m3", "fold_scales": True}, 200),
        ({"compute": "f8e4m3", "fold_scales": True, "weight": "nf4"}, 1),
        ({"permuted": True}, 1),
    ],
    ids=str,
)
def test_the_program_of_a_cpu_is_the_one_that_runs(
    fields: dict[str, Any], m: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page and `ir` show the last program that a call took."""
    ran: list[tuple[MatmulSpec, host_programs.Program]] = []
    take = CpuMatmul._program

    def noted(self: CpuMatmul, name: host_programs.Program) -> Loaded:
        ran.append((self.spec, name))
        return take(self, name)

    spec = replace(MatmulSpec(64, 256, "u4", group_size=64), **fields)
    mm, (x, given) = lowbit.compile(spec, "cpu"), random_inputs(spec, m)
    packed = pack(spec, **given)
    monkeypatch.setattr(CpuMatmul, "_program", noted)
    mm(x, packed)
    wanted, page = program_stages(*ran[-1]), mm.explain(m)
    assert {name: mm.ir(name, m) for name in wanted} == wanted
    shown = {pane.name: "\n".join(text_of(line.html) for line in pane.lines) for pane in page.panes}
    assert shown["lowbit"] == mm.ir("lowbit", m).rstrip() and shown["vector"] == wanted["vector"].rstrip()
    assert ("quantized to 8 bits" in page.about) == (spec.for_rows(m).compute is not None)


def test_experts_in_eight_bits_on_a_cpu() -> None:
    """As `lowbit.compile` does."""
    with pytest.raises(lowbit.SpecError, match="multiplies rows of x that are sorted by expert"):
        lowbit.explain_experts(replace(EXPERTS, compute="i8"), 2, target="cpu")


def doubled() -> Program:
    p = Program("double", 32, ("ceil(m / 1)", 1, 1), {"x": "pointer", "y": "pointer", "m": "i32"})
    with p:
        x, y = (p.global_view(p[name], "f32", (-1, 32), sizes=[p["m"]]) for name in ("x", "y"))
        tile = p.load(x, (p.block_id(0), 0), spatial(1, 32), ("none", "none"))
        p.store(tile + tile, y, (p.block_id(0), 0), ("none", "none"))
    return p


def test_a_program_of_ones_own() -> None:
    page = lowbit.explain_program(doubled, "sm_90a")
    python, lowbit_, *_ = page.panes
    added = next(line for line in python.lines if "tile + tile" in text_of(line.html))
    assert added.origins and any(set(added.origins) & set(line.origins) for line in lowbit_.lines)
    assert not any(line.note for line in python.lines)
    x, y = torch.ones(2, 32), torch.zeros(2, 32)
    ran = lowbit.explain_program(doubled, "sm_90a", x=x, y=y, m=2)
    assert any(line.note for line in ran.panes[0].lines) and torch.equal(y[0], 2 * x[0]) and not y[1].any()


def test_a_program_without_blocks() -> None:
    """A call of no rows does nothing, and the page says so."""
    page = lowbit.explain_program(doubled, "sm_90a", x=torch.ones(2, 32), y=torch.zeros(2, 32), m=0)
    assert page.about == "A tile program. The grid of these arguments has no blocks: nothing ran"
    assert values(page, "Registers, shared memory, occupancy")["grid"] == "0 x 1 x 1"
    assert not any(line.note for pane in page.panes[:-1] for line in pane.lines)
    assert "Blocks on multiprocessors" not in {each.title for each in page.figures}
    assert lowbit.explain_program(doubled, "sm_90a").about == "A tile program"


# -- the page


class _Structure(HTMLParser):
    """Ids, targets of links, and everything that would be fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.ids += [given["id"] or ""] if "id" in given else []
        self.links += [given["href"] or ""] if tag == "a" else []
        self.links += [f"#{name}" for name in (given.get("aria-labelledby") or "").split()]
        self.links += [f"#{given['data-pane']}"] if "data-pane" in given else []
        self.fetched += [str(given)] if tag in ("img", "link", "iframe") or "src" in given else []


def test_structure(page: Page) -> None:
    found = _Structure()
    found.feed(page.html)
    assert len(set(found.ids)) == len(found.ids)
    assert all(link.startswith("#") and link[1:] in found.ids for link in found.links) and len(found.links) > 8
    assert not found.fetched and "http" not in re.sub(r"<pre.*?</pre>", "", page.html.partition("<body>")[0])
    assert page.html.count('role="listbox"') == len(page.panes)


def test_small_and_soon() -> None:
    """A decode kernel: below 5 MB; and of the parts that take time, one block of the grid is emulated."""
    spec = MatmulSpec(n=4096, k=4096, weight="u4", group_size=128)
    wanted = kernel_choices(spec, parse_target("sm_90a")).launches(16)[0]
    assert len(lowbit.compile(spec, "sm_90a").explain(m=16).html.encode()) < 5e6
    kernel = lowbit.compile(spec, "sm_90a").kernel(16)
    seen = executed.run_one_cluster(wanted, kernel.launch, kernel.ptx, 16)
    assert len(seen.blocks) == seen.cluster and len(seen.events) < 5000


def test_save(page: Page, tmp_path: Path) -> None:
    page.save(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == page.html
    with pytest.raises(lowbit.SpecError, match=r"page.html can't be written \(No such file.*\); name a file"):
        page.save(tmp_path / "nowhere" / "page.html")


def test_notebooks(page: Page) -> None:
    assert page._repr_html_().startswith("<iframe title=") and 'srcdoc="&lt;!doctype html&gt;' in page._repr_html_()
    shown = lowbit.compile(SPEC, "sm_90a")._repr_html_()
    assert shown.count("<tr>") == 1 + len(lowbit.compile(SPEC, "sm_90a").choices.rows) and "u4[64, 512]" in shown
    assert "<td>1</td><td>m1</td>" in shown and "<td>2 to 8</td>" in shown
    assert "Matmul(" in lowbit.compile(SPEC, "cpu")._repr_html_()


@pytest.mark.parametrize("m", [0, -1, True, 1.5])
def test_rows_that_are_none(m: object) -> None:
    with pytest.raises(lowbit.SpecError, match="m="):
        lowbit.compile(SPEC, "sm_90a").explain(m)  # type: ignore[arg-type]


# -- in a browser

_ASKED = "panes=python,lowbit,tile,gpu,ll,ptx,sass&line=tile-3"
_PICK = """
<script>
document.querySelectorAll("#ptx li, #sass li").forEach(dress);
const texts = [...document.querySelectorAll("#ptx li")].map((line) =>
  [...line.childNodes].filter((each) => each.tagName !== "U").map((each) => each.textContent).join(""));
const colours = [...document.querySelectorAll("#ptx li i")].map((each) => [each.className, each.textContent]);
const said = [...document.querySelectorAll("#sass u")].slice(0, 9).map((each) => [each.textContent, each.title]);
const numbers = [...document.querySelectorAll("#python li")].map((each) => each.value);
const linked = document.querySelector("#tile .at").id, without = document.getElementById("llvm").hidden;
const hover = document.querySelectorAll(".grid td[title]").length;
const store = [...document.querySelectorAll("#tile li")].find((each) => each.textContent.includes("lowbit.store"));
store.click();
const counts = [...document.querySelectorAll("ol")].map((list) => list.querySelectorAll("li.on").length);
const list = document.querySelector("#ptx ol");
list.focus();
const press = (key) => list.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true, cancelable: true}));
press("Home"); press("ArrowDown");
const active = list.getAttribute("aria-activedescendant");
press("Escape");
const button = document.querySelector("button[data-o]");
button.click();
const named = document.querySelectorAll("#ptx li.on").length, wanted_ = button.dataset.o;
press("Escape");
const grid = document.querySelector("figure.grid .scroll"), gone = [];
for (const key of ["ArrowRight", "ArrowRight", "ArrowDown", "ArrowLeft"]) {
  grid.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true, cancelable: true}));
  gone.push(document.getElementById("status").textContent);
}
const bar = document.querySelector("figure.bars b");
bar.click();
const tapped = document.getElementById("status").textContent === bar.title;
const silent = [...document.querySelectorAll("[role=option]")].filter((each) =>
  !each.textContent.trim() && !each.getAttribute("aria-label")).length;
const empty = [...document.querySelectorAll("th")].filter((each) => !each.textContent.trim()).length;
document.querySelector("button[data-pane=gpu]").click();
const hidden = document.getElementById("gpu").hidden;
const overflow = document.documentElement.scrollWidth - document.documentElement.clientWidth;
const left = document.querySelectorAll("li.on").length;
const found = {linked, without, hover, counts, active, left, hidden, overflow};
Object.assign(found, {named, wanted_, gone, tapped, silent, empty, texts, colours, said, numbers});
document.body.setAttribute("data-found", JSON.stringify(found));
</script>
"""


@pytest.fixture(scope="module")
def browsed(page: Page, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The page after some clicks and keys, and what the browser has logged."""
    if CHROMIUM is None:
        pytest.skip("no Chromium here")
    folder = tmp_path_factory.mktemp("browser")
    file = folder / "page.html"
    file.write_text(page.html.replace("</body>", f"{_PICK}</body>"), encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
    options += ["--window-size=500,900", f"--user-data-dir={folder}/data"]  # as small as a phone, or nearly
    command = [CHROMIUM, *options, f"{file.as_uri()}#{_ASKED}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    yield done.stdout, done.stderr


def test_picking_a_line_in_a_browser(page: Page, browsed: tuple[str, str]) -> None:
    dom, log = browsed
    assert "CONSOLE" not in log, [line for line in log.splitlines() if "CONSOLE" in line]
    found = json.loads(unescape(re.findall(r'data-found="([^"]*)"', dom)[0]))
    (tile,) = (pane for pane in page.panes if pane.name == "tile")
    origins = set(next(line.origins for line in tile.lines if "lowbit.store" in text_of(line.html)))
    wanted = [sum(bool(origins & set(line.origins)) for line in pane.lines) for pane in page.panes if pane.lines]
    assert found["counts"] == wanted and min(wanted) > 0
    assert found["linked"] == "tile-3" and found["without"]
    assert found["hover"] == sum(len(list(each.cells)) for each in page.figures if isinstance(each, Grid))
    assert found["active"] == "ptx-1" and found["left"] == 0 and found["hidden"]
    assert found["overflow"] <= 0  # nothing but panes and pictures scrolls sideways
    assert found["named"] == sum(int(found["wanted_"]) in line.origins for line in page.panes[-2].lines) > 0
    grid = next(each for each in page.figures if isinstance(each, Grid))
    (_, (first, second, *_)) = grid.rows[0]
    below = grid.rows[1][1][:2] if len(grid.rows) > 1 else (first, first)
    moved = [below[1], below[0]] if len(grid.rows) > 1 else [second, first]
    assert found["gone"] == [cell.title for cell in (first, second, *moved)]
    assert found["tapped"] and found["silent"] == found["empty"] == 0


def test_lines_in_a_browser(page: Page, browsed: tuple[str, str]) -> None:
    """The page colours them, and says what the notes beside them are; of the text nothing is lost."""
    found = json.loads(unescape(re.findall(r'data-found="([^"]*)"', browsed[0])[0]))
    panes = {pane.name: pane for pane in page.panes}
    assert found["texts"] == [text_of(line.html) for line in panes["ptx"].lines]
    assert {kind for kind, _ in found["colours"]} == set("cvmks")
    assert ["v", "%rd1"] in found["colours"] and ["k", "mov.b32"] in found["colours"]
    if sass := panes["sass"].lines:
        assert found["said"] == [[line.note, panes["sass"].words[line.note]] for line in sass if line.note][:9]
    shown = [0]
    for given in found["numbers"]:  # 0: that behind the one in front, as a browser counts
        shown.append(given or shown[-1] + 1)
    lines = panes["python"].lines
    assert [line.number for line in lines if line.number] == [at for at, line in zip(shown[1:], lines) if line.number]


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_a_picture_of_a_page(page: Page, tmp_path: Path) -> None:
    """A PNG as large as README's."""
    page.save(tmp_path / "page.html")
    line = line_with(page, "tile", "copy_async")
    screenshot(tmp_path / "page.html", f"panes=tile&line={line}", tmp_path / "page.png", str(CHROMIUM))
    taken = (tmp_path / "page.png").read_bytes()
    kept = Path(__file__).parents[2] / "docs/img/explain.png"
    assert taken[:24] == kept.read_bytes()[:24]  # its kind, width and height
    (tile,) = (pane for pane in page.panes if pane.name == "tile")
    assert "copy_async" in tile.lines[int(line.removeprefix("tile-"))].html
