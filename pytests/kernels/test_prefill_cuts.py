"""Tiles of a last wave that are cut into slices (`PrefillSchedule.last_tokens`), in both families of persistent blocks:
numbers in the emulator, with its race check; which sizes it is for; and what it takes of a multiprocessor.

The emulated GPU has four multiprocessors.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import test_eight_bit_prefill as eight_bit
from emulated import HOPPER, is_right

from lowbit.dialect.bilevel import Bilevel
from lowbit.dialect.errors import EmulatorError, SpecError
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.codegen.cubin import resource_usage
from lowbit.passes.kernels.eight_bit_prefill.family import EightBitPrefill
from lowbit.passes.kernels.eight_bit_prefill.schedule import EightBitPrefillSchedule
from lowbit.passes.kernels.persistent.cost_model import margin
from lowbit.passes.kernels.persistent.engine import WGMMA
from lowbit.passes.kernels.persistent.panels import BoxPanels
from lowbit.passes.kernels.persistent.plan import PersistentPlan
from lowbit.passes.kernels.persistent.schedule import PrefillSchedule
from lowbit.passes.kernels.persistent.tile_order import TileOrder
from lowbit.passes.kernels.prefill.family import Prefill
from lowbit.passes.kernels.registry import family_of, request, schedule_from_dict, schedule_to_dict
from lowbit.passes.pipeline import compile_kernel
from lowbit.passes.scheduling.choice import default_schedule
from lowbit.pylib.emulator.launch import SM_COUNT
from lowbit.pylib.runtime.activation_maps import BoxedFunction
from lowbit.pylib.runtime.tensor_map import TensorMap

PREFILL, EIGHT_BIT = Prefill(), EightBitPrefill()
CUT = PrefillSchedule(32, last_tokens=16)


def waves(spec: MatmulSpec, schedule: PrefillSchedule, m: int, blocks: int = SM_COUNT) -> tuple[int, int]:
    """Full waves, and the tokens of the tiles or slices of one that is not full."""
    found = PersistentPlan(spec, schedule, WGMMA).tiles.waves(m, blocks // schedule.cluster)
    return found.full, found.last.tokens if found.busy else 0


# -- numbers

CODED: dict[str, Any] = {"zeros": "offset", "scale": "u6", "bilevel": Bilevel()}
CASES: list[tuple[dict[str, Any], PrefillSchedule, int, tuple[int, int]]] = [
    # Whole waves and then slices; rows and tokens that end inside of tiles and slices, and slices without a token.
    ({"weight": "u4", "n": 300, "k": 264, "group_size": None}, CUT, 60, (1, 16)),
    ({"weight": "u4", "n": 640, "k": 512, "group_size": 128, "zeros": "int", "bias": True}, CUT, 33, (2, 16)),
    ({"weight": "nf4", "n": 600, "k": 512, "group_size": 64, "zeros": "float"}, PrefillSchedule(64, last_tokens=16), 50, (1, 16)),  # noqa: E501
    ({"weight": "f6e3m2", "n": 516, "k": 520, "group_size": None, "out": "f32"}, PrefillSchedule(96, 128, last_tokens=48), 70, (1, 48)),  # noqa: E501
    ({"weight": "u3", "n": 600, "k": 512, "group_size": 16, "zeros": "float", "outliers": True}, CUT, 32, (1, 16)),
    ({"weight": "u4", "n": 520, "k": 512, "group_size": 32, **CODED}, PrefillSchedule(32, 64, 8, last_tokens=16), 20, (1, 16)),  # noqa: E501
    # No slices, since nothing comes before them, there would be too many, or nothing is left over.
    ({"weight": "i4", "n": 128, "k": 512, "group_size": 128, "act": "bf16"}, PrefillSchedule(64, last_tokens=16), 40, (0, 64)),  # noqa: E501
    ({"weight": "u4", "n": 300, "k": 264, "group_size": None}, CUT, 30, (0, 32)),
    ({"weight": "u4", "n": 300, "k": 264, "group_size": None}, CUT, 120, (3, 0)),
    # Clusters, of which one block may be beyond the last row.
    ({"weight": "u4", "n": 600, "k": 512, "group_size": 128}, PrefillSchedule(32, cluster=2, last_tokens=16), 30, (1, 16)),  # noqa: E501
    ({"weight": "u8", "n": 400, "k": 512, "group_size": None}, PrefillSchedule(64, cluster=2, last_tokens=32), 120, (2, 0)),  # noqa: E501
    ({"weight": "i5", "n": 200, "k": 1024, "group_size": 64}, PrefillSchedule(32, cluster=2, last_tokens=16), 70, (1, 16)),  # noqa: E501
    # Five rounds of half the stages: tiles and slices begin in either half.
    ({"weight": "u4", "n": 300, "k": 1280, "group_size": 128, "zeros": "int"}, PrefillSchedule(32, 128, last_tokens=16), 60, (1, 16)),  # noqa: E501
    ({"weight": "u3", "n": 200, "k": 1280, "group_size": 16, "zeros": "float", "outliers": True}, PrefillSchedule(32, 128, cluster=2, last_tokens=16), 70, (1, 16)),  # noqa: E501
]  # fmt: skip


@pytest.mark.parametrize(("choices", "schedule", "m", "expected"), CASES, ids=str)
def test_numbers(choices: dict[str, Any], schedule: PrefillSchedule, m: int, expected: tuple[int, int]) -> None:
    spec = MatmulSpec(**choices)
    assert waves(spec, schedule, m) == expected
    assert is_right(spec, schedule, m)


FP8, I8 = {"compute": "f8e4m3"}, {"compute": "i8"}
BYTES: list[tuple[dict[str, Any], EightBitPrefillSchedule, int, tuple[int, int]]] = [
    ({"weight": "u4", "n": 300, "k": 544, **I8}, EightBitPrefillSchedule(32, last_tokens=16), 60, (1, 16)),
    ({"weight": "u4", "n": 520, "k": 1024, "group_size": 128, "zeros": "int", **FP8}, EightBitPrefillSchedule(64, parts=2, last_tokens=16), 50, (1, 16)),  # noqa: E501
    ({"weight": "i3", "n": 600, "k": 1024, "group_size": 64, **I8}, EightBitPrefillSchedule(32, banks=2, last_tokens=16), 20, (1, 16)),  # noqa: E501
    ({"weight": "f4e2m1", "n": 600, "k": 1088, "group_size": 32, **FP8}, EightBitPrefillSchedule(64, parts=2, cluster=2, last_tokens=32), 60, (1, 32)),  # noqa: E501
    ({"weight": "f8e4m3", "n": 128, "k": 1024, **FP8}, EightBitPrefillSchedule(32, 256, last_tokens=16), 40, (0, 32)),
    ({"weight": "u4", "n": 300, "k": 1280, "group_size": 128, "zeros": "int", **FP8}, EightBitPrefillSchedule(32, 128, last_tokens=16), 60, (1, 16)),  # noqa: E501
    ({"weight": "i4", "n": 300, "k": 768, "group_size": 64, **I8}, EightBitPrefillSchedule(32, 128, 6, last_tokens=16), 60, (1, 16)),  # noqa: E501
]  # fmt: skip


@pytest.mark.parametrize(("choices", "schedule", "m", "expected"), BYTES, ids=str)
def test_numbers_of_8_bits(
    choices: dict[str, Any], schedule: EightBitPrefillSchedule, m: int, expected: tuple[int, int]
) -> None:
    spec = MatmulSpec(**choices, out="f32")
    assert waves(spec, schedule, m) == expected
    assert eight_bit.is_exact(spec, schedule, m)


SMALL = MatmulSpec(300, 512, "u4", group_size=128)


def test_slices_begin_at_tokens_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_token(order: TileOrder) -> None:
        cut(order)
        order.slice_token = order.slice_token % 1

    cut = TileOrder._cut  # pyright: ignore[reportPrivateUsage]
    assert is_right(SMALL, CUT, 60)
    monkeypatch.setattr(TileOrder, "_cut", without_token)
    with pytest.raises(EmulatorError, match=r"race: writes byte .* of `y` that block"):
        is_right(SMALL, CUT, 60)


def test_slices_wait_for_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first panels of a slice are copied to stages that warps may still read."""
    monkeypatch.setattr(BoxPanels, "_await_free_stages", lambda self, turn: None)
    with pytest.raises(EmulatorError):
        is_right(SMALL, CUT, 60)


