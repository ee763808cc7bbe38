"""Folders with models of random weights, as vLLM serves them: in bf16, in GPTQ's 4 bits, or in a format of lowbit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.pylib.integrations.quantizer import adopt
from lowbit.pylib.model_speed.config import model_config
from lowbit.pylib.model_speed.random_model import STANDARD_DEVIATION, random_model
from lowbit.pylib.nn.dense_experts import is_experts
from lowbit.pylib.quantization.config import QuantConfig

GPTQ = "gptq"
_BITS, _PER_WORD = 4, 8
_ZERO_OF_8 = 0x77777777  # GPTQ stores a zero point less one
_DEVIATION_OF_CODES = 4.6  # of numbers from 0 to 15 that are equally likely


def make(folder: Path, model: str, layers: int | None, weight: QuantConfig | str | None, device: str = "cuda") -> None:
    """Write a folder with a model.

    weight   a format of lowbit; "gptq": 4 bits in symmetric groups of 128; None: bf16

    Raises SpecError for a model or a format that is not known.
    """
    config = model_config(model, layers)
    if weight == GPTQ:
        write_gptq(folder, config, device)
        return
    assert not isinstance(weight, str)
    made: Any = random_model(config, weight, device, fuse=False)
    adopt(made)
    made.save_pretrained(folder)


@torch.no_grad()
def write_gptq(folder: Path, config: Any, device: str, group: int = 128) -> None:
    """Write a folder whose linear layers and experts have random 4-bit codes in GPTQ's tensors."""
    from huggingface_hub import save_torch_state_dict
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    quantized = dict(_matrices(model))
    state: dict[str, Tensor] = {}
    for name, size in quantized.items():
        state |= {f"{name}.{tensor}": value for tensor, value in gptq(*size, group, device).items()}
    taken = tuple(f"{name}." for name in [*quantized, *_experts(model)])
    for name, parameter in model.named_parameters():
        if not name.startswith(taken):
            dense = torch.empty(parameter.shape, dtype=torch.bfloat16, device=device)
            state[name] = dense.normal_(0, STANDARD_DEVIATION) if dense.ndim > 1 else dense.fill_(1)
    folder.mkdir(parents=True, exist_ok=True)
    save_torch_state_dict(state, folder)
    config.architectures, config.dtype = [type(model).__name__], "bfloat16"
    linears = {".".join(name.split(".")[-2:]) for name in quantized if ".experts." not in name}
    config.quantization_config = {
        "quant_method": "gptq",
        "checkpoint_format": "gptq",
        "bits": _BITS,
        "group_size": group,
        "sym": True,
        "desc_act": False,
        "lm_head": False,
        "modules_in_block_to_quantize": sorted(linears),  # ends of names; routers are none of them
    }
    config.save_pretrained(folder)


def _matrices(model: nn.Module) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yields the names and sizes [n, k] of the matrices to quantize; of experts one by one, as GPTQ names them."""
    for name, module in model.named_modules():
        if type(module) is nn.Linear and name != "lm_head":
            yield name, (module.out_features, module.in_features)
    for name, module in _experts(model).items():
        count, twice, hidden = module.gate_up_proj.shape
        for expert in range(count):
            yield f"{name}.{expert}.gate_proj", (twice // 2, hidden)
            yield f"{name}.{expert}.up_proj", (twice // 2, hidden)
            yield f"{name}.{expert}.down_proj", (hidden, twice // 2)


def _experts(model: nn.Module) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if is_experts(module)}


def gptq(n: int, k: int, group: int, device: str) -> dict[str, Tensor]:
    """Returns the tensors of a matrix [n, k] of random codes, whose numbers have the deviation of dense weights."""
    scale = STANDARD_DEVIATION / _DEVIATION_OF_CODES
    return {
        "qweight": torch.randint(-(2**31), 2**31 - 1, (k // _PER_WORD, n), dtype=torch.int32, device=device),
        "qzeros": torch.full((k // group, n // _PER_WORD), _ZERO_OF_8, dtype=torch.int32, device=device),
        "scales": torch.empty(k // group, n, dtype=torch.float16, device=device).uniform_(scale / 2, 3 * scale / 2),
        "g_idx": (torch.arange(k, device=device) // group).int(),
    }
