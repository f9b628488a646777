"""Language models of checkpoints that have parts for images or audio.

Transformers' class for the whole checkpoint stays, with its names of weights and its code for texts. What lies beside
the language model is taken out before any weight is read, and so is never in memory.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Collection, Generator
from contextlib import contextmanager, suppress
from pickle import UnpicklingError
from typing import Any, cast

import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from loraplex_server.library_errors import error_line

_IGNORED = "_keys_to_ignore_on_load_unexpected"  # of Transformers' classes: patterns of names of weights


class AbsentPart(nn.Module):
    """Stands for a part of a model that is not loaded."""

    device = torch.device("meta")  # Qwen2-Audio asks its tower for it with every text

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    def forward(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{self._path} is for images or audio and is not loaded")


def language_class(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """Transformers' class that generates text with a checkpoint of this configuration; None where there is none."""
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING):
        found: Any = mapping.get(type(config), None)
        if found is not None:
            return found[0] if isinstance(found, tuple) else found
    return None


def read_config(model_id: str, revision: str | None = None) -> PreTrainedConfig:
    """The configuration of what writes a checkpoint's text. Of a model that speaks as well (Qwen's Omni), that is its
    thinker's. Raises what Transformers raises, and ValueError for an unknown dtype and a generation config that cannot
    be loaded beside the weights."""
    try:
        config = AutoConfig.from_pretrained(model_id, revision=revision, trust_remote_code=False)
    except AttributeError as error:
        if error.obj is not torch:
            raise
        raise ValueError(
            f"its config.json has the dtype {error.name!r:.40}, which torch does not know; write bfloat16, float16 or "
            "float32 there"
        ) from error
    with suppress(OSError):  # there is none, or Transformers passes over it
        try:
            GenerationConfig.from_pretrained(model_id, revision=revision or "main")
        except (AttributeError, RecursionError, TypeError, ValueError) as error:
            raise ValueError(
                f"its generation_config.json is not valid ({error_line(error)}); mend or remove it"
            ) from error
    thinker = getattr(config, "thinker_config", None)
    if not isinstance(thinker, PreTrainedConfig):
        return config
    thinker.dtype = thinker.dtype or config.dtype
    if (quantization := getattr(config, "quantization_config", None)) is not None:
        setattr(thinker, "quantization_config", quantization)  # noqa: B010
    text, generate = cast(Any, thinker.get_text_config()), getattr(language_class(config), "generate", None)
    if text.eos_token_id is None:
        end = generate and inspect.signature(generate).parameters.get("thinker_eos_token_id")
        text.eos_token_id = end.default if end else getattr(thinker, "eos_token_id", None)
    return thinker


def read_language_model(model_id: str, config: PreTrainedConfig, **options: Any) -> PreTrainedModel:
    """The model without parts for images and audio. `options`: of `from_pretrained`. `config` belongs to the model from
    here on. Raises what Transformers raises, and ValueError where it has no class, the files hold more than tensors or
    lack weights, or these have other shapes or are quantised although the configuration does not say so."""
    # Mismatched shapes are refused here: the library's own error does not name them.
    options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
    try:
        model, info = _class_to_make(config).from_pretrained(model_id, config=config, **options)
    except UnpicklingError as error:
        raise ValueError(
            "its pytorch_model.bin holds more than tensors, which is never run here; save the model as safetensors"
        ) from error
    if mismatched := sorted(info["mismatched_keys"]):
        name, found, wanted = mismatched[0]
        raise ValueError(
            f"its files have {name} of shape {list(found)}, and its config.json asks for {list(wanted)}; "
            "give it the config.json of these weights"
        )
    if missing := sorted(info["missing_keys"]):
        raise ValueError(f"its files lack {len(missing)} of the weights that {type(model).__name__} has: {missing[0]}")
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if scales := sorted(name for name in info["unexpected_keys"] if _is_of_one(name, parameters)):
        raise ValueError(
            f"its files have {scales[0]}, which {type(model).__name__} does not read, so its weights are quantised; "
            "use the unquantised checkpoint"
        )
    return model


def _is_of_one(name: str, parameters: Collection[str]) -> bool:
    """True if the name of a weight continues that of a parameter, as its scale's does (`weight_scale_inv`). Of experts
    models have one parameter for all, and the files one for each."""
    head, experts, rest = name.partition(".experts.")
    if experts and re.search(r"\.weight[._]", rest) and any(one.startswith(head + experts) for one in parameters):
        return True
    return any(name[: end.start()] in parameters for end in re.finditer(r"[._]", name))


