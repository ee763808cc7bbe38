"""`benchmarks vllm` without vLLM and without a GPU: folders, requests, engines that fail, tables and figures."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from multiprocessing import Pipe
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from made_up_results import ENVIRONMENT

from benchmarks.serving import engine as engines
from benchmarks.serving import requests as measuring
from benchmarks.serving import run as running
from benchmarks.serving.checkpoints import GPTQ, make
from benchmarks.serving.engine import MEASURED, ROUTING, SETTINGS, UP, Failed, Process, Start, Vllm
from benchmarks.serving.page import BEGIN, END, publish, steps, title, users
from benchmarks.serving.requests import Load, Request, measure, online, prefill, step_ms, throughput
from benchmarks.serving.run import Job, read, serve, wave, write
from lowbit import LowbitConfig, QuantConfig, SpecError
from lowbit.pylib.checkpoints.checkpoint import open_checkpoint

pytest.importorskip("transformers")

SMALL = Load(50, prompt=6, output=4, steps=8, prefill=(3, 10), mixed=5, lengths=((2, 9), (3, 7)), batches=(1, 2))


class Slow:
    """An engine with a clock of its own: a step takes a millisecond, and one more for each prompt that it reads."""

    def __init__(self) -> None:
        self.now = 0.0
        self.running = self.most = 0

    async def answer(self, request: Request, stream: bool) -> AsyncIterator[int]:
        self.running += 1
        self.most = max(self.most, self.running)
        self.now += 1e-3
        for _ in range(request.tokens):
            await asyncio.sleep(0)
            self.now += 1e-3 / self.running  # which every one of them adds
            if stream:
                yield 1
        self.running -= 1
        if not stream:
            yield request.tokens


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Slow:
    found = Slow()
    monkeypatch.setattr(measuring, "time", SimpleNamespace(perf_counter=lambda: found.now))
    return found


# -- requests


@pytest.mark.parametrize("batch", [1, 3])
def test_the_time_of_a_step_is_without_that_of_prompts(slow: Slow, batch: int) -> None:
    assert asyncio.run(step_ms(slow, SMALL, batch)) == pytest.approx(1, rel=0.3)
    assert slow.most == batch


def test_prompts_are_read_at_once(slow: Slow) -> None:
    assert asyncio.run(prefill(slow, SMALL)) == pytest.approx(3 * 10 / (3e-3 + 1.1e-3), rel=0.3)


def test_requests_of_different_lengths(slow: Slow) -> None:
    requests = SMALL.different(1)
    assert len({len(request.prompt) for request in requests}) > 1 and len({r.tokens for r in requests}) > 1
    assert all(2 <= len(r.prompt) <= 9 and 3 <= r.tokens <= 7 and max(r.prompt) < 50 for r in requests)
    found = asyncio.run(throughput(slow, SMALL))
    given = SMALL.different(20)
    assert found["requests_per_s"] * sum(len(r.prompt) + r.tokens for r in given) == pytest.approx(
        5 * found["tokens_per_s"]
    )
    assert slow.most == 5


def test_users_wait_for_their_answers(slow: Slow) -> None:
    alone = asyncio.run(online(slow, SMALL, 1))
    assert alone["requests"] == 8 and slow.most == 1
    assert alone["ttft_ms"] == pytest.approx(2) and alone["tpot_ms"] == alone["tpot_p99_ms"] == pytest.approx(1)
    assert alone["output_tokens_per_s"] == pytest.approx(1e3 * 4 / 5)
    many = asyncio.run(online(slow, SMALL, 3))
    assert slow.most == 3 and many["requests"] == 12 and many["output_tokens_per_s"] > alone["output_tokens_per_s"]


def test_all_is_measured(slow: Slow) -> None:
    parts: list[Any] = []
    asyncio.run(measure(slow, SMALL, parts.append))
    assert [next(iter(part)) for part in parts] == ["step_ms", "prefill_tokens_per_s", "throughput", *["online"] * 4]
    assert list(parts[0]["step_ms"]) == ["1", "2"] and [*parts[-1]["online"]] == ["128"]


def test_short_answers_are_an_error() -> None:
    class Short(Slow):
        async def answer(self, request: Request, stream: bool) -> AsyncIterator[int]:
            yield 1

    with pytest.raises(RuntimeError, match="answered 1 tokens where 4 were asked for"):
        asyncio.run(online(Short(), SMALL, 1))


# -- folders


@pytest.mark.parametrize("model", ["tiny", "qwen3-30b-a3b"])
def test_gptq_is_what_lowbit_reads(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    if model != "tiny":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
        sizes = {"hidden_size": 256, "vocab_size": 64, "num_hidden_layers": 1}
        small = AutoConfig.for_model("qwen3_moe", **sizes, **heads, **experts)
        monkeypatch.setattr("benchmarks.serving.checkpoints.model_config", lambda *_: small)
    make(tmp_path, model, 1, GPTQ, "cpu")
    checkpoint = open_checkpoint(tmp_path)
    names = ["self_attn.q_proj", "mlp.gate_proj" if model == "tiny" else "mlp.experts.3.gate_proj"]
    assert {f"model.layers.0.{name}" for name in names} <= set(checkpoint.modules)
    about = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert "self_attn.q_proj" in about["modules_in_block_to_quantize"]
    if model != "tiny":
        assert "model.layers.0.mlp.gate.weight" in checkpoint.dense
    if model == "tiny":
        config = LowbitConfig(from_checkpoint=True)
        read_back: Any = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config, device_map="cpu")
        weight = read_back.model.layers[0].mlp.gate_proj.dequantize()
        assert float(weight.float().std()) == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize("weight", [None, QuantConfig("u4", 64)])
def test_folders_of_lowbit_and_dense_ones(weight: Any, tmp_path: Path) -> None:
    make(tmp_path, "tiny", 1, weight, "cpu")
    checkpoint = open_checkpoint(tmp_path)
    assert bool(checkpoint.modules) == (weight is not None)
    assert json.loads((tmp_path / "config.json").read_text())["num_hidden_layers"] == 1


def test_folders_are_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Here:
        def __init__(self, *_: Any) -> None: ...

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: Any) -> None: ...

        def submit(self, function: Any, folder: Path, *given: Any) -> Any:
            made.append((folder.name, *given))
            folder.mkdir()
            (folder / "config.json").write_text("{}")
            return SimpleNamespace(result=lambda: None)

    made: list[Any] = []
    monkeypatch.setattr(running, "ProcessPoolExecutor", Here)
    jobs = [Job("tiny", 2, name) for name in ("bf16", "fp8", "gptq", "gptq+humming", "u4:f8e4m3")]
    for _ in range(2):
        running.make_folders(jobs, tmp_path, lambda _: None)
    assert [name for name, *_ in made] == ["tiny-2-layers-bf16", "tiny-2-layers-gptq", "tiny-2-layers-u4-f8e4m3"]
    assert [given[:3] for _, *given in made[:2]] == [["tiny", 2, None], ["tiny", 2, GPTQ]]
    assert made[2][3].compute == "f8e4m3"


# -- engines


class Params(SimpleNamespace):
    pass


class FakeAsync:
    """vLLM's AsyncLLM."""

    ended = False

    @classmethod
    def from_engine_args(cls, args: Any) -> Any:
        cls.args = args
        return cls()

    async def generate(self, prompt: Any, params: Any, request_id: str) -> AsyncIterator[Any]:
        assert prompt == {"prompt_token_ids": [1, 2]} and params.ignore_eos and params.min_tokens == params.max_tokens
        for tokens in ([7], [], [8, 9]) if params.output_kind == "delta" else ([7, 8, 9],):
            yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens)])

    def shutdown(self) -> None:
        FakeAsync.ended = True


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Any:
    classes: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.engine": {},
        "vllm.engine.arg_utils": {"AsyncEngineArgs": lambda model, **given: (model, given)},
        "vllm.sampling_params": {
            "SamplingParams": Params, "RequestOutputKind": SimpleNamespace(DELTA="delta", FINAL_ONLY="final"),
        },
        "vllm.v1": {},
        "vllm.v1.engine": {},
        "vllm.v1.engine.async_llm": {"AsyncLLM": FakeAsync},
    }  # fmt: skip
    for name, has in classes.items():
        module = ModuleType(name)
        vars(module).update(has)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(FakeAsync, "ended", False)
    return FakeAsync


