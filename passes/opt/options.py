"""Options of a pass, as text: `--select-schedule=tokens=8,num_stages=3` fills the fields of the pass's dataclass.

A field may be an int, float, bool, str, Literal of strings, `Target`, one of these or None, or a dataclass of
such fields, whose names are then options of the pass. A name that both have sets both.
"""

from __future__ import annotations

import re
import types
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from lowbit.dialect.errors import LowbitError, PassError
from lowbit.passes.target import Target
from lowbit.passes.targets import parse_target

P = TypeVar("P")
_SEPARATOR = re.compile(r"[,\s]+")
_BOOLS = {"true": True, "1": True, "false": False, "0": False}


@dataclass(frozen=True)
class Option:
    """One option: of the pass itself (`own`), of the dataclass that is its field `parent`, or of both."""

    name: str
    type: Any
    default: Any
    own: bool
    parent: str | None = None

    def __str__(self) -> str:
        default = "" if self.default is MISSING else f" = {_spell(self.default)}"
        return f"{self.name}: {_describe(self.type)}{default}"

    def parse(self, text: str) -> Any:
        return _convert(self.type, text)


@cache
def options(cls: type) -> dict[str, Option]:
    """The options of a pass by name, nested ones included."""
    found: dict[str, Option] = {}
    for name, kind, default in _fields(cls):
        nested = next((t for t in _alternatives(kind) if _is_nested(t)), None)
        if nested is None:
            parent = found[name].parent if name in found else None
            found[name] = Option(name, kind, default, own=True, parent=parent)
            continue
        for inner, inner_kind, inner_default in _fields(nested):
            option = found.get(inner) or Option(inner, inner_kind, inner_default, own=False)
            found[inner] = replace(option, parent=name)
    return found


def from_text(cls: type[P], text: str, flag: str) -> P:
    """A pass, or any dataclass, with options such as "tokens=8,num_stages=3".

    Commas or spaces separate; a-b stands for a_b, a bare name for true. Raises PassError, which speaks of
    `flag`, for an unknown or missing option or a value that does not fit.
    """
    known = options(cls)
    flat: dict[str, Any] = {}
    nested: dict[str, dict[str, Any]] = {}
    seen: set[str] = set()
    for item in filter(None, _SEPARATOR.split(text)):
        key, _, value = item.partition("=")
        option = known.get(key.replace("-", "_"))
        if option is None:
            allowed = ", ".join(known) or "none"
            raise PassError(f"{flag}: unknown option {key!r}; allowed: {allowed}")
        if option.name in seen:
            raise PassError(f"{flag}: {key!r} is given twice; give it once")
        seen.add(option.name)
        try:
            parsed = option.parse(value if "=" in item else "true")
        except ValueError as error:
            reason = str(error) if isinstance(error, LowbitError) else f"must be {_describe(option.type)}"
            raise PassError(f"{flag}: {key}={value} {reason}") from None
        if option.own:
            flat[option.name] = parsed
        if option.parent:
            nested.setdefault(option.parent, {})[option.name] = parsed
    for parent, values in nested.items():
        if all(known[name].own for name in values):
            continue  # nothing is said about this dataclass in particular
        kind = next(kind for field, kind, _ in _fields(cls) if field == parent)
        flat[parent] = next(t for t in _alternatives(kind) if _is_nested(t))(**values)
    missing = [field for field, _, default in _fields(cls) if default is MISSING and field not in flat]
    if missing:
        raise PassError(f"{flag} needs {', '.join(missing)}; write {flag}={missing[0]}=...")
    return cls(**flat)


def _fields(cls: Any) -> Iterator[tuple[str, Any, Any]]:
    """Name, type and default (or MISSING) of the fields of a dataclass."""
    hints = get_type_hints(cls)
    for field in fields(cls):
        if field.init:
            default = field.default_factory() if field.default_factory is not MISSING else field.default
            yield field.name, hints[field.name], default


def _alternatives(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _is_nested(kind: Any) -> bool:
    return kind is not Target and is_dataclass(kind)


def _convert(kind: Any, text: str) -> Any:
    """Text to a value of a type; ValueError if it is none."""
    alternatives = _alternatives(kind)
    if type(None) in alternatives and text in ("", "none"):
        return None
    for t in alternatives:
        if t is bool:
            if text.lower() not in _BOOLS:
                raise ValueError(text)
            return _BOOLS[text.lower()]
        if t is Target:
            return parse_target(text)
        if get_origin(t) is Literal:
            if text not in get_args(t):
                raise ValueError(text)
            return text
        if t in (int, float, str):
            return t(text)
    raise ValueError(text)


def _describe(kind: Any) -> str:
    """A type as a user reads it: int, true|false, u8|f16, none."""
    parts: list[str] = []
    for t in _alternatives(kind):
        if t is bool:
            parts.append("true|false")
        elif t is type(None):
            parts.append("none")
        elif get_origin(t) is Literal:
            parts.append("|".join(map(str, get_args(t))))
        else:
            parts.append(str(getattr(t, "__name__", t)).lower())
    return "|".join(parts)


def _spell(value: Any) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
