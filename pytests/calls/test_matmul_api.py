"""Calling a `Matmul`: numbers, shapes, strides, dtypes and threads, the same on every target."""

from __future__ import annotations

import copy
import pickle
import re
import threading
from dataclasses import replace
from itertools import product

import pytest
import torch
from sweeps import swept

import lowbit
from lowbit.passes.target import Target
from lowbit.passes.targets import GPUS
from lowbit.pylib.reference import agrees, matmul, random_problem, tolerance
from lowbit.pylib.tune.trial import rounding
from lowbit.pylib.weights.packed import pack

# Targets that run on any machine.
TARGETS = ["cpu", "emulator:sm_90a", "emulator:sm_80"]

SPEC = lowbit.MatmulSpec(n=48, k=256, weight="u4", group_size=64, zeros="int")
SPECS = [
    SPEC,
    lowbit.MatmulSpec(n=40, k=256, weight="i3", bias=True, out="f32"),
    lowbit.MatmulSpec(n=32, k=192, weight="f6e3m2", group_size=32, scale="e8m0", act="bf16", out="f16"),
    lowbit.MatmulSpec(n=17, k=128, weight="nf4", group_size=64, zeros="float", bias=True),
]

TORCH = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize(
    ("spec", "target", "m"), swept(product(SPECS, TARGETS, [1, 3, 8, 9, 33, 64, 70, 200])), ids=str
)
def test_numbers(spec: lowbit.MatmulSpec, target: str, m: int) -> None:
    x, *weight = random_problem(spec, m, seed=m)
    mm = lowbit.compile(spec, target)
    y = mm(x, mm.pack(*weight))
    assert y.shape == (m, spec.n) and y.dtype == TORCH[spec.out_dtype] and y.is_contiguous()
    expected = matmul(spec, x, *weight)
    bound = tolerance(spec, x, *weight, **rounding(mm, m))
    assert agrees(y, expected, bound).all()


@pytest.mark.parametrize("gpu", GPUS, ids=str)
def test_numbers_on_every_gpu(gpu: Target) -> None:
    """In the emulator: the kernels that the rule chooses for each architecture."""
    spec = lowbit.MatmulSpec(n=40, k=1024, weight="u2", group_size=128, zeros="int")
    mm = lowbit.compile(spec, f"emulator:{gpu}")
    for m in (1, 20):
        x, *weight = random_problem(spec, m, seed=m)
        bound = tolerance(spec, x, *weight, **rounding(mm, m))
        assert agrees(mm(x, mm.pack(*weight)), matmul(spec, x, *weight), bound).all()


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_dequantize_gives_the_weight(spec: lowbit.MatmulSpec, target: str) -> None:
    """Multiplied by unit vectors, the weight comes out column by column."""
    _, codes, scales, zeros, bias = random_problem(spec, 1)
    mm = lowbit.compile(spec, target)
    w = mm.dequantize(mm.pack(codes, scales, zeros, bias))
    assert w.shape == (spec.n, spec.k) and w.dtype == TORCH[spec.act]
    unit = torch.eye(spec.k).to(TORCH[spec.act])
    bound = tolerance(spec, unit, codes, scales, zeros, dequantized=True)
    assert agrees(w.T, matmul(spec, unit, codes, scales, zeros), bound).all()


@pytest.mark.parametrize("shape", [(256,), (0, 256), (3, 0, 256), (1, 256), (2, 3, 256), (2, 1, 3, 256)])
def test_leading_dimensions(target: str, shape: tuple[int, ...]) -> None:
    x, *weight = random_problem(SPEC, 6)
    mm = lowbit.compile(SPEC, target)
    w = mm.pack(*weight)
    x = x[: max(1, torch.Size(shape[:-1]).numel())].reshape(-1)[: torch.Size(shape).numel()].view(shape)
    y = mm(x, w)
    assert y.shape == (*shape[:-1], SPEC.n)
    rows = [mm(row, w) for row in x.reshape(-1, SPEC.k)]
    assert torch.equal(y.view(-1, SPEC.n), torch.stack(rows) if rows else y.view(0, SPEC.n))


def test_strides_and_alignment(target: str) -> None:
    """x is read as it lies: transposed, every other row or column, repeated, off by two bytes."""
    x, *weight = random_problem(SPEC, 4)
    mm = lowbit.compile(SPEC, target)
    w = mm.pack(*weight)
    expected = mm(x, w)
    shifted = torch.cat([x.new_zeros(1), x.view(-1)])[1:].view(4, SPEC.k)
    assert shifted.data_ptr() % 16 != 0
    wide = torch.stack([x, -x], dim=2)[..., 0]
    for same in (x.T.contiguous().T, torch.stack([x, -x], dim=1)[:, 0], wide, shifted):
        assert torch.equal(mm(same, w), expected)
    assert torch.equal(mm(x[:1].expand(4, -1), w), expected[:1].expand(4, -1))


