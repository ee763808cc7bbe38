"""Numbers in the prose of the documentation are those of docs/results and of the sources.

Each function below writes the sentences of a page, with the numbers that it reads or computes. A sentence has to stand
in the page word for word, however its lines are broken. A test that fails shows the sentences as they should be."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

import lowbit
from benchmarks.models import read
from benchmarks.quality import plans, references
from benchmarks.quality.measure import K_QUANTS
from benchmarks.results import Results
from lowbit.dialect import spec
from lowbit.dialect.formats.dtypes import dtype
from lowbit.passes.kernels.prefill.family import TOKEN_TILES
from lowbit.passes.kernels.registry import FAMILIES
from lowbit.passes.target import Target
from lowbit.passes.targets import GPUS, parse_target, target_of_gpu
from lowbit.pylib.checkpoints import checkpoint
from lowbit.pylib.model_speed.measure import Measurement
from lowbit.pylib.nn import quant_plan
from lowbit.pylib.quantization import config
from lowbit.pylib.weights import saved

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs/results"
SIZES = ((4096, 4096), (8192, 8192), (8192, 28672), (57344, 8192))
U4 = {"weight": "u4", "group_size": 128, "zeros": "none", "act": "f16"}


def readme() -> Iterable[str]:
    llama, head = decode("models-h200-2026-11-24-llama", "llama-3.1-8b"), LIBRARIES
    qwen = decode("models-whole-h200-2026-11-24", "qwen2.5-32b")
    yield (
        f"Whole models of 4-bit weights decode {llama:.1f} times as fast as in bf16 at the sizes of Llama-3.1-8B "
        f"({decode(*head, lm_head=True):.1f} times with a 4-bit output layer), and {qwen:.1f} times "
        "at those of Qwen2.5-32B."
    )
    low, high = ends(folded_prompts())
    yield f"They read prompts as fast as in bf16, and {low:.1f} to {high:.1f} times as fast with activations in 8 bits"
    wide, narrow = ends(of_table(bits8=False)), ends(of_table(bits8=True))
    yield (
        f"Here it is {wide[0]:.1f} to {wide[1]:.1f} times as fast as cuBLAS with a weight in f16, and "
        f"{narrow[0]:.1f} to {narrow[1]:.1f} times as fast with x in 8 bits."
    )
    low, high = ends(prefill_ratios(first=256))
    yield f"| 256 to 8192 tokens, u4 in groups of 128 | {low:.2f} to {high:.2f} |"
    outliers, codes, both = (written_out(weight, "sm_90a") for weight in EXPANDED)
    yield f"| more than {outliers} tokens with outliers |"
    yield f"| more than {codes} tokens, scales are codes |"
    yield f"| more than {both} tokens, both |"
    low, high = ends(written_out(u4(n, k), t) for n, k in ((1024, 1024), (28672, 8192)) for t in ("sm_80", "sm_89"))
    yield f"| no wgmma, more than {low:.0f} to {high:.0f} tokens (u4 on an A100 or an L40S) |"
    odd = written_out(u4(8192, 8188, group_size=None), "sm_90a")
    yield f"| k no multiple of 8, more than {odd} tokens |"
    wide = lowbit.MatmulSpec(8192, 8192, "u8", zeros="int", compute="i8", group_size=128)
    yield f"x in 8 bits, more than {max(lowbit.compile(wide, 'sm_90a').choices.rows[-1].token_tiles)} tokens |"


def models() -> Iterable[str]:
    llama, qwen = decode("models-h200-2026-11-24-llama", "llama-3.1-8b"), decode(*WHOLE)
    head, two = decode(*LIBRARIES, lm_head=True), decode(*LIBRARIES, weight="u2")
    yield f"with 4-bit weights the 8B model decodes {llama:.1f} times as fast as in bf16, and {head:.1f} times with"
    yield f"the whole 32B model {qwen:.1f} times. At 2 bits the 8B model has {two:.1f} times"
    best = max(decode(*LIBRARIES, **library) for library in OTHERS)
    yield f"The next best library has {best:.1f} times at batch 1"
    again, alone = (faster(*LIBRARIES, 1, batch=16, lm_head=head) for head in (True, False))
    assert round(alone, 1) == 2
    yield f"Batch 16: twice as fast, {again:.1f} times with a low-bit output layer"
    yield f"and the 32B model {faster(*WHOLE, 1, batch=16):.1f} times"
    for batch in (1, 16):
        low, high = ends(slower(file, model, batch, compute) for file, model, compute in QUANTIZING)
        yield f"{100 * low:.0f} to {100 * high:.0f} % {'of its speed ' * (batch == 1)}at batch {batch}"
    u4_speed, folded = h100_prompts(None), h100_prompts("f8e4m3+fold")
    yield (
        f"On an H100 prompts of 512, 2048 and 8192 tokens run at {listed(u4_speed)} of bf16's speed in u4, and at "
        f"{listed(folded)} with folded scales"
    )


def performance() -> Iterable[str]:
    low, high = ends(prefill_ratios(first=128))
    yield f"{low:.2f} to {high:.1f} times as fast as cuBLAS in x's type"
    for n, k in SIZES:
        times = [us(n, k, m) for m in (1, 8, 16, 32, 64, 128, 256)]
        yield f"| {n} x {k} | {' | '.join(f'{t:.1f}' for t in times)} | {floor('u4', n, k):.1f} |"
        times = [us(n, k, m, time="sustained_us") for m in (1, 8, 16, 32, 64, 128, 256)]
        yield from [f"| sustained | {' | '.join(f'{t:.1f}' for t in times)} | |"] if n > 4096 else []
    others = ({"zeros": "int"}, {"zeros": "float"}, {"group_size": 32}, {"act": "bf16"})
    for n, k, m in product((8192, 57344), (8192,), (1, 16, 64)):
        pairs = [[beyond_bytes(n, k, m, time, **other) for time in ("us", "sustained_us")] for other in others]
        yield f"| {n} x {k}, m = {m} | {' | '.join(f'{a:.2f} / {b:.2f}' for a, b in pairs)} |"
    formats = ("u8", "f8e4m3", "u6", "f6e3m2", "u5", "u4", "nf4", "u3", "u2", "u1")
    for n, k in ((57344, 8192), (8192, 8192)):
        yield f"| {n} x {k} | {' | '.join(f'{us(n, k, 1, weight):.1f}' for weight in formats)} |"
        yield f"| floor | {' | '.join(f'{floor(weight, n, k):.1f}' for weight in formats)} |"
    low, high = ends(over_floor(f"u{bits}") for bits in (3, 4, 5, 6, 8))
    u2, u1 = over_floor("u2"), over_floor("u1")
    yield f"integers of 3 to 8 bits {low:.2f} to {high:.2f} of the floor at 57344 x 8192, u2 {u2:.2f}, u1 {u1:.2f}."
    yield f"u2 takes {u2:.2f} times its floor, u1 {u1:.2f}."
    outliers, codes, both = (written_out(weight, "sm_90a") for weight in EXPANDED)
    yield f"| more than {outliers} tokens with outliers, {codes} with scales that are codes, {both} with both |"


def choosing() -> Iterable[str]:
    lines = {"u8": "RTN", "f6e3m2": "", "u4": "GPTQ", "u2": "GPTQ"}
    for weight, line in lines.items():
        gb = step(*LIBRARIES, 1, weight=weight).nbytes / 1e9
        speeds = [faster(*LIBRARIES, tokens, weight=weight) for tokens in (1, 128, 2048)]
        cells = [f"{gb:.2f}", *(f"{speed:.2f}" for speed in speeds), *small_model(line, weight)]
        yield f"| `{weight}` | {' | '.join(cells)} |"
    dense = step(*LIBRARIES, 1, weight="bf16").nbytes / 1e9
    yield f"In bf16 the model takes {dense:.2f} GB"
    yield f"4-bit Qwen2.5-32B takes {step(*WHOLE, 1, weight='u4').nbytes / 1e9:.1f} GB"
    low, high = ends(folded_prompts())
    yield f"reads prompts {low:.1f} to {high:.1f} times as fast as bf16"


def comparison() -> Iterable[str]:
    for n, k in ((4096, 4096), (8192, 8192), (57344, 8192)):
        for m in (1, 16, 64):
            names = ("lowbit", "humming", "gemlite", "tinygemm", "bitsandbytes", "torch")
            yield f"| {n} x {k}, m = {m} | {' | '.join(f'{us(n, k, m, peer=name):.1f}' for name in names)} |"
    ours = decode(*LIBRARIES)
    torchao, bitsandbytes, gemlite = (decode(*LIBRARIES, **library) for library in OTHERS)
    yield f"lowbit decodes {ours:.2f} times as fast as bf16, torchao {torchao:.2f}, GemLite {gemlite:.2f}, and"
    yield f"bitsandbytes {bitsandbytes:.2f} times"
    speeds = [[each["decode"] for each in records("gguf") if each["by"].startswith(by)] for by in ("llama", "lowbit")]
    low, high = ends(theirs / ours for theirs, ours in zip(*speeds))
    yield f"llama.cpp decodes {low:.1f} to {high:.1f} times as fast as lowbit"


def stability() -> Iterable[str]:
    yield f"| a packed weight, `w.state_dict()` | `format`: {saved.FORMAT} |"
    yield f"| a folder of `save_checkpoint` or `lowbit quantize` | `{checkpoint.VERSION_KEY}`: {checkpoint.VERSION} |"
    yield f"| `MatmulSpec.to_dict()` | `version`: {spec.VERSION} |"
    yield f"| `QuantConfig.to_dict()`, config.json | `version`: {config.VERSION} |"
    yield f"| `QuantPlan.save()` | `version`: {quant_plan.VERSION} |"
    yield f"The version is {lowbit.__version__}."


def slower(file: str, model: str, batch: int, compute: str) -> float:
    """Returns what part of its speed decoding loses where x is quantized in every call."""
    plain, quantized = (step(file, model, 1, weight="u4", batch=batch, compute=c) for c in (None, compute))
    return 1 - plain.seconds / quantized.seconds


def over_floor(weight: str) -> float:
    """Returns how many times as long as reading it a large weight takes for one token."""
    return us(57344, 8192, 1, weight) / floor(weight, 57344, 8192)


def gains_of_plans(trust: float) -> list[float]:
    """Returns how many percent less divergence plans have than candidates of their size that they are not."""
    found = records("plans")
    plans = [record for record in found if record.get("trust") == trust]
    pairs = [(plan, a) for plan in plans for a in found if "trust" not in a and abs(plan["bits"] - a["bits"]) < 0.006]
    gains = [100 * (1 - plan["divergence"] / alike["divergence"]) for plan, alike in pairs]
    return [gain for gain in gains if gain]


def gpus() -> Iterable[str]:
    spark, thor = target_of_gpu(121), target_of_gpu(110)
    assert spark and thor and target_of_gpu(75) is None and parse_target("sm_80") in GPUS
    yield f"have no target of their own. lowbit takes `{spark}` and `{thor}` for them, untested."
    yield "**T4, RTX 20xx (sm_75), V100 (sm_70) and older** are not supported"


def eight_bit() -> Iterable[str]:
    plain, quantized = decode(*LIBRARIES), decode(*LIBRARIES, compute="f8e4m3")
    yield f"reaches {plain:.1f} times the speed of bf16, and {quantized:.1f} times with x in 8 bits"
    grouped, per_row = (lowbit.MatmulSpec(8192, 8192, "u8", group_size=g, compute="i8") for g in (128, None))
    hopper, ampere = parse_target("sm_90a"), parse_target("sm_80")
    yield (
        f"A launch has up to {most(grouped, hopper)} tokens with wgmma or {most(grouped, ampere)} without; with one "
        f"scale per row and wgmma up to {most(per_row, hopper)}."
    )
    for n, k in SIZES_OF_8_BITS:
        for m in (128, 512, 2048, 8192):
            quantized = prefill_us(n, k, m, compute="f8e4m3", peer="lowbit+quantize")
            ours = [prefill_us(n, k, m, compute=c) for c in ("f8e4m3", "f8e4m3+fold")]
            others = [prefill_us(n, k, m, act="f16", compute="i8"), *(prefill_us(n, k, m, **x) for x in CUBLAS)]
            yield f"| {m} | {' | '.join(f'{us:.1f}' for us in (ours[0], quantized, ours[1], *others))} |"
    for weight, compute in PER_ROW:
        times = [prefill_us(8192, 8192, m, weight, None, compute=compute) for m in (128, 512, 2048, 8192)]
        name = f"`{compute.removesuffix('+fold')}`" + ", folded" * compute.endswith("+fold")
        yield f"| `{weight}` | {name} | {' | '.join(f'{t:.1f}' for t in times)} |"
    low, high = ends(folding(n, k, m, "u4", 128) for n, k in SIZES_OF_8_BITS for m in (512, 1024, 2048, 4096, 8192))
    yield f"takes {low:.0f} to {high:.0f} % less with folded scales from 512 tokens on"
    low, high = ends(folding(8192, 8192, m, "f8e4m3", None) for m in (512, 2048, 8192))
    yield f"an f8e4m3 weight with one scale per row {low:.0f} to {high:.0f} %"


def folding(n: int, k: int, m: int, weight: str, group_size: int | None) -> float:
    """Returns by how many percent folded scales shorten a matmul with x in f8e4m3."""
    plain, folded = (prefill_us(n, k, m, weight, group_size, compute=c) for c in ("f8e4m3", "f8e4m3+fold"))
    return 100 * (1 - folded / plain)


def prefill_us(
    n: int, k: int, m: int, weight: str | None = "u4", group_size: int | None = 128, act: str = "bf16", **other: Any
) -> float:
    """Returns the microseconds of a matmul of many tokens, by the latest run."""
    results = Results.read(RESULTS / "prefill-h200-2026-11-24.json")
    entries = {"peer": "lowbit", "weight": weight, "group_size": group_size, "act": act, "n": n, "k": k, "m": m}
    found = results.find(**(entries | other))
    assert found
    return float(found["us"])


def quality() -> Iterable[str]:
    paper = next(r for r in records("quality") if r["line"] == "SpQR of the paper, threshold 0.35")
    yield f"the paper's recipe (`clip=\"max\"`) loses {1000 * paper['divergence']:.2f} thousandths of a nat"

    (low, high), (few, many) = (ends(gains_of_plans(trust)) for trust in plans.TRUSTS)
    yield f"a candidate's size have {low:.0f} to {high:.0f} % less, and {few:.0f} to {many:.0f} % less by what was"
    yield from beside_authors()
    yield from beside_llama_cpp()


def beside_authors() -> Iterable[str]:
    last, before = (_of_layer(f"minilm layer.{i}.output.dense") for i in (5, 4))
    three, two = (last[f"hqq HQQ u{bits}, groups of 64"][1] for bits in (3, 2))
    held_out, other = before["torchao MXFP4, EVEN"]
    yield f"torchao's EVEN, where it has {100 * (held_out - 1):.0f} % now"
    yield f"{three:.2f} times the error of the authors' HQQ with 3 bits and {two:.2f} times with 2"
    yield f"the one before {other:.2f} times that of torchao's EVEN"


def _of_layer(layer: str) -> dict[str, list[float]]:
    """Returns by reference the ratios of errors on held-out and on other text, means over draws."""
    found = [record["ratios"] for record in records("authors") if record["layer"] == layer]
    return {name: [fmean(each[name][text][0] for each in found) for text in (0, 1)] for name in found[0]}


def beside_llama_cpp() -> Iterable[str]:
    found, kinds = records("references"), set(product(references.TYPES, references.GIVEN))
    means, layers = zip(*(references.errors(name, "no", found) for name in K_QUANTS))
    low, high = ends(each.mean for each in means)
    yield f"at most {max(each.mean for each in layers):.2f} times the output error of llama.cpp's search in every layer"
    yield f"and {low:.2f} to {high:.2f} of it on average; with importances"
    means, layers = zip(*(references.errors(name, "yes", found) for name in K_QUANTS))
    low, high = ends(each.mean for each in means)
    yield f"with importances {low:.2f} to {high:.2f}, and up to {max(each.mean for each in layers):.2f} in a layer"
    others = {(name, "no") for name in ("q4_0", "q4_1", "q5_0", "q5_1")} | {("q8_0", "no"), ("q8_0", "yes")}
    low, high = ends(references.times(*kind, found) for kind in kinds - others)
    yield f"Where both search, ours takes {low:.1f} to {high:.1f} times as long"
    low, high = ends(references.times(*kind, found) for kind in others)
    least, most = ends(100 * (1 - references.errors(*kind, found)[0].mean) for kind in others)
    yield f"ours takes {low:.0f} to {high:.0f} times as long, for {least:.0f} to {most:.0f} % less error"


def cpu() -> Iterable[str]:
    speeds = [[each["decode"] for each in records("gguf") if each["by"].startswith(by)] for by in ("llama", "lowbit")]
    low, high = ends(theirs / ours for theirs, ours in zip(*speeds))
    yield f"a token takes {low:.1f} to {high:.1f} times as long"


def tuning() -> Iterable[str]:
    entries = json.loads((ROOT / "passes/scheduling/data/nvidia_h200.json").read_text())["entries"]
    days = sorted(Counter(entry["date"] for entry in entries).items())
    counts = [count for _, count in days]
    yield (
        f"The table has {len(entries)} entries, measured from {days[0][0]} to {days[-1][0]}: {counts[0]} on the first "
        f"day, {', '.join(map(str, counts[1:-1]))} and {counts[-1]} on later ones"
    )
    few = [tile for tile in TOKEN_TILES if tile < 128]
    many = [tile for tile in TOKEN_TILES if tile >= 128]
    yield f"{', '.join(map(str, few))} and {len(many)} numbers from {many[0]} to {many[-1]})"
    calls = json.loads((RESULTS / "first-calls-h100-2026-11-26.json").read_text())["calls"]
    times = [call["microseconds"] / call["best_microseconds"] for call in calls]
    near = sum(ratio <= 1.1 for ratio in times)
    yield f"There {near} of {len(times)} first calls"
    yield f"{sum(times) / len(times):.3f} on average, {max(times):.2f} at worst"


def design() -> Iterable[str]:
    few = [str(tile) for tile in TOKEN_TILES if 64 < tile <= 128]
    yield f"the smallest of {', '.join(few[:-1])} and {few[-1]}"
    outliers, codes, both = (written_out(weight, "sm_90a") for weight in EXPANDED)
    yield f"up to {outliers} with outliers, {codes} with a second level, {both} with both"


LIBRARIES = ("models-libraries-h200-2026-11-23", "llama-3.1-8b")
OTHERS = (
    {"weight": "int4", "library": "torchao"},
    {"weight": "nf4", "library": "bitsandbytes"},
    {"weight": "u4", "library": "gemlite"},
)
SIZES_OF_8_BITS = ((4096, 4096), (8192, 8192), (34816, 5120))
CUBLAS: tuple[dict[str, Any], ...] = (
    {"peer": "torch", "weight": None, "group_size": None, "compute": None},
    {"peer": "torch-fp8", "compute": "f8e4m3"},
)
"""cuBLAS with a weight in bf16, and in fp8."""
PER_ROW = (("u4", "f8e4m3"), ("u4", "i8"), ("u8", "i8"), ("f8e4m3", "f8e4m3"), ("f8e4m3", "f8e4m3+fold"))
WHOLE = ("models-whole-h200-2026-11-24", "qwen2.5-32b")
QUANTIZING = (
    (*LIBRARIES, "f8e4m3"),
    (*LIBRARIES, "f8e4m3+fold"),
    ("models-h200-2026-11-24", "qwen2.5-32b, 16 layers", "f8e4m3+fold"),
)
PAGES: dict[str, Callable[[], Iterable[str]]] = {
    "README.md": readme,
    "docs/choosing.md": choosing,
    "docs/comparison.md": comparison,
    "docs/cpu.md": cpu,
    "docs/design.md": design,
    "docs/eight-bit.md": eight_bit,
    "docs/gpus.md": gpus,
    "docs/models.md": models,
    "docs/performance.md": performance,
    "docs/quality.md": quality,
    "docs/stability.md": stability,
    "docs/tuning.md": tuning,
}


@pytest.mark.parametrize("page", PAGES)
def test_sentences_have_the_numbers_of_their_sources(page: str) -> None:
    text = " ".join((ROOT / page).read_text().split())
    assert [sentence for sentence in PAGES[page]() if sentence not in text] == []


def u4(n: int, k: int, **other: Any) -> lowbit.MatmulSpec:
    return lowbit.MatmulSpec(n, k, "u4", **{"group_size": 128, **other})


EXPANDED = (
    u4(4096, 4096, outliers=True),
    lowbit.MatmulSpec.preset("q4_k", 4096, 4096),
    lowbit.MatmulSpec.preset("spqr", 4096, 4096),
)
"""Weights with outliers, with scales that are codes, and with both."""


@cache
def written_out(spec: lowbit.MatmulSpec, target: str) -> int:
    """Returns the number of tokens above which the weight is expanded for the vendor's matmul."""
    *_, before, last = lowbit.compile(spec, target).choices.rows
    assert before.last is not None and last.token_tiles == ()
    return before.last


