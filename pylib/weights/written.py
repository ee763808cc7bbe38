"""Codes that somebody wrote to: a low-bit layer notices before it multiplies by them.

Any bits are codes, so arithmetic on them leaves another weight that nothing else would find: `AveragedModel` of torch
averages buffers in place, as do other moving averages. torch counts how often a tensor was written to. A layer notes
the count and the sum of its codes, and where the count has changed, compares the sum: processes that send each other
equal buffers write, too. Notes are found by their codes, as the operators of a graph see tensors alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from lowbit.dialect.errors import PackError
from lowbit.pylib.weights.tensor_checks import is_plain

WRITTEN = (
    "the codes of a low-bit layer were written to after they were packed, as averages of buffers do; codes can't be "
    "computed with. Average parameters alone (AveragedModel(use_buffers=False)), or dense models, and quantize the "
    "result; after copying another layer's tensors into this one, call check()"
)


_notes = WeakTensorKeyDictionary()  # codes of layers -> Note


@dataclass
class Note:
    """A note of codes as they were, to see whether anything was written to them.

    version   how often they had been written to; -1: they may have been since, which their sum tells
    total     the sum of their words, on their device
    """

    version: int
    total: Tensor

    def check(self, codes: Tensor) -> None:
        """Raises PackError if the codes have changed."""
        if self.version == (version := _version(codes)):
            return
        if not torch.equal(_total(codes), self.total):
            raise PackError(WRITTEN)
        self.version = version


def note(codes: Tensor) -> Note | None:
    """Notes codes as they are; does nothing for those without values, which torch traces with."""
    if codes.is_meta or not is_plain(codes):
        return None
    made = _notes[codes] = Note(_version(codes), _total(codes))
    return made


def noted(codes: Tensor) -> Note | None:
    """Returns the note of codes, and makes one if there is none."""
    return _notes.get(codes) or note(codes)


def note_again(codes: Tensor) -> None:
    """Notes codes of a layer as they are now, after new ones were written; does nothing for other tensors."""
    if last := _notes.get(codes):
        last.version, last.total = _version(codes), _total(codes)


def note_moved(codes: Tensor, last: Note) -> Note | None:
    """Notes that these are the codes of another note in another place."""
    if codes.is_meta:
        return None
    made = _notes[codes] = Note(-1, last.total.to(codes.device))
    return made


def check_operand(codes: Tensor) -> None:
    """Raises PackError for codes of a layer that have changed; other tensors are not looked at."""
    if last := _notes.get(codes):
        last.check(codes)


def _version(codes: Tensor) -> int:
    return 0 if codes.is_inference() else codes._version  # torch counts for tensors outside of inference mode alone


def _total(codes: Tensor) -> Tensor:
    return codes.detach().sum(dtype=torch.int64)
