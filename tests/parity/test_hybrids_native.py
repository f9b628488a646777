"""Families with states on native CPU kernels equal the whole text in float32."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from support.dense import check_logits, dense_logits, make_dense
from support.driver import Job, random_prompts
from support.native_kernels import native_kernels
from support.native_models import native_rig
from support.peft_files import SPECS, load_lora, save_adapter
from support.zoo import HYBRIDS, VOCAB_SIZE, random_model
from torch import Tensor

from loraplex_contracts.plan import AdapterUse
from loraplex_server.backends.cpu.recurrences import NativeRecurrences
from loraplex_server.layers.recurrences import Places, Recurrence

NUM_TOKENS = 10
APART = "qwen3_5-apart"  # with channels of Gated DeltaNet that a stack of layers does not know
QUICK = ("qwen3_5", "qwen3_next", APART, "granitemoehybrid", "mamba")
FAMILIES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in (*HYBRIDS, APART)]
IN_STACKS = (
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_next",
    "granitemoehybrid",
    "bamba",
)  # with mixers in the call of all layers
# Rows of states that the kernels know.
SIZES = {
    **dict.fromkeys(
        ("linear_value_head_dim", "linear_head_dim", "mamba_d_head", "mamba_head_dim", "mamba_headdim"), 16
    ),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads"), 4),
    "head_dim": 16,
}
TOLERANCE = 2e-4  # of the largest logit


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_the_whole_text(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in chunks, with drafts, right and wrong ones, and with a LoRA beside the base model."""
    sizes = {name: size for name, size in SIZES.items() if (family, name) != ("bailing_hybrid", "head_dim")}
    if family == APART:
        sizes["linear_key_head_dim"] = 6
    model = make_dense(random_model(family.removesuffix("-apart"), torch.float32, seed=3, changes=sizes))
    peft = save_adapter(model, SPECS[1], tmp_path / SPECS[1].name, seed=2)
    computed = _count(monkeypatch)
    rig = native_rig(model, native_kernels(), seed=3, max_chunk=11)
    rig.slots.install(0, load_lora(tmp_path, SPECS[1].name, rig.loaded.base_targets(max_rank=16)))
    jobs = [
        Job(prompt, NUM_TOKENS, (AdapterUse(0),) if idx % 2 else ())
        for idx, prompt in enumerate(random_prompts(6, VOCAB_SIZE, seed=3, longest=40))
    ]
    for idx, job in enumerate(jobs[:5]):
        job.propose = _guess(idx)
    rig.run(jobs)
    assert [job.error for job in jobs] == [None] * len(jobs)
    for job in jobs:
        want = dense_logits(peft if job.adapters else model, job.prompt, job.tokens)
        check_logits(rig.logits(job), want, job.tokens, TOLERANCE)
    assert len({tuple(job.tokens) for job in jobs}) > 4, "the model says the same to everything"
    layers = rig.loaded.decoder.weights if rig.loaded.decoder is not None else ()
    assert any(layer.mixer is not None for layer in layers) is (family in IN_STACKS)
    assert computed[True] > 10  # of drafts alone, in a stack
    assert not computed[False], "a recurrence that the kernels do not know"


def _guess(seed: int) -> Callable[[list[int]], list[int]]:
    dice = random.Random(seed)
    return lambda tokens: [dice.randrange(VOCAB_SIZE) for _ in range(dice.randint(0, 4))]


def _count(monkeypatch: pytest.MonkeyPatch) -> Counter[bool]:
    """Counts recurrences by whether the kernels computed them."""
    seen: Counter[bool] = Counter()
    run = NativeRecurrences.run

    def counted(
        self: NativeRecurrences, recurrence: Recurrence, inputs: Sequence[Tensor], states: Tensor, places: Places
    ) -> Tensor | None:
        found = run(self, recurrence, inputs, states, places)
        seen[found is not None] += 1
        return found

    monkeypatch.setattr(NativeRecurrences, "run", counted)
    return seen
