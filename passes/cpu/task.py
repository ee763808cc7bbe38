"""How host code is called: one function of one pointer, `lowbit_run(task)`, called by every thread that helps.

A task is an array of 64-bit words (`WORDS`): counters, sizes and addresses. Its work is numbered: first the pieces that
prepare the activation, one per token, then the parts of the row blocks. A thread takes the next number until none is
left, and waits once, before its first part, until all pieces are prepared. So it makes no difference how many threads
call the function, whether they begin together, or whether one comes too late to find anything: a single caller does all
the work alone. No thread ever waits for work that no thread has taken.

Where tasks run one behind the other in the same threads (`passes.cpu.layer`), a thread goes on to the next as soon as
all numbers of this one are done, whoever did them.

Nothing here loads MLIR: the runtime builds tasks without it.
"""

from __future__ import annotations

from dataclasses import dataclass

WORDS = (
    "ticket",  # the next number to take
    "done",  # numbers whose work is finished: pieces, then parts
    "workers",  # threads that have begun
    "m",  # tokens
    "parts",  # that the row blocks are cut into
    "x",
    "y",
    "scratch",
    "first_block",  # number of the first row block, by which a table of outliers is read: one of the weights of experts
)
"""The words of a task, before the addresses of `MatmulSpec.call_operands` and, in a program of scaled rows, that of the
scales of rows of x."""
ENTRY = "lowbit_run"
LINE = 64  # bytes of a cache line; scratch memory begins on one


@dataclass(frozen=True)
class Needs:
    """Memory that a program needs of its caller, and how many tokens it is good for.

    Its scratch memory holds a row for every token, and then a share for every thread.
    """

    most: int = 0
    """Tokens up to which this program is faster than the one for many."""
    panel: int = 1
    """Row blocks that are computed together: a part is best a multiple of it."""
    block: int = 1
    """The number of tokens is rounded up to a multiple of it."""
    per_token: int = 0
    """Bytes of a row of the prepared activation."""
    per_worker: int = 0
    """Bytes of a share, besides `per_worker_token` for every token."""
    per_worker_token: int = 0

    def tokens(self, m: int) -> int:
        """Rows for m tokens."""
        return -(-m // self.block) * self.block

    def nbytes(self, m: int, workers: int) -> int:
        """The size of it all."""
        tokens = self.tokens(m)
        return tokens * self.per_token + workers * (self.per_worker + tokens * self.per_worker_token)


def round_to_line(nbytes: int) -> int:
    """`nbytes` rounded up to whole cache lines, of which the number is odd: rows that lie so far apart do not
    compete for the same places of a cache."""
    lines = -(-nbytes // LINE)
    return (lines | 1) * LINE
