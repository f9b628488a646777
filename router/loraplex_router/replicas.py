"""Workers as the router knows them: last report, work sent since; their metrics.

`Replicas` is the only writer of that state: watch.py feeds it reports, inference.py tells it of requests that begin and
end, policy.py reads views of it. Everything can be rebuilt by asking the workers again. Time is an argument.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from loraplex_contracts.adapters import name_in
from loraplex_contracts.errors import NoWorker
from loraplex_contracts.load import Forecast, Load
from loraplex_proto.v1 import adapter_pb2, inference_pb2, worker_pb2
from loraplex_router.policy import WorkerView, adapters_of
from loraplex_runtime.metrics import gauges

# A report that arrives this soon after a request was sent was probably made before the worker had the request.
REPORT_LAG_S: Final = 0.05
# Context length taken for granted until a worker has said its own; only estimates of work depend on it.
ASSUMED_CONTEXT_TOKENS: Final = 4096
RETRY_WITHOUT_WORKERS_S: Final = 1.0
TIER_SOURCE: Final = adapter_pb2.ADAPTER_TIER_SOURCE  # of adapters that are bound, and whose bytes are gone


# "starting": it gets less than its share, because its caches are cold.
State = Literal["serving", "starting", "draining", "stalled", "leaving", "unreachable"]
STATES: Final[tuple[State, ...]] = ("serving", "starting", "draining", "stalled", "leaving", "unreachable")


@dataclass(eq=False, slots=True)
class Flight:
    """One request at one worker, from the moment it is sent."""

    worker_id: str
    routing_key: str
    work_tokens: int
    started_s: float
    # Work that is left as far as the answer shows it; None where the answer comes in one piece.
    remaining_tokens: int | None = None


@dataclass(slots=True)
class Replica:
    """One worker. Written by `Replicas` only."""

    worker_id: str
    name: str  # what adapters are hashed by
    # True for one that is no member any more: it ends its requests and gets no new ones.
    is_leaving: bool = False
    # True for one that joined others; and the time when it became routable.
    is_newcomer: bool = False
    joined_s: float | None = None
    info: inference_pb2.GetInfoResponse | None = None
    has_reported: bool = False  # ever
    # True once the current stream of reports has brought one.
    is_connected: bool = False
    is_draining: bool = False
    # True while its front end says that its engine does not respond.
    is_stalled: bool = False
    last_error: str = "not connected yet"
    load: Load = field(default_factory=Load)  # as it last reported
    tiers: Mapping[str, int] = field(default_factory=dict[str, int])  # of adapters, by id
    # Of adapters in its last report, also where it is lost since; of one that had drained those that had a source.
    last_names: Collection[str] = ()
    # Names that a load has bound to a source of their own, in its last report, also where it is lost since.
    sourced: frozenset[str] = frozenset()
    max_device_adapters: int = 0
    waiting_adapters: tuple[str, ...] = ()
    num_in_flight: int = 0
    # Sent after the last report, oldest first: that report does not count them.
    unreported: deque[Flight] = field(default_factory=deque[Flight])
    unreported_tokens: int = 0
    # Ended since the last report, although that report counts them.
    ended_tokens: int = 0
    # The last view, None once anything in it has changed: a request looks at every worker.
    last_view: WorkerView | None = None

    @property
    def may_have_any(self) -> bool:
        """True for a worker that has never reported and may be there: frozen, or cut off from this router. One whose
        address refuses connections has no process that has bound a name. gRPC tells that by words alone."""
        return not self.has_reported and "Connection refused" not in self.last_error

    @property
    def is_routable(self) -> bool:
        return self.is_healthy and not self.is_leaving

    @property
    def is_healthy(self) -> bool:
        return self.is_connected and not (self.is_draining or self.is_stalled)

    @property
    def work_tokens(self) -> int:
        return max(0, self.load.pending_tokens - self.ended_tokens) + self.unreported_tokens

    def view(self, now_s: float, slow_start_s: float) -> WorkerView:
        share = 1.0
        if self.joined_s is not None and (age_s := now_s - self.joined_s) < slow_start_s:
            share = max(0.0, age_s) / slow_start_s
        view = self.last_view
        if view is None or view.share != share:
            view = self.last_view = WorkerView(self.worker_id, self.work_tokens, self.tiers, self.name, share)
        return view

    def has_draft_model(self, name: str) -> bool:
        """True if it has that draft model; any, where the name is empty."""
        known = self.info.draft_models if self.info is not None else ()
        return name in known if name else bool(known)

    def has_task(self, name: str) -> bool:
        """True if it says that it has that task; one of before this was told says nothing."""
        return self.info is not None and name in self.info.tasks


class Replicas:
    """All workers, by id. `on_change` is called when the number of routable ones may have changed."""

    def __init__(
        self,
        worker_ids: Collection[str] = (),
        on_change: Callable[[], None] = lambda: None,
        slow_start_s: float = 0.0,
    ) -> None:
        self._replicas = {worker_id: Replica(worker_id, worker_id) for worker_id in worker_ids}
        self._work_by_key: dict[str, int] = {}
        self._slow_start_s = slow_start_s
        # Cached answers of `routable`, `max_context_tokens` and `adapter_names`; None: to be found again.
        self._routable: list[Replica] | None = None
        self._max_context_tokens: int | None = None
        self._adapter_names: list[str] | None = None
        self.on_change = on_change

    # --- members ---------------------------------------------------------------------------------------------------

    def join(self, worker_id: str, name: str) -> None:
        """Adds a member; one that was about to leave stays, and one that is there has this name from here on."""
        newcomer = Replica(worker_id, name, is_newcomer=self.num_routable > 0)
        replica = self._replicas.setdefault(worker_id, newcomer)
        replica.name, replica.last_view = name, None
        self._set_leaving(replica, False)

    def leave(self, worker_id: str) -> None:
        """Takes a worker out: it gets no new requests from here on, once a member can take them."""
        self._set_leaving(self._replicas[worker_id], True)

    def _set_leaving(self, replica: Replica, is_leaving: bool) -> None:
        replica.is_leaving = is_leaving
        self._routable = None
        self.on_change()

    def forget(self, worker_id: str) -> None:
        """Forgets a worker that has left, with its last request ended."""
        assert self.has_left(worker_id), f"{worker_id} still has something to do"
        del self._replicas[worker_id]
        self._routable = self._max_context_tokens = self._adapter_names = None
        self.on_change()

    # --- reading ---------------------------------------------------------------------------------------------------

    def __getitem__(self, worker_id: str) -> Replica:
        return self._replicas[worker_id]

    def all(self) -> list[Replica]:
        return list(self._replicas.values())

    def connected(self) -> list[Replica]:
        """Workers that report: draining ones too, which take no new requests or commands."""
        return [replica for replica in self._replicas.values() if replica.is_connected]

    def views(
        self,
        excluded: Collection[str] = (),
        draft_model: str | None = None,
        now_s: float = math.inf,
        task: str = "",
        adapter_ids: Collection[str] = (),
    ) -> list[WorkerView]:
        """Workers that can take a request. One for adapters that were loaded from a source of their own goes where they
        are, one for a draft model where that model is, one of a task where that is known; if no worker has a model or
        task, any can say so."""
        routable = self.routable()
        if (keepers := self.keepers(adapter_ids)) is not None:
            routable = [replica for replica in routable if replica.worker_id in keepers]
        if task:
            routable = [replica for replica in routable if replica.has_task(task)] or routable
        if draft_model is not None:
            routable = [replica for replica in routable if replica.has_draft_model(draft_model)] or routable
        return [replica.view(now_s, self._slow_start_s) for replica in routable if replica.worker_id not in excluded]

    def routable(self) -> list[Replica]:
        """Members that can take a request; where none has been reached yet, those that are leaving. Not to be
        changed."""
        if self._routable:
            return self._routable
        found = self._routable = [replica for replica in self._replicas.values() if replica.is_routable]
        if not found and self._awaits_members():
            return [replica for replica in self._replicas.values() if replica.is_healthy]
        return found

    def _awaits_members(self) -> bool:
        members = [replica for replica in self._replicas.values() if not replica.is_leaving]
        is_served = any(replica.is_routable for replica in members)
        return not is_served and any(not replica.has_reported for replica in members)

    def has_left(self, worker_id: str) -> bool:
        """True for one that is leaving and has nothing more to do."""
        replica = self._replicas[worker_id]
        return replica.is_leaving and not replica.num_in_flight and not self._awaits_members()

    def state_of(self, replica: Replica, now_s: float) -> State:
        """The worker's state in one word, for people; the policy reads views."""
        if replica.is_leaving:
            return "leaving"
        if not replica.is_connected:
            return "unreachable"
        if replica.is_stalled:
            return "stalled"
        if replica.is_draining:
            return "draining"
        is_new = replica.joined_s is not None and now_s - replica.joined_s < self._slow_start_s
        return "starting" if is_new else "serving"

    def adapter_names(self) -> list[str]:
        """Sorted names of the adapters that workers hold, as far as their reports tell. Not to be changed."""
        if self._adapter_names is None:
            self._adapter_names = sorted(set[str]().union(*(replica.tiers for replica in self._replicas.values())))
        return self._adapter_names

    def of_same_version(self, worker_id: str) -> list[str]:
        """Workers of this one's version, itself among them: what it lacks, they lack. Itself alone where its version is
        not known."""
        version = _version_of(self._replicas.get(worker_id))
        return [worker_id] if not version else [one.worker_id for one in self.all() if _version_of(one) == version]

    def keepers(self, adapter_ids: Collection[str]) -> set[str] | None:
        """Members that have all those of the adapters which any member has from a source of its own: another worker
        would serve something else under the name, or nothing. None where no member has such a one."""
        found: set[str] | None = None
        for name in map(name_in, adapter_ids):
            holders = {one.worker_id for one in self._replicas.values() if name in one.sourced and self._stays(one)}
            if holders:
                found = holders if found is None else found & holders
        return found

    def _stays(self, replica: Replica) -> bool:
        """False for one that drains, or is leaving and gets no more requests: others have to do without it."""
        return not replica.is_draining and (not replica.is_leaving or replica in self.routable())

    def build_of(self, worker_id: str) -> tuple[str, ...]:
        """The release, number format and device of a worker, on which the digests of equal files depend. Its id for one
        that has left."""
        replica = self._replicas.get(worker_id)
        if replica is None or replica.info is None:
            return (worker_id,)
        return replica.info.version, replica.info.dtype, replica.info.device

    def absent_holders(self, adapter_id: str, *, with_versions: bool = False) -> list[str]:
        """Members that had the adapter at their last report and may come back with it: lost or stalled ones, one
        that has drained only where a load had bound it to a source of its own; and those of which this router has never
        heard. `with_versions`: also those that had a version of it."""
        base, _, digits = adapter_id.partition("@")
        absent = [one for one in self._replicas.values() if one.is_stalled or not one.is_connected]
        return [
            replica.worker_id
            for replica in absent
            if not replica.is_leaving
            and (
                replica.may_have_any
                or adapter_id in replica.last_names
                or (with_versions and any(name.startswith(f"{base}@{digits}") for name in replica.last_names))
            )
        ]

    def no_worker(self, adapter_ids: Collection[str] = ()) -> NoWorker:
        """The error where no member can take a request, for these adapters where there are any. Details of each worker
        are in the log only."""
        if self.num_routable and self.keepers(adapter_ids) is not None:
            return NoWorker(
                f"no worker can take requests that has {' and '.join(map(ascii, adapter_ids))} from where it was "
                "loaded (its `source`); try again, or load it again with that source",
                retry_after_s=RETRY_WITHOUT_WORKERS_S,
            )
        members = [replica for replica in self._replicas.values() if not replica.is_leaving]
        if not members:
            return NoWorker("the router has no workers yet; try again", retry_after_s=RETRY_WITHOUT_WORKERS_S)
        total = len(members)
        connected = [replica for replica in members if replica.is_connected]
        counts = {
            "shutting down": sum(replica.is_draining for replica in connected),
            "not responding": sum(replica.is_stalled for replica in connected),
            "not reachable": total - len(connected),
        }
        reasons = ", ".join(f"{count} {what}" if total > 1 else what for what, count in counts.items() if count)
        return NoWorker(
            ("the router's one worker cannot" if total == 1 else f"none of the router's {total} workers can")
            + f" take requests{f' ({reasons})' if reasons else ''}; try again",
            retry_after_s=RETRY_WITHOUT_WORKERS_S,
        )

    @property
    def num_routable(self) -> int:
        return len(self.routable())

    def work_in_flight_tokens(self, routing_key: str) -> int:
        """Work of requests with this key that this router has under way, on all workers."""
        return self._work_by_key.get(routing_key, 0)

    def work_by_adapter(self) -> dict[str, int]:
        """Work that this router has under way for each adapter, mixtures counted for each of theirs."""
        found: dict[str, int] = {}
        for key, work_tokens in self._work_by_key.items():
            for name in adapters_of(key):
                found[name] = found.get(name, 0) + work_tokens
        return found

    @property
    def max_context_tokens(self) -> int:
        """The largest context among the workers: what an answer without a limit may grow to."""
        if self._max_context_tokens is None:
            known = [r.info.max_context_tokens for r in self._replicas.values() if r.info is not None]
            self._max_context_tokens = max(known, default=0) or ASSUMED_CONTEXT_TOKENS
        return self._max_context_tokens

    @property
    def model_id(self) -> str | None:
        """The base model as the workers name it, None before any has."""
        return None if self.model_info is None else self.model_info.model_id

    @property
    def model_info(self) -> inference_pb2.GetInfoResponse | None:
        """GetInfo of the first worker that has answered it, None before any has."""
        return next((r.info for r in self._replicas.values() if r.info is not None), None)

    # --- requests of this router -----------------------------------------------------------------------------------

    def begin(self, worker_id: str, routing_key: str, work_tokens: int, now_s: float) -> Flight:
        """Begins the flight of a request that is being sent; every flight that begins is ended once."""
        flight = Flight(worker_id, routing_key, work_tokens, now_s)
        replica = self._replicas[worker_id]
        replica.last_view = None
        replica.num_in_flight += 1
        replica.unreported.append(flight)
        replica.unreported_tokens += work_tokens
        if work_tokens:
            self._work_by_key[routing_key] = self.work_in_flight_tokens(routing_key) + work_tokens
        return flight

    def end(self, flight: Flight) -> None:
        replica = self._replicas[flight.worker_id]
        replica.last_view = None
        replica.num_in_flight -= 1
        if flight.work_tokens:
            self._work_by_key[flight.routing_key] -= flight.work_tokens
            if not self._work_by_key[flight.routing_key]:
                del self._work_by_key[flight.routing_key]
        if flight in replica.unreported:
            replica.unreported.remove(flight)
            replica.unreported_tokens -= flight.work_tokens
        else:
            # The last report still counts the tokens that this request had left.
            replica.ended_tokens += flight.remaining_tokens or 0

    # --- reports of workers -------------------------------------------------------------------------------------------

    def on_info(self, worker_id: str, info: inference_pb2.GetInfoResponse) -> None:
        self._replicas[worker_id].info = info
        self._max_context_tokens = None

    def on_report(self, worker_id: str, report: worker_pb2.Load, now_s: float) -> None:
        replica = self._replicas[worker_id]
        was_routable = replica.is_routable
        replica.last_view = None
        replica.is_connected = replica.has_reported = True
        replica.is_draining = report.draining
        replica.is_stalled = report.stalled
        replica.last_error = ""
        replica.load = _load(report)
        tiers = {one.adapter_id: one.tier for one in report.adapters if one.tier != TIER_SOURCE}
        if tiers.keys() != replica.tiers.keys():
            self._adapter_names = None
        replica.tiers = tiers
        replica.sourced = frozenset(one.adapter_id for one in report.adapters if one.has_source)
        replica.last_names = replica.tiers.keys() | replica.sourced
        replica.max_device_adapters = report.max_device_adapters
        replica.waiting_adapters = tuple(report.waiting_adapter_ids)
        replica.ended_tokens = 0
        while replica.unreported and replica.unreported[0].started_s <= now_s - REPORT_LAG_S:
            replica.unreported_tokens -= replica.unreported.popleft().work_tokens
        if replica.is_routable != was_routable:
            self._routable = None
            if replica.is_newcomer and replica.joined_s is None:
                replica.joined_s = now_s
            self.on_change()

    def on_lost(self, worker_id: str, why: str) -> None:
        """Marks a worker as lost: its stream of reports broke, went silent or could not be opened."""
        replica = self._replicas[worker_id]
        was_routable = replica.is_routable
        replica.last_view = self._routable = self._adapter_names = None
        if replica.is_draining:
            # Its process ends. Another one binds names to what their files say then, but with `--adapter-store` it
            # takes those that had a source from there again, and serves them beside the others.
            replica.last_names, replica.sourced = replica.sourced, frozenset()
        replica.is_connected = False
        replica.is_draining = False
        replica.is_stalled = False
        replica.last_error = why
        # Nothing of what it held is known to be there when it comes back.
        replica.load, replica.tiers, replica.ended_tokens = Load(), {}, 0
        replica.max_device_adapters, replica.waiting_adapters = 0, ()
        if was_routable:
            self.on_change()


