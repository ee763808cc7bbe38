"""Parts of a weight are what packing the parts gives, and their results make up that of the whole."""

from __future__ import annotations

import re

import pytest
import torch

import lowbit
from lowbit.dialect.errors import PackError
from lowbit.dialect.spec import MatmulSpec
from lowbit.pylib import reference
from lowbit.pylib.weights.packed import pack
from lowbit.pylib.weights.sharding import Part

SPECS = [
    MatmulSpec(64, 512, "u4", 64, zeros="int", bias=True, out="f32"),
    MatmulSpec(32, 1024, "i3", None, bias=True, out="f32"),
    MatmulSpec(96, 600, "u8", 50, zeros="float", scale="f32", out="f32"),
    MatmulSpec(64, 1024, "f6e3m2", 32, scale="e8m0", out="f32"),
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("dim", [0, 1])
def test_a_part_is_what_packing_it_gives(spec: MatmulSpec, dim: int) -> None:
    x, tensors = reference.random_inputs(spec, 3)
    w = pack(spec, **tensors)
    results = []
    for index in range(2):
        part = w.shard(dim, index, 2)
        given = {}
        for slot in spec.tensors:
            whole = tensors[slot.name]
            cuttable = dim < whole.ndim and whole.shape[dim] > 1
            given[slot.name] = whole.chunk(2, dim)[index] if cuttable else whole
        packed = pack(part.spec, **{name: given[name] for name in part})
        assert all(torch.equal(packed[name].view(torch.uint8), part[name].view(torch.uint8)) for name in part)
        columns = x if dim == 0 else x.chunk(2, 1)[index]
        results.append(lowbit.compile(part.spec, "cpu")(columns, part))
        assert part.codes.untyped_storage().nbytes() == part.codes.nbytes  # not the memory of the whole
    y = torch.cat(results, 1) if dim == 0 else results[0] + results[1]
    bound = 2 * reference.tolerance(spec, x, **tensors)
    assert reference.agrees(y, reference.matmul(spec, x, **tensors), bound).all()


def test_one_range_of_rows_is_read_where_it_lies() -> None:
    """Ranges that follow each other are one, as those of the halves of an expert's gate_up in one process are."""
    spec = MatmulSpec(64, 512, "u4", 64, zeros="int")
    w = pack(spec, **reference.random_inputs(spec, 1)[1])
    whole, last = Part(((0, 32), (32, 32)), (0, 512)), Part(((32, 16), (48, 16)), (0, 512))
    assert whole.rows == ((0, 64),) and last.rows == ((32, 32),)
    for slot in spec.tensors:
        tensor = w[slot.name]
        assert whole.of(slot, tensor, spec).data_ptr() == tensor.data_ptr()
        found = last.of(slot, tensor, spec)
        assert found.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        assert torch.equal(found.view(torch.uint8), w.shard(0, 1, 2)[slot.name].view(torch.uint8))
    apart = Part(((0, 16), (32, 16)), (0, 512))
    assert apart.rows == ((0, 16), (32, 16))
    assert torch.equal(w.part(apart).unpack(), w.unpack()[[*range(16), *range(32, 48)]])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((2, 0, 2), "dim=2 must be 0, for rows, or 1, for columns"),
        ((0, 2, 2), "index=2 must be one of 0 .. count - 1, with count=2"),
        ((0, -1, 2), "index=-1 must be one of 0 .. count - 1"),
        ((0, 0, 3), "n=64 can't be cut into 3 parts of a multiple of 16; the most parts up to 3 are 2"),
        ((1, 0, 16), "k=512 can't be cut into 16 parts of a multiple of 64; the most parts up to 16 are 8"),
    ],
)
def test_parts_that_are_none(arguments: tuple[int, int, int], message: str) -> None:
    w = pack(SPECS[0], **reference.random_inputs(SPECS[0], 1)[1])
    with pytest.raises(PackError, match=re.escape(message)):
        w.shard(*arguments)


UNEVEN = [
    MatmulSpec(128, 640, "u4", 128, zeros="int", bias=True, out="f32"),
    MatmulSpec(96, 640, "i3", None, bias=True, out="f32"),
    MatmulSpec(96, 640, "f6e3m2", 64, scale="e8m0", out="f32"),
    MatmulSpec(96, 640, "u8", 128, zeros="float", scale="f32", out="f32"),
]


@pytest.mark.parametrize("spec", UNEVEN, ids=str)
@pytest.mark.parametrize(("rows", "parts"), [(((0, 16), (64, 32)), 2), (((0, 10), (50, 3)), 4), (((8, 40),), 1)])
def test_a_part_has_the_values_of_its_rows_and_columns(
    spec: MatmulSpec, rows: tuple[tuple[int, int], ...], parts: int
) -> None:
    """Wherever it is cut: groups that a cut divides become smaller, with the same scales."""
    w = pack(spec, **reference.random_inputs(spec, 1)[1])
    whole = w.dequantize()
    for index in range(parts):
        first, columns = index * 640 // parts, 640 // parts
        part = w.part(Part(rows, (first, columns)))
        wanted = torch.cat([whole[a : a + count] for a, count in rows])[:, first : first + columns]
        assert torch.equal(part.dequantize(), wanted)
        bias = w.unpack_tensor("bias") if spec.bias and index == 0 else None
        assert (part.bias is None) == (bias is None)
        if bias is not None:
            assert torch.equal(part.unpack_tensor("bias"), torch.cat([bias[a : a + count] for a, count in rows]))
        assert part.codes.untyped_storage().nbytes() == part.codes.nbytes


def test_a_part_whose_groups_are_cut() -> None:
    spec = MatmulSpec(64, 640, "u4", 128, zeros="int")
    w = pack(spec, **reference.random_inputs(spec, 1)[1])
    assert w.part(Part(((0, 64),), (320, 320))).spec.group_size == 64
    assert not Part(((0, 64),), (320, 320)).is_cut_in_memory(spec)
    assert Part(((0, 16), (32, 16)), (128, 256)).is_cut_in_memory(spec)


@pytest.mark.parametrize(
    ("spec", "columns", "message"),
    [
        (MatmulSpec(64, 1920, "u4", 128), (232, 232), "232 of 1920 columns, from column 232 on, cut groups of 128"),
        (MatmulSpec(64, 640, "u4", 128, outliers=True), (320, 320), "cut groups of 128 into 64, which"),
        (MatmulSpec(64, 640, "u4", 128, permuted=True), (0, 128), "columns of a permuted weight can't be cut"),
    ],
)
def test_columns_that_no_weight_has(spec: MatmulSpec, columns: tuple[int, int], message: str) -> None:
    with pytest.raises(PackError, match=re.escape(message)):
        Part(((0, 64),), columns).spec(spec)
