"""Answers of the wire as OpenAI's, whole and in chunks. Pure."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from loraplex_proto import __version__
from loraplex_proto.v1 import inference_pb2 as pb
from loraplex_router.http import dialects
from loraplex_router.http.fields import MIN_LOGPROB, finite, mean_logprob
from loraplex_router.http.mixtures import recipe_of
from loraplex_router.http.openai.requests import Job
from loraplex_router.http.openai.tools import delta_of, message_of
from loraplex_router.http.prompt_only import drop_new
from loraplex_router.http.streaming import data_event

_FINISH_REASONS: Final = {
    pb.FINISH_REASON_EOS: "stop",
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
}


def fingerprint(digest: str) -> str:
    """The answer's `system_fingerprint`, which changes with the server's version and the adapter's content."""
    return f"lpx-{__version__}-{digest[:12] or 'base'}"


def response_of(job: Job, answers: Sequence[pb.GenerateResponse]) -> dict[str, Any]:
    """The body of an answer that is not streamed."""
    tally = Tally()
    choices: list[dict[str, Any]] = []
    body: dict[str, Any] = {}
    for prompt, answer in enumerate(answers):
        if job.is_prompt_only:
            answer.usage.completion_tokens = 0
            for completion in answer.completions:
                drop_new(completion)
        tally.add_answer(answer)
        of_prompt = {"prompt_logprobs": None, **prompt_fields(job, answer.prompt_tokens)}
        for completion in _best(answer.completions, job.n):
            choice = _choice(job, prompt, completion.index)
            if job.is_chat:
                choice["message"] = message_of(completion, job.reasoning_fields)
            else:
                choice["text"] = completion.text
                choice |= of_prompt
            choice["logprobs"] = Logprobs(job, answer.prompt_tokens).add(completion.logprobs, completion.text)
            _end(choice, completion)
            if job.with_token_ids:
                choice["token_ids"] = list(completion.token_ids)
            choices.append(choice)
        if job.is_chat:
            body |= of_prompt
    head = _head(job, "chat.completion" if job.is_chat else "text_completion", tally.digest)
    return {**head, "choices": choices, "usage": tally.usage(job), **body, "loraplex": tally.own(job)}


def _best(completions: Iterable[pb.Completion], n: int) -> list[pb.Completion]:
    """The `n` completions that were asked for, by index; of more, the likeliest per token, which come first."""
    found = sorted(completions, key=lambda one: one.index)
    if len(found) <= n:
        return found
    best = sorted(found, key=mean_logprob, reverse=True)[:n]
    for index, completion in enumerate(best):
        completion.index = index
    return best


def prompt_fields(job: Job, tokens: Sequence[pb.PromptToken]) -> dict[str, Any]:
    """Ids and logprobs of a prompt's tokens, as far as they were asked for."""
    found: dict[str, Any] = {}
    if job.with_token_ids:
        found["prompt_token_ids"] = [token.token_id for token in tokens]
    if job.num_prompt_logprobs is not None:
        found["prompt_logprobs"] = [_prompt_row(token, job.num_prompt_logprobs) for token in tokens]
    return found


def _prompt_row(token: pb.PromptToken, num_top: int) -> dict[str, Any] | None:
    """A prompt token's logprobs as in vLLM: its own row and the likeliest, by token id; None for the first token."""
    if not token.HasField("logprob"):
        return None
    rows: dict[str, Any] = {
        str(one.token_id): {"logprob": finite(one.logprob), "rank": rank, "decoded_token": one.text}
        for rank, one in enumerate(token.top[:num_top], start=1)
    }
    own = {"logprob": finite(token.logprob), "rank": None, "decoded_token": token.text}
    rows.setdefault(str(token.token_id), own)
    return rows


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


def _has_tokens(choice: dict[str, Any]) -> bool:
    return choice["logprobs"] is not None or bool(choice.get("token_ids"))


def _end(choice: dict[str, Any], completion: pb.Completion | pb.GenerateStreamResponse) -> None:
    choice["finish_reason"] = _FINISH_REASONS.get(completion.finish_reason)
    calls = completion.message.tool_calls
    if calls and choice["finish_reason"] == "stop":
        # A stop string may end a text in the middle of a call, as a length does.
        is_cut = completion.HasField("stop_string") and not _is_json(calls[-1].arguments_json)
        choice["finish_reason"] = "stop" if is_cut else "tool_calls"
    choice["stop_reason"] = None
    if completion.HasField("stop_string"):
        choice["stop_reason"] = completion.stop_string
    elif completion.HasField("stop_token_id") and completion.finish_reason == pb.FINISH_REASON_STOP:
        choice["stop_reason"] = completion.stop_token_id


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


