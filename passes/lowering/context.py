"""What the rules of `lower-tiles` share: the values so far, shared memory, and when loads have to be finished."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lowbit.dialect.bindings import ir, scf
from lowbit.dialect.errors import PassError
from lowbit.passes.lowering.addressing import ThreadIndex
from lowbit.passes.lowering.fragment import Fragment
from lowbit.passes.lowering.wgmma import Products, RowSums
from lowbit.passes.target import Target

ALIGN = 128  # bytes; of buffers in shared memory


def int_attr(op: Any, name: str) -> int:
    return int(ir.IntegerAttr(op.operation.attributes[name]).value)


def text_attr(op: Any, name: str) -> str:
    return ir.StringAttr(op.operation.attributes[name]).value


class SharedMemory:
    """First fit, by program order: a buffer may take the place of those freed before it."""

    def __init__(self) -> None:
        self._live: dict[Any, tuple[int, int]] = {}
        self.bytes = 0

    def allocate(self, key: Any, size: int, align: int = ALIGN) -> int:
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
        if key not in self._live:
            raise PassError("lower-tiles: free_shared of what is no buffer of alloc_shared, or free already")
        del self._live[key]


class Lowering:
    """The state of one program's lowering; set up by `passes.lowering.lower_tiles`."""

    shared_base: Any  # pointer to the block's shared memory
    threads: ThreadIndex
    threads_per_block: int

    def __init__(self, program: Any, target: Target) -> None:
        self.program = program
        self.target = target
        self.values: dict[Any, Any] = {}  # SSA value of the program -> SSA value, Fragment or Place
        self.reads: list[Fragment] = []  # fragments whose registers are loads
        self.row_sums: RowSums | None = None  # of the last wgmma with ones
        self.sum: Fragment | None = None  # of the last wgmma, with what was done to it since
        self.last_started: Products | None = None  # the last that overlap with the next
        self.shared = SharedMemory()

    def _require(self, there: bool, what: str, since: str) -> None:
        if not there:
            raise PassError(f"lower-tiles: {what} needs {since}, the target is {self.target}")

    def _finish_reads(self) -> None:
        """Write down all loads: memory may change after this point."""
        for fragment in self.reads:
            fragment.force()
        self.reads.clear()

    def _finish_sums(self) -> None:
        """Write down what becomes of the last wgmma's accumulators: they need not live beside the next one's."""
        if self.sum is not None:
            self.sum.force()
        self.sum = None

    def _begin_product(self) -> None:
        """Write down the first instructions of the last wgmma; from then on its accumulators are taken."""
        if isinstance(self.sum, Products):
            self.sum.write_first()

    def _when(self, condition: Any | None, action: Callable[[], Any]) -> None:
        if condition is None:
            action()
            return
        branch = scf.IfOp(condition)
        with ir.InsertionPoint(branch.then_block):
            action()
            scf.YieldOp([])
