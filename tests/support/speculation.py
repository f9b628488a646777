"""Engines around tiny models with all proposers, driven by hand.

A *twin* is the same request without speculation, alone in an engine of its own: what every text has to be equal to.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import copy
import random
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from loraplex_contracts.adapters import AdapterInfo
from loraplex_contracts.errors import LoraplexError
from loraplex_contracts.plan import StepPlan
from loraplex_contracts.request import (
    Admitted,
    CompletionEnd,
    Event,
    FinishReason,
    Pooled,
    PositionLogprobs,
    PromptLogprobs,
    Request,
    RequestFailed,
    SamplingParams,
    SpeculationKind,
    SpeculationParams,
    StoppingParams,
    Tokens,
)
from loraplex_server.backends.backend import Backend
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
from loraplex_server.engine.pipe import AdapterCommand, Submit
from loraplex_server.layers.attention import kv_block_bytes
from loraplex_server.layers.quantization import WeightFormat
from loraplex_server.model.isolation import StepHandle
from loraplex_server.model.loader import adopt_model
from loraplex_server.model.memory import state_slot_bytes
from loraplex_server.scheduler.sequence_table import SequenceState
from loraplex_server.speculation.draft_model import Drafter, DraftMemory, DraftModelProposer
from loraplex_server.speculation.proposer import Proposer, draft_key
from loraplex_server.speculation.speculator import Speculator
from loraplex_server.speculation.step_costs import StepCosts
from support.fitted_heads import fit_heads, text_states
from support.medusa_files import medusa_config, write_heads
from support.peft_files import LoraSpec, save_adapter

BLOCK_SIZE = 4
# Rows cost next to nothing: whatever has a chance is drafted, on a machine of any speed.
FLAT_COSTS = StepCosts({1: 1.0, 256: 1.0001})


def request(
    request_id: str,
    prompt: Sequence[int],
    num_tokens: int,
    kind: SpeculationKind = "off",
    *,
    sampling: SamplingParams | None = None,
    stopping: StoppingParams | None = None,
    speculation: Mapping[str, Any] | None = None,
    **fields: Any,
) -> Request:
    """`speculation`: fields of the SpeculationParams."""
    return Request(
        request_id,
        tuple(prompt),
        stopping or StoppingParams(num_tokens, ignore_eos=True),
        sampling or SamplingParams(),
        speculation=SpeculationParams(kind, **(speculation or {})),
        **fields,
    )


@dataclass
class Outcome:
    """The events of one request. Raises AssertionError at the first that breaks a rule."""

    request: Request
    tokens: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    logprobs: dict[int, list[PositionLogprobs]] = field(default_factory=lambda: defaultdict(list))
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()
    pooled: Pooled | None = None
    ends: dict[int, CompletionEnd] = field(default_factory=dict)
    error: LoraplexError | None = None
    is_admitted: bool = False
    adapter_digest: str = ""
    drafted: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)

    @property
    def is_over(self) -> bool:
        return self.error is not None or len(self.ends) == self.request.n

    @property
    def reasons(self) -> list[tuple[FinishReason, int | None]]:
        return [(end.reason, end.stop_token_id) for _, end in sorted(self.ends.items())]

    def push(self, event: Event) -> None:
        assert not self.is_over, f"{event} after the terminal event"
        match event:
            case Admitted():
                assert not self.is_admitted
                self.is_admitted = True
                self.adapter_digest = event.adapter_digest
            case PromptLogprobs():
                assert not self.tokens
                self.prompt_logprobs += event.logprobs
            case Pooled():
                assert self.pooled is None
                self.pooled = event
            case Tokens():
                assert self.is_admitted
                assert event.index not in self.ends
                assert event.token_ids
                assert len(event.logprobs) == (len(event.token_ids) if self.request.output.logprobs else 0)
                assert 0 <= event.num_accepted <= event.num_drafted
                assert event.num_accepted <= len(event.token_ids) <= event.num_drafted + 1
                assert bool(event.proposer) == (event.num_drafted > 0)
                self.tokens[event.index] += event.token_ids
                self.logprobs[event.index] += event.logprobs
                if event.num_drafted:
                    self.drafted[event.proposer] += event.num_drafted
                    self.accepted[event.proposer] += event.num_accepted
            case CompletionEnd():
                assert event.index not in self.ends
                self.ends[event.index] = event
            case RequestFailed():
                self.error = event.error

    def check(self, twin: Outcome, tolerance: float = 1e-9) -> None:
        """Token for token what the twin is, and what is reported beside the tokens too."""
        name = self.request.request_id
        assert self.error is None, f"{name}: {self.error}"
        assert dict(self.tokens) == dict(twin.tokens), name
        assert self.reasons == twin.reasons, name
        for index, entries in twin.logprobs.items():
            for found, wanted in zip(self.logprobs[index], entries, strict=True):
                _check_logprobs(found, wanted, tolerance)
        for found, wanted in zip(self.prompt_logprobs, twin.prompt_logprobs, strict=True):
            _check_logprobs(found, wanted, tolerance)


def _check_logprobs(found: PositionLogprobs, wanted: PositionLogprobs, tolerance: float) -> None:
    assert found.token_id == wanted.token_id
    assert abs(found.logprob - wanted.logprob) < tolerance
    assert [token_id for token_id, _ in found.top] == [token_id for token_id, _ in wanted.top]
    assert all(abs(a - b) < tolerance for (_, a), (_, b) in zip(found.top, wanted.top, strict=True))


class Bench:
    """An engine that is turned by hand."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.num_operations = 0
        self.may_fail = False  # whether proposers may
        self.outcomes: dict[str, Outcome] = {}
        self.plans: list[StepPlan] = []
        execute = engine._runner.execute

        def recording(plan: StepPlan) -> StepHandle:
            self.plans.append(plan)
            return execute(plan)

        engine._runner.execute = recording  # type: ignore[assignment, method-assign]

    @property
    def speculator(self) -> Speculator:
        return self.engine._speculator

    @property
    def num_preemptions(self) -> int:
        return self.engine._scheduler.load().num_preemptions

    def running(self) -> list[SequenceState]:
        return list(self.engine._scheduler._table.running)

    def kv(self, seq: SequenceState) -> list[tuple[Tensor, Tensor]]:
        """K and V of the tokens that a running sequence has computed, by layer [num_computed, kv_heads, dim]."""
        blocks = torch.tensor(seq.block_ids)
        return [
            (
                layer.k[blocks].flatten(0, 1)[: seq.num_computed].clone(),
                layer.v[blocks].flatten(0, 1)[: seq.num_computed].clone(),
            )
            for layer in self.engine._runner._cache.layers  # type: ignore[attr-defined]
        ]

    def load(self, *adapter_ids: str) -> list[AdapterInfo]:
        """Brings adapters up to the device, where there is room for them."""
        found: list[AdapterInfo] = []
        for adapter_id in adapter_ids:
            self.num_operations += 1
            self.engine.handle(AdapterCommand(self.num_operations, "load", adapter_id))
            replies = ()
            while not replies:
                batch = self.engine.turn()
                replies = batch.replies if batch is not None else ()
                time.sleep(0.0005)
            assert replies[0].error is None, replies[0].error
            found += replies[0].adapters
        return found

    def submit(self, one: Request) -> Outcome:
        outcome = self.outcomes[one.request_id] = Outcome(one)
        self.engine.handle(Submit(one))
        return outcome

    def turn(self) -> bool:
        """Takes a turn of the engine; False when there was nothing to do."""
        batch = self.engine.turn()
        for event in batch.events if batch is not None else ():
            self.outcomes[event.request_id].push(event)
        return self.engine.can_step

    def run(self, requests: Sequence[Request], dice: random.Random | None = None) -> dict[str, Outcome]:
        """Runs all to their end. With `dice` they come one after the other while others run."""
        waiting = list(requests)
        outcomes: dict[str, Outcome] = {}
        deadline_s = time.monotonic() + 100.0
        while waiting or not all(outcome.is_over for outcome in outcomes.values()):
            while waiting and (dice is None or dice.random() < 0.5):
                one = waiting.pop(0)
                outcomes[one.request_id] = self.submit(one)
            if not self.turn():
                assert time.monotonic() < deadline_s, "requests without an end"
                time.sleep(0.0005)  # an adapter is being loaded
        self.turn()
        self.check_idle()
        return outcomes

    def check_idle(self) -> None:
        """Everything is accounted for, drafts are counted alike everywhere, and no proposer failed."""
        assert self.may_fail or not self.speculator.failures
        assert self.engine.integrity_report() == ""
        load = self.engine._scheduler.load()
        assert load.num_free_blocks == load.num_blocks
        assert not self.speculator.is_wanted
        for proposer in self.speculator._proposers.values():
            drafter = getattr(proposer, "drafter", None)
            if isinstance(drafter, Drafter):
                assert drafter.rows.num_sequences == 0
                drafter.rows.check_integrity()
        drafted = sum((outcome.drafted for outcome in self.outcomes.values()), Counter[str]())
        accepted = sum((outcome.accepted for outcome in self.outcomes.values()), Counter[str]())
        assert (drafted, accepted) == (self.speculator.drafted, +self.speculator.accepted)

    def close(self) -> None:
        self.engine.close()


