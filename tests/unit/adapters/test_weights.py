"""Layout of LoRA and heads in one allocation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.adapter_files import HIDDEN, base_targets, lora_tensors, write_adapter
from support.medusa_files import (
    load,
    medusa_config,
    random_tensor,
    sequential_tensors,
    vllm_tensors,
    write_heads,
)

from loraplex_adapters.formats.adapter import plan_adapter
from loraplex_adapters.formats.medusa import write_heads as write_payload
from loraplex_adapters.io.safetensors import PIECE_BYTES, PieceReader, PieceWriter
from loraplex_adapters.io.source_files import SourceFile
from loraplex_adapters.sources.directory import DirectorySource
from loraplex_adapters.weights import (
    AdapterLayout,
    BaseTargets,
    ClassifierShape,
    FactorShape,
    HeadsShape,
    TargetModule,
    place_adapter,
    weights_at,
)
from loraplex_contracts.adapters import AdapterKey, ClassifierInfo

LORA = [
    FactorShape("b", 3, 5, 7, 1 / 3),
    FactorShape("a", 1, 2, 3, 2.0),
    FactorShape("experts.down_proj", 2, 5, 3, 0.5, num_experts=4),
]
SHAPES = [
    HeadsShape(3, 1, 8),
    HeadsShape(5, 2, 24, has_bias=True),
    HeadsShape(1, 0, 8, num_projections=1, num_rows=9),
    HeadsShape(4, 1, 8, num_projections=4, num_rows=9),
    HeadsShape(4, 3, 8, has_bias=True, num_projections=1, num_rows=3, has_token_ids=True),
]


def test_invocation_tokens_are_part_of_the_layout() -> None:
    layout = replace(place_adapter("float32", LORA), invocation=(3, 1, 3))
    assert AdapterLayout.from_json(layout.to_json()) == layout
    assert "invocation" not in place_adapter("float32", LORA).to_json()
    for wrong in ("3", [-1], [True], [1.0]):
        with pytest.raises(ValueError, match="activated"):
            AdapterLayout.from_json(layout.to_json() | {"invocation": wrong})


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({}, ""),
        ({"init_lora_weights": "pissa"}, "it is made by PEFT's pissa initialisation"),
        ({"alora_invocation_tokens": [3], "task_type": "CAUSAL_LM"}, "it is active from its own tokens on"),
    ],
)
def test_adapters_that_are_no_plain_lora_stay_out_of_mixtures(fields: dict[str, Any], why: str, tmp_path: Path) -> None:
    write_adapter(tmp_path / "sql", **fields)
    with DirectorySource(tmp_path).open("sql") as files:
        layout = plan_adapter(files, base_targets()).layout
    assert layout.not_mixed.startswith(why)
    assert bool(layout.not_mixed) is bool(fields)
    assert AdapterLayout.from_json(layout.to_json()) == layout


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("lora", [LORA, []])
def test_a_layout_survives_its_json_and_nothing_overlaps(shape: HeadsShape, lora: Any) -> None:
    layout = place_adapter("bfloat16", lora, shape)
    assert AdapterLayout.from_json(layout.to_json()) == layout
    assert layout.kind == ("combined" if lora else "medusa")
    assert (layout.num_heads, layout.max_rank) == (shape.num_heads, 3 if lora else 0)
    storage = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    weights = weights_at(AdapterKey("medusa", "0" * 64), layout, storage)
    # Every element is written once: ones everywhere, and no byte of another tensor is hit.
    tensors = [t for f in weights.factors.values() for t in (f.a, f.b)]
    seen: set[int] = set()
    for head in weights.heads:
        found = [head.projection, head.token_ids, *(t for block in head.layers for t in (block.weight, block.bias))]
        for tensor in found:
            if tensor is not None and tensor.data_ptr() not in seen:
                seen.add(tensor.data_ptr())
                tensors.append(tensor)
    for tensor in tensors:
        assert tensor.is_contiguous()
        assert not tensor.view(torch.uint8).any(), "two tensors in the same place"
        tensor.view(torch.uint8).fill_(1)
    num_written = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    assert int(storage.sum()) == num_written
    num_regions = 2 * len(lora) + shape.num_layers * (1 + shape.has_bias) + shape.has_token_ids + 1
    assert layout.num_bytes - num_written < 64 * num_regions


@pytest.mark.parametrize("heads", [None, SHAPES[1], SHAPES[4]])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_classifier_lies_behind_all_else(heads: HeadsShape | None, has_bias: bool) -> None:
    info = ClassifierInfo(("yes", "no", "\u00e4"), per_token=has_bias)
    layout = place_adapter("float32", LORA, heads, ClassifierShape(info, 8, has_bias))
    assert AdapterLayout.from_json(layout.to_json()) == layout
    without = place_adapter("float32", LORA, heads)
    assert layout.kind == without.kind
    assert layout.num_bytes > without.num_bytes
    storage = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    classifier = weights_at(AdapterKey("lora", "0" * 64), layout, storage).classifier
    assert classifier is not None
    assert (classifier.info, classifier.weight.shape) == (info, (3, 8))
    assert (classifier.bias is not None) is has_bias
    classifier.weight.fill_(1.0)
    if classifier.bias is not None:
        assert not classifier.bias.any(), "two tensors in the same place"
        classifier.bias.fill_(1.0)
    assert not storage[: without.num_bytes].any()


def test_a_layout_with_more_than_this_release_knows_is_refused() -> None:
    """Whatever a later release adds there changes what is computed."""
    layout = place_adapter("float32", LORA, SHAPES[0], ClassifierShape(ClassifierInfo(("yes",)), 8)).to_json()
    assert AdapterLayout.from_json(layout).to_json() == layout
    new = {"new": 0}
    for part in (new, {"medusa": layout["medusa"] | new}, {"classifier": layout["classifier"] | new}):
        with pytest.raises(ValueError, match="release"):
            AdapterLayout.from_json(layout | part)


CLASSIFIER = {"labels": ["a"], "per_token": False, "hidden": 8, "bias": True}


@pytest.mark.parametrize(
    "change",
    [
        {"labels": []},
        {"labels": [1]},
        {"labels": "a"},
        {"per_token": 0},
        {"hidden": 0},
        {"hidden": True},
        {"bias": None},
    ],
)
def test_a_classifier_from_anywhere_else_is_refused(change: dict[str, Any]) -> None:
    assert ClassifierShape.from_json(CLASSIFIER).to_json() == CLASSIFIER
    with pytest.raises(ValueError, match="classifier"):
        AdapterLayout.from_json({"dtype": "float32", "factors": [], "classifier": CLASSIFIER | change})


VALID = {"heads": 3, "layers": 1, "hidden": 8, "bias": True, "projections": 3, "rows": 9, "token_ids": False}


@pytest.mark.parametrize(
    "change",
    [
        {"heads": 0}, {"heads": -1}, {"heads": True}, {"heads": 1 << 40}, {"heads": None}, {"layers": "1"},
        {"hidden": 0}, {"bias": 1}, {"projections": 2}, {"projections": 0}, {"rows": 0}, {"token_ids": None},
        {"projections": 0, "rows": 0, "token_ids": True},
    ],
)  # fmt: skip
def test_a_layout_from_anywhere_else_is_refused(change: dict[str, Any]) -> None:
    assert HeadsShape.from_json(VALID).to_json() == VALID
    with pytest.raises(ValueError, match="Medusa"):
        AdapterLayout.from_json({"dtype": "float32", "factors": [], "medusa": VALID | change})
    with pytest.raises(ValueError, match="Medusa"):
        AdapterLayout.from_json({"dtype": "float32", "factors": [], "medusa": [VALID]})


@pytest.mark.parametrize(
    ("dtype", "digest"),
    [
        ("float32", "e9c08295d675fff5f81a472c9d6a4c7c5525d66c5450f293dd18ef7ed7c07bde"),
        ("bfloat16", "07b14b51c366fb038bc4f17481890be4ddaafb82c0b69bea52646392296048de"),
    ],
)
def test_a_loras_digest_is_that_of_stores_from_before_there_were_heads(dtype: str, digest: str, tmp_path: Path) -> None:
    """Digests of the first release's code. Stores outlive versions, and names in other places refer to digests."""
    tensors = {
        name: torch.arange(tensor.numel(), dtype=torch.float32).reshape(tensor.shape) / 64
        for name, tensor in lora_tensors().items()
    }
    write_adapter(tmp_path / "x", tensors=tensors)
    imported, _ = load(DirectorySource(tmp_path), "x", base_targets(dtype), tmp_path / "store")
    assert imported.key == AdapterKey("lora", digest)


