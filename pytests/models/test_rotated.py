"""Layers whose inputs and outputs are rotated at each call: as compressed-tensors computes them, and by a definition in
f64 of its own.

The files are made by `fixtures/make_checkpoints.py`, which runs the library.
"""

from __future__ import annotations

import copy
import json
import math
import random
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import lowbit
from lowbit import CheckpointError, LowbitLinear, PackError, QuantConfig, SpecError
from lowbit.passes.codegen.cubin import resource_usage
from lowbit.passes.kernels.hadamard import hadamard_program, shared_bytes
from lowbit.passes.pipeline import lower_program
from lowbit.passes.targets import parse_target
from lowbit.pylib.checkpoints.checkpoint import open_checkpoint
from lowbit.pylib.checkpoints.transforms import problem
from lowbit.pylib.layer import hadamard
from lowbit.pylib.layer.hadamard import HadamardMatrix, found_in, sylvester
from lowbit.pylib.nn.rotated import HadamardRotation, MatrixRotation, RotatedLinear

FIXTURES = Path(__file__).parents[1] / "fixtures/rotated"
NAMES = sorted(folder.name for folder in FIXTURES.iterdir())
Q, UP, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"
TARGET = "emulator:sm_90a"


def dense_model(layers: dict[str, tuple[int, int]]) -> nn.Module:
    """Returns a model with linear layers of these names and sizes, on meta."""
    model = nn.Module()
    for name, (n, k) in layers.items():
        *path, leaf = name.split(".")
        parent = model
        for part in path:
            parent.add_module(part, getattr(parent, part, nn.Module()))
            parent = getattr(parent, part)
        parent.add_module(leaf, nn.Linear(k, n, device="meta", dtype=torch.float16))
    return model


def loaded(folder: Path) -> nn.Module:
    expected = load_file(FIXTURES / "rotated-twice/expected.safetensors")
    sizes = {name: (expected[f"{name}.y"].shape[1], expected[f"{name}.x"].shape[1]) for name in (Q, UP, DOWN)}
    model = dense_model(sizes)
    lowbit.load_checkpoint(model, folder)
    return model


# -- whole layers


@pytest.mark.parametrize("name", NAMES)
def test_layers_compute_what_the_library_does(name: str) -> None:
    expected, model = load_file(FIXTURES / name / "expected.safetensors"), loaded(FIXTURES / name)
    for layer in (Q, UP, DOWN):
        x, y = expected[f"{layer}.x"], expected[f"{layer}.y"]
        found = model.get_submodule(layer)(x)
        assert float((found - y).norm() / y.norm()) < 5e-3  # x, once rotated, is rounded to f16
        dense = model.get_submodule(layer).to_linear(torch.float32).requires_grad_(False)  # type: ignore[union-attr]
        assert float((dense(x.float()) - y).norm() / y.norm()) < 2e-3


def test_which_layers_are_rotated() -> None:
    models = {name: loaded(FIXTURES / name) for name in NAMES}
    kinds = {name: {each: type(model.get_submodule(each)) for each in (Q, UP, DOWN)} for name, model in models.items()}
    assert kinds["rotated-hadamard"] == {Q: LowbitLinear, UP: LowbitLinear, DOWN: RotatedLinear}
    assert kinds["rotated-heads"] == {Q: RotatedLinear, UP: RotatedLinear, DOWN: LowbitLinear}
    assert kinds["rotated-output"] == {Q: RotatedLinear, UP: LowbitLinear, DOWN: LowbitLinear}


@pytest.mark.parametrize("name", NAMES)
def test_saved_and_loaded_again(name: str, tmp_path: Path) -> None:
    model, expected = loaded(FIXTURES / name), load_file(FIXTURES / name / "expected.safetensors")
    lowbit.save_checkpoint(model, tmp_path)
    again = loaded(tmp_path)
    for layer in (Q, UP, DOWN):
        first, second = model.get_submodule(layer), again.get_submodule(layer)
        assert type(first) is type(second)
        assert torch.equal(first(expected[f"{layer}.x"]), second(expected[f"{layer}.x"]))
    state = {key: t.clone() for key, t in model.state_dict().items()}
    again.load_state_dict(state)
    lowbit.load_checkpoint(again, FIXTURES / name)  # into a model that is low-bit already
    assert torch.equal(again.get_submodule(Q)(expected[f"{Q}.x"]), model.get_submodule(Q)(expected[f"{Q}.x"]))


