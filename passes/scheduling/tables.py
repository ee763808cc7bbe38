"""Tables of measured schedules, one JSON file per GPU: passes/scheduling/data/*.json, and those that `lowbit tune`
writes.

An entry says which schedule was the fastest for one matmul:

    {"weight": "u4", "n": 4096, "k": 4096, "group_size": 128, "zeros": "none", "scale": "f16", "act": "f16",
     "tokens": 1, "schedule": {"row_blocks": 1, ...}, "microseconds": 3.2, "date": "2026-11-21",
     "version": "0.1.0+5bd2c1f0", "kernel": "1e8d3aad6b2c"}

A matmul of activations of 8 bits has their type, "compute": "i8"; one whose scales are codes has their second level,
"bilevel", as in a spec; one with outliers has "outliers": true, and one whose scales are folded into weights has
"fold_scales": true. A schedule of another kernel family than "decode" names its family, and has all of its fields that
matter; one of "decode" leaves out `tokens` where they are the key's, or eight for one.

A matmul of experts has "experts", n is the rows of all, and "tokens" the number of slots (`expert_choice.py`).

A matmul that is not in a table is served by its nearest neighbour: of the same token tile and type of products, both
with zeros, with scales that are codes or folded and with outliers, or both without, and decoded in the same way (so
many bits of an integer, a float or a table). How far apart two are is a number of octaves: |log2| of the ratio of their
n plus that of their k, and a quarter for everything else that differs. Beyond an octave the rule is the better guess:
docs/tuning.md.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from lowbit.dialect.errors import SpecError
from lowbit.dialect.fields import in_json, integer
from lowbit.dialect.formats.dtypes import dtype
from lowbit.dialect.formats.recipes import compute_element
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.base import IN_EIGHT_BITS, OF_EXPERTS, OF_ONE, KernelSchedule
from lowbit.passes.kernels.registry import FAMILIES, family_of, schedule_from_dict, schedule_to_dict

REACH = 1.0  # octaves
ALWAYS = ("tokens", "row_blocks", "warps_n", "warps_k", "step_k", "num_stages", "split_k")  # of a schedule, in a file
OTHERWISE = 0.25  # for another format of the same class, group size, kind of zeros or scales, or act
_DEFAULTS: dict[str, Any] = {f.name: f.default for f in fields(MatmulSpec)}
_NO_PART = ("bias", "out", "row_scales", "permuted", "compute_from", "epilogue")
"""Fields of a spec that no schedule depends on; nor does one on the values of a table."""
_FIRST = ("weight", "n", "k", "group_size", "zeros", "scale", "act")  # in a file, and before the tokens
_THEN = ("compute", "bilevel", "outliers", "fold_scales")
_SELDOM = {name: _DEFAULTS[name] for name in (*_THEN, *_DEFAULTS) if name not in (*_FIRST, *_NO_PART, "table")}
"""The other fields of a key's spec, in the order of a file, which leaves them out where they have these values."""
_COMPARED = tuple(name for name in (*_FIRST, *_SELDOM) if name not in ("n", "k", "fold_scales"))
"""Fields that add to the distance of neighbours where they differ; for folded scales they are of one kind or not."""


