"""The experts of a layer: two matrices, each a weight of all experts (`MatmulSpec.experts`).

On a GPU every call is the same few launches, whatever the routing, and waits for nothing: CUDA graphs hold it. On a CPU
the experts that have tokens run one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from lowbit.dialect.errors import PackError, SpecError
from lowbit.dialect.spec import MatmulSpec, interned
from lowbit.passes.kernels.base import KernelRequest, KernelSchedule
from lowbit.passes.kernels.permute.family import FEW_ROWS
from lowbit.passes.kernels.registry import request
from lowbit.passes.scheduling.expert_rule import schedule_for_few, tile_for
from lowbit.passes.targets import parse_target
from lowbit.pylib.experts.by_kernel import combine_by_kernel, permute_by_kernel, route_by_kernel
from lowbit.pylib.nn.gated_linear import Gate, in_halves, with_gate
from lowbit.pylib.nn.linear import act_of
from lowbit.pylib.nn.packed_module import PackedModule
from lowbit.pylib.nn.rotated import Rotation
from lowbit.pylib.nn.stacked_experts import target_of
from lowbit.pylib.operator import expert_schema
from lowbit.pylib.operator.expert_schema import by_ids
from lowbit.pylib.operator.schema import describe
from lowbit.pylib.quantization.api import quantize
from lowbit.pylib.quantization.config import QuantConfig
from lowbit.pylib.runtime.batch_invariant import called
from lowbit.pylib.runtime.expert_matmul import expert_matmul, spec_of_experts
from lowbit.pylib.runtime.top_k_experts import TopKExperts
from lowbit.pylib.torch_types import TORCH
from lowbit.pylib.weights.packed import PackedWeight
from lowbit.pylib.weights.sharding import Part

_MOST_CODES = 1 << 28  # of the experts whose weights are made at a time

LEAVE_DENSE = "leave experts dense with LowbitConfig(modules={'*.experts*': None}), or run the model with transformers"

GATES = {
    "silu": Gate("silu_mul", pairs=False),
    "gelu_tanh": Gate("gelu_mul", pairs=False),
    "swigluoai": Gate("swiglu_oai", pairs=True),
    "swigluoai_uninterleave": Gate("swiglu_oai", pairs=False),
}
"""What kernels apply to the sums of gate_up, by the names that vLLM has for it."""


@dataclass(frozen=True)
class ExpertKernels:
    """The kernels of the two matrices of experts, on one target.

    top_k    how many experts a token has
    among    how many experts ids are spread over, those of other processes among them; 0: those of the matrices
    sources  how many processes send as many tokens as this one has
    """

    gate_up: MatmulSpec
    down: MatmulSpec
    target: str
    top_k: int
    among: int = 0
    sources: int = 1

    def kernels(self, tokens: int) -> tuple[KernelRequest, ...]:
        """Returns what multiplies the slots of 1 to so many tokens of each process; nothing on a CPU."""
        few = self._few()
        return (*self._by_request(tokens), *(few.requests if few else ())) if parse_target(self.target).is_gpu else ()

    def _few(self) -> TopKExperts | None:
        """Returns what runs few tokens by ids and weights as servers give them, if anything does."""
        texts = (describe(spec, parse_target(self.target), None) for spec in (self.gate_up, self.down))
        return by_ids(*texts, self.top_k, torch.int32, torch.float32)

    def prepare(self, tokens: int) -> None:
        """Have these kernels ready in this process, and those that route tokens, permute, quantize and order rows of x,
        and add up."""
        on = parse_target(self.target)
        device = "cuda" if on.kind == "cuda" else "cpu"
        for spec, tile, slots in self._by_request(tokens).values() if on.is_gpu else ():
            expert_matmul(spec, on).prepare(tile, slots, device, in_order=spec is self.down)
        if few := self._few():
            few.prepare()
        for count in (1, min(tokens, FEW_ROWS + 1)) if on.is_gpu else ():
            self._prepare_others(count, device)

    def _prepare_others(self, tokens: int, device: str) -> None:
        """Run the kernels around the matmuls, for so many tokens that all have the first expert."""
        ids, weights = (torch.zeros(tokens, self.top_k, dtype=t, device=device) for t in (torch.int32, torch.float32))
        tile = _tiles(self.gate_up, self.down, self.target)[0]
        routing = route_by_kernel(ids, self.gate_up.experts, tile, self.target)
        for spec, rows, numbers in ((self.gate_up, tokens, routing.rows), (self.down, ids.numel(), routing.numbers)):
            if spec.permuted:
                x = torch.zeros(rows, spec.k, dtype=TORCH[spec.act], device=device)
                order = torch.zeros(spec.experts * spec.k, dtype=torch.int32, device=device)
                permute_by_kernel(x, order, numbers, routing.tiles, tile, self.target)
        o = torch.zeros(ids.numel(), self.down.outputs, dtype=TORCH[self.down.out_dtype], device=device)
        combine_by_kernel(o, routing, weights, self.target)

    def _by_request(self, tokens: int) -> dict[KernelRequest, tuple[MatmulSpec, int, int]]:
        """Returns the kernels, each with its matrix, a token tile, and a number of slots that it serves."""
        on, first = parse_target(self.target), dict[tuple[MatmulSpec, KernelSchedule], tuple[MatmulSpec, int, int]]()
        tiles = _tiles(self.gate_up, self.down, self.target)
        matrices = [(m, {kind: replace(kind, permuted=False) for kind in m.kinds}) for m in (self.gate_up, self.down)]
        for slots in range(self.top_k, self.top_k * tokens * self.sources + 1, self.top_k):
            tile = tile_for(tiles, slots, self.among or self.gate_up.experts)
            for spec, kinds in matrices:
                in_order = kinds[spec.for_rows(slots)].for_tokens(tile)
                schedule = schedule_for_few(in_order, tile, slots, on)
                if schedule is not None:
                    first.setdefault((in_order, schedule), (spec, tile, slots))
        return {request(in_order, on, schedule): where for (in_order, schedule), where in first.items()}

    def __str__(self) -> str:
        on = parse_target(self.target)
        text = f"{self.gate_up} and {self.down}, on {on}"
        families = dict.fromkeys(request.family for request in self.kernels(1 << 10))
        return f"{text}; kernels: {', '.join(families)}" if families else text


class Experts(nn.Module):
    """Low-bit experts with a gate that the kernel of gate_up applies.

    top_k    how many experts a token has
    among    how many experts ids are spread over, those of other processes among them; 0: those of the weights
    inputs   what multiplies tokens before they meet experts
    sources  how many processes send as many tokens as this one has

    Raises SpecError for weights that nothing multiplies for all experts, and for inputs of other sizes.
    """

    def __init__(
        self,
        gate_up: PackedWeight,
        down: PackedWeight,
        top_k: int = 1,
        among: int = 0,
        inputs: Sequence[Rotation] = (),
        sources: int = 1,
    ) -> None:
        super().__init__()
        self.inputs = nn.Sequential(*(each.to(gate_up.device) for each in inputs)) if inputs else None
        if wrong := [each for each in inputs if gate_up.spec.k % each.size]:
            raise SpecError(f"experts' inputs are scaled by {wrong[0].size} numbers, and have {gate_up.spec.k} columns")
        self.gate_up, self.down = (PackedModule(packed.spec, packed) for packed in (gate_up, down))
        self._top_k, self._among, self._sources = top_k, among, sources
        self._names = tuple(tuple(slot.name for slot in packed.spec.tensors) for packed in (gate_up, down))
        self._target: str | None = None
        self._kernels: tuple[str, ...] = ()
        self._tiles: tuple[int, ...] = ()
        if target := target_of(gate_up.device):
            self._describe(target)
            if parse_target(target).is_gpu and (gate_up.wide_range or down.wide_range):
                raise SpecError(f"experts have values beyond {gate_up.spec.act}, which no kernel takes; use bfloat16")

    @property
    def kernels(self) -> ExpertKernels | None:
        """What multiplies by them; None on meta."""
        target = target_of(self.gate_up.codes.device)
        return ExpertKernels(*self._specs(), target, self._top_k, self._among, self._sources) if target else None

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Returns the sum of each token's experts, by their weights: [tokens, hidden].

        x         [tokens, hidden]
        ids       int32 or int64 [tokens, k]; those that are no expert's add nothing
        weights   [tokens, k]
        """
        x = x if self.inputs is None else self.inputs(x)
        run, gate_up, down = self._operands(x)
        return run.sum_of_experts(x, ids, weights, gate_up, down, *self._kernels, self._tiles, self._among)

    def _operands(self, x: Tensor) -> tuple[Any, list[Tensor], list[Tensor]]:
        """Returns the operators, and the tensors of the two matrices."""
        target = cast(str, target_of(x.device))
        if self._target != target:
            self._describe(target)
        gate_up, down = (
            [getattr(module, name) for name in names] for module, names in zip((self.gate_up, self.down), self._names)
        )
        return torch.ops.lowbit if is_compiling() else expert_schema, gate_up, down

    def _specs(self) -> tuple[MatmulSpec, MatmulSpec]:
        """Returns what the kernels compute."""
        return called(self.gate_up.spec), called(self.down.spec)

    def _describe(self, target: str) -> None:
        """Finds what operators are told of the matrices. torch.compile need not trace it."""
        specs = self._specs()
        self._target, self._tiles = target, _tiles(*specs, target)
        self._kernels = tuple(describe(spec, parse_target(target), None) for spec in specs)


