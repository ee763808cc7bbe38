"""LoRA on a low-bit model: adapters are trained beside 4-bit weights, saved, and loaded onto them again.

    python examples/lora.py

The model is a small Llama with random weights; with a checkpoint of your own the way is the same. Its task: after a
token t comes the token 2 t. Needs transformers and peft: pip install '.[hf]'.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig

import lowbit

SMALL = {"vocab_size": 32, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def sequences(count: int, length: int, device: str) -> torch.Tensor:
    """Returns tokens each of which is twice the one before, modulo the size of the vocabulary less 1."""
    tokens = [torch.randint(1, 31, (count,), device=device)]
    for _ in range(length - 1):
        tokens.append(tokens[-1] * 2 % 31)
    return torch.stack(tokens, dim=1)


def main(device: str | None = None, steps: int = 40) -> tuple[float, float]:
    """Returns the loss before and after training."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        dense, adapter = Path(folder) / "dense", Path(folder) / "adapter"
        AutoModelForCausalLM.from_config(LlamaConfig(**SMALL, **HEADS)).save_pretrained(dense)

        config = lowbit.LowbitConfig("u4", group_size=64)
        base = AutoModelForCausalLM.from_pretrained(
            dense, quantization_config=config, dtype=torch.bfloat16, device_map=device
        )
        model = get_peft_model(base, LoraConfig(r=16, lora_alpha=32, target_modules=TARGETS))
        model.print_trainable_parameters()

        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        losses = []
        for _ in range(steps):
            tokens = sequences(16, 8, device)
            loss = model(tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        print(f"loss: {losses[0]:.2f} before, {losses[-1]:.2f} after {steps} steps")

        model.save_pretrained(adapter)
        again = AutoModelForCausalLM.from_pretrained(
            dense, quantization_config=config, dtype=torch.bfloat16, device_map=device
        )
        loaded = PeftModel.from_pretrained(again, adapter)
        tokens = sequences(2, 8, device)
        with torch.no_grad():
            same = torch.equal(loaded(tokens).logits, model.eval()(tokens).logits)
        print(f"the same after loading: {same}")
    return losses[0], losses[-1]


if __name__ == "__main__":
    main()
