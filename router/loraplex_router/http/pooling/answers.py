"""Answers of the wire as JSON: embeddings, labels, entities, usage."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
from collections.abc import Iterable, Sequence
from typing import Any

from loraplex_contracts.errors import InvalidArgument
from loraplex_proto.v1 import inference_pb2, pooling_pb2


def labels_of(answer: pooling_pb2.ClassifyResponse) -> list[dict[str, Any]]:
    """vLLM's rows: the likeliest label of each input."""
    rows: list[dict[str, Any]] = []
    for index, one in enumerate(answer.classifications):
        values = list(one.rows[0].probabilities)
        label = answer.labels[_likeliest(values)]
        rows.append({"index": index, "label": label, "probs": values, "num_classes": len(values)})
    return rows


def entities_of(
    message: pooling_pb2.ClassifyRequest, answer: pooling_pb2.ClassifyResponse, index: int
) -> list[dict[str, Any]]:
    """LoRAX's rows. Neighbouring tokens of one label are one entity: tags like `B-PER` and `I-PER` are the label `PER`,
    of which `B` begins another one; tokens of `O` are none. Of a text's classifier the one row is the whole text.

    Raises InvalidArgument for token ids that a token classifier has read."""
    one, text = answer.classifications[index], message.inputs[index].text
    if not answer.per_token:
        values = one.rows[0].probabilities
        best = _likeliest(values)
        row = {"entity_group": answer.labels[best], "score": values[best], "word": text, "start": 0, "end": len(text)}
        return [row]
    if message.inputs[index].WhichOneof("input") != "text":  # the worker says no places of its tokens
        raise InvalidArgument(
            "the adapter classifies tokens: its entities are parts of a text; send texts as `inputs`, not token ids",
            field="inputs",
            metadata={"request_id": message.request_id},
        )
    found: list[dict[str, Any]] = []
    scores: list[float] = []
    group = ""
    for row, start, end in zip(one.rows, one.starts, one.ends, strict=True):
        if start == end:  # special, or a part of a character
            continue
        best = _likeliest(row.probabilities)
        tag, label = split_tag(answer.labels[best])
        if label == "O":
            group = ""
            continue
        if tag == "B" or label != group:
            group, scores = label, []
            found.append({"entity_group": label, "score": 0.0, "word": "", "start": start, "end": end})
        scores.append(row.probabilities[best])
        entity = found[-1]
        entity |= {"end": end, "score": sum(scores) / len(scores)}
        entity["word"] = text[entity["start"] : end].strip()
    return found


def split_tag(label: str) -> tuple[str, str]:
    """`B` or `I` and the label of `B-PER` and `I-PER`; no tag and the label of others."""
    return (label[0], label[2:]) if label[:2] in ("B-", "I-") and len(label) > 2 else ("", label)


def _likeliest(values: Sequence[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)


def usage_of(usage: inference_pb2.Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "total_tokens": usage.prompt_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def own_fields(adapter_id: str, answer: Any) -> dict[str, Any]:
    return {
        "adapter_id": adapter_id or None,
        "adapter_digest": answer.adapter_digest or None,
        "queue_s": answer.timings.queue_s,
        "total_s": answer.timings.total_s,
    }


def headers_of(message: Any, ignored: dict[str, str]) -> dict[str, str]:
    return {"x-request-id": message.request_id, **ignored}


async def json_of(rows: Iterable[Any]) -> bytes:
    """A list as JSON. Other requests go on between its rows: thousands of vectors take seconds."""
    parts: list[bytes] = []
    for row in rows:
        parts.append(json.dumps(row, allow_nan=False).encode())
        await asyncio.sleep(0)
    return b"[" + b", ".join(parts) + b"]"


def floats(embedding: pooling_pb2.Embedding) -> list[float]:
    return list(embedding.values)


def to_base64(embedding: pooling_pb2.Embedding) -> str:
    """Little-endian float32, as OpenAI's clients read it."""
    return base64.b64encode(struct.pack(f"<{len(embedding.values)}f", *embedding.values)).decode()
