"""Report of `loraplex doctor --model`: would it be served, and how?

What a configuration tells is refused as it is when the model is loaded. Then a tiny copy with random weights goes the
whole way of loading: probe, back end, self-test.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal, TypedDict

import torch
from torch import nn
from transformers import PreTrainedConfig

from loraplex_contracts.errors import InvalidArgument, UnsupportedModel
from loraplex_server.backends.backend import Backend
from loraplex_server.backends.registry import attention_kernels, choose_backend
from loraplex_server.layers.attention import AttentionSpec
from loraplex_server.layers.context import StepContext
from loraplex_server.layers.experts import AdaptedRouter, ExpertLinear
from loraplex_server.layers.linear import AdaptedEmbedding, AdaptedHead
from loraplex_server.library_errors import error_line
from loraplex_server.model.language import absent_parts, make_language_model, read_config
from loraplex_server.model.loaded_model import LoadedModel
from loraplex_server.model.loader import DTYPES, adopt_model, dtype_of, reading, reading_files, resolve_device
from loraplex_server.model.medusa_model import served_model
from loraplex_server.model.mixers.install import install_mixers
from loraplex_server.model.mxfp4 import is_mxfp4
from loraplex_server.model.places import reaching_hub
from loraplex_server.model.probe import TRIAL_RAISED
from loraplex_server.model.refusals import refuse_class, refuse_config
from loraplex_server.model.tiny import Widths, tiny_config
from loraplex_server.text.tokenizer import TextTokenizer

Verdict = Literal["served", "refused", "decided at load"]
EXIT_CODES: Final[dict[Verdict, int]] = {"served": 0, "refused": 1, "decided at load": 3}
MAX_HEAD_DIM: Final = 256  # of the tiny copy
_WEIGHT_FILES: Final = ("*.safetensors", "pytorch_model*.bin")


class Answer(TypedDict):
    """The answer whether a model would be served."""

    model: str
    family: str
    verdict: Verdict
    reason: str  # of a verdict other than `served`


class ModelReport(Answer, total=False):
    """The answer, and how a model would be served that is not refused."""

    architecture: str
    parameters: int  # of what is loaded; 0 where it cannot be counted
    bytes: int
    dtype: str
    weights: str
    max_context_tokens: int
    not_loaded: list[str]  # parts for images or audio
    attention: list[str]  # kinds of layers
    attention_kernel: str  # empty where no layer has attention
    mixers: list[str]  # classes of those that keep a state
    layers: str  # how they are computed
    graphs: str
    adapters_on: list[str]  # last names of modules
    notes: list[str]


def examine_model(model: str, *, dtype: str = "auto", device: str = "auto") -> ModelReport:
    """The report on a model. Raises InvalidArgument for a path that is not there, or a bad option."""
    chosen = dtype_of(dtype)
    if model.startswith(("/", ".", "~")) and not Path(model).is_dir():
        raise InvalidArgument(f"{model} is not a directory", field="--model")
    backend = choose_backend(resolve_device(device))
    report = ModelReport(model=model, family="", verdict="refused", reason="")
    try:
        with reaching_hub([(model, None)]), served_model(model, None) as served, reading_files(served.base):
            config = read_config(served.base, served.revision)
        report["family"] = config.model_type
        refuse_config(config, model)
        refuse_class(config, model)
        if Path(served.base).is_dir():
            TextTokenizer.from_pretrained(served.base)  # refused where it cannot be read
        _examine(config, served.base, chosen, backend, report)
    except UnsupportedModel as refusal:
        report["reason"] = refusal.message
        if TRIAL_RAISED in refusal.message:  # perhaps because the copy is so small
            report["verdict"] = "decided at load"
    return report


def _examine(
    config: PreTrainedConfig, folder: str, dtype: torch.dtype | None, backend: Backend, report: ModelReport
) -> None:
    """Completes the report by loading the tiny copy. Raises UnsupportedModel."""
    dtype = dtype or _own_dtype(config)
    try:
        tiny = tiny_config(config, Widths(_head_dim(config)))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = make_language_model(tiny, dtype=dtype)
        report["architecture"] = type(model).__name__
        mixers = {mixer.class_name for mixer in install_mixers(copy.deepcopy(model), StepContext())}
    except Exception as error:  # of a family's own code, for sizes that it was not made for
        report["verdict"] = "decided at load"
        report["reason"] = f"no tiny copy of it can be made to be tried: {error_line(error)}"
        return
    nn.Module.to(model, backend.device)
    with _notes() as notes, reading(report["model"]):
        loaded = adopt_model(model, model_id=report["model"], backend=backend)
    report["verdict"] = "served"
    report["parameters"] = num_parameters = _num_parameters(config)
    report["bytes"] = num_parameters * dtype.itemsize
    report["dtype"] = str(dtype).removeprefix("torch.")
    report["weights"] = _weights(Path(folder))
    report["max_context_tokens"] = loaded.spec.max_context_tokens
    report["not_loaded"] = list(absent_parts(loaded.model))
    report["attention"] = sorted({_describe(spec) for spec in loaded.spec.layers})
    kernels = attention_kernels(backend, loaded.spec.layers, loaded.dtype) if loaded.spec.layers else []
    report["attention_kernel"] = next((one.name for one in kernels if one.usable), "")
    report["mixers"] = sorted(mixers) if loaded.states else []
    report["layers"] = _way(loaded, backend)
    report["graphs"] = _graphs(loaded, backend)
    report["adapters_on"] = _adapted(loaded)
    report["notes"] = notes


def _own_dtype(config: PreTrainedConfig) -> torch.dtype:
    default = torch.bfloat16 if is_mxfp4(config) else torch.float32
    found = next((one.dtype for one in (config, config.get_text_config()) if one.dtype is not None), default)
    return DTYPES[found] if isinstance(found, str) else found


def _head_dim(config: PreTrainedConfig) -> int:
    """The model's own head width, on which the choice of kernels depends, where it is of a common size."""
    text = config.get_text_config()
    fields = text.to_dict()  # attributes of which layers have several may not be asked for
    heads, hidden = (fields.get(text.attribute_map.get(name, name)) for name in ("num_attention_heads", "hidden_size"))
    found = fields.get("head_dim") or (hidden // heads if isinstance(heads, int) and isinstance(hidden, int) else 0)
    return found if isinstance(found, int) and 8 <= found <= MAX_HEAD_DIM and found % 8 == 0 else 64


def _num_parameters(config: PreTrainedConfig) -> int:
    """Number of parameters of the whole model, which is made without memory; 0 where Transformers cannot make it so."""
    try:
        with torch.device("meta"):
            return make_language_model(copy.deepcopy(config)).num_parameters()
    except Exception as error:
        logging.getLogger(__name__).debug("parameters are not counted: %s", error)
        return 0


def _weights(folder: Path) -> str:
    if not folder.is_dir():
        return "on the Hub, not looked at"
    files = {path for pattern in _WEIGHT_FILES for path in folder.glob(pattern)}
    num_bytes = sum(path.stat().st_size for path in files)
    return f"{len(files)} files, {num_bytes / 1e9:.1f} GB" if files else "none in this directory yet"


def _describe(spec: AttentionSpec) -> str:
    reach = {"a window": spec.window, "chunks": spec.chunk}
    parts = [f"{what} of {size} tokens" for what, size in reach.items() if size is not None] or ["full attention"]
    terms = {
        "capped scores": bool(spec.softcap),
        "sinks": spec.sinks is not None,
        "biases by the position of the key (ALiBi)": spec.key_bias is not None,
        "keys and values of different sizes": spec.k_dim != spec.v_dim,
        "keys and values of an earlier layer": spec.source is not None,
    }
    return ", ".join([*parts, *(term for term, has_it in terms.items() if has_it)])


def _way(loaded: LoadedModel, backend: Backend) -> str:
    if loaded.decoder is not None:
        own = dict.fromkeys(call.path for layer in loaded.decoder.weights for call in layer.own_parts)
        parts = " and ".join(f"`{path}`" for path in own)
        return f"native calls around each layer's {parts}" if parts else "all layers in one native call"
    return backend.describe_layers()


def _graphs(loaded: LoadedModel, backend: Backend) -> str:
    if not backend.graph_shapes(1, 1, 1):
        return f"none: not on this device ({backend.device.type})"
    if loaded.states:
        return "none: its mixers keep states"
    return "steps of decoding and drafts, and with triton attention of prompts"


def _adapted(loaded: LoadedModel) -> list[str]:
    """Last names of what may carry a LoRA, with its kind where that is not a linear."""
    found: set[str] = set()
    for path, module in loaded.targets.items():
        name = path.rpartition(".")[2]
        if isinstance(module, ExpertLinear):
            name += " (experts)"
        elif isinstance(module, AdaptedRouter):
            name += " (router)"
        elif isinstance(module, AdaptedEmbedding):
            name += " (embedding)"
        elif isinstance(module, AdaptedHead):
            name += " (head)"
        found.add(name)
    return sorted(found)


@contextmanager
def _notes() -> Generator[list[str]]:
    """Log lines of loading within the block, such as reasons for a slower way of computing."""
    found: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    log, handler = logging.getLogger("loraplex_server"), Handler(logging.INFO)
    level, propagates = log.level, log.propagate
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        yield found
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        log.propagate = propagates
