"""InferenceService of the router: admission, the choice of a worker, relaying its answer.

Of a request, the router reads the names that it authorizes and routes by, its size, priority and draft model; the
worker validates it in full. A request goes to another worker only while its client has seen nothing of an answer.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final, TypeVar

from loraplex_contracts.adapters import check_adapter_ref
from loraplex_contracts.errors import LoraplexError, Overloaded, QuotaExceeded
from loraplex_proto import validate
from loraplex_proto.estimates import estimated_pooling_tokens, estimated_work
from loraplex_proto.services import INFERENCE, POOLING, path_of
from loraplex_proto.v1 import inference_pb2, pooling_pb2
from loraplex_proto.validate import MAX_COMPLETIONS, adapters_in, check_names, parse
from loraplex_router.activity import Activity
from loraplex_router.calls import Call, RouterMetrics
from loraplex_router.config import RouterConfig
from loraplex_router.policy import Route, WorkerView, choose, routing_key
from loraplex_router.replicas import Flight, Replicas
from loraplex_router.resumption import Resumption, may_resume
from loraplex_router.upstream import FailureKind, Upstream, UpstreamFailure, passed_on
from loraplex_runtime.auth import Identity, current_identity
from loraplex_runtime.quotas import TenantQuotas
from loraplex_runtime.request_record import RequestRecord

log = logging.getLogger(__name__)

T = TypeVar("T")
_Answer = (
    inference_pb2.GenerateResponse
    | pooling_pb2.EmbedResponse
    | pooling_pb2.ClassifyResponse
    | pooling_pb2.ScoreResponse
)


@dataclass(frozen=True, slots=True)
class RelayedRequest:
    """A request that may go to a worker. The defaults are those of a small question, which every worker answers
    alike."""

    raw: bytes = field(repr=False)  # what the client sent; with a request id at its end where the client had none
    request_id: str = ""
    adapter_ids: tuple[str, ...] = ()
    num_prompt_tokens: int = 0  # estimated
    num_output_tokens: int = 0  # at most, of all completions together
    num_texts: int = 1  # that it asks for: completions, or inputs of pooling
    names_max_tokens: bool = False
    shows_tokens: bool = False
    adapter_name: str = ""
    priority: int = 0
    draft_model: str | None = None  # that it speculates with; empty where any will do
    may_resume: bool = False  # on another worker, in the middle of its stream
    task: str = ""  # as workers name it; empty for what all of them have

    @property
    def work_tokens(self) -> int:
        """Work of the request in the unit that workers report: tokens to compute and tokens that may still be made."""
        return self.num_prompt_tokens + self.num_output_tokens


def admit_generate(
    request: inference_pb2.GenerateRequest, raw: bytes, identity: Identity, max_context_tokens: int
) -> RelayedRequest:
    """A request for texts, parsed from `raw`, as far as routing needs it. Pure. Raises what `check_names` raises, and
    AdapterNotFound for adapters that are not this tenant's."""
    check_names(request)
    adapter_ids = adapters_in(request)
    identity.check_adapters(adapter_ids)
    request_id, raw = _identified(request, raw)
    num_prompt_tokens, num_output_tokens = estimated_work(request, max_context_tokens)
    num_texts = min(max(1, request.n), MAX_COMPLETIONS)
    speculation = request.speculation
    return RelayedRequest(
        raw=raw,
        request_id=request_id,
        adapter_ids=adapter_ids,
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=num_output_tokens * num_texts,
        num_texts=num_texts,
        names_max_tokens=request.stopping.HasField("max_tokens"),
        shows_tokens=not request.output.omit_token_ids,
        adapter_name=validate.adapter_name_in(request),
        priority=request.priority,
        draft_model=speculation.draft_model.name if speculation.WhichOneof("kind") == "draft_model" else None,
        may_resume=may_resume(request),
    )