def test_types_stay_and_copies_are_equal() -> None:
    layer = loaded(FIXTURES / "rotated-random").get_submodule(Q)
    x = load_file(FIXTURES / "rotated-random/expected.safetensors")[f"{Q}.x"]
    y = layer(x)
    assert torch.equal(copy.deepcopy(layer).bfloat16()(x), y)
    assert torch.equal(torch.compile(layer, backend="aot_eager", fullgraph=True)(x), y)
    with torch.autocast("cpu", torch.float16):
        assert torch.equal(layer(x.float()), y)


def test_gradients_flow_through_rotations() -> None:
    layer = loaded(FIXTURES / "rotated-random").get_submodule(Q)
    x = torch.randn(3, 192).half().requires_grad_()
    dy = torch.randn(3, 64).half()
    layer(x).backward(dy)
    exact = dy.double() @ layer.weight.double()  # type: ignore[union-attr]
    assert float((x.grad - exact).norm() / exact.norm()) < 5e-3  # type: ignore[operator]


@pytest.mark.parametrize("act", ["f16", "bf16"])
def test_signs_have_the_type_of_inputs(act: Any) -> None:
    """A kernel reads them as they are, without a launch before it."""
    _, rotations = open_checkpoint(FIXTURES / "rotated-twice").load_between(DOWN, act)
    signs = [r.signs for r in rotations.inputs if isinstance(r, HadamardRotation) and r.signs is not None]
    assert signs and all(each.dtype == {"f16": torch.float16, "bf16": torch.bfloat16}[act] for each in signs)


def test_a_weight_alone_is_refused() -> None:
    checkpoint = open_checkpoint(FIXTURES / "rotated-hadamard")
    checkpoint.load(UP)
    with pytest.raises(CheckpointError, match=r"down_proj: its inputs or outputs are rotated or scaled at each.*load"):
        checkpoint.load(DOWN)
    parts = {short: checkpoint.tensors[full] for short, full in checkpoint.names_of(DOWN).items()}
    for name, what in (("", "a layer"), (DOWN, DOWN)):
        with pytest.raises(CheckpointError, match=f"by the R4 of its transform_config, the input of {what} is rotated"):
            lowbit.import_weight(checkpoint.quantization_config, parts, name=name)
    lowbit.import_weight(checkpoint.quantization_config, parts, name=UP)
    with pytest.raises(CheckpointError, match="rotated at each call"):
        lowbit.pylib.checkpoints.registry.import_rows(checkpoint.quantization_config, [parts])


def test_inspect_lists_rotated_layers(tmp_path: Path) -> None:
    from lowbit.pylib.checkpoints.contents import contents

    report = contents(FIXTURES / "rotated-hadamard")
    assert {row.name for row in report.quantized} == {Q, UP, DOWN}


def test_a_dense_layer_that_is_to_be_rotated_is_refused(tmp_path: Path) -> None:
    folder = changed(tmp_path, {"targets": ["re:.*"]})
    tensors = load_file(folder / "model.safetensors") | {"lm_head.weight": torch.zeros(8, 192).half()}
    tensors |= {"lm_head.bias": torch.zeros(8).half()}
    save_file(tensors, folder / "model.safetensors")
    model = dense_model({Q: (64, 192), UP: (128, 192), DOWN: (192, 128), "lm_head": (8, 192)})
    with pytest.raises(CheckpointError, match=r"is a Linear that is not quantized.*rotates its input|is a Module that"):
        lowbit.load_checkpoint(model, folder)


def test_an_embedding_that_is_to_be_rotated_is_refused(tmp_path: Path) -> None:
    folder = changed(tmp_path)
    config, file = json.loads((folder / "config.json").read_text()), folder / "model.safetensors"
    of_embedding = {"targets": ["re:.*embed_tokens$"], "location": "output", "inverse": False, "ignore": []}
    groups = config["quantization_config"]["transform_config"]["config_groups"]
    groups["R9"] = {"type": "hadamard", "apply": [of_embedding]}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(load_file(file) | {"embed_tokens.weight": torch.zeros(8, 192).half()}, file)
    model = dense_model({Q: (64, 192), UP: (128, 192), DOWN: (192, 128)})
    model.add_module("embed_tokens", nn.Embedding(8, 192, device="meta", dtype=torch.float16))
    with pytest.raises(CheckpointError, match=r"embed_tokens is a Embedding that is not quantized.*rotates its output"):
        lowbit.load_checkpoint(model, folder)


