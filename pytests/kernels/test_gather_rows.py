"""The kernel that writes a row of x for each slot, in the emulator: what torch's index_select gives."""

from __future__ import annotations

import pytest
import torch

from lowbit.passes.builder import Program
from lowbit.pylib.experts.by_kernel import gather_by_kernel

TARGET = "emulator:sm_90a"


@pytest.mark.parametrize("k", [8, 72, 2048, 2056])
@pytest.mark.parametrize("slots", [1, 5, 64])
def test_rows_of_any_width(k: int, slots: int) -> None:
    """A width that threads share evenly, and others; slots that fill a block, and fewer."""
    x, rows = torch.randn(7, k).bfloat16(), torch.randint(7, (slots,)).int()
    assert torch.equal(gather_by_kernel(x, rows, TARGET), x[rows.long()])


def test_bytes() -> None:
    x, rows = torch.randint(256, (5, 48), dtype=torch.uint8), torch.tensor([4, 0, 0, 3], dtype=torch.int32)
    found = gather_by_kernel(x.view(torch.float8_e4m3fn), rows, TARGET)
    assert found.dtype is torch.float8_e4m3fn and torch.equal(found.view(torch.uint8), x[rows.long()])


def test_no_slots() -> None:
    assert gather_by_kernel(torch.randn(5, 64).half(), torch.empty(0, dtype=torch.int32), TARGET).shape == (0, 64)


def test_mutations_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row of another slot, for rows that no other test has compiled the kernel for."""
    read = Program.read_index
    monkeypatch.setattr(Program, "read_index", lambda p, rows, offsets: read(p, rows, (offsets[0] * 0,)))
    x, rows = torch.randn(7, 136).half(), torch.tensor([2, 5, 1], dtype=torch.int32)
    assert not torch.equal(gather_by_kernel(x, rows, TARGET), x[rows.long()])
