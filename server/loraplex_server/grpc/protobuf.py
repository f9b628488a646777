"""Protobuf messages to records and back. Pure; messages arrive here validated (loraplex_proto.validate).

Imports no torch and no gRPC: the process that tokenizes long texts makes the answers of Tokenize here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeVar, cast

from loraplex_adapters.cache.listing import Resident
from loraplex_contracts import sampling
from loraplex_contracts.adapters import (
    HUB_SOURCE,
    OWN_ORIGIN,
    S3_SOURCE,
    AdapterId,
    AdapterInfo,
    AdapterOrigin,
    CacheUsage,
)
from loraplex_contracts.errors import InvalidArgument
from loraplex_contracts.load import Forecast, Load
from loraplex_contracts.mixtures import MajoritySign, Member, Merge, MergeStrategy, Mixture
from loraplex_contracts.request import (
    Grammar,
    OutputParams,
    Request,
    SpeculationKind,
    SpeculationParams,
    StoppingParams,
    TokenLogprob,
)
from loraplex_contracts.sampling import SAMPLING_OPTIONS, SamplingParams, TokenizerView
from loraplex_proto.enums import ADAPTER_STATES, ADAPTER_TIERS, FINISH_REASONS
from loraplex_proto.v1 import adapter_pb2, inference_pb2, worker_pb2
from loraplex_proto.validate import HasOrigin
from loraplex_server.frontend.generation import CompletionSummary, Delta
from loraplex_server.text.responses import AsyncReader, MessagePart, ParsedMessage, ResponseParsing
from loraplex_server.text.tokenizer import TextTokenizer
from loraplex_server.text.vocabulary import Vocabulary, unread_ids

if TYPE_CHECKING:  # imports Transformers
    from loraplex_server.text.response_template import ResponseFormat

T = TypeVar("T")

MAX_FLOWS = 256  # in a forecast
TOKENS_AT_ONCE = 1 << 14  # while the interpreter's lock is held


def sampling_params(message: inference_pb2.Sampling, tokenizer: TokenizerView) -> SamplingParams:
    """The sampling parameters of a message; unset fields take the wire's documented defaults. Raises what the tokenizer
    raises."""
    return sampling.sampling_params({field.name: value for field, value in message.ListFields()}, tokenizer)


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
    grammar: Grammar | None = None,
    adapter_digest: str = "",
    max_adapter_bytes: int | None = None,
) -> Request:
    """A validated message as the engine's request. `room`: number of new tokens for which the context has space."""
    stopping, output, speculation = message.stopping, message.output, message.speculation
    kind: SpeculationKind | None = speculation.WhichOneof("kind")
    return Request(
        request_id=request_id,
        prompt_token_ids=prompt_token_ids,
        stopping=StoppingParams(
            max_tokens=min(stopping.max_tokens if stopping.HasField("max_tokens") else room, room),
            min_tokens=stopping.min_tokens,
            stop=tuple(stopping.stop),
            stop_token_ids=frozenset(stopping.stop_token_ids),
            ignore_eos=stopping.ignore_eos,
            include_stop=stopping.include_stop,
        ),
        sampling=params,
        output=OutputParams(
            logprobs=output.logprobs or output.top_logprobs > 0,
            top_logprobs=output.top_logprobs,
            prompt_logprobs=output.prompt_logprobs,
            keep_special_tokens=output.keep_special_tokens,
            token_bytes=output.token_bytes,
            echo=output.echo,
        ),
        speculation=SpeculationParams(
            kind=kind,
            medusa_id=AdapterId(speculation.medusa.adapter_id),
            min_ngram=speculation.prompt_lookup.min_ngram,
            max_ngram=speculation.prompt_lookup.max_ngram,
            draft_name=speculation.draft_model.name,
            max_draft_tokens=speculation.max_draft_tokens,
            fixed_length=speculation.fixed_length,
        ),
        adapter_id=AdapterId(message.adapter_id),
        adapter_origin=adapter_origin(message, message.adapter_id),
        mixture=_mixture(message),
        adapter_digest=adapter_digest,
        tenant=tenant,
        max_adapter_bytes=max_adapter_bytes,
        cache_salt=message.cache_salt,
        grammar=grammar,
        n=message.n or 1,
        priority=message.priority,
        arrival_s=arrival_s,
        deadline_s=deadline_s,
    )


