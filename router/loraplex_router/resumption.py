"""Resumption of a stream whose worker was lost, by replay on another worker.

The other worker gets the whole request again, with the seed that the first one used. What the client already has is
compared with the new answer and left out of it: the stream goes on where the same adapter gives the same tokens again,
and ends with the loss where it does not.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from loraplex_contracts.errors import WorkerLost
from loraplex_proto.v1 import inference_pb2
from loraplex_router.upstream import FailureKind, UpstreamFailure

# Fields of a stream's first message, which the client has.
_FIRST: Final = ("request_id", "adapter_digest", "prompt_logprobs", "prompt_tokens", "seed")


def may_resume(request: inference_pb2.GenerateRequest) -> bool:
    """True where an answer shows enough to be compared: one completion, with its tokens, and without calls of tools,
    whose ids are new."""
    output = request.output
    has_tools = output.parse_chat and bool(request.chat.tools_json)
    return request.n <= 1 and not output.omit_token_ids and not has_tools


class Resumption:
    """Owns what the client of one stream has. Every message of a worker passes through `rest_of`."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw  # the request, from the first message on with its seed
        self.loss: UpstreamFailure | None = None  # what the client is told where nothing goes on
        self.has_ended = False  # the client has the whole answer
        self._token_ids: list[int] = []
        self._num_chars = Counter[str]()  # by the field that has them
        self._digest: str | None = None
        # How much of the answer has come from the worker that gives it now.
        self._num_tokens_seen = 0
        self._num_chars_seen = Counter[str]()

    def restart(self, loss: UpstreamFailure) -> None:
        """Notes that the worker is gone, and that another one starts over."""
        if self.loss is None or loss.kind is FailureKind.LOST:
            self.loss = loss
        self._num_tokens_seen = 0
        self._num_chars_seen.clear()

    def rest_of(self, message: bytes) -> bytes:
        """Returns the part of a message that the client lacks; empty where it has all. Raises WorkerLost for another
        answer."""
        chunk = inference_pb2.GenerateStreamResponse.FromString(message)
        self.has_ended |= bool(chunk.finish_reason)
        self._take_first(chunk)
        self._take_tokens(chunk)
        chunk.text_delta = self._unsent("text", chunk.text_delta)
        for delta in chunk.deltas:
            if delta.HasField("content"):
                delta.content = self._unsent("content", delta.content)
            elif delta.HasField("reasoning"):
                delta.reasoning = self._unsent("reasoning", delta.reasoning)
        if self.loss is None:
            return message
        for field in _FIRST:
            chunk.ClearField(field)
        kept = [one for one in chunk.deltas if one.content or one.reasoning or one.HasField("tool_call")]
        del chunk.deltas[:]
        chunk.deltas.extend(kept)
        is_news = chunk.token_ids or chunk.text_delta or kept or chunk.finish_reason
        return chunk.SerializeToString() if is_news else b""

    def _take_first(self, chunk: inference_pb2.GenerateStreamResponse) -> None:
        if self._digest is None:
            self._digest = chunk.adapter_digest
            if chunk.HasField("seed"):
                # Two serialized messages in a row are their merge.
                sampling = inference_pb2.Sampling(seed=chunk.seed)
                self.raw += inference_pb2.GenerateRequest(sampling=sampling).SerializeToString()
        elif not self._num_tokens_seen and chunk.request_id and chunk.adapter_digest != self._digest:
            raise WorkerLost("the other worker has another version of the adapter")

    def _take_tokens(self, chunk: inference_pb2.GenerateStreamResponse) -> None:
        """Leaves in the message the tokens that the client lacks."""
        start, given = self._num_tokens_seen, list(chunk.token_ids)
        known = self._token_ids[start : start + len(given)]
        self._num_tokens_seen += len(given)
        is_short = bool(chunk.finish_reason) and self._num_tokens_seen < len(self._token_ids)
        if given[: len(known)] != known or is_short:
            raise WorkerLost("the other worker gives another answer")
        self._token_ids += given[len(known) :]
        del chunk.token_ids[: len(known)]
        del chunk.logprobs[: len(known)]

    def _unsent(self, field: str, text: str) -> str:
        num_known = max(0, self._num_chars[field] - self._num_chars_seen[field])
        self._num_chars_seen[field] += len(text)
        rest = text[num_known:]
        self._num_chars[field] += len(rest)
        return rest
