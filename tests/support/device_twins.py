"""Drafts, sampling and grammars on a device, against a float64 engine on the CPU.

A request's twin runs alone and without speculation. The engines load model, tokenizers, heads and draft models from
disk, as a server does. Needs PEFT, and no pytest.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import ctypes
import json
import random
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from loraplex_contracts.request import (
    Grammar,
    OutputParams,
    Request,
    SamplingParams,
    SpeculationParams,
    StoppingParams,
)
from loraplex_server.config import (
    AdaptersConfig,
    BatchConfig,
    EngineConfig,
    KvConfig,
    ModelConfig,
    SpeculationConfig,
)
from loraplex_server.engine.assembly import build_engine
from loraplex_server.grammars import matcher
from loraplex_server.speculation.proposer import DRAFT_MODEL, GRAMMAR, MEDUSA, PROMPT_LOOKUP, UNIVERSAL
from support.dense import make_dense
from support.device_checks import TOLERANCES, Settings, count_replays
from support.fitted_heads import fit_heads, text_states
from support.medusa_files import medusa_config, write_heads
from support.speculation import Bench, Outcome, request
from support.world import TinyWorld, make_world

NUM_TOKENS = 24
SCHEMA = """{
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["cat", "mat"]}},
    "required": ["b"]
}"""
REGEX = "(cat|mat) [a-f]+ the hat"
WORDS = "the cat sat on a mat and ate the rat that sat on the hat "
LETTERS = "abcdefghijkl"  # that the model says
# Sines of rotary embeddings are float32, and differ between devices.
ELSEWHERE = 1e-5
HERE = Settings("cpu", torch.float64)
HEADS, BOTH = "heads", "both"  # heads of the base model; a LoRA with heads in one directory


def make_files(root: Path) -> TinyWorld:
    """A model that says letters only; beside it the same model with its tokens in another order."""
    made = make_world(root, 2)
    model = AutoModelForCausalLM.from_pretrained(made.model)
    tokenizer = AutoTokenizer.from_pretrained(made.model)
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    letters = [token_id for piece, token_id in vocabulary.items() if piece in set(LETTERS)]
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


def build(files: TinyWorld, settings: Settings, **speculation: Any) -> Bench:
    """An engine as a server builds it. `speculation`: fields of its configuration."""
    config = EngineConfig(
        ModelConfig(str(files.model), device=settings.device, dtype=str(settings.dtype).removeprefix("torch.")),
        KvConfig(4, 4 << 20),
        BatchConfig(6, 24, max_queue_wait_s=0.0),
        AdaptersConfig(files.adapters),
        SpeculationConfig(**speculation),
    )
    bench = Bench(build_engine(config, lambda text: None, lambda: None))
    if settings.replays is not None:
        count_replays(bench.engine, settings.replays)
        for proposer in bench.speculator._proposers.values():
            graphs = getattr(getattr(getattr(proposer, "drafter", None), "runner", None), "_graphs", None)
            settings.replays["graphs of drafts"] += graphs.num_graphs if graphs is not None else 0
    return bench


def tolerance(settings: Settings) -> float:
    """Of a logprob, from the twin's."""
    return max(TOLERANCES[settings.dtype], ELSEWHERE if settings.device != "cpu" else 0.0)


def check_twins(outcomes: Iterable[Outcome], twins: dict[str, Outcome], settings: Settings) -> None:
    """Each is token for token what its twin is. The twin's name is the first word of a request's."""
    for outcome in outcomes:
        outcome.check(twins[outcome.request.request_id.split()[0]], tolerance(settings))


# --- drafts and sampling ----------------------------------------------------------------------------------------------


def samplings(letters: Sequence[int]) -> list[SamplingParams]:
    """Every option of sampling, alone and beside others. `letters`: tokens that the model likes."""
    pairs = tuple((a, b) for a in letters for b in letters[::2])
    return [
        SamplingParams(),
        SamplingParams(temperature=0.7, top_p=0.95),
        SamplingParams(temperature=1.3, top_p=0.8, top_k=30, min_p=0.01),
        SamplingParams(bad_words=pairs),
        SamplingParams(temperature=0.8, bad_words=(*pairs[:20], (letters[0],), (letters[5],))),
        SamplingParams(temperature=1.0, allowed_token_ids=tuple(sorted(letters[2:9]))),
        SamplingParams(temperature=1.1, typical_p=0.7, top_p=0.95),
        SamplingParams(temperature=1.5, min_p=0.1),
        SamplingParams(temperature=0.9, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.3),
        SamplingParams(
            repetition_penalty=1.4, frequency_penalty=0.5, logit_bias=((letters[1], 3.0), (letters[4], -50))
        ),
        SamplingParams(temperature=0.5, frequency_penalty=-1.5, logit_bias=((5, 2.0),)),
    ]


