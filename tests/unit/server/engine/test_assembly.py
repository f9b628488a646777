"""Assembly of an engine from its configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.engine_config import ADAPTERS, BLOCK_SIZE, config_of
from support.native_kernels import native_kernels
from support.native_models import native_model
from support.replay import calls_again
from support.sweep import default_config, make_model, shorten
from support.world import TinyWorld
from support.zoo import MAX_LEN
from torch import nn
from transformers import masking_utils

from loraplex_contracts.errors import FailedPrecondition, InvalidArgument, OutOfMemory, Unimplemented
from loraplex_contracts.request import CompletionEnd, Request, StoppingParams, Tokens
from loraplex_runtime.reports import Progress
from loraplex_server.backends.backend import Backend
from loraplex_server.backends.cpu import backend as cpu_backend
from loraplex_server.backends.cpu.native.library import Library, Loaded, NativeStatus
from loraplex_server.backends.cuda.graphs import GraphShape, StepGraphs, capture_steps, graph_shapes
from loraplex_server.backends.registry import choose_backend
from loraplex_server.config import AdaptersConfig, BatchConfig, EngineConfig, KvConfig, ModelConfig, SpeculationConfig
from loraplex_server.engine import assembly as build
from loraplex_server.engine import capacity
from loraplex_server.engine.pipe import Submit
from loraplex_server.layers.linear import AdaptedHead
from loraplex_server.layers.quantization import FORMATS, INT4, INT8, WeightFormat
from loraplex_server.layers.step import StepResources
from loraplex_server.model import loader, self_test
from loraplex_server.model.loaded_model import LoadedModel
from loraplex_server.model.medusa_model import ServedModel
from loraplex_server.model.tiny import tiny_config
from loraplex_server.speculation.build import Drafts
from loraplex_server.speculation.draft_model import Drafter


def test_a_cache_that_the_system_does_not_give(loaded: LoadedModel) -> None:
    with pytest.raises(
        OutOfMemory,
        match=r"cpu has no memory for [\d,]+ MiB of KV cache \([\d,]+ MiB are free\); name",
    ):
        build._kv_cache(loaded, 1 << 40, BLOCK_SIZE)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError(""), RuntimeError("CUDA error: out of memory")], ids=repr)
@pytest.mark.parametrize(
    ("owner", "name", "said"),
    [
        (nn.Module, "to", "cpu has no memory for the model .* --device, or serve a smaller model"),
        (loader, "probe_model", "cpu has no memory for the model .* --device, or serve a smaller model"),
        (self_test, "compare", "cpu has no memory for the model"),
        (masking_utils, "causal_mask_function", "cpu has no memory for the model"),
        (Drafter, "__init__", "cpu has no memory for draft model small .* --draft-kv-memory"),
        (build, "measure_runner", "cpu has no memory for steps beside the KV cache .* --kv-memory, or make steps"),
    ],
)
def test_where_the_memory_is_full_at_the_start(
    error: Exception, owner: object, name: str, said: str, tiny_world: TinyWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    model = str(tiny_world.model)
    speculation = SpeculationConfig(draft_models=(f"small={model}",))
    config = EngineConfig(ModelConfig(model, device="cpu"), cpu_kernels="torch", speculation=speculation)
    monkeypatch.setattr(owner, name, fail)
    with pytest.raises(OutOfMemory, match=said):
        build.build_engine(config, lambda text: None, lambda: None)


def test_the_cache_gets_its_share_of_what_draft_models_leave(
    loaded: LoadedModel, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = [4 * 9 * block_bytes]

    def load(config: EngineConfig, loaded: LoadedModel, served: ServedModel, progress: Progress) -> Drafts:
        free[0] -= 4 * 3 * block_bytes
        return Drafts()

    monkeypatch.setattr(build, "load_drafts", load)
    monkeypatch.setattr(capacity, "free_memory_bytes", lambda device: free[0])
    said: list[str] = []
    build.assemble(loaded, config_of(None), said.append, lambda: None).close()
    assert said[0].startswith(f"{6 * BLOCK_SIZE} tokens of KV cache")


@pytest.mark.parametrize(
    ("adapters", "has_any"),
    [
        (ADAPTERS, False),
        (replace(ADAPTERS, root=Path()), True),
        (replace(ADAPTERS, hub=True), True),
        (replace(ADAPTERS, s3_buckets=("a-bucket",)), True),
    ],
)
def test_where_adapters_may_come_from(
    adapters: AdaptersConfig, has_any: bool, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def blocks(*_: object, has_adapters: bool) -> int:
        asked.append(has_adapters)
        return 8

    monkeypatch.setattr(capacity, "kv_blocks", blocks)
    build.assemble(loaded, config_of(None, adapters=adapters), lambda text: None, lambda: None).close()
    assert asked == [has_any]


def test_what_cannot_be_captured_is_said_at_the_start(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def capture(
        backend: Backend, steps: StepResources, shapes: Sequence[GraphShape], progress: Callable[[str], None]
    ) -> StepGraphs | None:
        return capture_steps(steps, shapes, calls_again, progress)

    monkeypatch.setattr(Backend, "graph_shapes", lambda *_: graph_shapes(2, 0, 64))
    monkeypatch.setattr(Backend, "capture_steps", capture)
    said: list[str] = []
    build.assemble(loaded, config_of(1 << 20, max_running=2), said.append, lambda: None).close()
    assert [text for text in said if "graph" in text] == [
        "steps run without CUDA graphs, of which torch attention cannot be a part"
    ]


def test_the_context_that_is_promised_fits_the_cache(loaded: LoadedModel, block_bytes: int) -> None:
    """Longer prompts are refused at the door, and no answer ends before its max_tokens for want of blocks."""
    said: list[str] = []
    engine = build.assemble(loaded, config_of(5 * block_bytes, max_running=2), said.append, lambda: None)
    try:
        assert engine.info.max_context_tokens == 4 * BLOCK_SIZE < MAX_LEN
        assert any("--kv-memory" in text and str(MAX_LEN) in text for text in said)
        stopping = StoppingParams(4 * BLOCK_SIZE - 5, ignore_eos=True)
        engine.handle(Submit(Request("r", (5, 6, 7, 8, 9), stopping)))
        events = [event for _ in range(100) if (batch := engine.turn()) is not None for event in batch.events]
        assert any(isinstance(event, CompletionEnd) for event in events)
        num_tokens = sum(len(event.token_ids) for event in events if isinstance(event, Tokens))
        assert num_tokens == 4 * BLOCK_SIZE - 5
        assert engine.integrity_report() == ""
    finally:
        engine.close()


def test_a_cache_that_is_large_enough_changes_nothing(loaded: LoadedModel) -> None:
    said: list[str] = []
    engine = build.assemble(loaded, config_of(1 << 20, max_running=2), said.append, lambda: None)
    engine.close()
    assert engine.info.max_context_tokens == MAX_LEN
    assert not any("--kv-memory" in text for text in said)


def library_or(reason: str) -> Loaded:
    if reason:
        return Loaded(None, NativeStatus(False, reason, ""))
    return Loaded(Library(None, Path("a library")), NativeStatus(True, "", "avx512"))


@pytest.mark.parametrize(
    ("wanted", "device", "reason", "is_used", "says"),
    [
        ("auto", "cpu", "", True, "native CPU kernels for avx512"),
        ("auto", "cpu", "it rains", False, "no native CPU kernels, torch does their work: it rains"),
        ("native", "cpu", "", True, "native CPU kernels for avx512"),
        ("torch", "cpu", "", False, ""),
    ],
)
def test_cpu_kernels(
    wanted: str, device: str, reason: str, is_used: bool, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_backend, "load", lambda: library_or(reason))
    monkeypatch.setattr(cpu_backend, "NativeKernels", lambda library, num_threads: object())
    said: list[str] = []
    backend = choose_backend(device, cpu_kernels=wanted, num_threads=1, progress=said.append)
    assert backend.multiplies_few_bits == is_used
    assert said == [says] * bool(says)


def test_cpu_kernels_that_must_be_native_and_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_backend, "load", lambda: library_or("it rains"))
    config = EngineConfig(ModelConfig("m", device="cpu"), cpu_kernels="native")
    with pytest.raises(InvalidArgument, match="--cpu-kernels native: it rains; with --cpu-kernels auto torch"):
        build.build_engine(config, lambda text: None, lambda: None)  # before the model is looked for


@pytest.mark.parametrize(
    ("config", "flag"),
    [
        (EngineConfig(ModelConfig("m", device="cpu", attention="triton")), "--attention"),
        (EngineConfig(ModelConfig("m", device="cpu", attention="native"), cpu_kernels="torch"), "--attention"),
        (EngineConfig(ModelConfig("m", device="cpu"), lora_kernels="punica"), "--lora-kernels"),
    ],
)
def test_kernels_that_cannot_be_used_are_refused_before_the_model_is_looked_for(
    config: EngineConfig, flag: str
) -> None:
    with pytest.raises(InvalidArgument, match=flag) as caught:
        build.build_engine(config, lambda text: None, lambda: None)
    assert caught.value.field == flag


def test_a_store_that_cannot_be_kept_is_refused_first(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    config = EngineConfig(ModelConfig("m", device="cpu"), adapters=AdaptersConfig(store_dir=tmp_path / "file"))
    with pytest.raises(FailedPrecondition, match=r"the adapter store .* cannot be used: .*--adapter-store"):
        build.build_engine(config, lambda text: None, lambda: None)  # before the model is looked for


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_weights_of_few_bits_are_for_cpus(name: str) -> None:
    backend = choose_backend("cuda", progress=lambda text: pytest.fail(text))
    with pytest.raises(Unimplemented, match=f"--quantize {name} is there for the CPU only, not for cuda"):
        backend.check_quantize(FORMATS[name])


def test_a_gpu_needs_no_cpu_kernels() -> None:
    backend = choose_backend("cuda", cpu_kernels="native", num_threads=1, progress=lambda text: pytest.fail(text))
    assert not backend.multiplies_few_bits


@pytest.fixture(scope="module")
def stackable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model whose layers the native kernels compute in one call."""
    native_kernels()  # or skip
    folder = tmp_path_factory.mktemp("model")
    native_model("llama").save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("attention", "is_stack", "name"), [("auto", True, "native"), ("native", True, "native"), ("torch", False, "torch")]
)
def test_the_attention_that_is_asked_for_is_the_one_that_runs(
    attention: str, is_stack: bool, name: str, stackable: Path, tmp_path: Path
) -> None:
    """A stack of layers attends by itself, so there is none where it may not."""
    config = config_on_cpu(stackable, tmp_path, attention)
    engine = build.build_engine(config, lambda text: None, lambda: None)
    try:
        runner = engine._runner
        assert (runner._loaded.decoder is not None) == is_stack
        assert runner._attention.name == name
    finally:
        engine.close()


