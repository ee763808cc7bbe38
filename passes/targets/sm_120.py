"""Blackwell: GeForce RTX 50. Without clusters: theirs were not tried on such a GPU."""

from __future__ import annotations

from lowbit.passes.costs import Rates
from lowbit.passes.target import gpu
from lowbit.passes.targets.sm_90a import H200

TARGET = gpu(
    "sm_120",
    ptx=87,
    shared_kb=100,
    threads=1536,
    blocks=24,
    multiprocessors=170,
    rates=Rates(mma=256, vendor=256, clock=2410, memory=1.79e6, cache=96e6),
    costs=H200,
)
