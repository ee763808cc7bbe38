"""Configurations of the models that `lowbit bench-model` runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lowbit.dialect.errors import SpecError
from lowbit.pylib.tune.model_shapes import MIXTURES, MODELS, MixtureShape, ModelShape, find, known_models

LONGEST = 32768  # tokens that a model made by name can take


def model_config(name: str, layers: int | None = None) -> Any:
    """Returns the configuration, as transformers has it, of a named shape or of the model in a folder.

    layers   keep so many layers; None: all of them

    Raises SpecError for an unknown name, for a folder without config.json, and where transformers is missing.
    """
    try:
        from transformers import AutoConfig
    except ImportError:
        raise SpecError("bench-model runs models of transformers: pip install 'transformers>=5.17'") from None
    named: dict[str, ModelShape | MixtureShape] = {**MODELS, **MIXTURES}
    shape = find(name, named)
    if shape is not None:
        made: Any = AutoConfig.for_model(shape.model_type, **shape.config, max_position_embeddings=LONGEST)
    elif (Path(name) / "config.json").is_file():
        made = AutoConfig.from_pretrained(name, local_files_only=True)
    else:
        raise SpecError(f"model {name!r} must be a folder with a config.json, or one of {known_models(name, named)}")
    if layers is not None:
        made.num_hidden_layers = layers
        if kinds := getattr(made, "layer_types", None):
            made.layer_types = kinds[:layers]
    return made
