"""SGLang's POST /generate and model info as messages of the wire, and answers. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

from pydantic import Field

from loraplex_contracts.adapters import check_id
from loraplex_contracts.errors import InvalidArgument, Unimplemented
from loraplex_proto.v1 import inference_pb2 as pb
from loraplex_proto.validate import MAX_COMPLETIONS, MAX_TOP_LOGPROBS
from loraplex_router.http import tgi
from loraplex_router.http.backend import (
    COMMON_NUMBERS,
    MAX_CHOICES,
    adapter_in,
    finite,
    put_numbers,
    request_ids_of,
    unicode_text,
)
from loraplex_router.http.grammars import GRAMMAR_FIELDS, grammar_of
from loraplex_router.http.mixtures import put_mixture, recipe_of
from loraplex_router.http.models import (
    HARMLESS,
    ChatCompletionRequest,
    CompletionRequest,
    Fields,
    Member,
    Merge,
    MergedAdapters,
    OriginFields,
    Uint32,
    header_names,
)
from loraplex_router.http.models import REFUSED as OTHERS_REFUSED
from loraplex_router.http.openai import prompts_of, put_logit_bias, speculation_of
from loraplex_router.http.origins import put_origins
from loraplex_router.http.streaming import data_event

DEFAULT_MAX_TOKENS: Final = 128  # SGLang's
BASE_VERSION: Final = "default"  # weight_version of the base model
# Tokens of a text that each have an event.
NUM_SINGLE_EVENTS: Final = 64

_ABSENT: Final = (None, False, 0, -1, "", [], {})  # values that ask for nothing
_GRAMMARS: Final = ("json_schema", "regex", "ebnf", "structural_tag")
_TEXT_ONLY: Final = "prompts are text or token ids"
_OTHERS: Final = "it is another server's"
# Fields that would change the answer, and what to do instead. Refused unless their value asks for nothing.
REFUSED: Final[Mapping[str, str]] = {
    **dict.fromkeys(("input_embeds", "image_data", "video_data", "audio_data", "modalities"), _TEXT_ONLY),
    **dict.fromkeys(("positional_embed_overrides", "mm_hashes", "mm_content_hashes"), _TEXT_ONLY),
    **dict.fromkeys(("custom_logit_processor", "session_params", "lora_id", "return_hidden_states"), _OTHERS),
    **dict.fromkeys(("return_routed_experts", "return_entropy", "return_sampling_mask", "custom_params"), _OTHERS),
    **dict.fromkeys(("bootstrap_host", "bootstrap_port", "bootstrap_room", "max_thinking_tokens"), _OTHERS),
    "stop_regex": "use `stop`",
    "token_ids_logprob": "use `top_logprobs_num`",
    "background": "ask for a stream",
    "parameters": "use `sampling_params` and `lora_path`",
    "inputs": "use `text` or `input_ids`",
}


# Names that other dialects know and this one does not.
_OTHER_NAMES: Final = {
    *CompletionRequest.model_fields,
    *ChatCompletionRequest.model_fields,
    *tgi.Parameters.model_fields,
    *OTHERS_REFUSED,
    *GRAMMAR_FIELDS,
} - HARMLESS


class SamplingParams(Fields):
    """`sampling_params`, with `speculation`."""

    max_new_tokens: Annotated[int, Field(ge=1, le=(1 << 32) - 1)] | None = None
    min_new_tokens: Uint32 | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Uint32] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=-1, le=(1 << 32) - 1)] | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    n: Annotated[int, Field(ge=1, le=MAX_COMPLETIONS)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    stream_interval: Any = None
    logit_bias: dict[str, float] | None = None
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None
    structural_tag: Any = None
    sampling_seed: Annotated[int, Field(ge=-(1 << 63), le=(1 << 64) - 1)] | None = None
    speculation: Any = None


class GenerateRequest(OriginFields):
    """Body of POST /generate that has `text` or `input_ids`. Mixtures are our own field, and count for all prompts."""

    text: Any = None
    input_ids: Any = None
    sampling_params: SamplingParams | None = None
    lora_path: str | list[str | None] | None = None
    model: str | None = None
    adapter_id: str | None = None
    adapters: list[Member] | None = None
    merge: Merge | None = None
    merged_adapters: MergedAdapters | None = None
    stream: bool | None = None
    rid: str | list[str] | None = None
    return_logprob: bool | None = None
    logprob_start_len: Annotated[int, Field(ge=-1)] | None = None
    top_logprobs_num: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    return_text_in_logprobs: bool | None = None
    priority: Annotated[int, Field(ge=-100, le=100)] | None = None
    cache_salt: str | None = None
    log_metrics: Any = None
    no_logs: Any = None


@dataclass(frozen=True, slots=True)
class Job:
    """One request as calls, and what its answer depends on."""

    requests: tuple[pb.GenerateRequest, ...] = field(repr=False)  # one for each prompt; they may have a token
    adapter_names: tuple[str, ...]
    request_id: str
    n: int
    is_list: bool  # of prompts
    is_streamed: bool
    with_logprobs: bool
    prompt_start: int | None  # of the logprobs of the prompt; None: none
    num_top: int
    with_texts: bool
    ignored: tuple[str, ...]


def generate_job(body: GenerateRequest, base_names: Sequence[str], request_id: str) -> Job:
    """The job of a request. Raises InvalidArgument, Unimplemented and AdapterNotFound with the field's name."""
    params = body.sampling_params or SamplingParams()
    ignored = header_names([*_extras(body), *(f"sampling_params.{name}" for name in _extras(params))])
    if (body.text is None) == (body.input_ids is None):
        raise InvalidArgument("give `text` or `input_ids`", field="text")
    name = "input_ids" if body.text is None else "text"
    given: Any = getattr(body, name)
    prompts = prompts_of(given, name)
    is_list = isinstance(given, list) and not isinstance(given[0], int)
    n = params.n or 1
    if len(prompts) * n > MAX_CHOICES:
        raise InvalidArgument(f"the request asks for more than {MAX_CHOICES} texts (prompts times `n`)", field="n")
    asked = {"model": body.model, "adapter_id": body.adapter_id}
    names = [
        adapter_in({**asked, "lora_path": one}, base_names)
        for one in _per_prompt(body.lora_path, len(prompts), "lora_path")
    ]
    with_logprobs = bool(body.return_logprob)
    start = body.logprob_start_len
    common = _common(body, params)
    if with_logprobs:
        common.output.logprobs = True
        common.output.top_logprobs = body.top_logprobs_num or 0
        common.output.prompt_tokens = common.output.prompt_logprobs = start is not None and start >= 0
    request_ids = _request_ids(body.rid, request_id, len(prompts))
    requests: list[pb.GenerateRequest] = []
    for prompt, adapter_name, one_id in zip(prompts, names, request_ids, strict=True):
        one = pb.GenerateRequest()
        one.CopyFrom(common)
        one.request_id = one_id
        one.adapter_id = adapter_name
        put_mixture(one, base_names, members=body.adapters, merge=body.merge, merged=body.merged_adapters)
        put_origins(one, body, body.adapters)
        if isinstance(prompt, str):
            one.text = unicode_text(prompt, "text")
        else:
            one.token_ids.ids.extend(prompt)
        requests.append(one)
    return Job(
        requests=tuple(requests),
        adapter_names=tuple(names),
        request_id=request_id,
        n=n,
        is_list=is_list,
        is_streamed=bool(body.stream),
        with_logprobs=with_logprobs,
        prompt_start=start if common.output.prompt_logprobs else None,
        num_top=body.top_logprobs_num or 0,
        with_texts=bool(body.return_text_in_logprobs),
        ignored=ignored,
    )


