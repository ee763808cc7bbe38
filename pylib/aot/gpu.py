"""What a manifest says of a GPU: which kernels are launched for how many rows, and how each is started.

A kernel's arguments are *arrays*: x, y, what else a call has, the tensors of the weight, the workspace, and buffers in
it that one kernel writes for the next (x in 8 bits; x in the order of permuted columns; a weight in the order of
memory). An array has so many bytes for a row of a call, by which a launch for some of the rows begins further on.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from lowbit.dialect.elements import ELEMENTS
from lowbit.dialect.epilogue import RESIDUAL
from lowbit.dialect.errors import SpecError
from lowbit.dialect.formats.byte_codes import SUM_COLUMNS
from lowbit.dialect.signature import WORKSPACE, Extent, Param
from lowbit.dialect.spec import Act, MatmulSpec
from lowbit.dialect.top_k import IDS, ROUTER_WEIGHTS
from lowbit.passes.kernels.base import KernelRequest
from lowbit.passes.kernels.permute.family import FEW_ROWS, permute_spec
from lowbit.passes.kernels.permute.family import default_schedule as permute_schedule
from lowbit.passes.kernels.persistent.schedule import takes_rows_in_order
from lowbit.passes.kernels.quantize.family import default_schedule as quantize_schedule
from lowbit.passes.kernels.quantize.family import quantize_spec
from lowbit.passes.kernels.registry import family_of, request
from lowbit.passes.kernels.top_k_experts.family import TopKExperts, least_schedule
from lowbit.passes.scheduling.choice import Chooser
from lowbit.passes.target import Target
from lowbit.pylib.aot.files import Files
from lowbit.pylib.build.choices import KernelChoices, kernel_name
from lowbit.pylib.build.driver import Program, load
from lowbit.pylib.build.kernels import Artifacts
from lowbit.pylib.runtime.activation_maps import maps_of_x
from lowbit.pylib.runtime.tensor_map import TensorMap

if TYPE_CHECKING:
    from lowbit.dialect.bindings import ir
    from lowbit.passes.builder import Program as TileProgram
    from lowbit.passes.pipeline import Buildable

_QUANTIZED = {"x": "x", "values": "x_values", "scales": "x_scales", "sums": "x_sums"}
_PERMUTED = {"y": "x_in_order", "numbers": "slot_numbers"}
_PACKED = {"codes": "x", "packed": "codes"}
_NO_X = 1 << 10  # an address, so that a tensor map can be described without a tensor


def gpu_to_dict(spec: MatmulSpec, target: Target, name: str, files: Files, wide_range: bool) -> dict[str, Any]:
    """Returns the description of a target in terms of JSON, and adds the code of its kernels to the files.

    wide_range: whether no kernel may round a weight to the act type (`pylib.weights.value_range`)
    """
    return _Exporter(spec, target, name, files, wide_range).to_dict()


@dataclass
class _Exporter:
    """Collects the kernels of one target."""

    spec: MatmulSpec
    target: Target
    name: str
    files: Files
    wide_range: bool
    kernels: dict[Hashable, dict[str, Any]] = field(default_factory=dict[Hashable, dict[str, Any]])

    def to_dict(self) -> dict[str, Any]:
        ranges = [self._range(*each) for each in self._all_ranges()]
        return {
            "target": self.target.name,
            "capability": self.target.capability,
            "runs_later": self.target.runs_later,
            "shared_per_block": self.target.max_shared_per_block,
            "rounds_weights": not self.wide_range and self.spec.for_rows(1).compute is None,
            "ranges": ranges,
            "dequantize": self._dequantize(),
            "prepack": self._prepack(),
            "kernels": list(self.kernels.values()),
        }

    def _all_ranges(self) -> Iterator[tuple[int, int | None, MatmulSpec, list[tuple[int, KernelRequest]], bool]]:
        """Yields first and last row of ranges (None: without end), the spec by which they are computed, the launches
        with their token tiles, and whether the last is repeated until all rows are multiplied."""
        if self.spec.top_k:
            _check_ids(self.spec, self.target)
            made = request(self.spec, self.target, Chooser(self.spec, self.target).schedule(1))
            yield 1, None, self.spec, [(1, made)], False
            return
        for first, last, spec, launches, repeats in ranges_of(self._choices()):
            if self.spec.permuted and first <= FEW_ROWS and (last is None or last > FEW_ROWS):
                yield first, FEW_ROWS, spec, launches, repeats
                first = FEW_ROWS + 1
            yield first, last, spec, launches, repeats

    def _choices(self) -> KernelChoices:
        """Returns which kernels serve how many rows, all without the vendor's matmul."""
        spec = replace(self.spec, permuted=False)
        kinds = [
            Artifacts(kind, self.target, None, self.wide_range and not kind.compute, vendor=False).choices()
            for kind in spec.kinds
        ]
        return kinds[0] if len(kinds) == 1 else kinds[1].after(kinds[0], spec.first_in_eight_bits)

    def _range(
        self, first: int, last: int | None, spec: MatmulSpec, launches: list[tuple[int, KernelRequest]], repeats: bool
    ) -> dict[str, Any]:
        x = "x_values" if spec.compute else "x_in_order" if self.spec.permuted else "x"
        renamed = {"x": x} | ({"rows": "slot_numbers"} if self.spec.permuted else {})
        listed = [
            {"kernel": self._kernel(made, spec, renamed, kernel_name(tile)), "rows": tile} for tile, made in launches
        ]
        if not repeats:
            listed[-1]["rows"] = 0
        tile = {"tile": launches[0][0]} if "tiles" in self.spec.call_inputs else {}
        return {"first": first, "last": last, **tile, "prepare": self._prepare(first, spec), "launches": listed}

    def _prepare(self, first: int, spec: MatmulSpec) -> list[dict[str, Any]]:
        """Returns the kernels that are launched once in front of the others, for all rows of x or, of experts with
        columns in orders of their own, for all slots, which are the rows of y."""
        act = cast(Act, self.spec.act)
        if spec.compute:
            of_x = quantize_spec(spec.k, act, spec.compute)
            made = request(of_x, self.target, quantize_schedule(of_x))
            return [{"kernel": self._kernel(made, of_x, _QUANTIZED, "quantize"), "rows_of": "x"}]
        if not self.spec.permuted:
            return []
        of_x = permute_spec(spec.k, act)
        schedule = permute_schedule(of_x, first, self.target)
        if spec.experts == 1:
            made = request(of_x, self.target, schedule)
            return [{"kernel": self._kernel(made, of_x, _PERMUTED, "permute"), "rows_of": "x"}]

        def program() -> TileProgram:
            from lowbit.passes.kernels.permute_slots import permute_slots_program

            return permute_slots_program(spec.k, act, spec.experts, schedule)

        name = "permute" if first <= FEW_ROWS else "permute_many"
        return [{"kernel": self._program(program, _PERMUTED, name), "rows_of": "y"}]

    def _dequantize(self) -> list[int]:
        """Returns the kernels that write the weight as numbers, the first of all experts as one: where rows or columns
        are in an order of their own, the second brings them back."""
        spec = self.spec
        dense = replace(spec.in_act, experts=1, top_k=None, epilogue=None, permuted=False)
        made = Artifacts(dense, self.target, None).request(None)
        in_order = not (spec.is_gated or spec.permuted)
        written = {} if in_order else {"y": "w_in_memory"}
        first = self._kernel(made, dense, written, kernel_name(None))

        def program() -> TileProgram:
            from lowbit.passes.kernels.restore import restore_program

            return restore_program(spec)

        return [first] if in_order else [first, self._program(program, {"stored": "w_in_memory"}, "restore")]

    def _prepack(self) -> int:
        """Returns the kernel that packs codes, which it takes as x."""

        def program() -> ir.Module:
            from lowbit.passes.kernels.prepack.kernel import prepack

            return prepack(self.spec)

        return self._program(program, _PACKED, "prepack")

    def _kernel(self, made: KernelRequest, spec: MatmulSpec, renamed: Mapping[str, str], name: str) -> int:
        """Returns the number of a kernel, which is compiled and described when it is first asked for."""
        if made not in self.kernels:
            artifact = load(made, f"{self.name}_{self.target.arch}_{name}")
            self.kernels[made] = self._described(artifact, spec, renamed, f"{len(self.kernels):02}_{name}")
        return list(self.kernels).index(made)

    def _program(self, build: Buildable, renamed: Mapping[str, str], name: str) -> int:
        """Returns the number of a kernel that is a tile program, of which there is one of this name."""
        if name not in self.kernels:
            from lowbit.passes.pipeline import lower_program  # which loads MLIR and LLVM

            compiled = lower_program(build, self.target)
            program = Program(compiled.launch, compiled.ptx, compiled.cubin())
            self.kernels[name] = self._described(program, self.spec, renamed, f"{len(self.kernels):02}_{name}")
        return list(self.kernels).index(name)

    def _described(self, artifact: Program, spec: MatmulSpec, renamed: Mapping[str, str], name: str) -> dict[str, Any]:
        launch, stem = artifact.launch, f"kernels/{self.name}/{self.target.arch}/{name}"
        maps = maps_of_x(_NO_X, spec, 1, launch.boxes)
        params = [_param(param, maps.get(param.name), renamed, spec) for param in launch.params]
        return {
            "name": name,
            "function": launch.name,
            "cubin": self.files.add(f"{stem}.cubin", artifact.cubin or b""),
            "ptx": self.files.add(f"{stem}.ptx", artifact.ptx.encode(), alone=not self.target.runs_later),
            "grid": [_extent(extent) for extent in launch.grid],
            "threads": launch.threads,
            "cluster": _cluster(artifact.ptx),
            "shared_bytes": launch.shared_bytes,
            "workspace_bytes": launch.workspace_bytes,
            "may_overlap": launch.may_overlap,
            "params": params,
        }


