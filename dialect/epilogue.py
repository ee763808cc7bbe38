"""What becomes of the sums of a matmul before they are y: `MatmulSpec.epilogue`. With h = x W^T + bias,

    None         y = h
    "residual"   y = h + r            r [m, n] in y's type is an argument of the call
    "silu_mul"   y = silu(g) * u      g = h[:, :n / 2] and u = h[:, n / 2:], the two halves of a gated MLP: y [m, n / 2]
    "gelu_mul"   y = gelu(g) * u
    "swiglu_oai" y = g' / (1 + exp(-1.702 g')) * (u' + 1)      g' = min(g, 7), u' = clamp(u, -7, 7)

All activations are g / (1 + exp(-s)), with s = g (c + d g^2): SiLU has s = g, GELU in its tanh form (Hendrycks and
Gimpel, 2016, section 2) s = 2 sqrt(2 / pi) (g + 0.044715 g^3). The third is that of gpt-oss. All is computed in f32 and
rounded once. A NaN stays one.

A weight of several experts has the two halves of each, one expert after the other.

A thread has the sums of rows r and r + 8 of a row block. So a packed weight whose matmul is gated has 8 rows of the
gate in each block, and below them the 8 rows that are multiplied by them: block b makes columns 8 b .. 8 b + 7 of y.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lowbit.dialect.formats.packing import ROWS

Epilogue = Literal["silu_mul", "gelu_mul", "swiglu_oai", "residual"]
EPILOGUES: tuple[Epilogue, ...] = ("silu_mul", "gelu_mul", "swiglu_oai", "residual")
RESIDUAL = "residual"
"""The epilogue that adds an argument of the call, and the name of this argument."""
HALF = ROWS // 2  # rows of a block that are of the gate


@dataclass(frozen=True)
class Activation:
    """g / (1 + exp(-s)) with s = g (linear + cubic g^2), times u + shift.

    limit  the most that g may be, and u and -u: more is cut off before
    """

    linear: float
    cubic: float = 0.0
    shift: float = 0.0
    limit: float = math.inf

    @property
    def is_clamped(self) -> bool:
        """Tells whether there is a limit."""
        return self.limit < math.inf


ACTIVATIONS: dict[str, Activation] = {
    "silu_mul": Activation(1.0),
    "gelu_mul": Activation(2 * math.sqrt(2 / math.pi), 2 * math.sqrt(2 / math.pi) * 0.044715),
    "swiglu_oai": Activation(1.702, shift=1.0, limit=7.0),
}
"""Of the epilogues that multiply two halves."""


def stored_rows(n: int, experts: int = 1) -> NDArray[np.int64]:
    """Returns the row of a gated weight [n, k] that stands in each row of its row blocks, of whole ones per expert."""
    return np.arange(n).reshape(experts, 2, -1, HALF).swapaxes(1, 2).reshape(-1)
