"""A scheduler over the real residency table in simulated time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from loraplex_adapters.cache.residency import ResidencyTable
from loraplex_adapters.cache.states import DropHost, Promote, Stage
from loraplex_contracts.adapters import AdapterKey, AdapterUser
from loraplex_contracts.errors import LoraplexError
from loraplex_contracts.request import CompletionEnd, Event, Request, RequestFailed
from loraplex_server.kv.blocks import BlockPool
from loraplex_server.scheduler.admission import SchedulerConfig
from loraplex_server.scheduler.scheduler import Scheduler
from support.engine_fakes import FakeRunner
from support.simulated_load import Fate, Simulation


@dataclass
class AdapterSimulation(Simulation):
    """Every adapter takes one byte; a load to the host or device takes `load_s`, and there is one at a time. With
    `stage_s` what is not on the host takes that as well."""

    num_slots: int = 4
    load_s: float = 0.05
    stage_s: float = 0.0
    num_host: int = 10_000
    # Loads that are under way or wait for it, the first first.
    _moves: list[Promote | Stage] = field(default_factory=list)
    _hosted: set[AdapterKey] = field(default_factory=set)
    _done_s: float = 0.0  # when the first of them is

    def __post_init__(self) -> None:
        super().__post_init__()
        self.residency = ResidencyTable(self.num_host, self.num_slots, self.num_slots, failure_ttl_s=10.0)
        config = SchedulerConfig(
            max_running=self.max_running,
            max_step_tokens=self.max_step_tokens,
            max_context_tokens=8192,
            max_queue_wait_s=self.max_queue_wait_s,
            max_queued=1 << 20,
        )
        pool = BlockPool(self.num_blocks, 16, prefix_caching=self.prefix_caching)
        self.scheduler = Scheduler(config, pool, self.residency, frozenset())
        self.runner = FakeRunner()

    def add(self, request: Request) -> Fate:
        fate = self.fates[request.request_id] = Fate(request)
        key = _key_of(request)
        if key is not None:
            self.residency.bind(key, f"{request.tenant}/{request.adapter_id}", 1, 4)
            self.residency.hold(key, AdapterUser(request.tenant))
        try:
            self.scheduler.add(request, key, self.now)
        except LoraplexError as error:
            fate.error, fate.ended_s = error, self.now
            self._drop(request)
        return fate

    def step(self) -> bool:
        self._turn_cache()
        if super().step():
            return True
        if self._moves:  # nothing runs until a load has ended
            self.now = max(self.now, self._done_s)
            return True
        return self.residency.is_due

    def _turn_cache(self) -> None:
        while self._moves and self._done_s <= self.now:
            move = self._moves.pop(0)
            if isinstance(move, Promote):
                self.residency.promoted(move.key)
            else:
                self.residency.staged(move.key)
            if self._moves:
                self._done_s += self._takes_s(self._moves[0])
        self.residency.advance(self.now)
        moves, self.residency.moves = self.residency.moves, []
        was_idle = not self._moves
        for move in moves:
            if isinstance(move, Promote | Stage):
                self._moves.append(move)
            elif isinstance(move, DropHost):
                self._hosted.discard(move.key)
        if was_idle and self._moves:
            self._done_s = self.now + self._takes_s(self._moves[0])

    def _takes_s(self, move: Promote | Stage) -> float:
        """Seconds that a load takes that begins now."""
        seconds = self.load_s if move.key in self._hosted else self.load_s + self.stage_s
        self._hosted.add(move.key)
        return seconds

    def _take(self, events: Sequence[Event]) -> None:
        super()._take(events)
        for event in events:
            if isinstance(event, RequestFailed | CompletionEnd):
                self._drop(self.fates[event.request_id].request)

    def _drop(self, request: Request) -> None:
        key = _key_of(request)
        if key is not None:
            self.residency.drop_hold(key, request.tenant)


def _key_of(request: Request) -> AdapterKey | None:
    name = f"{request.tenant}/{request.adapter_id}"
    return AdapterKey("lora", name.encode().hex().zfill(64)[-64:]) if request.adapter_id else None
