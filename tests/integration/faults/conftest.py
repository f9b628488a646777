"""The stopwatch of fault tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from support.faults import PROPERTY, Fault, Stopwatch


@pytest.fixture
def stopwatch(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> Iterator[Stopwatch]:
    """Takes the time of the test's row and reports it."""
    marker = request.node.get_closest_marker("fault")
    assert marker is not None, "a fault test declares its row with @fault"
    row = marker.args[0]
    assert isinstance(row, Fault)
    watch = Stopwatch(row)
    yield watch
    assert watch.took_s is not None, "the test never stopped its stopwatch"
    record_property(PROPERTY, [row.what, row.clients_see, row.within_s, row.left, watch.took_s])
