"""Rotations by Hadamard matrices: what one is, as a value, and how numbers are rotated by it.

    y = (x * before) (F (x) H) / sqrt(size) * after

for blocks of `size` columns. H is Sylvester's matrix of a power of two, F a small matrix of signs, and `before` or
`after` are signs of columns: random Hadamard matrices have them. A kernel does it in one launch
(`passes.kernels.hadamard`); on a CPU, and for sizes that no kernel has, operations of torch do.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Literal, cast

import torch
from torch import Tensor

from lowbit.dialect.errors import SpecError
from lowbit.pylib.layer.by_kernel import served
from lowbit.pylib.runtime.devices import target_named
from lowbit.pylib.runtime.driver import on_device
from lowbit.pylib.runtime.own_kernels import aligned, own_kernel, unwritten_like

if TYPE_CHECKING:
    from lowbit.pylib.runtime.kernel import Kernel

Signs = Literal["none", "before", "after"]
_MOST_SIZE = 1 << 20  # columns of a block
_MOST_FACTOR = 256  # rows of a factor: those of the libraries have 252


@dataclass(frozen=True)
class HadamardMatrix:
    """A Hadamard matrix [size, size], divided by the root of its size so that it is a rotation.

    factor   rows of a matrix of 1 and -1: ((1,),) for a power of two alone
    power    the rows of Sylvester's matrix, a power of two
    signs    whether columns have signs before the product or after it, which are a tensor of their own
    """

    factor: tuple[tuple[int, ...], ...] = ((1,),)
    power: int = 1
    signs: Signs = "none"

    @property
    def size(self) -> int:
        """The columns that are rotated together."""
        return len(self.factor) * self.power

    @property
    def text(self) -> str:
        """The matrix as text, which `of_text` reads: a constant to torch.compile, and what is saved of it."""
        rows = ["".join("+" if sign > 0 else "-" for sign in row) for row in self.factor]
        return json.dumps({"factor": rows, "power": self.power, "signs": self.signs})

    @classmethod
    def of_text(cls, text: str) -> HadamardMatrix:
        """Returns the matrix that a text says. Raises ValueError for a text that says none."""
        given = json.loads(text)
        if not isinstance(given, dict) or set(cast(dict[str, object], given)) != {"factor", "power", "signs"}:
            raise ValueError("a Hadamard matrix has factor, power and signs")
        rows, power, signs = (cast(dict[str, object], given)[name] for name in ("factor", "power", "signs"))
        if not isinstance(rows, list) or not 1 <= len(cast(list[object], rows)) <= _MOST_FACTOR:
            raise ValueError(f"factor must be a list of 1 to {_MOST_FACTOR} rows")
        for row in cast(list[object], rows):
            if not isinstance(row, str) or len(row) != len(rows) or set(row) - set("+-"):
                raise ValueError(f"a row of the factor is {row!r}; it must be {len(rows)} signs + or -")
        if not isinstance(power, int) or power < 1 or power & (power - 1) or len(rows) * power > _MOST_SIZE:
            raise ValueError(f"power={power!r} must be a power of two, of at most {_MOST_SIZE} columns in all")
        if signs not in ("none", "before", "after"):
            raise ValueError(f"signs={signs!r} must be 'none', 'before' or 'after'")
        return cls(tuple(tuple(1 if s == "+" else -1 for s in row) for row in cast(list[str], rows)), power, signs)

    @property
    def transposed(self) -> HadamardMatrix:
        """The transpose, which is the inverse."""
        turned: dict[Signs, Signs] = {"none": "none", "before": "after", "after": "before"}
        return replace(self, factor=tuple(zip(*self.factor)), signs=turned[self.signs])


@lru_cache(maxsize=256)
def of_text(text: str) -> HadamardMatrix:
    """Returns the matrix that a text says, made once."""
    return HadamardMatrix.of_text(text)


def sylvester(size: int) -> Tensor:
    """Returns Sylvester's matrix [size, size] of a power of two, in f32."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix


# -- what a matrix is


def found_in(matrix: Tensor) -> tuple[HadamardMatrix, Tensor | None] | None:
    """Returns what a matrix [size, size] of 1 and -1 is, with the signs of its columns if it has some; None for others.

    The factor is the smallest that there is: F itself where the matrix is no product with one of Sylvester's.
    """
    if not bool((matrix.abs() == 1).all()):
        return None
    integers, size = matrix.to(torch.int8), len(matrix)
    power = size & -size
    while power > 1 and size // power <= _MOST_FACTOR:
        if (found := _signs_before(integers, power)) is not None:
            return found
        if (found := _signs_before(integers.T, power)) is not None:
            return found[0].transposed, found[1]
        power //= 2
    return (HadamardMatrix(_rows(integers)), None) if 1 < size <= _MOST_FACTOR else None


