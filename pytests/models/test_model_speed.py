"""`lowbit bench-model` runs models of transformers with random weights, and says what they take."""

from __future__ import annotations

import inspect
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import lowbit
from benchmarks import models
from benchmarks.model_page import BEGIN, END, publish
from benchmarks.models import Job, jobs_of, measure_models, read, waves, write
from benchmarks.peers import MODEL_PEERS, Peer
from benchmarks.tables import markdown
from lowbit import LowbitExperts, LowbitLinear, QuantConfig, SpecError
from lowbit.pylib.cli.bench_model import model_steps, quantizations
from lowbit.pylib.model_speed.attention import CAUSAL, GROUPED, attention_for, grouped_attention
from lowbit.pylib.model_speed.config import model_config
from lowbit.pylib.model_speed.measure import Measurement, Options, measure
from lowbit.pylib.model_speed.random_model import check_memory, random_model
from lowbit.pylib.model_speed.runner import Runner, Step, cache_argument
from lowbit.pylib.model_speed.split import kind_of
from lowbit.pylib.model_speed.table import aligned, speedup, split_table, table
from lowbit.pylib.nn.dense_experts import specs_of_experts
from lowbit.pylib.nn.gated_linear import GatedLinear
from lowbit.pylib.runtime.devices import available_memory
from lowbit.pylib.tune.model_shapes import MIXTURES, MODELS

transformers = pytest.importorskip("transformers")
U4 = QuantConfig("u4", group_size=64, method="rtn")
EAGER = Options(compiled=False, pdl=False, device="cpu", repeats=2)


def test_weights_are_made_packed() -> None:
    model = random_model(model_config("tiny", layers=1), U4, "cpu", lm_head=True)
    linears = {name: module.spec for name, module in model.named_modules() if isinstance(module, LowbitLinear)}
    assert {name.rpartition(".")[2] for name in linears} == {
        "q_k_v_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head"
    }  # fmt: skip
    assert all(spec.act == "bf16" and spec.weight == "u4" for spec in linears.values())
    assert {type(m) for m in model.modules() if isinstance(m, torch.nn.Linear)} == {LowbitLinear, GatedLinear}
    apart = random_model(model_config("tiny", layers=1), U4, "cpu", fuse=False)
    assert sum(isinstance(m, LowbitLinear) for m in apart.modules()) == 7
    with torch.no_grad():
        logits = model(torch.arange(5)[None]).logits
    assert logits.isfinite().all() and logits.std() > 0


@torch.no_grad()
def test_experts_are_made_packed() -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 32}
    config = transformers.Qwen3MoeConfig(**sizes, **experts, num_hidden_layers=1, vocab_size=64)
    model = random_model(config, U4, "cpu")
    assert isinstance(model.model.layers[0].mlp.experts, LowbitExperts)  # type: ignore[union-attr, index]
    assert model(torch.arange(5)[None]).logits.isfinite().all()


@torch.no_grad()
@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "gpt-oss-20b", "mixtral-8x7b"])
def test_mixtures_have_names(name: str) -> None:
    """Their sizes are those that the names tell of."""
    config = model_config(name, layers=1)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    layer, outside = (sum(p.numel() for p in m.parameters()) for m in (model.model.layers[0], model))
    whole = (outside + (model_config(name).num_hidden_layers - 1) * layer) / 1e9
    assert abs(whole - {"qwen3-30b-a3b": 30.5, "gpt-oss-20b": 20.9, "mixtral-8x7b": 46.7}[name]) < 0.1
    experts = model.model.layers[0].mlp.experts
    gate_up, down = specs_of_experts(experts, U4, "bf16")
    assert gate_up.n == 2 * down.k and gate_up.k == down.n == config.hidden_size


@torch.no_grad()
def test_mixtures_are_measured() -> None:
    found = list(measure(model_config("tiny-moe", layers=1), [None, U4], [Step(2, 1, 4), Step(1, 8)], EAGER))
    assert [(each.weight, each.tokens) for each in found] == [("bf16", 1), ("bf16", 8), ("u4", 1), ("u4", 8)]


@torch.no_grad()
def test_a_model_that_does_not_fit_the_memory_is_refused() -> None:
    """At this size the system would end the process: in f32 it is 1024 layers of 4 GB."""
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(1 << 15, 1 << 15, bias=False) for _ in range(1024)])
    with pytest.raises(SpecError, match=r"takes 4398.0 GB, and .* GB of memory are free; keep fewer layers"):
        check_memory(model, available_memory())
    check_memory(model[:0], 0)


