"""Speculator assembly: proposers from the configuration, default heads, step times."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from loraplex_adapters.cache.manager import AdapterManager
from loraplex_contracts.adapters import AdapterId, AdapterKey
from loraplex_contracts.errors import AdapterNotFound, InvalidArgument
from loraplex_server.config import EngineConfig
from loraplex_server.model.loaded_model import LoadedModel
from loraplex_server.model.medusa_heads import HeadSlots
from loraplex_server.model.medusa_model import MODEL_HEADS, ServedModel
from loraplex_server.model.runner import ModelRunner
from loraplex_server.speculation.draft_model.drafter import DraftMemory
from loraplex_server.speculation.draft_model.loading import DraftTarget, load_draft
from loraplex_server.speculation.medusa import MedusaProposer
from loraplex_server.speculation.policy import LeastCost
from loraplex_server.speculation.proposer import MEDUSA, UNIVERSAL, Proposer, draft_key
from loraplex_server.speculation.speculator import Speculator
from loraplex_server.speculation.step_costs import StepCosts
from loraplex_server.text.tokenizer import TextTokenizer

log = logging.getLogger(__name__)

POLL_S = 0.005
# Steps of a draft model with another tokenizer for one token of the target: its tokens may be longer.
MIN_ROUNDS = 0.5


@dataclass(frozen=True, slots=True)
class Target:
    """What proposers need of the model that they draft for."""

    loaded: LoadedModel
    served: ServedModel
    runner: ModelRunner
    cache: AdapterManager
    heads: HeadSlots


def build_speculator(
    config: EngineConfig, target: Target, step_costs: StepCosts, progress: Callable[[str], None]
) -> Speculator:
    """Raises the typed errors of loading draft models and default heads."""
    speculation = config.speculation
    proposers: dict[str, Proposer] = {MEDUSA: MedusaProposer(target.runner, target.cache, target.heads)}
    drafts, least_costs = _draft_models(config, target, progress) if speculation.drafts else ({}, {})
    proposers |= {draft_key(name): proposer for name, proposer in drafts.items()}
    heads_id = AdapterId(speculation.default_medusa or (MODEL_HEADS if target.served.heads is not None else ""))
    default_heads = None
    if heads_id:
        progress(f"loading Medusa heads {heads_id}")
        default_heads = bring_up_heads(target.cache, heads_id)
    return Speculator(
        speculation,
        proposers,
        step_costs,
        draft_names=tuple(drafts),
        least_costs={draft_key(name): least for name, least in least_costs.items()},
        default_heads=default_heads,
        drafts_by_default=target.served.heads is not None,
        num_token_ids=min(target.loaded.spec.vocab_size, target.loaded.spec.num_logits),
        max_step_tokens=config.batch.max_step_tokens,
    )


def _draft_models(
    config: EngineConfig, target: Target, progress: Callable[[str], None]
) -> tuple[dict[str, Proposer], dict[str, LeastCost]]:
    """By name, and what each costs at least. They run where the target does, in a dtype of their own."""
    loaded = target.loaded
    tokenizer = TextTokenizer.from_pretrained(target.served.base, revision=target.served.revision)
    draft_target = DraftTarget(loaded.spec, tokenizer)
    memory = DraftMemory(config.batch.max_running, config.speculation.draft_kv_bytes, config.kv.block_size)
    proposers: dict[str, Proposer] = {}
    least_costs: dict[str, LeastCost] = {}
    for draft in config.speculation.drafts:
        progress(f"loading draft model {draft.name}")
        proposer = load_draft(draft, draft_target, memory, device=str(loaded.device), backend=loaded.backend)
        if config.model.cuda_graphs:
            shapes = loaded.backend.graph_shapes(config.batch.max_running, max_drafted=0)
            proposer.drafter.runner.capture(shapes, progress)
        num_rounds = MIN_ROUNDS if proposer.name == UNIVERSAL else 1.0
        least_costs[draft.name] = LeastCost.of(proposer.drafter.measure(), num_rounds)
        proposers[draft.name] = proposer
    return proposers, least_costs


def bring_up_heads(cache: AdapterManager, adapter_id: AdapterId) -> AdapterKey:
    """Loads the default heads and pins them to the device, where every base request wants them."""
    try:
        while cache.load(adapter_id, True, time.monotonic()) is None:
            cache.poll(time.monotonic())
            time.sleep(POLL_S)
    except AdapterNotFound:
        raise AdapterNotFound(
            f"there are no Medusa heads {adapter_id!a} (--default-medusa); name a folder under --adapters",
            field="--default-medusa",
        ) from None
    key = None
    while key is None:
        key = cache.resolve(adapter_id, time.monotonic())
    cache.unpin(key)  # the operator's pin stays
    if key.kind == "lora":
        raise InvalidArgument(
            f"--default-medusa names {adapter_id!a}, which is a LoRA without heads; name Medusa heads",
            field="--default-medusa",
        )
    return key
