"""A packed weight in a file: its tensors by name and, under "spec", what they are, as JSON in a tensor of bytes.

A file may come from anywhere. So sizes are looked at before values, values before kernels meet them, and whatever is
wrong is a PackError. Reading takes no more memory than a copy of the tensors in the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import fields, replace
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor

from lowbit.dialect.call import Call
from lowbit.dialect.errors import PackError, SpecError
from lowbit.dialect.shape import Shape
from lowbit.dialect.spec import MatmulSpec
from lowbit.dialect.weight import TensorSlot
from lowbit.dialect.weight_format import WeightFormat
from lowbit.pylib.torch_types import TORCH, stored_type
from lowbit.pylib.weights import shared_bytes
from lowbit.pylib.weights.tensor_checks import ALIGNMENT, check_slot, has_memory
from lowbit.pylib.weights.values import check_stored

FORMAT = 4  # goes up when the memory order or the meaning of "spec" changes
SEPARATE_CODES = 3  # the format that has a tensor for each of `MatmulSpec.given_tensors`: codes did not share bytes
WITHOUT_TYPES = 2  # the one before, whose "spec" does not say act and out
SPEC = "spec"
LONGEST_SPEC = 1 << 16  # bytes; a table of 256 numbers takes 6 KiB
_OF_PRODUCTS = (*(f.name for f in fields(Call) if f.name not in ("act", "out")), "row_scales")
WEIGHT_FIELDS = (*(f.name for part in (Shape, WeightFormat) for f in fields(part)), "fold_scales")
"""The fields of a spec that a weight was packed with. It can be loaded for other types of x, y and products if its
tensors fit."""


def weight_fields(spec: MatmulSpec) -> tuple[str, ...]:
    """Returns the fields in which the specs that a weight can be loaded for agree: where scales are folded, the type of
    products, too, in whose range they were put."""
    return (*WEIGHT_FIELDS, "compute") if spec.folds else WEIGHT_FIELDS


def write_spec(spec: MatmulSpec) -> Tensor:
    """Returns what stands under "spec" in a file."""
    return torch.frombuffer(bytearray(text_of(spec).encode()), dtype=torch.uint8)


@lru_cache(maxsize=256)
def text_of(spec: MatmulSpec) -> str:
    """Returns the text that stands under "spec" in a file, in ASCII."""
    return json.dumps({"format": FORMAT, "spec": spec.to_dict()})


def read(tensors: Mapping[str, Tensor], wanted: MatmulSpec | None) -> tuple[MatmulSpec, dict[str, Tensor]]:
    """Returns the spec of a saved weight and its tensors, checked and ready for kernels. Raises PackError.

    wanted: the spec to load the weight for; None takes the one it was saved with
    """
    if not (isinstance(cast(object, tensors), Mapping) and all(isinstance(t, Tensor) for t in tensors.values())):
        raise PackError("tensors must be what state_dict() gave: a dictionary of tensors")
    if SPEC not in tensors:
        raise PackError(f"tensors must be what state_dict() gave, with 'spec'; got {_names(tensors)}")
    spec, joined = _for(wanted, _text_of(tensors[SPEC]))
    slots = {slot.name: slot for slot in (spec.tensors if joined else spec.given_tensors)}
    if tensors.keys() != {SPEC, *slots}:
        raise PackError(f"tensors must be {', '.join(slots)} and {SPEC}; got {_names(tensors)}")
    found = checked(spec, slots.values(), tensors)
    return spec, found if joined else shared_bytes.join(spec, found)


def checked(spec: MatmulSpec, slots: Iterable[TensorSlot], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors of slots of a weight, checked and ready for kernels. Raises PackError."""
    return {slot.name: _read_tensor(spec, slot, tensors[slot.name]) for slot in slots}


def _names(tensors: Mapping[str, Tensor]) -> str:
    return ", ".join(sorted(map(str, tensors))) or "nothing"


def _text_of(saved: Tensor) -> bytes:
    """Returns the text that a tensor holds; nothing of one that holds none."""
    is_text = has_memory(saved) and saved.dtype == torch.uint8 and saved.ndim == 1 and len(saved) <= LONGEST_SPEC
    return bytes(saved.tolist()) if is_text else b""


