"""Protobuf messages to records and back. Pure; messages arrive here validated (loraplex_proto.validate).

Imports no torch and no gRPC: the process that tokenizes long texts makes the answers of Tokenize here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from loraplex_adapters.cache.listing import Resident
from loraplex_contracts import sampling
from loraplex_contracts.adapters import AdapterId, AdapterInfo, CacheUsage
from loraplex_contracts.load import Forecast, Load
from loraplex_contracts.request import (
    OutputParams,
    Request,
    SpeculationKind,
    SpeculationParams,
    StoppingParams,
    TokenLogprob,
)
from loraplex_contracts.sampling import SamplingParams, TokenizerView
from loraplex_proto.enums import ADAPTER_STATES, ADAPTER_TIERS, FINISH_REASONS
from loraplex_proto.v1 import adapter_pb2, inference_pb2, worker_pb2
from loraplex_server.frontend.generation import CompletionSummary, Delta, Drafts
from loraplex_server.text.vocabulary import Vocabulary

MAX_FLOWS = 256  # in a forecast
TOKENS_AT_ONCE = 1 << 14  # while the interpreter's lock is held
DRAFT_MODEL_PREFIX = "draft_model:"  # of a name in ModelInfo.speculation


def sampling_params(message: inference_pb2.Sampling, tokenizer: TokenizerView) -> SamplingParams:
    """Unset fields take the wire's documented defaults. Raises what the tokenizer raises."""
    return sampling.sampling_params({field.name: value for field, value in message.ListFields()}, tokenizer)


