"""Runs a matmul of a folder in C on the driver of fake_cuda.c, in a process of its own, and prints the addresses of its
arrays. Arguments: the runtime, the folder, device, numbers of rows, rows of x for each, and flags."""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

from c_structs import Call

runtime, folder, device, rows, x_rows, flags = json.loads(sys.argv[1])
arrays = json.loads((Path(folder) / "manifest.json").read_text())["matmuls"][0]["arrays"]
c = ctypes.CDLL(runtime)
c.lowbit_error_text.restype = c.lowbit_target.restype = ctypes.c_char_p
c.lowbit_workspace_bytes.restype = c.lowbit_expert_tile.restype = c.lowbit_dequantize_bytes.restype = ctypes.c_int64


def check(code: int) -> None:
    if code:
        sys.exit(c.lowbit_error_text().decode())


def pointers(addresses: list[int]) -> Any:
    return (ctypes.c_void_p * max(1, len(addresses)))(*addresses)


def run(handle: ctypes.c_void_p, m: int, of_x: int) -> dict[str, Any]:
    """Returns the bytes of the workspace, and the addresses of all arrays. Nothing reads or writes them."""
    size = c.lowbit_workspace_bytes(handle, ctypes.c_int64(max(m, of_x)))
    at = {each["name"]: (i + 1) << 32 for i, each in enumerate(arrays) if each["from"] != "buffer"}
    weight, inputs = (pointers([at[a["name"]] for a in arrays if a["from"] == kind]) for kind in ("weight", "input"))
    call = Call(ctypes.sizeof(Call), at["x"], ctypes.addressof(weight), at["y"], m, of_x, ctypes.addressof(inputs))
    call.workspace, call.workspace_bytes, call.stream, call.flags = at["workspace"] + 16, size, 7, flags
    check(c.lowbit_run(handle, ctypes.byref(call)))
    return {"bytes": size, "arrays": {**at, "workspace": at["workspace"] + 16}}


def of_the_weight(handle: ctypes.c_void_p) -> dict[str, Any]:
    """Dequantizes a weight and packs codes; returns the same as `run`."""
    at = {each["name"]: (i + 1) << 32 for i, each in enumerate(arrays) if each["from"] != "buffer"}
    weight = pointers([at[a["name"]] for a in arrays if a["from"] == "weight"])
    y, workspace, stream = (ctypes.c_void_p(address) for address in (at["y"], at["workspace"] + 16, 7))
    check(c.lowbit_dequantize(handle, weight, y, workspace, stream))
    check(c.lowbit_pack_codes(handle, ctypes.c_void_p(at["x"]), ctypes.c_void_p(at["codes"]), stream))
    return {"bytes": c.lowbit_dequantize_bytes(handle), "arrays": {**at, "workspace": at["workspace"] + 16}}


handle = ctypes.c_void_p()
check(c.lowbit_open(folder.encode(), None, device, ctypes.byref(handle)))
found = {"target": c.lowbit_target(handle).decode(), "tile": c.lowbit_expert_tile(handle, ctypes.c_int64(rows[0]))}
found["calls"] = [run(handle, m, of_x) for m, of_x in zip(rows, x_rows)]
found["of_the_weight"] = of_the_weight(handle)
memory = ctypes.c_void_p()
check(c.lowbit_allocate(handle, ctypes.c_int64(1000), ctypes.byref(memory)))
assert ctypes.string_at(memory, 1000) == bytes(1000)
c.lowbit_free(handle, memory)
assert c.lowbit_allocate(handle, ctypes.c_int64(1 << 40), ctypes.byref(memory)) and not memory.value
found["refused"] = c.lowbit_error_text().decode()
current = ctypes.c_void_p()
assert not ctypes.CDLL("libcuda.so.1").cuCtxGetCurrent(ctypes.byref(current)) and not current.value
c.lowbit_close(handle)
print(json.dumps(found))
