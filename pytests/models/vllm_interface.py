"""What lowbit's plugin needs of vLLM, compared with the source of a vLLM, which is parsed and not imported.

    python -m pytests.models.vllm_interface WHEEL_OR_FOLDER    such as vllm-0.33.0-...whl, or site-packages

It needs no GPU, no torch and none of vLLM's requirements, so it can be run on each new version:
`pip download --no-deps vllm`. It lists what is missing: names that the plugin imports, parameters of functions that it
overrides or calls, and attributes that it reads.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from zipfile import ZipFile

PLUGIN = Path(__file__).parents[2] / "pylib/integrations/vllm"
_LAYERS, _MOE = "vllm.model_executor.layers", "vllm.model_executor.layers.fused_moe"
_MODULAR, _LORA = f"{_MOE}.modular_kernel", f"{_MOE}.experts.lora_experts_mixin"
_QUANTIZATION = f"{_LAYERS}.quantization.base_config"

FUNCTIONS: dict[tuple[str, str], Sequence[str]] = {
    (_QUANTIZATION, "QuantizationConfig.get_quant_method"): ("layer", "prefix"),
    (_QUANTIZATION, "QuantizationConfig.override_quantization_method"): ("hf_quant_cfg", "user_quant", "hf_config"),
    (_QUANTIZATION, "QuantizationConfig.maybe_update_config"): ("model_name", "hf_config", "revision"),
    (_QUANTIZATION, "QuantizationConfig.apply_vllm_mapper"): ("hf_to_vllm_mapper",),
    (_QUANTIZATION, "QuantizationConfig.get_cache_scale_mapper"): (),
    (_QUANTIZATION, "QuantizeMethodBase.process_weights_after_loading"): ("layer",),
    (_QUANTIZATION, "QuantizeMethodBase.tie_weights"): ("layer", "embed_tokens"),
    (f"{_LAYERS}.linear", "LinearMethodBase.create_weights"): (
        "layer",
        "input_size_per_partition",
        "output_partition_sizes",
        "input_size",
        "output_size",
        "params_dtype",
    ),
    (f"{_LAYERS}.linear", "LinearMethodBase.apply"): ("layer", "x", "bias"),
    (f"{_MOE}.fused_moe_method_base", "FusedMoEMethodBase.__init__"): ("moe",),
    (f"{_MOE}.fused_moe_method_base", "FusedMoEMethodBase.create_weights"): (
        "layer",
        "num_experts",
        "hidden_size",
        "intermediate_size_per_partition",
        "params_dtype",
    ),
    (f"{_MOE}.fused_moe_method_base", "FusedMoEMethodBase.apply"): (
        "layer",
        "x",
        "topk_weights",
        "topk_ids",
        "shared_experts",
        "shared_experts_input",
    ),
    (f"{_MOE}.fused_moe_method_base", "FusedMoEMethodBase.maybe_roundup_sizes"): ("hidden_size",),
    (f"{_MOE}.all2all_utils", "maybe_make_prepare_finalize"): (
        "moe",
        "quant_config",
        "routing_tables",
        "allow_new_interface",
    ),
    (_MODULAR, "FusedMoEKernel.__init__"): ("prepare_finalize", "fused_experts"),
    (_MODULAR, "FusedMoEKernel.apply"): (
        "hidden_states",
        "w1",
        "w2",
        "topk_weights",
        "topk_ids",
        "activation",
        "global_num_experts",
        "expert_map",
        "apply_router_weight_on_input",
        "shared_experts",
        "shared_experts_input",
    ),
    (_MODULAR, "FusedMoEExperts.__init__"): ("moe_config", "quant_config", "max_num_tokens", "num_dispatchers"),
    (_MODULAR, "FusedMoEExpertsModular.moe_problem_size"): ("a1", "w1", "w2", "topk_ids"),
    (_MODULAR, "FusedMoEExpertsModular.workspace_shapes"): (
        "M",
        "N",
        "K",
        "topk",
        "global_num_experts",
        "local_num_experts",
        "expert_tokens_meta",
        "activation",
    ),
    (_MODULAR, "FusedMoEExpertsModular.apply"): (
        "output",
        "hidden_states",
        "w1",
        "w2",
        "topk_weights",
        "topk_ids",
        "activation",
        "global_num_experts",
        "expert_map",
        "a1q_scale",
        "a2_scale",
        "workspace13",
        "workspace2",
        "expert_tokens_meta",
        "apply_router_weight_on_input",
    ),
    (_LORA, "LoRAExpertsMixin.set_lora_context"): ("ctx",),
    (_LORA, "LoRAExpertsMixin.apply_w13_lora"): ("lora_context",),
    (_LORA, "LoRAExpertsMixin.apply_w2_lora"): ("lora_context",),
    (f"{_MOE}.routed_experts", "RoutedExperts._expert_routing_tables"): (),
    (f"{_MOE}.routed_experts", "RoutedExperts.load_weights"): ("weights",),
    (f"{_MOE}.routed_experts", "RoutedExperts._map_global_expert_id_to_local_expert_id"): ("expert_id",),
    ("vllm.model_executor.model_loader.reload.layerwise", "initialize_online_processing"): ("layer",),
    ("vllm.model_executor.models.utils", "WeightsMapper._map_name"): ("key",),
}
"""Parameters of functions that the plugin overrides or calls, in their order; there may be more behind them."""

ATTRIBUTES: dict[tuple[str, str], Sequence[str]] = {
    (_QUANTIZATION, "QuantizeMethodBase"): ("uses_meta_device",),
    (f"{_LAYERS}.linear", "LinearBase"): (
        "input_size",
        "output_size",
        "params_dtype",
        "skip_bias_add",
        "tp_rank",
        "tp_size",
    ),
    (f"{_LAYERS}.vocab_parallel_embedding", "VocabParallelEmbedding"): (
        "embedding_dim",
        "num_embeddings_padded",
        "org_vocab_size",
        "tp_size",
    ),
    (f"{_MOE}.routed_experts", "RoutedExperts"): (
        "activation",
        "apply_router_weight_on_input",
        "expert_map",
        "global_num_experts",
        "moe_config",
        "params_dtype",
    ),
    (f"{_MOE}.config", "FusedMoEConfig"): (
        "experts_per_token",
        "has_bias",
        "hidden_dim",
        "intermediate_size_per_partition",
        "moe_parallel_config",
        "tp_rank",
        "tp_size",
    ),
    (f"{_MOE}.config", "FusedMoEParallelConfig"): (
        "all2all_backend",
        "dp_size",
        "ep_size",
        "use_all2all_kernels",
        "use_batched_activation_format",
    ),
    (f"{_MOE}.fused_moe_method_base", "FusedMoEMethodBase"): ("moe_kernel",),
    (f"{_MOE}.experts.lora_context", "MoELoRAContext"): ("w13_num_slices",),
    (_MODULAR, "ExpertTokensMetadata"): ("expert_num_tokens",),
    (_LORA, "LoRAExpertsMixin"): ("_lora_context",),
    ("vllm.model_executor.models.utils", "WeightsMapper"): ("orig_to_new_regex",),
    ("vllm.config.compilation", "CompilationConfig"): ("cudagraph_capture_sizes",),
    ("vllm.config.parallel", "ParallelConfig"): ("tensor_parallel_size",),
    ("vllm.config.scheduler", "SchedulerConfig"): ("max_num_batched_tokens",),
}
"""Attributes of classes that it reads or sets."""

CALLS = {
    (f"{_MOE}.fused_moe_modular_method", "w1=layer.w13_weight"): "a layer with adapters is called with these sizes",
    ("vllm.model_executor.models.utils", "get_cache_scale_mapper"): "AutoWeightsLoader renames tensors by it",
    ("vllm.model_executor.model_loader.base_loader", "uses_meta_device"): "layers are processed while they are loaded",
    ("vllm.model_executor.model_loader.reload.layerwise", "_already_called_process_weights_after_loading"): (
        "a reload processes a layer again"
    ),
    (f"{_MOE}.runner.moe_runner", "routed_experts.load_weights"): "experts get the tensors of the checkpoint by it",
}
"""What must stand in a module, and what would not work without."""


class Source:
    """The modules of a vLLM: a wheel, or a folder that has the folder vllm."""

    def __init__(self, path: Path) -> None:
        self._read: Callable[[str], str | None]
        if path.is_dir():
            self._read = lambda name: (path / name).read_text() if (path / name).is_file() else None
        else:
            wheel = ZipFile(path)
            names = set(wheel.namelist())
            self._read = lambda name: wheel.read(name).decode() if name in names else None

    def text(self, module: str) -> str | None:
        """Returns the source of a module; None if there is none."""
        path = module.replace(".", "/")
        found = self._read(f"{path}.py")
        return self._read(f"{path}/__init__.py") if found is None else found

    def tree(self, module: str) -> ast.Module:
        """Returns a module's syntax tree; an empty one if there is no module."""
        return ast.parse(self.text(module) or "")


