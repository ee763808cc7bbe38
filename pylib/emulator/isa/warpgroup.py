"""wgmma: matrix products of a warpgroup, asynchronous, with B (and maybe A) in shared memory (PTX ISA 9.7.15).

Warp w of the warpgroup has rows 16 w .. 16 w + 15 of A and D. Its registers hold them as mma.sync's do
(tensor_core.py), D as one accumulator of 16 x 8 after the other.

A kernel may let it read rows of B that nobody has written, as long as it uses nothing of their columns of D: these
rows count as NaN, those of integers as some odd number.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from lowbit.pylib.emulator.isa.tensor_core import (
    ELEMENT_BITS,
    INTEGERS,
    MIXES,
    accumulator_values,
    accumulator_words,
    elements,
    fragment,
)
from lowbit.pylib.emulator.isa.warp import collective, mask_of
from lowbit.pylib.emulator.machine.decoder import Op, instruction
from lowbit.pylib.emulator.machine.faults import Array, Fault, Unsupported, all_of, any_of
from lowbit.pylib.emulator.machine.step_results import Step
from lowbit.pylib.emulator.machine.wgmma_queue import WARPGROUP
from lowbit.pylib.emulator.text.ptx import Operand, Reg, Vector

#: What integers count as that nobody has written: a product that uses them is wrong.
_UNKNOWN = 101.0
#: Bytes of a row of A or B that one instruction takes.
_ROW_BYTES = 32


@dataclass(frozen=True)
class Descriptor:
    """A matrix in shared memory, K-major: [rows, 32 bytes] in chunks of 16 bytes (PTX ISA 9.7.15.5.1.2).

    Eight rows repeat every `stride` bytes. Without swizzling they are core matrices of 8 x 16 contiguous bytes, and
    the second chunk of a row lies `leading` bytes after the first: the canonical layout ((8,m),(T,2k)):((1T,SBO),
    (1,LBO)) of PTX ISA's table, which is CUTLASS's ((8,n),2):((1,SBO),LBO) for INTERLEAVE. So the leading dimension
    byte offset is between core matrices that are neighbours in k, the stride byte offset between neighbours in rows.
    Swizzled, a row is `span` bytes, its chunks are neighbours, and address bits 4.. are exclusive-ored with bits 7..
    """

    start: int
    leading: int
    stride: int
    span: int  # bytes of a row of the swizzle atom; 16 without swizzling

    @classmethod
    def decode(cls, bits: int) -> Descriptor:
        if bits & ~0xC00E_3FFF_3FFF_3FFF:
            raise Fault(f"matrix descriptor {bits:#018x} has bits that belong to no field")
        if bits >> 49 & 7:
            raise Fault(f"matrix descriptor {bits:#018x} has a base offset, which is not emulated: align the matrix")
        start, leading, stride = ((bits >> at & 0x3FFF) << 4 for at in (0, 16, 32))
        return cls(start, leading, stride, (16, 128, 64, 32)[bits >> 62])

    def addresses(self, rows: int) -> Array:
        """Where the chunks [rows, 2] lie."""
        row, chunk = np.arange(rows)[:, None], np.arange(_ROW_BYTES // 16)
        address = self.start + row // 8 * self.stride + row % 8 * self.span
        address = address + chunk * (self.leading if self.span == 16 else 16)
        return address ^ (address >> 7 & self.span // 16 - 1) << 4


@instruction("wgmma")
def _wgmma(op: Op) -> Step:
    name = op.choice("mma_async", "fence", "commit_group", "wait_group")
    op.choice("sync")
    op.choice("aligned")
    queue = op.block.wgmmas
    match name:
        case "mma_async":
            return _mma_async(op)
        case "fence":
            step = queue.fence
        case "commit_group":
            step = queue.commit
        case _:
            step = partial(queue.wait, pending=op.immediate())
    return collective(op, None, step, WARPGROUP)


def _mma_async(op: Op) -> Step:
    op.asynchronous = True
    if len(op.modifiers) < 4:
        raise Unsupported("wgmma needs a shape and three types")
    result, a_type, b_type = op.modifiers[-3:]
    del op.modifiers[-3:]
    shape = op.modifiers.pop(0)
    columns = _columns(shape, result, a_type, b_type)
    saturate = bool(a_type in INTEGERS and op.flag("satfinite"))
    block, queue = op.block, op.block.wgmmas
    items = op.vector(columns // (4 if result == "f16" else 2))
    if len(set(items)) < len(items):
        raise Unsupported("an accumulator register that comes twice")
    dests, accumulators = [op.dest("b32", item) for item in items], _numbers(op, items)
    a_items = op.vector(4) if isinstance(op.operands[0], Vector) else ()
    a = _registers(op, a_items, a_type) if a_items else _matrix(op, 64, a_type)
    b = _matrix(op, columns, b_type)
    inputs = _numbers(op, a_items)
    accumulates = op.predicate()
    sign = _scales(op, a_type, trans=1 if a_items else 2)

    def multiply(active: Array) -> None:
        adds = accumulates() & active
        total = np.zeros((columns // 2, block.lanes))
        if any_of(adds):
            for dest in dests:
                if dest.register is not None and not dest.register.complete:
                    dest.register.check(adds)
            words = np.stack([dest.view for dest in dests])
            total[:, adds] = accumulator_values(words[:, adds], result)
        for first in (np.flatnonzero(active[::WARPGROUP]) * WARPGROUP).tolist():
            lanes = slice(first, first + WARPGROUP)
            if any_of(adds[lanes]) != all_of(adds[lanes]):
                raise Fault("scale-d differs within the warpgroup", first)
            (x, x_rows), (y, y_rows) = a(first), b(first)
            queue.issue(first, f"{shape}.{result}", accumulators, inputs, x_rows + y_rows)
            # Axes: warp, row half, g, column block, t, column.
            product = (sign * x @ y.T).reshape(4, 2, 8, columns // 8, 4, 2).transpose(3, 1, 5, 0, 2, 4)
            total[:, lanes] += product.reshape(columns // 2, WARPGROUP)
        if saturate:
            total = np.clip(total, -(2**31), 2**31 - 1)
        for dest, word in zip(dests, accumulator_words(total, result)):
            dest.write(word, mask_of(active))

    return collective(op, None, multiply, WARPGROUP)


def _columns(shape: str, result: str, a: str, b: str) -> int:
    """N of `shape`, if there is such a wgmma."""
    match = re.fullmatch(r"m64n(\d+)k(\d+)", shape)
    if match is None:
        raise Unsupported(f"wgmma shape .{shape}")
    n, k = int(match[1]), int(match[2])
    if a not in ELEMENT_BITS or ELEMENT_BITS[a] == 4 or not any(a in mix and b in mix for mix in MIXES):
        raise Unsupported(f"wgmma of .{a} and .{b}")
    step = 16 if a in INTEGERS and n > 32 else 8
    if n % step or not 8 <= n <= 256 or k * ELEMENT_BITS[a] != 8 * _ROW_BYTES:
        raise Unsupported(f"wgmma .{shape} of .{a}")
    results = ("s32",) if a in INTEGERS else ("f32",) if a in ("bf16", "tf32") else ("f32", "f16")
    if result not in results:
        raise Unsupported(f"wgmma of .{a} with .{result} out")
    return n


def _numbers(op: Op, items: tuple[Operand, ...]) -> Array:
    """The numbers of the registers `items` in the block's queue, each once."""
    if not all(isinstance(item, Reg) for item in items):
        raise Unsupported("wgmma takes registers, and no constants or `_`")
    flights = [op.register(item).flight for item in dict.fromkeys(items) if isinstance(item, Reg)]
    return np.array([flight.number for flight in flights if flight], np.intp)


