"""What a call costs the host: microseconds of wall time per eager `mm(x, w)`, and per layer of a model.

    python benchmarks/host_cost.py            # all
    python benchmarks/host_cost.py calls      # of matmuls only

The weight is tiny, so that the GPU is never what one waits for. Each figure is the least of several runs of a
tight loop that ends with a synchronization. Two of them decide how kernels are started: the same launch once by ctypes,
as `pylib/runtime/driver.py` has it, and once by cuda.bindings. Layers are run eagerly and by torch.compile without CUDA
graphs, beside those of a dense model: alone, and in blocks with a normalization and a SiLU, as models have them.
"""

from __future__ import annotations

import copy
import ctypes
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import nn

import lowbit
from lowbit.dialect.formats.byte_codes import COMPUTE, Compute
from lowbit.dialect.signature import WORKSPACE
from lowbit.pylib.build.kernels import Artifact
from lowbit.pylib.reference.inputs import random_inputs
from lowbit.pylib.runtime.driver import Function, bindings, current_stream
from lowbit.pylib.runtime.gpu import load_function

CALLS = 2000
REPEATS = 20
TOKENS = (1, 256, 1024)
LAYERS, WIDTH = 16, 512  # of the models


def microseconds(call: Callable[[], object], calls: int = CALLS) -> float:
    """Per call, the least of REPEATS loops of so many."""
    least = float("inf")
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
        least = min(least, time.perf_counter() - start)
    return least / calls * 1e6


def start_by_bindings(function: Function, artifact: Artifact, stream: int) -> None:
    """Has `function` start its kernel by cuda.bindings' cuLaunchKernelEx, with the same configuration."""
    cuda, launch = bindings(), artifact.launch
    attribute = cuda.CUlaunchAttribute()
    attribute.id = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    config = cuda.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = launch.blocks({}, sm_count=0)
    config.blockDimX, config.blockDimY, config.blockDimZ = launch.threads, 1, 1
    config.sharedMemBytes, config.attrs, config.numAttrs = launch.shared_bytes, [attribute], 1
    handle, addresses = cuda.CUfunction(function.handle.value), ctypes.addressof(function.addresses)

    def start(*_: object) -> int:
        config.hStream = stream
        return int(cuda.cuLaunchKernelEx(config, handle, addresses, 0)[0])

    function.start = start


def launches(mm: lowbit.Matmul, x: torch.Tensor, w: lowbit.PackedWeight) -> dict[str, Callable[[], object]]:
    """A launch of the kernel alone, by ctypes and by cuda.bindings."""
    artifact, stream = mm.kernel(1), current_stream(0)
    y = torch.empty((1, mm.spec.n), dtype=x.dtype, device="cuda")
    given = {"x": x, "codes": w.codes, "scales": w.scales, "zeros": w.zeros, "bias": w.bias, "y": y}
    values = {name: tensor.data_ptr() for name, tensor in given.items() if tensor is not None} | {"m": 1}
    arguments = [values[param.name] for param in artifact.launch.params if param.name != WORKSPACE]
    by_ctypes, by_bindings = (load_function(artifact, mm.target, 0) for _ in range(2))
    start_by_bindings(by_bindings, artifact, stream)
    return {
        "a launch, by ctypes": lambda: by_ctypes(stream, True, *arguments),
        "a launch that overlaps nothing, by ctypes": lambda: by_ctypes(stream, False, *arguments),
        "a launch, by cuda.bindings": lambda: by_bindings(stream, True, *arguments),
    }


