"""Sandbox for users' templates: chat and response templates run in a child process.

Owns the process and its thread: the event loop waits for neither. Each tenant has one question in the queue at most,
and in front of it each of its adapters one: slow templates of one do not stand in front of all of another's.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from loraplex_contracts.errors import AdapterInvalid, Unavailable
from loraplex_runtime.limited_process import LimitedProcess, LimitExceeded, Limits, ProcessFailed
from loraplex_server.config import bare_environment
from loraplex_server.frontend.tokenizing import MAX_WAITING_BYTES, ShortestFirstSemaphore
from loraplex_server.text.call_forms import CallForm
from loraplex_server.text.responses import MessagePart, ParsedMessage, message_of, num_reasoning_tokens

CALL_S: Final = 1.0
BYTES_PER_S: Final = 1 << 20  # a long chat has another second for each
LIMITS: Final = Limits(memory_bytes=1 << 30, stack_bytes=8 << 20, cpu_s=30)


Owner = tuple[str, str]  # of a question: tenant, and adapter id (empty of a template that is no adapter's)


class TemplateFault(Exception):
    """A template that cannot be used. `is_refusal`: it refuses these messages."""

    def __init__(self, reason: str, *, is_refusal: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.is_refusal = is_refusal


class Sandbox:
    """A child process that runs templates, for one event loop. Call `close` at the end."""

    def __init__(self, *, call_s: float = CALL_S) -> None:
        self._call_s = call_s
        self._process = LimitedProcess("loraplex_server.text.sandbox:serving", None, LIMITS, bare_environment())
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="sandbox")
        self._use = ShortestFirstSemaphore(1, MAX_WAITING_BYTES)
        self._turns: weakref.WeakValueDictionary[Owner | str, asyncio.Lock] = weakref.WeakValueDictionary()

    @property
    def pid(self) -> int | None:
        """The process's id; None where there is no process."""
        return self._process.pid

    def prepare(self) -> None:
        """Starts the process, which takes seconds, beside the event loop."""
        self._executor.submit(self._process.start)

    async def render(self, owner: Owner, template: str, given: Mapping[str, Any], num_bytes: int) -> str:
        """The text that a template makes. `given`: of `TextTokenizer.template_input`, about `num_bytes`. Raises
        TemplateFault, QueueFull, Unavailable."""
        answer = await self.ask(owner, {"do": "render", "template": template, "given": given}, num_bytes)
        if (refusal := answer.get("refusal")) is not None:
            raise TemplateFault(str(refusal), is_refusal=True)
        return str(answer["text"])

    async def ask(self, owner: Owner, question: Mapping[str, Any], num_bytes: int) -> dict[str, Any]:
        """The child's answer. Raises TemplateFault, QueueFull where too much waits, and Unavailable where there is no
        process to answer."""
        of_adapter, of_tenant = (self._turns.setdefault(one, asyncio.Lock()) for one in (owner, owner[0]))
        async with of_adapter, of_tenant:
            await self._use.acquire(num_bytes)
            loop = asyncio.get_running_loop()
            future = loop.run_in_executor(self._executor, self._call, question, num_bytes)
            future.add_done_callback(self._release)
            answer = await asyncio.shield(future)
        if (fault := answer.get("fault")) is not None:
            raise TemplateFault(str(fault))
        return answer

    async def close(self) -> None:
        """Kills the process. Questions under way fail."""
        self._process.close()
        await asyncio.to_thread(self._executor.shutdown, cancel_futures=True)

    def _call(self, question: Mapping[str, Any], num_bytes: int) -> dict[str, Any]:
        timeout_s = self._call_s + num_bytes / BYTES_PER_S
        try:
            return self._process.call(question, timeout_s)
        except LimitExceeded as limit:
            with contextlib.suppress(RuntimeError):  # it is being closed
                self._executor.submit(self._process.start)
            if limit.what == "time":
                return {"fault": f"it takes more than {timeout_s:.3g} s"}
            return {"fault": "it takes more memory than it may have"}
        except ProcessFailed as failure:
            raise Unavailable(
                f"the process that runs templates has failed ({failure}); try again", retry_after_s=1.0
            ) from None

    def _release(self, future: asyncio.Future[Any]) -> None:
        self._use.release()
        if not future.cancelled():
            future.exception()  # retrieved: its caller may have left


class UserReader:
    """Reads a completion by an adapter's response template, as a ResponseReader does. `how`: what the process is told
    of the completion."""

    def __init__(self, sandbox: Sandbox, owner: Owner, how: Mapping[str, Any]) -> None:
        self._sandbox = sandbox
        self._owner = owner
        self._how = how
        self._id = secrets.token_hex(8)
        self._text = ""
        self._made: list[MessagePart] = []
        self._reasoned: list[tuple[int, int]] = []

    async def push(self, text: str, *, is_end: bool = False) -> list[MessagePart]:
        """The parts that this text made certain; at the end also those that were held back. Raises AdapterInvalid,
        QueueFull, Unavailable."""
        if not text and not is_end:
            return []
        question = {"do": "read", "id": self._id, "start": len(self._text), "text": text, "is_end": is_end}
        answer: dict[str, Any] = {"is_unknown": True}
        if self._text:
            answer = await self._ask(question, len(text))
        if answer.get("is_unknown"):  # it is another process by now, or reads many others
            whole = {**question, "text": self._text + text, "how": self._how}
            answer = await self._ask(whole, len(self._text) + len(text))
        self._text += text
        parts = [MessagePart(*one) for one in answer["parts"]]
        self._made += parts
        self._reasoned = answer["reasoned"]
        return parts

    async def call_form(self) -> tuple[CallForm | None, str]:
        """The form of the calls that the template reads, and the mark that ends the region in which the answer begins.
        Raises as `push`."""
        answer = await self._ask({"do": "form", "how": self._how}, 0)
        form: dict[str, Any] | None = answer["form"]
        if form is not None and form["parameter"] is not None:
            form["parameter"] = tuple(form["parameter"])  # JSON has lists
        return None if form is None else CallForm(**form), answer["closing"]

    async def _ask(self, question: Mapping[str, Any], num_bytes: int) -> dict[str, Any]:
        try:
            return await self._sandbox.ask(self._owner, question, num_bytes)
        except TemplateFault as fault:
            raise AdapterInvalid(
                f"the response template of adapter {self._owner[1]!a} cannot be used: {fault.reason}",
                resource=self._owner[1],
            ) from fault

    def message(self) -> ParsedMessage:
        """The message of all parts so far."""
        return message_of(self._made)

    def num_reasoning_tokens(self, starts: Sequence[int]) -> int:
        """Number of tokens of reasoning, as a ResponseReader counts them. To be called at the end."""
        return num_reasoning_tokens(self._reasoned, starts)
