"""Requests of LoRAX and TGI as messages of the wire. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

from pydantic import Field

from loraplex_contracts.errors import InvalidArgument, Unimplemented
from loraplex_proto.v1 import inference_pb2 as pb
from loraplex_proto.validate import MAX_COMPLETIONS, MAX_STOP_STRINGS, MAX_TOP_LOGPROBS
from loraplex_router.http.backend import COMMON_NUMBERS, adapter_of, put_numbers, unicode_text
from loraplex_router.http.grammars import GRAMMAR_FIELDS, grammar_of, unknown_parts
from loraplex_router.http.mixtures import put_mixture
from loraplex_router.http.models import (
    HARMLESS,
    REFUSED,
    ChatCompletionRequest,
    CompletionRequest,
    Fields,
    Member,
    Merge,
    MergedAdapters,
    OriginFields,
    header_names,
)
from loraplex_router.http.openai import speculation_of
from loraplex_router.http.origins import BUCKET_SCHEME, S3, put_origins, put_tokenizer_origin

# LoRAX's name of the base model.
BASE_MODEL: Final = "__base_model__"

Positive = Annotated[int, Field(ge=1, le=(1 << 32) - 1)]
NumTop = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]


class Parameters(OriginFields):
    """`parameters` of a request: LoRAX's, TGI's, and `speculation`."""

    adapter_id: str | None = None
    adapters: list[Member] | None = None
    merge: Merge | None = None
    merged_adapters: MergedAdapters | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_COMPLETIONS)] | None = None
    temperature: float | None = None
    top_k: Annotated[int, Field(ge=-1, le=(1 << 32) - 1)] | None = None
    top_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    do_sample: bool | None = None
    max_new_tokens: Positive | None = None
    ignore_eos_token: bool | None = None
    return_full_text: bool | None = None
    stop: Annotated[list[str], Field(max_length=MAX_STOP_STRINGS)] | None = None
    truncate: Positive | None = None
    watermark: bool | None = None
    details: bool | None = None
    decoder_input_details: bool | None = None
    return_k_alternatives: NumTop | None = None
    top_n_tokens: NumTop | None = None
    seed: Annotated[int, Field(ge=0, le=(1 << 64) - 1)] | None = None
    response_format: Any = None
    grammar: Any = None
    apply_chat_template: bool | None = None
    speculation: Any = None


class GenerateRequest(Fields):
    """Body of POST /, /generate and /generate_stream."""

    inputs: str
    parameters: Parameters | None = None
    stream: bool | None = None


class TokenizeRequest(Fields):
    """Body of POST /tokenize that has `inputs`."""

    inputs: str
    parameters: Parameters | None = None
    model: str | None = None
    add_special_tokens: bool | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """One request as a call, and what its answer depends on."""

    request: pb.GenerateRequest = field(repr=False)  # it may have a token
    adapter_name: str  # as asked
    prefix: str  # of the text: the prompt, where it is asked for
    num_chars: int  # of the prompt
    is_streamed: bool
    has_details: bool
    num_top: int  # `top_n_tokens`
    num_alternatives: int  # `return_k_alternatives`
    ignored: tuple[str, ...]


# Names that OpenAI's routes know and these do not.
_OPENAI_NAMES: Final = {
    "schema",  # LoRAX's, of versions before `response_format`
    *CompletionRequest.model_fields,
    *ChatCompletionRequest.model_fields,
    *REFUSED,
    *GRAMMAR_FIELDS,
} - HARMLESS
TASKS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("normalize", "prompt_name", "truncation_direction", "dimensions"), "embeddings are at /embed"),
    **dict.fromkeys(("function_to_apply", "aggregation_strategy"), "classes are at /classify"),
}


def generate_job(body: GenerateRequest, base_names: Sequence[str], request_id: str, *, is_streamed: bool) -> Job:
    """The job of a request. Raises InvalidArgument, Unimplemented and AdapterNotFound with the parameter's name."""
    given = body.parameters or Parameters()
    ignored = ignored_in(body, given, base_names)
    _refuse(given)
    if not body.inputs:
        raise InvalidArgument("`inputs` is empty: give a prompt", field="inputs")
    prompt = unicode_text(body.inputs, "inputs")
    adapter_name = given.adapter_id or ""
    if given.adapter_source == S3:
        adapter_name = adapter_name.removeprefix(BUCKET_SCHEME)
    is_sampled = bool(given.do_sample) or any(
        one is not None for one in (given.temperature, given.top_k, given.top_p, given.typical_p)
    )
    best_of = given.best_of or 1
    if best_of > 1 and is_streamed:
        raise InvalidArgument("`best_of` above 1 is not available in streams", field="best_of")
    if best_of > 1 and not is_sampled:
        raise InvalidArgument("`best_of` above 1 goes with sampling: set `do_sample` or `temperature`", field="best_of")
    if given.decoder_input_details and is_streamed:
        raise InvalidArgument("`decoder_input_details` is not available in streams", field="decoder_input_details")
    request = pb.GenerateRequest(request_id=request_id, n=best_of, adapter_id=adapter_id_of(adapter_name, base_names))
    put_mixture(request, base_names, members=given.adapters, merge=given.merge, merged=given.merged_adapters)
    put_origins(request, given, given.adapters)
    if given.apply_chat_template:
        request.chat.messages.add(role="user", content=prompt)
    else:
        request.text = prompt
    if given.truncate:
        request.truncate_prompt.max_tokens = given.truncate
    _put_sampling(request, given, is_sampled=is_sampled)
    if grammar := grammar_of({"grammar": given.grammar, "response_format": given.response_format}):
        request.grammar.CopyFrom(grammar)
    if given.speculation is not None:
        request.speculation.CopyFrom(speculation_of(given.speculation))
    num_top, num_alternatives = given.top_n_tokens or 0, given.return_k_alternatives or 0
    has_details = bool(given.details or given.decoder_input_details)
    if has_details or is_streamed or best_of > 1:
        request.output.logprobs = True
        request.output.token_bytes = True
        request.output.top_logprobs = max(num_top, num_alternatives)
    if given.decoder_input_details:
        request.output.prompt_tokens = True
        request.output.prompt_logprobs = True
    return Job(
        request=request,
        adapter_name=adapter_name,
        prefix=prompt if given.return_full_text else "",
        num_chars=len(prompt),
        is_streamed=is_streamed,
        has_details=has_details,
        num_top=num_top,
        num_alternatives=num_alternatives,
        ignored=ignored,
    )


