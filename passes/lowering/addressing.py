"""From an element of a tile to its address: the index arithmetic of one thread for one load, store or copy.

The coordinates of slot l in thread t are sums of digits of t and of l (`Layout.thread_digits`, `local_digits`). Dims
whose address is linear in the coordinate give one base per thread and a constant per slot, which ends up in the
instruction's immediate; a dim that is clamped or divided costs arithmetic for every coordinate it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import Any

import numpy as np

from lowbit.dialect.bindings import arith, ir, llvm
from lowbit.dialect.layouts.layout import Layout
from lowbit.dialect.ops.common import constant_of
from lowbit.dialect.types import SWIZZLE_128, Global, Shared, element_bits
from lowbit.passes.lowering import emit


@dataclass(frozen=True)
class Place:
    """Where a view or a buffer is: its type, base pointer, and the size of every dim (an SSA value if dynamic)."""

    type: Global | Shared
    base: Any
    sizes: tuple[Any, ...]


class ThreadIndex:
    """Digits of the thread index, each written down once, at the head of the kernel."""

    def __init__(self, thread: Any, point: Any) -> None:
        self._thread = thread
        self._point = point
        self._digits: dict[tuple[int, int], Any] = {}

    def digit(self, size: int, divisor: int, total: int) -> Any:
        """(thread // divisor) % size of `total` threads."""
        if (size, divisor) not in self._digits:
            with self._point, ir.Location.unknown():
                x = self._thread
                if divisor > 1:
                    x = arith.divui(x, emit.constant(divisor))
                if size * divisor < total:
                    x = arith.remui(x, emit.constant(size))
            self._digits[size, divisor] = x
        return self._digits[size, divisor]


def replica_digits(layout: Layout) -> list[tuple[int, int]]:
    """(size, divisor) of the digits of the thread index that only make copies."""
    found: list[tuple[int, int]] = []
    divisor = 1
    for mode in reversed(layout.spatial_modes):
        size = -mode if mode < 0 else layout.mode_shape[mode]
        if mode < 0:
            found.append((size, divisor))
        divisor *= size
    return found


def first_replica(layout: Layout, threads: ThreadIndex) -> Any | None:
    """Whether this thread is the first of those that hold the same elements of a tile; None: there is one only."""
    conditions = [
        arith.cmpi(arith.CmpIPredicate.eq, threads.digit(size, divisor, layout.threads), emit.constant(0))
        for size, divisor in replica_digits(layout)
    ]
    return Access.all(conditions)


class Access:
    """Addresses and conditions of the elements of one tile access, as operations at the current insertion point."""

    def __init__(
        self,
        threads: ThreadIndex,
        place: Place,
        layout: Layout,
        offsets: Sequence[Any],
        boundary: Sequence[str],
        limit: Sequence[int] = (),
    ) -> None:
        self.place = place
        self.layout = layout
        self._threads = threads
        self._offsets = list(offsets)
        self._boundary = list(boundary)
        self._limit = list(limit)
        self._cache: dict[Any, Any] = {}
        type_ = place.type
        self.bytes = max(1, element_bits(type_.element) // 8)
        self._divisors = type_.divisors if isinstance(type_, Global) else (1,) * layout.rank
        self._wide = isinstance(type_, Global)
        self._coords = self._slot_coords()

    def _slot_coords(self) -> Any:
        slots = np.arange(self.layout.locals)
        coords = np.zeros((self.layout.locals, self.layout.rank), dtype=np.int64)
        for size, divisor, dim, stride in self.layout.local_digits():
            coords[:, dim] += slots // divisor % size * stride
        return coords

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]

    def _linear(self, dim: int) -> bool:
        return self._divisors[dim] == 1 and self._boundary[dim] != "clamp"

    # -- coordinates

    def _start(self, dim: int) -> Any:
        """The coordinate of slot coordinate 0: offset plus the thread's part."""

        def make() -> Any:
            x = self._offsets[dim]
            for size, divisor, d, stride in self.layout.thread_digits():
                if d == dim:
                    digit = self._threads.digit(size, divisor, self.layout.threads)
                    part = arith.muli(digit, emit.constant(stride)) if stride > 1 else digit
                    x = part if constant_of(x) == 0 else arith.addi(x, part)
            return x

        return self._once(("start", dim), make)

    def coordinate(self, dim: int, slot: int) -> Any:
        """The coordinate of a slot along one dim, not yet clamped."""
        local = int(self._coords[slot, dim])
        return self._once(
            ("coordinate", dim, local),
            lambda: arith.addi(self._start(dim), emit.constant(local)) if local else self._start(dim),
        )

    # -- addresses

    def _scaled(self, x: Any, stride: int) -> Any:
        """x * stride in bytes, in the width of an address."""
        bits = 64 if self._wide else 32
        if self._wide:
            x = arith.extui(emit.integer(64), x)
        return arith.muli(x, emit.constant(stride * self.bytes, bits))

    @cached_property
    def _base(self) -> Any:
        """The address of slot coordinates 0 along the linear dims."""
        pointer = self.place.base
        for dim, stride in enumerate(self.place.type.strides):
            if self._linear(dim) and stride and constant_of(self._start(dim)) != 0:
                pointer = emit.offset_bytes(pointer, dynamic=self._scaled(self._start(dim), stride))
        return pointer

    def _bent(self, dim: int, slot: int) -> Any:
        """The bytes that a clamped or divided dim adds."""

        def make() -> Any:
            x = self.coordinate(dim, slot)
            if self._boundary[dim] == "clamp":
                x = arith.minsi(x, arith.subi(self.place.sizes[dim], emit.constant(1)))
            if self._divisors[dim] > 1:
                x = arith.divui(x, emit.constant(self._divisors[dim]))
            return self._scaled(x, self.place.type.strides[dim])

        return self._once(("bent", dim, int(self._coords[slot, dim])), make)

    def _swizzled(self, static: int) -> Any:
        """The address of thread offset + static in a swizzled buffer, whose base is a multiple of eight rows."""

        def make() -> Any:
            offset = emit.constant(static)
            for dim, stride in enumerate(self.place.type.strides):
                if stride and constant_of(self._start(dim)) != 0:
                    offset = arith.addi(offset, self._scaled(self._start(dim), stride))
            s = SWIZZLE_128
            moved = emit.mask(emit.shift_right(offset, s.shift), s.mask)
            return emit.offset_bytes(self.place.base, dynamic=arith.xori(offset, moved))

        return self._once(("swizzled", static), make)

    def address(self, slot: int) -> Any:
        """The address of a slot's element."""
        if isinstance(self.place.type, Shared) and self.place.type.swizzle:
            static = int(self._coords[slot] @ np.array(self.place.type.strides)) * self.bytes
            period = 8 * self.place.type.swizzle  # whole periods are outside the permutation
            return emit.offset_bytes(self._swizzled(static % period), static=static // period * period)
        static, pointer = 0, self._base
        for dim, stride in enumerate(self.place.type.strides):
            if self._linear(dim):
                static += int(self._coords[slot, dim]) * stride * self.bytes
        bent = tuple((d, int(self._coords[slot, d])) for d in range(self.layout.rank) if not self._linear(d))

        def make() -> Any:
            moved = pointer
            for dim, _ in bent:
                if self.place.type.strides[dim]:
                    moved = emit.offset_bytes(moved, dynamic=self._bent(dim, slot))
            return moved

        return emit.offset_bytes(self._once(("base", bent), make), static=static)

    # -- conditions

    def _below(self, x: Any, end: Any) -> Any:
        return arith.cmpi(arith.CmpIPredicate.slt, x, end)

    def inside(self, slot: int, *words: str) -> Any | None:
        """Whether a slot is inside along the dims with these boundary words; None: always. "zero" includes `limit`."""
        conditions: list[Any] = []
        for dim, word in enumerate(self._boundary):
            if word in words:
                key = ("inside", dim, int(self._coords[slot, dim]))
                conditions.append(
                    self._once(key, lambda d=dim: self._below(self.coordinate(d, slot), self.place.sizes[d]))
                )
        if "zero" in words and self._limit:
            conditions.append(self._within_limit(slot))
        return self.all(conditions)

    def _within_limit(self, slot: int) -> Any:
        *factors, end = self._limit

        def dynamic() -> Any:
            total: Any = None
            for dim, factor in enumerate(factors):
                if factor:
                    x = self._start(dim)
                    x = arith.muli(x, emit.constant(factor)) if factor > 1 else x
                    total = x if total is None else arith.addi(total, x)
            return total

        local = int(self._coords[slot] @ np.array(factors))
        start = self._once("limit", dynamic)
        return self._once(("limit", local), lambda: self._below(start, emit.constant(end - local)))

    def first_replica(self) -> Any | None:
        """Whether this thread is the first of those that hold the same elements; None: there is one only."""
        return first_replica(self.layout, self._threads)

    @staticmethod
    def all(conditions: Sequence[Any]) -> Any | None:
        """Their conjunction; None for none."""
        return reduce(arith.andi, conditions) if conditions else None

    # -- vectors

    def vector_length(self, most: int) -> int:
        """The largest power of two, up to `most`, of slots in a row that one aligned access can move."""
        strides = np.array(self.place.type.strides)
        flat = self._coords @ strides
        length = most
        while length > 1 and not self._is_vector(flat, strides, length):
            length //= 2
        return length

    def _is_vector(self, flat: Any, strides: Any, length: int) -> bool:
        slots = self.layout.locals
        if slots % length:
            return False
        runs = flat.reshape(-1, length)
        if not np.array_equal(runs, runs[:, :1] + np.arange(length)) or np.any(runs[:, 0] % length):
            return False
        moved = {int(d) for d in range(self.layout.rank) if np.any(np.diff(self._coords[:length, d]))}
        for dim in range(self.layout.rank):
            if dim in moved and not self._moves_whole(dim, length):
                return False
            if dim not in moved and strides[dim] % length and self.layout.shape[dim] > 1:
                return False
            offset = constant_of(self._offsets[dim])
            if strides[dim] % length and (offset is None or offset % length):
                return False
        return all(d.stride * int(strides[d.dim]) % length == 0 for d in self.layout.thread_digits())

    def _moves_whole(self, dim: int, length: int) -> bool:
        """Whether a vector along this dim is inside or outside as one."""
        if self._divisors[dim] > 1 or self._boundary[dim] == "clamp":
            return False
        size = constant_of(self.place.sizes[dim])
        if self._boundary[dim] in ("zero", "skip") and (size is None or size % length):
            return False
        return not self._limit or (self._limit[dim] == 1 and self._limit[-1] % length == 0)


class NamedRows(Access):
    """An access whose coordinate along one dim is a place in a list of rows, which is what counts as the end there."""

    def __init__(self, *access: Any, rows: Place, dim: int) -> None:
        super().__init__(*access)
        self._rows, self._named = rows, dim
        sizes = tuple(rows.sizes[0] if d == dim else size for d, size in enumerate(self.place.sizes))
        self.place = replace(self.place, sizes=sizes)

    def _linear(self, dim: int) -> bool:
        return dim != self._named and super()._linear(dim)

    def _bent(self, dim: int, slot: int) -> Any:
        if dim != self._named:
            return super()._bent(dim, slot)
        return self._once(("row", int(self._coords[slot, dim])), lambda: self._row(slot))

    def _row(self, slot: int) -> Any:
        """The bytes from the first row to the named one; beyond the end of the list, to its last."""
        last = arith.subi(self._rows.sizes[0], emit.constant(1))
        place = arith.maxsi(arith.minsi(self.coordinate(self._named, slot), last), emit.constant(0))
        stride = emit.constant(self._rows.type.strides[0] * 4, 64)
        entry = emit.offset_bytes(self._rows.base, dynamic=arith.muli(arith.extui(emit.integer(64), place), stride))
        row = llvm.load(emit.integer(32), entry, alignment=4)
        return self._scaled(row, self.place.type.strides[self._named])
