"""Hostile adapters, names and requests against a live server beside running streams."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from peft import PeftModel
from support.adapter_files import HIDDEN, write_adapter
from support.credentials import credential, write_credentials
from support.dense import greedy
from support.hostile_adapters import CASES
from support.processes import Running, loraplex, wait_until
from support.world import byte_tokenizer, make_world
from transformers import AutoModelForCausalLM

from loraplex import Client
from loraplex_contracts.errors import (
    AdapterNotFound,
    AdapterOutsideRoot,
    AdapterVersionNotFound,
    ContextLengthExceeded,
    InvalidAdapterId,
    InvalidArgument,
    LoraplexError,
    MessageTooLarge,
    PermissionDenied,
    Unauthenticated,
    Unimplemented,
)
from loraplex_proto import validate
from loraplex_proto.status import from_rpc_error
from loraplex_proto.v1 import adapter_pb2, adapter_pb2_grpc, inference_pb2, inference_pb2_grpc

pytestmark = pytest.mark.timeout(300)
PROMPT = "Ask me anything"
NUM_TOKENS = 24
CONTEXT = 512
NEIGHBOURS = ("", "acme/a000", "acme/a001")  # adapters of the streams
BAD = {f"bad-{index:02}": name for index, name in enumerate(CASES)}
Generate = inference_pb2.GenerateRequest
TokenIds = inference_pb2.TokenIds
Sampling = inference_pb2.Sampling
Stopping = inference_pb2.Stopping
Output = inference_pb2.Output


@dataclass
class World:
    """A server's files."""

    model: Path
    root: Path
    auth_file: Path
    texts: dict[str, list[int]]  # greedy, of PROMPT, by adapter


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    home = tmp_path_factory.mktemp("hostile")
    made = make_world(home, 2, hidden_size=HIDDEN, max_context=CONTEXT)  # the shapes of the hostile ones' base
    made.adapters.rename(home / "made")
    root = home / "adapters"
    texts: dict[str, list[int]] = {}
    ids = byte_tokenizer().encode(PROMPT)
    for adapter in NEIGHBOURS:
        model: Any = AutoModelForCausalLM.from_pretrained(made.model, dtype=torch.float64)
        if adapter:
            (root / "acme").mkdir(parents=True, exist_ok=True)
            folder = (home / "made" / adapter.removeprefix("acme/")).rename(root / adapter)
            model = PeftModel.from_pretrained(model, folder, autocast_adapter_dtype=False)
        texts[adapter] = greedy(model, ids, NUM_TOKENS, min_tokens=NUM_TOKENS)
    write_adapter(root / "good", seed=5)
    for folder, case in BAD.items():
        spoil, _ = CASES[case]
        spoil(root / folder)
    mallorys = ("mallory", "bad-*", "good", "nothing")
    auth_file = write_credentials(
        home / "auth.json",
        credential("acme", "acme", "acme/*"),
        credential("user", *mallorys),
        credential("admin", *mallorys, roles=("user", "admin")),
    )
    return World(made.model, root, auth_file, texts)


@pytest.fixture(scope="module")
def server(world: World) -> Iterator[Running]:
    with loraplex(
        "serve", str(world.model), "--adapters", str(world.root), "--port", "0", "--dtype", "float64",
        "--max-lora-rank", "16", "--adapter-slots", "4", "--max-running", "8", "--kv-memory", "4MiB",
        "--auth-file", str(world.auth_file),
    ) as running:  # fmt: skip
        yield running
        assert running.end() == 0, running.output
        assert "unaccounted" not in running.output
        assert "Traceback" not in running.output, running.output


@dataclass
class Neighbours:
    """Streams of another tenant, one after the other for each adapter. Owns their threads, and what was wrong."""

    world: World
    address: str
    num_texts: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    has_ended: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.threads = [threading.Thread(target=self._stream, args=(one,), daemon=True) for one in NEIGHBOURS]
        for thread in self.threads:
            thread.start()

    def _stream(self, adapter_id: str) -> None:
        with Client(self.address, token="acme", timeout_s=60) as client:
            while not self.has_ended.is_set() and not self.wrong:
                try:
                    stream = client.stream(
                        PROMPT, adapter_id=adapter_id or None, max_tokens=NUM_TOKENS, min_tokens=NUM_TOKENS
                    )
                    got = [token for chunk in stream for token in chunk.token_ids]
                except LoraplexError as error:
                    self.wrong.append(f"{adapter_id!r}: {error.reason} {error}")
                    return
                if got != self.world.texts[adapter_id]:
                    self.wrong.append(f"{adapter_id!r}: {got}")
                    return
                self.num_texts[adapter_id] = self.num_texts.get(adapter_id, 0) + 1

    def end(self) -> None:
        self.has_ended.set()
        for thread in self.threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in self.threads), "a stream hangs"


