"""cp.async.bulk.tensor in tile mode: boxes of tensors, from global to shared memory (PTX ISA 5.5, 9.7.9.27)."""

from __future__ import annotations

from functools import partial

import numpy as np

from lowbit.pylib.emulator.isa.bulk_copy import CHUNK, Destinations, target_window
from lowbit.pylib.emulator.isa.mbarrier import barrier_address
from lowbit.pylib.emulator.machine.decoder import Op
from lowbit.pylib.emulator.machine.faults import Array, Fault, Unsupported
from lowbit.pylib.emulator.machine.machine import Block
from lowbit.pylib.emulator.machine.memory import PARAM_WINDOW, DeviceMemory
from lowbit.pylib.emulator.machine.step_results import Mask, Step
from lowbit.pylib.emulator.text.ptx import Address, TensorAddress
from lowbit.pylib.runtime.tensor_map import SIZE, TensorMap

#: Of the target in shared memory (PTX ISA 5.5.1).
_ALIGN = 128
#: Marks the parameters that are tensor maps; the number of the map follows.
_MAGIC = b"tensormap"


def tensor_argument(device: DeviceMemory, tensor: TensorMap, start: int) -> bytes:
    """The bytes of a parameter for a tensor whose array is at `start`."""
    device.tensors.append((tensor, start))
    return (_MAGIC + (len(device.tensors) - 1).to_bytes(4, "little")).ljust(SIZE, b"\0")


def tensor_copy(op: Op) -> Step:
    rank = int(op.choice("1d", "2d", "3d", "4d", "5d")[0])
    window = target_window(op)
    op.choice("global")
    op.flag("tile")
    op.choice("mbarrier::complete_tx::bytes")
    (target, space), where = op.address(), op.next()
    if space not in (None, "shared"):
        raise Unsupported("cp.async.bulk.tensor copies from global to shared memory here")
    if not isinstance(where, TensorAddress):
        raise Unsupported("this operand has to be a tensor and its coordinates: [map, {x, y}]")
    if len(where.coordinates) != rank:
        raise Unsupported(f"{len(where.coordinates)} coordinates of a tensor with {rank} dims")
    op.operands.insert(0, Address(where.base, where.offset))
    map_address, _ = op.address()
    coordinates = [op.source("s32", item) for item in where.coordinates]
    destinations = Destinations(op, target, barrier_address(op), window)
    block = op.block

    def step(mask: Mask) -> None:
        for lane in block.lanes_of(mask).tolist():
            tensor, start = _tensor(block, lane, int(map_address(np.array([lane]))[0]))
            if len(tensor.shape) != rank:
                raise Fault(f"a copy of {rank} dims of a tensor map with {len(tensor.shape)}", lane)
            corner = [int(np.broadcast_to(x, (block.lanes,))[lane]) for x in reversed(coordinates)]
            data = box_rows(block.device, tensor, start, corner, lane)
            destinations.send(lane, data, partial(box_places, tensor), align=_ALIGN)

    return step


def _tensor(block: Block, lane: int, address: int) -> tuple[TensorMap, int]:
    """The tensor map that is the parameter at `address` (generic, or in .param), and where its tensor starts."""
    at = address - PARAM_WINDOW if address >= PARAM_WINDOW else address
    data = block.params[max(at, 0) : at + SIZE].tobytes()
    if not data.startswith(_MAGIC):
        raise Fault(f"no tensor map at {address:#x}: it has to be a parameter `.align 64 .b8 name[{SIZE}]`", lane)
    return block.device.tensors[int.from_bytes(data[len(_MAGIC) : len(_MAGIC) + 4], "little")]


def box_rows(device: DeviceMemory, tensor: TensorMap, start: int, corner: list[int], lane: int) -> Array:
    """The box at `corner`, which a lane copies, in chunks of 16 bytes; elements outside of the tensor are zeros."""
    offset, inside = np.zeros((), np.int64), np.ones((), np.bool_)
    for first, count, size, stride in zip(corner, tensor.box, tensor.shape, tensor.strides):
        index = first + np.arange(count)
        offset = offset[..., None] + index * stride
        inside = inside[..., None] & (index >= 0) & (index < size)
    base, _ = device.locate(np.array([0]), np.array([start]), tensor.extent, align=1)
    place = np.where(inside, offset, 0)[..., None] + np.arange(tensor.itemsize) + int(base[0])
    device.note_read(np.array([lane]), place[inside].reshape(1, -1))
    device.bytes_loaded += int(inside.sum()) * tensor.itemsize
    return np.where(inside[..., None], device.data[place], 0).astype(np.uint8).reshape(-1, CHUNK)


def box_places(tensor: TensorMap, start: int) -> Array:
    """Returns the addresses of the chunks of a box whose target is `start`. The swizzle follows from the address
    alone."""
    address = start + np.arange(0, tensor.box_bytes, CHUNK)
    return address ^ (address >> 7 & max(tensor.swizzle // CHUNK, 1) - 1) << 4
