"""Devices of torch, as users name them."""

from __future__ import annotations

import torch

from lowbit.dialect.errors import SpecError, TargetError

KINDS = ("cpu", "cuda")


def check_torch_device(given: torch.device | str | int | None, name: str = "device=") -> None:
    """Raise SpecError unless kernels could run on a device, and TargetError if it is not in this machine.

    given   the device; None for the one where tensors are
    name    what the caller calls it
    """
    if given is None:
        return
    try:
        device = torch.device(given)
    except (RuntimeError, TypeError):
        raise SpecError(f"{name}{given} is no device; use cpu or cuda") from None
    if device.type not in KINDS:
        raise SpecError(f"{name}{given}: low-bit weights are made and multiplied on cpu and cuda; use one of them")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= count:
        found = f"{count} CUDA devices" if count else "no CUDA device"
        raise TargetError(f"{name}{given}: torch finds {found} here; use cpu{' or cuda:0' if count else ''}")
