"""Probe of a server that runs: health, and the work ahead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from loraplex_proto.services import INFERENCE
from loraplex_proto.v1 import worker_pb2, worker_pb2_grpc
from loraplex_runtime.auth import AUTHORIZATION_KEY

TIMEOUT_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Work:
    """Requests, and the tokens that they may still take."""

    running: int = 0
    queued: int = 0
    pending_tokens: int = 0


class Probe:
    """Owns a connection. `ca`: the authorities of the server's TLS, as PEM; `token`: what opens a worker's load."""

    def __init__(self, address: str, ca: bytes | None = None, token: str = "") -> None:
        self._metadata = ((AUTHORIZATION_KEY, f"Bearer {token}"),) if token else ()
        options = [("grpc.enable_http_proxy", 0)]  # it is on this node
        if ca is None:
            self._channel = grpc.aio.insecure_channel(address, options=options)
        else:
            self._channel = grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(ca), options=options)
        self._health: Any = health_pb2_grpc.HealthStub(self._channel)
        self._worker: Any = worker_pb2_grpc.WorkerServiceStub(self._channel)

    async def answers(self) -> None:
        """Returns once the server answers, ready or not. Raises grpc.RpcError where it does not in time."""
        await self._health.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)

    async def is_ready(self) -> bool:
        """True if it takes requests: a router with no healthy worker does not. Raises grpc.RpcError."""
        request = health_pb2.HealthCheckRequest(service=INFERENCE)
        answer = await self._health.Check(request, timeout=TIMEOUT_S)
        return answer.status == health_pb2.HealthCheckResponse.SERVING

    async def work(self) -> Work:
        """The work ahead of a worker. Raises grpc.RpcError."""
        answer = await self._worker.GetLoad(worker_pb2.GetLoadRequest(), timeout=TIMEOUT_S, metadata=self._metadata)
        load = answer.load
        return Work(load.running_requests, load.queued_requests, load.pending_tokens)

    async def close(self) -> None:
        await self._channel.close()
