"""lit configuration: `lit lit_tests`, `make lit`, or the CMake target check-lowbit-lit. See README.md."""

import os
import sys
from pathlib import Path

import lit.formats

ROOT = Path(__file__).resolve().parent.parent
config = globals()["config"]  # lit puts it, and lit_config, into the globals of this file
lit_config = globals()["lit_config"]

config.name = "lowbit"
config.test_format = lit.formats.ShTest(False)  # lit's own shell: no other one is asked for
config.suffixes = [".mlir", ".test"]
config.excludes = ["Output"]
config.test_source_root = str(ROOT / "lit_tests")
config.test_exec_root = lit_config.params.get("output", str(ROOT / "build" / "lit"))

python = lit_config.params.get("python", sys.executable)
config.environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
config.substitutions += [
    ("%lowbit-opt", f"{python} -m lowbit.passes.opt.main"),  # what `lowbit opt` runs, without loading the command line
    ("%lowbit", f"{python} -m lowbit.pylib.cli.main"),
    ("%filecheck", f"{python} -m filecheck"),
    ("%python", python),
]

if Path("/dev/nvidia0").exists():
    config.available_features.add("gpu")
