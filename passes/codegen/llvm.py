"""LLVM's optimizer and code generators, through llvmlite: what the PTX and the host back ends share."""

from functools import lru_cache
from importlib import import_module
from typing import Any

from lowbit.dialect.errors import PassError, TargetError
from lowbit.passes.codegen.llvm_text import downgrade


@lru_cache(maxsize=1)
def binding() -> Any:
    """``llvmlite.binding`` with its back ends registered.

    Raises:
        TargetError: llvmlite is not installed.
    """
    try:
        llvm = import_module("llvmlite.binding")
    except ImportError as error:
        raise TargetError(
            f"llvmlite is needed to generate code ({error}); install it: pip install 'llvmlite>=0.48'"
        ) from error
    # Shared, constant and local pointers in 32 bits: half the registers for addresses. Read when a target
    # machine is made, so it has to be set before the first one; only the NVPTX back end looks at it.
    llvm.set_option("lowbit", "--nvptx-short-ptr")
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    return llvm


def parse(llvm_ir: str, machine: Any, triple: str) -> Any:
    """`llvm_ir`, text of either LLVM version, as a llvmlite module for `machine`.

    Raises:
        PassError: the text does not parse or verify.
    """
    llvm = binding()
    try:
        module = llvm.parse_assembly(downgrade(llvm_ir), context=llvm.create_context())
        module.triple = triple
        module.data_layout = str(machine.target_data)
        module.verify()
    except RuntimeError as error:
        raise PassError(f"LLVM {llvm.llvm_version_major} does not take this LLVM IR: {error}") from error
    return module


def optimize(llvm_ir: str, machine: Any, triple: str) -> Any:
    """`llvm_ir` as `parse` takes it, after the O3 pipeline for `machine`.

    Only loops that carry unroll metadata are unrolled, and none is vectorized.
    """
    llvm, module = binding(), parse(llvm_ir, machine, triple)
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_unrolling = options.loop_vectorization = options.slp_vectorization = False
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    return module
