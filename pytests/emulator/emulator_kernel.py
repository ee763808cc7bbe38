"""Small hand-written PTX kernels for the emulator's tests: the frame around a few instructions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lowbit.pylib.emulator import Emulator

Array = np.ndarray[Any, Any]

HEADER = ".version 8.6\n.target sm_90a\n.address_size 64\n"
SOURCES, RESULTS = "abcdefgh", "xyzw"
_REGISTER = {1: "b16", 2: "b16", 4: "b32", 8: "b64"}


def kernel(body: str, params: Sequence[str] = (), *, module: str = "", registers: str = "") -> str:
    """A module with one entry `k`; `params` are types: "u64" becomes `.param .u64 p0`, and so on."""
    listed = ", ".join(f".param .{kind} p{i}" for i, kind in enumerate(params))
    return f"""{HEADER}{module}
.visible .entry k({listed})
{{
    .reg .pred %p<64>; .reg .b16 %rs<64>; .reg .b32 %r<256>; .reg .b64 %rd<64>;
    .reg .f32 %f<64>; .reg .f64 %fd<64>;
    {registers}
    {body}
    ret;
}}
"""


def run(body: str, args: Sequence[Any] = (), *, block: Any = 32, **options: Any) -> Emulator:
    """Run `body` with `args` as 64-bit parameters p0, p1, ...; integers are given as .u32."""
    params = ["u64" if isinstance(arg, np.ndarray) or arg is None else "u32" for arg in args]
    frame = {key: options.pop(key) for key in ("module", "registers") if key in options}
    emulator = Emulator(kernel(body, params, **frame))
    emulator.launch("k", block=block, args=args, **options)
    return emulator


def apply_ptx(asm: str, inputs: Sequence[Array], outputs: Sequence[Any], block: int = 256) -> tuple[str, int]:
    """The kernel that `apply` runs, and its grid: thread i loads element i of each input into %a, %b, ...
    (bool inputs into predicates), runs `asm`, and stores %x, %y, ... as the types in `outputs`."""
    count = len(inputs[0])
    lines = ["mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ntid.x; mad.lo.u32 %r3, %r1, %r2, %r0;"]
    lines += ["cvt.u64.u32 %rd0, %r3;", f"setp.ge.u32 %p0, %r3, {count};", "@%p0 exit;"]
    registers = ""
    for i, array in enumerate(inputs):
        name, size = f"%{SOURCES[i]}", array.dtype.itemsize
        lines.append(f"ld.param.u64 %rd1, [p{i}]; mad.lo.u64 %rd2, %rd0, {size}, %rd1;")
        if array.dtype == np.bool_:
            registers += f".reg .pred {name};"
            lines.append(f"ld.global.u8 %rs0, [%rd2]; setp.ne.u16 {name}, %rs0, 0;")
        else:
            registers += f".reg .{_REGISTER[size]} {name};"
            lines.append(f"ld.global.b{8 * size} {name}, [%rd2];")
    lines.append(asm)
    for i, dtype in enumerate(map(np.dtype, outputs)):
        name, size = f"%{RESULTS[i]}", dtype.itemsize
        lines.append(f"ld.param.u64 %rd1, [p{len(inputs) + i}]; mad.lo.u64 %rd2, %rd0, {size}, %rd1;")
        if dtype == np.bool_:
            registers += f".reg .pred {name};"
            lines.append(f"selp.u16 %rs0, 1, 0, {name}; st.global.u8 [%rd2], %rs0;")
        else:
            registers += f".reg .{_REGISTER[size]} {name};"
            lines.append(f"st.global.b{8 * size} [%rd2], {name};")
    params = ["u64"] * (len(inputs) + len(outputs))
    return kernel("\n    ".join(lines), params, registers=registers), -(-count // block)


def apply(asm: str, *inputs: Array, out: Any) -> Any:
    """Run `asm` on every element of `inputs`; the results, one array for each of `out` (or just the one)."""
    types = out if isinstance(out, tuple) else (out,)
    results = [np.zeros(len(inputs[0]), dtype) for dtype in types]
    source, grid = apply_ptx(asm, inputs, types)
    Emulator(source).launch("k", grid=grid, block=256, args=[*map(np.ascontiguousarray, inputs), *results])
    return tuple(results) if isinstance(out, tuple) else results[0]
