"""A model of transformers, quantized to 4 bits while it is loaded: it generates, is saved, and is loaded again.

    python examples/transformers_model.py [NAME_OR_FOLDER]

Without a name it makes a small Llama with random weights. Needs transformers: pip install '.[hf]'.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

import lowbit


def small_model(folder: Path) -> str:
    """Saves a small model; returns where."""
    sizes = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, eos_token_id=None)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return str(folder)


def low_bit_bytes(model: PreTrainedModel) -> int:
    """Returns the bytes of all low-bit layers."""
    return sum(module.packed.nbytes for module in model.modules() if isinstance(module, lowbit.LowbitLinear))


@torch.no_grad()
def main(name: str | None = None, device: str | None = None) -> float:
    """Returns how far the logits are from those of the dense model, relative to them."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        name = name or small_model(Path(folder) / "dense")
        dense = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16, device_map=device)
        config = lowbit.LowbitConfig("u4", group_size=64)
        model = AutoModelForCausalLM.from_pretrained(
            name, quantization_config=config, dtype=torch.bfloat16, device_map=device
        )
        before, after = (each.get_memory_footprint() / 1e6 for each in (dense, model))
        print(f"{before:.2f} MB dense, {after:.2f} MB quantized")
        print(f"{low_bit_bytes(model) / 1e6:.2f} MB of it in low-bit layers")

        tokens = torch.randint(256, (1, 16), device=device)
        expected, given = dense(tokens).logits.float(), model(tokens).logits.float()
        error = float((given - expected).norm() / expected.norm())
        print(f"relative error of the logits: {error:.4f}")
        answer = model.generate(tokens, max_new_tokens=8, do_sample=False, cache_implementation="static")
        print("it goes on with", answer[0, 16:].tolist())

        model.save_pretrained(Path(folder) / "low-bit")
        again = AutoModelForCausalLM.from_pretrained(Path(folder) / "low-bit", device_map=device)
        print(f"the same after loading: {torch.equal(again(tokens).logits.float(), given)}")
    return error


if __name__ == "__main__":
    main(*sys.argv[1:])