def requests(files: TinyWorld) -> list[Request]:
    """Requests of the base model and of three LoRAs; greedy and seeded; with everything that may end them, and with all
    that answers may hold."""
    tokenizer = AutoTokenizer.from_pretrained(files.model)
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    kinds = samplings([vocabulary[letter] for letter in LETTERS])
    dice = random.Random(1)
    found: list[Request] = []
    for idx in range(len(kinds) + 5):
        text = WORDS[: dice.randint(3, len(WORDS))]
        found.append(
            request(
                f"{idx}",
                tokenizer(text)["input_ids"],
                NUM_TOKENS,
                sampling=replace(kinds[idx % len(kinds)], seed=idx),
                stopping=StoppingParams(NUM_TOKENS, ignore_eos=idx % 4 != 0, min_tokens=3 * (idx % 3)),
                output=OutputParams(True, idx % 4, prompt_logprobs=idx % 5 == 0),
                adapter_id=("", "a000", "", "a001", BOTH)[idx % 5],
                n=1 + (idx == 5),
            )
        )
    return found


def write_all_heads(files: TinyWorld, known: Mapping[str, Sequence[tuple[Sequence[int], list[int]]]]) -> None:
    """Heads of the base model and of the LoRA that comes with some. `known`: by adapter, prompts with the texts that
    they know by heart."""
    base = make_dense(AutoModelForCausalLM.from_pretrained(files.model, dtype=torch.float64))
    lora = PeftModel.from_pretrained(base, str(files.adapters / BOTH))
    for name, texts in known.items():
        with lora.disable_adapter() if not name else nullcontext():
            examples = [(text_states(lora, prompt, text).double(), text) for prompt, text in texts]
        head = None if name else base.lm_head.weight.detach()
        heads = fit_heads(examples, 3, vocab_size=base.config.vocab_size, base_head=head)
        tensors = {path: value.float() for path, value in heads.items()}
        write_heads(files.adapters / (name or HEADS), tensors, medusa_config(base_model_name_or_path="llama"))


def check_drafts(settings: Settings, root: Path) -> None:
    """Every way of drafting that a server's flags bring, under every option of sampling: texts and logprobs are those
    of the twins, and the same seed gives the same tokens."""
    files = make_files(root)
    shutil.copytree(files.adapters / "a001", files.adapters / BOTH)
    plain = requests(files)
    alone = build(files, HERE)
    twins = {one.request_id: alone.run([one])[one.request_id] for one in plain}
    alone.close()
    assert not any(outcome.error for outcome in twins.values())
    known = {
        name: [(one.prompt_token_ids, twins[one.request_id].tokens[0]) for one in plain if one.adapter_id == name][:4]
        for name in ("", BOTH)
    }
    write_all_heads(files, known)
    bench = build(
        files,
        settings,
        default_draft_tokens=4,
        max_draft_tokens=4,
        default_medusa=HEADS,
        draft_models=(f"same={files.model}", f"turned={files.model.parent / 'turned'}"),
    )
    ways = {
        MEDUSA: SpeculationParams("medusa", fixed_length=True),
        PROMPT_LOOKUP: SpeculationParams("prompt_lookup", fixed_length=True),
        DRAFT_MODEL: SpeculationParams("draft_model", draft_name="same", fixed_length=True),
        UNIVERSAL: SpeculationParams("draft_model", draft_name="turned", fixed_length=True),
        "server": SpeculationParams(),
        "auto": SpeculationParams("auto", max_draft_tokens=3),
        "off": SpeculationParams("off"),
    }
    asked = [
        replace(one, request_id=f"{one.request_id} {name}", speculation=way)
        for one in plain
        for name, way in ways.items()
    ]
    random.Random(2).shuffle(asked)
    check_twins(bench.run(asked, random.Random(3)).values(), twins, settings)
    for name in (MEDUSA, PROMPT_LOOKUP, DRAFT_MODEL, UNIVERSAL):
        drafted, accepted = bench.speculator.drafted[name], bench.speculator.accepted[name]
        assert drafted > accepted > 10, (name, drafted, accepted)
    of_both = [one for one in bench.outcomes.values() if one.request.request_id.endswith(MEDUSA)]
    assert sum(one.accepted[MEDUSA] for one in of_both if one.request.adapter_id == BOTH) > 5
    info = bench.engine.info
    assert (info.speculation, info.draft_models) == (("medusa", "prompt_lookup"), ("same", "turned"))
    bench.close()


# --- grammars ---------------------------------------------------------------------------------------------------------


