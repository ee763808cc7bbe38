"""The permute family: brings the columns of x into the order of a weight whose columns are permuted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from lowbit.dialect.errors import SpecError
from lowbit.dialect.spec import Act, MatmulSpec
from lowbit.passes.kernels.base import KernelFamily, Operation
from lowbit.passes.kernels.permute.schedule import PermuteSchedule, piece_columns
from lowbit.passes.target import Target

if TYPE_CHECKING:
    from lowbit.dialect.bindings import ir

FEW_ROWS = 256
"""Up to so many rows of x, several blocks share a row; with more, a block has several rows."""

_MOST_THREADS = 1024  # of a block
_MOST_REGISTERS = 96  # of a thread, for numbers of x and for columns of the permutation
_MOST_LOADS = 64  # of these, for numbers of x
_MOST_ROWS = 4  # of a block
_MOST_PIECES = 64  # of a thread in a row, and rows of a block, whatever a user asks for
_MOST_PARTS = 4  # of a row, if each thread can hold its columns of the permutation


def permute_spec(k: int, act: Act) -> MatmulSpec:
    """The spec that stands for the permutation of k columns: it is the same whatever the weight is."""
    return MatmulSpec(1, k, "u4", act=act, permuted=True)


def default_schedule(spec: MatmulSpec, tokens: int, target: Target) -> PermuteSchedule:
    """Returns the schedule for up to FEW_ROWS rows of x, or for more.

    Few rows are cut into four parts, so that one token keeps four multiprocessors busy. With many, a block has as many
    rows, up to four, as leave room for a second block on its multiprocessor. A row is staged if it fits in shared
    memory, and if a thread can hold its part of it while it is on its way there.
    """
    columns = piece_columns(spec)
    pieces = spec.k // columns
    threads = 512 if pieces > 1024 else min(256, 32 * -(-pieces // 32))
    rounds = -(-pieces // threads)
    loads = rounds * max(1, columns // 2)  # registers of a row in a thread
    if spec.k * spec.x.bytes > target.max_shared_per_block or loads > _MOST_LOADS:
        return PermuteSchedule(256, 1, spec.x.per_vector // columns, staged=False)
    rows = 1
    if tokens > FEW_ROWS:
        fitting = (r for r in (_MOST_ROWS, 2) if r * loads <= _MOST_LOADS and _leaves_room(spec, r, target))
        rows = next(fitting, 1)
    free = (_MOST_REGISTERS - rows * loads) // columns  # pieces whose columns a thread can hold
    parts = max(-(-rounds // free), min(rounds, _MOST_PARTS) if tokens <= FEW_ROWS else 1)
    return PermuteSchedule(threads, rows, -(-rounds // parts))


def _leaves_room(spec: MatmulSpec, rows: int, target: Target) -> bool:
    """Tells whether two blocks with so many rows fit on a multiprocessor."""
    return 2 * (rows * spec.k * spec.x.bytes + 1024) <= target.shared_per_sm


class Permute(KernelFamily[PermuteSchedule]):
    """x[:, permutation]."""

    name: ClassVar[str] = "permute"
    operation: ClassVar[Operation] = "permute"
    schedule_type = PermuteSchedule

    def candidates(self, spec: MatmulSpec, token_tile: int, target: Target) -> Sequence[PermuteSchedule]:
        return [default_schedule(spec, token_tile, target)]

    def check(self, spec: MatmulSpec, schedule: PermuteSchedule, target: Target) -> None:
        threads, rows, staged = schedule.threads, schedule.rows, schedule.staged
        if threads < 32 or threads % 32 or threads > _MOST_THREADS:
            raise SpecError(f"schedule: threads={threads} must be a multiple of 32 from 32 to {_MOST_THREADS}")
        if not 1 <= schedule.pieces <= _MOST_PIECES:
            raise SpecError(f"schedule: pieces={schedule.pieces} must be in 1..{_MOST_PIECES}")
        if not 1 <= rows <= (_MOST_PIECES if staged else 1):
            allowed = f"in 1..{_MOST_PIECES}" if staged else "1 with staged=False"
            raise SpecError(f"schedule: rows={rows} must be {allowed}")
        most = target.max_shared_per_block
        if staged and (size := rows * spec.k * spec.x.bytes) > most:
            raise SpecError(
                f"schedule: {rows} rows of k={spec.k} take {size} bytes of shared memory, {target} has {most}; "
                f"use {'fewer rows' if rows > 1 else 'staged=False'}"
            )

    def build(self, spec: MatmulSpec, schedule: PermuteSchedule) -> ir.Module:
        from lowbit.passes.kernels.permute.kernel import permute

        return permute(spec, schedule)
