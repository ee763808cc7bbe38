"""Every error a user can meet. Messages name what was given, what is allowed, and the fix."""

from typing import Any


def reason(error: Exception) -> str:
    """Returns what a command prints for an error: of the system's, the file and the reason without the number."""
    if isinstance(error, UnicodeDecodeError):
        return f"the input is not UTF-8 text ({error.reason} at byte {error.start})"
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


class LowbitError(ValueError):
    """Base class: catch this to catch everything lowbit reports about its input."""

    location: Any = None
    """Where in the IR, an MLIR location, if the input is IR and the place is known."""


class SpecError(LowbitError):
    """A `MatmulSpec`, format name or schedule that does not describe a matmul, or a `TensorMap` that cannot be."""


class PackError(LowbitError):
    """Codes, scales, zeros or bias that do not fit their spec; or a packed weight of another spec."""


class QuantizeError(LowbitError):
    """A weight that cannot be quantized, or calibration data that do not fit it."""


class CheckpointError(LowbitError):
    """A checkpoint that is damaged, contradicts itself, does not fit the model, or is of an unknown format."""


class LayoutError(LowbitError):
    """A layout operation without an answer (a division that does not divide, say)."""


class PassError(LowbitError):
    """IR that a pass cannot lower; says which operation."""


class TargetError(LowbitError):
    """A target that does not exist, cannot run here, or lacks an installed tool."""


class EmulatorError(LowbitError):
    """PTX that is wrong or unknown to the emulator; says which line."""
