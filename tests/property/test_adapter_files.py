"""Fuzz tests of adapter files: each is read, or refused with a typed error."""

from __future__ import annotations

import copy
import json
import random
import shutil
import struct
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import BOFTConfig, IA3Config, LoHaConfig, LoKrConfig, LoraConfig, OFTConfig, PeftConfig, VeraConfig
from support.dense import make_dense
from support.peft_files import load_lora, save_variant
from support.zoo import random_model

from loraplex_adapters.weights import BaseTargets
from loraplex_contracts.errors import Code, LoraplexError
from loraplex_server.model.loader import adopt_model

LINEARS = ["q_proj", "down_proj"]
FORMATS: tuple[PeftConfig, ...] = (
    LoraConfig(r=4, target_modules=LINEARS, rank_pattern={"q_proj": 2}, alpha_pattern={".*down_proj": 3}),
    LoraConfig(r=4, target_modules=[*LINEARS, "embed_tokens"], use_dora=True),
    LoraConfig(r=4, target_modules=LINEARS, lora_bias=True),
    LoraConfig(r=2, target_modules=LINEARS, modules_to_save=["lm_head", "norm"]),
    LoraConfig(r=2, target_modules=LINEARS, trainable_token_indices=[3, 5, 17]),
    LoraConfig(r=2, target_modules=LINEARS, task_type="CAUSAL_LM", alora_invocation_tokens=[3, 5]),
    LoraConfig(r=2, target_modules=["gate"], target_parameters=["mlp.experts.gate_up_proj"]),
    VeraConfig(r=8, target_modules=LINEARS),
    LoHaConfig(r=2, target_modules=LINEARS),
    LoKrConfig(r=2, target_modules=LINEARS, decompose_factor=4),
    IA3Config(target_modules=LINEARS, feedforward_modules=["down_proj"]),
    OFTConfig(oft_block_size=8, target_modules=LINEARS),
    BOFTConfig(boft_block_size=8, target_modules=LINEARS),
)
FAMILIES = ("qwen3_moe", "llama")  # a mixture of experts, and a dense one: the first that has all modules
# What a field may be instead.
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 3, 1 << 31, 1 << 64, -(1 << 70), 0.5, -0.0, 1e308, 1e-320, float("nan"), float("inf"),
    "", "x", "q_proj", "all-linear", ".*", "(a+)+$", "(((a{99}){99}){99}){99}", "\x00", "\ud800", "../..", "é" * 300,
    [], [None], ["q_proj"], [[]], [1 << 40], [-1], ["(((("], [0.5], {}, {"q_proj": 3}, {"": ""}, {"(": 1}, {"x": {}},
    {"q_proj": -1}, {"q_proj": 1 << 40}, {"q_proj": None},
)  # fmt: skip
DTYPES = ("F64", "F32", "F16", "BF16", "I64", "I8", "BOOL", "F8_E4M3", "U16", "X", "", None, 1)
REFUSALS = {Code.FAILED_PRECONDITION, Code.RESOURCE_EXHAUSTED}
LONGEST_S = 5.0


@dataclass(frozen=True)
class Seed:
    """A whole adapter's two files."""

    config: dict[str, Any]
    header: dict[str, Any]
    data: bytes
    targets: BaseTargets


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> list[Seed]:
    root = tmp_path_factory.mktemp("seeds")
    found: list[Seed] = []
    models = {family: make_dense(random_model(family, torch.float64)) for family in FAMILIES}
    targets = {family: adopt_model(copy.deepcopy(model)).base_targets(max_rank=64) for family, model in models.items()}
    for index, config in enumerate(FORMATS):
        is_sparse = getattr(config, "target_parameters", None)
        family = "qwen3_moe" if is_sparse else "llama"
        folder = root / str(index)
        save_variant(models[family], config, folder)
        raw = (folder / "adapter_model.safetensors").read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        load_lora(root, str(index), targets[family])  # as it is, it is served
        found.append(
            Seed(
                json.loads((folder / "adapter_config.json").read_bytes()),
                json.loads(raw[8 : 8 + length]),
                raw[8 + length :],
                targets[family],
            )
        )
    return found


def spoil_config(dice: random.Random, config: dict[str, Any]) -> None:
    name = dice.choice(sorted(config))
    match dice.randrange(4):
        case 0:
            del config[name]
        case 1:
            config[dice.choice(("use_dora", "r", "layer_replication", "x" * 50, "\x00"))] = dice.choice(VALUES)
        case 2:
            config[name] = [config[name]] * dice.choice((1, 2, 2000))
        case _:
            config[name] = dice.choice(VALUES)


def is_whole(tensor: Any) -> bool:
    """True if the tensor's entry was not spoiled before."""
    lists = (tensor.get("shape"), tensor.get("data_offsets")) if isinstance(tensor, dict) else (None,)
    return all(isinstance(one, list) and all(isinstance(each, int) for each in one) for one in lists)


