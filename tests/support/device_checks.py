"""Whole engines on a device against Transformers in float64.

Needs no PEFT and no pytest. A text is right when each of its tokens is, given those before it, the reference's best one
or as good as it up to the rounding of the engine's dtype, and when the reported logprobs are the reference's. Both
models start from the same rounded numbers.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import copy
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from loraplex_contracts.request import (
    CompletionEnd,
    OutputParams,
    Request,
    RequestFailed,
    SpeculationParams,
    StoppingParams,
    Tokens,
)
from loraplex_server.config import (
    AdaptersConfig,
    BatchConfig,
    EngineConfig,
    KvConfig,
    ModelConfig,
    SpeculationConfig,
)
from loraplex_server.engine.assembly import assemble
from loraplex_server.engine.engine import Engine
from loraplex_server.engine.pipe import Submit
from loraplex_server.layers.attention import kv_block_bytes
from loraplex_server.layers.step import StagedStep
from loraplex_server.model.loader import adopt_model
from support.lora_files import RandomLora, random_lora

BLOCK_SIZE = 16
VOCAB_SIZE = 256
MAX_LEN = 256
# Of a logprob, from the reference's. The logits of these models are of size 10, of which bfloat16 keeps 8 bits.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-3, torch.float16: 0.2, torch.bfloat16: 1.0}
LIMIT_S = 200.0


def random_model(dtype: torch.dtype, hidden_size: int = 128) -> PreTrainedModel:
    """A random Llama whose numbers `dtype` can hold, in float64. Logits are of one size at every width."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=hidden_size, intermediate_size=2 * hidden_size, num_hidden_layers=3,
        num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=MAX_LEN, bos_token_id=0, eos_token_id=1,
        initializer_range=1.7 / hidden_size**0.5, tie_word_embeddings=False,
    )  # fmt: skip
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype))
    return model.eval()


@dataclass(frozen=True)
class Settings:
    """Device, dtype and model width that a check runs on."""

    device: str
    dtype: torch.dtype
    has_graphs: bool = True  # where there is CUDA
    hidden_size: int = 128
    replays: Counter[str] | None = None  # counts there


@dataclass
class Answer:
    """An engine's answer to one request."""

    request: Request
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    num_drafted: int = 0
    num_accepted: int = 0


@dataclass
class World:
    """A model, its adapters on disk, and what is right. References run on `device`: float32 sines of rotary embeddings
    differ between devices."""

    model: PreTrainedModel
    dtype: torch.dtype
    root: Path
    loras: dict[str, RandomLora] = field(default_factory=dict[str, RandomLora])
    device: str = "cpu"
    _merged: dict[str, PreTrainedModel] = field(default_factory=dict[str, PreTrainedModel])

    @staticmethod
    def of(settings: Settings, root: Path) -> World:
        model = random_model(settings.dtype, settings.hidden_size)
        return World(model, settings.dtype, root, device=settings.device)

    def add(self, rank: int, seed: int) -> str:
        name = f"r{rank}-{seed}"
        self.loras[name] = random_lora(self.model, name, rank, seed, size=0.1).rounded(self.dtype)
        self.loras[name].write(self.root / name)
        return name

    def reference(self, answer: Answer) -> Tensor:
        """Logprobs [num_tokens, vocab] that the answer's tokens should have been drawn from."""
        name = answer.request.adapter_id
        if name not in self._merged:
            merged = self.loras[name].merged_into(self.model) if name else copy.deepcopy(self.model)
            self._merged[name] = merged.to(self.device)  # type: ignore[arg-type]
        ids = torch.tensor([[*answer.request.prompt_token_ids, *answer.tokens]], device=self.device)
        with torch.inference_mode():
            logits = self._merged[name](input_ids=ids, use_cache=False).logits[0]
        return torch.log_softmax(logits[len(answer.request.prompt_token_ids) - 1 : -1].double(), -1).cpu()

    def check(self, answers: Mapping[str, Answer]) -> None:
        for name, answer in answers.items():
            tolerance = TOLERANCES[self.dtype]
            want = self.reference(answer)
            tokens = torch.tensor(answer.tokens)
            chosen = want.gather(1, tokens[:, None])[:, 0]
            assert len(answer.tokens) == answer.request.stopping.max_tokens, name
            missing = float((want.amax(1) - chosen).max())
            assert missing <= tolerance, f"{name}: a token is {missing} worse than the best"
            off = float((torch.tensor(answer.logprobs, dtype=torch.float64) - chosen).abs().max())
            assert off <= tolerance, f"{name}: a logprob is off by {off}"


