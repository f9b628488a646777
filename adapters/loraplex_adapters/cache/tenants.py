"""Adapters that each tenant uses, and the bytes that it may have.

A content counts for a tenant, with its size, from the first request of the tenant that holds it until none does and the
weights have left host and device. One that several tenants use counts for each of them. Pure: the residency table asks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from loraplex_adapters.cache.states import IN_TRANSIT, KeyRecord
from loraplex_contracts.adapters import AdapterKey, AdapterUser
from loraplex_contracts.errors import RESIDENT_ADAPTER_BYTES, QuotaExceeded, quota_exceeded

RETRY_AFTER_S = 1.0  # when a request may have ended; nobody knows


class TenantUse:
    """The tenants' holds, and for each tenant the order of use."""

    def __init__(self) -> None:
        # Holds by tenant and content, the least recently used first; 0 for one that is idle and in memory.
        self._holds: dict[str, OrderedDict[AdapterKey, int]] = {}
        self._tenants: dict[AdapterKey, set[str]] = {}

    def has_users(self, key: AdapterKey) -> bool:
        return key in self._tenants

    def num_bytes(self, tenant: str, records: Mapping[AdapterKey, KeyRecord]) -> int:
        return sum(records[key].num_bytes for key in self._holds.get(tenant, ()))

    def make_room(
        self, user: AdapterUser, key: AdapterKey, num_bytes: int, records: Mapping[AdapterKey, KeyRecord]
    ) -> list[KeyRecord]:
        """Gives up the tenant's idle adapters, the least recently used first, until `key` fits its bytes. Returns those
        that no tenant uses any more, which may be evicted. Raises QuotaExceeded, and changes nothing, where that does
        not suffice, unless `key` is one of those that count already: the limit was lowered then."""
        holds = self._holds.get(user.tenant, OrderedDict())
        if user.max_bytes is None:
            return []
        if num_bytes > user.max_bytes:
            raise _exceeded(user, f"this one takes {num_bytes}; only the operator can raise the limit")
        is_new = key not in holds
        excess = self.num_bytes(user.tenant, records) + (num_bytes if is_new else 0) - user.max_bytes
        given_up: list[AdapterKey] = []
        for other, num_holds in holds.items():
            if excess <= 0:
                break
            record = records[other]
            stays = record.num_leases or record.pinned_names or record.state in IN_TRANSIT
            if other != key and not num_holds and (not stays or len(self._tenants[other]) > 1):
                given_up.append(other)
                excess -= record.num_bytes
        if excess > 0 and is_new:
            why = f"this one takes {num_bytes}, and too many are in use; try again when a request has ended"
            raise _exceeded(user, why, RETRY_AFTER_S)
        for other in given_up:
            self._forget(user.tenant, other)
        return [records[other] for other in given_up if not self.has_users(other)]

    def use(self, tenant: str, key: AdapterKey, num_holds: int = 1) -> None:
        """Counts the tenant's use of a content, with so many more holds."""
        holds = self._holds.setdefault(tenant, OrderedDict())
        holds[key] = holds.get(key, 0) + num_holds
        holds.move_to_end(key)
        self._tenants.setdefault(key, set()).add(tenant)

    def drop_hold(self, tenant: str, key: AdapterKey) -> None:
        holds = self._holds[tenant]
        assert holds[key] > 0, f"{tenant} does not hold {key}"
        holds[key] -= 1

    def left(self, key: AdapterKey) -> None:
        """Ends the use of a content whose weights are not in memory: it counts only for tenants with holds."""
        for tenant in list(self._tenants.get(key, ())):
            if not self._holds[tenant][key]:
                self._forget(tenant, key)

    def _forget(self, tenant: str, key: AdapterKey) -> None:
        del self._holds[tenant][key]
        if not self._holds[tenant]:
            del self._holds[tenant]
        self._tenants[key].discard(tenant)
        if not self._tenants[key]:
            del self._tenants[key]

    def check_integrity(self, records: Mapping[AdapterKey, KeyRecord]) -> None:
        """Raises AssertionError where holds are not those of the records, or a content counts that it should not."""
        for tenant, holds in self._holds.items():
            for key in holds:
                assert tenant in self._tenants[key], f"{key} does not know {tenant}"
        for key, tenants in self._tenants.items():
            assert key in records, f"{key} is used and not known"
            for tenant in tenants:
                assert key in self._holds[tenant], f"{tenant} does not know {key}"
        for key, record in records.items():
            num_holds = sum(self._holds[tenant][key] for tenant in self._tenants.get(key, ()))
            assert num_holds == record.num_holds, f"{key}: {num_holds} holds of tenants, {record.num_holds} in all"


def _exceeded(user: AdapterUser, why: str, retry_after_s: float | None = None) -> QuotaExceeded:
    message = f"tenant {user.tenant!a} may have {user.max_bytes} bytes of adapters in a worker's memory; {why}"
    return quota_exceeded(RESIDENT_ADAPTER_BYTES, message, retry_after_s)
