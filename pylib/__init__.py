"""lowbit: a compiler for low-bit matrix multiplication.

    spec = pylib.MatmulSpec(n=8192, k=8192, weight="u4", group_size=128)
    mm = pylib.compile(spec)
    w = mm.pack(codes, scales)
    y = mm(x, w)

Importing this is cheap: MLIR, LLVM and CUDA are loaded when something has to be compiled or run.
"""

from dialect.errors import (
    EmulatorError,
    LayoutError,
    LowbitError,
    PackError,
    PassError,
    SpecError,
    TargetError,
)
from dialect.spec import MatmulSpec
from passes.schedule import Schedule
from pylib.matmul import Matmul, compile
from pylib.packed import PackedWeight

__version__ = "0.1.0"

__all__ = [
    "EmulatorError",
    "LayoutError",
    "LowbitError",
    "Matmul",
    "MatmulSpec",
    "PackError",
    "PackedWeight",
    "PassError",
    "Schedule",
    "SpecError",
    "TargetError",
    "__version__",
    "compile",
]
