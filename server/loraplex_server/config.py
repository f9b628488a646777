"""Configuration of the worker: nested frozen dataclasses, checked once.

The commands' flags are made from these fields (`loraplex_runtime/flags.py`): a field's text is what `--help` says.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, Literal

from loraplex_contracts.adapters import check_adapter_id, check_id
from loraplex_contracts.errors import InvalidArgument
from loraplex_contracts.request import MAX_DRAFT_TOKENS
from loraplex_runtime.flags import LOGS, NETWORK, STARTING, check, option
from loraplex_runtime.listen_config import ListenConfig

MAX_HUB_ACCESS_S: Final = 86_400.0
MAX_LOOKUP_HISTORY: Final = 1 << 20  # tokens of one namespace
CPU_KERNELS: Final = ("auto", "native", "torch")
DTYPES: Final = ("float32", "bfloat16", "float16", "float64")
QUANTIZE: Final = ("none", "int8", "int4")
TOOL_FORMATS: Final = (
    "hermes", "qwen3_xml", "llama3_json", "mistral", "mistral_list", "deepseek", "harmony", "kimi", "json", "think",
)  # fmt: skip
ATTENTION: Final = ("auto", "flashinfer", "triton", "native", "torch")
LORA_KERNELS: Final = ("auto", "triton", "punica", "reference")
# PyTorch keeps a device's number in eight bits: cuda:256 would be cuda:0.
_DEVICE: Final = re.compile(r"(auto|cpu(:0)?|cuda(:(12[0-7]|1[01][0-9]|[1-9]?[0-9]))?)\Z")
_BUCKET: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,61}[A-Za-z0-9]\Z")
_ENDPOINT: Final = re.compile(r"https?://[A-Za-z0-9.-]+(:[0-9]{1,5})?\Z")


def check_device(name: str) -> None:
    """Raises InvalidArgument for a name that no device can have."""
    check(_DEVICE.match(name) is not None, "--device", "must be auto, cpu, cuda or cuda:N, with N from 0 to 127")


# Panels of the help. Options without one are those that matter first.
_model = partial(option, panel="Base model and kernels")
_memory = partial(option, panel="KV cache and states")
_batch = partial(option, panel="Batch and queue")
_adapters = partial(option, panel="Adapters")
_places = partial(option, panel="Adapters from the Hub and from buckets")
_drafting = partial(option, panel="Speculation: the same text, sooner")
_chat = partial(option, panel="Chats")
_network = partial(option, panel=NETWORK)
_logs = partial(option, panel=LOGS)
_ending = partial(option, panel=STARTING)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The base model: a directory or a Hub id."""

    model: str
    revision: str | None = _model(None, "Hub revision of the base model.", "--revision")
    dtype: str = _model("auto", "auto (as the checkpoint has it), float32, bfloat16, float16 or float64.", "--dtype")
    quantize: str = option(
        "none",
        "How the base model's linears are kept: none (as they are), int8 or int4: half or a quarter of the memory, and "
        "faster where reading weights takes the time; the model with its weights rounded so is served exactly. On CPUs "
        "only.",
        "--quantize",
    )
    device: str = option("auto", "auto (a GPU where there is one), cpu, cuda or cuda:N.", "--device")
    attention: str = _model(
        "auto",
        "Attention over the paged KV cache: auto (the best for device and model), or one that loraplex doctor names.",
        "--attention",
    )
    cuda_graphs: bool = _model(True, "On a GPU, capture steps as CUDA graphs at the start.", "--cuda-graphs")
    max_context_tokens: int | None = option(
        None, "Prompt plus output tokens of one request at most. Default: what the model was made for.", "--max-context"
    )


@dataclass(frozen=True, slots=True)
class KvConfig:
    """The paged KV cache."""

    block_size: int = _memory(16, "Tokens per KV block.", "--kv-block-size")
    memory_bytes: int | None = _memory(
        None, "Memory of the KV cache, such as 4GiB. Default: a share of what is free.", "--kv-memory", is_bytes=True
    )
    prefix_caching: bool = _memory(
        True, "Reuse the KV of prompts that begin alike (same adapter, same tenant).", "--prefix-caching"
    )
    state_bytes: int | None = _memory(
        None,
        "Memory for recurrent states, of models whose layers keep some: those of running completions, and snapshots "
        "for prompts that begin alike. Default: one to two thirds of the KV cache's, by the size of states.",
        "--state-memory",
        is_bytes=True,
    )


