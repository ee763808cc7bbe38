"""Lets a folder that `save_pretrained` has written tell programs without `import lowbit` what it needs.

transformers ignores a quantization that it does not know: it would find no weights, warn, and return a model with
random ones. So config.json names, as the file of its weights, what to do. transformers refuses the name, and shows it;
where lowbit is imported, the name is left out when config.json is read. A model card says the same to people.

`lowbit/__init__.py` calls `leave_notices` as soon as transformers has configurations, whose files it reads before it
imports quantizers. So this module imports next to nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import wraps
from pathlib import Path
from typing import Any

from lowbit.pylib.integrations import QUANT_METHOD

FILE_OF_WEIGHTS = "transformers_weights"
NOTICE = "the weights of this model are low-bit; import lowbit before from_pretrained"
CARD = "README.md"
METADATA = "---\nlibrary_name: transformers\ntags:\n- lowbit\n---\n"
TEXT = """
> The weights of this model are low-bit. `pip install lowbit`, and `import lowbit` before the model is loaded:
>
> ```python
> import lowbit
> from transformers import AutoModel
>
> model = AutoModel.from_pretrained("...")  # the name of this folder, and the class of your task
> ```
"""


def leave_notices() -> None:
    """Let configurations of low-bit models write notices where they are saved, and read them without."""
    from transformers.configuration_utils import PreTrainedConfig

    save = PreTrainedConfig.save_pretrained

    @wraps(save)
    def save_and_tell(self: Any, save_directory: Any, *arguments: Any, **options: Any) -> None:
        save(self, save_directory, *arguments, **options)
        if _is_low_bit(self):
            _mark(Path(save_directory) / "config.json")
            card = Path(save_directory) / CARD
            card.write_text(with_notice(card.read_text() if card.exists() else METADATA))

    read = PreTrainedConfig.from_dict.__func__  # type: ignore[attr-defined]

    @wraps(read)
    def read_without_notice(cls: Any, config_dict: Mapping[str, Any], **options: Any) -> Any:
        kept = {name: value for name, value in config_dict.items() if (name, value) != (FILE_OF_WEIGHTS, NOTICE)}
        return read(cls, kept, **options)

    PreTrainedConfig.save_pretrained = save_and_tell
    PreTrainedConfig.from_dict = classmethod(read_without_notice)  # type: ignore[assignment]


def _is_low_bit(config: Any) -> bool:
    given = getattr(config, "quantization_config", None)
    method = given.get("quant_method") if isinstance(given, dict) else getattr(given, "quant_method", None)
    return method == QUANT_METHOD


def _mark(file: Path) -> None:
    written = json.loads(file.read_text())
    file.write_text(json.dumps({**written, FILE_OF_WEIGHTS: NOTICE}, indent=2, sort_keys=True) + "\n")


def with_notice(card: str) -> str:
    """Returns a model card that says what the model needs, before all but its metadata."""
    if TEXT in card:
        return card
    start, mark, rest = card.partition("---\n")
    metadata, end, body = rest.partition("\n---\n")
    return f"---\n{metadata}\n---\n{TEXT}{body}" if mark and end and not start.strip() else f"{TEXT}\n{card}"