FACTS = TargetModule(
    "p", "experts", 2, 3, is_conv1d=True, has_bias=True, is_shared=True, is_lookup=False,
    weights=lambda: (torch.zeros(3, 2), None), weight_sha256="00", num_experts=4, swaps_features=True,
)  # fmt: skip


@pytest.mark.parametrize(
    ("targets", "digest"),
    [
        (base_targets(), "49af55fa19b3497acc8d95e1ee2976ca861a59808672a63591f088bd86114048"),
        (
            BaseTargets({"p": FACTS}, "m", "bfloat16", 8, 2, 3, parameters={"n": {"w": (2,)}}, tied_head="p"),
            "9f6b10e474e8a0edfe1b7bca2751b2fed04688bc02d4b83b10c4c27c024d624a",
        ),
    ],
)
def test_the_digest_of_a_base_model_outlives_releases(targets: BaseTargets, digest: str) -> None:
    """A store finds versions of adapters by it: leave a new fact out where it is at its default."""
    assert targets.digest == digest
    assert replace(targets, weight_format="int8").digest != digest, "contents made with rounded weights are others"


class Watched:
    """A file that remembers how much was read at once."""

    def __init__(self, file: SourceFile) -> None:
        self._file = file
        self.largest = 0

    @property
    def num_bytes(self) -> int:
        return self._file.num_bytes

    def read_into(self, buffer: memoryview, offset: int) -> None:
        self.largest = max(self.largest, buffer.nbytes)
        self._file.read_into(buffer, offset)

    def check_unchanged(self) -> None:
        self._file.check_unchanged()