def test_x_is_left_alone_and_results_are_fresh(target: str) -> None:
    x, *weight = random_problem(SPEC, 2)
    mm = lowbit.compile(SPEC, target)
    w = mm.pack(*weight)
    before = x.clone()
    first, second = mm(x, w), mm(x, w)
    assert torch.equal(x, before) and torch.equal(first, second)
    assert first.data_ptr() != second.data_ptr()


def test_equal_specs_are_one_object(target: str) -> None:
    """So a call knows by identity that a weight fits, wherever the weight comes from."""
    x, *weight = random_problem(SPEC, 2)
    mm = lowbit.compile(SPEC, target)
    w = mm.pack(*weight)
    loaded = lowbit.PackedWeight.from_state_dict(w.state_dict())
    loaded_for = lowbit.PackedWeight.from_state_dict(w.state_dict(), replace(SPEC))
    for other in (w, loaded, loaded_for, pack(replace(SPEC), *weight), copy.deepcopy(w), pickle.loads(pickle.dumps(w))):
        assert other.readable_spec is mm.spec
        assert torch.equal(mm(x, other), mm(x, w))
    unequal = lowbit.PackedWeight(replace(SPEC), w)  # an object of its own is no less a spec
    assert unequal.spec is not mm.spec and torch.equal(mm(x, unequal), mm(x, w))


def test_threads(target: str) -> None:
    """Calls from several threads at once do not disturb each other."""
    mm = lowbit.compile(SPEC, target)
    x, *weight = random_problem(SPEC, 4)
    w = mm.pack(*weight)
    scaled = [x * 2.0**-i for i in range(4)]
    expected = [mm(each, w) for each in scaled]
    wrong: list[int] = []

    def work(i: int) -> None:
        wrong.extend(i for _ in range(3) if not torch.equal(mm(scaled[i], w), expected[i]))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_model_can_be_copied_and_saved(target: str) -> None:
    x, *weight = random_problem(SPEC, 3)
    mm = lowbit.compile(SPEC, target)
    model = {"mm": mm, "w": mm.pack(*weight)}
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other["mm"] is mm and other["w"] is not model["w"]
        assert torch.equal(other["mm"](x, other["w"]), mm(x, model["w"]))


def test_ir_of_the_cpu() -> None:
    mm = lowbit.compile(SPEC, "cpu")
    assert mm.schedule is None
    assert "llvm.func" in mm.ir("llvm") and "define" in mm.ir("ll") and "ret" in mm.ir("asm")


@pytest.mark.parametrize("spec", [SPEC, replace(SPEC, weight="i3", out="f32", bias=True)], ids=str)
def test_every_target_starts_from_one_program(spec: lowbit.MatmulSpec) -> None:
    """One lowbit.matmul on tensors, on which a GPU has chosen a schedule."""
    text = lowbit.compile(spec, "cpu").ir("lowbit")
    gpu = lowbit.compile(spec, "emulator:sm_80").ir("lowbit")
    assert text.count("lowbit.matmul") == 1
    assert text == re.sub(r"\{schedule = \{[^{}]*\}\}\s*", "", gpu) != gpu


@pytest.mark.parametrize("m", [0, -1, 2**31, 10**21, 1.5, "1"])
def test_kernels_are_for_a_number_of_rows(m: int) -> None:
    mm = lowbit.compile(lowbit.MatmulSpec(n=16, k=64, weight="u4"), "emulator:sm_80")
    for ask in (mm.kernel, lambda rows: mm.ir("ptx", rows)):
        with pytest.raises(lowbit.SpecError, match=f"m='?{m}'? must be "):
            ask(m)


def test_a_stage_of_a_gpu_names_the_target_on_a_cpu() -> None:
    """`mm.ir("tile")` on a machine without a GPU."""
    mm = lowbit.compile(SPEC, "cpu")
    with pytest.raises(lowbit.SpecError, match=r"on a CPU; compile\(spec, 'sm_90a'\).ir\('tile'\) has it"):
        mm.ir("tile")
    with pytest.raises(lowbit.SpecError, match=r"machine code is in compile\(spec, 'sm_90a'\).cubin"):
        mm.ir("cubin")
    known = "'lowbit', 'vector', 'llvm', 'll', 'asm'"
    with pytest.raises(lowbit.SpecError, match=rf"stage='tiles' must be one of {known}$"):
        mm.ir("tiles")


@pytest.mark.parametrize("fields", [{}, {"compute": "i8"}], ids=str)
def test_a_cpu_has_no_program_for_all_experts(fields: dict[str, str]) -> None:
    spec = lowbit.MatmulSpec(96, 128, "u4", 32, experts=2, **fields)  # type: ignore[arg-type]
    with pytest.raises(lowbit.SpecError, match="multiplies rows of x that are sorted by expert"):
        lowbit.compile(spec, "cpu")
