"""The rules of `lower-tiles` for tiles in registers: views, decoding, arithmetic, mma."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from lowbit.dialect import ops
from lowbit.dialect.bindings import arith, ir
from lowbit.dialect.errors import PassError
from lowbit.dialect.formats.dtypes import DType
from lowbit.dialect.formats.packing import BLOCK_K, ROWS, WORDS_PER_UNIT, Packing, Piece, run_of
from lowbit.dialect.layouts.layout import MMA_M16N8K16_A, Layout
from lowbit.dialect.layouts.shared_memory import BANK_BYTES, BANKS
from lowbit.dialect.types import Reg, format_attr, read_format
from lowbit.passes.lowering import emit
from lowbit.passes.lowering.addressing import Place
from lowbit.passes.lowering.context import Lowering, int_attr, text_attr
from lowbit.passes.lowering.fragment import Fragment, kind_of
from lowbit.passes.lowering.mma import fragment_blocks, lower_mma, lower_offset_sums, lower_row_sums
from lowbit.passes.lowering.wgmma import Products, RowSums, wait


class TileRules(Lowering):
    """One method per operation on tiles: each notes how to make registers, and makes none yet."""

    def _constant(self, op: Any) -> None:
        reg = Reg.of(op.result.type)
        value = float(ir.FloatAttr(op.value).value)
        fragment = Fragment(reg, kind_of(reg), lambda i: emit.real(value, fragment.type()))
        if "lower" in op.operation.attributes:
            lower = float(ir.FloatAttr(op.operation.attributes["lower"]).value)
            below = reg.layout.table()[..., -2] // (ROWS // 2) % 2
            if (below != below[0]).any():
                raise PassError("lower-tiles: a constant with another value below needs eight rows to a register")
            fragment = Fragment(reg, "scalar", lambda i: emit.real(lower if below[0, i] else value, fragment.type()))
        self.values[op.result] = fragment

    def _splat(self, op: Any) -> None:
        reg = Reg.of(op.result.type)
        value = self.values[op.value]
        if reg.element != "f32":
            value = arith.truncf(ir.Type.parse(str(reg.element)), value)
        self.values[op.result] = Fragment(reg, "scalar", lambda i: value)

    def _view(self, op: Any) -> None:
        source: Fragment = self.values[op.source]
        reg = Reg.of(op.result.type)
        if isinstance(reg.element, DType) or source.kind == "word":
            if source.kind != "word":
                raise PassError(f"lower-tiles: only words can be viewed as {reg.element}, not {source.reg.element}")
            self.values[op.result] = Fragment(reg, "word", source.register)
        elif source.reg.element == reg.element:
            self.values[op.result] = Fragment(reg, source.kind, source.register)
        else:
            raise PassError(f"lower-tiles: no view of {source.reg.element} as {reg.element}")

    def _decode(self, op: Any) -> None:
        """Registers of A fragments from the words of a lane: `dialect.formats.packing` says where each is."""
        codes: Fragment = self.values[op.source]
        reg, format_ = Reg.of(op.result.type), codes.reg.element
        if not isinstance(format_, DType):
            raise PassError(f"lower-tiles: nothing to decode in {format_}")
        extras = [name for name in ("deferred_offset", "raw") if name in op.operation.attributes]

        shifts = [_pairs(f, f.reg.layout.slots_for(reg.layout)) for f in (self.values[v] for v in op.shifts)]
        columns = [column for _, column in fragment_blocks(reg.layout, MMA_M16N8K16_A)]

        def shift(i: int) -> Any:
            """What is added to pair i."""
            return shifts[columns[i // 4] * len(shifts) // (1 + max(columns))](i)

        def decode(i: int, words: list[Any], register: Any, vector: Any) -> Any:
            rest = words, format_attr(format_), register, op.exponent, vector
            if shifts:
                return ops.DecodeShiftedPairOp(shift(i), *rest).result
            pair = ops.DecodePairOp(*rest)
            for name in extras:
                pair.operation.attributes[name] = ir.UnitAttr.get()
            return pair.result

        self.values[op.result] = _pairs_of_words(codes, reg, format_, decode)

    def _lookup(self, op: Any) -> None:
        """The same from a table in shared memory."""
        codes: Fragment = self.values[op.source]
        reg, format_ = Reg.of(op.result.type), codes.reg.element
        if not isinstance(format_, DType):
            raise PassError(f"lower-tiles: nothing to look up in {format_}")
        table: Place = self.values[op.table]

        def look_up(_: int, words: list[Any], register: Any, vector: Any) -> Any:
            lane = self.threads.digit(BANKS, 1, self.threads_per_block)
            column = arith.muli(lane, emit.constant(BANK_BYTES))
            return ops.LookupPairOp(table.base, column, words, format_attr(format_), register, vector).result

        self.values[op.result] = _pairs_of_words(codes, reg, format_, look_up)

    def _encode(self, op: Any) -> None:
        """Words of a lane from its codes: the inverse of where `_decode` looks for them."""
        numbers: Fragment = self.values[op.source]
        reg = Reg.of(op.result.type)
        format_ = reg.element
        if not isinstance(format_, DType):
            raise PassError(f"lower-tiles: {format_} is no low-bit format to encode in")
        held: dict[int, list[tuple[int, Piece]]] = {}  # word -> registers with a piece in it
        for i, (first, register) in enumerate(_places(format_, reg.layout)):
            for piece in run_of(format_.bits)[register]:
                held.setdefault(first + piece.word, []).append((i, piece))
        sign = 1 << (format_.bits - 1) if format_.kind == "int" else 0  # to offset binary

        def make(word: int) -> Any:
            total = emit.constant(0)
            for (i, piece), half in itertools.product(held[word], range(2)):
                code = arith.extui(emit.integer(), numbers.scalar(2 * i + half))
                if sign:
                    code = arith.xori(code, emit.constant(sign))
                bits = emit.mask(emit.shift_right(code, piece.low), (1 << piece.bits) - 1)
                total = arith.ori(total, emit.shift_right(bits, -(piece.shift + 16 * half)))
            return total

        self.values[op.result] = Fragment(reg, "word", make)

    def _slice(self, op: Any) -> None:
        source: Fragment = self.values[op.source]
        reg = Reg.of(op.result.type)
        dim = int_attr(op, "dim")
        _, slots = source.reg.layout.restrict(dim, int_attr(op, "start"), reg.shape[dim])
        self.values[op.result] = self._picked(source, reg, slots)

    def _picked(self, source: Fragment, reg: Reg, slots: Sequence[int]) -> Fragment:
        """The tile whose slot i is the source's slots[i]; pairs stay pairs where they stay together."""
        paired = source.kind == "pair" and all(
            a % 2 == 0 and b == a + 1 for a, b in zip(slots[::2], slots[1::2], strict=True)
        )
        if paired:
            return Fragment(reg, "pair", lambda i: source.register(slots[2 * i] // 2))
        return Fragment(reg, "scalar", lambda i: source.scalar(slots[i]))

    def _reshape(self, op: Any) -> None:
        source: Fragment = self.values[op.source]
        self.values[op.result] = Fragment(Reg.of(op.result.type), source.kind, source.register)

    def _cast(self, op: Any) -> None:
        source: Fragment = self.values[op.source]
        reg, kind = Reg.of(op.result.type), text_attr(op, "kind")
        to = ir.Type.parse(str(reg.element))

        def make(slot: int) -> Any:
            x = source.scalar(slot)
            if kind == "float":
                return arith.extf(to, x) if to == ir.F32Type.get() else arith.truncf(to, x)
            wide = arith.extui(emit.integer(), x)
            if kind == "unsigned":
                return arith.uitofp(to, wide)
            return emit.from_e4m3(wide) if kind == "e4m3" else emit.from_e8m0(wide)

        self.values[op.result] = Fragment(reg, "scalar", make)

    def _elementwise(self, op: Any, make: Callable[..., Any]) -> None:
        reg = Reg.of(op.result.type)
        operands: list[Fragment] = [self.values[v] for v in op.operation.operands]
        slots = [f.reg.layout.slots_for(reg.layout) for f in operands]
        single = next((f for f in operands if isinstance(f, Products) and f.rows == 1), None)
        before = [f for f in operands if single is not None and f.count < single.count]

        def scalar(i: int) -> Any:
            for f in before:  # what scales a product is read before it, not when it has been waited for
                f.force()
            return make(*[f.scalar(s[i]) for f, s in zip(operands, slots)])

        result = Fragment(reg, "scalar", scalar)
        if kind_of(reg) == "pair" and all(_pairs_up(s) for s in slots):
            pairs = [_pairs(f, s) for f, s in zip(operands, slots)]
            result = Fragment(reg, "pair", lambda i: make(*[pair(i) for pair in pairs]))
        if self.sum in operands:
            self.sum = result
        self.values[op.result] = result

    def _mma(self, op: Any) -> None:
        a, b, c = (self.values[v] for v in (op.a, op.b, op.c))
        self.values[op.result] = lower_mma(a, b, c)

    def _warpgroup_mma(self, op: Any) -> None:
        self._require(self.target.has_wgmma, "lowbit.warpgroup_mma", "sm_90a")
        a, b, c = (self.values[v] for v in (op.a, op.b, op.c))
        operands, reg = [(a, int_attr(op, "start"))], Reg.of(op.result.type)
        if "overlap" in op.operation.attributes:
            products = self._started(op, operands, b)
        elif isinstance(c, Products) and c is self.sum and c in self.reads and c.b is b:  # not written yet: a chain
            self.reads.remove(c)
            products = Products(self.threads, [*c.operands, *operands], b, c.c, reg, written=c.written)
        else:
            self._finish_sums()
            products = Products(self.threads, operands, b, None if _is_zero(op.c) else c, reg)
        if self.row_sums is not None and self.row_sums.behind is None:
            self.row_sums.behind = products
        self.sum = products
        self.reads.append(products)
        self.values[op.result] = products

    def _started(self, op: Any, operands: list[tuple[Fragment, int]], b: Place) -> Products:
        """Products under way, while the last such may still be, which are waited for after a few instructions."""
        last, reg = self.last_started, Reg.of(op.result.type)
        products = Products(self.threads, operands, b, None, reg, bank=0 if last is not None and last.bank else 1)
        if not _is_zero(op.c) or products.rows > 1:
            raise PassError("lower-tiles: products overlap that start from zero and have one row of fragments")

        def finish_last() -> None:
            if last is not None and last in self.reads:  # not written down yet
                wait(1)
                last.waited_for = True
            self._finish_sums()

        products.start(finish_last)
        self.last_started = products
        return products

    def _warpgroup_row_sums(self, op: Any) -> None:
        self._require(self.target.has_wgmma, "lowbit.warpgroup_row_sums", "sm_90a")
        self._finish_sums()
        if self.row_sums is not None:
            self.row_sums.force()  # whose accumulators these take
        reg, columns = Reg.of(op.result.type), int_attr(op, "columns")
        self.row_sums = RowSums(self.threads, self.values[op.b], int_attr(op, "start"), columns, reg)
        self.reads.append(self.row_sums)
        self.values[op.result] = self.row_sums

    def _row_sums(self, op: Any) -> None:
        self.values[op.result] = lower_row_sums(self.values[op.source], Reg.of(op.result.type))

    def _offset_sums(self, op: Any) -> None:
        reg, start = Reg.of(op.result.type), int_attr(op, "start")
        self.values[op.result] = lower_offset_sums(self.values[op.source], reg, read_format(op.format), start)

    def _reduce(self, op: Any) -> None:
        source: Fragment = self.values[op.source]
        reg = Reg.of(op.result.type)
        members: dict[int, list[int]] = {}
        for slot, into in enumerate(reg.layout.slots_for(source.reg.layout)):
            members.setdefault(into, []).append(slot)

        def make(i: int) -> Any:
            total = source.scalar(members[i][0])
            for slot in members[i][1:]:
                total = arith.addf(total, source.scalar(slot))
            return total

        self.values[op.result] = Fragment(reg, "scalar", make)


def _pairs_up(slots: Sequence[int]) -> bool:
    """Whether every two slots are a pair of the source, or the same element twice."""
    return all(b == a or (a % 2 == 0 and b == a + 1) for a, b in zip(slots[::2], slots[1::2], strict=True))


def _pairs(source: Fragment, slots: Sequence[int]) -> Callable[[int], Any]:
    """Pair i of these slots; an element that stands for many is written down twice over once."""
    doubled: dict[int, Any] = {}

    def pair(i: int) -> Any:
        a, b = slots[2 * i], slots[2 * i + 1]
        if a != b:
            return source.pair(a // 2)
        if a not in doubled:
            doubled[a] = emit.pair(source.scalar(a), source.scalar(a))
        return doubled[a]

    return pair


def _is_zero(value: Any) -> bool:
    """Whether a tile is the constant 0."""
    owner = value.owner
    return (
        not isinstance(owner, ir.Block)
        and owner.name == "lowbit.constant"
        and ir.FloatAttr(owner.attributes["value"]).value == 0.0
    )


def _pairs_of_words(
    codes: Fragment, reg: Reg, format_: DType, make: Callable[[int, list[Any], Any, Any], Any]
) -> Fragment:
    """Registers of A fragments: make(i, words, number in the run, type) of register i, from the words of its pieces."""
    places, run = _places(format_, reg.layout), run_of(format_.bits)
    vector = ir.VectorType.get([2], ir.Type.parse(str(reg.element)))

    def pair(i: int) -> Any:
        first, register = places[i]
        words = [codes.register(first + piece.word) for piece in run[register]]
        return make(i, words, ir.IntegerAttr.get(emit.integer(64), register), vector)

    return Fragment(reg, "pair", pair)


def _places(format_: DType, layout: Layout) -> list[tuple[int, int]]:
    """For every register (a pair of codes) of a thread: which of the thread's words begins its run, and its
    number in the run."""
    blocks = fragment_blocks(layout, MMA_M16N8K16_A)
    packing = Packing(format_.bits, ROWS, BLOCK_K * (1 + max(column for _, column in blocks)))  # of one warp
    places: list[tuple[int, int]] = []
    for row_block, k_block in blocks:
        chunk, block = divmod(k_block, packing.chunk // BLOCK_K)
        first = (row_block * packing.chunks + chunk) * packing.units * WORDS_PER_UNIT
        for register in range(4):
            word, number = packing.place(block, register)
            places.append((first + word, number))
    return places
