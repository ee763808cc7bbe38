"""Generated builders: their arguments are documented by the operations, their results are `ir.Value` or views."""

from typing import Any

from . import ext as ext

arith: Any
builtin: Any
func: Any
gpu: Any
irdl: Any
llvm: Any
memref: Any
nvvm: Any
scf: Any
vector: Any
