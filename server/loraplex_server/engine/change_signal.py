"""That something has changed, for whoever watches."""

from __future__ import annotations

import asyncio


class News:
    """Wakes all who wait, each time. Belongs to one event loop."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def next(self) -> asyncio.Event:
        """Is set at the next change. Take it before you look at what may change: nothing is missed then."""
        return self._next

    def spread(self) -> None:
        self._next.set()
        self._next = asyncio.Event()
