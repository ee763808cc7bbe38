"""The options of commands that take a matmul: one for each field of `MatmulSpec`, and those of its kernels."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from types import NoneType
from typing import Annotated, Any, get_args, get_type_hints

import typer

from lowbit.dialect.bilevel import Bilevel
from lowbit.dialect.errors import SpecError
from lowbit.dialect.fields import MOST, choice
from lowbit.dialect.formats.dtypes import all_names
from lowbit.dialect.presets import PRESETS
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.base import OF_EXPERTS, OF_ONE, KernelSchedule
from lowbit.passes.kernels.registry import FAMILIES
from lowbit.pylib.cli.machine import TARGETS

TargetName = Annotated[str | None, typer.Option("--target", "-t", help=f"{TARGETS}; without it, this machine's.")]
Tokens = Annotated[int, typer.Option("--tokens", "-m", min=1, max=MOST, help="Rows of x.")]
TopK = Annotated[int | None, typer.Option("--top-k", min=1, max=MOST, help="Experts of each row of x; 2 without it.")]
ScheduleText = Annotated[
    str | None,
    typer.Option("--schedule", help="Choices of the kernel, such as tokens=8,warps_k=8 or family=prefill,tokens=256."),
]

_SHORT = {"n": "-n", "k": "-k", "weight": "-w", "group_size": "-g"}
_USUAL = {"n": 4096, "k": 4096, "weight": "u4"}  # of a command without options
_TEXTS = {
    "n": "Rows of the weight: outputs.",
    "k": "Columns of the weight: inputs.",
    "weight": "Format: u1..u8, i1..i8, f<bits>e<x>m<y>, nf4, fp4_bnb, lut1..lut8; or q4_k, nvfp4 ...",
    "group_size": "Columns that share a scale; 0, or without it: one scale per row.",
    "zeros": "Zero points: none, int, float or offset.",
    "scale": "Type of the scales: f16, bf16, f32, e8m0, e4m3, or codes with --bilevel.",
    "act": "Type of x: f16 or bf16.",
    "out": "Type of y: f16, bf16 or f32; without it, as x.",
    "bias": "Add a bias.",
    "table": "The values of a lut<b> format, separated by commas.",
    "row_scales": "Scale every row, too.",
    "bilevel": "The second level of scales that are codes, such as rows=1,groups=8,scale=f16.",
    "permuted": "Columns are in another order than x's.",
    "outliers": "Add outliers, a sparse matrix in f16.",
    "compute": "Multiply in 8 bits: f8e4m3 or i8; without it, in the type of x.",
    "experts": "Experts that share the rows of the weight, -n in all.",
    "compute_from": "Rows of x from which on they are quantized; fewer are multiplied in the type of x.",
    "epilogue": "What becomes of sums: silu_mul, gelu_mul, swiglu_oai (y [m, n / 2]) or residual.",
    "invariant": "One result for every number of rows: equal bits, in one order of sums.",
    "fold_scales": "With --compute: round scaled weights to it, so that sums stay in the tensor core.",
}
"""What `--help` says of each field of a spec, in this order."""


def _options() -> dict[str, tuple[Any, Any, str]]:
    """Returns the type and default of the option for each field, and what `--help` says of it."""
    types, defaults = get_type_hints(MatmulSpec), {f.name: f.default for f in fields(MatmulSpec)} | _USUAL
    return {name: (_kind(types[name]), defaults[name], text) for name, text in _TEXTS.items()}


def _kind(field: Any) -> Any:
    """Returns the type of an option for a field of this type: what is neither a flag nor a number is a text."""
    if field in (bool, int, int | None):
        return field
    return str | None if NoneType in get_args(field) else str


_SPEC_OPTIONS = _options()


def takes_spec(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command with a first parameter `spec` the options that make one."""

    @wraps(command)
    def with_options(**given: Any) -> None:
        values = {name: given.pop(name) for name in _SPEC_OPTIONS}
        values["group_size"] = values["group_size"] or None
        if values["table"] is not None:
            values["table"] = _numbers(values["table"])
        if values["bilevel"] is not None:
            from lowbit.passes.opt.options import from_text

            values["bilevel"] = from_text(Bilevel, values["bilevel"], "--bilevel")
        command(spec=_spec(values), **given)

    def parameter(name: str, kind: Any, default: Any, text: str) -> inspect.Parameter:
        flags = [f"--{name.replace('_', '-')}", *filter(None, [_SHORT.get(name)])]
        annotation = Annotated[kind, typer.Option(*flags, help=text, rich_help_panel="Matmul")]
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)

    # Typer reads the signature and the annotations; those of the command itself are strings until resolved.
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    parameters = [parameter(name, *option) for name, option in _SPEC_OPTIONS.items()]
    parameters += [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own]
    with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_options.__annotations__ = {p.name: p.annotation for p in parameters}
    return with_options


def default_spec() -> MatmulSpec:
    """Returns the spec of a command without options."""
    return _spec({name: value for name, (_, value, _) in _SPEC_OPTIONS.items()})


def _spec(values: dict[str, Any]) -> MatmulSpec:
    """Returns the spec that options spell out, or one that has a name: options that differ from their defaults replace
    what it says."""
    weight = values["weight"]
    if weight not in PRESETS or weight in all_names():
        return MatmulSpec(**values)
    default = {name: value for name, (_, value, _) in _SPEC_OPTIONS.items()}
    others = {name: value for name, value in values.items() if name not in _USUAL and value != default[name]}
    return MatmulSpec.preset(weight, values["n"], values["k"], **others)


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(v) for v in text.split(","))
    except ValueError:
        raise SpecError(f"--table={text} must be numbers separated by commas, such as -1,0,0.5,1") from None


_OPERATIONS = (*OF_ONE, *OF_EXPERTS, "top_k_expert_matmul")
_FAMILIES = [name for name, family in FAMILIES.items() if family.operation in _OPERATIONS]
"""The kernels of a matmul, whose schedules --schedule can spell out."""
_FAMILY = re.compile(r"(?:^|(?<=[,\s]))family=([^,\s]*)")


def parse_schedule(text: str | None) -> KernelSchedule | None:
    """Returns the schedule that --schedule spells out: fields of a schedule, and its family unless that is decode. None
    without one."""
    from lowbit.passes.opt.options import from_text

    if text is None:
        return None
    named = _FAMILY.search(text)
    name = choice("--schedule: family", named[1] if named else "decode", _FAMILIES)
    return from_text(FAMILIES[name].schedule_type, _FAMILY.sub("", text, count=1), "--schedule")