def ranges_of(
    choices: KernelChoices,
) -> Iterator[tuple[int, int | None, MatmulSpec, list[tuple[int, KernelRequest]], bool]]:
    """Yields what `_Exporter._all_ranges` does, of kernels of all tables of choices, few rows first."""
    if choices.few:
        yield from ranges_of(choices.few)
    for rows in choices.rows:
        launches = [(tile, _gathering(choices.kernels[tile])) for tile in rows.token_tiles]
        takes_any = family_of(launches[-1][1].schedule).takes_any_tokens
        repeats = rows.last is None and not takes_any and choices.spec.experts == 1
        yield rows.first, rows.last, choices.spec, launches, repeats


def _gathering(made: KernelRequest) -> KernelRequest:
    """Returns a request whose kernel reads the list of rows of x, where one of these wants them in order."""
    if not takes_rows_in_order(made.schedule):
        return made
    return request(made.spec, made.target, replace(cast(Any, made.schedule), gather=True))


def _check_ids(spec: MatmulSpec, target: Target) -> None:
    """Raises SpecError where no kernel reads ids of experts."""
    try:
        TopKExperts().check(spec, least_schedule(spec), target)
    except SpecError as error:
        reason = str(error).removeprefix("schedule: ")
        raise SpecError(
            f"({spec}) is not exported for {target}: {reason}; for this target export it with top_k=None, for rows "
            "sorted by expert"
        ) from None


