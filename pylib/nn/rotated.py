"""`RotatedLinear`: a low-bit layer whose inputs, or outputs, are rotated at each call, as QuIP and SpinQuant do it.

The weight was rotated before it was quantized, which spreads its outliers; x W^T stays the same if x is rotated, too.
AWQ multiplies columns by numbers instead, a diagonal matrix: ModelOpt leaves that to be done at each call.
The rotations are modules of their own in the layer, and travel with it in the state dictionary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from lowbit.dialect.errors import PackError, SpecError
from lowbit.dialect.spec import MatmulSpec
from lowbit.pylib.layer.hadamard import HadamardMatrix, by_torch, check_columns, is_by_row
from lowbit.pylib.nn.packed_module import PackedModule, autocast, moved_bytes
from lowbit.pylib.operator import rotation_schema as rotation_schema  # which declares the operator
from lowbit.pylib.runtime.batch_invariant import MODE
from lowbit.pylib.runtime.devices import target_at
from lowbit.pylib.torch_types import TORCH
from lowbit.pylib.weights.packed import PackedWeight

INPUTS, OUTPUTS = "input_rotations", "output_rotations"  # names of children of a layer
STATE = ("signs", "matrix", "scale", "_extra_state")  # names that a rotation has in a state dictionary
FLOATS = (torch.float16, torch.bfloat16, torch.float32)


class Rotation(nn.Module):
    """Multiplies blocks of columns by a matrix. The types of its buffers stay as they are."""

    size: int

    def is_by_row(self, target: str) -> bool:
        """Tells whether a row of x gives the same bits on a target, whatever is beside it."""
        return False

    def turned(self, x: Tensor, transposed: bool = False) -> Tensor:
        """Returns x [..., blocks * size] in f32 times the matrix or its transpose, block by block."""
        raise NotImplementedError

    def part(self, first: int, count: int) -> Rotation:
        """Returns what this does to a range of columns of x, for a process that has no others.

        Raises PackError where these become sums with others.
        """
        if first % self.size or count % self.size:
            raise PackError(
                f"a rotation mixes blocks of {self.size} columns, and columns {first} to {first + count - 1}, which "
                "one of several processes has, are no whole blocks; use fewer processes"
            )
        return self

    def is_like(self, other: Rotation) -> bool:
        """Tells whether another rotation gives the same bits."""
        one, two = self.state_dict(), other.state_dict()
        return type(self) is type(other) and all(_same_bits(t, two.get(name)) for name, t in one.items())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        for name, buffer in self._buffers.items():
            self._buffers[name] = buffer if buffer is None else moved_bytes(buffer, fn)
        return self


class HadamardRotation(Rotation):
    """Multiplies by a Hadamard matrix, in one launch.

    matrix   what it is
    signs    [size] of its columns, 1 and -1, in any type, where it has some
    """

    signs: Tensor | None

    def __init__(self, matrix: HadamardMatrix, signs: Tensor | None = None) -> None:
        super().__init__()
        if (signs is None) != (matrix.signs == "none") or (signs is not None and signs.shape != (matrix.size,)):
            given = "none" if signs is None else str(list(signs.shape))
            raise PackError(f"signs are {given}; a matrix with signs={matrix.signs!r} has [{matrix.size}] or none")
        self.matrix, self.size, self._text = matrix, matrix.size, matrix.text
        self.register_buffer("signs", signs)

    def forward(self, input: Tensor) -> Tensor:
        """Returns x [..., blocks * size] times the matrix, in x's type."""
        return torch.ops.lowbit.hadamard(input, self.signs, self._text, "")

    def is_by_row(self, target: str) -> bool:
        return is_by_row(self.matrix, target)

    def turned(self, x: Tensor, transposed: bool = False) -> Tensor:
        return by_torch(x.float(), self.signs, self.matrix.transposed if transposed else self.matrix)

    def get_extra_state(self) -> Tensor:
        """Returns what the matrix is, as bytes, which every format of files can hold."""
        return torch.tensor(list(self._text.encode()), dtype=torch.uint8, device="cpu")

    def set_extra_state(self, state: Tensor) -> None:
        """Raise PackError for the state of another matrix."""
        if not state.is_meta and bytes(state.tolist()) != self._text.encode():
            raise PackError(f"the state has another rotation than this layer's, of {self.size} columns")

    def extra_repr(self) -> str:
        return f"{len(self.matrix.factor)} x {self.matrix.power}, signs={self.matrix.signs!r}"


