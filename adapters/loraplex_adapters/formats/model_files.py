"""The files of one adapter as they are read: each opened once, headers checked. And heads inside a whole model.

A whole model is `model.safetensors`, or the shards that `model.safetensors.index.json` lists. File names in an index
are untrusted: only files that the source itself has listed are ever opened.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from loraplex_adapters.formats.detect import (
    MEDUSA_PICKLE_NAMES,
    MEDUSA_WEIGHTS_NAME,
    MODEL_INDEX_NAME,
    MODEL_WEIGHTS_NAME,
)
from loraplex_adapters.formats.medusa_config import (
    MAX_MODEL_CONFIG_BYTES,
    MODEL_CONFIG_NAME,
    MedusaConfig,
    parse_medusa_config,
)
from loraplex_adapters.formats.medusa_keys import MODEL_PREFIXES
from loraplex_adapters.formats.peft_config import CONFIG_NAME
from loraplex_adapters.io.safetensors_header import MAX_TENSORS, TensorInfo, read_header
from loraplex_adapters.io.source_files import AdapterFiles, SourceFile, read_all
from loraplex_adapters.io.strict_json import parse_object
from loraplex_contracts.errors import AdapterInvalid

# Of an adapter's directory. Parsing holds up the other threads of the process.
MAX_INDEX_BYTES = 4 << 20
# Of the model that the server is to serve, before it does: large mixtures of experts have indexes of 9 MB.
MAX_BASE_INDEX_BYTES = 64 << 20
MAX_SHARDS = 1024
_OTHER_MODEL_NAMES = ("pytorch_model.bin", "pytorch_model.bin.index.json")


class OpenedFiles:
    """One adapter's files, each opened once. Owns nothing: what it opens belongs to `files`."""

    def __init__(self, files: AdapterFiles) -> None:
        self._files = files
        self.names = files.names
        self.opened: dict[str, SourceFile] = {}

    def open(self, name: str) -> SourceFile:
        """As AdapterFiles.open."""
        if name not in self.opened:
            self.opened[name] = self._files.open(name)
        return self.opened[name]

    def header(self, name: str) -> dict[str, TensorInfo]:
        """The checked tensors of a safetensors file. Raises AdapterInvalid."""
        file = self.open(name)

        def read_at(offset: int, num_bytes: int) -> bytes:
            data = bytearray(num_bytes)
            file.read_into(memoryview(data), offset)
            return bytes(data)

        return read_header(read_at, file.num_bytes, name)

    def medusa_config(self) -> MedusaConfig | None:
        """What config.json says of heads. Raises AdapterInvalid when it is no JSON object."""
        if MODEL_CONFIG_NAME not in self.names:
            return None
        return parse_medusa_config(read_all(self.open(MODEL_CONFIG_NAME), MAX_MODEL_CONFIG_BYTES, MODEL_CONFIG_NAME))

    def check_unchanged(self) -> None:
        """Raises SourceUnavailable when one of them was written to since it was opened."""
        for file in self.opened.values():
            file.check_unchanged()


@dataclass(frozen=True, slots=True)
class MedusaModel:
    """What a directory that is given as the model is to Medusa.

    heads_only: no model is in it; `base_model` names one, or is empty where nothing does. with_heads: a whole model
    and its heads, which FolderSource gives out as an adapter. none: no heads at all.
    """

    content: Literal["none", "heads_only", "with_heads"]
    base_model: str = ""


def describe_medusa_model(directory_files: AdapterFiles) -> MedusaModel:
    """Looks at names, config.json, and the index or the header of the model; never at weights. Pickled heads count as
    heads: who loads them learns why they are refused. Raises AdapterInvalid when what it looks at is damaged."""
    files = OpenedFiles(directory_files)
    config = files.medusa_config()
    base_model = "" if config is None else config.base_model
    has_heads_file = not files.names.isdisjoint((MEDUSA_WEIGHTS_NAME, *MEDUSA_PICKLE_NAMES))
    has_model = not files.names.isdisjoint((MODEL_WEIGHTS_NAME, MODEL_INDEX_NAME, *_OTHER_MODEL_NAMES))
    if (config is not None and config.is_heads_only) or (has_heads_file and not has_model):
        return MedusaModel("heads_only", base_model)
    if has_model and (has_heads_file or _holds_heads(files)):
        return MedusaModel("with_heads", base_model)
    return MedusaModel("none")


def model_tensors(files: OpenedFiles, config: MedusaConfig | None) -> list[TensorInfo]:
    """What is the adapter's in files that are laid out like a whole model: everything where the configuration says
    that the model is the heads (or a LoRA's lies beside), else what stands under `medusa_head`."""
    is_all = CONFIG_NAME in files.names or (config is not None and config.is_heads_only)
    wanted: Callable[[str], bool] = (lambda name: True) if is_all else _is_heads
    found: list[TensorInfo] = []
    if MODEL_WEIGHTS_NAME in files.names:
        found = [tensor for name, tensor in files.header(MODEL_WEIGHTS_NAME).items() if wanted(name)]
    else:
        for shard, listed in _shards(files, wanted).items():
            tensors = {name: tensor for name, tensor in files.header(shard).items() if wanted(name)}
            odd = sorted(tensors.keys() ^ listed)
            if odd:
                raise AdapterInvalid(f"{MODEL_INDEX_NAME} and {shard} disagree about {odd[0][:160]!a}")
            found += tensors.values()
    if not found:
        raise AdapterInvalid("this is a whole model without Medusa heads; an adapter is a LoRA, Medusa heads, or both")
    return found


def _holds_heads(files: OpenedFiles) -> bool:
    if MODEL_WEIGHTS_NAME in files.names:
        return any(_is_heads(name) for name in files.header(MODEL_WEIGHTS_NAME))
    if MODEL_INDEX_NAME in files.names:
        return any(_is_heads(name) for name in _weight_map(files, MAX_BASE_INDEX_BYTES))
    return False


def _is_heads(name: str) -> bool:
    return name.startswith(MODEL_PREFIXES)


def _shards(files: OpenedFiles, wanted: Callable[[str], bool]) -> dict[str, set[str]]:
    """The names of wanted tensors, by the file that has them according to the index."""
    shards: dict[str, set[str]] = {}
    num_tensors = 0
    for name, shard in _weight_map(files, MAX_INDEX_BYTES).items():
        if wanted(name):
            num_tensors += 1
            if shard not in files.names or not shard.endswith(".safetensors"):
                raise AdapterInvalid(f"{MODEL_INDEX_NAME} names the file {shard[:160]!a}, which is not there")
            shards.setdefault(shard, set()).add(name)
    if num_tensors > MAX_TENSORS or len(shards) > MAX_SHARDS:
        raise AdapterInvalid(f"{MODEL_INDEX_NAME} has more than {MAX_TENSORS} tensors or {MAX_SHARDS} files to read")
    return shards


def _weight_map(files: OpenedFiles, max_bytes: int) -> Mapping[str, str]:
    fields = parse_object(
        read_all(files.open(MODEL_INDEX_NAME), max_bytes, MODEL_INDEX_NAME), MODEL_INDEX_NAME, max_bytes
    )
    weight_map = fields.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise AdapterInvalid(f"{MODEL_INDEX_NAME} has no weight_map of names to files")
    return weight_map