def start_of(folder: Path, **more: Any) -> Start:
    return Start("fp8", folder / "model", folder / "caches", folder / "log", {"quantization": "fp8"}, **more)


def test_vllm_is_asked_for_tokens(vllm: Any, tmp_path: Path) -> None:
    async def tokens(stream: bool) -> list[int]:
        return [some async for some in Vllm(start_of(tmp_path)).answer(Request([1, 2], 3), stream)]

    assert [asyncio.run(tokens(stream)) for stream in (True, False)] == [[1, 2], [3]]
    folder, given = vllm.args
    assert folder == str(tmp_path / "model") and given == SETTINGS | {"quantization": "fp8"}


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines' output stays where it is, and so does the environment."""
    monkeypatch.setattr(engines.os, "dup2", lambda *_: None)
    monkeypatch.setattr(engines.os, "environ", dict(os.environ))


@pytest.mark.usefixtures("here")
def test_a_process_starts_measures_and_ends(vllm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def measured(engine: Any, load: Any, found: Callable[[Any], None]) -> None:
        assert isinstance(engine, Vllm) and load == SMALL
        found({"step_ms": {"1": 2.0}})

    monkeypatch.setattr(engines, "measure", measured)
    ours, theirs = Pipe()
    ours.send(SMALL)
    ours.send("an end")
    engines._work(start_of(tmp_path, mixture=True), theirs)
    kinds = [ours.recv() for _ in range(3)]
    assert [kind for kind, _ in kinds] == [UP, MEASURED, MEASURED] and kinds[1][1] == {"step_ms": {"1": 2.0}}
    assert vllm.ended and engines.os.environ[ROUTING] == "uniform_random"
    assert engines.os.environ["VLLM_CACHE_ROOT"] == str(tmp_path / "caches/vllm")


@pytest.mark.usefixtures("here")
def test_an_engine_that_can_not_start_says_why(vllm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: Any) -> Any:
        raise ValueError("no memory")

    monkeypatch.setattr(vllm, "from_engine_args", fails)
    ours, theirs = Pipe()
    engines._work(start_of(tmp_path), theirs)
    assert ours.recv() == ("failed", "ValueError: no memory")


class FakeContext:
    """Processes that have sent what is in `sends`, and then end."""

    def __init__(self, sends: list[Any]) -> None:
        self.sends = sends

    def Pipe(self) -> Any:
        ours, theirs = Pipe()
        for each in self.sends:
            theirs.send(each)
        return ours, theirs

    def Process(self, **_: Any) -> Any:
        return SimpleNamespace(start=lambda: None, join=lambda *_: None, is_alive=lambda: False)


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[Any]], None]:
    return lambda sends: monkeypatch.setattr(engines, "get_context", lambda _: FakeContext(sends))


