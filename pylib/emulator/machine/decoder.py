"""From an instruction to a step: a Python closure over the register arrays of one block.

A decode function takes an `Op`, consumes its modifiers and operands one after the other, and returns the
step. Whatever it leaves over is refused, so no modifier is ever ignored. `Op.bind` then adds what all
instructions share: the guard predicate, and the check that registers are set before they are read.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from lowbit.pylib.emulator.isa.floats import FLOATS, Float
from lowbit.pylib.emulator.machine.faults import Array, Unsupported, all_of, any_of
from lowbit.pylib.emulator.machine.machine import Block, Register
from lowbit.pylib.emulator.machine.step_results import WARP, Mask, Outcome, Step
from lowbit.pylib.emulator.text.ptx import (
    BITS,
    Address,
    Imm,
    Instruction,
    Not,
    Operand,
    Pair,
    Reg,
    Sink,
    Special,
    Symbol,
    Vector,
)

DECODERS: dict[str, Callable[[Op], Step]] = {}


def instruction(*names: str) -> Callable[[Callable[[Op], Step]], Callable[[Op], Step]]:
    """Register the decode function of these opcodes."""

    def register(decode: Callable[[Op], Step]) -> Callable[[Op], Step]:
        DECODERS.update(dict.fromkeys(names, decode))
        return decode

    return register


@cache
def dtype_of(name: str) -> np.dtype[Any]:
    """Returns the NumPy type in which an instruction of this type sees a register; formats that NumPy lacks stay raw
    bits."""
    kind = {"s": "i", "f": "f"}.get(name[0], "u")
    if name == "pred":
        return np.dtype(np.bool_)
    return np.dtype(f"{'u' if name in ('f16x2', 'tf32') else kind}{BITS[name] // 8}")


@dataclass
class Dest:
    """Where results go. `write` takes a value per lane of the block; `scatter` one per lane in `lanes`."""

    register: Register | None
    view: Array

    def write(self, value: Any, mask: Mask) -> None:
        if mask is None:
            self.view[...] = value
        else:
            np.copyto(self.view, value, where=mask if self.view.ndim == 1 else mask[:, None])
        self.define(mask)

    def scatter(self, values: Array, lanes: Array, mask: Mask) -> None:
        if mask is None:
            self.view[...] = values
        else:
            self.view[lanes] = values
        self.define(mask)

    def define(self, mask: Mask) -> None:
        """The threads of a mask have set the register."""
        if self.register is not None and not self.register.complete:
            self.register.define(mask)


@dataclass
class Pointer:
    """`[base + offset]`, evaluated per lane."""

    base: Array  # per lane, or one for all
    offset: int

    def __call__(self, lanes: Array) -> Array:
        if not self.base.ndim:
            return np.full(len(lanes), int(self.base) + self.offset)
        base = self.base if len(lanes) == len(self.base) else self.base[lanes]
        return base.astype(np.int64) + self.offset


class Op:
    def __init__(self, instr: Instruction, block: Block) -> None:
        self.instr, self.block = instr, block
        self.modifiers = list(instr.modifiers)
        self.operands = list(instr.operands)
        self.reads: list[Register] = []
        self.writes: list[Register] = []
        self.asynchronous = False  # a wgmma, which sees to its registers itself

    # Modifiers

    def flag(self, *names: str) -> str | None:
        """Take one of these modifiers if it is there."""
        for name in names:
            if name in self.modifiers:
                self.modifiers.remove(name)
                return name
        return None

    def choice(self, *names: str) -> str:
        found = self.flag(*names)
        if found is None:
            raise Unsupported(f"`{self.instr.name}` needs one of .{', .'.join(names)}")
        return found

    def type(self, *allowed: str) -> str:
        """Take the last modifier, which is the type."""
        if not self.modifiers or (self.modifiers[-1] not in BITS and self.modifiers[-1] not in FLOATS):
            raise Unsupported(f"`{self.instr.name}` has no type that is known here")
        name = self.modifiers.pop()
        if allowed and name not in allowed:
            raise Unsupported(f".{name} is not a type of `{self.instr.opcode}` here; known: {', '.join(allowed)}")
        return name

    # Operands

    def next(self) -> Operand:
        if not self.operands:
            raise Unsupported("an operand is missing")
        return self.operands.pop(0)

    def register(self, reg: Reg) -> Register:
        return self.block.registers[reg.index]

    def dest(self, name: str, operand: Operand | None = None, wider: bool = False) -> Dest:
        """The next operand as a result of type `name`; `wider`: in a register that may be wider."""
        operand = operand or self.next()
        dtype = dtype_of(name)
        if isinstance(operand, Sink):
            return Dest(None, np.zeros(self.block.lanes, dtype))
        if not isinstance(operand, Reg):
            raise Unsupported("a result goes to a register")
        register = self.register(operand)
        if (register.value.dtype == np.bool_) != (name == "pred"):
            raise Unsupported(f"{operand.name} is a .{operand.type} register, the instruction's type is .{name}")
        itemsize = register.value.dtype.itemsize
        if wider and itemsize > dtype.itemsize:
            dtype = np.dtype(f"{dtype.kind if dtype.kind == 'i' else 'u'}{itemsize}")
        self.fits(operand, itemsize, dtype.itemsize)
        self.writes.append(register)
        return Dest(register, register.value.view(dtype))

    def float_dest(self, fmt: Float, packed: bool = False, operand: Operand | None = None) -> Dest:
        """The next operand as a result in raw bits of `fmt`; `packed`: as an array [lanes, 2]."""
        dest = self.dest(f"u{fmt.bits * (2 if packed else 1)}", operand)
        return Dest(dest.register, dest.view.view(fmt.raw).reshape(-1, 2)) if packed else dest

    def fits(self, reg: Reg, have: int, want: int) -> None:
        if have != want:
            raise Unsupported(f"{reg.name} is a .{reg.type} register, but {8 * want} bits are wanted")

    def source(self, name: str, operand: Operand | None = None, wider: bool = False) -> Array:
        """The next operand as an array of type `name`: one element per lane, or 0-d for a constant."""
        operand = operand or self.next()
        dtype = dtype_of(name)
        if name == "pred":
            raise Unsupported("use predicate()")
        match operand:
            case Reg():
                register = self.register(operand)
                if register.value.dtype == np.bool_:
                    raise Unsupported(f"{operand.name} is a predicate, the instruction's type is .{name}")
                self.reads.append(register)
                if wider and register.value.dtype.itemsize > dtype.itemsize:
                    # Little-endian: the low part comes first.
                    return register.value.view(dtype)[:: register.value.dtype.itemsize // dtype.itemsize]
                self.fits(operand, register.value.dtype.itemsize, dtype.itemsize)
                return register.value.view(dtype)
            case Imm():
                return np.array(self.constant(operand, name), f"u{dtype.itemsize}").view(dtype)
            case Special():
                value = special_register(self.block, operand.name)
                if dtype.itemsize != value.dtype.itemsize:
                    raise Unsupported(f"{operand.name} has 32 bits")
                return value.view(dtype)
            case Symbol():
                _, address = self.symbol(operand.name)
                bits = address + operand.offset
                if bits >> 8 * dtype.itemsize:
                    raise Unsupported(f"the address of {operand.name} does not fit .{name}")
                return np.array(bits, f"u{dtype.itemsize}").view(dtype)
            case _:
                raise Unsupported(f"operand {operand} where a .{name} value is needed")

    def constant(self, imm: Imm, name: str) -> int:
        """The bit pattern of a constant in an instruction of type `name`."""
        bits = BITS[name]
        if imm.kind == "decimal" and name in ("f32", "f64"):
            form = "<f" if bits == 32 else "<d"
            return int.from_bytes(struct.pack(form, float(imm.value)), "little")
        if imm.kind == "decimal" or (imm.kind == "int" and name in ("f32", "f64")):
            raise Unsupported(f"the {imm.kind} constant {imm.value} in a .{name} instruction")
        if imm.kind != "int" and int(imm.kind[1:]) != bits:
            raise Unsupported(f"an {imm.kind} constant in a .{name} instruction")
        value = int(imm.value)
        if not -(1 << bits - 1) <= value < 1 << bits:
            raise Unsupported(f"constant {value} does not fit .{name}")
        return value & (1 << bits) - 1

    def immediate(self) -> int:
        """The next operand as an integer constant."""
        operand = self.next()
        if not isinstance(operand, Imm) or operand.kind != "int":
            raise Unsupported("this operand has to be an integer constant")
        return int(operand.value)

    def predicate(self, operand: Operand | None = None) -> Callable[[], Array]:
        """The next operand as a predicate: a function, since `!p` has to be computed anew each time."""
        operand = operand or self.next()
        if isinstance(operand, Imm) and operand.kind == "int":
            constant = np.full(self.block.lanes, bool(operand.value))
            return lambda: constant
        reg = operand.reg if isinstance(operand, Not) else operand
        if not isinstance(reg, Reg) or reg.type != "pred":
            raise Unsupported(f"operand {operand} where a predicate is needed")
        register = self.register(reg)
        self.reads.append(register)
        value = register.value
        return (lambda: ~value) if isinstance(operand, Not) else (lambda: value)

    def raw_float(self, fmt: Float, operand: Operand | None = None, packed: bool = False) -> Callable[[], Array]:
        """The next operand as float64 values of format `fmt`; `packed`: two per lane, low half first."""
        name = f"u{2 * fmt.bits}" if packed else f"u{fmt.bits}"
        operand = operand or self.next()
        if isinstance(operand, Imm) and not packed and fmt.bits > 16:
            name = fmt.name
        bits = self.source(name, operand)
        halves = np.atleast_1d(bits).view(fmt.raw)
        if packed:
            halves = halves.reshape(-1, 2)
        return lambda: fmt.decode(halves)

    def vector(self, count: int | None = None) -> tuple[Operand, ...]:
        """The items of the next operand, `{a, b}`, or of a single register where one will do."""
        operand = self.next()
        items = operand.items if isinstance(operand, Vector) else (operand,)
        if count is not None and len(items) != count:
            raise Unsupported(f"{len(items)} registers where {count} are needed")
        return items

    def pair(self) -> tuple[Operand, Operand | None]:
        """`d|p` or just `d`."""
        operand = self.next()
        return (operand.first, operand.second) if isinstance(operand, Pair) else (operand, None)

    def symbol(self, name: str) -> tuple[str, int]:
        return self.block.symbols[name]

    def address(self) -> tuple[Pointer, str | None]:
        """The next operand as an address, and the space of the variable it names, if any."""
        operand = self.next()
        if not isinstance(operand, Address):
            raise Unsupported("this operand has to be an address in [ ]")
        base = operand.base
        if isinstance(base, Symbol):
            space, start = self.symbol(base.name)
            return Pointer(np.array(start, np.uint64), operand.offset), space
        if isinstance(base, Imm):
            return Pointer(np.array(int(base.value), np.uint64), operand.offset), None
        register = self.register(base)
        self.reads.append(register)
        if register.value.dtype.itemsize < 4:
            raise Unsupported(f"{base.name} is too narrow for an address")
        return Pointer(register.value, operand.offset), None

    # Binding

    def finish(self) -> None:
        if self.modifiers:
            raise Unsupported(f"modifier .{self.modifiers[0]} of `{self.instr.name}` is not known here")
        if self.operands:
            raise Unsupported(f"{len(self.operands)} operands too many")

    def bind(self, step: Step) -> Step:
        step = self.checked(step)
        guard = self.instr.guard
        if guard is None:
            return step
        self.reads = []
        condition = self.predicate(guard)
        register = self.reads[0]

        def guarded(mask: Mask) -> Outcome | None:
            if not register.complete:
                register.check(mask)
            active = condition()
            if mask is not None:
                active = active & mask
            if all_of(active):
                return step(None)
            return step(active.copy()) if any_of(active) else None

        return guarded

    def checked(self, step: Step) -> Step:
        registers = list(dict.fromkeys(self.reads))
        used = dict.fromkeys([] if self.asynchronous else [*self.reads, *self.writes])
        flights = [register.flight for register in used if register.flight]
        if not registers and not flights:
            return step

        def checking(mask: Mask) -> Outcome | None:
            for register in registers:
                if not register.complete:
                    register.check(mask)
            for flight in flights:
                flight.touch(mask)
            return step(mask)

        return checking


def special_register(block: Block, name: str) -> Array:
    """The value of a special register per lane (PTX ISA 10), as uint32."""
    stem, _, axis = name[1:].partition(".")
    lane = block.everyone
    x, y, _ = block.shape
    if axis:
        dim = "xyz".index(axis)
        if stem in ("ctaid", "clusterid"):
            return (block.index if stem == "ctaid" else block.cluster_index)[dim]
        if stem == "tid":
            return np.array([lane % x, lane // x % y, lane // (x * y)], np.uint32)[dim]
        clusters = tuple(n // per for n, per in zip(block.grid, block.cluster.shape))
        uniform = {
            "ntid": block.shape,
            "nctaid": block.grid,
            "nclusterid": clusters,
            "cluster_ctaid": block.cluster.place(block.rank),
            "cluster_nctaid": block.cluster.shape,
        }
        return np.array(uniform[stem][dim], np.uint32)
    bit = (1 << lane % WARP).astype(np.uint64)
    masks = {"eq": bit, "lt": bit - 1, "le": 2 * bit - 1, "ge": 2**32 - bit, "gt": 2**32 - 2 * bit}
    if stem.startswith("lanemask_"):
        return masks[stem.removeprefix("lanemask_")].astype(np.uint32)
    value = {
        "laneid": lane % WARP,
        "warpid": lane // WARP,
        "nwarpid": np.array(block.warps),
        "cluster_ctarank": np.array(block.rank),
        "cluster_nctarank": np.array(block.cluster.size),
        "dynamic_smem_size": np.array(block.dynamic_shared_bytes),
    }[stem]
    return value.astype(np.uint32)


def decode(instr: Instruction, block: Block) -> Step:
    """The step of one instruction. Raises EmulatorError when the instruction is not understood in full."""
    try:
        decoder = DECODERS.get(instr.opcode)
        if decoder is None:
            raise Unsupported(f"unknown instruction `{instr.opcode}`")
        op = Op(instr, block)
        step = decoder(op)
        op.finish()
        return op.bind(step)
    except Unsupported as reason:
        raise instr.error(str(reason)) from None
