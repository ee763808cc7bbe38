"""Weights packed in C, saved and loaded there: byte for byte what Python has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from c_runtime import CMatmul, Failed, as_bytes
from safetensors.torch import load_file, save_file
from torch import Tensor

from lowbit.dialect.bilevel import Bilevel
from lowbit.dialect.errors import PackError, SpecError
from lowbit.dialect.formats.dtypes import all_names
from lowbit.dialect.presets import PRESETS
from lowbit.dialect.spec import MatmulSpec, interned
from lowbit.passes.targets import parse_target
from lowbit.pylib.aot.export import MANIFEST_VERSION, matmul_to_dict
from lowbit.pylib.aot.files import Files
from lowbit.pylib.reference.inputs import random_inputs
from lowbit.pylib.weights import saved
from lowbit.pylib.weights.packed import PackedWeight, pack

TABLE = tuple(np.linspace(-3, 5, 8).tolist())
TABLE_256 = tuple(np.linspace(-2, 2, 256).tolist())
S = MatmulSpec
FOLDED: dict[str, Any] = {"compute": "f8e4m3", "fold_scales": True}
IN_I8: dict[str, Any] = {"compute": "i8", "fold_scales": True}


def foldable(weight: str) -> bool:
    """Tells whether scales of a format can be folded."""
    try:
        return S(33, 256, weight, group_size=32, **FOLDED).folds
    except SpecError:
        return False


SPECS: dict[str, MatmulSpec] = {
    **{f"every_{w}": S(33, 272, w, group_size=68) for w in all_names()},
    "lut": S(16, 64, "lut3", table=TABLE),
    **{f"odd_{w}": S(17, 100, w, group_size=25, zeros="int") for w in ("u1", "u2", "u3", "u5", "i6", "i7", "u8")},
    "one_per_row": S(40, 200, "i5", bias=True, out="f32"),
    "offsets": S(20, 96, "u4", group_size=48, zeros="offset", scale="bf16", act="bf16"),
    "float_zeros": S(20, 96, "u2", group_size=32, zeros="float", bias=True),
    "mx": S(31, 128, "f4e2m1", group_size=32, scale="e8m0"),
    "nv": S(31, 128, "f4e2m1", group_size=16, scale="e4m3", row_scales=True),
    "outliers": S(53, 9000, "i3", outliers=True),
    "permuted": S(24, 160, "u4", group_size=32, permuted=True, zeros="int"),
    "permuted_experts": S(96, 64, "u4", group_size=32, permuted=True, experts=3),
    "gated": S(64, 96, "u4", group_size=32, epilogue="silu_mul", bias=True, outliers=True, row_scales=True),
    "gated_zeros": S(64, 96, "i6", group_size=32, epilogue="silu_mul", zeros="int"),
    "gated_experts": S(128, 64, "u3", group_size=16, epilogue="gelu_mul", experts=4),
    "two_levels": S(37, 512, "u2", group_size=16, zeros="offset", scale="u4", bilevel=Bilevel(groups=16)),
    "blocks_of_rows": S(37, 256, "u3", group_size=16, zeros="float", scale="u3", bilevel=Bilevel(16, 1, zeros=True)),
    "gated_levels": S(64, 256, "i3", group_size=16, scale="i6", bilevel=Bilevel(groups=16), epilogue="silu_mul"),
    "table_of_scales": S(
        18, 256, "nf4", group_size=64, scale="lut8", bilevel=Bilevel(1, 4, "f32", offsets=True, table=TABLE_256)
    ),
    **{f"preset_{name}": S.preset(name, 48, 512) for name in PRESETS if name not in all_names()},
    **{f"folded_{w}": S(33, 256, w, group_size=32, **FOLDED) for w in all_names() if foldable(w)},
    "folded_zeros": S(33, 256, "u4", group_size=64, zeros="int", act="bf16", **FOLDED),
    "folded_offsets": S(33, 256, "i5", group_size=64, zeros="offset", scale="f32", **FOLDED),
    "folded_rows": S(33, 256, "u3", group_size=64, row_scales=True, **FOLDED),
    "folded_powers": S(33, 256, "f4e2m1", group_size=32, scale="e8m0", **FOLDED),
    "folded_gate": S(64, 128, "f8e5m2", group_size=32, epilogue="silu_mul", **FOLDED),
    "folded_experts": S(96, 128, "u4", group_size=32, zeros="int", experts=3, **FOLDED),
    **{f"folded_in_i8_{w}": S(33, 256, w, group_size=32, **IN_I8) for w in ("u4", "i3", "u8", "nf4", "f6e3m2")},
    "folded_zeros_in_i8": S(33, 256, "u8", group_size=64, zeros="int", act="bf16", **IN_I8),
    "folded_levels_in_i8": S.preset("q4_k", 48, 512, **IN_I8),
    **{f"folded_{name}": S.preset(name, 48, 512, **FOLDED) for name in ("q2_k", "q4_k", "q6_k", "nvfp4")},
}

FAR = {"far": S(33, 256, "lut3", group_size=32, table=(-1e7, *range(6), 1e7), scale="e4m3", **FOLDED)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("packing"))


@pytest.fixture(scope="module")
def rounding(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As if its kernels rounded weights, as those for GPUs do."""
    return written(tmp_path_factory.mktemp("rounding"), rounds_weights=True)


