"""Calls of `LowbitExperts`, in each of the three ways in which they run: what comes out, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowbit
from lowbit import LowbitExperts, LowbitLinear, QuantConfig, SpecError
from lowbit.pylib.nn import experts as experts_module
from lowbit.pylib.nn import stacked_experts
from lowbit.pylib.operator import expert_schema
from lowbit.pylib.runtime.top_k_experts import TopKExperts

transformers = pytest.importorskip("transformers")

HIDDEN, WIDTH, EXPERTS = 64, 48, 5
Call = Callable[[Tensor, Tensor, Tensor], Tensor]
WAYS = ("together", "by ids", "one by one", "every expert")


@pytest.fixture(scope="module")
def experts() -> LowbitExperts:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    sizes = {"hidden_size": HIDDEN, "moe_intermediate_size": WIDTH, "num_experts": EXPERTS}
    torch.manual_seed(0)
    model = nn.ModuleDict({"experts": Qwen3MoeExperts(transformers.Qwen3MoeConfig(**sizes)).bfloat16()})
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    lowbit.quantize_(model, QuantConfig("u4", 16, clip="max"), progress=False)
    found = model["experts"]
    assert isinstance(found, LowbitExperts)
    return found


@pytest.fixture(params=WAYS)
def call(request: pytest.FixtureRequest, experts: LowbitExperts, monkeypatch: pytest.MonkeyPatch) -> Call:
    """A call of experts: in launches of the emulator, by sorted slots or by ids, those with tokens one after the other,
    or all on all tokens."""
    target = {"together": "emulator:sm_80", "by ids": "emulator:sm_90a"}.get(request.param)
    found = expert_schema.by_ids

    def by_ids(*types: Any) -> TopKExperts | None:
        few = found(*types) if request.param == "by ids" else None
        if few is not None:
            monkeypatch.setattr(few, "most_tokens", 10_000)
        return few

    monkeypatch.setattr(expert_schema, "by_ids", by_ids)
    monkeypatch.setattr(expert_schema, "run_of", expert_schema.run_of.__wrapped__)  # which keeps what `by_ids` gave
    for module in (stacked_experts, experts_module):
        monkeypatch.setattr(module, "target_of", lambda _: target)
    experts._stacked = {}
    run = torch.compile(experts, backend="eager") if request.param == "every expert" else experts

    def call(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        with torch.no_grad():
            y = run(x, ids, weights)
        assert bool(experts._stacked) == (target is not None)
        return y

    return call


def inputs(tokens: int, k: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """x, ids and weights of tokens; some ids are of no expert, and some are twice in a token."""
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, HIDDEN, generator=generator).bfloat16()
    ids = torch.randint(-1, EXPERTS + 1, (tokens, k), generator=generator)
    return x, ids, torch.rand(tokens, k, generator=generator)


def defined(experts: LowbitExperts, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """The sum of each token's experts in f64; what an expert's gate makes is rounded to the type of x."""
    result = torch.zeros(len(x), HIDDEN, dtype=torch.float64)
    for expert, layers in enumerate(zip(experts.gate_up, experts.down)):
        gate_up, down = (layer.weight.clone().double() for layer in layers if isinstance(layer, LowbitLinear))
        gate, up = (x.double() @ gate_up.T).chunk(2, -1)
        o = (nn.functional.silu(gate) * up).to(x.dtype).double() @ down.T
        result += torch.where(ids == expert, weights, 0).sum(-1, keepdim=True).double() * o
    return result


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) <= 0.015 * float(expected.abs().max())


# By ids every token has blocks of its own, and each writes its own row: what 513 would show, 65 do.
@pytest.mark.parametrize(
    ("call", "tokens"),
    [(way, tokens) for way in WAYS for tokens in (1, 7, 65, *(513,) * (way != "by ids"))],
    indirect=["call"],
)
def test_the_sum_is_that_of_the_definition(call: Call, experts: LowbitExperts, tokens: int) -> None:
    given = inputs(tokens)
    assert_close(call(*given), defined(experts, *given))


@pytest.mark.parametrize("call", ["by ids"], indirect=True)
def test_a_ready_call_is_taken_until_something_changes(call: Call, experts: LowbitExperts) -> None:
    x, ids, weights = inputs(3)
    expected = call(x, ids, weights)
    found, kind = experts._stacked[False], stacked_experts.kind_of_call(x, ids, weights)
    found.keep_ready(x, ids, weights, EXPERTS)  # a call on a GPU does
    assert bool((found.ready[kind](x, ids, weights) == expected).all())
    ready = torch.zeros(())
    found.ready[kind] = lambda *_: ready
    assert call(x, ids, weights) is ready
    assert call(x[:2], ids[:2], weights[:2]) is not ready
    assert call(x, ids.int(), weights) is not ready and call(x, ids, weights.double()) is not ready
    with lowbit.batch_invariant():
        assert call(x, ids, weights) is not ready
    weights.requires_grad_()
    assert experts(x, ids, weights) is not ready
    hook = experts.down[1].register_forward_hook(lambda *_: None)
    assert call(x, ids, weights.detach()) is not ready
    hook.remove()


def test_no_tokens(call: Call) -> None:
    assert call(*inputs(0)).shape == (0, HIDDEN)


def test_the_same_expert_twice_counts_twice(call: Call, experts: LowbitExperts) -> None:
    x, ids, weights = inputs(7)
    ids = ids[:, :1].clamp(0, EXPERTS - 1)
    twice = call(x, ids.expand(-1, 2), weights)
    assert_close(twice, defined(experts, x, ids, weights.sum(-1, keepdim=True)))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("elsewhere", [-1, EXPERTS])
def test_an_expert_elsewhere_adds_exactly_nothing(call: Call, elsewhere: int, dtype: torch.dtype) -> None:
    """Parts of the experts in several processes: their sums add up to that of all, whatever the weight is."""
    x, ids, weights = inputs(7)
    ids = ids.clamp(0, EXPERTS - 1).to(dtype)
    alone = call(x, ids[:, :1], weights[:, :1])
    ids[:, 1], weights[:, 1] = elsewhere, torch.inf
    assert torch.equal(call(x, ids, weights), alone)
    assert torch.equal(call(x, torch.full_like(ids, elsewhere), weights), torch.zeros_like(x))


def test_parts_of_the_experts_add_up_to_all(call: Call, experts: LowbitExperts) -> None:
    x, ids, weights = inputs(9, 3)
    parts = [torch.where((ids >= first) & (ids < last), ids, -1) for first, last in ((0, 2), (2, EXPERTS))]
    assert_close(sum(call(x, part, weights).double() for part in parts), defined(experts, x, ids, weights))


def test_each_process_keeps_its_experts(call: Call, experts: LowbitExperts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four experts two each, by the ids of all; their sums would be added up between processes."""
    four = LowbitExperts(_dense(4), list(experts.gate_up)[:4], list(experts.down)[:4])
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: None)
    four.act_fn, four._dense_class = experts.act_fn, experts._dense_class
    x, ids, weights = inputs(9, 3)
    ids.clamp_(-1, 4)
    parts = [copy.deepcopy(four) for _ in range(2)]
    for index, part in enumerate(parts):
        part.keep_(index, 2, "all processes")
        assert len(part.gate_up) == len(part.down) == 2
    with torch.no_grad():
        assert_close(sum(part(x, ids, weights).double() for part in parts), defined(four, x, ids, weights))
    with pytest.raises(SpecError, match="4 experts can't be shared out evenly among 3 processes"):
        four.keep_(0, 3, "all processes")