class Block(nn.Module):
    """x + silu(linear(norm(x)))."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.norm, self.linear = nn.RMSNorm(WIDTH, device="cuda", dtype=torch.float16), linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.silu(self.linear(self.norm(x)))


def layers(linear: Callable[[], nn.Module]) -> None:
    """Print what a layer costs, eagerly and compiled."""
    x = torch.randn((1, WIDTH), device="cuda", dtype=torch.float16)
    for what, layer in {"alone": linear, "in a block": lambda: Block(linear())}.items():
        model = nn.Sequential(*(layer() for _ in range(LAYERS))).eval()
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True)
        with torch.no_grad():
            for how, call in {"eager": model, "compiled": compiled}.items():
                call(x)
                each = microseconds(partial(call, x), CALLS // LAYERS) / LAYERS
                print(f"{each:7.2f} us  {type(linear()).__name__} {what}, one of {LAYERS} layers, {how}")


def calls() -> dict[str, Callable[[], object]]:
    """Returns calls by name: of matmuls, of their parts, and of torch's matmul."""
    spec = lowbit.MatmulSpec(n=64, k=256, weight="u4", group_size=128, zeros="int")
    mm = lowbit.compile(spec)
    many, weight = random_inputs(spec, max(TOKENS))
    many, w = many.cuda(), mm.pack(**weight).to("cuda")
    x, dense = many[:1], mm.dequantize(w)
    found: dict[str, Callable[[], object]] = {
        "mm(x, w), x [1, k]": lambda: mm(x, w),
        "mm(x, w), x [1, 1, k]": partial(mm, x[None], w),
        "torch.ops.lowbit.matmul": lambda: torch.ops.lowbit.matmul.packed(x, list(w.tensors), mm.description),
        **launches(mm, x, w),
        "torch.nn.functional.linear, f16": lambda: torch.nn.functional.linear(x, dense),
        "torch.empty": lambda: torch.empty((1, 64), dtype=torch.float16, device="cuda"),
    }
    found |= {"mm(x, w) with columns permuted, x [1, k]": permuted_call(spec, x)}
    for m in TOKENS[1:]:
        found |= {f"mm(x, w), x [{m}, k]": partial(mm, many[:m], w)}
    for compute in COMPUTE:
        found |= dict(eight_bit_calls(compute, many))
    return found


def permuted_call(spec: lowbit.MatmulSpec, x: torch.Tensor) -> Callable[[], object]:
    """Returns a call with a weight whose columns are permuted."""
    mm = lowbit.compile(replace(spec, permuted=True))
    return partial(mm, x, mm.pack(**random_inputs(mm.spec, 1)[1]).to("cuda"))


def eight_bit_calls(compute: Compute, many: torch.Tensor) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yields calls that quantize x or take a quantized one, by name."""
    spec = lowbit.MatmulSpec(n=64, k=256, weight="u4", group_size=128, compute=compute)
    mm = lowbit.compile(spec)
    w = mm.pack(**random_inputs(spec, 1)[1]).to("cuda")
    for m in TOKENS:
        x = many[:m]
        q = lowbit.quantize_activation(x, compute)
        yield f"mm(x, w) in {compute}, x [{m}, k]", partial(mm, x, w)
        yield f"mm(x, w) in {compute}, x [1, {m}, k]", partial(mm, x[None], w)
        yield f"mm(q, w) in {compute}, q [{m}, k]", partial(mm, q, w)
        yield f"quantize_activation(x, {compute}), x [{m}, k]", partial(lowbit.quantize_activation, x, compute)


def main(only_calls: bool) -> None:
    found = calls()
    for call in found.values():  # compiles what it needs
        call()
    microseconds(next(iter(found.values())))  # the GPU clocks up
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for name, call in found.items():
        print(f"{microseconds(call):7.2f} us  {name}")
    if not only_calls:
        models()


def models() -> None:
    """Print what layers of models cost."""
    layers(lambda: nn.Linear(WIDTH, WIDTH, bias=False, device="cuda", dtype=torch.float16))
    config = lowbit.QuantConfig("u4", group_size=128)
    packed = lowbit.LowbitLinear.from_linear(nn.Linear(WIDTH, WIDTH, bias=False).cuda().half(), config)
    layers(lambda: copy.deepcopy(packed))


if __name__ == "__main__":
    main(sys.argv[1:] == ["calls"])
