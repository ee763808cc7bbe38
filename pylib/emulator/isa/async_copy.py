"""The cp.async instructions (PTX ISA 9.7.9.25.3): copies from global to shared memory."""

from __future__ import annotations

import numpy as np

from lowbit.pylib.emulator.isa.bulk_copy import bulk_copy
from lowbit.pylib.emulator.isa.mbarrier import arrive_after_copies
from lowbit.pylib.emulator.isa.tensor_copy import tensor_copy
from lowbit.pylib.emulator.isa.transfer import cache_policy
from lowbit.pylib.emulator.machine.copy_queue import CopyQueue
from lowbit.pylib.emulator.machine.decoder import Op, instruction
from lowbit.pylib.emulator.machine.faults import Unsupported, require
from lowbit.pylib.emulator.machine.step_results import Mask, Step
from lowbit.pylib.emulator.text.ptx import Imm, Not, Reg


@instruction("cp")
def _cp(op: Op) -> Step:
    op.choice("async")
    block, queue = op.block, op.block.copies
    if op.flag("commit_group"):
        return lambda mask: queue.commit(block.lanes_of(mask))
    if op.flag("wait_group"):
        pending = op.immediate()
        return lambda mask: queue.wait(block.lanes_of(mask), pending)
    if op.flag("wait_all"):

        def wait_all(mask: Mask) -> None:
            queue.commit(block.lanes_of(mask))
            queue.wait(block.lanes_of(mask), 0)

        return wait_all
    if op.flag("mbarrier"):
        return arrive_after_copies(op)
    if op.flag("bulk"):
        return tensor_copy(op) if op.flag("tensor") else bulk_copy(op)
    return _copy(op, queue)


def _copy(op: Op, queue: CopyQueue) -> Step:
    cache = op.choice("ca", "cg")
    op.choice("shared", "shared::cta")
    op.choice("global")
    hinted = bool(op.flag("L2::cache_hint"))
    op.flag("L2::64B", "L2::128B", "L2::256B")
    (target, target_space), (source, source_space) = op.address(), op.address()
    if target_space not in (None, "shared") or source_space not in (None, "global"):
        raise Unsupported("cp.async copies from global to shared memory")
    size = op.immediate()
    if size not in ((16,) if cache == "cg" else (4, 8, 16)):
        raise Unsupported(f"cp.async.{cache} does not copy {size} bytes")
    count, ignore = np.array(size, np.uint32), None
    extra = op.operands[: len(op.operands) - hinted]
    if extra and _is_predicate(extra[0]):
        ignore = op.predicate()
    elif extra:
        count = op.source("u32")
    cache_policy(op, hinted)
    block = op.block

    def step(mask: Mask) -> None:
        lanes = block.lanes_of(mask)
        counts = block.values_of(count, lanes).astype(np.int64)
        require(counts <= size, lanes, f"cp.async with a source size above its copy size of {size}")
        if ignore is not None:
            counts = np.where(ignore()[lanes], 0, counts)
        # The rest of the target is filled with zeros.
        data = block.device.read_prefix(lanes, source(lanes), size, counts)
        row = block.shared.begin_copy(lanes, target(lanes), size)
        queue.issue(lanes, row, data)

    return step


def _is_predicate(operand: object) -> bool:
    reg = operand.reg if isinstance(operand, Not) else operand
    return isinstance(reg, Reg) and reg.type == "pred" and not isinstance(operand, Imm)
