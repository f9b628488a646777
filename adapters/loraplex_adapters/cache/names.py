"""Names of adapters: bindings to contents, fetches, failures, LoadAdapter operations.

Owns the name records, and through `residency` the keys' weights. No threads, no files, no clock (`now` is an argument):
the table asks through `take_fetches` and `take_moves`, and is told the outcomes.
"""

from __future__ import annotations

import copy
import secrets
from collections import Counter, OrderedDict
from dataclasses import replace
from itertools import filterfalse

from loraplex_adapters.cache.accesses import Accesses, is_access_name, is_internal_name
from loraplex_adapters.cache.listing import key_row, unbound_row, version_row
from loraplex_adapters.cache.residency import RETRY_AFTER_S, AdapterCacheConfig, ResidencyTable
from loraplex_adapters.cache.states import (
    PLAIN_TRAITS,
    AdapterTraits,
    Fetch,
    FetchName,
    KeyRecord,
    KeyState,
    LoadOperation,
    Move,
    NameEvent,
    NameRecord,
    NameState,
    Refetch,
    remembered_s,
)
from loraplex_adapters.cache.versions import Versions, is_other_place
from loraplex_contracts.adapters import (
    NOBODY,
    OWN_ORIGIN,
    PLAIN_LOAD,
    AdapterInfo,
    AdapterKey,
    AdapterOrigin,
    AdapterUser,
    ListingChanges,
    LoadOptions,
    held_name,
    name_in,
)
from loraplex_contracts.errors import (
    AdapterLoadsBusy,
    AdapterMemoryFull,
    AdapterNotFound,
    AdapterNotMixed,
    AdapterOutsideRoot,
    AdapterVersionNotFound,
    DigestMismatch,
    LoraplexError,
    QuotaExceeded,
    SourceUnavailable,
    adapter_in_use,
    adapter_not_found,
    adapter_version_not_found,
)
from loraplex_contracts.mixtures import Mixture, Recipe

# Any name can be asked for, so their memory is bounded: of those that there are not, and of loads that failed.
MAX_REMEMBERED_FAILURES = 1024
MAX_RECIPES = 256  # of merged adapters that are known: weights may be any numbers
# A LoadAdapter whose result was not taken for so long was abandoned: the next call starts another one.
ABANDONED_S = 5.0


