"""Benchmark of a CPU worker's start, from its imports to ready.

    python benchmarks/startup.py MODEL_DIR [--quantize int4] [--rounds 3]
    python benchmarks/startup.py --layers 32 --hidden 3072          # a random Llama of this shape, made in /tmp

Files are in the page cache. A round is a process of its own: its imports, then `build_engine`, with the time of each
line of its progress. Beside it stands the floor, measured in the same round: reading the files (a copy out of the page
cache) and packing so many bytes as the kernels do, into fresh memory, with all threads.
Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

CHILD = """
import json, sys, time
start = time.perf_counter()
import torch
from loraplex_server.cli.worker import worker, worker_config
import typer
from loraplex_server.engine.assembly import build_engine
lines = [("imports", time.perf_counter() - start)]
app = typer.Typer(add_completion=False)
app.command()(worker)
given = typer.main.get_command(app).make_context("worker", sys.argv[1:]).params
said = lambda text: lines.append((text, time.perf_counter() - start))
engine = build_engine(worker_config(given["model"], given).engine, said, lambda: None)
said("ready")
engine.close()
print(json.dumps(lines))
"""


# One piece after the other: reads it, then packs it. What is packed stays, as weights do.
FLOOR = """
import json, sys, time
import torch
from loraplex_server.backends.cpu.cores import default_num_threads
from loraplex_server.backends.cpu.native.kernels import NativeKernels
from loraplex_server.backends.cpu.native.library import load
library, status = load()
assert library is not None, status.reason
kernels, num_inputs, packed = NativeKernels(library, default_num_threads()), 1024, []
piece = torch.empty(128 << 20, dtype=torch.uint8).fill_(1)
read_s = pack_s = 0.0
for path in sys.argv[1:]:
    with open(path, "rb", buffering=0) as reader:
        while True:
            start = time.perf_counter()
            num_bytes = reader.readinto(piece.numpy())
            read_s += time.perf_counter() - start
            if not (num_rows := num_bytes // (2 * num_inputs)):
                break
            weight = piece[: 2 * num_rows * num_inputs].view(torch.bfloat16).view(num_rows, num_inputs)
            start = time.perf_counter()
            packed.append(kernels.pack([weight]))
            pack_s += time.perf_counter() - start
print(json.dumps([read_s, pack_s]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=3072)
    parser.add_argument("--quantize", default="none")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or make_model(Path(folder), args.layers, args.hidden)
        flags = [str(model), "--device", "cpu", "--kv-memory", "256MiB", "--quantize", args.quantize]
        files = [*model.glob("*.safetensors")]
        num_bytes = sum(file.stat().st_size for file in files)
        rounds = []
        for _ in range(args.rounds):
            floor = json.loads(run_child(FLOOR, [str(file) for file in files]))
            rounds.append((json.loads(run_child(CHILD, flags)), floor))
    lines, (read_s, pack_s) = min(rounds, key=lambda one: one[0][-1][1])
    floor_s = read_s + pack_s
    ready_s, imports_s = lines[-1][1], lines[0][1]
    print(
        json.dumps(
            {
                "model": args.model.name if args.model else f"random, {args.layers} layers, {args.hidden} wide",
                "gigabytes": round(num_bytes / 1e9, 2),
                "quantize": args.quantize,
                "floor_s": [round(read_s, 2), round(pack_s, 2)],
                "ready_s": round(ready_s, 2),
                "median_ready_s": round(statistics.median(one[0][-1][1] for one in rounds), 2),
                "median_floor_s": round(statistics.median(sum(one[1]) for one in rounds), 2),
                "of_floor": round(ready_s / floor_s, 2),
                "of_floor_without_imports": round((ready_s - imports_s) / floor_s, 2),
                "lines": [(text, round(seconds, 2)) for text, seconds in lines],
            }
        )
    )


def run_child(code: str, arguments: list[str]) -> str:
    """The last line that it prints."""
    done = subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.splitlines()[-1]


def make_model(folder: Path, num_layers: int, hidden_size: int) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=hidden_size, num_hidden_layers=num_layers, intermediate_size=hidden_size * 8 // 3 // 32 * 32,
        num_attention_heads=hidden_size // 128, num_key_value_heads=max(1, hidden_size // 384), head_dim=128,
        vocab_size=32000, tie_word_embeddings=True, dtype="bfloat16",
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0) if "norm" in name else parameter.normal_(0.0, 0.02)
    model.tie_weights()
    # Rotary frequencies are no parameters: the model that is loaded makes them from its configuration.
    model.save_pretrained(folder, max_shard_size="20GB")
    return folder


if __name__ == "__main__":
    main()
