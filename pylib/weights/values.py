"""The values of a weight's tensors: those that `pack` takes, and those that a file holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lowbit.dialect.bilevel import integers_of, least_code
from lowbit.dialect.errors import PackError
from lowbit.dialect.formats.packing import ROWS
from lowbit.dialect.spec import MatmulSpec
from lowbit.dialect.weight import Storage, TensorSlot
from lowbit.pylib.torch_types import TORCH, stored_type
from lowbit.pylib.weights import gated_rows, outliers
from lowbit.pylib.weights.at_once import at_once
from lowbit.pylib.weights.memory_order import pack_blocks, pack_codes, pack_groups, unpack_codes
from lowbit.pylib.weights.tensor_checks import check_storage

E4M3_OVERFLOW = 464.0  # the tie between 448, the largest, and 480, the first that is not there
_SHAPES = {"element": "[n, k]", "group": "[n, groups]", "row": "[n]", "padded_row": "[n] or [1]"}
_SHAPES |= {"column": "[k] of each expert", "block": "[n / rows, groups / bilevel.groups]"}


def as_tensor(slot: TensorSlot, given: object) -> Tensor:
    """Returns the tensor or array `given` for a slot as a tensor of the slot's shape; [n] passes for [n, 1], and one
    number for the same scale in every row."""
    name, shape = slot.name, list(slot.given)
    if slot.index == "sparse":
        n, k = slot.given
        return outliers.read_csr(given, n, k)
    if isinstance(given, np.ndarray):
        try:
            given = torch.from_numpy(np.require(given, requirements=["C", "W"]))
        except (TypeError, ValueError) as error:  # a type that torch does not have; the other byte order
            raise PackError(f"{name}: {error}") from None
    if not isinstance(given, Tensor):
        raise PackError(f"{name} must be a torch tensor or a NumPy array, not {type(given).__name__}")
    if given.layout is not torch.strided:
        raise PackError(f"{name} is {given.layout}; use .to_dense()")
    check_storage(name, given, PackError)
    if list(given.shape) == shape[:1] and shape[1:] == [1]:
        given = given[:, None]
    if slot.index == "padded_row" and given.numel() == 1:
        given = given.reshape(1).expand(shape)
    if list(given.shape) != shape:
        what = _SHAPES[slot.index]
        hint = "; transpose it" if list(given.shape) == shape[::-1] else ""
        raise PackError(f"{name} must be {what} = {shape}, not {list(given.shape)}{hint}")
    return given.detach().resolve_neg()


def to_memory(spec: MatmulSpec, slot: TensorSlot, values: Tensor) -> Tensor:
    """Returns the values of a slot as kernels read them. Raises PackError for those that its type does not hold."""
    low = least(spec)
    if slot.role == "codes":
        _check_codes(values, low, low + spec.dtype.codes - 1)
        return pack_codes(spec.packing, gated_rows.stored(spec, values), -low)
    if slot.index == "sparse":
        found = outliers.of_csr(values)
        return outliers.pack_lines(found._replace(rows=gated_rows.number_in_memory(spec, found.rows)), spec.n)
    if slot.role == "permutation":
        _check_integer(slot.name, values, "int()")
        _check_permutation(values.long(), spec.k)
        return values.to(torch.int32, copy=True)
    if slot.code and slot.storage == "u8":
        first = least_code(slot.code)
        stored = _integers(values, slot.name, first, first + integers_of(slot.code).codes - 1)
    elif slot.storage == "u8":
        stored = _integers(values, slot.name, low, low + spec.zero_span)
    else:
        stored = _floats(slot.name, values, slot.storage)
    stored = gated_rows.stored(spec, stored)
    if slot.index == "group":
        return pack_groups(spec.packing, stored)
    if slot.index == "block" and spec.bilevel:
        return pack_blocks(spec.packing, stored, spec.bilevel)
    # A copy: the packed tensor must not be the caller's memory.
    return F.pad(stored, (0, slot.shape[0] - len(stored))).clone()


def check_stored(spec: MatmulSpec, slot: TensorSlot, stored: Tensor) -> None:
    """Raises PackError where a packed tensor holds values that `to_memory` never gives and kernels can't multiply."""
    if slot.role == "codes":
        _check_padding(spec, stored)
        return
    if slot.index == "sparse":
        outliers.check_lines(stored, spec.n, spec.k)
        return
    if slot.role == "permutation":
        _check_permutation(stored.long(), spec.k)
        return
    wrong, rule = _unfit(spec, slot)
    for first, part in _parts(stored):
        if bool((found := wrong(part)).any()):
            at = first + int(found.nonzero()[0])
            value = _as_stored(part, slot.storage)[at - first].item()
            raise PackError(f"saved {slot.name} hold {value:g} at {at}: {rule}; the file is damaged, or pack again")


def _unfit(spec: MatmulSpec, slot: TensorSlot) -> tuple[Callable[[Tensor], Tensor], str]:
    """Returns what tells the numbers that a slot can't have, and the rule that they break."""
    storage = slot.storage
    if slot.code and storage == "u8":
        most = integers_of(slot.code).codes - 1
        return lambda t: t > most, f"codes of {slot.code} must be at most {most}"
    if storage == "u8":
        span = spec.zero_span
        return lambda t: t > span, f"for act={spec.act!r} integer zeros must be at most {span} above the least code"
    if storage == "e8m0":
        return lambda t: t == 0xFF, "must be finite"
    if storage == "e4m3":
        return lambda t: (t & 0x7F) == 0x7F, "must be finite"
    return lambda t: ~t.isfinite(), "must be finite"


