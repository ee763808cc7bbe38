"""The dense experts of transformers 5: which modules are experts, what they are made of, and what their gate is.

Most classes of experts are marked by `use_experts_implementation`, which says how they keep their matrices, and gives
them `_apply_gate`. The class of Llama 4 is not: `SORTED` says for it what the mark would say.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from lowbit.dialect.errors import SpecError
from lowbit.dialect.spec import Act, MatmulSpec
from lowbit.pylib.nn.linear import act_of
from lowbit.pylib.quantization.config import QuantConfig

MATRICES = ("gate_up_proj", "down_proj")
"""The parameters of a dense module: [experts, rows, columns], or with columns first if it is transposed."""
LISTS = {"gate_up_proj": "gate_up", "down_proj": "down"}
"""Where `LowbitExperts` keeps the layers that are made of a parameter of dense experts."""
SORTED = "transformers.models.llama4.modeling_llama4.Llama4TextExperts"
"""A class whose matrices are transposed, and that is called with rows in the order of the experts, as many for each.
Rows of tokens that go elsewhere are zeros."""


def is_experts(module: nn.Module) -> bool:
    """Tells whether a module keeps experts as transformers 5 does, and says how it applies their gate."""
    return (
        all(isinstance(getattr(module, name, None), Tensor) and getattr(module, name).ndim == 3 for name in MATRICES)
        and (hasattr(type(module), "_apply_gate") or _is_sorted(module))
        and not why_no_experts(module)
    )


def why_no_experts(module: nn.Module) -> str:
    """Returns why a module that has matrices of experts can't be `LowbitExperts`; "" for all others."""
    if not getattr(module, "has_gate", True):
        return "experts without a gate"
    if getattr(module, "has_post_expert_norm", False):
        return "experts with a norm behind each"
    if any(parameter.ndim == 3 for parameter in module.parameters(recurse=False)) and _is_own(module):
        return "experts kept or called in a way of their own"
    return ""


def _is_own(module: nn.Module) -> bool:
    """Tells whether a module is named after experts, and has no gate that others could apply."""
    return "Experts" in type(module).__name__ and not (hasattr(type(module), "_apply_gate") or _is_sorted(module))


def _is_sorted(module: nn.Module) -> bool:
    return any(f"{cls.__module__}.{cls.__qualname__}" == SORTED for cls in type(module).__mro__)


def is_transposed(module: nn.Module) -> bool:
    """Tells whether the matrices of experts have columns first."""
    return getattr(module, "is_transposed", False) or _is_sorted(module)


def apply_gate(module: nn.Module, h: Tensor, dense_class: type[nn.Module] | None = None) -> Tensor:
    """Returns what the gate of experts makes of h [..., n]: [..., n / 2].

    module        has what the gate needs, such as an activation function
    dense_class   says what the gate is; None: the class of the module
    """
    given = getattr(dense_class or type(module), "_apply_gate", None)
    if given is not None:
        return cast(Tensor, given(module, h))
    gate, up = h.chunk(2, dim=-1)
    return cast(Tensor, module.act_fn(gate) * up)  # type: ignore[operator]


def is_linear_in_up(module: nn.Module) -> bool:
    """Tells whether twice the result of the up projection gives twice what the gate makes of it."""
    gate, up = torch.cartesian_prod(*[torch.linspace(-20, 20, 9, device="cpu")] * 2).T
    try:
        once, twice = (apply_gate(module, torch.cat([gate, factor * up])) for factor in (1, 2))
    except RuntimeError:  # it has parameters on another device, or takes other types
        return False
    return torch.allclose(2 * once, twice)


def sorted_routing(x: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Returns the experts [rows, 1] of rows that come in their order, as many for each, and the weights of these: 1.

    A row of zeros goes to none: it stays zeros, as a class that is called so has no biases.

    Raises SpecError for rows that are not as many for each.
    """
    if len(x) % experts:
        raise SpecError(f"{len(x)} rows of x without top_k_index must be as many for each of {experts} experts")
    own = torch.arange(experts, device=x.device).repeat_interleave(len(x) // experts)
    ids = torch.where((x != 0).any(-1), own, experts).unsqueeze(-1)
    return ids, torch.ones_like(ids, dtype=torch.float32)


def count_of(dense: nn.Module) -> int:
    """Returns how many experts a module has."""
    return len(cast(Tensor, dense.gate_up_proj))


def dense_weight(dense: nn.Module, name: str, stacked: Tensor | None = None) -> Tensor:
    """Returns a matrix of all experts as [experts, n, k].

    stacked   the values of the parameter; None: those that it has
    """
    stacked = cast(Tensor, getattr(dense, name)) if stacked is None else stacked
    return stacked.transpose(1, 2) if is_transposed(dense) else stacked


def dense_bias(dense: nn.Module, name: str) -> Tensor | None:
    """Returns the biases [experts, n] of a matrix, if it has any."""
    return cast("Tensor | None", getattr(dense, f"{name}_bias", None))


def specs_of_experts(dense: nn.Module, config: QuantConfig, act: Act | None) -> tuple[MatmulSpec, MatmulSpec]:
    """Returns the specs of gate_up and down after they are quantized. Raises SpecError if there are none."""
    gate_up, down = (_spec(dense, name, config, act) for name in MATRICES)
    return gate_up, down


def _spec(dense: nn.Module, name: str, config: QuantConfig, act: Act | None) -> MatmulSpec:
    weight = dense_weight(dense, name)
    try:
        spec = config.spec(*weight.shape[1:], act=act or act_of(weight))
    except SpecError as error:
        raise SpecError(f"{name}: {error}") from error
    return replace(spec, bias=dense_bias(dense, name) is not None)