def adapter_id_of(name: str, base_names: Sequence[str]) -> str:
    """The adapter that `adapter_id` names; "" for the base model. Raises what `adapter_of` raises."""
    return "" if name == BASE_MODEL else adapter_of(unicode_text(name, "adapter_id"), base_names)


def tokenize_request(body: TokenizeRequest, adapter_id: str = "") -> pb.TokenizeRequest:
    """The wire's request of a tokenization. Raises InvalidArgument for text that is not Unicode, and what `put_origin`
    raises."""
    request = pb.TokenizeRequest(text=unicode_text(body.inputs, "inputs"), offsets=True)
    request.omit_special_tokens = body.add_special_tokens is False
    put_tokenizer_origin(request, body.parameters or Parameters(), adapter_id)
    return request


def _put_sampling(request: pb.GenerateRequest, given: Parameters, *, is_sampled: bool) -> None:
    sampling, stopping = request.sampling, request.stopping
    sampling.temperature = (1.0 if given.temperature is None else given.temperature) if is_sampled else 0.0
    put_numbers(sampling, given, "typical_p", *COMMON_NUMBERS)
    if given.top_k is not None:
        sampling.top_k = max(0, given.top_k)
    if given.seed is not None:
        sampling.seed = given.seed
    if given.max_new_tokens is not None:
        stopping.max_tokens = given.max_new_tokens
    stopping.ignore_eos = bool(given.ignore_eos_token)
    stopping.stop.extend(unicode_text(text, "stop") for text in given.stop or () if text)
    stopping.include_stop = True  # LoRAX and TGI leave the stop string in the text


def _refuse(given: Parameters) -> None:
    if given.watermark:
        raise Unimplemented("`watermark` is not available: texts have no watermark", field="watermark")


def ignored_in(
    body: GenerateRequest | TokenizeRequest, given: Parameters, base_names: Sequence[str]
) -> tuple[str, ...]:
    """Names of fields that are ignored. Raises InvalidArgument for one that would change the answer."""
    grammars = unknown_parts({"grammar": given.grammar, "response_format": given.response_format})
    of_parameters = [f"parameters.{name}" for name in (*_extras(given, base_names), *grammars)]
    return header_names([*_extras(body, base_names), *of_parameters])


def _extras(fields: Fields, base_names: Sequence[str]) -> Iterator[str]:
    is_body = not isinstance(fields, Parameters)
    for name, value in fields.extras().items():
        if name in TASKS:
            raise InvalidArgument(f"`{name}` is not for generation: {TASKS[name]}", field=name)
        if is_body and name in Parameters.model_fields:
            raise InvalidArgument(f"`{name}` belongs in `parameters`", field=name)
        if name == "model" and value in base_names:
            continue
        if name in _OPENAI_NAMES:
            neutral = REFUSED[name][0] if name in REFUSED else ()
            if value not in neutral:
                raise InvalidArgument(f"`{name}` is not a parameter of this route", field=name)
        elif name not in HARMLESS:
            yield name
