"""A stand-in for `passes.pipeline` that counts compilations, for tests of what is around it."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import ModuleType

import pytest

from lowbit.dialect.signature import Param, parse_grid
from lowbit.passes.kernels.base import KernelRequest
from lowbit.passes.launch import Launch

# Launches with three tokens write 3 to y[0]: enough to see that arguments arrive where they belong.
PTX = """
.version 8.0
.target sm_80
.address_size 64
.visible .entry kernel(.param .u64 y, .param .u32 m)
{
    .reg .b64 %a;
    .reg .b32 %m;
    .reg .b16 %h;
    ld.param.u64 %a, [y];
    ld.param.u32 %m, [m];
    cvta.to.global.u64 %a, %a;
    cvt.rn.f16.u32 %h, %m;
    st.global.b16 [%a], %h;
    ret;
}
"""


@dataclass
class FakeKernel:
    """Has what a CompiledKernel has."""

    launch: Launch
    stages: dict[str, str]

    def cubin(self) -> bytes:
        return b"cubin of " + self.stages["tile"].encode()


@dataclass
class FakePipeline:
    """Kernels that say what they were compiled for, and a list of these."""

    compiled: list[KernelRequest] = field(default_factory=list)

    def compile_kernel(self, request: KernelRequest, keep: bool, lines: bool) -> FakeKernel:
        self.compiled.append(request)
        params = (Param("y", "pointer"), Param("m", "i32"))
        launch = Launch("kernel", parse_grid((1, 1, 1)), threads=1, shared_bytes=0, params=params)
        return FakeKernel(launch, {"tile": f"{request.target} {tokens_of(request)}", "ptx": PTX})

    @property
    def tokens(self) -> list[int | None]:
        """The tokens that the kernels are for, None for one that dequantizes."""
        return [tokens_of(request) for request in self.compiled]


def tokens_of(request: KernelRequest) -> int | None:
    """The tokens of a request's schedule, where it has any."""
    return getattr(request.schedule, "tokens", None)


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> FakePipeline:
    """In the place of the real one, with an empty disk cache."""
    fake = FakePipeline()
    module = ModuleType("lowbit.passes.pipeline")
    module.compile_kernel = fake.compile_kernel  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lowbit.passes.pipeline", module)
    monkeypatch.setattr(sys.modules["lowbit.passes"], "pipeline", module, raising=False)
    monkeypatch.setenv("LOWBIT_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
    return fake
