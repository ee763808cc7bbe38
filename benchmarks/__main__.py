"""`python -m benchmarks`: measure, and read what was measured."""

from __future__ import annotations

import json
import math
import sys
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer

from lowbit.dialect.errors import LowbitError, TargetError, reason

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)

Commit = Annotated[str | None, typer.Option(help="Of the sources, where they are no git checkout.")]
File = Annotated[Path, typer.Argument(help="What `run` has written.")]
Weight = Annotated[str, typer.Option("--weight", "-w", help="Format.")]
GroupSize = Annotated[int, typer.Option("--group-size", "-g", help="Columns per scale.")]
Zeros = Annotated[str, typer.Option(help="none, int or float.")]


FORMATS = "u4,bf16,u8,f6e3m2,u2,u4:f8e4m3"
"""What whole models are measured in."""


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _check_gpu() -> None:
    """Raises TargetError without a GPU."""
    import torch

    if not torch.cuda.is_available():
        raise TargetError("this is measured on an NVIDIA GPU, and none is here; `python -m benchmarks cpu` needs none")


@app.command()
def run(
    plan: Annotated[
        str | None,
        typer.Argument(help="decode, prefill, invariant, smoke, or a TOML file: parts with the options below."),
    ] = None,
    shapes: Annotated[
        str | None, typer.Option(help="issue, squares, a model, a layer, or sizes as 4096x11008.")
    ] = None,
    formats: Annotated[str | None, typer.Option(help="Weights: u4,i3,f6e3m2,nf4 ...")] = None,
    m: Annotated[str | None, typer.Option("--m", "-m", help="Numbers of tokens: 1,8,16.")] = None,
    peers: Annotated[
        str | None, typer.Option(help="lowbit,lowbit+quantize,torch-fp8,humming,fbgemm,gemlite ...; or all.")
    ] = None,
    group_size: Annotated[int | None, typer.Option(help="Columns per scale; 0: one scale per row.")] = None,
    zeros: Annotated[str | None, typer.Option(help="none, int or float.")] = None,
    act: Annotated[str | None, typer.Option(help="f16 or bf16.")] = None,
    compute: Annotated[str | None, typer.Option(help="Of products: none,i8,f8e4m3,i8+fold,f8e4m3+fold.")] = None,
    energy: Annotated[str | None, typer.Option(help="Numbers of tokens whose energy counts: 512,4096.")] = None,
    eager: Annotated[bool | None, typer.Option(help="Time eager calls, too.")] = None,
    sustained: Annotated[bool | None, typer.Option(help="Time what never rests, too.")] = None,
    out: Annotated[
        Path, typer.Option(help="Results; if it exists, only what is not in it is measured.")
    ] = Path("results.json"),
    budget: Annotated[float, typer.Option(help="Seconds after which nothing is begun.")] = math.inf,
    retry: Annotated[bool, typer.Option(help="Measure again what failed or was missing.")] = False,
    commit: Commit = None,
) -> None:
    """Measure. Options beat the plan; lists are separated by commas."""
    from benchmarks.cases import PLANS, Plan
    from benchmarks.environment import environment
    from benchmarks.measure import run as measure
    from benchmarks.peers import PEERS
    from benchmarks.results import Results

    lists = {"shapes": shapes, "formats": formats, "peers": peers, "compute": compute}
    given: dict[str, Any] = {name: text.split(",") for name, text in lists.items() if text is not None}
    if given.get("peers") == ["all"]:
        given["peers"] = list(PEERS)
    for name, numbers in (("m", m), ("energy", energy)):
        if numbers is not None:
            given[name] = [int(each) for each in numbers.split(",")]
    single = {"group_size": group_size, "zeros": zeros, "act": act, "eager": eager, "sustained": sustained}
    given |= {name: value for name, value in single.items() if value is not None}
    plans = Plan.read(PLANS.get(plan, Path(plan)), given) if plan else [Plan.of(given)]
    for part in plans:
        part.cases()  # raises for what is wrong with it, before anything is measured
    _check_gpu()
    results = Results.open(out, environment(commit), retry)
    measure(plans, results, _log, budget)
    _log(f"wrote {out}")


