"""What a manifest says of CPUs: for each level of x86-64 the programs, and the memory that they need."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from lowbit.dialect.fields import MOST
from lowbit.dialect.formats.byte_codes import MOST_UNFOLDED
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.cpu.task import ENTRY
from lowbit.pylib.aot.files import Files
from lowbit.pylib.aot.image import link
from lowbit.pylib.build.host_programs import FEW_AND_MANY, HostProgram, Program, load_host_program
from lowbit.pylib.weights.folding import spec_of_values

LEVELS = {"x86-64-v3": 3, "x86-64-v4": 4, "x86-64-v4+avx512bf16": 5}
"""The processors that code is made for, with the number by which the C runtime compares them."""


def cpu_to_dicts(spec: MatmulSpec, name: str, files: Files) -> list[dict[str, Any]]:
    """Returns the description of each level in terms of JSON, the least first, and adds its code to the files. Experts
    are multiplied one by one, by programs for the weight of one."""
    return [_Level(spec, level, name, files).to_dict() for level in LEVELS]


@dataclass(frozen=True)
class _Level:
    """Collects the programs of a level."""

    spec: MatmulSpec
    level: str
    name: str
    files: Files

    def to_dict(self) -> dict[str, Any]:
        one = self._one(self.spec.in_act)
        return {
            "target": self.level,
            "level": LEVELS[self.level],
            "top_k": self.spec.top_k.to_dict() if self.spec.top_k else None,
            "operands": list(one.call_operands),
            "ranges": list(self._ranges()),
            "dequantize": self._described("dequantize", self._load(one, "dequantize"), 0),
        }

    def _one(self, spec: MatmulSpec) -> MatmulSpec:
        """Returns the spec of one expert, whose columns are in order."""
        return replace(spec, n=spec.n // spec.experts, experts=1, top_k=None, permuted=False)

    def _ranges(self) -> Iterator[dict[str, Any]]:
        """Yields the number of rows of a call from which programs serve, what x is quantized to, and the programs."""
        for spec, first in zip(self.spec.kinds, (1, self.spec.first_in_eight_bits)):
            programs = self._in_eight_bits(spec) if spec.compute else self._pair(self._one(spec), MOST)
            yield {"first": first, "quantize": spec.compute, "programs": list(programs)}

    def _in_eight_bits(self, spec: MatmulSpec) -> Iterator[dict[str, Any]]:
        """Yields programs of rows with scales: those of folded weights from as many rows on as these are rounded."""
        one = self._one(spec)
        until = max((m for m in (MOST_UNFOLDED, MOST) if not one.rounds_weights(m)), default=0)
        if until:
            yield from self._pair(spec_of_values(one, until), until, scaled=True)
        if until < MOST:
            folded = self._load(spec_of_values(one, MOST), "scaled_many")
            yield self._described("scaled_many", folded, MOST, "_folded")

    def _pair(self, spec: MatmulSpec, until: int, scaled: bool = False) -> Iterator[dict[str, Any]]:
        """Yields the program for few rows, unless it serves none, and that for others, `until` so many."""
        few, many = FEW_AND_MANY[scaled]
        of_few = self._load(spec, few)
        if most := min(of_few.needs.most, until):
            yield self._described(few, of_few, most)
        if most < until:
            yield self._described(many, self._load(spec, many), until)

    def _load(self, spec: MatmulSpec, program: Program) -> HostProgram:
        return load_host_program(spec, program, self.level, elsewhere=True)

    def _described(self, program: Program, compiled: HostProgram, most: int, suffix: str = "") -> dict[str, Any]:
        """A program for up to `most` rows, which is added to the files."""
        linked = link(compiled.code, ENTRY)
        folder = f"cpu/{self.name}/{self.level.replace('+', '_')}"
        code = self.files.add(f"{folder}/{program}{suffix}.bin", linked.code)
        return {"code": code, "entry": linked.entry, **asdict(compiled.needs), "most": most}
