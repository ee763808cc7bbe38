"""Low-bit experts in vLLM's modular kernel, by fakes of its classes: tokens that are sent between processes, and
adapters (LoRA) on experts. The "processes" are threads, and what each answers is compared with dense experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowbit import QuantConfig, SpecError
from lowbit.pylib.integrations.serving import experts as serving_experts
from lowbit.pylib.integrations.serving import startup as serving_startup
from lowbit.pylib.integrations.serving.adapted_experts import AdaptedExperts
from lowbit.pylib.integrations.serving.experts import GATES, Experts, each_of, quantize_experts
from lowbit.pylib.nn.rotated import ColumnScaling
from lowbit.pylib.runtime import expert_matmul
from pytests.models import fake_vllm, fake_vllm_experts

U4 = QuantConfig("u4", 32, clip="max")
EXPERTS, HIDDEN, INNER, RANK = 4, 64, 128, 8
TO_DENSE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": lambda g, u: nn.functional.silu(g) * u,
    "gelu_tanh": lambda g, u: nn.functional.gelu(g, approximate="tanh") * u,
    "swigluoai": lambda g, u: (g := g.clamp(max=7)) * torch.sigmoid(1.702 * g) * (u.clamp(-7, 7) + 1),
}


@pytest.fixture
def methods() -> Iterator[Any]:
    with fake_vllm.installed() as found:
        yield found


def weights_of(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Returns the dense weights of all experts, gate_up and down."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (EXPERTS, 2 * INNER, HIDDEN), (EXPERTS, HIDDEN, INNER)
    w13, w2 = (torch.randn(shape, generator=generator).bfloat16() * 0.2 for shape in shapes)
    return w13, w2


def tokens_of(count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns x, weights and ids of so many tokens, with two experts each."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, HIDDEN, generator=generator).bfloat16()
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:2] for _ in range(count)])
    return x, torch.rand(count, 2, generator=generator), ids.to(torch.int32)


def adapters_of(count: int, seed: int = 7) -> tuple[Tensor, Tensor]:
    """Returns what so many adapters add to gate_up and to down: products of two low-rank matrices."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (2 * INNER, HIDDEN), (HIDDEN, INNER)

    def random(*sizes: int) -> Tensor:
        return torch.randn(count, EXPERTS, *sizes, generator=generator)

    to_w13, to_w2 = (random(n, RANK) @ random(RANK, k) for n, k in shapes)
    return to_w13 * 0.03, to_w2 * 0.03


def dense_answer(
    tokens: Sequence[Tensor],
    activation: str = "silu",
    adapters: tuple[Tensor, Tensor] | None = None,
    mapping: Tensor | None = None,
    seed: int = 0,
) -> Tensor:
    """Returns the sum of each token's experts, one by one, of weights as they are quantized.

    mapping   [tokens]: the adapter of each, -1: none
    """
    x, weights, ids = tokens
    w13, w2 = ([each.dequantize().float() for each in each_of(quantize_experts(w, None, U4))] for w in weights_of(seed))
    y = torch.zeros(len(x), HIDDEN)
    for token, place in torch.cartesian_prod(*map(torch.arange, ids.shape)).tolist():
        expert, adapter = int(ids[token, place]), -1 if mapping is None else int(mapping[token])
        if not 0 <= expert < EXPERTS:
            continue
        first, second = w13[expert], w2[expert]
        if adapters is not None and adapter >= 0:
            first, second = first + adapters[0][adapter, expert], second + adapters[1][adapter, expert]
        h = first @ x[token].float()
        gate, up = (h[0::2], h[1::2]) if GATES[activation].pairs else h.chunk(2)
        y[token] += weights[token, place] * (second @ TO_DENSE[activation](gate, up))
    return y


def assert_close(y: Tensor, expected: Tensor) -> None:
    assert float((y.float() - expected).norm() / expected.norm()) < 0.01