@app.command()
def table(file: File) -> None:
    """Results as markdown tables; those of `run invariant` as two short ones."""
    from benchmarks.invariant_page import OURS, page
    from benchmarks.results import Results
    from benchmarks.tables import tables

    results = Results.read(file)
    print(page(results) if results.all(peer=OURS) else tables(results))


@app.command()
def plot(
    file: File, out: Annotated[Path, typer.Option(help="Folder for the SVG files.")] = Path("docs/img")
) -> None:
    """Results as figures: speed-ups per format and per layer, batch sweeps, a roofline."""
    from benchmarks.plots import plot as draw
    from benchmarks.results import Results

    for path in draw(Results.read(file), out):
        print(path)


@app.command()
def publish(file: File, root: Annotated[Path, typer.Option(help="The repository.")] = Path()) -> None:
    """Write the tables into README.md and docs/benchmarks.md, between their marks, and the figures into docs/img."""
    from benchmarks.publish import publish as write
    from benchmarks.results import Results

    for path in write(Results.read(file), root):
        print(path)


@app.command()
def publish_prefill(
    files: Annotated[list[Path], typer.Argument(help="What `run prefill` has written, the latest first.")],
    root: Annotated[Path, typer.Option(help="The repository.")] = Path(),
) -> None:
    """Write what many tokens take into README.md and docs/benchmarks.md, between their marks, and draw figures."""
    from benchmarks.prefill_page import publish as write
    from benchmarks.results import Results

    for path in write([Results.read(file) for file in files], root):
        print(path)


@app.command()
def publish_invariant(
    file: Annotated[Path, typer.Argument(help="What `run invariant` has written.")],
    root: Annotated[Path, typer.Option(help="The repository.")] = Path(),
) -> None:
    """Write what equal bits in every batch cost into docs/invariant.md, between its marks."""
    from benchmarks.invariant_page import publish as write
    from benchmarks.results import Results

    for path in write(Results.read(file), root):
        print(path)


@app.command()
def publish_first_calls(
    file: Annotated[Path, typer.Argument(help="What `lowbit tune --check --preset unknown -o FILE` has written.")],
    root: Annotated[Path, typer.Option(help="The repository.")] = Path(),
) -> None:
    """Write how good schedules are that were chosen without measuring into docs/tuning.md, between its marks."""
    from benchmarks.first_calls_page import publish as write

    for path in write(file, root):
        print(path)


@app.command()
def show(commit: Commit = None) -> None:
    """Correctness, speed against torch f16, compile time and host cost in one markdown table: two minutes."""
    from benchmarks.show import show as table

    _check_gpu()
    print(table(commit, _log))


@app.command()
def models(
    names: Annotated[list[str], typer.Argument(help="Models that `lowbit bench-model` knows.")],
    weights: Annotated[str, typer.Option("--weight", "-w", help="u4:f8e4m3 has activations of 8 bits.")] = FORMATS,
    group_size: Annotated[int, typer.Option("--group-size", "-g", help="0: one scale per row.")] = 128,
    batch: Annotated[str, typer.Option(help="Sequences that are decoded at once, or none.")] = "1,16",
    prefill: Annotated[str, typer.Option(help="Lengths of prompts, or none.")] = "128,512,2048,8192",
    lm_head: Annotated[bool, typer.Option(help="The first low-bit format also with a low-bit output layer.")] = True,
    peers: Annotated[str, typer.Option(help="torchao,bitsandbytes,gemlite; all: those that are installed.")] = "",
    layers: Annotated[int | None, typer.Option(help="Keep so many layers.")] = None,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    compiled: Annotated[bool, typer.Option("--compile/--no-compile")] = True,
    out: Annotated[Path, typer.Option(help="Results; a model that is in it is replaced.")] = Path("models.json"),
    commit: Commit = None,
) -> None:
    """Language models with random weights: tokens per second in several formats, compiled at the same time."""
    from benchmarks.models import jobs_of, measure_models, read, write
    from benchmarks.peers import MODEL_PEERS
    from lowbit.pylib.cli.bench_model import model_steps, quantizations
    from lowbit.pylib.cli.machine import checked_device
    from lowbit.pylib.model_speed.measure import Options
    from lowbit.pylib.model_speed.table import aligned, table

    checked_device(device)
    formats, steps = quantizations(weights, group_size), tuple(model_steps(batch, prefill, context=512))
    others = [name for name, peer in MODEL_PEERS.items() if not peer.missing()] if peers == "all" else peers.split(",")
    others = [name for name in others if name]
    for name in names:
        options = Options(device=device, compiled=compiled)
        jobs = jobs_of(name, formats, steps, options, layers=layers, with_lm_head=lm_head, peers=others)
        title = f"{name}, {layers} layers" if layers else name
        measure_models(jobs, _log, lambda measured, title=title: write(measured, title, out, commit))
        print(f"{title}\n\n{aligned(table(read(out)[title]))}\n")


