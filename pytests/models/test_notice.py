"""What a saved folder says to programs that load it without lowbit: an error, and a model card."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lowbit import LowbitConfig
from lowbit.pylib.checkpoints.quantize_files import Request, quantize_folder
from lowbit.pylib.integrations.notice import NOTICE, TEXT, with_notice
from lowbit.pylib.quantization.config import QuantConfig

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 32}
WITHOUT = """import json, sys, transformers
errors = []
for folder in sys.argv[1:]:
    try:
        transformers.AutoModelForCausalLM.from_pretrained(folder)
        errors.append("")
    except Exception as error:
        errors.append(f"{type(error).__name__}: {error}")
assert "lowbit" not in sys.modules
print(json.dumps(errors))"""

ORDERS = ("import lowbit, transformers", "import transformers, lowbit", "import transformers.modeling_utils, lowbit")
WITH = """import sys
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING as known
assert known["lowbit"] is lowbit.LowbitConfig
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
assert isinstance(model.model.layers[0].mlp.down_proj, lowbit.LowbitLinear)
assert not hasattr(model.config, "transformers_weights")"""


def saved(folder: Path) -> Any:
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, dtype="bfloat16")
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / "dense")
    wanted = LowbitConfig("u4", group_size=32)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "dense", quantization_config=wanted)
    model.save_pretrained(folder / "ours")
    return model


def errors_without(*folders: Path) -> list[str]:
    """Returns the error with which each folder fails to load in a process without lowbit; "" of one that loads."""
    command = [sys.executable, "-c", WITHOUT, *map(str, folders)]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()[-1])


def test_without_lowbit_it_is_an_error(tmp_path: Path) -> None:
    model = saved(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    tokens = torch.arange(6)[None]
    assert torch.equal(again(tokens).logits, model(tokens).logits)
    assert not hasattr(again.config, "transformers_weights")
    again.save_pretrained(tmp_path / "twice")
    loaded, *failed = errors_without(*(tmp_path / name for name in ("dense", "ours", "twice")))
    assert not loaded and len(failed) == 2 and all(NOTICE in error for error in failed)
    (tmp_path / "dense" / "config.json").unlink()
    config = transformers.AutoConfig.from_pretrained(tmp_path / "ours")
    config.save_pretrained(tmp_path / "alone")
    assert json.loads((tmp_path / "alone/config.json").read_text())["transformers_weights"] == NOTICE


@pytest.mark.parametrize("order", ORDERS)
def test_lowbit_may_be_imported_before_or_after(order: str, tmp_path: Path) -> None:
    """transformers reads config.json before it imports what quantizes."""
    saved(tmp_path)
    command = [sys.executable, "-c", f"{order}\n{WITH}", str(tmp_path / "ours")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_dequantized_model_needs_no_notice(tmp_path: Path) -> None:
    saved(tmp_path).dequantize().save_pretrained(tmp_path / "plain")
    assert NOTICE not in (tmp_path / "plain/config.json").read_text()
    assert not (tmp_path / "plain/README.md").exists()
    assert errors_without(tmp_path / "plain") == [""]


def test_the_card_of_the_dense_model_is_kept(tmp_path: Path) -> None:
    saved(tmp_path)
    assert (tmp_path / "ours/README.md").read_text().startswith("---\nlibrary_name: transformers\n")
    (tmp_path / "dense/README.md").write_text("---\nlicense: mit\n---\n# A model\n")
    quantize_folder(tmp_path / "dense", tmp_path / "out", Request(QuantConfig("u4", 32)))
    card = (tmp_path / "out/README.md").read_text()
    assert card == f"---\nlicense: mit\n---\n{TEXT}# A model\n" and with_notice(card) == card
    assert with_notice("# A model\n") == f"{TEXT}\n# A model\n"
