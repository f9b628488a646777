"""Loading of base models through Transformers, and preparation for steps."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from loraplex_contracts.errors import InvalidArgument, LoraplexError, UnsupportedModel, is_out_of_memory
from loraplex_contracts.sampling import MIN_TEMPERATURE, SAMPLING_OPTIONS
from loraplex_runtime.reports import Progress, no_progress
from loraplex_server import config as settings
from loraplex_server.backends.backend import Backend
from loraplex_server.backends.registry import plain_backend
from loraplex_server.layers.attention import SERVING, ModelSpec, register_attention
from loraplex_server.layers.context import StepContext
from loraplex_server.layers.quantization import WeightFormat
from loraplex_server.library_errors import error_line
from loraplex_server.model.adapt import adapt_model
from loraplex_server.model.direct import find_direct_forward
from loraplex_server.model.head_rows import choose_head_rows
from loraplex_server.model.language import read_config, read_language_model
from loraplex_server.model.loaded_model import LoadedModel
from loraplex_server.model.mxfp4 import dequantising
from loraplex_server.model.own_attention import install_attention, use_attention
from loraplex_server.model.places import reaching_hub
from loraplex_server.model.probe import probe_model
from loraplex_server.model.refusals import refuse_class, refuse_config
from loraplex_server.model.rope import scale_by_token
from loraplex_server.model.rounding import round_weights
from loraplex_server.model.self_test import reference_texts, verify_loaded
from loraplex_server.model.weights_progress import telling_of_weights

log = logging.getLogger(__name__)

DTYPES: Mapping[str, torch.dtype] = {name: getattr(torch, name) for name in settings.DTYPES}
FALLBACK_CONTEXT_TOKENS = 4096  # of a model whose configuration names no limit
# Of generation configs, with values that change nothing: `generate()` writes another text by them, a server does not.
_NOT_APPLIED: Mapping[str, Any] = {
    "bad_words_ids": None,
    "begin_suppress_tokens": None,
    "dola_layers": None,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "exponential_decay_length_penalty": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "guidance_scale": 1.0,
    "min_length": 0,
    "min_new_tokens": None,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "penalty_alpha": None,
    "sequence_bias": None,
    "stop_strings": None,
    "suppress_tokens": None,
    "token_healing": False,
    "top_h": None,
    "watermarking_config": None,
}


def dtype_of(name: str) -> torch.dtype | None:
    """The dtype of that name; None for `auto`. Raises InvalidArgument."""
    if name != "auto" and name not in DTYPES:
        raise InvalidArgument(f"{name!r} is not a dtype; use auto or one of {', '.join(DTYPES)}", field="--dtype")
    return DTYPES.get(name)


def load_model(
    model_id: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    revision: str | None = None,
    max_context_tokens: int | None = None,
    backend: Backend | None = None,
    replaces_decoder: bool = True,
    form: WeightFormat | None = None,
    amend: Callable[[PreTrainedModel], PreTrainedModel] | None = None,
    progress: Progress = no_progress,
) -> LoadedModel:
    """Loads a directory or a Hub id. Raises UnsupportedModel with the reason, InvalidArgument on a bad option.

    `amend` may change the weights first (merge an adapter, say). Other arguments are those of adopt_model.
    """
    target = resolve_device(device)
    with reading_files(model_id, revision):
        config = read_config(model_id, revision)
    refuse_config(config, model_id)
    refuse_class(config, model_id)
    # Transformers also takes a dtype for each part.
    if dtype == "auto" and not isinstance(config.dtype, Mapping) and config.dtype not in (None, *DTYPES.values()):
        raise UnsupportedModel(
            f"{model_id} cannot be loaded: its config.json has the dtype {config.dtype}, which is not served; "
            "give another by --dtype"
        )
    with reading(model_id):
        _context_tokens(config, max_context_tokens)  # refused before the weights are read
    register_attention()
    wanted = dtype_of(dtype) or dtype
    with reading_files(model_id, revision), telling_of_weights(progress) as how:
        model = read_language_model(
            model_id,
            copy.deepcopy(config),
            revision=revision,
            dtype=wanted,
            trust_remote_code=False,
            **dequantising(config, wanted),
            **how,
        )
    if amend is not None:
        model = amend(model)
    nn.Module.to(model, target)  # in place; Transformers' own `to` has other types
    with reading(model_id):
        return adopt_model(
            model,
            model_id=model_id,
            max_context_tokens=max_context_tokens,
            backend=backend,
            replaces_decoder=replaces_decoder,
            form=form,
            progress=progress,
        )


def adopt_model(
    model: PreTrainedModel,
    *,
    model_id: str = "",
    max_context_tokens: int | None = None,
    backend: Backend | None = None,
    replaces_decoder: bool = True,
    form: WeightFormat | None = None,
    verify: bool = True,
    progress: Progress = no_progress,
) -> LoadedModel:
    """Prepares a model that is in memory already. It is changed in place and belongs to the result from here on.

    `backend`: what computes it; by default that of a GPU, or the plain reference on a CPU. `replaces_decoder`: whether
    it may compute all layers in one call, attention included. `form`: rounds the weights of linears and experts to what
    so few bits hold. `verify` compares a few tokens with Transformers' own attention.
    """
    model_id = model_id or model.config.name_or_path or model.config.model_type
    refuse_config(model.config, model_id)
    register_attention()
    if model.device.type == "cuda":
        torch.cuda.set_device(model.device)  # this thread's kernels and copies go to its current device
    model.eval().requires_grad_(False)
    embedding = cast(Tensor, model.get_input_embeddings().weight)  # [vocab, hidden]
    head = model.get_output_embeddings()
    if head is None:
        raise UnsupportedModel(f"{model_id} cannot be served: it has no language modelling head")
    if embedding.dtype == torch.float64:
        model.set_experts_implementation("eager")  # grouped products have no float64
    context_tokens = _context_tokens(model.config, max_context_tokens)
    install_attention(model, context_tokens)
    choose_head_rows(model)
    backend = backend or plain_backend(model.device)
    digests: dict[str, str] = {}
    if form is not None:
        backend.check_quantize(form)
        digests = round_weights(model, form, backend.rounding(form))
    progress("checking what the model computes")
    context = StepContext()
    rope = scale_by_token(model, context)
    probe = probe_model(model, model_id, context_tokens, context)
    chunk = math.lcm(*(spec.chunk or 1 for _, spec in probe.attention))
    reference = reference_texts(model, context_tokens, chunk) if verify else None
    dtype, device = embedding.dtype, embedding.device
    embedding_path = next(path for path, module in model.named_modules() if module is model.get_input_embeddings())
    use_attention(model, SERVING)
    adapted = adapt_model(
        model,
        probe,
        context,
        dtype,
        backend,
        replaces_decoder=replaces_decoder,
        form=form,
        keeps_head=not digests,
        progress=progress,
    )
    stack = adapted.stack
    spec = ModelSpec(
        layers=tuple(spec for _, spec in probe.attention),
        vocab_size=embedding.shape[0],
        num_logits=probe.num_logits,
        hidden_size=cast(Tensor, head.weight).shape[-1],
        max_context_tokens=context_tokens,
        eos_token_ids=eos_token_ids_of(model),
        rope=rope,
    )
    loaded = LoadedModel(
        model=model,
        model_id=model_id,
        spec=spec,
        dtype=dtype,
        device=device,
        backend=backend,
        context=context,
        attention=adapted.attention,
        targets=adapted.targets,
        embedding_path=embedding_path,
        norms=adapted.norms,
        decoder=stack.stack if stack is not None else None,
        states=probe.states,
        digests=digests,
        weight_format=form.name if form is not None else "",
    )
    if reference is not None:
        progress("comparing texts with those of Transformers")
        # A direct pass keeps rotations by position, which those of some models depend on the text's length for.
        direct = None
        if stack is not None and rope is None:
            direct = find_direct_forward(model, stack.path, stack.parts)
        verify_loaded(loaded, reference, direct)
    return loaded


def resolve_device(name: str) -> torch.device:
    """The device of a name; 'auto' is a GPU where there is one. Raises InvalidArgument."""
    settings.check_device(name)
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InvalidArgument(f"--device {name}: this PyTorch sees no CUDA GPU", field="--device")
    if device.type == "cuda" and (device.index or 0) >= (num_devices := torch.cuda.device_count()):
        raise InvalidArgument(f"--device {name}: PyTorch sees {num_devices} GPUs, from cuda:0 on", field="--device")
    return device


def _context_tokens(config: PreTrainedConfig, wanted: int | None) -> int:
    """The model's own limit, or a smaller one that was asked for."""
    text = config.get_text_config()
    names = ("max_position_embeddings", "max_seq_len", "max_target_positions")
    own = next((found for name in names if (found := getattr(text, name, None))), None)
    rope: Mapping[str, Any] = getattr(text, "rope_parameters", None) or {}
    most = own and _scaled_context(int(own), rope)
    if wanted is None:
        # Configurations with a linear factor often have it in their limit already.
        return int((own if rope.get("rope_type") == "linear" else most) or FALLBACK_CONTEXT_TOKENS)
    if wanted < 2 or (most and wanted > most):
        raise InvalidArgument(f"--max-context must be 2 to {most or 'what fits the memory'}", field="--max-context")
    return wanted