@app.command()
def publish_models(
    files: Annotated[list[Path], typer.Argument(help="What `models` has written, the latest first.")],
    root: Annotated[Path, typer.Option(help="The repository.")] = Path(),
) -> None:
    """Write what whole models take into docs/models.md, between its marks, and the figures into docs/img."""
    from benchmarks.model_page import publish as write

    for path in write(files, root):
        print(path)


@app.command()
def experts(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="qwen3-30b-a3b, mixtral-8x7b, deepseek-v3, gpt-oss-120b; default: the first two."),
    ] = None,
    weight: Annotated[
        str | None, typer.Option("--weight", "-w", help="Format of lowbit; default: u4, or mxfp4 for gpt-oss.")
    ] = None,
    group_size: Annotated[int, typer.Option("--group-size", "-g", help="Columns per scale, with --weight.")] = 128,
    m: Annotated[str, typer.Option("--m", "-m", help="Numbers of tokens.")] = "1,8,16,32,64,512,4096",
    peers: Annotated[str, typer.Option(help="marlin,humming, which need vLLM; all: both.")] = "",
    out: Annotated[Path, typer.Option(help="Results.")] = Path("experts.json"),
    commit: Commit = None,
) -> None:
    """Experts with random weights against bf16 grouped_mm and others' kernels: microseconds, eager and in graphs."""
    from benchmarks.experts import USUAL, measure, table, write
    from benchmarks.peers.experts import EXPERT_PEERS
    from lowbit.pylib.quantization.config import QuantConfig

    _check_gpu()
    config = QuantConfig(weight, group_size, clip="max") if weight else None
    tokens = [int(each) for each in m.split(",")]
    others = list(EXPERT_PEERS) if peers == "all" else [name for name in peers.split(",") if name]
    records: list[dict[str, Any]] = []
    for name in names or USUAL:
        records += measure(name, tokens, _log, config, others)
        write(records, out, commit)
    print(table(records))


@app.command()
def vllm(
    model: Annotated[str, typer.Argument(help="A model that `lowbit bench-model` knows.")] = "llama-3.1-8b",
    weights: Annotated[
        str,
        typer.Option(
            "--weight", "-w", help="bf16, fp8, gptq, gptq+humming, gptq+lowbit; formats of lowbit: u4, u4:f8e4m3 ..."
        ),
    ] = "bf16,gptq,fp8,u4,u4:f8e4m3",
    group_size: GroupSize = 128,
    layers: Annotated[int | None, typer.Option(help="Keep so many layers.")] = None,
    together: Annotated[int, typer.Option(min=1, help="Engines that start at the same time.")] = 1,
    warm: Annotated[bool, typer.Option("--warm", help="Start each again, with what it compiled before.")] = False,
    limit: Annotated[float, typer.Option(help="Seconds to wait for an engine that says nothing.")] = 600.0,
    work: Annotated[Path, typer.Option(help="For models (tens of GB), caches and logs.")] = Path("vllm-work"),
    out: Annotated[Path, typer.Option(help="Results; the same model and format are replaced.")] = Path("vllm.json"),
    commit: Commit = None,
) -> None:
    """Models with random weights inside vLLM: start, steps, prompts, throughput, and users who wait for answers."""
    from benchmarks.serving.page import steps, users
    from benchmarks.serving.run import Job, serve

    _check_gpu()
    jobs = [Job(model, layers, name, group_size) for name in weights.split(",")]
    records = [each for each in serve(jobs, work, out, together, warm, limit, _log, commit) if "online" in each]
    if records:
        print(f"{steps(records)}\n\n{users(records)}")


