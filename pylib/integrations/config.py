"""`LowbitConfig`: what transformers is told about a low-bit model, in `from_pretrained` and in config.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import fields
from typing import Any, cast

try:
    from transformers.utils.quantization_config import QuantizationConfigMixin
except ImportError as error:
    raise ImportError("LowbitConfig needs transformers 5: pip install 'transformers>=5.17' accelerate") from error

from lowbit.dialect.errors import SpecError
from lowbit.dialect.fields import boolean
from lowbit.dialect.spec import Act, MatmulSpec
from lowbit.pylib.checkpoints.registry import FORMATS
from lowbit.pylib.integrations import QUANT_METHOD
from lowbit.pylib.nn.plan import Configs
from lowbit.pylib.quantization.config import QuantConfig

VERSION = 1  # of `to_dict`
_NO_DATA = "from_pretrained has no calibration data; use lowbit.quantize_(model, config, calibration=...)"


class LowbitConfig(QuantizationConfigMixin):
    """How transformers quantizes a model while it loads it:

        AutoModelForCausalLM.from_pretrained(name, quantization_config=lowbit.LowbitConfig("u4", group_size=128))

    weight                   element format, or a QuantConfig; with the format go QuantConfig's other fields, by name
    group_size               columns that share a scale; None: one per row
    modules                  other configurations by patterns of names, {"*.mlp.*": QuantConfig("u3", 64)}; None
                             leaves modules dense. The first pattern that matches counts
    modules_to_not_convert   modules that stay dense, as transformers names them: by the beginning or end of the name,
                             or by a regular expression; so do embeddings, tied weights and the output layer, unless:
    lm_head                  quantize the output layer as well, unless its weight is tied
    embeddings               quantize embeddings as well, and tied output layers, which multiply by the same weight
    per_row_if_indivisible   one scale per row where the group size does not divide k, which is an error otherwise; of
                             K-quants, fewer groups share a second level where that suffices
    fuse                     make one layer of those that share their input (`lowbit.fuse_`), after loading
    from_checkpoint          the checkpoint says what each layer is: those of GPTQ, AWQ, AutoRound, HQQ, bitsandbytes,
                             compressed-tensors, ModelOpt, FP8, MXFP4, SpQR, torchao, BitNet and MLX are imported
                             without loss, and run in lowbit's kernels. No other field goes with it

    Raises SpecError that names the field, what was given, and what is allowed.
    """

    def __init__(
        self,
        weight: str | QuantConfig = "u4",
        group_size: int | None = 128,
        *,
        modules: Mapping[str, QuantConfig | None] | None = None,
        modules_to_not_convert: Sequence[str] | None = None,
        lm_head: bool = False,
        embeddings: bool = False,
        per_row_if_indivisible: bool = False,
        fuse: bool = False,
        from_checkpoint: bool = False,
        **recipe: Any,
    ) -> None:
        if isinstance(weight, QuantConfig) and (recipe or group_size != 128):
            raise SpecError(f"weight={weight!r} says all of it; drop the other fields of the recipe")
        others = (modules, modules_to_not_convert, lm_head, embeddings, per_row_if_indivisible, fuse, recipe)
        if boolean("from_checkpoint", from_checkpoint) and (any(others) or (weight, group_size) != ("u4", 128)):
            raise SpecError("from_checkpoint=True: the checkpoint says what its layers are; drop all other fields")
        self.quant_method = cast(Any, QUANT_METHOD)
        self.from_checkpoint = from_checkpoint
        self.layers: Mapping[str, MatmulSpec] | None = None
        self.config = weight if isinstance(weight, QuantConfig) else _recipe(weight, group_size, recipe)
        self.modules = dict(modules or {})
        self.modules_to_not_convert = _names(modules_to_not_convert)
        self.lm_head = boolean("lm_head", lm_head)
        self.embeddings = boolean("embeddings", embeddings)
        self.per_row_if_indivisible = boolean("per_row_if_indivisible", per_row_if_indivisible)
        self.fuse = boolean("fuse", fuse)
        for pattern, config in {"weight": self.config, **self.modules}.items():
            if not (config is None or isinstance(config, QuantConfig)):
                raise SpecError(f"modules[{pattern!r}]={config!r} must be a QuantConfig, or None for dense modules")

    @property
    def configs(self) -> Configs:
        """The configurations by pattern, as `lowbit.quantize_` takes them."""
        return {**self.modules, "*": self.modules.get("*", self.config)} if self.modules else self.config

    def importing(self, source: Mapping[str, Any]) -> LowbitConfig:
        """Returns the configuration for a checkpoint whose config.json has another library's quantization_config.

        Raises SpecError unless from_checkpoint=True says that it is wanted.
        """
        if not self.from_checkpoint:
            method = source.get("quant_method")
            is_read = method is None or method in FORMATS
            way = "LowbitConfig(from_checkpoint=True) imports it" if is_read else "name the dense model"
            by = f", by {method}" if method else ""
            raise SpecError(f"the checkpoint is quantized already{by}: {way}")
        return LowbitConfig(from_checkpoint=True)

    def multiplied_in(self, act: Act) -> LowbitConfig:
        """Returns the configuration for a model of this type, with types of scales: a model saved in one type and
        loaded in another keeps them."""
        found = copy(self)
        found.config = self.config.multiplied_in(act)
        found.modules = {name: c and c.multiplied_in(act) for name, c in self.modules.items()}
        return found

    @classmethod
    def of_layers(cls, layers: Mapping[str, MatmulSpec]) -> LowbitConfig:
        """Returns the configuration for a state dictionary with these low-bit layers."""
        found = cls(from_checkpoint=True)
        found.layers = layers
        return found

    def check_no_data(self) -> None:
        """Raise SpecError if a method needs data: `from_pretrained` has none, though a saved model may have been made
        with some."""
        for config in (self.config, *self.modules.values()):
            if config is not None and config.needs_data:
                raise SpecError(f"method={config.method!r}: {_NO_DATA}, then save_pretrained; or method='hqq'")

    def to_dict(self) -> dict[str, Any]:
        """Returns what stands in config.json, where transformers sorts keys: patterns are a list, to stay in order."""
        if self.from_checkpoint:
            return {"quant_method": QUANT_METHOD, "version": VERSION, "from_checkpoint": True}
        return {
            "quant_method": QUANT_METHOD,
            "version": VERSION,
            "config": self.config.to_dict(),
            "modules": [[name, None if c is None else c.to_dict()] for name, c in self.modules.items()],
            "modules_to_not_convert": self.modules_to_not_convert,
            "lm_head": self.lm_head,
            "embeddings": self.embeddings,
            "per_row_if_indivisible": self.per_row_if_indivisible,
            "fuse": self.fuse,
        }

    def __iter__(self) -> Any:
        yield from self.to_dict().items()

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """Returns the configuration that `to_dict` wrote. Raises SpecError for anything else."""
        written = dict(config_dict)
        method, version = written.pop("quant_method", None), written.pop("version", None)
        if method != QUANT_METHOD or version != VERSION:
            raise SpecError(
                f"quantization_config of config.json must have quant_method={QUANT_METHOD!r} and version={VERSION}, "
                f"not {method!r} and {version!r}; a later version needs a newer lowbit"
            )
        if written == {"from_checkpoint": True}:
            found = cls(from_checkpoint=True)
            return (found, kwargs) if return_unused_kwargs else found
        modules = _pairs(written.pop("modules", None) or [])
        configs = {name: None if c is None else QuantConfig.from_dict(c) for name, c in modules}
        config = QuantConfig.from_dict(written.pop("config", None) or {})
        known = ("modules_to_not_convert", "lm_head", "embeddings", "per_row_if_indivisible", "fuse")
        if unknown := sorted(written.keys() - set(known)):
            raise SpecError(f"quantization_config of config.json has no {', '.join(unknown)}; update lowbit")
        found = cls(config, modules=configs, **written)
        return (found, kwargs) if return_unused_kwargs else found


def _recipe(weight: str, group_size: int | None, others: Mapping[str, Any]) -> QuantConfig:
    try:
        return QuantConfig(weight, group_size, **others)
    except TypeError as error:
        names = ", ".join(field.name for field in fields(QuantConfig))
        raise SpecError(f"LowbitConfig: {error}; the fields of a recipe are {names}") from None


def _pairs(given: object) -> list[tuple[str, Any]]:
    """Returns the patterns of config.json with their configurations, in order. Earlier versions wrote a dictionary."""
    pairs: Any = list(given.items()) if isinstance(given, Mapping) else given
    if not (isinstance(pairs, list) and all(isinstance(p, list | tuple) and len(p) == 2 for p in pairs)):
        raise SpecError(f"modules={given!r} of config.json must be a list of patterns and configurations")
    return [(str(name), config) for name, config in pairs]


def _names(given: object) -> list[str] | None:
    if given is None:
        return None
    if isinstance(given, str) or not (
        isinstance(given, Sequence) and all(isinstance(name, str) and name for name in given)
    ):
        raise SpecError(f"modules_to_not_convert={given!r} must be a list of names of modules")
    return list(given)