def make_engine(
    world: World, settings: Settings, *, num_slots: int = 8, max_running: int = 8, **speculation: int
) -> Engine:
    """`num_slots` is how many adapters fit onto the device."""
    model = copy.deepcopy(world.model).to(world.dtype).to(settings.device)  # type: ignore[arg-type]
    loaded = adopt_model(model, max_context_tokens=MAX_LEN)
    num_blocks = 2 + max_running * MAX_LEN // BLOCK_SIZE
    config = EngineConfig(
        ModelConfig("tiny", device=settings.device, dtype=loaded.dtype_name, cuda_graphs=settings.has_graphs),
        KvConfig(BLOCK_SIZE, num_blocks * kv_block_bytes(loaded.spec, BLOCK_SIZE, loaded.dtype.itemsize)),
        BatchConfig(max_running, max_step_tokens=96, max_queue_wait_s=0.0),
        AdaptersConfig(world.root, num_device_slots=num_slots, max_rank=64),
        SpeculationConfig(**speculation),
    )
    engine = assemble(loaded, config, lambda text: None, lambda: None)
    if settings.replays is not None:
        count_replays(engine, settings.replays)
    return engine


def count_replays(engine: Engine, replays: Counter[str]) -> None:
    """Counts steps by whether they came from a graph, with adapters or without."""
    graphs: Any = getattr(engine._runner, "_graphs", None)
    replays["graphs"] += graphs.num_graphs if graphs is not None else 0
    if graphs is None:
        return
    replays["graphs not captured"] += graphs.num_wanted - graphs.num_graphs
    original = graphs.run

    def counting(staged: StagedStep) -> Any:
        found = original(staged)
        family = "adapted" if staged.token_segments else "plain"
        replays[f"{family} {'replayed' if found is not None else 'eager'}"] += 1
        return found

    graphs.run = counting


def run(engine: Engine, requests: Sequence[Request], dice: random.Random | None = None) -> dict[str, Answer]:
    """All to their end; with `dice` they come while others run. Whatever else the engine holds is given back."""
    waiting, answers = list(requests), dict[str, Answer]()
    num_open = len(waiting)
    deadline_s = time.monotonic() + LIMIT_S
    while num_open:
        while waiting and (dice is None or dice.random() < 0.5):
            request = waiting.pop(0)
            answers[request.request_id] = Answer(request)
            engine.handle(Submit(request))
        batch = engine.turn()
        for event in batch.events if batch is not None else ():
            if isinstance(event, RequestFailed):
                raise AssertionError(f"{event.request_id} failed: {event.error}")
            if isinstance(event, Tokens):
                answer = answers[event.request_id]
                answer.tokens += event.token_ids
                answer.logprobs += [entry.logprob for entry in event.logprobs]
                answer.num_drafted += event.num_drafted
                answer.num_accepted += event.num_accepted
            num_open -= isinstance(event, CompletionEnd)
        assert time.monotonic() < deadline_s, "requests without an end"
        if not engine.can_step:
            time.sleep(0.0005)  # adapters are being loaded
    engine.turn()
    assert engine.integrity_report() == ""
    return answers


