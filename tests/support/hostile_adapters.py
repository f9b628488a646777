"""Adapters that are hostile or broken, and what each is refused with."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from loraplex_contracts.errors import (
    AdapterInvalid,
    AdapterNotFound,
    AdapterOutsideRoot,
    AdapterUnsupported,
    BaseMismatch,
    LoraplexError,
    NonFinite,
    RankLimit,
    ShapeMismatch,
    UnsafeFormat,
)
from support.adapter_files import (
    DOWN_PROJ,
    HIDDEN,
    PREFIX,
    Q_PROJ,
    lora_config,
    lora_tensors,
    safetensors_bytes,
    write_adapter,
)
from support.medusa_files import (
    HEADS_NAME,
    base_config,
    base_tensors,
    medusa_config,
    sequential_tensors,
    vllm_tensors,
    write_heads,
    write_shards,
)

Q_A = f"{PREFIX}{Q_PROJ}.lora_A.weight"


class Trap:
    """Leaves a trace when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.trace,))


def with_value(value: float, name: str = Q_A, where: tuple[int, int] = (0, 0)) -> dict[str, Tensor]:
    tensors = lora_tensors()
    tensors[name][where] = value
    return tensors


def weights(folder: Path, change: Callable[[bytes], bytes]) -> None:
    write_adapter(folder)
    path = folder / "adapter_model.safetensors"
    path.write_bytes(change(path.read_bytes()))


def config(folder: Path, text: bytes) -> None:
    write_adapter(folder)
    (folder / "adapter_config.json").write_bytes(text)


def heads(
    folder: Path, tensors: Mapping[str, Tensor] | None = None, change: Callable[[bytes], bytes] | None = None
) -> None:
    write_heads(folder, tensors or sequential_tensors(), medusa_config())
    if change is not None:
        path = folder / HEADS_NAME
        path.write_bytes(change(path.read_bytes()))


def pickled(folder: Path, name: str, *others: str) -> None:
    write_adapter(folder)
    for other in ("adapter_model.safetensors", *others):
        (folder / other).unlink()
    (folder / name).write_bytes(pickle.dumps(Trap(folder / "was-run")))


def only(folder: Path, *names: str) -> None:
    write_adapter(folder)
    for path in folder.iterdir():
        if path.name not in names:
            path.unlink()


def linked(folder: Path, name: str, make: bool = True) -> None:
    if make:
        write_adapter(folder)
    outside = folder.parent.parent / "outside"
    outside.mkdir(exist_ok=True)
    (folder / name).replace(outside / name)
    (folder / name).symlink_to(outside / name)


def instead(folder: Path, make: Callable[[Path], object]) -> None:
    write_adapter(folder)
    (folder / "adapter_model.safetensors").unlink()
    make(folder / "adapter_model.safetensors")


def linked_folder(folder: Path) -> None:
    write_adapter(folder.parent.parent / "outside" / "secret")
    folder.symlink_to(folder.parent.parent / "outside" / "secret")


OVERLAP = safetensors_bytes(
    {
        Q_A: {"dtype": "F32", "shape": [4, HIDDEN], "data_offsets": [0, 256]},
        Q_A.replace("_A", "_B"): {"dtype": "F32", "shape": [HIDDEN, 4], "data_offsets": [128, 384]},
    },
    bytes(384),
)
# A header that claims a huge tensor: refused from the header, long before anybody allocates it.
HUGE_RANK = safetensors_bytes(
    {
        Q_A: {"dtype": "F32", "shape": [1 << 30, HIDDEN], "data_offsets": [0, (1 << 34) * 4]},
    },
    b"",
)