@dataclass(frozen=True)
class Needs:
    """What a plugin needs of a server: `FUNCTIONS`, `ATTRIBUTES` and `CALLS`, and what its files import.

    package   the server's
    plugin    the folder of the plugin's files
    """

    package: str
    plugin: Path
    functions: Mapping[tuple[str, str], Sequence[str]]
    attributes: Mapping[tuple[str, str], Sequence[str]]
    calls: Mapping[tuple[str, str], str]


VLLM = Needs("vllm", PLUGIN, FUNCTIONS, ATTRIBUTES, CALLS)


def missing(path: Path, needs: Needs = VLLM) -> list[str]:
    """Returns what a server lacks of what the plugin needs."""
    source, package = Source(path), needs.package
    if source.text(package) is None:
        raise FileNotFoundError(
            f"{path} has no folder {package}; name a wheel, or the folder that {package} was installed in"
        )
    found = [f"{module} has no {name}" for module, name in _imports(needs) if not _has(source, module, name)]
    for (module, function), wanted in needs.functions.items():
        given = _parameters(source, module, function)
        if given is None or list(given[: len(wanted)]) != list(wanted):
            found.append(f"{module}: {function} takes {given}, not {', '.join(wanted)}")
    for (module, name), wanted in needs.attributes.items():
        known = _attributes(source, module, name)
        found += [f"{module}: {name} has no {each}" for each in wanted if each not in known]
    return found + [f"{m}: no {t}: {why}" for (m, t), why in needs.calls.items() if t not in (source.text(m) or "")]