def test_what_is_no_number_stays_in_its_token(call: Call) -> None:
    x, ids, weights = inputs(9)
    ids.clamp_(0, EXPERTS - 1)
    expected = call(x, ids, weights)
    x[4] = torch.nan
    found, others = call(x, ids, weights), [token for token in range(9) if token != 4]
    assert torch.equal(found[others], expected[others]) and found[4].isnan().all()


X, IDS, WEIGHTS = inputs(3)


@pytest.mark.parametrize("call", ["together", "one by one"], indirect=True)
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((X, IDS.float(), WEIGHTS), "top_k_index is torch.float32; it must be torch.int64 or torch.int32"),
        ((X, IDS.to(torch.int16), WEIGHTS), "top_k_index is torch.int16; it must be"),
        ((X, IDS.tolist(), WEIGHTS), "top_k_index is list; it must be"),
        ((X, IDS[:, 0], WEIGHTS), r"top_k_index must be \[tokens, k\], not \[3\]"),
        ((X, IDS[:2], WEIGHTS[:2]), r"x is \[3, 64\], and top_k_index \[2, 2\]; they must be \[tokens, hidden\] and"),
        ((X[None], IDS, WEIGHTS), r"x is \[1, 3, 64\], and top_k_index \[3, 2\]; they must be \[tokens, hidden\] and"),
        ((X, IDS, WEIGHTS[:, :1]), r"top_k_weights is torch.float32 \[3, 1\]; it must be \[3, 2\] of floats"),
        ((X, IDS, IDS), r"top_k_weights is torch.int64 \[3, 2\]; it must be \[3, 2\] of floats, one for each id"),
        ((X, torch.full_like(IDS, 6), WEIGHTS), r"top_k_index\[0, 0\]=6 must be in 0..4, the experts of the layer"),
        ((X, torch.full_like(IDS, -2), WEIGHTS), r"top_k_index\[0, 0\]=-2 must be .* or -1 or 5 for one that is else"),
        ((X, IDS.to("meta"), WEIGHTS), "x is on cpu, top_k_index on meta, top_k_weights on cpu; put them on one"),
        ((X,), "3 rows of x without top_k_index must be as many for each of 5 experts"),
        ((X, IDS), "top_k_index without top_k_weights"),
    ],
)
def test_calls_that_are_refused(call: Call, experts: LowbitExperts, given: tuple[Any, ...], message: str) -> None:
    before = {name: tensor.clone() for name, tensor in experts.state_dict().items()}
    with pytest.raises(SpecError, match=message):
        experts(*given)
    assert all(torch.equal(before[name], tensor) for name, tensor in experts.state_dict().items())


