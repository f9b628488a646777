"""Assembly of an engine from its configuration: model, KV cache, adapter cache, runner, scheduler.

Runs in the engine's process.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from loraplex_adapters.cache.manager import AdapterManager
from loraplex_adapters.cache.residency import AdapterCacheConfig
from loraplex_adapters.io.source_files import AdapterSource
from loraplex_adapters.sources.chain import ChainSource, RoutedSource, make_source
from loraplex_adapters.sources.directory import DirectorySource, FolderSource
from loraplex_adapters.sources.hub import HubSource
from loraplex_adapters.sources.s3 import S3Source
from loraplex_adapters.store import check_store
from loraplex_adapters.weights import AdapterWeights
from loraplex_contracts.adapters import S3_SOURCE
from loraplex_runtime.reports import Progress
from loraplex_server.backends.cpu.cores import default_num_threads
from loraplex_server.backends.registry import choose_attention, choose_backend, make_attention
from loraplex_server.config import AdaptersConfig, EngineConfig, hub_token, reads_unsigned
from loraplex_server.engine.capacity import Capacity, capacity_of, captured_shapes
from loraplex_server.engine.engine import Engine
from loraplex_server.engine.pipe import ModelInfo
from loraplex_server.engine.take_over import take_over
from loraplex_server.grammars.matcher import Compiler, Grammars
from loraplex_server.grammars.tokenizer import LibraryTokenizer
from loraplex_server.kv.blocks import BlockPool
from loraplex_server.kv.states import StatePool
from loraplex_server.layers.adapter_slots import AdapterSlots
from loraplex_server.layers.attention import KvCache, ModelSpec, kv_block_bytes
from loraplex_server.layers.quantization import FORMATS
from loraplex_server.model.loader import LoadedModel, generation_defaults, load_model, resolve_device
from loraplex_server.model.medusa_model import MODEL_HEADS, ServedModel, served_model
from loraplex_server.model.memory import adapter_bytes, fitting
from loraplex_server.model.places import models_of, reaching_hub
from loraplex_server.model.runner import ModelRunner
from loraplex_server.sampling.sampler import Sampler
from loraplex_server.scheduler.admission import SchedulerConfig
from loraplex_server.scheduler.scheduler import Scheduler
from loraplex_server.speculation.build import Target, build_speculator, load_drafts
from loraplex_server.speculation.medusa import HeadSlots
from loraplex_server.speculation.speculator import Speculator
from loraplex_server.speculation.step_costs import StepCosts, measure_runner
from loraplex_server.text.tokenizer import TextTokenizer

log = logging.getLogger(__name__)

# What helps where the memory is full.
NO_ROOM_FOR_MODEL = "make room, choose another with --device, or serve a smaller model"
NO_ROOM_FOR_STEPS = "give the cache less with --kv-memory, or make steps smaller: --max-step-tokens, --max-running"


def build_engine(config: EngineConfig, progress: Progress, notify: Callable[[], None]) -> Engine:
    """An engine with everything loaded. Raises a LoraplexError where a part cannot be loaded."""
    logging.getLogger("loraplex_server").setLevel(config.log_level.upper())
    num_threads = config.num_threads or default_num_threads()
    torch.set_num_threads(num_threads)  # an engine before this one may have lowered it
    disable_progress_bar()  # two progress displays would garble the terminal
    device = resolve_device(config.model.device)
    if config.take_over_s is not None:
        take_over(device, config.adapters.store_dir, config.take_over_s, progress)
    if config.adapters.store_dir is not None:
        check_store(config.adapters.store_dir)  # before anything is loaded in vain
    backend = choose_backend(device, cpu_kernels=config.cpu_kernels, num_threads=num_threads, progress=progress)
    form = FORMATS.get(config.model.quantize)
    if form is not None:
        backend.check_quantize(form)
    choose_attention(config.model.attention, backend)  # what cannot be used is refused before the weights are read
    backend.lora(config.adapters.max_rank, config.lora_kernels)
    progress(f"loading {config.model.model}{f', linears in {form.words}' if form is not None else ''}")
    if form is not None and not backend.multiplies_few_bits:
        progress(
            f"without native CPU kernels --quantize {form.name} saves neither time nor memory: see loraplex doctor"
        )
    with (
        reaching_hub(models_of(config)),
        served_model(config.model.model, config.model.revision) as served,
        reaching_hub([(served.base, served.revision)]),  # which heads may name
    ):
        with fitting(f"the model {config.model.model}", device, NO_ROOM_FOR_MODEL):
            loaded = load_model(
                served.base,
                dtype=config.model.dtype,
                device=config.model.device,
                revision=served.revision,
                max_context_tokens=config.model.max_context_tokens,
                backend=backend,
                # The native decoder does its own attention and would ignore another choice.
                replaces_decoder=config.model.attention in ("auto", "native"),
                form=form,
                progress=progress,
            )
        if loaded.decoder is not None:
            # Torch has little left to do, and its threads would spin on the cores that the kernels need.
            torch.set_num_threads(1)
        engine = assemble(loaded, config, progress, notify, served)
    # The objects made so far live to the end; without this, collections would go through them all and delay steps.
    gc.collect()
    gc.freeze()
    return engine


def assemble(
    loaded: LoadedModel,
    config: EngineConfig,
    progress: Progress,
    notify: Callable[[], None],
    served: ServedModel | None = None,
    step_costs: StepCosts | None = None,
) -> Engine:
    """An engine around a loaded model. `served`: where it came from; None: from nowhere, so that there is no tokenizer
    for grammars. `step_costs`: measured where None."""
    grammars = Grammars(None) if served is None else _grammars(served, loaded.spec, notify)
    served = served or ServedModel(config.model.model)
    spec, batch, block_size = loaded.spec, config.batch, config.kv.block_size
    backend = loaded.backend
    slots = loaded.adapter_slots(
        backend.lora(config.adapters.max_rank, config.lora_kernels), config.adapters.num_device_slots
    )
    argmax = backend.argmax()
    heads = HeadSlots(
        loaded, slots, backend.dense(), argmax=argmax, guesser=backend.medusa_guesser(loaded.head, loaded.dtype)
    )
    places = config.adapters
    has_adapters = bool(places.root or places.hub or places.buckets) or served.heads is not None
    drafts = load_drafts(config, loaded, served, progress)  # the KV cache takes most of what they leave
    capacity = capacity_of(config, loaded, progress, has_adapters=has_adapters)
    with fitting("steps beside the KV cache", loaded.device, NO_ROOM_FOR_STEPS):
        runner = ModelRunner(
            loaded,
            _kv_cache(loaded, capacity.num_blocks, block_size),
            make_attention(config.model.attention, backend, spec.layers, loaded.dtype),
            slots,
            Sampler(
                batch.max_running,
                spec.num_logits,
                loaded.device,
                argmax=argmax,
                masked_argmax=backend.masked_argmax(),
                noisy_argmax=backend.noisy_argmax(),
                draw=backend.draw(),
            ),
            max_rows=batch.max_running,
            states=loaded.state_memory(capacity.num_state_slots, capacity.num_spare_states),
        )
        if loaded.device.type == "cuda":
            runner.warm_up(batch.max_step_tokens, progress)
            if has_adapters:
                heads.warm_up()
        runner.capture(captured_shapes(config, backend), progress)
        step_costs = step_costs or measure_runner(
            runner,
            max_rows=batch.max_running,
            num_blocks=capacity.num_blocks,
            block_size=block_size,
            progress=progress,
        )
    manager = _manager(loaded, config.adapters, slots, heads, notify, served.heads)
    target = Target(loaded, served, runner, manager, heads, drafts)
    speculator = build_speculator(config, target, step_costs, progress)
    scheduler = _scheduler(loaded, config, capacity, manager)
    info = _model_info(loaded, config, served, capacity.max_context_tokens, speculator)
    return Engine(info, scheduler, manager, runner, speculator, grammars=grammars)


def _kv_cache(loaded: LoadedModel, num_blocks: int, block_size: int) -> KvCache:
    """Raises OutOfMemory where the system does not give the memory, such as under a limit of the address space."""
    num_bytes = num_blocks * kv_block_bytes(loaded.spec, block_size, loaded.dtype.itemsize)
    with fitting(f"{num_bytes / 2**20:,.0f} MiB of KV cache", loaded.device, "name fewer with --kv-memory"):
        return KvCache(loaded.spec, num_blocks, block_size, loaded.dtype, loaded.device)


def _scheduler(loaded: LoadedModel, config: EngineConfig, capacity: Capacity, manager: AdapterManager) -> Scheduler:
    batch = config.batch
    return Scheduler(
        SchedulerConfig(
            max_running=batch.max_running,
            max_step_tokens=batch.max_step_tokens,
            max_context_tokens=capacity.max_context_tokens,
            max_queued=batch.max_queued,
            max_queue_wait_s=batch.max_queue_wait_s,
            model_digest=loaded.model_id,
            rope=loaded.spec.rope,
        ),
        BlockPool(capacity.num_blocks, config.kv.block_size, prefix_caching=config.kv.prefix_caching),
        manager,
        frozenset(loaded.spec.eos_token_ids),
        StatePool(capacity.num_state_slots) if capacity.num_state_slots else None,
    )


def _model_info(
    loaded: LoadedModel,
    config: EngineConfig,
    served: ServedModel,
    max_context_tokens: int,
    speculator: Speculator,
) -> ModelInfo:
    form = FORMATS.get(config.model.quantize)
    return ModelInfo(
        model_id=loaded.model_id,
        model_type=loaded.model_type,
        dtype=loaded.dtype_name + (f", linears in {form.name}" if form is not None else ""),
        device=str(loaded.device),
        # Moshi embeds one token more than its head gives; options index scores by the tokens of a prompt.
        vocab_size=min(loaded.spec.vocab_size, loaded.spec.num_logits),
        max_context_tokens=max_context_tokens,
        max_lora_rank=config.adapters.max_rank,
        eos_token_ids=loaded.spec.eos_token_ids,
        speculation=speculator.kinds,
        base=served.base,
        base_revision=served.revision,
        own_adapters=() if served.heads is None else (MODEL_HEADS,),
        generation_defaults=generation_defaults(loaded.model),
        kv_block_tokens=config.kv.block_size,
        max_device_adapters=config.adapters.num_device_slots,
        hidden_size=loaded.spec.hidden_size,
        draft_models=speculator.draft_names,
    )


def _grammars(served: ServedModel, spec: ModelSpec, notify: Callable[[], None]) -> Grammars:
    serialized = TextTokenizer.from_pretrained(served.base, revision=served.revision).serialized()
    if serialized is None:
        return Grammars(None)
    try:
        from loraplex_server.grammars.checker import Checker

        tokenizer = LibraryTokenizer.of(serialized, spec.num_logits, spec.eos_token_ids)
        compiler = Compiler(tokenizer)
    except Exception as error:  # no library, or whatever it raises on tokenizers of kinds that it does not know
        log.warning("there are no grammars with this model's tokenizer: %s", error)
        return Grammars(None)
    return Grammars(compiler, notify, Checker(tokenizer))


def _manager(
    loaded: LoadedModel,
    config: AdaptersConfig,
    slots: AdapterSlots,
    heads: HeadSlots,
    notify: Callable[[], None],
    model_heads: Path | None,
) -> AdapterManager:
    """The adapter cache; what it puts into a slot is LoRA, heads, or both. `model_heads`: the model's own are there."""
    own = () if model_heads is None else (FolderSource(MODEL_HEADS, model_heads),)

    def install(slot: int, weights: AdapterWeights | None) -> None:
        slots.install(slot, weights)
        heads.install(slot, weights)

    return AdapterManager(
        AdapterCacheConfig(
            host_bytes=config.host_bytes,
            device_bytes=adapter_bytes(config.device_bytes, loaded.device),
            num_device_slots=config.num_device_slots,
            disk_bytes=config.disk_bytes,
            store_dir=config.store_dir,
            with_templates=config.templates,
            access_ttl_s=config.hub_access_s,
        ),
        make_source(config.root, own),
        loaded.base_targets(config.max_rank),
        loaded.device,
        install,
        notify,
        remote=_remote_source(config),
        watched=DirectorySource(config.root) if config.watch and config.root is not None else None,
    )


def _remote_source(config: AdaptersConfig) -> AdapterSource | None:
    if not config.hub and not config.buckets:
        return None
    hub: AdapterSource = ChainSource([])
    if config.hub:
        hosts = config.hub_redirect_hosts
        hub = HubSource(config.hub_endpoints, hub_token(), hosts, with_templates=config.templates)
    s3 = S3Source(config.buckets, with_templates=config.templates, unsigned=reads_unsigned())
    return RoutedSource({S3_SOURCE: s3}, hub)
