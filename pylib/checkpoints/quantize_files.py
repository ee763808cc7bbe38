"""Quantizes a model in a folder: `lowbit quantize DIR --out DIR2`.

A folder that has a config.json of transformers is loaded by transformers, which knows what the tensors are, and saved
by it. Plain safetensors files tell names and shapes only: every matrix called "*.weight" is taken for the weight
of a linear layer, unless its name says otherwise, and is quantized on its own.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from lowbit.dialect.errors import CheckpointError, SpecError
from lowbit.dialect.spec import Act
from lowbit.pylib.checkpoints.checkpoint import open_checkpoint
from lowbit.pylib.checkpoints.contents import contents, note_errors
from lowbit.pylib.checkpoints.model import save_checkpoint
from lowbit.pylib.checkpoints.names import Names
from lowbit.pylib.checkpoints.tensor_files import TensorFiles, read_json
from lowbit.pylib.nn.linear import act_of
from lowbit.pylib.nn.plan import naming
from lowbit.pylib.nn.quantize_layer import quantized_layer
from lowbit.pylib.nn.quantize_model import quantize_
from lowbit.pylib.nn.quantize_planned import low_bit_row
from lowbit.pylib.nn.report import LayerReport, QuantizationReport
from lowbit.pylib.nn.texts import LENGTH, samples_of
from lowbit.pylib.nn.why_dense import Reason
from lowbit.pylib.quantization.config import QuantConfig

EMBEDDINGS = ("*embed*", "*wte*", "*wpe*")
OUTPUTS = ("*lm_head*",)
NO_DATA = (
    "a folder has no calibration data; use 'rtn' or 'hqq', name a file of text with --text, or "
    "lowbit.quantize_(model, config, calibration=...)"
)
WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


@dataclass(frozen=True)
class Request:
    """The task for a folder.

    config       how to quantize the weights
    skip         patterns of names of modules that stay dense
    lm_head      quantize the output layer as well
    embeddings   quantize embeddings as well, and output layers that are tied to them
    fuse         make one layer of those that share their input, in models that transformers loads
    act          type of the layers' inputs; None: that of the weights, and bf16 where they are f32
    device       where to quantize; None: the CPU
    text         a file of text on which methods with calibration run the model, in models that transformers loads
    samples      parts of the text to take, at most
    length       tokens of each
    """

    config: QuantConfig
    skip: Sequence[str] = ()
    lm_head: bool = False
    embeddings: bool = False
    fuse: bool = False
    act: Act | None = None
    device: str | None = None
    text: Path | None = None
    samples: int = 128
    length: int = LENGTH


def quantize_folder(
    source: str | Path, out: str | Path, request: Request, on_step: Callable[[str], object] = lambda _: None
) -> QuantizationReport:
    """Quantize the model in a folder, or in a safetensors file, into another folder; returns what became of it.

    Raises CheckpointError for a folder without a model or with one that is quantized, and for an `out` that has
    something in it; SpecError for methods that need calibration data.
    """
    path, target = Path(source), Path(out)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} has something in it; name another folder")
    _check_text(path, request)
    if done := open_checkpoint(path).modules:
        raise CheckpointError(f"{path} is quantized already, {done[0]} for one; name the dense model it was made of")
    if request.fuse and not _is_of_transformers(path):
        raise SpecError(f"fuse: {path} has no config.json of transformers; which layers share an input is not known")
    with _all_or_nothing(target) as folder:
        if _is_of_transformers(path):
            way = _by_transformers if request.text is None else _with_text
            report = way(path, folder, request, on_step)
        else:
            report = _by_names(path, folder, request, on_step)
        note_errors(folder, report)
    return report


def _check_text(path: Path, request: Request) -> None:
    """Raise SpecError for a method that needs a text without one, and for a text that is of no use."""
    method, needs_data = request.config.method, request.config.needs_data
    if needs_data and request.text is None:
        raise SpecError(f"method={method!r}: {NO_DATA}")
    if request.text is not None and not (needs_data and _is_of_transformers(path)):
        what = f"{path} has no config.json of transformers" if needs_data else f"{method} needs no data"
        raise SpecError(f"text={str(request.text)!r}: {what}; drop it")
    if min(request.samples, request.length) < 1:
        raise SpecError(f"samples={request.samples} and length={request.length} must be 1 or more")


@contextmanager
def _all_or_nothing(target: Path) -> Iterator[Path]:
    """Yields a folder that becomes `target` at the end of the context; after an error, or Ctrl-C, nothing is left."""
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = target.absolute().with_name(f".{target.absolute().name}.{os.getpid()}")
    folder.mkdir()
    try:
        yield folder
        if target.exists():
            target.rmdir()  # which is empty
        folder.rename(target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# -- models of transformers


def _is_of_transformers(path: Path) -> bool:
    config = path / "config.json"
    return config.is_file() and "model_type" in read_json(config)


def _by_transformers(
    path: Path, target: Path, request: Request, on_step: Callable[[str], object]
) -> QuantizationReport:
    """Load a model with a `LowbitConfig`, and save it with all that stands beside its weights; returns what became of
    its layers, by their names in the files."""
    from lowbit.pylib.integrations.config import LowbitConfig

    on_step("quantizing while transformers loads the model")

    config = LowbitConfig(
        request.config,
        modules=dict.fromkeys(request.skip, None),
        lm_head=request.lm_head,
        embeddings=request.embeddings,
        fuse=request.fuse,
        per_row_if_indivisible=True,
    )
    places = {"device_map": request.device} if request.device not in (None, "cpu") else {}
    model = _class_of(path).from_pretrained(
        path, quantization_config=config, dtype=_dtype(request), local_files_only=True, **places
    )
    model.save_pretrained(target)
    _copy_others(path, target)
    on_step("comparing")
    report = contents(target, against=path)
    quantizer, names = model.hf_quantizer, Names(model)
    asked = {row.name: _asked(quantizer.asked, names.module(row.name)) for row in report}
    rows = [replace(row, asked="" if row.reason else asked[row.name]) for row in report]
    rows = [_with_reason(row, quantizer.reasons.get(names.module(row.name))) for row in rows]
    return QuantizationReport(tuple(rows), quantizer.fused)


def _with_text(path: Path, target: Path, request: Request, on_step: Callable[[str], object]) -> QuantizationReport:
    """Load a dense model, quantize it with a text as calibration data, and save it; returns what became of its layers,
    by their names in the model."""
    tokenizer = _tokenizer(path)
    text = cast(Path, request.text).read_text(errors="replace")
    on_step("loading")
    model = _class_of(path).from_pretrained(path, dtype=_dtype(request), local_files_only=True)
    model = model.bfloat16() if model.dtype is torch.float32 else model
    model = model.to(request.device or "cpu")
    on_step("quantizing")
    report = quantize_(
        model,
        {**dict.fromkeys(request.skip, None), "*": request.config},
        calibration=samples_of(text, model, tokenizer, request.samples, request.length),
        lm_head=request.lm_head,
        embeddings=request.embeddings,
        per_row_if_indivisible=True,
        fuse=request.fuse,
    )
    model.save_pretrained(target)
    _copy_others(path, target)
    return report


def _tokenizer(path: Path) -> Any:
    """Returns the tokenizer of a model's folder. Raises CheckpointError where transformers can read none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # it has no class of its own for damaged files
        what = f"{path} has no tokenizer that can be read, for --text"
        fix = "copy tokenizer.json and tokenizer_config.json there"
        raise CheckpointError(f"{what}: {fix} ({error})") from error