def written(path: Path, **about: bool) -> Path:
    """Returns a folder with all specs. They share the code of one: packing needs none."""
    files = Files()
    code = matmul_to_dict(S(16, 16, "u1"), "code", [parse_target("cpu")], files)["targets"]
    for target in code:
        target.update(operands=["codes"], **about)
    every = SPECS | FAR
    described = [matmul_to_dict(interned(spec), name, [], files) | {"targets": code} for name, spec in every.items()]
    files.write(path, {"manifest": MANIFEST_VERSION, "packing": saved.FORMAT, "matmuls": described})
    return path


def given_in_c(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns tensors as C takes them."""
    given: dict[str, Tensor] = {}
    for name, t in tensors.items():
        if name == "outliers":
            given |= {"outlier_offsets": t.crow_indices().int(), "outlier_columns": t.col_indices().int()}
            given["outlier_values"] = t.values().float()
        elif name == "codes":
            given[name] = t.to(torch.int8 if t.min() < 0 else torch.uint8)
        else:
            given[name] = t.float() if t.is_floating_point() else t.int()
    return given


@pytest.mark.parametrize("name", SPECS)
def test_packing(folder: Path, name: str, tmp_path: Path) -> None:
    """Also saved in C and loaded in Python, and the other way round."""
    spec = SPECS[name]
    tensors = random_inputs(spec, 1, seed=len(name))[1]
    w = pack(spec, **tensors)
    with CMatmul(folder, name) as mm:
        packed = mm.pack(given_in_c(tensors))
        assert list(packed) == list(w)
        for each, tensor in w.items():
            assert np.array_equal(packed[each].numpy(), as_bytes(tensor)), each
        mm.save(tmp_path / "c.safetensors", list(packed.values()))
        again = PackedWeight.from_state_dict(load_file(tmp_path / "c.safetensors"))
        assert again.spec is w.spec and all(torch.equal(again[each], w[each]) for each in w)
        save_file(w.state_dict(), tmp_path / "python.safetensors")
        loaded = mm.load(tmp_path / "python.safetensors")
        assert all(np.array_equal(loaded[each].numpy(), as_bytes(w[each])) for each in w)


@pytest.mark.parametrize("name", [name for name in SPECS if name.startswith("folded")])
@pytest.mark.parametrize("size", [2.0**-11, 1.0, 2.0**9])
def test_powers_of_two_go_to_rows(folder: Path, name: str, size: float) -> None:
    """Of scales of any size; rows have none of their own unless they are given."""
    spec = SPECS[name]
    tensors = random_inputs(spec, 1, seed=7)[1]
    if not spec.row_scales:
        tensors.pop("row_scales", None)
    for each in ("scales", "offsets", "scale_scales", "scale_offsets"):
        if each in tensors and tensors[each].is_floating_point():
            sizes = size * 2.0 ** torch.randint(-3, 3, (len(tensors[each]), 1), generator=torch.manual_seed(1))
            tensors[each] = (tensors[each].float() * sizes).to(tensors[each].dtype)
    expected: dict[str, Tensor] | str
    try:
        expected = dict(pack(spec, **tensors))
    except PackError as error:
        expected = str(error)
    with CMatmul(folder, name) as mm:
        if isinstance(expected, str):
            with pytest.raises(Failed):
                mm.pack(given_in_c(tensors))
            return
        packed = mm.pack(given_in_c(tensors))
        assert all(np.array_equal(packed[each].numpy(), as_bytes(expected[each])) for each in expected)


def test_scales_that_lose_what_rows_get(folder: Path) -> None:
    """e4m3 has no number by which 10^7 becomes one of e4m3."""
    spec = FAR["far"]
    tensors = random_inputs(spec, 1)[1]
    tensors["codes"][0], tensors["scales"] = 7, torch.ones_like(tensors["scales"])
    lost = "fold_scales takes 2\\^15 from the scales of row 0, which leaves less than"
    with pytest.raises(PackError, match=lost):
        pack(spec, **tensors)
    with CMatmul(folder, "far") as mm, pytest.raises(Failed, match=lost):
        mm.pack(given_in_c(tensors))


def test_packing_without_codes(folder: Path) -> None:
    """A GPU packs them."""
    spec = SPECS["offsets"]
    tensors = random_inputs(spec, 1)[1]
    w, given = pack(spec, **tensors), given_in_c(tensors)
    del given["codes"]
    with CMatmul(folder, "offsets") as mm:
        packed = mm.pack(given, without="codes")
        assert all(np.array_equal(packed[each].numpy(), as_bytes(w[each])) for each in w if each != "codes")
        with pytest.raises(Failed, match="codes are missing"):
            mm.pack(given)


def test_ranges_without_codes(rounding: Path) -> None:
    given = given_in_c(random_inputs(SPECS["odd_u8"], 1)[1])
    del given["codes"]
    with CMatmul(rounding, "odd_u8") as mm:
        mm.pack(given, without="codes")
        given["scales"] = torch.full_like(given["scales"], 300.0)
        with pytest.raises(Failed, match="row 0 of the weight may have numbers beyond"):
            mm.pack(given, without="codes")


@pytest.mark.parametrize("name", SPECS)
def test_ranges_of_values(rounding: Path, name: str, tmp_path: Path) -> None:
    """Weights are refused where Python calls their range wide: large ones, small ones, and with a few codes alone."""
    spec = SPECS[name]
    with CMatmul(rounding, name) as mm:
        for factor in (1.0, 2.0**7, 2.0**-14, 2.0**-24):
            tensors = random_inputs(spec, 1, seed=3)[1]
            floats = {each: t for each, t in tensors.items() if each.endswith("scales") and t.is_floating_point()}
            scaled = {each: (t.float() * factor).to(t.dtype) for each, t in floats.items()}
            try:
                w = pack(spec, **(tensors | scaled))
            except PackError:
                continue  # beyond the scale's type
            save_file(w.state_dict(), tmp_path / "w")
            if w.wide_range:
                with pytest.raises(Failed, match=r"has numbers beyond the range of x's type.*--wide-range"):
                    mm.load(tmp_path / "w")
            else:
                assert mm.load(tmp_path / "w")


@pytest.mark.parametrize(
    ("name", "scale", "codes", "wide"),
    [
        ("odd_u8", 300.0, 255, True),
        ("odd_u8", 300.0, 100, False),
        ("every_i4", 9000.0, 7, False),
        ("every_i4", 9000.0, -8, True),
        ("every_nf4", 65504.0, 15, False),
        ("every_f6e3m2", 4000.0, 31, True),
        ("every_u4", 2**-16, 3, True),
        ("every_u4", 2**-16, 0, False),
        ("every_u4", 2**-16, 4, False),
    ],
)
def test_the_edges_of_ranges(rounding: Path, name: str, scale: float, codes: int, wide: bool) -> None:
    spec = SPECS[name]
    _, tensors = random_inputs(spec, 1)
    tensors["codes"] = torch.full_like(tensors["codes"], codes)
    tensors["scales"] = torch.full_like(tensors["scales"], scale)
    if "zeros" in tensors:
        tensors["zeros"] = torch.zeros_like(tensors["zeros"])
    assert pack(spec, **tensors).wide_range == wide
    with CMatmul(rounding, name) as mm:
        if not wide:
            mm.pack(given_in_c(tensors))
            return
        with pytest.raises(Failed, match="row 0 of the weight has numbers beyond the range"):
            mm.pack(given_in_c(tensors))
