"""Kinds of speculation: one table of texts for SDK, command and HTTP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, get_args

import pytest

from loraplex import AnySpeculation, Speculation, SpeculationKind
from loraplex._requests import generate_request
from loraplex.cli.options import parse_speculation
from loraplex.types import PROPOSERS
from loraplex_contracts.errors import InvalidArgument
from loraplex_proto.speculation import KINDS, put_kind
from loraplex_proto.v1 import inference_pb2 as pb
from loraplex_router.http.fields import speculation_of


def by_sdk(wanted: Any) -> pb.Speculation:
    return generate_request("x", {"speculation": wanted}).speculation


WAYS: dict[str, Callable[[Any], pb.Speculation]] = {
    "SDK": by_sdk,
    "SDK's object": lambda text: by_sdk(Speculation(text)),
    "CLI": lambda text: by_sdk(parse_speculation(text)),
    "HTTP": speculation_of,
    "HTTP's object": lambda text: speculation_of({"kind": text}),
}
TAKEN: dict[str, dict[str, Any]] = {
    "off": {"off": True},
    "auto": {"auto": True},
    "medusa": {"medusa": {}},
    "medusa:org/heads": {"medusa": {"adapter_id": "org/heads"}},
    "prompt_lookup": {"prompt_lookup": {}},
    "draft_model": {"draft_model": {}},
    "draft_model:tiny:v2": {"draft_model": {"name": "tiny:v2"}},
}
REFUSED = (
    *("fast", "", ":", ":tiny", "Medusa", "medusa:", "draft_model:", "draft_model:\ud800", "off:x", "auto:"),
    *("prompt_lookup:3", "max_draft_tokens", "kind", "x" * 9999),
)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("text", TAKEN)
def test_every_way_takes_the_same_texts(way: str, text: str) -> None:
    assert WAYS[way](text) == pb.Speculation(**TAKEN[text])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("text", REFUSED, ids=lambda text: ascii(text)[:20])
def test_every_way_refuses_others_in_one_sentence(way: str, text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        WAYS[way](text)
    assert caught.value.field == "speculation"
    assert caught.value.message == (
        "`speculation` takes off, auto, medusa, medusa:ADAPTER_ID, prompt_lookup, draft_model, draft_model:NAME, "
        f"not {ascii(text)[:60]}"
    )


@pytest.mark.parametrize("wanted", [None, True, 5, [], ["off"], b"off", {"off": True}])
def test_what_is_no_text_is_refused(wanted: object) -> None:
    with pytest.raises(InvalidArgument, match=r"^`speculation` takes off, .*, not "):
        put_kind(pb.Speculation(), wanted)


def test_parameters_that_others_fill_in() -> None:
    message = pb.Speculation()
    parameters = put_kind(message, "prompt_lookup")
    assert isinstance(parameters, pb.PromptLookupSpeculation)
    parameters.max_ngram = 4
    assert message == pb.Speculation(prompt_lookup=pb.PromptLookupSpeculation(max_ngram=4))
    assert put_kind(message, "off") is None
    assert message == pb.Speculation(off=True)


def test_types_for_editors_have_the_kinds_of_the_wire() -> None:
    assert get_args(SpeculationKind) == KINDS == tuple(dict.fromkeys(text.partition(":")[0] for text in TAKEN))
    for kind in KINDS:
        parameters = pb.Speculation.DESCRIPTOR.fields_by_name[kind].message_type
        found = [one for one, name in PROPOSERS.items() if name == kind]
        if parameters is None or not parameters.fields:
            assert not found, kind
            continue
        (cls,) = found
        assert {one.name for one in fields(cls)} == set(parameters.fields_by_name), kind
        assert cls in get_args(AnySpeculation), kind