class OlderModel(nn.Module):
    def forward(self, input_ids: torch.Tensor, past_key_values: object = None) -> torch.Tensor:
        return input_ids


def test_caches_have_the_name_that_a_model_gives_them() -> None:
    model = random_model(model_config("tiny", layers=1), None, "cpu")
    assert cache_argument(model) in inspect.signature(model.forward).parameters
    assert cache_argument(OlderModel()) == "past_key_values"


@pytest.mark.filterwarnings("error:.past_key_values. is deprecated:FutureWarning")
def test_steps_continue_a_cache() -> None:
    """A decoded token gives what the whole sequence gives at its last place."""
    model = random_model(model_config("tiny", layers=1), None, "cpu")
    runner = Runner(model, Step(1, 1, context=6), compiled=False)
    prompt = torch.randint(0, 256, (1, 6))
    runner._cache.reset()
    model(input_ids=prompt, **{cache_argument(model): runner._cache}, use_cache=True)
    runner.run()
    whole = model(torch.cat([prompt, runner._ids], 1)).logits[:, -1].argmax(-1)
    assert torch.equal(runner.output, whole) and runner.time(2) > 0


def test_a_prompt_begins_a_cache() -> None:
    """In a cache with room for more, it gives what the model gives without one."""
    config = model_config("tiny", layers=2)
    model = random_model(config, None, "cpu")
    runner = Runner(model, Step(2, 9), compiled=False)
    assert config._attn_implementation == CAUSAL and runner.step.capacity == 128
    config._attn_implementation = "eager"
    assert torch.equal(runner.output, model(runner._ids).logits[:, -1].argmax(-1))


def test_attention_fits_the_model() -> None:
    llama, windows = model_config("tiny"), transformers.Gemma3TextConfig(num_hidden_layers=2)
    assert attention_for(llama, tokens=1, context=8) == GROUPED
    assert attention_for(llama, tokens=8, context=0) == CAUSAL
    assert attention_for(llama, tokens=8, context=0, sinks=True) == GROUPED
    assert attention_for(llama, tokens=8, context=8) == attention_for(windows, tokens=8, context=0) == "sdpa"


@torch.no_grad()
@pytest.mark.parametrize("step", [Step(1, 9), Step(1, 1, context=9)])
def test_attention_is_that_of_gemma(step: Step) -> None:
    """Every other layer looks through a window, and scores are capped."""
    sizes = MODELS["tiny"].config | {"sliding_window": 4, "attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 1}
    assert_attention_is_eager(transformers.Gemma2Config(**sizes), step)


@torch.no_grad()
@pytest.mark.parametrize("step", [Step(1, 9), Step(1, 1, context=9)])
def test_attention_is_that_of_gpt_oss(step: Step) -> None:
    """Every other layer looks through a window, and heads have sinks."""
    assert_attention_is_eager(transformers.GptOssConfig(**MIXTURES["tiny-moe"].config, sliding_window=4), step)


def assert_attention_is_eager(config: transformers.PreTrainedConfig, step: Step) -> None:
    torch.manual_seed(0)
    model = random_model(config, None, "cpu").float()
    ids = torch.randint(0, 256, (1, 10))
    runner = Runner(model, step, compiled=False)
    runner._ids.copy_(ids[:, -step.tokens :])
    runner._cache.reset()
    if step.context:
        model(input_ids=ids[:, :9], **{cache_argument(model): runner._cache}, use_cache=True)
    runner.run()
    config._attn_implementation = "eager"
    read = ids if step.context else ids[:, 1:]
    assert torch.equal(runner.output, model(read).logits[:, -1].argmax(-1))


@pytest.mark.parametrize("bool_mask", [False, True])
def test_grouped_attention_is_attention(bool_mask: bool) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, heads, tokens, 8) for heads, tokens in ((6, 3), (2, 5), (2, 5)))
    mask = torch.ones(3, 5, dtype=torch.bool).tril(2).expand(2, 1, 3, 5)
    expected = scaled_dot_product_attention(query, key, value, mask, enable_gqa=True).transpose(1, 2)
    given = mask if bool_mask else torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    found, _ = grouped_attention(torch.nn.Module(), query, key, value, given, dropout=0.0)
    torch.testing.assert_close(found, expected)


