"""Freshly promoted weights that wait for whoever wanted them. Owns `num_offers` of the records."""

from __future__ import annotations

from loraplex_adapters.cache.states import KeyRecord
from loraplex_contracts.adapters import AdapterKey

# A promoted key stays for this many rounds for whoever wanted it, used or not. Without that, two wants for the last
# slot would push each other out before either is used; without an end, a want that never comes back would keep it.
OFFER_ROUNDS = 16


class Offers:
    def __init__(self) -> None:
        self._records: dict[AdapterKey, KeyRecord] = {}

    def __bool__(self) -> bool:
        return bool(self._records)

    def begin(self, record: KeyRecord) -> None:
        record.num_offers = OFFER_ROUNDS
        self._records[record.key] = record

    def end(self, record: KeyRecord) -> None:
        record.num_offers = 0
        self._records.pop(record.key, None)

    def next_round(self) -> None:
        for record in list(self._records.values()):
            record.num_offers -= 1
            if record.num_offers == 0:
                self.end(record)