def _dtype(request: Request) -> Any:
    return {"f16": torch.float16, "bf16": torch.bfloat16, None: "auto"}[request.act]


def _asked(asked: Mapping[str, str], name: str) -> str:
    """Returns the format that was asked for a module, or for the experts that it is one of; "" where it has got it."""
    experts = name.rpartition(".")[0].rpartition(".")[0]
    return asked.get(name) or asked.get(experts, "")


def _with_reason(row: LayerReport, reason: Reason | None) -> LayerReport:
    """Returns a row of what is in a file; that of a dense layer with the reason, where one is known."""
    return replace(row, reason=reason.text, option=reason.option) if row.reason and reason else row


def _copy_others(path: Path, target: Path) -> None:
    """Copy what stands beside the weights of a model: its tokenizer, say, and the parts of a sentence encoder."""
    from lowbit.pylib.integrations.notice import CARD, with_notice

    for file in path.iterdir():
        if file.name == CARD and (target / CARD).exists():
            (target / CARD).write_text(with_notice(file.read_text(errors="replace")))
        elif file.is_file() and not file.name.endswith(WEIGHT_FILES) and not (target / file.name).exists():
            shutil.copy(file, target / file.name)
        elif file.is_dir() and file.name in _parts_of_encoder(path):
            shutil.copytree(file, target / file.name)


