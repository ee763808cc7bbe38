"""Which kernels serve how many rows of x: a table that can be read, printed and exported."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.base import KernelRequest
from lowbit.passes.kernels.registry import schedule_to_dict
from lowbit.passes.scheduling.choice import Origin
from lowbit.passes.scheduling.tables import spelled_out
from lowbit.passes.target import Target


@dataclass(frozen=True)
class Rows:
    """Rows `first` to `last` (None: without end) of x, and the token tiles of their launches in order. Without any the
    dequantize kernel writes the weight out and the vendor's matmul multiplies, which for so many rows is bound by
    arithmetic, not by reading the weight."""

    first: int
    last: int | None
    token_tiles: tuple[int, ...]

    def __str__(self) -> str:
        if self.last is None:
            return f"{self.first} on"
        return str(self.last) if self.first == self.last else f"{self.first} to {self.last}"


def rows_of_tiles(tiles: Sequence[int], launched: int) -> tuple[Rows, ...]:
    """Returns the ranges of rows where no kernel serves any number of them: m rows take the least token tile that holds
    them. More rows take launches of the widest tile, of which the last may be of a lesser one: up to `launched` rows
    (`Thresholds.launched`)."""
    return _ranges(_launches(tiles, launched))


def _launches(tiles: Sequence[int], most: int) -> dict[int, tuple[int, ...]]:
    """Returns the token tiles that are launched for each range of rows, by its last row, for up to `most` rows."""
    widest, ends = tiles[-1], {token_tile: (token_tile,) for token_tile in tiles}
    for whole in range(1, -(-most // widest)):
        ends |= {whole * widest + token_tile: (*(widest,) * whole, token_tile) for token_tile in tiles}
    return {end: launches for end, launches in ends.items() if end <= most}


def _ranges(launches: Mapping[int, tuple[int, ...]], beyond: Sequence[int] = ()) -> tuple[Rows, ...]:
    """Returns contiguous ranges that cover every m. The last one is open and has the tiles of `beyond`; without any, the
    vendor's matmul serves it."""
    firsts = [1, *(last + 1 for last in launches)]
    found = (Rows(a, b, tiles) for a, (b, tiles) in zip(firsts, launches.items()))
    return (*found, Rows(firsts[-1], None, tuple(beyond)))


def rows_of_any_tokens(
    tiles: Sequence[int], any_tiles: Sequence[int], decoded: int, most: int | None = None
) -> tuple[Rows, ...]:
    """Returns the ranges of rows where one kernel serves any number of them in one launch.

    Up to `decoded` rows (`Thresholds.decoded`) the least token tile that holds them serves, or two launches where there is none so wide. Above,
    schedules are chosen for the numbers of tokens in `any_tiles`, and the least of these that is not below m serves; the
    last serves all.

    most    the last of `any_tiles` that is used: beyond it the weight is written out for the vendor's matmul; None: all are
    """
    few = [token_tile for token_tile in tiles if token_tile <= decoded]
    last = any_tiles[-1] if most is None else most
    more = {token_tile: (token_tile,) for token_tile in any_tiles if decoded < token_tile <= last}
    return _ranges(_launches(few, decoded) | more, any_tiles[-1:] if most is None else ())


def rows_of_launches(tiles: Sequence[int]) -> tuple[Rows, ...]:
    """Returns the ranges of rows where weights must not be rounded, or x has 8 bits: m rows take the least token tile that
    holds them. More rows take as many launches of the widest token tile as they need."""
    firsts = [1, *(token_tile + 1 for token_tile in tiles)]
    return (*(Rows(a, b, (b,)) for a, b in zip(firsts, tiles)), Rows(firsts[-1], None, (tiles[-1],)))


def rows_of_slots(tile_by_last: Mapping[int | None, int]) -> tuple[Rows, ...]:
    """Returns the ranges of slots of experts, of which one launch serves any number: its tile by the last of each."""
    tiles = {last: (tile,) for last, tile in tile_by_last.items() if last is not None}
    return _ranges(tiles, (tile_by_last[None],))


def kernel_name(token_tile: int | None) -> str:
    """Returns the name of a kernel among those of its matmul: "m8" for up to eight tokens."""
    return "dequantize" if token_tile is None else f"m{token_tile}"


