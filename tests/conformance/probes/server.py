"""`loraplex serve` as a child of a probe."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from pathlib import Path

from calls import facts

READY_S = 120


class Server:
    """A server on free ports. Raises RuntimeError for one that ends, or is not ready in time."""

    def __init__(self, model: Path, *options: str) -> None:
        ports = ("--port", "0", "--http-port", "0", "--threads", "1")
        self._process = subprocess.Popen(
            [*facts.command, "serve", str(model), *ports, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": facts.python_path, "PYTHONUNBUFFERED": "1"},
        )
        self.url = self._ready()

    def _ready(self) -> str:
        assert self._process.stdout is not None
        late = threading.Timer(READY_S, self._process.kill)
        late.start()
        said: list[str] = []
        for line in self._process.stdout:
            said.append(line)
            if "HTTP on " in line:
                late.cancel()
                threading.Thread(target=self._process.stdout.read, daemon=True).start()
                return "http://" + line.partition("HTTP on ")[2].split()[0].rstrip(",;)")
        late.cancel()
        raise RuntimeError("".join(said)[-2000:])

    def end(self) -> None:
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
