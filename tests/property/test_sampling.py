"""Sampler rows equal Transformers' processors, in any batch."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sampling_oracle import drawn, processed, sequence

from loraplex_contracts.plan import NewSequence
from loraplex_contracts.request import OutputParams, SamplingParams
from loraplex_server.sampling.sampler import Sampler, verify_chain

VOCAB = 97
TOKENS = st.integers(0, VOCAB - 1)


@st.composite
def sampling_params(draw: st.DrawFn) -> SamplingParams:
    penalties = draw(st.booleans())
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.0, 0.05, 0.7, 1.0, 4.0])),
        top_k=draw(st.sampled_from([0, 0, 1, 3, 20, VOCAB, 1000])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.01, 0.5, 0.9, 0.999])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.01, 0.3, 1.0])),
        typical_p=draw(st.sampled_from([1.0, 1.0, 1.0, 0.01, 0.5, 0.9])),
        repetition_penalty=draw(st.sampled_from([0.5, 1.0, 1.3, 5.0])) if penalties else 1.0,
        frequency_penalty=draw(st.floats(-2, 2)) if penalties else 0.0,
        presence_penalty=draw(st.floats(-2, 2)) if penalties else 0.0,
        bad_words=tuple(draw(st.lists(st.lists(TOKENS, min_size=1, max_size=3).map(tuple), max_size=4))),
        allowed_token_ids=tuple(range(VOCAB // 3, VOCAB, draw(st.sampled_from([1, 2])))) if draw(st.booleans()) else (),
        seed=draw(st.integers(0, 2**64 - 1)),
        logit_bias=tuple(draw(st.dictionaries(TOKENS, st.floats(-100, 100), max_size=4)).items()),
    )


@st.composite
def rows(draw: st.DrawFn) -> list[tuple[NewSequence, list[int]]]:
    found: list[tuple[NewSequence, list[int]]] = []
    for row in range(draw(st.integers(1, 7))):
        prompt = draw(st.lists(TOKENS, min_size=1, max_size=6))
        output = draw(st.lists(TOKENS, max_size=8))
        new = sequence(
            prompt,
            draw(sampling_params()),
            row=row,
            output=OutputParams(draw(st.booleans()), draw(st.integers(0, 3))),
            min_tokens=draw(st.integers(0, 9)),
            banned=draw(st.frozensets(TOKENS, max_size=3)),
        )
        found.append((new, prompt + output))
    return found


@settings(max_examples=80, deadline=None)
@given(batch=rows(), seed=st.integers(0, 2**31), scale=st.sampled_from([0.1, 2.0, 20.0]), data=st.data())
def test_every_row_of_every_batch(
    batch: list[tuple[NewSequence, list[int]]], seed: int, scale: float, data: st.DataObject
) -> None:
    generator = torch.Generator().manual_seed(seed)
    num_rows = len(batch)
    logits = torch.randn(num_rows, VOCAB, generator=generator, dtype=torch.float64) * scale
    tokens = torch.randint(0, VOCAB, (num_rows, 20), generator=generator)
    sampler = Sampler(num_rows, VOCAB, "cpu")
    for new, history in batch:
        sampler.set_row(new.row, new)
        tokens[new.row, : len(history)] = torch.tensor(history)
    order = data.draw(st.permutations(range(num_rows)))
    positions = [len(batch[row][1]) for row in order]
    found = sampler.sample(logits[list(order)], order, positions, tokens).to_host()
    for sample, row in enumerate(order):
        new, history = batch[row]
        assert not found.is_bad[sample]
        assert found.token_ids[sample] == drawn(logits[row], new, history)
        if not new.sampling.is_greedy:
            assert processed(logits[row], new, history)[found.token_ids[sample]] > -torch.inf
        asked = new.output.logprobs or new.output.top_logprobs > 0
        assert (found.logprobs[sample] is not None) == asked


@settings(deadline=None)
@given(st.lists(st.integers(0, 2), max_size=6), st.lists(st.integers(0, 2), min_size=7, max_size=7))
def test_verification_takes_the_agreeing_prefix_and_one_more(draft: list[int], sampled: list[int]) -> None:
    out = verify_chain(draft, sampled[: len(draft) + 1])
    num_accepted = len(out) - 1
    assert list(out) == [*draft[:num_accepted], sampled[num_accepted]]
    assert num_accepted == len(draft) or draft[num_accepted] != sampled[num_accepted]