@dataclass(frozen=True)
class Key:
    """The matmul that a schedule is for, and the token tile.

    spec    the matmul without what no schedule depends on, such as its bias and the type of y; of a codebook's the
            values are made up
    tokens  of the token tile; of experts the number of slots
    """

    spec: MatmulSpec
    tokens: int

    @staticmethod
    def of(spec: MatmulSpec, token_tile: int) -> Key:
        return Key(_measured(spec), token_tile)

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields that count, in terms of JSON and in the order of a file."""
        first, others = ({name: in_json(getattr(self.spec, name)) for name in names} for names in (_FIRST, _SELDOM))
        return {**first, "tokens": self.tokens, **others}

    @staticmethod
    def from_dict(written: dict[str, Any]) -> Key:
        """The inverse of `to_dict`; fields of `_SELDOM` may be left out, and there may be others.

        Raises SpecError, TypeError, ValueError or KeyError for a key of no matmul, and for one that is spelled as no
        matmul's is.
        """
        tokens = integer("tokens", written["tokens"], 1)
        given = {name: written[name] for name in _FIRST} | {name: written.get(name, _SELDOM[name]) for name in _SELDOM}
        key = Key(MatmulSpec(**given, table=_any_table(_text("weight", given["weight"]))), tokens)
        for name, value in given.items():
            kept = getattr(key.spec, name)
            if value != kept and not isinstance(value, dict):
                raise SpecError(f"{name}={value!r} must be {kept!r}")
        return key

    @property
    def kind(self) -> tuple[object, ...]:
        """The fields that neighbours have in common."""
        s = self.spec
        others = s.compute, s.bilevel is not None, s.outliers, s.rounds_weights(self.tokens), s.experts > 1
        return (*_decoding(s.weight, s.act), s.zeros != "none", self.tokens, *others)

    def distance(self, other: Key) -> float:
        """Octaves between two of a kind."""
        differences = sum(getattr(self.spec, name) != getattr(other.spec, name) for name in _COMPARED)
        octaves = abs(math.log2(self.spec.n / other.spec.n)) + abs(math.log2(self.spec.k / other.spec.k))
        return octaves + OTHERWISE * differences


@lru_cache(maxsize=256)
def _measured(spec: MatmulSpec) -> MatmulSpec:
    """The spec of a key for this one."""
    return replace(spec, table=_any_table(spec.weight), **{name: _DEFAULTS[name] for name in _NO_PART})


def _any_table(weight: str) -> tuple[float, ...] | None:
    """Values for a codebook; None for other formats."""
    if not weight.startswith("lut"):
        return None
    bits = min(int(weight[3:]), 8)  # of a format with more, the spec says that there is none
    return tuple(map(float, range(2**bits)))


@lru_cache(maxsize=None)
def _decoding(weight: str, act: str) -> tuple[str, int, bool]:
    """How codes become numbers: kind, bits, and whether through f32."""
    if weight.startswith("lut"):
        return "table", int(weight[3:]), False
    t = dtype(weight)
    return "integer" if t.kind in ("uint", "int") else t.kind, t.bits, compute_element(t, act) == "f32"


@dataclass(frozen=True)
class Entry:
    """The fastest schedule for one matmul, and what is known of its measurement.

    microseconds  of a call
    date          as 2026-11-21
    version       of lowbit, to the source: "0.1.0+1e8d3aad"
    kernel        a hash of its PTX, or "": if the schedule now makes another kernel, the measurement is stale
    """

    key: Key
    schedule: KernelSchedule
    microseconds: float
    date: str
    version: str
    kernel: str = ""

    def supersedes(self, other: Entry) -> bool:
        """Whether to take this of two measurements of one matmul, of which this came later if on the same day: with
        the same compiler the faster, else the newer, however fast the kernels of the older compiler were."""
        if self.version == other.version:
            return self.microseconds < other.microseconds
        return self.date >= other.date

    def to_json(self) -> dict[str, Any]:
        schedule = spelled_out(self.schedule)
        if "family" not in schedule and schedule["tokens"] == max(8, self.key.tokens):
            del schedule["tokens"]
        key = {name: v for name, v in self.key.to_dict().items() if name not in _SELDOM or v != _SELDOM[name]}
        about = {"microseconds": round(self.microseconds, 3), "date": self.date, "version": self.version}
        return key | {"schedule": schedule} | about | ({"kernel": self.kernel} if self.kernel else {})

    @staticmethod
    def from_json(values: dict[str, Any]) -> Entry:
        """The inverse of `to_json`. Raises KeyError, TypeError, ValueError or OverflowError for anything else."""
        key = Key.from_dict(values)
        choices = values["schedule"]
        schedule = schedule_from_dict(choices if "family" in choices else {"tokens": max(8, key.tokens)} | choices)
        _check_family(key, schedule)
        microseconds = float(values["microseconds"])
        if not 0 < microseconds < math.inf:
            raise ValueError(f"microseconds={microseconds} must be a number above 0")
        about = (_text(name, values.get(name, "")) for name in ("date", "version", "kernel"))
        return Entry(key, schedule, microseconds, *about)


def _check_family(key: Key, schedule: KernelSchedule) -> None:
    """Raises SpecError for a schedule of a family whose kernels do not compute the matmul of a key."""
    operations = OF_EXPERTS if key.spec.experts > 1 else OF_ONE
    operation = next(each for each in operations if (each in IN_EIGHT_BITS) == bool(key.spec.compute))
    family = family_of(schedule)
    if family.operation != operation:
        allowed = ", ".join(repr(each.name) for each in FAMILIES.values() if each.operation == operation)
        raise SpecError(f"schedule: family={family.name!r} does not compute this matmul; allowed: {allowed}")


def _text(name: str, given: object) -> str:
    if not isinstance(given, str):
        raise TypeError(f"{name}={given!r} must be a string")
    return given


def spelled_out(s: KernelSchedule) -> dict[str, Any]:
    """A schedule as `schedule_from_dict` reads it, without choices that are the default (but for those in `ALWAYS`) and
    without the name of the decode family."""
    usual = {f.name: f.default for f in fields(s) if f.name not in ALWAYS} | {"family": "decode"}
    return {name: value for name, value in schedule_to_dict(s).items() if value != usual.get(name)}


@dataclass(frozen=True)
class Table:
    """All that is known about one GPU.

    gpu         its name, as CUDA spells it
    capability  its compute capability times ten
    made        how the table came about, for people
    """

    gpu: str
    capability: int
    made: str
    entries: dict[Key, Entry]

    @cached_property
    def kinds(self) -> dict[tuple[object, ...], list[Entry]]:
        found: dict[tuple[object, ...], list[Entry]] = {}
        for entry in self.entries.values():
            found.setdefault(entry.key.kind, []).append(entry)
        return found

    @cached_property
    def by_spec(self) -> dict[MatmulSpec, list[Entry]]:
        found: dict[MatmulSpec, list[Entry]] = {}
        for entry in self.entries.values():
            found.setdefault(entry.key.spec, []).append(entry)
        return found

    def with_entries(self, entries: Iterable[Entry]) -> Table:
        """This table and these; of two for one matmul, the one that `supersedes` the other."""
        merged = dict(self.entries)
        for entry in entries:
            known = merged.get(entry.key)
            if known is None or entry.supersedes(known):
                merged[entry.key] = entry
        return Table(self.gpu, self.capability, self.made, merged)

    def replaced(self, entry: Entry) -> Table:
        """This table with a newer entry."""
        return Table(self.gpu, self.capability, self.made, self.entries | {entry.key: entry})

    def to_text(self) -> str:
        """Returns the table as JSON, an entry to a line, in an order that does not depend on how they were found."""
        about = {"gpu": self.gpu, "capability": self.capability, "made": self.made}
        head = json.dumps(about, indent=1, ensure_ascii=False)[:-2]
        entries = sorted(self.entries.values(), key=lambda e: tuple(map(_orderly, e.key.to_dict().values())))
        lines = ",\n  ".join(json.dumps(entry.to_json()) for entry in entries)
        return f'{head},\n "entries": [\n  {lines}\n ]\n}}\n'


def _orderly(value: object) -> tuple[bool, float, str]:
    """A key for sorting numbers, names and None."""
    return value is not None, value if isinstance(value, int) else 0, str(value)


def merge(tables: Sequence[Table]) -> Table:
    """One table of several for the same GPU, the latest last (`Entry.supersedes`). Raises SpecError where they are
    not for the same."""
    first = tables[0]
    others = sorted({t.gpu for t in tables} - {first.gpu})
    if others:
        raise SpecError(f"a table is for one GPU, but these are for {first.gpu} and {', '.join(others)}")
    made = "; ".join(dict.fromkeys(t.made for t in tables))
    merged = Table(first.gpu, first.capability, made, {})
    return merged.with_entries(entry for t in tables for entry in t.entries.values())


def parse_table(text: str, name: str) -> Table:
    """The inverse of `Table.to_text`. Raises SpecError that speaks of `name`."""
    try:
        values = json.loads(text)
        entries = [Entry.from_json(entry) for entry in values["entries"]]
        gpu, made = (_text(name, values[name]) for name in ("gpu", "made"))
        return Table(gpu, integer("capability", values["capability"], 1), made, {e.key: e for e in entries})
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        fix = "delete it, or have `lowbit tune` write it"
        raise SpecError(f"{name} is no table of schedules ({type(error).__name__}: {error}); {fix}") from None


def read_table(path: Path) -> Table:
    """The table in a file, read once until the file changes. Raises SpecError for a file that holds none."""
    try:
        return _read(path, path.stat().st_mtime_ns)
    except OSError as error:
        raise SpecError(f"{path} can't be read: {error.strerror}") from None


@lru_cache(maxsize=64)
def _read(path: Path, changed: int) -> Table:
    return parse_table(path.read_text(encoding="utf-8", errors="replace"), str(path))  # JSON says what is wrong


@lru_cache(maxsize=1)
def shipped_tables() -> tuple[Table, ...]:
    """Returns the tables that come with lowbit, in the order of their names."""
    return tuple(map(read_table, sorted((Path(__file__).parent / "data").glob("*.json"))))


def nearest(tables: Sequence[Table], spec: MatmulSpec, token_tile: int, fits: Callable[[Entry], bool]) -> Entry | None:
    """The nearest neighbour of a matmul that `fits`, at a distance of up to `REACH`; of equals, that in the first
    table."""
    key = Key.of(spec, token_tile)
    near = [(key.distance(e.key), e) for table in tables for e in table.kinds.get(key.kind, ())]
    for distance, entry in sorted(near, key=lambda pair: pair[0]):
        if distance > REACH:
            break
        if fits(entry):
            return entry
    return None
