"""Ampere: A40, GeForce RTX 30."""

from __future__ import annotations

from lowbit.passes.costs import Rates
from lowbit.passes.target import gpu
from lowbit.passes.targets.sm_90a import H200

TARGET = gpu(
    "sm_86",
    ptx=80,
    shared_kb=100,
    threads=1536,
    blocks=16,
    multiprocessors=84,
    rates=Rates(mma=512, vendor=512, clock=1740, memory=0.70e6, cache=6e6),
    costs=H200,
)
