"""Headless Chromium, driven over a pipe in the DevTools protocol."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from typing import IO, Any

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), ""
)


class Page:
    """One page. Keeps what the browser logged: errors, and what the content security policy refused."""

    def __init__(self, to_browser: IO[bytes], from_browser: IO[bytes]) -> None:
        self.log: list[str] = []
        self._to_browser = to_browser
        self._from_browser = from_browser
        self._num_sent = 0
        self._has_loaded = False
        self._session: str | None = None
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """One command. Raises AssertionError for an error of the browser's."""
        self._num_sent += 1
        session = {"sessionId": self._session} if self._session else {}
        command = {"id": self._num_sent, "method": method, "params": params, **session}
        self._to_browser.write(json.dumps(command).encode() + b"\0")
        self._to_browser.flush()
        while True:
            message = self._read()
            if message.get("id") == self._num_sent:
                assert "error" not in message, message
                return message["result"]

    def _read(self) -> dict[str, Any]:
        raw = bytearray()
        while (byte := self._from_browser.read(1)) not in (b"\0", b""):
            raw += byte
        assert raw, "the browser has ended"
        message = json.loads(raw)
        self._has_loaded |= message.get("method") == "Page.loadEventFired"
        if message.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
            self.log.append(json.dumps(message["params"]))
        return message

    def run(self, script: str) -> Any:
        """The value of an expression; a promise's when it is kept."""
        found = self.ask("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, condition: str, timeout_s: float = 20) -> None:
        """Waits in the page until the expression is true."""
        self.run(
            f"""new Promise((keep, fail) => {{
              const end = Date.now() + {1000 * timeout_s};
              (function look() {{
                if ({condition}) keep(); else if (Date.now() > end) fail(new Error({json.dumps(condition)}));
                else setTimeout(look, 20);
              }})();
            }})"""
        )

    def open(self, url: str) -> None:
        self._has_loaded = False
        self.ask("Page.navigate", url=url)
        while not self._has_loaded:
            self._read()


@contextlib.contextmanager
def page() -> Iterator[Page]:
    """A new browser with nothing stored, ended at the end."""
    theirs_in, to_browser = os.pipe()
    from_browser, theirs_out = os.pipe()
    # The browser's children may still write while its folder is removed.
    folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    with folder as home, open(to_browser, "wb") as sending, open(from_browser, "rb") as reading:
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        flags += ["--disable-background-networking", "--no-proxy-server", f"--user-data-dir={home}"]
        # Descriptors 3 and 4 are the browser's side of the pipe.
        shell = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
        process = subprocess.Popen(
            ["bash", "-c", shell, "bash", CHROMIUM, "--remote-debugging-pipe", *flags, "about:blank"],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        try:
            yield Page(sending, reading)
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)
