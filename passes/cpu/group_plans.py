"""The programs that search scales and offsets of groups on the host, as values; `groups` makes them. Nothing here loads
MLIR.

    Tiles    groups in the order that the others read
    Fit      the scale and the offset of least error, from several ranges on
    Errors   the errors of given ones
    Round    all at once, where scales have one level: scales, offsets and codes of a weight (`round_groups`)

A weight is w = s q + o with integer levels q. A piece is a tile of sixteen groups, which lie side by side: x and
`importance` are [tiles, size, 16] in f32, everything that a group has one of is [tiles, 16].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Tiles:
    """Groups [tiles * 16, size] in f32 as [tiles, size, 16], and the least and the largest number of each."""

    size: int

    words = ("low", "high")


@dataclass(frozen=True)
class Fit:
    """The scale and the offset [tiles, 16] of each group that have the least error with the levels of a range.

    size           weights of a group
    least, most    levels
    ranges         with offsets: how many levels the range of a group is wide; without: the levels of its largest weight
    rounds         how often levels, and what fits them, then follow each other
    has_offsets    whether there are offsets; without, nothing is written to `offsets`
    is_signed      whether scales may be below 0 and offsets above
    """

    size: int
    least: float
    most: float
    ranges: tuple[float, ...]
    rounds: int
    has_offsets: bool
    is_signed: bool

    words = ("importance", "low", "high", "offsets")


@dataclass(frozen=True)
class Errors:
    """The squared error [tiles, 16] of each group, with the nearest levels for a scale and an offset."""

    size: int
    least: float
    most: float
    has_offsets: bool

    words = ("importance", "scales", "offsets")


@dataclass(frozen=True)
class Parts:
    """A search for the part of a group's own range that the levels span, without offsets.

    ratios   the parts to try beside the whole range; below 0 where levels run from its upper end downwards
    steps    by which parts of it the best is then made larger and smaller, one behind the other
    gain     how much less the error must be than with the whole range, by which part of that; squared errors that all
             count alike must not be more. None: any less will do
    """

    ratios: tuple[float, ...]
    steps: tuple[float, ...]
    gain: float | None


@dataclass(frozen=True)
class Ranges:
    """A search for scales and offsets that fit levels best, as `Fit` has it; ranges are in its terms."""

    ranges: tuple[float, ...]
    rounds: int


@dataclass(frozen=True)
class Round:
    """The codes of a weight [groups, size] in f32, a byte each, and its scales and offsets [tiles, 16].

    size            weights of a group, a multiple of 8
    least, most     levels
    scale           the type that scales and offsets are rounded to; results are in f32
    power           p, 0, 1/2 or 3/4: squared errors count (1 + (w / root mean square of the row)^2)^p
    has_importance  whether they count by `importance` [blocks, size], too
    search          how scales are found, and whether there are offsets

    A piece is sixteen rows; the last one may have fewer. `scratch` has room for 2 * size * 16 numbers, `inverse`
    [tiles, 16] for 1 / the root mean square, `blocks` is the number of groups of a row and `count` that of all.
    """

    size: int
    least: float
    most: float
    scale: Literal["f16", "bf16", "f32"]
    power: float
    has_importance: bool
    search: Parts | Ranges

    words = ("scales", "offsets", "inverse", "importance", "blocks", "count")


GroupPlan = Tiles | Fit | Errors | Round
