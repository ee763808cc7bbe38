"""Runs what `lowbit export` has written on a GPU, in C: compares with float64, and times what a call costs the host.

    python benchmarks/exported_on_gpu.py FOLDER [FOLDER ...]

It imports torch, for memory and for the reference, and not lowbit: the folder is all that it has. gcc compiles the
folder's runtime. Every matmul is run for few and for many rows, on a stream of its own, with and without
LOWBIT_SETTLED, in a CUDA graph, and from two threads at once. Codes are packed by the host and by the GPU, and the
weight is dequantized. The driver's launch alone, of a kernel that does nothing, is timed as well.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

ROWS = (1, 2, 8, 17, 64, 65, 100, 128, 129, 257, 512, 1000, 5000)
TYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}
OF_GIVEN = {torch.uint8: 0, torch.int8: 1, torch.int32: 2, torch.float32: 3}
SETTLED = 1
CALLS = 400  # of a loop that is timed, which the queue of a stream holds
TIMER = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
#include <lowbit.h>
static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e6 + t.tv_nsec / 1e3;
}
double microseconds(const lowbit_matmul *mm, const lowbit_call *call, int calls) {
    double start = now();
    for (int i = 0; i < calls; i++) if (lowbit_run(mm, call)) return -1;
    return (now() - start) / calls;
}
struct attribute { int id, pad, value, rest[15]; }; /* CUlaunchAttribute */
struct config { unsigned grid[3], block[3], shared; void *stream; struct attribute *attributes; unsigned count; };
double bare(const char *ptx, void *stream, int early, int calls) {
    static void *module, *function; /* loaded once */
    void *driver = dlopen("libcuda.so.1", RTLD_NOW), *given[7];
    if (!driver) return -1;
    int (*load)(void **, const void *) = (int (*)(void **, const void *))dlsym(driver, "cuModuleLoadData");
    int (*get)(void **, void *, const char *) =
        (int (*)(void **, void *, const char *))dlsym(driver, "cuModuleGetFunction");
    int (*launch)(struct config *, void *, void **, void **) =
        (int (*)(struct config *, void *, void **, void **))dlsym(driver, "cuLaunchKernelEx");
    if (!function && (load(&module, ptx) || get(&function, module, "empty"))) return -1;
    struct attribute overlap = {.id = 6, .value = 1}; /* programmatic stream serialization */
    struct config as = {{1, 1, 1}, {32, 1, 1}, 0, stream, &overlap, early != 0};
    uint64_t zero = 0;
    for (int i = 0; i < 7; i++) given[i] = &zero;
    int failed = 0;
    double start = now();
    for (int i = 0; i < calls; i++) failed |= launch(&as, function, given, NULL);
    return failed ? -1 : (now() - start) / calls;
}
"""
EMPTY = b"""
.version 7.0
.target sm_80
.address_size 64
.visible .entry empty(.param .u64 a, .param .u64 b, .param .u64 c, .param .u64 d, .param .u64 e, .param .u64 f,
                      .param .u64 g)
{
    ret;
}
"""


class Given(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("type", ctypes.c_int), ("data", ctypes.c_void_p), ("count", ctypes.c_int64))


