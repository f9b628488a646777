"""Table of adapters that tests compare with PEFT: formats, families and settings.

Tests are parametrized by it, and `python scripts/adapters_page.py` writes it into docs/adapters.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from peft import BOFTConfig, IA3Config, LoHaConfig, LoKrConfig, LoraConfig, OFTConfig, PeftConfig, VeraConfig
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from support.peft_files import RICH_SPECS, SPECS, linear_names
from support.world import byte_tokenizer
from support.zoo import LORA_FAMILIES, MIXTURES

SETTINGS = ("alone", "in a mixed batch", "speculated", "after eviction and reload", "inside a mixture")
INSIDE = SETTINGS[4]
INVOCATION: list[int] = byte_tokenizer().encode(" me")  # in the first of the test's prompts only


@dataclass(frozen=True)
class Names:
    """Last names of a model's modules."""

    linears: list[str]  # some of attention's, and another
    head: str
    embedding: str
    norms: list[str]
    is_conv1d: bool

    @staticmethod
    def of(model: PreTrainedModel) -> Names:
        attention, others, head, embedding = linear_names(model)
        if model.config.model_type in MIXTURES:
            others = []  # PEFT takes their names for the experts' too
        norms = {path.rpartition(".")[2] for path, one in model.named_modules() if "norm" in type(one).__name__.lower()}
        is_conv1d = any(isinstance(module, Conv1D) for module in model.modules())
        return Names([attention[0], attention[-1], *others[:1]], head, embedding, sorted(norms), is_conv1d)


def _lora(rank: int = 4, **fields: Any) -> Callable[[Names], PeftConfig]:
    return lambda names: LoraConfig(r=rank, target_modules=names.linears, fan_in_fan_out=names.is_conv1d, **fields)


def _saved(*which: str) -> Callable[[Names], PeftConfig]:
    return lambda names: LoraConfig(
        r=2,
        target_modules=names.linears,
        fan_in_fan_out=names.is_conv1d,
        modules_to_save=[name for one in which for name in (names.norms if one == "norms" else [getattr(names, one)])],
    )


