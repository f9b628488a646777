"""Fields of OpenAI's requests, with vLLM's further ones and ours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final, Literal, cast

from pydantic import Field

from loraplex_contracts.errors import InvalidArgument, Unimplemented
from loraplex_proto.validate import (
    MAX_CHAT_MESSAGES,
    MAX_COMPLETIONS,
    MAX_STOP_STRINGS,
    MAX_TOOL_CALLS,
    MAX_TOP_LOGPROBS,
)
from loraplex_router.http.fields import (
    HARMLESS,
    AdapterFields,
    Biases,
    Fields,
    Items,
    MixtureFields,
    NameFields,
    Uint32,
    header_names,
)
from loraplex_router.http.grammars import GRAMMAR_FIELDS, unknown_parts

_NO_TOOLS: Final = "tools go with chats"
_BY_MODEL: Final = "name the adapter in `model`"
_BESIDE: Final = "options stand beside the prompt"
_TEXT_ONLY: Final = "prompts are text or token ids"
_OTHERS: Final = "it is another server's"
# Values that ask for nothing.
ABSENT: Final = (None, False, 0, -1, "", [], {})
# SGLang's fields that would change the answer, on all of its routes, and what to do instead.
REFUSED_OF_SGLANG: Final[Mapping[str, str]] = {
    **dict.fromkeys(("input_embeds", "image_data", "video_data", "audio_data"), _TEXT_ONLY),
    **dict.fromkeys(("positional_embed_overrides", "mm_hashes", "mm_content_hashes"), _TEXT_ONLY),
    **dict.fromkeys(("custom_logit_processor", "session_params", "return_hidden_states"), _OTHERS),
    **dict.fromkeys(("return_routed_experts", "return_entropy", "return_sampling_mask", "custom_params"), _OTHERS),
    **dict.fromkeys(("bootstrap_host", "bootstrap_port", "bootstrap_room", "max_thinking_tokens"), _OTHERS),
}
# Fields that would change the answer and are not available: the values that change nothing, and what to do instead.
REFUSED: Final[Mapping[str, tuple[tuple[Any, ...], str]]] = {
    "stop_regex": ((), "use `stop`"),
    "tools": (([],), _NO_TOOLS),
    "tool_choice": (("none", "auto"), _NO_TOOLS),
    "functions": (([],), "use `tools`"),
    "function_call": (("none", "auto"), "use `tool_choice`"),
    "use_beam_search": ((False,), "texts are sampled"),
    "length_penalty": ((1,), "texts are sampled"),
    "early_stopping": ((False,), "texts are sampled"),
    "suffix": (("",), "text is only written behind the prompt"),
    "prompt_embeds": ((), "send text or token ids"),
    "logits_processors": (([],), "use `logit_bias`, `allowed_token_ids` or `bad_words`"),
    "vllm_xargs": (({},), _OTHERS),
    "kv_transfer_params": ((), _OTHERS),
    "ec_transfer_params": ((), _OTHERS),
    "thinking_token_budget": ((), "use `max_tokens`"),
    "include_reasoning": ((True,), "only answers of chats are separated from their reasoning"),
    "verbosity": (("medium",), "it is for the templates of chats"),
    "chat_template": ((), "templates go with chats"),
    "tool_prompt": ((), "the chat template decides how tools are described"),
    "modalities": ((["text"],), "answers are text"),
    "audio": ((), "answers are text"),
    "web_search_options": ((), "nothing is searched"),
    "watermark": ((False,), "texts have no watermark"),
    "watermarking": ((False,), "texts have no watermark"),
    "repetition_detection": ((), "use `stop` or `max_tokens`"),
    "logprob_token_ids": (([],), "use `logprobs`, which are those of the likeliest tokens"),
    "return_token_offsets": ((False,), "POST /tokenize has the offsets of a prompt"),
    "return_prompt_text": ((False,), "POST /tokenize has the text of a chat"),
    **dict.fromkeys(("adapters", "merge", "merged_adapters"), (([],), "mixtures write texts; name one adapter")),
    "adapter_source": (("", "local"), "tokens become text without an adapter"),
    # Names of other servers and dialects for what has another name here.
    **dict.fromkeys(
        ("adapter", "adapter_name", "lora", "lora_id", "lora_name", "lora_request", "loras"), ((), _BY_MODEL)
    ),
    **dict.fromkeys(("parameters", "sampling_params"), (({},), _BESIDE)),
    "max_new_tokens": ((), "use `max_tokens`"),
    "min_new_tokens": ((0,), "use `min_tokens`"),
    "do_sample": ((True,), "set `temperature` to 0 for the likeliest text"),
    "best_of": ((1,), "use `n`"),
    "num_beams": ((1,), "texts are sampled"),
    "return_full_text": ((False,), "use `echo`"),
    "truncate": ((False,), "use `truncate_prompt_tokens`"),
    "sampling_seed": ((), "use `seed`"),
    "ignore_eos_token": ((False,), "use `ignore_eos`"),
    "no_stop_trim": ((False,), "use `include_stop_str_in_output`"),
    "token_ids_logprob": (([],), "use `top_logprobs`, which are those of the likeliest tokens"),
    "input_ids": (([],), "send messages, or token ids as `prompt` of completions"),
    **{name: (ABSENT, instead) for name, instead in REFUSED_OF_SGLANG.items()},
}

# Fields of a chat's messages whose input would be lost, and what to do instead. Others that are not known are ignored:
# clients send an answer back with what they have added to it.
REFUSED_IN_MESSAGES: Final[Mapping[str, str]] = {
    "audio": "messages are text",
    "function_call": "use `tool_calls`",
    "images": "messages are text",
    "partial": "use `continue_final_message`",
    "prefix": "use `continue_final_message`",
}
# Parts of what an assistant has said that are left out: thoughts in the form of other servers.
THOUGHTS: Final = ("thinking", "redacted_thinking", "reasoning", "reasoning_content")


class StreamOptions(Fields):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Generation(AdapterFields, MixtureFields):
    """Fields that completions and chat completions have in common."""

    max_tokens: Uint32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=-1, le=(1 << 32) - 1)] | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), le=(1 << 64) - 1)] | None = None
    logit_bias: Biases | None = None
    allowed_token_ids: Items[Uint32] | None = None
    bad_words: Items[str] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_COMPLETIONS)] | None = None
    stop: str | Annotated[list[str], Field(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Items[Uint32] | None = None
    min_tokens: Uint32 | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Annotated[int, Field(ge=-100, le=100)] | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    speculation: Any = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=(1 << 32) - 1)] | None = None
    truncation_side: Literal["left", "right"] | None = None


class CompletionRequest(Generation):
    """Body of POST /v1/completions."""

    prompt: Any = None
    best_of: Annotated[int, Field(ge=1, le=MAX_COMPLETIONS)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None


class FunctionCall(Fields):
    name: str
    arguments: Any = None


class ToolCall(Fields):
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCall


class ChatMessage(Fields):
    role: str
    content: Any = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Annotated[Items[ToolCall], Field(max_length=MAX_TOOL_CALLS)] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class NamedFunction(Fields):
    name: str


class NamedTool(Fields):
    type: Literal["function"] | None = None
    function: NamedFunction


class AllowedTools(Fields):
    mode: Literal["auto", "required"]
    tools: Annotated[Items[NamedTool], Field(min_length=1)]


class ToolChoice(Fields):
    """A tool that must be called, or those of the tools that alone may be called."""

    type: Literal["function", "allowed_tools"] | None = None
    function: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None


class ChatTemplateInput(Fields):
    """Input of a chat template, without the tools."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Items[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    reasoning: dict[str, Any] | None = None  # its `effort`, as in Responses
    verbosity: str | None = None


