"""Host names."""

from __future__ import annotations

import pytest

from loraplex_contracts.errors import InvalidArgument
from loraplex_router.http.middleware import HostNames


@pytest.mark.parametrize(
    ("names", "listens_on", "host", "is_allowed"),
    [
        ((), "127.0.0.1", "localhost:8000", True),
        ((), "127.0.0.1", "127.0.0.1:8000", True),
        ((), "localhost", "[::1]:8000", True),
        ((), "::1", "app.localhost", True),
        ((), "[::1]", "192.168.1.5", True),
        ((), "127.0.0.1", None, True),
        ((), "127.0.0.1", "evil.example", False),
        ((), "127.0.0.1", "localhost.evil.example:8000", False),
        ((), "127.0.0.1", "127.0.0.1.evil.example", False),
        ((), "0.0.0.0", "pod.cluster.local:8000", True),
        (("*",), "127.0.0.1", "evil.example", True),
        (("api.example",), "0.0.0.0", "API.example:80", True),
        (("api.example",), "0.0.0.0", "localhost", False),
        (("::1",), "0.0.0.0", "[::1]:80", True),
    ],
)
def test_host_names(names: tuple[str, ...], listens_on: str, host: str | None, is_allowed: bool) -> None:
    hosts = HostNames(names, listens_on)
    if is_allowed:
        hosts.check(host)
    else:
        with pytest.raises(InvalidArgument, match="--allowed-host"):
            hosts.check(host)
