"""Cases to check: a spec, a target and a number of rows of x; drawn at random, or from the choices of every field."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from lowbit.dialect.bilevel import Bilevel
from lowbit.dialect.errors import SpecError
from lowbit.dialect.formats.dtypes import all_names
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.base import KernelSchedule

TABLES = tuple(f"lut{bits}" for bits in range(1, 9))
CHOICES: dict[str, tuple[Any, ...]] = {
    "weight": (*all_names(), *TABLES),
    "zeros": ("none", "int", "float", "offset"),
    "scale": ("f16", "bf16", "f32", "e8m0", "e4m3", "u3", "u4", "u6", "u8", "i6", "i8", "lut8"),
    "compute": (None, None, "f8e4m3", "i8"),
    "fold_scales": (False, True),
    "compute_from": (1, 17),
    "experts": (1,),  # those are called in another way
    "top_k": (None,),  # likewise
    "invariant": (False, False, True),
    "second_level": ("none", "plain", "zeros", "offsets"),
    "second_rows": (1, 16),
    "second_groups": (1, 2, 4),
    "second_scale": ("f16", "bf16", "f32"),
    "group_size": (None, 16, 32, 48, 64, 128, 256),
    "act": ("f16", "bf16"),
    "out": (None, "f16", "bf16", "f32"),
    "bias": (False, True),
    "row_scales": (False, True),
    "permuted": (False, True),
    "outliers": (False, True),
    "epilogue": (None, None, None, "silu_mul", "gelu_mul", "swiglu_oai", "residual"),
    "n": (1, 16, 24, 40, 64, 136),
    "k": (16, 64, 96, 192, 256, 260, 384, 512, 768),
    "m": (1, 2, 7, 8, 16, 17, 31, 64, 65, 129, 200, 333),
}
"""The values of every field. Fields of the second level are taken where scales are codes, `compute` decides on folding
and on `compute_from`."""
CODES = ("u3", "u4", "u6", "u8", "i6", "i8", "lut8")


@dataclass(frozen=True)
class Case:
    """A matmul to check.

    m         rows of x
    seed      of all numbers
    schedule  of the kernel; None: as chosen
    """

    spec: MatmulSpec
    target: str
    m: int
    seed: int = 0
    schedule: KernelSchedule | None = None

    def __str__(self) -> str:
        """The call that makes the spec, without the numbers of tables, and where it runs."""
        spec = self.spec
        plain, given = asdict(MatmulSpec(spec.n, spec.k, "u4")), asdict(spec)
        given["table"] = ... if spec.table else None
        if spec.bilevel:
            given["bilevel"] = spec.bilevel  # which does not print its table
        changed = [f"{name}={value!r}" for name, value in given.items() if value != plain[name]]
        return f"MatmulSpec({', '.join([str(spec.n), str(spec.k), *changed])}) on {self.target}, {self.m} rows"


def draw(rng: random.Random, target: str, seed: int) -> Case:
    """Returns a random case. Raises SpecError, as `MatmulSpec` does, for choices that do not go together."""
    choice = {name: rng.choice(values) for name, values in CHOICES.items()}
    return Case(spec_of(choice, rng), target, choice["m"], seed)


def spec_of(choice: Mapping[str, Any], rng: random.Random) -> MatmulSpec:
    """Returns the spec of a choice for every field; the numbers of tables are random. Raises SpecError where choices do
    not go together."""
    weight, scale = choice["weight"], choice["scale"]
    table = _table(2 ** int(weight[3:]), rng) if weight in TABLES else None
    compute = choice["compute"]
    fold = bool(compute) and choice["fold_scales"]
    two_levels = scale in CODES or (scale == "e4m3" and choice["second_level"] in ("zeros", "offsets"))
    return MatmulSpec(
        **{name: choice[name] for name in _PLAIN},
        table=table,
        bilevel=_second_level(choice, rng) if two_levels else None,
        compute=compute,
        fold_scales=fold,
        compute_from=choice["compute_from"] if compute else 1,
    )


_MADE = ("table", "bilevel", "compute", "fold_scales", "compute_from")
_PLAIN = tuple(f.name for f in fields(MatmulSpec) if f.name not in _MADE)


def _second_level(choice: Mapping[str, Any], rng: random.Random) -> Bilevel:
    level = choice["second_level"]
    return Bilevel(
        rows=choice["second_rows"],
        groups=choice["second_groups"],
        scale=choice["second_scale"],
        zeros=level == "zeros",
        offsets=level == "offsets",
        table=_table(256, rng) if choice["scale"] == "lut8" else None,
    )


def _table(count: int, rng: random.Random) -> tuple[float, ...]:
    return tuple(rng.gauss(0, 1) for _ in range(count))


def simpler(case: Case) -> Iterator[Case]:
    """Yields cases with one field less to them: at its default, or smaller."""
    spec = asdict(case.spec)
    yield from (replace(case, m=m) for m in (1, 9, 17) if m < case.m)
    for change in _changes(spec):
        if any(spec[name] != value for name, value in change.items()):
            try:
                yield replace(case, spec=MatmulSpec(**(spec | change)))
            except SpecError:
                continue


def _changes(spec: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields fields to change: sizes to smaller ones, all others to their defaults, alone and with what needs them."""
    defaults = asdict(MatmulSpec(16, 64, "u4"))
    yield from ({"n": n} for n in (16,) if n < spec["n"])
    yield from ({"k": k} for k in (64, 128, 256) if k < spec["k"])
    yield {"compute": None, "fold_scales": False, "compute_from": 1}
    yield {"scale": "f16", "bilevel": None}
    yield from ({name: defaults[name]} for name in defaults if name not in ("n", "k", "weight", "table"))
    if spec["group_size"] not in (None, 32):
        yield {"group_size": 32}
    if spec["weight"] not in ("u4", "f4e2m1"):
        yield from ({"weight": weight, "table": None} for weight in ("u4", "f4e2m1"))
