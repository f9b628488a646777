"""Fake runner and adapter cache for tests of the engine loop."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from loraplex_adapters.cache.states import PLAIN_TRAITS, AdapterTraits
from loraplex_contracts.adapters import (
    NOBODY,
    OWN_ORIGIN,
    PLAIN_LOAD,
    AdapterInfo,
    AdapterKey,
    AdapterKind,
    AdapterOrigin,
    AdapterUser,
    CacheUsage,
    ListingChanges,
    LoadOptions,
    held_name,
)
from loraplex_contracts.errors import AdapterNotFound, LoraplexError, UnsupportedModel, adapter_version_not_found
from loraplex_contracts.mixtures import Mixture
from loraplex_contracts.plan import SpanResult, StepPlan, StepResult
from loraplex_server.config import EngineConfig, SpeculationConfig
from loraplex_server.engine.engine import Engine
from loraplex_server.engine.pipe import ModelInfo
from loraplex_server.kv.blocks import BlockPool
from loraplex_server.scheduler.admission import SchedulerConfig
from loraplex_server.scheduler.scheduler import Scheduler
from loraplex_server.speculation.prompt_lookup import PromptLookupProposer
from loraplex_server.speculation.proposer import GRAMMAR, MEDUSA, PROMPT_LOOKUP, ForcedTokenProposer
from loraplex_server.speculation.speculator import Speculator
from loraplex_server.speculation.step_costs import StepCosts

EOS = 1
INFO = ModelInfo("fake", "fake", "float32", "cpu", 600, 256, 16, (EOS,))


@dataclass
class Done:
    step: StepResult

    def result(self) -> StepResult:
        return self.step


class AcceleratorError(RuntimeError):
    """Named as torch names what a device raises."""


@dataclass
class FakeRunner:
    """Samples `10 + position % 80`; `fail` may raise for a plan."""

    fail: Callable[[StepPlan], None] = lambda plan: None
    plans: list[StepPlan] = field(default_factory=list)
    overlaps: bool = False

    def execute(self, plan: StepPlan) -> Done:
        self.fail(plan)
        self.plans.append(plan)
        results = {
            span.sequence_id: SpanResult(
                tuple(10 + (span.start + span.num_tokens) % 80 for _ in range(min(1, span.num_samples)))
            )
            for span in plan.spans
        }
        return Done(StepResult(plan.step, results))

    def check_integrity(self) -> None:
        pass


@dataclass
class ScriptedRunner(FakeRunner):
    """Every sequence is given the same tokens, then ends."""

    script: tuple[int, ...] = ()
    num_given: dict[str, int] = field(default_factory=dict)

    def execute(self, plan: StepPlan) -> Done:
        results: dict[str, SpanResult] = {}
        for span in plan.spans:
            given = self.num_given.get(span.sequence_id, 0)
            sampled = (*self.script, EOS)[min(given, len(self.script))]
            results[span.sequence_id] = SpanResult((sampled,) if span.num_samples else ())
            self.num_given[span.sequence_id] = given + min(1, span.num_samples)
        return Done(StepResult(plan.step, results))


@dataclass
class FakeCache:
    """Every name in `known` resolves after `delay` polls; everything fits. What `kinds` does not say is a LoRA."""

    known: tuple[str, ...] = ("a", "b")
    kinds: dict[str, AdapterKind] = field(default_factory=dict)
    own: dict[str, AdapterTraits] = field(default_factory=dict)
    delay: int = 0
    num_slots: int = 64
    old_digests: tuple[str, ...] = ()  # of versions that every name has beside its own
    holds: dict[AdapterKey, int] = field(default_factory=dict)
    held_names: Counter[tuple[AdapterKey, str]] = field(default_factory=Counter[tuple[AdapterKey, str]])
    uses: Counter[str] = field(default_factory=Counter[str])  # by name, as the listing counts them
    load_calls: set[int] = field(default_factory=set[int])
    leases: dict[AdapterKey, int] = field(default_factory=dict)
    num_polls: int = 0
    has_changes: bool = False  # of the listing, since `take_changes`

    def resolve(
        self, adapter_id: str, now: float, user: AdapterUser = NOBODY, origin: AdapterOrigin = OWN_ORIGIN
    ) -> AdapterKey | None:
        name, _, digest = adapter_id.partition("@")
        if name not in self.known:
            raise AdapterNotFound(f"there is no adapter {adapter_id!r}", resource=adapter_id)
        if digest not in ("", name * 64, *self.old_digests):
            raise adapter_version_not_found(adapter_id)
        if self.num_polls < self.delay:
            return None
        key = AdapterKey(self.kinds.get(name, "lora"), digest or name * 64)
        self.holds[key] = self.holds.get(key, 0) + 1
        self.held_names[key, held_name(adapter_id, origin)] += 1
        self.uses[name] += 1
        return key

    def resolve_mixture(
        self, mixture: Mixture, now: float, user: AdapterUser = NOBODY
    ) -> tuple[AdapterKey, ...] | None:
        keys = [self.resolve(adapter_id, now) for adapter_id in mixture.adapter_ids]
        return tuple(key for key in keys if key is not None) if all(keys) else None

    def traits(self, key: AdapterKey) -> AdapterTraits:
        return self.own.get(key.digest[: len(key.digest) // 64], PLAIN_TRAITS)

    def drop_hold(self, key: AdapterKey, tenant: str = "", name: str = "", *, was_used: bool = True) -> None:
        self.holds[key] -= 1
        assert self.held_names[key, name] > 0, f"{key} is not held by {name!r}"
        self.held_names[key, name] -= 1
        self.uses[name] -= not was_used

    def acquire(self, key: AdapterKey) -> int | None:
        self.leases[key] = self.leases.get(key, 0) + 1
        self.has_changes = True
        return ord(key.digest[0]) - ord("a")

    def acquire_all(self, keys: tuple[AdapterKey, ...]) -> tuple[int, ...] | None:
        return tuple(slot for key in keys if (slot := self.acquire(key)) is not None)

    def put_first(self, wants: Sequence[AdapterKey | tuple[AdapterKey, ...]]) -> None:
        pass

    def release(self, key: AdapterKey) -> None:
        self.leases[key] -= 1
        self.has_changes = True

    def failure(self, *keys: AdapterKey) -> LoraplexError | None:
        return None

    def load(
        self,
        adapter_id: str,
        pin: bool,
        now: float,
        user: AdapterUser = NOBODY,
        options: LoadOptions = PLAIN_LOAD,
        call: int = 0,
    ) -> AdapterInfo | None:
        self.load_calls.add(call)
        key = self.resolve(adapter_id, now)
        if key is None:
            return None
        self.drop_hold(key, name=adapter_id, was_used=False)
        return self.get(adapter_id)

    def unload(self, adapter_id: str, if_unused: bool = False) -> AdapterInfo:
        return self.get(adapter_id)

    def get(self, adapter_id: str) -> AdapterInfo:
        if adapter_id not in self.known:
            raise AdapterNotFound(f"there is no adapter {adapter_id!r}", resource=adapter_id)
        return AdapterInfo(adapter_id, "lora", adapter_id * 64, "on_device", "device", 10, 8, 0, False)

    def take_changes(self) -> ListingChanges:
        self.has_changes = False
        return {name: (self.get(name),) for name in self.known}

    def usage(self) -> CacheUsage:
        return CacheUsage(0, 1, 0, 1, 2)

    def poll(self, now: float) -> bool:
        self.num_polls += 1
        return self.num_polls == self.delay

    def check_integrity(self) -> None:
        assert not any(self.holds.values()), self.holds
        assert not any(self.leases.values()), self.leases

    def close(self) -> None:
        pass


def make_engine(
    runner: FakeRunner | None = None,
    cache: FakeCache | None = None,
    clock: Callable[[], float] = lambda: 0.0,
    max_queued: int = 4096,
    max_running: int = 8,
    info: ModelInfo = INFO,
) -> Engine:
    cache = cache or FakeCache()
    config = SchedulerConfig(max_running=max_running, max_step_tokens=64, max_context_tokens=256, max_queued=max_queued)
    scheduler = Scheduler(config, BlockPool(64, 4), cache, frozenset({EOS}))
    return Engine(info, scheduler, cache, runner or FakeRunner(), plain_speculator(), clock)


def plain_speculator() -> Speculator:
    """A speculator without draft models, with heads that draft nothing."""
    forced = ForcedTokenProposer()
    proposers = {PROMPT_LOOKUP: PromptLookupProposer(), GRAMMAR: forced, MEDUSA: forced}
    return Speculator(SpeculationConfig(), proposers, StepCosts({1: 1.0}))


def build_fake(config: EngineConfig, progress: Callable[[str], None], notify: Callable[[], None]) -> Engine:
    """An EngineBuilder, at module level so that a spawned process finds it."""
    progress("building a fake")
    if config.model.model == "broken":
        raise UnsupportedModel("this fake is broken")
    return make_engine(clock=time.monotonic)


def build_slow(config: EngineConfig, progress: Callable[[str], None], notify: Callable[[], None]) -> Engine:
    """Steps take long enough that a test can act in the middle."""
    return make_engine(FakeRunner(lambda plan: time.sleep(0.005)), clock=time.monotonic)


def build_for_ever(config: EngineConfig, progress: Callable[[str], None], notify: Callable[[], None]) -> Engine:
    """A model that takes its time to load."""
    progress("loading")
    time.sleep(600)
    return make_engine()


def build_losing(config: EngineConfig, progress: Callable[[str], None], notify: Callable[[], None]) -> Engine:
    """An engine whose device is lost in the third step, and for good."""

    def fail(plan: StepPlan) -> None:
        if plan.step >= 3:
            raise AcceleratorError("CUDA error: an illegal memory access was encountered")

    return make_engine(FakeRunner(fail), clock=time.monotonic)


def build_long_steps(config: EngineConfig, progress: Callable[[str], None], notify: Callable[[], None]) -> Engine:
    """Two steps take seconds: in one the process sleeps, as if it waited for a device; in one it computes and holds the
    interpreter's lock."""

    def take_long(plan: StepPlan) -> None:
        if plan.step == 2:
            time.sleep(5)
        elif plan.step == 4:
            pow(3, 10_000_000)

    return make_engine(FakeRunner(take_long), clock=time.monotonic)
