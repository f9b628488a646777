"""The cache's tables as listings. Reads, never changes."""

from __future__ import annotations

from loraplex_adapters.cache.states import KeyRecord, KeyState, NameRecord, NameState
from loraplex_adapters.cache.table import AdapterTable
from loraplex_adapters.io.source_files import not_found
from loraplex_contracts.adapters import AdapterInfo, AdapterKey, AdapterState, AdapterTier, CacheUsage, ListingChanges
from loraplex_contracts.errors import AdapterNotFound, LoraplexError

_STATES: dict[KeyState, AdapterState] = {
    KeyState.KNOWN: "known",
    KeyState.STAGING: "fetching",
    KeyState.REFETCHING: "fetching",
    KeyState.ON_HOST: "on_host",
    KeyState.PROMOTING: "on_host",
    KeyState.ON_DEVICE: "on_device",
    KeyState.FAILED: "failed",
}
_TIERS: dict[KeyState, AdapterTier] = {
    KeyState.REFETCHING: "source",
    KeyState.FAILED: "source",
    KeyState.ON_HOST: "host",
    KeyState.ON_DEVICE: "device",
}


def key_row(record: KeyRecord, adapter_id: str) -> AdapterInfo:
    """One content under one name. Without a name of its own it is draining."""
    tier = _TIERS.get(record.state, "host" if record.state is KeyState.PROMOTING else "disk")
    return AdapterInfo(
        adapter_id=adapter_id,
        kind=record.key.kind,
        digest=record.key.digest,
        state=_STATES[record.state] if adapter_id in record.names else "draining",
        tier=tier,
        num_bytes=record.num_bytes,
        rank=record.rank,
        num_heads=record.num_heads,
        num_running=record.num_refs,
        pinned=adapter_id in record.pinned_names,
        error=str(record.error or ""),
        error_reason=_reason(record.error),
    )


def gone_row(key: AdapterKey, before: AdapterInfo) -> AdapterInfo:
    """An adapter that nobody held when it was unloaded."""
    return AdapterInfo(
        adapter_id=before.adapter_id, kind=key.kind, digest=key.digest, state="known", tier="disk",
        num_bytes=before.num_bytes, rank=before.rank, num_heads=before.num_heads, num_running=0, pinned=False,
    )  # fmt: skip


def name_row(table: AdapterTable, record: NameRecord) -> AdapterInfo:
    if record.key is not None:
        return key_row(table.residency.records[record.key], record.name)
    is_failed = record.state is NameState.FAILED
    return _bare_row(record.name, "failed" if is_failed else "fetching", record.error)


def get_row(table: AdapterTable, adapter_id: str) -> AdapterInfo:
    """Raises AdapterNotFound."""
    record = table.names.get(adapter_id)
    if record is None or _is_unknown(record):
        raise not_found(adapter_id)
    return name_row(table, record)


def take_changes(table: AdapterTable) -> ListingChanges:
    """What is listed differently now: bound, fetched or failed names, and contents that drain."""
    changes: ListingChanges = {}
    for name in table.changed:
        bound = table.names.get(name)
        if bound is None or bound.key is not None or _is_unknown(bound):
            changes[name] = ()  # nobody's, or listed with its content
        else:
            changes[name] = (name_row(table, bound),)
    for key in table.residency.changed:
        record = table.residency.records.get(key)
        if record is None:
            changes[key] = ()
        else:
            changes[key] = tuple(key_row(record, name) for name in record.names or (record.last_name,))
    table.changed.clear()
    table.residency.changed.clear()
    return changes


def _is_unknown(record: NameRecord) -> bool:
    """Whether it only remembers that there is no such adapter: anybody can ask for any name."""
    return record.state is NameState.FAILED and isinstance(record.error, AdapterNotFound)


def usage_of(table: AdapterTable, load_seconds: float, num_loads: int) -> CacheUsage:
    residency = table.residency
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
        load_seconds_total=load_seconds,
        loads_total=num_loads,
    )


def _bare_row(adapter_id: str, state: AdapterState, error: Exception | None) -> AdapterInfo:
    return AdapterInfo(
        adapter_id=adapter_id, kind="", digest="", state=state, tier="source", num_bytes=0, rank=0, num_running=0,
        pinned=False, error=str(error or ""), error_reason=_reason(error),
    )  # fmt: skip


def _reason(error: Exception | None) -> str:
    return error.reason if isinstance(error, LoraplexError) else ""
