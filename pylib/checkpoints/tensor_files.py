"""The tensors of a folder of safetensors files, read when they are asked for.

The safetensors library checks that the header of a file is sound and maps the file into memory: a tensor takes memory
when its values are used. What has been read of a file stays in memory as long as it is mapped, so only the last few
files are. The folder's own JSON files are checked here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from safetensors import SafetensorError, safe_open
from torch import Tensor

from lowbit.dialect.errors import CheckpointError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
GGUF = ".gguf"
FLOATS = ("BF16", "F16", "F32", "F64")
"""The types of dense weights, as safetensors names them."""
MOST_OPEN = 2  # files: a layer may be in two
LONGEST_JSON = 1 << 27  # bytes; the index of a model of 100,000 tensors takes 10 MB


class TensorFiles(Mapping[str, Tensor]):
    """The tensors of a checkpoint by name. Looking one up reads it.

    folder    where the files are
    files     the file of each tensor
    metadata  what the files say of themselves, taken together

    It has the files of a folder that are given, or those that its index names.
    """

    def __init__(self, path: Path, given: Sequence[str] | None = None) -> None:
        self.folder = path.parent if path.is_file() else path
        self.metadata: dict[str, str] = {}
        self._open: dict[str, Any] = {}
        self._headers: dict[str, dict[str, tuple[tuple[int, ...], str]]] = {}
        self._states: dict[str, tuple[int, int]] = {}
        self.files: dict[str, str] = {}
        for file, listed in (_files(path) if given is None else dict.fromkeys(given)).items():
            opened = self._opened(file)
            names = set(opened.keys())
            if listed is not None and (missing := listed - names):
                raise CheckpointError(f"{self.folder / file} has no {min(missing)}, which {INDEX} says it has")
            self.files |= dict.fromkeys(sorted(names if listed is None else listed), file)
            self.metadata |= opened.metadata() or {}

    def __getitem__(self, name: str) -> Tensor:
        file = self.files[name]
        try:
            return cast(Tensor, self._opened(file).get_tensor(name))
        except (SafetensorError, RuntimeError, OSError, ValueError) as error:
            raise CheckpointError(f"{self.folder / file}: {name} can't be read: {error}") from error

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state without open files, for other processes: they open the files again."""
        return self.__dict__ | {"_open": {}}

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __contains__(self, name: object) -> bool:
        """Tells whether there is a tensor of this name, without reading it."""
        return name in self.files

    def __len__(self) -> int:
        return len(self.files)

    def path(self, name: str) -> Path:
        """Returns the file that a tensor is in."""
        return self.folder / self.files[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor, without reading it."""
        return self._header(name)[0]

    def dtype(self, name: str) -> str:
        """Returns what safetensors calls the type of a tensor, "F8_E4M3" say, without reading it."""
        return self._header(name)[1]

    def _header(self, name: str) -> tuple[tuple[int, ...], str]:
        file = self.files[name]
        if file not in self._headers:
            opened = self._opened(file)
            names: list[str] = opened.keys()
            slices = {each: opened.get_slice(each) for each in names}
            self._headers[file] = {each: (tuple(s.get_shape()), str(s.get_dtype())) for each, s in slices.items()}
        return self._headers[file][name]

    def _opened(self, file: str) -> Any:
        """Returns an open file, and closes the one that was opened first if there are too many."""
        if file not in self._open:
            try:
                self._check_unchanged(file)
                self._open[file] = safe_open(self.folder / file, framework="pt")
            except CheckpointError:
                raise
            except FileNotFoundError:
                lost = f"{self.folder / file} is not there, though {INDEX} or a link names it"
                raise CheckpointError(f"{lost}; copy all files of the checkpoint") from None
            except (SafetensorError, OSError, ValueError) as error:
                why = "it is a GGUF file, which lowbit.from_gguf loads" if file.endswith(GGUF) else error
                raise CheckpointError(f"{self.folder / file} is no sound safetensors file: {why}") from error
            if len(self._open) > MOST_OPEN:
                del self._open[next(iter(self._open))]
        return self._open[file]

    def _check_unchanged(self, file: str) -> None:
        """Raise CheckpointError for a file that is another than when it was first opened."""
        state = (self.folder / file).stat()
        found = state.st_size, state.st_mtime_ns
        if self._states.setdefault(file, found) != found:
            raise CheckpointError(f"{self.folder / file} has changed since the checkpoint was opened")


def read_json(file: Path) -> dict[str, Any]:
    """Returns the dictionary in a JSON file. Raises CheckpointError if there is none."""
    try:
        if file.stat().st_size > LONGEST_JSON:
            raise CheckpointError(f"{file} is longer than {LONGEST_JSON >> 20} MiB")
        found: object = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{file} can't be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{file} must hold a JSON dictionary")
    return cast(dict[str, Any], found)


def _files(path: Path) -> dict[str, set[str] | None]:
    """Returns the files of a checkpoint with the tensors that the index says are in them; None without an index."""
    if path.is_file():
        return {path.name: None}
    if not path.is_dir():
        raise CheckpointError(f"{path}: there is no such folder or file{_hint(path)}")
    if (path / INDEX).exists():
        return _indexed(path / INDEX)
    files = [SINGLE] if (path / SINGLE).exists() else sorted(file.name for file in path.glob("*.safetensors"))
    if len(files) == 1:
        return {files[0]: None}
    if files:
        raise CheckpointError(f"{path} has {len(files)} safetensors files, but no {INDEX}; name one of them")
    others = sorted(file.name for file in path.iterdir() if file.suffix in (*PICKLES, GGUF))
    what = "a pickle, which could run anything: convert it to safetensors"
    if others and others[0].endswith(GGUF):
        what = "a GGUF file: name it instead of the folder"
    raise CheckpointError(f"{path} has no safetensors file" + (f"; {others[0]} is {what}" if others else ""))


def _hint(path: Path) -> str:
    """Returns what to do with what may be a model's name on the hub: "owner/model", or "model"."""
    if path.is_absolute() or len(path.parts) > 2 or ".." in path.parts or path.suffix in (".safetensors", GGUF):
        return ""
    name = path.as_posix()
    return (
        f". For the model of this name on the hub, run `hf download {name} --local-dir {path.name}` and name that "
        f"folder, or load it with from_pretrained({name!r}, quantization_config=lowbit.LowbitConfig())"
    )


def _indexed(index: Path) -> dict[str, set[str] | None]:
    """Returns the files that an index names, which must lie beside it, each with its tensors."""
    weights = read_json(index).get("weight_map")
    found: dict[str, set[str] | None] = {}
    for name, file in weights.items() if isinstance(weights, dict) else ():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise CheckpointError(f"{index} says that {name} is in {file!r}, which is no safetensors file beside it")
        cast(set[str], found.setdefault(file, set())).add(name)
    if not found:
        raise CheckpointError(f"{index} has no weight_map from names to files")
    return found