def test_what_a_process_sends(processes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "time", SimpleNamespace(perf_counter=lambda: 5.0))
    processes([(UP, 30.0), (MEASURED, {"a": 1}), (MEASURED, None)])
    process = Process(start_of(tmp_path), 1)
    assert process.up() == 25
    monkeypatch.setattr(process.connection.__class__, "send", lambda *_: None)
    assert list(process.measured(SMALL)) == [{"a": 1}]
    with pytest.raises(Failed, match="its process has ended; see "):
        process.up()


def test_a_process_that_says_nothing_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = FakeContext([])
    ends = Pipe()
    monkeypatch.setattr(context, "Pipe", lambda: (ends[0], SimpleNamespace(close=lambda: None)))
    monkeypatch.setattr(engines, "get_context", lambda _: context)
    with pytest.raises(Failed, match="nothing came for 0 s"):
        Process(start_of(tmp_path), 0).up()


def test_kernels_are_those_of_the_log(tmp_path: Path) -> None:
    start = start_of(tmp_path)
    assert start.kernels() == []
    line = "INFO [auto_gptq.py:430] Using MacheteLinearKernel for AutoGPTQLinearMethod\n"
    start.log.write_text(f"{line}{line}INFO Using 'MARLIN' WNA16 MoE backend.\n")
    assert start.kernels() == ["MacheteLinearKernel", "'MARLIN' WNA16 MoE backend"]


