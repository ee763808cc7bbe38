"""Transformer layers for few tokens on this machine's CPU, in native calls (`runtime.cpu_chain`).

    norm, projections to queries, keys and values, rotation
    attention, output projection plus residual, norm, gate and up projection with its activation, down projection plus
    residual

Where a model has norms behind attention and network, as Gemma's, they add the residual. `CpuLayer` is a layer in two
calls: between them the cache, of whatever kind, takes keys and values, and gives those to attend to. `CpuStack` is any
number of layers in one call, which writes into caches itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lowbit.dialect.elements import ELEMENTS
from lowbit.dialect.epilogue import RESIDUAL
from lowbit.dialect.errors import SpecError
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.cpu.layer_plans import CACHED, LANES, Attend, Norm, Rope
from lowbit.pylib.build import knobs
from lowbit.pylib.runtime.cpu import CpuMatmul, allocate
from lowbit.pylib.runtime.cpu_chain import (
    WORKSPACE,
    Argument,
    CpuChain,
    Step,
    Word,
    Workspace,
    between_step,
    matmul_step,
)
from lowbit.pylib.torch_types import TORCH

Update = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Takes keys and values [b, heads, t, columns] of new tokens into a cache; returns those to attend to."""


@dataclass(frozen=True)
class LayerShape:
    """What decides the programs of a layer.

    projections    to queries, keys and values: one for all, or three
    eps, shift     of all norms: (x / sqrt(mean of x^2 + eps)) * (gain + shift)
    norms_heads    whether queries and keys have norms
    norms_behind   whether attention and network have norms behind them
    """

    projections: tuple[MatmulSpec, ...]
    out: MatmulSpec
    gate_up: MatmulSpec
    down: MatmulSpec
    queries: int
    keys: int
    columns: int
    scale: float
    eps: float
    shift: float = 0.0
    norms_heads: bool = False
    norms_behind: bool = False

    @property
    def matmuls(self) -> tuple[MatmulSpec, ...]:
        """The specs of all matmuls, in the order in which they run."""
        return *self.projections, self.out, self.gate_up, self.down

    @property
    def act(self) -> str:
        return self.out.act

    @property
    def hidden(self) -> int:
        return self.out.n

    def why_not(self) -> str:
        """Returns why there are no programs for a layer, or ""."""
        heads = (self.queries + 2 * self.keys) * self.columns
        if self.columns % (2 * LANES) or self.hidden % LANES or self.queries % self.keys:
            return f"no program for heads of {self.columns} columns and {self.hidden} hidden ones"
        if len(self.projections) not in (1, 3) or sum(spec.n for spec in self.projections) != heads:
            return f"its projections do not make {heads} columns"
        if any(spec.act != self.act or spec.out_dtype != self.act for spec in self.matmuls):
            return "its layers differ in types"
        if any(spec.permuted or spec.compute or spec.invariant or spec.experts > 1 for spec in self.matmuls):
            return "its layers have stored orders, activations of 8 bits, or experts"
        return ""


@dataclass
class Weights:
    """The tensors of a layer.

    matmuls   those of each of `LayerShape.matmuls`
    gains     of norms: before attention, before the network; then of queries and keys; then behind both, if there are
    """

    matmuls: Sequence[Sequence[Tensor]]
    gains: Sequence[Tensor]


@dataclass
class Tokens:
    """Where tokens are.

    cos, sin   [b or 1, t, columns]: their rotations
    update     takes their keys and values into the cache
    mask       bool [b or 1, 1, t, length]: places that are looked at; None: all
    """

    cos: Tensor
    sin: Tensor
    update: Update
    mask: Tensor | None = None


@dataclass
class Places:
    """Where the tokens of a sequence are in memory, those before the call and new ones.

    keys, values   [b, heads, room, columns], columns and places side by side
    first          the place of the first new token
    length         of the places that are attended to, from 0 on
    mask           bool [b or 1, 1, t, length]: places that are looked at; None: all
    """

    keys: Tensor
    values: Tensor
    first: int
    length: int
    mask: Tensor | None = None


