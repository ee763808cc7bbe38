"""The stages of a compilation, in order: what `Matmul.ir`, `--stop-after` and dumped files call them.

Importing this loads no MLIR, so that the command line answers at once. `passes.pipeline` goes from stage to stage.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """One stage: its name, the ending of a file that holds it, and our passes that lead to it from the one before."""

    name: str
    suffix: str
    passes: tuple[str, ...] = ()


TO_TILES = ("plan-packing", "select-schedule", "expand-matmul", "pipeline-copies", "share-constants")
GPU_STAGES = (
    Stage("lowbit", "lowbit.mlir"),  # one lowbit.matmul on tensors
    Stage("tile", "tile.mlir", TO_TILES),  # one block's program
    Stage("gpu", "gpu.mlir", ("lower-tiles", "lower-dequant")),  # one thread's program: gpu, scf, arith, nvvm
    Stage("llvm", "llvm.mlir", ("lower-to-llvm",)),  # the llvm and nvvm dialects
    Stage("ll", "ll"),  # LLVM IR, by MLIR's translation
    Stage("ptx", "ptx"),  # by LLVM's NVPTX back end
    Stage("cubin", "cubin"),  # by nvJitLink or ptxas
)
CPU_STAGES = (
    Stage("lowbit", "lowbit.mlir"),  # the same as a GPU's
    Stage("vector", "vector.mlir"),  # functions of vector, scf and arith
    Stage("llvm", "llvm.mlir"),  # by upstream's passes
    Stage("ll", "ll"),
    Stage("asm", "s"),  # by LLVM's back end for this machine
)


def stages(gpu: bool) -> dict[str, Stage]:
    """The stages by name: of a GPU (or the emulator, which runs its PTX), or of a CPU."""
    return {stage.name: stage for stage in (GPU_STAGES if gpu else CPU_STAGES)}
