"""Experts of mixtures of experts with random weights, from the experts and weights of tokens to their sums: in bf16
(transformers' `grouped_mm`), in lowbit, and in what others have. Every call has other tokens and other experts, so that
weights come from device memory."""

from __future__ import annotations

import copy
import gc
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import record_lines
from benchmarks.environment import environment
from benchmarks.floor import floor
from benchmarks.measure import eager_time
from benchmarks.peers.experts import EXPERT_PEERS, ExpertsCall
from lowbit.dialect.fields import choice
from lowbit.pylib.model_speed.table import aligned
from lowbit.pylib.nn.experts import LowbitExperts
from lowbit.pylib.nn.quantize_model import quantize_
from lowbit.pylib.quantization.config import QuantConfig
from lowbit.pylib.tune.timing import graph_time

Record = dict[str, Any]
Routed = tuple[Tensor, Tensor, Tensor]  # x [m, hidden], ids and weights [m, top_k] of its experts
FEW = 64
"""Tokens up to which a call is timed with `CALLS` inputs; more tokens hit all experts, and need no others."""
CALLS = 16
U4, MXFP4 = QuantConfig("u4", 128, clip="max"), QuantConfig("f4e2m1", 32, scale="e8m0", clip="max")


@dataclass(frozen=True)
class Block:
    """The sizes of the experts of a layer.

    hidden   numbers of a token
    width    rows of each half of gate_up, and columns of down
    top_k    experts of a token
    config   the format in which lowbit and the others have them
    kind     of transformers' classes: "qwen3", or "gpt-oss" with biases and a clamped gate of rows that alternate
    """

    hidden: int
    width: int
    experts: int
    top_k: int
    config: QuantConfig = U4
    kind: str = "qwen3"

    def dense(self, device: str = "cuda") -> nn.Module:
        """Returns the experts in bf16, with random weights, as transformers runs them by `grouped_mm`."""
        with torch.device(device):
            experts = (_gpt_oss if self.kind == "gpt-oss" else _qwen3)(self)
        for parameter in experts.parameters():
            nn.init.normal_(parameter, std=0.02)
        return experts.eval()

    def inputs(self, m: int, device: str = "cuda") -> list[Routed]:
        """Returns what calls get: m random tokens, of which each goes to different experts, all as likely."""
        return [self._routed(m, device) for _ in range(CALLS if m <= FEW else 1)]

    def _routed(self, m: int, device: str) -> Routed:
        x = torch.randn(m, self.hidden, device=device).bfloat16()
        ids = torch.rand(m, self.experts, device=device).topk(self.top_k).indices
        return x, ids, torch.rand(m, self.top_k, device=device).softmax(-1)


def _qwen3(block: Block) -> nn.Module:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(
        hidden_size=block.hidden, moe_intermediate_size=block.width, num_experts=block.experts, dtype="bfloat16"
    )
    return _in_bf16(Qwen3MoeExperts, config)


def _gpt_oss(block: Block) -> nn.Module:
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    config = GptOssConfig(hidden_size=block.hidden, intermediate_size=block.width, num_local_experts=block.experts)
    return _in_bf16(GptOssExperts, config)


def _in_bf16(kind: Callable[[Any], nn.Module], config: Any) -> nn.Module:
    """Returns a module of bf16, made as such: in f32 the largest would not fit."""
    config._experts_implementation = "grouped_mm"
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        return kind(config)
    finally:
        torch.set_default_dtype(usual)


BLOCKS = {
    "qwen3-30b-a3b": Block(2048, 768, 128, 8),
    "mixtral-8x7b": Block(4096, 14336, 8, 2),
    "deepseek-v3": Block(7168, 2048, 256, 8),
    "gpt-oss-120b": Block(2880, 2880, 128, 4, MXFP4, "gpt-oss"),
}
USUAL = ("qwen3-30b-a3b", "mixtral-8x7b")


def low_bit(experts: nn.Module, config: QuantConfig) -> LowbitExperts:
    """Returns a quantized copy of experts."""
    model = nn.ModuleDict({"experts": copy.deepcopy(experts)})
    quantize_(model, config, progress=False)
    packed = model["experts"]
    assert isinstance(packed, LowbitExperts)
    return packed


