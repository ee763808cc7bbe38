"""Kernel families: what holds for each, and that a new one takes a class and a line in the registry."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from lowbit.dialect.errors import SpecError
from lowbit.dialect.spec import MatmulSpec
from lowbit.dialect.top_k import TopK
from lowbit.passes.kernels import registry
from lowbit.passes.kernels.base import KernelFamily, KernelSchedule, Operation
from lowbit.passes.kernels.decode.family import Decode
from lowbit.passes.kernels.decode.schedule import IntegerSchedule, Schedule
from lowbit.passes.kernels.registry import FAMILIES, family_of, request, schedule_from_dict, schedule_to_dict
from lowbit.passes.scheduling.choice import schedule_for, token_tiles
from lowbit.passes.target import Target
from lowbit.passes.targets import parse_target
from lowbit.pylib.build.kernels import Artifacts

HOPPER = parse_target("sm_90a")
SPEC = MatmulSpec(4096, 4096, "u2", group_size=128)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
def test_what_every_family_promises(family: KernelFamily[Any]) -> None:
    """Its candidates are of its type, obey its own rules, and go through JSON."""
    spec = replace(SPEC, compute="i8") if family.operation.startswith("quantize") else SPEC
    spec = replace(spec, experts=4) if "expert" in family.operation else spec
    spec = replace(spec, top_k=TopK(2)) if family.name == "top_k_experts" else spec
    spec = replace(spec, invariant=True) if family.name.endswith("in_order") else spec
    without_wgmma = family.name == "prefill_mma" or family.name.endswith("mma_in_order")
    target = parse_target("sm_80") if without_wgmma else HOPPER
    for tokens in family.token_tiles(spec, target) or (0,):
        found = family.candidates(spec, tokens, target)
        assert found and len(set(found)) == len(found)
        for schedule in found:
            family.check(spec, schedule, target)
            assert family_of(schedule) is family
            assert family.predict(spec, tokens, schedule, target) < float("inf")
            assert schedule_from_dict(json.loads(json.dumps(schedule_to_dict(schedule)))) == schedule


def test_families_are_told_apart() -> None:
    assert len({family.schedule_type for family in FAMILIES.values()}) == len(FAMILIES)
    assert {name: family.name for name, family in FAMILIES.items()} == {name: name for name in FAMILIES}
    fields = {name: value for name, value in schedule_to_dict(IntegerSchedule()).items() if name != "family"}
    assert IntegerSchedule() != Schedule(**fields) == schedule_from_dict(fields)
    with pytest.raises(SpecError, match="family='chunked' must be one of 'decode', 'decode_integer', 'prefill'"):
        schedule_from_dict({"family": "chunked"})
    with pytest.raises(SpecError, match="unknown field 'tokens'; allowed: none"):
        schedule_from_dict({"family": "dequantize", "tokens": 8})


def test_a_request_is_checked_when_it_is_made() -> None:
    with pytest.raises(SpecError, match="wgmma needs sm_90a, the target is sm_80"):
        request(SPEC, parse_target("sm_80"), Schedule(8, 1, 4, 4, 128, wgmma=True))


@dataclass(frozen=True)
class ToySchedule(KernelSchedule):
    """One choice, which decode kernels have, too."""

    warps: int = 4


class Toy(KernelFamily[ToySchedule]):
    """Takes what is predicted to take no time at all: any matmul of one token."""

    name: ClassVar[str] = "toy"
    operation: ClassVar[Operation] = "matmul"
    schedule_type = ToySchedule

    def token_tiles(self, spec: MatmulSpec, target: Target) -> tuple[int, ...]:
        return (1,)

    def candidates(self, spec: MatmulSpec, tokens: int, target: Target) -> Sequence[ToySchedule]:
        return [ToySchedule(2)]

    def build(self, spec: MatmulSpec, schedule: ToySchedule) -> Any:
        return Decode().build(spec, Schedule(8, 1, 1, schedule.warps, 128, 2))


def test_a_new_family_is_a_line_in_the_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choice, cache, pipeline and table of choices need not be told."""
    monkeypatch.setitem(registry.FAMILIES, Toy.name, Toy())
    spec = replace(SPEC, n=32, k=1024)
    assert schedule_for(spec, 1, HOPPER) == ToySchedule(2) and token_tiles(spec, HOPPER)[:2] == (1, 8)
    artifacts = Artifacts(spec, parse_target("emulator:sm_90a"), None)
    kernel = artifacts.kernel(1)
    assert kernel.schedule == ToySchedule(2) and kernel.launch.threads == 64
    assert artifacts.choices().launches(1)[0].family == "toy" != artifacts.choices().launches(2)[0].family
    in_one_line = " ".join(artifacts.stages_for(1)["lowbit"].split())
    assert 'family = "toy", warps = 2}' in in_one_line


def test_asking_families_loads_no_compiler(repo: Path) -> None:
    """Supports, candidates, predictions and checks of all of them; `build` alone needs MLIR."""
    code = (
        "import sys\n"
        "from itertools import islice\n"
        "from lowbit.dialect.spec import MatmulSpec\n"
        "from lowbit.passes.kernels.registry import FAMILIES\n"
        "from lowbit.passes.targets import parse_target\n"
        "for f in FAMILIES.values():\n"
        "    target = parse_target('sm_80' if f.name.startswith('prefill_mma') else 'sm_90a')\n"
        "    spec = MatmulSpec(64, 1024, 'u2', 128, compute='i8' if f.operation.startswith('quantize') else None,\n"
        "                      experts=4 if 'expert' in f.operation else 1)\n"
        "    for tokens in f.token_tiles(spec, target) or (0,):\n"
        "        for s in islice(f.candidates(spec, tokens, target), 8):\n"
        "            f.check(spec, s, target), f.predict(spec, tokens, s, target)\n"
        "            f.neighbours(spec, tokens, target, s)\n"
        "print([m for m in ('torch_mlir', 'mlir', 'llvmlite', 'torch', 'cuda') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=repo, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
