"""Loading of base models through Transformers, refusal of unsupported ones, and preparation for steps.

What a configuration tells is refused before any weight is read; the probe checks the rest by running the model.
"""

from __future__ import annotations

import copy
import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from loraplex_contracts.errors import InvalidArgument, LoraplexError, UnsupportedModel
from loraplex_contracts.sampling import SAMPLING_OPTIONS
from loraplex_runtime.reports import Progress, no_progress
from loraplex_server.backends.backend import Backend
from loraplex_server.backends.equivalence import Comparison, Kind, compare, compare_all
from loraplex_server.backends.fusion import FusedOps, fuse, separate
from loraplex_server.backends.registry import plain_backend
from loraplex_server.layers.adapter_slots import NormPlace
from loraplex_server.layers.attention import HANDLE, SERVING, AttentionLayer, ModelSpec, register_attention
from loraplex_server.layers.context import StepContext
from loraplex_server.layers.experts import (
    DOWN,
    UP,
    AdaptedExperts,
    AdaptedModule,
    AdaptedRouter,
    MakeExpertProducts,
    ScaledExperts,
)
from loraplex_server.layers.linear import (
    AdaptedEmbedding,
    AdaptedHead,
    AdaptedLinear,
    BaseLinearFactory,
    PlainLinear,
    merge_linears,
)
from loraplex_server.layers.quantization import WeightFormat
from loraplex_server.model.direct import find_direct_forward
from loraplex_server.model.language import has_other_parts, language_class, read_language_model
from loraplex_server.model.loaded_model import LoadedModel
from loraplex_server.model.mxfp4 import dequantising, is_mxfp4
from loraplex_server.model.own_attention import has_known_form, install_attention, use_attention
from loraplex_server.model.places import reaching_hub
from loraplex_server.model.probe import (
    ATTENTION_LAYERS,
    KEPT,
    NUM_TOKENS,
    OTHER_LAYERS,
    STATE_LAYERS,
    Probe,
    layer_types,
    probe_model,
    run_again,
)
from loraplex_server.model.rope import scale_by_token
from loraplex_server.model.rounding import round_weights
from loraplex_server.model.self_test import reference_texts, verify_loaded
from loraplex_server.model.weights_progress import telling_of_weights

log = logging.getLogger(__name__)

