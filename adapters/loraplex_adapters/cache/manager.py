"""Manager of the adapter cache: the interface for the engine, background threads.

The tables decide; AdapterManager carries out, with two background threads. `fetcher` reads sources into the store,
`mover` copies between the tiers: a source that hangs does not keep resident adapters from moving. Owns the threads, the
store, the host copies and the device weights. All methods are for the engine's thread and return at once. The threads
put their outcomes in a queue that `poll` empties, and `notify` wakes the engine for it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import queue
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from loraplex_adapters.cache.listing import key_row
from loraplex_adapters.cache.names import AdapterTable, fresh
from loraplex_adapters.cache.residency import AdapterCacheConfig
from loraplex_adapters.cache.states import DropDevice, DropHost, Fetch, FetchName, KeyState, Move, Promote, Stage
from loraplex_adapters.cache.storage import HostCopy, Storage, import_adapter
from loraplex_adapters.io.source_files import AdapterSource
from loraplex_adapters.io.throttle import Throttle, throttled
from loraplex_adapters.store import AdapterStore
from loraplex_adapters.weights import AdapterWeights, BaseTargets
from loraplex_contracts.adapters import (
    AdapterId,
    AdapterInfo,
    AdapterKey,
    AdapterTemplates,
    CacheUsage,
    ClassifierInfo,
    ListingChanges,
)
from loraplex_contracts.errors import AdapterMemoryFull, DiskFull, LoraplexError, SourceUnavailable, unexpected

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0
TEMPORARY_STORE = "loraplex-store-"

# Puts weights into a device slot of every module (None: clears it). Called between steps only.
InstallFn = Callable[[int, AdapterWeights | None], None]
# Run by `poll` in the engine's thread: takes one job's outcome into the table.
Outcome = Callable[[float], None]


class BackgroundThread:
    """Runs jobs one after another on a throttled thread. A job must not raise. Owns its thread."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def close(self, timeout_s: float) -> bool:
        """Drops the jobs that have not begun. False when the present one does not end in time: its source hangs."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._jobs.get_nowait()
        self._jobs.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        # At the steps' priority: at a lower one a load is under way for longer, and no step is the shorter for it.
        with throttled(Throttle(self._jobs.qsize)):
            while (job := self._jobs.get()) is not None:
                job()
                del job  # its closure may hold weights


class AdapterManager:
    """The whole life cycle of adapters. Owned by the engine."""

    def __init__(
        self,
        config: AdapterCacheConfig,
        source: AdapterSource,
        targets: BaseTargets,
        device: torch.device | str,
        install: InstallFn,
        notify: Callable[[], None],
    ) -> None:
        self._source = source
        self._targets = targets
        self._install = install
        self._notify = notify
        self._table = AdapterTable(config)
        self._with_templates = config.with_templates
        self._residency = self._table.residency
        self._temporary = None if config.store_dir else Path(tempfile.mkdtemp(prefix=TEMPORARY_STORE))
        self._store = AdapterStore(
            self._temporary or config.store_dir or Path(),
            config.disk_bytes,
            self._is_in_use,
            durable=self._temporary is None,
        )
        self._storage = Storage(self._store, torch.device(device))
        self._host: dict[AdapterKey, HostCopy] = {}
        self._device: dict[AdapterKey, AdapterWeights] = {}
        self._outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._load_seconds = 0.0
        self._num_loads = 0
        self._is_closed = False
        self._fetcher = BackgroundThread("adapter-fetcher")
        self._mover = BackgroundThread("adapter-mover")

    # --- device slots -----------------------------------------------------------------------------------------------

    def acquire(self, key: AdapterKey) -> int | None:
        """Leases the device slot to one running sequence and returns it.

        None when the weights are not on the device now: nothing is leased, and a load is wanted from here on.
        """
        slot = self._residency.acquire(key)
        self._notify_if_due()
        return slot

    def release(self, key: AdapterKey) -> None:
        """Gives one lease back."""
        self._residency.release(key)
        self._notify_if_due()

    def borrow(self, key: AdapterKey) -> int | None:
        """The device slot, for this turn only: valid until the next `poll`, nothing is leased.

        None when the weights are not on the device now: the caller then does without. They are wanted then,
        until the next `poll` and only for a key that a request holds: after all that `acquire` wants, and
        evicting nothing that was used lately.
        """
        slot = self._residency.borrow(key)
        self._notify_if_due()
        return slot

    def failure(self, key: AdapterKey) -> Exception | None:
        """Why this key cannot come to the device at all (source gone, does not fit), or None."""
        error = self._residency.failure(key)
        return None if error is None else fresh(error)

    # --- names ------------------------------------------------------------------------------------------------------

    def resolve(self, adapter_id: AdapterId, now: float) -> AdapterKey | None:
        """The key that the name is bound to, with a hold for the caller (`drop_hold` gives it back).

        None while it is being fetched: ask again after `poll` has returned True. A name is bound on first use and bound
        anew only by `load`. Raises the typed error (AdapterNotFound, AdapterInvalid, ...) when it cannot be had.
        """
        key = self._table.resolve(adapter_id, now)
        self._start_fetches()
        return key

    def classifier(self, key: AdapterKey) -> ClassifierInfo | None:
        """The classifier of an adapter that is held; None where it has none."""
        return self._residency.records[key].classifier

    def templates(self, key: AdapterKey) -> AdapterTemplates | None:
        """Its own, of an adapter that is held; None where it has none."""
        return self._residency.records[key].templates

    def drop_hold(self, key: AdapterKey) -> None:
        """The request that resolved it has ended."""
        self._residency.drop_hold(key)
        self._notify_if_due()

    def load(self, adapter_id: AdapterId, pin: bool, now: float) -> AdapterInfo | None:
        """Reads the source anew, binds the name to what it finds and brings it up to the device where there is room.

        None while under way: call again after `poll`. Raises as `resolve`.
        """
        key = self._table.load(adapter_id, pin, now)
        self._start_fetches()
        return None if key is None else key_row(self._residency.records[key], adapter_id)

    def unload(self, adapter_id: AdapterId) -> AdapterInfo:
        """Forgets the name; weights go when the last request has ended. Raises AdapterNotFound."""
        before = self._table.row(adapter_id)
        record = self._residency.records.get(self._table.unload(adapter_id))
        self._notify_if_due()
        if record is not None:
            return key_row(record, adapter_id)
        return replace(before, state="known", tier="disk", num_running=0, pinned=False, error="", error_reason="")

    def get(self, adapter_id: AdapterId) -> AdapterInfo:
        """Raises AdapterNotFound, also for a name of the source that was never asked for."""
        return self._table.row(adapter_id)

    def take_changes(self) -> ListingChanges:
        """Changes of the listing since the last call; at the first one, all of it: names that are bound, fetched or
        remembered as failed, and contents that drain."""
        return self._table.take_changes()

    def usage(self) -> CacheUsage:
        residency = self._residency
        return CacheUsage(
            device_bytes=residency.device_used,
            device_budget_bytes=residency.device_budget,
            host_bytes=residency.host_used,
            host_budget_bytes=residency.host_budget,
            num_device_slots=residency.num_slots,
            num_device_slots_used=residency.num_slots_used,
            hits=residency.hits,
            misses=residency.misses,
            device_evictions=residency.device_evictions,
            host_evictions=residency.host_evictions,
            load_seconds_total=self._load_seconds,
            loads_total=self._num_loads,
        )

    # --- the turn of the loop ---------------------------------------------------------------------------------------

    def poll(self, now: float) -> bool:
        """Takes in finished loads, installs them in slots, starts what is wanted next. True when anything changed."""
        has_changed = False
        while True:
            try:
                outcome = self._outcomes.get_nowait()
            except queue.Empty:
                break
            outcome(now)
            has_changed = True
        self._table.advance(now)
        self._start_fetches()
        for move in self._table.take_moves():
            self._carry_out(move)
            has_changed = True
        self._notify_if_due()
        return has_changed

    def check_integrity(self) -> None:
        """Raises AssertionError when idle and a hold, lease or byte is unaccounted for."""
        self._table.check_integrity()
        self._table.check_idle()
        residency = self._residency
        on_device = {r.key for r in residency.records.values() if r.state is KeyState.ON_DEVICE}
        hosted = {r.key for r in residency.records.values() if r.has_host}
        # The next `poll` drops these.
        leaving = {type(move): {m.key for m in residency.moves if type(m) is type(move)} for move in residency.moves}
        assert set(self._device) - leaving.get(DropDevice, set()) == on_device, "weights that no record knows"
        assert set(self._host) - leaving.get(DropHost, set()) <= hosted, "host copies that no record knows"

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        have_ended = [thread.close(CLOSE_TIMEOUT_S) for thread in (self._fetcher, self._mover)]
        if not all(have_ended):
            log.warning("an adapter was still being loaded at the end")
        self._host.clear()
        self._device.clear()
        self._storage.recent.clear()
        self._store.close()
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)

    def _is_in_use(self, key: AdapterKey) -> bool:
        """For the store, on the fetcher's thread: read without a lock, at worst a moment old."""
        record = self._residency.records.get(key)
        return record is not None and record.is_in_use

    # --- background work --------------------------------------------------------------------------------------------

    def _notify_if_due(self) -> None:
        """Moves are made by `poll` alone, so an idle engine must be woken for it."""
        if self._table.is_due:
            self._notify()

    def _finish(self, outcome: Outcome) -> None:
        """Called on the background threads."""
        if self._is_closed:
            return  # a source that hung has answered after all
        self._outcomes.put(outcome)
        self._notify()

    def _count(self, started_s: float, num_loads: int) -> None:
        self._load_seconds += time.perf_counter() - started_s
        self._num_loads += num_loads

    def _start_fetches(self) -> None:
        for fetch in self._table.take_fetches():
            self._fetcher.submit(lambda fetch=fetch: self._fetch(fetch))

    def _fetch(self, fetch: Fetch) -> None:
        started_s = time.perf_counter()
        try:
            found = import_adapter(
                fetch.name,
                self._source,
                self._targets,
                self._store,
                self._storage.recent,
                with_templates=self._with_templates,
            )
        except Exception as error:
            failure = _bare(_about(fetch.name, _typed(error, f"fetching adapter {fetch.name}")))
            self._finish(lambda now: self._take_failed_fetch(fetch, failure, now))
        else:
            self._finish(lambda now: self._take_fetched(fetch, found, started_s, now))

    def _take_fetched(self, fetch: Fetch, found: HostCopy, started_s: float, now: float) -> None:
        self._count(started_s, 0)
        if isinstance(fetch, FetchName):
            layout, key = found.layout, found.key
            classifier = None if layout.classifier is None else layout.classifier.shape.info
            beside = layout.num_heads, classifier, layout.templates
            self._table.name_fetched(fetch.name, fetch.ticket, key, layout.num_bytes, layout.max_rank, now, *beside)
        else:
            self._residency.refetched(fetch.key, found.key, now)

    def _take_failed_fetch(self, fetch: Fetch, error: LoraplexError, now: float) -> None:
        log.info("adapter %s: %s", fetch.name, error)
        if isinstance(fetch, FetchName):
            self._table.name_failed(fetch.name, fetch.ticket, error, now)
        else:
            self._residency.failed(fetch.key, error, now)

    def _carry_out(self, move: Move) -> None:
        """Carries moves out in the table's order: evictions come before what needs their room."""
        match move:
            case DropHost(key):
                self._discard(self._host.pop(key, None))
            case DropDevice(key, slot):
                self._install(slot, None)
                self._discard(self._device.pop(key))
            case Stage(key) | Promote(key):
                host = self._host.get(key)
                self._mover.submit(lambda: self._move(move, host))

    def _discard(self, memory: HostCopy | AdapterWeights | None) -> None:
        """Frees large memory on the mover's thread, before the moves that come after."""
        if memory is not None:
            box = [memory]
            self._mover.submit(lambda: box.clear())

    def _move(self, move: Stage | Promote, host: HostCopy | None) -> None:
        started_s = time.perf_counter()
        key = move.key
        try:
            host = host or self._storage.stage(key)
            weights = self._storage.promote(host) if host and isinstance(move, Promote) else None
        except Exception as error:
            failure = _bare(_typed(error, "moving an adapter's weights"))
            self._finish(lambda now: self._residency.failed(key, failure, now))
            return
        if host is None or (weights is None and isinstance(move, Promote)):
            self._finish(lambda now: self._residency.lost(key, now))
            return
        copy = host
        self._finish(lambda now: self._take_moved(move, copy, weights, started_s))

    def _take_moved(
        self, move: Stage | Promote, host: HostCopy, weights: AdapterWeights | None, started_s: float
    ) -> None:
        self._count(started_s, 1 if weights is not None else 0)
        self._host[move.key] = host
        if isinstance(move, Promote) and weights is not None:
            self._storage.hand_over(weights)
            self._device[move.key] = weights
            self._install(move.slot, weights)
            self._residency.promoted(move.key)
        else:
            self._residency.staged(move.key)


