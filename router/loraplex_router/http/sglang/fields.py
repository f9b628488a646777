"""Fields of SGLang's POST /generate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final

from pydantic import Field

from loraplex_contracts.errors import InvalidArgument, Unimplemented
from loraplex_proto.validate import MAX_COMPLETIONS, MAX_TOP_LOGPROBS
from loraplex_router.http.fields import HARMLESS, Biases, Fields, Items, MixtureFields, Uint32
from loraplex_router.http.grammars import GRAMMAR_FIELDS
from loraplex_router.http.openai.fields import ABSENT, REFUSED_OF_SGLANG, ChatCompletionRequest, CompletionRequest
from loraplex_router.http.openai.fields import REFUSED as OTHERS_REFUSED
from loraplex_router.http.tgi.fields import Parameters

# Fields that would change the answer, and what to do instead. Refused unless their value asks for nothing.
REFUSED: Final[Mapping[str, str]] = {
    **REFUSED_OF_SGLANG,
    "modalities": "prompts are text or token ids",
    "lora_id": "use `lora_path`",
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
    *Parameters.model_fields,
    *OTHERS_REFUSED,
    *GRAMMAR_FIELDS,
} - HARMLESS


class SamplingParams(Fields):
    """`sampling_params`, with `speculation`."""

    max_new_tokens: Uint32 | None = None
    min_new_tokens: Uint32 | None = None
    stop: str | Items[str] | None = None
    stop_token_ids: Items[Uint32] | None = None
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
    logit_bias: Biases | None = None
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None
    structural_tag: Any = None
    sampling_seed: Annotated[int, Field(ge=-(1 << 63), le=(1 << 64) - 1)] | None = None
    speculation: Any = None


class GenerateRequest(MixtureFields):
    """Body of POST /generate that has `text` or `input_ids`. Mixtures are our own field, and count for all prompts."""

    text: Any = None
    input_ids: Any = None
    sampling_params: SamplingParams | None = None
    lora_path: str | Items[str | None] | None = None
    model: str | None = None
    adapter_id: str | None = None
    stream: bool | None = None
    rid: str | Items[str] | None = None
    return_logprob: bool | None = None
    logprob_start_len: Annotated[int, Field(ge=-1)] | None = None
    top_logprobs_num: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    return_text_in_logprobs: bool | None = None
    priority: Annotated[int, Field(ge=-100, le=100)] | None = None
    cache_salt: str | None = None
    log_metrics: Any = None
    no_logs: Any = None


def further_fields(fields: Fields) -> Iterator[str]:
    for name, value in fields.extras().items():
        if name in REFUSED:
            if value not in ABSENT:
                raise Unimplemented(f"`{name}` is not available: {REFUSED[name]}", field=name)
        elif name in SamplingParams.model_fields:  # beside them
            raise InvalidArgument(f"`{name}` belongs in `sampling_params`", field=name)
        elif name in _OTHER_NAMES:
            if value not in ABSENT and (name not in OTHERS_REFUSED or value not in OTHERS_REFUSED[name][0]):
                raise InvalidArgument(f"`{name}` is not a field of this route", field=name)
        else:
            yield name
