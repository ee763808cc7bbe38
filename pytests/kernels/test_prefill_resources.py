"""What the prefill kernels take of a multiprocessor, by the notes of the assembler: no register spills, and no products
of wgmma run one after the other. A block has all of a multiprocessor, so this decides about its time.

A fixed sample that covers: in every family, every format and every kind of scale. It has one kind of scale for
each format in a family, another one from format to format. CI runs a third of it, picked so that the most of formats,
scales and tiles meets in some case (`telling`), and `-m slow` all others and those beyond it. Zeros, groups,
activations, outliers, rows and schedules take turns with different periods, so that they meet in all combinations of
two.
`test_prefill.test_no_spills_of_any_format` and its like try all schedules, and are slow.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import chain, combinations
from typing import Any

import pytest
from eight_bit_problems import FITTING
from sweeps import telling
from tables import table

from lowbit.dialect.bilevel import Bilevel
from lowbit.dialect.formats.dtypes import all_names, dtype
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.codegen.cubin import resource_usage
from lowbit.passes.kernels.base import KernelRequest
from lowbit.passes.kernels.eight_bit_prefill.legality import spills
from lowbit.passes.kernels.eight_bit_prefill.schedule import EightBitPrefillSchedule
from lowbit.passes.kernels.registry import FAMILIES, request
from lowbit.passes.pipeline import compile_kernel
from lowbit.passes.target import Target
from lowbit.passes.targets import parse_target

NUMBERS: tuple[dict[str, Any], ...] = (
    {"scale": "f16"},
    {"scale": "f32"},
    {"scale": "bf16"},
    {"scale": "e8m0"},
    {"scale": "e4m3", "row_scales": True},
)
CODES: tuple[dict[str, Any], ...] = (
    {"scale": "u6", "bilevel": Bilevel(groups=4)},
    {"scale": "u3", "bilevel": Bilevel(rows=16, groups=1, zeros=True)},
    {"scale": "i8", "bilevel": Bilevel(groups=2, scale="f32"), "row_scales": True},
)
SCALES = (*NUMBERS, *CODES)
FORMATS = (*all_names(), "lut3", "lut8")
HOPPER, A100, L40S = (parse_target(name) for name in ("sm_90a", "sm_80", "sm_89"))


def turn(number: int, *choices: Any) -> Any:
    return choices[number % len(choices)]


def spec_of(weight: str, i: int, j: int) -> MatmulSpec:
    """The spec of the i-th format and the j-th kind of scale."""
    scales = SCALES[j]
    group = turn(i + 2 * j + i // 5, 128, 32, None, 16, 64)
    zeros = turn(i + j + i // 4, "none", "int", "float", "offset")
    return MatmulSpec(
        turn(i // 2 + j, 8192, 8200),
        8192,
        weight,
        32 if group is None and scales in CODES else group,
        zeros="float" if zeros == "int" and weight[0] not in "ui" else zeros,
        act=turn(i + j // 2, "f16", "bf16"),
        outliers=(i + j) % 3 == 0,
        table=table(int(weight[3:])) if weight.startswith("lut") else None,
        **scales,
    )


def spec_of_bytes(compute: Any, weight: str, i: int, j: int) -> MatmulSpec:
    """The same with activations of 8 bits."""
    bits = dtype(weight).bits
    groups = (256, None, 512) if bits in (3, 5, 6, 7) else (128, 32, None, 64)
    zeros = "int" if weight[0] in "ui" and bits < 8 and (i + j) % 2 else "none"
    rows, group = turn(i // 2 + j, 8192, 8200), turn(i + j + i // 4, *groups)
    act = turn(i + j // 2, "f16", "bf16")
    return MatmulSpec(rows, 8192, weight, group, zeros=zeros, act=act, compute=compute, **NUMBERS[j])


def folded_spec(weight: str, i: int, j: int) -> MatmulSpec:
    """The same with scales that are folded into weights, for which zeros beside scales of 8 bits have to be in f16."""
    spec = spec_of(weight, i, j)
    group = spec.group_size or 128
    act = "f16" if spec.scale in ("e8m0", "e4m3") and spec.zeros in ("float", "offset") else spec.act
    return replace(spec, group_size=group, act=act, outliers=False, compute="f8e4m3", fold_scales=True)


@dataclass(frozen=True)
class Case:
    """A kernel of the sample.

    number, place  of its format, and of its spec among those of the format: where schedules begin to take turns
    places         how many specs the format has
    """

    family: str
    target: Target
    number: int
    place: int
    places: int
    spec: MatmulSpec

    def __str__(self) -> str:
        spec = self.spec
        compute = f"-{spec.compute}{'-folded' if spec.fold_scales else ''}" if spec.compute else ""
        return f"{self.family}-{self.target}-{spec.weight}{compute}-{spec.scale}-{self.place}"

    @cached_property
    def kernel(self) -> KernelRequest:
        """It has one of the schedules that may be chosen for its spec."""
        found = candidates(self.family, self.spec, self.target)
        return request(self.spec, self.target, found[(5 * self.number + 3 * self.place) % len(found)])


@cache
def candidates(family: str, spec: MatmulSpec, target: Target) -> Sequence[Any]:
    return FAMILIES[family].candidates(spec, 512, target)


def cases() -> Iterator[Case]:
    """Kernels with wgmma have every format with every kind of scale; those without, two kinds of each format."""
    for i, weight in enumerate(FORMATS):
        specs = [spec_of(weight, i, j) for j in range(len(SCALES))]
        yield from cases_of("prefill", HOPPER, i, specs)
        target = (A100, L40S)[i % 2]
        yield from cases_of("prefill_mma", target, i, [with_registers(spec, target) for spec in turns(specs, i)])
    for i, (compute, weight) in enumerate(FITTING):
        specs = [spec_of_bytes(compute, weight, i, j) for j in range(len(NUMBERS))]
        yield from cases_of("eight_bit_prefill", HOPPER, i, specs)
        yield from cases_of("eight_bit_prefill_mma", L40S if compute == "f8e4m3" else A100, i, list(turns(specs, i)))
    for i, weight in enumerate(FORMATS):
        folded = [folded_spec(weight, i, j) for j in (3 * i % len(SCALES), (3 * i + 4) % len(SCALES))]
        yield from cases_of("eight_bit_prefill", HOPPER, i, folded)
        yield from cases_of("eight_bit_prefill_mma", L40S, i, [folded[i % 2]])


def cases_of(family: str, target: Target, number: int, specs: Sequence[MatmulSpec]) -> Iterator[Case]:
    return (Case(family, target, number, place, len(specs), spec) for place, spec in enumerate(specs))


def with_registers(spec: MatmulSpec, target: Target) -> MatmulSpec:
    """The spec for prefill_mma, which has too few registers for outliers of some formats."""
    return spec if candidates("prefill_mma", spec, target) else replace(spec, outliers=False)


def turns(specs: Sequence[MatmulSpec], i: int) -> Iterator[MatmulSpec]:
    """Two specs that differ from one format to the next."""
    return (specs[(i + j) % len(specs)] for j in range(2))


def is_in_sample(case: Case) -> bool:
    """Tells whether a case is in the sample: of a format in a family one kind of scale, which takes turns; all of those
    of prefill_mma, where zeros, rows and activations would not meet otherwise."""
    shift = case.number // 2 + case.number // 4
    return case.family == "prefill_mma" or case.place == shift % case.places


EVERY = list(cases())
SAMPLE = list(filter(is_in_sample, EVERY))


def most_spilled(kernel: KernelRequest) -> int:
    """Bytes of a thread that may be spilled. With wgmma hardly any, with two exceptions: products of integers that are
    added to sums in f32 group by group, of which the assembler begins more than it has registers for, in small tiles,
    too; and folded weights for which no tile has enough registers, since no other kernel multiplies these. With
    mma.sync a few, which cost nothing (docs/lab-notebook/persistent-blocks.md, "Without wgmma"). The numbers are a
    record."""
    spec, mma = kernel.spec, not kernel.target.has_wgmma
    if spec.folds and isinstance(kernel.schedule, EightBitPrefillSchedule) and spills(spec, kernel.schedule):
        return 256
    if spec.compute and mma and spec.group_size in (32, 64):
        return 192
    if spec.compute == "i8" and spec.group_size:
        return 160
    return 48 if mma else 12


def listed(case: Case) -> Any:
    """A case as a parameter."""
    return pytest.param(case, id=str(case), marks=[] if id(case) in _IN_CI else [pytest.mark.slow])


def features(case: Case) -> Iterator[Hashable]:
    """Yields what is to meet in some case of a family, two by two."""
    spec = case.spec
    scales = {"scale": SCALES.index(kind(spec)), "zeros": spec.zeros, "group": spec.group_size}
    others = {"act": spec.act, "rows": spec.n, "outliers": spec.outliers, "8 bits": (spec.compute, spec.fold_scales)}
    tile = {"weight": spec.weight, "tokens": case.kernel.schedule.tokens, "target": case.target}
    return ((case.family, *pair) for pair in combinations((scales | others | tile).items(), 2))


def kind(spec: MatmulSpec) -> dict[str, Any]:
    """The kind of scale of a spec."""
    return next(scales for scales in SCALES if all(getattr(spec, name) == value for name, value in scales.items()))


IN_CI = telling(SAMPLE, features, most=92)
_IN_CI = set(map(id, IN_CI))


@pytest.mark.parametrize("case", [listed(case) for case in EVERY])
def test_no_spills_and_products_overlap(case: Case) -> None:
    made = case.kernel
    kernel = compile_kernel(made)
    used = resource_usage(kernel.ptx, case.target)
    assert not used.serialized, made
    assert max(used.spill_stores, used.spill_loads) <= most_spilled(made), (made, used)
    assert used.registers * kernel.launch.threads <= case.target.registers_per_sm, made
    assert kernel.launch.shared_bytes + used.shared <= case.target.max_shared_per_block, made


def test_ci_has_every_family_with_most_values() -> None:
    for family in {case.family for case in SAMPLE}:
        every, found = (
            set(chain(*(pair[1:] for case in cases if case.family == family for pair in features(case))))
            for cases in (SAMPLE, IN_CI)
        )
        assert len(found) > 2 / 3 * len(every), family


def test_the_sample_covers_formats_and_scales() -> None:
    every = {"matmul": (set(FORMATS), SCALES), "quantized_matmul": (set(FORMATS), NUMBERS)}
    of_prompts = [family for family in FAMILIES.values() if family.takes_any_tokens and family.operation in every]
    for family in (f for f in of_prompts if not f.name.endswith("in_order")):  # these: test_prefill_in_order
        formats, scales = every[family.operation]
        specs = [case.spec for case in SAMPLE if case.family == family.name]
        assert {spec.weight for spec in specs} == formats
        assert all(any(kind(spec) == each for spec in specs) for each in scales)
        pairs = {(spec.zeros, spec.act, spec.n) for spec in specs}
        assert len(pairs) == len({spec.zeros for spec in specs}) * 4


def test_the_sample_covers_schedules() -> None:
    """Every number of tokens that a tile of some matmul has. The largest with mma.sync have tests of their own."""
    for family in (family for family in FAMILIES.values() if family.takes_any_tokens):
        cases = [case for case in SAMPLE if case.family == family.name]
        allowed = {s.tokens for case in cases for s in candidates(case.family, case.spec, case.target)}
        seen = {case.kernel.schedule.tokens for case in cases}
        assert allowed - seen <= ({256} if family.name.endswith("mma") else set())
