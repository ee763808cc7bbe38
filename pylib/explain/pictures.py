"""The pictures of docs/ of layouts and of a copy pipeline: `python -m lowbit.pylib.explain.pictures docs/img`."""

from __future__ import annotations

import sys
from pathlib import Path

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.pipeline import compile_kernel
from lowbit.passes.targets import parse_target
from lowbit.pylib.build.kernels import kernel_choices
from lowbit.pylib.explain.executed import run_one_cluster
from lowbit.pylib.explain.figures import Bars
from lowbit.pylib.explain.packing import lanes_of_block, words_of_lane
from lowbit.pylib.explain.shared import buffers, pipeline


def pictures() -> dict[str, str]:
    """The text of each file by its name, of those that packing alone decides."""
    return {"words_3_bits.svg": words_of_lane(MatmulSpec(16, 256, "u3")).svg(), "lanes.svg": lanes_of_block().svg()}


def pipeline_picture() -> Bars:
    """How x comes to a prefill kernel for 300 rows and 512 columns: eight rounds through four stages."""
    spec = MatmulSpec(n=64, k=512, weight="u4", group_size=128)
    wanted = kernel_choices(spec, parse_target("sm_90a")).launches(300)[0]
    compiled = compile_kernel(wanted, keep=True)
    seen = run_one_cluster(wanted, compiled.launch, compiled.ptx, 300)
    found = pipeline(seen, buffers(compiled.stages["tile"]))
    if found is None:
        raise ValueError("the kernel has no copies in rounds: draw another one")
    return found


if __name__ == "__main__":
    for name, text in (pictures() | {"pipeline.svg": pipeline_picture().svg()}).items():
        (Path(sys.argv[1]) / name).write_text(text)
