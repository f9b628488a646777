"""Names that fields of the wire have in requests over HTTP."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Final

from loraplex_proto.speculation import KINDS
from loraplex_proto.v1 import inference_pb2

_DOCUMENTS: Final = ("documents", "texts", "text_2", "items", "data_2")
_PROMPT: Final = ("prompt", "messages", "input", "text", "input_ids", *_DOCUMENTS, "inputs")
ADAPTER_NAMES: Final = ("model", "lora_name", "lora_path", "adapter_id")
_GRAMMAR: Final = (
    *("response_format", "structured_outputs", "json_schema", "regex", "ebnf", "structural_tag"),
    *("guided_json", "guided_json_object", "guided_regex", "guided_choice", "guided_grammar", "text.format", "grammar"),
)
# In all dialects; others have the wire's name. Errors show the first that a request has. Where it has none, it is the
# first in OpenAI's form, and the last in that of LoRAX and TGI.
NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "adapter_id": ADAPTER_NAMES,
    "adapters": ("adapters", "merged_adapters"),
    "merge": ("merge", "merged_adapters"),
    **dict.fromkeys(("hub", "in_bucket", "adapters.hub", "adapters.in_bucket"), ("adapter_source",)),
    **dict.fromkeys(("hub.revision", "adapters.hub.revision"), ("adapter_revision",)),
    **dict.fromkeys(("hub.token", "adapters.hub.token"), ("api_token",)),
    **dict.fromkeys(("source", "revision"), ("lora_path",)),
    **dict.fromkeys(("input", "text", "token_ids.ids"), _PROMPT),
    "token_ids": ("tokens",),
    "inputs": ("input", *_DOCUMENTS, "inputs"),
    "query": ("query", "text_1", "queries", "data_1"),
    "chat": ("messages", "input", "inputs"),
    "chat.template": ("chat_template",),
    "chat.tools_json": ("tools",),
    "chat.tool_choice": ("tool_choice",),
    "chat.documents_json": ("documents",),
    "chat.template_kwargs_json": ("chat_template_kwargs", "reasoning_effort", "reasoning", "verbosity"),
    "chat.continue_final_message": ("continue_final_message",),
    "chat.omit_generation_prompt": ("add_generation_prompt",),
    "chat.parallel_tool_calls": ("parallel_tool_calls",),
    "n": ("n", "best_of"),
    "request_id": ("request_id", "rid"),
    "omit_special_tokens": ("add_special_tokens",),
    "sampling.seed": ("seed", "sampling_seed"),
    "stopping.max_tokens": ("max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens"),
    "stopping.min_tokens": ("min_tokens", "min_new_tokens"),
    "stopping.ignore_eos": ("ignore_eos", "ignore_eos_token"),
    "stopping.include_stop": ("include_stop_str_in_output", "no_stop_trim"),
    "truncate_prompt": ("truncate_prompt_tokens", "truncation", "truncate"),
    "output.keep_special_tokens": ("skip_special_tokens",),
    "output.top_logprobs": ("top_logprobs", "logprobs", "top_logprobs_num", "return_k_alternatives", "top_n_tokens"),
    "output.logprobs": ("logprobs", "return_logprob", "details"),
    **dict.fromkeys(
        ("output.prompt_logprobs", "output.prompt_tokens"),
        ("prompt_logprobs", "echo", "logprob_start_len", "decoder_input_details"),
    ),
    "output.omit_token_ids": ("return_token_ids",),
    "output.token_bytes": ("logprobs", "details"),
    "output.parse_chat": ("messages",),
    "omit_normalization": ("normalize",),
    "logits": ("activation", "use_activation", "softmax", "raw_scores"),
    **dict.fromkeys((f"speculation.{kind}" for kind in KINDS), ("speculation.kind",)),
    **dict.fromkeys(
        (
            "grammar",
            "grammar.choice.texts",
            *(f"grammar.{one}" for one in inference_pb2.Grammar.DESCRIPTOR.fields_by_name),
        ),
        _GRAMMAR,
    ),
}
# A path of the wire in a message.
_PATH: Final = re.compile(
    r"`((?:adapters|merge|hub|sampling|stopping|output|chat|grammar|truncate_prompt|inputs|query|token_ids|speculation)"
    r"\.[\w.\[\]]+)`"
)
# Messages whose fields may have the name of the whole.
_NESTED: Final = frozenset({"adapters", "merge", "chat", "inputs", "query", "truncate_prompt"})


def field_name(path: str, given: Collection[str] = (), *, is_tgi: bool = False) -> str:
    """The name of a field of the wire in a request that has the fields `given`; of another field its own."""
    whole, root = path.partition("[")[0], path.partition(".")[0]
    while whole not in NAMES and root in _NESTED and "." in whole:
        whole = whole.rpartition(".")[0]
    if names := NAMES.get(whole):
        return next((name for name in names if name in given), names[-1 if is_tgi else 0])
    if root in ("sampling", "stopping", "output"):
        return path.rpartition(".")[2]
    return f"speculation.{path.rpartition('.')[2]}" if root == "speculation" and "." in path else path


def naming_fields(text: str, given: Collection[str] = (), *, is_tgi: bool = False) -> str:
    """The text, with paths of the wire's fields replaced as `field_name` does."""
    return _PATH.sub(lambda path: f"`{field_name(path[1], given, is_tgi=is_tgi)}`", text)
