"""The CPU target: a `MatmulSpec` to vector code for the host. The weight in memory is the one that GPUs read.

Three functions; pointers are to contiguous arrays, first and last are i64:

    lowbit_prepare(x, xs, sums, first, last)                              tokens first .. last-1
    lowbit_matmul(xs, sums, weight..., y, m, first, last)                 row blocks first .. last-1
    lowbit_dequantize(weight..., w, first, last)                          row blocks first .. last-1

`weight...` are the tensors of `spec.tensors` in their order.

prepare     x[t] in f32, in the order of the decoded vectors (`ChunkMap.columns`), group padding as zeros:
            xs f32 [prepared_tokens(m), padded k]; and the sums of x over every group:
            sums f32 [prepared_tokens(m), groups].
matmul      for every row block, for 4 tokens (that share a decode) or 1, for every tile of k, for every row:

                acc[t]    = sum over the tile of code * xs[t]     a vector of 16 columns, in registers
                total[t] += scale * acc[t]                        16 rows of vectors, in the first-level cache

            and, for the 16 rows at once, offset[t] -= scale * zero * sums[t]. Where groups are smaller than a
            chunk, acc is split by group.
dequantize  w [n, k] in the activation's type: scale * (value - zero) in f32, rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from lowbit.dialect.bindings import arith, func, ir, llvm, passmanager, vector
from lowbit.dialect.formats.packing import ROWS
from lowbit.dialect.spec import BYTES, MatmulSpec
from lowbit.passes.cpu.decode import TABLE, ChunkMap, ChunkReader, Isa
from lowbit.passes.cpu.vector_ops import (
    LANES,
    Value,
    add,
    at,
    broadcast,
    constant,
    divmod_,
    f32,
    fma,
    gather,
    i,
    i64,
    less,
    load,
    loop,
    mul,
    pointer,
    scalar_type,
    scratch,
    store,
    vec,
    when,
)
from lowbit.passes.cpu.weight import VECTOR_BYTES, Row, RowValues, Tiling, Weight

TOKENS = 4  # that share a decode
# Vectors that a tile is added up in: 8 of the 16 registers of AVX2. A multiply-add takes 4 cycles and 2 start
# in every one, so fewer would wait for each other. 4 tokens of a row, or 2 of each of two rows.
_SUMS = 4
_LOWERING = (
    "builtin.module(arith-expand{include-bf16=true},canonicalize,cse,convert-scf-to-cf,"
    "convert-vector-to-llvm{reassociate-fp-reductions=true},convert-arith-to-llvm,convert-func-to-llvm,"
    "convert-cf-to-llvm,convert-ub-to-llvm,reconcile-unrealized-casts)"
)
_COLUMN, _PLACE, _FACTOR = "lowbit_column", "lowbit_place", "lowbit_factor"


def prepared_tokens(m: int) -> int:
    """Rows of the prepared activation of m tokens: a last block of 2 or 3 is filled up to 4."""
    return m if m % TOKENS <= 1 else m + TOKENS - m % TOKENS


def build_cpu_matmul(spec: MatmulSpec, isa: Isa = "generic") -> ir.Module:
    """lowbit_prepare and lowbit_matmul in the func, scf, arith, vector and llvm dialects. Needs a context."""
    return _build(spec, lambda: (_prepare(spec), _matmul(spec, isa)))


def build_cpu_dequantize(spec: MatmulSpec, isa: Isa = "generic") -> ir.Module:
    """lowbit_dequantize, likewise."""
    return _build(spec, lambda: _dequantize(spec, isa))


def _build(spec: MatmulSpec, functions: Callable[[], object]) -> ir.Module:
    module = ir.Module.create()
    with ir.InsertionPoint(module.body):
        _constants(spec)
        functions()
    module.operation.verify()
    return module


def lower_cpu_to_llvm(module: ir.Module) -> ir.Module:
    """One of these modules in the llvm dialect alone; changed in place."""
    passmanager.PassManager.parse(_LOWERING).run(module.operation)
    return module


def _function(name: str, pointers: int, integers: int) -> tuple[list[Value], ir.InsertionPoint]:
    """A function without results; its arguments, and its end. No two of its arrays overlap."""
    types = [pointer()] * pointers + [i(64)] * integers
    op = func.FuncOp(name, (types, []))
    noalias = ir.DictAttr.get({"llvm.noalias": ir.UnitAttr.get()})
    op.arg_attrs = ir.ArrayAttr.get([noalias] * pointers + [ir.DictAttr.get({})] * integers)
    block = op.add_entry_block()
    with ir.InsertionPoint(block):
        end = func.ReturnOp([])
    return list(block.arguments), ir.InsertionPoint(end)


def _constants(spec: MatmulSpec) -> None:
    """For every place in a prepared chunk its column and factor; for every column its place; the table."""
    chunk_map = ChunkMap(spec.packing, spec.dtype)
    columns = chunk_map.columns.ravel()
    _constant_array(_COLUMN, i(32), columns.astype(np.int32))
    _constant_array(_PLACE, i(32), np.argsort(columns).astype(np.int32))
    _constant_array(_FACTOR, f32(), np.repeat(np.exp2(chunk_map.exponents.ravel()), LANES).astype(np.float32))
    if spec.dtype.kind == "table":
        _constant_array(TABLE, f32(), spec.dtype.values().astype(np.float32))


def _constant_array(name: str, element: ir.Type, values: NDArray[np.int32] | NDArray[np.float32]) -> None:
    array = ir.Type.parse(f"!llvm.array<{len(values)} x {element}>")
    data = ir.DenseElementsAttr.get(values, type=ir.RankedTensorType.get([len(values)], element))
    llvm.mlir_global(array, name, ir.Attribute.parse("#llvm.linkage<private>"), constant=True, value=data)


def _look_up(name: str, element: ir.Type, index: Value) -> Value:
    return load(element, at(llvm.mlir_addressof(pointer(), name), mul(index, 4)))


def _prepare(spec: MatmulSpec) -> None:
    p = spec.packing
    (x, xs, sums, first, last), body = _function("lowbit_prepare", 3, 2)
    with body:
        row = scratch(4 * p.padded_k)
        zero = constant(f32(), 0.0)
        with loop(0, p.padded_k) as c:
            store(zero, at(row, mul(c.index, 4)))
        with loop(first, last) as t:
            source = at(x, mul(t.index, BYTES[spec.act] * spec.k))
            total = at(sums, mul(t.index, 4 * p.groups))
            with loop(0, spec.groups) as group:
                store(_prepare_group(spec, source, row, group.index), at(total, mul(group.index, 4)))
            with loop(spec.groups, p.groups) as group:
                store(zero, at(total, mul(group.index, 4)))
            target = at(xs, mul(t.index, 4 * p.padded_k))
            with loop(0, p.padded_k, p.chunk) as chunk, loop(0, p.chunk, LANES) as c:
                values = gather(at(row, mul(chunk.index, 4)), _look_up(_COLUMN, vec(i(32)), c.index))
                values = arith.mulf(values, _look_up(_FACTOR, vec(f32()), c.index))
                store(values, at(target, mul(add(chunk.index, c.index), 4)))


def _prepare_group(spec: MatmulSpec, source: Value, row: Value, group: Value) -> Value:
    """Copies a group of x in f32 to its columns in memory; returns its sum."""
    act, size = scalar_type(spec.act), spec.group_size or spec.k
    source = at(source, mul(group, BYTES[spec.act] * size))
    row = at(row, mul(group, 4 * Tiling(spec).group))
    tail = size % LANES

    def copy(type_: ir.Type, result: ir.Type, start: int, stop: int, step: int, total: Value) -> Value:
        with loop(start, stop, step, carried=[total]) as c:
            values = arith.extf(result, load(type_, at(source, mul(c.index, BYTES[spec.act]))))
            store(values, at(row, mul(c.index, 4)))
            c.carried = [arith.addf(c.carried[0], values)]
        return c.carried[0]

    sums = copy(vec(act), vec(f32()), 0, size - tail, LANES, constant(vec(f32()), 0.0))
    total = _sum(sums)
    return copy(act, f32(), size - tail, size, 1, total) if tail else total


def _sum(values: Value) -> Value:
    """Of a vector's elements, in any order."""
    return vector.reduction(f32(), vector.CombiningKind.ADD, values, fastmath=arith.FastMathFlags.reassoc)