def stopping_params(message: inference_pb2.Stopping, room: int) -> StoppingParams:
    """`room`: number of new tokens for which the context has space."""
    wanted = message.max_tokens if message.HasField("max_tokens") else room
    return StoppingParams(
        max_tokens=min(wanted, room),
        min_tokens=message.min_tokens if message.HasField("min_tokens") else 0,
        stop=tuple(message.stop),
        stop_token_ids=frozenset(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        include_stop=message.include_stop,
    )


def output_params(message: inference_pb2.Output) -> OutputParams:
    return OutputParams(
        logprobs=message.logprobs or message.top_logprobs > 0,
        top_logprobs=message.top_logprobs,
        prompt_logprobs=message.prompt_logprobs,
    )


def speculation_params(message: inference_pb2.Speculation) -> SpeculationParams:
    kind: SpeculationKind | None = message.WhichOneof("kind")
    return SpeculationParams(
        kind=kind,
        medusa_id=AdapterId(message.medusa.adapter_id),
        min_ngram=message.prompt_lookup.min_ngram,
        max_ngram=message.prompt_lookup.max_ngram,
        draft_name=message.draft_model.name,
        max_draft_tokens=message.max_draft_tokens,
        fixed_length=message.fixed_length,
    )


def to_request(
    message: inference_pb2.GenerateRequest,
    prompt_token_ids: tuple[int, ...],
    params: SamplingParams,
    *,
    request_id: str,
    tenant: str,
    room: int,
    arrival_s: float,
    deadline_s: float | None,
) -> Request:
    """A validated message as the engine's request; `room` as for `stopping_params`."""
    return Request(
        request_id=request_id,
        prompt_token_ids=prompt_token_ids,
        stopping=stopping_params(message.stopping, room),
        sampling=params,
        output=output_params(message.output),
        speculation=speculation_params(message.speculation),
        adapter_id=AdapterId(message.adapter_id),
        tenant=tenant,
        cache_salt=message.cache_salt,
        n=message.n or 1,
        priority=message.priority,
        arrival_s=arrival_s,
        deadline_s=deadline_s,
    )


def logprobs_to_pb(logprobs: Iterable[TokenLogprob]) -> list[inference_pb2.TokenLogprob]:
    return [
        inference_pb2.TokenLogprob(
            token_id=one.token_id,
            text=one.text,
            logprob=one.logprob,
            top=[inference_pb2.TopLogprob(token_id=t.token_id, text=t.text, logprob=t.logprob) for t in one.top],
        )
        for one in logprobs
    ]


def usage_to_pb(summary: CompletionSummary) -> inference_pb2.Usage:
    usage = inference_pb2.Usage(
        prompt_tokens=summary.num_prompt_tokens,
        completion_tokens=summary.num_completion_tokens,
        cached_tokens=summary.num_cached_tokens,
        steps=summary.num_steps,
    )
    _fill_drafts(usage, summary.drafts)
    return usage


def total_usage(summaries: Sequence[CompletionSummary]) -> inference_pb2.Usage:
    """Usage of a whole request: the prompt counts once, output tokens of every completion count."""
    total = inference_pb2.Usage()
    for summary in summaries:
        if summary.index == 0:  # the others share its prefill
            total.prompt_tokens = summary.num_prompt_tokens
            total.cached_tokens = summary.num_cached_tokens
        total.completion_tokens += summary.num_completion_tokens
        total.steps += summary.num_steps
    _fill_drafts(total, (one for summary in summaries for one in summary.drafts))
    return total


def _fill_drafts(usage: inference_pb2.Usage, drafts: Iterable[Drafts]) -> None:
    """Adds up the drafts of each proposer."""
    rows: dict[str, inference_pb2.ProposerUsage] = {}
    for one in drafts:
        row = rows.setdefault(one.proposer, inference_pb2.ProposerUsage(name=one.proposer))
        row.drafted_tokens += one.num_drafted
        row.accepted_tokens += one.num_accepted
        usage.drafted_tokens += one.num_drafted
        usage.accepted_tokens += one.num_accepted
    usage.proposers.extend(rows[name] for name in sorted(rows))


def delta_to_pb(delta: Delta, *, with_token_ids: bool) -> inference_pb2.GenerateStreamResponse:
    message = inference_pb2.GenerateStreamResponse(
        index=delta.index,
        text_delta=delta.text,
        token_ids=delta.token_ids if with_token_ids else (),
        logprobs=logprobs_to_pb(delta.logprobs),
        drafted_tokens=delta.num_drafted,
        accepted_tokens=delta.num_accepted,
        proposer=delta.proposer,
    )
    if delta.end is not None:
        fill_end(message, delta.end)
        message.usage.CopyFrom(usage_to_pb(delta.end))
    return message


def fill_end(
    message: inference_pb2.GenerateStreamResponse | inference_pb2.Completion, summary: CompletionSummary
) -> None:
    """Finish reason, and the stop string or token, in a stream's last chunk or in a whole answer."""
    message.finish_reason = FINISH_REASONS[summary.reason]
    if summary.stop_string is not None:
        message.stop_string = summary.stop_string
    if summary.stop_token_id is not None:
        message.stop_token_id = summary.stop_token_id


def completion_to_pb(
    summary: CompletionSummary, deltas: list[Delta], *, prefix: str, with_token_ids: bool
) -> inference_pb2.Completion:
    """A completion put together from all its deltas."""
    message = inference_pb2.Completion(
        index=summary.index,
        text=prefix + "".join(delta.text for delta in deltas),
        token_ids=[t for delta in deltas for t in delta.token_ids] if with_token_ids else (),
        logprobs=logprobs_to_pb(one for delta in deltas for one in delta.logprobs),
        usage=usage_to_pb(summary),
    )
    fill_end(message, summary)
    return message


def tokenize_response(vocabulary: Vocabulary, token_ids: Sequence[int]) -> bytes:
    """Serialized in parts: concatenated messages are read as one."""
    steps = range(0, len(token_ids), TOKENS_AT_ONCE)
    return b"".join(_part(vocabulary, token_ids[start : start + TOKENS_AT_ONCE]) for start in steps)


def _part(vocabulary: Vocabulary, token_ids: Sequence[int]) -> bytes:
    texts = map(vocabulary.text, token_ids)
    return inference_pb2.TokenizeResponse(token_ids=token_ids, tokens=texts).SerializeToString()


def speculation_kinds(available: Iterable[str]) -> list[str]:
    """Kinds that a request may ask for: `off` always, `auto` where there is a proposer, and each proposer."""
    proposers = list(available)
    return ["off", *(["auto"] if proposers else []), *proposers]


def draft_model_names(available: Iterable[str]) -> list[str]:
    return [one.removeprefix(DRAFT_MODEL_PREFIX) for one in available if one.startswith(DRAFT_MODEL_PREFIX)]


def adapter_to_pb(info: AdapterInfo) -> adapter_pb2.Adapter:
    return adapter_pb2.Adapter(
        adapter_id=info.adapter_id,
        kind=info.kind,
        digest=info.digest,
        state=ADAPTER_STATES[info.state],
        tier=ADAPTER_TIERS[info.tier],
        bytes=info.num_bytes,
        rank=info.rank,
        running_requests=info.num_running,
        pinned=info.pinned,
        error=info.error,
        error_reason=info.error_reason,
    )


def unloaded_to_pb(adapter_id: str) -> adapter_pb2.Adapter:
    """An adapter in the source that no request has named yet."""
    return adapter_pb2.Adapter(
        adapter_id=adapter_id, state=adapter_pb2.ADAPTER_STATE_KNOWN, tier=adapter_pb2.ADAPTER_TIER_SOURCE
    )


def residents_to_pb(nearest: Iterable[Resident]) -> list[worker_pb2.ResidentAdapter]:
    """As `Listing.nearest` gives them."""
    return [
        worker_pb2.ResidentAdapter(adapter_id=name, digest=digest, tier=ADAPTER_TIERS[tier])
        for tier, name, digest in nearest
    ]


def load_to_pb(
    load: Load, resident: Iterable[worker_pb2.ResidentAdapter], usage: CacheUsage | None, draining: bool
) -> worker_pb2.Load:
    message = worker_pb2.Load(
        running_requests=load.num_running,
        queued_requests=load.num_queued,
        pending_tokens=load.pending_tokens,
        total_kv_blocks=load.num_blocks,
        free_kv_blocks=load.num_free_blocks,
        max_running_requests=load.max_running,
        draining=draining,
        adapters=resident,
    )
    if usage is not None:
        message.device_adapter_bytes = usage.device_bytes
        message.device_adapter_budget_bytes = usage.device_budget_bytes
        message.host_adapter_bytes = usage.host_bytes
        message.host_adapter_budget_bytes = usage.host_budget_bytes
    if load.forecast is not None:
        message.forecast.CopyFrom(_forecast_to_pb(load.forecast))
    return message


def _forecast_to_pb(forecast: Forecast) -> worker_pb2.Forecast:
    longest = sorted(forecast.waits_s.items(), key=lambda entry: -entry[1])[:MAX_FLOWS]
    return worker_pb2.Forecast(
        waits=[
            worker_pb2.FlowWait(tenant=tenant, adapter_id=adapter_id, wait_s=wait_s)
            for (tenant, adapter_id), wait_s in longest
        ],
        max_queue_wait_s=forecast.max_queue_wait_s,
        prompt_token_s=forecast.prompt_token_s,
        token_interval_s=forecast.interval_s,
        end_probability=forecast.end_probability,
        longest_tokens=forecast.longest_tokens,
    )