@pytest.mark.parametrize("way", ["load_checkpoint", "from_pretrained"])
def test_experts_that_are_to_be_rotated_are_refused(way: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_local_experts": 2}
    about = transformers.MixtralConfig(**sizes, **heads, dtype="float16")
    transformers.AutoModelForCausalLM.from_config(about).half().save_pretrained(tmp_path)
    config, state = json.loads((tmp_path / "config.json").read_text()), dict[str, torch.Tensor]()
    for name, t in load_file(tmp_path / "model.safetensors").items():
        if ".experts." in name:
            state |= {name: torch.ones(t.shape, dtype=torch.int8), f"{name}_scale": torch.ones(len(t), 1).half()}
        else:
            state[name] = t
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    groups = {"group_0": {"targets": ["re:.*experts.*"], "weights": weights}}
    apply = [{"targets": ["re:.*experts.*w1$"], "location": "input", "inverse": False, "ignore": []}]
    rotations = {"config_groups": {"R": {"type": "hadamard", "apply": apply}}}
    config["quantization_config"] = {"quant_method": "compressed-tensors", "format": "int-quantized"}
    config["quantization_config"] |= {"config_groups": groups, "transform_config": rotations}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"experts.0.w1 is rotated at each call; inputs of experts can be scaled"):
        if way == "load_checkpoint":
            with torch.device("meta"):
                model = transformers.AutoModelForCausalLM.from_config(about)
            lowbit.load_checkpoint(model, tmp_path)
        else:
            ours = lowbit.LowbitConfig(from_checkpoint=True)
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=ours)


def changed(tmp_path: Path, apply: dict[str, Any] | None = None, **fields: Any) -> Path:
    """Returns a folder whose group has other entries."""
    folder = tmp_path / "changed"
    shutil.copytree(FIXTURES / "rotated-hadamard", folder)
    config = json.loads((folder / "config.json").read_text())
    group = config["quantization_config"]["transform_config"]["config_groups"]["R4"]
    group.update(fields)
    group["apply"][0].update(apply or {})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("apply", "fields", "message"),
    [
        ({}, {"type": "learned"}, "R4 has type='learned'; what can be applied is hadamard, random-hadamard, random-ma"),
        ({"location": "attn"}, {}, "R4 has location='attn'; known are input, output"),
        ({"location": "q_attn"}, {}, "R4 rotates queries or keys of attention .q_attn., and not both alike"),
        ({"scale": 2}, {}, "R4.apply has 'scale', which lowbit does not know"),
        ({}, {"smooth": True}, "R4 has 'smooth', which lowbit does not know"),
        ({}, {"head_dim": 0}, "R4 has head_dim=0; it must be a number of columns"),
        ({}, {"head_dim": 48}, "R4 has head_dim=48, which does not divide 128 columns"),
        ({"targets": "re:("}, {}, "target 're:.' of the transform_config is no pattern"),
        ({"targets": [3]}, {}, "R4.targets has 3; it must have texts"),
        ({}, {"apply": 3}, None),
        ({}, {"head_dim": 64}, r"R4_input.weight is float32 .*; it must be floats \[64, 64\]"),
        ({}, {"randomize": True}, "R4_input.perm is missing, though the transform_config has randomize=true"),
    ],
)
def test_configurations_that_are_refused(
    apply: dict[str, Any], fields: dict[str, Any], message: str | None, tmp_path: Path
) -> None:
    if message is None:
        assert problem({"config_groups": {"R4": {"type": "hadamard", **fields}}}) == "R4.apply must be a list, not int"
        return
    with pytest.raises(CheckpointError, match=message):
        loaded(changed(tmp_path, apply, **fields))


def test_sylvesters_matrix_need_not_be_in_the_files(tmp_path: Path) -> None:
    folder = changed(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors[f"{DOWN}.R4_input.weight"]
    save_file(tensors, folder / "model.safetensors")
    layers = [loaded(one).get_submodule(DOWN) for one in (folder, FIXTURES / "rotated-hadamard")]
    x = torch.randn(3, 128).half()
    assert torch.equal(layers[0](x), layers[1](x))
    config = (folder / "config.json").read_text().replace('"hadamard"', '"random-hadamard"')
    (folder / "config.json").write_text(config)
    message = r"the files have no \*.R4_input.weight \[128, 128\], by which the input is rotated"
    with pytest.raises(CheckpointError, match=message):
        loaded(folder)


@pytest.mark.parametrize("matrix", [torch.zeros(128, 64), torch.zeros(128, 128, dtype=torch.int32)])
def test_damaged_matrices(matrix: Tensor, tmp_path: Path) -> None:
    folder = changed(tmp_path)
    tensors = load_file(folder / "model.safetensors") | {f"{DOWN}.R4_input.weight": matrix}
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"R4_input.weight is .*; it must be floats \[128, 128\]"):
        loaded(folder)


