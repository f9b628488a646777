"""Compiled grammars: which tokens may come next.

Grammars are compiled in threads, off the step loop, within limits on their work, and kept by content. A completion has
its own matcher, a copy. The library gives the interpreter's lock back while it compiles or fills masks.
"""

from __future__ import annotations

import ctypes
import math
import os
import re
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from loraplex_contracts.errors import FailedPrecondition, InvalidArgument, LoraplexError, unexpected, without_frames
from loraplex_contracts.plan import GrammarMatcher
from loraplex_contracts.request import Grammar
from loraplex_runtime import cgroups
from loraplex_server.grammars.tokenizer import LibraryTokenizer, TokenSet, content_in_no_text

if TYPE_CHECKING:  # imported late: an engine runs without it, and then has no grammars
    from llguidance import LLExecutor, LLMatcher

Bits = npt.NDArray[np.int32]
Job = tuple[GrammarMatcher, int, Sequence[int]]  # see `allowed_tokens`
Jobs = Sequence[Job]

MAX_COMPILED: Final = 256
MAX_COMPILED_BYTES: Final = 16 << 20  # of their texts; refusals count as well
# After a compilation without a verdict, the time for which it counts as one.
RETRY_S: Final = 10.0
# Most masks take about 4 us: the caller's thread makes eight of them in less time than a hand-over takes. Made in
# parallel are those behind one that took long, and the first of a completion, which for a schema of 10 kB takes 2.5 ms.
# All times are those of 32,000 tokens.
AT_ONCE_S: Final = 0.5e-3  # of a step, for all rows
SLOW_S: Final = 0.1e-3
NUM_SLOW: Final = 16
# The library finds all tokens that have to come next, however many, and keeps the interpreter's lock: 1 us each. It is
# asked at each step of each completion, so a grammar with a longer run than this is not asked any more.
MAX_FORCED: Final = 512
# About 20 ms to build a lexer's expressions, 4 ms for a mask's lexer and 1 ms for its parser; 40 MB of lexer states.
_LIMITS: Final[Mapping[str, Any]] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 20_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 500_000,
}
# The library's words for a limit that was met, and for that of a lexer's states.
_LIMIT_MET: Final = re.compile("(?i)too (many|big|complex)")
_LEXER_FULL: Final = "too many states"
# A grammar that was compiled in less is compiled again, between steps, for a text whose lexer others have filled.
MAX_REBUILD_S: Final = 0.05


@dataclass(slots=True)
class Compiled:
    """One compiled grammar. All places in it share the library's lexer. The lexer's states are bounded; once it is
    full, no place that shares it goes on."""

    build: Callable[[], LLMatcher]  # a place at the beginning, with a lexer of its own
    build_s: float  # that it took
    lexer_is_full: bool = False
    forces_much: bool = False  # a run of forced tokens was longer than MAX_FORCED