def adapter_origin(message: HasOrigin, adapter_id: str) -> AdapterOrigin:
    """The origin of the request's adapter, or of one member of its mixture; OWN_ORIGIN where the message names none."""
    if message.in_bucket:
        return AdapterOrigin(S3_SOURCE + adapter_id)
    if not message.HasField("hub"):
        return OWN_ORIGIN
    return AdapterOrigin(HUB_SOURCE + adapter_id, message.hub.revision, message.hub.token)


def _mixture(message: inference_pb2.GenerateRequest) -> Mixture | None:
    members = tuple(Member(AdapterId(one.id), one.weight, adapter_origin(one, one.id)) for one in message.adapters)
    if not members:
        return None
    given = message.merge
    merge = None
    if message.HasField("merge"):
        merge = Merge(
            strategy=cast(MergeStrategy, given.strategy),  # validated, as is the sign
            density=given.density if given.HasField("density") else 1.0,
            majority_sign=cast(MajoritySign, given.majority_sign or "total"),
            seed=given.seed if given.HasField("seed") else None,
        )
    return Mixture(members, merge)


def grammar(message: inference_pb2.Grammar) -> Grammar | None:
    """The grammar of a message; None where it is not set. Raises InvalidArgument with the keyword of JSON Schema that
    cannot be enforced."""
    from loraplex_server.grammars import source  # late: most requests have none

    compact = message.compact
    match message.WhichOneof("kind"):
        case "json_schema":
            return source.json_schema(message.json_schema, compact=compact)
        case "json_object":
            return source.json_object(compact=compact)
        case "regex":
            return source.regex(message.regex)
        case "choice":
            return source.choice(list(message.choice.texts))
        case "lark":
            return source.lark(message.lark)
        case "gbnf":
            return source.gbnf(message.gbnf)
        case "structural_tag_json":
            return source.structural_tag(message.structural_tag_json, compact=compact)
        case None:
            return None


def template_input(chat: inference_pb2.Chat) -> dict[str, Any]:
    """The parameters of `TextTokenizer.render_chat`. Raises InvalidArgument for JSON of another kind."""
    return {
        "messages": [_message_for_template(message) for message in chat.messages],
        "add_generation_prompt": not chat.omit_generation_prompt,
        "continue_final_message": chat.continue_final_message,
        "tools": _objects(chat.tools_json, "chat.tools_json"),
        "documents": _objects(chat.documents_json, "chat.documents_json"),
        "arguments": _json(chat.template_kwargs_json, "chat.template_kwargs_json", dict),
    }


def _message_for_template(message: inference_pb2.ChatMessage) -> dict[str, Any]:
    """The message as OpenAI's clients write it, which is what templates are written for; arguments as values, not as a
    string."""
    found: dict[str, Any] = {"role": message.role, "content": message.content}
    found |= {name: value for name in ("name", "tool_call_id") if (value := getattr(message, name))}
    if message.reasoning:
        found |= {"reasoning": message.reasoning, "reasoning_content": message.reasoning}
        if not (message.tool_calls and message.content):  # gpt-oss's template refuses it beside both
            found["thinking"] = message.reasoning
    if message.tool_calls:
        found["tool_calls"] = [_tool_call_for_template(call) for call in message.tool_calls]
    return found


def _tool_call_for_template(call: inference_pb2.ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": _arguments(call.arguments_json)}
    return {"type": "function", "function": function} | ({"id": call.id} if call.id else {})


def _arguments(text: str) -> Any:
    """The value of a call's arguments. What a model has written need not be JSON: then it is the text itself."""
    if not text:
        return {}
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return text


def _objects(text: str, field: str) -> list[Any] | None:
    found = _json(text, field, list)
    if not all(isinstance(one, dict) for one in found or ()):
        raise InvalidArgument(f"`{field}` must be a list of objects", field=field)
    return found


def _json(text: str, field: str, kind: type[T]) -> T | None:
    """The JSON value of a field; None where there is no text. Raises InvalidArgument for another kind."""
    if not text:
        return None
    try:
        found: Any = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"`{field}` is not JSON: {error}", field=field) from error
    if not isinstance(found, kind):
        raise InvalidArgument(f"`{field}` must be {'an object' if kind is dict else 'a list'}", field=field)
    return found


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a value")