VALUES: tuple[Any, ...] = (0, -1, 1, 3, 1 << 40, None, "x", [], {}, [0], [[]], 2.5, True, "input", "random-matrix")


def mutated(folder: Path, to: Path, chance: random.Random, ours: bool) -> None:
    """Writes a folder in which an entry of the transforms or a tensor of a rotation is another."""
    shutil.copytree(folder, to, dirs_exist_ok=True)
    tensors = load_file(to / "model.safetensors")
    if not ours and chance.random() < 0.5:
        config = json.loads((to / "config.json").read_text())
        groups = config["quantization_config"]["transform_config"]["config_groups"]
        group = chance.choice(list(groups.values()))
        place = chance.choice([group, *group["apply"], groups])
        place[chance.choice([*place, "head_dim"])] = chance.choice(VALUES)
        (to / "config.json").write_text(json.dumps(config))
        return
    name = chance.choice([name for name in tensors if "otations" in name or re.search("_(in|out)put", name)])
    t = tensors.pop(name)
    data = t.reshape(-1).view(torch.uint8)
    match chance.randrange(5):
        case 0:
            data[chance.randrange(len(data))] = chance.randrange(256)
        case 1:
            t = torch.empty(0)
        case 2:
            t = t.flatten()[: chance.randint(0, t.numel())].clone()
        case 3:
            t = t.to(chance.choice((torch.int32, torch.float16, torch.bool, torch.int64)))
        case _:
            t = t[chance.randint(0, len(t)) :].clone()
    left = {name: t.contiguous()} if t.numel() else {}  # nothing, at times
    save_file(tensors | left, to / "model.safetensors", {"lowbit": "1"} if ours else None)


@pytest.mark.parametrize("ours", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_mutations(name: str, ours: bool, tmp_path: Path) -> None:
    """Whatever is wrong is a CheckpointError, or gives a model."""
    chance, folder, refused = random.Random(len(name) + ours), FIXTURES / name, 0
    if ours:
        lowbit.save_checkpoint(loaded(folder), tmp_path / "ours")
        folder = tmp_path / "ours"
    for number in range(30):
        mutated(folder, to := tmp_path / str(number), chance, ours)
        try:
            loaded(to)
        except CheckpointError:
            refused += 1
    assert refused > 5


def test_rotations_of_queries_and_keys_cancel_out() -> None:
    both = [{"targets": ["re:.*self_attn$"], "location": place} for place in ("q_attn", "k_cache")]
    group = {"type": "hadamard", "head_dim": 64, "apply": both}
    assert problem({"config_groups": {"R3": group}}) == ""
    assert "not both alike" in problem({"config_groups": {"R3": {**group, "apply": both[:1]}}})
    assert "not both alike" in problem({"config_groups": {"R3": {**group, "type": "random-matrix"}}})
    other = [both[0], {**both[1], "inverse": True}]
    assert "not both alike" in problem({"config_groups": {"R3": {**group, "apply": other}}})


def test_a_rotation_of_ones_own_that_does_not_fit(tmp_path: Path) -> None:
    lowbit.save_checkpoint(loaded(FIXTURES / "rotated-matrix"), tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file) | {f"{Q}.input_rotations.0.matrix": torch.eye(5)}
    save_file(tensors, file, {"lowbit": "1"})
    with pytest.raises(CheckpointError, match=r"q_proj.input_rotations.0 has 5 columns, which do not divide 192"):
        loaded(tmp_path)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"matrix": torch.zeros(2, 3)}, "it must be square, in f32"),
        ({"matrix": torch.zeros(0, 0)}, "it must be square, in f32"),
        ({"scale": torch.zeros(2, 3)}, r"scale is torch.float32 \[2, 3\]; it must be \[columns\] in f16, bf16 or f32"),
        ({"scale": torch.zeros(3, dtype=torch.int32)}, "scale is torch.int32"),
        ({"scale": torch.zeros(0)}, r"scale is torch.float32 \[0\]"),
        ({}, "a rotation has a matrix, a scale, or an _extra_state"),
        ({"_extra_state": torch.tensor(list(b"{"), dtype=torch.uint8)}, "says no Hadamard matrix"),
    ],
)
def test_damaged_rotations_of_ones_own(state: dict[str, Tensor], message: str) -> None:
    from lowbit.pylib.nn.rotated import rotation_of

    with pytest.raises(PackError, match=message):
        rotation_of(state)


