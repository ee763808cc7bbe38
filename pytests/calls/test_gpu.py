"""On a GPU: every format is right, and calls behave as torch's own operators do."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch

import lowbit
from lowbit.dialect.formats.byte_codes import Compute
from lowbit.dialect.formats.dtypes import all_names, dtype
from lowbit.passes.kernels.decode.schedule import Refill
from lowbit.passes.kernels.streaming.arithmetic import always_uses_raw_codes
from lowbit.pylib.reference import agrees, matmul, random_problem, tolerance
from lowbit.pylib.runtime.activation import VALUES, quantize_in_torch, quantize_rows
from lowbit.pylib.runtime.driver import Function
from lowbit.pylib.tune.trial import rounding

pytestmark = pytest.mark.gpu

SPEC = lowbit.MatmulSpec(n=272, k=1024, weight="u4", group_size=128, zeros="int")
SMALL = lowbit.MatmulSpec(n=48, k=256, weight="i6", bias=True)
TABLE = tuple((i - 7.3) * abs(i - 7.3) for i in range(16))


def _specs() -> list[lowbit.MatmulSpec]:
    """Every format, and for some every option."""
    base = {"n": 272, "k": 1024, "group_size": 128}
    specs = [lowbit.MatmulSpec(weight=name, **base) for name in all_names()]
    specs += [lowbit.MatmulSpec(weight="lut4", table=TABLE, **base)]
    for weight in ("u4", "i3", "f6e3m2", "nf4"):
        specs += [
            lowbit.MatmulSpec(weight=weight, act="bf16", scale="bf16", bias=True, **base),
            lowbit.MatmulSpec(weight=weight, out="f32", zeros="float", scale="f32", **base),
            lowbit.MatmulSpec(weight=weight, out="bf16", bias=True, n=257, k=1056, group_size=32),
            lowbit.MatmulSpec(weight=weight, n=100, k=1000, group_size=100),
            lowbit.MatmulSpec(weight=weight, n=64, k=2048, scale="e8m0", group_size=32),
            lowbit.MatmulSpec(weight=weight, n=64, k=2048, scale="e4m3", group_size=16),
            lowbit.MatmulSpec(weight=weight, n=64, k=2048),
        ]
        if dtype(weight).kind in ("uint", "int"):
            specs.append(lowbit.MatmulSpec(weight=weight, zeros="int", **base))
    return specs


def _make(
    spec: lowbit.MatmulSpec = SPEC, m: int = 4
) -> tuple[torch.Tensor, lowbit.Matmul, lowbit.PackedWeight]:
    x, *weight = random_problem(spec, m)
    mm = lowbit.compile(spec)
    return x.cuda(), mm, mm.pack(*weight).to("cuda")


@pytest.mark.parametrize("spec", _specs(), ids=str)
def test_numbers(spec: lowbit.MatmulSpec) -> None:
    x, *weight = random_problem(spec, 400)
    mm = lowbit.compile(spec)
    w = mm.pack(*weight).to("cuda")
    expected = matmul(spec, x, *weight)
    for m in (1, 8, 16, 33, 64, 128, 150, 200, 400):
        y = mm(x[:m].cuda(), w)
        assert y.is_cuda and y.shape == (m, spec.n)
        bound = tolerance(spec, x[:m], *weight, **rounding(mm, m))
        assert agrees(y, expected[:m], bound).all(), f"m = {m}"


@pytest.mark.parametrize("zeros", ["none", "int", "float"])
@pytest.mark.parametrize("act", ["f16", "bf16"])
@pytest.mark.parametrize("weight", ["u1", "u2", "u4", "i1", "i2", "i4"])
@pytest.mark.parametrize("row_blocks", [1, 4, 8])
def test_one_token_in_integers(weight: str, act: str, zeros: str, row_blocks: int) -> None:
    """Next to float64, and next to the same with f16: as fine, with an x far larger than others."""
    spec = lowbit.MatmulSpec(2000, 4096, weight, group_size=256, act=act, zeros=zeros, out="f32")  # type: ignore[arg-type]
    x, *weights = random_problem(spec, 1)
    x[0, 7] = 2000.0
    choices = {"tokens": 1, "row_blocks": row_blocks, "warps_k": 4, "step_k": 256, "num_stages": 2}
    schedule = lowbit.IntegerSchedule(**choices)
    mm = lowbit.compile(spec, schedule=schedule)
    y = mm(x.cuda(), mm.pack(*weights).to("cuda"))
    assert agrees(y, matmul(spec, x, *weights), tolerance(spec, x, *weights)).all()
    other = lowbit.compile(spec, schedule=lowbit.Schedule(**choices))
    with_reals = other(x.cuda(), other.pack(*weights).to("cuda"))
    exact = matmul(spec, x, *weights)
    off, off_with_reals = (abs(each.double().cpu().numpy() - exact).max() for each in (y, with_reals))
    assert off <= 4 * off_with_reals


@pytest.mark.parametrize("compute", ["f8e4m3", "i8"])
def test_activations_of_8_bits(compute: Compute) -> None:
    """Quantized as the definition says, to the last bit; sums within what tensor cores keep; one by one or shared, in a
    CUDA graph, and in any number of launches."""
    spec = replace(SPEC, compute=compute, out="f32")
    x, mm, w = _make(spec, 300)
    x[3] = 0
    for got, expected in zip(lowbit.quantize_activation(x, compute).tensors, quantize_in_torch(x.cpu(), compute)):
        assert torch.equal(got.cpu().view(torch.uint8), expected.view(torch.uint8))
    weight = random_problem(spec, 300)[1:]
    for m in (1, 8, 33, 128, 300):
        y = mm(x[:m], w)
        expected, bound = matmul(spec, x[:m].cpu(), *weight), tolerance(spec, x[:m].cpu(), *weight)
        assert agrees(y.cpu(), expected, bound).all()
        assert torch.equal(mm(lowbit.quantize_activation(x[:m], compute), w), y)
        values, scales = quantize_rows(x[:m], compute)
        assert torch.equal(mm(values, w, x_scale=scales), y)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = mm(x, w)
    graph.replay()
    assert torch.equal(recorded, mm(x, w))
    assert torch.equal(torch.compile(lambda x: mm(x, w), fullgraph=True)(x), mm(x, w))


@pytest.mark.parametrize("compute", ["f8e4m3", "i8"])
def test_sums_of_8_bits_to_the_last_bit(compute: Compute) -> None:
    """Small whole numbers, whose sums tensor cores hold."""
    spec = replace(SPEC, compute=compute, out="f32")
    mm = lowbit.compile(spec)
    for m in (5, 100):
        x = torch.randint(-2, 3, (m, spec.k))
        codes, zeros = torch.randint(0, 16, (spec.n, spec.k)), torch.randint(0, 16, (spec.n, spec.groups))
        scales = torch.exp2(torch.randint(-2, 3, (spec.n, spec.groups))).half()
        weight = (codes.double() - zeros.double().repeat_interleave(128, 1)) * scales.double().repeat_interleave(128, 1)
        values = x.to(VALUES[compute]).cuda()
        y = mm(values, mm.pack(codes, scales, zeros).to("cuda"), x_scale=torch.full((m,), 0.5).cuda())
        assert torch.equal(y.cpu(), (x.double() @ weight.T / 2).float())


def test_packing_on_the_gpu_gives_the_same_weight() -> None:
    x, *weight = random_problem(SPEC, 4)
    mm = lowbit.compile(SPEC)
    there = mm.pack(*(None if t is None else t.cuda() for t in weight))
    here = mm.pack(*weight)
    assert torch.equal(there.codes.cpu(), here.codes) and torch.equal(there.scales.cpu(), here.scales)
    assert torch.equal(mm(x.cuda(), there), mm(x.cuda(), here.to("cuda")))


def test_a_weight_that_was_just_written() -> None:
    """Kernels read the weight ahead of their turn; not so when their predecessor writes it."""
    x, mm, w = _make(m=1)
    expected = mm(x, w)
    for _ in range(50):
        codes = torch.full_like(w.codes, -1)
        torch.cuda._sleep(200_000)
        codes.copy_(w.codes)
        assert torch.equal(mm(x, lowbit.PackedWeight(w.spec, {**w, "codes": codes})), expected)


@pytest.mark.parametrize("wgmma", [False, True])
@pytest.mark.parametrize(("splits", "min_blocks"), [(1, 0), (1, 132), (2, 264)])
def test_preloaded_weights_in_a_chain(splits: int, min_blocks: int, wgmma: bool) -> None:
    """Kernels that share multiprocessors, each with the result of the one before as its x."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("clusters and wgmma need sm_90a")
    spec = lowbit.MatmulSpec(2048, 2048, "u4", group_size=128, zeros="int")
    schedule = lowbit.Schedule(8, 1, 4, 2, 256, 1, splits, splits, wgmma, preload_weights=True, min_blocks=min_blocks)
    x = random_problem(spec, 8)[0]
    kernels = [lowbit.compile(spec, schedule=chosen) for chosen in (None, schedule)]
    weights = [kernels[0].pack(*random_problem(spec, 8, seed=i)[1:]).to("cuda") for i in range(5)]
    chains = []
    for mm in kernels:
        y = x.cuda()
        for i in range(40):
            y = mm(y, weights[i % 5])
            y = y / y.abs().amax(dim=1, keepdim=True) if i % 8 == 7 else y
        chains.append(y.float())
    assert torch.allclose(*chains, atol=0.05)


