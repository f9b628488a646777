"""Hybrid benchmark: families with recurrent states beside Transformers and PEFT.

    python benchmarks/hybrids.py {compare,profile,products,linears} [--shape delta] [--batch 1 8 32] [--adapters 0 8 32]

compare  our engine in one batch, and Transformers' generate() in turns: with adapters once for each adapter, over the
         requests that have it (PEFT's `set_adapter`).
profile  our engine alone: time of a decode step, and what torch says it is spent on.
products an engine whose experts compute by the back end's products beside one where Transformers' code does, without
         adapters, step by step in turns.
linears  likewise an engine that computes linears with one input in one call, beside one where each computes alone, with
         adapters too.

Models of about 250M parameters with random weights in bfloat16; greedy. One JSON line for each case: tokens per second
of whole requests, prompts included, and how fast we are beside the other.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from experts import serve
from inprocess import build
from inputs import SPECIALS, make_tokenizer
from paired import Side, forget, ratios, run
from peft import LoraConfig, PeftModel, get_peft_model
from results import add_json_option, recording
from transformers import (
    AutoModelForCausalLM,
    GraniteMoeHybridConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

from loraplex_contracts.adapters import AdapterId
from loraplex_contracts.request import Request, StoppingParams
from loraplex_server.backends.cpu.backend import CpuBackend

_COMMON: dict[str, Any] = {
    "vocab_size": 8192,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    **SPECIALS,
}
_DELTA: dict[str, Any] = {
    "hidden_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
_TINY: dict[str, Any] = _DELTA | {
    "vocab_size": 512,
    "hidden_size": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 32,
}


def _layers(num: int, period: int) -> list[str]:
    return ["linear_attention" if (idx + 1) % period else "full_attention" for idx in range(num)]


SHAPES: Mapping[str, Callable[[], PreTrainedConfig]] = {
    # Gated delta rule in three of four layers.
    "delta": lambda: Qwen3_5TextConfig(
        **_COMMON, **_DELTA, num_hidden_layers=24, layer_types=_layers(24, 4), intermediate_size=1792
    ),
    # The same with experts, two of 16 for each token: 90M of the parameters.
    "experts": lambda: Qwen3NextConfig(
        **_COMMON,
        **_DELTA,
        num_hidden_layers=12,
        layer_types=_layers(12, 4),
        intermediate_size=1792,
        num_experts=16,
        num_experts_per_tok=2,
        moe_intermediate_size=320,
        shared_expert_intermediate_size=320,
    ),
    # Mamba-2 in six of seven layers.
    "mamba2": lambda: GraniteMoeHybridConfig(
        **_COMMON,
        hidden_size=1024,
        num_hidden_layers=21,
        layer_types=_layers(21, 7),
        num_attention_heads=8,
        num_key_value_heads=2,
        shared_intermediate_size=2048,
        num_local_experts=0,
        num_experts_per_tok=0,
        mamba_n_heads=32,
        mamba_d_head=64,
        mamba_n_groups=1,
        mamba_d_state=128,
        mamba_expand=2,
        position_embedding_type="rope",
    ),
    "tiny": lambda: Qwen3_5TextConfig(  # to see that it runs
        **(_COMMON | _TINY), num_hidden_layers=2, layer_types=_layers(2, 2), intermediate_size=64
    ),
}
TARGETS = (
    *("in_proj_qkvz", "in_proj_qkv", "in_proj_z", "in_proj", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj"),
    *("gate_proj", "up_proj", "down_proj", "input_linear", "output_linear"),
)


def make_model(config: PreTrainedConfig, path: Path) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.generation_config.eos_token_id = None
    model.save_pretrained(path)
    make_tokenizer(path, config)
    return model.eval()


def make_adapters(model: PreTrainedModel, root: Path, num_adapters: int, rank: int) -> PeftModel:
    """ROOT/a0 and so on, and PEFT's model with all of them."""
    peft: Any = None
    names = {path.rpartition(".")[2] for path, _ in model.named_modules()}
    for number in range(num_adapters):
        targets = sorted(names.intersection(TARGETS))
        config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets, task_type="CAUSAL_LM")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if peft is None:
                peft = get_peft_model(model, config, adapter_name=f"a{number}")
            else:
                peft.add_adapter(f"a{number}", config)
    with torch.no_grad():
        for path, parameter in peft.named_parameters():
            if "lora_B" in path:
                parameter.normal_(std=0.02)
            if "lora_" in path:
                parameter.data = parameter.data.to(torch.bfloat16)
    peft.save_pretrained(root, selected_adapters=list(peft.peft_config))
    return peft.eval()


def generate(model: Any, prompts: torch.Tensor, owners: Sequence[int], num_tokens: int) -> list[list[int]]:
    """The new tokens of each prompt. `owners`: their adapters, -1 for none."""
    found: list[list[int]] = [[] for _ in owners]
    for owner in dict.fromkeys(owners):
        own = [idx for idx, one in enumerate(owners) if one == owner]
        with torch.inference_mode():
            if owner >= 0:
                model.set_adapter(f"a{owner}")
            out = model.generate(
                input_ids=prompts[own],
                attention_mask=torch.ones_like(prompts[own]),
                max_new_tokens=num_tokens,
                do_sample=False,
            )
        for idx, row in zip(own, out, strict=True):
            found[idx] = row[prompts.shape[1] :].tolist()
    return found


