"""Heads inside a whole model or beside a LoRA."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.adapter_files import (
    DOWN_PROJ,
    PREFIX,
    Q_PROJ,
    VOCAB,
    base_targets,
    lora_config,
    lora_tensors,
    write_adapter,
)
from support.medusa_files import (
    HEADS_NAME,
    base_config,
    base_tensors,
    load,
    medusa_config,
    sequential_tensors,
    vllm_config,
    vllm_tensors,
    write_heads,
    write_shards,
)
from torch import Tensor

from loraplex_adapters.formats.medusa import MedusaModel, describe_medusa_model
from loraplex_adapters.sources.chain import make_source
from loraplex_adapters.sources.directory import DirectorySource, FolderSource, open_folder
from loraplex_adapters.weights import AdapterWeights
from loraplex_contracts.errors import (
    AdapterInvalid,
    AdapterNotFound,
    AdapterOutsideRoot,
    AdapterUnsupported,
    LoraplexError,
    SourceUnavailable,
)

INDEX = "model.safetensors.index.json"


def model_with_heads(prefix: str = "medusa_head.", rows: int | None = VOCAB) -> dict[str, Tensor]:
    return base_tensors() | sequential_tensors(4, 1, rows, prefix)


def sharded_model(folder: Path, tensors: dict[str, Tensor], num_shards: int = 3) -> Path:
    names = sorted(tensors)
    shards = [{n: tensors[n] for n in names[start::num_shards]} for start in range(num_shards)]
    return write_shards(folder, list(shards), base_config(medusa_num_heads=2, medusa_num_layers=1))


def check_heads(weights: AdapterWeights, num_heads: int, rows: int | None = None, seed: int = 0) -> None:
    expected = sequential_tensors(num_heads, 1, rows, seed=seed)
    assert len(weights.heads) == num_heads
    for idx, head in enumerate(weights.heads):
        assert torch.equal(head.layers[0].weight, expected[f"{idx}.0.linear.weight"])
        assert (head.projection is None) is (rows is None)
        assert rows is None or torch.equal(head.projection, expected[f"{idx}.1.weight"])


def check_factors(weights: AdapterWeights) -> None:
    assert set(weights.factors) == {Q_PROJ, DOWN_PROJ}
    for path, factors in weights.factors.items():
        assert torch.equal(factors.a, lora_tensors()[f"{PREFIX}{path}.lora_A.weight"])
        assert torch.equal(factors.b, lora_tensors()[f"{PREFIX}{path}.lora_B.weight"])
        assert factors.scale == 2.0


# --- C: heads in a whole model --------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["medusa_head.", "medusa_heads."])
@pytest.mark.parametrize("rows", [VOCAB, None])
@pytest.mark.parametrize("is_sharded", [False, True])
def test_heads_out_of_a_whole_model(prefix: str, rows: int | None, is_sharded: bool, tmp_path: Path) -> None:
    tensors = model_with_heads(prefix, rows)
    folder = tmp_path / "model"
    if is_sharded:
        sharded_model(folder, tensors)
    else:
        write_heads(folder, tensors, base_config(), "model.safetensors")
    with open_folder(folder) as files:
        assert describe_medusa_model(files) == MedusaModel("with_heads")
    imported, weights = load(FolderSource("model-heads", folder), "model-heads", base_targets(), tmp_path / "store")
    assert imported.key.kind == "medusa"
    check_heads(weights, 4, rows)


def test_only_the_shards_with_heads_are_opened(tmp_path: Path) -> None:
    heads = sequential_tensors(2, 1, None, "medusa_head.")
    write_shards(tmp_path / "c", [base_tensors(), heads], base_config())
    (tmp_path / "c" / "model-00001-of-00002.safetensors").write_bytes(b"not to be read")
    check_heads(load(DirectorySource(tmp_path), "c", base_targets(), tmp_path / "store")[1], 2)


def test_a_whole_model_without_heads_is_no_adapter(tmp_path: Path) -> None:
    write_heads(tmp_path / "c", base_tensors(), base_config(), "model.safetensors")
    with open_folder(tmp_path / "c") as files:
        assert describe_medusa_model(files).content == "none"
    with pytest.raises(AdapterInvalid, match="a whole model without Medusa heads"):
        load(DirectorySource(tmp_path), "c", base_targets(), tmp_path / "store")
    assert DirectorySource(tmp_path).list() == []


def test_a_tensor_among_the_heads_that_is_none_fails_by_name(tmp_path: Path) -> None:
    tensors = model_with_heads() | {"medusa_head.0.router.weight": torch.zeros(3)}
    write_heads(tmp_path / "c", tensors, base_config(), "model.safetensors")
    with pytest.raises(AdapterUnsupported, match=r"medusa_head\.0\.router\.weight"):
        load(DirectorySource(tmp_path), "c", base_targets(), tmp_path / "store")


def edited_index(folder: Path, **changes: Any) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] |= changes
    index["weight_map"] = {name: shard for name, shard in index["weight_map"].items() if shard is not None}
    (folder / INDEX).write_text(json.dumps(index))


W = "medusa_head.0.0.linear.weight"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({W: "../../../etc/passwd"}, "names the file '../../../etc/passwd', which is not there"),
        ({W: "/etc/passwd"}, "which is not there"),
        ({W: "config.json"}, "names the file 'config.json'"),
        ({W: "model-00009-of-00003.safetensors"}, "which is not there"),
        ({W: 7}, "no weight_map of names to files"),
        ({W: None}, f"disagree about '{W}'"),
        ({"medusa_head.9.0.linear.weight": "model-00001-of-00003.safetensors"}, "disagree about 'medusa_head.9"),
    ],
)
def test_indexes_that_lie(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    edited_index(sharded_model(tmp_path / "c", model_with_heads()), **changes)
    with pytest.raises(AdapterInvalid, match=r"model\.safetensors\.index\.json") as raised:
        load(DirectorySource(tmp_path), "c", base_targets(), tmp_path / "store")
    assert says in str(raised.value)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": "b", "a": "c"}}', "[" * 9999]
)
def test_indexes_that_are_none(text: str, tmp_path: Path) -> None:
    folder = sharded_model(tmp_path / "c", model_with_heads())
    (folder / INDEX).write_text(text)
    with pytest.raises(AdapterInvalid):
        load(DirectorySource(tmp_path), "c", base_targets(), tmp_path / "store")
    with open_folder(folder) as files, pytest.raises(AdapterInvalid):
        describe_medusa_model(files)
    assert DirectorySource(tmp_path).list() == ["c"]  # whoever asks for it hears what is wrong


# --- a directory that is given as the model -------------------------------------------------------------------------


def touch(folder: Path, *names: str, config: dict[str, Any] | None = None) -> Path:
    folder.mkdir()
    for name in names:
        (folder / name).write_bytes(b"")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("names", "config", "expected"),
    [
        ([HEADS_NAME], medusa_config(), MedusaModel("heads_only", "tiny-base")),
        (["medusa_lm_head.pt"], medusa_config(), MedusaModel("heads_only", "tiny-base")),
        ([HEADS_NAME], None, MedusaModel("heads_only")),
        (["model.safetensors"], vllm_config(), MedusaModel("heads_only")),
        ([INDEX], vllm_config(base_model_name_or_path="org/b"), MedusaModel("heads_only", "org/b")),
        ([HEADS_NAME, "model.safetensors"], base_config(), MedusaModel("with_heads")),
        ([HEADS_NAME, "pytorch_model.bin"], base_config(), MedusaModel("with_heads")),
        (["pytorch_model.bin"], base_config(), MedusaModel("none")),
        (["adapter_config.json", "adapter_model.safetensors"], None, MedusaModel("none")),
        ([], None, MedusaModel("none")),
        ([HEADS_NAME], medusa_config(base_model_name_or_path="x" * 1000), MedusaModel("heads_only")),
    ],
)
def test_what_a_directory_is(
    names: list[str], config: dict[str, Any] | None, expected: MedusaModel, tmp_path: Path
) -> None:
    with open_folder(touch(tmp_path / "m", *names, config=config)) as files:
        assert describe_medusa_model(files) == expected


def test_a_folder_is_what_the_operator_says_links_included(tmp_path: Path) -> None:
    """The Hub's cache is made of links."""
    blobs = write_heads(tmp_path / "blobs", sequential_tensors(), medusa_config())
    snapshot = tmp_path / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for name in (HEADS_NAME, "config.json"):
        (snapshot / name).symlink_to(blobs / name)
    (tmp_path / "link").symlink_to(snapshot)
    before = len(os.listdir("/proc/self/fd"))
    source = make_source(None, first=[FolderSource("heads", tmp_path / "link")])
    assert source.list() == ["heads"]
    check_heads(load(source, "heads", base_targets(), tmp_path / "store")[1], 3)
    with pytest.raises(AdapterNotFound):
        source.open("link")
    with pytest.raises(SourceUnavailable):
        FolderSource("heads", tmp_path / "nothing").open("heads")
    assert len(os.listdir("/proc/self/fd")) == before
    # In a root of adapters links that lead out of it are not followed.
    with pytest.raises(AdapterOutsideRoot):
        DirectorySource(tmp_path / "snapshots").open("abc").open(HEADS_NAME)


