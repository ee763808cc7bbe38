"""`LowbitExperts` by one kernel for all experts of a matrix: in the emulator, and on a GPU."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from sweeps import swept
from torch import Tensor, nn

import lowbit
from lowbit import LowbitExperts, LowbitLinear, PackError, QuantConfig, SpecError
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.scheduling.expert_rule import tile_for, tiles_of
from lowbit.passes.targets import parse_target
from lowbit.pylib.experts.routing import route
from lowbit.pylib.nn import experts as experts_module
from lowbit.pylib.nn import stacked_experts
from lowbit.pylib.nn.gated_linear import GatedLinear, alternating
from lowbit.pylib.operator import expert_schema
from lowbit.pylib.reference import matmul, multiplied, random_inputs
from lowbit.pylib.runtime.expert_matmul import expert_matmul, spec_of_experts
from lowbit.pylib.runtime.quantizers import EmulatorQuantizer
from lowbit.pylib.weights.packed import pack

transformers = pytest.importorskip("transformers")

HIDDEN, WIDTH, EXPERTS = 64, 96, 5
U4 = QuantConfig("u4", 16, clip="max")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
"""Where the kernel runs: in the emulator, or on a GPU."""


def qwen3_moe() -> nn.Module:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    return Qwen3MoeExperts(
        transformers.Qwen3MoeConfig(hidden_size=HIDDEN, moe_intermediate_size=WIDTH, num_experts=EXPERTS)
    )


def mixtral() -> nn.Module:
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    return MixtralExperts(
        transformers.MixtralConfig(hidden_size=HIDDEN, intermediate_size=WIDTH, num_local_experts=EXPERTS)
    )


def gpt_oss() -> nn.Module:
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    return GptOssExperts(
        transformers.GptOssConfig(hidden_size=HIDDEN, intermediate_size=WIDTH, num_local_experts=EXPERTS)
    )


MODELS: dict[str, Callable[[], nn.Module]] = {"qwen3-moe": qwen3_moe, "mixtral": mixtral, "gpt-oss": gpt_oss}


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers on the CPU run in the emulator."""
    emulate("emulator:sm_80", monkeypatch)


ON_GPU = stacked_experts.target_of