DTYPES: Mapping[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
EXPERT = re.compile(r"\.experts?\.\d+\.")
FALLBACK_CONTEXT_TOKENS = 4096  # of a model whose configuration names no limit
# Positions of one request would change the rotation of its neighbours in the same step.
STATEFUL_ROPE = {"su", "yarn_dynamic"}
# Their attention does not go through Transformers' attention interface.
OWN_ATTENTION = {
    "xlnet": "relative positions",
}


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
    verify: bool = True,
    amend: Callable[[PreTrainedModel], PreTrainedModel] | None = None,
    progress: Progress = no_progress,
) -> LoadedModel:
    """Loads a directory or a Hub id. Raises UnsupportedModel with the reason, InvalidArgument on a bad option.

    `amend` may change the weights first (merge an adapter, say). Other arguments are those of adopt_model.
    """
    target = resolve_device(device)
    with reading_files(model_id, revision):
        config = AutoConfig.from_pretrained(model_id, revision=revision, trust_remote_code=False)
    refuse_config(config, model_id)
    refuse_class(config, model_id)
    _context_tokens(config, max_context_tokens)  # refused before the weights are read
    register_attention()
    if dtype != "auto" and dtype not in DTYPES:
        raise InvalidArgument(f"{dtype!r} is not a dtype; use auto or one of {', '.join(DTYPES)}", field="--dtype")
    with reading_files(model_id, revision), telling_of_weights(progress) as how:
        model = read_language_model(
            model_id,
            copy.deepcopy(config),
            revision=revision,
            dtype=DTYPES.get(dtype, dtype),
            trust_remote_code=False,
            **dequantising(config, DTYPES.get(dtype, dtype)),
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
            verify=verify,
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
    backend = backend or plain_backend(model.device)
    digests: dict[str, str] = {}
    if form is not None:
        backend.check_quantize(form)
        kernels = backend.kernels
        digests = round_weights(model, form, partial(kernels.round_, form=form) if kernels is not None else None)
    progress("checking what the model computes")
    context = StepContext()
    rope = scale_by_token(model, context)
    probe = probe_model(model, model_id, context_tokens, context)
    chunk = math.lcm(*(spec.chunk or 1 for _, spec in probe.attention))
    reference = reference_texts(model, context_tokens, chunk) if verify else None
    dtype, device = embedding.dtype, embedding.device
    embedding_path = next(path for path, module in model.named_modules() if module is model.get_input_embeddings())
    use_attention(model, SERVING)
    make_base, found = backend.linears(form), None
    if replaces_decoder and not probe.states:
        found = backend.find_decoder(model, probe.attention, context, far=probe.far, form=form, progress=progress)
    if found is None:
        progress("packing weights")
    norms = _norm_places(model, probe, context, dtype)
    targets = adapt_modules(model, probe, context, dtype, make_base, keeps_head=not digests)
    if backend.merges_linears:
        _merge(model, probe, targets, context)
    if found is None and (fused := backend.fused_ops()) is not None:  # a stack has norms of its own
        _fuse(model, probe, fused, context)
    targets |= adapt_experts(model, probe, context, dtype, backend.expert_products(form))
    layers: list[AttentionLayer] = []
    for module, spec in probe.attention:
        layer = AttentionLayer(spec, context)
        setattr(module, HANDLE, layer)
        layers.append(layer)
    if found is not None:
        found.install(model)
    spec = ModelSpec(
        layers=tuple(spec for _, spec in probe.attention),
        vocab_size=embedding.shape[0],
        num_logits=probe.num_logits,
        hidden_size=cast(Tensor, head.weight).shape[-1],
        max_context_tokens=context_tokens,
        eos_token_ids=_eos_token_ids(model),
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
        attention=tuple(layers),
        targets=targets,
        embedding_path=embedding_path,
        norms=norms,
        decoder=found.stack if found is not None else None,
        states=probe.states,
        digests=digests,
    )
    if reference is not None:
        progress("comparing texts with those of Transformers")
        direct = find_direct_forward(model, found.path) if found is not None else None
        verify_loaded(loaded, reference, direct)
    return loaded


def adapt_modules(
    model: PreTrainedModel,
    probe: Probe,
    context: StepContext,
    dtype: torch.dtype,
    make_base: BaseLinearFactory = PlainLinear,
    *,
    keeps_head: bool = True,
) -> dict[str, AdaptedModule]:
    """Replaces every linear, and the embeddings that may carry an adapter. Returns the possible targets by path.

    The probe tells which modules may carry an adapter: those that are given exactly the step's tokens (or, the head,
    the sampled rows), in order. A linear that sees another selection of rows (an expert) gets a base product of its
    kind, but is not a target. `keeps_head`: the head keeps its plain weight, which adapters' copies are compared with.
    """
    head = model.get_output_embeddings()
    uses = Counter(id(parameter) for _name, parameter in model.named_parameters(remove_duplicate=False))
    targets: dict[str, AdaptedModule] = {}
    for path, module in list(model.named_modules()):
        if path not in probe.rows and not EXPERT.search(f".{path}."):
            continue  # another module reads the weight itself, a mixer or a router
        adapted: AdaptedModule
        num_rows = NUM_TOKENS
        if (type(module) is nn.Linear and module.weight.dtype == dtype) or isinstance(module, Conv1D):
            kind = AdaptedHead if module is head else AdaptedLinear
            num_rows = len(KEPT) if module is head else NUM_TOKENS
            is_conv1d = isinstance(module, Conv1D)
            adapted = kind(
                cast(nn.Parameter, module.weight), module.bias, context, is_conv1d=is_conv1d, make_base=make_base
            )
            if uses[id(module.weight)] == 1 and not (keeps_head and module is head):
                adapted.drop_weight()
        elif isinstance(module, nn.Embedding) and (
            type(module) is nn.Embedding or module is model.get_input_embeddings()
        ):
            adapted = AdaptedEmbedding(module, context)
        else:
            continue
        adapted.train(module.training)
        model.set_submodule(path, adapted)
        rows = probe.rows.get(path, [])
        is_whole = bool(rows) and all(seen == num_rows for seen in rows)
        if is_whole and not EXPERT.search(f".{path}.") and module.weight.dtype == dtype:
            targets[path] = adapted
    return targets


def adapt_experts(
    model: PreTrainedModel,
    probe: Probe,
    context: StepContext,
    dtype: torch.dtype,
    make_products: MakeExpertProducts | None = None,
) -> dict[str, AdaptedModule]:
    """Puts experts and routers that may carry an adapter in the place of the model's. Returns these by path, experts by
    the path of their parameters. What does not compute the same, of all the step's rows in order, stays as it was.
    `make_products`: of a back end, which experts compute by where they give the same."""
    tried: dict[str, AdaptedExperts | AdaptedRouter] = {}
    for path, module in list(model.named_modules()):
        rows = set(probe.rows.get(path, ()))
        if len(rows) != 1:
            continue
        (num_rows,) = rows
        kind = next(
            (one for one in (AdaptedExperts, ScaledExperts) if one.fits(module, dtype, num_rows, NUM_TOKENS)), None
        )
        if kind is not None:
            tried[path] = kind(module, context)
        elif num_rows == NUM_TOKENS and AdaptedRouter.fits(module):
            tried[path] = AdaptedRouter(module, context, dtype)
    if not tried:
        return {}
    for path, adapted in tried.items():
        adapted.train(model.training)
        adapted.is_on_trial = True
        model.set_submodule(path, adapted)
    if problem := _difference(model, probe, context):
        log.info("experts and routers take no adapters: %s", problem)
    targets: dict[str, AdaptedModule] = {}
    for path, adapted in tried.items():
        adapted.is_on_trial = False
        if problem or adapted.rows_seen != [NUM_TOKENS]:
            model.set_submodule(path, adapted.base)
        elif isinstance(adapted, AdaptedRouter):
            targets[path] = adapted
        else:
            targets |= {f"{path}.{name}": linear for name, linear in adapted.linears.items()}
            if make_products is not None and not isinstance(adapted, ScaledExperts):
                _take_products(adapted, make_products)
    return targets


def _take_products(experts: AdaptedExperts, make: MakeExpertProducts) -> None:
    """Has experts compute by a back end's products, where these give the same, and frees their weights."""
    made = {name: found for name in (UP, DOWN) if (found := make(experts.weight(name))) is not None}
    if len(made) < 2:
        return
    like, top_k = experts.weight(UP), min(2, experts.linears[UP].num_experts)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(NUM_TOKENS, like.shape[2], generator=generator).to(like)
    chosen = torch.rand(NUM_TOKENS, like.shape[0], generator=generator).topk(top_k).indices.to(like.device)
    weights = torch.rand(NUM_TOKENS, top_k, generator=generator).to(like)
    with torch.inference_mode():
        want = experts(x, chosen, weights)
        experts.products = made
        found = compare("decoder", want, experts(x, chosen, weights))
    if found.is_equal:
        experts.drop_weights()
    else:
        log.info("experts are computed by the model's own code: products of the back end are %.1e off", found.error)
        experts.products = {}


def _norm_places(
    model: PreTrainedModel, probe: Probe, context: StepContext, dtype: torch.dtype
) -> dict[str, NormPlace]:
    """Norms by path, of whole hidden states or of single heads: modules that have vectors alone (or one for each head),
    and are given the step's tokens in order."""
    found: dict[str, NormPlace] = {}
    for path, module in model.named_modules():
        parameters = list(module.parameters(recurse=False))
        max_dims = 2 if "norm" in type(module).__name__.lower() else 1
        is_norm = parameters and all(one.dim() <= max_dims and one.dtype == dtype for one in parameters)
        if not is_norm or next(module.children(), None) is not None:
            continue
        dims = {
            tuple(dim for dim, size in enumerate(shape[:-1]) if size == NUM_TOKENS)
            for shape in probe.shapes.get(path, [])
        }
        if len(dims) == 1 and len(of_tokens := dims.pop()) == 1:
            parent, _, name = path.rpartition(".")
            found[path] = NormPlace(model.get_submodule(parent), name, context, of_tokens[0])
    return found


def _merge(model: PreTrainedModel, probe: Probe, targets: dict[str, AdaptedModule], context: StepContext) -> None:
    called_once = [[path for path in run if len(probe.rows.get(path, ())) == 1] for run in probe.runs]
    linears = {path: module for path, module in targets.items() if isinstance(module, AdaptedLinear)}
    merged = merge_linears(model, called_once, linears, context)
    with _products_compared([member for group in merged for member in group.members]) as products:
        problem = _difference(model, probe, context, "merged model")
    if problem := problem or next((f"a product is {one.error:.1%} off" for one in products if not one.is_equal), ""):
        log.info("linears are computed one by one: %s", problem)
        for group in merged:
            group.separate()


@contextmanager
def _products_compared(members: Sequence[AdaptedLinear]) -> Generator[list[Comparison]]:
    """Compares what linears give meanwhile with their own products of the same inputs."""
    found: list[Comparison] = []

    def look(member: nn.Module, args: tuple[Tensor, ...], y: Tensor) -> None:
        assert isinstance(member, AdaptedLinear)
        found.append(compare("product", member.base(args[0]), y))

    hooks = [member.register_forward_hook(look) for member in members]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _fuse(model: PreTrainedModel, probe: Probe, fused: FusedOps, context: StepContext) -> None:
    changed = fuse(model, [module for module, _ in probe.attention], fused)
    if problem := _difference(model, probe, context, "merged model"):
        log.info("norms, gates and rotary embeddings are the model's own: %s", problem)
        separate(changed)


def _difference(model: PreTrainedModel, probe: Probe, context: StepContext, kind: Kind = "model") -> str:
    """The difference of the model from its probe; empty for none."""
    try:
        got = run_again(model, probe, context)
    except Exception as failure:  # model-specific code
        return f"{type(failure).__name__}: {failure}"
    finally:
        context.clear()
        use_attention(model, SERVING)
    found = compare_all(kind, probe.seen, got)
    return "" if found.is_equal else f"what it computes is {found.error:.1%} off"


def resolve_device(name: str) -> torch.device:
    """'auto' is a GPU where there is one. Raises InvalidArgument."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InvalidArgument(f"{name!r} is not a device; use auto, cpu, cuda or cuda:N", field="--device") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InvalidArgument(f"--device {name}: this PyTorch sees no CUDA GPU", field="--device")
    if device.type == "cuda" and (device.index or 0) >= (num_devices := torch.cuda.device_count()):
        raise InvalidArgument(f"--device {name}: PyTorch sees {num_devices} GPUs, from cuda:0 on", field="--device")
    return device


def _context_tokens(config: PreTrainedConfig, wanted: int | None) -> int:
    """The model's own limit, or a smaller one that was asked for."""
    text = config.get_text_config()
    own = getattr(text, "max_position_embeddings", None) or getattr(text, "max_seq_len", None)
    parameters: Any = getattr(text, "rope_parameters", None) or {}
    if own and parameters.get("rope_type") == "dynamic":  # which scales what is longer than in training
        own = int(own * parameters["factor"])
    if wanted is None:
        return int(own or FALLBACK_CONTEXT_TOKENS)
    if wanted < 2 or (own and wanted > own):
        raise InvalidArgument(f"--max-context must be 2 to {own or 'what fits the memory'}", field="--max-context")
    return wanted


def _eos_token_ids(model: PreTrainedModel) -> tuple[int, ...]:
    for config in (getattr(model, "generation_config", None), model.config.get_text_config()):
        found = getattr(config, "eos_token_id", None)
        if found is not None:
            return (found,) if isinstance(found, int) else tuple(found)
    return ()


def generation_defaults(model: PreTrainedModel) -> dict[str, float]:
    """Sampling options that the model's generation config sets to values which a request could send: temperature 0
    where it says not to sample."""
    config = getattr(model, "generation_config", None)
    said: dict[str, Any] = {} if config is None else config.to_diff_dict()
    found = {name: said[name] for name in SAMPLING_OPTIONS if isinstance(said.get(name), (int, float))}
    if said.get("do_sample") is False:
        found = {name: value for name, value in found.items() if name.endswith("_penalty")} | {"temperature": 0.0}
    return {name: value for name, value in found.items() if value >= 0 and SAMPLING_OPTIONS[name].is_ok(value)}


# --- refusals ---------------------------------------------------------------------------------------------------------


def refuse_config(config: PreTrainedConfig, model_id: str) -> None:
    """Raises UnsupportedModel when this configuration cannot be served rightly."""
    try:
        reason = next(_reasons(config), None)
    except Exception as error:  # of which part is meant, or whatever a field of an unusual kind leads to
        reason = f"its configuration does not describe one language model ({_told(error)})"
    if reason is not None:
        raise UnsupportedModel(f"{model_id} ({config.model_type}) cannot be served: {reason}")


def refuse_class(config: PreTrainedConfig, model_id: str) -> None:
    """The same for what Transformers' class shows, so that no weights are fetched in vain."""
    model_class = language_class(config)
    can_set = getattr(model_class, "_can_set_attn_implementation", None)
    if model_class is None:
        reason = "Transformers has no class for it that generates text from text"
    elif can_set is not None and not has_other_parts(config) and not can_set() and not has_known_form(model_class):
        reason = "its attention does not use Transformers' attention interface"
    else:
        return
    raise UnsupportedModel(f"{model_id} ({config.model_type}) cannot be served: {reason}")


def _reasons(config: PreTrainedConfig) -> Iterator[str]:
    if getattr(config, "is_encoder_decoder", False):
        yield "it is an encoder-decoder model; only decoders are served"
    if getattr(config, "quantization_config", None) is not None and not is_mxfp4(config):
        yield "its checkpoint is quantised; use the unquantised checkpoint"
    if config.model_type in OWN_ATTENTION:
        yield f"its attention ({OWN_ATTENTION[config.model_type]}) does not use Transformers' attention interface"
    text = config.get_text_config()
    if getattr(text, "num_hidden_layers", 1) < 1 or (getattr(text, "max_position_embeddings", None) or 2) < 2:
        yield "its configuration leaves no layer or no position"
    if unknown := set(layer_types(text)) - (ATTENTION_LAYERS | STATE_LAYERS | OTHER_LAYERS):
        yield f"its layers of type {_names(unknown)} are of a kind that is not known"
    rope_types = _rope_types(getattr(text, "rope_parameters", None))
    if rope_types & STATEFUL_ROPE:
        yield (
            f"its rotary embedding ({_names(rope_types & STATEFUL_ROPE)}) depends on the longest request of the batch, "
            "so requests would change each other's text"
        )
    if (getattr(text, "num_kv_shared_layers", None) or 0) >= getattr(text, "num_hidden_layers", 1):
        yield "its layers take the keys and values of another model"
    if getattr(text, "use_bidirectional_attention", False) not in (False, None, "vision"):  # no images come here
        yield "it attends to later tokens"


def _rope_types(parameters: Any) -> set[str]:
    """Of one set of rope parameters, or of one set per layer type."""
    if not isinstance(parameters, Mapping):
        return set()
    own = parameters.get("rope_type") or parameters.get("type")
    found = {str(own)} if own else set[str]()
    for nested in parameters.values():
        found |= _rope_types(nested)
    return found


@contextmanager
def reading_files(model_id: str, revision: str | None = None) -> Generator[None]:
    """As `reading`, for a block that may ask the Hub: one that does not answer is found out first."""
    with reaching_hub([(model_id, revision)]), reading(model_id):
        yield


@contextmanager
def reading(model_id: str) -> Generator[None]:
    """Whatever the files of a model make Transformers raise, as UnsupportedModel. Full memory is no such thing."""
    try:
        yield
    except (LoraplexError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        log.debug("%s cannot be loaded", model_id, exc_info=error)
        raise UnsupportedModel(f"{model_id} cannot be loaded: {_told(error)}") from error


def _told(error: Exception) -> str:
    """A library's error message, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    # The first line of some only introduces the second.
    told = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return told if " " in told else f"{type(error).__name__}: {told}"


def _names(values: set[str]) -> str:
    return ", ".join(sorted(values))
