"""Adapters of many formats against PEFT: alone, together, speculated, after eviction, in mixtures."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest
import torch
from peft import LoraConfig, LoraModel, PeftConfig, PeftModel
from support.dense import greedy
from support.inline_worker import inline_worker, small_engine
from support.parity import FORMATS, INSIDE, LIVE, Names, is_mixable
from support.peft_files import save_initialised, save_variant
from support.world import byte_tokenizer
from support.zoo import random_model
from transformers import PreTrainedModel

from loraplex import AdapterNotMixed, Client
from loraplex_server.config import AdaptersConfig, WorkerConfig

pytestmark = pytest.mark.timeout(300)
FAST = ("llama",)
NUM_TOKENS = 8
PROMPTS = ("Ask me anything", "dddddxxxdddxx xd")
PARTNER = "partner"  # the other member of each mixture
WEIGHTS = (-0.5, 0.75)


@dataclass
class Served:
    client: Client
    family: str
    names: dict[str, str]  # of adapters, by format
    activated: PeftModel
    expected: dict[tuple[str, str], list[int]]  # by format and prompt
    mixed: dict[tuple[str, str], list[int]]  # of mixtures with the partner


@pytest.fixture(
    scope="module", params=[name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in LIVE]
)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("formats")
    tokenizer = byte_tokenizer()
    # In float32 first, since PEFT takes parts out of no other base models.
    base = random_model(request.param, torch.float32, changes={"vocab_size": len(tokenizer)}).double()
    base.set_experts_implementation("eager")  # grouped products have no float64
    base.save_pretrained(root / "model")
    tokenizer.save_pretrained(root / "model")
    names = {one: f"a{idx}" for idx, one in enumerate(LIVE[request.param])}
    modules = Names.of(base)
    models = {one: _saved(base, FORMATS[one](modules), root / "adapters" / name) for one, name in names.items()}
    _saved(base, LoraConfig(r=2, lora_alpha=3, target_modules=modules.linears), root / "adapters" / PARTNER, seed=9)
    adapters = AdaptersConfig(root=root / "adapters", num_device_slots=min(4, len(names) - 1))
    with (
        inline_worker(WorkerConfig(small_engine(root / "model", adapters), port=0)) as worker,
        Client(worker.address) as client,
    ):
        expected = {
            (one, prompt): _greedy(client, model, prompt) for one, model in models.items() for prompt in PROMPTS
        }
        mixed: dict[tuple[str, str], list[int]] = {}
        for one, name in names.items():
            if is_mixable(request.param, one):
                model = _mixed(base, root / "adapters", name)
                mixed |= {(one, prompt): _greedy(client, model, prompt) for prompt in PROMPTS}
        yield Served(client, request.param, names, models["activated LoRA"], expected, mixed)


def _saved(base: PreTrainedModel, config: PeftConfig, folder: Path, seed: int = 0) -> PeftModel:
    if getattr(config, "init_lora_weights", True) is True:
        return save_variant(base, config, folder, seed)
    assert isinstance(config, LoraConfig)
    save_initialised(copy.deepcopy(base).float(), config, folder)
    return PeftModel.from_pretrained(copy.deepcopy(base).float(), str(folder)).double().eval()


def _mixed(base: PreTrainedModel, root: Path, name: str) -> PeftModel:
    """PEFT's own mixture with the partner."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft = PeftModel.from_pretrained(copy.deepcopy(base), str(root / PARTNER), PARTNER)
        peft.load_adapter(str(root / name), "one")
        cast(LoraModel, peft.base_model).add_weighted_adapter([PARTNER, "one"], list(WEIGHTS), "mixed", "cat")
        peft.set_adapter("mixed")
    return peft.eval()


def _greedy(client: Client, model: PeftModel, prompt: str) -> list[int]:
    return greedy(model, client.tokenize(prompt).token_ids, NUM_TOKENS, min_tokens=NUM_TOKENS)


def tokens(served: Served, one: str, prompt: str, speculation: str = "off") -> list[int]:
    found = served.client.generate(
        prompt, adapter_id=served.names[one], max_tokens=NUM_TOKENS, min_tokens=NUM_TOKENS, speculation=speculation
    )
    return list(found.completions[0].token_ids)


def test_formats_make_different_texts(served: Served) -> None:
    num_texts = [len({tuple(served.expected[one, prompt]) for one in served.names}) for prompt in PROMPTS]
    assert min(num_texts) > len(served.names) // 2


def record(note: pytest.FixtureRequest, served: Served, *settings: str) -> None:
    """Records what was compared, for the table that is printed at the end."""
    note.node.user_properties += [("parity", (served.family, one, s)) for one in served.names for s in settings]


def test_alone_and_after_eviction(served: Served, request: pytest.FixtureRequest) -> None:
    """Fewer slots than adapters: in the second round each has been evicted."""
    for prompt in PROMPTS:
        found = {one: tokens(served, one, prompt) for one in served.names}
        assert found == {one: served.expected[one, prompt] for one in served.names}
    record(request, served, "alone", "after eviction and reload")


def test_an_activated_adapter_shares_the_bases_prefix(served: Served) -> None:
    """A block is 16 tokens: those before the last invocation are computed once, for the base model."""
    prompt = "It is not the first me that counts: 0123456789 ask me, now"
    served.client.generate(prompt, max_tokens=1)
    found = served.client.generate(
        prompt, adapter_id=served.names["activated LoRA"], max_tokens=NUM_TOKENS, min_tokens=NUM_TOKENS
    )
    assert list(found.completions[0].token_ids) == _greedy(served.client, served.activated, prompt)
    assert found.usage.cached_tokens == 48  # the invocation begins at the 50th
    other = served.client.generate(
        prompt, adapter_id=served.names["LoRA"], max_tokens=NUM_TOKENS, min_tokens=NUM_TOKENS
    )
    assert other.usage.cached_tokens == 0


@pytest.mark.parametrize("speculation", ["off", "prompt_lookup"])
def test_together(served: Served, speculation: str, request: pytest.FixtureRequest) -> None:
    with ThreadPoolExecutor(16) as threads:
        found = dict(
            zip(
                served.expected,
                threads.map(lambda case: tokens(served, *case, speculation), served.expected),
                strict=True,
            )
        )
    wrong = {case for case, got in found.items() if got != served.expected[case]}
    assert not wrong
    record(request, served, "in a mixed batch" if speculation == "off" else "speculated")


def test_inside_a_mixture(served: Served, request: pytest.FixtureRequest) -> None:
    """Plain LoRAs, in one batch; others are refused."""

    def ask(case: tuple[str, str], num_tokens: int = NUM_TOKENS) -> list[int]:
        adapters = dict(zip((PARTNER, served.names[case[0]]), WEIGHTS, strict=True))
        found = served.client.generate(case[1], adapters=adapters, max_tokens=num_tokens, min_tokens=num_tokens)
        return list(found.completions[0].token_ids)

    assert served.mixed
    with ThreadPoolExecutor(16) as threads:
        found = dict(zip(served.mixed, threads.map(ask, served.mixed), strict=True))
    wrong = {case for case, got in found.items() if got != served.mixed[case]}
    assert not wrong
    assert any(served.mixed[case] != served.expected[case] for case in found)
    mixable = {one for one, _ in served.mixed}
    for one in served.names.keys() - mixable:
        with pytest.raises(AdapterNotMixed, match=served.names[one]):
            ask((one, PROMPTS[0]), 1)
    request.node.user_properties += [("parity", (served.family, one, INSIDE)) for one in mixable]
