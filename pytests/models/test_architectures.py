"""Models of many architectures of transformers: quantized on load, saved, and loaded again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lowbit
from lowbit import LowbitConfig, QuantConfig

transformers = pytest.importorskip("transformers")
quantizer = pytest.importorskip("lowbit.pylib.integrations.quantizer")

TOKENS = torch.randint(3, 120, (1, 12), generator=torch.Generator().manual_seed(0))
PIXELS = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
IMAGE_TOKEN = 127
TEXT: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
GPT2: dict[str, Any] = {"vocab_size": 128, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
SWITCH: dict[str, Any] = {
    "vocab_size": 128,
    "d_model": 64,
    "d_ff": 128,
    "d_kv": 16,
    "num_heads": 4,
    "num_experts": 4,
    **dict.fromkeys(("num_layers", "num_decoder_layers", "num_sparse_encoder_layers", "num_sparse_decoder_layers"), 1),
    "decoder_start_token_id": 0,
}
VISION: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}


def causal(name: str, **fields: Any) -> Callable[[], Any]:
    """Returns what makes a tiny language model."""
    return lambda: transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**{**TEXT, **fields}))


def llava() -> Any:
    text, vision = {**TEXT, "model_type": "llama"}, {**VISION, "model_type": "clip_vision_model"}
    return transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_index=IMAGE_TOKEN)
    )


MODELS: dict[str, Callable[[], Any]] = {
    "mixtral": causal("MixtralConfig", num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2),
    "gpt-oss": causal("GptOssConfig", num_local_experts=4, num_experts_per_tok=2, num_key_value_heads=2, head_dim=16),
    "gpt-neox": causal("GPTNeoXConfig"),
    "llava": llava,
    "mamba2": causal("Mamba2Config", state_size=16, num_heads=8, head_dim=16, n_groups=1),  # reads the type of a weight
    "gpt-2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2)),  # its weights are [k, n]
    "falcon": causal("FalconConfig"),
    "gpt-bigcode": causal("GPTBigCodeConfig"),  # initializes projections one by one
    "mamba": causal("MambaConfig"),  # has layers with less columns than a group
    "hunyuan": causal("HunYuanMoEV1Config", num_experts=4, moe_topk=2, head_dim=16),  # has routers in f32
    "modernbert": lambda: transformers.ModernBertForMaskedLM(
        transformers.ModernBertConfig(**TEXT, cls_token_id=1, sep_token_id=2)
    ),
    "t5": lambda: transformers.T5EncoderModel(
        transformers.T5Config(**TEXT, d_model=64, d_kv=16, d_ff=128, num_heads=4)
    ),
    "rwkv": causal("RwkvConfig", attention_hidden_size=64, context_length=64),  # divides weights
    "switch": lambda: transformers.SwitchTransformersForConditionalGeneration(  # casts routers to f32
        transformers.SwitchTransformersConfig(**SWITCH)
    ),
    "vit": lambda: transformers.ViTForImageClassification(transformers.ViTConfig(**VISION)),
}
U8 = QuantConfig("u8", 32, clip="max")  # without a search, which takes longest


def inputs_of(model: Any) -> dict[str, Tensor]:
    """Returns inputs for a model, of text or of images."""
    if model.main_input_name == "pixel_values":
        return {"pixel_values": PIXELS}
    if "image_token_index" in model.config.to_dict():
        return {"pixel_values": PIXELS, "input_ids": torch.cat([torch.full((1, 16), IMAGE_TOKEN), TOKENS], 1)}
    has_decoder = hasattr(model, "get_decoder") and model.config.is_encoder_decoder
    return {"input_ids": TOKENS, **({"decoder_input_ids": TOKENS[:, :4]} if has_decoder else {})}


def output(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(**inputs_of(model))[0]


def with_biases(model: Any) -> Any:
    """Returns a model with other biases than zeros, as which they start."""
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    return model


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.logging.set_verbosity_error()


@pytest.mark.parametrize("more", [{}, {"lm_head": True, "embeddings": True, "fuse": True}], ids=["plain", "all"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_quantized_on_load_and_comes_back(name: str, more: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    dense = with_biases(MODELS[name]().bfloat16())
    dense.save_pretrained(tmp_path / "dense")
    config = LowbitConfig(U8, **more)
    model = type(dense).from_pretrained(tmp_path / "dense", quantization_config=config)
    expected = output(model)
    error = float((expected - output(dense)).float().norm() / output(dense).float().norm())
    assert 1e-4 < error < 0.03
    model.save_pretrained(tmp_path / "low")
    assert torch.equal(output(type(dense).from_pretrained(tmp_path / "low")), expected)


def dense_reasons(model: Any, end: str) -> set[str]:
    """Returns why layers whose names end so stay dense, after quantizing a model."""
    report = lowbit.quantize_(model, U8, progress=False)
    return {row.reason for row in report.dense if row.name.endswith(end)}


def test_layers_that_a_model_casts_stay_dense() -> None:
    reasons = dense_reasons(MODELS["switch"]().bfloat16(), "classifier")
    assert reasons == {"SwitchTransformersTop1Router computes in f32, and casts it"}


def test_layers_that_a_model_writes_to_stay_dense() -> None:
    model = MODELS["rwkv"]().bfloat16()
    hint = "divides its weight in place; config.rescale_every = 0 quantizes it"
    assert dense_reasons(model, "attention.output") == {f"RwkvSelfAttention {hint}"}
    model = MODELS["rwkv"]().bfloat16()
    model.config.rescale_every = 0
    expected = output(model)
    assert not dense_reasons(model, "attention.output")
    assert float((output(model) - expected).norm() / expected.norm()) < 0.03


def test_a_checkpoint_with_layers_that_a_model_writes_to(tmp_path: Path) -> None:
    model = MODELS["rwkv"]().bfloat16()
    model.config.rescale_every = 0
    lowbit.quantize_(model, U8, progress=False)
    lowbit.save_checkpoint(model, tmp_path)
    with pytest.raises(lowbit.CheckpointError, match="but in the model RwkvSelfAttention divides its weight"):
        lowbit.load_checkpoint(MODELS["rwkv"]().bfloat16(), tmp_path)


def gpt2() -> Any:
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2)).bfloat16()
    for block in model.transformer.h:
        block.ln_1.weight.data[::16] = 8.0  # so that columns differ, which AWQ makes use of
    return model


def test_layers_with_transposed_weights_are_calibrated() -> None:
    def error(method: str) -> float:
        model, config = gpt2(), QuantConfig("u2", 32, method=method)
        expected = output(model)
        report = lowbit.quantize_(model, config, calibration=[TOKENS])
        assert len(report.quantized) == 8 and report["transformer.h.0.attn.c_attn"].shape == (192, 64)
        return float((output(model) - expected).float().norm())

    assert error("gptq") < 0.9 * error("rtn")
    assert error("awq") < error("rtn")


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss"])
def test_experts_are_calibrated_on_their_tokens(name: str) -> None:
    """gpt-oss has transposed weights with biases, and a gate of its own."""
    tokens = torch.randint(3, 120, (4, 32), generator=torch.Generator().manual_seed(0))

    def errors(method: str) -> tuple[float, lowbit.QuantizationReport]:
        torch.manual_seed(0)
        model = MODELS[name]().bfloat16().eval()
        with torch.no_grad():
            expected = model(tokens).logits
            config = {"*.experts": QuantConfig("u3", 32, method=method)}
            report = lowbit.quantize_(model, config, calibration=[tokens])
            return float((model(tokens).logits - expected).float().norm()), report

    error, report = errors("gptq")
    assert [row.shape[0] for row in report.quantized] == [4] * 4 and "experts got" in report.quantized[0].note
    assert error < 0.8 * errors("rtn")[0]


def test_experts_without_tokens_are_rounded_to_nearest() -> None:
    """One token goes to two experts of four."""
    torch.manual_seed(0)
    model = MODELS["mixtral"]().bfloat16()
    weights = model.model.layers[0].mlp.experts.gate_up_proj.detach().clone()
    config = QuantConfig("u4", 32, method="gptq", clip="max")
    report = lowbit.quantize_(model, {"*.0.mlp.experts": config}, calibration=[TOKENS[:, :1]])
    assert [row.note for row in report.quantized] == ["experts got 0 to 1 tokens; 4 of 4 rounded to nearest"] * 2
    nearest = [lowbit.quantize(weight, dataclasses.replace(config, method="rtn")).dequantize() for weight in weights]
    layers = model.model.layers[0].mlp.experts.gate_up
    assert all(torch.equal(layer.packed.dequantize(), each) for layer, each in zip(layers, nearest))


def test_experts_are_quantized_by_hqq() -> None:
    """Which needs no tokens. AWQ has no norm of the experts' own to fold scales into: they are rounded to nearest."""

    def weights_after(method: str) -> tuple[Tensor, float]:
        torch.manual_seed(0)
        model = MODELS["mixtral"]().bfloat16()
        config = QuantConfig("u3", 32, zeros="float", method=method)
        report = lowbit.quantize_(model, {"*.experts": config}, calibration=[TOKENS], progress=False)
        return model.model.layers[0].mlp.experts.down[3].weight.clone(), report.quantized[1].error

    (nearest, error), (by_hqq, less), (by_awq, _) = (weights_after(method) for method in ("rtn", "hqq", "awq"))
    assert not torch.equal(by_hqq, nearest) and less < 1.01 * error
    assert torch.equal(by_awq, nearest)


