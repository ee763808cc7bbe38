"""A GPTQ layer of someone else's checkpoint, imported without loss and run.

    python examples/import_gptq.py                         a layer that this program writes itself
    python examples/import_gptq.py DIR model.layers.0.mlp.up_proj    one of your own
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

import lowbit

N, K, GROUP, BITS = 64, 256, 64, 4
LAYER = "model.layers.0.mlp.up_proj"


def write(folder: Path) -> Tensor:
    """Writes a folder as AutoGPTQ would, with act-order; returns the weight [n, k] that it stands for."""
    codes = torch.randint(16, (K, N), dtype=torch.int32)
    zeros = torch.randint(1, 16, (K // GROUP, N), dtype=torch.int32)
    scales = torch.rand(K // GROUP, N).mul(0.02).add(0.01).half()
    group_of = (torch.arange(K) // GROUP)[torch.randperm(K)]
    shifts = torch.arange(0, 32, BITS, dtype=torch.int32)
    tensors = {
        "qweight": (codes.view(-1, 8, N) << shifts[:, None]).sum(1).to(torch.int32),
        "qzeros": (zeros.view(K // GROUP, -1, 8) - 1 << shifts).sum(2).to(torch.int32),
        "scales": scales,
        "g_idx": group_of.int(),
    }
    save_file({f"{LAYER}.{name}": t for name, t in tensors.items()}, folder / "model.safetensors")
    quantization = {"quant_method": "gptq", "bits": BITS, "group_size": GROUP, "desc_act": True}
    config = {"dtype": "float16", "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    return (scales[group_of] * (codes - zeros[group_of])).t()


def run(folder: Path, name: str) -> Tensor:
    """Imports a layer and multiplies something with it; returns its weight in f32."""
    checkpoint = lowbit.open_checkpoint(folder)
    packed = checkpoint.load(name)
    layer = lowbit.LowbitLinear.from_packed(packed.to("cuda" if torch.cuda.is_available() else "cpu"))
    weight = layer.packed.dequantize()
    x = torch.randn(5, packed.spec.k, device=weight.device).to(layer.dequantize().dtype)
    y, expected = layer(x).float(), x.float() @ weight.T + (0 if layer.bias is None else layer.bias.float())
    print(f"{name}: {layer.spec}")
    print(f"{packed.nbytes / weight.numel() * 8:.2f} bits per weight; relative error of the product "
          f"{float((y - expected).norm() / expected.norm()):.1e}")
    return weight


def main(*arguments: str) -> bool:
    """Returns whether the weight is what the file means, bit for bit."""
    if arguments:
        folder, name = arguments
        run(Path(folder), name)
        return True
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        expected = write(Path(folder))
        weight = run(Path(folder), LAYER)
    equal = torch.equal(weight.cpu().half(), expected)
    print("equal to the file's own meaning, bit for bit:", equal)
    return equal


if __name__ == "__main__":
    main(*sys.argv[1:])