@dataclass(slots=True)
class Tally:
    """Tokens, drafts and times of all prompts of a request."""

    digest: str = ""
    seeds: dict[int, int] = field(default_factory=dict[int, int])  # by prompt
    prompt_tokens: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])  # and cached ones
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    steps: int = 0
    proposers: dict[str, dict[str, int]] = field(default_factory=dict[str, dict[str, int]])
    queue_s: float = 0.0
    first_token_s: float = 0.0
    total_s: float = 0.0

    def add_answer(self, answer: pb.GenerateResponse) -> None:
        prompt = len(self.prompt_tokens)
        self.begin(prompt, answer)
        self._add(prompt, answer.usage, answer.timings)

    def begin(self, prompt: int, message: pb.GenerateResponse | pb.GenerateStreamResponse) -> None:
        """Takes an answer, or a message of a stream, of which the first says the most."""
        self.digest = message.adapter_digest or self.digest
        if message.HasField("seed"):
            self.seeds[prompt] = message.seed

    def add_end(self, prompt: int, chunk: pb.GenerateStreamResponse) -> None:
        """Takes the last chunk of a completion."""
        self._add(prompt, chunk.usage, chunk.timings)

    def _add(self, prompt: int, usage: pb.Usage, timings: pb.Timings) -> None:
        of_prompt = self.prompt_tokens.get(prompt, (0, 0))
        self.prompt_tokens[prompt] = max(of_prompt[0], usage.prompt_tokens), max(of_prompt[1], usage.cached_tokens)
        self.completion_tokens += usage.completion_tokens
        self.reasoning_tokens += usage.reasoning_tokens
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

    def usage(self, job: Job) -> dict[str, Any]:
        prompt_tokens = sum(tokens for tokens, _ in self.prompt_tokens.values())
        of_chat = {"completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens}} if job.is_chat else {}
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(cached for _, cached in self.prompt_tokens.values())},
            **of_chat,
        }

    def own(self, job: Job) -> dict[str, Any]:
        """The object `loraplex` of an answer. Times are the largest of all prompts."""
        return {
            "adapter_id": job.adapter_id or None,
            "adapter_digest": self.digest or None,
            **recipe_of(job.requests[0]),
            "seed": self._seed(),
            "drafted_tokens": self.drafted,
            "accepted_tokens": self.accepted,
            "steps": self.steps,
            "proposers": self.proposers,
            "queue_s": self.queue_s,
            "time_to_first_token_s": self.first_token_s,
            "total_s": self.total_s,
        }

    def _seed(self) -> int | list[int] | None:
        """The prompts' seeds: one where there is one prompt or one seed; None where nothing was drawn."""
        seeds = [self.seeds[prompt] for prompt in sorted(self.seeds)]
        return seeds[0] if len(set(seeds)) == 1 else seeds or None


def _num_spaces(text: str) -> int:
    """Number of spaces at the beginning."""
    return len(text) - len(text.lstrip(" "))


class Logprobs:
    """Logprobs of one choice in OpenAI's two forms; keeps the offset in the text.

    Offsets count the characters that the bytes of the tokens make: a part of a character has the offset of the whole.
    At the beginning of a text, tokenizers leave out the space that its first token has elsewhere."""

    def __init__(self, job: Job, prompt: Sequence[pb.PromptToken]) -> None:
        """The tokens of `prompt` come first where the job wants an echo; the first of them has no logprob."""
        self._job = job
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0
        # Text of the tokens and of the choice, until the latter has more than spaces.
        self._begin: tuple[str, str] | None = ("", "")
        self._prompt = prompt if job.echo else ()

    def add(self, rows: Sequence[pb.TokenLogprob], text: str = "") -> dict[str, Any] | None:
        """Logprobs of the next tokens; None where none were asked for. `text`: what is new in the choice's text."""
        if self._job.num_top_logprobs is None:
            return None
        if self._job.is_chat:
            return {"content": [self._chat_row(row) for row in rows], "refusal": None}
        found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        prompt, self._prompt = self._prompt, ()
        all_rows = (*prompt, *rows)
        pieces = [self._piece(row) for row in all_rows]
        if self._begin is not None:
            of_tokens, of_text = self._begin[0] + "".join(map("".join, pieces)), self._begin[1] + text
            self._begin = of_tokens, of_text
            if of_text.lstrip(" "):
                self._offset -= _num_spaces(of_tokens) > _num_spaces(of_text)
                self._begin = None
        for row, (before, piece) in zip(all_rows, pieces, strict=True):
            name, top = self._name(row), self._top(row)
            found["tokens"].append(name)
            found["token_logprobs"].append(None if top is None else top[name])
            found["top_logprobs"].append(top)
            self._offset += len(before)
            found["text_offset"].append(max(0, self._offset))
            self._offset += len(piece)
        return found

    def _piece(self, row: pb.TokenLogprob | pb.PromptToken) -> tuple[str, str]:
        """A token's part of the text: U+FFFD for a character that it leaves unfinished, and its own characters."""
        if row.is_special and not self._job.requests[0].output.keep_special_tokens:
            return "", ""
        goes_on = row.bytes[:1] and row.bytes[0] & 0xC0 == 0x80
        return "" if goes_on else self._decoder.decode(b"", final=True), self._decoder.decode(row.bytes)

    def _top(self, row: pb.TokenLogprob | pb.PromptToken) -> dict[str, float] | None:
        """The likeliest tokens, and the row's own in any case, which comes last."""
        if isinstance(row, pb.PromptToken) and not row.HasField("logprob"):
            return None
        top: dict[str, float] = {}
        for one in row.top[: self._job.num_top_logprobs]:
            name = self._name(one)
            top[name] = max(finite(one.logprob), top.get(name, MIN_LOGPROB))
        name = self._name(row)
        top.pop(name, None)
        top[name] = finite(row.logprob)
        return top

    def _chat_row(self, row: pb.TokenLogprob) -> dict[str, Any]:
        top = row.top[: self._job.num_top_logprobs]
        return {**self._one(row), "top_logprobs": [self._one(one) for one in top]}

    def _one(self, row: pb.TokenLogprob | pb.TopLogprob) -> dict[str, Any]:
        return {"token": self._name(row), "logprob": finite(row.logprob), "bytes": list(row.bytes)}

    def _name(self, row: pb.TokenLogprob | pb.TopLogprob | pb.PromptToken) -> str:
        return f"token_id:{row.token_id}" if self._job.tokens_as_ids else row.text


