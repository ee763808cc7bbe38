"""The examples run and check themselves; without a GPU they do so in the emulator."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def load(name: str) -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / name))


@pytest.mark.parametrize("m", [1, 16, 21])
def test_f16_i6_matmul(m: int, capsys: pytest.CaptureFixture[str]) -> None:
    load("f16_i6_matmul.py")["main"](32, 256, m, "emulator:sm_80")
    assert "worst element" in capsys.readouterr().out


def test_f16_i6_matmul_would_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example's check fails for another weight: one code is off by one."""
    example = load("f16_i6_matmul.py")
    pack = example["pack"]

    def wrong(spec: Any, codes: Any, scales: Any) -> Any:
        codes = codes.copy()
        codes[5, 7] ^= 1
        return pack(spec, codes, scales)

    monkeypatch.setitem(example["main"].__globals__, "pack", wrong)
    with pytest.raises(SystemExit, match="wrong"):
        example["main"](32, 256, 16, "emulator:sm_80")


def test_demo_in_the_emulator(capsys: pytest.CaptureFixture[str]) -> None:
    load("demo.py")["show"]("emulator:sm_90a", 64, 256, 3, timed=False)
    assert "relative error" in capsys.readouterr().out


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    example = load("f16_i6_matmul.py")
    example["main"](4096, 4096, 13, example["this_machine"]())
