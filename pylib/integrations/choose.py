"""Which modules of a model of transformers become low-bit, by a `LowbitConfig`, and why others stay dense.

transformers has rules of its own for modules that a quantizer must leave alone: the output layer, weights tied to it,
kinds that are kept in f32, and names that the user gave. Here they meet the rules of `lowbit.quantize_`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from torch import nn

from lowbit.dialect.errors import SpecError
from lowbit.dialect.fields import did_you_mean
from lowbit.pylib.integrations.config import LowbitConfig
from lowbit.pylib.nn.dense_experts import is_experts
from lowbit.pylib.nn.embedding import LowbitEmbedding
from lowbit.pylib.nn.experts import LowbitExperts
from lowbit.pylib.nn.linear import LowbitLinear
from lowbit.pylib.nn.packed_module import PackedModule
from lowbit.pylib.nn.plan import EXCLUDED, Planned, Wishes, is_known
from lowbit.pylib.nn.why_dense import Reason


def wishes(config: LowbitConfig, model: Any, kept: Iterable[str], absent: Collection[str] = ()) -> Wishes:
    """Returns the configuration as `lowbit.quantize_` understands it. Raises SpecError for a name of no module.

    kept     names of modules that transformers leaves dense by itself
    absent   names of modules that the checkpoint has not
    """
    skipped = config.modules_to_not_convert or []
    check_names(skipped, [name for name, _ in model.named_modules()])
    outputs, kept = model.get_output_embeddings(), set(kept)
    tied = {name.removesuffix(".weight") for pair in model.all_tied_weights_keys.items() for name in pair}
    if config.lm_head:
        kept -= {name for name, module in model.named_modules() if module is outputs} - tied
    if config.embeddings:
        kept -= tied
    return wishes_without(config, [*skipped, *map(re.escape, kept)], absent)


def wishes_without(config: LowbitConfig, patterns: list[str], absent: Collection[str] = ()) -> Wishes:
    """Returns the configuration as `lowbit.quantize_` understands it, with modules that stay dense.

    patterns   of transformers: a module of this name, and those within
    absent     names of single modules
    """

    def wanted(name: str, _: nn.Module) -> bool:
        return name not in absent and _is_converted(name, patterns)

    return Wishes(
        config.configs,
        wanted,
        lm_head=config.lm_head,
        embeddings=config.embeddings,
        per_row_if_indivisible=config.per_row_if_indivisible,
        strict=True,
    )


def reason_in_config(config: LowbitConfig, model: Any, entry: Planned) -> Reason:
    """Returns why a module stays dense, in terms of a LowbitConfig."""
    if entry.reason != EXCLUDED:
        return entry.reason
    name, skipped = entry.names[0], config.modules_to_not_convert or []
    if not _is_converted(name, skipped):
        return Reason("modules_to_not_convert")
    if any(f"{name}.weight" in pair for pair in model.all_tied_weights_keys.items()):
        return Reason("its weight is tied to an embedding", option="embeddings")
    if model.get_output_embeddings() is entry.module:
        return Reason("the output layer", option="lm_head")
    return Reason("transformers converts none of a kind that is kept in f32, nor the last module")


def mostly_dense(modules: Sequence[Planned]) -> str:
    """Returns a warning if most weights are in modules of kinds that can't be quantized; "" if not."""

    def size(entry: Planned) -> int:
        return sum(p.numel() for p in entry.module.parameters(recurse=False))

    left = [entry for entry in modules if not is_known(entry.module)]
    share = sum(map(size, left)) / max(1, sum(map(size, modules)))
    if share < 0.5:
        return ""
    largest = max(left, key=size)
    name, reason = largest.names[0], largest.reason
    return f"{share:.0%} of the weights stay dense, {name} for one: {reason}; model.hf_quantizer.stays_dense has all"


def empty_module(entry: Planned) -> PackedModule | LowbitExperts:
    """Returns a low-bit module without memory for a dense one."""
    if is_experts(entry.module):
        return LowbitExperts.empty_like(entry.module, entry.specs, "meta")
    if isinstance(entry.module, nn.Embedding):
        return LowbitEmbedding.empty(entry.specs[0], "meta").in_place_of(entry.module)
    return LowbitLinear.empty(entry.specs[0], "meta").train(entry.module.training)


def check_names(patterns: Sequence[str], names: Sequence[str]) -> None:
    """Raise SpecError for a pattern that matches no module."""
    for pattern in patterns:
        if all(_is_converted(name, [pattern]) for name in names if name):
            hint = did_you_mean(pattern, names, cutoff=0.4)
            raise SpecError(f"modules_to_not_convert: {pattern!r} matches no module{hint}")


def _is_converted(name: str, excluded: Sequence[str]) -> bool:
    """Tells whether none of these patterns matches the name of a module, as transformers reads them."""
    # Here, as importing transformers' quantizers imports lowbit's, which needs this module.
    from transformers.quantizers.quantizers_utils import should_convert_module

    return should_convert_module(name, list(excluded))