class Matcher:
    """The place of one completion in its grammar. Not safe to use from several threads at once."""

    def __init__(self, inner: LLMatcher, tokens: TokenSet, compiled: Compiled, taken: Sequence[int] = ()) -> None:
        self.inner = inner
        self.num_slow = 1
        self._tokens = tokens
        self._compiled = compiled
        self._taken = [*taken]
        self._has_own_lexer = False
        self._forced: tuple[int, ...] | None = None  # None: to be found

    @property
    def num_words(self) -> int:
        return self._tokens.num_words

    def copy(self) -> Matcher:
        return Matcher(self.inner.deep_copy(), self._tokens, self._compiled, self._taken)

    @property
    def lexer_is_full(self) -> bool:
        """True if the lexer that copies share is full: new texts need the grammar compiled again."""
        return self._compiled.lexer_is_full

    def rebuild(self, reason: str) -> bool:
        if _LEXER_FULL not in reason or self._has_own_lexer:
            return False
        self._compiled.lexer_is_full = self._has_own_lexer = True
        if self._compiled.build_s > MAX_REBUILD_S:
            return False
        inner = self._compiled.build()
        if self._taken and not inner.consume_tokens(self._taken):
            return False  # the text alone needs more states than there are
        self.inner = inner
        return True

    def advance(self, token_id: int) -> bool:
        self._taken.append(token_id)
        if not self.inner.consume_token(token_id):
            self.rebuild(self.inner.get_error())
        forced = self._forced
        self._forced = forced[1:] or None if forced and forced[0] == token_id else None
        return self._is_over()

    def num_legal(self, draft: Sequence[int]) -> int:
        num_before_eos = next((i for i, one in enumerate(draft) if one in self._tokens.eos_token_ids), len(draft))
        # On a copy: beyond its limits a matcher is lost, and the draft may be wrong.
        probe = self.copy()
        num_legal = probe.inner.try_consume_tokens(list(draft[:num_before_eos]))
        return 0 if probe.error else max(0, num_legal - probe._is_over())

    def forced(self) -> Sequence[int]:
        if self._forced is None:
            found = [] if self._compiled.forces_much else self.inner.compute_ff_tokens()
            self._compiled.forces_much |= len(found) > MAX_FORCED
            self._forced = tuple(found[:MAX_FORCED])
        return self._forced

    @property
    def error(self) -> str:
        if not self.inner.is_error():
            return ""
        reason = self.inner.get_error().split("\n", 1)[0]
        if _LIMIT_MET.search(reason):
            return f"the grammar is too complex to go on in it: {reason}"
        return f"the grammar's library does not go on in this text, though no limit was met: {reason}"

    def _is_over(self) -> bool:
        if self.inner.is_stopped():
            return not self.inner.is_error()
        end_id = self._tokens.end_id
        if end_id is None or not self.inner.is_accepting():
            return False
        return int.from_bytes(self.inner.compute_bitmask(), "little") == 1 << end_id


def allowed_tokens(jobs: Jobs, num_rows: int) -> Bits:
    """Masks [num_rows, num_words] of the tokens that may come next, a bit for each. `jobs`: matchers, each with the
    first of its rows and its draft tokens, all of them legal; behind each draft token comes another row."""
    bits = _no_masks(jobs, num_rows)
    fill_in_parallel(_fill_at_once(jobs, bits), bits)
    return bits


def _no_masks(jobs: Jobs, num_rows: int) -> Bits:
    return np.zeros((num_rows, jobs[0][0].num_words), dtype=np.int32)


def _fill_at_once(jobs: Jobs, bits: Bits) -> Jobs:
    """Fills the masks of quick matchers in this thread, until the time for it is over. Returns the jobs that are
    left."""
    now_s = time.perf_counter()
    end_s = now_s + AT_ONCE_S
    left: list[Job] = []
    for job in jobs:
        matcher = job[0]
        if matcher.num_slow or now_s > end_s:
            matcher.num_slow = max(0, matcher.num_slow - 1)
            left.append(job)
            continue
        begin_s = now_s
        _fill(job, bits)
        now_s = time.perf_counter()
        if now_s - begin_s > SLOW_S:
            matcher.num_slow = NUM_SLOW
    return left


def _fill(job: Job, bits: Bits) -> None:
    """Fills the masks of one matcher in this thread."""
    matcher, row, draft = job
    start, row_bytes, reason = _address(bits), bits.shape[1] * bits.itemsize, ""
    for inner, at in _along(matcher.inner, row, draft):
        inner.unsafe_compute_mask_ptr(start + at * row_bytes, row_bytes)
        reason = _clear_if_lost(inner, at, bits) or reason
    if reason and matcher.rebuild(reason):
        _fill(job, bits)


