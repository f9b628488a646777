"""Templates that hang or crash their process, and their neighbours."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from loraplex_contracts.errors import Unavailable
from loraplex_runtime.limited_process import LimitedProcess, ProcessFailed
from loraplex_server.frontend.sandbox import Sandbox, TemplateFault

pytestmark = pytest.mark.slow  # it starts processes

GIVEN: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "arguments": {}}
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture
async def sandbox() -> AsyncIterator[Sandbox]:
    one = Sandbox(call_s=0.5)
    try:
        yield one
    finally:
        await one.close()


async def test_neighbours_of_a_template_that_hangs(sandbox: Sandbox) -> None:
    async def render(owner: str, template: str) -> str:
        return await sandbox.render(("", owner), template, GIVEN, 100)

    assert await render("a", "{{ messages[0].content }}") == "hi"
    pid = sandbox.pid
    hanging = [asyncio.create_task(render("slow", ENDLESS)) for _ in range(3)]
    await asyncio.sleep(0.05)
    longest_s = 0.0

    async def watch() -> None:
        nonlocal longest_s
        while True:
            before_s = time.monotonic()
            await asyncio.sleep(0.01)
            longest_s = max(longest_s, time.monotonic() - before_s)

    watching = asyncio.create_task(watch())
    assert await render("a", "ok") == "ok"
    assert sum(task.done() for task in hanging) <= 2, "it did not wait for all of the other's"
    for task in hanging:
        with pytest.raises(TemplateFault, match=r"more than 0\.5"):
            await task
    watching.cancel()
    assert longest_s < 5, "the event loop went on"
    assert await render("a", "again") == "again"
    assert sandbox.pid != pid


async def test_processes_that_end(sandbox: Sandbox) -> None:
    await sandbox.render(("", "a"), "x", GIVEN, 0)
    assert sandbox.pid is not None
    os.kill(sandbox.pid, signal.SIGKILL)
    assert await sandbox.render(("", "a"), "y", GIVEN, 0) == "y", "asked again"
    with pytest.raises(TemplateFault, match="more memory"):
        await sandbox.render(("", "a"), "{{ 'a' * 10**10 }}", GIVEN, 0)
    with pytest.raises(TemplateFault, match="division") as caught:
        await sandbox.render(("", "a"), "{{ 1 / 0 }}", GIVEN, 0)
    assert caught.value.is_refusal


async def test_a_caller_that_leaves_holds_nothing_up(sandbox: Sandbox) -> None:
    leaving = asyncio.create_task(sandbox.render(("", "a"), ENDLESS, GIVEN, 0))
    await asyncio.sleep(0.05)
    leaving.cancel()
    assert await sandbox.render(("", "a"), "z", GIVEN, 0) == "z"


async def test_a_process_that_does_not_start_is_no_fault_of_the_template(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(process: LimitedProcess) -> None:
        raise ProcessFailed("no more processes")

    monkeypatch.setattr(LimitedProcess, "start", start)
    with pytest.raises(Unavailable, match="no more processes") as caught:
        await sandbox.render(("", "a"), "x", GIVEN, 0)
    assert caught.value.retry_after_s == 1.0
