"""Generator of docs/models.md from the tables of the test suite.

python scripts/models_page.py    # after a change to tests/support/zoo.py or tests/support/native_models.py
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/models.md"
sys.path.insert(0, str(ROOT / "tests"))

from support.native_models import NOT_STACKED, STACKED  # noqa: E402
from support.zoo import LORA_FAMILIES, ZOO  # noqa: E402
from transformers import PreTrainedConfig  # noqa: E402

INTRODUCTION = """\
# Supported models

Loraplex runs the modelling code of Transformers (`docs/adr/0001-transformers-as-the-model-zoo.md`), so every
decoder-only architecture with pluggable attention may work. When a model is loaded it is compared with Transformers,
and refused as UNSUPPORTED_MODEL if it computes something else. The families below are in the test suite, as small
models with random weights.

- **Text**: batched and chunked output equals the family's own `generate()` in float64, both with the linears and norms
  of a CPU and with the merged linears and fused norms of CUDA (`tests/parity/test_model_matrix.py`).
- **LoRA**: `vs PEFT` where a mixed batch of adapters is compared with PEFT (`tests/parity/test_lora.py`). The other
  families' linears are replaced in the same way; no test of their own compares their adapters with PEFT.
- **Native CPU path**: `decoder` where all layers are one call into the native kernels, `linears` where Transformers'
  layers run with native linears, LoRA and attention. Both are compared with Transformers
  (`tests/parity/test_native.py`). `decided at load` where no test names the family: the same check decides when it is
  loaded.

This page is made by `python scripts/models_page.py` from the tables of those tests.

| family | architecture | what is special | text | LoRA | native CPU path |
|---|---|---|---|---|---|
"""


def special_features(config: PreTrainedConfig) -> str:
    """Features of the tested configuration that a plain Llama lacks."""
    found = {
        "sliding window": getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True),
        "experts": any(
            getattr(config, name, None) for name in ("num_local_experts", "num_experts", "n_routed_experts")
        ),
        "capped scores": getattr(config, "attn_logit_softcapping", None),
        "latent attention": getattr(config, "kv_lora_rank", None),
        "attention temperature": getattr(config, "attn_temperature_tuning", None),
    }
    return ", ".join(name for name, has_it in found.items() if has_it)


def page() -> str:
    """The whole page, from the tables that the tests are parametrized by."""
    rows: list[str] = []
    for family, make_config in sorted(ZOO.items()):
        config = make_config()
        architecture = type(config).__name__.removesuffix("Config").removesuffix("Text")
        lora = "vs PEFT" if family in LORA_FAMILIES else "yes"
        native = "decoder" if family in STACKED else "linears" if family in NOT_STACKED else "decided at load"
        row = (family, architecture, special_features(config), "vs `generate()`", lora, native)
        rows.append("| " + " | ".join(row) + " |")
    return INTRODUCTION + "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
