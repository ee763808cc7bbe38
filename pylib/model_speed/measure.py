"""Goes through formats and steps, and keeps what a model takes: seconds and bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from lowbit.dialect.formats.byte_codes import products_name
from lowbit.pylib.model_speed.random_model import count_dense, random_model
from lowbit.pylib.model_speed.runner import Runner, Step
from lowbit.pylib.quantization.config import QuantConfig
from lowbit.pylib.runtime.overlap import overlap_launches

BASELINE = "bf16"


@dataclass(frozen=True)
class Options:
    """How models are made and run.

    compiled    by torch.compile(fullgraph=True)
    fuse        make one layer of low-bit layers that share their input
    lm_head     the output layer is low-bit, too
    pdl         let the kernels that torch.compile makes overlap with those before and after them, as lowbit's do
    device      where
    repeats     how often a step is timed at most; slow ones are timed for about 4 seconds
    """

    compiled: bool = True
    fuse: bool = True
    lm_head: bool = False
    pdl: bool = True
    device: str = "cuda"
    repeats: int = 20


@dataclass(frozen=True)
class Measurement:
    """One step of a model in one format.

    weight            "bf16", or the format of the low-bit layers
    group_size        columns that share a scale; None: one scale per row, or no low-bit layers
    fused, lm_head    as in `Options`; False for bf16
    nbytes            of all weights of the model
    batch, tokens, context   as in `Step`
    seconds           of a step
    split             seconds by kind of kernel, if asked for
    compute           type in which low-bit layers multiply, with "+fold" if scales are folded, and "@65" if they do so
                      from 65 tokens on; None: bf16
    library           another library that the low-bit layers are of; "" for lowbit
    compiled          whether torch.compile was used; it can't take the models of some other libraries
    dense             linear layers that stay in bf16, since no group divides their k
    """

    weight: str
    group_size: int | None
    fused: bool
    lm_head: bool
    nbytes: int
    batch: int
    tokens: int
    context: int
    seconds: float
    split: dict[str, float] | None = None
    compute: str | None = None
    library: str = ""
    compiled: bool = True
    dense: int = 0

    @property
    def step(self) -> Step:
        return Step(self.batch, self.tokens, self.context)

    @property
    def name(self) -> str:
        """A name that sets the model apart from others of its shape."""
        if self.weight == BASELINE:
            return BASELINE
        columns = "row" if self.group_size is None else str(self.group_size)
        product = f", x in {self.compute}" if self.compute else ""
        head = " with lm_head" if self.lm_head else ""
        left = f", {self.dense} of its layers in bf16" if self.dense else ""
        fusion = ", not fused" if not (self.fused or self.library) else ""
        eager = ", not compiled" if self.library and not self.compiled else ""
        return f"{self.library} {self.weight} per {columns}{product}{head}{left}{fusion}{eager}".lstrip()

    @property
    def tokens_per_second(self) -> float:
        return self.batch * self.tokens / self.seconds

    @classmethod
    def from_dict(cls, written: Mapping[str, Any]) -> Measurement:
        """Returns the measurement that `to_dict` wrote."""
        return cls(**{name: value for name, value in written.items() if name != "tokens_per_second"})

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields and the tokens per second."""
        return asdict(self) | {"tokens_per_second": self.tokens_per_second}


def format_name(quantization: QuantConfig | None) -> str:
    """Returns what the command line calls a format: "bf16", "u4", or "u4:f8e4m3" for activations of 8 bits."""
    if quantization is None:
        return BASELINE
    products = _products(quantization)
    return quantization.weight + (f":{products}" if products else "")


def _products(quantization: QuantConfig) -> str | None:
    """Returns what `Measurement.compute` is for a format."""
    if quantization.compute is None:
        return None
    first = f"@{quantization.compute_from}" if quantization.compute_from > 1 else ""
    return products_name(quantization.compute, quantization.fold_scales) + first


def measure(
    config: Any,
    formats: Sequence[QuantConfig | None],
    steps: Sequence[Step],
    options: Options,
    on_step: Callable[[str], object] = lambda _: None,
    with_split: bool = False,
) -> Iterator[Measurement]:
    """Yields the measurements of a model with random weights, format by format; None stands for bf16."""
    for quantization in formats:
        name = format_name(quantization)
        on_step(f"{name}: making the model")
        model = random_model(config, quantization, options.device, fuse=options.fuse, lm_head=options.lm_head)
        for step in steps:
            on_step(f"{name}: {step}")
            yield measure_step(model, quantization, step, options, with_split)
        del model


def measure_step(
    model: nn.Module, quantization: QuantConfig | None, step: Step, options: Options, with_split: bool = False
) -> Measurement:
    """Returns what a step of a model takes."""
    return measure_prepared(model, quantization, prepare(model, step, options), options, with_split)


def measure_prepared(
    model: nn.Module, quantization: QuantConfig | None, runner: Runner, options: Options, with_split: bool = False
) -> Measurement:
    """Returns what a step takes that `prepare` has made ready."""
    split = None
    if with_split:
        from lowbit.pylib.model_speed.split import kernel_split

        split = kernel_split(runner)
    return Measurement(
        BASELINE if quantization is None else quantization.weight,
        None if quantization is None else quantization.group_size,
        fused=options.fuse and quantization is not None,
        lm_head=options.lm_head and quantization is not None,
        nbytes=model_bytes(model),
        **asdict(runner.step),
        seconds=runner.time(options.repeats),
        split=split,
        compute=None if quantization is None else _products(quantization),
        compiled=options.compiled,
        dense=0 if quantization is None else count_dense(model, options.lm_head),
    )


def prepare(model: nn.Module, step: Step, options: Options) -> Runner:
    """Returns a step of a model, ready to be timed."""
    with overlap_launches() if options.pdl else nullcontext():
        return Runner(model, step, compiled=options.compiled)


def model_bytes(model: nn.Module) -> int:
    """Returns the bytes of all weights, tied ones once."""
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return sum(_bytes(tensor) for tensor in tensors.values())


def _bytes(tensor: torch.Tensor) -> int:
    """Returns the bytes of a tensor, or of those that a tensor of another library consists of."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return tensor.nbytes
    names, _ = tensor.__tensor_flatten__()  # type: ignore[operator]
    return sum(_bytes(getattr(tensor, name)) for name in names)
