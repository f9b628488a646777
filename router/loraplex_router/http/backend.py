"""The router as HTTP's routes see it: calls, names of the base model, adapters."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry
from starlette.requests import Request

from loraplex_contracts.adapters import check_adapter_id
from loraplex_contracts.errors import AdapterNotFound, InvalidAdapterId
from loraplex_proto.v1 import adapter_pb2
from loraplex_router.adapters import AdapterFanOut
from loraplex_router.calls import Call, Calls
from loraplex_router.http.errors import model_not_found
from loraplex_router.http.streaming import FanOut, Handle, metadata_of, while_connected
from loraplex_router.inference import InferenceRelay
from loraplex_router.replicas import Replicas
from loraplex_runtime.auth import Credentials


@dataclass(frozen=True, slots=True)
class Backend:
    """The router's parts that HTTP requests reach."""

    calls: Calls
    relay: InferenceRelay
    adapters: AdapterFanOut
    replicas: Replicas
    is_ready: Callable[[], bool]
    credentials: Callable[[], Credentials] | None
    registry: CollectorRegistry | None
    served_names: tuple[str, ...] = ()

    def base_names(self) -> tuple[str, ...]:
        """Names of the base model, the one for listings first: those that the operator gave, else its id. A shorter
        name might be an adapter's. Raises NoWorker before any worker has said its model."""
        if self.served_names:
            return self.served_names
        model_id = self.replicas.model_id
        if model_id is None:
            raise self.replicas.no_worker()
        return (model_id,)

    def handler(self, method: str, body: Callable[[Call, bytes], Awaitable[Any]]) -> Handle:
        """A method of the router, for `ask` and `FanOut`."""
        return self.calls.handler(method, body)

    async def ask(self, handle: Handle, raw: bytes, request: Request) -> bytes:
        """One unary call of the router. Raises what it raises, and Cancelled when the client leaves."""
        calls = FanOut(handle, [raw], metadata_of(request))
        try:
            (answer,) = await while_connected(request.receive, calls.answers())
            return answer
        finally:
            calls.cancel()

    async def adapter_rows(self, adapter_id: str, request: Request) -> Sequence[adapter_pb2.Adapter]:
        """Raises AdapterNotFound for an unknown adapter, and for one that the caller may not use."""
        handle = self.handler("GetAdapter", self.adapters.get)
        try:
            question = adapter_pb2.GetAdapterRequest(adapter_id=check_adapter_id(adapter_id)).SerializeToString()
            found = adapter_pb2.GetAdapterResponse.FromString(await self.ask(handle, question, request))
        except (AdapterNotFound, InvalidAdapterId) as error:
            raise model_not_found(adapter_id) from error
        if not found.adapters:
            raise model_not_found(adapter_id)
        return found.adapters


def ignored_header(names: Sequence[str]) -> dict[str, str]:
    """Of fields of a request that were ignored."""
    return {"x-loraplex-ignored": ",".join(names)} if names else {}


def request_id_of(request: Request) -> str:
    """The client's x-request-id, or the one that it was given."""
    return request.state.request_id
