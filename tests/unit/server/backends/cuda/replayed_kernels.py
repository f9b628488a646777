"""Steps from graphs over the Triton kernels equal eager steps without them.

Not collected by itself: `test_interpreter.py` runs it in Triton's interpreter, in a process of its own. By hand:
`OMP_NUM_THREADS=1 TRITON_INTERPRET=1 pytest tests/unit/server/backends/cuda/replayed_kernels.py`.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import pytest
import torch
from support.backends import PatchedBackend
from support.driver import Job, Rig, make_rig, random_prompts
from support.replay import calls_again
from support.zoo import VOCAB_SIZE, random_model

from loraplex_adapters.weights import AdapterWeights, LoraFactors
from loraplex_contracts.adapters import AdapterKey
from loraplex_contracts.plan import AdapterUse
from loraplex_server.backends.cuda.attention.paged import TritonPagedAttention
from loraplex_server.backends.cuda.fused import TritonFused
from loraplex_server.backends.cuda.graphs import GraphShape
from loraplex_server.backends.cuda.lora.operation import TritonOps
from loraplex_server.model.loader import adopt_model


@pytest.mark.parametrize("shapes", [[GraphShape(3), GraphShape(3, 3)], [GraphShape(3, ragged_tokens=12)]], ids=str)
def test_texts_from_replays_over_the_kernels(shapes: list[GraphShape]) -> None:
    """Ranks that differ, rows without adapters, a mixture, drafts of different lengths, modules left alone."""
    torch.set_num_threads(1)
    model = random_model("llama", dtype=torch.float32)

    def rig_of(*, replays: bool) -> tuple[Rig, list[int]]:
        counted: list[int] = []

        def capture(launch: Callable[[], object]) -> Callable[[], None]:
            again = calls_again(launch)

            def replay() -> None:
                counted.append(1)
                again()

            return replay

        fused = TritonFused() if replays else None
        loaded = adopt_model(copy.deepcopy(model), backend=PatchedBackend(merges=replays, fused=fused, capture=capture))
        assert replays == any("forward" in module.__dict__ for module in loaded.model.modules())
        attention = TritonPagedAttention(loaded.spec.layers) if replays else "torch"
        ops = TritonOps(max_rank=8) if replays else None
        rig = make_rig(loaded, max_rows=3, max_chunk=4, ops=ops, attention=attention, num_slots=3)
        rig.free_blocks.remove(0)
        if replays:
            rig.cache.clear_blocks([0])
            rig.runner.capture(shapes, lambda text: None)
        install_ranks(rig)
        return rig, counted

    (eager, _), (replayed, counted) = rig_of(replays=False), rig_of(replays=True)
    want, jobs = jobs_of(), jobs_of()
    eager.run(want)
    replayed.run(jobs)
    assert len(counted) > replayed.num_steps // 2
    assert len(counted) == replayed.num_steps or not shapes[0].is_ragged
    for job, other in zip(jobs, want, strict=True):
        assert job.error is None
        assert job.tokens == other.tokens
        torch.testing.assert_close(replayed.logits(job), eager.logits(other), rtol=1e-3, atol=1e-4)


def jobs_of() -> list[Job]:
    uses = [(AdapterUse(0),), (), (AdapterUse(1),), (AdapterUse(2, 0.5), AdapterUse(0))]
    jobs = [Job(prompt, 4, use) for prompt, use in zip(random_prompts(4, VOCAB_SIZE, longest=5), uses, strict=True)]
    for job in jobs[1:3]:
        job.propose = lambda so_far: random.Random(len(so_far)).choices(range(2, VOCAB_SIZE), k=len(so_far) % 3)
    return jobs


def install_ranks(rig: Rig) -> None:
    torch.manual_seed(3)
    for slot, rank in enumerate((2, 8, 5)):
        paths = [path for path in rig.loaded.targets if "proj" in path]
        if slot == 2:
            paths = [path for path in paths if "layers.1.mlp" in path]
        modules = {path: rig.loaded.targets[path] for path in paths}
        factors = {
            path: LoraFactors(
                torch.randn(rank, module.in_features) / 6, torch.randn(module.out_features, rank) / 6, 1.5
            )
            for path, module in modules.items()
        }
        key = AdapterKey("lora", f"{slot}" * 64)
        rig.slots.install(slot, AdapterWeights(key, torch.zeros(0, dtype=torch.uint8), factors))
