"""Sweep over the causal families of Transformers, as tiny models."""

from __future__ import annotations

import copy
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
import transformers
from packaging.version import Version
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from loraplex_contracts.errors import UnsupportedModel
from loraplex_server.model.language import make_language_model
from loraplex_server.model.loader import adopt_model
from loraplex_server.model.refusals import refuse_class, refuse_config
from loraplex_server.model.tiny import VOCAB_SIZE, Fields, tiny_config
from support.dense import greedy
from support.driver import Job, make_rig, random_prompts
from support.exact_states import exact, whole_text_greedy

NUM_TOKENS = 10
LONGEST = 60
FAMILIES: Final = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
PROPERTY = "sweep"

# Lengths that texts of LONGEST tokens cross.
_LENGTHS = (
    (r"max_(position_embeddings|seq_len|target_positions|source_positions)|n_positions|n_ctx|context_length", 128),
    (r"model_max_length", 128),
    (r"sliding_window(_size)?|attention_window_size|local_attention|window_size|keep_window_size", 6),
    (r"local_attention_window_len", 6),
    (r"attention_chunk_size|floor_scale|log_scaling_n_floor|index_topk", 8),
    (r"(mamba_)?chunk_size", 16),
    (r"original_max_position_embeddings", 32),
)
_PER_LAYER = ("hidden_size_per_layer_input", "vocab_size_per_layer_input")
_ROUTED = {"num_experts_per_tok": 2, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}
_MIXED = ["linear_attention", "hybrid", "linear_attention", "hybrid"]
# What the defaults of some families lack.
OVERRIDES: Final[Mapping[str, Fields]] = {
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 8, "clip_qkv": 8.0}},
    "deepseek_v2": _ROUTED,
    "dots1": _ROUTED,
    "gemma4_assistant": {"text_config": {"model_type": "gemma4_text", **dict.fromkeys(_PER_LAYER, 0)}},
    "hunyuan_v1_dense": {"head_dim": 64},
    "hunyuan_v1_moe": {"head_dim": 64, "num_experts": 4, "moe_topk": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "ministral": {"head_dim": 64},
    "nemotron": {"head_dim": 64, "num_key_value_heads": 8},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": _MIXED},
    "zamba2": {"num_hidden_layers": 4, "layers_block_type": _MIXED, "hybrid_layer_ids": [1, 3]},
}
# Sentences of refusals, by a name for the table.
REASONS: Final[Mapping[str, str]] = {
    "encoder-decoder": r"it is an encoder-decoder model; only decoders are served$",
    "own attention": r"its attention( \(.*\))? does not use Transformers' attention interface$",
    "own layers": r"\d+ of its \d+ layers go through Transformers' attention interface",
    "own state": r"\d+ of its \d+ layers that keep a state \(in .*\) compute it with a function that is known",
    "kind of layers": r"its layers of type .* are of a kind that is not known$",
    "later tokens": r"(it attends to|its attention uses) later tokens$",
    "another's keys": r"its layers take the keys and values of another model$",
    "own masks": r"it builds attention masks of its own$",
    "two calls": r"an attention layer runs several times per token$",
    "own positions": r"it counts positions by itself",
    "first position": r"it does not count positions from 0 on",
    "not one row": r"its attention does not see the step's tokens as one row$",
    "no language model": r"Transformers has no class for it that generates text from text$",
    "a language to choose": r"a trial run raised ValueError: Input language unknown",
}


def by_family(names: Mapping[str, str]) -> dict[str, str]:
    """Outcomes by family, from the families of each outcome, with spaces between them."""
    return {family: outcome for outcome, families in names.items() for family in families.split()}


