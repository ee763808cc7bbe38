"""The weights of a layer's experts as kernels take them: the tensors of all experts one after the other, in one.

The experts' own layers keep their tensors, which become slices of these: a weight exists once, and whatever saves,
moves or inspects one expert finds it where it was. When somebody has put other tensors in the layers' places, they are
stacked again at the next call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter, is_, itemgetter
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from lowbit.dialect.errors import SpecError
from lowbit.dialect.spec import MatmulSpec, interned
from lowbit.passes.targets import parse_target
from lowbit.pylib.experts.routed import RoutedCall, RoutedExperts
from lowbit.pylib.nn.changes import CHANGES, watch
from lowbit.pylib.nn.gated_linear import Gate, GatedLinear, with_gate
from lowbit.pylib.nn.linear import LowbitLinear
from lowbit.pylib.operator.constants import constant
from lowbit.pylib.operator.expert_schema import run_of
from lowbit.pylib.operator.schema import describe
from lowbit.pylib.runtime.batch_invariant import called
from lowbit.pylib.runtime.devices import target_at
from lowbit.pylib.runtime.expert_matmul import expert_matmul, spec_of_experts
from lowbit.pylib.runtime.top_k_experts import TopKExperts
from lowbit.pylib.torch_types import TORCH
from lowbit.pylib.weights.packed import PackedWeight
from lowbit.pylib.weights.value_range import has_wide_range

Run = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Returns the sum of each token's experts, of x, ids and weights."""

_MOST_FORMATS = 8  # of the experts of a layer: each takes launches of its own, with experts that are hit or without
_MOST_READY = 256  # kinds of calls: numbers of tokens, mostly
_MOST_CODES = 1 << 28  # of experts whose weights are unpacked at a time, of a byte each


@dataclass(frozen=True, eq=False)
class StackedWeights:
    """The tensors of one matrix of all experts.

    tensors   those of the spec of all experts, in its order
    kernel    the matmul as text, for `torch.ops.lowbit.expert_matmul`
    tiles     sizes of token tiles that there are kernels for
    version   how often the codes had been written to
    """

    spec: MatmulSpec
    tensors: list[Tensor]
    kernel: str
    tiles: tuple[int, ...]
    version: int


@dataclass(frozen=True, eq=False)
class StackedFormat:
    """The experts of a layer that have one format.

    matrices   the stacked weights of gate_up and down
    tiles      sizes of token tiles that both have kernels for, the least first
    numbers    i32 [experts of the layer + 1]: which of these experts each is, or -1; -1 for one elsewhere, the last.
               None: these are all experts, in their order
    """

    matrices: tuple[StackedWeights, StackedWeights]
    tiles: tuple[int, ...]
    numbers: Tensor | None

    @property
    def is_unwritten(self) -> bool:
        """Tells whether nobody has written to the codes since they were stacked."""
        gate_up, down = self.matrices
        return gate_up.tensors[0]._version == gate_up.version and down.tensors[0]._version == down.version

    def takes(self, x: Tensor) -> bool:
        """Tells whether there are kernels, for an x [tokens, hidden] of this type and size."""
        spec, codes = self.matrices[0].spec, self.matrices[0].tensors[0]
        return x.dtype is TORCH[spec.act] and x.shape[1] == spec.k and x.device == codes.device

    def ids_here(self, ids: Tensor) -> Tensor:
        """Returns ids among these experts, of ids among those of the layer; -1 for all others."""
        if self.numbers is None:
            return ids
        return self.numbers[ids.clamp(-1, len(self.numbers) - 1)]  # where -1 finds the last