@app.command()
def publish_vllm(
    file: Annotated[Path, typer.Argument(help="What `vllm` has written.")],
    root: Annotated[Path, typer.Option(help="The repository.")] = Path(),
) -> None:
    """Write what vLLM does with lowbit's models into docs/howto/vllm.md, between its marks, and the figures."""
    from benchmarks.serving.page import publish as write

    for path in write(file, root):
        print(path)


@app.command()
def orders(
    sizes: Annotated[str, typer.Argument(help="n x k: 4096x4096,8192x8192.")] = "4096x4096",
    weight: Weight = "u4",
    group_size: GroupSize = 128,
    zeros: Zeros = "none",
    count: Annotated[int, typer.Option(help="Orders that are timed.")] = 8,
    each: Annotated[int, typer.Option(help="Schedules of an order and a number of tokens.")] = 4,
    out: Annotated[Path, typer.Option(help="Results.")] = Path("orders.json"),
    write: Annotated[Path | None, typer.Option(help="Results, to write to lowbit's tables; nothing is timed.")] = None,
) -> None:
    """Orders of sums of invariant matmuls, beside what is chosen without `invariant`: microseconds."""
    from benchmarks.orders import measure, read, table, write_tables
    from lowbit.dialect.spec import MatmulSpec
    from lowbit.passes.scheduling import tables
    from lowbit.passes.targets import parse_target
    from lowbit.pylib.runtime.kernel import gpu_target

    if write:
        schedules = Path(tables.__file__).parent / "data" / "nvidia_h200.json"
        print(write_tables(read(write), parse_target("sm_90a"), schedules))
        return
    _check_gpu()
    pairs = [tuple(map(int, size.split("x"))) for size in sizes.split(",")]
    given = {"weight": weight, "group_size": group_size, "zeros": zeros, "invariant": True}
    specs = [MatmulSpec.from_dict(MatmulSpec(n, k, "u4").to_dict() | given) for n, k in pairs]
    records = measure(specs, gpu_target(None), count, each, _log)
    out.write_text(json.dumps(records, indent=1), encoding="utf-8")
    print(table(records))


@app.command()
def layer(
    name: Annotated[str, typer.Argument(help="llama-3.1-8b, or qwen3-30b-a3b: its attention.")] = "llama-3.1-8b",
    weight: Weight = "u4",
    group_size: GroupSize = 128,
    zeros: Zeros = "int",
    m: Annotated[str, typer.Option("--m", "-m", help="Sequences that are decoded at once.")] = "1,4,16",
    context: Annotated[str, typer.Option(help="Tokens in the cache.")] = "512,4096",
    runs: Annotated[str, typer.Option(help="Of fused, lowbit and bf16.")] = "fused,lowbit,bf16",
    out: Annotated[Path, typer.Option(help="Results.")] = Path("layer.json"),
    commit: Commit = None,
) -> None:
    """A transformer layer that decodes, as a model runs it: microseconds, and by launch."""
    from benchmarks.layer import measure, table, table_of_parts, write
    from lowbit.dialect.spec import MatmulSpec

    spec = MatmulSpec.from_dict(
        MatmulSpec(16, group_size, weight, act="bf16", group_size=group_size).to_dict() | {"zeros": zeros}
    )
    batches, contexts = ([int(each) for each in text.split(",")] for text in (m, context))
    _check_gpu()
    records = measure(name, spec, batches, contexts, runs.split(","), _log)
    write(records, out, commit)
    print(table(records))
    for record in records:
        if "parts_us" in record:
            print(f"\n{record['layer']}, {record['batch']}, {record['context']}\n{table_of_parts(record)}")


