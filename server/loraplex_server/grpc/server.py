"""Assembly of a worker: engine, services, health, metrics; order of start and drain."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import loraplex_proto
from loraplex_adapters.sources.chain import make_source
from loraplex_adapters.sources.watch import SourceWatch
from loraplex_contracts.adapters import AdapterId
from loraplex_contracts.errors import EngineLost, InvalidArgument, LoraplexError
from loraplex_proto.v1 import adapter_pb2, inference_pb2, pooling_pb2, worker_pb2
from loraplex_proto.validate import ModelLimits
from loraplex_runtime.child_folder import child_folder
from loraplex_runtime.listener import Listener, server_options
from loraplex_runtime.metrics import describe_process
from loraplex_runtime.quotas import TenantQuotas
from loraplex_runtime.reports import Progress, no_progress
from loraplex_runtime.shutdown import Ending
from loraplex_server.config import ChatConfig, WorkerConfig
from loraplex_server.engine.client import EngineClient
from loraplex_server.engine.pipe import ModelInfo
from loraplex_server.engine.process import EngineBuilder
from loraplex_server.frontend.templates import Templates
from loraplex_server.frontend.tokenizing import Tokenizing
from loraplex_server.grpc.adapter_service import AdapterListing, AdapterServicer
from loraplex_server.grpc.inference_service import InferenceServicer
from loraplex_server.grpc.load_service import WorkerServicer
from loraplex_server.grpc.metrics import WorkerCollector, WorkerMetrics, describe_engine
from loraplex_server.grpc.middleware import RequestGate, service_handler
from loraplex_server.grpc.pooling_service import PoolingServicer
from loraplex_server.model.places import check_places, reaching_hub
from loraplex_server.text.chat_template import syntax_fault
from loraplex_server.text.tokenizer import TextTokenizer, import_library

if TYPE_CHECKING:
    from loraplex_server.text.response_template import ResponseFormat

log = logging.getLogger(__name__)

# Seconds for handlers to answer with an error when the engine is gone.
LOST_DRAIN_S = 0.5

SERVICES = (
    inference_pb2.DESCRIPTOR.services_by_name["InferenceService"],
    pooling_pb2.DESCRIPTOR.services_by_name["PoolingService"],
    adapter_pb2.DESCRIPTOR.services_by_name["AdapterService"],
    worker_pb2.DESCRIPTOR.services_by_name["WorkerService"],
)
SERVICE_NAMES = tuple(service.full_name for service in SERVICES)

# Seconds for the last answers to reach their clients, before the port closes.
FLUSH_S: Final = 1.0
# Age of a client's connection, and time for its streams to end after that.
MAX_AGE_S: Final = 3600.0
MAX_AGE_GRACE_S: Final = 600.0


@dataclass
class Worker:
    """A running worker."""

    engine: EngineClient
    info: ModelInfo
    listener: Listener
    gate: RequestGate
    tokenizing: Tokenizing
    templates: Templates
    source: SourceWatch

    @property
    def address(self) -> str:
        return self.listener.address

    @property
    def num_requests(self) -> int:
        """Running and queued requests in the engine's last report."""
        load = self.engine.state.load
        return load.num_running + load.num_queued

    async def drain(self, drain_s: float, *, announce_s: float = 0.0) -> None:
        """Reports for `announce_s` that it drains, then refuses new requests, waits up to `drain_s` for the running
        ones, and stops. The port stays open until the last request has ended, so that new ones get a reason. A second
        call with less time shortens the wait."""
        self.gate.is_leaving = True
        self.engine.changes.notify()
        self.listener.health.begin_drain()
        await asyncio.sleep(announce_s)
        await self.gate.drain(drain_s)
        await self.engine.stop()  # ends what still runs, with an error that says why
        await self.gate.drain(FLUSH_S)
        await self.listener.stop(FLUSH_S)
        await self.templates.close()
        await self.tokenizing.close()
        self.source.close()