def _matmul(spec: MatmulSpec, isa: Isa) -> None:
    (xs, sums, *arrays, y, m, first, last), body = _function("lowbit_matmul", 3 + len(spec.tensors), 3)
    with body:
        kernel = _Matmul(Weight(spec, isa, arrays), xs, sums, y, m)
        whole = mul(divmod_(add(m, TOKENS - 2), TOKENS)[0], TOKENS)
        with loop(first, last) as block:
            with loop(0, whole, TOKENS) as t:
                kernel.tokens(block.index, t.index, TOKENS)
            with loop(whole, m) as t:
                kernel.tokens(block.index, t.index, 1)


class _Matmul:
    """The inside of lowbit_matmul. `count` is how many tokens share a decode."""

    def __init__(self, weight: Weight, xs: Value, sums: Value, y: Value, m: Value) -> None:
        self.weight, self.spec, self.tiling = weight, weight.spec, weight.tiling
        self.xs, self.sums, self.y, self.m = xs, sums, y, m
        self.has_offset = self.spec.zero_kind is not None or weight.low != 0
        self.totals = scratch(ROWS * TOKENS * VECTOR_BYTES)
        self.offsets = scratch(TOKENS * VECTOR_BYTES)
        self.scales = RowValues(self.tiling.groups)

    def tokens(self, block: Value, token: Value, count: int) -> None:
        """y of 16 rows and `count` tokens."""
        p, zero = self.spec.packing, constant(vec(f32()), 0.0)
        with loop(0, ROWS * count) as r:
            store(zero, at(self.totals, mul(r.index, VECTOR_BYTES)))
        xs = at(self.xs, mul(token, 4 * p.padded_k))
        sums = at(self.sums, mul(token, 4 * p.groups))
        with loop(0, self.tiling.spans, carried=[zero] * count if self.has_offset else []) as span:
            group = mul(span.index, self.tiling.groups)
            for g in range(self.tiling.groups):
                scale = self.weight.scales(block, add(group, g))
                self.scales.put(g, scale)
                offset = self.weight.offsets(block, add(group, g))
                if offset is not None:
                    scaled = arith.mulf(scale, offset)
                    for t in range(count):
                        total = load(f32(), at(sums, mul(group, 4), 4 * (t * p.groups + g)))
                        span.carried[t] = fma(scaled, broadcast(total), span.carried[t])
            with loop(0, self.tiling.tiles) as tile:
                chunk = mul(add(mul(span.index, self.tiling.tiles), tile.index), self.tiling.chunks)
                with loop(0, ROWS // 2) as g:
                    rows = Row.pair(g.index)
                    for together in [rows] if count == 1 else [[row] for row in rows]:
                        self._rows(xs, block, chunk, together, count)
        for t, offset in enumerate(span.carried):
            store(offset, at(self.offsets, byte=t * VECTOR_BYTES))
        self._finish(block, token, count)

    def _rows(self, xs: Value, block: Value, first: Value, rows: Sequence[Row], count: int) -> None:
        """Adds the tile that begins with chunk `first` to the totals of some rows."""
        zero = [constant(vec(f32()), 0.0)] * _SUMS
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

    def _vectors_by_group(self) -> dict[tuple[int, ...], list[tuple[int, int]]]:
        """The decoded vectors (step, which) of a chunk, by the groups of their elements."""
        result: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        for step in range(self.weight.map.steps):
            for which in (0, 1):
                result.setdefault(self.weight.map.groups(step, which), []).append((step, which))
        return result

    def _multiply(
        self,
        xs: Value,
        block: Value,
        chunk: Value,
        rows: Sequence[Row],
        count: int,
        vectors: Sequence[tuple[int, int]],
        sums: Sequence[Value],
    ) -> list[Value]:
        """Adds code * x of some vectors of a chunk to the sums. Every row has a share of them, and token t
        every count-th of that share."""
        p, result = self.spec.packing, list(sums)
        readers = [self.weight.chunk(block, chunk, row) for row in rows]
        share = len(sums) // len(rows)
        x = at(xs, mul(chunk, 4 * p.chunk))
        for n, (step, which) in enumerate(vectors):
            for r, reader in enumerate(readers):
                values = reader.vectors(step)[which]
                for t in range(count):
                    place = at(x, byte=4 * t * p.padded_k + (2 * step + which) * VECTOR_BYTES)
                    slot = r * share + (n * count + t) % share
                    result[slot] = fma(values, load(vec(f32()), place), result[slot])
        return result

    def _update(self, rows: Sequence[Row], groups: Sequence[int], sums: Sequence[Value], count: int) -> None:
        """totals += scale * sums."""
        share = len(sums) // len(rows)
        for r, row in enumerate(rows):
            scale = self.scales.spread(row.index, groups)
            for t in range(count):
                mine = list(sums[r * share + t : (r + 1) * share : count])
                while len(mine) > 1:
                    mine = [arith.addf(a, b) for a, b in zip(mine[::2], mine[1::2])]
                place = at(self.totals, mul(row.index, count * VECTOR_BYTES), t * VECTOR_BYTES)
                store(fma(mine[0], scale, load(vec(f32()), place)), place)

    def _finish(self, block: Value, token: Value, count: int) -> None:
        """Sums the vectors, adds offset and bias, rounds, stores."""
        spec, first = self.spec, mul(block, ROWS)
        out, nbytes = scalar_type(spec.out_dtype), BYTES[spec.out_dtype]
        with loop(0, arith.minsi(i64(ROWS), arith.subi(i64(spec.n), first))) as row:
            n = add(first, row.index)
            for t in range(count):
                place = at(self.totals, mul(row.index, count * VECTOR_BYTES), t * VECTOR_BYTES)
                result = _sum(load(vec(f32()), place))
                if self.has_offset:
                    offset = load(f32(), at(self.offsets, mul(row.index, 4), t * VECTOR_BYTES))
                    result = arith.addf(result, offset)
                if spec.bias:
                    bias = load(out, at(self.weight.arrays["bias"], mul(n, nbytes)))
                    result = arith.addf(result, bias if out == f32() else arith.extf(f32(), bias))
                with when(less(add(token, t), self.m)):
                    place = add(mul(add(token, t), spec.n), n)
                    store(_round(result, out), at(self.y, mul(place, nbytes)))


def _round(value: Value, type_: ir.Type) -> Value:
    """To the nearest, ties to even."""
    return value if type_ == f32() else arith.truncf(type_, value)


def _dequantize(spec: MatmulSpec, isa: Isa) -> None:
    (*arrays, w, first, last), body = _function("lowbit_dequantize", 1 + len(spec.tensors), 2)
    with body:
        weight, tiling = Weight(spec, isa, arrays), Tiling(spec)
        row_scales = RowValues(tiling.groups)
        row_zeros = RowValues(tiling.groups) if spec.zero_kind else None
        values = scratch(4 * spec.packing.chunk)
        span_chunks = tiling.tiles * tiling.chunks
        with loop(first, last) as block:
            start = mul(block.index, ROWS)
            rows = arith.minsi(i64(ROWS), arith.subi(i64(spec.n), start))
            with loop(0, tiling.spans) as span:
                group = mul(span.index, tiling.groups)
                for g in range(tiling.groups):
                    row_scales.put(g, weight.scales(block.index, add(group, g)))
                    if row_zeros:
                        row_zeros.put(g, weight.zeros(block.index, add(group, g)))
                with loop(0, span_chunks) as c, loop(0, ROWS // 2) as g:
                    chunk = add(mul(span.index, span_chunks), c.index)
                    for row in Row.pair(g.index):
                        with when(less(row.index, rows)):
                            reader = weight.chunk(block.index, chunk, row)
                            _dequantize_chunk(weight, reader, row_scales, row_zeros, row.index, values)
                            target = at(w, mul(add(start, row.index), BYTES[spec.act] * spec.k))
                            _copy_chunk(spec, values, target, group, mul(c.index, spec.packing.chunk))


def _dequantize_chunk(
    weight: Weight, reader: ChunkReader, scales: RowValues, zeros: RowValues | None, row: Value, target: Value
) -> None:
    """A row of a chunk as f32, in decoded order."""
    exponents = weight.map.exponents
    for step in range(weight.map.steps):
        for which, value in enumerate(reader.vectors(step)):
            groups = weight.map.groups(step, which)
            factor = constant(vec(f32()), 2.0 ** int(exponents[step, which]))
            value = fma(value, factor, constant(vec(f32()), weight.low))
            if zeros:
                value = arith.subf(value, zeros.spread(row, groups))
            value = arith.mulf(value, scales.spread(row, groups))
            store(value, at(target, byte=(2 * step + which) * VECTOR_BYTES))


def _copy_chunk(spec: MatmulSpec, values: Value, row: Value, group: Value, within: Value) -> None:
    """Rounds a row of a chunk into w, in order and without the padding of groups. The chunk begins `within`
    columns after the beginning of a group."""
    tiling, size = Tiling(spec), spec.group_size or spec.k
    width = min(tiling.group, spec.packing.chunk)  # of the part of a group that a chunk holds
    groups = arith.minsi(i64(tiling.groups), arith.subi(i64(spec.groups), group))
    columns = arith.minsi(i64(width), arith.subi(i64(size), within))
    with loop(0, groups) as g, loop(0, columns) as c:
        place = arith.extui(i(64), _look_up(_PLACE, i(32), add(mul(g.index, width), c.index)))
        value = load(f32(), at(values, mul(place, 4)))
        column = add(add(mul(add(group, g.index), size), within), c.index)
        store(_round(value, scalar_type(spec.act)), at(row, mul(column, BYTES[spec.act])))
