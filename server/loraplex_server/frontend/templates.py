"""Templates of a request's chat: the request's own, its adapter's or the base model's.

The base model's is trusted and rendered here, except for long chats. Those, and the other templates, are rendered in a
child process with limits. An adapter's templates are those of the version that it is bound to: the engine says which
that is, and checks it when the request comes.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Any, Final

from loraplex_contracts.adapters import OWN_ORIGIN, AdapterId, AdapterOrigin, AdapterVersion
from loraplex_contracts.errors import AdapterInvalid, FailedPrecondition, InvalidArgument, LoraplexError
from loraplex_server.frontend.sandbox import Sandbox, TemplateFault, UserReader
from loraplex_server.frontend.tokenizing import Tokenizing
from loraplex_server.text.call_forms import PLAIN
from loraplex_server.text.control_tokens import SafeText
from loraplex_server.text.tokenizer import ChatRendering, advance

if TYPE_CHECKING:  # the process that tokenizes long texts loads no torch
    from loraplex_server.engine.client import EngineClient
    from loraplex_server.text.response_template import ResponseFormat

MAX_VERSIONS: Final = 1024  # of adapters, whose templates are remembered
# Longer chats are rendered in a process: a template may look at all messages for each of them.
LONG_CHAT_BYTES: Final = 1 << 20
MANY_MESSAGES: Final = 1024
TRUSTED_CALL_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class UserTemplate:
    """A chat template that is rendered in a process: an adapter's, a request's, or the base model's for a long chat."""

    text: str
    adapter_id: str = ""
    is_base: bool = False

    def error(self, fault: TemplateFault) -> LoraplexError:
        if self.is_base:
            what = "refuses these messages" if fault.is_refusal else "cannot render so long a chat"
            more = "" if fault.is_refusal else "; send fewer messages, or shorter ones"
            return InvalidArgument(f"the chat template {what}: {fault.reason}{more}", field="chat")
        if not self.adapter_id:
            what = "refuses these messages" if fault.is_refusal else "cannot be used"
            return InvalidArgument(f"`chat.template` {what}: {fault.reason}", field="chat.template")
        whose = f"the chat template of adapter {self.adapter_id!a}"
        if fault.is_refusal:
            return InvalidArgument(f"{whose} refuses these messages: {fault.reason}", field="chat")
        return AdapterInvalid(f"{whose} cannot be used: {fault.reason}", resource=self.adapter_id)


