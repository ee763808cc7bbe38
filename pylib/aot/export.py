"""Ahead-of-time export: kernels of matmuls in a folder that C and C++ programs use without Python (`export`).

    folder/manifest.json       what is there, and how to start it: docs/manifest.md
    folder/kernels/, cpu/      machine code for GPUs, with its PTX, and for CPUs
    folder/include/, src/      a runtime in C, with a header for C and one for C++
    folder/CMakeLists.txt      builds it as a library that has all files in it
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from lowbit.dialect.errors import SpecError, TargetError
from lowbit.dialect.spec import MatmulSpec, interned
from lowbit.passes.target import Target
from lowbit.passes.targets import GPUS, parse_target
from lowbit.pylib.aot.cpu import cpu_to_dicts
from lowbit.pylib.aot.files import Files
from lowbit.pylib.aot.gpu import arrays_of, gpu_to_dict
from lowbit.pylib.aot.weight import weight_to_dict
from lowbit.pylib.weights import saved

MANIFEST_VERSION = 3
"""Goes up when the C runtime has to read a manifest in another way."""
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,62}")


def export(
    specs: MatmulSpec | Sequence[MatmulSpec] | Mapping[str, MatmulSpec],
    targets: str | Sequence[str],
    folder: str | Path,
    *,
    wide_range: bool = False,
) -> dict[str, Any]:
    """Writes a folder with which C and C++ programs multiply without Python, and returns its manifest.

    specs       a matmul, several, or several by name; without one they are called "u4_g128_4096x4096", say
    targets     GPUs such as "sm_80" and "sm_90a", and "cpu": x86-64 with AVX2, AVX-512 where a processor has it. No
                GPU is needed here
    folder      where to write; files of the same names are replaced
    wide_range  whether weights may have values beyond the act type (`PackedWeight.wide_range`): no kernel rounds them
                to it then, which takes longer for many rows

    Raises SpecError for specs that a target has no kernels for, for names that are none in C, and for a folder that
    can't be written; TargetError for an unknown target, and where a tool to compile for it is missing.
    """
    named, parsed = _named(specs), _parsed(targets)
    files = Files()
    manifest = {
        "manifest": MANIFEST_VERSION,
        "packing": saved.FORMAT,
        "matmuls": [matmul_to_dict(interned(spec), name, parsed, files, wide_range) for name, spec in named.items()],
    }
    files.write(Path(folder), manifest)
    return manifest


def default_name(spec: MatmulSpec) -> str:
    """Returns the name of a matmul without one."""
    parts = [spec.weight, f"g{spec.group_size}" if spec.group_size else "rows", f"{spec.n}x{spec.k}"]
    parts += [str(spec.epilogue)] if spec.epilogue else []
    return "_".join([*parts, f"{spec.experts}_experts"] if spec.experts > 1 else parts)


def _named(specs: MatmulSpec | Sequence[MatmulSpec] | Mapping[str, MatmulSpec]) -> dict[str, MatmulSpec]:
    """Returns specs by name. Raises SpecError for what is none, and for names that are."""
    if isinstance(specs, Mapping):
        named = dict(cast(Mapping[str, MatmulSpec], specs))
    else:
        listed = [specs] if isinstance(specs, MatmulSpec) else list(specs)
        for spec in listed:
            _check_spec(spec)
        named = {default_name(spec): spec for spec in listed}
        if len(named) < len(listed):
            raise SpecError("specs have the same name; give them as a dictionary: {'name': spec, ...}")
    if not named:
        raise SpecError("specs are empty; name at least one MatmulSpec")
    for name, spec in named.items():
        _check_spec(spec)
        if not _NAME.fullmatch(name):
            raise SpecError(f"specs: {name!r} must be letters, digits and _, as names in C, at most 63")
    return named


def _check_spec(spec: object) -> None:
    if not isinstance(spec, MatmulSpec):
        raise SpecError(f"specs: {spec!r} must be a MatmulSpec, such as MatmulSpec(n=64, k=256, weight='u4')")


def _parsed(targets: str | Sequence[str]) -> list[Target]:
    """Returns targets in the order of their capability, the CPU first. Raises TargetError for those of no file."""
    parsed = {parse_target(name) for name in ([targets] if isinstance(targets, str) else targets)}
    for target in parsed:
        if target.kind == "emulator":
            raise TargetError(f"target {target} is not exported; name the GPU: {target.arch!r}")
    if not parsed:
        raise TargetError("targets are empty; name at least one, such as 'sm_90a' or 'cpu'")
    order = {target: place for place, target in enumerate(GPUS)}
    return sorted(parsed, key=lambda target: order.get(target, -1))


def matmul_to_dict(
    spec: MatmulSpec, name: str, targets: Sequence[Target], files: Files, wide_range: bool = False
) -> dict[str, Any]:
    """Returns the description of a matmul in terms of JSON, and adds the code of its targets to the files."""
    described: list[dict[str, Any]] = []
    for target in targets:
        if target.is_gpu:
            described.append(gpu_to_dict(spec, target, name, files, wide_range))
        else:
            described += cpu_to_dicts(spec, name, files)
    return {
        "name": name,
        "spec": spec.to_dict(),
        "n": spec.n,
        "k": spec.k,
        "outputs": spec.outputs,
        "experts": spec.experts,
        "arrays": arrays_of(spec),
        "weight": weight_to_dict(spec),
        "targets": described,
    }
