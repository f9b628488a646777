"""What must hold of the cache's tables at any time, and what must hold when nobody uses them."""

from __future__ import annotations

from loraplex_adapters.cache.residency import ResidencyTable
from loraplex_adapters.cache.states import KeyState
from loraplex_adapters.cache.table import AdapterTable


def check_residency(table: ResidencyTable) -> None:
    """Raises AssertionError when the sums do not add up."""
    records = list(table.records.values())
    placed = [r for r in records if r.state in (KeyState.PROMOTING, KeyState.ON_DEVICE)]
    slots = [r.slot for r in placed]
    assert sorted(slots + table.free_slots()) == list(range(table.num_slots)), "a slot is lost or used twice"
    assert all(r.slot == -1 for r in records if r not in placed), "a slot without weights"
    assert table.device_used == sum(r.num_bytes for r in placed) <= table.device_budget, "bytes on the device"
    hosted = [r for r in records if r.has_host]
    assert table.host_used == sum(r.num_bytes for r in hosted) <= table.host_budget, "bytes on the host"
    assert all(r.state is KeyState.ON_DEVICE for r in records if r.num_refs), (
        "a reference to weights that are not there"
    )
    assert all(r.names or r.is_in_use for r in records), "a record that nobody needs"
    wanted = [table.records[key] for key in table.wanted()]
    assert all(r.state not in _SERVED for r in wanted), "a want that is served already"
    assert all(r.num_pins or r.num_refs or r.pinned_names for r in wanted), "a want of nobody's"
    borrowed = [table.records[key] for key in table.borrows()]
    assert all(r.num_pins or r.num_refs for r in borrowed), "a borrower that is gone"
    assert table.pinned_bytes == sum(r.num_bytes for r in records if r.pinned_names) <= table.device_budget, "pinned"


def check_names(table: AdapterTable) -> None:
    """Names and records must agree."""
    for name, record in table.names.items():
        if record.key is not None:
            assert name in table.residency.records[record.key].names, f"{name} is bound, and its content does not know"
    for key, record in table.residency.records.items():
        assert all(table.names[name].key == key for name in record.names), f"{key} has a name that is not bound to it"
        assert record.pinned_names <= record.names, f"{key} is pinned by a name that it does not have"


def check_idle(table: AdapterTable) -> None:
    """No request is left: no pin and no reference may be either."""
    for record in table.residency.records.values():
        assert record.num_pins == 0, f"{record.key} is still pinned {record.num_pins} times"
        assert record.num_refs == 0, f"{record.key} has still {record.num_refs} references"


_SERVED = (KeyState.ON_DEVICE, KeyState.FAILED)
