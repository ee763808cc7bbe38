"""The parts of a prefill kernel of invariant matmuls, in numbers: `InOrderPlan`. No MLIR is needed here.

Besides the sums of a chain there are totals, the sums of the chains before. Where products are added to sums directly,
registers hold the totals of as many tokens as they have room for, and shared memory has the others, which are read and
written once for every chain. So tiles may be as wide as those of kernels that have no totals.
"""

from __future__ import annotations

from functools import cached_property

from lowbit.passes.kernels.persistent.legality import loaded_registers
from lowbit.passes.kernels.persistent.plan import PersistentPlan
from lowbit.passes.kernels.persistent.schedule import ROWS_OF_TILE
from lowbit.passes.kernels.persistent.staging import Staging
from lowbit.passes.kernels.prefill_in_order.products import Products
from lowbit.passes.kernels.prefill_in_order.schedule import PrefillInOrderSchedule

_MOST_REGISTERS = 262  # of a thread, by this count: so many do not spill
_MOST_OF_SUMS = {False: 236, True: 229}  # the same where products are added to sums directly, by whether tiles are cut
_SUMS_OF_X = {True: 38, False: 72}  # of these, where x is added up: by whether codes are multiplied as they are stored,
_SUMS_OF_PART = 4  # and for each part
_HELD = 16  # tokens, of which registers hold a multiple
_BANKS = 32  # of shared memory, of 4 bytes
_LEAST_STAGED = 16  # tokens of y that are turned around at a time where totals take shared memory


class InOrderPlan(PersistentPlan):
    """The parts of a kernel that adds up chain by chain."""

    schedule: PrefillInOrderSchedule

    @cached_property
    def products(self) -> Products:
        return Products(self)

    @cached_property
    def shared_tokens(self) -> int:
        """Tokens of a tile whose totals are in shared memory."""
        return self.schedule.tokens - self.register_tokens(self.schedule.tokens)

    def register_tokens(self, tokens: int) -> int:
        """Returns of how many tokens of a tile or slice registers hold the totals: the first ones."""
        if self.products.columns or self.tiles.chains.count == 1:
            return tokens
        return min(tokens, max(0, 2 * self._free_registers(tokens) // _HELD * _HELD))

    @property
    def pitch(self) -> int:
        """Totals from a row to the next in shared memory: neighbouring rows are in different banks."""
        return self.shared_tokens + (_BANKS // 4 - self.shared_tokens) % _BANKS

    @cached_property
    def staging(self) -> Staging | None:
        """Little is turned around at a time where totals take shared memory."""
        return Staging(self.spec, self.schedule, _LEAST_STAGED) if self.shared_tokens else super().staging

    @cached_property
    def shared_bytes(self) -> int:
        return super().shared_bytes + 4 * ROWS_OF_TILE * self.pitch * (self.shared_tokens > 0)

    @property
    def spills(self) -> bool:
        """Whether a thread is likely to need more registers than there are."""
        return self._free_registers(self.schedule.tokens) < 0

    def _free_registers(self, tokens: int) -> int:
        """Registers of a thread that are left by the sums of a chain, products, two panels' fragments, what is loaded
        of a round, and sums of x; beside products by totals, too."""
        s, products = self.schedule, self.products.columns > 0
        sums = tokens if products else tokens // 2
        banks = s.banks * s.part_tokens // 2 if products else 0
        of_x = _SUMS_OF_X[self.scaling.raw_codes] + _SUMS_OF_PART * s.parts if self.scaling.sums_x else 0
        most = _MOST_REGISTERS if products else _MOST_OF_SUMS[s.last_tokens > 0]
        return most - (sums + banks + s.panel_k // 2 + loaded_registers(self) + of_x)