def _extras(fields: Fields) -> Iterator[str]:
    for name, value in fields.extras().items():
        if name in REFUSED:
            if value not in _ABSENT:
                raise Unimplemented(f"`{name}` is not available: {REFUSED[name]}", field=name)
        elif name in SamplingParams.model_fields:  # beside them
            raise InvalidArgument(f"`{name}` belongs in `sampling_params`", field=name)
        elif name in _OTHER_NAMES:
            if value not in _ABSENT and (name not in OTHERS_REFUSED or value not in OTHERS_REFUSED[name][0]):
                raise InvalidArgument(f"`{name}` is not a field of this route", field=name)
        else:
            yield name


def _per_prompt(value: str | Sequence[str | None] | None, num_prompts: int, name: str) -> Sequence[str | None]:
    if value is None or isinstance(value, str):
        return [value] * num_prompts
    if len(value) != num_prompts:
        raise InvalidArgument(f"`{name}` has {len(value)} entries for {num_prompts} prompts", field=name)
    return value


def _request_ids(rid: str | Sequence[str] | None, request_id: str, num_prompts: int) -> list[str]:
    if isinstance(rid, str) or rid is None:
        base = request_id if rid is None else check_id(rid, field="rid")
        return request_ids_of(base, num_prompts)
    return [check_id(one or "", field="rid") for one in _per_prompt(rid, num_prompts, "rid")]


