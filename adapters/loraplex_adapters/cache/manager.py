"""Manager of the adapter cache: the interface for the engine, background threads.

The tables decide; AdapterManager carries out, with background threads. Fetchers read sources into the store, `maker`
computes adapters that take long (merges, decompositions), `mover` copies between the tiers: neither a source that hangs
nor a long computation keeps other adapters from coming. Owns the threads, the
store, the host copies and the device weights. All methods are for the engine's thread and return at once. The threads
put their outcomes in a queue that `poll` empties, and `notify` wakes the engine for it.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from loraplex_adapters.cache.accesses import is_access_name, shown_name
from loraplex_adapters.cache.jobs import FairQueue
from loraplex_adapters.cache.listing import key_row
from loraplex_adapters.cache.merging import merge_loras
from loraplex_adapters.cache.names import AdapterTable, fresh, is_recipe_name
from loraplex_adapters.cache.residency import AdapterCacheConfig
from loraplex_adapters.cache.states import (
    AdapterTraits,
    DropDevice,
    DropHost,
    Fetch,
    FetchName,
    KeyState,
    Move,
    Promote,
    Refetch,
    Stage,
)
from loraplex_adapters.cache.storage import HostCopy, Storage, TakesLong, import_adapter
from loraplex_adapters.cache.versions import VersionLog
from loraplex_adapters.io.safetensors import WriteFn
from loraplex_adapters.io.source_files import AdapterSource
from loraplex_adapters.io.throttle import Throttle, throttled
from loraplex_adapters.sources.directory import DirectorySource, Fingerprint
from loraplex_adapters.sources.watch import FolderWatch
from loraplex_adapters.store import AdapterStore
from loraplex_adapters.weights import AdapterLayout, AdapterWeights, BaseTargets
from loraplex_contracts.adapters import (
    NOBODY,
    OWN_ORIGIN,
    PLAIN_LOAD,
    AdapterId,
    AdapterInfo,
    AdapterKey,
    AdapterOrigin,
    AdapterUser,
    CacheUsage,
    ListingChanges,
    LoadOptions,
    ReadCount,
    name_in,
)
from loraplex_contracts.errors import (
    AdapterInvalid,
    AdapterMemoryFull,
    AdapterNotFound,
    AdapterOutsideRoot,
    AdapterVersionNotFound,
    DiskFull,
    LoraplexError,
    SourceUnavailable,
    adapter_version_not_found,
    is_disk_full,
    is_out_of_memory,
    unexpected,
    without_frames,
)
from loraplex_contracts.mixtures import Mixture, Recipe

log = logging.getLogger(__name__)
audit = logging.getLogger("loraplex.audit")

RELOAD = LoadOptions(is_reload=True)
MAX_RELOADS = 8  # of replaced adapters at a time
# Errors of a source after which no other one is asked.
_FINAL = (AdapterOutsideRoot, AdapterVersionNotFound)

# Seconds for which "there is no such adapter" is remembered where directories alone are asked: it takes them
# milliseconds to look again, and the adapter may have come.
ABSENT_TTL_S = 1.0

CLOSE_TIMEOUT_S = 5.0
REMOTE_THREADS = 4
TEMPORARY_STORE = "loraplex-store-"

# Puts weights into a device slot of every module (None: clears it, which takes no memory). Called between steps only.
# May raise where the memory is full, with the slot to be cleared then.
InstallFn = Callable[[int, AdapterWeights | None], None]
# Run by `poll` in the engine's thread: takes one job's outcome into the table.
Outcome = Callable[[float], None]


class BackgroundThreads:
    """Run jobs, one at a time each, throttled: those of one flow in order, flows in turns. A job must not raise. Owns
    its threads."""

    def __init__(self, name: str, num_threads: int = 1) -> None:
        self._jobs = FairQueue[Callable[[], None] | None]()
        self._threads = [threading.Thread(target=self._run, name=name, daemon=True) for _ in range(num_threads)]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Callable[[], None], flow: str = "") -> None:
        self._jobs.put(job, flow)

    def close(self, timeout_s: float) -> bool:
        """Drops the jobs that have not begun. False when a present one does not end in time: its source hangs."""
        self._jobs.clear()
        for _ in self._threads:
            self._jobs.put(None)
        until_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        # At the steps' priority: at a lower one a load is under way for longer, and no step is the shorter for it.
        with throttled(Throttle(self._jobs.qsize)):
            while (job := self._jobs.get()) is not None:
                job()
                del job  # its closure may hold weights


class AdapterManager:
    """Manages the whole life cycle of adapters. Owned by the engine."""

    def __init__(
        self,
        config: AdapterCacheConfig,
        source: AdapterSource,
        targets: BaseTargets,
        device: torch.device | str,
        install: InstallFn,
        notify: Callable[[], None],
        remote: AdapterSource | None = None,
        watched: DirectorySource | None = None,
    ) -> None:
        """`remote` is asked for names that `source` does not have, on threads of its own: it may hang. Adapters whose
        folders in `watched` are replaced are loaded again."""
        self._source = source
        self._remote = remote
        self._targets = targets
        self._install = install
        self._notify = notify
        self._with_templates = config.with_templates
        self._temporary = None if config.store_dir else Path(tempfile.mkdtemp(prefix=TEMPORARY_STORE))
        self._store = AdapterStore(
            self._temporary or config.store_dir or Path(),
            config.disk_bytes,
            self._is_in_use,
            durable=self._temporary is None,
        )
        self._version_log = None
        if self._temporary is None and config.store_dir is not None:
            base = f"{targets.digest}-templates-{config.with_templates}"
            self._version_log = VersionLog(config.store_dir, base, self._store.__contains__)
        self._table = AdapterTable(config, None if self._version_log is None else self._version_log.versions)
        self._residency = self._table.residency
        self._storage = Storage(self._store, torch.device(device))
        self._host: dict[AdapterKey, HostCopy] = {}
        self._device: dict[AdapterKey, AdapterWeights] = {}
        self._outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._load_seconds = 0.0
        self._num_loads = 0
        self._source_reads = ReadCount()
        self._is_closed = False
        self._fetcher = BackgroundThreads("adapter-fetcher")
        self._remote_fetcher = BackgroundThreads("adapter-remote", REMOTE_THREADS if remote else 0)
        self._maker = BackgroundThreads("adapter-maker")
        self._mover = BackgroundThreads("adapter-mover")
        self._replaced: dict[str, None] = {}  # names to be loaded again; the first ones are under way
        self._watch = None if watched is None else FolderWatch(watched, self._on_replaced)

    # --- device slots -----------------------------------------------------------------------------------------------

    @property
    def num_slots(self) -> int:
        return self._residency.num_slots

    def acquire(self, key: AdapterKey) -> int | None:
        """Leases the device slot to one running sequence and returns it.

        None when the weights are not on the device now: nothing is leased, and a load is wanted from here on.
        """
        slot = self._residency.acquire(key)
        self._notify_if_due()
        return slot

    def acquire_all(self, keys: tuple[AdapterKey, ...]) -> tuple[int, ...] | None:
        """Does what `acquire` does, for several distinct keys: leases all of them, or none and wants them together."""
        slots = self._residency.acquire_all(keys)
        self._notify_if_due()
        return slots

    def put_first(self, wants: Sequence[AdapterKey | tuple[AdapterKey, ...]]) -> None:
        """Puts the loads of these, where they are wanted, before others, in this order."""
        self._residency.put_first(wants)
        self._notify_if_due()

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

    def failure(self, *keys: AdapterKey) -> LoraplexError | None:
        """The reason that keeps these keys from the device for good (source gone, no room for all), or None."""
        error = self._residency.failure(*keys)
        return None if error is None else fresh(error)

    # --- names ------------------------------------------------------------------------------------------------------

    def resolve(
        self, adapter_id: AdapterId, now: float, user: AdapterUser = NOBODY, origin: AdapterOrigin = OWN_ORIGIN
    ) -> AdapterKey | None:
        """The key that the name is bound to, with a hold for the caller (`drop_hold` gives it back).

        None while it is being fetched: ask again after `poll` has returned True. A name is bound on first use and bound
        again only by `load`. With the `origin` of a caller's own it is the key of what that caller has access to there,
        asked for again after a while. Raises the typed error (AdapterNotFound, AdapterInvalid, ...) when it cannot be
        had, and QuotaExceeded where the user may not have as many bytes in memory.
        """
        table = self._table
        key = table.resolve_at(origin, now, user) if origin.source else table.resolve(adapter_id, now, user)
        self._start_fetches()
        return key

    def bound_key(self, adapter_id: AdapterId) -> AdapterKey | None:
        """The key that the name is bound to now, without a hold; None for a name without one."""
        record = self._table.names.get(adapter_id)
        return None if record is None else record.key

    def resolve_mixture(
        self, mixture: Mixture, now: float, user: AdapterUser = NOBODY
    ) -> tuple[AdapterKey, ...] | None:
        """Does what `resolve` does, for the members of a mixture: their keys in order, each with a hold; all of them or
        none. For a merge it gives the key of the merged adapter, which is made if need be. Raises AdapterNotMixed as
        well."""
        keys = self._table.resolve_members(mixture, now, user)
        self._start_fetches()
        self._notify_if_due()
        return keys

    def traits(self, key: AdapterKey) -> AdapterTraits:
        """Traits that the files of a held adapter give it. Raises KeyError for another."""
        return self._residency.records[key].traits

    def drop_hold(self, key: AdapterKey, tenant: str = NOBODY.tenant, name: str = "", *, was_used: bool = True) -> None:
        """Gives back the hold of this tenant's request that resolved the key: the request has ended. `name` is what it
        resolved, as `held_name` has it; empty for a merge. Without `was_used` it does not count as a use."""
        self._residency.drop_hold(key, tenant, name, was_used=was_used)
        self._notify_if_due()

    def load(
        self,
        adapter_id: AdapterId,
        pin: bool,
        now: float,
        user: AdapterUser = NOBODY,
        options: LoadOptions = PLAIN_LOAD,
        call: int = 0,
    ) -> AdapterInfo | None:
        """Reads the source again, binds the name to what it finds and brings it up to the device where there is room.

        None while under way: call again after `poll`. `call` tells it from other loads that are under way: equal ones
        share what is read after the last of them came. Raises as `resolve`, and DigestMismatch.
        """
        key = self._table.load(adapter_id, pin, now, user, options, call)
        self._start_fetches()
        self._notify_if_due()
        return None if key is None else self._table.row(adapter_id)

    def unload(self, adapter_id: AdapterId, if_unused: bool = False) -> AdapterInfo:
        """Forgets the name; weights go when the last request has ended. Raises AdapterNotFound and AdapterInUse."""
        before: AdapterInfo | None = None
        with contextlib.suppress(AdapterNotFound):
            before = self._table.row(adapter_id)
        try:
            key = self._table.unload(adapter_id, if_unused)  # forgets what a restart would know, also where it raises
        finally:
            if self._version_log is not None:
                self._version_log.save()
            self._notify_if_due()
        assert before is not None, "what is unloaded is listed"
        if self._watch is not None:
            self._watch.forget(adapter_id)
        record = None if key is None else self._residency.records.get(key)
        if record is not None:
            row = key_row(record, adapter_id)
            return replace(row, source=before.source, base=before.base)
        tier = "source" if key is None else "disk"
        return replace(before, state="known", tier=tier, num_running=0, pinned=False, error="", error_reason="")

    def get(self, adapter_id: AdapterId) -> AdapterInfo:
        """The listing's row of an adapter. Raises AdapterNotFound, also for a name of the source that was never asked
        for."""
        return self._table.row(adapter_id)

    @property
    def has_changes(self) -> bool:
        """True where the listing has changed since the last `take_changes`."""
        return self._table.has_changes

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
            device_evictions=residency.device_evictions,
            host_evictions=residency.host_evictions,
            load_seconds_total=self._load_seconds,
            loads_total=self._num_loads,
            source_reads=self._source_reads,
            disk_reads=self._storage.disk_reads,
            host_reads=self._storage.host_reads,
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
        if self._version_log is not None:
            self._version_log.save()
        self._table.advance(now)
        self._reload_replaced(now)
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
        if self._watch is not None:
            self._watch.close()
        all_threads = (self._fetcher, self._remote_fetcher, self._maker, self._mover)
        have_ended = [threads.close(CLOSE_TIMEOUT_S) for threads in all_threads]
        if not all(have_ended):
            log.warning("an adapter was still being loaded at the end")
        self._host.clear()
        self._device.clear()
        self._storage.recent.clear()
        if self._version_log is not None:
            self._version_log.close()
        self._store.close()
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)

    def _is_in_use(self, key: AdapterKey) -> bool:
        """True if the key is held, leased or pinned, or moves. The store asks, on the fetcher's thread: read without a
        lock, at worst a moment old."""
        record = self._residency.records.get(key)
        return record is not None and record.is_in_use

    # --- background work --------------------------------------------------------------------------------------------

    def _notify_if_due(self) -> None:
        """Wakes an idle engine for moves that are due: `poll` alone makes them."""
        if self._table.is_due:
            self._notify()

    def _finish(self, outcome: Outcome) -> None:
        """Queues the outcome of a job. Called on the background threads."""
        if self._is_closed:
            return  # a source that hung has answered after all
        self._outcomes.put(outcome)
        self._notify()

    def _count(self, started_s: float, num_loads: int) -> None:
        self._load_seconds += time.perf_counter() - started_s
        self._num_loads += num_loads

    def _start_fetches(self) -> None:
        for fetch in self._table.take_fetches():
            threads = self._maker if is_recipe_name(fetch.name) else self._fetcher
            threads.submit(lambda fetch=fetch: self._fetch(fetch, self._source, self._remote), _flow(fetch))

    def _fetch(
        self, fetch: Fetch, source: AdapterSource, then: AdapterSource | None = None, *, may_take_long: bool = False
    ) -> None:
        """Carries out a fetch from `source`, on a background thread. `then`: the source that is asked next. One of the
        remote threads may take long: there are others."""
        started_s = time.perf_counter()
        may_take_long |= source is self._remote
        merge = self._table.merge_of(fetch.name)
        files = self._look(fetch)
        try:
            if isinstance(fetch, FetchName) and fetch.version is not None:
                found = self._find(fetch.name, fetch.version)
            else:
                name = shown_name(fetch.name)
                if merge is not None:
                    found = self._merge(*merge, source)
                else:
                    found = self._import(name, source, fetch.origin, may_take_long=may_take_long)
        except TakesLong:
            self._maker.submit(lambda: self._fetch(fetch, source, then, may_take_long=True), _flow(fetch))
        except Exception as error:
            if then is not None and _is_absent(error):
                self._remote_fetcher.submit(lambda: self._fetch(fetch, then), _flow(fetch))
                return
            name = shown_name(fetch.name)
            failure = without_frames(_about(name, _typed(error, f"fetching adapter {name}")))
            if is_access_name(fetch.name) and failure.field == "source":
                failure.field = "adapter_id"  # the request has no other
            self._finish(lambda now: self._take_failed_fetch(fetch, failure, files, now))
        else:
            self._finish(lambda now: self._take_fetched(fetch, found, started_s, files, now))

    def _look(self, fetch: Fetch) -> Fingerprint | None:
        """The files that the fetch is about to read, where their folder is watched."""
        is_of_store = isinstance(fetch, Refetch) or fetch.version is not None or is_recipe_name(fetch.name)
        return None if self._watch is None or is_of_store else self._watch.fingerprint(fetch.name, fetch.origin)

    def _find(self, name: str, version: AdapterKey) -> HostCopy:
        found = self._storage.find(version)
        if found is None:
            raise adapter_version_not_found(name)
        return found

    def _import(
        self, name: str, source: AdapterSource, origin: AdapterOrigin, *, may_take_long: bool = True
    ) -> HostCopy:
        return import_adapter(
            name,
            source,
            self._targets,
            self._store,
            self._storage.recent,
            with_templates=self._with_templates,
            origin=origin,
            may_take_long=may_take_long,
        )

    def _merge(self, recipe: Recipe, origins: Sequence[AdapterOrigin], source: AdapterSource) -> HostCopy:
        """The merged adapter in the store. A member that the store has dropped is read again from where it came; where
        that is not in this `source`, AdapterNotFound, and the other source goes on with those that are left."""
        members: list[tuple[AdapterLayout, NDArray[np.uint8]]] = []
        for member, key, origin in zip(recipe.mixture.members, recipe.keys, origins, strict=True):
            found = self._storage.read(key)
            is_access = bool(member.origin.source)  # whose token is not kept
            if found is None and not is_access and self._import(name_in(member.adapter_id), source, origin).key == key:
                found = self._storage.read(key)
            if found is None:
                instead = "ask again" if is_access else "its files have changed; load it again (LoadAdapter)"
                raise SourceUnavailable(
                    f"adapter {member.adapter_id!a} has left the store before it could be merged: {instead}",
                    resource=member.adapter_id,
                    retry_after_s=1.0,
                )
            members.append(found)

        def put(layout: AdapterLayout, fill: Callable[[WriteFn], None]) -> AdapterKey:
            return self._store.put(layout.kind, layout.to_json(), layout.num_bytes, fill)

        return HostCopy(*merge_loras(recipe, members, tuple(self._targets.modules), put))

    def _take_fetched(
        self, fetch: Fetch, found: HostCopy, started_s: float, files: Fingerprint | None, now: float
    ) -> None:
        self._count(started_s, 0)
        is_of_store = isinstance(fetch, FetchName) and (fetch.version is not None or is_recipe_name(fetch.name))
        if not is_of_store:
            self._source_reads = self._source_reads.plus(time.perf_counter() - started_s, found.layout.num_bytes)
        if isinstance(fetch, FetchName):
            layout, key = found.layout, found.key
            num_bytes, rank, traits = layout.num_bytes, layout.max_rank, _traits(layout)
            self._table.name_fetched(fetch.name, fetch.ticket, key, num_bytes, rank, now, traits, base=found.base)
            record = self._table.names.get(fetch.name)
            if self._watch is not None and record is not None and record.key == key:
                self._watch.loaded(fetch.name, fetch.origin.without_token, files)
        else:
            self._residency.refetched(fetch, found.key, now)

    def _take_failed_fetch(self, fetch: Fetch, error: LoraplexError, files: Fingerprint | None, now: float) -> None:
        # A wrong name is in the line of the request that had it, with its id.
        level = logging.DEBUG if isinstance(error, AdapterNotFound) else logging.INFO
        log.log(level, "adapter %s: %s", shown_name(fetch.name), error)
        if self._watch is not None:
            may_retry = error.retry_after_s is not None
            self._watch.failed(fetch.name, fetch.origin.without_token, files, may_retry=may_retry)
        if isinstance(fetch, FetchName):
            ttl_s = ABSENT_TTL_S if _is_absent(error) and self._remote is None else None
            self._table.name_failed(fetch.name, fetch.ticket, error, now, ttl_s)
        else:
            self._residency.refetch_failed(fetch, error, now)
        if is_recipe_name(fetch.name) and isinstance(error, SourceUnavailable):
            self._table.members_lost(fetch.name)

    def _on_replaced(self, name: str) -> None:
        """Queues the name of an adapter whose folder was replaced. Called on the watch's thread."""
        self._finish(lambda now: self._replaced.setdefault(name))

    def _reload_replaced(self, now: float) -> None:
        """Loads replaced adapters again, a few at a time: they must not fill the queue, and one whose name waits for
        another load must not hold up the others."""
        num_under_way = 0
        for name in list(self._replaced):
            record = self._table.names.get(name)
            if record is not None and (before := record.key) is not None:  # else it was unloaded meanwhile
                try:
                    key = self._table.load(name, False, now, options=RELOAD)
                except LoraplexError as error:
                    audit.warning(
                        "adapter %s was replaced in its folder and is not loaded, digest %s goes on serving: %s",
                        name, (record.key or before).digest, error,
                    )  # fmt: skip
                else:
                    if key is None:
                        num_under_way += 1
                        if num_under_way == MAX_RELOADS:
                            return
                        continue
                    audit.info("adapter %s was replaced in its folder and loaded: digest %s", name, key.digest)
            del self._replaced[name]

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
            failure = without_frames(_typed(error, "moving an adapter's weights"))
            self._finish(lambda now: self._residency.failed(key, failure, now))
            return
        if host is None or (weights is None and isinstance(move, Promote)):
            self._finish(lambda now: self._residency.lost(key, now))
            return
        copy = host
        self._finish(lambda now: self._take_moved(move, copy, weights, started_s, now))

    def _take_moved(
        self, move: Stage | Promote, host: HostCopy, weights: AdapterWeights | None, started_s: float, now: float
    ) -> None:
        self._count(started_s, 1 if weights is not None else 0)
        self._host[move.key] = host
        if not isinstance(move, Promote) or weights is None:
            self._residency.staged(move.key)
            return
        self._storage.hand_over(weights)
        try:
            self._install(move.slot, weights)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._install(move.slot, None)
            self._discard(weights)
            failure = without_frames(_typed(error, "putting an adapter into its slot"))
            self._residency.failed(move.key, failure, now)
        else:
            self._device[move.key] = weights
            self._residency.promoted(move.key)


