"""The base model's tokenizer: texts and chats to token ids and back.

Wraps a fast Transformers tokenizer. Without one, requests and answers in token ids work, and everything that needs
text fails with a typed error. Safe to use from several threads: only caches change after construction.
"""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from tokenizers import Encoding, Tokenizer

from loraplex_contracts.errors import FailedPrecondition, InvalidArgument, NoChatTemplate, UnsupportedModel
from loraplex_contracts.request import StoppingParams
from loraplex_server.library_errors import error_line
from loraplex_server.text.chat_template import chosen, rendered
from loraplex_server.text.control_tokens import ControlTokens, Edges, NormalizedControlTokens, SafeText
from loraplex_server.text.detokenizer import Detokenizer, StopMatcher, new_detokenizer
from loraplex_server.text.vocabulary import Vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_logger = logging.getLogger(__name__)

# Shorter texts take at most some 10 ms, which is not worth a thread.
SHORT_CHARS: Final = 10_000

# A model directory with none of these has no tokenizer.
_TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "*.model",  # SentencePiece's, under several names
    "tekken.json",
    "vocab.json",
    "vocab.txt",
)
_NO_FILE: Final = "it has no file that a tokenizer can be read from"
_PROCESSOR_TEMPLATE: Final = "chat_template.json"
_INSTEAD_OF_CODE: Final = "give the checkpoint a tokenizer.json, and take `auto_map` out of its tokenizer_config.json"

# Most characters of a template's refusal, which may repeat the messages.
MAX_REASON_CHARS: Final = 300
# OpenAI's role above users. Templates that do not name it may leave its messages out: those are the system's then.
_DEVELOPER: Final = "developer"
MAX_RENDERED_CHARS: Final = 16 << 20
# Templates whose control tokens are remembered.
_MAX_TEMPLATES: Final = 64


def num_bytes_of(text: str) -> int:
    """Number of bytes of a text in UTF-8. Raises InvalidArgument on text that is not Unicode."""
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidArgument("the text holds halves of surrogate pairs; send UTF-8", field="text") from error


@cache
def _reserved_arguments() -> frozenset[str]:
    """Names that a request must not pass on to Transformers, the template itself among them."""
    from transformers import PreTrainedTokenizerBase  # late: the process for long texts has it not

    parameters = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    return frozenset({*parameters, "messages", "template_kwargs"})


def _check_arguments(own: Mapping[str, Any]) -> None:
    if taken := sorted(own.keys() & _reserved_arguments()):
        raise InvalidArgument(
            f"`chat.template_kwargs_json` cannot set {taken[0]!a}, which is not the template's own; leave it out",
            field="chat.template_kwargs_json",
        )


@dataclass(frozen=True, slots=True)
class Truncation:
    """Most tokens of a prompt, special ones included."""

    max_tokens: int
    keep_start: bool = False  # else the end

    @property
    def direction(self) -> str:
        """The end that is cut off, as the library calls it."""
        return "right" if self.keep_start else "left"

    def cut(self, token_ids: Sequence[int]) -> Sequence[int]:
        if len(token_ids) <= self.max_tokens:
            return token_ids
        return token_ids[: self.max_tokens] if self.keep_start else token_ids[len(token_ids) - self.max_tokens :]


def encoding_of(tokenizer: Tokenizer, text: str, special: bool, truncation: Truncation | None = None) -> Encoding:
    """Ids of a text, as `encode` gives them, and their offsets in it in characters."""
    encoding = tokenizer.encode_batch([text], add_special_tokens=special and truncation is None)[0]
    return encoding if truncation is None else _truncated(tokenizer, encoding, special, truncation)


def encode(tokenizer: Tokenizer, text: str, special: bool, truncation: Truncation | None) -> list[int]:
    """Ids of a text. As in Transformers, truncation keeps the special tokens that the tokenizer adds."""
    if truncation is None and len(text) < SHORT_CHARS:
        return tokenizer.encode(text, add_special_tokens=special).ids
    # In a batch, even of one, the library gives the interpreter's lock back.
    encoding = tokenizer.encode_batch_fast([text], add_special_tokens=special and truncation is None)[0]
    return encoding.ids if truncation is None else _truncated(tokenizer, encoding, special, truncation).ids


def _truncated(tokenizer: Tokenizer, encoding: Encoding, special: bool, truncation: Truncation) -> Encoding:
    """`encoding`, which has no special tokens, cut to the truncation; the tokenizer's special tokens are added."""
    num_added = tokenizer.num_special_tokens_to_add(False) if special else 0
    encoding.truncate(truncation.max_tokens - num_added, direction=truncation.direction)
    return tokenizer.post_process(encoding, add_special_tokens=special)


