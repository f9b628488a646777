"""Generator of docs/models.md from the tables of the test suite.

python scripts/models_page.py    # after a change to its tables in tests/support
"""

from __future__ import annotations

import sys
from pathlib import Path
from textwrap import fill

import torch

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/models.md"
sys.path.insert(0, str(ROOT / "tests"))

from support.multimodal import FAMILIES, MORE, multimodal_config  # noqa: E402
from support.native_models import NOT_STACKED, OWN_MIXERS, STACKED  # noqa: E402
from support.sweep import AS_DECODERS, REASONS, REFUSED, SERVED_SINCE  # noqa: E402
from support.zoo import HYBRIDS, LORA_FAMILIES, SINKS, ZOO  # noqa: E402
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig  # noqa: E402

from loraplex_server.model.language import absent_parts, make_language_model  # noqa: E402

INTRODUCTION = """\
# Supported models

Loraplex runs the modelling code of Transformers (`docs/adr/0001-transformers-as-the-model-zoo.md`), so every
decoder-only architecture with pluggable attention may work. When a model is loaded it is compared with Transformers,
and refused as UNSUPPORTED_MODEL if it computes something else. The families below are in the test suite, as small
models with random weights.

- **Text**: batched and chunked output equals the family's own `generate()` in float64, both with the linears and norms
  of a CPU and with the merged linears and fused norms of CUDA (`tests/parity/test_model_matrix.py`).
- **In mixed batches**: the base model, a LoRA of rank 4 on all linears and one of rank 13 on the head, in batches
  that are short of KV blocks: prompts in chunks, prefix hits, preemption, n=2, each without speculation and with prompt
  lookup, Medusa heads and two draft models; every text equals PEFT's in float64
  (`tests/parity/test_mixed_batches_attention.py`).
- **More LoRAs**: `vs PEFT` where a mixed batch of six more kinds is compared with PEFT (other ranks and targets,
  embeddings, rsLoRA, patterns), and one with DoRA, biases and saved modules (`tests/parity/test_lora.py`). The other
  families' linears are replaced in the same way.
- **Native CPU path**: `decoder` where all layers are one call into the native kernels (or each run of layers that turn
  positions in the same way is one, or each layer with an input of its own), `around mixers` where attention, or what is
  in its place, is Transformers' own module and a call goes from each to the next, `linears` where Transformers' layers
  run with native linears, experts, norms, LoRA and attention. All are compared with Transformers
  (`tests/parity/test_native.py`). `decided at load` where no test names the family: the same check decides when it is
  loaded.

Rotary embeddings of some models depend on a text's length: `longrope` has other frequencies for texts longer than
`original_max_position_embeddings`, and dynamic NTK others for each length beyond `max_position_embeddings` (by default
the context is that times `factor`). Each token is scaled by its own request's length, as `generate()` for that request
alone does it. Phi-3's `generate()` computes a text again when it grows past that length, so the server does too, once
for each such text. Blocks of the prefix cache are shared where their keys are equal. Steps of these models run without
CUDA graphs.

The context is `max_position_embeddings`. With yarn it is `original_max_position_embeddings` times `factor` where that
is more. With a linear factor `--max-context` may ask for as much as the limit times the factor, which many
configurations have in their limit already.

A window or a chunk of a single token is computed as the model's masks say. `generate()` computes something else there:
its cache then keeps all tokens.

BLOOM, Falcon and MPT compute attention in code of their own. Their modules' projections stay, and what lies between
them is computed like that of other families; the self-test compares it with that code when they are loaded. Biases by
the position of the key (ALiBi) are the family's own numbers, rounded as it rounds them.

gpt-oss has its experts in MXFP4. They are served dequantised, in bfloat16 or what `--dtype` says, so the weights take
about four times the memory of the files (20B: 42 GB); the log says how much before they are read.

This page is made by `python scripts/models_page.py` from the tables of those tests.

| family | architecture | what is special | text | in mixed batches | more LoRAs | native CPU path |
|---|---|---|---|---|---|---|
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
        "rotations by length": getattr(config, "rope_parameters", {}).get("rope_type") in ("dynamic", "longrope"),
        "shared keys and values": getattr(config, "num_kv_shared_layers", None),
        "attention sinks": config.model_type in SINKS,
        "chunked attention": "chunked_attention" in (getattr(config, "layer_types", None) or ()),
        "biases by key": config.model_type in ("bloom", "mpt") or getattr(config, "alibi", False),
        "attention temperature": getattr(config, "attn_temperature_tuning", None),
    }
    return ", ".join(name for name, has_it in found.items() if has_it)


HYBRIDS_INTRODUCTION = """
## Families with recurrent or convolution states

