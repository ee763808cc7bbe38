"""lower-tiles: a `lowbit.program` becomes a gpu.func: layouts turn into index arithmetic, tiles into registers.

The pass walks the program once and writes the function anew. Every tile is a `Fragment` whose registers are written
down when a consumer asks for them; what reads memory is finished before the next barrier, store or region. What is
left of formats are `decode_pair`, `decode_shifted_pair` and `lookup_pair`, for `lower-dequant`.

Here are the function around a program, its scalars, loops and branches; `passes.lowering.memory`,
`passes.lowering.tables`, `passes.lowering.registers` and `passes.lowering.integer_mma` have the rules for the other
operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from lowbit.dialect import ops
from lowbit.dialect.bindings import arith, gpu, ir, llvm, nvvm, scf
from lowbit.dialect.errors import PassError
from lowbit.dialect.signature import TENSOR_MAP_ALIGN, TENSOR_MAP_BYTES, ParamKind
from lowbit.dialect.types import param_kind, read_ints
from lowbit.passes.base import at, each_op
from lowbit.passes.lowering import emit
from lowbit.passes.lowering.addressing import Place, ThreadIndex
from lowbit.passes.lowering.context import ALIGN, int_attr, text_attr
from lowbit.passes.lowering.fragment import Fragment
from lowbit.passes.lowering.integer_mma import LimbRules
from lowbit.passes.lowering.memory import MemoryRules
from lowbit.passes.lowering.registers import TileRules
from lowbit.passes.lowering.tables import TableRules
from lowbit.passes.lowering.wgmma import declare_sums
from lowbit.passes.target import Target, parse_target

SHARED_SYMBOL = "shared_memory"
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


class _Lowering(MemoryRules, TableRules, TileRules, LimbRules):
    """Rewrites one program."""

    def __init__(self, program: Any, target: Target) -> None:
        super().__init__(program, target)
        self.handlers: dict[str, Callable[[Any], None]] = {
            "lowbit.block_id": self._block_id,
            "lowbit.grid_wait": lambda op: self._grid_control(nvvm.GridDepActionKind.wait),
            "lowbit.grid_launch_dependents": lambda op: self._grid_control(nvvm.GridDepActionKind.launch_dependents),
            "lowbit.global_view": self._global_view,
            "lowbit.alloc_shared": self._alloc_shared,
            "lowbit.peer": self._peer,
            "lowbit.free_shared": lambda op: self.shared.free(op.buffer),
            "lowbit.stage": self._stage,
            "lowbit.alloc_signals": self._alloc_signals,
            "lowbit.arrive": self._arrive,
            "lowbit.await": self._await,
            "lowbit.copy_async": self._copy_async,
            "lowbit.copy_padded": self._copy_padded,
            "lowbit.fill_table": self._fill_table,
            "lowbit.commit": lambda op: nvvm.cp_async_commit_group(),
            "lowbit.wait": self._wait,
            "lowbit.barrier": self._barrier,
            "lowbit.last_arrival": self._last_arrival,
            "lowbit.constant": self._constant,
            "lowbit.splat": self._splat,
            "lowbit.load": self._load,
            "lowbit.load_matrix": self._load_matrix,
            "lowbit.store": self._store,
            "lowbit.view": self._view,
            "lowbit.decode": self._decode,
            "lowbit.lookup": self._lookup,
            "lowbit.encode": self._encode,
            "lowbit.slice": self._slice,
            "lowbit.reshape": self._reshape,
            "lowbit.cast": self._cast,
            "lowbit.add": lambda op: self._elementwise(op, arith.addf),
            "lowbit.mul": lambda op: self._elementwise(op, arith.mulf),
            "lowbit.fma": lambda op: self._elementwise(op, emit.fma),
            "lowbit.mma": self._mma,
            "lowbit.warpgroup_mma": self._warpgroup_mma,
            "lowbit.warpgroup_row_sums": self._warpgroup_row_sums,
            "lowbit.reduce": self._reduce,
            "lowbit.row_sums": self._row_sums,
            "lowbit.offset_sums": self._offset_sums,
            "lowbit.split_limbs": self._split_limbs,
            "lowbit.limb_mma": self._limb_mma,
            "lowbit.limb_sums": self._limb_sums,
            "lowbit.join_limbs": self._join_limbs,
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
            if self._has_wgmma():
                declare_sums()
            self._block(source)
            gpu.return_([])
        if self.shared.bytes > self.target.max_shared_per_block:
            raise PassError(
                f"lower-tiles: {name} needs {self.shared.bytes} bytes of shared memory, {self.target} allows "
                f"{self.target.max_shared_per_block}; take fewer stages, warps_k or a smaller step_k"
            )
        if ops.CLUSTER in program.operation.attributes:
            self._require(self.target.has_clusters, f"{name} in clusters", "sm_90")
            blocks = list(read_ints(program.operation.attributes[ops.CLUSTER]))
            function.operation.attributes["nvvm.cluster_dim"] = ir.DenseI32ArrayAttr.get(blocks)
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
        return min(-(-least // ALIGN) * ALIGN, self.target.max_shared_per_block)

    def _argument_attributes(self, source: Any) -> Any:
        """No two pointers alias; those only read are marked so, unless the kernel overlaps with the one before it,
        which may still write there. From "noalias" LLVM would infer it, and read by `ld.global.nc`, which is for what
        nobody writes (PTX ISA 9.7.9.9) and may be moved across the wait."""
        every = self._all_ops()
        overlaps = self.target.has_clusters and any(op.operation.name == "lowbit.grid_wait" for op in every)
        written: set[Any] = set()
        for op in every:
            if op.operation.name in ("lowbit.store", "lowbit.last_arrival"):
                view = op.operation.operands[1 if op.operation.name == "lowbit.store" else 0].owner
                if not isinstance(view, ir.Block) and view.name == "lowbit.global_view":
                    written.add(view.operands[0])
        each = [_attributes_of(param_kind(a.type, "parameter"), a in written, overlaps) for a in source.arguments]
        return ir.ArrayAttr.get([ir.DictAttr.get(attributes) for attributes in each])

    def _all_ops(self) -> list[Any]:
        found: list[Any] = []

        def visit(op: Any) -> Any:
            found.append(op.opview)
            return ir.WalkResult.ADVANCE

        self.program.operation.walk(visit)
        return found

    def _has_wgmma(self) -> bool:
        return any(op.operation.name.startswith("lowbit.warpgroup_") for op in self._all_ops())

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
        if self.target.has_clusters:  # before, kernels do not overlap
            nvvm.griddepcontrol(kind)

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
            results: list[Any] = []
            for value, start in zip(
                (self.values[v] for v in old.operations[len(old.operations) - 1].operands), initial
            ):
                results += value.registers(start.kind) if isinstance(start, Fragment) else [value]
            self._finish_reads()  # after the results, which took what they need in their own order
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
        beside_mma = "lowbit.beside_mma" in op.operation.attributes  # nothing here changes what is being multiplied
        if beside_mma:
            self._begin_product()
        else:
            self._enter(op)
        new = scf.IfOp(self.values[op.operation.operands[0]])
        with ir.InsertionPoint(new.then_block):
            self._block(op.operation.regions[0].blocks[0])
            if not beside_mma:
                self._finish_reads()
            scf.YieldOp([])


def _attributes_of(kind: ParamKind, written: bool, overlaps: bool) -> dict[str, Any]:
    """The attributes of a parameter, for `_argument_attributes`. A tensor map is passed by value and never written."""
    align, unit = "llvm.align", ir.UnitAttr.get()
    if kind == "tensor_map":
        by_value = ir.TypeAttr.get(ir.Type.parse(f"!llvm.array<{TENSOR_MAP_BYTES} x i8>"))
        alignment = ir.IntegerAttr.get(emit.integer(64), TENSOR_MAP_ALIGN)
        return {"llvm.byval": by_value, align: alignment}
    if kind != "pointer":
        return {}
    attributes: dict[str, Any] = {align: ir.IntegerAttr.get(emit.integer(64), 16)}
    if written or not overlaps:
        attributes["llvm.noalias"] = unit
    if not written and not overlaps:
        attributes["llvm.readonly"] = unit
    return attributes