def make_language_model(config: PreTrainedConfig, **options: Any) -> PreTrainedModel:
    """The model without parts for images and audio, with random weights. `options`: of `from_config`. `config` belongs
    to the model from here on."""
    made = _class_to_make(config)
    return made.from_config(config, **options) if made is AutoModelForCausalLM else made._from_config(config, **options)


def has_other_parts(config: PreTrainedConfig) -> bool:
    """True if Transformers' class has more than a language model."""
    found, text = language_class(config), config.get_text_config()
    return found is not None and text is not config and found.config_class is not type(text)


def _class_to_make(config: PreTrainedConfig) -> Any:
    """The class that makes the model. Prepares the configuration for texts alone, too."""
    found, text = language_class(config), config.get_text_config()
    if getattr(text, "use_bidirectional_attention", None) == "vision":
        text.use_bidirectional_attention = None  # the same for texts, without masks of their own
    if found is None:
        raise ValueError(f"Transformers has no class for {config.model_type} that generates text from text")
    if has_other_parts(config):
        return _without_other_parts(found)
    # Of the causal language models Transformers knows which part of a configuration they take.
    return AutoModelForCausalLM if MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None) is not None else found


def _without_other_parts(model_class: type[PreTrainedModel]) -> type[PreTrainedModel]:
    def init(self: PreTrainedModel, *args: Any, **options: Any) -> None:
        with _packages_may_be_missing():
            model_class.__init__(self, *args, **options)
        remove_other_parts(self)

    def set_attention(self: PreTrainedModel, *args: Any, **options: Any) -> None:
        with _warns_less():  # of configurations whose parts are not there
            model_class.set_attn_implementation(self, *args, **options)

    def output_embeddings(self: PreTrainedModel) -> nn.Module | None:
        """The head, which some classes have inside a whole causal language model."""
        inner = getattr(self, "language_model", None)
        return model_class.get_output_embeddings(self) or (inner and inner.get_output_embeddings())

    methods = {
        "__init__": init,
        "__module__": model_class.__module__,
        "set_attn_implementation": set_attention,
        "get_output_embeddings": output_embeddings,
    }
    return type(model_class.__name__, (model_class,), methods)  # renamings of weights are known by the class's name


@contextmanager
def _packages_may_be_missing() -> Generator[None]:
    """Makes a tower whose code needs a package that is not there (timm, of Gemma 3n) absent at once."""
    own = vars(AutoModel)["from_config"]

    def from_config(*args: Any, **options: Any) -> Any:
        try:
            return own.__get__(None, AutoModel)(*args, **options)
        except ImportError:
            return AbsentPart("this part")

    setattr(AutoModel, "from_config", from_config)  # noqa: B010
    try:
        yield
    finally:
        setattr(AutoModel, "from_config", own)  # noqa: B010


@contextmanager
def _warns_less() -> Generator[None]:
    log = logging.getLogger("transformers.modeling_utils")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def remove_other_parts(model: PreTrainedModel) -> None:
    """Takes out what lies beside the language model and the way to it, except for the head."""
    text = model.config.get_text_config()
    language = next((module for module in model.modules() if getattr(module, "config", None) is text), model)
    kept = {id(module) for module in (language, model.get_output_embeddings())}
    removed: list[str] = []

    def visit(module: nn.Module, prefix: str) -> None:
        for name, child in list(module.named_children()):
            if id(child) in kept or hasattr(child, "vocab_offset"):  # Gemma 3n: some of its tokens' embeddings
                continue
            if any(id(part) in kept for part in child.modules()):
                visit(child, f"{prefix}{name}.")
            elif isinstance(child, AbsentPart) or next(child.parameters(), None) is not None:
                removed.append(prefix + name)
                setattr(module, name, AbsentPart(prefix + name))

    if language is not model:
        visit(model, "")
    # Their weights in the checkpoint are no mistake.
    ignored: Collection[str] = getattr(model, _IGNORED, None) or ()
    setattr(model, _IGNORED, {*ignored, *(rf"^{path}\." for path in removed)})


def absent_parts(model: nn.Module) -> tuple[str, ...]:
    """Paths of the parts that were taken out."""
    return tuple(path for path, module in model.named_modules() if isinstance(module, AbsentPart))
