"""A GPU process without a GPU, for the tests of `pylib.tune.processes`. It loads nothing, so it starts at once."""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import Connection


def serve(pipe: Connection, target: str) -> None:
    """`replays` says what goes wrong; without it, the answer is the process's own number."""
    pipe.send((None, ""))
    while True:
        what, _, _, replays = (*pipe.recv(), 0)[:4]
        if replays == 2:
            pipe.send((None, "too many registers"))
        elif replays == 3:
            os._exit(1)  # as after an illegal access
        elif replays == 4:
            signal.pause()  # a kernel that does not end
        else:
            pipe.send((float(os.getpid()) if what == "time" else target == "sm_90a", ""))


def crash(*_: object) -> None:
    os._exit(1)
