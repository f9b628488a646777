"""Paged listings while adapters come, go and change."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st
from support.listings import ListingWorker, Response, info, names_of

from loraplex_proto.paging import ListQuery, list_query
from loraplex_proto.v1 import adapter_pb2
from loraplex_router.adapters import MergedListing
from loraplex_runtime.auth import EVERYBODY

NAMES = [f"{org}{number}" for org in ("a", "b/", "c") for number in range(5)]
NAME = st.sampled_from(NAMES)
STATE = st.sampled_from(["on_device", "on_host", "draining", "failed", "fetching"])
# What happens between two pages, at which worker: a folder comes or goes, the engine says something of a name.
CHANGE = st.tuples(st.integers(0, 2), st.sampled_from(["folder", "no folder", "row", "no row"]), NAME, STATE)
CHANGES = st.lists(st.lists(CHANGE, max_size=6), max_size=12)


def apply(worker: ListingWorker, what: str, name: str, state: str) -> None:
    match what:
        case "folder":
            worker.source.names = sorted({*worker.source.names, name})
        case "no folder":
            worker.source.names = [one for one in worker.source.names if one != name]
        case "row":
            worker.put(info(name, state, "source" if state in ("failed", "fetching") else "host"))  # type: ignore[arg-type]
        case _:
            worker.drop(name)


def listed(worker: ListingWorker) -> set[str]:
    return {*worker.source.names, *(row.adapter_id for row in worker.held.rows())}


def runs(names: Sequence[str]) -> list[str]:
    """Each name once for all its rows that come one after the other."""
    return [name for place, name in enumerate(names) if place == 0 or names[place - 1] != name]


@given(st.sets(NAME), CHANGES, st.integers(1, 4))
@settings(max_examples=150, deadline=None)
def test_one_worker(found: set[str], changes: list[list[tuple[int, str, str, str]]], page_size: int) -> None:
    asyncio.run(walk_one(found, changes, page_size))


async def walk_one(found: set[str], changes: list[list[tuple[int, str, str, str]]], page_size: int) -> None:
    worker = ListingWorker(found)
    always, pending, pages, token = listed(worker), list(changes), list[Response](), ""
    while True:
        pages.append(await worker.ask(include_unloaded=True, page_size=page_size, page_token=token))
        assert len(set(names_of(pages[-1]))) <= page_size
        token = pages[-1].next_page_token
        if not token:
            break
        assert len(set(names_of(pages[-1]))) == page_size, "a page with another behind it is full"
        for _, what, name, state in pending.pop(0) if pending else []:
            apply(worker, what, name, state)
            always &= listed(worker)
    names = runs(names_of(*pages))
    assert names == sorted(set(names)), "in order, nobody twice"
    assert always <= set(names)


@given(
    st.lists(st.sets(NAME), min_size=3, max_size=3),
    CHANGES,
    st.lists(st.sets(st.integers(0, 2), min_size=1), min_size=1, max_size=6),
    st.integers(0, 4),
)
@settings(max_examples=150, deadline=None)
def test_workers_that_come_and_go(
    found: list[set[str]], changes: list[list[tuple[int, str, str, str]]], present: list[set[int]], page_size: int
) -> None:
    asyncio.run(walk_merged(found, changes, present, page_size))


async def walk_merged(
    found: list[set[str]], changes: list[list[tuple[int, str, str, str]]], present: list[set[int]], page_size: int
) -> None:
    """A name counts as always there while a worker that is always there lists it."""
    workers, router = [ListingWorker(names) for names in found], MergedListing(max_rows=1, min_page_size=2)
    pending, num_asked = list(changes), 0
    always = [set(NAMES) for _ in workers]

    async def ask(query: ListQuery) -> list[Response]:
        nonlocal num_asked
        responses: list[Response] = []
        for number, worker in enumerate(workers):
            always[number] &= listed(worker) if number in present[num_asked % len(present)] else set()
            if number in present[num_asked % len(present)]:
                response = await worker.ask(**fields_of(query))
                for row in response.adapters:
                    row.worker = f"w{number}"
                responses.append(response)
        num_asked += 1
        for number, what, name, state in pending.pop(0) if pending else []:
            apply(workers[number], what, name, state)
        return responses

    pages, token = list[Response](), ""
    while not pages or token:
        request = adapter_pb2.ListAdaptersRequest(include_unloaded=True, page_size=page_size, page_token=token)
        pages.append(await router.page(list_query(request), EVERYBODY, 3, ask))
        token = pages[-1].next_page_token
    rows = [(row.adapter_id, row.worker) for page in pages for row in page.adapters]
    assert rows == sorted(rows), "in order of adapters, then of workers"
    names = runs([name for name, _ in rows])
    assert names == sorted(set(names)), "nobody on two pages"
    assert set().union(*always) <= set(names)


def fields_of(query: ListQuery) -> dict[str, object]:
    return {field.name: value for field, value in query.request().ListFields()}
