"""The operations of the `lowbit` dialect.

Tensor level: `matmul`, `permute`, `quantize`, `quantized_matmul`, `dequantize`, `prepack`. Tile level: a `program` is
what one block does with tiles in device memory, shared memory and registers; scalars and loops are upstream's arith and
scf. Register level: `decode_pair`, `decode_shifted_pair` and `lookup_pair` turn the words of a thread into a pair of
numbers, and are all that is left of a format when tiles are gone, but for bytes.

Verifiers say what was expected and what came. Accesses carry a `boundary`, one word per dim of the tile:

    "none"   the index is always inside
    "clamp"  an index beyond the end reads the last element
    "zero"   an element beyond the end reads as zero
    "skip"   an element beyond the end is not touched
"""

from __future__ import annotations

from lowbit.dialect.bindings import ir, load_dialect
from lowbit.dialect.ops.accumulators import *
from lowbit.dialect.ops.boxes import *
from lowbit.dialect.ops.codes import *
from lowbit.dialect.ops.elementwise import *
from lowbit.dialect.ops.integer_products import *
from lowbit.dialect.ops.memory import *
from lowbit.dialect.ops.outliers import *
from lowbit.dialect.ops.pipelines import *
from lowbit.dialect.ops.products import *
from lowbit.dialect.ops.programs import *
from lowbit.dialect.ops.registers import *
from lowbit.dialect.ops.sends import *
from lowbit.dialect.ops.tensors import *
from lowbit.dialect.ops.tiles import *
from lowbit.dialect.types import Lowbit


def register(context: ir.Context) -> None:
    """Make the dialect known in a context."""
    with context, ir.Location.unknown():
        load_dialect(Lowbit)
