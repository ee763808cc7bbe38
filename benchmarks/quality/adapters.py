"""The code of other libraries and of methods' authors, as functions that quantize a weight and dequantize it.

Each takes the weight of a layer [n, k] in f32 and its calibration, and returns a `Found`: the weight that their code
makes of it. All run on a CPU, at equal numbers of tokens: those that look at inputs get the Hessian that ours get.

Libraries come from PyPI. Three methods have code that is no package: clone IST-DASLab/gptq, Vahe1994/SpQR and
mit-han-lab/llm-awq, and put the folders on PYTHONPATH.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

from lowbit.pylib.quantization.calibration import Calibration


class Found(NamedTuple):
    """What some code makes of a weight.

    weight    [n, k] in f32, quantized and dequantized
    outliers  the part of the weights that is kept beside the codes
    """

    weight: Tensor
    outliers: float = 0.0


Adapter = Callable[[Tensor, Calibration], Found]


def bitsandbytes(weight: Tensor, _: Calibration) -> Found:
    """NF4 in blocks of 64."""
    from bitsandbytes import functional  # type: ignore[import-not-found]

    codes, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    return Found(functional.dequantize_4bit(codes, state).float())


def mx(mode: str) -> Adapter:
    """MXFP4 of torchao, by one of its rules for scales."""

    def quantize(weight: Tensor, _: Calibration) -> Found:
        from torchao.prototype.mx_formats.config import ScaleCalculationMode  # type: ignore[import-not-found]
        from torchao.prototype.mx_formats.mx_tensor import MXTensor  # type: ignore[import-not-found]

        kind = ScaleCalculationMode[mode]
        return Found(MXTensor.to_mx(weight, torch.float4_e2m1fn_x2, 32, kind).dequantize().float())

    return quantize


def nvfp4(weight: Tensor, _: Calibration) -> Found:
    """NVFP4 of torchao, with the factor of the whole weight."""
    from torchao.prototype.mx_formats import nvfp4_tensor  # type: ignore[import-not-found]

    scale = nvfp4_tensor.per_tensor_amax_to_scale(weight.abs().max())
    return Found(nvfp4_tensor.NVFP4Tensor.to_nvfp4(weight, per_tensor_scale=scale).dequantize().float())


def torchao_hqq(bits: int) -> Adapter:
    """HQQ of torchao, in groups of 64."""

    def quantize(weight: Tensor, _: Calibration) -> Found:
        from torchao.quantization import quant_primitives  # type: ignore[import-not-found]

        search: Any = quant_primitives._choose_qparams_and_quantize_affine_hqq
        given = {"axis": 1, "raw_output": True, "device": "cpu", "compute_dtype": torch.float32}
        codes, scales, zeros, _ = search(weight, nbits=bits, group_size=64, **given)
        levels = codes.float().unflatten(1, (-1, 64)) - zeros[..., None].half().float()
        return Found((levels * scales[..., None].half().float()).flatten(1))

    return quantize


def hqq(bits: int) -> Adapter:
    """HQQ of its authors, in groups of 64."""

    def quantize(weight: Tensor, _: Calibration) -> Found:
        from hqq.core.quantize import Quantizer  # type: ignore[import-not-found]

        given = {"axis": 1, "device": "cpu", "compute_dtype": torch.float32}
        return Found(Quantizer.dequantize(*Quantizer.quantize(weight, nbits=bits, group_size=64, **given)).float())

    return quantize


def gptq(bits: int, group_size: int, *, searched: bool = False, **options: bool) -> Adapter:
    """GPTQ of its authors.

    searched   whether ranges are searched (their `mse`), by the power 2.4 of errors
    options    of their `fasterquant`: actorder, static_groups
    """

    def quantize(weight: Tensor, calibration: Calibration) -> Found:
        with mock.patch.object(torch.cuda, "synchronize", lambda: None), _quiet():
            from gptq import GPTQ  # type: ignore[import-not-found]
            from quant import Quantizer  # type: ignore[import-not-found]

            found = GPTQ(_layer(weight))
            found.quantizer = Quantizer()
            found.quantizer.configure(bits, perchannel=True, sym=False, mse=searched)
            found.H = calibration.hessian.float().clone()
            found.fasterquant(groupsize=group_size, **options)
        return Found(found.layer.weight.detach())

    return quantize


def spqr(bits: int, threshold: float | None, damping: float = 0.01) -> Adapter:
    """SpQR of its authors, with act-order: groups of 16, scales and zeros of 3 bits over 16 rows.

    threshold   of outliers; None: there are none
    damping     their `percdamp`
    """

    def quantize(weight: Tensor, calibration: Calibration) -> Found:
        from spqr_engine import SPQRUtil  # type: ignore[import-not-found]

        found = SPQRUtil(_layer(weight))
        found.H = calibration.hessian.float().clone()
        second = {"qq_scale_bits": 3, "qq_zero_bits": 3, "qq_groupsize": 16}
        limit = float("inf") if threshold is None else threshold
        result = found.quantize(
            bits=bits, groupsize=16, percdamp=damping, outlier_relative_threshold=limit,
            permutation_order="act_order", verbose=False, **second,
        )  # fmt: skip
        return Found(result.weight, float(result.unstructured_outlier_mask.float().mean()))

    return quantize


def auto_round(bits: int, group_size: int, steps: int = 200) -> Adapter:
    """SignRound by AutoRound's layer, rounding and optimizer, for one layer at a time.

    Its loop takes inputs in batches. Here a step sees all of them: a root of the Hessian stands for them, with which
    the output error is the same. As there, the step with the least error is kept.
    """

    def quantize(weight: Tensor, calibration: Calibration) -> Found:
        from auto_round.algorithms.quantization.sign_round.sign_sgd import SignSGD  # type: ignore[import-not-found]
        from auto_round.wrapper import WrapperLinear  # type: ignore[import-not-found]

        layer: Any = _layer(weight)
        layer.data_type, layer.bits, layer.group_size, layer.sym = "int_asym", bits, group_size, False
        layer.act_bits, layer.scale_dtype = 16, torch.float16
        learned = WrapperLinear(layer, device="cpu", enable_torch_compile=False)
        x, best, least = root_of(calibration), dict[str, Tensor](), float("inf")
        with torch.enable_grad():
            optimizer = SignSGD(list(learned.params.values()), lr=1 / steps, weight_decay=0)
            rate = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
            for _ in range(steps):
                error = nn.functional.mse_loss(learned(x), x @ weight.T)
                if error.item() < least:
                    least, best = error.item(), {name: each.detach().clone() for name, each in learned.params.items()}
                error.backward()
                optimizer.step()
                optimizer.zero_grad()
                rate.step()
        return Found(learned.unwrapper(best).weight.detach().float())

    return quantize


def llm_awq(bits: int, group_size: int) -> Adapter:
    """AWQ of its authors: their search for the scales of columns, then theirs for the largest weight of each group.

    Both look at outputs. For inputs the first search gets a root of the Hessian, with the mean |x| that inputs really
    have, and the second, for which groups are layers of their own, a root of each group's part. Their code leaves the
    groups of queries and keys as they are; here all are clipped. Scales are not rounded to f16 there, as ours are.
    """

    def quantize(weight: Tensor, calibration: Calibration) -> Found:
        auto_scale, auto_clip, quantizer = (_part_of_awq(name) for name in ("auto_scale", "auto_clip", "quantizer"))
        how: Any = {"zero_point": True, "q_group_size": group_size}
        block, small = _MptBlock(_layer(weight), group_size), torch.ones(1, group_size)
        inputs = dict.fromkeys(("attn.Wqkv", "attn.out_proj", "ffn.up_proj"), small)
        inputs["ffn.down_proj"] = root_of(calibration)
        means = mock.patch.object(auto_scale, "get_act_scale", lambda x: _magnitude(x, calibration))
        with means, mock.patch.object(Tensor, "cpu", Tensor.clone):  # their copies of weights are in the CPU's memory
            *_, (_, _, scales) = auto_scale.auto_scale_block(block, {}, bits, how, inputs)
        scaled, x = weight * scales, _roots_of_groups(calibration, group_size) / scales
        limits = [
            auto_clip.auto_clip_layer(rows, x, bits, how, n_sample_token=group_size)
            for rows in scaled.split(64)  # products of all inputs and rows are in memory
        ]
        largest = torch.cat(limits)
        clipped = scaled.unflatten(1, (-1, group_size)).clamp(-largest, largest).flatten(1)
        return Found(quantizer.pseudo_quantize_tensor(clipped, n_bit=bits, **how) / scales)

    return quantize


class _MptBlock(nn.Module):
    """A block of a kind that llm-awq knows by the name of its class: the last of its layers is the one that counts, and
    the others are small."""

    def __init__(self, layer: nn.Linear, small: int) -> None:
        super().__init__()
        first, second, third = (_layer(torch.eye(small)) for _ in range(3))
        self.norm_1, self.norm_2 = nn.Identity(), nn.Identity()
        self.attn = _Parts({"Wqkv": first, "out_proj": second})
        self.ffn = _Parts({"up_proj": third, "act": nn.Identity(), "down_proj": layer})


class _Parts(nn.ModuleDict):
    """Modules by name, of which the first runs."""

    def forward(self, x: Tensor) -> Tensor:
        return next(iter(self.values()))(x)


def _magnitude(x: Tensor, calibration: Calibration) -> Tensor:
    """Returns the mean |x| of real inputs for those that stand for them, and ones for the inputs of small layers."""
    return calibration.magnitude.float() if len(x) == calibration.k else torch.ones(x.shape[-1])


def _part_of_awq(name: str) -> Any:
    """Returns a module of llm-awq, without its kernels for GPUs and what needs them."""
    import awq  # type: ignore[import-not-found]

    package = ModuleType("awq.quantize")
    package.__path__ = [str(Path(folder) / "quantize") for folder in awq.__path__]
    sys.modules.setdefault("awq.quantize", package)
    sys.modules.setdefault("awq_inference_engine", ModuleType("awq_inference_engine"))
    return importlib.import_module(f"awq.quantize.{name}")


def root_of(calibration: Calibration) -> Tensor:
    """Returns x [k, k] whose x^T x is the Hessian, relative to its mean diagonal."""
    return _root(calibration.hessian / calibration.hessian.diagonal().mean())


def _roots_of_groups(calibration: Calibration, size: int) -> Tensor:
    """Returns x [size, k]: for each group of columns a root of its part of the same Hessian."""
    relative = calibration.hessian / calibration.hessian.diagonal().mean()
    blocks = relative.unflatten(0, (-1, size)).unflatten(2, (-1, size)).diagonal(dim1=0, dim2=2)
    return torch.cat(list(_root(blocks.permute(2, 0, 1))), dim=1)


def _root(hessian: Tensor) -> Tensor:
    """Returns x [..., k, k] with x^T x = H, in f32."""
    values, vectors = torch.linalg.eigh(hessian.double())
    return (vectors * values.clamp(min=0).sqrt()[..., None, :]).mT.float().contiguous()


def _layer(weight: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight.data = weight.clone()
    return layer.requires_grad_(False)


def _quiet() -> contextlib.AbstractContextManager[Any]:
    return contextlib.redirect_stdout(io.StringIO())
