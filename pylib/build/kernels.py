"""The kernels of one matmul: which serve how many rows, each loaded by `pylib.build.driver` at its first use.

Nothing here imports MLIR, LLVM or CUDA before a kernel has to be compiled: with a warm cache it never has to.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from lowbit.dialect.errors import SpecError
from lowbit.dialect.formats.byte_codes import Compute
from lowbit.dialect.spec import Act, MatmulSpec
from lowbit.passes.kernels.base import IN_EIGHT_BITS, KernelFamily, KernelRequest, KernelSchedule, operations_of
from lowbit.passes.scheduling.expert_rule import most_alone, tiles_by_slots, tiles_of
from lowbit.passes.kernels.permute.family import FEW_ROWS, permute_spec
from lowbit.passes.kernels.permute.family import default_schedule as permute_schedule
from lowbit.passes.kernels.quantize.family import default_schedule as quantize_schedule
from lowbit.passes.kernels.quantize.family import quantize_spec
from lowbit.passes.kernels.registry import family_of, request, schedule_names
from lowbit.passes.kernels.requirements import check_compute
from lowbit.passes.scheduling.choice import Origin, chooser_of, fixed_schedule
from lowbit.passes.scheduling.expert_choice import ExpertChoice, choose_for_slots, where_choices_change
from lowbit.passes.scheduling.tables import Table
from lowbit.passes.target import Target
from lowbit.pylib.build import user_tables
from lowbit.pylib.build.choices import (
    KernelChoices,
    Rows,
    cut_rows,
    find_rows,
    kernel_name,
    rows_of_any_tokens,
    rows_of_launches,
    rows_of_slots,
    rows_of_tiles,
)
from lowbit.pylib.build.driver import Artifact, compile_stages, load


def kernel_choices(spec: MatmulSpec, target: Target, schedule: KernelSchedule | None = None) -> KernelChoices:
    """Returns which kernels serve how many rows. Nothing is compiled. Raises SpecError for a schedule that serves none."""
    check_given(spec, target, schedule)
    if spec.compute_from == 1:
        return Artifacts(spec, target, schedule).choices()
    few_schedule, schedule = schedules_by_rows(spec, schedule)
    few = Artifacts(spec.in_act, target, few_schedule).choices()
    many = Artifacts(spec.in_eight_bits, target, schedule).choices()
    return replace(many.after(few, spec.first_in_eight_bits), spec=spec)


def kernels_up_to(
    spec: MatmulSpec, target: Target, rows: int, late_scaling: bool = False
) -> tuple[KernelRequest, ...]:
    """Returns the kernels that calls with 1 to so many rows of x launch on a GPU, those that prepare x among them.

    late_scaling   as `Artifacts` has it

    Raises SpecError for a spec that the target has no kernels for.
    """
    in_order = replace(spec, permuted=False)
    if late_scaling and spec.for_rows(1).compute is None:
        choices = Artifacts(in_order.for_rows(1), target, None, late_scaling).choices()
    else:
        choices = kernel_choices(in_order, target)
    found = list(choices.up_to(rows))
    if spec.permuted:
        found += [permute_request(spec.k, spec.act, many, target) for many in (False, True)]
    if spec.compute:
        found.append(quantize_request(spec.k, spec.act, spec.compute, target))
    return tuple(found)


def permute_request(k: int, act: Act, many: bool, target: Target) -> KernelRequest:
    """Returns the request for the kernel that permutes the k columns of few rows of x, or of many."""
    spec = permute_spec(k, act)
    return request(spec, target, permute_schedule(spec, FEW_ROWS + many, target))


def quantize_request(k: int, act: Act, compute: Compute, target: Target) -> KernelRequest:
    """Returns the request for the kernel that quantizes rows of x of k columns."""
    spec = quantize_spec(k, act, compute)
    return request(spec, target, quantize_schedule(spec))


def schedules_by_rows(
    spec: MatmulSpec, schedule: KernelSchedule | None
) -> tuple[KernelSchedule | None, KernelSchedule | None]:
    """Returns a user's schedule, or None, for calls in the act type, and for those in 8 bits: its family says for which.

    Raises SpecError where the matmul has no such calls.
    """
    if schedule is None:
        return None, None
    given, operation = f"schedule={schedule!r} multiplies", family_of(schedule).operation
    if operation in IN_EIGHT_BITS:
        if spec.compute is None:
            take = f"take one of {schedule_names(operations_of(spec)[0])}, or a spec with compute="
            raise SpecError(f"{given} activations of 8 bits, which ({spec}) does not; {take}")
        return None, schedule
    if spec.for_rows(1).compute is not None:
        take = f"take one of {schedule_names(operations_of(spec)[1])}, or a spec with compute_from="
        raise SpecError(f"{given} in {spec.act}, and ({spec}) all rows in {spec.compute}; {take}")
    return schedule, None


def check_given(spec: MatmulSpec, target: Target, schedule: KernelSchedule | None) -> None:
    """Raises SpecError for a user's schedule that no kernel of a matmul would have, for whatever number of rows."""
    for given, (first, last, kind) in zip(schedules_by_rows(spec, schedule), _calls(spec)):
        if given is None:
            continue
        artifacts = Artifacts(kind, target, given)
        if not artifacts.tiles_of_given(first, last):
            artifacts.check_schedule(given)
            rows = f"{first} to {last or 'any number of'} rows" if spec.compute_from > 1 else "rows"
            raise SpecError(
                f"schedule={given!r} serves no {rows} of ({spec}) on {target}; take {artifacts.allowed(first, last)}"
            )