class CpuLayer:
    """The programs of a layer, for any number of tokens up to `most_tokens`. Raises TargetError where the CPU target
    does."""

    def __init__(self, shape: LayerShape) -> None:
        self.shape = shape
        self.matmuls = _matmuls(shape)
        self.most_tokens = min(mm.few_tokens for mm in self.matmuls)
        self.bytes, self.type = ELEMENTS[shape.act].bytes, TORCH[shape.act]
        self._chains: dict[tuple[int, int, bool], tuple[CpuChain, CpuChain]] = {}

    def decode(self, x: Tensor, weights: Weights, at: Tokens) -> Tensor:
        """Returns the output [b, t, hidden] of the layer for x [b, t, hidden], and appends to the cache.

        Raises SpecError for a mask with other places than the cache has.
        """
        s, (b, t, hidden) = self.shape, x.shape
        threads = self.matmuls[0].most_threads()
        before, after = self._chains_for(b * t, threads, at.mask is not None)
        addresses = self.addresses(weights)
        x, turn = x.contiguous(), expanded(at.cos, at.sin, b)
        q = allocate((b * t * s.queries * s.columns,), (1,), self.type)
        new = [self._empty(b, s.keys, t, s.columns) for _ in range(2)]
        given = x, *turn, q, *new
        work = allocate((before.workspace_bytes,), (1,), torch.uint8)
        strides = self._strides(*new)
        before.run(threads, [work.data_ptr(), *(each.data_ptr() for each in given), *strides, t], addresses)
        keys, values = (_by_place(each.to(self.type)) for each in at.update(*new))
        if at.mask is not None and at.mask.shape[3] != keys.shape[2]:
            raise SpecError(f"the mask has {at.mask.shape[3]} places, and the cache {keys.shape[2]}; give one for each")
        y = self._empty(b, t, hidden)
        places = Places(keys, values, 0, keys.shape[2], at.mask)
        work = allocate((after.workspace_bytes,), (1,), torch.uint8)
        scores = allocate((self.scores_bytes(b * t, keys.shape[2]),), (1,), torch.uint8)
        tensors = (work, scores, x, q, y)
        after.run(threads, [each.data_ptr() for each in tensors], self.where(places, t), addresses)
        return y

    def addresses(self, weights: Weights) -> list[int]:
        """Returns the addresses of a layer's tensors. Raises PackError where one has no memory, or too little."""
        operands = [a for mm, each in zip(self.matmuls, weights.matmuls) for a in mm.addresses(each)]
        return [*(gain.data_ptr() for gain in weights.gains), *operands]

    def where(self, at: Places, t: int) -> list[int]:
        """Returns the words of `Attend` for sequences of t new tokens."""
        mask = at.mask
        found = [at.keys.data_ptr(), at.values.data_ptr(), *self._strides(at.keys, at.values), at.length, t]
        if mask is None:
            return [*found, 0, 0, 0]
        return [*found, mask.data_ptr(), mask.stride(0) * (len(mask) > 1), mask.stride(2)]

    def scores_bytes(self, m: int, length: int) -> int:
        """Returns the bytes of scores of m tokens."""
        return Attend.scratch_bytes(m * self.shape.queries, length)

    def _empty(self, *shape: int) -> Tensor:
        strides = [prod(shape[n + 1 :]) for n in range(len(shape))]
        return allocate(shape, tuple(strides), self.type)

    def _strides(self, keys: Tensor, values: Tensor) -> list[int]:
        """Returns the words of `CACHED`."""
        (a, b, *_), (c, d, *_) = keys.stride(), values.stride()
        return [each * self.bytes for each in (a, b, c, d)]

    def _chains_for(self, m: int, threads: int, masked: bool) -> tuple[CpuChain, CpuChain]:
        key = m, threads, masked
        if (found := self._chains.get(key)) is None:
            found = self._chains[key] = self._before(m, threads), self._after(m, threads, masked)
        return found

    def _before(self, m: int, threads: int) -> CpuChain:
        steps = Steps(m, threads)
        x, cos, sin, q, *new = steps.name(6)
        words: dict[str, Word] = dict(zip((*CACHED, "tokens"), steps.name(len(CACHED) + 1)))
        LayerSteps(self, steps).before(x, (cos, sin), q, new, words)
        return steps.chain()

    def _after(self, m: int, threads: int, masked: bool) -> CpuChain:
        steps = Steps(m, threads)
        scores, x, q, y = steps.name(4)
        words = dict(zip(Attend.words, steps.name(len(Attend.words))))
        LayerSteps(self, steps).after(x, q, y, words, scores, masked)
        return steps.chain()


