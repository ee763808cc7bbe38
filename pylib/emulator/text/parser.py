"""PTX tokens to a Module: a recursive-descent parser of the PTX that LLVM, and inline assembly in it,
write.

Names are resolved here: registers to `Reg` values that differ per scope (inline assembly opens `{ }` scopes
that redeclare names), labels to instruction indices. Whatever is not understood is refused with its line;
only what cannot change a result is skipped (`.file`, `.section`, `.pragma "nounroll"`).
"""

from __future__ import annotations

import re
from functools import lru_cache

from lowbit.pylib.emulator.text.lexer import TokenStream, integer_value
from lowbit.pylib.emulator.text.ptx import (
    BITS,
    Address,
    Imm,
    Instruction,
    Kernel,
    Label,
    Module,
    Not,
    Operand,
    Pair,
    Param,
    Reg,
    Sink,
    Special,
    Symbol,
    Table,
    TensorAddress,
    Variable,
    Vector,
)

_SPECIAL = re.compile(
    r"%(?:(?:n?tid|n?ctaid|n?clusterid|cluster_n?ctaid)\.[xyz]|cluster_n?ctarank|laneid|n?warpid"
    r"|lanemask_(?:eq|le|lt|ge|gt)|dynamic_smem_size)"
)
_LINKING = {".visible", ".weak", ".extern", ".common"}
_SPACES = {".shared", ".global", ".const", ".local"}
#: Hints to the code generator; a launch needs none of them.
_IGNORED_BOUNDS = {".minnctapersm", ".maxnreg", ".maxnctapersm", ".maxclusterrank"}
_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"\n]*)"', re.MULTILINE)
_PRAGMAS = {"nounroll", "enable_smem_spilling", "used_bytes_mask"}  # their first words


@lru_cache(maxsize=4096)
def _split_opcode(name: str) -> tuple[str, tuple[str, ...]]:
    """The opcode and the modifiers in the full name of an instruction."""
    opcode, *modifiers = re.split(r"\.(?!\.)", name)
    return opcode, tuple(modifiers)


class _Scope:
    def __init__(self, parent: _Scope | None = None) -> None:
        self.parent = parent
        self.registers: dict[str, Reg] = {}
        self.ranges: dict[str, tuple[str, int]] = {}  # `%r<9>`: "%r" -> (type, 9)
        self.labels: dict[str, int] = {}
        self.tables: dict[str, Table] = {}