@dataclass
class Walk:
    """A grammar without the library, and its own matcher: two of five tokens may come next, now and then only one.
    Implements GrammarMatcher, and as much of the library's own as masks need."""

    num_ids: int
    num_taken: int = 0

    @property
    def inner(self) -> Walk:
        return self

    @property
    def num_slow(self) -> int:
        return 0  # masks of others are made in the library's threads

    @num_slow.setter
    def num_slow(self, num: int) -> None: ...

    @property
    def num_words(self) -> int:
        return -(-self.num_ids // 32)

    @property
    def error(self) -> str:
        return ""

    def is_error(self) -> bool:
        return False

    def allowed(self) -> np.ndarray:
        """True for what may come next [num_ids]."""
        ids = np.arange(self.num_ids)
        return ids == ids[-9] if self.num_taken % 6 == 5 else (3 * ids + self.num_taken) % 5 < 2

    def copy(self) -> Walk:
        return Walk(self.num_ids, self.num_taken)

    deep_copy = copy

    def rebuild(self, reason: str) -> bool:
        return False

    def advance(self, token_id: int) -> bool:
        self.consume_token(token_id)
        return False

    def consume_token(self, token_id: int) -> None:
        assert self.allowed()[token_id], f"{token_id} is not allowed behind {self.num_taken} tokens"
        self.num_taken += 1

    def num_legal(self, draft: Sequence[int]) -> int:
        probe = self.copy()
        for idx, token_id in enumerate(draft):
            if not probe.allowed()[token_id]:
                return idx
            probe.num_taken += 1
        return len(draft)

    def forced(self) -> Sequence[int]:
        return np.flatnonzero(self.allowed()).tolist() if self.num_taken % 6 == 5 else []

    def unsafe_compute_mask_ptr(self, address: int, num_bytes: int) -> None:
        bits = np.packbits(self.allowed(), bitorder="little").tobytes()
        ctypes.memmove(address, bits.ljust(num_bytes, b"\0"), num_bytes)


class Walks:
    """Takes the place of an engine's grammars, and of the library's threads."""

    def __init__(self, num_ids: int) -> None:
        self.num_ids = num_ids

    def resolve(self, grammar: Grammar, tenant: str = "") -> Walk:
        return Walk(self.num_ids)

    def forget(self, grammar: Grammar, tenant: str = "") -> None: ...

    def poll(self) -> bool:
        return False

    def close(self) -> None: ...

    def unsafe_compute_mask_ptr(self, rows: Sequence[tuple[Walk, int]], address: int, num_bytes: int, num: int) -> None:
        for walk, row in rows:
            walk.unsafe_compute_mask_ptr(address + row * num_bytes, num_bytes)


def check_grammars(settings: Settings, root: Path, grammars: Sequence[Grammar] = ()) -> None:
    """Texts in grammars are those of the twins, greedy and sampled, drafted and not. Without `grammars`, which need
    their library, a stand-in says what may come next."""
    files = make_files(root)
    stand_in = Walks(0)
    before = list(matcher._executors)
    if not grammars:
        matcher._executors[:] = [stand_in]  # type: ignore[list-item]

    def built(settings: Settings) -> Bench:
        bench = build(files, settings, max_draft_tokens=4, draft_models=(f"same={files.model}",))
        if not grammars:
            stand_in.num_ids = bench.engine.info.vocab_size
            bench.engine._grammars = stand_in  # type: ignore[assignment]
        return bench

    tokenizer = AutoTokenizer.from_pretrained(files.model)
    plain = [
        request(
            f"{idx}",
            tokenizer(WORDS[: 3 + 5 * idx])["input_ids"],
            NUM_TOKENS,
            sampling=SamplingParams(
                temperature=0.9 * (idx % 2), repetition_penalty=1.0 + 0.2 * (idx % 3 == 1), seed=idx
            ),
            stopping=StoppingParams(NUM_TOKENS),
            output=OutputParams(True, 2) if idx % 3 else OutputParams(),
            adapter_id=("", "a000")[idx // 2 % 2],
            grammar=grammars[idx % len(grammars)] if grammars else Grammar("grammar", "stand-in", True),
        )
        for idx in range(8)
    ]
    free = [replace(one, request_id=f"free-{one.request_id}", grammar=None) for one in plain[:4]]
    ways = {
        "off": SpeculationParams("off"),
        "auto": SpeculationParams("auto"),
        PROMPT_LOOKUP: SpeculationParams("prompt_lookup", min_ngram=1, fixed_length=True),
        DRAFT_MODEL: SpeculationParams("draft_model", draft_name="same", fixed_length=True),
    }
    asked = [
        replace(one, request_id=f"{one.request_id} {name}", speculation=way)
        for one in [*plain, *free]
        for name, way in ways.items()
    ]
    random.Random(2).shuffle(asked)
    try:
        alone = built(HERE)
        twins = {one.request_id: alone.run([one])[one.request_id] for one in [*plain, *free]}
        alone.close()
        bench = built(settings)
        outcomes = bench.run(asked, random.Random(3))
        bench.close()
    finally:
        matcher._executors[:] = before
    check_twins(outcomes.values(), twins, settings)
    assert twins["0"].tokens != twins["free-0"].tokens
    assert bench.speculator.accepted[GRAMMAR] > 2, bench.speculator.accepted
    assert bench.speculator.accepted[PROMPT_LOOKUP] + bench.speculator.accepted[DRAFT_MODEL] > 5
