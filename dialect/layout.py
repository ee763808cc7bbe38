"""The algebra of tile layouts: which thread of a block holds which elements of a tile, and in which slot.

A layout is a bijection, up to replication, from (thread, local slot) to the index of an element in an n-d tile.
Two kinds of atoms, `local(*shape)` (one thread holds everything, row-major) and `spatial(*shape)` (one element
per thread, row-major), and the product `f * g` (every element of the outer layout f is a tile laid out as g)
reach the layouts that tensor cores and vector loads ask for. The A fragment of mma.m16n8k8 is

    local(2, 1).spatial(8, 4).local(1, 2)

Inside, the thread index and the slot index are numbers in mixed radix, and every digit adds digit * stride to one
coordinate. Products, quotients, inverses, reshapes and reductions are rewrites of these lists of digits, and merging
neighbouring digits gives one form per function: two layouts are equal as values when they are equal as maps.

Source of the method: Tilus (Ding et al., 2025), section 4 and appendix A.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, product
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dialect.errors import LayoutError


class Digit(NamedTuple):
    """A digit of a thread or slot index x: it adds ((x // divisor) % size) * stride to coordinate `dim`."""

    size: int
    divisor: int
    dim: int
    stride: int


class _Mode(NamedTuple):
    """A digit whose divisor follows from its place in a list of digits, most significant first.

    A replication digit moves no coordinate: dim -1, stride 0.
    """

    size: int
    dim: int
    stride: int


def _replica(size: int) -> _Mode:
    return _Mode(size, -1, 0)


@dataclass(frozen=True)
class Layout:
    """The map from (thread, local slot) to the index of an element of a tile of the given shape.

    Every dim of `shape` is cut, major to minor, into consecutive modes of `mode_shape`. A mode is a digit either of
    the thread index or of the local slot. `spatial_modes` lists the mode numbers from the most to the least
    significant digit of the thread index; an entry -s is a replication digit of size s: threads that differ only
    there hold the same elements. `local_modes` lists the digits of the slot.

    The constructor brings its arguments into the canonical form: no mode of size 1, and modes that are neighbours
    both in their dim and in their list are one mode. Hence == is equality of maps.

    Raises LayoutError when the modes do not tile the shape or are not listed exactly once.
    """

    shape: tuple[int, ...]
    mode_shape: tuple[int, ...]
    spatial_modes: tuple[int, ...]
    local_modes: tuple[int, ...]

    def __post_init__(self) -> None:
        shape = tuple(map(operator.index, self.shape))
        modes = _modes_of(shape, self.mode_shape)
        listed = sorted(m for m in (*self.spatial_modes, *self.local_modes) if m >= 0)
        if listed != list(range(len(modes))) or any(m < 0 for m in self.local_modes):
            raise LayoutError(
                f"modes={self.mode_shape} need every mode number 0..{len(modes) - 1} exactly once in spatial="
                f"{self.spatial_modes} or local={self.local_modes}; only spatial may have replication (-size)"
            )
        spatial = _merge(modes[m] if m >= 0 else _replica(-m) for m in self.spatial_modes)
        local = _merge(modes[m] for m in self.local_modes)
        ordered = _in_dim_order(spatial + local)
        number = {mode: i for i, mode in enumerate(ordered)}
        # The canonical values take the place of the given ones; the dataclass is frozen for everyone else.
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "mode_shape", tuple(mode.size for mode in ordered))
        object.__setattr__(self, "spatial_modes", tuple(number.get(mode, -mode.size) for mode in spatial))
        object.__setattr__(self, "local_modes", tuple(number[mode] for mode in local))

    # -- sizes and digits

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

    @cached_property
    def _spatial(self) -> list[_Mode]:
        modes = _modes_of(self.shape, self.mode_shape)
        return [modes[m] if m >= 0 else _replica(-m) for m in self.spatial_modes]

    @cached_property
    def _local(self) -> list[_Mode]:
        modes = _modes_of(self.shape, self.mode_shape)
        return [modes[m] for m in self.local_modes]

    def thread_digits(self) -> list[Digit]:
        """The digits of the thread index that move the element, most significant first.

        Coordinate d of slot l of thread t is the sum of ((t // divisor) % size) * stride over the thread digits of
        dim d plus the sum of ((l // divisor) % size) * stride over the local digits of dim d.
        """
        return _digits(self._spatial)

    def local_digits(self) -> list[Digit]:
        """The digits of the slot index, most significant first; see `thread_digits`."""
        return _digits(self._local)

    # -- the map

    def index(self, thread: int, local: int = 0) -> tuple[int, ...]:
        """The index of the element in slot `local` of `thread`."""
        if not (0 <= thread < self.threads and 0 <= local < self.locals):
            raise LayoutError(
                f"(thread={thread}, local={local}) is outside {self.threads} threads of {self.locals} slots"
            )
        coords = [0] * self.rank
        for x, digits in ((thread, self.thread_digits()), (local, self.local_digits())):
            for size, divisor, dim, stride in digits:
                coords[dim] += x // divisor % size * stride
        return tuple(coords)

    def owner(self, index: Sequence[int]) -> list[tuple[int, int]]:
        """All (thread, local) that hold the element at `index`, by ascending thread; one unless replicated."""
        if len(index) != self.rank or any(not 0 <= i < n for i, n in zip(index, self.shape)):
            raise LayoutError(f"index {tuple(index)} is outside a tile of shape {self.shape}")

        def value(digits: list[Digit]) -> int:
            return sum(index[dim] // stride % size * divisor for size, divisor, dim, stride in digits)

        thread, local = value(self.thread_digits()), value(self.local_digits())
        modes = zip(self._spatial, _divisors(self._spatial))
        replicas = [range(0, mode.size * divisor, divisor) for mode, divisor in modes if mode.dim < 0]
        return [(thread + sum(replica), local) for replica in product(*replicas)]

    def table(self) -> NDArray[np.int64]:
        """All indices at once: int64 [threads, locals, rank]."""
        return _coords(self._spatial, self.rank)[:, None] + _coords(self._local, self.rank)[None]

    # -- product and quotients

    def __mul__(self, inner: Layout) -> Layout:
        """The product: self outside, `inner` inside. Associative, not commutative, with identity local(1, ..., 1).

        (f * g)(t, l) = f(t // g.threads, l // g.locals) * g.shape + g(t % g.threads, l % g.locals), elementwise.
        """
        if self.rank != inner.rank:
            raise LayoutError(f"({self}) * ({inner}) needs equal ranks, not {self.rank} and {inner.rank}")

        def scaled(modes: list[_Mode]) -> list[_Mode]:
            return [m if m.dim < 0 else m._replace(stride=m.stride * inner.shape[m.dim]) for m in modes]

        shape = tuple(a * b for a, b in zip(self.shape, inner.shape))
        return _assemble(shape, scaled(self._spatial) + inner._spatial, scaled(self._local) + inner._local)

    def __truediv__(self, inner: Layout) -> Layout:
        """The quotient h / g: the one f with f * g == h. Raises LayoutError when there is none."""
        factors = self._factor(inner.shape, inner.threads, inner.locals)
        if factors is None or factors[1] != inner:
            raise LayoutError(f"({self}) is not divisible by ({inner}): no f with f * ({inner}) == ({self})")
        return factors[0]

    def left_divide(self, outer: Layout) -> Layout:
        """The left quotient of h by f: the one g with f * g == h. Raises LayoutError when there is none."""
        divides = outer.rank == self.rank and all(n % m == 0 for n, m in zip(self.shape, outer.shape))
        factors = divides and self._factor(
            tuple(n // m for n, m in zip(self.shape, outer.shape)),
            self.threads // outer.threads,
            self.locals // outer.locals,
        )
        if not factors or factors[0] != outer:
            raise LayoutError(
                f"({self}) is not left divisible by ({outer}): no g with ({outer}) * g == ({self})"
            )
        return factors[1]

    def _factor(self, shape: tuple[int, ...], threads: int, locals: int) -> tuple[Layout, Layout] | None:
        """(f, g) with f * g == self where g has the given sizes, which leave no choice; None when there are none."""
        spatial, local = _cut(self._spatial, threads), _cut(self._local, locals)
        if (
            spatial is None
            or local is None
            or len(shape) != self.rank
            or any(n % m for n, m in zip(self.shape, shape))
        ):
            return None

        def unscaled(modes: list[_Mode]) -> list[_Mode]:
            return [m if m.dim < 0 else m._replace(stride=m.stride // shape[m.dim]) for m in modes]

        try:
            inner = _assemble(shape, spatial[1], local[1])
            outer_shape = tuple(n // m for n, m in zip(self.shape, shape))
            return _assemble(outer_shape, unscaled(spatial[0]), unscaled(local[0])), inner
        except LayoutError:
            return None

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

    # -- inverse

    def inverse(self) -> Layout:
        """The inverse map of a layout of a matrix without replication; inverse is an involution.

        A layout of rank 2 maps (thread, local) to (row, column). Its inverse maps (row, column) to (thread, local):
        a layout of shape (threads, locals) with shape[0] threads and shape[1] locals. Bring other ranks to rank 2
        first: f.reshape((1, f.size)).inverse().index(0, i) is the (thread, local) of the element with row-major
        number i.
        """
        if self.rank != 2 or self.replication > 1:
            raise LayoutError(
                f"({self}) has rank {self.rank} and replication {self.replication}; only layouts of rank 2 without "
                "replication have an inverse: reshape to two dims, or ask owner(index)"
            )
        dims: tuple[list[tuple[int, _Mode]], ...] = ([], [])
        for kind, digits in enumerate((self.thread_digits(), self.local_digits())):
            for size, divisor, dim, stride in digits:
                dims[dim].append((stride, _Mode(size, kind, divisor)))
        rows, columns = ([mode for _, mode in sorted(dim, reverse=True)] for dim in dims)
        return _assemble((self.threads, self.locals), rows, columns)

    # -- change of shape

    def reshape(self, shape: Sequence[int]) -> Layout:
        """The same elements, numbered row-major, as a tile of another shape.

        Raises LayoutError when sizes differ or a mode would straddle the new dims.
        """
        shape = tuple(shape)
        extents = tuple(accumulate(shape[::-1], int.__mul__, initial=1))[::-1]  # of dims d.., then 1
        if extents[0] != self.size:
            raise LayoutError(
                f"cannot reshape {self.shape} to {shape}: {self.size} and {extents[0]} elements"
            )
        old = tuple(accumulate(self.shape[::-1], int.__mul__, initial=1))[::-1]

        def renumbered(modes: list[_Mode]) -> list[_Mode]:
            parts: list[_Mode] = []
            for mode in modes:
                if mode.dim < 0:
                    parts.append(mode)
                    continue
                low = mode.stride * old[mode.dim + 1]
                high = low * mode.size
                bounds = [high, *(e for e in dict.fromkeys(extents) if low < e < high), low]
                for upper, lower in zip(bounds, bounds[1:]):
                    dim = max(d for d in range(len(shape)) if extents[d + 1] <= lower < extents[d])
                    if upper % lower or lower % extents[dim + 1]:
                        raise LayoutError(
                            f"cannot reshape ({self}) from {self.shape} to {shape}: a mode straddles dims"
                        )
                    parts.append(_Mode(upper // lower, dim, lower // extents[dim + 1]))
            return parts

        return _assemble(shape, renumbered(self._spatial), renumbered(self._local))

    def flatten(self) -> Layout:
        """The tile as a vector, row-major."""
        return self.reshape((self.size,))

    def unsqueeze(self, dim: int) -> Layout:
        """A new dim of size 1 before dim `dim` (`dim == rank`: at the end)."""
        if not 0 <= dim <= self.rank:
            raise LayoutError(f"unsqueeze dim={dim} must be in 0..{self.rank}")
        return self.reshape((*self.shape[:dim], 1, *self.shape[dim:]))

    def squeeze(self, dim: int) -> Layout:
        """Without dim `dim`, which must have size 1."""
        (dim,) = self._dims((dim,))
        if self.shape[dim] != 1:
            raise LayoutError(f"squeeze dim={dim} of shape {self.shape} needs size 1")
        return self.reshape((*self.shape[:dim], *self.shape[dim + 1 :]))

    def permute(self, dims: Sequence[int]) -> Layout:
        """Transposed: dim i of the result is dim dims[i] of self."""
        dims = self._dims(dims)
        if len(dims) != self.rank:
            raise LayoutError(f"permute needs all {self.rank} dims, not {tuple(dims)}")

        def relabelled(modes: list[_Mode]) -> list[_Mode]:
            return [m if m.dim < 0 else m._replace(dim=dims.index(m.dim)) for m in modes]

        return _assemble(
            tuple(self.shape[d] for d in dims), relabelled(self._spatial), relabelled(self._local)
        )

    # -- reduction, broadcast, parts

    def reduce(self, dims: Sequence[int]) -> Layout:
        """The layout of a reduction over `dims`, which stay with size 1.

        Slots along these dims are summed up inside the thread; threads along them all get the result.
        """
        dims = self._dims(dims)
        shape = tuple(1 if d in dims else n for d, n in enumerate(self.shape))
        spatial = [_replica(m.size) if m.dim in dims else m for m in self._spatial]
        return _assemble(shape, spatial, [m for m in self._local if m.dim not in dims])

    def broadcast_to(self, shape: Sequence[int]) -> Layout:
        """Dims of size 1 grow to `shape`, in the fastest slots of every thread: no data moves between threads.

        f.broadcast_to(shape).reduce(grown dims) == f. `slots_for` tells whether some other target layout can be
        had from self without moving data.
        """
        shape = tuple(shape)
        if len(shape) != self.rank or any(n not in (1, m) for n, m in zip(self.shape, shape)):
            raise LayoutError(f"cannot broadcast {self.shape} to {shape}: only dims of size 1 can grow")
        grown = [_Mode(m, d, 1) for d, (n, m) in enumerate(zip(self.shape, shape)) if n != m]
        return _assemble(shape, self._spatial, self._local + grown)

    def slots_for(self, target: Layout) -> tuple[int, ...]:
        """For each slot of `target` the slot of self, in the same thread, with its element (after broadcasting).

        A permutation of registers when the shapes are equal. Raises LayoutError when an element would have to come
        from another thread.
        """
        if target.rank != self.rank or any(n not in (1, m) for n, m in zip(self.shape, target.shape)):
            raise LayoutError(f"a tile of shape {self.shape} does not broadcast to {target.shape}")
        seen = target.reduce([d for d, (n, m) in enumerate(zip(self.shape, target.shape)) if n < m])
        if seen._spatial != self._spatial:
            raise LayoutError(f"({self}) to ({target}) moves elements between threads")
        slot = {tuple(index): s for s, index in enumerate(_coords(self._local, self.rank).tolist())}
        wanted = np.minimum(_coords(target._local, self.rank), np.array(self.shape, dtype=np.int64) - 1)
        return tuple(slot[tuple(index)] for index in wanted.tolist())

    def restrict(self, dim: int, start: int, length: int) -> tuple[Layout, tuple[int, ...]]:
        """The sub-tile [start, start + length) of `dim`: its layout, and for each of its slots the slot in self.

        Legal when the range is cut out by local digits alone, so that every thread keeps its part of it; raises
        LayoutError otherwise.
        """
        (dim,) = self._dims((dim,))
        if not (0 <= start and 0 < length and start + length <= self.shape[dim]):
            raise LayoutError(f"[{start}, {start + length}) is no range of dim {dim} of shape {self.shape}")
        kept: dict[
            _Mode, tuple[int, int]
        ] = {}  # mode of dim -> first value and number of values of its digit
        low, left = start, length
        for mode in (m for m in _in_dim_order(self._spatial + self._local) if m.dim == dim):
            first, low = divmod(low, mode.stride)
            if left > mode.stride:
                count, partial = divmod(left, mode.stride)
                aligned, left = low == 0 and partial == 0, mode.stride
            else:
                count, aligned = 1, low + left <= mode.stride
            if not aligned or (count < mode.size and mode not in self._local):
                raise LayoutError(
                    f"[{start}, {start + length}) of dim {dim} of ({self}) is not cut out by local modes alone"
                )
            kept[mode] = first, count
        shape = (*self.shape[:dim], length, *self.shape[dim + 1 :])
        cut = [m._replace(size=kept[m][1]) if m in kept else m for m in self._local]
        values = [
            range(first, first + count) for first, count in (kept.get(m, (0, m.size)) for m in self._local)
        ]
        slots = tuple(sum(map(operator.mul, value, _divisors(self._local))) for value in product(*values))
        return _assemble(shape, self._spatial, cut), slots

    def _dims(self, dims: Sequence[int]) -> tuple[int, ...]:
        if any(not -self.rank <= d < self.rank for d in dims) or len({d % self.rank for d in dims}) != len(
            dims
        ):
            raise LayoutError(f"dims {tuple(dims)} must be distinct dims of a tile of rank {self.rank}")
        return tuple(d % self.rank for d in dims)

    # -- text

    def __str__(self) -> str:
        """A product of atoms where there is one, else layout(shape=..., modes=..., spatial=..., local=...)."""
        return _atoms(self) or (
            f"layout(shape={self.shape}, modes={self.mode_shape}, spatial={self.spatial_modes}, "
            f"local={self.local_modes})"
        )

    @staticmethod
    def parse(text: str) -> Layout:
        """The layout that `text` writes: str(layout), or any product of atoms joined with dots."""
        try:
            return _evaluate(ast.parse(text.strip(), mode="eval").body)
        except (SyntaxError, ValueError, TypeError, KeyError) as error:
            if isinstance(error, LayoutError):
                raise
            raise LayoutError(f"cannot read {text!r} as a layout, e.g. 'local(2, 1).spatial(8, 4)'") from None


# -- constructors


def local(*shape: int) -> Layout:
    """One thread holds the whole tile, in row-major order."""
    return Layout(shape, shape, (), tuple(range(len(shape))))


def spatial(*shape: int) -> Layout:
    """One element per thread, threads in row-major order."""
    return Layout(shape, shape, tuple(range(len(shape))), ())


def column_local(*shape: int) -> Layout:
    """One thread holds the whole tile, in column-major order: dim 0 is the fastest."""
    return Layout(shape, shape, (), tuple(range(len(shape)))[::-1])


def column_spatial(*shape: int) -> Layout:
    """One element per thread, threads in column-major order: dim 0 is the fastest."""
    return Layout(shape, shape, tuple(range(len(shape)))[::-1], ())


def replicated(threads: int, rank: int) -> Layout:
    """A tile of a single element, of shape (1, ..., 1), of which every thread has a copy."""
    return Layout((1,) * rank, (), (-threads,), ())


# -- lists of modes


def _modes_of(shape: Sequence[int], mode_shape: Sequence[int]) -> list[_Mode]:
    """The modes with their dims and strides; LayoutError when they do not tile the shape."""
    modes: list[_Mode] = []
    sizes = iter(mode_shape)
    for dim, extent in enumerate(shape):
        rest = extent
        while rest > 1:
            size = next(sizes, 0)
            if size < 1 or rest % size:
                raise LayoutError(f"modes={tuple(mode_shape)} do not tile shape={tuple(shape)}")
            rest //= size
            modes.append(_Mode(size, dim, rest))
    ones = [_replica(size) for size in sizes]
    if any(n < 1 for n in shape) or any(mode.size != 1 for mode in ones):
        raise LayoutError(f"modes={tuple(mode_shape)} do not tile shape={tuple(shape)}")
    return modes + ones


def _merge(modes: Iterable[_Mode]) -> list[_Mode]:
    """Without modes of size 1; neighbours that form one longer digit are one mode."""
    merged: list[_Mode] = []
    for mode in modes:
        if mode.size == 1:
            continue
        if merged and merged[-1].dim == mode.dim and merged[-1].stride == mode.size * mode.stride:
            mode = mode._replace(size=merged.pop().size * mode.size)
        merged.append(mode)
    return merged


def _in_dim_order(modes: Iterable[_Mode]) -> list[_Mode]:
    return sorted((m for m in modes if m.dim >= 0), key=lambda m: (m.dim, -m.stride))


def _assemble(shape: tuple[int, ...], spatial: list[_Mode], local: list[_Mode]) -> Layout:
    """The layout with these digits; LayoutError when their strides do not tile the shape."""
    spatial, local = _merge(spatial), _merge(local)
    ordered = _in_dim_order(spatial + local)
    sizes = tuple(mode.size for mode in ordered)
    if _modes_of(shape, sizes) != ordered:
        raise LayoutError(f"modes {ordered} do not tile shape={shape}")
    number = {mode: i for i, mode in enumerate(ordered)}
    return Layout(
        shape, sizes, tuple(number.get(m, -m.size) for m in spatial), tuple(number[m] for m in local)
    )


def _divisors(modes: list[_Mode]) -> list[int]:
    """The weight of every digit: the product of the sizes after it."""
    return [prod(mode.size for mode in modes[i + 1 :]) for i in range(len(modes))]


def _digits(modes: list[_Mode]) -> list[Digit]:
    return [Digit(m.size, d, m.dim, m.stride) for m, d in zip(modes, _divisors(modes)) if m.dim >= 0]


def _coords(modes: list[_Mode], rank: int) -> NDArray[np.int64]:
    """The part of the coordinates that every value of an index adds: int64 [values, rank]."""
    x = np.arange(prod(mode.size for mode in modes))
    coords = np.zeros((x.size, rank), dtype=np.int64)
    for size, divisor, dim, stride in _digits(modes):
        coords[:, dim] += x // divisor % size * stride
    return coords


def _cut(modes: list[_Mode], size: int) -> tuple[list[_Mode], list[_Mode]] | None:
    """(major, minor) parts of the digits, where minor has `size` values; None when a digit cannot be split so."""
    major, minor = list(modes), list[_Mode]()
    while size > 1:
        if not major:
            return None
        last = major.pop()
        if size % last.size == 0:
            part = last.size
        elif last.size % size == 0:
            part = size
            major.append(_Mode(last.size // size, last.dim, last.stride * size))
        else:
            return None
        minor.insert(0, last._replace(size=part))
        size //= part
    return major, minor


# -- text

_ATOMS = {make.__name__: make for make in (local, spatial, column_local, column_spatial, replicated)}


def _atoms(layout: Layout) -> str | None:
    """The layout as a product of atoms, peeled off from the inside out; None when it is no such product."""
    todo = {"local": list(layout._local), "spatial": list(layout._spatial)}
    atoms: list[str] = []
    reached = [1] * layout.rank  # per dim, the stride of its innermost mode not yet peeled off
    while any(todo.values()):
        before = len(atoms)
        for name, modes in todo.items():
            while modes and modes[-1].dim < 0:
                atoms.append(f"replicated({modes.pop().size})")
            dims: list[int] = []
            atom = [1] * layout.rank
            while modes and modes[-1].stride == reached[modes[-1].dim] and _monotone([*dims, modes[-1].dim]):
                size, dim, _ = modes.pop()
                dims.append(dim)
                atom[dim] = size
                reached[dim] *= size
            if dims:
                order = "column_" if dims[0] < dims[-1] else ""
                atoms.append(f"{order}{name}({', '.join(map(str, atom))})")
        if len(atoms) == before:
            return None
    if not atoms:
        return f"local({', '.join(map(str, layout.shape))})"
    if atoms[-1].startswith("replicated"):
        atoms[-1] = f"{atoms[-1][:-1]}, rank={layout.rank})"
    return ".".join(reversed(atoms))


def _monotone(dims: list[int]) -> bool:
    return dims in (sorted(set(dims)), sorted(set(dims), reverse=True))


def _evaluate(node: ast.expr) -> Layout:
    if not isinstance(node, ast.Call):
        raise LayoutError(f"a layout is written as calls joined with dots, not {ast.unparse(node)!r}")
    args: list[Any] = [ast.literal_eval(arg) for arg in node.args]
    named: dict[str, Any] = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
    match node.func:
        case ast.Name("layout"):
            return Layout(named["shape"], named["modes"], named["spatial"], named["local"])
        case ast.Name(name) if name in _ATOMS:
            return _ATOMS[name](*args, **named)
        case ast.Attribute(outer, name) if name in _ATOMS:
            return getattr(_evaluate(outer), name)(*args)
        case _:
            raise LayoutError(
                f"no layout constructor {ast.unparse(node.func)!r}; there are {', '.join(_ATOMS)}"
            )


# -- fragments: which lane of a warp holds which elements of an operand in registers, and in what order.
# PTX ISA 9.x, 9.7.14.5 "Matrix multiply-accumulate operation using mma instruction". groupID is lane // 4 and
# threadID_in_group is lane % 4. B is [k, n] as in PTX; the _NK constants are its transposed view [n, k].

# 9.7.14.5.8, .f16 and .bf16
MMA_M16N8K16_A = column_local(2, 2).spatial(8, 4).local(1, 2)
MMA_M16N8K16_B = local(2, 1).column_spatial(4, 8).local(2, 1)
MMA_M16N8K16_B_NK = MMA_M16N8K16_B.permute((1, 0))
# The accumulator is the same for every mma.m16n8*.
MMA_M16N8_D = local(2, 1).spatial(8, 4).local(1, 2)
MMA_M16N8K16_D = MMA_M16N8_D

# 9.7.14.5.7, .f16 and .bf16, then .tf32
MMA_M16N8K8_A = local(2, 1).spatial(8, 4).local(1, 2)
MMA_M16N8K8_B = column_spatial(4, 8).local(2, 1)
MMA_M16N8K8_TF32_A = column_local(2, 2).spatial(8, 4)
MMA_M16N8K8_TF32_B = local(2, 1).column_spatial(4, 8)
MMA_M16N8K8_TF32_B_NK = MMA_M16N8K8_TF32_B.permute((1, 0))

# 9.7.14.5.15: what ldmatrix leaves in the lanes, 8x8 matrices of 16-bit elements stacked along dim 0, as given by
# the row addresses of lanes 0-7, 8-15, ...; with .trans each lane gets the elements of the transposed matrix.
LDMATRIX_X1 = spatial(8, 4).local(1, 2)
LDMATRIX_X2 = local(2, 1) * LDMATRIX_X1
LDMATRIX_X4 = local(4, 1) * LDMATRIX_X1
LDMATRIX_X1_TRANS = LDMATRIX_X1.permute((1, 0))
LDMATRIX_X2_TRANS = local(2, 1) * LDMATRIX_X1_TRANS
LDMATRIX_X4_TRANS = local(4, 1) * LDMATRIX_X1_TRANS

# 9.7.15.5.1 "Register fragments" of wgmma.mma_async.m64nNk16: each of the four warps has the m16n8k16 fragment of
# its 16 rows, so one register image of A serves both instructions.
WGMMA_M64K16_A = spatial(4, 1) * MMA_M16N8K16_A


def wgmma_m64_d(n: int) -> Layout:
    """The accumulator [64, n] of wgmma.m64nNk*, n a multiple of 8 up to 256."""
    if n % 8 or not 8 <= n <= 256:
        raise LayoutError(f"wgmma has n = 8, 16, ..., 256, not n={n}")
    return spatial(4, 1).local(1, n // 8) * MMA_M16N8_D
