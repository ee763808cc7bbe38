"""What every test shares: GPU tests skip without a GPU, Hypothesis has profiles, the cache is private.

    HYPOTHESIS_PROFILE=thorough pytest pytests/formats/test_packing.py
"""

from __future__ import annotations

import gc
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from lowbit.dialect.bindings import ir

# Tests compute little at a time: torch's threads would mostly wait for one another, and use a core each while they do.
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("default", max_examples=50, deadline=None)
settings.register_profile("ci", max_examples=50, deadline=None, derandomize=True, print_blob=True)
settings.register_profile("thorough", max_examples=2000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "default"))


def _gpu_missing() -> str:
    """Why GPU tests can't run here, or ''."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    return "" if torch.cuda.is_available() else "no NVIDIA GPU here"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fresh", action="store_true", help="use nothing that an earlier run has kept (pytests/kept.py)")


def pytest_configure(config: pytest.Config) -> None:
    """Say what is kept and where; workers of xdist are told by the same options and the same environment."""
    if config.getoption("--fresh"):
        return
    from pytests import kept

    folder = Path(os.environ.get(kept.FOLDER) or kept.default_folder()).resolve()  # tests may change the directory
    os.environ[kept.FOLDER] = str(folder)
    if "PYTEST_XDIST_WORKER" not in os.environ:
        kept.trim(folder)
    kept.use()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    reason = _gpu_missing() if gpu else ""
    if reason:
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason=f"gpu: {reason}"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage meanwhile: nearly all that comes to be there, modules and tests, lives to the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Leave what is there already out of garbage collection: MLIR, torch and thousands of tests, which live to the end,
    would be gone through each time that a kernel's operations fill the youngest generation. Of what comes later, the
    most is modules, and closures of the emulator that are gone after their launch: look at it more seldom."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 50)


@pytest.fixture(autouse=True, scope="session")
def private_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tests neither read nor fill the user's disk cache."""
    os.environ["LOWBIT_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def repo() -> Path:
    """The root of the checkout."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture
def context() -> Iterator[ir.Context]:
    """An MLIR context of the test's own, which is the current one meanwhile."""
    from lowbit.dialect.bindings import ir, new_context

    with new_context() as context, ir.Location.unknown():
        yield context
