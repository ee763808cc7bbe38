"""Presets: what `lowbit tune` measures for the tables that come with lowbit."""

from __future__ import annotations

from dataclasses import dataclass

from lowbit.dialect.errors import SpecError


@dataclass(frozen=True)
class Part:
    """All of these shapes in all of these formats, with all of these zeros and groups, for all of these token tiles,
    types of x, and types of products (`byte_codes.products_named`)."""

    shapes: tuple[str, ...]
    weights: tuple[str, ...]
    tiles: tuple[int, ...]
    zeros: tuple[str, ...] = ("none",)
    group_sizes: tuple[int | None, ...] = (128,)
    acts: tuple[str, ...] = ("f16",)
    computes: tuple[str, ...] = ("none",)


TILES = (1, 16, 8, 32, 64)
MANY = (512, 1024, 2048, 256, 4096, 8192, 128, 192, 384, 768, 1536, 3072)
LARGE = ("57344x8192", "8192x8192")
PREFILL = ("8192x8192", "4096x4096", "34816x5120")
BETWEEN = (  # sizes that fill the multiprocessors otherwise than those of the models
    "14336x4096",
    "5120x13824",
    "13824x5120",
    "2560x2560",
    "2048x5632",
    "3072x8192",
    "8192x3072",
    "9216x3072",
    "12288x12288",
    "16384x6144",
)
UNKNOWN = (  # sizes of models that no table has
    "24576x4096",
    "37888x3584",
    "3584x18944",
    "7168x2048",
    "43008x5376",
    "5376x21504",
    "19456x2560",
    "2560x9728",
    "7168x7168",
    "18432x7168",
)
FORMATS = ("u8", "f8e4m3", "u6", "f6e3m2", "u5", "u3", "u2", "u1", "nf4", "f4e2m1")
PRESETS = {  # the most important first: a session may be short
    "decode": (
        Part((*LARGE, "4096x4096", "8192x28672"), ("u4",), (*TILES, 128, 256)),
        Part(("Llama-3.1-8B", "Llama-3.1-70B"), ("u4",), (*TILES, 128, 256)),
        Part(LARGE, FORMATS, (1, 16)),
        Part(("Qwen2.5-32B", "Gemma-2-9B", "Llama-2-7B"), ("u4",), TILES),
        Part(LARGE, ("u4",), (1, 16, 64), zeros=("int", "float")),
        Part(LARGE, ("u4",), (1, 16, 64), zeros=("none", "int", "float"), group_sizes=(64, 32)),
        Part(BETWEEN, ("u4",), (1, 8, 16, 64)),
    ),
    "models": (  # what models in bf16 are made of by default
        Part(("Llama-3.1-8B", "Qwen2.5-32B"), ("u4",), (*TILES, 128, 256, 512), zeros=("int",), acts=("bf16",)),
        Part(("Llama-3.1-70B", "Qwen2.5-7B", "Gemma-2-9B"), ("u4",), TILES, zeros=("int",), acts=("bf16",)),
        Part(("Llama-3.1-8B", "Qwen2.5-32B"), ("u8", "f6e3m2", "u2"), (1, 16), acts=("bf16",)),
    ),
    "prefill": (
        Part(PREFILL, ("u4",), MANY),
        Part(("Llama-3.1-8B", "Qwen2.5-32B"), ("u4",), MANY[:7], acts=("bf16",)),
        Part(PREFILL, ("u8", "f6e3m2", "nf4"), (128, 512, 2048)),
        Part(PREFILL, ("u4",), (128, 512, 2048), zeros=("int", "float")),
        Part(PREFILL, ("u4",), (128, 512, 2048), group_sizes=(32, None)),
    ),
    "unknown": (
        Part(UNKNOWN, ("u4",), (1, 16)),
        Part(UNKNOWN, ("f6e3m2",), (1, 16), group_sizes=(None,)),
        Part(UNKNOWN, ("u4",), (1, 16), group_sizes=(32,)),
        Part(UNKNOWN, ("u4",), (8, 64, 128)),
    ),
    "eight_bit": (
        Part(PREFILL, ("u4",), (8, 16, 32, 64, *MANY), computes=("f8e4m3", "i8")),
        Part(PREFILL, ("u4",), MANY, computes=("f8e4m3+fold",)),
        Part(PREFILL, ("u4",), (64, *MANY[:7]), group_sizes=(None,), computes=("f8e4m3", "i8")),
        Part(("8192x8192",), ("u8", "f8e4m3"), (64, *MANY[:7]), group_sizes=(None,), computes=("f8e4m3", "i8")),
    ),
}


def preset(name: str) -> tuple[Part, ...]:
    """Returns the parts that a name stands for. Raises SpecError for an unknown one."""
    if name not in PRESETS:
        raise SpecError(f"--preset {name!r} must be one of {', '.join(PRESETS)}")
    return PRESETS[name]