def layer_of(methods: Any, rank: int = 0, processes: int = 1, activation: str = "silu", **parallel: Any) -> Any:
    """Returns loaded experts, of one process or of several that have some of them each."""
    layer = fake_vllm.RoutedExperts(EXPERTS, HIDDEN, INNER, activation)
    vars(layer.moe_config.moe_parallel_config).update(ep_size=processes, **parallel)
    count = EXPERTS // processes
    if processes > 1:
        layer.expert_map = torch.full((EXPERTS,), -1, dtype=torch.int32)
        layer.expert_map[rank * count : (rank + 1) * count] = torch.arange(count, dtype=torch.int32)
        layer.sizes["num_experts"] = count
    layer.take(methods.expert_methods.OnLoadExperts("experts", layer, [U4, U4]))
    fill(layer, rank * count, count)
    return layer


def fill(layer: Any, first: int, count: int, seed: int = 0, made: Any = None) -> None:
    named = {f"{name}_weight": w[first : first + count] for name, w in zip(("w13", "w2"), weights_of(seed))}
    if made is None:
        fake_vllm.load(layer, named)
    else:
        fake_vllm.reload(layer, made, named)


def on_processes(run: Callable[[int], Tensor], processes: int = 2) -> list[Tensor]:
    """Returns what each of several processes answers."""
    group = fake_vllm_experts.Group(processes)

    def one(rank: int) -> Tensor:
        fake_vllm_experts.HERE.group, fake_vllm_experts.HERE.rank = group, rank
        with torch.no_grad():
            return run(rank)

    with ThreadPoolExecutor(processes) as pool:
        return list(pool.map(one, range(processes)))


SENT = {"dp_size": 2, "use_all2all_kernels": True}
BATCHED = {**SENT, "use_batched_activation_format": True, "all2all_backend": "deepep_low_latency"}


@pytest.mark.parametrize("parallel", [SENT, BATCHED], ids=["gathered", "batched"])
def test_tokens_are_sent_to_the_processes_that_have_their_experts(parallel: dict[str, Any], methods: Any) -> None:
    """Each process answers for its own tokens, of which the two have 5 and 3, and ids of 64 bits."""
    tokens = [tokens_of(5, seed=1), tokens_of(3, seed=2)]
    layers = [layer_of(methods, rank, 2, **parallel) for rank in range(2)]
    given = [(x, weights, ids.long()) for x, weights, ids in tokens]
    answers = on_processes(lambda rank: layers[rank](*given[rank]))
    for answer, given in zip(answers, tokens):
        assert_close(answer, dense_answer(given))