def parsing_of(
    message: inference_pb2.GenerateRequest,
    format: ResponseFormat | str | None,
    prompt_end: str,
    special_ids: Mapping[str, int],
    new_user_reader: Callable[[Mapping[str, Any]], AsyncReader] | None = None,
    ends: Collection[str] = (),
) -> ResponseParsing:
    """The parsing of answers to a validated chat. `prompt_end`: the last part of the prompt's text, special tokens
    included. `new_user_reader`: where the format is an adapter's own template. `ends`: texts of end-of-sequence tokens.
    Raises InvalidArgument for JSON of another kind."""
    chat = message.chat
    tools = _objects(chat.tools_json, "chat.tools_json") or []
    with_calls = bool(tools) and chat.tool_choice.WhichOneof("kind") != "none"
    max_calls = 1 if chat.HasField("parallel_tool_calls") and not chat.parallel_tool_calls else None
    if isinstance(format, str):
        assert new_user_reader is not None, "an adapter's own template has a reader of its own"
        how = {
            "template": format, "prompt_end": prompt_end, "tools": tools, "with_calls": with_calls,
            "max_calls": max_calls, "ends": list(ends),
        }  # fmt: skip
        return ResponseParsing(
            tools=tools,
            with_calls=with_calls,
            max_calls=max_calls,
            unread_ids=unread_ids(format, special_ids),
            new_user_reader=partial(new_user_reader, how),
        )
    return ResponseParsing(
        format,
        prefix="" if format is None else format.prefix_of(prompt_end),
        tools=tools,
        with_calls=with_calls,
        max_calls=max_calls,
        unread_ids=frozenset() if format is None else format.unread_ids(special_ids),
    )


def _message_to_pb(message: ParsedMessage) -> inference_pb2.ChatMessage:
    return inference_pb2.ChatMessage(
        role="assistant",
        content=message.content,
        reasoning=message.reasoning,
        tool_calls=[
            inference_pb2.ToolCall(id=call.id, name=call.name, arguments_json=call.arguments) for call in message.calls
        ],
    )


def _parts_to_pb(parts: Sequence[MessagePart]) -> list[inference_pb2.ChatDelta]:
    deltas: list[inference_pb2.ChatDelta] = []
    for (kind, index), group in groupby(parts, lambda part: (part.kind, part.index)):
        same = list(group)
        text = "".join(part.text for part in same)
        match kind:
            case "content":
                first, end = (same[0].tokens or (0, 0))[0], (same[-1].tokens or (0, 0))[1]
                deltas.append(inference_pb2.ChatDelta(content=text, first_token=first, end_token=end))
            case "reasoning":
                deltas.append(inference_pb2.ChatDelta(reasoning=text))
            case "call":
                call = inference_pb2.ToolCallDelta(index=index, id=same[0].id, name=same[0].name)
                deltas.append(inference_pb2.ChatDelta(tool_call=call))
            case "arguments":
                if not (deltas and deltas[-1].HasField("tool_call") and deltas[-1].tool_call.index == index):
                    deltas.append(inference_pb2.ChatDelta(tool_call=inference_pb2.ToolCallDelta(index=index)))
                deltas[-1].tool_call.arguments_json += text
    return deltas


def logprobs_to_pb(logprobs: Iterable[TokenLogprob]) -> list[inference_pb2.TokenLogprob]:
    return [
        inference_pb2.TokenLogprob(
            token_id=one.token_id,
            text=one.text,
            logprob=one.logprob,
            top=_top_to_pb(one),
            bytes=one.token_bytes,
            is_special=one.is_special,
        )
        for one in logprobs
    ]


