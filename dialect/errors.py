"""Every error a user can meet. Messages name what was given, what is allowed, and the fix."""

from typing import Any


class LowbitError(ValueError):
    """Base class: catch this to catch everything lowbit reports about its input."""

    location: Any = None
    """Where in the IR, an MLIR location, if the input is IR and the place is known."""


class SpecError(LowbitError):
    """A `MatmulSpec`, format name or schedule that does not describe a matmul, or a `TensorMap` that cannot be."""


class PackError(LowbitError):
    """Codes, scales, zeros or bias that do not fit their spec; or a packed weight of another spec."""


class LayoutError(LowbitError):
    """A layout operation without an answer (a division that does not divide, say)."""


class PassError(LowbitError):
    """IR that a pass cannot lower; says which operation."""


class TargetError(LowbitError):
    """A target that does not exist, cannot run here, or lacks an installed tool."""


class EmulatorError(LowbitError):
    """PTX that is wrong or unknown to the emulator; says which line."""
