"""In which types a weight is multiplied: `Call`, one of the parts of a `MatmulSpec`. A packed weight can be called in
several ways, as far as it has the same tensors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from lowbit.dialect.elements import ELEMENTS, Element
from lowbit.dialect.errors import SpecError
from lowbit.dialect.fields import boolean, choice, integer
from lowbit.dialect.formats.byte_codes import COMPUTE, Compute
from lowbit.dialect.formats.names import plain_name, short_name
from lowbit.dialect.top_k import TopK

Act = Literal["f16", "bf16"]
Out = Literal["f16", "bf16", "f32"]


@dataclass(frozen=True)
class Call:
    """The types of a matmul's x, y and products. `MatmulSpec` explains the fields.

    act           type of x
    out           type of y and of the bias; None: as act
    compute       type in which codes and x are multiplied, "f8e4m3" or "i8"; None: act
    fold_scales   whether kernels for many tokens may round scaled weights to `compute`
    compute_from  rows of x from which on they are multiplied in `compute`
    experts       between how many experts the rows of the weight are shared out
    top_k         which of them a token goes to, by ids; None: rows of x come sorted by expert
    invariant     whether a row of x gives the same bits in every call, whatever rows are beside it

    Raises SpecError that names the field, what was given, what is allowed, and a fix.
    """

    act: Act = "f16"
    out: Out | None = None
    compute: Compute | None = None
    fold_scales: bool = False
    compute_from: int = 1
    experts: int = 1
    top_k: TopK | None = None
    invariant: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "act", choice("act", short_name(self.act), ("f16", "bf16")))
        if self.out is not None:
            object.__setattr__(self, "out", choice("out", short_name(self.out), ("f16", "bf16", "f32")))
        if self.compute is not None:
            object.__setattr__(self, "compute", _compute(self.compute))
        object.__setattr__(self, "compute_from", integer("compute_from", self.compute_from, 1))
        object.__setattr__(self, "experts", integer("experts", self.experts, 1))
        if self.top_k is not None:
            object.__setattr__(self, "top_k", TopK.read(self.top_k))
            self._check_top_k()
        if boolean("fold_scales", self.fold_scales) and not self.compute:
            raise SpecError("fold_scales=True needs compute='f8e4m3' or 'i8'; name one, or fold_scales=False")
        if self.compute_from > 1 and not self.compute:
            raise SpecError(f"compute_from={self.compute_from} needs compute='f8e4m3' or 'i8'; name one, or drop it")
        if boolean("invariant", self.invariant):
            self._check_invariant()

    def _check_invariant(self) -> None:
        """Raises SpecError for calls whose result depends on the number of rows, or whose kernels have several orders
        of sums."""
        if self.compute_from > 1:
            given = f"compute_from={self.compute_from} multiplies few rows in another type than many"
            raise SpecError(f"invariant=True is one result for every number of rows, but {given}; use compute_from=1")
        if self.top_k:
            raise SpecError("invariant=True adds up experts in one way, by rows sorted by expert; drop top_k=")

    def _check_top_k(self) -> None:
        if self.experts == 1:
            raise SpecError("top_k= needs experts=, of which tokens have some; name how many there are, or drop it")
        if self.compute:
            raise SpecError(f"top_k= is for few tokens, and takes no compute={self.compute!r}; drop one of them")

    def __str__(self) -> str:
        compute = f" in {self.compute}" if self.compute else ""
        compute += ", folded" if self.fold_scales else ""
        compute += f", from {self.compute_from} rows on" if self.compute_from > 1 else ""
        experts = f", {self.experts} experts" if self.experts > 1 else ""
        experts += f", {self.top_k}" if self.top_k else ""
        invariant = ", invariant" if self.invariant else ""
        return f"{self.act}{compute} -> {self.out_dtype}{experts}{invariant}"

    @cached_property
    def x(self) -> Element:
        """The type of the activation's numbers as they are multiplied."""
        return ELEMENTS[(self.compute or self.act).removeprefix("f8")]

    @property
    def out_dtype(self) -> Out:
        """Type of y and of the bias."""
        return self.out or self.act


def _compute(given: object) -> str:
    """The type of products, under any of its names."""
    names = {"e4m3": "f8e4m3", "int8": "i8", "s8": "i8"}
    short = plain_name(short_name(given))
    return choice("compute", names.get(str(short), str(short)), COMPUTE)
