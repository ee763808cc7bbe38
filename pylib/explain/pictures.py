"""The pictures of docs/ that show how weights lie in memory: `python -m lowbit.pylib.explain.pictures docs/img`."""

from __future__ import annotations

import sys
from pathlib import Path

from lowbit.dialect.formats.packing import Packing
from lowbit.pylib.explain.packing import lanes_of_block, words_of_lane


def pictures() -> dict[str, str]:
    """The text of each file by its name."""
    return {"words_3_bits.svg": words_of_lane(Packing(3, 16, 256)).svg(), "lanes.svg": lanes_of_block().svg()}


if __name__ == "__main__":
    for name, text in pictures().items():
        (Path(sys.argv[1]) / name).write_text(text)