FORMATS: dict[str, Callable[[Names], PeftConfig]] = {
    "LoRA": _lora(),
    "LoRA, `all-linear`": lambda _: LoraConfig(r=3, target_modules="all-linear"),
    "rsLoRA": _lora(use_rslora=True),
    "DoRA": _lora(use_dora=True),
    "`lora_bias`": _lora(lora_bias=True),
    "`bias: all`": _lora(bias="all"),
    "saved head": _saved("head"),
    "saved embedding": _saved("embedding"),
    "saved norms": _saved("norms"),
    "token rows": _lora(2, trainable_token_indices=[70, 100, 101, 110, 120]),
    "activated LoRA": _lora(task_type="CAUSAL_LM", alora_invocation_tokens=INVOCATION),
    "PiSSA": _lora(init_lora_weights="pissa"),
    "OLoRA": _lora(init_lora_weights="olora"),
    "VeRA": lambda names: VeraConfig(r=8, target_modules=names.linears, fan_in_fan_out=names.is_conv1d),
    "LoHa": lambda names: LoHaConfig(r=2, target_modules=names.linears),
    "LoKr": lambda names: LoKrConfig(r=2, target_modules=names.linears, decompose_factor=4),
    "OFT": lambda names: OFTConfig(oft_block_size=8, target_modules=names.linears),
    "BOFT": lambda names: BOFTConfig(boft_block_size=8, target_modules=names.linears),
    "IA3": lambda names: IA3Config(
        target_modules=names.linears, feedforward_modules=names.linears[2:], fan_in_fan_out=names.is_conv1d
    ),
}
_LINEARS_ONLY = ("OLoRA", "LoHa", "LoKr", "OFT", "BOFT")
# PEFT refuses what else is in FORMATS beside terms on experts, and has "LoRA" on attention alone.
_ON_MIXTURES = ("LoRA", "LoRA, `all-linear`", "DoRA", "activated LoRA")
LIVE: dict[str, tuple[str, ...]] = {
    "llama": tuple(FORMATS),
    "qwen2": tuple(FORMATS),
    "gemma3": tuple(FORMATS),
    "gpt2": tuple(name for name in FORMATS if name not in _LINEARS_ONLY and "all-linear" not in name),
    **dict.fromkeys(
        [name for name in MIXTURES if name not in ("qwen2_moe", "phimoe", "granitemoe", "llama4-experts")], _ON_MIXTURES
    ),
}
# Plain LoRAs, as they are served. The others are refused inside a mixture of adapters.
_PLAIN = ("LoRA", "LoRA, `all-linear`", "rsLoRA")
NOT_SERVED: dict[str, str] = dict.fromkeys(
    ("jetmoe", "gpt_oss"), "all-biases"
)  # a bias of a module that is not a linear
# More of a format than above, in batches without a server: format, families, the test.
IN_BATCHES: list[tuple[str, tuple[str, ...], str]] = [
    *(
        (
            f"`{spec.name}`",
            tuple(family for family in LORA_FAMILIES if NOT_SERVED.get(family) != spec.name),
            "tests/parity/test_lora.py",
        )
        for spec in (*SPECS, *RICH_SPECS)
    ),
    ("PiSSA, OLoRA, and both converted by PEFT", ("llama", "gpt2"), "tests/parity/test_lora.py"),
    ("LoftQ", ("llama", "qwen2"), "tests/parity/test_lora.py"),
    (
        "weights of linears, Conv1D, embeddings and heads as `target_parameters`",
        ("llama", "gpt2"),
        "tests/parity/test_lora.py",
    ),
    ("experts and routers", tuple(MIXTURES), "tests/parity/test_experts.py"),
]


def is_mixable(family: str, name: str) -> bool:
    """True if the adapter can be in a mixture. With `all-linear` most mixtures of experts have terms of their experts,
    which are in no mixture of adapters. Llama's and Gemma's linears have no biases to save."""
    if name == "`bias: all`":
        return family in ("llama", "gemma3")
    return name in _PLAIN and not (family in MIXTURES and family != "gpt_oss" and "all-linear" in name)


def table() -> Iterator[tuple[str, ...]]:
    """Rows: format, families, and what is tested in each of SETTINGS."""
    groups: dict[tuple[str, bool], list[str]] = {}
    for name in FORMATS:
        for family, formats in LIVE.items():
            if name in formats:
                groups.setdefault((name, is_mixable(family, name)), []).append(family)
    for (name, mixable), families in groups.items():
        yield name, ", ".join(families), *["yes"] * 4, "yes" if mixable else "refused"


def passed(cells: Iterable[tuple[str, str, str]]) -> str:
    """Lines of what passed: family, format and setting of each `parity` that tests record as a property."""
    found: dict[tuple[str, str], set[str]] = {}
    for family, name, setting in cells:
        found.setdefault((family, name), set()).add(setting)
    return "\n".join(
        f"{family:16}{name:22}{', '.join(one for one in SETTINGS if one in settings)}"
        for (family, name), settings in found.items()
    )


def markdown() -> str:
    """The table, and a list of what else is compared."""
    head = ("format", "families", *SETTINGS)
    lines = ["| " + " | ".join(row) + " |" for row in (head, ("---",) * len(head), *table())]
    others: dict[tuple[tuple[str, ...], str], list[str]] = {}
    for name, families, test in IN_BATCHES:
        others.setdefault((families, test), []).append(name)
    lines += ["", "In mixed batches without a server, logits too:", "", "| adapters | families | test |"]
    lines.append("| --- | --- | --- |")
    lines += [
        f"| {', '.join(names)} | {', '.join(families)} | `{test}` |" for (families, test), names in others.items()
    ]
    return "\n".join(lines) + "\n"
