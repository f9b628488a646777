"""Step plans and step results, between scheduler and runner.

A plan is `{sequence: number of tokens}` plus draft tokens. Prefill, chunked prefill, decode and verification of a draft
are one operation: run `num_tokens` of a sequence from position `start`, sample behind the last `num_samples` of them.
Spans contain no token ids: the runner keeps every sequence's tokens in its row, so that a plan can be made before the
tokens of the last step are known on the host. All records are plain data and could be broadcast,
except for the matchers of grammars, which the scheduler advances and the runner reads.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from loraplex_contracts.errors import LoraplexError
from loraplex_contracts.request import OutputParams, PoolingParams, PositionLogprobs, Request, SamplingParams


@dataclass(frozen=True, slots=True)
class AdapterUse:
    """A device slot that a sequence uses, and its weight in a mixture."""

    adapter_slot: int
    weight: float = 1.0


class GrammarMatcher(Protocol):
    """The place of a sequence in its grammar. Owned by the sequence."""

    num_slow: int  # of its next masks, those that may take long

    @property
    def inner(self) -> Any:
        """The library's own matcher, for the masks of many at once."""
        ...

    @property
    def num_words(self) -> int:
        """Number of 32-bit words in one mask."""
        ...

    @property
    def error(self) -> str:
        """Why the matcher cannot go on, such as a limit that it has passed; empty while it can."""
        ...

    def copy(self) -> GrammarMatcher: ...

    def rebuild(self, reason: str) -> bool:
        """Has the grammar compiled again for this text alone, where that helps against the library's `reason` why the
        matcher, or a copy, cannot go on. True if it can now."""
        ...

    def advance(self, token_id: int) -> bool:
        """Takes in the next token, which is legal and no end-of-sequence token. True where nothing may follow."""
        ...

    def num_legal(self, draft: Sequence[int]) -> int:
        """Length of the draft's prefix that may come next and leaves another token to draw behind it."""
        ...

    def forced(self) -> Sequence[int]:
        """Tokens that spell what has to come next, or the first of them; perhaps none where they are many."""
        ...


class Candidate(NamedTuple):
    """A running sequence that decodes in the next step, as proposers see it."""

    sequence_id: str
    row: int
    token_ids: Sequence[int]  # prompt, then output. The scheduler's own list: read only
    num_prompt_tokens: int
    num_room: int  # draft tokens that can still be accepted; 0 at the completion's last token
    request: Request
    sampling: SamplingParams  # the completion's own, seed included
    adapter_slot: int | None  # of its LoRA; None of a mixture
    matcher: GrammarMatcher | None = None


@dataclass(frozen=True, slots=True)
class Draft:
    """A chain of draft tokens that may follow a sequence's known tokens."""

    token_ids: tuple[int, ...]
    proposer: str  # for the counters


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence enters (or, after a preemption, re-enters) the runner's batch in `row`."""

    sequence_id: str
    row: int
    token_ids: tuple[int, ...]  # prompt, then output
    num_prompt_tokens: int
    sampling: SamplingParams
    output: OutputParams
    adapters: tuple[AdapterUse, ...] = ()
    adapted_from: int = 0  # position of the first token that they change
    # No end-of-sequence or stop token may be sampled before this many output tokens.
    min_tokens: int = 0
    banned_until_min: frozenset[int] = frozenset()
    # The runner keeps its last hidden state after every step, for Medusa heads.
    keeps_hidden: bool = False
    matcher: GrammarMatcher | None = None  # read only
    pooling: PoolingParams | None = None


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """A copy of a KV block before the step: a completion forks from another one's half-filled block."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class StateUse:
    """The state slots of a span, in models with layers that keep a state of fixed size (see `kv/states.py`)."""

    source: int  # what the span begins with; 0: nothing comes before it
    target: int  # where the state goes, behind the last token that is not a rejected draft
    # Further slots that get the state as it is before a position: (position, slot), positions ascending and within the
    # span, its end included, its draft excluded.
    copies: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Span:
    """Run `num_tokens` tokens of one sequence, positions `start` to `start + num_tokens`.

    The last `len(draft)` of them are draft tokens; the `num_samples` last positions are sampled: 0 in the middle of a
    prompt, else 1 + len(draft).
    """

    sequence_id: str
    row: int
    start: int
    num_tokens: int
    num_samples: int
    # Appended to the row's block table before the step.
    new_block_ids: tuple[int, ...] = ()
    draft: tuple[int, ...] = ()
    proposer: str = ""  # of the draft
    # Logprobs of all the span's positions that have a next prompt token.
    prompt_logprobs: bool = False
    # The last piece of a sequence with `pooling`: its values come with the result. No span of it is sampled.
    ends_pooling: bool = False
    # None in models without such layers; in others the span then begins with nothing, and leaves nothing.
    state: StateUse | None = None

    @property
    def has_output(self) -> bool:
        return self.num_samples > 0 or self.ends_pooling


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. The runner applies, in this order: `released`, `entered`, `copies`, then runs `spans`."""

    step: int
    spans: tuple[Span, ...]
    entered: tuple[NewSequence, ...] = ()
    released: tuple[int, ...] = ()  # rows
    copies: tuple[BlockCopy, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(span.num_tokens for span in self.spans)


@dataclass(frozen=True, slots=True)
class PooledValues:
    values: array[float]  # [num_rows, num_columns] float64
    num_columns: int


@dataclass(frozen=True, slots=True)
class SpanResult:
    """Result of one span. With a draft: the accepted tokens and the one sampled behind them."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] = ()  # one per token_id, when asked for
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()  # of prompt positions start+1 .. start+num_tokens
    pooled: PooledValues | None = None  # of a span that ends pooling
    error: LoraplexError | None = None  # of this sequence alone, behind the token_ids: accepted draft tokens


@dataclass(frozen=True, slots=True)
class StepResult:
    step: int
    spans: Mapping[str, SpanResult]  # by sequence_id
