"""Layouts read from text: `parse_layout` reads what str(layout) writes."""

from __future__ import annotations

import ast
from functools import lru_cache
from typing import Any

from lowbit.dialect.errors import LayoutError
from lowbit.dialect.layouts.layout import Layout, column_local, column_spatial, local, replicated, spatial

_ATOMS = {make.__name__: make for make in (local, spatial, column_local, column_spatial, replicated)}


@lru_cache(maxsize=4096)
def parse_layout(text: str) -> Layout:
    """Returns the layout that a text writes: str(layout), or any product of atoms joined with dots. Raises LayoutError
    for any other text."""
    try:
        return _evaluate(ast.parse(text.strip(), mode="eval").body)
    except LayoutError:
        raise
    except (SyntaxError, ValueError, TypeError, KeyError):
        raise LayoutError(f"cannot read {text!r} as a layout like 'local(2, 1).spatial(8, 4)'") from None


def _evaluate(node: ast.expr) -> Layout:
    if not isinstance(node, ast.Call):
        raise LayoutError(f"a layout is written as calls joined with dots, not {ast.unparse(node)!r}")
    args: list[Any] = [ast.literal_eval(arg) for arg in node.args]
    named: dict[str, Any] = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
    match node.func:
        case ast.Name("layout"):
            return Layout(named["shape"], named["modes"], named["spatial"], named["local"])
        case ast.Name(name) if name in _ATOMS:
            return _ATOMS[name](*args, **named)
        case ast.Attribute(outer, name) if name in _ATOMS:
            return getattr(_evaluate(outer), name)(*args)
        case _:
            raise LayoutError(f"no layout {ast.unparse(node.func)!r}; there are layout, {', '.join(_ATOMS)}")
