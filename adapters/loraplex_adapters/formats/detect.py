"""Which kind of adapter a set of files is. The files decide; names and requests do not.

Looks at names only. Templates and tokenizers beside an adapter are never read, let alone executed.
"""

from __future__ import annotations

from collections.abc import Collection

from loraplex_adapters.formats.peft_config import CONFIG_NAME
from loraplex_proto.errors import AdapterInvalid, AdapterUnsupported, UnsafeFormat

WEIGHTS_NAME = "adapter_model.safetensors"
MEDUSA_WEIGHTS_NAME = "medusa_lm_head.safetensors"
PICKLE_NAMES = (
    "adapter_model.bin", "adapter_model.pt", "adapter_model.pth", "adapter_model.pkl", "pytorch_model.bin",
    "medusa_lm_head.pt", "medusa_lm_head.bin",
)  # fmt: skip
# Every file that serving may want. A source need not fetch anything else.
WANTED_NAMES = (CONFIG_NAME, WEIGHTS_NAME)
_TEMPLATES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")


def detect_kind(names: Collection[str]) -> str:
    """'lora', the one kind that is served so far. Raises UnsafeFormat, AdapterUnsupported or AdapterInvalid."""
    if MEDUSA_WEIGHTS_NAME in names:
        raise AdapterUnsupported(f"{MEDUSA_WEIGHTS_NAME}: Medusa heads are not served yet")
    if WEIGHTS_NAME not in names:
        for name in PICKLE_NAMES:
            if name in names:
                raise UnsafeFormat(
                    f"{name} is a pickle, which can run code when it is read; save the weights as {WEIGHTS_NAME} "
                    "(PEFT: save_pretrained(..., safe_serialization=True))"
                )
        raise AdapterInvalid(f"there is no {WEIGHTS_NAME}; save the adapter with PEFT's save_pretrained")
    if CONFIG_NAME not in names:
        raise AdapterInvalid(f"there is no {CONFIG_NAME} beside {WEIGHTS_NAME}")
    return "lora"


def ignored_template(names: Collection[str]) -> str | None:
    """The file that carries a chat template of the adapter's own, if there is one; for a warning."""
    return next((name for name in _TEMPLATES if name in names), None)
