"""Forms of answers: how a chat is read, and the grammar of its calls."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Final

from loraplex_contracts.adapters import AdapterVersion
from loraplex_contracts.errors import InvalidArgument
from loraplex_contracts.request import Grammar
from loraplex_proto.v1 import inference_pb2
from loraplex_runtime import auth
from loraplex_server.frontend.templates import Templates, plain_format
from loraplex_server.frontend.tokenizing import Tokenizing
from loraplex_server.grammars import calls
from loraplex_server.grpc import protobuf
from loraplex_server.text.call_forms import FORMS, PLAIN, CallForm
from loraplex_server.text.call_reading import form_of
from loraplex_server.text.responses import ResponseParsing

if TYPE_CHECKING:  # imports Transformers
    from loraplex_server.text.response_template import ResponseFormat

PROMPT_END_TOKENS: Final = 1 << 12  # in which the answer's beginning is looked for


class AnswerForms:
    """Chooses the parsing and the grammar of answers, by the request and by the model's or its adapter's template."""

    def __init__(self, tokenizing: Tokenizing, templates: Templates, eos_token_ids: Collection[int]) -> None:
        self._tokenizing = tokenizing
        self._templates = templates
        vocabulary = tokenizing.tokenizer.vocabulary
        self._special_ids = {} if vocabulary is None else vocabulary.special_ids
        plain_ids = {} if vocabulary is None else vocabulary.plain_mark_ids
        self._mark_tokens = calls.MarkTokens(self._special_ids, plain_ids)
        self._ends = tuple(text for text, one in self._special_ids.items() if one in eos_token_ids)
        self._form_of = lru_cache(maxsize=64)(partial(form_of, ends=self._ends))
        self._form_of(templates.trusted_format(None))

    async def of(
        self,
        message: inference_pb2.GenerateRequest,
        prompt: tuple[int, ...],
        version: AdapterVersion | None,
        grammar: Grammar | None,
    ) -> tuple[ResponseParsing | None, Grammar | None]:
        """The parsing of the request's answers, None where none is asked for, and their grammar: that of their calls
        where there is one, else `grammar`, the request's own. Raises InvalidArgument and AdapterInvalid."""
        wants_parts = message.output.parse_chat
        is_demanded = message.chat.tool_choice.WhichOneof("kind") in ("required", "name")
        if not wants_parts and not is_demanded:
            return None, grammar
        parsing = await self._parsing(message, prompt, version)
        answers_json = message.grammar.WhichOneof("kind") in ("json_schema", "json_object")
        if is_demanded or (parsing.with_calls and (grammar is None or answers_json)):
            form, parsing = await self._call_form(message, parsing, prompt, version, is_demanded=is_demanded)
            if form is not None:
                grammar = await self._call_grammar(message, parsing, form, grammar) or grammar
        return parsing if wants_parts else None, grammar

    async def _parsing(
        self,
        message: inference_pb2.GenerateRequest,
        prompt: tuple[int, ...],
        version: AdapterVersion | None,
        format: ResponseFormat | None = None,
    ) -> ResponseParsing:
        """The parsing of the answer by `format`, else as the model or its adapter marks its answers. Raises
        InvalidArgument for tools that are not a list of objects."""
        end = await self._tokenizing.decode(prompt[-PROMPT_END_TOKENS:], keep_special=True, field="output.parse_chat")
        chosen = format or self._templates.response_format(version)
        tenant = auth.current_identity().tenant
        new_reader = None if version is None else partial(self._templates.new_user_reader, version, tenant)
        read = partial(protobuf.parsing_of, message, chosen, end, self._special_ids, new_reader, self._ends)
        return await self._tokenizing.off_loop(len(message.chat.tools_json), read)

    async def _call_form(
        self,
        message: inference_pb2.GenerateRequest,
        parsing: ResponseParsing,
        prompt: tuple[int, ...],
        version: AdapterVersion | None,
        *,
        is_demanded: bool,
    ) -> tuple[CallForm | None, ResponseParsing]:
        """The form of calls that a grammar is made of, and how answers in it are read; no form where calls are neither
        demanded, nor those of strict tools, nor come in the place of an answer with a grammar. Raises
        AdapterInvalid."""
        has_grammar = message.grammar.WhichOneof("kind") is not None
        if not is_demanded and not has_grammar and not calls.has_strict(parsing.tools):
            return None, parsing
        if parsing.new_user_reader is None:
            form = self._form_of(parsing.format)
        else:
            form, closing = await parsing.new_user_reader().call_form()
            parsing = replace(parsing, user_closing=closing)
        if form is None and is_demanded:
            return FORMS[PLAIN], await self._parsing(message, prompt, version, plain_format())
        return form, parsing

    async def _call_grammar(
        self,
        message: inference_pb2.GenerateRequest,
        parsing: ResponseParsing,
        form: CallForm,
        answer: Grammar | None,
    ) -> Grammar | None:
        """The grammar of the calls that are demanded, else of an answer in JSON or calls, else of the calls of strict
        tools; None where these cannot be told from the rest of the answer. Raises InvalidArgument."""
        choice = message.chat.tool_choice
        to_grammar: Callable[[], Grammar | None]
        if choice.WhichOneof("kind") in ("required", "name"):
            to_grammar = partial(calls.tool_calls, form, parsing, self._mark_tokens, choice.name)
        elif answer is not None:
            to_grammar = partial(calls.answer_or_calls, form, parsing, self._mark_tokens, answer)
        elif not form.mark:
            return None
        else:
            to_grammar = partial(calls.strict_calls, form, parsing, self._mark_tokens)
        grammar = await self._tokenizing.off_loop(len(message.chat.tools_json), to_grammar)
        if message.stopping.ignore_eos:
            raise InvalidArgument(
                "`stopping.ignore_eos` would go on behind the end of calls that must hold; leave it out",
                field="stopping.ignore_eos",
            )
        return grammar
