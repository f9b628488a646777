"""Time of a step by kernel name, from torch's profiler."""

from __future__ import annotations

from dataclasses import dataclass

from torch.profiler import ProfilerActivity, profile

from gpu_bench.adapters import choose_slots
from gpu_bench.machine import synchronize
from gpu_bench.stepper import NUM_UNTIMED, Scenario, Stepper
from gpu_bench.steps import BASE

NUM_ROWS = 24
NUM_STEPS = 5
NEEDED_S = 20.0


@dataclass(frozen=True)
class ProfileRow:
    kernel: str
    calls: float  # per step
    us: float  # per step


def profiles(stepper: Stepper) -> dict[str, list[ProfileRow]]:
    """Profiles of steps at the first batch size, without adapters and with one for each request."""
    batch = stepper.shape.batches[0]
    plain: tuple[int | None, ...] = (None,) * batch
    found: dict[str, list[ProfileRow]] = {}
    for scenario in (
        Scenario(BASE, plain, is_installed=False),
        Scenario("distinct", tuple(choose_slots("distinct", batch))),
    ):
        stepper.install(batch if scenario.is_installed else 0)
        found[f"{scenario.name}, batch {batch}"] = _profile(stepper, scenario)
    stepper.install(0)
    return found


def _profile(stepper: Stepper, scenario: Scenario) -> list[ProfileRow]:
    device = stepper.loaded.device
    is_cuda = device.type == "cuda"
    stepper.time_steps(scenario, 1)
    with profile(activities=[ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU]) as found:
        stepper.time_steps(scenario, NUM_STEPS)
        synchronize(device)
    # The untimed steps are in it too; kernels of the entering rows are few.
    num_steps = NUM_STEPS + NUM_UNTIMED
    rows = [
        ProfileRow(
            event.key,
            event.count / num_steps,
            (event.self_device_time_total if is_cuda else event.self_cpu_time_total) / num_steps,
        )
        for event in found.key_averages()
    ]
    return sorted(rows, key=lambda row: -row.us)[:NUM_ROWS]
