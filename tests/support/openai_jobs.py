"""Jobs of OpenAI's completions and chats, with few fields given."""

from __future__ import annotations

from typing import Any

from loraplex_router.http.openai import requests
from loraplex_router.http.openai.fields import ChatCompletionRequest, CompletionRequest

NAMES = ("org/base", "base")
CHAT = [{"role": "user", "content": "hi"}]


def completion(**fields: Any) -> requests.Job:
    body = CompletionRequest.model_validate({"prompt": "hi", **fields})
    return requests.completion_job(body, NAMES, "rid", 7)


def chat(**fields: Any) -> requests.Job:
    body = ChatCompletionRequest.model_validate({"messages": CHAT, **fields})
    return requests.chat_job(body, NAMES, "rid", 7)
