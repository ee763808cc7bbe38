"""The prepack kernel against pack in torch: one memory order, by two ways that share only `dialect.formats.packing`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from compiled import compile_prepack

from lowbit.dialect.formats.dtypes import all_names
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.targets import parse_target
from lowbit.pylib.emulator import Emulator
from lowbit.pylib.weights.memory_order import pack_codes

TARGET = parse_target("emulator:sm_80")


def packed_by_kernel(spec: MatmulSpec, codes: np.ndarray) -> np.ndarray:
    """int32 [packing.codes_shape]."""
    kernel = compile_prepack(spec, TARGET)
    result = np.full(spec.packing.codes_shape, -1, np.int32)
    values = {"codes": np.ascontiguousarray(codes).view(np.uint8), "packed": result}
    Emulator(kernel.ptx).run(kernel.launch, values)
    return result


def random_codes(spec: MatmulSpec) -> tuple[np.ndarray, int]:
    """Numbers as a user gives them, and what makes codes in memory of them."""
    t = spec.dtype
    offset = t.codes // 2 if t.kind == "int" else 0
    numbers = np.random.default_rng(t.bits).integers(-offset, t.codes - offset, (spec.n, spec.k))
    return numbers.astype(np.int8 if offset else np.uint8), offset


# One format of every width, and a signed one: the kernel looks at nothing else.
@pytest.mark.parametrize("weight", [*(f"u{b}" for b in range(1, 9)), "i1", "i5", "i8", "f6e3m2", "nf4"])
@pytest.mark.parametrize(("n", "k", "group"), [(32, 512, 128), (17, 320, 16)])
def test_the_kernel_packs_as_torch_does(weight: str, n: int, k: int, group: int) -> None:
    assert weight in all_names()
    check(MatmulSpec(n, k, weight, group_size=group))


@pytest.mark.parametrize(("k", "group"), [(272, 17), (100, 100), (1000, None), (96, 48)])
@pytest.mark.parametrize("weight", ["u4", "i3"])
def test_padded_groups(weight: str, k: int, group: int | None) -> None:
    check(MatmulSpec(20, k, weight, group_size=group))


def check(spec: MatmulSpec) -> None:
    """Padding is zero bits."""
    codes, offset = random_codes(spec)
    packed = torch.from_numpy(packed_by_kernel(spec, codes))
    assert torch.equal(packed, pack_codes(spec.packing, torch.from_numpy(codes), offset))


def test_its_stages_can_be_read() -> None:
    stages = compile_prepack(MatmulSpec(32, 128, "u4", group_size=64), TARGET, keep=True).stages
    assert " lowbit.prepack " in stages["lowbit"] and " lowbit.encode " in stages["tile"]