def test_listed_are_folders_that_hold_adapters(tmp_path: Path) -> None:
    write_heads(tmp_path / "a", sequential_tensors(), medusa_config())
    write_heads(tmp_path / "d", vllm_tensors(), vllm_config(), "model.safetensors")
    write_heads(tmp_path / "org" / "c", model_with_heads(), base_config(), "model.safetensors")
    write_heads(tmp_path / "base", base_tensors(), base_config(), "model.safetensors")
    touch(tmp_path / "pickled", "medusa_lm_head.pt")
    write_adapter(tmp_path / "lora")
    before = len(os.listdir("/proc/self/fd"))
    assert DirectorySource(tmp_path).list() == ["a", "d", "lora", "org/c", "pickled"]
    assert len(os.listdir("/proc/self/fd")) == before


# --- E: heads beside a LoRA -----------------------------------------------------------------------------------------


def beside(folder: Path) -> None:
    write_adapter(folder)
    write_heads(folder, sequential_tensors(4), medusa_config(4, version="2"))


def in_one_file(folder: Path) -> None:
    write_adapter(folder, tensors=lora_tensors() | sequential_tensors(4))
    (folder / "config.json").write_text(json.dumps(medusa_config(4)))


def in_the_heads_file(folder: Path) -> None:
    write_heads(folder, lora_tensors() | sequential_tensors(4), medusa_config(4))
    (folder / "adapter_config.json").write_text(json.dumps(lora_config()))


