"""Residency of adapters as a client can observe it."""

from __future__ import annotations

from collections.abc import Iterable

from loraplex.types import Adapter


class Residency:
    """Owns the client's picture of it. The server may evict between two looks, so the picture is a little old."""

    def __init__(self) -> None:
        self._ready: set[str] = set()

    def look(self, rows: Iterable[Adapter]) -> None:
        """A listing. Behind a router any worker that has it will do: requests go where their adapter is."""
        self._ready = {row.adapter_id for row in rows if row.state == "on_device"}

    def answered(self, adapter_id: str) -> None:
        """A first token of it came."""
        self._ready.add(adapter_id)

    def is_cold(self, adapter_id: str) -> bool:
        return bool(adapter_id) and adapter_id not in self._ready
