"""The program for few tokens: a row of codes is decoded in registers and multiplied by up to four tokens at once.

For every row block, for 4 tokens (that share a decode) or 1, for every tile of k, for every row (for 1 token and
`MatmulSpec.invariant` four rows at once, so that each has as many registers of sums as with 4 tokens):

    acc[t]    = sum over the tile of code * xs[t]     a vector of 16 columns, in registers
    total[t] += scale * acc[t]                        16 rows of vectors, in the first-level cache

and, for the 16 rows at once, offset[t] += (offset - scale * zero) * sums[t]. Where groups are smaller than a chunk, acc
is split by group. Codes are exact; `products` says how they meet x.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lowbit.dialect.bindings import arith
from lowbit.dialect.elements import ELEMENTS
from lowbit.dialect.epilogue import HALF
from lowbit.dialect.fields import MOST
from lowbit.dialect.formats.packing import ROWS
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.cpu.decode import Isa
from lowbit.passes.cpu.epilogue import Epilogue
from lowbit.passes.cpu.outliers import Lines, Outlier, add_to
from lowbit.passes.cpu.prepare import Preparer
from lowbit.passes.cpu.products import Products, products_of
from lowbit.passes.cpu.task import LINE, Needs
from lowbit.passes.cpu.vector_ops import (
    Value,
    add,
    at,
    broadcast,
    constant,
    divmod_,
    f32,
    fma,
    i64,
    less,
    load,
    loop,
    mul,
    scratch,
    store,
    sum_of,
    vec,
    when,
)
from lowbit.passes.cpu.weight import VECTOR_BYTES, Row, RowValues, Weight
from lowbit.passes.cpu.worker import Ranged, Task, run_function

TOKENS = 4  # that share a decode


def few_needs(spec: MatmulSpec, isa: Isa) -> Needs:
    """A row per token; a last block of 2 or 3 tokens is filled up to 4. See docs/cpu.md for the numbers of tokens. It
    multiplies codes: where weights are rounded, it serves no tokens."""
    if spec.folds:
        return Needs()
    products = products_of(spec, isa)
    return Needs(MOST if spec.invariant else products.most, block=TOKENS, per_token=products.rows.nbytes)


def build_few(spec: MatmulSpec, isa: Isa, scaled: bool = False) -> None:
    """Defines the program in the module at the insertion point. scaled: of an x whose rows have scales."""
    products = products_of(spec, isa)
    products.rows.constants()

    def emit(task: Task) -> tuple[Callable[[Value], None], Ranged]:
        preparer = Preparer(products.rows)
        weight = Weight(spec, isa, task.weight(spec))
        end = Epilogue(weight, task, scaled)
        kernel = _Matmul(weight, products, task, end)
        x, row_bytes = task.array("x"), ELEMENTS[spec.act].bytes * spec.k

        def prepare(token: Value) -> None:
            preparer.token(at(x, mul(token, row_bytes)), task.row(token))

        return prepare, kernel.blocks

    run_function(few_needs(spec, isa), spec.packing.row_blocks, isa, emit)


class _Matmul:
    """The parts of the work. `count` is how many tokens share a decode."""

    def __init__(self, weight: Weight, products: Products, task: Task, end: Epilogue) -> None:
        self.weight, self.spec, self.tiling = weight, weight.spec, weight.tiling
        self.products, self.rows, self.task = products, products.rows, task
        self.end, self.m = end, task.integer("m")
        self.has_offset = self.rows.sums
        self.totals = scratch(ROWS * TOKENS * VECTOR_BYTES)
        self.offsets = scratch(TOKENS * VECTOR_BYTES)
        self.scales = [RowValues(self.tiling.groups) for _ in range(TOKENS if self.rows.units else 1)]

    def blocks(self, first: Value, last: Value) -> None:
        """The row blocks from `first` up to `last`."""
        whole = mul(divmod_(add(self.m, TOKENS - 2), TOKENS)[0], TOKENS)
        with loop(first, last) as block:
            with loop(0, whole, TOKENS) as t:
                self.tokens(block.index, t.index, TOKENS)
            with loop(whole, self.m) as t:
                self.tokens(block.index, t.index, 1)

    def tokens(self, block: Value, token: Value, count: int) -> None:
        """y of 16 rows and `count` tokens."""
        zero = constant(vec(f32()), 0.0)
        with loop(0, ROWS * count) as r:
            store(zero, at(self.totals, mul(r.index, VECTOR_BYTES)))
        xs = self.task.row(token)
        with loop(0, self.tiling.spans, carried=[zero] * count if self.has_offset else []) as span:
            group = mul(span.index, self.tiling.groups)
            scales = [self.weight.scales(block, add(group, g)) for g in range(self.tiling.groups)]
            if not self.rows.units:
                self.scales[0].put(scales)
            for g, scale in enumerate(scales):
                shift = self.weight.shifts(scale, block, add(group, g), self.products.low)
                if shift is not None:
                    for t in range(count):
                        total = load(f32(), at(xs, mul(group, 4), t * self.rows.nbytes + self.rows.sums_at + 4 * g))
                        span.carried[t] = fma(shift, broadcast(total), span.carried[t])
            with loop(0, self.tiling.tiles) as tile:
                number = add(mul(span.index, self.tiling.tiles), tile.index)
                chunk = mul(number, self.tiling.chunks)
                if self.rows.units:
                    for t in range(count):
                        units = at(xs, mul(number, 4 * self.tiling.groups), t * self.rows.nbytes + self.rows.units_at)
                        self.scales[t].put(self._in_units(scales, units))
                pairs = 2 if count == 1 and self.spec.invariant else 1
                with loop(0, ROWS // 2, pairs) as g:
                    rows = [row for pair in range(pairs) for row in Row.pair(add(g.index, pair))]
                    for together in [rows] if count == 1 else [[row] for row in rows]:
                        self._rows(xs, block, chunk, together, count)
        for t, offset in enumerate(span.carried):
            store(offset, at(self.offsets, byte=t * VECTOR_BYTES))
        if self.spec.outliers:
            self._add_outliers(block, token, count)
        self._finish(block, token, count)

    def _in_units(self, scales: Sequence[Value], units: Value) -> list[Value]:
        """Returns the scales of a tile's groups times the units of x there."""
        each = [load(f32(), at(units, byte=4 * g)) for g in range(len(scales))]
        return [arith.mulf(scale, broadcast(unit)) for scale, unit in zip(scales, each)]

    def _rows(self, xs: Value, block: Value, first: Value, rows: Sequence[Row], count: int) -> None:
        """Adds the tile that begins with chunk `first` to the totals of some rows."""
        zero = [self.products.zero()] * self.products.sums
        classes = self._vectors_by_group()
        if self.tiling.groups == 1:
            ((groups, vectors),) = classes.items()
            with loop(0, self.tiling.chunks, carried=zero, unroll=True) as c:
                c.carried = self._multiply(xs, block, add(first, c.index), rows, count, vectors, c.carried)
            self._update(rows, groups, c.carried, count)
        else:
            for groups, vectors in classes.items():
                sums = self._multiply(xs, block, first, rows, count, vectors, zero)
                self._update(rows, groups, sums, count)

    def _vectors_by_group(self) -> dict[tuple[int, ...], list[int]]:
        """The vectors of a chunk, by the groups of their elements."""
        result = dict[tuple[int, ...], list[int]]()
        for number, groups in enumerate(self.products.groups(self.weight.map)):
            result.setdefault(groups, []).append(number)
        return result

    def _multiply(
        self,
        xs: Value,
        block: Value,
        chunk: Value,
        rows: Sequence[Row],
        count: int,
        vectors: Sequence[int],
        sums: Sequence[Value],
    ) -> list[Value]:
        """Adds code * x of some vectors of a chunk to the sums. Every row has a share of them, and token t
        every count-th of that share."""
        result = list(sums)
        readers = [self.weight.chunk(block, chunk, row) for row in rows]
        share = len(sums) // len(rows)
        x = at(xs, mul(chunk, self.rows.bytes * self.spec.packing.chunk))
        for n, number in enumerate(vectors):
            for r, reader in enumerate(readers):
                codes = self.products.codes(reader, number)
                for t in range(count):
                    place = at(x, byte=t * self.rows.nbytes + number * LINE)
                    slot = r * share + (n * count + t) % share
                    result[slot] = self.products.multiply_add(codes, load(codes.type, place), result[slot])
        return result

    def _update(self, rows: Sequence[Row], groups: Sequence[int], sums: Sequence[Value], count: int) -> None:
        """totals += scale * sums."""
        share = len(sums) // len(rows)
        for r, row in enumerate(rows):
            scales = [values.spread(row.index, groups) for values in self.scales[:count]]
            for t in range(count):
                total = self.products.total(sums[r * share + t : (r + 1) * share : count], self.weight.map)
                place = at(self.totals, mul(row.index, count * VECTOR_BYTES), t * VECTOR_BYTES)
                store(fma(total, scales[t % len(scales)], load(vec(f32()), place)), place)

    def _add_outliers(self, block: Value, token: Value, count: int) -> None:
        """Adds the products with outliers to the first sum of each row; tokens beyond the last read the last."""
        lines = Lines(self.weight, self.task)
        x, last = self.task.array("x"), arith.subi(self.m, i64(1))

        def visit(outlier: Outlier) -> None:
            for t in range(count):
                product = lines.product(x, arith.minsi(add(token, t), last), outlier)
                add_to(at(self.totals, mul(outlier.row, count * VECTOR_BYTES), t * VECTOR_BYTES), product)

        lines.each(block, visit)

    def _finish(self, block: Value, token: Value, count: int) -> None:
        """Sums the vectors, adds offset and bias, and stores what the epilogue makes of them."""
        spec, first = self.spec, mul(block, ROWS)
        if spec.is_gated:
            with loop(0, HALF) as row:
                for t in range(count):
                    gate, up = (self._sum(first, add(row.index, half), token, t, count) for half in (0, HALF))
                    self._store(self.end.gated(gate, up), add(token, t), add(mul(block, HALF), row.index))
            return
        with loop(0, arith.minsi(i64(ROWS), arith.subi(i64(spec.n), first))) as row:
            for t in range(count):
                self._store(self._sum(first, row.index, token, t, count), add(token, t), add(first, row.index))

    def _sum(self, first: Value, row: Value, token: Value, t: int, count: int) -> Value:
        """The sum of a row of the block that begins with row `first`, and of token `token + t`, scaled and with its
        bias."""
        place = at(self.totals, mul(row, count * VECTOR_BYTES), t * VECTOR_BYTES)
        result = sum_of(load(vec(f32()), place))
        if self.has_offset:
            result = arith.addf(result, load(f32(), at(self.offsets, mul(row, 4), t * VECTOR_BYTES)))
        return self.end.scaled(result, add(first, row), token, t)

    def _store(self, number: Value, token: Value, column: Value) -> None:
        """Stores a number of y, unless its token is beyond the last."""
        with when(less(token, self.m)):
            self.end.store(number, token, column)
