"""Line protocol between a benchmark and a system in its own process.

    {"ready": true, "versions": {...}}       once, when everything is loaded
    {"seconds": 1.25, "tokens": 2048}        for each workload: how long it took, and how many tokens came out

The process ends when its input does. Imports nothing but the standard library, because every system has an environment
of its own.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping


def answer(prepare: Callable[[str], Callable[[], int]], versions: Mapping[str, str], replies: int) -> None:
    """Serves the protocol: `prepare` gets a workload ready; what it returns carries it out, which is what is timed, and
    returns the number of tokens that came out. `replies` is what `take_stdout` returned."""
    with os.fdopen(replies, "w") as out:
        print(json.dumps({"ready": True, "versions": dict(versions)}), file=out, flush=True)
        for line in sys.stdin:
            run = prepare(line.strip())
            start = time.perf_counter()
            num_tokens = run()
            seconds = time.perf_counter() - start
            print(json.dumps({"seconds": seconds, "tokens": num_tokens}), file=out, flush=True)


def take_stdout() -> int:
    """A descriptor of standard output for replies; whatever libraries print goes to standard error from now on."""
    replies = os.dup(1)
    os.dup2(2, 1)
    return replies
