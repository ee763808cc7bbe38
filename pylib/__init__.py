"""lowbit: a compiler for low-bit matrix multiplication.

    spec = lowbit.MatmulSpec(n=8192, k=8192, weight="u4", group_size=128)
    mm = lowbit.compile(spec)
    w = mm.pack(codes, scales)
    y = mm(x, w)

Importing this is cheap: torch is loaded when a name that needs it is first used, MLIR, LLVM and CUDA when something has
to be compiled or run. A program that only runs saved graphs imports `pylib.torch_op`, which registers the operator.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from lowbit.aliases import alias
from lowbit.dialect.bilevel import Bilevel
from lowbit.dialect.errors import (
    CheckpointError,
    EmulatorError,
    LayoutError,
    LowbitError,
    PackError,
    PassError,
    QuantizeError,
    SpecError,
    TargetError,
)
from lowbit.dialect.spec import MatmulSpec
from lowbit.dialect.top_k import TopK
from lowbit.passes.kernels.decode.schedule import IntegerSchedule, Schedule
from lowbit.passes.kernels.eight_bit.schedule import EightBitSchedule
from lowbit.passes.kernels.eight_bit_in_order.schedule import EightBitInOrderSchedule
from lowbit.passes.kernels.eight_bit_mma_in_order.schedule import EightBitMmaInOrderSchedule
from lowbit.passes.kernels.eight_bit_prefill.schedule import EightBitPrefillSchedule
from lowbit.passes.kernels.eight_bit_prefill_mma.schedule import EightBitPrefillMmaSchedule
from lowbit.passes.kernels.persistent.schedule import PrefillSchedule
from lowbit.passes.kernels.prefill_in_order.schedule import PrefillInOrderSchedule
from lowbit.passes.kernels.prefill_mma.schedule import PrefillMmaSchedule
from lowbit.passes.kernels.prefill_mma_in_order.schedule import PrefillMmaInOrderSchedule
from lowbit.pylib.quantization.config import QuantConfig

if TYPE_CHECKING:
    from lowbit.pylib.aot.export import export
    from lowbit.pylib.checkpoints.checkpoint import Checkpoint, open_checkpoint
    from lowbit.pylib.checkpoints.gguf.file import GgufFile, load_gguf
    from lowbit.pylib.checkpoints.model import load_checkpoint, save_checkpoint
    from lowbit.pylib.checkpoints.registry import import_experts, import_weight
    from lowbit.pylib.explain.kernels import explain_experts, explain_program
    from lowbit.pylib.integrations.config import LowbitConfig
    from lowbit.pylib.integrations.gguf import from_gguf
    from lowbit.pylib.matmul import Matmul, compile
    from lowbit.pylib.nn.embedding import LowbitEmbedding, TiedLinear
    from lowbit.pylib.nn.experts import LowbitExperts
    from lowbit.pylib.nn.fuse import FusedLayers, fuse_, unfuse_
    from lowbit.pylib.nn.linear import LowbitLinear
    from lowbit.pylib.nn.quant_plan import QuantPlan
    from lowbit.pylib.nn.quantize_model import quantize_
    from lowbit.pylib.nn.report import LayerReport, QuantizationReport
    from lowbit.pylib.nn.sensitivity import plan, sensitivity
    from lowbit.pylib.nn.set_compute import set_compute_
    from lowbit.pylib.quantization.api import quantize
    from lowbit.pylib.quantization.calibration import Calibration
    from lowbit.pylib.quantization.quantized import QuantizedWeight
    from lowbit.pylib.runtime.activation import QuantizedActivation
    from lowbit.pylib.runtime.batch_invariant import batch_invariant
    from lowbit.pylib.runtime.kernel import Kernel, compile_program, load
    from lowbit.pylib.runtime.overlap import overlap_launches
    from lowbit.pylib.runtime.quantize_activation import quantize_activation
    from lowbit.pylib.weights.packed import PackedWeight

alias(__name__)
__version__ = "0.1.0"

__all__ = [
    "Bilevel",
    "Calibration",
    "Checkpoint",
    "CheckpointError",
    "EightBitInOrderSchedule",
    "EightBitMmaInOrderSchedule",
    "EightBitPrefillMmaSchedule",
    "EightBitPrefillSchedule",
    "EightBitSchedule",
    "EmulatorError",
    "FusedLayers",
    "GgufFile",
    "IntegerSchedule",
    "Kernel",
    "LayerReport",
    "LayoutError",
    "LowbitConfig",
    "LowbitEmbedding",
    "LowbitError",
    "LowbitExperts",
    "LowbitLinear",
    "Matmul",
    "MatmulSpec",
    "PackError",
    "PackedWeight",
    "PassError",
    "PrefillInOrderSchedule",
    "PrefillMmaInOrderSchedule",
    "PrefillMmaSchedule",
    "PrefillSchedule",
    "QuantConfig",
    "QuantPlan",
    "QuantizationReport",
    "QuantizeError",
    "QuantizedActivation",
    "QuantizedWeight",
    "Schedule",
    "SpecError",
    "TargetError",
    "TiedLinear",
    "TopK",
    "__version__",
    "batch_invariant",
    "compile",
    "compile_program",
    "explain_experts",
    "explain_program",
    "export",
    "from_gguf",
    "fuse_",
    "import_experts",
    "import_weight",
    "load",
    "load_checkpoint",
    "load_gguf",
    "open_checkpoint",
    "overlap_launches",
    "plan",
    "quantize",
    "quantize_",
    "quantize_activation",
    "save_checkpoint",
    "sensitivity",
    "set_compute_",
    "unfuse_",
]
if find_spec("transformers") is None:  # so that `from lowbit import *` and help(lowbit) work without it
    __all__.remove("LowbitConfig")
    __all__.remove("from_gguf")

_NEEDS_TORCH = {
    "Calibration": "quantization.calibration",
    "FusedLayers": "nn.fuse",
    "Checkpoint": "checkpoints.checkpoint",
    "GgufFile": "checkpoints.gguf.file",
    "Kernel": "runtime.kernel",
    "LayerReport": "nn.report",
    "LowbitConfig": "integrations.config",
    "LowbitEmbedding": "nn.embedding",
    "LowbitExperts": "nn.experts",
    "LowbitLinear": "nn.linear",
    "Matmul": "matmul",
    "PackedWeight": "weights.packed",
    "QuantPlan": "nn.quant_plan",
    "QuantizationReport": "nn.report",
    "QuantizedActivation": "runtime.activation",
    "QuantizedWeight": "quantization.quantized",
    "TiedLinear": "nn.embedding",
    "batch_invariant": "runtime.batch_invariant",
    "compile": "matmul",
    "compile_program": "runtime.kernel",
    "explain_experts": "explain.kernels",
    "explain_program": "explain.kernels",
    "export": "aot.export",
    "from_gguf": "integrations.gguf",
    "fuse_": "nn.fuse",
    "unfuse_": "nn.fuse",
    "import_experts": "checkpoints.registry",
    "import_weight": "checkpoints.registry",
    "load": "runtime.kernel",
    "load_checkpoint": "checkpoints.model",
    "load_gguf": "checkpoints.gguf.file",
    "open_checkpoint": "checkpoints.checkpoint",
    "overlap_launches": "runtime.overlap",
    "plan": "nn.sensitivity",
    "quantize": "quantization.api",
    "quantize_": "nn.quantize_model",
    "quantize_activation": "runtime.quantize_activation",
    "save_checkpoint": "checkpoints.model",
    "sensitivity": "nn.sensitivity",
    "set_compute_": "nn.set_compute",
}


def __getattr__(name: str) -> Any:
    if name not in _NEEDS_TORCH:
        raise AttributeError(f"module 'lowbit' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = globals()[name] = getattr(import_module(f"lowbit.pylib.{_NEEDS_TORCH[name]}"), name)
    return value
