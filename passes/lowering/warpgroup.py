"""The instructions of wgmma: a's fragments from registers, b from shared memory, the accumulators in f32 or i32.

A warp's A fragment of m64nNk16 is that of mma.m16n8k16, and its accumulators are those of m16n8, side by side along N
(PTX ISA 9.7.15.5.1): so layouts, packed weights and all that is done with accumulators stay the same. What changes is
that b needs no fragments, and that an instruction has up to 256 columns.

wgmma works on while the warp goes on. Registers that it still needs may not be touched, and no compiler in between
knows; so accumulators are registers of PTX that LLVM never sees (`declare_sums`) until they are waited for, and the
fragments of a are new ones for every instruction: the next is decoded while the tensor core works on the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from lowbit.dialect.bindings import arith, ir, llvm
from lowbit.dialect.elements import OPERANDS, product_types
from lowbit.dialect.formats.packing import BLOCK_K
from lowbit.dialect.layouts.fragments import MMA_A, MMA_M16N8_D
from lowbit.dialect.types import Reg
from lowbit.passes.lowering import emit
from lowbit.passes.lowering.addressing import Place, ThreadIndex
from lowbit.passes.lowering.fragment import Fragment, fragment_blocks

# The upper word of a matrix descriptor: 1024 bytes from eight rows to the next, 128-byte swizzling
# (PTX ISA 9.7.15.5.1.2).
_UPPER = 1 << 30 | 1024 // 16
_SUMS = {"f32": ("wgmma_sum", "f32", "f"), "i32": ("wgmma_integer_sum", "b32", "r")}
"""By the type of accumulators: their names, their type in PTX, and its constraint in inline assembly."""
_SIGNS = {"f16": ", 1, 1, 0", "bf16": ", 1, 1, 0", "f8E4M3FN": ", 1, 1"}
"""By the type of b, the signs of both factors; and that b of 16 bits is not transposed. Integers have neither."""
_TOGETHER = 4  # instructions after one fence: on an H200, one by one is 5 % slower at m = 64, and so is all at once
_COMMIT = "wgmma.commit_group.sync.aligned;"
_MOST_SUMS = 4096  # names cost nothing
_OF_ROW_SUMS = _MOST_SUMS // 2  # the first of the accumulators that sums of rows have for themselves
FIRST_ACCUMULATOR = 3 * _MOST_SUMS // 4  # the first of those that stay in place (`passes.lowering.accumulators`)


class Products(Fragment):
    """c + a b^T + a' b'^T + ... (c None: zero), whose accumulators stay where they are from one product to the next.

    operands: every a, and the first column of b that belongs to it
    bank: of two sets of registers, for products from zero of which two may be under way (`start`)
    written: how many instructions of the first row are
    """

    def __init__(
        self,
        threads: ThreadIndex,
        operands: Sequence[tuple[Fragment, int]],
        b: Place,
        c: Fragment | None,
        result: Reg,
        bank: int = 0,
        written: int = 0,
    ) -> None:
        self.operands, self.b, self.c, self.bank, self.written = operands, b, c, bank, written
        self.started = self.waited_for = False
        self._places = fragment_blocks(result.layout, MMA_M16N8_D)
        self.rows = len({row for row, _ in self._places})
        self._descriptor = _once(lambda: descriptor(threads, b, result))
        self._rows: dict[int, list[Any]] = {}
        super().__init__(result, "scalar", self._scalar)

    def reads_first(self, factor: Fragment) -> bool:
        """A tile that scales a product is read while the product is under way, not when it has been waited for."""
        return self.rows == 1 and factor.count < self.count

    def start(self, finish_last: Callable[[], None]) -> None:
        """Write down the instructions of a single row from zero; once the first few are under way, those of the product
        before have ended, and `finish_last` may write down what is done with them."""
        self.started, instructions = True, self._instructions(0)
        for number, batch in enumerate(_batches(self._terms(0))):
            instructions.issue(batch, adds=number > 0, commit=True)
            if number == 0:
                finish_last()
            else:
                wait(1)

    def write_first(self) -> None:
        """Write down the first instructions, of the first row, for others to follow."""
        if self.started or self.written or self._rows:
            return
        instructions, terms = self._instructions(0), next(_batches(self._terms(0)))
        self._begin(instructions, 0)
        instructions.issue(terms, self.c is not None)
        self.written = len(terms)

    def _begin(self, instructions: Instructions, row: int) -> None:
        """Put c into the accumulators."""
        if self.c is not None:
            mine = sorted((column, i) for i, (r, column) in enumerate(self._places) if r == row)
            instructions.begin([self.c.scalar(4 * i + j) for _, i in mine for j in range(4)])

    def _scalar(self, i: int) -> Any:
        row, column = self._places[i // 4]
        if row not in self._rows:
            self._rows[row] = self._row(row)
        return self._rows[row][4 * column + i % 4]

    def _row(self, row: int) -> list[Any]:
        instructions = self._instructions(row)
        if self.started:
            return instructions.collect([] if self.waited_for else [waiting(0)])
        written = 0 if row else self.written
        if not written:
            self._begin(instructions, row)
        return instructions.run(self._terms(row)[written:], written > 0 or self.c is not None)

    def _terms(self, row: int) -> list[Term]:
        return [term for a, start in self.operands for term in terms_of(a, self.b, start, row)]

    def _instructions(self, row: int) -> Instructions:
        a, b = str(self.operands[0][0].reg.element), str(self.b.type.element)
        n = self.b.type.shape[-2]
        return Instructions(self._descriptor(), n, a, b, (row + self.bank) * n // 2)


def terms_of(a: Fragment, b: Place, start: int, row: int, row_of_b: int = 0) -> list[Term]:
    """Returns the instructions for a row of the fragments of a, which meets the columns of b from `start` on, in rows
    from `row_of_b` on."""
    x = OPERANDS[str(b.type.element)]
    at = {place: i for i, place in enumerate(fragment_blocks(a.reg.layout, MMA_A[x.bits]))}
    columns = enumerate(sorted({column for _, column in at}))
    below = row_of_b * b.type.strides[-2] * x.bytes
    return [Term(partial(_registers, a, 4 * at[row, k]), below + _offset(b, start + x.mma_k * n)) for n, k in columns]


def _registers(a: Fragment, first: int) -> list[Any]:
    return [a.operand(first + i) for i in range(4)]


class RowSums(Fragment):
    """A matrix of ones times b^T: all rows of the product are the sums, of which a lane keeps one. Begun at once, in
    accumulators of its own: the fragments of a product that comes behind can be decoded meanwhile.

    behind: that product, whose wait is for the sums, too
    """

    def __init__(self, threads: ThreadIndex, b: Place, start: int, columns: int, result: Reg) -> None:
        self.behind: Products | None = None
        element, ones = str(b.type.element), _ones(str(b.type.element))
        terms = [Term(lambda: ones, _offset(b, start + BLOCK_K * i)) for i in range(columns // BLOCK_K)]
        start_of_b, n = descriptor(threads, b, result), b.type.shape[-2]
        self._instructions = Instructions(start_of_b, n, element, element, _OF_ROW_SUMS)
        self._instructions.issue_all(terms, commit=True)
        self._sums = _once(self._collect)
        super().__init__(result, "scalar", lambda i: self._sums()[4 * (i // 2) + i % 2])

    def _collect(self) -> list[Any]:
        if self.behind is None:
            return self._instructions.collect([waiting(0)])
        self.behind.register(0)
        return self._instructions.collect([])


def _ones(element: str) -> list[Any]:
    """A fragment of a matrix of ones: four registers, as nvJitLink 13 may fill copies of a single one too late."""
    pair = {"f16": 0x3C003C00, "bf16": 0x3F803F80}[element]
    lines = [f"mov.b32 ${i}, {pair};" for i in range(4)]
    words = _assembly(ir.Type.parse("!llvm.struct<(i32, i32, i32, i32)>"), [], lines, ["=r"] * 4)
    return [llvm.extractvalue(emit.integer(), words, [i]) for i in range(4)]


def _once(make: Callable[[], Any]) -> Callable[[], Any]:
    made: list[Any] = []

    def get() -> Any:
        if not made:
            made.append(make())
        return made[0]

    return get


def descriptor(threads: ThreadIndex, b: Place, result: Reg) -> Any:
    """The lower word of a matrix descriptor: the start address."""
    address = llvm.ptrtoint(emit.integer(), b.base)
    layout = result.layout
    for size, divisor, dim, stride in layout.thread_digits():
        if dim < layout.rank - 2:
            step = emit.constant(stride * b.type.strides[dim] * OPERANDS[str(b.type.element)].bytes)
            address = arith.addi(address, arith.muli(threads.digit(size, divisor, layout.threads), step))
    return emit.mask(emit.shift_right(address, 4), 0x3FFF)  # in a cluster, addresses have the block's rank above


def _offset(b: Place, column: int) -> int:
    """Bytes from the start to a column, which inside a row are those without swizzling."""
    panel, within = divmod(column, b.type.shape[-1])
    return OPERANDS[str(b.type.element)].bytes * (panel * b.type.strides[-3] + within)


@dataclass(frozen=True)
class Term:
    """One instruction: what makes its fragment of a, while the tensor core works on those before, and where b is."""

    fragment: Callable[[], list[Any]]
    offset: int  # from what the descriptor says, in bytes


def _batches(terms: Sequence[Term]) -> Iterator[list[Term]]:
    for first in range(0, len(terms), _TOGETHER):
        yield list(terms[first : first + _TOGETHER])


class Instructions:
    """The wgmma instructions of one row of fragments. It has accumulators of its own, so its sums can stay in place
    from one step to the next."""

    def __init__(self, descriptor: Any, n: int, a: str, b: str, first: int) -> None:
        """a, b: the types of the factors in the IR; first: number of the first accumulator"""
        self.descriptor = descriptor
        self.element = OPERANDS[b].sums
        name, self._type, self._constraint = _SUMS[self.element]
        self.sums = [f"{name}{first + i}" for i in range(n // 2)]
        self._signs = _SIGNS.get(b, "")
        kind = f"m64n{n}k{OPERANDS[b].mma_k}.{product_types(a, b)}"
        self.multiply = f"wgmma.mma_async.sync.aligned.{kind} {{{', '.join(self.sums)}}}"

    def run(self, terms: Sequence[Term], adds: bool = False) -> list[Any]:
        """The accumulators after all; adds: to what `begin` has put there, not from zero."""
        self.issue_all(terms, adds)
        return self.collect([_COMMIT, waiting(0)])

    def begin(self, totals: Sequence[Any]) -> None:
        """Put totals into the accumulators."""
        moves = [f"mov.{self._type} {sum}, ${i};" for i, sum in enumerate(self.sums)]
        _assembly(None, list(totals), moves, [self._constraint] * len(totals))

    def issue_all(self, terms: Sequence[Term], adds: bool = False, commit: bool = False) -> None:
        """All instructions, a few at a time."""
        for batch in _batches(terms):
            self.issue(batch, adds, commit)
            adds = True

    def issue_onto(self, terms: Sequence[Term], commit: bool, fresh: bool = False) -> None:
        """All instructions, a few at a time, onto what is in the accumulators, or from zero: a group, or the beginning
        of one."""
        batches = list(_batches(terms))
        for number, batch in enumerate(batches):
            self.issue(batch, number > 0 or not fresh, commit and number == len(batches) - 1)

    def issue(self, batch: Sequence[Term], adds: bool, commit: bool = False) -> None:
        """Some instructions after one fence, the first of which may begin from zero."""
        words = [emit.bitcast(emit.integer(), x) for term in batch for x in term.fragment()]
        lower = f"${len(words)}"
        lines = [".reg .b64 at;", ".reg .pred add;", "wgmma.fence.sync.aligned;"]
        for i, term in enumerate(batch):
            relation = "eq" if i or adds else "ne"  # the first of a sum from zero does not add
            registers = ", ".join(f"${4 * i + r}" for r in range(4))
            lines += [
                f"mov.b64 at, {{{lower}, {_UPPER}}};",
                f"add.s64 at, at, {term.offset // 16};",
                f"setp.{relation}.b32 add, {lower}, {lower};",
                f"{self.multiply}, {{{registers}}}, at, add{self._signs};",
            ]
        lines += [_COMMIT] if commit else []
        _assembly(None, [*words, self.descriptor], ["{", *lines, "}"], ["r"] * (len(words) + 1))

    def collect(self, first: Sequence[str]) -> list[Any]:
        """The accumulators, after some other instructions."""
        return read(self.element, self.sums, first)


def sum_names(element: str, first: int, count: int) -> list[str]:
    """Returns the names of some accumulators of a type in PTX."""
    return [f"{_SUMS[element][0]}{first + i}" for i in range(count)]


def clear(element: str, names: Sequence[str]) -> None:
    """Sets accumulators to zero."""
    _, type_, _ = _SUMS[element]
    zero = "0f00000000" if element == "f32" else "0"
    _assembly(None, [], [f"mov.{type_} {name}, {zero};" for name in names], [])


def read(element: str, names: Sequence[str], first: Sequence[str] = ()) -> list[Any]:
    """Returns what is in accumulators of a type, after some other instructions."""
    _, type_, constraint = _SUMS[element]
    moves = [f"mov.{type_} ${i}, {name};" for i, name in enumerate(names)]
    struct = ir.Type.parse(f"!llvm.struct<({', '.join([element] * len(names))})>")
    result = _assembly(struct, [], [*first, *moves], [f"={constraint}"] * len(names))
    return [llvm.extractvalue(ir.Type.parse(element), result, [i]) for i in range(len(names))]


def add_scaled(
    element: str,
    products: Sequence[str],
    scales: Sequence[Any],
    sums: Sequence[str],
    pending: int,
    outer: Sequence[tuple[Any, Any]] = (),
) -> None:
    """Adds accumulators of a type, times scales if there are any, to others of f32, after a wait for them. outer: two
    numbers for every accumulator, whose product is added to it before."""
    numbers = [number for two in outer for number in two]
    places = {number: f"${i}" for i, number in enumerate(dict.fromkeys([*scales, *numbers]))}
    lines = ["{", ".reg .f32 number;", waiting(pending)]
    for i, (product, sum) in enumerate(zip(products, sums, strict=True)):
        if element == "i32":
            lines.append(f"cvt.rn.f32.s32 number, {product};")
            product = "number"
        if outer:
            left, right = outer[i]
            lines.append(f"fma.rn.f32 number, {places[left]}, {places[right]}, {product};")
            product = "number"
        scaled = f"fma.rn.f32 {sum}, {product}, {places[scales[i]]}, {sum};" if scales else ""
        lines.append(scaled or f"add.rn.f32 {sum}, {sum}, {product};")
    _assembly(None, list(places), [*lines, "}"], ["f"] * len(places))


def add_products(left: Sequence[Any], right: Sequence[Any], sums: Sequence[str]) -> None:
    """Adds products of two numbers to accumulators of f32."""
    places = {number: f"${i}" for i, number in enumerate(dict.fromkeys([*left, *right]))}
    terms = zip(left, right, sums, strict=True)
    lines = [f"fma.rn.f32 {sum}, {places[a]}, {places[b]}, {sum};" for a, b, sum in terms]
    _assembly(None, list(places), lines, ["f"] * len(places))


def wait(pending: int) -> None:
    """Until at most so many groups of instructions are under way."""
    _assembly(None, [], [waiting(pending)], [])


def waiting(pending: int) -> str:
    return f"wgmma.wait_group.sync.aligned {pending};"


def declare_sums(element: str) -> None:
    """The registers of the accumulators of a type, for all instructions of a kernel; at its head."""
    name, type_, _ = _SUMS[element]
    _assembly(None, [], [f".reg .{type_} {name}<{_MOST_SUMS}>;"], [])


def _assembly(result: Any, operands: list[Any], lines: list[str], constraints: list[str]) -> Any:
    return llvm.inline_asm(
        result,
        operands,
        "\n".join(lines),
        ",".join([*constraints, "~{memory}"]),
        has_side_effects=True,
        asm_dialect=0,
    )
