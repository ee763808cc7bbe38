"""The programs that search scales and offsets of groups on the host, as values; `groups` makes them. Nothing here loads
MLIR.

    Tiles    groups in the order that the others read
    Fit      the scale and the offset of least error, from several ranges on
    Errors   the errors of given ones

A weight is w = s q + o with integer levels q. A piece is a tile of sixteen groups, which lie side by side: x and
`importance` are [tiles, size, 16] in f32, everything that a group has one of is [tiles, 16].
"""

from __future__ import annotations

from dataclasses import dataclass


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


GroupPlan = Tiles | Fit | Errors