class Call(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("x", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("m", ctypes.c_int64),
        ("x_rows", ctypes.c_int64),
        ("inputs", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p),
        ("workspace_bytes", ctypes.c_int64),
        ("stream", ctypes.c_void_p),
        ("flags", ctypes.c_uint),
    )


def build(folder: Path, to: Path) -> ctypes.CDLL:
    """Compiles the runtime of a folder, with the timer."""
    (to / "timer.c").write_text(TIMER)
    sources = [*(path for path in folder.glob("src/*.c") if path.name != "embedded.c"), to / "timer.c"]
    flags = ["-std=c11", "-O2", "-shared", "-fPIC", f"-I{folder}/include"]
    libraries = ["-o", str(to / "runtime.so"), "-lm", "-ldl", "-pthread"]
    subprocess.run(["gcc", *flags, *map(str, sources), *libraries], check=True)
    c = ctypes.CDLL(str(to / "runtime.so"))
    c.lowbit_error_text.restype = c.lowbit_target.restype = ctypes.c_char_p
    c.microseconds.restype = c.bare.restype = ctypes.c_double
    for name in ("tensor_bytes", "workspace_bytes", "dequantize_bytes", "expert_tile"):
        getattr(c, f"lowbit_{name}").restype = ctypes.c_int64
    return c


def pointers(tensors: list[Tensor]) -> Any:
    return (ctypes.c_void_p * max(1, len(tensors)))(*(t.data_ptr() for t in tensors))


class Matmul:
    """A matmul of a folder, with a random weight on the GPU and its values in float64."""

    def __init__(self, c: ctypes.CDLL, folder: Path, about: Mapping[str, Any]) -> None:
        self.c, self.about, self.spec = c, about, about["spec"]
        self.handle = ctypes.c_void_p()
        self.check(c.lowbit_open(str(folder).encode(), about["name"].encode(), 0, ctypes.byref(self.handle)))
        given = self.draw()
        self.weight = self.pack(given)
        self.addresses = pointers(self.weight)
        self.check_codes(given["codes"])
        self.check_values()

    def check(self, code: int) -> None:
        if code:
            raise SystemExit(f"{self.about['name']}: error {code}: {self.c.lowbit_error_text().decode()}")

    def draw(self) -> dict[str, Tensor]:
        """Draws a weight, and keeps its values."""
        n, k = self.about["n"], self.about["k"]
        generator = torch.Generator().manual_seed(1)
        given = {each["name"]: drawn(each, k, generator) for each in self.about["weight"]["given"]}
        values = self.decode(given["codes"].double())
        groups = given["scales"].shape[1]
        grouped = values.view(n, groups, -1)
        if "zeros" in given:
            grouped = grouped - given["zeros"].double().unsqueeze(-1)
        values = (grouped * given["scales"].double().unsqueeze(-1)).view(n, k)
        if "permutation" in given:
            orders = given["permutation"].long().view(-1, k)  # of each expert
            values = torch.zeros_like(values).scatter_(1, orders.repeat_interleave(n // len(orders), 0), values)
        self.values = values.cuda()
        self.bias = given["bias"].double().cuda() if "bias" in given else 0.0
        return given

    def decode(self, codes: Tensor) -> Tensor:
        """Returns the values of codes: integers, or e3m2."""
        if self.spec["weight"] != "f6e3m2":
            return codes
        exponent, mantissa = (codes // 4) % 8, codes % 4
        size = torch.where(exponent > 0, (4 + mantissa) * 2.0 ** (exponent - 5), mantissa * 2.0**-4)
        return torch.where(codes >= 32, -size, size)

    def pack(self, given: Mapping[str, Tensor]) -> list[Tensor]:
        c, kept = self.c, {name: t.contiguous() for name, t in given.items()}
        each = (Given(n.encode(), OF_GIVEN[t.dtype], t.data_ptr(), t.numel()) for n, t in kept.items())
        listed = (Given * len(kept))(*each)
        count = c.lowbit_tensors(self.handle)
        host = [torch.zeros(c.lowbit_tensor_bytes(self.handle, i), dtype=torch.uint8) for i in range(count)]
        self.check(c.lowbit_pack(self.handle, listed, len(kept), pointers(host)))
        return [t.cuda() for t in host]

    def check_codes(self, codes: Tensor) -> None:
        """Packs codes by the kernel."""
        given, packed = codes.cuda(), torch.full_like(self.weight[0], 0xA5)
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        addresses = (ctypes.c_void_p(t.data_ptr()) for t in (given, packed))
        self.check(self.c.lowbit_pack_codes(self.handle, *addresses, stream))
        assert torch.equal(packed, self.weight[0]), f"{self.about['name']}: codes are packed otherwise on the GPU"

    def check_values(self) -> None:
        """Dequantizes the weight."""
        w = torch.full_like(self.values, torch.nan, dtype=TYPES[self.spec.get("act", "f16")])
        size = max(self.c.lowbit_dequantize_bytes(self.handle), 1)
        workspace = torch.full((size,), 0xA5, dtype=torch.uint8, device="cuda")
        addresses = (ctypes.c_void_p(t.data_ptr()) for t in (w, workspace))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        self.check(self.c.lowbit_dequantize(self.handle, self.addresses, *addresses, stream))
        bound = self.values.abs() * torch.finfo(w.dtype).eps + 1e-6
        assert bool(((w.double() - self.values).abs() <= bound).all()), f"{self.about['name']}: dequantized otherwise"

    def inputs(self, m: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns x and what a call of m rows has besides, by name."""
        act, k = TYPES[self.spec.get("act", "f16")], self.about["k"]
        experts = self.about["experts"]
        generator = torch.Generator().manual_seed(m)
        tokens = -(-m // 2) if experts > 1 else m
        size = 1 / 64 if self.spec.get("epilogue") == "silu_mul" else 1.0  # a product of sums must not pass f16's range
        x = (torch.randn(tokens, k, generator=generator) * size).to(act).cuda()
        if experts > 1:
            return x, route(m, experts, self.c.lowbit_expert_tile(self.handle, ctypes.c_int64(m)), generator)
        if self.spec.get("epilogue") == "residual":
            return x, {"residual": torch.randn(m, self.about["n"], generator=generator).to(act).cuda()}
        return x, {}

    def expected(self, x: Tensor, others: Mapping[str, Tensor]) -> Tensor:
        """Returns y in float64."""
        x = x.double()
        if "rows" in others:
            each = self.values.view(self.about["experts"], -1, self.about["k"])
            slots = [x[rows] @ each[expert].T for expert, rows in rows_of_experts(others)]
            h = torch.cat(slots)
        else:
            h = x @ self.values.T + self.bias
        if self.spec.get("epilogue") == "silu_mul":
            gate, up = h.chunk(2, dim=1)
            return torch.nn.functional.silu(gate) * up
        return h + others["residual"].double() if "residual" in others else h

    def unwritten(self, m: int) -> Tensor:
        """Returns NaN for m rows of y."""
        dtype = TYPES[self.spec.get("out") or self.spec.get("act", "f16")]
        return torch.full((m, self.about["outputs"]), torch.nan, dtype=dtype, device="cuda")

    def call(
        self, x: Tensor, others: Mapping[str, Tensor], y: Tensor, m: int, flags: int = 0
    ) -> tuple[Call, list[Any]]:
        """Returns a call, and what must live as long as it."""
        size = self.c.lowbit_workspace_bytes(self.handle, ctypes.c_int64(m))
        workspace = torch.zeros(max(size, 1), dtype=torch.uint8, device="cuda")
        inputs = [t for name, t in others.items() if name != "of_slots"]
        of_inputs = pointers(inputs)
        call = Call(ctypes.sizeof(Call), x.data_ptr(), ctypes.addressof(self.addresses), y.data_ptr(), m, len(x))
        call.inputs = ctypes.addressof(of_inputs) if inputs else None
        call.workspace, call.workspace_bytes, call.flags = workspace.data_ptr(), size, flags
        call.stream = torch.cuda.current_stream().cuda_stream
        return call, [workspace, inputs, of_inputs]

    def run(self, call: Call) -> None:
        self.check(self.c.lowbit_run(self.handle, ctypes.byref(call)))

    @property
    def tolerance(self) -> float:
        return 4e-2 if self.spec.get("compute") else 1.5e-2 if self.spec.get("act") == "bf16" else 2e-3


def drawn(about: Mapping[str, Any], k: int, generator: torch.Generator) -> Tensor:
    """Returns a random tensor as it is given to be packed."""
    name, shape, low = about["name"], about["shape"], about["low"]
    if name == "permutation":  # of each expert
        return torch.cat([torch.randperm(k, generator=generator) for _ in range(shape[0] // k)]).int()
    if about["integer"]:
        high = min(about["high"], 15) if name == "zeros" else about["high"]
        numbers = torch.randint(low, high + 1, shape, generator=generator)
        return numbers.to(torch.int32 if name != "codes" else torch.int8 if low < 0 else torch.uint8)
    if name == "scales":
        return (torch.rand(shape, generator=generator) + 0.5).to(TYPES[about["type"]]).float()
    return torch.randn(shape, generator=generator).to(TYPES[about["type"]]).float()


def route(m: int, experts: int, tile: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Returns random slots sorted by expert, and their table of token tiles."""
    of_slots = torch.randint(experts, (m,), generator=generator).sort().values
    rows = torch.randperm(m, generator=generator) // 2
    tiles = []
    for expert in range(experts):
        first, end = int((of_slots < expert).sum()), int((of_slots <= expert).sum())
        tiles += [(expert, at, min(at + tile, end)) for at in range(first, end, tile)]
    table = torch.zeros(m + 1, 3, dtype=torch.int32)
    table[: len(tiles) + 1] = torch.tensor([(len(tiles), m, 0), *tiles], dtype=torch.int32)
    return {"rows": rows.int().cuda(), "tiles": table.cuda(), "of_slots": of_slots.cuda()}


def rows_of_experts(routing: Mapping[str, Tensor]) -> Iterator[tuple[int, Tensor]]:
    """Yields each expert that has slots, and their rows of x."""
    for expert in routing["of_slots"].unique().tolist():
        yield expert, routing["rows"].long()[routing["of_slots"] == expert]


def worst(y: Tensor, expected: Tensor) -> float:
    """Returns the largest error, relative to the largest value; infinity where y has NaN."""
    error = float((y.double() - expected).abs().max() / expected.abs().max())
    return error if error == error else float("inf")


def check(mm: Matmul, m: int) -> float:
    """Returns the largest error of a call with m rows, run in every way, all of which must give the same."""
    x, others = mm.inputs(m)
    expected = mm.expected(x, others)
    y = mm.unwritten(m + 1)
    torch.cuda.synchronize()
    results = []
    with torch.cuda.stream(torch.cuda.Stream()):
        for flags in (0, SETTLED, SETTLED):
            call, kept = mm.call(x, others, y, m, flags)
            mm.run(call)
            mm.run(call)  # the workspace is as the call before left it
            torch.cuda.synchronize()
            results.append(y.clone())
            y.fill_(torch.nan)
        graph = torch.cuda.CUDAGraph()
        call, kept = mm.call(x, others, y, m, SETTLED)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            call.stream = torch.cuda.current_stream().cuda_stream
            mm.run(call)
            mm.run(call)
        for _ in range(3):
            y.fill_(torch.nan)
            graph.replay()
        torch.cuda.synchronize()
        results.append(y.clone())
        del kept
    assert all(each[m:].isnan().all() for each in results), "rows behind the last were written"
    return max(worst(each[:m], expected) for each in results)


def check_threads(mm: Matmul) -> None:
    """Two threads with streams and workspaces of their own."""
    errors: list[float] = []

    def work() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for m in (1, 33, 300) * 5:
                x, others = mm.inputs(m)
                expected = mm.expected(x, others)
                y = mm.unwritten(m)
                call, kept = mm.call(x, others, y, m)
                mm.run(call)
                torch.cuda.current_stream().synchronize()
                errors.append(worst(y, expected))
                del kept

    threads = [threading.Thread(target=work) for _ in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(errors) == 30 and max(errors) < mm.tolerance, (mm.about["name"], errors)


def host_cost(mm: Matmul, m: int, flags: int) -> float:
    """Returns microseconds of the host per call."""
    x, others = mm.inputs(m)
    y = mm.unwritten(m)
    call, kept = mm.call(x, others, y, m, flags)
    cost = least(lambda: mm.c.microseconds(mm.handle, ctypes.byref(call), CALLS))
    del kept
    return cost


def bare_cost(c: ctypes.CDLL, early: bool) -> float:
    """Returns microseconds of a launch alone. early: it may start before the kernel in front has ended."""
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    return least(lambda: c.bare(EMPTY, stream, early, CALLS))


def least(loop: Callable[[], float]) -> float:
    """Returns the least time of 30 loops."""
    times = []
    for _ in range(30):
        torch.cuda.synchronize()
        times.append(loop())
    torch.cuda.synchronize()
    if min(times) < 0:
        raise SystemExit("a launch failed")
    return min(times)


def run(folder: Path) -> bool:
    """Checks and times all matmuls of a folder; returns whether all were right."""
    manifest, right = json.loads((folder / "manifest.json").read_text()), True
    with TemporaryDirectory() as to:
        c = build(folder, Path(to))
        assert c.lowbit_open(str(folder).encode(), b"none", 0, ctypes.byref(ctypes.c_void_p())) == 4
        assert c.lowbit_open(str(folder).encode(), None, 99, ctypes.byref(ctypes.c_void_p())) != 0
        print(f"a launch alone: {bare_cost(c, False):.2f} us, {bare_cost(c, True):.2f} us where it may start early")
        for about in manifest["matmuls"]:
            mm = Matmul(c, folder, about)
            errors = {m: check(mm, m) for m in ROWS}
            fine = max(errors.values()) < mm.tolerance
            check_threads(mm)
            right &= fine
            shown = ", ".join(f"{m}: {error:.1e}" for m, error in errors.items())
            print(f"{about['name']} ({c.lowbit_target(mm.handle).decode()}): {'right' if fine else 'WRONG'}; {shown}")
            for m in (1, 16, 256):
                apart, overlapped = host_cost(mm, m, 0), host_cost(mm, m, SETTLED)
                print(f"    m = {m}: {apart:.2f} us a call of the host's time, {overlapped:.2f} us with LOWBIT_SETTLED")
            c.lowbit_close(mm.handle)
    return right


if __name__ == "__main__":
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    right = [run(Path(each)) for each in sys.argv[1:]]
    sys.exit(not all(right))
