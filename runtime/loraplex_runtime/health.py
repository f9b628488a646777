"""grpc.health.v1 for the process and for each of its services.

The empty name means that the process lives, a service's name that it can be used. The library's servicer has watches
that hold a server open for its whole grace period; these end with the server. Changes are plain assignments on the
event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

SERVING: Final = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING: Final = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN: Final = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class Health(health_pb2_grpc.HealthServicer):
    """Owns the status of every service."""

    def __init__(self, services: tuple[str, ...]) -> None:
        self._statuses = {"": SERVING, **dict.fromkeys(services, NOT_SERVING)}
        self._is_draining = False
        self._has_ended = False
        self._changed = asyncio.Event()

    def set_ready(self, is_ready: bool) -> None:
        """Liveness stays: a router without workers is alive."""
        if not self._is_draining:
            self._set({name: SERVING if is_ready or not name else NOT_SERVING for name in self._statuses})

    def begin_drain(self) -> None:
        """Says NOT_SERVING from here on."""
        self._is_draining = True
        self._set(dict.fromkeys(self._statuses, NOT_SERVING))

    def end_watches(self) -> None:
        """Ends watches once they have sent the last status."""
        self._has_ended = True
        self._tell()

    async def Check(self, request: Any, context: Any) -> health_pb2.HealthCheckResponse:  # noqa: N802
        status = self._statuses.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"there is no service {request.service[:80]!a}")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[health_pb2.HealthCheckResponse]:  # noqa: N802
        last = None
        while True:
            changed = self._changed
            status = self._statuses.get(request.service, SERVICE_UNKNOWN)
            if status != last:
                yield health_pb2.HealthCheckResponse(status=status)
                last = status
            elif self._has_ended:
                return
            else:
                await changed.wait()

    def _set(self, statuses: dict[str, Any]) -> None:
        if statuses != self._statuses:
            self._statuses = statuses
            self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