def most(spec: lowbit.MatmulSpec, target: Target) -> int:
    """Returns the most tokens of a launch of the eight_bit kernel."""
    return max(FAMILIES["eight_bit"].token_tiles(spec, target))


@cache
def decoding() -> Results:
    return Results.read(RESULTS / "h200-2026-11-22.json")


def us(
    n: int, k: int, m: int, weight: str = "u4", peer: str = "lowbit", time: str = "us", **other: Any
) -> float:
    """Returns the microseconds for m tokens, by the published run; peer: "torch" is cuBLAS in f16."""
    entries = {"act": "f16", "weight": None} if peer == "torch" else {**U4, "weight": weight, **other}
    found = decoding().find(**entries, peer=peer, n=n, k=k, m=m)
    assert found
    return float(found[time])


def beyond_bytes(n: int, k: int, m: int, time: str, **other: Any) -> float:
    """Returns the time next to that of u4 in groups of 128, as a multiple of the same ratio of read floors."""
    times, floors = us(n, k, m, time=time, **other) / us(n, k, m, time=time), us(n, k, 0, peer="floor", **other)
    return times / (floors / us(n, k, 0, peer="floor"))


def floor(weight: str, n: int, k: int) -> float:
    """Returns the microseconds that reading a weight takes, by the published run."""
    found = decoding().find(**{**U4, "weight": weight}, peer="floor", n=n, k=k)
    assert found
    return float(found["us"])


