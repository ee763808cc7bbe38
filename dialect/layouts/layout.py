"""The algebra of tile layouts: which thread holds which elements of a tile, and in which slot.

A layout maps (thread, local slot) to the index of an element of an n-d tile, one to one up to replication.
Two kinds of atoms, `local(*shape)` (one thread holds all, row-major) and `spatial(*shape)` (one element per
thread, row-major), and the product `f * g` (every element of the outer layout f is a tile laid out as g)
reach the layouts that tensor cores and vector loads ask for. The A fragment of mma.m16n8k8 is

    local(2, 1).spatial(8, 4).local(1, 2)

Inside, thread and slot are numbers in mixed radix, and every digit adds digit * stride to one coordinate.
Products, quotients, inverses, reshapes and reductions rewrite these lists of digits. Neighbours that form one
longer digit are merged, which leaves one form per map: two layouts are equal as values exactly when they are
equal as maps.

Source of the method: Tilus (Ding et al., 2025), section 4 and appendix A.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from math import prod

import numpy as np
from numpy.typing import NDArray

from lowbit.dialect.errors import LayoutError
from lowbit.dialect.layouts import mixed_radix as radix
from lowbit.dialect.layouts.mixed_radix import Digit, Mode
from lowbit.dialect.layouts.text import product_of_atoms

_KNOWN = 4096  # layouts whose products and moves are kept: a kernel asks for the same ones again and again


@dataclass(frozen=True)
class Layout:
    """The map from (thread, local slot) to the index of an element of a tile of the given shape.

    Every dim of `shape` is cut, major to minor, into consecutive modes of `mode_shape`. A mode is a digit
    either of the thread or of the slot. `spatial_modes` lists the mode numbers from the most to the least
    significant digit of the thread; an entry -s is a replication digit of size s: threads that differ only
    there hold the same elements. `local_modes` lists the digits of the slot.

    The constructor brings its arguments into canonical form: no mode of size 1, and modes that are neighbours
    both in their dim and in their list are one mode. Hence == is equality of maps.

    Raises LayoutError when the modes do not tile the shape or are not listed exactly once.
    """

    shape: tuple[int, ...]
    mode_shape: tuple[int, ...]
    spatial_modes: tuple[int, ...]
    local_modes: tuple[int, ...]

    def __post_init__(self) -> None:
        shape = tuple(map(operator.index, self.shape))
        modes = radix.modes_of(shape, tuple(map(operator.index, self.mode_shape)))
        numbers = sorted(m for m in (*self.spatial_modes, *self.local_modes) if m >= 0)
        if numbers != list(range(len(modes))) or any(m < 0 for m in self.local_modes):
            raise LayoutError(
                f"modes={self.mode_shape}: every mode number 0..{len(modes) - 1} must be once in spatial="
                f"{self.spatial_modes} or local={self.local_modes}; only spatial may replicate (-size)"
            )
        spatial = radix.merge(modes[m] if m >= 0 else radix.replica(-m) for m in self.spatial_modes)
        local = radix.merge(modes[m] for m in self.local_modes)
        fields = ("shape", "mode_shape", "spatial_modes", "local_modes")
        for field, value in zip(fields, (shape, *radix.numbered(spatial, local))):
            object.__setattr__(self, field, value)  # frozen for everyone else

    # Sizes and digits

    @property
    def rank(self) -> int:
        """Number of dims of the tile."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements of the tile."""
        return prod(self.shape)

    @cached_property
    def threads(self) -> int:
        """Number of threads, replicas included."""
        return prod(mode.size for mode in self._spatial)

    @cached_property
    def locals(self) -> int:
        """Number of elements that each thread holds."""
        return prod(mode.size for mode in self._local)

    @cached_property
    def replication(self) -> int:
        """Number of threads that hold the same element."""
        return prod(mode.size for mode in self._spatial if mode.dim < 0)

    def thread_digits(self) -> list[Digit]:
        """The digits of the thread that move the element, most significant first.

        Coordinate d of slot l of thread t is the sum of ((t // divisor) % size) * stride over the thread
        digits of dim d plus the sum of ((l // divisor) % size) * stride over the local digits of dim d.
        """
        return radix.digits(self._spatial)

    def local_digits(self) -> list[Digit]:
        """The digits of the slot, most significant first; see `thread_digits`."""
        return radix.digits(self._local)

    @cached_property
    def _spatial(self) -> list[Mode]:
        modes = radix.modes_of(self.shape, self.mode_shape)
        return [modes[m] if m >= 0 else radix.replica(-m) for m in self.spatial_modes]

    @cached_property
    def _local(self) -> list[Mode]:
        modes = radix.modes_of(self.shape, self.mode_shape)
        return [modes[m] for m in self.local_modes]

    # The map

    def index(self, thread: int, local: int = 0) -> tuple[int, ...]:
        """The index of the element in slot `local` of `thread`."""
        if not (0 <= thread < self.threads and 0 <= local < self.locals):
            raise LayoutError(f"thread {thread}, slot {local}: ({self}) has {self.threads} x {self.locals}")
        coords = [0] * self.rank
        for x, digits in ((thread, self.thread_digits()), (local, self.local_digits())):
            for size, divisor, dim, stride in digits:
                coords[dim] += x // divisor % size * stride
        return tuple(coords)

    def owner(self, index: Sequence[int]) -> list[tuple[int, int]]:
        """All (thread, local) that hold the element at `index`, by thread; one unless replicated."""
        if len(index) != self.rank or any(not 0 <= i < n for i, n in zip(index, self.shape)):
            raise LayoutError(f"index {tuple(index)} is outside a tile of shape {self.shape}")

        def number(digits: list[Digit]) -> int:
            return sum(index[dim] // stride % size * divisor for size, divisor, dim, stride in digits)

        thread, local = number(self.thread_digits()), number(self.local_digits())
        divisors = zip(self._spatial, radix.divisors(self._spatial))
        replicas = [range(0, mode.size * divisor, divisor) for mode, divisor in divisors if mode.dim < 0]
        return [(thread + sum(replica), local) for replica in product(*replicas)]

    def table(self) -> NDArray[np.int64]:
        """All indices at once: int64 [threads, locals, rank]."""
        return radix.coords(self._spatial, self.rank)[:, None] + radix.coords(self._local, self.rank)

    # Product, quotients, inverse

    def __mul__(self, inner: Layout) -> Layout:
        """The product, self outside and `inner` inside.

        Associative, not commutative, with identity local(1, ..., 1):
        (f * g)(t, l) = f(t // g.threads, l // g.locals) * g.shape + g(t % g.threads, l % g.locals)
        """
        if self.rank != inner.rank:
            raise LayoutError(f"({self}) * ({inner}) needs equal ranks, not {self.rank} and {inner.rank}")

        def scaled(modes: list[Mode]) -> list[Mode]:
            return [m if m.dim < 0 else m._replace(stride=m.stride * inner.shape[m.dim]) for m in modes]

        shape = tuple(map(operator.mul, self.shape, inner.shape))
        return _assemble(shape, scaled(self._spatial) + inner._spatial, scaled(self._local) + inner._local)

    def __truediv__(self, inner: Layout) -> Layout:
        """The quotient h / g: the one f with f * g == h. Raises LayoutError when there is none."""
        factors = self._factor(inner.shape, inner.threads, inner.locals)
        if factors is None or factors[1] != inner:
            raise LayoutError(f"({self}) / ({inner}): there is no f with f * ({inner}) == ({self})")
        return factors[0]

    def _factor(self, shape: tuple[int, ...], threads: int, slots: int) -> tuple[Layout, Layout] | None:
        """The (f, g) with f * g == self where g has the given sizes, which leave no choice; None if none."""
        if len(shape) != self.rank or any(m < 1 or n % m for n, m in zip(self.shape, shape)):
            return None

        def unscaled(modes: list[Mode]) -> list[Mode]:
            return [m if m.dim < 0 else m._replace(stride=m.stride // shape[m.dim]) for m in modes]

        try:
            outer_spatial, inner_spatial = radix.cut(self._spatial, threads)
            outer_local, inner_local = radix.cut(self._local, slots)
            inner = _assemble(shape, inner_spatial, inner_local)
            outer_shape = tuple(n // m for n, m in zip(self.shape, shape))
            return _assemble(outer_shape, unscaled(outer_spatial), unscaled(outer_local)), inner
        except LayoutError:
            return None

    def inverse(self) -> Layout:
        """The inverse map of a layout of a matrix without replication. f.inverse().inverse() == f.

        A layout of rank 2 maps (thread, local) to (row, column). Its inverse maps (row, column) to (thread,
        local): it has shape (threads, locals), shape[0] threads and shape[1] slots. Bring other ranks to rank
        2 first: f.reshape((1, f.size)).inverse().index(0, i) is the (thread, local) of the i-th element,
        row-major.
        """
        if self.rank != 2 or self.replication > 1:
            raise LayoutError(
                f"({self}) has rank {self.rank} and replication {self.replication}; an inverse needs rank 2 "
                "and no replication: reshape first, or ask owner(index)"
            )
        dims: tuple[list[tuple[int, Mode]], ...] = ([], [])
        for kind, digits in enumerate((self.thread_digits(), self.local_digits())):
            for size, divisor, dim, stride in digits:
                dims[dim].append((stride, Mode(size, kind, divisor)))
        rows, columns = ([mode for _, mode in sorted(dim, reverse=True)] for dim in dims)
        return _assemble((self.threads, self.locals), rows, columns)

    # self * atom, as in local(2, 1).spatial(8, 4).local(1, 2)

    def local(self, *shape: int) -> Layout:
        """self * local(*shape)."""
        return self * local(*shape)

    def spatial(self, *shape: int) -> Layout:
        """self * spatial(*shape)."""
        return self * spatial(*shape)

    def column_local(self, *shape: int) -> Layout:
        """self * column_local(*shape)."""
        return self * column_local(*shape)

    def column_spatial(self, *shape: int) -> Layout:
        """self * column_spatial(*shape)."""
        return self * column_spatial(*shape)

    def replicated(self, threads: int) -> Layout:
        """self * replicated(threads, self.rank): groups of `threads` neighbours hold the same elements."""
        return self * replicated(threads, self.rank)

    # Change of shape

    def reshape(self, shape: Sequence[int]) -> Layout:
        """The same elements, numbered row-major, as a tile of another shape.

        Raises LayoutError when the sizes differ or a mode would straddle the new dims.
        """
        shape = tuple(shape)
        try:
            spatial, local = (radix.reshaped(modes, self.shape, shape) for modes in (self._spatial, self._local))
        except LayoutError:
            raise LayoutError(f"cannot reshape ({self}) of shape {self.shape} to {shape}") from None
        return _assemble(shape, spatial, local)

    def unsqueeze(self, dim: int) -> Layout:
        """A new dim of size 1 before dim `dim`; dim == rank: at the end."""
        if not 0 <= dim <= self.rank:
            raise LayoutError(f"unsqueeze dim={dim} must be in 0..{self.rank}")
        return self.reshape((*self.shape[:dim], 1, *self.shape[dim:]))

    def permute(self, dims: Sequence[int]) -> Layout:
        """Transposed: dim i of the result is dim dims[i] of self."""
        dims = self._dims(dims)
        if len(dims) != self.rank:
            raise LayoutError(f"permute needs all {self.rank} dims, not {dims}")

        def renamed(modes: list[Mode]) -> list[Mode]:
            return [m if m.dim < 0 else m._replace(dim=dims.index(m.dim)) for m in modes]

        return _assemble(tuple(self.shape[d] for d in dims), renamed(self._spatial), renamed(self._local))

    # Reduction, broadcast, parts

    def reduce(self, dims: Sequence[int]) -> Layout:
        """The layout of a reduction over `dims`, which stay with size 1.

        Slots along these dims are summed up inside their thread; all threads along them get the result.
        """
        dims = self._dims(dims)
        shape = tuple(1 if d in dims else n for d, n in enumerate(self.shape))
        spatial = [radix.replica(m.size) if m.dim in dims else m for m in self._spatial]
        return _assemble(shape, spatial, [m for m in self._local if m.dim not in dims])

    def broadcast_to(self, shape: Sequence[int]) -> Layout:
        """Dims of size 1 grow to `shape`, in the fastest slots of every thread: no data moves.

        f.broadcast_to(shape).reduce(grown dims) == f. To reach a given layout, see `slots_for`.
        """
        shape = tuple(shape)
        grown = [Mode(shape[d], d, 1) for d in self._grown_dims(shape)]
        return _assemble(shape, self._spatial, self._local + grown)

    def slots_for(self, target: Layout) -> tuple[int, ...]:
        """Returns for each slot of `target` the slot of self, in the same thread, with its element (broadcast).

        With equal shapes this is a renaming of registers. Raises LayoutError when no fixed choice of slots
        does it, because elements would move between threads.
        """
        reduced = target.reduce(self._grown_dims(target.shape))
        if reduced._spatial != self._spatial:
            raise LayoutError(f"({self}) to ({target}) moves elements between threads")
        return _slots(self.shape, tuple(self._local), tuple(target._local))

    def restrict(self, dim: int, start: int, length: int) -> tuple[Layout, tuple[int, ...]]:
        """The sub-tile [start, start + length) of `dim`: its layout, and its slots as slots of self.

        Raises LayoutError unless local digits alone cut out the range, so that every thread keeps its part of
        it.
        """
        (dim,) = self._dims((dim,))
        if start < 0 or length < 1 or start + length > self.shape[dim]:
            raise LayoutError(f"[{start}, {start + length}) is no range of dim {dim} of shape {self.shape}")
        modes = radix.in_dim_order(self._spatial + self._local)
        values = {mode: range(mode.size) for mode in modes}  # that the digit takes in the sub-tile
        low, left = start, length  # the range within the current value of the digits above
        for mode in (m for m in modes if m.dim == dim):
            first, low = divmod(low, mode.stride)
            count, rest = divmod(left, mode.stride) if left >= mode.stride else (1, 0)
            left = min(left, mode.stride)
            if rest or low + left > mode.stride or (count < mode.size and mode not in self._local):
                raise LayoutError(
                    f"local digits alone do not cut [{start}, {start + length}) of dim {dim} of ({self})"
                )
            values[mode] = range(first, first + count)
        numbers = product(*(values[mode] for mode in self._local))
        slots = tuple(sum(map(operator.mul, number, radix.divisors(self._local))) for number in numbers)
        shape = (*self.shape[:dim], length, *self.shape[dim + 1 :])
        return _assemble(shape, self._spatial, [m._replace(size=len(values[m])) for m in self._local]), slots

    def _dims(self, dims: Sequence[int]) -> tuple[int, ...]:
        positive = tuple(d + self.rank if d < 0 else d for d in dims)
        if any(not 0 <= d < self.rank for d in positive) or len(set(positive)) < len(positive):
            raise LayoutError(f"dims {tuple(dims)} must be distinct dims of a tile of rank {self.rank}")
        return positive

    def _grown_dims(self, shape: tuple[int, ...]) -> list[int]:
        if len(shape) != self.rank or any(n not in (1, m) for n, m in zip(self.shape, shape)):
            raise LayoutError(f"cannot broadcast {self.shape} to {shape}: only dims of size 1 grow")
        return [d for d, (n, m) in enumerate(zip(self.shape, shape)) if n != m]

    # Text

    def __str__(self) -> str:
        """A product of atoms where there is one, else layout(shape=, modes=, spatial=, local=)."""
        return self._text

    @cached_property
    def _text(self) -> str:
        return product_of_atoms(self.rank, self._local, self._spatial) or (
            f"layout(shape={self.shape}, modes={self.mode_shape}, spatial={self.spatial_modes}, "
            f"local={self.local_modes})"
        )


# Constructors


def local(*shape: int) -> Layout:
    """One thread holds the whole tile, in row-major order."""
    return Layout(shape, shape, (), tuple(range(len(shape))))


def spatial(*shape: int) -> Layout:
    """One element per thread, threads in row-major order."""
    return Layout(shape, shape, tuple(range(len(shape))), ())


def column_local(*shape: int) -> Layout:
    """One thread holds the whole tile, in column-major order: dim 0 is the fastest."""
    return Layout(shape, shape, (), tuple(reversed(range(len(shape)))))


def column_spatial(*shape: int) -> Layout:
    """One element per thread, threads in column-major order: dim 0 is the fastest."""
    return Layout(shape, shape, tuple(reversed(range(len(shape)))), ())


def replicated(threads: int, rank: int) -> Layout:
    """A tile of one element, of shape (1, ..., 1), of which every thread has a copy."""
    return Layout((1,) * rank, (), (-threads,), ())


def _assemble(shape: tuple[int, ...], spatial: Sequence[Mode], local: Sequence[Mode]) -> Layout:
    """The layout with these digits; LayoutError when their strides do not tile the shape."""
    return _assembled(shape, tuple(spatial), tuple(local))


@lru_cache(maxsize=_KNOWN)
def _assembled(shape: tuple[int, ...], spatial: tuple[Mode, ...], local: tuple[Mode, ...]) -> Layout:
    merged = radix.merge(spatial), radix.merge(local)
    mode_shape, spatial_modes, local_modes = radix.numbered(*merged)
    if radix.modes_of(shape, mode_shape) != radix.in_dim_order(merged[0] + merged[1]):
        raise LayoutError(f"strides of {merged[0]} and {merged[1]} do not tile shape={shape}")
    return Layout(shape, mode_shape, spatial_modes, local_modes)


@lru_cache(maxsize=_KNOWN)
def _slots(shape: tuple[int, ...], source: tuple[Mode, ...], target: tuple[Mode, ...]) -> tuple[int, ...]:
    """Returns for each slot with the target's digits the slot with its element, broadcast from a tile of this shape."""
    held = {tuple(index): slot for slot, index in enumerate(radix.coords(list(source), len(shape)).tolist())}
    wanted = np.minimum(radix.coords(list(target), len(shape)), np.array(shape, dtype=np.int64) - 1)
    return tuple(held[tuple(index)] for index in wanted.tolist())
