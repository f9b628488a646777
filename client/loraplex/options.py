"""Options of `generate` and `stream`: meanings, ranges and suggestions for misspelt names.

Meanings come from the docstrings of `GenerateOptions` and the table of sampling options, ranges from the rules that
servers check.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import textwrap
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Final, get_args, get_type_hints

from loraplex import types
from loraplex.types import CallOptions, ChatOptions, GenerateOptions
from loraplex_contracts.errors import InvalidArgument
from loraplex_contracts.mixtures import MAX_MEMBERS
from loraplex_contracts.request import MAX_DRAFT_TOKENS
from loraplex_contracts.sampling import SAMPLING_OPTIONS
from loraplex_proto import validate
from loraplex_proto.speculation import TEXTS

# Names of other libraries -> the option here.
ELSEWHERE: Final = {
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "max_length": "max_tokens",
    "max_gen_len": "max_tokens",
    "min_new_tokens": "min_tokens",
    "min_length": "min_tokens",
    "num_return_sequences": "n",
    "num_completions": "n",
    "best_of": "n",
    "stop_sequence": "stop",
    "stop_sequences": "stop",
    "stop_string": "stop",
    "stop_strings": "stop",
    "stop_words": "stop",
    "eos_token_id": "stop_token_ids",
    "include_stop_str_in_output": "include_stop",
    "ignore_eos_token": "ignore_eos",
    "do_sample": "temperature",
    "temp": "temperature",
    "random_seed": "seed",
    "rep_penalty": "repetition_penalty",
    "bad_words_ids": "bad_words",
    "model": "adapter_id",
    "lora": "adapter_id",
    "lora_path": "adapter_id",
    "lora_request": "adapter_id",
    "adapter": "adapter_id",
    "adapter_name": "adapter_id",
    "lora_adapters": "adapters",
    "merged_adapters": "adapters",
    "input_ids": "token_ids",
    "prompt_token_ids": "token_ids",
    "chat": "messages",
    "conversation": "messages",
    "response_format": "grammar",
    "guided_json": "grammar",
    "structured_outputs": "grammar",
    "truncate": "truncate_prompt",
    "truncate_prompt_tokens": "truncate_prompt",
    "return_logprobs": "logprobs",
    "details": "logprobs",
    "return_full_text": "echo",
    "skip_special_tokens": "keep_special_tokens",
    "add_special_tokens": "omit_special_tokens",
    "add_generation_prompt": "omit_generation_prompt",
    "chat_template_kwargs": "template_kwargs",
    "timeout": "timeout_s",
    "user": "cache_salt",
}
STREAMING: Final = frozenset({"stream", "streaming", "is_streaming"})
MAX_BEHIND: Final = 0.1  # of difflib's ratio: a name that is further behind the nearest one is not meant

_RANGES: Final = {
    "timeout_s": "above 0; None: no deadline",
    "adapters": f"at most {MAX_MEMBERS} names",
    "truncate_prompt": f"0 to {validate.MAX_NEW_TOKENS}",
    "max_tokens": f"1 to {validate.MAX_NEW_TOKENS}",
    "min_tokens": f"0 to {validate.MAX_NEW_TOKENS}",
    "stop": f"at most {validate.MAX_STOP_STRINGS} strings of 1 to {validate.MAX_STOP_BYTES} bytes",
    "stop_token_ids": f"at most {validate.MAX_STOP_TOKEN_IDS} ids",
    "n": f"1 to {validate.MAX_COMPLETIONS}",
    "top_logprobs": f"0 to {validate.MAX_TOP_LOGPROBS}",
    "max_draft_tokens": f"0 to {MAX_DRAFT_TOKENS}; 0: the server's choice",
    "priority": "-100 to 100",
    "seed": "0 to 2^64 - 1",
    "messages": f"1 to {validate.MAX_CHAT_MESSAGES} messages",
    "tool_choice": "'none', 'auto', 'required' or a function's name as in OpenAI's API",
    "speculation": f"{TEXTS}, or an object with parameters",
}


@dataclass(frozen=True, slots=True)
class OptionHelp:
    """One option: its type as written in Python, its meaning, and its range where there is one."""

    name: str
    kind: str
    meaning: str
    range: str = ""

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.kind}", *textwrap.wrap(self.meaning, 96)]
        if self.range:
            lines.append(f"Range: {self.range}.")
        return "\n    ".join(lines)


def near_option(name: str, known: Collection[str]) -> str:
    """A sentence with the options that `name` may stand for, empty where none is near."""
    if name.lower() in STREAMING:
        return "for a stream there is the method `stream`"
    meant = ELSEWHERE.get(name.lower())
    found = [meant] if meant is not None and meant in known else _nearest(name.lower(), known)
    return f"did you mean {' or '.join(found)}?" if found else ""


def _nearest(name: str, known: Collection[str]) -> list[str]:
    near = difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.6)
    ratios = [difflib.SequenceMatcher(None, name, one).ratio() for one in near]
    return [one for one, ratio in zip(near, ratios, strict=True) if ratio >= ratios[0] - MAX_BEHIND]


@cache
def options_help() -> tuple[OptionHelp, ...]:
    """Every option of `generate` and `stream`, in the order of `GenerateOptions`."""
    hints = get_type_hints(GenerateOptions)
    meanings = dict(_docstrings())
    names = [*dict.fromkeys([*GenerateOptions.__annotations__, *hints])]
    return tuple(OptionHelp(name, _kind(hints[name]), _meaning(name, meanings), _range(name)) for name in names)


def taken_by(name: str) -> str:
    """Type and range of an option, as a clause; empty for what is none."""
    one = next((one for one in options_help() if one.name == name), None)
    if one is None:
        return ""
    return f"{name} takes {one.kind}" + (f", {one.range}" if one.range else "")


def help(option: str | None = None) -> None:
    """Prints what `generate` and `stream` take: every option with its type, meaning and range, or the one named.
    Raises InvalidArgument for an option that there is not."""
    found = [one for one in options_help() if option in (None, one.name)]
    if not found:
        near = near_option(str(option), [one.name for one in options_help()])
        raise InvalidArgument(f"there is no option {option!r}; {near or 'loraplex.help() lists all'}", field="option")
    print("\n".join(map(str, found)))


def _meaning(name: str, meanings: dict[str, str]) -> str:
    sampling = SAMPLING_OPTIONS.get(name)
    return meanings.get(name) or (sampling.help if sampling is not None else "")


def _range(name: str) -> str:
    sampling = SAMPLING_OPTIONS.get(name)
    rule = sampling.rule.removeprefix("must be ") if sampling is not None else ""
    if sampling is not None and sampling.max_entries:
        rule = f"at most {sampling.max_entries} entries" + (f", each {rule}" if rule else "")
    return _RANGES.get(name) or rule


def _kind(hint: object) -> str:
    """The type without its None, which every option may be."""
    kinds = [one for one in get_args(hint) if one is not type(None)] or [hint]
    texts = [one.__name__ if isinstance(one, type) and not get_args(one) else str(one) for one in kinds]
    return (
        " or ".join(dict.fromkeys(texts))
        .replace("typing.", "")
        .replace("collections.abc.", "")
        .replace("loraplex.types.", "")
    )


def _docstrings() -> Iterator[tuple[str, str]]:
    """Option and the text below it in the source of its class."""
    wanted = {one.__name__ for one in (CallOptions, ChatOptions, GenerateOptions)}
    for cls in ast.parse(inspect.getsource(types)).body:
        if not (isinstance(cls, ast.ClassDef) and cls.name in wanted):
            continue
        for one, below in zip(cls.body, cls.body[1:], strict=False):
            if not (isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)):
                continue
            if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
                yield one.target.id, inspect.cleandoc(str(below.value.value))