def emulate(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def target_of(device: torch.device) -> str | None:
        return ON_GPU(device) if device.type == "cuda" else target

    for module in (stacked_experts, experts_module):
        monkeypatch.setattr(module, "target_of", target_of)


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def quantized(name: str = "qwen3-moe", config: Any = U4, device: str = "cpu") -> LowbitExperts:
    """Experts with random weights and biases."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"experts": MODELS[name]().to(torch.bfloat16)})
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    lowbit.quantize_(model, config, progress=False)
    found = model["experts"]
    assert isinstance(found, LowbitExperts)
    return found.to(device)


def call_of(tokens: int, k: int = 2, device: str = "cpu", seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """x, ids and weights of tokens; some ids are of no expert, and some are twice in a token."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, HIDDEN, generator=generator).bfloat16()
    ids = torch.randint(-1, EXPERTS + 1, (tokens, k), generator=generator)
    return x.to(device), ids.to(device), torch.rand(tokens, k, generator=generator).to(device)


def defined(experts: LowbitExperts, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """The sum of each token's experts in f64; what an expert's gate makes is rounded to the type of x. Both matrices
    multiply what x and that become in 8 bits, if they do."""
    dense: Any = experts._dense_class
    result = torch.zeros(len(x), HIDDEN, dtype=torch.float64)
    matrices = [[_dense(layer) for layer in layers] for layers in (experts.gate_up, experts.down)]
    x_seen = _seen(experts.gate_up[0], x)
    for (token, place), expert in ((at, int(ids[at])) for at in map(tuple, torch.ones_like(ids).nonzero().tolist())):
        if 0 <= expert < EXPERTS:
            (gate_up, first), (down, second) = (matrix[expert] for matrix in matrices)
            a = dense._apply_gate(experts, (gate_up @ x_seen[token] + first)[None])
            a_seen = _seen(experts.down[0], a.to(x.dtype))[0]
            result[token] += weights[token, place].double().cpu() * (down @ a_seen + second)
    return result


def _seen(layer: nn.Module, x: Tensor) -> Tensor:
    """x as a layer multiplies it."""
    assert isinstance(layer, LowbitLinear)
    return torch.from_numpy(multiplied(layer.spec, x.cpu()))


def _dense(layer: nn.Module) -> tuple[Tensor, Tensor]:
    assert isinstance(layer, LowbitLinear)
    weight = (layer.packed.folded() if layer.spec.folds else layer.packed.dequantize()).double().cpu()
    bias = layer.packed.unpack_tensor("bias").double().cpu() if layer.spec.bias else torch.zeros(len(weight)).double()
    pairs = isinstance(layer, GatedLinear) and layer.pairs
    return (alternating(weight), alternating(bias)) if pairs else (weight, bias)


def assert_right(found: Tensor, expected: Tensor) -> None:
    error, size = (found.double().cpu() - expected).abs().max(), expected.abs().max()
    assert found.shape == expected.shape and float(error) <= 0.015 * float(size)


def is_served(experts: LowbitExperts) -> bool:
    """Whether the last call ran all experts together."""
    return any(found.formats for found in experts._stacked.values())


# -- what is computed


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize("name", MODELS)
def test_the_sum_is_that_of_the_definition(name: str, tokens: int, device: str) -> None:
    experts, call = quantized(name, device=device), call_of(tokens, device=device)
    found = experts(*call)
    assert is_served(experts) and found.dtype is torch.bfloat16
    assert all(type(layer) is GatedLinear for layer in experts.gate_up)
    if tokens:
        assert_right(found, defined(experts, *call))


CONFIGS = {
    "zeros": QuantConfig("u4", 16, zeros="int", clip="max"),
    "offsets": QuantConfig("u3", 16, zeros="float", clip="max"),
    "table": QuantConfig("nf4", 16, clip="max"),
    "float": QuantConfig("f6e3m2", None, clip="max"),
    "byte": QuantConfig("i8", 16, clip="max"),
    "power-of-two": QuantConfig("f4e2m1", 16, scale="e8m0", clip="max"),
    "two-levels": QuantConfig.preset("nvfp4"),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("config", CONFIGS)
def test_every_kind_of_weight(config: str, device: str) -> None:
    experts, call = quantized("gpt-oss", CONFIGS[config], device), call_of(5, device=device)
    found = experts(*call)
    assert is_served(experts)
    assert_right(found, defined(experts, *call))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("expert", [0, EXPERTS - 1, EXPERTS, -1])
def test_all_tokens_to_one_expert(expert: int, device: str) -> None:
    """Which has several token tiles then, and the others have none; or no expert at all has a token."""
    experts, (x, ids, weights) = quantized(device=device), call_of(23, device=device)
    ids.fill_(expert)
    assert_right(experts(x, ids, weights), defined(experts, x, ids, weights))


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_not_finite_stays_in_its_token(device: str) -> None:
    experts, (x, ids, weights) = quantized(device=device), call_of(9, device=device)
    ids.clamp_(0, EXPERTS - 1)
    expected = experts(x, ids, weights)
    x[4] = torch.nan
    x[7, 3] = torch.inf
    found, others = experts(x, ids, weights), [token for token in range(9) if token not in (4, 7)]
    assert torch.equal(found[others], expected[others])
    assert found[4].isnan().all() and not found[7].isfinite().all()


@pytest.mark.parametrize("tokens", [2, 40])
@pytest.mark.parametrize("device", DEVICES)
def test_a_token_has_the_same_result_among_others(device: str, tokens: int) -> None:
    """Whatever the others are, and wherever they go."""
    experts, (x, ids, weights) = quantized(device=device), call_of(tokens, device=device)
    whole = experts(x, ids, weights)
    others, elsewhere, _ = call_of(tokens, seed=1, device=device)
    for token in (0, tokens // 3, tokens - 1):
        here = torch.arange(tokens, device=device)[:, None] == token
        found = experts(torch.where(here, x, others), torch.where(here, ids, elsewhere), weights)
        assert torch.equal(found[token], whole[token])


@pytest.mark.parametrize("device", DEVICES)
def test_compiled(device: str) -> None:
    """The weights are stacked while torch.compile traces the first call."""
    torch._dynamo.reset()
    experts = quantized(device=device)
    compiled = torch.compile(experts, fullgraph=True, dynamic=True, backend="eager" if device == "cpu" else "inductor")
    for tokens in (3, 6):
        call = call_of(tokens, device=device)
        found = compiled(*call)
        assert is_served(experts)
        assert_right(found, defined(experts, *call))
        torch.testing.assert_close(found, experts(*call), rtol=0.02, atol=0.02 * float(found.abs().max()))


@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize("name", MODELS)
def test_on_a_cpu(name: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each expert with slots runs the program of its slice of the weight, whether torch.compile traces or not."""
    emulate("cpu", monkeypatch)
    experts, call = quantized(name), call_of(tokens)
    call[1].clamp_(-1, EXPERTS)
    found = experts(*call)
    assert is_served(experts)
    if tokens:
        assert_right(found, defined(experts, *call))
    torch._dynamo.reset()
    compiled = torch.compile(experts, fullgraph=True, dynamic=True, backend="eager")
    assert torch.equal(compiled(*call), found)


def test_another_model_that_is_not_loaded_yet_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one is traced, the experts of all are stacked; but not of scales that are no numbers."""
    emulate("cpu", monkeypatch)
    experts, other, call = quantized(), quantized(), call_of(5)
    found, scales = experts(*call), [layer.scales.clone() for layer in other.gate_up]
    for layer in other.gate_up:
        layer.scales.fill_(torch.nan)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(experts, fullgraph=True, backend="eager")(*call), found)
    assert not other._is_stacked() and not any(isinstance(layer, GatedLinear) for layer in other.gate_up)
    for layer, loaded in zip(other.gate_up, scales):
        layer.scales.copy_(loaded)
    assert torch.equal(other(*call), found)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("target", ["emulator:sm_80", "cpu"])
def test_exported(target: str, strict: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every expert runs on every token, with the tensors of the layers, whether they have been called or not."""
    emulate(target, monkeypatch)
    experts, call = quantized(), call_of(4)
    call[1].remainder_(EXPERTS)
    programs = [torch.export.export(experts, call, strict=strict)]
    expected = experts(*call)
    programs.append(torch.export.export(experts, call, strict=strict))
    for program in programs:
        found = program.module()(*call)
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02 * float(expected.abs().max()))
        assert not program.constants and len(program.state_dict) == len(experts.state_dict()) - 2 * EXPERTS


CPU_CONFIGS = {
    **CONFIGS,
    "differences": QuantConfig("u8", 32, zeros="int", clip="max", compute="i8"),
    "bytes": QuantConfig("u4", 32, clip="max", compute="i8"),
    "folded": QuantConfig("nf4", 16, clip="max", compute="f8e4m3", fold_scales=True),
    "folded in i8": QuantConfig("nf4", 16, clip="max", compute="i8", fold_scales=True),
}


@pytest.mark.parametrize("config", CPU_CONFIGS)
def test_every_kind_of_weight_on_a_cpu(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate("cpu", monkeypatch)
    experts, call = quantized("gpt-oss", CPU_CONFIGS[config]), call_of(5)
    found = experts(*call)
    assert is_served(experts)
    assert_right(found, defined(experts, *call))


def test_torch_traces_one_operator() -> None:
    """None of the dozens of operations of routing in torch, and nothing that depends on the number of tokens."""
    seen: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.extend(node for node in graph.graph.nodes if node.op == "call_function")
        return graph

    torch._dynamo.reset()
    torch.compile(quantized(), fullgraph=True, backend=backend)(*call_of(5))
    launches = [node.target.__name__ for node in seen if str(node.target).startswith("lowbit.")]
    assert [name.split(".")[0] for name in launches] == ["sum_of_experts"]
    assert not any(name in str(node.target) for node in seen for name in ("sort", "cumsum", "index"))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 9, 65, 513])
def test_a_graph_is_right_for_any_routing(tokens: int) -> None:
    experts, (x, ids, weights) = quantized(device="cuda"), call_of(tokens, device="cuda")
    eager = experts(x, ids, weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = experts(x, ids, weights)
    graph.replay()
    assert torch.equal(y, eager)
    for seed in range(1, 6):
        for tensor, new in zip((x, ids, weights), call_of(tokens, device="cuda", seed=seed)):
            tensor.copy_(new if seed < 5 else torch.ones_like(new))  # all tokens to one expert at the end
        graph.replay()
        assert torch.equal(y, experts(x, ids, weights))
        assert_right(y, defined(experts, x, ids, weights))


@pytest.mark.gpu
def test_a_call_waits_for_nothing() -> None:
    experts, call = quantized(device="cuda"), call_of(9, device="cuda")
    experts(*call)
    torch.cuda.set_sync_debug_mode("error")
    try:
        experts(*call)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# -- columns in the order of each expert


def with_orders(experts: LowbitExperts) -> LowbitExperts:
    """Experts whose columns are stored in an order of their own each, as GPTQ's act-order has them."""
    for layers in (experts.gate_up, experts.down):
        for expert, layer in enumerate(layers):
            assert isinstance(layer, LowbitLinear)
            generator = torch.Generator().manual_seed(expert)
            given = {slot.name: layer.packed.unpack_tensor(slot.name) for slot in layer.spec.given_tensors}
            order = torch.randperm(layer.spec.k, generator=generator).to(layer.codes.device)
            packed = pack(replace(layer.spec, permuted=True), **given, permutation=order)
            layers[expert] = LowbitLinear.from_packed(packed.to(layer.codes.device))
    return experts


@pytest.mark.parametrize("tokens", [0, 1, 7, 65])
@pytest.mark.parametrize("device", [*DEVICES, "program"])
def test_every_expert_has_its_own_order(device: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the emulator, on a GPU, and by the programs of a CPU."""
    if device == "program":
        emulate("cpu", monkeypatch)
    device = "cpu" if device == "program" else device
    experts, (x, ids, weights) = with_orders(quantized("gpt-oss", device=device)), call_of(tokens, device=device)
    ids.clamp_(-1, EXPERTS)
    found = experts(x, ids, weights)
    assert is_served(experts) and all(layer.spec.permuted for layer in experts.gate_up)
    if tokens:
        assert_right(found, defined(experts, x, ids, weights))


@pytest.mark.parametrize("config", ["offsets", "table", "two-levels"])
@pytest.mark.parametrize("target", ["emulator:sm_90a", "cpu"])
def test_orders_with_other_kinds_of_weights(target: str, config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(target, monkeypatch)
    experts, call = with_orders(quantized(config=CONFIGS[config])), call_of(9)
    found = experts(*call)
    assert is_served(experts)
    assert_right(found, defined(experts, *call))


class Block(nn.Module):
    """A model of experts alone."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return self.experts(x, ids, weights)


@pytest.mark.parametrize("act_order", [False, True])
def test_orders_of_a_quantizer(act_order: bool) -> None:
    """SpQR rounds columns of each expert in its own order, and stores them in it."""
    calibration = [torch.randn(64, HIDDEN).bfloat16() for _ in range(2)]
    config = QuantConfig("u3", 16, method="spqr", outlier_threshold=None, act_order=act_order)
    model = Block(qwen3_moe().to(torch.bfloat16))
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    ids = torch.arange(128).reshape(64, 2) % EXPERTS
    calls = [(x, ids, torch.rand(64, 2)) for x in calibration]
    lowbit.quantize_(model, config, calibration=calls, progress=False)
    experts, call = model.experts, call_of(9)
    assert isinstance(experts, LowbitExperts)
    found, layers = experts(*call), list(experts.gate_up)
    assert is_served(experts) and all(layer.spec.permuted == act_order for layer in layers)
    assert_right(found, defined(experts, *call))


def test_orders_are_saved_and_loaded(tmp_path: Path) -> None:
    experts, call = with_orders(quantized()), call_of(9)
    expected = experts(*call)
    save_file(experts.state_dict(), tmp_path / "experts.safetensors")
    empty = with_orders(quantized(config=QuantConfig("u4", 16, clip="mse")))
    assert not torch.equal(empty(*call), expected)
    empty.load_state_dict(load_file(tmp_path / "experts.safetensors"))
    assert torch.equal(empty(*call), expected)
    assert torch.equal(pickle.loads(pickle.dumps(experts))(*call), expected)


def test_torch_traces_orders() -> None:
    torch._dynamo.reset()
    experts, call = with_orders(quantized()), call_of(5)
    found = torch.compile(experts, fullgraph=True, backend="eager")(*call)
    assert is_served(experts) and torch.equal(found, experts(*call))


@pytest.mark.gpu
def test_a_graph_with_orders_is_right_for_any_routing() -> None:
    experts, (x, ids, weights) = with_orders(quantized(device="cuda")), call_of(65, device="cuda")
    experts(x, ids, weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = experts(x, ids, weights)
    for seed in range(1, 4):
        for tensor, new in zip((x, ids, weights), call_of(65, device="cuda", seed=seed)):
            tensor.copy_(new)
        graph.replay()
        assert torch.equal(y, experts(x, ids, weights))
        assert_right(y, defined(experts, x, ids, weights))


# -- in 8 bits

I8, FP8 = {"compute": "i8"}, {"compute": "f8e4m3"}
BYTES: dict[str, tuple[str, Any, str]] = {
    "integers": ("qwen3-moe", QuantConfig("u4", 32, zeros="int", clip="max", **I8), "emulator:sm_80"),
    "one scale": ("gpt-oss", QuantConfig("i8", None, clip="max", **I8), "emulator:sm_90a"),
    "floats": ("mixtral", QuantConfig("f4e2m1", 32, clip="max", **FP8), "emulator:sm_89"),
    "folded": ("gpt-oss", QuantConfig("nf4", 16, clip="max", fold_scales=True, **FP8), "emulator:sm_89"),
}


@pytest.mark.parametrize("case", BYTES)
def test_in_eight_bits(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, config, target = BYTES[case]
    emulate(target, monkeypatch)
    experts, call = quantized(name, config), call_of(7)
    found = experts(*call)
    assert is_served(experts) and all(type(layer) is GatedLinear for layer in experts.gate_up)
    assert_right(found, defined(experts, *call))


@pytest.mark.gpu
@pytest.mark.parametrize("case", BYTES)
def test_in_eight_bits_on_a_gpu(case: str) -> None:
    name, config, _ = BYTES[case]
    for tokens in (1, 7, 300):
        experts, call = quantized(name, config, "cuda"), call_of(tokens, device="cuda")
        found = experts(*call)
        assert is_served(experts)
        assert_right(found, defined(experts, *call))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = experts(*call)
        graph.replay()
        assert torch.equal(y, found)


def test_tokens_are_quantized_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before they are gathered: 7 rows of x for 14 slots, and a row of each slot for down."""
    quantize, seen = EmulatorQuantizer.__call__, []

    def noted(self: EmulatorQuantizer, x: Tensor) -> Any:
        seen.append([*x.shape])
        return quantize(self, x)

    monkeypatch.setattr(EmulatorQuantizer, "__call__", noted)
    quantized(config=BYTES["integers"][1])(*call_of(7))
    assert seen == [[7, HIDDEN], [14, WIDTH]]


def test_another_type_of_products_is_noticed() -> None:
    """Codes stay as they are, and so do the tensors of all experts."""
    experts, call = quantized(config=replace(BYTES["integers"][1], compute=None)), call_of(8)
    before = experts(*call)
    assert lowbit.set_compute_(experts, "i8") == {}
    found = experts(*call)
    assert is_served(experts) and not torch.equal(found, before)
    assert_right(found, defined(experts, *call))
    assert lowbit.set_compute_(experts, None) == {}
    assert torch.equal(experts(*call), before) and is_served(experts)


@pytest.mark.parametrize("target", ["emulator:sm_80", "cpu"])
@pytest.mark.parametrize(("tokens", "compute"), [(7, None), (8, "i8")])
def test_few_slots_are_multiplied_in_their_own_type(
    tokens: int, compute: Any, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """14 slots of 5 experts are less than 3 for each, 16 are more."""
    emulate(target, monkeypatch)
    config = BYTES["integers"][1]
    mixed, call = quantized(config=replace(config, compute_from=3)), call_of(tokens)
    assert torch.equal(mixed(*call), quantized(config=replace(config, compute=compute))(*call)) and is_served(mixed)


def test_in_eight_bits_compiled() -> None:
    experts, call = quantized(config=BYTES["integers"][1]), call_of(6)
    expected = experts(*call)
    compiled = torch.compile(experts, fullgraph=True, dynamic=True, backend="eager")
    torch.testing.assert_close(compiled(*call), expected, rtol=0.02, atol=0.02 * float(expected.abs().max()))


# -- one weight


@pytest.mark.parametrize("device", DEVICES)
def test_layers_are_slices_of_one_weight(device: str) -> None:
    experts, call = quantized("gpt-oss", device=device), call_of(3, device=device)
    before = {name: tensor.clone() for name, tensor in experts.state_dict().items()}
    experts(*call)
    after = experts.state_dict()
    assert list(before) == list(after)
    assert all(torch.equal(before[name], after[name]) for name in before if name.startswith("down"))
    for layers in (experts.gate_up, experts.down):
        first = layers[0]
        assert isinstance(first, LowbitLinear)
        for slot in first.spec.tensors:
            storages = {getattr(layer, slot.name).untyped_storage().data_ptr() for layer in layers}
            assert len(storages) == 1, slot.name
    found = dict(experts._stacked)
    experts(*call)
    assert experts._stacked == found  # nothing was stacked again


def _copied(experts: LowbitExperts) -> LowbitExperts:
    return copy.deepcopy(experts)


def _loaded(experts: LowbitExperts, assign: bool = False) -> LowbitExperts:
    """Others of the same specs, which are stacked before the weights are loaded."""
    state = {name: tensor.clone() for name, tensor in experts.state_dict().items()}
    specs = [layer.spec for layer in (experts.gate_up[0], experts.down[0]) if isinstance(layer, LowbitLinear)]
    other = LowbitExperts.empty_like(MODELS["qwen3-moe"](), specs)
    other(*call_of(3))
    other.load_state_dict(state, assign=assign)
    return other


def _assigned(experts: LowbitExperts) -> LowbitExperts:
    return _loaded(experts, assign=True)


def _held(experts: LowbitExperts) -> LowbitExperts:
    """Another weight in place of one expert's."""
    first, second = experts.down[1], experts.down[2]
    assert isinstance(first, LowbitLinear) and isinstance(second, LowbitLinear)
    first.hold(second.packed)
    return experts


def _replaced(experts: LowbitExperts) -> LowbitExperts:
    """Another layer in place of one expert's."""
    experts.down[1] = experts.down[2]
    return experts


def _listed(experts: LowbitExperts) -> LowbitExperts:
    """Another list in place of one."""
    experts.down = nn.ModuleList([experts.down[2], *experts.down[1:]])
    return experts


def _put(experts: LowbitExperts) -> LowbitExperts:
    """Other buffers in the dictionary itself, as torch and others put them there."""
    first, second = experts.down[1], experts.down[2]
    for name, buffer in list(second._buffers.items()):
        first._buffers[name] = buffer
    return experts


@pytest.mark.parametrize("change", [_copied, _loaded, _assigned, _held, _replaced, _listed, _put])
def test_other_tensors_are_noticed(change: Callable[[LowbitExperts], LowbitExperts]) -> None:
    experts, call = quantized(), call_of(8)
    experts(*call)
    changed = change(experts)
    for _ in range(2):
        assert_right(changed(*call), defined(changed, *call))
        assert is_served(changed)


def test_a_call_with_other_tensors_leaves_those_of_the_module() -> None:
    experts, call = quantized(), call_of(8)
    expected = experts(*call)
    other = {name: tensor.clone() for name, tensor in experts.named_buffers()}
    other["down.1.codes"] = other["down.2.codes"].clone()
    found = torch.func.functional_call(experts, other, call)
    assert torch.equal(experts(*call), expected) and not torch.equal(found, expected)
    _put_codes(experts)
    assert_right(found, defined(experts, *call))


def _put_codes(experts: LowbitExperts) -> None:
    experts.down[1].codes = experts.down[2].codes.clone()


def test_hooks_that_come_and_go_are_noticed() -> None:
    experts, call, seen = quantized(), call_of(6), list[Tensor]()
    expected = experts(*call)
    handle = experts.down[int(call[1][call[1] >= 0][0]) % EXPERTS].register_forward_hook(
        lambda layer, inputs, y: seen.append(y)
    )
    experts(*call)
    assert seen and not is_served(experts)
    handle.remove()
    seen.clear()
    assert torch.equal(experts(*call), expected) and not seen and is_served(experts)


def test_layers_are_looked_at_after_changes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of any layer: hundreds of layers are looked at in a call, which is done where it may be of use."""
    experts, call, looked = quantized(), call_of(3), list[int]()
    look = stacked_experts._modules_of
    monkeypatch.setattr(stacked_experts, "_modules_of", lambda lists: looked.append(1) or look(lists))
    experts(*call)
    for change in (None, "spec", "codes", "_buffers", None):
        layer = experts.gate_up[1]
        if change in ("spec", "codes"):
            setattr(layer, change, getattr(layer, change))
        elif change:
            layer._buffers["codes"] = layer._buffers["codes"]
        looked.clear()
        experts(*call)
        assert len(looked) == (1 if change else 0), change
        looked.clear()
        experts(*call)
        assert not looked


def test_codes_that_were_written_to_are_refused() -> None:
    experts, call = quantized(), call_of(3)
    experts(*call)
    experts.gate_up[2].get_buffer("codes").add_(1)
    with pytest.raises(PackError, match="written to"):
        experts(*call)


# -- experts elsewhere


def test_token_tiles_follow_from_all_experts_that_ids_are_spread_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 100 slots of 5 experts, one that has a format of its own has 20 or so, and not 100."""
    found, tile_for = list[int](), expert_schema.tile_for
    monkeypatch.setattr(expert_schema, "tile_for", lambda *given: found.append(given[2]) or tile_for(*given))
    monkeypatch.setattr(expert_schema, "run_of", expert_schema.run_of.__wrapped__)
    experts, call = quantized(), call_of(50)
    experts(*call)
    _of_two_formats(experts)
    experts(*call)
    assert found == [EXPERTS] * 3


# -- several formats


FORMATS: dict[str, tuple[Any, ...]] = {
    "one expert has another width": (U4, QuantConfig("u5", 16, clip="max")),
    "three kinds, of which one is in 8 bits": (U4, QuantConfig("f6e3m2", 32), QuantConfig("i4", 32, **I8)),
}


def of_formats(name: str, formats: tuple[Any, ...], device: str = "cpu") -> LowbitExperts:
    """Experts that take turns with formats, the last of which one expert alone has."""
    experts = quantized(name, formats[0], device)
    for number, config in enumerate(formats[1:], start=1):
        other = quantized(name, config, device)
        for expert in range(number, EXPERTS if config is not formats[-1] else number + 1, len(formats)):
            experts.gate_up[expert], experts.down[expert] = other.gate_up[expert], other.down[expert]
    return experts


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "formats", "tokens"), swept(product(("qwen3-moe", "gpt-oss"), FORMATS, (1, 9, 70)))
)
def test_experts_of_several_formats(name: str, formats: str, tokens: int, device: str) -> None:
    """Each format has launches of its own, and graphs may hold them: nothing waits for the device."""
    experts, call = of_formats(name, FORMATS[formats], device), call_of(tokens, device=device)
    expected = defined_by_format(experts, *call)
    found = experts(*call)
    assert is_served(experts) and len(experts._stacked[False].formats) == len(FORMATS[formats])
    assert_right(found, expected)


def defined_by_format(experts: LowbitExperts, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """`defined`, of experts that may multiply other numbers each."""
    total = torch.zeros(len(x), HIDDEN, dtype=torch.float64)
    for expert in range(EXPERTS):
        alone = copy.copy(experts)
        alone._modules = {**experts._modules}
        for matrix in ("gate_up", "down"):
            alone._modules[matrix] = nn.ModuleList([getattr(experts, matrix)[expert]] * EXPERTS)
        total += defined(alone, x, torch.where(ids == expert, ids, -1), weights)
    return total


def test_a_format_comes_and_goes() -> None:
    experts, call = quantized(), call_of(8)
    before, layer = experts(*call), experts.down[1]
    _of_two_formats(experts)
    assert_right(experts(*call), defined(experts, *call))
    assert len(experts._stacked[False].formats) == 2
    experts.down[1] = layer
    assert torch.equal(experts(*call), before) and len(experts._stacked[False].formats) == 1


def test_compiled_with_several_formats() -> None:
    experts, call = quantized(), call_of(6)
    _of_two_formats(experts)
    torch._dynamo.reset()
    compiled = torch.compile(experts, fullgraph=True, dynamic=True, backend="eager")
    assert torch.equal(compiled(*call), experts(*call)) and is_served(experts)


# -- what is not served


def _of_two_formats(experts: LowbitExperts) -> None:
    experts.down[1] = quantized(config=QuantConfig("u5", 16, clip="max")).down[1]


def _hooked(experts: LowbitExperts) -> None:
    experts.gate_up[0].register_forward_hook(lambda *_: None)


def _wrapped(experts: LowbitExperts) -> None:
    experts.gate_up[0] = nn.Sequential(experts.gate_up[0])


def test_differences_that_are_no_bytes_are_served() -> None:
    """Those of codes of 8 bits and integer zeros, for which sums of x make up."""
    experts, call = quantized(config=QuantConfig("u8", 32, zeros="int", clip="max", **I8)), call_of(6)
    call[1].remainder_(EXPERTS)
    found, expected = experts(*call), defined(experts, *call)
    assert is_served(experts)
    torch.testing.assert_close(found.double(), expected, rtol=0.02, atol=0.02 * float(expected.abs().max()))


@pytest.mark.parametrize("change", [_hooked, _wrapped])
def test_other_experts_run_one_by_one(change: Callable[[LowbitExperts], None]) -> None:
    experts, call = quantized(), call_of(6)
    call[1].remainder_(EXPERTS)
    expected = experts(*call)
    change(experts)
    found = experts(*call)
    assert not is_served(experts)
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02 * float(found.abs().max()))


def test_more_formats_than_have_launches_run_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacked_experts, "_MOST_FORMATS", 1)
    experts, call = quantized(), call_of(6)
    call[1].remainder_(EXPERTS)
    _of_two_formats(experts)
    assert_right(experts(*call), defined(experts, *call))
    assert not is_served(experts)


def test_every_expert_runs_where_nothing_can_be_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that no kernel serves together."""
    monkeypatch.setattr(stacked_experts, "_MOST_FORMATS", 1)
    experts, call = quantized(), call_of(6)
    call[1].remainder_(EXPERTS)
    _of_two_formats(experts)
    torch._dynamo.reset()
    compiled = torch.compile(experts, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(*call), experts(*call), rtol=0.02, atol=0.01)
    assert not is_served(experts)


def test_gradients_go_through_each_expert() -> None:
    experts, (x, ids, weights) = quantized(), call_of(6)
    ids.remainder_(EXPERTS)
    with torch.enable_grad():
        experts(x.requires_grad_(), ids, weights).sum().backward()
    assert x.grad is not None and x.grad.any() and not experts._stacked


def test_slices_of_one_weight_are_saved_as_they_were(tmp_path: Path) -> None:
    """safetensors refuses tensors that share bytes; those of experts share a storage alone."""
    experts, path = quantized(), tmp_path / "experts.safetensors"
    expected = experts(*call_of(3))
    assert is_served(experts)
    save_file(experts.state_dict(), path)
    state, (gate_up, down) = load_file(path), (layers[0].spec for layers in (experts.gate_up, experts.down))
    assert all(torch.equal(tensor, state[name]) for name, tensor in experts.state_dict().items())
    for spec in (gate_up, replace(gate_up, epilogue=None)):
        other = LowbitExperts.empty_like(MODELS["qwen3-moe"](), [spec, down])
        other.load_state_dict(state)
        assert torch.equal(other(*call_of(3)), expected)


@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss"])
@pytest.mark.parametrize("assign", [False, True])
def test_rows_in_another_order_are_loaded(name: str, assign: bool) -> None:
    """A state from before the first call, loaded after it, and one from after it before; on meta, too."""
    experts, call = quantized(name), call_of(5)
    plain = copy.deepcopy(experts.state_dict())
    expected = experts(*call)
    gated = copy.deepcopy(experts.state_dict())
    for one, state in ((experts, plain), (quantized(name), gated), (quantized(name).to("meta"), gated)):
        if assign or not one.gate_up[0].codes.is_meta:
            one.load_state_dict(state, assign=assign)
            is_gated = state is gated
            assert all(layer.spec.is_gated == is_gated for layer in one.gate_up)
            assert torch.equal(one(*call), expected)


@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss"])
@pytest.mark.parametrize("layers", ["gate_up", "down"])
def test_one_experts_state_takes_the_place_of_anothers(name: str, layers: str, tmp_path: Path) -> None:
    """Saved without the tensors of the others, of which it is a slice. Experts that were stacked notice."""
    experts, call = quantized(name), call_of(8)
    experts(*call)
    first, second = (getattr(experts, layers)[number] for number in (1, 2))
    torch.save({key: tensor.clone() for key, tensor in first.state_dict().items()}, tmp_path / "expert.pt")
    assert (tmp_path / "expert.pt").stat().st_size < 4096 + 1.5 * first.packed.nbytes
    second.load_state_dict(torch.load(tmp_path / "expert.pt"))
    assert torch.equal(second.weight.clone(), first.weight.clone())
    assert_right(experts(*call), defined(experts, *call))
    assert is_served(experts)


@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss"])
def test_a_gated_layer_is_what_it_was(name: str) -> None:
    experts, x = quantized(name), call_of(6)[0]
    before, h = experts.gate_up[1].weight.clone(), experts.gate_up[1](x)
    one = experts.expert(1, x)
    experts(*call_of(6))
    layer = experts.gate_up[1]
    assert isinstance(layer, GatedLinear) and layer.out_features == 2 * WIDTH
    assert torch.equal(layer.weight.clone(), before) and torch.equal(layer(x), h)
    torch.testing.assert_close(layer.to_linear()(x), h, rtol=0.02, atol=0.02 * float(h.abs().max()))
    torch.testing.assert_close(experts.expert(1, x), one, rtol=0.02, atol=0.02 * float(one.abs().max()))
    assert torch.equal(pickle.loads(pickle.dumps(layer)).gated(x), layer.gated(x))


def _of_erf(h: Tensor) -> Tensor:
    gate, up = h.chunk(2, dim=-1)
    return nn.functional.gelu(gate) * up


def _within_ten(h: Tensor) -> Tensor:
    gate, up = h.chunk(2, dim=-1)
    return nn.functional.silu(gate.clamp(max=10.0)) * up.clamp(-10.0, 10.0)


@pytest.mark.parametrize("gate", [_of_erf, _within_ten])
def test_other_gates_are_applied_by_torch(gate: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    experts, call = quantized(), call_of(6)
    monkeypatch.setattr(experts._dense_class, "_apply_gate", lambda _, h: gate(h))
    found = experts(*call)
    assert is_served(experts) and not any(isinstance(layer, GatedLinear) for layer in experts.gate_up)
    assert_right(found, defined(experts, *call))


# -- the matmul of experts


@pytest.mark.parametrize(
    ("slots", "tile"), [(1, 8), (20, 8), (44, 16), (45, 32), (400, 64), (401, 192), (600, 192), (800, 128), (9999, 192)]
)
def test_a_token_tile_holds_more_than_the_mean(slots: int, tile: int) -> None:
    assert tile_for((8, 16, 32, 64, 128, 192), slots, experts=4) == tile
    assert tile_for((16, 32), slots, experts=4) == max(16, min(tile, 32))


@pytest.mark.parametrize(
    ("slots", "tile"),
    [(20, 8), (44, 16), (168, 32), (224, 64), (300, 96), (420, 128), (720, 192), (721, 256), (9999, 256)],
)
def test_large_tiles_where_short_ones_are_cheaper(slots: int, tile: int) -> None:
    folded = MatmulSpec(4 * 64, 2048, "nf4", 128, compute="f8e4m3", fold_scales=True, experts=4)
    tiles = tiles_of(folded, parse_target("sm_90a"))
    assert tile_for((8, *tiles), slots, experts=4) == tile


@pytest.mark.parametrize("choices", [{}, {"compute": "f8e4m3"}], ids=str)
@pytest.mark.parametrize("in_order", [False, True])
def test_rows_for_wgmma_are_written_in_order(choices: dict[str, Any], in_order: bool) -> None:
    """A launch gathers them, unless they are in the order of slots as they are. Both give what a list would."""
    spec = MatmulSpec(3 * 32, 256, "u4", 64, act="bf16", experts=3, **choices)
    mm = expert_matmul(spec, parse_target("emulator:sm_90a"))
    x, tensors = random_inputs(replace(spec, experts=1), 40)
    ids = torch.arange(40).view(40, 1) * 7 % 3
    routing, weight = route(ids, 3, 128), pack(spec, **tensors).tensors
    if in_order:
        x, rows = x[routing.rows.long()], routing.numbers
    else:
        rows = routing.rows
    y = mm(x, rows, routing.tiles, weight, 128, in_order)
    assert not cast(Any, mm.kernel(128, 40).schedule).gather
    right = matmul(replace(spec, experts=1), x, **tensors)
    expert = ids.flatten().sort().values
    columns = expert[:, None] * spec.outputs + torch.arange(spec.outputs)
    expected = torch.from_numpy(right)[rows.long()].gather(1, columns)
    assert torch.allclose(y.double(), expected, rtol=0.02, atol=0.02 * float(expected.abs().max()))


def matmul_of_experts() -> Any:
    spec = spec_of_experts(MatmulSpec(32, 64, "u4", 32, act="bf16"), 3)
    return expert_matmul(spec, parse_target("emulator:sm_80"))


@pytest.mark.parametrize(
    ("x", "tile", "message"),
    [
        (torch.zeros(2, 64), 16, r"x must be torch.bfloat16 \[rows, k=64\], not torch.float32 \[2, 64\]"),
        (torch.zeros(2, 32).bfloat16(), 16, r"not torch.bfloat16 \[2, 32\]"),
        (torch.zeros(2, 64).bfloat16(), 17, "tile=17 must be one of 8, 16, 32"),
    ],
)
def test_call_that_does_not_fit(x: Tensor, tile: int, message: str) -> None:
    routing = route(torch.zeros(2, 1, dtype=torch.int64), 3, 16)
    with pytest.raises(SpecError, match=message):
        matmul_of_experts()(x, routing.rows, routing.tiles, [], tile)


def test_specs_that_no_kernel_serves() -> None:
    spec = spec_of_experts(MatmulSpec(32, 64, "u4", 32), 3)
    with pytest.raises(SpecError, match="needs n=72"):
        spec_of_experts(replace(spec, n=24, experts=1), 3)