def spoil_header(dice: random.Random, header: dict[str, Any]) -> None:
    names = sorted(name for name, one in header.items() if is_whole(one))
    if not names:
        return
    name = dice.choice(names)
    tensor = header[name]
    match dice.randrange(9):
        case 0:
            del header[name]
        case 1:
            header[_other_name(dice, name, names)] = header.pop(name)
        case 2:
            header[_other_name(dice, name, names)] = copy.deepcopy(tensor)
        case 3:
            tensor["dtype"] = dice.choice(DTYPES)
        case 4:
            tensor["shape"] = dice.choice(
                ([], [0], [1 << 62], [1 << 32, 1 << 32], [-1], [-1, -64], tensor["shape"][::-1], ["4"], None, [2.0])
            )
        case 5:
            tensor["data_offsets"] = dice.choice(([0, 0], [0, 1 << 63], [-8, 8], [8, 0], [0], None, [0.0, 8], "x"))
        case 6:
            tensor["data_offsets"] = [at + dice.randrange(-9, 9) for at in tensor["data_offsets"]]
        case 7:
            header[name] = dice.choice(VALUES)
        case _:
            header["__metadata__"] = dice.choice(VALUES)


def _other_name(dice: random.Random, name: str, names: list[str]) -> str:
    parts = name.split(".")
    at = dice.randrange(len(parts))
    other = dice.choice(("", "x", "7", "-1", "999999999999", "lora_A", "base_layer", "weight", "bias", "é", "\x00"))
    return dice.choice((".".join((*parts[:at], other, *parts[at + 1 :])), name * 40, name[:-1], dice.choice(names)))


def spoil_bytes(dice: random.Random, raw: bytes) -> bytes:
    found = bytearray(raw)
    match dice.randrange(5):
        case 0:
            return bytes(found[: dice.randrange(len(found) + 1)])
        case 1:
            found[:8] = struct.pack("<Q", dice.choice((0, 1, len(found), 1 << 40, (1 << 64) - 1)))
        case 2:
            return bytes(found) + bytes(dice.randrange(1, 9))
        case 3:
            for _ in range(dice.randrange(1, 9)):
                found[dice.randrange(len(found))] = dice.randrange(256)
        case _:
            at = dice.randrange(len(found))
            found[at : at + dice.randrange(64)] = b""
    return bytes(found)


def write(dice: random.Random, seed: Seed, folder: Path) -> None:
    config, header = copy.deepcopy(seed.config), copy.deepcopy(seed.header)
    spoil: list[Callable[[], None]] = [lambda: spoil_config(dice, config), lambda: spoil_header(dice, header)]
    for _ in range(dice.choice((0, 1, 1, 1, 2, 3))):
        dice.choice(spoil)()
    text = json.dumps(header).encode()
    raw = struct.pack("<Q", len(text)) + text + seed.data
    written = json.dumps(config).encode()
    if dice.random() < 0.2:
        raw = spoil_bytes(dice, raw)
    if dice.random() < 0.1:
        written = spoil_bytes(dice, written)
    folder.mkdir()
    (folder / "adapter_config.json").write_bytes(written)
    (folder / "adapter_model.safetensors").write_bytes(raw)


def refusal_of(root: Path, name: str, targets: BaseTargets, number: int) -> LoraplexError | None:
    try:
        load_lora(root, name, targets)
    except LoraplexError as error:
        return error
    except Exception as error:
        raise AssertionError(f"files of seed {number}") from error
    return None


@pytest.mark.parametrize("seconds", [2, pytest.param(60, marks=[pytest.mark.slow, pytest.mark.timeout(300)])])
def test_any_file_is_read_or_refused(seeds: list[Seed], seconds: float, tmp_path: Path) -> None:
    end_s = time.monotonic() + seconds
    outcomes: Counter[str] = Counter()
    number = 0
    while time.monotonic() < end_s:
        number += 1
        dice = random.Random(number)
        name = f"a{number}"
        seed = dice.choice(seeds)
        write(dice, seed, tmp_path / name)
        start_s = time.monotonic()
        refusal = refusal_of(tmp_path, name, seed.targets, number)
        if refusal is None:
            outcomes["read"] += 1
        else:
            assert refusal.code in REFUSALS, (number, refusal.reason, refusal.message)
            assert refusal.message.isascii(), number
            assert len(refusal.message) < 1000, number
            assert str(tmp_path) not in refusal.message, number
            outcomes[refusal.reason] += 1
        assert time.monotonic() - start_s < LONGEST_S, number
        shutil.rmtree(tmp_path / name)
    print(f"{number} adapters: {dict(outcomes)}")
    assert outcomes["read"], outcomes
    assert outcomes["ADAPTER_INVALID"], outcomes