# Yields the parameters of `TextTokenizer.render_chat`, takes the template's text, and returns the chat's.
ChatRendering = Generator[Mapping[str, Any], str, "str | SafeText"]


def advance(rendering: ChatRendering, text: str | None) -> tuple[Mapping[str, Any] | None, str | SafeText]:
    """The next step, with the text of the one before (None: the first): what to render; else None and the result.
    Raises InvalidArgument for values that are nested too deeply, and what `rendering` raises."""
    try:
        return (next(rendering) if text is None else rendering.send(text)), ""
    except StopIteration as end:
        return None, end.value
    except RecursionError as error:
        raise InvalidArgument(
            "the chat's tools, documents, arguments or calls are nested too deeply; leave some levels out", field="chat"
        ) from error


def _unreadable(error: Exception) -> str:
    """The reason that a tokenizer cannot be read, in one line."""
    reason = error_line(error, instead_of_code=_INSTEAD_OF_CODE)
    if any(package in reason.lower() for package in ("sentencepiece", "tiktoken")):
        return (
            "reading its files takes another package: pip install sentencepiece (tiktoken for a tiktoken.model), or "
            "give the checkpoint a tokenizer.json"
        )
    if "one of: (1)" in reason:  # what the library looked for
        return _NO_FILE
    return reason


def import_library() -> None:
    """Imports what `TextTokenizer.from_pretrained` needs: seconds, torch included."""
    from transformers import AutoTokenizer, LlamaConfig  # one configuration brings what those of all families share

    del AutoTokenizer, LlamaConfig