def _identified(request: inference_pb2.GenerateRequest | validate.PoolingRequest, raw: bytes) -> tuple[str, bytes]:
    """The id of a request, a new one where its client gave none, and `raw` with that id."""
    if request.request_id:
        return request.request_id, raw
    request_id = uuid.uuid4().hex
    # Two serialized messages in a row are their merge: nothing is encoded again.
    return request_id, raw + type(request)(request_id=request_id).SerializeToString()


# As GetInfo has them.
_TASKS: Final[Mapping[type[validate.PoolingRequest], str]] = {
    pooling_pb2.EmbedRequest: "embed",
    pooling_pb2.ClassifyRequest: "classify",
    pooling_pb2.ScoreRequest: "score",
}


def admit_pooling(request: validate.PoolingRequest, raw: bytes, identity: Identity) -> RelayedRequest:
    """Does what `admit_generate` does, for a request of PoolingService."""
    validate.check_pooling_names(request)
    adapter_ids = validate.pooling_adapters_in(request)
    identity.check_adapters(adapter_ids)
    request_id, raw = _identified(request, raw)
    inputs = request.inputs[: validate.MAX_POOLING_INPUTS]
    query = request.query if isinstance(request, pooling_pb2.ScoreRequest) else None
    return RelayedRequest(
        raw=raw,
        request_id=request_id,
        adapter_ids=adapter_ids,
        num_prompt_tokens=estimated_pooling_tokens(inputs, query),
        num_texts=len(inputs),
        adapter_name=request.adapter_id,
        priority=request.priority,
        task=_TASKS[type(request)],
    )


def _known(cls: type[validate.M], raw: bytes) -> validate.M:
    """The message in these bytes. Fields that this version does not know are refused, because they could name adapters
    unseen. Raises InvalidArgument or Unimplemented."""
    request = parse(cls, raw)
    validate.refuse_unknown(request)
    return request