@dataclass(frozen=True, slots=True)
class BatchConfig:
    """Bounds of one step."""

    max_running: int = _batch(64, "Completions that run at the same time.", "--max-running")
    max_step_tokens: int = _batch(1024, "Tokens of one step; longer prompts go in chunks.", "--max-step-tokens")
    max_queued: int = _batch(4096, "Requests that may wait; more are refused with a retry hint.", "--max-queued")
    max_queue_wait_s: float = _batch(
        60.0,
        "Seconds that a request without a deadline may wait to begin; one that would wait for longer is refused with a "
        "retry hint. 0 lets it wait for ever.",
        "--max-queue-wait",
    )


@dataclass(frozen=True, slots=True)
class AdaptersConfig:
    """Sources of adapters and bounds of their memory."""

    root: Path | None = option(None, "Directory of adapters: adapter NAME is the folder NAME in it.", "--adapters")
    watch: bool = _adapters(
        False,
        "Load an adapter again when its folder under --adapters is replaced, once its files stay as they are.",
        "--watch-adapters",
    )
    hub: bool = _places(False, "Also fetch ids of the form org/name from the Hub.", "--hub-adapters")
    hub_endpoints: tuple[str, ...] = _places(
        (),
        "Address of the Hub that adapters may come from, the public one unless it is given. The first one is for plain "
        "names and gets HF_TOKEN; a load names another by its address. May be given several times.",
        "--hub-endpoint",
    )
    hub_redirect_hosts: tuple[str, ...] = _places(
        (),
        "Host that a Hub may redirect to for files, or a domain with a leading dot. Those of the public Hub are known. "
        "May be given several times.",
        "--hub-redirect-host",
    )
    hub_access_s: float = _places(
        600.0,
        "Seconds after which the Hub is asked again about a caller's own access, with the token of a new request.",
        "--hub-access-ttl",
    )
    s3_buckets: tuple[str, ...] = _places(
        (),
        "NAME or NAME=ENDPOINT: an S3-compatible bucket that loads may name, s3:NAME/PREFIX, at AWS or at the address "
        "of another server. Credentials are the worker's own. May be given several times.",
        "--s3-bucket",
    )
    max_rank: int = _adapters(256, "Largest LoRA rank that is accepted.", "--max-lora-rank")
    num_device_slots: int = _adapters(64, "Adapters on the device at the same time.", "--adapter-slots")
    device_bytes: int | None = _adapters(
        None,
        "Device memory for adapters. Default: 1GiB, or a twentieth of a GPU's memory where that is more.",
        "--adapter-device-memory",
        is_bytes=True,
    )
    host_bytes: int = _adapters(4 << 30, "Host memory for adapters.", "--adapter-host-memory", is_bytes=True)
    disk_bytes: int = _adapters(64 << 30, "Size of the adapter store on disk.", "--adapter-disk", is_bytes=True)
    store_dir: Path | None = _adapters(
        None, "Where the adapter store is kept. Default: a temporary one.", "--adapter-store"
    )
    templates: bool = _adapters(
        False,
        "Use the chat template and the response template that an adapter brings for its chats. They run in a process "
        "with limits.",
        "--adapter-templates",
    )
    preload: tuple[str, ...] = _adapters(
        (),
        "Adapter to load before the worker says that it is ready. What cannot be loaded is logged. May be given "
        "several times.",
        "--preload-adapters",
    )

    @property
    def buckets(self) -> dict[str, str]:
        """Endpoints of buckets by name, empty for AWS's. Raises InvalidArgument that names the flag."""
        found: dict[str, str] = {}
        for given in self.s3_buckets:
            name, equals, endpoint = given.partition("=")
            if not _BUCKET.match(name) or (equals and not _ENDPOINT.match(endpoint)):
                raise InvalidArgument(
                    f"--s3-bucket takes NAME or NAME=https://HOST, not {given!a}", field="--s3-bucket"
                )
            if name in found:
                raise InvalidArgument(f"--s3-bucket names {name} twice", field="--s3-bucket")
            found[name] = endpoint
        return found