def _bare(error: LoraplexError) -> LoraplexError:
    """The same error without the frames that it came through: they hold the memory of the load, and it is kept."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def _about(adapter_id: str, error: LoraplexError) -> LoraplexError:
    """The same error, saying which adapter it is about."""
    if error.resource is not None:
        return error
    return type(error)(
        f"adapter {adapter_id!a}: {error.message}",
        field=error.field,
        resource=adapter_id,
        retry_after_s=error.retry_after_s,
        metadata=error.metadata,
    )


def _typed(error: BaseException, what: str) -> LoraplexError:
    """The typed error for a background job's exception. An unknown one is opaque outside and explained in the log."""
    if isinstance(error, LoraplexError):
        return error
    if isinstance(error, MemoryError):
        return AdapterMemoryFull(f"no memory for {what}; try again later", retry_after_s=5.0)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(f"the disk is full while {what}; make room on it", resource="disk", retry_after_s=5.0)
    if isinstance(error, OSError):
        log.warning("%s: %s", what, error)
        return SourceUnavailable(
            f"{what} failed ({error.strerror or 'input or output'}); try again later", retry_after_s=5.0
        )
    if type(error).__name__ == "OutOfMemoryError":  # torch's, on the device
        return AdapterMemoryFull(f"no device memory for {what}; try again later", retry_after_s=5.0)
    return unexpected(error, what)
