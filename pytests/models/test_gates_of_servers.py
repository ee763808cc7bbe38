"""An activation behind a layer of a server goes into the layer's kernel, where that computes what the network does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

import lowbit
from lowbit import QuantConfig
from lowbit.pylib.integrations.serving.gates import activation_behind
from lowbit.pylib.integrations.serving.names import parameter
from lowbit.pylib.integrations.serving.rows import Source, opened, quantize_rows
from pytests.models import fake_vllm

HIDDEN, INNER = 64, 64
U4 = QuantConfig("u4", 64)


class SiluAndMul(nn.Module):
    """vLLM's, whose forward is another on a GPU."""

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError("a kernel of a GPU")

    @staticmethod
    def forward_native(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up


class GeluAndMul(nn.Module):
    """Gemma's."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return F.gelu(gate, approximate="tanh") * up


class Clamped(nn.Module):
    """An activation that no kernel has."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate).clamp(max=3) * up


class Raises(nn.Module):
    """A kernel that takes no such numbers."""

    def forward(self, x: Tensor) -> Tensor:
        raise ValueError(x.shape)


class Down(nn.Module):
    quant_method = None

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return x * 2, None


class Network(nn.Module):
    """As vLLM's networks are: layers give their result and a bias."""

    def __init__(self, gate_up: nn.Module, act_fn: nn.Module) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj, self.act_fn = gate_up, Down(), act_fn
        self.expert_gate = Down()

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.gate_up_proj(x)
        x = self.act_fn(x)
        x, _ = self.down_proj(x)
        return x


class Weighted(Network):
    """As vLLM's Qwen2MoeMLP."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.down_proj(self.act_fn(self.gate_up_proj(x)[0]))[0]
        return torch.sigmoid(self.expert_gate(x)[0]) * y


class AddsBefore(Network):
    """As vLLM's Zamba2, whose adapters add to what the layer gives."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_up_proj(x)[0] + x))[0]


class AddsBehind(Network):
    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.gate_up_proj(x)
        return self.down_proj(self.act_fn(h))[0] + h[..., : x.shape[-1]]


class Halves(Network):
    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x)[0].chunk(2, -1)
        return self.down_proj(self.act_fn(torch.cat([gate, up], -1)))[0]


class Scaled(Network):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_up_proj(x)[0]) * 2)[0]


class Twice(Network):
    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.gate_up_proj(x)
        return self.down_proj(self.act_fn(h))[0] + self.down_proj(self.act_fn(h))[0]


class AlsoOfAnother(Network):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_up_proj(x)[0]))[0] + self.act_fn(self.expert_gate(x)[0])


class GivesMore(Network):
    def forward(self, x: Tensor) -> Any:
        h, _ = self.gate_up_proj(x)
        return self.down_proj(self.act_fn(h))[0], h


class Asks(Network):
    """Does what it does by more than x."""

    def forward(self, x: Tensor, scale: float | None = None) -> Tensor:  # type: ignore[override]
        h = self.gate_up_proj(x)[0]
        return self.down_proj(self.act_fn(h if scale is None else h * scale))[0]


class Without(Network):
    """As vLLM's OPT: nothing is between the layers."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.gate_up_proj(x)[0])[0]


@pytest.mark.parametrize("kind", [Network, Weighted])
def test_an_activation_is_found(kind: type[Network]) -> None:
    network = kind(Down(), SiluAndMul())
    assert activation_behind(network, network.gate_up_proj) is network.act_fn
    assert activation_behind(network, network.down_proj) is None


@pytest.mark.parametrize(
    "kind", [AddsBefore, AddsBehind, Halves, Scaled, Twice, AlsoOfAnother, GivesMore, Asks, Without]
)
def test_another_way_to_the_activation_is_not(kind: type[Network]) -> None:
    network = kind(Down(), SiluAndMul())
    assert activation_behind(network, network.gate_up_proj) is None


def test_a_forward_of_one_network_is_not_looked_into() -> None:
    network = Network(Down(), SiluAndMul())
    network.forward = lambda x: x  # type: ignore[method-assign]
    assert activation_behind(network, network.gate_up_proj) is None


# -- in vLLM


class Plain(Network):
    """A network of layers that give no bias beside their result."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_up_proj(x)))[0]


@pytest.fixture
def methods() -> Iterator[Any]:
    with fake_vllm.installed() as found:
        yield found


def layer_of(methods: Any, configs: Sequence[QuantConfig] = (U4, U4), **about: Any) -> fake_vllm.Linear:
    method = methods.OnLoadLinear("gate_up_proj", configs)
    method.leaves_gate = about.pop("leaves_gate", False)
    return fake_vllm.Linear(method, about.pop("columns", HIDDEN), (INNER, INNER), return_bias=False, **about)


def weight(seed: int) -> Tensor:
    return torch.randn(2 * INNER, HIDDEN, generator=torch.Generator().manual_seed(seed)).bfloat16() / 4


def expected(w: Tensor, x: Tensor, act_fn: Any) -> Tensor:
    """Returns what a network gives, with the weight rounded to bf16: numbers of about 5."""
    h = x.float() @ quantize_rows(w, (INNER, INNER), (U4, U4)).linears[0].dequantize().float().T
    return 2 * getattr(act_fn, "forward_native", act_fn.forward)(h)


X = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(9)).bfloat16()


