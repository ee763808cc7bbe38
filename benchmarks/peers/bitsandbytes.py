"""bitsandbytes: NF4 and FP4."""

from __future__ import annotations

import copy

from torch import Tensor

from benchmarks.cases import Case
from benchmarks.peers.peer import ROUNDING, Call, Layer, Peer, random_dense


class BitsAndBytes(Peer):
    """NF4 and FP4 with f32 scales. It has no other formats: for 4-bit integers it runs NF4, as many bits."""

    name = "bitsandbytes"
    package = "bitsandbytes"
    install = "bitsandbytes"
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
        packed, state = functional.quantize_4bit(
            random_dense(case), blocksize=case.group_size, quant_type=kind
        )

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