def _scaled_context(own: int, rope: Mapping[str, Any]) -> int:
    """The most tokens that scaled rotations are for, where the configuration's limit is `own`."""
    kind, factor = rope.get("rope_type"), rope.get("factor")
    if not isinstance(factor, int | float):
        return own
    if kind in ("dynamic", "linear"):
        return max(own, int(own * factor))
    return max(own, int(rope.get("original_max_position_embeddings", own) * factor)) if kind == "yarn" else own


def eos_token_ids_of(model: PreTrainedModel) -> tuple[int, ...]:
    """Ends of sequence by the generation config, else by the model's own; none where neither names any. Raises
    UnsupportedModel for one that is no token id."""
    for config in (getattr(model, "generation_config", None), model.config.get_text_config()):
        found: Any = getattr(config, "eos_token_id", None)
        if found is None:
            continue
        ids: Any = found if isinstance(found, list | tuple) else [found]
        if invalid := [one for one in ids if type(one) is not int]:
            raise UnsupportedModel(
                f"{model.config.name_or_path} cannot be served: its `eos_token_id` has {invalid[0]!r:.40}, which is "
                "no token id; write an integer or a list of integers"
            )
        return tuple(one for one in ids if 0 <= one < 1 << 31)  # -1 stands for none
    return ()


