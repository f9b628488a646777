"""Files of an adapter: names, and detection of its kind.

The files decide what kind of adapter it is; names and requests do not. Templates beside an adapter are read only where
they are wanted; of a tokenizer only the added tokens, to compare them with the base model's.
"""

from __future__ import annotations

from collections.abc import Collection

from loraplex_adapters.io.source_files import AdapterFiles, parse_object, read_all, read_json_header
from loraplex_contracts.errors import AdapterInvalid, UnsafeFormat

MAX_CONFIG_BYTES = 1 << 20
MAX_BASE_CHARS = 256  # of a base model's name, for people to read
CONFIG_NAME = "adapter_config.json"
MODEL_CONFIG_NAME = "config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
MEDUSA_WEIGHTS_NAME = "medusa_lm_head.safetensors"
MODEL_WEIGHTS_NAME = "model.safetensors"
MODEL_INDEX_NAME = "model.safetensors.index.json"
POOLING_NAME = "1_Pooling/config.json"  # of sentence-transformers, in a folder of its own
MODEL_PICKLE_NAME = "pytorch_model.bin"
LORA_PICKLE_NAMES = (
    "adapter_model.bin", "adapter_model.pt", "adapter_model.pth", "adapter_model.pkl", MODEL_PICKLE_NAME,
)  # fmt: skip
MEDUSA_PICKLE_NAMES = ("medusa_lm_head.pt", "medusa_lm_head.bin", "medusa_lm_head.pth")
PICKLE_NAMES = (*LORA_PICKLE_NAMES, *MEDUSA_PICKLE_NAMES)
# The files that make a folder an adapter.
ADAPTER_NAMES = (CONFIG_NAME, WEIGHTS_NAME, MEDUSA_WEIGHTS_NAME)
# Every file that serving may want, a whole model's apart. A source need not fetch others.
TOKENIZER_NAME = "tokenizer.json"
ADDED_TOKENS_NAME = "added_tokens.json"  # of tokenizers in Python alone
WANTED_NAMES = (*ADAPTER_NAMES, MODEL_CONFIG_NAME, POOLING_NAME, TOKENIZER_NAME, ADDED_TOKENS_NAME)
TEMPLATE_NAMES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")  # the first one counts


def detect_kind(names: Collection[str]) -> str:
    """The kind of an adapter's files: 'lora', 'medusa' or 'combined', or 'model' for the layout of a whole model, which
    vLLM's heads have too. Raises UnsafeFormat or AdapterInvalid."""
    has_lora, has_heads = WEIGHTS_NAME in names, MEDUSA_WEIGHTS_NAME in names
    if has_lora and CONFIG_NAME not in names:
        raise AdapterInvalid(f"there is no {CONFIG_NAME} beside {WEIGHTS_NAME}")
    if has_lora or has_heads:
        return "combined" if has_lora and has_heads else "lora" if has_lora else "medusa"
    if has_model_layout(names):
        return "model"
    for name in PICKLE_NAMES:
        if name in names:
            raise UnsafeFormat(
                f"{name} is a pickle, which can run code when it is read; `loraplex adapters convert DIR --out DIR` "
                "makes safetensors of it without running any"
            )
    other = min((name for name in names if name.endswith((".safetensors", ".safetensors.index.json"))), default="")
    beside = f"; {other[:80]!a} is not a name that PEFT gives an adapter's tensors" if other else ""
    raise AdapterInvalid(
        f"there is no {WEIGHTS_NAME} and no {MEDUSA_WEIGHTS_NAME}{beside}; save a LoRA with PEFT's save_pretrained"
    )


def check_files(files: AdapterFiles) -> None:
    """Raises AdapterInvalid or UnsafeFormat for files that are an adapter of no model at all, by their names,
    configurations and headers. What only loading finds out passes. Imports no torch."""
    detect_kind(files.names)
    for name in files.names.intersection((CONFIG_NAME, MODEL_CONFIG_NAME)):
        parse_object(read_all(files.open(name), MAX_CONFIG_BYTES), name, MAX_CONFIG_BYTES)
    for name in files.names.intersection((WEIGHTS_NAME, MEDUSA_WEIGHTS_NAME)):
        read_json_header(files.open(name))


def has_model_layout(names: Collection[str]) -> bool:
    """True if the files have Transformers' layout of a whole model: the base model's, or vLLM's heads."""
    return MODEL_CONFIG_NAME in names and (MODEL_WEIGHTS_NAME in names or MODEL_INDEX_NAME in names)


def ignored_template(names: Collection[str]) -> str | None:
    """The file that carries a chat template of the adapter's own, if there is one; for a warning."""
    return next((name for name in TEMPLATE_NAMES if name in names), None)
