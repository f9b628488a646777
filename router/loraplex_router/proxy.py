"""Relays inference calls: one request to one worker at a time, its answer back as the bytes they are.

A request goes to another worker only while its client has seen nothing of an answer. Owns no state of its own: what is
in flight is told to `Replicas`, calls live in `Calls`. Knows nothing of adapters beyond their names.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from random import Random
from typing import Any, Final, TypeVar

from loraplex_contracts.errors import LoraplexError, NoWorker, Overloaded
from loraplex_proto.v1 import inference_pb2
from loraplex_router.admit import Admitted, admit_generate
from loraplex_router.calls import Call, Calls
from loraplex_router.config import RouterConfig
from loraplex_router.metrics import RouterMetrics
from loraplex_router.policy import Route, choose, routing_key
from loraplex_router.replicas import Flight, Replicas
from loraplex_router.upstream import INFERENCE, FailureKind, Metadata, Upstream, UpstreamFailure, passed_on
from loraplex_runtime.auth import current_identity

log = logging.getLogger(__name__)

T = TypeVar("T")

RETRY_WITHOUT_WORKERS_S: Final = 1.0
_NOBODY: Final[Mapping[str, Overloaded]] = {}


def no_worker(replicas: Replicas) -> NoWorker:
    """What a client is told when there is nobody to send it to. Which worker has what wrong is in the log only."""
    known = replicas.all()
    connected = replicas.connected()
    return NoWorker(
        f"none of the router's {len(known)} workers can take requests "
        f"({sum(replica.is_draining for replica in connected)} shutting down, "
        f"{sum(replica.is_stalled for replica in connected)} not responding, "
        f"{len(known) - len(connected)} not reachable); try again",
        retry_after_s=RETRY_WITHOUT_WORKERS_S,
    )


class Proxy:
    """The handlers of loraplex.v1.InferenceService, from bytes to bytes."""

    def __init__(
        self,
        config: RouterConfig,
        replicas: Replicas,
        upstreams: Mapping[str, Upstream],
        calls: Calls,
        metrics: RouterMetrics,
        random: Random | None = None,
    ) -> None:
        self._config = config
        self._replicas = replicas
        self._upstreams = upstreams
        self._calls = calls
        self._metrics = metrics
        self._random = random or Random()
        self._clock = time.monotonic

    # --- handlers --------------------------------------------------------------------------------------------------

    async def generate(self, raw: bytes, context: Any) -> bytes:
        async def body(call: Call) -> bytes:
            admitted = self._admit(raw, call)

            async def attempt(upstream: Upstream, flight: Flight) -> bytes:
                return await self._ask(upstream, call, "Generate", admitted.raw)

            return await self._try_workers(
                call,
                admitted.adapter_ids,
                admitted.work_tokens,
                attempt,
                draft_model=admitted.draft_model,
                overloaded=self._overloaded(admitted, call),
            )

        return await self._calls.run("Generate", context, body)

    async def generate_stream(self, raw: bytes, context: Any) -> None:
        async def body(call: Call) -> None:
            admitted = self._admit(raw, call)

            async def attempt(upstream: Upstream, flight: Flight) -> None:
                await self._relay_stream(upstream, flight, call, admitted)

            await self._try_workers(
                call,
                admitted.adapter_ids,
                admitted.work_tokens,
                attempt,
                draft_model=admitted.draft_model,
                overloaded=self._overloaded(admitted, call),
            )

        await self._calls.run("GenerateStream", context, body)

    async def tokenize(self, raw: bytes, context: Any) -> bytes:
        async def body(call: Call) -> bytes:
            return await self._ask_any(call, "Tokenize", raw)

        return await self._calls.run("Tokenize", context, body)

    async def get_info(self, raw: bytes, context: Any) -> bytes:
        async def body(call: Call) -> bytes:
            answer = inference_pb2.GetInfoResponse.FromString(await self._ask_any(call, "GetInfo", raw))
            answer.role = "router"
            return answer.SerializeToString()

        return await self._calls.run("GetInfo", context, body)

    # --- one request -----------------------------------------------------------------------------------------------

    def _admit(self, raw: bytes, call: Call) -> Admitted:
        admitted = admit_generate(raw, current_identity(), self._replicas.max_context_tokens)
        call.request_id = admitted.request_id
        if not admitted.shows_tokens:
            call.num_tokens_sent = None
        return admitted

    def _overloaded(self, admitted: Admitted, call: Call) -> dict[str, Overloaded]:
        """The workers that would refuse the request, as far as their reports tell."""
        if admitted.priority > 0:
            return {}
        flow, left_s = (current_identity().tenant, admitted.adapter_id), call.remaining_s()
        found: dict[str, Overloaded] = {}
        for replica in self._replicas.connected():
            if replica.is_routable and replica.forecast is not None:
                try:
                    replica.forecast.check(flow, admitted.num_prompt_tokens, admitted.num_output_tokens, left_s)
                except Overloaded as error:
                    found[replica.worker_id] = error
        return found

    async def _try_workers(
        self,
        call: Call,
        adapter_ids: tuple[str, ...],
        work_tokens: int,
        attempt: Callable[[Upstream, Flight], Awaitable[T]],
        draft_model: str | None = None,
        overloaded: Mapping[str, Overloaded] = _NOBODY,
    ) -> T:
        """Picks workers until one has answered, each once at most, `overloaded` ones never. Raises what the last one
        said, NoWorker, or Overloaded where all are."""
        key = routing_key(adapter_ids)
        tried = set(overloaded)
        num_lost = 0
        error: UpstreamFailure | LoraplexError | None = None
        while True:
            route = Route(adapter_ids, self._replicas.work_in_flight_tokens(key))
            views = self._replicas.views(excluded=tried, draft_model=draft_model)
            worker_id = choose(route, views, self._config.policy, self._random)
            if worker_id is None:
                raise error or min(overloaded.values(), key=_retry_after_s, default=None) or no_worker(self._replicas)
            tried.add(worker_id)
            flight = self._replicas.begin(worker_id, key, work_tokens, self._clock())
            try:
                return await attempt(self._upstreams[worker_id], flight)
            except UpstreamFailure as failure:
                num_lost += failure.kind is FailureKind.LOST
                is_last = num_lost >= self._config.max_lost_workers
                if call.num_messages_sent or is_last or not failure.may_retry:
                    raise
                log.warning("%s; trying another worker", failure, extra={"request_id": call.request_id})
                self._metrics.retried(failure.kind.value)
                error = failure
            finally:
                self._replicas.end(flight)

    async def _relay_stream(self, upstream: Upstream, flight: Flight, call: Call, admitted: Admitted) -> None:
        """Nothing is sent, headers included, before the worker's first message: until then a retry is invisible."""
        stream = upstream.generate_stream(
            admitted.raw, timeout=call.remaining_s(), metadata=self._metadata(upstream, call)
        )
        flight.remaining_tokens = admitted.work_tokens
        try:
            with upstream.failures_of(stream):
                while isinstance(message := await stream.read(), bytes):  # else EOF: the call has ended well
                    upstream.has_spoken()
                    if call.num_messages_sent == 0:
                        await self._begin_answer(stream, flight, call, admitted)
                    await call.context.write(message)
                    _count_sent(message, call, flight)
                trailing = passed_on(await stream.trailing_metadata())
            if trailing:
                call.context.set_trailing_metadata(trailing)
        finally:
            stream.cancel()
            self._metrics.relayed(call.num_messages_sent)

    async def _begin_answer(self, stream: Any, flight: Flight, call: Call, admitted: Admitted) -> None:
        flight.remaining_tokens = admitted.num_output_tokens  # a first message means that the prompt is done
        self._metrics.first_message(call.method, self._clock() - call.started_s)
        if headers := passed_on(await stream.initial_metadata()):
            await call.context.send_initial_metadata(headers)

    async def _ask(self, upstream: Upstream, call: Call, method: str, raw: bytes) -> bytes:
        return await upstream.ask(f"/{INFERENCE}/{method}", raw, call.remaining_s(), self._metadata(upstream, call))

    async def _ask_any(self, call: Call, method: str, raw: bytes) -> bytes:
        """A small question that every worker answers alike."""

        async def attempt(upstream: Upstream, flight: Flight) -> bytes:
            return await self._ask(upstream, call, method, raw)

        return await self._try_workers(call, (), 0, attempt)

    def _metadata(self, upstream: Upstream, call: Call) -> Metadata:
        return upstream.credentials.metadata(current_identity().tenant, call.context.invocation_metadata())


def _count_sent(message: bytes, call: Call, flight: Flight) -> None:
    """Looks into a message that has gone out already: how many tokens the client has, in case the worker is lost."""
    call.num_messages_sent += 1
    if call.num_tokens_sent is None:
        return
    num_tokens = len(inference_pb2.GenerateStreamResponse.FromString(message).token_ids)
    call.num_tokens_sent += num_tokens
    if flight.remaining_tokens is not None:
        flight.remaining_tokens = max(0, flight.remaining_tokens - num_tokens)


def _retry_after_s(error: Overloaded) -> float:
    return error.retry_after_s or 0.0