@torch.no_grad()
def test_processes_add_up_to_one(methods: Any) -> None:
    """Without data parallelism all have the same tokens. Ids that are no expert's, of padding, add nothing anywhere."""
    x, weights, ids = tokens_of(6, seed=3)
    ids[0, 0], ids[1, 1], ids[2, 0] = -1, EXPERTS, 1000
    parts = [layer_of(methods, rank, 2)(x, weights, ids) for rank in range(2)]
    assert_close(parts[0].float() + parts[1].float(), dense_answer((x, weights, ids)))
    elsewhere = torch.where(ids < EXPERTS // 2, EXPERTS - 1, ids)
    assert not layer_of(methods, 0, 2)(x, weights, elsewhere).any()  # exactly 0


def test_data_parallelism_without_expert_parallelism(methods: Any) -> None:
    """Tokens are gathered, and each process has a part of every expert."""
    tokens, layers = [tokens_of(5, seed=1), tokens_of(3, seed=2)], []
    for rank in range(2):
        layer = fake_vllm.RoutedExperts(EXPERTS, HIDDEN, INNER, rank=rank, count=2)
        layer.moe_config.moe_parallel_config.dp_size = 2
        layer.take(methods.expert_methods.OnLoadExperts("experts", layer, [U4, U4]))
        w13, w2 = weights_of()
        here = slice(rank * INNER // 2, (rank + 1) * INNER // 2)
        w13 = w13.unflatten(1, (2, -1))[:, :, here].flatten(1, 2)
        fake_vllm.load(layer, {"w13_weight": w13, "w2_weight": w2[..., here]})
        layers.append(layer)
    for answer, given in zip(on_processes(lambda rank: layers[rank](*tokens[rank])), tokens):
        assert_close(answer, dense_answer(given))


def with_adapters(methods: Any, targets: list[str] | None = None) -> None:
    methods.expert_methods.get_current_vllm_config().lora_config = SimpleNamespace(target_modules=targets)


def context_of(experts: slice, mapping: Tensor, slices: int = 2) -> Any:
    """Returns vLLM's context of two adapters, for these experts, and the adapter of each token of this process."""
    w13, w2 = (w[:, experts] for w in adapters_of(2))
    tokens = {"mapping": mapping, "local_token_lora_mapping": mapping}
    return SimpleNamespace(w13=w13, w2=w2, w13_num_slices=slices, local_num_experts=w13.shape[1], **tokens)


@torch.no_grad()
@pytest.mark.parametrize("activation", TO_DENSE)
def test_adapters_on_experts(activation: str, methods: Any) -> None:
    """Of tokens with two adapters and with none, also after other weights have come; ids that are no expert's."""
    with_adapters(methods)
    layer = fake_vllm.RoutedExperts(EXPERTS, HIDDEN, INNER, activation)
    layer.take(methods.expert_methods.OnLoadExperts("experts", layer, [U4, U4]))
    made, (x, weights, ids) = fake_vllm.recorded(layer), tokens_of(6, seed=3)
    ids[4, 0] = -1
    fill(layer, 0, EXPERTS)
    assert_close(layer(x, weights, ids), dense_answer((x, weights, ids), activation))
    experts = layer.quant_method.moe_kernel.fused_experts
    mapping = torch.tensor([0, -1, 1, 1, 0, -1])
    experts.set_lora_context(context_of(slice(None), mapping, 1 if GATES[activation].pairs else 2))
    assert experts.supports_lora()
    for seed in (0, 1):
        if seed:
            fill(layer, 0, EXPERTS, seed, made)
        assert layer.quant_method.moe_kernel.fused_experts is experts
        expected = dense_answer((x, weights, ids), activation, adapters_of(2), mapping, seed)
        assert_close(layer(x, weights, ids), expected)
        without = dense_answer((x, weights, ids), activation, seed=seed)
        assert float((expected - without).norm() / without.norm()) > 0.1


def test_adapters_of_tokens_that_are_sent(methods: Any) -> None:
    """Which adapter a token has is sent with it."""
    with_adapters(methods, ["experts"])
    tokens = [tokens_of(5, seed=1), tokens_of(3, seed=2)]
    mappings = [torch.tensor([0, 1, -1, 1, 0]), torch.tensor([1, -1, 0])]
    layers = [layer_of(methods, rank, 2, **SENT) for rank in range(2)]
    for rank, layer in enumerate(layers):
        context = context_of(slice(2 * rank, 2 * rank + 2), mappings[rank])
        kernel = layer.quant_method.moe_kernel
        for part in (kernel.prepare_finalize, kernel.fused_experts):
            part.set_lora_context(context)
    for answer, given, mapping in zip(on_processes(lambda rank: layers[rank](*tokens[rank])), tokens, mappings):
        assert_close(answer, dense_answer(given, "silu", adapters_of(2), mapping))


@torch.no_grad()
@pytest.mark.parametrize("parallel", [{}, SENT], ids=["here", "sent"])
def test_router_weights_on_the_input(parallel: dict[str, Any], methods: Any) -> None:
    """Of one expert for each token, whose weight multiplies x; it is not applied again."""
    tokens = [tuple(t[:, :1] if t.shape[1] == 2 else t for t in tokens_of(5, seed=seed)) for seed in (1, 2)]
    layers = [layer_of(methods, rank, 2, **parallel) for rank in range(2)]
    for layer in layers:
        layer.apply_router_weight_on_input = True
    if not parallel:
        tokens[1] = tokens[0]
    answers = on_processes(lambda rank: layers[rank](*tokens[rank]))
    if not parallel:
        answers = [answers[0] + answers[1]]
    for answer, (x, weights, ids) in zip(answers, tokens):
        assert_close(answer, dense_answer((x * weights.bfloat16(), torch.ones_like(weights), ids)))


@torch.no_grad()
@pytest.mark.parametrize("activation", TO_DENSE)
def test_adapted_experts_by_the_kernels_of_all(activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, in the emulator; the start has loaded every kernel of the matmuls."""
    gate, tokens = GATES[activation], tokens_of(6, seed=3)
    tokens[2][0, 0], tokens[2][1, 1] = -1, 1000
    packed = [quantize_experts(w, None, U4, g) for w, g in zip(weights_of(), (gate, None))]
    for module in (serving_experts, serving_startup):
        monkeypatch.setattr(module, "target_of", lambda device: "emulator:sm_80")
    experts = AdaptedExperts(packed[0], packed[1], gate, top_k=2)
    (kind,) = serving_startup.kinds(experts)
    kind.prepare(6)
    monkeypatch.setattr(expert_matmul, "load", refuse)
    x, weights, ids = tokens
    assert_close(experts(x, ids, weights), dense_answer(tokens, activation))

    class Adds:
        """Adds one number to each result."""

        def add_to_gate_up(self, h: Tensor) -> None:
            h += 0.5

        def add_to_down(self, a: Tensor, y: Tensor) -> None:
            assert a.shape == (12, INNER) and not y.any()
            y += 1

    w13, w2 = ([each.dequantize().float() for each in each_of(quantize_experts(w, None, U4))] for w in weights_of())
    expected = torch.full((6, HIDDEN), 2.0)
    for token, place in torch.cartesian_prod(torch.arange(6), torch.arange(2)).tolist():
        if 0 <= (expert := int(ids[token, place])) < EXPERTS:
            h = w13[expert] @ x[token].float() + 0.5
            halves = (h[0::2], h[1::2]) if gate.pairs else h.chunk(2)
            expected[token] += weights[token, place] * (w2[expert] @ TO_DENSE[activation](*halves))
    assert_close(experts(x, ids, weights, Adds()), expected)


def refuse(*_: Any, **__: Any) -> None:
    raise AssertionError("a kernel is loaded after the start")


def test_kernels_for_the_tokens_of_all_processes(methods: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where processes send their tokens, there are kernels for as many as they have together."""
    monkeypatch.setattr(serving_experts, "target_of", lambda device: "emulator:sm_90a")
    few, many, batched = (layer_of(methods, 0, 2, **parallel).lowbit.kernels for parallel in ({}, SENT, BATCHED))
    assert (few.sources, many.sources) == (1, 2)
    assert set(many.kernels(100)) == set(few.kernels(200)) > set(few.kernels(100))
    assert (batched.top_k, batched.sources) == (1, 4)  # of each of 2 processes a batch for each of 2 experts


def test_what_is_refused(methods: Any) -> None:
    with pytest.raises(SpecError, match="do not send tokens, as --all2all-backend moonep wants them to; drop the"):
        layer_of(methods, **SENT, all2all_backend="moonep")
    layer = layer_of(methods, **SENT, all2all_backend="deepep_high_throughput", columns=256)
    with pytest.raises(SpecError, match="high_throughput sends tokens of 256 numbers, and these have 64, which"):
        layer.quant_method.maybe_roundup_sizes(64, 128, torch.bfloat16, layer.moe_config.moe_parallel_config)
    layer = layer_of(methods, **SENT)
    assert layer.quant_method.maybe_roundup_sizes(64, 128, torch.bfloat16, layer.quant_method.parallel) == (64, 128)
    with pytest.raises(SpecError, match="made without adapters; start the server with --enable-lora"):
        layer.quant_method.moe_kernel.fused_experts.set_lora_context(context_of(slice(None), torch.zeros(1)))
    with_adapters(methods, ["q_proj", "v_proj"])
    assert type(layer_of(methods).lowbit) is Experts and layer_of(methods).quant_method.moe_kernel is None
    with_adapters(methods)
    layer = layer_of(methods, activation="swigluoai")
    with pytest.raises(SpecError, match="these experts' rows alternate; use adapters of gate_up_proj"):
        layer.quant_method.moe_kernel.fused_experts.set_lora_context(context_of(slice(None), torch.zeros(1)))
    packed = [quantize_experts(w, None, U4, g) for w, g in zip(weights_of(), (GATES["silu"], None))]
    with pytest.raises(SpecError, match="inputs of these experts are scaled, which adapters do not know of; name"):
        layer.quant_method._experts(layer, packed[0], packed[1], [ColumnScaling(torch.ones(64))])
