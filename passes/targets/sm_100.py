"""Blackwell in data centres: B200. Kernels are those of sm_80: there is no wgmma, and none uses tcgen05."""

from __future__ import annotations

from lowbit.passes.costs import Rates
from lowbit.passes.target import gpu
from lowbit.passes.targets.sm_90a import H200

TARGET = gpu(
    "sm_100",
    ptx=86,
    shared_kb=228,
    threads=2048,
    blocks=32,
    multiprocessors=148,
    clusters=True,
    rates=Rates(mma=1024, vendor=4096, clock=1850, memory=8.0e6, cache=126e6),  # mma: unpublished, as the A100's
    costs=H200,
)