def _top_to_pb(one: TokenLogprob) -> list[inference_pb2.TopLogprob]:
    return [
        inference_pb2.TopLogprob(token_id=t.token_id, text=t.text, logprob=t.logprob, bytes=t.token_bytes)
        for t in one.top
    ]


def prompt_tokens_to_pb(
    token_ids: Sequence[int], tokenizer: TextTokenizer, *, with_bytes: bool
) -> list[inference_pb2.PromptToken]:
    """The prompt's tokens without logprobs: those come later."""
    return [
        inference_pb2.PromptToken(
            token_id=token_id,
            text=tokenizer.token_text(token_id),
            bytes=tokenizer.token_bytes(token_id) if with_bytes else b"",
            is_special=tokenizer.is_special(token_id),
        )
        for token_id in token_ids
    ]


def put_prompt(
    message: inference_pb2.GenerateResponse | inference_pb2.GenerateStreamResponse,
    prompt_tokens: Sequence[inference_pb2.PromptToken],
    logprobs: Sequence[TokenLogprob],
) -> None:
    """Puts the prompt into an answer. `logprobs` begin at its second token; they go into its tokens, if those are
    sent."""
    if not prompt_tokens:
        message.prompt_logprobs.extend(logprobs_to_pb(logprobs))
        return
    for token, one in zip(prompt_tokens[1:], logprobs, strict=False):
        token.logprob = one.logprob
        token.top.extend(_top_to_pb(one))
    message.prompt_tokens.extend(prompt_tokens)


def usage_to_pb(first: CompletionSummary, *others: CompletionSummary) -> inference_pb2.Usage:
    """Usage of a completion, or of a whole request: the others share the first one's prefill."""
    usage = inference_pb2.Usage(prompt_tokens=first.num_prompt_tokens, cached_tokens=first.num_cached_tokens)
    rows: dict[str, inference_pb2.ProposerUsage] = {}
    for summary in (first, *others):
        usage.completion_tokens += summary.num_completion_tokens
        usage.reasoning_tokens += summary.num_reasoning_tokens
        usage.steps += summary.num_steps
        for one in summary.drafts:
            row = rows.setdefault(one.proposer, inference_pb2.ProposerUsage(name=one.proposer))
            row.drafted_tokens += one.num_drafted
            row.accepted_tokens += one.num_accepted
            usage.drafted_tokens += one.num_drafted
            usage.accepted_tokens += one.num_accepted
    usage.proposers.extend(rows[name] for name in sorted(rows))
    return usage


def delta_to_pb(delta: Delta, *, with_token_ids: bool) -> inference_pb2.GenerateStreamResponse:
    message = inference_pb2.GenerateStreamResponse(
        index=delta.index,
        text_delta=delta.text,
        token_ids=delta.token_ids if with_token_ids else (),
        new_tokens=0 if with_token_ids else len(delta.token_ids),
        logprobs=logprobs_to_pb(delta.logprobs),
        drafted_tokens=delta.num_drafted,
        accepted_tokens=delta.num_accepted,
        proposer=delta.proposer,
        deltas=_parts_to_pb(delta.parts),
    )
    if delta.end is not None:
        _fill_end(message, delta.end)
        message.usage.CopyFrom(usage_to_pb(delta.end))
    return message


def _fill_end(
    message: inference_pb2.GenerateStreamResponse | inference_pb2.Completion, summary: CompletionSummary
) -> None:
    """Fills in finish reason, stop string or token, and parsed message, in a stream's last chunk or in a whole
    answer."""
    message.finish_reason = FINISH_REASONS[summary.reason]
    if summary.stop_string is not None:
        message.stop_string = summary.stop_string
    if summary.stop_token_id is not None:
        message.stop_token_id = summary.stop_token_id
    if summary.message is not None:
        message.message.CopyFrom(_message_to_pb(summary.message))


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
    _fill_end(message, summary)
    parts = [part for delta in deltas for part in delta.parts]
    ranks = [{"reasoning": 0, "content": 1}.get(part.kind, 2) for part in parts]
    if ranks != sorted(ranks) or any(part.tokens for part in parts):
        message.deltas.extend(_parts_to_pb(parts))
    return message


