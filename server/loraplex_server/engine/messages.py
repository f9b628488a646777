"""What crosses the pipe between the front end and the engine. Plain data only, every type picklable."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from loraplex_contracts.adapters import AdapterId, AdapterInfo, CacheUsage, ListingChanges
from loraplex_contracts.errors import LoraplexError
from loraplex_contracts.events import Event
from loraplex_contracts.load import Load
from loraplex_contracts.request import Request

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
    """The front end met a stop string: end this completion as STOP."""

    request_id: str
    index: int


@dataclass(frozen=True, slots=True)
class AdapterCommand:
    """One operation of the adapter service; answered by a Reply with the same `operation_id`."""

    operation_id: int
    verb: Literal["load", "unload", "get"]
    adapter_id: AdapterId
    pin: bool = False


@dataclass(frozen=True, slots=True)
class Abandon:
    """Nobody waits for this operation any more."""

    operation_id: int


@dataclass(frozen=True, slots=True)
class MessageTakes:
    """What a message to a client takes of the front end's CPU: how often to send is decided by it."""

    cpu_s: float


@dataclass(frozen=True, slots=True)
class Wake:
    """Nothing to do but to look again (a load has finished)."""


@dataclass(frozen=True, slots=True)
class Shutdown:
    """End the loop; what is still running fails as Draining."""


Command = Submit | Cancel | StopCompletion | AdapterCommand | Abandon | MessageTakes | Wake | Shutdown

# --- from the engine ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the front end needs to know of the loaded model."""

    model_id: str
    model_type: str
    dtype: str
    device: str
    vocab_size: int
    max_context_tokens: int
    max_lora_rank: int
    eos_token_ids: tuple[int, ...]
    # What requests may draft with: "prompt_lookup", "medusa", "draft_model:NAME", ...
    speculation: tuple[str, ...] = ()
    # Where the base model's files are, its tokenizer among them: a directory or a Hub id.
    base: str = ""
    base_revision: str | None = None
    # Adapters that come with the model, as the Medusa heads of a model that has its own.
    own_adapters: tuple[str, ...] = ()


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


@dataclass(frozen=True, slots=True)
class Batch:
    """Everything that one turn of the loop has to say, or several that were sent together."""

    events: tuple[Event, ...] = ()
    replies: tuple[Reply, ...] = ()
    load: Load = field(default_factory=Load)
    # Of the adapters' listing, since the last batch; only when the residency has changed.
    changes: ListingChanges | None = None
    usage: CacheUsage | None = None


@dataclass(frozen=True, slots=True)
class Stopped:
    """The loop has ended; `integrity` says what check_integrity() found, empty when all is accounted for."""

    integrity: str = ""


FromEngine = Starting | Ready | StartFailed | Batch | Stopped

Connection = Any  # multiprocessing.connection.Connection, which differs in type between platforms
