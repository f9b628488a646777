"""Liveness, readiness, and watches that end."""

from __future__ import annotations

import asyncio
from typing import Any

from grpc_health.v1 import health_pb2

from loraplex_runtime.health import NOT_SERVING, SERVICE_UNKNOWN, SERVING, Health

NAME = "loraplex.v1.InferenceService"


def request(service: str) -> Any:
    return health_pb2.HealthCheckRequest(service=service)


async def check(health: Health, service: str) -> Any:
    return (await health.Check(request(service), None)).status


async def test_readiness_follows_and_liveness_stays() -> None:
    health = Health((NAME,))
    assert await check(health, "") == SERVING
    assert await check(health, NAME) == NOT_SERVING
    health.set_ready(True)
    assert await check(health, NAME) == SERVING
    health.set_ready(False)
    assert await check(health, NAME) == NOT_SERVING
    assert await check(health, "") == SERVING


async def test_draining_is_final() -> None:
    health = Health((NAME,))
    health.set_ready(True)
    health.begin_drain()
    health.set_ready(True)
    assert await check(health, "") == NOT_SERVING
    assert await check(health, NAME) == NOT_SERVING


async def test_a_watch_tells_every_change_and_ends() -> None:
    health = Health((NAME,))
    seen: list[Any] = []
    told = asyncio.Event()

    async def watch() -> None:
        async for answer in health.Watch(request(NAME), None):
            seen.append(answer.status)
            told.set()

    task = asyncio.create_task(watch())
    for change in (lambda: None, lambda: health.set_ready(True), health.begin_drain):
        change()
        await told.wait()
        told.clear()
    assert seen == [NOT_SERVING, SERVING, NOT_SERVING]
    health.end_watches()
    await task
    assert len(seen) == 3


async def test_a_watch_of_an_unknown_service_waits() -> None:
    health = Health((NAME,))
    watch = health.Watch(request("nobody"), None)
    assert (await anext(watch)).status == SERVICE_UNKNOWN
    health.end_watches()
    assert [answer async for answer in watch] == []
