"""Adapters of many formats, and mixtures, under change: reloads, unloads, broken files, two tenants.

Each answer is compared with PEFT's for the contents that the name had while the request ran.
"""

from __future__ import annotations

import copy
import itertools
import os
import random
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
import torch
from peft import BOFTConfig, IA3Config, LoHaConfig, LoKrConfig, LoraConfig, OFTConfig, PeftConfig, VeraConfig
from support.credentials import credential, write_credentials
from support.dense import greedy
from support.peft_files import save_variant
from support.processes import Running, loraplex
from support.world import TinyWorld, byte_tokenizer
from torch import nn
from transformers import AutoModelForCausalLM

from loraplex import (
    AdapterInvalid,
    AdapterNotFound,
    AdapterNotMixed,
    Client,
    FailedPrecondition,
    LoraplexError,
    SourceUnavailable,
)

LINEARS = ["q_proj", "v_proj", "down_proj"]
FORMATS: tuple[PeftConfig, ...] = (
    LoraConfig(r=4, target_modules=LINEARS),
    LoraConfig(r=13, target_modules=LINEARS, use_rslora=True),
    LoraConfig(r=4, target_modules=LINEARS, use_dora=True),
    LoraConfig(r=4, target_modules=LINEARS, lora_bias=True),
    LoraConfig(r=2, target_modules=LINEARS, modules_to_save=["lm_head"]),
    LoraConfig(r=2, target_modules=LINEARS, trainable_token_indices=[70, 100, 101]),
    VeraConfig(r=8, target_modules=LINEARS),
    LoHaConfig(r=2, target_modules=LINEARS),
    LoKrConfig(r=2, target_modules=LINEARS, decompose_factor=4),
    IA3Config(target_modules=LINEARS, feedforward_modules=["down_proj"]),
    OFTConfig(oft_block_size=8, target_modules=LINEARS),
    BOFTConfig(boft_block_size=8, target_modules=LINEARS),
)
CONTENTS_PER_FORMAT = 3
NUM_MIXABLE = 2 * CONTENTS_PER_FORMAT  # contents of the first two formats, which are plain LoRAs
WEIGHTS = (0.75, -0.5)  # of a mixture's two members
BROKEN = -1
PROMPTS = ("Ask me anything", "dddddxxxdddxx xd")
NUM_TOKENS = 8
TENANTS = ("acme", "globex")
NUM_ADAPTERS = 500
NUM_CLIENTS = 12
TIMEOUT_S = 60.0
# Refusals that a busy server may give; the client asks again.
BUSY = {"ADAPTER_MEMORY_FULL", "ADAPTER_LOADS_BUSY", "QUEUE_FULL", "OVERLOADED", "DISK_FULL"}


@dataclass
class Name:
    """An adapter's name, and the contents that a request for it may get."""

    adapter_id: str
    folder: Path
    contents: list[int]  # the last one is in the folder, those before it may still be bound
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass
class World:
    root: Path
    contents: list[Path]  # folders
    expected: dict[tuple[tuple[int, ...], str], list[int]]  # by contents, one or those of a mixture, and prompt
    names: dict[str, list[Name]]  # by tenant
    auth_file: Path


def text_of(model: nn.Module, prompt: str) -> list[int]:
    return greedy(model, byte_tokenizer().encode(prompt), NUM_TOKENS, min_tokens=NUM_TOKENS)


