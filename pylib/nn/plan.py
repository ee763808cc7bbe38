"""Decides what to do with each module of a model, before any of them is touched."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lowbit.dialect.errors import LowbitError, SpecError
from lowbit.dialect.fields import did_you_mean
from lowbit.dialect.shape import MIN_K
from lowbit.dialect.spec import Act, MatmulSpec
from lowbit.pylib.nn.dense_experts import is_experts, specs_of_experts, why_no_experts
from lowbit.pylib.nn.embedding import spec_of_embedding, tied_linears, why_not
from lowbit.pylib.nn.linear import CODES, act_of, is_codes, spec_of
from lowbit.pylib.nn.linear_like import as_linear, is_linear, is_transposed
from lowbit.pylib.nn.owners import why_needed
from lowbit.pylib.nn.packed_module import PackedModule, check_model
from lowbit.pylib.nn.why_dense import NO_REASON, Reason
from lowbit.pylib.quantization.config import QuantConfig

Configs = QuantConfig | Mapping[str, QuantConfig | None]
Filter = Callable[[str, nn.Module], bool]

EXCLUDED = Reason("filter_fn returned False")
UNMATCHED = Reason("no pattern of the configuration matches")
ADAPTED = "peft.tuners.tuners_utils.BaseTunerLayer"


@dataclass(frozen=True)
class Wishes:
    """The wishes of the caller of `lowbit.quantize_`, whose arguments have the same names."""

    config: Configs
    filter_fn: Filter | None = None
    act: Act | None = None
    lm_head: bool = False
    embeddings: bool = False
    per_row_if_indivisible: bool = False
    strict: bool = False  # raise where the group size does not divide k, instead of leaving the layer dense


@dataclass(frozen=True)
class Planned:
    """The decision on a module.

    names    all names by which the model holds the module
    config   how to quantize it; None to leave it dense
    specs    what it computes then: one of a linear layer or an embedding, two of experts
    reason   why it stays dense; false if it does not
    tied     of an embedding that is quantized: the linear layers that share its table, by all of their names
    asked    the format that was asked for, where `per_row_if_indivisible` made another of it; "" where not
    """

    names: tuple[str, ...]
    module: nn.Module
    config: QuantConfig | None = None
    specs: tuple[MatmulSpec, ...] = ()
    reason: Reason = NO_REASON
    tied: Mapping[str, nn.Linear] = field(default_factory=dict)
    asked: str = ""


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Lets errors start with the name of a module."""
    try:
        yield
    except LowbitError as error:
        raise type(error)(f"{name}: {error}") from error


def plan(model: nn.Module, wishes: Wishes) -> list[Planned]:
    """Returns what to do with each module that has a matrix of its own. Raises if wishes do not fit the model."""
    check_model(model)
    if isinstance(model, nn.Linear):
        raise SpecError("the model is a linear layer itself, which can't be replaced; use LowbitLinear.from_linear")
    if wishes.filter_fn is not None and not callable(wishes.filter_fn):
        hint = "patterns of names go into config=, as {'*.o_proj': None, '*': QuantConfig('u4', 128)}"
        raise SpecError(f"filter_fn={wishes.filter_fn!r} must be a function of a name and a module; {hint}")
    if wishes.act is not None:
        MatmulSpec(1, MIN_K, "u8", act=wishes.act)  # raises for a type that x can't have
    modules: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if any(is_lazy(p) for p in module.parameters(recurse=False)):
            raise SpecError(f"{name}: {type(module).__name__} has no weight yet; run the model on an input before")
        if isinstance(module, PackedModule) or any(p.ndim > 1 for p in module.parameters(recurse=False)):
            modules.setdefault(module, []).append(name)
    check_config(wishes.config, [name for module, names in modules.items() if is_known(module) for name in names])
    reasons = _structural_reasons(model, modules)
    if wishes.act is None:
        reasons |= _more_precise({module for module in modules if is_known(module) and not reasons[module]})
    planned = [_planned(module, tuple(names), reasons[module], wishes) for module, names in modules.items()]
    embeddings = [_with_tied(model, entry, wishes) for entry in planned if _is_quantized_embedding(entry)]
    return _merged(planned, embeddings)


def plan_module(name: str, module: nn.Module, wishes: Wishes) -> Planned:
    """Returns what to do with a module of this name, of a model that is not at hand."""
    return _planned(module, (name,), NO_REASON, wishes)


def _planned(module: nn.Module, names: tuple[str, ...], reason: Reason, wishes: Wishes) -> Planned:
    name = names[0]
    config, why = config_for(name, wishes.config)
    reason = reason or _wish_against(name, module, wishes)
    if reason or config is None:
        return Planned(names, module, reason=reason or why)
    with naming(name):
        return _with_spec(Planned(names, module, config), wishes)


