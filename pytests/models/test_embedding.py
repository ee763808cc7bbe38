"""`LowbitEmbedding`: rows of a packed weight, and the linear layers that share it."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowbit
from lowbit import (
    Bilevel,
    CheckpointError,
    LowbitEmbedding,
    LowbitLinear,
    MatmulSpec,
    QuantConfig,
    SpecError,
    TiedLinear,
)
from lowbit.pylib.nn.decode_rows import Decoder, take_rows
from lowbit.pylib.tune.timing import random_weight

ROWS = torch.tensor([0, 36, 8, 7, 16, 15, 20, 9, 0, 31])
IDS = torch.randint(0, 70, (2, 5), generator=torch.Generator().manual_seed(0))
U8 = QuantConfig("u8", 64)
SPECS = [
    *(MatmulSpec(37, 256, weight, 64, "int") for weight in ("u1", "u2", "i3", "u4", "u5", "i6", "u7", "i8")),
    MatmulSpec(37, 96, "u4", 48, "float"),  # groups with padding
    MatmulSpec(37, 100, "u3", None, "offset"),
    MatmulSpec(37, 256, "nf4", 16, scale="e4m3", row_scales=True),
    MatmulSpec(37, 256, "f6e3m2", 32, scale="e8m0"),
    MatmulSpec(37, 256, "u4", 128, "int", permuted=True),
    MatmulSpec.preset("q4_k", 37, 512),
    MatmulSpec.preset("q6_k", 37, 512),
    MatmulSpec.preset("nf4_nested", 37, 512),
    MatmulSpec(48, 512, "u3", 16, "float", scale="u3", bilevel=Bilevel(16, 2, zeros=True)),
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_rows_are_those_of_the_dequantized_weight(spec: MatmulSpec) -> None:
    weight = random_weight(spec, "cpu")
    rows = take_rows(spec, weight, Decoder.of(spec, weight.device), ROWS)
    assert torch.equal(rows, weight.dequantize()[ROWS]) and len(rows.unique(dim=0)) == len(ROWS) - 1


@pytest.mark.parametrize("spec", [SPECS[3], SPECS[-2], SPECS[-1]], ids=str)
def test_rows_are_compiled(spec: MatmulSpec) -> None:
    embedding = LowbitEmbedding.from_packed(random_weight(spec, "cpu"))
    compiled = torch.compile(embedding, fullgraph=True, backend="eager", dynamic=True)
    for ids in (ROWS, ROWS[:3]):
        assert torch.equal(compiled(ids), embedding(ids))


@pytest.fixture
def table() -> nn.Embedding:
    torch.manual_seed(0)
    return nn.Embedding(70, 128, padding_idx=3).bfloat16()


def test_looks_tokens_up(table: nn.Embedding) -> None:
    embedding = LowbitEmbedding.from_embedding(table, U8)
    x = embedding(IDS)
    expected = lowbit.quantize(table.weight, U8).dequantize()[IDS].bfloat16()
    assert x.dtype is torch.bfloat16 and torch.equal(x, expected) and embedding.padding_idx == 3
    assert torch.equal(embedding(IDS[0, 0].int()), x[0, 0]) and embedding(IDS[:, :0]).shape == (2, 0, 128)
    assert torch.equal(embedding.to_embedding()(IDS), expected)
    assert "70, 128, u8" in repr(embedding) and not list(embedding.parameters())


class Model(nn.Module):
    """The output layer is tied, and comes first, as in no model of transformers; `again` is the embedding once more."""

    def __init__(self, tied: bool = True, bias: bool = True) -> None:
        super().__init__()
        self.head = nn.Linear(128, 70, bias=bias)
        self.embed = self.again = nn.Embedding(70, 128)
        self.body = nn.Linear(128, 128)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.embed(ids)))


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model().bfloat16()


@torch.no_grad()
def test_tied_layers_share_one_weight(model: Model) -> None:
    expected = model(IDS)
    report = lowbit.quantize_(model, U8, embeddings=True)
    table, head = model.embed, model.head
    assert isinstance(table, LowbitEmbedding) and isinstance(head, TiedLinear)
    assert model.again is table and head.embedding is table
    assert {row.name for row in report.quantized} == {"embed = again = head", "body"} and not report.dense
    assert [name for name in model.state_dict() if "head" in name] == ["head.bias"]
    given = model(IDS)
    assert float((given - expected).norm() / expected.norm()) < 0.02
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.deepcopy(model).half().to("cpu")):
        assert other.head.embedding is other.embed is not table
        assert torch.equal(other.bfloat16()(IDS), given)
    assert lowbit.quantize_(model, U8, embeddings=True)["embed = again"].reason == "quantized before"


@torch.no_grad()
@pytest.mark.parametrize("tied", [True, False])
def test_saved_and_loaded(tied: bool, tmp_path: Path) -> None:
    model = Model(tied).bfloat16()
    lowbit.quantize_(model, {"head": None, "*": U8} if not tied else U8, embeddings=True)
    expected = model(IDS)
    lowbit.save_checkpoint(model, tmp_path)
    with torch.device("meta"):
        loaded = Model(tied).bfloat16()
    lowbit.load_checkpoint(loaded, tmp_path)
    assert torch.equal(loaded(IDS), expected) and type(loaded.head) is (TiedLinear if tied else nn.Linear)
    again = Model(tied).bfloat16()
    lowbit.quantize_(again, {"head": None, "*": U8} if not tied else U8, embeddings=True)
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(IDS), expected)


@torch.no_grad()
def test_loaded_into_a_model_that_was_quantized_otherwise(model: Model, tmp_path: Path) -> None:
    """Embedding, tied output layer and linear layer get the formats of the files."""
    lowbit.quantize_(model, U8, embeddings=True)
    lowbit.save_checkpoint(model, tmp_path)
    other = Model().bfloat16()
    other.embed.padding_idx = 5
    lowbit.quantize_(other, QuantConfig("nf4", 64), embeddings=True)
    other.embed.scale = 2.0
    before = other.embed
    lowbit.load_checkpoint(other.eval(), tmp_path)
    assert other.embed is other.again is other.head.embedding is not before
    assert isinstance(other.embed, LowbitEmbedding) and other.embed.spec == model.embed.spec
    assert (other.embed.padding_idx, other.embed.scale, other.embed.training) == (5, 2.0, False)
    other.embed.scale = None
    assert torch.equal(other(IDS), model(IDS))


def test_a_table_of_another_size_is_refused(model: Model, tmp_path: Path) -> None:
    lowbit.quantize_(model, U8, embeddings=True)
    lowbit.save_checkpoint(model, tmp_path)
    model.embed = LowbitEmbedding.from_embedding(nn.Embedding(80, 128).bfloat16(), U8)
    with pytest.raises(CheckpointError, match="embed is 70 x 128 with no bias, but 80 x 128 with no bias in the model"):
        lowbit.load_checkpoint(model, tmp_path)


@torch.no_grad()
def test_can_be_compiled_and_exported(model: Model) -> None:
    """Also when that is what it is used for first."""
    lowbit.quantize_(model, QuantConfig("nf4", 64), embeddings=True)
    for strict in (False, True):
        exported = torch.export.export(model, (IDS,), strict=strict).module()
        assert torch.equal(exported(IDS), model(IDS))
    assert torch.equal(torch.compile(model, fullgraph=True)(IDS), model(IDS))


REASONS: list[tuple[dict[str, Any], dict[str, str]]] = [
    ({}, {"embed = again": "an embedding", "head": "tied to that of embed"}),
    ({"lm_head": True}, {"head": "its weight is tied to that of embed"}),
    (
        {"embeddings": True, "filter_fn": lambda name, _: name != "head"},
        {"embed = again": "its weight is tied to that of head, which stays dense: filter_fn returned False"},
    ),
    ({"embeddings": True, "config": {"head": None, "*": U8}}, {"embed = again": r"dense: config\['head'\] is None"}),
    (
        {"embeddings": True, "config": {"embed": QuantConfig("u4", 64, method="gptq"), "*": U8}},
        {"embed = again": "gptq can't look at the inputs of an embedding; use 'hqq'"},
    ),
    ({"embeddings": True, "config": QuantConfig("u8", 48)}, {"embed = again": "group_size=48 must divide k=128"}),
]


@pytest.mark.parametrize(("arguments", "reasons"), REASONS)
def test_report_says_why_an_embedding_stays_dense(arguments: Any, reasons: dict[str, str], model: Model) -> None:
    report = lowbit.quantize_(model, **{"config": U8, **arguments})
    assert type(model.embed) is nn.Embedding and model.head.weight is model.embed.weight
    for name, reason in reasons.items():
        with pytest.raises(ValueError, match=reason):
            raise ValueError(report[name].reason)


def test_embedding_asked_for_by_name(model: Model) -> None:
    report = lowbit.quantize_(model, {"embed": U8})
    assert report["embed = again = head"].format == "u8 per 64, rtn" and type(model.body) is nn.Linear


def test_what_else_is_tied_stays_dense() -> None:
    """A table that two embeddings share, one with hooks at its output layer, and one that changes itself."""
    model = nn.ModuleList([nn.Embedding(70, 128), nn.Embedding(70, 128), Model(), nn.Embedding(70, 128, max_norm=1.0)])
    model[1].weight = model[0].weight
    model[2].head.register_forward_hook(lambda *_: None)
    report = lowbit.quantize_(model.half(), U8, embeddings=True)
    reasons = {row.name: row.reason for row in report.dense}
    assert "tied to that of 1" in reasons["0"] and "hooks" in reasons["2.embed = 2.again"]
    assert "max_norm" in reasons["3"] and isinstance(model[2].body, LowbitLinear)


class Doubled(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


WRONG: list[tuple[Any, str]] = [
    (lambda e: e(torch.tensor([70])), r"token 70 must be in 0\.\.69"),
    (lambda e: e(torch.tensor([3, -1])), r"token -1 must be in 0\.\.69"),
    (lambda e: e(torch.tensor([1.0])), "tokens are torch.float32; an embedding takes integers"),
    (lambda e: e([1, 2]), r"tokens must be a torch tensor, not list; use torch.as_tensor\(tokens\)"),
    (lambda e: LowbitEmbedding.empty(MatmulSpec(64, 64, "u4", bias=True)), "bias=True: a bias is no part of a row"),
    (lambda e: LowbitEmbedding.empty(MatmulSpec(64, 64, "u4", outliers=True)), "outliers=True: .* for 16 rows"),
    (lambda e: LowbitEmbedding.from_embedding(Doubled(64, 64).half(), U8), "Doubled is a subclass .* its own ways"),
]


@pytest.mark.parametrize(("call", "message"), WRONG)
def test_wrong_use_is_refused(call: Any, message: str, table: nn.Embedding) -> None:
    with pytest.raises(SpecError, match=message):
        call(LowbitEmbedding.from_embedding(table, U8))


@pytest.mark.gpu
@torch.no_grad()
def test_on_a_gpu(model: Model) -> None:
    """The same rows as on a CPU; a CUDA graph looks other tokens up when it is replayed."""
    for spec in SPECS:
        weight = random_weight(spec, "cpu")
        embedding = LowbitEmbedding.from_packed(weight)
        expected = embedding(ROWS)
        assert torch.equal(embedding.cuda()(ROWS.cuda()).cpu(), expected)
    lowbit.quantize_(model.cuda(), U8, embeddings=True)
    ids = IDS.cuda()
    model(ids)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = model(ids)
    ids.fill_(7)
    graph.replay()
    assert torch.equal(y, model(ids))