@pytest.mark.parametrize("has_map", [False, True])
def test_large_heads_are_read_and_written_in_pieces(has_map: bool, tmp_path: Path) -> None:
    hidden, vocab = 256, 700
    if has_map:
        tokens = torch.arange(600).flip(0)
        tensors = {
            "blocks.0.layers.0.weight": random_tensor(hidden, hidden, seed=1),
            "lm_heads.0.weight": random_tensor(vocab, hidden, seed=2),
            "token_map": tokens,
        }
        expected = tensors["lm_heads.0.weight"][tokens]
    else:
        tensors = sequential_tensors(1, 1, vocab, hidden=hidden)
        expected = tensors["0.1.weight"]
    write_heads(tmp_path / "x", tensors, medusa_config(1))
    targets = BaseTargets({}, "tiny-base", "float64", 16, hidden, vocab)
    largest = 0
    data = bytearray()

    def write(piece: memoryview) -> None:
        nonlocal largest
        largest = max(largest, piece.nbytes)
        data.extend(piece)

    with DirectorySource(tmp_path).open("x") as files:
        plan = plan_adapter(files, targets)
        assert plan.heads is not None
        assert plan.layout.heads is not None
        watched = {name: Watched(file) for name, file in files.opened.items()}
        out = PieceWriter(write)
        write_payload(plan.heads, plan.layout, vocab, out, PieceReader(watched, plan.layout.dtype))
        out.pad_to(plan.layout.num_bytes)
    assert len(data) == plan.layout.num_bytes
    assert largest <= 2 * PIECE_BYTES
    assert max(file.largest for file in watched.values()) <= PIECE_BYTES
    weights = weights_at(AdapterKey("medusa", "0" * 64), plan.layout, torch.frombuffer(data, dtype=torch.uint8))
    assert weights.heads[0].projection is not None
    assert torch.equal(weights.heads[0].projection, expected.double())


def test_a_store_gives_heads_out_again_after_a_restart(tmp_path: Path) -> None:
    write_adapter(tmp_path / "x")
    write_heads(tmp_path / "x", vllm_tensors(2, rows=3, bias=True, token_map=torch.tensor([2, 0, 1])))
    targets, source = base_targets(), DirectorySource(tmp_path)
    first, _ = load(source, "x", targets, tmp_path / "store")
    (stored,) = (tmp_path / "store").glob("*.adapter")
    assert stored.name == f"combined-{first.key.digest}.adapter"
    again, weights = load(source, "x", targets, tmp_path / "store")  # another store object over the same files
    assert again == first
    assert len(weights.heads) == 2
    assert weights.num_bytes == first.layout.num_bytes >= (2 * (HIDDEN + 1) + 2 * 3) * HIDDEN * 4
