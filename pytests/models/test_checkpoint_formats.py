"""Checkpoints of other libraries: weights are those that the libraries dequantize, bit for bit, and run.

The files are made by `fixtures/make_checkpoints.py`, which runs the libraries.
"""

from __future__ import annotations

import copy
import json
import math
import random
import re
import resource
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import lowbit
from lowbit import CheckpointError
from lowbit.pylib import reference
from lowbit.pylib.checkpoints import unpack
from lowbit.pylib.checkpoints.checkpoint import open_checkpoint
from lowbit.pylib.checkpoints.imported import Imported
from lowbit.pylib.checkpoints.registry import FORMATS, REFUSED, format_of
from lowbit.pylib.weights import at_once
from lowbit.pylib.weights.packed import PackedWeight

FIXTURES = Path(__file__).parents[1] / "fixtures/checkpoints"
UNREADABLE = {
    "hqq-4-axis-0": "axis=0: groups must lie along k",
}
NAMES = sorted(folder.name for folder in FIXTURES.iterdir())


def weights(name: str, device: str = "cpu") -> Iterator[tuple[PackedWeight, Tensor]]:
    """Yields the weights of a checkpoint, and what its library makes of each."""
    checkpoint = open_checkpoint(FIXTURES / name)
    expected = load_file(FIXTURES / name / "expected.safetensors")
    for module in checkpoint.modules:
        if module in expected:  # all experts in one tensor
            yield from zip(checkpoint.load_experts(module, "bf16", device), expected[module])
        else:
            yield checkpoint.load(module, device=device), expected[f"{module}.weight"]


@pytest.mark.parametrize("name", [name for name in NAMES if name not in UNREADABLE])
def test_values_are_those_of_the_library(name: str) -> None:
    found = list(weights(name))
    assert found
    for w, expected in found:
        assert torch.equal(w.dequantize().to(expected.dtype), expected)


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_can_not_be_imported(name: str) -> None:
    with pytest.raises(CheckpointError, match=f"model.safetensors: model.layers.0.*: {UNREADABLE[name]}"):
        list(weights(name))


@pytest.mark.parametrize("name", [name for name in NAMES if name not in UNREADABLE])
def test_layers_run(name: str) -> None:
    for w, _ in weights(name):
        x = reference.random_inputs(w.spec, 3)[0]
        assert is_right(lowbit.LowbitLinear.from_packed(w)(x), w, x)


def test_eight_bits_of_bitsandbytes_in_another_order() -> None:
    """Versions of before 2025 could save weights as they were laid out for a GPU."""
    checkpoint = open_checkpoint(FIXTURES / "bnb-int8")
    (module,) = checkpoint.modules
    tensors = {short: checkpoint.tensors[full] for short, full in checkpoint.names_of(module).items()}
    tensors["weight_format"] = torch.tensor(2, dtype=torch.uint8)
    with pytest.raises(CheckpointError, match="weight_format must be 0, rows as they are"):
        lowbit.import_weight(checkpoint.quantization_config, tensors)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("count_at_once", [1, 100, 1 << 24])
