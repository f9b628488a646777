"""Checks of `loraplex adapters verify`: a server's own, and a comparison with PEFT.

Runs the checks; the command shows the result.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers.utils.logging import disable_progress_bar

from loraplex_adapters.cache.storage import Storage, check_adapter, import_adapter
from loraplex_adapters.formats.adapter import AdapterPlan
from loraplex_adapters.formats.files import detect_kind
from loraplex_adapters.sources.directory import FolderSource
from loraplex_adapters.store import AdapterStore
from loraplex_adapters.weights import AdapterWeights
from loraplex_contracts.adapters import check_adapter_id
from loraplex_contracts.errors import AdapterUnsupported, InvalidAdapterId, InvalidArgument
from loraplex_server.backends.equivalence import compare
from loraplex_server.config import AdaptersConfig
from loraplex_server.engine.engine import start_of_last
from loraplex_server.model.language import read_config, read_language_model
from loraplex_server.model.loaded_model import LoadedModel
from loraplex_server.model.loader import load_model
from loraplex_server.model.self_test import Text, served_logits

# Sizes of the comparison with PEFT.
NUM_PROMPTS = 3
NUM_PROMPT_TOKENS = 12
NUM_NEW_TOKENS = 16


def verify_adapter(
    folder: Path,
    base: str,
    dtype: str,
    max_rank: int | None,
    progress: Callable[[str], AbstractContextManager[None]],
    *,
    against_peft: bool,
) -> dict[str, Any]:
    """A description of the adapter in `folder`, as plain data. Raises the error that a server would answer with.
    `progress(text)` shows a text while its block runs. `against_peft`: with a comparison with what PEFT computes."""
    name = folder.resolve().name
    source = FolderSource(name, folder)
    with source.open(name) as files:
        detect_kind(files.names)  # before the base model is loaded in vain
    disable_progress_bar()  # it would break the command's own
    with progress(f"loading {base}"):
        model = load_model(base, dtype=dtype, device="cpu")
    targets = model.base_targets(max_rank or AdaptersConfig().max_rank)
    plan = check_adapter(name, source, targets)
    if against_peft:
        _check_comparable(plan)
    with tempfile.TemporaryDirectory(prefix="loraplex-verify-") as scratch, progress(f"reading {name}"):
        store = AdapterStore(Path(scratch), budget_bytes=1 << 50)
        try:
            imported = import_adapter(name, source, targets, store)
            storage = Storage(store, torch.device("cpu"))
            host = storage.stage(imported.key)
            weights = None if host is None else storage.promote(host)
        finally:
            store.close()
    warned = list(plan.warnings)
    if any(path.is_symlink() for path in folder.iterdir()):
        warned.append("has links in it: a server follows only those that stay inside its directory of adapters")
    try:
        check_adapter_id(name)
    except InvalidAdapterId as error:
        warned.append(f"a server would not serve it under this folder's name: {error.message}")
    layout = imported.layout
    report: dict[str, Any] = {
        "valid": True,
        "kind": imported.key.kind,
        "format": _format(plan),
        "base": "" if plan.lora is None else plan.lora.base_model,
        "fits": f"{model.model_id} ({model.model_type})",
        "tasks": _tasks(plan),
        "digest": imported.key.digest,
        "rank": layout.max_rank,
        "modules": len(plan.modules),
        "targets": _last_names(placed.shape.path for placed in layout.factors),
        "saved": _last_names(placed.shape.path for placed in layout.saved),
        "num_bytes": layout.num_bytes,
        "dtype": targets.dtype,
        "warnings": warned,
    }
    if against_peft:
        assert weights is not None, "the store has it"
        with progress(f"comparing {name} with PEFT"):
            report["peft"] = _compared(folder, base, model, weights, layout.invocation)
    return report


def _format(plan: AdapterPlan) -> str:
    found = [] if plan.lora is None else [plan.lora.format]
    if plan.heads is not None:
        found.append(f"Medusa, {plan.heads.shape.num_heads} heads")
    return "; ".join(found)


def _tasks(plan: AdapterPlan) -> list[str]:
    if plan.lora is None:
        return ["drafts"]
    if plan.lora.classifier is None:
        return ["text", *(["drafts"] if plan.heads is not None else [])]
    info = plan.lora.classifier.shape.info
    return [f"classes of {'tokens' if info.per_token else 'texts'}: {', '.join(info.labels)}"]


def _last_names(paths: Any) -> list[str]:
    return sorted({path.rpartition(".")[2] for path in paths})


# --- comparison with PEFT ---------------------------------------------------------------------------------------------


def _check_comparable(plan: AdapterPlan) -> None:
    """Raises InvalidArgument for an adapter that cannot be compared with PEFT's."""
    if plan.lora is None:
        raise InvalidArgument("these are Medusa heads alone, which PEFT does not know", field="--against-peft")
    if plan.lora.classifier is not None:
        raise InvalidArgument("this adapter classifies; texts are what is compared", field="--against-peft")


