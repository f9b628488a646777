"""Transformers with PEFT's mixed batches as a system under comparison.

python with_peft.py IN_DIR          in an environment with torch, transformers and peft
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from lines import answer, take_stdout


class PeftSystem:
    """Owns the model. Adapters are added when a workload first needs them."""

    def __init__(self, inputs: Path) -> None:
        self._inputs = inputs
        self._adapters = sorted((inputs / "adapters").iterdir())
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(inputs / "model", dtype=torch.bfloat16)
        self._model.eval()

    def prepare(self, workload: str) -> Callable[[], int]:
        rows = json.loads((self._inputs / "workloads" / f"{workload}.json").read_text())
        owners = [None if row["adapter"] is None else self._adapters[row["adapter"]] for row in rows]
        for path in sorted({owner for owner in owners if owner is not None}):
            self._add(path)
        extra: dict[str, Any] = {}
        if isinstance(self._model, peft.PeftModel):
            extra["adapter_names"] = ["__base__" if owner is None else owner.name for owner in owners]
        prompts = torch.tensor([row["prompt_ids"] for row in rows])  # [num_requests, num_prompt_tokens]
        num_new = rows[0]["max_tokens"]
        draws = {name: value for name, value in rows[0].get("sampling", {}).items() if name != "seed"}

        def run() -> int:
            with torch.inference_mode():
                texts = self._model.generate(
                    input_ids=prompts,
                    attention_mask=torch.ones_like(prompts),
                    do_sample=bool(draws),
                    min_new_tokens=num_new,
                    max_new_tokens=num_new,
                    **extra,
                    **draws,
                )
            return (texts.shape[1] - prompts.shape[1]) * len(rows)

        return run

    def _add(self, path: Path) -> None:
        if not isinstance(self._model, peft.PeftModel):
            self._model = peft.PeftModel.from_pretrained(self._model, path, adapter_name=path.name)
        elif path.name not in self._model.peft_config:
            self._model.load_adapter(path, adapter_name=path.name)
        else:
            return
        self._model = self._model.to(torch.bfloat16).eval()  # PEFT adds adapters in float32


def main() -> None:
    replies = take_stdout()
    system = PeftSystem(Path(sys.argv[1]))
    versions = {"peft": peft.__version__, "transformers": transformers.__version__, "torch": str(torch.__version__)}
    answer(system.prepare, versions, replies)


if __name__ == "__main__":
    main()
