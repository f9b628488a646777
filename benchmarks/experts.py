"""Expert LoRA benchmark: one mixed batch against PEFT, and the cost without adapters.

    python benchmarks/experts.py {peft,unused} [--requests 32] [--rounds 3] [--threads N]

peft    as many requests as adapters, which are PEFT's `all-linear` on a small mixture: our engine in one batch, and
        PEFT with `set_adapter` and one `generate()` for each, in turns. PEFT's wrapper of experts takes no mixed batch.
unused  the base model alone: an engine whose experts and routers may carry adapters against one whose may not, in
        turns, step by step.

Random weights in float32, greedy. Prints one JSON line: how fast we are beside the other, by wall time and by CPU time
(which says more on a machine that others use too, with --threads 1), and the share of equal tokens.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from inprocess import build
from inputs import SPECIALS, make_tokenizer
from paired import Side, forget, ratios, run
from peft import LoraConfig, PeftModel, get_peft_model
from results import add_json_option, recording
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig

from loraplex_contracts.adapters import AdapterId
from loraplex_contracts.request import CompletionEnd, Request, RequestFailed, StoppingParams, Tokens
from loraplex_server.engine.engine import Engine
from loraplex_server.engine.pipe import Submit
from loraplex_server.model import adapt

CONFIG = Qwen3MoeConfig(
    vocab_size=4096,
    hidden_size=256,
    intermediate_size=512,
    moe_intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=32,
    num_experts=8,
    num_experts_per_tok=2,
    max_position_embeddings=1024,
    initializer_range=0.1,
    **SPECIALS,
)


def make_model(path: Path) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    model.save_pretrained(path)
    make_tokenizer(path, CONFIG)
    return model.eval()


def make_adapters(model: PreTrainedModel, root: Path, num_adapters: int, rank: int) -> PeftModel:
    """ROOT/a0 and so on, and PEFT's model with all of them."""
    peft: Any = None
    for number in range(num_adapters):
        name = f"a{number}"
        config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
        torch.manual_seed(number + 1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if peft is None:
                peft = get_peft_model(model, config, adapter_name=name)
            else:
                peft.add_adapter(name, config)
    with torch.no_grad():
        for path, parameter in peft.named_parameters():
            if "lora_B" in path:
                parameter.normal_(std=0.02)
    peft.save_pretrained(root, selected_adapters=list(peft.peft_config))
    return peft.eval()


def serve(engine: Engine, requests: list[Request]) -> dict[str, list[int]]:
    """The new tokens of each request, all of which come at once."""
    found: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.handle(Submit(request))
    num_open = len(requests)
    while num_open:
        batch = engine.turn()
        for event in batch.events if batch is not None else ():
            if isinstance(event, RequestFailed):
                raise SystemExit(f"{event.request_id}: {event.error}")
            if isinstance(event, Tokens):
                found[event.request_id] += event.token_ids
            num_open -= isinstance(event, CompletionEnd)
    return found


def against_peft(args: argparse.Namespace, folder: Path) -> dict[str, object]:
    peft = make_adapters(make_model(folder / "model"), folder / "adapters", args.requests, args.rank)
    slots = ["--adapter-slots", str(args.requests)]
    engine = build(folder, folder / "store", lora=True, flags=slots)
    prompts = torch.randint(
        10, CONFIG.vocab_size, (args.requests, args.prompt), generator=torch.Generator().manual_seed(7)
    )
    stopping = StoppingParams(max_tokens=args.output, ignore_eos=True)
    times_s: list[list[float]] = [[], []]
    cpu_s: list[list[float]] = [[], []]
    num_equal = 0
    for number in range(args.rounds + 1):  # the first loads the adapters, and is not counted
        requests = [
            Request(f"r{number}-{idx}", tuple(prompt), stopping, adapter_id=AdapterId(f"a{idx}"))
            for idx, prompt in enumerate(prompts.tolist())
        ]
        clocks = [(time.perf_counter(), time.process_time())]
        ours = serve(engine, requests)
        clocks.append((time.perf_counter(), time.process_time()))
        theirs: list[list[int]] = []
        for idx, prompt in enumerate(prompts):
            peft.set_adapter(f"a{idx}")
            with torch.inference_mode():
                out = peft.generate(input_ids=prompt[None], max_new_tokens=args.output, do_sample=False)
            theirs.append(out[0, args.prompt :].tolist())
        clocks.append((time.perf_counter(), time.process_time()))
        if number:
            for side, (start, end) in enumerate(pairwise(clocks)):
                times_s[side].append(end[0] - start[0])
                cpu_s[side].append(end[1] - start[1])
            pairs = zip(ours.values(), theirs, strict=True)
            num_equal += sum(one == other for mine, its in pairs for one, other in zip(mine, its, strict=True))
    engine.close()
    num_tokens = args.requests * args.output
    return {
        "ratios": [round(other / one, 2) for one, other in zip(*times_s, strict=True)],
        "ratios_of_cpu_time": [round(other / one, 2) for one, other in zip(*cpu_s, strict=True)],
        "tokens_per_s": [round(num_tokens / statistics.median(found), 1) for found in times_s],
        "equal_tokens": round(num_equal / (num_tokens * args.rounds), 4),
    }


def unused(args: argparse.Namespace, folder: Path) -> dict[str, object]:
    make_model(folder / "model")
    with patch.object(adapt, "adapt_experts", return_value={}):
        first = Side(build(folder, folder / "one", lora=False))
    second = Side(build(folder, folder / "other", lora=False))
    prompts = torch.randint(
        10, CONFIG.vocab_size, (args.requests, args.prompt), generator=torch.Generator().manual_seed(7)
    )
    stopping = StoppingParams(max_tokens=args.output, ignore_eos=True)
    for number in range(args.rounds + 1):
        for side in (first, second):
            side.submit([Request(f"{number}-{idx}", tuple(one), stopping) for idx, one in enumerate(prompts.tolist())])
        run(first, second)
        if number == 0:
            forget(first, second)
    for side in (first, second):
        side.engine.close()
    return ratios(first, second)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("peft", "unused"))
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=32, help="tokens of each prompt")
    parser.add_argument("--output", type=int, default=32, help="tokens of each request")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0, help="of torch; 0: its own number")
    add_json_option(parser)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder, recording(args.json) as record:
        case = against_peft if args.what == "peft" else unused
        record({"case": args.what, "requests": args.requests, **case(args, Path(folder))})


if __name__ == "__main__":
    main()
