"""A covering array of all that a user can write: every two values of two fields that go together meet in a case, and
every three of element, scale and zeros. Those that CI runs are picked for what meets in them. What goes together is
what `MatmulSpec` accepts. Weights of several experts have an array of their own, of pairs.

Which code computes a weight depends on more than three fields at once. So kinds of elements and of scales, zeros, the
type of x and the engine that multiplies meet in fives (`ENGINES`, `SCALES`, `ELEMENTS`), in groups.

allpairspy makes the rows for pairs; rows that lack a legal pair, and those for threes and fives, are added. That takes
a quarter of a minute, so the arrays are in `combinations.json`; `test_combinations.py` checks that they cover. After a
change of a field's values, or of what goes together, make them anew:

    python -m pytests.kernels.combinations
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import string
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from allpairspy import AllPairs

from lowbit.dialect.errors import SpecError
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.decode.schedule import IntegerSchedule
from lowbit.passes.scheduling.expert_rule import tiles_of
from lowbit.passes.targets import parse_target
from lowbit.pylib.check.cases import CODES, Case, spec_of
from pytests.sweeps import telling

SECOND = ("second_level", "second_rows", "second_groups", "second_scale")
Choice = dict[str, Any]
_TRIES = 40  # to put what is missing into a row that is there
FACTORS: dict[str, tuple[Any, ...]] = {
    "weight": (
        *("u1", "u2", "u3", "u4", "u7", "u8", "i1", "i2", "i4", "i8", "f3e1m1", "f4e2m1", "f5e2m2", "f6e3m2", "f7e2m4"),
        *("f8e4m3", "f8e5m2", "f8e6m1", "nf4", "lut2", "lut3", "lut6"),
    ),
    "place": (
        *(("cpu", 1), ("cpu", 9), ("cpu", 40)),
        *(("emulator:sm_80", 1), ("emulator:sm_80", 9), ("emulator:sm_80", 20), ("emulator:sm_80", 200)),
        *(("emulator:sm_90a", m) for m in (1, 9, 20, 70, 130, 330)),
        *(("emulator:sm_89", 20), ("emulator:sm_120", 3)),
    ),
    "scale": ("f16", "bf16", "f32", "e8m0", "e4m3", *CODES),
    "group_size": (None, 16, 32, 48, 64, 128),
    "zeros": ("none", "int", "float", "offset"),
    "compute": (None, "f8e4m3", "i8"),
    "second_level": (None, "plain", "zeros", "offsets"),
    "second_rows": (None, 1, 16),
    "second_groups": (None, 1, 2),
    "second_scale": (None, "f16", "bf16", "f32"),
    "out": (None, "f16", "bf16", "f32"),
    "act": ("f16", "bf16"),
    "fold_scales": (False, True),
    "compute_from": (1, 17),
    "bias": (False, True),
    "row_scales": (False, True),
    "permuted": (False, True),
    "outliers": (False, True),
    "epilogue": (None, "silu_mul", "gelu_mul", "swiglu_oai", "residual"),
    "experts": (1,),  # of several: EXPERT_FACTORS
    "top_k": (None,),  # test_top_k_experts
    "invariant": (False, True),
    "n": (16, 40, 48),
    "k": (64, 96, 192, 256, 260),
}
"""Fields and their values: elements by the way in which they are decoded, places by the kernels that serve there."""

ENGINES = {
    "cpu": FACTORS["place"][:3],
    "mma": (("emulator:sm_80", 9), ("emulator:sm_80", 20), ("emulator:sm_90a", 1), ("emulator:sm_90a", 9)),
    "many mma": (("emulator:sm_80", 200),),
    "wgmma": (("emulator:sm_90a", 20), ("emulator:sm_90a", 70), ("emulator:sm_90a", 130)),
    "many wgmma": (("emulator:sm_90a", 330),),
}
SCALES = {"number": ("f16", "bf16", "f32"), "power": ("e8m0",), "byte": ("e4m3",), "code": CODES}
ELEMENTS = {
    kind: tuple(name for name in FACTORS["weight"] if name[0] in letters)
    for kind, letters in (("integer", "ui"), ("float", "f"), ("table", "nl"))
}

PLAIN: Choice = {name: values[0] for name, values in FACTORS.items()} | {"weight": "u4", "group_size": 32, "k": 192}
_TWO_LEVELS = {"scale": "u4", "second_level": "plain", "second_rows": 1, "second_groups": 1, "second_scale": "f16"}
_FOLDED = {"compute": "f8e4m3", "fold_scales": True, "row_scales": True}
BASES = (
    PLAIN,
    PLAIN | {"k": 96, "group_size": 48},
    PLAIN | {"k": 256},
    PLAIN | {"group_size": None},
    PLAIN | _TWO_LEVELS,
    PLAIN | _TWO_LEVELS | {"k": 256, "zeros": "float"},
    PLAIN | _TWO_LEVELS | {"scale": "lut8"},
    PLAIN | {"compute": "i8"},
    PLAIN | {"compute": "f8e4m3"},
    PLAIN | _FOLDED,
    PLAIN | _FOLDED | {"compute": "i8"},
    PLAIN | _FOLDED | {"k": 256},
    PLAIN | _FOLDED | _TWO_LEVELS,
)
"""Choices to which what is wanted is added: it goes together if it does with one of them."""


def legal(choice: Mapping[str, Any]) -> bool:
    """Tells whether a choice is a spec that its target has, and no field stands for nothing in it."""
    return _is_legal(tuple(choice[name] for name in FACTORS))


@cache
def _is_legal(values: tuple[Any, ...]) -> bool:
    choice = dict(zip(FACTORS, values))
    levels = {choice[name] is not None for name in SECOND}
    if len(levels) > 1 or (choice["scale"] != "e4m3" and levels != {choice["scale"] in CODES}):
        return False
    if choice["second_level"] == "plain" and choice["scale"] == "e4m3":
        return False
    if not choice["compute"] and (choice["fold_scales"] or choice["compute_from"] > 1):
        return False
    if choice["compute"] == "f8e4m3" and choice["place"][0] == "emulator:sm_80":
        return False
    try:
        return _spec(choice).row_scales == choice["row_scales"]
    except SpecError:
        return False


def _spec(choice: Mapping[str, Any]) -> MatmulSpec:
    return spec_of(choice, random.Random(0))


def completed(wanted: Mapping[str, Any], bases: Sequence[Choice] = BASES) -> Choice | None:
    """Returns a legal choice that has what is wanted, and the rest of a base; None if there is none."""
    choices = (base | dict(wanted) for base in bases)
    return next((choice for choice in choices if legal(choice)), None)


def wanted_pairs() -> Iterator[Choice]:
    for (a, xs), (b, ys) in itertools.combinations(FACTORS.items(), 2):
        yield from ({a: x, b: y} for x in xs for y in ys)


def wanted_triples() -> Iterator[Choice]:
    names = ("weight", "scale", "zeros")
    yield from (dict(zip(names, values)) for values in itertools.product(*(FACTORS[name] for name in names)))


def wanted_fives() -> Iterator[tuple[str, ...]]:
    """Yields kinds of elements and scales, zeros, the type of x, and engines."""
    yield from itertools.product(ELEMENTS, SCALES, FACTORS["zeros"], FACTORS["act"], ENGINES)


def fives_of(choice: Mapping[str, Any]) -> set[tuple[str, ...]]:
    """Returns those that a choice has: one or none. Weights that have one scale per row, or are multiplied in 8 bits,
    take other ways."""
    if choice["group_size"] is None or choice["compute"]:
        return set()
    kinds = (_kind_of(choice[name], kinds) for name, kinds in (("weight", ELEMENTS), ("scale", SCALES)))
    engine = [name for name, places in ENGINES.items() if choice["place"] in places]
    return {(*kinds, choice["zeros"], choice["act"], *engine)} if engine else set()


def _kind_of(value: str, kinds: Mapping[str, tuple[str, ...]]) -> str:
    return next(kind for kind, values in kinds.items() if value in values)


def features(choice: Mapping[str, Any]) -> Iterator[Hashable]:
    """Yields what is to meet in some case: the pairs of a choice, its three and its five."""
    yield from itertools.combinations(choice.items(), 2)
    yield _key(choice, ("weight", "scale", "zeros"))
    yield from fives_of(choice)


def _choice_of_five(five: tuple[str, ...], rows: list[Choice], rng: random.Random) -> Choice | None:
    """Returns a legal choice that has a five, in a row that is there if one takes it."""
    element, scale, zeros, act, engine = five
    for _ in range(_TRIES):
        wanted = {"weight": rng.choice(ELEMENTS[element]), "scale": rng.choice(SCALES[scale]), "zeros": zeros}
        wanted |= {"act": act, "place": rng.choice(ENGINES[engine])}
        wanted |= {"compute": None, "fold_scales": False, "compute_from": 1}
        row = rng.choice(rows) | wanted
        choice = row if legal(row) and row["group_size"] else completed(wanted)
        if choice and five in fives_of(choice):
            return choice
    return None


def _key(choice: Mapping[str, Any], names: tuple[str, ...]) -> tuple[Any, ...]:
    return tuple((name, choice[name]) for name in names)


@dataclass(frozen=True)
class CoveringArray:
    """Choices for all fields, and the cases that they are."""

    choices: list[Choice]

    @cached_property
    def cases(self) -> list[Case]:
        return [Case(_spec(choice), *choice["place"], seed=i) for i, choice in enumerate(self.choices)]

    def in_ci(self, most: int) -> list[int]:
        """Returns the places of so many choices, those in which the most of what is to meet does."""
        return telling(range(len(self.choices)), lambda number: features(self.choices[number]), most)


def integer_cases() -> list[Case]:
    """Returns cases, a pair of values in each, for the kernel that multiplies one token in integers: it is chosen for
    larger weights alone, so its schedule is given."""
    factors = {
        "weight": ("u1", "u2", "u4", "i1", "i2", "i4"),
        "group_size": (128, 256, None),
        "target": ("emulator:sm_80", "emulator:sm_90a"),
        **{name: FACTORS[name] for name in ("zeros", "out", "act", "bias", "row_scales", "permuted", "epilogue")},
        "n": (16, 48),
        "scale": ("f16", "bf16", "f32", "e8m0", "e4m3"),
    }
    rows = (dict(zip(factors, row)) for row in AllPairs(list(factors.values())))
    coarse = {"act": "f16", "out": "bf16", "group_size": 128, "target": "emulator:sm_80"}
    specs = ((_spec(PLAIN | {"k": 256} | row), row["target"]) for row in (*rows, coarse))
    kinds = itertools.cycle((IntegerSchedule(1, 1, 1, 2, 256, 2), IntegerSchedule(1, 2, 1, 1, 256, 2)))
    return [Case(spec, target, 1, seed, next(kinds)) for seed, (spec, target) in enumerate(specs)]


EXPERT_FACTORS: dict[str, tuple[Any, ...]] = FACTORS | {
    "place": (
        *(("cpu", 9), ("emulator:sm_80", 9), ("emulator:sm_80", 40)),
        *(("emulator:sm_90a", m) for m in (1, 20, 170)),
    ),
    "scale": ("f16", "bf16", "f32", "e8m0", "e4m3", "u4", "i6", "lut8"),
    "epilogue": (None, "silu_mul", "gelu_mul", "swiglu_oai"),
    "experts": (3,),
    "invariant": (False,),  # expert_array adds some that are
    "n": (48, 96, 144),
    "k": (64, 96, 192, 256),
}
"""Fields of weights of several experts, where rows of x go to two of them."""


def make_expert_array() -> CoveringArray:
    """Makes choices for weights of experts: of rows in which every two values meet that go together, those that a
    kernel serves, and half of them again as invariant ones, where those have kernels."""
    bases = [base | {"experts": 3, "n": 48} for base in BASES]

    def may_become_legal(row: list[Any]) -> bool:
        return completed(dict(zip(EXPERT_FACTORS, row)), bases) is not None

    rows = AllPairs(list(EXPERT_FACTORS.values()), filter_func=may_become_legal)
    choices = [dict(zip(EXPERT_FACTORS, row)) for row in rows]
    choices = [choice for choice in choices if legal(choice) and _has_kernel(choice)]
    invariant = [choice | {"invariant": True} for choice in choices]
    choices += [choice for choice in invariant if legal(choice) and _has_kernel(choice)][::2]
    random.Random(1).shuffle(choices)
    return CoveringArray(choices)


def _has_kernel(choice: Choice) -> bool:
    """Tells whether a kernel multiplies by the experts of a choice."""
    target, spec = parse_target(choice["place"][0]), replace(_spec(choice), permuted=False)
    try:
        return bool(tiles_of(spec, target)) if target.is_gpu else not spec.outliers
    except SpecError:
        return False


def make_covering_array() -> CoveringArray:
    """Makes the array, the same in every process."""
    rows = [dict(zip(FACTORS, row)) for row in AllPairs(list(FACTORS.values()), filter_func=_may_become_legal)]
    rng = random.Random(0)
    seen: set[tuple[Any, ...]] = set()
    choices: list[Choice] = []

    def add(choice: Choice) -> None:
        choices.append(choice)
        for names in (*itertools.combinations(FACTORS, 2), ("weight", "scale", "zeros")):
            seen.add(_key(choice, names))

    for row in filter(legal, rows):
        add(row)
    for wanted in (*wanted_triples(), *wanted_pairs()):
        if _key(wanted, tuple(wanted)) not in seen:
            mixed = ({**rng.choice(rows), **wanted} for _ in range(_TRIES))
            if choice := next(filter(legal, mixed), None) or _at_random_place(wanted, rng):
                add(choice)
    fives = set().union(*map(fives_of, choices))
    for five in wanted_fives():
        if five not in fives and (choice := _choice_of_five(five, rows, rng)):
            add(choice)
    rng.shuffle(choices)
    return CoveringArray([*choices, *_coarse_choices(), *_zero_choices()])


def _coarse_choices() -> Iterator[Choice]:
    """Yields choices, for every place, of results so coarse that rounding them wrongly shows."""
    plain = {"epilogue": None, "outliers": False, "zeros": "none", "weight": "u4", "k": 64, "out": "bf16"}
    for place in FACTORS["place"]:
        for products in ({"act": "f16", "compute": None}, {"compute": "i8"}):
            if choice := completed(plain | products | {"place": place}):
                yield choice
    written_out = {"act": "f16", "k": 260, "group_size": None, "place": ("emulator:sm_80", 200)}
    yield from filter(legal, [PLAIN | plain | written_out])


def _zero_choices() -> Iterator[Choice]:
    """Yields choices, for every place, with zeros in products of 8 bits, of which a family may have no other."""
    for place in FACTORS["place"]:
        if choice := completed({"zeros": "int", "compute": "i8", "compute_from": 1, "weight": "u4", "place": place}):
            yield choice


def _at_random_place(wanted: Choice, rng: random.Random) -> Choice | None:
    """Returns the completed choice, where no place is wanted at a random one that is legal."""
    places = rng.sample(FACTORS["place"], len(FACTORS["place"]))
    return next(filter(None, (completed({"place": place, **wanted}) for place in places)), None)


def _may_become_legal(row: list[Any]) -> bool:
    """Tells whether the first values of a choice can be completed."""
    return completed(dict(zip(FACTORS, row))) is not None


# -- the file that has them

_FILE = Path(__file__).with_suffix(".json")
_DIGITS = string.digits + string.ascii_lowercase
_HOW = "make it anew: python -m pytests.kernels.combinations"
_WRITTEN = {"weights": FACTORS, "experts": EXPERT_FACTORS | {"invariant": FACTORS["invariant"]}}
"""The values that choices of an array have, by its name in the file."""


def covering_array() -> CoveringArray:
    """Returns the array of all fields."""
    return _read("weights")


def expert_array() -> CoveringArray:
    """Returns the array for weights of experts."""
    return _read("experts")


def _read(name: str) -> CoveringArray:
    """Returns an array of the file, which has a digit for each value of a choice: its place among those of the field.
    Raises ValueError where it was made of other values, or has a choice that is no spec any more."""
    array, factors = json.loads(_FILE.read_text())[name], _WRITTEN[name]
    if array["of"] != _fingerprint(factors):
        raise ValueError(f"{_FILE.name} was made of other values; {_HOW}")
    fields = [(field, dict(zip(_DIGITS, values))) for field, values in factors.items()]
    choices = [{field: values[digit] for (field, values), digit in zip(fields, row)} for row in array["choices"]]
    if wrong := next((choice for choice in choices if not legal(choice)), None):
        raise ValueError(f"{_FILE.name} has {wrong}, which does not go together; {_HOW}")
    return CoveringArray(choices)


def _fingerprint(factors: Mapping[str, tuple[Any, ...]]) -> str:
    return hashlib.sha256(repr(factors).encode()).hexdigest()


def made() -> dict[str, Any]:
    """Returns the contents of the file, made anew: a quarter of a minute."""
    arrays = {"weights": make_covering_array(), "experts": make_expert_array()}
    return {name: _written(array, _WRITTEN[name]) for name, array in arrays.items()}


def _written(array: CoveringArray, factors: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Returns an array as it is in the file."""
    rows = ["".join(_DIGITS[factors[name].index(choice[name])] for name in factors) for choice in array.choices]
    return {"of": _fingerprint(factors), "choices": rows}


def is_as_made() -> bool:
    """Tells whether the file has what would be made now."""
    return json.loads(_FILE.read_text()) == made()


if __name__ == "__main__":
    _FILE.write_text(json.dumps(made(), indent=1) + "\n")
