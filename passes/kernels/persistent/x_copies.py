"""How panels of x come to shared memory, in numbers: `XCopies`. No MLIR is needed here."""

from __future__ import annotations

from dataclasses import dataclass

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.persistent.schedule import PrefillSchedule
from lowbit.passes.kernels.persistent.tiles import Tiles


@dataclass(frozen=True)
class XCopies:
    """Stages of x, which boxes of the copy engine fill, or cp.async does.

    swizzled  whether wgmma reads them, and not ldmatrix
    by_boxes  whether they come as boxes: the parameters are tensor maps then, and two signals belong to a stage
    """

    spec: MatmulSpec
    schedule: PrefillSchedule
    tiles: Tiles
    swizzled: bool
    by_boxes: bool

    @property
    def parameters(self) -> dict[int, str]:
        """The parameter that x is copied by, for tiles or slices of so many tokens: one for each size of boxes."""
        return dict(zip(self.tiles.tokens, ("x", "last_x" if self.by_boxes else "x")))

    @property
    def kinds(self) -> dict[str, str]:
        """The kind of these parameters."""
        return dict.fromkeys(self.parameters.values(), "tensor_map" if self.by_boxes else "pointer")

    @property
    def boxes(self) -> dict[str, tuple[int, int]]:
        """Tokens and columns of x that one instruction copies, by parameter; none without boxes."""
        if not self.by_boxes:
            return {}
        blocks, width = self.schedule.cluster_blocks, self.spec.x.per_panel
        return {name: (tokens // blocks, width) for tokens, name in self.parameters.items()}

    @property
    def pitch(self) -> int:
        """Numbers from a token to the next in a stage: for ldmatrix 16 bytes more than a panel keep the rows that one
        reads in different banks."""
        return self.schedule.panel_k + (0 if self.swizzled else self.spec.x.per_vector)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of the stages and their signals."""
        s = self.schedule
        signals = 2 * (-(-8 * s.num_stages // 128) * 128) if self.by_boxes else 0
        return s.num_stages * s.tokens * self.pitch * self.spec.x.bytes + signals
