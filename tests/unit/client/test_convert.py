"""Command `loraplex adapters convert`: pickles of users and of attackers."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import socket
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.adapter_files import VOCAB, base_targets
from support.medusa_files import base_config, load, sequential_tensors, vllm_config, vllm_tensors, write_heads
from support.world import TinyWorld
from torch import Tensor

from loraplex.cli.main import main
from loraplex_adapters.sources.directory import DirectorySource
from loraplex_contracts.errors import AdapterInvalid, InvalidArgument, UnsafeFormat
from loraplex_runtime.limited_process import LimitedProcess, Limits
from loraplex_server.cli import convert as converter
from loraplex_server.cli.convert import convert_adapter
from loraplex_server.config import bare_environment

Capture = pytest.CaptureFixture[str]
WEIGHTS = "adapter_model.safetensors"


def convert(folder: Path, **options: Any) -> Path:
    out = folder.with_name("converted")
    convert_adapter(folder, out, progress=lambda text: nullcontext(), **options)
    return out


@pytest.fixture
def pickled(tiny_world: TinyWorld, tmp_path: Path) -> Path:
    """An adapter of the world with its weights in a pickle, as PEFT wrote them once."""
    folder = Path(shutil.copytree(tiny_world.adapters / tiny_world.names[0], tmp_path / "pickled"))
    torch.save(load_file(folder / WEIGHTS), folder / "adapter_model.bin")
    (folder / WEIGHTS).unlink()
    return folder


def test_a_lora_and_heads(pickled: Path, tiny_world: TinyWorld, tmp_path: Path, capsys: Capture) -> None:
    (pickled / "optimizer.pt").write_bytes(b"not wanted")
    assert main(["adapters", "verify", str(pickled), "--base", str(tiny_world.model)]) == 1
    assert "loraplex adapters convert DIR --out DIR" in capsys.readouterr().err
    out = tmp_path / "out"
    assert main(["adapters", "convert", str(pickled), "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["converted"] == [
        {"from": "adapter_model.bin", "to": WEIGHTS, "tensors": 28}
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "pickled"]
    assert {WEIGHTS, "adapter_config.json"} <= {path.name for path in out.iterdir()}
    assert not (out / "optimizer.pt").exists()
    original = load_file(tiny_world.adapters / tiny_world.names[0] / WEIGHTS)
    made = load_file(out / WEIGHTS)
    assert made.keys() == original.keys()
    assert all(torch.equal(made[name], original[name]) for name in made)
    assert main(["adapters", "verify", str(out), "--base", str(tiny_world.model)]) == 0
    assert main(["adapters", "convert", str(pickled), "--out", str(out)]) == 2
    assert "exists already" in capsys.readouterr().err


class Evil:
    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self._marker}",)


def test_code_is_never_run(pickled: Path, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    torch.save({"a": torch.zeros(1), "b": Evil(marker)}, pickled / "adapter_model.bin")
    with pytest.raises(UnsafeFormat, match=r"asks for 'posix.system'.*nothing of it was run"):
        convert(pickled)
    assert [path.name for path in tmp_path.iterdir()] == ["pickled"]


@pytest.mark.slow
def test_expansion_without_end(pickled: Path, tmp_path: Path) -> None:
    """A few bytes that ask for a tebibyte, and a file that takes longer than it may."""
    bomb = b"\x80\x02cbuiltins\nbytearray\n(\x8a\x06" + (1 << 40).to_bytes(6, "little") + b"tR."
    legacy = [pickle.dumps(value, 2) for value in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True})]
    (pickled / "adapter_model.bin").write_bytes(b"".join(legacy) + bomb)
    with pytest.raises(AdapterInvalid, match=r"cannot be read within \d+ bytes of memory"):
        convert(pickled)
    (pickled / "adapter_model.bin").write_bytes(b"".join(legacy) + b"\x80\x02N" + b"q\0" * 5_000_000 + b".")
    with pytest.raises(AdapterInvalid, match=r"cannot be read within 0.2 s"):
        convert(pickled, timeout_s=0.2)
    assert [path.name for path in tmp_path.iterdir()] == ["pickled"]


def after_converting(setup: Any) -> Callable[[Any], Any]:
    """Runs in the child: converts, then tries what its limits forbid."""
    answer = converter.converting(setup)

    def ask(question: Any) -> Any:
        done = answer(question)
        failed: list[str] = []
        for attempt in (socket.socket, lambda: os.open(setup["pickle"], os.O_RDONLY), os.pipe):
            try:
                attempt()
            except OSError as error:
                failed.append(error.__class__.__name__ + str(error.errno))
        return [done, failed]

    return ask


@pytest.mark.slow
def test_nothing_can_be_opened(pickled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = Path(__file__)
    path = (os.environ.get("PYTHONPATH", ""), str(here.parent), str(here.parents[2]))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    setup = {"pickle": str(pickled / "adapter_model.bin"), "out": str(tmp_path / WEIGHTS), "max_bytes": 1 << 30}
    limits = Limits(memory_bytes=1 << 30, stack_bytes=8 << 20, cpu_s=60, file_bytes=1 << 30)
    process = LimitedProcess(f"{here.stem}:after_converting", setup, limits, bare_environment())
    try:
        assert process.call(None, 60.0) == [{"tensors": 28}, ["OSError24"] * 3]
    finally:
        process.close()


def read(path: Path) -> dict[str, Tensor]:
    with path.open("rb") as source:
        return converter.read_pickle(source)


def test_cut_short(pickled: Path) -> None:
    """A pickle that is cut short is refused. It is read in this process, as nothing here gets as far as an object."""
    weights = pickled / "adapter_model.bin"
    whole = weights.read_bytes()
    for num_bytes in (0, 1, 100, len(whole) // 2, len(whole) - 1):
        weights.write_bytes(whole[:num_bytes])
        with pytest.raises(converter.Refused, match="cut short, damaged"):
            read(weights)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("protocol", [3, 4])
def test_other_protocols_of_pickle(protocol: int, tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1)}, tmp_path / "x.bin", pickle_protocol=protocol)
    if protocol == 3:
        assert read(tmp_path / "x.bin") == {"a": torch.ones(1)}
    else:
        with pytest.raises(converter.Refused, match="is a pickle of protocol 4 or above"):
            read(tmp_path / "x.bin")


WRONG: dict[str, tuple[object, str]] = {
    "list": ([torch.zeros(1)], "does not hold a dict"),
    "nested": ({"state_dict": {"a": torch.zeros(1)}, "epoch": 3}, "holds 'state_dict', which is a dict"),
    "empty": ({"state_dict": {}}, "does not hold a dict"),
    "number": ({"a": 1}, "holds 'a', which is a int"),
    "key": ({1: torch.zeros(1)}, "the key 1"),
    "sparse": ({"a": torch.zeros(2, 2).to_sparse()}, "sparse"),
    "complex": ({"a": torch.zeros(1, dtype=torch.complex64)}, "torch.complex64"),
    "expanded": ({"a": torch.zeros(1).expand(1 << 40)}, "more elements than the file gives it"),
}


@pytest.mark.parametrize(("content", "says"), WRONG.values(), ids=WRONG)
def test_what_safetensors_cannot_hold(content: object, says: str, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "x.bin")
    with pytest.raises(converter.Refused, match=says):
        read(tmp_path / "x.bin")


def test_tensors_that_share_memory(tmp_path: Path) -> None:
    """Tensors that share memory, as Medusa's reference code writes them: each name gets a copy, within the bound."""
    shared = torch.arange(12.0).view(3, 4)
    torch.save(
        {"a": shared, "b": shared.T, "c": torch.nn.Parameter(shared[1]), "d": torch.tensor(True)}, tmp_path / "x"
    )
    for is_zip in (True, False):
        tensors = read(tmp_path / "x")
        torch.save(tensors, tmp_path / "x", _use_new_zipfile_serialization=is_zip)
    with (tmp_path / "y").open("wb") as out:
        converter.write_safetensors(tensors, out, 1 << 20)
    made = load_file(tmp_path / "y")
    assert torch.equal(made["b"], shared.T)
    assert torch.equal(made["c"], shared[1])
    assert made["d"].item() is True
    with (tmp_path / "z").open("wb") as out, pytest.raises(converter.Refused, match="113 bytes; at most 100"):
        converter.write_safetensors(tensors, out, 100)


