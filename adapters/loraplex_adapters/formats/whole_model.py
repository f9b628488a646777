"""Medusa heads in files that are laid out like a whole model.

Such a model is `model.safetensors`, or the shards that `model.safetensors.index.json` lists. File names in an index are
untrusted: only files that the source itself has listed are ever opened.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from loraplex_adapters.formats.files import (
    CONFIG_NAME,
    MEDUSA_PICKLE_NAMES,
    MEDUSA_WEIGHTS_NAME,
    MODEL_INDEX_NAME,
    MODEL_WEIGHTS_NAME,
    OpenedFiles,
)
from loraplex_adapters.formats.medusa import MODEL_PREFIXES, MedusaConfig, read_medusa_config
from loraplex_adapters.io.safetensors_header import MAX_TENSORS, TensorInfo
from loraplex_adapters.io.source_files import AdapterFiles, parse_object, read_all
from loraplex_contracts.errors import AdapterInvalid

# Limit for an adapter's index. Parsing holds up the other threads of the process.
MAX_INDEX_BYTES = 4 << 20
# Limit for the served model's index, read before serving: large mixtures of experts have indexes of 9 MB.
MAX_BASE_INDEX_BYTES = 64 << 20
MAX_SHARDS = 1024
_OTHER_MODEL_NAMES = ("pytorch_model.bin", "pytorch_model.bin.index.json")


@dataclass(frozen=True, slots=True)
class MedusaModel:
    """The content of a directory that is given as the model.

    heads_only: heads without a model; `base_model` is the configuration's, or empty. with_heads: a whole model and its
    heads, which FolderSource gives out as an adapter. none: a model without heads.
    """

    content: Literal["none", "heads_only", "with_heads"]
    base_model: str = ""


def describe_medusa_model(directory_files: AdapterFiles) -> MedusaModel:
    """Looks at names, config.json, and the index or the header of the model; never at weights. Pickled heads count as
    heads: loading them says why they are refused. Raises AdapterInvalid when one of those files is damaged."""
    files = OpenedFiles(directory_files)
    config = read_medusa_config(files)
    base_model = "" if config is None else config.base_model
    has_heads_file = not files.names.isdisjoint((MEDUSA_WEIGHTS_NAME, *MEDUSA_PICKLE_NAMES))
    has_model = not files.names.isdisjoint((MODEL_WEIGHTS_NAME, MODEL_INDEX_NAME, *_OTHER_MODEL_NAMES))
    if (config is not None and config.is_heads_only) or (has_heads_file and not has_model):
        return MedusaModel("heads_only", base_model)
    if has_model and (has_heads_file or _holds_heads(files)):
        return MedusaModel("with_heads", base_model)
    return MedusaModel("none")


def model_tensors(files: OpenedFiles, config: MedusaConfig | None) -> list[TensorInfo]:
    """The adapter's tensors in files that are laid out like a whole model: all where the configuration says that the
    model is the heads, or where a LoRA's lies beside it; else those under `medusa_head`."""
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
