"""A small builder for tile programs: what one thread block does, in terms of tiles.

    p = Program("copy", threads=128, grid=("ceil(m / 16)", 1, 1), params={"x": "pointer", "y": "pointer", "m": "i32"})
    with p:
        x = p.global_view(p["x"], "f16", (-1, 64), sizes=[p["m"]])
        tile = p.load(x, [p.block_id(0) * 16, 0], layout, boundary=("zero", "none"))
        ...
    module = p.module

Tiles are `Tile`s that know + - * / and < <= > >=, scalars are `Scalar`s that know + - * // % and min; Python numbers
may stand for either where the meaning is clear. Loops are `with p.loop(start, rounds, [carried tiles]) as loop`. The
kernels of this compiler are written with it (`passes.kernels.decode.kernel`, `passes.kernels.dequantize`), and so can
anybody's be (examples/).
"""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lowbit.dialect import ops
from lowbit.dialect.bindings import arith, ext, ir, scf
from lowbit.dialect.errors import PassError, SpecError
from lowbit.dialect.formats.dtypes import DType
from lowbit.dialect.layouts.layout import Layout, local, spatial
from lowbit.dialect.signature import PARAM_TYPES, parse_grid
from lowbit.dialect.types import (
    UNIT,
    Element,
    Global,
    Reg,
    Shared,
    element_attr,
    format_attr,
    grid_attr,
    ints,
    row_major,
    strings,
)
from lowbit.passes import tile
from lowbit.passes.tile import Operand, Tile, compare, elementwise, select


@dataclass(frozen=True)
class Scalar:
    """A number that is the same for all threads, an i32, a condition, or a parameter. Arithmetic is for i32."""

    value: Any

    def _binary(self, make: Any, other: Scalar | int) -> Scalar:
        return Scalar(make(self.value, as_i32(other)))

    def __add__(self, other: Scalar | int) -> Scalar:
        return self if other == 0 else self._binary(arith.addi, other)

    def __radd__(self, other: int) -> Scalar:
        return self + other

    def __sub__(self, other: Scalar | int) -> Scalar:
        return self if other == 0 else self._binary(arith.subi, other)

    def __mul__(self, other: Scalar | int) -> Scalar:
        return self if other == 1 else self._binary(arith.muli, other)

    def __rmul__(self, other: int) -> Scalar:
        return self * other

    def __floordiv__(self, other: Scalar | int) -> Scalar:
        return self if other == 1 else self._binary(arith.divui, other)

    def __mod__(self, other: Scalar | int) -> Scalar:
        return self._binary(arith.remui, other)

    def __lt__(self, other: Scalar | int) -> Scalar:
        return Scalar(arith.cmpi(arith.CmpIPredicate.slt, self.value, as_i32(other)))

    def min(self, other: Scalar | int) -> Scalar:
        return self._binary(arith.minsi, other)

    def max(self, other: Scalar | int) -> Scalar:
        return self._binary(arith.maxsi, other)

    def __or__(self, other: Scalar) -> Scalar:
        """Whether one of two conditions holds."""
        return Scalar(arith.ori(self.value, other.value))

    @staticmethod
    def of(number: int) -> Scalar:
        """A number that is known."""
        return Scalar(as_i32(number))

    def select(self, a: Scalar | int, b: Scalar | int) -> Scalar:
        """a where this condition holds, else b."""
        return Scalar(arith.select(self.value, as_i32(a), as_i32(b)))


Index = Scalar | int


def as_i32(x: Index) -> Any:
    """The SSA value of an index."""
    if isinstance(x, Scalar):
        return x.value
    return arith.constant(ir.IntegerType.get_signless(32), x)


@dataclass(frozen=True)
class Memory:
    """A view of device memory or a buffer in shared memory."""

    value: Any
    type: Global | Shared


