"""Where and with what something was measured."""

from __future__ import annotations

import csv
import io
import platform
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from lowbit.pylib.build.cache import source_fingerprint

PACKAGES = (
    *("torch", "triton", "llvmlite", "torch-mlir"),
    *("humming-kernels", "gemlite", "bitsandbytes", "torchao", "vllm"),
)
CLOCKS = (
    "clocks.sm",
    "clocks.max.sm",
    "clocks.mem",
    "power.limit",
    "temperature.gpu",
)  # MHz, MHz, MHz, W, °C


def environment(commit: str | None = None) -> dict[str, object]:
    """GPU, driver, clocks, versions, commit, date; None for what can't be found out.

    commit   of the sources, where they are not a git checkout
    """
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "gpu": gpu,
        "driver": _nvidia_smi(("driver_version",))[0],
        "cuda": torch.version.cuda,
        "clocks": clocks(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "commit": commit or _commit(),
        "sources": source_fingerprint()[:12],
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def clocks() -> dict[str, str | None]:
    """Returns the clocks that the GPU runs at now."""
    return dict(zip(CLOCKS, _nvidia_smi(CLOCKS)))


def describe(environment: dict[str, object]) -> str:
    """One line for above a table."""
    versions = environment["versions"]
    torch_version = versions.get("torch") if isinstance(versions, dict) else None
    made = environment["commit"] or f"sources {environment['sources']}"
    driver = f"driver {environment['driver']}, " if environment["driver"] else ""
    date = str(environment["date"])[:10]
    return f"{environment['gpu'] or 'no GPU'}, {driver}torch {torch_version}, lowbit {made}, {date}"


def _nvidia_smi(fields: Sequence[str]) -> list[str | None]:
    output = _output("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits")
    row = next(csv.reader(io.StringIO(output)), [])
    values = [value.strip() for value in row]
    return list(values) if len(values) == len(fields) else [None] * len(fields)


def _commit() -> str | None:
    root = Path(__file__).resolve().parent.parent
    return _output("git", "-C", str(root), "rev-parse", "--short=12", "HEAD").strip() or None


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