def _common(body: GenerateRequest, params: SamplingParams) -> pb.GenerateRequest:
    request = pb.GenerateRequest(n=params.n or 1)
    sampling, stopping = request.sampling, request.stopping
    sampling.temperature = 1.0 if params.temperature is None else params.temperature
    put_numbers(sampling, params, "min_p", *COMMON_NUMBERS)
    if params.top_k is not None:
        sampling.top_k = max(0, params.top_k)
    if params.sampling_seed is not None:
        sampling.seed = params.sampling_seed % (1 << 64)
    put_logit_bias(sampling, params.logit_bias or {})
    stopping.max_tokens = DEFAULT_MAX_TOKENS if params.max_new_tokens is None else params.max_new_tokens
    if params.min_new_tokens:
        stopping.min_tokens = params.min_new_tokens
    stop = [params.stop] if isinstance(params.stop, str) else params.stop or []
    stopping.stop.extend(unicode_text(text, "stop") for text in stop if text)
    stopping.stop_token_ids.extend(params.stop_token_ids or ())
    stopping.ignore_eos = bool(params.ignore_eos)
    stopping.include_stop = bool(params.no_stop_trim)
    request.output.keep_special_tokens = params.skip_special_tokens is False
    request.priority = body.priority or 0
    request.cache_salt = unicode_text(body.cache_salt or "", "cache_salt")
    if grammar := grammar_of({name: getattr(params, name) for name in _GRAMMARS}):
        request.grammar.CopyFrom(grammar)
    if params.speculation is not None:
        request.speculation.CopyFrom(speculation_of(params.speculation))
    return request


# --- the server -----------------------------------------------------------------------------------------------------


def model_info_of(info: pb.GetInfoResponse) -> dict[str, Any]:
    """The answer of /model_info. Answers name the base model's version as `default`."""
    return {
        "model_path": info.model_id,
        "tokenizer_path": info.model_id,
        "is_generation": not info.tasks or "generate" in info.tasks,
        "preferred_sampling_params": None,
        "weight_version": BASE_VERSION,
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "model_type": info.model_type,
    }


def server_info_of(name: str, info: pb.GetInfoResponse) -> dict[str, Any]:
    """The answer of /server_info: what is known, under SGLang's names. `name` is the base model's in requests."""
    return {
        "model_path": info.model_id,
        "tokenizer_path": info.model_id,
        "served_model_name": name,
        "version": info.version,
        "context_length": info.max_context_tokens,
        "dtype": info.dtype,
        "device": info.device.partition(":")[0],
        "page_size": info.kv_block_tokens,
        "enable_lora": True,
        "max_lora_rank": info.max_lora_rank,
        "max_loras_per_batch": info.max_device_adapters,
    }


