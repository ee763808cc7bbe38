"""`LowbitEmbedding`: an embedding whose table is a packed weight, and `TiedLinear`, the output layer that shares it."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from lowbit.dialect.errors import PackError, SpecError
from lowbit.dialect.formats.packing import ROWS
from lowbit.dialect.spec import Act, MatmulSpec
from lowbit.pylib.nn.decode_rows import Decoder, check_rows, take_rows
from lowbit.pylib.nn.dense_weight import NoDense
from lowbit.pylib.nn.linear import act_of
from lowbit.pylib.nn.packed_module import PackedModule
from lowbit.pylib.quantization.api import quantize
from lowbit.pylib.quantization.config import QuantConfig
from lowbit.pylib.torch_types import TORCH
from lowbit.pylib.weights.packed import PackedWeight


class LowbitEmbedding(PackedModule):
    """An embedding with a packed low-bit table [tokens, size]. Made by `from_embedding`, `from_packed` or `empty`.

        embedding = lowbit.LowbitEmbedding.from_embedding(embedding.bfloat16(), lowbit.QuantConfig("u8", group_size=64))
        x = embedding(ids)    # [..., size] in bf16

    Rows are looked up in the packed table and decoded, on any device. The table is laid out as that of a
    `LowbitLinear`: `embedding.linear()` multiplies by it, where the output layer shares the table.

    spec          of the table: n tokens of size k; a row comes in its act type
    padding_idx   as that of nn.Embedding, which matters in training alone
    scale         what rows are multiplied by, as the models of some families do; None: nothing
    """

    def __init__(self, spec: MatmulSpec, tensors: Mapping[str, Tensor]) -> None:
        check_rows(spec)
        super().__init__(spec, tensors)
        self.num_embeddings, self.embedding_dim = spec.n, spec.k
        self.padding_idx: int | None = None
        self.scale: float | None = None

    @classmethod
    def from_embedding(
        cls, embedding: nn.Embedding, config: QuantConfig | None = None, act: Act | None = None
    ) -> LowbitEmbedding:
        """Returns an embedding with the quantized table of another, on the same device.

        act: type of the rows, "f16" or "bf16"; None: that of the table

        Raises QuantizeError and SpecError as `lowbit.quantize` does, and for an embedding that changes its table.
        """
        config = QuantConfig() if config is None else config
        spec = spec_of_embedding(embedding, config, act)
        quantized = quantize(embedding.weight, config.multiplied_in(spec.act))
        return cls.from_packed(quantized.pack(spec)).in_place_of(embedding)

    @classmethod
    def from_packed(cls, packed: PackedWeight) -> LowbitEmbedding:
        """Returns an embedding that shares the tensors of a packed weight."""
        if not isinstance(cast(object, packed), PackedWeight):
            raise PackError(f"the table must be a PackedWeight, not {type(packed).__name__}; use pack()")
        return cls(packed.spec, packed)

    def in_place_of(self, other: nn.Embedding | LowbitEmbedding) -> LowbitEmbedding:
        """Returns itself, after taking over all from another embedding but its table.

        Raises SpecError for a subclass of nn.Embedding that does more than scale rows.
        """
        self.padding_idx, self.scale = other.padding_idx, scale_of(other)
        return self.train(other.training)

    def forward(self, input: Tensor) -> Tensor:
        """Returns the rows [..., size] of tokens [...], in the act type.

        Raises SpecError for tokens that are no integers, and on a CPU for tokens that are not in the table.
        """
        if not isinstance(cast(object, input), Tensor):
            raise SpecError(f"tokens must be a torch tensor, not {type(input).__name__}; use torch.as_tensor(tokens)")
        if input.is_floating_point() or input.is_complex() or input.dtype is torch.bool:
            raise SpecError(f"tokens are {input.dtype}; an embedding takes integers, such as torch.int64")
        if not is_compiling():
            self.check_unwritten()
        if not is_compiling() and self._decoder.levels.device != self.codes.device:
            self._forget()  # others have moved the buffers one by one
        ids = input.reshape(-1)
        outside = (ids < 0) | (ids >= self.num_embeddings)
        if not (is_compiling() or ids.is_cuda) and bool(outside.any()):
            raise SpecError(
                f"token {int(ids[outside][0])} must be in 0..{self.num_embeddings - 1}, the rows of the table"
            )
        ids = torch.where(outside, self.codes.shape[0] * ROWS, ids)  # beyond the tensor, which torch asserts on a GPU
        tensors = {name: getattr(self, name) for name in self._slots}
        rows = take_rows(self.spec, tensors, self._decoder, ids)
        x = rows.to(TORCH[self.spec.act]).view(*input.shape, self.embedding_dim)
        return x if self.scale is None else x * self.scale

    def linear(self, bias: nn.Parameter | None = None) -> TiedLinear:
        """Returns the linear layer whose weight is this table: x [..., size] to y [..., tokens]."""
        return TiedLinear(self, bias)

    def to_embedding(self, dtype: torch.dtype | None = None) -> nn.Embedding:
        """Returns an embedding with the dequantized table, in the act type or in another.

        Raises SpecError for one that scales its rows, which nn.Embedding does not.
        """
        if self.scale is not None:
            raise SpecError(f"rows are multiplied by {self.scale:g}, which nn.Embedding can't do; load the dense model")
        weight = self.dequantize()
        weight = weight.to(dtype or weight.dtype)
        dense = nn.Embedding(self.num_embeddings, self.embedding_dim, self.padding_idx, _weight=weight)
        return dense.train(self.training)

    def _forget(self) -> None:
        super()._forget()
        self._decoder = Decoder.of(self.spec, self.codes.device)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.spec}"


class TiedLinear(NoDense):
    """The linear layer whose weight is the table of a `LowbitEmbedding`. Made by `LowbitEmbedding.linear`.

    It has no tensors but a bias, if there is one: the table is saved, loaded and moved by the embedding, which has to
    be in the same model.
    """

    bias: nn.Parameter | None

    def __init__(self, embedding: LowbitEmbedding, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self.in_features, self.out_features = embedding.embedding_dim, embedding.num_embeddings
        self.register_parameter("weight", None)
        self.register_parameter("bias", bias)
        self.__dict__["embedding"] = embedding  # no child: it has its own place in the model

    def forward(self, input: Tensor) -> Tensor:
        """Returns y [..., tokens], where the table is, in the spec's out type for x [..., size] in its act type."""
        table = cast(LowbitEmbedding, self.embedding)
        y = table.multiply(input.to(table.codes.device))
        return y if self.bias is None else y + self.bias

    @property
    def weight(self) -> Tensor:
        """The table of the embedding, for code that reads it."""
        return cast(LowbitEmbedding, self.embedding).weight

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def spec_of_embedding(embedding: nn.Embedding, config: QuantConfig, act: Act | None) -> MatmulSpec:
    """Returns the spec that an embedding's table has after it is quantized. Raises SpecError if there is none."""
    if reason := why_not(embedding):
        raise SpecError(reason)
    if config.needs_data:
        raise SpecError(f"{config.method} can't look at the inputs of an embedding; use 'hqq' or 'rtn'")
    spec = config.spec(*embedding.weight.shape, act=act or act_of(embedding.weight))
    check_rows(spec)
    return spec


