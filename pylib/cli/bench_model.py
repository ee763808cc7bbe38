"""The command `lowbit bench-model`. Slow imports wait until it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from lowbit.dialect.errors import SpecError
from lowbit.dialect.fields import MOST
from lowbit.dialect.formats.byte_codes import products_named
from lowbit.pylib.cli.machine import checked_device
from lowbit.pylib.cli.output import Json, errors, show_json
from lowbit.pylib.quantization.config import QuantConfig

if TYPE_CHECKING:
    from lowbit.pylib.model_speed.runner import Step

MOST_TOKENS = 1 << 20  # of a prompt, and sequences of a batch


def bench_model(
    model: Annotated[str, typer.Argument(help="tiny, llama-3.1-8b, qwen3-30b-a3b ..., or a folder with config.json.")],
    weights: Annotated[str, typer.Option("--weight", "-w", help="Formats: bf16, u4, u4:f8e4m3 ...")] = "bf16,u4",
    group_size: Annotated[
        int,
        typer.Option("--group-size", "-g", min=0, max=MOST, help="Columns that share a scale; 0: one scale per row."),
    ] = 128,
    batch: Annotated[str, typer.Option(help="Sequences that are decoded at once; none for no decoding.")] = "1",
    prefill: Annotated[str, typer.Option(help="Lengths of prompts; none for no prefill.")] = "512",
    context: Annotated[
        int, typer.Option(min=1, max=MOST_TOKENS, help="Tokens that are in the cache when a token is decoded.")
    ] = 512,
    layers: Annotated[int | None, typer.Option(min=1, max=MOST, help="Keep so many layers of the model.")] = None,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; without it, the GPU if there is one.")] = None,
    compiled: Annotated[bool, typer.Option("--compile/--no-compile", help="Use torch.compile.")] = True,
    fuse: Annotated[bool, typer.Option(help="Fuse low-bit layers that share their input.")] = True,
    lm_head: Annotated[bool, typer.Option("--lm-head", help="Low-bit weights in the output layer, too.")] = False,
    pdl: Annotated[bool, typer.Option(help="Let torch.compile's kernels overlap with their neighbours.")] = True,
    split: Annotated[bool, typer.Option("--split", help="Show what kinds of kernels the time goes to.")] = False,
    repeats: Annotated[int, typer.Option(min=1, max=MOST, help="Times that a step is run.")] = 20,
    as_json: Json = False,
) -> None:
    """Time a language model with random weights: tokens per second of decoding and prefill, low-bit against bf16.

    The model's code is that of transformers, with a static cache, torch.compile and, on a GPU, a CUDA graph. A format
    such as u4:f8e4m3 quantizes activations to 8 bits and multiplies in that type; u4:i8+fold folds scales, too, and
    u4:f8e4m3@65 does so from 65 tokens on.

    [bold]Examples[/]

      lowbit bench-model llama-3.1-8b --batch 1,16 --prefill 128,512,2048

      lowbit bench-model qwen2.5-32b -w bf16,u8,f6e3m2,u4,u2 --split

      lowbit bench-model llama-3.1-8b -w bf16,u4,u4:f8e4m3 --prefill 128,8192

      lowbit bench-model qwen3-30b-a3b --layers 8 --batch 1,16 --prefill 512,4096

      lowbit bench-model tiny --no-compile --device cpu --json
    """
    import torch

    from lowbit.pylib.model_speed.config import model_config
    from lowbit.pylib.model_speed.measure import Options, measure
    from lowbit.pylib.model_speed.table import aligned, split_table, table

    place = checked_device(device) or ("cuda" if torch.cuda.is_available() else "cpu")
    options = Options(compiled, fuse, lm_head, pdl, place, repeats)
    formats = quantizations(weights, group_size)
    steps = model_steps(batch, prefill, context)
    config = model_config(model, layers)
    with errors.status("starting") as status:
        measured = list(measure(config, formats, steps, options, status.update, split))
    if as_json:
        show_json({"model": model, "device": place, "measurements": [each.to_dict() for each in measured]})
        return
    print(aligned(table(measured)))
    if split and place == "cuda":
        print(f"\n{aligned(split_table(measured))}")


def quantizations(weights: str, group_size: int) -> list[QuantConfig | None]:
    """Returns what formats, separated by commas, stand for; None for bf16, which stays dense.

    After a colon stands the type in which a format is multiplied: "u4:f8e4m3", or "u4:i8+fold" with scales folded
    into weights. "u4:f8e4m3@65" multiplies so from 65 tokens on.
    """
    return [None if name == "bf16" else _quantization(name, group_size or None) for name in weights.split(",")]


def _quantization(name: str, group_size: int | None) -> QuantConfig:
    weight, _, products = name.partition(":")
    products, at, first = products.partition("@")
    if at and not (first.isdecimal() and len(first) <= len(str(MOST))):
        raise SpecError(f"{name!r} must end in a number of tokens, such as {weight}:{products}@65")
    fields = products_named(products or "none")
    return QuantConfig(weight, group_size, method="rtn", compute_from=int(first) if at else 1, **fields)


def model_steps(batch: str, prefill: str, context: int) -> list[Step]:
    """Returns the steps to time: a token for each number of sequences, and each prompt. Raises SpecError for none."""
    from lowbit.pylib.model_speed.runner import Step

    steps = [Step(size, 1, context) for size in _counts("--batch", batch)]
    steps += [Step(1, length) for length in _counts("--prefill", prefill)]
    if not steps:
        raise SpecError("--batch none --prefill none leaves nothing to time; give one of them numbers")
    return steps


def _counts(option: str, text: str) -> list[int]:
    if text == "none":
        return []
    parts = text.split(",")
    digits = len(str(MOST_TOKENS))
    if not all(part.isdecimal() and len(part) <= digits and 1 <= int(part) <= MOST_TOKENS for part in parts):
        raise SpecError(
            f"{option}={text} must be none or numbers in 1..{MOST_TOKENS} with commas between, such as 1,16"
        )
    return [int(part) for part in parts]
