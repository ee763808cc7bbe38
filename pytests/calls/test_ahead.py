"""Kernels that are compiled before they are needed, by other processes."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import lowbit
from lowbit import MatmulSpec, SpecError
from lowbit.passes.kernels.base import KernelRequest
from lowbit.passes.targets import parse_target
from lowbit.pylib.build import driver
from lowbit.pylib.build.ahead import Ahead
from lowbit.pylib.build.kernels import kernel_choices, kernels_up_to
from lowbit.pylib.matmul import Matmul

TARGET = parse_target("emulator:sm_80")
SPEC = MatmulSpec(64, 256, "u4", group_size=64)


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWBIT_CACHE_DIR", str(tmp_path))


def refuse(request: KernelRequest, name: str) -> Any:
    raise AssertionError(f"{name} is compiled: {request}")


def ahead(kernels: tuple[KernelRequest, ...]) -> int:
    compilers = Ahead(jobs=1)
    compilers.start(kernels)
    compilers.start(kernels)  # which are asked for once
    compilers.finish()
    return compilers.compiled


@pytest.mark.usefixtures("empty_cache")
def test_other_processes_fill_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they have compiled is not compiled again: neither by this process, nor by a later start."""
    kernels = kernels_up_to(SPEC, TARGET, 9)
    broken = replace(kernels[0], family="none")
    assert ahead((broken, *kernels)) == len(kernels) + 1  # the one without a family ends its process
    monkeypatch.setattr(driver, "_build", refuse)
    assert all(driver.is_kept(kernel) for kernel in kernels) and not driver.is_kept(broken)
    assert ahead(kernels) == 0
    mm = Matmul(SPEC, TARGET, None)
    mm.prepare(9)
    for m in (1, 8, 9):
        mm.kernel(m)
    with pytest.raises(AssertionError, match=r"m32 is compiled"):
        mm.kernel(17)


@pytest.mark.usefixtures("empty_cache")
def test_who_loads_a_kernel_waits_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, from whatever thread; a kernel that could not be compiled is an error then, and others stay there."""
    monkeypatch.setattr(driver, "_build", refuse)  # in this process
    kernels, waits = kernels_up_to(SPEC, TARGET, 9), list[str]()
    broken = replace(kernels[0], family="none")

    def wait() -> None:
        waits.append(threading.current_thread().name)
        compilers.finish()

    compilers = Ahead(1, wait)
    compilers.start([*kernels, broken])
    compilers.close()
    loaders = [threading.Thread(target=driver.load, args=(kernel, "by a thread")) for kernel in kernels]
    for thread in loaders:
        thread.start()
    for thread in loaders:
        thread.join()
    assert len(waits) == 1 and all(driver.is_kept(kernel) for kernel in kernels)
    with pytest.raises(AssertionError, match="broken is compiled"):
        driver.load(broken, "broken")
    assert len(waits) == 1 and compilers.compiled == len(kernels) + 1


@pytest.mark.usefixtures("empty_cache")
@pytest.mark.parametrize("variable", ["LOWBIT_NO_CACHE", "LOWBIT_DUMP"])
def test_nothing_is_compiled_ahead_without_a_cache(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "1")
    assert ahead(kernels_up_to(SPEC, TARGET, 1)) == 0


def test_prepared_without_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process compiles then, before the first call."""
    mm, built = Matmul(SPEC, TARGET, None), list[str]()
    mm.kernel(1)
    build = driver.load
    monkeypatch.setattr("lowbit.pylib.build.kernels.load", lambda r, name: built.append(name) or build(r, name))
    mm.prepare(16)
    assert [name.rpartition("_")[2] for name in built] == ["m8", "m16"]
    with pytest.raises(SpecError, match="rows=0"):
        mm.prepare(0)
    lowbit.compile(SPEC, "cpu").prepare(1)


@pytest.mark.parametrize("target", ["sm_90a", "sm_80"])
@pytest.mark.parametrize(
    "spec",
    [
        SPEC,
        replace(SPEC, permuted=True),
        replace(SPEC, compute="i8"),
        replace(SPEC, compute="i8", compute_from=20),
        replace(SPEC, outliers=True),
    ],
    ids=str,
)
def test_all_kernels_of_all_numbers_of_rows(spec: MatmulSpec, target: str) -> None:
    """Whatever a call launches is among them, and they end with the rows that are asked for."""
    on = parse_target(target)
    kernels, choices = kernels_up_to(spec, on, 300), kernel_choices(replace(spec, permuted=False), on)
    launched = {kernel for m in range(1, 301) for kernel in choices.launches(m)}
    before = {kernel for kernel in kernels if kernel.family in ("permute", "quantize")}
    assert launched == {*kernels} - before and len(kernels) == len({*kernels})
    assert len(before) == (2 if spec.permuted else bool(spec.compute))


def test_kernels_of_a_wide_range() -> None:
    """They are those that scale sums, which are others than those that round weights."""
    on, spec = parse_target("sm_90a"), MatmulSpec(4096, 4096, "u4", group_size=128, act="f16")
    plain, wide = ({*kernels_up_to(spec, on, 4096, wide)} for wide in (False, True))
    assert {kernel.family for kernel in wide} == {"decode"} and "prefill" in {kernel.family for kernel in plain}


def test_families_by_rows() -> None:
    spec = MatmulSpec(4096, 4096, "u4", group_size=128, act="bf16")
    families = kernel_choices(spec, parse_target("sm_90a")).families(4096)
    assert families[0][0] == 1 and [name for _, name in families][-1] == "prefill" and len(families) <= 4
    assert kernel_choices(spec, parse_target("sm_90a")).families(1) == families[:1]
