"""The end of every matmul kernel: numbers of y from sums [rows, tokens] in f32, whichever engine and order made them.

    h = sums + bias
    y = h,  h + residual,  or activation(gate) * up with both halves of each row block of h

Families apply what their sums lack (scales of rows and of x), ask for `numbers`, and store these where
`row_of_y` says.
"""

from __future__ import annotations

from lowbit.dialect.epilogue import ACTIVATIONS, HALF, RESIDUAL, Activation
from lowbit.dialect.formats.packing import ROWS
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.builder import Memory, Program, Scalar, Tile


class Epilogue:
    """Makes numbers of y in program `p`. ragged: whether some tile has rows beyond the last of the weight."""

    def __init__(self, p: Program, spec: MatmulSpec, ragged: bool) -> None:
        self.p, self.spec, self.ragged = p, spec, ragged

    def numbers(self, total: Tile, first_row: Scalar, token: Scalar | int = 0) -> Tile:
        """Returns sums [rows, tokens], from a row and a token on, as numbers of y's type: [rows of y, tokens]."""
        p, spec = self.p, self.spec
        if spec.bias:
            total = p.add(total, p.cast(self.per_row("bias", spec.out_dtype, total, first_row), "f32"))
        if spec.is_gated:
            total = self._gated(total, ACTIVATIONS[str(spec.epilogue)])
        if spec.epilogue == RESIDUAL:
            boundary = (self.outside("clamp"), "clamp")
            residual = p.load(self.view_like_y(RESIDUAL), (first_row, token), total.layout, boundary)
            total = p.add(total, p.cast(residual, "f32"))
        return p.cast(total, spec.out_dtype)

    def per_row(self, name: str, element: str, total: Tile, first_row: Scalar) -> Tile:
        """Reads a number for every row of sums from the tensor of this name."""
        view = self.p.global_view(self.p[name], element, (self.spec.n, 1))
        return self.p.load(view, (first_row, 0), total.layout.reduce((1,)), (self.outside("clamp"), "none"))

    def view_like_y(self, name: str, tokens: Scalar | None = None) -> Memory:
        """Returns the view [rows of y, tokens] of y, or of a tensor that is like it. tokens: how many; None: m."""
        p, rows = self.p, self.spec.outputs
        sizes = [p["m"] if tokens is None else tokens]
        return p.global_view(p[name], self.spec.out_dtype, (rows, -1), (1, rows), sizes=sizes)

    def outside(self, word: str) -> str:
        """Returns the boundary of rows: `word` where some tile ends beyond the last row."""
        return word if self.ragged else "none"

    def row_of_y(self, first_row: Scalar) -> Scalar:
        """Returns the row of y that sums from a row on begin with."""
        return first_row // 2 if self.spec.is_gated else first_row

    def _gated(self, total: Tile, activation: Activation) -> Tile:
        """Returns activation(gate) * (up + shift) of sums of whole row blocks."""
        p, (rows, tokens) = self.p, total.shape
        halves = p.reshape(total, (rows // ROWS, 2, HALF, tokens))
        gate, up = (p.reshape(p.slice(halves, 1, half, 1), (rows // 2, tokens)) for half in (0, 1))
        if activation.is_clamped:
            gate, up = self._at_most(gate, activation.limit), self._within(up, activation.limit)
        if activation.shift:
            up = p.add(up, activation.shift)
        slope: Tile | float = activation.linear
        if activation.cubic:
            slope = p.fma(p.mul(gate, gate), activation.cubic, activation.linear)
        return p.mul(p.div(gate, p.add(p.exp(p.neg(p.mul(gate, slope))), 1.0)), up)

    def _at_most(self, numbers: Tile, limit: float) -> Tile:
        """Returns numbers of which larger ones are the limit. NaN stays NaN, which the least of two is not."""
        return self.p.select(numbers > limit, limit, numbers)

    def _within(self, numbers: Tile, limit: float) -> Tile:
        """Returns numbers from -limit to limit."""
        return self.p.select(numbers < -limit, -limit, self._at_most(numbers, limit))
