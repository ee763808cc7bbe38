"""A GGUF file as a model of transformers whose matrices stay packed, beside the same model dequantized in f32.

    python examples/gguf_model.py                  a model of random weights, which this program writes itself
    python examples/gguf_model.py FILE [PROMPT]    a file of your own, which also continues a text
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

try:
    import gguf
    from gguf import GGMLQuantizationType as Kind
    from transformers import AutoModelForCausalLM, AutoTokenizer
except ModuleNotFoundError as error:
    raise SystemExit(f"this example needs {error.name}: pip install '.[hf]' in lowbit's checkout") from None

import lowbit

VOCABULARY, HIDDEN, INNER, HEADS = 256, 128, 384, 4


def write(path: Path) -> None:
    """Writes a Llama of one layer: Q4_1 matrices, embeddings in Q8_0, norms in f32."""
    matrices = dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), (HIDDEN, HIDDEN))
    matrices |= {"ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN), "ffn_down": (HIDDEN, INNER)}
    rng, writer = np.random.default_rng(0), gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCABULARY)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, np.float32))
    shapes = {"token_embd": (VOCABULARY, HIDDEN), **{f"blk.0.{name}": shape for name, shape in matrices.items()}}
    for name, shape in shapes.items():
        kind = Kind.Q8_0 if name == "token_embd" else Kind.Q4_1
        weight = rng.standard_normal(shape, np.float32) / np.sqrt(shape[1])
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@torch.no_grad()
def compare(path: Path, tokens: torch.Tensor) -> tuple[Any, float]:
    """Returns the packed model, and how far its logits are from those of the dequantized one in f32."""
    dense = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    expected = dense(tokens).logits
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = lowbit.from_gguf(path, device_map=device)
    layers = [module for module in model.modules() if isinstance(module, lowbit.LowbitLinear)]
    bits = sum(8 * layer.packed.nbytes for layer in layers)
    weights = sum(layer.in_features * layer.out_features for layer in layers)
    print(f"{len(layers)} low-bit layers, {bits / weights:.2f} bits a weight")
    error = (model(tokens.to(device)).logits.float().cpu() - expected).norm() / expected.norm()
    print(f"relative difference of the logits from the dequantized model in f32: {float(error):.1e}")
    return model, float(error)


def main(*arguments: str) -> bool:
    """Returns whether the logits are those of the dequantized model, up to the rounding of bf16."""
    if arguments:
        path = Path(arguments[0])
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        tokens = tokenizer(" ".join(arguments[1:]) or "The capital of France is", return_tensors="pt").input_ids
        model, error = compare(path, tokens)
        answer = model.generate(tokens.to(model.device), max_new_tokens=30, do_sample=False)
        print(tokenizer.decode(answer[0], skip_special_tokens=True))
        return error < 0.05
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / "model.gguf")
        _, error = compare(Path(folder) / "model.gguf", torch.arange(24)[None])
    return error < 0.05


if __name__ == "__main__":
    sys.exit(not main(*sys.argv[1:]))
