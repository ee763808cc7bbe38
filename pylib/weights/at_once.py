"""How many numbers of a weight are worked on at a time: what that takes in memory does not grow with the weight."""

from __future__ import annotations

import torch

ON_CPU = 1 << 20
"""The working set stays in cache."""

ON_GPU = 1 << 23
"""Kernels take longer than their launches: an operation on as many bytes takes some 10 us on an H200."""


def at_once(device: torch.device) -> int:
    """Returns how many numbers to take at a time on a device."""
    return ON_CPU if device.type == "cpu" else ON_GPU
