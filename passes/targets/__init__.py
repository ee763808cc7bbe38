"""The targets by name. A GPU architecture is a file here, and a name in `_ARCHITECTURES`."""

from __future__ import annotations

from dataclasses import replace

from lowbit.dialect.errors import TargetError
from lowbit.passes.target import Target
from lowbit.passes.targets import sm_80, sm_86, sm_87, sm_89, sm_90, sm_90a, sm_100, sm_103, sm_120

_ARCHITECTURES = (sm_80, sm_86, sm_87, sm_89, sm_90, sm_90a, sm_100, sm_103, sm_120)
GPUS = tuple(architecture.TARGET for architecture in _ARCHITECTURES)
"""Those for GPUs, in the order of compute capabilities."""
_EMULATED = tuple(replace(target, name=f"emulator:{target.arch}", kind="emulator") for target in GPUS)
_TARGETS = {target.name: target for target in (Target("cpu", "cpu"), *GPUS, *_EMULATED)}

GPU_NAMES = ", ".join(target.name for target in GPUS)


def parse_target(name: str) -> Target:
    """The target called `name`: "cpu", the name of an architecture in `GPUS`, "emulator:" and one of these, or
    "emulator" for "emulator:sm_80". "sm_90" is Hopper without wgmma; an H100 or H200 wants "sm_90a".

    Raises:
        TargetError: the name is none of these.
    """
    target = _TARGETS.get("emulator:sm_80" if name == "emulator" else name)
    if target is None:
        hint = "; leave it out for this machine's GPU" if name in ("cuda", "gpu") else ""
        raise TargetError(f"unknown target {name!r}; allowed: {', '.join(map(repr, _TARGETS))}, 'emulator'{hint}")
    return target


def target_of_gpu(capability: int, shared_per_block: int = 1 << 30) -> Target | None:
    """The best target for a GPU of this compute capability (times ten) whose blocks may have so many bytes of shared
    memory: an entry of its own, with all that the architecture has, or that of its nearest predecessor. None for a GPU
    that is older than all."""
    own = [target for target in GPUS if target.capability == capability]
    earlier = [target for target in GPUS if target.capability < capability and target.runs_later]
    fitting = [target for target in (*earlier, *own) if target.max_shared_per_block <= shared_per_block]
    return fitting[-1] if fitting else None