def _parts_of_encoder(path: Path) -> set[str]:
    """Returns the names of the folders that modules.json of sentence-transformers lists besides the model's own."""
    file = path / "modules.json"
    try:
        modules: Any = json.loads(file.read_text()) if file.is_file() else []
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} can't be read: {error}") from error
    return {str(module.get("path")) for module in modules if isinstance(module, dict)}


def _class_of(path: Path) -> Any:
    """Returns the class of a model: that of its config.json, if transformers has it."""
    import transformers

    names = read_json(path / "config.json").get("architectures") or ["AutoModel"]
    return getattr(transformers, str(names[0]), transformers.AutoModel)


# -- plain files


def _by_names(path: Path, target: Path, request: Request, on_step: Callable[[str], object]) -> QuantizationReport:
    """Quantize what is taken for linear layers, tensor by tensor, and save it as `save_checkpoint` does."""
    tensors = TensorFiles(path)
    for pattern in request.skip:
        if not any(fnmatchcase(name.removesuffix(".weight"), pattern) for name in tensors):
            raise SpecError(f"skip: {pattern!r} matches no module of {path}")
    model, rows, biases = nn.Module(), list[LayerReport](), set[str]()
    for name in tensors:
        module = name.removesuffix(".weight")
        reason = _reason(tensors, name, request)
        if reason is None:
            on_step(module)
            rows.append(_quantize(model, tensors, module, request))
            biases.add(f"{module}.bias")
        elif reason:
            rows.append(LayerReport.of_dense(module, tensors[name], reason))
    low_bit = {row.name for row in rows if not row.reason}
    for name in tensors:
        if name.removesuffix(".weight") not in low_bit and name not in biases:
            parent, _, leaf = name.rpartition(".")
            _submodule(model, parent).register_buffer(leaf, tensors[name])
    if not low_bit:
        table = QuantizationReport(tuple(rows))
        raise CheckpointError(f"{path} has no matrix *.weight that can be quantized:\n{table}")
    save_checkpoint(model, target)
    return QuantizationReport(tuple(rows))


def _reason(tensors: TensorFiles, name: str, request: Request) -> str | None:
    """Returns why a matrix stays dense, "" for what is no matrix, and None for one to quantize."""
    shape = tensors.shape(name)
    if len(shape) < 2:
        return ""
    if len(shape) > 2 or not name.endswith(".weight"):
        return "no matrix called *.weight"
    module = name.removesuffix(".weight")
    embeddings, outputs = () if request.embeddings else EMBEDDINGS, () if request.lm_head else OUTPUTS
    skipped = [*request.skip, *embeddings, *outputs]
    if pattern := next((pattern for pattern in skipped if fnmatchcase(module, pattern)), None):
        return f"its name matches {pattern}"
    t = tensors[name]
    if not t.is_floating_point() or t.itemsize < 2:
        return "no floats of 16 bits or more, but codes, it seems"
    try:
        request.config.spec(*shape)
    except SpecError as error:
        return str(error)
    return None


def _quantize(model: nn.Module, tensors: TensorFiles, module: str, request: Request) -> LayerReport:
    """Put the low-bit layer of a weight into a model; returns its row of the report."""
    weight = tensors[f"{module}.weight"]
    bias: Tensor | None = tensors.get(f"{module}.bias")
    act = request.act or ("bf16" if weight.dtype is torch.float32 else act_of(weight))
    spec = request.config.spec(*weight.shape, act=act, bias=bias is not None)
    with naming(module):
        layer, change = quantized_layer(weight, bias, spec, request.config.multiplied_in(act), device=request.device)
    parent, _, leaf = module.rpartition(".")
    _submodule(model, parent).add_module(leaf, layer)
    before = weight.nbytes + (0 if bias is None else bias.nbytes)
    return low_bit_row(module, request.config, [layer], change, before)


def _submodule(model: nn.Module, name: str) -> nn.Module:
    """Returns the module of a name, which is made if it is not there."""
    for part in name.split(".") if name else ():
        if part not in model._modules:
            model.add_module(part, nn.Module())
        model = model.get_submodule(part)
    return model
