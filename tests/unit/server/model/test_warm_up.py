"""Steps before the first request: which there are, and that they leave nothing."""

from __future__ import annotations

import pytest
import torch
from support.driver import Job, make_rig, random_prompts
from support.replay import ReplayableReference
from support.zoo import VOCAB_SIZE, random_model

from loraplex_server.backends.reference.attention import TorchPagedAttention
from loraplex_server.layers.linear import AdaptedLinear
from loraplex_server.model import runner as module
from loraplex_server.model.loader import adopt_model


class Planned(TorchPagedAttention):
    def __init__(self) -> None:
        super().__init__()
        self.lengths: list[int] = []

    def plan(self, batch, dtype, device):  # type: ignore[no-untyped-def]
        self.lengths += batch.query_lens.tolist()
        return super().plan(batch, dtype, device)


@pytest.mark.parametrize(("max_tokens", "lengths"), [(20, [1, 2, 4, 8, 16, 20]), (16, [1, 2, 4, 8, 16]), (1, [1])])
def test_every_size_of_block_comes_up(max_tokens: int, lengths: list[int]) -> None:
    attention, ops = Planned(), ReplayableReference()
    rig = make_rig(adopt_model(random_model("llama")), ops=ops, attention=attention)
    said: list[str] = []
    rig.runner.warm_up(max_tokens, said.append)
    assert attention.lengths == lengths
    num_linears = sum(isinstance(target, AdaptedLinear) for target in rig.loaded.targets.values())
    assert ops.num_applied == len(lengths) * (num_linears - 1)  # the head's adapters are another matter
    assert said == []


def test_no_longer_than_the_cache_or_the_context() -> None:
    attention = Planned()
    rig = make_rig(adopt_model(random_model("llama"), max_context_tokens=50), attention=attention, num_blocks=3)
    rig.runner.warm_up(1000, lambda text: None)
    assert attention.lengths[-1] == 12
    rig = make_rig(adopt_model(random_model("llama"), max_context_tokens=50), attention=attention)
    rig.runner.warm_up(1000, lambda text: None)
    assert attention.lengths[-1] == 50


def test_what_takes_long_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REPORT_EVERY_S", 0.0)
    rig = make_rig(adopt_model(random_model("llama")))
    said: list[str] = []
    rig.runner.warm_up(3, said.append)
    assert said[0] == "compiling kernels: 1 of 3 lengths of steps"
    assert "kernels compiled in 0 s" in said[-1]


def test_texts_are_what_they_were() -> None:
    prompts = random_prompts(4, VOCAB_SIZE)
    texts: list[list[list[int]]] = []
    for warms_up in (False, True):
        rig = make_rig(adopt_model(random_model("llama")))
        if warms_up:
            rig.runner.warm_up(64, lambda text: None)
            for layer in rig.cache.layers:
                layer.k.fill_(torch.nan)
        jobs = [Job(prompt, 6) for prompt in prompts]
        rig.run(jobs)
        texts.append([job.tokens for job in jobs])
    assert texts[0] == texts[1]