class Loop:
    """The inside of `Program.loop`: `index`, `carried` tiles; set `results` to the tiles that go to the next round."""

    def __init__(self, index: Scalar, carried: list[Tile]) -> None:
        self.index = index
        self.carried = carried
        self.results: list[Tile] = carried


def _i64(x: int) -> Any:
    return ir.IntegerAttr.get(ir.IntegerType.get_signless(64), x)


_FRAME = re.compile(r'"([^"]+)":(\d+):')
_NOT_USERS = (__file__, tile.__file__, str(ext.__file__))


def user_line(location: Any) -> tuple[str, int] | None:
    """The file and the line of the program that made an operation, from the frames in its location."""
    frames = _FRAME.findall(str(location))
    return next(((path, int(line)) for path, line in frames if path not in _NOT_USERS), None)


def _named(location: Any) -> str:
    line = user_line(location)
    return f"{line[0]}:{line[1]}: " if line else ""


class Program:
    """Builds one `lowbit.program` in a module of its own. Enter it to build; leave it to have it verified.

    What a verifier finds then is a PassError with the line that made the operation.

    params: name -> "pointer" (to device memory), "i32", "f32" or "tensor_map" (128 bytes by value). threads per block;
    grid in blocks along three axes, each a number, "ceil(m / 16)" (m: any i32 parameter) or "sm_count * 2". workspace
    in bytes, at the pointer "workspace"; max_blocks on a multiprocessor at a time (0: as many as fit), by claiming
    shared memory. cluster: blocks along each axis of the grid that can read each other's shared memory (sm_90; PTX ISA
    5.2.2).
    """

    def __init__(
        self,
        name: str,
        threads: int,
        grid: tuple[int | str, ...],
        params: Mapping[str, str],
        workspace: int = 0,
        max_blocks: int = 0,
        cluster: tuple[int, int, int] = (1, 1, 1),
    ) -> None:
        types: dict[str, str] = {**PARAM_TYPES}
        for parameter, kind in params.items():
            if kind not in types:
                allowed = ", ".join(types)
                raise PassError(f"{name}: parameter {parameter} is a {kind!r}; it must be one of {allowed}")
        try:
            extents = parse_grid(grid)
        except SpecError as error:
            raise PassError(f"{name}: {error}") from None
        self._name, self._threads = name, threads
        self._frames = ir.loc_tracebacks()
        self.module = ir.Module.create()
        with ir.loc_tracebacks(), ir.InsertionPoint(self.module.body):
            self.op = ops.ProgramOp(
                ir.StringAttr.get(name),
                _i64(threads),
                grid_attr(extents),
                strings(tuple(params)),
                _i64(workspace),
            )
        if max_blocks:
            self.op.max_blocks = _i64(max_blocks)
        if cluster != (1, 1, 1):
            self.op.cluster = ints(cluster)
        block = self.op.body.blocks.append(*[ir.Type.parse(types[kind]) for kind in params.values()])
        self._arguments = dict(zip(params, block.arguments))
        self._point = ir.InsertionPoint(block)

    def __enter__(self) -> Program:
        self._frames.__enter__()
        self._point.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if error[0] is None:
            ops.ReturnOp()
        self._point.__exit__(*error)
        self._frames.__exit__(*error)
        if error[0] is None:
            self._verify()

    def _verify(self) -> None:
        try:
            self.module.operation.verify()
        except ir.MLIRError as error:
            found = [_named(d.location) + d.message for d in error.error_diagnostics]
            raise PassError(f"program {self._name} is wrong: " + "\n".join(found)) from None

    def __getitem__(self, name: str) -> Scalar:
        """A parameter."""
        if name not in self._arguments:
            raise PassError(f"{self._name} has no parameter {name!r}; it has {', '.join(self._arguments) or 'none'}")
        return Scalar(self._arguments[name])

    # -- scalars and control

    def block_id(self, axis: int) -> Scalar:
        return Scalar(ops.BlockIdOp(_i64(axis)).result)

    def block_count(self, axis: int) -> Scalar:
        return Scalar(ops.BlockCountOp(_i64(axis)).result)

    @contextmanager
    def loop(self, start: Index, steps: Index, carried: Sequence[Tile] = ()) -> Generator[Loop]:
        """for index in start .. start+steps-1. After it, `carried` of the yielded Loop are the final tiles."""
        values = [t.value for t in carried]
        for_op = scf.ForOp(as_i32(start), as_i32(start + steps), as_i32(1), values)
        with ir.InsertionPoint(for_op.body):
            loop = Loop(Scalar(for_op.induction_variable), [Tile(v) for v in for_op.inner_iter_args])
            yield loop
            scf.YieldOp([t.value for t in loop.results])
        loop.carried = [Tile(v) for v in for_op.results]

    @contextmanager
    def pipeline(
        self,
        num_stages: int = 1,
        prefetch_limit: int = 0,
        refill: str = "before_mma",
        scope: str = "block",
        warps: int = 1,
        async_proxy: bool = False,
    ) -> Generator[None]:
        """What follows, at the head of a loop, are the copies of a round, and the rest of the loop waits for them.

        num_stages: rounds that have a stage of the buffers, so that all but one are copied while one computes.
        prefetch_limit: at most so many are copied before `grid_wait` (0: no limit). refill: when a round starts the
        copies of a later one (`Schedule.refill`). scope, warps, async_proxy: the barrier of a round, as in `barrier`.
        """
        op = ops.PipelineOp(_i64(num_stages), ir.StringAttr.get(scope), _i64(warps))
        op.prefetch_limit = _i64(prefetch_limit) if prefetch_limit else None
        op.refill = refill
        op.async_proxy = async_proxy
        with ir.InsertionPoint(op.copies.blocks.append()):
            yield

    @contextmanager
    def when(self, condition: Scalar) -> Generator[None]:
        """What follows is done only if `condition`."""
        if_op = scf.IfOp(condition.value)
        with ir.InsertionPoint(if_op.then_block):
            yield
            scf.YieldOp([])

    @contextmanager
    def one_thread(self, condition: Scalar) -> Generator[None]:
        """What follows is done by one thread of the block, if `condition`, beside products that are under way."""
        op = ops.OneThreadOp(condition.value)
        with ir.InsertionPoint(op.body.blocks.append()):
            yield

    def grid_wait(self) -> None:
        ops.GridWaitOp()

    def grid_launch_dependents(self) -> None:
        ops.GridLaunchOp()

    def last_arrival(self, counters: Memory, index: Index, count: int) -> Scalar:
        return Scalar(ops.LastArrivalOp(counters.value, as_i32(index), _i64(count)).result)

    # -- memory

    def global_view(
        self,
        pointer: Scalar,
        element: Element,
        shape: tuple[int, ...],
        strides: tuple[int, ...] | None = None,
        divisors: tuple[int, ...] | None = None,
        sizes: Sequence[Scalar] = (),
    ) -> Memory:
        """Device memory as an array: strides in elements (dense by default), -1 for the sizes given in `sizes`."""
        type_ = Global(element, shape, strides or row_major(shape), divisors or (1,) * len(shape))
        return Memory(ops.GlobalViewOp(pointer.value, [s.value for s in sizes], type_.type).result, type_)

    def alloc_shared(
        self, element: Element, shape: tuple[int, ...], strides: tuple[int, ...] | None = None, swizzle: int = 0
    ) -> Memory:
        type_ = Shared(element, shape, strides or row_major(shape), swizzle)
        return Memory(ops.AllocSharedOp(type_.type).result, type_)

    def signals(self, number: int, arrivals: int) -> Memory:
        """mbarriers whose phases take so many arrivals each."""
        type_ = Shared("i32", (1, number, 2), (2 * number, 2, 1))
        op = ops.AllocSignalsOp(type_.type)
        op.arrivals = _i64(arrivals)
        return Memory(op.result, type_)

    def expect(self, signals: Memory, index: Index, size: int) -> None:
        """This thread arrives, and so many bytes of `copy_box` have to."""
        ops.ArriveOp(signals.value, as_i32(index)).expected = _i64(size)

    def arrive(self, signals: Memory, index: Index, blocks: int = 1) -> None:
        """Every warp arrives once, at this signal of each of so many blocks of the cluster."""
        op = ops.ArriveOp(signals.value, as_i32(index))
        op.each_warp = True
        op.blocks = _i64(blocks) if blocks > 1 else None

    def await_signal(self, signals: Memory, index: Index, parity: Index) -> None:
        """Waits for the end of a phase of this parity; before the first, that of parity 1 counts as over."""
        ops.AwaitOp(signals.value, as_i32(index), as_i32(parity))

    def stage(self, buffer: Memory, index: Index) -> Memory:
        """buffer[index]"""
        whole = Shared.of(buffer.value.type)
        part = Shared(whole.element, whole.shape[1:], whole.strides[1:], whole.swizzle)
        return Memory(ops.StageOp(buffer.value, as_i32(index), part.type).result, part)

    def copy_box(
        self,
        map: Scalar,
        target: Memory,
        signals: Memory,
        index: Index,
        offsets: Sequence[Index],
        row: Index = 0,
        blocks: int = 1,
    ) -> None:
        """Copies a box of a tensor map, whose first element is at `offsets` (the last dim first), to rows of a
        stage."""
        op = ops.CopyBoxOp(
            map.value, target.value, as_i32(row), signals.value, as_i32(index), [as_i32(o) for o in offsets]
        )
        op.blocks = _i64(blocks) if blocks > 1 else None

    def peer(self, buffer: Memory, rank: Index) -> Memory:
        """The same buffer of another block of the cluster."""
        return Memory(ops.PeerOp(buffer.value, as_i32(rank), buffer.value.type).result, buffer.type)

    def free_shared(self, *buffers: Memory) -> None:
        for buffer in buffers:
            ops.FreeSharedOp(buffer.value)

    def copy_async(
        self,
        source: Memory,
        target: Memory,
        offsets: Sequence[Index],
        layout: Layout,
        boundary: Sequence[str] | None = None,
        limit: Sequence[int] = (),
    ) -> None:
        ops.CopyAsyncOp(
            source.value,
            target.value,
            [as_i32(o) for o in offsets],
            ir.StringAttr.get(str(layout)),
            strings(tuple(boundary or ("none",) * layout.rank)),
            limit=ints(tuple(limit)),
        )

    def copy_padded(
        self,
        source: Memory,
        target: Memory,
        offsets: Sequence[Index],
        layout: Layout,
        group: int,
        padded: int,
    ) -> None:
        ops.CopyPaddedOp(
            source.value,
            target.value,
            [as_i32(o) for o in offsets],
            ir.StringAttr.get(str(layout)),
            _i64(group),
            _i64(padded),
        )

    def fill_table(self, buffer: Memory, format: DType, element: str, exponent: int = 0) -> None:
        ops.FillTableOp(buffer.value, format_attr(format), ir.StringAttr.get(element), _i64(exponent))

    def commit(self) -> None:
        ops.CommitOp()

    def wait(self, pending: int = 0) -> None:
        ops.WaitOp(_i64(pending))

    def barrier(self, scope: str = "block", warps: int = 1, async_proxy: bool = False) -> None:
        """Of the "block", the "cluster" (or a half of it: "cluster_arrive", "cluster_wait") or every `warps` "warps".
        async_proxy: for `warpgroup_mma`, which reads shared memory by itself."""
        op = ops.BarrierOp(ir.StringAttr.get(scope), warps=_i64(warps))
        op.async_proxy = async_proxy

    def load(
        self, source: Memory, offsets: Sequence[Index], layout: Layout, boundary: Sequence[str] | None = None
    ) -> Tile:
        words = strings(tuple(boundary or ("none",) * layout.rank))
        return Tile(
            ops.LoadOp(source.value, [as_i32(o) for o in offsets], words, Reg(source.type.element, layout).type).result
        )

    def prefetch(
        self, source: Memory, offsets: Sequence[Index], layout: Layout, boundary: Sequence[str] | None = None
    ) -> None:
        """Asks for what `load` would read to be brought into the L2 cache."""
        words = strings(tuple(boundary or ("none",) * layout.rank))
        ops.PrefetchOp(source.value, [as_i32(o) for o in offsets], ir.StringAttr.get(str(layout)), words)

    def load_matrix(self, source: Memory, rows: Index, layout: Layout) -> Tile:
        return Tile(ops.LoadMatrixOp(source.value, as_i32(rows), Reg(source.type.element, layout).type).result)

    def load_diagonal(self, source: Memory, layout: Layout) -> Tile:
        """One row [.., 1, k] as fragments [.., 8, k] that have, in row i, the columns of blocks of 16 i, i + 8, ..."""
        return Tile(ops.LoadDiagonalOp(source.value, Reg(source.type.element, layout).type).result)

    def store(
        self, value: Tile, target: Memory, offsets: Sequence[Index], boundary: Sequence[str] | None = None
    ) -> None:
        words = strings(tuple(boundary or ("none",) * value.layout.rank))
        ops.StoreOp(value.value, target.value, [as_i32(o) for o in offsets], words)

    # -- tiles

    def constant(self, value: float, element: Element, layout: Layout, lower: float | None = None) -> Tile:
        """A tile of one value; of another in the lower half of every 16 rows, if given."""
        op = ops.ConstantOp(ir.FloatAttr.get(ir.F32Type.get(), value), Reg(element, layout).type)
        if lower is not None:
            op.lower = ir.FloatAttr.get(ir.F32Type.get(), lower)
        return Tile(op.result)

    def splat(self, value: Scalar, element: str, layout: Layout) -> Tile:
        """A tile of one value that is known when the kernel runs: an f32 parameter, rounded to `element`."""
        return Tile(ops.SplatOp(value.value, Reg(element, layout).type).result)

    def view(self, tile: Tile, element: Element, layout: Layout) -> Tile:
        return Tile(ops.ViewOp(tile.value, Reg(element, layout).type).result)

    def decode(
        self, codes: Tile, element: str, exponent: int = 0, offset: str = "subtracted", shifts: Sequence[Tile] = ()
    ) -> Tile:
        """Numbers from codes, exactly. offset: "subtracted", "deferred" or "raw" (`dialect.formats.raw_codes`).
        shifts: minus zero points [.., rows, 1], each for an equal part of columns."""
        values = [s.value for s in shifts]
        op = ops.DecodeOp(codes.value, values, _i64(exponent), Reg(element, codes.layout).type)
        op.offset = offset
        return Tile(op.result)

    def decode_bytes(
        self, codes: Tile, element: str, layout: Layout, zeros: Tile | None = None, offset: int = 0
    ) -> Tile:
        """Codes as bytes that an mma multiplies, f8E4M3FN, ui8 or i8 (`dialect.formats.byte_codes`), less zeros
        [.., rows, 1] in bytes, or less an offset."""
        op = ops.DecodeBytesOp(codes.value, [] if zeros is None else [zeros.value], Reg(element, layout).type)
        op.offset = _i64(offset) if offset else None
        return Tile(op.result)

    def encode_bytes(self, numbers: Tile, kind: str, layout: Layout) -> Tile:
        """Numbers in f32 rounded to bytes of "f8e4m3" or "i8", 16 to a unit, in the order of `byte_order`."""
        return Tile(ops.EncodeBytesOp(numbers.value, ir.StringAttr.get(kind), Reg(UNIT, layout).type).result)

    def lookup(self, codes: Tile, table: Memory, element: str) -> Tile:
        return Tile(ops.LookupOp(codes.value, table.value, Reg(element, codes.layout).type).result)

    def encode(self, numbers: Tile, format: DType) -> Tile:
        return Tile(ops.EncodeOp(numbers.value, Reg(format, numbers.layout).type).result)

    def offset_sums(self, tile: Tile, format: DType, start: int, layout: Layout) -> Tile:
        """Returns what an accumulator starts from when its weights were decoded with a deferred offset."""
        return Tile(ops.OffsetSumsOp(tile.value, format_attr(format), _i64(start), Reg("f32", layout).type).result)

    def materialize(self, tile: Tile) -> None:
        """Compute a tile here, not where it is first used."""
        ops.MaterializeOp(tile.value)

    def slice(self, tile: Tile, dim: int, start: int, size: int) -> Tile:
        layout, _ = tile.layout.restrict(dim, start, size)
        return Tile(ops.SliceOp(tile.value, _i64(dim), _i64(start), Reg(tile.reg.element, layout).type).result)

    def reshape(self, tile: Tile, shape: tuple[int, ...]) -> Tile:
        reg = Reg(tile.reg.element, tile.layout.reshape(shape))
        return Tile(ops.ReshapeOp(tile.value, reg.type).result)

    def cast(self, tile: Tile, element: str, kind: str = "float") -> Tile:
        """The elements as another type; kind: "float", from integers "signed" or "unsigned", from bytes "e4m3" or
        "e8m0"."""
        if tile.reg.element == element:
            return tile
        reg = Reg(element, tile.layout)
        return Tile(ops.CastOp(tile.value, ir.StringAttr.get(kind), reg.type).result)

    def add(self, a: Operand, b: Operand) -> Tile:
        return elementwise(ops.AddOp, a, b)

    def sub(self, a: Operand, b: Operand) -> Tile:
        return elementwise(ops.SubOp, a, b)

    def mul(self, a: Operand, b: Operand) -> Tile:
        return elementwise(ops.MulOp, a, b)

    def div(self, a: Operand, b: Operand) -> Tile:
        """a / b, at most 2 ulps of f32 off."""
        return elementwise(ops.DivOp, a, b)

    def max(self, a: Operand, b: Operand) -> Tile:
        """The larger of each two, NaN if one of them is."""
        return elementwise(ops.MaxOp, a, b)

    def min(self, a: Operand, b: Operand) -> Tile:
        """The smaller of each two, NaN if one of them is."""
        return elementwise(ops.MinOp, a, b)

    def fma(self, a: Operand, b: Operand, c: Operand) -> Tile:
        """a * b + c, rounded once."""
        return elementwise(ops.FmaOp, a, b, c)

    def neg(self, a: Tile) -> Tile:
        return elementwise(ops.NegOp, a)

    def abs(self, a: Tile) -> Tile:
        return elementwise(ops.AbsOp, a)

    def reciprocal(self, a: Tile) -> Tile:
        """1 / a in f32, rounded to nearest even."""
        return elementwise(ops.ReciprocalOp, a)

    def round_to(self, a: Tile, kind: str) -> Tile:
        """Numbers in f32 rounded to those of "f8e4m3" or "i8", the largest of which they do not exceed."""
        return Tile(ops.RoundToOp(a.value, ir.StringAttr.get(kind), a.reg.type).result)

    def exp(self, a: Tile) -> Tile:
        """e^a, at most 2 + |1.173 a| ulps of f32 off."""
        return elementwise(ops.ExpOp, a)

    def tanh(self, a: Tile) -> Tile:
        """The hyperbolic tangent, with a relative error of at most 2^-11."""
        return elementwise(ops.TanhOp, a)

    def sqrt(self, a: Tile) -> Tile:
        return elementwise(ops.SqrtOp, a)

    def compare(self, a: Operand, predicate: str, b: Operand) -> Tile:
        """Whether a is "lt", "le", "eq", "ne", "gt" or "ge" b, for `select`."""
        return compare(a, predicate, b)

    def select(self, condition: Tile, a: Operand, b: Operand) -> Tile:
        """a where the condition holds, else b."""
        return select(condition, a, b)

    def mma(self, a: Tile, b: Tile, c: Tile) -> Tile:
        return Tile(ops.MmaOp(a.value, b.value, c.value, c.reg.type).result)

    def warpgroup_mma(self, a: Tile, b: Memory, start: int, c: Tile, overlap: bool = False) -> Tile:
        """c + a b^T, with columns start .. of b [.., k / 64, n, 64] in shared memory. overlap: the product before may
        still be under way when this one is begun; c is zero, and there is one row of fragments."""
        op = ops.WarpgroupMmaOp(a.value, b.value, c.value, _i64(start), c.reg.type)
        op.overlap = overlap
        return Tile(op.result)

    def accumulator(self, layout: Layout, element: str = "f32") -> Tile:
        """Registers for sums of `accumulate`, which stay in place."""
        return Tile(ops.AccumulatorOp(Reg(element, layout).type).result)

    def clear(self, sums: Tile) -> None:
        ops.ClearAccumulatorOp(sums.value)

    def accumulate(
        self,
        a: Tile,
        b: Memory,
        start: int,
        sums: Tile,
        row: int | None = None,
        more: bool = False,
        held: bool = False,
        fresh: bool = False,
    ) -> None:
        """Begins sums += a b^T, with columns start .. of b in shared memory. row: the first of b's that is used, of
        all if None; more: the next is of the same product; held: and begun with it; fresh: sums = a b^T."""
        op = ops.AccumulateOp(a.value, b.value, sums.value, _i64(start))
        op.row = None if row is None else _i64(row)
        op.more, op.held, op.fresh = more, held, fresh

    def await_products(self, pending: int) -> None:
        ops.AwaitProductsOp(_i64(pending))

    def add_scaled(self, product: Tile, scale: Tile | None, sums: Tile, pending: int = 0) -> None:
        """sums += scale * product, once all products but the last `pending` have ended."""
        scales = [] if scale is None else [scale.value]
        ops.AddScaledOp(product.value, scales, sums.value, _i64(pending))

    def read(self, sums: Tile) -> Tile:
        """The sums, once all products have ended."""
        return Tile(ops.ReadAccumulatorOp(sums.value, sums.value.type).result)

    def warpgroup_row_sums(self, b: Memory, start: int, columns: int, layout: Layout) -> Tile:
        return Tile(ops.WarpgroupRowSumsOp(b.value, _i64(start), _i64(columns), Reg("f32", layout).type).result)

    def row_sums(self, tile: Tile, layout: Layout) -> Tile:
        return Tile(ops.RowSumsOp(tile.value, Reg("f32", layout).type).result)

    def split_limbs(self, x: Memory, limbs: Memory, format: DType) -> Tile:
        """Write x [warps, 1, k] as limbs; the units of its pieces."""
        warps, pieces = limbs.type.shape[:2]
        reg = Reg("f32", spatial(warps, 1, 1).local(1, 1, pieces).replicated(32))
        return Tile(ops.SplitLimbsOp(x.value, limbs.value, format_attr(format), reg.type).result)

    def limb_mma(self, a: Tile, limbs: Memory, unit: Tile, start: int, columns: int, layout: Layout) -> Tile:
        """Columns start .. of codes times those of x; see `join_limbs`."""
        place = _i64(start), _i64(columns)
        return Tile(ops.LimbMmaOp(a.value, limbs.value, unit.value, *place, Reg("f32", layout).type).result)

    def limb_sums(
        self, limbs: Memory, unit: Tile, format: DType, start: int, columns: int, layout: Layout
    ) -> Tile:
        about = format_attr(format), _i64(start), _i64(columns)
        return Tile(ops.LimbSumsOp(limbs.value, unit.value, *about, Reg("f32", layout).type).result)

    def join_limbs(self, tile: Tile) -> Tile:
        """The number that the two columns of a sum of `limb_mma` stand for."""
        reg = Reg("f32", tile.layout.reduce((tile.layout.rank - 1,)))
        return Tile(ops.JoinLimbsOp(tile.value, reg.type).result)

    def copy_outliers(
        self, outliers: Memory, buffer: Memory, first_block: Index, part: Index, splits: int, layout: Layout
    ) -> None:
        """Starts to copy this block's first lines of outliers: those of part `part` of `splits`, cut once more among
        warps."""
        place = as_i32(first_block), as_i32(part)
        ops.CopyOutliersOp(outliers.value, buffer.value, *place, ir.StringAttr.get(str(layout)), _i64(splits))

    def sparse_mma(
        self,
        outliers: Memory,
        lines: Memory,
        scratch: Memory,
        x: Memory,
        first_block: Index,
        part: Index,
        splits: int,
        total: Tile,
    ) -> Tile:
        """total + S x^T for this block's share of outliers, whose first lines `copy_outliers` has copied; warps need
        `scratch` meanwhile."""
        memory = outliers.value, lines.value, scratch.value, x.value
        place = as_i32(first_block), as_i32(part)
        return Tile(ops.SparseMmaOp(*memory, *place, total.value, _i64(splits), total.reg.type).result)

    def sparse_vector(
        self,
        outliers: Memory,
        lines: Memory,
        scratch: Memory,
        x: Memory,
        first_block: Index,
        part: Index,
        splits: int,
        total: Tile,
    ) -> Tile:
        """The same for one token, spread over eight columns."""
        memory = outliers.value, lines.value, scratch.value, x.value
        place = as_i32(first_block), as_i32(part)
        return Tile(ops.SparseVectorOp(*memory, *place, total.value, _i64(splits), total.reg.type).result)

    def add_outliers(
        self, outliers: Memory, buffer: Memory, block: Index, first_column: Index, group: int, padded: int
    ) -> None:
        """Adds the outliers of a row block that lie in a buffer of f32; `group` columns take `padded` in memory."""
        place = as_i32(block), as_i32(first_column)
        ops.AddOutliersOp(outliers.value, buffer.value, *place, _i64(group), _i64(padded))

    def first_outliers(self, outliers: Memory, block: Index) -> Tile:
        """Where the outliers of row blocks `block` and on begin, one for each warp; goes to `scatter_outliers`."""
        warps = self._threads // 32
        reg = Reg("i32", spatial(warps, 32, 1) * local(1, 1, ops.CURSOR))
        return Tile(ops.FirstOutliersOp(outliers.value, as_i32(block), reg.type).result)

    def scatter_outliers(self, outliers: Memory, buffer: Memory, first_column: Index, cursor: Tile) -> Tile:
        """Writes the outliers from `cursor` on that lie in a buffer of fragments; returns where they go on."""
        memory = outliers.value, buffer.value
        return Tile(ops.ScatterOutliersOp(*memory, as_i32(first_column), cursor.value, cursor.reg.type).result)

    def erase_outliers(self, buffer: Memory, cursor: Tile) -> None:
        """Writes 0 where the `scatter_outliers` with this result has written."""
        ops.EraseOutliersOp(buffer.value, cursor.value)

    def reduce(self, tile: Tile, dim: int, combine: str = "sum") -> Tile:
        """The sum over a dim, or the largest element ("max")."""
        reg = Reg(tile.reg.element, tile.layout.reduce((dim,)))
        op = ops.ReduceOp(tile.value, _i64(dim), reg.type)
        op.combine = combine
        return Tile(op.result)


__all__ = ["Index", "Loop", "Memory", "Program", "Scalar", "Tile", "element_attr"]