def _compared(
    folder: Path, base: str, loaded: LoadedModel, weights: AdapterWeights, invocation: tuple[int, ...]
) -> dict[str, Any]:
    """Compares logits of some texts, and the texts themselves, with PEFT's. Raises AdapterUnsupported
    where PEFT cannot load the adapter."""
    prompts = _prompts(loaded.spec.vocab_size, invocation)
    starts = [start_of_last(invocation, prompt) if invocation else 0 for prompt in prompts]
    expected, tokens = _peft_logits(folder, base, loaded.dtype, prompts, starts if invocation else None)
    texts = [
        Text((*prompt, *new), 0, logits, start)
        for prompt, new, logits, start in zip(prompts, tokens, expected, starts, strict=True)
    ]
    slots = loaded.adapter_slots(loaded.backend.lora(max(weights.max_rank, 1)), 1)
    slots.install(0, weights)
    got = served_logits(loaded, texts, slots)
    found = compare("adapted model", torch.cat([text.logits for text in texts]), torch.cat(got))
    differences = [float((text.logits - own).abs().max()) for text, own in zip(texts, got, strict=True)]
    own_tokens = [own[len(prompts[0]) - 1 : -1].argmax(-1).tolist() for own in got]
    return {
        "equal": found.is_equal,
        "largest_difference": max(differences),  # of two logits
        "relative_difference": found.error,
        "same_text": own_tokens == tokens,
        "compared_tokens": NUM_PROMPTS * NUM_NEW_TOKENS,
    }


def _prompts(vocab_size: int, invocation: tuple[int, ...]) -> list[list[int]]:
    """Prompts of equal length. The tokens that activate an adapter are in the middle of all but the last one, which has
    none."""
    found = [[(17 * row + 7 * i + 3) % vocab_size for i in range(NUM_PROMPT_TOKENS)] for row in range(NUM_PROMPTS)]
    if not invocation:
        return found
    return [
        *([*prompt[:6], *invocation, *prompt[6:]] for prompt in found[:-1]),
        [*found[-1], *[found[-1][0]] * len(invocation)],
    ]


def _peft_logits(
    folder: Path, base: str, dtype: torch.dtype, prompts: list[list[int]], starts: list[int | None] | None
) -> tuple[list[Tensor], list[list[int]]]:
    """Logits [num_tokens, num_logits] of each prompt and what PEFT's model writes behind it, and those tokens."""
    config = read_config(base)
    model = read_language_model(base, config, dtype=dtype, trust_remote_code=False, attn_implementation="eager")
    if dtype == torch.float64:
        model.set_experts_implementation("eager")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            peft: Any = PeftModel.from_pretrained(model, str(folder)).eval()
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise AdapterUnsupported(f"PEFT cannot load it, so nothing can be compared: {reason}") from error
    assert isinstance(peft, nn.Module)
    ids, logits = torch.tensor(prompts), torch.empty(0)
    num_prompt_tokens = ids.shape[1]
    with torch.inference_mode():
        for _ in range(NUM_NEW_TOKENS + 1):
            offsets = {}
            if starts is not None:
                offsets["alora_offsets"] = [None if start is None else ids.shape[1] - start for start in starts]
            logits = peft(input_ids=ids, use_cache=False, **offsets).logits
            ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
    return list(logits), ids[:, num_prompt_tokens:-1].tolist()
