"""Ampere: Jetson Orin."""

from __future__ import annotations

from lowbit.passes.costs import Rates
from lowbit.passes.target import gpu
from lowbit.passes.targets.sm_90a import H200

TARGET = gpu(
    "sm_87",
    ptx=80,
    shared_kb=164,
    threads=1536,
    blocks=16,
    multiprocessors=16,
    rates=Rates(mma=1024, vendor=1024, clock=1300, memory=0.20e6, cache=4e6),
    costs=H200,
)