class ChatCompletionRequest(Generation, ChatTemplateInput):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[Items[ChatMessage], Field(min_length=1, max_length=MAX_CHAT_MESSAGES)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=(1 << 32) - 1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: bool | None = None
    tools: Items[dict[str, Any]] | None = None
    tool_choice: str | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None


class TokenizeRequest(ChatTemplateInput, AdapterFields):
    """Body of POST /tokenize: `prompt` or `messages`."""

    prompt: str | None = None
    messages: Annotated[Items[ChatMessage], Field(min_length=1, max_length=MAX_CHAT_MESSAGES)] | None = None
    add_special_tokens: bool | None = None
    tools: Items[dict[str, Any]] | None = None
    return_token_strs: bool | None = None
    return_offsets: bool | None = None


class DetokenizeRequest(NameFields):
    """Body of POST /detokenize."""

    tokens: Items[Uint32]
    skip_special_tokens: bool | None = None


# Fields of requests for texts; each route takes its own of them.
_PROMPT_FIELDS: Final = frozenset({*CompletionRequest.model_fields, *ChatCompletionRequest.model_fields}) - HARMLESS
_EMPTY: Final = (False, "", [], {})  # 0 too


def ignored_fields(body: Fields) -> tuple[str, ...]:
    """Names of the further fields that are ignored, fit for a header, a bounded number of them.

    Raises Unimplemented for one that would change the answer, and InvalidArgument for one of another route."""
    of_others = _PROMPT_FIELDS if isinstance(body, Generation | TokenizeRequest) else ()
    names: list[str] = []
    for name, value in body.extras().items():
        if name in REFUSED:
            neutral, instead = REFUSED[name]
            if value not in neutral:
                raise Unimplemented(f"`{name}` is not available: {instead}", field=name)
        elif name in of_others:
            if value not in _EMPTY:
                raise InvalidArgument(f"`{name}` is not a field of this route", field=name)
        elif name not in HARMLESS and name not in GRAMMAR_FIELDS:
            names.append(name)
    names += unknown_parts(body.extras())
    if "messages" in type(body).model_fields:  # elsewhere it is one of the further fields, and may be anything
        names += _unknown_in(cast("Any", body).messages or ())
    if isinstance(body, ChatTemplateInput) and body.reasoning is not None:
        names += [
            f"reasoning.{name}" for name, value in body.reasoning.items() if name != "effort" and value is not None
        ]
    if isinstance(body, Generation) and body.stream_options is not None:
        names += [f"stream_options.{name}" for name in body.stream_options.extras()]
    return header_names(names)


def _unknown_in(messages: Iterable[ChatMessage]) -> dict[str, None]:
    """Names of the messages' fields and parts that are ignored, each once. A chat is refused for those that are not."""
    found: dict[str, None] = {}
    for message in messages:
        for name, value in message.extras().items():
            # An answer that comes back as a message has fields that are empty.
            if name not in REFUSED_IN_MESSAGES and value not in _EMPTY:
                found[f"messages.{name}"] = None
        if message.role == "assistant" and isinstance(message.content, list):
            kinds = [part.get("type") for part in cast("list[Any]", message.content) if isinstance(part, dict)]
            found |= {f"messages.content.{kind}": None for kind in kinds if kind in THOUGHTS}
    return found
