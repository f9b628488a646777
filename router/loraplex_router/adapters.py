"""AdapterService of the router: calls to all workers concerned, answers merged.

A load goes to the adapter's home workers and to those that have bound the name already, one from a `source` to all:
others would take the name for that of a folder. An unload goes to all. Neither succeeds where a worker that has the
name cannot be reached now, nor a load that a worker refuses or that leaves the name bound to different sources. A
listing shows a row per worker. A page of a listing is asked for by the adapter before it, so that a worker that comes
or goes between two pages neither breaks a token nor repeats an adapter.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import attrgetter
from typing import TypeVar

from loraplex_contracts.errors import AdapterNotFound, DigestMismatch, Draining, Internal, WorkerLost, adapter_in_use
from loraplex_proto.paging import MAX_PAGE_SIZE, ListQuery, Page, last_of_page, visible_part
from loraplex_proto.services import ADAPTERS, path_of
from loraplex_proto.v1 import adapter_pb2
from loraplex_proto.validate import AdapterRequest, check_adapter_request, check_list_adapters, parse
from loraplex_router.calls import Call
from loraplex_router.config import PolicyConfig
from loraplex_router.policy import WorkerView, rendezvous_order, routing_key
from loraplex_router.replicas import Replicas
from loraplex_router.upstream import FailureKind, Upstream, UpstreamFailure
from loraplex_runtime.auth import Identity, current_identity

log = logging.getLogger(__name__)

Response = adapter_pb2.ListAdaptersResponse
Ask = Callable[[ListQuery], Awaitable[Sequence[Response]]]
Named = TypeVar("Named", bound=AdapterRequest)

# Rows of all workers together that are asked for at once: reading them takes the event loop some milliseconds.
MAX_ROWS = 1000
MIN_PAGE_SIZE = 50
MAX_SHOWN = 3  # workers that an error names


@dataclass(slots=True)
class Answers:
    """Several workers' answers to one question. Every response of AdapterService is a list of rows in field 1, so one
    class of message reads and writes them all; one of ListAdapters has a token too."""

    responses: list[Response] = field(default_factory=list[Response])
    failures: list[UpstreamFailure] = field(default_factory=list[UpstreamFailure])

    @property
    def num_answered(self) -> int:
        return len(self.responses)

    @property
    def rows(self) -> list[adapter_pb2.Adapter]:
        return [row for response in self.responses for row in response.adapters]

    def serialized(self) -> bytes:
        return Response(adapters=self.rows).SerializeToString()

    def raise_unless_answered(self) -> None:
        """Raises a failure when no worker has answered: a verdict on the adapter before a missing worker."""
        if not self.num_answered and self.failures:
            raise max(self.failures, key=lambda failure: failure.weight)


class AdapterFanOut:
    """The handlers of loraplex.v1.AdapterService, from bytes to bytes."""

    def __init__(self, policy: PolicyConfig, replicas: Replicas, upstreams: Mapping[str, Upstream]) -> None:
        self._policy = policy
        self._replicas = replicas
        self._upstreams = upstreams
        self._listing = MergedListing()

    async def load(self, call: Call, raw: bytes) -> bytes:
        adapter_id = _named(call, adapter_pb2.LoadAdapterRequest, raw)
        request = adapter_pb2.LoadAdapterRequest.FromString(raw)
        absent = self._replicas.absent_holders(adapter_id)  # before one comes back that has not been asked
        holders = await self._holders(call, adapter_id)
        if (only := _only_holders(request, holders, has_keepers=self._has_keepers(request))) is not None:
            answers = await self._ask(call, raw, only)
            answers.raise_unless_answered()
        else:
            is_everywhere = request.source not in ("", adapter_id)
            answers = await self._load_at_homes(call, adapter_id, raw, is_everywhere=is_everywhere)
            answers.raise_unless_answered()
            asked = {row.worker for row in answers.rows} | {failure.worker_id for failure in answers.failures}
            await self._ask(call, raw, [one for one in holders if one not in asked], into=answers)
        for failure in answers.failures:
            # A holder would stay bound to the files as they were before. A worker that refuses the adapter would refuse
            # the requests that reach it, or serve them what its own files are.
            is_verdict = failure.kind is FailureKind.ANSWERED or failure.worker_id in holders
            if is_verdict and not isinstance(failure.typed, Draining):
                raise failure
        if not request.if_absent:
            _raise_for_absent(absent, adapter_id, answers)
            await self._check_contents(call, request)
        return answers.serialized()

    def _has_keepers(self, request: adapter_pb2.LoadAdapterRequest) -> bool:
        """True where requests for the name go only to workers that a load has bound to a source, or do so after this
        load. A worker that was restarted may name a source that it remembers: it serves the name beside the others."""
        adapter_id = request.adapter_id
        return request.source not in ("", adapter_id) or self._replicas.keepers([adapter_id]) is not None

    async def _check_contents(self, call: Call, request: adapter_pb2.LoadAdapterRequest) -> None:
        """Logs where workers that compute alike have bound the name to different contents. Raises DigestMismatch where
        the load demanded a digest, or where they have the name from different sources. Else the files may be equal:
        digests depend on `--adapter-templates` too, and weights that are computed at the load on the number of threads.
        All workers are asked, so that of two loads at once the later one to end finds what the other has left."""
        adapter_id = request.adapter_id
        question = adapter_pb2.GetAdapterRequest(adapter_id=adapter_id).SerializeToString()
        rows = (await self._ask(call, question, self._routable(), method="GetAdapter")).rows
        rows = [row for row in rows if row.digest and row.state != adapter_pb2.ADAPTER_STATE_DRAINING]
        if self._has_keepers(request):
            rows = [row for row in rows if _source_of(row)] or rows
        alike: dict[tuple[str, ...], list[adapter_pb2.Adapter]] = {}
        for row in rows:
            alike.setdefault(self._replicas.build_of(row.worker), []).append(row)
        for group in alike.values():
            found = {(row.digest, _source_of(row)): row.worker for row in reversed(group)}
            if len({digest for digest, _ in found}) == 1:
                continue
            text = f"adapter {adapter_id!a} has " + " and ".join(
                f"the digest {digest} at {worker}" + (f" (from {source!a})" if source else "")
                for (digest, source), worker in [*found.items()][::-1][:MAX_SHOWN]
            )
            if request.expected_digest or len({source for _, source in found}) > 1:
                raise DigestMismatch(
                    f"{text}; see that nobody else loads it, and load it again, with its `source` where it has one",
                    resource=adapter_id,
                )
            log.warning("%s; see that their files and `--adapter-templates` are the same", text)

    async def unload(self, call: Call, raw: bytes) -> bytes:
        adapter_id = _named(call, adapter_pb2.UnloadAdapterRequest, raw)
        if adapter_pb2.UnloadAdapterRequest.FromString(raw).if_unused:
            await self._check_unused(call, adapter_id)  # before the first worker forgets it
        absent = self._replicas.absent_holders(adapter_id, with_versions=True)
        answers = await self._ask(call, raw, self._routable())
        for failure in answers.failures:
            # A worker that does not have it or that drains is as good as unloaded; another failure leaves it there.
            if not isinstance(failure.typed, (AdapterNotFound, Draining)):
                raise failure
        _raise_for_absent(absent, adapter_id, answers)
        answers.raise_unless_answered()
        return answers.serialized()

    async def _check_unused(self, call: Call, adapter_id: str) -> None:
        question = adapter_pb2.GetAdapterRequest(adapter_id=adapter_id).SerializeToString()
        answers = await self._ask(call, question, self._routable(), method="GetAdapter")
        num_running = sum(row.running_requests for row in answers.rows)
        if num_running:
            raise adapter_in_use(adapter_id, num_running)

    async def get(self, call: Call, raw: bytes) -> bytes:
        adapter_id = _named(call, adapter_pb2.GetAdapterRequest, raw)
        answers = await self._ask(call, raw, self._routable())
        deniers = {failure.worker_id for failure in answers.failures if not failure.may_retry}
        keepers = self._replicas.keepers([adapter_id])
        if not answers.num_answered and keepers is not None and keepers.isdisjoint(deniers):
            raise self._replicas.no_worker([adapter_id])  # as requests for it; others do not know the name
        answers.raise_unless_answered()
        return answers.serialized()

    async def list(self, call: Call, raw: bytes) -> bytes:
        query = check_list_adapters(parse(adapter_pb2.ListAdaptersRequest, raw))

        async def ask(part: ListQuery) -> Sequence[Response]:
            answers = await self._ask(call, part.request().SerializeToString(), self._routable())
            answers.raise_unless_answered()
            return answers.responses

        page = await self._listing.page(query, current_identity(), self._replicas.num_routable, ask)
        return page.SerializeToString()

    def _routable(self) -> list[str]:
        """The workers that a request could reach, draining ones excluded. Raises NoWorker where there are none."""
        return [view.worker_id for view in self._views()]

    def _views(self) -> list[WorkerView]:
        """Views of the routable workers. Raises NoWorker where there are none."""
        views = self._replicas.views()
        if not views:
            raise self._replicas.no_worker()
        return views

    async def _holders(self, call: Call, adapter_id: str) -> dict[str, str]:
        """The workers that have bound the name, homes or not (requests spill over when an adapter is in demand), each
        with the name's source there; empty where that is its own.

        They are asked, because reports come late and list only the 1,024 adapters nearest to the device; a report
        counts where the worker does not answer. Raises a worker's failure that says nothing about the name."""
        views = {view.worker_id: view for view in self._replicas.views()}
        question = adapter_pb2.GetAdapterRequest(adapter_id=adapter_id).SerializeToString()
        answers = await self._ask(call, question, list(views), method="GetAdapter")
        for failure in answers.failures:
            if failure.kind is FailureKind.ANSWERED and not isinstance(failure.typed, AdapterNotFound):
                raise failure
        found = dict.fromkeys((row.worker for row in answers.rows if is_bound(row)), "")
        found |= {row.worker: source for row in answers.rows if row.digest and (source := _source_of(row))}
        keepers = self._replicas.keepers([adapter_id]) or set()
        gone = {failure.worker_id for failure in answers.failures if failure.may_retry}
        for one in gone & views.keys():
            if one in keepers or adapter_id in views[one].tiers:
                found[one] = "not known" if one in keepers else ""
        return found

    async def _load_at_homes(self, call: Call, adapter_id: str, raw: bytes, *, is_everywhere: bool) -> Answers:
        """Asks as many workers as an adapter has homes; the next in order replaces one that is not there. Or all."""
        by_name = {view.hash_name: view.worker_id for view in self._views()}
        order = [by_name[name] for name in rendezvous_order(routing_key([adapter_id]), by_name)]
        wanted = len(order) if is_everywhere else min(self._policy.num_homes, len(order))
        answers = Answers()
        while order and answers.num_answered < wanted:
            missing = wanted - answers.num_answered
            batch, order = order[:missing], order[missing:]
            await self._ask(call, raw, batch, into=answers)
            for failure in answers.failures:
                if failure.is_unimplemented:
                    lacking = self._replicas.of_same_version(failure.worker_id)
                    order = [one for one in order if one not in lacking]
            if any(failure.kind is FailureKind.ANSWERED for failure in answers.failures):
                break  # about the adapter itself: the next worker would answer the same
        return answers

    async def _ask(
        self, call: Call, raw: bytes, worker_ids: Sequence[str], *, method: str = "", into: Answers | None = None
    ) -> Answers:
        """Asks all of them at once, by default what the client asks for; a worker that fails leaves the others' answers
        as they are."""
        answers = into or Answers()
        method = method or call.method
        # One may have left since it was chosen.
        upstreams = {one: self._upstreams[one] for one in worker_ids if one in self._upstreams}
        asking = (call.ask(upstream, path_of(ADAPTERS, method), raw) for upstream in upstreams.values())
        results = await asyncio.gather(*asking, return_exceptions=True)
        for worker_id, result in zip(upstreams, results, strict=True):
            if isinstance(result, UpstreamFailure):
                answers.failures.append(result)
                log.info("%s at %s: %s", method, worker_id, result)
            elif isinstance(result, BaseException):
                raise result
            else:
                response = Response.FromString(result)
                for row in response.adapters:
                    row.worker = worker_id
                answers.responses.append(response)
        return answers