@torch.no_grad()
def measure(
    name: str,
    tokens: Sequence[int],
    log: Callable[[str], None],
    config: QuantConfig | None = None,
    peers: Sequence[str] = (),
    device: str = "cuda",
) -> list[Record]:
    """Returns the measurements of a block, one for each number of tokens. Raises SpecError for an unknown name.

    config   the format of lowbit; None: the block's own
    peers    of `EXPERT_PEERS`, which always run the block's own format
    """
    block = BLOCKS[choice("block", name, tuple(BLOCKS))]
    others = {peer: EXPERT_PEERS[choice("peer", peer, tuple(EXPERT_PEERS))] for peer in peers}
    torch.manual_seed(0)
    dense, inputs = block.dense(device), {m: block.inputs(m, device) for m in tokens}
    records: dict[int, Record] = {m: {"block": name, "tokens": m, "hit": experts_hit(inputs[m])} for m in tokens}
    makers: dict[str, Callable[[], ExpertsCall]] = {
        "bf16": lambda: _as_in_models(dense),
        "lowbit": lambda: _lowbit(dense, config or block.config, records),
        **{peer: partial(other.prepare, dense, block.config, block.top_k, tokens) for peer, other in others.items()},
    }
    exact: dict[int, Tensor] = {}
    for kind, make in makers.items():
        _measure_kind(kind, make, inputs, records, exact, log)
    return list(records.values())


def _as_in_models(experts: nn.Module) -> ExpertsCall:
    """Returns the call of a module with weights of tokens in bf16, as routers give them."""
    return ExpertsCall(experts, torch.int64, torch.bfloat16)


def _lowbit(dense: nn.Module, config: QuantConfig, records: dict[int, Record]) -> ExpertsCall:
    """Returns lowbit's call, and notes in the records what reading the experts that are hit takes."""
    packed = low_bit(dense, config)
    size = bytes_of_expert(packed)
    for record in records.values():
        record["floor_us"] = floor(int(record["hit"] * size)).time.median
    return _as_in_models(packed)


def _measure_kind(
    kind: str,
    make: Callable[[], ExpertsCall],
    inputs: dict[int, list[Routed]],
    records: dict[int, Record],
    exact: dict[int, Tensor],
    log: Callable[[str], None],
) -> None:
    """Adds to the records what one kind takes, or why it failed."""
    try:
        call = make()
        for m, record in records.items():
            y, times = timed(call, inputs[m])
            difference = (y.double() - exact.setdefault(m, y).double()).norm() / exact[m].double().norm()
            record |= {f"{kind}_{name}": value for name, value in times.items()}
            record |= {f"{kind}_error": float(difference)} if kind != "bf16" else {}
            log(f"{record['block']}, {m}, {kind}: {json.dumps(times)}, error {float(difference):.3f}")
    except Exception as error:  # what others lack, or no memory for it
        log(f"{kind} failed: {type(error).__name__}: {error}")
        for record in records.values():
            record.setdefault(f"{kind}_us", None)
    gc.collect()
    torch.cuda.empty_cache()


def timed(call: ExpertsCall, inputs: Sequence[Routed]) -> tuple[Tensor, dict[str, float]]:
    """Returns the result for the first input, and the microseconds of a call: in a CUDA graph, and eager."""
    given = [call.encoded(*each) for each in inputs]
    y = call.run(*given[0]).clone()
    graph = graph_time([partial(call.run, *each) for each in given]).median
    return y, {"us": graph, "eager_us": eager_time([lambda each: call.run(*each)], given[0])}  # type: ignore[arg-type]


def experts_hit(inputs: Sequence[Routed]) -> float:
    """Returns to how many experts the tokens of an input go, in the mean."""
    return sum(ids.unique().numel() for _, ids, _ in inputs) / len(inputs)


def bytes_of_expert(experts: LowbitExperts) -> int:
    """Returns the bytes of one expert's packed weights."""
    layers: list[Any] = [experts.gate_up[0], experts.down[0]]
    return sum(layer.packed.nbytes for layer in layers)


def table(records: Sequence[Record]) -> str:
    """Returns measurements as text: microseconds, and how many times as fast lowbit is as each of the others."""
    others = ["bf16", *(peer for peer in EXPERT_PEERS if any(f"{peer}_us" in record for record in records))]
    head = ["experts, tokens", "hit", "floor", "lowbit", *(word for other in others for word in (other, "ratio"))]
    return aligned([[*head, "lowbit eager", "bf16 eager"], *(_row(record, others) for record in records)])


def _row(record: Record, others: Sequence[str]) -> list[str]:
    """Returns the cells of one measurement; a dash for what was not measured."""
    ours, cells = record.get("lowbit_us"), [f"{record['block']}, {record['tokens']}", f"{record['hit']:.1f}"]
    cells += [_number(record.get("floor_us")), _number(ours)]
    for other in others:
        theirs = record.get(f"{other}_us")
        cells += [_number(theirs), f"{theirs / ours:.2f}" if ours and theirs else "-"]
    return [*cells, _number(record.get("lowbit_eager_us")), _number(record.get("bf16_eager_us"))]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def write(records: Sequence[Record], path: Path, commit: str | None) -> None:
    """Writes a file of measurements, with the environment in which they were made."""
    record_lines.write(path, {"environment": environment(commit), "measurements": list(records)})
