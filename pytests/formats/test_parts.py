"""The parts of a `MatmulSpec`: values of their own, of which a spec is made and that it gives."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lowbit.dialect import ops
from lowbit.dialect.bilevel import Bilevel
from lowbit.dialect.bindings import ir, new_context
from lowbit.dialect.call import Call
from lowbit.dialect.errors import SpecError
from lowbit.dialect.packed_type import Packed, packed_type
from lowbit.dialect.presets import PRESETS
from lowbit.dialect.shape import Shape
from lowbit.dialect.spec import MatmulSpec
from lowbit.dialect.weight_format import WeightFormat
from lowbit.passes.tensor_programs import matmul_module, spec_of
from lowbit.pylib.quantization.config import QuantConfig
from lowbit.pylib.weights.saved import WEIGHT_FIELDS

PARTS: tuple[type[Any], ...] = (Shape, WeightFormat, Call)
SPECS = [
    MatmulSpec(16, 64, "u4"),
    MatmulSpec(64, 256, "u4", 128, "int", "bf16", "bf16", "f32", True),
    MatmulSpec(64, 256, "u4", 128, invariant=True),
    MatmulSpec(64, 256, "lut1", table=(1.0, 2.5), outliers=True, permuted=True, epilogue="residual"),
    MatmulSpec(64, 256, "nf4", group_size=64, compute="f8e4m3", fold_scales=True, compute_from=17),
    *(MatmulSpec.preset(name, 64, 1024) for name in PRESETS if name != "nf4_nested"),
]


def test_every_field_of_a_spec_is_of_one_part() -> None:
    """With the same type and default: a field that is added to a part is added here, or nobody can set it."""
    of_parts = [(f.name, f.type, f.default) for part in PARTS for f in fields(part)]
    of_spec = [(f.name, f.type, f.default) for f in fields(MatmulSpec) if f.name != "epilogue"]
    assert sorted(of_parts, key=str) == sorted(of_spec, key=str)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_spec_is_made_of_its_parts(spec: MatmulSpec) -> None:
    again = MatmulSpec.of(spec.shape, spec.format, spec.call, spec.epilogue)
    assert again == spec and hash(again) == hash(spec) and str(again) == str(spec)
    assert (again.shape, again.format, again.call) == (spec.shape, spec.format, spec.call)
    for part in (spec.shape, spec.format, spec.call):
        assert {f.name: getattr(part, f.name) for f in fields(part)}.items() <= vars(spec).items()
        assert len({part, copy.copy(part), pickle.loads(pickle.dumps(part))}) == 1


def test_parts_have_the_names_and_numbers_that_are_kept() -> None:
    given = {"scale": torch.bfloat16, "act": "bfloat16", "bilevel": None, "table": [1, 2.5]}
    spec = MatmulSpec(n=torch.tensor(64), k=256, weight="lut1", **given)  # type: ignore[arg-type]
    assert spec.format == WeightFormat("lut1", scale="bf16", table=(1.0, 2.5)) and spec.call == Call("bf16")
    assert spec.shape == Shape(64, 256) and type(spec.shape.n) is int
    assert WeightFormat("u4", 32, scale="u6", bilevel={"groups": 8}).bilevel == Bilevel(groups=8)  # type: ignore[arg-type]


def test_a_format_knows_neither_size_nor_call() -> None:
    spec = MatmulSpec(64, 256, "u4", 128, bias=True)
    others = [replace(spec, n=32), replace(spec, k=512), replace(spec, act="bf16"), replace(spec, epilogue="silu_mul")]
    assert {each.format for each in others} == {spec.format} and len({*others, spec}) == 5
    assert replace(spec, group_size=64).format != spec.format and replace(spec, bias=False).format != spec.format


def test_folded_scales_give_a_format_scales_of_rows() -> None:
    folded = MatmulSpec(64, 256, "nf4", group_size=64, compute="f8e4m3", fold_scales=True)
    assert folded.format.row_scales and folded.row_scales and folded.slot("row_scales")


def test_a_spec_with_fields_alone_has_parts() -> None:
    """Pickles of earlier versions hold no parts."""
    spec = SPECS[1]
    old = object.__new__(MatmulSpec)
    vars(old).update({f.name: getattr(spec, f.name) for f in fields(spec)})
    assert old == spec and old.format == spec.format and old.tensors == spec.tensors and str(old) == str(spec)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Shape(0, 64), "n=0 must be at least 1"),
        (lambda: Shape(1, 8), "k=8 must be at least 16"),
        (lambda: Shape(1, 4096).group_size(96), "group_size=96 must divide k=4096; try 64 or 128"),
        (lambda: WeightFormat("u9"), "unknown weight format 'u9'"),
        (lambda: WeightFormat("u4", 8), "group_size=8 must be at least 16"),
        (lambda: WeightFormat("nf4", zeros="int"), "zeros='int' needs an integer weight"),
        (lambda: WeightFormat("u4", 32, scale="u6"), "scale='u6' is a code: it needs a second level"),
        (lambda: WeightFormat("u4", bias=1), "bias=1 must be True or False"),  # type: ignore[arg-type]
        (lambda: Call("f32"), "act='f32' must be one of 'f16', 'bf16'"),  # type: ignore[arg-type]
        (lambda: Call(fold_scales=True), "fold_scales=True needs compute='f8e4m3' or 'i8'; name one"),
        (lambda: Call(invariant=1), "invariant=1 must be True or False"),  # type: ignore[arg-type]
        (lambda: Call(compute_from=2), "compute_from=2 needs compute='f8e4m3' or 'i8'"),
        (lambda: MatmulSpec.of(Shape(64, 256), WeightFormat("u4", 96)), "group_size=96 must divide k=256"),
        (lambda: MatmulSpec.of(Shape(64, 256), WeightFormat("u4", zeros="float"), Call(compute="i8")), "has no zeros"),
    ],
)
def test_parts_refuse_what_a_spec_refuses(make: Any, message: str) -> None:
    with pytest.raises(SpecError) as error:
        make()
    assert message in str(error.value)


@pytest.mark.parametrize("module", ["shape", "call", "weight_format", "byte_products"])
def test_need_neither_torch_nor_mlir(module: str, repo: Path) -> None:
    code = f"import sys, lowbit.dialect.{module}; print(*({{'torch', 'torch_mlir', 'mlir'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=repo, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


STORED: dict[str, dict[str, Any]] = {
    "weight": {"weight": "i3"},
    "group_size": {"group_size": 32},
    "zeros": {"zeros": "float"},
    "scale": {"scale": "bf16"},
    "table": {"weight": "lut1", "table": (1.0, 2.5)},
    "row_scales": {"row_scales": True},
    "bilevel": {"group_size": 32, "scale": "u6", "bilevel": Bilevel(groups=2)},
}
"""A weight that has each field of the format that stands in the type of a packed weight."""


def test_the_type_of_a_packed_weight_has_every_field_of_its_format() -> None:
    """Others are flags or operands of operations, from which `spec_of` reads them."""
    of_operations = {"bias": False, "outliers": False, "permuted": False}
    assert {*STORED, *of_operations} == {f.name for f in fields(WeightFormat)}
    with new_context() as context, ir.Location.unknown():
        ops.register(context)
        for name, given in STORED.items():
            spec = MatmulSpec(**{"n": 64, "k": 256, "weight": "u4", **given})
            assert getattr(spec.format, name) != getattr(MatmulSpec(64, 256, "u4").format, name)
            assert Packed.of(packed_type(spec)) == Packed(spec.shape, spec.format)
            added = replace(spec, bias=True, outliers=True)
            assert packed_type(replace(added, permuted=True)) == packed_type(spec)
            module = matmul_module(added)
            (function,) = module.body.operations
            assert spec_of(function.regions[0].blocks[0].operations[0]) == added


CONFIGS = [
    QuantConfig("f4e2m1", 64, scale="f32", compute="f8e4m3", compute_from=17),
    QuantConfig("u4", 64, zeros="float", compute="f8e4m3", fold_scales=True, method="rtn"),
    QuantConfig("lut1", table=(1.0, 2.5)),
    QuantConfig.preset("nvfp4"),
    QuantConfig.preset("q4_k"),
    QuantConfig("u4", 64, method="rtn", invariant=True),
]


def test_a_configuration_passes_on_every_field_that_it_shares_with_a_spec() -> None:
    shared = {f.name for f in fields(QuantConfig)} & {f.name for f in fields(MatmulSpec)}
    specs = [config.spec(64, 1024) for config in CONFIGS]
    for name in shared:
        given = [(getattr(config, name), getattr(spec, name)) for config, spec in zip(CONFIGS, specs)]
        assert [(name, value) for value, kept in given if value not in (None, kept) and name != "row_scales"] == []
        assert len({value for value, _ in given}) > 1, f"no configuration here has another {name}"
    assert [spec.row_scales for spec in specs] == [False, True, False, True, False, False]  # folded scales have them


def test_a_saved_weight_is_of_its_shape_and_format() -> None:
    """And of `fold_scales`, from which `pack` chooses scales; the rest may change from call to call."""
    calls = {f.name for f in fields(Call)} - {"fold_scales"} | {"epilogue"}
    assert {*WEIGHT_FIELDS} == {f.name for f in fields(MatmulSpec)} - calls
