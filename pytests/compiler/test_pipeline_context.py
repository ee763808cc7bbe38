"""What kernels share that one thread compiles: an MLIR context, and when a kernel's program is verified."""

from __future__ import annotations

import threading

import pytest

from lowbit.dialect.bindings import ir
from lowbit.dialect.errors import PassError
from lowbit.dialect.layouts.fragments import MMA_M16N8_D, MMA_M16N8K16_A, MMA_M16N8K16_B_NK
from lowbit.dialect.layouts.layout import spatial
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes import pipeline
from lowbit.passes.builder import Program
from lowbit.passes.builder.program import verified_later
from lowbit.passes.kernels.base import KernelRequest
from lowbit.passes.pipeline import compile_kernel, lower_program
from lowbit.passes.targets import parse_target
from lowbit.pylib.build.kernels import kernel_choices


def requests() -> list[KernelRequest]:
    target = parse_target("sm_90a")
    specs = (MatmulSpec(48, 256, "u4", 64), MatmulSpec(48, 256, "nf4", 64), MatmulSpec(32, 128, "u4", 32, compute="i8"))
    return [request for spec in specs for request in kernel_choices(spec, target).launches(9)]


def test_a_kernel_is_the_same_in_a_used_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "_MOST_KERNELS", 0)
    alone = list(map(compile_kernel, requests()))
    monkeypatch.setattr(pipeline, "_MOST_KERNELS", 100)
    assert list(map(compile_kernel, requests())) == alone
    first = pipeline._spare.context
    assert list(map(compile_kernel, reversed(requests()))) == alone[::-1]
    assert first is not None and pipeline._spare.context is first


def test_a_context_is_left_after_some_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "_MOST_KERNELS", 2)
    monkeypatch.setattr(pipeline, "_spare", pipeline._Spare())
    seen = []
    for _ in range(5):
        compile_kernel(requests()[0])
        seen.append(pipeline._spare.context)
    assert seen[0] is seen[1] is not seen[2] is seen[3] is not seen[4]


def test_a_context_is_left_after_an_error() -> None:
    compile_kernel(requests()[0])
    with pytest.raises(PassError, match="shared memory"):
        lower_program(too_large, parse_target("sm_80"))
    assert pipeline._spare.context is None


def test_threads_have_contexts_of_their_own() -> None:
    compile_kernel(requests()[0])
    found = []

    def compile_there() -> None:
        compile_kernel(requests()[1])
        found.append(pipeline._spare.context)

    thread = threading.Thread(target=compile_there)
    thread.start()
    thread.join()
    assert found[0] is not None and found[0] is not pipeline._spare.context


def test_a_wrong_program_is_refused_with_its_stage() -> None:
    """One that a kernel's family has made, which is verified at the end of the stage."""

    def wrong() -> ir.Module:
        with verified_later():
            return wrong_program().module

    with pytest.raises(PassError, match=rf"stage tile is wrong: {__file__}:\d+: 'lowbit\.mma' op element of c"):
        pipeline._compile(wrong, parse_target("sm_80"), None, keep=False)
    with pytest.raises(PassError, match="program wrong is wrong"):
        wrong_program()


def too_large() -> Program:
    p = Program("large", 32, (1, 1, 1), {"y": "pointer"})
    with p:
        y = p.global_view(p["y"], "f16", (1 << 16, 1))
        buffer = p.alloc_shared("f16", (1 << 17, 1))
        p.store(p.load(buffer, (0, 0), spatial(32, 1)), y, (0, 0))
    return p


def wrong_program() -> Program:
    """Its sums are in f16, and those of its products in f32."""
    p = Program("wrong", 32, (1, 1, 1), {"x": "pointer"})
    with p:
        x = p.global_view(p["x"], "f16", (16, 64))
        a, b = p.load(x, (0, 0), MMA_M16N8K16_A), p.load(x, (0, 0), MMA_M16N8K16_B_NK)
        p.mma(a, b, p.constant(0.0, "f16", MMA_M16N8_D))
    return p
