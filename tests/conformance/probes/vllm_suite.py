"""vLLM's online tests, with this server where they start theirs."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import openai
import suite
from calls import facts
from server import Server
from tokenizers import Tokenizer

WORLD = Path(facts.vllm_folder)
# Repositories of the Hub that the tests download: adapters of the tiny model.
ADAPTERS = {
    "charent/self_cognition_Alice": "a000",
    "Jackmin108/Qwen3-0.6B-Meow-LoRA": "a001",
    "Jackmin108/Qwen3-0.6B-Woof-LoRA": "a002",
}
# vLLM's flags that have a counterpart here. The others are about its memory, types and parsers.
FLAGS = {"--max-lora-rank": "--max-lora-rank", "--max-cpu-loras": "--adapter-slots", "--max-num-seqs": "--max-running"}


class RemoteOpenAIServer:
    """`loraplex serve` in place of `vllm serve`."""

    def __init__(self, model: str, args: Sequence[str], *, env_dict: Mapping[str, str] | None = None) -> None:
        if "--watermark-config" in args:
            raise NotImplementedError("watermarks")
        folder = Path(tempfile.mkdtemp())
        self.adapters = folder / "adapters"
        self.adapters.mkdir()
        ours = ["--served-model-name", model, "--adapters", str(self.adapters)]
        for flag, value in pairwise(args):
            if flag in FLAGS:
                ours += [FLAGS[flag], value]
            elif flag == "--lora-modules":
                name, path = _lora_module(value)
                shutil.copytree(path, self.adapters / name)
        if "--no-enable-prefix-caching" in args:
            ours.append("--no-prefix-caching")
        if "VLLM_ALLOW_RUNTIME_LORA_UPDATING" in (env_dict or {}):
            ours.append("--http-admin")
        self._server = Server(WORLD / "model", *ours)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.end()

    def get_async_client(self) -> openai.AsyncOpenAI:
        client = _Client(base_url=f"{self._server.url}/v1", api_key="token", max_retries=0, timeout=120)
        client.adapters = self.adapters
        return client


class _Client(openai.AsyncOpenAI):
    """Puts an adapter's folder below --adapters under the adapter's name before the server is told to load it: adapters
    come from there. A path of nothing is sent as it is."""

    adapters: Path

    async def post(self, path: str, *, body: Any = None, **more: Any) -> Any:
        if path == "load_lora_adapter" and Path(body["lora_path"]).is_dir():
            folder = self.adapters / body["lora_name"]
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(body["lora_path"], folder)
            body = {**body, "lora_path": str(folder)}
        return await super().post(path, body=body, **more)


def _lora_module(value: str) -> tuple[str, str]:
    """Name and path of NAME=PATH, or of a JSON object."""
    if value.startswith("{"):
        row = json.loads(value)
        return row["name"], row["path"]
    name, _, path = value.partition("=")
    return name, path


class _Hub:
    def snapshot_download(self, repo_id: str) -> str:
        return str(WORLD / "adapters" / ADAPTERS[repo_id])


class _OfVllm:
    """A class of vLLM's own. The tests of it are left out."""


def _tokenizer(tokenizer_name: str) -> Tokenizer:
    return Tokenizer.from_file(str(WORLD / "model" / "tokenizer.json"))


def _module(name: str, **content: Any) -> None:
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        sys.modules.setdefault(".".join(parts[:end]), ModuleType(".".join(parts[:end])))
    vars(sys.modules[name]).update(content)


_module("tests.utils", RemoteOpenAIServer=RemoteOpenAIServer, ROCM_EXTRA_ARGS=[])
_module("vllm.transformers_utils.repo_utils", hf_api=_Hub)
_module("vllm.entrypoints.openai.completion.protocol", CompletionRequest=_OfVllm)
_module("vllm.sampling_params", SamplingParams=_OfVllm)
_module("vllm.tokenizers", get_tokenizer=_tokenizer)

if __name__ == "__main__":
    sys.exit(suite.run("vllm"))