def tokenize_response(
    vocabulary: Vocabulary, token_ids: Sequence[int], offsets: Sequence[tuple[int, int]] = ()
) -> bytes:
    """A TokenizeResponse, serialized in parts: concatenated messages are read as one."""
    parts: list[bytes] = []
    for start in range(0, len(token_ids), TOKENS_AT_ONCE):
        part, spans = token_ids[start : start + TOKENS_AT_ONCE], offsets[start : start + TOKENS_AT_ONCE]
        message = inference_pb2.TokenizeResponse(
            token_ids=part,
            tokens=map(vocabulary.text, part),
            starts=[begin for begin, _ in spans],
            ends=[end for _, end in spans],
        )
        parts.append(message.SerializeToString())
    return b"".join(parts)


def tokenizer_info(tokenizer: TextTokenizer) -> inference_pb2.GetTokenizerInfoResponse:
    """The tokenizer's special tokens and chat template. Raises FailedPrecondition without a tokenizer."""
    facts = tokenizer.facts()
    special = sorted((token_id, text) for text, token_id in facts.special_ids.items())
    info = inference_pb2.GetTokenizerInfoResponse(
        special_tokens=[inference_pb2.SpecialToken(token_id=token_id, text=text) for token_id, text in special],
        chat_template=facts.chat_template,
    )
    for role, text in facts.named.items():
        getattr(info, role).CopyFrom(inference_pb2.SpecialToken(token_id=facts.special_ids[text], text=text))
    return info


def speculation_kinds(kinds: Iterable[str], draft_models: Iterable[str]) -> list[str]:
    """Kinds for requests: `off` always, `auto` where there is a proposer, each kind and each draft model."""
    proposers = [*kinds, *(f"draft_model:{name}" for name in draft_models)]
    return ["off", *(["auto"] if proposers else []), *proposers]


def generation_defaults(given: Mapping[str, float]) -> inference_pb2.Sampling:
    """The default sampling options of a model: those that are numbers."""
    message = inference_pb2.Sampling()
    for name, value in given.items():
        setattr(message, name, int(value) if isinstance(SAMPLING_OPTIONS[name].default, int) else value)
    return message


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
        labels=info.classifier.labels if info.classifier is not None else (),
        per_token=info.classifier is not None and info.classifier.per_token,
        source=info.source,
        base=info.base,
        tasks=_tasks(info),
        uses=info.num_uses,
        last_error=info.last_error,
        last_error_reason=info.last_error_reason,
    )


def _tasks(info: AdapterInfo) -> tuple[str, ...]:
    """The tasks of an adapter whose kind is known: one that classifies writes no text, and heads alone change no
    text."""
    if not info.kind:
        return ()
    return ("classify", "embed") if info.classifier is not None else ("generate", "embed")


def unloaded_to_pb(adapter_id: str) -> adapter_pb2.Adapter:
    """An adapter in the source that no request has named yet."""
    return adapter_pb2.Adapter(
        adapter_id=adapter_id, state=adapter_pb2.ADAPTER_STATE_KNOWN, tier=adapter_pb2.ADAPTER_TIER_SOURCE
    )


def residents_to_pb(nearest: Iterable[Resident]) -> list[worker_pb2.ResidentAdapter]:
    """The resident adapters that `Listing.nearest` gives, in its order."""
    return [
        worker_pb2.ResidentAdapter(adapter_id=name, digest=digest, tier=ADAPTER_TIERS[tier], has_source=has_source)
        for tier, name, digest, has_source in nearest
    ]


def load_to_pb(
    load: Load,
    resident: Iterable[worker_pb2.ResidentAdapter],
    usage: CacheUsage | None,
    draining: bool,
    fetching: Iterable[str],
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
        waiting_adapter_ids=fetching,
        kv_block_tokens=load.block_tokens,
        total_state_slots=load.num_state_slots,
        free_state_slots=load.num_free_state_slots,
        state_snapshots=load.num_state_snapshots,
    )
    if usage is not None:
        message.max_device_adapters = usage.num_device_slots
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
