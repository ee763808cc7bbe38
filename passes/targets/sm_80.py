"""Ampere in data centres: A100."""

from __future__ import annotations

from lowbit.passes.costs import Rates
from lowbit.passes.target import gpu
from lowbit.passes.targets.sm_90a import H200

TARGET = gpu(
    "sm_80",
    ptx=80,
    shared_kb=164,
    threads=2048,
    blocks=32,
    multiprocessors=108,
    rates=Rates(mma=1024, vendor=1024, clock=1410, memory=1.56e6, cache=40e6),
    costs=H200,
)
