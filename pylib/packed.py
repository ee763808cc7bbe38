"""A weight as the kernels read it: `pack` makes a `PackedWeight`, which unpacks to exactly what went in.

Codes are integers [n, k]: for i<b> formats the signed values -2^(b-1) .. 2^(b-1)-1 (unpacked as int8), for
all others the codes 0 .. 2^b-1 (unpacked as uint8). In memory signed codes are in offset binary.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from lowbit.dialect.errors import PackError
from lowbit.dialect.spec import MatmulSpec
from lowbit.pylib.memory_order import pack_codes, pack_groups, unpack_codes, unpack_groups

TORCH = {
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "e8m0": torch.float8_e8m0fnu,
    "e4m3": torch.float8_e4m3fn,
    "u8": torch.uint8,
}
E4M3_OVERFLOW = 464.0  # the tie between 448, the largest, and 480, the first that is not there
FORMAT = 2  # of state_dict; goes up when the memory order changes
CHECKED = 1 << 24  # codes per step of the range check
ALIGNMENT = 16  # bytes; what cp.async and 16-byte loads ask of a base address


@dataclass(frozen=True, eq=False, repr=False)
class PackedWeight:
    """A packed weight. Made by `pack` or `PackedWeight.from_state_dict`, good for every number of tokens.

    codes   int32 [packing.codes_shape]
    scales  [packing.scales_shape] in the spec's scale type, 0 for padding (the least value for e8m0)
    zeros   [packing.scales_shape] uint8 z - lo, or floats of type spec.zero_kind; None without zeros
    bias    [n] in the out type; None without bias
    """

    spec: MatmulSpec
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    bias: Tensor | None = None

    def __post_init__(self) -> None:
        _check_spec(self.spec)
        expected = _expected(self.spec)
        given = self._tensors()
        if expected.keys() != given.keys():
            raise PackError(f"({self.spec}) has tensors {sorted(expected)}, but got {sorted(given)}")
        for name, (shape, dtype) in expected.items():
            t = given[name]
            if t.shape != shape or t.dtype != dtype:
                found = f"{t.dtype} {tuple(t.shape)}"
                raise PackError(f"packed {name} must be {dtype} {shape}, not {found}; use pack()")
            if t.device != self.codes.device:
                raise PackError(f"packed {name} is on {t.device}, codes on {self.device}; move one of them")
            if not t.is_contiguous() or t.data_ptr() % ALIGNMENT:
                raise PackError(f"packed {name} must be contiguous and {ALIGNMENT}-byte aligned; clone it")

    def _tensors(self) -> dict[str, Tensor]:
        tensors = {"codes": self.codes, "scales": self.scales, "zeros": self.zeros, "bias": self.bias}
        return {name: t for name, t in tensors.items() if t is not None}

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors; equal to spec.bytes."""
        return sum(t.nbytes for t in self._tensors().values())

    def to(self, device: torch.device | str) -> PackedWeight:
        """The same weight on another device; self if it is there already."""
        moved = {name: t.to(device) for name, t in self._tensors().items()}
        return self if moved["codes"] is self.codes else replace(self, **moved)

    def unpack(self) -> Tensor:
        """The codes as they were given to `pack`: [n, k], int8 for i<b> formats, else uint8."""
        codes = unpack_codes(self.spec.packing, self.codes, -_least(self.spec))
        return codes.view(torch.int8) if self.spec.dtype.kind == "int" else codes

    def unpack_scales(self) -> Tensor:
        """The scales [n, groups] in the spec's scale type."""
        return unpack_groups(self.spec.packing, self.scales)

    def unpack_zeros(self) -> Tensor | None:
        """The zeros [n, groups]: int32, or floats of type spec.zero_kind. None without zeros."""
        if self.zeros is None:
            return None
        zeros = unpack_groups(self.spec.packing, self.zeros)
        return zeros.to(torch.int32) + _least(self.spec) if self.spec.zeros == "int" else zeros

    def state_dict(self) -> dict[str, Tensor]:
        """Plain tensors for torch.save or safetensors: codes, scales, zeros and bias where there are, and
        "spec", JSON as uint8, which keeps a weight from being loaded as another format of equal size."""
        text = json.dumps(_identity(self.spec)).encode()
        return {**self._tensors(), "spec": torch.tensor(list(text), dtype=torch.uint8)}

    @classmethod
    def from_state_dict(cls, spec: MatmulSpec, tensors: Mapping[str, Tensor]) -> PackedWeight:
        """The weight that `state_dict` wrote. Raises PackError when it was packed for another spec."""
        _check_spec(spec)
        if not (isinstance(tensors, Mapping) and all(isinstance(t, Tensor) for t in tensors.values())):
            raise PackError("tensors must be what state_dict() gave: a dictionary of tensors")
        tensors = dict(tensors)
        if "spec" not in tensors:
            raise PackError(f"tensors must be what state_dict() gave, with 'spec'; got {sorted(tensors)}")
        saved, wanted = _read_identity(tensors.pop("spec")), _identity(spec)
        if saved != wanted:
            wrong = [key for key in wanted if saved.get(key) != wanted[key]]
            packed = ", ".join(f"{key}={saved.get(key)!r} (not {wanted[key]!r})" for key in wrong)
            raise PackError(f"the weight was packed with {packed}; load it with that spec, or pack again")
        unknown = tensors.keys() - {"codes", "scales", "zeros", "bias"}
        if unknown or not {"codes", "scales"} <= tensors.keys():
            raise PackError(f"tensors must be codes, scales, zeros, bias and spec; got {sorted(tensors)}")
        return cls(spec, **{name: _aligned(t) for name, t in tensors.items()})

    def __repr__(self) -> str:
        return f"PackedWeight({self.spec}; {self.nbytes / 1e6:.1f} MB on {self.device})"


