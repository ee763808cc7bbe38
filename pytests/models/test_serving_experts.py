"""What servers have ready before the first call of experts."""

from __future__ import annotations

from typing import Any

import pytest

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.base import KernelRequest
from lowbit.pylib.experts import by_kernel
from lowbit.pylib.integrations.serving import experts
from lowbit.pylib.integrations.serving.experts import ExpertKernels
from lowbit.pylib.runtime import expert_matmul
from lowbit.pylib.runtime.expert_matmul import spec_of_experts

TARGET, EXPERTS, TOKENS = "emulator:sm_90a", 2, 150
COMPUTE: dict[str, dict[str, Any]] = {"f16": {}, "i8": {"compute": "i8"}}


@pytest.mark.parametrize("compute", COMPUTE)
def test_rows_are_ordered_by_kernels_that_are_ready(compute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of gate_up, whose kernels for many slots take a row of x for each; down's are in order as they are."""
    loaded, gathered = list[str](), list[int]()
    monkeypatch.setattr(expert_matmul, "load", lambda request, name: loaded.append(name))
    gather = by_kernel.gather_by_kernel
    monkeypatch.setattr(
        expert_matmul, "gather_by_kernel", lambda x, *rest: gathered.append(x.nbytes) or gather(x, *rest)
    )
    gate_up = spec_of_experts(MatmulSpec(128, 256, "u4", 128, epilogue="silu_mul", **COMPUTE[compute]), EXPERTS)
    down = spec_of_experts(MatmulSpec(256, 64, "u4", 64, **COMPUTE[compute]), EXPERTS)
    kernels = ExpertKernels(gate_up, down, TARGET, 2)
    monkeypatch.setattr(ExpertKernels, "_few", lambda self: None)
    kernels.prepare(TOKENS)
    assert len(loaded) == len(kernels.kernels(TOKENS)) > 2
    assert set(gathered) == {256 if compute == "i8" else 512}  # bytes of a row of x as it is multiplied


def test_each_kernel_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for each number of slots, of which a server has tens of thousands."""
    asked = list[KernelRequest]()
    ask = experts.request
    monkeypatch.setattr(experts, "request", lambda *about: asked.append(ask(*about)) or asked[-1])
    gate_up = spec_of_experts(MatmulSpec(128, 256, "u4", 128, epilogue="silu_mul"), EXPERTS)
    down = spec_of_experts(MatmulSpec(256, 64, "u4", 64), EXPERTS)
    kernels = ExpertKernels(gate_up, down, "sm_90a", 2)
    found = kernels.kernels(TOKENS)
    assert len(asked) < 2 * len(found) and set(asked) <= set(found)
