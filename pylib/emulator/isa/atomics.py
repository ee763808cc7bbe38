"""atom and red on global and shared memory (PTX ISA 9.7.13.5, 9.7.13.6).

Threads that hit the same address take turns in the order of their lanes; blocks come one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from lowbit.pylib.emulator.isa.floats import FLOATS, sum_to_odd
from lowbit.pylib.emulator.isa.transfer import cache_policy
from lowbit.pylib.emulator.machine.decoder import Dest, Op, dtype_of, instruction
from lowbit.pylib.emulator.machine.faults import Array, Unsupported
from lowbit.pylib.emulator.machine.step_results import Mask, Step
from lowbit.pylib.emulator.text.ptx import Operand

#: (old, b) -> new, on arrays of the type; inc and dec wrap at b.
_INTEGER: dict[str, tuple[Callable[[Array, Array], Array], tuple[str, ...]]] = {
    "add": (np.add, ("u32", "s32", "u64", "s64")),
    "min": (np.minimum, ("u32", "s32", "u64", "s64")),
    "max": (np.maximum, ("u32", "s32", "u64", "s64")),
    "inc": (lambda old, b: np.where(old >= b, 0, old + 1).astype(old.dtype), ("u32",)),
    "dec": (lambda old, b: np.where((old == 0) | (old > b), b, old - 1).astype(old.dtype), ("u32",)),
    "and": (np.bitwise_and, ("b32", "b64")),
    "or": (np.bitwise_or, ("b32", "b64")),
    "xor": (np.bitwise_xor, ("b32", "b64")),
    "exch": (lambda old, b: b, ("b32", "b64")),
}
_FLOAT = ("f16", "f16x2", "bf16", "bf16x2", "f32", "f64")
_TYPES = ("u32", "s32", "u64", "s64", "b32", "b64", "b16", *_FLOAT)


@instruction("atom", "red")
def _atom(op: Op) -> Step:
    returns = op.instr.opcode == "atom"
    semantics = op.flag("relaxed", "acquire", "release", "acq_rel")
    op.flag("cta", "cluster", "gpu", "sys")
    space = (op.flag("global", "shared::cta", "shared") or "generic").partition("::")[0]
    name = op.choice(*_INTEGER, "cas")
    noftz = op.flag("noftz")
    count = int((op.flag("v2", "v4", "v8") or "v1")[1])
    hinted = bool(op.flag("L2::cache_hint"))
    kind = op.choice(*_TYPES)
    if space == "generic" or (returns and name == "exch" and kind == "b16"):
        raise Unsupported(f"`{op.instr.name}`: say .global or .shared")
    if count > 1 and (kind not in _FLOAT or space != "global" or name == "exch"):
        raise Unsupported(f"a vector {op.instr.opcode} of .{kind}")
    if kind in _FLOAT and (kind not in ("f32", "f64")) != bool(noftz):
        raise Unsupported(".noftz is needed for f16 and bf16 atomics, and only there")

    update = _update(name, kind, space)
    dests = [op.dest(_raw(kind), item) for item in op.vector(count)] if returns else []
    address, named = op.address()
    if named not in (None, space):
        raise Unsupported(f"the variable lies in .{named}, not in .{space}")
    operands = [_columns(op, kind, count)]
    if name == "cas":
        operands.append(_columns(op, kind, count))
    cache_policy(op, hinted)
    order = semantics in ("acquire", "acq_rel"), semantics in ("release", "acq_rel")
    return _in_turns(op, space, dtype_of(_raw(kind)), update, dests, address, operands, order)


def _raw(kind: str) -> str:
    return {"f16": "b16", "bf16": "b16", "f32": "b32", "f64": "b64", "f16x2": "b32", "bf16x2": "b32"}.get(kind, kind)


def _columns(op: Op, kind: str, count: int) -> Callable[[Array], Array]:
    items: tuple[Operand, ...] = op.vector(count)
    sources = [op.source(_raw(kind), item) for item in items]
    shape = (op.block.lanes,)
    return lambda lanes: np.stack([np.broadcast_to(source, shape)[lanes] for source in sources], axis=1)


def _update(name: str, kind: str, space: str) -> Callable[..., Array]:
    """The new value from the old one and the operands, all as [threads, vector] arrays."""
    if name == "cas":
        if kind not in ("b16", "b32", "b64"):
            raise Unsupported(f"atom.cas.{kind}")
        return lambda old, compare, new: np.where(old == compare, new, old)
    if kind in _FLOAT:
        fmt = FLOATS[kind.removesuffix("x2")]
        if name not in ("add", "min", "max") or (name != "add" and kind in ("f32", "f64")):
            raise Unsupported(f"atom.{name}.{kind}")
        function: Callable[[Array, Array], Array] = {"add": sum_to_odd, "min": np.fmin, "max": np.fmax}[name]
        if kind == "f64":
            function = np.add
        # In global memory, and only there, f32 additions take and give no subnormals.
        flush = fmt.flush if kind == "f32" and space == "global" else lambda x: x

        def combine(old: Array, b: Array) -> Array:
            x, y = (flush(fmt.decode(np.ascontiguousarray(v).view(fmt.raw))) for v in (old, b))
            return fmt.encode(flush(function(x, y))).view(old.dtype)

        return combine
    function, kinds = _INTEGER[name]
    if kind not in kinds:
        raise Unsupported(f"atom.{name}.{kind}")
    return function


def _in_turns(
    op: Op,
    space: str,
    dtype: np.dtype[Any],
    update: Callable[..., Array],
    dests: list[Dest],
    address: Callable[[Array], Array],
    operands: list[Callable[[Array], Array]],
    order: tuple[bool, bool],
) -> Step:
    """`order`: whether they acquire and release, which orders blocks in device memory."""
    block = op.block
    memory: Any = block.shared if space == "shared" else block.device

    def step(mask: Mask) -> None:
        lanes = block.lanes_of(mask)
        at = address(lanes)
        values = [operand(lanes) for operand in operands]
        size = values[0].shape[1] * dtype.itemsize
        left = np.arange(len(lanes))
        while len(left):
            turn = left[np.unique(at[left], return_index=True)[1]]
            old = memory.read(lanes[turn], at[turn], size, atomic=True).view(dtype)
            new = np.ascontiguousarray(update(old, *(value[turn] for value in values)))
            memory.write(lanes[turn], at[turn], new.view(np.uint8), atomic=True)
            if space == "global":
                block.device.order(lanes[turn], at[turn], size, *order)
            for i, dest in enumerate(dests):
                dest.view[lanes[turn]] = old[:, i]
            left = np.setdiff1d(left, turn, assume_unique=True)
        for dest in dests:
            if dest.register is not None:
                dest.register.define(mask)

    return step