def fill_in_parallel(jobs: Jobs, bits: Bits) -> None:
    """Fills masks in the library's threads: of all matchers at once, along their drafts one after another."""
    iterators = [_along(matcher.inner, row, draft) for matcher, row, draft in jobs]
    reasons = [""] * len(jobs)
    while places := [(idx, place) for idx, one in enumerate(iterators) if (place := next(one, None)) is not None]:
        rows = [place for _, place in places]
        _executor().unsafe_compute_mask_ptr(rows, _address(bits), bits.shape[1] * bits.itemsize, len(bits))
        for idx, (inner, at) in places:
            reasons[idx] = _clear_if_lost(inner, at, bits) or reasons[idx]
    for job, reason in zip(jobs, reasons, strict=True):
        if reason and job[0].rebuild(reason):
            _fill(job, bits)


def _along(inner: LLMatcher, row: int, draft: Sequence[int]) -> Iterator[tuple[LLMatcher, int]]:
    """The place in the grammar before the draft and behind each of its tokens, with their rows. Behind the draft's
    tokens it is one copy that goes on: to make one takes a microsecond for ten bytes of the text so far. The library's
    own masks along drafts (1.9.1) are wrong behind some, where it goes back: such a token would lose the text."""
    yield inner, row
    if draft:
        inner = inner.deep_copy()
    for at, token_id in enumerate(draft, start=row + 1):
        inner.consume_token(token_id)
        yield inner, at


def _address(bits: Bits) -> int:
    """Address of masks. Takes two thirds of the time of `bits.ctypes.data`, behind a step that has emptied the
    caches."""
    return ctypes.addressof(ctypes.c_char.from_buffer(bits.data))


def _clear_if_lost(inner: LLMatcher, row: int, bits: Bits) -> str:
    """Clears the mask of a matcher that is beyond its limits: it allows nothing. Returns the reason, empty for none."""
    if not inner.is_error():
        return ""
    bits[row] = 0
    return inner.get_error()


_executors: list[LLExecutor] = []  # made with the first mask


def _executor() -> LLExecutor:
    if not _executors:
        from llguidance import LLExecutor

        # A core is left to who waits for the masks, and does other work meanwhile.
        _executors.append(LLExecutor(max(1, int(min(8, (os.cpu_count() or 1) - 1, cgroups.cpu_quota() - 1)))))
    return _executors[0]


class MaskThread:
    """Makes masks beside the caller's other work, where they take long. Owns the thread, which starts with the first
    of those."""

    def __init__(self) -> None:
        self._bits: Bits | None = None
        self._jobs: SimpleQueue[tuple[Jobs, Bits] | None] = SimpleQueue()
        self._begun: SimpleQueue[None] = SimpleQueue()
        self._made: SimpleQueue[BaseException | None] = SimpleQueue()
        self._has_thread = self._is_busy = False

    def start(self, jobs: Jobs, num_rows: int) -> None:
        """Begins to make the masks that `allowed_tokens` makes, in the thread. Leave the matchers alone until `wait`
        has returned; call `wait` once for each start."""
        self._bits = _no_masks(jobs, num_rows)
        left = _fill_at_once(jobs, self._bits)
        self._is_busy = bool(left)
        if not left:
            return
        if not self._has_thread:
            self._has_thread = True
            queues = self._jobs, self._begun, self._made
            threading.Thread(target=_make_masks, args=queues, name="masks", daemon=True).start()
            weakref.finalize(self, self._jobs.put, None)
        self._jobs.put((left, self._bits))
        # The interpreter's lock changes hands here. Without this wait it would only when the caller next gives it back
        # for long, which is in the model's own computation.
        self._begun.get()

    def wait(self) -> Bits:
        """The masks. Raises what making them has raised."""
        bits, self._bits = self._bits, None
        assert bits is not None, "started first"
        if self._is_busy and (error := self._made.get()) is not None:
            raise error
        return bits


def _make_masks(
    jobs: SimpleQueue[tuple[Jobs, Bits] | None],
    begun: SimpleQueue[None],
    made: SimpleQueue[BaseException | None],
) -> None:
    while (job := jobs.get()) is not None:
        begun.put(None)
        try:
            fill_in_parallel(*job)
            made.put(None)
        except BaseException as error:
            made.put(error)
        del job


