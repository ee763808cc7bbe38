"""The examples run and check themselves; without a GPU they do so in the emulator."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated import matmul_is_right, run_matmul

from examples.kernel.problem import Problem
from examples.kernel.run import PAGE, VERSIONS, Row, check, compiled, measure, section, table
from lowbit.pylib.checkpoints.gguf.architectures import Source
from lowbit.pylib.reference import random_problem
from lowbit.pylib.runtime.devices import this_machine
from lowbit.pylib.weights.packed import pack

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


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


def test_exact_speculation(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = load("exact_speculation.py")["main"](60)
    assert first == second and len(first) == 65
    assert "; 0 guesses were right" not in capsys.readouterr().out


def test_exact_speculation_would_notice() -> None:
    """Where every guess is taken, tokens are others."""
    example = load("exact_speculation.py")
    text = example["Text"]
    append = text.append

    def trusting(self: Any, guesses: list[int]) -> int:
        right = append(self, guesses)
        self.tokens[-1] = (self.tokens[-1] + bool(guesses)) % 96
        return right

    text.append = trusting
    with pytest.raises(SystemExit, match="speculation gave other tokens"):
        example["main"](60)


@pytest.mark.parametrize("m", [1, 8, 13])
def test_silu_mul(m: int, capsys: pytest.CaptureFixture[str]) -> None:
    load("silu_mul.py")["main"](64, 128, m, "emulator:sm_90a")
    assert "worst element" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", [lambda p, x: x, lambda p, x: x * (1.0 / (1.0 + p.exp(x)))])
def test_silu_mul_would_notice(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example's check fails without the activation, and with one of the wrong sign."""
    example = load("silu_mul.py")
    monkeypatch.setitem(example["main"].__globals__, "silu", wrong)
    with pytest.raises(SystemExit, match="wrong"):
        example["main"](32, 128, 8, "emulator:sm_80")


def test_demo_in_the_emulator(capsys: pytest.CaptureFixture[str]) -> None:
    load("demo.py")["show"]("emulator:sm_90a", 64, 256, 3, timed=False)
    assert "relative error" in capsys.readouterr().out


def test_quantize_a_layer(capsys: pytest.CaptureFixture[str]) -> None:
    errors = load("quantize_a_layer.py")["main"](64, 256, "cpu")
    assert errors["GPTQ"] < errors["round to nearest"] < errors["GPTQ, 3 bits"] < 0.2
    assert capsys.readouterr().out.count("bits per weight") == len(errors)


def test_eight_bit_activations(capsys: pytest.CaptureFixture[str]) -> None:
    errors = load("eight_bit_activations.py")["main"](64, 512, 4, "cpu")
    assert 0.001 < errors["f8e4m3"] < errors["i8"] < 0.1
    assert errors["64 tokens"] == 0 and 0.001 < errors["65 tokens"] < 0.05
    assert capsys.readouterr().out.count("relative error") == 2


def test_outliers(capsys: pytest.CaptureFixture[str]) -> None:
    errors = load("outliers.py")["main"](64, 256, "cpu")
    assert errors["SpQR, 3 bits"] < 0.75 * errors["GPTQ, 4 bits"]
    assert errors["SpQR, 3 bits"] < 0.85 * errors["SpQR without outliers"]
    assert "% outliers" in capsys.readouterr().out


def test_quantize_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert 0.001 < load("quantize_a_model.py")["main"]("cpu") < 0.1
    output = capsys.readouterr().out
    assert "12 of 14 layers quantized" in output and "the same after loading: True" in output


def test_gguf_model_without_the_packages_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(SystemExit, match=r"this example needs gguf: pip install '\.\[hf\]'"):
        load("gguf_model.py")


def test_gguf_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The packed model is close to the dequantized one, and far from it where rows of q and k stay as in the file."""
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    example = load("gguf_model.py")
    assert example["main"]()
    monkeypatch.setattr(Source, "order", lambda *_: None)
    assert not example["main"]()


def test_mixture_of_experts() -> None:
    pytest.importorskip("transformers")
    assert load("mixture_of_experts.py")["main"](64, 64, 4, 3) < 0.25


def test_gated_mlp() -> None:
    for target in ("cpu", "emulator:sm_90a"):
        assert load("gated_mlp.py")["main"](128, 64, 5, target) < 2e-3


def test_import_gptq(capsys: pytest.CaptureFixture[str]) -> None:
    example = load("import_gptq.py")
    assert example["main"]()
    assert "u4[64, 256] f16 scale per 64, int zeros, permuted" in capsys.readouterr().out
    fixture = EXAMPLES.parent / "pytests/fixtures/checkpoints/gptq-3"
    assert example["main"](str(fixture), "model.layers.0.mlp.up_proj")


def test_import_gptq_would_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example's check fails where the file means something else."""
    example = load("import_gptq.py")
    write = example["write"]
    monkeypatch.setitem(example["main"].__globals__, "write", lambda folder: write(folder).roll(1, 1))
    assert not example["main"]()


