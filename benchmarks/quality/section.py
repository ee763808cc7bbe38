"""A table that a measurement of this folder puts into a page, made from its records in docs/results."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import record_lines
from benchmarks.publish import between_marks
from benchmarks.quality.model import HERE
from lowbit.dialect.errors import SpecError

DOCS = HERE.parent.parent / "docs"
Record = dict[str, Any]


@dataclass(frozen=True)
class Section:
    """Where a measurement has its records and its table.

    name   of the file with the records: docs/results/<name>.json
    mark   the table is between <!-- <mark>: begin --> and <!-- <mark>: end -->
    page   in which page of docs
    """

    name: str
    mark: str
    page: str = "quality.md"

    @property
    def file(self) -> Path:
        """The records, as JSON."""
        return DOCS / "results" / f"{self.name}.json"

    @property
    def path(self) -> Path:
        """The page."""
        return DOCS / self.page

    def records(self) -> list[Record]:
        """Returns what was measured."""
        return json.loads(self.file.read_text())["records"]

    def with_table(self, table: str) -> str:
        """Returns the text of the page with this table. Raises SpecError for a page without the marks."""
        return between_marks(self.path, table, f"<!-- {self.mark}: begin -->", f"<!-- {self.mark}: end -->")

    def publish(self, measure: Callable[[], Iterable[Record]], table: Callable[[list[Record]], str]) -> list[Record]:
        """Measure, unless the records are there already, and write the page; returns the records. Raises SpecError
        where nothing was measured."""
        if self.file.exists():
            print(f"{self.file} has records, of which the table is made; remove it to measure again", file=sys.stderr)
        else:
            self._write(measure())
        self.path.write_text(self.with_table(table(self.records())))
        return self.records()

    def _write(self, records: Iterable[Record]) -> None:
        """Write the records, one a line, and show the beginning of each as it comes. Raises SpecError for none."""
        found: list[Record] = []
        for record in records:
            found.append(record)
            print(f"{json.dumps(record):.200}", file=sys.stderr, flush=True)
        if not found:
            raise SpecError(f"{self.name}: nothing was measured, as all was left out; install what it needs")
        record_lines.write(self.file, {"records": found})