def pack(
    spec: MatmulSpec,
    codes: Tensor | np.ndarray,
    scales: Tensor | np.ndarray,
    zeros: Tensor | np.ndarray | None = None,
    bias: Tensor | np.ndarray | None = None,
) -> PackedWeight:
    """Pack a quantized weight, on the device that its tensors are on.

    codes   integers [n, k]: signed values for i<b> formats, codes 0..2^b-1 for all others
    scales  floats [n, groups], for group_size=None also [n]; rounded to the spec's scale type
    zeros   [n, groups]: for "int" integers in lo..lo+spec.zero_span, lo the format's least value; for "float" floats
    bias    floats [n], rounded to the out type

    Raises PackError for a wrong shape, type or device, a code out of range, a value that is not finite or
    overflows, an e8m0 scale that is no power of two, and zeros or a bias that are missing or not in the spec.
    """
    codes = _tensor("codes", codes, [spec.n, spec.k])
    if codes.is_meta:
        raise PackError("codes are on meta: they have no values to pack; load them first")
    least = _least(spec)
    _check_codes(codes, least, least + spec.dtype.codes - 1)
    tables: dict[str, Tensor] = {}
    for name, given, kind in (
        ("scales", scales, spec.scale),
        ("zeros", zeros, spec.zero_kind),
        ("bias", bias, spec.out_dtype if spec.bias else None),
    ):
        if kind is None:
            if given is not None:
                raise PackError(f"({spec}) has no {name}; drop {name} or set {name}= in the spec")
            continue
        if given is None:
            raise PackError(f"({spec}) needs {name}; pass {name}=")
        table = _tensor(name, given, [spec.n] if name == "bias" else [spec.n, spec.groups])
        if table.device != codes.device:
            raise PackError(f"{name} is on {table.device}, but codes are on {codes.device}; move one of them")
        stored = _integers(table, least, least + spec.zero_span) if kind == "u8" else _floats(name, table, kind)
        # A clone: the packed bias must not be the caller's memory.
        tables[name] = stored.clone() if name == "bias" else pack_groups(spec.packing, stored)
    return PackedWeight(spec, pack_codes(spec.packing, codes, -least), **tables)


def _tensor(name: str, given: object, shape: list[int]) -> Tensor:
    """A tensor or array of that shape; [n] passes for [n, 1]."""
    if isinstance(given, np.ndarray):
        try:
            given = torch.from_numpy(np.require(given, requirements=["C", "W"]))
        except (TypeError, ValueError) as error:  # a type that torch does not have; the other byte order
            raise PackError(f"{name}: {error}") from None
    if not isinstance(given, Tensor):
        raise PackError(f"{name} must be a torch tensor or a NumPy array, not {type(given).__name__}")
    if given.layout is not torch.strided:
        raise PackError(f"{name} is {given.layout}; use .to_dense()")
    if list(given.shape) == shape[:1] and shape[1:] == [1]:
        given = given[:, None]
    if list(given.shape) != shape:
        what = {"codes": "[n, k]", "bias": "[n]"}.get(name, "[n, groups]")
        hint = "; transpose it" if list(given.shape) == shape[::-1] else ""
        raise PackError(f"{name} must be {what} = {shape}, not {list(given.shape)}{hint}")
    return given.detach().resolve_neg()


