"""Codes that somebody wrote to: a low-bit layer notices before it multiplies by them.

Any bits are codes, so arithmetic on them leaves another weight that nothing else would find: `AveragedModel` of torch
averages buffers in place, as do other moving averages. torch counts how often a tensor was written to. A layer notes
the count and the sum of its codes, and where the count has changed, compares the sum: processes that send each other
equal buffers write, too.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lowbit.dialect.errors import PackError

WRITTEN = (
    "the codes of a low-bit layer were written to after they were packed, as averages of buffers do; codes can't be "
    "computed with. Average parameters alone (AveragedModel(use_buffers=False)), or dense models, and quantize the "
    "result; after copying another layer's tensors into this one, call check()"
)


class Noted(NamedTuple):
    """Codes as they were.

    codes     the tensor
    version   how often it had been written to; -1: it may have been since, which its sum tells
    total     the sum of its words, on its device
    """

    codes: Tensor
    version: int
    total: Tensor

    @staticmethod
    def of(codes: Tensor) -> Noted | None:
        """Returns a note of codes; None for those without values."""
        return None if codes.is_meta else Noted(codes, _version(codes), _total(codes))

    def moved(self, codes: Tensor) -> Noted | None:
        """Returns the note for the same codes in another place."""
        return None if codes.is_meta else Noted(codes, -1, self.total.to(codes.device))

    def checked(self) -> Noted:
        """Returns the note for the codes as they are. Raises PackError if they have changed."""
        if self.version == (version := _version(self.codes)):
            return self
        if not torch.equal(_total(self.codes), self.total):
            raise PackError(WRITTEN)
        return self._replace(version=version)


def noted(codes: Tensor, last: Noted | None) -> Noted | None:
    """Returns the note for codes: the last one if it is of this tensor, after a look at it. Raises PackError."""
    return last.checked() if last is not None and last.codes is codes else Noted.of(codes)


def _version(codes: Tensor) -> int:
    return 0 if codes.is_inference() else codes._version  # torch counts for tensors outside of inference mode alone


def _total(codes: Tensor) -> Tensor:
    return codes.detach().sum(dtype=torch.int64)