def generation_defaults(model: PreTrainedModel) -> dict[str, float]:
    """Sampling options that the model's generation config sets to values which a request could send: temperature 0
    where it says not to sample, or names one that is as good as 0. Others are named in the log."""
    config = getattr(model, "generation_config", None)
    settings: dict[str, Any] = {} if config is None else config.to_diff_dict()
    # With one seed for all, every request for a text would get the same one.
    names = [name for name in SAMPLING_OPTIONS if name != "seed"]
    found = {name: settings[name] for name in names if isinstance(settings.get(name), (int, float))}
    if settings.get("do_sample") is False:
        found = {name: value for name, value in found.items() if name.endswith("_penalty")} | {"temperature": 0.0}
    if 0 < found.get("temperature", 0) < MIN_TEMPERATURE:
        found["temperature"] = 0.0
    usable = {name: value for name, value in found.items() if SAMPLING_OPTIONS[name].is_ok(value)}
    for name in found.keys() - usable.keys():
        log.warning("the generation config has %s = %s, which cannot be used: the default holds", name, found[name])
    if others := [name for name, idle in _NOT_APPLIED.items() if settings.get(name, idle) not in (idle, None, 0, [])]:
        log.warning("the generation config has %s, which a server does not apply", ", ".join(others))
    return usable


@contextmanager
def reading_files(model_id: str, revision: str | None = None) -> Generator[None]:
    """Does what `reading` does, for a block that may ask the Hub. A Hub that does not answer is found out first."""
    with reaching_hub([(model_id, revision)]), reading(model_id):
        yield


@contextmanager
def reading(model_id: str) -> Generator[None]:
    """Raises as UnsupportedModel whatever the files of a model make Transformers raise. Full memory is left as it
    is."""
    try:
        yield
    except LoraplexError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        log.debug("%s cannot be loaded", model_id, exc_info=error)
        raise UnsupportedModel(f"{model_id} cannot be loaded: {error_line(error)}") from error
