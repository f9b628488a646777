"""The pipe between front end and engine: messages, the command writer, frames.

Messages are plain, picklable data. Commands that would block go through a thread: the pipe of a frozen engine fills
up, and a write to it would hold the event loop for good. The front end cuts the bytes of the engine into messages
itself: `recv` of a connection waits for a whole message, and an engine may freeze in the middle of one.
"""

from __future__ import annotations

import contextlib
import queue
import select
import struct
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pickle import dumps
from typing import Any, Final, Literal

from loraplex_contracts.adapters import (
    NOBODY,
    PLAIN_LOAD,
    AdapterId,
    AdapterInfo,
    AdapterUser,
    AdapterVersion,
    CacheUsage,
    ListingChanges,
    LoadOptions,
)
from loraplex_contracts.errors import LoraplexError
from loraplex_contracts.load import Load
from loraplex_contracts.request import Event, Request
from loraplex_server.engine.step_sizes import StepSizes

AdapterVerb = Literal["load", "unload", "get", "templates"]

# --- to the engine --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Submit:
    request: Request


@dataclass(frozen=True, slots=True)
class Cancel:
    """Ends the whole request with `error`. A request that has ended already is left alone."""

    request_id: str
    error: LoraplexError


@dataclass(frozen=True, slots=True)
class StopCompletion:
    """Ends one completion as STOP: the front end met a stop string."""

    request_id: str
    index: int


@dataclass(frozen=True, slots=True)
class AdapterCommand:
    """One operation of the adapter service; answered by a Reply with the same `operation_id`."""

    operation_id: int
    verb: AdapterVerb
    adapter_id: AdapterId
    pin: bool = False
    user: AdapterUser = NOBODY
    options: LoadOptions = PLAIN_LOAD  # of "load"; its origin of "templates" too
    if_unused: bool = False  # of "unload"


@dataclass(frozen=True, slots=True)
class Abandon:
    """Gives up an operation that nobody waits for any more."""

    operation_id: int


@dataclass(frozen=True, slots=True)
class SendCost:
    """CPU seconds of the front end for a message to a client; sets the pause between sendings."""

    cpu_s: float


@dataclass(frozen=True, slots=True)
class Wake:
    """Wakes the loop: a load has finished, and the next turn looks."""


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Ends the loop; running requests fail as Draining."""


Command = Submit | Cancel | StopCompletion | AdapterCommand | Abandon | SendCost | Wake | Shutdown

# --- from the engine ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The loaded model, as the front end knows it."""

    model_id: str
    model_type: str
    dtype: str
    device: str
    vocab_size: int
    max_context_tokens: int
    max_lora_rank: int
    eos_token_ids: tuple[int, ...]
    # Kinds of drafting that requests may name, except for draft models: "medusa", "prompt_lookup".
    speculation: tuple[str, ...] = ()
    # Where the base model's files are, its tokenizer among them: a directory or a Hub id.
    base: str = ""
    base_revision: str | None = None
    # Adapters that come with the model, as the Medusa heads of a model that has its own.
    own_adapters: tuple[str, ...] = ()
    # Sampling options that the model's files recommend.
    generation_defaults: Mapping[str, float] = field(default_factory=dict[str, float])
    kv_block_tokens: int = 0
    max_device_adapters: int = 0
    hidden_size: int = 0  # values of an embedding
    draft_models: tuple[str, ...] = ()  # names of draft models


@dataclass(frozen=True, slots=True)
class Starting:
    """Progress of the start, for a progress bar."""

    text: str


@dataclass(frozen=True, slots=True)
class Ready:
    info: ModelInfo


@dataclass(frozen=True, slots=True)
class StartFailed:
    error: LoraplexError


@dataclass(frozen=True, slots=True)
class Reply:
    operation_id: int
    adapters: tuple[AdapterInfo, ...] = ()
    error: LoraplexError | None = None
    version: AdapterVersion | None = None  # of "templates"


@dataclass(frozen=True, slots=True)
class Batch:
    """Output of one turn of the loop, or of several that were sent together."""

    events: tuple[Event, ...] = ()
    replies: tuple[Reply, ...] = ()
    load: Load = field(default_factory=Load)
    # Of the adapters' listing, since the last batch; only when the residency has changed.
    changes: ListingChanges | None = None
    usage: CacheUsage | None = None
    steps: StepSizes | None = None  # now and then


@dataclass(frozen=True, slots=True)
class Stopped:
    """The loop has ended; `integrity` says what check_integrity() found, empty when all is accounted for."""

    integrity: str = ""


FromEngine = Starting | Ready | StartFailed | Batch | Stopped

Connection = Any  # multiprocessing.connection.Connection, which differs in type between platforms

_SHORT: Final = struct.Struct("!i")
_LONG: Final = struct.Struct("!Q")


class FrameReader:
    """Cuts bytes into messages. Owns the beginning of a message that is not complete."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Takes in what was read; returns the messages that are complete, oldest first."""
        self._buffer += data
        frames: list[bytes] = []
        start = 0  # of the next message: its length, then its bytes
        while (begin := start + _SHORT.size) <= len(self._buffer):
            (length,) = _SHORT.unpack_from(self._buffer, start)
            if length < 0:  # a long one
                if begin + _LONG.size > len(self._buffer):
                    break
                (length,) = _LONG.unpack_from(self._buffer, begin)
                begin += _LONG.size
            if begin + length > len(self._buffer):
                break
            start = begin + length
            frames.append(bytes(self._buffer[begin:start]))
        del self._buffer[:start]
        return frames


# A pipe that Linux calls writable takes this much without blocking: three quarters of its buffer of 208 KiB are free.
DIRECT_BYTES: Final = 1 << 16 if sys.platform == "linux" else 0


class CommandWriter:
    """Sends commands in order without blocking. Owns the thread, unsent commands, and the connection's end."""

    def __init__(self, conn: Connection) -> None:
        self._conn = conn
        self._poll = select.poll()
        self._poll.register(conn.fileno(), select.POLLOUT)
        self._unsent: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._num_unsent = 0  # put to the queue and not yet written; the lock holds it
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._write, name="engine-commands", daemon=True)
        self._thread.start()

    def send(self, command: Command) -> None:
        """Sends a command. Raises OSError when the engine is gone."""
        # Bytes. What a connection's own `send` pickles into is a buffer that Python complains of, where the error of a
        # failed send keeps it.
        payload = dumps(command)
        with self._lock:
            is_direct = not self._num_unsent and len(payload) <= DIRECT_BYTES and bool(self._poll.poll(0))
            self._num_unsent += not is_direct
        if is_direct:
            self._conn.send_bytes(payload)
        else:
            self._unsent.put(payload)

    def close(self) -> None:
        """Closes the connection as soon as no write is under way; one to an engine that is gone ends at once."""
        self._unsent.put(None)

    def _write(self) -> None:
        while (payload := self._unsent.get()) is not None:
            with contextlib.suppress(OSError):  # the engine is gone, which the reader of the pipe sees too
                self._conn.send_bytes(payload)
            with self._lock:
                self._num_unsent -= 1
        self._conn.close()
