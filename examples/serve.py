"""A loop that serves requests with a low-bit model: prompts come in, tokens go out as they are made.

    python examples/serve.py [NAME_OR_FOLDER] < prompts.txt        one request per line: token numbers
    python examples/serve.py                                       three requests, to a small random model

The model is quantized while it is loaded, layers that share their input are fused, and one static cache serves all
requests. A prompt is read in one call, then tokens follow one by one. On a GPU that step is compiled once, with CUDA
graphs: its shapes never change. Needs transformers: pip install '.[hf]'.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from inspect import signature

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, StaticCache

import lowbit

ROOM = 128  # tokens of a prompt and its answer


class Server:
    """Answers requests, one after the other, with one cache."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.cache = StaticCache(config=model.config, max_cache_len=ROOM)
        # transformers 5.24 calls it `cache`, older versions `past_key_values`.
        self.cache_argument = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"
        graphs = model.device.type == "cuda"
        self.step = torch.compile(self._next, mode="reduce-overhead", fullgraph=True) if graphs else self._next

    def _next(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Returns the likeliest token after some at these positions, [1, 1]."""
        cache = {self.cache_argument: self.cache}
        logits = self.model(tokens, position_ids=positions, **cache, use_cache=True).logits
        return logits[:, -1:].argmax(-1)

    @torch.no_grad()
    def answer(self, prompt: list[int], count: int) -> Iterator[int]:
        """Yields `count` tokens that follow a prompt.

        Raises ValueError for a prompt that is empty or, with its answer, longer than the cache.
        """
        if not 0 < len(prompt) <= ROOM - count:
            raise ValueError(f"a prompt of {len(prompt)} tokens; 1 to {ROOM - count} fit before an answer of {count}")
        self.cache.reset()
        tokens = torch.tensor([prompt], device=self.model.device)
        positions = torch.arange(len(prompt), device=self.model.device)[None]
        token = self._next(tokens, positions)
        for place in range(len(prompt), len(prompt) + count):
            yield int(token)
            token = self.step(token.clone(), torch.tensor([[place]], device=self.model.device))


def small_model(folder: str) -> str:
    """Saves a small Llama with random weights; returns where."""
    sizes = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, eos_token_id=None)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def load(name: str, device: str) -> PreTrainedModel:
    """Returns a model in 4 bits, with fused layers."""
    config = lowbit.LowbitConfig("u4", group_size=64, fuse=True)
    return AutoModelForCausalLM.from_pretrained(
        name, quantization_config=config, dtype=torch.bfloat16, device_map=device
    )


def main(name: str | None = None, requests: list[list[int]] | None = None, count: int = 8) -> list[list[int]]:
    """Answer requests and print tokens as they come; returns the answers."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        model = load(name or small_model(folder), "cuda" if torch.cuda.is_available() else "cpu")
        server = Server(model)
        answers: list[list[int]] = []
        for prompt in requests or [[1, 2, 3], list(range(40)), [1, 2, 3]]:
            start, answers = time.perf_counter(), [*answers, []]
            print(f"{len(prompt):3} tokens in:", end="")
            for token in server.answer(prompt, count):
                answers[-1].append(token)
                print(f" {token}", end="", flush=True)
            print(f"  ({count / (time.perf_counter() - start):.0f} tokens a second)")
    return answers


if __name__ == "__main__":
    main(sys.argv[1], [[int(t) for t in line.split()] for line in sys.stdin]) if sys.argv[1:] else main()