class Answer(dialects.Answer[Job]):
    """The answer to a completion or a chat. Chunks are made of the wire's messages of all prompts."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._tally = Tally()
        self._logprobs: dict[int, Logprobs] = {}
        self._prompts: dict[int, Sequence[pb.PromptToken]] = {}
        self._num_new_tokens = 0
        self._num_open = job.n * len(job.requests)
        self._has_begun = False
        self._head: dict[str, Any] = {}  # of each chunk, once the digest is known

    def whole(self, answers: Sequence[pb.GenerateResponse]) -> dict[str, Any]:
        return response_of(self.job, answers)

    def events(self, prompt: int, raw: bytes) -> Iterator[bytes]:
        return map(data_event, self.chunks(prompt, pb.GenerateStreamResponse.FromString(raw)))

    def end(self) -> Iterator[bytes]:
        """The event with usage, where it was asked for."""
        return map(data_event, self.end_chunks())

    def chunks(self, prompt: int, message: pb.GenerateStreamResponse) -> Iterator[dict[str, Any]]:
        """Chunks of one message."""
        if self.job.is_prompt_only:
            drop_new(message)
        self._tally.begin(prompt, message)
        of_prompt: dict[str, Any] = {}
        if prompt not in self._prompts:
            self._prompts[prompt] = message.prompt_tokens
            of_prompt = prompt_fields(self.job, message.prompt_tokens)
        if not self._has_begun:
            self._has_begun = True
            if self.job.is_chat:
                # All roles come first and in order: clients index choices by what they have seen.
                for index in range(self._num_open):
                    yield self._chunk({"index": index, "delta": {"role": "assistant", "content": ""}}, of_prompt)
                    of_prompt = {}
        self._num_new_tokens += len(message.token_ids)
        choice = _choice(self.job, prompt, message.index)
        has_rows = bool(message.logprobs)
        rows = self._logprobs.get(choice["index"])
        if rows is None:
            rows = self._logprobs[choice["index"]] = Logprobs(self.job, self._prompts[prompt])
            has_rows |= self.job.echo
        if self.job.is_chat:
            choice["delta"] = delta_of(message, self.job.reasoning_fields)
        else:
            choice["text"] = message.text_delta
            choice |= of_prompt
        choice["logprobs"] = rows.add(message.logprobs, message.text_delta) if has_rows else None
        _end(choice, message)
        if self.job.with_token_ids:
            choice["token_ids"] = list(message.token_ids)
            if message.drafted_tokens:
                choice["loraplex"] = {
                    "proposer": message.proposer,
                    "drafted_tokens": message.drafted_tokens,
                    "accepted_tokens": message.accepted_tokens,
                }
        more: dict[str, Any] = {}
        if message.finish_reason != pb.FINISH_REASON_UNSPECIFIED:
            self._tally.add_end(prompt, message)
            self._num_open -= 1
            if not self._num_open and not self.job.wants_usage:
                more["loraplex"] = self._tally.own(self.job)
        if more or not self.job.is_chat or choice["delta"] or choice["finish_reason"] or _has_tokens(choice):
            yield self._chunk(choice, more)

    def end_chunks(self) -> Iterator[dict[str, Any]]:
        if self.job.wants_usage:
            head = _head(self.job, self._kind, self._tally.digest)
            yield {**head, "choices": [], "usage": self._tally.usage(self.job), "loraplex": self._tally.own(self.job)}

    @property
    def _kind(self) -> str:
        return "chat.completion.chunk" if self.job.is_chat else "text_completion"

    def _chunk(self, choice: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
        choice.setdefault("logprobs", None)
        choice.setdefault("finish_reason", None)
        if not self._head:
            self._head = _head(self.job, self._kind, self._tally.digest)
        chunk = {**self._head, "choices": [choice]}
        if self.job.wants_usage:
            chunk["usage"] = self._running_usage() if self.job.wants_running_usage else None
        return {**chunk, **more} if more else chunk

    def _running_usage(self) -> dict[str, int]:
        num_prompt = sum(map(len, self._prompts.values()))
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": self._num_new_tokens,
            "total_tokens": num_prompt + self._num_new_tokens,
        }