def why_not(embedding: nn.Embedding) -> str:
    """Returns why the table of an embedding can't be packed, or ""."""
    try:
        scale_of(embedding)
    except SpecError as error:
        return str(error)
    return "max_norm= changes the table at every call" if embedding.max_norm is not None else ""


SCALED = "return super().forward(input_ids) * self.embed_scale"
ROUNDED = ".to(self.weight.dtype)"


def scale_of(embedding: nn.Embedding | LowbitEmbedding) -> float | None:
    """Returns what an embedding multiplies rows by, of which transformers has two kinds; None for nn.Embedding.

    Raises SpecError for a subclass that does something else.
    """
    if isinstance(embedding, LowbitEmbedding):
        return embedding.scale
    if type(embedding) is nn.Embedding:
        return None
    with suppress(OSError, TypeError):
        body = inspect.getsource(type(embedding).forward).partition(":\n")[2].strip()
        scale: Any = getattr(embedding, "scalar_embed_scale", getattr(embedding, "embed_scale", None))
        if body == SCALED and isinstance(scale, float | int):
            return float(scale)
        if body == SCALED + ROUNDED and isinstance(scale, float | int):
            return float(torch.tensor(scale, dtype=torch.float32, device="cpu").to(embedding.weight.dtype))
    raise SpecError(f"{type(embedding).__name__} is a subclass of nn.Embedding with its own ways")


def tied_linears(
    modules: Iterable[tuple[str, nn.Module]], embedding: nn.Embedding | LowbitEmbedding
) -> dict[str, nn.Linear | TiedLinear]:
    """Returns those among named modules that are linear layers whose weight is the table of an embedding."""
    if isinstance(embedding, LowbitEmbedding):
        return {name: m for name, m in modules if isinstance(m, TiedLinear) and m.embedding is embedding}
    return {name: m for name, m in modules if isinstance(m, nn.Linear) and m.weight is embedding.weight}


def with_tied(
    names: Iterable[str], embedding: LowbitEmbedding, tied: Mapping[str, nn.Linear | TiedLinear]
) -> dict[str, LowbitEmbedding | TiedLinear]:
    """Returns what takes the places of an embedding with these names, and of the linear layers that are tied to it."""
    heads = {linear: embedding.linear(linear.bias).train(linear.training) for linear in tied.values()}
    return {**dict.fromkeys(names, embedding), **{name: heads[linear] for name, linear in tied.items()}}
