"""Puts a speculator together: proposers out of the configuration, default heads, step times.

Runs in the engine's process, at its start.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from loraplex_adapters.cache.api import AdapterCache
from loraplex_adapters.key import AdapterKey
from loraplex_proto.errors import InvalidArgument
from loraplex_server.config import SpeculationConfig
from loraplex_server.model.heads import HeadSlots
from loraplex_server.model.loaded import LoadedModel
from loraplex_server.model.runner import ModelRunner
from loraplex_server.speculation.base import MEDUSA, Proposer
from loraplex_server.speculation.choice import draft_key
from loraplex_server.speculation.costs import StepCosts
from loraplex_server.speculation.medusa import MedusaProposer
from loraplex_server.speculation.speculator import Speculator

log = logging.getLogger(__name__)

POLL_S = 0.005


@dataclass(frozen=True, slots=True)
class Target:
    """What proposers need of the model that they draft for."""

    loaded: LoadedModel
    runner: ModelRunner
    cache: AdapterCache
    heads: HeadSlots
    max_rows: int
    max_step_tokens: int


def build_speculator(
    config: SpeculationConfig,
    target: Target,
    drafts: Mapping[str, Proposer],
    step_costs: StepCosts,
    progress: Callable[[str], None],
    default_heads: str = "",
) -> Speculator:
    """`drafts`: the draft models by name. `default_heads`: the adapter id of the default heads. Raises what bringing
    them up raises."""
    proposers: dict[str, Proposer] = {MEDUSA: MedusaProposer(target.runner, target.cache, target.heads)}
    proposers |= {draft_key(name): proposer for name, proposer in drafts.items()}
    heads = None
    if default_heads:
        progress(f"loading Medusa heads {default_heads}")
        heads = bring_up_heads(target.cache, default_heads)
    return Speculator(
        config,
        proposers,
        step_costs,
        draft_names=tuple(drafts),
        default_heads=heads,
        max_step_tokens=target.max_step_tokens,
    )


def bring_up_heads(cache: AdapterCache, adapter_id: str) -> AdapterKey:
    """Loads the default heads and pins them to the device, where every base request wants them."""
    while cache.load(adapter_id, True, time.monotonic()) is None:
        cache.poll(time.monotonic())
        time.sleep(POLL_S)
    key = None
    while key is None:
        key = cache.resolve(adapter_id, "default", time.monotonic())
    cache.unpin(key)  # the operator's pin stays
    if key.kind == "lora":
        raise InvalidArgument(
            f"--default-medusa names {adapter_id!a}, which is a LoRA without heads; name Medusa heads",
            field="--default-medusa",
        )
    return key
