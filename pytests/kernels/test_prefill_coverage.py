"""The prefill kernel takes every weight: formats by zeros, scales, second levels and outliers, in small sizes in the
emulator with its race check; and what shows that each of these matters to the result."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from itertools import combinations, product
from typing import Any

import pytest
import torch
from emulated import HOPPER, Inputs, is_right, matmul_is_right, run_matmul
from sweeps import swept

import lowbit
from lowbit.dialect.bilevel import Bilevel
from lowbit.dialect.errors import EmulatorError
from lowbit.dialect.formats.dtypes import all_names
from lowbit.dialect.presets import preset_fields
from lowbit.dialect.spec import MatmulSpec, Scale, Zeros
from lowbit.dialect.weight import TensorSlot
from lowbit.passes.builder import Program, Scalar, Tile
from lowbit.passes.kernels.persistent.engine import WGMMA
from lowbit.passes.kernels.persistent.outliers import Outliers
from lowbit.passes.kernels.persistent.panels import BoxPanels
from lowbit.passes.kernels.persistent.plan import PersistentPlan
from lowbit.passes.kernels.persistent.scaling import Scaled
from lowbit.passes.kernels.persistent.schedule import PrefillSchedule
from lowbit.passes.kernels.persistent.tile_order import Turn
from lowbit.passes.kernels.persistent.wgmma import WgmmaMultiplier
from lowbit.passes.kernels.prefill.family import Prefill
from lowbit.passes.kernels.registry import request
from lowbit.passes.kernels.scales.conversion import ScaleConversion
from lowbit.passes.pipeline import CompiledKernel, compile_kernel
from lowbit.pylib.reference import matmul, random_inputs

PREFILL = Prefill()
SMALL, PAIR = PrefillSchedule(16), PrefillSchedule(16, cluster=2)

SCALES: tuple[dict[str, Any], ...] = (
    {"scale": "f16"},
    {"scale": "f32"},
    {"scale": "bf16"},
    {"scale": "e8m0"},
    {"scale": "e4m3", "row_scales": True},
    {"scale": "u6", "bilevel": Bilevel(groups=4)},
    {"scale": "u3", "bilevel": Bilevel(rows=16, groups=1, zeros=True)},
    {"scale": "i8", "bilevel": Bilevel(groups=2, scale="f32"), "row_scales": True},
)
NESTED = preset_fields("nf4_nested", 512)
ZEROS = ("none", "int", "float", "offset")
GROUPS = (64, 16, 128, None)


def compiled(spec: MatmulSpec, schedule: PrefillSchedule) -> CompiledKernel:
    return compile_kernel(request(spec, HOPPER, schedule))


def result(spec: MatmulSpec, schedule: PrefillSchedule, inputs: Inputs) -> torch.Tensor:
    return run_matmul(compiled(spec, schedule), spec, inputs, racecheck=True)


def spec_of(weight: str, zeros: str, scales: dict[str, Any], **others: Any) -> MatmulSpec:
    """A spec of two rounds, or the nearest one that there is: integer zeros are for integers."""
    integers = weight[0] in "ui"
    fields = {"zeros": zeros if integers or zeros != "int" else "float", **scales, **others}
    if fields.get("bilevel") and fields.get("group_size") is None:
        fields["group_size"] = 32
    return MatmulSpec(24, 512, weight, **fields)


def varied(i: int, weight: str) -> MatmulSpec:
    """The i-th spec: choices of different periods, so that every two of them meet."""
    others = {"group_size": GROUPS[i // 3 % 4], "act": ("f16", "bf16")[i % 2], "outliers": i % 3 == 0}
    return spec_of(weight, ZEROS[i % 4], SCALES[i % 7 + i // 28], bias=i % 5 == 0, **others)


def meets(row: tuple[MatmulSpec]) -> Iterator[Hashable]:
    """Yields every kind of element, scale and zeros, groups, outliers and the type of x, two by two."""
    (spec,) = row
    weight = ("kind", "u" if spec.dtype.kind == "int" else spec.weight[0], spec.dtype.bits > 4)
    scale = ("scale", spec.scale, spec.bilevel)
    others = [(name, getattr(spec, name)) for name in ("zeros", "group_size", "outliers", "act")]
    yield from combinations((weight, scale, *others), 2)


@pytest.mark.parametrize("spec", swept([(varied(i, weight),) for i, weight in enumerate(all_names())], meets), ids=str)
def test_every_format(spec: MatmulSpec) -> None:
    assert is_right(spec, SMALL, 9)


@pytest.mark.parametrize("weight", ["u4", "u8", "f6e3m2"])
@pytest.mark.parametrize("scale", ["f16", "f32"])
def test_scales_of_more_bits_than_bf16(weight: str, scale: Scale) -> None:
    """Rows of one 1 show the weights as they are multiplied: hardly further from s * q than bf16 rounds."""
    zeros: Zeros = "int" if weight[0] == "u" else "none"
    spec = MatmulSpec(40, 512, weight, 128, zeros, scale, act="bf16", out="f32")
    assert PersistentPlan(spec, SMALL, WGMMA).scaling.scaled is Scaled.WEIGHTS_IN_TWO
    _, tensors = random_inputs(spec, 16)
    x = torch.eye(16, spec.k).bfloat16()
    expected = torch.from_numpy(matmul(spec, x, **tensors))
    distance = (result(spec, SMALL, (x, tensors)).double() - expected).abs()
    assert (distance <= 1.03 * 2**-8 * expected.abs()).all()


@pytest.mark.slow
@pytest.mark.parametrize("weight", all_names())
def test_every_format_zeros_and_scale(weight: str) -> None:
    for zeros, scales, sparse in product(ZEROS, SCALES, (False, True)):
        spec = spec_of(weight, zeros, scales, group_size=32, outliers=sparse)
        assert is_right(spec, SMALL, 9), spec


SIZES: list[tuple[dict[str, Any], PrefillSchedule, int]] = [
    # Groups that no round divides, and weights of less columns than two rounds.
    ({"n": 40, "k": 3520, "weight": "u4", "group_size": 704}, SMALL, 20),
    ({"n": 40, "k": 128, "weight": "u4", "group_size": 32, "zeros": "offset"}, SMALL, 20),
    ({"n": 20, "k": 16, "weight": "u8"}, SMALL, 5),
    # Second levels of part of a row block's numbers, staged in shared memory, which end inside of a round.
    ({"n": 200, "k": 800, "weight": "u3", "group_size": 16, "zeros": "float", "scale": "u3",
      "bilevel": Bilevel(16, 1, "f16", True), "outliers": True}, PAIR, 40),
    ({"n": 40, "k": 768, "weight": "u2", "group_size": 16, "zeros": "offset", "scale": "u4",
      "bilevel": Bilevel(groups=16)}, PrefillSchedule(32), 50),
    # Scales that are places in a table, from shared memory and from registers.
    ({"n": 40, "k": 512, **NESTED, "group_size": 16}, PrefillSchedule(32), 40),
    ({"n": 200, "k": 512, **NESTED}, PAIR, 9),
    # Second levels that a warp shares, in two accesses and in one, without zeros and with offsets.
    ({"n": 40, "k": 512, "weight": "u3", "group_size": 16, "scale": "u3", "bilevel": Bilevel(16, 1, "f16", True),
      "outliers": True}, PrefillSchedule(16, 128, 4), 20),
    ({"n": 40, "k": 512, "weight": "nf4", "group_size": 32, "zeros": "offset", "scale": "u4",
      "bilevel": Bilevel(16, 1)}, PrefillSchedule(16, 128, 4), 20),
    # Wide panels with outliers, in a tile after the other.
    ({"n": 600, "k": 512, "weight": "u4", "group_size": 64, "outliers": True}, PrefillSchedule(16, 128, 4), 40),
]  # fmt: skip


@pytest.mark.parametrize(("choices", "schedule", "m"), SIZES, ids=str)
def test_sizes(choices: dict[str, Any], schedule: PrefillSchedule, m: int) -> None:
    assert is_right(MatmulSpec(**choices), schedule, m)


@pytest.mark.parametrize("weight", ["u4", "i3", "f6e3m2", "nf4"])
def test_clusters_with_outliers(weight: str) -> None:
    """A format of each kind. Blocks of a cluster copy x to one another, each with outliers of its own rows."""
    assert is_right(MatmulSpec(150, 512, weight, 64, outliers=True), PAIR, 20)


def sparse(n: int, k: int, places: dict[tuple[int, int], float]) -> torch.Tensor:
    dense = torch.zeros(n, k)
    for (row, column), value in places.items():
        dense[row, column] = value
    return dense.to_sparse_csr()


@pytest.mark.parametrize(
    "places",
    [
        {},
        {(0, 0): 3.0, (39, 4999): -2.0},
        {(17, column): 1.5 for column in range(5000)},
        {(row, 4096 + row): 0.5 for row in range(40)} | {(3, 64): 7.0},
    ],
    ids=["none", "first and last", "a full row", "beyond the span of a line"],
)
def test_any_matrix_of_outliers(places: dict[tuple[int, int], float]) -> None:
    """Row blocks without outliers, panels without, and panels with several lines."""
    spec = MatmulSpec(40, 5000, "u4", outliers=True, out="f32")
    x, tensors = random_inputs(spec, 9)
    inputs = x, tensors | {"outliers": sparse(40, 5000, places)}
    assert matmul_is_right(result(spec, SMALL, inputs), spec, inputs, **PREFILL.rounding(spec, SMALL))


def test_any_number_of_tokens_is_one_launch() -> None:
    """One launch for any number, of any weight whose x is in 16-byte pieces; that of the prefill kernel for many, until
    weights that take long to scale are written out."""
    for spec in (MatmulSpec.preset(name, 512, 1024) for name in ("spqr", "q4_k", "q6_k", "nvfp4", "mxfp4")):
        mm = lowbit.compile(spec, "sm_90a")
        assert [mm.choices.launches(m)[0].family for m in (500, 1536)] == ["prefill"] * 2
        assert all(len(mm.choices.launches(m)) == 1 for m in (1, 65, 129, 4096))


def test_sums_are_waited_for_before_anything_is_loaded() -> None:
    """With loads between the last product and the wait for it, nvJitLink 13.0 and 13.5 read sums before the wait."""
    spec = MatmulSpec(512, 1024, "u3", 16, outliers=True)
    ptx = compiled(spec, PrefillSchedule(128, 64)).ptx
    before = ptx[: ptx.index("wgmma.wait_group.sync.aligned 0;")].splitlines()
    since_branch = before[max(i for i, line in enumerate(before) if line.endswith(":")) :]
    assert not any(" ld." in line or "\tld." in line for line in since_branch)


# -- what must not be left out

SPARSE = MatmulSpec(40, 512, "u4", 64, outliers=True, out="f32")
SHARED = MatmulSpec(
    40, 512, "u3", 16, zeros="float", scale="u3", bilevel=Bilevel(16, 1, "f16", True), out="f32"
)
CODED = MatmulSpec(40, 512, "u4", 32, zeros="offset", scale="u6", bilevel=Bilevel(groups=8), out="f32")


def mutated(spec: MatmulSpec) -> bool:
    inputs = random_inputs(spec, 9)
    y = run_matmul(compiled(spec, SMALL), spec, inputs)
    return matmul_is_right(y, spec, inputs, **PREFILL.rounding(spec, SMALL))


def test_outliers_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Program, "scatter_outliers", lambda self, table, buffer, column, cursor: cursor)
    assert not mutated(SPARSE)


def test_outliers_of_the_panel_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Outliers, "erase", lambda self, cursor: None)
    assert not mutated(SPARSE)


def test_second_level_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def first_level(self: ScaleConversion, slot: TensorSlot, tile: Tile, of_block: Any) -> Tile:
        return self.as_f32(tile, slot.storage)

    monkeypatch.setattr(ScaleConversion, "two_level", first_level)
    assert not mutated(CODED)


def test_second_level_of_the_next_block() -> None:
    inputs = random_inputs(CODED, 9)
    x, tensors = inputs
    shifted = tensors | {"scale_scales": tensors["scale_scales"].roll(1, dims=1)}
    y = run_matmul(compiled(CODED, SMALL), CODED, (x, shifted))
    assert not matmul_is_right(y, CODED, inputs, **PREFILL.rounding(CODED, SMALL))


def test_scales_as_two_numbers() -> None:
    """Of scales that f16 has few bits of, as of others, weights lose no more than by being rounded."""
    assert PersistentPlan(SHARED, SMALL, WGMMA).scaling.panel_numbers
    x, tensors = random_inputs(SHARED, 9)
    for factor in (1.0, 2.0**-6, 2.0**-9):
        inputs = x, tensors | {"scale_scales": tensors["scale_scales"] * factor}
        y = run_matmul(compiled(SHARED, SMALL), SHARED, inputs)
        assert matmul_is_right(y, SHARED, inputs, **PREFILL.rounding(SHARED, SMALL)), factor


def test_numbers_of_the_panel_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WgmmaMultiplier, "_prepare_next_scales", lambda self, of_panel, panel, number: None)
    assert not mutated(SHARED)


def test_races_across_a_cluster_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A warp that gives a stage back before its products have read it lets the other block copy into them."""

    def too_early(self: BoxPanels, turn: Turn, index: Scalar, panel: int) -> None:
        self.p.arrive(self.empty, self.stage_of(turn, index, panel), self.schedule.cluster)

    monkeypatch.setattr(BoxPanels, "release_before", too_early)
    with pytest.raises(EmulatorError):
        result(SPARSE, PAIR, random_inputs(SPARSE, 40))


def test_races_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the barriers of a warp, a lane would read outliers, or scales, that another has not written yet."""
    assert PersistentPlan(CODED, SMALL, WGMMA).tensors.staged
    barrier = Program.barrier
    monkeypatch.setattr(
        Program, "barrier", lambda self, scope="block", *rest, **others: scope == "warps" or barrier(self, scope)
    )
    for spec in (SPARSE, CODED, SHARED):
        with pytest.raises(EmulatorError, match=r"race|without a barrier"):
            result(spec, SMALL, random_inputs(spec, 9))
