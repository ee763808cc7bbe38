"""The command `lowbit export`: matmuls for C and C++ programs, in a folder."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from lowbit.dialect.errors import SpecError
from lowbit.dialect.formats.dtypes import all_names
from lowbit.dialect.presets import PRESETS
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.targets import GPU_NAMES
from lowbit.pylib.cli.output import Json, errors, show_json
from lowbit.pylib.cli.spec_options import default_spec, takes_spec


@takes_spec
def export(
    spec: MatmulSpec,
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE.toml]", help="Several matmuls, in place of the options of one.")
    ] = None,
    targets: Annotated[
        str | None, typer.Option("--targets", "-t", help=f"Separated by commas: {GPU_NAMES}, cpu.")
    ] = None,
    folder: Annotated[Path, typer.Option("--folder", help="Folder to write to.")] = Path("lowbit-export"),
    name: Annotated[str | None, typer.Option(help="Name of the matmul in C; without it, made of its format.")] = None,
    wide_range: Annotated[
        bool, typer.Option("--wide-range", help="For weights with values beyond the act type.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write kernels into a folder, with which C and C++ programs multiply without Python.

    No GPU is needed. The folder has a runtime in C and a CMake project. A file has several matmuls, each in a table
    matmul.NAME with the fields of a MatmulSpec, and targets = ["sm_90a", "cpu"].

    [bold]Examples[/]

      lowbit export -w u4 -g 128 -n 4096 -k 4096 --targets sm_80,sm_90a,cpu --folder u4

      lowbit export matmuls.toml --folder matmuls
    """
    from lowbit.pylib.aot.export import export as write

    specs: MatmulSpec | dict[str, MatmulSpec] = {name: spec} if name else spec
    listed = targets.split(",") if targets else []
    if file is not None:
        if name or spec != default_spec():
            raise SpecError(f"{file} has the matmuls: drop the options of one, and --name")
        specs, of_file = _read(file)
        listed = listed or of_file
    manifest = write(specs, listed, folder, wide_range=wide_range)
    if as_json:
        show_json(manifest)
    else:
        _show(manifest, folder)


def _read(file: Path) -> tuple[dict[str, MatmulSpec], list[str]]:
    """Returns the matmuls of a file by name, and its targets. Raises SpecError for a file of anything else."""
    try:
        written = tomllib.loads(file.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SpecError(f"{file} is no TOML: {error}") from None
    matmuls, targets = written.pop("matmul", {}), written.pop("targets", [])
    if written or not isinstance(matmuls, dict) or not all(isinstance(each, dict) for each in matmuls.values()):
        raise SpecError(f"{file} must have targets = [...] and tables [matmul.NAME] with the fields of a MatmulSpec")
    return {name: _spec(name, fields) for name, fields in cast(dict[str, dict[str, Any]], matmuls).items()}, targets


def _spec(name: str, fields: dict[str, Any]) -> MatmulSpec:
    """Returns the spec of a table, whose weight may be the name of a preset."""
    weight = fields.get("weight")
    try:
        if weight in PRESETS and weight not in all_names():
            others = {key: value for key, value in fields.items() if key != "weight"}
            return MatmulSpec.preset(cast(str, weight), **others)
        return MatmulSpec(**fields)
    except TypeError as error:  # a field that is none, or one that is missing
        raise SpecError(f"[matmul.{name}]: {error}; it has the fields of a MatmulSpec") from None
    except SpecError as error:
        raise SpecError(f"[matmul.{name}]: {error}") from None


def _show(manifest: dict[str, Any], folder: Path) -> None:
    """Prints what a folder has, a line for each matmul and target."""
    for matmul in manifest["matmuls"]:
        print(f"{matmul['name']}: {', '.join(target['target'] for target in matmul['targets'])}")
    written = sum(each.stat().st_size for each in folder.rglob("*") if each.is_file())
    errors.print(f"wrote {folder}, {written / 1e3:.0f} KB", markup=False)
