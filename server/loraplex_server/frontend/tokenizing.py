"""Tokenization beside the event loop, in threads or a process.

Short texts are tokenized on the event loop; longer ones in threads, where the library gives the interpreter's lock
back; the longest, and chats with control tokens in their texts, in a process, which is killed when the caller of a
long text goes away. The number at once is bounded, and so are the bytes that wait. The ids are those of
`TextTokenizer` in each case. Owns the threads, the process (`tokenizer_process.py`) and their queues.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import time
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, TypeVar

from loraplex_contracts.errors import ContextLengthExceeded, InvalidArgument, OutOfMemory, QueueFull, unexpected
from loraplex_proto.estimates import TOKEN_BYTES
from loraplex_proto.validate import ModelLimits, check_prompt_length
from loraplex_server.frontend.tokenizer_process import Job, Maker, ProcessEnded, TokenizerProcess
from loraplex_server.text.control_tokens import SafeText
from loraplex_server.text.tokenizer import SHORT_CHARS, TextTokenizer, Truncation, num_bytes_of
from loraplex_server.text.vocabulary import max_bytes_per_token

T = TypeVar("T")

_logger = logging.getLogger(__name__)

# Longer texts go to the process. Shorter ones take a thread at most some 0.2 s, and need not be stopped.
LONG_BYTES: Final = 1 << 17
NUM_THREADS: Final = 2
MAX_WAITING_BYTES: Final = 64 << 20
IDLE_S: Final = 20.0  # until the process gives its memory back
# The process counts as hung after this time, and a second more for each SLOWEST_BYTES_PER_S of the text.
HUNG_S: Final = 60.0
SLOWEST_BYTES_PER_S: Final = 1 << 16
BYTES_PER_S: Final = 1 << 20  # roughly what tokenizers do
RETRY_AFTER_S: Final = 1.0


class ShortestFirstSemaphore:
    """Bounds how many texts are tokenized at once, and the bytes that wait. One text of any size may always wait.

    Texts go in the order of arrival plus expected time: a short one passes long ones, and a long one is not passed for
    ever. For one event loop.
    """

    def __init__(self, num_at_once: int, max_waiting_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._num_free = num_at_once
        self._max_waiting_bytes = max_waiting_bytes
        self._clock = clock
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []  # a heap; the number settles equal times
        self._numbers = itertools.count()
        self._waiting_bytes = 0

    async def acquire(self, num_bytes: int) -> None:
        """Waits for a turn. Call `release` afterwards, unless this is cancelled. Raises QueueFull."""
        if self._num_free:
            self._num_free -= 1
            return
        if self._waiting_bytes and self._waiting_bytes + num_bytes > self._max_waiting_bytes:
            raise QueueFull(
                f"{self._waiting_bytes} bytes of other requests' text wait to be tokenized; try again",
                retry_after_s=RETRY_AFTER_S,
            )
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        due_s = self._clock() + num_bytes / BYTES_PER_S
        heapq.heappush(self._waiting, (due_s, next(self._numbers), granted))
        self._waiting_bytes += num_bytes
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():  # granted in the same moment
                self.release()
            raise
        finally:
            self._waiting_bytes -= num_bytes

    def release(self) -> None:
        """Ends a turn: the next text goes on."""
        while self._waiting:
            _, _, granted = heapq.heappop(self._waiting)
            if not granted.done():
                granted.set_result(None)
                return
        self._num_free += 1


class Tokenizing:
    """Serves all requests of one worker. Call `close` at the end."""

    def __init__(
        self, tokenizer: TextTokenizer, limits: ModelLimits, *, idle_s: float = IDLE_S, hung_s: float = HUNG_S
    ) -> None:
        self.tokenizer = tokenizer
        self.limits = limits
        self._idle_s = idle_s
        self._hung_s = hung_s
        self._serialized = tokenizer.serialized()
        self._bytes_per_token = None if self._serialized is None else max_bytes_per_token(self._serialized)
        pieces = {} if tokenizer.vocabulary is None else tokenizer.vocabulary.pieces
        # Tokens that the model has no embedding of.
        self._beyond = frozenset(token_id for token_id in pieces.values() if token_id >= limits.vocab_size)
        if self._beyond:
            _logger.warning(
                "the tokenizer has %d tokens that the model has not, beginning with %a: prompts with one are refused",
                len(self._beyond),
                tokenizer.token_text(min(self._beyond)),
            )
        self._executor = ThreadPoolExecutor(NUM_THREADS + 1, thread_name_prefix="tokenizing")
        self._threads = ShortestFirstSemaphore(NUM_THREADS, MAX_WAITING_BYTES)
        self._process_use = ShortestFirstSemaphore(1, MAX_WAITING_BYTES)
        self._process: TokenizerProcess | None = None
        self._idle: asyncio.TimerHandle | None = None

    async def encode(
        self, text: str | SafeText, *, special: bool = True, truncation: Truncation | None = None
    ) -> Sequence[int]:
        """The ids of a prompt. Raises ContextLengthExceeded, for some texts before they are tokenized, QueueFull,
        InvalidArgument for a truncation to less than the special tokens or a token beyond the model's vocabulary, and
        what `TextTokenizer.encode` raises."""
        return self._known(await self._encode(text, special, truncation))

    async def _encode(self, text: str | SafeText, special: bool, truncation: Truncation | None) -> Sequence[int]:
        if truncation is not None and special and truncation.max_tokens < (num := self.tokenizer.num_added_tokens()):
            raise InvalidArgument(
                f"`truncate_prompt.max_tokens` is {truncation.max_tokens}; the tokenizer adds {num} special tokens: "
                "allow more, or set `omit_special_tokens`",
                field="truncate_prompt.max_tokens",
            )
        if isinstance(text, SafeText):
            return await self._encode_safe(text, truncation)
        encoded = partial(self.tokenizer.encode, text, add_special_tokens=special, truncation=truncation)
        if len(text) < SHORT_CHARS:
            return encoded()
        num_bytes = num_bytes_of(text)
        if truncation is None:
            self._check_length(num_bytes)
        if num_bytes <= LONG_BYTES or self._serialized is None:
            return await self.off_loop(num_bytes, encoded)
        job = Job(text, special, self.limits.max_context_tokens, truncation=truncation)
        ids = await self._in_process(num_bytes, job)
        if isinstance(ids, int):
            check_prompt_length(ids, self.limits)
        assert isinstance(ids, array)
        return ids

    async def encode_pair(
        self, first: str, second: str, *, special: bool = True, truncation: Truncation | None = None
    ) -> Sequence[int]:
        """Does what `TextTokenizer.encode_pair` does. Raises as well ContextLengthExceeded before texts are tokenized,
        QueueFull and InvalidArgument for texts of more than LONG_BYTES together or a token beyond the model's
        vocabulary."""
        num_bytes = num_bytes_of(first) + num_bytes_of(second)
        if truncation is None:
            self._check_length(num_bytes)
        if num_bytes > LONG_BYTES:
            raise InvalidArgument(
                f"`query` and a document have {num_bytes} bytes of text together; a pair may have {LONG_BYTES}: "
                "shorten them, or send token_ids",
                field="query",
            )
        encode = self.tokenizer.encode_pair
        work = partial(encode, first, second, add_special_tokens=special, truncation=truncation)
        return self._known(await self.off_loop(num_bytes, work))

    def _known(self, ids: Sequence[int]) -> Sequence[int]:
        """The ids of a prompt, if the model has embeddings of them all. Raises InvalidArgument."""
        if beyond := self._beyond.intersection(ids):
            found = min(beyond)
            name = self.tokenizer.token_text(found)
            raise InvalidArgument(
                f"the prompt has the token {name!a} ({found}), which the tokenizer has and the model has not: its "
                f"vocabulary ends at {self.limits.vocab_size - 1}; leave it out",
                field="input",
            )
        return ids

    async def _encode_safe(self, safe: SafeText, truncation: Truncation | None) -> Sequence[int]:
        num_bytes = num_bytes_of(safe.text)
        if truncation is None:
            self._check_length(num_bytes_of(safe.plain))
        ids = await self._in_process(num_bytes, self._safe_job(safe))
        assert isinstance(ids, array)
        return ids if truncation is None else truncation.cut(ids)

    def _safe_job(self, safe: SafeText, make: Maker | None = None, *, with_offsets: bool = False) -> Job:
        """For the process, however short the text is: copying a tokenizer of 260,000 tokens holds the interpreter's
        lock for seconds."""
        if self._serialized is None:
            raise InvalidArgument(
                "the messages hold control tokens of the model, which this tokenizer cannot write as text; leave them "
                "out",
                field="chat",
            )
        return Job(safe.text, False, make=make, with_offsets=with_offsets, controls=safe.controls)

    async def tokenize(
        self,
        text: str | SafeText,
        make: Maker,
        *,
        special: bool = True,
        with_offsets: bool = False,
        truncation: Truncation | None = None,
    ) -> bytes:
        """The result of `make` for the ids of a text of any length, and their offsets; `truncation`: of a text that is
        no chat. Raises QueueFull, and what `TextTokenizer.encode` raises."""
        if isinstance(text, SafeText):
            job = self._safe_job(text, make, with_offsets=with_offsets)
            answer = await self._in_process(num_bytes_of(text.text), job)
            assert isinstance(answer, bytes)
            return answer
        num_bytes = num_bytes_of(text)
        if num_bytes <= LONG_BYTES or self._serialized is None:
            return await self.off_loop(num_bytes, partial(self._made, text, make, special, with_offsets, truncation))
        job = Job(text, special, make=make, with_offsets=with_offsets, truncation=truncation)
        answer = await self._in_process(num_bytes, job)
        assert isinstance(answer, bytes)
        return answer

    async def decode(self, token_ids: Sequence[int], *, keep_special: bool = False, field: str = "output.echo") -> str:
        """The text of token ids. Raises what `TextTokenizer.decode` raises."""
        decode = partial(self.tokenizer.decode, token_ids, keep_special=keep_special, field=field)
        return await self.off_loop(len(token_ids) * TOKEN_BYTES, decode)

    async def off_loop(self, num_bytes: int, work: Callable[[], T]) -> T:
        """Runs work that takes about as long as tokenizing `num_bytes`, in a thread if that is long."""
        if num_bytes < SHORT_CHARS:
            return work()
        await self._threads.acquire(num_bytes)
        return await self._work(self._threads, work)

    async def close(self) -> None:
        """Ends process and threads, and waits until they are gone. Texts under way fail."""
        process, self._process = self._process, None
        if self._idle is not None:
            self._idle.cancel()
        if process is not None:
            await asyncio.to_thread(process.end)
        # Its threads may still wait for the end of processes that were killed before.
        await asyncio.to_thread(self._executor.shutdown, cancel_futures=True)

    def _made(self, text: str, make: Maker, special: bool, with_offsets: bool, truncation: Truncation | None) -> bytes:
        if with_offsets:
            encoding = self.tokenizer.encode_with_offsets(text, add_special_tokens=special, truncation=truncation)
            ids, offsets = encoding.ids, encoding.offsets
        else:
            ids, offsets = self.tokenizer.encode(text, add_special_tokens=special, truncation=truncation), ()
        assert self.tokenizer.vocabulary is not None, "there are ids of a text"
        return make(self.tokenizer.vocabulary, ids, offsets)

    def _check_length(self, num_bytes: int) -> None:
        if self._bytes_per_token is None:
            return
        num_tokens = -(-num_bytes // self._bytes_per_token)
        if num_tokens >= self.limits.max_context_tokens:
            raise ContextLengthExceeded(
                f"the prompt is too long: this model's maximum context length is {self.limits.max_context_tokens} "
                f"tokens, at least one of them new, and the prompt has {num_bytes} bytes of text, which are "
                f"{num_tokens} tokens at least; shorten it",
                field="input",
            )

    async def _in_process(self, num_bytes: int, job: Job) -> array[int] | int | bytes:
        await self._process_use.acquire(num_bytes)
        process = self._take_process()
        hung = asyncio.timeout(self._hung_s + num_bytes / SLOWEST_BYTES_PER_S)
        try:
            async with hung:
                result = await self._work(self._process_use, partial(process.run, job))
        except ProcessEnded as error:
            self._process = None
            if error.is_out_of_memory:
                raise OutOfMemory(
                    "there was not enough memory to tokenize this text; shorten it, or send token_ids"
                ) from error
            raise unexpected(error, "tokenizing a long text") from error
        except BaseException as error:  # the caller left, the process hangs, or the job failed and killed it
            if hung.expired() or num_bytes > LONG_BYTES:
                self._process = None
                process.kill()
            else:  # soon done; to start again would take longer than many a caller waits
                self._end_when_idle()
            if hung.expired() and isinstance(error, TimeoutError):
                raise unexpected(error, "waiting for the process that tokenizes long texts") from error
            raise
        self._end_when_idle()
        return result

    def _end_when_idle(self) -> None:
        """The next text that is sent cancels this."""
        self._idle = asyncio.get_running_loop().call_later(self._idle_s, self._end_idle_process)

    async def _work(self, semaphore: ShortestFirstSemaphore, work: Callable[[], T]) -> T:
        """Runs `work` in a thread. The semaphore is released when the thread is done, even if the caller has left."""
        future = asyncio.get_running_loop().run_in_executor(self._executor, work)
        try:
            return await asyncio.shield(future)
        finally:
            if future.done():
                semaphore.release()
            else:
                future.add_done_callback(partial(_release, semaphore))

    def _take_process(self) -> TokenizerProcess:
        if self._idle is not None:
            self._idle.cancel()
        if self._process is None or self._process.is_killed:
            assert self._serialized is not None
            self._process = TokenizerProcess(self._serialized)
        return self._process

    def _end_idle_process(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            self._executor.submit(process.end)


def _release(semaphore: ShortestFirstSemaphore, future: asyncio.Future[Any]) -> None:
    semaphore.release()
    if not future.cancelled():
        future.exception()  # retrieved, so that asyncio does not log it: nothing waits for this work