class CpuStack:
    """The programs of layers that run one behind the other, for any number of tokens up to `most_tokens`.

    layers      of one type and as many hidden columns
    rotations   the number of each layer's cos and sin among those of a call
    """

    def __init__(self, layers: Sequence[CpuLayer], rotations: Sequence[int]) -> None:
        self.layers, self._rotations = tuple(layers), tuple(rotations)
        self.most_tokens = min(layer.most_tokens for layer in layers)
        self._chains: dict[tuple[int, int, bool], CpuChain] = {}

    def decode(
        self, x: Tensor, addresses: NDArray[np.int64], turns: Sequence[tuple[Tensor, Tensor]], at: Sequence[Places]
    ) -> Tensor:
        """Returns the output [b, t, hidden] of the last layer for x [b, t, hidden], and writes into caches.

        addresses   as `addresses` gives them
        turns       cos and sin [b or 1, t, columns] of the new tokens
        at          for each layer, where its tokens are; all have masks, or none has
        """
        first, (b, t, hidden) = self.layers[0], x.shape
        threads, masked = first.matmuls[0].most_threads(), at[0].mask is not None
        chain = self._chain_for(b * t, threads, masked)
        longest = max(each.length for each in at)
        nbytes = max(layer.scores_bytes(b * t, longest) for layer in self.layers)
        work, scores = (allocate((size,), (1,), torch.uint8) for size in (chain.workspace_bytes, nbytes))
        y = allocate((b, t, hidden), (t * hidden, hidden, 1), first.type)
        given = [work, scores, x.contiguous(), y, *(each for turn in turns for each in expanded(*turn, b))]
        words = [each.data_ptr() for each in given]
        for layer, places in zip(self.layers, at):
            found = layer.where(places, t)
            begin = places.first * layer.shape.columns * layer.bytes
            words += (found[0] + begin, found[1] + begin, *found)
        chain.run(threads, words, addresses)
        return y

    def addresses(self, weights: Sequence[Weights]) -> NDArray[np.int64]:
        """Returns the addresses of all tensors. Raises PackError as `CpuLayer.addresses` does."""
        return np.array([a for layer, each in zip(self.layers, weights) for a in layer.addresses(each)], np.int64)

    def _chain_for(self, m: int, threads: int, masked: bool) -> CpuChain:
        key = m, threads, masked
        if (found := self._chains.get(key)) is None:
            found = self._chains[key] = self._chain(m, threads, masked)
        return found

    def _chain(self, m: int, threads: int, masked: bool) -> CpuChain:
        steps, first = Steps(m, threads), self.layers[0].shape
        scores, x, y = steps.name(3)
        turns = [steps.name(2) for _ in range(max(self._rotations) + 1)]
        places = [(steps.name(2), dict(zip(Attend.words, steps.name(len(Attend.words))))) for _ in self.layers]
        between = steps.buffer(first.act, first.hidden)
        afters = [between] * (len(self.layers) - 1) + [y]
        for layer, rotation, (new, words), after in zip(self.layers, self._rotations, places, afters):
            made, shape, (cos, sin) = LayerSteps(layer, steps), layer.shape, turns[rotation]
            with steps.work.scope():
                q = steps.buffer(shape.act, shape.queries * shape.columns)
                made.before(x, (cos, sin), q, new, words)
                made.after(x, q, after, words, scores, masked)
            x = after
        return steps.chain()


class Steps:
    """Makes the steps of a chain for m tokens, and numbers the arguments of its calls."""

    def __init__(self, m: int, threads: int) -> None:
        self.m, self.work = m, Workspace()
        self._threads, self._made, self._named = threads, list[Step](), WORKSPACE

    def name(self, count: int) -> list[Argument]:
        """Returns so many of a call's arguments, behind those that were named before."""
        first = self._named + 1
        self._named += count
        return [Argument(first + n) for n in range(count)]

    def buffer(self, act: str, columns: int) -> Argument:
        """Returns memory for a row of each token."""
        return self.work.take(self.m * columns * ELEMENTS[act].bytes)

    def norm(self, plan: Norm, gain: Word, x: Word, y: Word, residual: Word = 0) -> None:
        self.between(plan, self.m, x, y, {"gain": gain, "residual": residual})

    def between(
        self,
        plan: Norm | Rope | Attend,
        pieces: int,
        x: Word,
        y: Word,
        words: Mapping[str, Word],
        scratch: Word = 0,
    ) -> None:
        self._made.append(between_step(plan, pieces, x, y, words, scratch))

    def matmul(self, mm: CpuMatmul, x: Word, y: Word, operands: Sequence[Word]) -> None:
        self._made.append(matmul_step(mm, self.m, self._threads, x, y, operands, self.work))

    def chain(self) -> CpuChain:
        return CpuChain(self._made, self.work)


