"""What `lower-tiles` has been asked for and has not yet written down, and when it has to be.

A fragment writes its registers when a consumer asks for them, which puts every load and every decode right before the
product that needs it. Three rules limit how long that may wait:

*Reads.* What reads memory is finished before memory may change: before a barrier, a store, or the end of a region.

*Products of wgmma.* Their accumulators are registers outside of LLVM (`passes.lowering.warpgroup`), and there is one
set: what is computed from the last product is written down before the next begins. There are three exceptions. A
product onto the last one's unwritten result extends it: a chain of instructions in the same registers. A product that
overlaps with the last one has the other of two sets of registers. Work that runs beside a product needs only its first
instructions to be written.

*Sums of rows by wgmma.* They have registers of their own, again one set, and are waited for together with the product
that follows them.
"""

from __future__ import annotations

from collections.abc import Sequence

from lowbit.passes.lowering.addressing import Place
from lowbit.passes.lowering.fragment import Fragment
from lowbit.passes.lowering.warpgroup import Products, RowSums, wait


class PendingWork:
    """The reads, products and sums of one program that may not be written down yet."""

    def __init__(self) -> None:
        self._reads: list[Fragment] = []
        self._result: Fragment | None = None  # the last product, or what was computed from it since
        self._overlapping: Products | None = None  # the last product that may overlap with the next
        self._row_sums: RowSums | None = None

    def add_read(self, fragment: Fragment) -> None:
        """Notes a fragment whose registers read memory."""
        self._reads.append(fragment)

    def finish_reads(self) -> None:
        """Writes down all that reads memory, which may change after this point."""
        for fragment in self._reads:
            fragment.force()
        self._reads.clear()

    def finish_product(self) -> None:
        """Writes down what is computed from the last product, so that the next can have its accumulators."""
        if self._result is not None:
            self._result.force()
        self._result = None

    def begin_product(self) -> None:
        """Writes down the first instructions of the last product, so that what comes next runs beside it."""
        if isinstance(self._result, Products):
            self._result.write_first()

    def computed(self, result: Fragment, operands: Sequence[Fragment]) -> None:
        """Notes that `result` is computed from `operands`, one of which may be the last product."""
        if self._result in operands:
            self._result = result

    def extended(self, total: Fragment, b: Place) -> Products | None:
        """Takes back the last product if it is `total`, is not written yet, and reads the same b; None if not."""
        if isinstance(total, Products) and total is self._result and total in self._reads and total.b is b:
            self._reads.remove(total)
            return total
        return None

    def add_product(self, products: Products) -> None:
        """Makes a product the last one."""
        if self._row_sums is not None and self._row_sums.behind is None:
            self._row_sums.behind = products
        self._result = products
        self._reads.append(products)

    def other_bank(self) -> int:
        """Returns the number of the set of accumulators that the last overlapping product does not use."""
        return 0 if self._overlapping is not None and self._overlapping.bank else 1

    def start_overlapping(self, products: Products) -> None:
        """Begins a product at once, beside the last such, whose result is written down once the first instructions
        of this one are under way."""
        last = self._overlapping

        def finish_last() -> None:
            if last is not None and last in self._reads:  # not written down yet
                wait(1)
                last.waited_for = True
            self.finish_product()

        products.start(finish_last)
        self._overlapping = products

    def before_row_sums(self) -> None:
        """Writes down what has the accumulators that sums of rows are about to use or to be ordered behind."""
        self.finish_product()
        if self._row_sums is not None:
            self._row_sums.force()

    def add_row_sums(self, sums: RowSums) -> None:
        """Makes sums of rows the last ones."""
        self._row_sums = sums
        self._reads.append(sums)
