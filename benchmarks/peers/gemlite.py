"""gemlite: Triton kernels, tuned at the first call with a new m."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.cases import Case
from benchmarks.peers.peer import Call, Job, Layer, Peer, cores, finish, parameter_bytes
from lowbit.pylib.torch_types import TORCH

DEVIATION = 2e-2  # it splits k over blocks, which add up their sums in the output's type by atomics


class GemLite(Peer):
    """Unsigned integers of 1, 2, 4 and 8 bits."""

    name = "gemlite"
    package = "gemlite"
    install = "gemlite"
    model_format = "u4", 128

    def lacks(self, case: Case, m: int) -> str | None:
        t = case.spec.dtype
        if t.kind not in ("uint", "int") or t.bits not in (1, 2, 4, 8):
            return "integers of 1, 2, 4 and 8 bits only"
        if case.k % 32 or case.group_size is None or case.group_size % 32:
            return "k and the group size must be multiples of 32"
        return None

    def prepare(self, jobs: Sequence[Job]) -> None:
        """Fill Triton's disk cache with every kernel that tuning will try: 20 a job, one after the other."""
        with ProcessPoolExecutor(min(len(jobs), cores()), mp_context=get_context("spawn")) as pool:
            finish([pool.submit(_compile, case, m) for case, m in jobs])

    def layer(self, case: Case) -> Layer:
        from gemlite import DType, GemLiteLinear  # type: ignore[import-not-found]

        t, groups = case.spec.dtype, case.spec.groups
        act = TORCH[case.act]
        codes = torch.randint(0, t.codes, (case.n, case.k), dtype=torch.uint8, device="cuda")
        scales = (torch.rand(case.n, groups, device="cuda") * 0.01 + 0.005).to(act)
        # Without zeros: one for the whole weight, in the middle. 1 bit has no middle.
        zeros: Tensor | int = (torch.rand(case.n, groups, device="cuda") * (t.codes - 1)).to(act)
        if case.zeros == "none" and t.bits > 1:
            zeros = t.codes // 2
        kind = DType.FP16 if case.act == "f16" else DType.BF16
        layer = GemLiteLinear(
            t.bits,
            group_size=case.group_size,
            in_features=case.k,
            out_features=case.n,
            input_dtype=kind,
            output_dtype=kind,
        )
        layer.pack(codes, scales, zeros, None)

        def weight() -> Tensor:
            shift = zeros.float()[..., None] if isinstance(zeros, Tensor) else zeros
            grouped = codes.view(case.n, groups, -1).float() - shift
            return (grouped * scales.float()[..., None]).view(case.n, case.k)

        return Layer(
            label=f"uint{t.bits}, {'symmetric' if isinstance(zeros, int) else 'float zeros'}",
            call=layer,
            clone=lambda: copy.deepcopy(layer),
            weight=weight,
            bytes=parameter_bytes(layer),
            deviation=DEVIATION,
        )

    def linear(self, layer: nn.Linear) -> nn.Module:
        """4 bits with float zeros. What the package has measured on an H100 serves a Hopper GPU of another name."""
        import gemlite  # type: ignore[import-not-found]

        if torch.cuda.get_device_capability() == (9, 0) and not gemlite.core.GEMLITE_TRITON_CONFIG_CACHE:
            gemlite.load_config(str(Path(gemlite.__file__).parent / "configs" / "h100.json"))
        n, k, group = layer.out_features, layer.in_features, 128
        made = gemlite.GemLiteLinear(4, group, k, n, input_dtype=gemlite.DType.BF16, output_dtype=gemlite.DType.BF16)
        codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, device="cuda")
        scales = (torch.rand(n, k // group, device="cuda") * 0.01 + 0.005).bfloat16()
        zeros = (torch.rand(n, k // group, device="cuda") * 15).bfloat16()
        bias = None if layer.bias is None else torch.zeros(n, dtype=torch.bfloat16, device="cuda")
        made.pack(codes, scales, zeros, bias)
        return made


def _compile(case: Case, m: int) -> None:
    """Call the layer once, in a process of its own, with a tuner that runs each kernel once and measures nothing."""
    import triton.testing  # type: ignore[import-not-found]

    triton.testing.do_bench = _run_once
    call: Call = GemLite().layer(case).call
    call(torch.zeros(m, case.k, dtype=TORCH[case.act], device="cuda"))
    torch.cuda.synchronize()


def _run_once(kernel: Callable[[], object], **options: object) -> list[float]:
    """Stands in for `triton.testing.do_bench`: runs the kernel once, and returns three quantiles of no time."""
    kernel()
    return [0.0] * 3
