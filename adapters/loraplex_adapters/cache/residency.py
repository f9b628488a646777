"""Residency of adapters: tiers, holds, leases, budgets of host and device.

Owns the key records, the budgets, the device slots, the order of use, the queue of wants. It decides and asks (`moves`,
`refetches`); the manager carries out and reports back through the outcome methods. No tensors, no threads, no clock:
`now` is an argument.

Wants are served strictly in order: while one waits, none behind it is served, so that no stream of small adapters
starves a large one. The order is that in which they came, except for those that the scheduler puts first: its queue is
fair to tenants and adapters. A want may be several keys at once, for a mixture: it is served when all of them are on
the device. Those that are there already stay until then, safe from the wants behind it. Only the first want that waits
is kept so, and it needs nothing from those behind it: no two wants wait for each other.

Medusa heads are borrowed: they make a request faster, which runs without them. Borrowed weights come after all wants
and never keep one waiting: they have no lease and no reservation, so they may be evicted at any time, and they
evict only what has not been used for a while. A wish to borrow lasts one round and is repeated in the next step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from loraplex_adapters.cache.accesses import is_access_name, is_internal_name
from loraplex_adapters.cache.eviction import Lru, choose_device_evictions, choose_host_evictions
from loraplex_adapters.cache.states import (
    IN_TRANSIT,
    PLAIN_TRAITS,
    AdapterTraits,
    DropDevice,
    DropHost,
    KeyEvent,
    KeyRecord,
    KeyState,
    Move,
    Promote,
    Refetch,
    Stage,
    remembered_s,
)
from loraplex_adapters.cache.tenants import TenantUse
from loraplex_contracts.adapters import NOBODY, AdapterKey, AdapterUser, name_in
from loraplex_contracts.errors import (
    AdapterMemoryFull,
    DiskFull,
    FailedPrecondition,
    IllegalTransition,
    InvalidArgument,
    LoraplexError,
    SourceUnavailable,
    adapter_version_not_found,
)

Group = tuple[AdapterKey, ...]  # distinct keys that are wanted together, more than one

RETRY_AFTER_S = 1.0
# Rounds for which weights that a request waited for stay for it. Without that, two requests for the last slot would
# evict each other's adapter before either is used; without an end, a request that never comes would keep its own.
RESERVED_ROUNDS = 16


@dataclass(frozen=True, slots=True)
class AdapterCacheConfig:
    """Budgets in bytes, by tier. Without a `store_dir` the store is a temporary directory, removed at close."""

    host_bytes: int
    device_bytes: int
    num_device_slots: int
    disk_bytes: int
    store_dir: Path | None = None
    # Names being fetched at the same time for one tenant; more are refused with a retry hint.
    max_pending_loads: int = 64
    failure_ttl_s: float = 30.0  # how long a bad adapter is answered from memory
    with_templates: bool = False  # that adapters bring; they are part of the content
    access_ttl_s: float = 600.0  # how long a caller's own access to the Hub is good for

    def __post_init__(self) -> None:
        for name in ("host_bytes", "device_bytes", "num_device_slots", "disk_bytes", "max_pending_loads"):
            if getattr(self, name) < 1:
                raise InvalidArgument(f"{name} of the adapter cache must be at least 1", field=name)
        for name in ("failure_ttl_s", "access_ttl_s"):
            if not getattr(self, name) > 0:
                raise InvalidArgument(f"{name} of the adapter cache must be more than 0 seconds", field=name)


class ResidencyTable:
    """Owns the records of all contents that have a name, are held, or move."""

    def __init__(self, host_budget: int, device_budget: int, num_slots: int, failure_ttl_s: float) -> None:
        self.host_budget = host_budget
        self.device_budget = device_budget
        self.num_slots = num_slots
        self.host_used = self.device_used = 0
        self.pinned_bytes = 0  # by the operator, on the device or on the way there
        self.host_evictions = self.device_evictions = 0
        self.round = 0
        self.moves: list[Move] = []
        self.refetches: list[Refetch] = []
        self.changed: set[AdapterKey] = set()  # listed differently since this was emptied
        self.is_due = False  # a round would do something, or should look again
        self.records: dict[AdapterKey, KeyRecord] = {}
        self.use = TenantUse()
        self._failure_ttl_s = failure_ttl_s
        self._free_slots = list(range(num_slots))
        self._host_lru: Lru = OrderedDict()
        self._device_lru: Lru = OrderedDict()
        self.wants: OrderedDict[AdapterKey | Group, None] = OrderedDict()  # in the order in which they came
        self._groups: dict[Group, None] = {}  # among them
        self.borrows: OrderedDict[AdapterKey, None] = OrderedDict()  # since the last round
        self._prefetches: OrderedDict[AdapterKey, None] = OrderedDict()
        self._failed: set[AdapterKey] = set()
        self._reserved: dict[AdapterKey, KeyRecord] = {}  # weights that wait for the request that wanted them
        self._pinned: set[AdapterKey] = set()

    # --- names and holders ----------------------------------------------------------------------------------------

    def bind(
        self,
        key: AdapterKey,
        name: str,
        num_bytes: int,
        rank: int,
        traits: AdapterTraits = PLAIN_TRAITS,
    ) -> None:
        """Binds `name` to `key`, of which the store has fresh bytes."""
        record = self.records.setdefault(key, KeyRecord(key, num_bytes, rank, traits))
        last_name, record.last_name = record.last_name, name
        record.names.add(name)
        record.forget_uses(last_name)
        self.changed.add(key)
        if record.state is KeyState.FAILED:
            self._retry(record)

    def unbind(self, key: AdapterKey, name: str) -> None:
        record = self._get(key)
        self.set_pinned(key, name, False)
        record.names.discard(name)
        record.forget_uses(name)
        self.changed.add(key)
        self._forget_if_idle(record)

    def can_pin(self, key: AdapterKey, num_bytes: int, leaving: AdapterKey | None = None) -> bool:
        """True when all pinned weights and these fit the device at the same time, without those of `leaving`."""
        if key in self._pinned:
            return True
        num_pinned, pinned_bytes = len(self._pinned), self.pinned_bytes
        if leaving is not None and leaving in self._pinned:
            num_pinned, pinned_bytes = num_pinned - 1, pinned_bytes - self.records[leaving].num_bytes
        return pinned_bytes + num_bytes <= self.device_budget and num_pinned < self.num_slots

    def set_pinned(self, key: AdapterKey, name: str, is_pinned: bool) -> None:
        """Sets or removes a name's pin by the operator: a pinned adapter is brought to the device and kept there."""
        record = self._get(key)
        self.changed.add(key)
        if is_pinned:
            record.pinned_names.add(name)
        else:
            record.pinned_names.discard(name)
        if bool(record.pinned_names) is (key in self._pinned):
            return
        if record.pinned_names:
            self._pinned.add(key)
            self.pinned_bytes += record.num_bytes
            self._want(record)
        else:
            self._pinned.discard(key)
            self.pinned_bytes -= record.num_bytes
            self._withdraw_if_unneeded(record)

    def hold(self, key: AdapterKey, user: AdapterUser = NOBODY, name: str = "") -> None:
        """Takes a hold on the key for a user, who asked for `name`. Raises QuotaExceeded."""
        record = self._get(key)
        self.make_room_for(user, key, record.num_bytes)
        self.use.use(user.tenant, key)
        record.num_holds += 1
        record.holds[name] += 1
        record.uses[name] += 1
        self.changed.add(key)
        self._touch(record)

    def drop_hold(self, key: AdapterKey, tenant: str = NOBODY.tenant, name: str = "", *, was_used: bool = True) -> None:
        """Gives a hold back. Without `was_used` it does not count as a use."""
        record = self._get(key)
        if not record.holds[name]:
            raise IllegalTransition(f"{key} is not held" + (f" by the name {name!a}" if name else ""))
        self.use.drop_hold(tenant, key)
        record.num_holds -= 1
        record.holds[name] -= 1
        if not was_used:
            record.uses[name] -= 1
        if not record.holds[name]:
            del record.holds[name]
        self.changed.add(key)
        self.end_use_if_left(key)
        self._withdraw_if_unneeded(record)
        self._forget_if_idle(record)

    def count_use(self, key: AdapterKey, name: str) -> None:
        """Counts a use of a content that is not held itself: a request has a merge of it."""
        record = self.records.get(key)
        if record is not None:
            record.uses[name] += 1
            self.changed.add(key)

    def make_room_for(self, user: AdapterUser, key: AdapterKey, num_bytes: int) -> None:
        """Evicts idle adapters of the tenant where these bytes would be more than it may have. Raises QuotaExceeded."""
        for record in self.use.make_room(user, key, num_bytes, self.records):
            if record.state is KeyState.ON_DEVICE:
                self.device_evictions += 1
                self._drop_device(record)
            if record.has_host:
                self._evict_from_host([record])
            self._prefetches.pop(record.key, None)
            self._forget_if_idle(record)

    def end_use_if_left(self, key: AdapterKey) -> None:
        """Ends the tenants' use of a content that is not in memory, nor about to be: it counts only for tenants that
        hold it."""
        record = self.records.get(key)
        if record is None or not (record.is_resident or record.pinned_names or key in self._prefetches):
            self.use.left(key)

    def acquire(self, key: AdapterKey) -> int | None:
        record = self._get(key)
        self._touch(record)
        if record.state is KeyState.ON_DEVICE:
            record.num_leases += 1
            self.changed.add(key)
            self._end_reservation(record)
            return record.slot
        if key not in self.wants and self.failure(key) is None:
            self._want(record)
        return None

    def acquire_all(self, keys: Group) -> tuple[int, ...] | None:
        """Leases all of these keys, or none and wants them together."""
        records = [self._get(key) for key in keys]
        for record in records:
            self._touch(record)
        if all(record.state is KeyState.ON_DEVICE for record in records):
            for record in records:
                record.num_leases += 1
                self.changed.add(record.key)
                self._end_reservation(record)
            return tuple(record.slot for record in records)
        if keys not in self.wants and self.failure(*keys) is None:
            self.wants[keys] = self._groups[keys] = None
            self.is_due = True
        return None

    def put_first(self, wants: Sequence[AdapterKey | Group]) -> None:
        """Serves those of these that are wanted before other wants, in this order; what the operator has pinned comes
        before them."""
        num_moved = min(len(wants), self.num_slots) + len(self._pinned)
        before = list(islice(self.wants, num_moved))
        for want in reversed(wants[: self.num_slots]):  # no more are served at a time
            if want in self.wants:
                self.wants.move_to_end(want, last=False)
        for key in [key for key in self._pinned if key in self.wants]:
            self.wants.move_to_end(key, last=False)
        # One that is put before another may be served where the other has to wait.
        self.is_due |= list(islice(self.wants, num_moved)) != before

    def release(self, key: AdapterKey) -> None:
        record = self._get(key)
        if record.num_leases == 0:
            raise IllegalTransition(f"{key} has no lease to give back")
        record.num_leases -= 1
        self.changed.add(key)
        self._touch(record)
        self._withdraw_if_unneeded(record)
        self._forget_if_idle(record)

    def borrow(self, key: AdapterKey) -> int | None:
        """The key's slot, without a lease: valid until the next round. None where it is not on the device: if a request
        holds it, it is then wanted for one round."""
        record = self._get(key)
        self._touch(record)
        if record.state is KeyState.ON_DEVICE:
            return record.slot
        # A request that holds the key comes back for it.
        is_held = record.num_holds > 0 or record.num_leases > 0
        if is_held and key not in self.wants and record.state not in IN_TRANSIT and self.failure(key) is None:
            self.borrows[key] = None
            self.is_due = True
        return None

    def prefetch(self, key: AdapterKey) -> None:
        """Brings a key up as far as there is room, evicting nothing."""
        self._prefetches[key] = None
        self.is_due = True

    def failure(self, *keys: AdapterKey) -> LoraplexError | None:
        for key in keys:
            record = self.records.get(key)
            error = None if record is None else record.error if record.state is KeyState.FAILED else self._never(record)
            if error is not None:
                return error
        return self._never_together(keys) if len(keys) > 1 else None

    def too_large(self, num_bytes: int) -> AdapterMemoryFull | None:
        """The error for weights that would not fit an empty device or host; None for others."""
        if num_bytes <= min(self.device_budget, self.host_budget):
            return None
        return AdapterMemoryFull(
            f"the adapter takes {num_bytes} bytes; the server has {self.device_budget} for adapters on the device and "
            f"{self.host_budget} on the host (--adapter-device-memory, --adapter-host-memory), so no waiting helps",
            metadata={"can_ever_fit": "false"},
        )

    # --- outcomes -------------------------------------------------------------------------------------------------

    def staged(self, key: AdapterKey) -> None:
        record = self._get(key)
        self._step(record, KeyEvent.STAGED)
        self._forget_if_idle(record)

    def promoted(self, key: AdapterKey) -> None:
        record = self._get(key)
        self._step(record, KeyEvent.PROMOTED)
        record.used_round = self.round  # it is about to be used
        self._device_lru[key] = record
        self._prefetches.pop(key, None)
        if key in self.wants:
            del self.wants[key]
            self._reserve(record)
        for group in [group for group in self._groups if key in group]:
            members = [self.records[member] for member in group]
            if all(member.state is KeyState.ON_DEVICE for member in members):
                self._drop_group(group)
                for member in members:
                    self._reserve(member)
        self._forget_if_idle(record)

    def lost(self, key: AdapterKey, now: float) -> None:
        """Takes in that the store has dropped the bytes. The source may still have the same content under one of its
        names."""
        record = self._get(key)
        self._step(record, KeyEvent.LOST)
        self._give_back(record)
        if not self._refetch(record, frozenset()):
            self._fail(record, _gone(record), now)

    def refetched(self, fetch: Refetch, found: AdapterKey, now: float) -> None:
        record = self._get(fetch.key)
        if found == fetch.key:
            self._step(record, KeyEvent.REFETCHED)
            self._forget_if_idle(record)
        elif record.names and all("@" in name for name in record.names):
            self.refetch_failed(fetch, adapter_version_not_found(min(record.names)), now)
        else:
            changed = FailedPrecondition(
                "the files of the adapter have changed and the version in use is no longer in the store; call "
                "LoadAdapter to take the new one"
            )
            self.refetch_failed(fetch, changed, now)

    def refetch_failed(self, fetch: Refetch, error: LoraplexError, now: float) -> None:
        """Takes in a refetch that failed. The content is looked for under its other names before its requests fail."""
        record = self._get(fetch.key)
        record.check(KeyEvent.FAIL)
        passing = fetch.passing if error.retry_after_s is None else error
        if self._refetch(record, fetch.tried, passing):
            return
        known_by = {*map(name_in, record.names | fetch.tried), *record.holds}
        asked = {name_in(fetch.name), "" if is_internal_name(fetch.name) else name_in(fetch.name)}
        about = passing or error
        # The error is about a name that was asked, and others may be other tenants'.
        self.failed(fetch.key, _about_no_name(about) if known_by - asked else about, now)

    def _refetch(self, record: KeyRecord, tried: frozenset[str], passing: LoraplexError | None = None) -> bool:
        """Asks for the content under the first of its names that was not tried; False where none is left. Names of
        callers' own accesses are not asked: their tokens are not kept."""
        left = sorted(name for name in record.names - tried if not is_access_name(name))
        if left:
            self.refetches.append(Refetch(record.key, left[0], tried=tried | {left[0]}, passing=passing))
        return bool(left)

    def failed(self, key: AdapterKey, error: LoraplexError, now: float) -> None:
        record = self._get(key)
        record.check(KeyEvent.FAIL)
        self._fail(record, error, now)

    # --- a round --------------------------------------------------------------------------------------------------

    def advance(self, now: float) -> None:
        """Starts what can be started. Call it after taking in outcomes."""
        self.round += 1
        self.is_due = False
        for key in [key for key in self._failed if self.records[key].failed_until_s <= now]:
            self._retry(self.records[key])
        for record in list(self._reserved.values()):
            record.reserved_rounds -= 1
            if record.reserved_rounds == 0:
                self._end_reservation(record)
        blocked = self._serve_wants()
        if blocked is None:
            self._serve_borrows()
            self._serve_prefetches()
        else:
            # Reservations run out with the rounds; leases are given back through `release`.
            if blocked.state is not KeyState.STAGING:
                self._prefetches.clear()
            self.is_due = bool(self._reserved)
        self.borrows.clear()

    def is_settled(self, key: AdapterKey) -> bool:
        """True if nothing moves for the key, and nothing will until other weights leave."""
        return self._get(key).state not in IN_TRANSIT and key not in self._prefetches

    def _serve_wants(self) -> KeyRecord | None:
        """Returns the first want that has to wait, for room or for its copy on the host; those behind it wait too. A
        want whose source is asked again may take any time, so it does not hold up the others."""
        spared: set[AdapterKey] = set()
        for want in list(self.wants):
            keys = (want,) if isinstance(want, AdapterKey) else want
            if self.failure(*keys) is not None:
                self.wants.pop(want)
                self._groups.pop(keys, None)
                continue
            if len(keys) > 1:
                spared.update(keys)
            for record in map(self.records.__getitem__, keys):
                if record.state is KeyState.STAGING:
                    return record
                if record.state in IN_TRANSIT or record.state is KeyState.ON_DEVICE:
                    continue
                if not self._promote(record, spared):
                    self._stage(record)  # then at least the disk is not waited for later
                    return record
        return None

    def _serve_borrows(self) -> None:
        """Serves borrows. One that finds no room does not hold up the others."""
        for key in self.borrows:
            record = self.records[key]
            if record.state not in (KeyState.KNOWN, KeyState.ON_HOST) or self._never(record) is not None:
                continue
            if not self._promote(record, self._in_groups(), is_borrow=True):
                self._stage(record, free_only=True)

    def _serve_prefetches(self) -> None:
        for key in list(self._prefetches):
            record = self.records[key]
            if record.state in IN_TRANSIT:
                continue
            del self._prefetches[key]
            if record.state in (KeyState.KNOWN, KeyState.ON_HOST) and not self._promote(record, (), free_only=True):
                self._stage(record, free_only=True)

    def _promote(
        self, record: KeyRecord, spared: Collection[AdapterKey], is_borrow: bool = False, free_only: bool = False
    ) -> bool:
        """Makes room on the device, and on the host where the bytes pass through it; all or nothing."""
        excess_bytes = self.device_used + record.num_bytes - self.device_budget
        excess_slots = 0 if self._free_slots else 1
        evicted = choose_device_evictions(self._device_lru, excess_bytes, excess_slots, self.round, is_borrow, spared)
        # What was staged for later wants may leave again: it must not keep the first one waiting.
        host_evicted = [] if record.has_host else self._choose_host_evictions(record, spared=())
        if evicted is None or host_evicted is None or (free_only and (evicted or host_evicted)):
            return False
        record.check(KeyEvent.PROMOTE)
        self._evict_from_host(host_evicted)
        self.device_evictions += len(evicted)
        for other in evicted:
            self._drop_device(other)
        self._step(record, KeyEvent.PROMOTE)
        record.slot = min(self._free_slots)
        self._free_slots.remove(record.slot)
        self.device_used += record.num_bytes
        self._take_host(record)
        self.moves.append(Promote(record.key, record.slot))
        return True

    def _stage(self, record: KeyRecord, free_only: bool = False) -> None:
        if record.state is not KeyState.KNOWN:
            return
        wanted = {*self.wants, *self._in_groups()} if self._groups else self.wants
        evicted = self._choose_host_evictions(record, spared=wanted)
        if evicted is None or (free_only and evicted):
            return
        self._evict_from_host(evicted)
        self._step(record, KeyEvent.STAGE)
        self._take_host(record)
        self.moves.append(Stage(record.key))

    def _choose_host_evictions(self, record: KeyRecord, spared: Collection[object]) -> list[KeyRecord] | None:
        return choose_host_evictions(self._host_lru, self.host_used + record.num_bytes - self.host_budget, spared)

    # --- changes ----------------------------------------------------------------------------------------------------

    def _get(self, key: AdapterKey) -> KeyRecord:
        record = self.records.get(key)
        if record is None:
            raise IllegalTransition(f"{key} is not known")
        return record

    def _step(self, record: KeyRecord, event: KeyEvent) -> None:
        record.step(event)
        self.changed.add(record.key)

    def _touch(self, record: KeyRecord) -> None:
        record.used_round = self.round
        for lru in (self._host_lru, self._device_lru):
            if record.key in lru:
                lru.move_to_end(record.key)

    def _want(self, record: KeyRecord) -> None:
        if record.state is not KeyState.ON_DEVICE and record.state is not KeyState.FAILED:
            self.wants.setdefault(record.key, None)
            self.is_due = True

    def _in_groups(self) -> set[AdapterKey]:
        return {key for group in self._groups for key in group}

    def _drop_groups_of(self, key: AdapterKey) -> None:
        for group in [group for group in self._groups if key in group]:
            self._drop_group(group)

    def _drop_group(self, group: Group) -> None:
        del self.wants[group], self._groups[group]

    def _leave_queues(self, record: KeyRecord) -> None:
        self.wants.pop(record.key, None)
        self._drop_groups_of(record.key)
        self.borrows.pop(record.key, None)
        self._prefetches.pop(record.key, None)

    def _reserve(self, record: KeyRecord) -> None:
        """Reserves the adapter for a request that has waited for it."""
        if record.num_holds > 0:
            record.reserved_rounds = RESERVED_ROUNDS
            self._reserved[record.key] = record

    def _end_reservation(self, record: KeyRecord) -> None:
        record.reserved_rounds = 0
        self._reserved.pop(record.key, None)

    def _withdraw_if_unneeded(self, record: KeyRecord) -> None:
        """Removes a key from the queues when no request is left that waits for it."""
        if record.num_holds == 0 and record.num_leases == 0:
            self._end_reservation(record)
            self.borrows.pop(record.key, None)
            self._drop_groups_of(record.key)  # a request for them holds them all
            if not record.pinned_names:
                self.wants.pop(record.key, None)
            self.end_use_if_left(record.key)
        self.is_due |= bool(self.wants or self._prefetches)  # that may have waited for the key

    def _never(self, record: KeyRecord) -> AdapterMemoryFull | None:
        """The error where no waiting brings the adapter to the device; None where waiting may."""
        too_large = self.too_large(record.num_bytes)
        has_place = record.state in (KeyState.ON_DEVICE, KeyState.PROMOTING)
        if too_large or has_place or self.can_pin(record.key, record.num_bytes):
            return too_large
        return AdapterMemoryFull(
            f"the adapter takes {record.num_bytes} bytes on the device, and {self._left_by_pins()}",
            retry_after_s=RETRY_AFTER_S,
            metadata={"can_ever_fit": "true"},
        )

    def _never_together(self, keys: Group) -> AdapterMemoryFull | None:
        """The error where no waiting brings all of these keys to the device at once; None where waiting may."""
        num_bytes = sum(self.records[key].num_bytes for key in keys)
        if num_bytes > self.device_budget or len(keys) > self.num_slots:
            return AdapterMemoryFull(
                f"the {len(keys)} adapters of the mixture take {num_bytes} bytes on the device at the same time; the "
                f"server has {self.device_budget} bytes and {self.num_slots} slots for adapters "
                "(--adapter-device-memory, --adapter-slots), so no waiting helps",
                field="adapters",
                metadata={"can_ever_fit": "false"},
            )
        unpinned = [self.records[key] for key in keys if key not in self._pinned]
        pinned_bytes = self.pinned_bytes + sum(record.num_bytes for record in unpinned)
        if pinned_bytes <= self.device_budget and len(self._pinned) + len(unpinned) <= self.num_slots:
            return None
        return AdapterMemoryFull(
            f"{len(unpinned)} adapters of the mixture take {pinned_bytes - self.pinned_bytes} bytes on the device at "
            f"the same time, and {self._left_by_pins()}",
            field="adapters",
            retry_after_s=RETRY_AFTER_S,
            metadata={"can_ever_fit": "true"},
        )

    def _left_by_pins(self) -> str:
        """A clause on what pinned adapters leave of the device, and what to do."""
        num_bytes, num_slots = self.device_budget - self.pinned_bytes, self.num_slots - len(self._pinned)
        return f"pinned adapters leave {num_bytes} bytes and slots for {num_slots}; unload one of these"

    def _retry(self, record: KeyRecord) -> None:
        self._step(record, KeyEvent.RETRY)
        record.error = None
        self._failed.discard(record.key)
        if record.pinned_names:
            self._want(record)

    def _fail(self, record: KeyRecord, error: LoraplexError, now: float) -> None:
        self._give_back(record)
        self._step(record, KeyEvent.FAIL)
        record.error = error
        record.failed_until_s = now + remembered_s(error, self._failure_ttl_s)
        self._failed.add(record.key)
        self._leave_queues(record)
        self._forget_if_idle(record)

    def _give_back(self, record: KeyRecord) -> None:
        """Gives back the slot and bytes that a move had taken."""
        if record.slot >= 0:
            self._release_slot(record)
        if record.has_host:
            self._release_host(record)

    def _take_host(self, record: KeyRecord) -> None:
        if not record.has_host:
            record.has_host = True
            self.host_used += record.num_bytes
        self._host_lru[record.key] = record
        self._host_lru.move_to_end(record.key)

    def _release_host(self, record: KeyRecord) -> None:
        record.has_host = False
        self.host_used -= record.num_bytes
        self._host_lru.pop(record.key, None)
        self.moves.append(DropHost(record.key))
        self.end_use_if_left(record.key)

    def _release_slot(self, record: KeyRecord) -> None:
        self._free_slots.append(record.slot)
        record.slot = -1
        self.device_used -= record.num_bytes
        self.end_use_if_left(record.key)

    def _evict_from_host(self, records: list[KeyRecord]) -> None:
        self.host_evictions += len(records)
        for record in records:
            self._drop_host(record)

    def _drop_host(self, record: KeyRecord) -> None:
        self._step(record, KeyEvent.EVICT_HOST)
        self._release_host(record)

    def _drop_device(self, record: KeyRecord) -> None:
        assert record.num_leases == 0, "a running sequence's weights are never dropped"
        self._step(record, KeyEvent.EVICT_DEVICE if record.has_host else KeyEvent.EVICT_LAST)
        self.moves.append(DropDevice(record.key, record.slot))
        self._device_lru.pop(record.key, None)
        self._release_slot(record)
        self._end_reservation(record)

    def _forget_if_idle(self, record: KeyRecord) -> None:
        """Drops the record and its memory when the last name, pin, hold or lease is gone. A job's outcome is waited
        for."""
        if record.names or record.is_in_use:
            return
        if record.state is KeyState.ON_DEVICE:
            self._drop_device(record)
        if record.has_host:
            self._drop_host(record)
        self._leave_queues(record)
        self._failed.discard(record.key)
        self.changed.add(record.key)
        self.use.left(record.key)
        del self.records[record.key]
        self.is_due = True

    # --- integrity --------------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raises AssertionError when the sums do not add up."""
        self.use.check_integrity(self.records)
        records = list(self.records.values())
        placed = [r for r in records if r.state in (KeyState.PROMOTING, KeyState.ON_DEVICE)]
        hosted = [r for r in records if r.has_host]
        pinned = [r for r in records if r.pinned_names]
        slots = sorted(self._free_slots + [r.slot for r in placed])
        assert slots == list(range(self.num_slots)), "a slot is lost or used twice"
        assert all(r.slot == -1 for r in records if r not in placed), "a slot without weights"
        assert self.device_used == sum(r.num_bytes for r in placed) <= self.device_budget, "bytes on the device"
        assert self.host_used == sum(r.num_bytes for r in hosted) <= self.host_budget, "bytes on the host"
        assert self.pinned_bytes == sum(r.num_bytes for r in pinned) <= self.device_budget, "bytes that are pinned"
        on_device = KeyState.ON_DEVICE
        assert all(r.state is on_device for r in records if r.num_leases), "a lease of weights that are not there"
        assert all(r.names or r.is_in_use for r in records), "a record without a use"
        assert all(r.num_holds == r.holds.total() for r in records), "holds of names are not all holds"
        assert {want for want in self.wants if isinstance(want, tuple)} == set(self._groups), "groups that are wanted"
        for group in self._groups:
            members = [self.records[key] for key in group]
            assert all(member.num_holds or member.num_leases for member in members), "a mixture that no request has"
            assert any(member.state is not KeyState.ON_DEVICE for member in members), "a mixture that is there already"
            assert all(member.state is not KeyState.FAILED for member in members), "a mixture that cannot come"
        for wanted in (self.records[want] for want in self.wants if isinstance(want, AdapterKey)):
            assert wanted.state not in (KeyState.ON_DEVICE, KeyState.FAILED), "a want that is served already"
            assert wanted.num_holds or wanted.num_leases or wanted.pinned_names, "a want that no request has"
        for borrowed in map(self.records.__getitem__, self.borrows):
            assert borrowed.num_holds or borrowed.num_leases, "a borrower that is gone"


def _gone(record: KeyRecord) -> SourceUnavailable:
    if any(map(is_access_name, record.names)):
        return SourceUnavailable(
            "the adapter's weights have left the store; send the request again, and they are fetched with its token",
            retry_after_s=0.0,
        )
    return SourceUnavailable("the weights are gone from the store, and their name was unloaded")


def _about_no_name(error: LoraplexError) -> LoraplexError:
    """The error of weights that have left the store, for requests of any name: of `error`, which may name an adapter,
    its kind and how long it lasts."""
    hint = error.retry_after_s
    if isinstance(error, DiskFull | AdapterMemoryFull):
        advice = "; the server's log says more" if hint is None else " at the moment; try again shortly"
        return type(error)(
            f"the adapter's weights have left the store, and there is no room to fetch them again{advice}",
            retry_after_s=hint,
            metadata=error.metadata,
        )
    if hint is not None:
        why = "and its source cannot give them out at the moment; try again shortly"
    else:
        why = "and its files have changed or cannot be read; call LoadAdapter"
    return SourceUnavailable(f"the adapter's weights are gone from the store, {why}", retry_after_s=hint)
