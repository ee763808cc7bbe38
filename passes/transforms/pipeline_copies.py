"""pipeline-copies: a loop with a `lowbit.pipeline` keeps several rounds of copies under way.

With one stage, a round is { copies, commit, wait 0, barrier, compute, barrier }.

With S stages every buffer gets S of them, the copies of round i+S-1 are started while round i computes, and one barrier
a round is left: it tells that round i has arrived, and that everybody is done with round i-1, whose stage is filled
next. A loop of fewer rounds than S has a stage for each of them, and starts all copies in front.

`lowbit.grid_wait` among the copies divides them into those that may start before the previous kernel has ended
(weights) and those that may not; in front of the loop, all of the first come before the wait. In between, where there
is nothing to do but wait, tables are filled (`lowbit.fill_table`) and outliers asked for (`lowbit.copy_outliers`, or in
front of the loop `lowbit.load_outliers` and `lowbit.index_outliers`), once. Outliers that are loaded in front of the
loop are multiplied (`lowbit.sparse_vector`) behind all copies that are started there. With a `prefetch_limit` no more
than that many rounds of the first are under way at a time, so that the kernel before need not queue behind them for its
activations.

Lines of outliers (`lowbit.copy_lines`) are copied behind all else of a round, in a group of their own: where they are,
it takes an answer from memory to know, and it is the end of a round that needs them (`lowbit.sparse_step`).

With `refill = "after_first_mma"` a round starts the copies of round i+S-1 not in front of what it computes but once its
first product by wgmma is under way: with wide tiles of activations a warp takes long to ask for its copies, and the
tensor core need not wait for that. In a `lowbit.concurrent`, they do not end the product.

With `refill = "per_warp"` there is no barrier in a round either, so some warps decode while others multiply. Instead
every stage has two signals (`passes.transforms.stage_signals`): that all copies into it have arrived, for which a warp
waits before it reads it, and that all warps have read it, for which a warp waits before it fills it again: a round
later, behind its own first product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from lowbit.dialect import ops
from lowbit.dialect.bindings import arith, ir, scf
from lowbit.dialect.ops.common import constant_of
from lowbit.dialect.types import Shared
from lowbit.passes.base import at, each_op
from lowbit.passes.lowering import emit
from lowbit.passes.lowering.context import when
from lowbit.passes.transforms.stage_signals import Signals

_APART = "lowbit.copy_lines"
_COPIES = ("lowbit.copy_async", "lowbit.copy_rows", "lowbit.copy_padded", _APART)
_ONCE = ("lowbit.fill_table", "lowbit.copy_outliers")
_BEFORE_WAIT, _BEHIND_COPIES = ("lowbit.load_outliers", "lowbit.index_outliers"), ("lowbit.sparse_vector",)


@dataclass(frozen=True)
class PipelineCopies:
    """Lower lowbit.pipeline: buffers of several stages, several rounds of copies under way, one barrier a round."""

    name: ClassVar[str] = "pipeline-copies"

    def run(self, module: ir.Module) -> None:
        for op in each_op(module, ops.PipelineOp):
            with at(op):
                stages = int(ir.IntegerAttr(op.num_stages).value)
                if stages > 1:
                    _Staged(op, stages).run()
                else:
                    _wait_every_round(op)


def _begins_product(op: Any) -> bool:
    """Whether an operation begins a product by wgmma."""
    name = op.operation.name
    return name == "lowbit.warpgroup_mma" or (name == "lowbit.accumulate" and not op.held)


def _wait_every_round(op: Any) -> None:
    """Rewrites the loop around a pipeline of one stage."""
    loop = op.operation.parent
    copies = list(op.copies.blocks[0].operations)
    if (multiply := _in_front(loop, _BEHIND_COPIES)) and "lowbit.grid_wait" in [c.operation.name for c in copies]:
        with ir.InsertionPoint(multiply[0]):
            ops.GridWaitOp()
    for inner in copies:
        inner.operation.move_before(loop if inner.operation.name in _ONCE else op.operation)
    with ir.InsertionPoint(op):
        ops.CommitOp()
        _wait(0)
        _barrier(op, op.async_proxy)
    with ir.InsertionPoint.at_block_terminator(loop.regions[0].blocks[0]):
        _barrier(op)
    op.operation.erase()


class _Staged:
    """Rewrites the loop around a pipeline of several stages.

    sure     rounds that are sure to come, 0 where none is
    ahead    rounds of copies under way while one computes
    slots    stages of every buffer, one for each of these rounds
    """

    def __init__(self, op: Any, stages: int) -> None:
        self.op, self.loop = op, op.operation.parent.opview
        self.lower, self.upper, _, *self.initial = self.loop.operation.operands
        copies = list(op.copies.blocks[0].operations)
        self.once = [inner for inner in copies if inner.operation.name in _ONCE]
        self.apart = [inner for inner in copies if inner.operation.name == _APART]
        self.copies = [inner for inner in copies if inner not in self.once and inner not in self.apart]
        self.groups = 2 if self.apart else 1
        self.once += _in_front(self.loop.operation, _BEFORE_WAIT)
        self.scalars = [inner for inner in copies if inner.operation.name.startswith("arith.")]
        _, *self.compute, self.end = self.loop.body.operations
        self.sure = self._rounds()
        most = self.sure or stages
        self.ahead, self.slots = min(stages - 1, most), min(stages, most)
        self.refills = self.ahead != self.sure
        begins = [_begins_product(inner) for inner in self.compute]
        self.refill_at = begins.index(True) + 1 if op.refill != "before_mma" else 0  # operation of `compute`
        names = [inner.operation.name for inner in self.copies]
        self.waits = "lowbit.grid_wait" in names
        self.cut = names.index("lowbit.grid_wait") if self.waits else len(names)
        limit: Any = op.prefetch_limit if self.waits else None
        self.prefetch_limit = stages if limit is None else int(ir.IntegerAttr(limit).value)
        self.buffers = self._widen_buffers()
        self.signals = Signals(op, self.slots) if op.refill == "per_warp" else None

    def _rounds(self) -> int:
        """How many are sure to come: all where the bounds are constants, or lower and lower + constant; else none."""
        lower, upper = self.lower, self.upper
        first, end = constant_of(lower), constant_of(upper)
        if first is not None and end is not None:
            return max(end - first, 0)
        owner: Any = upper.owner
        if isinstance(owner, ir.Block) or owner.name != "arith.addi" or owner.operands[0] != lower:
            return 0
        return max(constant_of(owner.operands[1]) or 0, 0)

    def _widen_buffers(self) -> dict[Any, Any]:
        """Buffers that the loop fills, and ones with a leading dim of stages in their place."""
        result: dict[Any, Any] = {}
        for op in [*self.copies, *self.apart]:
            if op.operation.name not in _COPIES or op.target in result:
                continue
            buffer = op.target.owner.opview
            one = Shared.of(op.target.type)
            size = one.strides[0] * one.shape[0]
            wide = Shared(one.element, (self.slots, *one.shape), (size, *one.strides), one.swizzle)
            with ir.InsertionPoint(buffer), buffer.location:
                result[op.target] = ops.AllocSharedOp(wide.type).result
        return result

    def run(self) -> None:
        with ir.InsertionPoint(self.loop):
            self._prologue()
            for late in _computed_late(self.loop.operation):
                late.operation.move_before(self.loop.operation)
                self._take_free_stage(late)
            new = scf.ForOp(self.lower, self.upper, emit.constant(1), list(self.initial))
        with ir.InsertionPoint(new.body):
            values = dict(zip(self.loop.inner_iter_args, new.inner_iter_args))
            self._round(new.induction_variable, values)
            scf.YieldOp([values.get(v, v) for v in self.end.operation.operands])
        for old, result in zip(self.loop.operation.results, new.operation.results):
            old.replace_all_uses_with(result)
        self.loop.operation.erase()
        for narrow, wide in self.buffers.items():
            narrow.replace_all_uses_with(wide)  # free_shared
            narrow.owner.erase()

    def _clone(self, body: Sequence[Any], values: dict[Any, Any]) -> None:
        """Copies operations, with operands replaced; `values` grows by their results."""

        def replace(inner: Any) -> Any:
            for i, operand in enumerate(inner.operands):
                if operand in values:
                    inner.operands[i] = values[operand]
            return ir.WalkResult.ADVANCE

        for op in body:
            clone = op.operation.clone()
            clone.operation.walk(replace)
            values.update(zip(op.operation.results, clone.operation.results))

    def _prologue(self) -> None:
        """Starts the first rounds: what needs no wait for all of them, then the rest, round by round."""
        rounds = [arith.addi(self.lower, emit.constant(i)) if i else self.lower for i in range(self.ahead)]
        for slot, index in enumerate(rounds):
            if slot >= self.prefetch_limit:
                _wait(self.prefetch_limit - 1)
            self._start(self.copies[: self.cut], slot, index)
            if self.prefetch_limit < self.ahead:
                ops.CommitOp()
        for inner in self.once:
            inner.operation.move_before(self.loop.operation)
        if self.waits:
            ops.GridWaitOp()
        after_wait = [inner for inner in self.copies[self.cut + 1 :] if inner not in self.scalars]
        for slot, index in enumerate(rounds):
            if after_wait or self.signals:
                self._start([*self.scalars, *after_wait], slot, index, last=True)
            ops.CommitOp()
            if self.apart:
                self._start([*self.scalars, *self.apart], slot, index)
                ops.CommitOp()

    def _take_free_stage(self, op: Any) -> None:
        """Gives an operation in front of the loop that stage of a buffer to which no copy has been started."""
        for i, operand in enumerate(op.operation.operands):
            if operand in self.buffers:
                with ir.InsertionPoint(op):
                    free = emit.constant(self.slots - 1)
                    op.operation.operands[i] = ops.StageOp(self.buffers[operand], free, operand.type).result

    def _start(self, copies: Sequence[Any], slot: int, index: Any, last: bool = False) -> None:
        """Starts copies of a round in front of the loop, if there is such a round; last: they complete its stage."""

        def start() -> None:
            self._clone(copies, self._staged(emit.constant(slot), index))
            if self.signals and last:
                self.signals.has_copied(emit.constant(slot))

        when(None if slot < self.sure else self._is_round(index), start)

    def _is_round(self, index: Any) -> Any:
        return emit.below(index, self.upper)

    def _round(self, index: Any, values: dict[Any, Any]) -> None:
        """Writes one round; `values` has what the loop carries, and grows by what is computed."""
        if not self.signals:
            _wait(self.groups * self.ahead - 1)
            _barrier(self.op, self.op.async_proxy)
        done = arith.subi(index, self.lower)
        if self.signals:
            self.signals.wait_full(done)
        if self.refill_at == 0:
            self._refill(index, done)
        values.update(self._staged(arith.remui(done, emit.constant(self.slots)), index))
        self._clone(self.compute[: self.refill_at], values)
        if self.refill_at > 0:
            self._refill(index, done)
        for inner in self.compute[self.refill_at :]:
            if self.apart and inner.operation.name == "lowbit.sparse_step":
                _wait(2 * self.ahead)
            self._clone([inner], values)
        if self.signals:
            self.signals.has_read(done)

    def _staged(self, slot: Any, index: Any) -> dict[Any, Any]:
        """Returns what a round's operations see: its index, and its stage of every buffer."""
        values = {self.loop.induction_variable: index}
        for narrow, wide in self.buffers.items():
            values[narrow] = ops.StageOp(wide, slot, narrow.type).result
        return values

    def _refill(self, index: Any, done: Any) -> None:
        """Starts the copies of the round that is `ahead` of this one, if there is one."""
        ahead = emit.constant(self.ahead)
        condition = self._is_round(arith.addi(index, ahead)) if self.refills else emit.constant(0, 1)
        if self.refills:
            self._beside_product(condition, lambda: self._start_later_round(index, done, ahead))
        ops.CommitOp()  # of nothing, if need be: waiting counts rounds
        if self.apart:
            when(condition, lambda: self._start_apart(index, done, ahead))
            ops.CommitOp()

    def _beside_product(self, condition: Any, action: Callable[[], None]) -> None:
        """Writes what is done on a condition; after the first product of a round, beside it."""
        if self.refill_at > 0:
            concurrent = ops.ConcurrentOp(condition)
            with ir.InsertionPoint(concurrent.body.blocks.append()):
                action()
            return
        when(condition, action)

    def _start_apart(self, index: Any, done: Any, ahead: Any) -> None:
        slot = arith.remui(arith.addi(done, ahead), emit.constant(self.slots))
        self._clone([*self.scalars, *self.apart], self._staged(slot, arith.addi(index, ahead)))

    def _start_later_round(self, index: Any, done: Any, ahead: Any) -> None:
        coming = arith.addi(done, ahead)
        slot = arith.remui(coming, emit.constant(self.slots))
        if self.signals:
            self.signals.wait_read(coming)
        copies = [inner for inner in self.copies if inner.operation.name != "lowbit.grid_wait"]
        self._clone(copies, self._staged(slot, arith.addi(index, ahead)))
        if self.signals:
            self.signals.has_copied(slot)


def _in_front(loop: Any, names: tuple[str, ...]) -> list[Any]:
    """Operations of some names in the block of a loop, in front of it."""
    block = list(loop.block.operations)
    return [inner for inner in block[: block.index(loop.opview)] if inner.operation.name in names]


def _computed_late(loop: Any) -> list[Any]:
    """Operations in front of a loop that come behind the copies that are started there: products with outliers, and
    what is computed from them."""
    found = _in_front(loop, _BEHIND_COPIES)
    block = list(loop.block.operations)
    for inner in block[: block.index(loop.opview)]:
        if any(operand.owner in found for operand in inner.operands):
            found.append(inner)
    return found


def _wait(pending: int) -> None:
    """Waits until no more than so many rounds are under way."""
    ops.WaitOp(ir.IntegerAttr.get(emit.integer(64), pending))


def _barrier(op: Any, async_proxy: bool = False) -> None:
    """Writes the barrier of a round."""
    barrier = ops.BarrierOp(op.scope, warps=op.warps)
    barrier.async_proxy = async_proxy
