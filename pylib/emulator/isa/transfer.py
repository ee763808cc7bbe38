"""mov, ld, st and cvta (PTX ISA 9.7.9)."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from lowbit.pylib.emulator.isa.bulk_copy import async_store
from lowbit.pylib.emulator.machine.decoder import Dest, Op, dtype_of, instruction
from lowbit.pylib.emulator.machine.faults import Array, Fault, Unsupported, all_of, any_of, require
from lowbit.pylib.emulator.machine.memory import (
    CONST_WINDOW,
    LOCAL_WINDOW,
    PARAM_WINDOW,
    SHARED_WINDOW,
)
from lowbit.pylib.emulator.machine.step_results import Mask, Step
from lowbit.pylib.emulator.text.ptx import BITS, Address, Reg, Sink, Symbol, Vector

_TYPES = tuple(f"{kind}{bits}" for kind in "usb" for bits in (8, 16, 32, 64)) + ("f32", "f64")
_SCOPES = ("cta", "cluster", "gpu", "sys")
_EVICTION = tuple(f"L1::evict_{kind}" for kind in ("normal", "unchanged", "first", "last")) + ("L1::no_allocate",)
_L2_EVICTION = tuple(f"L2::evict_{kind}" for kind in ("normal", "first", "last"))
_PREFETCH = ("L2::64B", "L2::128B", "L2::256B")
_WINDOWS = {"shared": SHARED_WINDOW, "const": CONST_WINDOW, "local": LOCAL_WINDOW, "param": PARAM_WINDOW}
_WINDOW_SIZE = 1 << 32


@instruction("mov")
def _mov(op: Op) -> Step:
    kind = op.type("pred", *(t for t in _TYPES if BITS[t] >= 16))
    first, second = op.operands[:1], op.operands[1:2]
    if first and isinstance(first[0], Vector):
        return _unpack(op, kind)
    if second and isinstance(second[0], Vector):
        return _pack(op, kind)
    dest = op.dest(kind)
    if kind == "pred":
        p = op.predicate()
        return lambda mask: dest.write(p(), mask)
    value = op.source(kind)
    return lambda mask: dest.write(value, mask)


def _parts(op: Op, kind: str, items: tuple[Any, ...]) -> str:
    bits = BITS[kind] // len(items)
    if BITS[kind] % len(items) or bits not in (8, 16, 32):
        raise Unsupported(f"{len(items)} parts of .{kind}")
    return f"b{bits}"


def _pack(op: Op, kind: str) -> Step:
    """mov.b32 d, {a, b}: a is the low half.

    For a half that is not needed, LLVM names a register that no instruction writes. Here that half is a NaN, of f16 as
    of bf16, so that a kernel that needs it after all gives a wrong result.
    """
    dest = op.dest(kind)
    items = op.vector()
    part = _parts(op, kind, items)
    nan = np.array((1 << BITS[part] - 1) - 1, dtype_of(part))
    unneeded = [isinstance(item, Reg) and item not in op.block.kernel.results for item in items]
    sources = [nan if unset else op.source(part, item) for item, unset in zip(items, unneeded)]
    columns = np.zeros((op.block.lanes, len(items)), dtype_of(part))
    whole = columns.view(dest.view.dtype)[:, 0]

    def step(mask: Mask) -> None:
        for i, source in enumerate(sources):
            columns[:, i] = source
        dest.write(whole, mask)

    return step


def _unpack(op: Op, kind: str) -> Step:
    """mov.b32 {a, b}, s: a is the low half."""
    items = op.vector()
    part = _parts(op, kind, items)
    dests = [op.dest(part, item) for item in items]
    source = op.source(kind)

    def step(mask: Mask) -> None:
        columns = np.atleast_1d(source).copy().view(dtype_of(part)).reshape(-1, len(dests))
        for i, dest in enumerate(dests):
            dest.write(columns[:, i], mask)

    return step


@instruction("cvta")
def _cvta(op: Op) -> Step:
    """Global addresses are generic ones; the other spaces are seen through a window."""
    to = op.flag("to")
    space = op.choice("global", "shared::cta", "shared::cluster", "shared", "const", "local", "param").partition("::")[
        0
    ]
    kind = op.type("u64")
    dest = op.dest(kind)
    operand = op.next()
    if isinstance(operand, Reg) and BITS[operand.type] == 32:
        raise Unsupported("cvta of 32-bit addresses")
    a = op.source(kind, operand)
    window = np.uint64(_WINDOWS.get(space, 0))
    if not to:
        return lambda mask: dest.write(a + window, mask)

    def step(mask: Mask) -> None:
        if space != "global":
            lanes = op.block.lanes_of(mask)
            inside = (a >= window) & (a < window + np.uint64(_WINDOW_SIZE))
            require(
                np.broadcast_to(inside, (op.block.lanes,))[lanes],
                lanes,
                f"cvta.to.{space} of an address that is not in {space} memory",
            )
        dest.write(a - window, mask)

    return step


# Loads and stores


def _space(op: Op, named: str | None) -> str:
    spaces = ("global", "shared::cta", "shared::cluster", "shared", "const", "local", "param::entry", "param")
    space = op.flag(*spaces) or "generic"
    if space != "shared::cluster":
        space = space.partition("::")[0]
    if named and space.partition("::")[0] not in (named, "generic"):
        raise Unsupported(f"the variable lies in .{named}, not in .{space}")
    if named and space == "generic":
        raise Unsupported("a generic address is a 64-bit register, not a variable's name")
    return space


def _memory(op: Op, space: str) -> Any:
    return {
        "global": op.block.device,
        "const": op.block.constant,
        "shared": op.block.shared,
        "shared::cluster": op.block.cluster_memory,
        "local": op.block.local,
        "generic": _Generic(op),
    }[space]


class _Generic:
    """Generic addresses: the window says which memory is meant, for all threads alike."""

    def __init__(self, op: Op) -> None:
        self.block = op.block
        self.memories = {"shared": op.block.cluster_memory, "const": op.block.constant, "local": op.block.local}

    def _resolve(self, lanes: Array, address: Array) -> tuple[Any, Array]:
        if not len(address):
            return self.block.device, address
        for space, start in _WINDOWS.items():
            inside = (address >= start) & (address < start + _WINDOW_SIZE)
            if all_of(inside) and space == "param":
                raise Fault("a parameter by its generic address, which is emulated for tensor maps only", int(lanes[0]))
            if all_of(inside):
                return self.memories[space], address - start
            if any_of(inside):
                raise Fault("generic addresses that differ in their memory between threads", int(lanes[0]))
        return self.block.device, address

    def read(self, lanes: Array, address: Array, size: int) -> Array:
        memory, address = self._resolve(lanes, address)
        return memory.read(lanes, address, size)

    def write(self, lanes: Array, address: Array, rows: Array) -> None:
        memory, address = self._resolve(lanes, address)
        memory.write(lanes, address, rows)


def _access(op: Op, load: bool) -> bool:
    """Take the modifiers that say how to access, not what; whether a cache policy operand follows."""
    if op.flag("relaxed", "acquire" if load else "release"):
        op.choice(*_SCOPES)
    else:
        op.flag("weak", "volatile")
    op.flag(*(("ca", "cg", "cs", "lu", "cv") if load else ("wb", "cg", "cs", "wt")))
    op.flag(*_EVICTION)
    op.flag(*_L2_EVICTION)
    if load:
        op.flag(*_PREFETCH)
    return bool(op.flag("L2::cache_hint"))


def _vector(op: Op, kind: str) -> int:
    count = int((op.flag("v2", "v4") or "v1")[1])
    if count * BITS[kind] > 128:
        raise Unsupported(f".v{count}.{kind} has more than 128 bits, which needs sm_100")
    return count


def cache_policy(op: Op, present: bool) -> None:
    if present:
        op.source("b64")


@instruction("ld", "ldu")
def _ld(op: Op) -> Step:
    kind = op.type(*_TYPES)
    count = _vector(op, kind)
    hinted = _access(op, load=True)
    items = op.vector(count)
    dests = [op.dest(kind, item, wider=True) for item in items]
    if "param" in op.modifiers or "param::entry" in op.modifiers:
        return _ld_param(op, kind, dests)
    address, named = op.address()
    space = _space(op, named)
    constant = bool(op.flag("nc"))
    if constant and space != "global":
        raise Unsupported(f"ld.nc of .{space} memory")
    cache_policy(op, hinted)
    memory, block, dtype = _memory(op, space), op.block, dtype_of(kind)
    size = count * dtype.itemsize
    read = partial(block.device.read, constant=True) if constant else memory.read

    def step(mask: Mask) -> None:
        lanes = block.lanes_of(mask)
        values = read(lanes, address(lanes), size).view(dtype)
        for i, dest in enumerate(dests):
            dest.scatter(values[:, i], lanes, mask)

    return step


def _ld_param(op: Op, kind: str, dests: list[Dest]) -> Step:
    operand = op.next()
    params = {param.name: param for param in op.block.kernel.params}
    if not isinstance(operand, Address) or not isinstance(operand.base, Symbol) or operand.base.name not in params:
        raise Unsupported("ld.param needs a parameter's name")
    _space(op, "param")
    param, offset, dtype = params[operand.base.name], operand.offset, dtype_of(kind)
    size = dtype.itemsize * len(dests)
    if offset % size or not 0 <= offset <= param.size - size:
        raise Unsupported(f"{size} bytes at {offset} of a parameter with {param.size}: outside, or misaligned")
    start = op.block.symbols[param.name][1] + offset
    values = op.block.params[start : start + size].view(dtype)

    def step(mask: Mask) -> None:
        for i, dest in enumerate(dests):
            dest.write(values[i], mask)

    return step


@instruction("st")
def _st(op: Op) -> Step:
    if op.flag("async"):
        return async_store(op)
    kind = op.type(*_TYPES)
    count = _vector(op, kind)
    hinted = _access(op, load=False)
    address, named = op.address()
    space = _space(op, named)
    if space in ("param", "const"):
        raise Unsupported(f"a store to .{space} memory")
    items = op.vector(count)
    if any(isinstance(item, Sink | Symbol) for item in items):
        raise Unsupported("a store needs registers or constants")
    sources = [op.source(kind, item, wider=True) for item in items]
    cache_policy(op, hinted)
    memory, block, dtype = _memory(op, space), op.block, dtype_of(kind)

    def step(mask: Mask) -> None:
        lanes = block.lanes_of(mask)
        columns = np.empty((len(lanes), count), dtype)
        for i, source in enumerate(sources):
            columns[:, i] = source[lanes] if source.ndim else source
        memory.write(lanes, address(lanes), columns.view(np.uint8))

    return step
