"""Devices of torch as users name them, and the target that kernels for this machine are compiled for."""

from __future__ import annotations

import warnings
from functools import lru_cache
from pathlib import Path

import torch

from lowbit.dialect.errors import SpecError, TargetError
from lowbit.passes.target import Target
from lowbit.passes.targets import GPUS, parse_target, target_of_gpu

KINDS = ("cpu", "cuda")


def check_torch_device(given: torch.device | str | int | None, name: str = "device=") -> None:
    """Raise SpecError unless kernels could run on a device, and TargetError if it is not in this machine.

    given   the device; None for the one where tensors are
    name    what the caller calls it
    """
    if given is None:
        return
    try:
        device = torch.device(given)
    except (RuntimeError, TypeError):
        raise SpecError(f"{name}{given} is no device; use cpu or cuda") from None
    if device.type not in KINDS:
        raise SpecError(f"{name}{given}: low-bit weights are made and multiplied on cpu and cuda; use one of them")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= count:
        found = f"{count} CUDA devices" if count else "no CUDA device"
        raise TargetError(f"{name}{given}: torch finds {found} here; use cpu{' or cuda:0' if count else ''}")


def available_memory() -> int:
    """Returns how many bytes a process may take before the system swaps or ends it."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    kilobytes = next(line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    left = memory_of_container(Path("/sys/fs/cgroup"))
    return 1024 * int(kilobytes) if left is None else min(1024 * int(kilobytes), left)


def memory_of_container(group: Path) -> int | None:
    """Returns how many bytes the container of this process may still take, by the folder of its control group (of
    version 2); None without a limit. Files that it keeps in memory make room."""
    try:
        most, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
        kinds = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    return None if most == "max" else int(most) - int(used) + int(kinds["inactive_file"])


def target_named(given: str | None) -> Target:
    """Returns the target of a name, or this machine's for None. Raises TargetError for an unknown one."""
    return parse_target(this_machine() if given is None else given)


@lru_cache(maxsize=None)
def target_at(device: int) -> str:
    """Returns the target for tensors of the GPU with a number, or of the CPU for -1 (as `Tensor.get_device` says it).
    It is kept, since torch takes long to say it."""
    if device < 0:
        return "cpu"
    with torch.cuda.device(device):
        return this_machine()


def this_machine() -> str:
    """The target of torch's current GPU, or "cpu" if there is none.

    A GPU without a target of its own gets that of its nearest predecessor, with a warning. Raises TargetError for a GPU
    older than all targets.
    """
    if torch.version.cuda is None or not torch.cuda.is_available():
        return "cpu"
    gpu = torch.cuda.get_device_properties()
    capability = 10 * gpu.major + gpu.minor
    target = target_of_gpu(capability, gpu.shared_memory_per_block_optin)
    if target is None:
        raise TargetError(
            f"this GPU ({gpu.name}) is sm_{capability}, but the kernels need {GPUS[0]} or later; use target='cpu'"
        )
    if target.capability != capability:
        _warn_of_predecessor(gpu.name, capability, target.name)
    return target.name


@lru_cache(maxsize=None)
def _warn_of_predecessor(gpu: str, capability: int, target: str) -> None:
    """Say once what a GPU gets that is not in the table of targets."""
    warnings.warn(
        f"{gpu} is sm_{capability}, which has no target of its own: kernels are compiled for {target}, and the driver "
        f"translates them; target={target!r} says so without a warning",
        stacklevel=4,
    )