# -- what it is for


def chosen(n: int, k: int, m: int, **choices: Any) -> Any:
    return default_schedule(MatmulSpec(n, k, "u4", group_size=128, **choices), m, HOPPER)


@pytest.mark.parametrize("m", [160, 256, 512])
@pytest.mark.parametrize("choices", [{}, FP8], ids=str)
def test_rows_just_above_two_waves_are_cut(m: int, choices: dict[str, Any]) -> None:
    """272 tiles of 128 rows on 132 multiprocessors: slices are predicted to gain five percent. Shared rounds gain about
    as much."""
    best, spec = chosen(34816, 5120, m, **choices), MatmulSpec(34816, 5120, "u4", 128, **choices)
    assert best.last_tokens or best.streams
    family = family_of(best)
    found = [s for s in family.candidates(spec, m, HOPPER) if not s.streams]
    time = {s: family.predict(spec, m, s, HOPPER) / margin(s, HOPPER.costs.prefill) for s in found}
    whole = min(time[s] for s in found if not s.last_tokens)
    assert min(time[s] for s in found if s.last_tokens) < 0.953 * whole


@pytest.mark.parametrize("choices", [{}, FP8], ids=str)
@pytest.mark.parametrize(
    ("n", "k", "m"), [(8192, 8192, 256), (4096, 4096, 512), (8192, 8192, 1024), (34816, 5120, 4096), (28672, 4096, 256)]
)
def test_others_are_not(n: int, k: int, m: int, choices: dict[str, Any]) -> None:
    """Tiles that fill waves, or so many waves that the last one hardly counts."""
    assert not chosen(n, k, m, **choices).last_tokens


