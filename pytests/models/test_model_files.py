"""`lowbit quantize` and `lowbit inspect` on folders: those of transformers, plain files, and other libraries'."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner

import lowbit
from lowbit.pylib.checkpoints.quantize_files import Request, quantize_folder
from lowbit.pylib.cli.main import app
from lowbit.pylib.nn.outlier_rows import OutlierRows, bars


def lines(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(each) for each in arguments])
    assert result.exit_code == code, result.output
    return result.output


def rows(*arguments: object) -> dict[str, dict[str, Any]]:
    result = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    assert result.exit_code == 0, result.output
    return {row["name"]: row for row in json.loads(result.stdout)}


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    tensors = {
        "embed.weight": torch.randn(50, 64),
        "layers.0.up.weight": torch.randn(96, 64),
        "layers.0.up.bias": torch.randn(96),
        "layers.0.norm.weight": torch.ones(64),
        "layers.0.odd.weight": torch.randn(16, 40),
        "lm_head.weight": torch.randn(50, 64),
    }
    save_file({name: t.bfloat16() for name, t in tensors.items()}, tmp_path / "plain.safetensors")
    return tmp_path / "plain.safetensors"


def test_products_in_8_bits(plain: Path, tmp_path: Path) -> None:
    given = ("--compute", "f8e4m3", "--fold-scales", "--compute-from", 65)
    for weight, out in (("u4", tmp_path / "u4"), ("nvfp4", tmp_path / "nvfp4")):
        group = ("-g", 32) if weight == "u4" else ()
        rows("quantize", plain, "-w", weight, *group, *given, "--out", out)
        spec = lowbit.open_checkpoint(out).load("layers.0.up").spec
        assert (spec.compute, spec.fold_scales, spec.compute_from) == ("f8e4m3", True, 65)
    assert "did you mean 'i8'" in lines("quantize", plain, "--compute", "f8", "--out", tmp_path / "none", code=1)


def test_reasons_name_options(plain: Path, tmp_path: Path) -> None:
    table = lines("quantize", plain, "-w", "u4", "-g", 32, "--out", tmp_path / "low")
    assert "dense: group_size=32 must divide k=40; try 20 or 40, or 0 for one scale per row" in table


def test_plain_files(plain: Path, tmp_path: Path) -> None:
    out = tmp_path / "low"
    found = rows("quantize", plain, "-w", "u4", "-g", 32, "--out", out)
    assert set(found) == {"embed", "layers.0.up", "layers.0.odd", "lm_head"}
    assert found["layers.0.up"]["reason"] == "" and found["layers.0.up"]["format"] == "u4 per 32, rtn"
    assert "embed" in found["embed"]["reason"] and "lm_head" in found["lm_head"]["reason"]
    assert "must divide k=40" in found["layers.0.odd"]["reason"]
    seen = rows("inspect", out)
    assert seen["layers.0.up"]["error"] == found["layers.0.up"]["error"] and seen["embed"]["reason"]
    assert seen["layers.0.up"]["format"] == "u4 per 32, bf16 scales, int zeros"
    compared = rows("inspect", out, "--against", plain)
    assert compared["layers.0.up"]["error"] == pytest.approx(found["layers.0.up"]["error"], rel=1e-3)
    assert "layers.0.up" in lines("inspect", out)
    for other in (out, CHECKPOINTS / "gptq-4", CHECKPOINTS / "fp8-block"):
        message = lines("inspect", out, "--against", other, code=1)
        assert f"{other} has no weight in 16 or 32 bits of any layer of {out}, layers.0.up for one" in message
    assert "has no weight" in lines("inspect", CHECKPOINTS / "fp8-block", "--against", CHECKPOINTS / "ct-fp8", code=1)
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"up": nn.Linear(64, 96)})])}).bfloat16()
    lowbit.load_checkpoint(model, out, ignore=["embed*", "lm_head*", "*norm*", "*odd*"])
    layer = model["layers"][0]["up"]  # type: ignore[index]
    assert isinstance(layer, lowbit.LowbitLinear) and layer(torch.ones(1, 64).bfloat16()).isfinite().all()


def test_models_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=1, vocab_size=50)
    source, out = tmp_path / "dense", tmp_path / "low"
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(source)
    (source / "tokenizer.txt").write_text("beside the weights")
    (source / "1_Pooling").mkdir()
    (source / "1_Pooling/config.json").write_text("{}")
    (source / "modules.json").write_text('[{"path": ""}, {"path": "1_Pooling"}, {"path": "../dense"}]')
    given = ("quantize", source, "-w", "u4", "-g", 32, "--method", "hqq", "--skip", "*.down_proj", "--out", out)
    found = rows(*given)
    low_bit = {name: row for name, row in found.items() if not row["reason"]}
    kinds = {name.rpartition(".")[2] for name in low_bit}
    assert kinds == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"}
    assert all(0 < row["error"] < 0.2 for row in low_bit.values())
    assert found["model.layers.0.mlp.down_proj"]["reason"] == "config['*.down_proj'] is None"
    assert found["lm_head"]["option"] == "lm_head" and found["model.embed_tokens"]["option"] == "embeddings"
    shown = lines(*given[:-1], tmp_path / "shown")
    assert "--lm-head quantizes it" in shown and "--embeddings quantizes it" in shown  # as the command has them
    assert (out / "tokenizer.txt").read_text() == "beside the weights"
    assert (out / "1_Pooling/config.json").exists() and not (out / "dense").exists()
    assert {n: row["error"] for n, row in rows("inspect", out).items()} == {n: r["error"] for n, r in found.items()}
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    with torch.no_grad():
        assert model(torch.arange(5)[None]).logits.isfinite().all()
    assert "has something in it" in lines(*given, code=1)
    assert "--skip lost matches no linear layer" in lines(*given[:-1], tmp_path / "none", "--skip", "lost", code=1)
    assert f"{out} is quantized already" in lines("quantize", out, "--out", tmp_path / "twice", code=1)
    fused = rows(*given[:-1], tmp_path / "fused", "--fuse", "--embeddings", "--lm-head")
    together = fused["model.layers.0.self_attn.q_k_v_proj"]
    parts = [found[f"model.layers.0.self_attn.{part}_proj"]["error"] for part in "qkv"]
    assert together["shape"] == [128, 64] and min(parts) < together["error"] < max(parts)
    assert 0 < fused["model.embed_tokens"]["error"] < 0.2 and fused["lm_head"]["error"]
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "fused")
    assert isinstance(again.model.layers[0].mlp.gate_up_proj, lowbit.LowbitLinear)


def test_layers_that_get_another_group_size(tmp_path: Path) -> None:
    """The table and a line below it say which layers are not as asked, fused layers as well."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=1, vocab_size=50)
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path / "dense")
    given = ("quantize", tmp_path / "dense", "-w", "u4", "-g", 32, "--method", "rtn")
    shown = lines(*given, "--out", tmp_path / "one")
    assert [line.split()[0] for line in shown.splitlines() if line.endswith("not u4 per 32, as asked")] == [
        "model.layers.0.mlp.down_proj"
    ]
    assert shown.splitlines()[-1] == "1 of 7 layers not u4 per 32, as asked: that does not divide their columns"
    found = rows(*given[:5], 48, *given[6:], "--fuse", "--out", tmp_path / "two")
    asked = {name.rpartition(".")[2]: row["asked"] for name, row in found.items() if not row["reason"]}
    changed = dict.fromkeys(("q_k_v_proj", "o_proj", "gate_up_proj"), "u4 per 48")
    assert asked == {**changed, "down_proj": ""}
    q4_k = lines("quantize", tmp_path / "dense", "-w", "q4_k", "--out", tmp_path / "three")
    assert "not u4 per 32 in blocks of 8 groups, as asked" in q4_k


