"""How scales, zeros and offsets lie in a round of a persistent kernel, tensor by tensor. No MLIR is needed here."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lowbit.dialect.elements import ELEMENTS
from lowbit.dialect.spec import MatmulSpec
from lowbit.dialect.weight import TensorSlot
from lowbit.passes.kernels.persistent.round import Round
from lowbit.passes.kernels.persistent.scaling import Scaling
from lowbit.passes.kernels.persistent.tiles import Tiles

_MOST_LOADED = 16  # numbers of a row and round that registers have room for,
_MOST_BESIDE_OUTLIERS = 8  # which outliers take from them


@dataclass(frozen=True)
class RoundTensor:
    """Numbers of a tensor in a round.

    count   numbers of a row that a round has: one for every `columns` columns
    repeat  parts of rounds, or rounds, that share a number
    """

    slot: TensorSlot
    count: int
    columns: int
    repeat: int

    @staticmethod
    def of(slot: TensorSlot, spec: MatmulSpec, step: int, rounds: int, together: int) -> RoundTensor:
        """Returns the numbers of a tensor in a round of `step` columns, of so many rounds. together: columns of a round
        that are side by side."""
        packing, bilevel = spec.packing, spec.bilevel
        if packing.padded_group is None or slot.index == "padded_row":
            return RoundTensor(slot, 1, step, rounds)
        columns = bilevel.columns(packing) if slot.index == "block" and bilevel else packing.padded_group
        each = math.gcd(columns, together)
        return RoundTensor(slot, step // each, each, columns // each)

    @property
    def lanes(self) -> int:
        """Numbers in memory for the 16 rows of a row block."""
        return self.slot.shape[-1] if len(self.slot.shape) == 3 else 1

    @property
    def row_block_bytes(self) -> int:
        """Bytes of a row block in a round."""
        return self.count * self.lanes * ELEMENTS[self.slot.storage].bytes

    def ended(self, width: int, panel: int) -> list[int]:
        """Returns the numbers that a panel of a round, `width` columns, is the last one to need."""
        ends = ((i, (i + 1) * self.columns) for i in range(self.count))
        return [i for i, end in ends if panel * width < end <= (panel + 1) * width]


@dataclass(frozen=True)
class RoundTensors:
    """The tensors that rounds need, by name: what is not for the sums of all of k.

    loaded  those that come straight to registers
    staged  those that come by way of shared memory: with many numbers in a round, more than there are registers for.
            Beside activations of 8 bits they come part by part (`ByteWeight`)
    """

    loaded: dict[str, RoundTensor]
    staged: dict[str, RoundTensor]

    @staticmethod
    def of(spec: MatmulSpec, round_: Round, tiles: Tiles, scaling: Scaling) -> RoundTensors:
        """Returns the tensors of a weight in the rounds of tiles."""
        needed = [slot for slot in spec.tensors if _is_in_rounds(slot, spec, scaling)]
        counts = round_.step, tiles.rounds, tiles.chains.unit
        every = {slot.name: RoundTensor.of(slot, spec, *counts) for slot in needed}
        most = _MOST_BESIDE_OUTLIERS if spec.outliers else _MOST_LOADED
        many = not spec.compute and sum(tensor.count for tensor in every.values()) > most
        staged = {name for name, tensor in every.items() if many and tensor.count > 1 and tensor.repeat == 1}
        loaded = {name: tensor for name, tensor in every.items() if name not in staged}
        return RoundTensors(loaded, {name: tensor for name, tensor in every.items() if name in staged})

    @property
    def every(self) -> dict[str, RoundTensor]:
        """All of them, in no particular order."""
        return self.loaded | self.staged

    @property
    def staged_bytes(self) -> int:
        """Bytes that come by way of shared memory for a row block and round."""
        return sum(tensor.row_block_bytes for tensor in self.staged.values())

    @property
    def loaded_numbers(self) -> int:
        """Numbers of a row and round that come to registers."""
        return sum(tensor.count for tensor in self.loaded.values())


def _is_in_rounds(slot: TensorSlot, spec: MatmulSpec, scaling: Scaling) -> bool:
    if slot.index == "padded_row":
        return scaling.rows_early
    if slot.role == "zero" and spec.zeros == "int":
        return True
    return slot.index in ("group", "block") and scaling.in_rounds