class Routed(torch.nn.Module):
    """Experts of which inputs say where they go."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = MODELS["mixtral"]().bfloat16().model.layers[0].mlp.experts

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return self.experts(x, ids, weights)


def test_experts_with_few_tokens_are_calibrated_on_those_of_all() -> None:
    """Expert 3 gets 5 of 1000 tokens, which say too little of their 64 columns. A linear layer would be spoiled."""
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(1000, 16, generator=generator) @ torch.randn(16, 64, generator=generator)).bfloat16()
    ids = torch.randint(0, 3, (1000, 1), generator=generator)
    ids[:5] = 3

    def errors(method: str) -> tuple[float, str]:
        torch.manual_seed(0)
        model = Routed()
        weight = model.experts.gate_up_proj.detach()[3].clone()
        config = QuantConfig("u3", 32, method=method)
        report = lowbit.quantize_(model, config, calibration=[(x, ids, torch.ones(1000, 1))], progress=False)
        low = model.experts.gate_up[3].weight.clone()
        return float(((low - weight).float() @ x.float().T).norm()), report.quantized[0].note

    error, note = errors("gptq")
    assert note.startswith("experts got 5 to ") and note.endswith(" tokens; 1 of 4 calibrated on those of all")
    assert error < 0.7 * errors("rtn")[0]


FIELDS = {**TEXT, "type_vocab_size": 0, "relative_attention": True}
LOADED: dict[str, Callable[[], Any]] = {
    "gpt-2": MODELS["gpt-2"],  # its weights are [k, n]
    "mixtral": MODELS["mixtral"],  # has other names in files
    "gpt-neox": MODELS["gpt-neox"],
    "deberta": lambda: transformers.DebertaV2Model(transformers.DebertaV2Config(**FIELDS)),  # may lack positions
    "marian": lambda: transformers.MarianModel(  # its files have no positions
        transformers.MarianConfig(
            vocab_size=128,
            d_model=64,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            max_position_embeddings=64,
            pad_token_id=0,
        )
    ),
}


@pytest.mark.parametrize("name", LOADED)
def test_what_transformers_saved_is_loaded_without_it(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, loaded = (LOADED[name]().bfloat16() for _ in range(2))
    lowbit.quantize_(model, U8)
    model.save_pretrained(tmp_path / "low")
    lowbit.load_checkpoint(loaded, tmp_path / "low")
    more = {"decoder_input_ids": TOKENS} if name == "marian" else {}
    with torch.no_grad():
        assert torch.equal(loaded.eval()(TOKENS, **more)[0], model.eval()(TOKENS, **more)[0])


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss", "gpt-2"])
def test_plans_have_experts_and_transposed_layers(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().bfloat16()
    before = {key: t.clone() for key, t in model.state_dict().items()}
    candidates = [QuantConfig("u4", 32, method="gptq"), U8]
    plan = lowbit.plan(model, candidates, calibration=[TOKENS], bits=7.0)
    assert all(torch.equal(t, before[key]) for key, t in model.state_dict().items())
    assert ("model.layers.1.mlp.experts" if name != "gpt-2" else "transformer.h.1.mlp.c_fc") in plan
    assert {config.weight for config in plan.values()} == {"u4", "u8"} and plan.bits <= 7
    report = lowbit.quantize_(model, plan, calibration=[TOKENS])
    assert sum(row.bytes_after for row in report.quantized) == plan.bytes


def test_a_transposed_weight_is_loaded_from_a_checkpoint(tmp_path: Path) -> None:
    model = gpt2()
    lowbit.quantize_(model, U8)
    lowbit.save_checkpoint(model, tmp_path / "low")
    loaded = gpt2()
    lowbit.load_checkpoint(loaded, tmp_path / "low")
    assert torch.equal(output(loaded), output(model))


def test_routers_in_f32_stay_dense() -> None:
    model = MODELS["hunyuan"]().bfloat16()
    router = model.model.layers[0].mlp.gate.wg.float()
    report = lowbit.quantize_(model, U8)
    assert model.model.layers[0].mlp.gate.wg is router
    assert "f32, and others are torch.bfloat16" in report["model.layers.0.mlp.gate.wg"].reason


def test_a_model_without_low_bit_layers_is_saved_as_a_dense_one(tmp_path: Path) -> None:
    model = gpt2()
    report = lowbit.quantize_(model, U8, filter_fn=lambda *_: False)
    assert not report.quantized
    model.save_pretrained(tmp_path)
    assert torch.equal(output(type(model).from_pretrained(tmp_path)), output(model))


@pytest.mark.parametrize(
    ("name", "layer", "reason"),
    [
        ("gpt-2", "lm_head", "its weight is tied to an embedding; embeddings=True quantizes it"),
        ("gpt-neox", "lm_head", "the output layer; lm_head=True quantizes it"),
        ("gpt-neox", "gpt_neox.layers.1.mlp.dense_h_to_4h", "modules_to_not_convert"),
        ("t5", "encoder.block.0.layer.1.DenseReluDense.wo", "transformers converts none of a kind that is kept in f32"),
    ],
)
def test_why_layers_stay_dense(name: str, layer: str, reason: str, tmp_path: Path) -> None:
    dense = MODELS[name]()
    dense.save_pretrained(tmp_path)
    config = LowbitConfig(U8, modules_to_not_convert=["layers.1.mlp.dense_h_to_4h"] if name == "gpt-neox" else None)
    model = type(dense).from_pretrained(tmp_path, quantization_config=config)
    assert model.hf_quantizer.stays_dense[layer].startswith(reason)


def test_a_model_that_stays_mostly_dense_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The experts of DBRX are no nn.Linear, nor are they kept as those of other models."""
    parts = {
        "ffn_config": {"ffn_hidden_size": 256, "moe_num_experts": 4},
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4},
    }
    config = transformers.DbrxConfig(vocab_size=128, d_model=64, n_heads=4, n_layers=1, max_seq_len=64, **parts)
    transformers.DbrxForCausalLM(config).bfloat16().save_pretrained(tmp_path)
    warnings: list[str] = []
    monkeypatch.setattr(quantizer.logger, "warning_once", warnings.append)
    transformers.DbrxForCausalLM.from_pretrained(tmp_path, quantization_config=LowbitConfig(U8))
    assert "% of the weights stay dense" in warnings[0] and "DbrxExpertGLU" in warnings[0]
