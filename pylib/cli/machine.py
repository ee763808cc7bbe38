"""The facts behind `lowbit info`: the GPU, CPU and tools of this machine."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

from lowbit.dialect.errors import LowbitError
from lowbit.passes.targets import GPU_NAMES, GPUS, target_of_gpu
from lowbit.pylib.build.cache import Cache
from lowbit.pylib.build.installed import versions

TARGETS = f"{GPU_NAMES}, cpu, or emulator:<sm>"
_PACKAGES = ("torch-mlir", "llvmlite", "cuda-bindings", "nvidia-nvjitlink", "torch", "numpy")
_CPU_FEATURES = ("avx2", "f16c", "fma", "avx512f", "avx512vnni", "avx512bf16", "avx512fp16", "amx-bf16")


def facts() -> dict[str, str]:
    """Name and value of each fact, in the order to show them."""
    import lowbit

    return {
        "lowbit": f"{lowbit.__version__}, Python {platform.python_version()}",
        **_gpus(),
        "CPU": _cpu(),
        "toolchain": ", ".join(f"{name} {found or 'missing'}" for name, found in versions(*_PACKAGES).items()),
        "cache": _cache(),
        "targets": TARGETS,
        "run on": f"{', '.join(f'{t} ({t.hardware})' for t in GPUS if t.hardware)}; the others in the emulator only",
    }


def checked_device(name: str | None) -> str | None:
    """Returns the name of a device of torch. Raises SpecError for what is none, TargetError for what is not here."""
    from lowbit.pylib.runtime.devices import check_torch_device

    check_torch_device(name, "--device ")
    return name


def _gpus() -> dict[str, str]:
    import torch

    if not torch.cuda.is_available():
        return {"GPU": "none"}
    driver = Path("/proc/driver/nvidia/version")
    text = driver.read_text().splitlines()[0].split("  ") if driver.exists() else ["", "unknown"]
    found = {"driver": f"{text[1].strip()}, CUDA {torch.version.cuda} in torch"}
    for index in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(index)
        size = f"{p.multi_processor_count} SMs, {p.total_memory / 2**30:.0f} GiB"
        found[f"GPU {index}"] = f"{p.name}, sm_{p.major}{p.minor}, {size}; {_target(p)}"
    return found


def _target(properties: Any) -> str:
    """Returns the target that a GPU is compiled for where none is given, and why."""
    capability = 10 * properties.major + properties.minor
    target = target_of_gpu(capability, properties.shared_memory_per_block_optin)
    if target is None:
        return f"too old: the kernels need {GPUS[0]} or later"
    own = "" if target.capability == capability else f", as sm_{capability} has no target of its own"
    return f"target {target}{own}"


def _cpu() -> str:
    """LLVM's name of the processor, and which of the vector extensions it has that matter here."""
    try:
        from lowbit.passes.codegen.host import host_cpu, host_features

        present = [name for name in _CPU_FEATURES if name in host_features()]
        return f"{host_cpu()}: {', '.join(present) or 'no AVX2'}"
    except LowbitError as error:  # without LLVM
        return str(error)


def _cache() -> str:
    found = Cache().info()
    return f"{found.directory}: {found.entries} kernels, {found.bytes / 1e6:.1f} MB"
