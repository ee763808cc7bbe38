"""The dense tensors of a checkpoint, for the places that they have in a model.

transformers converts some tensors as it loads them: the matrices of all experts, which have names of their own in
files, become one. Its conversions are applied here as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.dialect.errors import CheckpointError
from lowbit.pylib.checkpoints.checkpoint import OF_ACTIVATIONS, Checkpoint, check_dense, matches
from lowbit.pylib.checkpoints.layers import home
from lowbit.pylib.checkpoints.names import Names
from lowbit.pylib.torch_types import type_name


@dataclass
class _Source:
    """What one or several tensors of a model are made of.

    targets      their names in the model
    conversion   that of transformers; None: the only tensor is taken as it is
    parts        the tensors of the checkpoint, each with the pattern by which the conversion knows it
    """

    targets: list[str]
    conversion: Any
    parts: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])


@dataclass(frozen=True)
class Dense:
    """Reads the dense tensors of a checkpoint. Methods raise CheckpointError where they don't fit the model.

    wanted   the tensors of the model by name, without those of modules that are replaced
    device   where to load; None: where the model's own tensors are
    """

    model: nn.Module
    checkpoint: Checkpoint
    names: Names
    wanted: Mapping[str, Tensor]
    device: torch.device | str | None

    def tensors(self, ignore: Sequence[str]) -> dict[str, Tensor]:
        """Returns the tensors to assign, where tied ones are one object, after a look at names and shapes.

        ignore   patterns of names of tensors that are left out
        """
        given = [name for name in self.checkpoint.dense if not matches(name, ignore)]
        check_dense(self.checkpoint, (name for name in given if not self.names.is_ignored(name)))
        sources = self._sources(given)
        here = {target: source for source in sources for target in source.targets}
        tied = {id(t) for name in here if (t := self.wanted.get(name)) is not None}
        self._check_missing(tied)
        read = {id(self.wanted[name]): t for source in sources for name, t in self._read(source)}
        return {name: read[id(t)] for name, t in self.wanted.items() if id(t) in tied}

    def _sources(self, given: Sequence[str]) -> list[_Source]:
        """Returns what the model's tensors are made of. Raises CheckpointError for a tensor that is left over."""
        found: dict[str, _Source] = {}
        left_over: list[str] = []
        for name in given:
            targets, pattern, conversion = self._conversion(name)
            if any(target in self.wanted for target in targets):
                found.setdefault(targets[0], _Source(targets, conversion)).parts.append((pattern, name))
            elif not self._may_be_left(name):
                left_over.append(name)
        if left_over:
            has = f"{self.checkpoint.tensors.folder} has {_some(left_over)}"
            raise CheckpointError(f"{has}, which the model has not; ignore= leaves tensors out")
        return list(found.values())

    def _conversion(self, name: str) -> tuple[list[str], str, Any]:
        """Returns how a tensor is converted; as it is, if the model has one of this name."""
        here = self.names.tensor(name)
        return ([here], "", None) if here in self.wanted else self.names.conversion(name)

    def _may_be_left(self, name: str) -> bool:
        """Tells whether a tensor is one that transformers leaves out, or is of another library's 8-bit activations."""
        of_activations = OF_ACTIVATIONS.fullmatch(name.rpartition(".")[2])
        return self.names.is_ignored(name) or bool(self.checkpoint.format and of_activations)

    def _check_missing(self, tied: set[int]) -> None:
        missing = [name for name, t in self.wanted.items() if id(t) not in tied]
        needed = [name for name in missing if self.wanted[name].is_meta or not self.names.is_made(name)]
        if needed:
            raise CheckpointError(f"{self.checkpoint.tensors.folder} has no {_some(needed)}, which the model needs")

    # -- reading

    def _read(self, source: _Source) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors of the model that a source makes, by their names."""
        files = self.checkpoint.tensors
        if source.conversion is None:
            (_, name), (here,) = source.parts[0], source.targets
            yield here, self._placed(files[name], here, name)
            return
        for here, t in self._converted(source).items():
            if here in self.wanted:
                yield here, self._placed(t, here, source.parts[0][1])

    def _converted(self, source: _Source) -> dict[str, Tensor]:
        conversion, files, model = deepcopy(source.conversion), self.checkpoint.tensors, self.model
        for pattern, name in sorted(source.parts, key=lambda part: _natural(part[1])):
            conversion.add_tensor(source.targets[0], name, pattern, lambda name=name: files[name])
        try:
            made = conversion.convert(source.targets[0], model=model, config=getattr(model, "config", None))
        except (RuntimeError, ValueError, KeyError) as error:
            first = source.parts[0][1]
            raise CheckpointError(f"{files.path(first)}: {first} and others can't be converted: {error}") from error
        return {name: t[0] if isinstance(t, list) else t for name, t in made.items()}

    def _placed(self, t: Tensor, here: str, name: str) -> Tensor:
        """Returns a tensor for the place of one of the model. name: what errors call it, in the checkpoint."""
        old = self.wanted[here]
        if t.shape != old.shape or t.is_floating_point() != old.is_floating_point():
            given, needed = (f"{type_name(x.dtype)} {list(x.shape)}" for x in (t, old))
            path = self.checkpoint.tensors.path(name)
            raise CheckpointError(f"{path}: {name} is {given}, but {needed} in the model")
        moved = t.to(self.device or home(old))
        if moved is t and self.checkpoint.format is not None:
            moved = t.clone()  # which keeps no file in memory, of which all else has been unpacked
        return nn.Parameter(moved, old.requires_grad) if isinstance(old, nn.Parameter) else moved


def _natural(name: str) -> list[tuple[int, str]]:
    """Returns a key to sort names by, in which numbers count as such: expert 2 comes before expert 10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split(".")]


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
