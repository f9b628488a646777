"""Speculation in an engine that loads heads and draft models itself."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.dense import make_dense
from support.fitted_heads import fit_heads, text_states
from support.medusa_files import medusa_config, write_heads
from support.speculation import Bench, request
from support.world import TinyWorld, make_world
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from loraplex_contracts.request import OutputParams, Request, SamplingParams, SpeculationParams, StoppingParams
from loraplex_server.config import (
    AdaptersConfig,
    BatchConfig,
    EngineConfig,
    KvConfig,
    ModelConfig,
    SpeculationConfig,
)
from loraplex_server.engine.assembly import build_engine
from loraplex_server.speculation.proposer import DRAFT_MODEL, MEDUSA, PROMPT_LOOKUP, UNIVERSAL

NUM_TOKENS = 24
WORDS = "the cat sat on a mat and ate the rat that sat on the hat "


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> TinyWorld:
    """A model that says letters only; beside it the same model with its tokens in another order."""
    made = make_world(tmp_path_factory.mktemp("world"), 2)
    model = AutoModelForCausalLM.from_pretrained(made.model)
    tokenizer = AutoTokenizer.from_pretrained(made.model)
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    letters = [token_id for piece, token_id in vocabulary.items() if piece in set("abcdefghijkl")]
    with torch.no_grad():
        silent = torch.ones(len(vocabulary), dtype=torch.bool)
        silent[letters] = False
        model.lm_head.weight[silent] *= 0.01
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight *= 0.3  # texts that repeat themselves
    model.save_pretrained(made.model)
    turn(model, vocabulary, made.model, made.model.parent / "turned")
    return made


def turn(model: PreTrainedModel, vocabulary: dict[str, int], source: Path, folder: Path) -> None:
    """Saves the model with the ids of its bytes in the opposite order: other ids, the same mind."""
    num_bytes = 256
    order = [*reversed(range(num_bytes)), *range(num_bytes, len(vocabulary))]
    state = {
        name: weight[order].clone() if name in ("lm_head.weight", "model.embed_tokens.weight") else weight
        for name, weight in model.state_dict().items()
    }
    model.save_pretrained(folder, state_dict=state)
    for path in source.iterdir():
        if path.name.startswith(("tokenizer", "special")):
            shutil.copy(path, folder / path.name)
    written = json.loads((folder / "tokenizer.json").read_text())
    written["model"]["vocab"] = {piece: order.index(token_id) for piece, token_id in written["model"]["vocab"].items()}
    (folder / "tokenizer.json").write_text(json.dumps(written))


def build(world: TinyWorld, **speculation: object) -> Bench:
    config = EngineConfig(
        ModelConfig(str(world.model), dtype="float64"),
        KvConfig(4, 1 << 20),
        BatchConfig(6, 24, max_queue_wait_s=0.0),
        AdaptersConfig(world.adapters),
        SpeculationConfig(**speculation),  # type: ignore[arg-type]
    )
    return Bench(build_engine(config, lambda text: None, lambda: None))


def requests(world: TinyWorld) -> list[Request]:
    """Requests of the base model and of two LoRAs; greedy and seeded; with everything that may end them."""
    tokenizer = AutoTokenizer.from_pretrained(world.model)
    dice = random.Random(1)
    found: list[Request] = []
    for idx in range(9):
        text = WORDS[: dice.randint(3, len(WORDS))]
        found.append(
            request(
                f"{idx}",
                tokenizer(text)["input_ids"],
                NUM_TOKENS,
                sampling=SamplingParams(temperature=0.7 * (idx % 2), top_p=0.95, seed=idx),
                stopping=StoppingParams(NUM_TOKENS, ignore_eos=idx % 4 != 0, min_tokens=3 * (idx % 3)),
                output=OutputParams(True, 1),
                adapter_id=("", "a000", "", "a001")[idx % 4],
                n=1 + (idx == 5),
            )
        )
    return found


@pytest.fixture(scope="module")
def twins(world: TinyWorld) -> Iterator[Bench]:
    bench = build(world)
    yield bench
    bench.close()


def test_everything_that_flags_bring(world: TinyWorld, twins: Bench) -> None:
    plain = requests(world)
    wanted = {one.request_id: twins.run([one])[one.request_id] for one in plain}
    model = make_dense(AutoModelForCausalLM.from_pretrained(world.model, dtype=torch.float64))
    known = [one for one in plain if not one.adapter_id][:3]
    texts = [(one.prompt_token_ids, wanted[one.request_id].tokens[0]) for one in known]
    heads = fit_heads(
        [(text_states(model, prompt, text), text) for prompt, text in texts],
        3,
        vocab_size=model.config.vocab_size,
        base_head=model.lm_head.weight.detach(),
    )
    write_heads(world.adapters / "heads", heads, medusa_config(base_model_name_or_path="llama"))
    bench = build(
        world,
        default_draft_tokens=4,
        default_medusa="heads",
        draft_models=(f"same={world.model}", f"turned={world.model.parent / 'turned'}"),
    )
    ways = {
        MEDUSA: SpeculationParams("medusa", fixed_length=True),
        PROMPT_LOOKUP: SpeculationParams("prompt_lookup", fixed_length=True),
        DRAFT_MODEL: SpeculationParams("draft_model", draft_name="same", fixed_length=True),
        UNIVERSAL: SpeculationParams("draft_model", draft_name="turned", fixed_length=True),
        "server": SpeculationParams(),
        "auto": SpeculationParams("auto", max_draft_tokens=7),
        "off": SpeculationParams("off"),
    }
    asked = [
        replace(one, request_id=f"{one.request_id} {name}", speculation=way)
        for one in plain
        for name, way in ways.items()
    ]
    random.Random(2).shuffle(asked)
    outcomes = bench.run(asked, random.Random(3))
    for outcome in outcomes.values():
        outcome.check(wanted[outcome.request.request_id.split()[0]])
    for name in (MEDUSA, PROMPT_LOOKUP, DRAFT_MODEL, UNIVERSAL):
        drafted, accepted = bench.speculator.drafted[name], bench.speculator.accepted[name]
        assert drafted > accepted > 20, (name, drafted, accepted)
    info = bench.engine.info
    assert (info.speculation, info.draft_models) == (("medusa", "prompt_lookup"), ("same", "turned"))
    bench.close()
