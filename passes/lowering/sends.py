"""The rule of `lower-tiles` for tiles that go to another block of the cluster."""

from __future__ import annotations

from typing import Any

from lowbit.dialect import ops
from lowbit.dialect.bindings import llvm, nvvm
from lowbit.passes.lowering import emit
from lowbit.passes.lowering.addressing import Access, Place
from lowbit.passes.lowering.barriers import signal_of
from lowbit.passes.lowering.context import CLUSTERS, LoweringContext, when
from lowbit.passes.lowering.registry import lowers

_SHARED_CLUSTER = 7  # LLVM's address space


@lowers(ops.SendOp, needs=CLUSTERS)
def send(op: Any, c: LoweringContext) -> None:
    c.pending.finish_reads()
    value, rank, here = c.tiles[op.value], c.scalars[op.rank], c.places[op.target]
    there, signal = (nvvm.mapa(emit.pointer(_SHARED_CLUSTER), at, rank) for at in (here.base, signal_of(op, c)))
    place = Place(here.type, there, here.sizes)
    target = Access(c.threads, place, value.reg.layout, c.offsets(op), ("none",) * len(here.type.shape))
    length, keep = target.vector_length(4), target.first_replica()
    for slot in range(0, value.reg.layout.locals, length):
        words = [value.scalar(slot + i) for i in range(length)]
        address = target.address(slot)
        when(keep, lambda a=address, w=words: _store(a, w, signal, str(value.reg.element)))


def _store(address: Any, words: list[Any], signal: Any, element: str) -> None:
    """Writes some words side by side, whose bytes count at the signal."""
    type_, constraint = ("f32", "f") if element == "f32" else ("b32", "r")
    values = ", ".join(f"${i + 2}" for i in range(len(words)))
    vector, values = (f".v{len(words)}", f"{{{values}}}") if len(words) > 1 else ("", values)
    text = f"st.async.weak.shared::cluster.mbarrier::complete_tx::bytes{vector}.{type_} [$0], {values}, [$1];"
    constraints = ",".join(["r", "r", *[constraint] * len(words), "~{memory}"])
    llvm.inline_asm(None, [address, signal, *words], text, constraints, has_side_effects=True, asm_dialect=0)