@pytest.fixture
def neighbours(world: World, server: Running) -> Iterator[Neighbours]:
    """Their texts are the same as ever, at the test's end too: each has streamed one after its last request."""
    running = Neighbours(world, server.address)
    yield running
    before = dict(running.num_texts)
    counts = running.num_texts
    wait_until(
        lambda: running.wrong or all(counts.get(one, 0) > before.get(one, 0) + 1 for one in NEIGHBOURS), 60, "a text"
    )
    running.end()
    assert not running.wrong, running.wrong
    assert set(running.num_texts) == set(NEIGHBOURS), running.num_texts
    print(f"texts beside: {running.num_texts}")


@dataclass
class Mallory:
    """Raw calls of a tenant, without the SDK's own checks."""

    channel: grpc.Channel

    def __post_init__(self) -> None:
        self.inference = inference_pb2_grpc.InferenceServiceStub(self.channel)
        self.adapters = adapter_pb2_grpc.AdapterServiceStub(self.channel)

    def refusal(self, method: Any, request: Any, token: str = "user") -> LoraplexError:
        with pytest.raises(grpc.RpcError) as caught:
            answer = method(request, timeout=30, metadata=(("authorization", f"Bearer {token}"),))
            for _ in answer if hasattr(answer, "cancel") else ():
                pass
        return from_rpc_error(caught.value)

    def refusals(self, request: Generate) -> list[LoraplexError]:
        """Refusals of a request by Generate and by GenerateStream."""
        return [self.refusal(self.inference.Generate, request), self.refusal(self.inference.GenerateStream, request)]