@app.command()
def timeline(
    name: Annotated[str, typer.Argument(help="llama-3.1-8b, or qwen3-30b-a3b: its attention.")] = "llama-3.1-8b",
    weight: Annotated[str, typer.Option("--weight", "-w", help="Format, with groups of 128.")] = "u4",
    m: Annotated[int, typer.Option("--m", "-m", help="Sequences that are decoded at once.")] = 1,
    context: Annotated[int, typer.Option(help="Tokens in the cache.")] = 512,
) -> None:
    """When the blocks of a fused layer's kernels begin, go on after their wait, and end, by the GPU's clock."""
    from benchmarks.timeline import timeline as measured
    from lowbit.dialect.spec import MatmulSpec

    _check_gpu()
    print(measured(name, MatmulSpec(16, 128, weight, act="bf16", group_size=128), m, context))


@app.command()
def cpu(
    size: Annotated[str, typer.Argument(help="n x k.")] = "4096x4096",
    seconds: Annotated[float, typer.Option(help="To measure for, for each number of tokens.")] = 10.0,
    threads: Annotated[int | None, typer.Option(min=1, help="Of every contestant; default: torch's number.")] = None,
    write: Annotated[bool, typer.Option("--write", help="Into docs/cpu.md, between its marks.")] = False,
) -> None:
    """u4 on this machine's CPU against torch f32, bf16, int4 and int8: microseconds, and ratios."""
    import torch

    from benchmarks.cpu import BEGIN, END, cpu_table
    from benchmarks.publish import write_between_marks
    from lowbit.pylib.tune.model_shapes import linear_sizes

    if threads:
        torch.set_num_threads(threads)
    ((n, k),) = linear_sizes([size])
    table = cpu_table(n, k, seconds, _log)
    print(table)
    if write:
        write_between_marks(Path("docs/cpu.md"), table, BEGIN, END)


