"""How much memory it takes to load a checkpoint of many files: that of the model, and less than a few layers more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

FILES, EACH, N, K, GROUP = 16, 4, 2048, 1024, 128
MEASURE = """
import sys
import torch
from torch import nn
import lowbit

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear({k}, {n}, False, "meta", torch.float16)
        self.norm = nn.RMSNorm({k}, device="meta", dtype=torch.float16)

def read(kind):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(kind))

def load(folder, layers):
    model = nn.Module()
    model.layers = nn.ModuleList(Block() for _ in range(layers))
    lowbit.load_checkpoint(model, folder, progress=False)
    return model

load(sys.argv[1], 1)  # which imports all that is needed
open("/proc/self/clear_refs", "w").write("5")  # the peak is that from now on
before = read("VmRSS")
model = load(sys.argv[2], {layers})
size = sum(t.nbytes for t in (*model.buffers(), *model.parameters()))
print(read("VmHWM") - before - size, read("VmRSS") - before - size)
"""


def gptq(folder: Path, layers: range, files: int) -> Path:
    """Writes layers with random codes and a norm each, in so many files."""
    folder.mkdir()
    names: dict[str, str] = {}
    for number in range(files):
        state: dict[str, Tensor] = {}
        for layer in layers[number * len(layers) // files : (number + 1) * len(layers) // files]:
            state |= {
                f"layers.{layer}.proj.qweight": torch.randint(-(2**31), 2**31 - 1, (K // 8, N), dtype=torch.int32),
                f"layers.{layer}.proj.qzeros": torch.full((K // GROUP, N // 8), 0x77777777, dtype=torch.int32),
                f"layers.{layer}.proj.scales": torch.rand(K // GROUP, N).half(),
                f"layers.{layer}.norm.weight": torch.ones(K).half(),
            }
        file = f"model-{number + 1:05}-of-{files:05}.safetensors"
        save_file(state, folder / file, {"format": "pt"})
        names |= dict.fromkeys(state, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    entries = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False}
    (folder / "config.json").write_text(json.dumps({"dtype": "float16", "quantization_config": entries}))
    return folder


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="only Linux can forget a peak")
def test_files_leave_memory_as_they_have_been_read(tmp_path: Path) -> None:
    """Of 64 MiB in 16 files. A process that keeps them mapped has all of them, and what lies between its weights."""
    torch.manual_seed(0)
    folders = gptq(tmp_path / "one", range(1), 1), gptq(tmp_path / "all", range(FILES * EACH), FILES)
    code = MEASURE.format(k=K, n=N, layers=FILES * EACH)
    done = subprocess.check_output([sys.executable, "-c", code, *map(str, folders)], text=True)
    peak, left = map(int, done.split())
    assert peak < 48 << 20, f"{peak >> 20} MiB beside the model"
    assert left < 16 << 20, f"{left >> 20} MiB left behind"


def test_a_file_that_has_changed(tmp_path: Path) -> None:
    """Files are closed and opened again; one that is another by then is an error."""
    from lowbit import CheckpointError
    from lowbit.pylib.checkpoints.checkpoint import open_checkpoint

    folder = gptq(tmp_path / "all", range(4), 4)
    checkpoint = open_checkpoint(folder)
    names = [f"layers.{number}.norm.weight" for number in range(4)]
    assert all(bool((checkpoint.tensors[name] == 1).all()) for name in (*names, *names))
    file = checkpoint.tensors.path(names[0])
    file.write_bytes(file.read_bytes() + b" ")
    assert bool((checkpoint.tensors[names[3]] == 1).all())
    with pytest.raises(CheckpointError, match=r"00001-of-00004\.safetensors has changed since the checkpoint"):
        checkpoint.tensors[names[0]]
