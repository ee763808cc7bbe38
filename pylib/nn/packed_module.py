"""`PackedModule`: a module whose weight is packed in low-bit codes, whatever it does with it.

The tensors of the packed weight are buffers with the names of `spec.tensors`: codes, scales, zeros, bias. There is no
dense weight in memory: `module.weight` is dequantized where its values are used. The spec travels in the state
dictionary as extra state.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from lowbit.dialect.errors import PackError, SpecError
from lowbit.dialect.spec import MatmulSpec, interned
from lowbit.dialect.weight import TensorSlot
from lowbit.passes.targets import parse_target
from lowbit.pylib.matmul import Matmul, compile
from lowbit.pylib.nn.changes import note_change
from lowbit.pylib.nn.dense_weight import DenseWeight, NoDense
from lowbit.pylib.operator.constants import constant
from lowbit.pylib.operator.schema import describe
from lowbit.pylib.runtime.batch_invariant import MODE, invariant_text
from lowbit.pylib.runtime.devices import target_at
from lowbit.pylib.torch_types import TORCH, stored_type
from lowbit.pylib.weights import saved as saved_weight
from lowbit.pylib.weights import written
from lowbit.pylib.weights.packed import PackedWeight

_CAST = (torch.float32, torch.float16, torch.bfloat16)
EXTRA_STATE = "_extra_state"  # torch's name for it in a state dictionary


class PackedModule(NoDense):
    """Holds the tensors of a packed weight: moves, copies, saves, loads and checks them, and multiplies by them.

    spec   what the weight is, and what a matmul with it computes
    """

    spec: MatmulSpec
    codes: Tensor
    _slots: tuple[str, ...] = ()
    _last_packed: PackedWeight | None
    _last_matmul: tuple[torch.device, Matmul] | None
    _noted: tuple[Tensor, written.Note | None] | None = None  # the codes, and what they were

    def __init__(self, spec: MatmulSpec, tensors: Mapping[str, Tensor]) -> None:
        _check_spec(spec)
        nn.Module.__init__(self)  # that of nn.Linear would allocate a dense weight
        self.register_parameter("weight", None)
        self._hold(spec, tensors)

    def _hold(self, spec: MatmulSpec, tensors: Mapping[str, Tensor]) -> None:
        """Take a weight's tensors for buffers."""
        self.spec = interned(spec)
        self._act = TORCH[spec.act]
        self._spec_text = _written(self.spec)  # torch.compile takes no spec as a constant
        for name in self._slots:  # others may have added buffers of their own
            self._buffers.pop(name, None)
        self._slots = tuple(slot.name for slot in spec.tensors)
        for slot in spec.tensors:
            self.register_buffer(slot.name, tensors[slot.name])
        self._last_matmul = None
        self._forget()

    def _forget(self) -> None:
        """Forget what was made of the buffers: they are others now."""
        self._last_packed = None

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in ("spec", "forward"):
            note_change()

    @classmethod
    def empty(cls, spec: MatmulSpec, device: torch.device | str | None = None) -> Self:
        """Returns a module of zeros to load a state dictionary into; on "meta" it takes no memory, and is loaded with
        `assign=True`."""
        _check_spec(spec)
        return cls(spec, {s.name: _zeros(s, device) for s in spec.tensors})

    @property
    def packed(self) -> PackedWeight:
        """The weight as `PackedWeight`, which shares the buffers."""
        buffers: dict[str, Any] = self._buffers  # nn.Module's search for attributes takes as long as all the rest
        tensors = {name: buffers[name] if name in buffers else getattr(self, name) for name in self._slots}
        self.check_unwritten()
        last = self._last_packed
        if last is None or any(a is not b for a, b in zip(last.tensors, tensors.values())):
            last = self._last_packed = PackedWeight(self.spec, tensors)
        return last

    def check_unwritten(self) -> None:
        """Raise PackError if somebody has written to the codes: averaged them, say. `check` takes codes as they are."""
        codes, last = self.codes, self._noted
        if last is None or last[0] is not codes:
            last = self._noted = codes, written.noted(codes)
        if last[1] is not None:
            last[1].check(codes)

    @property
    def matmul(self) -> Matmul:
        """The matmul for the device of the buffers, which is compiled when it is first needed."""
        device = self.codes.device
        last = self._last_matmul
        if last is None or last[0] != device:
            last = self._last_matmul = device, compile(self.spec, target_at(_index(device)))
        return last[1]

    def multiply(self, x: Tensor) -> Tensor:
        """Returns x W^T [..., n], and the bias added if there is one, for x [..., k] in the act type; under
        `torch.autocast` in any of its types."""
        x = autocast(x, self._act)
        if is_compiling() or MODE.on:  # a graph holds the matmul as text; the operator checks x when the graph runs
            return torch.ops.lowbit.matmul.packed(x, *self.operands())
        return self.matmul(x, self.packed)

    def dequantize(self) -> Tensor:
        """Returns the weight [n, k] in the act type."""
        if is_compiling():
            return torch.ops.lowbit.dequantize(*self.operands())
        return self.matmul.dequantize(self.packed)

    @property
    def weight(self) -> Tensor:
        """The weight [n, k] in the act type, for code that reads it: it takes no memory until its values are used."""
        placed = self._parameters.get("weight")
        placed = self._buffers.get("weight") if placed is None else placed
        if placed is not None:  # a dense one that others have put here
            return placed
        if is_compiling():
            return self.dequantize()
        return DenseWeight((self.spec.n, self.spec.k), self._act, self.codes.device, self.dequantize)

    def share(self, name: str, tensor: Tensor) -> None:
        """Take a tensor of the same values, such as a slice of another, in place of the one of this name."""
        self._buffers[name] = tensor
        if name == "codes":
            self._move_note()
        self._forget()

    def operands(self) -> tuple[list[Tensor], str]:
        """Returns what a graph holds of the weight and the matmul: tensors, and the matmul as text, that of equal bits
        within `lowbit.batch_invariant`."""
        tensors = [getattr(self, name) for name in self._slots]
        text = invariant_text(self._spec_text) if MODE.on else self._spec_text
        return tensors, _description(text, _index(self.codes.device), self.codes)

    def check(self) -> None:
        """Check buffers that were set one by one as those of a file are checked, and lay them out for kernels.

        Raises PackError for a shape, a type or a value that kernels can't read. Buffers on meta are left alone.
        """
        tensors: dict[str, Tensor] = {name: getattr(self, name) for name in self._slots}
        if any(tensor.is_meta for tensor in tensors.values()):
            return
        self._buffers.update(saved_weight.checked(self.spec, self.spec.tensors, tensors))
        self._noted = self.codes, written.note(self.codes)
        self._forget()

    def reset_parameters(self) -> None:
        """Does nothing: there are no parameters, and a packed weight has no random start."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the buffers and keep their types; what others have added to the module goes torch's way."""
        moved = {name: buffer if buffer is None else moved_bytes(buffer, fn) for name, buffer in self._buffers.items()}
        self._buffers.clear()
        try:
            super()._apply(fn, recurse)
        finally:
            self._buffers.update(moved)
        self._move_note()
        self._forget()
        return self

    def _move_note(self) -> None:
        """Take what was noted of the codes for the codes as they are now, in another place."""
        if self._noted is not None and self._noted[1] is not None:
            self._noted = self.codes, written.note_moved(self.codes, self._noted[1])

    # -- saving and loading

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Save codes only as they were packed: what loads them has nothing to compare them with."""
        self.check_unwritten()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def get_extra_state(self) -> Tensor:
        """Returns the spec as JSON in bytes, which every format of files can hold."""
        return saved_weight.write_spec(self.spec)

    def set_extra_state(self, state: Tensor) -> None:
        """Does nothing: the state has been compared with the spec by `_load_from_state_dict`."""

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, strict: bool, *rest: Any
    ) -> None:
        """Check tensors as kernels will read them before torch copies or assigns them."""
        error_msgs: list[str] = rest[2]
        try:
            self._check_state(state_dict, prefix)
        except PackError as error:
            error_msgs.append(f"{prefix.removesuffix('.') or 'the layer'}: {error}")
            return
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *rest)
        if f"{prefix}codes" in state_dict:
            self._noted = self.codes, written.note(self.codes)
        self._forget()

    def _check_state(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Put checked tensors into a state dictionary. Raises PackError for those of a weight with another spec."""
        if prefix + EXTRA_STATE not in state_dict:
            self._check_nothing_given(state_dict, prefix)
            return
        about, names = state_dict[prefix + EXTRA_STATE], self._names_in(state_dict, prefix)
        if not names:  # torch says which are missing
            saved_weight.check_spec(about, self.spec)
            return
        tensors = {name: state_dict[prefix + name] for name in names}
        _, checked = saved_weight.read({**tensors, saved_weight.SPEC: about}, self.spec)
        for name in names:
            del state_dict[prefix + name]
        state_dict.update({prefix + name: tensor for name, tensor in checked.items()})
        self._make_room(checked)

    def _check_nothing_given(self, state_dict: Mapping[str, Any], prefix: str) -> None:
        """Raise PackError for tensors in a state dictionary that does not say what they are. A bias is always one."""
        slots = {slot.name for slot in (*self.spec.tensors, *self.spec.given_tensors)} - {"bias"}
        if given := sorted(name for name in slots if prefix + name in state_dict):
            raise PackError(
                f"the state dictionary has {', '.join(given)}, and not {EXTRA_STATE}, which says what they are; load "
                "all that state_dict() gave, or drop them"
            )

    def _names_in(self, state_dict: Mapping[str, Any], prefix: str) -> list[str]:
        """Returns the names of the weight's tensors in a state dictionary, today's or those of earlier formats; none if
        one is missing."""
        for slots in (self.spec.tensors, self.spec.given_tensors):
            if all(prefix + slot.name in state_dict for slot in slots):
                return [slot.name for slot in slots]
        return []

    def _make_room(self, tensors: Mapping[str, Tensor]) -> None:
        """Gives buffers of a free length that of the tensors which torch is about to copy into them."""
        for slot in self.spec.tensors:
            buffer, shape = getattr(self, slot.name), tensors[slot.name].shape
            if buffer.shape != shape:
                setattr(self, slot.name, buffer.new_empty(shape))

    def __getstate__(self) -> dict[str, Any]:
        """Returns what a copy is made of, which knows the codes: moving averages write to copies."""
        self.check_unwritten()
        return {**self.__dict__, "_last_packed": None, "_last_matmul": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.spec = interned(self.spec)
        self._move_note()


def autocast(x: Tensor, act: torch.dtype) -> Tensor:
    """Returns x in the act type where autocast is on, which casts the inputs of nn.Linear, too."""
    if isinstance(x, Tensor) and x.dtype is not act and x.dtype in _CAST and torch.is_autocast_enabled(x.device.type):
        return x.to(act)
    return x


def check_model(model: object) -> None:
    """Raise SpecError for a model that is none."""
    if not isinstance(model, nn.Module):
        raise SpecError(f"the model must be an nn.Module, not {type(model).__name__}")


@lru_cache(maxsize=256)
def _written(spec: MatmulSpec) -> str:
    """Returns a spec as JSON: thousands of experts share a few."""
    return json.dumps(spec.to_dict())


def _check_spec(spec: object) -> None:
    if not isinstance(spec, MatmulSpec):
        example = "MatmulSpec(n=64, k=256, weight='u4')"
        raise SpecError(f"spec={spec!r} must be a MatmulSpec, such as {example}; or use LowbitLinear.from_linear")


def _zeros(slot: TensorSlot, device: torch.device | str | None) -> Tensor:
    """Returns a tensor of zeros for a slot; of outliers, as few as there can be."""
    return torch.zeros(slot.least_shape, dtype=stored_type(slot.storage), device=device)


def moved_bytes(buffer: Tensor, fn: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns a buffer where `fn` moves it to, in its own type: torch converts floats only, so it gets to see bytes."""
    as_bytes = buffer.view(torch.uint8)
    moved = fn(as_bytes)
    if moved.dtype is not torch.uint8:
        moved = as_bytes.to(moved.device)
    return buffer if moved is as_bytes else moved.view(buffer.dtype)


def _index(device: torch.device) -> int:
    """Returns the number of a GPU as `target_at` takes it; -1 for what is none."""
    return device.index if device.type == "cuda" else -1


@constant
def _description(spec: str, device: int, codes: Tensor) -> str:
    """Returns the matmul of a spec, given as JSON, as text: a constant to torch.compile. Notes codes that are about to
    be traced: the operator checks them when they were written to."""
    written.noted(codes)
    return _text(spec, target_at(device))


@lru_cache(maxsize=256)
def _text(spec: str, target: str) -> str:
    """Returns the same for a target. Nothing is compiled: a graph may be made while kernels still are."""
    return describe(interned(MatmulSpec.from_dict(json.loads(spec))), parse_target(target), None)
