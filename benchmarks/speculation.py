"""Benchmark of speculation: tokens per second by proposer, against none.

    python benchmarks/speculation.py synthetic IN_DIR [--accept 1 0.6 0] [--proposers lookup medusa draft]
        [--batch 1 8 32] [--draft-tokens 4] [--adaptive] [--output 128] [--repeat 3]
    python benchmarks/speculation.py demo [--batch 1 8] [--cases 16] [--repeat 3] [--only NAME ...] [--earlier 0 10]

`synthetic`: on the model of IN_DIR (as in workloads.py; its weights may be random). Every proposer does its own work,
on random heads and a random small draft model made for the purpose, but whether a draft token counts as accepted is
rolled: always, with probability 0.6, never. Nothing else of a step is changed, so the price is real and the acceptance
given.

`demo`: the demo's own world on held-out records, with its own heads and draft models; acceptance is what it is, texts
are checked against those without speculation, and tokens per target step are printed. The records are the copy-heavy
ones of those that are drawn (`--drawn`): whose right answer repeats most of its prompt, which is known before
anything runs. Lookup searches in earlier outputs too: each run has a cache salt of its own, so it never finds those
of the same records from the run before, and is preceded by `--earlier` requests for other records, under that salt.

Runs with and without speculation take turns in one process; each line is the ratio of medians.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from workloads import read_workload

from loraplex_contracts.request import CompletionEnd, Request, RequestFailed, SpeculationParams, StoppingParams, Tokens
from loraplex_demo.formats import FORMATS
from loraplex_demo.world import MAX_NEW_TOKENS, Case, committed_world
from loraplex_server.config import (
    AdaptersConfig,
    BatchConfig,
    EngineConfig,
    KvConfig,
    ModelConfig,
    SpeculationConfig,
)
from loraplex_server.engine.assembly import build_engine
from loraplex_server.engine.engine import Engine
from loraplex_server.engine.pipe import Submit
from loraplex_server.model import runner as runner_module
from loraplex_server.speculation.prompt_lookup import PromptLookupProposer
from loraplex_server.speculation.proposer import OWN, Ask, Piece

Verify = Callable[[Sequence[int], Sequence[int]], tuple[int, ...]]
OFF = SpeculationParams(kind="off")


@dataclass(frozen=True)
class Prompt:
    """One request, whatever drafts for it."""

    token_ids: tuple[int, ...]
    adapter_id: str = ""
    max_tokens: int = 128
    ignore_eos: bool = True
    cache_salt: str = ""


@dataclass
class Outcome:
    """One run of a batch."""

    seconds: float
    texts: list[tuple[int, ...]]
    num_steps: int
    num_drafted: int = 0
    num_accepted: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(len(text) for text in self.texts)


def run_once(engine: Engine, prompts: Sequence[Prompt], speculation: SpeculationParams, tag: str) -> Outcome:
    """All at once, greedy, from the first submission to the last token."""
    texts: dict[str, list[int]] = {}
    outcome = Outcome(0.0, [], 0)
    start = time.perf_counter()
    for number, prompt in enumerate(prompts):
        request_id = f"{tag}-{number}"
        texts[request_id] = []
        stopping = StoppingParams(max_tokens=prompt.max_tokens, ignore_eos=prompt.ignore_eos)
        engine.handle(
            Submit(
                Request(
                    request_id,
                    prompt.token_ids,
                    stopping,
                    adapter_id=prompt.adapter_id,
                    cache_salt=prompt.cache_salt,
                    speculation=speculation,
                )
            )
        )
    num_open = len(prompts)
    while num_open:
        batch = engine.turn()
        outcome.num_steps += 1
        for event in batch.events if batch is not None else ():
            if isinstance(event, RequestFailed):
                raise SystemExit(f"{event.request_id}: {event.error}")
            if isinstance(event, Tokens):
                texts[event.request_id] += event.token_ids
                outcome.num_drafted += event.num_drafted
                outcome.num_accepted += event.num_accepted
            num_open -= isinstance(event, CompletionEnd)
    outcome.seconds = time.perf_counter() - start
    outcome.texts = [tuple(text) for text in texts.values()]
    return outcome


@contextmanager
def rolled_acceptance(share: float) -> Generator[None]:
    """Accepts each drafted token with this probability, whatever the target drew."""
    dice = random.Random(0)

    def verify(draft: Sequence[int], sampled: Sequence[int]) -> tuple[int, ...]:
        num_accepted = 0
        while num_accepted < len(draft) and dice.random() < share:
            num_accepted += 1
        return (*draft[:num_accepted], sampled[num_accepted])

    original: Verify = runner_module.verify_chain
    runner_module.verify_chain = verify
    try:
        yield
    finally:
        runner_module.verify_chain = original


def compare(
    engine: Engine,
    prompts: Sequence[Prompt],
    speculation: SpeculationParams,
    *,
    share: float | None,
    repeat: int,
    name: str,
    earlier: Sequence[Prompt] = (),
) -> dict[str, object]:
    """One line: without and with, taking turns. `share` None: acceptance is real, and texts must be equal.

    `earlier`: run before each run with speculation, not measured.
    """
    plain: list[Outcome] = []
    spec: list[Outcome] = []
    for round_idx in range(repeat + 1):  # the first one warms up
        plain.append(run_once(engine, prompts, OFF, f"{name}-off-{round_idx}"))
        if share is None:
            salt = uuid.uuid4().hex  # nobody has written anything under it
            run_once(engine, [replace(one, cache_salt=salt) for one in earlier], speculation, f"{name}-earlier")
            salted = [replace(one, cache_salt=salt) for one in prompts]
            spec.append(run_once(engine, salted, speculation, f"{name}-on-{round_idx}"))
        else:
            with rolled_acceptance(share):
                spec.append(run_once(engine, prompts, speculation, f"{name}-on-{round_idx}"))
    if share is None and any(one.texts != plain[0].texts for one in spec):
        print(json.dumps({"case": name, "note": "texts differ from those without speculation"}), flush=True)
    base = statistics.median(one.seconds / one.num_tokens for one in plain[1:])
    fast = statistics.median(one.seconds / one.num_tokens for one in spec[1:])
    last = spec[-1]
    return {
        "case": name,
        "batch": len(prompts),
        "accept": "real" if share is None else share,
        "plain_tokens_per_s": round(1 / base, 1),
        "tokens_per_s": round(1 / fast, 1),
        "ratio": round(base / fast, 3),
        "tokens_per_step": round(last.num_tokens / len(prompts) / last.num_steps, 2),
        "acceptance": round(last.num_accepted / last.num_drafted, 3) if last.num_drafted else None,
    }


# --- synthetic --------------------------------------------------------------------------------------------------------


def make_heads(root: Path, model: Path, num_heads: int = 4) -> str:
    """Random heads that share the base model's head (a random draft costs what a good one costs). Returns the id."""
    config = AutoConfig.from_pretrained(model)
    path = root / "random-heads"
    path.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    size = config.hidden_size
    tensors: dict[str, torch.Tensor] = {}
    for head in range(num_heads):
        weight = torch.randn(size, size, generator=generator) * size**-0.5
        tensors[f"{head}.0.linear.weight"] = weight.to(torch.bfloat16)
        tensors[f"{head}.0.linear.bias"] = torch.zeros(size, dtype=torch.bfloat16)
    save_file(tensors, path / "medusa_lm_head.safetensors")
    (path / "config.json").write_text(
        json.dumps({"medusa_num_heads": num_heads, "medusa_num_layers": 1, "version": "2"})
    )
    return path.name