def _parsed(text: bytes) -> dict[str, Any]:
    about: Any = None
    with suppress(ValueError, RecursionError):  # no JSON, or too deep
        about = json.loads(text)
    if not isinstance(about, dict):
        raise PackError("'spec' is not what state_dict() gave; was it converted to another type, or damaged?")
    return cast(dict[str, Any], about)


@lru_cache(maxsize=256)
def _for(wanted: MatmulSpec | None, text: bytes) -> tuple[MatmulSpec, bool]:
    """Returns the spec to load a weight for that says this of itself, and whether its codes share bytes as today's do.
    Files of experts say a few texts thousands of times."""
    about = _parsed(text)
    try:
        saved = _saved_spec(about, wanted)
    except SpecError as error:
        raise PackError(f"the weight was saved with a spec that is none: {error}") from None
    if wanted is not None:
        check_same(saved, wanted)
    return wanted or saved, about["format"] == FORMAT


def read_spec(saved: Tensor) -> MatmulSpec:
    """Returns what a weight was packed for, of what `write_spec` wrote. Raises PackError."""
    return _for(None, _text_of(saved))[0]


def check_spec(saved: Tensor, wanted: MatmulSpec) -> None:
    """Raise PackError unless what `write_spec` wrote is of a weight that can be loaded for a spec."""
    _for(wanted, _text_of(saved))


def with_products_of(saved: MatmulSpec, wanted: MatmulSpec) -> MatmulSpec:
    """Returns a spec with what a saved one says of products (`lowbit.set_compute_`), where that fits it."""
    with suppress(SpecError):
        return replace(wanted, **{name: getattr(saved, name) for name in _OF_PRODUCTS})
    return wanted


def check_same(saved: MatmulSpec, wanted: MatmulSpec) -> None:
    """Raise PackError unless a weight with one spec can be loaded for another."""
    wrong = [name for name in weight_fields(wanted) if getattr(saved, name) != getattr(wanted, name)]
    if saved.is_gated != wanted.is_gated:
        wrong.append("epilogue")
    if wrong:
        packed = ", ".join(f"{name}={getattr(saved, name)!r} (not {getattr(wanted, name)!r})" for name in wrong)
        raise PackError(f"the weight was packed with {packed}; load it with that spec, or pack again")


def _saved_spec(about: dict[str, Any], wanted: MatmulSpec | None) -> MatmulSpec:
    """Returns the spec of a saved weight, of which older formats leave act and out to `wanted`."""
    given = about.get("format")
    if given in (FORMAT, SEPARATE_CODES):
        return MatmulSpec.from_dict(about.get("spec") or {})
    if given != WITHOUT_TYPES:
        raise PackError(f"the weight was saved in format {given!r}, this is {FORMAT}; pack it again with this version")
    if wanted is None:
        raise PackError(
            "the weight was saved by an earlier version, which did not note act and out; "
            "load it with from_state_dict(tensors, spec=...), and save it again"
        )
    values = {name: about[name] for name in WEIGHT_FIELDS if about.get(name) is not None}
    if not {"n", "k", "weight"} <= values.keys():
        raise PackError("'spec' is not what state_dict() gave; was it damaged?")
    return MatmulSpec(**values, act=wanted.act, out=wanted.out)


def _read_tensor(spec: MatmulSpec, slot: TensorSlot, t: Tensor) -> Tensor:
    """Returns a tensor of a file as kernels read it: dense, aligned, and with values that they can multiply."""
    if not has_memory(t):
        raise PackError(f"saved {slot.name} have no memory of their own; load or clone the tensors first")
    if t.dtype == TORCH[slot.storage]:
        t = t.view(stored_type(slot.storage))  # older files have types of 8 bits here
    check_slot(slot, t)
    t = t.detach().resolve_neg().contiguous()
    t = t.clone() if t.data_ptr() % ALIGNMENT else t
    check_stored(spec, slot, t)
    return t
