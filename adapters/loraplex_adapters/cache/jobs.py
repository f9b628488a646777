"""Fair queue of background jobs."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Items of several flows, taken in turns; those of one flow in order. For any number of threads."""

    def __init__(self) -> None:
        self._flows: OrderedDict[str, deque[T]] = OrderedDict()  # with items; the next one to be taken from first
        self._has_items = threading.Condition()

    def put(self, item: T, flow: str = "") -> None:
        with self._has_items:
            self._flows.setdefault(flow, deque()).append(item)
            self._has_items.notify()

    def get(self) -> T:
        """Waits for an item and takes it out."""
        with self._has_items:
            while not self._flows:
                self._has_items.wait()
            flow, items = self._flows.popitem(last=False)
            item = items.popleft()
            if items:
                self._flows[flow] = items
            return item

    def clear(self) -> None:
        with self._has_items:
            self._flows.clear()

    def qsize(self) -> int:
        with self._has_items:
            return sum(map(len, self._flows.values()))