Layers of these families keep a state of fixed size for each sequence, beside KV blocks or instead of them
(`docs/adr/0016-states-beside-pages.md`). Each family is compared with the whole text computed by Transformers, with its
recurrences in float64 and without a cache (some families continue wrongly from one), and with PEFT:

- **Text**: packed rows, prompts in chunks of odd lengths, right and wrong drafts, logits within 1e-4 as norms and
  routers compute in float32 (`tests/parity/test_hybrids.py`).
- **In mixed batches**: as above, with the linears inside mixers too, and short of state slots as well
  (`tests/parity/test_mixed_batches_states.py`).

PEFT itself refuses `out_proj` in some of these, and a LoRA on `dt_proj` (Mamba, Jamba) or `conv1d` changes nothing
there: mixers read these weights directly. Such an adapter is refused by name.

| family | architecture | layers | what is special | states of a sequence | text | in mixed batches |
|---|---|---|---|---|---|---|
"""
NOT_SERVED = """
Not served, of those with states: RecurrentGemma and Zaya (their recurrence is inside the layer's own code, and in none
of the functions that families share), RWKV and xLSTM (their layers know nothing of Transformers' attention interface).
Each is refused with that reason. Beside them, a model with states runs without CUDA graphs. On CPUs all layers of
Qwen 3.5, Bamba and Granite 4 are one native call; with experts, and in Qwen3-Next, calls go from experts to experts, a
shared one among them, and from recurrence to recurrence in Kimi Linear, LFM2, and Jamba without experts. Others' layers
run one operation at a time, with native linears, norms and recurrences.
"""


NATIVE_PATH = {
    **dict.fromkeys(STACKED, "decoder"),
    **dict.fromkeys(OWN_MIXERS, "around mixers"),
    **dict.fromkeys(NOT_STACKED, "linears"),
}
# What a family's modelling module has, by the name there.
MIXERS = {
    "causal_conv1d_fn": "convolution",
    "torch_chunk_gated_delta_rule": "gated delta rule",
    "chunk_kimi_delta_attention": "delta rule with a gate for each channel",
    "mamba2_chunk_scan": "Mamba-2",
    "mamba_selective_scan": "Mamba-1",
    "MiniMaxLightningAttention": "lightning attention",
}


def states_of(config: PreTrainedConfig) -> str:
    """The states that a family's mixers keep."""
    known = vars(sys.modules[MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__module__])
    return ", ".join(kind for name, kind in MIXERS.items() if name in known)


def hybrid_rows() -> str:
    """The table of families with states."""
    lines: list[str] = []
    for family, make_config in sorted(HYBRIDS.items()):
        config = make_config()
        architecture = type(config).__name__.removesuffix("Config").removesuffix("Text")
        kinds: list[str] = getattr(config, "layer_types", None) or ["linear_attention"]
        layers = ", ".join(dict.fromkeys(kind.replace("_", " ") for kind in kinds))
        row = (family, architecture, layers, special_features(config), states_of(config), "vs Transformers", "vs PEFT")
        lines.append("| " + " | ".join(row) + " |")
    return HYBRIDS_INTRODUCTION + "\n".join(lines) + "\n" + NOT_SERVED


TEXTS_INTRODUCTION = """
## Texts of checkpoints with parts for images or audio

Of such a checkpoint only the language model is loaded: weights of towers and projectors are not read from the files.
The class is Transformers' for the whole checkpoint, or the one for its texts where Transformers has it, so weights are
renamed as there, and positions are those of texts (M-RoPE). Any family of Transformers' multimodal models is loaded so;
those below are in the test suite, in float64 against the whole model's `generate()` and against PEFT of the whole model
(`tests/parity/test_multimodal.py`), and in mixed batches as above (`tests/parity/test_mixed_batches_multimodal.py`).

- Adapters fit that were trained on the whole model or on its texts alone: `model.language_model.layers`, Transformers
  4's `language_model.model.layers` and `model.layers` are one and the same. An adapter with weights for images or audio
  is refused (`docs/adapters.md`).
- An image, a sound or a file in a message is refused by its type.
- Of Qwen's Omni models, which speak as well, the thinker is served. Adapters fit that were trained on the thinker or on
  the whole model (`thinker.model.layers`).
- BLIP-2, InstructBLIP, Kosmos-2 and IDEFICS take no text without an image, and are refused with that reason.

| family | architecture | class | not loaded | text | LoRA | in mixed batches |
|---|---|---|---|---|---|---|
"""
MORE_TEXTS = "A nightly test compares the texts of more families with the whole model's: "
REFUSALS_INTRODUCTION = """
## Refusals

`loraplex doctor --model DIR` says without the weights whether a model would be served, with which kernels and on which
modules adapters may be, or why not. What the configuration tells, and the tokenizer of a folder, is refused as it is at
loading; then a tiny copy with random weights goes the whole way of loading. It exits with 0 for a model that would be
served, 1 for one that is refused, 2 for a wrong command line and 3 where only loading can tell. An id of the Hub is
asked for its configuration.

Every causal language model of Transformers is swept over, as a tiny model with random weights
(`tests/parity/test_sweep.py`): it equals `generate()` on texts that cross windows, chunks and the lengths at which
rotations are scaled, or is refused with one of these sentences. A model whose files lack weights, or have them in other
shapes than its configuration says, is refused as well.

| the sentence says | families |
|---|---|
"""
# Short form of the sentence of each reason.
REFUSALS = {
    "encoder-decoder": "it is an encoder-decoder model",
    "own attention": "its attention does not use Transformers' attention interface",
    "own layers": "some of its layers do not go through Transformers' attention interface",
    "own state": "its layers keep a state that is computed by no known function",
    "kind of layers": "its layers are of a kind that is not known (indexed attention, say)",
    "later tokens": "it attends to later tokens",
    "another's keys": "its layers take the keys and values of another model",
    "attention term": "its attention has a term that paged attention does not compute",
    "own masks": "it builds attention masks of its own",
    "two calls": "an attention layer runs several times per token",
    "own positions": "it counts positions by itself, whatever those of a step's tokens are",
    "first position": "it does not count positions from 0 on",
    "not one row": "its attention does not see a step's tokens as one row",
    "no language model": "Transformers has no class for it that generates text from text",
    "a language to choose": "a trial run raised an error: its language is to be chosen first",
}


def text_rows() -> str:
    """The table of checkpoints with parts for images or audio."""
    lines: list[str] = []
    for family in sorted(FAMILIES):
        config = multimodal_config(family)
        architecture = type(config).__name__.removesuffix("Config")
        with torch.device("meta"):
            model = make_language_model(config)
        parts = ", ".join(f"`{path}`" for path in absent_parts(model)) or "all but the text's"
        row = (family, architecture, f"`{type(model).__name__}`", parts, "vs `generate()`", "vs PEFT", "vs PEFT")
        lines.append("| " + " | ".join(row) + " |")
    more = fill(MORE_TEXTS + ", ".join(MORE) + ".", width=120, break_on_hyphens=False)
    return TEXTS_INTRODUCTION + "\n".join(lines) + f"\n\n{more}\n"


def _until(family: str) -> str:
    return f" (before Transformers {SERVED_SINCE[family]})" if family in SERVED_SINCE else ""


def refusal_rows() -> str:
    """The table of refusals. Families that are made for other ends come as decoders (`is_decoder`) too."""
    lines: list[str] = []
    for reason in REASONS:
        own = [family for family, found in sorted(REFUSED.items()) if found == reason]
        decoders = [family for family, found in sorted(AS_DECODERS.items()) if found == reason and family not in own]
        names = [f"{family}{_until(family)}" for family in own]
        names += [f"{family} (as a decoder)" for family in decoders]
        if names:
            lines.append(f"| {REFUSALS[reason]} | {', '.join(names)} |")
    return REFUSALS_INTRODUCTION + "\n".join(lines) + "\n"


def page() -> str:
    """The whole page, from the tables that the tests are parametrized by."""
    rows: list[str] = []
    for family, make_config in sorted(ZOO.items()):
        config = make_config()
        architecture = type(config).__name__.removesuffix("Config").removesuffix("Text")
        lora = "vs PEFT" if family in LORA_FAMILIES else ""
        native = NATIVE_PATH.get(family, "decided at load")
        row = (family, architecture, special_features(config), "vs `generate()`", "vs PEFT", lora, native)
        rows.append("| " + " | ".join(row) + " |")
    return INTRODUCTION + "\n".join(rows) + "\n" + hybrid_rows() + text_rows() + refusal_rows()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
