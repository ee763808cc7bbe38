"""Memory in which blocks of a kernel add up sums and count one another: `workspace`.

Launches on one stream use it in turn: a kernel touches it after griddepcontrol.wait alone, when all before it have
ended. So all kernels share it, and it is as large as the one that needs most. Streams run side by side: each has its
own. So has each captured graph: it may be replayed on any stream.
"""

from __future__ import annotations

import threading

import torch

from lowbit.passes.launch import COUNTERS

_buffers: dict[tuple[int, int, bool], tuple[int, torch.Tensor]] = {}
_lock = threading.Lock()


def workspace(device: int, stream: int, size: int, graph: int = 0) -> torch.Tensor:
    """Returns memory of at least so many bytes for a launch on a stream: u8 [bytes]. Its first `COUNTERS` words were
    zero before the first launch with it. Hold it until the launch has begun: another thread may get a larger one.

    graph   the number of the graph that is being captured on the stream, or 0
    """
    with _lock:
        owner, buffer = _buffers.get((device, stream, graph != 0), (graph, None))
        if buffer is None or owner != graph or len(buffer) < size:
            # While capturing, this makes a node that zeroes memory which the graph owns. The buffer of the graph before
            # may go: its memory stays with that graph. One that is too small goes when launches with it have ended.
            buffer = torch.zeros(max(size, 4 * COUNTERS), dtype=torch.uint8, device=f"cuda:{device}")
            _buffers[device, stream, graph != 0] = graph, buffer
        return buffer