def folder_with_tokenizer(folder: Path) -> Path:
    """Saves a small Llama with a tokenizer of a few words."""
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    words = {"?": 0, "the": 1, "cat": 2, "sat": 3, "on": 4, "mat": 5}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(folder)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=1, vocab_size=50)
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder


TEXT = "the cat sat on the mat " * 20


def test_text_as_calibration(tmp_path: Path) -> None:
    """The command cuts a file into inputs; quantize_ takes texts, with the tokenizer beside the model or another."""
    transformers = pytest.importorskip("transformers")
    source, text = folder_with_tokenizer(tmp_path / "dense"), tmp_path / "train.txt"
    text.write_text(TEXT)
    given = ("quantize", source, "-w", "u4", "-g", 32, "--method", "gptq")
    found = rows(*given, "--text", text, "--samples", 3, "--length", 40, "--out", tmp_path / "low")
    assert {row["format"] for row in found.values() if not row["reason"]} == {"u4 per 32, gptq"}
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "low")
    tokens = torch.tensor([[1, 2, 3, 4, 1, 5] * 20])
    expected = transformers.AutoModelForCausalLM.from_pretrained(source)
    config = lowbit.QuantConfig("u4", 32, method="gptq")
    lowbit.quantize_(expected, config, calibration=[tokens[:, 40 * i : 40 * i + 40] for i in range(3)])
    name = "model.layers.0.self_attn.q_proj"
    assert torch.equal(model.get_submodule(name).codes, expected.get_submodule(name).codes)
    for tokenizer in (None, transformers.AutoTokenizer.from_pretrained(source)):
        model = transformers.AutoModelForCausalLM.from_pretrained(source)
        lowbit.quantize_(model, config, calibration=[TEXT[:23]], tokenizer=tokenizer)
        other = transformers.AutoModelForCausalLM.from_pretrained(source)
        lowbit.quantize_(other, config, calibration=[tokens[:, :6]])
        assert torch.equal(model.get_submodule(name).codes, other.get_submodule(name).codes)
    with pytest.raises(lowbit.QuantizeError, match="calibration= has a text without tokens: ''; leave it out"):
        lowbit.quantize_(transformers.AutoModelForCausalLM.from_pretrained(source), config, calibration=[""])
    with pytest.raises(lowbit.QuantizeError, match=r"no tokenizer is found for 'Sequential.*pass tokenizer="):
        lowbit.quantize_(torch.nn.Sequential(torch.nn.Linear(64, 64)).half(), config, calibration=["a"])
    assert "drop it" in lines(*given[:6], "--method", "rtn", "--text", text, "--out", tmp_path / "a", code=1)
    assert "name a file of text with --text" in " ".join(lines(*given, "--out", tmp_path / "b", code=1).split())


