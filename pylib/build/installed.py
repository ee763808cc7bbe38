"""Versions of installed packages, without importing them.

Read off the names of their .dist-info folders: `importlib.metadata` parses a file per package, which in a warm start
is most of the time that `compile` takes.
"""

import os
import re
import sys


def versions(*packages: str) -> dict[str, str | None]:
    """Package name -> the version that an import would find, or None where there is none."""
    wanted = {re.sub(r"[-_.]+", "_", package).lower(): package for package in packages}
    found: dict[str, str | None] = dict.fromkeys(packages)
    for folder in reversed(sys.path):  # so that the first on the path has the last word
        try:
            names = [entry.name for entry in os.scandir(folder or ".")]
        except OSError:  # a zip file, or a folder that is not there
            continue
        for name in names:
            stem, _, ending = name.rpartition(".")
            project, _, version = stem.partition("-")
            if ending in ("dist-info", "egg-info") and version:
                if package := wanted.get(project.replace(".", "_").lower()):
                    found[package] = version.partition("-")[0]
    return found
