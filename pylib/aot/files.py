"""The files of an exported folder, with their sizes and checksums."""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lowbit.dialect.errors import SpecError
from lowbit.pylib.aot.sources import embedded_c, runtime_files

MANIFEST = "manifest.json"
_SEAL = ',\n "crc32": "'


@dataclass
class Files:
    """The code of a folder, by the names of files, until all is there. Equal contents of one kind are one file.

    alone  names of files that are in the folder alone, and not part of a library that is built of it
    """

    contents: dict[str, bytes] = field(default_factory=dict[str, bytes])
    alone: set[str] = field(default_factory=set[str])
    _known: dict[tuple[str, bytes], str] = field(default_factory=dict[tuple[str, bytes], str])

    def add(self, name: str, content: bytes, alone: bool = False) -> str:
        """Returns the name under which a file of this content is there, which is `name` unless it was before."""
        known = self._known.setdefault((Path(name).suffix, content), name)
        self.contents[known] = content
        if alone:
            self.alone.add(known)
        return known

    def write(self, folder: Path, manifest: dict[str, Any]) -> None:
        """Writes the code, the runtime, and last the manifest, which lists the code. Raises SpecError where that can't
        be."""
        listed = {name: {"bytes": len(each), "crc32": _crc32(each)} for name, each in self.contents.items()}
        text = _sealed({**manifest, "files": listed}).encode()
        names = [matmul["name"] for matmul in manifest["matmuls"]]
        sizes = {MANIFEST: len(text)} | {n: len(each) for n, each in self.contents.items() if n not in self.alone}
        sources = {**runtime_files(), "src/embedded.c": embedded_c(sizes, names).encode()}
        written = {**self.contents, **sources, MANIFEST: text}
        try:
            for name, content in written.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(content)
        except OSError as error:
            raise SpecError(f"folder={str(folder)!r} can't be written ({error}); name a folder of yours") from None


def _crc32(content: bytes) -> str:
    return f"{zlib.crc32(content):08x}"


def _sealed(manifest: dict[str, Any]) -> str:
    """Returns a manifest as text, of which the last line has the checksum of all before it."""
    text = json.dumps(manifest, indent=1).removesuffix("\n}")
    return f'{text}{_SEAL}{_crc32(text.encode())}"\n}}\n'
