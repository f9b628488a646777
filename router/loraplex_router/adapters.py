"""AdapterService of the router: every call becomes one at each worker concerned, the answers become rows.

A load goes to the adapter's home workers and to whoever has the name already, an unload to all, a listing shows a row
per worker. Owns nothing: workers own the adapters' life.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from loraplex_contracts.errors import AdapterNotFound, Draining
from loraplex_proto.paging import ListQuery
from loraplex_proto.v1 import adapter_pb2
from loraplex_proto.validate import check_adapter_request, check_list_adapters, parse
from loraplex_router.calls import Call, Calls
from loraplex_router.config import PolicyConfig
from loraplex_router.listing import MergedListing
from loraplex_router.policy import rendezvous_order, routing_key
from loraplex_router.proxy import no_worker
from loraplex_router.replicas import Replicas
from loraplex_router.upstream import ADAPTERS, FailureKind, Upstream, UpstreamFailure
from loraplex_runtime.auth import current_identity

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Answers:
    """What several workers said to one question."""

    # Every response of this service is a list of rows in field 1, and one of ListAdapters has a token too.
    responses: list[adapter_pb2.ListAdaptersResponse] = field(default_factory=list[adapter_pb2.ListAdaptersResponse])
    failures: list[UpstreamFailure] = field(default_factory=list[UpstreamFailure])

    @property
    def num_answered(self) -> int:
        return len(self.responses)

    @property
    def rows(self) -> list[adapter_pb2.Adapter]:
        return [row for response in self.responses for row in response.adapters]

    def raise_unless_answered(self) -> None:
        """When nobody did it: what the workers said, a verdict on the adapter before a worker that is not there."""
        if not self.num_answered and self.failures:
            raise min(self.failures, key=lambda failure: failure.kind is not FailureKind.ANSWERED)


class AdapterFanOut:
    """The handlers of loraplex.v1.AdapterService, from bytes to bytes."""

    def __init__(
        self, policy: PolicyConfig, replicas: Replicas, upstreams: Mapping[str, Upstream], calls: Calls
    ) -> None:
        self._policy = policy
        self._replicas = replicas
        self._upstreams = upstreams
        self._calls = calls
        self._listing = MergedListing()

    async def load(self, raw: bytes, context: Any) -> bytes:
        async def body(call: Call) -> bytes:
            request = self._checked(adapter_pb2.LoadAdapterRequest, raw)
            holders = await self._holders(call, request.adapter_id)
            answers = await self._load_at_homes(call, request.adapter_id, raw)
            answers.raise_unless_answered()
            asked = {row.worker for row in answers.rows} | {failure.worker_id for failure in answers.failures}
            await self._ask(call, "LoadAdapter", raw, [one for one in holders if one not in asked], answers)
            for failure in answers.failures:
                # Its name would stay bound to what the files were before, and requests do reach it.
                if failure.worker_id in holders and not isinstance(failure.typed, Draining):
                    raise failure
            return adapter_pb2.LoadAdapterResponse(adapters=answers.rows).SerializeToString()

        return await self._calls.run("LoadAdapter", context, body)

    async def unload(self, raw: bytes, context: Any) -> bytes:
        async def body(call: Call) -> bytes:
            self._checked(adapter_pb2.UnloadAdapterRequest, raw)
            answers = await self._ask(call, "UnloadAdapter", raw, self._routable())
            answers.raise_unless_answered()
            for failure in answers.failures:
                # Not having it is as good as having unloaded it, and so is going; anything else leaves it somewhere.
                if not isinstance(failure.typed, (AdapterNotFound, Draining)):
                    raise failure
            return adapter_pb2.UnloadAdapterResponse(adapters=answers.rows).SerializeToString()

        return await self._calls.run("UnloadAdapter", context, body)

    async def get(self, raw: bytes, context: Any) -> bytes:
        async def body(call: Call) -> bytes:
            self._checked(adapter_pb2.GetAdapterRequest, raw)
            answers = await self._ask(call, "GetAdapter", raw, self._routable())
            answers.raise_unless_answered()
            return adapter_pb2.GetAdapterResponse(adapters=answers.rows).SerializeToString()

        return await self._calls.run("GetAdapter", context, body)

    async def list(self, raw: bytes, context: Any) -> bytes:
        async def body(call: Call) -> bytes:
            query = check_list_adapters(parse(adapter_pb2.ListAdaptersRequest, raw))

            async def ask(part: ListQuery) -> Sequence[adapter_pb2.ListAdaptersResponse]:
                request = part.request().SerializeToString()
                answers = await self._ask(call, "ListAdapters", request, self._routable())
                answers.raise_unless_answered()
                return answers.responses

            page = await self._listing.page(query, current_identity(), self._replicas.num_routable, ask)
            return page.SerializeToString()

        return await self._calls.run("ListAdapters", context, body)

    def _checked(self, cls: Callable[..., Any], raw: bytes) -> Any:
        """A request that names one adapter, which the caller may use."""
        request = parse(cls, raw)  # pyright: ignore[reportArgumentType]
        check_adapter_request(request)
        current_identity().check_adapters([request.adapter_id])
        return request

    def _routable(self) -> list[str]:
        """Whom a request could reach: what a worker that drains has loaded concerns nobody any more. Raises NoWorker
        rather than answering for nobody."""
        workers = [view.worker_id for view in self._replicas.views()]
        if not workers:
            raise no_worker(self._replicas)
        return workers

    async def _holders(self, call: Call, adapter_id: str) -> list[str]:
        """The workers that have bound the name, homes or not: requests spill over when an adapter is in demand.

        They are asked, because reports come late and list the most recently used adapters only; a report counts where
        the worker does not answer. Raises what a worker said that can tell us nothing of the name."""
        views = {view.worker_id: view for view in self._replicas.views()}
        question = adapter_pb2.GetAdapterRequest(adapter_id=adapter_id).SerializeToString()
        answers = await self._ask(call, "GetAdapter", question, list(views))
        for failure in answers.failures:
            if failure.kind is FailureKind.ANSWERED and not isinstance(failure.typed, AdapterNotFound):
                raise failure
        found = {row.worker for row in answers.rows if _is_bound(row)}
        gone = {failure.worker_id for failure in answers.failures if failure.may_retry}
        return [one for one, view in views.items() if one in found or (one in gone and adapter_id in view.tiers)]

    async def _load_at_homes(self, call: Call, adapter_id: str, raw: bytes) -> Answers:
        """As many workers as an adapter has homes; whoever is next takes the place of one that is not there."""
        order = rendezvous_order(routing_key([adapter_id]), [view.worker_id for view in self._replicas.views()])
        if not order:
            raise no_worker(self._replicas)
        wanted = min(self._policy.num_homes, len(order))
        answers = Answers()
        while order and answers.num_answered < wanted:
            missing = wanted - answers.num_answered
            batch, order = order[:missing], order[missing:]
            await self._ask(call, "LoadAdapter", raw, batch, answers)
            if any(failure.kind is FailureKind.ANSWERED for failure in answers.failures):
                break  # about the adapter itself: the next worker would say the same
        return answers

    async def _ask(
        self, call: Call, method: str, raw: bytes, worker_ids: Sequence[str], into: Answers | None = None
    ) -> Answers:
        """Asks all of them at once; a worker that fails leaves the others' answers as they are."""
        answers = into or Answers()
        metadata = call.context.invocation_metadata()
        timeout_s = call.remaining_s()

        async def ask(worker_id: str) -> bytes:
            upstream = self._upstreams[worker_id]
            credentials = upstream.credentials.metadata(current_identity().tenant, metadata)
            return await upstream.ask(f"/{ADAPTERS}/{method}", raw, timeout_s, credentials)

        results = await asyncio.gather(*map(ask, worker_ids), return_exceptions=True)
        for worker_id, result in zip(worker_ids, results, strict=True):
            if isinstance(result, UpstreamFailure):
                answers.failures.append(result)
                log.info("%s at %s: %s", method, worker_id, result)
            elif isinstance(result, BaseException):
                raise result
            else:
                response = adapter_pb2.ListAdaptersResponse.FromString(result)
                for row in response.adapters:
                    row.worker = worker_id
                answers.responses.append(response)
        return answers


def _is_bound(row: adapter_pb2.Adapter) -> bool:
    """Whether the worker has the name for something, be it a failure; not only files of that name in its source."""
    return row.state != adapter_pb2.ADAPTER_STATE_KNOWN or row.tier != adapter_pb2.ADAPTER_TIER_SOURCE
