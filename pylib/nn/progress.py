"""A bar that shows how far a model is quantized or loaded, with time and memory."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class LayerBar:
    """Shows how many of `total` layers are done, how long the rest will take, and the memory in use, where standard
    error is a terminal and it is asked for. device: where layers go or are quantized; None: where they are."""

    def __init__(self, shown: bool, total: int, device: torch.device | str | None) -> None:
        console = Console(stderr=True)
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left:"), TimeRemainingColumn())
        names = TextColumn("{task.fields[memory]}"), TextColumn("{task.description}")
        hidden = not (shown and console.is_terminal)
        self._device = device
        self._bar = Progress(*columns, *names, console=console, transient=True, disable=hidden)
        self._task = self._bar.add_task("", total=total, memory="")

    def __enter__(self) -> LayerBar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def begin(self, name: str) -> None:
        """The layer of this name is next."""
        self._bar.update(self._task, description=name, memory=_memory(self._device))

    def end(self) -> None:
        """The layer is done."""
        self._bar.advance(self._task)


def _memory(device: torch.device | str | None) -> str:
    """Returns the memory in use, as text: of the process, and of torch's tensors on the GPU where it quantizes."""
    pages = Path("/proc/self/statm")
    parts = [int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")] if pages.exists() else []
    names = ["in memory"] * len(parts)
    if torch.cuda.is_initialized():
        parts.append(torch.cuda.memory_allocated(device if device and torch.device(device).type == "cuda" else None))
        names.append("on the GPU")
    return ", ".join(f"{size / 1e9:.1f} GB {name}" for size, name in zip(parts, names))