class AdapterTable:
    """Owns names, loads and, through `residency`, keys. All methods are for one thread."""

    def __init__(self, config: AdapterCacheConfig, versions: Versions | None = None) -> None:
        """`versions`: known from before."""
        self.residency = ResidencyTable(
            config.host_bytes, config.device_bytes, config.num_device_slots, config.failure_ttl_s
        )
        self.names: dict[str, NameRecord] = {}
        self.changed: set[str] = set()  # names without content, listed differently since this was emptied
        # Tenants by the tickets of fetches whose outcomes are still to come, those of forgotten names included.
        self._fetching: dict[int, str] = {}
        self._num_fetching: Counter[str] = Counter()  # of each tenant
        self._max_pending = config.max_pending_loads
        self._failure_ttl_s = config.failure_ttl_s
        # Names in FAILED, oldest first: those that there are not, for a while, and others until they are loaded.
        self._unknown: OrderedDict[str, None] = OrderedDict()
        self._failures: OrderedDict[str, None] = OrderedDict()
        self.versions = Versions() if versions is None else versions
        self._loads: OrderedDict[str, None] = OrderedDict()  # names with a load whose result was not taken yet
        self._fetches: list[Fetch] = []
        self._last_ticket = 0
        self._accesses = Accesses(secrets.token_bytes(32), config.access_ttl_s)
        self.recipes: OrderedDict[str, Recipe] = OrderedDict()  # by the merged adapter's name, the last used last

    # --- requests -------------------------------------------------------------------------------------------------

    def resolve(self, name: str, now: float, user: AdapterUser = NOBODY) -> AdapterKey | None:
        """The key the name is bound to, held once more; None while it is fetched. Raises the remembered error, and
        QuotaExceeded."""
        base = name_in(name)
        try:
            version = self._version_of(name)
        except AdapterVersionNotFound:  # it may be the content that the source has now
            if self._ask(base, now, user.tenant).state is NameState.BOUND:
                raise
            return None
        if version is not None and ((bound := self.names.get(base)) is None or bound.key != version):
            return self._hold(self._ask(f"{base}@{version.digest}", now, user.tenant, version), user)
        return self._hold(self._ask(base, now, user.tenant), user)

    def resolve_at(self, origin: AdapterOrigin, now: float, user: AdapterUser) -> AdapterKey | None:
        """Does what `resolve` does, for the repository that `origin` names and a caller who has its token. What another
        token has fetched is not looked at."""
        name = self._accesses.name_of(origin, user.tenant)
        record = self.names.get(name)
        is_lost = record is not None and record.key is not None and self._is_lost(record.key)
        if is_lost or self._accesses.is_over(name, now):
            self._forget(name)
        for surplus in self._accesses.use(name, user.tenant):
            self._forget(surplus)
        return self._hold(self._ask(name, now, user.tenant, origin=origin), user)

    def _version_of(self, name: str) -> AdapterKey | None:
        """The content that a name with a version means; None for a name without one. Raises AdapterVersionNotFound."""
        base, _, digits = name.partition("@")
        found = self.versions.find(base, digits) if digits else None
        if digits and found is None:
            raise adapter_version_not_found(name)
        return found

    def _is_lost(self, key: AdapterKey) -> bool:
        """True if the store has dropped the key's bytes and its names could not bring them back."""
        record = self.residency.records[key]
        return record.state is KeyState.FAILED and isinstance(record.error, SourceUnavailable)

    def _ask(
        self,
        name: str,
        now: float,
        tenant: str,
        version: AdapterKey | None = None,
        origin: AdapterOrigin = OWN_ORIGIN,
    ) -> NameRecord:
        """The record of a name that is bound or on its way. Raises the remembered error."""
        record = self.names.get(name)
        if record is None:
            self._check_queue(tenant)
            record = self._fetch_new(name, tenant, version=version, origin=origin)
        elif record.state is NameState.FAILED:
            if record.error is not None and now < record.failed_until_s:
                raise fresh(record.error)
            self._check_queue(tenant)
            self._fetch_again(record, tenant, origin)
        return record

    def _hold(self, record: NameRecord, user: AdapterUser) -> AdapterKey | None:
        if record.key is None:
            record.is_asked_within_limits |= user.max_bytes is not None
            return None
        self.residency.hold(record.key, user, "" if is_internal_name(record.name) else name_in(record.name))
        return record.key

    def load(
        self,
        name: str,
        pin: bool,
        now: float,
        user: AdapterUser = NOBODY,
        options: LoadOptions = PLAIN_LOAD,
        call: int = 0,
    ) -> AdapterKey | None:
        """Advances one LoadAdapter; called until it returns the bound key or raises. `call` tells it from others.

        Equal calls that are there when a fetch begins share it. Any other waits for those before it: the files may have
        changed since that fetch began."""
        record = self.names.get(name)
        operation = record.load if record is not None else None
        if operation is not None and operation.ended_s is not None and now - operation.ended_s > ABANDONED_S:
            operation = None
        if record is not None and operation is not None and not self._join(operation, call, pin, user, options):
            if not self._has_result(record, operation):
                return None
            operation = None  # abandoned: its own callers would have taken the result by now
        if record is None or operation is None:
            operation = LoadOperation(pin, user, options, calls={call}, asked_round=self.residency.round)
            self._start_load(name, record, operation)
            if record is None or operation.error is None:
                return None
            # Refused at once: nothing has been queued that would wake an idle engine for another call.
        if not self._has_result(record, operation):
            return None
        operation.calls.discard(call)
        if not operation.calls:
            self._end_load(record)
        if operation.error is not None:
            raise fresh(operation.error)
        key = record.key
        assert key is not None, "a load that has succeeded has bound the name"
        error = self.residency.failure(key)
        if error is not None:
            raise fresh(error)
        return key

    def unload(self, name: str, if_unused: bool = False) -> AdapterKey | None:
        """Forgets the name; the key's weights go with their last holder. None for a name that could not be loaded.
        Raises AdapterNotFound, and with `if_unused` AdapterInUse where a request for the name holds the key. Without a
        version in the name its versions and its origin are forgotten too, also where AdapterNotFound is raised, unless
        it is being fetched."""
        base, version = name_in(name), self._version_of(name)
        if version is not None and (name := f"{base}@{version.digest}") not in self.names:
            raise adapter_version_not_found(name)
        record = self.names.get(name)
        key = None if record is None else record.key
        if record is not None and key is None and record.state is not NameState.FAILED:
            raise adapter_not_found(name)
        num_holds = 0 if key is None else self.residency.records[key].holds[base]
        if if_unused and num_holds:
            raise adapter_in_use(name, num_holds)
        if version is None:
            for version in self.versions.forget(name):
                self._forget(f"{name}@{version.digest}")
        is_unknown = record is None or _is_unknown(record)
        if record is not None:
            self._end_load(record)
            self._forget(name)
        if is_unknown:
            raise adapter_not_found(name)
        return key

    def _forget(self, name: str) -> None:
        """Forgets a name, if it is known; the outcome of a fetch under way finds no such ticket."""
        self._accesses.forget(name)  # noted also where the name's fetch was refused
        record = self.names.pop(name, None)
        if record is None:
            return
        self.changed.add(name)
        self._unknown.pop(name, None)
        self._failures.pop(name, None)
        if record.key is not None:
            self.residency.unbind(record.key, name)

    def resolve_members(
        self, mixture: Mixture, now: float, user: AdapterUser = NOBODY
    ) -> tuple[AdapterKey, ...] | None:
        """The keys of a mixture's members, each held once more, or none of them while one is fetched. All are fetched
        at the same time. Of a merge the key of the merged adapter instead, or None while that is made. Raises the
        remembered error of one, AdapterNotMixed, or AdapterMemoryFull for members that never fit the device together.
        """
        found: list[AdapterKey] = []
        names: list[str] = []
        is_kept = False
        try:
            for member in mixture.members:
                if member.origin.source:
                    key = self.resolve_at(member.origin, now, user)
                else:
                    key = self.resolve(member.adapter_id, now, user)
                if key is not None:
                    found.append(key)
                    names.append(held_name(member.adapter_id, member.origin))
                    check_member(member.adapter_id, self.residency.records[key])
            if len(found) < len(mixture.members):
                return None
            if mixture.merge is None:
                error = self.residency.failure(*dict.fromkeys(found))
                if error is not None:
                    raise fresh(error)
                is_kept = True
                return tuple(found)
            recipe = Recipe(mixture.without_tokens, tuple(found), mixture.merge)
        finally:
            for key, name in () if is_kept else zip(found, names, strict=True):
                self.residency.drop_hold(key, user.tenant, name, was_used=False)
        merged = self._resolve_merge(recipe, now, user)
        if merged is None:
            return None
        for key, name in zip(found, names, strict=True):
            self.residency.count_use(key, name)
        return (merged,)

    def _resolve_merge(self, recipe: Recipe, now: float, user: AdapterUser) -> AdapterKey | None:
        """Does what `resolve` does, for an adapter that is made of others."""
        self.recipes[recipe.name] = recipe
        self.recipes.move_to_end(recipe.name)
        for name in [*self.recipes][: max(0, len(self.recipes) - MAX_RECIPES)]:
            record = self.names.get(name)
            if record is None or not record.is_fetching:
                del self.recipes[name]
                if record is not None and record.key is not None:
                    self.unload(name)
        made = self.names.get(recipe.name)
        if made is not None and made.key is not None and self._is_lost(made.key):
            self._forget(recipe.name)
        return self.resolve(recipe.name, now, user)

    # --- outcomes -------------------------------------------------------------------------------------------------

    def name_fetched(
        self,
        name: str,
        ticket: int,
        key: AdapterKey,
        num_bytes: int,
        rank: int,
        now: float,
        traits: AdapterTraits = PLAIN_TRAITS,
        base: str = "",
    ) -> None:
        self._end_fetch(ticket)
        record = self.names.get(name)
        if record is None or record.ticket != ticket:
            return
        operation = record.load
        if operation is not None and operation.is_of_fetch:
            refusal = self._refusal(record, operation, key, num_bytes)
            if refusal is not None:
                could_fit = self.residency.too_large(num_bytes) is None
                is_elsewhere = record.fetched_from != record.origin
                is_of_load = is_elsewhere or could_fit or isinstance(refusal, DigestMismatch)
                self._fail(record, refusal, now, is_of_load=is_of_load)
                return
        record.step(NameEvent.FETCHED)
        record.origin, record.base, record.error = record.fetched_from, base, None
        is_named = operation is not None and operation.is_of_fetch and bool(operation.options.origin.source)
        record.is_sourced = is_other_place(name, record.origin.source) and (is_named or record.is_sourced)
        self._accesses.opened(name, now)
        is_reload = operation is not None and operation.options.is_reload
        before = None if record.key is None else self.residency.records[record.key]
        is_pinned = operation is not None and self._will_be_pinned(record, operation)
        is_wanted = not is_reload or (before is not None and before.is_resident)
        self._bind(record, key, num_bytes, rank, traits)
        is_loading = operation is not None and operation.is_of_fetch
        if operation is not None and is_loading and not is_reload:
            self.residency.use.use(operation.user.tenant, key, num_holds=0)
        if is_wanted and (is_loading or not record.is_asked_within_limits):  # else it counts for no tenant yet
            self.residency.prefetch(key)  # it is about to be used
        if operation is None or operation.ended_s is not None:
            return
        if operation.is_behind:
            operation.is_behind = False
            if operation.options.if_absent:
                self._keep(record, operation, key)
            else:
                self._fetch_again(record, operation.user.tenant)
            return
        operation.bound_round = self.residency.round
        self.residency.set_pinned(key, name, is_pinned)

    def name_failed(self, name: str, ticket: int, error: LoraplexError, now: float, ttl_s: float | None = None) -> None:
        """`ttl_s`: for how long the error is remembered at most; None: as long as the table remembers any."""
        self._end_fetch(ticket)
        record = self.names.get(name)
        if record is None or record.ticket != ticket:
            return
        operation = record.load
        if operation is not None and operation.is_behind:
            operation.is_behind = False
            record.step(NameEvent.FAIL)
            self._fetch_again(record, operation.user.tenant)
            return
        self._fail(record, error, now, is_of_load=record.fetched_from != record.origin, ttl_s=ttl_s)

    # --- listings -------------------------------------------------------------------------------------------------

    def row(self, name: str) -> AdapterInfo:
        """The listing's row of a name. Raises AdapterNotFound."""
        base, version = name_in(name), self._version_of(name)
        if version is not None:
            bound = self.names.get(base)
            name = base if bound is not None and bound.key == version else f"{base}@{version.digest}"
            if name not in self.names:
                return version_row(name, version)
        record = self.names.get(name)
        if record is None or _is_unknown(record):
            raise adapter_not_found(name)
        return unbound_row(record) if record.key is None else key_row(self.residency.records[record.key], name, record)

    @property
    def has_changes(self) -> bool:
        """True where `take_changes` would find any."""
        return bool(self.changed or self.residency.changed)

    def take_changes(self) -> ListingChanges:
        """Rows of bound, fetched and failed names, and of contents that drain, that changed since the last call."""
        changes: ListingChanges = {}
        for name in filterfalse(is_internal_name, self.changed):
            bound = self.names.get(name)
            is_listed = bound is not None and bound.key is None and not _is_unknown(bound)
            changes[name] = (unbound_row(bound),) if bound is not None and is_listed else ()  # else with its content
        for key in self.residency.changed:
            record = self.residency.records.get(key)
            names = () if record is None else [*filterfalse(is_internal_name, record.names or (record.last_name,))]
            changes[key] = (
                () if record is None else tuple(key_row(record, name, self.names.get(name)) for name in names)
            )
        self.changed.clear()
        self.residency.changed.clear()
        return changes

    # --- a round --------------------------------------------------------------------------------------------------

    def advance(self, now: float) -> None:
        """Starts what can be started; forgets abandoned loads, and that there is no adapter of a name."""
        self.residency.advance(now)
        for name in self._accesses.over(now):
            self._forget(name)
        for name in list(self._loads):
            record = self.names[name]
            operation = record.load
            if operation is not None and operation.ended_s is None and self._has_result(record, operation):
                operation.ended_s = now
            elif operation is not None and operation.ended_s is not None and now - operation.ended_s > ABANDONED_S:
                self._end_load(record)
        for name in [name for name in self._unknown if self.names[name].failed_until_s <= now]:
            self._drop_failure(name)

    @property
    def is_due(self) -> bool:
        """True if a round would do something."""
        return self.residency.is_due or bool(self.residency.moves)

    def take_fetches(self) -> list[Fetch]:
        refetches = map(self._with_origin, self.residency.refetches)
        taken: list[Fetch] = [*self._fetches, *refetches]
        self._fetches.clear()
        self.residency.refetches.clear()
        return taken

    def merge_of(self, name: str) -> tuple[Recipe, tuple[AdapterOrigin, ...]] | None:
        """The recipe of a merged adapter's name, and where its members come from. May be called on any thread."""
        recipe = self.recipes.get(name)
        if recipe is None:
            return None
        members = recipe.mixture.members
        return recipe, tuple(one.origin if one.origin.source else self._origin_of(one.adapter_id) for one in members)

    def members_lost(self, name: str) -> None:
        """Takes in that a merge could not be made because weights have left the store. Accesses to them are forgotten:
        the next request fetches them again, with its own token."""
        recipe = self.recipes.get(name)
        keys = () if recipe is None else recipe.keys
        names = {one for key in keys if key in self.residency.records for one in self.residency.records[key].names}
        for one in filter(is_access_name, names):
            self._forget(one)

    def take_moves(self) -> list[Move]:
        taken, self.residency.moves = self.residency.moves, []
        return taken

    # --- within ---------------------------------------------------------------------------------------------------

    def _check_queue(self, tenant: str) -> None:
        """Raises AdapterLoadsBusy where the tenant's queue is full. Each tenant has a queue of its own: one with many
        adapters fills no other's."""
        if self._num_fetching[tenant] >= self._max_pending:
            raise AdapterLoadsBusy(
                f"{self._num_fetching[tenant]} adapters are being loaded already; try again shortly",
                resource="adapter loads",
                retry_after_s=RETRY_AFTER_S,
            )

    def _with_origin(self, refetch: Refetch) -> Refetch:
        """The refetch with the origin that the adapter's name comes from, of a version too."""
        return replace(refetch, name=name_in(refetch.name), origin=self._origin_of(refetch.name))

    def _origin_of(self, name: str) -> AdapterOrigin:
        record = self.names.get(name_in(name))
        return self.versions.origin_of(name_in(name)) if record is None else record.origin

    def _end_fetch(self, ticket: int) -> None:
        tenant = self._fetching.pop(ticket, None)
        if tenant is not None:
            self._num_fetching[tenant] -= 1
            if not self._num_fetching[tenant]:
                del self._num_fetching[tenant]

    def _fetch(self, record: NameRecord, tenant: str, origin: AdapterOrigin = OWN_ORIGIN) -> None:
        operation = record.load
        own = origin if origin.source else record.origin
        asked = operation.options.origin if operation is not None and operation.is_of_fetch else own
        asked = asked if asked.source else own
        record.fetched_from = asked.without_token
        if record.key is None:
            record.origin = own.without_token
        self._last_ticket += 1
        record.ticket = self._last_ticket
        record.is_asked_within_limits = False
        self._fetching[record.ticket] = tenant
        self._num_fetching[tenant] += 1
        self.changed.add(record.name)
        self._fetches.append(FetchName(record.name, record.ticket, asked, tenant, record.version))

    def _fetch_new(
        self,
        name: str,
        tenant: str,
        operation: LoadOperation | None = None,
        version: AdapterKey | None = None,
        origin: AdapterOrigin = OWN_ORIGIN,
    ) -> NameRecord:
        record = self.names[name] = NameRecord(name, NameState.FETCHING, ticket=0, load=operation, version=version)
        record.origin = self.versions.origin_of(name)
        self._fetch(record, tenant, origin)
        return record

    def _fetch_again(self, record: NameRecord, tenant: str, origin: AdapterOrigin = OWN_ORIGIN) -> None:
        """Starts another fetch: another try for a name that failed, a new look at the source for one that is bound."""
        record.step(NameEvent.FETCH)
        self._unknown.pop(record.name, None)
        self._failures.pop(record.name, None)
        self._fetch(record, tenant, origin)

    def _join(self, operation: LoadOperation, call: int, pin: bool, user: AdapterUser, options: LoadOptions) -> bool:
        """Adds the call to the operation where it asks for the same and was there before the fetch began. False for
        another."""
        if (operation.pin, operation.user, operation.options) != (pin, user, options):
            return False
        if operation.is_behind or operation.asked_round == self.residency.round:
            operation.calls.add(call)
        return call in operation.calls

    def _start_load(self, name: str, record: NameRecord | None, operation: LoadOperation) -> None:
        if record is not None and operation.options.if_absent and record.key is not None:
            record.load = operation
            self._keep(record, operation, record.key)
        else:
            tenant = operation.user.tenant
            self._check_queue(tenant)
            if record is None:
                self._fetch_new(name, tenant, operation)
            else:
                record.load = operation
                if not record.is_fetching:
                    self._fetch_again(record, tenant)
                else:
                    operation.is_behind = not operation.options.if_absent or _is_of_another_place(operation, record)
        self._loads[name] = None

    def _keep(self, record: NameRecord, operation: LoadOperation, key: AdapterKey) -> None:
        """Carries on the load of a name that is bound and stays so."""
        content = self.residency.records[key]
        operation.error = self._refusal(record, operation, key, content.num_bytes)
        if operation.error is not None:
            return
        if operation.pin:
            self.residency.set_pinned(key, record.name, True)
        self.residency.use.use(operation.user.tenant, key, num_holds=0)
        self.residency.prefetch(key)
        operation.bound_round = self.residency.round

    def _end_load(self, record: NameRecord) -> None:
        record.load = None
        self._loads.pop(record.name, None)
        if record.key is not None:
            self.residency.end_use_if_left(record.key)

    def _has_result(self, record: NameRecord, operation: LoadOperation) -> bool:
        if operation.error is not None:
            return True
        # A round must have tried to bring it up before "no room" can be said.
        has_tried = 0 <= operation.bound_round < self.residency.round
        return has_tried and record.key is not None and self.residency.is_settled(record.key)

    def _refusal(
        self, record: NameRecord, operation: LoadOperation, key: AdapterKey, num_bytes: int
    ) -> LoraplexError | None:
        """The error of an explicit load that leaves nothing behind: it is not the content that was asked for, there is
        never room, none for its pin, or the tenant has all that it may have."""
        expected = operation.options.expected_digest
        if expected and key.digest != expected:
            return DigestMismatch(
                f"adapter {record.name!a} has the digest {key.digest}, and the load asks for {expected}; look at "
                "which files are there",
                field="expected_digest",
                resource=record.name,
                metadata={"digest": key.digest},
            )
        table = self.residency
        too_large = table.too_large(num_bytes)
        if too_large is not None:
            return too_large
        # The content that this name leaves behind is no longer pinned, unless another name pins it too.
        previous = table.records[record.key] if record.key is not None else None
        leaving = previous.key if previous is not None and previous.pinned_names == {record.name} else None
        if self._will_be_pinned(record, operation) and not table.can_pin(key, num_bytes, leaving):
            return AdapterMemoryFull(
                f"the adapter takes {num_bytes} bytes, and the adapters that are pinned already leave no room to pin "
                "it; unload one of them or load this one without a pin",
                metadata={"can_ever_fit": "true"},
            )
        try:
            table.make_room_for(operation.user, key, num_bytes)
        except QuotaExceeded as error:
            return error
        return None

    def _will_be_pinned(self, record: NameRecord, operation: LoadOperation) -> bool:
        """True if the load that is about to bind the name leaves its content pinned."""
        before = None if record.key is None else self.residency.records[record.key]
        stays = operation.options.is_reload and before is not None and record.name in before.pinned_names
        return operation.pin or stays

    def _bind(self, record: NameRecord, key: AdapterKey, num_bytes: int, rank: int, traits: AdapterTraits) -> None:
        previous = record.key
        record.key = key
        if record.version is None and not is_internal_name(record.name):
            self.versions.keep_origin(record.name, record.origin)
            oldest = self.versions.remember(record.name, key)
            if oldest is not None:
                self._forget(f"{record.name}@{oldest.digest}")
        self.changed.add(record.name)
        self.residency.bind(key, record.name, num_bytes, rank, traits)
        if previous is not None and previous != key:
            self.residency.unbind(previous, record.name)

    def _fail(
        self, record: NameRecord, error: LoraplexError, now: float, *, is_of_load: bool, ttl_s: float | None = None
    ) -> None:
        """`is_of_load`: the error is of what a load asked for, such as another place. It is listed, and requests look
        at the name's own place."""
        record.step(NameEvent.FAIL)
        self.changed.add(record.name)
        record.error = error
        if record.version is not None and isinstance(error, AdapterVersionNotFound):
            self.versions.drop(name_in(record.name), record.version)
        if record.load is not None and record.load.ended_s is None:
            record.load.error, record.load.ended_s = error, now
        if record.key is not None:
            self.residency.changed.add(record.key)
            return
        ttl_s = self._failure_ttl_s if ttl_s is None else min(ttl_s, self._failure_ttl_s)
        record.failed_until_s = now if is_of_load else now + remembered_s(error, ttl_s)
        failures = self._unknown if _is_unknown(record) else self._failures
        failures[record.name] = None
        if len(failures) > MAX_REMEMBERED_FAILURES:
            self._drop_failure(next(iter(failures)))

    def _drop_failure(self, name: str) -> None:
        """Forgets a name's failure; a load that has not told its result keeps the name's record a little longer."""
        failures = self._unknown if name in self._unknown else self._failures
        failures.pop(name)
        self.changed.add(name)
        if self.names[name].load is None:
            del self.names[name]
            self._accesses.forget(name)
        else:
            failures[name] = None

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


