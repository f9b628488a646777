"""Probe of a server that runs: health, and the work ahead."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from loraplex_contracts.errors import FailedPrecondition, InvalidArgument, LoraplexError
from loraplex_proto.services import INFERENCE
from loraplex_proto.v1 import worker_pb2, worker_pb2_grpc
from loraplex_runtime.auth import AUTHORIZATION_KEY
from loraplex_runtime.reload import checked_authorities, read_file

TIMEOUT_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Work:
    """Requests, and the tokens that they may still take."""

    running: int = 0
    queued: int = 0
    pending_tokens: int = 0


def read_authorities(path: str) -> bytes:
    """The certificates in the file, as routers take them. Raises FailedPrecondition where it cannot be read, has none,
    or a broken one."""
    try:
        return checked_authorities(read_file(Path(path), "tls.ca"), Path(path), "tls.ca")
    except InvalidArgument as error:
        raise FailedPrecondition(f"on this node, {error.message}") from error


class Probe:
    """Owns a connection. `ca`: the authorities of the server's TLS, as PEM, which `read_ca` reads again; `token`: what
    opens a worker's load."""

    def __init__(
        self, address: str, ca: bytes | None = None, read_ca: Callable[[], bytes] | None = None, token: str = ""
    ) -> None:
        self._address = address
        self._read_ca = read_ca
        self._metadata = ((AUTHORIZATION_KEY, f"Bearer {token}"),) if token else ()
        self._connect(ca)

    def _connect(self, ca: bytes | None) -> None:
        self._ca = ca
        options = [("grpc.enable_http_proxy", 0)]  # it is on this node
        if ca is None:
            self._channel = grpc.aio.insecure_channel(self._address, options=options)
        else:
            self._channel = grpc.aio.secure_channel(self._address, grpc.ssl_channel_credentials(ca), options=options)
        self._health: Any = health_pb2_grpc.HealthStub(self._channel)
        self._worker: Any = worker_pb2_grpc.WorkerServiceStub(self._channel)

    async def answers(self) -> None:
        """Returns once the server answers, ready or not. Raises grpc.RpcError where it does not in time."""
        await self._answer(self._health.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S))

    async def is_ready(self) -> bool:
        """True if it takes requests: a router with no healthy worker does not. Raises grpc.RpcError."""
        request = health_pb2.HealthCheckRequest(service=INFERENCE)
        answer = await self._answer(self._health.Check(request, timeout=TIMEOUT_S))
        return answer.status == health_pb2.HealthCheckResponse.SERVING

    async def work(self) -> Work:
        """The work ahead of a worker. Raises grpc.RpcError."""
        call = self._worker.GetLoad(worker_pb2.GetLoadRequest(), timeout=TIMEOUT_S, metadata=self._metadata)
        load = (await self._answer(call)).load
        return Work(load.running_requests, load.queued_requests, load.pending_tokens)

    async def _answer(self, call: Awaitable[Any]) -> Any:
        """The call's answer. After one that fails, the next goes by a new connection where the authorities have
        changed: servers take new certificates while they run."""
        try:
            return await call
        except grpc.RpcError:
            if self._read_ca is not None:
                with contextlib.suppress(LoraplexError):
                    ca = await asyncio.to_thread(self._read_ca)
                    if ca != self._ca:
                        self._connect(ca)  # calls under way keep the connection that they have
            raise

    async def close(self) -> None:
        await self._channel.close()
