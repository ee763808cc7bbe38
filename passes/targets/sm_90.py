"""Hopper without its own instructions: PTX that runs on later GPUs, too."""

from __future__ import annotations

from lowbit.passes.target import gpu
from lowbit.passes.targets.sm_90a import H200, HOPPER

TARGET = gpu(
    "sm_90",
    ptx=86,
    shared_kb=228,
    threads=2048,
    blocks=32,
    multiprocessors=132,
    clusters=True,
    rates=HOPPER,
    costs=H200,
)
