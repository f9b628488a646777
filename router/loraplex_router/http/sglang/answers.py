"""Answers of the wire as SGLang's: texts, events, model and server info."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from loraplex_proto.v1 import inference_pb2 as pb
from loraplex_router.http import dialects
from loraplex_router.http.fields import finite
from loraplex_router.http.mixtures import recipe_of
from loraplex_router.http.prompt_only import drop_new
from loraplex_router.http.sglang.requests import Job
from loraplex_router.http.streaming import data_event

BASE_VERSION: Final = "default"  # weight_version of the base model
# Tokens of a text that each have an event.
NUM_SINGLE_EVENTS: Final = 64


@dataclass(slots=True)
class Text:
    """One completion, as far as it has come."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[pb.TokenLogprob] = field(default_factory=list[pb.TokenLogprob])
    num_shown: int = 0  # tokens of the last event


def response_of(job: Job, answers: Sequence[pb.GenerateResponse], elapsed_s: float) -> Any:
    """The answer's body: an object, or a list of them for several prompts or texts."""
    found: list[dict[str, Any]] = []
    for prompt, answer in enumerate(answers):
        for one in sorted(answer.completions, key=lambda one: one.index):
            if job.is_prompt_only:
                drop_new(one)
            text = Text(one.text, list(one.token_ids), list(one.logprobs))
            meta = _meta(job, prompt, answer.prompt_tokens, text, answer.adapter_digest)
            meta |= {**_usage(one, answer.usage), "finish_reason": _finish_reason(one), "e2e_latency": elapsed_s}
            found.append({"text": text.text, "output_ids": text.token_ids, "meta_info": meta})
    return found if job.is_list or job.n > 1 else found[0]


class Answer(dialects.Answer[Job]):
    """The answer to a request. Each event has the whole text so far, as SGLang's.

    Events of long texts come less often, a sixteenth longer each, so that all together are as long as a few texts."""

    def __init__(self, job: Job, started_s: float = 0.0) -> None:
        """`started_s`: when the request came, of time.monotonic()."""
        super().__init__(job)
        self._started_s = started_s
        self._texts: dict[tuple[int, int], Text] = {}
        self._heads: dict[int, pb.GenerateStreamResponse] = {}

    def whole(self, answers: Sequence[pb.GenerateResponse]) -> Any:
        return response_of(self.job, answers, time.monotonic() - self._started_s)

    def events(self, prompt: int, raw: bytes) -> Iterator[bytes]:
        message = pb.GenerateStreamResponse.FromString(raw)
        if self.job.is_prompt_only:
            drop_new(message)
        head = self._heads.setdefault(prompt, message)
        text = self._texts.setdefault((prompt, message.index), Text())
        text.text += message.text_delta
        text.token_ids += message.token_ids
        text.logprobs += message.logprobs
        is_end = message.finish_reason != pb.FINISH_REASON_UNSPECIFIED
        num_tokens = len(text.token_ids)
        if not is_end and num_tokens > NUM_SINGLE_EVENTS and 16 * num_tokens < 17 * text.num_shown:
            return
        text.num_shown = num_tokens
        meta = _meta(self.job, prompt, head.prompt_tokens, text, head.adapter_digest)
        meta["finish_reason"] = _finish_reason(message) if is_end else None
        meta |= _usage(message, message.usage) if is_end else {"completion_tokens": num_tokens}
        if is_end:
            meta["e2e_latency"] = message.timings.total_s
        event: dict[str, Any] = {"text": text.text, "output_ids": text.token_ids, "meta_info": meta}
        if self.job.is_list or self.job.n > 1:
            event["index"] = prompt * self.job.n + message.index
        yield data_event(event)


def _meta(job: Job, prompt: int, prompt_tokens: Sequence[pb.PromptToken], text: Text, digest: str) -> dict[str, Any]:
    request = job.requests[prompt]
    meta: dict[str, Any] = {"id": request.request_id, "weight_version": digest[:12] or BASE_VERSION}
    if recipe := recipe_of(request):
        meta["loraplex"] = recipe
    if not job.with_logprobs:
        return meta
    rows: Sequence[pb.PromptToken] = prompt_tokens[job.prompt_start or 0 :] if job.prompt_start is not None else ()
    meta["input_token_logprobs"] = [_row(job, row) for row in rows]
    meta["output_token_logprobs"] = [_row(job, row) for row in text.logprobs]
    if job.num_top:
        meta["input_top_logprobs"] = [[_row(job, top) for top in row.top] or None for row in rows]
        meta["output_top_logprobs"] = [[_row(job, top) for top in row.top] for row in text.logprobs]
    return meta


def _row(job: Job, row: pb.PromptToken | pb.TokenLogprob | pb.TopLogprob) -> list[Any]:
    is_known = not isinstance(row, pb.PromptToken) or row.HasField("logprob")
    return [finite(row.logprob) if is_known else None, row.token_id, row.text if job.with_texts else None]


def _usage(completion: pb.Completion | pb.GenerateStreamResponse, usage: pb.Usage) -> dict[str, int]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": completion.usage.completion_tokens,
        "cached_tokens": usage.cached_tokens,
    }


def _finish_reason(completion: pb.Completion | pb.GenerateStreamResponse) -> dict[str, Any]:
    if completion.finish_reason == pb.FINISH_REASON_LENGTH:
        return {"type": "length", "length": completion.usage.completion_tokens}
    if completion.HasField("stop_string"):
        return {"type": "stop", "matched": completion.stop_string}
    return {"type": "stop", "matched": completion.stop_token_id if completion.HasField("stop_token_id") else None}


def model_info_of(info: pb.GetInfoResponse) -> dict[str, Any]:
    """The answer of /model_info. Answers name the base model's version as `default`."""
    return {
        "model_path": info.model_id,
        "tokenizer_path": info.model_id,
        "is_generation": not info.tasks or "generate" in info.tasks,
        "preferred_sampling_params": None,
        "weight_version": BASE_VERSION,
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "model_type": info.model_type,
    }


def server_info_of(name: str, info: pb.GetInfoResponse) -> dict[str, Any]:
    """The answer of /server_info: what is known, under SGLang's names. `name` is the base model's in requests."""
    return {
        "model_path": info.model_id,
        "tokenizer_path": info.model_id,
        "served_model_name": name,
        "version": info.version,
        "context_length": info.max_context_tokens,
        "dtype": info.dtype,
        "device": info.device.partition(":")[0],
        "page_size": info.kv_block_tokens,
        "enable_lora": True,
        "max_lora_rank": info.max_lora_rank,
        "max_loras_per_batch": info.max_device_adapters,
    }