def arrays_of(spec: MatmulSpec) -> list[dict[str, Any]]:
    """Returns the arrays that kernels take, each with where it comes from, its bytes for a row of a call, and for the
    weight in the order of memory the bytes of all of it."""
    x, y = spec.k * 2, spec.outputs * spec.y.bytes
    found = [("x", "x", x), ("y", "y", y), (WORKSPACE, WORKSPACE, 0)]
    found += [(slot.name, "weight", 0) for slot in spec.tensors]
    inputs = _inputs(spec)
    found += [(name, "input", size) for name, (_, size) in inputs.items()]
    if spec.permuted:
        found.append(("x_in_order", "buffer", x))
    if spec.permuted and spec.experts > 1:
        found.append(("slot_numbers", "buffer", 4))
    if spec.compute:
        sums = spec.k // SUM_COLUMNS * 4
        found += [("x_values", "buffer", spec.k), ("x_scales", "buffer", 4), ("x_sums", "buffer", sums)]
    types = {"x": spec.act, "y": spec.out_dtype} | {name: kind for name, (kind, _) in inputs.items()}
    arrays: list[dict[str, Any]] = [
        {"name": name, "from": origin, "row_bytes": size} | ({"type": types[name]} if name in types else {})
        for name, origin, size in found
    ]
    if spec.is_gated or spec.permuted:
        arrays.append({"name": "w_in_memory", "from": "dequantized", "row_bytes": 0, "bytes": spec.n * spec.k * 2})
    return arrays


def _inputs(spec: MatmulSpec) -> dict[str, tuple[str, int]]:
    """Returns type and bytes for a row of y of what a call has besides x and the weight, by name. The table of token
    tiles has as many rows as there are tiles."""
    known: dict[str, tuple[str, int]] = {"rows": ("i32", 1), "tiles": ("i32", 0)}
    known[RESIDUAL] = spec.out_dtype, spec.outputs
    if spec.top_k:
        of_row = spec.top_k.count if spec.top_k.weights else 1  # a row of y for all of a token's ids, or one for each
        known |= {IDS: (spec.top_k.ids, of_row), ROUTER_WEIGHTS: (spec.top_k.weights or "", of_row)}
    sizes = {element.name: element.bytes for element in ELEMENTS.values()} | {"i64": 8}
    return {name: (kind, sizes[kind] * count) for name in spec.call_inputs for kind, count in [known[name]]}


def _param(param: Param, map_: TensorMap | None, renamed: Mapping[str, str], spec: MatmulSpec) -> dict[str, Any]:
    """A parameter: its kind, and the array whose address it takes; for "m" the number of rows."""
    name = "x" if map_ else param.name
    described: dict[str, Any] = {"name": param.name, "kind": param.kind, "from": renamed.get(name, name)}
    return described | ({"map": _map(map_, spec)} if map_ else {})


def _map(map_: TensorMap, spec: MatmulSpec) -> dict[str, Any]:
    """A tensor map of [rows of x, columns], as cuTensorMapEncodeTiled takes it, innermost dim first."""
    return map_.to_dict() | {"columns": spec.k}


def _extent(extent: Extent) -> dict[str, Any]:
    """An extent of a grid. Of rules, "ceil" divides the rows of the launch, rounding up."""
    return {"rule": extent.rule, "number": extent.number}


def _cluster(ptx: str) -> list[int]:
    """Returns the blocks of a cluster, which the code itself asks for."""
    found = re.search(r"\.reqnctapercluster (\d+)(?:, (\d+))?(?:, (\d+))?", ptx)
    return [int(n or 1) for n in found.groups()] if found else [1, 1, 1]
