"""How to start a compiled kernel: its name, its parameters and what they are for, its grid, and what it needs of the
GPU. With its code this is all that a caller in any language needs. No MLIR here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from lowbit.dialect.errors import SpecError
from lowbit.dialect.signature import PARAM_TYPES, WORKSPACE, Grid, Param, check_blocks, parse_grid

COUNTERS = 16384
"""Words of i32 at the beginning of a workspace that count blocks."""


Role = Literal["input", "output", "weight", "rows", "workspace"]
"""What an argument is: an activation, or a weight's tensor before it is packed; what the kernel writes; a tensor of the
packed weight; the rows of x; or memory that kernels share."""


@dataclass(frozen=True)
class Launch:
    """All that a runtime must know of a kernel, besides its code.

    grid              extents, which may depend on the arguments and on the GPU
    threads           per block
    shared_bytes      of dynamic shared memory per block
    params            in the order of the kernel's signature
    workspace_bytes   of memory that kernels share: its first `COUNTERS` words are zero before every launch and after
                      it, and the rest is what the launch before, of whatever kernel, left
    may_overlap       whether it may start before the kernel in front of it has ended: it then waits (griddepcontrol)
                      before it touches anything but tensors of the weight
    boxes             rows and columns of x that one instruction copies, by the parameter that takes a tensor map of x
                      with such boxes; in shared memory they are swizzled over their rows
    roles             what the arguments are, by parameter; none for a program of one's own
    """

    name: str
    grid: Grid
    threads: int
    shared_bytes: int
    params: tuple[Param, ...]
    workspace_bytes: int = 0
    may_overlap: bool = False
    boxes: Mapping[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]], hash=False)
    roles: Mapping[str, Role] = field(default_factory=dict[str, Role], hash=False)

    @property
    def arguments(self) -> tuple[Param, ...]:
        """The parameters that a caller gives: all but the workspace, which the runtime provides."""
        return tuple(p for p in self.params if not (self.workspace_bytes and p.name == WORKSPACE))

    def check_names(self, given: Iterable[str]) -> None:
        """Raises SpecError unless `given` are the names of the arguments, in any order."""
        wanted, names = [p.name for p in self.arguments], list(given)
        unknown = [name for name in names if name not in wanted]
        missing = [name for name in wanted if name not in names]
        if unknown or missing:
            faults = [f"without {', '.join(missing)}"] * bool(missing) + [f"with {', '.join(unknown)}"] * bool(unknown)
            takes = ", ".join(wanted) or "nothing"
            raise SpecError(f"kernel {self.name} is called {' and '.join(faults)}; it takes {takes}")

    def blocks(self, arguments: Mapping[str, Any], sm_count: int) -> tuple[int, int, int]:
        """Returns the grid for these arguments on a GPU of `sm_count` multiprocessors; 0 where there is no work.

        Raises SpecError for a negative size, and for more blocks than a GPU takes.
        """
        x, y, z = (extent.blocks(arguments, sm_count) for extent in self.grid)
        if min(x, y, z) < 0:
            raise SpecError(f"kernel {self.name} is called with a negative size: its grid would be {(x, y, z)}")
        check_blocks((x, y, z), f"the grid of kernel {self.name}")
        return x, y, z

    def to_dict(self) -> dict[str, Any]:
        """The launch in terms of JSON."""
        return {
            "name": self.name,
            "grid": [extent.written for extent in self.grid],
            "threads": self.threads,
            "shared_bytes": self.shared_bytes,
            "params": [[p.name, p.kind] for p in self.params],
            "workspace_bytes": self.workspace_bytes,
            "may_overlap": self.may_overlap,
            "boxes": {name: list(box) for name, box in self.boxes.items()},
            "roles": dict(self.roles),
        }

    @staticmethod
    def from_dict(written: Mapping[str, Any]) -> Launch:
        """The inverse of `to_dict`. Raises SpecError for what another version has written."""
        try:
            return Launch(
                name=written["name"],
                grid=parse_grid(written["grid"]),
                threads=written["threads"],
                shared_bytes=written["shared_bytes"],
                params=tuple(map(_read_param, written["params"])),
                workspace_bytes=written["workspace_bytes"],
                may_overlap=written["may_overlap"],
                boxes={name: (rows, columns) for name, (rows, columns) in written["boxes"].items()},
                roles={name: _read_role(role) for name, role in written["roles"].items()},
            )
        except KeyError as error:
            raise SpecError(f"launch: {error} is missing; compile the kernel again with this version") from None


def _read_role(written: Any) -> Role:
    if written in get_args(Role):
        return written
    raise SpecError(
        f"launch: expected roles of {', '.join(get_args(Role))}, got {written!r}; "
        "compile the kernel again with this version"
    )


def _read_param(written: Any) -> Param:
    """Reads a pair of name and kind. Before parameters had kinds, this was the name alone."""
    if not isinstance(written, str) and len(written) == 2 and written[1] in PARAM_TYPES:
        return Param(*written)
    raise SpecError(
        f"launch: expected params as pairs of a name and one of {', '.join(PARAM_TYPES)}, got {written!r}; "
        "compile the kernel again with this version"
    )