def make_draft(path: Path, model: Path) -> None:
    """A random model of the same vocabulary and about a fiftieth of the size."""
    config = AutoConfig.from_pretrained(model)
    torch.manual_seed(0)
    draft = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=config.max_position_embeddings,
            tie_word_embeddings=True,
        )
    )
    torch.nn.Module.to(draft, torch.bfloat16)
    draft.save_pretrained(path)


def always_match() -> None:
    """Random text has nothing to look up: every lookup finds a match, and gives as many tokens as are wanted."""
    find = PromptLookupProposer.pieces
    propose = PromptLookupProposer.propose

    def some_pieces(self: PromptLookupProposer, ask: Ask) -> tuple[Piece, ...]:
        found = find(self, ask)
        return (Piece(OWN, ask.num_tokens, max(3, found[0].evidence if found else 0)),)

    def some_tokens(self: PromptLookupProposer, asks: Sequence[Ask]) -> list[tuple[int, ...]]:
        drafts = propose(self, asks)
        return [(*draft, *([1] * ask.num_tokens))[: ask.num_tokens] for draft, ask in zip(drafts, asks, strict=True)]

    PromptLookupProposer.pieces = some_pieces
    PromptLookupProposer.propose = some_tokens


KINDS = {
    "lookup": SpeculationParams(kind="prompt_lookup", min_ngram=1),
    "medusa": SpeculationParams(kind="medusa"),
    "draft": SpeculationParams(kind="draft_model"),
}


