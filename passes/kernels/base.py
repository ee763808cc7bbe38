"""What a kernel family is, and the request for one kernel, without MLIR.

A family is one way to compute an operation on tensors: its schedule type, what it supports, the schedules worth
considering, a prediction of their time, the rules they must obey, and the program. Each family has a folder here, and
a line in `passes.kernels.registry`. The compile driver, the choice of schedules, the tuner and the passes know families
by this interface only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar

from lowbit.dialect.elements import ELEMENTS
from lowbit.dialect.errors import SpecError
from lowbit.dialect.signature import WORKSPACE
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.sum_order import SumOrder
from lowbit.passes.launch import Role
from lowbit.passes.target import Target

if TYPE_CHECKING:
    from lowbit.dialect.bindings import ir

Operation = Literal[
    "matmul",
    "quantized_matmul",
    "expert_matmul",
    "quantized_expert_matmul",
    "top_k_expert_matmul",
    "dequantize",
    "prepack",
    "permute",
    "quantize",
]
OF_ONE: tuple[Operation, ...] = ("matmul", "quantized_matmul")
"""The operations on weights that are not of several experts."""
OF_EXPERTS: tuple[Operation, ...] = ("expert_matmul", "quantized_expert_matmul")
"""The operations on weights of several experts."""
IN_EIGHT_BITS: tuple[Operation, ...] = ("quantized_matmul", "quantized_expert_matmul")
"""The operations that multiply activations of 8 bits."""


def operations_of(spec: MatmulSpec) -> tuple[Operation, ...]:
    """Returns the operations that multiply by a spec's weight: in the act type, and behind it in 8 bits, if there is
    one."""
    if spec.top_k:
        return ("top_k_expert_matmul",)
    return OF_EXPERTS if spec.experts > 1 else OF_ONE


@dataclass(frozen=True)
class KernelSchedule:
    """The free choices of a kernel: a family derives its own type from this one, whose fields are the choices.

    Raises SpecError for a value that is not of the type of its field's default.
    """

    def __post_init__(self) -> None:
        names, defaults, types = _defaults(type(self))
        values = [getattr(self, name) for name in names]
        if [type(value) for value in values] != types:
            for name, value, default in zip(names, values, defaults):
                check_type(name, value, default)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> KernelSchedule:
        """The inverse of `dataclasses.asdict`. Raises SpecError for an unknown field or a value that does not fit."""
        known = [field.name for field in fields(cls)]
        if unknown := sorted(values.keys() - set(known)):
            allowed = ", ".join(known) or "none"
            raise SpecError(f"schedule: unknown field {unknown[0]!r}; allowed: {allowed}")
        return cls(**values)


@lru_cache(maxsize=None)
def _defaults(schedule_type: type[KernelSchedule]) -> tuple[list[str], list[object], list[type]]:
    """Returns the names of a type's choices, their defaults, and the types of these. A choice of a kernel makes some
    hundred schedules."""
    every = fields(schedule_type)
    return [f.name for f in every], [f.default for f in every], [type(f.default) for f in every]


def check_type(name: str, value: object, default: object) -> None:
    """Raises SpecError unless a choice is of the type of its default."""
    if type(value) is not type(default):
        number = "an integer" if isinstance(default, int) else "a string"
        kind = "True or False" if isinstance(default, bool) else number
        raise SpecError(f"schedule: {name}={value!r} must be {kind}")


S = TypeVar("S", bound=KernelSchedule)
SURE = 1 - 1e-9
"""What lower bounds of predictions are multiplied by: sums in another order differ in their last bits."""


@dataclass(frozen=True)
class Candidates(Generic[S]):
    """A group of a family's candidates, which are made when they are asked for.

    least  microseconds; none of them is predicted to take less
    make   returns them, in order
    """

    least: float
    make: Callable[[], Sequence[S]]

    @cached_property
    def schedules(self) -> Sequence[S]:
        """The candidates, made once."""
        return self.make()


class KernelFamily(ABC, Generic[S]):
    """One way to compute an operation. Families are stateless: there is one object of each, in the registry.

    name           how requests, tables and printed schedules call the family
    operation      the operation on tensors that its kernels compute
    schedule_type  the class of its schedules; no other family has the same
    outputs        the parameters that its kernels write
    takes_any_tokens  whether a launch serves any number of tokens; a token tile is then what a schedule is chosen for
    """

    name: ClassVar[str]
    operation: ClassVar[Operation]
    schedule_type: type[S]
    outputs: ClassVar[tuple[str, ...]] = ("y",)
    takes_any_tokens: ClassVar[bool] = False

    def token_tiles(self, spec: MatmulSpec, target: Target) -> tuple[int, ...]:
        """The token tiles (most tokens of a launch) that the family has kernels for; none where x plays no part."""
        return ()

    def token_tile_limit(self, spec: MatmulSpec, target: Target) -> str:
        """Why `token_tiles` has no wider one: the end of an error's message."""
        return ""

    def serves(self, schedule: S, token_tile: int) -> bool:
        """Whether a schedule that a user gives is meant for a token tile."""
        return False

    def candidates(self, spec: MatmulSpec, token_tile: int, target: Target) -> Sequence[S]:
        """The few schedules from which the rule takes the one with the least predicted time."""
        return [self.schedule_type()]

    def groups(self, spec: MatmulSpec, token_tile: int, target: Target) -> Iterable[Candidates[S]]:
        """Returns `candidates` in groups, in their order: a group whose `least` is too long need not be made."""
        return [Candidates(0.0, lambda: self.candidates(spec, token_tile, target))]

    def least_time(self, spec: MatmulSpec, token_tile: int, target: Target) -> float:
        """Microseconds that no candidate is predicted to be below: a bound that takes less time than any prediction."""
        return 0.0

    def new_groups(self, spec: MatmulSpec, token_tile: int, target: Target) -> Iterable[Candidates[S]]:
        """Returns those of `groups` that may be predicted to take less than every group of a narrower token tile."""
        return self.groups(spec, token_tile, target)

    def predict(self, spec: MatmulSpec, token_tile: int, schedule: S, target: Target) -> float:
        """About how many microseconds a launch takes: for comparing schedules. inf where the schedule cannot run."""
        return 0.0

    def bounds(self, spec: MatmulSpec, tokens: int, schedule: S, target: Target) -> dict[str, float]:
        """Microseconds below which a launch for so many tokens can't be, by what bounds it."""
        x = tokens * (spec.k * spec.x.bytes + spec.outputs * ELEMENTS[spec.out_dtype].bytes)
        products = tokens * spec.k * spec.n / spec.experts
        return {
            "device memory": (spec.bytes + x) / target.costs.bandwidth,
            "tensor cores": products / target.costs.products,
        }

    def suits(self, spec: MatmulSpec, schedule: S, target: Target, measured: MatmulSpec) -> bool:
        """Whether a schedule may be expected to do for `spec` what it did where it was measured."""
        return spec == measured

    def search_space(self, spec: MatmulSpec, token_tile: int, target: Target) -> Sequence[S]:
        """The schedules that the first pass of the tuner orders by prediction and times."""
        return self.candidates(spec, token_tile, target)

    def neighbours(self, spec: MatmulSpec, token_tile: int, target: Target, around: S) -> Sequence[S]:
        """The schedules that the second pass of the tuner tries next to a good one, the most promising first: those of
        the search space that differ in one choice."""

        def differs_in_one(schedule: S) -> bool:
            return sum(getattr(schedule, f.name) != getattr(around, f.name) for f in fields(schedule)) == 1

        near = [s for s in self.search_space(spec, token_tile, target) if differs_in_one(s)]
        return sorted(near, key=lambda s: self.predict(spec, token_tile, s, target))

    def shape(self, schedule: S) -> tuple[object, ...]:
        """Returns the choices that matter most for the time: the tuner times every shape once before any twice."""
        return (schedule,)

    def check(self, spec: MatmulSpec, schedule: S, target: Target) -> None:
        """Raises SpecError where a schedule does not fit a spec or a target."""

    def allows(self, spec: MatmulSpec, schedule: S, target: Target) -> bool:
        """Tells whether a schedule fits a spec and a target."""
        try:
            self.check(spec, schedule, target)
        except SpecError:
            return False
        return True

    def sum_order(self, spec: MatmulSpec, schedule: S) -> SumOrder | None:
        """Returns the order in which the kernel adds up: kernels of equal orders give equal bits, those of other
        families, too. None where a result has no order of its own, or none that was described."""
        return None

    def orders(self, spec: MatmulSpec, target: Target) -> Sequence[SumOrder]:
        """Returns the orders that the family has schedules for, for every number of tokens; none where it has none."""
        return ()

    def in_order(
        self, spec: MatmulSpec, token_tile: int, target: Target, order: SumOrder
    ) -> Iterable[Candidates[S]]:
        """Returns the schedules for a token tile that have an order of sums, in groups as `groups` has them."""
        return ()

    def rounding(self, spec: MatmulSpec, schedule: S) -> dict[str, bool]:
        """Returns what the kernel rounds besides its sums, as arguments of `pylib.reference.tolerance`."""
        return {}

    def x_boxes(self, spec: MatmulSpec, schedule: S) -> Mapping[str, tuple[int, int]]:
        """Tokens and columns of the boxes in which the copy engine brings x, by the parameter that takes a tensor map
        of them; none where the kernel takes x's address."""
        return {}

    def roles(self, spec: MatmulSpec, names: Iterable[str]) -> dict[str, Role]:
        """Returns what the parameters of these names are."""
        known: dict[str, Role] = {slot.name: "weight" for slot in spec.tensors}
        for name in self.outputs:
            known[name] = "output"
        known["m"], known[WORKSPACE] = "rows", "workspace"
        return {name: known.get(name, "input") for name in names}

    @abstractmethod
    def build(self, spec: MatmulSpec, schedule: S) -> ir.Module:
        """The tile program. Implementations import it here, so that a choice of schedules loads no MLIR."""


@dataclass(frozen=True)
class KernelRequest:
    """One kernel to build: made once, and then looked up, built, cached and dumped as it is.

    family is the name of one in `passes.kernels.registry`; the schedule is of its type.
    """

    spec: MatmulSpec
    target: Target
    family: str
    schedule: KernelSchedule
