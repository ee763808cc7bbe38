"""The rules of `lower-tiles` for memory: views, buffers, copies, barriers, loads and stores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lowbit.dialect.bindings import arith, gpu, ir, llvm, nvvm, scf
from lowbit.dialect.errors import PassError
from lowbit.dialect.layouts.layout import Layout
from lowbit.dialect.types import UNIT, Global, Reg, Shared, element_bits, read_ints, read_strings
from lowbit.passes.lowering import emit
from lowbit.passes.lowering.addressing import Access, Place
from lowbit.passes.lowering.context import ALIGN, Lowering, int_attr, text_attr
from lowbit.passes.lowering.fragment import Fragment
from lowbit.passes.lowering.mma import lower_load_matrix

_NAMED_BARRIERS = 15  # beside the one of the whole block (PTX ISA 9.7.13.1)
_SWIZZLE_ALIGN = 1024  # bytes: eight rows


class MemoryRules(Lowering):
    """One method per operation that touches memory."""

    def _global_view(self, op: Any) -> None:
        view = Global.of(op.result.type)
        dynamic = [self.values[v] for v in op.sizes]
        sizes = tuple(dynamic.pop(0) if n < 0 else emit.constant(n) for n in view.shape)
        self.values[op.result] = Place(view, self.values[op.pointer], sizes)

    def _alloc_shared(self, op: Any) -> None:
        buffer = Shared.of(op.result.type)
        start = self.shared.allocate(op.result, buffer.bytes, _SWIZZLE_ALIGN if buffer.swizzle else ALIGN)
        sizes = tuple(emit.constant(n) for n in buffer.shape)
        base = emit.offset_bytes(self.shared_base, static=start)
        self.values[op.result] = Place(buffer, base, sizes)

    def _stage(self, op: Any) -> None:
        whole: Place = self.values[op.buffer]
        stride = whole.type.strides[0] * (element_bits(whole.type.element) // 8)
        step = arith.muli(self.values[op.index], emit.constant(stride))
        base = emit.offset_bytes(whole.base, dynamic=step)
        self.values[op.result] = Place(Shared.of(op.result.type), base, whole.sizes[1:])

    def _peer(self, op: Any) -> None:
        self._require(self.target.has_clusters, "lowbit.peer", "sm_90")
        here: Place = self.values[op.buffer]
        base = nvvm.mapa(emit.pointer(7), here.base, self.values[op.rank])
        self.values[op.result] = Place(here.type, base, here.sizes)

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
        if "async_proxy" in op.operation.attributes:
            self._require(self.target.has_clusters, "a barrier for the async proxy", "sm_90")
            self._fence_async_proxy()
        scope = text_attr(op, "scope")
        threads = 32 * int_attr(op, "warps")
        if scope == "warps" and threads == 32:
            nvvm.bar_warp_sync(emit.constant(-1))
        elif scope == "warps" and threads < self.threads_per_block:
            count = self.threads_per_block // threads
            if count > _NAMED_BARRIERS:
                raise PassError(f"lower-tiles: {count} barriers of {threads} threads, a block has {_NAMED_BARRIERS}")
            group = self.threads.digit(count, threads, self.threads_per_block)
            named = arith.addi(group, emit.constant(1))  # barrier 0 is the block's
            nvvm.barrier(barrier_id=named, number_of_threads=emit.constant(threads))
        elif scope.startswith("cluster"):
            self._require(self.target.has_clusters, "a barrier of a cluster", "sm_90")
            if scope != "cluster_wait":
                nvvm.cluster_arrive(aligned=True)
            if scope != "cluster_arrive":
                nvvm.cluster_wait(aligned=True)
        else:
            gpu.barrier()

    def _alloc_signals(self, op: Any) -> None:
        self._require(self.target.has_clusters, "lowbit.alloc_signals", "sm_90")
        self._alloc_shared(op)
        groups, number, _ = Shared.of(op.result.type).shape
        base, arrivals = self.values[op.result].base, emit.constant(self.threads_per_block // groups)

        def initialise() -> None:
            for i in range(groups * number):
                nvvm.mbarrier_init(emit.offset_bytes(base, static=8 * i), arrivals)

        self._in_one_thread(initialise)
        gpu.barrier()

    def _in_one_thread(self, action: Callable[[], Any]) -> None:
        thread = self.threads.digit(self.threads_per_block, 1, self.threads_per_block)
        self._when(arith.cmpi(arith.CmpIPredicate.eq, thread, emit.constant(0)), action)

    def _signal(self, op: Any) -> Any:
        """The address of this thread's."""
        place: Place = self.values[op.signals]
        groups, number, _ = place.type.shape
        group = self.threads.digit(groups, self.threads_per_block // groups, self.threads_per_block)
        index = arith.addi(arith.muli(group, emit.constant(number)), self.values[op.index])
        return emit.offset_bytes(place.base, dynamic=arith.muli(index, emit.constant(8)))

    def _arrive(self, op: Any) -> None:
        if "copies" in op.operation.attributes:
            nvvm.cp_async_mbarrier_arrive(self._signal(op), noinc=True)
        else:
            self._finish_reads()
            nvvm.mbarrier_arrive(self._signal(op), results=[emit.integer(64)])

    def _await(self, op: Any) -> None:
        async_proxy = "async_proxy" in op.operation.attributes
        if async_proxy:
            self._finish_reads()
        lines = ["{", ".reg .pred over;", "again:"]
        lines += ["mbarrier.try_wait.parity.shared::cta.b64 over, [$0], $1;", "@!over bra again;", "}"]
        operands = [self._signal(op), self.values[op.parity]]
        llvm.inline_asm(None, operands, "\n".join(lines), "r,r,~{memory}", has_side_effects=True, asm_dialect=0)
        if async_proxy:
            self._fence_async_proxy()

    def _fence_async_proxy(self) -> None:
        nvvm.fence_proxy(nvvm.ProxyKind.async_shared, space=ir.Attribute.parse("#nvvm.shared_space<cta>"))

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

        self._in_one_thread(arrive)
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
