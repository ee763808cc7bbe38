"""pipeline-copies: loops that copy, wait and compute keep several rounds of copies under way.

A loop marked `lowbit.num_stages = S` has the form

    { copies, commit, wait 0, barrier, compute, barrier }

Its buffers get S stages, the copies of round i+S-1 are started while round i computes, and one barrier a round is
left: it tells that round i has arrived, and that everybody is done with round i-1, whose stage is filled next. A loop
of fewer rounds than S has a stage for each of them, and starts all copies in front.

`lowbit.grid_wait` among the copies divides them into those that may start before the previous kernel has ended
(weights) and those that may not; in front of the loop, all of the first come before the wait. In between, where there
is nothing to do but wait, tables are filled (`lowbit.fill_table`), once. With `lowbit.prefetch_limit = T` no more than
T rounds of the first are under way at a time, so that the kernel before need not queue behind them for its activations.

With `lowbit.refill = "after_first_mma"` a round starts the copies of round i+S-1 not in front of what it computes but
once its first product by wgmma is under way: with wide tiles of activations a warp takes long to ask for its copies,
and the tensor core need not wait for that. Marked `lowbit.beside_mma`, they do not end the product (`lower-tiles`).

With `lowbit.refill = "per_warp"` there is no barrier in a round either, so some warps decode while others multiply.
Instead every stage has two signals (`passes.transforms.stage_signals`): that all copies into it have arrived, for which
a warp waits before it reads it, and that all warps have read it, for which a warp waits before it fills it again: a
round later, behind its own first product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from lowbit.dialect import ops
from lowbit.dialect.bindings import arith, ir, scf
from lowbit.dialect.checks import in_range
from lowbit.dialect.errors import PassError
from lowbit.dialect.types import Shared
from lowbit.passes.base import at, each_op
from lowbit.passes.lowering import emit
from lowbit.passes.lowering.addressing import known
from lowbit.passes.transforms.stage_signals import Signals

STAGES, PREFETCH, REFILL = "lowbit.num_stages", "lowbit.prefetch_limit", "lowbit.refill"
_COPIES = ("lowbit.copy_async", "lowbit.copy_padded")


@dataclass(frozen=True)
class PipelineCopies:
    """Software-pipeline the copies of loops marked lowbit.num_stages: several buffers, one barrier a round."""

    name: ClassVar[str] = "pipeline-copies"

    def run(self, module: ir.Module) -> None:
        for loop in each_op(module, scf.ForOp):
            if STAGES not in loop.operation.attributes:
                continue
            with at(loop):
                attributes = loop.operation.attributes
                stages = in_range(attributes[STAGES], STAGES, 1)
                limit = in_range(attributes[PREFETCH], PREFETCH, 1) if PREFETCH in attributes else stages
                refill = ir.StringAttr(attributes[REFILL]).value if REFILL in attributes else "before_mma"
                if stages > 1:
                    _Pipeline(loop, stages, limit, refill).run()
                else:
                    _move_before(loop, _fills(loop))
                    for name in (STAGES, PREFETCH, REFILL):
                        if name in attributes:
                            del attributes[name]


def _fills(loop: Any) -> list[Any]:
    """What a loop does in every round alike, so that once is enough."""
    return [op for op in loop.body.operations if op.operation.name == "lowbit.fill_table"]


def _move_before(loop: Any, body: Sequence[Any]) -> None:
    for op in body:
        op.operation.move_before(loop.operation)


class _Pipeline:
    """Rewrites one loop."""

    def __init__(self, loop: Any, stages: int, prefetch_limit: int, refill: str) -> None:
        self.loop = loop
        self.upper = loop.operation.operands[1]
        self.sure = self._rounds(loop.operation.operands[0])
        most = self.sure or stages
        self.ahead, self.slots = min(stages - 1, most), min(stages, most)
        self.refills = self.ahead != self.sure
        self.fills = _fills(loop)
        self.body = [op for op in loop.body.operations if op not in self.fills]
        names = [op.operation.name for op in self.body]
        expected = ["lowbit.commit", "lowbit.wait", "lowbit.barrier"]
        commit = names.index("lowbit.commit") if "lowbit.commit" in names else -1
        if names[commit : commit + 3] != expected or names[-2] != "lowbit.barrier":
            raise PassError(
                "pipeline-copies: a loop with lowbit.num_stages is "
                "{ copies, commit, wait, barrier, compute, barrier }; "
                f"got {[n for n in names if n.startswith('lowbit.')]}"
            )
        if known(loop.operation.operands[2]) != 1:
            raise PassError("pipeline-copies: a loop with lowbit.num_stages must count in steps of the constant 1")
        self.produce, self.compute = self.body[:commit], self.body[commit + 3 : -2]
        self.scope = self.body[commit + 2]
        products = [i for i, op in enumerate(self.compute) if op.operation.name == "lowbit.warpgroup_mma"]
        self.refill_at = products[0] + 1 if refill != "before_mma" and products else 0  # operation of `compute`
        self.cut = names[:commit].index("lowbit.grid_wait") if "lowbit.grid_wait" in names[:commit] else commit
        self.prefetch_limit = prefetch_limit if self.cut < commit else stages
        self.buffers = self._widen_buffers()
        self.signals = Signals(loop, self.scope, self.slots) if refill == "per_warp" and self.refill_at > 0 else None

    def _widen_buffers(self) -> dict[Any, Any]:
        """Buffers that the loop fills, replaced by ones with a leading dim of stages."""
        result: dict[Any, Any] = {}
        for op in self.produce:
            if op.operation.name not in _COPIES or op.target in result:
                continue
            if isinstance(op.target.owner, ir.Block) or op.target.owner.name != "lowbit.alloc_shared":
                raise PassError(f"pipeline-copies: {op.operation.name} must fill a buffer of lowbit.alloc_shared")
            buffer = op.target.owner.opview
            one = Shared.of(op.target.type)
            size = one.strides[0] * one.shape[0]
            wide = Shared(one.element, (self.slots, *one.shape), (size, *one.strides), one.swizzle)
            with ir.InsertionPoint(buffer), buffer.location:
                result[op.target] = ops.AllocSharedOp(wide.type).result
        return result

    def _clone(self, body: Sequence[Any], mapping: dict[Any, Any]) -> None:
        """Copy operations, with operands replaced; `mapping` grows by their results."""
        for op in body:
            clone = op.operation.clone()
            for i, operand in enumerate(op.operation.operands):
                clone.operands[i] = mapping.get(operand, operand)
            mapping.update(zip(op.operation.results, clone.results))

    def _staged(self, slot: Any, index: Any) -> dict[Any, Any]:
        """What a round's operations see: its index, and its stage of every buffer."""
        mapping: dict[Any, Any] = {self.loop.induction_variable: index}
        for narrow, wide in self.buffers.items():
            mapping[narrow] = ops.StageOp(wide, slot, narrow.type).result
        return mapping

    def _if(self, condition: Any, action: Callable[[], None], beside_mma: bool = False) -> None:
        branch = scf.IfOp(condition)
        if beside_mma:
            branch.operation.attributes["lowbit.beside_mma"] = ir.UnitAttr.get()
        with ir.InsertionPoint(branch.then_block):
            action()
            scf.YieldOp([])

    def _before(self, index: Any) -> Any:
        return arith.cmpi(arith.CmpIPredicate.slt, index, self.upper)

    def _rounds(self, lower: Any) -> int:
        """How many are sure to come: all where the bounds are constants, or lower and lower + constant; else none."""
        first, end = known(lower), known(self.upper)
        if first is not None and end is not None:
            return max(end - first, 0)
        owner: Any = self.upper.owner
        if isinstance(owner, ir.Block) or owner.name != "arith.addi" or owner.operands[0] != lower:
            return 0
        return max(known(owner.operands[1]) or 0, 0)

    def run(self) -> None:
        lower, _, _, *initial = self.loop.operation.operands
        with ir.InsertionPoint(self.loop):
            self._prologue(lower)
            new = scf.ForOp(lower, self.upper, emit.constant(1), initial)
        index = new.induction_variable
        with ir.InsertionPoint(new.body):
            if not self.signals:
                self._wait(self.ahead)
                self._clone([self.scope], {})
            done = arith.subi(index, lower)
            if self.signals:
                self.signals.wait_full(done)
            if self.refill_at == 0:
                self._refill(index, done)
            mapping = self._staged(arith.remui(done, emit.constant(self.slots)), index)
            # The body may use values that were computed for its copies.
            mapping.update(zip(self.loop.inner_iter_args, new.inner_iter_args))
            scalars = [op for op in self.produce if op.operation.name.startswith("arith.")]
            self._clone([*scalars, *self.compute[: self.refill_at]], mapping)
            if self.refill_at > 0:
                self._refill(index, done)
            self._clone(self.compute[self.refill_at :], mapping)
            if self.signals:
                self.signals.has_read(done)
            self._clone(self.body[-1:], mapping)
        for old, result in zip(self.loop.operation.results, new.operation.results):
            old.replace_all_uses_with(result)
        self.loop.operation.erase()
        for narrow, wide in self.buffers.items():
            narrow.replace_all_uses_with(wide)  # free_shared
            narrow.owner.erase()

    def _wait(self, rounds: int) -> None:
        """Until one round less is under way."""
        ops.WaitOp(ir.IntegerAttr.get(emit.integer(64), rounds - 1))

    def _refill(self, index: Any, done: Any) -> None:
        """Start the copies of the round that is `ahead` of this one, if there is one."""

        def refill() -> None:
            coming = arith.addi(done, ahead)
            slot = arith.remui(coming, emit.constant(self.slots))
            if self.signals:
                self.signals.wait_read(coming)
            copies = [op for op in self.produce if op.operation.name != "lowbit.grid_wait"]
            self._clone(copies, self._staged(slot, arith.addi(index, ahead)))
            if self.signals:
                self.signals.has_copied(slot)

        if self.refills:
            ahead = emit.constant(self.ahead)
            self._if(self._before(arith.addi(index, ahead)), refill, beside_mma=self.refill_at > 0)
        ops.CommitOp()  # of nothing, if need be: waiting counts rounds

    def _prologue(self, lower: Any) -> None:
        """Start the first rounds: what needs no wait for all of them, then the rest, round by round."""
        rounds = [arith.addi(lower, emit.constant(i)) if i else lower for i in range(self.ahead)]
        scalars = [op for op in self.produce if op.operation.name.startswith("arith.")]
        after_wait = [op for op in self.produce[self.cut + 1 :] if op not in scalars]

        def start(body: Sequence[Any], slot: int, index: Any, last: bool = False) -> None:
            def copies() -> None:
                self._clone(body, self._staged(emit.constant(slot), index))
                if self.signals and last:
                    self.signals.has_copied(emit.constant(slot))

            self._if(self._before(index), copies) if slot >= self.sure else copies()

        for slot, index in enumerate(rounds):
            if slot >= self.prefetch_limit:
                self._wait(self.prefetch_limit)
            start(self.produce[: self.cut], slot, index)
            if self.prefetch_limit < self.ahead:
                ops.CommitOp()
        _move_before(self.loop, self.fills)
        if self.cut < len(self.produce):
            ops.GridWaitOp()
        for slot, index in enumerate(rounds):
            if after_wait or self.signals:
                start([*scalars, *after_wait], slot, index, last=True)
            ops.CommitOp()