@dataclass(frozen=True, slots=True)
class DraftModelConfig:
    """One draft model, put together from the flags that name it."""

    name: str
    model: str  # directory or Hub id
    tokenizer: str | None = None  # where it is not in the model's directory
    adapter: str | None = None  # a PEFT LoRA that it carries


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """The means of drafting, and the kind for requests that name none."""

    default_draft_tokens: int = option(
        0,
        "Guess up to this many tokens ahead per step for every request that does not say how to speculate: the same "
        "text, sooner. With 0, only for requests that ask for it or whose adapter brings Medusa heads.",
        "--speculate",
        "--speculative-tokens",
    )
    max_draft_tokens: int = _drafting(
        16, "Guess at most this many tokens per step, whatever a request asks for.", "--max-draft-tokens"
    )
    adaptive: bool = _drafting(
        True,
        "Guess fewer tokens where guesses miss or many requests run, instead of always the same number.",
        "--adaptive-drafts",
    )
    default_medusa: str = _drafting(
        "", "Adapter id of the Medusa heads that guess for requests whose adapter brings none.", "--default-medusa"
    )
    draft_models: tuple[str, ...] = _drafting(
        (),
        "NAME=MODEL: a smaller model (directory or Hub id) that requests may have guess for them, by this name. Its "
        "tokenizer may be another than the base model's. May be given several times.",
        "--draft-model",
    )
    draft_tokenizers: tuple[str, ...] = _drafting(
        (),
        "NAME=PATH: the tokenizer of draft model NAME, where it is not in the model's directory. May be given several "
        "times.",
        "--draft-tokenizer",
    )
    draft_adapters: tuple[str, ...] = _drafting(
        (), "NAME=PATH: a PEFT LoRA that draft model NAME carries. May be given several times.", "--draft-adapter"
    )
    draft_kv_bytes: int = _drafting(
        256 << 20, "Memory of each draft model's KV cache.", "--draft-kv-memory", is_bytes=True
    )
    lookup_history: int = _drafting(
        16_384,
        "Output tokens of each adapter, tenant and cache salt in which prompt lookup of later requests searches too; 0 "
        "searches only in a request's own text. At most 200 bytes each, and 64 times as many tokens in all.",
        "--lookup-history",
    )

    @property
    def drafts(self) -> tuple[DraftModelConfig, ...]:
        """The draft models, in the order in which they were given. Raises InvalidArgument that names the flag."""
        models = _by_name(self.draft_models, "--draft-model", "MODEL")
        tokenizers = _by_name(self.draft_tokenizers, "--draft-tokenizer", "PATH", models)
        adapters = _by_name(self.draft_adapters, "--draft-adapter", "PATH", models)
        return tuple(
            DraftModelConfig(name, model, tokenizers.get(name), adapters.get(name)) for name, model in models.items()
        )