def test_transformers_model(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    assert 0.01 < load("transformers_model.py")["main"](device="cpu") < 0.3
    assert "the same after loading: True" in capsys.readouterr().out


def test_own_format(capsys: pytest.CaptureFixture[str]) -> None:
    errors = load("own_format.py")["main"](128, 256, "cpu")
    assert 0 < errors["table"] < 0.99 * errors["integers"]
    assert "the table: -0." in capsys.readouterr().out


@pytest.mark.filterwarnings("error:.past_key_values. is deprecated:FutureWarning")
def test_serve(capsys: pytest.CaptureFixture[str]) -> None:
    """The cache of one request does not reach the next, and an answer is what `generate` says."""
    example = load("serve.py")
    first, second, third = example["main"](None, [[1, 2, 3], [7] * 20, [1, 2, 3]], 5)
    assert first == third and len(second) == 5
    assert "20 tokens in:" in capsys.readouterr().out


def test_serve_answers_with_the_likeliest_tokens(tmp_path: Path) -> None:
    """One call for the whole sequence says so, too, up to the rounding of bf16."""
    example = load("serve.py")
    model = example["load"](example["small_model"](str(tmp_path)), "cpu")
    server, prompt = example["Server"](model), [3, 1, 4, 1, 5]
    answer = list(server.answer(prompt, 6))
    with torch.no_grad():
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].float()
    behind = logits.amax(1) - logits[torch.arange(6), answer]
    assert len(answer) == 6 and behind.max() < 0.05 * logits.std()
    with pytest.raises(ValueError, match="200 tokens; 1 to 122 fit"):
        list(server.answer([1] * 200, 6))


def test_serve_with_vllm() -> None:
    """In a process of its own: on a CPU vLLM does not start where kernels were compiled before."""
    pytest.importorskip("vllm", reason="vLLM is not installed: docs/howto/vllm.md")
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    command = [sys.executable, EXAMPLES / "serve_with_vllm.py"]
    output = subprocess.check_output(command, env=os.environ | settings, text=True)
    assert output.count("is continued by [") == 2


def test_lora(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("peft")
    before, after = load("lora.py")["main"]("cpu", steps=12)
    assert after < 0.85 * before
    assert "the same after loading: True" in capsys.readouterr().out


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("m", [1, 8])
def test_kernel_in_steps(version: str, m: int) -> None:
    assert 0 < check(version, Problem(32, 2048, m), "emulator:sm_90a") <= 1


@pytest.mark.parametrize("version", ["v2", "v3", "v4"])
def test_kernel_in_steps_has_no_races(version: str) -> None:
    problem = Problem(16, 2048, 8)
    kernel, numbers = compiled(version, problem, "emulator:sm_90a"), random_problem(problem.spec, problem.m)
    y = run_matmul(kernel, problem.spec, numbers, racecheck=True)
    assert matmul_is_right(y, problem.spec, numbers)


@pytest.mark.parametrize(("n", "k"), [(24, 2048), (32, 1280), (5, 128)])
def test_last_step_takes_every_shape(n: int, k: int) -> None:
    assert 0 < check("v4", Problem(n, k, 3), "emulator:sm_80") <= 1


def test_kernel_in_steps_would_notice() -> None:
    """One code that is off by one is beyond what rounding explains."""
    problem = Problem(16, 2048, 8)
    codes, scales = problem.codes_and_scales
    wrong = codes.clone()
    wrong[5, 7] ^= 1
    vars(problem)["weight"] = pack(problem.spec, wrong, scales)
    with pytest.raises(SystemExit, match="v1 is wrong"):
        check("v1", problem, "emulator:sm_80")


def test_published_times_of_the_steps() -> None:
    """Fix: python -m examples.kernel --publish"""
    assert section() in PAGE.read_text()


def test_table_of_the_steps() -> None:
    rows = [asdict(Row("v0", "slow", 40.0, 39.0, 41.0)), asdict(Row("v1", "fast", 10.0, 9.0, 11.0))]
    about = {"gpu": "H200", "driver": "580", "versions": {"torch": "2.11"}, "commit": "abc", "date": "2026-11-22"}
    text = table({"n": 64, "k": 128, "m": 8, "environment": about, "rows": rows})
    assert "| v1 | fast | 10.0 | 0.25 |" in text and "64 x 128" in text and "H200, driver 580" in text


@pytest.mark.gpu
def test_kernel_in_steps_on_a_gpu() -> None:
    results = measure(Problem(1024, 1024, 8), this_machine())
    assert [row["name"] for row in results["rows"]] == [*VERSIONS, "lowbit", "cuBLAS"]
    assert table(results).count("\n") > len(VERSIONS)


@pytest.mark.gpu
def test_silu_mul_on_a_gpu() -> None:
    load("silu_mul.py")["main"](11008, 4096, 13, None)


@pytest.mark.gpu
def test_f16_i6_matmul_on_a_gpu() -> None:
    load("f16_i6_matmul.py")["main"](4096, 4096, 13, None)
