"""Requests of the router: from their bytes to what routing needs."""

from __future__ import annotations

import pytest

from loraplex_contracts.errors import AdapterNotFound, InvalidAdapterId, InvalidArgument, LoraplexError, Unimplemented
from loraplex_proto.v1 import inference_pb2, pooling_pb2
from loraplex_proto.validate import MAX_COMPLETIONS, PoolingRequest, parse
from loraplex_router.inference import RelayedRequest, admit_generate, admit_pooling
from loraplex_runtime.auth import EVERYBODY, Identity

Generate = inference_pb2.GenerateRequest


def admitted_of(raw: bytes, identity: Identity, max_context_tokens: int) -> RelayedRequest:
    return admit_generate(parse(Generate, raw), raw, identity, max_context_tokens)


def test_a_request_with_an_id_stays_as_it_came() -> None:
    raw = Generate(text="hi", request_id="mine", adapter_id="sql").SerializeToString()
    admitted = admitted_of(raw, EVERYBODY, 100)
    assert admitted.raw is raw
    assert admitted.request_id == "mine"
    assert admitted.adapter_ids == ("sql",)
    assert admitted.shows_tokens


def test_an_id_is_added_and_nothing_else() -> None:
    request = Generate(text="hi")
    admitted = admitted_of(request.SerializeToString(), EVERYBODY, 100)
    request.request_id = admitted.request_id
    assert len(admitted.request_id) == 32
    assert Generate.FromString(admitted.raw) == request


def test_ids_are_not_used_twice() -> None:
    raw = Generate(text="hi").SerializeToString()
    assert len({admitted_of(raw, EVERYBODY, 100).request_id for _ in range(50)}) == 50


@pytest.mark.parametrize(
    ("request_", "prompt", "output"),
    [
        (Generate(token_ids=inference_pb2.TokenIds(ids=range(10))), 10, 90),
        (Generate(token_ids=inference_pb2.TokenIds(ids=range(10)), n=3), 10, 270),
        (Generate(text="x" * 40, stopping=inference_pb2.Stopping(max_tokens=7)), 11, 7),
        (Generate(text="x", stopping=inference_pb2.Stopping(max_tokens=5000)), 1, 99),
        (Generate(text="x" * 4000), 1001, 1),
        (Generate(chat=inference_pb2.Chat(messages=[{"role": "user", "content": "x" * 40}])), 13, 87),
    ],
)
def test_work_is_prompt_and_what_may_be_made(request_: Generate, prompt: int, output: int) -> None:
    admitted = admitted_of(request_.SerializeToString(), EVERYBODY, 100)
    assert (admitted.num_prompt_tokens, admitted.num_output_tokens) == (prompt, output)
    assert admitted.work_tokens == prompt + output


def test_bytes_that_are_no_request() -> None:
    said = r"bytes are not a loraplex\.v1\.GenerateRequest, or a text in it is not UTF-8"
    for raw in (b"\x0a\xff", b"\x0a\x02\xff\xfe"):  # cut off; not UTF-8
        with pytest.raises(InvalidArgument, match=said):
            parse(Generate, raw)


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (Generate(text="x", adapter_id="../etc"), InvalidAdapterId),
        (Generate(text="x", speculation={"medusa": {"adapter_id": "../etc"}}), InvalidAdapterId),
        (Generate(text="x", request_id="a b"), InvalidArgument),
        (Generate(text="x", adapters=[{"id": "../a", "weight": 1}]), InvalidAdapterId),
        (Generate(text="x", adapters=[{"id": "a", "weight": 1}], adapter_id="a"), InvalidArgument),
        (Generate(text="x", adapters=[{"id": "a", "weight": 1}] * 9), InvalidArgument),
        (Generate.FromString(b"\xa2\x7d\x01x"), Unimplemented),  # field 2004: it could name an adapter unseen
    ],
)
def test_names_are_checked(request_: Generate, error: type[LoraplexError]) -> None:
    with pytest.raises(error):
        admitted_of(request_.SerializeToString(), EVERYBODY, 100)


def test_what_a_worker_refuses_makes_no_work_beyond_what_it_could() -> None:
    request = Generate(text="x", n=1 << 31)
    admitted = admitted_of(request.SerializeToString(), EVERYBODY, 100)
    assert admitted.num_output_tokens == MAX_COMPLETIONS * 99


def test_an_adapter_of_somebody_else_is_not_there() -> None:
    acme = Identity("acme", adapters=("acme/*",))
    assert admitted_of(Generate(text="x", adapter_id="acme/a").SerializeToString(), acme, 9).adapter_ids == ("acme/a",)
    assert admitted_of(Generate(text="x").SerializeToString(), acme, 9).adapter_ids == ()
    with pytest.raises(AdapterNotFound):
        admitted_of(Generate(text="x", adapter_id="other/a").SerializeToString(), acme, 9)


def test_heads_to_speculate_with_are_an_adapter_too() -> None:
    """Routing looks for a worker that has them, and somebody else's are not there."""
    request = Generate(text="x", adapter_id="acme/a", speculation={"medusa": {"adapter_id": "acme/heads"}})
    raw = request.SerializeToString()
    assert admitted_of(raw, EVERYBODY, 9).adapter_ids == ("acme/a", "acme/heads")
    with pytest.raises(AdapterNotFound, match="acme/heads"):
        admitted_of(raw, Identity("acme", adapters=("acme/a",)), 9)


def test_every_member_of_a_mixture_is_the_callers() -> None:
    request = Generate(text="x", adapters=[{"id": "acme/b", "weight": 0.5}, {"id": "acme/a", "weight": 0.5}])
    admitted = admitted_of(request.SerializeToString(), EVERYBODY, 9)
    assert admitted.adapter_ids == ("acme/b", "acme/a")
    assert admitted.adapter_name == "acme/a+acme/b"
    with pytest.raises(AdapterNotFound, match="acme/a"):
        admitted_of(request.SerializeToString(), Identity("acme", adapters=("acme/b",)), 9)


def test_the_draft_model_that_a_request_names() -> None:
    named = Generate(text="x", speculation={"draft_model": {"name": "tiny"}})
    assert admitted_of(named.SerializeToString(), EVERYBODY, 9).draft_model == "tiny"
    any_one = Generate(text="x", speculation={"draft_model": {}})
    assert admitted_of(any_one.SerializeToString(), EVERYBODY, 9).draft_model == ""
    assert admitted_of(Generate(text="x").SerializeToString(), EVERYBODY, 9).draft_model is None


@pytest.mark.parametrize(
    ("request_", "task"),
    [
        (pooling_pb2.EmbedRequest(), "embed"),
        (pooling_pb2.ClassifyRequest(), "classify"),
        (pooling_pb2.ScoreRequest(), "score"),
    ],
)
def test_the_task_that_a_worker_must_have(request_: PoolingRequest, task: str) -> None:
    assert admit_pooling(request_, request_.SerializeToString(), EVERYBODY).task == task
