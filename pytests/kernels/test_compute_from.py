"""`MatmulSpec.compute_from`: few rows are multiplied in the act type, more in 8 bits, by the same packed weight."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import lowbit
from lowbit.dialect.errors import SpecError
from lowbit.passes.kernels.decode.schedule import Schedule
from lowbit.passes.targets import parse_target
from lowbit.pylib.build.kernels import kernel_choices
from lowbit.pylib.reference import agrees, matmul, random_problem, tolerance

HOPPER, AMPERE = "emulator:sm_90a", "emulator:sm_80"
FIRST = 5
SPEC = lowbit.MatmulSpec(48, 256, "u4", 64, zeros="int", bias=True, compute="i8", compute_from=FIRST)
ROWS = (0, 1, FIRST - 1, FIRST, 12)
SPECS = {
    "i8": SPEC,
    "f8e4m3": replace(SPEC, compute="f8e4m3", act="bf16", scale="bf16"),
    "folded": lowbit.MatmulSpec(48, 256, "nf4", 64, compute="f8e4m3", fold_scales=True, compute_from=FIRST),
}


def given(spec: lowbit.MatmulSpec, m: int) -> tuple[Tensor, dict[str, Tensor]]:
    """x [m, k] and the tensors of a weight by name."""
    x, *tensors = random_problem(spec, m)
    names = ["codes", "scales", *(["zeros"] if spec.zeros == "int" else []), *(["bias"] if spec.bias else [])]
    return x, dict(zip(names, (t for t in tensors if t is not None)))


@pytest.mark.parametrize("target", ["cpu", HOPPER, AMPERE])
@pytest.mark.parametrize("name", SPECS)
def test_rows_say_which_matmul_it_is(name: str, target: str) -> None:
    spec = SPECS[name]
    if spec.compute == "f8e4m3" and target == AMPERE:
        pytest.skip("f8e4m3 is multiplied from sm_89 on")
    mm, exact, rounded = (lowbit.compile(s, target) for s in (spec, spec.in_act, spec.in_eight_bits))
    x, tensors = given(spec, max(ROWS))
    w = mm.pack(**tensors)
    of_exact, of_rounded = (lowbit.PackedWeight(each.spec, dict(w.items())) for each in (exact, rounded))
    for m in ROWS:
        y = mm(x[:m], w)
        expected = exact(x[:m], of_exact) if m < FIRST else rounded(x[:m], of_rounded)
        assert torch.equal(y, expected)
        assert torch.equal(torch.ops.lowbit.matmul.packed(x[:m], list(w.tensors), mm.description), y)
        q = lowbit.quantize_activation(x[:m], spec.byte_type, target=target)
        assert torch.equal(mm(q, w), rounded(q, of_rounded))
    assert not torch.equal(exact(x, of_exact), rounded(x, of_rounded))  # so the tests above tell them apart
    assert torch.equal(mm.dequantize(w), exact.dequantize(of_exact))


@pytest.mark.parametrize("m", [FIRST - 1, FIRST])
@pytest.mark.parametrize("target", ["cpu", HOPPER])
def test_numbers(m: int, target: str) -> None:
    x, tensors = given(SPEC, m)
    mm = lowbit.compile(SPEC, target)
    arguments = x, tensors["codes"], tensors["scales"], tensors["zeros"], tensors["bias"]
    bound = tolerance(SPEC, *arguments, dequantized=True)
    assert agrees(mm(x, mm.pack(*arguments[1:])), matmul(SPEC, *arguments), bound).all()


@pytest.mark.parametrize("target", ["cpu", HOPPER])
def test_a_weight_of_a_wide_range(target: str) -> None:
    """Values beyond f16 are multiplied by kernels that scale sums, also when a quantized call saw the weight first."""
    spec = lowbit.MatmulSpec(16, 64, "u4", 32, scale="f32", out="f32", compute="i8", compute_from=80)
    mm = lowbit.compile(spec, target)
    x, codes, scales = torch.randn(70, 64).half(), torch.randint(0, 16, (16, 64)), torch.rand(16, 2) * 1e6
    w = mm.pack(codes, scales)
    assert w.wide_range
    expected, bound = matmul(spec, x, codes, scales), tolerance(spec, x, codes, scales)
    torch.ops.lowbit.matmul.quantized(
        *lowbit.quantize_activation(x, "i8", target=target).tensors, list(w.tensors), mm.description
    )
    for y in (mm(x, w), torch.ops.lowbit.matmul.packed(x, list(w.tensors), mm.description)):
        assert agrees(y, expected, bound).all()


def test_a_module_quantizes_long_inputs_alone() -> None:
    torch.manual_seed(0)
    config = lowbit.QuantConfig("u4", 64, method="rtn", compute="i8", compute_from=FIRST)
    dense = nn.Sequential(nn.Linear(256, 48, bias=False)).bfloat16()
    models = []
    for each in (config, replace(config, compute=None, compute_from=1), replace(config, compute_from=1)):
        model = nn.Sequential(nn.Linear(256, 48, bias=False)).bfloat16()
        model.load_state_dict(dense.state_dict())
        lowbit.quantize_(model, each)
        models.append(model)
    mixed, exact, rounded = models
    for m in ROWS:
        x = torch.randn(1, m, 256).bfloat16()
        assert torch.equal(mixed(x), exact(x) if m < FIRST else rounded(x))
    compiled = torch.compile(mixed, fullgraph=True, backend="aot_eager", dynamic=True)
    for m in ROWS[2:]:
        x = torch.randn(1, m, 256).bfloat16()
        assert torch.equal(compiled(x), mixed(x))
    assert lowbit.QuantConfig.from_dict(config.to_dict()) == config


def test_choices_are_of_both() -> None:
    spec = replace(SPEC, n=4096, k=4096, compute_from=60)
    choices = kernel_choices(spec, parse_target("sm_90a"))
    assert choices.few is not None and choices.few.rows[-1].last == 59 and choices.rows[0].first == 60
    last = 0
    for rows in (*choices.few.rows, *choices.rows):
        assert rows.first == last + 1
        last = rows.last or 0
    assert last == 0  # the last range has no end
    for m in (1, 16, 59, 60, 64, 300, 10000):
        (kernel,) = choices.launches(m)
        assert kernel.spec == spec.for_rows(m), m
    written = json.loads(json.dumps(choices.to_dict()))
    assert written["few"]["rows"][-1]["last"] == 59 and written["rows"][0]["first"] == 60
    assert "\n33 to 59" in repr(choices) and "\n60 to 64" in repr(choices)


def test_a_schedule_is_for_the_rows_of_its_tokens() -> None:
    schedule = Schedule(tokens=16, warps_k=2)
    spec = replace(SPEC, n=4096, k=4096, compute_from=65)
    choices = kernel_choices(spec, parse_target("sm_90a"), schedule)
    assert choices.launches(16)[0].schedule == schedule
    assert kernel_choices(spec.in_eight_bits, parse_target("sm_90a")).launches(100) == choices.launches(100)


def test_the_spec() -> None:
    assert lowbit.MatmulSpec.from_dict(SPEC.to_dict()) == SPEC
    assert "compute_from" not in SPEC.in_eight_bits.to_dict()
    assert "from 5 rows on" in str(SPEC)
    assert SPEC.for_rows(FIRST) == SPEC.in_eight_bits and SPEC.for_rows(FIRST - 1) == SPEC.in_act
    assert SPEC.in_act.tensors == SPEC.tensors
    with pytest.raises(SpecError, match="compute_from=65 needs compute='f8e4m3' or 'i8'; name one, or drop it"):
        lowbit.MatmulSpec(48, 256, "u4", compute_from=65)
    with pytest.raises(SpecError, match="compute_from=0 must be"):
        replace(SPEC, compute_from=0)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SPECS)
def test_on_a_gpu(name: str) -> None:
    """Eagerly and in a CUDA graph, from both sides of the limit."""
    spec = replace(SPECS[name], n=512, k=1024, compute_from=65)
    mm = lowbit.compile(spec)
    x, tensors = given(spec, 300)
    x, w = x.cuda(), mm.pack(**{name: t.cuda() for name, t in tensors.items()})
    exact, rounded = (lowbit.compile(s) for s in (spec.in_act, spec.in_eight_bits))
    for m in (1, 64, 65, 300):
        other = exact if m < 65 else rounded
        expected = other(x[:m], lowbit.PackedWeight(other.spec, dict(w.items())))
        assert torch.equal(mm(x[:m], w), expected)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = mm(x[:m], w)
        graph.replay()
        assert torch.equal(y, expected)