@pytest.mark.parametrize("zeros", ["none", "int", "float"])
@pytest.mark.parametrize("weight", ["u1", "u2", "u3", "u4", "u8", "i2", "i4", "i7"])
@pytest.mark.parametrize("schedule", [(8, 2, 1, 4), (16, 1, 4, 2), (64, 2, 4, 1)])
def test_codes_as_they_are(schedule: tuple[int, ...], weight: str, zeros: str) -> None:
    """Tensor cores multiply subnormals, with mma and with wgmma."""
    if schedule[0] > 8 and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("wgmma needs sm_90a")
    spec = lowbit.MatmulSpec(2000, 2048, weight, group_size=256, zeros=zeros, out="f32")  # type: ignore[arg-type]
    x, *weights = random_problem(spec, schedule[0])
    chosen = lowbit.Schedule(*schedule, step_k=256, num_stages=2, wgmma=schedule[0] > 8)
    chosen = chosen if always_uses_raw_codes(spec, chosen) else replace(chosen, raw_codes=True)
    mm = lowbit.compile(spec, schedule=chosen)
    y = mm(x.cuda(), mm.pack(*weights).to("cuda"))
    assert agrees(y, matmul(spec, x, *weights), tolerance(spec, x, *weights)).all()


@pytest.mark.parametrize("refill", ["after_first_mma", "per_warp"])
@pytest.mark.parametrize("schedule", [(16, 4, 2, 128), (64, 16, 1, 256), (128, 8, 2, 128), (256, 8, 1, 128)])
def test_copies_after_the_first_product(schedule: tuple[int, ...], refill: Refill) -> None:
    """Many rounds, without a barrier among the warps that share x."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("wgmma needs sm_90a")
    spec = lowbit.MatmulSpec(2000, 8192, "u4", group_size=128)
    tokens, warps_n, warps_k, step = schedule
    x, *weights = random_problem(spec, tokens)
    chosen = lowbit.Schedule(tokens, 1, warps_n, warps_k, step, num_stages=2, wgmma=True, refill=refill)
    mm = lowbit.compile(spec, schedule=chosen)
    w, on_gpu = mm.pack(*weights).to("cuda"), x.cuda()
    bound = tolerance(spec, x, *weights, **rounding(mm, tokens))
    assert agrees(mm(on_gpu, w), matmul(spec, x, *weights), bound).all()
    assert all(torch.equal(mm(on_gpu, w), mm(on_gpu, w)) for _ in range(50))


@pytest.mark.parametrize(
    "spec", [lowbit.MatmulSpec(1020, 1020, "i4"), lowbit.MatmulSpec(960, 960, "i4", group_size=24)]
)
def test_an_x_that_was_just_written(spec: lowbit.MatmulSpec) -> None:
    """Where x is not copied in 16-byte pieces, too, it is read after the kernel before has written it."""
    x, mm, w = _make(spec, 8)

    def chain(synchronize: bool) -> torch.Tensor:
        y = x
        for i in range(60):
            y = mm(y, w) if i % 6 else mm(y / y.abs().amax(), w)
            if synchronize:
                torch.cuda.synchronize()
        return y

    expected = chain(synchronize=True)
    for _ in range(20):
        assert torch.equal(chain(synchronize=False), expected)


@pytest.mark.parametrize("shape", [(1024,), (0, 1024), (2, 0, 1024), (2, 3, 1024), (3, 40, 1024)])
def test_leading_dimensions(shape: tuple[int, ...]) -> None:
    x, mm, w = _make(m=120)
    x = x.view(-1)[: torch.Size(shape).numel()].view(shape)
    y = mm(x, w)
    assert y.shape == (*shape[:-1], SPEC.n) and y.is_cuda
    assert torch.equal(y.view(-1, SPEC.n), mm(x.reshape(-1, 1024), w))


def test_strides_and_alignment() -> None:
    x, mm, w = _make()
    expected = mm(x, w)
    shifted = torch.cat([x.new_zeros(1), x.view(-1)])[1:].view_as(x)
    for same in (x.T.contiguous().T, torch.stack([x, -x], dim=1)[:, 0], shifted):
        assert torch.equal(mm(same, w), expected)


@pytest.mark.parametrize("m", [1, 16, 200])
@pytest.mark.parametrize("warm", [True, False])
def test_graph(m: int, warm: bool) -> None:
    """Captured even at the first call, when kernels have to be loaded; two graphs and eager calls mix."""
    x, mm, w = _make(m=m)
    if not warm:
        mm = lowbit.Matmul(mm.spec, mm.target, None)
    given = [x * 2.0**-i for i in range(3)]
    expected = [lowbit.compile(SPEC)(each, w) for each in given]
    static = torch.zeros_like(x)
    graphs, results = [torch.cuda.CUDAGraph() for _ in range(2)], []
    for graph in graphs:
        with torch.cuda.graph(graph):
            results.append([mm(static, w) for _ in range(3)])
    for each, right in zip(given, expected):
        static.copy_(each)
        for graph, ys in zip(graphs, results):
            graph.replay()
            assert torch.equal(mm(each, w), right)
            assert all(torch.equal(y, right) for y in ys)


def test_streams() -> None:
    """A call waits for its own stream's work and for no other's."""
    x, mm, w = _make(m=2)
    expected = mm(x, w)
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    results = []
    for stream in streams * 8:
        with torch.cuda.stream(stream):
            late = torch.zeros_like(x)
            torch.cuda._sleep(100_000)
            late.copy_(x)
            results.append(mm(late, w))
    torch.cuda.synchronize()
    assert all(torch.equal(y, expected) for y in results)


def test_threads() -> None:
    x, mm, w = _make()
    expected = mm(x, w)
    torch.cuda.synchronize()
    wrong: list[int] = []

    def work(i: int) -> None:
        scale = 2.0**-i
        wrong.extend(i for _ in range(200) if not torch.equal(mm(x * scale, w), expected * scale))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_thread_that_has_not_used_cuda() -> None:
    """It has no current context; the launch makes one."""
    x, mm, w = _make()
    expected, results = mm(x, w), []
    thread = threading.Thread(target=lambda: results.append(mm(x, w)))
    thread.start()
    thread.join()
    assert torch.equal(results[0], expected)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_torch_compile(mode: str) -> None:
    torch._dynamo.reset()
    x, mm, w = _make(SMALL)
    compiled = torch.compile(lambda x: torch.relu(mm(x * 2, w)), fullgraph=True, mode=mode)
    for _ in range(3):  # warm-up, capture, replay
        assert torch.equal(compiled(x).clone(), torch.relu(mm(x * 2, w)))


def test_opcheck() -> None:
    x, mm, w = _make(SMALL)
    arguments = (x, list(w.tensors), mm.description)
    torch.library.opcheck(torch.ops.lowbit.matmul.packed, arguments)


def test_wrong_device_is_an_error() -> None:
    x, mm, w = _make()
    with pytest.raises(lowbit.TargetError, match="x is on cpu, but the weight is on cuda:0"):
        mm(x.cpu(), w)
    with pytest.raises(lowbit.TargetError, match="takes CUDA tensors"):
        mm(x.cpu(), w.to("cpu"))
    with pytest.raises(lowbit.TargetError, match="target cpu takes CPU tensors, not cuda:0"):
        lowbit.compile(SPEC, "cpu")(x, w)


def test_driver_errors_have_names() -> None:
    kernel = lowbit.compile(SPEC).kernel(1)
    with pytest.raises(lowbit.TargetError, match=r"cuLibrary\w+: CUDA_ERROR_\w+ \(.+\)"):
        Function(b"no cubin" + bytes(64), kernel.launch, 0)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_second_device() -> None:
    x, mm, w = _make()
    expected = mm(x, w)
    x1, w1 = x.to("cuda:1"), w.to("cuda:1")
    assert torch.cuda.current_device() == 0
    for m, (given, weight) in enumerate([(x1, w1), (x, w), (x1, w1)]):
        y = mm(given, weight)
        assert y.device == given.device and torch.equal(y.to("cuda:0"), expected), m
    with torch.cuda.device(1):
        assert torch.equal(mm(x, w), expected)
        assert torch.equal(mm(x1, w1).to("cuda:0"), expected)
    assert torch.equal(mm.dequantize(w1).to("cuda:0"), mm.dequantize(w))
    with pytest.raises(lowbit.TargetError, match="x is on cuda:1, but the weight is on cuda:0"):
        mm(x1, w)


def test_a_quantized_model() -> None:
    """Quantized in place on the GPU, it gives the same eagerly, compiled and in a captured graph."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256)).cuda().half()
    x = torch.randn(4, 256, device="cuda").half()
    dense = model(x)
    report = lowbit.quantize_(model, lowbit.QuantConfig("u4", group_size=64), progress=False)
    assert "2 of 2 layers quantized" in str(report)
    y = model(x)
    assert 0 < (y - dense).norm() / dense.norm() < 0.2
    assert torch.equal(torch.compile(model, fullgraph=True)(x), y)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = model(x)
    captured.zero_()
    graph.replay()
    assert torch.equal(captured, y)


def test_a_weight_of_a_wide_range_first_seen_in_a_graph() -> None:
    """Nothing can be looked at while a graph is recorded: kernels that are right for every weight are taken."""
    spec = lowbit.MatmulSpec(n=16, k=64, weight="u4", group_size=32, zeros="float", scale="f32")
    mm, codes = lowbit.compile(spec), torch.full((16, 64), 9, dtype=torch.uint8)
    w = mm.pack(codes, torch.full((16, 2), 1e4), torch.full((16, 2), 2.0)).to("cuda")
    tensors, x = {name: t.clone() for name, t in w.items()}, torch.full((1500, 64), 1e-3, device="cuda").half()
    expected, graph = mm(x, w), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = mm(x, lowbit.PackedWeight(spec, tensors))
        by_operator = torch.ops.lowbit.matmul.packed(x, list(tensors.values()), mm.description)
    graph.replay()
    assert expected.isfinite().all()
    assert torch.equal(y, expected) and torch.equal(by_operator, expected)