def test_the_vocabulary_is_what_the_head_gives(tmp_path: Path) -> None:
    """Moshi embeds one token more, at which a prompt's penalties would change another request's scores."""
    model = make_model(tiny_config(default_config("moshi"), amend=shorten))
    model.save_pretrained(tmp_path / "model")
    engine = build.build_engine(config_on_cpu(tmp_path / "model", tmp_path, "auto"), lambda text: None, lambda: None)
    engine.close()
    num_embedded = engine._runner._loaded.spec.vocab_size
    assert engine.info.vocab_size == model.config.vocab_size == num_embedded - 1


@pytest.mark.parametrize("form", [INT8, INT4], ids=["int8", "int4"])
def test_weights_of_few_bits(form: WeightFormat, stackable: Path, tmp_path: Path) -> None:
    config = config_on_cpu(stackable, tmp_path, "auto")
    said: list[str] = []
    config = replace(config, model=replace(config.model, quantize=form.name))
    engine = build.build_engine(config, said.append, lambda: None)
    engine.close()
    assert f"loading {stackable}, linears in {form.words}" in said
    assert engine.info.dtype == f"float32, linears in {form.name}"
    stack = engine._runner._loaded.decoder
    assert stack is not None
    assert stack.shape.format is form
    assert engine._runner._loaded.base_targets(8).weight_format == form.name


