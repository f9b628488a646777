"""States of adapter names and contents, their transitions and records.

A *name* is what requests say; a *key* is a content (contracts/adapters.py). A name is fetched and bound to a key; a
key's weights move between the tiers. A key is draining when it has no name any more and requests still hold it. That is
not a state, because draining weights go on moving; it follows from the names and counts in the record.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from loraplex_contracts.adapters import (
    NOBODY,
    OWN_ORIGIN,
    AdapterKey,
    AdapterOrigin,
    AdapterTemplates,
    AdapterUser,
    ClassifierInfo,
    LoadOptions,
    name_in,
)
from loraplex_contracts.errors import IllegalTransition, LoraplexError


class NameState(Enum):
    FETCHING = auto()  # on its way from the source; bound to nothing yet
    BOUND = auto()
    REBINDING = auto()  # bound, and being read again for LoadAdapter
    FAILED = auto()  # remembered, and answered from memory for a while


class NameEvent(Enum):
    FETCH = auto()
    FETCHED = auto()
    FAIL = auto()


NAME_TRANSITIONS: Mapping[tuple[NameState, NameEvent], NameState] = {
    (NameState.FETCHING, NameEvent.FETCHED): NameState.BOUND,
    (NameState.FETCHING, NameEvent.FAIL): NameState.FAILED,
    (NameState.FAILED, NameEvent.FETCH): NameState.FETCHING,
    (NameState.BOUND, NameEvent.FETCH): NameState.REBINDING,
    (NameState.REBINDING, NameEvent.FETCHED): NameState.BOUND,
    (NameState.REBINDING, NameEvent.FAIL): NameState.BOUND,  # the old binding stays
}


class KeyState(Enum):
    KNOWN = auto()  # its bytes are in the disk store, or were
    STAGING = auto()  # disk -> host under way
    ON_HOST = auto()
    PROMOTING = auto()  # host -> device under way, by way of the host if need be
    ON_DEVICE = auto()  # with or without a copy on the host
    REFETCHING = auto()  # the disk store had dropped the bytes; the source is asked for the same content
    FAILED = auto()  # remembered for a while


class KeyEvent(Enum):
    STAGE = auto()
    STAGED = auto()
    PROMOTE = auto()
    PROMOTED = auto()
    EVICT_HOST = auto()
    EVICT_DEVICE = auto()  # a copy stays on the host
    EVICT_LAST = auto()  # from the device, with no copy on the host
    LOST = auto()
    REFETCHED = auto()
    FAIL = auto()
    RETRY = auto()


KEY_TRANSITIONS: Mapping[tuple[KeyState, KeyEvent], KeyState] = {
    (KeyState.KNOWN, KeyEvent.STAGE): KeyState.STAGING,
    (KeyState.KNOWN, KeyEvent.PROMOTE): KeyState.PROMOTING,
    (KeyState.STAGING, KeyEvent.STAGED): KeyState.ON_HOST,
    (KeyState.STAGING, KeyEvent.LOST): KeyState.REFETCHING,
    (KeyState.STAGING, KeyEvent.FAIL): KeyState.FAILED,
    (KeyState.ON_HOST, KeyEvent.PROMOTE): KeyState.PROMOTING,
    (KeyState.ON_HOST, KeyEvent.EVICT_HOST): KeyState.KNOWN,
    (KeyState.PROMOTING, KeyEvent.PROMOTED): KeyState.ON_DEVICE,
    (KeyState.PROMOTING, KeyEvent.LOST): KeyState.REFETCHING,
    (KeyState.PROMOTING, KeyEvent.FAIL): KeyState.FAILED,
    (KeyState.ON_DEVICE, KeyEvent.EVICT_HOST): KeyState.ON_DEVICE,
    (KeyState.ON_DEVICE, KeyEvent.EVICT_DEVICE): KeyState.ON_HOST,
    (KeyState.ON_DEVICE, KeyEvent.EVICT_LAST): KeyState.KNOWN,
    (KeyState.REFETCHING, KeyEvent.REFETCHED): KeyState.KNOWN,
    (KeyState.REFETCHING, KeyEvent.FAIL): KeyState.FAILED,
    (KeyState.FAILED, KeyEvent.RETRY): KeyState.KNOWN,
}

# A job is under way. Its outcome will come, so the record stays whatever happens meanwhile.
IN_TRANSIT = frozenset({KeyState.STAGING, KeyState.PROMOTING, KeyState.REFETCHING})


@dataclass(slots=True)
class LoadOperation:
    """LoadAdapter on a name, for equal calls: from the first of them to the last that takes the result."""

    pin: bool
    user: AdapterUser
    options: LoadOptions
    calls: set[int]  # that were there before its fetch and have not taken its result
    asked_round: int  # the table's round of the first call
    # The fetch under way began before this load was asked for, and may have read older files or reads another place:
    # another one follows.
    is_behind: bool = False
    error: LoraplexError | None = None
    bound_round: int = -1  # the table's round in which the name was bound
    ended_s: float | None = None  # when a result was there to be taken

    @property
    def is_of_fetch(self) -> bool:
        """True if it waits for the outcome of the fetch under way."""
        return self.ended_s is None and not self.is_behind


@dataclass(slots=True)
class NameRecord:
    """Record of one name. `ticket` tells the outcome of the present fetch from those of forgotten ones."""

    name: str
    state: NameState
    ticket: int
    key: AdapterKey | None = None
    version: AdapterKey | None = None  # of a name with a version: the only content that it is ever bound to
    origin: AdapterOrigin = OWN_ORIGIN  # of its key; without one, where requests look for it
    fetched_from: AdapterOrigin = OWN_ORIGIN  # of the last fetch
    base: str = ""  # that its files name
    error: LoraplexError | None = None  # of the last fetch or load, until one succeeds
    failed_until_s: float = 0.0
    load: LoadOperation | None = None
    is_asked_within_limits: bool = False  # by a tenant whose bytes are limited, since the last fetch began
    is_sourced: bool = False  # its origin is another than its own, and a load in this process has named it

    @property
    def is_fetching(self) -> bool:
        return self.state in (NameState.FETCHING, NameState.REBINDING)

    def step(self, event: NameEvent) -> None:
        """Moves the name to the state that `event` leads to. Raises IllegalTransition."""
        following = NAME_TRANSITIONS.get((self.state, event))
        if following is None:
            raise IllegalTransition(f"name {self.name!r} in state {self.state.name} cannot {event.name}")
        self.state = following


@dataclass(frozen=True, slots=True)
class AdapterTraits:
    """Properties of a content that its files tell, beside its size."""

    num_heads: int = 0
    classifier: ClassifierInfo | None = None
    templates: AdapterTemplates | None = None
    pooling: str = ""  # how its texts become embeddings; empty where it does not say
    invocation: tuple[int, ...] = ()  # tokens that activate it; empty: it always is
    not_mixed: str = ""  # why it cannot be a member of a mixture; empty where it can


PLAIN_TRAITS = AdapterTraits()


@dataclass(slots=True)
class KeyRecord:
    """Record of one content."""

    key: AdapterKey
    num_bytes: int
    rank: int
    traits: AdapterTraits = PLAIN_TRAITS
    state: KeyState = KeyState.KNOWN
    slot: int = -1  # while PROMOTING and ON_DEVICE
    has_host: bool = False  # host bytes are counted: STAGING, ON_HOST, PROMOTING, and ON_DEVICE with a copy
    num_holds: int = 0  # by requests
    num_leases: int = 0  # of its slot, by running sequences
    # Holds by the name without its version, "" for one that no listing has, and all of them since the record is there.
    holds: Counter[str] = field(default_factory=Counter[str])
    uses: Counter[str] = field(default_factory=Counter[str])
    names: set[str] = field(default_factory=set[str])
    pinned_names: set[str] = field(default_factory=set[str])  # by the operator
    last_name: str = ""
    error: LoraplexError | None = None
    failed_until_s: float = 0.0
    reserved_rounds: int = 0  # for which it still waits for the request that it was brought up for
    used_round: int = 0  # the table's round in which it was last asked for or given back

    @property
    def is_resident(self) -> bool:
        """True if its weights take host or device memory, or are on their way there."""
        return self.has_host or self.slot >= 0

    @property
    def is_in_use(self) -> bool:
        """True if it is held, leased or pinned, or a job is under way for it."""
        return self.num_holds > 0 or self.num_leases > 0 or bool(self.pinned_names) or self.state in IN_TRANSIT

    def forget_uses(self, name: str) -> None:
        """Drops the count of a name's uses, unless it is still listed: bound, with a version bound, or the last one."""
        base = name_in(name)
        if not self.holds[base] and base not in map(name_in, (*self.names, self.last_name)):
            self.uses.pop(base, None)

    def num_running(self, name: str) -> int:
        """Running sequences of a name: all that have a lease, or where other names hold the content too, no more than
        there are requests for this one."""
        num_holds = self.holds[name_in(name)]
        return self.num_leases if num_holds == self.num_holds else min(self.num_leases, num_holds)

    def check(self, event: KeyEvent) -> KeyState:
        """The state that `event` leads to. Raises IllegalTransition."""
        following = KEY_TRANSITIONS.get((self.state, event))
        if following is None:
            raise IllegalTransition(f"{self.key} in state {self.state.name} cannot {event.name}")
        return following

    def step(self, event: KeyEvent) -> None:
        self.state = self.check(event)


