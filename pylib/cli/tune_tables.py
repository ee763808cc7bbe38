"""The parts of `lowbit tune` that work on existing tables: join them, check them, and find entries out of date."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lowbit.dialect.errors import SpecError
from lowbit.pylib.build import private_files
from lowbit.pylib.cli.output import errors

if TYPE_CHECKING:
    from lowbit.passes.scheduling.tables import Table
    from lowbit.pylib.tune.check import FirstCall


def use_tables(names: list[str], merge: bool, check: bool, stale: bool, jobs: int | None, output: Path | None) -> None:
    """Do the one thing that was asked for. Raises SpecError where several were."""
    if merge + check + stale > 1:
        raise SpecError("--merge, --check and --stale are different things to do; give one of them")
    if merge:
        _merge([Path(name) for name in names], output)
    elif check:
        _check(_table(names), jobs)
    else:
        _list_stale(_table(names), jobs)


def _merge(paths: list[Path], output: Path | None) -> None:
    """Write the table that has the entries of all, of the last where several have one."""
    from lowbit.passes.scheduling.tables import merge, read_table
    from lowbit.pylib.build import user_tables as schedules

    if not paths:
        raise SpecError("lowbit tune --merge needs tables, such as a.json b.json")
    table = merge([read_table(path) for path in paths])
    path = output or schedules.user_file(table.gpu)
    write(table, path)
    errors.print(f"wrote {path}: {len(table.entries)} schedules for {table.gpu}", markup=False)


def _check(table: Table, jobs: int | None) -> None:
    """Measure what matmuls get that are not in a table, against what the table has for them."""
    from lowbit.pylib.tune import check as tune_check
    from lowbit.pylib.tune import processes as tune_processes
    from lowbit.pylib.tune import session as tuner

    gpu, target = tuner.this_gpu()
    if table.gpu != gpu:
        raise SpecError(f"the table is for {table.gpu}, but this GPU is {gpu}; give another")
    calls: list[tune_check.FirstCall] = []
    with tune_processes.Compilers(target, jobs) as compilers, tune_processes.GpuProcess(target) as stand:
        for call in tune_check.first_calls(table, target, stand, compilers.submit):
            calls.append(call)
            print_call(call)
    errors.print(tune_check.summary(calls), markup=False)


def _list_stale(table: Table, jobs: int | None) -> None:
    """List the measurements of kernels that have changed since."""
    from lowbit.passes.targets import target_of_gpu
    from lowbit.pylib.tune import check as tune_check
    from lowbit.pylib.tune import processes as tune_processes

    target = target_of_gpu(table.capability)
    if target is None:
        raise SpecError(f"the table is for {table.gpu}, sm_{table.capability}, which no target is for")
    with tune_processes.Compilers(target, jobs) as compilers:
        found = tune_check.stale(table, compilers.submit)
    for entry in found:
        about = f"{entry.microseconds:.2f} µs, {entry.date}, {entry.version}"
        errors.print(f"{tune_check.problem(entry.key)}: {about}", markup=False)
    errors.print(f"{len(found)} of {len(table.entries)} entries are out of date", markup=False)


def _table(names: list[str]) -> Table:
    """Returns the table in a file, or without a name the first that a user of this machine has."""
    from lowbit.passes.scheduling.tables import read_table, shipped_tables
    from lowbit.pylib.build import user_tables as schedules

    if len(names) > 1:
        raise SpecError(f"one table at a time, not {', '.join(names)}; --merge joins them")
    return read_table(Path(names[0])) if names else (*schedules.user_tables(), *shipped_tables())[0]


def write(table: Table, path: Path) -> None:
    """Write a table, whole or not at all."""
    private_files.make_folder(path.parent)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(table.to_text(), encoding="utf-8")
    temporary.replace(path)


def print_call(call: FirstCall) -> None:
    """Print how the time of a first call compares with the best known one."""
    from lowbit.pylib.tune.check import problem

    times = f"{call.time:.2f} µs, best known {min(call.time, call.best):.2f}"
    errors.print(f"{call.ratio:.3f}  {problem(call.entry.key)}: {times}", markup=False)
