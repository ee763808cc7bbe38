"""SpQR checkpoints: words written from the definition come back bit for bit, and what is wrong with them is named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import lowbit
from lowbit import CheckpointError
from lowbit.pylib import reference
from lowbit.pylib.checkpoints.formats import spqr
from lowbit.pylib.weights.packed import PackedWeight

FIXTURES = Path(__file__).parents[1] / "fixtures/checkpoints"
CONFIG = {"quant_method": "spqr", "bits": 3, "beta1": 16, "beta2": 16}
LAYER = "model.layers.0.mlp.up_proj"
Tensors = dict[str, Tensor]


def fixture(name: str = "spqr-ptcsr") -> Tensors:
    """The tensors of a layer that `make_checkpoints.py` has written."""
    return {key.rpartition(".")[2]: t for key, t in load_file(FIXTURES / name / "model.safetensors").items()}


def words(codes: Any, scales: Any, zeros: Any, level: Any) -> Tensor:
    """dense_weights of codes [n, k], codes of scales and zeros [n, k / 16] and a second level [n / 16, k / 16, 4]."""
    (n, k), numbers = codes.shape, [np.asarray(t).astype(np.uint64) for t in (scales, zeros)]
    result = np.zeros((n, k // 16), np.uint64)
    for i, part in enumerate([*numbers, *(np.asarray(codes)[:, j::16].astype(np.uint64) for j in range(16))]):
        result |= part << np.uint64(3 * i)
    data = np.asarray(level, np.float16).view(np.uint8).reshape(n // 16, k // 16, 8)
    for row in range(n):
        result[row] |= data[row // 16, :, row % 16 // 2].astype(np.uint64) << np.uint64(54)
    tiles = result.reshape(n // 16, 16, k // 16).transpose(0, 2, 1)
    return torch.from_numpy(np.ascontiguousarray(tiles).view(np.int64).ravel())


def col_vals(columns: Any, values: Any) -> Tensor:
    pairs = np.stack([np.asarray(columns, np.uint16), np.asarray(values, np.float16).view(np.uint16)], -1)
    return torch.from_numpy(np.ascontiguousarray(pairs).view(np.int32).ravel())


def in_perm(order: Any) -> Tensor:
    return torch.from_numpy(np.asarray(order, np.uint16).view(np.int32))


def sparse(dense: np.ndarray, interleaved: bool) -> Tensors:
    """row_offsets and col_vals of a sparse matrix in f16."""
    rows = [(line.nonzero()[0], line[line.nonzero()[0]]) for line in dense]
    if not interleaved:
        offsets = np.cumsum([0, *(len(columns) for columns, _ in rows)])
        columns, values = (np.concatenate([row[i] for row in rows]) for i in (0, 1))
    else:
        longest = [max(len(c) for c, _ in rows[first : first + 16]) for first in range(0, len(rows), 16)]
        offsets = 16 * np.cumsum([0, *longest])
        columns, values = np.zeros(offsets[-1], np.int64), np.zeros(offsets[-1], np.float16)
        for row, (at, line) in enumerate(rows):
            places = offsets[row // 16] + row % 16 + 16 * np.arange(len(at))
            columns[places], values[places] = at, line
    packed = col_vals(columns, values) if len(columns) else torch.zeros(0)
    return {"row_offsets": torch.from_numpy(offsets.astype(np.int32)), "col_vals": packed}


def imported(tensors: Tensors, shape: tuple[int, int] | None = None) -> PackedWeight:
    return lowbit.import_weight(CONFIG, tensors, "f16", shape)


def rewritten(w: PackedWeight) -> Tensor:
    """dense_weights again, of what a packed weight holds."""
    level = [w.unpack_tensor(name) for name in ("scale_scales", "zero_scales", "scale_zeros", "zero_zeros")]
    return words(w.unpack(), w.unpack_scales(), w.unpack_zeros(), torch.stack(level, -1))


@pytest.mark.parametrize("name", ["spqr-csr", "spqr-ptcsr", "spqr-csr-permuted", "spqr-dense"])
def test_every_bit_is_kept(name: str) -> None:
    given_ = fixture(name)
    w = imported(given_)
    assert torch.equal(rewritten(w), given_["dense_weights"])
    assert w.spec.bilevel == lowbit.Bilevel(16, 1, "f16", zeros=True) and w.spec.scale == "u3"
    assert w.spec.permuted == ("permuted" in name or "ptcsr" in name)
    if w.spec.permuted:
        assert torch.equal(in_perm(w["permutation"]), given_["in_perm"])
    found = w.unpack_outliers()
    assert (found is None) == (name == "spqr-dense")
    if found is not None:
        again = sparse(found.to_dense().numpy(), name == "spqr-ptcsr")
        assert all(torch.equal(t, given_[key]) for key, t in again.items())


@pytest.mark.parametrize("name", ["spqr-csr", "spqr-ptcsr"])
def test_the_library_rounds_to_f16_on_the_way(name: str) -> None:
    """Its weights are s (q - z) with s, q - z and the product in f16: each is off by at most 2^-11 of itself, and z."""
    expected = load_file(FIXTURES / name / "expected.safetensors")
    dense, half = expected[f"{LAYER}.weight"], expected[f"{LAYER}.half"].float()
    w = imported(fixture(name))
    scales = w.unpack_scales() - w.unpack_tensor("scale_zeros").float().repeat_interleave(16, 0)
    zeros = w.unpack_zeros() - w.unpack_tensor("zero_zeros").float().repeat_interleave(16, 0)  # type: ignore[operator]
    scales, zeros = (
        t * w.unpack_tensor(f"{role}_scales").float().repeat_interleave(16, 0)
        for t, role in ((scales, "scale"), (zeros, "zero"))
    )
    most = float((scales.abs() * (7 + zeros.abs())).max())
    assert torch.equal(w.dequantize(), dense)
    assert 0 < float((half - dense).abs().max()) < 7 * 2**-11 * most + 2**-11 * float(dense.abs().max())


@pytest.mark.parametrize("target", ["cpu", "emulator:sm_80"])
def test_every_code_of_scale_zero_and_weight(target: str) -> None:
    """All 512 combinations, and with powers of two for the second level all are exact in f16."""
    pairs = np.arange(64).reshape(16, 4)
    codes = np.resize(np.arange(8), (16, 64))
    level = np.broadcast_to(np.float16([0.25, 0.5, -1, 3]), (1, 4, 4))
    tensors = {"dense_weights": words(codes, pairs % 8, pairs // 8, level), "in_perm": in_perm(np.arange(64))}
    w = imported(tensors | sparse(np.zeros((16, 64)), False))
    scales, zeros = ((t.repeat(16, 1)) for t in ((pairs % 8 + 1) * 0.25, (pairs // 8 - 3) * 0.5))
    expected = torch.from_numpy(scales * (codes - zeros)).float()
    assert torch.equal(w.dequantize(), expected)
    assert torch.equal(lowbit.compile(w.spec, target).dequantize(w), expected.half())
    assert torch.equal(lowbit.compile(w.spec, target)(torch.eye(64).half(), w), expected.T.half())


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([(1, 1), (3, 5), (2, 17)]),
    st.sampled_from(["empty", "one full row", "sparse", "dense"]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 99),
)
def test_any_weight(size: tuple[int, int], kind: str, interleaved: bool, permuted: bool, seed: int) -> None:
    (blocks, tiles), rng = size, np.random.default_rng(seed)
    n, k = 16 * blocks, 16 * tiles
    share = {"empty": 0, "one full row": 0, "sparse": 0.02, "dense": 0.5}[kind]
    there = rng.random((n, k)) < share
    if kind == "one full row":
        there[rng.integers(n)] = True
    dense = np.where(there, rng.standard_normal((n, k)) + 4, 0).astype(np.float16)
    codes, scales, zeros = (rng.integers(0, 8, (n, size)) for size in (k, tiles, tiles))
    level = rng.standard_normal((blocks, tiles, 4)).astype(np.float16)
    order = rng.permutation(k) if permuted else np.arange(k)
    given_ = {"dense_weights": words(codes, scales, zeros, level), "in_perm": in_perm(order)}
    w = imported(given_ | sparse(dense, interleaved), (n, k))
    assert torch.equal(rewritten(w), given_["dense_weights"]) and np.array_equal(w.unpack().numpy(), codes)
    found = w.unpack_outliers()
    assert np.array_equal(np.zeros((n, k)) if found is None else found.to_dense().numpy(), dense)
    level = level.astype(np.float32).repeat(16, 0)
    s, z = ((t.astype(np.float32) - level[..., b]) * level[..., a] for t, a, b in ((scales, 0, 2), (zeros, 1, 3)))
    s, z = (t.repeat(16, 1) for t in (s, z))  # each step rounds to f32
    expected = s * (codes.astype(np.float32) - z) + dense.astype(np.float32)
    assert np.array_equal(w.dequantize().numpy()[:, order], expected)
    x = torch.from_numpy(rng.standard_normal((2, k))).half()
    spec, exact = replace(w.spec, out="f32"), x.double() @ w.dequantize().double().T
    y = lowbit.compile(spec, "cpu")(x, PackedWeight(spec, w)).double()
    assert bool(((y - exact).abs() <= 2e-5 * np.abs(expected).max() * x.double().abs().sum(1, keepdim=True)).all())


MUTATIONS = {
    "outliers dropped": ("_outliers", lambda right: lambda *_: None),
    "scale and zero exchanged": ("_field", lambda right: lambda tiles, i: right(tiles, 1 - i if i < 2 else i)),
    "second levels exchanged": ("_second_level", lambda right: lambda tiles: right(tiles)[..., [1, 0, 3, 2]]),
    "second level of the next group": ("_second_level", lambda right: lambda tiles: right(tiles).roll(1, 1)),
    "second level of the next rows": ("_second_level", lambda right: lambda tiles: right(tiles).roll(1, 0)),
    "columns one on": ("_codes", lambda right: lambda tiles: right(tiles).roll(1, 3)),
    "permutation inverted": ("_order", lambda right: lambda pairs: right(pairs).argsort()),
}  # fmt: skip


@pytest.mark.parametrize("mutation", [None, *MUTATIONS])
def test_mutations_of_the_reader(mutation: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values, and products, are those of the definition only as it reads now."""
    if mutation:
        name, wrap = MUTATIONS[mutation]
        monkeypatch.setattr(spqr, name, wrap(getattr(spqr, name)))
    w = imported(fixture())
    dense = load_file(FIXTURES / "spqr-ptcsr/expected.safetensors")[f"{LAYER}.weight"]
    assert torch.equal(w.dequantize(), dense) == (mutation is None)
    x = reference.random_inputs(w.spec, 2)[0]
    y, exact = lowbit.compile(w.spec, "cpu")(x, w).double(), x.double() @ dense.double().T
    assert bool(((y - exact).abs() <= 2e-3 * exact.abs().max()).all()) == (mutation is None)


