"""Paired benchmark: two engines in one process take steps in turn.

    python benchmarks/paired.py IN_DIR CASE [WORKLOAD ...] [--output 256] [--rounds 3] [--isa avx2]

unused  LoRA switched on, but no request asks for an adapter, against an engine without adapters; default: base-8.
ranks   adapters of ranks 8, 8, 16, 32 against adapters that are all of rank 16; default: distinct-8.
int8    weights in few bits, against those of the checkpoint; default: base-1. The ratio of medians is that of decode
int4    steps, most of the steps there are.
beyond  the last request's adapter has DoRA, biases, saved norms, a saved head or saved linears (q_proj), or is an IA3
        or an OFT, against one that has low-rank terms alone like all others; default: distinct-8, and all kinds. A step
        is as long for its neighbours as for it.

On a machine that others use too, runs one after the other, and processes of the same code, differ by more than what is
looked for here; of two steps that follow each other both are disturbed alike. Prints one JSON line per workload: how
fast the second engine is beside the first. IN_DIR as `serving.py make` leaves it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from inprocess import build
from isa import ISAS, limit_environment, use_isa
from results import add_json_option, recording
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from workloads import read_workload

from loraplex_contracts.adapters import AdapterId
from loraplex_contracts.request import CompletionEnd, Request, RequestFailed, StoppingParams, Tokens
from loraplex_server.engine.engine import Engine
from loraplex_server.engine.pipe import Submit

WARM_TOKENS = 24
BEYOND = ("dora", "biases", "norms", "head", "linears", "ia3", "oft")  # than low-rank terms
SAVED = {"norms": "norm", "head": "lm_head.", "linears": ".q_proj."}  # parts of parameters' names
OFT_BLOCK = 32


@dataclass(frozen=True, slots=True)
class Variant:
    """The settings of an engine."""

    lora: bool = True
    adapters: str = "."  # the folder in IN_DIR
    flags: tuple[str, ...] = ()


# What is compared, by name: the default workload, the first engine and the second.
CASES = {
    "unused": ("base-8", Variant(lora=False), Variant()),
    "ranks": ("distinct-8", Variant(), Variant(adapters="mixed-ranks")),
    "beyond": ("distinct-8", Variant(), Variant()),
    "int8": ("base-1", Variant(), Variant(flags=("--quantize", "int8"))),
    "int4": ("base-1", Variant(), Variant(flags=("--quantize", "int4"))),
}


@dataclass
class Side:
    """One engine, and its steps."""

    engine: Engine
    num_open: int = 0
    num_drafted: int = 0
    times_s: list[float] = field(default_factory=list[float])

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.engine.handle(Submit(request))
        self.num_open = len(requests)

    def step(self) -> None:
        start_s = time.perf_counter()
        batch = self.engine.turn()
        self.times_s.append(time.perf_counter() - start_s)
        for event in batch.events if batch is not None else ():
            if isinstance(event, RequestFailed):
                raise SystemExit(f"{event.request_id}: {event.error}")
            if isinstance(event, Tokens):
                self.num_drafted += event.num_drafted
            self.num_open -= isinstance(event, CompletionEnd)


def forget(*sides: Side) -> None:
    """Clears the counts of these sides."""
    for side in sides:
        side.times_s.clear()
        side.num_drafted = 0


def run(first: Side, second: Side) -> None:
    """Runs both until each has ended its requests."""
    sides = first, second
    while any(side.num_open for side in sides):
        sides = sides[1], sides[0]  # the second finds other things in the caches
        for side in sides:
            if side.num_open:
                side.step()


def ratios(first: Side, second: Side) -> dict[str, object]:
    """Ratios of speed, the second side over the first: above 1 the second is faster."""
    medians = [statistics.median(side.times_s) for side in (first, second)]
    return {
        "ratio": round(sum(first.times_s) / sum(second.times_s), 3),
        "median_step_ms": [round(1000 * median, 2) for median in medians],
        "ratio_of_medians": round(medians[0] / medians[1], 3),
    }


# --- adapters ---------------------------------------------------------------------------------------------------------


def requests(inputs: Path, workload: str, tag: str, max_tokens: int, last: str = "") -> list[Request]:
    """Requests of a workload. `last`: the adapter of the last one, in the place of its own."""
    stopping = StoppingParams(max_tokens=max_tokens, ignore_eos=True)
    items = read_workload(inputs, workload)
    ids = [*(item.adapter_id for item in items[:-1]), last or items[-1].adapter_id]
    return [
        Request(f"{tag}-{idx}", item.prompt_ids, stopping, adapter_id=AdapterId(adapter_id))
        for idx, (item, adapter_id) in enumerate(zip(items, ids, strict=True))
    ]


def with_more_than_low_rank(inputs: Path, folder: Path) -> Path:
    """The inputs with an adapter of each kind in BEYOND beside the others, whose files are linked."""
    for name in ("model", "workloads"):
        (folder / name).symlink_to((inputs / name).absolute())
    shutil.copytree(inputs / "adapters", folder / "adapters", copy_function=os.link)
    source = min((inputs / "adapters").iterdir())
    config = json.loads((source / "adapter_config.json").read_text())
    factors = load_file(source / "adapter_model.safetensors")
    with safe_open(inputs / "model" / "model.safetensors", "pt") as model:
        base = {name: model.get_tensor(name) for name in model.keys()}  # noqa: SIM118
    for kind in BEYOND:
        fields, tensors = of_kind(kind, config, factors, base)
        target = folder / "adapters" / f"with-{kind}"  # behind those that workloads count
        target.mkdir()
        (target / "adapter_config.json").write_text(json.dumps(fields))
        save_file(tensors, target / "adapter_model.safetensors")
    return folder


def of_kind(
    kind: str, config: dict[str, Any], factors: dict[str, Tensor], base: dict[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """An adapter's configuration and tensors, made of those of a plain LoRA and the base model's."""
    paths = sorted({name.rsplit(".lora_", 1)[0] for name in factors})
    weights = {path: base[f"{path.removeprefix('base_model.model.')}.weight"] for path in paths}
    other = {"base_model_name_or_path": config.get("base_model_name_or_path"), "target_modules": "all-linear"}
    if kind == "ia3":
        return {**other, "peft_type": "IA3", "feedforward_modules": ["down_proj"]}, {
            f"{path}.ia3_l": torch.full(
                (1, len(weights[path].T)) if "down_proj" in path else (len(weights[path]), 1), 1.01
            )
            for path in paths
        }
    if kind == "oft":
        values = OFT_BLOCK * (OFT_BLOCK - 1) // 2
        return {**other, "peft_type": "OFT", "oft_block_size": OFT_BLOCK}, {
            f"{path}.oft_R.weight": torch.full((weights[path].shape[1] // OFT_BLOCK, values), 0.001) for path in paths
        }
    if kind in SAVED:
        saved = [name for name in base if SAVED[kind] in name]
        modules = {f"base_model.model.{name.rpartition('.')[0]}" for name in saved}
        kept = {name: factor for name, factor in factors.items() if name.rsplit(".lora_", 1)[0] not in modules}
        more = {f"base_model.model.{name}": base[name] * 1.01 for name in saved}
        return {**config, "modules_to_save": sorted({path.rpartition(".")[2] for path in modules})}, {**kept, **more}
    if kind == "dora":
        more = {f"{path}.lora_magnitude_vector": weights[path].float().norm(dim=1) * 1.01 for path in paths}
    else:
        more = {f"{path}.lora_B.bias": torch.full((len(weights[path]),), 0.001) for path in paths}
    return {**config, "use_dora": kind == "dora", "lora_bias": kind == "biases"}, {**factors, **more}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", type=Path)
    parser.add_argument("what", choices=CASES)
    parser.add_argument("workloads", nargs="*")
    parser.add_argument("--output", type=int, default=256, help="tokens of each request")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", choices=BEYOND, default=BEYOND, help="of the last adapter, for `beyond`")
    parser.add_argument("--isa", choices=ISAS, help="a lesser instruction set than the best")
    add_json_option(parser)
    args = parser.parse_args()
    limit_environment(args.isa)
    use_isa(args.isa)
    folders = [args.inputs / variant.adapters for variant in CASES[args.what][1:]]
    if args.what == "beyond":
        with tempfile.TemporaryDirectory(dir=args.inputs) as folder:  # where files can be linked
            compare(args, [folders[0], with_more_than_low_rank(args.inputs, Path(folder))], args.kinds)
    else:
        compare(args, folders)


def compare(args: argparse.Namespace, folders: Sequence[Path], lasts: Sequence[str] = ("",)) -> None:
    """Prints the rows. `folders`: inputs of the two; `lasts`: kinds of the second one's last adapter."""
    default, *variants = CASES[args.what]
    folder = tempfile.TemporaryDirectory
    with folder() as one, folder() as other, recording(args.json) as record:
        first, second = (
            Side(build(inputs, Path(store), lora=variant.lora, flags=variant.flags))
            for inputs, store, variant in zip(folders, (one, other), variants, strict=True)
        )
        isa = {} if args.isa is None else {"isa": args.isa}
        for workload, last in itertools.product(args.workloads or [default], lasts):
            for number in range(args.rounds + 1):  # the first loads what is asked for, and is not counted
                num_tokens = args.output if number else WARM_TOKENS
                tag = f"{workload}-{last}-{number}"
                first.submit(requests(folders[0], workload, tag, num_tokens))
                second.submit(requests(folders[1], workload, tag, num_tokens, last and f"with-{last}"))
                run(first, second)
                if number == 0:
                    forget(first, second)
            kind = {"last": last} if last else {}
            record({"case": args.what, "workload": workload, **kind, **isa, **ratios(first, second)})
            forget(first, second)
        for side in (first, second):
            side.engine.close()


if __name__ == "__main__":
    main()
