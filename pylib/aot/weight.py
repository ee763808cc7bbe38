"""What a manifest says of a weight: its tensors in memory, and how these are made of those that `pack` takes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowbit.dialect.bilevel import integers_of, least_code
from lowbit.dialect.formats.byte_codes import LARGEST
from lowbit.dialect.spec import MatmulSpec
from lowbit.dialect.weight import TensorSlot
from lowbit.pylib.weights import saved
from lowbit.pylib.weights.value_range import finite_values
from lowbit.pylib.weights.values import least


def weight_to_dict(spec: MatmulSpec) -> dict[str, Any]:
    """Returns the description of a weight in terms of JSON; docs/manifest.md explains it."""
    return {
        "packing": _packing(spec),
        "tensors": [_tensor(slot) for slot in spec.tensors],
        "range": _range_of_values(spec),
        "given": [_given(spec, slot) for slot in spec.given_tensors],
        "folds": spec.folds,
        "folds_to": int(LARGEST[spec.byte_type]) if spec.folds else 0,
        "folds_by_codes": spec.folds and spec.dtype.max > LARGEST[spec.byte_type],
        "saved": saved.text_of(spec),
        "same": [*saved.weight_fields(spec)],
    }


def _packing(spec: MatmulSpec) -> dict[str, Any]:
    """How codes and groups lie in memory (`dialect.formats.packing`)."""
    p, bilevel = spec.packing, spec.bilevel
    return {
        "bits": p.bits,
        "chunk": p.chunk,
        "units": p.units,
        "row_blocks": p.row_blocks,
        "chunks": p.chunks,
        "group": p.group or p.k,
        "padded_group": p.padded_group or p.padded_k,
        "padded_k": p.padded_k,
        "groups": p.groups,
        "block_rows": bilevel.rows if bilevel else 1,
        "gated": spec.is_gated,
        "experts": spec.experts,
    }


def _range_of_values(spec: MatmulSpec) -> dict[str, Any]:
    """What tells the values of a weight, by which they are compared with the act type (`pylib.weights.value_range`).

    They are the bits of f32: those of codes in the order in which these are stored, and of places in a table of scales.
    Without `values` a code is its number, counted from `low`.
    """
    bilevel, blocks = spec.bilevel, [slot for slot in spec.given_tensors if slot.index == "block"]
    integer = spec.dtype.kind in ("uint", "int")
    return {
        "values": [] if integer else _bits(np.roll(finite_values(spec), -least(spec))),
        "low": least(spec),
        "float_zeros": spec.zeros == "float",
        "table": _bits(np.array(bilevel.table)) if bilevel and bilevel.table else [],
        "block_groups": bilevel.groups if bilevel else 1,
        "blocks": blocks[0].shape[1] if blocks else 1,
        "lanes": blocks[0].shape[2] if blocks else 1,
    }


def _bits(values: NDArray[Any]) -> list[int]:
    return values.astype(np.float32).view(np.uint32).tolist()


def _tensor(slot: TensorSlot) -> dict[str, Any]:
    """A tensor in memory. Without outliers it has `bytes`; they add whole lines."""
    return {
        "name": slot.name,
        "role": slot.role,
        "index": slot.index,
        "type": slot.storage,
        "shape": list(slot.shape),
        "bytes": slot.nbytes,
    }


def _given(spec: MatmulSpec, slot: TensorSlot) -> dict[str, Any]:
    """A tensor that `pack` takes. Integers from `low` to `high` are stored less `low`, from bit `bit` on."""
    low, high = _range(spec, slot)
    return {
        "name": slot.name,
        "index": slot.index,
        "type": slot.storage,
        "shape": list(slot.given),
        "stored": list(slot.shape),
        "tensor": slot.tensor,
        "bit": slot.bit,
        "integer": high > low,
        "low": low,
        "high": high,
    }


def _range(spec: MatmulSpec, slot: TensorSlot) -> tuple[int, int]:
    """Returns the least and the largest integer of a slot; (0, 0) for floats."""
    if slot.role == "codes":
        return least(spec), least(spec) + spec.dtype.codes - 1
    if slot.role == "permutation":
        return 0, spec.k - 1
    if slot.storage != "u8":
        return 0, 0
    if slot.code:
        return least_code(slot.code), least_code(slot.code) + integers_of(slot.code).codes - 1
    return least(spec), least(spec) + spec.zero_span