def _imports(needs: Needs) -> Iterator[tuple[str, str]]:
    """Yields what the plugin's files import of the server: modules and names."""
    for file in sorted(needs.plugin.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == needs.package:
                yield from ((str(node.module), name.name) for name in node.names)


def _has(source: Source, module: str, name: str) -> bool:
    """Tells whether a name can be imported of a module."""
    if source.text(f"{module}.{name}") is not None:
        return True
    if name == "current_platform":  # made when it is asked for
        return name in (source.text(module) or "")
    bound: set[str] = set()
    for node in ast.walk(source.tree(module)):
        if isinstance(node, ast.ImportFrom | ast.Import):
            bound |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            bound.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
    return name in bound


def _class(source: Source, module: str, name: str) -> ast.ClassDef | None:
    found = (n for n in ast.walk(source.tree(module)) if isinstance(n, ast.ClassDef) and n.name == name)
    return next(found, None)


def _parameters(source: Source, module: str, function: str) -> list[str] | None:
    """Returns the parameters of a function or a method, without self and cls; None if there is none."""
    owner, _, name = function.rpartition(".")
    inside = _class(source, module, owner) if owner else source.tree(module)
    named = [n for n in ast.walk(inside) if isinstance(n, ast.FunctionDef) and n.name == name] if inside else []
    if not named:
        return None
    parameters = [argument.arg for argument in (*named[-1].args.posonlyargs, *named[-1].args.args)]
    return parameters[1:] if parameters[:1] in (["self"], ["cls"]) else parameters


def _attributes(source: Source, module: str, name: str) -> set[str]:
    """Returns the attributes that a class sets in its methods or has itself."""
    found: set[str] = set()
    for node in ast.walk(_class(source, module, name) or ast.Module([], [])):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            found |= {node.attr} if isinstance(node.ctx, ast.Store) else set()
        elif isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


if __name__ == "__main__":
    lacks = missing(Path(sys.argv[1]))
    print("\n".join(lacks) or "all that lowbit's plugin needs is there")
    sys.exit(bool(lacks))