async def start_worker(
    config: WorkerConfig,
    on_progress: Progress = no_progress,
    *,
    inline: bool = False,
    builder: EngineBuilder | None = None,
    tokenizer: TextTokenizer | None = None,
) -> Worker:
    """Listens, then starts the engine; serves once it is ready.

    Raises the typed error of whatever cannot be had (model, port, files)."""
    # Before the port is open: it raises where there is no shared memory.
    engine = EngineClient(
        config.engine,
        max_unread_tokens=config.max_unread_tokens,
        # The CPU time of sending cannot be told from that of an engine in this process.
        max_stream_wait_s=0.0 if inline else config.max_stream_wait_s,
    )
    listener = await Listener.open(
        config,
        SERVICE_NAMES,
        server_options(config.max_message_bytes, max_age_s=MAX_AGE_S, max_age_grace_s=MAX_AGE_GRACE_S),
        what="worker",
        role="worker",
        router_digest=config.router_digest,
    )
    source: SourceWatch | None = None
    try:
        if builder is None:
            await asyncio.to_thread(check_places, config.engine)
            if (folder := child_folder()) is not None:
                # Importing Transformers needs a working directory.
                log.warning(
                    "the working directory is gone or closed to this user: relative paths lead nowhere, so give "
                    "absolute ones"
                )
                os.chdir(folder)
        source = SourceWatch(make_source(config.engine.adapters.root))  # the Hub cannot be listed
        starting = engine.start(on_progress, inline=inline, builder=builder)
        info = await (_while_importing(starting) if tokenizer is None else starting)
        if tokenizer is None:  # in a thread: health checks are answered meanwhile
            tokenizer = await asyncio.to_thread(_load_tokenizer, info, config.chat)
        formats = partial(_response_format, tokenizer, config.chat)
        await asyncio.to_thread(formats, None)  # imports Transformers, and raises
        if config.engine.adapters.preload:
            await _preload(engine, config.engine.adapters.preload, on_progress)
        return _serve(config, listener, engine, info, tokenizer, source, formats)
    except BaseException:
        if source is not None:
            source.close()
        await engine.stop()
        await listener.stop(0.0)
        raise


async def _while_importing(starting: Awaitable[ModelInfo]) -> ModelInfo:
    """The engine that starts, with Transformers imported meanwhile. Raises what either raises, the engine first."""
    importing = asyncio.ensure_future(_import_library())
    importing.add_done_callback(lambda done: done.cancelled() or done.exception())  # it is not lost below
    try:
        info = await starting
        await importing
        return info
    finally:
        importing.cancel()  # if it has not begun


async def _import_library() -> None:
    """Imports Transformers, in a thread that a worker which is told to end does not wait for."""
    thread = ThreadPoolExecutor(1, "import")
    try:
        await asyncio.get_running_loop().run_in_executor(thread, import_library)
    finally:
        thread.shutdown(wait=False)


async def _preload(engine: EngineClient, names: Sequence[str], on_progress: Progress) -> None:
    """Loads adapters one after the other. One that fails keeps no worker from serving the others: the engine remembers
    why."""
    on_progress(f"loading {len(names)} adapters")
    for name in names:
        try:
            await engine.load_adapter(AdapterId(name))
        except EngineLost:
            raise
        except LoraplexError as error:
            log.error("adapter %s was not preloaded: %s", name, error)


def _load_tokenizer(info: ModelInfo, chat: ChatConfig) -> TextTokenizer:
    """The tokenizer of the served model. Raises InvalidArgument for a chat template that cannot be read or has another
    syntax, UnsupportedModel for a tokenizer that cannot be read."""
    try:
        chat_template = None if chat.template is None else chat.template.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"{chat.template} cannot be read: {error}", field="--chat-template") from error
    if chat_template is not None and (fault := syntax_fault(chat_template)):
        raise InvalidArgument(f"{chat.template} is not a chat template: {fault}", field="--chat-template")
    with reaching_hub([(info.base, info.base_revision)]):
        return TextTokenizer.from_pretrained(info.base, revision=info.base_revision, chat_template=chat_template)


