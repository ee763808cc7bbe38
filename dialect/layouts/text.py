"""Layouts written as products of atoms, such as `local(2, 1).spatial(8, 4)`; `dialect.layouts.parse` reads them."""

from __future__ import annotations

from collections.abc import Iterable

from lowbit.dialect.layouts.mixed_radix import Mode


def product_of_atoms(rank: int, local: Iterable[Mode], spatial: Iterable[Mode]) -> str | None:
    """Returns the layout with these digits of the slot and of the thread as a product; None when it is no product.

    Atoms are taken off from the inside out, from the digits of the slot and of the thread in turn.
    """
    atoms: list[str] = []
    strides = [1] * rank  # of the innermost mode of every dim that is not yet taken off
    digits = {"local": list(local), "spatial": list(spatial)}
    while any(digits.values()):
        taken = [atom for name, modes in digits.items() for atom in _take_off(name, modes, strides)]
        if not taken:
            return None
        atoms += taken
    if not atoms:
        return f"local({', '.join('1' * rank)})"
    if atoms[-1].startswith("replicated"):  # nothing stands before it that says the rank
        atoms[-1] = f"{atoms[-1][:-1]}, rank={rank})"
    return ".".join(reversed(atoms))


def _take_off(name: str, modes: list[Mode], strides: list[int]) -> list[str]:
    """Removes the innermost replication digits and the innermost atom from modes; returns them, the innermost first."""
    atoms: list[str] = []
    while modes and modes[-1].dim < 0:
        atoms.append(f"replicated({modes.pop().size})")
    dims: list[int] = []
    shape = [1] * len(strides)
    # Rising dims are a column-major atom, falling ones a row-major atom; a turn starts the next atom.
    while modes and modes[-1].stride == strides[modes[-1].dim] and _monotone([*dims, modes[-1].dim]):
        size, dim, _ = modes.pop()
        dims.append(dim)
        shape[dim] = size
        strides[dim] *= size
    if dims:
        order = "column_" if dims[0] < dims[-1] else ""
        atoms.append(f"{order}{name}({', '.join(map(str, shape))})")
    return atoms


def _monotone(dims: list[int]) -> bool:
    return dims in (sorted(set(dims)), sorted(set(dims), reverse=True))
