"""Answers of the wire as OpenAI's, whole and in chunks. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from loraplex_proto import __version__
from loraplex_proto.v1 import inference_pb2 as pb
from loraplex_router.http.openai import Job

_FINISH_REASONS: Final = {
    pb.FINISH_REASON_EOS: "stop",
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
}
_MIN_LOGPROB: Final = -9999.0  # for minus infinity, which JSON cannot write


def error_event(content: dict[str, Any]) -> bytes:
    return _event(content)


def fingerprint(digest: str) -> str:
    """Changes with the server's version and the adapter's content."""
    return f"lpx-{__version__}-{digest[:12] or 'base'}"


def response_of(job: Job, answers: Sequence[pb.GenerateResponse]) -> dict[str, Any]:
    """The body of an answer that is not streamed."""
    tally = Tally()
    choices: list[dict[str, Any]] = []
    for prompt, answer in enumerate(answers):
        tally.add_answer(answer)
        for completion in sorted(answer.completions, key=lambda one: one.index):
            choice = _choice(job, prompt, completion.index)
            text = completion.text
            if job.is_chat:
                choice["message"] = {"role": "assistant", "content": text, "refusal": None}
            else:
                choice["text"] = text
            rows = Logprobs(job)
            if job.echo:
                rows.begin(text, answer.prompt_logprobs, completion.logprobs)
            choice["logprobs"] = rows.add(completion.logprobs)
            _end(choice, completion)
            if job.with_token_ids:
                choice["token_ids"] = list(completion.token_ids)
                choice["prompt_token_ids"] = list(job.requests[prompt].token_ids.ids) or None
            choices.append(choice)
    head = _head(job, "chat.completion" if job.is_chat else "text_completion", tally.digest)
    return {**head, "choices": choices, "usage": tally.usage(), "loraplex": tally.own(job)}


def _head(job: Job, kind: str, digest: str) -> dict[str, Any]:
    return {
        "id": f"{'chatcmpl' if job.is_chat else 'cmpl'}-{job.request_id}",
        "object": kind,
        "created": job.created,
        "model": job.model,
        "system_fingerprint": fingerprint(digest),
    }


def _choice(job: Job, prompt: int, index: int) -> dict[str, Any]:
    return {"index": prompt * job.n + index}


def _end(choice: dict[str, Any], completion: pb.Completion | pb.GenerateStreamResponse) -> None:
    choice["finish_reason"] = _FINISH_REASONS.get(completion.finish_reason)
    choice["stop_reason"] = None
    if completion.HasField("stop_string"):
        choice["stop_reason"] = completion.stop_string
    elif completion.HasField("stop_token_id"):
        choice["stop_reason"] = completion.stop_token_id


@dataclass(slots=True)
class Tally:
    """Tokens, drafts and times of all prompts of a request."""

    digest: str = ""
    prompt_tokens: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])  # and cached ones
    completion_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    steps: int = 0
    proposers: dict[str, dict[str, int]] = field(default_factory=dict[str, dict[str, int]])
    queue_s: float = 0.0
    first_token_s: float = 0.0
    total_s: float = 0.0

    def add_answer(self, answer: pb.GenerateResponse) -> None:
        self.digest = answer.adapter_digest or self.digest
        self._add(len(self.prompt_tokens), answer.usage, answer.timings)

    def add_end(self, prompt: int, chunk: pb.GenerateStreamResponse) -> None:
        """The last chunk of a completion."""
        self._add(prompt, chunk.usage, chunk.timings)

    def _add(self, prompt: int, usage: pb.Usage, timings: pb.Timings) -> None:
        of_prompt = self.prompt_tokens.get(prompt, (0, 0))
        self.prompt_tokens[prompt] = max(of_prompt[0], usage.prompt_tokens), max(of_prompt[1], usage.cached_tokens)
        self.completion_tokens += usage.completion_tokens
        self.drafted += usage.drafted_tokens
        self.accepted += usage.accepted_tokens
        self.steps += usage.steps
        for one in usage.proposers:
            row = self.proposers.setdefault(one.name, {"drafted_tokens": 0, "accepted_tokens": 0})
            row["drafted_tokens"] += one.drafted_tokens
            row["accepted_tokens"] += one.accepted_tokens
        self.queue_s = max(self.queue_s, timings.queue_s)
        self.first_token_s = max(self.first_token_s, timings.time_to_first_token_s)
        self.total_s = max(self.total_s, timings.total_s)

    def usage(self) -> dict[str, Any]:
        prompt_tokens = sum(tokens for tokens, _ in self.prompt_tokens.values())
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(cached for _, cached in self.prompt_tokens.values())},
        }

    def own(self, job: Job) -> dict[str, Any]:
        """The object `loraplex` of an answer. Times are the largest of all prompts."""
        return {
            "adapter_id": job.adapter_id or None,
            "adapter_digest": self.digest or None,
            "drafted_tokens": self.drafted,
            "accepted_tokens": self.accepted,
            "steps": self.steps,
            "proposers": self.proposers,
            "queue_s": self.queue_s,
            "time_to_first_token_s": self.first_token_s,
            "total_s": self.total_s,
        }


class Logprobs:
    """Logprobs of one choice in OpenAI's two forms; keeps the offset in the text."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._offset = 0
        self._prompt: list[tuple[str, float | None, dict[str, float] | None]] = []

    def begin(self, text: str, prompt: Sequence[pb.TokenLogprob], new: Sequence[pb.TokenLogprob]) -> None:
        """The echoed prompt. Its first token has no logprob, and the wire no row for it: its text is what stands
        before all others."""
        rest = "".join(row.text for row in (*prompt, *new))
        first = text.removesuffix(rest) if text.endswith(rest) else ""
        self._prompt = [(first, None, None), *(self._row(row) for row in prompt)]

    def add(self, rows: Sequence[pb.TokenLogprob]) -> dict[str, Any] | None:
        """Of the next tokens; None where none were asked for."""
        if self._job.num_top_logprobs is None:
            return None
        if self._job.is_chat:
            return {"content": [self._chat_row(row) for row in rows], "refusal": None}
        found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        prompt, self._prompt = self._prompt, []
        for text, logprob, top in (*prompt, *(self._row(row) for row in rows)):
            found["tokens"].append(text)
            found["token_logprobs"].append(logprob)
            found["top_logprobs"].append(top)
            found["text_offset"].append(self._offset)
            self._offset += len(text)
        return found

    def _row(self, row: pb.TokenLogprob) -> tuple[str, float | None, dict[str, float] | None]:
        top: dict[str, float] = {}
        for one in row.top:
            name = self._name(one)
            top[name] = max(_finite(one.logprob), top.get(name, _MIN_LOGPROB))
        name = self._name(row)
        top.pop(name, None)
        top[name] = _finite(row.logprob)  # in any case, and last
        return name, top[name], top

    def _chat_row(self, row: pb.TokenLogprob) -> dict[str, Any]:
        return {**self._one(row), "top_logprobs": [self._one(one) for one in row.top]}

    def _one(self, row: pb.TokenLogprob | pb.TopLogprob) -> dict[str, Any]:
        is_whole = "\ufffd" not in row.text  # a part of a character has no text
        return {
            "token": self._name(row),
            "logprob": _finite(row.logprob),
            "bytes": list(row.text.encode()) if is_whole else None,
        }

    def _name(self, row: pb.TokenLogprob | pb.TopLogprob) -> str:
        return f"token_id:{row.token_id}" if self._job.tokens_as_ids else row.text