def test_what_a_start_was_spent_on_is_in_the_log(processes: Any, tmp_path: Path) -> None:
    """In that of this start: an earlier one has written to the same file."""
    start, lines = start_of(tmp_path), "INFO [x.py:1] Model loading took 4.6 GiB memory and {} seconds\n"
    start.log.write_text(lines.format("20.25"))
    processes([])
    process = Process(start, 1)
    assert process.parts() == {}
    with start.log.open("a") as log:
        log.write(lines.format("9.5") + "torch.compile took 6.20 s in total\n")
        log.write("INFO lowbit: 3 kernels were compiled; waited 0.1 s for them, and read them in 0.4 s\n")
        log.write("init engine (profile, create kv cache, warmup model) took 14.50 s (compilation: 6 s)\n")
    waits = {"lowbit waits for kernels": 0.1, "lowbit reads kernels": 0.4}
    assert process.parts() == {"loading": 9.5, "torch.compile": 6.2, **waits, "from loading to the end": 14.5}


# -- runs

PARTS: list[Any] = [
    {"step_ms": {"1": 2.0, "8": 3.0}},
    {"prefill_tokens_per_s": 4e4},
    {"throughput": {"requests_per_s": 40.0, "output_tokens_per_s": 6e3, "tokens_per_s": 3e4}},
    {"online": {"1": {"ttft_ms": 20.0, "tpot_ms": 2.0, "output_tokens_per_s": 480.0}}},
    {"online": {"8": {"ttft_ms": 30.0, "tpot_ms": 3.0, "output_tokens_per_s": 2e3}}},
]


class Made:
    """A process of an engine, which is up after 50 and then after 20 seconds; `fails` names those that do not start."""

    fails: tuple[str, ...] = ()
    running = most = 0

    def __init__(self, start: Start, limit: float) -> None:
        self.start, self.open = start, True
        Made.running += 1
        Made.most = max(Made.most, Made.running)

    def up(self) -> float:
        if self.start.name in Made.fails:
            raise Failed(f"{self.start.name}: no memory")
        warm = self.start.caches.exists()
        self.start.caches.mkdir(parents=True, exist_ok=True)
        return 20.0 if warm else 50.0

    def parts(self) -> Any:
        return {"loading": 5.0}

    def measured(self, load: Load) -> Iterator[Any]:
        yield from PARTS

    def close(self) -> None:
        Made.running -= self.open
        self.open = False


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> type[Made]:
    monkeypatch.setattr(running, "Process", Made)
    monkeypatch.setattr(running, "make_folders", lambda *_: None)
    monkeypatch.setattr(running, "PACKAGES", ())
    versions = {"vllm": "0.26.0", "torch": "2.11.0"}
    monkeypatch.setattr(running, "environment", lambda commit: ENVIRONMENT | {"versions": versions})
    monkeypatch.setattr(running, "find_spec", lambda _: True)
    monkeypatch.setattr(Made, "fails", ())
    monkeypatch.setattr(Made, "most", 0)
    return Made


def jobs(*names: str) -> list[Job]:
    return [Job("llama-3.1-8b", None, name) for name in names]


def served(folder: Path, *names: str, together: int = 1, warm: bool = True) -> list[Any]:
    return serve(jobs(*names), folder / "work", folder / "out.json", together, warm, 1, lambda _: None)


def test_engines_start_cold_and_then_warm(made: Any, tmp_path: Path) -> None:
    for _ in range(2):  # the second run empties the caches of the first
        one, other = served(tmp_path, "bf16", "u4")
    assert one["start_s"] == other["start_s"] == 50 and one["warm_start_s"] == 20
    assert one["start_parts_s"] == one["warm_start_parts_s"] == {"loading": 5.0}
    assert one["online"] == {**PARTS[3]["online"], **PARTS[4]["online"]} and one["step_ms"] == PARTS[0]["step_ms"]
    assert made.most == 1 and made.running == 0


def test_engines_that_start_together(made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made, "fails", ("gptq",))
    found = {record["name"]: record for record in served(tmp_path, "bf16", "gptq", "u4", together=3, warm=False)}
    assert made.most == 3 and made.running == 0
    assert found["gptq"]["failed"] == "gptq: no memory" and "step_ms" in found["u4"] and found["u4"]["together"] == 3


def test_measurements_are_replaced_by_model_and_format(made: Any, tmp_path: Path) -> None:
    served(tmp_path, "bf16", "u4")
    write([{"model": "llama-3.1-8b", "name": "u4", "start_s": 1.0}], tmp_path / "out.json", None)
    write([{"model": "tiny", "name": "u4"}], tmp_path / "out.json", None)
    known = read(tmp_path / "out.json")
    assert [(each["model"], each["name"]) for each in known["measurements"]] == [
        ("llama-3.1-8b", "bf16"), ("llama-3.1-8b", "u4"), ("tiny", "u4"),
    ]  # fmt: skip
    assert known["settings"]["max_num_seqs"] == 128 and known["measurements"][1]["start_s"] == 1