def _by_name(given: tuple[str, ...], flag: str, what: str, known: dict[str, str] | None = None) -> dict[str, str]:
    """Values given as NAME=WHAT, by name. Each name comes once and, where some are `known`, is one of those."""
    values: dict[str, str] = {}
    for text in given:
        name, _, value = text.partition("=")
        if not (name and value):
            raise InvalidArgument(f"{flag} takes NAME={what}, not {text!a}", field=flag)
        check_id(name, field=flag)
        if name in values:
            raise InvalidArgument(f"{flag} names {name} twice; each name stands for one", field=flag)
        if known is not None and name not in known:
            there_is = f"there is {', '.join(known)}" if known else "there is none"
            raise InvalidArgument(f"{flag} names {name}, which no --draft-model declares; {there_is}", field=flag)
        values[name] = os.path.expanduser(value)  # a shell leaves the ~ behind NAME= alone
    return values


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything that the engine's process needs."""

    model: ModelConfig
    kv: KvConfig = field(default_factory=KvConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    adapters: AdaptersConfig = field(default_factory=AdaptersConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    num_threads: int | None = _model(
        None, "CPU threads of the engine. Default: all cores, within the container's CPU quota.", "--threads"
    )
    cpu_kernels: str = _model(
        "auto",
        "What computes on a CPU: native (C++ kernels that come with the package), torch, or auto: native where they "
        "can be used.",
        "--cpu-kernels",
    )
    lora_kernels: str = _model(
        "auto",
        "What computes LoRA adapters on a GPU: triton, punica (where that package is installed; not in CUDA graphs), "
        "reference (slow), or auto: the fastest that loraplex doctor names.",
        "--lora-kernels",
    )
    step_timeout_s: float | None = _batch(
        None,
        "Seconds that a step may take before the engine counts as hung: its requests end and it is killed. Default: a "
        "minute, or ten times what the slowest step so far lets expect where that is more.",
        "--step-timeout",
    )
    take_over_s: float | None = _ending(
        None,
        "Take the GPU for this worker alone, and give a worker that still ends there so many seconds to leave it and "
        "--adapter-store. Default: GPUs may be shared, and a store in use is refused.",
        "--take-over",
    )
    log_level: str = _logs("info", "debug, info, warning or error.", "--log-level")
    log_format: Literal["plain", "json"] = _logs("plain", "plain or json, an object a line.", "--log-format")

    def __post_init__(self) -> None:
        model, batch, adapters, drafts = self.model, self.batch, self.adapters, self.speculation
        check(1 <= self.kv.block_size <= 256, "--kv-block-size", "must be 1 to 256")
        check(batch.max_running >= 1, "--max-running", "must be at least 1")
        check(
            batch.max_step_tokens >= batch.max_running,
            "--max-step-tokens",
            "must be at least --max-running, so that every running request gets its token",
        )
        check(batch.max_queued >= 1, "--max-queued", "must be at least 1")
        check(batch.max_queue_wait_s >= 0, "--max-queue-wait", "must be a number from 0 on")
        check(adapters.num_device_slots >= 1, "--adapter-slots", "must be at least 1")
        check(
            adapters.device_bytes is None or adapters.device_bytes >= 1,
            "--adapter-device-memory",
            "must be at least 1 byte",
        )
        check(adapters.host_bytes >= 1, "--adapter-host-memory", "must be at least 1 byte")
        check(adapters.disk_bytes >= 1, "--adapter-disk", "must be at least 1 byte")
        for endpoint in adapters.hub_endpoints:
            check(
                bool(_ENDPOINT.match(endpoint)),
                "--hub-endpoint",
                f"must be an address such as https://HOST, not {endpoint!a}",
            )
        check(1 <= adapters.hub_access_s <= MAX_HUB_ACCESS_S, "--hub-access-ttl", "must be 1 second to a day")
        check(adapters.hub or not adapters.hub_endpoints, "--hub-endpoint", "is of use with --hub-adapters only")
        check(adapters.root is not None or not adapters.watch, "--watch-adapters", "is of use with --adapters only")
        check(1 <= adapters.max_rank <= 4096, "--max-lora-rank", "must be 1 to 4096")
        check(self.num_threads is None or self.num_threads >= 1, "--threads", "must be at least 1")
        check(self.step_timeout_s is None or self.step_timeout_s > 0, "--step-timeout", "must be a number above 0")
        check(self.take_over_s is None or self.take_over_s >= 0, "--take-over", "must be a number from 0 on")
        check(self.lora_kernels in LORA_KERNELS, "--lora-kernels", f"must be {', '.join(LORA_KERNELS)}")
        check_device(model.device)
        check(model.attention in ATTENTION, "--attention", f"must be {', '.join(ATTENTION[:-1])} or {ATTENTION[-1]}")
        check(self.cpu_kernels in CPU_KERNELS, "--cpu-kernels", f"must be {', '.join(CPU_KERNELS)}")
        check(model.quantize in QUANTIZE, "--quantize", f"must be {', '.join(QUANTIZE[:-1])} or {QUANTIZE[-1]}")
        check(model.dtype in ("auto", *DTYPES), "--dtype", f"must be auto, {', '.join(DTYPES[:-1])} or {DTYPES[-1]}")
        check(
            adapters.root is None or adapters.root.is_dir(),
            "--adapters",
            f"names {adapters.root}, which is not a directory",
        )
        check(
            1 <= drafts.max_draft_tokens <= MAX_DRAFT_TOKENS, "--max-draft-tokens", f"must be 1 to {MAX_DRAFT_TOKENS}"
        )
        check(drafts.default_draft_tokens >= 0, "--speculate", "must be at least 0")
        check(
            drafts.default_draft_tokens <= drafts.max_draft_tokens,
            "--speculate",
            f"must be at most --max-draft-tokens, {drafts.max_draft_tokens}",
        )
        check(drafts.draft_kv_bytes >= 1, "--draft-kv-memory", "must be at least 1 byte")
        check(
            0 <= drafts.lookup_history <= MAX_LOOKUP_HISTORY, "--lookup-history", f"must be 0 to {MAX_LOOKUP_HISTORY}"
        )
        for name in adapters.preload:
            check_adapter_id(name, field="--preload-adapters")
        if drafts.default_medusa:
            check_adapter_id(drafts.default_medusa, field="--default-medusa")
        _ = drafts.drafts, adapters.buckets  # raises for flags that do not fit together


@dataclass(frozen=True, slots=True)
class ChatConfig:
    """Templates: how chats become prompts, and texts become messages."""

    template: Path | None = _chat(
        None, "Chat template (Jinja), in the place of the tokenizer's own.", "--chat-template"
    )
    response_template: Path | None = _chat(
        None,
        "Response template (JSON, as Transformers defines it) that separates reasoning and tool calls from the rest of "
        "an answer, in the place of the tokenizer's own.",
        "--response-template",
    )
    tool_format: str = _chat(
        "auto",
        "How the model writes reasoning and tool calls, where there is no response template: auto (by the chat "
        f"template), none (all is content), or one of {', '.join(TOOL_FORMATS)}.",
        "--tool-format",
    )

    request_templates: bool = _chat(
        False,
        "Let a request bring a chat template. It runs in a process with limits.",
        "--request-templates",
        "--trust-request-chat-template",
    )

    def __post_init__(self) -> None:
        known = ("auto", "none", *TOOL_FORMATS)
        check(self.tool_format in known, "--tool-format", f"must be one of {', '.join(known)}")
        for path, flag in ((self.template, "--chat-template"), (self.response_template, "--response-template")):
            check(path is None or path.is_file(), flag, f"names {path}, which is not a file")


@dataclass(frozen=True, slots=True)
class WorkerConfig(ListenConfig):
    """One worker: an engine and the gRPC server in front of it."""

    engine: EngineConfig
    chat: ChatConfig = field(default_factory=ChatConfig)
    max_unread_tokens: int = _network(16384, "Tokens buffered for a slow reader before it is cut off.", "--max-unread")
    max_stream_wait_s: float = _network(
        0.2,
        "Seconds that tokens of a stream may wait to be sent with the next ones, when sending each at once would take "
        "too much of the CPU; 0 sends them as they come.",
        "--stream-wait",
    )
    # SHA-256 of the token of the one router that may call, in the place of a credentials file.
    router_digest: str = ""

    def __post_init__(self) -> None:
        ListenConfig.__post_init__(self)
        check(self.max_unread_tokens >= 1, "--max-unread", "must be at least 1")
        check(self.max_stream_wait_s >= 0, "--stream-wait", "must be a number from 0 on")


def hub_token() -> str | None:
    """The operator's Hub token."""
    return os.environ.get("HF_TOKEN")


def reads_unsigned() -> bool:
    """True if buckets are asked without credentials."""
    return os.environ.get("AWS_SKIP_SIGNATURE", "").lower() in ("1", "true", "yes")


def bare_environment() -> dict[str, str]:
    """The environment of children that work on what a user wrote: without tokens, and with a thread for each library,
    since libraries reserve memory for each of their threads."""
    tokens = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "LORAPLEX_TOKEN")
    kept = {name: value for name, value in os.environ.items() if name not in tokens and not name.startswith("AWS_")}
    return kept | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