class Parser(TokenStream):
    def __init__(self, source: str) -> None:
        super().__init__(source)
        self.module = Module()
        self.symbols: set[str] = set()
        self.kernel = Kernel("")
        self.scope = _Scope()
        self.jumps: list[tuple[Label, _Scope, int]] = []
        self.files = dict(_FILE.findall(source))  # they may be named behind the code
        self.program = ""  # the line of the program, from the last `.loc`

    # Module

    def parse(self) -> Module:
        while self.text:
            token = self.at
            match self.text:
                case ".version":
                    self.take()
                    self.module.version = self.take()
                case ".target":
                    self.take()
                    self.module.target = self.word()
                    while self.accept(","):
                        self.word()
                case ".address_size":
                    self.take()
                    if self.integer() != 64:
                        raise self.error("only .address_size 64 is supported", token)
                case ".file":
                    self.skip_line()
                case ".section":
                    self.skip_section()
                case _:
                    while self.text in _LINKING:
                        self.take()
                    if self.text == ".entry":
                        self.entry()
                    elif self.text in _SPACES:
                        self.module.variables += self.variables()
                    elif self.text == ".func":
                        raise self.error("functions and calls are not supported: inline them")
                    else:
                        raise self.error(f"unknown directive `{self.text}`")
        return self.module

    def skip_section(self) -> None:
        while not self.accept("{"):
            self.take()
        while not self.accept("}"):
            self.take()

    def variables(self) -> list[Variable]:
        """`.shared .align 16 .b8 name[1024];`, with `= {...}` where the space can be initialised."""
        space, align, found = self.take()[1:], 1, list[Variable]()
        if self.accept(".align"):
            align = self.integer()
        elem = self.type()
        while True:
            token, name = self.at, self.word()
            count: int | None = 1
            while self.accept("["):
                count = None if self.text == "]" else count and count * self.integer()
                self.expect("]")
            data = b""
            if self.accept("="):
                if space not in ("global", "const"):
                    raise self.error(f".{space} variables have no initial value", token)
                data = self.initializer(elem)
                count = count or len(data) * 8 // BITS[elem]
            size = None if count is None else count * BITS[elem] // 8
            if size is None and space != "shared":
                raise self.error(f".{space} array without a size", token)
            found.append(Variable(name, space, max(align, BITS[elem] // 8), size, data))
            self.symbols.add(name)
            if self.accept(";"):
                return found
            self.expect(",")

    def initializer(self, elem: str) -> bytes:
        if self.accept("{"):
            values = [self.initializer(elem)]
            while self.accept(","):
                values.append(self.initializer(elem))
            self.expect("}")
            return b"".join(values)
        token, value = self.at, self.operand()
        if not isinstance(value, Imm) or value.kind == "decimal":
            raise self.error("only constants can be initial values", token)
        size = BITS[elem] // 8
        return (int(value.value) & ((1 << 8 * size) - 1)).to_bytes(size, "little")

    def type(self) -> str:
        token, name = self.at, self.word()
        if name[1:] not in BITS or name[0] != ".":
            raise self.error(f"unknown type `{name}`", token)
        return name[1:]

    # Kernels

    def entry(self) -> None:
        self.expect(".entry")
        self.kernel = Kernel(self.word())
        outer_symbols = set(self.symbols)
        if self.accept("("):
            while not self.accept(")"):
                self.kernel.params.append(self.param())
                self.accept(",")
        while self.text != "{":
            self.bound()
        self.jumps = []
        self.scope = _Scope()
        self.expect("{")
        self.body()
        for label, scope, token in self.jumps:
            label.target = self.resolve_label(label.name, scope, token)
        self.module.kernels[self.kernel.name] = self.kernel
        self.symbols = outer_symbols

    def param(self) -> Param:
        self.expect(".param")
        align, elem = 1, ""
        while self.text.startswith("."):
            if self.accept(".align"):
                align = self.integer()
            elif self.text in (".ptr", ".global", ".shared", ".const", ".local"):
                # `.ptr .global .align 16`: a promise about where the pointer leads, not about the parameter.
                if self.take() == ".ptr":
                    self.pointer_promise()
            else:
                elem = self.type()
        if not elem:
            raise self.error("a parameter needs a type")
        name, size, array = self.word(), BITS[elem] // 8, False
        if self.accept("["):
            size, array = size * self.integer(), True
            self.expect("]")
        self.symbols.add(name)
        return Param(name, elem, max(align, BITS[elem] // 8), size, array)

    def pointer_promise(self) -> None:
        if self.text in _SPACES:
            self.take()
        if self.accept(".align"):
            self.integer()

    def bound(self) -> None:
        if self.accept(".explicitcluster"):
            self.kernel.explicit_cluster = True
            return
        token, name = self.at, self.take()
        values = [self.integer()]
        while self.accept(","):
            values.append(self.integer())
        if name == ".reqntid":
            self.kernel.reqntid = tuple(values)
        elif name == ".maxntid":
            self.kernel.maxntid = tuple(values)
        elif name == ".reqnctapercluster":
            self.kernel.cluster = tuple(values)
        elif name not in _IGNORED_BOUNDS:
            raise self.error(f"unknown directive `{name}`", token)

    def location(self) -> None:
        """`.loc 1 15 0`: the following instructions come from line 15 of file 1, from none if it is line 0."""
        _, file, line = self.take(), self.take(), self.integer()
        self.program = f"{self.files[file]}:{line}" if line and file in self.files else ""
        self.skip_line()

    def body(self) -> None:
        """Everything up to the `}` that closes the scope just opened."""
        while not self.accept("}"):
            text = self.text
            if not text:
                raise self.error("the kernel's closing `}` is missing")
            if self.accept("{"):
                self.scope = _Scope(self.scope)
                self.body()
                self.scope = self.scope.parent or self.scope
            elif text == ".reg":
                self.registers()
            elif text in _SPACES:
                self.kernel.variables += self.variables()
            elif text == ".loc":
                self.location()
            elif text == ".file":
                self.skip_line()
            elif text == ".pragma":
                self.pragma()
            elif text.startswith("."):
                raise self.error(f"unknown directive `{text}`")
            elif self.accept(";"):
                pass
            elif self.texts[self.at + 1] == ":" and self.kind == "word":
                name = self.word()
                self.expect(":")
                if self.accept(".branchtargets"):
                    self.scope.tables[name] = self.branch_targets()
                else:
                    self.scope.labels[name] = len(self.kernel.instructions)
            else:
                self.instruction()

    def branch_targets(self) -> Table:
        labels = [self.label(self.at, self.word())]
        while self.accept(","):
            labels.append(self.label(self.at, self.word()))
        self.expect(";")
        return Table(tuple(labels))

    def label(self, token: int, name: str) -> Label:
        label = Label(name)
        self.jumps.append((label, self.scope, token))
        return label

    def pragma(self) -> None:
        self.take()
        text = self.take().strip('"')
        if text.split()[0] not in _PRAGMAS:
            raise self.error(f"unknown pragma `{text}`")
        self.expect(";")

    def registers(self) -> None:
        self.expect(".reg")
        kind = self.type()
        while True:
            name = self.word()
            if self.accept("<"):
                self.scope.ranges[name] = (kind, self.integer())
                self.expect(">")
            else:
                self.declare(self.scope, name, kind)
            if self.accept(";"):
                return
            self.expect(",")

    def declare(self, scope: _Scope, name: str, kind: str) -> Reg:
        register = Reg(name, kind, len(self.kernel.registers))
        self.kernel.registers.append(register)
        scope.registers[name] = register
        return register

    # Instructions

    def instruction(self) -> None:
        first, guard = self.at, None
        if self.accept("@"):
            negated = self.accept("!")
            register = self.operand()
            if not isinstance(register, Reg) or register.type != "pred":
                raise self.error("a guard must be a predicate register", first)
            guard = Not(register) if negated else register
        opcode, modifiers = _split_opcode(self.word())
        operands = list[Operand]()
        while self.text != ";":
            operands.append(self.operand())
            if not self.accept(",") and self.text != ";":
                raise self.error(f"expected `,` or `;`, found `{self.text}`")
        text = " ".join(self.source[self.start(first) : self.start(self.at)].split())
        self.expect(";")
        self.kernel.instructions.append(
            Instruction(self.line(first), text, guard, opcode, modifiers, tuple(operands), self.program)
        )

    def operand(self) -> Operand:
        value = self.simple_operand()
        return Pair(value, self.simple_operand()) if self.accept("|") else value

    def simple_operand(self) -> Operand:
        token, text = self.at, self.text
        register = self.scope.registers.get(text)
        if register is not None:
            self.at += 1
            return register
        if self.accept("{"):
            items = [self.operand()]
            while self.accept(","):
                items.append(self.operand())
            self.expect("}")
            return Vector(tuple(items))
        if self.accept("["):
            return self.address()
        if self.accept("!"):
            register = self.operand()
            if not isinstance(register, Reg):
                raise self.error("`!` needs a predicate register", token)
            return Not(register)
        if text == "-" or self.kind == "number":
            return self.number()
        name = self.word()
        if name == "_":
            return Sink()
        register = self.find_register(name)
        if register is not None:
            return register
        if _SPECIAL.fullmatch(name):
            return Special(name)
        if name.startswith("%"):
            raise self.error(f"`{name}` is neither a declared register nor a special register known here", token)
        if name in self.symbols:
            return Symbol(name, self.offset())
        return self.scope.tables.get(name) or self.label(token, name)

    def address(self) -> Address | TensorAddress:
        token, base = self.at, self.simple_operand()
        if isinstance(base, Symbol):
            base, offset = Symbol(base.name), base.offset
        elif isinstance(base, Reg) or (isinstance(base, Imm) and base.kind == "int"):
            offset = self.offset()
        else:
            raise self.error("an address is a register, a variable or a number", token)
        coordinates = self.operand() if self.accept(",") else None
        if coordinates is not None and not isinstance(coordinates, Vector):
            raise self.error("the coordinates in a tensor are a list in { }", token)
        self.expect("]")
        return TensorAddress(base, offset, coordinates.items) if coordinates else Address(base, offset)

    def offset(self) -> int:
        if self.accept("+"):
            return self.integer()
        return self.integer() if self.text == "-" else 0

    def number(self) -> Imm:
        sign = -1 if self.accept("-") else 1
        token, kind, text = self.at, self.kind, self.take()
        if kind != "number":
            raise self.error(f"expected a number, found `{text}`", token)
        text = text.lower()
        if text.startswith(("0f", "0d")):
            if sign < 0:
                raise self.error("a bit pattern has no sign in front", token)
            return Imm("f32" if text[1] == "f" else "f64", int(text[2:], 16))
        if "." in text:
            return Imm("decimal", sign * float(text))
        return Imm("int", sign * integer_value(text))

    def find_register(self, name: str) -> Reg | None:
        scope: _Scope | None = self.scope
        while scope is not None:
            if name in scope.registers:
                return scope.registers[name]
            stem = name.rstrip("0123456789")
            if stem in scope.ranges and stem != name:
                kind, count = scope.ranges[stem]
                if int(name[len(stem) :]) < count:
                    return self.declare(scope, name, kind)
            scope = scope.parent
        return None

    def resolve_label(self, name: str, scope: _Scope | None, token: int) -> int:
        while scope is not None:
            if name in scope.labels:
                return scope.labels[name]
            scope = scope.parent
        raise self.error(f"`{name}` is not declared", token)


def parse(source: str) -> Module:
    """Read a PTX module. Raises EmulatorError with the line of the first thing that is not understood."""
    return Parser(source).parse()
