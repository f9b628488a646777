"""InferenceService of a worker."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

import loraplex_proto
from loraplex_contracts.errors import LoraplexError
from loraplex_contracts.request import Request
from loraplex_contracts.sampling import TokenizerView
from loraplex_proto import validate
from loraplex_proto.estimates import TOKEN_BYTES, estimated_work
from loraplex_proto.v1 import inference_pb2, inference_pb2_grpc
from loraplex_runtime.quotas import Ticket
from loraplex_runtime.request_record import RequestRecord
from loraplex_server.engine.client import EngineClient
from loraplex_server.engine.pipe import ModelInfo
from loraplex_server.frontend.generation import Delta, Progress, generate
from loraplex_server.frontend.templates import Templates
from loraplex_server.frontend.tokenizing import Tokenizing
from loraplex_server.grpc import protobuf
from loraplex_server.grpc.answer_forms import AnswerForms
from loraplex_server.grpc.middleware import (
    RequestGate,
    begin_request,
    current_record,
    handles_errors,
    handles_stream_errors,
)
from loraplex_server.grpc.prompts import Prompts, copied_ids, refuse_early, seconds_left, within
from loraplex_server.text.responses import ResponseParsing
from loraplex_server.text.tokenizer import SHORT_CHARS, Truncation

Context = Any  # grpc.aio.ServicerContext, which is generic over messages in its stubs

T = TypeVar("T")

# Tokens, alternatives counted, that are put into an answer on the event loop: some milliseconds.
LONG_ANSWER: Final = 4096
TASKS = ("generate", "embed", "classify", "score")


@dataclass(slots=True)
class Sent:
    """Number of messages and tokens that the client has; part of every error that ends the answer."""

    num_messages: int = 0
    num_tokens: int = 0

    @contextlib.asynccontextmanager
    async def added_to_errors(self) -> AsyncGenerator[None]:
        try:
            yield
        except LoraplexError as error:
            own = copy.copy(error)  # it may end other requests too
            own.metadata |= {"messages_sent": str(self.num_messages), "tokens_sent": str(self.num_tokens)}
            raise own from error


@dataclass(frozen=True, slots=True)
class Accepted:
    """A valid request, and parts of its answer that are known already."""

    request: Request
    ticket: Ticket
    echo: str  # in front of every completion
    prompt_tokens: Sequence[inference_pb2.PromptToken]  # to be sent; without logprobs
    parsing: ResponseParsing | None = None  # of the answers, where that was asked for

    def count(self, num_tokens: int, record: RequestRecord) -> None:
        """Counts new tokens."""
        self.ticket.add_tokens(num_tokens)
        record.num_output_tokens += num_tokens

    def put_head(
        self, message: inference_pb2.GenerateResponse | inference_pb2.GenerateStreamResponse, progress: Progress
    ) -> None:
        """Puts the fields that come once, in an answer or in a stream's first message."""
        message.request_id = self.request.request_id.rpartition("/")[0]
        message.adapter_digest = progress.record.adapter_digest
        if not self.request.sampling.is_greedy:
            message.seed = self.request.sampling.seed
        protobuf.put_prompt(message, self.prompt_tokens, progress.prompt_logprobs)


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """Serves InferenceService."""

    def __init__(
        self,
        engine: EngineClient,
        info: ModelInfo,
        tokenizing: Tokenizing,
        gate: RequestGate,
        templates: Templates,
    ) -> None:
        self._engine = engine
        self._templates = templates
        self._forms = AnswerForms(tokenizing, templates, info.eos_token_ids)
        self._info = info
        self._tokenizing = tokenizing
        self._tokenizer = tokenizing.tokenizer
        self._prompts = Prompts(tokenizing, self._templates)
        self._gate = gate
        self._limits = tokenizing.limits
        self._long_answers = asyncio.Semaphore()
        self._tokenizer_view = TokenizerView(
            partial(self._tokenizer.encode, add_special_tokens=False), frozenset(info.eos_token_ids)
        )

    @handles_errors
    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> inference_pb2.GenerateResponse:
        progress = Progress(current_record())
        deltas: dict[int, list[Delta]] = {}
        accepted = await self._accept(request, context)
        generating = self._generate(accepted, progress)
        async with Sent().added_to_errors(), aclosing(generating) as batches:
            async for batch in batches:
                accepted.count(sum(len(delta.token_ids) for delta in batch), progress.record)
                for delta in batch:
                    deltas.setdefault(delta.index, []).append(delta)
        num_tokens = progress.record.num_output_tokens + len(progress.prompt_logprobs)
        return await self._apart(accepted, num_tokens, partial(self._answer, request, accepted, deltas, progress))

    @handles_stream_errors
    async def GenerateStream(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[inference_pb2.GenerateStreamResponse]:
        progress = Progress(current_record())
        accepted = await self._accept(request, context)
        sent, echoed = Sent(), set[int]()
        generating = self._generate(accepted, progress)
        async with sent.added_to_errors(), aclosing(generating) as batches:
            async for batch in batches:
                accepted.count(sum(len(delta.token_ids) for delta in batch), progress.record)
                for delta in batch:
                    message = protobuf.delta_to_pb(delta, with_token_ids=not request.output.omit_token_ids)
                    if sent.num_messages == 0:
                        to_head = partial(accepted.put_head, message, progress)
                        await self._apart(accepted, len(progress.prompt_logprobs), to_head)
                    if delta.index not in echoed:
                        echoed.add(delta.index)
                        message.text_delta = accepted.echo + message.text_delta
                    if delta.end is not None:
                        message.timings.CopyFrom(_timings(progress.record))
                    yield message
                    sent.num_messages += 1
                    sent.num_tokens += len(delta.token_ids)

    async def _apart(self, accepted: Accepted, num_tokens: int, work: Callable[[], T]) -> T:
        """Runs work that puts so many tokens into an answer: in a thread where that takes long, and one at a time,
        since Python runs one."""
        if num_tokens * (1 + accepted.request.output.top_logprobs) < LONG_ANSWER:
            return work()
        async with self._long_answers:
            return await asyncio.to_thread(work)

    def _generate(self, accepted: Accepted, progress: Progress) -> AsyncGenerator[list[Delta], None]:
        eos_token_ids = self._info.eos_token_ids
        return generate(self._engine, accepted.request, self._tokenizer, eos_token_ids, progress, accepted.parsing)

    @handles_errors
    async def Tokenize(self, request: inference_pb2.TokenizeRequest, context: Context) -> Any:
        """Gives serialized bytes: for a long text they are made in the process that tokenizes it."""
        validate.check_tokenize(request)
        self._gate.admit(*((request.adapter_id,) if request.adapter_id else ()))
        self._gate.take_quota()
        async with within(seconds_left(context)) as wait:
            origin = protobuf.adapter_origin(request, request.adapter_id)
            with wait.fetch():
                await self._templates.check_adapter(request.adapter_id, origin)
                version = await self._prompts.version(request, request.adapter_id, origin)
            text, special = await self._prompts.text(request, version)
            special = special and not request.omit_special_tokens
            raw = await self._tokenizing.tokenize(
                text, protobuf.tokenize_response, special=special, with_offsets=request.offsets
            )
        plain = text if isinstance(text, str) else text.plain
        rendered = plain if request.offsets and request.WhichOneof("input") == "chat" else ""
        return raw + inference_pb2.TokenizeResponse(rendered=rendered).SerializeToString()

    @handles_errors
    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: Context
    ) -> inference_pb2.DetokenizeResponse:
        validate.refuse_unhandled(request)
        self._gate.admit()
        self._gate.take_quota()
        async with within(seconds_left(context)):
            ids = request.token_ids
            check = partial(validate.check_token_ids, ids, "token_ids", self._limits)
            await self._tokenizing.off_loop(len(ids), check)
            copied = await self._tokenizing.off_loop(len(ids), partial(copied_ids, ids))
            text = await self._tokenizing.decode(
                copied, keep_special=not request.omit_special_tokens, field="token_ids"
            )
        return inference_pb2.DetokenizeResponse(text=text)

    @handles_errors
    async def GetTokenizerInfo(
        self, request: inference_pb2.GetTokenizerInfoRequest, context: Context
    ) -> inference_pb2.GetTokenizerInfoResponse:
        validate.refuse_unhandled(request)
        return protobuf.tokenizer_info(self._tokenizer)

    @handles_errors
    async def GetInfo(self, request: inference_pb2.GetInfoRequest, context: Context) -> inference_pb2.GetInfoResponse:
        validate.refuse_unhandled(request)
        info = self._info
        return inference_pb2.GetInfoResponse(
            model_id=info.model_id,
            model_type=info.model_type,
            version=loraplex_proto.__version__,
            role="worker",
            max_context_tokens=info.max_context_tokens,
            vocab_size=info.vocab_size,
            dtype=info.dtype,
            device=info.device,
            max_lora_rank=info.max_lora_rank,
            eos_token_ids=info.eos_token_ids,
            has_chat_template=self._tokenizer.has_chat_template,
            speculation=protobuf.speculation_kinds(info.speculation, info.draft_models),
            draft_models=info.draft_models,
            served_names=[info.model_id],
            generation_defaults=protobuf.generation_defaults(info.generation_defaults),
            tasks=TASKS,
            kv_block_tokens=info.kv_block_tokens,
            max_device_adapters=info.max_device_adapters,
        )

    async def _accept(self, message: inference_pb2.GenerateRequest, context: Context) -> Accepted:
        """A valid request. Raises typed errors."""
        adapter_name = validate.adapter_name_in(message)
        request_id = begin_request(message.request_id, adapter_name)
        validate.check_generate(message)
        current_record().adapter = adapter_name
        num_ids = len(message.token_ids.ids)
        arrival_s, remaining_s = time.monotonic(), seconds_left(context)
        async with within(remaining_s) as wait:
            # A prompt that is too long is refused before its tokens are checked, unless it is shortened.
            is_cut = message.HasField("truncate_prompt")
            num_checked = num_ids if is_cut else min(num_ids, self._limits.max_context_tokens)
            await self._tokenizing.off_loop(num_checked, partial(validate.check_for_model, message, self._limits))
            identity = self._gate.admit(*validate.adapters_in(message))
            num_prompt, num_outputs = estimated_work(message, self._info.max_context_tokens)
            flow = (identity.tenant, adapter_name)
            refuse_early(self._engine.state.load, flow, message.priority, num_prompt, num_outputs, remaining_s)
            ticket = self._gate.take_quota(
                message.n or 1,
                num_prompt_tokens=num_prompt,
                max_tokens=num_outputs if message.stopping.HasField("max_tokens") else None,
                room=num_outputs,
            )
            num_bytes = message.grammar.ByteSize()
            if message.grammar.WhichOneof("kind") == "gbnf":
                num_bytes = max(num_bytes, SHORT_CHARS)  # its parser takes a hundred times as long as others
            grammar = await self._tokenizing.off_loop(num_bytes, partial(protobuf.grammar, message.grammar))
            origin = protobuf.adapter_origin(message, message.adapter_id)
            with wait.fetch():
                version = await self._prompts.version(message, message.adapter_id, origin)
            special = not message.omit_special_tokens
            prompt = await self._prompts.ids(message, self._truncation(message), special=special, version=version)
            ticket.set_prompt(len(prompt))
            current_record().num_prompt_tokens = len(prompt)
            if is_cut or not num_ids:
                validate.check_prompt_length(len(prompt), self._limits)
            output = message.output
            to_echo = partial(self._tokenizer.echo, prompt, keep_special=output.keep_special_tokens)
            echo = await self._tokenizing.off_loop(len(prompt) * TOKEN_BYTES, to_echo) if output.echo else ""
            to_tokens = partial(protobuf.prompt_tokens_to_pb, prompt, self._tokenizer, with_bytes=output.token_bytes)
            tokens = (
                await self._tokenizing.off_loop(len(prompt) * TOKEN_BYTES, to_tokens) if output.prompt_tokens else []
            )
            parsing, grammar = await self._forms.of(message, prompt, version, grammar)
            to_params = partial(protobuf.sampling_params, message.sampling, self._tokenizer_view)
            sampling = await self._tokenizing.off_loop(message.sampling.ByteSize(), to_params)
        request = protobuf.to_request(
            message,
            prompt,
            sampling,
            request_id=self._engine.unique_id(request_id),
            tenant=identity.tenant,
            room=self._info.max_context_tokens - len(prompt),
            arrival_s=arrival_s,
            deadline_s=None if remaining_s is None else arrival_s + remaining_s,
            grammar=grammar,
            adapter_digest="" if version is None else version.digest,
            max_adapter_bytes=identity.limits.max_resident_adapter_bytes,
        )
        return Accepted(request, ticket, echo, tokens, parsing)

    def _truncation(self, message: inference_pb2.GenerateRequest) -> Truncation | None:
        stopping = message.stopping
        return self._prompts.truncation(message, stopping.max_tokens if stopping.HasField("max_tokens") else 1)

    def _answer(
        self,
        message: inference_pb2.GenerateRequest,
        accepted: Accepted,
        deltas: dict[int, list[Delta]],
        progress: Progress,
    ) -> inference_pb2.GenerateResponse:
        num_completions, echo = accepted.request.n, accepted.echo
        summaries = [end for index in range(num_completions) if (end := deltas[index][-1].end) is not None]
        assert len(summaries) == num_completions, "the last delta of a completion carries its end"
        with_ids = not message.output.omit_token_ids
        answer = inference_pb2.GenerateResponse(
            completions=[
                protobuf.completion_to_pb(summary, deltas[summary.index], prefix=echo, with_token_ids=with_ids)
                for summary in summaries
            ],
            usage=protobuf.usage_to_pb(*summaries),
            timings=_timings(progress.record),
        )
        accepted.put_head(answer, progress)
        return answer


def _timings(record: RequestRecord) -> inference_pb2.Timings:
    return inference_pb2.Timings(
        queue_s=record.queue_s or 0.0,
        time_to_first_token_s=record.first_token_s or 0.0,
        total_s=record.elapsed_s(),
    )
