"""Chats that keep their history, blocking and for asyncio.

A turn enters the history when its answer is complete: one that fails, or whose stream is left early, does not.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Unpack, cast

from loraplex.types import Chunk, GenerateOptions, Generation, Message
from loraplex_contracts.errors import InvalidArgument


class History:
    """Owner of a chat's messages and of the options of its turns. `options` may be changed between turns. `generate`
    and `stream` are the client's."""

    def __init__(
        self,
        generate: Callable[..., Any],
        stream: Callable[..., Any],
        system: str | None,
        options: GenerateOptions,
    ) -> None:
        self._generate = generate
        self._stream = stream
        self._first: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self._first += options.pop("messages", None) or ()
        self.options = options
        self.messages = [*self._first]

    def __repr__(self) -> str:
        turns = sum(one.get("role") == "user" for one in self.messages)
        return f"{type(self).__name__}({turns} turns, {len(self.messages)} messages, options={self.options!r})"

    def reset(self) -> None:
        """Goes back to what the chat began with."""
        self.messages = [*self._first]

    def _request(self, message: str | Message, options: GenerateOptions) -> tuple[Message, GenerateOptions]:
        """The new message, and the options of its turn. Raises InvalidArgument where these have other messages."""
        if options.get("messages") is not None:
            raise InvalidArgument("a turn has the messages of its chat; change `chat.messages`", field="messages")
        new: Message = {"role": "user", "content": message} if isinstance(message, str) else message
        whole: Any = {**self.options, **options, "messages": [*self.messages, new]}
        return new, cast("GenerateOptions", whole)

    def _answered(self, new: Message, text: str, answer: Message | None) -> None:
        self.messages += [new, answer or {"role": "assistant", "content": text}]


class Turn:
    """Parts of one streamed answer, until it is complete. Of several completions it is the first."""

    def __init__(self, complete: Callable[[str, Message | None], None]) -> None:
        self._complete = complete
        self._texts: list[str] = []

    def add(self, chunk: Chunk) -> Chunk:
        if chunk.index == 0:
            self._texts.append(chunk.text)
            if chunk.finish_reason is not None:
                self._complete("".join(self._texts), chunk.message)
        return chunk


class Chat(History):
    """A conversation: `client.chat("Answer in one sentence.")`. `messages` is its history, `options` those of all
    turns."""

    def send(self, message: str | Message, **options: Unpack[GenerateOptions]) -> Generation:
        """Says the next thing and waits for the answer. A text is the user's; a `Message` may answer a tool call.
        `options` are of this turn alone."""
        new, whole = self._request(message, options)
        answer: Generation = self._generate(**whole)
        self._answered(new, answer.text, answer.message)
        return answer

    def stream(self, message: str | Message, **options: Unpack[GenerateOptions]) -> Iterator[Chunk]:
        """Does what `send` does, and gives the answer as it is made."""
        new, whole = self._request(message, options)
        turn = Turn(lambda text, answer: self._answered(new, text, answer))
        with self._stream(**whole) as chunks:
            for chunk in chunks:
                yield turn.add(chunk)


class AsyncChat(History):
    """`loraplex.Chat` for asyncio."""

    async def send(self, message: str | Message, **options: Unpack[GenerateOptions]) -> Generation:
        """Says the next thing and waits for the answer. A text is the user's; a `Message` may answer a tool call.
        `options` are of this turn alone."""
        new, whole = self._request(message, options)
        answer: Generation = await self._generate(**whole)
        self._answered(new, answer.text, answer.message)
        return answer

    async def stream(self, message: str | Message, **options: Unpack[GenerateOptions]) -> AsyncIterator[Chunk]:
        """Does what `send` does, and gives the answer as it is made."""
        new, whole = self._request(message, options)
        turn = Turn(lambda text, answer: self._answered(new, text, answer))
        async with self._stream(**whole) as chunks:
            async for chunk in chunks:
                yield turn.add(chunk)