def _tiles(gate_up: MatmulSpec, down: MatmulSpec, target: str) -> tuple[int, ...]:
    """Returns the sizes of token tiles that both matrices have kernels for. Raises SpecError if there are none."""
    of_both = [expert_matmul(spec, parse_target(target)).tiles for spec in (gate_up, down)]
    found = tuple(tile for tile in of_both[0] if tile in of_both[1])
    if not found:
        raise SpecError(f"no kernel multiplies all experts of ({gate_up}) and ({down}) on {target}; {LEAVE_DENSE}")
    return found


def each_of(packed: PackedWeight) -> list[PackedWeight]:
    """Returns the weight of each expert, in the memory of that of all."""
    return _by_few(packed, 1)


def _by_few(packed: PackedWeight, count: int) -> list[PackedWeight]:
    """Returns the weights of so many experts at a time, in the memory of that of all."""
    experts = packed.spec.experts
    parts = {name: tensor.split(len(tensor) // experts * count) for name, tensor in packed.items()}
    of_few = ({name: part[i] for name, part in parts.items()} for i in range(-(-experts // count)))
    return [PackedWeight(_spec_of(packed.spec, min(count, experts - count * i)), t) for i, t in enumerate(of_few)]


def _spec_of(spec: MatmulSpec, experts: int) -> MatmulSpec:
    """Returns the spec of so many of a weight's experts."""
    return interned(replace(spec, n=spec.n // spec.experts * experts, experts=experts))


def stacked(weights: Sequence[PackedWeight]) -> PackedWeight:
    """Returns weights of one spec, of one expert or of several, as the weight of all."""
    whole = _spec_of(weights[0].spec, sum(packed.spec.experts for packed in weights))
    return PackedWeight(whole, {name: torch.cat([packed[name] for packed in weights]) for name in weights[0]})


def gated(packed: PackedWeight, gate: Gate) -> PackedWeight:
    """Returns the weight of the gate_up of experts, with its rows as a kernel wants them that applies the gate."""
    if packed.spec.is_gated:
        return packed
    some = max(1, _MOST_CODES * packed.spec.experts // (packed.spec.n * packed.spec.k))
    return stacked([with_gate(few, gate) for few in _by_few(packed, some)])


def quantize_experts(
    weight: Tensor, bias: Tensor | None, config: QuantConfig, gate: Gate | None = None
) -> PackedWeight:
    """Returns the quantized weight of all experts.

    weight   floats [experts, n, k]
    bias     [experts, n]
    gate     what is applied to the results; None: nothing
    """
    count, n, k = weight.shape
    spec = config.spec(n, k, act=act_of(weight), bias=bias is not None)
    spec = replace(spec, epilogue=None if gate is None else gate.epilogue)
    some = max(1, _MOST_CODES // (n * k))
    made: list[PackedWeight] = []
    for first in range(0, count, some):
        rows, biases = (None if t is None else t[first : first + some].flatten(0, 1) for t in (weight, bias))
        experts = len(weight[first : first + some])
        if gate is not None and gate.pairs:
            rows, biases = (None if t is None else in_halves(t, experts) for t in (rows, biases))
        quantized = quantize(cast(Tensor, rows), config.multiplied_in(spec.act))
        made.append(quantized.pack(spec_of_experts(spec, experts), biases))
    return stacked(made)


def part_of_expert(spec: MatmulSpec, matrix: str, gate: Gate, index: int, count: int) -> Part:
    """Returns what one of several processes has of an expert's matrix.

    matrix   "gate_up", of whose halves every process has a part, or "down"

    Raises PackError where it can't be cut into so many parts.
    """
    down = matrix == "down"
    size, halves = (spec.k, 1) if down else (spec.n, 1 if spec.is_gated or gate.pairs else 2)
    if size % (halves * count):
        raise PackError(f"{matrix} of experts, {spec.n} x {spec.k}, can't be cut into {count} equal parts")
    some = size // (halves * count)  # a block of rows of a gated weight has some of either half
    ranges = tuple(((half * count + index) * some, some) for half in range(halves))
    part = Part(((0, spec.n),), ranges[0]) if down else Part(ranges, (0, spec.k))
    if spec.is_gated and not part.is_cut_in_memory(spec):
        raise PackError(f"gate_up of experts has {spec.n} rows, and its parts in {count} processes no multiple of 16")
    return part


def check_one_spec(specs: Mapping[str, MatmulSpec]) -> MatmulSpec:
    """Returns the one spec that experts have. Raises SpecError for several, by the experts' names."""
    first, *others = specs
    for other in others:
        if specs[other] != specs[first]:
            raise SpecError(f"{first} is ({specs[first]}), and {other} ({specs[other]}); {LEAVE_DENSE}")
    return specs[first]