# -- sizes


def without_in_perm(n: int, k: int) -> Tensors:
    """Tensors without outliers and with columns in order."""
    zeros = np.zeros((n, k // 16), np.int64)
    level = np.ones((n // 16, k // 16, 4), np.float16)
    dense = words(np.zeros((n, k), np.int64), zeros, zeros, level)
    return {"dense_weights": dense, "in_perm": torch.zeros(0, dtype=torch.int32)} | sparse(np.zeros((n, k)), False)


def test_sizes_come_from_the_tensors_or_the_model() -> None:
    """Without in_perm, 16 * 16 rows in PTCSR begin where 16 rows in CSR do."""
    tensors = without_in_perm(16, 256)
    with pytest.raises(CheckpointError, match=r"256 dense_weights and 17 row_offsets may be 16 x 256 or 256 x 16 with"):
        imported(tensors)
    for n, k in ((16, 256), (256, 16)):
        assert (imported(tensors, (n, k)).spec.n, imported(tensors, (n, k)).spec.k) == (n, k)
    assert imported(tensors | {"in_perm": in_perm(np.arange(256))}).spec.k == 256
    assert imported(without_in_perm(32, 64)).spec.k == 64  # 512 x 4 would be no tiles


def test_a_model_says_the_sizes(tmp_path: Path) -> None:
    named = {f"up.{name}": t for name, t in without_in_perm(16, 256).items()}
    save_file(named, tmp_path / "model.safetensors")
    config = {"dtype": "float16", "quantization_config": CONFIG}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = nn.ModuleDict({"up": nn.Linear(256, 16, bias=False, device="meta")})
    lowbit.load_checkpoint(model, tmp_path)
    assert model["up"](torch.randn(2, 256).half()).shape == (2, 16)


# -- what is wrong


def changed(name: str, index: Any, value: int) -> Tensors:
    tensors = fixture("spqr-csr")
    tensors[name][index] = value
    return tensors


NAN, INF = 0x7E00 << 16, 0x7C00 << 16
WRONG: dict[str, tuple[Tensors, str]] = {
    "column too large": (changed("col_vals", 0, 0x3C000080), r"row 1 is in column 128; it must be in 0\.\.127"),
    "column in the upper half": (changed("col_vals", 0, 0x3C00FFFF), r"row 1 is in column 65535; it must be"),
    "column twice": (changed("col_vals", slice(2), 0x3C000003), r"outliers\[1, 3\] is there twice"),
    "NaN": (changed("col_vals", 0, NAN | 3), r"outliers\[1, 3\] = nan must be finite"),
    "infinite": (changed("col_vals", 0, INF | 3), r"outliers\[1, 3\] = inf must be finite"),
    "offsets fall": (changed("row_offsets", 3, 1), "row offsets of outliers must not fall: row 2 goes from 4 to 1"),
    "offsets end early": (changed("row_offsets", 48, 190), "row offsets of outliers must go from 0 to 195"),
    "offsets begin late": (changed("row_offsets", 0, 1), "row offsets of outliers must go from 0 to 195, not from 1"),
    "columns of x twice": (changed("in_perm", 1, 0), "permutation"),
    "second level is NaN": (
        changed("dense_weights", slice(16), -1), r"scale_scales\[0, 0\] = nan must be finite"),
    "one word too few": (
        fixture() | {"dense_weights": fixture()["dense_weights"][1:]},
        r"383 dense_weights and 4 row_offsets don't fit a weight with 128 columns in in_perm in tiles of 16 x 16"),
    "rows no multiple of 16": (
        fixture() | {"row_offsets": torch.zeros(48, dtype=torch.int32)}, "384 dense_weights and 48 row_offsets don't"),
    "columns no multiple of 16": (
        fixture() | {"in_perm": fixture()["in_perm"][4:]}, "don't fit a weight with 120 columns in in_perm"),
    "words of floats": (
        fixture() | {"col_vals": torch.zeros(960)}, "col_vals must be int32, not float32"),
    "no tensor": ({"dense_weights": fixture()["dense_weights"]}, "row_offsets is missing; there are dense_weights"),
}  # fmt: skip


@pytest.mark.parametrize(("tensors", "message"), WRONG.values(), ids=WRONG)
def test_wrong_tensors(tensors: Tensors, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        imported(tensors)


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        (1, 16 * 61, "row_offsets must not fall, as they do after rows 16 to 31"),
        (3, 16 * 59, "row_offsets must go from 0 to the 960 col_vals, not from 0 to 944"),
        (0, -16, "row_offsets must go from 0 to the 960 col_vals, not from -16 to 960"),
        (1, 9, "don't fit a weight with 128 columns"),
    ],
)
def test_wrong_offsets_of_blocks(index: int, value: int, message: str) -> None:
    tensors = fixture()
    tensors["row_offsets"][index] = value
    with pytest.raises(CheckpointError, match=message):
        imported(tensors)


@pytest.mark.parametrize("change", [{"bits": 4}, {"beta1": 32}, {"beta2": "16"}, {"bits": True}])
def test_other_tiles(change: dict[str, Any]) -> None:
    (name, value), known = next(iter(change.items())), {"bits": 3, "beta1": 16, "beta2": 16}
    with pytest.raises(CheckpointError, match=rf"has {name}={value!r}; what can be read is {known[name]}"):
        lowbit.import_weight(CONFIG | change, fixture())


def test_sizes_that_lie_take_no_memory() -> None:
    """Offsets that claim 2^31 outliers, and a shape of the model that claims terabytes."""
    tensors = fixture()
    tensors["row_offsets"][-1] = 2**31 - 16
    with pytest.raises(CheckpointError, match="must go from 0 to the 960 col_vals, not from 0 to 2147483632"):
        imported(tensors)
    with pytest.raises(CheckpointError, match=r"don't fit a weight \[1048576, 1048576\] with 128 columns"):
        imported(fixture(), (1 << 20, 1 << 20))