def test_weights_of_few_bits_without_native_kernels(stackable: Path, tmp_path: Path) -> None:
    config = replace(config_on_cpu(stackable, tmp_path, "auto"), cpu_kernels="torch")
    said: list[str] = []
    engine = build.build_engine(
        replace(config, model=replace(config.model, quantize="int4")), said.append, lambda: None
    )
    engine.close()
    assert "without native CPU kernels --quantize int4 saves neither time nor memory: see loraplex doctor" in said
    head = engine._runner._loaded.head
    assert isinstance(head, AdaptedHead)
    weight = head.base.matrix()
    assert torch.equal(INT4.quantize(weight).widened(weight.dtype), weight)


def test_an_engine_gets_its_threads_whatever_ran_before_it(
    stackable: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch keeps one thread beside a stack of layers; the next engine gets its own number all the same."""
    monkeypatch.setattr(build, "default_num_threads", lambda: 3)
    made: list[int] = []
    real = cpu_backend.NativeKernels
    monkeypatch.setattr(cpu_backend, "NativeKernels", lambda library, num: made.append(num) or real(library, num))
    before = torch.get_num_threads()
    try:
        for attention, num_torch_threads in (("auto", 1), ("torch", 3), ("auto", 1)):
            config = config_on_cpu(stackable, tmp_path, attention)
            build.build_engine(config, lambda text: None, lambda: None).close()
            assert torch.get_num_threads() == num_torch_threads
        build.build_engine(replace(config, num_threads=2), lambda text: None, lambda: None).close()
    finally:
        torch.set_num_threads(before)
    assert made == [3, 3, 3, 2]


def config_on_cpu(model: Path, store: Path, attention: str) -> EngineConfig:
    return EngineConfig(
        ModelConfig(str(model), device="cpu", attention=attention),
        KvConfig(block_size=BLOCK_SIZE, memory_bytes=1 << 20),
        BatchConfig(2, 64),
        replace(ADAPTERS, store_dir=store),
    )