def test_streams_of_codes(bits: int, count_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row is one long number, of which each code is a digit."""
    monkeypatch.setattr(at_once, "ON_CPU", count_at_once)
    for count in (1, 7, 32, 45):
        words = torch.randint(-(1 << 31), 1 << 31, (5, -(-count * bits // 32)), dtype=torch.int32)
        numbers = [int.from_bytes(row.numpy().tobytes(), "little") for row in words]
        expected = [[number >> (i * bits) & ((1 << bits) - 1) for i in range(count)] for number in numbers]
        assert unpack.from_stream(words, bits, count).tolist() == expected
        assert unpack.from_columns(words.t(), bits, count).t().tolist() == expected
    with pytest.raises(CheckpointError, match="8 bytes a row can't hold 65 codes of 1 bits"):
        unpack.from_stream(torch.zeros(2, 2, dtype=torch.int32), 1, 65)


def test_gptq_with_exceptions() -> None:
    """"dynamic" gives some layers other bits and groups than the configuration says."""
    checkpoint = open_checkpoint(FIXTURES / "gptq-3")
    (module,) = checkpoint.modules
    tensors = {short: checkpoint.tensors[full] for short, full in checkpoint.names_of(module).items()}
    config = checkpoint.quantization_config | {"bits": 4, "group_size": 64}
    with pytest.raises(CheckpointError, match="12 rows of qweight are not k=128 codes of 4 bits"):
        lowbit.import_weight(config, tensors)
    w = lowbit.import_weight(config | {"dynamic": {"+:.*up_proj": {"bits": 3, "group_size": 32}}}, tensors)
    assert torch.equal(w.dequantize(), checkpoint.load(module).dequantize())


@pytest.mark.parametrize(("name", "groups"), [("bnb-nf4-nested-wide", 4), ("bnb-nf4-nested", None)])
def test_nested_scales_stay_small(name: str, groups: int | None) -> None:
    """Scales of NF4 are bytes with a second level, where that takes less than f32 scales."""
    w, _ = next(weights(name))
    assert (w.spec.bilevel.groups if w.spec.bilevel else None) == groups
    assert w.spec.scale == ("lut8" if groups else "f32")
    taken = sum(t.nbytes for slot, t in w.items() if slot.startswith("scale"))
    assert taken == 32 * w.spec.groups * (3 if groups else 4)  # 24 rows in blocks of 16


EMULATED = (
    "gptq-3", "gptq-4-act-order", "awq", "hqq-4", "bnb-fp4", "bnb-nf4-nested-wide", "ct-pack-5-asym", "ct-int8",
    "ct-mxfp6", "ct-nvfp4", "fp8-block", "mxfp4", "spqr-ptcsr", "torchao-int4",
)  # fmt: skip


@pytest.mark.parametrize("name", EMULATED)
def test_kernels_of_a_gpu(name: str) -> None:
    """One of each kind in the emulator."""
    w, _ = next(weights(name))
    x = reference.random_inputs(w.spec, 2)[0]
    assert is_right(lowbit.compile(w.spec, "emulator:sm_90a")(x, w), w, x)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in NAMES if name not in UNREADABLE])
def test_import_on_a_gpu(name: str) -> None:
    """Weights are unpacked and packed where they go, and are the same there."""
    on_gpu = [w for w, _ in weights(name, "cuda")]
    on_cpu = [w for w, _ in weights(name)]
    for w, expected in zip(on_gpu, on_cpu, strict=True):
        assert w.device.type == "cuda" and w.spec == expected.spec
        assert all(torch.equal(t.cpu(), expected[tensor]) for tensor, t in w.items())


def is_right(y: Tensor, w: PackedWeight, x: Tensor) -> bool:
    """Tells whether y is the product of x with a weight and its bias, but for the rounding of correct kernels."""
    numbers = {slot.name: w.unpack_tensor(slot.name) for slot in w.spec.given_tensors[1:]}
    expected = reference.matmul(w.spec, x, w.unpack(), **numbers)
    return bool(reference.agrees(y, expected, reference.tolerance(w.spec, x, w.unpack(), **numbers)).all())


# -- damaged files, and configurations that lie


SEEDS = {name: i for i, name in enumerate(NAMES)}


@pytest.mark.parametrize("name", NAMES)
def test_mutations(name: str) -> None:
    """Whatever is wrong is a CheckpointError, or gives a weight; it takes little memory."""
    chance = random.Random(SEEDS[name])
    checkpoint = open_checkpoint(FIXTURES / name)
    config, (module,) = checkpoint.config["quantization_config"], checkpoint.modules
    tensors = {short: checkpoint.tensors[full] for short, full in checkpoint.names_of(module).items()}
    load = lowbit.import_experts if name == "mxfp4" else lowbit.import_weight
    refused, used = 0, peak_memory()
    for _ in range(60):
        try:
            load(mutated_config(config, chance), mutated_tensors(tensors, chance), "bf16")
        except CheckpointError:
            refused += 1
    assert refused > 5
    assert peak_memory() - used < 64 << 20


def mutated_tensors(tensors: dict[str, Tensor], chance: random.Random) -> dict[str, Tensor]:
    """Returns tensors of which one has other bytes, another name, another type or another shape, or is gone."""
    result = {name: t.clone() for name, t in tensors.items()}
    name = chance.choice(list(result))
    t = result[name]
    match chance.randrange(8):
        case 0 | 1:
            data = t.view(-1).view(torch.uint8)
            for _ in range(chance.randint(1, 4) if len(data) else 0):
                data[chance.randrange(len(data))] = chance.choice((0, 0x7F, 0xFF, chance.randrange(256)))
        case 2:
            del result[name]
        case 3:
            result[name] = result[chance.choice(list(result))]
        case 4:
            result[name] = t.view(-1)[: chance.randint(0, t.numel())]
        case 5:
            result[name] = t[chance.randint(0, len(t)) :] if t.ndim else t[None]
        case 6:
            result[name] = t.to(chance.choice((torch.int32, torch.float16, torch.float32, torch.bool, torch.int64)))
        case _:
            result[name] = t.view(torch.uint8) if t.ndim else t
    return result


def mutated_config(config: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """Returns a configuration that half of the time has one other value."""
    result = copy.deepcopy(config)
    places = [(result, key) for key in result if key != "quant_method"]
    for group in result.get("config_groups", {}).values():
        places += [(group["weights"], key) for key in group["weights"]] + [(group, "weights")]
    if places and chance.random() < 0.5:
        place, key = chance.choice(places)
        place[key] = chance.choice(
            (0, -1, 1, 3, 4, 64, 1 << 40, 1 << 80, None, "4", [], {}, [0, 0], [1 << 70, 1], 2.5, True)
        )
    return result


def peak_memory() -> int:
    """Returns the most bytes of memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.parametrize("name", ["gptq-4", "hqq-3", "mxfp4"])
def test_damaged_files(name: str, tmp_path: Path) -> None:
    """A file that is cut short, or has other bytes in its header, is a CheckpointError or gives a weight."""
    chance, whole = random.Random(1), (FIXTURES / name / "model.safetensors").read_bytes()
    shutil.copy(FIXTURES / name / "config.json", tmp_path)
    refused = 0
    for number in range(200):
        data = bytearray(whole)
        if number % 4 == 0:
            del data[chance.randrange(len(data)) :]
        else:
            for _ in range(chance.randint(1, 3)):
                data[chance.randrange(1000)] = chance.randrange(256)
        (tmp_path / "model.safetensors").write_bytes(data)
        try:
            checkpoint = open_checkpoint(tmp_path)
            for module in checkpoint.modules:
                checkpoint.load(module)
        except CheckpointError as error:
            assert str(error).startswith(str(tmp_path))
            refused += 1
    assert refused > 50


# -- tensors that are missing, and what a file states twice


LAYER = "model.layers.0.mlp.up_proj"


def parts(name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns the quantization_config and the tensors of the layer of a fixture."""
    checkpoint = open_checkpoint(FIXTURES / name)
    (module,) = checkpoint.modules
    assert module == LAYER
    names = checkpoint.names_of(module)
    return checkpoint.config["quantization_config"], {short: checkpoint.tensors[full] for short, full in names.items()}


def read(name: str, config: dict[str, Any], tensors: dict[str, Tensor]) -> PackedWeight:
    if name == "mxfp4":
        return lowbit.import_experts(config, tensors, "bf16")[0]
    return lowbit.import_weight(config, tensors, name=LAYER)


SEEN_OTHERWISE = {
    *(("ct-nvfp4", "weight_global_scale"), ("auto-round-nvfp4", "weight_global_scale")),
    ("torchao-int4", "_weight_zero_point"),
}
"""What is left of these is of another kind, and wrong as that."""
DROPPED = [(name, short) for name in NAMES if name not in UNREADABLE for short in parts(name)[1]]


@pytest.mark.parametrize(("name", "lost"), DROPPED)
def test_a_tensor_that_is_missing(name: str, lost: str) -> None:
    """It is an error that names the tensor, or the weight is the same without it; a bias is compared with the model.

    Without a bias, rows that fill up EXL2's n are left out by a model alone.
    """
    config, tensors = parts(name)
    whole = read(name, config, tensors)
    left = {short: t for short, t in tensors.items() if short != lost}
    try:
        found = read(name, config, left)
    except CheckpointError as error:
        assert re.match(rf"{lost} is missing", str(error)) or (name, lost) in SEEN_OTHERWISE
        return
    n = 32 if name.startswith("exl2") and lost == "bias" else whole.spec.n
    assert torch.equal(found.dequantize()[: whole.spec.n], whole.dequantize())
    assert found.spec == (replace(whole.spec, bias=False, n=n) if lost == "bias" else whole.spec)


NEEDED = [
    ("gptq-4-act-order", "g_idx", "g_idx is missing, though the quantization_config has desc_act=True; there are"),
    ("gptq-4-sym", "qzeros", "qzeros is missing; there are"),
    ("ct-pack-4-asym", "weight_zero_point", "weight_zero_point is missing, though .* has symmetric=False; there"),
    ("ct-int8-asym", "weight_zero_point", "weight_zero_point is missing, though .* has symmetric=False; there"),
    ("torchao-intx-asym", "_weight_zero_point", "_weight_zero_point is missing, though _weight_scale has groups"),
    ("bnb-nf4-nested", "weight.nested_absmax", "weight.nested_absmax is missing; there are"),
    ("spqr-csr-permuted", "in_perm", "in_perm is missing; there are"),
]


@pytest.mark.parametrize(("name", "lost", "message"), NEEDED)
def test_checkpoint_without_a_tensor(name: str, lost: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"model.safetensors: {LAYER}: {message}"):
        open_checkpoint(changed(name, tmp_path, {f"{LAYER}.{lost}": None})).load(LAYER)


def changed(name: str, folder: Path, tensors: dict[str, Tensor | None], **metadata: str) -> Path:
    """Copies a fixture with other tensors, None for none, and with metadata."""
    shutil.copy(FIXTURES / name / "config.json", folder)
    state = {**load_file(FIXTURES / name / "model.safetensors"), **tensors}
    save_file({k: t for k, t in state.items() if t is not None}, folder / "model.safetensors", metadata)
    return folder


@pytest.mark.parametrize("name", ["gptq-4", "ct-pack-4", "torchao-int8", "mxfp4"])
def test_tensors_whose_meaning_is_unknown(name: str, tmp_path: Path) -> None:
    """A rotation of the input is no tensor of the format, and must not be left out; scales of activations may be."""
    folder = changed(name, tmp_path, {f"{LAYER}.u_input.weight": torch.ones(2), f"{LAYER}.k_scale": torch.ones(1)})
    message = f"{LAYER}: {LAYER}.u_input.weight is no tensor of such a layer, and may change its results"
    load = open_checkpoint(folder).load_experts if name == "mxfp4" else open_checkpoint(folder).load
    with pytest.raises(CheckpointError, match=message):
        load(LAYER, "bf16")
    changed(name, tmp_path, {f"{LAYER}.k_scale": torch.ones(1)})
    assert open_checkpoint(folder).check_layer(LAYER) is None


def test_torchao_lists_the_tensors_of_a_layer(tmp_path: Path) -> None:
    about = json.dumps({"_type": "Int8Tensor", "_data": {}, "_tensor_data_names": ["qdata", "scale", "zero_point"]})
    folder = changed("torchao-int8", tmp_path, {f"{LAYER}._weight_zero_point": None}, **{f"{LAYER}.weight": about})
    with pytest.raises(CheckpointError, match=f"{LAYER}: _weight_zero_point is missing, though the metadata of the"):
        open_checkpoint(folder).load(LAYER)


def with_weights(config: dict[str, Any], **entries: Any) -> dict[str, Any]:
    """Returns a configuration of compressed-tensors with other entries for weights."""
    result = copy.deepcopy(config)
    result["config_groups"]["group_0"]["weights"] |= entries
    return result


CONTRADICTIONS = [
    ("gptq-4-sym", {"checkpoint_format": "gptq_v2"}, "all zeros are 8, but they are 7: those of .*='gptq', not of '"),
    ("gptq-4", {"sym": True}, "has sym=True, so that all zeros are 8, but they go from .*; sym must be false"),
    ("gptq-4", {"bits": 8}, "16 rows of qweight are not k=128 codes of 8 bits"),
    ("gptq-4", {"group_size": 64}, r"scales \[4, 32\] don't fit 32 x 128 in groups of 64"),
    ("gptq-4", {"dynamic": {"+:x": {"bits": 3, "group_size": 64}}, "group_size": 128}, "scales .* in groups of 128"),
    ("gptq-4", {"dynamic": {"+:x": {"bits": 3}}, "bits": 8}, "are not k=128 codes of 8 bits"),
    ("awq", {"zero_point": False}, "has zero_point=False, so that all zeros are 8, but they go from"),
    ("awq-gemv", {"group_size": 16}, r"scales \[64, 16\] don't fit 64 x 128 in groups of 16"),
    ("awq-gemv", {"group_size": 0}, "group_size=0; it must be positive, or -1 for rows"),
    ("awq-marlin", {"group_size": 32}, r"qweight \[8, 128\] and scales \[2, 64\] don't fit Marlin's layout"),
    ("quark-int8-group", {"global_quant_config": {"weight": {"dtype": "int8", "qscheme": "per_group"}}}, "of None"),
    ("ct-int8", {"weights": {"strategy": None, "group_size": 64}}, "strategy='group' with groups or blocks of 64"),
    ("bnb-nf4", {"bnb_4bit_quant_type": "fp4"}, "bnb_4bit_quant_type='fp4', but there is weight.quant_state.*nf4"),
    ("ct-pack-4-asym", {"weights": {"symmetric": True}}, "symmetric=True, so that all zeros are 8, but they go"),
    ("ct-int8-asym", {"weights": {"symmetric": True}}, "symmetric=True, but weight_zero_point is not all zeros"),
    ("ct-pack-4", {"weights": {"group_size": 64}}, r"weight_scale .* strategy='group' with groups or blocks of 64"),
    ("ct-pack-8-row", {"weights": {"strategy": "group", "group_size": 32}}, "weight_scale .* strategy='group'"),
    ("ct-int8", {"weights": {"strategy": "tensor"}}, "weight_scale .* is not what .* says: strategy='tensor'"),
    ("ct-fp8-block", {"weights": {"block_structure": [8, 64]}}, r"strategy='block' with groups or blocks of \[8, 64\]"),
    ("ct-pack-4", {"weights": {"actorder": "group"}}, "weight_g_idx is missing, though .* has actorder='group'"),
    ("ct-mxfp4", {"weights": {"group_size": 16}}, "scales have groups of 32, but group_size=16"),
    ("ct-nvfp4", {"weights": {"group_size": 32}}, "scales have groups of 16, but group_size=32"),
    ("fp8-block", {"weight_block_size": [24, 128]}, r"weight_block_size=\[24, 128\], that is \[1, 1\] scales"),
    ("spqr-csr", {"shapes": {f"{LAYER}.col_vals.shape": 194}}, "col_vals has 195 numbers, but the .* says 194"),
]  # fmt: skip


@pytest.mark.parametrize("kind", ["Int4TilePackedTo4dTensor", "Int4PlainInt32Tensor", "MXTensor", "NVFP4Tensor"])
def test_other_kinds_of_torchao_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    """With those that can be read they are all that torchao 0.18 writes."""
    about = json.dumps({"_type": kind, "_data": {}, "_tensor_data_names": ["qdata", "scale"]})
    folder = changed("torchao-int8", tmp_path, {}, **{f"{LAYER}.weight": about})
    with pytest.raises(CheckpointError, match=f"{LAYER}: its weight is a '{kind}' of torchao; what can be read is"):
        open_checkpoint(folder).load(LAYER)


@pytest.mark.parametrize(("name", "change", "message"), CONTRADICTIONS)
def test_contradictions(name: str, change: dict[str, Any], message: str) -> None:
    """What a file states twice is compared."""
    config, tensors = parts(name)
    config = with_weights(config, **change["weights"]) if "weights" in change else config | change
    with pytest.raises(CheckpointError, match=message):
        read(name, config, tensors)


def test_contradictions_within_tensors() -> None:
    config, tensors = parts("hqq-4")
    with pytest.raises(CheckpointError, match=r"nbits=5 is packed as 8bit_u8, but packing='4bit_u8'"):
        read("hqq-4", config, tensors | {"nbits": torch.tensor(5)})
    config, tensors = parts("bnb-nf4")
    table = parts("bnb-fp4")[1]["weight.quant_map"]
    with pytest.raises(CheckpointError, match=r"weight.quant_map has the values of fp4, but there is .*nf4"):
        read("bnb-nf4", config, tensors | {"weight.quant_map": table})


def test_zeros_under_the_wrong_label() -> None:
    """Files are published whose zeros are those of gptq_v2, labelled "gptq"."""
    config, tensors = parts("gptq-4-sym")
    words = torch.full_like(tensors["qzeros"], -2004318072)  # 8 in every nibble
    with pytest.raises(CheckpointError, match="all zeros are 8, but they are 9: those of checkpoint_format='gptq_v2'"):
        read("gptq-4-sym", config, tensors | {"qzeros": words})
    right = read("gptq-4-sym", config | {"checkpoint_format": "gptq_v2"}, tensors | {"qzeros": words})
    assert torch.equal(right.dequantize(), read("gptq-4-sym", config, tensors).dequantize())


def test_groups_of_compressed_tensors_are_found_by_name() -> None:
    """One of two groups has zeros: which it is for a layer, targets say, by name before class."""
    config, tensors = parts("ct-pack-4-asym")
    without = {short: t for short, t in tensors.items() if short != "weight_zero_point"}
    (asymmetric,) = config["config_groups"].values()
    symmetric = {**asymmetric, "weights": {**asymmetric["weights"], "symmetric": True}, "targets": ["re:.*other"]}
    config = {**config, "config_groups": {"0": symmetric, "1": {**asymmetric, "targets": ["re:.*up_proj"]}}}
    assert read("ct-pack-4-asym", config, tensors).spec.zeros == "int"
    with pytest.raises(CheckpointError, match="weight_zero_point is missing"):
        read("ct-pack-4-asym", config, without)
    symmetric["targets"] = [LAYER]
    config["config_groups"] = {"1": {**asymmetric, "targets": ["Linear"]}, "0": symmetric}
    assert read("ct-pack-4-asym", config, without).spec.zeros == "none"
    symmetric["targets"] = ["re:("]
    with pytest.raises(CheckpointError, match=r"target 're:\(' of the quantization_config is no pattern"):
        read("ct-pack-4-asym", config, without)


ROTATED = {"config_groups": {"R3": {"type": "hadamard", "apply": [{"targets": ["Linear"], "location": "k_cache"}]}}}
MERGED = {"config_groups": {"R1": {"type": "hadamard", "apply": [{"targets": ["Linear"], "location": "weight_input"}]}}}


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("ct-pack-4", {"transform_config": ROTATED}),
        ("ct-pack-4", {"transform_config": [1]}),
        ("gptq-4", {"rotation": "hadamard"}),
        ("gptq-4", {"rotation": {"enabled": True}}),
        ("gptq-4", {"dynamic": {"+:.*up_proj": {"hadamard_config": {"size": 16}}}}),
        ("awq", {"act_pre_scale": True}),
        ("fp8-block", {"fmt": "e5m2"}),
        ("ct-pack-4", {"format": "marlin-24"}),
        ("ct-pack-4", {"sparsity_config": {"format": "sparse-24-bitmask", "ignore": []}}),
        ("ct-pack-4", {"config_groups": {"0": {"weights": {"num_bits": 4, "input_rotation": "x"}}}}),
        ("bnb-nf4", {"a_later_idea": 1}),
    ],
)
def test_entries_that_change_what_a_layer_computes(name: str, entry: dict[str, Any], tmp_path: Path) -> None:
    config, tensors = parts(name)
    words = (
        "and not both alike; only what cancels|must be a dictionary, not list|"
        "which lowbit does not know; it may change what|; what can be read is '"
    )
    with pytest.raises(CheckpointError, match=words):
        read(name, config | entry, tensors)
    changed(name, tmp_path, {})
    (tmp_path / "config.json").write_text(json.dumps({"dtype": "float16", "quantization_config": config | entry}))
    with pytest.raises(CheckpointError, match=r"config\.json: the quantization_config has"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "entry",
    [
        {"transform_config": {}},
        {"transform_config": MERGED},
        {"meta": {"rotation": "hadamard"}},
        {"rotation": "none"},
        {"rotation": {"enabled": False, "type": "hadamard"}},
        {"transformers_version": "5.0", "rotation": None, "dynamic": {"+:transformer.h": {"bits": 4}}},
    ],
)
def test_entries_that_change_nothing(entry: dict[str, Any]) -> None:
    name = "ct-pack-4" if "transform_config" in entry else "gptq-4"
    config, tensors = parts(name)
    assert torch.equal(read(name, config | entry, tensors).codes, read(name, config, tensors).codes)


def test_entries_of_the_libraries_are_known() -> None:
    """What transformers writes of its own configurations, and examples of what others write."""
    configs = pytest.importorskip("transformers.utils.quantization_config")
    written = [
        configs.GPTQConfig(bits=4),
        configs.AwqConfig(),
        configs.BitsAndBytesConfig(load_in_4bit=True),
        configs.BitsAndBytesConfig(load_in_8bit=True),
        configs.FineGrainedFP8Config(),
        configs.Mxfp4Config(),
        configs.SpQRConfig(),
    ]
    for config in (*(one.to_dict() for one in written), *WRITTEN):
        assert format_of(config)


WRITTEN = map(
    json.loads,
    """
    {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": false, "lm_head": false, "method": "gptq", \
    "format": "gptq", "checkpoint_format": "gptq", "pack_dtype": "int32", "meta": {"quantizer": ["gptqmodel:7.0"], \
    "fallback": {"strategy": "rtn"}}, "dynamic": {"-:.*q_proj": {}, "+:.*down": {"bits": 8, "group_size": 64}}}
    {"quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "frozen", \
    "global_compression_ratio": 1.5, "kv_cache_scheme": {"num_bits": 8, "type": "float"}, "ignore": ["lm_head"], \
    "sparsity_config": {"format": "dense", "ignore": [], "global_sparsity": 0.1, "targets": ["x"], \
    "sparsity_structure": "unstructured", "registry_requires_subclass": true}, "transform_config": {}, \
    "version": "0.12.2", \
    "config_groups": {"group_0": {"targets": ["Linear"], "format": null, "output_activations": null, \
    "input_activations": {"num_bits": 8, "type": "float", "dynamic": true, "strategy": "token"}, \
    "weights": {"actorder": null, "block_structure": null, "dynamic": false, "group_size": null, "num_bits": 8, \
    "observer": "minmax", "observer_kwargs": {"x": 1}, "scale_dtype": null, "strategy": "channel", \
    "symmetric": true, "type": "float", "zp_dtype": "torch.int8"}}}}
    {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "activation_scheme": "dynamic", \
    "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]}
    {"quant_method": "fp8", "fmt": "float8_e4m3fn", "activation_scheme": "static", "weight_block_size": null}
    {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int4WeightOnlyConfig", "_data": {"x": 1}}}}
    {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "provider": "auto-round", "bits": 4, \
    "group_size": 128, "sym": true, "data_type": "int", "static_kv_granularity": "tensor", "iters": 0, \
    "static_attention_granularity": "tensor", "block_name_to_quantize": "model.layers", "autoround_version": "0.16", \
    "extra_config": {"lm_head": {"bits": 8, "act_bits": 16, "data_type": "int", "super_bits": null}}}
    {"quant_method": "intel/auto-round", "backend": "auto_round:gptq:exllamav2", "bits": 4, "group_size": 128, \
    "sym": true, "data_type": "int", "amp": true, "enable_minmax_tuning": true, "scale_dtype": "torch.float16", \
    "lr": 0.001, "minmax_lr": 0.001, "dataset": "pile", "nsamples": 512, "seqlen": 2048, "low_gpu_mem_usage": true}
    {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": "FP8", \
    "exclude_modules": ["lm_head"], "quantized_layers": {"a.b": {"quant_algo": "NVFP4", "group_size": 16}}}
    {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"], "producer": {"name": "modelopt"}, \
    "kv_cache_scheme": {"dynamic": false}, "config_groups": {"group_0": {"weights": {"num_bits": 4}}}}
    {"quant_method": "mlx", "bits": 4, "group_size": 64, "mode": "affine", "a.b": {"bits": 6}, "c": false}
    """.strip().splitlines(),
)
"""Examples of GPTQModel, llm-compressor, DeepSeek, Mistral, torchao, AutoRound, ModelOpt and MLX."""


def test_a_group_size_of_whole_rows() -> None:
    """compressed-tensors may write -1 for scales of rows."""
    config, tensors = parts("ct-int8")
    found = read("ct-int8", with_weights(config, strategy=None, group_size=-1), tensors)
    assert torch.equal(found.dequantize(), read("ct-int8", config, tensors).dequantize())


def test_weights_that_were_not_compressed() -> None:
    """A library may save a dense weight with the scales by which it would be rounded."""
    config, tensors = parts("ct-fp8")
    dense = tensors | {"weight": tensors["weight"].bfloat16()}
    with pytest.raises(CheckpointError, match=r"weight is bfloat16, not compressed .*'frozen'.*save_compressed=True"):
        read("ct-fp8", config | {"quantization_status": "frozen"}, dense)


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float16, torch.float32, torch.int8, torch.int32])
@pytest.mark.parametrize("name", ["bnb-nf4", "bnb-nf4-nested", "bnb-fp4"])
def test_codes_in_tensors_of_other_types(name: str, storage: torch.dtype) -> None:
    """Parallel training keeps the bytes of 4-bit codes in parameters of one type with all others."""
    config, tensors = parts(name)
    stored = tensors | {"weight": tensors["weight"].view(1, -1).view(storage).view(-1, 1)}
    found = read(name, config | {"bnb_4bit_quant_storage": str(storage).removeprefix("torch.")}, stored)
    assert torch.equal(found.dequantize(), read(name, config, tensors).dequantize())


@pytest.mark.parametrize("word", [torch.int8, torch.int16, torch.int64])
@pytest.mark.parametrize("name", ["gptq-2", "gptq-4", "gptq-4-act-order", "gptq-8"])
def test_words_of_other_sizes(name: str, word: torch.dtype) -> None:
    config, tensors = parts(name)
    columns = tensors["qweight"].t().contiguous().view(word).t().contiguous()
    packed = tensors | {"qweight": columns, "qzeros": tensors["qzeros"].view(word)}
    found = read(name, config | {"pack_dtype": str(word).removeprefix("torch.")}, packed)
    assert torch.equal(found.dequantize(), read(name, config, tensors).dequantize())


@pytest.mark.parametrize("algorithm", ["MXFP4", "W4A8_MXFP4_FP8"])
def test_powers_of_two_of_modelopt(algorithm: str) -> None:
    """MXFP4 has the tensors that Quark writes (modelopt/torch/quantization/qtensor/mxfp4_tensor.py)."""
    config, tensors = parts("quark-mxfp4")
    right, ours = read("quark-mxfp4", config, tensors), {"quant_method": "modelopt", "quant_algo": algorithm}
    given = {name: tensor for name, tensor in tensors.items() if name in ("weight", "weight_scale", "bias")}
    found = lowbit.import_weight(ours, {**given, "input_scale": torch.tensor(0.1)})
    assert torch.equal(found.dequantize(), right.dequantize())
    with pytest.raises(CheckpointError, match="weight_scale_2 is there, but weight_scale has powers of two"):
        lowbit.import_weight(ours, {**given, "weight_scale_2": torch.ones(())})
    with pytest.raises(CheckpointError, match=r"weight_scale must be \[.*, .*\] beside a weight of"):
        lowbit.import_weight(ours, {**given, "weight_scale": given["weight_scale"][:, :1]})


SHORT = torch.tensor([1.0] * 32 + [8.0] * 16)
"""A row of 48 columns, of which the last 16 have a scale of their own though groups have 32."""


def short_groups() -> dict[str, tuple[dict[str, Any], dict[str, Tensor]]]:
    """Returns the configuration and the tensors of a weight of 32 equal rows, `SHORT`, in formats with groups."""
    n, codes = 32, torch.full((32, 48), 1.0).to(torch.float8_e4m3fn)
    exponents, floats = torch.tensor([[127, 130]] * n, dtype=torch.uint8), torch.tensor([[1.0, 8.0]] * n).half()
    e2m1, mx = torch.full((n, 24), 0x22, dtype=torch.uint8), {"weight_scale": exponents}
    nines, zeros = torch.tensor(0x99999999 - (1 << 32)).int(), torch.tensor(0x88888888 - (1 << 32)).int()
    fp4 = {"weight": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}}
    int8 = {"weight": {"dtype": "int8", "qscheme": "per_group", "group_size": 32}}
    ct = {"quant_method": "compressed-tensors"}
    of_8, of_4, mxfp8 = (
        {"config_groups": {"a": {"weights": {"num_bits": bits, "type": kind, "group_size": 32}}}}
        for bits, kind in ((8, "int"), (4, "int"), (8, "float"))
    )
    gptq = {"qweight": nines.repeat(6, n), "qzeros": zeros.repeat(2, 4), "scales": floats.t().contiguous()}
    awq = {"qweight": nines.repeat(48, 4), "qzeros": zeros.repeat(2, 4), "scales": floats.t().contiguous()}
    ones, shape = torch.ones(n, 48, dtype=torch.int8), torch.tensor([n, 48])
    return {
        "modelopt-mxfp4": ({"quant_method": "modelopt", "quant_algo": "MXFP4"}, {"weight": e2m1, **mx}),
        "modelopt-mxfp8": ({"quant_method": "modelopt", "quant_algo": "MXFP8"}, {"weight": codes, **mx}),
        "quark-mxfp4": ({"quant_method": "quark", "global_quant_config": fp4}, {"weight": e2m1, **mx}),
        "quark-int8": (
            {"quant_method": "quark", "global_quant_config": int8},
            {
                "weight": ones.t().contiguous(),
                "weight_scale": floats.t().contiguous(),
                "weight_zero_point": torch.zeros(2, n, dtype=torch.int8),
            },
        ),
        "ct-mxfp8": ({**ct, **mxfp8}, {"weight": codes, **mx}),
        "ct-int8": ({**ct, **of_8}, {"weight": ones, "weight_scale": floats}),
        "ct-pack-4": (
            {**ct, **of_4},
            {"weight_packed": nines.repeat(n, 6), "weight_scale": floats, "weight_shape": shape},
        ),
        "mxfp8": (
            {"quant_method": "mxfp8", "weight_block_size": [1, 32]},
            {"weight": codes, "weight_scale_inv": exponents},
        ),
        "fp8": (
            {"quant_method": "fp8", "weight_block_size": [1, 32]},
            {"weight": codes, "weight_scale_inv": floats.float()},
        ),
        "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq_v2"}, gptq),
        "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32}, awq),
    }


@pytest.mark.parametrize("name", short_groups())
def test_a_last_group_that_is_shorter(name: str) -> None:
    """Its scale is that of the last columns alone, or it is refused, but not that of columns before them."""
    config, tensors = short_groups()[name]
    try:
        found = lowbit.import_weight(config, tensors, shape=(32, 48)).dequantize()
    except CheckpointError as error:
        assert name.startswith("modelopt-mxfp")
        assert "k=48 is not 2 groups of 32 columns, as e8m0 has; a last group that is shorter can't" in str(error)
    else:
        assert torch.equal(found.float(), SHORT.expand(32, -1))


@pytest.mark.parametrize(("k", "groups"), [(48, 5), (48, 2), (40, 2)])
def test_groups_that_do_not_divide_rows(k: int, groups: int) -> None:
    """Whatever a reader returns: numbers of any type in groups that are none, and powers of two of shorter ones."""
    codes, exponents = torch.zeros(32, k, dtype=torch.uint8), torch.full((32, groups), 127, dtype=torch.uint8)
    weight = Imported(codes, exponents.view(torch.float8_e8m0fnu), weight="f4e2m1")
    with pytest.raises(CheckpointError, match=f"k={k} is not {groups} groups of 32 columns, as e8m0 has; a last group"):
        weight.spec("f16")
    if k % groups:
        with pytest.raises(CheckpointError, match=f"k={k} is not {groups} groups; a last group that is shorter"):
            replace(weight, scales=torch.ones(32, groups)).spec("f16")


@pytest.mark.parametrize("shape", [(2, 1, 3, 1), (2, 5, 3, 1), (2, 1, 3, 7), (2, 0, 3, 1), (1, 1, 3, 1), (2, 3, 1, 1)])
def test_blocks_of_modelopt_in_four_dimensions(shape: tuple[int, ...]) -> None:
    """The second and the last of them are those of a block's rows and columns, which share a scale."""
    scales = torch.arange(1.0, 1 + math.prod(shape)).view(shape)
    given = {"weight": torch.ones(256, 384).to(torch.float8_e4m3fn), "weight_scale": scales}
    config = {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}
    if shape == (2, 1, 3, 1):
        found = lowbit.import_weight(config, given).dequantize()
        assert torch.equal(found[::128, ::128].float(), scales.view(2, 3))
    else:
        message = r"scales \[.*\] don't fit a weight of 256 x 384|weight_scale is empty"
        with pytest.raises(CheckpointError, match=message):
            lowbit.import_weight(config, given)


def test_inputs_in_fp8_beside_nvfp4() -> None:
    config, tensors = parts("modelopt-nvfp4")
    found = read("modelopt-nvfp4", config | {"quant_algo": "W4A8_NVFP4_FP8"}, tensors)
    assert torch.equal(found.dequantize(), read("modelopt-nvfp4", config, tensors).dequantize())


EXL2_GROUPS = ((6, 32), (4, 64), (3, 32), (2, 16))
"""The widths and rows of a matrix of EXL2. The last group has what is left."""


def exl2(n: int = 64, groups: tuple[tuple[int, int], ...] = EXL2_GROUPS) -> tuple[dict[str, Tensor], Tensor]:
    """Returns the tensors of a layer as ExLlamaV2 writes them, and its weight [n, k] in f64."""
    generator = torch.Generator().manual_seed(0)
    k, first, pairs, words, rows = sum(count for _, count in groups), 0, [], [], []
    q = torch.randint(0, 16, (len(groups), n), generator=generator)
    most = (torch.rand(len(groups), generator=generator) + 1).half()
    for number, (bits, count) in enumerate(groups):
        codes = torch.randint(0, 1 << bits, (count, n), generator=generator)
        size = -(-count * bits // 32)
        streams = [sum(int(code) << (i * bits) for i, code in enumerate(column)) for column in codes.T]
        data = b"".join(stream.to_bytes(size * 4, "little") for stream in streams)
        words.append(torch.frombuffer(bytearray(data), dtype=torch.int32).view(n, size).T)
        pairs += [bits, first]
        first += size
        scale = ((q[number] + 1) ** 2).half() * (most[number] / 256)
        rows.append((codes.double() - (1 << bits >> 1)) * scale.double())
    inverse = torch.randperm(k, generator=generator)
    packed = sum(q[:, i::8].int() << (4 * i) for i in range(8))
    found = {"q_invperm": inverse.int(), "q_groups": torch.tensor(pairs, dtype=torch.int16), "q_scale_max": most}
    found |= {"q_weight": torch.cat(words).contiguous(), "q_scale": cast(Tensor, packed).int()}
    return found, torch.cat(rows)[inverse].T


def test_exl2() -> None:
    """Rows of several widths, which an independent packer has mixed; padded columns are left out."""
    config = {"quant_method": "exl2", "bits": 4.0, "head_bits": 6, "version": "0.3", "calibration": {"rows": 100}}
    given, expected = exl2()
    w = lowbit.import_weight(config, given)
    assert str(w.spec).startswith("i6[64, 144] f16 scale per 16, permuted")
    assert torch.equal(w.dequantize().double(), expected)
    x = reference.random_inputs(w.spec, 3)[0]
    assert is_right(lowbit.LowbitLinear.from_packed(w)(x), w, x)
    assert torch.equal(lowbit.import_weight(config, given, shape=(48, 144)).dequantize().double(), expected[:48])
    given, expected = exl2(groups=((8, 32), (5, 128)))
    given["bias"] = torch.ones(64).half()
    w = lowbit.import_weight(config, given)
    assert str(w.spec).startswith("i8[64, 160] f16 scale per 32, permuted") and w.spec.bias
    assert torch.equal(w.dequantize().double(), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q_groups": [7, 0, 4, 6, 3, 14, 2, 17]}, "q_groups has a group of 7 bits; there are 2, 3, 4, 5, 6, 8"),
        ({"q_groups": [6, 0, 4, 6, 3]}, "q_groups has 5 numbers; it must have two for each group"),
        ({"q_groups": [6, 0, 4, 6, 3, 14, 2, 16]}, "q_groups has a group in words 14 to 16, but 48 of 144 rows"),
        ({"q_groups": [6, 1, 4, 6, 3, 14, 2, 17]}, "q_groups has a group in words 1 to 6, but 144 of 144 rows"),
        ({"q_groups": [6, 0]}, "q_groups has a group in words 0 to 18, but 144 of 144 rows are left"),
        ({"q_invperm": [0] * 144}, "q_invperm must be a permutation of 144 columns"),
        ({"q_scale_max": torch.ones(3).half()}, r"q_scale_max must be \[4\] beside q_groups, not \[3\]"),
    ],
)
def test_exl2_that_contradicts_itself(change: dict[str, Any], message: str) -> None:
    given, _ = exl2()
    changed = {name: torch.as_tensor(value, dtype=given[name].dtype) for name, value in change.items()}
    with pytest.raises(CheckpointError, match=message):
        lowbit.import_weight({"quant_method": "exl2"}, given | changed)


@pytest.mark.parametrize("shape", [None, (64, 144)])
@pytest.mark.parametrize("bias", [torch.tensor(1.0), torch.ones(1, 64), torch.ones(64, dtype=torch.int32)])
def test_exl2_whose_bias_is_none(bias: Tensor, shape: tuple[int, int] | None) -> None:
    given, _ = exl2()
    with pytest.raises(CheckpointError, match="bias must be float16 or bfloat16 or float32 with 1 dimensions, not "):
        lowbit.import_weight({"quant_method": "exl2"}, {**given, "bias": bias}, shape=shape)


def test_exl2_whose_groups_have_few_rows_in_common() -> None:
    given, _ = exl2(groups=((4, 32), (4, 40), (4, 72)))
    with pytest.raises(CheckpointError, match="q_groups has groups of 32, 40, 72 rows, which only 8 divides; a"):
        lowbit.import_weight({"quant_method": "exl2"}, given)


def test_exl2_with_any_bytes(tmp_path: Path) -> None:
    """Other bytes in any tensor are a CheckpointError, or other values."""
    given, _ = exl2()
    chance, refused = random.Random(0), 0
    for _ in range(300):
        tensors = {name: tensor.clone() for name, tensor in given.items()}
        data = tensors[chance.choice(sorted(tensors))].view(torch.uint8).view(-1)
        for _ in range(chance.randint(1, 3)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        try:
            lowbit.import_weight({"quant_method": "exl2"}, tensors)
        except CheckpointError:
            refused += 1
    assert 60 < refused < 240


OF_VLLM = (
    *("awq", "auto_awq", "fp8", "fbgemm_fp8", "fp_quant", "modelopt", "modelopt_fp4", "modelopt_mxfp8"),
    *("modelopt_mixed", "auto_gptq", "gptq", "gptq_marlin", "awq_marlin", "humming", "compressed-tensors"),
    *("experts_int8", "quark", "moe_wna16", "torchao", "inc", "mxfp4", "gpt_oss_mxfp4", "deepseek_v4_fp8", "online"),
    *("fp8_per_tensor", "fp8_per_block", "fp8_per_channel", "int8_per_channel_weight_only", "nvfp4_per_token", "mxfp8"),
)
"""The methods of vLLM 0.33 (`QuantizationMethods`): many are of kernels, and in no file."""

OF_OLDER_VLLM = (
    *("aqlm", "auto-round", "bitblas", "bitsandbytes", "cpu_awq", "deepgemm_fp8", "deepspeedfp", "gguf"),
    *("gptq_bitblas", "gptq_marlin_24", "hqq", "ipex", "marlin", "neuron_quant", "petit_nvfp4", "ptpc_fp8", "qqq"),
    *("rtn", "tpu_int8"),
)
"""Those that it had before."""

OF_WRITERS = ("exl2", "exl3", "quip", "quip_sharp", "intel/auto-round", "paroquant", "mlx")
"""Those of libraries that write files: GPTQModel 7.7 has paroquant."""


def test_every_method_that_others_know_is_read_or_refused_by_its_name() -> None:
    """Of transformers and of writers, those that can't be read are refused with the reason."""
    config = pytest.importorskip("transformers.utils.quantization_config")
    in_files = {*(method.value for method in config.QuantizationMethod), *OF_WRITERS} - {"lowbit"}
    known = in_files.union(OF_VLLM, OF_OLDER_VLLM)
    assert in_files <= FORMATS.keys() | REFUSED.keys() <= known
    for method in known - FORMATS.keys():
        why = f", as {REFUSED[method]}" if method in REFUSED else ""
        message = f"quant_method='{method}' can't be imported{why}; what can is auto-round, "
        with pytest.raises(CheckpointError, match=re.escape(message)):
            format_of({"quant_method": method})
    assert all(format_of({"quant_method": method}) for method in FORMATS)


FORMAT_VALUES: list[tuple[str, str, tuple[str, ...], tuple[str, ...]]] = [
    ("gptq-4-sym", "checkpoint_format", ("gptq", "gptq_v2", "ipex", "marlin"), ("bitblas", "qqq", "gptq_p", "gguf")),
    ("awq", "version", ("gemm", "gemv", "gemv_fast", "marlin", "exllama", "exllamav2", "ipex"), ("llm-awq", "qbits")),
    (
        "ct-pack-4",
        "format",
        (
            *("int-quantized", "float-quantized", "naive-quantized", "pack-quantized", "mixed-precision"),
            *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp6-pack-quantized", "mxfp8-quantized"),
        ),
        ("dense", "sparse-bitmask", "sparse-24-bitmask", "marlin-24"),
    ),
    (
        "modelopt-fp8",
        "quant_algo",
        (
            *("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "MXFP8", "NVFP4", "W4A16_NVFP4", "MIXED_PRECISION"),
            *("W4A8_NVFP4_FP8", "MXFP4", "W4A8_MXFP4_FP8", "W4A16_AWQ", "W4A8_AWQ", "NVFP4_AWQ", "W8A16"),
            *("W8A8_SQ_PER_CHANNEL", "FP8_BLOCK_SCALES"),
        ),
        ("NVFP4_SVD", "INT8_SQ", "FP8_PB_REAL"),
    ),
    (
        "auto-round-4",
        "packing_format",
        ("auto_round", "auto_round:auto_gptq", "auto_round:gptqmodel", "auto_round:auto_awq", "auto_round:exllamav2"),
        (
            *("auto_round:fp8", "auto_round:llm_compressor", "auto_round:nv_fp4", "auto_round:mx_fp4"),
            *("auto_round:mlx", "auto_round:fp8_static", "auto_round:fake", "llm_compressor"),
        ),
    ),
    (
        "auto-round-mxfp4",
        "data_type",
        ("mx_fp", "nv_fp", "fp", "int"),
        ("mx_int", "nvfp4_v2", "int_sym_dq", "int_asym_dq", "int_asym_float_zp", "fp4_v2"),
    ),
    ("bnb-nf4", "bnb_4bit_quant_type", ("nf4", "fp4"), ("af4", "int4")),
    ("mlx-4", "mode", ("affine",), ("mxfp4", "mxfp8", "nvfp4")),
    ("fp8-block", "fmt", ("e4m3", "float8_e4m3fn"), ("e5m2", "float8_e5m2")),
    ("fp8-block", "scale_fmt", ("float", "ue8m0"), ("e4m3",)),
    ("fp8-block", "expert_dtype", ("fp8",), ("fp4",)),
    ("bitnet", "linear_class", ("bitlinear", "autobitlinear"), ("linear",)),
    ("bitnet", "quantization_mode", ("offline",), ("online",)),
]
"""Entries that say how a library packs weights: a fixture, the entry, values of it that can be read, and others. These
are the values of GPTQModel 7.7, AutoAWQ 0.2, compressed-tensors 0.20, ModelOpt 0.47, AutoRound 0.16 and mlx-lm, and
those that vLLM 0.33 has besides."""


VALUES_OF = {entry: {*known, *others} for _, entry, known, others in FORMAT_VALUES}


@pytest.mark.parametrize(("name", "entry", "known", "others"), FORMAT_VALUES, ids=lambda value: str(value)[:20])
def test_every_format_that_others_know_is_read_or_refused_by_its_name(
    name: str, entry: str, known: tuple[str, ...], others: tuple[str, ...]
) -> None:
    """A layout of another name finds other tensors than it has, or reads them; it is not an unknown name."""
    config, tensors = parts(name)

    def what_is_wrong(value: str) -> str:
        try:
            read(name, config | {entry: value}, tensors)
        except CheckpointError as error:
            return str(error)
        return ""

    assert what_is_wrong(config.get(entry, known[0])) == ""
    for value in others:
        assert f"{entry}='{value}'" in what_is_wrong(value)
    for value in known:
        assert f"{entry}='{value}'; " not in what_is_wrong(value)


def test_every_type_of_quark_is_read_or_refused_by_its_name() -> None:
    """Its `Dtype`s for weights, of version 0.13."""
    config, tensors = parts("quark-uint4")
    for dtype in (
        *("int16", "uint16", "int32", "int3", "int2", "uint2", "bfloat16", "float16", "fp8_e5m2", "fp8_e5m3"),
        *("mx", "mx6", "mx9", "bfp16"),
    ):
        with pytest.raises(CheckpointError, match=f"dtype='{dtype}' can't be read; those of int4, uint4, int8, uint8"):
            read("quark-uint4", config | {"global_quant_config": {"weight": {"dtype": dtype}}}, tensors)


@pytest.mark.parametrize("scheme", ["per_group", "per_block", "per_group e8m0", "per_block e8m0"])
def test_scales_of_groups_and_blocks_of_quark(scheme: str) -> None:
    """Blocks at the end may be smaller, and powers of two are bytes, in either type of torch."""
    qscheme, _, exponents = scheme.partition(" ")
    rows, columns = (1, 32) if qscheme == "per_group" else (16, 32)
    about = {"dtype": "fp8_e4m3", "qscheme": qscheme, "group_size": 32, "block_size": [16, 32]}
    about |= {"scale_type": "float8_e8m0fnu"} if exponents else {}
    codes = torch.randint(0, 0x7E, (24, 128)).to(torch.uint8).view(torch.float8_e4m3fn)
    scales = torch.randint(120, 130, (-(-24 // rows), 4)).to(torch.uint8).view(torch.float8_e8m0fnu)
    numbers = scales.float().repeat_interleave(rows, 0)[:24].repeat_interleave(columns, 1)
    config = {"quant_method": "quark", "global_quant_config": {"weight": about}}
    for stored in (scales, scales.view(torch.uint8)) if exponents else (scales.float(), scales.to(torch.bfloat16)):
        found = lowbit.import_weight(config, {"weight": codes, "weight_scale": stored})
        assert torch.equal(found.dequantize(), codes.float() * numbers)
    with pytest.raises(CheckpointError, match=r"weight_scale must be |scales \[24, 2\] don't fit a weight of 24 x 128"):
        lowbit.import_weight(config, {"weight": codes, "weight_scale": torch.ones(24, 2)})


def test_blocks_of_modelopt() -> None:
    """FP8_BLOCK_SCALES is another name for FP8_PB_WO; a layer may say how large its blocks are."""
    codes = torch.randint(0, 0x7E, (192, 256)).to(torch.uint8).view(torch.float8_e4m3fn)
    for size, about in ((128, {}), (64, {"group_size": 64}), (128, {"group_size": 16})):
        scales = torch.rand(-(-192 // size), 256 // size)
        layer = {"quant_algo": "FP8_BLOCK_SCALES", **about}
        config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": layer}}
        found = lowbit.import_weight(config, {"weight": codes, "weight_scale": scales}, name="a")
        numbers = scales.repeat_interleave(size, 0)[:192].repeat_interleave(size, 1)
        assert torch.equal(found.dequantize(), codes.float() * numbers)


def test_formats_of_transformers() -> None:
    """The values that transformers has for AWQ are among those above."""
    configs = pytest.importorskip("transformers.utils.quantization_config")
    assert {one.value for one in configs.AwqFormat} <= VALUES_OF["version"]


def test_formats_of_compressed_tensors() -> None:
    formats = pytest.importorskip("compressed_tensors.config")
    assert {one.value for one in formats.CompressionFormat} <= VALUES_OF["format"]


OTHER_GPTQ = {"gptq": "gptq_v2", "gptq_v2": "gptq"}


@pytest.mark.parametrize("name", ["gptq-4", "gptq-v2-4", "awq-gemv", "awq-marlin"])
def test_other_names_of_the_entry_that_says_the_format(name: str) -> None:
    """GPTQModel has "format" of GPTQ and of AWQ; two entries that differ are refused."""
    config, tensors = parts(name)
    entry = "version" if name.startswith("awq") else "checkpoint_format"
    said, others = config[entry], {key: value for key, value in config.items() if key != entry}
    right = read(name, config, tensors).dequantize()
    for key in {"format", "checkpoint_format"} - {entry}:
        assert torch.equal(read(name, others | {key: said.upper()}, tensors).dequantize(), right)
        other = OTHER_GPTQ.get(said, "gemm")
        with pytest.raises(CheckpointError, match=f"has {entry}='{said}' and {key}='{other}'; they must be the same"):
            read(name, config | {key: other}, tensors)
    with pytest.raises(CheckpointError, match="has format='x'; what can be read is 'g"):
        read(name, others | {"format": "x"}, tensors)


def test_gptq_in_the_layout_of_marlin() -> None:
    """AutoGPTQ's names of the tensors that AutoAWQ calls qweight and scales; its files have a workspace as well."""
    config, tensors = parts("awq-marlin")
    right = read("awq-marlin", config, tensors)
    given = {"B": tensors["qweight"], "s": tensors["scales"], "bias": tensors["bias"], "workspace": torch.zeros(64)}
    for entry in ({"checkpoint_format": "marlin"}, {"is_marlin_format": True}):
        found = lowbit.import_weight({"quant_method": "gptq", "bits": 4, "group_size": 64, **entry}, given)
        assert torch.equal(found.dequantize(), right.dequantize())
    with pytest.raises(CheckpointError, match=r"B \[8, 128\] and s \[2, 64\] don't fit Marlin's layout in gro"):
        lowbit.import_weight({"quant_method": "gptq", "group_size": 32, "checkpoint_format": "marlin"}, given)


def test_quanto_says_its_type_in_a_file_of_its_own(tmp_path: Path) -> None:
    config, tensors = parts("quanto-qint4")
    changed("quanto-qint4", tmp_path, {f"{LAYER}.bias": None})
    (tmp_path / "config.json").write_text(json.dumps({"dtype": "float16"}))
    (tmp_path / "quanto_qmap.json").write_text(json.dumps(config["qmap"]))
    with pytest.raises(CheckpointError, match="bias is missing, though without it nothing says n and k; pass shape="):
        open_checkpoint(tmp_path).load(LAYER)
    found = open_checkpoint(tmp_path).load(LAYER, shape=(24, 256))
    assert torch.equal(found.dequantize(), read("quanto-qint4", config, tensors).dequantize())
    shift = torch.randint(0, 16, (48, 1)).to(torch.int8)
    whole = read("quanto-qint4", config, tensors | {"weight._shift": shift})
    packed, scale = tensors["weight._data._data"], tensors["weight._scale"].float()
    codes = torch.cat([packed & 15, packed >> 4]).int() - shift
    assert torch.equal(whole.dequantize(), (scale * codes).view(24, 256))


def test_the_page_lists_every_method() -> None:
    page = (Path(__file__).parents[2] / "docs/howto/checkpoints.md").read_text()
    listed = set(re.findall(r"^\| `([\w-]+)` \|", page, re.MULTILINE))
    assert {name for name in FORMATS if "/" not in name and not name.startswith("modelopt_")} <= listed
    rows = page.partition("| quant_method |")[2].partition("\n\n")[0].splitlines()[2:]
    assert all(re.search(r"\| \d+\.\d+\.\d+ \|$", row) and row.count("|") == 6 for row in rows)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("auto-round-4", {"packing_format": "auto_round:fp8_static"}, "packing_format='auto_round:fp8_static'; those"),
        ("auto-round-4", {"data_type": "mx_fp"}, "weight_packed is missing; there are"),
        ("auto-round-mxfp4", {"data_type": "mx_int"}, "data_type='mx_int'; what can be read is 'int', 'mx_fp'"),
        ("auto-round-mxfp4", {"bits": 8}, "codes have 4 bits, but num_bits=8"),
        ("auto-round-nvfp4", {"group_size": 32}, "scales have groups of 16, but group_size=32"),
        ("auto-round-fp8-row", {"group_size": 0}, r"weight_scale \[32\] of a weight of 32 x 128 is not what the"),
        ("auto-round-fp8-row", {"fmt": "e5m2"}, "fmt='e5m2'; what can be read is 'e4m3'"),
        ("auto-round-nvfp4", {"rotation_config": {"hadamard_type": "hadamard"}}, "has rotation_config, which lowbit"),
        ("auto-round-4", {"bits": 8}, "16 rows of qweight are not k=.* codes of 8 bits|scales .* don't fit"),
        ("auto-round-4", {"extra_config": {"x": {"data_type": "mx_int"}}}, "extra_config.x.data_type='mx_int'; what"),
        ("modelopt-nvfp4", {"quant_algo": "NVFP4_SVD"}, "quant_algo='NVFP4_SVD'; what can be read is 'FP8', "),
        ("modelopt-w4a8-nvfp4", {"group_size": 16}, "scales have groups of 32, but group_size=16"),
        ("bitnet", {"use_rms_norm": True}, "has use_rms_norm, which lowbit does not know"),
        ("bitnet", {"quantization_mode": "online"}, "quantization_mode='online'; what can be read is 'offline'"),
        ("mlx-4", {"mode": "mxfp4"}, "mode='mxfp4'; what can be read is 'affine'"),
        ("mlx-4", {"group_size": 32}, r"weight must be \[24, 8"),
        ("mlx-4", {LAYER: {"bits": 3, "group_size": 64}}, r"weight must be \[24, 12"),
        ("quark-uint4", {"global_quant_config": {"weight": [{"dtype": "fp8_e4m3"}]}}, "quantized in two stages, of"),
        ("quark-nvfp4", {"global_quant_config": {"weight": [{"dtype": "fp4"}, {"dtype": "fp8_e5m3"}]}}, "but for NV"),
        ("quark-uint4", {"global_quant_config": {"weight": {"dtype": "mx6"}}}, "dtype='mx6' can't be read; those"),
        ("quark-uint4", {"algo_config": [{"name": "rotation", "r4": True}]}, "rotations of what goes into layers are"),
        ("quark-uint4", {"export": {"weight_format": "fake_quantized"}}, "weight_format='fake_quantized'; what can be"),
        ("quark-mxfp4", {"global_quant_config": {"weight": {"dtype": "fp4", "group_size": 16}}}, "scale_format=None"),
        ("mlx-4", {LAYER: {"mode": "nvfp4"}}, f"{LAYER}.mode='nvfp4'; what can be read is 'affine'"),
    ],
)
def test_variants_that_can_not_be_read(name: str, change: dict[str, Any], message: str) -> None:
    config, tensors = parts(name)
    with pytest.raises(CheckpointError, match=message):
        read(name, config | change, tensors)


def test_exceptions_of_layers() -> None:
    """AutoRound's and MLX's configurations have other bits for some layers."""
    extra = {"extra_config": {".*up_proj": {"bits": 3}}}
    for name, other in (("auto-round-3", extra), ("mlx-3", {LAYER: {"bits": 3}})):
        config, tensors = parts(name)
        right = read(name, config, tensors).dequantize()
        assert torch.equal(read(name, config | {"bits": 4} | other, tensors).dequantize(), right)
