"""Hardware floor: a roofline of each workload from measured bandwidth and GEMM rate.

A decode step reads the weights once (an embedding that is no output layer too is not read whole) and those of each
distinct adapter, and multiplies; whichever takes longer counts. Of experts it reads those that its rows go to, if they
are chosen by chance. A prefill multiplies, with the output layer only for the last tokens. Nothing else costs anything.
The bandwidth is that of one kernel of torch, so a system may come out slightly above it. A machine whose speed drifts
is measured between the turns of a comparison: the floor is that of the median, and its spread is told.
"""

from __future__ import annotations

import json
import math
import statistics
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from workloads import WorkItem, read_workload

from loraplex_server.backends.cpu.linear import packed_linear

GEMM_SIZE = 2048
ROW = 1024  # numbers of a row that is read
SERVED_ITEM_BYTES = 2  # bfloat16, whatever an adapter's file has
NUM_TRIES = 4
MOST_BYTES = 1 << 30  # few caches hold a noticeable part of it


@dataclass(frozen=True, slots=True)
class Machine:
    read_bytes_per_s: float
    gemm_flops_per_s: float  # bfloat16

    @staticmethod
    def median(tries: Sequence[Machine]) -> Machine:
        return Machine(
            statistics.median(one.read_bytes_per_s for one in tries),
            statistics.median(one.gemm_flops_per_s for one in tries),
        )

    @staticmethod
    def spread(tries: Sequence[Machine]) -> float:
        """The larger of bandwidth's and rate's: from the least to the most, as a part of the median."""
        median = Machine.median(tries)
        reads, rates = [one.read_bytes_per_s for one in tries], [one.gemm_flops_per_s for one in tries]
        return max(
            (max(reads) - min(reads)) / median.read_bytes_per_s, (max(rates) - min(rates)) / median.gemm_flops_per_s
        )


@dataclass(frozen=True, slots=True)
class ModelSize:
    num_weights: int  # that a step multiplies with
    num_head_weights: int  # of these, the output layer's
    num_adapter_weights: int  # the mean over the adapters
    num_expert_weights: int = 0  # of these, experts', of all of them
    chosen_share: float = 1.0  # the part of the experts that a token goes to

    @property
    def num_bytes(self) -> int:
        return self.num_weights * SERVED_ITEM_BYTES

    def bytes_read(self, num_rows: int) -> float:
        """Bytes of the weights that a step of so many rows reads."""
        unread = self.num_expert_weights * (1 - self.chosen_share) ** num_rows
        return self.num_bytes - unread * SERVED_ITEM_BYTES

    @property
    def weights_of_a_token(self) -> float:
        """The number of weights that a token is multiplied with."""
        return self.num_weights - (1 - self.chosen_share) * self.num_expert_weights


def floor_tokens_per_s(machine: Machine, size: ModelSize, items: list[WorkItem]) -> float:
    """Output tokens per second of such a machine, for requests of equal length that come at once."""
    num_adapters = len({item.adapter_id for item in items} - {""})
    prefill_flops, step_flops = 0.0, 0.0
    for item in items:
        num_weights = size.weights_of_a_token + (size.num_adapter_weights if item.adapter_id else 0)
        step_flops += 2 * num_weights
        prefill_flops += 2 * (len(item.prompt_ids) * (num_weights - size.num_head_weights) + size.num_head_weights)
    prefill_s = prefill_flops / machine.gemm_flops_per_s
    adapter_bytes = num_adapters * size.num_adapter_weights * SERVED_ITEM_BYTES
    step_bytes = size.bytes_read(len(items)) + adapter_bytes
    step_s = max(step_bytes / machine.read_bytes_per_s, step_flops / machine.gemm_flops_per_s)
    num_steps = max(item.max_tokens for item in items) - 1  # the first token comes from the prefill
    return sum(item.max_tokens for item in items) / (prefill_s + num_steps * step_s)


def floors(machine: Machine, inputs: Path, workloads: list[str]) -> dict[str, float]:
    size = measure_size(inputs)
    return {name: floor_tokens_per_s(machine, size, read_workload(inputs, name)) for name in workloads}


# --- measuring --------------------------------------------------------------------------------------------------------


class Meter:
    """Measures the machine again and again, between the turns of what it is compared with."""

    def __init__(self, num_bytes: int) -> None:
        """`num_bytes`: as large as the weights are, so that caches help as much as they may; of large ones a part."""
        self.tries: list[Machine] = []
        self._matrix = torch.ones(max(1, min(num_bytes, MOST_BYTES) // 4 // ROW), ROW)  # float32
        self._vector = torch.ones(ROW)
        # Without instructions for bfloat16 a CPU multiplies it as float32, and torch takes 50 times as long over it.
        dtype = torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32
        self._x = torch.randn(GEMM_SIZE, GEMM_SIZE).to(dtype)
        self._linear = packed_linear(torch.randn(GEMM_SIZE, GEMM_SIZE).to(dtype), None)

    def measure(self) -> Machine:
        """The best of a few tries, which take some tenths of a second."""
        with torch.inference_mode():
            # Which of the two reads faster depends on the processor.
            read_s = min(_best_s(lambda: self._matrix @ self._vector), _best_s(lambda: self._matrix.sum()))
            gemm_s = _best_s(lambda: self._linear(self._x))
        self.tries.append(Machine(self._matrix.nbytes / read_s, 2 * GEMM_SIZE**3 / gemm_s))
        return self.tries[-1]


def _best_s(action: Callable[[], object]) -> float:
    best = math.inf
    for _ in range(NUM_TRIES):
        start = time.perf_counter()
        action()
        best = min(best, time.perf_counter() - start)
    return best


def measure_size(inputs: Path) -> ModelSize:
    """The model's size from the headers of its files; no weight is read."""
    shapes = _shapes(inputs / "model")
    matrices = {name: math.prod(shape) for name, shape in shapes.items() if len(shape) == 2}
    embedding = sum(num for name, num in matrices.items() if "embed_tokens" in name)
    head = sum(num for name, num in matrices.items() if "lm_head" in name)
    num_weights = sum(matrices.values()) - (embedding if head else 0)  # tied: the embedding is the output layer
    adapters = [sum(map(math.prod, _shapes(path).values())) for path in sorted((inputs / "adapters").iterdir())]
    experts = sum(num for name, num in matrices.items() if ".experts." in name)
    return ModelSize(
        num_weights, head or embedding, sum(adapters) // max(1, len(adapters)), experts, _chosen_share(inputs / "model")
    )


def _chosen_share(model: Path) -> float:
    config = json.loads((model / "config.json").read_bytes())
    num_experts = config.get("num_experts") or config.get("num_local_experts")
    return config["num_experts_per_tok"] / num_experts if num_experts else 1.0


def _shapes(folder: Path) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            (header_bytes,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(header_bytes))
        found |= {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}
    return found
