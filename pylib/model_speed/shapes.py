"""Sizes of well-known language models, as their config.json has them: `lowbit bench-model` takes them by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowbit.dialect.errors import SpecError
from lowbit.dialect.fields import did_you_mean

SHAPES: Mapping[str, Mapping[str, Any]] = {
    "tiny": {
        "model_type": "llama",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 256,
    },
    "llama-3.1-8b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "llama-3.1-70b": {
        "model_type": "llama",
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "qwen2.5-7b": {
        "model_type": "qwen2",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
    },
    "qwen2.5-32b": {
        "model_type": "qwen2",
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "vocab_size": 152064,
    },
}
LONGEST = 32768  # tokens that a model made by name can take


def model_config(name: str, layers: int | None = None) -> Any:
    """Returns the configuration, as transformers has it, of a named shape or of the model in a folder.

    layers   keep so many layers; None: all of them

    Raises SpecError for an unknown name, for a folder without config.json, and where transformers is missing.
    """
    try:
        from transformers import AutoConfig
    except ImportError:
        raise SpecError("bench-model runs models of transformers: pip install 'lowbit[hf]'") from None
    values = SHAPES.get(name.lower())
    if values is not None:
        sizes = {key: value for key, value in values.items() if key != "model_type"}
        made: Any = AutoConfig.for_model(values["model_type"], **sizes, max_position_embeddings=LONGEST)
    elif (Path(name) / "config.json").is_file():
        made = AutoConfig.from_pretrained(name, local_files_only=True)
    else:
        hint = did_you_mean(name, SHAPES)
        raise SpecError(f"model {name!r} must be a folder with a config.json, or one of {', '.join(SHAPES)}{hint}")
    if layers is not None:
        made.num_hidden_layers = layers
    return made
