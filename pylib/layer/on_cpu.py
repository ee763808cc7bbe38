"""A transformer layer for few tokens on this machine's CPU, in two native calls (`runtime.cpu_chain`).

    norm, projections to queries, keys and values, rotation
    attention, output projection plus residual, norm, gate and up projection with its activation, down projection plus
    residual

Between them the cache, of whatever kind, takes keys and values, and gives those to attend to. Where a model has norms
behind attention and network, as Gemma's, they add the residual.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from lowbit.dialect.elements import ELEMENTS
from lowbit.dialect.epilogue import RESIDUAL
from lowbit.dialect.errors import SpecError
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.cpu.layer_plans import LANES, Attend, Norm, Rope
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


class CpuLayer:
    """The programs of a layer, for any number of tokens up to `most_tokens`. Raises TargetError where the CPU target
    does."""

    def __init__(self, shape: LayerShape) -> None:
        self.shape = shape
        self._matmuls = _matmuls(shape)
        self.most_tokens = min(mm.few_tokens for mm in self._matmuls)
        self._bytes = ELEMENTS[shape.act].bytes
        self._type = TORCH[shape.act]
        self._chains: dict[tuple[int, int, bool], tuple[CpuChain, CpuChain]] = {}

    def decode(self, x: Tensor, weights: Weights, at: Tokens) -> Tensor:
        """Returns the output [b, t, hidden] of the layer for x [b, t, hidden], and appends to the cache.

        Raises SpecError for a mask with other places than the cache has.
        """
        shape, (b, t, hidden) = self.shape, x.shape
        threads = self._matmuls[0].most_threads()
        before, after = self._chains_for(b * t, threads, at.mask is not None)
        operands = [a for mm, each in zip(self._matmuls, weights.matmuls) for a in mm.addresses(each)]
        gains = [gain.data_ptr() for gain in weights.gains]
        x, cos, sin = x.contiguous(), *(each.expand(b, t, -1).contiguous() for each in (at.cos, at.sin))
        projected = self._memory(b * t * (shape.queries + 2 * shape.keys) * shape.columns)
        turned = self._memory(b * t * (shape.queries + shape.keys) * shape.columns)
        arrays = [each.data_ptr() for each in (x, cos, sin, projected, turned)]
        work = allocate((before.workspace_bytes,), (1,), torch.uint8)
        before.run((work.data_ptr(), *arrays, *gains, *operands), threads)
        keys, values = (_by_place(each.to(self._type)) for each in at.update(*self._new(projected, turned, b, t)))
        if at.mask is not None and at.mask.shape[3] != keys.shape[2]:
            raise SpecError(f"the mask has {at.mask.shape[3]} places, and the cache {keys.shape[2]}; give one for each")
        y = allocate((b, t, hidden), (t * hidden, hidden, 1), self._type)
        where, scores = self._where(keys, values, at.mask, b, t)
        work = allocate((after.workspace_bytes + scores,), (1,), torch.uint8)
        after.run((work.data_ptr(), arrays[0], arrays[4], y.data_ptr(), *where, *gains, *operands), threads)
        return y

    def _memory(self, count: int) -> Tensor:
        return allocate((count,), (1,), self._type)

    def _new(self, projected: Tensor, turned: Tensor, b: int, t: int) -> tuple[Tensor, Tensor]:
        """Returns the new tokens' keys and values [b, heads, t, columns]."""
        s = self.shape
        keys = turned[b * t * s.queries * s.columns :].view(b, t, s.keys, s.columns)
        if len(s.projections) == 1:
            values = projected.view(b, t, -1, s.columns)[:, :, s.queries + s.keys :]
        else:
            values = projected[b * t * (s.queries + s.keys) * s.columns :].view(b, t, s.keys, s.columns)
        return keys.transpose(1, 2), values.transpose(1, 2)

    def _where(self, keys: Tensor, values: Tensor, mask: Tensor | None, b: int, t: int) -> tuple[list[int], int]:
        """Returns the arguments that say where attention finds keys, values and mask, and the bytes of scores."""
        length, found = keys.shape[2], [keys.data_ptr(), values.data_ptr()]
        for each in (keys, values):
            found += [each.stride(0) * self._bytes, each.stride(1) * self._bytes]
        found += [length, t]
        found += (0, 0, 0) if mask is None else (mask.data_ptr(), mask.stride(0) * (len(mask) > 1), mask.stride(2))
        return found, Attend.scratch_bytes(b * t * self.shape.queries, length)

    def _chains_for(self, m: int, threads: int, masked: bool) -> tuple[CpuChain, CpuChain]:
        key = m, threads, masked
        if (found := self._chains.get(key)) is None:
            makers = [_Maker(self.shape, self._matmuls, m, threads) for _ in range(2)]
            found = self._chains[key] = makers[0].before(), makers[1].after(masked)
        return found


