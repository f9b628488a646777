"""Answers of the wire as LoRAX's and TGI's: texts, details, events, headers."""

from __future__ import annotations

import codecs
import re
import time
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Final

from loraplex_contracts.errors import LoraplexError
from loraplex_proto.v1 import inference_pb2 as pb
from loraplex_router.http import dialects
from loraplex_router.http.errors import tgi_error
from loraplex_router.http.fields import finite, mean_logprob
from loraplex_router.http.origins import source_word
from loraplex_router.http.streaming import data_event
from loraplex_router.http.tgi.requests import Job

_FINISH_REASONS: Final = {
    pb.FINISH_REASON_EOS: "eos_token",
    pb.FINISH_REASON_STOP: "stop_sequence",
    pb.FINISH_REASON_LENGTH: "length",
}


# The worker's text may lack a space that a token's bytes begin with, or have one more, and it has U+FFFD for each byte
# of a run that is not UTF-8 as a whole: workers hold 64 bytes of a run at most.
_LOOSE: Final = re.compile("[ \ufffd]{0,64}")


class Tokens:
    """Tokens of one completion, each with the text that it adds: those of tokens that are not special, concatenated,
    are the completion's text.

    A token is held back until the worker has sent its text, and while that can still change: behind a part of a
    character, and behind a stop string, which is the last token unless the worker says otherwise."""

    def __init__(self, job: Job, special_ids: Collection[int]) -> None:
        self.text = ""
        self._job = job
        self._special_ids = special_ids
        self._stops = tuple(job.request.stopping.stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._num_shown = 0  # characters of `text` in tokens that were given out
        self._held: list[dict[str, Any]] = []  # their texts are those of their bytes yet

    def push(self, rows: Sequence[pb.TokenLogprob], text: str, *, is_end: bool) -> list[dict[str, Any]]:
        """The tokens that are complete now. `text` is what is new in the completion's text."""
        self.text += text
        self._held += [self._token(row) for row in rows]
        last = max((index for index, token in enumerate(self._held) if not token["special"]), default=None)
        ends: list[int] = []  # of the tokens in the text
        end = self._num_shown
        for index, token in enumerate(self._held):
            if is_end and index == last:
                end = len(self.text)
            elif not token["special"]:
                found = self._end_of(token["text"], end)
                if found is None and not is_end:
                    break
                end = min(len(self.text), end + len(token["text"])) if found is None else found
            ends.append(end)
        else:
            may_change = self._decoder.getstate()[0] or end < len(self.text) or self.text.endswith(self._stops)
            if may_change and last is not None and not is_end:
                ends = ends[:last]
        ready, self._held = self._held[: len(ends)], self._held[len(ends) :]
        for token, end in zip(ready, ends, strict=True):
            if not token["special"]:
                token["text"] = self.text[self._num_shown : end]
                self._num_shown = end
        return ready

    def _end_of(self, piece: str, begin: int) -> int | None:
        """The end in the text of a token that begins there; None where the worker has not sent it. `piece`: what the
        token's bytes alone say."""
        text = self.text
        if text.startswith(piece, begin):
            return begin + len(piece)
        loose = _LOOSE.match(text, begin)
        at = begin if loose is None else loose.end()
        core = piece.lstrip(" ")
        if not core:
            return None if at == len(text) else min(at, begin + len(piece))
        is_there = core.startswith(text[at : at + len(core)])  # or its beginning
        end = at + len(core) if is_there else begin + len(piece)
        return end if end <= len(text) else None

    def _token(self, row: pb.TokenLogprob) -> dict[str, Any]:
        token: dict[str, Any] = {
            "id": row.token_id,
            "text": row.text if row.is_special else self._decoder.decode(row.bytes),
            "logprob": finite(row.logprob),
            "special": row.is_special,
            "skipped": False,
        }
        if self._job.num_alternatives:
            token["alternative_tokens"] = [
                {"id": one.token_id, "text": one.text, "logprob": finite(one.logprob)}
                for one in row.top[: self._job.num_alternatives]
            ]
        if self._job.num_top:
            token["top"] = [
                {
                    "id": one.token_id,
                    "text": one.text,
                    "logprob": finite(one.logprob),
                    "special": one.token_id in self._special_ids,
                }
                for one in row.top[: self._job.num_top]
            ]
        return token


def response_of(job: Job, answer: pb.GenerateResponse, special_ids: Collection[int] = ()) -> dict[str, Any]:
    """The body of an answer that is not streamed: of `best_of` texts, that with the highest mean logprob."""
    ranked = sorted(answer.completions, key=mean_logprob, reverse=True)
    body: dict[str, Any] = {"generated_text": job.prefix + ranked[0].text}
    if job.has_details:
        sequences = [_sequence(job, answer, one, special_ids) for one in ranked]
        body["details"] = {**sequences[0], "best_of_sequences": None}
        if len(ranked) > 1:
            body["details"]["best_of_sequences"] = [
                {"generated_text": job.prefix + one.text, **sequence}
                for one, sequence in zip(ranked[1:], sequences[1:], strict=True)
            ]
    return body


def _sequence(
    job: Job, answer: pb.GenerateResponse, completion: pb.Completion, special_ids: Collection[int]
) -> dict[str, Any]:
    tokens = Tokens(job, special_ids).push(completion.logprobs, completion.text, is_end=True)
    top = [token.pop("top", []) for token in tokens]
    found = {
        **_details(completion, answer.usage.prompt_tokens, answer.seed if answer.HasField("seed") else None),
        "prefill": [
            {
                "id": one.token_id,
                "text": one.text,
                "logprob": finite(one.logprob) if one.HasField("logprob") else None,
            }
            for one in answer.prompt_tokens
        ],
        "tokens": tokens,
    }
    return {**found, "top_tokens": top} if job.num_top else found


def _details(
    completion: pb.Completion | pb.GenerateStreamResponse, num_prompt_tokens: int, seed: int | None
) -> dict[str, Any]:
    return {
        "finish_reason": _FINISH_REASONS.get(completion.finish_reason, "length"),
        "prompt_tokens": num_prompt_tokens,  # LoRAX's name
        "input_length": num_prompt_tokens,  # TGI's
        "generated_tokens": completion.usage.completion_tokens,
        "skipped_tokens": 0,
        "seed": seed,
    }


class Answer(dialects.Answer[Job]):
    """The answer to a request. Of its events each has a token, and the last one the text and the details."""

    done = b""

    def __init__(
        self, job: Job, special_ids: Collection[int] = (), *, started_s: float = 0.0, is_in_list: bool = False
    ) -> None:
        """`started_s`: when the request came, of time.monotonic(); `is_in_list`: the body is a list of the answer."""
        super().__init__(job)
        self._special_ids = special_ids
        self._started_s = started_s
        self._is_in_list = is_in_list
        self._tokens = Tokens(job, special_ids)
        self._seed: int | None = None
        self._index = 0
        self._last_id = 0

    def whole(self, answers: Sequence[pb.GenerateResponse]) -> Any:
        found = response_of(self.job, answers[0], self._special_ids)
        return [found] if self._is_in_list else found

    def headers(self, answers: Sequence[pb.GenerateResponse]) -> dict[str, str]:
        return answer_headers(answers[0], time.monotonic() - self._started_s)

    def error(self, error: LoraplexError) -> bytes:
        _, content = tgi_error(error)
        return data_event(content)

    def events(self, prompt: int, raw: bytes) -> Iterator[bytes]:
        message = pb.GenerateStreamResponse.FromString(raw)
        if message.HasField("seed"):
            self._seed = message.seed
        is_end = message.finish_reason != pb.FINISH_REASON_UNSPECIFIED
        tokens = self._tokens.push(message.logprobs, message.text_delta, is_end=is_end)
        if is_end and not tokens:
            # The last token has gone out before its completion's end: clients want one in each event.
            tokens = [{"id": self._last_id, "text": "", "logprob": 0.0, "special": True, "skipped": False}]
        for number, token in enumerate(tokens, start=1):
            self._index += 1
            self._last_id = token["id"]
            top = token.pop("top", None)
            event: dict[str, Any] = {"index": self._index, "token": token, "generated_text": None, "details": None}
            if top is not None:
                event["top_tokens"] = top
            if is_end and number == len(tokens):
                event["generated_text"] = self.job.prefix + self._tokens.text
                if self.job.has_details:
                    event["details"] = _details(message, message.usage.prompt_tokens, self._seed)
            yield data_event(event)


def stream_headers(job: Job, model: str, device: str) -> dict[str, str]:
    """Headers of a stream's answer, and the first headers of other answers."""
    headers = {
        "x-compute-type": "gpu+optimized" if device.startswith("cuda") else device,
        "x-compute-characters": str(job.num_chars),
        "x-model-id": model.encode("ascii", "replace").decode(),
    }
    if job.request.adapter_id:
        headers |= {"x-adapter-id": job.request.adapter_id, "x-adapter-source": source_word(job.request)}
    return headers


def answer_headers(answer: pb.GenerateResponse, elapsed_s: float) -> dict[str, str]:
    """Tokens and times in ms, as LoRAX counts them. `elapsed_s`: since the request came."""
    usage, timings = answer.usage, answer.timings
    num_tokens = max(1, usage.completion_tokens)
    inference_s = max(0.0, timings.total_s - timings.queue_s)
    first_s = min(inference_s, max(0.0, timings.time_to_first_token_s - timings.queue_s))
    times_s = {
        "x-compute-time": elapsed_s,
        "x-total-time": elapsed_s,
        "x-validation-time": max(0.0, elapsed_s - timings.total_s),
        "x-queue-time": timings.queue_s,
        "x-inference-time": inference_s,
        "x-time-per-token": inference_s / num_tokens,
        "x-time-to-first-token": first_s,
        "x-time-per-output-token": (inference_s - first_s) / max(1, num_tokens - 1),
    }
    return {
        "x-prompt-tokens": str(usage.prompt_tokens),
        "x-generated-tokens": str(usage.completion_tokens),
        "x-skipped-tokens": "0",
        "x-total-tokens": str(usage.prompt_tokens + usage.completion_tokens),
        **{name: str(round(1000 * value)) for name, value in times_s.items()},
    }


def tokens_of(text: str, answer: pb.TokenizeResponse) -> list[dict[str, Any]]:
    """Rows of /tokenize and /chat_tokenize. Tokens that the tokenizer added have no text in the prompt."""
    rows = zip(answer.token_ids, answer.starts, answer.ends, strict=True)
    return [{"id": one, "text": text[start:stop], "start": start, "stop": stop} for one, start, stop in rows]


def info_of(
    model_id: str, info: pb.GetInfoResponse, max_requests: int, max_best_of: int, max_stops: int
) -> dict[str, Any]:
    """The answer of /info, with LoRAX's and TGI's names. None for what only their own schedulers have. `model_id` is a
    name that requests may have; the worker's own name of the model may be another."""
    context = info.max_context_tokens
    return {
        "model_id": model_id,
        "model_sha": None,
        "model_dtype": f"torch.{info.dtype}",
        "model_device_type": info.device.partition(":")[0],
        "model_pipeline_tag": "text-generation",
        "max_concurrent_requests": max_requests,
        "max_best_of": max_best_of,
        "max_stop_sequences": max_stops,
        "max_input_length": max(0, context - 1),
        "max_input_tokens": max(0, context - 1),
        "max_total_tokens": context,
        "max_client_batch_size": 1,
        **dict.fromkeys(
            ("waiting_served_ratio", "max_batch_total_tokens", "max_waiting_tokens", "validation_workers"), None
        ),
        "eager_prefill": None,
        "router": "loraplex",
        "version": info.version,
        "sha": None,
        "docker_label": None,
        "request_logger_url": None,
    }