def nearest_tiers(replicas: Iterable[Replica]) -> dict[str, int]:
    """The tier of each adapter where it is nearest to a device."""
    found: dict[str, int] = {}
    for replica in replicas:
        for name, tier in replica.tiers.items():
            if tier > found.get(name, -1):
                found[name] = tier
    return found


def _version_of(replica: Replica | None) -> str:
    return "" if replica is None or replica.info is None else replica.info.version


def _load(message: worker_pb2.Load) -> Load:
    return Load(
        num_running=message.running_requests,
        num_queued=message.queued_requests,
        pending_tokens=message.pending_tokens,
        num_blocks=message.total_kv_blocks,
        num_free_blocks=message.free_kv_blocks,
        block_tokens=message.kv_block_tokens,
        num_state_slots=message.total_state_slots,
        num_free_state_slots=message.free_state_slots,
        num_state_snapshots=message.state_snapshots,
        max_running=message.max_running_requests,
        forecast=_forecast(message.forecast) if message.HasField("forecast") else None,
    )


def _forecast(message: worker_pb2.Forecast) -> Forecast:
    return Forecast(
        prompt_token_s=message.prompt_token_s,
        interval_s=message.token_interval_s,
        end_probability=message.end_probability,
        max_queue_wait_s=message.max_queue_wait_s,
        waits_s={(wait.tenant, wait.adapter_id): wait.wait_s for wait in message.waits},
        longest_tokens=message.longest_tokens,
    )


