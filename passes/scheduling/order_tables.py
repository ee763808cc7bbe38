"""The measured orders of sums of invariant matmuls: passes/scheduling/orders/*.json, a file for each architecture.

An entry says with which order the kernels of one matmul took the least time, over 1, 4, 16 and 64 tokens and a prompt:

    {"weight": "u4", "n": 4096, "k": 4096, "group_size": 128, "zeros": "none", "scale": "f16", "act": "f16",
     "parts": 1, "chains": 8, "step_k": 128}

Fields of a spec that are not there have the values that they usually have. These files are part of lowbit as its
sources are, and no user's table adds to them: so the order of a matmul is the same on all machines with one version of
lowbit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.base import operations_of
from lowbit.passes.kernels.registry import FAMILIES
from lowbit.passes.kernels.sum_order import CUT, SumOrder
from lowbit.passes.scheduling.tables import Key
from lowbit.passes.target import Target

FOLDER = Path(__file__).parent / "orders"


def measured_order(spec: MatmulSpec, target: Target) -> SumOrder | None:
    """Returns the order that a matmul has by the table of its architecture; None where that has none, or an order that
    no kernel has any more."""
    cut = known_orders(target.arch).get(_key(spec).spec)
    families = [f for f in FAMILIES.values() if f.operation in operations_of(spec)] if cut else []
    every = (order for family in families for order in family.orders(spec, target))
    return next((order for order in every if replace(order, products=()) == cut), None)


def to_text(entries: Mapping[MatmulSpec, SumOrder]) -> str:
    """Returns a file with these orders, an entry to a line."""
    usual = _written(MatmulSpec(64, 64, "u4"))
    lines: list[str] = []
    for spec, order in entries.items():
        fields = {name: value for name, value in _written(spec).items() if name in _ALWAYS or value != usual[name]}
        lines.append(json.dumps(fields | {name: getattr(order, name) for name in CUT}))
    return "[\n " + ",\n ".join(sorted(lines)) + "\n]\n"


_ALWAYS = ("weight", "n", "k", "group_size", "zeros", "scale", "act")


def _written(spec: MatmulSpec) -> dict[str, Any]:
    """The fields of a spec that count, in terms of JSON: those of the key of a measured schedule."""
    fields = _key(spec).to_dict()
    return {name: value for name, value in fields.items() if name not in ("tokens", "invariant")}


def _key(spec: MatmulSpec) -> Key:
    return Key.of(replace(spec, invariant=True), 1)


@lru_cache(maxsize=16)
def known_orders(arch: str) -> dict[MatmulSpec, SumOrder]:
    """Returns the cuts of an architecture's table, by the specs of keys; none where it has no table."""
    path = FOLDER / f"{arch}.json"
    entries: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    return {
        Key.from_dict(entry | {"tokens": 1, "invariant": True}).spec: SumOrder(*(entry[name] for name in CUT))
        for entry in entries
    }
