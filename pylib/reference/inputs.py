"""Random inputs of a matmul: x, and all tensors of a spec as `pack` takes them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lowbit.dialect.bilevel import Bilevel, integers_of
from lowbit.dialect.formats.dtypes import dtype
from lowbit.dialect.spec import MatmulSpec
from lowbit.dialect.weight import Role, TensorSlot
from lowbit.pylib.reference.definition import F64, decode, zero_of
from lowbit.pylib.torch_types import TORCH
from lowbit.pylib.weights.outliers import draw

OUTLIERS = 0.02  # density
LEAST_SCALE = {"f16": 2.0**-14, "e4m3": 2.0**-6}  # normal numbers; the other types' are out of reach


def random_problem(
    spec: MatmulSpec, m: int, seed: int = 0, *, finite: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """(x, codes, scales, zeros, bias) of `random_inputs`."""
    x, tensors = random_inputs(spec, m, seed, finite=finite)
    return x, tensors["codes"], tensors["scales"], tensors.get("zeros"), tensors.get("bias")


def random_inputs(
    spec: MatmulSpec, m: int, seed: int = 0, *, finite: bool = True
) -> tuple[Tensor, dict[str, Tensor]]:
    """x [m, k] ~ N(0, 1), and all tensors of a spec by name as `pack` takes them.

    Scales differ from group to group and bring y to O(1) where their type has such small numbers. Integers and tables:
    all codes equally often. Floats: N(0, 1) quantized, over the format's whole range where that is small. finite=False
    adds a few NaN and inf codes where the format has them.
    """
    rng = np.random.default_rng(seed)
    tensors = _draw_tensors(spec, rng, finite)
    return torch.from_numpy(rng.standard_normal((m, spec.k))).to(TORCH[spec.act]), tensors


def random_residual(spec: MatmulSpec, m: int, seed: int = 0) -> dict[str, Tensor]:
    """What a call takes besides x and the weight, by name: a residual [m, n] ~ N(0, 1), where the epilogue adds one."""
    generator = torch.Generator().manual_seed(seed + 1)
    return {
        name: torch.randn(m, spec.n, generator=generator).to(TORCH[spec.out_dtype]) for name in spec.call_inputs
    }


def _draw_tensors(spec: MatmulSpec, rng: np.random.Generator, finite: bool) -> dict[str, Tensor]:
    codes = _draw_codes(spec, rng, finite)
    values = decode(spec, codes)
    drawn: dict[str, Tensor] = {}
    for slot in _slots(spec, "codes"):
        drawn[slot.name] = torch.from_numpy(codes)
    if spec.bilevel:
        drawn |= _draw_two_levels(spec, rng, spec.bilevel)
    for slot in _slots(spec, "zero", coded=False):
        drawn[slot.name] = _draw_zeros(spec, rng, slot, values)
    zeros = drawn.get("zeros")
    typical = _typical_scale(spec, values - zero_of(spec, zeros, drawn))
    for slot in _slots(spec, "offset", coded=False):
        drawn[slot.name] = torch.from_numpy(rng.normal(0.0, typical, slot.given)).to(TORCH[slot.storage])
    for slot in _slots(spec, "scale", coded=False):
        drawn[slot.name] = _draw_scales(rng, slot, typical)
        typical = 1.0  # of scales beyond the first
    for slot in _slots(spec, "outliers"):
        drawn[slot.name] = draw(spec.n, spec.k, OUTLIERS, torch.Generator().manual_seed(int(rng.integers(1 << 31))))
    for slot in (*_slots(spec, "super_scale"), *_slots(spec, "super_offset")):
        level = 1.0 if slot.name.startswith("zero") else typical
        drawn[slot.name] = (drawn[slot.name] * level).to(TORCH[slot.storage])
    for slot in _slots(spec, "permutation"):
        drawn[slot.name] = torch.from_numpy(np.concatenate([rng.permutation(spec.k) for _ in range(spec.experts)]))
    for slot in _slots(spec, "bias"):
        drawn[slot.name] = torch.from_numpy(rng.standard_normal(slot.given)).to(TORCH[slot.storage])
    return drawn


def _draw_codes(spec: MatmulSpec, rng: np.random.Generator, finite: bool) -> np.ndarray:
    t, shape = spec.dtype, (spec.n, spec.k)
    if t.kind == "float":
        # Five exponent bits and more reach beyond f16's range or precision: keep to the middle.
        codes = t.encode(rng.standard_normal(shape) * (t.max / 4 if t.exponent < 5 else 1.0))
    else:
        codes = rng.integers(0, t.codes, shape, dtype=np.uint8)
    if not finite and t.has_nan:
        special = np.flatnonzero(~np.isfinite(t.values()))
        codes = np.where(rng.random(shape) < 1 / (8 * spec.k), rng.choice(special, shape), codes).astype(np.uint8)
    return t.decode(codes).astype(np.int8) if t.kind == "int" else codes


def _draw_two_levels(spec: MatmulSpec, rng: np.random.Generator, bilevel: Bilevel) -> dict[str, Tensor]:
    """Numbers that are codes, all codes equally often, and their second level: scales that bring them to O(1)."""
    drawn: dict[str, Tensor] = {}
    for slot in spec.given_tensors:
        if slot.code and slot.storage == "u8":
            t = integers_of(slot.code)
            values = t.values()[rng.integers(0, t.codes, slot.given)]
            drawn[slot.name] = torch.from_numpy(values).int()
        elif slot.code:
            drawn[slot.name] = torch.from_numpy(rng.normal(size=slot.given)).to(TORCH["e4m3"])
        elif slot.role == "super_zero":
            drawn[slot.name] = torch.from_numpy(rng.normal(3.0, 1.0, slot.given)).to(TORCH[slot.storage])
        elif slot.role == "super_scale":
            size = dtype(spec.scale, bilevel.table).max if spec.scale != "e4m3" else 1.0
            drawn[slot.name] = torch.from_numpy(np.exp2(rng.uniform(-1, 1, slot.given)) / size)
        elif slot.role == "super_offset":
            drawn[slot.name] = torch.from_numpy(rng.uniform(3.0, 5.0, slot.given))  # sums are of the size of O
    return drawn


def _draw_zeros(spec: MatmulSpec, rng: np.random.Generator, slot: TensorSlot, values: F64) -> Tensor:
    """Zeros within the range of the decoded values."""
    if slot.storage == "u8":
        known = spec.dtype.values()
        return torch.from_numpy(rng.integers(int(known.min()), int(known.max()) + 1, slot.given))
    spread = values[np.isfinite(values)]
    return torch.from_numpy(rng.normal(spread.mean(), spread.std() / 2, slot.given)).to(TORCH[slot.storage])


def _draw_scales(rng: np.random.Generator, slot: TensorSlot, typical: float) -> Tensor:
    drawn = typical * np.exp2(rng.uniform(-1, 1, slot.given))
    if slot.storage == "e8m0":
        drawn = np.exp2(np.round(np.log2(drawn)))
    return torch.from_numpy(drawn).float().to(TORCH[slot.storage])


def _typical_scale(spec: MatmulSpec, weights: F64) -> float:
    """Returns the scale that brings y to O(1)."""
    rms = np.sqrt(np.mean(np.square(weights[np.isfinite(weights)]))) or 1.0
    return max(1.0 / (rms * np.sqrt(spec.k)), 2 * LEAST_SCALE.get(spec.scale, 0.0))


def _slots(spec: MatmulSpec, role: Role, coded: bool = True) -> list[TensorSlot]:
    """The slots of a role; coded=False leaves those out whose numbers are codes."""
    return [slot for slot in spec.given_tensors if slot.role == role and (coded or not slot.code)]