def test_a_mixture_is_routed_at_random(made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starts: list[Any] = []
    monkeypatch.setattr(running, "wave", lambda given, *_: starts.extend(given) or iter(()))
    for model in ("qwen3-30b-a3b", "llama-3.1-8b"):
        serve([Job(model, 2, "gptq+humming")], tmp_path, tmp_path / "o", 1, False, 1, lambda _: None)
    assert [start.mixture for _, start in starts] == [True, False]
    assert starts[0][1].settings == {"linear_backend": "humming", "moe_backend": "humming"}
    assert starts[0][1].folder.name == "qwen3-30b-a3b-2-layers-gptq"


def test_lowbit_is_measured_with_the_weights_of_others(tmp_path: Path) -> None:
    theirs, ours = (Job("llama-3.1-8b", 2, name).start(tmp_path, False) for name in ("gptq", "gptq+lowbit"))
    assert theirs.folder == ours.folder and theirs.caches != ours.caches
    assert not theirs.settings and ours.settings == {"quantization": "lowbit"}


def test_vllm_has_to_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "find_spec", lambda _: None)
    with pytest.raises(SpecError, match="pip install vllm"):
        served(tmp_path, "bf16")
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(SpecError, match="is no file of `benchmarks vllm`"):
        read(tmp_path / "other.json")


def test_an_engine_that_ends_while_it_is_measured(made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ends(self: Any, load: Load) -> Iterator[Any]:
        yield PARTS[0]
        raise Failed("u4: its process has ended")

    monkeypatch.setattr(made, "measured", ends)
    (job,) = jobs("u4")
    *_, record = wave([(job, job.start(tmp_path, False))], SMALL, True, 1, lambda _: None)
    assert record["failed"] == "u4: its process has ended" and "warm_start_s" not in record and made.running == 0


# -- pages


def test_tables(made: Any, tmp_path: Path) -> None:
    records = served(tmp_path, "bf16", "gptq", "u4:f8e4m3")
    records[2]["step_ms"] = {"1": 1.0, "8": 2.0}
    records[1] |= {"kernels": ["MacheteLinearKernel"], "together": 2}
    head, _, bf16, gptq, ours = steps(records).splitlines()
    assert [cell.strip() for cell in head.split("|")][2:4] == ["batch 1", "batch 8"]
    assert bf16.split("|")[1:4] == [" bf16 ", " 2.00 ms ", " 3.00 ms "] and bf16.split("|")[6:8] == [" 50 s ", " 20 s "]
    assert gptq.startswith("| GPTQ, 4 bits (Machete) | 2.00 ms (1.00) |") and gptq.split("|")[6] == "  "
    assert ours.startswith("| lowbit, u4, x in f8e4m3 | 1.00 ms (2.00) | 2.00 ms (1.50) | 40,000 (1.00) |")
    assert users(records).splitlines()[2] == "| bf16 | 20, 2.00; 480 | 30, 3.00; 2,000 |"
    del records[1]["throughput"], records[1]["online"]  # what was not measured
    assert steps(records).splitlines()[3].split("|")[5] == "  " and len(users(records).splitlines()) == 4
    assert title({"name": "fp8", "kernels": []}) == "fp8 (dynamic)" and title({"name": "u3"}) == "lowbit, u3"


def test_the_page_and_its_figure(made: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    known = served(tmp_path, "bf16", "gptq", "u4")
    write([{name: value for name, value in known[2].items() if name != "online"}], tmp_path / "out.json", None)
    (tmp_path / "docs/howto").mkdir(parents=True)
    (tmp_path / "docs/img").mkdir()
    page = tmp_path / "docs/howto/vllm.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    written, figure = publish(tmp_path / "out.json", tmp_path)
    text = written.read_text()
    assert text.startswith("before") and text.endswith("after\n") and "old" not in text
    assert "vLLM 0.26.0" in text and "(../results/out.json)" in text and f"(../img/{figure.name})" in text
    assert figure.name == "vllm_llama-3.1-8b.svg" and "lowbit, u4" in figure.read_text()