def make_bench(
    model: PreTrainedModel,
    root: Path | None = None,
    *,
    num_blocks: int = 400,
    max_running: int = 8,
    max_step_tokens: int = 64,
    prefix_caching: bool = True,
    num_slots: int = 8,
    drafts: Mapping[str, Proposer] | None = None,
    default_heads: str = "",
    step_costs: StepCosts | None = FLAT_COSTS,
    backend: Backend | None = None,
    form: WeightFormat | None = None,
    num_states: int = 0,
    verify: bool = False,
    **speculation: Any,
) -> Bench:
    """An engine for a copy of `model`, with the adapters in `root`. `drafts`: proposers by the names that requests have
    for draft models. `speculation`: fields of its configuration. Without `step_costs` those that it has measured."""
    loaded = adopt_model(copy.deepcopy(model), verify=verify, backend=backend, form=form)
    block_bytes = max(1, kv_block_bytes(loaded.spec, BLOCK_SIZE, loaded.dtype.itemsize))  # none without attention
    num_states = num_states or 2 * max_running  # few snapshots, that they are evicted
    num_places = num_states + min(num_states, max_running)
    config = EngineConfig(
        ModelConfig("tiny", dtype=loaded.dtype_name),
        KvConfig(BLOCK_SIZE, num_blocks * block_bytes, prefix_caching, num_places * state_slot_bytes(loaded)),
        BatchConfig(max_running, max_step_tokens, max_queue_wait_s=0.0),
        AdaptersConfig(root, num_device_slots=num_slots),
        SpeculationConfig(default_medusa=default_heads, **speculation),
    )
    engine = assemble(loaded, config, lambda text: None, lambda: None, step_costs=step_costs)
    speculator = engine._speculator
    speculator._proposers |= {draft_key(name): one for name, one in (drafts or {}).items()}
    speculator.draft_names += tuple(drafts or ())
    return Bench(engine)


