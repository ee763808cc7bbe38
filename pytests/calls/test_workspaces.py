"""The memory that kernels share for their sums: who gets which. It is on the CPU here; `test_gpu.py` uses it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lowbit.passes.launch import COUNTERS
from lowbit.pylib.runtime import workspaces
from lowbit.pylib.runtime.workspaces import workspace


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    zeros = torch.zeros
    monkeypatch.setattr(workspaces, "_buffers", {})
    monkeypatch.setattr(torch, "zeros", lambda *a, device, **choices: zeros(*a, **choices))
    yield


def test_kernels_share_it() -> None:
    """Any kernel on a stream; one that needs more gets another, which serves those that need less as well."""
    first = workspace(0, 5, 100)
    assert len(first) == 4 * COUNTERS and not first.any()
    assert workspace(0, 5, 4 * COUNTERS) is first
    more = workspace(0, 5, 4 * COUNTERS + 8)
    assert more is not first and len(more) == 4 * COUNTERS + 8
    assert workspace(0, 5, 100) is more


@pytest.mark.parametrize("other", [(1, 5, 100, 0), (0, 6, 100, 0), (0, 5, 100, 3)], ids=["device", "stream", "graph"])
def test_others_have_their_own(other: Any) -> None:
    ours, theirs = workspace(0, 5, 100), workspace(*other)
    assert theirs is not ours and workspace(*other) is theirs and workspace(0, 5, 100) is ours


def test_each_graph_has_its_own() -> None:
    first, second = workspace(0, 5, 100, graph=3), workspace(0, 5, 100, graph=4)
    assert first is not second and workspace(0, 5, 100, graph=4) is second
