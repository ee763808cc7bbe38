"""What a thread of a persistent block holds of a weight from one round to the next: `WeightRegisters`."""

from __future__ import annotations

from dataclasses import dataclass, field

from lowbit.passes.builder import Tile


@dataclass
class WeightRegisters:
    """Codes by piece, scales, zeros and offsets by name and number, and where the outliers of a thread go on."""

    codes: list[Tile]
    scales: dict[str, list[Tile]]
    outliers: list[Tile] = field(default_factory=list[Tile])
    coming: dict[str, Tile] = field(default_factory=dict[str, Tile])  # of the next round, where a round has one number

    def of_group(self, name: str, number: int) -> Tile:
        """Returns the number of a group of the round, where groups take turns."""
        held = self.scales[name]
        return held[number % len(held)]

    def flat(self) -> list[Tile]:
        """All tiles, as a loop carries them."""
        return [*self.codes, *(tile for tiles in self.scales.values() for tile in tiles), *self.outliers]

    def like(self, tiles: list[Tile]) -> WeightRegisters:
        """The inverse of `flat`."""
        codes, rest = tiles[: len(self.codes)], tiles[len(self.codes) :]
        scales: dict[str, list[Tile]] = {}
        for name, some in self.scales.items():
            scales[name], rest = rest[: len(some)], rest[len(some) :]
        return WeightRegisters(codes, scales, rest)