def _calls(spec: MatmulSpec) -> tuple[tuple[int, int | None, MatmulSpec], ...]:
    """The first and last row (None: without end) of calls in the act type and of those in 8 bits, with their specs."""
    first = spec.first_in_eight_bits
    return (1, None if spec.compute is None else first - 1, spec.in_act), (first, None, spec.in_eight_bits)


class Artifacts:
    """The kernels of (spec, target): per token tile, and the one that dequantizes, which stands under None.

    The request for a kernel is fixed when the kernel is first asked for: a table that `lowbit tune` writes later does
    not change it. A `schedule` is taken for the tokens it names (8 are for one, too); other token tiles choose their own. Safe to
    use from any thread.

    With late_scaling no kernel rounds a weight to the act type, for any number of rows: for weights of a wide range
    (`pylib.weights.value_range`). Schedules with wgmma round weights, and so do kernels for any number of tokens: these do
    without both, and without a given schedule as well. With vendor=False kernels of ours serve every number of rows; so
    they do for an invariant spec, all in one order of sums.
    """

    def __init__(
        self,
        spec: MatmulSpec,
        target: Target,
        schedule: KernelSchedule | None,
        late_scaling: bool = False,
        vendor: bool = True,
    ) -> None:
        if spec.compute:
            check_compute(spec, target)
        self._spec, self._target = spec, target
        late_scaling = late_scaling and not spec.invariant  # whose kernels scale sums, and round no weight
        self._schedule = None if late_scaling else schedule
        self._chooser = chooser_of(spec, replace(target, has_wgmma=False) if late_scaling else target)
        rounding = self._chooser.any_tiles  # kernels for any number of tokens round weights, but for invariant ones
        self._any_tiles: tuple[int, ...] = () if late_scaling else rounding
        self._token_tiles = tuple(token_tile for token_tile in self._chooser.token_tiles if not (late_scaling and token_tile in rounding))
        ours = late_scaling or spec.invariant or spec.compute is not None
        self._vendor = vendor and not ours  # whether the vendor's matmul may serve
        self._rows = self._find_rows()
        self._requests: dict[int | None, KernelRequest] = {}
        self._origins: dict[int | None, Origin] = {}
        self._kernels: dict[int | None, Artifact] = {}
        self._lock = threading.RLock()

    def _find_rows(self) -> tuple[Rows, ...]:
        if self._spec.experts > 1:
            return rows_of_slots(tiles_by_slots(tiles_of(self._spec, self._target), self._spec.experts))
        if self._any_tiles:
            most = self._most_launched if self._vendor else None
            return rows_of_any_tokens(self._token_tiles, self._any_tiles, self._target.thresholds.decoded, most)
        launched = self._target.thresholds.launched
        return rows_of_tiles(self._token_tiles, launched) if self._vendor else rows_of_launches(self._token_tiles)

    @property
    def _most_launched(self) -> int | None:
        """Returns the last token tile that is launched: beyond it, writing the weight out for the vendor's matmul takes
        less time. None: a launch serves any number of rows. Without wgmma the family's token tiles end there."""
        if not self._target.has_wgmma:
            return self._any_tiles[-1]
        vendor = self._target.thresholds.vendor or {}
        return vendor.get((self._spec.outliers, self._spec.bilevel is not None))

    def token_tiles(self, m: int) -> list[int] | None:
        """The token tiles of the launches for m rows, in order; None for the dequantize kernel and the vendor's
        matmul. `pylib.build.choices` has the rules."""
        found = find_rows(self._rows, m)
        repeats = found.last is None and not self._any_tiles  # one launch after another, of the widest token tile
        launches = -(-m // found.token_tiles[-1]) if repeats and found.token_tiles else 1
        return list(found.token_tiles) * launches or None

    def token_tile(self, m: int) -> int | None:
        """Returns the token tile of the first launch for m rows; None for the dequantize kernel."""
        tiles = self.token_tiles(m)
        return tiles[0] if tiles else None

    def choices(self) -> KernelChoices:
        """Returns which kernels serve how many rows, all of them decided now."""
        used = dict.fromkeys(token_tile for each in self._rows for token_tile in each.token_tiles)
        others = (None,) if self._spec.experts == 1 else ()  # no kernel dequantizes experts
        kernels = {token_tile: self.request(token_tile) for token_tile in (*used, *others)}
        found = KernelChoices(self._spec, self._target, self._rows, kernels, self._origins)
        return found if others or self._schedule else self._by_slots(found)

    def _by_slots(self, choices: KernelChoices) -> KernelChoices:
        """Returns the choices for experts: a table for each run of slots in which every token tile has one schedule."""
        tables = user_tables.trusted(self._target)
        few = range(1, most_alone(self._spec, self._target) + 2)
        firsts = {*few, *(rows.first for rows in self._rows), *where_choices_change(self._spec, tables)}
        found, here = None, choices
        for first in sorted(firsts):
            choice = self._of_slots(first, tables)
            if found is None or here.kernels[self.token_tile(first)].schedule != choice.schedule:
                here = self._from(choices, first, tables)
                found = here.after(found, first) if found else here
        return found or choices

    def _from(self, choices: KernelChoices, first: int, tables: Sequence[Table]) -> KernelChoices:
        """Returns choices in which every token tile has the schedule for the first of its slots from `first` on."""
        least = {rows.token_tiles[0]: max(rows.first, first) for rows in self._rows}
        chosen = {tile: self._of_slots(slots, tables) for tile, slots in least.items()}
        kernels = {tile: request(self._spec_for(tile), self._target, each.schedule) for tile, each in chosen.items()}
        return replace(choices, kernels=kernels, origins={tile: each.origin for tile, each in chosen.items()})

    def _of_slots(self, slots: int, tables: Sequence[Table]) -> ExpertChoice:
        """Returns the choice for so many slots of experts."""
        return choose_for_slots(self._spec, cast(int, self.token_tile(slots)), slots, self._target, tables)

    def tiles_of_given(self, first: int = 1, last: int | None = None) -> list[int]:
        """The token tiles of the rows first to last (None: without end) for which the given schedule is taken."""
        tiles = self._tiles_of_rows(first, last)
        return [tile for tile in tiles if self._schedule and self._is_for(self._schedule, tile)]

    def allowed(self, first: int, last: int | None) -> str:
        """Returns, for a message, which types of schedules can be given for the rows first to last, and for how many tokens."""
        found: dict[KernelFamily[Any], list[str]] = {}
        for tile in self._tiles_of_rows(first, last):
            for family in self._chooser.families(tile):
                found.setdefault(family, []).append(str(tile))
        named = ((f.schedule_type.__name__, f.takes_any_tokens, tiles) for f, tiles in found.items())
        return " or ".join(name if any_ else f"{name} with tokens={', '.join(t)}" for name, any_, t in named)

    def check_schedule(self, schedule: KernelSchedule) -> None:
        """Raises SpecError where a schedule of this operation does not fit the spec or the target."""
        family_of(schedule).check(self._spec, schedule, self._target)
        if not self._chooser.has_order(schedule):
            raise SpecError(self._misfit_of_order(schedule))

    def _misfit_of_order(self, schedule: KernelSchedule) -> str:
        """Returns what an error says of a schedule whose sums have another order than those of an invariant matmul."""
        given = family_of(schedule).sum_order(self._spec.for_tokens(1), schedule) or "an order of its own"
        return (
            f"schedule: invariant=True has one order of sums for all rows of x, {self._chooser.order}, and "
            f"{schedule!r} has {given}; take one with that order, or none, for which one of that order is chosen"
        )

    def _tiles_of_rows(self, first: int, last: int | None) -> list[int]:
        """The token tiles of the launches for the rows first to last, each once."""
        rows = cut_rows(self._rows, first, last)
        return sorted({tile for each in rows for tile in each.token_tiles})

    def request(self, token_tile: int | None) -> KernelRequest:
        """Returns the request for the kernel of up to `token_tile` tokens. Raises SpecError for a schedule that does not fit."""
        with self._lock:
            found = self._requests.get(token_tile)
            if found is None:
                schedule, self._origins[token_tile] = self._choose(token_tile)
                found = self._requests[token_tile] = request(self._spec_for(token_tile), self._target, schedule)
        return found

    def kernel(self, token_tile: int | None) -> Artifact:
        """The kernel for up to `token_tile` tokens. Raises TargetError if a tool to compile it is missing."""
        kernel = self._kernels.get(token_tile)
        if kernel is None:
            with self._lock:
                kernel = self._kernels.get(token_tile) or load(self.request(token_tile), self._name(token_tile))
                self._kernels[token_tile] = kernel
        return kernel

    def request_for(self, m: int) -> KernelRequest:
        """Returns the request for the first launch for m rows, or for m slots of experts."""
        if self._spec.experts == 1 or self._schedule:
            return self.request(self.token_tile(m))
        choice = self._of_slots(m, user_tables.trusted(self._target))
        return request(self._spec_for(self.token_tile(m)), self._target, choice.schedule)

    def kernel_for(self, m: int) -> Artifact:
        """The kernel of this request."""
        token_tile = self.token_tile(m)
        if self._spec.experts == 1 or self._schedule:
            return self.kernel(token_tile)
        return load(self.request_for(m), self._name(token_tile))

    def stages_for(self, m: int) -> dict[str, str]:
        """The IR of this kernel after each stage; compiles it afresh."""
        return compile_stages(self.request_for(m))

    def _spec_for(self, token_tile: int | None) -> MatmulSpec:
        return self._spec if token_tile is None else self._spec.for_tokens(token_tile)

    def _choose(self, token_tile: int | None) -> tuple[KernelSchedule, Origin]:
        """The user's schedule where it is meant for this token tile, else that of a table or the rule."""
        if token_tile is None:
            return fixed_schedule("dequantize"), "rule"
        if self._schedule and self._is_for(self._schedule, token_tile):
            return self._schedule, "given"
        if self._spec.experts > 1:
            first = next(rows.first for rows in self._rows if token_tile in rows.token_tiles)
            return self._of_slots(first, user_tables.trusted(self._target))
        user = user_tables.user_tables()
        choice = self._chooser.choice(token_tile, user_tables.gpu_name(self._target, user), user)
        return choice.schedule, choice.origin

    def _is_for(self, schedule: KernelSchedule, token_tile: int) -> bool:
        """Tells whether a schedule is for this token tile, and fits: one for folded scales may not where none are."""
        family = family_of(schedule)
        meant = family in self._chooser.families(token_tile) and family.serves(schedule, token_tile)
        fits = meant and family.allows(self._spec_for(token_tile), schedule, self._target)
        return fits and self._chooser.has_order(schedule)

    def _name(self, token_tile: int | None) -> str:
        spec = self._spec
        return f"{spec.weight}_{spec.n}x{spec.k}_{self._target.arch}_{kernel_name(token_tile)}"
