"""Measurements in a JSON file: {"environment": {...}, "measurements": [{...}, ...]}.

The file is rewritten after every measurement, by a rename, so that it is whole at any time. A measurement has

    peer, weight, group_size, zeros, act, compute,    what was measured; together they are its key (compute: None or the
    n, k, m                                           type of 8 bits in which x is multiplied)
    shape, label                                      the shape's name, and what exactly the peer ran
    right, error                                      relative error in the Frobenius norm
    row_bits                                          hashes of y's first and last row, whose x is the same for all
                                                      m: one for all m where results do not depend on the batch
    us, best_us, worst_us                             per call in a CUDA graph, after a rest: median, least and most
    sustained_us                                      median of a GPU that never rests
    millijoules                                       per call, of a GPU that never rests
    eager_us                                          per eager call, one after the other
    bytes                                             of the packed weight
    prepare_s, first_call_s                           making the layer; the first call with this m
    skipped, failed                                   instead of all that: why there is nothing

What is being measured stands in the file as failed, so that a run which dies of it goes on behind it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import record_lines
from lowbit.dialect.errors import SpecError

Record = dict[str, Any]
KEY = ("peer", "weight", "group_size", "zeros", "act", "compute", "n", "k", "m")
SAME = ("gpu", "driver", "sources")  # what must not change within a file


@dataclass
class Results:
    """A file of measurements. path None: in memory only."""

    path: Path | None
    environment: Record
    measurements: list[Record] = field(default_factory=list)

    @staticmethod
    def open(path: Path, environment: Record, retry: bool = False) -> Results:
        """Start a file, or go on with one. retry: measure again what failed or was missing.

        Raises SpecError for a file that another GPU, driver or version of the sources has made.
        """
        if not path.exists():
            return Results(path, environment)
        old = Results.read(path)
        for what in SAME:
            if old.environment[what] != environment[what]:
                raise SpecError(
                    f"{path} was measured with {what} {old.environment[what]}, this is {environment[what]}; "
                    "name another file with --out"
                )
        old.environment["resumed"] = [*old.environment.get("resumed", ()), environment["date"]]
        old.measurements = [r for r in old.measurements if not retry or "us" in r]
        return old

    @staticmethod
    def read(path: Path) -> Results:
        """Raises SpecError for what is no file of results."""
        try:
            data = json.loads(path.read_text())
            return Results(path, data["environment"], data["measurements"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SpecError(
                f"{path} is no file of results ({error!r}); make one with: benchmarks run"
            ) from None

    def has(self, key: Record) -> bool:
        return self.find(**key) is not None

    def find(self, **key: Any) -> Record | None:
        """The measurement with these entries, the first if there are several."""
        return next((r for r in self.measurements if _matches(r, key)), None)

    def all(self, **key: Any) -> list[Record]:
        return [r for r in self.measurements if _matches(r, key)]

    def add(self, record: Record) -> None:
        """Keep a measurement, on disk too, in place of an earlier one of the same."""
        key = {name: record.get(name) for name in KEY}
        self.measurements = [r for r in self.measurements if not _matches(r, key)]
        self.measurements.append(record)
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            record_lines.write(self.path, {"environment": self.environment, "measurements": self.measurements})

    def speedup(self, record: Record, time: str = "us") -> float | None:
        """Times as fast as cuBLAS on the unquantized weight; None without either."""
        shape = {name: record[name] for name in ("n", "k", "m")}
        # tinygemm's activations are bf16 whatever was asked for; cuBLAS is as fast with either.
        return _ratio(self.find(peer="torch", act=record["act"], **shape), record, time)

    def over_floor(self, record: Record, time: str = "us") -> float | None:
        """Times as long as reading the weight in this compiler's packing takes; None without either."""
        same = {name: record.get(name) for name in ("weight", "group_size", "zeros", "act", "compute", "n", "k")}
        floor = self.find(peer="floor", **same)
        return record[time] / floor["us"] if floor and "us" in floor and time in record else None


def _matches(record: Record, key: Record) -> bool:
    return all(record.get(name) == value for name, value in key.items())


def _ratio(a: Record | None, b: Record | None, time: str = "us") -> float | None:
    return a[time] / b[time] if a and b and time in a and time in b else None