def synthetic_engine(inputs: Path, work: Path, num_threads: int | None, *, adaptive: bool) -> Engine:
    """Engine with Medusa heads and a draft model that are made in `work`."""
    heads = make_heads(work / "adapters", inputs / "model")
    make_draft(work / "draft", inputs / "model")
    config = EngineConfig(
        num_threads=num_threads,
        model=ModelConfig(str(inputs / "model"), device="cpu"),
        kv=KvConfig(prefix_caching=False, memory_bytes=2 << 30),
        batch=BatchConfig(max_running=32, max_step_tokens=2048),
        adapters=AdaptersConfig(root=work / "adapters", store_dir=work / "store"),
        speculation=SpeculationConfig(
            default_medusa=heads,
            draft_models=(f"small={work / 'draft'}",),
            adaptive=adaptive,
            lookup_history=0,  # the same prompts come again and again
        ),
    )
    return build_engine(config, lambda text: None, lambda: None)


def synthetic(args: argparse.Namespace) -> None:
    always_match()
    with tempfile.TemporaryDirectory() as directory:
        engine = synthetic_engine(args.inputs, Path(directory), args.threads, adaptive=args.adaptive)
        items = read_workload(args.inputs, "base-32")
        for num_prompts in args.batch:
            prompts = [Prompt(item.prompt_ids, max_tokens=args.output) for item in items[:num_prompts]]
            for kind in args.proposers:
                for share in args.accept:
                    params = replace(KINDS[kind], max_draft_tokens=args.draft_tokens, fixed_length=not args.adaptive)
                    row = compare(engine, prompts, params, share=share, repeat=args.repeat, name=kind)
                    print(json.dumps(row), flush=True)
        engine.close()


# --- demo -------------------------------------------------------------------------------------------------------------


def copied_share(source: Sequence[int], text: Sequence[int], length: int = 3) -> float:
    """The share of a text's tokens which lie in a run of `length` that `source` has too."""
    runs = {tuple(source[i : i + length]) for i in range(len(source) - length + 1)}
    copied = {
        i + k for i in range(len(text) - length + 1) if tuple(text[i : i + length]) in runs for k in range(length)
    }
    return len(copied) / max(1, len(text))


