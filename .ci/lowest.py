#!/usr/bin/env python3
"""Prints a constraints file with the lowest versions that pyproject.toml allows.

    python3 .ci/lowest.py             torch as in constraints.txt
    python3 .ci/lowest.py lowest      the lowest torch, too
"""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def lowest() -> dict[str, str]:
    """Returns the lower bound of each dependency; raises ValueError for one without."""
    found: dict[str, str] = {}
    for requirement in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]:
        bound = re.match(r"([\w-]+)>=([\w.]+)", requirement)
        if bound is None:
            raise ValueError(f"{requirement!r} in pyproject.toml has no lower bound; write name>=version first")
        found[bound[1]] = bound[2]
    return found


def tested(package: str) -> str:
    """Returns the version of a package in constraints.txt."""
    pins = (line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    return dict(pins)[package]


def main(torch: str = "") -> None:
    versions = lowest()
    if torch != "lowest":
        versions["torch"] = tested("torch")
    for package, version in versions.items():
        print(f"{package}=={version}")


if __name__ == "__main__":
    main(*sys.argv[1:])
