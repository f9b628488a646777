"""Accesses to the Hub with callers' own tokens, and their names in the cache.

What a token has fetched is bound to a name that follows from the token, the tenant, the repository and the revision by
a keyed digest. Only a caller with the same token comes to the same name, so no other one is served what it is bound to,
and none can tell that it is there. No token is kept. Pure, except for the key.
"""

from __future__ import annotations

import hashlib
import hmac
import math
from collections import OrderedDict
from itertools import takewhile
from typing import Final

from loraplex_contracts.adapters import HUB_SOURCE, S3_SOURCE, AdapterOrigin

MAX_ACCESSES: Final = 256  # of one tenant at a time


class Accesses:
    """Names of accesses, and how long each is good for."""

    def __init__(self, key: bytes, ttl_s: float) -> None:
        """`key` is secret and this process's own: without it nobody can try tokens against a name."""
        self._key = key
        self._ttl_s = ttl_s
        self._until_s: dict[str, OrderedDict[str, float]] = {}  # of names, by tenant, the last used last
        self._tenants: dict[str, str] = {}
        self._opened: OrderedDict[str, None] = OrderedDict()  # names by the time at which they are over

    def name_of(self, origin: AdapterOrigin, tenant: str) -> str:
        """The name of an access to a repository hub:ORG/NAME, or to a folder s3:BUCKET/NAME. Without a token the
        server's own is used, which is one access for all callers."""
        place = f"{origin.source}#{origin.revision}#"
        if not origin.token:
            return place
        # None of the parts has a line feed.
        identity = "\n".join((tenant, place, origin.token)).encode()
        return place + hmac.new(self._key, identity, hashlib.sha256).hexdigest()

    def use(self, name: str, tenant: str) -> list[str]:
        """Notes that this tenant asks for `name`. Returns the names to forget where the tenant has too many."""
        tenant = self._tenants.setdefault(name, tenant)  # the first one's, of an access that all share
        names = self._until_s.setdefault(tenant, OrderedDict())
        names.setdefault(name, math.inf)
        names.move_to_end(name)
        return [*names][: max(0, len(names) - MAX_ACCESSES)]

    def is_over(self, name: str, now: float) -> bool:
        """True if the access was good once and the Hub has to be asked again."""
        tenant = self._tenants.get(name)
        return tenant is not None and self._until_s[tenant][name] <= now

    def opened(self, name: str, now: float) -> None:
        """Takes in that the Hub has given out the files; does nothing for a name that is no access."""
        tenant = self._tenants.get(name)
        if tenant is not None:
            self._until_s[tenant][name] = now + self._ttl_s
            self._opened[name] = None
            self._opened.move_to_end(name)

    def over(self, now: float) -> list[str]:
        return list(takewhile(lambda name: self.is_over(name, now), self._opened))

    def forget(self, name: str) -> None:
        tenant = self._tenants.pop(name, None)
        self._opened.pop(name, None)
        if tenant is not None:
            del self._until_s[tenant][name]
            if not self._until_s[tenant]:
                del self._until_s[tenant]


def is_access_name(name: str) -> bool:
    return name.startswith((HUB_SOURCE, S3_SOURCE))


def is_internal_name(name: str) -> bool:
    """True if the name is that of an access or of a merged adapter: it is not listed, and no request can name it."""
    return ":" in name


def shown_name(name: str) -> str:
    """The name that messages show: of an access the repository, or the folder in a bucket; any other name as it is."""
    return name.partition(":")[2].partition("#")[0] if is_access_name(name) else name
