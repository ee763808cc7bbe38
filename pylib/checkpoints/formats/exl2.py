"""EXL2, as ExLlamaV2 writes it (conversion/adaptivegptq.py, exllamav2_ext/cuda/q_matrix.cu): mixed widths.

    q_invperm      int32 [k]: the row of the files that each column of the weight has become
    q_groups       int16 [2 * groups]: of each group of rows its bits (2 to 6, or 8), and its first row of q_weight
    q_weight       int32 [words, n]: of each group, columns of n as streams of codes along its rows
    q_scale        int32 [groups, n / 8]: eight numbers q of 4 bits in a word, the lowest bits first
    q_scale_max    f16 [groups]

w = (code - 2^(bits - 1)) * scale with scale = (q + 1)^2 * q_scale_max / 256 in f16. Here all codes have as many bits as
those of the widest group, and groups are as long as the shortest, whose scales longer ones repeat. n is a multiple of
32 in the files; columns beyond those of the model are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lowbit.dialect.errors import CheckpointError
from lowbit.dialect.shape import MIN_K
from lowbit.pylib.checkpoints.config_entries import named
from lowbit.pylib.checkpoints.formats.format import Format
from lowbit.pylib.checkpoints.imported import Imported, signed
from lowbit.pylib.checkpoints.module_tensors import ModuleTensors, check_shape
from lowbit.pylib.checkpoints.unpack import from_columns, from_stream

WIDTHS = (2, 3, 4, 5, 6, 8)
WORD, PADDED = 32, 32  # bits of a word, and what the columns of n are padded to a multiple of


@dataclass(frozen=True)
class _Group:
    """Rows of one width: their bits, their first word, and how many rows and words they are."""

    bits: int
    first: int
    rows: int
    words: int


def read(module: ModuleTensors) -> Imported:
    order, words = _order(module), module.take("q_weight", torch.int32, 2)
    groups = list(_groups(module, len(order), len(words)))
    bits = max(group.bits for group in groups)
    codes = torch.cat([_codes(words, group) for group in groups])
    size = _size(groups)
    repeats = torch.tensor([group.rows // size for group in groups], device=words.device)
    scales = _scales(module, len(groups), words.shape[1]).repeat_interleave(repeats, 0)
    n = _columns(module, words.shape[1])
    weight = Imported(codes[:, :n].t(), scales[:, :n].t(), weight=f"i{bits}", bias=module.bias())
    in_order = torch.equal(order, torch.arange(len(order), device=order.device))
    return weight if in_order else replace(weight, permutation=order)


def _codes(words: Tensor, group: _Group) -> Tensor:
    """Returns the codes [rows, columns] of a group, int8, with 0 for the middle one."""
    return signed(from_columns(words[group.first : group.first + group.words], group.bits, group.rows), group.bits)


def _order(module: ModuleTensors) -> Tensor:
    """Returns the column of the weight that each row of the files is."""
    inverse = module.take("q_invperm", (torch.int16, torch.int32), 1).long()
    order = inverse.argsort()
    if not torch.equal(inverse[order], torch.arange(len(inverse), device=inverse.device)):
        raise CheckpointError(f"q_invperm must be a permutation of {len(inverse)} columns")
    return order


def _groups(module: ModuleTensors, k: int, words: int) -> Iterator[_Group]:
    """Yields the groups from the top down. Raises CheckpointError unless they are all rows and words."""
    given = module.take("q_groups", torch.int16, 1)
    if len(given) % 2:
        raise CheckpointError(f"q_groups has {len(given)} numbers; it must have two for each group")
    pairs, left = given.view(-1, 2).tolist(), k
    for (bits, first), (_, end) in zip(pairs, [*pairs[1:], (0, words)]):
        if bits not in WIDTHS:
            raise CheckpointError(f"q_groups has a group of {bits} bits; there are {', '.join(map(str, WIDTHS))}")
        rows, rest = divmod((end - first) * WORD, bits) if end < words else (left, 0)
        if (left == k and first) or rest or not 0 < rows <= left or -(-rows * bits // WORD) != end - first:
            raise CheckpointError(f"q_groups has a group in words {first} to {end}, but {left} of {k} rows are left")
        left -= rows
        yield _Group(bits, first, rows, end - first)
    if left:
        raise CheckpointError(f"q_groups has {k - left} rows, but q_invperm {k}")


def _size(groups: Sequence[_Group]) -> int:
    """Returns how many columns share a scale here: a divisor of the rows of all groups.

    Raises CheckpointError for fewer than 16.
    """
    rows = [group.rows for group in groups]
    size = math.gcd(*rows)
    if size < MIN_K and len(groups) > 1:
        said = ", ".join(map(str, sorted(set(rows))))
        rule = f"a number of rows that divides them all must be at least {MIN_K}"
        raise CheckpointError(f"q_groups has groups of {said} rows, which only {size} divides; {rule}")
    return size


def _scales(module: ModuleTensors, groups: int, columns: int) -> Tensor:
    """Returns the scales [groups, columns], f16."""
    packed, most = module.take("q_scale", torch.int32, 2), module.take("q_scale_max", torch.float16, 1)
    check_shape("q_scale", packed, (groups, columns // 8), f"{groups} groups of {columns} columns")
    check_shape("q_scale_max", most, (groups,), "q_groups")
    numbers = from_stream(packed, 4, columns).int() + 1
    return (numbers * numbers).to(torch.float16) * (most * (1 / 256))[:, None]


def _columns(module: ModuleTensors, stored: int) -> int:
    """Returns n, which the files may have padded."""
    bias = module.bias()
    n = module.shape[0] if module.shape else stored if bias is None else len(bias)
    return n if 0 <= stored - n < PADDED else stored


_OTHERS = (".q_invperm", ".q_groups", ".q_scale", ".q_scale_max", ".bias")
ENTRIES = named("bits", "head_bits", "version", "calibration")  # tensors say it all
FORMAT = Format((".q_weight",), _OTHERS, read, ENTRIES)
