"""`lowbit.set_compute_` and `PackedWeight.with_compute`: other products of a weight that is there already."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowbit
from lowbit.dialect.errors import PackError, SpecError
from lowbit.dialect.formats.byte_codes import LARGEST
from lowbit.pylib.reference import random_inputs
from lowbit.pylib.weights.packed import pack

FOLDED: dict[str, Any] = {"compute": "f8e4m3", "fold_scales": True}
SPECS = {
    "u4": lowbit.MatmulSpec(48, 256, "u4", 64, zeros="int", bias=True),
    "float zeros": lowbit.MatmulSpec(48, 256, "u4", 64, zeros="float"),
    "nvfp4": lowbit.MatmulSpec.preset("nvfp4", 48, 256),
    "q4_k": lowbit.MatmulSpec.preset("q4_k", 48, 256),
    "q6_k": lowbit.MatmulSpec.preset("q6_k", 48, 256),
}


def packed(spec: lowbit.MatmulSpec) -> lowbit.PackedWeight:
    """A random weight."""
    return pack(spec, **random_inputs(spec, 1)[1])


@pytest.mark.parametrize("name", SPECS)
def test_folding_changes_no_number(name: str) -> None:
    w = packed(SPECS[name])
    folded = w.with_compute(**FOLDED, compute_from=9)
    assert folded.spec.folds and folded.spec.compute_from == 9
    assert folded.codes is w.codes
    assert torch.equal(folded.dequantize(), w.dequantize())
    rows = folded.unpack_row_scales()
    assert rows is not None
    near = folded.folded() / rows[:, None]
    assert (near.abs() <= LARGEST["f8e4m3"]).all() and (near.abs().amax(1) > LARGEST["f8e4m3"] / 8).all()
    back = folded.with_compute(None)
    assert back.spec.compute is None and torch.equal(back.dequantize(), w.dequantize())
    assert all(a is b for a, b in zip(back.tensors, folded.tensors))
    again = back.with_compute(**FOLDED)
    assert torch.equal(again.folded(), folded.folded())


def test_products_of_codes_share_all_tensors() -> None:
    w = packed(SPECS["u4"])
    other = w.with_compute("i8", compute_from=65)
    assert all(a is b for a, b in zip(other.tensors, w.tensors))
    x = torch.randn(70, 256).half()
    few, many = lowbit.compile(w.spec, "cpu"), lowbit.compile(w.with_compute("i8").spec, "cpu")
    mm = lowbit.compile(other.spec, "cpu")
    assert torch.equal(mm(x[:64], other), few(x[:64], w))
    assert torch.equal(mm(x, other), many(x, w.with_compute("i8")))
    with pytest.raises(SpecError, match="fold_scales=True needs compute='f8e4m3' or 'i8'; name one"):
        w.with_compute(None, fold_scales=True)


def test_a_weight_without_values() -> None:
    meta = lowbit.LowbitLinear.empty(SPECS["u4"], "meta").packed
    with pytest.raises(PackError, match="no values, from which fold_scales takes a power of two; load them first"):
        meta.with_compute(**FOLDED)
    assert meta.with_compute("i8").spec.compute == "i8"


@pytest.fixture
def model() -> nn.Sequential:
    """Layers of three kinds: one of 4 bits, one with outliers, one that is dense."""
    torch.manual_seed(0)
    found = nn.Sequential(*[nn.Linear(256, 256, bias=False).bfloat16() for _ in range(3)])
    configs = {"0": lowbit.QuantConfig("u4", 64, method="rtn"), "1": lowbit.QuantConfig("u3", 16, method="spqr")}
    lowbit.quantize_(found, {**configs, "*": None}, calibration=[torch.randn(64, 256).bfloat16()])
    return found


def test_layers_that_cannot_stay_as_they_are(model: nn.Sequential) -> None:
    before, x = copy.deepcopy(model), torch.randn(40, 256).bfloat16()
    reasons = lowbit.set_compute_(model, "i8", compute_from=33)
    assert list(reasons) == ["1"] and "compute=None" in reasons["1"]
    first = model[0]
    assert isinstance(first, lowbit.LowbitLinear) and first.spec.compute == "i8"
    assert torch.equal(model(x[:32]), before(x[:32])) and not torch.equal(model(x), before(x))
    assert lowbit.set_compute_(model, None) == {}
    assert torch.equal(model(x), before(x))


def test_what_fits_no_layer(model: nn.Sequential) -> None:
    del model[0]
    state = copy.deepcopy(model.state_dict())
    with pytest.raises(SpecError, match="compute='i8'"):
        lowbit.set_compute_(model, "i8")
    with pytest.raises(SpecError, match=r"'f9' must be one of"):
        lowbit.set_compute_(model, "f9")  # type: ignore[arg-type]
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())
    with pytest.raises(SpecError, match="no low-bit linear layers; quantize it first"):
        lowbit.set_compute_(nn.Linear(4, 4), "i8")
    with pytest.raises(SpecError, match=r"must be an nn\.Module, not int"):
        lowbit.set_compute_(3, "i8")  # type: ignore[arg-type]


def test_buffers_of_others_stay() -> None:
    layer = lowbit.LowbitLinear.from_packed(packed(SPECS["float zeros"]))
    layer.register_buffer("seen", torch.ones(3))
    lowbit.set_compute_(layer, **FOLDED)
    assert {*dict(layer.named_buffers())} == {"codes", "scales", "zeros", "row_scales", "seen"}
    lowbit.set_compute_(layer, None)
    assert torch.equal(layer.state_dict()["seen"], torch.ones(3))


def test_a_state_is_loaded_for_either(model: nn.Sequential) -> None:
    """What layers multiply in is no property of the weight: a state goes into a model with other products."""
    x, other = torch.randn(40, 256).bfloat16(), copy.deepcopy(model)
    lowbit.set_compute_(model, "i8")
    other.load_state_dict(model.state_dict())
    assert not torch.equal(other(x), model(x))
    lowbit.set_compute_(other, "i8")
    assert torch.equal(other(x), model(x))


def test_under_compile(model: nn.Sequential) -> None:
    x = torch.randn(40, 256).bfloat16()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), model(x))
    before = model(x)
    lowbit.set_compute_(model, "i8")
    assert torch.equal(compiled(x), model(x)) and not torch.equal(model(x), before)


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("weight", ["u4", "nf4"])
def test_a_model_of_transformers_is_saved_with_it(weight: str, fuse: bool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)
    make = transformers.AutoModelForCausalLM
    make.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "dense")
    recipe = lowbit.LowbitConfig(weight, group_size=32, fuse=fuse)
    model = make.from_pretrained(tmp_path / "dense", quantization_config=recipe)
    tokens = torch.randint(64, (1, 20))
    plain, few = model(tokens).logits, model(tokens[:, :8]).logits
    assert lowbit.set_compute_(model, **FOLDED, compute_from=9) == {}
    changed = model(tokens).logits
    assert torch.equal(model(tokens[:, :8]).logits, few) and not torch.equal(changed, plain)
    model.save_pretrained(tmp_path / "saved")
    again = make.from_pretrained(tmp_path / "saved")
    assert torch.equal(again(tokens).logits, changed)
    lowbit.set_compute_(again, None)
    again.save_pretrained(tmp_path / "back")
    assert torch.equal(make.from_pretrained(tmp_path / "back")(tokens).logits, plain)
