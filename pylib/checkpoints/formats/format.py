"""The description of a format that each file of this folder gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lowbit.pylib.checkpoints.config_entries import Entries
from lowbit.pylib.checkpoints.imported import Imported
from lowbit.pylib.checkpoints.module_tensors import ModuleTensors


def _nothing_listed(metadata: Mapping[str, str], module: str) -> Sequence[str]:
    return ()


@dataclass(frozen=True)
class Format:
    """How a library writes a quantized linear layer.

    markers   names of tensors of which a quantized module has one; each starts with "." or what else stands between the
              name of the module and that of the tensor
    others    names of the other tensors that a module may have
    read      returns the weight of a module
    entries   those of the quantization_config that `read` knows, besides HARMLESS ones
    listed    returns the names of the tensors that the metadata of the files says a module has, where it says it
    scaling   how the name of a tensor [k] ends by which the inputs of a module are multiplied at each call; "" for none
    """

    markers: tuple[str, ...]
    others: tuple[str, ...]
    read: Callable[[ModuleTensors], Imported]
    entries: Entries
    listed: Callable[[Mapping[str, str], str], Sequence[str]] = _nothing_listed
    scaling: str = ""

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names of all tensors of a module."""
        return (*self.markers, *self.others)