def _response_format(tokenizer: TextTokenizer, chat: ChatConfig, chat_template: str | None) -> ResponseFormat | None:
    """The response format of the base model (`chat_template` None), or of another chat template. Raises InvalidArgument
    for a response template that cannot be used."""
    from loraplex_server.text.response_template import ResponseFormat  # late: imports Transformers

    if not tokenizer.has_text:
        return None
    if chat_template is not None:
        return ResponseFormat.of(chat_template, None, chat.tool_format, chat.response_template)
    own, template = tokenizer.response_template, tokenizer.facts().chat_template
    return ResponseFormat.of(template, own, chat.tool_format, chat.response_template)


def _serve(
    config: WorkerConfig,
    listener: Listener,
    engine: EngineClient,
    info: ModelInfo,
    tokenizer: TextTokenizer,
    source: SourceWatch,
    formats: Callable[[str | None], ResponseFormat | None],
) -> Worker:
    if listener.registry is not None:
        describe_process(listener.registry, "worker", loraplex_proto.__version__)
        describe_engine(listener.registry, engine)
        listener.refusals.show_in(listener.registry, "worker")
        WorkerCollector(listener.registry, lambda: engine.state)
    gate = RequestGate(WorkerMetrics(listener.registry), TenantQuotas(config.quota_share), listener.tracing)
    tokenizing = Tokenizing(tokenizer, ModelLimits(info.vocab_size, info.max_context_tokens))
    templates = Templates(
        tokenizing,
        engine,
        of_requests=config.chat.request_templates,
        of_adapters=config.engine.adapters.templates,
        format_of=formats,
    )
    templates.prepare()
    listing = AdapterListing(lambda: engine.state.listing, source, info.own_adapters)
    gate.adapter_names = listing.names
    servicers = (
        InferenceServicer(engine, info, tokenizing, gate, templates),
        PoolingServicer(engine, info, tokenizing, gate, templates),
        AdapterServicer(engine, gate, listing),
        WorkerServicer(engine, gate),
    )
    listener.serve([service_handler(*pair) for pair in zip(SERVICES, servicers, strict=True)])
    engine.on_stalled = lambda is_stalled: listener.health.set_ready(not is_stalled)
    engine.on_stalled(bool(engine.stalled))  # it may have frozen since it was ready: a tokenizer takes seconds to load
    return Worker(engine, info, listener, gate, tokenizing, templates, source)


async def run_worker(
    config: WorkerConfig,
    on_progress: Progress = no_progress,
    on_ready: Callable[[Worker], None] = lambda worker: None,
    on_drain: Callable[[int], None] = lambda num_requests: None,
) -> int:
    """Serves until SIGTERM, SIGINT or SIGHUP, then drains; a second signal ends it at once. `on_drain` gets the number
    of requests that are under way. Returns the exit status: 0 after a drain, 128 and the signal's number where one came
    while the model was loading, 1 when the engine ended by itself."""
    ending = Ending()
    ending.listen()
    starting = asyncio.ensure_future(start_worker(config, on_progress))
    stopping = asyncio.ensure_future(ending.asked.wait())
    await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await starting
        return ending.status
    worker = await starting
    try:
        gc.freeze()  # what a worker has by now it keeps; collections that go through it hold up every stream
        on_ready(worker)
        lost = asyncio.ensure_future(worker.engine.lost.wait())
        await asyncio.wait({stopping, lost}, return_when=asyncio.FIRST_COMPLETED)
        is_lost = worker.engine.lost.is_set()
        if not is_lost:
            on_drain(worker.num_requests)
        announce_s = ending.announce_s(config.announce_s)
        gently = worker.drain(LOST_DRAIN_S) if is_lost else worker.drain(config.drain_s, announce_s=announce_s)
        await ending.drain(gently, lambda: worker.drain(0.0))
        lost.cancel()
        stopping.cancel()
        return 1 if is_lost else 0
    finally:
        await worker.engine.stop()  # after an error too: this process would wait for it
