"""Ada: L40S, GeForce RTX 40."""

from __future__ import annotations

from lowbit.passes.costs import Rates
from lowbit.passes.target import gpu
from lowbit.passes.targets.sm_90a import H200

TARGET = gpu(
    "sm_89",
    ptx=84,
    shared_kb=100,
    threads=1536,
    blocks=24,
    multiprocessors=142,
    rates=Rates(mma=512, vendor=512, clock=2520, memory=0.86e6, cache=96e6),
    costs=H200,
)