@pytest.mark.parametrize(
    ("schedule", "m", "expected"),
    [
        (PrefillSchedule(128), 128, (2, 128)),
        (PrefillSchedule(128, last_tokens=16), 128, (2, 16)),
        (PrefillSchedule(256, last_tokens=32), 512, (4, 32)),
        (PrefillSchedule(256, last_tokens=16), 512, (4, 256)),  # 256 slices
        (PrefillSchedule(256, last_tokens=16, cluster=2), 256, (2, 16)),
        (PrefillSchedule(256, last_tokens=64), 33 * 256, (68, 0)),  # nothing left over
    ],
    ids=str,
)
def test_waves(schedule: PrefillSchedule, m: int, expected: tuple[int, int]) -> None:
    assert waves(MatmulSpec(34816, 5120, "u4", 128), schedule, m, HOPPER.multiprocessors) == expected


def test_the_tuner_tries_the_smallest_slices_that_fit() -> None:
    spec = MatmulSpec(34816, 5120, "u4", 128)
    for m, last in ((256, 16), (512, 32), (1024, 64)):
        tried = [s for s in PREFILL.search_space(spec, m, HOPPER) if s.last_tokens]
        assert {s.last_tokens for s in tried if (s.tokens, s.cluster) == (256, 1)} == {last}


def test_saved_schedules_have_it() -> None:
    schedule = PrefillSchedule(128, 128, cluster=2, last_tokens=16)
    assert schedule_from_dict(schedule_to_dict(schedule)) == schedule
    assert schedule_from_dict({"family": "prefill", "tokens": 128}) == PrefillSchedule(128)


@pytest.mark.parametrize(
    ("make", "choices", "message"),
    [
        (PrefillSchedule, {"tokens": 128, "last_tokens": 24}, "last_tokens=24 must be one of 0, 16, 32, 48"),
        (PrefillSchedule, {"tokens": 128, "last_tokens": 48}, "last_tokens=48 must be one of 0, 16, 32, 64 for tokens"),
        (EightBitPrefillSchedule, {"tokens": 128, "parts": 4, "last_tokens": 64}, "one of 0, 16, 32 for tokens=128 in"),
        (PrefillSchedule, {"tokens": 128, "split_k": 2, "last_tokens": 64}, "one of 0 for tokens=128 and split_k=2"),
    ],
)
def test_a_wrong_size_names_the_field(make: Any, choices: dict[str, int], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        make(**choices)


def test_a_call_makes_a_map_for_each_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of x come the maps of tiles and of slices."""
    calls: list[Any] = []
    monkeypatch.setattr(TensorMap, "encode", lambda map: (map.shape, map.box))
    boxes = PREFILL.x_boxes(SMALL, PrefillSchedule(128, cluster=2, last_tokens=16))
    function: Any = lambda *arguments: calls.append(arguments)  # noqa: E731
    BoxedFunction(function, SMALL, boxes, ("x", "y", "m", "codes"))(7, True, 4096, 8192, 100, 12288)
    of_tile, of_slice = ((100, 512), (64, 64)), ((100, 512), (8, 64))
    assert calls == [(7, True, of_tile, of_slice, 8192, 100, 12288)]


# -- resources

VARIANTS: list[dict[str, Any]] = [
    {},
    {"act": "bf16", "scale": "bf16", "zeros": "float"},
    {"group_size": 32, **CODED},
    FP8,
    {**FP8, "group_size": None},
    {**I8, "group_size": None},
]


@pytest.mark.parametrize("choices", VARIANTS, ids=str)
@pytest.mark.parametrize("m", [256, 512])
def test_no_spills(choices: dict[str, Any], m: int) -> None:
    """Of what the rule takes, which needs no more shared memory than kernels that cut nothing."""
    choices = {"group_size": 128} | choices
    spec = MatmulSpec(34816, 5120, "u4", **choices)
    best = default_schedule(spec, m, HOPPER)
    assert isinstance(best, PrefillSchedule) and best.last_tokens
    kernel = compile_kernel(request(spec, HOPPER, best))
    used = resource_usage(kernel.ptx, HOPPER)
    assert (used.spill_stores, used.spill_loads, used.stack, used.serialized) == (0, 0, 0, False), best
    if best.last_split_k == 1:
        whole = compile_kernel(request(spec, HOPPER, replace(best, last_tokens=0)))
        assert kernel.launch.shared_bytes == whole.launch.shared_bytes