def prefill_ratios(first: int) -> list[float]:
    """Returns how many times as fast as cuBLAS u4 is from so many tokens on, with x in 16 bits, by the latest run."""
    results = Results.read(RESULTS / "prefill-h200-2026-11-24.json")
    ours = results.all(peer="lowbit", weight="u4", compute=None)
    return [ratio for r in ours if r["m"] >= first and "us" in r and (ratio := results.speedup(r))]


def of_table(bits8: bool) -> list[float]:
    """Returns the speed-ups over cuBLAS that the README's table of prefill shows; bits8: with x in 8 bits."""
    _, _, table = (ROOT / "README.md").read_text().partition("<!-- prefill: begin -->")
    rows = [row for row in table.partition("<!-- prefill: end -->")[0].splitlines() if row.startswith("| u4")]
    return [float(ratio) for row in rows if (" in " in row) == bits8 for ratio in re.findall(r"\((\d\.\d+)\)", row)]


def step(file: str, model: str, tokens: int, **wanted: Any) -> Measurement:
    """Returns the first measurement of batch 1 with these entries."""
    entries = {"batch": 1, "tokens": tokens, "compute": None, "library": "", "lm_head": False, **wanted}
    rows = read(RESULTS / f"{file}.json")[model]
    return next(r for r in rows if all(getattr(r, name) == value for name, value in entries.items()))