# -- matrices


def hadamard_of(rows: int) -> Tensor:
    """Returns a Hadamard matrix of 12 or 20 rows, by Paley's construction."""
    q = rows - 1
    squares = {i * i % q for i in range(1, q)}
    matrix = torch.ones(rows, rows)
    for i in range(q):
        for j in range(q):
            matrix[i + 1, j + 1] = 1 if i == j or (j - i) % q in squares else -1
    matrix[1:, 0] = -1
    assert torch.equal(matrix @ matrix.T, rows * torch.eye(rows))
    return matrix


def factor_of(rows: int) -> tuple[tuple[int, ...], ...]:
    given = torch.ones(1, 1) if rows == 1 else hadamard_of(rows)
    return tuple(tuple(int(v) for v in row) for row in given.tolist())


@pytest.mark.parametrize("rows", [1, 12, 20])
@pytest.mark.parametrize("power", [2, 16, 64])
@pytest.mark.parametrize("signs", ["none", "before", "after"])
def test_matrices_are_found_in_their_numbers(rows: int, power: int, signs: Any) -> None:
    torch.manual_seed(0)
    size = rows * power
    columns = torch.randint(0, 2, (size,)) * 2.0 - 1
    dense = torch.kron(torch.tensor(factor_of(rows), dtype=torch.float32), sylvester(power))
    dense = dense * columns[:, None] if signs == "before" else dense * columns if signs == "after" else dense
    found = found_in(dense)
    assert found is not None
    matrix, of_columns = found
    assert matrix.size == size and matrix.power >= power
    x = torch.randn(3, 2 * size, dtype=torch.float64)
    exact = (x.unflatten(-1, (2, size)) @ dense.double()).flatten(-2) / math.sqrt(size)
    torch.testing.assert_close(hadamard.by_torch(x, of_columns, matrix), exact)
    back = hadamard.by_torch(exact, of_columns, matrix.transposed)
    torch.testing.assert_close(back, x)


def test_other_matrices() -> None:
    given = torch.randint(0, 2, (8, 8)) * 2.0 - 1
    assert found_in(given) == (HadamardMatrix(tuple(tuple(map(int, row)) for row in given.tolist())), None)
    assert found_in(torch.eye(4)) is None
    assert found_in(torch.randint(0, 2, (512, 512)) * 2.0 - 1) is None


def test_text_of_a_matrix() -> None:
    matrix = HadamardMatrix(factor_of(12), 64, "before")
    assert HadamardMatrix.of_text(matrix.text) == matrix
    for wrong in (
        "3", "{}", '{"factor": [], "power": 1, "signs": "none"}', '{"factor": ["+-"], "power": 1, "signs": "none"}',
        '{"factor": ["+"], "power": 3, "signs": "none"}', '{"factor": ["+"], "power": 2, "signs": "x"}',
        '{"factor": ["+"], "power": 1073741824, "signs": "none"}',
    ):  # fmt: skip
        with pytest.raises(ValueError):
            HadamardMatrix.of_text(wrong)
    with pytest.raises(PackError, match=r"signs are none; a matrix with signs='before' has .768. or none"):
        HadamardRotation(matrix)


# -- the kernel


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["f16", "bf16"])
@pytest.mark.parametrize(
    ("rows", "power", "signs"),
    [
        (1, 16, "none"),
        (1, 128, "before"),
        (1, 512, "after"),
        (1, 4096, "before"),
        (12, 16, "after"),
        (20, 64, "before"),
    ],
)
def test_kernel(rows: int, power: int, signs: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    matrix, size = HadamardMatrix(factor_of(rows), power, signs), rows * power
    columns = None if signs == "none" else (torch.randint(0, 2, (size,)) * 2 - 1).half()
    x = torch.randn(3, 2, 2 * size).to(dtype)[:, 1]
    found = hadamard.rotated(x, columns, matrix, TARGET)
    exact = hadamard.by_torch(x.double(), columns, matrix)
    bound = torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), exact.to(dtype).double(), rtol=bound, atol=bound * 1e-3)
    assert (found != exact.to(dtype)).double().mean() < 0.01
    assert torch.equal(hadamard.rotated(x[:0], columns, matrix, TARGET), x[:0])


