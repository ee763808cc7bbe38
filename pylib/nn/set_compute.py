"""`lowbit.set_compute_`: in which type the low-bit layers of a model multiply."""

from __future__ import annotations

import torch
from torch import nn

from lowbit.dialect.errors import PackError, SpecError
from lowbit.dialect.formats.byte_codes import Compute
from lowbit.pylib.nn.linear import LowbitLinear
from lowbit.pylib.nn.packed_module import check_model


@torch.no_grad()
def set_compute_(
    model: nn.Module, compute: Compute | None, *, compute_from: int = 1, fold_scales: bool = False
) -> dict[str, str]:
    """Make the low-bit linear layers of a model multiply in 8 bits, or in the type of their inputs again, in place;
    returns why layers stay as they were, by their names.

    A model of any origin will do: quantized by lowbit, imported from GPTQ, AWQ or GGUF, or saved. Codes stay as they
    are. The type in which layers multiply is saved with them.

    model          any module; embeddings, and output layers that are tied to them, are left alone
    compute        "f8e4m3" or "i8"; None: the type of inputs
    compute_from   tokens of a call from which on they are quantized; fewer are multiplied in their own type
    fold_scales    with `compute`: round scaled weights to it where many tokens are multiplied, as `MatmulSpec` has it

    Raises SpecError for a model without low-bit linear layers, and for what fits none of them, which changes nothing.
    """
    check_model(model)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, LowbitLinear)}
    if not layers:
        raise SpecError("the model has no low-bit linear layers; quantize it first, with lowbit.quantize_")
    changed, unfit = {}, {}
    for name, layer in layers.items():
        try:
            changed[name] = layer.packed.with_compute(compute, compute_from=compute_from, fold_scales=fold_scales)
        except (SpecError, PackError) as error:
            unfit[name] = error
    if not changed:
        raise SpecError(str(next(iter(unfit.values()))))
    for name, packed in changed.items():
        layers[name].hold(packed)
    return {name: str(error) for name, error in unfit.items()}