def requests(prompts: torch.Tensor, owners: Sequence[int], tag: str, num_tokens: int) -> list[Request]:
    stopping = StoppingParams(max_tokens=num_tokens, ignore_eos=True)
    return [
        Request(f"{tag}-{idx}", tuple(prompt), stopping, adapter_id=AdapterId(f"a{owner}" if owner >= 0 else ""))
        for idx, (prompt, owner) in enumerate(zip(prompts.tolist(), owners, strict=True))
    ]


def owners_of(batch: int, num_adapters: int) -> list[int]:
    return [idx % num_adapters if num_adapters else -1 for idx in range(batch)]


def _nothing(*_: object) -> None:
    """In the place of what a back end makes."""


# What the first of two engines lacks.
LACKING: Mapping[str, Sequence[str]] = {"products": ("expert_products", "fused_experts"), "linears": ("merge",)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("compare", "profile", *LACKING))
    parser.add_argument("--shape", choices=tuple(SHAPES), default="delta")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--adapters", type=int, nargs="+", default=[0, 8, 32], help="more than the batch: as many")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--output", type=int, default=32, help="tokens of each request")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--flags", default="", help="further flags of the worker, in one argument")
    add_json_option(parser)
    args = parser.parse_args()
    config = SHAPES[args.shape]()
    adapters = [0] if args.what == "products" else args.adapters
    cases = dict.fromkeys((batch, min(batch, num)) for batch in args.batch for num in adapters)
    num_adapters = max(num for _, num in cases)
    with tempfile.TemporaryDirectory() as name, recording(args.json) as record:
        folder = Path(name)
        model: Any = make_model(config, folder / "model")
        num_parameters = sum(one.numel() for one in model.parameters())
        peft = make_adapters(model, folder / "adapters", num_adapters, args.rank) if num_adapters else model
        flags = ["--state-memory", "2GiB", *args.flags.split()]
        if num_adapters:
            flags += ["--adapter-slots", str(num_adapters)]
        if args.what in LACKING:
            lora = bool(num_adapters)
            with patch.multiple(CpuBackend, **dict.fromkeys(LACKING[args.what], _nothing)):
                first = Side(build(folder, folder / "one", lora=lora, flags=flags))
            second = Side(build(folder, folder / "other", lora=lora, flags=flags))
            for batch, num in cases:
                record({"case": f"{args.shape}-{batch}", "adapters": num, **in_turns(first, second, batch, num, args)})
            return
        engine = build(folder, folder / "store", lora=bool(num_adapters), flags=flags)
        vocab = config.get_text_config().vocab_size
        prompts = torch.randint(10, vocab, (max(args.batch), args.prompt), generator=torch.Generator().manual_seed(7))
        for batch, num in cases:
            owners = owners_of(batch, num)
            facts = {"case": f"{args.shape}-{batch}", "adapters": num, "millions": num_parameters // 10**6}
            serve(engine, requests(prompts[:batch], owners, f"warm-{batch}-{num}", 3))
            if args.what == "profile":
                record(
                    {**facts, **profile(Side(engine), requests(prompts[:batch], owners, f"{batch}-{num}", args.output))}
                )
                continue
            rates: list[list[float]] = [[], []]
            num_equal = 0
            for number in range(args.rounds):
                start_s = time.perf_counter()
                ours = serve(engine, requests(prompts[:batch], owners, f"{batch}-{num}-{number}", args.output))
                middle_s = time.perf_counter()
                if num or not num_adapters:
                    theirs = generate(peft, prompts[:batch], owners, args.output)
                else:
                    with peft.disable_adapter():
                        theirs = generate(peft, prompts[:batch], owners, args.output)
                end_s = time.perf_counter()
                rates[0].append(batch * args.output / (middle_s - start_s))
                rates[1].append(batch * args.output / (end_s - middle_s))
                pairs = zip(ours.values(), theirs, strict=True)
                num_equal += sum(one == other for mine, its in pairs for one, other in zip(mine, its, strict=True))
            record(
                facts
                | {
                    "ratios": [round(one / other, 2) for one, other in zip(*rates, strict=True)],
                    "tokens_per_s": [round(statistics.median(found), 1) for found in rates],
                    "equal_tokens": round(num_equal / (batch * args.output * args.rounds), 3),
                }
            )
        engine.close()


def in_turns(first: Side, second: Side, batch: int, num_adapters: int, args: argparse.Namespace) -> dict[str, object]:
    """Ratios of steps, of prompts too."""
    prompts = torch.randint(10, 500, (batch, args.prompt), generator=torch.Generator().manual_seed(7))
    for number in range(args.rounds + 1):
        for side in (first, second):
            owners, tag = owners_of(batch, num_adapters), f"{batch}-{num_adapters}-{number}"
            side.submit(requests(prompts, owners, tag, args.output if number else 4))
        run(first, second)
        if number == 0:
            forget(first, second)
    found = ratios(first, second)
    forget(first, second)
    return found


def profile(side: Side, asked: Sequence[Request]) -> dict[str, Any]:
    """The median decode step, and the operations that take most time of it."""
    side.submit(asked)
    while side.num_open and len(side.times_s) < 4:
        side.step()
    side.times_s.clear()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        for _ in range(3):
            side.step()
    side.times_s.clear()
    while side.num_open:
        side.step()
    rows = sorted(seen.key_averages(), key=lambda row: -row.self_cpu_time_total)[:14]
    return {
        "median_step_ms": round(1000 * statistics.median(side.times_s), 2),
        "operations_ms": {row.key: [round(row.self_cpu_time_total / 3000, 2), row.count // 3] for row in rows},
    }


if __name__ == "__main__":
    main()
