"""One of several processes that run a model in parts: test_tensor_parallel.py starts them.

    python -m pytests.models.tensor_parallel FOLDER...    with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set

Each folder has a checkpoint; the logits of the model are written to logits.pt in it, by rank 0. Experts are shared out
among the processes where the folder's name says so.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import transformers
from transformers.distributed.configuration_utils import DistributedConfig

import lowbit

CONFIG = lowbit.LowbitConfig("u4", group_size=32, clip="max")
TOKENS = torch.randint(3, 64, (2, 7), generator=torch.Generator().manual_seed(0))


def load(folder: Path, **arguments: object) -> torch.nn.Module:
    """Returns the model of a folder, quantized while it is loaded if it is dense."""
    about = json.loads((folder / "config.json").read_text()).get("quantization_config", {"quant_method": None})
    configs = {None: CONFIG, "gptq": lowbit.LowbitConfig(from_checkpoint=True)}
    given = {"quantization_config": config} if (config := configs.get(about["quant_method"])) else {}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **given, **arguments)


@torch.no_grad()
def main(folders: list[Path]) -> None:
    processes = int(os.environ["WORLD_SIZE"])
    for folder in folders:
        experts = {"ep_size": processes} if "shared-out" in folder.name else {}
        model = load(folder, distributed_config=DistributedConfig(tp_size=processes, tp_plan="auto", **experts))
        logits = model(TOKENS.to(model.device)).logits
        if os.environ["RANK"] == "0":
            sizes = {name: module.packed.nbytes for name, module in model.named_modules() if hasattr(module, "packed")}
            torch.save({"logits": logits.float().cpu(), "sizes": sizes}, folder / "logits.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main([Path(folder) for folder in sys.argv[1:]])
