"""A parsed PTX module as plain values: operands, instructions, variables and kernels."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property

from lowbit.dialect.errors import EmulatorError

#: Bits of every fundamental type (PTX ISA 5.2) and of the packed types that instructions name.
BITS = {
    **{f"{kind}{bits}": bits for kind in "usb" for bits in (8, 16, 32, 64)},
    "f16": 16,
    "bf16": 16,
    "f32": 32,
    "f64": 64,
    "tf32": 32,
    "f16x2": 32,
    "bf16x2": 32,
    "u16x2": 32,
    "s16x2": 32,
    "e4m3x2": 16,
    "e5m2x2": 16,
    "pred": 1,
}


@dataclass(frozen=True)
class Reg:
    """A declared register; `index` numbers the registers of a kernel, scopes apart."""

    name: str
    type: str
    index: int


@dataclass(frozen=True)
class Imm:
    """A constant. `kind` is "int", "f32" or "f64" (`value` is then the bit pattern), or "decimal"."""

    kind: str
    value: int | float


@dataclass(frozen=True)
class Special:
    """A special register such as %tid.x (PTX ISA 10)."""

    name: str


@dataclass(frozen=True)
class Symbol:
    """The address of a variable, or of a kernel parameter."""

    name: str
    offset: int = 0


@dataclass(frozen=True)
class Address:
    """`[base + offset]`."""

    base: Reg | Symbol | Imm
    offset: int = 0


@dataclass(frozen=True)
class TensorAddress:
    """`[map + offset, {x, y, ...}]`: a place in a tensor; x is the innermost dim."""

    base: Reg | Symbol | Imm
    offset: int
    coordinates: tuple[Operand, ...]


@dataclass(frozen=True)
class Not:
    """`!%p`."""

    reg: Reg


@dataclass(frozen=True)
class Sink:
    """`_`: a result that nobody wants."""


@dataclass(frozen=True)
class Vector:
    """`{a, b, ...}`."""

    items: tuple[Operand, ...]


@dataclass(frozen=True)
class Pair:
    """`d|p`: two results."""

    first: Operand
    second: Operand


@dataclass
class Label:
    """A branch target; `target` is the index of an instruction, set once the whole kernel is read."""

    name: str
    target: int = -1


@dataclass(frozen=True)
class Table:
    """The labels of a `.branchtargets` list."""

    labels: tuple[Label, ...]


Operand = Reg | Imm | Special | Symbol | Address | TensorAddress | Not | Sink | Vector | Pair | Label | Table


@dataclass(frozen=True)
class Instruction:
    line: int
    text: str
    guard: Reg | Not | None
    opcode: str
    modifiers: tuple[str, ...]
    operands: tuple[Operand, ...]
    program: str = ""
    """The file and the line that `.loc` says it comes from: "kernel.py:15"."""

    @property
    def name(self) -> str:
        return ".".join((self.opcode, *self.modifiers))

    @property
    def place(self) -> str:
        """Its line, for messages."""
        return f"line {self.line}{f' ({self.program})' if self.program else ''}"

    def form(self) -> Hashable:
        """Returns all of it but the names of its registers and labels, and how far an address is from a register: of
        instructions of one form, each is understood or none."""
        numbers: dict[Reg, int] = {}
        guard, operands = _form(self.guard, numbers), [_form(operand, numbers) for operand in self.operands]
        return self.opcode, self.modifiers, guard, tuple(operands)

    def error(self, message: str, where: str = "") -> EmulatorError:
        return EmulatorError(f"PTX {self.place}: `{self.text}`{where}: {message}")


def _form(operand: Operand | None, numbers: dict[Reg, int]) -> Hashable:
    """Returns what is left of an operand in the form of its instruction, whose registers are numbered as they come."""
    match operand:
        case Reg():
            return operand.type, numbers.setdefault(operand, len(numbers))
        case Address(Reg() as base):
            return Address, _form(base, numbers)
        case Not(reg):
            return Not, _form(reg, numbers)
        case Vector(items):
            return Vector, *(_form(item, numbers) for item in items)
        case Pair(first, second):
            return Pair, _form(first, numbers), _form(second, numbers)
        case TensorAddress(base, offset, coordinates):
            return TensorAddress, offset, _form(base, numbers), *(_form(each, numbers) for each in coordinates)
        case Label() | Table():
            return type(operand)
        case _:
            return operand


@dataclass(frozen=True)
class Variable:
    """A variable in `space` ("shared", "local", "global" or "const"). `size` is None for `extern` arrays."""

    name: str
    space: str
    align: int
    size: int | None
    data: bytes = b""


@dataclass(frozen=True)
class Param:
    """A kernel parameter. `array` marks `.b8 name[n]`: bytes passed by value."""

    name: str
    type: str
    align: int
    size: int
    array: bool


@dataclass
class Kernel:
    name: str
    params: list[Param] = field(default_factory=list)
    variables: list[Variable] = field(default_factory=list)
    registers: list[Reg] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    reqntid: tuple[int, ...] | None = None
    maxntid: tuple[int, ...] | None = None
    cluster: tuple[int, ...] | None = None  # .reqnctapercluster
    explicit_cluster: bool = False

    @cached_property
    def results(self) -> frozenset[Reg]:
        """The registers that instructions write to, predicates aside: first operands, or the items of such a vector."""
        first = [instruction.operands[0] for instruction in self.instructions if instruction.operands]
        items = (item for o in first for item in (o.items if isinstance(o, Vector) else (o,)))
        return frozenset(item for item in items if isinstance(item, Reg))


@dataclass
class Module:
    version: str = ""
    target: str = ""
    variables: list[Variable] = field(default_factory=list)
    kernels: dict[str, Kernel] = field(default_factory=dict)
