"""Kernels of torch.compile that overlap with those before and after them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.compiler.config as compiler
from torch import Tensor, nn
from torch._inductor import config
from torch._inductor.codegen.triton import TritonKernel
from torch._inductor.utils import IndentedBuffer, run_and_get_code

import lowbit
from lowbit.pylib.runtime import overlap

LAUNCH, WAIT = TritonKernel.GDC_LAUNCH, TritonKernel.GDC_WAIT
LOOP = ["for i in range(4):", "    x += tl.load(p + i)"]


def written(enabled: bool) -> list[Any]:
    """What becomes of a loop in front of which torch waits, and behind which it lets the next kernel start."""
    code = IndentedBuffer()
    code.writelines(["x = 0", WAIT, "for i in range(4):"])
    with code.indent():
        code.writelines(["x += tl.load(p + i)", WAIT])
    code.writelines([LAUNCH, "tl.store(q, x)"])
    kernel = SimpleNamespace(_enable_pdl_codegen=lambda: enabled, GDC_WAIT=WAIT, GDC_LAUNCH=LAUNCH)
    cast(Any, TritonKernel)._filter_pdl(kernel, code)
    return code._lines


def test_kernels_wait_for_all_before_they_touch_memory() -> None:
    by_torch, tag = written(True), compiler.cache_key_tag
    assert by_torch.index(WAIT) < by_torch.index(LAUNCH)
    with overlap._waiting_for_all():
        assert config.triton.enable_pdl and not config.combo_kernels and overlap.CACHE_TAG in compiler.cache_key_tag
        assert written(True) == [
            LAUNCH,
            WAIT,
            "x = 0",
            "for i in range(4):",
            "    x += tl.load(p + i)",
            "tl.store(q, x)",
        ]
    assert written(True) == by_torch and not config.triton.enable_pdl and compiler.cache_key_tag == tag


def test_kernels_that_do_not_overlap_are_left_alone() -> None:
    """Those of templates are launched behind all others, and have no such line."""
    unfiltered = [
        "x = 0",
        WAIT,
        "for i in range(4):",
        "    x += tl.load(p + i)",
        f"    {WAIT}",
        LAUNCH,
        "tl.store(q, x)",
    ]
    with overlap._waiting_for_all():
        assert written(False) == unfiltered


def test_an_error_within_changes_nothing_behind() -> None:
    original = TritonKernel._filter_pdl
    with pytest.raises(ZeroDivisionError), overlap._waiting_for_all():
        assert TritonKernel._filter_pdl is not original
        raise ZeroDivisionError
    assert TritonKernel._filter_pdl is original and not config.triton.enable_pdl


class Block(nn.Module):
    """Low-bit layers whose results are read by kernels behind other layers."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.down = (nn.Linear(1024, 1024, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        normed = nn.functional.rms_norm(x, (1024,))
        q, k = self.q(normed), self.k(normed)
        return x + self.down(nn.functional.silu(q) * 2) + k


@pytest.mark.gpu
def test_the_same_results_on_a_gpu() -> None:
    model = nn.Sequential(*(Block() for _ in range(4))).half().cuda()
    lowbit.quantize_(model, lowbit.QuantConfig("u4", 128))
    x = torch.randn(2, 1024, dtype=torch.float16, device="cuda")
    run: Callable[[Tensor], Tensor] = torch.compile(model)
    with torch.no_grad(), lowbit.overlap_launches():
        expected = model(x)
        first, sources = run_and_get_code(run, x)
    kernels = [part for source in sources for part in source.split("def triton_")[1:]]
    assert kernels and all(part.index(LAUNCH) < part.index(WAIT) < part.index("tl.load") for part in kernels)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        output = run(x)
    assert float((first - expected).float().norm() / expected.float().norm()) < 2e-3
    for _ in range(100):
        graph.replay()
        assert torch.equal(output, first)
