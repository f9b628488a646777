"""Names of adapters: bindings to contents, fetches, failures, LoadAdapter operations.

Owns the name records, and through `residency` the keys' weights. No threads, no files, no clock (`now` is an argument):
the table asks through `take_fetches` and `take_moves`, and is told the outcomes.
"""

from __future__ import annotations

import copy
from collections import OrderedDict

from loraplex_adapters.cache.listing import key_row, unbound_row
from loraplex_adapters.cache.residency import RETRY_AFTER_S, AdapterCacheConfig, ResidencyTable
from loraplex_adapters.cache.states import (
    Fetch,
    FetchName,
    LoadOperation,
    Move,
    NameEvent,
    NameRecord,
    NameState,
    remembered_s,
)
from loraplex_contracts.adapters import AdapterInfo, AdapterKey, AdapterTemplates, ClassifierInfo, ListingChanges
from loraplex_contracts.errors import AdapterLoadsBusy, AdapterMemoryFull, AdapterNotFound, adapter_not_found

MAX_REMEMBERED_FAILURES = 1024  # any name can be asked for; bounds their memory
# A LoadAdapter whose result was not taken for so long was abandoned: the next call starts another one.
ABANDONED_S = 5.0


class AdapterTable:
    """Names, keys, loads. All methods are for one thread."""

    def __init__(self, config: AdapterCacheConfig) -> None:
        self.residency = ResidencyTable(
            config.host_bytes, config.device_bytes, config.num_device_slots, config.failure_ttl_s
        )
        self.names: dict[str, NameRecord] = {}
        self.changed: set[str] = set()  # names without content, listed differently since this was emptied
        self.num_fetching = 0  # outcomes that are still to come, those of forgotten names included
        self._max_pending = config.max_pending_loads
        self._failure_ttl_s = config.failure_ttl_s
        self._failures: OrderedDict[str, None] = OrderedDict()  # names in FAILED, oldest first
        self._loads: OrderedDict[str, None] = OrderedDict()  # names with a load whose result was not taken yet
        self._fetches: list[Fetch] = []
        self._last_ticket = 0

    # --- requests -------------------------------------------------------------------------------------------------

    def resolve(self, name: str, now: float) -> AdapterKey | None:
        """The key the name is bound to, held once more; None while it is fetched. Raises the remembered error."""
        record = self.names.get(name)
        if record is not None and record.key is not None:
            self.residency.hold(record.key)
            return record.key
        if record is None:
            self._check_queue()
            self._fetch_new(name)
        elif record.state is NameState.FAILED:
            if record.error is not None and now < record.failed_until_s:
                raise fresh(record.error)
            self._check_queue()
            self._fetch_again(record)
        return None

    def load(self, name: str, pin: bool, now: float) -> AdapterKey | None:
        """One LoadAdapter, called until it returns the bound key or raises."""
        record = self.names.get(name)
        operation = record.load if record is not None else None
        if operation is not None and operation.ended_s is not None and now - operation.ended_s > ABANDONED_S:
            operation = None
        if record is None or operation is None:
            self._check_queue()
            self._start_load(name, record, pin)
            return None
        if operation.error is not None:
            self._end_load(record)
            raise fresh(operation.error)
        key = record.key
        if operation.bound_round < 0 or key is None:
            return None
        # A round must have tried to bring it up before "no room" can be said.
        if self.residency.round <= operation.bound_round or not self.residency.is_settled(key):
            return None
        self._end_load(record)
        error = self.residency.failure(key)
        if error is not None:
            raise fresh(error)
        return key

    def unload(self, name: str) -> AdapterKey:
        """Forgets the name; the key's weights go with their last holder. Raises AdapterNotFound."""
        record = self.names.get(name)
        if record is None or record.key is None:
            raise adapter_not_found(name)
        self._end_load(record)
        self.changed.add(name)
        del self.names[name]  # the outcome of a fetch under way finds no such ticket
        self.residency.unbind(record.key, name)
        return record.key

    # --- outcomes -------------------------------------------------------------------------------------------------

    def name_fetched(
        self,
        name: str,
        ticket: int,
        key: AdapterKey,
        num_bytes: int,
        rank: int,
        now: float,
        num_heads: int = 0,
        classifier: ClassifierInfo | None = None,
        templates: AdapterTemplates | None = None,
    ) -> None:
        self.num_fetching -= 1
        record = self.names.get(name)
        if record is None or record.ticket != ticket:
            return
        operation = record.load
        if operation is not None and operation.ended_s is None and not operation.is_behind:
            refusal = self._refusal(record, operation, key, num_bytes)
            if refusal is not None:
                self._fail(record, refusal, now)
                return
        record.step(NameEvent.FETCHED)
        self._bind(record, key, num_bytes, rank, num_heads, classifier, templates)
        self.residency.prefetch(key)  # it is about to be used
        if operation is None or operation.ended_s is not None:
            return
        if operation.is_behind:
            operation.is_behind = False
            self._fetch_again(record)
            return
        operation.bound_round = self.residency.round
        self.residency.set_pinned(key, name, operation.pin)

    def name_failed(self, name: str, ticket: int, error: Exception, now: float) -> None:
        self.num_fetching -= 1
        record = self.names.get(name)
        if record is None or record.ticket != ticket:
            return
        operation = record.load
        if operation is not None and operation.is_behind:
            operation.is_behind = False
            record.step(NameEvent.FAIL)
            self._fetch_again(record)
            return
        self._fail(record, error, now)

    # --- listings -------------------------------------------------------------------------------------------------

    def row(self, name: str) -> AdapterInfo:
        """Raises AdapterNotFound."""
        record = self.names.get(name)
        if record is None or _is_unknown(record):
            raise adapter_not_found(name)
        return unbound_row(record) if record.key is None else key_row(self.residency.records[record.key], name)

    def take_changes(self) -> ListingChanges:
        """Rows of bound, fetched and failed names, and of contents that drain, that changed since the last call."""
        changes: ListingChanges = {}
        for name in self.changed:
            bound = self.names.get(name)
            is_listed = bound is not None and bound.key is None and not _is_unknown(bound)
            changes[name] = (unbound_row(bound),) if bound is not None and is_listed else ()  # else with its content
        for key in self.residency.changed:
            record = self.residency.records.get(key)
            names = () if record is None else record.names or (record.last_name,)
            changes[key] = () if record is None else tuple(key_row(record, name) for name in names)
        self.changed.clear()
        self.residency.changed.clear()
        return changes

    # --- a round --------------------------------------------------------------------------------------------------

    def advance(self, now: float) -> None:
        """Starts what can be started; forgets abandoned loads and expired failures."""
        self.residency.advance(now)
        for name in list(self._loads):
            record = self.names[name]
            operation = record.load
            if operation is not None and operation.ended_s is None and self._has_result(record, operation):
                operation.ended_s = now
            elif operation is not None and operation.ended_s is not None and now - operation.ended_s > ABANDONED_S:
                self._end_load(record)
        for name in [name for name in self._failures if self.names[name].failed_until_s <= now]:
            self._drop_failure(name)

    @property
    def is_due(self) -> bool:
        """A round would do something."""
        return self.residency.is_due or bool(self.residency.moves)

    def take_fetches(self) -> list[Fetch]:
        taken: list[Fetch] = [*self._fetches, *self.residency.refetches]
        self._fetches.clear()
        self.residency.refetches.clear()
        return taken

    def take_moves(self) -> list[Move]:
        taken, self.residency.moves = self.residency.moves, []
        return taken

    # --- within ---------------------------------------------------------------------------------------------------

    def _check_queue(self) -> None:
        if self.num_fetching >= self._max_pending:
            raise AdapterLoadsBusy(
                f"{self.num_fetching} adapters are being loaded already; try again shortly",
                resource="adapter loads",
                retry_after_s=RETRY_AFTER_S,
            )

    def _fetch(self, record: NameRecord) -> None:
        self._last_ticket += 1
        record.ticket = self._last_ticket
        self.num_fetching += 1
        self.changed.add(record.name)
        self._fetches.append(FetchName(record.name, record.ticket))

    def _fetch_new(self, name: str) -> NameRecord:
        record = self.names[name] = NameRecord(name, NameState.FETCHING, ticket=0)
        self._fetch(record)
        return record

    def _fetch_again(self, record: NameRecord) -> None:
        """Of a failed name another try, of a bound one a new look at the source."""
        record.step(NameEvent.FETCH)
        record.error = None
        self._failures.pop(record.name, None)
        self._fetch(record)

    def _start_load(self, name: str, record: NameRecord | None, pin: bool) -> None:
        if record is None:
            self._fetch_new(name).load = LoadOperation(pin)
        else:
            record.load = LoadOperation(pin, is_behind=record.is_fetching)
            if not record.is_fetching:
                self._fetch_again(record)
        self._loads[name] = None

    def _end_load(self, record: NameRecord) -> None:
        record.load = None
        self._loads.pop(record.name, None)

    def _has_result(self, record: NameRecord, operation: LoadOperation) -> bool:
        if operation.error is not None:
            return True
        return operation.bound_round >= 0 and record.key is not None and self.residency.is_settled(record.key)

    def _refusal(
        self, record: NameRecord, operation: LoadOperation, key: AdapterKey, num_bytes: int
    ) -> AdapterMemoryFull | None:
        """The error of an explicit load that leaves nothing behind: there is never room, or none for its pin."""
        table = self.residency
        too_large = table.too_large(num_bytes)
        if too_large is not None:
            return too_large
        # The content that this name leaves behind is no longer pinned, unless another name pins it too.
        previous = table.records[record.key] if record.key is not None else None
        leaving = previous.key if previous is not None and previous.pinned_names == {record.name} else None
        if operation.pin and not table.can_pin(key, num_bytes, leaving):
            return AdapterMemoryFull(
                f"the adapter takes {num_bytes} bytes, and the adapters that are pinned already leave no room to pin "
                "it; unload one of them or load this one without a pin",
                metadata={"can_ever_fit": "true"},
            )
        return None

    def _bind(
        self,
        record: NameRecord,
        key: AdapterKey,
        num_bytes: int,
        rank: int,
        num_heads: int,
        classifier: ClassifierInfo | None,
        templates: AdapterTemplates | None,
    ) -> None:
        previous = record.key
        record.key = key
        self.changed.add(record.name)
        self.residency.bind(key, record.name, num_bytes, rank, num_heads, classifier, templates)
        if previous is not None and previous != key:
            self.residency.unbind(previous, record.name)

    def _fail(self, record: NameRecord, error: Exception, now: float) -> None:
        record.step(NameEvent.FAIL)
        self.changed.add(record.name)
        if record.load is not None:
            record.load.error = error
        if record.state is NameState.FAILED:
            record.error = error
            record.failed_until_s = now + remembered_s(error, self._failure_ttl_s)
            self._failures[record.name] = None
            if len(self._failures) > MAX_REMEMBERED_FAILURES:
                self._drop_failure(next(iter(self._failures)))

    def _drop_failure(self, name: str) -> None:
        """Forgets it; a load that has not told its result keeps the name's record a little longer."""
        self._failures.pop(name)
        self.changed.add(name)
        if self.names[name].load is None:
            del self.names[name]
        else:
            self._failures[name] = None

    # --- integrity ------------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raises AssertionError when names and records disagree, or the residency's sums do not add up."""
        self.residency.check_integrity()
        records = self.residency.records
        for name, bound in self.names.items():
            if bound.key is not None:
                assert name in records[bound.key].names, f"{name} is bound, and its content does not know"
        for key, record in records.items():
            assert all(self.names[name].key == key for name in record.names), f"{key} has a name that is not its own"
            assert record.pinned_names <= record.names, f"{key} is pinned by a name that it does not have"

    def check_idle(self) -> None:
        """Raises AssertionError when a hold or a lease is left."""
        for record in self.residency.records.values():
            assert record.num_holds == 0, f"{record.key} is still held {record.num_holds} times"
            assert record.num_leases == 0, f"{record.key} has still {record.num_leases} leases"


def _is_unknown(record: NameRecord) -> bool:
    """True when it only remembers that there is no such adapter. It is not listed: any name can be asked for."""
    return record.state is NameState.FAILED and isinstance(record.error, AdapterNotFound)


def fresh(error: Exception) -> Exception:
    """A copy to raise: an exception that is raised again and again would collect tracebacks."""
    return copy.copy(error)