def test_formats_and_steps_are_measured() -> None:
    steps = model_steps("1,2", "8", context=4)
    assert list(map(str, steps)) == ["decode, batch 1", "decode, batch 2", "prefill of 8"]
    told: list[str] = []
    found = list(measure(model_config("tiny", 1), [None, U4], steps, EAGER, told.append, with_split=True))
    assert [each.name for each in found] == ["bf16"] * 3 + ["u4 per 64"] * 3 and "u4: prefill of 8" in told
    assert all(each.seconds > 0 and each.split == {} for each in found) and found[0].nbytes > 1.5 * found[3].nbytes
    rows = table(found)
    assert [row[0] for row in rows] == ["weights", "bf16", "u4 per 64"] and len(set(map(len, rows))) == 1
    assert f"({speedup(found[3], found):.2f}x)" in rows[2][2] and rows[2][2] in aligned(rows)
    assert Measurement.from_dict(json.loads(json.dumps(found[3].to_dict()))) == found[3]
    split = split_table([replace(found[0], split={"attention": 5e-6}, seconds=7e-6)])
    assert split[1:] == [["attention", "5"], ["all, measured", "7"]]


def test_layers_that_no_group_divides_are_told() -> None:
    """With k = 96 in one layer, and 128 in all others."""
    config = model_config("tiny", layers=1)
    config.intermediate_size = 96
    (found,) = measure(config, [U4], [Step(1, 1, 4)], EAGER)
    assert found.dense == 1 and found.name == "u4 per 64, 1 of its layers in bf16"
    with pytest.raises(SpecError, match=r"layers.0.self_attn.q_proj: group_size=96 must divide k=128"):
        random_model(model_config("tiny", layers=1), QuantConfig("u4", 96, method="rtn"), "cpu")


def test_models_are_measured_side_by_side(tmp_path: Path) -> None:
    log: list[str] = []
    out = tmp_path / "models.json"
    jobs = [Job("tiny", 1, each, (Step(1, 1, 4), Step(1, 8)), EAGER) for each in (U4,)]
    wrong = replace(jobs[0], model="none")
    measure_models([*jobs, wrong], log.append, lambda measured: write(measured, "tiny", out, "abc"))
    assert [each.name for each in read(out)["tiny"]] == ["u4 per 64"] * 2
    assert [each.step for each in read(out)["tiny"]] == [Step(1, 1, 4), Step(1, 8)]
    assert any("model 'none' must be" in line for line in log)


class Half(Peer):
    """Another library: dense layers that torch.compile can't take, with 3 bytes that nobody sees."""

    name, model_format = "half", ("f16", 32)

    def linear(self, layer: torch.nn.Linear) -> torch.nn.Module:
        return HalfLinear(layer.in_features, layer.out_features, layer.bias is not None, dtype=torch.bfloat16)

    def hidden_bytes(self, module: torch.nn.Module) -> int:
        return 3 * isinstance(module, HalfLinear)