class World:
    """A model, its adapters on disk, and an engine in which requests run alone and without speculation, each once."""

    def __init__(self, model: PreTrainedModel, root: Path, backend: Backend | None = None) -> None:
        self.model = model
        self.root = root
        self.backend = backend
        self.models: dict[str, nn.Module] = {"": model}  # by adapter id, with its LoRA
        self._bench: Bench | None = None
        self._known: dict[Request, Outcome] = {}

    @property
    def vocab_size(self) -> int:
        return cast(Tensor, self.model.get_input_embeddings().weight).shape[0]

    def add_lora(self, name: str, spec: LoraSpec, seed: int = 0) -> None:
        self.models[name] = save_adapter(self.model, spec, self.root / name, seed)

    def add_heads(
        self, name: str, known: Sequence[Request], num_heads: int, *, has_own: bool = True, num_layers: int = 1
    ) -> None:
        """Heads that know the texts of these requests by heart. In the directory of a LoRA they make it a combined
        adapter."""
        examples = [
            (text_states(self.models[one.adapter_id], one.prompt_token_ids, text).double(), text)
            for one in known
            for text in self.twin(one).tokens.values()
        ]
        head = self.model.get_output_embeddings()
        assert head is not None
        tensors = fit_heads(
            examples,
            num_heads,
            vocab_size=self.vocab_size,
            base_head=None if has_own else head.weight.detach().double(),
            num_layers=num_layers,
        )
        base = str(self.model.config.model_type)
        config = medusa_config(num_heads, num_layers, base_model_name_or_path=base)
        write_heads(self.root / name, {key: value.to(self.model.dtype) for key, value in tensors.items()}, config)

    def twin(self, one: Request) -> Outcome:
        alone = replace(one, request_id="twin", speculation=SpeculationParams("off"))
        if alone not in self._known:
            if self._bench is None:
                self._bench = make_bench(self.model, self.root, prefix_caching=False, backend=self.backend)
            self._known[alone] = self._bench.run([alone])["twin"]
            assert self._known[alone].error is None, self._known[alone].error
            assert not self._known[alone].drafted
        return self._known[alone]

    def text(self, one: Request, index: int = 0) -> list[int]:
        return self.twin(one).tokens[index]

    def check(self, outcomes: Mapping[str, Outcome]) -> None:
        for outcome in outcomes.values():
            outcome.check(self.twin(outcome.request))

    def close(self) -> None:
        if self._bench is not None:
            self._bench.close()


def draft_proposer(model: PreTrainedModel, *, num_target_ids: int, max_rows: int = 8, **memory: Any) -> Proposer:
    """A draft model of its own for each engine."""
    loaded = adopt_model(copy.deepcopy(model), verify=False)
    kv_bytes = 400 * max(1, kv_block_bytes(loaded.spec, BLOCK_SIZE, 8)) + 6 * max_rows * state_slot_bytes(loaded)
    drafter = Drafter(loaded, DraftMemory(max_rows, kv_bytes, BLOCK_SIZE, **memory), model_digest="draft")
    eos = model.generation_config.eos_token_id
    return DraftModelProposer(drafter, num_target_ids=num_target_ids, eos_token_ids=() if eos is None else [eos])


def loopy(model: PreTrainedModel, share: float = 0.1) -> PreTrainedModel:
    """The same model with little attention: what follows is mostly up to the last token, and texts go in circles."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "out_proj.weight")):
                parameter.mul_(share)
    return model
