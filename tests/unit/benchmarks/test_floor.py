"""The roofline."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from floor import Machine, Meter, ModelSize, floor_tokens_per_s, measure_size
from safetensors.torch import save_file
from workloads import WorkItem

SIZE = ModelSize(num_weights=1000, num_head_weights=200, num_adapter_weights=50)
ENDLESS = 1e30


def items(num: int, *adapters: str) -> list[WorkItem]:
    return [WorkItem((1,) * 10, 11, adapters[n] if adapters else "") for n in range(num)]


def test_decoding_reads_the_weights_once_per_step() -> None:
    machine = Machine(read_bytes_per_s=2000.0, gemm_flops_per_s=ENDLESS)
    assert floor_tokens_per_s(machine, SIZE, items(1)) == pytest.approx(11 / 10)
    assert floor_tokens_per_s(machine, SIZE, items(4)) == pytest.approx(44 / 10)


def test_distinct_adapters_are_read_as_well() -> None:
    machine = Machine(read_bytes_per_s=2000.0, gemm_flops_per_s=ENDLESS)
    assert floor_tokens_per_s(machine, SIZE, items(2, "a", "b")) == pytest.approx(22 / (10 * 1.1))
    assert floor_tokens_per_s(machine, SIZE, items(2, "a", "a")) == pytest.approx(22 / (10 * 1.05))


def test_products_count_where_they_take_longer() -> None:
    machine = Machine(read_bytes_per_s=ENDLESS, gemm_flops_per_s=2000.0)
    prefill_s = 10 * 0.8 + 0.2  # the output layer for the last token only
    assert floor_tokens_per_s(machine, SIZE, items(1)) == pytest.approx(11 / (prefill_s + 10 * 1.0))


def test_adapters_multiply_too() -> None:
    machine = Machine(read_bytes_per_s=ENDLESS, gemm_flops_per_s=2000.0)
    prefill_s = 10 * 0.85 + 0.2
    assert floor_tokens_per_s(machine, SIZE, items(1, "a")) == pytest.approx(11 / (prefill_s + 10 * 1.05))


def test_a_step_reads_the_experts_of_its_rows() -> None:
    """Four rows of half the experts each: a sixteenth is read by nobody."""
    size = ModelSize(1000, 200, 50, num_expert_weights=800, chosen_share=0.5)
    reads = Machine(read_bytes_per_s=2000.0, gemm_flops_per_s=ENDLESS)
    assert floor_tokens_per_s(reads, size, items(1)) == pytest.approx(11 / (10 * 0.6))
    assert floor_tokens_per_s(reads, size, items(4)) == pytest.approx(44 / (10 * 0.95))
    multiplies = Machine(read_bytes_per_s=ENDLESS, gemm_flops_per_s=2000.0)
    assert floor_tokens_per_s(multiplies, size, items(1)) == pytest.approx(11 / (10 * 0.4 + 0.2 + 10 * 0.6))


def save(folder: Path, **shapes: tuple[int, ...]) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"num_local_experts": 4, "num_experts_per_tok": 1}')
    tensors = {name.replace("__", "."): torch.zeros(shape) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")


def test_sizes_come_from_the_files(tmp_path: Path) -> None:
    save(tmp_path / "model", embed_tokens__weight=(10, 4), a__weight=(4, 4), norm=(4,), lm_head__weight=(10, 4))
    save(tmp_path / "adapters/x", a=(2, 4), b=(4, 2))
    save(tmp_path / "adapters/y", a=(4, 4), b=(4, 4))
    assert measure_size(tmp_path) == ModelSize(16 + 40, 40, 24, 0, 0.25)


def test_a_tied_embedding_is_the_output_layer(tmp_path: Path) -> None:
    save(tmp_path / "model", embed_tokens__weight=(10, 4), a__experts__1__weight=(4, 4))
    save(tmp_path / "adapters/x", a=(2, 4))
    assert measure_size(tmp_path) == ModelSize(16 + 40, 40, 8, 16, 0.25)


def test_the_machine_is_measured() -> None:
    meter = Meter(1 << 20)
    for _ in range(2):
        found = meter.measure()
        assert found.read_bytes_per_s > 1e7
        assert found.gemm_flops_per_s > 1e7
    assert len(meter.tries) == 2


def test_a_drifting_machine() -> None:
    tries = [Machine(10.0, 100.0), Machine(12.0, 90.0), Machine(11.0, 80.0)]
    assert Machine.median(tries) == Machine(11.0, 90.0)
    assert Machine.spread(tries) == pytest.approx(20 / 90)