@pytest.mark.parametrize("call", ["together", "one by one"], indirect=True)
def test_rows_in_the_order_of_experts(call: Call, experts: LowbitExperts) -> None:
    """Three for each; rows of zeros stay zeros."""
    x = inputs(3 * EXPERTS)[0]
    x[4] = 0
    ids = torch.arange(EXPERTS).repeat_interleave(3)[:, None]
    with torch.no_grad():
        found = experts(x)
    assert_close(found, defined(experts, x, ids, torch.ones(ids.shape)))
    assert not found[4].any()


@pytest.mark.parametrize("call", ["together", "one by one"], indirect=True)
def test_a_router_is_trained_beside(call: Call, experts: LowbitExperts) -> None:
    """Its weights have a gradient though x needs none."""
    x, ids, weights = inputs(6)
    y = experts(x, ids, weights.requires_grad_())
    y.float().sum().backward()
    o = [defined(experts, x, ids[:, place, None], torch.ones(6, 1)).sum(-1) for place in range(2)]
    assert weights.grad is not None
    assert_close(weights.grad, torch.stack(o, -1))


def _dense(count: int) -> nn.Module:
    dense = nn.Module()
    dense.gate_up_proj, dense.down_proj = torch.zeros(count, 96, 64), torch.zeros(count, 64, 48)
    return dense


def _layers(n: int, k: int, count: int = EXPERTS) -> list[LowbitLinear]:
    return [LowbitLinear.empty(lowbit.MatmulSpec(n, k, "u4", 16, act="bf16")) for _ in range(count)]


@pytest.mark.parametrize(
    ("gate_up", "down", "message"),
    [
        (_layers(96, 64), _layers(64, 48, 4), "5 layers of gate_up and 4 of down, but the model has 5 experts"),
        (_layers(96, 64, 6), _layers(64, 48, 6), "6 layers of gate_up and 6 of down, but the model has 5 experts"),
        ([*_layers(96, 64, 4), *_layers(96, 32, 1)], _layers(64, 48), r"gate_up\[4\] is 96 x 32, but must be 96 x 64"),
        (_layers(96, 64), [*_layers(64, 48, 4), *_layers(64, 32, 1)], r"down\[4\] is 64 x 32, but must be 64 x 48"),
    ],
)
def test_layers_that_are_no_experts(gate_up: list[LowbitLinear], down: list[LowbitLinear], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        LowbitExperts(_dense(EXPERTS), gate_up, down)


@pytest.mark.parametrize("how", ["as they are", "stacked", "compiled"])
def test_gradients_of_x(how: str, experts: LowbitExperts) -> None:
    """Before and after a call that stacked the experts' weights, and as torch.compile traces them."""
    x, ids, weights = inputs(9)
    experts._stacked = {}
    if how == "stacked":
        with torch.no_grad():
            experts(x, ids, weights)
        assert experts._stacked
    torch._dynamo.reset()
    call = torch.compile(experts, backend="aot_eager", fullgraph=True) if how == "compiled" else experts
    leaf, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    y = call(leaf, ids, weights)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(0)).to(y.dtype)
    (found,) = torch.autograd.grad(y, leaf, dy)
    total = torch.zeros(9, HIDDEN, dtype=torch.float64)
    for expert, layers in enumerate(zip(experts.gate_up, experts.down)):
        gate_up, down = (layer.weight.detach().double() for layer in layers if isinstance(layer, LowbitLinear))
        gate, up = (exact @ gate_up.T).chunk(2, -1)
        chosen = torch.where(ids == expert, weights, 0).sum(-1, keepdim=True).double()
        total = total + chosen * ((nn.functional.silu(gate) * up) @ down.T)
    (expected,) = torch.autograd.grad(total, exact, dy.double())
    assert_close(found, expected)