def _wish_against(name: str, module: nn.Module, wishes: Wishes) -> Reason:
    """Returns why the caller wants a module to stay dense; false if he does not."""
    by_name = _is_literal(name, wishes.config)
    if isinstance(module, nn.Embedding) and not (wishes.embeddings or by_name):
        return Reason("an embedding", option="embeddings")
    if wishes.filter_fn is not None and not wishes.filter_fn(name, module):
        return EXCLUDED
    if _is_lm_head(name) and not (wishes.lm_head or by_name):
        return Reason("the output layer", option="lm_head")
    return NO_REASON


def _is_quantized_embedding(entry: Planned) -> bool:
    return isinstance(entry.module, nn.Embedding) and entry.config is not None


def _with_tied(model: nn.Module, entry: Planned, wishes: Wishes) -> Planned:
    """Returns the plan for an embedding with the layers that share its table; one that leaves it dense if they do."""
    tied = tied_linears(model.named_modules(remove_duplicate=False), cast(nn.Embedding, entry.module))
    for name, linear in tied.items():
        _, why = config_for(name, wishes.config)
        if wishes.filter_fn is not None and not wishes.filter_fn(name, linear):
            why = EXCLUDED
        why = _reason_of_place(model, linear, [name]) or why
        if why and why != UNMATCHED:
            reason = f"its weight is tied to that of {name}, which stays dense: {why}"
            return replace(entry, config=None, specs=(), reason=Reason(reason))
    return replace(entry, tied=tied)


def _merged(planned: Sequence[Planned], embeddings: Sequence[Planned]) -> list[Planned]:
    """Returns the plans with those for embeddings in place, and without the layers that these take along."""
    better = {entry.module: entry for entry in embeddings}
    taken = {linear for entry in embeddings for linear in entry.tied.values()}
    return [better.get(entry.module, entry) for entry in planned if entry.module not in taken]


def _with_spec(planned: Planned, wishes: Wishes) -> Planned:
    """Returns a plan with its spec; one that leaves the layer dense if no groups of this size divide its rows."""
    config = cast(QuantConfig, planned.config)
    if config.needs_data and isinstance(planned.module, nn.Embedding):
        reason = f"{config.method} can't look at the inputs of an embedding; use 'hqq'"
        return replace(planned, config=None, reason=Reason(reason))
    if config.method == "awq" and is_experts(planned.module):
        config = replace(config, method="rtn")  # the router reads the output of the norm, too: no scales can be there
    act = wishes.act or act_of(matrix_of(planned.module))
    config = config.multiplied_in(act)
    try:
        return replace(planned, config=config, specs=specs_of_module(planned.module, config, act))
    except SpecError as error:
        if wishes.per_row_if_indivisible and config.group_size is not None:
            asked = planned.asked or _asked(config)
            return _with_spec(replace(planned, config=_larger_groups(config), asked=asked), wishes)
        small = _columns(planned.module) < MIN_K
        option = "per_row_if_indivisible" if config.group_size is not None and not small else ""
        reason = Reason(str(error), option)
        if wishes.strict and not small:
            raise SpecError(str(reason)) from None
        return replace(planned, config=None, reason=reason)


def _asked(config: QuantConfig) -> str:
    """Returns the format of a configuration, as reports name it."""
    blocks = f" in blocks of {config.bilevel.groups} groups" if config.bilevel else ""
    return f"{config.weight} per {config.group_size}{blocks}"