class Compiler:
    """Compiles grammars for one model, each in the thread of its caller."""

    def __init__(self, tokenizer: LibraryTokenizer) -> None:
        """Raises what the library raises on tokenizers that it does not know, and ImportError without it."""
        from llguidance import LLTokenizer

        self._tokens, self._special = tokenizer.tokens, tokenizer.special_ids
        ends = list(tokenizer.end_ids)
        self._tokenizer = LLTokenizer(tokenizer.serialized, n_vocab=self._tokens.num_ids, eos_token=ends)

    def compile(self, grammar: Grammar) -> Matcher:
        """A matcher for the grammar. Raises InvalidArgument."""
        from llguidance import LLMatcher, LLParserLimits

        from loraplex_server.grammars.source import refusal, with_ids

        limits = LLParserLimits(**_LIMITS, verbose_errors=False)
        text = with_ids(grammar, self._special)
        begin_s = time.perf_counter()
        build = partial(LLMatcher, self._tokenizer, text, log_level=0, limits=limits)
        inner = build()
        if inner.is_error():
            reason = inner.get_error()
            for content, token_id in self._special.items():
                reason = reason.replace(content_in_no_text(token_id), content)
            raise refusal(grammar, reason)
        # Once here, because the first mask builds a part of the lexer: copies share it.
        mask = inner.compute_bitmask()
        if inner.is_error():
            raise refusal(grammar, inner.get_error())
        if not any(mask):
            raise refusal(grammar, "no text fits it")
        return Matcher(inner, self._tokens, Compiled(build, time.perf_counter() - begin_s))


class CompileLimit(Exception):
    """A compilation that ended without a verdict, at a limit of time or memory: a busy machine may be why."""


class Check(Protocol):
    """Compiles a grammar apart, first (checker.py)."""

    def check(self, grammar: Grammar) -> None:
        """Compiles the grammar. Raises InvalidArgument, CompileLimit and Unavailable."""
        ...

    def close(self) -> None: ...