def _check_codes(codes: Tensor, least: int, most: int) -> None:
    _check_integer("codes", codes, "uint8() or int8()")
    rows = max(1, CHECKED // codes.shape[1])
    for first in range(0, codes.shape[0], rows):
        part = codes[first : first + rows]
        part = part if part.dtype in (torch.uint8, torch.int8) else part.long()
        low, high = map(int, part.aminmax())
        if low < least or high > most:
            wide = part.long()  # a uint8 tensor compares with -8 as if it were 248
            _reject("codes", wide, (wide < least) | (wide > most), f"must be in {least}..{most}", first)


def _integers(zeros: Tensor, least: int, most: int) -> Tensor:
    """Integer zeros as uint8 z - least."""
    _check_integer("zeros", zeros, "int(), or zeros='float' in the spec")
    wide = zeros.long()
    rule = f"must be in {least}..{most}; or use zeros='float'"
    _reject("zeros", wide, (wide < least) | (wide > most), rule)
    return (wide - least).to(torch.uint8)


def _check_integer(name: str, t: Tensor, fix: str) -> None:
    if t.is_floating_point() or t.is_complex() or t.dtype == torch.bool:
        raise PackError(f"{name} must be integers, not {t.dtype}; use .{fix}")


def _floats(name: str, given: Tensor, kind: str) -> Tensor:
    """`given` rounded to a float type; PackError where a value is not finite, overflows, or is no e8m0."""
    if not given.is_floating_point():
        fix = "view the exponent bytes as torch.float8_e8m0fnu" if kind == "e8m0" else "use .float()"
        raise PackError(f"{name} must be floats, not {given.dtype}; {fix}")
    wide = given if given.dtype == torch.float64 else given.float()
    _reject(name, wide, ~wide.isfinite(), "must be finite; clean what the quantizer gave")
    if kind == "e8m0":
        mantissa, exponent = torch.frexp(wide)  # mantissa in [0.5, 1)
        wrong = (mantissa != 0.5) | (exponent < -126) | (exponent > 128)
        rule = "must be a power of two from 2^-127 to 2^127; round it or use another scale= type"
        _reject(name, wide, wrong, rule)
        return (exponent + 126).to(torch.uint8).view(TORCH[kind])
    result = wide.to(TORCH[kind])
    too_large = wide.abs() > E4M3_OVERFLOW if kind == "e4m3" else ~result.isfinite()
    _reject(name, wide, too_large, f"overflows {kind}; use a wider type in the spec")
    return result


def _reject(name: str, values: Tensor, wrong: Tensor, rule: str, first_row: int = 0) -> None:
    """PackError with the first wrong position and its value, where there is one."""
    if not wrong.any():
        return
    at = wrong.nonzero()[0].tolist()
    value = values[tuple(at)].item()
    at[0] += first_row
    raise PackError(f"{name}{at} = {value if isinstance(value, int) else format(value, 'g')} {rule}")


def _least(spec: MatmulSpec) -> int:
    """The least value of an integer format, and the least code as `pack` takes it."""
    return -(spec.dtype.codes // 2) if spec.dtype.kind == "int" else 0


def _expected(spec: MatmulSpec) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and type of every tensor that a packed weight has."""
    packing = spec.packing
    expected: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "codes": (packing.codes_shape, torch.int32),
        "scales": (packing.scales_shape, TORCH[spec.scale]),
    }
    if spec.zero_kind:
        expected["zeros"] = (packing.scales_shape, TORCH[spec.zero_kind])
    if spec.bias:
        expected["bias"] = ((spec.n,), TORCH[spec.out_dtype])
    return expected


def _check_spec(spec: object) -> None:
    if not isinstance(spec, MatmulSpec):
        raise PackError(f"spec={spec!r} must be a MatmulSpec, such as MatmulSpec(n=64, k=256, weight='u4')")


def _identity(spec: MatmulSpec) -> dict[str, object]:
    """What of a spec makes a packed weight what it is; its types are those of the tensors."""
    names = ("n", "k", "weight", "group_size", "zeros", "scale", "bias")
    table = None if spec.table is None else list(spec.table)
    return {"format": FORMAT, **{name: getattr(spec, name) for name in names}, "table": table}


def _read_identity(spec: Tensor) -> dict[str, object]:
    try:
        saved = json.loads(bytes(spec.tolist()))
    except (TypeError, ValueError):  # no bytes, or no JSON
        saved = None
    if not isinstance(saved, dict):
        raise PackError("'spec' is not what state_dict() gave; was it converted to another type, or damaged?")
    return saved


def _aligned(t: Tensor) -> Tensor:
    t = t.contiguous()
    return t.clone() if t.data_ptr() % ALIGNMENT else t
