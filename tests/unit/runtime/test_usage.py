"""Usage of adapters and tenants, with a bounded number of names."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from loraplex_contracts.adapters import check_adapter_id, check_id
from loraplex_contracts.errors import AdapterNotFound, InvalidArgument
from loraplex_runtime.metrics import new_registry
from loraplex_runtime.request_record import RequestRecord
from loraplex_runtime.usage import BASE, OTHER, UsageByName, UsageCollector


def record(adapter: str = "sql", code: str = "OK", **fields: Any) -> RequestRecord:
    made = RequestRecord("Generate", "acme", adapter=adapter, num_prompt_tokens=3, num_output_tokens=2)
    made.code = code
    for name, given in fields.items():
        setattr(made, name, given)
    return made


def counts(table: UsageByName) -> dict[str, int]:
    return {name: usage.requests.total() for name, usage in table.items()}


def test_names_beyond_the_limit_are_counted_together() -> None:
    table = UsageByName(max_names=2)
    for name in ("a", "b", "c", "d", "a"):
        table.add(name, record(), is_known=True)
    assert counts(table) == {"a": 2, "b": 1, OTHER: 2}


def test_one_that_is_used_much_more_takes_the_place_of_the_rarest() -> None:
    table = UsageByName(max_names=2)
    for name in ("a", "a", "a", "b"):
        table.add(name, record(), is_known=True)
    for _ in range(5):
        table.add("c", record(), is_known=True)
    # Two went to the others; `b` is gone with its count, so that nothing jumps.
    assert counts(table) == {"a": 3, "c": 3, OTHER: 2}


def test_equally_popular_names_do_not_alternate() -> None:
    table = UsageByName(max_names=4)
    draw = random.Random(0)
    for _ in range(3000):
        table.add(f"n{draw.randrange(8)}", record(), is_known=True)
    assert sum(count > 300 for name, count in counts(table).items() if name != OTHER) == 4


def test_the_popular_ones_of_a_long_tail_have_names() -> None:
    table = UsageByName(max_names=10)
    draw = random.Random(0)
    names = draw.choices(range(1000), [1 / (rank + 1) for rank in range(1000)], k=20_000)
    for name in names:
        table.add(f"n{name}", record(), is_known=True)
    popular = {f"n{name}" for name, _ in Counter(names).most_common(5)}
    assert popular <= set(counts(table))
    assert len(counts(table)) == 11


def test_invented_names_get_no_place() -> None:
    registry = new_registry()
    usage = UsageCollector(registry, "loraplex:")
    for number in range(1000):
        refused = record(f"invented-{number}")
        refused.num_output_tokens = 0
        refused.fail(AdapterNotFound("no"))
        usage.add(refused)
    usage.add(record("sql"))
    usage.add(record(""))
    assert set(counts(usage.adapters)) == {"sql", BASE, OTHER}
    name = "loraplex:adapter_refusals_total"
    assert registry.get_sample_value(name, {"adapter": OTHER, "reason": "ADAPTER_NOT_FOUND"}) == 1000
    # Known by now: its refusals count under its name.
    refused = record("sql", num_output_tokens=0)
    refused.fail(AdapterNotFound("no"))
    usage.add(refused)
    assert registry.get_sample_value(name, {"adapter": "sql", "reason": "ADAPTER_NOT_FOUND"}) == 1


def test_no_name_of_an_adapter_or_tenant_is_that_of_a_sum() -> None:
    registry = new_registry()
    usage = UsageCollector(registry, "loraplex:")
    usage.add(record("other"))
    usage.add(record(""))
    for name in ("invented", "(base)", "(other)"):
        refused = record(name, num_output_tokens=0)
        refused.fail(AdapterNotFound("no"))
        usage.add(refused)
    assert counts(usage.adapters) == {"other": 1, BASE: 1, OTHER: 3}
    shown = [tuple(sample.labels.items()) for family in registry.collect() for sample in family.samples]
    assert ("adapter", "other") in {label for labels in shown for label in labels}
    for name in (BASE, OTHER):
        with pytest.raises(InvalidArgument):
            check_id(name, field="tenant")
        with pytest.raises(InvalidArgument):
            check_adapter_id(name)


def test_an_error_behind_an_answer_is_no_refusal() -> None:
    registry = new_registry()
    usage = UsageCollector(registry, "loraplex:router_")
    broken = record(adapter_digest="d", num_output_tokens=0, first_token_s=0.1)
    broken.code = ""
    broken.fail(AdapterNotFound("no"))
    usage.add(broken)
    assert (
        registry.get_sample_value("loraplex:router_adapter_requests_total", {"adapter": "sql", "code": "NOT_FOUND"})
        == 1
    )
    assert not [one for family in registry.collect() for one in family.samples if "refusals" in one.name]
    assert registry.get_sample_value("loraplex:router_adapter_prompt_tokens_total", {"adapter": "sql"}) == 3


def test_prompts_count_of_what_began_and_not_of_refusals() -> None:
    registry = new_registry()
    usage = UsageCollector(registry, "loraplex:")
    usage.add(record(code="CANCELLED", num_output_tokens=0))
    refused = record(num_output_tokens=0)
    refused.fail(AdapterNotFound("no"))
    usage.add(refused)
    assert registry.get_sample_value("loraplex:tenant_prompt_tokens_total", {"tenant": "acme"}) == 3


def test_a_mean_of_first_tokens_by_name() -> None:
    registry = new_registry()
    usage = UsageCollector(registry, "loraplex:")
    for seconds in (0.1, 0.3, None):
        usage.add(record(first_token_s=seconds))
    name = "loraplex:adapter_time_to_first_token_seconds"
    assert registry.get_sample_value(f"{name}_count", {"adapter": "sql"}) == 2
    assert registry.get_sample_value(f"{name}_sum", {"adapter": "sql"}) == 0.4
