"""Dialects of HTTP: a request as a job of calls, and the job's answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from loraplex_contracts.errors import LoraplexError
from loraplex_proto.v1 import inference_pb2 as pb
from loraplex_router.http.errors import error_object
from loraplex_router.http.router_calls import RouterCalls
from loraplex_router.http.streaming import DONE, EventStream, data_event, events_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(ABC):
    """One HTTP request as calls, and what its answer depends on."""

    requests: tuple[pb.GenerateRequest, ...] = field(repr=False)  # one for each prompt; they may have a token
    is_streamed: bool
    ignored: tuple[str, ...]

    @abstractmethod
    def named(self, error: LoraplexError) -> LoraplexError:
        """The error of a call; where an adapter is missing, with its name as the request has it."""


JobT = TypeVar("JobT", bound=Job)


class Answer(ABC, Generic[JobT]):
    """A job's answer in the form of its dialect: whole, or as events of a stream."""

    done: ClassVar[bytes] = DONE  # behind the last event

    def __init__(self, job: JobT) -> None:
        self.job = job

    @abstractmethod
    def whole(self, answers: Sequence[pb.GenerateResponse]) -> Any:
        """The body of an answer that is not streamed, as JSON has it."""

    def headers(self, answers: Sequence[pb.GenerateResponse]) -> dict[str, str]:
        """Headers that only an answer has that is not streamed."""
        return {}

    @abstractmethod
    def events(self, prompt: int, raw: bytes) -> Iterable[bytes]:
        """Server-sent events of one message, which is for the prompt with this index."""

    def end(self) -> Iterable[bytes]:
        """Events behind those of all messages."""
        return ()

    def error(self, error: LoraplexError) -> bytes:
        """The event of an error, which is the last."""
        return data_event(error_object(error))


async def respond(router: RouterCalls, answer: Answer[JobT], request: Request, headers: dict[str, str]) -> Response:
    """Runs the job's calls. `headers` are the answer's in any case. Raises the error of a call before the answer has
    begun; a later one is an event of the stream."""
    job = answer.job
    try:
        if not job.is_streamed:
            found = await router.generate(job.requests, request)
            return JSONResponse(answer.whole(found), headers={**headers, **answer.headers(found)})
        calls, first = await router.generate_stream(job.requests, request)
    except LoraplexError as error:
        raise job.named(error) from error
    events = events_of(
        calls, first, answer.events, answer.end, lambda error: answer.error(job.named(error)), answer.done
    )
    return EventStream(calls, events, headers)
