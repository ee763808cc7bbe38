"""bitsandbytes: NF4 and FP4."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from benchmarks.cases import Case
from benchmarks.peers.peer import ROUNDING, Call, Layer, Peer, random_dense, random_linear


class BitsAndBytes(Peer):
    """NF4 and FP4 with f32 scales. It has no other formats: for 4-bit integers it runs NF4, as many bits."""

    name = "bitsandbytes"
    package = "bitsandbytes"
    install = "bitsandbytes"
    model_format = "nf4", 64
    formats = {"nf4": "nf4", "u4": "nf4", "i4": "nf4", "fp4_bnb": "fp4"}  # noqa: RUF012

    def lacks(self, case: Case, m: int) -> str | None:
        if case.weight not in self.formats:
            return "nf4 and fp4_bnb only; nf4 in place of u4 and i4"
        if case.zeros != "none":
            return "no zeros"
        sizes = (32, 64, 128, 256, 512, 1024, 2048, 4096)
        return None if case.group_size in sizes else f"groups of {', '.join(map(str, sizes))}"

    def layer(self, case: Case) -> Layer:
        import bitsandbytes as bnb  # type: ignore[import-not-found]
        from bitsandbytes import functional  # type: ignore[import-not-found]

        kind = self.formats[case.weight]
        packed, state = functional.quantize_4bit(random_dense(case), blocksize=case.group_size, quant_type=kind)

        def bind(packed: Tensor, state: object) -> Call:
            return lambda x: bnb.matmul_4bit(x, packed, quant_state=state)

        return Layer(
            label=f"{kind}, f32 scales",
            call=bind(packed, state),
            clone=lambda: bind(packed.clone(), copy.deepcopy(state)),
            weight=lambda: functional.dequantize_4bit(packed, state).float().view(case.n, case.k),
            bytes=packed.nbytes + state.absmax.nbytes,
            deviation=ROUNDING[case.act],
        )

    def linear(self, layer: nn.Linear) -> nn.Module:
        from bitsandbytes.nn import Linear4bit, Params4bit  # type: ignore[import-not-found]

        dense, kind = random_linear(layer), self.model_format[0]
        made = Linear4bit(layer.in_features, layer.out_features, False, torch.bfloat16, False, kind, device="meta")
        made.weight = Params4bit(
            dense.weight.data, requires_grad=False, compress_statistics=False, quant_type=kind, module=made
        )
        made.bias = dense.bias
        return made.to(dense.weight.device)

    def hidden_bytes(self, module: nn.Module) -> int:
        """The scales, which are an attribute of the weight."""
        state = getattr(getattr(module, "weight", None), "quant_state", None)
        return 0 if state is None else state.absmax.nbytes