class MatrixRotation(Rotation):
    """Multiplies by any matrix [size, size] in f32, by torch's own matmul."""

    matrix: Tensor

    def __init__(self, matrix: Tensor) -> None:
        super().__init__()
        self.size = len(matrix)
        self.register_buffer("matrix", matrix)

    def forward(self, input: Tensor) -> Tensor:
        """Returns x [..., blocks * size] times the matrix, in x's type. Raises SpecError for other columns."""
        check_columns(input, self.size)
        return self.turned(input).to(input.dtype)

    def turned(self, x: Tensor, transposed: bool = False) -> Tensor:
        matrix = self.matrix.T if transposed else self.matrix
        with torch.autocast(x.device.type, enabled=False):
            return (x.float().unflatten(-1, (-1, self.size)) @ matrix).flatten(-2)

    def extra_repr(self) -> str:
        return f"{self.size} x {self.size}"


class ColumnScaling(Rotation):
    """Multiplies each column by a number: a diagonal matrix.

    scale   [size] in f16, bf16 or f32
    """

    scale: Tensor

    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        if scale.ndim != 1 or not len(scale) or scale.dtype not in FLOATS:
            raise PackError(f"scale is {scale.dtype} {list(scale.shape)}; it must be [columns] in f16, bf16 or f32")
        self.size = len(scale)
        self.register_buffer("scale", scale)

    def forward(self, input: Tensor) -> Tensor:
        """Returns x [..., blocks * size] times the numbers, rounded to x's type. Raises SpecError for other columns."""
        check_columns(input, self.size)
        return self._scaled(input).to(input.dtype)

    def is_by_row(self, target: str) -> bool:
        return True

    def turned(self, x: Tensor, transposed: bool = False) -> Tensor:
        return self._scaled(x.float())

    def part(self, first: int, count: int) -> Rotation:
        columns = torch.arange(first, first + count, device=self.scale.device) % self.size
        return ColumnScaling(self.scale[columns])

    def _scaled(self, x: Tensor) -> Tensor:
        return (x.unflatten(-1, (-1, self.size)) * self.scale).flatten(-2)

    def extra_repr(self) -> str:
        return f"{self.size}"


class Beside(Rotation):
    """Rotates ranges of columns that lie side by side, each in its own way.

    parts   for each range, its columns and what is done to it, the first rotation first
    """

    def __init__(self, parts: Sequence[tuple[int, Sequence[Rotation]]]) -> None:
        super().__init__()
        self.sizes = [columns for columns, _ in parts]
        self.size = sum(self.sizes)
        self.parts = nn.ModuleList(nn.Sequential(*rotations) for _, rotations in parts)

    def forward(self, input: Tensor) -> Tensor:
        """Returns x [..., size] with its ranges rotated, in x's type."""
        ranges = input.split(self.sizes, -1)
        return torch.cat([part(x) for part, x in zip(self.parts, ranges)], -1)

    def extra_repr(self) -> str:
        return f"sizes={self.sizes}"

    def is_by_row(self, target: str) -> bool:
        return all(rotation.is_by_row(target) for part in self.parts for rotation in cast(list[Rotation], part))

    def turned(self, x: Tensor, transposed: bool = False) -> Tensor:
        return torch.cat([_turned(part, y, transposed) for part, y in zip(self.parts, x.split(self.sizes, -1))], -1)


def _turned(rotations: nn.Module, x: Tensor, transposed: bool) -> Tensor:
    each = list(cast(list[Rotation], rotations))
    for rotation in reversed(each) if transposed else each:
        x = rotation.turned(x, transposed)
    return x


def _same_bits(one: Tensor, other: Tensor | None) -> bool:
    return other is not None and one.dtype is other.dtype and torch.equal(one, other.to(one.device))