def make_requests(adapters: Sequence[str], num: int, num_tokens: int) -> list[Request]:
    """Adapters in turns; prompts from one token to a few chunks."""
    dice = random.Random(0)
    return [
        Request(
            f"{idx}-{adapters[idx % len(adapters)] or 'base'}",
            tuple(dice.randrange(2, VOCAB_SIZE) for _ in range(1 if idx == 0 else dice.randint(2, 150))),
            StoppingParams(num_tokens, ignore_eos=True),
            output=OutputParams(logprobs=True),
            speculation=SpeculationParams("off"),
            adapter_id=adapters[idx % len(adapters)],
        )
        for idx in range(num)
    ]


# --- checks -----------------------------------------------------------------------------------------------------------


def check_mixed_batch(settings: Settings, root: Path) -> None:
    """Adapters of many ranks and the base in one batch."""
    world = World.of(settings, root)
    names = ["", *(world.add(rank, rank) for rank in (1, 8, 13, 16, 64))]
    engine = make_engine(world, settings)
    answers = run(engine, make_requests(names, 14, 16), random.Random(1))
    engine.close()
    world.check(answers)
    # A world in which adapters change nothing would prove nothing.
    for answer in answers.values():
        if answer.request.adapter_id:
            plain = world.reference(replace(answer, request=replace(answer.request, adapter_id="")))
            assert float((plain - world.reference(answer)).abs().max()) > 3 * TOLERANCES[settings.dtype]


def check_speculation(settings: Settings, root: Path) -> None:
    """Checks that drafts of several lengths in one batch, right and wrong ones, leave answers as right as without.
    Lookup finds right ones in what the same requests were answered the first time, and wrong ones in every text."""
    world = World.of(settings, root)
    names = ["", world.add(8, 1), world.add(16, 2)]
    engine = make_engine(world, settings, max_draft_tokens=6)
    plain = make_requests(names, 12, 40)
    without = run(engine, plain)
    kinds = [
        SpeculationParams("prompt_lookup", min_ngram=1, max_draft_tokens=num, fixed_length=True) for num in (1, 4, 6)
    ]
    kinds += [SpeculationParams("prompt_lookup"), SpeculationParams("off")]
    drafting = [replace(one, speculation=kinds[idx % len(kinds)]) for idx, one in enumerate(plain)]
    first = run(engine, drafting)
    second = run(engine, drafting, random.Random(2))
    engine.close()
    for answers in (without, first, second):
        world.check(answers)
        if settings.dtype.itemsize >= 4:
            assert {name: a.tokens for name, a in answers.items()} == {name: a.tokens for name, a in without.items()}
    drafting_answers = [*first.values(), *second.values()]
    num_accepted = sum(answer.num_accepted for answer in drafting_answers)
    num_drafted = sum(answer.num_drafted for answer in drafting_answers)
    assert 50 < num_accepted < num_drafted - 50, (num_accepted, num_drafted)


def check_churn(settings: Settings, root: Path) -> None:
    """Many more adapters than slots, loaded and evicted while others run, some of them again."""
    world = World.of(settings, root)
    names = ["", *(world.add((2, 8, 16)[idx % 3], 10 + idx) for idx in range(15))]
    engine = make_engine(world, settings, num_slots=3, max_running=6)
    requests = make_requests(names, 40, 8)
    random.Random(3).shuffle(requests)
    world.check(run(engine, requests, random.Random(4)))
    again = [replace(one, request_id=f"again-{one.request_id}") for one in reversed(requests[:20])]
    world.check(run(engine, again, random.Random(5)))
    engine.close()


def check_replays(replays: Counter[str]) -> None:
    """A check's steps came from graphs where they could: those of decoding, with adapters and without."""
    assert replays["plain replayed"] + replays["adapted replayed"] > 10, replays
    assert replays["adapted replayed"] > 5, replays
    assert replays["graphs not captured"] == 0, replays


CHECKS = {"mixed-batch": check_mixed_batch, "speculation": check_speculation, "churn": check_churn}