def _signs_before(matrix: Tensor, power: int) -> tuple[HadamardMatrix, Tensor | None] | None:
    """Returns what diag(signs) (F (x) H) is, for an H of so many rows."""
    columns = matrix[:, ::power].contiguous()  # of F, each row times its sign: the first column of H is ones
    factor = columns[::power] if len(matrix) > power else torch.ones(1, 1, dtype=torch.int8)
    signs = (columns[:, :1] * factor[:, :1].repeat_interleave(power, 0)).flatten()
    if not torch.equal(torch.kron(factor.contiguous(), sylvester(power).to(torch.int8)) * signs[:, None], matrix):
        return None
    alike = bool((signs == 1).all())
    return HadamardMatrix(_rows(factor), power, "none" if alike else "before"), None if alike else signs


def _rows(factor: Tensor) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, factor.tolist()))


# -- rotating


def rotated(x: Tensor, signs: Tensor | None, matrix: HadamardMatrix, target: str) -> Tensor:
    """Returns x [..., blocks * size] times a matrix, block by block, in x's type.

    signs    [size], 1 and -1, if the matrix has some
    target   of the device that x is on, or of an emulator

    Raises SpecError for columns that are no multiple of the size.
    """
    check_columns(x, matrix.size)
    if not served(target, x) or not _has_kernel(matrix, target):
        return by_torch(x, signs, matrix)
    kernel = _kernel(matrix, {torch.float16: "f16", torch.bfloat16: "bf16"}[x.dtype], target)
    with on_device(x.get_device()):
        y = unwritten_like(x.shape, x)
        given = () if signs is None else (aligned(signs.to(x.dtype)),)
        kernel.start(aligned(x), y, x.numel() // matrix.size, *given)
    return y


def check_columns(x: Tensor, size: int) -> None:
    """Raises SpecError for an x whose columns are no whole blocks of a rotation."""
    if x.ndim == 0 or x.shape[-1] % size:
        raise SpecError(f"x is {list(x.shape)}; its last dim must be a multiple of the rotation's {size} columns")


def by_torch(x: Tensor, signs: Tensor | None, matrix: HadamardMatrix) -> Tensor:
    """Returns the same in operations of torch: in f32, or in f64 for x in f64."""
    kind = x.dtype if x.dtype is torch.float64 else torch.float32
    y = x.to(kind).unflatten(-1, (-1, matrix.size))
    y = y if signs is None or matrix.signs != "before" else y * signs.to(kind)
    y = _butterflies(y.unflatten(-1, (len(matrix.factor), matrix.power)))
    if len(matrix.factor) > 1:
        with torch.autocast(x.device.type, enabled=False):
            y = _transposed_factor(matrix.factor, kind, x.device) @ y
    y = y.flatten(-2) / math.sqrt(matrix.size)
    y = y if signs is None or matrix.signs != "after" else y * signs.to(kind)
    return y.flatten(-2).to(x.dtype)


def _butterflies(y: Tensor) -> Tensor:
    """Returns y [..., power] times Sylvester's matrix."""
    step = 1
    while step < y.shape[-1]:
        low, high = y.unflatten(-1, (-1, 2, step)).unbind(-2)
        y = torch.stack((low + high, low - high), -2).flatten(-3)
        step *= 2
    return y


@lru_cache(maxsize=64)
def _transposed_factor(factor: tuple[tuple[int, ...], ...], kind: torch.dtype, device: torch.device) -> Tensor:
    """Returns the transpose of a factor on a device. It is kept: CUDA graphs can't copy it there."""
    return torch.tensor(factor, dtype=kind).T.contiguous().to(device)


def is_by_row(matrix: HadamardMatrix, target: str) -> bool:
    """Tells whether a row of x gives the same bits whatever is beside it: torch's matmul by a factor need not do so."""
    return len(matrix.factor) == 1 or (target != "cpu" and _has_kernel(matrix, target))


@lru_cache(maxsize=256)
def _has_kernel(matrix: HadamardMatrix, target: str) -> bool:
    """Tells whether a row of a matrix is one that a kernel has shared memory and registers for."""
    from lowbit.passes.kernels.hadamard import LEAST_POWER, MOST_FACTOR, shared_bytes

    if matrix.power < LEAST_POWER or len(matrix.factor) > MOST_FACTOR:
        return False
    return shared_bytes(len(matrix.factor), matrix.power) <= target_named(target).max_shared_per_block


@lru_cache(maxsize=64)
def _kernel(matrix: HadamardMatrix, element: str, target: str) -> Kernel:
    from lowbit.passes.kernels.hadamard import hadamard_program

    return own_kernel(partial(hadamard_program, element, matrix.factor, matrix.power, matrix.signs), target)
