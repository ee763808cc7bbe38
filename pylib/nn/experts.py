"""`LowbitExperts`: the experts of a mixture of experts, each of two low-bit linear layers.

transformers 5 keeps all experts of a layer in one module with two parameters of three dimensions, `gate_up_proj` and
`down_proj`. Here each expert has a `LowbitLinear` for either, so that it is saved, moved and checked like any other.

On a GPU one kernel serves all experts of a matrix that have one format: tokens are sorted by expert on the device, and
the weights of the experts' layers are slices of one (`stacked_experts.py`). Nothing waits for the device, and a CUDA
graph is right for any routing.

A CPU has no such kernel; the same call multiplies by the experts that have tokens, one after the other.

Where that does not serve (for gradients, for experts of many formats and some kinds of weights), a call asks for the
numbers of tokens, waits for them, and runs the layers of the experts that have any. While a CUDA graph is recorded or
torch.compile traces, nothing can be waited for, and every expert runs on every token: right, with static shapes, and
slower the more experts there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Self, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling, is_exporting

from lowbit.dialect.errors import PackError, QuantizeError, SpecError
from lowbit.dialect.spec import MatmulSpec
from lowbit.pylib.experts.routing import check_routing
from lowbit.pylib.nn.dense_experts import MATRICES, apply_gate, count_of, is_transposed, sorted_routing
from lowbit.pylib.nn.dense_weight import NoDense
from lowbit.pylib.nn.fuse import concatenated
from lowbit.pylib.nn.gated_linear import Gate, GatedLinear, change_order, gate_of, store_like
from lowbit.pylib.nn.linear import LowbitLinear
from lowbit.pylib.nn.packed_module import EXTRA_STATE
from lowbit.pylib.nn.rotated import INPUTS, Rotation
from lowbit.pylib.nn.stacked_experts import Run, Stacked, kind_of_call, stacked, target_of
from lowbit.pylib.operator.constants import constant
from lowbit.pylib.operator.expert_calls import sum_of_experts
from lowbit.pylib.operator.tracing import is_observed
from lowbit.pylib.runtime.batch_invariant import MODE

_Lists = tuple[nn.ModuleList, nn.ModuleList]


class LowbitExperts(NoDense):
    """The experts of one layer, with packed weights. Made by `empty_like`, or by `quantize_` and `from_pretrained`.

    gate_up, down   the two matrices of each expert
    inputs          what multiplies tokens before they meet experts, as files of others may have it
    """

    _dense = MATRICES
    _stacked: dict[bool, Stacked]  # what was made of the layers, by `MODE.on`; empty: they may be others now

    def __init__(
        self,
        dense: nn.Module,
        gate_up: Sequence[LowbitLinear],
        down: Sequence[LowbitLinear],
        *,
        inputs: Sequence[Rotation] = (),
    ) -> None:
        super().__init__()
        self._dense_class = type(dense)
        plain = {name: value for name, value in vars(dense).items() if not name.startswith("_")}
        vars(self).update(plain)  # sizes and numbers that the gate reads, such as a limit
        for name, child in dense.named_children():
            self.add_module(name, child)  # the activation function
        self.is_transposed = is_transposed(dense)
        _check_alike(count_of(dense), gate_up, down)
        self.gate_up = nn.ModuleList(gate_up)
        for layer in gate_up:
            if layer.spec.is_gated:
                GatedLinear.of(layer, pairs=not getattr(self, "is_concatenated", True))
        self.down = nn.ModuleList(down)
        self.turn_inputs(inputs)
        self._group: Any = None  # the processes that have the parts of these experts, or the others
        self._count = len(self.gate_up)  # in all processes
        self._is_part, self._first = False, 0  # whether some are elsewhere, and which is the first here
        self._stacked = {}
        _alive.add(self)
        self.train(dense.training)

    @classmethod
    def empty_like(
        cls,
        dense: nn.Module,
        specs: Sequence[MatmulSpec | Mapping[int, MatmulSpec]],
        device: torch.device | str | None = None,
        inputs: Sequence[Rotation] = (),
    ) -> LowbitExperts:
        """Returns experts of zeros with these specs of gate_up and down, to load a state dictionary into.

        specs   one of all experts, or one by the number of each
        """
        experts = range(count_of(dense))
        each = (spec if isinstance(spec, Mapping) else dict.fromkeys(experts, spec) for spec in specs)
        gate_up, down = ([LowbitLinear.empty(of[expert], device) for expert in experts] for of in each)
        return cls(dense, gate_up, down, inputs=inputs)

    def turn_inputs(self, inputs: Sequence[Rotation]) -> None:
        """Let these multiply tokens before they meet experts, the first one first. They are part of the state."""
        if inputs:
            self.add_module(INPUTS, nn.Sequential(*inputs))

    @property
    def inputs(self) -> Sequence[Rotation]:
        """What multiplies tokens before they meet experts."""
        return cast(Sequence[Rotation], self._modules.get(INPUTS) or ())

    def forward(
        self, hidden_states: Tensor, top_k_index: Tensor | None = None, top_k_weights: Tensor | None = None
    ) -> Tensor:
        """Returns the sum of each token's experts, by their weights: [tokens, hidden].

        hidden_states   [tokens, hidden]
        top_k_index     int32 or int64 [tokens, k]: experts of a token, of which one may be there twice. -1 and the
                        number of experts stand for one elsewhere, and add exactly 0. None, without weights: rows are
                        in the order of experts, as many for each, and each becomes what its expert makes of it
        top_k_weights   [tokens, k], of any float type

        Raises SpecError for ids and weights of another shape or type, and on a CPU for other ids; on a GPU, where
        looking at them would take time, these are elsewhere.
        """
        if top_k_index is None and top_k_weights is None:
            top_k_index, top_k_weights = sorted_routing(hidden_states, self._count)
        if top_k_index is None or top_k_weights is None:
            raise SpecError("top_k_index without top_k_weights, or these alone: give both, or rows of x in order alone")
        if not (is_compiling() or is_observed()):
            if (ready := self._ready(hidden_states, top_k_index, top_k_weights)) is not None:
                return ready(hidden_states, top_k_index, top_k_weights)
            check_routing(hidden_states, top_k_index, top_k_weights, self._count)
        if (inputs := self._modules.get(INPUTS)) is not None:
            hidden_states = inputs(hidden_states)
        if self._is_part:
            top_k_index = self._here(top_k_index)
        result = self._sum(hidden_states, top_k_index, top_k_weights)
        if self._group is not None:
            if result.requires_grad:
                raise QuantizeError("experts in parts can't be trained beside; call them in torch.no_grad()")
            torch.distributed.all_reduce(result, group=self._group)
        return result

    def _ready(self, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Run | None:
        """Returns what ran a call with tensors alike on a GPU, if nothing has changed since."""
        found = self._stacked.get(MODE.on)
        ready = found and self._is_alone and found.ready.get(kind_of_call(x, top_k_index, top_k_weights))
        return ready if ready and self._is_stacked() and not _trains(x, top_k_weights) else None

    @property
    def _is_alone(self) -> bool:
        """Tells whether a call is that of these experts, with nothing before or after."""
        return not self._is_part and self._group is None and INPUTS not in self._modules

    def _here(self, top_k_index: Tensor) -> Tensor:
        """Returns ids among the experts of this process; -1 for those of others."""
        local = top_k_index - self._first
        return torch.where((local >= 0) & (local < len(self.gate_up)), local, -1)

    def _sum(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        found = self._together(hidden_states, top_k_weights)
        if found is not None:
            return self._sum_together(found, hidden_states, top_k_index, top_k_weights)
        if is_compiling() or _is_capturing(hidden_states):
            return self._sum_of_all(hidden_states, top_k_index, top_k_weights)
        result = torch.zeros_like(hidden_states, dtype=torch.float32)
        for expert, tokens, places in _tokens_of_experts(top_k_index, len(self.gate_up)):
            weight = top_k_weights[tokens, places, None].to(torch.float32)
            result.index_add_(0, tokens, self.expert(expert, hidden_states[tokens]).to(torch.float32) * weight)
        return result.to(hidden_states.dtype)

    def _sum_of_all(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Returns the sum with shapes that depend on no value: every expert runs on every token."""
        result = torch.zeros_like(hidden_states, dtype=torch.float32)
        for expert in range(len(self.gate_up)):
            chosen = top_k_index == expert
            weight = torch.where(chosen, top_k_weights, 0).to(torch.float32).sum(-1, keepdim=True)
            term = self.expert(expert, hidden_states).to(torch.float32) * weight
            result += torch.where(chosen.any(-1, keepdim=True), term, 0)  # an unwanted term may be inf
        return result.to(hidden_states.dtype)

    def _sum_together(self, found: Stacked, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Returns the sum by launches for all experts of a format, in f32 of those of several; on a CPU by calls."""
        gate = self._apply_gate_to
        sums = [
            sum_of_experts(x, some.ids_here(top_k_index), top_k_weights, *some.matrices, some.tiles, gate, self._count)
            for some in found.formats
        ]
        if x.is_cuda and self._is_alone and not (is_compiling() or is_observed()):
            found.keep_ready(x, top_k_index, top_k_weights, self._count)
        if len(sums) == 1:
            return sums[0] if sums[0].dtype is x.dtype else sums[0].to(x.dtype)
        return torch.stack(sums).sum(0, dtype=torch.float32).to(x.dtype)

    def _together(self, x: Tensor, top_k_weights: Tensor) -> Stacked | None:
        """Returns the stacked weights for a call, if a kernel for all experts serves it.

        They are made outside of graphs, which would hold their memory; while torch.compile traces as well. A program
        that is exported holds the tensors of the layers, and these would be in it twice.
        """
        if _trains(x, top_k_weights) or _is_exported() or target_of(x.device) is None:
            return None
        if is_compiling():
            _stack_all()
        elif not self._is_stacked():
            if _is_capturing(x):
                return None
            self._stack()
        found = self._stacked.get(MODE.on)
        return found if found is not None and found.takes(x) else None

    def _is_stacked(self) -> bool:
        """Tells whether the layers are those that were stacked last."""
        found, modules = self._stacked.get(MODE.on), self._modules  # where torch looks for gate_up, after some detours
        return found is not None and found.holds(cast(_Lists, (modules["gate_up"], modules["down"])))

    def _stack(self) -> None:
        lists = self.gate_up, self.down
        self._stacked[MODE.on] = stacked(lists, self._gate())
        self._stacked = {on: each for on, each in self._stacked.items() if each.holds(lists)}

    def _gate(self) -> Gate | None:
        """Returns the gate of the dense class, where a kernel can apply it."""
        with torch.inference_mode():
            return gate_of(self._apply_gate_to)

    def _apply_gate_to(self, h: Tensor) -> Tensor:
        return apply_gate(self, h, self._dense_class)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self._stacked = {}
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Prepare the layers, which are loaded next, for tensors whose rows may be stored in another order."""
        self._stacked = {}
        gate = self._gate()
        for name, layer in self.gate_up.named_children():
            about = state_dict.get(f"{prefix}gate_up.{name}.{EXTRA_STATE}")
            if isinstance(layer, LowbitLinear) and isinstance(about, Tensor) and gate:
                store_like(layer, about, gate)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def store_like(self, saved: Mapping[int, MatmulSpec]) -> None:
        """Makes layers of gate_up `GatedLinear`s, or such layers plain, as the saved weights of these experts are."""
        gate = self._gate()
        for expert, spec in saved.items():
            layer = self.gate_up[expert]
            if gate and isinstance(layer, LowbitLinear) and spec.is_gated != layer.spec.is_gated:
                change_order(layer, gate)

    def __getstate__(self) -> dict[str, Any]:
        """Returns what a copy is made of, whose layers have other tensors."""
        return {**self.__dict__, "_stacked": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        _alive.add(self)

    def split_(self, index: int, count: int, group: Any) -> None:
        """Keep one of several parts of every expert, for tensor parallelism.

        group   the processes that have the parts; a call adds up what they give. No gradients go through it
        """
        blocks = 2 if getattr(self, "is_concatenated", True) else 1  # rows of the gate stand above the others
        for expert, (gate_up, down) in enumerate(zip(self.gate_up, self.down)):
            if isinstance(gate_up, GatedLinear):
                gate_up.split_(0, index, count)  # a block of 16 rows has some of either half
            else:
                packed = cast(LowbitLinear, gate_up).packed
                parts = [packed.shard(0, block * count + index, blocks * count) for block in range(blocks)]
                self.gate_up[expert] = concatenated([LowbitLinear.from_packed(part) for part in parts])
            cast(LowbitLinear, down).split_(1, index, count)
        self._group, self._stacked = group, {}

    def keep_(self, index: int, count: int, group: Any) -> None:
        """Keep one of several equal parts of the experts, for expert parallelism; ids stay those of all.

        group   the processes that have the others; a call adds up what they give. No gradients go through it

        Raises SpecError where the parts would not be equal.
        """
        if self._count % count:
            raise SpecError(f"{self._count} experts can't be shared out evenly among {count} processes")
        each = self._count // count
        self._is_part, self._first, here = count > 1, index * each, slice(index * each, (index + 1) * each)
        self.gate_up, self.down = self.gate_up[here], self.down[here]
        self._group, self._stacked = group, {}

    def expert(self, expert: int, x: Tensor) -> Tensor:
        """Returns what one expert makes of tokens [..., hidden], which are scaled already where inputs are."""
        layer = self.gate_up[expert]
        if type(layer) is GatedLinear and not (layer._forward_hooks or layer._forward_pre_hooks):
            return self.down[expert](layer.gated(x))
        return self.down[expert](self._apply_gate_to(layer(x)))

    def extra_repr(self) -> str:
        inside = ([getattr(layer, "base_layer", layer) for layer in layers] for layers in (self.gate_up, self.down))
        kinds = (" or ".join({str(layer.spec): None for layer in layers}) for layers in inside)  # in a LoRA, too
        return f"{len(self.gate_up)} experts of " + " and ".join(kinds)


_alive: WeakSet[LowbitExperts] = WeakSet()


def _trains(x: Tensor, top_k_weights: Tensor) -> bool:
    """Tells whether a call needs gradients."""
    return torch.is_grad_enabled() and (x.requires_grad or top_k_weights.requires_grad)


@constant
def _is_exported() -> bool:
    """Tells whether torch.export traces a call. Some versions of torch.compile take the answer for yes, if they trace
    the question."""
    return is_exporting()


@constant
def _stack_all() -> bool:
    """Stacks the weights of all experts on GPUs, while torch.compile traces one of them: those of the others are next.

    It takes no arguments, of which torch would ask that they are the same for every layer that shares a graph. Weights
    of another model that are not numbers, as it is not loaded yet, stay as they are: its own calls stack them.
    """
    for experts in list(_alive):
        codes = cast(LowbitLinear, experts.gate_up[0])._buffers.get("codes")
        if codes is not None and target_of(codes.device) is not None and not experts._is_stacked():
            with suppress(PackError):
                experts._stack()
    return True


def _check_alike(count: int, gate_up: Sequence[LowbitLinear], down: Sequence[LowbitLinear]) -> None:
    """Raises SpecError unless there is a layer for each expert in either list, and all of a list have one size."""
    if not len(gate_up) == len(down) == count:
        raise SpecError(f"{len(gate_up)} layers of gate_up and {len(down)} of down, but the model has {count} experts")
    for name, layers in (("gate_up", gate_up), ("down", down)):
        wanted = layers[0].spec
        for expert, layer in enumerate(layers):
            if (layer.spec.n, layer.spec.k) != (wanted.n, wanted.k):
                given = f"{name}[{expert}] is {layer.spec.n} x {layer.spec.k}"
                raise SpecError(f"{given}, but must be {wanted.n} x {wanted.k} as that of expert 0")


def _is_capturing(x: Tensor) -> bool:
    """Tells whether a call with x is recorded in a CUDA graph."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _tokens_of_experts(top_k_index: Tensor, experts: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yields each expert that has tokens, with these, and with the places that it has among each token's experts."""
    ids = top_k_index.flatten().clamp(-1, experts).remainder(experts + 1)  # -1 becomes `experts`, the last
    flat, order = ids.sort(stable=True)
    counts = torch.bincount(flat, minlength=experts)[:experts].tolist()
    first = 0
    for expert, count in enumerate(counts):
        if count:
            places = order[first : first + count]
            yield expert, places // top_k_index.shape[1], places % top_k_index.shape[1]
        first += count
