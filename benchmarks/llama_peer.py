"""llama.cpp on the CPU, through llama-cpp-python: what `benchmarks/gguf.py` runs in an interpreter that has it.

    python benchmarks/llama_peer.py FILE THREADS

For every line that comes in, a line of JSON goes out: seconds for the prompt, and for a token after it. This file
imports nothing of lowbit.
"""

from __future__ import annotations

import json
import sys
import time

PROMPT, ROOM, STEPS = 512, 128, 64


def main(path: str, threads: int) -> None:
    from llama_cpp import Llama  # type: ignore[attr-defined]

    clock = time.process_time if threads == 1 else time.perf_counter
    model = Llama(path, n_ctx=1024, n_batch=PROMPT, n_threads=threads, n_threads_batch=threads, verbose=False)
    tokens = list(range(100, 100 + PROMPT))
    for _ in sys.stdin:
        model.reset()
        start = clock()
        model.eval(tokens)
        prompt = clock() - start
        model.reset()
        model.eval(tokens[: ROOM - STEPS])
        start = clock()
        for token in tokens[:STEPS]:
            model.eval([token])
        print(json.dumps([prompt, (clock() - start) / STEPS]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
