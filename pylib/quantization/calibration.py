"""Statistics of the inputs of a layer, for calibrated methods: sums over tokens, whose size does not depend on how
many."""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.dialect.errors import QuantizeError

LEAST = 0.01  # of the mean importance, which every column has at least


class Calibration:
    """Second moments of a layer's inputs.

        calibration = Calibration(k)
        for x in batches:            # [..., k]
            calibration.add(x)

    Layers before this one may be quantized already. Then x are the inputs in the quantized model, and `reference` those
    of the same tokens in the float model; methods that can will make up for the difference.

    hessian     [k, k] in f64: the sum of x^T x, half the Hessian of the layer's squared output error; with
                only_importance=True [k], its diagonal alone, which takes little memory and time
    cross       [k, k] in f64: the sum of x^T reference; None if there was no reference
    magnitude   [k]: the mean of |x|
    tokens      how many rows of x were added
    """

    def __init__(self, k: int, device: torch.device | str = "cpu", only_importance: bool = False) -> None:
        self.hessian = torch.zeros(k if only_importance else (k, k), dtype=torch.float64, device=device)
        self.cross: Tensor | None = None
        self.tokens = 0
        self._summed_elsewhere = False
        self._absolute = torch.zeros(k, dtype=torch.float64, device=device)

    @property
    def k(self) -> int:
        """Columns of x."""
        return self.hessian.shape[0]

    @property
    def magnitude(self) -> Tensor:
        """[k]: the mean of |x|, over all tokens."""
        return self._absolute / max(self.tokens, 1)

    @property
    def only_importance(self) -> bool:
        """Whether only the diagonal of the Hessian is summed."""
        return self.hessian.ndim == 1

    @property
    def importance(self) -> Tensor:
        """[k] in f32: how much a squared error of each column counts: the mean of x^2, relative to its mean over the
        columns, of which a hundredth is added for columns that inputs do not reach. Ones where all are 0."""
        squares = self.hessian if self.only_importance else self.hessian.diagonal()
        mean = squares.mean()
        return (squares / mean + LEAST).float() if float(mean) > 0 else torch.ones_like(squares, dtype=torch.float32)

    @property
    def is_short(self) -> bool:
        """Whether there are fewer tokens than columns: the rank of `hessian` is at most the number of tokens."""
        return self.tokens < self.k and not self._summed_elsewhere and not self.only_importance

    def add(self, x: Tensor, reference: Tensor | None = None) -> None:
        """Count inputs [..., k], and those of the float model where they differ."""
        rows = self._rows("x", x)
        if (reference is None) != (self.cross is None) and self.tokens:
            raise QuantizeError("reference= must be given for all inputs of a calibration or for none")
        if reference is not None and self.only_importance:
            raise QuantizeError("reference= needs the Hessian; drop it, or only_importance=True")
        if reference is not None:
            others = self._rows("reference", reference)
            if others.shape != rows.shape:
                raise QuantizeError(f"reference must be of x's tokens: {list(x.shape)}, not {list(reference.shape)}")
            cross = (rows.T @ others).double()
            self.cross = cross if self.cross is None else self.cross + cross
        self.hessian += rows.double().square_().sum(0) if self.only_importance else (rows.T @ rows).double()
        self._absolute += rows.abs().sum(0).double()
        self.tokens += len(rows)

    def _rows(self, name: str, x: object) -> Tensor:
        """Returns inputs as [tokens, k] in f32."""
        if not isinstance(x, Tensor) or not x.is_floating_point():
            given = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise QuantizeError(f"{name} must be a tensor of floats [..., k={self.k}], not {given}")
        if x.ndim == 0 or x.shape[-1] != self.k:
            raise QuantizeError(f"{name} must be [..., k={self.k}], not {list(x.shape)}; give inputs of this layer")
        rows = x.detach().to(self.hessian.device).reshape(-1, self.k).float()
        if not bool(rows.isfinite().all()):
            token = int((~rows.isfinite()).any(1).nonzero()[0])
            raise QuantizeError(f"{name} has NaN or inf in token {token}; drop it, or compute inputs in bf16 or f32")
        return rows

    @classmethod
    def from_hessian(cls, hessian: Tensor) -> Calibration:
        """Returns the calibration of a symmetric matrix [k, k] that was summed elsewhere; only ratios matter."""
        k = hessian.shape[-1]
        if list(hessian.shape) != [k, k] or not bool(hessian.isfinite().all()):
            raise QuantizeError(f"a Hessian must be a finite matrix [k, k], not {list(hessian.shape)}")
        calibration = cls(k, hessian.device)
        calibration.hessian += hessian.double()
        calibration._absolute += hessian.diagonal().double().clamp(min=0).sqrt()
        calibration.tokens = 1
        calibration._summed_elsewhere = True
        return calibration

    @classmethod
    def from_importance(cls, importance: Tensor) -> Calibration:
        """Returns the calibration of importances [k] that were found elsewhere, such as those of an importance matrix
        (the sums of x^2 of each column); only ratios matter."""
        if importance.ndim != 1 or not bool((importance.isfinite() & (importance >= 0)).all()):
            raise QuantizeError(f"importances must be finite numbers [k], none below 0, not {list(importance.shape)}")
        calibration = cls(len(importance), importance.device, only_importance=True)
        calibration.hessian += importance.double()
        calibration._absolute += importance.double().sqrt()
        calibration.tokens = 1
        return calibration

    @classmethod
    def of(cls, given: object, k: int, device: torch.device) -> Calibration:
        """Returns inputs [..., k], a symmetric [k, k] (a Hessian) or a Calibration as a Calibration on a device."""
        if isinstance(given, Calibration):
            return given._checked(k).to(device)
        if isinstance(given, Tensor) and list(given.shape) == [k, k] and torch.equal(given, given.T):
            return cls.from_hessian(given.to(device))
        calibration = cls(k, device)
        calibration.add(given)  # type: ignore[arg-type]
        return calibration._checked(k)

    def to(self, device: torch.device) -> Calibration:
        """Returns the same sums on another device; self if they are there already."""
        if self.hessian.device == device:
            return self
        moved = Calibration(self.k, device, self.only_importance)
        moved.hessian, moved._absolute = self.hessian.to(device), self._absolute.to(device)
        moved.cross, moved.tokens = None if self.cross is None else self.cross.to(device), self.tokens
        moved._summed_elsewhere = self._summed_elsewhere
        return moved

    def divided(self, scales: Tensor) -> Calibration:
        """Returns the sums of inputs that are divided by scales [k]."""
        by = scales.double()
        result = Calibration(self.k, self.hessian.device)
        result.hessian, result._absolute = self.hessian / by[:, None] / by, self._absolute / by
        result.cross = None if self.cross is None else self.cross / by[:, None]
        result.tokens, result._summed_elsewhere = self.tokens, self._summed_elsewhere
        return result

    def _checked(self, k: int) -> Calibration:
        if self.k != k:
            raise QuantizeError(f"the calibration is of inputs [..., {self.k}], but the weight has k={k} columns")
        if not self.tokens:
            raise QuantizeError("the calibration has no tokens; add inputs of the layer before quantizing")
        return self


def output_errors(error: Tensor, hessian: Tensor) -> Tensor:
    """Returns E H E^T of each row of a weight's error [rows, k]: its squared output error over the calibration."""
    return ((error @ hessian) * error).sum(1)
