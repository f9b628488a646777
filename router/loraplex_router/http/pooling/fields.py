"""Fields of requests for embeddings, classes and scores."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from loraplex_proto.validate import MAX_CHAT_MESSAGES
from loraplex_router.http.fields import AdapterFields, Items, OriginFields, Uint32
from loraplex_router.http.openai.fields import ChatMessage, ChatTemplateInput


class PoolingFields(AdapterFields):
    """Fields that all routes but /embed have."""

    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=1 << 24)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None
    priority: Annotated[int, Field(ge=-100, le=100)] | None = None
    request_id: str | None = None
    cache_salt: str | None = None


class InputFields(PoolingFields, ChatTemplateInput):
    """`input`, or vLLM's `messages`, one chat."""

    input: Any = None
    messages: Annotated[Items[ChatMessage], Field(min_length=1, max_length=MAX_CHAT_MESSAGES)] | None = None


class EmbeddingsRequest(InputFields):
    """Body of POST /v1/embeddings."""

    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=(1 << 32) - 1)] | None = None
    pooling: Literal["last_token", "mean"] | None = None
    normalize: bool | None = None


class Parameters(OriginFields):
    """`parameters` of LoRAX's bodies. Those of generation have no effect here and are named as ignored."""

    adapter_id: str | None = None
    merged_adapters: Any = None
    truncate: Annotated[int, Field(ge=1, le=1 << 24)] | None = None


class EmbedBody(AdapterFields):
    """Body of POST /embed, LoRAX's or TEI's."""

    inputs: Any = None
    parameters: Parameters | None = None
    stream: bool | None = None
    normalize: bool | None = None
    truncate: bool | None = None
    truncation_direction: Literal["left", "right", "Left", "Right"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=(1 << 32) - 1)] | None = None
    prompt_name: str | None = None


class ClassifyBody(InputFields):
    """Body of POST /classify and /classify_batch: vLLM's `input` or `messages`, or LoRAX's `inputs`."""

    inputs: Any = None
    parameters: Parameters | None = None
    activation: bool | None = None
    use_activation: bool | None = None
    softmax: bool | None = None
    stream: bool | None = None


class ScoringFields(PoolingFields):
    """Fields that /score and /rerank have in common; `method` and what belongs to it are ours."""

    method: Literal["classifier", "cosine", "next_token"] | None = None
    template: str | None = None
    true_token: str | None = None
    false_token: str | None = None
    pooling: Literal["last_token", "mean"] | None = None
    activation: bool | None = None
    use_activation: bool | None = None


class ScoreBody(ScoringFields):
    """Body of POST /score."""

    text_1: Any = None
    text_2: Any = None
    queries: Any = None
    documents: Any = None
    items: Any = None
    data_1: Any = None
    data_2: Any = None


class RerankBody(ScoringFields):
    """Body of POST /rerank: Jina's and Cohere's `documents`, or TEI's `texts`."""

    query: Any = None
    documents: Any = None
    texts: Any = None
    top_n: Annotated[int, Field(ge=0, le=(1 << 32) - 1)] | None = None
    return_documents: bool | None = None
    return_text: bool | None = None
    raw_scores: bool | None = None
    truncate: bool | None = None
    truncation_direction: Literal["left", "right", "Left", "Right"] | None = None
    max_tokens_per_doc: Uint32 | None = None
