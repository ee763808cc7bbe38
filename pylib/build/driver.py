"""The compile driver: from the request for a kernel to the kernel, by way of the disk cache.

Nothing here imports MLIR, LLVM or CUDA before a kernel has to be compiled: with a warm cache it never has to.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from lowbit.dialect.errors import SpecError
from lowbit.passes.kernels.base import KernelRequest, KernelSchedule
from lowbit.passes.kernels.registry import schedule_from_dict, schedule_to_dict
from lowbit.passes.launch import Launch
from lowbit.passes.stages import stages
from lowbit.pylib.build import cache, in_flight, knobs


@dataclass(frozen=True)
class Program:
    """A compiled kernel as a device needs it. cubin: None for the emulator, which reads the PTX."""

    launch: Launch
    ptx: str
    cubin: bytes | None

    def to_files(self) -> dict[str, bytes]:
        """Returns the files of an entry of the disk cache."""
        files = {"about.json": json.dumps(self._about()).encode(), "kernel.ptx": self.ptx.encode()}
        return files | ({} if self.cubin is None else {"kernel.cubin": self.cubin})

    @classmethod
    def from_files(cls, files: dict[str, bytes]) -> Self:
        """The inverse of `to_files`. Raises an exception of some kind for what can't be loaded."""
        if not all(files.values()):
            raise ValueError("an empty file")
        about = json.loads(files["about.json"])
        kernel = Launch.from_dict(about["launch"]), files["kernel.ptx"].decode(), files.get("kernel.cubin")
        return cls(*kernel, **cls._more(about))

    def _about(self) -> dict[str, Any]:
        """Returns what JSON has of it."""
        return {"launch": self.launch.to_dict()}

    @staticmethod
    def _more(about: dict[str, Any]) -> dict[str, Any]:
        """Returns the fields that a derived class has besides, of what `_about` has written."""
        return {}


@dataclass(frozen=True)
class Artifact(Program):
    """The kernel of a request as it is kept."""

    schedule: KernelSchedule

    def _about(self) -> dict[str, Any]:
        return {**super()._about(), "schedule": schedule_to_dict(self.schedule)}

    @staticmethod
    def _more(about: dict[str, Any]) -> dict[str, Any]:
        return {"schedule": schedule_from_dict(about["schedule"])}


def load(request: KernelRequest, name: str) -> Artifact:
    """The kernel of a request, from the disk cache or compiled; `name` is that of its files under LOWBIT_DUMP.

    Raises TargetError if a tool to compile it is missing.
    """
    # 1. Wait for it if other processes are compiling it (`pylib.build.ahead`).
    in_flight.wait_for(request)
    # 2. Look it up by everything that can change it: the request, the tools and the compiler's sources.
    key = _key(request)
    # 3. Compile it where it is not there, and keep it. Nothing is chosen any more: the request says it all.
    # 4. Read it, in either case, from the files that the cache keeps.
    return cache.load_or_build(key, lambda: _build(request, name).to_files(), Artifact.from_files)


def is_kept(request: KernelRequest) -> bool:
    """Tells whether the disk cache has the kernel of a request."""
    return cache.Cache().get(_key(request)) is not None


def _key(request: KernelRequest) -> str:
    return cache.key(request=request, lines=knobs.line_info())


def _build(request: KernelRequest, name: str) -> Artifact:
    from lowbit.passes import pipeline  # which loads MLIR and LLVM

    folder = knobs.dump_dir()
    # 3a. Lower it, stage by stage, to PTX: `passes.stages` has the table.
    compiled = pipeline.compile_kernel(request, keep=folder is not None, lines=knobs.line_info())
    # 3b. Write down every stage, if the user wants to see them.
    if folder is not None:
        _dump(compiled.stages, name, folder)
    # 3c. Assemble it, for a GPU.
    cubin = compiled.cubin() if request.target.kind == "cuda" else None
    return Artifact(compiled.launch, compiled.stages["ptx"], cubin, request.schedule)


def compile_stages(request: KernelRequest) -> dict[str, str]:
    """The IR of a kernel after each stage; compiles it afresh."""
    from lowbit.passes import pipeline

    return pipeline.compile_kernel(request, keep=True, lines=knobs.line_info()).stages


def _dump(texts: dict[str, str], name: str, folder: Path) -> None:
    known = stages(gpu=True)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for stage, text in texts.items():
            (folder / f"{name}.{known[stage].suffix}").write_text(text)
    except OSError as error:
        raise SpecError(f"LOWBIT_DUMP={folder} can't be written ({error}); name a folder of yours") from None
