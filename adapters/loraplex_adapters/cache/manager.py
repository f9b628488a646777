"""The adapter cache: the table's decisions carried out, with two background threads.

`fetcher` reads sources into the store, `mover` copies between the tiers: a source that hangs does not keep resident
adapters from moving. Owns the threads, the store, the host copies and the device weights; the table owns the decisions.
All methods are for the engine's thread and none blocks; the threads hand their outcomes over in a queue that `poll`
empties, and `notify` wakes the engine for it.
"""

from __future__ import annotations

import logging
import queue
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from loraplex_adapters.cache import rows
from loraplex_adapters.cache.config import AdapterCacheConfig
from loraplex_adapters.cache.integrity import check_idle, check_names, check_residency
from loraplex_adapters.cache.loader import BackgroundThread, Imported, import_adapter, typed
from loraplex_adapters.cache.states import DropDevice, DropHost, Fetch, FetchName, KeyState, Move, Promote, Stage
from loraplex_adapters.cache.table import AdapterTable, fresh
from loraplex_adapters.cache.tiers import HostCopy, Tiers
from loraplex_adapters.io.source_files import AdapterSource, not_found
from loraplex_adapters.store import AdapterStore
from loraplex_adapters.targets import BaseTargets
from loraplex_adapters.weights import AdapterWeights
from loraplex_contracts.adapters import AdapterInfo, AdapterKey, CacheUsage, ListingChanges, check_adapter_id
from loraplex_contracts.errors import LoraplexError

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0
TEMPORARY_STORE = "loraplex-store-"

# Puts weights into a device slot of every module (None: clears it). Called between steps only.
InstallFn = Callable[[int, AdapterWeights | None], None]

# Run by `poll` in the engine's thread: takes one job's outcome into the table.
Outcome = Callable[[float], None]