def faster(file: str, model: str, tokens: int, **wanted: Any) -> float:
    """Returns how many times as fast as bf16 a step of a model is."""
    same = {name: wanted[name] for name in ("batch", "context") if name in wanted}
    dense = step(file, model, tokens, weight="bf16", **same)
    ours = step(file, model, tokens, **{"weight": "u4", **wanted})
    return dense.seconds / ours.seconds


def decode(file: str, model: str, **wanted: Any) -> float:
    return faster(file, model, 1, **wanted)


def folded_prompts() -> list[float]:
    """Returns how many times as fast as bf16 prompts are read with folded scales, by the runs of whole models."""
    llama = [faster("models-h200-2026-11-24-llama", "llama-3.1-8b", m, compute="f8e4m3+fold@65") for m in (128, 2048)]
    qwen = [faster("models-h200-2026-11-24", "qwen2.5-32b, 16 layers", m, compute="f8e4m3+fold") for m in (512, 2048)]
    return llama + qwen


def h100_prompts(compute: str | None) -> list[float]:
    name = "prompts-h100-2026-11-26"
    return [faster(name, "llama-3.1-8b", m, compute=compute, context=0) for m in (512, 2048, 8192)]


def small_model(line: str, weight: str) -> list[str]:
    """Returns a method, by how much it raises the small model's perplexity, and its divergence, as cells of a table."""
    name = line or "floats, RTN"
    bits = dtype(weight).bits
    found = next(r for r in records("quality") if r["line"] == name and r["bits"] == bits)
    return [line or "RTN", f"{found['above'][0]:+.2f} %", f"{1000 * found['divergence']:.3g}"]


def records(name: str) -> list[dict[str, Any]]:
    return json.loads((RESULTS / f"{name}.json").read_text())["records"]


def ends(numbers: Iterable[float]) -> tuple[float, float]:
    every = list(numbers)
    return min(every), max(every)


def listed(numbers: Sequence[float]) -> str:
    return f"{', '.join(f'{number:.2f}' for number in numbers[:-1])} and {numbers[-1]:.2f}"


def test_every_gpu_has_its_row() -> None:
    """docs/gpus.md has a row for each architecture of `passes/target.py`, with what is known of its kernels."""
    page = (ROOT / "docs/gpus.md").read_text()
    rows = dict(re.findall(r"^\| `(sm_\w+)` \| .* \| ([^|]+) \|$", page, re.MULTILINE))
    tuned = {json.loads(file.read_text())["gpu"] for file in ROOT.glob("passes/scheduling/data/*.json")}
    assert list(rows) == [target.arch for target in GPUS]
    for target in GPUS:
        assert rows[target.arch].startswith("run and tuned" if target.hardware in tuned else "emulated only"), target


