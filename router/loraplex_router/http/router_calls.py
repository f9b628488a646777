"""The router as HTTP's routes see it: calls, names of models, bounds."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from prometheus_client import CollectorRegistry
from starlette.requests import Request

from loraplex_contracts.adapters import check_adapter_ref
from loraplex_contracts.errors import AdapterNotFound, InvalidAdapterId, InvalidArgument
from loraplex_proto.v1 import adapter_pb2
from loraplex_proto.v1 import inference_pb2 as pb
from loraplex_router.adapters import AdapterFanOut
from loraplex_router.calls import Call, Calls
from loraplex_router.config import HttpOptions
from loraplex_router.http.errors import model_not_found, with_names_of
from loraplex_router.http.streaming import FanOut, Handle, Message
from loraplex_router.inference import InferenceRelay
from loraplex_router.replicas import Replicas
from loraplex_router.status import StatusService
from loraplex_runtime.auth import Credentials
from loraplex_runtime.refusals import Refusals

PAGE_SIZE: Final = 500  # adapters
# Models that clients of TGI and huggingface_hub name who mean the only one.
BASE_ALIASES: Final = frozenset({"", "tgi", "dummy"})
# How names begin that are the server's address, which @huggingface/inference sends. No adapter's does.
_URLS: Final = ("http://", "https://")


@dataclass(frozen=True, slots=True)
class RouterCalls:
    """The router's parts that HTTP requests reach."""

    calls: Calls
    relay: InferenceRelay
    adapters: AdapterFanOut
    status: StatusService
    replicas: Replicas
    is_ready: Callable[[], bool]
    credentials: Callable[[], Credentials] | None
    registry: CollectorRegistry
    served_names: tuple[str, ...]
    options: HttpOptions
    refusals: Refusals

    def base_names(self) -> tuple[str, ...]:
        """Names of the base model, the one for listings first: those that the operator gave, else its id. A shorter
        name might be an adapter's. Raises NoWorker before any worker has said its model."""
        if self.served_names:
            return self.served_names
        model_id = self.replicas.model_id
        if model_id is None:
            raise self.replicas.no_worker()
        return (model_id,)

    async def names_for(self, model: str | None, request: Request) -> tuple[str, ...]:
        """Names of the base model for a request that names `model`: with that where it is an alias, and no adapter has
        the name. Raises AdapterNotFound for "" where aliases are off."""
        names = self.base_names()
        if model and model.startswith(_URLS) and self.options.base_aliases:
            return (*names, model)
        if model not in BASE_ALIASES or model in names:
            return names
        if not self.options.base_aliases:
            if not model:
                raise model_not_found(model)
            return names
        if model:
            try:
                await self.adapter_rows(model, request)
            except AdapterNotFound:
                return (*names, model)
        return names

    def ignored(self, names: Sequence[str], harmless: Iterable[str] = ()) -> dict[str, str]:
        """Counts fields of a request that are ignored, and returns the header that names them. `harmless` ones are
        known and not named. Raises InvalidArgument for the others where requests are checked strictly."""
        if names and self.options.strict:
            raise InvalidArgument(f"`{names[0]}` is not a known field; leave it out", field=names[0])
        for name in (*harmless, *["other"] * len(names)):
            self.calls.metrics.ignored_field(name)
        return ignored_header(names)

    def sampling_defaults(self) -> pb.Sampling:
        """The base model's sampling options, as its authors recommend them."""
        info = self.replicas.model_info
        return pb.Sampling() if info is None else info.generation_defaults

    def handler(self, method: str, body: Callable[[Call, bytes], Awaitable[Any]]) -> Handle:
        """A method of the router, for `ask`, `ask_all` and `FanOut`."""
        return self.calls.handler(method, body)

    async def ask(self, handle: Handle, raw: bytes, request: Request) -> bytes:
        """One unary call of the router. Raises what it raises, and Cancelled when the client leaves."""
        (answer,) = await self.ask_all(handle, [raw], request)
        return answer

    async def ask_all(self, handle: Handle, raws: Sequence[bytes], request: Request) -> list[bytes]:
        """Unary calls of the router: their answers in order, or the first error. Raises as `ask`."""
        calls = FanOut(handle, raws, request)
        try:
            return await calls.while_connected(request.receive, calls.answers())
        finally:
            calls.cancel()

    async def generate(self, messages: Sequence[pb.GenerateRequest], request: Request) -> list[pb.GenerateResponse]:
        """The answers in the order of their requests, or the first error."""
        self._check_room(messages, request)
        self.relay.check_together(messages)
        handle = self.handler("Generate", self.relay.generate)
        found = await self.ask_all(handle, [one.SerializeToString() for one in messages], request)
        return [pb.GenerateResponse.FromString(raw) for raw in found]

    async def generate_stream(
        self, messages: Sequence[pb.GenerateRequest], request: Request
    ) -> tuple[FanOut, Message | None]:
        """Calls that run, and their first message where it comes soon (`FanOut.first`): an error in its place is raised
        here, so that it has its real status."""
        self._check_room(messages, request)
        self.relay.check_together(messages)
        await self._check_adapters(messages, request)
        handle = self.handler("GenerateStream", self.relay.generate_stream)
        calls = FanOut(handle, [one.SerializeToString() for one in messages], request)
        try:
            first = await calls.first(request.receive)
        except BaseException:
            calls.cancel()
            raise
        return calls, first

    async def _check_adapters(self, messages: Sequence[pb.GenerateRequest], request: Request) -> None:
        """Raises AdapterNotFound for an unknown adapter of calls with several: the first message may be another one's,
        and then it is too late for a status. Adapters that are yet to be fetched are not looked for."""
        if len({one.adapter_id for one in messages}) < 2:
            return
        for adapter_id in dict.fromkeys(
            one.adapter_id for one in messages if not (one.HasField("hub") or one.in_bucket)
        ):
            if adapter_id:
                await self.adapter_rows(adapter_id, request)

    def _check_room(self, messages: Sequence[pb.GenerateRequest], request: Request) -> None:
        """Raises InvalidArgument where more new tokens are asked for than the context has with no prompt at all. Up to
        there a text ends where the context does."""
        if self.replicas.model_info is None:
            return
        room = self.replicas.max_context_tokens
        for message in messages:
            if message.stopping.max_tokens > room:
                error = InvalidArgument(
                    f"`stopping.max_tokens` is {message.stopping.max_tokens}, and the model's maximum context length "
                    f"is {room} tokens; ask for fewer",
                    field="stopping.max_tokens",
                )
                raise with_names_of(error, request.scope)

    async def adapter_rows(self, adapter_id: str, request: Request) -> Sequence[adapter_pb2.Adapter]:
        """The adapter's rows. Raises AdapterNotFound for an unknown adapter, or one that the caller may not use."""
        handle = self.handler("GetAdapter", self.adapters.get)
        try:
            question = adapter_pb2.GetAdapterRequest(adapter_id=check_adapter_ref(adapter_id)).SerializeToString()
            found = adapter_pb2.GetAdapterResponse.FromString(await self.ask(handle, question, request))
        except (AdapterNotFound, InvalidAdapterId) as error:
            raise model_not_found(adapter_id) from error
        if not found.adapters:
            raise model_not_found(adapter_id)
        return found.adapters

    async def adapter_pages(
        self, request: Request, *, include_unloaded: bool = False
    ) -> AsyncIterator[Sequence[adapter_pb2.Adapter]]:
        """The rows of all adapters that the caller may use, page by page."""
        handle = self.handler("ListAdapters", self.adapters.list)
        question = adapter_pb2.ListAdaptersRequest(include_unloaded=include_unloaded, page_size=PAGE_SIZE)
        while True:
            raw = await self.ask(handle, question.SerializeToString(), request)
            page = adapter_pb2.ListAdaptersResponse.FromString(raw)
            yield page.adapters
            question.page_token = page.next_page_token
            if not question.page_token:
                return


def ignored_header(names: Sequence[str]) -> dict[str, str]:
    """The header that names a request's ignored fields; empty where there are none."""
    return {"x-loraplex-ignored": ",".join(names)} if names else {}


def request_id_of(request: Request) -> str:
    """The client's x-request-id, or the one that it was given."""
    return request.state.request_id
