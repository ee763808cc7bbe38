"""A weight as the kernels read it: `pack` makes a `PackedWeight`, which unpacks to exactly what went in.

Codes are integers [n, k]: for i<b> formats the signed values -2^(b-1) .. 2^(b-1)-1 (unpacked as int8), for
all others the codes 0 .. 2^b-1 (unpacked as uint8). In memory signed codes are in offset binary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.compiler import is_compiling

from lowbit.dialect.errors import PackError
from lowbit.dialect.formats.byte_codes import Compute
from lowbit.dialect.spec import MatmulSpec, interned
from lowbit.pylib.operator.tracing import sizes_as_numbers
from lowbit.pylib.torch_types import TORCH
from lowbit.pylib.weights import dequantized, folding, gated_rows, shared_bytes, written
from lowbit.pylib.weights import outliers as sparse
from lowbit.pylib.weights import saved as saved_weight
from lowbit.pylib.weights.memory_order import unpack_codes
from lowbit.pylib.weights.sharding import Part, cut, part_of
from lowbit.pylib.weights.tensor_checks import check_memory, check_slot, check_storage, is_plain
from lowbit.pylib.weights.value_range import has_wide_range
from lowbit.pylib.weights.values import as_tensor, least, to_memory


class PackedWeight(Mapping[str, Tensor]):
    """A packed weight: the tensors of `spec.tensors` by name. Good for every number of tokens.

    Made by `pack` or `PackedWeight.from_state_dict`; or from a module's buffers, also while torch traces the module:

        PackedWeight(spec, {"codes": self.codes, "scales": self.scales})

    tensors         the tensors in the order of `spec.tensors`
    readable_spec   the spec if kernels can read the tensors; None if torch traces with them, or they are on meta
    ordinary_spec   readable_spec if the values are known to fit the act type, so that any kernel may round them to it
    """

    spec: MatmulSpec
    tensors: tuple[Tensor, ...]
    readable_spec: MatmulSpec | None
    ordinary_spec: MatmulSpec | None

    def __init__(self, spec: MatmulSpec, tensors: Mapping[str, Tensor]) -> None:
        _check_spec(spec)
        names = [slot.name for slot in spec.tensors]
        if not isinstance(cast(object, tensors), Mapping) or set(names) != set(tensors):
            given = ", ".join(map(str, tensors)) if isinstance(tensors, Mapping) else type(tensors).__name__
            raise PackError(f"a weight of ({spec}) is made of the tensors {', '.join(names)}, not of {given}")
        self.spec = spec
        self.tensors = tuple([tensors[name] for name in names])
        with sizes_as_numbers():
            readable = self._check_tensors()
        self.readable_spec = spec if readable else None
        self.ordinary_spec = None
        if readable:
            self._look_at_values()

    def _look_at_values(self) -> None:
        if has_wide_range(self.spec, self) is False:
            self.ordinary_spec = self.spec

    @property
    def wide_range(self) -> bool:
        """Tells whether values are beyond what the act type holds, so that no kernel may round them to it. True as well
        where nothing can be looked at, while torch traces or a CUDA graph is recorded."""
        if self.ordinary_spec is None and self.readable_spec is not None:
            self._look_at_values()
        return self.ordinary_spec is None

    def _check_tensors(self) -> bool:
        """Raise PackError for tensors that are not those of the spec; returns whether kernels can read them."""
        for slot, t in zip(self.spec.tensors, self.tensors):
            check_slot(slot, t)
            if t.device != self.device:
                raise PackError(f"packed {slot.name} is on {t.device}, codes on {self.device}; move one of them")
        if is_compiling() or not all(is_plain(t) and not t.is_meta for t in self.tensors):
            return False
        for slot, t in zip(self.spec.tensors, self.tensors):
            check_memory(slot, t)
        return True

    def __getitem__(self, name: str) -> Tensor:
        """Returns a tensor. Raises KeyError for one that the weight has not, PackError where its storage was shrunk."""
        for slot, t in zip(self.spec.tensors, self.tensors):
            if slot.name == name:
                check_storage(f"packed {name}", t, PackError)
                return t
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter([slot.name for slot in self.spec.tensors])

    def __len__(self) -> int:
        return len(self.tensors)

    def __eq__(self, other: object) -> bool:
        """A weight equals itself alone: unlike other mappings it is not compared by value."""
        return self is other

    def __hash__(self) -> int:
        return id(self)

    @property
    def codes(self) -> Tensor:
        """int32 [packing.codes_shape]."""
        return self["codes"]

    @property
    def scales(self) -> Tensor | None:
        """[packing.scales_shape] in the spec's scale type, as bytes for e8m0 and e4m3; zero bits for padding. None for
        codes in `group_codes`."""
        return self.get("scales")

    @property
    def zeros(self) -> Tensor | None:
        """[packing.scales_shape] as uint8 z - lo, or as floats of type spec.zero_kind; None without, or in
        `group_codes`."""
        return self.get("zeros")

    @property
    def offsets(self) -> Tensor | None:
        """[packing.scales_shape] as floats of type spec.offset_kind; None without, or in `group_codes`."""
        return self.get("offsets")

    @property
    def group_codes(self) -> Tensor | None:
        """uint8 [packing.scales_shape]: in the low bits the code of a scale, above it that of the group's zero or
        offset. None where they have tensors of their own."""
        return self.get("group_codes")

    @property
    def row_scales(self) -> Tensor | None:
        """f32 [n], padded to whole blocks of 16 rows; None without row scales."""
        return self.get("row_scales")

    @property
    def permutation(self) -> Tensor | None:
        """int32 [k]: the column of x that meets each column of codes, of several experts [experts k], one after the
        other; None where they are in order."""
        return self.get("permutation")

    @property
    def bias(self) -> Tensor | None:
        """[n] in the out type; None without bias."""
        return self.get("bias")

    @property
    def outliers(self) -> Tensor | None:
        """int32 [lines, 32] (`dialect.formats.outliers`); None without outliers."""
        return self.get("outliers")

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.tensors[0].device

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors: spec.bytes, and what the outliers take."""
        return sum(t.nbytes for t in self.tensors)

    def to(self, device: torch.device | str) -> PackedWeight:
        """Returns this weight on another device; self if it is there already."""
        moved = {name: t.to(device) for name, t in self.items()}
        return self if all(moved[name] is t for name, t in self.items()) else PackedWeight(self.spec, moved)

    def update_(self, other: PackedWeight) -> PackedWeight:
        """Takes the values of another weight of the same spec, in the memory of this one; returns this one.

        Whatever holds the tensors multiplies by the new values at once: layers, CUDA graphs, compiled functions. The
        copies are made on the current stream; nothing else may multiply by the weight meanwhile.

        Raises PackError for another spec, for tensors of other sizes (outliers), and for values beyond the act type
        where this weight has none: calls that are recorded may round to it.
        """
        self.check_update(other)
        with torch.no_grad():
            for mine, given in zip(self.tensors, other.tensors):
                mine.copy_(given)
        written.note_again(self.codes)
        self.ordinary_spec = None
        self._look_at_values()
        return self

    def check_update(self, other: PackedWeight) -> None:
        """Raise PackError for a weight that `update_` would not take."""
        if not isinstance(cast(object, other), PackedWeight):
            raise PackError(f"the other weight must be a PackedWeight, not {type(other).__name__}; use pack()")
        if other.spec != self.spec:
            raise PackError(f"the other weight is ({other.spec}), and this one ({self.spec}); pack it with this spec")
        if self.readable_spec is None or other.readable_spec is None:
            raise PackError("a weight without values, on meta or traced by torch, can't be updated; load it first")
        for slot, mine, given in zip(self.spec.tensors, self.tensors, other.tensors):
            if mine.shape != given.shape:
                sizes = f"{list(given.shape)} in the other weight, and {list(mine.shape)} in this one"
                raise PackError(f"{slot.name} are {sizes}; make a new layer of the other weight")
        if other.wide_range and not self.wide_range:
            raise PackError(
                f"values of the other weight are beyond {self.spec.act}, to which kernels round this one; make a new "
                "layer of it, or use act='bf16'"
            )

    def shard(self, dim: int, index: int, count: int) -> PackedWeight:
        """Part `index` of `count` along dim 0, with rows of y, or dim 1, whose results are added up over all parts.

        Raises PackError unless parts are whole blocks of 16 rows, or of columns whole groups and chunks.
        """
        part = part_of(self.spec, dim, index, count)
        slots = {slot.name: slot for slot in self.spec.tensors}
        return PackedWeight(
            interned(part), {s.name: cut(slots[s.name], self[s.name], dim, index, count) for s in part.tensors}
        )

    def part(self, part: Part) -> PackedWeight:
        """Returns some rows and columns: slices of the tensors in memory, or where a part has none, packed anew.

        Raises PackError where no weight has these columns.
        """
        spec = interned(part.spec(self.spec))
        if part.is_cut_in_memory(self.spec):
            slots = {slot.name: slot for slot in self.spec.tensors}
            tensors = {s.name: part.copy_of(slots[s.name], self[s.name], self.spec) for s in spec.tensors}
            return PackedWeight(spec, tensors)
        wanted = {slot.name for slot in spec.given_tensors}
        slots = [slot for slot in self.spec.given_tensors if slot.name in wanted]
        return pack(spec, **{s.name: part.of_given(s, self.unpack_tensor(s.name), self.spec) for s in slots})

    def unpack(self) -> Tensor:
        """The codes as they were given to `pack`: [n, k], int8 for i<b> formats, else uint8."""
        codes = gated_rows.given(self.spec, unpack_codes(self.spec.packing, self.codes, -least(self.spec)))
        return codes.view(torch.int8) if self.spec.dtype.kind == "int" else codes

    def unpack_scales(self) -> Tensor:
        """The scales [n, groups] in the spec's scale type; int32 where they are codes."""
        return self.unpack_tensor("scales")

    def unpack_zeros(self) -> Tensor | None:
        """The zeros [n, groups]: int32, or floats of type spec.zero_kind. None without zeros."""
        return self._unpacked("zeros")

    def unpack_outliers(self) -> Tensor | None:
        """The outliers as a `torch.sparse_csr` tensor [n, k] in f16, without zeros; None without outliers."""
        if self.outliers is None:
            return None
        found = sparse.unpack_lines(self.outliers, self.spec.n)
        rows = gated_rows.number_given(self.spec, found.rows)
        return sparse.sorted_csr(found._replace(rows=rows), self.spec.n, self.spec.k)

    def unpack_offsets(self) -> Tensor | None:
        """The offsets [n, groups] in type spec.offset_kind; int32 where they are codes. None without offsets."""
        return self._unpacked("offsets")

    def unpack_row_scales(self) -> Tensor | None:
        """The scales of the rows, f32 [n]. None without row scales."""
        return self._unpacked("row_scales")

    def _unpacked(self, name: str) -> Tensor | None:
        return self.unpack_tensor(name) if any(s.name == name for s in self.spec.given_tensors) else None

    def unpack_tensor(self, name: str) -> Tensor:
        """A tensor as it was given to `pack`, rounded to its type. Raises KeyError for one that the weight has not."""
        slot = self.spec.slot(name)
        if slot.role == "codes":
            return self.unpack()
        if slot.role == "outliers":
            return cast(Tensor, self.unpack_outliers())
        if slot.index == "column":
            return self[name].clone()
        if slot.index == "row":
            return gated_rows.given(self.spec, self[name]).clone()
        values = gated_rows.given(self.spec, dequantized.stored_numbers(self.spec, slot, self[slot.tensor]))
        values = values[:, 0].clone() if slot.index == "padded_row" else values
        return values.to(torch.int32 if slot.storage == "u8" else TORCH[slot.storage])

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns the weight [n, k], columns in the order of x, computed in f32 and rounded to `dtype` at the end.

        This is the definition of the values, operation by operation: s (q - z) is a difference and then a product,
        s q + o a product and then a sum, each rounded to f32; a scale per row is multiplied to s and to o before that,
        and outliers are added at the end.
        """
        return gated_rows.given(self.spec, dequantized.dequantize(self.spec, self, dtype))

    def folded(self) -> Tensor:
        """Returns the weight [n, k] in f32 with the numbers that a spec with `fold_scales` allows kernels to multiply:
        those of groups are rounded (`folding.rounded`), before the scales of rows multiply them."""
        if not self.spec.folds:
            return self.dequantize()
        return gated_rows.given(self.spec, folding.folded(self.spec, self))

    def with_compute(
        self, compute: Compute | None, *, compute_from: int = 1, fold_scales: bool = False
    ) -> PackedWeight:
        """Returns the same weight for matmuls of a spec with these fields, which `MatmulSpec` explains. It shares its
        tensors with this one, but for scales and offsets from which `fold_scales` takes a power of two.

        Raises SpecError where the weight can't be multiplied so, and PackError if it has no values to look at.
        """
        spec = replace(self.spec, compute=compute, compute_from=compute_from, fold_scales=fold_scales)
        if not spec.folds or (self.spec.folds and self.spec.compute == compute):
            return PackedWeight(interned(spec), self)
        if self.readable_spec is None:
            raise PackError("the weight has no values, from which fold_scales takes a power of two; load them first")
        kept = ("codes", "bias")
        given = {slot.name: self.unpack_tensor(slot.name) for slot in self.spec.given_tensors if slot.role != "bias"}
        values = folding.with_row_scales(spec, given)
        separate = {
            slot.name: self[slot.name] if slot.role in kept else to_memory(spec, slot, values[slot.name])
            for slot in spec.given_tensors
        }
        return PackedWeight(interned(spec), shared_bytes.join(spec, separate))

    def state_dict(self) -> dict[str, Tensor]:
        """Plain tensors for torch.save or safetensors: those of `spec.tensors`, and "spec", JSON as uint8, from which
        `from_state_dict` knows what they are."""
        return {**self, saved_weight.SPEC: saved_weight.write_spec(self.spec)}

    @classmethod
    def from_state_dict(cls, tensors: Mapping[str, Tensor], spec: MatmulSpec | None = None) -> PackedWeight:
        """Returns the weight that `state_dict` wrote.

        spec: the spec to load it for, which may differ in act and out where the tensors fit; None: the one it has

        Raises PackError for a weight packed for another spec, and for a dictionary that is damaged.
        """
        if isinstance(cast(object, tensors), MatmulSpec):  # the order of arguments of earlier versions
            tensors, spec = cast(tuple[Mapping[str, Tensor], MatmulSpec], (spec, tensors))
        if spec is not None:
            _check_spec(spec)
        found, checked = saved_weight.read(tensors, spec)
        return cls(interned(found), checked)

    def __reduce__(self) -> tuple[object, ...]:
        """Copies and pickles with the one spec that equals its own, so that calls compare by identity."""
        return _restored, (self.spec, dict(self))

    def __repr__(self) -> str:
        return f"PackedWeight({self.spec}; {self.nbytes / 1e6:.1f} MB on {self.device})"


def pack(
    spec: MatmulSpec,
    codes: Tensor | np.ndarray,
    scales: Tensor | np.ndarray,
    zeros: Tensor | np.ndarray | None = None,
    bias: Tensor | np.ndarray | None = None,
    outliers: Tensor | Sequence[Tensor | np.ndarray] | None = None,
    **others: Tensor | np.ndarray | None,
) -> PackedWeight:
    """Packs a quantized weight for a spec. Arguments and errors are those of `lowbit.Matmul.pack`."""
    _check_spec(spec)
    given = {"codes": codes, "scales": scales, "zeros": zeros, "bias": bias, "outliers": outliers, **others}
    slots = {slot.name: slot for slot in spec.given_tensors}
    for name, tensor in given.items():
        if tensor is not None and name not in slots:
            setting = {"offsets": "zeros='offset'", "permutation": "permuted="}.get(name, f"{name}=")
            raise PackError(f"({spec}) has no {name}; drop {name} or set {setting} in the spec")
    values: dict[str, Tensor] = {}
    for name, slot in slots.items():
        if given.get(name) is not None:
            values[name] = as_tensor(slot, given[name])
        elif not (spec.folds and slot.index == "padded_row"):
            raise PackError(f"({spec}) needs {name}; pass {name}=")
    _check_devices(values)
    packed = {"codes": to_memory(spec, slots["codes"], values["codes"])}  # which checks them
    if spec.folds:
        values = folding.with_row_scales(spec, values)
    packed |= {name: to_memory(spec, slots[name], tensor) for name, tensor in values.items() if name != "codes"}
    return PackedWeight(interned(spec), shared_bytes.join(spec, packed))


def _restored(spec: MatmulSpec, tensors: dict[str, Tensor]) -> PackedWeight:
    return PackedWeight(interned(spec), tensors)


def _check_devices(values: Mapping[str, Tensor]) -> None:
    """Raises PackError unless all tensors are on the device of the codes and have values."""
    device = values["codes"].device
    if device.type == "meta":
        raise PackError("codes are on meta: they have no values to pack; load them first")
    for name, tensor in values.items():
        if tensor.device != device:
            raise PackError(f"{name} is on {tensor.device}, but codes are on {device}; move one of them")


def _check_spec(spec: object) -> None:
    if not isinstance(spec, MatmulSpec):
        raise PackError(f"spec={spec!r} must be a MatmulSpec, such as MatmulSpec(n=64, k=256, weight='u4')")
