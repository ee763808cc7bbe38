"""humming-kernels: CUDA C++ that NVRTC compiles for every shape. CUDA_HOME must be set."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from benchmarks.cases import Case
from benchmarks.peers.peer import (
    ROUNDING,
    Call,
    Job,
    Layer,
    Peer,
    cores,
    finish,
    numbers_of,
    parameter_bytes,
    random_dense,
)
from benchmarks.shapes import Shape
from lowbit.pylib.torch_types import TORCH

INPUTS = {"f8e4m3": "float8e4m3", "i8": "int8"}
SMALL = Shape("small", 256, 1024)


class Humming(Peer):
    """Any integer or float up to 8 bits."""

    name = "humming"
    package = "humming"
    install = "humming-kernels"
    computes = (None, "f8e4m3", "i8")
    invariant = False

    def lacks(self, case: Case, m: int) -> str | None:
        t = case.spec.dtype
        if t.kind == "table":
            return "no tables"
        if t.kind == "float" and t.exponent > 5 and case.act == "f16":
            return "floats of up to 5 exponent bits with f16"
        if case.zeros == "float":
            return "float zeros are not tried here"
        group = case.group_size
        return f"groups from 16 up, not {group}" if group is not None and group < 16 else None

    def prepare(self, jobs: Sequence[Job]) -> None:
        """Fill its disk cache: a kernel takes seconds, in a process that a thread waits for."""
        from humming.kernel.humming import HummingKernel  # type: ignore[import-not-found]

        torch.cuda.synchronize()  # makes the context that all threads use

        def compile_job(case: Case, m: int, small: Any) -> None:
            config = replace(small, shape_n=case.n, shape_k=case.k).to_str()
            HummingKernel.prepare_kernels(config, self._compute(), tuning(config, m, invariant=self.invariant))

        small = {case: replace(case, shape=SMALL) for case, _ in jobs}
        with ThreadPoolExecutor(cores()) as pool:
            configs = {case: pool.submit(_config_of_small, case) for case in dict.fromkeys(small.values())}
            made = {case: config.result() for case, config in configs.items() if not config.exception()}
            kernels = [pool.submit(compile_job, case, m, made[small[case]]) for case, m in jobs if small[case] in made]
            finish([*configs.values(), *kernels])

    def layer(self, case: Case) -> Layer:
        layer = _unpacked(case)
        schema = layer.weight_schema
        stored = {name: t.clone() for name, t in layer.state_dict().items()}
        layer.transform()
        config = layer.humming_config.to_str()

        def bind(layer: Any) -> Call:
            return lambda x: layer(
                x, compute_config=self._compute(), tuning_config=tuning(config, len(x), invariant=self.invariant)
            )

        name = _type(case)
        zeros = "symmetric" if case.zeros == "none" else "integer zeros"
        whole = Layer(
            label=name if name.startswith("float") else f"{name}, {zeros}",
            call=bind(layer),
            clone=lambda: bind(copy.deepcopy(layer)),
            weight=lambda: schema.dequant_tensors(stored).float(),
            bytes=parameter_bytes(layer),
            deviation=ROUNDING[case.act],
        )
        return _of_8_bits(whole, layer, config) if case.compute else whole

    def _compute(self) -> str | None:
        """Returns what its kernels are told of their sums."""
        return json.dumps({"use_batch_invariant": True}) if self.invariant else None


class HummingInvariant(Humming):
    """The same in its batch-invariant mode: one part of k, and tiles of as many columns for every number of tokens."""

    name = "humming-invariant"
    computes = (None,)
    invariant = True


def _of_8_bits(whole: Layer, layer: Any, config: str) -> Layer:
    """The same layer where x comes in 8 bits, with its scales: quantizing it is not timed."""
    from humming.forward import may_quant_input  # type: ignore[import-not-found]

    def bind(layer: Any) -> Call:
        return lambda x: layer(x[0], input_scale=x[1], tuning_config=tuning(config, len(x[0])))

    return replace(
        whole,
        label=f"{whole.label}, x of 8 bits",
        call=bind(layer),
        clone=lambda: bind(copy.deepcopy(layer)),
        encode=lambda x: may_quant_input(layer.humming_config, x),
        numbers=numbers_of,
    )


def _type(case: Case) -> str:
    t = case.spec.dtype
    return f"float{t.bits}e{t.exponent}m{t.mantissa}" if t.kind == "float" else f"int{t.bits}"


def _unpacked(case: Case) -> Any:
    """A layer with a random weight, quantized but not yet in the kernels' order."""
    from humming.layer import HummingLayer  # type: ignore[import-not-found]

    config = {
        "dtype": _type(case),
        "group_size": case.group_size or 0,
        "has_zero_point": case.zeros == "int",
    }
    given: dict[str, Any] = {"weight_config": config, "torch_dtype": TORCH[case.act]}
    if case.compute:
        given["input_config"] = {"dtype": INPUTS[case.compute]}
    layer = HummingLayer(shape_n=case.n, shape_k=case.k, **given).cuda()
    layer.load_from_unquantized(random_dense(case))
    return layer


def _config_of_small(case: Case) -> Any:
    """Returns what a layer's kernels are compiled for. Compiles those that quantize, decode and pack weights."""
    layer = _unpacked(case)
    layer.weight_schema.dequant_tensors(layer.state_dict())
    layer.transform()
    return layer.humming_config


@cache
def tuning(config: str, m: int, kind: str = "dense", invariant: bool = False) -> str:
    """The kernel that it would choose for m tokens; without this, it compiles those for 92 ranges of m up to 8192.

    kind        "indexed" for experts, whose m counts a token once for each of its experts
    invariant   whether results have to be the same bits for all m
    """
    wanted = (1, m)  # its launcher looks at the kernel for one token whatever m is
    ranges = [r for r in _ranges(config, kind, invariant) if any(r[0] < each <= r[1] for each in wanted)]
    return json.dumps(ranges)


@cache
def _ranges(config: str, kind: str, invariant: bool) -> list[list[Any]]:
    """[above, up to, kernel's choices] for all m."""
    from humming.tune import get_heuristics_config  # type: ignore[import-not-found]

    return get_heuristics_config(json.loads(config), gemm_type=kind, use_batch_invariant=invariant)
