"""A scheduler under open load in simulated time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from loraplex_contracts.adapters import AdapterKey
from loraplex_contracts.errors import LoraplexError
from loraplex_contracts.plan import StepPlan
from loraplex_contracts.request import Admitted, CompletionEnd, Event, Request, RequestFailed
from loraplex_server.kv.blocks import BlockPool
from loraplex_server.scheduler.admission import SchedulerConfig
from loraplex_server.scheduler.scheduler import Scheduler
from support.engine_fakes import FakeCache, FakeRunner
from support.scheduler_fakes import FakeResidency
from support.scheduler_harness import make_request


@dataclass
class Fate:
    """The course of one request: its begin, and its end or error. Times are simulated seconds."""

    request: Request
    began_s: float | None = None
    ended_s: float | None = None
    error: LoraplexError | None = None

    @property
    def is_good(self) -> bool:
        deadline_s = self.request.deadline_s
        return self.error is None and self.ended_s is not None and (deadline_s is None or self.ended_s <= deadline_s)


@dataclass
class Simulation:
    """`step_s` says what a step of so many decoding rows and prompt tokens takes."""

    step_s: Callable[[int, int], float]
    max_running: int = 16
    max_step_tokens: int = 256
    num_blocks: int = 4096
    max_queue_wait_s: float = 60.0
    prefix_caching: bool = True
    num_slots: int = 0  # for adapters; 0: each is on the device
    now: float = 0.0
    fates: dict[str, Fate] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config = SchedulerConfig(
            max_running=self.max_running,
            max_step_tokens=self.max_step_tokens,
            max_context_tokens=8192,
            max_queue_wait_s=self.max_queue_wait_s,
        )
        pool = BlockPool(self.num_blocks, 16, prefix_caching=self.prefix_caching)
        self._slots = FakeResidency(self.num_slots)
        adapters = self._slots if self.num_slots else FakeCache()
        self.scheduler = Scheduler(config, pool, adapters, frozenset())
        self.runner = FakeRunner()

    def add(self, request: Request, adapter_key: AdapterKey | None = None) -> Fate:
        fate = self.fates[request.request_id] = Fate(request)
        try:
            self.scheduler.add(request, adapter_key, self.now)
        except LoraplexError as error:
            fate.error, fate.ended_s = error, self.now
        return fate

    def stop(self, request_id: str) -> None:
        """Ends the request's only completion, as a stop string would."""
        self._take(self.scheduler.stop_completion(request_id, 0))

    def step(self) -> bool:
        """Runs one step; False when nothing could run."""
        self._slots.poll()
        plan = self.scheduler.schedule(self.now)
        self._take(self.scheduler.take_events())
        if plan is None:
            return False
        self.now += self._step_s(plan)
        self._take(self.scheduler.apply(plan, self.runner.execute(plan).result(), self.now))
        return True

    def run(self, arrivals: Sequence[tuple[float, Request]] = (), until_s: float | None = None) -> None:
        """Sends each request when it is due, and goes on until all have ended, or until then."""
        to_come = list(reversed(arrivals))
        while until_s is None or self.now < until_s:
            while to_come and to_come[-1][0] <= self.now:
                self.add(to_come.pop()[1])
            if not self.step():
                if not to_come and until_s is None:
                    return
                self.now = to_come[-1][0] if to_come else self.now + 0.01

    def _step_s(self, plan: StepPlan) -> float:
        num_rows = sum(span.num_samples > 0 and span.num_tokens == 1 for span in plan.spans)
        return self.step_s(num_rows, sum(span.num_tokens for span in plan.spans) - num_rows)

    def _take(self, events: Sequence[Event]) -> None:
        for event in events:
            fate = self.fates[event.request_id]
            match event:
                case Admitted():
                    fate.began_s = self.now
                case RequestFailed(error=error):
                    fate.error, fate.ended_s = error, self.now
                case CompletionEnd():
                    fate.ended_s = self.now
                case _:
                    pass


def request(name: str, prompt_tokens: int = 16, max_tokens: int = 40, **fields: object) -> Request:
    """One whose answer has all tokens that it may have, and whose prompt nobody else has."""
    return make_request(name, (hash(name) % 97, *range(1, prompt_tokens)), max_tokens=max_tokens, **fields)