# Which sentence refuses which family; all others are served.
REFUSED: Final[Mapping[str, str]] = by_family(
    {
        "kind of layers": (
            "axk2 deepseek_v32 deepseek_v4 dots3_note dots3_note_text glm_moe_dsa hy_v4 inkling2_loop_text "
            "inkling2_text inkling_text qwen4_exp qwen4_exp_text"
        ),
        "encoder-decoder": (
            "bart bigbird_pegasus blenderbot blenderbot-small marian mbart musicgen musicgen_melody mvp "
            "pegasus plbart prophetnet whisper"
        ),
        "later tokens": (
            "bert bert-generation camembert data2vec-text electra ernie "
            "roberta roberta-prelayernorm roc_bert xlm-roberta xlm-roberta-xl"
        ),
        "own attention": (
            "big_bird codegen cpmant gpt_neo gpt_neox_japanese gptj megatron-bert openai-gpt reformer rembert "
            "roformer rwkv trocr xglm xlm xlnet"
        ),
        "not one row": "blt",
        "two calls": "diffllama dory hrm_text",
        "own masks": "doge",
        "another's keys": "gemma4_assistant gemma4_unified_assistant",
        "own layers": "git mllama xlstm",
        "own state": "recurrent_gemma zaya",
        "a language to choose": "xmod",
    }
)
# Some of these are served since a release of Transformers.
SERVED_SINCE: Final[Mapping[str, str]] = {"codegen": "5.24", "gptj": "5.24"}
# Decoders of families that are made for other ends, with `is_decoder` or without their encoder.
AS_DECODERS: Final[Mapping[str, str]] = by_family(
    {
        "own positions": "bart bigbird_pegasus blenderbot blenderbot-small marian mbart pegasus plbart",
        "own attention": "big_bird megatron-bert mvp prophetnet rembert roformer trocr",
        "first position": ("camembert data2vec-text roberta roberta-prelayernorm xlm-roberta xlm-roberta-xl"),
        "a language to choose": "xmod",
        "served": "bert bert-generation electra ernie roc_bert whisper",
    }
)
# Where `generate()` is not what Transformers computes for the text without a cache, the latter counts.
WHOLE_TEXT: Final[Mapping[str, str]] = {
    "moshi": "its cache keeps a window that its masks do not have",
    "phi4_multimodal": "it drops its cache at original_max_position_embeddings, and goes on without the text before",
    **dict.fromkeys(("bamba", "granitemoehybrid"), "its cache counts no tokens where layer 0 keeps a state"),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one family: served, or the name of its refusal."""

    family: str
    what: str
    sentence: str = ""


def expected(family: str) -> str:
    """The outcome with the Transformers that is installed."""
    since = SERVED_SINCE.get(family)
    is_served = since is not None and Version(transformers.__version__) >= Version(since)
    return "served" if is_served else REFUSED.get(family, "served")


def shorten(fields: Fields) -> None:
    """Lengths that the texts cross, and weights that make texts of several tokens."""
    for name, value in fields.items():
        if isinstance(value, dict) and not name.endswith("_config") and "model_type" not in value:
            shorten(value)
        elif isinstance(value, int) and not isinstance(value, bool) and value > 0:
            longest = next((length for pattern, length in _LENGTHS if re.fullmatch(pattern, name)), value)
            fields[name] = min(value, longest)
        elif name in ("initializer_range", "init_std") and isinstance(value, float):
            fields[name] = 0.3


def as_decoder(fields: Fields) -> None:
    """The family's decoder, as it generates text without an encoder."""
    shorten(fields)
    fields.update({name: name == "is_decoder" for name in ("is_decoder", "is_encoder_decoder") if name in fields})


def default_config(family: str) -> PreTrainedConfig:
    changes: Any = copy.deepcopy(dict(OVERRIDES.get(family, {})))
    return CONFIG_MAPPING[family](**changes)


def make_model(config: PreTrainedConfig, seed: int = 3) -> PreTrainedModel:
    """A model in float64 with random weights."""
    torch.manual_seed(seed)
    model = make_language_model(copy.deepcopy(config), dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.set_experts_implementation("eager")
    generation: Any = model.generation_config
    generation.eos_token_id = generation.forced_eos_token_id = generation.forced_bos_token_id = None
    generation.pad_token_id = 0
    return model.eval()


def sweep(family: str, amend: Callable[[Fields], None] = shorten) -> Outcome:
    """Serves a tiny model and compares it with Transformers. Raises what is neither equality nor a refusal."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Transformers' own, of odd configurations
        try:
            _check(family, amend)
        except UnsupportedModel as error:
            found = (name for name, sentence in REASONS.items() if re.search(sentence, error.message))
            return Outcome(family, next(found, "a sentence that is not known"), error.message)
    return Outcome(family, "served")


def _check(family: str, amend: Callable[[Fields], None]) -> None:
    config = default_config(family)
    if amend is shorten:
        refuse_config(config, family)
    config = tiny_config(config, amend=amend)
    refuse_config(config, family)
    refuse_class(config, family)
    model = make_model(config)
    loaded = adopt_model(copy.deepcopy(model), model_id=family)
    prompts = random_prompts(3, VOCAB_SIZE, seed=3, longest=LONGEST)
    prompts += [(prompts[1] * LONGEST)[:LONGEST], (prompts[2] * LONGEST)[:27]]
    rig = make_rig(loaded, seed=3, max_chunk=11)
    jobs = [Job(prompt, NUM_TOKENS) for prompt in prompts]
    rig.run(jobs)
    for job in jobs:
        if job.error is not None:
            raise job.error
    generate = whole_text_greedy if family in WHOLE_TEXT else greedy
    assert [job.tokens for job in jobs] == [generate(model, prompt, NUM_TOKENS) for prompt in prompts]
    with torch.inference_mode(), exact(model):
        for job in jobs:
            whole = model(input_ids=torch.tensor([job.all_tokens]), use_cache=False).logits[0]
            torch.testing.assert_close(rig.logits(job), whole[len(job.prompt) - 1 : -1], rtol=1e-4, atol=1e-4)
    ends = torch.stack([rig.logits(job)[0] for job in jobs])
    assert ends.std(0).max() > 1e-3, "a model that says the same of all texts would prove nothing"


def table(outcomes: Iterable[tuple[str, str, str]]) -> str:
    """Families by what became of them, and how many they are."""
    rows = [Outcome(*fields) for fields in outcomes]
    counts = Counter(row.what for row in rows)
    lines = [f"{len(rows)} families: " + ", ".join(f"{what} {count}" for what, count in counts.most_common())]
    lines += [f"{row.family:28}{row.what:22}{row.sentence.partition('served: ')[2]}" for row in rows]
    return "\n".join(lines)