def test_medusa_heads(tmp_path: Path) -> None:
    """The reference code's pickle, whose layers are one module, as a checkpoint of a trainer."""
    torch.save({"state_dict": sequential_tensors(2, 1, VOCAB)}, tmp_path / "medusa_lm_head.pt")
    folder = write_heads(tmp_path / "x", {})
    with (folder / "medusa_lm_head.safetensors").open("wb") as out:
        converter.write_safetensors(read(tmp_path / "medusa_lm_head.pt"), out, 1 << 20)
    assert len(load(DirectorySource(tmp_path), "x", base_targets(), tmp_path / "store")[1].heads) == 2


def test_medusa_heads_as_vllm_lays_them_out(tmp_path: Path) -> None:
    folder = tmp_path / "pickled"
    folder.mkdir()
    torch.save(vllm_tensors(2), folder / "pytorch_model.bin")
    (folder / "config.json").write_text(json.dumps(vllm_config(2)))
    convert(folder)
    assert len(load(DirectorySource(tmp_path), "converted", base_targets(), tmp_path / "store")[1].heads) == 2


@pytest.mark.parametrize("name", ["adapter_model.bin", "pytorch_model.bin"])
def test_neither_a_lora_nor_heads(pickled: Path, name: str) -> None:
    (pickled / "adapter_config.json").unlink()
    (pickled / "config.json").write_text(json.dumps(base_config()))
    (pickled / "adapter_model.bin").rename(pickled / name)
    with pytest.raises(AdapterInvalid, match=rf"{name} is neither .* no adapter_config.json beside it"):
        convert(pickled)


def test_nothing_to_convert(pickled: Path, tmp_path: Path) -> None:
    (pickled / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(AdapterInvalid, match=r"adapter_model.bin and pytorch_model.bin"):
        convert(pickled)
    (pickled / WEIGHTS).write_bytes(b"")
    with pytest.raises(AdapterInvalid, match="there is no pickle to convert"):
        convert(pickled)
    with pytest.raises(InvalidArgument, match="is not a folder"):
        convert_adapter(pickled, tmp_path / "none" / "out", progress=lambda text: nullcontext())
    with pytest.raises(AdapterInvalid, match="at most 10 are read"):
        (pickled / WEIGHTS).unlink()
        (pickled / "pytorch_model.bin").unlink()
        convert(pickled, max_bytes=10)