@pytest.mark.parametrize(("rows", "power"), [(1, 32768), (20, 1024), (40, 256)])
def test_kernels_spill_no_registers(rows: int, power: int) -> None:
    factor = tuple(tuple(1 if i * j % 3 else -1 for j in range(rows)) for i in range(rows))
    target = parse_target("sm_90a")
    compiled = lower_program(partial(hadamard_program, "bf16", factor, power, "before"), target)
    used = resource_usage(compiled.stages["ptx"], target)
    assert used.spill_stores == used.spill_loads == 0
    assert shared_bytes(rows, power) <= target.max_shared_per_block


def test_sizes_that_no_kernel_has() -> None:
    for rows, power in ((12, 8), (1, 65536)):
        x = torch.randn(1, rows * power).half()
        matrix = HadamardMatrix(factor_of(rows), power)
        assert torch.equal(hadamard.rotated(x, None, matrix, TARGET), hadamard.by_torch(x, None, matrix))


def test_operator_passes_torchs_checks() -> None:
    from lowbit.pylib.operator import rotation_schema  # noqa: F401

    matrix = HadamardMatrix(factor_of(12), 2, "before")
    x = torch.randn(2, 48, dtype=torch.float32, requires_grad=True)
    torch.library.opcheck(torch.ops.lowbit.hadamard.default, (x, torch.ones(24), matrix.text, ""))


def test_rotation_by_any_matrix() -> None:
    matrix, x = torch.randn(4, 4), torch.randn(2, 8, dtype=torch.float64)
    exact = (x.unflatten(-1, (2, 4)) @ matrix.double()).flatten(-2)
    torch.testing.assert_close(MatrixRotation(matrix).turned(x).double(), exact, rtol=1e-5, atol=1e-5)
    with pytest.raises(PackError, match=re.escape("a rotation of 6 columns does not divide the 64 of the layer")):
        spec = lowbit.MatmulSpec(32, 64, "u4")
        RotatedLinear(spec, dict(LowbitLinear.empty(spec).named_buffers()), [MatrixRotation(torch.zeros(6, 6))])


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_on_a_gpu_and_in_a_graph(name: str) -> None:
    expected, model = load_file(FIXTURES / name / "expected.safetensors"), loaded(FIXTURES / name).cuda()
    for layer in (Q, UP, DOWN):
        x, y = expected[f"{layer}.x"].cuda(), expected[f"{layer}.y"]
        module = model.get_submodule(layer)
        found = module(x)
        assert float((found.cpu() - y).norm() / y.norm()) < 5e-3  # as on a CPU: x, once rotated, is rounded to f16
        graph, out = torch.cuda.CUDAGraph(), torch.empty_like(found)
        with torch.cuda.graph(graph):
            out = module(x)
        graph.replay()
        assert torch.equal(out, found)


@pytest.mark.parametrize("target", ["emulator:sm_90a", "cpu"])
def test_columns_that_are_no_whole_blocks(target: str) -> None:
    for shape in ((4, 8), (2, 24)):
        with pytest.raises(SpecError, match="multiple of the rotation's 16 columns"):
            hadamard.rotated(torch.zeros(shape, dtype=torch.float16), None, HadamardMatrix(power=16), target)


def test_rotations_by_torch_are_refused_where_rows_shall_be_alone() -> None:
    packed = LowbitLinear.from_linear(nn.Linear(64, 32).half(), QuantConfig("u4", 32)).packed
    x = torch.randn(3, 64).half()
    by_matrix = RotatedLinear.from_packed(packed, [MatrixRotation(torch.linalg.qr(torch.randn(64, 64))[0])])
    by_signs = RotatedLinear.from_packed(packed, [HadamardRotation(HadamardMatrix(power=64))])
    with lowbit.batch_invariant():
        with pytest.raises(SpecError, match="is multiplied by torch"):
            by_matrix(x)
        assert torch.equal(by_signs(x)[1:2], by_signs(x[1:2]))
