"""The signals of a pipelined loop without a barrier per round (`pipeline-copies`): two for each stage of its buffers,
that all copies into it have arrived, and that all warps have read it.

A signal is an mbarrier, and goes through a phase every time its stage is filled. Whoever waits names the parity of the
phase. Warps share signals that would meet at the loop's barrier.
"""

from __future__ import annotations

from typing import Any

from lowbit.dialect import ops
from lowbit.dialect.bindings import arith, ir
from lowbit.dialect.checks import in_range
from lowbit.dialect.types import Shared
from lowbit.passes.base import enclosing
from lowbit.passes.lowering import emit


class Signals:
    """The mbarriers of one loop, allocated where its program begins, so that buffers behind can be freed together."""

    def __init__(self, pipeline: Any, stages: int) -> None:
        self.stages = stages
        program, number, groups = enclosing(pipeline, "lowbit.program"), 2 * stages, 1
        if ir.StringAttr(pipeline.scope).value == "warps":
            threads = in_range(program.attributes["threads"], "threads", 32)
            groups = threads // (32 * in_range(pipeline.warps, "warps", 1))
        kind = Shared("i32", (groups, number, 2), (2 * number, 2, 1), 0)
        with ir.InsertionPoint.at_block_begin(program.regions[0].blocks[0]), pipeline.location:
            self._signals = ops.AllocSignalsOp(kind.type).result

    def wait_full(self, round: Any) -> None:
        """Until a round's copies are there."""
        use, stage = self._use(round)
        op = ops.AwaitOp(self._signals, stage, _parity(use))
        op.async_proxy = True

    def has_copied(self, stage: Any) -> None:
        """All that this thread has started to copy belongs to this stage or to ones before."""
        op = ops.ArriveOp(self._signals, stage)
        op.copies = True

    def wait_read(self, round: Any) -> None:
        """Until the stage of a round can be filled: at once if it never was, which is parity 1."""
        use, stage = self._use(round)
        again = arith.addi(use, emit.constant(1))
        ops.AwaitOp(self._signals, self._of_reading(stage), _parity(again))

    def has_read(self, round: Any) -> None:
        """This thread has nothing more to read of a round."""
        _, stage = self._use(round)
        ops.ArriveOp(self._signals, self._of_reading(stage))

    def _use(self, round: Any) -> tuple[Any, Any]:
        """How often the stage of a round was filled before, and which it is."""
        stages = emit.constant(self.stages)
        return arith.divui(round, stages), arith.remui(round, stages)

    def _of_reading(self, stage: Any) -> Any:
        return arith.addi(stage, emit.constant(self.stages))


def _parity(use: Any) -> Any:
    return arith.remui(use, emit.constant(2))
