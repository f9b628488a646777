"""Refusals of calls before any handler: their statuses, counts and lines of the log.

Wrong credentials, methods that there are not, a server that still starts, and what HTTP refuses by itself. What a
handler refuses is a request that has ended, and counted as such.
"""

from __future__ import annotations

import copy
import math
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

import grpc

from loraplex_contracts.errors import InvalidArgument, LoraplexError, PermissionDenied, Unauthenticated, Unimplemented
from loraplex_proto.status import abort
from loraplex_runtime.auth import current_identity
from loraplex_runtime.metrics import PREFIX, Role
from loraplex_runtime.request_record import RequestRecord, log, log_end

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

MAX_METHOD_CHARS: Final = 200
# Lines for callers whose credential is not known, in so many seconds: whoever guesses tokens fills no disk.
MAX_LINES: Final = 20
EVERY_S: Final = 10.0
# Shown from the start, as zero: a rate needs the value before.
_USUAL: Final = (InvalidArgument, PermissionDenied, Unauthenticated, Unimplemented)


class Refusals:
    """Owns the counts of one server's refusals since the start, by code and reason. A Prometheus collector."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._counts = Counter({(error.code.name, error.reason): 0 for error in _USUAL})
        self._name = ""
        self._clock = clock
        self._again_at_s = -math.inf
        self._num_lines = 0
        self._num_left_out = 0

    def handler(self, method: str, error: LoraplexError) -> Any:
        """A handler that ends a call of `method` with `error`, whatever kind of method it is: it never reads what it is
        sent. Each refusal has an id."""

        async def refuse(_requests: Any, context: Any) -> None:
            record = RequestRecord(method.rpartition("/")[2][:MAX_METHOD_CHARS], tenant_of(error))
            record.request_id, record.peer = uuid.uuid4().hex, context.peer()
            own = copy.copy(error)
            own.metadata = {**error.metadata, "request_id": record.request_id}
            self.note(record, own)
            await abort(context, own)

        return grpc.stream_stream_rpc_method_handler(refuse)

    def unknown_method(self, method: str) -> Any:
        """The handler of a method that the server does not have."""
        what = f"there is no method {method[:MAX_METHOD_CHARS]!a} here"
        error = Unimplemented(f"{what}; it may be one of another version, or misspelt", field="method")
        return self.handler(method, error)

    def note(self, record: RequestRecord, error: LoraplexError) -> None:
        """Counts and logs the end of a call. Without a tenant its caller's credential is not known: of such calls only
        some have a line."""
        record.fail(error)
        record.end()
        self._counts[record.code, record.reason] += 1
        if record.tenant or self._has_line():
            log_end(record)

    def _has_line(self) -> bool:
        now_s = self._clock()
        if now_s >= self._again_at_s:
            if self._num_left_out:
                log.info("%d refused calls without a known credential have no line", self._num_left_out)
            self._again_at_s = now_s + EVERY_S
            self._num_lines = self._num_left_out = 0
        if self._num_lines == MAX_LINES:
            self._num_left_out += 1
            return False
        self._num_lines += 1
        return True

    def show_in(self, registry: CollectorRegistry, role: Role) -> None:
        """Shows the counts among the metrics of a registry."""
        self._name = PREFIX + ("" if role == "worker" else "router_") + "requests_refused"
        registry.register(self)  # pyright: ignore[reportArgumentType]  # the protocol is `collect` alone

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily

        text = "Calls refused before any handler: by their credential, method or form."
        family = CounterMetricFamily(self._name, text, labels=["code", "reason"])
        for labels, count in self._counts.items():
            family.add_metric(labels, count)
        yield family


def tenant_of(error: LoraplexError) -> str:
    """The tenant of a call that this task refuses with `error`; empty where its credential is not known."""
    return "" if isinstance(error, Unauthenticated) else current_identity().tenant
