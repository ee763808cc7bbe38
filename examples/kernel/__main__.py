"""Checks all versions of the kernel, and times them where there is a GPU: `python -m examples.kernel`."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from benchmarks import record_lines
from examples.kernel.problem import Problem
from examples.kernel.run import RESULTS, VERSIONS, check, measure, publish, table
from lowbit.pylib.runtime.devices import this_machine


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.kernel", description=__doc__)
    parser.add_argument("--output", type=Path, help="file that gets the results, as JSON")
    parser.add_argument("--publish", action="store_true", help="put the results into docs/")
    options = parser.parse_args()
    output = RESULTS if options.publish else options.output
    if torch.cuda.is_available():
        results = measure(Problem(8192, 8192, 8), this_machine())
        print(table(results))
        if output:
            record_lines.write(output, results)
    else:
        print("No GPU here: a small matmul in the emulator, not timed.")
        for version, what in VERSIONS.items():
            worst = check(version, Problem(32, 2048, 5), "emulator:sm_90")
            print(f"{version}  {what:<32} right: worst element at {worst:.0%} of what rounding explains")
    if options.publish:
        publish()


if __name__ == "__main__":
    main()