def _finite(logprob: float) -> float:
    return max(logprob, _MIN_LOGPROB)


class Chunks:
    """Events of one streamed answer, from the wire's messages of all its prompts."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._tally = Tally()
        self._logprobs: dict[int, Logprobs] = {}
        self._prompt_logprobs: dict[int, Sequence[pb.TokenLogprob]] = {}
        self._num_open = job.n * len(job.requests)
        self._has_begun = False

    def events(self, prompt: int, raw: bytes) -> Iterator[bytes]:
        """Of one message."""
        message = pb.GenerateStreamResponse.FromString(raw)
        self._tally.digest = message.adapter_digest or self._tally.digest
        if not self._has_begun:
            self._has_begun = True
            if self._job.is_chat:
                # All roles come first and in order: clients index choices by what they have seen.
                for index in range(self._num_open):
                    yield self._chunk({"index": index, "delta": {"role": "assistant", "content": ""}})
        if message.prompt_logprobs:
            self._prompt_logprobs[prompt] = message.prompt_logprobs
        choice = _choice(self._job, prompt, message.index)
        rows = self._logprobs.get(choice["index"])
        if rows is None:
            rows = self._logprobs[choice["index"]] = Logprobs(self._job)
            if self._job.echo:
                rows.begin(message.text_delta, self._prompt_logprobs.get(prompt, ()), message.logprobs)
        if self._job.is_chat:
            choice["delta"] = {"content": message.text_delta} if message.text_delta else {}
        else:
            choice["text"] = message.text_delta
        logprobs = rows.add(message.logprobs) if message.logprobs or message.prompt_logprobs else None
        choice["logprobs"] = logprobs
        _end(choice, message)
        if self._job.with_token_ids:
            choice["token_ids"] = list(message.token_ids)
        is_last = message.finish_reason != pb.FINISH_REASON_UNSPECIFIED
        own: dict[str, Any] | None = None
        if is_last:
            self._tally.add_end(prompt, message)
            self._num_open -= 1
            if not self._num_open and not self._job.wants_usage:
                own = self._tally.own(self._job)
        yield self._chunk(choice, own)

    def end(self) -> Iterator[bytes]:
        """The chunk with usage, where it was asked for."""
        if self._job.wants_usage:
            head = _head(self._job, self._kind, self._tally.digest)
            yield _event({**head, "choices": [], "usage": self._tally.usage(), "loraplex": self._tally.own(self._job)})

    @property
    def _kind(self) -> str:
        return "chat.completion.chunk" if self._job.is_chat else "text_completion"

    def _chunk(self, choice: dict[str, Any], own: dict[str, Any] | None = None) -> bytes:
        choice.setdefault("logprobs", None)
        choice.setdefault("finish_reason", None)
        chunk = {**_head(self._job, self._kind, self._tally.digest), "choices": [choice]}
        if self._job.wants_usage:
            chunk["usage"] = None
        if own is not None:
            chunk["loraplex"] = own
        return _event(chunk)


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