def test_text_without_a_tokenizer(tmp_path: Path) -> None:
    source, text = folder_with_tokenizer(tmp_path / "dense"), tmp_path / "train.txt"
    text.write_text(TEXT)
    given = ("quantize", source, "--method", "gptq", "--text", text, "--out", tmp_path / "low")
    (source / "tokenizer.json").write_text("{")
    message = "has no tokenizer that can be read, for --text: copy tokenizer.json"
    assert message in " ".join(lines(*given, code=1).split())
    for file in source.glob("tokenizer*"):
        file.unlink()
    assert message in " ".join(lines(*given, code=1).split())


def test_errors_of_experts(tmp_path: Path) -> None:
    """Dense files have them by part, in a module that has another name in the model."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.MixtralConfig(**sizes, num_hidden_layers=1, vocab_size=50, num_local_experts=2)
    torch.manual_seed(0)
    transformers.MixtralForCausalLM(config).bfloat16().save_pretrained(tmp_path / "dense")
    found = rows("quantize", tmp_path / "dense", "-g", 32, "--method", "rtn", "--out", tmp_path / "low")
    experts = [row for name, row in found.items() if ".experts." in name]
    assert len(experts) == 4 and all(0.05 < row["error"] < 0.1 for row in experts)
    assert "MixtralTopKRouter" in found["model.layers.0.block_sparse_moe.gate"]["reason"]


def test_recipes_with_a_name(plain: Path, tmp_path: Path) -> None:
    found = rows("quantize", plain, "-w", "q4_1", "--out", tmp_path / "low")
    assert found["layers.0.up"]["format"].startswith("u4 per 32")
    assert rows("inspect", tmp_path / "low")["layers.0.up"]["format"] == "u4 per 32, f16 scales, offset zeros"
    given = ("quantize", plain, "-w", "q4_1", "-g", 64, "--out", tmp_path / "no")
    assert "whole recipe; drop --group-size" in lines(*given, code=1)


def test_an_interrupted_command_leaves_nothing(plain: Path, tmp_path: Path) -> None:
    def interrupt(_: str) -> None:
        raise KeyboardInterrupt

    out = tmp_path / "models/low"
    with pytest.raises(KeyboardInterrupt):
        quantize_folder(plain, out, Request(lowbit.QuantConfig("u4", 32)), interrupt)
    assert list(out.parent.iterdir()) == []


def test_wrong_requests_are_one_line(plain: Path, tmp_path: Path) -> None:
    out = tmp_path / "low"
    assert "calibration" in lines("quantize", plain, "--method", "gptq", "--out", out, code=1)
    assert "skip: '*.router' matches no module" in lines("quantize", plain, "--skip", "*.router", "--out", out, code=1)
    assert "no config.json" in lines("quantize", plain, "--fuse", "--out", out, code=1)
    assert "act=" in lines("quantize", plain, "--act", "f8", "--out", out, code=1)
    assert "no matrix" in lines("quantize", plain, "-g", 32, "--skip", "*", "--out", out, code=1)
    assert "use cpu" in lines("quantize", plain, "--device", "gpu", "--out", out, code=1)
    assert lines("inspect", tmp_path / "missing", code=1).startswith("error")
    gptq = CHECKPOINTS / "gptq-4"
    assert f"{gptq} is quantized already" in lines("quantize", gptq, "--out", out, code=1)
    codes = {"up.weight": torch.ones(64, 64).to(torch.float8_e4m3fn), "up.weight_scale": torch.ones(1)}
    save_file(codes, tmp_path / "codes.safetensors")
    assert "but codes, it seems" in lines("quantize", tmp_path / "codes.safetensors", "--out", out, code=1)
    assert not out.exists()


CHECKPOINTS = Path(__file__).parents[1] / "fixtures/checkpoints"


def test_outliers_of_each_row(tmp_path: Path) -> None:
    """As a histogram, as numbers and as a figure; of a checkpoint with a row that has very many."""
    (row,) = rows("inspect", CHECKPOINTS / "spqr-ptcsr").values()
    (weight,) = map(lowbit.open_checkpoint(CHECKPOINTS / "spqr-ptcsr").load, [row["name"]])
    sparse = weight.unpack_outliers()
    assert sparse is not None
    expected = (sparse.to_dense() != 0).sum(1).tolist()
    assert row["outliers"]["per_row"] == expected and expected[0] == 0
    assert row["outliers"]["density"] == pytest.approx(sum(expected) / (48 * 128))
    assert row["outliers"]["densest_row"] == max(expected) / 128
    text = lines("inspect", CHECKPOINTS / "spqr-ptcsr").splitlines()
    assert text[-1].split()[:5] == [row["name"], "3.53", "%", "37.5", "%"] and text[-1].endswith("█▆▃▁           ▁")
    for ending, start in (("svg", b"<?xml"), ("png", b"\x89PNG")):
        pytest.importorskip("matplotlib")
        lines("inspect", CHECKPOINTS / "spqr-ptcsr", "--plot", tmp_path / f"rows.{ending}")
        assert (tmp_path / f"rows.{ending}").read_bytes().startswith(start)
    assert "can't be drawn" in lines("inspect", CHECKPOINTS / "spqr-ptcsr", "--plot", tmp_path / "rows.x", code=1)


def test_layers_without_outliers(tmp_path: Path) -> None:
    """A weight without any is no row of the table, and no reason for a figure; one that could have some is empty."""
    assert "outliers" not in lines("inspect", CHECKPOINTS / "spqr-dense")
    assert "no layer of" in lines("inspect", CHECKPOINTS / "spqr-dense", "--plot", tmp_path / "rows.svg", code=1)
    nothing = OutlierRows((0, 0, 0), 64)
    assert (nothing.density, nothing.densest, nothing.histogram(4)) == (0, 0, [3, 0, 0, 0])


@pytest.mark.parametrize("counts", [(5,), (0, 1, 2, 3, 4), (0, 0, 9, 100), tuple(range(33))])
def test_histogram_of_rows(counts: tuple[int, ...]) -> None:
    """A row is in the step that ends at its density or first after it; and every step that has a row has a bar."""
    found = OutlierRows(counts, 128).histogram(4)
    edges = [max(counts) * (i + 1) / 4 for i in range(4)]
    assert found == [sum(low < c <= high for c in counts) + (i == 0) * counts.count(0)
                     for i, (low, high) in enumerate(zip([0, *edges], edges))]  # fmt: skip
    drawn = bars(found)
    assert [c != " " for c in drawn] == [c > 0 for c in found][: len(drawn)] and "█" in drawn
