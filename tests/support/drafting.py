"""Handmade candidates for proposers, and jobs with drafts."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from loraplex_contracts.plan import Candidate
from loraplex_contracts.request import Request, SamplingParams, SpeculationParams, StoppingParams
from loraplex_server.speculation.proposer import Ask, Proposer
from support.driver import Job


def ask(
    name: str,
    tokens: Sequence[int],
    num_tokens: int = 4,
    *,
    num_prompt: int | None = None,
    num_room: int = 1000,
    sampling: SamplingParams | None = None,
    **request: Any,
) -> Ask:
    """`request`: fields of the Request."""
    num_prompt = len(tokens) if num_prompt is None else num_prompt
    made = Request(name, tuple(tokens[:num_prompt]), request.pop("stopping", StoppingParams(1000)), **request)
    candidate = Candidate(name, 0, tokens, num_prompt, num_room, made, sampling or SamplingParams(), None)
    return Ask(candidate, num_tokens, SpeculationParams("draft_model", max_draft_tokens=num_tokens))


def speculate(job: Job, proposer: Proposer, num_tokens: int = 4) -> Job:
    """Lets `proposer` draft for the job, alone."""

    def propose(tokens: list[int]) -> list[int]:
        wanted = ask(
            job.sequence_id,
            tokens,
            num_tokens,
            num_prompt=len(job.prompt),
            num_room=job.num_tokens - len(job.tokens) - 1,
            sampling=job.sampling,
        )
        return list(proposer.propose([wanted])[0]) if wanted.candidate.num_room else []

    job.propose = propose
    return job


def erring_drafts(text: list[int], vocab_size: int, error_rate: float, seed: int) -> Callable[[list[int]], list[int]]:
    """Drafts for a Job: up to four of the text's next tokens, each wrong with this probability."""
    dice = random.Random(seed)

    def propose(so_far: list[int]) -> list[int]:
        true = text[len(so_far) : len(so_far) + dice.randint(1, 4)]
        return [(token + 1) % vocab_size if dice.random() < error_rate else token for token in true]

    return propose
