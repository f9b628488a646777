"""LoRAX's and TGI's requests as messages of the wire. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loraplex_contracts.errors import InvalidArgument, LoraplexError, Unimplemented
from loraplex_proto.v1 import inference_pb2 as pb
from loraplex_router.http import dialects
from loraplex_router.http.errors import naming_missing
from loraplex_router.http.fields import adapter_of, put_options, speculation_of, unicode_text
from loraplex_router.http.grammars import grammar_of
from loraplex_router.http.origins import BUCKET_SCHEME, S3, put_adapters, put_tokenizer_origin
from loraplex_router.http.tgi.fields import BASE_MODEL, GenerateRequest, Parameters, TokenizeRequest, ignored_in


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(dialects.Job):
    """A request of one prompt."""

    adapter_name: str  # as asked
    prefix: str  # of the text: the prompt, where it is asked for
    num_chars: int  # of the prompt
    has_details: bool
    num_top: int  # `top_n_tokens`
    num_alternatives: int  # `return_k_alternatives`

    @property
    def request(self) -> pb.GenerateRequest:
        return self.requests[0]

    def named(self, error: LoraplexError) -> LoraplexError:
        return naming_missing(error, self.adapter_name, self.request)


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
    put_adapters(request, given, base_names)
    if given.apply_chat_template:
        request.chat.messages.add(role="user", content=prompt)
    else:
        request.text = prompt
    if given.truncate:
        request.truncate_prompt.max_tokens = given.truncate
    put_options(request, given)
    if given.temperature is None:
        request.sampling.temperature = 1.0 if is_sampled else 0.0
    request.stopping.include_stop = True  # LoRAX and TGI leave the stop string in the text
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
        requests=(request,),
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


def _refuse(given: Parameters) -> None:
    if given.watermark:
        raise Unimplemented("`watermark` is not available: texts have no watermark", field="watermark")