def in_a_models_file(folder: Path) -> None:
    write_heads(folder, lora_tensors() | sequential_tensors(4), medusa_config(4), "model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(lora_config()))


@pytest.mark.parametrize("write", [beside, in_one_file, in_the_heads_file, in_a_models_file])
def test_a_lora_and_heads(write: Any, tmp_path: Path) -> None:
    write(tmp_path / "e")
    imported, weights = load(DirectorySource(tmp_path), "e", base_targets(), tmp_path / "store")
    assert (imported.key.kind, imported.layout.max_rank, imported.layout.num_heads) == ("combined", 4, 4)
    assert weights.max_rank == 4
    check_factors(weights)
    check_heads(weights, 4)
    # One allocation, one key, however the files were cut.
    beside(tmp_path / "reference")
    assert load(DirectorySource(tmp_path), "reference", base_targets(), tmp_path / "other")[0].key == imported.key


def test_a_lora_with_own_projections_and_a_token_map(tmp_path: Path) -> None:
    write_adapter(tmp_path / "e")
    tokens = torch.tensor([3, 1, 2])
    write_heads(tmp_path / "e", vllm_tensors(2, rows=3, token_map=tokens), vllm_config(2))
    imported, weights = load(DirectorySource(tmp_path), "e", base_targets("bfloat16"), tmp_path / "store")
    assert imported.key.kind == "combined"
    head = weights.heads[1]
    assert head.token_ids is not None
    assert torch.equal(head.token_ids, tokens)
    assert head.projection is not None
    assert head.projection.dtype == torch.bfloat16


def test_a_lora_alone_does_not_care_for_its_base_models_configuration(tmp_path: Path) -> None:
    write_adapter(tmp_path / "plain")
    write_adapter(tmp_path / "x")
    (tmp_path / "x" / "config.json").write_text("no JSON at all")
    keys = [load(DirectorySource(tmp_path), n, base_targets(), tmp_path / n / "store")[0].key for n in ("plain", "x")]
    assert keys[0] == keys[1]
    assert keys[0].kind == "lora"


@pytest.mark.parametrize(
    ("write", "expected", "says"),
    [
        # A configuration without its weights: half an adapter.
        (
            lambda f: (write_heads(f, sequential_tensors()), (f / "adapter_config.json").write_text("{}")),
            AdapterInvalid,
            "there is an adapter_config.json, but no LoRA tensor",
        ),
        (
            lambda f: write_heads(f, lora_tensors() | sequential_tensors()),
            AdapterUnsupported,
            "no adapter_config.json says that it is a LoRA's",
        ),
        (
            lambda f: (write_adapter(f), write_heads(f, sequential_tensors() | {"x.lora_A.weight": torch.zeros(4, 4)})),
            AdapterInvalid,
            "medusa_lm_head.safetensors: 'x.lora_A.weight' is not a tensor of a Medusa head",
        ),
        (
            lambda f: (
                write_adapter(f, tensors=lora_tensors() | sequential_tensors()),
                write_heads(f, sequential_tensors()),
            ),
            AdapterInvalid,
            "is there twice",
        ),
        (lambda f: (write_adapter(f), write_heads(f, {"x": torch.zeros(1)})), AdapterInvalid, "'x' is not a tensor"),
    ],
)
def test_pairs_that_do_not_fit(write: Any, expected: type[LoraplexError], says: str, tmp_path: Path) -> None:
    write(tmp_path / "e")
    with pytest.raises(expected) as raised:
        load(DirectorySource(tmp_path), "e", base_targets(), tmp_path / "store")
    assert says in str(raised.value)