@dataclass(frozen=True)
class KernelChoices:
    """Which family and schedule serve which number of rows: what `Matmul.choices` gives.

    rows     every number of rows, from 1 on, in ranges; of experts the number of slots, a row for each expert of it
    kernels  by token tile; under None the one that dequantizes
    origins  where the schedule of each comes from (`passes.scheduling.choice.Origin`)
    few      those of the rows before the first, where these are multiplied otherwise (`MatmulSpec.compute_from`), or by
             other kernels of the same token tiles
    """

    spec: MatmulSpec
    target: Target
    rows: tuple[Rows, ...]
    kernels: Mapping[int | None, KernelRequest]
    origins: Mapping[int | None, Origin]
    few: KernelChoices | None = None

    def launches(self, m: int) -> tuple[KernelRequest, ...]:
        """Returns the kernels that are launched for m rows, in order."""
        if self.few and m < self.rows[0].first:
            return self.few.launches(m)
        tiles = find_rows(self.rows, m).token_tiles
        return tuple(self.kernels[token_tile] for token_tile in tiles or (None,))

    def up_to(self, rows: int) -> tuple[KernelRequest, ...]:
        """Returns the kernels that are launched for 1 to so many rows, each once."""
        few = self.few.up_to(rows) if self.few else ()
        tiles = (tile for each in self.rows if each.first <= rows for tile in each.token_tiles or (None,))
        return tuple(dict.fromkeys([*few, *(self.kernels[tile] for tile in tiles)]))

    def firsts(self, rows: int) -> list[int]:
        """Returns the first rows of all ranges that begin with so many rows at most."""
        few = self.few.firsts(rows) if self.few else []
        return [*few, *(each.first for each in self.rows if each.first <= rows)]

    def families(self, rows: int) -> list[tuple[int, str]]:
        """Returns the kernel families that serve 1 to so many rows, each with the first row of those that it serves."""
        found = self.few.families(rows) if self.few else []
        for each in self.rows:
            family = self.kernels[each.token_tiles[0] if each.token_tiles else None].family
            if each.first <= rows and (not found or found[-1][1] != family):
                found.append((each.first, family))
        return found

    def to_dict(self) -> dict[str, Any]:
        """Returns the choices in terms of JSON: `kernels` by name, and for ranges of rows the names of the launches."""
        kernels = {
            kernel_name(token_tile): {
                "tokens": token_tile,
                "schedule": schedule_to_dict(kernel.schedule),
                "origin": self.origins[token_tile],
            }
            for token_tile, kernel in self.kernels.items()
        }
        rows = [
            {"first": each.first, "last": each.last, "launches": [kernel_name(token_tile) for token_tile in each.token_tiles or (None,)]}
            for each in self.rows
        ]
        few = {"few": self.few.to_dict()} if self.few else {}
        return {"spec": self.spec.to_dict(), "target": self.target.name, "kernels": kernels, "rows": rows, **few}

    def after(self, few: KernelChoices, first: int) -> KernelChoices:
        """Returns these choices for the rows from `first` on, and others for those before."""
        later = self._of_rows(first, None)
        assert later is not None, "the last range of rows is open"
        return later._behind(few._of_rows(1, first - 1))

    def _behind(self, few: KernelChoices | None) -> KernelChoices:
        """Returns these choices with others before the first of them."""
        return replace(self, few=self.few._behind(few) if self.few else few)

    def _of_rows(self, first: int, last: int | None) -> KernelChoices | None:
        """Returns these choices for the rows first to last (None: without end) alone; None where there are none."""
        few, rows = self.few and self.few._of_rows(first, last), cut_rows(self.rows, first, last)
        if not rows:
            return few
        used = {None, *(token_tile for each in rows for token_tile in each.token_tiles)}
        kernels = {token_tile: kernel for token_tile, kernel in self.kernels.items() if token_tile in used}
        return replace(self, rows=rows, kernels=kernels, few=few)

    def __repr__(self) -> str:
        return "\n\n".join([f"{self.spec}, on {self.target}", *self._all_tables()])

    def _all_tables(self) -> list[str]:
        """The tables of all ranges of rows, the first at first."""
        return [*(self.few._all_tables() if self.few else []), self._tables()]

    def _tables(self) -> str:
        """Rows with their launches, and kernels with their schedules."""
        counted = "rows" if self.spec.experts == 1 else "slots"
        lines = [f"{counted:<12} launches"]
        for each in self.rows:
            launches = ", ".join(kernel_name(token_tile) for token_tile in each.token_tiles)
            lines.append(f"{each!s:<12} {launches or 'dequantize, then a matmul of torch'}")
        width = max(len(kernel.family) for kernel in self.kernels.values())
        lines += ["", f"kernel       {'family':<{width}}  schedule"]
        for token_tile, kernel in self.kernels.items():
            choices = {name: value for name, value in spelled_out(kernel.schedule).items() if name != "family"}
            text = ", ".join(f"{name}={value}" for name, value in choices.items()) or "no choices"
            lines.append(f"{kernel_name(token_tile):<12} {kernel.family:<{width}}  {text} ({self.origins[token_tile]})")
        return "\n".join(lines)


def cut_rows(rows: Sequence[Rows], first: int, last: int | None) -> tuple[Rows, ...]:
    """Returns the parts of ranges that are of the rows first to last (None: without end)."""
    found: list[Rows] = []
    for each in rows:
        ends = [end for end in (each.last, last) if end is not None]
        part = Rows(max(first, each.first), min(ends, default=None), each.token_tiles)
        if part.last is None or part.first <= part.last:
            found.append(part)
    return tuple(found)


def find_rows(rows: Sequence[Rows], m: int) -> Rows:
    """Returns the range that m rows are in; m = 0 is in the first."""
    return rows[bisect_left(rows, m, hi=len(rows) - 1, key=lambda each: each.last or m)]
