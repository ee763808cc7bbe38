"""`LoweringContext`: what the rules of `lower-tiles` know of one program, and what they share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lowbit.dialect.bindings import ir, scf
from lowbit.dialect.errors import PassError
from lowbit.passes.lowering.addressing import Place, ThreadIndex
from lowbit.passes.lowering.fragment import Fragment
from lowbit.passes.lowering.pending import PendingWork
from lowbit.passes.target import Target

ALIGN = 128  # bytes; of buffers in shared memory


def int_attr(op: Any, name: str) -> int:
    """The number in an attribute."""
    return int(ir.IntegerAttr(op.operation.attributes[name]).value)


def text_attr(op: Any, name: str) -> str:
    """The text in an attribute."""
    return ir.StringAttr(op.operation.attributes[name]).value


@dataclass(frozen=True)
class Feature:
    """Something that not every target has, and the first architecture with it."""

    since: str
    is_in: Callable[[Target], bool]


CLUSTERS = Feature("sm_90", lambda target: target.has_clusters)
FP8 = Feature("sm_89", lambda target: target.has_fp8)
WGMMA = Feature("sm_90a", lambda target: target.has_wgmma)


class SharedMemory:
    """Places buffers first fit, by program order: a buffer may take the place of those freed before it."""

    def __init__(self) -> None:
        self._live: dict[Any, tuple[int, int]] = {}
        self.bytes = 0

    def allocate(self, key: Any, size: int, align: int = ALIGN) -> int:
        """Returns the first byte of a new buffer."""
        size = -(-size // ALIGN) * ALIGN
        start = 0
        for low, high in sorted(self._live.values()):
            if start + size <= low:
                break
            start = max(start, -(-high // align) * align)
        self._live[key] = (start, start + size)
        self.bytes = max(self.bytes, start + size)
        return start

    def free(self, key: Any) -> None:
        """Ends the life of a buffer."""
        if key not in self._live:
            raise PassError("lower-tiles: free_shared of what is no buffer of alloc_shared, or free already")
        del self._live[key]


@dataclass
class LoweringContext:
    """The lowering of one program.

    tiles, places, scalars   what the program's values have become: registers, memory, SSA values of one thread
    threads                  digits of the thread index, of `threads_per_block`
    shared_base              pointer to the block's shared memory, which `shared` gives out
    pending                  what has been asked for and is not written down yet
    """

    target: Target
    threads: ThreadIndex
    threads_per_block: int
    shared_base: Any
    tiles: dict[Any, Fragment] = field(default_factory=dict[Any, Fragment])
    places: dict[Any, Place] = field(default_factory=dict[Any, Place])
    scalars: dict[Any, Any] = field(default_factory=dict[Any, Any])
    shared: SharedMemory = field(default_factory=SharedMemory)
    pending: PendingWork = field(default_factory=PendingWork)

    def require(self, feature: Feature, what: str) -> None:
        """Raises PassError unless the target has a feature."""
        if not feature.is_in(self.target):
            raise PassError(f"lower-tiles: {what} needs {feature.since}, the target is {self.target}")

    def thread_digit(self, size: int, divisor: int = 1) -> Any:
        """Returns (thread // divisor) % size."""
        return self.threads.digit(size, divisor, self.threads_per_block)

    def carried(self, value: Any) -> Any:
        """Returns what a value that a loop can carry has become: a tile or a scalar."""
        return self.tiles[value] if value in self.tiles else self.scalars[value]

    def offsets(self, op: Any) -> list[Any]:
        """Returns the operands `offsets` of an access."""
        return [self.scalars[v] for v in op.offsets]


def when(condition: Any | None, action: Callable[[], Any]) -> None:
    """Writes what `action` writes under a condition; None: without one."""
    if condition is None:
        action()
        return
    branch = scf.IfOp(condition)
    with ir.InsertionPoint(branch.then_block):
        action()
        scf.YieldOp([])


def either(
    condition: Any, types: Sequence[Any], then: Callable[[], Sequence[Any]], otherwise: Callable[[], Sequence[Any]]
) -> list[Any]:
    """Returns values of these types: what `then` gives under a condition, or else what `otherwise` gives."""
    branch = scf.IfOp(condition, list(types), has_else=True)
    with ir.InsertionPoint(branch.then_block):
        scf.YieldOp(list(then()))
    with ir.InsertionPoint(branch.else_block):
        scf.YieldOp(list(otherwise()))
    return list(branch.results)
