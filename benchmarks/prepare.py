"""What a part of a run needs is compiled before it is measured: all peers side by side, each on all cores.

Nothing is measured meanwhile. A kernel that is missing all the same is compiled at its first call, which is not timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from benchmarks.peers import Job, Peer


def prepare(jobs: Mapping[Peer, Sequence[Job]], log: Callable[[str], None]) -> None:
    """Let peers compile for their jobs; what goes wrong is logged, and met again where it is measured."""
    start = time.monotonic()

    def report(peer: Peer) -> Callable[[Future[None]], None]:
        def done(future: Future[None]) -> None:
            error = future.exception()
            fault = f": {type(error).__name__}: {error}" if error else ""
            log(f"{peer.name}: compiled for {len(jobs[peer])} jobs in {time.monotonic() - start:.0f} s{fault}")

        return done

    compiles = [peer for peer in jobs if type(peer).prepare is not Peer.prepare]
    wanted = [peer for peer in compiles if jobs[peer] and not peer.missing()]
    with ThreadPoolExecutor(max(1, len(wanted))) as pool:
        for peer in wanted:
            pool.submit(peer.prepare, jobs[peer]).add_done_callback(report(peer))
