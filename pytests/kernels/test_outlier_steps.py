"""Outliers that are multiplied step by step, with the activations that a step has in shared memory."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from emulated import HOPPER, decodes_right
from torch import Tensor

from lowbit.dialect.errors import EmulatorError, SpecError
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.builder import Program
from lowbit.passes.kernels.decode.schedule import Schedule
from lowbit.passes.kernels.streaming.legality import check_schedule
from lowbit.passes.kernels.streaming.plan import KernelPlan
from lowbit.pylib import reference
from lowbit.pylib.weights import outliers
from lowbit.pylib.weights.packed import pack

SPEC = MatmulSpec(40, 1024, "u3", 16, zeros="float", outliers=True, out="f32")  # row blocks of 16, 16 and 8 rows
SCHEDULE = Schedule(16, 1, 4, 2, 256, 2, wgmma=True, outliers_by_step=True)  # steps of 256 columns


def places(kind: str) -> Tensor:
    """Where the outliers are: a mask like the weight."""
    row, column = torch.meshgrid(torch.arange(SPEC.n), torch.arange(SPEC.k), indexing="ij")
    there = {
        "one in each column": row == column * 7 % SPEC.n,
        "ends of steps": (column % 256 == 0) | (column % 256 == 255),  # a line ends within a column
        "a full row": row == 17,
        "one step": (column >= 512) & (column < 530),  # ten lines of a step, and none of the others
        "everywhere": row >= 0,  # 529 lines of a row block: more than lanes have the first columns of
        "last row block": (row >= 32) & (column % 5 == 0),
        "the last": (row == SPEC.n - 1) & (column == SPEC.k - 1),
    }
    return there[kind]


def given(spec: MatmulSpec, tokens: int, there: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Activations and a weight with outliers in some places, no two of which are alike for any token."""
    x, tensors = reference.random_inputs(spec, tokens)
    values = torch.rand(there.shape, generator=torch.Generator().manual_seed(2)) + 1
    return x, tensors | {"outliers": (values.half().float() * there).to_sparse_csr()}


@pytest.mark.parametrize("tokens", [1, 8, 13, 16])
def test_numbers_of_tokens(tokens: int) -> None:
    assert decodes_right(SPEC, SCHEDULE, given(SPEC, tokens, places("one in each column")))


@pytest.mark.parametrize("act", ["f16", "bf16"])
@pytest.mark.parametrize(
    "kind",
    ["one in each column", "ends of steps", "a full row", "one step", "everywhere", "last row block", "the last"],
)
def test_outliers_anywhere_in_lines(kind: str, act: Any) -> None:
    spec = replace(SPEC, act=act)
    assert decodes_right(spec, SCHEDULE, given(spec, 5, places(kind)))


@pytest.mark.parametrize(
    "schedule",
    [
        replace(SCHEDULE, tokens=8, row_blocks=2, warps_k=1),
        replace(SCHEDULE, tokens=8, num_stages=1, split_k=2, cluster=2),
        replace(SCHEDULE, num_stages=3, warps_k=1, split_k=2),
        replace(SCHEDULE, warps_n=8, refill="after_first_mma"),
        replace(SCHEDULE, tokens=64, warps_k=1),
    ],
    ids=["two row blocks", "cluster", "splits", "eight warps", "64 tokens"],
)
def test_every_way_to_split_the_work(schedule: Schedule) -> None:
    assert decodes_right(SPEC, schedule, given(SPEC, schedule.tokens - 1, places("one in each column")))


@pytest.mark.parametrize(
    "spec",
    [
        MatmulSpec.preset("spqr", 40, 1024, permuted=False, out="f32"),
        MatmulSpec(40, 1000, "u4", None, outliers=True, out="f32"),  # a step beyond k
        MatmulSpec(40, 1024, "i4", 32, scale="e4m3", row_scales=True, outliers=True, out="f32"),
        MatmulSpec(40, 1024, "nf4", 128, outliers=True, out="f32"),
    ],
    ids=["spqr", "rows", "row scales", "table"],
)
def test_formats(spec: MatmulSpec) -> None:
    assert decodes_right(spec, SCHEDULE, given(spec, 3, places("one in each column")[:, : spec.k]))


def test_more_lines_than_lanes_have() -> None:
    """What `test_outliers_anywhere_in_lines` is about: every way that a kernel has to come to a line."""
    plan = KernelPlan(SPEC, SCHEDULE).outliers
    lines = {kind: _lines(kind) for kind in ("one in each column", "one step", "everywhere")}
    assert lines["one in each column"] < 32 * plan.indexed_lines < lines["everywhere"]
    assert plan.step_lines < lines["one step"]


def _lines(kind: str) -> int:
    """Lines of the first row block."""
    packed = pack(SPEC, **given(SPEC, 1, places(kind))[1])
    return int(packed["outliers"].view(-1)[:2].diff())


WITHOUT: dict[str, Any] = {
    "sparse_step": lambda self, table, index, lines, x, column, total: total,
    "copy_lines": lambda self, table, index, lines, column, columns: None,
    "transpose": lambda self, source, target, rows: None,
}


@pytest.mark.parametrize("operation", WITHOUT)
def test_a_part_left_out(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Program, operation, WITHOUT[operation])
    with suppress(EmulatorError):  # shared memory that was never written
        assert not decodes_right(SPEC, SCHEDULE, given(SPEC, 3, places("one in each column")))


def test_weights_without_outliers_are_refused() -> None:
    with pytest.raises(SpecError, match="outliers_by_step=True is for weights with outliers"):
        check_schedule(replace(SPEC, outliers=False), SCHEDULE, HOPPER)


def test_copies_of_few_rounds_at_a_time() -> None:
    schedule = replace(SCHEDULE, num_stages=4, prefetch_limit=1, warps_k=1)
    assert decodes_right(SPEC, schedule, given(SPEC, 2, places("one in each column")))


def test_lines_are_drawn_alike() -> None:
    """One outlier in a hundred weights, as SpQR has them, of several row blocks and steps."""
    spec = replace(SPEC, n=200, k=4096)
    x, tensors = reference.random_inputs(spec, 16)
    tensors["outliers"] = outliers.draw(spec.n, spec.k, 0.01, torch.Generator().manual_seed(1))
    assert decodes_right(spec, SCHEDULE, (x, tensors))