class InferenceRelay:
    """The handlers of loraplex.v1.InferenceService, from bytes to bytes."""

    def __init__(
        self,
        config: RouterConfig,
        replicas: Replicas,
        upstreams: Mapping[str, Upstream],
        metrics: RouterMetrics,
        activity: Activity,
    ) -> None:
        self._config = config
        self._replicas = replicas
        self._upstreams = upstreams
        self._metrics = metrics
        self._activity = activity
        self._quotas = TenantQuotas(config.quota_share)
        self._random = Random()

    # --- handlers --------------------------------------------------------------------------------------------------

    async def generate(self, call: Call, raw: bytes) -> bytes:
        answer = await self._ask(call, "Generate", self._admit(call, raw))
        self._settle(call, inference_pb2.GenerateResponse, answer)
        return answer

    async def generate_stream(self, call: Call, raw: bytes) -> None:
        request = self._admit(call, raw)
        if call.ticket is not None and request.shows_tokens:
            call.ticket.add_tokens(0)  # they are counted as they come
        resumption = Resumption(request.raw) if self._config.resume and request.may_resume else None
        try:
            await self._try_workers(
                call,
                request,
                lambda worker, flight: self._relay_stream(worker, flight, call, request, resumption),
                resumption,
            )
        except (UpstreamFailure, LoraplexError) as error:
            if resumption is None or resumption.loss is None:
                raise
            log.warning("the stream ends with its worker: %s", error, extra={"request_id": call.request_id})
            raise resumption.loss from None
        finally:
            self._metrics.relayed(call.num_messages_sent)

    async def tokenize(self, call: Call, raw: bytes) -> bytes:
        request = _known(inference_pb2.TokenizeRequest, raw)
        adapter_ids = (check_adapter_ref(request.adapter_id),) if request.adapter_id else ()
        current_identity().check_adapters(adapter_ids)
        call.ticket = self._quotas.take(current_identity())
        return await self._ask(call, "Tokenize", RelayedRequest(raw, adapter_ids=adapter_ids))

    async def detokenize(self, call: Call, raw: bytes) -> bytes:
        _known(inference_pb2.DetokenizeRequest, raw)
        call.ticket = self._quotas.take(current_identity())
        return await self._ask(call, "Detokenize", RelayedRequest(raw))

    async def get_tokenizer_info(self, call: Call, raw: bytes) -> bytes:
        _known(inference_pb2.GetTokenizerInfoRequest, raw)
        return await self._ask(call, "GetTokenizerInfo", RelayedRequest(raw))

    async def get_info(self, call: Call, raw: bytes) -> bytes:
        _known(inference_pb2.GetInfoRequest, raw)
        info = inference_pb2.GetInfoResponse.FromString(await self._ask(call, "GetInfo", RelayedRequest(raw)))
        info.role = "router"
        return info.SerializeToString()

    async def embed(self, call: Call, raw: bytes) -> bytes:
        return await self._pool(call, raw, "Embed", pooling_pb2.EmbedRequest, pooling_pb2.EmbedResponse)

    async def classify(self, call: Call, raw: bytes) -> bytes:
        return await self._pool(call, raw, "Classify", pooling_pb2.ClassifyRequest, pooling_pb2.ClassifyResponse)

    async def score(self, call: Call, raw: bytes) -> bytes:
        return await self._pool(call, raw, "Score", pooling_pb2.ScoreRequest, pooling_pb2.ScoreResponse)

    async def _pool(
        self, call: Call, raw: bytes, method: str, cls: type[validate.PoolingRequest], response: type[_Answer]
    ) -> bytes:
        asked = parse(cls, raw)
        call.record.ask_for(asked.request_id, asked.adapter_id)
        request = admit_pooling(asked, raw, current_identity())
        call.record.request_id, call.record.adapter = request.request_id, request.adapter_name
        call.ticket = self._quotas.take_pooling(current_identity(), request.num_texts, request.num_prompt_tokens)
        call.record.num_prompt_tokens = request.num_prompt_tokens
        answer = await self._ask(call, method, request, service=POOLING)
        self._settle(call, response, answer)
        return answer

    def check_together(self, requests: Sequence[inference_pb2.GenerateRequest | pooling_pb2.ScoreRequest]) -> None:
        """Raises QuotaExceeded for several requests that come at once, of which the caller can never have all: each by
        itself would be told to try again."""
        if len(requests) < 2:
            return
        calls: list[tuple[int, int]] = []
        for request in requests:
            if isinstance(request, pooling_pb2.ScoreRequest):
                calls.append((len(request.inputs), estimated_pooling_tokens(request.inputs, request.query)))
                continue
            num_texts = min(max(1, request.n), MAX_COMPLETIONS)
            num_prompt, num_output = estimated_work(request, self._replicas.max_context_tokens)
            is_reserved = request.stopping.HasField("max_tokens")
            calls.append((num_texts, num_prompt + (num_texts * num_output if is_reserved else 0)))
        try:
            self._quotas.check_together(current_identity(), calls)
        except QuotaExceeded as error:
            self._metrics.quota_refused(error.metadata["quota"])
            raise

    # --- one request -----------------------------------------------------------------------------------------------

    def _admit(self, call: Call, raw: bytes) -> RelayedRequest:
        asked = parse(inference_pb2.GenerateRequest, raw)
        call.record.ask_for(asked.request_id, validate.adapter_name_in(asked))
        request = admit_generate(asked, raw, current_identity(), self._replicas.max_context_tokens)
        call.record.request_id, call.record.adapter = request.request_id, request.adapter_name
        if not request.shows_tokens:
            call.num_tokens_sent = None
        room = request.num_output_tokens // request.num_texts
        call.ticket = self._quotas.take(
            current_identity(),
            num_requests=request.num_texts,
            num_prompt_tokens=request.num_prompt_tokens,
            max_tokens=room if request.names_max_tokens else None,
            room=room,
        )
        call.record.num_prompt_tokens = request.num_prompt_tokens
        return request

    async def _ask(self, call: Call, method: str, request: RelayedRequest, *, service: str = INFERENCE) -> bytes:
        path = path_of(service, method)
        return await self._try_workers(call, request, lambda worker, flight: call.ask(worker, path, request.raw))

    async def _try_workers(
        self,
        call: Call,
        request: RelayedRequest,
        attempt: Callable[[Upstream, Flight], Awaitable[T]],
        resumption: Resumption | None = None,
    ) -> T:
        """Picks workers until one has answered, each once at most, overloaded ones never, and of those of one version
        none after one that lacks what the request needs. Raises what the last one said, NoWorker, or Overloaded where
        all are; that a worker lacks something only where no other one may have it."""
        key = routing_key(request.adapter_ids)
        overloaded = self._overloaded(call, request)
        tried = set(overloaded)
        num_lost = 0
        error: UpstreamFailure | None = None
        last: UpstreamFailure | None = None
        while True:
            route = Route(request.adapter_ids, self._replicas.work_in_flight_tokens(key))
            choice = choose(route, self._views(request, tried), self._config.policy, self._random)
            if choice is None:
                busy = min(overloaded.values(), key=_retry_after_s, default=None)
                if error is not None and not error.is_unimplemented:
                    raise error
                raise busy or error or self._replicas.no_worker(request.adapter_ids)
            worker_id = choice.worker_id
            if last is not None:
                self._metrics.retried(last.kind.value)
                call.record.num_retries += 1
            if call.record.computes:
                self._metrics.decided(choice.decision, is_retry=error is not None)
            tried.add(worker_id)
            flight = self._replicas.begin(worker_id, key, request.work_tokens, time.monotonic())
            call.begin_attempt(choice)
            try:
                return await attempt(self._upstreams[worker_id], flight)
            except UpstreamFailure as failure:
                call.end_attempt(failure.kind.value)
                num_lost += failure.kind is FailureKind.LOST
                is_last = num_lost >= self._config.max_lost_workers
                is_seen = call.num_messages_sent > 0
                if (is_seen and resumption is None) or is_last or not failure.may_retry:
                    raise
                if is_seen and resumption is not None:
                    resumption.restart(failure)
                # The client asks for more, or for sooner, than this worker can give, which is well: no warning.
                is_usual = failure.is_unimplemented or isinstance(failure.typed, Overloaded)
                level = logging.INFO if is_usual else logging.WARNING
                log.log(level, "%s; looking for another worker", failure, extra={"request_id": call.request_id})
                last = failure
                if failure.is_unimplemented:
                    for one in self._replicas.of_same_version(worker_id):
                        tried.add(one)
                        overloaded.pop(one, None)  # it would say the same when it is free
                if error is None or failure.weight >= error.weight:
                    error = failure
            finally:
                call.end_attempt()
                self._replicas.end(flight)

    def _views(self, request: RelayedRequest, excluded: Collection[str] = ()) -> list[WorkerView]:
        """The workers that can take the request."""
        return self._replicas.views(excluded, request.draft_model, time.monotonic(), request.task, request.adapter_ids)

    def _overloaded(self, call: Call, request: RelayedRequest) -> dict[str, Overloaded]:
        """The workers that can take the request and would refuse it, as far as their reports tell."""
        if request.priority > 0 or not request.work_tokens:
            return {}
        flow, left_s = (current_identity().tenant, request.adapter_name), call.remaining_s()
        found: dict[str, Overloaded] = {}
        for view in self._views(request):
            if (forecast := self._replicas[view.worker_id].load.forecast) is not None:
                try:
                    forecast.check(flow, request.num_prompt_tokens, request.num_output_tokens, left_s)
                except Overloaded as error:
                    found[view.worker_id] = error
        return found

    async def _relay_stream(
        self,
        upstream: Upstream,
        flight: Flight,
        call: Call,
        request: RelayedRequest,
        resumption: Resumption | None,
    ) -> None:
        """Relays a stream. Nothing is sent, not even headers, before the worker's first message: a retry is invisible
        until then."""
        stream = upstream.stream(
            path_of(INFERENCE, "GenerateStream"),
            request.raw if resumption is None else resumption.raw,
            call.remaining_s(),
            call.metadata_for(upstream),
        )
        flight.remaining_tokens = request.work_tokens
        try:
            with upstream.failures_of(stream):
                while isinstance(message := await stream.read(), bytes):  # else EOF: the call has ended well
                    upstream.has_spoken()
                    if resumption is not None and not (message := resumption.rest_of(message)):
                        continue
                    if call.num_messages_sent == 0:
                        flight.remaining_tokens = request.num_output_tokens  # the prompt is done
                        self._note_first_message(call)
                        if headers := passed_on(await stream.initial_metadata()):
                            await call.context.send_initial_metadata(headers)
                    await call.context.write(message)
                    self._count_sent(message, call, flight)
                trailing = passed_on(await stream.trailing_metadata())
            if trailing:
                call.context.set_trailing_metadata(trailing)
        except UpstreamFailure:
            if resumption is None or not resumption.has_ended:
                raise
        finally:
            stream.cancel()

    def _note_first_message(self, call: Call) -> None:
        took_s = call.record.first_token_s = call.record.elapsed_s()
        self._metrics.first_message(call.method, took_s)
        self._activity.first_message(call.record.worker_id, took_s, call.record.started_s + took_s)

    def _count_sent(self, message: bytes, call: Call, flight: Flight) -> None:
        """Looks into a message that has gone out already: how many tokens the client has, in case the worker is lost,
        how many its tenant is charged for, and what the worker says at the end of a completion."""
        call.num_messages_sent += 1
        ticket, record = call.ticket, call.record
        chunk = inference_pb2.GenerateStreamResponse.FromString(message)
        num_tokens, has_end = len(chunk.token_ids) or chunk.new_tokens, chunk.HasField("usage")
        if chunk.new_tokens and call.num_tokens_sent is None:
            call.num_tokens_sent = 0  # a worker of an older version says it at the end only
        record.adapter_digest = record.adapter_digest or chunk.adapter_digest
        if has_end:
            _note_usage(record, chunk.usage, chunk.timings)
        if call.num_tokens_sent is not None:
            call.num_tokens_sent += num_tokens
            if flight.remaining_tokens is not None:
                flight.remaining_tokens = max(0, flight.remaining_tokens - num_tokens)
        elif has_end:
            num_tokens = chunk.usage.completion_tokens
        record.num_output_tokens += num_tokens
        if ticket is not None and ticket.counts_tokens:
            if call.num_tokens_sent is not None:
                ticket.add_tokens(num_tokens)
            elif has_end:
                ticket.add_completion(num_tokens)
            if has_end:
                ticket.set_prompt(chunk.usage.prompt_tokens)
        drafted, accepted = chunk.drafted_tokens, chunk.accepted_tokens
        self._activity.tokens(record.worker_id, num_tokens, drafted, accepted, time.monotonic())

    def _settle(self, call: Call, cls: type[_Answer], answer: bytes) -> None:
        """Takes in what the answer says that it took, and charges the tenant for it."""
        response = cls.FromString(answer)
        usage = response.usage
        call.record.adapter_digest = response.adapter_digest
        call.record.num_output_tokens = usage.completion_tokens
        call.record.first_token_s = response.timings.time_to_first_token_s or None
        _note_usage(call.record, usage, response.timings)
        drafted, accepted = usage.drafted_tokens, usage.accepted_tokens
        self._activity.tokens(call.record.worker_id, usage.completion_tokens, drafted, accepted, time.monotonic())
        if call.ticket is not None and call.ticket.counts_tokens:
            call.ticket.set_prompt(usage.prompt_tokens)
            call.ticket.add_tokens(usage.completion_tokens)


def _note_usage(record: RequestRecord, usage: inference_pb2.Usage, timings: inference_pb2.Timings) -> None:
    """Notes the usage and the time in the queue of a completion, or of all together."""
    record.num_prompt_tokens, record.num_cached_tokens = usage.prompt_tokens, usage.cached_tokens
    record.queue_s = timings.queue_s
    for one in usage.proposers:
        record.add_drafts(one.name, one.drafted_tokens, one.accepted_tokens)


def _retry_after_s(error: Overloaded) -> float:
    return error.retry_after_s or 0.0
