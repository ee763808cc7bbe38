"""An emulator of PTX in NumPy: runs a kernel's final PTX, inline assembly included, without a GPU.

    emulator = Emulator(ptx)
    emulator.launch("kernel", grid=4, block=(128, 1, 1), args=[x, weight, y, 1024], shared_bytes=49152)

It is a checker as much as an interpreter. Unknown directives, instructions and modifiers are refused when the
module is read. While a kernel runs, whatever PTX leaves undefined is an EmulatorError with the line, the
block and the thread: accesses out of bounds or misaligned, registers read before they are set, shared memory
read before it is written or while a copy may still write it, warp-level instructions without all their
lanes, barriers that not all threads reach, mbarriers whose phase nobody ends or somebody misses, non-coherent loads
of what the launch has written, registers and shared memory that a wgmma in flight uses, missing fences before one,
shared memory of a block of the cluster that has exited or may not have started; with `racecheck=True` also races.

Where the hardware may take its time, the emulator takes the most: a bulk copy ends when nobody can go on without it,
and a try_wait gives false before it waits.

    ptx, lexer, parser          PTX text to values
    floats                      formats and rounding
    memory, shared_memory       device, local and shared memory
    copy_queue, races           cp.async; happens-before
    barrier_object, transfers   mbarriers; copies that end at one
    landings                    who may read what these have brought
    wgmma_queue, async_proxy    registers and shared memory that a wgmma in flight uses
    cluster                     distributed shared memory and the barrier of a cluster
    machine                     registers and the scheduler of a block
    decoder                     an instruction to a Python closure
    launch                      the Emulator

The instructions are in integers, bits, float_arithmetic, conversions, comparisons, transfer, async_copy, bulk_copy,
tensor_copy, mbarrier, atomics, warp, tensor_core, warpgroup, distributed and control.
"""

from lowbit.dialect.errors import EmulatorError
from lowbit.pylib.emulator.launch import Emulator, Stats

__all__ = ["Emulator", "EmulatorError", "Stats"]
