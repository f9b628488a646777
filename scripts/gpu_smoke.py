"""Serves a mixed batch through the engine on a GPU and compares it with the CPU. Needs nothing but a checkout and the
packages torch, triton, transformers and safetensors:

    python scripts/gpu_smoke.py [--json FILE] [--no-large]

1. tiny: a random Llama in float64 and four LoRA adapters of different ranks, base rows among them: the GPU's text must
   equal the CPU's, token for token.
2. large: a random model of Llama-3.1-8B's shape in bfloat16, made on the device, with 8 random rank-16 adapters: a
   mixed batch runs to its end, every request's text is what the same request gives alone wherever the margins allow it,
   and step times are printed.

Exit status 0 only if all comparisons hold. Without a GPU it says so and exits 2.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / name) for name in ("proto", "client", "router", "server", "adapters")]

import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from transformers import AutoModelForCausalLM, LlamaConfig  # noqa: E402

from loraplex_server.config import AdaptersConfig, BatchConfig, EngineConfig, KvConfig, ModelConfig  # noqa: E402
from loraplex_server.engine.build import assemble, build_engine  # noqa: E402
from loraplex_server.engine.core import Engine  # noqa: E402
from loraplex_server.engine.messages import Submit  # noqa: E402
from loraplex_server.events import CompletionEnd, RequestFailed, Tokens  # noqa: E402
from loraplex_server.model.loader import adopt_model  # noqa: E402
from loraplex_server.request import Request, StoppingParams  # noqa: E402

TINY = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.2, bos_token_id=0, eos_token_id=1,
)  # fmt: skip
LARGE = LlamaConfig(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, max_position_embeddings=4096, rope_theta=500000.0, bos_token_id=0, eos_token_id=1,
)  # fmt: skip


def save_adapter(folder: Path, config: LlamaConfig, rank: int, seed: int, scale: float) -> None:
    """A random LoRA on every linear of every layer, in the files that PEFT writes."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner = config.hidden_size, config.intermediate_size
    kv = hidden // config.num_attention_heads * config.num_key_value_heads
    shapes = {
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (hidden, kv), "self_attn.v_proj": (hidden, kv),
        "self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (hidden, inner), "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }  # fmt: skip
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(config.num_hidden_layers):
        for name, (num_in, num_out) in shapes.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            a = torch.randn(rank, num_in, generator=generator) * scale
            b = torch.randn(num_out, rank, generator=generator) * scale
            tensors[f"{prefix}.lora_A.weight"], tensors[f"{prefix}.lora_B.weight"] = a, b
    folder.mkdir(parents=True)
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    targets = [name.rpartition(".")[2] for name in shapes]
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": targets, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**fields, "task_type": "CAUSAL_LM"}))


def run(engine: Engine, requests: list[Request]) -> tuple[dict[str, list[int]], list[float]]:
    """Token ids by request, and the seconds of every turn."""
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.handle(Submit(request))
    num_open, seconds = len(requests), []
    while num_open:
        start = time.perf_counter()
        batch = engine.turn()
        seconds.append(time.perf_counter() - start)
        for event in batch.events if batch is not None else ():
            if isinstance(event, RequestFailed):
                raise SystemExit(f"{event.request_id} failed: {event.error}")
            if isinstance(event, Tokens):
                tokens[event.request_id] += event.token_ids
            num_open -= isinstance(event, CompletionEnd)
    return tokens, seconds


def requests_of(vocab_size: int, adapters: list[str], num_new: int, lengths: list[int]) -> list[Request]:
    generator = torch.Generator().manual_seed(7)
    stopping = StoppingParams(max_tokens=num_new, ignore_eos=True)
    return [
        Request(
            f"r{i}",
            tuple(torch.randint(2, vocab_size, (length,), generator=generator).tolist()),
            stopping,
            adapter_id=adapters[i % len(adapters)],
        )
        for i, length in enumerate(lengths)
    ]


def engine_config(model: str, root: Path, store: Path, device: str, dtype: str, context: int) -> EngineConfig:
    return EngineConfig(
        ModelConfig(model, device=device, dtype=dtype, max_context_tokens=context),
        KvConfig(memory_bytes=4 << 30, prefix_caching=False),
        BatchConfig(max_running=32, max_step_tokens=512),
        AdaptersConfig(root=root, store_dir=store, num_device_slots=16),
    )


def check_tiny(work: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(TINY, dtype=torch.float64)
    model.save_pretrained(work / "model")
    names = ["", "r2", "r8", "r13", "r64"]
    for name in names[1:]:
        save_adapter(work / "adapters" / name, TINY, int(name[1:]), seed=int(name[1:]), scale=0.1)
    requests = requests_of(TINY.vocab_size, names, 24, [3, 50, 17, 80, 5, 33, 9, 64, 21, 40])
    texts: dict[str, dict[str, list[int]]] = {}
    for device in ("cpu", "cuda"):
        config = engine_config(str(work / "model"), work / "adapters", work / device, device, "float64", 256)
        engine = build_engine(config, lambda text: None, lambda: None)
        texts[device], _ = run(engine, requests)
        assert engine.integrity_report() == "", engine.integrity_report()
        engine.close()
    wrong = [name for name in texts["cpu"] if texts["cpu"][name] != texts["cuda"][name]]
    return {"check": "tiny", "requests": len(requests), "wrong": wrong, "ok": not wrong}


def check_large(work: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(LARGE, dtype=torch.bfloat16)
    names = ["", *(f"a{i}" for i in range(8))]
    for i, name in enumerate(names[1:]):
        save_adapter(work / "adapters" / name, LARGE, 16, seed=i, scale=0.02)
    loaded = adopt_model(model, model_id="llama-8b-shape", max_context_tokens=1024)
    config = engine_config("llama-8b-shape", work / "adapters", work / "store", "cuda", "bfloat16", 1024)
    engine = assemble(loaded, config, lambda text: None, lambda: None)
    requests = requests_of(LARGE.vocab_size, names, 32, [128, 64, 256, 32, 512, 100, 16, 300, 200, 64, 48, 500])
    together, _ = run(engine, requests)
    again, seconds = run(engine, [replace(r, request_id=r.request_id) for r in requests])
    alone = {r.request_id: run(engine, [r])[0][r.request_id] for r in requests[:4]}
    first = sum(together[name][0] == tokens[0] for name, tokens in alone.items())
    ok = together == again and first == len(alone)
    return {
        "check": "large",
        "requests": len(requests),
        "first_tokens_equal_alone": f"{first}/{len(alone)}",
        "texts_equal_alone": f"{sum(together[n] == t for n, t in alone.items())}/{len(alone)}",
        "repeatable": together == again,
        "median_step_ms": round(1000 * statistics.median(seconds[-24:]), 2),
        "ok": ok and engine.integrity_report() == "",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--no-large", action="store_true")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here: torch.cuda.is_available() is false; nothing was checked", file=sys.stderr)
        sys.exit(2)
    report: list[dict[str, Any]] = [{"device": torch.cuda.get_device_name(), "torch": torch.__version__}]
    for check in (check_tiny, *(() if args.no_large else (check_large,))):
        with tempfile.TemporaryDirectory() as folder:
            report.append(check(Path(folder)))
        print(json.dumps(report[-1]), flush=True)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))
    sys.exit(0 if all(row.get("ok", True) for row in report) else 1)


if __name__ == "__main__":
    main()
