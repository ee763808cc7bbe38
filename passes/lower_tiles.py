"""lower-tiles: a `lowbit.program` becomes a gpu.func: layouts turn into index arithmetic, tiles into registers.

The pass walks the program once and writes the function anew. Every tile is a `Fragment` whose registers are written
down when a consumer asks for them; what reads memory is finished before the next barrier, store or region. What is
left of formats are `lowbit.decode_pair` operations, for `lower-dequant`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from dialect import ops
from dialect.bindings import arith, gpu, ir, llvm, nvvm, scf
from dialect.dtypes import DType
from dialect.errors import PassError
from dialect.layout import MMA_M16N8K16_A, Layout
from dialect.packing import BLOCK_K, ROWS, WORDS_PER_UNIT, Packing
from dialect.types import (
    UNIT,
    Global,
    Reg,
    Shared,
    element_bits,
    format_attr,
    ints,
    read_format,
    read_ints,
    read_strings,
)
from passes import emit
from passes.addressing import Access, Place, ThreadIndex
from passes.fragment import Fragment, kind_of
from passes.lower_mma import fragment_blocks, lower_bias_sums, lower_load_matrix, lower_mma, lower_row_sums
from passes.rewriting import at, each_op
from passes.target import Target, parse_target

SHARED_SYMBOL = "shared_memory"
_ALIGN = 128  # of shared buffers
_RESERVED = 1024  # bytes of shared memory that every block takes for the system


@dataclass(frozen=True)
class LowerTiles:
    """Lower lowbit.program to gpu.func: tiles to registers, layouts to index arithmetic."""

    name: ClassVar[str] = "lower-tiles"
    target: Target = field(default_factory=lambda: parse_target("sm_80"))

    def run(self, module: ir.Module) -> None:
        for program in each_op(module, ops.ProgramOp):
            with at(program):
                _Lowering(program, self.target).run()
            program.operation.erase()


def int_attr(op: Any, name: str) -> int:
    return int(ir.IntegerAttr(op.operation.attributes[name]).value)


def text_attr(op: Any, name: str) -> str:
    return ir.StringAttr(op.operation.attributes[name]).value


class SharedMemory:
    """First fit, by program order: a buffer may take the place of those freed before it."""

    def __init__(self) -> None:
        self._live: dict[Any, tuple[int, int]] = {}
        self.bytes = 0

    def allocate(self, key: Any, size: int) -> int:
        size = -(-size // _ALIGN) * _ALIGN
        start = 0
        for low, high in sorted(self._live.values()):
            if start + size <= low:
                break
            start = max(start, high)
        self._live[key] = (start, start + size)
        self.bytes = max(self.bytes, start + size)
        return start

    def free(self, key: Any) -> None:
        if key not in self._live:
            raise PassError("lower-tiles: free_shared of what is no buffer of alloc_shared, or free already")
        del self._live[key]


class _Lowering:
    """Rewrites one program."""

    def __init__(self, program: Any, target: Target) -> None:
        self.program = program
        self.target = target
        self.values: dict[Any, Any] = {}  # SSA value of the program -> SSA value, Fragment or Place
        self.reads: list[Fragment] = []  # fragments whose registers are loads
        self.shared = SharedMemory()
        self.handlers: dict[str, Callable[[Any], None]] = {
            "lowbit.block_id": self._block_id,
            "lowbit.grid_wait": lambda op: self._grid_control(nvvm.GridDepActionKind.wait),
            "lowbit.grid_launch_dependents": lambda op: self._grid_control(nvvm.GridDepActionKind.launch_dependents),
            "lowbit.global_view": self._global_view,
            "lowbit.alloc_shared": self._alloc_shared,
            "lowbit.free_shared": lambda op: self.shared.free(op.buffer),
            "lowbit.stage": self._stage,
            "lowbit.copy_async": self._copy_async,
            "lowbit.copy_padded": self._copy_padded,
            "lowbit.commit": lambda op: nvvm.cp_async_commit_group(),
            "lowbit.wait": self._wait,
            "lowbit.barrier": self._barrier,
            "lowbit.last_arrival": self._last_arrival,
            "lowbit.constant": self._constant,
            "lowbit.load": self._load,
            "lowbit.load_matrix": self._load_matrix,
            "lowbit.store": self._store,
            "lowbit.view": self._view,
            "lowbit.decode": self._decode,
            "lowbit.encode": self._encode,
            "lowbit.slice": self._slice,
            "lowbit.reshape": self._reshape,
            "lowbit.cast": self._cast,
            "lowbit.add": lambda op: self._elementwise(op, arith.addf),
            "lowbit.mul": lambda op: self._elementwise(op, arith.mulf),
            "lowbit.fma": lambda op: self._elementwise(op, emit.fma),
            "lowbit.mma": self._mma,
            "lowbit.reduce": self._reduce,
            "lowbit.row_sums": self._row_sums,
            "lowbit.bias_sums": self._bias_sums,
            "lowbit.return": lambda op: None,
            "scf.for": self._for,
            "scf.if": self._if,
        }

    # -- the function around

    def run(self) -> None:
        program = self.program
        name = text_attr(program, "sym_name")
        self.threads_per_block = int_attr(program, "threads")
        source = program.body.blocks[0]
        with ir.InsertionPoint(program):
            gpu_module = gpu.GPUModuleOp(f"{name}_module")
        body = gpu_module.regions[0].blocks.append()
        with ir.InsertionPoint(body):
            emit.define(
                f"llvm.mlir.global external @{SHARED_SYMBOL}() {{addr_space = 3 : i32, alignment = 1024 : i64}} : "
                "!llvm.array<0 x i8>"
            )
            function = gpu.GPUFuncOp(
                ir.TypeAttr.get(ir.FunctionType.get([a.type for a in source.arguments], [])),
                sym_name=name,
                kernel=True,
            )
        function.operation.attributes["arg_attrs"] = self._argument_attributes(source)
        function.operation.attributes["nvvm.reqntid"] = ir.DenseI32ArrayAttr.get([self.threads_per_block, 1, 1])
        block = function.operation.regions[0].blocks.append(*[a.type for a in source.arguments])
        for old, new in zip(source.arguments, block.arguments):
            self.values[old] = new
        with ir.InsertionPoint(block):
            thread = arith.index_cast(emit.integer(), gpu.thread_id(gpu.Dimension.x))
            self.shared_base = llvm.mlir_addressof(emit.pointer(3), SHARED_SYMBOL)
            self.threads = ThreadIndex(thread, ir.InsertionPoint(self.shared_base.owner))
            self._block(source)
            gpu.return_([])
        if self.shared.bytes > self.target.max_shared_per_block:
            raise PassError(
                f"lower-tiles: {name} needs {self.shared.bytes} bytes of shared memory, {self.target} allows "
                f"{self.target.max_shared_per_block}; take fewer stages, warps_k or a smaller step_k"
            )
        for attribute in ("grid", "threads", "params", "workspace"):
            function.operation.attributes[f"lowbit.{attribute}"] = program.operation.attributes[attribute]
        function.operation.attributes["lowbit.shared_bytes"] = ir.IntegerAttr.get(
            emit.integer(64), max(self.shared.bytes, self._claimed_bytes())
        )

    def _claimed_bytes(self) -> int:
        """The least shared memory with which no more than `max_blocks` blocks fit on a multiprocessor.

        Where blocks of the next kernel may start early, as many as fit would crowd some multiprocessors.
        """
        if "lowbit.max_blocks" not in self.program.operation.attributes:
            return 0
        blocks = int_attr(self.program, "lowbit.max_blocks")
        least = self.target.shared_per_sm // (blocks + 1) - _RESERVED + 1
        return min(-(-least // _ALIGN) * _ALIGN, self.target.max_shared_per_block)

    def _argument_attributes(self, source: Any) -> Any:
        """No two pointers alias; those only read are marked so, unless the kernel overlaps with the one before it."""
        names = {op.operation.name for op in self._all_ops()}
        written: set[Any] = set()
        for op in self._all_ops():
            if op.operation.name in ("lowbit.store", "lowbit.last_arrival"):
                view = op.operation.operands[1 if op.operation.name == "lowbit.store" else 0].owner
                if not isinstance(view, ir.Block) and view.name == "lowbit.global_view":
                    written.add(view.operands[0])
        unit = ir.UnitAttr.get()
        result: list[Any] = []
        for argument in source.arguments:
            attributes: dict[str, Any] = {}
            if str(argument.type).startswith("!llvm.ptr"):
                attributes = {"llvm.noalias": unit, "llvm.align": ir.IntegerAttr.get(emit.integer(64), 16)}
                if argument not in written and "lowbit.grid_wait" not in names:
                    attributes["llvm.readonly"] = unit
            result.append(ir.DictAttr.get(attributes))
        return ir.ArrayAttr.get(result)

    def _all_ops(self) -> list[Any]:
        found: list[Any] = []

        def visit(op: Any) -> Any:
            found.append(op.opview)
            return ir.WalkResult.ADVANCE

        self.program.operation.walk(visit)
        return found

    def _block(self, block: Any) -> None:
        for op in block.operations:
            with at(op):
                self._op(op)

    def _op(self, op: Any) -> None:
        name = op.operation.name
        if name in self.handlers:
            self.handlers[name](op)
        elif name.startswith("arith."):
            clone = op.operation.clone()
            for i, operand in enumerate(op.operation.operands):
                clone.operands[i] = self.values[operand]
            for old, new in zip(op.operation.results, clone.results):
                self.values[old] = new
        elif name != "scf.yield":
            raise PassError(f"lower-tiles: no rule for '{name}' in a program")

    # -- scalars and regions

    def _block_id(self, op: Any) -> None:
        axis = (gpu.Dimension.x, gpu.Dimension.y, gpu.Dimension.z)[int_attr(op, "axis")]
        self.values[op.result] = arith.index_cast(emit.integer(), gpu.block_id(axis))

    def _grid_control(self, kind: Any) -> None:
        self._finish_reads()
        if self.target.capability >= 90:  # before, kernels do not overlap
            nvvm.griddepcontrol(kind)

    def _finish_reads(self) -> None:
        """Write down all loads: memory may change after this point."""
        for fragment in self.reads:
            fragment.force()
        self.reads.clear()

    def _enter(self, op: Any) -> None:
        """Fragments from outside that a region uses must be complete before it."""
        self._finish_reads()
        inside: set[Any] = set()

        def visit(inner: Any) -> Any:
            for operand in inner.operands:
                value = self.values.get(operand)
                if isinstance(value, Fragment) and operand not in inside:
                    inside.add(operand)
                    value.force()
            return ir.WalkResult.ADVANCE

        op.operation.walk(visit)

    def _for(self, op: Any) -> None:
        self._enter(op)
        lower, upper, step, *initial = (self.values[v] for v in op.operation.operands)
        if any(isinstance(value, Place) for value in initial):
            raise PassError("lower-tiles: a loop cannot carry views or buffers, only tiles and scalars")
        flat: list[Any] = []
        for value in initial:
            flat += value.registers(value.kind) if isinstance(value, Fragment) else [value]
        loop = scf.ForOp(lower, upper, step, flat)
        loop.operation.attributes["loop_annotation"] = ir.Attribute.parse(
            "#llvm.loop_annotation<unroll = <disable = true>>"
        )
        old = op.operation.regions[0].blocks[0]
        self.values[old.arguments[0]] = loop.induction_variable
        self._bind(old.arguments[1:], initial, loop.inner_iter_args)
        with ir.InsertionPoint(loop.body):
            self._block(old)
            self._finish_reads()
            results: list[Any] = []
            for value, start in zip(
                (self.values[v] for v in old.operations[len(old.operations) - 1].operands), initial
            ):
                results += value.registers(start.kind) if isinstance(start, Fragment) else [value]
            scf.YieldOp(results)
        self._bind(op.operation.results, initial, loop.results)

    def _bind(self, names: Sequence[Any], like: Sequence[Any], registers: Sequence[Any]) -> None:
        """Spread a flat list of registers over values shaped as `like`."""
        rest = list(registers)
        for name, value in zip(names, like):
            if isinstance(value, Fragment):
                mine, rest = rest[: value.count], rest[value.count :]
                self.values[name] = Fragment(value.reg, value.kind, mine.__getitem__)
            else:
                self.values[name], *rest = rest

    def _if(self, op: Any) -> None:
        if len(op.operation.results) or len(op.operation.regions[1].blocks):
            raise PassError("lower-tiles: an scf.if in a program has no results and no else")
        self._enter(op)
        new = scf.IfOp(self.values[op.operation.operands[0]])
        with ir.InsertionPoint(new.then_block):
            self._block(op.operation.regions[0].blocks[0])
            self._finish_reads()
            scf.YieldOp([])

    def _when(self, condition: Any | None, action: Callable[[], Any]) -> None:
        if condition is None:
            action()
            return
        branch = scf.IfOp(condition)
        with ir.InsertionPoint(branch.then_block):
            action()
            scf.YieldOp([])

    # -- memory

    def _global_view(self, op: Any) -> None:
        view = Global.of(op.result.type)
        dynamic = [self.values[v] for v in op.sizes]
        sizes = tuple(dynamic.pop(0) if n < 0 else emit.constant(n) for n in view.shape)
        self.values[op.result] = Place(view, self.values[op.pointer], sizes)

    def _alloc_shared(self, op: Any) -> None:
        buffer = Shared.of(op.result.type)
        start = self.shared.allocate(op.result, buffer.bytes)
        sizes = tuple(emit.constant(n) for n in buffer.shape)
        base = emit.offset_bytes(self.shared_base, static=start)
        self.values[op.result] = Place(buffer, base, sizes)

    def _stage(self, op: Any) -> None:
        whole: Place = self.values[op.buffer]
        stride = whole.type.strides[0] * (element_bits(whole.type.element) // 8)
        step = arith.muli(self.values[op.index], emit.constant(stride))
        base = emit.offset_bytes(whole.base, dynamic=step)
        self.values[op.result] = Place(Shared.of(op.result.type), base, whole.sizes[1:])

    def _access(self, place: Place, layout: Layout, op: Any, limit: Sequence[int] = ()) -> Access:
        offsets = [self.values[v] for v in op.offsets]
        return Access(self.threads, place, layout, offsets, read_strings(op.boundary), limit)

    def _target(self, place: Place, layout: Layout) -> Access:
        """Access to a whole buffer."""
        zero = emit.constant(0)
        return Access(self.threads, place, layout, [zero] * layout.rank, ["none"] * layout.rank)

    def _copy_async(self, op: Any) -> None:
        layout = Layout.parse(text_attr(op, "layout"))
        source = self._access(self.values[op.source], layout, op, read_ints(op.limit))
        target = self._target(self.values[op.target], layout)
        length = min(a.vector_length(max(1, 16 // source.bytes)) for a in (source, target))
        size = length * source.bytes
        if size not in (4, 8, 16):
            raise PassError(f"lower-tiles: copy_async moves 4, 8 or 16 bytes per thread, not {size}; layout {layout}")
        first = source.first_replica()
        modifier = nvvm.LoadCacheModifierKind.CG if size == 16 else nvvm.LoadCacheModifierKind.CA
        for slot in range(0, layout.locals, length):
            inside = source.inside(slot, "zero")
            keep = Access.all([c for c in (first, source.inside(slot, "skip")) if c is not None])
            taken = None
            if inside is not None:
                taken = arith.select(inside, emit.constant(size), emit.constant(0))
            to, from_ = target.address(slot), source.address(slot)
            self._when(
                keep,
                lambda t=to, f=from_, n=taken: nvvm.cp_async_shared_global(t, f, size, modifier, cp_size=n),
            )

    def _copy_padded(self, op: Any) -> None:
        """See lowbit.copy_padded. Target dims are [steps, rows, columns]; a step's columns follow those of the last."""
        layout = Layout.parse(text_attr(op, "layout"))
        group, padded = int_attr(op, "group"), int_attr(op, "padded")
        place: Place = self.values[op.source]
        target = self._target(self.values[op.target], layout)
        row_offset, step_offset = (self.values[v] for v in op.offsets)
        columns = layout.shape[2]
        zero = emit.constant(0)
        index = Access(self.threads, target.place, layout, [step_offset, row_offset, zero], ["none"] * 3)
        element = ir.Type.parse(str(place.type.element))
        first = target.first_replica()
        less = arith.CmpIPredicate.slt
        for slot in range(layout.locals):
            step, row, column = (index.coordinate(d, slot) for d in range(3))
            column = arith.addi(arith.muli(step, emit.constant(columns)), column)
            within = arith.remui(column, emit.constant(padded))
            k = arith.addi(arith.muli(arith.divui(column, emit.constant(padded)), emit.constant(group)), within)
            here = arith.andi(arith.cmpi(less, within, emit.constant(group)), arith.cmpi(less, k, place.sizes[1]))
            row_inside = arith.cmpi(less, row, place.sizes[0])
            address = emit.offset_bytes(
                place.base,
                dynamic=arith.muli(
                    arith.addi(
                        arith.muli(arith.extui(emit.integer(64), row), emit.constant(place.type.strides[0], 64)),
                        arith.extui(emit.integer(64), k),
                    ),
                    emit.constant(2, 64),
                ),
            )
            to = target.address(slot)

            def copy(here: Any = here, address: Any = address, to: Any = to) -> None:
                branch = scf.IfOp(here, [element], has_else=True)
                with ir.InsertionPoint(branch.then_block):
                    scf.YieldOp([llvm.load(element, address, alignment=2)])
                with ir.InsertionPoint(branch.else_block):
                    scf.YieldOp([emit.real(0.0, element)])
                llvm.store(branch.results[0], to, alignment=2)

            self._when(Access.all([c for c in (first, row_inside) if c is not None]), copy)

    def _wait(self, op: Any) -> None:
        nvvm.cp_async_wait_group(int_attr(op, "pending"))

    def _barrier(self, op: Any) -> None:
        self._finish_reads()
        if text_attr(op, "scope") == "warp":
            nvvm.bar_warp_sync(emit.constant(-1))
        else:
            gpu.barrier()

    def _last_arrival(self, op: Any) -> None:
        """One thread counts this block in after everybody's writes; the last one to come puts the counter back."""
        self._finish_reads()
        counters: Place = self.values[op.counters]
        i32, count = emit.integer(), int_attr(op, "count")
        start = self.shared.allocate(op.result, 4)
        flag = emit.offset_bytes(self.shared_base, static=start)
        counter = emit.offset_bytes(
            counters.base,
            dynamic=arith.muli(arith.extui(emit.integer(64), self.values[op.index]), emit.constant(4, 64)),
        )
        gpu.barrier()
        thread = self.threads.digit(self.threads_per_block, 1, self.threads_per_block)
        zero = emit.constant(0)

        def arrive() -> None:
            old = llvm.inline_asm(
                i32,
                [counter, emit.constant(1)],
                "atom.acq_rel.gpu.global.add.u32 $0, [$1], $2;",
                "=r,l,r,~{memory}",
                has_side_effects=True,
                asm_dialect=0,
            )
            last = arith.cmpi(arith.CmpIPredicate.eq, old, emit.constant(count - 1))
            llvm.store(arith.extui(i32, last), flag, alignment=4)
            self._when(last, lambda: llvm.store(zero, counter, alignment=4))

        self._when(arith.cmpi(arith.CmpIPredicate.eq, thread, zero), arrive)
        gpu.barrier()
        seen = llvm.load(i32, flag, alignment=4)
        llvm.inline_asm(None, [], "fence.acq_rel.gpu;", "~{memory}", has_side_effects=True, asm_dialect=0)
        self.values[op.result] = arith.cmpi(arith.CmpIPredicate.ne, seen, zero)

    # -- loads and stores

    def _load(self, op: Any) -> None:
        reg = Reg.of(op.result.type)
        access = self._access(self.values[op.source], reg.layout, op)
        if "skip" in read_strings(op.boundary):
            raise PassError("lower-tiles: a load cannot skip elements; use 'zero' or 'clamp'")
        wide = reg.element == "vector<4xi32>"
        length = access.vector_length(1 if wide else max(1, 16 // access.bytes))
        scalar = emit.integer() if wide else ir.Type.parse(str(reg.element))
        per_load = 4 if wide else length
        loaded: dict[int, Any] = {}

        def load(first_slot: int) -> Any:
            if first_slot not in loaded:
                type_ = ir.VectorType.get([per_load], scalar) if per_load > 1 else scalar
                alignment = access.bytes * (1 if wide else length)
                inside = access.inside(first_slot, "zero")
                address = access.address(first_slot)
                if inside is None:
                    loaded[first_slot] = llvm.load(type_, address, alignment=alignment)
                else:
                    loaded[first_slot] = self._load_or_zero(type_, address, alignment, inside)
            return loaded[first_slot]

        def register(i: int) -> Any:
            slot, part = (i // 4, i % 4) if wide else (i // length * length, i % length)
            value = load(slot)
            return emit.element(value, part) if per_load > 1 else value

        fragment = Fragment(reg, "word" if wide else "scalar", register)
        self.reads.append(fragment)
        self.values[op.result] = fragment

    def _load_or_zero(self, type_: Any, address: Any, alignment: int, inside: Any) -> Any:
        branch = scf.IfOp(inside, [type_], has_else=True)
        with ir.InsertionPoint(branch.then_block):
            scf.YieldOp([llvm.load(type_, address, alignment=alignment)])
        with ir.InsertionPoint(branch.else_block):
            scf.YieldOp([llvm.mlir_zero(type_)])
        return branch.results[0]

    def _load_matrix(self, op: Any) -> None:
        reg = Reg.of(op.result.type)
        fragment = lower_load_matrix(self.threads, self.values[op.source], reg, self.values[op.rows])
        self.reads.append(fragment)
        self.values[op.result] = fragment

    def _store(self, op: Any) -> None:
        self._finish_reads()
        value: Fragment = self.values[op.value]
        reg = value.reg
        wide = reg.element == UNIT
        access = self._access(self.values[op.target], reg.layout, op)
        length = access.vector_length(max(1, 16 // access.bytes))
        first = access.first_replica()
        for slot in range(0, reg.layout.locals, length):
            keep = Access.all([c for c in (first, access.inside(slot, "skip", "zero")) if c is not None])
            if wide:
                data = self._vector(value.register, 4 * slot, 4)
            else:
                data = value.scalar(slot) if length == 1 else self._vector(value.scalar, slot, length)
            address = access.address(slot)
            self._when(keep, lambda d=data, a=address: llvm.store(d, a, alignment=access.bytes * length))

    def _vector(self, element: Callable[[int], Any], first: int, length: int) -> Any:
        elements = [element(first + i) for i in range(length)]
        vector = llvm.mlir_undef(ir.VectorType.get([length], elements[0].type))
        for i, x in enumerate(elements):
            vector = llvm.insertelement(vector, x, emit.constant(i))
        return vector

    # -- tiles

    def _constant(self, op: Any) -> None:
        reg = Reg.of(op.result.type)
        value = float(ir.FloatAttr(op.value).value)
        fragment = Fragment(reg, kind_of(reg), lambda i: emit.real(value, fragment.type()))
        self.values[op.result] = fragment

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
        """Registers of A fragments from the words of a lane: `Packing.slots` says where each is."""
        codes: Fragment = self.values[op.source]
        reg, format_ = Reg.of(op.result.type), codes.reg.element
        if not isinstance(format_, DType):
            raise PassError(f"lower-tiles: nothing to decode in {format_}")
        places = _word_places(format_, reg.layout)
        vector = ir.VectorType.get([2], ir.Type.parse(str(reg.element)))
        biased = "biased" in op.operation.attributes

        def make(i: int) -> Any:
            words = [codes.register(word) for word, _ in places[i]]
            shifts = ints([shift for _, shift in places[i]])
            pair = ops.DecodePairOp(words, format_attr(format_), shifts, op.exponent, vector)
            if biased:
                pair.operation.attributes["biased"] = ir.UnitAttr.get()
            return pair.result

        self.values[op.result] = Fragment(reg, "pair", make)

    def _encode(self, op: Any) -> None:
        """Words of a lane from its codes: the inverse of where `_decode` looks for them."""
        numbers: Fragment = self.values[op.source]
        reg = Reg.of(op.result.type)
        format_ = reg.element
        if not isinstance(format_, DType):
            raise PassError(f"lower-tiles: {format_} is no low-bit format to encode in")
        planes = Packing(format_.bits, ROWS, BLOCK_K).planes
        fields: dict[int, list[tuple[int, int, int]]] = {}  # word -> slot of the code, its plane, bit in the word
        for register, slots in enumerate(_word_places(format_, reg.layout)):
            for plane, (word, shift) in enumerate(slots):
                fields.setdefault(word, []).extend((2 * register + h, plane, shift + 16 * h) for h in range(2))
        sign = 1 << (format_.bits - 1) if format_.kind == "int" else 0  # to offset binary

        def make(word: int) -> Any:
            total = emit.constant(0)
            for slot, number, bit in fields[word]:
                plane = planes[number]
                code = arith.extui(emit.integer(), numbers.scalar(slot))
                if sign:
                    code = arith.xori(code, emit.constant(sign))
                field = emit.mask(emit.shift_right(code, plane.low), (1 << plane.bits) - 1)
                total = arith.ori(total, emit.shift_right(field, -bit))
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
        self.values[op.result] = Fragment(
            reg, "scalar", lambda i: make(*[f.scalar(s[i]) for f, s in zip(operands, slots)])
        )

    def _mma(self, op: Any) -> None:
        a, b, c = (self.values[v] for v in (op.a, op.b, op.c))
        self.values[op.result] = lower_mma(a, b, c)

    def _row_sums(self, op: Any) -> None:
        self.values[op.result] = lower_row_sums(self.values[op.source], Reg.of(op.result.type))

    def _bias_sums(self, op: Any) -> None:
        reg, start = Reg.of(op.result.type), int_attr(op, "start")
        self.values[op.result] = lower_bias_sums(self.values[op.source], reg, read_format(op.format), start)

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


def _word_places(format_: DType, layout: Layout) -> list[list[tuple[int, int]]]:
    """For every register (a pair of codes) of a thread, per plane: which of the thread's words, and the bit there."""
    blocks = fragment_blocks(layout, MMA_M16N8K16_A)
    packing = Packing(format_.bits, ROWS, BLOCK_K * (1 + max(column for _, column in blocks)))  # of one warp
    blocks_per_chunk = packing.chunk // BLOCK_K
    words_per_chunk = packing.units * WORDS_PER_UNIT
    places: list[list[tuple[int, int]]] = []
    for row_block, k_block in blocks:
        chunk, block = divmod(k_block, blocks_per_chunk)
        first = (row_block * packing.chunks + chunk) * words_per_chunk
        for register in range(4):
            slots = packing.slots(block, register)
            places.append([(first + s.unit * WORDS_PER_UNIT + s.word, s.shift) for s in slots])
    return places
