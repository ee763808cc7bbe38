"""Speculative decoding that gives exactly the tokens of plain greedy decoding: bits do not depend on the batch.

    python examples/exact_speculation.py

A small low-bit model decodes greedily, one token at a time. Then guesses are verified, four tokens at a time: what
followed the last time that the latest token came up. Guesses that are what the model would have chosen are kept.
Within `lowbit.batch_invariant` a token's logits have the same bits in a call of four tokens as in a call of one, so
both ways give the same tokens, however close the first two choices are.

On a CPU transformers' own `generate(assistant_model=...)` is compared, too. Its caches grow, so attention over them is
torch's; with `attn_implementation="eager"` that, too, gives a token the same bits.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
import transformers
from torch import Tensor

import lowbit

GUESSES = 3


def small_model() -> Any:
    """Returns a model whose layers and output layer are low-bit, and decode in a chain of launches."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 2048}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).bfloat16().eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    lowbit.quantize_(model, lowbit.QuantConfig("u4", 32), lm_head=True, progress=False)
    lowbit.fuse_(model)
    return model.to("cuda" if torch.cuda.is_available() else "cpu")


class Text:
    """Tokens, and the cache of all of them but the last."""

    def __init__(self, model: Any, prompt: list[int], length: int) -> None:
        self.model, self.tokens = model, list(prompt)
        self.cache = transformers.StaticCache(config=model.config, max_cache_len=length + GUESSES + 1)
        # transformers 5.24 calls it `cache`, older versions `past_key_values`.
        self.cache_argument = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"
        self._logits(self.tokens[:-1])

    def _logits(self, tokens: list[int]) -> Tensor:
        ids = torch.tensor([tokens], device=self.model.device)
        return self.model(ids, **{self.cache_argument: self.cache}).logits[0]

    def append(self, guesses: list[int]) -> int:
        """Appends the tokens that the model chooses, as far as the guesses were right, and one more; returns how many
        were right."""
        held = len(self.tokens) - 1
        chosen = self._logits([self.tokens[-1], *guesses]).argmax(-1).tolist()
        right = next((i for i, guess in enumerate(guesses) if guess != chosen[i]), len(guesses))
        self.tokens += chosen[: right + 1]
        for layer in self.cache.layers:  # behind it are the keys and values of wrong guesses
            layer.cumulative_length.fill_(held + right + 1)
        return right

    def guesses(self) -> list[int]:
        """Returns what followed the last time that the latest token came up."""
        before = [i for i, token in enumerate(self.tokens[:-1]) if token == self.tokens[-1]]
        return self.tokens[before[-1] + 1 :][:GUESSES] if before else []


@torch.no_grad()
def generated(count: int) -> tuple[list[int], list[int]]:
    """Returns the tokens of `generate` on a CPU, without an assistant and with one, which guesses at random."""
    model, prompt = small_model().cpu(), torch.tensor([[5, 17, 3, 42, 8]])
    model.set_attn_implementation("eager")
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 2048}
    assistant = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).eval()
    given = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "max_new_tokens": count}
    given |= {"pad_token_id": 0, "eos_token_id": None}
    with lowbit.batch_invariant():
        texts = (model.generate(prompt, **given, **more) for more in ({}, {"assistant_model": assistant}))
        plain, assisted = (text[0].tolist() for text in texts)
    return plain, assisted


@torch.no_grad()
def main(count: int = 1000) -> tuple[list[int], list[int]]:
    """Decode so many tokens in both ways, and compare; returns the tokens of each."""
    model, prompt = small_model(), [5, 17, 3, 42, 8]
    with lowbit.batch_invariant():
        plain, quick = (Text(model, prompt, len(prompt) + count) for _ in range(2))
        while len(plain.tokens) < len(prompt) + count:
            plain.append([])
        calls = right = 0
        while len(quick.tokens) < len(prompt) + count:
            right += quick.append(quick.guesses())
            calls += 1
    first, second = (text.tokens[: len(prompt) + count] for text in (plain, quick))
    if first != second:
        raise SystemExit("wrong: speculation gave other tokens")
    print(f"{count} tokens, the same by {count} calls of one token and {calls} of up to {GUESSES + 1}; ", end="")
    print(f"{right} guesses were right")
    plain, assisted = generated(count)
    if plain != assisted:
        raise SystemExit("wrong: generate gave other tokens with an assistant")
    print(f"{count} tokens by generate, the same with an assistant")
    return first, second


if __name__ == "__main__":
    main()
