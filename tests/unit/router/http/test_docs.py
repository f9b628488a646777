"""docs/http.md against the fields of the bodies."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

import pytest

from loraplex_router.http.admin import LoadRequest
from loraplex_router.http.fields import HARMLESS, Fields
from loraplex_router.http.grammars import GRAMMAR_FIELDS
from loraplex_router.http.openai.fields import (
    REFUSED,
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    DetokenizeRequest,
    StreamOptions,
    TokenizeRequest,
)
from loraplex_router.http.openai.responses import ResponsesRequest
from loraplex_router.http.pooling import fields as pooling
from loraplex_router.http.sglang import fields as sglang
from loraplex_router.http.tgi import fields as tgi

PAGE = (Path(__file__).parents[4] / "docs/http.md").read_text()
# Without programs, by title.
PARTS = re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL).split("\n## ")
SECTIONS = {part.partition("\n")[0].removeprefix("# "): part for part in PARTS}
FIELDS, TGI = "Fields of generation", "LoRAX and TGI"


def fields(*models: type[Fields]) -> set[str]:
    return {name for model in models for name in model.model_fields}


OPENAI = fields(CompletionRequest, ChatCompletionRequest, ChatMessage, StreamOptions)


@pytest.mark.parametrize(
    ("sections", "names"),
    [
        (("The adapter", FIELDS), {*OPENAI, *REFUSED, *GRAMMAR_FIELDS, *HARMLESS}),
        (("HTTP: routes of OpenAI, LoRAX, TGI and SGLang", FIELDS), fields(TokenizeRequest, DetokenizeRequest)),
        ((TGI,), fields(tgi.Parameters, tgi.GenerateRequest)),
        (("SGLang", "The adapter", FIELDS), fields(sglang.SamplingParams, sglang.GenerateRequest)),
        (("Embeddings", "The adapter", FIELDS), fields(pooling.EmbeddingsRequest, pooling.EmbedBody)),
        (("Classes", "The adapter", "Embeddings", FIELDS, TGI), fields(pooling.ClassifyBody)),
        (("Scores", "The adapter", "Embeddings", FIELDS), fields(pooling.ScoreBody, pooling.RerankBody)),
        (("Responses", FIELDS), fields(ResponsesRequest)),
        (("Loading adapters",), fields(LoadRequest)),
    ],
)
def test_every_field_is_in_the_docs(sections: tuple[str, ...], names: Collection[str]) -> None:
    text = "\n".join(SECTIONS[title] for title in sections)
    words = set(re.findall(r"\w+", " ".join(re.findall(r"`[^`]+`", text))))
    missing = " ".join(sorted(set(names) - words))
    assert not missing, missing


@pytest.mark.parametrize(
    ("section", "names"),
    [
        (FIELDS, {*OPENAI, *REFUSED, *GRAMMAR_FIELDS, *HARMLESS}),
        ("Embeddings", fields(pooling.EmbeddingsRequest)),
        (TGI, fields(tgi.Parameters, tgi.GenerateRequest) | set(tgi.TASKS)),
    ],
)
def test_tables_name_no_other_fields(section: str, names: Collection[str]) -> None:
    text = SECTIONS[section]
    table = text.partition("| different |")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert cells
    found = {name for cell in cells for name in re.findall(r"`([a-z_]\w*)`", re.sub(r"\([^)]*\)", "", cell))}
    unknown = " ".join(sorted(found - set(names)))
    assert not unknown, unknown