@pytest.fixture(scope="module")
def world(tiny_world: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> World:
    home = tmp_path_factory.mktemp("churn")
    base = AutoModelForCausalLM.from_pretrained(tiny_world.model, dtype=torch.float64)
    contents: list[Path] = []
    expected: dict[tuple[tuple[int, ...], str], list[int]] = {}
    changes: list[dict[str, torch.Tensor]] = []
    for config in FORMATS:
        for seed in range(CONTENTS_PER_FORMAT):
            index = len(contents)
            contents.append(home / "contents" / str(index))
            model = save_variant(base, config, contents[index], seed)
            for prompt in PROMPTS:
                expected[(index,), prompt] = text_of(model, prompt)  # type: ignore[arg-type]
            if index < NUM_MIXABLE:
                merged = model.merge_and_unload().state_dict()  # type: ignore[operator]
                changes.append({name: merged[name] - weight for name, weight in base.state_dict().items()})
    for pair in itertools.product(range(NUM_MIXABLE), repeat=2):
        mixed = copy.deepcopy(base)
        for (_, weight), *deltas in zip(
            mixed.state_dict().items(), *(changes[one].values() for one in pair), strict=True
        ):
            weight += sum(share * delta for share, delta in zip(WEIGHTS, deltas, strict=True))
        for prompt in PROMPTS:
            expected[pair, prompt] = text_of(mixed, prompt)
    root = home / "adapters"
    names: dict[str, list[Name]] = {}
    for tenant in TENANTS:
        names[tenant] = []
        for number in range(NUM_ADAPTERS // len(TENANTS)):
            folder, content = root / tenant / f"a{number:03}", number % len(contents)
            shutil.copytree(contents[content], folder)
            names[tenant].append(Name(f"{tenant}/a{number:03}", folder, [content]))
    rows = [credential(tenant, tenant, f"{tenant}/*", roles=("user", "admin")) for tenant in TENANTS]
    return World(root, contents, expected, names, write_credentials(home / "auth.json", *rows))


@pytest.fixture
def server(tiny_world: TinyWorld, world: World) -> Iterator[Running]:
    with loraplex(
        "serve", str(tiny_world.model), "--adapters", str(world.root), "--port", "0", "--dtype", "float64",
        "--adapter-slots", "16", "--max-running", "16", "--kv-memory", "4MiB", "--auth-file", str(world.auth_file),
        "--adapter-host-memory", "256KiB", "--adapter-disk", "512KiB",
        "--adapter-store", str(world.root.parent / "store"),
    ) as running:  # fmt: skip
        yield running


class Churn:
    """Requests and changes until a time. Owns the counts, and the list of what was wrong."""

    def __init__(self, world: World, address: str, until_s: float) -> None:
        self.world = world
        self.address = address
        self.until_s = until_s
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.longest_s = 0.0
        self._lock = threading.Lock()

    def note(self, what: str) -> None:
        with self._lock:
            self.counts[what] += 1

    def fail(self, text: str) -> None:
        with self._lock:
            self.wrong.append(text)

    def clients(self, tenant: str) -> Client:
        return Client(self.address, token=tenant, timeout_s=TIMEOUT_S)

    def ask(self, seed: int) -> None:
        dice = random.Random(seed)
        tenant = TENANTS[seed % len(TENANTS)]
        with self.clients(tenant) as client:
            while time.monotonic() < self.until_s and not self.wrong:
                if dice.random() < 0.02:
                    self._ask_for_the_others(client, tenant, dice)
                    continue
                names = self.world.names[tenant][:: dice.choice((1, 20))]
                mixable = [name for name in names if name.contents[-1] in range(NUM_MIXABLE)]
                if len(mixable) > 1 and dice.random() < 0.2:
                    self._ask_one(client, dice.sample(mixable, 2), dice)
                else:
                    self._ask_one(client, [dice.choice(names)], dice)

    def _ask_one(self, client: Client, names: list[Name], dice: random.Random) -> None:
        """Asks for a text of one adapter, or of the mixture of two, and judges the answer."""
        what = " and ".join(name.adapter_id for name in names)
        prompt, known, start_s = dice.choice(PROMPTS), [set(name.contents) for name in names], time.monotonic()
        ids = [name.adapter_id for name in names]
        mixture = dict(zip(ids, WEIGHTS, strict=True)) if len(ids) > 1 else None
        try:
            found = client.generate(
                prompt,
                adapter_id=None if mixture else ids[0],
                adapters=mixture,
                max_tokens=NUM_TOKENS,
                min_tokens=NUM_TOKENS,
                speculation=dice.choice(("off", "prompt_lookup")),
            )
        except LoraplexError as error:
            allowed = [before | set(name.contents) for before, name in zip(known, names, strict=True)]
            if error.reason in BUSY:
                self.note("busy")
            elif isinstance(error, AdapterInvalid) and any(BROKEN in each for each in allowed):
                self.note("refused: broken")
            elif isinstance(error, AdapterNotMixed) and any(max(each) >= NUM_MIXABLE for each in allowed):
                self.note("refused: not mixed")
            elif isinstance(error, AdapterNotFound | FailedPrecondition | SourceUnavailable) and any(
                len(each) > 1 for each in allowed
            ):
                # The name was not loaded between the two renames, when it has no folder; or the folder has just been
                # replaced, and the version in use had left memory and the small store; or the old folder was removed
                # while it was read.
                self.note("refused: replaced")
            else:
                self.fail(f"{what}: {error.reason} {error}; contents {allowed}")
            return
        self.longest_s = max(self.longest_s, time.monotonic() - start_s)
        got = list(found.completions[0].token_ids)
        allowed = [before | set(name.contents) for before, name in zip(known, names, strict=True)]
        if not any(got == self.world.expected.get((one, prompt)) for one in itertools.product(*allowed)):
            self.fail(f"{what}: wrong text of contents {allowed}: {got}")
        self.note("mixtures" if mixture else "texts")

    def _ask_for_the_others(self, client: Client, tenant: str, dice: random.Random) -> None:
        other = next(one for one in TENANTS if one != tenant)
        try:
            client.generate("x", adapter_id=dice.choice(self.world.names[other]).adapter_id, max_tokens=1)
        except AdapterNotFound:
            self.note("refused: another tenant's")
        except LoraplexError as error:
            self.fail(f"another tenant's adapter: {error.reason}")
        else:
            self.fail("another tenant's adapter was served")

    def change(self, seed: int) -> None:
        dice = random.Random(seed)
        tenant = TENANTS[seed % len(TENANTS)]
        with self.clients(tenant) as client:
            while time.monotonic() < self.until_s and not self.wrong:
                name = dice.choice(self.world.names[tenant][:: dice.choice((1, 20))])
                with name.lock:
                    self._change_one(client, name, dice)
                time.sleep(0.02)

    def _change_one(self, client: Client, name: Name, dice: random.Random) -> None:
        what = dice.choice(("reload", "reload", "unload", "break"))
        try:
            if what == "unload":
                client.adapters.unload(name.adapter_id)
                self.note("unloads")
                return
            if what == "break":
                name.contents.append(BROKEN)
                self._replace(name, dice.randrange(len(self.world.contents)), broken=True)
                try:
                    client.adapters.load(name.adapter_id)
                except AdapterInvalid:
                    self.note("broken files")
                else:
                    self.fail(f"{name.adapter_id}: a broken file was loaded")
            content = dice.randrange(len(self.world.contents))
            name.contents.append(content)
            self._replace(name, content, broken=False)
            self._load(client, name)
            name.contents = [content]
            self.note("reloads")
        except AdapterNotFound:
            if what != "unload":
                raise
            self.note("unloads of what was not loaded")
        except LoraplexError as error:
            self.fail(f"{what} of {name.adapter_id}: {error.reason} {error}")

    def _load(self, client: Client, name: Name) -> None:
        while True:
            try:
                client.adapters.load(name.adapter_id)
            except LoraplexError as error:
                if error.reason not in BUSY:
                    raise
                self.note("busy")
                time.sleep(0.1)
            else:
                return

    def _replace(self, name: Name, content: int, *, broken: bool) -> None:
        """Replaces an adapter as a careful user does: a complete folder takes the other one's place."""
        new = name.folder.with_name(f".{name.folder.name}.new")
        shutil.copytree(self.world.contents[content], new)
        if broken:
            weights = new / "adapter_model.safetensors"
            os.truncate(weights, weights.stat().st_size // 2)
        old = name.folder.with_name(f".{name.folder.name}.old")
        name.folder.rename(old)
        new.rename(name.folder)
        shutil.rmtree(old)


def memory_mb(server: Running) -> float:
    tree = psutil.Process(server.process.pid)
    return sum(one.memory_info().rss for one in (tree, *tree.children(recursive=True))) / 1e6


@pytest.mark.parametrize(
    "seconds",
    [
        pytest.param(40, marks=[pytest.mark.slow, pytest.mark.timeout(400)]),
        pytest.param(600, marks=[pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(1200)]),
    ],
)
def test_no_text_is_wrong_while_adapters_change(world: World, server: Running, seconds: int) -> None:
    churn = Churn(world, server.address, time.monotonic() + seconds)
    with ThreadPoolExecutor(NUM_CLIENTS + 2) as threads:
        time.sleep(1)
        running = [threads.submit(churn.ask, seed) for seed in range(NUM_CLIENTS)]
        running += [threads.submit(churn.change, seed) for seed in range(2)]
        time.sleep(seconds / 3)
        before_mb = memory_mb(server)
        for one in running:
            one.result()
    after_mb = memory_mb(server)
    print(f"{dict(churn.counts)}, longest {churn.longest_s:.1f} s, memory {before_mb:.0f} to {after_mb:.0f} MB")
    assert not churn.wrong, churn.wrong[:5]
    assert min(churn.counts[what] for what in ("texts", "mixtures", "reloads", "unloads", "broken files")) > 10, (
        churn.counts
    )
    assert churn.counts["refused: another tenant's"] > 0
    assert churn.counts["refused: replaced"] < 1 + churn.counts["texts"] // 500, churn.counts
    assert churn.longest_s < TIMEOUT_S / 2
    assert after_mb - before_mb < 200
    assert server.end() == 0, server.output
    assert "unaccounted" not in server.output
    assert "Traceback" not in server.output, server.output
