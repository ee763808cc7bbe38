"""Lets the kernels of torch.compile overlap with the kernels in front of them, as those of lowbit do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch

CACHE_TAG = "lowbit.overlap_launches"


@contextmanager
def overlap_launches() -> Iterator[None]:
    """Within, torch.compile makes kernels for programmatic dependent launch (PDL), on GPUs of sm_90 and later:

        compiled = torch.compile(model)
        with lowbit.overlap_launches():
            compiled(x)  # the first call, which compiles

    Each lets the next kernel start at once, and waits for all kernels before it ahead of its first access to memory. So
    a matmul behind a norm fetches its weight while the norm still waits for the matmul before.

    Leave torch's own switch, `torch._inductor.config.triton.enable_pdl`, off in a model with low-bit layers. With it, a
    kernel waits for the last one only where it reads what that one writes, and takes for granted that it has waited for
    all others. A kernel of lowbit lets the next one start before it has waited, so that could read too early.

    Does nothing without a GPU, and with versions of torch whose kernels can't overlap. Source: PTX ISA, griddepcontrol.
    """
    if not torch.cuda.is_available():
        yield
        return
    with _waiting_for_all():
        yield


@contextmanager
def _waiting_for_all() -> Iterator[None]:
    """Within, kernels of torch.compile overlap; those that were compiled otherwise are not taken from its cache."""
    import torch.compiler.config as compiler
    from torch._inductor import config
    from torch._inductor.codegen.triton import TritonKernel

    if not (hasattr(config.triton, "enable_pdl") and hasattr(TritonKernel, "_filter_pdl")):
        yield
        return
    tag: Any = {"cache_key_tag": f"{compiler.cache_key_tag} {CACHE_TAG}"}
    unpatched = TritonKernel._filter_pdl
    TritonKernel._filter_pdl = cast(Any, _wait_first)
    try:
        # Combined kernels do not come by `_filter_pdl`.
        with config.patch({"triton.enable_pdl": True, "combo_kernels": False}), compiler.patch(tag):  # type: ignore[attr-defined]
            yield
    finally:
        TritonKernel._filter_pdl = unpatched


def _wait_first(kernel: Any, code: Any) -> None:
    """Begin a kernel by letting the next one start and waiting for all before it, in place of where torch does so."""
    if kernel._enable_pdl_codegen():
        kept = [line for line in code._lines if not (isinstance(line, str) and "gdc_" in line)]
        code._lines = [kernel.GDC_LAUNCH, kernel.GDC_WAIT, *kept]
