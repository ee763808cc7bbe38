"""What is measured: a weight's shape and format (`Case`), and all of a run (`Plan`)."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from benchmarks.shapes import Shape, shapes
from lowbit.dialect.errors import SpecError
from lowbit.dialect.formats.byte_codes import products_named
from lowbit.dialect.spec import MatmulSpec

PLANS = {path.stem: path for path in sorted(Path(__file__).parent.glob("*.toml"))}


@dataclass(frozen=True)
class Case:
    """A weight W [n, k] in a format, with a scale per `group_size` columns (None: per row), multiplied in the type
    `compute`, as command lines name it (None: that of x)."""

    shape: Shape
    weight: str
    group_size: int | None = 128
    zeros: str = "none"
    act: str = "f16"
    compute: str | None = None

    @property
    def n(self) -> int:
        return self.shape.n

    @property
    def k(self) -> int:
        return self.shape.k

    @property
    def bits(self) -> int:
        return self.spec.dtype.bits

    @property
    def spec(self) -> MatmulSpec:
        """The case as a MatmulSpec with scales of the activations' type. Raises SpecError for what is no format."""
        choices: dict[str, Any] = {"zeros": self.zeros, "act": self.act, "scale": self.act}
        products = products_named(self.compute or "none")
        return MatmulSpec(n=self.n, k=self.k, weight=self.weight, group_size=self.group_size, **choices, **products)

    def __str__(self) -> str:
        group = f"g{self.group_size}" if self.group_size else "per row"
        zeros = "" if self.zeros == "none" else f", {self.zeros} zeros"
        compute = f" in {self.compute}" if self.compute else ""
        return f"{self.weight} {group}{zeros}, {self.act}{compute}, {self.n} x {self.k}"


@dataclass(frozen=True)
class Plan:
    """Every peer on every format, shape and number of tokens.

    shapes       names that `benchmarks.shapes` knows
    formats      weights, as MatmulSpec names them
    m            numbers of tokens
    peers        of `benchmarks.peers.PEERS`; cuBLAS in the type of x is always measured
    group_size   columns per scale; 0: one scale per row
    compute      types in which x is multiplied, as command lines name them: "none", "i8" or "i8+fold" ...
    eager        whether to time calls from Python, too
    sustained    whether to time, too, what a GPU does that never rests
    energy       numbers of tokens for which to measure what a call takes of it, too
    floor        whether to time what only reading the weight takes
    """

    shapes: tuple[str, ...] = ("issue",)
    formats: tuple[str, ...] = ("u4",)
    m: tuple[int, ...] = (1, 8, 16)
    peers: tuple[str, ...] = ("lowbit",)
    group_size: int = 128
    zeros: str = "none"
    act: str = "f16"
    compute: tuple[str, ...] = ("none",)
    eager: bool = True
    sustained: bool = False
    energy: tuple[int, ...] = ()
    floor: bool = True

    @staticmethod
    def of(choices: dict[str, Any]) -> Plan:
        """Returns a plan of a TOML file's keys or the command line's options. Raises SpecError for an unknown key."""
        known = [f.name for f in fields(Plan)]
        if unknown := choices.keys() - set(known):
            raise SpecError(f"a benchmark has no {', '.join(sorted(unknown))}; allowed: {', '.join(known)}")
        values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in choices.items()}
        return Plan(**values)

    @staticmethod
    def read(path: Path, given: dict[str, Any]) -> list[Plan]:
        """The plans in a TOML file: one per [[part]], with what stands above the parts as its defaults. What is
        `given` beats the file. Raises SpecError for a file that can't be read and for an unknown key."""
        try:
            common = tomllib.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise SpecError(f"{path} is no plan ({error}); give one of {', '.join(PLANS)} or a TOML file") from None
        parts = common.pop("part", [{}])
        return [Plan.of(common | part | given) for part in parts]

    def cases(self) -> list[Case]:
        """Shape by shape. Raises SpecError for an unknown shape, format or option."""
        found = [
            Case(shape, weight, self.group_size or None, self.zeros, self.act, None if compute == "none" else compute)
            for shape in shapes(list(self.shapes))
            for weight in self.formats
            for compute in self.compute
        ]
        for case in found:
            _ = case.spec
        return found
