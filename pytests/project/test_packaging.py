"""What an installed lowbit consists of, and that it works beside files that are called like its folders."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINKS = ("dialect", "passes", "pylib")
BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"

DECOYS = {
    "passes.py": "raise SystemExit('the passes.py beside the script was imported')",
    "dialect.py": "raise SystemExit('the dialect.py beside the script was imported')",
    "dialect/__init__.py": "raise SystemExit('the dialect/ beside the script was imported')",
}
SCRIPT = """
import torch, lowbit, pylib
import pylib.matmul

assert pylib.compile is lowbit.compile and pylib is lowbit.pylib
assert pylib.matmul is lowbit.pylib.matmul and pylib.matmul.__name__ == "lowbit.pylib.matmul"

spec = lowbit.MatmulSpec(n=16, k=64, weight="u4")
assert ".target sm_90a" in lowbit.compile(spec, "sm_90a").ptx
mm = lowbit.compile(spec, "cpu")
w = mm.pack(torch.full((16, 64), 3), torch.full((16, 1), 2.0))
assert (mm(torch.ones(2, 64, dtype=torch.float16), w) == 384).all()
print(lowbit.__file__)
"""


def sources() -> set[str]:
    """Returns the files that belong into a wheel, by their names in `lowbit`."""
    files = [path for link in LINKS for path in (ROOT / link).rglob("*") if path.suffix in (".py", ".json")]
    for folder in ("pylib/aot/c", "pylib/explain/templates"):
        files += [path for path in (ROOT / folder).rglob("*") if path.is_file()]
    own = [path.name for path in (ROOT / "lowbit").iterdir() if path.suffix in (".py", ".typed")]
    return {str(path.relative_to(ROOT)) for path in files} | set(own)


def build(what: str, source: Path, folder: Path) -> Path:
    """Builds a wheel or an sdist as pip does where it does not isolate the build; needs no network."""
    folder.mkdir()
    subprocess.run([sys.executable, "-c", BUILD, what, str(folder)], cwd=source, check=True, capture_output=True)
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is packaged, links as links: a build leaves folders where it runs."""
    copy = tmp_path_factory.mktemp("checkout")
    for folder in ("lowbit", *LINKS):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, copy / folder, symlinks=True, ignore=ignored)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, copy)
    return copy


@pytest.fixture(scope="module")
def wheel(checkout: Path) -> Path:
    return build("build_wheel", checkout, checkout / "wheel")


def contents(wheel: Path) -> dict[str, bytes]:
    """Returns the files of a wheel, but for its metadata."""
    with ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
        assert len(names) == len(set(names))
        return {name: archive.read(name) for name in names}


def test_the_wheel_has_every_file_once(wheel: Path) -> None:
    assert set(contents(wheel)) == {"pylib/__init__.py"} | {f"lowbit/{name}" for name in sources()}
    assert {"py.typed", "aliases.py", "passes/scheduling/data/nvidia_h200.json"} <= sources()
    with ZipFile(wheel) as archive:
        assert not any(stat.S_ISLNK(entry.external_attr >> 16) for entry in archive.infolist())


def test_the_sdist_makes_the_same_wheel(checkout: Path, wheel: Path, tmp_path: Path) -> None:
    sdist = build("build_sdist", checkout, tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        assert not any(member.issym() or member.islnk() for member in archive.getmembers())
        archive.extractall(tmp_path, filter="data")
    again = build("build_wheel", tmp_path / sdist.name.removesuffix(".tar.gz"), tmp_path / "wheel")
    assert contents(again) == contents(wheel)


def test_the_metadata(wheel: Path) -> None:
    """The command, and everything that `compile` needs without an extra."""
    with ZipFile(wheel) as archive:
        folder = next(name for name in archive.namelist() if name.endswith("METADATA")).removesuffix("METADATA")
        metadata, scripts = (archive.read(folder + name).decode() for name in ("METADATA", "entry_points.txt"))
    required = [line.removeprefix("Requires-Dist: ") for line in metadata.splitlines() if "Requires-Dist" in line]
    needed = [line for line in required if "extra ==" not in line]
    assert "lowbit = lowbit.pylib.cli.main:main" in scripts
    for package in ("numpy", "torch", "torch-mlir", "llvmlite", "cuda-bindings", "nvidia-nvjitlink"):
        assert any(line.startswith((f"{package}>", f"{package}<")) for line in needed), (package, needed)


@pytest.mark.parametrize("installed", ["wheel", "checkout"])
def test_it_works_beside_files_of_the_same_names(
    installed: str, checkout: Path, wheel: Path, tmp_path: Path
) -> None:
    home = tmp_path / "site" if installed == "wheel" else checkout
    if installed == "wheel":
        ZipFile(wheel).extractall(home)
    for name, text in DECOYS.items():
        path = tmp_path / "work" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    script = tmp_path / "work" / "script.py"
    script.write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": str(home)}
    done = subprocess.run(
        [sys.executable, script.name], cwd=script.parent, env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert Path(done.stdout.strip()) == home / "lowbit" / "__init__.py"


def test_lowest_versions() -> None:
    """`make lowest` finds a lower bound of every dependency."""
    done = subprocess.run(
        [sys.executable, ROOT / ".ci/lowest.py", "lowest"], check=True, capture_output=True, text=True
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = dict(line.split("==") for line in done.stdout.split())
    assert len(pins) == len(project["dependencies"]) and pins["numpy"] == "2.0"
    assert all(f"{name}>={version}" in " ".join(project["dependencies"]) for name, version in pins.items())
