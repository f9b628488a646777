"""Request as the engine gets it: validated, picklable plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from loraplex_contracts.ids import NO_ADAPTER, AdapterId
from loraplex_contracts.sampling import SamplingParams

SpeculationKind = Literal["off", "auto", "medusa", "prompt_lookup", "draft_model"]


@dataclass(frozen=True, slots=True)
class StoppingParams:
    """Conditions that end a completion. Stop *strings* are matched by the front end, after detokenization."""

    max_tokens: int  # always set; by default the rest of the context
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    include_stop: bool = False


@dataclass(frozen=True, slots=True)
class OutputParams:
    """Outputs of a request besides its tokens."""

    logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs: bool = False


@dataclass(frozen=True, slots=True)
class SpeculationParams:
    """Speculation of a request. It changes the speed, never the text."""

    # None: Medusa with the heads of the request's adapter, if it has any, else the server's --speculate.
    kind: SpeculationKind | None = None
    # Adapter id of the Medusa heads. Empty: those of the request's adapter, else the server's default heads.
    medusa_id: AdapterId = NO_ADAPTER
    min_ngram: int = 0  # 0: the server's choice, here and below
    max_ngram: int = 0
    draft_name: str = ""  # one of --draft-model; empty: the only one
    max_draft_tokens: int = 0  # per step
    fixed_length: bool = False  # always draft max_draft_tokens


@dataclass(frozen=True, slots=True)
class Request:
    """One accepted request of `n` completions. Times are seconds of `time.monotonic()`, which processes share."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    stopping: StoppingParams
    sampling: SamplingParams = field(default_factory=SamplingParams)
    output: OutputParams = field(default_factory=OutputParams)
    speculation: SpeculationParams = field(default_factory=SpeculationParams)
    adapter_id: AdapterId = NO_ADAPTER
    tenant: str = "default"
    cache_salt: str = ""
    n: int = 1
    priority: int = 0
    arrival_s: float = 0.0
    deadline_s: float | None = None


def seed_of_completion(seed: int, index: int) -> int:
    """The seed of completion `index`: the request's own for the first; the others are a golden ratio step apart."""
    return (seed + index * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