@app.command()
def quantize(
    model: Annotated[str, typer.Argument(help="A model that `lowbit bench-model` knows.")] = "llama-3.1-8b",
    recipes: Annotated[str | None, typer.Option(help="Separated by semicolons; default: all.")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Quantize so many, and give the time of all.")] = None,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    budget: Annotated[float, typer.Option(help="Seconds after which no recipe is begun.")] = math.inf,
    out: Annotated[
        Path, typer.Option(help="Results; those of the same model and recipe are replaced.")
    ] = Path("quantizing.json"),
    write: Annotated[bool, typer.Option("--write", help="Into docs/quantizers.md, between its marks.")] = False,
    commit: Commit = None,
) -> None:
    """What quantizing a model with random weights takes, by recipe: seconds, and memory above the model."""
    from benchmarks.publish import write_between_marks
    from benchmarks.quantize import BEGIN, END, RECIPES, costs, text_of
    from benchmarks.quantize import write as save
    from lowbit.pylib.cli.machine import checked_device

    checked_device(device)
    names = list(RECIPES) if recipes is None else [name.strip() for name in recipes.split(";") if name.strip()]
    text = text_of(save(costs(model, names, layers, device, _log, budget), out, commit), model)
    print(text)
    if write:
        write_between_marks(Path("docs/quantizers.md"), text, BEGIN, END)


@app.command()
def quality(
    references: Annotated[bool, typer.Option("--references", help="Beside the code of other libraries.")] = False,
    ranges: Annotated[bool, typer.Option("--ranges", help="The default's ranges beside whole ones.")] = False,
    methods: Annotated[bool, typer.Option("--methods", help="Methods beside GPTQ, by error and time.")] = False,
    models: Annotated[
        str, typer.Option(help="Whose layers: little,minilm,mpnet,iglm,whisper,smollm,gemma.")
    ] = "little,minilm",
    ggml: Annotated[Path | None, typer.Option(help="llama.cpp's folder ggml, to compare with.")] = None,
) -> None:
    """Quantizers on layers of several models, into docs/quality.md; what docs/results has is not measured again, and
    `--models` is for what is measured."""
    from benchmarks.quality import authors, roundings
    from benchmarks.quality import methods as of_methods
    from benchmarks.quality import ranges as of_ranges
    from benchmarks.quality import references as of_ggml
    from benchmarks.quality.layers import layers

    found = cache(lambda: list(layers(models.split(","))))
    if ranges:
        if any(roundings.too_large(of_ranges.SECTION.publish(lambda: of_ranges.measure(found()), of_ranges.table))):
            roundings.SECTION.publish(lambda: roundings.measure(found()), roundings.table)
    if methods:
        of_methods.SECTION.publish(lambda: of_methods.measure(found()), of_methods.table)
    if references:
        authors.SECTION.publish(lambda: authors.measure(found()), authors.table)
    if ggml:
        of_ggml.main(ggml)


@app.command()
def sanitize(
    kernels: Annotated[str | None, typer.Option(help="Separated by semicolons; default: all.")] = None,
    tools: Annotated[str, typer.Option(help="Of compute-sanitizer.")] = "memcheck,racecheck,synccheck",
    jobs: Annotated[int, typer.Option(min=1, help="Processes at a time.")] = 16,
    seconds: Annotated[float, typer.Option(help="A process may take.")] = 60.0,
) -> None:
    """Run a sample of kernels under compute-sanitizer: a table of the errors that each tool finds."""
    from benchmarks.checked_kernels import CHECKS
    from benchmarks.sanitize import sanitize as table

    names = list(CHECKS) if kernels is None else [name.strip() for name in kernels.split(";")]
    print(table(names, tools.split(","), jobs, seconds, _log))


@app.command()
def gguf(
    files: Annotated[list[Path], typer.Argument(help="GGUF files.")],
    llama_cpp: Annotated[str | None, typer.Option(help="A Python that has llama-cpp-python, to compare with.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often each is measured.")] = 6,
    threads: Annotated[int, typer.Option(min=1, help="Of each.")] = 1,
    out: Annotated[
        Path, typer.Option(help="Results; those of the same file and threads are replaced.")
    ] = Path("gguf.json"),
    write: Annotated[bool, typer.Option("--write", help="Into docs/cpu.md, between its marks.")] = False,
) -> None:
    """GGUF models on this machine's CPU: tokens per second, also of llama.cpp."""
    from benchmarks.gguf import BEGIN, END, measure_file, text_of
    from benchmarks.gguf import write as save
    from benchmarks.publish import write_between_marks

    for file in files:
        text = text_of(save(measure_file(file, llama_cpp, rounds, threads), out))
    print(text)
    if write:
        write_between_marks(Path("docs/cpu.md"), text, BEGIN, END)


@app.command()
def chain(
    size: Annotated[str, typer.Argument(help="n x k, as 4096x4096, or the layers of a model.")],
    m: Annotated[str, typer.Option("--m", "-m", help="Numbers of tokens.")] = "1,8,16",
) -> None:
    """Time dependent kernels that read and write as a matmul does, and compute nothing."""
    from benchmarks.chain import chain as table
    from lowbit.pylib.tune.model_shapes import linear_sizes

    for n, k in linear_sizes([size]):
        print(f"{n} x {k}\n\n{table(n, k, [int(each) for each in m.split(',')])}\n")


@app.command()
def replay(
    revision: Annotated[str, typer.Argument(help="What the working tree is compared with: a commit, tag or branch.")],
    every: Annotated[int, typer.Option(min=1, help="Compare one of so many kernels.")] = 1,
) -> None:
    """Compile hundreds of kernels in two checkouts and compare their PTX: a refactoring changes none."""
    from benchmarks.replay import replay as compare

    count, different = compare(revision, every)
    for kernel in different:
        print(f"differs: {kernel}")
    print(f"{count} kernels compared with {revision}, {len(different)} differ")
    raise typer.Exit(bool(different))


if __name__ == "__main__":
    try:
        app()
    except (LowbitError, OSError) as error:
        sys.exit(f"error: {reason(error)}")