def remembered_s(error: LoraplexError, failure_ttl_s: float) -> float:
    """Seconds for which a failure is answered from memory: no longer than the error itself says that it lasts. Where it
    says 0, it is not time that helps, but what the next request brings: those that wait are told so."""
    hint = error.retry_after_s
    return min(failure_ttl_s, hint) if hint else failure_ttl_s


# --- jobs that the tables ask for -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FetchName:
    """Fetch of a name: source -> store, or of a version a look into the store; answered by `name_fetched` or
    `name_failed` with the ticket."""

    name: str
    ticket: int
    origin: AdapterOrigin = OWN_ORIGIN
    tenant: str = NOBODY.tenant  # that asked first
    version: AdapterKey | None = None


@dataclass(frozen=True, slots=True)
class Refetch:
    """Fetch of a content that the store has dropped: source -> store; answered by `refetched` or `refetch_failed`."""

    key: AdapterKey
    name: str
    origin: AdapterOrigin = OWN_ORIGIN
    tried: frozenset[str] = frozenset()  # of the content's names, this one included
    passing: LoraplexError | None = None  # that another name ended with: waiting helps


@dataclass(frozen=True, slots=True)
class Stage:
    """Copy to the host: store -> host; answered by `staged`, `lost` or `failed`."""

    key: AdapterKey


@dataclass(frozen=True, slots=True)
class Promote:
    """Copy to the device: store or host -> device; answered by `promoted`, `lost` or `failed`. The copy on the host
    stays."""

    key: AdapterKey
    slot: int


@dataclass(frozen=True, slots=True)
class DropHost:
    key: AdapterKey


@dataclass(frozen=True, slots=True)
class DropDevice:
    key: AdapterKey
    slot: int


Fetch = FetchName | Refetch
Move = Stage | Promote | DropHost | DropDevice
