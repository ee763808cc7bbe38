"""Quantize a weight, compile a matmul for it, run it, and compare with float64: `make demo`.

On a GPU a layer of a large model, timed. Elsewhere one on the CPU, and then a small one compiled for a Hopper
GPU, whose PTX the emulator runs.
"""

from __future__ import annotations

import time

import torch

import lowbit
from lowbit.pylib.tune.trial import time_call

CONFIG = lowbit.QuantConfig("u4", group_size=128, zeros="int")


def show(target: str | None, n: int, k: int, m: int, timed: bool = True) -> None:
    spec = CONFIG.spec(n, k)

    start = time.perf_counter()
    mm = lowbit.compile(spec, target)
    if mm.target.is_gpu:
        mm.kernel(m)  # which would be compiled at the first call with m tokens
    compile_time = time.perf_counter() - start

    torch.manual_seed(0)
    quantized = lowbit.quantize(torch.randn(n, k), CONFIG)
    x = torch.randn(m, k, dtype=torch.float16)
    device = "cuda" if mm.target.kind == "cuda" else "cpu"
    w = quantized.pack(mm).to(device)
    y = mm(x.to(device), w)

    # In float64, with the weight that the codes stand for: W[n, k] = s[n, k // g] (code[n, k] - z[n, k // g]).
    expected = x.double() @ quantized.dequantize(torch.float64).T
    error = (y.cpu().double() - expected).norm() / expected.norm()

    print(f"\n{spec}, m = {m}, on {mm.target}")
    print(f"  compiled in     {compile_time * 1e3:.0f} ms (from the disk cache the next time)")
    print(f"  weight          {w.nbytes / 1e6:.2f} MB, {2 * n * k / w.nbytes:.2f} times smaller than in f16")
    print(f"  relative error  {error:.1e} (f16 rounds with {2**-11:.1e})")
    if timed:
        seconds = time_call(mm, x.to(device), w)
        moved = w.nbytes + x.nbytes + y.nbytes
        print(f"  time            {seconds * 1e6:.1f} us, {moved / seconds / 1e9:.1f} GB/s")
    if not error < 2**-10:
        raise SystemExit("the result is wrong")


if __name__ == "__main__":
    if torch.cuda.is_available():
        for m in (1, 16, 256):
            show(None, 8192, 8192, m)
    else:
        print("No GPU here: the CPU target, and a GPU's kernel in the emulator.")
        show("cpu", 4096, 4096, 1)
        show("emulator:sm_90a", 64, 1024, 3, timed=False)