#: Gives the matrix [rows, k] in float64 of the warpgroup that starts at a lane, and the rows of 16 bytes of shared
#: memory that it reads for that.
_Factor = Callable[[int], tuple[Array, list[Array]]]


def _registers(op: Op, items: tuple[Operand, ...], kind: str) -> _Factor:
    """A in registers."""
    read = fragment(op, items, kind)

    def matrix(first: int) -> tuple[Array, list[Array]]:
        # Axes: k half, row half, warp, g, t, j.
        parts = read()[:, first : first + WARPGROUP].reshape(2, 2, 4, 8, 4, -1)
        return parts.transpose(2, 1, 3, 0, 4, 5).reshape(64, -1), []

    return matrix


def _matrix(op: Op, rows: int, kind: str) -> _Factor:
    """A matrix by its descriptor."""
    descriptors, block = op.source("b64"), op.block

    def matrix(first: int) -> tuple[Array, list[Array]]:
        bits = np.broadcast_to(descriptors, (block.lanes,))[first : first + WARPGROUP]
        if any_of(bits != bits[0]):
            raise Fault("matrix descriptors that differ within the warpgroup", first)
        address = Descriptor.decode(int(bits[0])).addresses(rows)
        row, chunks, empty = block.shared.begin_async_read(first, address.ravel())
        values = elements(chunks.view(np.uint32).reshape(rows, -1), kind).reshape(rows, -1)
        if any_of(empty):
            values[empty.reshape(rows, -1).any(axis=1)] = _UNKNOWN if kind in INTEGERS else np.nan
        return values, [row]

    return matrix


def _scales(op: Op, kind: str, trans: int) -> float:
    """The product of imm-scale-a and imm-scale-b; `trans` flags may ask for transposed 16-bit matrices."""
    if kind in INTEGERS:
        return 1.0
    signs = [op.immediate(), op.immediate()]
    if any(sign not in (1, -1) for sign in signs):
        raise Unsupported(f"wgmma scales its factors by 1 or -1, not {signs}")
    if ELEMENT_BITS[kind] == 16 and any(op.immediate() for _ in range(trans)):
        raise Unsupported("wgmma of a transposed (M- or N-major) matrix")
    return float(signs[0] * signs[1])