def _is_of_another_place(operation: LoadOperation, record: NameRecord) -> bool:
    """True if the load names another place than the one that the fetch under way reads."""
    asked = operation.options.origin
    return bool(asked.source) and asked.without_token != record.fetched_from


def _is_unknown(record: NameRecord) -> bool:
    """True if the record only remembers, for a while, that there is no such adapter, or that an access has failed. It
    is not listed: any name can be asked for."""
    if record.state is not NameState.FAILED:
        return False
    # A link out of the root is there, although it is answered as if it were not.
    is_absent = isinstance(record.error, AdapterNotFound) and not isinstance(record.error, AdapterOutsideRoot)
    return is_access_name(record.name) or (is_absent and not record.fetched_from.source)


def is_recipe_name(name: str) -> bool:
    """True if the name is that of a merged adapter."""
    return is_internal_name(name) and not is_access_name(name)


def check_member(adapter_id: str, record: KeyRecord) -> None:
    """Raises AdapterNotMixed for an adapter that is more, or other, than a plain LoRA."""
    if record.traits.not_mixed:
        raise AdapterNotMixed(
            f"adapter {adapter_id!a} cannot be in a mixture: {record.traits.not_mixed}; mixtures are of plain LoRAs",
            field="adapters",
            resource=adapter_id,
        )


def fresh(error: LoraplexError) -> LoraplexError:
    """A copy to raise: an exception that is raised again and again would collect tracebacks."""
    return copy.copy(error)
