"""Activations behind the layers of a server, which kernels of these layers apply.

A network of a server's model calls `gate_up_proj`, an activation with what comes out, and another layer with what the
activation gives. A kernel that applies the activation to its sums (`dialect.epilogue`) saves a launch, and the way of
h [tokens, n] to memory and back. Servers have some seventy classes of such networks; what one does is found out by a
call of its forward with stand-ins for its modules.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any, cast
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from lowbit.pylib.integrations.serving.rows import Rows
from lowbit.pylib.nn.gated_linear import Gate, gate_of


class BeforeGate:
    """A method of a server's linear layers that may apply the activation behind its layer.

    gate         what it applies
    leaves_gate  whether it applies none: adapters, say, add to what the layer gives
    networks     the modules that the layer is part of
    """

    gate: Gate | None = None
    leaves_gate = False
    networks: tuple[ref[nn.Module], ...] = ()

    def with_gate(self, layer: nn.Module, rows: Rows) -> Rows:
        """Returns rows that apply the activation behind the layer, which is gone from the network then; the same rows
        where there is none, or no kernel can apply it."""
        if self.gate is not None:  # to weights before these
            return rows.with_gate(self.gate) or rows
        networks = {network for each in self.networks if (network := each()) is not None}
        if self.leaves_gate or len(networks) != 1 or hasattr(layer, "lowbit"):  # which has weights without one
            return rows
        (network,) = networks
        activation = activation_behind(network, layer)
        gate = None if activation is None else _gate_of(activation)
        gated = None if gate is None else rows.with_gate(gate)
        if gated is None:
            return rows
        self.gate = gate
        for name in [name for name, module in network._modules.items() if module is activation]:
            setattr(network, name, nn.Identity())
        return gated


def _note_network(network: nn.Module, _name: str, module: nn.Module | None) -> None:
    """Lets the method of a layer know of which module it becomes a part."""
    if isinstance(method := getattr(module, "quant_method", None), BeforeGate):
        method.networks = (*method.networks, ref(network))


register_module_module_registration_hook(_note_network)  # servers give a method its layer alone


class _StandIn:
    """Takes the place of a network for a call of its forward: its modules compute nothing, all else is the network's.

    h      what the layer gives: an object, with which nothing can be done but to call a module with it
    acted  what that module gives, likewise; all other modules give a number
    calls  of modules, in order: the module, and what it was called with
    """

    def __init__(self, network: nn.Module, layer: nn.Module) -> None:
        self.network, self.layer = network, layer
        self.h, self.acted = object(), object()
        self.calls: list[tuple[nn.Module, tuple[object, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        module = self.network._modules.get(name)
        return getattr(self.network, name) if module is None else partial(self._call, module)

    def _call(self, module: nn.Module, *given: object) -> object:
        self.calls.append((module, given))
        plain = torch.zeros(1, 1, device="cpu")
        result = self.h if module is self.layer else self.acted if given[0] is self.h else plain
        gives_bias = hasattr(module, "quant_method") and getattr(module, "return_bias", True)
        return (result, None) if gives_bias else result

    def taker(self, thing: object) -> nn.Module | None:
        """Returns the module that was called with a thing; None if none or several were, or one with more than that."""
        found = [(module, given) for module, given in self.calls if any(each is thing for each in given)]
        return found[0][0] if len(found) == 1 and len(found[0][1]) == 1 else None


def activation_behind(network: nn.Module, layer: nn.Module) -> nn.Module | None:
    """Returns the module that a network's forward calls once, with what a layer gives, whole and with nothing else, and
    whose result it gives to another module; None if forward does anything else with them, or takes more than x, and so
    might."""
    forward, stand_in = type(network).forward, _StandIn(network, layer)
    if "forward" in vars(network) or len(signature(forward).parameters) != 2:
        return None
    try:
        given = forward(cast(Any, stand_in), torch.zeros(1, 1, device="cpu"))
    except Exception:  # whatever comes of an object that is no tensor
        return None
    activation, called = stand_in.taker(stand_in.h), [module for module, _ in stand_in.calls]
    if activation is None or stand_in.taker(stand_in.acted) is None or not isinstance(given, Tensor):
        return None
    return activation if called.count(layer) == called.count(activation) == 1 else None


def _gate_of(activation: nn.Module) -> Gate | None:
    """Returns what an activation of a server does, which may have a kernel of GPUs besides."""
    apply: Callable[[Tensor], Tensor] = getattr(activation, "forward_native", activation.forward)
    try:
        with torch.inference_mode():
            gate = None if any(True for _ in activation.parameters()) else gate_of(apply)
    except Exception:  # whatever comes of numbers that it was not made for
        return None
    return None if gate is None or gate.pairs else gate
