"""The base model's tokenizer: texts and chats to token ids and back.

Wraps a fast Transformers tokenizer. Without one, requests and answers in token ids work, and everything that needs
text fails with a typed error. Safe to use from several threads: only caches change after construction.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

from loraplex_contracts.errors import FailedPrecondition, InvalidArgument, NoChatTemplate, UnsupportedModel
from loraplex_contracts.request import StoppingParams
from loraplex_server.text.detokenizer import Detokenizer, StopMatcher, new_detokenizer
from loraplex_server.text.vocabulary import Vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_logger = logging.getLogger(__name__)

# Shorter texts take at most some 10 ms, which is not worth a thread.
SHORT_CHARS: Final = 10_000

# A model directory with none of these has no tokenizer.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
)


def num_bytes_of(text: str) -> int:
    """As UTF-8. Raises InvalidArgument on text that is not Unicode."""
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidArgument("the text holds halves of surrogate pairs; send UTF-8", field="text") from error


class TextTokenizer:
    """Encodes, decodes, and makes the detokenizer and stop matcher of each completion."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast | None, *, missing_reason: str = "") -> None:
        self._tokenizer = tokenizer
        self._missing_reason = missing_reason or "the base model has no tokenizer"
        self._vocabulary: Vocabulary | None = None
        if tokenizer is not None:
            backend = tokenizer.backend_tokenizer
            # Files may carry settings of training. Set once: the library refuses changes while another thread encodes.
            backend.no_truncation()
            backend.no_padding()
            self._backend = backend
            self._vocabulary = Vocabulary(backend)

    @classmethod
    def from_pretrained(cls, model: str, *, revision: str | None = None) -> TextTokenizer:
        """The tokenizer of a directory or Hub repository. Raises UnsupportedModel on one that cannot be read."""
        from transformers import AutoTokenizer, PreTrainedTokenizerFast  # late: the process for long texts has neither

        path = Path(model)
        if path.is_dir() and not any((path / name).exists() for name in _TOKENIZER_FILES):
            return cls(None)
        try:
            loaded = AutoTokenizer.from_pretrained(model, revision=revision, trust_remote_code=False)
        except Exception as error:  # the library raises errors of any type
            if path.is_dir():
                reason = str(error).strip().split("\n", 1)[0]
                raise UnsupportedModel(f"the tokenizer in {model} cannot be read: {reason}") from error
            _logger.warning("no tokenizer for %s, serving token ids only: %s", model, error)
            return cls(None)
        if not isinstance(loaded, PreTrainedTokenizerFast):
            _logger.warning("%s is not a fast tokenizer; serving token ids only", type(loaded).__name__)
            return cls(None, missing_reason=f"the base model's tokenizer ({type(loaded).__name__}) is not a fast one")
        return cls(loaded)

    @property
    def has_text(self) -> bool:
        """Whether there is a tokenizer at all."""
        return self._tokenizer is not None

    @property
    def vocabulary(self) -> Vocabulary | None:
        """Its tokens one by one; None without a tokenizer."""
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
        return self._tokenizer is not None and bool(self._tokenizer.chat_template)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The tokenizer's end-of-sequence token. A model's generation config may name more."""
        eos = cast("int | None", None if self._tokenizer is None else self._tokenizer.eos_token_id)
        return frozenset() if eos is None else frozenset((eos,))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Raises FailedPrecondition without a tokenizer, InvalidArgument on text that is not Unicode.

        Other threads go on while a long text is tokenized."""
        self._require("text")
        num_bytes_of(text)
        if len(text) < SHORT_CHARS:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        # In a batch, even of one, the library gives the interpreter's lock back.
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def render_chat(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        """The template's text, special tokens included. Raises NoChatTemplate, or InvalidArgument if the template
        refuses."""
        tokenizer = self._require("chat")
        if not tokenizer.chat_template:
            raise NoChatTemplate("the base model has no chat template; send text or token_ids instead", field="chat")
        chat = [dict(message) for message in messages]
        try:
            rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=add_generation_prompt)
        except Exception as error:  # a template is a program, and may raise anything
            reason = str(error).strip().split("\n", 1)[0]
            raise InvalidArgument(f"the chat template refuses these messages: {reason}", field="chat") from error
        return cast(str, rendered)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a prompt, special tokens left out. Raises FailedPrecondition without a tokenizer."""
        self._require("output.echo")
        # In a batch the library gives the interpreter's lock back.
        return self._backend.decode_batch([list(token_ids)], skip_special_tokens=True)[0]

    def token_text(self, token_id: int) -> str:
        """A token's text within a text, for logprobs, as `Vocabulary.text`. Empty without a tokenizer."""
        return "" if self._vocabulary is None else self._vocabulary.text(token_id)

    def new_detokenizer(
        self, prompt_ids: Sequence[int], dropped_ids: frozenset[int] = frozenset()
    ) -> Detokenizer | None:
        """For one completion; None without a tokenizer. `dropped_ids`: stop tokens whose text is not wanted."""
        return None if self._vocabulary is None else new_detokenizer(self._vocabulary, prompt_ids, dropped_ids)

    def new_stop_matcher(self, stopping: StoppingParams) -> StopMatcher | None:
        """For one completion; None if it has no stop strings. Raises FailedPrecondition without a tokenizer."""
        if not any(stopping.stop):
            return None
        self._require("stopping.stop")
        return StopMatcher(stopping.stop, include_stop=stopping.include_stop, min_tokens=stopping.min_tokens)

    def _require(self, field: str) -> PreTrainedTokenizerFast:
        if self._tokenizer is None:
            raise FailedPrecondition(f"{self._missing_reason}; send token_ids, and expect token ids", field=field)
        return self._tokenizer
