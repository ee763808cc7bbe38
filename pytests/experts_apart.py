"""The experts of a weight as matmuls of their own."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

import lowbit
from lowbit.dialect.spec import MatmulSpec
from lowbit.pylib.matmul import Matmul
from lowbit.pylib.weights.outliers import split_csr
from lowbit.pylib.weights.packed import PackedWeight


def experts_apart(spec: MatmulSpec, tensors: dict[str, Tensor], target: str) -> tuple[Matmul, list[PackedWeight]]:
    """Returns the matmul of one expert, and the weight of each, of what `pack` takes for all of them."""
    one = lowbit.compile(replace(spec, n=spec.n // spec.experts, experts=1, top_k=None), target)
    sizes = [one.spec.n] * spec.experts
    parts = {n: split_csr(t, sizes) if n == "outliers" else t.chunk(spec.experts) for n, t in tensors.items()}
    return one, [one.pack(**{name: part[expert] for name, part in parts.items()}) for expert in range(spec.experts)]
