"""lower-tiles: a `lowbit.program` becomes a gpu.func: layouts turn into index arithmetic, tiles into registers.

The pass walks the program once and writes the function anew. Every tile is a `Fragment` whose registers are written
down when a consumer asks for them; `passes.lowering.pending` says when that has to be. What is left of formats are
`decode_pair`, `decode_shifted_pair` and `lookup_pair`, for `lower-dequant`.

Here is the function around a program. The operations in it are lowered by rules, which the files of this folder
register (`passes.lowering.registry`) and which share a `LoweringContext` (`passes.lowering.context`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from lowbit.dialect import ops
from lowbit.dialect.bindings import arith, gpu, ir, llvm
from lowbit.dialect.errors import PassError
from lowbit.dialect.signature import TENSOR_MAP_ALIGN, TENSOR_MAP_BYTES, ParamKind
from lowbit.dialect.types import Reg, param_kind, read_ints
from lowbit.passes.base import at, each_op
from lowbit.passes.lowering import emit
from lowbit.passes.lowering.addressing import ThreadIndex
from lowbit.passes.lowering.context import ALIGN, CLUSTERS, LoweringContext, int_attr, text_attr
from lowbit.passes.lowering.registry import import_rules, lower_block
from lowbit.passes.lowering.warpgroup import declare_sums
from lowbit.passes.target import Target
from lowbit.passes.targets import parse_target

import_rules()

SHARED_SYMBOL = "shared_memory"
_WRITTEN = {"lowbit.store": 1, "lowbit.scatter": 1, "lowbit.last_arrival": 0, "lowbit.others_arrived": 0}
"""Operations that write device memory, and which of their operands it is."""
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


class _Lowering:
    """Rewrites one program."""

    def __init__(self, program: Any, target: Target) -> None:
        self.program = program
        self.target = target
        self._name, self._threads = text_attr(program, "sym_name"), int_attr(program, "threads")
        self._source = program.body.blocks[0]

    def run(self) -> None:
        function = self._empty_function()
        context = self._lower_body(function)
        self._check_shared(context.shared.bytes)
        self._annotate(function, context)

    def _empty_function(self) -> Any:
        """A gpu.func with the program's parameters, in a gpu.module of its own beside the symbol of shared memory."""
        source = self._source
        with ir.InsertionPoint(self.program):
            gpu_module = gpu.GPUModuleOp(f"{self._name}_module")
        body = gpu_module.regions[0].blocks.append()
        with ir.InsertionPoint(body):
            emit.define(
                f"llvm.mlir.global external @{SHARED_SYMBOL}() {{addr_space = 3 : i32, alignment = 1024 : i64}} : "
                "!llvm.array<0 x i8>"
            )
            type_ = ir.FunctionType.get([a.type for a in source.arguments], [])
            function = gpu.GPUFuncOp(ir.TypeAttr.get(type_), sym_name=self._name, kernel=True)
        function.operation.attributes["arg_attrs"] = self._argument_attributes(source)
        function.operation.attributes["nvvm.reqntid"] = ir.DenseI32ArrayAttr.get([self._threads, 1, 1])
        return function

    def _lower_body(self, function: Any) -> LoweringContext:
        """Lowers every operation of the program into the function; returns what the rules have left."""
        source = self._source
        block = function.operation.regions[0].blocks.append(*[a.type for a in source.arguments])
        with ir.InsertionPoint(block):
            thread = arith.index_cast(emit.integer(), gpu.thread_id(gpu.Dimension.x))
            shared_base = llvm.mlir_addressof(emit.pointer(3), SHARED_SYMBOL)
            threads = ThreadIndex(thread, ir.InsertionPoint(shared_base.owner))
            context = LoweringContext(self.target, threads, self._threads, shared_base)
            context.scalars.update(zip(source.arguments, block.arguments))
            for element in self._wgmma_sums():
                declare_sums(element)
            lower_block(source, context)
            gpu.return_([])
        return context

    def _check_shared(self, shared_bytes: int) -> None:
        if shared_bytes > self.target.max_shared_per_block:
            raise PassError(
                f"lower-tiles: {self._name} needs {shared_bytes} bytes of shared memory, {self.target} allows "
                f"{self.target.max_shared_per_block}; take fewer stages, warps_k or a smaller step_k"
            )

    def _annotate(self, function: Any, context: LoweringContext) -> None:
        """Writes on the function what starts it (`passes.launch`)."""
        attributes = function.operation.attributes
        if self.program.cluster is not None:
            context.require(CLUSTERS, f"{self._name} in clusters")
            attributes["nvvm.cluster_dim"] = ir.DenseI32ArrayAttr.get(list(read_ints(self.program.cluster)))
        if self.program.fits_blocks:
            attributes["nvvm.minctasm"] = ir.IntegerAttr.get(emit.integer(), int_attr(self.program, "max_blocks"))
        for name in ("grid", "threads", "params", "workspace"):
            attributes[f"lowbit.{name}"] = self.program.operation.attributes[name]
        shared_bytes = max(context.shared.bytes, self._claimed_bytes())
        attributes["lowbit.shared_bytes"] = ir.IntegerAttr.get(emit.integer(64), shared_bytes)

    def _claimed_bytes(self) -> int:
        """The least shared memory with which no more than `max_blocks` blocks fit on a multiprocessor.

        Where blocks of the next kernel may start early, as many as fit would crowd some multiprocessors.
        """
        if self.program.max_blocks is None:
            return 0
        blocks = int_attr(self.program, "max_blocks")
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
            if op.operation.name in _WRITTEN:
                view = op.operation.operands[_WRITTEN[op.operation.name]].owner
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

    def _wgmma_sums(self) -> list[str]:
        """Returns the types of the accumulators of wgmma."""
        names = ("lowbit.warpgroup_", "lowbit.accumulator")
        found = [op for op in self._all_ops() if op.operation.name.startswith(names)]
        return sorted({str(Reg.of(op.result.type).element) for op in found})


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