def everybody(adapter_id: str, tenant: str) -> bool:
    """The default access: every tenant may use every adapter."""
    return True


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
        access: Callable[[str, str], bool] = everybody,
    ) -> None:
        self._source = source
        self._targets = targets
        self._install = install
        self._notify = notify
        self._access = access
        self._table = AdapterTable(config)
        self._temporary = None if config.store_dir else Path(tempfile.mkdtemp(prefix=TEMPORARY_STORE))
        self._store = AdapterStore(
            self._temporary or config.store_dir or Path(),
            config.disk_bytes,
            self._is_in_use,
            durable=self._temporary is None,
        )
        self._tiers = Tiers(self._store, torch.device(device))
        self._host: dict[AdapterKey, HostCopy] = {}
        self._device: dict[AdapterKey, AdapterWeights] = {}
        self._outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._load_seconds = 0.0
        self._num_loads = 0
        self._is_closed = False
        self._fetcher = BackgroundThread("adapter-fetcher")
        self._mover = BackgroundThread("adapter-mover")

    # --- residency --------------------------------------------------------------------------------------------------

    def acquire(self, key: AdapterKey) -> int | None:
        """Takes a reference for one running sequence and returns the device slot.

        None when the weights are not on the device now: no reference is taken, and a load is wanted from here on.
        """
        slot = self._table.residency.acquire(key)
        self._look_again()
        return slot

    def release(self, key: AdapterKey) -> None:
        """Gives one reference back."""
        self._table.residency.release(key)
        self._look_again()

    def borrow(self, key: AdapterKey) -> int | None:
        """The device slot, for this turn only: valid until the next `poll`, no reference is taken.

        None when the weights are not on the device now. They are wanted then, until the next `poll` and by a request
        that has the key pinned only: behind whatever `acquire` wants, and evicting nothing that was used lately.
        """
        slot = self._table.residency.borrow(key)
        self._look_again()
        return slot

    def failure(self, key: AdapterKey) -> Exception | None:
        """Why this key cannot come to the device at all (source gone, does not fit), or None."""
        error = self._table.residency.failure(key)
        return None if error is None else fresh(error)

    # --- names ------------------------------------------------------------------------------------------------------

    def resolve(self, adapter_id: str, tenant: str, now: float) -> AdapterKey | None:
        """The key that the id is bound to, pinned once for the caller (`unpin` gives it back).

        None while it is being fetched: ask again after `poll` has returned True. An id is bound on first use and bound
        anew only by `load`. Raises the typed error (AdapterNotFound, AdapterInvalid, ...) when it cannot be had.
        """
        check_adapter_id(adapter_id)
        if not self._access(adapter_id, tenant):
            raise not_found(adapter_id)
        key = self._table.resolve(adapter_id, now)
        self._start_fetches()
        return key

    def unpin(self, key: AdapterKey) -> None:
        """The request that resolved it has ended."""
        self._table.residency.unpin(key)
        self._look_again()

    def load(self, adapter_id: str, pin: bool, now: float) -> AdapterInfo | None:
        """Reads the source anew, binds the id to what it finds and brings it up to the device where there is room.
        None while under way; call again after `poll`. Raises as `resolve`."""
        check_adapter_id(adapter_id)
        key = self._table.load(adapter_id, pin, now)
        self._start_fetches()
        return None if key is None else rows.key_row(self._table.residency.records[key], adapter_id)

    def unload(self, adapter_id: str) -> AdapterInfo:
        """Forgets the id; weights go when the last request has ended. Raises AdapterNotFound."""
        check_adapter_id(adapter_id)
        before = rows.get_row(self._table, adapter_id)
        key = self._table.unload(adapter_id)
        self._look_again()
        record = self._table.residency.records.get(key)
        if record is None:
            return rows.gone_row(key, before)
        return rows.key_row(record, adapter_id)

    def get(self, adapter_id: str) -> AdapterInfo:
        """Raises AdapterNotFound, also for what is in the source and has not been asked for yet."""
        check_adapter_id(adapter_id)
        return rows.get_row(self._table, adapter_id)

    def take_changes(self) -> ListingChanges:
        """What a listing (cache/listing.py) shows differently since the last call; at the first one, all it shows: what
        is bound, fetched or remembered as failed, and what drains."""
        return rows.take_changes(self._table)

    def usage(self) -> CacheUsage:
        return rows.usage_of(self._table, self._load_seconds, self._num_loads)

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
        if self._table.is_due:
            self._notify()
        return has_changed

    def check_integrity(self) -> None:
        """Raises AssertionError when idle and a reference, pin or byte is unaccounted for."""
        check_residency(self._table.residency)
        check_names(self._table)
        check_idle(self._table)
        residency = self._table.residency
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
        self._tiers.landing.clear()
        self._store.close()
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)

    def _is_in_use(self, key: AdapterKey) -> bool:
        """For the store, from the fetcher's thread: a look without a lock, at worst a moment old."""
        record = self._table.residency.records.get(key)
        return record is not None and record.is_in_use

    # --- background work --------------------------------------------------------------------------------------------

    def _look_again(self) -> None:
        """Moves are made by `poll` alone; an idle engine must come round for it."""
        if self._table.is_due:
            self._notify()

    def _finish(self, outcome: Outcome) -> None:
        """Called by the background threads."""
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
            found = import_adapter(fetch.name, self._source, self._targets, self._store, self._tiers.landing)
        except Exception as error:
            failure = _bare(_about(fetch.name, typed(error, f"fetching adapter {fetch.name}")))
            self._finish(lambda now: self._take_failed_fetch(fetch, failure, now))
        else:
            self._finish(lambda now: self._take_fetched(fetch, found, started_s, now))

    def _take_fetched(self, fetch: Fetch, found: Imported, started_s: float, now: float) -> None:
        self._count(started_s, 0)
        if isinstance(fetch, FetchName):
            self._table.name_fetched(
                fetch.name, fetch.ticket, found.key, found.num_bytes, found.rank, now, found.num_heads
            )
        else:
            self._table.residency.refetched(fetch.key, found.key, now)

    def _take_failed_fetch(self, fetch: Fetch, error: LoraplexError, now: float) -> None:
        log.info("adapter %s: %s", fetch.name, error)
        if isinstance(fetch, FetchName):
            self._table.name_failed(fetch.name, fetch.ticket, error, now)
        else:
            self._table.residency.failed(fetch.key, error, now)

    def _carry_out(self, move: Move) -> None:
        """In the table's order: what makes room comes before what takes it."""
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
            host = host or self._tiers.stage(key)
            weights = self._tiers.promote(host) if host and isinstance(move, Promote) else None
        except Exception as error:
            failure = _bare(typed(error, "moving an adapter's weights"))
            self._finish(lambda now: self._table.residency.failed(key, failure, now))
            return
        if host is None or (weights is None and isinstance(move, Promote)):
            self._finish(lambda now: self._table.residency.lost(key, now))
            return
        copy = host
        self._finish(lambda now: self._take_moved(move, copy, weights, started_s))

    def _take_moved(
        self, move: Stage | Promote, host: HostCopy, weights: AdapterWeights | None, started_s: float
    ) -> None:
        self._count(started_s, 1 if weights is not None else 0)
        self._host[move.key] = host
        if isinstance(move, Promote) and weights is not None:
            self._tiers.hand_over(weights)
            self._device[move.key] = weights
            self._install(move.slot, weights)
            self._table.residency.promoted(move.key)
        else:
            self._table.residency.staged(move.key)


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
