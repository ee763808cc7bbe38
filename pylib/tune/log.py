"""The log of a tuning session, which a session that was interrupted goes on from."""

from __future__ import annotations

import json
import math
from pathlib import Path

from lowbit.dialect.errors import SpecError
from lowbit.passes.kernels.base import KernelSchedule
from lowbit.passes.kernels.registry import schedule_from_dict, schedule_to_dict
from lowbit.passes.scheduling.tables import Key
from lowbit.pylib.build import cache, private_files


class Log:
    """Measurements by (matmul, schedule, what was done), each a line of a file: microseconds, 1 or 0 for a check;
    null, which reads as infinity, for what could not be compiled or run, and why.

    A last line that is not whole is dropped: the process died while it wrote. Raises SpecError for a damaged line.
    """

    def __init__(self, path: Path, gpu: str) -> None:
        self._path = path
        self._of = {"gpu": gpu, "sources": cache.source_fingerprint()[:16]}
        self._known: dict[tuple[Key, KernelSchedule, str], float] = {}
        private_files.make_folder(path.parent)
        data = path.read_bytes() if path.exists() else b""
        whole = data[: data.rfind(b"\n") + 1]
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                self._read(line)
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                what = f"{path}, line {number}, is no measurement ({type(error).__name__}: {error})"
                raise SpecError(f"{what}; delete the line, or name another file with --log") from None
        if whole != data:
            path.write_bytes(whole)

    def _read(self, line: bytes) -> None:
        """Keep what a line says, if it is of this GPU and these sources. Raises an exception for a damaged one."""
        values = json.loads(line)
        if {name: values[name] for name in self._of} != self._of:
            return
        known = Key.from_dict(values["key"]), schedule_from_dict(values["schedule"]), values["what"]
        value = values["value"]
        if not (value is None or type(value) in (int, float)):
            raise TypeError(f"value={value!r} must be a number or null")
        self._known[known] = math.inf if value is None else value

    def get(self, key: Key, schedule: KernelSchedule, what: str) -> float | None:
        """Returns what was measured; None if nothing was."""
        return self._known.get((key, schedule, what))

    def add(self, key: Key, schedule: KernelSchedule, what: str, value: float, why: str = "") -> None:
        """Keep a measurement, in the file at once."""
        self._known[key, schedule, what] = value
        about = {"key": key.to_dict(), "schedule": schedule_to_dict(schedule), "what": what}
        about |= {"value": value if math.isfinite(value) else None} | ({"why": why} if why else {})
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(self._of | about) + "\n")