Spoil = Callable[[Path], object]
# By what is wrong: writes the folder (`Path`), and the class of the refusal.
CASES: dict[str, tuple[Spoil, type[LoraplexError]]] = {
    "nothing there": (lambda f: None, AdapterNotFound),
    "no weights": (lambda f: only(f, "adapter_config.json"), AdapterInvalid),
    "no configuration": (lambda f: only(f, "adapter_model.safetensors"), AdapterInvalid),
    "an empty folder": (lambda f: f.mkdir(), AdapterInvalid),
    "a file in the folder's place": (lambda f: f.write_text("x"), AdapterNotFound),
    "a link out of the root": (linked_folder, AdapterOutsideRoot),
    "weights linked out of the root": (lambda f: linked(f, "adapter_model.safetensors"), AdapterOutsideRoot),
    "configuration linked out of the root": (lambda f: linked(f, "adapter_config.json"), AdapterOutsideRoot),
    "a FIFO in the place of the weights": (lambda f: instead(f, os.mkfifo), AdapterInvalid),
    "a folder in the place of the weights": (lambda f: instead(f, Path.mkdir), AdapterInvalid),
    "a link to a device": (lambda f: instead(f, lambda path: path.symlink_to("/dev/zero")), AdapterOutsideRoot),
    "a link to nothing": (lambda f: instead(f, lambda path: path.symlink_to("nothing")), AdapterInvalid),
    "a link to itself": (lambda f: instead(f, lambda path: path.symlink_to(path.name)), AdapterInvalid),
    "a folder that is a link to nothing": (lambda f: f.symlink_to("nothing"), AdapterInvalid),
    "pickle .bin": (lambda f: pickled(f, "adapter_model.bin"), UnsafeFormat),
    "pickle .pt": (lambda f: pickled(f, "adapter_model.pt"), UnsafeFormat),
    "Medusa heads of one byte": (
        lambda f: (f.mkdir(), (f / "medusa_lm_head.safetensors").write_bytes(b"x")),
        AdapterInvalid,
    ),
    "heads cut in the data": (lambda f: heads(f, change=lambda d: d[:-1]), AdapterInvalid),
    "heads with a head too few": (
        lambda f: heads(f, {n: t for n, t in sequential_tensors().items() if not n.startswith("1.")}),
        AdapterInvalid,
    ),
    "heads for another base": (lambda f: heads(f, sequential_tensors(hidden=HIDDEN + 1)), ShapeMismatch),
    "heads with a stranger among them": (
        lambda f: heads(f, sequential_tensors() | {"extra": torch.zeros(1)}),
        AdapterUnsupported,
    ),
    "heads with NaN": (
        lambda f: heads(f, sequential_tensors() | {"2.0.linear.bias": torch.full((HIDDEN,), float("nan"))}),
        NonFinite,
    ),
    "heads with a token from elsewhere": (
        lambda f: heads(f, vllm_tensors(rows=1, token_map=torch.tensor([1 << 40]))),
        AdapterInvalid,
    ),
    "heads in a pickle": (lambda f: pickled(f, "medusa_lm_head.pt", "adapter_config.json"), UnsafeFormat),
    "heads linked out of the root": (
        lambda f: (heads(f), linked(f, "medusa_lm_head.safetensors", make=False)),
        AdapterOutsideRoot,
    ),
    "heads' configuration is no JSON": (
        lambda f: (heads(f), (f / "config.json").write_bytes(b"\xff{")),
        AdapterInvalid,
    ),
    "heads' configuration of 2 MB": (
        lambda f: (heads(f), (f / "config.json").write_bytes(b" " * (2 << 20))),
        AdapterInvalid,
    ),
    "a whole model": (
        lambda f: write_heads(f, base_tensors(), base_config(), "model.safetensors"),
        AdapterInvalid,
    ),
    "an index that points out of the root": (
        lambda f: (
            write_shards(f, [sequential_tensors(prefix="medusa_head.")], base_config()),
            (f / "model.safetensors.index.json").write_text(
                json.dumps({"weight_map": {"medusa_head.0.0.linear.weight": "../good/adapter_model.safetensors"}})
            ),
        ),
        AdapterInvalid,
    ),
    "a pickle named safetensors": (lambda f: weights(f, lambda d: pickle.dumps(Trap(f / "was-run"))), AdapterInvalid),
    "empty weights": (lambda f: weights(f, lambda d: b""), AdapterInvalid),
    "weights cut in the header": (lambda f: weights(f, lambda d: d[:50]), AdapterInvalid),
    "weights cut in the data": (lambda f: weights(f, lambda d: d[:-1]), AdapterInvalid),
    "bytes behind the data": (lambda f: weights(f, lambda d: d + b"\0"), AdapterInvalid),
    "overlapping tensors": (lambda f: weights(f, lambda d: OVERLAP), AdapterInvalid),
    "a header of 2^60 bytes": (lambda f: weights(f, lambda d: (1 << 60).to_bytes(8, "little") + d), AdapterInvalid),
    "a tensor larger than the file": (lambda f: weights(f, lambda d: HUGE_RANK), AdapterInvalid),
    "Git LFS pointer": (
        lambda f: weights(f, lambda d: b"version https://git-lfs.github.com/spec/v1\n"),
        AdapterInvalid,
    ),
    "configuration is no JSON": (lambda f: config(f, b"{"), AdapterInvalid),
    "configuration is a list": (lambda f: config(f, b"[]"), AdapterInvalid),
    "configuration nested deeply": (lambda f: config(f, b'{"a":' * 50_000), AdapterInvalid),
    "configuration of 2 MB": (lambda f: config(f, b" " * (2 << 20)), AdapterInvalid),
    "alpha is NaN": (
        lambda f: config(f, json.dumps(lora_config(lora_alpha=float("nan"))).encode()),
        AdapterInvalid,
    ),
    "alpha is infinite": (lambda f: config(f, json.dumps(lora_config(lora_alpha=1e400)).encode()), AdapterInvalid),
    "alpha is absurd": (lambda f: write_adapter(f, lora_alpha=1e30), AdapterInvalid),
    "alpha is 0": (lambda f: write_adapter(f, lora_alpha=0), AdapterInvalid),
    "r is 0": (lambda f: write_adapter(f, r=0), AdapterInvalid),
    "r is negative": (lambda f: write_adapter(f, r=-4), AdapterInvalid),
    "rank over the limit": (lambda f: write_adapter(f, rank=17), RankLimit),
    "rank by pattern over the limit": (lambda f: write_adapter(f, rank_pattern={"q_proj": 4096}), RankLimit),
    "rank other than the tensors'": (lambda f: write_adapter(f, r=8), ShapeMismatch),
    "wrong shape": (
        lambda f: write_adapter(f, tensors=lora_tensors() | {Q_A: torch.zeros(4, HIDDEN + 1)}),
        ShapeMismatch,
    ),
    "wrong dtype": (
        lambda f: write_adapter(f, tensors=lora_tensors() | {Q_A: torch.zeros(4, HIDDEN, dtype=torch.int32)}),
        AdapterUnsupported,
    ),
    "another base": (
        lambda f: write_adapter(f, tensors={n.replace("model.layers", "h"): t for n, t in lora_tensors().items()}),
        BaseMismatch,
    ),
    "a tensor that has no place": (
        lambda f: write_adapter(f, tensors=lora_tensors() | {"extra": torch.zeros(1)}),
        AdapterUnsupported,
    ),
    "half a pair": (
        lambda f: write_adapter(f, tensors={n: t for n, t in lora_tensors().items() if n != Q_A}),
        AdapterInvalid,
    ),
    "NaN in the first": (lambda f: write_adapter(f, tensors=with_value(float("nan"))), NonFinite),
    "Inf in the last": (
        lambda f: write_adapter(
            f, tensors=with_value(float("-inf"), f"{PREFIX}{DOWN_PROJ}.lora_B.weight", (HIDDEN - 1, 3))
        ),
        NonFinite,
    ),
    "DoRA": (lambda f: write_adapter(f, use_dora=True), AdapterInvalid),
    "modules_to_save": (lambda f: write_adapter(f, modules_to_save=["lm_head"]), AdapterInvalid),
    "a hostile pattern": (lambda f: write_adapter(f, rank_pattern={"(((a{99}){99}){99}){99}": 4}), AdapterUnsupported),
    "an endless pattern": (lambda f: write_adapter(f, rank_pattern={"a" * 10_000: 4}), AdapterUnsupported),
}
