"""The definition of the dialect in IRDL, for upstream's tools: they load it and parse and check our IR.

    lowbit irdl > lowbit.irdl.mlir
    lowbit compile --target sm_80 --stop-after lowbit | lowbit opt --mlir-print-op-generic > ir.mlir
    mlir-opt --irdl-file=lowbit.irdl.mlir ir.mlir

IRDL states the parameters of types and the operands, results, attributes and regions of operations. As the bindings
write it, it has no optional attributes (those are in comments), no traits and no verifiers: that `lowbit.return` ends a
block is beyond it, so a tool that is to read a whole
program has to be called with --mlir-very-unsafe-disable-verifier-on-parsing.
"""

from __future__ import annotations

import re

from lowbit.dialect import ops
from lowbit.dialect.bindings import new_context
from lowbit.dialect.optional import optional_attributes
from lowbit.dialect.types import Lowbit


def irdl_text() -> str:
    """An IRDL module with the dialect; above every operation the first line of its documentation."""
    summaries = {op.OPERATION_NAME.split(".")[1]: (op.__doc__ or "").strip() for op in Lowbit.operations}

    optional = {
        op.OPERATION_NAME.split(".")[1]: [f"optional: {a.name}, {a.words}" for a in optional_attributes(op).values()]
        for op in Lowbit.operations
    }

    def with_summary(operation: re.Match[str]) -> str:
        lines = [summaries[operation["name"]].partition("\n")[0], *optional[operation["name"]]]
        return "".join(f"{operation['indent']}// {line}\n" for line in lines) + operation[0]

    context = new_context()
    ops.register(context)
    module = str(Lowbit._mlir_module)  # pyright: ignore
    return re.sub(r"^(?P<indent> *)irdl\.operation @(?P<name>\w+)", with_summary, module, flags=re.MULTILINE)