def _named(call: Call, cls: type[Named], raw: bytes) -> str:
    """The adapter that a request names and that the caller may use. Raises what the checks raise."""
    request = parse(cls, raw)
    call.record.ask_for(call.request_id or uuid.uuid4().hex, request.adapter_id)
    check_adapter_request(request)
    identity = current_identity()
    identity.check_adapters([request.adapter_id])
    if isinstance(request, adapter_pb2.LoadAdapterRequest):
        identity.check_source(request.source, request.adapter_id)
    return request.adapter_id


def _only_holders(
    request: adapter_pb2.LoadAdapterRequest, holders: Mapping[str, str], *, has_keepers: bool
) -> list[str] | None:
    """The only workers that a load goes to: without a source those that keep to the one of an earlier load, which the
    others do not know, where requests go only to such workers; with `if_absent` those that have the name from
    elsewhere. None: other workers may have it too. `holders` are workers that have the name, with its source there."""
    if not request.source:
        return [one for one, source in holders.items() if source and has_keepers] or None
    is_elsewhere = any(source != request.source for source in holders.values())
    return [*holders] if request.if_absent and is_elsewhere else None


def _raise_for_absent(absent: Sequence[str], adapter_id: str, answers: Answers) -> None:
    """Raises WorkerLost where a worker may come back with the name as it was, which has not answered meanwhile."""
    back = {row.worker for row in answers.rows} | {failure.worker_id for failure in answers.failures}
    missing = [one for one in absent if one not in back]
    if missing:
        more = f" and {len(missing) - MAX_SHOWN} more" if len(missing) > MAX_SHOWN else ""
        raise WorkerLost(
            f"{', '.join(missing[:MAX_SHOWN])}{more} may have adapter {adapter_id!a} and cannot be reached; the other "
            "workers have made the change: send it again when it is back, or take it out of the router's list",
            resource=adapter_id,
        )