def _flow(fetch: Fetch) -> str:
    return fetch.tenant if isinstance(fetch, FetchName) else ""


def _is_absent(error: Exception) -> bool:
    """True if the source has no such adapter, and another one may have it."""
    return isinstance(error, AdapterNotFound) and not isinstance(error, _FINAL)


def _about(adapter_id: str, error: LoraplexError) -> LoraplexError:
    """The same error, saying which adapter it is about, and that the request's name of it is at fault where it is."""
    if error.field is None and isinstance(error, AdapterNotFound | AdapterInvalid):
        error.field = "adapter_id"
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
    if is_out_of_memory(error):
        return AdapterMemoryFull(f"no memory for {what}; try again later", retry_after_s=5.0)
    if is_disk_full(error):
        return DiskFull(f"the disk is full while {what}; make room on it", resource="disk", retry_after_s=5.0)
    if isinstance(error, OSError):
        log.warning("%s: %s", what, error)
        return SourceUnavailable(
            f"{what} failed ({error.strerror or 'input or output'}); try again later", retry_after_s=5.0
        )
    return unexpected(error, what)


def _traits(layout: AdapterLayout) -> AdapterTraits:
    return AdapterTraits(
        num_heads=layout.num_heads,
        classifier=None if layout.classifier is None else layout.classifier.shape.info,
        templates=layout.templates,
        pooling=layout.pooling,
        invocation=layout.invocation,
        not_mixed=layout.not_mixed,
    )