@torch.no_grad()
@pytest.mark.parametrize("act_fn", [SiluAndMul, GeluAndMul])
def test_a_layer_applies_the_activation(act_fn: type[nn.Module], methods: Any) -> None:
    """Once, rounded once; to weights that come later, too, in the same memory; where torch traces it, too."""
    network = Plain(layer := layer_of(methods), act_fn())
    made = fake_vllm.recorded(layer)

    def check(w: Tensor) -> None:
        assert type(network.act_fn) is nn.Identity and layer(X).shape == (5, INNER)
        torch.testing.assert_close(network(X).float(), expected(w, X, act_fn()), rtol=2e-2, atol=0.1)
        traced = torch.compile(network, backend="eager", fullgraph=True)
        assert torch.equal(traced(X), network(X))
        with lowbit.batch_invariant():
            assert torch.equal(network(X)[2], network(X[2:3])[0])

    fake_vllm.load(layer, {"weight": weight(0)})
    check(weight(0))
    held = layer.qweight.data_ptr()
    fake_vllm.reload(layer, made, {"weight": weight(1)})
    check(weight(1))
    assert layer.qweight.data_ptr() == held
    assert layer.quant_method.dequantize_weight(layer).shape == (2 * INNER, HIDDEN)


@torch.no_grad()
@pytest.mark.parametrize(
    ("configs", "act_fn", "about"),
    [
        ((U4, QuantConfig("u8", 64)), SiluAndMul, {}),  # two matmuls
        ((U4, U4), Clamped, {}),
        ((U4, U4), Raises, {}),
        ((U4, U4), SiluAndMul, {"leaves_gate": True}),
        ((U4, U4), SiluAndMul, {"gather_output": True}),
        ((U4, U4), SiluAndMul, {"columns": 2 * HIDDEN, "columns_here": HIDDEN, "tp_size": 2}),  # which are added up
    ],
)
def test_a_layer_leaves_the_activation_to_the_network(
    configs: Any, act_fn: type[nn.Module], about: Any, methods: Any
) -> None:
    network = Plain(layer := layer_of(methods, configs, **about), act_fn())
    fake_vllm.load(layer, {"weight": weight(0)})
    assert type(network.act_fn) is act_fn and layer(X).shape == (5, 2 * INNER)


@torch.no_grad()
def test_a_layer_with_a_bias_leaves_the_activation(methods: Any) -> None:
    network = Plain(layer := layer_of(methods, bias=True), GeluAndMul())
    fake_vllm.load(layer, {"weight": weight(0)}, torch.zeros(2 * INNER).bfloat16())
    assert type(network.act_fn) is GeluAndMul and layer(X).shape == (5, 2 * INNER)


@torch.no_grad()
def test_a_layer_of_two_networks_leaves_the_activation(methods: Any) -> None:
    networks = [Plain(layer := layer_of(methods), SiluAndMul())]
    networks.append(Plain(layer, SiluAndMul()))
    fake_vllm.load(layer, {"weight": weight(0)})
    assert [type(network.act_fn) for network in networks] == [SiluAndMul] * 2 and layer(X).shape == (5, 2 * INNER)


@torch.no_grad()
def test_weights_that_come_later_change_no_network(methods: Any) -> None:
    """A layer that had no gate gets none."""
    network = Plain(layer := layer_of(methods, leaves_gate=True), SiluAndMul())
    made = fake_vllm.recorded(layer)
    fake_vllm.load(layer, {"weight": weight(0)})
    layer.quant_method.leaves_gate = False
    fake_vllm.reload(layer, made, {"weight": weight(1)})
    assert type(network.act_fn) is SiluAndMul and layer(X).shape == (5, 2 * INNER)


@torch.no_grad()
def test_saved_layers_apply_the_activation(methods: Any, tmp_path: Path) -> None:
    """Those of a checkpoint, whose gate and the rest are two modules, in one process and in two."""
    model = nn.ModuleDict({name: nn.Linear(HIDDEN, INNER, False) for name in ("gate_proj", "up_proj")}).bfloat16()
    dense = torch.cat([model[name].weight.detach() for name in model])
    lowbit.quantize_(model, U4, progress=False)
    lowbit.save_checkpoint(model, tmp_path)
    checkpoint = opened(tmp_path)
    parts: list[Tensor] = []
    for rank, processes in ((0, 1), (0, 2), (1, 2)):
        sources = [Source.of(checkpoint, module) for module in model]
        about = {"tp_rank": rank, "tp_size": processes, "return_bias": False}
        sizes = [INNER // processes] * 2
        network = Plain(layer := fake_vllm.Linear(methods.SavedLinear(sources), HIDDEN, sizes, **about), SiluAndMul())
        given = {
            parameter(part, short): checkpoint.tensors[full]
            for part, module in enumerate(model)
            for short, full in checkpoint.names_of(module).items()
        }
        fake_vllm.load(layer, given)
        assert type(network.act_fn) is nn.Identity
        parts.append(network(X).float())
    wanted = expected(dense, X, SiluAndMul())
    torch.testing.assert_close(parts[0], wanted, rtol=2e-2, atol=0.1)
    torch.testing.assert_close(torch.cat(parts[1:], -1), wanted, rtol=2e-2, atol=0.1)


@pytest.mark.parametrize("adapters", [False, True])
def test_adapters_keep_activations_in_the_network(
    adapters: bool, methods: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's LoRA adds to what a layer gives."""
    save_file({"mlp.gate_up_proj.weight": torch.zeros(32, 64)}, tmp_path / "a.safetensors")
    settings = methods.get_current_vllm_config()
    monkeypatch.setattr(settings, "lora_config", object() if adapters else None)
    serving = methods.config.LowbitServing(lowbit.LowbitConfig("u4", 32))
    serving.maybe_update_config(str(tmp_path))
    serving.apply_vllm_mapper(fake_vllm.WeightsMapper())
    method = serving.get_quant_method(fake_vllm.LinearBase(), "mlp.gate_up_proj")
    assert method.leaves_gate is adapters
