"""mma.sync, ldmatrix, stmatrix and movmatrix (PTX ISA 9.7.14.5).

All fragment layouts follow one rule. With g = lane / 4, t = lane % 4 and e elements in a 32-bit register
(e = 32 / bits), register r of a lane holds, for j = 0 .. e-1,

    A[g + 8 (r & 1), 4 e (r >> 1) + e t + j]      B[4 e r + e t + j, g]

and the accumulator c_i = C[g + 8 (i >> 1), 2 t + (i & 1)], packed in pairs when it is f16.

Numbers: products are exact and A B + C is summed in float64 (for integers exactly) and rounded once per mma.
Hardware aligns the terms to the largest and cuts the lower bits off, so its f32 results may differ in the
last bits.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from lowbit.pylib.emulator.isa.floats import FLOATS
from lowbit.pylib.emulator.isa.warp import collective, mask_of
from lowbit.pylib.emulator.machine.decoder import Dest, Op, instruction
from lowbit.pylib.emulator.machine.faults import Array, Unsupported, require
from lowbit.pylib.emulator.machine.step_results import WARP, Mask, Step
from lowbit.pylib.emulator.text.ptx import Operand

ELEMENT_BITS = {"f16": 16, "bf16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8, "s4": 4, "u4": 4}
INTEGERS = ("s8", "u8", "s4", "u4")
#: Which types may be the other factor.
MIXES = (("f16",), ("bf16",), ("tf32",), ("e4m3", "e5m2"), ("s8", "u8"), ("s4", "u4"))


@instruction("mma")
def _mma(op: Op) -> Step:
    op.choice("sync")
    op.choice("aligned")
    if len(op.modifiers) < 4:
        raise Unsupported("mma needs four types")
    result, a_type, b_type, c_type = op.modifiers[-4:]
    del op.modifiers[-4:]
    shape = op.modifiers.pop(0) if op.modifiers else ""
    match = re.fullmatch(r"m16n8k(\d+)", shape)
    if match is None:
        raise Unsupported(f"mma shape .{shape}")
    op.choice("row")
    op.choice("col")
    integer = a_type in INTEGERS
    saturate = bool(integer and op.flag("satfinite"))
    halves = _check_types(int(match[1]), result, a_type, b_type, c_type)

    dest = _accumulator_dest(op, result)
    a = fragment(op, op.vector(2 * halves), a_type)
    b = fragment(op, op.vector(halves), b_type)
    c = _accumulator(op, c_type)
    warps = op.block.warps

    def multiply(active: Array) -> None:
        # Axes of a: k half, row half, warp, g, t, j; of b: k half, warp, g, t, j.
        x = a().reshape(halves, 2, warps, 8, 4, -1).transpose(2, 1, 3, 0, 4, 5).reshape(warps, 16, -1)
        y = b().reshape(halves, warps, 8, 4, -1).transpose(1, 0, 3, 4, 2).reshape(warps, -1, 8)
        # Axes of the product: warp, row half, g, t, j.
        product = np.matmul(x, y).reshape(warps, 2, 8, 4, 2).transpose(1, 4, 0, 2, 3).reshape(4, -1)
        total = product + c()
        if saturate:
            total = np.clip(total, -(2**31), 2**31 - 1)
        dest(total, mask_of(active))

    return collective(op, None, multiply)


def _check_types(k: int, result: str, a: str, b: str, c: str) -> int:
    """The number of k halves: 1 or 2 times 16 bytes of a row."""
    if a not in ELEMENT_BITS or not any(a in mix and b in mix for mix in MIXES):
        raise Unsupported(f"mma of .{a} and .{b}")
    halves, rest = divmod(k * ELEMENT_BITS[a], 128)
    sums = ("s32",) if a in INTEGERS else ("f32", "f16") if a == "f16" else ("f32",)
    if rest or halves not in (1, 2) or (halves == 1 and a in ("e4m3", "e5m2")):
        raise Unsupported(f"mma .m16n8k{k} of .{a}")
    if result not in sums or c != result:
        raise Unsupported(f"mma of .{a} with .{c} in and .{result} out")
    return halves


def _stack(op: Op, items: tuple[Operand, ...]) -> Callable[[], Array]:
    """32-bit registers as one array [register, lane]."""
    sources = [op.source("b32", item) for item in items]
    words = np.empty((len(items), op.block.lanes), np.uint32)

    def read() -> Array:
        for i, source in enumerate(sources):
            words[i] = source
        return words

    return read


def fragment(op: Op, items: tuple[Operand, ...], kind: str) -> Callable[[], Array]:
    """The registers of A or B as float64 values [register, lane, element]."""
    stacked = _stack(op, items)
    return lambda: elements(stacked(), kind)


def elements(words: Array, kind: str) -> Array:
    """32-bit words of a factor as float64 values, which hold them all: an axis more, of the elements of a word."""
    bits = ELEMENT_BITS[kind]
    if bits == 8 and kind in INTEGERS:
        return words[..., None].view(np.int8 if kind == "s8" else np.uint8).astype(np.float64)
    if bits == 4:
        fields = (words[..., None] << np.arange(28, -4, -4, dtype=np.uint32)).view(np.int32)
        return ((fields if kind == "s4" else fields.view(np.uint32)) >> 28).astype(np.float64)
    fmt = FLOATS[kind]
    if kind == "tf32":
        words = words & np.uint32(0xFFFFE000)  # the lower bits do not count
    return fmt.decode(words[..., None].view(fmt.raw))


def _accumulator(op: Op, kind: str) -> Callable[[], Array]:
    """C as float64 [4, lane]."""
    stacked = _stack(op, op.vector(2 if kind == "f16" else 4))
    return lambda: accumulator_values(stacked(), kind)


def accumulator_values(words: Array, kind: str) -> Array:
    """The accumulator registers [register, lane] as float64 [element, lane]."""
    if kind == "s32":
        return words.view(np.int32).astype(np.float64)
    values = FLOATS[kind].decode(words[..., None].view(FLOATS[kind].raw))
    return values.transpose(0, 2, 1).reshape(-1, words.shape[1])


def accumulator_words(total: Array, kind: str) -> Array:
    """The reverse of `accumulator_values`, rounding once."""
    if kind == "s32":
        return total.astype(np.int64).astype(np.uint32)  # wraps
    fmt = FLOATS[kind]
    per_word = 32 // fmt.bits
    code = fmt.encode(total).reshape(len(total) // per_word, per_word, -1)
    return np.ascontiguousarray(code.transpose(0, 2, 1)).view(np.uint32)[..., 0]


def _accumulator_dest(op: Op, kind: str) -> Callable[[Array, Mask], None]:
    items = op.vector(2 if kind == "f16" else 4)
    dests: list[Dest] = [op.dest("b32", item) for item in items]

    def write(total: Array, mask: Mask) -> None:
        for dest, word in zip(dests, accumulator_words(total, kind)):
            dest.write(word, mask)

    return write


# Matrices of 8 rows of 16 bytes


def _matrices(op: Op) -> tuple[int, bool]:
    op.choice("sync")
    op.choice("aligned")
    op.choice("m8n8")
    count = int(op.choice("x1", "x2", "x4")[1])
    transposed = bool(op.flag("trans"))
    op.choice("b16")
    op.choice("shared", "shared::cta")
    return count, transposed


class _Rows:
    """Where each lane's share of `count` 8x8 matrices lies: lane 8 m + i holds the address of row i of matrix
    m.

    Plain: lane l has the two elements at row l / 4, column 2 (l % 4). Transposed: row and column change
    places.
    """

    def __init__(self, op: Op, count: int, transposed: bool) -> None:
        self.pointer, space = op.address()
        if space not in (None, "shared"):
            raise Unsupported(f"the variable lies in .{space}, not in .shared")
        self.count, self.size = count, 2 if transposed else 4
        lane = np.arange(WARP)
        g, t = lane // 4, lane % 4
        if transposed:
            self.row, self.column = np.stack([2 * t, 2 * t + 1], axis=1), np.stack([2 * g, 2 * g], axis=1)
        else:
            self.row, self.column = g[:, None], 4 * t[:, None]

    def places(self, active: Array) -> tuple[Array, Array]:
        """Lanes and addresses, both flat over [warp, matrix, lane, element]."""
        warps = np.flatnonzero(active[::WARP])
        lanes = (warps[:, None] * WARP + np.arange(8 * self.count)).ravel()
        start = self.pointer(lanes)
        require(start & 15 == 0, lanes, "the address of a matrix row is not a multiple of 16")
        address = start.reshape(len(warps), self.count, 8)[:, :, self.row] + self.column
        lane = np.empty(address.shape, np.int64)
        lane[:] = (warps[:, None] * WARP + np.arange(WARP))[:, None, :, None]
        return lane.ravel(), address.ravel()


@instruction("ldmatrix")
def _ldmatrix(op: Op) -> Step:
    count, transposed = _matrices(op)
    dests = [op.dest("b32", item) for item in op.vector(count)]
    rows = _Rows(op, count, transposed)
    block = op.block

    def load(active: Array) -> None:
        lanes, address = rows.places(active)
        words = block.shared.read(lanes, address, rows.size).reshape(-1, 4).view(np.uint32)
        mask = mask_of(active)
        per_matrix = words.reshape(-1, count, WARP)
        for i, dest in enumerate(dests):
            dest.scatter(per_matrix[:, i].ravel(), block.lanes_of(mask), mask)

    return collective(op, None, load)


@instruction("stmatrix")
def _stmatrix(op: Op) -> Step:
    count, transposed = _matrices(op)
    rows = _Rows(op, count, transposed)
    stacked, block = _stack(op, op.vector(count)), op.block

    def store(active: Array) -> None:
        lanes, address = rows.places(active)
        words = stacked()[:, active].reshape(count, -1, WARP)
        ordered = np.ascontiguousarray(words.transpose(1, 0, 2))
        block.shared.write(lanes, address, ordered.view(np.uint8).reshape(-1, rows.size))

    return collective(op, None, store)


@instruction("movmatrix")
def _movmatrix(op: Op) -> Step:
    """Transpose an 8x8 matrix whose row l / 4 lies in lanes 4 (l / 4) .. + 3."""
    for name in ("sync", "aligned", "m8n8", "trans", "b16"):
        op.choice(name)
    dest, source = op.dest("b32"), op.source("b32")

    def transpose(active: Array) -> None:
        matrices = np.ascontiguousarray(source).view(np.uint16).reshape(-1, 8, 8)
        flipped = np.ascontiguousarray(matrices.transpose(0, 2, 1)).reshape(-1, 2).view(np.uint32)
        dest.write(flipped[:, 0], mask_of(active))

    return collective(op, None, transpose)