class LayerSteps:
    """Makes the steps of a layer. Its weights (`CpuLayer.addresses`) are the next arguments of a call."""

    def __init__(self, layer: CpuLayer, steps: Steps) -> None:
        self._shape, self._matmuls, self._steps = layer.shape, layer.matmuls, steps
        self._bytes = layer.bytes
        self._gains = steps.name(2 + 2 * self._shape.norms_heads + 2 * self._shape.norms_behind)
        self._operands = [steps.name(len(spec.tensors)) for spec in self._shape.matmuls]

    def before(
        self, x: Word, turn: tuple[Word, Word], q: Word, new: Sequence[Word], words: Mapping[str, Word]
    ) -> None:
        """Makes the steps up to the cache. new: where keys and values go; words: by name those of a `Rope`'s cache."""
        s, steps = self._shape, self._steps
        with steps.work.scope():
            h = self._buffer(s.hidden)
            projected = [self._buffer(spec.n) for spec in s.projections]
            self._norm(0, x, h)
            for index, y in enumerate(projected):
                self._matmul(index, h, y)
            words = {**words, **self._projected(projected), "cos": turn[0], "sin": turn[1]}
            words |= {"q_out": q, "k_out": new[0], "v_out": new[1]}
            if s.norms_heads:
                words |= {"q_gain": self._gains[2], "k_gain": self._gains[3]}
            plan = Rope(s.act, s.queries, s.keys, s.columns, s.norms_heads, s.eps, s.shift)
            steps.between(plan, steps.m * plan.heads, 0, 0, words)

    def after(self, x: Word, q: Word, y: Word, words: Mapping[str, Word], scores: Word, masked: bool) -> None:
        """Makes the steps behind the cache; y may be x. words: by name those of `Attend`."""
        s, steps, count = self._shape, self._steps, len(self._shape.projections)
        with steps.work.scope():
            a, middle, h = (self._buffer(columns) for columns in (s.queries * s.columns, s.hidden, s.hidden))
            gated = self._buffer(s.gate_up.outputs)
            attend = Attend(s.act, s.queries, s.keys, s.columns, s.scale, masked)
            steps.between(attend, steps.m * s.queries, q, a, words, scores)
            self._adding(count, a, x, middle, behind=0)
            self._norm(1, middle, h)
            self._matmul(count + 1, h, gated)
            self._adding(count + 2, gated, middle, y, behind=1)

    def _buffer(self, columns: int) -> Argument:
        return self._steps.buffer(self._shape.act, columns)

    def _projected(self, made: Sequence[Argument]) -> dict[str, Word]:
        """Returns where a token's queries, keys and values are in what projections have made."""
        s = self._shape
        words = dict[str, Word]()
        firsts = 0, s.queries, s.queries + s.keys
        for name, first, own in zip("qkv", firsts, range(3)):
            together = len(made) == 1
            place = made[0].behind(first * s.columns * self._bytes) if together else made[own]
            words |= {name: place, f"{name}_row": s.projections[0 if together else own].n * self._bytes}
        return words

    def _norm(self, gain: int, x: Word, y: Word, residual: Word = 0) -> None:
        s = self._shape
        plan = Norm(s.act, s.hidden, s.eps, s.shift, residual != 0)
        self._steps.norm(plan, self._gains[gain], x, y, residual)

    def _matmul(self, index: int, x: Word, y: Word, *others: Word) -> None:
        self._steps.matmul(self._matmuls[index], x, y, (*self._operands[index], *others))

    def _adding(self, index: int, x: Word, residual: Word, y: Word, behind: int) -> None:
        """A matmul and a residual, added by its epilogue or by the norm behind it."""
        if not self._shape.norms_behind:
            self._matmul(index, x, y, residual)
            return
        with self._steps.work.scope():
            sums = self._buffer(self._shape.hidden)
            self._matmul(index, x, sums)
            self._norm(behind - 2, sums, y, residual)


def expanded(cos: Tensor, sin: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """Returns the rotations [b, t, columns] of b sequences."""
    if len(cos) == b and cos.is_contiguous() and sin.is_contiguous():
        return cos, sin
    first, second = (each.expand(b, -1, -1).contiguous() for each in (cos, sin))
    return first, second


def _matmuls(shape: LayerShape) -> list[CpuMatmul]:
    """Returns the matmuls of a layer; those that end in a residual add it, unless a norm does."""
    first = len(shape.projections)
    added = () if shape.norms_behind else (first, first + 2)
    specs = (replace(spec, epilogue=RESIDUAL) if n in added else spec for n, spec in enumerate(shape.matmuls))
    return [_matmul_of(spec) for spec in specs]


@lru_cache(maxsize=256)
def _matmul_of(spec: MatmulSpec) -> CpuMatmul:
    return CpuMatmul(spec, knobs.cpu(), knobs.num_threads())


def _by_place(cached: Tensor) -> Tensor:
    """Returns keys or values [b, heads, length, columns] with the columns of places side by side."""
    _, _, place, column = cached.stride()
    return cached if column == 1 and place == cached.shape[3] else cached.contiguous()