_WORDS: tuple[str, ...] = Attend.words  # in the order in which a call gives them


class _Maker:
    """Makes the two chains of a layer for m tokens."""

    def __init__(self, shape: LayerShape, matmuls: Sequence[CpuMatmul], m: int, threads: int) -> None:
        self._shape, self._matmuls, self._m, self._threads = shape, matmuls, m, threads
        self._bytes, self._work = ELEMENTS[shape.act].bytes, Workspace()
        self._steps = list[Step]()
        self._gains, self._operands = list[Argument](), list[list[Argument]]()

    def before(self) -> CpuChain:
        """Returns the chain up to the cache."""
        x, cos, sin, projected, turned = self._name(5)
        h = self._buffer(self._shape.hidden)
        self._norm(0, x, h)
        places = list[tuple[Argument, int]]()  # of queries and keys, and bytes of a row
        for index, spec in enumerate(self._shape.projections):
            self._matmul(index, h, projected)
            places.append((projected, spec.n * self._bytes))
            projected = projected.behind(self._m * spec.n * self._bytes)
        self._rope(places, turned, cos, sin)
        return CpuChain(self._steps, self._work)

    def after(self, masked: bool) -> CpuChain:
        """Returns the chain behind the cache."""
        x, q, y, *where = self._name(3 + len(_WORDS))
        s, count = self._shape, len(self._shape.projections)
        a, middle, h = (self._buffer(columns) for columns in (s.queries * s.columns, s.hidden, s.hidden))
        gated = self._buffer(s.gate_up.outputs)
        words: dict[str, Word] = dict(zip(_WORDS, where))
        self._adding(count, a, x, middle, behind=0)
        self._norm(1, middle, h)
        self._matmul(count + 1, h, gated)
        self._adding(count + 2, gated, middle, y, behind=1)
        scores = Argument(WORKSPACE, self._work.nbytes)
        self._steps.insert(0, between_step(_attention(s, masked), self._m * s.queries, q, a, words, scores))
        return CpuChain(self._steps, self._work)

    def _name(self, count: int) -> list[Argument]:
        """Returns so many arguments behind the workspace; those behind them are gains and operands."""
        first = WORKSPACE + 1 + count
        gains = 2 + 2 * self._shape.norms_heads + 2 * self._shape.norms_behind
        self._gains = [Argument(first + n) for n in range(gains)]
        first += gains
        for spec in self._shape.matmuls:
            self._operands.append([Argument(first + n) for n in range(len(spec.tensors))])
            first += len(spec.tensors)
        return [Argument(WORKSPACE + 1 + n) for n in range(count)]

    def _buffer(self, columns: int) -> Argument:
        return self._work.take(self._m * columns * self._bytes)

    def _norm(self, gain: int, x: Word, y: Word, residual: Word | None = None) -> None:
        s = self._shape
        plan = Norm(s.act, s.hidden, s.eps, s.shift, residual is not None)
        self._steps.append(between_step(plan, self._m, x, y, {"gain": self._gains[gain], "residual": residual or 0}))

    def _matmul(self, index: int, x: Word, y: Word, *others: Word) -> None:
        operands = (*self._operands[index], *others)
        mm = self._matmuls[index]
        self._steps.append(matmul_step(mm, self._m, self._threads, x, y, operands, self._work))

    def _adding(self, index: int, x: Word, residual: Word, y: Word, behind: int) -> None:
        """A matmul and a residual, added by its epilogue or by the norm behind it."""
        if not self._shape.norms_behind:
            self._matmul(index, x, y, residual)
            return
        sums = self._buffer(self._shape.hidden)
        self._matmul(index, x, sums)
        self._norm(behind - 2, sums, y, residual)

    def _rope(self, places: Sequence[tuple[Argument, int]], turned: Argument, cos: Word, sin: Word) -> None:
        s = self._shape
        (q, q_row), (k, k_row) = places[:2] if len(places) > 1 else (places[0], places[0])
        k = k if len(places) > 1 else q.behind(s.queries * s.columns * self._bytes)
        out = turned.behind(self._m * s.queries * s.columns * self._bytes)
        words: dict[str, Word] = {"q": q, "q_row": q_row, "k": k, "k_row": k_row, "q_out": turned, "k_out": out}
        words |= {"cos": cos, "sin": sin}
        if s.norms_heads:
            words |= {"q_gain": self._gains[2], "k_gain": self._gains[3]}
        plan = Rope(s.act, s.queries, s.keys, s.columns, s.norms_heads, s.eps, s.shift)
        self._steps.append(between_step(plan, self._m * (s.queries + s.keys), 0, 0, words))


def _attention(s: LayerShape, masked: bool) -> Attend:
    return Attend(s.act, s.queries, s.keys, s.columns, s.scale, masked)


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
