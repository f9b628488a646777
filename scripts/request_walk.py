"""Files and functions of the project that one warm request passes.

    python scripts/request_walk.py [--list] [--speculation KIND]

Serves the demo's base model with a router and a worker in this process, engine included, sends a request twice and
counts what the second one ran, less what an idle server runs in the same time (heartbeats, polls). Not counted:
generated code, dataclass methods and comprehensions.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import threading
import time
from collections import Counter
from importlib import resources
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

PREFIXES = ("loraplex",)
SKIPPED = ("<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>", "<lambda>", "<module>")


class Recorder:
    """Owns what was called, by code object."""

    def __init__(self) -> None:
        self.calls: Counter[CodeType] = Counter()
        self.pairs: set[tuple[CodeType, CodeType]] = set()
        self.is_on = False

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and self.is_on:
            self.calls[frame.f_code] += 1
            if frame.f_back is not None:
                self.pairs.add((frame.f_back.f_code, frame.f_code))


def is_ours(code: CodeType) -> bool:
    parts = Path(code.co_filename).parts
    return (
        any(part.startswith(PREFIXES) for part in parts[:-1])
        and "_pb2" not in parts[-1]
        and code.co_name not in SKIPPED
        and not code.co_filename.startswith("<")
        and "scripts" not in parts
    )


def run_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="name the files and functions")
    parser.add_argument("--speculation", help="off, prompt_lookup or auto; the server's default otherwise")
    options = parser.parse_args()
    recorder = Recorder()
    threading.setprofile(recorder)
    sys.setprofile(recorder)

    import loraplex
    from loraplex_router.config import RouterConfig
    from loraplex_router.server import start_router
    from loraplex_server.config import AdaptersConfig, EngineConfig, ModelConfig, WorkerConfig
    from loraplex_server.grpc.server import start_worker

    world = Path(str(resources.files("loraplex_demo"))) / "world"
    loop = run_loop()

    def call(coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(120)

    engine = EngineConfig(
        model=ModelConfig(str(world / "base"), device="cpu"),
        adapters=AdaptersConfig(root=world / "adapters"),
    )
    config = WorkerConfig(engine, port=0)
    worker = call(start_worker(config, inline=True))
    router = call(start_router(RouterConfig(workers=(worker.address,), port=0)))
    client = loraplex.Client(router.address)
    more = {"speculation": options.speculation} if options.speculation else {}

    def request() -> None:
        for _ in client.stream("name: Ada; age: 36", adapter_id="json", max_tokens=8, **more):
            pass

    deadline = time.monotonic() + 30
    while True:
        try:
            request()
            break
        except loraplex.LoraplexError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
    time.sleep(1.0)
    recorder.is_on = True
    time.sleep(3.0)
    recorder.is_on = False
    idle = {code for code in recorder.calls if is_ours(code)}
    recorder.calls.clear()
    recorder.is_on = True
    request()
    recorder.is_on = False
    met = {code for code in recorder.calls if is_ours(code)}
    walk = sorted(met - idle, key=lambda code: (code.co_filename, code.co_firstlineno))
    files = sorted({code.co_filename for code in walk})
    own = set(walk)
    crossing = {
        (caller.co_filename, callee)
        for caller, callee in recorder.pairs
        if callee in own and is_ours(caller) and caller.co_filename != callee.co_filename
    }
    print(f"{len(files)} files, {len(walk)} functions, {len(crossing)} calls from one file into another")
    if options.list:
        for file in files:
            names = ", ".join(code.co_qualname for code in walk if code.co_filename == file)
            print("/".join(Path(file).parts[-3:]), "-", names)
    client.close()
    call(router.drain(0.0))
    call(worker.drain(0.0))


if __name__ == "__main__":
    main()