@dataclass(frozen=True, eq=False)
class Stacked:
    """What was found of the layers of experts.

    formats    the weights, by format; none where no kernel serves the experts of one together
    layers     the layers, as they were then
    ready      what runs calls on a GPU, by `kind_of_call`: the host takes longer to find that out than to launch it
    """

    formats: tuple[StackedFormat, ...]
    layers: _Layers
    ready: dict[object, Run] = field(default_factory=dict)

    def holds(self, lists: Sequence[nn.ModuleList]) -> bool:
        """Tells whether the layers are the same, and nobody has written to their codes."""
        return self.layers.are_still(lists) and all(some.is_unwritten for some in self.formats)

    def takes(self, x: Tensor) -> bool:
        """Tells whether there are kernels, for an x [tokens, hidden] of this type and size."""
        return len(self.formats) > 0 and all(some.takes(x) for some in self.formats)

    def keep_ready(self, x: Tensor, ids: Tensor, weights: Tensor, among: int) -> None:
        """Keep what runs such a call, which has been checked, where it runs by `expert_schema.run_of` alone.

        among   how many experts ids are spread over
        """
        first = self.formats[0]
        gate_up, down = first.matrices
        alone = len(self.formats) == 1 and first.numbers is None and gate_up.spec.is_gated
        if not alone or TORCH[down.spec.out_dtype] is not x.dtype:
            return
        call = RoutedCall(ids.shape[0], ids.shape[1], ids.dtype, weights.dtype)
        run = run_of(gate_up.kernel, down.kernel, first.tiles, among, call)
        if len(self.ready) >= _MOST_READY:
            self.ready.clear()

        def ready(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            return run(x, ids, weights, gate_up.tensors, down.tensors)

        prepared: Run | None = None  # looks at nothing, since calls of one `kind_of_call` differ in nothing it needs
        if isinstance(run, RoutedExperts):
            prepared = run.prepared(gate_up.tensors, down.tensors)
        elif isinstance(run, TopKExperts):
            prepared = run.prepared(gate_up.tensors, down.tensors, call.tokens)
        self.ready[kind_of_call(x, ids, weights)] = prepared or ready


def kind_of_call(x: Tensor, ids: Tensor, weights: Tensor) -> object:
    """Returns all that the launches of a call depend on, but for the weight."""
    shapes = x.shape, ids.shape, weights.shape
    return shapes, x.dtype, ids.dtype, weights.dtype, x.device, ids.device, weights.device


class _Layers:
    """The layers of lists of experts, their codes and specs, and whether any has hooks, which wait for calls. A call
    looks at all of it if any layer has changed; in loops that run in C, since a list may have hundreds of layers."""

    def __init__(self, lists: Sequence[nn.ModuleList]) -> None:
        self._lists, self._modules = list(lists), _modules_of(lists)
        every = [layer for layers in self._modules for layer in layers if layer is not None]
        watched = [watch(layers, "_modules") for layers in lists] + [watch(layer, *_OF_A_LAYER) for layer in every]
        self._are_watched, self._seen = all(watched), CHANGES.last
        self._hooks = [hooks for layer in every for hooks in (layer._forward_hooks, layer._forward_pre_hooks)]
        self._packed = [layer for layer in every if layer._buffers.get("codes") is not None]
        self._buffers, self._hooked = [layer._buffers for layer in self._packed], any(self._hooks)
        self._codes, self._specs = list(map(_CODES, self._buffers)), list(map(_SPEC, self._packed))
        self.are_plain = len(self._codes) == len(every) and not self._hooked
        """Whether all have codes, as adapters do not, and none has hooks."""

    def are_still(self, lists: Sequence[nn.ModuleList]) -> bool:
        """Tells whether lists have the same layers, with the same codes and specs, and hooks if any had some then."""
        now = CHANGES.last
        if now is self._seen and self._are_watched and all(map(is_, lists, self._lists)):
            return True
        same = _modules_of(lists) == self._modules and any(self._hooks) == self._hooked
        same = same and all(map(is_, map(_CODES, self._buffers), self._codes))
        same = same and all(map(is_, map(_SPEC, self._packed), self._specs))
        if same:
            self._lists, self._seen = list(lists), now
        return same


_CODES, _SPEC = itemgetter("codes"), attrgetter("spec")
_OF_A_LAYER = "_buffers", "_forward_hooks", "_forward_pre_hooks"


def _modules_of(lists: Sequence[nn.ModuleList]) -> list[list[nn.Module | None]]:
    """Returns the layers of each list, which are equal if they are the same."""
    return [list(layers._modules.values()) for layers in lists]


def stacked(lists: Sequence[nn.ModuleList], gate: Gate | None = None) -> Stacked:
    """Stacks the tensors of layers of experts, where a kernel serves all experts of one format together; within
    `lowbit.batch_invariant` one of those whose sums have one order.

    lists   gate_up and down of every expert
    gate    what the kernel of gate_up applies to its sums, of whose layers it makes `GatedLinear`s; None: nothing
    """
    for layers in lists:
        for layer in layers:
            if isinstance(layer, LowbitLinear):
                layer.check_unwritten()
    groups = _by_format(lists) if _Layers(lists).are_plain else []
    served = 0 < len(groups) <= _MOST_FORMATS and len(lists[0]) > 1
    served = served and all(_served(layers) for group in groups for layers in (group.gate_up, group.down))
    formats = [_stack_format(group, len(lists[0]), gate) for group in groups] if served else []
    return Stacked(tuple(formats) if all(each.tiles for each in formats) else (), _Layers(lists))


class _Group(NamedTuple):
    """Experts of one format: their numbers, and their layers."""

    numbers: list[int]
    gate_up: list[nn.Module]
    down: list[nn.Module]


def _by_format(lists: Sequence[nn.ModuleList]) -> list[_Group]:
    """Returns the experts of each pair of specs and of devices."""
    groups = dict[object, _Group]()
    for number, (gate_up, down) in enumerate(zip(*lists)):
        key = tuple((getattr(layer, "spec", None), layer.get_buffer("codes").device) for layer in (gate_up, down))
        group = groups.setdefault(key, _Group([], [], []))
        group.numbers.append(number)
        group.gate_up.append(gate_up)
        group.down.append(down)
    return list(groups.values())


def _stack_format(group: _Group, experts: int, gate: Gate | None) -> StackedFormat:
    """Stacks the tensors of some of so many experts. One alone is there twice, since a kernel is for several."""
    if gate:
        _gate(group.gate_up, gate)
    first, second = (
        _stack(cast(list[LowbitLinear], layers * 2 if len(layers) == 1 else layers))
        for layers in (group.gate_up, group.down)
    )
    tiles = tuple(tile for tile in first.tiles if tile in second.tiles)
    numbers = None if len(group.numbers) == experts else _places(group.numbers, experts, first.tensors[0].device)
    return StackedFormat((first, second), tiles, numbers)


def _places(numbers: list[int], experts: int, device: torch.device) -> Tensor:
    """Returns i32 [experts + 1]: where in `numbers` that of each expert is, and -1 for those that it has not."""
    with torch.inference_mode(False):
        places = torch.full((experts + 1,), -1, dtype=torch.int32)
        places[numbers] = torch.arange(len(numbers), dtype=torch.int32)
        places = places.to(device)
    return _static(places)


@constant  # torch.compile would trace into what looks at the GPU, and warn
def target_of(device: torch.device) -> str | None:
    """Returns the target for experts on a device; None where nothing multiplies, such as meta."""
    if device.type == "cuda":
        return target_at(device.index)
    return "cpu" if device.type == "cpu" else None


def _served(layers: list[nn.Module]) -> bool:
    """Tells whether one kernel can multiply by all of these layers."""
    if not all(type(layer) in (LowbitLinear, GatedLinear) and "forward" not in vars(layer) for layer in layers):
        return False  # adapters; or hooks of accelerate
    plain = cast(list[LowbitLinear], layers)
    first, target = plain[0], target_of(plain[0].codes.device)
    if target is None:
        return False
    on = parse_target(target)
    rounds = on.is_gpu and first.spec.for_rows(1).compute is None  # weights to the act type; other kernels scale sums
    if rounds and any(map(_has_wide_range, plain)):
        return False
    try:
        spec = spec_of_experts(called(first.spec), max(2, len(plain)))
        return _is_cut_in_experts(spec, first.spec) and bool(expert_matmul(spec, on).tiles)
    except SpecError:
        return False


def _is_cut_in_experts(spec: MatmulSpec, one: MatmulSpec) -> bool:
    """Tells whether every tensor of a weight of experts has those of one expert behind each other, as those of sparse
    outliers are not."""
    shapes = ((slot.shape[0] // spec.experts, *slot.shape[1:]) for slot in spec.tensors)
    return all(slot.shape[0] > 0 and slot.shape == shape for slot, shape in zip(one.tensors, shapes))


def _has_wide_range(layer: LowbitLinear) -> bool:
    """Tells whether kernels must not round a layer's weight; looked at while torch.compile traces, too, when a
    `PackedWeight` would not be."""
    return (
        has_wide_range(layer.spec, {slot.name: getattr(layer, slot.name) for slot in layer.spec.tensors}) is not False
    )


def _stack(plain: Sequence[LowbitLinear]) -> StackedWeights:
    spec = spec_of_experts(called(plain[0].spec), len(plain))
    target = parse_target(cast(str, target_of(plain[0].codes.device)))
    with torch.inference_mode(False), torch.no_grad():
        tensors = [_stack_tensor(plain, slot.name) for slot in plain[0].spec.tensors]
    tiles = expert_matmul(spec, target).tiles
    return StackedWeights(spec, tensors, describe(spec, target, None), tiles, tensors[0]._version)


def _gate(layers: Sequence[nn.Module], gate: Gate) -> None:
    """Makes layers `GatedLinear`s, of weights that are stored anew."""
    plain = cast(list[LowbitLinear], layers)
    spec = plain[0].spec
    if spec.is_gated or not _takes(spec, gate):
        return
    some = max(1, _MOST_CODES // (spec.n * spec.k))
    with torch.inference_mode(False), torch.no_grad():
        for first in range(0, len(plain), some):
            _gate_some(plain[first : first + some], gate)


def _takes(spec: MatmulSpec, gate: Gate) -> bool:
    """Tells whether the epilogue of a gate goes with a spec."""
    try:
        return replace(spec, epilogue=gate.epilogue).is_gated
    except SpecError:
        return False


def _gate_some(layers: Sequence[LowbitLinear], gate: Gate) -> None:
    """Makes some layers `GatedLinear`s, which have slices of new tensors."""
    spec = spec_of_experts(layers[0].spec, len(layers))
    whole = {slot.name: torch.cat([getattr(layer, slot.name) for layer in layers]) for slot in spec.tensors}
    made = with_gate(PackedWeight(spec, whole), gate)
    parts = {name: tensor.chunk(len(layers)) for name, tensor in made.items()}
    for number, layer in enumerate(layers):
        one = interned(replace(layer.spec, epilogue=gate.epilogue))
        layer.hold(PackedWeight(one, {name: part[number] for name, part in parts.items()}))
        layer.check_unwritten()  # which notes the codes as they are now
        GatedLinear.of(layer, gate.pairs)


def _stack_tensor(layers: Sequence[LowbitLinear], name: str) -> Tensor:
    """Returns one tensor of those of this name, which become slices of it."""
    parts = [cast(Tensor, getattr(layer, name)) for layer in layers]
    if _follow_one_another(parts):
        whole = parts[0].as_strided((len(parts) * len(parts[0]), *parts[0].shape[1:]), parts[0].stride())
    else:
        whole = torch.cat(parts)
        for layer, part in zip(layers, whole.chunk(len(parts))):
            layer.share(name, part)
    return _static(whole)


def _static(tensor: Tensor) -> Tensor:
    """Returns a tensor that graphs need no copy of."""
    tensor._dynamo_static_input_type = "unguarded"  # type: ignore[attr-defined]
    return tensor


def _follow_one_another(parts: Sequence[Tensor]) -> bool:
    """Tells whether tensors are slices of one, in their order."""
    first = parts[0].data_ptr()
    if len({part.untyped_storage().data_ptr() for part in parts}) != 1 or parts[0].is_inference():
        return False
    return all(part.is_contiguous() and part.data_ptr() == first + i * part.nbytes for i, part in enumerate(parts))
