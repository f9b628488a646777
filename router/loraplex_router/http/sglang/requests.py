"""SGLang's requests as messages of the wire. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from loraplex_contracts.adapters import check_id
from loraplex_contracts.errors import InvalidArgument, LoraplexError
from loraplex_proto.v1 import inference_pb2 as pb
from loraplex_router.http import dialects
from loraplex_router.http.errors import naming_missing
from loraplex_router.http.fields import (
    MAX_CHOICES,
    adapter_in,
    header_names,
    prompts_of,
    put_options,
    request_ids_of,
    speculation_of,
    unicode_text,
)
from loraplex_router.http.grammars import grammar_of
from loraplex_router.http.origins import put_adapters
from loraplex_router.http.prompt_only import leave_out_new_text
from loraplex_router.http.sglang.fields import GenerateRequest, SamplingParams, further_fields

DEFAULT_MAX_TOKENS: Final = 128  # SGLang's

_GRAMMARS: Final = ("json_schema", "regex", "ebnf", "structural_tag")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(dialects.Job):
    """A request of one or several prompts."""

    adapter_names: tuple[str, ...]
    request_id: str
    n: int
    is_list: bool  # of prompts
    with_logprobs: bool
    prompt_start: int | None  # of the logprobs of the prompt; None: none
    num_top: int
    with_texts: bool
    is_prompt_only: bool  # the one token that the wire makes is dropped

    def named(self, error: LoraplexError) -> LoraplexError:
        names = [name for name in self.adapter_names if name]
        shown = error.resource if error.resource in names else ", ".join(dict.fromkeys(names))
        return naming_missing(error, shown or "", self.requests[0])


def generate_job(body: GenerateRequest, base_names: Sequence[str], request_id: str) -> Job:
    """The job of a request. Raises InvalidArgument, Unimplemented and AdapterNotFound with the field's name."""
    params = body.sampling_params or SamplingParams()
    ignored = header_names([*further_fields(body), *(f"sampling_params.{name}" for name in further_fields(params))])
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
        put_adapters(one, body, base_names)
        if isinstance(prompt, str):
            one.text = unicode_text(prompt, "text")
        else:
            one.token_ids.ids.extend(prompt)
        if params.max_new_tokens == 0:
            leave_out_new_text(one)
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
        is_prompt_only=params.max_new_tokens == 0,
        ignored=ignored,
    )


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
    request.sampling.temperature = 1.0
    request.stopping.max_tokens = DEFAULT_MAX_TOKENS
    put_options(request, params)
    request.stopping.max_tokens = max(1, request.stopping.max_tokens)  # the wire makes at least one
    request.output.keep_special_tokens = params.skip_special_tokens is False
    request.priority = body.priority or 0
    request.cache_salt = unicode_text(body.cache_salt or "", "cache_salt")
    if grammar := grammar_of({name: getattr(params, name) for name in _GRAMMARS}):
        request.grammar.CopyFrom(grammar)
    if params.speculation is not None:
        request.speculation.CopyFrom(speculation_of(params.speculation))
    return request
