"""Kernels of one matmul, each compiled at its first use or taken from the disk cache.

Nothing here imports MLIR, LLVM or CUDA before a kernel has to be compiled: with a warm cache it never has to.
"""

from __future__ import annotations

import json
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lowbit.dialect.errors import SpecError
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.decode.schedule import TOKEN_TILES, Schedule
from lowbit.passes.launch import Launch
from lowbit.passes.scheduling.choice import schedule_for, token_tiles
from lowbit.passes.stages import stages
from lowbit.passes.target import Target
from lowbit.pylib import knobs
from lowbit.pylib.build import cache
from lowbit.pylib.build import user_tables as schedules

if TYPE_CHECKING:
    from lowbit.passes.pipeline import CompiledKernel


_LARGE = 1 << 25  # weights, from which on launches of tiles are faster than writing the weight out for longer


@dataclass(frozen=True)
class Artifact:
    """What is kept of a compiled kernel. cubin: None for the emulator, which reads the PTX."""

    launch: Launch
    schedule: Schedule | None
    ptx: str
    cubin: bytes | None

    def to_files(self) -> dict[str, bytes]:
        """For the disk cache."""
        about = {"launch": self.launch.to_dict(), "schedule": self.schedule and asdict(self.schedule)}
        files = {"about.json": json.dumps(about).encode(), "kernel.ptx": self.ptx.encode()}
        return files | ({} if self.cubin is None else {"kernel.cubin": self.cubin})

    @staticmethod
    def from_files(files: dict[str, bytes]) -> Artifact:
        """The inverse of `to_files`."""
        about = json.loads(files["about.json"])
        schedule = about["schedule"]
        return Artifact(
            Launch.from_dict(about["launch"]),
            schedule and Schedule.from_dict(schedule),
            files["kernel.ptx"].decode(),
            files.get("kernel.cubin"),
        )


class Artifacts:
    """The kernels of (spec, target): per token tile, and the one that dequantizes, which stands under None.

    A `schedule` is taken for the tokens it names (8 are for one, too); other tiles choose their own. Safe to use
    from any thread.
    """

    def __init__(self, spec: MatmulSpec, target: Target, schedule: Schedule | None) -> None:
        self._spec, self._target, self._schedule = spec, target, schedule
        self._tiles = token_tiles(spec, target)
        self._kernels: dict[int | None, Artifact] = {}
        self._lock = threading.Lock()

    def tiles(self, m: int) -> list[int] | None:
        """The rule that picks kernels for m rows: the least tile of 1, 8, 16, 32, 64 and (with wgmma) 128 and mostly
        256 tokens that holds them. More take launches of the widest, of which the last may be of a lesser one; and
        those that would leave a quarter of 256 idle take 128 and what is left. That is for up to 384 rows, four
        times the widest tile where the weight is large, 192 without wgmma: measured on an H200 (docs/lab-notebook.md,
        "More than 256 tokens").

        None above: then the dequantize kernel writes the weight out and the vendor's matmul multiplies, which for so
        many is bound by arithmetic, not by reading the weight.
        """
        widest, large = self._tiles[-1], self._spec.n * self._spec.k >= _LARGE
        if m > (192 if widest < 128 else 4 * widest if large else 384):
            return None
        found: list[int] = []
        while not found or m > 0:
            tile = next((tile for tile in self._tiles if m <= tile), widest)
            if tile == TOKEN_TILES[-1] and m <= 3 * tile // 4:
                tile //= 2
            found.append(tile)
            m -= tile
        return found

    def tile(self, m: int) -> int | None:
        """That of the first launch for m rows; None for the dequantize kernel."""
        tiles = self.tiles(m)
        return tiles[0] if tiles else None

    def kernel(self, tokens: int | None) -> Artifact:
        """The kernel for up to `tokens` tokens. Raises TargetError if a tool to compile it is missing."""
        kernel = self._kernels.get(tokens)
        if kernel is None:
            with self._lock:
                kernel = self._kernels.get(tokens) or self._load(tokens)
                self._kernels[tokens] = kernel
        return kernel

    def stages(self, tokens: int | None) -> dict[str, str]:
        """The IR of a kernel after each stage; compiles it afresh."""
        return self._compile(tokens, keep=True).stages

    def _load(self, tokens: int | None) -> Artifact:
        # No tokens in the key: a kernel follows from its schedule, so two tiles may have the same one.
        key = cache.key(spec=self._spec, target=self._target, schedule=self._schedule_for(tokens))
        return Artifact.from_files(cache.load_or_build(key, lambda: self._build(tokens).to_files()))

    def _build(self, tokens: int | None) -> Artifact:
        folder = knobs.dump_dir()
        compiled = self._compile(tokens, keep=folder is not None)
        if folder is not None:
            self._dump(compiled.stages, tokens, folder)
        cubin = compiled.cubin() if self._target.kind == "cuda" else None
        return Artifact(compiled.launch, compiled.schedule, compiled.stages["ptx"], cubin)

    def _compile(self, tokens: int | None, keep: bool) -> CompiledKernel:
        from lowbit.passes import pipeline  # which loads MLIR and LLVM

        if tokens is None:
            return pipeline.compile_dequantize(self._spec, self._target, keep)
        return pipeline.compile_matmul(self._spec, self._target, self._schedule_for(tokens), tokens, keep)

    def _schedule_for(self, tokens: int | None) -> Schedule | None:
        """The schedule of a kernel; None for the one that dequantizes, which has no choices."""
        if tokens is None:
            return None
        if self._schedule and self._schedule.tokens in (tokens, max(8, tokens)):
            return self._schedule
        user = schedules.user_tables()
        return schedule_for(self._spec, tokens, self._target, schedules.gpu_name(self._target, user), user)

    def _dump(self, texts: dict[str, str], tokens: int | None, folder: Path) -> None:
        spec = self._spec
        what = "dequantize" if tokens is None else f"m{tokens}"
        name = f"{spec.weight}_{spec.n}x{spec.k}_{self._target.arch}_{what}"
        known = stages(gpu=True)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for stage, text in texts.items():
                (folder / f"{name}.{known[stage].suffix}").write_text(text)
        except OSError as error:
            raise SpecError(f"LOWBIT_DUMP={folder} can't be written ({error}); name a folder of yours") from None
