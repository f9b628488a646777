"""Engine over real scheduler, adapter cache and speculator, in simulated time."""

from __future__ import annotations

import heapq
import queue
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.engine_fakes import INFO, plain_speculator
from support.residency import key_of
from support.scheduler_fakes import VOCAB_SIZE
from support.scheduler_harness import Harness, RequestLog, make_request

from loraplex_adapters.cache.manager import AdapterManager
from loraplex_adapters.cache.names import AdapterTable
from loraplex_adapters.cache.residency import AdapterCacheConfig
from loraplex_adapters.cache.states import DropDevice, DropHost, Fetch, FetchName, Move, Promote
from loraplex_contracts.adapters import NO_ADAPTER, AdapterId, AdapterKey, CacheUsage
from loraplex_contracts.errors import Cancelled, SourceUnavailable
from loraplex_contracts.mixtures import Member, Mixture
from loraplex_contracts.plan import StepPlan, StepResult
from loraplex_contracts.request import Request, SpeculationParams
from loraplex_server.engine.engine import Engine
from loraplex_server.engine.pipe import AdapterCommand, Cancel, Command, Submit, Wake

NAMES = [f"a{idx}" for idx in range(5)]
OPENINGS = [(1, 2, 3, 4, 5, 6, 7, 8, 9, 10), (1, 2, 3, 4, 9, 9, 9, 9), (5,) * 12]


class SimulatedCache(AdapterManager):
    """The real tables; fetches and moves are jobs of the world, moves in order."""

    def __init__(self, dice: Random, config: AdapterCacheConfig) -> None:
        self.dice = dice
        self.start: Callable[[Callable[[], None]], None] = lambda job: None
        self.num_moves = 0
        self.files = {name: idx for idx, name in enumerate(NAMES)}
        self._in_slots: dict[int, AdapterKey] = {}
        self._to_move: deque[Move] = deque()
        self._table = AdapterTable(config)
        self._residency = self._table.residency
        self._outcomes = queue.SimpleQueue()
        self._version_log = self._watch = None
        self._replaced, self._is_closed = {}, False

    def usage(self) -> CacheUsage:
        return CacheUsage(0, 1, 0, 1, self.num_slots)

    def check_integrity(self) -> None:
        self._table.check_integrity()
        self._table.check_idle()

    def key_in(self, slot: int) -> AdapterKey | None:
        return self._in_slots.get(slot)

    def _start_fetches(self) -> None:
        for fetch in self._table.take_fetches():
            self.start(lambda fetch=fetch: self._finish(self._end_fetch(fetch)))

    def _end_fetch(self, fetch: Fetch) -> Callable[[float], None]:
        content, table = self.files[fetch.name], self._table
        key, num_bytes = key_of(content), (64, 96, 128, 192)[content % 4]
        assert isinstance(fetch, FetchName)  # the store loses nothing
        if self.dice.random() < 0.1:
            error = SourceUnavailable("gone", retry_after_s=0.5)
            return lambda now: table.name_failed(fetch.name, fetch.ticket, error, now)
        return lambda now: table.name_fetched(fetch.name, fetch.ticket, key, num_bytes, 4, now)

    def _carry_out(self, move: Move) -> None:
        if isinstance(move, DropDevice):
            assert self._in_slots.pop(move.slot) == move.key
        elif not isinstance(move, DropHost):
            self.num_moves += 1
            self._to_move.append(move)
            self.start(lambda: self._finish(self._end_move(self._to_move.popleft())))

    def _end_move(self, move: Move) -> Callable[[float], None]:
        if self.dice.random() < 0.05:
            return lambda now: self._residency.failed(move.key, SourceUnavailable("broken", retry_after_s=0.3), now)
        return lambda now: self._promoted(move) if isinstance(move, Promote) else self._residency.staged(move.key)

    def _promoted(self, move: Promote) -> None:
        assert move.slot not in self._in_slots
        self._in_slots[move.slot] = move.key
        self._residency.promoted(move.key)


@dataclass(eq=False)
class Late:
    """A step under way, run when its result is asked for: the second may be planned by then."""

    world: World
    plan: StepPlan

    def result(self) -> StepResult:
        world = self.world
        world.now += world.dice.choice((0.002, 0.01, 0.03))
        try:
            return world.runner.execute(self.plan)
        except AssertionError as error:  # the engine would make it an error of the step's requests
            world.broken = error
            raise


