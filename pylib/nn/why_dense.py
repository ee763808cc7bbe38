"""Why a module of a model stays dense, and which option would have it quantized."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


def as_argument(option: str) -> str:
    """Returns how a caller of `lowbit.quantize_` spells an option; the command line has another way."""
    return f"{option}=True"


@dataclass(frozen=True)
class Reason:
    """Why a module stays dense; false where nothing speaks against quantizing it.

    text     the reason in words
    option   the argument of `lowbit.quantize_` that would have the module quantized; "" if there is none
    """

    text: str = ""
    option: str = ""

    def __bool__(self) -> bool:
        return bool(self.text)

    def __str__(self) -> str:
        return self.spelled(as_argument)

    def spelled(self, spelling: Callable[[str], str]) -> str:
        """Returns the text, and the option as `spelling` writes it."""
        return f"{self.text}; {spelling(self.option)} quantizes it" if self.option else self.text


NO_REASON = Reason()