class Templates:
    """Chooses and renders templates. Owns a process for requests' templates and another one for adapters', where they
    are allowed, and one for long chats, from the first of them on. Call `close` at the end."""

    def __init__(
        self,
        tokenizing: Tokenizing,
        engine: EngineClient | None = None,
        *,
        of_requests: bool = False,
        of_adapters: bool = False,
        format_of: Callable[[str | None], ResponseFormat | None] = lambda chat_template: None,
    ) -> None:
        """`format_of`: the response format of the base model (None), or of a chat template by its text."""
        self._tokenizing = tokenizing
        self.trusted_format = lru_cache(maxsize=64)(format_of)
        self._engine = engine
        self._of_requests = Sandbox() if of_requests else None
        self._of_adapters = Sandbox() if of_adapters else None
        self._of_long_chats = Sandbox(call_s=TRUSTED_CALL_S)
        self._versions: OrderedDict[tuple[str, str], AdapterVersion] = OrderedDict()  # by id and digest

    def prepare(self) -> None:
        """Starts the processes, beside the event loop."""
        for sandbox in (self._of_requests, self._of_adapters):
            if sandbox is not None:
                sandbox.prepare()

    async def close(self) -> None:
        for sandbox in (self._of_requests, self._of_adapters, self._of_long_chats):
            if sandbox is not None:
                await sandbox.close()

    async def version(self, adapter_id: str, origin: AdapterOrigin = OWN_ORIGIN) -> AdapterVersion | None:
        """The adapter's present version; None of the base model, and where adapters' templates are not used. With the
        caller's own `origin` the engine is asked each time. Raises as a request for the adapter would."""
        if self._engine is None or self._of_adapters is None or not adapter_id:
            return None
        return await self._present(self._engine, adapter_id, origin)

    async def check_adapter(self, adapter_id: str, origin: AdapterOrigin = OWN_ORIGIN) -> None:
        """Raises what `version` raises where the adapter cannot be used, also where adapters' templates are not
        used."""
        if self._engine is not None and adapter_id:
            await self._present(self._engine, adapter_id, origin)

    async def _present(self, engine: EngineClient, adapter_id: str, origin: AdapterOrigin) -> AdapterVersion:
        if origin.source:
            return await engine.adapter_version(AdapterId(adapter_id), origin)
        rows = engine.state.listing.rows_of(adapter_id)
        digest = next((row.digest for row in rows if row.digest and row.state != "draining"), "")
        found = self._versions.get((adapter_id, digest))
        if found is None:
            found = await engine.adapter_version(AdapterId(adapter_id))
            self._versions[adapter_id, found.digest] = found
        self._versions.move_to_end((adapter_id, found.digest))
        if len(self._versions) > MAX_VERSIONS:
            self._versions.popitem(last=False)
        return found

    def choose(
        self,
        requested: str,
        version: AdapterVersion | None,
        *,
        has_tools: bool,
        num_bytes: int = 0,
        num_messages: int = 1,
    ) -> UserTemplate | None:
        """The template that a process renders; None for the base model's where the chat is not long. Raises
        FailedPrecondition for a template in a request that may have none."""
        if requested:
            if self._of_requests is None:
                raise FailedPrecondition(
                    "`chat.template` is not allowed: this server renders no templates of requests; leave it out, or "
                    "start the server with --request-templates",
                    field="chat.template",
                )
            return UserTemplate(requested)
        base = self._tokenizing.tokenizer.chat_template_for(has_tools=has_tools)
        if version is not None and version.templates is not None:
            own = version.templates.chat_for(has_tools=has_tools)
            if own and own != base:  # it is often a copy of the base model's
                return UserTemplate(own, version.adapter_id)
        is_long = num_bytes > LONG_CHAT_BYTES or num_messages > MANY_MESSAGES
        return UserTemplate(base, is_base=True) if base and is_long else None

    def response_format(self, version: AdapterVersion | None) -> ResponseFormat | str | None:
        """The template that reads answers: a trusted one, or an adapter's own (JSON)."""
        base = self.trusted_format(None)
        if version is None or version.templates is None:
            return base
        if own := version.templates.response:
            return _trusted(own, base) or own
        chat = version.templates.chat
        return base if not chat or chat == self._tokenizing.tokenizer.chat_template else self.trusted_format(chat)

    def new_user_reader(self, version: AdapterVersion, tenant: str, how: Mapping[str, Any]) -> UserReader:
        """A reader of a completion, by the adapter's own response template."""
        assert self._of_adapters is not None, "there are versions"
        return UserReader(self._of_adapters, (tenant, version.adapter_id), how)

    async def render(
        self, template: UserTemplate, read: Callable[[], Mapping[str, Any]], num_bytes: int, tenant: str = ""
    ) -> str | SafeText:
        """The text that a template makes; tenants take turns. `read` gives the parameters of
        `TextTokenizer.render_chat`, in about `num_bytes`. Raises InvalidArgument, AdapterInvalid, QueueFull,
        Unavailable, FailedPrecondition without a tokenizer."""
        tokenizer = self._tokenizing.tokenizer
        of_users = self._of_adapters if template.adapter_id else self._of_requests
        sandbox = self._of_long_chats if template.is_base else of_users
        assert sandbox is not None, "the template was chosen here"

        def first() -> tuple[ChatRendering, Mapping[str, Any] | None, str | SafeText]:
            rendering = tokenizer.chat_rendering(read(), template.text)
            return rendering, *advance(rendering, None)

        rendering, asked, result = await self._tokenizing.off_loop(num_bytes, first)
        while asked is not None:
            given = tokenizer.template_input(asked)
            try:
                text = await sandbox.render((tenant, template.adapter_id), template.text, given, num_bytes)
            except TemplateFault as fault:
                raise template.error(fault) from fault
            asked, result = await self._tokenizing.off_loop(len(text), partial(advance, rendering, text))
        return result


@cache
def plain_format() -> ResponseFormat:
    """The format of calls that are demanded of a model whose own form is not known."""
    from loraplex_server.text.response_template import ResponseFormat  # late: imports Transformers

    return ResponseFormat.named(PLAIN)


@lru_cache(maxsize=256)
def _trusted(own: str, base: ResponseFormat | None) -> ResponseFormat | None:
    """The trusted format with the response template `own`, where that is the base model's or one of Loraplex's; else
    None."""
    from loraplex_server.text.response_template import ResponseFormat  # late: imports Transformers

    template = json.loads(own)
    known = (*(() if base is None else (base,)), *ResponseFormat.all_named())
    return next((one for one in known if one.template == template), None)
