"""How many registers a thread of a persistent kernel for activations of 8 bits needs, and what it does with those that
are left. No MLIR is needed here."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from lowbit.passes.kernels.persistent.legality import Extra, extra_registers

if TYPE_CHECKING:
    from lowbit.passes.kernels.eight_bit_prefill.plan import BytesPlan
    from lowbit.passes.kernels.eight_bit_prefill.schedule import EightBitPrefillSchedule

    _Plan = BytesPlan[EightBitPrefillSchedule]

MOST_REGISTERS = 242  # of a thread, for all that `registers` adds up
_AHEAD, _MOST_AHEAD = (8, 4, 2), 232
"""Numbers that are loaded ahead, and the registers that a thread may need with them."""

_OF_K: tuple[Extra[_Plan], ...] = (
    (7, "a block's part of the k of a tile", lambda p: p.schedule.split_k > 1),
    (16, "the same of a slice", lambda p: p.schedule.last_split_k > 1 and not _has_short_groups(p)),
    (3, "the same, with groups in panels", lambda p: p.schedule.last_split_k > 1 and _has_short_groups(p)),
)
_OF_PARTS: tuple[Extra[_Plan], ...] = (
    (26, "parts of tiles, in integers that become f32", lambda p: p.schedule.streams and _becomes_f32(p)),
    (36, "the same, of all tokens at once", lambda p: p.schedule.streams and _becomes_f32(p) and p.schedule.parts == 1),
)
_OF_CODES: tuple[Extra[_Plan], ...] = (
    *_OF_K,
    *_OF_PARTS,
    (12, "which tiles of slots are whose", lambda p: p.spec.experts > 1),
    (32, "scales and addresses that are needed later", lambda p: p.schedule.banks > 1),
    (1, "a block by itself", lambda p: p.schedule.cluster == 1),
    (6, "tiles that are cut, of such a block", lambda p: p.schedule.cluster == 1 and p.schedule.last_tokens > 0),
    (8, "zeros, of such a block", lambda p: p.schedule.cluster == 1 and p.spec.zeros == "int"),
    (8, "integers that become f32, where blocks share x", lambda p: p.schedule.cluster > 1 and _becomes_f32(p)),
    (3, "the other block, where they share x", lambda p: p.schedule.cluster > 1 and not _becomes_f32(p)),
    (11, "zeros ahead, with integers that become f32", lambda p: p.ahead > 1 and _becomes_f32(p)),
    (25, "codes of 8 bits in integers that become f32", lambda p: _becomes_f32(p) and p.spec.dtype.bits == 8),
    (2, "long floats in groups", lambda p: p.base.scaling.groups > 0 and _has_long_floats(p)),
    (9, "scales of e4m3, many at a time", lambda p: p.spec.scale == "e4m3" and _held_scales(p) >= 16),
)
_OF_FOLDED: tuple[Extra[_Plan], ...] = (
    *_OF_K,
    (24, "weights in f16 that become bytes", lambda p: True),
    (3, "the other block, where they share x", lambda p: p.schedule.cluster > 1),
    (12, "long floats in groups of 16", lambda p: p.spec.packing.padded_group == 16 and _has_long_floats(p)),
    (16, "float zeros and offsets", lambda p: p.spec.zeros in ("float", "offset")),
    (24, "scales that are codes", lambda p: p.spec.bilevel is not None),
)


def registers(plan: _Plan) -> int:
    """Returns the registers that a thread needs by estimate: for sums and for products, for two panels' fragments, for
    what is loaded, and for what kernels were seen to need besides."""
    needed = _folded_registers(plan) if plan.spec.folds else _code_registers(plan)
    return plan.schedule.tokens // 2 + plan.schedule.panel_k // 4 + needed


def with_numbers_ahead(plan: _Plan) -> _Plan:
    """Returns the plan of a kernel, in which the numbers that bytes are made with come as far ahead as a thread has
    registers for. With an order of sums, chains take these registers."""
    plans = (replace(plan, ahead=ahead) for ahead in _AHEAD if not plan.schedule.order)
    return next((some for some in plans if registers(some) <= _MOST_AHEAD), plan)


def _code_registers(plan: _Plan) -> int:
    """Registers for products, and for codes, scales and zeros, which are loaded."""
    products = 0 if plan.products.keeps_sums else plan.schedule.banks * plan.schedule.part_tokens // 2
    converted = products // 16 if _becomes_f32(plan) else 0
    loaded = _held_codes(plan) + 2 * (_held_scales(plan) + _held_zeros(plan))
    return products + products // 32 + converted + loaded + extra_registers(_OF_CODES, plan)


def _held_scales(plan: _Plan) -> int:
    groups = plan.base.scaling.groups
    return plan.held.least(groups) if groups else 0


def _held_zeros(plan: _Plan) -> int:
    zeros = plan.base.tensors.every.get("zeros")
    return plan.held.of(zeros) if zeros else int(plan.spec.zeros == "int")


def _held_codes(plan: _Plan) -> int:
    """Registers for codes while products are under way: none for those that wait in shared memory, if decoding takes no
    others instead, as that of integers and short floats does, and blocks that split k do."""
    leaves = plan.held.code_stages > 0 and _has_long_floats(plan) and plan.schedule.split_k == 1
    return 0 if leaves else plan.held.code_registers


def _folded_registers(plan: _Plan) -> int:
    """Registers for codes and for scales, zeros and offsets of weights that are scaled, which are loaded."""
    tensors = plan.base.tensors.every.values()
    numbers = sum(plan.held.of(some) * (2 if some.lanes > 1 else 1) for some in tensors)  # of two rows, or all
    return plan.held.code_registers + numbers + extra_registers(_OF_FOLDED, plan)


def _becomes_f32(plan: _Plan) -> bool:
    """Whether products are integers that are converted, since groups have scales."""
    return plan.spec.compute == "i8" and plan.base.scaling.groups > 0


def _has_short_groups(plan: _Plan) -> bool:
    """Whether no group is longer than a panel, and products are scaled by groups."""
    group = plan.spec.packing.padded_group
    return group is not None and group <= plan.schedule.panel_k and not plan.spec.folds


def _has_long_floats(plan: _Plan) -> bool:
    return plan.spec.dtype.kind == "float" and plan.spec.dtype.bits >= 6
