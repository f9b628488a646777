"""Prompts of requests as token ids: text, chat or ids, and truncation."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Generator, Sequence
from functools import partial
from typing import Any

from loraplex_contracts.adapters import OWN_ORIGIN, AdapterOrigin, AdapterVersion
from loraplex_contracts.errors import DeadlineExceeded
from loraplex_contracts.load import Load
from loraplex_proto.status import answer_within_s
from loraplex_proto.v1 import inference_pb2, pooling_pb2
from loraplex_proto.validate import PoolingRequest
from loraplex_runtime import auth
from loraplex_server.frontend.templates import Templates
from loraplex_server.frontend.tokenizing import Tokenizing
from loraplex_server.grpc import protobuf
from loraplex_server.text.control_tokens import SafeText
from loraplex_server.text.tokenizer import Truncation

Context = Any  # grpc.aio.ServicerContext

IDS_AT_ONCE = 1 << 14  # copied in one step
MESSAGE_CHARS = 32  # a chat template's text around a message, and its rendering

Prompt = inference_pb2.GenerateRequest | pooling_pb2.PoolingInput


class Prompts:
    """Makes token ids of messages that have been validated."""

    def __init__(self, tokenizing: Tokenizing, templates: Templates) -> None:
        self._tokenizing = tokenizing
        self._templates = templates

    async def version(
        self, message: Prompt | inference_pb2.TokenizeRequest, adapter_id: str, origin: AdapterOrigin = OWN_ORIGIN
    ) -> AdapterVersion | None:
        """The adapter's version whose templates make the prompt; None where none do."""
        return await self._templates.version(adapter_id, origin) if message.WhichOneof("input") == "chat" else None

    async def ids(
        self,
        message: Prompt,
        truncation: Truncation | None,
        *,
        special: bool = True,
        version: AdapterVersion | None = None,
    ) -> tuple[int, ...]:
        """The token ids of a prompt. `special`: with the tokenizer's own special tokens around a text. Raises what
        `Tokenizing.encode` raises, and `Templates.render`."""
        if message.WhichOneof("input") == "token_ids":
            ids = message.token_ids.ids
            kept = ids if truncation is None else truncation.cut(ids)
            return await self._tokenizing.off_loop(len(kept), partial(copied_ids, kept))
        text, may_be_special = await self.text(message, version)
        return tuple(await self._tokenizing.encode(text, special=special and may_be_special, truncation=truncation))

    async def text(
        self, message: Prompt | inference_pb2.TokenizeRequest, version: AdapterVersion | None = None
    ) -> tuple[str | SafeText, bool]:
        """The text to tokenize, and whether it needs special tokens: a chat's template writes them."""
        if message.WhichOneof("input") != "chat":
            return message.text, True
        chat = message.chat
        num_bytes = chat.ByteSize() + MESSAGE_CHARS * len(chat.messages)
        has_tools, num_messages = bool(chat.tools_json), len(chat.messages)
        template = self._templates.choose(
            chat.template, version, has_tools=has_tools, num_bytes=num_bytes, num_messages=num_messages
        )
        if template is not None:
            read, tenant = partial(protobuf.template_input, chat), auth.current_identity().tenant
            return await self._templates.render(template, read, num_bytes, tenant), False
        return await self._tokenizing.off_loop(num_bytes, partial(self._rendered, chat)), False

    async def pair_ids(
        self, first: str, second: str, truncation: Truncation | None, *, special: bool
    ) -> tuple[int, ...]:
        """The token ids of two texts as one prompt. Raises what `Tokenizing.encode_pair` raises."""
        return tuple(await self._tokenizing.encode_pair(first, second, special=special, truncation=truncation))

    async def offsets(self, text: str, truncation: Truncation | None, *, special: bool) -> Sequence[tuple[int, int]]:
        """Begin and end of each token of a text, in characters. A long text is tokenized apart, as for `ids`."""
        raw = await self._tokenizing.tokenize(
            text, protobuf.tokenize_response, special=special, with_offsets=True, truncation=truncation
        )
        found = inference_pb2.TokenizeResponse.FromString(raw)
        return list(zip(found.starts, found.ends, strict=True))

    def truncation(self, message: inference_pb2.GenerateRequest | PoolingRequest, num_new: int) -> Truncation | None:
        """The truncation of a request's prompt that leaves room for `num_new` tokens; None where the prompt is not
        truncated."""
        if not message.HasField("truncate_prompt"):
            return None
        wanted = message.truncate_prompt
        room = max(1, self._tokenizing.limits.max_context_tokens - num_new)
        return Truncation(wanted.max_tokens or room, wanted.keep_start)

    def _rendered(self, chat: inference_pb2.Chat) -> str | SafeText:
        return self._tokenizing.tokenizer.chat_text(protobuf.template_input(chat))


def refuse_early(
    load: Load, flow: tuple[str, str], priority: int, num_prompt: int, num_outputs: int, left_s: float | None
) -> None:
    """Raises Overloaded where the engine would refuse, by an estimate without tokens: refusing a flood must not take
    CPU time from the requests that are served. `flow`: the tenant and the name of its adapter."""
    if load.forecast is not None and priority <= 0:
        load.forecast.check(flow, num_prompt, num_outputs, left_s)


def seconds_left(context: Context) -> float | None:
    """Seconds in which to answer; None without a deadline. Raises DeadlineExceeded when none are left."""
    left_s: float | None = context.time_remaining()
    if left_s is None:
        return None
    if left_s <= 0:
        raise DeadlineExceeded("the deadline had passed when the request arrived; give it more time")
    return answer_within_s(left_s)


class Wait:
    """The thing that a call waits for, told at its deadline."""

    def __init__(self) -> None:
        self.before = "the text was tokenized"

    @contextlib.contextmanager
    def fetch(self) -> Generator[None]:
        """For a block that waits for the adapter. What is waited for stays where the block is cut off."""
        usual, self.before = self.before, "the adapter was fetched"
        yield
        self.before = usual


@contextlib.asynccontextmanager
async def within(left_s: float | None) -> AsyncGenerator[Wait]:
    """Raises DeadlineExceeded when the block takes longer."""
    timeout, wait = asyncio.timeout(left_s), Wait()
    try:
        async with timeout:
            yield wait
    except TimeoutError:
        if not timeout.expired():
            raise
        raise DeadlineExceeded(f"the deadline passed before {wait.before}; give it more time") from None


def copied_ids(ids: Sequence[int]) -> tuple[int, ...]:
    """The ids as a tuple, copied in steps, so that other threads run in between."""
    found: list[int] = []
    for start in range(0, len(ids), IDS_AT_ONCE):
        found += ids[start : start + IDS_AT_ONCE]
    return tuple(found)
