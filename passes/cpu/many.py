"""The program for many tokens: a panel of rows is decoded once into memory and multiplied by all tokens from there.

A thread takes `PANEL` row blocks at a time and goes through k in tiles:

    for every tile of k
        panel [rows, tile] = the weights, as `passes.cpu.dequantize` computes them, in this thread's share of the
            scratch memory, in f32 or bf16
        for every block of tokens, for every few rows
            acc = sum over the tile of panel * x           rows x tokens vectors, in registers
            sums [tokens, rows] += what a vector adds up to
    y = sums + bias

Rows and tokens of a register block are chosen so that a vector load serves two multiply-adds or more. Where the
activation is bf16 and the processor multiplies bf16 (AVX512_BF16), weights are rounded to it, as `dequantize` does, and
take half the time; else they are f32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lowbit.dialect.bindings import arith, ir
from lowbit.dialect.elements import ELEMENTS
from lowbit.dialect.epilogue import HALF
from lowbit.dialect.formats.packing import ROWS
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.cpu.decode import Isa, multiplies_bf16
from lowbit.passes.cpu.dequantize import ChunkDecoder
from lowbit.passes.cpu.epilogue import Epilogue
from lowbit.passes.cpu.outliers import Lines, Outlier, add_to
from lowbit.passes.cpu.prepare import Preparer, Rows
from lowbit.passes.cpu.task import LINE, Needs, round_to_line
from lowbit.passes.cpu.vector_ops import (
    LANES,
    Value,
    add,
    at,
    constant,
    divmod_,
    dot_bf16,
    f32,
    fma,
    i64,
    less,
    load,
    loop,
    mul,
    store,
    sum_each,
    take,
    to_bf16,
    vec,
    when,
)
from lowbit.passes.cpu.weight import Row, Weight
from lowbit.passes.cpu.worker import Ranged, Task, run_function, worker_number

PANEL = 4  # row blocks: x is read from outer caches once for so many
_PANEL_ROWS = PANEL * ROWS
_TILE_BYTES = 4096  # of a row of a tile: those of a register block stay in the first-level cache


@dataclass(frozen=True)
class Blocking:
    """The register block: `rows` by `tokens`, and `rest` tokens for the last ones."""

    rows: int
    tokens: int
    rest: int


_BLOCKINGS: dict[Isa, Blocking] = {
    "avx512": Blocking(4, 6, 4),  # 24 sums of 32 registers
    "avx512bf16": Blocking(4, 6, 4),
}
_SMALL = Blocking(2, 3, 1)  # 12 sums of 16 registers of half a vector


class _Plan:
    """The sizes that follow from spec and processor."""

    def __init__(self, spec: MatmulSpec, isa: Isa) -> None:
        self.rows = Rows(spec, "bf16" if multiplies_bf16(spec, isa) else "f32")
        self.blocking = _BLOCKINGS.get(isa, _SMALL)
        self.bytes = ELEMENTS[self.rows.element].bytes
        chunk_bytes = self.bytes * spec.packing.chunk
        self.chunks = min(spec.packing.chunks, max(1, _TILE_BYTES // chunk_bytes))  # of a tile
        self.row_bytes = round_to_line(self.chunks * chunk_bytes)
        panel = _PANEL_ROWS * self.row_bytes
        block = self.blocking.tokens
        self.needs = Needs(0, PANEL, block, self.rows.nbytes, panel, 4 * _PANEL_ROWS)


def many_needs(spec: MatmulSpec, isa: Isa) -> Needs:
    """A row per token; a panel, and the sums of its rows for every token, per thread."""
    return _Plan(spec, isa).needs


def build_many(spec: MatmulSpec, isa: Isa, scaled: bool = False) -> None:
    """Defines the program in the module at the insertion point. scaled: of an x whose rows have scales."""
    plan = _Plan(spec, isa)
    plan.rows.constants()

    def emit(task: Task) -> tuple[Callable[[Value], None], Ranged]:
        preparer = Preparer(plan.rows)
        weight = Weight(spec, isa, task.weight(spec))
        x, row_bytes = task.array("x"), ELEMENTS[spec.act].bytes * spec.k

        def prepare(token: Value) -> None:
            preparer.token(at(x, mul(token, row_bytes)), task.row(token))

        end = Epilogue(weight, task, scaled)
        return prepare, _Many(weight, plan, task, end).blocks

    run_function(plan.needs, spec.packing.row_blocks, isa, emit)


class _Many:
    """The parts of the work."""

    def __init__(self, weight: Weight, plan: _Plan, task: Task, end: Epilogue) -> None:
        self.weight, self.spec, self.plan, self.task = weight, weight.spec, plan, task
        self.end, self.m = end, task.integer("m")
        self.panel = task.share(worker_number(task))
        self.sums = at(self.panel, byte=_PANEL_ROWS * plan.row_bytes)
        self.decoder = ChunkDecoder(weight)

    def blocks(self, first: Value, last: Value) -> None:
        """The row blocks from `first` up to `last`."""
        chunks = self.spec.packing.chunks
        with loop(first, last, PANEL) as block:
            count = arith.minsi(i64(PANEL), arith.subi(last, block.index))
            self._clear()
            with loop(0, chunks, self.plan.chunks) as tile:
                chunks_here = arith.minsi(i64(self.plan.chunks), arith.subi(i64(chunks), tile.index))
                self._decode(block.index, count, tile.index, chunks_here)
                self._multiply(mul(count, ROWS), tile.index, chunks_here)
            if self.spec.outliers:
                self._add_outliers(block.index, count)
            self._finish(block.index, count)

    def _clear(self) -> None:
        zero = constant(vec(f32()), 0.0)
        with loop(0, mul(self.m, _PANEL_ROWS), LANES) as place:
            store(zero, at(self.sums, mul(place.index, 4)))

    def _decode(self, block: Value, count: Value, chunk: Value, chunks: Value) -> None:
        """A tile of the panel's row blocks."""
        chunk_bytes = self.plan.bytes * self.spec.packing.chunk
        with loop(0, count) as b, loop(0, chunks) as c:
            place = add(mul(mul(b.index, ROWS), self.plan.row_bytes), mul(c.index, chunk_bytes))
            self.decoder.begin(add(block, b.index), add(chunk, c.index))
            with loop(0, ROWS // 2) as g:
                rows = Row.pair(g.index)
                both = [self.decoder.row(add(block, b.index), add(chunk, c.index), row) for row in rows]
                for row, values in zip(rows, both):
                    self._store_row(values, at(at(self.panel, place), mul(row.index, self.plan.row_bytes)))

    def _store_row(self, values: list[Value], target: Value) -> None:
        if self.plan.rows.element == "bf16":
            values = [to_bf16(low, high) for low, high in zip(values[::2], values[1::2])]
        for v, value in enumerate(values):
            store(value, at(target, byte=v * LINE))

    def _multiply(self, rows: Value, chunk: Value, chunks: Value) -> None:
        """The panel by all tokens."""
        shape = self.plan.blocking
        xs = at(self.task.row(i64(0)), mul(chunk, self.plan.bytes * self.spec.packing.chunk))
        nbytes = mul(chunks, self.plan.bytes * self.spec.packing.chunk)
        whole = mul(divmod_(add(self.m, shape.tokens - shape.rest - 1), shape.tokens)[0], shape.tokens)
        with loop(0, whole, shape.tokens) as t:
            self._tokens(rows, xs, nbytes, t.index, shape.tokens)
        with loop(whole, self.m, shape.rest) as t:
            self._tokens(rows, xs, nbytes, t.index, shape.rest)

    def _tokens(self, rows: Value, xs: Value, nbytes: Value, token: Value, count: int) -> None:
        """The panel by `count` tokens."""
        height, stride = self.plan.blocking.rows, self.plan.rows.nbytes
        x = at(xs, mul(token, stride))
        zero = [constant(vec(f32()), 0.0)] * (height * count)
        with loop(0, rows, height) as row:
            panel = at(self.panel, mul(row.index, self.plan.row_bytes))
            with loop(0, nbytes, LINE, carried=zero) as c:
                weights = [self._vector(at(panel, c.index, r * self.plan.row_bytes)) for r in range(height)]
                for t in range(count):
                    activation = self._vector(at(x, c.index, t * stride))
                    for r, weight in enumerate(weights):
                        slot = t * height + r
                        c.carried[slot] = self._multiply_add(weight, activation, c.carried[slot])
            for t in range(count):
                place = at(self.sums, mul(add(mul(add(token, t), _PANEL_ROWS), row.index), 4))
                total = sum_each(c.carried[t * height : (t + 1) * height])
                store(arith.addf(load(total.type, place), total), place)

    def _vector(self, address: Value) -> Value:
        """A cache line of the panel or of x."""
        wide = self.plan.rows.element == "bf16"
        return load(vec(ir.BF16Type.get(), 2 * LANES) if wide else vec(f32()), address)

    def _multiply_add(self, a: Value, b: Value, c: Value) -> Value:
        return dot_bf16(a, b, c) if self.plan.rows.element == "bf16" else fma(a, b, c)

    def _add_outliers(self, block: Value, count: Value) -> None:
        """Adds the products with outliers to the sums of the panel's rows."""
        lines, x = Lines(self.weight, self.task), self.task.array("x")
        with loop(0, count) as b:
            first = mul(b.index, ROWS)

            def visit(outlier: Outlier) -> None:
                row = arith.addi(first, outlier.row)
                with loop(0, self.m) as t:
                    place = at(self.sums, mul(add(mul(t.index, _PANEL_ROWS), row), 4))
                    add_to(place, lines.product(x, t.index, outlier))

            lines.each(add(block, b.index), visit)

    def _finish(self, block: Value, count: Value) -> None:
        """Stores what the epilogue makes of the sums."""
        n = self.spec.n
        with loop(0, self.m) as t, loop(0, count) as b:
            first = mul(add(block, b.index), ROWS)
            sums = at(self.sums, mul(add(mul(t.index, _PANEL_ROWS), mul(b.index, ROWS)), 4))
            left = arith.subi(i64(n), first)
            if n >= ROWS:
                with when(less(i64(ROWS - 1), left)):
                    self._store(load(vec(f32()), sums), t.index, add(block, b.index))
            if n % ROWS:
                with when(less(left, i64(ROWS))), loop(0, left) as row:
                    column = add(first, row.index)
                    total = self.end.scaled(load(f32(), at(sums, mul(row.index, 4))), column, t.index)
                    self.end.store(total, t.index, column)

    def _store(self, sums: Value, token: Value, block: Value) -> None:
        """Stores what the epilogue makes of the 16 rows of a block."""
        sums = self.end.scaled(sums, mul(block, ROWS), token)
        if self.spec.is_gated:
            gate, up = take(sums, range(HALF)), take(sums, range(HALF, ROWS))
            self.end.store(self.end.gated(gate, up), token, mul(block, HALF))
        else:
            self.end.store(sums, token, mul(block, ROWS))
