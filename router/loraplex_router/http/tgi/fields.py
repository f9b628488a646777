"""Fields of LoRAX's and TGI's requests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Final

from pydantic import Field

from loraplex_contracts.errors import InvalidArgument
from loraplex_proto.validate import MAX_COMPLETIONS, MAX_STOP_STRINGS, MAX_TOP_LOGPROBS
from loraplex_router.http.fields import HARMLESS, Fields, MixtureFields, header_names
from loraplex_router.http.grammars import GRAMMAR_FIELDS, unknown_parts
from loraplex_router.http.openai.fields import REFUSED, ChatCompletionRequest, CompletionRequest

# LoRAX's name of the base model.
BASE_MODEL: Final = "__base_model__"
Positive = Annotated[int, Field(ge=1, le=(1 << 32) - 1)]
NumTop = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]
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


class Parameters(MixtureFields):
    """`parameters` of a request: LoRAX's, TGI's, and `speculation`."""

    adapter_id: str | None = None
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