@pytest.fixture
def mallory(server: Running) -> Iterator[Mallory]:
    options = [("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(server.address, options=options) as channel:
        yield Mallory(channel)


def check_words(error: LoraplexError, world: World) -> None:
    """Error messages tell no path of the server's; the base model's name is what its operator gave, as GetInfo says
    it."""
    assert error.message.isascii()
    assert str(world.root.parent) not in error.message.replace(str(world.model), "")
    assert len(error.message) <= 1024
    assert "Traceback" not in error.message


# --- folders --------------------------------------------------------------------------------------------------------


def test_each_hostile_folder_is_refused_by_name(neighbours: Neighbours, mallory: Mallory, world: World) -> None:
    for adapter_id, case in BAD.items():
        _, expected = CASES[case]
        load = adapter_pb2.LoadAdapterRequest(adapter_id=adapter_id)
        found = [
            *mallory.refusals(Generate(text="x", adapter_id=adapter_id)),
            *mallory.refusals(Generate(text="x", adapters=[{"id": adapter_id, "weight": 1.0}])),  # type: ignore[list-item]
            mallory.refusal(mallory.adapters.LoadAdapter, load, "admin"),
        ]
        is_missing = issubclass(expected, AdapterNotFound)
        for error in found:
            assert type(error) is expected, (case, error.reason, error.message)
            assert error.code is expected.code
            assert error.resource == adapter_id, case
            assert error.field == "adapter_id", (case, error.field)
            assert f"'{adapter_id}'" in error.message
            check_words(error, world)
        assert not (world.root / adapter_id / "was-run").exists(), case
        # It stays visible with its reason; what is not there is not.
        get = adapter_pb2.GetAdapterRequest(adapter_id=adapter_id)
        if is_missing and expected is not AdapterOutsideRoot:
            assert type(mallory.refusal(mallory.adapters.GetAdapter, get, "admin")) is AdapterNotFound
        else:
            answer = mallory.adapters.GetAdapter(get, timeout=30, metadata=(("authorization", "Bearer admin"),))
            assert [row.last_error_reason for row in answer.adapters] == [expected.reason], case


# --- names ----------------------------------------------------------------------------------------------------------

HOSTILE_IDS = (
    "..", "../good", "good/..", "a/../good", "/etc/passwd", "./good", "a//b", "a/b/c", "/", ".hidden", "good.",
    "good\0", "good\n", " good", "good ", "go od", "~/good", "C:\\good", "http://127.0.0.1/good", "https://hub/org/sql",
    "s3:b/good", "hub:org/sql", "file:///good", "g\u043e\u043ed", "good\u200b", "\uff47ood", "g\u00f6d", "%2e%2e",
    "$(id)", "a'b", "x" * 129, "x" * 100_000, "good@", "good@0000000", "good@ABCDEF01", "good@" + "0" * 65,
    "good@../../etc", "@" + "0" * 8,
)  # fmt: skip


@pytest.mark.parametrize(
    ("path", "request_"),
    [
        ("adapter_id", lambda name: Generate(text="x", adapter_id=name)),
        ("adapters.id", lambda name: Generate(text="x", adapters=[inference_pb2.AdapterWeight(id=name, weight=1)])),
        (
            "speculation.medusa.adapter_id",
            lambda name: Generate(
                text="x", speculation=inference_pb2.Speculation(medusa=inference_pb2.MedusaSpeculation(adapter_id=name))
            ),
        ),
    ],
)
def test_an_id_is_never_a_path_or_an_address(
    path: str, request_: Callable[[str], Generate], neighbours: Neighbours, mallory: Mallory, world: World
) -> None:
    for name in HOSTILE_IDS:
        for error in mallory.refusals(request_(name)):
            assert type(error) is InvalidAdapterId, (name, error.reason, error.message)
            assert error.field == path
            check_words(error, world)


def test_loads_of_hostile_names_and_places(neighbours: Neighbours, mallory: Mallory, world: World) -> None:
    for name in HOSTILE_IDS:
        for method, message in (
            (mallory.adapters.LoadAdapter, adapter_pb2.LoadAdapterRequest),
            (mallory.adapters.UnloadAdapter, adapter_pb2.UnloadAdapterRequest),
            (mallory.adapters.GetAdapter, adapter_pb2.GetAdapterRequest),
        ):
            error = mallory.refusal(method, message(adapter_id=name), "admin")
            assert (type(error), error.field) == (InvalidAdapterId, "adapter_id"), (name, error.message)
            check_words(error, world)
    for source, expected in {
        "../outside": InvalidArgument,
        "good/../../outside": InvalidArgument,
        "good\0": InvalidArgument,
        "x" * 1025: InvalidArgument,
        "/etc": AdapterNotFound,  # for those who may use all, ADAPTER_OUTSIDE_ROOT
        str(world.root.parent / "outside"): AdapterNotFound,
        str(world.root / "acme/a000"): AdapterNotFound,
        "acme/a000": AdapterNotFound,  # another tenant's
        "acme/nil0": AdapterNotFound,
        "http://127.0.0.1:9/x": Unimplemented,
        "file:///etc": Unimplemented,
        "hub:../../etc": InvalidArgument,
        "hub:org/sql": AdapterNotFound,  # there is no Hub here
        "s3:bucket/x": AdapterNotFound,
    }.items():
        request = adapter_pb2.LoadAdapterRequest(adapter_id="nothing", source=source)
        error = mallory.refusal(mallory.adapters.LoadAdapter, request, "admin")
        assert type(error) is expected, (source, error.reason, error.message)
        assert error.field == "source", (source, error.field)
        if not source.startswith(str(world.root.parent)):
            check_words(error, world)
    forget = adapter_pb2.UnloadAdapterRequest(adapter_id="nothing")
    mallory.adapters.UnloadAdapter(forget, metadata=(("authorization", "Bearer admin"),))
    assert isinstance(mallory.refusal(mallory.adapters.LoadAdapter, load_of("good")), PermissionDenied)
    assert isinstance(mallory.refusal(mallory.adapters.LoadAdapter, load_of("good"), "nobody"), Unauthenticated)


def load_of(name: str) -> adapter_pb2.LoadAdapterRequest:
    return adapter_pb2.LoadAdapterRequest(adapter_id=name)


def test_anothers_adapter_is_as_unknown_as_one_that_is_not_there(
    neighbours: Neighbours, mallory: Mallory, world: World
) -> None:
    """Loaded or not, with a version or without, alone or in a mixture."""
    for ask in (
        lambda name: mallory.refusals(Generate(text="x", adapter_id=name)),
        lambda name: mallory.refusals(Generate(text="x", adapter_id=f"{name}@00000000")),
        lambda name: mallory.refusals(
            Generate(text="x", adapters=[inference_pb2.AdapterWeight(id=one, weight=1) for one in ("good", name)])
        ),
        lambda name: [mallory.refusal(mallory.adapters.LoadAdapter, load_of(name), "admin")],
        lambda name: [
            mallory.refusal(mallory.adapters.GetAdapter, adapter_pb2.GetAdapterRequest(adapter_id=name), "admin")
        ],
    ):
        for theirs, unknown in zip(ask("acme/a000"), ask("acme/nil0"), strict=True):
            assert type(theirs) is type(unknown) is AdapterNotFound, theirs.message
            assert theirs.message.replace("acme/a000", "acme/nil0") == unknown.message
            assert (theirs.field, theirs.metadata.keys()) == (unknown.field, unknown.metadata.keys())
            check_words(theirs, world)
    for error in mallory.refusals(Generate(text="x", adapter_id="nothing")):
        assert (type(error), error.resource) == (AdapterNotFound, "nothing")
    mallory.inference.Generate(
        Generate(text="x", adapter_id="good", stopping=Stopping(max_tokens=1)),
        metadata=(("authorization", "Bearer user"),),
    )
    for error in mallory.refusals(Generate(text="x", adapter_id="good@00000000")):
        assert type(error) is AdapterVersionNotFound


# --- values ---------------------------------------------------------------------------------------------------------

NAN, INF = math.nan, math.inf


def of_sampling(name: str, *values: Any) -> Iterator[tuple[Generate, type[LoraplexError], str]]:
    for value in values:
        yield Generate(text="x", sampling=Sampling(**{name: value})), InvalidArgument, f"sampling.{name}"


def stopping_of(name: str, value: Any) -> Stopping:
    return Stopping(**{name: value})


def hostile_values() -> Iterator[tuple[Generate, type[LoraplexError], str]]:
    """Requests, what each is refused with, and the field."""
    huge = (1 << 32) - 1
    yield Generate(), InvalidArgument, "input"
    yield Generate(text=""), InvalidArgument, "input"
    yield Generate(text="x" * CONTEXT), ContextLengthExceeded, "input"
    yield Generate(text="x" * (1 << 20)), ContextLengthExceeded, "input"
    for ids, kind in (([], InvalidArgument), ([9999], InvalidArgument), ([huge], InvalidArgument)):
        yield Generate(token_ids=TokenIds(ids=ids)), kind, "token_ids.ids"
    yield Generate(token_ids=TokenIds(ids=[1] * CONTEXT)), ContextLengthExceeded, "token_ids.ids"
    yield Generate(token_ids=TokenIds(ids=[1] * 500_000)), ContextLengthExceeded, "token_ids.ids"
    for n in (validate.MAX_COMPLETIONS + 1, huge):
        yield Generate(text="x", n=n), InvalidArgument, "n"
    for priority in (-101, 101, -(1 << 31)):
        yield Generate(text="x", priority=priority), InvalidArgument, "priority"
    for top in (validate.MAX_TOP_LOGPROBS + 1, huge):
        yield Generate(text="x", output=Output(top_logprobs=top)), InvalidArgument, "output.top_logprobs"
    for name in ("max_tokens", "min_tokens"):
        for value in (CONTEXT + 1, validate.MAX_NEW_TOKENS + 1, huge):
            yield Generate(text="x", stopping=stopping_of(name, value)), InvalidArgument, f"stopping.{name}"
    yield Generate(text="x", stopping=Stopping(max_tokens=0)), InvalidArgument, "stopping.max_tokens"
    yield Generate(text="x", stopping=Stopping(max_tokens=1, min_tokens=2)), InvalidArgument, "stopping.min_tokens"
    for stop in ([""], ["x" * 257], ["\U0001f600" * 65], ["x"] * 17, ["x"] * 100_000):
        yield Generate(text="x", stopping=Stopping(stop=stop)), InvalidArgument, "stopping.stop"
    for stop_ids in ([9999], [huge], [1] * 129, [1] * 500_000):
        yield Generate(text="x", stopping=Stopping(stop_token_ids=stop_ids)), InvalidArgument, "stopping.stop_token_ids"
    yield from of_sampling("temperature", NAN, INF, -INF, -1.0, 101.0, 1e308)
    yield from of_sampling("top_p", NAN, INF, -0.1, 0.0, 1.1)
    yield from of_sampling("min_p", NAN, -INF, -0.1, 1.1)
    yield from of_sampling("typical_p", NAN, 0.0, 1.1)
    yield from of_sampling("repetition_penalty", NAN, INF, 0.0, -1.0, 1e308)
    yield from of_sampling("frequency_penalty", NAN, INF, -2.1, 2.1)
    yield from of_sampling("presence_penalty", NAN, -INF, -2.1, 2.1)
    yield from of_sampling("top_k", 1 << 31, huge)
    yield from of_sampling("logit_bias", {1: NAN}, {1: INF}, {1: 101.0}, {9999: 1.0}, {huge: 1.0})
    yield from of_sampling("logit_bias", dict.fromkeys(range(1025), 1.0), dict.fromkeys(range(100_000), 1.0))
    yield from of_sampling("allowed_token_ids", [9999], [huge], [1] * 16385)
    yield from of_sampling("bad_words", [""], ["x" * 129], ["x"] * 129)
    for value in ("x y", "x\0", "../x", "http://x", "\u0445", "x" * 129, "a\nb", "{}"):
        yield Generate(text="x", cache_salt=value), InvalidArgument, "cache_salt"
        yield Generate(text="x", request_id=value), InvalidArgument, "request_id"
    for weight in (NAN, INF, 0.0, 1001.0):
        member = inference_pb2.AdapterWeight(id="good", weight=weight)
        yield Generate(text="x", adapters=[member]), InvalidArgument, "adapters.weight"
    members = [inference_pb2.AdapterWeight(id="good", weight=1)] * 9
    yield Generate(text="x", adapters=members), InvalidArgument, "adapters"
    for density in (NAN, 0.0, -1.0, 1.1):
        merge = inference_pb2.AdapterMerge(strategy="ties", density=density)
        yield Generate(text="x", adapters=members[:1], merge=merge), InvalidArgument, "merge.density"
    merge = inference_pb2.AdapterMerge(strategy="\u00e9vil")
    yield Generate(text="x", adapters=members[:1], merge=merge), InvalidArgument, "merge.strategy"
    drafts = inference_pb2.Speculation(max_draft_tokens=65)
    yield Generate(text="x", speculation=drafts), InvalidArgument, "speculation.max_draft_tokens"
    lookup = inference_pb2.PromptLookupSpeculation(max_ngram=huge)
    speculation = inference_pb2.Speculation(prompt_lookup=lookup)
    yield Generate(text="x", speculation=speculation), InvalidArgument, "speculation.prompt_lookup.max_ngram"
    truncate = inference_pb2.Truncate(max_tokens=huge)
    yield Generate(text="x", truncate_prompt=truncate), InvalidArgument, "truncate_prompt.max_tokens"


def test_each_hostile_value_is_refused_with_its_field(neighbours: Neighbours, mallory: Mallory, world: World) -> None:
    for request, expected, path in hostile_values():
        for error in mallory.refusals(request):
            assert type(error) is expected, (path, error.reason, error.message)
            assert error.field == path, error.message
            check_words(error, world)


def test_messages_that_are_too_large_or_none(neighbours: Neighbours, mallory: Mallory, world: World) -> None:
    for error in mallory.refusals(Generate(text="x" * (20 << 20))):
        assert type(error) is MessageTooLarge
        check_words(error, world)
    unknown = Generate.FromString(b"\xf8\x7f\x01" + Generate(text="x").SerializeToString())  # field 2047
    for error in mallory.refusals(unknown):
        assert (type(error), error.field) == (Unimplemented, "#2047")
    raw = mallory.channel.unary_unary("/loraplex.v1.InferenceService/Generate")
    for content in (b"\xff", b"\x0a\xff\xff\xff\x7f", b"\x0a\x01\xff", b"\x00" * 1000):
        error = mallory.refusal(raw, content)
        assert type(error) is InvalidArgument, (content[:9], error.reason, error.message)
        check_words(error, world)
