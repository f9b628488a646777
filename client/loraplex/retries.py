"""Retry policy of the clients: errors to retry, and the wait before it.

A call is sent again only before its first answer, with the same request id. What the server says in RetryInfo is the
least wait; the call's timeout bounds all tries together.
"""

from __future__ import annotations

from typing import Final

from loraplex_contracts.errors import (
    Code,
    Draining,
    LoraplexError,
    NoWorker,
    ResourceExhausted,
    ServerUnreachable,
)

FIRST_WAIT_S: Final = 0.05  # doubled for each try, where the server asks for less
MAX_WAIT_S: Final = 30.0  # a caller who would wait longer than this gets the error, which says how long
JITTER: Final = 0.25  # share that is added at random, so that callers refused together do not come back together

_CODES: Final = frozenset({Code.UNAVAILABLE, Code.RESOURCE_EXHAUSTED})
# The server has done nothing of the call. After others, such as a lost connection, it may have.
_NOT_DONE: Final = (ServerUnreachable, Draining, NoWorker, ResourceExhausted)


def wait_before_retry(
    error: LoraplexError, num_retries: int, *, is_idempotent: bool, remaining_s: float | None, draw: float
) -> float | None:
    """Seconds to wait before the call is sent again, or None where the error is final.

    `num_retries` so far; `remaining_s` of the call's timeout, None without one; `draw` from 0 to 1.
    """
    if error.retry_after_s is None or error.code not in _CODES:
        return None
    if not is_idempotent and not isinstance(error, _NOT_DONE):
        return None
    wait_s = max(error.retry_after_s, FIRST_WAIT_S * 2**num_retries) * (1 + JITTER * draw)
    if wait_s > MAX_WAIT_S * (1 + JITTER) or (remaining_s is not None and wait_s >= remaining_s):
        return None
    return wait_s