def rotation_of(tensors: Mapping[str, Tensor]) -> Rotation:
    """Returns the rotation that a state dictionary describes. Raises PackError for one that describes none."""
    if "scale" in tensors:
        return ColumnScaling(tensors["scale"])
    if "matrix" in tensors:
        matrix = tensors["matrix"]
        is_square = matrix.ndim == 2 and matrix.shape[0] == matrix.shape[1] > 0
        if not is_square or matrix.dtype is not torch.float32:
            raise PackError(f"matrix is {matrix.dtype} {list(matrix.shape)}; it must be square, in f32")
        return MatrixRotation(matrix)
    about = tensors.get("_extra_state")
    if about is None or about.dtype is not torch.uint8 or about.ndim != 1:
        raise PackError("a rotation has a matrix, a scale, or an _extra_state in bytes that says what it is")
    try:
        matrix = HadamardMatrix.of_text(bytes(about.tolist()).decode())
    except (ValueError, RecursionError) as error:
        raise PackError(f"the _extra_state of a rotation says no Hadamard matrix: {error}") from None
    return HadamardRotation(matrix, tensors.get("signs"))


class RotatedLinear(PackedModule, nn.Linear):
    """A linear layer with a packed low-bit weight between rotations: rotate(rotate(x) W^T + bias).

    spec      what is computed between them
    tensors   those of the packed weight
    inputs    rotations of x, the first one first
    outputs   rotations of what the weight makes of it
    """

    def __init__(
        self,
        spec: MatmulSpec,
        tensors: Mapping[str, Tensor],
        inputs: Sequence[Rotation] = (),
        outputs: Sequence[Rotation] = (),
    ) -> None:
        PackedModule.__init__(self, spec, tensors)
        self.in_features, self.out_features = spec.k, spec.outputs
        self.input_rotations, self.output_rotations = nn.Sequential(*inputs), nn.Sequential(*outputs)
        for rotations, columns in ((inputs, spec.k), (outputs, spec.outputs)):
            if wrong := [rotation.size for rotation in rotations if columns % rotation.size]:
                raise PackError(f"a rotation of {wrong[0]} columns does not divide the {columns} of the layer")

    def _hold(self, spec: MatmulSpec, tensors: Mapping[str, Tensor]) -> None:
        super()._hold(spec, tensors)
        if not spec.bias:
            self.register_parameter("bias", None)

    @classmethod
    def from_packed(
        cls, packed: PackedWeight, inputs: Sequence[Rotation] = (), outputs: Sequence[Rotation] = ()
    ) -> RotatedLinear:
        """Returns a layer that shares the tensors of a packed weight. The arguments are those of the class.

        Raises PackError for a rotation whose size does not divide the columns.
        """
        return cls(packed.spec, packed, inputs, outputs)

    def forward(self, input: Tensor) -> Tensor:
        """Returns y [..., n] in the spec's out type for x [..., k] in its act type.

        Raises SpecError for other columns, and where rows shall not depend on each other but a rotation mixes them.
        """
        if MODE.on or self.spec.invariant:
            self._check_by_row(input)
        x = autocast(input, self._act)
        return self.output_rotations(self.multiply(self.input_rotations(x)))

    def _check_by_row(self, x: Tensor) -> None:
        target = target_at(x.get_device())
        for rotation in cast(list[Rotation], [*self.input_rotations, *self.output_rotations]):
            if not rotation.is_by_row(target):
                raise SpecError(
                    f"{rotation} is multiplied by torch, whose bits depend on the other rows of x; rows that shall not"
                    " (invariant=True, lowbit.batch_invariant()) need Hadamard matrices that a kernel has"
                )

    def dequantize(self) -> Tensor:
        """Returns the weight [n, k] of the dense layer that computes the same, in the act type."""
        w = _turned(self.input_rotations, super().dequantize().float(), transposed=True)
        return _turned(self.output_rotations, w.T, transposed=False).T.to(TORCH[self.spec.act])

    def to_linear(self, dtype: torch.dtype | None = None) -> nn.Linear:
        """Returns a dense layer that computes the same, in the act type or in another."""
        weight = self.dequantize()
        linear = nn.Linear(self.in_features, self.out_features, self.spec.bias, "meta").train(self.training)
        linear.weight = nn.Parameter(weight.to(dtype or weight.dtype))
        if self.spec.bias:
            bias = _turned(self.output_rotations, cast(Any, self).bias.float(), transposed=False)
            linear.bias = nn.Parameter(bias.to(linear.weight.dtype))
        return linear

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.spec}"
