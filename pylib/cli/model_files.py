"""The commands `lowbit quantize` and `lowbit inspect`. Slow imports wait until they run."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowbit.dialect.errors import SpecError
from lowbit.dialect.fields import MOST
from lowbit.dialect.formats.dtypes import all_names
from lowbit.pylib.cli.machine import checked_device
from lowbit.pylib.cli.output import Json, errors, in_options, show_json
from lowbit.pylib.quantization.config import PRESETS, QuantConfig

if TYPE_CHECKING:
    from lowbit.pylib.nn.report import LayerReport, QuantizationReport

Source = Annotated[Path, typer.Argument(help="A folder of safetensors files, with or without config.json; or a file.")]


def quantize(
    source: Source,
    out: Annotated[Path, typer.Option("--out", help="Folder that gets the low-bit model.")],
    weight: Annotated[
        str, typer.Option("--weight", "-w", help="Format, as in lowbit compile; or a whole recipe: q4_k, nvfp4 ...")
    ] = "u4",
    group_size: Annotated[
        int | None,
        typer.Option(
            "--group-size", "-g", min=0, max=MOST, help="Columns that share a scale; 128 without it; 0: one per row."
        ),
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="rtn or hqq; with --text gptq, awq ...; without it, what suits the format.")
    ] = None,
    zeros: Annotated[str | None, typer.Option(help="none, int, float or offset; without it, the method's.")] = None,
    scale: Annotated[str | None, typer.Option(help="Type of the scales; without it f16 or bf16, as the layer.")] = None,
    compute: Annotated[
        str | None, typer.Option(help="Multiply in 8 bits: f8e4m3 or i8; without it, in the type of inputs.")
    ] = None,
    compute_from: Annotated[int, typer.Option(min=1, max=MOST, help="Tokens from which on that is done.")] = 1,
    fold_scales: Annotated[bool, typer.Option("--fold-scales", help="Round scaled weights to --compute.")] = False,
    skip: Annotated[list[str] | None, typer.Option(help="Modules that stay dense; * stands for any text.")] = None,
    lm_head: Annotated[bool, typer.Option("--lm-head", help="Quantize the output layer, too.")] = False,
    embeddings: Annotated[bool, typer.Option("--embeddings", help="Quantize embeddings, too, tied or not.")] = False,
    fuse: Annotated[bool, typer.Option("--fuse", help="Make one layer of those that share their input.")] = False,
    act: Annotated[str | None, typer.Option(help="f16 or bf16; without it, as the model.")] = None,
    device: Annotated[str | None, typer.Option(help="Where to quantize: cuda or cpu.")] = None,
    text: Annotated[Path | None, typer.Option(help="A file of text, for methods that need inputs of layers.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Parts of the text to take, at most.")] = 128,
    length: Annotated[int, typer.Option(min=1, help="Tokens of each.")] = 2048,
    as_json: Json = False,
) -> None:
    """Quantize the model in a folder, and save it in another one that transformers and lowbit can load.

    Without a config.json, every matrix called *.weight is quantized, but for embeddings and the output layer. Where the
    group size does not divide the columns of a layer, models of transformers get one scale per row there (K-quants:
    smaller blocks of groups, where that suffices), which the report marks, and matrices of plain files stay dense.

    [bold]Examples[/]

      lowbit quantize llama/ --weight u4 --group-size 128 --method hqq --out llama-u4/

      lowbit quantize llama/ -w u4 --method gptq --text train.txt --out llama-gptq/

      lowbit quantize llama/ -w q4_k --out llama-q4k/

      lowbit quantize llama/ -w u4 --compute f8e4m3 --compute-from 65 --fold-scales --out llama-u4-f8/

      lowbit quantize model.safetensors -w f6e3m2 -g 0 --out model-f6/ --skip "*.router"
    """
    from lowbit.pylib.checkpoints.quantize_files import Request, quantize_folder

    config = _recipe(weight, {"group_size": group_size, "method": method, "zeros": zeros, "scale": scale})
    config = replace(config, compute=compute, compute_from=compute_from, fold_scales=fold_scales)
    where = checked_device(device)
    request = Request(config, skip or (), lm_head, embeddings, fuse, _act(act), where, text, samples, length)
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # which is for transformers, too
    with errors.status("reading") as status:
        report = quantize_folder(source, out, request, status.update)
    _show(report, as_json)


def inspect(
    source: Annotated[Path, typer.Argument(help="A folder of safetensors files; or a file, a GGUF file too.")],
    against: Annotated[Path | None, typer.Option(help="The dense model: compute each layer's error.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the outliers of each row to this SVG or PNG file.")] = None,
    as_json: Json = False,
) -> None:
    """Show what is in a checkpoint or a GGUF file: each layer's format, bytes and error.

    A checkpoint may be lowbit's own or another library's. The error is that of the weight, relative to its norm.
    Without --against it is known of what lowbit quantize wrote. Where layers have outliers, a second table shows
    how dense they are, and how they are spread over the rows.

    [bold]Examples[/]

      lowbit inspect llama-u4/

      lowbit inspect llama-gptq/ --against llama/ --json

      lowbit inspect llama-spqr/ --plot outliers.svg

      lowbit inspect model-Q4_K_M.gguf
    """
    from lowbit.pylib.checkpoints.contents import contents
    from lowbit.pylib.nn.outlier_rows import draw

    with errors.status("reading"):
        report = contents(source, against)
    if plot is not None:
        if not report.outliers:
            raise SpecError(f"--plot {plot}: no layer of {source} has outliers")
        draw(report.outliers, str(plot))
    _show(report, as_json)


def _recipe(weight: str, options: Mapping[str, Any]) -> QuantConfig:
    """Returns the recipe of a format and the options that were given, or the one that has this name."""
    given = {name: value for name, value in options.items() if value is not None}
    if weight in PRESETS and weight not in all_names():
        if given:
            names = ", ".join(map(_as_option, given))
            raise SpecError(f"--weight {weight} is a whole recipe; drop {names}, or name a format such as u4")
        return QuantConfig.preset(weight)
    return QuantConfig(weight, given.pop("group_size", 128) or None, **given)


def _act(given: str | None) -> Any:
    """Returns the type of inputs; raises SpecError for one that there is not."""
    if given is not None:
        QuantConfig().spec(16, 128, act=given)
    return given


def _show(report: QuantizationReport, as_json: bool) -> None:
    if as_json:
        show_json([_row(row) for row in report])
        return
    print(in_options(report.table(_as_option)))
    if report.outliers:
        from lowbit.pylib.nn.outlier_rows import table

        print(f"\n{table(report.outliers)}")


def _as_option(argument: str) -> str:
    """Returns how the command line spells an argument of `lowbit.quantize_`."""
    return f"--{argument.replace('_', '-')}"


def _row(row: LayerReport) -> dict[str, Any]:
    """Returns a layer in terms of JSON."""
    outliers = None if row.outliers is None else row.outliers.to_dict()
    return asdict(replace(row, outliers=None)) | {"outliers": outliers}