def processor_template(model: str, revision: str | None = None) -> str | None:
    """The chat template in the file that processors of multimodal models have it in; None where there is none, or none
    that can be read."""
    from transformers.utils.hub import cached_file  # late: the process for long texts has it not

    found = cached_file(
        model,
        _PROCESSOR_TEMPLATE,
        revision=revision,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    if found is None:
        return None
    try:
        template: object = json.loads(Path(found).read_text(encoding="utf-8"))["chat_template"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        template = None
    if isinstance(template, str):
        return template
    _logger.warning("%s of %s has no text under `chat_template` and is not used", _PROCESSOR_TEMPLATE, model)
    return None


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """Special tokens and chat template."""

    named: Mapping[str, str]  # "bos", "eos", "pad" and "unk", of those that there are, to their text
    special_ids: Mapping[str, int]  # of all special tokens, by text
    chat_template: str


class TextTokenizer:
    """Encodes, decodes, and makes the detokenizer and stop matcher of each completion."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast | None, *, missing_reason: str = "") -> None:
        self._tokenizer = tokenizer
        self._missing_reason = missing_reason or "the base model has no tokenizer"
        self._vocabulary: Vocabulary | None = None
        self._control_tokens = lru_cache(maxsize=_MAX_TEMPLATES)(self._control_tokens_of)
        if tokenizer is not None:
            backend = tokenizer.backend_tokenizer
            # Files may carry settings of training. Set once: the library refuses changes while another thread encodes.
            backend.no_truncation()
            backend.no_padding()
            self._backend = backend
            self._vocabulary = Vocabulary(backend)
            self._all_visible = Vocabulary(backend, keep_special=True)

    @classmethod
    def from_pretrained(
        cls, model: str, *, revision: str | None = None, chat_template: str | None = None
    ) -> TextTokenizer:
        """The tokenizer of a directory or Hub repository. `chat_template`: in the place of its own. Raises
        UnsupportedModel on one that cannot be read."""
        from transformers import AutoTokenizer, PreTrainedTokenizerFast  # late: the process for long texts has neither

        path = Path(model)
        files = {found.name for name in _TOKENIZER_FILES for found in path.glob(name)} if path.is_dir() else None
        if files is not None and not files:
            _logger.warning("%s has no tokenizer; serving token ids only", model)
            return cls(None)
        try:
            loaded = AutoTokenizer.from_pretrained(model, revision=revision, trust_remote_code=False)
        except Exception as error:  # the library raises errors of any type
            reason = _unreadable(error)
            if path.is_dir():
                raise UnsupportedModel(f"the tokenizer in {model} cannot be read: {reason}") from error
            _logger.warning("no tokenizer for %s, serving token ids only: %s", model, reason)
            return cls(None, missing_reason=f"the base model's tokenizer cannot be read ({reason})")
        if not isinstance(loaded, PreTrainedTokenizerFast):
            _logger.warning("%s is not a fast tokenizer; serving token ids only", type(loaded).__name__)
            return cls(None, missing_reason=f"the base model's tokenizer ({type(loaded).__name__}) is not a fast one")
        if files == {"tokenizer_config.json"}:  # which the library makes an empty vocabulary of
            raise UnsupportedModel(f"the tokenizer in {model} cannot be read: {_NO_FILE}")
        if chat_template is not None:
            loaded.chat_template = chat_template
        elif not loaded.chat_template:
            loaded.chat_template = processor_template(model, revision)
        return cls(loaded)

    @property
    def has_text(self) -> bool:
        """True if there is a tokenizer at all."""
        return self._tokenizer is not None

    @property
    def vocabulary(self) -> Vocabulary | None:
        """The tokenizer's tokens one by one; None without a tokenizer."""
        return self._vocabulary

    def serialized(self) -> str | None:
        """The tokenizer as text for another process; None where it cannot be copied."""
        if self._tokenizer is None:
            return None
        try:
            return self._backend.to_str()
        except Exception as error:  # the library has no type of its own for components written in Python
            _logger.warning("the tokenizer cannot be copied to another process: %s", error)
            return None

    @property
    def has_chat_template(self) -> bool:
        return bool(self.chat_template_for(has_tools=False))

    @property
    def chat_template(self) -> str:
        """The chat template, in Jinja; empty where there is none, or several."""
        template: Any = None if self._tokenizer is None else self._tokenizer.chat_template
        return template if isinstance(template, str) else ""

    def chat_template_for(self, *, has_tools: bool) -> str:
        """The chat template; of several the one that Transformers takes."""
        return "" if self._tokenizer is None else chosen(self._tokenizer.chat_template, has_tools=has_tools)

    @property
    def response_template(self) -> Mapping[str, Any] | None:
        """The tokenizer's own template for the parts of an answer, where it has one."""
        return cast("Mapping[str, Any] | None", getattr(self._tokenizer, "response_template", None))

    def facts(self) -> TokenizerFacts:
        """Special tokens and chat template. Raises FailedPrecondition without a tokenizer."""
        tokenizer = self._require("tokenizer")
        assert self._vocabulary is not None
        tokens = {role: getattr(tokenizer, f"{role}_token") for role in ("bos", "eos", "pad", "unk")}
        named = {role: str(token) for role, token in tokens.items() if token is not None}
        ids = {text: self._backend.token_to_id(text) for text in named.values()}
        known = {text: token_id for text, token_id in ids.items() if token_id is not None}
        named = {role: text for role, text in named.items() if text in known}
        template = self.chat_template_for(has_tools=False)
        return TokenizerFacts(named, {**self._vocabulary.special_ids, **known}, template)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The tokenizer's end-of-sequence token. A model's generation config may name more."""
        eos = cast("int | None", None if self._tokenizer is None else self._tokenizer.eos_token_id)
        return frozenset() if eos is None else frozenset((eos,))

    def encode(self, text: str, *, add_special_tokens: bool = True, truncation: Truncation | None = None) -> list[int]:
        """Ids of a text. Raises FailedPrecondition without a tokenizer, InvalidArgument on text that is not Unicode.

        Other threads go on while a long text is tokenized.
        """
        self._require("text")
        num_bytes_of(text)
        return encode(self._backend, text, add_special_tokens, truncation)

    def encode_with_offsets(
        self, text: str, *, add_special_tokens: bool = True, truncation: Truncation | None = None
    ) -> Encoding:
        """Ids of a text and their offsets. Raises what `encode` raises."""
        self._require("text")
        num_bytes_of(text)
        return encoding_of(self._backend, text, add_special_tokens, truncation)

    def encode_pair(
        self, first: str, second: str, *, add_special_tokens: bool = True, truncation: Truncation | None = None
    ) -> list[int]:
        """Ids of two texts as the tokenizer's pair; a truncation shortens the second. Raises what `encode` raises, and
        InvalidArgument for a truncation that leaves the second no token."""
        self._require("text")
        num_bytes_of(first)
        num_bytes_of(second)
        one, other = (encoding_of(self._backend, text, special=False) for text in (first, second))
        if truncation is not None:
            num_added = self._backend.num_special_tokens_to_add(True) if add_special_tokens else 0
            room = truncation.max_tokens - num_added - len(one.ids)
            if room < 1:
                raise InvalidArgument(
                    "`truncate_prompt.max_tokens` leaves no token for the document behind the query; allow more",
                    field="truncate_prompt.max_tokens",
                )
            other.truncate(room, direction=truncation.direction)
        return self._backend.post_process(one, other, add_special_tokens=add_special_tokens).ids

    def token_id(self, text: str, field: str) -> int:
        """The id of a text that is one token. Raises InvalidArgument for another, FailedPrecondition without a
        tokenizer."""
        ids = self.encode(text, add_special_tokens=False)
        if len(ids) != 1:
            raise InvalidArgument(f"`{field}` must be one token; {text[:40]!a} has {len(ids)}", field=field)
        return ids[0]

    def num_added_tokens(self) -> int:
        """Number of special tokens that `encode` adds to a text."""
        return 0 if self._tokenizer is None else self._backend.num_special_tokens_to_add(False)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        continue_final_message: bool = False,
        tools: list[Any] | None = None,
        documents: list[Any] | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """The template's text, special tokens included. `arguments`: the template's own. Raises NoChatTemplate, or
        InvalidArgument if the template refuses."""
        tokenizer = self._require("chat")
        template = self.chat_template_for(has_tools=bool(tools))
        if not template:
            raise NoChatTemplate(
                f"the base model has no {'default ' if tokenizer.chat_template else ''}chat template; send text or "
                "token_ids instead, or start the server with --chat-template",
                field="chat",
            )
        own = arguments or {}
        _check_arguments(own)
        try:
            given = {
                "messages": messages, "add_generation_prompt": add_generation_prompt,
                "continue_final_message": continue_final_message, "tools": tools, "documents": documents,
                "arguments": {**tokenizer.special_tokens_map, **own},
            }  # fmt: skip
            text = rendered(template, given)
        except ImportError:  # an installation that lacks something is no template's fault
            raise
        except Exception as error:  # a template is a program, and may raise anything
            reason = str(error).strip().split("\n", 1)[0][:MAX_REASON_CHARS]
            raise InvalidArgument(f"the chat template refuses these messages: {reason}", field="chat") from error
        if len(text) > MAX_RENDERED_CHARS:
            raise InvalidArgument(
                f"the chat template makes {len(text)} characters of these messages; {MAX_RENDERED_CHARS} are read: "
                "send fewer",
                field="chat",
            )
        return text

    def chat_text(self, given: Mapping[str, Any]) -> str | SafeText:
        """The text that `render_chat` makes of its parameters `given`. Where a message, tool, document or argument
        holds what looks like a control token, or makes one with what is around it, that has no power; what the
        assistant said may have those that are not special, such as marks of its reasoning. Raises what `render_chat`
        raises."""
        rendering = self.chat_rendering(given)
        asked, result = advance(rendering, None)
        while asked is not None:
            asked, result = advance(rendering, self.render_chat(**asked))
        return result

    def template_input(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The variables of a template that another process renders. Raises InvalidArgument for arguments that are not
        the template's own."""
        own = given.get("arguments") or {}
        _check_arguments(own)
        special = self._require("chat").special_tokens_map
        return {**given, "arguments": {**{name: str(token) for name, token in special.items()}, **own}}

    def chat_rendering(self, given: Mapping[str, Any], template: str | None = None) -> ChatRendering:
        """The steps of `chat_text`, for the tokenizer's template or another: asks for the text that the template makes
        of what it yields, once or twice. For `advance`. Raises FailedPrecondition without a tokenizer."""
        beside = {name: given.get(name) for name in ("tools", "documents")}
        if template is None:
            template = str(self._require("chat").chat_template)
        messages = cast("list[Mapping[str, Any]]", given["messages"])
        if _DEVELOPER not in template and any(one["role"] == _DEVELOPER for one in messages):
            messages = [{**one, "role": "system"} if one["role"] == _DEVELOPER else one for one in messages]
            given = {**given, "messages": messages}
        arguments = given.get("arguments")
        controls, special, normalized = self._control_tokens(template)
        plain, in_plain, found, is_changed = "", list[str](), controls.contents, False
        if not (controls.are_in(messages) or controls.are_in(beside) or controls.are_in(arguments)):
            plain = yield given
            in_plain = controls.in_text(plain)
            found = tuple(dict.fromkeys(in_plain))
            is_changed = normalized is not None and normalized.num_in(plain) > len(in_plain)
        edges = Edges(found, template)
        # Roles are the caller's own words, and part of control tokens in some templates.
        texts = [{name: one for name, one in message.items() if name != "role"} for message in messages]
        if plain and not (is_changed or edges.are_in(texts) or edges.are_in(beside)):
            return plain
        marked = [
            {"role": one["role"], **(special if one["role"] == "assistant" else controls).marked(text, edges)}
            for one, text in zip(messages, texts, strict=True)
        ]
        fields: dict[str, Any] = {**given, **controls.marked(beside, edges), "messages": marked}
        fields["arguments"] = controls.marked(arguments)
        safe = controls.resolved((yield fields))
        if plain and not is_changed and safe.num_controls == len(in_plain) and safe.plain == plain:
            return plain
        return safe

    def _control_tokens_of(self, template: str) -> tuple[ControlTokens, ControlTokens, NormalizedControlTokens | None]:
        """The control tokens of a template: all, those that are special tokens, and all as they are in normalized
        texts, if the tokenizer normalizes."""
        named: Any = getattr(self._require("chat"), "chat_control_tokens", None)
        added = self._backend.get_added_tokens_decoder().values()
        special = [token.content for token in added if token.special]
        others = [token.content for token in added if not token.special and not token.content.isspace()]
        others = [one for one in others if (one in template if named is None else one in named)]
        known, normalizer = [*special, *others], self._backend.normalizer
        normalized = None if normalizer is None else NormalizedControlTokens(known, normalizer.normalize_str)
        return ControlTokens(known), ControlTokens(special), normalized

    def decode(self, token_ids: Sequence[int], *, keep_special: bool = False, field: str = "output.echo") -> str:
        """The text of a prompt. Raises FailedPrecondition without a tokenizer."""
        self._require(field)
        # In a batch the library gives the interpreter's lock back.
        return self._backend.decode_batch([list(token_ids)], skip_special_tokens=not keep_special)[0]

    def echo(self, prompt_ids: Sequence[int], *, keep_special: bool = False) -> str:
        """The text of a prompt in front of its completions, without a character that it leaves unfinished: they begin
        with that. Raises FailedPrecondition without a tokenizer."""
        text = self.decode(prompt_ids, keep_special=keep_special)
        detokenizer = self.new_detokenizer(prompt_ids, keep_special=keep_special)
        return text if detokenizer is None else text.removesuffix(detokenizer.take_unfinished())

    def token_text(self, token_id: int) -> str:
        """A token's text within a text, for logprobs, as `Vocabulary.text`. Empty without a tokenizer."""
        return "" if self._vocabulary is None else self._vocabulary.text(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """The token's bytes, as `Vocabulary.utf8` gives them. Empty without a tokenizer."""
        return b"" if self._vocabulary is None else self._vocabulary.utf8(token_id)

    def is_special(self, token_id: int) -> bool:
        return self._vocabulary is not None and self._vocabulary.is_special(token_id)

    def new_detokenizer(
        self, prompt_ids: Sequence[int], dropped_ids: frozenset[int] = frozenset(), *, keep_special: bool = False
    ) -> Detokenizer | None:
        """A detokenizer for one completion; None without a tokenizer. `dropped_ids`: stop tokens whose text is not
        wanted."""
        if self._vocabulary is None:
            return None
        return new_detokenizer(self._all_visible if keep_special else self._vocabulary, prompt_ids, dropped_ids)

    def new_stop_matcher(
        self, stopping: StoppingParams, ending_ids: Collection[int] = frozenset()
    ) -> StopMatcher | None:
        """A stop matcher for one completion; None if it has no stop strings. `ending_ids`: tokens by which the engine
        itself ends it. Raises FailedPrecondition without a tokenizer."""
        if not any(stopping.stop):
            return None
        self._require("stopping.stop")
        ids = {stop: self._backend.token_to_id(stop) for stop in stopping.stop}
        return StopMatcher(
            stopping.stop,
            include_stop=stopping.include_stop,
            min_tokens=stopping.min_tokens,
            stops_of_tokens={
                token_id: stop
                for stop, token_id in ids.items()
                if token_id is not None and token_id not in ending_ids and self.is_special(token_id)
            },
        )

    def _require(self, field: str) -> PreTrainedTokenizerFast:
        if self._tokenizer is None:
            raise FailedPrecondition(f"{self._missing_reason}; send token_ids, and expect token ids", field=field)
        return self._tokenizer
