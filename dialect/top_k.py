"""Which experts a token goes to, said by their ids: `TopK`, of a call with a weight of several experts.

    y[t * count + j, n] = sum_k x[t, k] W[ids[t, j], n, k] + bias[ids[t, j], n]                  without weights
    y[t, n] = sum_j weights[t, j] * round(sum_k x[t * count + j, k] W[ids[t, j], n, k] + bias)   with them

An id of -1, or any other that is no expert's, stands for one elsewhere: it adds exactly 0, and its rows of y are not
written. Each id reads the weight of its expert, so this is for few tokens: for more, rows sorted by expert read what
several tokens chose once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, cast

from lowbit.dialect.errors import SpecError
from lowbit.dialect.fields import choice, integer

Ids = Literal["i32", "i64"]
RouterWeights = Literal["f16", "bf16", "f32"]
IDS, ROUTER_WEIGHTS = "ids", "router_weights"
"""The names of these arguments of a call."""


@dataclass(frozen=True)
class TopK:
    """The ids of a token's experts, and the weights by which y adds up what these make of it.

    count    experts of a token, at least 1
    ids      type of ids in memory, "i32" or "i64"
    weights  type of the weights, "f16", "bf16" or "f32"; None: nothing is added up, y has a row for every id

    Raises SpecError that names the field, what was given and what is allowed.
    """

    count: int
    ids: Ids = "i64"
    weights: RouterWeights | None = None

    def __post_init__(self) -> None:
        integer("top_k: count", self.count, 1)
        choice("top_k: ids", self.ids, ("i32", "i64"))
        if self.weights is not None:
            choice("top_k: weights", self.weights, ("f16", "bf16", "f32"))

    @classmethod
    def read(cls, given: object) -> TopK:
        """Returns what is given as itself, or as JSON has it. Raises SpecError for anything else."""
        if isinstance(given, TopK):
            return given
        known = [f.name for f in fields(cls)]
        values = cast(Mapping[str, Any], given if isinstance(given, Mapping) else {})
        if "count" not in values or not values.keys() <= set(known):
            raise SpecError(f"top_k={given!r} must be a TopK, with the fields {', '.join(known)}, or None")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Returns it in terms of JSON."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @property
    def arguments(self) -> tuple[str, ...]:
        """The names of what a call has besides x and the weight."""
        return (IDS,) if self.weights is None else (IDS, ROUTER_WEIGHTS)

    def __str__(self) -> str:
        return f"{self.count} of a token by {self.ids}" + (f", added up by {self.weights}" if self.weights else "")