# --- metrics ----------------------------------------------------------------------------------------------------------

_GAUGES: Final[tuple[tuple[str, str, Callable[[Replica], float]], ...]] = (
    ("up", "Whether the worker can take requests.", lambda worker: worker.is_routable),
    ("in_flight", "Requests of this router at the worker.", lambda worker: worker.num_in_flight),
    ("work_tokens", "Tokens of work ahead, as routing sees it.", lambda worker: worker.work_tokens),
    ("running", "Requests that the worker runs.", lambda worker: worker.load.num_running),
    ("queued", "Requests that wait at the worker.", lambda worker: worker.load.num_queued),
    (
        "adapters",
        "Adapters that the worker reports: those nearest to the device, 1,024 at most.",
        lambda worker: len(worker.tiers),
    ),
)


class WorkersCollector:
    """A sample per worker, read at the moment of a scrape."""

    def __init__(self, registry: CollectorRegistry, replicas: Replicas) -> None:
        self._replicas = replicas
        registry.register(self)  # pyright: ignore[reportArgumentType]  # the protocol is `collect` alone

    def collect(self) -> Iterator[Metric]:
        workers = self._replicas.all()
        for name, text, value in _GAUGES:
            samples = [((worker.worker_id,), float(value(worker))) for worker in workers]
            yield gauges(f"router_worker_{name}", text, ("worker",), samples)
        now_s = time.monotonic()
        counts = Counter(self._replicas.state_of(worker, now_s) for worker in workers)
        text = "Workers, by what the router may do with them."
        yield gauges("router_workers", text, ("state",), [((state,), counts[state]) for state in STATES])
        infos = [worker.info for worker in self._replicas.routable() if worker.info is not None]
        models = Counter((info.model_id, info.dtype) for info in infos)
        text = "Workers that can take requests, by base model and number format. Several series: answers may differ."
        yield gauges("router_models", text, ("model", "dtype"), list(models.items()))