def demo(args: argparse.Namespace) -> None:
    world = committed_world()
    drafts = tuple(f"{draft.name}={world.draft_path(draft.name)}" for draft in world.drafts)
    tokenizer = AutoTokenizer.from_pretrained(world.base_path)
    with tempfile.TemporaryDirectory() as directory:
        config = EngineConfig(
            num_threads=args.threads,
            model=ModelConfig(str(world.base_path), device="cpu"),
            kv=KvConfig(prefix_caching=False, memory_bytes=256 << 20),
            batch=BatchConfig(max_running=32, max_step_tokens=2048),
            adapters=AdaptersConfig(root=world.adapters_root, store_dir=Path(directory)),
            speculation=SpeculationConfig(draft_models=drafts),
        )
        engine = build_engine(config, lambda text: None, lambda: None)
        drawn = world.cases(max(args.cases, args.drawn), "benchmark")
        others = world.cases(max(args.earlier), "earlier")
        kinds = {
            **{f"medusa {h.name}": (h.adapter, SpeculationParams("medusa", medusa_id=h.name)) for h in world.heads},
            "lookup": ("json", SpeculationParams("prompt_lookup")),
            **{f"draft {d.name}": ("json", SpeculationParams("draft_model", draft_name=d.name)) for d in world.drafts},
            "auto": ("json", SpeculationParams("auto")),
        }

        def copy_heavy(adapter_id: str) -> list[Case]:
            def share(case: Case) -> float:
                expected = case.expected(adapter_id) if adapter_id in FORMATS else case.expected()
                return copied_share(tokenizer(case.prompt)["input_ids"], tokenizer(expected)["input_ids"])

            return sorted(drawn, key=share, reverse=True)[: args.cases]

        def prompts(cases: Sequence[Case], adapter_id: str) -> list[Prompt]:
            texts = [tuple(tokenizer(case.prompt)["input_ids"]) for case in cases]
            return [Prompt(text, adapter_id, MAX_NEW_TOKENS, ignore_eos=False) for text in texts]

        for num_prompts in args.batch:
            for name, (adapter_id, params) in kinds.items():
                if args.only and name not in args.only:
                    continue
                asked = prompts(copy_heavy(adapter_id), adapter_id)
                batches = [asked[i : i + num_prompts] for i in range(0, len(asked) - num_prompts + 1, num_prompts)]
                for num_earlier in args.earlier if params.kind in ("prompt_lookup", "auto") else (0,):
                    earlier = prompts(others[:num_earlier], adapter_id)
                    rows = [
                        compare(engine, batch, params, share=None, repeat=args.repeat, name=name, earlier=earlier)
                        for batch in batches
                    ]
                    print(json.dumps(summary(rows) | {"earlier": num_earlier}), flush=True)
        engine.close()


def summary(rows: Sequence[dict[str, object]]) -> dict[str, object]:
    """Medians over the batches of a case."""
    found = dict(rows[0])
    for key, value in found.items():
        if isinstance(value, float):
            values = [float(str(row[key])) for row in rows if row[key] is not None]
            found[key] = round(statistics.median(values), 3)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=None, help="CPU threads; default: all cores")
    commands = parser.add_subparsers(required=True)
    made = commands.add_parser("synthetic")
    made.set_defaults(run=synthetic)
    made.add_argument("inputs", type=Path)
    made.add_argument("--accept", type=float, nargs="+", default=[1.0, 0.6, 0.0])
    made.add_argument("--proposers", nargs="+", default=["lookup", "medusa", "draft"])
    made.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    made.add_argument("--draft-tokens", type=int, default=4)
    made.add_argument("--adaptive", action="store_true")
    made.add_argument("--output", type=int, default=128)
    made.add_argument("--repeat", type=int, default=3)
    shown = commands.add_parser("demo")
    shown.set_defaults(run=demo)
    shown.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    shown.add_argument("--cases", type=int, default=16)
    shown.add_argument("--drawn", type=int, default=64, help="records of which the copy-heavy ones are taken")
    shown.add_argument("--repeat", type=int, default=3)
    shown.add_argument("--only", nargs="+", help="cases by name, such as: lookup")
    shown.add_argument("--earlier", type=int, nargs="+", default=[0, 10], help="outputs that lookup may search in")
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