def _parts(stored: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yields pieces of a contiguous tensor, each with the position of its first number."""
    flat = stored.view(-1)
    step = at_once(stored.device)
    for first in range(0, len(flat), step):
        yield first, flat[first : first + step]


def _as_stored(part: Tensor, storage: Storage) -> Tensor:
    return part.view(TORCH[storage]).float()


def _check_padding(spec: MatmulSpec, codes: Tensor) -> None:
    """Padding is multiplied by an x of 0, which is 0 for all codes but NaN and infinity: these must not be there."""
    packing = spec.packing
    if not spec.dtype.has_nan or packing.padded_k == packing.k:
        return
    step = max(1, at_once(codes.device) // (ROWS * packing.padded_k))
    for first in range(0, packing.row_blocks, step):
        part = codes[first : first + step]
        rows = replace(packing, n=min(ROWS * len(part), packing.n - ROWS * first))
        if not torch.equal(pack_codes(rows, unpack_codes(rows, part)), part):
            raise PackError("saved codes hold bits where there is padding; the file is damaged, or pack again")


def _check_permutation(columns: Tensor, k: int) -> None:
    """Raises PackError unless each expert, of k numbers of them, has every column once."""
    outside = (columns < 0) | (columns >= k)
    _reject("permutation", columns, outside, f"must be in 0..{k - 1}; it is the column of x that meets this column")
    own = columns + torch.arange(len(columns), device=columns.device) // k * k  # a number for each column of an expert
    times = torch.bincount(own, minlength=len(columns))
    _reject("permutation", columns, times[own] > 1, "is there twice; every column must be there once")


def least(spec: MatmulSpec) -> int:
    """Returns the least value of an integer format, and the least code as `pack` takes it."""
    return -(spec.dtype.codes // 2) if spec.dtype.kind == "int" else 0


def _check_codes(codes: Tensor, low: int, high: int) -> None:
    _check_integer("codes", codes, "uint8() or int8()")
    rows = max(1, at_once(codes.device) // codes.shape[1])
    for first in range(0, codes.shape[0], rows):
        part = codes[first : first + rows]
        part = part if part.dtype in (torch.uint8, torch.int8) else part.long()
        lowest, highest = map(int, part.aminmax())
        if lowest < low or highest > high:
            wide = part.long()  # a uint8 tensor compares with -8 as if it were 248
            _reject("codes", wide, (wide < low) | (wide > high), f"must be in {low}..{high}", first)


def _integers(zeros: Tensor, name: str, low: int, high: int) -> Tensor:
    """Returns integers as uint8, less the least of them."""
    fix = f", or {name}='float' in the spec" if name == "zeros" else ""
    _check_integer(name, zeros, f"int(){fix}")
    wide = zeros.long()
    rule = f"must be in {low}..{high}" + ("; or use zeros='float'" if name == "zeros" else "")
    _reject(name, wide, (wide < low) | (wide > high), rule)
    return (wide - low).to(torch.uint8)


def _check_integer(name: str, t: Tensor, fix: str) -> None:
    if t.is_floating_point() or t.is_complex() or t.dtype == torch.bool:
        raise PackError(f"{name} must be integers, not {t.dtype}; use .{fix}")


def _floats(name: str, given: Tensor, storage: Storage) -> Tensor:
    """Returns `given` rounded to a float type, as it is stored. Raises PackError where a value is not finite,
    overflows, or is no e8m0."""
    if not given.is_floating_point():
        fix = "view the exponent bytes as torch.float8_e8m0fnu" if storage == "e8m0" else "use .float()"
        raise PackError(f"{name} must be floats, not {given.dtype}; {fix}")
    wide = given if given.dtype == torch.float64 else given.float()
    _reject(name, wide, ~wide.isfinite(), "must be finite; clean what the quantizer gave")
    if storage == "e8m0":
        mantissa, exponent = torch.frexp(wide)  # mantissa in [0.5, 1)
        wrong = (mantissa != 0.5) | (exponent < -126) | (exponent > 128)
        rule = "must be a power of two from 2^-127 to 2^127; round it or use another scale= type"
        _reject(name, wide, wrong, rule)
        return (exponent + 126).to(torch.uint8)
    result = wide.to(TORCH[storage])
    too_large = wide.abs() > E4M3_OVERFLOW if storage == "e4m3" else ~result.isfinite()
    _reject(name, wide, too_large, f"overflows {storage}; use a wider type in the spec")
    return result.view(stored_type(storage))


def _reject(name: str, values: Tensor, wrong: Tensor, rule: str, first_row: int = 0) -> None:
    """Raises PackError with the first wrong position and its value, where there is one."""
    if not wrong.any():
        return
    at = wrong.nonzero()[0].tolist()
    value = values[tuple(at)].item()
    at[0] += first_row
    raise PackError(f"{name}{at} = {value if isinstance(value, int) else format(value, 'g')} {rule}")
