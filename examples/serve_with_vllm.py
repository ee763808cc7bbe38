"""A model quantized to 4 bits and saved, then run by vLLM.

    python examples/serve_with_vllm.py [NAME_OR_FOLDER]    without a name: a small model with random weights

vLLM finds lowbit by itself, which sees in the folder what layers are low-bit: `vllm serve FOLDER` serves it to others.
Needs vLLM, installed as docs/howto/vllm.md says.
"""

from __future__ import annotations

import sys
import tempfile

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import lowbit

PROMPTS = [[3, 1, 4, 1, 5], [2, 7, 1, 8]]


def small_model(folder: str) -> str:
    """Saves a small Llama with random weights; returns where."""
    sizes = {"vocab_size": 256, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def quantize(name: str, folder: str) -> str:
    """Saves a model with 4-bit weights; returns where."""
    config = lowbit.LowbitConfig("u4", group_size=64, lm_head=True)
    AutoModelForCausalLM.from_pretrained(name, quantization_config=config, device_map="cpu").save_pretrained(folder)
    return folder


def answer(folder: str, count: int) -> list[list[int]]:
    """Returns the tokens by which vLLM continues the prompts, by the likeliest one each time."""
    from vllm import LLM, SamplingParams

    llm = LLM(model=folder, skip_tokenizer_init=True, max_model_len=128, dtype="bfloat16")
    settings = SamplingParams(max_tokens=count, temperature=0, detokenize=False, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], settings)
    return [list(output.outputs[0].token_ids) for output in outputs]


def main(name: str | None = None, count: int = 8) -> None:
    with tempfile.TemporaryDirectory() as folder:
        low_bit = quantize(name or small_model(f"{folder}/dense"), f"{folder}/low-bit")
        for prompt, tokens in zip(PROMPTS, answer(low_bit, count)):
            print(f"{prompt} is continued by {tokens}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