def _larger_groups(config: QuantConfig) -> QuantConfig:
    """Returns what to try next where groups do not divide k: one scale per row. Before that, groups keep their size,
    and fewer of them share a second level: half as many, and at last none."""
    level = config.bilevel
    if level is None:
        return replace(config, group_size=None)
    if level.groups > 2:
        return replace(config, bilevel=replace(level, groups=level.groups // 2))
    return replace(config, bilevel=None, scale=level.scale)


def specs_of_module(module: nn.Module, config: QuantConfig, act: Act) -> tuple[MatmulSpec, ...]:
    """Returns the specs that a module has after it is quantized."""
    if is_experts(module):
        return specs_of_experts(module, config, act)
    if isinstance(module, nn.Embedding):
        return (spec_of_embedding(module, config, act),)
    return (spec_of(as_linear(module), config, act),)


def _columns(module: nn.Module) -> int:
    """Returns the k of a module's matrix."""
    return matrix_of(module).shape[0 if is_transposed(module) else -1]


# -- reasons that lie in the model


def is_known(module: nn.Module) -> bool:
    """Tells whether it is known what a module computes: of most subclasses of nn.Linear nobody knows."""
    return is_linear(module) or isinstance(module, nn.Embedding) or is_experts(module)


def matrix_of(module: nn.Module) -> Tensor:
    """Returns the first parameter of a module that is a matrix, or a stack of them."""
    return next(parameter for parameter in module.parameters(recurse=False) if parameter.ndim > 1)


def _is_lm_head(name: str) -> bool:
    return name.rpartition(".")[2] == "lm_head"


def _structural_reasons(model: nn.Module, modules: Mapping[nn.Module, list[str]]) -> dict[nn.Module, Reason]:
    """Returns for each module why it can't be quantized; false if it can."""
    owners: dict[int, list[nn.Module]] = {}
    for module in modules:
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(module)
    return {module: _structural_reason(model, module, names, owners, modules) for module, names in modules.items()}


def _more_precise(modules: Collection[nn.Module]) -> dict[nn.Module, Reason]:
    """Returns why modules stay dense that have f32 weights beside others of 16 bits, as some routers do."""
    types = {module: matrix_of(module).dtype for module in modules}
    half = next((dtype for dtype in types.values() if dtype in (torch.float16, torch.bfloat16)), None)
    reason = Reason(f"its weight is f32, and others are {half}: the model keeps it so; a given act overrides that")
    return {module: reason for module, dtype in types.items() if half and dtype is torch.float32}


def _structural_reason(
    model: nn.Module,
    module: nn.Module,
    names: list[str],
    owners: Mapping[int, list[nn.Module]],
    all_names: Mapping[nn.Module, list[str]],
) -> Reason:
    if isinstance(module, PackedModule):
        return Reason("quantized before")
    if isinstance(module, nn.Embedding) and (reason := why_not(module)):
        return Reason(reason)
    if not is_known(module):
        if kind := why_no_experts(module):
            return Reason(f"{type(module).__name__} has {kind}")
        kind = "a subclass of nn.Linear with its own ways" if isinstance(module, nn.Linear) else "no nn.Linear"
        return Reason(f"{type(module).__name__} is {kind}")
    matrix = matrix_of(module)
    if is_codes(matrix):
        return Reason(f"its weight is {matrix.dtype}: {CODES}")
    others = [other for other in owners[id(matrix)] if other is not module]
    if others and not (isinstance(module, nn.Embedding) and all(type(other) is nn.Linear for other in others)):
        option = "embeddings" if isinstance(others[0], nn.Embedding) else ""
        return Reason(f"its weight is tied to that of {all_names[others[0]][0]}", option)
    return _reason_of_place(model, module, names)


def _reason_of_place(model: nn.Module, module: nn.Module, names: Sequence[str]) -> Reason:
    """Returns why a module can't be replaced by another where it is; false if it can."""
    owners = [(model.get_submodule(path), leaf) for path, _, leaf in (name.rpartition(".") for name in names)]
    if why := next(filter(None, (why_needed(owner, leaf, module) for owner, leaf in owners)), ""):
        return Reason(why)
    if any(_has_adapters(model.get_submodule(".".join(name.split(".")[:-2]))) for name in names):
        return Reason("it is of an adapter of PEFT, which is trained; quantize the model before, or merge the adapter")
    if module._forward_pre_hooks or module._forward_hooks:
        return Reason("it has hooks, which would be lost; remove them first")
    if "forward" in vars(module):
        return Reason("its forward was replaced, which would be lost, by accelerate say; quantize the model before")
    return NO_REASON


def _has_adapters(module: nn.Module) -> bool:
    """Tells whether a module is a layer of PEFT, which holds its adapters in containers of their own."""
    return any(f"{cls.__module__}.{cls.__qualname__}" == ADAPTED for cls in type(module).__mro__)


# -- configurations by name


def check_config(config: object, linears: Sequence[str]) -> None:
    """Raises SpecError unless each pattern stands for layers that can be quantized, and for a configuration or None."""
    if isinstance(config, QuantConfig):
        return
    if not isinstance(config, Mapping):
        hint = f"; say QuantConfig({config!r}, 128), or name a plan's file, *.json" if isinstance(config, str) else ""
        raise SpecError(f"config={config!r} must be a QuantConfig, or a dictionary of patterns and QuantConfigs{hint}")
    for pattern, value in config.items():
        if not (value is None or isinstance(value, QuantConfig)):
            raise SpecError(f"config[{pattern!r}]={value!r} must be a QuantConfig, or None to leave layers dense")
        if not any(fnmatchcase(name, pattern) for name in linears):
            hint = did_you_mean(pattern, linears, cutoff=0.6) or _some(linears)
            raise SpecError(f"config[{pattern!r}] matches no linear layer{hint}")


def _some(names: Sequence[str]) -> str:
    """Returns the first names of a model's layers, for an error."""
    more = ", ..." if len(names) > 5 else ""
    return f"; the layers are {', '.join(map(repr, names[:5]))}{more}" if names else "; the model has none"


def config_for(name: str, config: Configs) -> tuple[QuantConfig | None, Reason]:
    """Returns the configuration of the first pattern that matches a name; or None, and why."""
    if isinstance(config, QuantConfig):
        return config, NO_REASON
    for pattern, value in config.items():
        if fnmatchcase(name, pattern):
            return value, Reason(f"config[{pattern!r}] is None" if value is None else "")
    return None, UNMATCHED


def _is_literal(name: str, config: Configs) -> bool:
    """Tells whether a configuration asks for a layer by its full name."""
    return not isinstance(config, QuantConfig) and name in config