# --- answers --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Text:
    """One completion, as far as it has come."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[pb.TokenLogprob] = field(default_factory=list[pb.TokenLogprob])
    num_shown: int = 0  # tokens of the last event


def response_of(job: Job, answers: Sequence[pb.GenerateResponse], elapsed_s: float) -> Any:
    """The answer's body: an object, or a list of them for several prompts or texts."""
    found: list[dict[str, Any]] = []
    for prompt, answer in enumerate(answers):
        for one in sorted(answer.completions, key=lambda one: one.index):
            text = Text(one.text, list(one.token_ids), list(one.logprobs))
            meta = _meta(job, prompt, answer.prompt_tokens, text, answer.adapter_digest)
            meta |= {**_usage(one, answer.usage), "finish_reason": _finish_reason(one), "e2e_latency": elapsed_s}
            found.append({"text": text.text, "output_ids": text.token_ids, "meta_info": meta})
    return found if job.is_list or job.n > 1 else found[0]


class Events:
    """Events of one streamed answer. Each has the whole text so far, as SGLang's.

    Those of long texts come less often, a sixteenth longer each, so that all together are as long as a few texts."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._texts: dict[tuple[int, int], Text] = {}
        self._heads: dict[int, pb.GenerateStreamResponse] = {}

    def events(self, prompt: int, raw: bytes) -> Iterator[bytes]:
        """Server-sent events of one message."""
        message = pb.GenerateStreamResponse.FromString(raw)
        head = self._heads.setdefault(prompt, message)
        text = self._texts.setdefault((prompt, message.index), Text())
        text.text += message.text_delta
        text.token_ids += message.token_ids
        text.logprobs += message.logprobs
        is_end = message.finish_reason != pb.FINISH_REASON_UNSPECIFIED
        num_tokens = len(text.token_ids)
        if not is_end and num_tokens > NUM_SINGLE_EVENTS and 16 * num_tokens < 17 * text.num_shown:
            return
        text.num_shown = num_tokens
        meta = _meta(self._job, prompt, head.prompt_tokens, text, head.adapter_digest)
        meta["finish_reason"] = _finish_reason(message) if is_end else None
        meta |= _usage(message, message.usage) if is_end else {"completion_tokens": num_tokens}
        if is_end:
            meta["e2e_latency"] = message.timings.total_s
        event: dict[str, Any] = {"text": text.text, "output_ids": text.token_ids, "meta_info": meta}
        if self._job.is_list or self._job.n > 1:
            event["index"] = prompt * self._job.n + message.index
        yield data_event(event)


def _meta(job: Job, prompt: int, prompt_tokens: Sequence[pb.PromptToken], text: Text, digest: str) -> dict[str, Any]:
    request = job.requests[prompt]
    meta: dict[str, Any] = {"id": request.request_id, "weight_version": digest[:12] or BASE_VERSION}
    if recipe := recipe_of(request):
        meta["loraplex"] = recipe
    if not job.with_logprobs:
        return meta
    rows: Sequence[pb.PromptToken] = prompt_tokens[job.prompt_start or 0 :] if job.prompt_start is not None else ()
    meta["input_token_logprobs"] = [_row(job, row) for row in rows]
    meta["output_token_logprobs"] = [_row(job, row) for row in text.logprobs]
    if job.num_top:
        meta["input_top_logprobs"] = [[_row(job, top) for top in row.top] or None for row in rows]
        meta["output_top_logprobs"] = [[_row(job, top) for top in row.top] for row in text.logprobs]
    return meta


def _row(job: Job, row: pb.PromptToken | pb.TokenLogprob | pb.TopLogprob) -> list[Any]:
    is_known = not isinstance(row, pb.PromptToken) or row.HasField("logprob")
    return [finite(row.logprob) if is_known else None, row.token_id, row.text if job.with_texts else None]


def _usage(completion: pb.Completion | pb.GenerateStreamResponse, usage: pb.Usage) -> dict[str, int]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": completion.usage.completion_tokens,
        "cached_tokens": usage.cached_tokens,
    }


def _finish_reason(completion: pb.Completion | pb.GenerateStreamResponse) -> dict[str, Any]:
    if completion.finish_reason == pb.FINISH_REASON_LENGTH:
        return {"type": "length", "length": completion.usage.completion_tokens}
    if completion.HasField("stop_string"):
        return {"type": "stop", "matched": completion.stop_string}
    return {"type": "stop", "matched": completion.stop_token_id if completion.HasField("stop_token_id") else None}