class HalfLinear(torch.nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return super().forward(input)


def test_models_with_layers_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take the places of the linear layers, and are run without torch.compile where it does not take them."""
    monkeypatch.setitem(MODEL_PEERS, "half", Half())
    (job,) = jobs_of("tiny", [], (Step(1, 1, 4),), replace(EAGER, compiled=True), layers=1, peers=["half"])
    model = job.make_model()
    assert sum(isinstance(m, HalfLinear) for m in model.modules()) == 7 and type(model.lm_head) is torch.nn.Linear
    runner, compiled = models._prepared(job, model, job.steps[0])
    assert not compiled
    found = models._labelled(models.measure_prepared(model, None, runner, job.options), job, model, compiled)
    assert found.name == "half f16 per 32, not compiled"
    assert found.nbytes == models.model_bytes(model) + 21
    with pytest.raises(SpecError, match="peer='none' must be one of 'torchao', 'bitsandbytes', 'gemlite'"):
        jobs_of("tiny", [], (), EAGER, peers=["none"])


def test_models_share_the_memory_in_turn() -> None:
    jobs = jobs_of("tiny", quantizations("bf16,u4,u4:i8", 64), (), EAGER)
    assert [job.name for job in jobs] == ["tiny, bf16", "tiny, u4", "tiny, u4:i8", "tiny, u4, lm_head"]
    assert waves(jobs) == [jobs] and jobs[0].gigabytes > jobs[1].gigabytes > models.WORKSPACE
    assert waves(jobs, 2 * jobs[0].gigabytes) == [jobs[:2], jobs[2:]]
    assert waves(jobs, 1) == [[job] for job in jobs]


def test_activations_of_8_bits_are_measured() -> None:
    (quantization,) = quantizations("u4:f8e4m3@65", 64)
    (found,) = measure(model_config("tiny", 1), [quantization], [Step(1, 8)], EAGER)
    assert found.name == "u4 per 64, x in f8e4m3@65"
    with pytest.raises(SpecError, match="'u4:i8@many' must end in a number of tokens, such as u4:i8@65"):
        quantizations("u4:i8@many", 64)
    with pytest.raises(SpecError, match="compute='f9' must be one of"):
        quantizations("u4:f9", 64)


def test_kernels_have_a_kind() -> None:
    names = ("prefill", "nvjet_tst_64x8", "triton_poi_fused__to_copy_attention_0", "flash_fwd", "Memcpy DtoD", "reduce")
    assert [kind_of(name) for name in names] == [
        "low-bit matmuls", "dense matmuls", "torch.compile's kernels", "attention", "copies", "other kernels"
    ]  # fmt: skip


def test_wrong_names_and_numbers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"must be a folder with a config.json.*did you mean 'Llama-3.1-8B'"):
        model_config("llama-3.1-8")
    with pytest.raises(SpecError, match=r"--batch=1,x must be none or numbers in 1\.\.1048576"):
        model_steps("1,x", "none", 4)
    with pytest.raises(SpecError, match=r"--prefill=1048577 must be none or numbers in 1\.\.1048576"):
        model_steps("none", "1048577", 4)
    with pytest.raises(SpecError, match=r"--prefill=9999.* must be none or numbers in 1\.\.1048576"):
        model_steps("none", "9" * 5000, 4)
    with pytest.raises(SpecError, match="leaves nothing to time"):
        model_steps("none", "none", 4)
    assert [step.tokens for step in model_steps("none", "8,16", 4)] == [8, 16]
    with pytest.raises(SpecError, match="u9"):
        quantizations("bf16,u9", 64)
    with pytest.raises(SpecError, match="no file of"):
        read(tmp_path / "missing.json")


def test_a_folder_stands_for_its_config(tmp_path: Path) -> None:
    model_config("tiny").save_pretrained(tmp_path)
    assert model_config(str(tmp_path), layers=1).num_hidden_layers == 1
    assert SimpleNamespace(**model_config(str(tmp_path)).to_dict()).hidden_size == 128
    assert lowbit.QuantConfig("u4", None, method="rtn") in quantizations("bf16,u4", 0)


def test_the_page_has_the_tables_of_the_results(repo: Path) -> None:
    """Fix: python -m benchmarks publish-models docs/results/models-*.json"""
    page = (repo / "docs" / "models.md").read_text()
    results = sorted(repo.glob("docs/results/models-*.json"))
    for head, *rows in (table(measured) for path in results for measured in read(path).values()):
        assert markdown(head, rows) in page
    figures = re.findall(r"\(img/(model_.*?.svg)\)", page)
    assert figures and {path.name for path in (repo / "docs" / "img").glob("model_*.svg")} == set(figures)


def test_a_page_is_published(repo: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "docs" / "img").mkdir(parents=True)
    (tmp_path / "docs" / "models.md").write_text(f"{BEGIN}\nold\n{END}\n")
    fast = Measurement("u4", 128, True, True, 10, 1, 1, 512, 0.25, split={"copies": 0.25})
    slow = Measurement("bf16", None, False, False, 40, 1, 1, 512, 0.5, split={"copies": 0.5})
    write([fast, slow], "tiny", tmp_path / "a.json", "1234567")
    write([fast, replace(slow, library="torchao")], "tiny", tmp_path / "b.json", "1234567")
    page, figure, compared = publish([tmp_path / "a.json", tmp_path / "b.json"], tmp_path)
    text = page.read_text()
    assert "old" not in text and "| u4 per 128 with lm_head | 0.00 | 4 (2.00x) |" in text
    assert text.count("What the time of decode, batch 1 goes to") == 1 and "### tiny, with other libraries" in text
    assert ">u4 per 128 with lm_head<" in figure.read_text() and compared.name == "model_tiny_libraries.svg"