class World(Harness):
    """Clients, sources and the device of one engine. Owns time: `jobs` are what will be done by then."""

    def __init__(self, seed: int) -> None:
        self.dice = dice = Random(seed)
        host_bytes, device_bytes = dice.choice(((192, 192), (256, 192), (640, 256), (640, 384)))
        config = AdapterCacheConfig(host_bytes, device_bytes, dice.choice((1, 2, 3)), 1, failure_ttl_s=0.2)
        self.cache = SimulatedCache(dice, config)
        block_size, num_blocks = dice.choice(((1, 70), (2, 40), (4, 18), (4, 80)))
        super().__init__(
            num_blocks=num_blocks,
            block_size=block_size,
            max_running=dice.choice((1, 1, 2, 4)),
            max_step_tokens=dice.choice((4, 16, 64)),
            max_context_tokens=60,
            residency=self.cache,  # type: ignore[arg-type]
            max_bypasses=dice.choice((0, 2, 32)),
            max_adapter_wait_s=dice.choice((0.0, 0.05, 1.0)),
            max_queue_wait_s=dice.choice((0.5, 60.0)),
            slice_s=dice.choice((0.02, 0.1, 0.5)),
        )
        self.broken: AssertionError | None = None
        self.overlaps = dice.random() < 0.7
        self._inbox: list[Command] = []
        self._replies: set[int] = set()  # that are to come
        self._job_s = dice.choice((0.001, 0.02, 0.2))
        self._jobs: list[tuple[float, int, Callable[[], None]]] = []
        self._num_started = self._num_operations = 0
        self.cache.start = self._start
        self.cache._notify = lambda: self._inbox.append(Wake())
        self.engine = Engine(INFO, self.scheduler, self.cache, self, plain_speculator(), lambda: self.now)

    def execute(self, plan: StepPlan) -> Late:
        for new in plan.entered:
            keys = tuple(key for use in new.adapters if (key := self.cache.key_in(use.adapter_slot)))
            self._keys[new.sequence_id.rsplit("#", 1)[0]] = keys[0] if len(keys) == 1 else keys or None
        return Late(self, plan)

    def check_integrity(self) -> None:
        assert self.runner.num_steps == self.engine._num_steps

    def _start(self, job: Callable[[], None]) -> None:
        self._num_started += 1
        heapq.heappush(self._jobs, (self.now + self.dice.expovariate(1 / self._job_s), self._num_started, job))

    def _command(self) -> Command:
        dice, luck = self.dice, self.dice.random()
        known = f"r{dice.randint(max(0, len(self.logs) - 8), len(self.logs))}"
        if luck < 0.7 or known not in self.logs:
            request = self._request(f"r{len(self.logs)}")
            self.logs[request.request_id] = RequestLog(request)
            return Submit(request)
        if luck < 0.78:
            return Cancel(known, Cancelled("gone"))
        if luck < 0.85:
            self.cache.files[dice.choice(NAMES)] = dice.randint(0, 7)
            return Wake()
        self._num_operations += 1
        self._replies.add(self._num_operations)
        verb, name = "load" if luck < 0.94 else "unload", AdapterId(dice.choice(NAMES))
        return AdapterCommand(self._num_operations, verb, name, pin=dice.random() < 0.3)

    def _request(self, request_id: str) -> Request:
        dice, opening, luck = self.dice, self.dice.choice(OPENINGS), self.dice.random()
        members = tuple(Member(AdapterId(name), 0.5) for name in dice.sample(NAMES, 2))
        return make_request(
            request_id,
            (*opening[: dice.randint(1, len(opening))], *dice.choices(range(1, VOCAB_SIZE), k=dice.randint(0, 3))),
            max_tokens=dice.choice((1, 3, 10, 40)),
            ignore_eos=dice.random() < 0.6,
            seed=dice.randint(0, 3),
            n=dice.choice((1, 1, 2)),
            priority=dice.choice((0, 0, 0, 1)),
            tenant=dice.choice("ttu"),
            speculation=SpeculationParams(dice.choice(("off", "prompt_lookup"))),
            adapter_id=AdapterId(dice.choice(NAMES)) if 0.2 < luck < 0.7 else NO_ADAPTER,
            mixture=Mixture(members) if luck < 0.2 else None,
            arrival_s=self.now,
            deadline_s=self.now + dice.choice((0.05, 0.2, 1.0)) if dice.random() < 0.4 else None,
        )

    def _take_turn(self) -> None:
        commands, self._inbox = self._inbox, []
        for command in commands:
            self.engine.handle(command)
        batch = self.engine.turn()
        if self.broken is not None:
            raise self.broken
        if batch is not None:
            self.take(list(batch.events))
            self._replies -= {reply.operation_id for reply in batch.replies}

    def _progress(self) -> tuple[int, ...]:
        num_ends = sum(len(log.ends) + (log.error is not None) for log in self.logs.values())
        return self.runner.num_steps, num_ends, self.cache.num_moves, len(self._replies)

    def live(self, num_commands: int) -> None:
        """Lives through so many commands, and then until nothing is left to do."""
        gap_s, next_s = self.dice.choice((0.005, 0.03, 0.2)), 0.0
        times = [next_s]
        while times:
            self.now = max(self.now, min(times))
            while num_commands and next_s <= self.now:
                num_commands -= 1
                next_s += self.dice.expovariate(1 / gap_s) if self.dice.random() < 0.95 else 5.0
                self._inbox.append(self._command())
            while self._jobs and self._jobs[0][0] <= self.now:
                heapq.heappop(self._jobs)[2]()
            self._take_turn()
            times = [self.now + 0.0002]
            if self.engine.can_step or self._inbox or self.engine.idle_timeout_s() == 0.0:
                continue
            before = self._progress()
            self._take_turn()
            assert self._progress() == before, "it would have slept with work to do"
            timeout_s = self.engine.idle_timeout_s()
            times = [next_s] * bool(num_commands) + [due_s for due_s, _, _ in self._jobs[:1]]
            times += [] if timeout_s is None else [self.now + timeout_s]
            assert all(log.is_over or self.now < (log.request.deadline_s or 1e9) + 1.0 for log in self.logs.values())

    def check(self) -> None:
        """Each request ended once with its own text, or with an error that is its own."""
        assert not self._replies
        assert self.engine.integrity_report() == ""
        assert all(log.is_over for log in self.logs.values())
        for request_id in self._keys:
            log = self.logs[request_id]
            for index in range(log.request.n):
                expected, tokens = self.expected(request_id, index), tuple(log.tokens[index])
                assert expected.token_ids[: len(tokens)] == tokens, "a token that is not the request's own"
                if index in log.ends:
                    assert (log.ends[index].reason.value, tokens) == (expected.reason, expected.token_ids)


@settings(max_examples=60, deadline=None)
@example(6343)  # a want that was put before a waiting mixture
@given(st.integers(0, 1 << 32))
def test_it_never_sleeps_with_work_to_do(seed: int) -> None:
    """Whatever comes: the engine wakes for it, each request ends once and in time, and in the end nothing is left."""
    world = World(seed)
    world.live(60)
    world.check()