def _source_of(row: adapter_pb2.Adapter) -> str:
    """The place that the worker has the name from; empty where that is the name's own folder."""
    return "" if row.source == row.adapter_id else row.source


def is_bound(row: adapter_pb2.Adapter) -> bool:
    """True when the worker has bound the name, to a failure too; files of that name in its source do not count."""
    return row.state != adapter_pb2.ADAPTER_STATE_KNOWN or row.tier != adapter_pb2.ADAPTER_TIER_SOURCE


class MergedListing:
    """Pages of all workers' listings together, for clients."""

    def __init__(self, max_rows: int = MAX_ROWS, min_page_size: int = MIN_PAGE_SIZE) -> None:
        self._max_rows = max_rows
        self._min_page_size = min_page_size
        self._turn = asyncio.Semaphore()

    async def page(self, query: ListQuery, identity: Identity, num_workers: int, ask: Ask) -> Response:
        """The page that the client asked for. `ask` puts a query to all workers. Raises ListingTooLarge."""
        page = Page(query)
        part = visible_part(query, identity.adapters)
        if part is None:
            return page.response
        max_size = min(MAX_PAGE_SIZE, max(self._min_page_size, self._max_rows // max(1, num_workers)))
        # One more than fits on the page, because it has a token only if another adapter follows.
        size = min(query.page_size + 1, max_size) if query.page_size else max_size
        while True:
            part = replace(part, page_size=size)
            responses = await ask(part)
            async with self._turn:
                end = _common_end(part, responses)
                for adapter_id, rows in _by_adapter(responses, end):
                    if identity.may_use(adapter_id) and not page.add(adapter_id, rows):
                        return page.response
                await asyncio.sleep(0)  # other tasks run, however many listings there are
            if end is None:
                return page.response
            part, size = replace(part, after=end), max_size


def _common_end(part: ListQuery, responses: Sequence[Response]) -> str | None:
    """The adapter up to which every worker's rows are here; None where no worker has more."""
    ends = [last_of_page(part, response.next_page_token) for response in responses if response.next_page_token]
    end = min(ends, default=None)
    if end is not None and end <= part.after:
        raise Internal("a worker's listing does not go on; see that workers and router have the same version")
    return end


def _by_adapter(responses: Sequence[Response], end: str | None) -> Iterator[tuple[str, list[adapter_pb2.Adapter]]]:
    """Rows up to `end` by adapter, in order; each adapter's in order of workers, and a worker's own order stays."""
    rows = [row for response in responses for row in response.adapters if end is None or row.adapter_id <= end]
    rows.sort(key=attrgetter("adapter_id", "worker"))
    for adapter_id, of_one in groupby(rows, key=attrgetter("adapter_id")):
        yield adapter_id, list(of_one)
