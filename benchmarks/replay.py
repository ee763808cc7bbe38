"""Process replay: compiles the same kernels in two checkouts and compares their PTX.

    python -m benchmarks replay REVISION            all kernels, about a quarter of an hour on two cores
    python -m benchmarks replay REVISION --every 8  one of eight

A refactoring must change no kernel. Names of functions and parameters may differ, nothing else may. This file runs as
a script in both checkouts, so it uses of lowbit only what every version has: `pylib.compile` and `Matmul.kernel`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

FORMATS = (
    *(f"{kind}{bits}" for bits in range(1, 9) for kind in "ui"),
    *("f3e1m1", "f4e2m1", "f5e2m2", "f6e3m2", "f6e2m3", "f7e3m3", "f8e4m3", "f8e5m2", "f8e7m0"),
    *("nf4", "fp4_bnb"),
)
TARGETS = ("sm_90a", "sm_80", "sm_89", "sm_90")
TOKENS = (1, 8, 16, 32, 64, 128, 256, 4096)  # 4096: persistent blocks, or the kernel that dequantizes
SIZES = ((4096, 4096, 128), (57344, 8192, 128), (8192, 8192, 32), (1000, 1536, None), (512, 816, 48), (11008, 4096, 64))
VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"zeros": "int"},
    {"zeros": "float"},
    {"act": "bf16"},
    {"scale": "f32"},
    {"scale": "e8m0", "act": "bf16"},
    {"scale": "e4m3"},
    {"bias": True, "out": "f32"},
    {"zeros": "float", "act": "bf16", "scale": "bf16"},
)
SCHEDULES: tuple[dict[str, int], ...] = (  # by the names they had first: every version reads these
    {"tokens": 1, "digits": 1, "row_blocks": 1, "warps_k": 4, "step_k": 256},
    {"tokens": 1, "resident": 1, "stages": 1, "row_blocks": 1, "warps_k": 4, "least_blocks": 264},
    {"tokens": 8, "bare": 1},
    {"tokens": 16, "throttle": 2, "stages": 4},
    {"tokens": 16, "splits": 4, "cluster": 4},
    {"tokens": 8, "splits": 2, "max_blocks": 2},
    {"tokens": 64, "wgmma": 1, "warps_n": 4, "warps_k": 2, "late": 1},
    {"tokens": 128, "wgmma": 1, "warps_n": 8, "warps_k": 1, "late": 2, "row_blocks": 1},
    {"tokens": 32, "wgmma": 1, "warps_n": 4, "warps_k": 2, "row_blocks": 1, "overlap": 1},
)

MORE: tuple[dict[str, Any], ...] = (  # each on every target, for every number of tokens in MORE_TOKENS
    {"weight": "u4", "group_size": 32, "zeros": "offset", "scale": "u6", "bilevel": {"groups": 8}},  # GGUF's q4_k
    {"weight": "i3", "group_size": 16, "scale": "i6", "bilevel": {"groups": 16}, "act": "bf16"},  # q3_k
    {"weight": "f4e2m1", "group_size": 16, "scale": "e4m3", "row_scales": True},  # NVFP4
    {"weight": "u3", "group_size": 16, "zeros": "float", "scale": "u3", "outliers": True}
    | {"bilevel": {"rows": 16, "groups": 1, "zeros": True}},  # SpQR
    {"weight": "u4", "group_size": 128, "outliers": True, "act": "bf16", "scale": "f32"},
    {"weight": "u4", "group_size": 128, "zeros": "int", "compute": "i8"},
    {"weight": "f6e3m2", "group_size": 64, "compute": "f8e4m3", "act": "bf16"},
    {"weight": "u4", "group_size": 128, "zeros": "float", "compute": "f8e4m3", "fold_scales": True},
)
MORE_TOKENS = (1, 8, 16, 64, 512, 2048)
MORE_SIZES = ((4096, 4096), (1000, 1536), (8192, 8192))

Kernel = dict[str, Any]


def kernels() -> Iterator[Kernel]:
    """Spec, target, tokens and schedule of every kernel, in an order of which any slice is a fair sample."""
    every = [
        {"spec": {"n": n, "k": k, "weight": weight, "group_size": group} | VARIANTS[(i + j) % len(VARIANTS)]}
        | {"target": TARGETS[(i + j) % len(TARGETS)], "tokens": TOKENS[(i + 3 * j) % len(TOKENS)], "schedule": None}
        for i, weight in enumerate(FORMATS)
        for j, (n, k, group) in enumerate(SIZES)
    ]
    for i, weight in enumerate(("u4", "i4", "u2", "u8", "f6e3m2", "nf4")):
        for j, schedule in enumerate(SCHEDULES):
            spec = {"n": 4096, "k": 8192, "weight": weight, "group_size": 128} | VARIANTS[(i + j) % 4]
            every.append({"spec": spec, "target": "sm_90a", "tokens": schedule["tokens"], "schedule": schedule})
    for (i, weight), target, (j, tokens) in product(enumerate(MORE), TARGETS, enumerate(MORE_TOKENS)):
        n, k = MORE_SIZES[(i + j) % len(MORE_SIZES)]
        every.append({"spec": {"n": n, "k": k} | weight, "target": target, "tokens": tokens, "schedule": None})
    return iter(sorted(every, key=lambda kernel: hashlib.sha256(json.dumps(kernel).encode()).digest()))


def ptx(kernel: Kernel) -> str:
    """The kernel's PTX without comments, its function called `kernel`; or the error that it is refused with."""
    import pylib

    read = getattr(pylib.Schedule, "from_dict", lambda fields: pylib.Schedule(**fields))
    try:
        schedule = kernel["schedule"] and read(kernel["schedule"])
        mm = pylib.compile(pylib.MatmulSpec(**kernel["spec"]), kernel["target"], schedule)
        text = mm.kernel(kernel["tokens"]).ptx
    except pylib.LowbitError as error:
        return f"refused: {type(error).__name__}"
    (name,) = re.findall(r"\.entry (\w+)", text)
    return re.sub(rf"\b{name}(?=_param_|\b)", "kernel", re.sub(r"\s*//.*", "", text))


def _in_checkout(tree: Path, every: int) -> list[str]:
    """The PTX of every `every`-th kernel, compiled by the sources in `tree`."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "ptx.json"
        environment = os.environ | {"PYTHONPATH": str(tree), "LOWBIT_NO_CACHE": "1", "LOWBIT_CACHE_DIR": folder}
        command = [sys.executable, "-P", __file__, str(every), str(out)]
        subprocess.run(command, check=True, cwd=tree, env=environment)
        return json.loads(out.read_text())


def replay(revision: str, every: int) -> tuple[int, list[Kernel]]:
    """The number of kernels that were compared, and those that differ between `revision` and the working tree."""
    here = Path(__file__).resolve().parent.parent
    with tempfile.TemporaryDirectory() as folder:
        there = Path(folder) / "base"
        subprocess.run(["git", "-C", here, "worktree", "add", "--quiet", "--detach", there, revision], check=True)
        try:
            before = _in_checkout(there, every)
        finally:
            subprocess.run(["git", "-C", here, "worktree", "remove", "--force", there], check=True)
    after = _in_checkout(here, every)
    compared = list(kernels())[::every]
    return len(compared), [kernel for kernel, a, b in zip(compared, before, after, strict=True) if a != b]


def _main(every: int, out: Path) -> None:
    with ProcessPoolExecutor() as pool:
        out.write_text(json.dumps(list(pool.map(ptx, list(kernels())[::every]))))


if __name__ == "__main__":
    _main(int(sys.argv[1]), Path(sys.argv[2]))
