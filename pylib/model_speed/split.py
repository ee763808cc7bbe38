"""Splits the time of a step: seconds by kind of kernel, as torch's profiler counts them."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch.profiler import ProfilerActivity, profile

from lowbit.pylib.model_speed.runner import Runner

OURS = ("matmul", "prefill", "permute", "quantize", "dequantize", "prepack")
"""Names of the kernels that lowbit compiles, in full."""
KINDS = (
    ("attention", ("flash", "fmha", "sdpa", "attention", "cudnn")),
    ("dense matmuls", ("gemm", "gemv", "nvjet", "cutlass", "cublas", "splitk", "split_k")),
    ("copies", ("memcpy", "memset", "copy")),
)
"""Words in the names of other kernels; the first kind that has one counts."""
LOW_BIT, COMPILED, OTHER = "low-bit matmuls", "torch.compile's kernels", "other kernels"


def kernel_split(runner: Runner) -> dict[str, float]:
    """Returns the seconds of a step by kind of kernel, the longest first; nothing on a CPU.

    Kernels overlap, so their sum may be more than the step takes.
    """
    if runner.device.type != "cuda":
        return {}
    runner.run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        runner.run()
        torch.cuda.synchronize()
    seconds: defaultdict[str, float] = defaultdict(float)
    for event in profiled.events() or ():
        if event.device_type.name == "CUDA":
            seconds[kind_of(event.name)] += event.device_time * 1e-6
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def kind_of(kernel: str) -> str:
    """Returns what a kernel of this name does."""
    if kernel in OURS:
        return LOW_BIT
    if kernel.startswith("triton_"):
        return COMPILED
    name = kernel.lower()
    return next((kind for kind, words in KINDS if any(word in name for word in words)), OTHER)