class WaitingGrammars:
    """Grammars that wait for one thread, tenant by tenant: one with many grammars delays no other's."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, dict[Grammar, None]] = OrderedDict()  # by tenant, the next one first

    def add(self, grammar: Grammar, tenant: str) -> bool:
        """Adds a grammar. False where it waits for this tenant already."""
        waiting = self._waiting.setdefault(tenant, {})
        is_new = grammar not in waiting
        waiting[grammar] = None
        return is_new

    def discard(self, grammar: Grammar, tenant: str) -> None:
        """Removes a grammar that `tenant` no longer waits for."""
        waiting = self._waiting.get(tenant, {})
        waiting.pop(grammar, None)
        if tenant in self._waiting and not waiting:
            del self._waiting[tenant]

    def take(self) -> Grammar | None:
        """Takes out the next grammar, for all tenants that wait for it."""
        if not self._waiting:
            return None
        tenant, waiting = next(iter(self._waiting.items()))
        self._waiting.move_to_end(tenant)
        grammar = next(iter(waiting))
        for one in list(self._waiting):
            self.discard(grammar, one)
        return grammar


class Grammars:
    """Compiles grammars in two threads, one of them for simple ones. Owns the threads and the compiled grammars.

    `compiler`: None where there are no grammars. `notify` is called, in such a thread, when one has been compiled.
    """

    def __init__(
        self,
        compiler: Compiler | None,
        notify: Callable[[], None] = lambda: None,
        checker: Check | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._compiler = compiler
        self._clock = clock
        self._checker = checker
        self._notify = notify
        self._threads: dict[bool, ThreadPoolExecutor] = {}  # by whether it is for simple grammars
        self._lock = threading.Lock()  # over all below
        self._done: OrderedDict[Grammar, Matcher | LoraplexError] = OrderedDict()  # the least recently used first
        self._retry_s: dict[Grammar, float] = {}  # when one of these that failed without a verdict is compiled again
        self._num_bytes = 0
        self._waiting = {is_simple: WaitingGrammars() for is_simple in (False, True)}
        self._under_way: set[Grammar] = set()
        self._has_changes = False

    def resolve(self, grammar: Grammar, tenant: str = "") -> Matcher | None:
        """A matcher at the grammar's beginning; None while it is compiled, which the first call starts. Raises
        InvalidArgument for a grammar that cannot be enforced, FailedPrecondition where there are none."""
        if self._compiler is None:
            raise _unavailable(grammar)
        with self._lock:
            if self._clock() >= self._retry_s.get(grammar, math.inf):
                self._drop(grammar)
            found = self._done.get(grammar)
            if isinstance(found, Matcher) and found.lexer_is_full:
                self._drop(grammar)
                found = None
            if found is not None:
                self._done.move_to_end(grammar)
            elif grammar not in self._under_way:
                if grammar.is_simple not in self._threads:
                    self._threads[grammar.is_simple] = ThreadPoolExecutor(1, thread_name_prefix="grammars")
                if self._waiting[grammar.is_simple].add(grammar, tenant):
                    self._threads[grammar.is_simple].submit(self._run_next, grammar.is_simple, self._compiler)
        if isinstance(found, LoraplexError):
            raise found.with_traceback(None)  # else each use would add its frames, with all that they hold
        return found

    def forget(self, grammar: Grammar, tenant: str = "") -> None:
        """Called when no request of the tenant waits for the grammar any more. Where no other tenant's does, a
        compilation that has not begun is left out."""
        with self._lock:
            self._waiting[grammar.is_simple].discard(grammar, tenant)

    def poll(self) -> bool:
        """True if a grammar has been compiled, or refused, since the last call."""
        with self._lock:
            has_changes, self._has_changes = self._has_changes, False
        return has_changes

    def close(self) -> None:
        for thread in self._threads.values():
            thread.shutdown(wait=False, cancel_futures=True)
        if self._checker is not None:
            self._checker.close()

    def _run_next(self, is_simple: bool, compiler: Compiler) -> None:
        with self._lock:
            grammar = self._waiting[is_simple].take()
            if grammar is None:  # it was forgotten
                return
            self._under_way.add(grammar)
        self._run(grammar, compiler)

    def _run(self, grammar: Grammar, compiler: Compiler) -> None:
        from loraplex_server.grammars.source import refusal

        found: Matcher | LoraplexError
        is_final, retry_s = True, RETRY_S
        try:
            if self._checker is not None and not grammar.is_simple:
                self._checker.check(grammar)
            found = compiler.compile(grammar)
        except InvalidArgument as error:
            found = without_frames(error)
        except LoraplexError as error:
            found, is_final, retry_s = without_frames(error), False, error.retry_after_s or RETRY_S
        except CompileLimit as error:
            found, is_final = refusal(grammar, str(error)), False
        except Exception as error:
            found, is_final = without_frames(unexpected(error, "compiling a grammar")), False
        with self._lock:
            self._under_way.discard(grammar)
            self._done[grammar] = found
            self._num_bytes += len(grammar.text)
            if not is_final:
                self._retry_s[grammar] = self._clock() + retry_s
            while len(self._done) > 1 and (len(self._done) > MAX_COMPILED or self._num_bytes > MAX_COMPILED_BYTES):
                self._drop(next(iter(self._done)))
            self._has_changes = True
        self._notify()

    def _drop(self, grammar: Grammar) -> None:
        del self._done[grammar]
        self._retry_s.pop(grammar, None)
        self._num_bytes -= len(grammar.text)


def _unavailable(grammar: Grammar) -> FailedPrecondition:
    """The error where there are no grammars, with the field that asks for one: a grammar, or calls of tools."""
    is_of_calls = grammar.field.startswith("chat.")
    field = grammar.field if is_of_calls else "grammar"
    leave_out = "`strict` out of `chat.tools_json`" if field == "chat.tools_json" else f"`{field}` out"
    return FailedPrecondition(
        f"the base model has no tokenizer that grammars could be enforced with; leave {leave_out}", field=field
    )
